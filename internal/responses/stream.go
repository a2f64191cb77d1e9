package responses

import (
	"strconv"

	"github.com/kinference/kinference/internal/blocks"
	"github.com/kinference/kinference/internal/openai"
)

// Stream turns the chunks of a chat completion stream into the events of a
// Responses stream: one item after another, and one of response.completed,
// response.incomplete and response.failed at the end. Each method appends what
// is to be sent to dst and returns it.
type Stream struct {
	a             Answer
	seq           *blocks.Sequence
	number        int // sequence_number of the next event
	opened, ended bool
	open          *item
	index         int
	output        []byte // items that are finished
}

// NewStream begins a stream.
func NewStream(a Answer) *Stream {
	s := &Stream{a: a}
	s.seq = blocks.New(sink{s}, false)
	return s
}

// Ended reports whether the last event was sent.
func (s *Stream) Ended() bool { return s.ended }

// Open appends the events that begin a response, once.
func (s *Stream) Open(dst []byte) []byte {
	if s.opened {
		return dst
	}
	s.opened = true
	for _, kind := range []string{"response.created", "response.in_progress"} {
		dst = append(s.event(dst, kind), `,"response":`...)
		dst = append(s.a.append(dst, "in_progress", "", nil, nil, nil), "}\n\n"...)
	}
	return dst
}

// Ping appends what keeps the connection alive: a comment, as the API has no
// event for it.
func (s *Stream) Ping(dst []byte) []byte {
	if s.ended {
		return dst
	}
	return append(s.Open(dst), ": waiting\n\n"...)
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
	dst, fault := s.seq.Take(s.Open(dst))
	if fault != nil {
		return s.Error(dst, fault)
	}
	return dst
}

// End appends what completes the response. Call it for [DONE].
func (s *Stream) End(dst []byte) []byte {
	if s.ended {
		return dst
	}
	dst = s.seq.Close(s.Open(dst))
	status, reason := outcome(s.seq.Finish)
	return s.finish(dst, status, reason, nil)
}

// Error appends the event that ends a stream which failed.
func (s *Stream) Error(dst []byte, e *openai.Error) []byte {
	if s.ended {
		return dst
	}
	return s.finish(s.Open(dst), "failed", "", e)
}

func (s *Stream) finish(dst []byte, status, reason string, fault *openai.Error) []byte {
	s.ended = true
	u := s.seq.Usage
	if u.Prompt == openai.Unknown {
		u.Prompt = s.a.Input
	}
	if u.Output == openai.Unknown {
		u.Output = s.seq.Deltas
	}
	dst = append(s.event(dst, "response."+status), `,"response":`...)
	return append(s.a.append(dst, status, reason, s.output, &u, fault), "}\n\n"...)
}

// event begins an event of this type; its object is left open.
func (s *Stream) event(dst []byte, kind string) []byte {
	dst = append(append(dst, "event: "...), kind...)
	dst = append(append(dst, "\ndata: {\"type\":\""...), kind...)
	dst = append(dst, `","sequence_number":`...)
	dst = strconv.AppendInt(dst, int64(s.number), 10)
	s.number++
	return dst
}

// about begins an event about the open item.
func (s *Stream) about(dst []byte, kind string) []byte {
	dst = append(s.event(dst, kind), `,"output_index":`...)
	return strconv.AppendInt(dst, int64(s.index), 10)
}

// within begins an event about the content of the open item.
func (s *Stream) within(dst []byte, kind string) []byte {
	dst = append(s.about(dst, kind), `,"item_id":"`+s.open.id+`"`...)
	if s.open.kind != blocks.Call {
		dst = append(dst, `,"content_index":0`...)
	}
	return dst
}

// names of the events about an item's text.
var names = map[blocks.Kind]string{
	blocks.Text: "response.output_text", blocks.Thinking: "response.reasoning_text", blocks.Call: "response.function_call_arguments",
}

// sink writes the items.
type sink struct{ *Stream }

// Begin implements blocks.Sink.
func (s sink) Begin(dst []byte, b blocks.Block) []byte {
	s.open, s.index = s.a.item(b.Kind, b.Index), b.Index
	if b.Kind == blocks.Call {
		s.open.describe(b.ID, b.Name)
	}
	dst = append(s.about(dst, "response.output_item.added"), `,"item":`...)
	dst = append(s.open.append(dst), "}\n\n"...)
	if b.Kind == blocks.Call {
		return dst
	}
	dst = append(s.within(dst, "response.content_part.added"), `,"part":`...)
	return append(s.open.part(dst, nil), "}\n\n"...)
}

// Delta implements blocks.Sink.
func (s sink) Delta(dst, raw []byte) []byte {
	s.open.text = append(s.open.text, raw...)
	dst = append(s.within(dst, names[s.open.kind]+".delta"), `,"delta":"`...)
	dst = append(append(dst, raw...), '"')
	if s.open.kind == blocks.Text {
		dst = append(dst, `,"logprobs":[]`...)
	}
	return append(dst, "}\n\n"...)
}

// End implements blocks.Sink.
func (s sink) End(dst []byte) []byte {
	t := s.open
	member := "text"
	if t.kind == blocks.Call {
		member = "arguments"
	}
	dst = append(s.within(dst, names[t.kind]+".done"), `,"`+member+`":"`...)
	dst = append(append(dst, t.text...), '"')
	switch t.kind {
	case blocks.Text:
		dst = append(dst, `,"logprobs":[]`...)
	case blocks.Call:
		dst = append(dst, `,"name":`+t.name...)
	case blocks.Thinking:
	}
	dst = append(dst, "}\n\n"...)
	if t.kind != blocks.Call {
		dst = append(s.within(dst, "response.content_part.done"), `,"part":`...)
		dst = append(t.part(dst, t.text), "}\n\n"...)
	}
	t.finished = "completed"
	if len(s.output) > 0 {
		s.output = append(s.output, ',')
	}
	at := len(s.output)
	s.output = t.append(s.output)
	dst = append(s.about(dst, "response.output_item.done"), `,"item":`...)
	return append(append(dst, s.output[at:]...), "}\n\n"...)
}
