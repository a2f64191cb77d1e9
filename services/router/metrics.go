package router

import (
	"context"
	"strings"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	"github.com/kinference/kinference/internal/kube"
	"github.com/kinference/kinference/internal/resources"
	"github.com/kinference/kinference/internal/schedule"
	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
	"github.com/kinference/kinference/services/router/internal/line"
	"github.com/kinference/kinference/services/router/internal/parity"
	"github.com/kinference/kinference/services/router/internal/trackers"
)

// metrics are the instruments of the service. Labels are bounded: models,
// sets and workers by the resources, all others by constants.
type metrics struct {
	decisions, reloads, away, tokens, moved, finished, compared, refused metric.Int64Counter
	dispatched, sentAway, messages, unheard                              metric.Int64Counter
	duration, predicted, actual, miss, gossipAge, inLine                 metric.Float64Histogram
	policy                                                               string
	registration                                                         metric.Registration
}

// fast are the bounds of a decision's duration, slow those of a TTFT.
var (
	fast = metric.WithExplicitBucketBoundaries(50e-6, 100e-6, 250e-6, 500e-6, 1e-3, 2.5e-3, 5e-3, 10e-3, 25e-3, 50e-3, 100e-3)
	slow = metric.WithExplicitBucketBoundaries(.025, .05, .1, .2, .3, .5, .75, 1, 1.5, 2, 3, 5, 7.5, 10, 20, 40, 80)
	long = metric.WithExplicitBucketBoundaries(.001, .005, .025, .1, .25, .5, 1, 2, 5, 10, 20, 40, 80, 160)
	diff = metric.WithExplicitBucketBoundaries(.01, .03, .1, .2, .3, .5, 1, 2, 5, 10, 30)
)

