package responses_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kinference/kinference/internal/blocks/blockstest"
	"github.com/kinference/kinference/internal/openai"
	"github.com/kinference/kinference/internal/responses"
)

func TestAppendChat(t *testing.T) {
	for _, c := range []struct{ name, in, want string }{
		{"text", `"input":"hi"`, `{"model":"m","messages":[{"role":"user","content":"hi"}]}`},
		{"instructions and developer, as Codex sends them", `"instructions":"A","input":[{"type":"message","role":"developer","content":[{"type":"input_text","text":"B"}]},{"role":"user","content":"hi"},{"role":"system","content":"later"}],"store":false,"include":["reasoning.encrypted_content"],"prompt_cache_key":"k"`,
			`{"model":"m","messages":[{"role":"system","content":"A\n\nB"},{"role":"user","content":[{"type":"text","text":"hi"},{"type":"text","text":"later"}]}]}`},
		{"a round of tools with reasoning", `"input":[{"role":"user","content":"q"},{"type":"reasoning","id":"rs_1","summary":[],"content":[{"type":"reasoning_text","text":"hm"}]},{"type":"message","role":"assistant","content":[{"type":"output_text","text":"t","annotations":[]}]},
			{"type":"function_call","call_id":"a","name":"f","arguments":"{\"x\": 1}"},{"type":"function_call","call_id":"b","name":"g","arguments":"{}"},{"type":"function_call_output","call_id":"a","output":"r"},{"type":"function_call_output","call_id":"b","output":[{"type":"input_text","text":"s"}]},
			{"type":"reasoning","summary":[{"type":"summary_text","text":"so"}]},{"role":"assistant","content":"done"}],"tools":[{"type":"function","name":"f","description":"d","parameters":{"type":"object"},"strict":false}],"tool_choice":{"type":"function","name":"f"},"parallel_tool_calls":false`,
			`{"model":"m","messages":[{"role":"user","content":"q"},{"role":"assistant","reasoning":"hm","content":"t","tool_calls":[{"id":"a","type":"function","function":{"name":"f","arguments":"{\"x\": 1}"}},{"id":"b","type":"function","function":{"name":"g","arguments":"{}"}}]},` +
				`{"role":"tool","tool_call_id":"a","content":"r"},{"role":"tool","tool_call_id":"b","content":"s"},{"role":"assistant","reasoning":"so","content":"done"}],` +
				`"tools":[{"type":"function","function":{"name":"f","description":"d","parameters":{"type":"object"},"strict":false}}],"tool_choice":{"type":"function","function":{"name":"f"}},"parallel_tool_calls":false}`},
		{"picture, limits, schema, effort", `"input":[{"role":"user","content":[{"type":"input_text","text":"a"},{"type":"input_image","image_url":"data:image/png;base64,AA","detail":"low"}]}],"max_output_tokens":5,"temperature":0.50,"stream":true,"reasoning":{"effort":"xhigh"},
			"text":{"format":{"type":"json_schema","name":"n","schema":{"type":"object"},"strict":true}}`,
			`{"model":"m","messages":[{"role":"user","content":[{"type":"text","text":"a"},{"type":"image_url","image_url":{"url":"data:image/png;base64,AA"}}]}],"max_tokens":5,"temperature":0.50,"response_format":{"type":"json_schema","json_schema":{"name":"n","schema":{"type":"object"},"strict":true}},` +
				`"reasoning_effort":"high","stream":true,"stream_options":{"include_usage":true,"continuous_usage_stats":true}}`},
	} {
		t.Run(c.name, func(t *testing.T) {
			var r responses.Request
			if e := r.Parse([]byte(`{"model":"m",`+c.in+`}`), responses.Settings{}); e != nil {
				t.Fatal(e)
			}
			got := r.AppendChat(nil)
			if diff := cmp.Diff(c.want, string(got)); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
			var q openai.Request
			if e := q.Parse(openai.RouteChat, got, 0); e != nil {
				t.Error(e)
			}
		})
	}
}

