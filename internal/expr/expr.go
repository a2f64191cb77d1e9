// Package expr compiles CEL of resources.
//
// internal/policy calls Check for the expressions of policies, over a request, and CompileWhen for those of custom tags, over
// what the classifier knows of a prompt (When); internal/classify evaluates the latter. Faults are found when an expression is
// compiled, in words for its author, and so is what it may cost. Compiled values do not change and are safe for concurrent use.
// An evaluation that fails yields an error or, for a When, "unknown" with a cause; never text of the prompt.
package expr

import (
	"fmt"
	"regexp"
	"slices"
	"strings"

	"github.com/google/cel-go/cel"
	"github.com/google/cel-go/checker"

	"github.com/kinference/kinference/internal/spelling"
)

// Vocabulary is what an expression may speak of, for messages.
type Vocabulary struct {
	// Objects holds the fields of each variable.
	Objects map[string][]string
	// Sizes bounds the length of what is read.
	Sizes checker.CostEstimator
	// MaxCost of an evaluation, in CEL's own unit: about a comparison each.
	MaxCost uint64
}

// Check compiles an expression that yields a bool and estimates the most that
// an evaluation costs. The error is for the author of the expression.
func Check(env *cel.Env, text string, v *Vocabulary) (*cel.Ast, uint64, error) {
	checked, issues := env.Compile(text)
	if err := issues.Err(); err != nil {
		first := issues.Errors()[0] // the others follow from it
		return nil, 0, fmt.Errorf("CEL at column %d: %s", first.Location.Column()+1, v.plain(first.Message))
	}
	if checked.OutputType() != cel.BoolType {
		return nil, 0, fmt.Errorf("CEL yields %s, want bool", checked.OutputType())
	}
	cost, err := env.EstimateCost(checked, v.Sizes)
	if err != nil {
		return nil, 0, fmt.Errorf("CEL: %w", err)
	}
	if cost.Max > v.MaxCost {
		return nil, 0, fmt.Errorf("CEL may cost %d, more than %d: make it simpler, for instance without loops in loops or with shorter patterns", cost.Max, v.MaxCost)
	}
	return checked, cost.Max, nil
}

// What CEL says of an expression that it does not understand.
var (
	endsEarly  = regexp.MustCompile(`^Syntax error: (?:mismatched|extraneous) input '<EOF>'(?: expecting (.*))?$`)
	unexpected = regexp.MustCompile(`^Syntax error: (?:mismatched|extraneous) input '(.*?)'`)
	nonsense   = regexp.MustCompile(`(?s)^Syntax error: (?:token recognition error at: |no viable alternative at input )'(.*)'$`)
	overload   = regexp.MustCompile(`^found no matching overload for '_?(.*?)_?' applied to '(.*)'$`)
	noField    = regexp.MustCompile(`^undefined field '(.*)'$`)
	noName     = regexp.MustCompile(`^(undeclared reference to '.*') \(in container ''\)$`)
)

// plain says in few words for the author of an expression what CEL says with
// lists of all tokens that there could be.
func (v *Vocabulary) plain(message string) string {
	message, _, _ = strings.Cut(message, "\n")
	if m := endsEarly.FindStringSubmatch(message); m != nil {
		if m[1] != "" && len(m[1]) <= 16 {
			return "the expression ends too early, want " + strings.Trim(m[1], "{}")
		}
		return "the expression ends too early"
	}
	if m := unexpected.FindStringSubmatch(message); m != nil {
		switch m[1] {
		case "and", "AND":
			return "unexpected '" + m[1] + "', want &&"
		case "or", "OR":
			return "unexpected '" + m[1] + "', want ||"
		}
		return "unexpected '" + abbreviate(m[1]) + "'"
	}
	if m := nonsense.FindStringSubmatch(message); m != nil {
		if what := strings.TrimSpace(m[1]); what != "=" {
			return "unexpected '" + abbreviate(what) + "'"
		}
		return "unexpected '=', want =="
	}
	if m := overload.FindStringSubmatch(message); m != nil {
		return "'" + m[1] + "' cannot be applied to (" + strings.Trim(m[2], "()") + ")"
	}
	if m := noField.FindStringSubmatch(message); m != nil {
		return message + v.fieldHint(m[1])
	}
	if m := noName.FindStringSubmatch(message); m != nil {
		return m[1] + ": there is only " + list(v.objects())
	}
	return message
}

func (v *Vocabulary) fieldHint(name string) string {
	var all, each []string
	for _, o := range v.objects() {
		all = append(all, v.Objects[o]...)
		each = append(each, "`"+o+"` has "+strings.Join(v.Objects[o], ", "))
	}
	if near := spelling.Nearest(name, all); near != "" {
		return ", did you mean '" + near + "'?"
	}
	return ": " + strings.Join(each, "; ")
}

func (v *Vocabulary) objects() []string {
	var out []string
	for o := range v.Objects {
		out = append(out, o)
	}
	slices.Sort(out)
	return out
}

// list is `a`, `b` and `c`.
func list(names []string) string {
	out := ""
	for i, n := range names {
		switch {
		case i > 0 && i == len(names)-1:
			out += " and "
		case i > 0:
			out += ", "
		}
		out += "`" + n + "`"
	}
	return out
}

func abbreviate(s string) string {
	if len(s) > 64 {
		return s[:64] + "…"
	}
	return s
}
