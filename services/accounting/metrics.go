package accounting

import (
	"context"
	"errors"
	"math"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	usagev1 "github.com/kinference/kinference/proto/gen/kinference/usage/v1"
	"github.com/kinference/kinference/services/accounting/internal/gputime"
	"github.com/kinference/kinference/services/accounting/internal/ledger"
	"github.com/kinference/kinference/services/accounting/internal/objective"
)

// metrics are the instruments of this service. Labels are fixed words.
type metrics struct {
	events       metric.Int64Counter
	failures     metric.Int64Counter
	objectives   metric.Int64Counter
	cost         metric.Float64Counter
	gpu, workers metric.Float64Counter

	named   sync.Mutex
	tenants map[string]bool // with series of their own

	registration metric.Registration
	filled       atomic.Uint64 // of the stream, as math.Float64bits; 0: unknown

	mu   sync.Mutex // of the figures that are asked for at most every figureAge
	at   time.Time
	size int64
	lag  int64 // -1: unknown
	age  float64
}

// figureAge is how old a figure may be that costs a question.
const figureAge = 10 * time.Second

func (m *metrics) init(meter metric.Meter, v *server) error {
	var faults []error
	var err error
	m.events, err = meter.Int64Counter("kinference.accounting.events", metric.WithUnit("{event}"),
		metric.WithDescription("Usage events by result: new, known (came again), replaced (took the place of one that was recovered from a spool), invalid (no event), too_old."))
	faults = append(faults, err)
	m.failures, err = meter.Int64Counter("kinference.accounting.ledger.failures", metric.WithUnit("{batch}"),
		metric.WithDescription("Batches that the database did not take; they come again."))
	faults = append(faults, err)
	m.objectives, err = meter.Int64Counter("kinference.objective.requests", metric.WithUnit("{request}"),
		metric.WithDescription("Requests that objectives are about, by objective (kind/namespace/owner/name) and result: good or bad."))
	faults = append(faults, err)
	m.tenants = map[string]bool{}
	m.cost, err = meter.Float64Counter("kinference.tenant.cost", metric.WithUnit("1"),
		metric.WithDescription("Cost of new requests in the ledger by tenant, currency and part: input, cached_input, output, gpu. For charts; sums of money come from the ledger."))
	faults = append(faults, err)
	m.gpu, err = meter.Float64Counter("kinference.tenant.gpu.time", metric.WithUnit("s"),
		metric.WithDescription("Time of workers that tenants' requests caused, by tenant, worker set and phase: prefill or decode; some minutes late."))
	faults = append(faults, err)
	m.workers, err = meter.Float64Counter("kinference.worker.time", metric.WithUnit("s"),
		metric.WithDescription("Time of workers by worker set and state: used (by tenants), other (busy with what no request explains), idle; some minutes late."))
	faults = append(faults, err)
	size, err := meter.Int64ObservableGauge("kinference.accounting.ledger.size", metric.WithUnit("By"), metric.WithDescription("Bytes of the ledger's database."))
	faults = append(faults, err)
	lag, err := meter.Int64ObservableGauge("kinference.accounting.lag", metric.WithUnit("{event}"), metric.WithDescription("Usage events on the stream that are not in the ledger yet."))
	faults = append(faults, err)
	age, err := meter.Float64ObservableGauge("kinference.accounting.newest.age", metric.WithUnit("s"), metric.WithDescription("Time since the newest request in the ledger ended."))
	faults = append(faults, err)
	filled, err := meter.Float64ObservableGauge("kinference.accounting.stream.filled", metric.WithUnit("1"),
		metric.WithDescription("Part of the stream's size that is used. It is kept below 0.8 unless a consumer does not acknowledge; at 1 the stream refuses events."))
	if err := errors.Join(append(faults, err)...); err != nil {
		return err
	}
	m.registration, err = meter.RegisterCallback(func(ctx context.Context, o metric.Observer) error {
		m.mu.Lock()
		defer m.mu.Unlock()
		if time.Since(m.at) > figureAge {
			m.ask(ctx, v)
		}
		o.ObserveInt64(size, m.size)
		if f := math.Float64frombits(m.filled.Load()); f > 0 {
			o.ObserveFloat64(filled, f)
		}
		if m.lag >= 0 {
			o.ObserveInt64(lag, m.lag)
		}
		if m.age >= 0 {
			o.ObserveFloat64(age, m.age)
		}
		return nil
	}, size, lag, age, filled)
	return err
}

