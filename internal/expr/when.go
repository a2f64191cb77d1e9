package expr

import (
	"errors"
	"fmt"
	"maps"
	"regexp/syntax"
	"slices"
	"strings"
	"sync"

	"github.com/google/cel-go/cel"
	"github.com/google/cel-go/checker"
	"github.com/google/cel-go/common/ast"
	"github.com/google/cel-go/common/operators"
	"github.com/google/cel-go/common/overloads"
	"github.com/google/cel-go/common/types"
	"github.com/google/cel-go/interpreter"

	"github.com/kinference/kinference/internal/spelling"
)

// Bounds of what a When reads.
const (
	// MaxText is the longest text that part.text holds, in bytes; of a longer
	// one it is unknown.
	MaxText = 4 << 10
	// MaxStart is the length of part.start at most, in bytes.
	MaxStart = 256
	// maxWhenCost bounds one evaluation: 2 milliseconds at the worst.
	maxWhenCost = 20_000
	// stepsPerUnit of a pattern, for each byte of text, are a unit: at most a tenth of a microsecond.
	stepsPerUnit = 32
	// maxLanguages is more than the classifier tells apart.
	maxLanguages = 64
)

// Causes of an unknown outcome, beside those of what was read.
const (
	// CauseError is an evaluation that failed, such as a division by zero.
	CauseError = "rule_error"
	// CauseLimit is one that cost too much.
	CauseLimit = "rule_limit"
)

// Prompt is what `prompt` stands for.
type Prompt struct {
	// Parts and Messages count; Length is in bytes of text.
	Parts, Messages, Length int
	// Languages of the parts, sorted.
	Languages []string
	// LanguageCauses say why Languages may miss some; none: all are there.
	LanguageCauses []string
}

// Part is what `part` stands for.
type Part struct {
	Role, Kind string
	// Message is the number of its message, from 0; Length is in bytes of text.
	Message, Length int
	// Text is the whole text; TextCause says why it is not there.
	Text, TextCause string
	// Start is the beginning of the text; TextCause does not matter where it is given.
	Start string
}

// Tag is what an entry of `tags` stands for.
type Tag struct {
	// State is true, false or unknown.
	State string
	Score float64
	// Causes of unknown.
	Causes []string
}

// Facts are what a When is evaluated over.
type Facts struct {
	Prompt Prompt
	// Part is nil where the expression reads none.
	Part *Part
	// Tags by name; one that is missing is unknown.
	Tags map[string]*Tag
}

// Outcome of an evaluation.
type Outcome uint8

// The outcomes.
const (
	Unknown Outcome = iota
	False
	True
)

// When is the compiled expression of a custom tag.
type When struct {
	program cel.Program
	// Cost is the most that one evaluation costs, in CEL's own unit.
	Cost uint64
	// ReadsPart says that it holds of a part, else of the prompt.
	ReadsPart, ReadsText, ReadsLanguages bool
	// Tags that it reads, sorted.
	Tags []string
}

const (
	typePrompt = "kinference.Prompt"
	typePart   = "kinference.Part"
	typeTag    = "kinference.Tag"
)

// notKnown is the value of what is not known; CEL carries it through as it does
// errors, but for `false && x` and `true || x`.
var notKnown = types.NewUnknown(0, nil)

type member struct {
	kind *types.Type
	get  func(target any) any
	// values of an enumeration.
	values []string
	// size of a text or list at most.
	size uint64
}

