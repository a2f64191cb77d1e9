package ingress

import (
	"context"
	"crypto/rand"
	"fmt"
	"os"
	"strings"
	"sync"
	"time"

	"go.opentelemetry.io/otel/metric"

	"github.com/kinference/kinference/internal/bus"
	"github.com/kinference/kinference/internal/daemon"
	"github.com/kinference/kinference/internal/openai"
	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
	"github.com/kinference/kinference/services/ingress/internal/meter"
	"github.com/kinference/kinference/services/ingress/internal/proxy"
	"github.com/kinference/kinference/services/ingress/internal/usage"
)

// metering is what usage is recorded with.
type metering struct {
	recorder *usage.Recorder // nil: events are off
	// tellsCached has the backends that reported cached tokens once. From then on
	// a report without them means none: vLLM leaves out a zero.
	tellsCached sync.Map
}

// publisher publishes on a stream with these settings.
type publisher struct {
	conn     *bus.Conn
	settings bus.UsageSettings
}

func (p publisher) PublishUsage(ctx context.Context, messages []bus.UsageMessage) bus.UsageResult {
	return p.conn.PublishUsage(ctx, p.settings, messages)
}

// startMetering opens the spool and publishes from it until stop is called,
// after the last request.
func (v *server) startMetering(ctx context.Context) (stop func(), err error) {
	log := daemon.Logger(v.ctx)
	if v.NATSURL == "" {
		log.Warn("usage events are off: there is no nats-url")
		return func() {}, nil
	}
	dir, temporary := v.UsageDir, ""
	if dir == "" {
		if dir, err = os.MkdirTemp("", "kinference-usage-"); err != nil {
			return nil, fmt.Errorf("make usage spool: %w", err)
		}
		temporary = dir
		log.Warn("usage events do not survive the death of this process while NATS is away: there is no usage-dir")
	}
	conn, err := bus.Connect(ctx, v.NATSURL, "ingress", v.NATS.Options()...)
	if err != nil {
		return nil, err
	}
	v.usage.recorder, err = usage.Open(usage.Settings{
		Dir: dir, Ingress: instance(), MaxBytes: v.UsageBytes, Sync: v.UsageSync, Log: log,
		Publisher: publisher{conn, bus.UsageSettings{Replicas: v.UsageReplicas, MaxAge: v.UsageMaxAge, MaxBytes: v.UsageStreamBytes}},
	})
	if err != nil {
		conn.Close()
		return nil, err
	}
	registration, err := v.metrics.observeUsage(v.usage.recorder)
	if err != nil {
		conn.Close()
		return nil, err
	}
	running, cancel := context.WithCancel(ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		v.usage.recorder.Run(running)
	}()
	return func() {
		cancel()
		<-done
		_ = registration.Unregister()
		conn.Close()
		if temporary != "" {
			_ = os.RemoveAll(temporary)
		}
	}, nil
}

// instance names this process in its events.
func instance() string {
	host, err := os.Hostname()
	if err != nil || host == "" {
		host = "ingress"
	}
	return host + "-" + strings.ToLower(rand.Text()[:8])
}

// measured is what becomes the record of a request.
type measured struct {
	open     *usage.Request
	decision *routerv1.RouteResponse
	record   meter.Record
	done     bool
}

// progress tells how far the answer is.
func (m *measured) progress(input, output int) { m.open.Progress(input, output) }

// askForUsage changes a stream's body so that the backend reports usage: once at
// the end, and an engine with every chunk too, so that a cut stream has counts.
func (x *exchange) askForUsage(provider bool) []openai.Change {
	if !x.req.Stream {
		return nil
	}
	var changes []openai.Change
	if !x.req.IncludeUsage {
		changes = append(changes, openai.Set([]byte("true"), "stream_options", "include_usage"))
	}
	switch {
	case !provider && !x.req.ContinuousUsage:
		changes = append(changes, openai.Set([]byte("true"), "stream_options", "continuous_usage_stats"))
	case provider: // the engine's own
		changes = append(changes, openai.Remove("stream_options", "continuous_usage_stats"))
	}
	return changes
}

// perPrompt is how many answers each prompt gets.
func (x *exchange) perPrompt() int {
	if n, ok := x.req.Body.Get("n").Int(); ok && n > 1 {
		return int(min(n, 1<<20))
	}
	return 1
}

// startUsage writes the request down before it first goes to a backend.
func (x *exchange) startUsage() {
	if x.measured.open != nil || x.server.usage.recorder == nil {
		return
	}
	r := x.describe()
	r.Tokens.Input = meter.Count{}.Or(x.ownCount())
	r.Tokens.Cached = meter.Count{}.Or(x.matched())
	x.measured.open = x.server.usage.recorder.Begin(&r)
}

