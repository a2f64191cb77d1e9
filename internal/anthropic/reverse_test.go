package anthropic_test

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kinference/kinference/internal/anthropic"
	"github.com/kinference/kinference/internal/anthropic/grammar"
	"github.com/kinference/kinference/internal/blocks/blockstest"
	"github.com/kinference/kinference/internal/openai"
)

func toMessages(t *testing.T, chat string, limits anthropic.Limits) (string, []string, *openai.Error) {
	t.Helper()
	var o openai.Object
	if err := o.Parse([]byte(chat), 0); err != nil {
		t.Fatal(err)
	}
	out, dropped, e := anthropic.AppendMessages(nil, &o, limits)
	return string(out), dropped, e
}

func TestAppendMessages(t *testing.T) {
	const hi = `"messages":[{"role":"user","content":"hi"}]`
	const user = `{"role":"user","content":[{"type":"text","text":"hi"}]}`
	head := func(more, messages string) string {
		return `{"model":"m","max_tokens":4096` + more + `,"messages":[` + messages + `]`
	}
	for _, c := range []struct {
		name, in, want string
		dropped        []string
	}{
		{"least", hi, head("", user) + `}`, nil},
		{"system and developer", `"messages":[{"role":"system","content":"A"},{"role":"developer","content":[{"type":"text","text":"B"}]},{"role":"user","content":"hi"},{"role":"system","content":"C"}]`,
			head(`,"system":[{"type":"text","text":"A"},{"type":"text","text":"B"}]`, `{"role":"user","content":[{"type":"text","text":"hi"},{"type":"text","text":"C"}]}`) + `}`, nil},
		{"tools, results first", `"tools":[{"type":"function","function":{"name":"f","description":"d","parameters":{"properties":{}},"strict":true}},{"type":"function","function":{"name":"g"}}],"parallel_tool_calls":false,
			"messages":[{"role":"user","content":"q"},{"role":"assistant","content":null,"reasoning":"secret","tool_calls":[{"id":"functions.f:0","type":"function","function":{"name":"f","arguments":"{\"a\": 1}"}},
			{"id":"b","type":"function","function":{"name":"g","arguments":""}}]},{"role":"tool","tool_call_id":"functions.f:0","content":"r"},{"role":"tool","tool_call_id":"b","content":[{"type":"text","text":"s"}]},{"role":"user","content":"and"}]`,
			head("", `{"role":"user","content":[{"type":"text","text":"q"}]},{"role":"assistant","content":[{"type":"tool_use","id":"kin64_ZnVuY3Rpb25zLmY6MA","name":"f","input":{"a": 1}},{"type":"tool_use","id":"b","name":"g","input":{}}]},`+
				`{"role":"user","content":[{"type":"tool_result","tool_use_id":"kin64_ZnVuY3Rpb25zLmY6MA","content":[{"type":"text","text":"r"}]},{"type":"tool_result","tool_use_id":"b","content":[{"type":"text","text":"s"}]},{"type":"text","text":"and"}]}`) +
				`,"tools":[{"name":"f","description":"d","input_schema":{"properties":{},"type":"object"}},{"name":"g","input_schema":{"type":"object","properties":{}}}],"tool_choice":{"type":"auto","disable_parallel_tool_use":true}}`, []string{"strict"}},
		{"picture", `"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"data:image/png;base64,AAAA","detail":"low"}},{"type":"image_url","image_url":{"url":"https://x/y"}}]}]`,
			head("", `{"role":"user","content":[{"type":"image","source":{"type":"base64","media_type":"image/png","data":"AAAA"}},{"type":"image","source":{"type":"url","url":"https://x/y"}}]}`) + `}`, nil},
		{"sampling: one of two, at most 1", `"temperature":1.7,"top_p":0.5,"stop":["x","\n"],"seed":1,"cache_salt":"s","user":"u",` + hi,
			head("", user) + `,"stop_sequences":["x"],"temperature":1}`, []string{"stop", "temperature", "top_p", "seed", "cache_salt", "user"}},
		{"blank texts, which the API refuses", `"messages":[{"role":"user","content":"hi"},{"role":"assistant","content":" \n"},{"role":"user","content":[{"type":"text","text":""},{"type":"text","text":"x"}]},{"role":"assistant","content":"so \n"}]`,
			head("", user+`,{"role":"user","content":[{"type":"text","text":"x"}]},{"role":"assistant","content":[{"type":"text","text":"so"}]}`) + `}`, nil},
		{"schema", `"response_format":{"type":"json_schema","json_schema":{"name":"n","schema":{"type":"object"}}},"max_completion_tokens":5,"stream":true,"stream_options":{"include_usage":true},` + hi,
			strings.Replace(head("", user), "4096", "5", 1) + `,"output_config":{"format":{"type":"json_schema","schema":{"type":"object"}}},"stream":true}`, nil},
		{"choice", `"tools":[{"type":"function","function":{"name":"f","parameters":{"type":"object"}}}],"tool_choice":{"type":"function","function":{"name":"f"}},` + hi,
			head("", user) + `,"tools":[{"name":"f","input_schema":{"type":"object"}}],"tool_choice":{"type":"tool","name":"f"}}`, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, dropped, e := toMessages(t, `{"model":"m",`+c.in+`}`, anthropic.Limits{})
			if e != nil {
				t.Fatal(e)
			}
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(c.dropped, dropped); diff != "" {
				t.Errorf("dropped (-want +got):\n%s", diff)
			}
			var r anthropic.Request
			if e := r.Parse([]byte(got), anthropic.Settings{ImageURLs: true}); e != nil {
				t.Errorf("not a Messages body: %v", e)
			}
		})
	}
}