func TestParseRefuses(t *testing.T) {
	for _, c := range []struct{ in, param, code string }{
		{`{`, "", "invalid_json"}, {`{"input":"x"}`, "model", ""}, {`{"model":"m"}`, "input", ""}, {`{"model":"m","input":[]}`, "input", ""}, {`{"model":"m","input":5}`, "input", ""},
		{`{"model":"m","input":"x","previous_response_id":"resp_1"}`, "previous_response_id", "unsupported_parameter"},
		{`{"model":"m","input":"x","conversation":{"id":"c"}}`, "conversation", "unsupported_parameter"},
		{`{"model":"m","input":"x","background":true}`, "background", "unsupported_parameter"},
		{`{"model":"m","input":[{"type":"item_reference","id":"x"}]}`, "input[0]", "unsupported_parameter"},
		{`{"model":"m","input":[{"type":"web_search_call"}]}`, "input[0].type", "unsupported_parameter"},
		{`{"model":"m","input":[{"role":"user","content":[{"type":"input_image","image_url":"http://10.0.0.1/"}]}]}`, "input[0].content[0].image_url", ""},
		{`{"model":"m","input":[{"role":"user","content":[{"type":"input_file","file_id":"x"}]}]}`, "input[0].content[0].type", "unsupported_parameter"},
		{`{"model":"m","input":"x","tools":[{"type":"web_search"}]}`, "tools[0].type", "unsupported_parameter"},
		{`{"model":"m","input":"x","max_output_tokens":0}`, "max_output_tokens", ""}, {`{"model":"m","input":"x","stream":"yes"}`, "stream", ""},
		{`{"model":"m","Input":"x"}`, "input", "invalid_json"}, {`{"model":"m","input":"x","text":{"format":{"type":"xml"}}}`, "text.format.type", "unsupported_parameter"},
		{`{"model":"m","input":[{"type":"function_call","call_id":"a","name":"f"}]}`, "input[0].arguments", ""},
	} {
		var r responses.Request
		if e := r.Parse([]byte(c.in), responses.Settings{}); e == nil || e.Status != 400 || e.Param != c.param || e.Code != c.code {
			t.Errorf("%s: got %+v", c.in, e)
		}
	}
}

var answer = responses.Answer{ID: "resp_1", Model: "m", Created: 5, Input: 7, Echo: []byte(`"tools":[]`)}

func translate(chunks ...string) []byte {
	s := responses.NewStream(answer)
	var out []byte
	for _, c := range chunks {
		if c == "[DONE]" {
			out = s.End(out)
		} else {
			out = s.Chunk(out, []byte(c))
		}
	}
	return out
}

type item struct {
	Type, ID, Status, Name, Arguments string
	CallID                            string `json:"call_id"`
	Content                           []struct{ Type, Text string }
}

type response struct {
	ID, Status, Model string
	Error             *struct{ Code, Message string }
	Incomplete        *struct{ Reason string } `json:"incomplete_details"`
	Output            []item
	Usage             *struct {
		Input, Output int `json:"-"`
		In            int `json:"input_tokens"`
		Out           int `json:"output_tokens"`
		Details       struct {
			Cached int `json:"cached_tokens"`
		} `json:"input_tokens_details"`
	}
}

