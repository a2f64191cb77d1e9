package tracker

import (
	"context"
	"errors"
	"fmt"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	"github.com/kinference/kinference/internal/kvindex"
	kvtrackerv1 "github.com/kinference/kinference/proto/gen/kinference/kvtracker/v1"
)

// metrics of the tracker. All labels are of fixed sets.
type metrics struct {
	messages metric.Int64Counter
	foreign  metric.Int64Counter
	applied  metric.Int64Counter
	skips    metric.Int64Counter
	clears   metric.Int64Counter
	lag      metric.Float64Histogram
	matches  metric.Int64Counter
	matching metric.Float64Histogram
	audits   metric.Int64Counter
	saves    metric.Int64Counter
	saved    metric.Int64Gauge

	reasons []metric.MeasurementOption // by kvindex.Reason
	// shard is on what replicas of a shard count alike, so that who adds up can take one.
	shard   attribute.KeyValue
	whole   metric.MeasurementOption // the shard alone
	observe metric.Registration
}

func newMetrics(m metric.Meter, t *Tracker) (*metrics, error) {
	x := &metrics{shard: attribute.String("shard", fmt.Sprintf("%d/%d", t.shard.Index, max(t.shard.Count, 1)))}
	x.whole = metric.WithAttributeSet(attribute.NewSet(x.shard))
	var errs [20]error
	x.messages, errs[0] = m.Int64Counter("kinference.kvtracker.messages",
		metric.WithDescription("Messages about workers, by kind and what became of them"), metric.WithUnit("{message}"))
	x.applied, errs[1] = m.Int64Counter("kinference.kvtracker.events",
		metric.WithDescription("KV events read"), metric.WithUnit("{event}"))
	x.skips, errs[2] = m.Int64Counter("kinference.kvtracker.events.skipped",
		metric.WithDescription("KV events left out in whole or in part, by reason"), metric.WithUnit("{event}"))
	x.clears, errs[3] = m.Int64Counter("kinference.kvtracker.clears",
		metric.WithDescription("Times that the blocks of a worker were forgotten, by reason"), metric.WithUnit("{clear}"))
	x.lag, errs[4] = m.Float64Histogram("kinference.kvtracker.lag",
		metric.WithDescription("Time from an engine's event to its application"), metric.WithUnit("s"),
		metric.WithExplicitBucketBoundaries(.001, .003, .01, .03, .1, .3, 1, 3, 10, 60))
	x.matches, errs[5] = m.Int64Counter("kinference.kvtracker.matches",
		metric.WithDescription("Prompts matched with the index, by whether any worker holds a part"), metric.WithUnit("{prompt}"))
	x.matching, errs[6] = m.Float64Histogram("kinference.kvtracker.match.duration",
		metric.WithDescription("Time to match one prompt with the index"), metric.WithUnit("s"),
		metric.WithExplicitBucketBoundaries(1e-6, 3e-6, 1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2))
	blocks, err := m.Int64ObservableGauge("kinference.kvtracker.blocks",
		metric.WithDescription("Blocks that the workers hold, by medium"), metric.WithUnit("{block}"))
	errs[7] = err
	excess, err := m.Int64ObservableGauge("kinference.kvtracker.blocks.excess",
		metric.WithDescription("GPU blocks tracked beyond those that the engines have: removals were missed"), metric.WithUnit("{block}"))
	errs[8] = err
	workers, err := m.Int64ObservableGauge("kinference.kvtracker.workers",
		metric.WithDescription("Workers by state; a worker can be in several"), metric.WithUnit("{worker}"))
	errs[9] = err
	pending, err := m.Int64ObservableGauge("kinference.kvtracker.stream.pending",
		metric.WithDescription("Messages in the stream behind the last one applied"), metric.WithUnit("{message}"))
	errs[10] = err
	x.audits, errs[11] = m.Int64Counter("kinference.kvtracker.audits",
		metric.WithDescription("Prompts matched a second time block by block, by whether the answers agree"), metric.WithUnit("{prompt}"))
	x.saves, errs[12] = m.Int64Counter("kinference.kvtracker.snapshots",
		metric.WithDescription("Snapshots of the index that were stored"), metric.WithUnit("{snapshot}"))
	x.saved, errs[13] = m.Int64Gauge("kinference.kvtracker.snapshot.size",
		metric.WithDescription("Size of the snapshot stored last"), metric.WithUnit("By"))
	size, err := m.Int64ObservableGauge("kinference.kvtracker.index.size",
		metric.WithDescription("Memory of the index"), metric.WithUnit("By"))
	errs[14] = err
	distinct, err := m.Int64ObservableGauge("kinference.kvtracker.index.blocks",
		metric.WithDescription("Blocks in the index, each counted once whoever holds it"), metric.WithUnit("{block}"))
	errs[15] = err
	states, err := m.Int64ObservableGauge("kinference.kvtracker.index.states",
		metric.WithDescription("Combinations of workers that hold a block"), metric.WithUnit("{state}"))
	errs[16] = err
	holed, err := m.Int64ObservableGauge("kinference.kvtracker.index.holed",
		metric.WithDescription("Workers that hold a block and not the one before it: they are matched block by block"), metric.WithUnit("{worker}"))
	errs[17] = err
	x.foreign, errs[18] = m.Int64Counter("kinference.kvtracker.messages.foreign",
		metric.WithDescription("Messages left out because another shard follows their worker set"), metric.WithUnit("{message}"))
	late, err := m.Int64ObservableGauge("kinference.kvtracker.late",
		metric.WithDescription("1 while the tracker does not hear the stream, is late, or has not caught up"), metric.WithUnit("1"))
	errs[19] = err
	for _, r := range kvindex.Reasons() {
		x.reasons = append(x.reasons, reason(r.String()))
	}
	if err := errors.Join(errs[:]...); err != nil {
		return nil, err
	}
	x.observe, err = m.RegisterCallback(func(_ context.Context, o metric.Observer) error {
		c := t.count()
		for m, n := range c.blocks {
			o.ObserveInt64(blocks, int64(n), metric.WithAttributes(x.shard, attribute.String("medium", kvindex.Medium(m).String())))
		}
		o.ObserveInt64(excess, int64(c.excess), x.whole)
		for state, n := range map[string]int{"known": c.known, "ready": c.ready, "suspended": c.suspended, "incomplete": c.incomplete} {
			o.ObserveInt64(workers, int64(n), metric.WithAttributes(x.shard, attribute.String("state", state)))
		}
		o.ObserveInt64(pending, int64(c.pending))
		o.ObserveInt64(late, int64(c.late))
		i := t.index.Load().Info()
		o.ObserveInt64(size, int64(i.Bytes))
		o.ObserveInt64(distinct, int64(i.Blocks), x.whole)
		o.ObserveInt64(states, int64(i.States))
		o.ObserveInt64(holed, int64(i.Holed))
		return nil
	}, blocks, excess, workers, pending, late, size, distinct, states, holed)
	return x, err
}