func TestAppendMessagesLimits(t *testing.T) {
	in := `{"model":"m","max_tokens":50000,"reasoning_effort":"high","temperature":0.5,"messages":[{"role":"user","content":"hi"}]}`
	got, dropped, e := toMessages(t, in, anthropic.Limits{Model: "claude-x", Cap: 8000, Thinking: true})
	want := `{"model":"claude-x","max_tokens":8000,"messages":[{"role":"user","content":[{"type":"text","text":"hi"}]}],"thinking":{"type":"enabled","budget_tokens":7999}}`
	if e != nil || got != want || !slices.Equal(dropped, []string{"temperature"}) {
		t.Errorf("got %s, %v, %v", got, dropped, e)
	}
	// In a round of tools the API wants thinking back that the client has not.
	in = `{"model":"m","reasoning_effort":"low","messages":[{"role":"user","content":"q"},{"role":"assistant","tool_calls":[{"id":"a","type":"function","function":{"name":"f","arguments":"{}"}}]},{"role":"tool","tool_call_id":"a","content":"r"}]}`
	if got, _, e := toMessages(t, in, anthropic.Limits{Thinking: true}); e != nil || strings.Contains(got, "thinking") {
		t.Errorf("got %s, %v", got, e)
	}
	for _, c := range []struct{ in, param string }{
		{`{"model":"m","n":2,"messages":[]}`, "n"},
		{`{"model":"m","response_format":{"type":"json_object"},"messages":[]}`, "response_format.type"},
		{`{"model":"m","messages":[{"role":"function","content":"x"}]}`, "messages.0.role"},
		{`{"model":"m","messages":[{"role":"user","content":[{"type":"input_audio"}]}]}`, "messages.0.content.0"},
		{`{"model":"m","messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"http://10.0.0.1/"}}]}]}`, "messages.0.content.0.image_url.url"},
	} {
		if _, _, e := toMessages(t, c.in, anthropic.Limits{}); e == nil || e.Param != c.param {
			t.Errorf("%s: got %v of %q", c.in, e, paramOf(e))
		}
	}
}

// completion is what a client of OpenAI's API has in the end.
type completion struct {
	text, think, finish string
	calls               []grammar.Block
	usage               openai.Usage
	done                bool
	errored             string
}