func newMetrics(m metric.Meter, s *server) (*metrics, error) {
	out := &metrics{policy: s.Policy}
	var err error
	counter := func(name, unit, text string) metric.Int64Counter {
		c, e := m.Int64Counter("kinference.router."+name, metric.WithUnit(unit), metric.WithDescription(text))
		err = first(err, e)
		return c
	}
	histogram := func(name, text string, bounds metric.HistogramOption) metric.Float64Histogram {
		h, e := m.Float64Histogram("kinference.router."+name, metric.WithUnit("s"), metric.WithDescription(text), bounds)
		err = first(err, e)
		return h
	}
	gauge := func(name, unit, text string) metric.Float64ObservableGauge {
		g, e := m.Float64ObservableGauge("kinference.router."+name, metric.WithUnit(unit), metric.WithDescription(text))
		err = first(err, e)
		return g
	}
	out.decisions = counter("decisions", "{decision}", "Routing decisions by policy and outcome.")
	out.reloads = counter("catalog.reloads", "{load}", "Loads of the resources by result; a failed one keeps the last good catalog.")
	out.away = counter("tracker.unavailable", "{decision}", "Decisions made without kvtracker, by reason.")
	out.tokens = counter("tokens", "{token}", "Prompt tokens of decisions by model and kind: all, matched by events, anticipated.")
	out.moved = counter("moved", "{request}", "Requests that left a worker for another one, by reason.")
	out.finished = counter("finished", "{request}", "Requests that were reported done, by outcome.")
	out.refused = counter("admin.refused", "{call}", "Calls of the admin API that were refused, by reason: unauthenticated, denied, unavailable.")
	out.compared = counter("parity.requests", "{request}", "Requests by profile and by how the engine's cached tokens compare with the index: agree, too_few predicted, too_many, uninformative, not_reported.")
	out.dispatched = counter("queue.dispatched", "{request}", "Requests that left the queue for an endpoint, by class and by what held them last: none, queue, pages, protect, reserve, defer.")
	out.sentAway = counter("queue.refused", "{request}", "Requests that left the queue without one, by class and reason: full, bytes, long, timeout, stopped, canceled.")
	out.inLine = histogram("queue.wait", "Time in the queue, by class.", long)
	out.messages = counter("gossip.messages", "{message}", "Messages between routers by direction: sent, received.")
	out.unheard = counter("gossip.dropped", "{message}", "Messages between routers that were lost or not used, by reason: garbled, version, late, slow, unsent, crowd.")
	out.gossipAge = histogram("gossip.age", "Age of what other routers say when it comes.", fast)
	out.duration = histogram("decision.duration", "Time of a routing decision, kvtracker included.", fast)
	out.predicted = histogram("ttft.predicted", "Predicted time to first token of requests that got one.", slow)
	out.actual = histogram("ttft.actual", "Time to first token as ingress saw it.", slow)
	out.miss = histogram("ttft.error", "Difference of predicted and actual time to first token.", diff)

	inFlight := gauge("requests.in_flight", "{request}", "Requests in the ledger by worker.")
	expired := gauge("requests.expired", "{request}", "Requests that left the ledger because nothing was heard of them.")
	slowness := gauge("worker.slowness", "1", "Learned factor on the prior speed of the worker's class.")
	reuse := gauge("worker.reuse", "1", "Learned ratio of cached tokens that the engine reports to those predicted.")
	ready := gauge("workers.ready", "{worker}", "Ready workers (engine ranks) by worker set.")
	total := gauge("workers", "{worker}", "Workers (engine ranks) by worker set.")
	version := gauge("catalog.version", "1", "Version of the catalog.")
	problems := gauge("catalog.problems", "{problem}", "Problems of the resources by kind and severity.")
	connected := gauge("tracker.connected", "1", "1 while there is a kvtracker to ask for every worker set.")
	following := gauge("trackers", "{tracker}", "kvtrackers by state: asked, spare, late, rebuilding, away.")
	waiting := gauge("queue.waiting", "{request}", "Requests that wait in the queue, by class.")
	peers := gauge("gossip.peers", "{router}", "Other routers that were heard of lately.")
	wrong := gauge("parity.differs", "{worker}", "Workers whose cached tokens the index does not know or knows wrong, by profile and cause: block_size, events, hash, false_hits, none.")
	if err != nil {
		return nil, err
	}
	out.registration, err = m.RegisterCallback(func(_ context.Context, o metric.Observer) error {
		s.mu.Lock()
		workers, c, ps := s.workers, s.resources, s.problems
		s.mu.Unlock()
		for _, w := range s.scheduler.Workers() {
			if _, ok := workers[w.Worker]; ok {
				at := metric.WithAttributes(attribute.String("worker", w.Worker))
				o.ObserveFloat64(inFlight, float64(w.InFlight), at)
				o.ObserveFloat64(slowness, w.Slowness, at)
				o.ObserveFloat64(reuse, w.Reuse, at)
			}
		}
		_, gone := s.scheduler.Totals()
		o.ObserveFloat64(expired, float64(gone))
		o.ObserveFloat64(connected, truth(s.tracker != nil && s.tracker.Followed()))
		for qos, n := range s.line.Classes() {
			o.ObserveFloat64(waiting, float64(n), metric.WithAttributes(attribute.String("qos", string(qos))))
		}
		if s.gossip != nil {
			o.ObserveFloat64(peers, float64(len(s.gossip.Peers())))
		}
		if set, ok := s.tracker.(*trackers.Set); ok {
			for state, n := range set.States() {
				o.ObserveFloat64(following, float64(n), metric.WithAttributes(attribute.String("state", state)))
			}
		}
		if v, _ := s.catalog.Current(); v != nil {
			o.ObserveFloat64(version, float64(v.Number))
		}
		for at, n := range countProblems(ps) {
			o.ObserveFloat64(problems, float64(n), metric.WithAttributes(attribute.String("kind", at.kind), attribute.String("severity", at.severity.String())))
		}
		if c == nil {
			return nil
		}
		now := s.now()
		for _, set := range c.Sets {
			all, up := 0, 0
			for i := range set.Workers {
				for _, id := range set.Workers[i].Ranks {
					all++
					if s.fleet.Lookup(now, set.Workers[i].UID, id).Ready {
						up++
					}
				}
			}
			at := metric.WithAttributes(attribute.String("worker_set", set.Name))
			o.ObserveFloat64(total, float64(all), at)
			o.ObserveFloat64(ready, float64(up), at)
			for _, p := range set.Profiles {
				causes := map[routerv1.ParityCause]int{}
				for _, cause := range s.blindTo(now, p) {
					causes[cause]++
				}
				if len(causes) == 0 {
					causes[0] = 0
				}
				for cause, n := range causes {
					o.ObserveFloat64(wrong, float64(n), metric.WithAttributes(attribute.String("profile", p.ID), attribute.String("cause", word(cause))))
				}
			}
		}
		return nil
	}, inFlight, expired, slowness, reuse, ready, total, version, problems, connected, following, waiting, peers, wrong)
	return out, err
}

// problemsOf are problems that are counted together.
type problemsOf struct {
	kind     string // of the six; "other" for files that hold none, Pods and the Kubernetes API
	severity resources.Severity
}

