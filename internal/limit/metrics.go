package limit

import (
	"context"
	"errors"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
)

// metrics are the instruments of a client; all labels are constants.
type metrics struct {
	decisions, dropped, spills, unknown metric.Int64Counter
	duration                            metric.Float64Histogram
	registration                        metric.Registration
}

var fast = metric.WithExplicitBucketBoundaries(5e-6, 20e-6, 50e-6, 100e-6, 200e-6, 500e-6, 1e-3, 2e-3, 5e-3, 10e-3, 25e-3, 50e-3, 100e-3)

func newMetrics(m metric.Meter, c *Client) (*metrics, error) {
	out := &metrics{}
	var faults []error
	counter := func(name, unit, text string) metric.Int64Counter {
		i, err := m.Int64Counter("kinference.limit."+name, metric.WithUnit(unit), metric.WithDescription(text))
		faults = append(faults, err)
		return i
	}
	gauge := func(name, unit, text string) metric.Int64ObservableGauge {
		i, err := m.Int64ObservableGauge("kinference.limit."+name, metric.WithUnit(unit), metric.WithDescription(text))
		faults = append(faults, err)
		return i
	}
	out.decisions = counter("decisions", "{decision}", "Decisions by way (lease, trip, degraded) and outcome (granted, exhausted, never, away).")
	out.dropped = counter("settlements.dropped", "{settlement}", "Settlements that were given up, by reason: full, old, refused, malformed.")
	out.spills = counter("settlements.spilled", "{settlement}", "Settlements that went to the spill file.")
	out.unknown = counter("extend.unknown", "{request}", "Running requests whose reservation the limiter does not know any more.")
	var err error
	out.duration, err = m.Float64Histogram("kinference.limit.duration", metric.WithUnit("s"), metric.WithDescription("Time that a request waited for its limits, by way."), fast)
	faults = append(faults, err)
	queued := gauge("settlements.queued", "{settlement}", "Settlements that wait in memory.")
	shares := gauge("leases", "{lease}", "Buckets of which this process holds a share.")
	broken := gauge("away", "1", "1 while the limiter is not asked, because it failed.")
	if err := errors.Join(faults...); err != nil {
		return nil, err
	}
	out.registration, err = m.RegisterCallback(func(_ context.Context, o metric.Observer) error {
		open := int64(0)
		if c.breaker.open() {
			open = 1
		}
		o.ObserveInt64(broken, open)
		o.ObserveInt64(queued, int64(len(c.queue)))
		o.ObserveInt64(shares, c.leases())
		return nil
	}, queued, shares, broken)
	return out, err
}

func (m *metrics) decide(ctx context.Context, a *Answer, trip bool, took time.Duration) {
	way, outcome := "lease", "granted"
	switch {
	case a.Degraded:
		way = "degraded"
	case trip:
		way = "trip"
	}
	switch a.Reason {
	case Exhausted:
		outcome = "exhausted"
	case Never:
		outcome = "never"
	case Away:
		outcome = "away"
	}
	m.decisions.Add(ctx, 1, metric.WithAttributeSet(decisionSet(way, outcome)))
	m.duration.Record(ctx, took.Seconds(), metric.WithAttributeSet(waySets[way]))
}

// The sets are made once: a decision from a lease takes a microsecond.
var waySets, decisionSets = func() (map[string]attribute.Set, map[[2]string]attribute.Set) {
	ways, all := map[string]attribute.Set{}, map[[2]string]attribute.Set{}
	for _, way := range []string{"lease", "trip", "degraded"} {
		ways[way] = attribute.NewSet(attribute.String("way", way))
		for _, outcome := range []string{"granted", "exhausted", "never", "away"} {
			all[[2]string{way, outcome}] = attribute.NewSet(attribute.String("way", way), attribute.String("outcome", outcome))
		}
	}
	return ways, all
}()

func decisionSet(way, outcome string) attribute.Set { return decisionSets[[2]string{way, outcome}] }

func (m *metrics) drop(reason string) {
	m.dropped.Add(context.Background(), 1, metric.WithAttributes(attribute.String("reason", reason)))
}

func (m *metrics) spilled() { m.spills.Add(context.Background(), 1) }
