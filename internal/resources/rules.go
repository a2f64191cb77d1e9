package resources

import (
	"fmt"
	"strings"
	"sync"

	"github.com/google/cel-go/cel"
	"github.com/google/cel-go/ext"
)

// rule is a CEL rule of a schema. It is true of a good value, which it sees as
// self. The Kubernetes API bounds what a rule may cost when it takes the
// definition.
type rule struct {
	Rule, Message string
	FieldPath     string `yaml:"fieldPath"`

	program cel.Program
}

var ruleEnv = sync.OnceValues(func() (*cel.Env, error) {
	return cel.NewEnv(cel.Variable("self", cel.DynType), cel.CrossTypeNumericComparisons(true), cel.DefaultUTCTimeZone(true), ext.Strings())
})

func (r *rule) compile() error {
	if r.Message == "" {
		return fmt.Errorf("has no message")
	}
	env, err := ruleEnv()
	if err != nil {
		return err
	}
	ast, issues := env.Compile(r.Rule)
	if issues.Err() != nil {
		return issues.Err()
	}
	r.program, err = env.Program(ast, cel.EvalOptions(cel.OptOptimize))
	return err
}

// check reports the rule's message where it does not hold.
func (r *rule) check(c *checker, v any, path string) {
	out, _, err := r.program.Eval(map[string]any{"self": v})
	if err == nil && out.Value() == true {
		return
	}
	field := path
	if r.FieldPath != "" {
		field = join(path, strings.TrimPrefix(r.FieldPath, "."))
	}
	if err != nil {
		c.failf(field, "%s (%v)", r.Message, err)
		return
	}
	if text, ok := v.(string); ok {
		c.failf(field, "%q %s", abbreviate(text), r.Message)
		return
	}
	c.failf(field, "%s", r.Message)
}
