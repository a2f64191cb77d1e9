// Package proxy sends one request to one worker or provider and passes the
// answer on.
//
// Do makes a single attempt; the caller decides who is next. Until the first
// event with content (streams) or the whole answer (others) is here, nothing
// has been written to the client, so the attempt can be given up without a
// trace. From then on events are written and flushed as they come, and a
// failure ends the stream with an error event in the client's dialect. When
// the client leaves, the worker's connection is closed at once, which makes
// the engine stop. A Proxy is safe for concurrent use.
package proxy

import (
	"bytes"
	"cmp"
	"context"
	"crypto/x509"
	"errors"
	"io"
	"maps"
	"mime"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"strconv"
	"time"

	"github.com/kinference/kinference/internal/openai"
	"github.com/kinference/kinference/internal/provider"
)

// refusalTime is how long we wait for the rest of an answer that is an error.
const refusalTime = 5 * time.Second

// Settings of a Proxy. All are required.
type Settings struct {
	Connect   time.Duration // to open a connection
	FirstByte time.Duration // of a stream: from sending to the first content
	Idle      time.Duration // of a stream: between two reads
	Write     time.Duration // for the client to take what we write
	KeepAlive time.Duration // of idle connections to workers; below vLLM's 5 s
	PerHost   int           // idle connections kept for each worker
	MaxEvent  int           // bytes of one stream event
	MaxAnswer int64         // bytes of an answer that is no stream

	// Private are blocks of addresses that providers may be at although they are
	// not public ones. Breaker is told when the breaker of a provider's model opens
	// or closes. Any may be nil.
	Private []netip.Prefix
	Roots   *x509.CertPool // that sign providers' certificates; nil: the system's
	Breaker func(provider, model string, open bool)
	// Worker is told when a worker is ejected, or serves again.
	Worker func(worker, group string, ejected bool)
}

// Proxy talks to workers over HTTP/1.1, the only version that vLLM speaks.
type Proxy struct {
	set       Settings
	transport *http.Transport
	outside   outside
	workers   workers
}

// New makes a Proxy.
func New(s Settings) *Proxy {
	h1 := new(http.Protocols)
	h1.SetHTTP1(true)
	return &Proxy{set: s, outside: outside{set: s}, workers: workers{say: s.Worker}, transport: &http.Transport{
		DialContext:            (&net.Dialer{Timeout: s.Connect, KeepAlive: 15 * time.Second}).DialContext,
		Protocols:              h1,
		TLSHandshakeTimeout:    s.Connect,
		MaxIdleConnsPerHost:    s.PerHost,
		IdleConnTimeout:        s.KeepAlive,
		DisableCompression:     true,
		MaxResponseHeaderBytes: 64 << 10,
	}}
}

// Close closes idle connections.
func (p *Proxy) Close() {
	p.transport.CloseIdleConnections()
	p.outside.close()
}

// Transport is the pool of connections to workers, for other calls to them.
func (p *Proxy) Transport() http.RoundTripper { return p.transport }

// Causes with which the caller ends a request; see context.Cause.
var (
	// ErrTotal says that the request took longer than allowed in all.
	ErrTotal = errors.New("total timeout")
	// ErrStopping says that this process stops and the time for streams is over.
	ErrStopping = errors.New("ingress is stopping")
)

// ErrInvalid is what the writer of an answer returns if it can make nothing of it that its
// client would understand. A client whose stream was begun has been told.
var ErrInvalid = errors.New("no valid answer")

var (
	errFirstByte = errors.New("no first token in time")
	errIdle      = errors.New("no further token in time")
	errRepeat    = errors.New("connection was closed, and the request is not sent again")
	errLinger    = errors.New("waited for the end of the stream")
)

// Reason is why an attempt failed; the values are those of the router's Moved
// report, and Canceled.
type Reason string

