package ingress

import (
	"context"
	"errors"
	"slices"
	"sync"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
	"github.com/kinference/kinference/services/ingress/internal/meter"
	"github.com/kinference/kinference/services/ingress/internal/usage"
)

// Labels for what has no name of its own.
const (
	otherTenant = "_other" // beyond maxTenants
	openTenant  = "_open"  // the gateway is open
)

const (
	// maxTenants bounds the tenants with series of their own in one process, and
	// maxPairs those with models. The SDK would fold what is beyond 2,000 sets of
	// labels into one without any.
	maxTenants = 200
	maxPairs   = 1500
)

// golden are the metrics of tenants: our own stable names, next to those of the
// GenAI conventions, which change. In Prometheus they are kinference_tenant_….
type golden struct {
	requests metric.Int64Counter
	tokens   metric.Int64Counter
	ttft     metric.Float64Histogram
	itl      metric.Float64Histogram
	tpot     metric.Float64Histogram
	e2e      metric.Float64Histogram
	queue    metric.Float64Histogram

	meter  metric.Meter
	opened sync.Once // the histograms

	mu      sync.RWMutex
	sets    map[labels]*sets
	tenants map[string]bool
}

// labels of one tenant and model.
type labels struct{ tenant, model string }

// sets are the label sets of a tenant and model, made once.
type sets struct {
	plain    metric.MeasurementOption
	outcomes map[meter.Outcome]metric.MeasurementOption
	types    [5]metric.MeasurementOption
}

// tokenTypes are the values of the label type. Uncached and cached input make up the
// input; reasoning is part of the output.
var tokenTypes = [5]string{"input_uncached", "input_cached", "output", "reasoning", "estimated"}

func (g *golden) init(m metric.Meter) error {
	g.sets, g.tenants, g.meter = map[labels]*sets{}, map[string]bool{}, m
	var faults []error
	counter := func(name, unit, text string) metric.Int64Counter {
		c, err := m.Int64Counter(name, metric.WithUnit(unit), metric.WithDescription(text))
		faults = append(faults, err)
		return c
	}
	g.requests = counter("kinference.tenant.requests", "{request}", "Requests of tenants by outcome: ok, canceled, failed or refused.")
	g.tokens = counter("kinference.tenant.tokens", "{token}", "Tokens of tenants by type: input_uncached, input_cached, output, reasoning (part of output), and estimated (those of all types that no backend reported).")
	return errors.Join(faults...)
}

// maxThresholds bounds the thresholds of one indicator that become buckets.
const maxThresholds = 8

// open makes the histograms, once: with the thresholds of the objectives that there are
// then as buckets, so that shares within them are exact. Those that come later are
// counted by accounting only, since buckets cannot change.
func (g *golden) open(list []*routerv1.Objective) (err error) {
	g.opened.Do(func() {
		var faults []error
		seconds := func(name, text, indicator string, buckets []float64) metric.Float64Histogram {
			h, err := g.meter.Float64Histogram(name, metric.WithUnit("s"), metric.WithDescription(text), metric.WithExplicitBucketBoundaries(boundaries(buckets, list, indicator)...))
			faults = append(faults, err)
			return h
		}
		g.ttft = seconds("kinference.tenant.ttft", "Time from a request's last byte in to its first content out.", "TTFT", firstBuckets)
		g.itl = seconds("kinference.tenant.itl", "Mean time between two events with content of a stream.", "ITL", perTokenBuckets)
		g.tpot = seconds("kinference.tenant.tpot", "Time per output token after the first of a stream.", "TPOT", perTokenBuckets)
		g.e2e = seconds("kinference.tenant.e2e", "Time from a request's last byte in to its end.", "EndToEnd", durationBuckets)
		g.queue = seconds("kinference.tenant.queue", "Time that a request waited in the router's queue.", "", firstBuckets)
		err = errors.Join(faults...)
	})
	return err
}

// boundaries are buckets with the thresholds of an indicator among them.
func boundaries(buckets []float64, list []*routerv1.Objective, indicator string) []float64 {
	out := slices.Clone(buckets)
	for _, o := range list {
		if v := o.GetThreshold().AsDuration().Seconds(); o.GetIndicator() == indicator && v > 0 && !slices.Contains(out, v) && len(out) < len(buckets)+maxThresholds {
			out = append(out, v)
		}
	}
	slices.Sort(out)
	return out
}

