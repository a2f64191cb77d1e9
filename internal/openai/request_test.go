package openai_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kinference/kinference/internal/openai"
)

func TestRequestParse(t *testing.T) {
	var r openai.Request
	body := `{"model":"m\u002f1","messages":[{"role":"user","content":"hi"}],"stream":true,"stream_options":{"include_usage":true,"continuous_usage_stats":true},
		"max_tokens":5,"max_completion_tokens":16.0,"cache_salt":"s","tools":[{}],"chat_template_kwargs":{"a":1},"documents":[1],"add_generation_prompt":false,
		"continue_final_message":true,"reasoning_effort":"low","top_k":3}`
	if e := r.Parse(openai.RouteChat, []byte(body), 0); e != nil {
		t.Fatal(e)
	}
	type flat struct {
		Model, Salt, Effort, Messages, Tools, Docs, Kwargs string
		Stream, Usage, Continuous, Gen, Cont               bool
		Max                                                int
	}
	got := flat{r.Model, r.CacheSalt, r.ReasoningEffort, string(r.Messages), string(r.Tools), string(r.Documents), string(r.TemplateKwargs),
		r.Stream, r.IncludeUsage, r.ContinuousUsage, r.AddGenerationPrompt, r.ContinueFinalMessage, r.MaxTokens}
	want := flat{"m/1", "s", "low", `[{"role":"user","content":"hi"}]`, `[{}]`, `[1]`, `{"a":1}`, true, true, true, false, true, 16}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}

	if e := r.Parse(openai.RouteChat, []byte(`{"model":"m","messages":[],"tools":null,"stream":null,"stream_options":null}`), 0); e != nil {
		t.Fatal(e)
	}
	if r.Stream || r.Tools != nil || r.MaxTokens != 0 || !r.AddGenerationPrompt || r.CacheSalt != "" {
		t.Errorf("defaults are wrong, or the last request shows through: %+v", r)
	}
}

func TestRequestPrompts(t *testing.T) {
	tests := []struct {
		prompt string
		text   string
		ids    []uint32
		n      int
	}{
		{`"one"`, "one", nil, 1},
		{`["a\n","b"]`, "a\n", nil, 2},
		{`[1, 2 ,4294967295]`, "", []uint32{1, 2, 4294967295}, 1},
		{`[[7],[8,9]]`, "", []uint32{7}, 2},
		{`[ [ 7 , 8 ] ]`, "", []uint32{7, 8}, 1},
		{`[[]]`, "", []uint32{}, 1},
	}
	for _, tt := range tests {
		t.Run(tt.prompt, func(t *testing.T) {
			var r openai.Request
			if e := r.Parse(openai.RouteCompletions, []byte(`{"model":"m","prompt":`+tt.prompt+`}`), 0); e != nil {
				t.Fatal(e)
			}
			if r.Prompt != tt.text || r.Prompts != tt.n || !cmp.Equal(r.PromptTokens, tt.ids) {
				t.Errorf("got %q %v of %d", r.Prompt, r.PromptTokens, r.Prompts)
			}
		})
	}
	for _, prompt := range []string{`null`, `[]`, `{}`, `5`, `[1,"a"]`, `["a",1]`, `[1,[2]]`, `[-1]`, `[1.5]`, `[4294967296]`, `[null]`, `[["a"]]`, `[[1],2]`} {
		var r openai.Request
		if e := r.Parse(openai.RouteCompletions, []byte(`{"model":"m","prompt":`+prompt+`}`), 0); e == nil || e.Status != 400 || e.Param != "prompt" {
			t.Errorf("%s: got %v, want a 400 for prompt", prompt, e)
		}
	}
}

func TestRequestRefused(t *testing.T) {
	const messages = `,"messages":[]}`
	tests := []struct{ name, in, param, message string }{
		{"syntax", `{"model":"m","messages":[}`, "", "not valid JSON: expected a value at byte 25"},
		{"no model", `{"messages":[]}`, "model", "must be given"},
		{"empty model", `{"model":""` + messages, "model", "must be given"},
		{"model is a number", `{"model":5` + messages, "model", "must be a string"},
		{"other case instead", `{"Model":"m"` + messages, "model", "case-sensitive"},
		{"other case beside", `{"model":"cheap","MODEL":"big"` + messages, "model", "case-sensitive"},
		{"folding beyond ASCII", `{"model":"m","meſſages":[]}`, "messages", "case-sensitive"},
		{"other case inside", `{"model":"m","stream_options":{"Include_Usage":true}` + messages, "include_usage", "case-sensitive"},
		{"duplicate", `{"model":"a","model":"b"` + messages, "", "repeated key"},
		{"no messages", `{"model":"m"}`, "messages", "must be given"},
		{"messages is text", `{"model":"m","messages":"hi"}`, "messages", "must be a list"},
		{"stream is text", `{"model":"m","stream":"true"` + messages, "stream", "true or false"},
		{"stream is a number", `{"model":"m","stream":1` + messages, "stream", "true or false"},
		{"options are a list", `{"model":"m","stream_options":[]` + messages, "stream_options", "an object"},
		{"usage is a number", `{"model":"m","stream_options":{"include_usage":1}` + messages, "stream_options.include_usage", "true or false"},
		{"max_tokens is text", `{"model":"m","max_tokens":"5"` + messages, "max_tokens", "an integer"},
		{"max_tokens has a fraction", `{"model":"m","max_tokens":1.5` + messages, "max_tokens", "an integer"},
		{"too deep", `{"model":"m","x":` + strings.Repeat(`{"a":`, 64) + "1" + strings.Repeat("}", 64) + messages, "", "nested too deeply"},
		{"tools are an object", `{"model":"m","tools":{}` + messages, "tools", "a list"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var r openai.Request
			e := r.Parse(openai.RouteChat, []byte(tt.in), 0)
			if e == nil {
				t.Fatal("accepted")
			}
			if e.Status != 400 || e.Type != openai.TypeInvalidRequest || !strings.HasSuffix(e.Param, tt.param) || !strings.Contains(e.Message, tt.message) {
				t.Errorf("got %+v", e)
			}
		})
	}
	var r openai.Request
	if e := r.Parse(openai.RouteChat, []byte(`{"model":"m","tools":[{"function":{"parameters":{"properties":{"id":{},"ID":{},"Model":{}}}}}]`+messages), 0); e != nil {
		t.Errorf("keys of a tool schema that differ by case: %v", e)
	}
}

func TestOthers(t *testing.T) {
	for _, c := range []struct{ prompt, want string }{
		{`"a"`, ""}, {`[1,2]`, ""}, {`["a"]`, ""}, {`["a","b\n",""]`, `"b\n" [] false; "" [] false; `},
		{`[[1],[2,3],[]]`, `"" [2 3] true; "" [] true; `}, {`[[1],["x"],[4]]`, `"" [] true; "" [4] true; `},
	} {
		var r openai.Request
		if e := r.Parse(openai.RouteCompletions, []byte(`{"model":"m","prompt":`+c.prompt+`}`), 0); e != nil {
			t.Fatalf("%s: %v", c.prompt, e)
		}
		got := ""
		for text, ids := range r.Others() {
			got += fmt.Sprintf("%q %v %v; ", text, ids, ids != nil)
		}
		if got != c.want {
			t.Errorf("%s: got %s, want %s", c.prompt, got, c.want)
		}
	}
}
