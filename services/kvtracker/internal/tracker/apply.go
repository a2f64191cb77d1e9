package tracker

import (
	"context"
	"slices"
	"time"

	"github.com/kinference/kinference/internal/bus"
	"github.com/kinference/kinference/internal/daemon"
	"github.com/kinference/kinference/internal/vllm"
)

// apply takes one message of the stream.
func (t *Tracker) apply(ctx context.Context, d bus.Delivery) {
	t.mu.Lock()
	t.follows.pending, t.follows.stored = d.Pending, d.Stored
	t.mu.Unlock()
	id, err := bus.ParseKVSubject(d.Subject)
	if err == nil && !t.shard.holds(id.SetName()) {
		t.metrics.foreign.Add(ctx, 1)
		return
	}
	if err == nil {
		err = t.message.Decode(d.Header, d.Data)
	}
	if err != nil {
		// If it was a batch, the next one shows a gap.
		t.metrics.message(ctx, "unknown", "malformed")
		daemon.Logger(ctx).Warn("KV message skipped", "subject", d.Subject, "err", err)
		return
	}
	m := &t.message
	result := "applied"
	switch m.Kind {
	case bus.KindBatch:
		result = t.applyBatch(ctx, id, m, d.Stored)
	case bus.KindClear:
		result = t.applyClear(ctx, id, m)
	case bus.KindSuspend, bus.KindResume:
		result = t.applySuspend(id, m)
	}
	t.metrics.message(ctx, string(m.Kind), result)
}

// enter finds the worker of a message and turns it to the message's epoch:
// another engine process has another cache. The result is not empty if the
// message must be left out. Called with mu held.
func (t *Tracker) enter(id bus.Worker, m *bus.KVMessage) (w *worker, cleared bool, result string) {
	w = t.worker(id.ID(), id.SetName())
	switch {
	case w == nil:
		return nil, false, "capacity"
	case w.epoch == m.Epoch:
		return w, false, ""
	case slices.Contains(w.past, m.Epoch):
		return w, false, "stale"
	}
	if w.epoch != "" {
		if len(w.past) == keptEpochs {
			w.past = slices.Delete(w.past, 0, 1)
		}
		w.past = append(w.past, w.epoch)
		cleared = true
	}
	w.epoch, w.started, w.suspended, w.lag = m.Epoch, false, false, 0
	return w, cleared, ""
}

// applyClear forgets the worker's blocks, and the worker if it is gone.
func (t *Tracker) applyClear(ctx context.Context, id bus.Worker, m *bus.KVMessage) string {
	t.mu.Lock()
	w, _, result := t.enter(id, m)
	if result == "" {
		w.started, w.next, w.complete, w.suspended = true, m.First, m.First == 0 && m.Reason != bus.ReasonUnverified, false
	}
	t.mu.Unlock()
	switch {
	case result != "":
		return result
	case m.Reason == bus.ReasonGone:
		t.remove(w)
	default:
		t.clear(ctx, w, "relay")
	}
	return "applied"
}

// clear forgets the blocks of a worker. It is hidden meanwhile, so that no
// reader waits and none sees what is about to go.
func (t *Tracker) clear(ctx context.Context, w *worker, reason string) {
	t.hide(w, true)
	t.index.Load().Clear(w.id)
	t.hide(w, false)
	t.metrics.clear(ctx, reason)
	t.hub.notify(w.id, true)
}

func (t *Tracker) hide(w *worker, hidden bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	w.hidden = hidden
	if hidden {
		w.clears++
	}
}

func (t *Tracker) applySuspend(id bus.Worker, m *bus.KVMessage) string {
	t.mu.Lock()
	defer t.mu.Unlock()
	w := t.workers[id.ID()]
	if w == nil || w.epoch != m.Epoch {
		return "stale"
	}
	w.suspended = m.Kind == bus.KindSuspend
	t.hub.notify(w.id, true)
	return "applied"
}

// applyBatch applies the payloads that were not applied before.
func (t *Tracker) applyBatch(ctx context.Context, id bus.Worker, m *bus.KVMessage, stored time.Time) string {
	t.mu.Lock()
	w, cleared, result := t.enter(id, m)
	if result != "" {
		t.mu.Unlock()
		return result
	}
	why := ""
	switch {
	case !w.started:
		// What came before First, if anything, is not known; nothing of it is in
		// the index.
		w.started, w.next, w.complete = true, m.First, m.First == 0
		if cleared {
			why = "epoch"
		}
	case m.Last < w.next:
		t.mu.Unlock()
		return "duplicate"
	case m.First > w.next:
		why = "gap"
		daemon.Logger(ctx).Warn("KV events are missing: worker cleared", "worker", w.id, "from", w.next, "to", m.First-1)
		w.next, w.complete = m.First, false
	}
	if w.next == 0 {
		w.complete = true // an engine's first batch is 0
	}
	skip := int(w.next - m.First)
	caughtUp := t.caughtUp
	t.mu.Unlock()

	// The index has its own locks. Only this goroutine moves next and epoch, so
	// they still hold.
	if why != "" {
		t.clear(ctx, w, why)
	}
	var sum applied
	for _, p := range m.Payloads[skip:] {
		t.applyPayload(ctx, w, p, &sum)
	}

	t.mu.Lock()
	defer t.mu.Unlock()
	if t.workers[w.id] != w { // a report said meanwhile that it left
		t.index.Load().Remove(w.id)
		return "stale"
	}
	w.next = m.Last + 1
	w.skipped += uint64(sum.skipped)
	switch {
	case sum.broken:
		w.complete = false
	case sum.emptied:
		w.complete = true // nothing that was missed is left
		w.clears++
		t.hub.notify(w.id, true)
	}
	if sum.ts > 0 {
		// While the stream is read again, now says nothing about the lag.
		to := stored
		if caughtUp {
			to = t.now()
		}
		w.lag = max(to.Sub(time.Unix(0, int64(sum.ts*1e9))), 0)
		t.metrics.lag.Record(ctx, w.lag.Seconds())
	}
	w.changed = true
	return "applied"
}

// applied sums up the payloads of a message.
type applied struct {
	skipped int
	ts      float64 // engine's time of the last batch
	// emptied: the engine cleared its cache. broken: a payload was not readable.
	emptied, broken bool
}

// applyPayload applies one engine batch.
func (t *Tracker) applyPayload(ctx context.Context, w *worker, payload []byte, sum *applied) {
	if err := t.decoder.Decode(payload, &t.batch); err != nil {
		// It may have held removals: without them there would be false hits.
		daemon.Logger(ctx).Warn("KV events are not readable: worker cleared", "worker", w.id, "err", err)
		t.clear(ctx, w, "undecodable")
		sum.broken, sum.emptied = true, false
		sum.skipped++
		t.metrics.skipped(ctx, "undecodable", 1)
		return
	}
	for i := range t.batch.Events {
		if t.batch.Events[i].Kind == vllm.AllBlocksCleared {
			sum.emptied, sum.broken = true, false
		}
	}
	if t.batch.TS > 0 && t.batch.TS < 1<<33 {
		sum.ts = t.batch.TS
	}
	r := t.index.Load().Apply(w.id, &t.batch)
	sum.skipped += t.batch.Skipped + t.metrics.result(ctx, &r)
	t.metrics.skipped(ctx, "malformed", t.batch.Skipped)
}
