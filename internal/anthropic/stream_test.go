package anthropic_test

import (
	"bytes"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kinference/kinference/internal/anthropic"
	"github.com/kinference/kinference/internal/anthropic/grammar"
	"github.com/kinference/kinference/internal/blocks/blockstest"
	"github.com/kinference/kinference/internal/openai"
)

var answer = anthropic.Answer{ID: "msg_1", Model: "claude", Input: 7}

// translate gives a stream's chunks to a Stream; "[DONE]" ends it.
func translate(a anthropic.Answer, chunks ...string) []byte {
	s := anthropic.NewStream(a)
	var out []byte
	for _, c := range chunks {
		if c == "[DONE]" {
			out = s.End(out)
			continue
		}
		out = s.Chunk(out, []byte(c))
	}
	return out
}

// check reads a Messages stream by the grammar.
func check(t *testing.T, stream []byte) *grammar.Message {
	t.Helper()
	m, err := grammar.Read(bytes.NewReader(stream))
	if err != nil {
		t.Fatalf("%v in:\n%s", err, stream)
	}
	return m
}

func delta(d string) string { return `{"choices":[{"index":0,"delta":{` + d + `}}]}` }

func finish(reason, more string) string {
	return `{"choices":[{"index":0,"delta":{},"finish_reason":"` + reason + `"` + more + `}]}`
}

// piece is the delta for a piece of a tool call.
func piece(index int, id, name, args string) string {
	head := ""
	if id != "" {
		head = fmt.Sprintf(`"id":%q,"type":"function",`, id)
	}
	if name != "" {
		name = fmt.Sprintf(`"name":%q,`, name)
	}
	return delta(fmt.Sprintf(`"tool_calls":[{"index":%d,%s"function":{%s"arguments":%q}}]`, index, head, name, args))
}

