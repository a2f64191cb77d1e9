package responses

import (
	"bytes"
	"errors"
	"net/http"
	"strconv"

	"github.com/kinference/kinference/internal/blocks"
	"github.com/kinference/kinference/internal/openai"
)

// Answer says how a response is made out.
type Answer struct {
	ID      string // resp_…; the ids of items are made of what follows it
	Model   string // as the client named it
	Created int64  // Unix time
	Input   int    // tokens of the prompt until the engine tells, or openai.Unknown
	Echo    []byte // members that repeat the request; see [Request.Echo]
}

// Echo are the members of a response that say what was asked for.
func (r *Request) Echo() []byte {
	out := []byte(`"background":false,"previous_response_id":null,"store":false,"truncation":"disabled"`)
	for _, m := range []struct{ name, absent string }{
		{"instructions", "null"}, {"max_output_tokens", "null"}, {"metadata", "{}"}, {"parallel_tool_calls", "true"}, {"reasoning", `{"effort":null,"summary":null}`},
		{"temperature", "null"}, {"text", `{"format":{"type":"text"}}`}, {"tool_choice", `"auto"`}, {"tools", "[]"}, {"top_p", "null"}, {"user", "null"},
	} {
		out = append(out, `,"`+m.name+`":`...)
		if v := r.Body.Get(m.name); v.Given() {
			// An event is one line.
			out = append(out, openai.Compact(v.Raw)...)
		} else {
			out = append(out, m.absent...)
		}
	}
	return out
}

// suffix is what ids of items are made of.
func (a *Answer) suffix() string {
	if len(a.ID) > 5 {
		return a.ID[5:]
	}
	return a.ID
}

// append writes the response object. status is in_progress, completed,
// incomplete, which has a reason, or failed; fault is what it failed with.
func (a *Answer) append(dst []byte, status, reason string, output []byte, usage *openai.Usage, fault *openai.Error) []byte {
	dst = append(dst, `{"id":`...)
	dst = openai.AppendString(dst, a.ID)
	dst = append(dst, `,"object":"response","created_at":`...)
	dst = strconv.AppendInt(dst, a.Created, 10)
	dst = append(dst, `,"status":"`+status+`","error":`...)
	if fault == nil {
		dst = append(dst, "null"...)
	} else {
		dst = append(dst, `{"code":"`+faultCode(fault)+`","message":`...)
		dst = append(openai.AppendString(dst, fault.Message), '}')
	}
	dst = append(dst, `,"incomplete_details":`...)
	if status == "incomplete" {
		dst = append(dst, `{"reason":"`+reason+`"}`...)
	} else {
		dst = append(dst, "null"...)
	}
	dst = append(dst, `,"model":`...)
	dst = openai.AppendString(dst, a.Model)
	dst = append(dst, `,"output":[`...)
	dst = append(append(dst, output...), "],"...)
	dst = append(dst, a.Echo...)
	dst = append(dst, `,"usage":`...)
	if usage == nil {
		dst = append(dst, "null"...)
	} else {
		dst = appendUsage(dst, *usage)
	}
	return append(dst, '}')
}

// faultCode is one of the codes that a failed response may have.
func faultCode(e *openai.Error) string {
	switch {
	case e.Status == http.StatusTooManyRequests:
		return "rate_limit_exceeded"
	case e.Status >= 400 && e.Status < 500:
		return "invalid_prompt"
	}
	return "server_error"
}

func appendUsage(dst []byte, u openai.Usage) []byte {
	prompt, output := max(u.Prompt, 0), max(u.Output, 0)
	dst = append(dst, `{"input_tokens":`...)
	dst = strconv.AppendInt(dst, int64(prompt), 10)
	dst = append(dst, `,"input_tokens_details":{"cached_tokens":`...)
	dst = strconv.AppendInt(dst, int64(max(u.Cached, 0)), 10)
	dst = append(dst, `},"output_tokens":`...)
	dst = strconv.AppendInt(dst, int64(output), 10)
	dst = append(dst, `,"output_tokens_details":{"reasoning_tokens":`...)
	dst = strconv.AppendInt(dst, int64(max(u.Reasoning, 0)), 10)
	dst = append(dst, `},"total_tokens":`...)
	dst = strconv.AppendInt(dst, int64(prompt+output), 10)
	return append(dst, '}')
}

// item is one element of the output. text is the inside of a JSON string.
type item struct {
	kind     blocks.Kind
	id       string
	callID   string // JSON text
	name     string // JSON text
	text     []byte
	finished string // status
}

