package anthropic_test

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kinference/kinference/internal/anthropic"
	"github.com/kinference/kinference/internal/chat"
	"github.com/kinference/kinference/internal/fleetsim/model"
	"github.com/kinference/kinference/internal/openai"
)

// body makes a Messages body with these members besides the usual ones.
func body(members string) string {
	return `{"model":"claude","max_tokens":10,` + members + `}`
}

func chatOf(t *testing.T, in string) string {
	t.Helper()
	var r anthropic.Request
	if e := r.Parse([]byte(in), anthropic.Settings{}); e != nil {
		t.Fatalf("parse: %v", e)
	}
	out := r.AppendChat(nil, anthropic.Worker)
	var q openai.Request
	if e := q.Parse(openai.RouteChat, out, 0); e != nil {
		t.Fatalf("the chat body is none: %v\n%s", e, out)
	}
	return string(out)
}

func TestAppendChat(t *testing.T) {
	const hi = `"messages":[{"role":"user","content":"hi"}]`
	head := func(messages string) string { return `{"model":"claude","messages":[` + messages + `],"max_tokens":10` }
	user := `{"role":"user","content":"hi"}`
	for _, c := range []struct{ name, in, want string }{
		{"least", hi, head(user) + `}`},
		{"system string", `"system":"Be\nterse","messages":[{"role":"user","content":"hi"}]`, head(`{"role":"system","content":"Be\nterse"},`+user) + `}`},
		{"system blocks, joined as vLLM does; cache_control is dropped", `"system":[{"type":"text","text":"A","cache_control":{"type":"ephemeral"}},{"type":"text","text":"B"}],` + hi,
			head(`{"role":"system","content":"AB"},`+user) + `}`},
		{"Claude Code's billing block", `"system":[{"type":"text","text":"x-anthropic-billing-header: cc_version=2.1; cch=0ab12;"},{"type":"text","text":"You are Claude Code"}],` + hi,
			head(`{"role":"system","content":"You are Claude Code"},`+user) + `}`},
		{"the same as a string", `"system":"x-anthropic-billing-header: cch=1;\nYou are \u00e9",` + hi, head(`{"role":"system","content":"You are \u00e9"},`+user) + `}`},
		{"a later block of that kind is text", `"system":[{"type":"text","text":"A"},{"type":"text","text":"x-anthropic-billing-header"}],` + hi,
			head(`{"role":"system","content":"Ax-anthropic-billing-header"},`+user) + `}`},
		{"nothing but the billing block", `"system":[{"type":"text","text":"x-anthropic-billing-header: a"}],` + hi, head(user) + `}`},
		{"roles of Claude Code (2.1.154)", `"messages":[{"role":"system","content":"S"},{"role":"ctx","content":"C"},{"role":"msg","content":[{"type":"text","text":"M"}]},{"role":"assistant","content":"A"},{"role":"system","content":"later"}]`,
			head(`{"role":"system","content":"S"},{"role":"user","content":[{"type":"text","text":"C"},{"type":"text","text":"M"}]},{"role":"assistant","content":"A"},{"role":"user","content":"later"}`) + `}`},
		{"consecutive roles are merged", `"messages":[{"role":"user","content":"a"},{"role":"user","content":"b"},{"role":"assistant","content":"c"},{"role":"assistant","content":[{"type":"text","text":"d"}]},{"role":"user","content":"e"}]`,
			head(`{"role":"user","content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]},{"role":"assistant","content":"cd"},{"role":"user","content":"e"}`) + `}`},
		{"image", `"messages":[{"role":"user","content":[{"type":"image","source":{"type":"base64","media_type":"image/png","data":"iVBO\/w=="}},{"type":"text","text":"what?"}]}]`,
			head(`{"role":"user","content":[{"type":"image_url","image_url":{"url":"data:image/png;base64,iVBO\/w=="}},{"type":"text","text":"what?"}]}`) + `}`},
		{"plain document", `"messages":[{"role":"user","content":[{"type":"document","source":{"type":"text","media_type":"text/plain","data":"D"}},{"type":"text","text":"T"}]}]`,
			head(`{"role":"user","content":[{"type":"text","text":"D"},{"type":"text","text":"T"}]}`) + `}`},
		{"a turn with tools", `"tools":[{"name":"f","description":"d","input_schema":{"type":"object", "x":1.50},"cache_control":{"type":"ephemeral"}},{"type":"custom","name":"g","input_schema":{},"strict":true}],
			"messages":[{"role":"user","content":"q"},{"role":"assistant","content":[{"type":"thinking","thinking":"hm","signature":"s"},{"type":"redacted_thinking","data":"x"},{"type":"text","text":"t"},
			{"type":"tool_use","id":"kin64_ZnVuY3Rpb25zLmY6MA","name":"f","input":{"b": 1,  "a":[ "x y", {"c":"\" }"} ]}},{"type":"tool_use","id":"call_2","name":"g","input":{}}]},
			{"role":"user","content":[{"type":"text","text":"and now?"},{"type":"tool_result","tool_use_id":"kin64_ZnVuY3Rpb25zLmY6MA","content":[{"type":"text","text":"1"},{"type":"image","source":{"type":"base64","media_type":"image/gif","data":"AAAA"}},{"type":"text","text":"2"}]},
			{"type":"tool_result","tool_use_id":"call_2","is_error":true}]}]`,
			strings.Replace(head(`{"role":"user","content":"q"},{"role":"assistant","reasoning":"hm","content":"t","tool_calls":[{"id":"functions.f:0","type":"function","function":{"name":"f","arguments":"{\"b\":1,\"a\":[\"x y\",{\"c\":\"\\\" }\"}]}"}},`+
				`{"id":"call_2","type":"function","function":{"name":"g","arguments":"{}"}}]},{"role":"tool","tool_call_id":"functions.f:0","content":"1\n2"},{"role":"tool","tool_call_id":"call_2","content":""},`+
				`{"role":"user","content":[{"type":"text","text":"and now?"},{"type":"image_url","image_url":{"url":"data:image/gif;base64,AAAA"}}]}`), `,"max_tokens":10`,
				`,"tools":[{"type":"function","function":{"name":"f","description":"d","parameters":{"type":"object", "x":1.50}}},{"type":"function","function":{"name":"g","parameters":{},"strict":true}}],"max_tokens":10`, 1) + `}`},
		{"calls without text", `"messages":[{"role":"user","content":"q"},{"role":"assistant","content":[{"type":"tool_use","id":"a","name":"f","input":{}}]},{"role":"user","content":[{"type":"tool_result","tool_use_id":"a","content":"r"}]}]`,
			head(`{"role":"user","content":"q"},{"role":"assistant","content":null,"tool_calls":[{"id":"a","type":"function","function":{"name":"f","arguments":"{}"}}]},{"role":"tool","tool_call_id":"a","content":"r"}`) + `}`},
		{"tool_reference", `"messages":[{"role":"user","content":[{"type":"tool_result","tool_use_id":"a","content":[{"type":"tool_reference","tool_name":"f"}]}]}]`,
			head(`{"role":"tool","tool_call_id":"a","content":[{"type":"tool_reference","name":"f"}]}`) + `}`},
		{"prefilled answer", `"messages":[{"role":"user","content":"q"},{"role":"assistant","content":"The answer is"}]`,
			head(`{"role":"user","content":"q"},{"role":"assistant","content":"The answer is"}`) + `,"add_generation_prompt":false,"continue_final_message":true}`},
		{"tool choice", `"tools":[{"name":"f","input_schema":{}}],"tool_choice":{"type":"tool","name":"f","disable_parallel_tool_use":true},` + hi,
			`{"model":"claude","messages":[` + user + `],"tools":[{"type":"function","function":{"name":"f","parameters":{}}}],"tool_choice":{"type":"function","function":{"name":"f"}},"parallel_tool_calls":false,"max_tokens":10}`},
		{"any tool", `"tools":[{"name":"f","input_schema":{}}],"tool_choice":{"type":"any"},` + hi,
			`{"model":"claude","messages":[` + user + `],"tools":[{"type":"function","function":{"name":"f","parameters":{}}}],"tool_choice":"required","max_tokens":10}`},
		{"sampling and stops", `"stop_sequences":["\n\nHuman:","x"],"temperature":0.70,"top_p":1,"top_k":40,` + hi,
			head(user) + `,"stop":["\n\nHuman:","x"],"temperature":0.70,"top_p":1,"top_k":40}`},
		{"thinking on, with effort", `"thinking":{"type":"enabled","budget_tokens":1024},"output_config":{"effort":"max"},` + hi,
			head(user) + `,"reasoning_effort":"high","chat_template_kwargs":{"enable_thinking":true,"thinking":true}}`},
		{"thinking off", `"thinking":{"type":"disabled"},"output_config":{"effort":"low"},` + hi, head(user) + `,"chat_template_kwargs":{"enable_thinking":false,"thinking":false}}`},
		{"the client's own word for it", `"thinking":{"type":"adaptive"},"chat_template_kwargs":{"thinking":false,"x":1},` + hi,
			head(user) + `,"chat_template_kwargs":{"thinking":false,"x":1,"enable_thinking":true}}`},
		{"effort alone does not begin to think", `"output_config":{"effort":"high"},` + hi, head(user) + `}`},
		{"schema", `"output_config":{"format":{"type":"json_schema","schema":{"type":"object"}}},` + hi,
			head(user) + `,"response_format":{"type":"json_schema","json_schema":{"name":"output","strict":true,"schema":{"type":"object"}}}}`},
		{"stream", `"stream":true,` + hi, head(user) + `,"stream":true,"stream_options":{"include_usage":true,"continuous_usage_stats":true}}`},
		{"what has no counterpart", `"metadata":{"user_id":"u"},"service_tier":"auto","context_management":{"edits":[]},"betas":["x"],"mcp_servers":[],"container":null,` + hi, head(user) + `}`},
		{"salt", `"cache_salt":"s",` + hi, head(user) + `,"cache_salt":"s"}`},
	} {
		t.Run(c.name, func(t *testing.T) {
			if diff := cmp.Diff(c.want, chatOf(t, body(c.in))); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

func TestAppendChatForProviders(t *testing.T) {
	var r anthropic.Request
	in := body(`"stream":true,"top_k":4,"cache_salt":"s","thinking":{"type":"enabled","budget_tokens":1},"messages":[{"role":"user","content":"a"},{"role":"assistant","content":[{"type":"thinking","thinking":"t","signature":""},{"type":"text","text":"b"}]}]`)
	if e := r.Parse([]byte(in), anthropic.Settings{}); e != nil {
		t.Fatal(e)
	}
	want := `{"model":"claude","messages":[{"role":"user","content":"a"},{"role":"assistant","content":"b"}],"max_tokens":10,"stream":true,"stream_options":{"include_usage":true}}`
	if got := string(r.AppendChat(nil, anthropic.Provider)); got != want {
		t.Errorf("got %s\nwant %s", got, want)
	}
}

func TestParseRefuses(t *testing.T) {
	const hi = `"messages":[{"role":"user","content":"hi"}]`
	deep := strings.Repeat(`[`, 70) + strings.Repeat(`]`, 70)
	for _, c := range []struct{ name, in, param, want string }{
		{"no JSON", `{`, "", "not valid JSON"},
		{"key twice", `{"model":"a","model":"b"}`, "", "repeated key"},
		{"too deep", body(`"x":` + deep + `,` + hi), "", "nested too deeply"},
		{"bad UTF-8", body("\"x\":\"\xff\"," + hi), "", "invalid UTF-8"},
		{"spelling", `{"Model":"a"}`, "model", "case-sensitive"},
		{"no model", `{"max_tokens":1,` + hi + `}`, "model", "Field required"},
		{"empty model", `{"model":"","max_tokens":1,` + hi + `}`, "model", "at least 1 character"},
		{"no max_tokens", `{"model":"a",` + hi + `}`, "max_tokens", "Field required"},
		{"max_tokens 0", `{"model":"a","max_tokens":0,` + hi + `}`, "max_tokens", "greater than or equal to 1"},
		{"max_tokens as text", `{"model":"a","max_tokens":"5",` + hi + `}`, "max_tokens", "valid integer"},
		{"no messages", body(`"x":1`), "messages", "Field required"},
		{"empty messages", body(`"messages":[]`), "messages", "at least one"},
		{"role", body(`"messages":[{"role":"tool","content":"x"}]`), "messages.0.role", "Input should be"},
		{"no content", body(`"messages":[{"role":"user"}]`), "messages.0.content", "Field required"},
		{"block type", body(`"messages":[{"role":"user","content":[{"type":"video"}]}]`), "messages.0.content.0", `"video" are not supported`},
		{"text without text", body(`"messages":[{"role":"user","content":[{"type":"text"}]}]`), "messages.0.content.0.text", "Field required"},
		{"image by URL", body(`"messages":[{"role":"user","content":[{"type":"image","source":{"type":"url","url":"http://169.254.169.254/"}}]}]`), "messages.0.content.0.source", "not taken here"},
		{"image by URL in a result", body(`"messages":[{"role":"user","content":[{"type":"tool_result","tool_use_id":"a","content":[{"type":"image","source":{"type":"url","url":"https://x/"}}]}]}]`),
			"messages.0.content.0.content.0.source", "not taken here"},
		{"image that is none", body(`"messages":[{"role":"user","content":[{"type":"image","source":{"type":"base64","media_type":"image/png","data":"a b\n"}}]}]`), "messages.0.content.0.source.data", "base64"},
		{"image of another kind", body(`"messages":[{"role":"user","content":[{"type":"image","source":{"type":"base64","media_type":"image/svg+xml","data":"AA"}}]}]`), "messages.0.content.0.source.media_type", "one of"},
		{"PDF", body(`"messages":[{"role":"user","content":[{"type":"document","source":{"type":"base64","media_type":"application/pdf","data":"AA"}}]}]`), "messages.0.content.0.source.type", "plain text"},
		{"tool_use of a user", body(`"messages":[{"role":"user","content":[{"type":"tool_use","id":"a","name":"f","input":{}}]}]`), "messages.0.content.0", "assistant message"},
		{"tool_result of an assistant", body(`"messages":[{"role":"assistant","content":[{"type":"tool_result","tool_use_id":"a"}]}]`), "messages.0.content.0", "user message"},
		{"tool_use with text as input", body(`"messages":[{"role":"assistant","content":[{"type":"tool_use","id":"a","name":"f","input":"{}"}]}]`), "messages.0.content.0.input", "object"},
		{"result in a result", body(`"messages":[{"role":"user","content":[{"type":"tool_result","tool_use_id":"a","content":[{"type":"tool_result","tool_use_id":"b","content":[{"type":"text","text":"x"}]}]}]}]`),
			"messages.0.content.0.content.0.content", "cannot hold"},
		{"server tool", body(`"tools":[{"type":"web_search_20250305","name":"web_search"}],` + hi), "tools.0", "run at Anthropic"},
		{"tool twice", body(`"tools":[{"name":"f","input_schema":{}},{"name":"f","input_schema":{}}],` + hi), "tools", "unique"},
		{"tool without schema", body(`"tools":[{"name":"f"}],` + hi), "tools.0.input_schema", "Field required"},
		{"choice of an unknown tool", body(`"tools":[{"name":"f","input_schema":{}}],"tool_choice":{"type":"tool","name":"g"},` + hi), "tool_choice.name", "no tool"},
		{"choice without tools", body(`"tool_choice":{"type":"any"},` + hi), "tool_choice", "if tools are given"},
		{"temperature of OpenAI", body(`"temperature":1.5,` + hi), "temperature", "between 0 and 1"},
		{"thinking without budget", body(`"thinking":{"type":"enabled"},` + hi), "thinking.budget_tokens", "positive"},
		{"MCP", body(`"mcp_servers":[{"type":"url","url":"http://x"}],` + hi), "mcp_servers", "not supported"},
		{"stop sequences", body(`"stop_sequences":[""],` + hi), "stop_sequences.0", "not empty"},
		{"system image", body(`"system":[{"type":"image","source":{"type":"base64","media_type":"image/png","data":"AA"}}],` + hi), "system.0.type", "'text'"},
	} {
		t.Run(c.name, func(t *testing.T) {
			var r anthropic.Request
			e := r.Parse([]byte(c.in), anthropic.Settings{})
			if e == nil || e.Status != 400 || e.Param != c.param || !strings.Contains(e.Message, c.want) {
				t.Errorf("got %v of %q, want %q of %q", e, paramOf(e), c.want, c.param)
			}
		})
	}
}

func paramOf(e *openai.Error) string {
	if e == nil {
		return ""
	}
	return e.Param
}

func TestCountBody(t *testing.T) {
	var r anthropic.Request
	in := []byte(`{"model":"m","messages":[{"role":"user","content":[{"type":"image","source":{"type":"base64","media_type":"image/png","data":"AA"}}]}],"context_management":{},"new":1}`)
	if e := r.Parse(in, anthropic.Settings{Count: true}); e != nil || r.MaxTokens != 0 || r.Pictures != 1 {
		t.Errorf("got %v, %d tokens, %d pictures", e, r.MaxTokens, r.Pictures)
	}
	if diff := cmp.Diff([]string{"context_management", "new"}, r.Dropped); diff != "" {
		t.Errorf("dropped (-want +got):\n%s", diff)
	}
}

// TestNextTurnBeginsAlike renders a conversation of Claude Code turn by turn
// with real templates: each prompt begins with the one before, although the
// billing block, cache_control, metadata and the client's way to write JSON
// change.
func TestNextTurnBeginsAlike(t *testing.T) {
	simulated, err := model.Dir()
	if err != nil {
		t.Fatal(err)
	}
	home, _ := os.UserHomeDir()
	others, _ := filepath.Glob(filepath.Join(home, ".cache", "kinference", "tokenizers", "*")) // scripts/fetch-tokenizers.sh
	turns := []string{
		`{"role":"user","content":[{"type":"text","text":"fix é the bug"%s}]}`,
		`{"role":"assistant","content":[{"type":"thinking","thinking":"read it first","signature":"kinference-unsigned"},{"type":"text","text":"Reading."},{"type":"tool_use","id":"call_1","name":"Read","input":{"path": "a.go",%s "n": 1.50}}]}`,
		`{"role":"user","content":[{"type":"tool_result","tool_use_id":"call_1","content":[{"type":"text","text":"package a"}]%s}]}`,
		`{"role":"assistant","content":[{"type":"text","text":"Done."}]}`,
		`{"role":"user","content":"thanks"}`,
	}
	request := func(n int) string {
		var list []string
		for i, turn := range turns[:n] {
			mark := ""
			if i == n-1 && strings.Contains(turn, `%s}`) {
				mark = `,"cache_control":{"type":"ephemeral"}`
			}
			if strings.Contains(turn, `,%s "n"`) {
				mark = strings.Repeat(" ", n)
			}
			list = append(list, strings.ReplaceAll(turn, "%s", mark))
		}
		return body(`"stream":true,"metadata":{"user_id":"u` + string(rune('0'+n)) + `"},"system":[{"type":"text","text":"x-anthropic-billing-header: cch=` + string(rune('a'+n)) +
			`"},{"type":"text","text":"You are Claude Code","cache_control":{"type":"ephemeral"}}],"tools":[{"name":"Read","description":"reads","input_schema":{"type":"object","properties":{"path":{"type":"string"}}}}],"messages":[` + strings.Join(list, ",") + `]`)
	}
	templates := 0
	for _, dir := range append(others, simulated) {
		template, err := chat.Load(dir)
		if err != nil {
			continue
		}
		rendered := func(n int, prompt bool) (string, error) {
			var q openai.Request
			if e := q.Parse(openai.RouteChat, []byte(chatOf(t, request(n))), 0); e != nil {
				t.Fatal(e)
			}
			return template.Render(chat.Request{Messages: q.Messages, Tools: q.Tools, AddGenerationPrompt: prompt})
		}
		first, err := rendered(1, false)
		if err != nil {
			t.Errorf("%s: %v", dir, err)
			continue
		}
		templates++
		second, err := rendered(3, false)
		if err != nil {
			t.Errorf("%s: %v", dir, err)
			continue
		}
		if strings.Contains(second, "billing") || strings.Contains(second, "cache_control") || strings.Contains(second, "ephemeral") {
			t.Errorf("%s: the prompt holds what changes:\n%s", dir, second)
		}
		if !strings.HasPrefix(second, strings.TrimRight(first, "\n")) {
			t.Errorf("%s: turn 2 does not begin with turn 1:\n%s\n---\n%s", dir, first, second)
		}
	}
	if t.Logf("%d templates", templates); templates == 0 {
		t.Error("not even the simulated model's template could be loaded")
	}
	// The bytes of the messages, from which hashes are made where nothing is known of the template.
	for n := 1; n < len(turns); n += 2 {
		a, b := chatOf(t, request(n)), chatOf(t, request(n+2))
		cut, _, _ := strings.Cut(a, `],"tools"`)
		if !strings.HasPrefix(b, cut) {
			t.Errorf("turn %d does not begin with turn %d:\n%s\n%s", n+2, n, a, b)
		}
	}
}

// FuzzRequest reads bodies: never a panic, what is accepted is also JSON to a
// second parser, and becomes a chat body that ingress accepts, the same each
// time, for workers and providers.
func FuzzRequest(f *testing.F) {
	f.Add([]byte(body(`"system":[{"type":"text","text":"x-anthropic-billing-header"}],"messages":[{"role":"user","content":[{"type":"image","source":{"type":"base64","media_type":"image/png","data":"AA"}}]}]`)))
	f.Add([]byte(body(`"messages":[{"role":"assistant","content":[{"type":"thinking","thinking":"\ud83d\ude00"},{"type":"tool_use","id":"kin64_eA","name":"f","input":{"a" :1}}]},{"role":"user","content":[{"type":"tool_result","tool_use_id":"x","content":[{"type":"text","text":"é"}]}]}]`)))
	f.Add([]byte(body(`"system":"x-anthropic-billing-header\\\n\"","tools":[{"name":"f","input_schema":{}}],"tool_choice":{"type":"any"},"stop_sequences":["a"],"thinking":{"type":"disabled"},"chat_template_kwargs":{"a":1},"messages":[{"role":"msg","content":""}]`)))
	f.Fuzz(func(t *testing.T, in []byte) {
		var r anthropic.Request
		if e := r.Parse(in, anthropic.Settings{}); e != nil {
			return
		}
		if !json.Valid(in) {
			t.Fatal("accepted what is no JSON")
		}
		for _, v := range anthropic.Unread(&r.Body) {
			if !json.Valid(v.Raw) {
				t.Fatalf("unread: %s", v.Raw)
			}
		}
		for _, target := range []anthropic.Target{anthropic.Worker, anthropic.Provider} {
			out := r.AppendChat(nil, target)
			var q openai.Request
			if e := q.Parse(openai.RouteChat, out, 256); e != nil {
				t.Fatalf("%v\n%s", e, out)
			}
			if q.Model != r.Model || q.Stream != r.Stream || q.MaxTokens != r.MaxTokens {
				t.Errorf("got %q %v %d", q.Model, q.Stream, q.MaxTokens)
			}
			if again := r.AppendChat(nil, target); !bytes.Equal(out, again) {
				t.Error("another body the second time")
			}
		}
	})
}

func BenchmarkRequest(b *testing.B) {
	// The size of a first turn of Claude Code.
	text := openai.AppendString(nil, strings.Repeat("Some rule for \"agents\" that goes on.\n", 2000))
	in := []byte(body(`"system":[{"type":"text","text":` + string(text) + `}],"messages":[` + strings.Repeat(`{"role":"user","content":[{"type":"text","text":"`+strings.Repeat("word ", 400)+`"}]},{"role":"assistant","content":"ok"},`, 100) + `{"role":"user","content":"go"}]`))
	b.SetBytes(int64(len(in)))
	b.ReportAllocs()
	var out []byte
	for b.Loop() {
		var r anthropic.Request
		if e := r.Parse(in, anthropic.Settings{}); e != nil {
			b.Fatal(e)
		}
		out = r.AppendChat(out[:0], anthropic.Worker)
	}
}
