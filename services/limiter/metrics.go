package limiter

import (
	"context"
	"errors"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	limiterv1 "github.com/kinference/kinference/proto/gen/kinference/limiter/v1"
	"github.com/kinference/kinference/services/limiter/internal/store"
)

// metrics are the instruments of the service. All labels are constants: the
// limiter does not know which of its keys are few.
type metrics struct {
	reservations, settlements, shadows, malformed, leased, lost metric.Int64Counter
	duration                                                    metric.Float64Histogram
	registration                                                metric.Registration
}

// outcomeError stands for a reservation without an answer.
const outcomeError = "unavailable"

// fast are the bounds of a call to the store.
var fast = metric.WithExplicitBucketBoundaries(50e-6, 100e-6, 200e-6, 500e-6, 1e-3, 2e-3, 5e-3, 10e-3, 25e-3, 50e-3, 100e-3)

func newMetrics(m metric.Meter, s *server, g *guard, held func() int64) (*metrics, error) {
	out := &metrics{}
	var faults []error
	counter := func(name, unit, text string) metric.Int64Counter {
		c, err := m.Int64Counter("kinference.limiter."+name, metric.WithUnit(unit), metric.WithDescription(text))
		faults = append(faults, err)
		return c
	}
	gauge := func(name, unit, text string) metric.Int64ObservableGauge {
		c, err := m.Int64ObservableGauge("kinference.limiter."+name, metric.WithUnit(unit), metric.WithDescription(text))
		faults = append(faults, err)
		return c
	}
	out.reservations = counter("reservations", "{reservation}", "Reservations by outcome: granted, repeated, exhausted, never, settled, unavailable.")
	out.settlements = counter("settlements", "{settlement}", "Settlements by kind (commit, release) and whether they were the first.")
	out.shadows = counter("shadow.refused", "{charge}", "Charges that a shadow limit would have refused.")
	out.malformed = counter("malformed", "{call}", "Calls that were out of bounds, by call.")
	out.leased = counter("leases", "{share}", "Changes of shares by answer: held, none, synchronous.")
	out.lost = counter("extend.unknown", "{request}", "Running requests whose reservation was gone.")
	var err error
	out.duration, err = m.Float64Histogram("kinference.limiter.store.duration", metric.WithUnit("s"), metric.WithDescription("Time of a call to the store, by call and whether it failed."), fast)
	faults = append(faults, err)
	broken := gauge("store.broken", "1", "1 while the store is not asked, because it failed.")
	clients := gauge("holders", "{process}", "Processes heard of in the last minute, over all limiters.")
	entries := gauge("memory.entries", "{entry}", "Buckets, reservations and shares in memory; 0 with Redis.")
	if err := errors.Join(faults...); err != nil {
		return nil, err
	}
	out.registration, err = m.RegisterCallback(func(_ context.Context, o metric.Observer) error {
		open := int64(0)
		if g.open() {
			open = 1
		}
		o.ObserveInt64(broken, open)
		o.ObserveInt64(clients, s.holders.count())
		o.ObserveInt64(entries, held())
		return nil
	}, broken, clients, entries)
	return out, err
}

func (m *metrics) reserved(ctx context.Context, outcome string) {
	m.reservations.Add(ctx, 1, metric.WithAttributes(attribute.String("outcome", outcome)))
}

func (m *metrics) reserve(ctx context.Context, resp *limiterv1.ReserveResponse, o store.Outcome) {
	outcome := "granted"
	switch {
	case o == store.Repeated:
		outcome = "repeated"
	case o == store.Settled:
		outcome = "settled"
	case resp.Reason == limiterv1.ReserveResponse_REASON_NEVER:
		outcome = "never"
	case o == store.Refused:
		outcome = "exhausted"
	}
	m.reserved(ctx, outcome)
	for _, st := range resp.States {
		if st.Shadow && st.Refused {
			m.shadows.Add(ctx, 1)
		}
	}
}

func (m *metrics) settle(ctx context.Context, first bool, kind string) {
	m.settlements.Add(ctx, 1, metric.WithAttributes(attribute.String("kind", kind), attribute.Bool("first", first)))
}

func (m *metrics) rejected(call string) {
	m.malformed.Add(context.Background(), 1, metric.WithAttributes(attribute.String("call", call)))
}

func (m *metrics) unknown(ctx context.Context, n int) {
	if n > 0 {
		m.lost.Add(ctx, int64(n))
	}
}

func (m *metrics) lease(ctx context.Context, resp *limiterv1.LeaseResponse) {
	for _, g := range resp.Grants {
		answer := "held"
		switch {
		case g.Synchronous:
			answer = "synchronous"
		case g.Held == 0:
			answer = "none"
		}
		m.leased.Add(ctx, 1, metric.WithAttributes(attribute.String("answer", answer)))
	}
}

func (m *metrics) observe(call string, took time.Duration, err error) {
	m.duration.Record(context.Background(), took.Seconds(), metric.WithAttributes(attribute.String("call", call), attribute.Bool("failed", err != nil)))
}