// used counts a request that is over. ctx has its span, for exemplars; it is nil
// for one that never had any.
func (m *metrics) used(ctx, otherwise context.Context, r *meter.Record, model string) {
	if ctx == nil {
		ctx = otherwise
	}
	g := &m.golden
	_ = g.open(nil) // nothing came before a catalog
	s := g.of(r.Tenant(), model)
	g.requests.Add(ctx, 1, s.outcomes[r.Outcome])
	uncached, estimated := r.Tokens.Uncached(), int64(0)
	for i, c := range [4]meter.Count{uncached, r.Tokens.Cached, r.Tokens.Output, r.Tokens.Reasoning} {
		if c.N > 0 {
			g.tokens.Add(ctx, c.N, s.types[i])
		}
		if c.Source == meter.Estimated {
			estimated += c.N
		}
	}
	if estimated > 0 {
		g.tokens.Add(ctx, estimated, s.types[4])
	}
	if r.Attempts == 0 {
		return
	}
	g.e2e.Record(ctx, r.E2E().Seconds(), s.plain)
	g.queue.Record(ctx, r.Queued.Seconds(), s.plain)
	if d, ok := r.TTFT(); ok {
		g.ttft.Record(ctx, d.Seconds(), s.plain)
	}
	if v, ok := r.ITL(); ok {
		g.itl.Record(ctx, v, s.plain)
	}
	if v, ok := r.TPOT(); ok {
		g.tpot.Record(ctx, v, s.plain)
	}
}

// of returns the label sets of a tenant and model. Tenants and models beyond the
// bounds share one.
func (g *golden) of(tenant, model string) *sets {
	if tenant == "" {
		tenant = openTenant
	}
	key := labels{tenant, model}
	g.mu.RLock()
	s := g.sets[key]
	g.mu.RUnlock()
	if s != nil {
		return s
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.tenants[tenant] {
		if len(g.tenants) >= maxTenants {
			key.tenant = otherTenant
		} else {
			g.tenants[tenant] = true
		}
	}
	if s = g.sets[key]; s != nil {
		return s
	}
	if len(g.sets) >= maxPairs {
		key = labels{otherTenant, otherTenant}
		if s = g.sets[key]; s != nil {
			return s
		}
	}
	t, mod := attribute.String("tenant", key.tenant), attribute.String("model", key.model)
	s = &sets{plain: metric.WithAttributeSet(attribute.NewSet(t, mod)), outcomes: map[meter.Outcome]metric.MeasurementOption{}}
	for _, o := range [...]meter.Outcome{meter.OK, meter.Canceled, meter.Failed, meter.Refused} {
		s.outcomes[o] = metric.WithAttributeSet(attribute.NewSet(t, mod, attribute.String("outcome", string(o))))
	}
	for i, name := range tokenTypes {
		s.types[i] = metric.WithAttributeSet(attribute.NewSet(t, mod, attribute.String("type", name)))
	}
	g.sets[key] = s
	return s
}

// newUsageMetrics shows the state of the spool.
func newUsageMetrics(m metric.Meter, r *usage.Recorder) (metric.Registration, error) {
	var faults []error
	gauge := func(name, unit, text string) metric.Int64ObservableGauge {
		g, err := m.Int64ObservableGauge(name, metric.WithUnit(unit), metric.WithDescription(text))
		faults = append(faults, err)
		return g
	}
	bytes := gauge("kinference.ingress.usage.spool.size", "By", "Bytes of usage events on disk.")
	pending := gauge("kinference.ingress.usage.spool.pending", "By", "Bytes of usage events on disk that NATS has not acknowledged.")
	events, err := m.Int64ObservableCounter("kinference.ingress.usage.events", metric.WithUnit("{event}"),
		metric.WithDescription("Usage events by result: published, dropped (the spool was full or the disk failed), recovered (of requests that a former process left), corrupt (unreadable in the spool)."))
	if err = errors.Join(append(faults, err)...); err != nil {
		return nil, err
	}
	result := func(word string) metric.ObserveOption { return metric.WithAttributes(attribute.String("result", word)) }
	return m.RegisterCallback(func(_ context.Context, o metric.Observer) error {
		s := r.Stats()
		o.ObserveInt64(bytes, s.Bytes)
		o.ObserveInt64(pending, s.Pending)
		o.ObserveInt64(events, int64(s.Published), result("published"))
		o.ObserveInt64(events, int64(s.Dropped), result("dropped"))
		o.ObserveInt64(events, int64(s.Recovered), result("recovered"))
		o.ObserveInt64(events, int64(s.Corrupt), result("corrupt"))
		return nil
	}, bytes, pending, events)
}