// The reasons. Served means that the attempt did not fail.
const (
	Served   Reason = ""
	Connect  Reason = "connect" // no connection
	Status   Reason = "status"  // an answer that is none
	Closed   Reason = "closed"  // the connection ended too early
	Timeout  Reason = "timeout"
	Canceled Reason = "canceled" // the client left
	Lost     Reason = "lost"     // another attempt of the Race had content first
)

// Call is one attempt.
type Call struct {
	URL    string // of the worker
	Worker Worker // who it is; without an ID its health is not watched
	Path   string
	Header http.Header // sent as it is
	Body   []byte
	Stream bool
	// Model is the name that the client asked for, as JSON text. It replaces
	// the engine's in the answer.
	Model []byte
	// HideUsage removes the chunk that carries usage only: the client did not
	// ask for it.
	HideUsage bool
	// HideRunning removes usage from chunks with content.
	HideRunning bool
	// Choices is how many answers each prompt gets, Prompts how many there are; 0
	// is 1. Where there are several, running usage comes for each by itself.
	Choices, Prompts int
	// Idle is the longest time between two reads of a stream; 0: the Proxy's.
	Idle time.Duration
	// OnUsage is told every now and then how far a stream is. Counts may be
	// openai.Unknown.
	OnUsage func(prompt, output int)
	// OnFirst is called when the first content arrives.
	OnFirst func(sinceSent time.Duration)
	// Repeat is asked before a request that met a connection which was just being
	// closed is sent to the same place again, once; nil: it is. Whether it was read
	// there nobody knows.
	Repeat func() bool
	// Race is with other attempts for the same client; nil: there are none.
	Race *Race
	// Provider is set if the call leaves the cluster. URL, Path, Header and Body
	// are then not used.
	Provider *Provider
}

// Result tells how an attempt went.
type Result struct {
	Reason Reason
	// Retry says that another worker may do better; never after a commit.
	Retry bool
	// Unsent says that nothing was sent, because the provider is not to be asked
	// now or cannot be. Another endpoint may be tried whatever the policy says
	// about failures.
	Unsent bool
	// Repeated says that the transport sent it again, because the worker had closed the
	// connection that it met.
	Repeated bool
	// Dropped names members of the body that the provider was not sent.
	Dropped []string
	// Committed says that the client has got a part of the answer.
	Committed bool
	// Err is what to tell the client when it has got nothing; nil when the
	// attempt was served or the client is gone.
	Err *openai.Error
	// Cause is the failure for the log; it may name the worker's address.
	Cause error

	Usage  openai.Usage
	Whole  bool          // of a stream: Usage is the backend's last word, or is all there will be
	Chunks int           // stream events with content
	MaxGap time.Duration // the longest time between two of them
	// When things happened; zero if they did not.
	Sent, FirstContent, FirstWritten, LastContent time.Time
}

// Do makes the attempt and writes the answer to w unless it fails before.
func (p *Proxy) Do(ctx context.Context, w http.ResponseWriter, c *Call) Result {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	a := &attempt{p: p, c: c, ctx: ctx, cancel: cancel, r: Result{Usage: openai.NoUsage, Sent: time.Now()}}
	a.out = writer{w: w, ctl: http.NewResponseController(w), limit: p.set.Write}
	c.Race.enter(a)
	defer c.Race.leave(a)
	if err := ctx.Err(); err != nil { // lost, or the client is gone
		a.fail(Closed, err)
		a.unsent()
		return a.r
	}
	a.run(w)
	return a.r
}

type attempt struct {
	p      *Proxy
	c      *Call
	ctx    context.Context
	cancel context.CancelCauseFunc
	timer  *time.Timer
	cause  error // for the timer, set while it is stopped
	out    writer
	chunk  openai.Chunk
	edited []byte         // memory of edit
	each   []openai.Usage // running usage by choice, if there are several
	event  []byte         // memory of an edited event
	r      Result

	begun    func()        // to be told of the first content, if not nil
	repeated bool          // the transport sent the request again
	refusal  int           // status of a refusal; 0: none
	after    time.Duration // for which who refused wants to be left alone

	// Of a provider.
	prepared *provider.Request
	events   provider.Stream
}