// check follows the grammar of a stream: numbered events, items one after
// another, what the deltas make is what the done events and the response say.
func check(t *testing.T, stream []byte) *response {
	t.Helper()
	type event struct {
		Type     string
		Number   *int `json:"sequence_number"`
		Response *response
		Item     *item
		Index    *int   `json:"output_index"`
		ItemID   string `json:"item_id"`
		Delta    string
		Text     *string
		Args     *string `json:"arguments"`
		Part     *struct{ Type, Text string }
	}
	events := openai.NewReader(bytes.NewReader(stream), 1<<26)
	var final *response
	var items []item
	open, text, n := false, "", 0
	parted := false
	for {
		e, err := events.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if e.Data == nil {
			continue // a comment
		}
		var v event
		if err := json.Unmarshal(e.Data, &v); err != nil {
			t.Fatalf("%v: %s", err, e.Data)
		}
		fail := func(why string) { t.Fatalf("%s at %s of\n%s", why, e.Data, stream) }
		switch {
		case v.Type != string(e.Type):
			fail("event name")
		case v.Number == nil || *v.Number != n:
			fail("sequence_number")
		case final != nil:
			fail("after the end")
		case n < 2 && v.Type != []string{"response.created", "response.in_progress"}[n]:
			fail("beginning")
		}
		n++
		last := len(items) - 1
		switch v.Type {
		case "response.created", "response.in_progress":
			if v.Response.Status != "in_progress" || len(v.Response.Output) > 0 {
				fail("response")
			}
		case "response.output_item.added":
			if open || *v.Index != len(items) || v.Item.Status != "in_progress" {
				fail("item begins")
			}
			open, text, parted = true, "", v.Item.Type == "function_call"
			items = append(items, *v.Item)
		case "response.content_part.added":
			if parted || !open || *v.Index != last || v.Part.Text != "" {
				fail("part begins")
			}
			parted = true
		case "response.output_text.delta", "response.reasoning_text.delta", "response.function_call_arguments.delta":
			if !open || !parted || *v.Index != last || v.ItemID != items[last].ID || v.Delta == "" {
				fail("delta")
			}
			text += v.Delta
		case "response.output_text.done", "response.reasoning_text.done":
			if *v.Text != text {
				fail("text")
			}
		case "response.function_call_arguments.done":
			if *v.Args != text {
				fail("arguments")
			}
		case "response.content_part.done":
			if v.Part.Text != text {
				fail("part ends")
			}
		case "response.output_item.done":
			if !open || *v.Index != last || v.Item.ID != items[last].ID {
				fail("item ends")
			}
			items[last], open = *v.Item, false
			if got := v.Item.Arguments; v.Item.Type == "function_call" && got != text || v.Item.Type != "function_call" && v.Item.Content[0].Text != text {
				fail("item's text")
			}
		case "response.completed", "response.incomplete", "response.failed":
			if final = v.Response; "response."+final.Status != v.Type {
				fail("status")
			}
			if final.Status != "failed" {
				if diff := cmp.Diff(items, final.Output); diff != "" && len(items) > 0 || open {
					fail("output " + diff)
				}
			}
		default:
			fail("unknown event")
		}
	}
	if final == nil {
		t.Fatalf("no end of\n%s", stream)
	}
	return final
}

func verify(t *testing.T, b *blockstest.Stream) {
	t.Helper()
	r := check(t, translate(b.Chunks...))
	text, think := "", ""
	var calls []blockstest.Call
	for _, i := range r.Output {
		switch i.Type {
		case "message":
			text += i.Content[0].Text
		case "reasoning":
			think += i.Content[0].Text
		case "function_call":
			calls = append(calls, blockstest.Call{ID: i.CallID, Name: i.Name, Arguments: i.Arguments})
		}
	}
	slices.SortFunc(calls, func(a, b blockstest.Call) int { return strings.Compare(a.ID, b.ID) })
	if text != b.Text || think != b.Thinking {
		t.Errorf("got %q, %q, want %q, %q", text, think, b.Text, b.Thinking)
	}
	if diff := cmp.Diff(b.Calls, calls); diff != "" {
		t.Errorf("calls (-want +got):\n%s", diff)
	}
	if r.Usage.In != b.Usage.Prompt || r.Usage.Out != b.Usage.Output || r.Usage.Details.Cached != b.Usage.Cached {
		t.Errorf("usage: got %+v, want %+v", r.Usage, b.Usage)
	}
	if want := map[bool]string{true: "incomplete", false: "completed"}[b.Finish == "length"]; r.Status != want {
		t.Errorf("status: got %q, want %q", r.Status, want)
	}
}

func TestStreamGrammar(t *testing.T) {
	for seed := range uint64(2000) {
		if verify(t, blockstest.New(seed)); t.Failed() {
			t.Fatalf("seed %d", seed)
		}
	}
}

