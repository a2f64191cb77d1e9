package anthropic

import (
	"math"
	"net/http"
	"strconv"

	"github.com/kinference/kinference/internal/openai"
)

// maxHeld bounds what a Stream keeps of deltas that must wait for an earlier
// block to end, in bytes, and of blocks.
const (
	maxHeld   = 4 << 20
	maxBlocks = 1024
)

// unsigned is the signature of thinking that no provider has signed. Clients
// bring it back; a provider that checks signatures must not get such a block.
const unsigned = "kinference-unsigned"

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
// Messages stream. Blocks come strictly one after another: deltas of a tool
// call wait while another call is not complete, whatever the order of chunks.
// Each method appends what is to be sent to dst and returns it.
type Stream struct {
	a     Answer
	chunk openai.Chunk
	objs  [4]openai.Object

	opened, ended bool
	blocks        int // begun so far; the index of the next one
	open          part
	tools         map[int]*call
	last          int // index of the call that the last delta was for
	waiting       []part
	held          int // bytes in waiting
	usage         openai.Usage
	deltas        int // chunks with content, for an engine that counts nothing
	finish        string
	stop          openai.Value
	refused       bool
}

// NewStream begins a stream.
func NewStream(a Answer) *Stream {
	return &Stream{a: a, tools: map[int]*call{}, usage: openai.NoUsage, last: -1}
}

// part is a block that is open or waits for its turn.
type part struct {
	kind blockKind // textBlock, thinkingBlock or useBlock
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
	input := s.usage.Prompt
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
	if err := s.chunk.Parse(data); err != nil {
		return s.broken(dst)
	}
	if s.chunk.Error.Given() {
		return s.Error(dst, eventError(s.chunk.Error))
	}
	if s.chunk.HasUsage {
		s.usage.Merge(s.chunk.Usage)
	}
	dst = s.Open(dst)
	for choice := range s.chunk.Object().Get("choices").Elements() {
		dst = s.choice(dst, choice)
		break // no more than one was asked for
	}
	if s.held > maxHeld || len(s.waiting) > maxBlocks || len(s.tools) > maxBlocks {
		return s.broken(dst)
	}
	return dst
}

func (s *Stream) broken(dst []byte) []byte {
	return s.Error(dst, openai.Server(http.StatusBadGateway, openai.CodeUpstream, "The model server gave no valid answer."))
}

func (s *Stream) choice(dst []byte, v openai.Value) []byte {
	o := &s.objs[0]
	if v.Kind != openai.Obj || o.Parse(v.Raw, 0) != nil {
		return dst
	}
	if finish, ok := o.Get("finish_reason").Text(); ok {
		s.finish = finish
		if stop := o.Get("stop_reason"); stop.Kind == openai.String {
			s.stop = openai.Value{Raw: append([]byte(nil), stop.Raw...), Kind: openai.String}
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
		kind blockKind
		v    openai.Value
	}{{thinkingBlock, reasoning}, {textBlock, o.Get("content")}, {textBlock, o.Get("refusal")}} {
		if d.v.Kind == openai.String && len(d.v.Raw) > 2 {
			some = true
			if d.kind != thinkingBlock || !s.a.HideThinking {
				dst = s.text(dst, d.kind, d.v.Raw[1:len(d.v.Raw)-1])
			}
		}
	}
	s.refused = s.refused || o.Get("refusal").Kind == openai.String && len(o.Get("refusal").Raw) > 2
	for c := range o.Get("tool_calls").Elements() {
		some = true
		dst = s.call(dst, c)
	}
	if some {
		s.deltas++
	}
	return dst
}

// text takes a piece of text or thinking.
func (s *Stream) text(dst []byte, kind blockKind, raw []byte) []byte {
	if len(s.waiting) == 0 && s.open.some && s.open.kind == kind {
		return s.delta(dst, raw)
	}
	if n := len(s.waiting); n > 0 && s.waiting[n-1].kind == kind {
		s.waiting[n-1].text = append(s.waiting[n-1].text, raw...)
	} else {
		s.waiting = append(s.waiting, part{kind: kind, text: append([]byte(nil), raw...), some: true})
	}
	s.held += len(raw)
	return s.drain(dst, false)
}

// call takes a piece of a tool call. The first id and name hold: some engines
// repeat the name, and make a new id, in every chunk.
func (s *Stream) call(dst []byte, v openai.Value) []byte {
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
		text = string(compact(args.Raw))
		raw = openai.AppendString(nil, text)
		raw = raw[1 : len(raw)-1]
	}
	c.scan.add(text)
	if s.open.some && s.open.call == c {
		if len(raw) == 0 {
			return dst
		}
		return s.delta(dst, raw)
	}
	if c.closed {
		return dst // only white space can follow a complete object
	}
	c.held = append(c.held, raw...)
	s.held += len(raw)
	if !c.queued {
		c.queued = true
		s.waiting = append(s.waiting, part{kind: useBlock, call: c, some: true})
	}
	return s.drain(dst, false)
}

