package anthropic_test

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kinference/kinference/internal/anthropic"
	"github.com/kinference/kinference/internal/openai"
)

// through sends a provider's stream to a client of the same API, inside of chat
// chunks, which it returns too.
func through(stream []byte, ping bool) (out, chat []byte) {
	in := anthropic.NewChatStream(anthropic.Completion{ID: "chatcmpl-1", Model: "claude", Created: 1, Own: true})
	for events := openai.NewReader(bytes.NewReader(stream), 1<<24); ; {
		e, err := events.Next()
		if err != nil {
			break
		}
		chat, _ = in.Event(chat, e.Data)
	}
	s := anthropic.NewStream(answer)
	if ping {
		out = s.Ping(out)
	}
	for events := openai.NewReader(bytes.NewReader(chat), 1<<24); ; {
		e, err := events.Next()
		if err != nil {
			return out, chat
		}
		if e.Done() {
			out = s.End(out)
		} else {
			out = s.Chunk(out, e.Data)
		}
	}
}

// own checks that a client of the Messages API gets a provider's stream event by
// event, and that the chunks on the way say what those of OpenAI's API get.
func (b *backend) own(t *testing.T) {
	t.Helper()
	stream := translate(answer, b.chunks...)
	for _, ping := range []bool{false, true} {
		out, chat := through(stream, ping)
		want, got := check(t, stream), check(t, out)
		if ping { // its message_start was ours
			got.Pings, got.Start = want.Pings, want.Start
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("ping %v (-want +got):\n%s", ping, diff)
		}
		if diff := cmp.Diff(readChat(t, back(t, stream)), readChat(t, chat), cmp.AllowUnexported(completion{})); diff != "" {
			t.Errorf("chunks (-want +got):\n%s", diff)
		}
	}
}

func TestOwnStream(t *testing.T) {
	for seed := range uint64(500) {
		if newBackend(seed).own(t); t.Failed() {
			t.Fatalf("seed %d", seed)
		}
	}
	// What OpenAI's API has no words for.
	event := func(kind, rest string) string {
		return "event: " + kind + "\ndata: {\n \"type\": \"" + kind + "\"" + rest + "}\n\n"
	}
	in := event("message_start", `,"message":{"id":"msg_9","model":"claude-9","type":"message","role":"assistant","content":[],"stop_reason":null,"usage":{"input_tokens":1,"cache_creation":{"x":1}}}`)
	in = strings.Replace(in, "\n \"type\"", "\ndata: \"type\"", 1)
	for _, e := range []string{
		event("content_block_start", `,"index":0,"content_block":{"type":"redacted_thinking","data":"xyz"}`), event("content_block_stop", `,"index":0`),
		event("content_block_start", `,"index":1,"content_block":{"type":"server_tool_use","id":"s","name":"w","input":{}}`), event("content_block_stop", `,"index":1`),
		event("ping", ""), event("news_of_tomorrow", ""),
		event("message_delta", `,"delta":{"stop_reason":"pause_turn","stop_sequence":null},"usage":{"output_tokens":3}`), event("message_stop", ""),
	} {
		in += strings.Replace(e, "\n \"type\"", "\ndata: \"type\"", 1)
	}
	out, _ := through([]byte(in), false)
	for _, want := range []string{
		"event: message_start\ndata: {\"type\":\"message_start\",\"message\":{\"id\":\"msg_9\",\"model\":\"claude\",", `{"type":"redacted_thinking","data":"xyz"}`, `"server_tool_use"`, `"pause_turn"`, `"cache_creation":{"x":1}`,
		"event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n",
	} {
		if !strings.Contains(string(out), want) {
			t.Errorf("%s is missing in\n%s", want, out)
		}
	}
	for _, never := range []string{"tomorrow", "claude-9", "kinference"} {
		if strings.Contains(string(out), never) {
			t.Errorf("%s is in\n%s", never, out)
		}
	}
}

// An engine cannot have events of its own making passed: nobody knows the member's
// name.
func TestOwnIsSecret(t *testing.T) {
	for _, name := range []string{"kinference_", "kinference_x", ""} {
		chunk := `{"choices":[{"index":0,"delta":{"content":"a"}}],"` + name + `":{"type":"message_start","message":{"model":"evil"}}}`
		if m := check(t, translate(answer, chunk, finish("stop", ""), "[DONE]")); m.Model != answer.Model || m.Text("text") != "a" {
			t.Errorf("got %+v", m)
		}
	}
}

func ownBody(t *testing.T, body, model string, limit int) (string, []string) {
	t.Helper()
	var r anthropic.Request
	if e := r.Parse([]byte(body), anthropic.Settings{}); e != nil {
		t.Fatal(e)
	}
	out, dropped, err := anthropic.OwnBody(&r.Body, model, limit)
	if err != nil {
		t.Fatal(err)
	}
	return string(out), dropped
}

