package ingress

import (
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/kinference/kinference/internal/daemon"
	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
	"github.com/kinference/kinference/services/ingress/internal/meter"
	"github.com/kinference/kinference/services/ingress/internal/proxy"
)

// hedge is a second attempt beside one that is silent. The handler is in the
// first one meanwhile, so that nothing else changes the exchange.
type hedge struct {
	x        *exchange
	of       *tried
	race     proxy.Race
	endpoint *routerv1.Endpoint
	header   http.Header
	after    time.Duration

	timer *time.Timer
	done  chan struct{} // closed when run is over
	// Of run.
	sent   bool
	result proxy.Result
	gpu    time.Duration
}

// hedge prepares a second attempt, nil where there is none to make: the policy
// does not want it, no endpoint is left, the request may be what breaks them, or the
// answer is no stream, of which nobody can tell whether it is under way.
func (x *exchange) hedge(of *tried, first *routerv1.Endpoint, rest []*routerv1.Endpoint, header http.Header) *hedge {
	set := x.retry.hedge
	if set == nil || !x.req.Stream || x.broken >= maxBroken-1 || x.retry.attempts > 0 && x.attempts >= x.retry.attempts {
		return nil
	}
	i := slices.IndexFunc(rest, func(e *routerv1.Endpoint) bool { return e.GetProvider() != "" || !x.proxy.Ejected(x.worker(e)) })
	if i < 0 {
		return nil
	}
	after := max(set.GetAfter().AsDuration(), of.pace.of(first.GetPredictedTtft().AsDuration(), int(set.GetPercentile())))
	return &hedge{x: x, of: of, endpoint: rest[i], header: header, after: after, done: make(chan struct{})}
}

func (h *hedge) start() { h.timer = time.AfterFunc(h.after, h.run) }

// run makes the second attempt, unless there is no need or no right to it any
// more.
func (h *hedge) run() {
	defer close(h.done)
	x := h.x
	if h.race.Won() || x.ctx.Err() != nil || x.barred(h.endpoint) {
		return
	}
	if !h.of.budget.Take() {
		x.metrics.hedged(x.server.ctx, x.label, "refused")
		return
	}
	call, err := x.call(h.of, h.endpoint, h.header)
	if err != nil { // the first attempt has the same body
		return
	}
	call.Race = &h.race
	first := call.OnFirst
	call.OnFirst = func(sinceSent time.Duration) {
		x.reports.Moved(x.place, x.id, h.endpoint.GetWorker(), movedHedged)
		first(sinceSent)
	}
	h.sent = true
	if h.result, h.gpu = x.send(h.endpoint, call); h.result.Unsent {
		h.of.budget.Back()
	}
}

// end waits for the second attempt, once the first one is over, and makes the one
// that answered the exchange's. It returns the endpoint that was asked, if one
// was.
func (h *hedge) end() (asked string) {
	if h.timer.Stop() {
		return ""
	}
	<-h.done
	x := h.x
	if !h.sent {
		return ""
	}
	x.limited.gpu += h.gpu
	if h.result.Unsent {
		return h.endpoint.GetWorker()
	}
	x.attempts++
	x.broke(&h.result)
	word := "failed"
	other, at := h.result, h.endpoint
	switch {
	case x.result.Committed:
		word = "late"
	case h.result.Committed:
		word = "first"
		// How long the first one would have taken is not known: at least so long.
		slow := x.result
		slow.FirstContent = h.result.FirstContent
		h.of.pace.add(x.endpoint.GetPredictedTtft().AsDuration(), &slow)
		fallthrough
	case x.result.Retry && !h.result.Retry: // the request is at fault
		other, at = x.result, x.endpoint
		x.result, x.endpoint = h.result, h.endpoint
	}
	x.metrics.hedged(x.server.ctx, x.label, word)
	x.lost(at, &other)
	daemon.Logger(x.server.ctx).Debug("a second endpoint was asked", "request_id", x.id, "worker", h.endpoint.GetWorker(), "result", word)
	return h.endpoint.GetWorker()
}

// lost writes the usage event of an attempt that was given up.
func (x *exchange) lost(at *routerv1.Endpoint, res *proxy.Result) {
	if res.Sent.IsZero() || res.Reason != proxy.Lost && res.Reason != proxy.Canceled {
		return
	}
	mine := x.endpoint
	x.endpoint = at
	r := x.describe()
	r.ID, r.Hedge, r.Attempts, r.Outcome, r.Status = meter.NewID(), true, 1, meter.Canceled, statusLeft
	r.Sent, r.FirstContent, r.LastContent, r.Ended = res.Sent, res.FirstContent, res.LastContent, time.Now()
	r.Chunks = res.Chunks
	r.Tokens = x.tokens(&r, res)
	x.endpoint = mine
	x.server.usage.recorder.Begin(&r).End(&r)
}

const (
	// paces is how many recent streams tell the pace of a model, and leastPaces how
	// many must be known.
	paces, leastPaces = 256, 32
)

// pace is how long the first content of recent streams took, in proportion to
// what the router had predicted. It is safe for concurrent use.
type pace struct {
	mu     sync.Mutex
	recent [paces]float32
	n      int
}

func (p *pace) add(predicted time.Duration, res *proxy.Result) {
	if predicted <= 0 || res.FirstContent.IsZero() || res.Sent.IsZero() {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.recent[p.n%paces] = float32(res.FirstContent.Sub(res.Sent).Seconds() / predicted.Seconds())
	p.n++
}

// of is the time in which that share of the streams, in percent, had content; 0 as
// long as too little is known.
func (p *pace) of(predicted time.Duration, percent int) time.Duration {
	if percent <= 0 {
		return 0
	}
	p.mu.Lock()
	known := slices.Clone(p.recent[:min(p.n, paces)])
	p.mu.Unlock()
	if len(known) < leastPaces {
		return 0
	}
	slices.Sort(known)
	return time.Duration(float64(predicted) * float64(known[min(len(known)*percent/100, len(known)-1)]))
}