func (t *item) append(dst []byte) []byte {
	switch t.kind {
	case blocks.Call:
		dst = append(dst, `{"type":"function_call","id":"`+t.id+`","call_id":`+t.callID+`,"name":`+t.name+`,"arguments":"`...)
		dst = append(append(dst, t.text...), '"')
	case blocks.Thinking:
		dst = append(dst, `{"type":"reasoning","id":"`+t.id+`","summary":[],"content":[`...)
		if t.finished != "in_progress" {
			dst = t.part(dst, t.text)
		}
		dst = append(dst, ']')
	case blocks.Text:
		dst = append(dst, `{"type":"message","id":"`+t.id+`","role":"assistant","content":[`...)
		if t.finished != "in_progress" {
			dst = t.part(dst, t.text)
		}
		dst = append(dst, ']')
	}
	return append(dst, `,"status":"`+t.finished+`"}`...)
}

// part is an item's only content part with this text.
func (t *item) part(dst, text []byte) []byte {
	if t.kind == blocks.Thinking {
		dst = append(dst, `{"type":"reasoning_text","text":"`...)
		return append(append(dst, text...), `"}`...)
	}
	dst = append(dst, `{"type":"output_text","text":"`...)
	return append(append(dst, text...), `","annotations":[],"logprobs":[]}`...)
}

// prefixes of items' ids.
var prefixes = map[blocks.Kind]string{blocks.Text: "msg_", blocks.Thinking: "rs_", blocks.Call: "fc_"}

func (a *Answer) item(kind blocks.Kind, index int) *item {
	return &item{kind: kind, id: prefixes[kind] + a.suffix() + "_" + strconv.Itoa(index), finished: "in_progress"}
}

// outcome is the status of a response by the engine's finish_reason, and why it
// is incomplete.
func outcome(finish string) (status, reason string) {
	switch finish {
	case "length":
		return "incomplete", "max_output_tokens"
	case "content_filter":
		return "incomplete", "content_filter"
	}
	return "completed", ""
}

var errNoAnswer = errors.New("not a chat completion")

// AppendResponse appends a whole chat completion as a response. The error says
// that it is none.
func AppendResponse(dst, completion []byte, a Answer) ([]byte, error) {
	var chunk openai.Chunk
	if err := chunk.Parse(completion); err != nil {
		return nil, err
	}
	var choice, message openai.Object
	for v := range chunk.Object().Get("choices").Elements() {
		if v.Kind != openai.Obj || choice.Parse(v.Raw, 0) != nil {
			return nil, errNoAnswer
		}
		break
	}
	v := choice.Get("message")
	if v.Kind != openai.Obj || message.Parse(v.Raw, 0) != nil {
		return nil, errNoAnswer
	}
	finish, _ := choice.Get("finish_reason").Text()
	status, reason := outcome(finish)
	var items [][]byte
	add := func(t *item) {
		t.finished = status
		items = append(items, t.append(nil))
	}
	reasoning := message.Get("reasoning")
	if reasoning.Kind != openai.String {
		reasoning = message.Get("reasoning_content")
	}
	for _, m := range []struct {
		kind blocks.Kind
		v    openai.Value
	}{{blocks.Thinking, reasoning}, {blocks.Text, message.Get("content")}, {blocks.Text, message.Get("refusal")}} {
		if m.v.Kind == openai.String && len(m.v.Raw) > 2 {
			t := a.item(m.kind, len(items))
			t.text = m.v.Raw[1 : len(m.v.Raw)-1]
			add(t)
		}
	}
	var call, function openai.Object
	for c := range message.Get("tool_calls").Elements() {
		if c.Kind != openai.Obj || call.Parse(c.Raw, 0) != nil {
			return nil, errNoAnswer
		}
		f := call.Get("function")
		if f.Kind != openai.Obj || function.Parse(f.Raw, 0) != nil {
			return nil, errNoAnswer
		}
		t := a.item(blocks.Call, len(items))
		id, _ := call.Get("id").Text()
		name, _ := function.Get("name").Text()
		args, _ := function.Get("arguments").Text()
		t.describe(id, name)
		text := openai.AppendString(nil, args)
		t.text = text[1 : len(text)-1]
		add(t)
	}
	u := chunk.Usage
	if u.Prompt == openai.Unknown {
		u.Prompt = a.Input
	}
	return a.append(dst, status, reason, bytes.Join(items, []byte(",")), &u, nil), nil
}

// describe names the call of an item.
func (t *item) describe(id, name string) {
	if id == "" {
		id = "call_" + t.id
	}
	t.callID, t.name = string(openai.AppendString(nil, id)), string(openai.AppendString(nil, name))
}