func (a *attempt) run(w http.ResponseWriter) {
	if a.c.Provider != nil {
		a.leave(w)
		return
	}
	a.work(w)
}

// claim reports whether the client is this attempt's to answer. It is asked
// before the first thing is written.
func (a *attempt) claim() bool {
	if a.c.Race.claim(a) {
		return true
	}
	a.cancel(errLost)
	a.fail(Lost, errLost)
	return false
}

// request is what is sent.
func (a *attempt) request() (*http.Request, error) {
	header, body := a.c.Header, a.c.Body
	var target *url.URL
	if a.prepared != nil {
		target, header, body = a.prepared.URL, a.prepared.Header, a.prepared.Body
	} else {
		var err error
		if target, err = url.Parse(a.c.URL + a.c.Path); err != nil {
			return nil, err
		}
	}
	return (&http.Request{
		Method: http.MethodPost, URL: target, Host: target.Host, Header: header, Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1,
		Body: io.NopCloser(bytes.NewReader(body)), ContentLength: int64(len(body)),
		GetBody: func() (io.ReadCloser, error) {
			if a.repeated || a.c.Repeat != nil && !a.c.Repeat() {
				return nil, errRepeat
			}
			a.repeated, a.r.Repeated = true, true
			return io.NopCloser(bytes.NewReader(body)), nil
		},
	}).WithContext(a.ctx), nil
}

