package proxy

import (
	"cmp"
	"errors"
	"io"
	"net/http"
	"time"

	"github.com/kinference/kinference/internal/openai"
)

const (
	// maxHeld bounds what waits for the first content: role chunks, mostly.
	maxHeld = 64 << 10
	// linger is how long we wait for the worker to close a stream that is
	// over, so that its connection can be used again.
	linger = 50 * time.Millisecond
	// lingerError is how long a worker has for its [DONE] after an error.
	lingerError = time.Second
)

var (
	errEnd  = errors.New("stream ended without [DONE]")
	errNone = errors.New("stream ended without content")
)

// stream passes on an event stream.
func (a *attempt) stream(w http.ResponseWriter, resp *http.Response) {
	body, idle := io.Reader(resp.Body), cmp.Or(a.c.Idle, a.p.set.Idle)
	if a.prepared != nil {
		a.events = a.prepared.Stream(resp.Body, a.p.set.MaxEvent)
		body, idle = a.events, cmp.Or(a.c.Provider.Idle, idle)
	}
	s := &stream{attempt: a, w: w, header: resp.Header, events: openai.NewReader(body, a.p.set.MaxEvent)}
	s.chunk.LazyUsage, s.one = true, s.all() == 1
	defer s.settle()
	for !s.over && !s.done {
		if e, ok := s.events.Buffered(); ok {
			s.take(&e)
			continue
		}
		if err := a.out.flush(); err != nil && !(s.failed && errors.Is(err, ErrInvalid)) {
			a.gone(err)
			return
		}
		if a.r.Committed && !s.failed {
			a.arm(idle, errIdle)
		}
		if err := s.events.Fill(); err != nil {
			s.ended(err)
			break
		}
		s.now = time.Now()
		if a.r.Committed && !s.failed {
			a.timer.Stop() // a slow client is not the worker's fault
		}
	}
	if err := a.out.flush(); err != nil && a.r.Reason == Served {
		a.gone(err)
	}
	if s.done {
		a.arm(linger, errLinger)
		for s.events.Fill() == nil {
			for _, ok := s.events.Buffered(); ok; _, ok = s.events.Buffered() {
			}
		}
	}
}

type stream struct {
	*attempt
	w      http.ResponseWriter
	header http.Header
	events *openai.Reader
	now    time.Time // when the bytes at hand arrived
	one    bool      // the request gets one answer
	held   []byte    // events before the first content
	done   bool      // [DONE] came
	failed bool      // an error event was sent
	over   bool      // nothing more can come
	read   time.Time // when usage was read last
	told   time.Time // when OnUsage was called last
	aside  []byte    // usage that came since
	owing  []byte    // the last chunk whose usage was hidden from a client that wants it at the end
}

// take handles one event.
func (s *stream) take(e *openai.Event) {
	switch {
	case e.Data == nil:
		// Comments keep a connection alive; before the commit there is none.
		if s.r.Committed && !s.failed && !e.Cut {
			s.out.write(e.Raw)
		}
	case e.Done():
		s.done, s.r.Whole = true, true
		if !s.r.Committed && s.r.Chunks == 0 && len(s.held) == 0 {
			s.fail(Closed, errNone)
			s.over = true
			return
		}
		if !s.commit() {
			return
		}
		s.owed()
		if e.Cut {
			s.out.write(openai.AppendEvent(nil, nil, e.Data))
		} else {
			s.out.write(e.Raw)
		}
	case s.failed || e.Cut:
		// After an error only [DONE] matters, and half an event is none.
	default:
		s.content(e)
	}
}

// content handles an event with data.
func (s *stream) content(e *openai.Event) {
	err := s.chunk.Parse(e.Data)
	if err == nil && s.chunk.Error.Given() || string(e.Type) == "error" {
		s.engineError()
		return
	}
	if err != nil {
		// Not ours to judge: the client's parser decides.
		s.pass(e.Raw, true)
		return
	}
	if a := s.attempt; a.prepared != nil && err == nil && !s.chunk.HasChoices && !s.chunk.HasUsage {
		return // what a provider says about filters, say; clients look for the first choice
	}
	if s.chunk.HasUsage {
		s.usage()
		s.r.Whole = s.r.Whole || !s.chunk.HasChoices
		switch {
		case !s.chunk.HasChoices && s.c.HideUsage:
			return
		case !s.chunk.HasChoices:
			s.owing = s.owing[:0]
		case s.c.HideRunning && !s.c.HideUsage:
			s.owing = append(s.owing[:0], e.Data...)
		}
	}
	raw := e.Raw
	if data, changed := s.edit(e.Data); changed {
		s.event = openai.AppendEvent(s.event[:0], e.Type, data)
		raw = s.event
	}
	begun := !s.r.FirstContent.IsZero()
	if begun && s.chunk.HasChoices {
		s.r.Chunks++
		s.r.MaxGap = max(s.r.MaxGap, s.now.Sub(s.r.LastContent))
		s.r.LastContent = s.now
	}
	s.pass(raw, begun || s.chunk.Content())
	if s.c.OnUsage != nil && (s.r.Committed || s.c.Race == nil) && s.now.Sub(s.told) >= readEvery {
		s.progress()
	}
}