func TestStreamErrors(t *testing.T) {
	text := `{"choices":[{"index":0,"delta":{"content":"a"}}]}`
	for _, c := range []struct{ chunk, code string }{
		{`{"error":{"message":"gone","type":"server_error","code":"upstream_error"}}`, "server_error"},
		{`{"error":{"message":"busy","type":"requests","code":"rate_limit_exceeded"}}`, "rate_limit_exceeded"},
		{`{`, "server_error"},
	} {
		r := check(t, translate(text, c.chunk, "[DONE]"))
		if r.Status != "failed" || r.Error == nil || r.Error.Code != c.code || r.Error.Message == "" {
			t.Errorf("%s: got %+v", c.chunk, r)
		}
	}
	s := responses.NewStream(answer)
	out := s.Ping(s.Ping(nil))
	if got := bytes.Count(out, []byte(": waiting\n\n")); got != 2 {
		t.Errorf("%d pings in %s", got, out)
	}
	if r := check(t, s.Error(out, openai.Overloaded("full", 0))); r.Status != "failed" || r.Error.Code != "server_error" {
		t.Errorf("got %+v", r)
	}
}

func TestAppendResponse(t *testing.T) {
	in := `{"choices":[{"message":{"content":"Hi","reasoning":"hm","tool_calls":[{"id":"a","function":{"name":"f","arguments":"{}"}}]},"finish_reason":"length"}],"usage":{"prompt_tokens":10,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":8},"completion_tokens_details":{"reasoning_tokens":1}}}`
	got, err := responses.AppendResponse(nil, []byte(in), answer)
	want := `{"id":"resp_1","object":"response","created_at":5,"status":"incomplete","error":null,"incomplete_details":{"reason":"max_output_tokens"},"model":"m","output":[` +
		`{"type":"reasoning","id":"rs_1_0","summary":[],"content":[{"type":"reasoning_text","text":"hm"}],"status":"incomplete"},{"type":"message","id":"msg_1_1","role":"assistant","content":[{"type":"output_text","text":"Hi","annotations":[],"logprobs":[]}],"status":"incomplete"},` +
		`{"type":"function_call","id":"fc_1_2","call_id":"a","name":"f","arguments":"{}","status":"incomplete"}],"tools":[],"usage":{"input_tokens":10,"input_tokens_details":{"cached_tokens":8},"output_tokens":3,"output_tokens_details":{"reasoning_tokens":1},"total_tokens":13}}`
	if diff := cmp.Diff(want, string(got)); err != nil || diff != "" {
		t.Errorf("%v (-want +got):\n%s", err, diff)
	}
	for _, in := range []string{`{`, `{}`, `{"choices":[{"message":1}]}`} {
		if _, err := responses.AppendResponse(nil, []byte(in), answer); err == nil {
			t.Errorf("%s is no answer", in)
		}
	}
}

// FuzzResponses reads bodies and chunks of any shape: what is accepted becomes
// a chat body that ingress accepts, and every stream follows the grammar.
func FuzzResponses(f *testing.F) {
	f.Add(uint64(1), []byte(`{"model":"m","instructions":"a","input":[{"role":"user","content":[{"type":"input_text","text":"x"}]},{"type":"function_call","call_id":"a","name":"f","arguments":"{}"},{"type":"function_call_output","call_id":"a","output":"r"}],"tools":[{"type":"function","name":"f"}],"stream":true}`))
	f.Add(uint64(2), []byte(`{"choices":[{"delta":{"content":"a"}}]}`+"\n"+`{"choices":[{"delta":{"tool_calls":[{"index":0,"function":{"name":"f","arguments":"{"}}]}}]}`))
	f.Fuzz(func(t *testing.T, seed uint64, in []byte) {
		verify(t, blockstest.New(seed))
		s := responses.NewStream(answer)
		var out []byte
		for _, line := range bytes.Split(in, []byte("\n")) {
			out = s.Chunk(out, line)
		}
		if seed%2 == 0 {
			out = s.Error(out, openai.Server(502, "", "gone"))
		}
		check(t, s.End(out))
		var r responses.Request
		if r.Parse(in, responses.Settings{}) != nil {
			return
		}
		chat := r.AppendChat(nil)
		var q openai.Request
		if e := q.Parse(openai.RouteChat, chat, 256); e != nil {
			t.Fatalf("%v\n%s", e, chat)
		}
		if echo := r.Echo(); !json.Valid(fmt.Appendf(nil, "{%s}", echo)) || bytes.ContainsAny(echo, "\r\n") {
			t.Fatalf("echo %s", echo)
		}
	})
}
