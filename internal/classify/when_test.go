package classify_test

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kinference/kinference/api/v1alpha1"
	"github.com/kinference/kinference/internal/classify"
)

func when(tb testing.TB, scope []v1alpha1.TextScope, expressions ...string) *classify.Custom {
	tb.Helper()
	tag := v1alpha1.CustomTag{Name: "own", Scope: scope}
	for _, e := range expressions {
		tag.Any = append(tag.Any, v1alpha1.TagDetector{When: e})
	}
	c, err := classify.CompileCustom([]v1alpha1.CustomTag{tag, {Name: "falcon", Any: []v1alpha1.TagDetector{{Keywords: []string{"falcon"}}}}})
	if err != nil {
		tb.Fatal(err)
	}
	return c
}

func TestWhen(t *testing.T) {
	c := classifier(t, classify.Settings{MaxBytes: 1 << 20})
	prompt := []classify.Part{
		{Role: classify.RoleSystem, Text: "You answer questions about the weather in the mountains."},
		{Role: classify.RoleUser, Message: 1, Text: "Schreibe bitte an jo.doe@mailbox.org, dass der Falcon nicht fliegt und wie das Wetter ist."},
		{Role: classify.RoleToolResult, Message: 2, Text: "/deploy " + strings.Repeat("é", 4000)},
	}
	image := append(append([]classify.Part(nil), prompt...), classify.Part{Role: classify.RoleUser, Media: classify.MediaImage, Message: 3})
	for _, x := range []struct {
		name, when string
		parts      []classify.Part
		scope      []v1alpha1.TextScope
		want       classify.State
		causes     []string
	}{
		{"counts", `prompt.parts == 3 && prompt.messages == 3 && prompt.length > 8000`, prompt, nil, classify.True, nil},
		{"role", `part.role == "tool_result" && part.message == 2 && part.length > 8000`, prompt, nil, classify.True, nil},
		{"start", `part.start.startsWith("/deploy")`, prompt, nil, classify.True, nil},
		{"text", `part.text.matches("Falcon (nicht|auch)")`, prompt, nil, classify.True, nil},
		{"text not there", `part.text.contains("osprey")`, prompt[:2], nil, classify.False, nil},
		{"too long to tell", `part.text.contains("osprey")`, prompt, nil, classify.Unknown, []string{"oversize"}},
		{"negation is not told of unread text", `!part.text.contains("osprey")`, prompt[2:], nil, classify.Unknown, []string{"oversize"}},
		{"scope", `part.text.contains("osprey")`, prompt, []v1alpha1.TextScope{v1alpha1.ScopeUser}, classify.False, nil},
		{"languages", `prompt.languages == ["de", "en"]`, prompt[:2], nil, classify.True, nil},
		{"languages beside an image", `"de" in prompt.languages`, image, nil, classify.Unknown, []string{"media"}},
		{"no language at all", `"de" in prompt.languages`, []classify.Part{{Text: "123"}}, nil, classify.Unknown, []string{"unsure"}},
		{"kind", `part.kind == "image"`, image, nil, classify.True, nil},
		{"no kind", `part.kind == "audio"`, image, nil, classify.False, nil},
		{"tags", `tags["pii-email"].found && tags["pii-email"].score > 0.5`, prompt, nil, classify.True, nil},
		{"a custom tag", `tags.falcon.state == "true"`, prompt, nil, classify.True, nil},
		{"an unknown tag", `tags["pii-card"].found`, image, nil, classify.Unknown, []string{"media"}},
		{"combination", `tags["length-medium"].found && prompt.parts < 10 && part.role == "user" && part.text.contains("Wetter")`, prompt, nil, classify.True, nil},
		{"itself", `tags.own.state == "unknown"`, prompt, nil, classify.True, nil},
		{"error", `prompt.length / (prompt.parts - 3) > 1`, prompt, nil, classify.Unknown, []string{"rule_error"}},
		{"binary", `part.text == ""`, []classify.Part{{Text: "a\xff"}}, nil, classify.Unknown, []string{"undecodable"}},
		{"nothing", `prompt.parts == 0`, nil, nil, classify.True, nil},
	} {
		t.Run(x.name, func(t *testing.T) {
			res := c.Classify(t.Context(), classify.Input{Parts: x.parts, Custom: when(t, x.scope, x.when)})
			got := res.Tag("own")
			if got.State != x.want || !cmp.Equal(got.Causes, x.causes) {
				t.Errorf("got %v %v, want %v %v", got.State, got.Causes, x.want, x.causes)
			}
			if got.State == classify.True && len(got.Reasons) != 1 {
				t.Errorf("reasons: %+v", got.Reasons)
			}
			for _, r := range got.Reasons {
				if len(x.parts) > 0 && r.Offset+r.Length > len(x.parts[r.Part].Text) || strings.Contains(fmt.Sprint(r), "alcon") {
					t.Errorf("reason %+v", r)
				}
			}
			// The pieces of a stream are the same prompt.
			st := c.NewStream("", when(t, x.scope, x.when))
			for _, p := range x.parts {
				for i := 0; i == 0 || i < len(p.Text); i += 777 {
					piece := p
					piece.Text = p.Text[i:min(i+777, len(p.Text))]
					st.Add(t.Context(), piece, i > 0)
				}
			}
			if streamed := st.Result(t.Context()).Tag("own"); streamed.State != got.State || !cmp.Equal(streamed.Causes, got.Causes) || !cmp.Equal(streamed.Reasons, got.Reasons) {
				t.Errorf("as a stream: %+v, want %+v", streamed, got)
			}
		})
	}
}