func TestStream(t *testing.T) {
	const usage = `{"choices":[],"usage":{"prompt_tokens":100,"completion_tokens":9,"prompt_tokens_details":{"cached_tokens":64}}}`
	opening := `{"choices":[{"index":0,"delta":{"role":"assistant","content":""}}],"usage":{"prompt_tokens":100,"completion_tokens":0}}`
	text := func(s string) grammar.Block { return grammar.Block{Type: "text", Text: s} }
	think := func(s string) grammar.Block {
		return grammar.Block{Type: "thinking", Text: s, Signature: "kinference-unsigned"}
	}
	use := func(id, name, input string) grammar.Block {
		return grammar.Block{Type: "tool_use", ID: id, Name: name, Input: input}
	}
	at := func(m grammar.Message) grammar.Message { // what most have in common
		m.ID, m.Model = "msg_1", "claude"
		if m.Start == (grammar.Usage{}) {
			m.Start = grammar.Usage{Input: 100}
		}
		if m.Usage == (grammar.Usage{}) && m.Error == "" {
			m.Usage = grammar.Usage{Input: 36, Cached: 64, Output: 9}
		}
		return m
	}
	for _, c := range []struct {
		name   string
		chunks []string
		want   grammar.Message
	}{
		{"text", []string{opening, delta(`"content":"Hel"`), delta(`"content":"lo"`), finish("stop", ""), usage, "[DONE]"},
			at(grammar.Message{Blocks: []grammar.Block{text("Hello")}, StopReason: "end_turn"})},
		{"thinking then text (litellm 33224: no thinking in a text block)",
			[]string{opening, delta(`"reasoning":"Hm"`), delta(`"reasoning":"m","content":"Yes"`), finish("length", ""), usage, "[DONE]"},
			at(grammar.Message{Blocks: []grammar.Block{think("Hmm"), text("Yes")}, StopReason: "max_tokens"})},
		{"thinking under its old name, and again after text",
			[]string{opening, delta(`"reasoning_content":"a"`), delta(`"content":"b"`), delta(`"reasoning_content":"c"`), delta(`"content":"d"`), finish("stop", ""), usage, "[DONE]"},
			at(grammar.Message{Blocks: []grammar.Block{think("a"), text("b"), think("c"), text("d")}, StopReason: "end_turn"})},
		{"stop sequence", []string{opening, delta(`"content":"a"`), finish("stop", `,"stop_reason":"\n\nHuman:"`), usage, "[DONE]"},
			at(grammar.Message{Blocks: []grammar.Block{text("a")}, StopReason: "stop_sequence", StopSequence: "\n\nHuman:"})},
		{"stop token", []string{opening, delta(`"content":"a"`), finish("stop", `,"stop_reason":151643`), usage, "[DONE]"},
			at(grammar.Message{Blocks: []grammar.Block{text("a")}, StopReason: "end_turn"})},
		{"two tools one after another", []string{opening, piece(0, "call_a", "f", ""), piece(0, "", "", `{"x":`), piece(0, "", "", `"}"}`), piece(1, "call_b", "g", `{}`),
			finish("tool_calls", ""), usage, "[DONE]"},
			at(grammar.Message{Blocks: []grammar.Block{use("call_a", "f", `{"x":"}"}`), use("call_b", "g", `{}`)}, StopReason: "tool_use"})},
		{"two tools interleaved", []string{opening, piece(0, "a", "f", `{"x"`), piece(1, "b", "g", `{"y`), piece(0, "", "", `:1`), piece(1, "", "", `":2}`), piece(0, "", "", `}`),
			finish("tool_calls", ""), usage, "[DONE]"},
			at(grammar.Message{Blocks: []grammar.Block{use("a", "f", `{"x":1}`), use("b", "g", `{"y":2}`)}, StopReason: "tool_use"})},
		{"text between the pieces of a call", []string{opening, piece(0, "a", "f", `{"x"`), delta(`"content":"so "`), piece(0, "", "", `:1}`), delta(`"content":"be it"`),
			finish("tool_calls", ""), usage, "[DONE]"},
			at(grammar.Message{Blocks: []grammar.Block{use("a", "f", `{"x":1}`), text("so be it")}, StopReason: "tool_use"})},
		{"name and id in every chunk, as old engines send them", []string{opening, piece(0, "a1", "f", `{"x"`), piece(0, "a2", "f", `:1}`), finish("stop", ""), usage, "[DONE]"},
			at(grammar.Message{Blocks: []grammar.Block{use("a1", "f", `{"x":1}`)}, StopReason: "tool_use"})},
		{"calls without index", []string{opening, delta(`"tool_calls":[{"id":"a","function":{"name":"f","arguments":"{}"}},{"id":"b","function":{"name":"g","arguments":"{}"}}]`),
			finish("tool_calls", ""), usage, "[DONE]"},
			at(grammar.Message{Blocks: []grammar.Block{use("a", "f", `{}`), use("b", "g", `{}`)}, StopReason: "tool_use"})},
		{"name after the arguments", []string{opening, piece(0, "a", "", `{`), piece(0, "", "f", `}`), finish("tool_calls", ""), usage, "[DONE]"},
			at(grammar.Message{Blocks: []grammar.Block{use("a", "f", `{}`)}, StopReason: "tool_use"})},
		{"arguments as an object", []string{opening, delta(`"tool_calls":[{"index":0,"id":"a","function":{"name":"f","arguments":{"x": "\n"}}}]`), finish("tool_calls", ""), usage, "[DONE]"},
			at(grammar.Message{Blocks: []grammar.Block{use("a", "f", `{"x":"\n"}`)}, StopReason: "tool_use"})},
		{"a call cut off by the limit", []string{opening, piece(0, "a", "f", `{"x":"lo`), piece(1, "b", "g", `{}`), finish("length", ""), usage, "[DONE]"},
			at(grammar.Message{Blocks: []grammar.Block{use("a", "f", `{"x":"lo`), use("b", "g", `{}`)}, StopReason: "max_tokens"})},
		{"an id that the API does not allow", []string{opening, piece(0, "functions.f:0", "f", `{}`), finish("tool_calls", ""), usage, "[DONE]"},
			at(grammar.Message{Blocks: []grammar.Block{use("kin64_ZnVuY3Rpb25zLmY6MA", "f", `{}`)}, StopReason: "tool_use"})},
		{"no id", []string{opening, piece(0, "", "f", `{}`), finish("tool_calls", ""), usage, "[DONE]"},
			at(grammar.Message{Blocks: []grammar.Block{use("toolu_msg_1_0", "f", `{}`)}, StopReason: "tool_use"})},
		{"refusal", []string{opening, delta(`"refusal":"No."`), finish("stop", ""), usage, "[DONE]"},
			at(grammar.Message{Blocks: []grammar.Block{text("No.")}, StopReason: "refusal"})},
		{"nothing", []string{opening, finish("stop", ""), usage, "[DONE]"}, at(grammar.Message{StopReason: "end_turn"})},
		{"[DONE] in the text", []string{opening, delta(`"content":"data: [DONE]\n\n"`), finish("stop", ""), usage, "[DONE]"},
			at(grammar.Message{Blocks: []grammar.Block{text("data: [DONE]\n\n")}, StopReason: "end_turn"})},
		{"no usage at all: what the gateway counted, and the chunks", []string{delta(`"content":"a"`), delta(`"content":"b"`), finish("stop", ""), "[DONE]"},
			at(grammar.Message{Blocks: []grammar.Block{text("ab")}, StopReason: "end_turn", Start: grammar.Usage{Input: 7}, Usage: grammar.Usage{Input: 7, Output: 2}})},
		{"explicit zero is a value", []string{delta(`"content":"a"`), finish("stop", ""), `{"choices":[],"usage":{"prompt_tokens":0,"completion_tokens":0}}`, "[DONE]"},
			grammar.Message{ID: "msg_1", Model: "claude", Blocks: []grammar.Block{text("a")}, StopReason: "end_turn", Start: grammar.Usage{Input: 7}}},
		{"more than one choice", []string{opening, `{"choices":[{"index":0,"delta":{"content":"a"}},{"index":1,"delta":{"content":"b"}}]}`, finish("stop", ""), usage, "[DONE]"},
			at(grammar.Message{Blocks: []grammar.Block{text("a")}, StopReason: "end_turn"})},
		{"error of the engine after good text", []string{opening, delta(`"content":"a"`), `{"error":{"message":"The model server went away before the answer was complete.","type":"server_error","param":null,"code":"upstream_error"}}`, "[DONE]"},
			at(grammar.Message{Blocks: []grammar.Block{text("a")}, Error: "api_error", ErrorMessage: "The model server went away before the answer was complete."})},
		{"timeout", []string{opening, delta(`"content":"a"`), `{"error":{"message":"late","type":"server_error","code":"timeout"}}`},
			at(grammar.Message{Blocks: []grammar.Block{text("a")}, Error: "timeout_error", ErrorMessage: "late"})},
		{"overload", []string{opening, `{"error":{"message":"full","type":"overloaded_error","code":"service_unavailable"}}`},
			at(grammar.Message{Error: "overloaded_error", ErrorMessage: "full"})},
		{"a chunk that is no JSON", []string{opening, delta(`"content":"a"`), `{"choices":[`, "[DONE]"},
			at(grammar.Message{Blocks: []grammar.Block{text("a")}, Error: "api_error", ErrorMessage: "The model server gave no valid answer."})},
	} {
		t.Run(c.name, func(t *testing.T) {
			got := check(t, translate(answer, c.chunks...))
			if diff := cmp.Diff(&c.want, got); diff != "" {
				t.Errorf("message (-want +got):\n%s", diff)
			}
		})
	}
}