func (x *metrics) snapshot(ctx context.Context, bytes int) {
	x.saves.Add(ctx, 1)
	x.saved.Record(ctx, int64(bytes))
}

func (x *metrics) audit(ctx context.Context, agree bool) {
	result := "agree"
	if !agree {
		result = "differ"
	}
	x.audits.Add(ctx, 1, metric.WithAttributes(attribute.String("result", result)))
}

func (x *metrics) close() { _ = x.observe.Unregister() }

func reason(s string) metric.MeasurementOption {
	return metric.WithAttributeSet(attribute.NewSet(attribute.String("reason", s)))
}

func (x *metrics) message(ctx context.Context, kind, result string) {
	x.messages.Add(ctx, 1, metric.WithAttributes(attribute.String("kind", kind), attribute.String("result", result)))
}

func (x *metrics) clear(ctx context.Context, why string) {
	x.clears.Add(ctx, 1, metric.WithAttributes(x.shard, attribute.String("reason", why)))
}

func (x *metrics) skipped(ctx context.Context, why string, n int) {
	if n > 0 {
		x.skips.Add(ctx, int64(n), reason(why))
	}
}

// result counts what the index did with a batch and returns how many events
// count as skipped in the worker's state: malformed ones and those without a
// parent. The other reasons are in the nature of the engine's events.
func (x *metrics) result(ctx context.Context, r *kvindex.Result) int {
	x.applied.Add(ctx, int64(r.Events), x.whole)
	for i, n := range r.Skipped {
		if n > 0 {
			x.skips.Add(ctx, int64(n), x.reasons[i])
		}
	}
	return r.Skipped[kvindex.SkipShape] + r.Skipped[kvindex.SkipOrphan] + r.Skipped[kvindex.SkipUnresolved]
}

// counts is the tracker's state in numbers.
type counts struct {
	blocks                              [3]int
	excess                              int
	known, ready, suspended, incomplete int
	pending                             uint64
	late                                int
}

func (t *Tracker) count() counts {
	var c counts
	now := t.now()
	for _, id := range t.ids() {
		s, _ := t.index.Load().Stats(id)
		t.mu.RLock()
		w := t.workers[id]
		if w != nil {
			c.known++
			if w.isReady(now) {
				c.ready++
			}
			if w.suspended {
				c.suspended++
			}
			if w.started && !w.complete {
				c.incomplete++
			}
			if total := w.report.GetTotalBlocks(); total > 0 {
				c.excess += max(s.Blocks[kvindex.GPU]-int(total), 0)
			}
		}
		t.mu.RUnlock()
		for m, n := range s.Blocks {
			c.blocks[m] += n
		}
	}
	t.mu.RLock()
	defer t.mu.RUnlock()
	c.pending = t.follows.pending
	if t.follows.state != kvtrackerv1.TrackerState_TRACKER_STATE_FOLLOWS {
		c.late = 1
	}
	return c
}