var members = map[string]map[string]member{
	typePrompt: {
		"parts":    {kind: types.IntType, get: func(t any) any { return int64(t.(*Prompt).Parts) }},
		"messages": {kind: types.IntType, get: func(t any) any { return int64(t.(*Prompt).Messages) }},
		"length":   {kind: types.IntType, get: func(t any) any { return int64(t.(*Prompt).Length) }},
		"languages": {kind: types.NewListType(types.StringType), size: maxLanguages, get: func(t any) any {
			if p := t.(*Prompt); len(p.LanguageCauses) == 0 {
				return p.Languages
			}
			return notKnown
		}},
	},
	typePart: {
		"role": {kind: types.StringType, get: func(t any) any { return t.(*Part).Role },
			values: []string{"system", "user", "assistant", "tool_result", "tool_arguments", "document", "metadata"}},
		"kind": {kind: types.StringType, get: func(t any) any { return t.(*Part).Kind },
			values: []string{"text", "image", "audio", "video", "file", "tokens", "unknown"}},
		"message": {kind: types.IntType, get: func(t any) any { return int64(t.(*Part).Message) }},
		"length":  {kind: types.IntType, get: func(t any) any { return int64(t.(*Part).Length) }},
		"start":   {kind: types.StringType, size: MaxStart, get: func(t any) any { return t.(*Part).Start }},
		"text": {kind: types.StringType, size: MaxText, get: func(t any) any {
			if p := t.(*Part); p.TextCause == "" {
				return p.Text
			}
			return notKnown
		}},
	},
	typeTag: {
		"state": {kind: types.StringType, get: func(t any) any { return t.(*Tag).State }, values: []string{"true", "false", "unknown"}},
		"found": {kind: types.BoolType, get: func(t any) any { return t.(*Tag).known(func(t *Tag) any { return t.State == "true" }) }},
		"score": {kind: types.DoubleType, get: func(t any) any { return t.(*Tag).known(func(t *Tag) any { return t.Score }) }},
	},
}

func (t *Tag) known(get func(t *Tag) any) any {
	if t.State == "unknown" {
		return notKnown
	}
	return get(t)
}

// shapes teach CEL the types, so that a wrong field is found when an expression
// is compiled.
type shapes struct{ types.Provider }

func (p shapes) FindStructType(name string) (*types.Type, bool) {
	if members[name] != nil {
		return types.NewTypeTypeWithParam(types.NewObjectType(name)), true
	}
	return p.Provider.FindStructType(name)
}

func (p shapes) FindStructFieldNames(name string) ([]string, bool) {
	if m := members[name]; m != nil {
		return slices.Sorted(maps.Keys(m)), true
	}
	return p.Provider.FindStructFieldNames(name)
}

func (p shapes) FindStructFieldType(name, field string) (*types.FieldType, bool) {
	m := members[name]
	if m == nil {
		return p.Provider.FindStructFieldType(name, field)
	}
	d, ok := m[field]
	if !ok {
		return nil, false
	}
	return &types.FieldType{
		Type:    d.kind,
		GetFrom: func(target any) (any, error) { return d.get(target), nil },
		IsSet:   func(any) bool { return true },
	}, true
}

var whenEnvironment = sync.OnceValues(func() (*cel.Env, error) {
	registry, err := types.NewRegistry()
	if err != nil {
		return nil, err
	}
	return cel.NewEnv(
		cel.CustomTypeProvider(shapes{registry}), cel.CustomTypeAdapter(registry),
		cel.Variable("prompt", types.NewObjectType(typePrompt)),
		cel.Variable("part", types.NewObjectType(typePart)),
		cel.Variable("tags", types.NewMapType(types.StringType, types.NewObjectType(typeTag))),
	)
})

var whenVocabulary = sync.OnceValue(func() *Vocabulary {
	fields := func(t string) []string { return slices.Sorted(maps.Keys(members[t])) }
	return &Vocabulary{Objects: map[string][]string{"prompt": fields(typePrompt), "part": fields(typePart), "tags": fields(typeTag)}, Sizes: whenSizes{}, MaxCost: maxWhenCost}
})

// whenSizes tells the estimate of costs how long things are at most.
type whenSizes struct{}

func (whenSizes) EstimateSize(n checker.AstNode) *checker.SizeEstimate {
	most := uint64(MaxText)
	path := n.Path()
	if len(path) == 1 && path[0] == "tags" { // no expression reads it as a whole
		most = 1
	}
	if len(path) > 1 {
		switch m := members[map[string]string{"prompt": typePrompt, "part": typePart}[path[0]]][path[1]]; {
		case len(path) > 2 || m.size == 0: // an entry of languages, or a word
			most = 16
		default:
			most = m.size
		}
	}
	return &checker.SizeEstimate{Max: most}
}