func TestStreamPings(t *testing.T) {
	s := anthropic.NewStream(answer)
	out := s.Ping(s.Ping(nil))
	out = s.Chunk(out, []byte(delta(`"content":"a"`)))
	out = s.Ping(out)
	out = s.End(s.Chunk(out, []byte(finish("stop", ""))))
	if after := s.Ping(nil); after != nil {
		t.Errorf("a ping after the end: %q", after)
	}
	if m := check(t, out); m.Pings != 3 || m.Text("text") != "a" || m.Start.Input != 7 {
		t.Errorf("got %+v", m)
	}
}

func TestStreamHidesThinking(t *testing.T) {
	a := answer
	a.HideThinking = true
	m := check(t, translate(a, delta(`"reasoning":"secret"`), delta(`"content":"a"`), finish("stop", ""), "[DONE]"))
	if len(m.Blocks) != 1 || m.Text("text") != "a" {
		t.Errorf("got %+v", m.Blocks)
	}
}

// TestStreamIsBounded holds back deltas behind a call that never ends.
func TestStreamIsBounded(t *testing.T) {
	s := anthropic.NewStream(answer)
	out := s.Chunk(nil, []byte(piece(0, "a", "f", `{"x":`)))
	long := delta(`"content":"` + strings.Repeat("x", 1<<16) + `"`)
	for range 100 {
		out = s.Chunk(out, []byte(long))
	}
	if m := check(t, out); m.Error != "api_error" || len(out) > 4096 {
		t.Errorf("got %+v in %d bytes", m, len(out))
	}
}

// backend is a generated stream, and what a client must have in the end.
type backend struct {
	chunks      []string
	text, think string
	calls       []grammar.Block
	finish      string
	usage       grammar.Usage
}

