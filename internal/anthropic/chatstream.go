package anthropic

import (
	"bytes"
	"net/http"
	"strconv"

	"github.com/kinference/kinference/internal/openai"
)

// ChatStream turns the events of a provider's Messages stream into the events
// of a chat completion stream, with usage in a last chunk and [DONE].
type ChatStream struct {
	a        Completion
	obj, sub openai.Object
	usage    messageUsage
	counted  bool // the output
	began    bool
	ended    bool
	calls    int          // begun so far
	inCall   bool         // the open block is a call
	input    openai.Value // that the block began with
	argued   bool         // arguments were sent for it
}

// NewChatStream begins a stream.
func NewChatStream(a Completion) *ChatStream { return &ChatStream{a: a} }

// Ended reports whether the stream came to its end, by [DONE] or an error. A
// provider's stream that ends without was cut.
func (s *ChatStream) Ended() bool { return s.ended }

// Usage is what is known so far: of the prompt soon, of the output at the end. What
// the beginning says of the output is of no use.
func (s *ChatStream) Usage() openai.Usage {
	u := s.usage.total()
	if !s.counted {
		u.Output = openai.Unknown
	}
	return u
}

// Event appends what an event becomes: nothing, one chunk, or more. err is the
// provider's error, which is appended too.
func (s *ChatStream) Event(dst, data []byte) ([]byte, *openai.Error) {
	if s.ended {
		return dst, nil
	}
	o := &s.obj
	if o.Parse(data, 0) != nil {
		return s.fail(dst, openai.Server(http.StatusBadGateway, openai.CodeUpstream, "The provider gave no valid answer."))
	}
	kind, _ := o.Get("type").Text()
	from := len(dst)
	dst, e := s.event(dst, kind, data)
	if s.a.Own && e == nil && ownEvents[kind] {
		dst = s.own(dst, from, data)
	}
	return dst, e
}

func (s *ChatStream) event(dst []byte, kind string, data []byte) ([]byte, *openai.Error) {
	o := &s.obj
	switch kind {
	case "message_start":
		if m := o.Get("message"); m.Kind == openai.Obj && s.sub.Parse(m.Raw, 0) == nil {
			s.usage.take(s.sub.Get("usage"))
		}
		if s.began {
			return dst, nil
		}
		s.began = true
		return s.delta(dst, `"role":"assistant","content":""`), nil
	case "content_block_start":
		return s.start(dst, o.Get("content_block")), nil
	case "content_block_delta":
		return s.piece(dst, o.Get("delta")), nil
	case "content_block_stop":
		if s.inCall && !s.argued { // without arguments a client could not parse them
			args := s.input.Raw
			if s.input.Kind != openai.Obj {
				args = []byte("{}")
			}
			dst = s.arguments(dst, openai.AppendString(nil, string(openai.Compact(args))))
		}
		s.inCall = false
	case "message_delta":
		s.usage.take(o.Get("usage"))
		s.counted = s.counted || o.Get("usage").Given()
		if d := o.Get("delta"); d.Kind == openai.Obj && s.sub.Parse(d.Raw, 0) == nil && s.sub.Get("stop_reason").Given() {
			reason, _ := s.sub.Get("stop_reason").Text()
			dst = s.a.head(append(dst, "data: "...), "chat.completion.chunk")
			dst = append(dst, `{"index":0,"delta":{},"logprobs":null,"finish_reason":`...)
			dst = appendFinish(dst, reason, s.sub.Get("stop_sequence"))
			return append(dst, "}]}\n\n"...), nil
		}
	case "message_stop":
		s.ended = true
		dst = s.a.head(append(dst, "data: "...), "chat.completion.chunk")
		dst = s.usage.append(append(dst, `],"usage":`...))
		return append(dst, "}\n\ndata: [DONE]\n\n"...), nil
	case "error":
		return s.fail(dst, fromEvent(data))
	}
	return dst, nil
}

func (s *ChatStream) fail(dst []byte, e *openai.Error) ([]byte, *openai.Error) {
	s.ended = true
	return e.AppendEvent(dst), e
}

// delta appends a chunk with the members of its delta.
func (s *ChatStream) delta(dst []byte, members string) []byte {
	dst = s.a.head(append(dst, "data: "...), "chat.completion.chunk")
	dst = append(append(dst, `{"index":0,"delta":{`...), members...)
	return append(dst, "},\"logprobs\":null,\"finish_reason\":null}]}\n\n"...)
}

func (s *ChatStream) start(dst []byte, block openai.Value) []byte {
	o := &s.sub
	if s.inCall = false; block.Kind != openai.Obj || o.Parse(block.Raw, 0) != nil {
		return dst
	}
	switch kind, _ := o.Get("type").Text(); kind {
	case "tool_use":
		s.inCall, s.argued = true, false
		in := o.Get("input")
		s.input = openai.Value{Raw: bytes.Clone(in.Raw), Kind: in.Kind}
		s.calls++
		return s.delta(dst, `"tool_calls":[{"index":`+strconv.Itoa(s.calls-1)+`,"id":`+string(raw(o.Get("id")))+`,"type":"function","function":{"name":`+string(raw(o.Get("name")))+`,"arguments":""}}]`)
	case "text":
		return s.words(dst, "content", o.Get("text"))
	case "thinking":
		return s.words(dst, "reasoning", o.Get("thinking"))
	}
	return dst
}

func (s *ChatStream) words(dst []byte, name string, v openai.Value) []byte {
	if v.Kind != openai.String || len(v.Raw) == 2 {
		return dst
	}
	return s.delta(dst, `"`+name+`":`+string(v.Raw))
}

func (s *ChatStream) piece(dst []byte, d openai.Value) []byte {
	o := &s.sub
	if d.Kind != openai.Obj || o.Parse(d.Raw, 0) != nil {
		return dst
	}
	switch kind, _ := o.Get("type").Text(); kind {
	case "text_delta":
		return s.words(dst, "content", o.Get("text"))
	case "thinking_delta":
		return s.words(dst, "reasoning", o.Get("thinking"))
	case "input_json_delta":
		if args := o.Get("partial_json"); s.inCall && args.Kind == openai.String && len(args.Raw) > 2 {
			return s.arguments(dst, args.Raw)
		}
	}
	return dst
}

func (s *ChatStream) arguments(dst, raw []byte) []byte {
	s.argued = true
	return s.delta(dst, `"tool_calls":[{"index":`+strconv.Itoa(s.calls-1)+`,"function":{"arguments":`+string(raw)+`}}]`)
}
