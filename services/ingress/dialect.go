package ingress

import (
	"maps"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/kinference/kinference/internal/anthropic"
	"github.com/kinference/kinference/internal/openai"
	"github.com/kinference/kinference/services/ingress/internal/proxy"
)

// Paths of the Messages API.
const (
	pathMessages = "/v1/messages"
	pathCount    = "/v1/messages/count_tokens"
)

// pathResponses is the Responses API's.
const pathResponses = "/v1/responses"

// edge is the client's side of a request, in the client's own dialect. Inside,
// every fault is an [openai.Error] and every answer a chat completion; what is
// written here becomes what the client speaks. While a stream waits for its
// next event it keeps the connection alive.
//
// It is an http.ResponseWriter for one request at a time; the timer is the
// only other goroutine that writes.
type edge struct {
	w         http.ResponseWriter
	ctl       *http.ResponseController
	r         *http.Request
	anthropic bool
	limit     time.Duration // for the client to take what we write
	maxEvent  int

	mu     sync.Mutex
	opened bool // the status is on its way
	dirty  bool // something was written since the last flush
	closed bool // no more is to be written but by the handler

	speech *speech // nil: what is written passes as it is
	stream translator
	events *openai.Reader
	feed   feed
	whole  []byte
	out    []byte

	// header is the handler's once the timer runs, which may send the other one
	// at any moment; nil before.
	header   http.Header
	every    time.Duration
	timer    *time.Timer
	last     time.Time // of the last flush
	deadline time.Time // that the proxy set
}

// translator makes a dialect's stream of a chat completion stream.
type translator interface {
	Chunk(dst, data []byte) []byte
	End(dst []byte) []byte
	Error(dst []byte, e *openai.Error) []byte
	Ping(dst []byte) []byte
	// Ended reports whether the stream has its last event, for whatever reason.
	Ended() bool
}

// speech is how a dialect makes its answers.
type speech struct {
	stream func() translator
	whole  func(dst, completion []byte) ([]byte, error)
}

// newEdge finds out what a client speaks: by the path where it tells, and else
// by the header that every client of the Messages API sends.
func (v *server) newEdge(w http.ResponseWriter, r *http.Request) *edge {
	e := &edge{w: w, ctl: http.NewResponseController(w), r: r, limit: v.WriteTimeout, maxEvent: v.MaxEvent}
	switch path := r.URL.Path; {
	case strings.HasSuffix(path, openai.RouteChat.Path()), strings.HasSuffix(path, openai.RouteCompletions.Path()), strings.HasSuffix(path, openai.RouteEmbeddings.Path()), strings.HasSuffix(path, pathResponses):
	case strings.HasSuffix(path, pathMessages), strings.HasSuffix(path, pathCount):
		e.anthropic = true
	default:
		e.anthropic = r.Header.Get("Anthropic-Version") != ""
	}
	return e
}

// speaksMessages reports whether a request's client speaks the Messages API.
func speaksMessages(w http.ResponseWriter) bool {
	e, ok := w.(*edge)
	return ok && e.anthropic
}

// writeError answers with an error in the client's dialect: as an event where
// the answer has begun already.
func writeError(w http.ResponseWriter, e *openai.Error) {
	if c, ok := w.(*edge); ok {
		c.fail(e)
		return
	}
	e.Write(w)
}

// Unwrap lets http.ResponseController reach the connection.
func (e *edge) Unwrap() http.ResponseWriter { return e.w }

// Header implements http.ResponseWriter.
func (e *edge) Header() http.Header {
	if e.header != nil {
		return e.header
	}
	return e.w.Header()
}

// WriteHeader implements http.ResponseWriter. A status that was sent stays.
func (e *edge) WriteHeader(status int) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.open(status)
}

func (e *edge) open(status int) {
	if !e.opened {
		e.settle()
		e.send(status)
	}
}

func (e *edge) send(status int) {
	e.opened = true
	e.name()
	e.w.WriteHeader(status)
}

// settle makes the handler's header the answer's.
func (e *edge) settle() {
	if e.header != nil {
		h := e.w.Header()
		clear(h)
		maps.Copy(h, e.header)
	}
}

// name gives the request's id the header's name that the dialect has.
func (e *edge) name() {
	if h := e.w.Header(); e.anthropic {
		h.Set("Request-Id", h.Get("X-Request-Id"))
	}
}

// SetWriteDeadline implements what http.ResponseController looks for.
func (e *edge) SetWriteDeadline(t time.Time) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.deadline = t
	return e.ctl.SetWriteDeadline(t)
}

// Write implements http.ResponseWriter.
func (e *edge) Write(p []byte) (int, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.dirty = true
	if !e.opened && e.deadline.IsZero() { // no answer of a backend
		e.hurry()
	}
	switch {
	case e.speech == nil:
		e.open(http.StatusOK)
		return e.w.Write(p)
	case e.stream == nil:
		e.whole = append(e.whole, p...)
		return len(p), nil
	}
	e.open(http.StatusOK)
	return len(p), e.translate(p)
}