// send sends the request and passes the answer on.
func (a *attempt) send(w http.ResponseWriter, transport http.RoundTripper) {
	req, err := a.request()
	if err != nil {
		a.fail(Connect, err)
		return
	}
	if a.c.Stream {
		first := a.p.set.FirstByte
		if a.c.Provider != nil {
			first = cmp.Or(a.c.Provider.FirstByte, first)
		}
		a.arm(first, errFirstByte)
		defer func() { a.timer.Stop() }()
	}
	resp, err := transport.RoundTrip(req)
	if err != nil {
		reason := Closed
		if op := (*net.OpError)(nil); errors.As(err, &op) && op.Op == "dial" {
			reason = Connect
		}
		a.fail(reason, err)
		return
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK { // the status tells most, and half an error is enough
		body := resp.Body
		late := time.AfterFunc(min(a.p.set.Idle, refusalTime), func() { body.Close() })
		defer late.Stop()
	}
	isStream := func(kind string) bool { return kind == "text/event-stream" }
	if a.prepared != nil {
		isStream = a.prepared.IsStream
	}
	if err := unzip(resp); err != nil {
		a.fail(Status, err)
		a.refusal = resp.StatusCode
		switch {
		case resp.StatusCode == http.StatusOK:
		case a.prepared != nil:
			a.r.Err = a.prepared.Refused(resp.StatusCode, resp.Header, nil)
		default:
			resp.Body = http.NoBody
			a.refused(resp)
		}
		return
	}
	switch kind, _, _ := mime.ParseMediaType(resp.Header.Get("Content-Type")); {
	case resp.StatusCode != http.StatusOK && a.prepared != nil:
		a.rejected(resp)
	case resp.StatusCode != http.StatusOK:
		a.refused(resp)
	case a.c.Stream && isStream(kind):
		a.stream(w, resp)
	default:
		a.whole(w, resp)
	}
}

// arm starts or restarts the timer that ends the attempt with this cause.
func (a *attempt) arm(d time.Duration, cause error) {
	if a.timer != nil {
		a.timer.Stop()
		if cause == a.cause { //nolint:errorlint // the very same sentinel is meant
			a.timer.Reset(d)
			return
		}
	}
	a.cause = cause
	a.timer = time.AfterFunc(d, func() { a.cancel(cause) })
}

// fail notes that the attempt failed with err, which reason describes unless
// the request's context tells better.
func (a *attempt) fail(reason Reason, err error) {
	a.r.Reason, a.r.Cause, a.r.Retry = reason, err, !a.r.Committed
	a.r.Err = openai.Server(http.StatusBadGateway, openai.CodeUpstream, "The model server went away before the answer was complete.")
	if errors.Is(err, errTooLarge) || errors.Is(err, openai.ErrEventTooLarge) { // from any worker
		a.r.Retry = false
		a.r.Err = openai.Server(http.StatusBadGateway, openai.CodeUpstream, "The answer is larger than the gateway passes on.")
	}
	if a.ctx.Err() == nil {
		return
	}
	switch cause := context.Cause(a.ctx); {
	case errors.Is(cause, errFirstByte), errors.Is(cause, errIdle), errors.Is(cause, errTotal):
		a.r.Reason, a.r.Cause = Timeout, cause
		a.r.Err = openai.Server(http.StatusGatewayTimeout, openai.CodeTimeout, "The model server did not answer in time.")
	case errors.Is(cause, ErrTotal):
		a.r.Reason, a.r.Cause, a.r.Retry = Timeout, cause, false
		a.r.Err = openai.Server(http.StatusGatewayTimeout, openai.CodeTimeout, "The request took longer than allowed.")
	case errors.Is(cause, errLost):
		a.r.Reason, a.r.Cause, a.r.Retry, a.r.Err = Lost, cause, false, nil
	case errors.Is(cause, ErrStopping):
		a.r.Reason, a.r.Cause, a.r.Retry = Closed, cause, false
		a.r.Err = openai.Overloaded("The gateway is restarting. Send the request again.", time.Second)
	default:
		a.r.Reason, a.r.Cause, a.r.Retry, a.r.Err = Canceled, cause, false, nil
	}
}

// refused handles an answer other than 200. Faults of the request go to the
// client; what another worker may do better does not.
func (a *attempt) refused(resp *http.Response) {
	body, err := io.ReadAll(io.LimitReader(resp.Body, 64<<10))
	if err != nil && a.ctx.Err() != nil {
		a.fail(Closed, err)
		return
	}
	status := resp.StatusCode
	a.refusedWith(status, resp.Header)
	a.r.Reason, a.r.Retry = Status, false
	a.r.Cause = errors.New("status " + strconv.Itoa(status))
	switch {
	case status == http.StatusTooManyRequests || status == http.StatusServiceUnavailable:
		a.r.Retry = true
		a.r.Err = openai.Overloaded("The model servers are busy. Try again later.", retryAfter(resp.Header))
	case status == http.StatusUnauthorized || status == http.StatusForbidden || status == http.StatusProxyAuthRequired:
		// The worker refuses us, not the client: its credentials never got there.
		a.r.Retry = true
		a.r.Err = openai.Server(http.StatusBadGateway, openai.CodeUpstream, "The model server refused the gateway.")
	case status == http.StatusNotFound && noRoute(body):
		a.r.Err = &openai.Error{Status: status, Type: openai.TypeInvalidRequest, Param: "model", Code: "unsupported_endpoint", Message: "The model does not serve this path."}
	case status == http.StatusNotFound || status == http.StatusMethodNotAllowed:
		// The catalog has the model and we know the path: this worker lacks one of them.
		a.r.Retry = true
		a.r.Err = openai.Server(http.StatusBadGateway, openai.CodeUpstream, "The model server does not serve the model.")
	case status >= 400 && status < 500:
		a.r.Err = openai.FromBody(status, body)
	case status == http.StatusNotImplemented: // what the request asks for, not this worker
		a.r.Err = openai.FromBody(status, body)
	case status >= 500:
		a.r.Retry = true
		a.r.Err = openai.Server(http.StatusBadGateway, openai.CodeUpstream, failedText)
	default: // a redirect, say
		a.r.Retry = true
		a.r.Err = openai.Server(http.StatusBadGateway, openai.CodeUpstream, "The model server gave no valid answer.")
	}
}

// noRoute reports that a 404 is vLLM's for a path that it has not for the model it runs,
// such as embeddings of one that generates: no worker of that model has it.
func noRoute(body []byte) bool {
	var o openai.Object
	if o.Parse(body, 0) != nil {
		return false
	}
	detail, _ := o.Get("detail").Text()
	return detail == "Not Found"
}

func retryAfter(h http.Header) time.Duration {
	if s, err := strconv.Atoi(h.Get("Retry-After")); err == nil && s > 0 && s <= 60 {
		return time.Duration(s) * time.Second
	}
	return time.Second
}

// whole passes on an answer that is no stream, if none was asked for. It is read to its end first,
// so that a client never gets half of one; engines send it in one go anyway.
func (a *attempt) whole(w http.ResponseWriter, resp *http.Response) {
	body, err := readAll(resp, a.p.set.MaxAnswer)
	if err != nil {
		a.fail(Closed, err)
		return
	}
	if a.prepared != nil {
		if body, err = a.prepared.Whole(body); err != nil {
			body = nil // which is no JSON either
		}
	}
	if err := a.chunk.Parse(body); err != nil {
		a.invalid(err)
		return
	}
	if a.chunk.Error.Given() { // an error under status 200
		a.errorEvent()
		return
	}
	if a.c.Stream { // SDKs would take it for an empty stream
		a.invalid(errors.New("no event stream"))
		return
	}
	a.count()
	if edited, changed := a.edit(body); changed {
		body = edited
	}
	if !a.claim() {
		return
	}
	a.r.LastContent = time.Now()
	h := w.Header()
	before := maps.Clone(h)
	if a.prepared == nil { // what a provider tells in its header is for us
		copyHeader(h, resp.Header)
	}
	h.Set("Content-Type", "application/json")
	h.Set("Content-Length", strconv.Itoa(len(body)))
	a.r.Committed = true
	a.out.write(body)
	switch err := a.out.flush(); {
	case err == nil:
		a.r.FirstWritten = time.Now()
	case errors.Is(err, ErrInvalid): // nothing of it was written
		clear(h)
		maps.Copy(h, before)
		a.r.Committed = false
		a.invalid(err)
	default:
		a.gone(err)
	}
}

// invalid notes an answer that is none.
func (a *attempt) invalid(err error) {
	a.refusal = http.StatusBadGateway
	a.fail(Status, err)
	a.r.Err = openai.Server(http.StatusBadGateway, openai.CodeUpstream, "The model server gave no valid answer.")
}

var errTooLarge = errors.New("answer too large")

func readAll(resp *http.Response, limit int64) ([]byte, error) {
	var b bytes.Buffer
	if n := resp.ContentLength; n > 0 && n <= limit {
		b.Grow(int(n) + bytes.MinRead)
	}
	if _, err := b.ReadFrom(io.LimitReader(resp.Body, limit+1)); err != nil {
		return nil, err
	}
	if int64(b.Len()) > limit {
		return nil, errTooLarge
	}
	return b.Bytes(), nil
}

// edit makes a parsed chunk or answer the client's: it gets back the model
// name that it asked for, loses usage that it did not ask for (engines can be
// made to put it on every chunk, and we do), and an error member that is null,
// which one SDK takes for a failure. It reports whether anything changed.
func (a *attempt) edit(text []byte) ([]byte, bool) {
	m := &a.chunk.Model
	rename := m.Kind == openai.String && !bytes.Equal(m.Raw, a.c.Model)
	hide := a.chunk.HasUsage && (a.c.HideUsage && !a.chunk.HasChoices || a.c.HideRunning && a.chunk.HasChoices)
	if a.chunk.NullError {
		changes := []openai.Change{openai.Remove("error")}
		if hide {
			changes = append(changes, openai.Remove("usage"))
		}
		if rename {
			changes = append(changes, openai.Set(a.c.Model, "model"))
		}
		out, err := a.chunk.Object().Apply(nil, changes...)
		return out, err == nil
	}
	if !rename && !hide {
		return text, false
	}
	// What is left after the later change first: nearly every chunk comes here.
	from, to := a.chunk.UsageFrom, a.chunk.UsageTo
	name, end := m.Offset, m.Offset+len(m.Raw)
	out := a.edited[:0]
	switch {
	case !rename:
		out = append(append(out, text[:from]...), text[to:]...)
	case !hide:
		out = append(append(append(out, text[:name]...), a.c.Model...), text[end:]...)
	case end <= from:
		out = append(append(append(out, text[:name]...), a.c.Model...), text[end:from]...)
		out = append(out, text[to:]...)
	default:
		out = append(append(out, text[:from]...), text[to:name]...)
		out = append(append(out, a.c.Model...), text[end:]...)
	}
	a.edited = out
	return out, true
}

// maxChoices bounds the answers whose running usage is added up.
const maxChoices = 4096

// count takes in the usage of a chunk or answer. Running usage is that of one
// choice: those of all are added up, each prompt once.
func (a *attempt) count() {
	usage := a.chunk.Usage
	if a.chunk.LazyUsage {
		usage = a.chunk.ReadUsage(a.chunk.UsageText)
	}
	if !a.chunk.HasChoices || a.all() == 1 || !a.c.Stream {
		a.r.Usage.Merge(usage)
		return
	}
	i := a.chunk.Index()
	if i >= min(a.all(), maxChoices) {
		return
	}
	for len(a.each) <= i {
		a.each = append(a.each, openai.NoUsage)
	}
	a.each[i].Merge(usage)
	sum := openai.NoUsage
	n := max(a.c.Choices, 1)
	for from := 0; from < len(a.each); from += n {
		prompt := openai.Unknown
		for _, u := range a.each[from:min(from+n, len(a.each))] {
			prompt = max(prompt, u.Prompt)
			sum.Output = plus(sum.Output, u.Output)
		}
		sum.Prompt = plus(sum.Prompt, prompt)
	}
	a.r.Usage.Merge(sum)
}

// all is how many answers the request gets.
func (a *attempt) all() int { return max(a.c.Choices, 1) * max(a.c.Prompts, 1) }

// plus adds counts that may be unknown.
func plus(a, b int) int {
	if a == openai.Unknown || b == openai.Unknown {
		return max(a, b)
	}
	return a + b
}

// failedText is what clients get to know of a fault inside a worker.
const failedText = "The model server could not complete the request."

// errorEvent notes an error that the worker sent in place of content.
func (a *attempt) errorEvent() {
	e := openai.FromEvent(a.chunk.Error)
	if a.prepared != nil {
		e = a.prepared.EventFault(a.chunk.Error, a.events)
		a.refusal, a.after = e.Status, max(e.RetryAfter, time.Second)
		a.fail(Status, errors.New("error of the provider, status "+strconv.Itoa(e.Status)))
		a.r.Err = a.prepared.Fault(e)
		a.r.Retry = !a.r.Committed && a.r.Err.Status >= 500
		return
	}
	a.refusal = e.Status
	if e.Status >= 500 {
		e = openai.Server(http.StatusBadGateway, openai.CodeUpstream, failedText)
	}
	a.fail(Status, errors.New("error of the engine, status "+strconv.Itoa(e.Status)))
	a.r.Err = e
	a.r.Retry = !a.r.Committed && (e.Status >= 500 || e.Status == http.StatusTooManyRequests)
}

// gone notes that the client does not take what we write, or that what we write is of
// no use to it, and ends the attempt.
func (a *attempt) gone(err error) {
	if errors.Is(err, ErrInvalid) {
		a.invalid(err)
		a.cancel(err)
		return
	}
	a.cancel(context.Canceled)
	a.r.Reason, a.r.Cause, a.r.Retry, a.r.Err = Canceled, err, false, nil
}