// readEvery is how often running usage is read: twice as often as the spool writes down how
// far answers are. It is cumulative, so that the last one tells all, and reading each
// would be the dearest part of metering.
const readEvery = 500 * time.Millisecond

// usage takes in the usage of a chunk, or puts it aside.
func (s *stream) usage() {
	if s.one && s.chunk.HasChoices && s.now.Sub(s.read) < readEvery {
		s.aside = append(s.aside[:0], s.chunk.UsageText...)
		return
	}
	s.count()
	s.read, s.aside = s.now, s.aside[:0]
}

// settle takes in what was put aside.
func (s *stream) settle() {
	if len(s.aside) > 0 {
		s.r.Usage.Merge(s.chunk.ReadUsage(s.aside))
	}
	if from := s.attempt.events; from != nil {
		s.r.Usage.Merge(from.Usage())
	}
}

// owed writes the usage that the client asked for, if the engine had it on chunks
// of content only.
func (s *stream) owed() {
	if len(s.owing) == 0 || s.failed || s.chunk.Parse(s.owing) != nil {
		return
	}
	changes := []openai.Change{openai.Set([]byte("[]"), "choices")}
	if s.chunk.Model.Kind == openai.String {
		changes = append(changes, openai.Set(s.c.Model, "model"))
	}
	if data, err := s.chunk.Object().Apply(nil, changes...); err == nil {
		s.out.write(openai.AppendEvent(nil, nil, data))
	}
}

// progress tells how far the answer is: by the engine's count, or else by what came.
func (s *stream) progress() {
	s.told = s.now
	output := s.r.Usage.Output
	if output == openai.Unknown && s.r.Chunks > 0 {
		output = s.r.Chunks
	}
	s.c.OnUsage(s.r.Usage.Prompt, output)
}

// pass writes an event, or holds it until one with content comes. One that is
// too long to hold opens the client's stream without being its first token.
func (s *stream) pass(raw []byte, content bool) {
	if !s.r.Committed && !content && len(s.held)+len(raw) <= maxHeld {
		s.held = append(s.held, raw...)
		return
	}
	first := content && s.r.FirstContent.IsZero()
	if first {
		s.r.Chunks = 1
		s.r.FirstContent, s.r.LastContent = s.now, s.now
	}
	if !s.commit() {
		return
	}
	s.out.write(raw)
	if first {
		if s.begun != nil {
			s.begun()
		}
		if s.out.flush() == nil {
			s.r.FirstWritten = time.Now()
		}
		if s.c.OnFirst != nil { // after the client has it
			s.c.OnFirst(s.r.FirstContent.Sub(s.r.Sent))
		}
	}
}

// commit opens the client's stream; false if it is another attempt's.
func (s *stream) commit() bool {
	if s.r.Committed {
		return true
	}
	if !s.claim() {
		s.over = true
		return false
	}
	s.r.Committed = true
	s.timer.Stop() // a slow client is not the worker's fault
	h := s.w.Header()
	if s.prepared == nil { // what a provider tells in its header is for us
		copyHeader(h, s.header)
	}
	h.Set("Content-Type", "text/event-stream; charset=utf-8")
	h.Set("Cache-Control", "no-cache")
	h.Set("X-Accel-Buffering", "no") // nginx would buffer the stream
	s.w.WriteHeader(http.StatusOK)
	s.out.write(s.held)
	s.held = nil
	return true
}

// engineError handles an error event of the worker.
func (s *stream) engineError() {
	s.errorEvent()
	if !s.r.Committed {
		s.over = true
		return
	}
	s.end()
	s.arm(lingerError, errLinger)
}

// end writes the error event that closes a stream that was begun.
func (s *stream) end() {
	s.failed = true
	if s.r.Err != nil {
		s.out.write(s.r.Err.AppendEvent(nil))
	}
}

// ended handles the end of the worker's stream, which came before [DONE].
func (s *stream) ended(err error) {
	if s.failed {
		return
	}
	if errors.Is(err, io.EOF) {
		err = errEnd
	}
	s.fail(Closed, err)
	if s.r.Committed {
		s.end()
	}
}

// writer writes to the client with a deadline for each batch, so that a slow
// reader holds up its own worker and nobody else, and a stuck one only for a
// while. After an error it writes no more.
type writer struct {
	w     http.ResponseWriter
	ctl   *http.ResponseController
	limit time.Duration
	open  bool // a batch is begun and not flushed
	err   error
}

func (w *writer) write(p []byte) {
	if w.err != nil || len(p) == 0 {
		return
	}
	if !w.open {
		w.open = true
		// Writers without deadlines are those of tests.
		_ = w.ctl.SetWriteDeadline(time.Now().Add(w.limit))
	}
	_, w.err = w.w.Write(p)
}

// flush sends what was written. The deadline is lifted afterwards: over
// HTTP/2 it would end the stream even with nothing to write.
func (w *writer) flush() error {
	if w.open && w.err == nil {
		w.open = false
		if w.err = w.ctl.Flush(); w.err == nil {
			_ = w.ctl.SetWriteDeadline(time.Time{})
		}
	}
	return w.err
}