// describe is the record as far as it is known before the answer.
func (x *exchange) describe() meter.Record {
	r := meter.Record{
		ID: x.unique, RequestID: x.id, Received: x.began, Route: x.path, Stream: x.req.Stream,
		QoS: x.attributes.GetQos(), Tags: x.attributes.GetTags(), Attempts: x.attempts, Routed: x.routed,
	}
	if c := x.caller; c != nil {
		r.Tenants, r.User, r.KeyID = c.Tenants(), c.User, c.KeyID
		if c.Tenant != nil {
			r.CostCenter = c.Tenant.Message.GetCostCenter()
		}
	}
	if x.model != nil {
		r.Model = x.model.Name
	}
	if d := x.measured.decision; d != nil {
		r.Rule, r.Pool, r.Queued = d.GetRule(), d.GetPool(), d.GetQueued().AsDuration()
	}
	if e := x.endpoint; e != nil {
		r.ServedModel = e.GetUpstreamModel()
		if r.ServedModel == "" {
			r.ServedModel = x.req.Model
		}
		backend := e.GetProvider()
		if backend != "" {
			r.Provider = backend
		} else {
			r.Worker = e.GetWorker()
			if p := x.promptFor(e); p != nil {
				r.WorkerSet = p.Profile.Set
			}
			backend = r.WorkerSet
		}
		if x.admission != nil && x.admission.view != nil {
			r.Price = x.admission.view.Price(backend, r.ServedModel)
		}
	}
	return r
}

// ownCount is how many tokens the prompts have as far as we know, -1 if we do
// not.
func (x *exchange) ownCount() int64 {
	if p := x.promptFor(x.endpoint); p != nil && p.Exact() && x.req.Prompts <= 1 {
		return int64(p.Tokens)
	}
	return x.promptTokens()
}

// matched is how much of the prompt the worker was expected to have cached, -1
// if nobody knows.
func (x *exchange) matched() int64 {
	if x.endpoint == nil || x.endpoint.GetProvider() != "" || x.countsOther() {
		return -1
	}
	return int64(x.endpoint.GetMatchedTokens())
}

// measure completes the record of the request, once it is over.
func (x *exchange) measure() *meter.Record {
	m := &x.measured
	if m.done {
		return &m.record
	}
	m.done = true
	m.record = x.describe()
	r := &m.record
	r.Ended, r.Status, r.Outcome = time.Now(), x.status, meter.Outcome(x.outcomeWord())
	if r.Received.IsZero() {
		r.Received = r.Ended
	}
	res := &x.result
	r.Sent, r.FirstContent, r.FirstWritten, r.LastContent = res.Sent, res.FirstContent, res.FirstWritten, res.LastContent
	r.MaxGap, r.Chunks = res.MaxGap, res.Chunks
	r.Tokens = x.tokens(r, res)
	return r
}

// tokens are what the backend reported, completed by what we know. What came to
// nothing by no fault of the client has none.
func (x *exchange) tokens(r *meter.Record, res *proxy.Result) (t meter.Tokens) {
	if res.Sent.IsZero() || !res.Committed && res.Reason != proxy.Canceled && res.Reason != proxy.Lost {
		return t
	}
	u := res.Usage
	t = meter.Tokens{Input: meter.Report(int64(u.Prompt)), Cached: meter.Report(int64(u.Cached)), Output: meter.Report(int64(u.Output)), Reasoning: meter.Report(int64(u.Reasoning))}
	backend := r.Provider + r.WorkerSet
	tells := false
	if u.Cached > 0 {
		if _, known := x.server.usage.tellsCached.Load(backend); !known {
			x.server.usage.tellsCached.Store(backend, true)
		}
	} else {
		_, tells = x.server.usage.tellsCached.Load(backend)
	}
	if tells && r.Outcome == meter.OK && t.Input.Known() && !t.Cached.Known() {
		t.Cached = meter.Report(0)
	}
	t.Input = t.Input.Or(x.ownCount())
	t.Cached = t.Cached.Or(min(x.matched(), t.Input.N))
	switch {
	case t.Output.Known():
	case x.req.Route == openai.RouteEmbeddings: // it generates nothing, and says nothing of that
		t.Output = meter.Report(0)
	case x.req.Stream:
		t.Output = t.Output.Or(int64(res.Chunks))
	case res.Reason == proxy.Canceled:
		// The engine was at it until the client left, and nobody counted.
		pace := x.limits.learned.Pace(x.caller.Name(), x.model.Root, time.Since(res.Sent)) * x.choices()
		t.Output = t.Output.Or(max(0, min(pace, x.limited.estimate.Output)))
	}
	if x.req.Stream && !res.Whole {
		t.Output, t.Reasoning = t.Output.Cut(), t.Reasoning.Cut()
	}
	return t
}

// finishUsage writes the event of a request that was sent to a backend, and
// counts it in the metrics.
func (x *exchange) finishUsage() {
	r := x.measure()
	if x.counting && x.result.Committed { // no backend answered it, and it used no tokens
		r.Tokens = meter.Tokens{Input: meter.Report(0), Output: meter.Report(0)}
		x.measured.open = x.server.usage.recorder.Begin(r)
	}
	if x.measured.open == nil && x.attempts == 0 && x.overloaded {
		// No backend had it and it used nothing, but objectives count it.
		r.Overload = true
		if r.Pool == "" {
			r.Pool = x.pool()
		}
		x.measured.open = x.server.usage.recorder.Begin(r)
	}
	x.measured.open.End(r)
	x.metrics.used(x.ctx, x.server.ctx, r, x.label)
}

// observeUsage shows the state of the spool.
func (m *metrics) observeUsage(r *usage.Recorder) (metric.Registration, error) {
	return newUsageMetrics(m.meter, r)
}
