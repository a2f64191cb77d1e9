package expr_test

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kinference/kinference/internal/expr"
)

func facts() *expr.Facts {
	return &expr.Facts{
		Prompt: expr.Prompt{Parts: 2, Messages: 1, Length: 300, Languages: []string{"de", "en"}},
		Part:   &expr.Part{Role: "user", Kind: "text", Length: 11, Text: "hello world", Start: "hello"},
		Tags: map[string]*expr.Tag{
			"pii-email": {State: "true", Score: 0.9},
			"code":      {State: "false", Score: 0.1},
			"injection": {State: "unknown", Causes: []string{"deadline"}},
		},
	}
}

func TestWhen(t *testing.T) {
	const yes, no, unknown = expr.True, expr.False, expr.Unknown
	for _, c := range []struct {
		text   string
		want   expr.Outcome
		causes []string
	}{
		{`part.role == "user"`, yes, nil},
		{`part.role in ["system", "tool_result"]`, no, nil},
		{`part.kind == "text" && part.length > 5 && part.message == 0`, yes, nil},
		{`part.text.contains("world")`, yes, nil},
		{`part.text.matches("^[a-z ]+$") && part.start.startsWith("hell")`, yes, nil},
		{`prompt.parts == 2 && prompt.messages == 1 && prompt.length < 1000`, yes, nil},
		{`"de" in prompt.languages && size(prompt.languages) == 2`, yes, nil},
		{`prompt.languages.exists(l, l == "fr")`, no, nil},
		{`prompt.languages[0] == "de"`, yes, nil},
		{`tags["pii-email"].state == "true" && tags["pii-email"].score > 0.5`, yes, nil},
		{`tags["pii-email"].found && !tags.code.found`, yes, nil},
		// What is not known stays unknown, unless it does not matter.
		{`tags.injection.found`, unknown, []string{"deadline"}},
		{`!tags.injection.found`, unknown, []string{"deadline"}},
		{`tags.injection.score < 0.5`, unknown, []string{"deadline"}},
		{`tags.injection.state == "unknown"`, yes, nil},
		{`tags.injection.found || part.role == "user"`, yes, nil},
		{`tags.injection.found && part.role != "user"`, no, nil},
		{`tags["nobody-gives"].found`, unknown, []string{"not_looked_for"}},
		{`tags.injection.found ? true : false`, unknown, []string{"deadline"}},
		// Errors are unknown, too.
		{`prompt.length / (prompt.parts - 2) > 1`, unknown, []string{"rule_error"}},
		{`prompt.languages[7] == "de"`, unknown, []string{"rule_error"}},
	} {
		w, err := expr.CompileWhen(c.text)
		if err != nil {
			t.Errorf("%s: %v", c.text, err)
			continue
		}
		got, causes := w.Eval(facts())
		if got != c.want || !cmp.Equal(causes, c.causes) {
			t.Errorf("%s: got %v %v, want %v %v", c.text, got, causes, c.want, c.causes)
		}
	}
}

func TestWhenMissing(t *testing.T) {
	f := facts()
	f.Part.Text, f.Part.TextCause = "", "oversize"
	f.Prompt.LanguageCauses = []string{"media"}
	for text, want := range map[string]string{
		`part.text.contains("x")`:                             "oversize",
		`!part.text.contains("x")`:                            "oversize",
		`part.text + "x" == "y"`:                              "oversize",
		`part.text.size() > 3`:                                "oversize",
		`"de" in prompt.languages`:                            "media",
		`prompt.languages.exists(l, l == "de")`:               "media",
		`prompt.languages[0] == "de"`:                         "media",
		`prompt.languages.all(l, l in ["de", part.text])`:     "media,oversize",
		`["a"].exists(x, part.text == x) || "x" == part.text`: "oversize",
	} {
		w, err := expr.CompileWhen(text)
		if err != nil {
			t.Errorf("%s: %v", text, err)
			continue
		}
		got, causes := w.Eval(f)
		for _, c := range strings.Split(want, ",") {
			if got != expr.Unknown || !strings.Contains(strings.Join(causes, ","), c) {
				t.Errorf("%s: got %v %v, want unknown for %s", text, got, causes, c)
			}
		}
	}
}

func TestWhenFaults(t *testing.T) {
	for text, want := range map[string]string{
		`part.rol == "user"`:                  "did you mean 'role'?",
		`part.role == "usr"`:                  `role is never "usr", did you mean "user"?`,
		`part.role in ["user", "operator"]`:   `role is never "operator": it is system`,
		`"True" == tags["code"].state`:        `did you mean "true"?`,
		`part.length`:                         "CEL yields int, want bool",
		`request.model == "x"`:                "there is only `part`, `prompt` and `tags`",
		`tags.exists(t, t == "code")`:         "tags takes a name in quotes",
		`tags[part.role].found`:               "tags takes a name in quotes",
		`"code" in tags`:                      "tags takes a name in quotes",
		`part.text.matches("(")`:              "missing closing )",
		`part.length > 5 and part.length < 9`: "want &&",
		`1 == 1`:                              "reads nothing of the prompt",
		`part.text.matches(part.text)`:        "may cost",
		`prompt.languages.all(a, prompt.languages.all(b, prompt.languages.all(c, a != b && b != c)))`: "may cost",
		``: "ends too early",
	} {
		_, err := expr.CompileWhen(text)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: got %v, want %q", text, err, want)
		}
	}
}

// FuzzWhen: what compiles neither panics nor costs much, and yields one of three.
func FuzzWhen(f *testing.F) {
	for _, s := range []string{`part.text.matches("a+b")`, `tags["pii-email"].found`, `prompt.languages.exists(l, l == "de")`, `part.role in ["user"]`, `prompt.length / 0 > 1`, `dyn(part) == 1`} {
		f.Add(s, "some text")
	}
	f.Fuzz(func(t *testing.T, text, content string) {
		w, err := expr.CompileWhen(text)
		if err != nil {
			return
		}
		in := facts()
		in.Part.Text = content[:min(len(content), expr.MaxText)]
		if got, causes := w.Eval(in); (got == expr.Unknown) != (len(causes) > 0) {
			t.Errorf("%q: %v with causes %v", text, got, causes)
		}
	})
}

// BenchmarkWhen: go test ./internal/expr -run '^$' -bench When -benchmem
func BenchmarkWhen(b *testing.B) {
	for name, text := range map[string]string{
		"role":  `part.role == "user" && part.length > 5`,
		"tags":  `tags["pii-email"].found && !tags.code.found`,
		"text":  `part.text.contains("nowhere")`,
		"regex": `part.text.matches("(?i)no[a-z]{3,9}where")`,
		"loop":  `prompt.languages.exists(l, l == "fr")`,
	} {
		w, err := expr.CompileWhen(text)
		if err != nil {
			b.Fatal(err)
		}
		f := facts()
		f.Part.Text = strings.Repeat("hello world ", 340)
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			b.ReportMetric(float64(w.Cost), "cost")
			for b.Loop() {
				w.Eval(f)
			}
		})
	}
}