// Several entries: one that is true decides, else one that is unknown.
func TestWhenCombines(t *testing.T) {
	c := classifier(t, classify.Settings{})
	in := user("one", "two")
	const yes, no, unknown = `prompt.parts == 2`, `prompt.parts == 3`, `tags.nobody.found`
	for _, x := range []struct {
		entries []string
		want    classify.State
	}{{[]string{no, no}, classify.False}, {[]string{no, unknown}, classify.Unknown}, {[]string{unknown, yes}, classify.True}, {[]string{yes, unknown}, classify.True}} {
		in.Custom = when(t, nil, x.entries...)
		if got := c.Classify(t.Context(), in).Tag("own"); got.State != x.want || got.State == classify.True && len(got.Causes) > 0 {
			t.Errorf("%v: got %+v, want %v", x.entries, got, x.want)
		}
	}
}

func TestWhenLimits(t *testing.T) {
	c := classifier(t, classify.Settings{CacheBytes: -1})
	many := classify.Input{Custom: when(t, nil, `part.text == "osprey"`)}
	for range 5000 {
		many.Parts = append(many.Parts, classify.Part{Role: classify.RoleUser, Text: "a"})
	}
	if got := c.Classify(t.Context(), many).Tag("own"); got.State != classify.Unknown || !cmp.Equal(got.Causes, []string{"part_limit"}) {
		t.Errorf("5000 parts: %+v", got)
	}
	var work classify.Input
	for range 400 {
		work.Parts = append(work.Parts, classify.Part{Role: classify.RoleUser, Text: strings.Repeat("a ", 2000)})
	}
	work.Custom = when(t, nil, `part.text.matches("(a+ a+ )*osprey (a+ a+ )*osprey and so on and so on")`)
	if got := c.Classify(t.Context(), work).Tag("own"); got.State != classify.Unknown || !cmp.Equal(got.Causes, []string{"rule_limit"}) {
		t.Errorf("much work: %+v", got)
	}
	over, cancel := context.WithCancel(t.Context())
	cancel()
	in := user("one")
	in.Custom = when(t, nil, `prompt.parts == 1`)
	if got := c.Classify(over, in).Tag("own"); got.State != classify.Unknown || !cmp.Equal(got.Causes, []string{"deadline"}) {
		t.Errorf("deadline: %+v", got)
	}
	for name, bad := range map[string]string{"syntax": "part.role ==", "type": "part.length", "cost": "part.text.contains(part.text + part.text)", "long": strings.Repeat("x", 5000)} {
		if _, err := classify.CompileCustom([]v1alpha1.CustomTag{{Name: "a", Any: []v1alpha1.TagDetector{{When: bad}}}}); err == nil {
			t.Errorf("%s: compiled", name)
		}
	}
}

// BenchmarkWhen: go test ./internal/classify -run '^$' -bench When -benchmem
// A prompt of 20 parts and 20 KB that the cache knows, so that most is the tags' own cost.
func BenchmarkWhen(b *testing.B) {
	c := classifier(b, classify.Settings{})
	var in classify.Input
	for i := range 20 {
		in.Parts = append(in.Parts, classify.Part{Role: classify.RoleUser, Message: i, Text: text(b, 1<<10)})
	}
	for _, x := range []struct {
		name   string
		custom *classify.Custom
	}{
		{"none", nil},
		{"prompt", when(b, nil, `prompt.parts > 99 && tags["pii-email"].found`)},
		{"part", when(b, nil, `part.role == "tool_result" && part.length > 100`)},
		{"text", when(b, nil, `part.text.contains("nowhere to be found")`)},
		{"regex", when(b, nil, `part.text.matches("(?i)no[a-z]{3,9}where")`)},
	} {
		in.Custom = x.custom
		c.Classify(b.Context(), in)
		b.Run(x.name, func(b *testing.B) {
			b.ReportAllocs()
			before := cpu()
			for b.Loop() {
				c.Classify(b.Context(), in)
			}
			b.ReportMetric((cpu()-before)/float64(b.N), "cpu-µs/op")
		})
	}
}
