package openai

import (
	"bytes"
	"errors"
	"io"
)

// ErrEventTooLarge is returned for an event that exceeds the reader's limit.
var ErrEventTooLarge = errors.New("server-sent event too large")

// Event is one block of an event stream: everything up to a blank line. Its
// slices are valid until the next call of the Reader.
type Event struct {
	// Raw is the block exactly as it came, with the blank line that ended it.
	// The Raw of all events together are the stream, so they can be passed on
	// as they are.
	Raw []byte
	// Data joins the data lines with \n. It is part of Raw when there is just
	// one. nil when the block has no data line: a comment that keeps the
	// connection alive, or a lone id.
	Data []byte
	// Type is the value of the event field, empty when there is none.
	Type []byte
	// Cut says that the stream ended inside this block, before its blank line.
	Cut bool
}

// Done reports whether the event is the [DONE] mark that ends a stream.
func (e *Event) Done() bool { return bytes.HasPrefix(e.Data, []byte("[DONE]")) }

// Reader splits an event stream into events, wherever the network cut it:
// lines may end in LF, CR or CRLF, data may stand behind its colon with or
// without a space and on several lines, a byte order mark may come first
// (WHATWG HTML, 9.2). Not safe for concurrent use.
type Reader struct {
	src  io.Reader
	max  int
	buf  []byte
	join []byte // data of events with several data lines
	err  error

	start int // of the block being scanned
	line  int // start of the line being scanned
	scan  int // everything before is known to hold no end of the line
	begun bool
	eatLF bool // the last line ended in a CR that was the last byte we had

	lines int // data lines in the block so far
	data  span
	typ   span
}

// span is a place in the block being scanned, counted from its start.
type span struct{ from, to int }

// NewReader returns a Reader of src. Events over max bytes are an error.
func NewReader(src io.Reader, max int) *Reader {
	return &Reader{src: src, max: max, buf: make([]byte, 0, min(8<<10, max+1))}
}

// Next returns the next event, reading as much as it needs. io.EOF comes
// after the last one.
func (r *Reader) Next() (Event, error) {
	for {
		if e, ok := r.Buffered(); ok {
			return e, nil
		}
		if err := r.Fill(); err != nil {
			return Event{}, err
		}
	}
}

// Buffered returns the next event if it is complete in memory. A proxy that
// writes until there is none and then flushes delays nothing and flushes once
// for all that arrived together.
func (r *Reader) Buffered() (Event, bool) {
	for {
		if r.eatLF && r.line < len(r.buf) {
			r.eatLF = false
			if r.buf[r.line] == '\n' { // second half of a CRLF; belongs to the block that is open now
				r.line++
				r.scan = r.line
			}
		}
		end := r.lineEnd()
		if end < 0 {
			break
		}
		next := end + 1
		if r.buf[end] == '\r' {
			if next == len(r.buf) {
				r.eatLF = true
			} else if r.buf[next] == '\n' {
				next++
			}
		}
		blank := r.parse(r.line, end)
		r.line, r.scan = next, next
		if blank {
			return r.emit(next, false), true
		}
	}
	if errors.Is(r.err, io.EOF) && r.start < len(r.buf) {
		if r.line < len(r.buf) {
			r.parse(r.line, len(r.buf))
		}
		r.line, r.scan = len(r.buf), len(r.buf)
		return r.emit(len(r.buf), true), true
	}
	return Event{}, false
}

// Fill reads once from the stream. Call it when Buffered has nothing. After
// the end of the stream it returns io.EOF once Buffered has given all.
func (r *Reader) Fill() error {
	if r.err != nil {
		if errors.Is(r.err, io.EOF) && r.start < len(r.buf) {
			return nil // Buffered hands out the cut event first
		}
		return r.err
	}
	if r.start > 0 {
		r.compact()
	}
	if len(r.buf) > r.max {
		r.err = ErrEventTooLarge
		return r.err
	}
	if len(r.buf) == cap(r.buf) {
		grown := make([]byte, len(r.buf), min(2*cap(r.buf), r.max+1))
		copy(grown, r.buf)
		r.buf = grown
	}
	n, err := r.src.Read(r.buf[len(r.buf):cap(r.buf)])
	r.buf = r.buf[:len(r.buf)+n]
	if err != nil {
		r.err = err
	}
	if n == 0 && err != nil {
		if err == io.EOF && r.start < len(r.buf) {
			return nil
		}
		return err
	}
	return nil
}

func (r *Reader) compact() {
	d := r.start
	n := copy(r.buf, r.buf[d:])
	r.buf = r.buf[:n]
	r.start = 0
	r.line -= d
	r.scan -= d
}

// lineEnd finds the CR or LF that ends the current line, -1 if it has not
// arrived. Lines without one are not scanned again when more arrives.
func (r *Reader) lineEnd() int {
	rest := r.buf[r.scan:]
	n := bytes.IndexByte(rest, '\n')
	if n >= 0 {
		rest = rest[:n]
	}
	if c := bytes.IndexByte(rest, '\r'); c >= 0 {
		return r.scan + c
	}
	if n >= 0 {
		return r.scan + n
	}
	r.scan = len(r.buf)
	return -1
}

// parse takes in one line and reports whether it is blank.
func (r *Reader) parse(from, to int) bool {
	if !r.begun {
		r.begun = true
		if bytes.HasPrefix(r.buf[from:to], []byte("\ufeff")) {
			from += 3
		}
	}
	if from == to {
		return true
	}
	line := r.buf[from:to]
	name, value := len(line), len(line)
	if c := bytes.IndexByte(line, ':'); c >= 0 {
		name, value = c, c+1
		if value < len(line) && line[value] == ' ' {
			value++
		}
	}
	at := span{from + value - r.start, to - r.start}
	switch string(line[:name]) {
	case "data":
		switch r.lines++; r.lines {
		case 1:
			r.data = at
		case 2:
			r.join = append(r.join[:0], r.at(r.data)...)
			fallthrough
		default:
			r.join = append(r.join, '\n')
			r.join = append(r.join, r.at(at)...)
		}
	case "event":
		r.typ = at
	}
	return false
}

func (r *Reader) at(s span) []byte {
	return r.buf[r.start+s.from : r.start+s.to : r.start+s.to]
}

func (r *Reader) emit(end int, cut bool) Event {
	e := Event{Raw: r.buf[r.start:end:end], Type: r.at(r.typ), Cut: cut}
	switch r.lines {
	case 0:
	case 1:
		e.Data = r.at(r.data)
	default:
		e.Data = r.join
	}
	r.start, r.lines, r.data, r.typ = end, 0, span{}, span{}
	return e
}

// AppendEvent appends an event with this data, one data line for each line of
// it, however that ends: a CR left inside would end the field for its reader.
// typ may be empty and has no line ends.
func AppendEvent(dst, typ, data []byte) []byte {
	if len(typ) > 0 {
		dst = append(append(append(dst, "event: "...), typ...), '\n')
	}
	if bytes.IndexByte(data, '\r') >= 0 {
		data = bytes.ReplaceAll(bytes.ReplaceAll(data, []byte("\r\n"), []byte("\n")), []byte("\r"), []byte("\n"))
	}
	for {
		line, rest, more := bytes.Cut(data, []byte("\n"))
		dst = append(append(append(dst, "data: "...), line...), '\n')
		if !more {
			return append(dst, '\n')
		}
		data = rest
	}
}
