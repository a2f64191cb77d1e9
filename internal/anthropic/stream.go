package anthropic

import (
	"strconv"

	"github.com/kinference/kinference/internal/blocks"
	"github.com/kinference/kinference/internal/openai"
)

// unsigned is the signature of thinking that no provider has signed. Clients
// bring it back; a provider that checks signatures must not get such a block.
const unsigned = "kinference-unsigned"

// maxBlocks bounds the blocks of a whole answer.
const maxBlocks = 1024

// Answer says how an answer is made out.
type Answer struct {
	ID    string // of the message: msg_…
	Model string // as the client named it
	// Input is how long the prompt is as far as the gateway knows,
	// openai.Unknown if it does not. It stands in until the engine tells.
	Input int
	// HideThinking leaves out reasoning.
	HideThinking bool
}

// Stream turns the chunks of a chat completion stream into the events of a
// Messages stream, blocks strictly one after another. Each method appends what
// is to be sent to dst and returns it.
type Stream struct {
	a             Answer
	seq           *blocks.Sequence
	opened, ended bool
	own           bool // the client gets a provider's own events
	open          blocks.Block
}

// NewStream begins a stream.
func NewStream(a Answer) *Stream {
	s := &Stream{a: a}
	s.seq = blocks.New(sink{s}, a.HideThinking)
	return s
}

// Opened reports whether message_start was sent.
func (s *Stream) Opened() bool { return s.opened }

// Ended reports whether the last event was sent: message_stop or error.
func (s *Stream) Ended() bool { return s.ended }

// Open appends message_start, once: with Answer.Input as the prompt's length
// if no chunk told another one.
func (s *Stream) Open(dst []byte) []byte {
	if s.opened {
		return dst
	}
	s.opened = true
	input := s.seq.Usage.Prompt
	if input == openai.Unknown {
		input = s.a.Input
	}
	dst = append(dst, "event: message_start\ndata: {\"type\":\"message_start\",\"message\":{\"id\":"...)
	dst = openai.AppendString(dst, s.a.ID)
	dst = append(dst, `,"type":"message","role":"assistant","model":`...)
	dst = openai.AppendString(dst, s.a.Model)
	dst = append(dst, `,"content":[],"stop_reason":null,"stop_sequence":null,"usage":`...)
	dst = appendUsage(dst, openai.Usage{Prompt: input, Cached: openai.Unknown, Output: openai.Unknown})
	return append(dst, "}}\n\n"...)
}

// Ping appends an event that keeps the connection alive.
func (s *Stream) Ping(dst []byte) []byte {
	if s.ended {
		return dst
	}
	return append(s.Open(dst), "event: ping\ndata: {\"type\": \"ping\"}\n\n"...)
}

// Chunk appends the events for one chunk. An error in it, or a chunk that is
// none, ends the stream.
func (s *Stream) Chunk(dst, data []byte) []byte {
	if s.ended {
		return dst
	}
	if fault := s.seq.Parse(data); fault != nil {
		return s.Error(dst, fault)
	}
	if out, ok := s.passed(dst, s.seq.Member(ownName)); ok || s.own {
		return out
	}
	dst, fault := s.seq.Take(s.Open(dst))
	if fault != nil {
		return s.Error(dst, fault)
	}
	return dst
}

// End appends what closes the message. Call it for [DONE].
func (s *Stream) End(dst []byte) []byte {
	if s.ended {
		return dst
	}
	if s.own {
		s.ended = true
		return append(dst, "event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n"...)
	}
	dst = s.seq.Close(s.Open(dst))
	s.ended = true
	dst = append(dst, "event: message_delta\ndata: {\"type\":\"message_delta\",\"delta\":{"...)
	dst = appendStop(dst, s.seq.Finish, s.seq.Stop, s.seq.Calls() > 0, s.seq.Refused)
	dst = append(dst, `},"usage":`...)
	u := s.seq.Usage
	if u.Prompt == openai.Unknown {
		u.Prompt = s.a.Input
	}
	if u.Output == openai.Unknown {
		u.Output = s.seq.Deltas
	}
	dst = appendUsage(dst, u)
	return append(dst, "}\n\nevent: message_stop\ndata: {\"type\":\"message_stop\"}\n\n"...)
}

