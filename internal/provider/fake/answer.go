package fake

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync/atomic"

	"github.com/aws/aws-sdk-go-v2/aws/protocol/eventstream"

	"github.com/kinference/kinference/api/v1alpha1"
)

// call is the name of the tool to call, empty if the answer is a text.
func call(in map[string]any) string {
	tools, _ := in["tools"].([]any)
	if c, ok := in["toolConfig"].(map[string]any); ok {
		tools, _ = c["tools"].([]any)
	}
	text, _ := json.Marshal(in["messages"])
	if len(tools) == 0 || bytes.Contains(text, []byte("tool_call_id")) || bytes.Contains(text, []byte("tool_use_id")) || bytes.Contains(text, []byte("toolResult")) {
		return ""
	}
	t, _ := tools[0].(map[string]any)
	for _, in := range []string{"function", "toolSpec"} {
		if f, ok := t[in].(map[string]any); ok {
			t = f
		}
	}
	name, _ := t["name"].(string)
	return name
}

// pieces are the parts that a stream is sent in.
func pieces(text string) []string {
	n := len(text) / 2
	return []string{text[:n], text[n:]}
}

func quote(s string) string {
	text, _ := json.Marshal(s)
	return string(text)
}

// events is a stream on its way.
type events struct {
	w     http.ResponseWriter
	r     *http.Request
	fault Fault
	over  bool
	left  *atomic.Int64
}

// send sends some of the stream. After the first content, which the caller tells,
// the fault comes.
func (e *events) send(content bool, data []byte, fault []byte) {
	if e.over {
		return
	}
	_, _ = e.w.Write(data)
	_ = http.NewResponseController(e.w).Flush()
	if !content {
		return
	}
	switch e.fault {
	case ErrorEvent:
		e.over = true
		_, _ = e.w.Write(fault)
	case Cut:
		e.over = true
	case Hang:
		e.over = true
		<-e.r.Context().Done()
		e.left.Add(1)
	}
}

func (s *Server) answer(w http.ResponseWriter, r *http.Request, in map[string]any, fault Fault) {
	tool := call(in)
	e := &events{w: w, r: r, fault: fault, left: &s.left}
	stream := in["stream"] == true || strings.HasSuffix(r.URL.Path, "/converse-stream")
	if !stream {
		w.Header().Set("Content-Type", "application/json")
	}
	switch {
	case s.schema == v1alpha1.SchemaAnthropic && stream:
		s.messageEvents(e, tool, in["thinking"] != nil)
	case s.schema == v1alpha1.SchemaAnthropic:
		s.message(w, tool, in["thinking"] != nil)
	case strings.HasSuffix(r.URL.Path, "/converse-stream"):
		converseEvents(e, tool)
	case strings.HasSuffix(r.URL.Path, "/converse"):
		converse(w, tool)
	case stream:
		options, _ := in["stream_options"].(map[string]any)
		s.chunks(e, tool, options["include_usage"] == true)
	default:
		s.completion(w, tool)
	}
}

const chatUsage = `{"prompt_tokens":12,"completion_tokens":5,"total_tokens":17,"prompt_tokens_details":{"cached_tokens":4}}`

func (s *Server) completion(w io.Writer, tool string) {
	message, finish := `{"role":"assistant","content":`+quote(Text)+`,"refusal":null}`, "stop"
	if tool != "" {
		message = `{"role":"assistant","content":null,"tool_calls":[{"id":"call_1","type":"function","function":{"name":` + quote(tool) + `,"arguments":` + quote(Arguments) + `}}]}`
		finish = "tool_calls"
	}
	fmt.Fprintf(w, `{"id":"chatcmpl-9","object":"chat.completion","created":1,"model":%q,"choices":[{"index":0,"message":%s,"logprobs":null,"finish_reason":%q}],"usage":%s}`,
		s.model, message, finish, chatUsage)
}

func (s *Server) chunks(e *events, tool string, usage bool) {
	e.w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
	fault := []byte(`data: {"error":{"message":"Rate limit of ` + Account + `","type":"tokens","code":"rate_limit_exceeded"}}` + "\n\n")
	send := func(content bool, choices, rest string) {
		e.send(content, fmt.Appendf(nil, "data: {\"id\":\"chatcmpl-9\",\"object\":\"chat.completion.chunk\",\"created\":1,\"model\":%q,\"choices\":[%s]%s}\n\n", s.model, choices, rest), fault)
	}
	delta := func(content bool, d string) {
		send(content, `{"index":0,"delta":`+d+`,"finish_reason":null}`, `,"usage":null`)
	}
	if s.schema == v1alpha1.SchemaAzureOpenAI {
		send(false, "", `,"prompt_filter_results":[{"prompt_index":0,"content_filter_results":{}}]`)
	}
	delta(false, `{"role":"assistant","content":""}`)
	finish := "stop"
	if tool == "" {
		for _, p := range pieces(Text) {
			delta(true, `{"content":`+quote(p)+`}`)
		}
	} else {
		finish = "tool_calls"
		delta(true, `{"tool_calls":[{"index":0,"id":"call_1","type":"function","function":{"name":`+quote(tool)+`,"arguments":""}}]}`)
		for _, p := range pieces(Arguments) {
			delta(true, `{"tool_calls":[{"index":0,"function":{"arguments":`+quote(p)+`}}]}`)
		}
	}
	send(true, `{"index":0,"delta":{},"finish_reason":"`+finish+`"}`, `,"usage":null`)
	if usage {
		send(false, "", `,"usage":`+chatUsage)
	}
	e.send(false, []byte("data: [DONE]\n\n"), nil)
}