// find returns the call that a delta is for. Without an index a new id begins
// another call.
func (s *Stream) find(index openai.Value, id string) *call {
	n, ok := index.Int()
	switch {
	case ok && n >= 0 && n < math.MaxInt32:
	case s.last < 0:
		n = 0
	case id != "" && s.tools[s.last].id != "" && s.tools[s.last].id != id:
		n = int64(s.last) + 1
	default:
		n = int64(s.last)
	}
	s.last = int(n)
	c := s.tools[s.last]
	if c == nil {
		c = &call{}
		s.tools[s.last] = c
	}
	return c
}

// drain sends what waits, as far as its turn has come: a call is over when its
// arguments are a complete object, at the end of the stream everything is.
func (s *Stream) drain(dst []byte, end bool) []byte {
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
			dst = s.delta(dst, held)
		}
		s.waiting = s.waiting[1:]
	}
	return dst
}

func (s *Stream) begin(dst []byte, p part) []byte {
	s.open = part{kind: p.kind, call: p.call, some: true}
	dst = append(dst, "event: content_block_start\ndata: {\"type\":\"content_block_start\",\"index\":"...)
	dst = strconv.AppendInt(dst, int64(s.blocks), 10)
	dst = append(dst, `,"content_block":`...)
	switch p.kind {
	case useBlock:
		id := p.call.id
		if id == "" {
			id = "toolu_" + s.a.ID + "_" + strconv.Itoa(s.blocks)
		}
		dst = append(dst, `{"type":"tool_use","id":`...)
		dst = openai.AppendString(dst, outID(id))
		dst = append(dst, `,"name":`...)
		dst = openai.AppendString(dst, p.call.name)
		dst = append(dst, `,"input":{}}`...)
	case thinkingBlock:
		dst = append(dst, `{"type":"thinking","thinking":"","signature":""}`...)
	default:
		dst = append(dst, `{"type":"text","text":""}`...)
	}
	return append(dst, "}\n\n"...)
}

// delta sends a piece of the open block; raw is the inside of a JSON string.
func (s *Stream) delta(dst, raw []byte) []byte {
	switch s.open.kind {
	case useBlock:
		return s.event(dst, `{"type":"input_json_delta","partial_json":"`, raw)
	case thinkingBlock:
		return s.event(dst, `{"type":"thinking_delta","thinking":"`, raw)
	default:
		return s.event(dst, `{"type":"text_delta","text":"`, raw)
	}
}

func (s *Stream) event(dst []byte, head string, raw []byte) []byte {
	dst = append(dst, "event: content_block_delta\ndata: {\"type\":\"content_block_delta\",\"index\":"...)
	dst = strconv.AppendInt(dst, int64(s.blocks), 10)
	dst = append(append(dst, `,"delta":`...), head...)
	dst = append(dst, raw...)
	return append(dst, "\"}}\n\n"...)
}

// close ends the open block, if there is one.
func (s *Stream) close(dst []byte) []byte {
	if !s.open.some {
		return dst
	}
	if s.open.kind == thinkingBlock {
		dst = s.event(dst, `{"type":"signature_delta","signature":"`, []byte(unsigned))
	}
	if s.open.call != nil {
		s.open.call.closed = true
	}
	dst = append(dst, "event: content_block_stop\ndata: {\"type\":\"content_block_stop\",\"index\":"...)
	dst = strconv.AppendInt(dst, int64(s.blocks), 10)
	s.open = part{}
	s.blocks++
	return append(dst, "}\n\n"...)
}

// End appends what closes the message. Call it for [DONE].
func (s *Stream) End(dst []byte) []byte {
	if s.ended {
		return dst
	}
	dst = s.close(s.drain(s.Open(dst), true))
	s.ended = true
	dst = append(dst, "event: message_delta\ndata: {\"type\":\"message_delta\",\"delta\":{"...)
	dst = appendStop(dst, s.finish, s.stop, len(s.tools) > 0, s.refused)
	dst = append(dst, `},"usage":`...)
	u := s.usage
	if u.Prompt == openai.Unknown {
		u.Prompt = s.a.Input
	}
	if u.Output == openai.Unknown {
		u.Output = s.deltas
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