// EstimateCallCost knows what a pattern costs: by the steps that it compiles to,
// as a{1,1000} is short and slow. CEL counts its characters.
func (s whenSizes) EstimateCallCost(function, _ string, target *checker.AstNode, args []checker.AstNode) *checker.CallEstimate {
	if function != overloads.Matches {
		return nil
	}
	nodes := args
	if target != nil { // text.matches(pattern), else matches(text, pattern)
		nodes = append([]checker.AstNode{*target}, args...)
	}
	pattern, ok := literal(nodes[1].Expr())
	if !ok {
		return nil // refused by read
	}
	text := nodes[0].ComputedSize()
	if text == nil {
		text = s.EstimateSize(nodes[0])
	}
	return &checker.CallEstimate{CostEstimate: checker.CostEstimate{Max: 1 + text.Max*steps(pattern)/stepsPerUnit}}
}

// steps of the program that a regular expression becomes; 1 if it is none.
func steps(pattern string) uint64 {
	tree, err := syntax.Parse(pattern, syntax.Perl)
	if err != nil {
		return 1
	}
	program, err := syntax.Compile(tree.Simplify())
	if err != nil {
		return 1
	}
	return uint64(len(program.Inst))
}

// CompileWhen compiles the expression of a custom tag: a bool over `part`,
// `prompt` and `tags`. The error is for the author of the tag.
func CompileWhen(text string) (*When, error) {
	env, err := whenEnvironment()
	if err != nil {
		return nil, err
	}
	checked, cost, err := Check(env, text, whenVocabulary())
	if err != nil {
		return nil, err
	}
	w := &When{Cost: cost}
	loops, err := w.read(checked.NativeRep().Expr())
	if err != nil {
		return nil, err
	}
	options := []cel.ProgramOption{cel.EvalOptions(cel.OptOptimize)}
	if loops { // the estimate holds for all else; counting has its own cost
		options = append(options, cel.CostLimit(maxWhenCost))
	}
	if w.program, err = env.Program(checked, options...); err != nil {
		return nil, fmt.Errorf("CEL: %w", err)
	}
	return w, nil
}

// read notes what an expression reads, and finds what CEL's types let pass.
func (w *When) read(e ast.Expr) (loops bool, err error) {
	tags, named := 0, 0
	fault := func(format string, args ...any) {
		if err == nil {
			err = fmt.Errorf("CEL: "+format, args...)
		}
	}
	ast.PostOrderVisit(e, ast.NewExprVisitor(func(x ast.Expr) {
		switch x.Kind() {
		case ast.IdentKind:
			switch x.AsIdent() {
			case "tags":
				tags++
			case "part":
				w.ReadsPart = true
			}
		case ast.SelectKind:
			switch s := x.AsSelect(); {
			case isIdent(s.Operand(), "tags"):
				named++
				w.Tags = append(w.Tags, s.FieldName())
			case s.FieldName() == "text" || s.FieldName() == "start":
				w.ReadsText = true
			case s.FieldName() == "languages":
				w.ReadsLanguages = true
			}
		case ast.CallKind:
			c := x.AsCall()
			args := c.Args()
			if c.FunctionName() == operators.Index && isIdent(args[0], "tags") {
				if name, ok := literal(args[1]); ok {
					named++
					w.Tags = append(w.Tags, name)
				}
			}
			if c.FunctionName() == overloads.Matches {
				if _, ok := literal(args[len(args)-1]); !ok {
					fault("matches takes a pattern in quotes")
				}
			}
			if c.FunctionName() == operators.Equals || c.FunctionName() == operators.NotEquals || c.FunctionName() == operators.In {
				enumerated(args[0], args[1], fault)
				enumerated(args[1], args[0], fault)
			}
		case ast.ComprehensionKind:
			loops = true
		}
	}))
	if tags != named {
		fault(`tags takes a name in quotes, as in tags["pii-email"].found`)
	}
	if !w.ReadsPart && !w.ReadsLanguages && len(w.Tags) == 0 && !speaks(e, "prompt") {
		fault("it reads nothing of the prompt, so it is always the same")
	}
	slices.Sort(w.Tags)
	w.Tags = slices.Compact(w.Tags)
	return loops, err
}