func readChat(t *testing.T, stream []byte) (c completion) {
	t.Helper()
	c.usage = openai.NoUsage
	events := openai.NewReader(bytes.NewReader(stream), 1<<24)
	for {
		e, err := events.Next()
		if err != nil {
			return c
		}
		if e.Done() {
			c.done = true
			continue
		}
		var chunk openai.Chunk
		if err := chunk.Parse(e.Data); err != nil {
			t.Fatalf("%v: %s", err, e.Data)
		}
		c.usage.Merge(chunk.Usage)
		var in struct {
			Error   *struct{ Type, Code string }
			Choices []struct {
				Delta struct {
					Content, Reasoning string
					Calls              []struct {
						Index    int
						ID       string
						Function struct{ Name, Arguments string }
					} `json:"tool_calls"`
				}
				Finish string `json:"finish_reason"`
			}
		}
		if err := json.Unmarshal(e.Data, &in); err != nil {
			t.Fatal(err)
		}
		if in.Error != nil {
			c.errored = in.Error.Type
		}
		for _, choice := range in.Choices {
			c.text += choice.Delta.Content
			c.think += choice.Delta.Reasoning
			c.finish += choice.Finish
			for _, call := range choice.Delta.Calls {
				if call.Index == len(c.calls) {
					c.calls = append(c.calls, grammar.Block{Type: "tool_use", ID: call.ID, Name: call.Function.Name})
				}
				c.calls[call.Index].Input += call.Function.Arguments
			}
		}
	}
}

// back translates a Messages stream for a client of OpenAI's API.
func back(t *testing.T, stream []byte) []byte {
	t.Helper()
	s := anthropic.NewChatStream(anthropic.Completion{ID: "chatcmpl-1", Model: "m", Created: 1})
	events := openai.NewReader(bytes.NewReader(stream), 1<<24)
	var out []byte
	for {
		e, err := events.Next()
		if err != nil {
			return out
		}
		out, _ = s.Event(out, e.Data)
	}
}

// roundTrip sends a generated stream to a client of the Messages API and from
// there on to one of OpenAI's: nothing is lost.
func (b *backend) roundTrip(t *testing.T) {
	t.Helper()
	got := readChat(t, back(t, translate(answer, b.chunks...)))
	slices.SortFunc(got.calls, func(a, b grammar.Block) int { return strings.Compare(a.ID, b.ID) })
	want := completion{text: b.text, think: b.think, finish: b.finish, calls: b.calls, done: true,
		usage: openai.Usage{Prompt: b.usage.Input + b.usage.Cached, Cached: b.usage.Cached, Output: b.usage.Output, Reasoning: openai.Unknown}}
	if b.finish == "tool_calls" && len(b.calls) == 0 {
		want.finish = "stop"
	} else if b.finish == "stop" && len(b.calls) > 0 {
		want.finish = "tool_calls"
	}
	if diff := cmp.Diff(want, got, cmp.AllowUnexported(completion{})); diff != "" {
		t.Errorf("(-want +got):\n%s\nof %s", diff, strings.Join(b.chunks, "\n"))
	}
}

func TestStreamRoundTrip(t *testing.T) {
	for seed := range uint64(2000) {
		if newBackend(seed).roundTrip(t); t.Failed() {
			t.Fatalf("seed %d", seed)
		}
	}
}

