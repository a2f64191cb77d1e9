// Package blocks puts the deltas of a chat completion stream in order: text,
// reasoning and tool calls as blocks that come strictly one after another,
// whatever order an engine sends their pieces in.
//
// The dialects whose streams consist of blocks (the Messages and the Responses
// API) are written by sinks of it. It is pure; a Sequence may be used by one
// goroutine at a time. What it keeps back is bounded, and a stream that goes
// beyond is a fault of the engine.
package blocks

import (
	"encoding/json"
	"math"
	"net/http"

	"github.com/kinference/kinference/internal/openai"
)

// maxHeld bounds what is kept of deltas that must wait for an earlier block to
// end, in bytes, and maxBlocks the blocks and calls.
const (
	maxHeld   = 4 << 20
	maxBlocks = 1024
)

// Kind is what a block holds.
type Kind int

// The kinds.
const (
	Text Kind = iota
	Thinking
	Call
)

// Block is one block of an answer.
type Block struct {
	Kind     Kind
	Index    int
	ID, Name string // of a call; the engine's id, which may be empty
}

// Sink writes blocks in a dialect. Each method appends to dst what is to be
// sent. Begin and End come in pairs, Delta between them; raw is the inside of
// a JSON string, not empty.
type Sink interface {
	Begin(dst []byte, b Block) []byte
	Delta(dst, raw []byte) []byte
	End(dst []byte) []byte
}

// Sequence orders the chunks of one stream. Use New.
type Sequence struct {
	// What the chunks told so far.
	Usage   openai.Usage
	Finish  string       // finish_reason
	Stop    openai.Value // stop_reason, where it is a string
	Refused bool
	Deltas  int // chunks with content, for an engine that counts nothing

	sink         Sink
	hideThinking bool
	chunk        openai.Chunk
	objs         [4]openai.Object
	begun        int
	open         part
	calls        map[int]*call
	last         int // index of the call that the last delta was for
	waiting      []part
	held         int // bytes in waiting
}

// New makes a Sequence. With hideThinking reasoning makes no blocks.
func New(sink Sink, hideThinking bool) *Sequence {
	return &Sequence{sink: sink, hideThinking: hideThinking, calls: map[int]*call{}, Usage: openai.NoUsage, last: -1}
}

// part is a block that is open or waits for its turn.
type part struct {
	kind Kind
	call *call
	text []byte // waiting text, as inside of a JSON string
	some bool   // there is such a block
}

// call is one tool call.
type call struct {
	id, name string
	held     []byte // arguments that wait, as inside of a JSON string
	scan     jsonEnd
	queued   bool
	closed   bool
}

// Calls is how many tool calls there were.
func (s *Sequence) Calls() int { return len(s.calls) }

// Parse looks into a chunk. The error is one that the gateway wrote into the
// stream, or says that the chunk is none. Usage is known afterwards; Take
// gives the content to the sink.
func (s *Sequence) Parse(data []byte) *openai.Error {
	if err := s.chunk.Parse(data); err != nil {
		return broken()
	}
	if s.chunk.Error.Given() {
		return eventError(s.chunk.Error)
	}
	if s.chunk.HasUsage {
		s.Usage.Merge(s.chunk.Usage)
	}
	return nil
}

// Member is a member of the parsed chunk.
func (s *Sequence) Member(name string) openai.Value { return s.chunk.Object().Get(name) }

// Take writes the content of the parsed chunk.
func (s *Sequence) Take(dst []byte) ([]byte, *openai.Error) {
	for choice := range s.chunk.Object().Get("choices").Elements() {
		dst = s.choice(dst, choice)
		break // no more than one was asked for
	}
	if s.held > maxHeld || len(s.waiting) > maxBlocks || len(s.calls) > maxBlocks {
		return dst, broken()
	}
	return dst, nil
}

// Close writes what still waits and ends the last block.
func (s *Sequence) Close(dst []byte) []byte { return s.close(s.drain(dst, true)) }

func broken() *openai.Error {
	return openai.Server(http.StatusBadGateway, openai.CodeUpstream, "The model server gave no valid answer.")
}

func (s *Sequence) choice(dst []byte, v openai.Value) []byte {
	o := &s.objs[0]
	if v.Kind != openai.Obj || o.Parse(v.Raw, 0) != nil {
		return dst
	}
	if finish, ok := o.Get("finish_reason").Text(); ok {
		s.Finish = finish
		if stop := o.Get("stop_reason"); stop.Kind == openai.String {
			s.Stop = openai.Value{Raw: append([]byte(nil), stop.Raw...), Kind: openai.String}
		}
	}
	delta := o.Get("delta")
	if o = &s.objs[1]; delta.Kind != openai.Obj || o.Parse(delta.Raw, 0) != nil {
		return dst
	}
	some := false
	reasoning := o.Get("reasoning")
	if reasoning.Kind != openai.String {
		reasoning = o.Get("reasoning_content")
	}
	for _, d := range [...]struct {
		kind Kind
		v    openai.Value
	}{{Thinking, reasoning}, {Text, o.Get("content")}, {Text, o.Get("refusal")}} {
		if d.v.Kind == openai.String && len(d.v.Raw) > 2 {
			some = true
			if d.kind != Thinking || !s.hideThinking {
				dst = s.text(dst, d.kind, d.v.Raw[1:len(d.v.Raw)-1])
			}
		}
	}
	s.Refused = s.Refused || o.Get("refusal").Kind == openai.String && len(o.Get("refusal").Raw) > 2
	for c := range o.Get("tool_calls").Elements() {
		some = true
		dst = s.piece(dst, c)
	}
	if some {
		s.Deltas++
	}
	return dst
}