func isIdent(e ast.Expr, name string) bool { return e.Kind() == ast.IdentKind && e.AsIdent() == name }

func speaks(e ast.Expr, name string) (found bool) {
	ast.PostOrderVisit(e, ast.NewExprVisitor(func(x ast.Expr) { found = found || isIdent(x, name) }))
	return found
}

func literal(e ast.Expr) (string, bool) {
	if e.Kind() != ast.LiteralKind {
		return "", false
	}
	s, ok := e.AsLiteral().Value().(string)
	return s, ok
}

// enumerated finds words that a role, kind or state never is.
func enumerated(field, with ast.Expr, fault func(string, ...any)) {
	if field.Kind() != ast.SelectKind {
		return
	}
	words := []ast.Expr{with}
	if with.Kind() == ast.ListKind {
		words = with.AsList().Elements()
	}
	name := field.AsSelect().FieldName()
	for _, shape := range members {
		values := shape[name].values
		if values == nil {
			continue
		}
		for _, x := range words {
			word, ok := literal(x)
			if !ok || slices.Contains(values, word) {
				continue
			}
			if near := spelling.Nearest(word, values); near != "" {
				fault("%s is never %q, did you mean %q?", name, abbreviate(word), near)
			} else {
				fault("%s is never %q: it is %s", name, abbreviate(word), strings.Join(values, ", "))
			}
		}
	}
}

// whenScope binds the variables.
type whenScope struct {
	f    *Facts
	tags map[string]any
}

func (s whenScope) ResolveName(name string) (any, bool) {
	switch name {
	case "prompt":
		return &s.f.Prompt, true
	case "part":
		return s.f.Part, s.f.Part != nil
	case "tags":
		return s.tags, true
	}
	return nil, false
}

func (whenScope) Parent() cel.Activation { return nil }

// missing is a tag that nobody gave.
var missing = &Tag{State: "unknown", Causes: []string{"not_looked_for"}}

// Eval evaluates over facts. It does not fail: where it cannot tell, the outcome
// is Unknown and the causes say why, in codes.
func (w *When) Eval(f *Facts) (Outcome, []string) {
	scope := whenScope{f: f}
	if len(w.Tags) > 0 {
		scope.tags = make(map[string]any, len(w.Tags))
		for _, name := range w.Tags {
			if t := f.Tags[name]; t != nil {
				scope.tags[name] = t
			} else {
				scope.tags[name] = missing
			}
		}
	}
	out, _, err := w.program.Eval(&scope)
	switch {
	case err != nil:
		// The error may hold text: only its kind is told.
		if stop := (interpreter.EvalCancelledError{}); errors.As(err, &stop) {
			return Unknown, []string{CauseLimit}
		}
		return Unknown, []string{CauseError}
	case out == types.True:
		return True, nil
	case out == types.False:
		return False, nil
	case types.IsUnknown(out):
		return Unknown, w.causes(f)
	}
	return Unknown, []string{CauseError}
}

// causes of what the expression reads and nobody knows.
func (w *When) causes(f *Facts) []string {
	var out []string
	if w.ReadsText && f.Part != nil && f.Part.TextCause != "" {
		out = append(out, f.Part.TextCause)
	}
	if w.ReadsLanguages {
		out = append(out, f.Prompt.LanguageCauses...)
	}
	for _, name := range w.Tags {
		t := f.Tags[name]
		if t == nil {
			t = missing
		}
		if t.State == "unknown" {
			out = append(out, t.Causes...)
		}
	}
	if out == nil {
		out = []string{CauseError}
	}
	slices.Sort(out)
	return slices.Compact(out)
}