// hurry bounds the time for the client to take what is written next.
func (e *edge) hurry() {
	_ = e.ctl.SetWriteDeadline(time.Now().Add(e.limit)) // writers without deadlines are those of tests
}

// feed is an io.Reader of what is at hand. Without any it has nothing yet.
type feed struct{ rest []byte }

func (f *feed) Read(p []byte) (int, error) {
	n := copy(p, f.rest)
	f.rest = f.rest[n:]
	return n, nil
}

// translate writes events of a chat completion stream. After an event that ends the
// client's stream, because it is an error or makes no sense, the rest is of no use.
func (e *edge) translate(p []byte) error {
	e.feed.rest = p
	done := false
	e.out = e.out[:0]
	for len(e.feed.rest) > 0 {
		if err := e.events.Fill(); err != nil {
			return err
		}
		for event, ok := e.events.Buffered(); ok; event, ok = e.events.Buffered() {
			switch {
			case event.Data == nil:
				e.out = e.stream.Ping(e.out)
			case event.Done():
				e.out, done = e.stream.End(e.out), true
			default:
				e.out = e.stream.Chunk(e.out, event.Data)
			}
		}
	}
	if _, err := e.w.Write(e.out); err != nil || done || !e.stream.Ended() {
		return err
	}
	_ = e.flush() // nobody else does after the fault
	return proxy.ErrInvalid
}

// FlushError implements what http.ResponseController looks for.
func (e *edge) FlushError() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.speech != nil && e.stream == nil && !e.opened && e.whole != nil {
		if err := e.message(); err != nil {
			return err
		}
	}
	return e.flush()
}

func (e *edge) flush() error {
	e.dirty = false
	if e.every > 0 {
		e.last = time.Now()
	}
	return e.ctl.Flush()
}

// message writes an answer in one piece, if it is one.
func (e *edge) message() error {
	out, err := e.speech.whole(nil, e.whole)
	e.whole = nil
	if err != nil {
		return proxy.ErrInvalid
	}
	e.w.Header().Set("Content-Length", strconv.Itoa(len(out)))
	e.open(http.StatusOK)
	_, err = e.w.Write(out)
	return err
}

// speak makes what is written from now on an answer of a dialect.
func (e *edge) speak(s *speech, stream bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.speech = s
	if stream {
		e.stream = s.stream()
		e.events = openai.NewReader(&e.feed, e.maxEvent+64<<10)
	}
}

// keepAlive sends a comment or a ping whenever nothing was sent for a while,
// and opens the stream for it if need be. From then on a fault is an event,
// which clients do not try again by themselves, so it is worth it only after a
// time in which one of them, or a proxy on the way, might give up.
func (e *edge) keepAlive(every time.Duration) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.header = e.w.Header().Clone()
	e.every, e.last = every, time.Now()
	e.timer = time.AfterFunc(every, e.tick)
}

func (e *edge) tick() {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed {
		return
	}
	if wait := e.every - time.Since(e.last); wait > 0 {
		e.timer.Reset(wait)
		return
	}
	e.timer.Reset(e.every)
	if e.dirty {
		return // in the middle of something
	}
	e.out = e.out[:0]
	if e.stream != nil {
		e.out = e.stream.Ping(e.out)
	} else {
		e.out = append(e.out, ": waiting\n\n"...)
	}
	if !e.opened {
		streamHeader(e.w.Header())
		e.send(http.StatusOK)
	}
	e.hurry()
	if _, err := e.w.Write(e.out); err == nil {
		_ = e.flush() // a client that is gone ends the request
	}
	_ = e.ctl.SetWriteDeadline(e.deadline)
}

func streamHeader(h http.Header) {
	h.Set("Content-Type", "text/event-stream; charset=utf-8")
	h.Set("Cache-Control", "no-cache")
	h.Set("X-Accel-Buffering", "no") // nginx would buffer the stream
}

// fail answers with an error.
func (e *edge) fail(fault *openai.Error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.closed = true
	if e.anthropic {
		fault = messagesError(fault)
	}
	if !e.opened {
		e.refuse(fault)
		return
	}
	e.out = e.out[:0]
	switch {
	case e.stream != nil:
		e.out = e.stream.Error(e.out, fault)
	case e.every > 0:
		e.out = fault.AppendEvent(e.out)
	}
	e.hurry()
	if _, err := e.w.Write(e.out); err == nil {
		_ = e.flush()
	}
}

// refuse answers with an error and nothing else.
func (e *edge) refuse(fault *openai.Error) {
	e.settle()
	e.hurry()
	e.opened = true
	e.name()
	if e.anthropic {
		anthropic.WriteError(e.w, fault, e.w.Header().Get("X-Request-Id"))
		return
	}
	fault.Write(e.w)
}

// close ends what the timer does. After it nothing is written.
func (e *edge) close() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.closed = true
	if e.timer != nil {
		e.timer.Stop()
	}
}

// connection is what net/http itself gave to the handler.
func connection(w http.ResponseWriter) http.ResponseWriter {
	if e, ok := w.(*edge); ok {
		return e.w
	}
	return w
}