// Error appends the event that ends a stream which failed. What still waits is
// not sent: the client cannot use half of it.
func (s *Stream) Error(dst []byte, e *openai.Error) []byte {
	if s.ended {
		return dst
	}
	s.ended = true
	return AppendErrorEvent(dst, e, "")
}

// sink writes the blocks.
type sink struct{ *Stream }

// Begin implements blocks.Sink.
func (s sink) Begin(dst []byte, b blocks.Block) []byte {
	s.open = b
	dst = append(dst, "event: content_block_start\ndata: {\"type\":\"content_block_start\",\"index\":"...)
	dst = strconv.AppendInt(dst, int64(b.Index), 10)
	dst = append(dst, `,"content_block":`...)
	switch b.Kind {
	case blocks.Call:
		id := b.ID
		if id == "" {
			id = "toolu_" + s.a.ID + "_" + strconv.Itoa(b.Index)
		}
		dst = append(dst, `{"type":"tool_use","id":`...)
		dst = openai.AppendString(dst, outID(id))
		dst = append(dst, `,"name":`...)
		dst = openai.AppendString(dst, b.Name)
		dst = append(dst, `,"input":{}}`...)
	case blocks.Thinking:
		dst = append(dst, `{"type":"thinking","thinking":"","signature":""}`...)
	case blocks.Text:
		dst = append(dst, `{"type":"text","text":""}`...)
	}
	return append(dst, "}\n\n"...)
}

// Delta implements blocks.Sink.
func (s sink) Delta(dst, raw []byte) []byte {
	switch s.open.Kind {
	case blocks.Call:
		return s.event(dst, `{"type":"input_json_delta","partial_json":"`, raw)
	case blocks.Thinking:
		return s.event(dst, `{"type":"thinking_delta","thinking":"`, raw)
	case blocks.Text:
	}
	return s.event(dst, `{"type":"text_delta","text":"`, raw)
}

func (s sink) event(dst []byte, head string, raw []byte) []byte {
	dst = append(dst, "event: content_block_delta\ndata: {\"type\":\"content_block_delta\",\"index\":"...)
	dst = strconv.AppendInt(dst, int64(s.open.Index), 10)
	dst = append(append(dst, `,"delta":`...), head...)
	dst = append(dst, raw...)
	return append(dst, "\"}}\n\n"...)
}

// End implements blocks.Sink.
func (s sink) End(dst []byte) []byte {
	if s.open.Kind == blocks.Thinking {
		dst = s.event(dst, `{"type":"signature_delta","signature":"`, []byte(unsigned))
	}
	dst = append(dst, "event: content_block_stop\ndata: {\"type\":\"content_block_stop\",\"index\":"...)
	dst = strconv.AppendInt(dst, int64(s.open.Index), 10)
	return append(dst, "}\n\n"...)
}

// appendUsage splits the prompt's tokens as the API does: input_tokens are
// those that no cache had. What is unknown counts as none.
func appendUsage(dst []byte, u openai.Usage) []byte {
	prompt, cached := max(u.Prompt, 0), max(u.Cached, 0)
	cached = min(cached, prompt)
	dst = append(dst, `{"input_tokens":`...)
	dst = strconv.AppendInt(dst, int64(prompt-cached), 10)
	dst = append(dst, `,"cache_creation_input_tokens":0,"cache_read_input_tokens":`...)
	dst = strconv.AppendInt(dst, int64(cached), 10)
	dst = append(dst, `,"output_tokens":`...)
	dst = strconv.AppendInt(dst, int64(max(u.Output, 0)), 10)
	return append(dst, '}')
}

// appendStop appends stop_reason and stop_sequence. Only vLLM tells which
// sequence it was; elsewhere such an answer has just ended.
func appendStop(dst []byte, finish string, sequence openai.Value, tools, refused bool) []byte {
	reason := "end_turn"
	switch {
	case finish == "length":
		reason = "max_tokens"
	case finish == "content_filter" || refused:
		reason = "refusal"
	case tools: // engines say "stop" when the client chose the tool
		reason = "tool_use"
	case sequence.Kind == openai.String:
		reason = "stop_sequence"
	}
	dst = append(dst, `"stop_reason":"`...)
	dst = append(dst, reason...)
	dst = append(dst, `","stop_sequence":`...)
	if reason != "stop_sequence" {
		return append(dst, "null"...)
	}
	return append(dst, sequence.Raw...)
}