// text takes a piece of text or thinking.
func (s *Sequence) text(dst []byte, kind Kind, raw []byte) []byte {
	if len(s.waiting) == 0 && s.open.some && s.open.kind == kind {
		return s.sink.Delta(dst, raw)
	}
	if n := len(s.waiting); n > 0 && s.waiting[n-1].kind == kind {
		s.waiting[n-1].text = append(s.waiting[n-1].text, raw...)
	} else {
		s.waiting = append(s.waiting, part{kind: kind, text: append([]byte(nil), raw...), some: true})
	}
	s.held += len(raw)
	return s.drain(dst, false)
}

// piece takes a piece of a tool call. The first id and name hold: some engines
// repeat the name, and make a new id, in every chunk.
func (s *Sequence) piece(dst []byte, v openai.Value) []byte {
	o := &s.objs[2]
	if v.Kind != openai.Obj || o.Parse(v.Raw, 0) != nil {
		return dst
	}
	id, _ := o.Get("id").Text()
	c := s.find(o.Get("index"), id)
	if c.id == "" {
		c.id = id
	}
	function := o.Get("function")
	if o = &s.objs[3]; function.Kind != openai.Obj || o.Parse(function.Raw, 0) != nil {
		return dst
	}
	if c.name == "" {
		c.name, _ = o.Get("name").Text()
	}
	args := o.Get("arguments")
	text, raw := "", []byte(nil)
	switch args.Kind {
	case openai.String:
		text, _ = args.Text()
		raw = args.Raw[1 : len(args.Raw)-1]
	case openai.Obj: // not as a string, as some servers do
		text = string(openai.Compact(args.Raw))
		raw = openai.AppendString(nil, text)
		raw = raw[1 : len(raw)-1]
	}
	c.scan.add(text)
	if s.open.some && s.open.call == c {
		if len(raw) == 0 {
			return dst
		}
		return s.sink.Delta(dst, raw)
	}
	if c.closed {
		return dst // only white space can follow a complete object
	}
	c.held = append(c.held, raw...)
	s.held += len(raw)
	if !c.queued {
		c.queued = true
		s.waiting = append(s.waiting, part{kind: Call, call: c, some: true})
	}
	return s.drain(dst, false)
}

// find returns the call that a delta is for. Without an index a new id begins
// another call.
func (s *Sequence) find(index openai.Value, id string) *call {
	n, ok := index.Int()
	switch {
	case ok && n >= 0 && n < math.MaxInt32:
	case s.last < 0:
		n = 0
	case id != "" && s.calls[s.last].id != "" && s.calls[s.last].id != id:
		n = int64(s.last) + 1
	default:
		n = int64(s.last)
	}
	s.last = int(n)
	c := s.calls[s.last]
	if c == nil {
		c = &call{}
		s.calls[s.last] = c
	}
	return c
}

// drain sends what waits, as far as its turn has come: a call is over when its
// arguments are a complete object, at the end of the stream everything is.
func (s *Sequence) drain(dst []byte, end bool) []byte {
	for len(s.waiting) > 0 {
		next := &s.waiting[0]
		if !end && (s.open.some && s.open.call != nil && !s.open.call.scan.complete() || next.call != nil && next.call.name == "") {
			return dst
		}
		dst = s.begin(s.close(dst), *next)
		held := next.text
		if next.call != nil {
			held, next.call.held = next.call.held, nil
		}
		if s.held -= len(held); len(held) > 0 {
			dst = s.sink.Delta(dst, held)
		}
		s.waiting = s.waiting[1:]
	}
	return dst
}

func (s *Sequence) begin(dst []byte, p part) []byte {
	s.open = part{kind: p.kind, call: p.call, some: true}
	b := Block{Kind: p.kind, Index: s.begun}
	if p.call != nil {
		b.ID, b.Name = p.call.id, p.call.name
	}
	s.begun++
	return s.sink.Begin(dst, b)
}

// close ends the open block, if there is one.
func (s *Sequence) close(dst []byte) []byte {
	if !s.open.some {
		return dst
	}
	if s.open.call != nil {
		s.open.call.closed = true
	}
	s.open = part{}
	return s.sink.End(dst)
}

// jsonEnd finds out whether a text that comes in pieces holds a complete
// object.
type jsonEnd struct {
	depth           int
	inText, escaped bool
	begun           bool
}

func (j *jsonEnd) add(text string) {
	for i := range len(text) {
		switch c := text[i]; {
		case j.escaped:
			j.escaped = false
		case j.inText:
			j.escaped, j.inText = c == '\\', c != '"'
		case c == '"':
			j.inText = true
		case c == '{' || c == '[':
			j.depth++
			j.begun = true
		case c == '}' || c == ']':
			j.depth--
		}
	}
}

func (j *jsonEnd) complete() bool { return j.begun && j.depth <= 0 && !j.inText }

// eventError reads the error member of a chat stream that this gateway wrote:
// it has no status, so type and code tell it. The message is fit for clients.
func eventError(v openai.Value) *openai.Error {
	var in struct{ Message, Type, Code string }
	_ = json.Unmarshal(v.Raw, &in) // what cannot be read stays empty
	e := &openai.Error{Status: http.StatusInternalServerError, Type: in.Type, Code: in.Code, Message: in.Message}
	switch {
	case in.Code == openai.CodeTimeout:
		e.Status = http.StatusGatewayTimeout
	case in.Type == openai.TypeOverloaded || in.Code == openai.CodeUnavailable:
		e.Status = http.StatusServiceUnavailable
	case in.Type == "rate_limit_error" || in.Type == "requests" || in.Type == "tokens":
		e.Status = http.StatusTooManyRequests
	case in.Type == openai.TypeInvalidRequest:
		e.Status = http.StatusBadRequest
	}
	if e.Message == "" {
		e.Message = "The model server could not complete the request."
	}
	return e
}