// messageUsage is what Anthropic tells beside the counts that others have as well.
const messageUsage = `{"input_tokens":6,"cache_creation_input_tokens":2,"cache_read_input_tokens":4,"cache_creation":{"ephemeral_5m_input_tokens":2,"ephemeral_1h_input_tokens":0},"output_tokens":5,"service_tier":"standard"}`

func (s *Server) message(w io.Writer, tool string, thinks bool) {
	block, reason := `{"type":"text","text":`+quote(Text)+`}`, "end_turn"
	if tool != "" {
		block, reason = `{"type":"tool_use","id":"toolu_1","name":`+quote(tool)+`,"input":`+Arguments+`}`, "tool_use"
	}
	if thinks {
		block = `{"type":"thinking","thinking":"Hm.","signature":"` + Signature + `"},` + block
	}
	fmt.Fprintf(w, `{"id":"msg_1","type":"message","role":"assistant","model":%q,"content":[%s],"stop_reason":%q,"stop_sequence":null,"usage":%s}`,
		s.model, block, reason, messageUsage)
}

func (s *Server) messageEvents(e *events, tool string, thinks bool) {
	e.w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
	fault := []byte("event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"overloaded_error\",\"message\":\"Overloaded " + Account + "\"}}\n\n")
	send := func(content bool, kind, rest string) {
		e.send(content, fmt.Appendf(nil, "event: %s\ndata: {\"type\":%q%s}\n\n", kind, kind, rest), fault)
	}
	send(false, "message_start", fmt.Sprintf(`,"message":{"id":"msg_1","type":"message","role":"assistant","model":%q,"content":[],"stop_reason":null,"usage":{"input_tokens":8,"cache_read_input_tokens":4,"output_tokens":1}}`, s.model))
	send(false, "ping", "")
	index := `,"index":0`
	if thinks {
		send(false, "content_block_start", index+`,"content_block":{"type":"thinking","thinking":"","signature":""}`)
		send(true, "content_block_delta", index+`,"delta":{"type":"thinking_delta","thinking":"Hm."}`)
		send(true, "content_block_delta", index+`,"delta":{"type":"signature_delta","signature":"`+Signature+`"}`)
		send(false, "content_block_stop", index)
		index = `,"index":1`
	}
	reason := "end_turn"
	if tool == "" {
		send(false, "content_block_start", index+`,"content_block":{"type":"text","text":""}`)
		for _, p := range pieces(Text) {
			send(true, "content_block_delta", index+`,"delta":{"type":"text_delta","text":`+quote(p)+`}`)
		}
	} else {
		reason = "tool_use"
		send(false, "content_block_start", index+`,"content_block":{"type":"tool_use","id":"toolu_1","name":`+quote(tool)+`,"input":{}}`)
		for _, p := range pieces(Arguments) {
			send(true, "content_block_delta", index+`,"delta":{"type":"input_json_delta","partial_json":`+quote(p)+`}`)
		}
	}
	send(false, "content_block_stop", index)
	send(false, "message_delta", `,"delta":{"stop_reason":"`+reason+`","stop_sequence":null},"usage":`+messageUsage)
	send(false, "message_stop", "")
}

const converseUsage = `{"inputTokens":8,"outputTokens":5,"totalTokens":17,"cacheReadInputTokens":4,"cacheWriteInputTokens":0}`

func converse(w io.Writer, tool string) {
	block, reason := `{"text":`+quote(Text)+`}`, "end_turn"
	if tool != "" {
		block, reason = `{"toolUse":{"toolUseId":"tooluse_1","name":`+quote(tool)+`,"input":`+Arguments+`}}`, "tool_use"
	}
	fmt.Fprintf(w, `{"output":{"message":{"role":"assistant","content":[%s]}},"stopReason":%q,"usage":%s,"metrics":{"latencyMs":7}}`, block, reason, converseUsage)
}

// Frame is one frame of an event stream, by the encoder of the AWS SDK. kind is
// event or exception, name the event's or exception's type.
func Frame(kind, name, payload string) []byte {
	m := eventstream.Message{Payload: []byte(payload)}
	m.Headers.Set(":message-type", eventstream.StringValue(kind))
	m.Headers.Set(":"+kind+"-type", eventstream.StringValue(name))
	m.Headers.Set(":content-type", eventstream.StringValue("application/json"))
	var b bytes.Buffer
	if err := eventstream.NewEncoder().Encode(&b, m); err != nil {
		panic(err) // of a test's own frame
	}
	return b.Bytes()
}

func converseEvents(e *events, tool string) {
	e.w.Header().Set("Content-Type", "application/vnd.amazon.eventstream")
	fault := Frame("exception", "throttlingException", `{"message":"Too many tokens for `+Account+`"}`)
	send := func(content bool, name, payload string) { e.send(content, Frame("event", name, payload), fault) }
	send(false, "messageStart", `{"p":"abcd","role":"assistant"}`)
	reason := "end_turn"
	if tool == "" {
		for _, p := range pieces(Text) {
			send(true, "contentBlockDelta", `{"contentBlockIndex":0,"delta":{"text":`+quote(p)+`},"p":"abcdefgh"}`)
		}
	} else {
		reason = "tool_use"
		send(false, "contentBlockStart", `{"contentBlockIndex":0,"start":{"toolUse":{"toolUseId":"tooluse_1","name":`+quote(tool)+`}}}`)
		for _, p := range pieces(Arguments) {
			send(true, "contentBlockDelta", `{"contentBlockIndex":0,"delta":{"toolUse":{"input":`+quote(p)+`}}}`)
		}
	}
	send(false, "contentBlockStop", `{"contentBlockIndex":0}`)
	send(false, "messageStop", `{"stopReason":"`+reason+`"}`)
	send(false, "metadata", `{"usage":`+converseUsage+`,"metrics":{"latencyMs":7}}`)
}