func TestChatStream(t *testing.T) {
	event := func(data string) string {
		var e struct{ Type string }
		_ = json.Unmarshal([]byte(data), &e)
		return "event: " + e.Type + "\ndata: " + data + "\n\n"
	}
	start := event(`{"type":"message_start","message":{"id":"msg_1","type":"message","role":"assistant","content":[],"usage":{"input_tokens":9,"cache_read_input_tokens":1,"output_tokens":1}}}`)
	stop := event(`{"type":"message_stop"}`)
	for _, c := range []struct {
		name, in string
		want     completion
	}{
		{"usage of the start, overridden and never summed (envoy ai-gateway 2236)", start + event(`{"type":"message_delta","delta":{"stop_reason":"end_turn"},"usage":{"output_tokens":5}}`) + stop,
			completion{finish: "stop", done: true, usage: openai.Usage{Prompt: 10, Cached: 1, Output: 5, Reasoning: openai.Unknown}}},
		{"usage that the end corrects, to zero too (litellm 37992)", start + event(`{"type":"message_delta","delta":{"stop_reason":"max_tokens"},"usage":{"input_tokens":4,"cache_creation_input_tokens":6,"cache_read_input_tokens":0,"output_tokens":5}}`) + stop,
			completion{finish: "length", done: true, usage: openai.Usage{Prompt: 10, Cached: 0, Output: 5, Reasoning: openai.Unknown}}},
		{"a call whose input came at once, and one without any", start + event(`{"type":"content_block_start","index":0,"content_block":{"type":"tool_use","id":"a","name":"f","input":{"x": 1}}}`) + event(`{"type":"content_block_stop","index":0}`) +
			event(`{"type":"content_block_start","index":1,"content_block":{"type":"tool_use","id":"b","name":"g","input":{}}}`) + event(`{"type":"content_block_stop","index":1}`) + event(`{"type":"message_delta","delta":{"stop_reason":"tool_use"},"usage":{}}`) + stop,
			completion{finish: "tool_calls", done: true, usage: openai.Usage{Prompt: 10, Cached: 1, Output: 1, Reasoning: openai.Unknown},
				calls: []grammar.Block{{Type: "tool_use", ID: "a", Name: "f", Input: `{"x":1}`}, {Type: "tool_use", ID: "b", Name: "g", Input: `{}`}}}},
		{"pings, signatures and blocks of the provider's own tools", start + event(`{"type":"ping"}`) + event(`{"type":"content_block_start","index":0,"content_block":{"type":"server_tool_use","id":"s","name":"w","input":{}}}`) +
			event(`{"type":"content_block_delta","index":0,"delta":{"type":"input_json_delta","partial_json":"{}"}}`) + event(`{"type":"content_block_stop","index":0}`) +
			event(`{"type":"content_block_start","index":1,"content_block":{"type":"thinking","thinking":""}}`) + event(`{"type":"content_block_delta","index":1,"delta":{"type":"signature_delta","signature":"x"}}`) + stop,
			completion{done: true, usage: openai.Usage{Prompt: 10, Cached: 1, Output: 1, Reasoning: openai.Unknown}}},
		{"event: error after a good first frame (bifrost 5395)", start + event(`{"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"a"}}`) + event(`{"type":"error","error":{"type":"overloaded_error","message":"Overloaded"}}`) + stop,
			completion{text: "a", errored: "overloaded_error", usage: openai.NoUsage}},
		{"no JSON", start + "event: x\ndata: {\n\n", completion{errored: "server_error", usage: openai.NoUsage}},
	} {
		t.Run(c.name, func(t *testing.T) {
			if diff := cmp.Diff(c.want, readChat(t, back(t, []byte(c.in))), cmp.AllowUnexported(completion{})); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

// conversation makes a Messages body that both APIs can express.
func conversation(seed uint64) string {
	r := rand.New(rand.NewPCG(seed, 2))
	text := func() string { return quote("t" + blockstest.Word(r, 8) + "t") }
	var messages []string
	add := func(role string, blocks ...string) {
		messages = append(messages, `{"role":"`+role+`","content":[`+strings.Join(blocks, ",")+`]}`)
	}
	input := func() string {
		v, _ := json.Marshal(map[string]any{"k" + blockstest.Word(r, 3): []any{blockstest.Word(r, 9), r.IntN(9), nil}})
		return string(v)
	}
	block := func() string { return `{"type":"text","text":` + text() + `}` }
	for turn := range 1 + r.IntN(4) {
		blocks := []string{block()}
		if r.IntN(3) == 0 {
			blocks = append(blocks, `{"type":"image","source":{"type":"base64","media_type":"image/png","data":"QUJD"}}`, block())
		}
		add("user", blocks...)
		if calls := r.IntN(3); calls > 0 {
			use, results := []string{block()}[:r.IntN(2)], []string{}
			for i := range calls {
				id := fmt.Sprintf("call_%d_%d", turn, i)
				if r.IntN(3) == 0 {
					id = fmt.Sprintf("functions.f:%d", turn*10+i)
				}
				name, _ := json.Marshal(id)
				if strings.Contains(id, ".") { // as a client has it
					name = []byte(`"kin64_` + strings.TrimRight(b64(id), "=") + `"`)
				}
				use = append(use, `{"type":"tool_use","id":`+string(name)+`,"name":"f","input":`+input()+`}`)
				results = append(results, `{"type":"tool_result","tool_use_id":`+string(name)+`,"content":[`+block()+`]}`)
			}
			add("assistant", use...)
			add("user", results...)
		}
		add("assistant", block())
	}
	add("user", block())
	more := ""
	if r.IntN(2) == 0 {
		more += `"system":[` + block() + `],`
	}
	if r.IntN(2) == 0 {
		more += `"tools":[{"name":"f","description":` + text() + `,"input_schema":{"type":"object","x":1.50}}],`
		if r.IntN(2) == 0 {
			more += `"tool_choice":{"type":"any","disable_parallel_tool_use":true},`
		}
	}
	if r.IntN(2) == 0 {
		more += `"stop_sequences":[` + text() + `],"temperature":0.25,"stream":true,`
	}
	if r.IntN(3) == 0 {
		more += `"output_config":{"format":{"type":"json_schema","schema":{"type":"object"}}},`
	}
	return body(more + `"messages":[` + strings.Join(messages, ",") + `]`)
}

func requestRoundTrip(t *testing.T, in string) {
	t.Helper()
	var first, second anthropic.Request
	if e := first.Parse([]byte(in), anthropic.Settings{}); e != nil {
		t.Fatalf("%v\n%s", e, in)
	}
	chat := first.AppendChat(nil, anthropic.Provider)
	messages, dropped, e := toMessages(t, string(chat), anthropic.Limits{})
	if e != nil || len(dropped) > 0 {
		t.Fatalf("%v, dropped %v\n%s", e, dropped, chat)
	}
	if e := second.Parse([]byte(messages), anthropic.Settings{}); e != nil {
		t.Fatalf("%v\n%s", e, messages)
	}
	if diff := cmp.Diff(string(chat), string(second.AppendChat(nil, anthropic.Provider))); diff != "" {
		t.Errorf("(-first +second):\n%s", diff)
	}
}

func TestRequestRoundTrip(t *testing.T) {
	for seed := range uint64(1000) {
		if requestRoundTrip(t, conversation(seed)); t.Failed() {
			t.Fatalf("seed %d", seed)
		}
	}
}

// FuzzReverse reads chat bodies and Messages streams of any shape: what comes
// out is JSON that the other side accepts, and translating it once more
// changes nothing.
func FuzzReverse(f *testing.F) {
	f.Add(uint64(1), []byte(`{"model":"m","messages":[{"role":"system","content":"s"},{"role":"user","content":[{"type":"image_url","image_url":{"url":"data:image/png;base64,AA"}}]},{"role":"assistant","content":"a ","tool_calls":[{"id":"x.y","function":{"name":"f","arguments":"{"}}]},{"role":"tool","tool_call_id":"x.y","content":"r"}],"stop":"x","top_p":0.1}`))
	f.Add(uint64(2), []byte(`{"type":"content_block_start","index":0,"content_block":{"type":"tool_use","id":"a","name":"f","input":{"x":1}}}`+"\n"+`{"type":"content_block_stop"}`+"\n"+`{"type":"message_delta","delta":{"stop_reason":"stop_sequence","stop_sequence":"x"},"usage":{"output_tokens":1}}`))
	f.Fuzz(func(t *testing.T, seed uint64, in []byte) {
		newBackend(seed).roundTrip(t)
		requestRoundTrip(t, conversation(seed))
		s := anthropic.NewChatStream(anthropic.Completion{ID: "x", Model: "m"})
		var out []byte
		for _, line := range bytes.Split(in, []byte("\n")) {
			out, _ = s.Event(out, line)
		}
		readChat(t, out)

		var q openai.Request
		if q.Parse(openai.RouteChat, in, 0) != nil {
			return
		}
		messages, _, e := anthropic.AppendMessages(nil, &q.Body, anthropic.Limits{Thinking: seed%2 == 0})
		if e != nil {
			return
		}
		if !json.Valid(messages) {
			t.Fatalf("no JSON: %s", messages)
		}
		var r anthropic.Request
		if e := r.Parse(messages, anthropic.Settings{Depth: 256, ImageURLs: true}); e != nil {
			return // the provider would refuse it as well
		}
		again, _, e := toMessages(t, string(r.AppendChat(nil, anthropic.Provider)), anthropic.Limits{})
		if e != nil {
			t.Fatalf("%v\n%s", e, messages)
		}
		if !json.Valid([]byte(again)) {
			t.Fatalf("no JSON: %s", again)
		}
	})
}

func b64(s string) string { return base64.StdEncoding.EncodeToString([]byte(s)) }
