package ingress

import (
	"context"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/propagation"

	"github.com/kinference/kinference/internal/daemon"
	"github.com/kinference/kinference/internal/openai"
	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
	"github.com/kinference/kinference/services/ingress/internal/proxy"
)

const (
	// rounds is how often the router is asked about one request: once more
	// when all workers of its first answer failed.
	rounds = 2
	// maxBroken is how many workers may take a request and break or hang before
	// it is given up: it may be the request that breaks them.
	maxBroken = 3
	// flushTime bounds how long a second question waits for the reports about
	// the first answer, which would otherwise undo its booking.
	flushTime = 100 * time.Millisecond
	// maxTried bounds the models with a retry budget and a pace of their own.
	maxTried = 1024
)

// Why a request is booked elsewhere than the router did, beside the reasons of
// package proxy.
const (
	movedEjected = "ejected"
	movedHedged  = "hedged"
)

// trying is what is known of attempts at the endpoints of each model. It is safe
// for concurrent use.
type trying struct {
	mu  sync.Mutex
	all map[string]*tried
}

type tried struct {
	budget proxy.Budget
	pace   pace
}

func (t *trying) of(model string) *tried {
	t.mu.Lock()
	defer t.mu.Unlock()
	m := t.all[model]
	if m == nil {
		if t.all == nil || len(t.all) >= maxTried { // only ever after many changes of names
			t.all = map[string]*tried{}
		}
		m = &tried{}
		t.all[model] = m
	}
	return m
}

// forward asks the router and tries the endpoints it names. The error is what
// to answer when none of them could; it is nil too when the client left.
func (x *exchange) forward() *openai.Error {
	header := proxy.CleanHeader(x.r.Header)
	header.Set("Content-Type", "application/json")
	header.Set("X-Request-Id", x.id)
	// A zero-length value is not sent, but lets the transport repeat a request
	// that met a connection which the worker was just closing.
	header["X-Idempotency-Key"] = []string{}
	daemon.Propagator.Inject(x.ctx, propagation.HeaderCarrier(header))

	of := x.trying.of(x.model.Name)
	of.budget.Sent(time.Now())
	var done []string
	var last *openai.Error
	free := true // the first try, and after one that reached nobody: neither makes others work more
	for round := range rounds {
		if round > 0 {
			flushed, cancel := context.WithTimeout(x.ctx, flushTime)
			_ = x.reports.Flush(flushed)
			cancel()
		}
		endpoints, e := x.route(done)
		if e != nil || len(endpoints) == 0 {
			if last == nil {
				last = e
			} else {
				x.givenUp("no other worker is ready")
			}
			break
		}
		booked, why := endpoints[0].GetWorker(), movedEjected
		endpoints = x.healthyFirst(endpoints)
		for i, endpoint := range endpoints {
			if slices.Contains(done, endpoint.GetWorker()) {
				continue // it was asked beside another one
			}
			done = append(done, endpoint.GetWorker())
			if x.barred(endpoint) {
				last = openai.Overloaded("No model server is ready for this request. Try again later.", time.Second)
				why = string(x.result.Reason)
				continue
			}
			if !free && !of.budget.Take() {
				x.metrics.exhausted.Add(x.server.ctx, 1, metric.WithAttributes(attribute.String("model", x.label)))
				x.givenUp("the retry budget is used up")
				return last
			}
			if name := endpoint.GetWorker(); name != booked {
				x.reports.Moved(x.place, x.id, name, why)
				booked = name
			}
			if beside := x.attempt(of, endpoint, endpoints[i+1:], header); beside != "" {
				done = append(done, beside)
			}
			if !x.result.Retry || !x.result.Unsent && !x.retry.allows(x.attempts, &x.result) {
				return x.result.Err
			}
			last, why = x.result.Err, string(x.result.Reason)
			if x.result.Unsent {
				if !free {
					of.budget.Back()
				}
				x.unsent(endpoint)
				continue
			}
			if free = x.result.Reason == proxy.Connect; free && x.result.Repeated {
				of.budget.Back() // the worker is gone, and had closed the connection before
			}
			x.metrics.failedOver(x.server.ctx, x.result.Reason)
			daemon.Logger(x.server.ctx).Warn("worker failed before its first token", "request_id", x.id, "worker", endpoint.GetWorker(),
				"reason", why, "err", x.result.Cause)
			if x.broken >= maxBroken {
				x.givenUp("it may be what breaks them")
				return last
			}
		}
	}
	if x.left() {
		return nil
	}
	return last
}

// givenUp logs why nothing else is tried after a failure.
func (x *exchange) givenUp(why string) {
	daemon.Logger(x.server.ctx).Warn("request given up", "request_id", x.id, "attempts", x.attempts, "why", why)
}