// countProblems counts problems by kind and severity, also where there are none.
func countProblems(ps resources.Problems) map[problemsOf]int {
	count := map[problemsOf]int{}
	for _, sev := range []resources.Severity{resources.Warning, resources.Error} {
		count[problemsOf{"other", sev}] = 0
		for i := range kube.Kinds {
			count[problemsOf{kube.Kinds[i].Name, sev}] = 0
		}
	}
	for _, p := range ps {
		kind, _, _ := strings.Cut(p.Resource, " ")
		kind, _, _ = strings.Cut(kind, "/") // what may not be read has kind/namespace
		at := problemsOf{kind, p.Severity}
		if _, known := count[at]; !known {
			at.kind = "other"
		}
		count[at]++
	}
	return count
}

func (m *metrics) close() {
	if m.registration != nil {
		_ = m.registration.Unregister()
	}
}

func (m *metrics) decided(ctx context.Context, outcome string, took time.Duration) {
	m.decisions.Add(ctx, 1, metric.WithAttributes(attribute.String("policy", m.policy), attribute.String("outcome", outcome)))
	m.duration.Record(ctx, took.Seconds(), metric.WithAttributes(attribute.String("policy", m.policy)))
}

// chosen counts tokens; model is a name from the resources.
func (m *metrics) chosen(ctx context.Context, model string, e *schedule.Estimate) {
	for kind, n := range map[string]int{"all": e.Tokens, "matched": e.Matched, "anticipated": e.Anticipated} {
		m.tokens.Add(ctx, int64(n), metric.WithAttributes(attribute.String("model", model), attribute.String("kind", kind)))
	}
}

// firstToken counts how far off a prediction was; worker and model are those of a
// record, and so from the resources.
func (m *metrics) firstToken(ctx context.Context, worker, model string, predicted, actual time.Duration) {
	m.predicted.Record(ctx, predicted.Seconds())
	m.actual.Record(ctx, actual.Seconds())
	m.miss.Record(ctx, (predicted - actual).Abs().Seconds(), metric.WithAttributes(attribute.String("worker", worker), attribute.String("model", model)))
}

func (m *metrics) reloaded(ctx context.Context, good bool) {
	result := "ok"
	if !good {
		result = "failed"
	}
	m.reloads.Add(ctx, 1, metric.WithAttributes(attribute.String("result", result)))
}

func (m *metrics) adminRefused(reason string) {
	m.refused.Add(context.Background(), 1, metric.WithAttributes(attribute.String("reason", reason)))
}

func (m *metrics) trackerAway(ctx context.Context, why string) {
	m.away.Add(ctx, 1, metric.WithAttributes(attribute.String("reason", why)))
}

func (m *metrics) comparedWith(profile string, r parity.Result) {
	m.compared.Add(context.Background(), 1, metric.WithAttributes(attribute.String("profile", profile), attribute.String("result", r.String())))
}

func (m *metrics) gossiped(direction string) {
	m.messages.Add(context.Background(), 1, metric.WithAttributes(attribute.String("direction", direction)))
}

func (m *metrics) gossipDropped(reason string, n int) {
	m.unheard.Add(context.Background(), int64(n), metric.WithAttributes(attribute.String("reason", reason)))
}

func (m *metrics) gossipDelayed(d time.Duration) {
	m.gossipAge.Record(context.Background(), d.Seconds())
}

// leftLine counts how requests leave the line.
func (m *metrics) leftLine(ctx context.Context, qos schedule.QoS, how string, held schedule.Hold, waited time.Duration) {
	class := attribute.String("qos", string(qos))
	switch how {
	case line.Dispatched:
		if held == schedule.HoldNone {
			held = "none"
		}
		m.dispatched.Add(ctx, 1, metric.WithAttributes(class, attribute.String("held", string(held))))
	default:
		m.sentAway.Add(ctx, 1, metric.WithAttributes(class, attribute.String("reason", how)))
	}
	m.inLine.Record(ctx, waited.Seconds(), metric.WithAttributes(class))
}

func (m *metrics) movedAway(ctx context.Context, reason string) {
	switch reason {
	case "connect", "status", "closed", "timeout", "ejected", "hedged":
	default:
		reason = "other"
	}
	m.moved.Add(ctx, 1, metric.WithAttributes(attribute.String("reason", reason)))
}

func (m *metrics) done(ctx context.Context, o routerv1.Outcome) {
	outcome := map[routerv1.Outcome]string{
		routerv1.Outcome_OUTCOME_OK: "ok", routerv1.Outcome_OUTCOME_CANCELED: "canceled", routerv1.Outcome_OUTCOME_FAILED: "failed",
	}[o]
	if outcome == "" {
		outcome = "other"
	}
	m.finished.Add(ctx, 1, metric.WithAttributes(attribute.String("outcome", outcome)))
}

func first(a, b error) error {
	if a != nil {
		return a
	}
	return b
}

func truth(b bool) float64 {
	if b {
		return 1
	}
	return 0
}
