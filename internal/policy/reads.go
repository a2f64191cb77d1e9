package policy

import (
	"slices"

	"github.com/google/cel-go/common/ast"
	"github.com/google/cel-go/common/operators"
	"github.com/google/cel-go/common/types"
)

// Reads are the headers and claims that rules look at, sorted.
type Reads struct {
	Headers, Claims []string
	// OtherHeaders and OtherClaims: a rule reads some by no fixed name.
	OtherHeaders, OtherClaims bool
}

// Reads tells what rules that could match a request for the model look at.
func (s *Set) Reads(model string) Reads {
	var headers, claims names
	for m := range s.matches(model) {
		for i := range m.headers {
			headers.add(m.headers[i].Name)
		}
		for i := range m.claims {
			claims.add(m.claims[i].Name)
		}
		if m.when != nil {
			headers.join(m.when.headers)
			claims.join(m.when.claims)
		}
	}
	slices.Sort(headers.fixed)
	slices.Sort(claims.fixed)
	return Reads{Headers: headers.fixed, Claims: claims.fixed, OtherHeaders: headers.other, OtherClaims: claims.other}
}

// names are entries of a map that something reads.
type names struct {
	fixed []string
	other bool // and some by no fixed name
}

func (n *names) any() bool { return n.other || len(n.fixed) > 0 }

func (n *names) add(name string) {
	if !slices.Contains(n.fixed, name) {
		n.fixed = append(n.fixed, name)
	}
}

func (n *names) join(o names) {
	for _, name := range o.fixed {
		n.add(name)
	}
	n.other = n.other || o.other
}

// namesIn are the entries of a map of the request, such as headers, that an
// expression reads: m["a"], m.a, has(m.a), "a" in m.
func namesIn(x ast.Expr, field string) (out names) {
	named := map[int64]bool{} // uses of the map that are for one name
	is := func(x ast.Expr) bool {
		return x.Kind() == ast.SelectKind && x.AsSelect().FieldName() == field && x.AsSelect().Operand().Kind() == ast.IdentKind
	}
	use := func(m, key ast.Expr) {
		if !is(m) || key.Kind() != ast.LiteralKind {
			return
		}
		if name, ok := key.AsLiteral().(types.String); ok {
			out.add(string(name))
			named[m.ID()] = true
		}
	}
	ast.PreOrderVisit(x, ast.NewExprVisitor(func(x ast.Expr) {
		switch x.Kind() {
		case ast.CallKind:
			if c := x.AsCall(); len(c.Args()) == 2 {
				switch c.FunctionName() {
				case operators.Index:
					use(c.Args()[0], c.Args()[1])
				case operators.In:
					use(c.Args()[1], c.Args()[0])
				}
			}
		case ast.SelectKind:
			s := x.AsSelect()
			if is(s.Operand()) {
				out.add(s.FieldName())
				named[s.Operand().ID()] = true
			}
			if s.FieldName() == field && !named[x.ID()] && !(s.Operand().Kind() == ast.SelectKind) {
				out.other = true
			}
		}
	}))
	return out
}