// healthyFirst puts workers that are ejected behind the others, in their order.
func (x *exchange) healthyFirst(endpoints []*routerv1.Endpoint) []*routerv1.Endpoint {
	var ejected []string
	for _, e := range endpoints {
		if e.GetProvider() == "" && x.proxy.Ejected(x.worker(e)) {
			ejected = append(ejected, e.GetWorker())
		}
	}
	if len(ejected) == 0 || len(ejected) == len(endpoints) {
		return endpoints
	}
	rank := func(e *routerv1.Endpoint) int {
		if slices.Contains(ejected, e.GetWorker()) {
			return 1
		}
		return 0
	}
	out := slices.Clone(endpoints)
	slices.SortStableFunc(out, func(a, b *routerv1.Endpoint) int { return rank(a) - rank(b) })
	if rank(endpoints[0]) == 1 {
		x.metrics.workerEvent(x.server.ctx, x.worker(endpoints[0]).Group, "avoided")
	}
	return out
}

// worker names the worker behind an endpoint.
func (x *exchange) worker(endpoint *routerv1.Endpoint) proxy.Worker {
	group := endpoint.GetProfile()
	if p := x.promptFor(endpoint); p != nil && p.Profile.Set != "" {
		group = p.Profile.Set
	}
	return proxy.Worker{ID: endpoint.GetWorker(), Group: group}
}

// workerMoved logs what becomes of a worker.
func (v *server) workerMoved(worker, group string, ejected bool) {
	word := "returned"
	if ejected {
		word = "ejected"
	}
	v.metrics.workerEvent(v.ctx, group, word)
	daemon.Logger(v.ctx).Warn("worker", "worker", worker, "set", group, "state", word)
}

// attempt tries an endpoint, and where the policy hedges the next one beside it,
// which it returns. The outcome is left in x.result.
func (x *exchange) attempt(of *tried, endpoint *routerv1.Endpoint, rest []*routerv1.Endpoint, header http.Header) (beside string) {
	x.attempts++
	x.endpoint = endpoint
	call, err := x.call(of, endpoint, header)
	if err != nil { // a member that must be an object and is none
		x.result = proxy.Result{Reason: proxy.Status, Usage: openai.NoUsage, Err: openai.Invalid("", "", "A member of the request has the wrong type: "+err.Error()+".")}
		return ""
	}
	x.startUsage()
	h := x.hedge(of, endpoint, rest, header)
	if h != nil {
		call.Race = &h.race
		h.start()
	}
	x.result, x.limited.gpu = x.send(endpoint, call)
	x.broke(&x.result)
	if h != nil {
		beside = h.end()
	}
	of.pace.add(x.endpoint.GetPredictedTtft().AsDuration(), &x.result)
	if len(x.result.Dropped) > 0 {
		daemon.Logger(x.server.ctx).Debug("members were left out for a provider", "request_id", x.id, "provider", x.endpoint.GetProvider(), "members", x.result.Dropped)
	}
	if x.result.Committed && x.result.Reason != proxy.Served && x.result.Reason != proxy.Canceled {
		daemon.Logger(x.server.ctx).Warn("worker failed in the middle of a stream", "request_id", x.id, "worker", x.endpoint.GetWorker(),
			"reason", string(x.result.Reason), "err", x.result.Cause)
	}
	return beside
}

// broke counts an endpoint that took the request and broke or hung on it.
func (x *exchange) broke(r *proxy.Result) {
	if r.Reason == proxy.Closed || r.Reason == proxy.Timeout {
		x.broken++
	}
}

// call is what an attempt at an endpoint sends.
func (x *exchange) call(of *tried, endpoint *routerv1.Endpoint, header http.Header) (*proxy.Call, error) {
	body, err := x.bodyFor(endpoint)
	if err != nil {
		return nil, err
	}
	outside, err := x.providerOf(endpoint, body)
	if err != nil {
		return nil, err
	}
	header = maps.Clone(header) // the transport may still be reading the last attempt's
	if endpoint.DataParallelRank != nil {
		header.Set("X-Data-Parallel-Rank", strconv.Itoa(int(endpoint.GetDataParallelRank())))
	}
	return &proxy.Call{
		URL: strings.TrimRight(endpoint.GetUrl(), "/"), Worker: x.worker(endpoint), Path: x.req.Route.Path(), Header: header, Body: body, Stream: x.req.Stream,
		Model: openai.AppendString(nil, x.req.Model), HideUsage: x.req.Stream && !x.req.IncludeUsage,
		HideRunning: x.req.Stream && !x.req.ContinuousUsage, Provider: outside, Choices: x.perPrompt(), Prompts: x.req.Prompts, OnUsage: x.measured.progress,
		Idle: x.idleTimeout(), Repeat: of.budget.Take,
		OnFirst: func(sinceSent time.Duration) { x.reports.FirstToken(x.place, x.id, sinceSent) },
	}, nil
}

// send makes an attempt and tells its part of the worker's time.
func (x *exchange) send(endpoint *routerv1.Endpoint, call *proxy.Call) (proxy.Result, time.Duration) {
	free := x.limits.occupancy.Enter(endpoint.GetWorker(), time.Now())
	r := x.proxy.Do(x.ctx, x.w, call)
	return r, free(time.Now())
}
