package policy

import (
	"fmt"
	"maps"
	"slices"
	"sync"

	"github.com/google/cel-go/cel"
	"github.com/google/cel-go/checker"
	"github.com/google/cel-go/common/ast"
	"github.com/google/cel-go/common/types"
	"github.com/google/cel-go/common/types/ref"

	"github.com/kinference/kinference/internal/expr"
)

const (
	// maxCost bounds the work of one evaluation, in CEL's own unit, about a
	// comparison each: some tens of microseconds.
	maxCost = 1000
	// typeRequest is the type of the variable `request`.
	typeRequest = "kinference.Request"
	// assumedList is the length that the estimate of an expression's cost takes
	// for lists and maps of a request, and assumedText that of strings.
	assumedList, assumedText = 16, 64
)

// expression is a compiled CEL expression that yields a bool.
type expression struct {
	program   cel.Program
	readsTags bool
	// tags that it reads by name, or "*" for whichever.
	tags []string
	// headers and claims that it reads.
	headers, claims names
}

// subject is what `request` stands for: a request under the assumptions of one
// policy about tags that are unknown.
type subject struct {
	*Request
	assume *assumption
}

// field is a field of the variable `request`.
type field struct {
	kind *types.Type
	get  func(s *subject) any
	set  func(s *subject) bool // for has(); nil: always there
}

// fields of the variable `request`. Names follow CEL's habit.
var fields = map[string]field{
	"id":            {kind: types.StringType, get: func(s *subject) any { return s.ID }},
	"model":         {kind: types.StringType, get: func(s *subject) any { return s.Model }},
	"tenant":        {kind: types.StringType, get: func(s *subject) any { return first(s.Tenants) }, set: func(s *subject) bool { return len(s.Tenants) > 0 }},
	"tenants":       {kind: types.NewListType(types.StringType), get: func(s *subject) any { return s.Tenants }, set: func(s *subject) bool { return len(s.Tenants) > 0 }},
	"qos":           {kind: types.StringType, get: func(s *subject) any { return string(s.QoS) }},
	"prompt_tokens": {kind: types.IntType, get: func(s *subject) any { return int64(s.PromptTokens) }},
	"max_tokens":    {kind: types.IntType, get: func(s *subject) any { return int64(s.MaxTokens) }, set: func(s *subject) bool { return s.MaxTokens > 0 }},
	"endpoint":      {kind: types.StringType, get: func(s *subject) any { return string(s.Endpoint) }},
	"stream":        {kind: types.BoolType, get: func(s *subject) any { return s.Stream }},
	"tools":         {kind: types.NewListType(types.StringType), get: func(s *subject) any { return s.Tools }, set: func(s *subject) bool { return len(s.Tools) > 0 }},
	"headers":       {kind: types.NewMapType(types.StringType, types.StringType), get: func(s *subject) any { return s.Headers }, set: func(s *subject) bool { return len(s.Headers) > 0 }},
	"claims":        {kind: types.NewMapType(types.StringType, types.DynType), get: func(s *subject) any { return s.Claims }, set: func(s *subject) bool { return len(s.Claims) > 0 }},
	"tags":          {kind: types.NewListType(types.StringType), get: func(s *subject) any { return s.Tags.Present }, set: func(s *subject) bool { return len(s.Tags.Present) > 0 }},
}

func first(list []string) string {
	if len(list) == 0 {
		return ""
	}
	return list[0]
}

// provider teaches CEL the type of `request`, so that a wrong field is found
// when the expression is compiled.
type provider struct{ types.Provider }

func (p provider) FindStructType(name string) (*types.Type, bool) {
	if name == typeRequest {
		return types.NewTypeTypeWithParam(types.NewObjectType(typeRequest)), true
	}
	return p.Provider.FindStructType(name)
}

func (p provider) FindStructFieldNames(name string) ([]string, bool) {
	if name != typeRequest {
		return p.Provider.FindStructFieldNames(name)
	}
	var out []string
	for n := range fields {
		out = append(out, n)
	}
	return out, true
}

func (p provider) FindStructFieldType(name, f string) (*types.FieldType, bool) {
	if name != typeRequest {
		return p.Provider.FindStructFieldType(name, f)
	}
	d, ok := fields[f]
	if !ok {
		return nil, false
	}
	return &types.FieldType{
		Type:    d.kind,
		GetFrom: func(target any) (any, error) { return d.get(target.(*subject)), nil },
		IsSet:   func(target any) bool { return d.set == nil || d.set(target.(*subject)) },
	}, true
}