// ask asks for the figures; what nobody tells is left out.
func (m *metrics) ask(ctx context.Context, v *server) {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	m.at, m.lag, m.age = time.Now(), -1, -1
	if n, err := v.ledger.Size(ctx); err == nil {
		m.size = n
	}
	if n, ok := v.lag(ctx); ok {
		m.lag = int64(n)
	}
	if t, err := v.ledger.Newest(ctx); err == nil && !t.IsZero() {
		m.age = time.Since(t).Seconds()
	}
}

func (m *metrics) close() { _ = m.registration.Unregister() }

func (m *metrics) took(ctx context.Context, a ledger.Added, invalid, old int) {
	for word, n := range map[string]int{"new": a.New, "known": a.Known, "replaced": a.Replaced, "invalid": invalid, "too_old": old} {
		if n > 0 {
			m.events.Add(ctx, int64(n), metric.WithAttributes(attribute.String("result", word)))
		}
	}
}

// maxTenants bounds the tenants with series of their own.
const maxTenants = 200

// tenant is the label of a tenant.
func (m *metrics) tenant(name string) string {
	m.named.Lock()
	defer m.named.Unlock()
	if name == openTenant {
		name = "_open"
	}
	if !m.tenants[name] {
		if len(m.tenants) >= maxTenants {
			return "_other"
		}
		m.tenants[name] = true
	}
	return name
}

// divided counts an interval of a worker.
func (m *metrics) divided(ctx context.Context, set string, sp gputime.Split, tenants []string) {
	of := attribute.String("worker_set", set)
	used := 0.0
	for _, sh := range sp.Shares {
		used += sh.Prefill + sh.Decode
		tenant := attribute.String("tenant", m.tenant(tenants[sh.Request]))
		m.gpu.Add(ctx, sh.Prefill, metric.WithAttributes(of, tenant, attribute.String("phase", "prefill")))
		m.gpu.Add(ctx, sh.Decode, metric.WithAttributes(of, tenant, attribute.String("phase", "decode")))
	}
	for state, v := range map[string]float64{"used": used, "other": sp.Other, "idle": sp.Idle} {
		m.workers.Add(ctx, v, metric.WithAttributes(of, attribute.String("state", state)))
	}
}

// spent counts what an event cost.
func (m *metrics) spent(ctx context.Context, u *usagev1.Usage) {
	c := u.GetCost()
	if c.GetCurrency() == "" {
		return
	}
	tenant := m.tenant(tenantName(u))
	for part, text := range map[string]string{"input": c.GetInput(), "cached_input": c.GetCachedInput(), "output": c.GetOutput(), "gpu": c.GetGpu()} {
		if v, err := strconv.ParseFloat(text, 64); err == nil && v > 0 {
			m.cost.Add(ctx, v, metric.WithAttributes(attribute.String("tenant", tenant), attribute.String("currency", c.GetCurrency()), attribute.String("part", part)))
		}
	}
}

// spentTime counts what the time of workers cost that an event got.
func (m *metrics) spentTime(ctx context.Context, s ledger.Spent) {
	if c := s.Event.GetCost(); s.Cost > 0 && c.GetCurrency() != "" {
		m.cost.Add(ctx, s.Cost, metric.WithAttributes(attribute.String("tenant", m.tenant(tenantName(s.Event))), attribute.String("currency", c.GetCurrency()), attribute.String("part", "gpu")))
	}
}

// judged counts n requests for an objective.
func (m *metrics) judged(ctx context.Context, o *objective.Objective, good bool, n int64) {
	result := "bad"
	if good {
		result = "good"
	}
	m.objectives.Add(ctx, n, metric.WithAttributes(attribute.String("objective", o.ID()), attribute.String("result", result)))
}

func (m *metrics) failed(ctx context.Context) { m.failures.Add(ctx, 1) }
