package chat_test

import (
	"encoding/json"
	"errors"
	"os"
	"testing"

	"github.com/kinference/kinference/internal/chat"
)

// TestEngine compares what templates get to see of messages with what vLLM gives them. testdata/engine.json is what vLLM 0.32 rendered;
// test/interop/vllm asks it again. A null there is a request that it refuses.
func TestEngine(t *testing.T) {
	data, err := os.ReadFile("testdata/engine.json")
	if err != nil {
		t.Fatal(err)
	}
	var cases []struct {
		Name, Template string
		Messages       json.RawMessage
		Want           *string
	}
	if err := json.Unmarshal(data, &cases); err != nil {
		t.Fatal(err)
	}
	unsure := map[string]bool{"large number": true, "deep": true, "half a character": true}
	for _, c := range cases {
		tmpl, err := chat.Parse(c.Template, nil)
		if err != nil {
			t.Fatal(err)
		}
		got, err := tmpl.Render(chat.Request{Messages: c.Messages, AddGenerationPrompt: true})
		switch {
		case unsure[c.Name]:
			if !errors.Is(err, chat.ErrUnsure) {
				t.Errorf("%s: got %q, error %v; want ErrUnsure", c.Name, got, err)
			}
		case c.Want == nil: // what we would render of it does not matter
		case err != nil || got != *c.Want:
			t.Errorf("%s: got %q, error %v; want %q", c.Name, got, err, *c.Want)
		}
	}
}

// TestContinue: the prompt ends behind what the last message says, wherever else that stands.
func TestContinue(t *testing.T) {
	const between = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
	for _, c := range []struct{ name, template, last, want string }{
		{"plain", between, `"a b"`, "<a b><a b"},
		{"empty", between, `""`, "<a b><"},
		{"spaces", between, `" a "`, "<a b>< a "},
		{"part of the end", between, `">"`, "<a b><>"},
		{"trimmed", "{% for m in messages %}<{{ m.content | trim }}>{% endfor %}", `" a \u001c"`, "<a b><a"},
		{"last part", "{% for m in messages %}<{% for p in m.content %}{{ p.text }}|{% endfor %}>{% endfor %}", `[{"type":"text","text":"x"},{"type":"text","text":"y"}]`, "<a b|><x|y"},
		{"gone", "{% for m in messages %}{{ m.role }}{{ '' if false else m.content[:3] }}{% endfor %}", `"long text"`, ""},
	} {
		tmpl, err := chat.Parse(c.template, nil)
		if err != nil {
			t.Fatal(err)
		}
		got, err := tmpl.Render(chat.Request{
			Messages: json.RawMessage(`[{"role":"user","content":"a b"},{"role":"assistant","content":` + c.last + `}]`), ContinueFinalMessage: true,
		})
		if failed := err != nil; failed != (c.want == "") || got != c.want {
			t.Errorf("%s: got %q, error %v; want %q", c.name, got, err, c.want)
		}
	}
}

// TestKwargs: null and "auto" are as if they were not there, but an effort says nothing of thinking then.
func TestKwargs(t *testing.T) {
	tmpl, err := chat.Parse("{{ a is defined }} {{ enable_thinking is defined }} {{ custom }}", nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		kwargs, effort, want string
	}{
		{`{"a": null, "custom": 1}`, "", "False False 1"},
		{`{"a": "auto"}`, "low", "False True "},
		{`{"a": false, "enable_thinking": null}`, "low", "True False "},
		{`{"tools": null}`, "none", "False True "},
		{`{"tools": []}`, "", ""},
	} {
		got, err := tmpl.Render(chat.Request{Messages: json.RawMessage(`[]`), Kwargs: json.RawMessage(c.kwargs), ReasoningEffort: c.effort})
		if failed := err != nil; failed != (c.want == "") || got != c.want || failed && !errors.Is(err, chat.ErrUnsure) {
			t.Errorf("%s: got %q, error %v; want %q", c.kwargs, got, err, c.want)
		}
	}
}