// adapter lets a subject be a CEL value.
type adapter struct{ types.Adapter }

func (a adapter) NativeToValue(v any) ref.Val {
	if s, ok := v.(*subject); ok {
		return value{subject: s, Val: types.NullValue}
	}
	return a.Adapter.NativeToValue(v)
}

// value is a subject as CEL passes it around, to tagged() for instance.
type value struct {
	*subject
	ref.Val
}

func (v value) Type() ref.Type { return types.NewObjectType(typeRequest) }
func (v value) Value() any     { return v.subject }

var environment = sync.OnceValues(func() (*cel.Env, error) {
	registry, err := types.NewRegistry()
	if err != nil {
		return nil, err
	}
	object := types.NewObjectType(typeRequest)
	return cel.NewEnv(
		cel.CustomTypeProvider(provider{registry}), cel.CustomTypeAdapter(adapter{registry}),
		cel.Variable("request", object),
		cel.Function("tagged", cel.MemberOverload("request_tagged_string", []*cel.Type{object, cel.StringType}, cel.BoolType,
			cel.BinaryBinding(func(r, tag ref.Val) ref.Val {
				s, ok := r.Value().(*subject)
				name, isText := tag.Value().(string)
				if !ok || !isText {
					return types.MaybeNoSuchOverloadErr(tag)
				}
				return types.Bool(s.Tags.has(newGlob(name), s.assume))
			}))),
	)
})

// newExpression compiles an expression. The error says what is wrong in words
// for the author of the policy.
func newExpression(text string) (*expression, error) {
	env, err := environment()
	if err != nil {
		return nil, err
	}
	checked, _, err := expr.Check(env, text, vocabulary())
	if err != nil {
		return nil, err
	}
	e := &expression{}
	loops := false
	ast.PostOrderVisit(checked.NativeRep().Expr(), ast.NewExprVisitor(func(x ast.Expr) {
		switch x.Kind() {
		case ast.SelectKind:
			if x.AsSelect().FieldName() == "tags" {
				e.readsTags, e.tags = true, append(e.tags, "*")
			}
		case ast.CallKind:
			if x.AsCall().FunctionName() == "tagged" {
				e.readsTags, e.tags = true, append(e.tags, taggedName(x.AsCall()))
			}
		case ast.ComprehensionKind:
			loops = true
		}
	}))
	e.headers, e.claims = namesIn(checked.NativeRep().Expr(), "headers"), namesIn(checked.NativeRep().Expr(), "claims")
	options := []cel.ProgramOption{cel.EvalOptions(cel.OptOptimize)}
	if loops { // only they can cost more than the estimate; counting has its own cost
		options = append(options, cel.CostLimit(10*maxCost))
	}
	if e.program, err = env.Program(checked, options...); err != nil {
		return nil, fmt.Errorf("CEL: %w", err)
	}
	return e, nil
}

// taggedName is the tag that a call of tagged asks for.
func taggedName(c ast.CallExpr) string {
	if args := c.Args(); len(args) == 1 && args[0].Kind() == ast.LiteralKind {
		if name, ok := args[0].AsLiteral().Value().(string); ok {
			return name
		}
	}
	return "*"
}

// vocabulary is what the expression of a policy may speak of.
var vocabulary = sync.OnceValue(func() *expr.Vocabulary {
	return &expr.Vocabulary{Objects: map[string][]string{"request": slices.Sorted(maps.Keys(fields))}, Sizes: sizes{}, MaxCost: maxCost}
})

// sizes tells the estimate of costs how long things are.
type sizes struct{}

func (sizes) EstimateSize(n checker.AstNode) *checker.SizeEstimate {
	most := uint64(assumedText)
	if k := n.Type().Kind(); k == types.ListKind || k == types.MapKind {
		most = assumedList
	}
	return &checker.SizeEstimate{Max: most}
}

func (sizes) EstimateCallCost(string, string, *checker.AstNode, []checker.AstNode) *checker.CallEstimate {
	return nil
}

// scope binds `request`.
type scope struct{ s *subject }

func (b scope) ResolveName(name string) (any, bool) {
	if name == "request" {
		return b.s, true
	}
	return nil, false
}
func (scope) Parent() cel.Activation { return nil }

func (e *expression) eval(r *Request, a *assumption) (bool, error) {
	out, _, err := e.program.Eval(scope{&subject{r, a}})
	if err != nil {
		return false, err
	}
	b, ok := out.(types.Bool)
	if !ok {
		return false, fmt.Errorf("yields no bool")
	}
	return bool(b), nil
}