func newBackend(seed uint64) *backend {
	s := blockstest.New(seed)
	b := &backend{chunks: s.Chunks, text: s.Text, think: s.Thinking, finish: s.Finish}
	for _, c := range s.Calls {
		b.calls = append(b.calls, grammar.Block{Type: "tool_use", ID: c.ID, Name: c.Name, Input: c.Arguments})
	}
	b.usage = grammar.Usage{Input: s.Usage.Prompt - s.Usage.Cached, Cached: s.Usage.Cached, Output: s.Usage.Output}
	return b
}

func quote(s string) string { return blockstest.Quote(s) }

// verify checks one generated stream.
func (b *backend) verify(t *testing.T) {
	t.Helper()
	m := check(t, translate(answer, b.chunks...))
	if got := m.Text("text"); got != b.text {
		t.Errorf("text: got %q, want %q", got, b.text)
	}
	if got := m.Text("thinking"); got != b.think {
		t.Errorf("thinking: got %q, want %q", got, b.think)
	}
	var calls []grammar.Block
	for _, block := range m.Blocks {
		if block.Type == "tool_use" {
			calls = append(calls, block)
		} else if block.Text == "" {
			t.Errorf("an empty block of type %s", block.Type)
		}
	}
	slices.SortFunc(calls, func(a, b grammar.Block) int { return strings.Compare(a.ID, b.ID) })
	if diff := cmp.Diff(b.calls, calls); diff != "" {
		t.Errorf("calls (-want +got):\n%s", diff)
	}
	if m.Usage != b.usage {
		t.Errorf("usage: got %+v, want %+v", m.Usage, b.usage)
	}
	want := "end_turn"
	switch {
	case b.finish == "length":
		want = "max_tokens"
	case len(b.calls) > 0:
		want = "tool_use"
	}
	if m.StopReason != want {
		t.Errorf("stop_reason: got %q, want %q", m.StopReason, want)
	}
	if t.Failed() {
		t.Logf("chunks:\n%s", strings.Join(b.chunks, "\n"))
	}
}

// TestStreamGrammar translates thousands of generated streams: always valid,
// the same text, the same arguments, the right usage.
func TestStreamGrammar(t *testing.T) {
	for seed := range uint64(5000) {
		if newBackend(seed).verify(t); t.Failed() {
			t.Fatalf("seed %d", seed)
		}
	}
}

// FuzzStream looks for streams that break the grammar: generated ones, and
// whatever bytes come as chunks.
func FuzzStream(f *testing.F) {
	f.Add(uint64(1), []byte(delta(`"content":"a"`)+"\n"+piece(0, "a", "f", `{"x"`)+"\n[DONE]"))
	f.Add(uint64(2), []byte(`{"choices":[{"delta":{"tool_calls":[{"index":5,"function":{"arguments":"}"}},{"index":-1,"id":"","function":{"name":""}}]}}]}`))
	f.Add(uint64(3), []byte(`{"error":{"message":"x"}}`+"\n"+`{"choices":[{"delta":{"reasoning":"a","content":"b","refusal":"c"},"finish_reason":"stop","stop_reason":"\u0000"}]}`))
	f.Fuzz(func(t *testing.T, seed uint64, data []byte) {
		newBackend(seed).verify(t)
		s := anthropic.NewStream(answer)
		var out []byte
		for i, c := range bytes.Split(data, []byte("\n")) {
			if i%7 == 6 {
				out = s.Ping(out)
			}
			out = s.Chunk(out, c)
		}
		if seed%2 == 0 {
			out = s.Error(out, openai.Server(502, "", "gone"))
		}
		check(t, s.End(out))
	})
}

// BenchmarkStream translates one token's chunk, with the usage that vLLM puts on
// each: what the dialect costs per token.
func BenchmarkStream(b *testing.B) {
	chunk := []byte(`{"id":"chatcmpl-9f1c","object":"chat.completion.chunk","created":1795999346,"model":"qwen","choices":[{"index":0,"delta":{"content":" token"},"logprobs":null,"finish_reason":null,"token_ids":null}],"usage":{"prompt_tokens":24000,"total_tokens":24001,"completion_tokens":1}}`)
	s := anthropic.NewStream(answer)
	var out []byte
	b.SetBytes(int64(len(chunk)))
	b.ReportAllocs()
	for b.Loop() {
		out = s.Chunk(out[:0], chunk)
	}
}
