package tracker

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/kinference/kinference/internal/bus"
	"github.com/kinference/kinference/internal/daemon"
	"github.com/kinference/kinference/internal/kvindex"
)

// A snapshot is the index and how far each worker's events are in it, at one place in the
// stream. A tracker that starts loads it and reads the stream from there on. Trackers of
// one shard share one: whoever finds it old makes it anew.

// Snapshots says where a tracker keeps them.
type Snapshots struct {
	// Name of the snapshot in the store.
	Name string
	// Whole names a snapshot of all shards, from which a shard starts that has none of its
	// own. Optional.
	Whole string
	// Interval between two; 0: none are made or read.
	Interval time.Duration
}

// savedAt is when and where the last snapshot was made.
type savedAt struct {
	when time.Time
	seq  uint64
	took time.Duration
	// first and last are what the stream holds.
	first, last uint64
}

// due tells whether it is time for another one. In a hurry means that the stream will soon
// have lost what came behind the last one, so that nobody could start from that.
func (s *savedAt) due(now time.Time, interval time.Duration) (due, hurry bool) {
	since := now.Sub(s.when)
	if since >= interval {
		return true, false
	}
	// Events wait while it is made: for a tenth of the time at most.
	hurry = s.first > 1 && s.seq < s.first+(s.last-s.first)/2 && since > max(time.Second, 10*s.took)
	return hurry, hurry
}

// head is the part of a snapshot before the index.
type head struct {
	Position bus.Position
	Workers  []savedWorker
}

// savedWorker is what must be known of a worker to go on with its events.
type savedWorker struct {
	ID, Set   string
	Epoch     string
	Past      []string `json:",omitempty"`
	Next      uint64
	Started   bool
	Complete  bool
	Suspended bool
	Skipped   uint64
}

// snapshot takes one. Called by the goroutine that applies events, between two messages.
func (t *Tracker) snapshot(at bus.Position) ([]byte, error) {
	h := head{Position: at}
	t.mu.RLock()
	for _, w := range t.workers {
		if w.epoch != "" {
			h.Workers = append(h.Workers, savedWorker{w.id, w.set, w.epoch, w.past, w.next, w.started, w.complete, w.suspended, w.skipped})
		}
	}
	t.mu.RUnlock()
	text, err := json.Marshal(h)
	if err != nil {
		return nil, err
	}
	data := binary.AppendUvarint(nil, uint64(len(text)))
	return t.index.Load().Snapshot(append(data, text...)), nil
}

// restore takes over a snapshot.
func (t *Tracker) restore(data []byte) (bus.Position, error) {
	n, k := binary.Uvarint(data)
	if k <= 0 || n > uint64(len(data)-k) {
		return bus.Position{}, errors.New("the snapshot is cut")
	}
	var h head
	if err := json.Unmarshal(data[k:k+int(n)], &h); err != nil {
		return bus.Position{}, fmt.Errorf("read the snapshot's head: %w", err)
	}
	if len(h.Workers) > maxWorkers {
		return bus.Position{}, errors.New("the snapshot has too many workers")
	}
	index, err := kvindex.Restore(data[k+int(n):])
	if err != nil {
		return bus.Position{}, err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.index.Store(index)
	defer index.Sweep() // what is of other shards
	for _, s := range h.Workers {
		if !t.shard.holds(s.Set) {
			index.Remove(s.ID)
			continue
		}
		t.workers[s.ID] = &worker{
			id: s.ID, set: s.Set, seen: t.now(), window: newWindow(), epoch: s.Epoch, past: s.Past, next: s.Next,
			started: s.Started, complete: s.Complete, suspended: s.Suspended, skipped: s.Skipped,
		}
	}
	return h.Position, nil
}

// load restores the newest snapshot if the stream goes on from it; else the index
// stays empty and all of the stream is read.
func (t *Tracker) load(ctx context.Context, conn *bus.Conn, s Snapshots) bus.Position {
	log := daemon.Logger(ctx)
	if s.Interval <= 0 {
		return bus.Position{}
	}
	began := time.Now()
	data, stored, err := conn.Snapshot(ctx, s.Name)
	if errors.Is(err, bus.ErrNoSnapshot) && s.Whole != "" {
		data, stored, err = conn.Snapshot(ctx, s.Whole)
	}
	if errors.Is(err, bus.ErrNoSnapshot) || ctx.Err() != nil {
		return bus.Position{}
	}
	var at bus.Position
	if err == nil {
		at, err = headPosition(data)
	}
	if err == nil {
		var ok bool
		if ok, err = conn.Continues(ctx, at); err == nil && !ok {
			log.Warn("snapshot of the index left out: the stream does not go on from it", "name", s.Name, "stored", stored)
			return bus.Position{}
		}
	}
	if err == nil {
		at, err = t.restore(data)
	}
	if err != nil {
		log.Warn("snapshot of the index left out", "name", s.Name, "err", err)
		return bus.Position{}
	}
	t.saved = savedAt{when: stored, seq: at.Seq}
	log.Info("index restored from a snapshot", "name", s.Name, "stored", stored, "bytes", len(data), "seconds", time.Since(began).Seconds())
	return at
}

func headPosition(data []byte) (bus.Position, error) {
	n, k := binary.Uvarint(data)
	if k <= 0 || n > uint64(len(data)-k) {
		return bus.Position{}, errors.New("the snapshot is cut")
	}
	var h head
	err := json.Unmarshal(data[k:k+int(n)], &h)
	return h.Position, err
}

// save makes a snapshot at a place in the stream if one is due, and sends it beside the
// events that follow. Called by the goroutine that applies events.
func (t *Tracker) save(ctx context.Context, conn *bus.Conn, s Snapshots, at bus.Position) {
	if s.Interval <= 0 || !t.CaughtUp() {
		return
	}
	now := t.now()
	due, hurry := t.saved.due(now, s.Interval)
	if !due || at.Seq == t.saved.seq || !t.saving.CompareAndSwap(false, true) {
		return
	}
	data, err := t.snapshot(at)
	t.saved.when, t.saved.seq, t.saved.took = now, at.Seq, t.now().Sub(now)
	if err != nil {
		t.saving.Store(false)
		daemon.Logger(ctx).Warn("no snapshot of the index was made", "err", err)
		return
	}
	t.sending.Go(func() {
		defer t.saving.Store(false)
		// A peer may have been faster; its snapshot does as well.
		if stored, err := conn.SnapshotTime(ctx, s.Name); err == nil && !hurry && time.Since(stored) < s.Interval/2 {
			return
		}
		err := conn.PutSnapshot(ctx, s.Name, data)
		switch {
		case err == nil:
			t.metrics.snapshot(ctx, len(data))
		case ctx.Err() == nil:
			daemon.Logger(ctx).Warn("the snapshot of the index was not stored", "err", err)
		}
	})
}