func TestOwnBody(t *testing.T) {
	const (
		unsigned = `{"type":"thinking","thinking":"x","signature":"kinference-unsigned"}`
		signed   = `{"type":"thinking","thinking":"x","signature":"sig"}`
		redacted = `{"type":"redacted_thinking","data":"x"}`
		word     = `{"type":"text","text":"a", "cache_control":{"type":"ephemeral"}}`
	)
	user := `{"role":"user","content":"hi"}`
	assistant := func(blocks ...string) string {
		return `{"role":"assistant","content":[` + strings.Join(blocks, ",") + `]}`
	}
	for _, c := range []struct{ name, in, want string }{
		{"as it is", `"system":"x-anthropic-billing-header: cch=1;\nBe",  "messages":[` + user + `],"top_k":5`, `"system":"x-anthropic-billing-header: cch=1;\nBe",  "messages":[` + user + `],"top_k":5`},
		{"white space and order", `"tools":[ {"input_schema" : {"b":1.50,"a":2},"name":"f"} ],"messages":[` + user + ` ]`, `"tools":[ {"input_schema" : {"b":1.50,"a":2},"name":"f"} ],"messages":[` + user + ` ]`},
		{"signed thinking", `"messages":[` + user + `,` + assistant(signed, redacted, word) + `, ` + user + `]`, `"messages":[` + user + `,` + assistant(signed, redacted, word) + `, ` + user + `]`},
		{"unsigned thinking", `"thinking":{"type":"adaptive"},"messages":[` + user + `,` + assistant(unsigned, word) + `,` + user + `,` + assistant(signed, word) + `,` + user + `]`,
			`"thinking":{"type":"adaptive"},"messages":[` + user + `,` + assistant(word) + `,` + user + `,` + assistant(signed, word) + `,` + user + `]`},
		{"without signature, in the turn that goes on", `"thinking":{"type":"enabled","budget_tokens":2000},"messages":[` + user + `,` + assistant(`{"type":"thinking","thinking":"x"}`, word) + `,` + user + `]`,
			`"messages":[` + user + `,` + assistant(word) + `,` + user + `]`},
		{"nothing else", `"messages":[` + user + `,` + assistant(unsigned) + `,` + user + `]`, `"messages":[` + user + `,` + user + `]`},
		{"the word thinking in a text", `"messages":[{"role":"user","content":[{"type":"text","text":"\"thinking\""}]}]`, `"messages":[{"role":"user","content":[{"type":"text","text":"\"thinking\""}]}]`},
	} {
		got, _ := ownBody(t, `{"model":"m","max_tokens":9000,`+c.in+`}`, "claude-9", 0)
		if want := `{"model":"claude-9","max_tokens":9000,` + c.want + `}`; got != want {
			t.Errorf("%s:\n got %s\nwant %s", c.name, got, want)
		}
	}
	got, dropped := ownBody(t, `{"metadata":{"user_id":"u"},"model":"m","max_tokens":10,"messages":[`+user+`],"service_tier":"auto","speed":"fast","cache_salt":"s","chat_template_kwargs":{}}`, "c", 0)
	if want := `{"model":"c","max_tokens":10,"messages":[` + user + `]}`; got != want || len(dropped) != 5 {
		t.Errorf("got %s, dropped %v", got, dropped)
	}
	for _, c := range []struct {
		limit int
		want  string
	}{
		{0, `"max_tokens":9000,"thinking":{"type":"enabled","budget_tokens":6000}`}, {10000, `"max_tokens":9000,"thinking":{"type":"enabled","budget_tokens":6000}`},
		{7000, `"max_tokens":7000,"thinking":{"type":"enabled","budget_tokens":6000}`}, {4000, `"max_tokens":4000,"thinking":{"type":"enabled","budget_tokens":3999}`}, {1024, `"max_tokens":1024`},
	} {
		got, _ := ownBody(t, `{"model":"m","max_tokens":9000,"thinking":{"type":"enabled","budget_tokens":6000},"messages":[`+user+`]}`, "m", c.limit)
		if want := `{"model":"m",` + c.want + `,"messages":[` + user + `]}`; got != want {
			t.Errorf("limit %d: %s", c.limit, got)
		}
	}
}

// FuzzOwn gives bodies and events of any shape to what passes them on: what comes out
// is JSON without what must stay, and all that a client gets are events of this API.
func FuzzOwn(f *testing.F) {
	f.Add(uint64(1), []byte(`{"model":"m","max_tokens":2000,"thinking":{"type":"enabled","budget_tokens":1500},"messages":[{"role":"assistant","content":[{"type":"thinking","thinking":"x"},{"type":"text","text":"y"}]}],"metadata":{}}`))
	f.Add(uint64(2), []byte(`{"type":"message_start","message":{"model":"x"}}`+"\n"+`{"type":"content_block_start","content_block":{"type":"tool_use"}}`+"\n"+`{"type":"content_block_stop"}`+"\n"+`{"type":"message_stop"}`))
	f.Fuzz(func(t *testing.T, seed uint64, in []byte) {
		newBackend(seed % 4096).own(t)
		var stream []byte
		for _, line := range bytes.Split(in, []byte("\n")) {
			stream = openai.AppendEvent(stream, nil, line)
		}
		out, chat := through(stream, seed%2 == 0)
		readChat(t, chat)
		for events := openai.NewReader(bytes.NewReader(out), 1<<24); ; {
			e, err := events.Next()
			if err != nil {
				break
			}
			var data struct{ Type string }
			if e.Cut || json.Unmarshal(e.Data, &data) != nil || data.Type != string(e.Type) {
				t.Fatalf("event %q", e.Raw)
			}
		}
		var r anthropic.Request
		if r.Parse(in, anthropic.Settings{}) != nil {
			return
		}
		body, _, err := anthropic.OwnBody(&r.Body, "claude-9", int(seed%9000))
		if err != nil {
			t.Fatal(err)
		}
		var sent map[string]json.RawMessage
		if err := json.Unmarshal(body, &sent); err != nil {
			t.Fatalf("%v in %s", err, body)
		}
		for _, name := range []string{"metadata", "cache_salt", "service_tier", "chat_template_kwargs", "mcp_servers"} {
			if _, ok := sent[name]; ok {
				t.Fatalf("%s is sent", name)
			}
		}
		var again anthropic.Request
		if e := again.Parse(body, anthropic.Settings{}); e != nil && !bytes.Contains(body, []byte(`"messages":[]`)) {
			t.Fatalf("%v in %s", e, body)
		}
	})
}
