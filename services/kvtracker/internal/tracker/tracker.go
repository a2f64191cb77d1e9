// Package tracker follows the workers: it applies their KV events to the index,
// keeps the mean of their load, and answers for both.
//
// One Tracker serves a process. It reads the stream of KV events from its start,
// so that a restart rebuilds the same index, and the workers' reports as they
// come. Nothing it is told is fatal: a malformed message is counted; where
// events are missing, that worker's blocks are forgotten, because a removal may
// have been among them, and the worker is marked incomplete. NATS may go away:
// what is known stays and ages.
//
// Run is called once; everything else is safe for concurrent use. Events are
// applied by one goroutine in the stream's order; readers never wait for it
// longer than for one block.
package tracker

import (
	"context"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/kinference/kinference/internal/bus"
	"github.com/kinference/kinference/internal/daemon"
	"github.com/kinference/kinference/internal/kvindex"
	"github.com/kinference/kinference/internal/vllm"
	"github.com/kinference/kinference/internal/window"
	kvtrackerv1 "github.com/kinference/kinference/proto/gen/kinference/kvtracker/v1"
)

const (
	// staleAfter is the age at which a load sample no longer counts: a relay
	// samples four times a second.
	staleAfter = 2 * time.Second
	// clockStep is how far behind the newest report another one must be to say
	// that the relay's clock was set back: stored reports are up to 5 s old.
	clockStep = 10 * time.Second
	// forgetAfter is how long a worker may be without a report, while others
	// have them, before it is taken to have left unseen.
	forgetAfter = 10 * time.Minute
	// sweepInterval is how often the workers are looked at for what time alone
	// changes, and for what is not worth a message each.
	sweepInterval = 250 * time.Millisecond
	// maxWorkers bounds what streams and reports can make the tracker remember.
	maxWorkers = kvindex.MaxWorkers
	// keptEpochs is how many former epochs of a worker are recognised.
	keptEpochs = 4
)

// Tracker holds the state of all workers.
type Tracker struct {
	index   atomic.Pointer[kvindex.Table]
	now     func() time.Time
	shard   Shard
	metrics *metrics
	hub     hub

	mu      sync.RWMutex
	workers map[string]*worker // by id
	// left remembers when workers left, so that a late report does not bring
	// them back.
	left map[string]int64
	// reported is when the newest report of any worker came.
	reported time.Time
	caughtUp bool
	follows  follows

	// Of the goroutine that applies events.
	decoder vllm.Decoder
	message bus.KVMessage
	batch   vllm.Batch
	saved   savedAt

	asked   atomic.Uint64 // matches so far
	saving  atomic.Bool
	sending sync.WaitGroup
}

// worker is one engine rank. Guarded by Tracker.mu.
type worker struct {
	id, set string
	seen    time.Time // when it was first heard of or last reported

	epoch string
	past  []string // former epochs, newest last
	// next is the engine's sequence number that must come next.
	next uint64
	// started tells whether a message of the epoch was seen.
	started   bool
	complete  bool
	suspended bool
	hidden    bool // its blocks are being forgotten
	clears    uint64
	skipped   uint64
	lag       time.Duration
	changed   bool // since the last sweep

	report *kvtrackerv1.WorkerReport // newest; nil for none
	fresh  time.Time                 // when the newest sample was taken, by our clock
	window *window.Window
	ready  bool // as watchers know it
}

// meanOver is the time of the means that watchers get.
const meanOver = 30 * time.Second

func newWindow() *window.Window { return window.New(meanOver, staleAfter) }

func loadOf(l *kvtrackerv1.Load) window.Load {
	return window.Load{Running: l.GetRunning(), Waiting: l.GetWaiting(), KVUsage: l.GetKvUsage()}
}

func protoOf(l window.Load) *kvtrackerv1.Load {
	return &kvtrackerv1.Load{Running: l.Running, Waiting: l.Waiting, KvUsage: l.KVUsage}
}

// New returns a tracker of a shard. The context gives log and metrics.
func New(ctx context.Context, shard Shard) (*Tracker, error) {
	t := &Tracker{
		shard:   shard,
		now:     time.Now,
		workers: map[string]*worker{},
		left:    map[string]int64{},
	}
	t.index.Store(kvindex.New())
	var err error
	t.metrics, err = newMetrics(daemon.Meter(ctx), t)
	return t, err
}

// Run follows the workers over conn until ctx is done; it returns nil then. It
// calls daemon.Ready once all that the stream holds has been applied, beginning with
// the newest snapshot.
func (t *Tracker) Run(ctx context.Context, conn *bus.Conn, stream bus.StreamSettings, snapshots Snapshots) error {
	defer t.metrics.close()
	defer t.sending.Wait()
	log := daemon.Logger(ctx)
	from := t.load(ctx, conn, snapshots)
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error {
		return conn.ConsumeKV(ctx, stream, from, bus.KVHandler{
			Start: func() { log.Info("reading KV events from the start of the stream") },
			CaughtUp: func() {
				log.Info("caught up with KV events")
				t.setCaughtUp()
				daemon.Ready(ctx, true)
			},
			Message: func(d bus.Delivery) {
				t.apply(ctx, d)
				t.save(ctx, conn, snapshots, d.Position)
			},
			Held: func(at bus.Position, first, last uint64) {
				t.saved.first, t.saved.last = first, last
				t.save(ctx, conn, snapshots, at)
			},
			Reading: t.reading,
			Trouble: func(err error) {
				t.interrupted()
				log.Warn("reading KV events was interrupted", "err", err)
			},
		})
	})
	g.Go(func() error {
		return conn.ConsumeReports(ctx, t.report, func(err error) {
			t.metrics.message(ctx, "report", "malformed")
			log.Warn("worker report skipped", "err", err)
		})
	})
	g.Go(func() error {
		tick := time.NewTicker(sweepInterval)
		defer tick.Stop()
		for {
			select {
			case <-ctx.Done():
				return nil
			case <-tick.C:
				t.follow(conn.Connected())
				t.sweep()
			}
		}
	})
	return g.Wait()
}

// worker returns the worker with this id, and makes it if it is new; nil if
// there are too many. Called with mu held.
func (t *Tracker) worker(id, set string) *worker {
	w := t.workers[id]
	if w == nil {
		if len(t.workers) >= maxWorkers {
			return nil
		}
		w = &worker{id: id, seen: t.now(), window: newWindow()}
		t.workers[id] = w
	}
	w.set = set
	return w
}

// remove forgets a worker. The blocks go first, without the lock.
func (t *Tracker) remove(w *worker) {
	t.hide(w, true)
	t.index.Load().Clear(w.id)
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.workers[w.id] == w {
		delete(t.workers, w.id)
		t.index.Load().Remove(w.id)
		t.hub.notify(w.id, false)
	}
}

// report takes a worker's report; the newest wins.
func (t *Tracker) report(r *kvtrackerv1.WorkerReport) {
	if !t.shard.holds(r.GetWorkerSet()) {
		return
	}
	if r.GetGone() {
		if w := t.leave(r); w != nil {
			t.remove(w)
		}
		return
	}
	w, options := t.enterReport(r)
	if options == nil {
		return
	}
	// Without the lock: the index makes it wait while it clears the worker, and
	// no Match may wait for that.
	t.index.Load().Configure(w.id, *options)
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.workers[w.id] == nil { // it left meanwhile
		t.index.Load().Remove(w.id)
	}
}

// enterReport notes a report. It returns the options of the worker's index
// where they have changed.
func (t *Tracker) enterReport(r *kvtrackerv1.WorkerReport) (*worker, *kvindex.Options) {
	t.mu.Lock()
	defer t.mu.Unlock()
	now := t.now()
	at := time.Unix(0, r.GetSampledUnixNanos())
	if gone, ok := t.left[r.GetWorker()]; ok {
		if r.GetSampledUnixNanos() <= gone {
			return nil, nil
		}
		delete(t.left, r.GetWorker())
	}
	w := t.worker(r.GetWorker(), r.GetWorkerSet())
	if w == nil {
		return nil, nil
	}
	old := w.report
	if behind := time.Duration(old.GetSampledUnixNanos() - r.GetSampledUnixNanos()); old != nil && behind >= 0 {
		if behind < clockStep || now.Sub(w.seen) <= staleAfter {
			return nil, nil
		}
		w.window = newWindow() // it counts in the time of a clock that was set back
	}
	w.report, w.seen, t.reported = r, now, now
	if w.fresh = now; old == nil && at.Before(now) {
		// It may have been stored a while ago. Later ones come as they are taken,
		// and then our own clock is better than the difference of two.
		w.fresh = at
	}
	w.window.Add(at, loadOf(r.GetLoad()))
	w.ready = w.isReady(now)
	t.hub.notify(w.id, false)
	if old == nil || old.GetTotalBlocks() != r.GetTotalBlocks() || old.GetRemovalsLastCopy() != r.GetRemovalsLastCopy() {
		o := kvindex.Options{GPUBlocks: int(min(r.GetTotalBlocks(), kvindex.MaxBlocks))}
		if r.GetRemovalsLastCopy() {
			o.Removals = kvindex.LastCopy
		}
		return w, &o
	}
	return w, nil
}

// leave notes that a worker left and returns it if it is still known.
func (t *Tracker) leave(r *kvtrackerv1.WorkerReport) *worker {
	t.mu.Lock()
	defer t.mu.Unlock()
	id, at := r.GetWorker(), r.GetSampledUnixNanos()
	if gone, ok := t.left[id]; !ok && len(t.left) < maxWorkers || ok && at > gone {
		t.left[id] = at
	}
	w := t.workers[id]
	if w == nil || w.report != nil && at < w.report.GetSampledUnixNanos() {
		return nil
	}
	return w
}

func (w *worker) isReady(now time.Time) bool {
	return w.report.GetReady() && now.Sub(w.fresh) <= staleAfter
}

// sweep finds workers whose sample became stale, whose index moved, or that
// left unseen.
func (t *Tracker) sweep() {
	for _, w := range t.look() {
		t.remove(w)
	}
}

// look notifies watchers of what changed and returns the workers that left.
func (t *Tracker) look() (gone []*worker) {
	t.mu.Lock()
	defer t.mu.Unlock()
	now := t.now()
	for _, w := range t.workers {
		ready := w.isReady(now)
		if ready != w.ready || w.changed {
			w.ready, w.changed = ready, false
			t.hub.notify(w.id, false)
		}
		if now.Sub(w.seen) > forgetAfter && now.Sub(t.reported) < staleAfter {
			gone = append(gone, w)
		}
	}
	for id, at := range t.left {
		if now.UnixNano()-at > int64(forgetAfter) {
			delete(t.left, id)
		}
	}
	return gone
}

// state describes a worker as watchers see it; nil if it is gone.
func (t *Tracker) state(id string) *kvtrackerv1.WorkerState {
	stats, _ := t.index.Load().Stats(id)
	t.mu.RLock()
	defer t.mu.RUnlock()
	w := t.workers[id]
	if w == nil {
		return nil
	}
	return w.state(t.now(), stats)
}

// ids lists all workers in order.
func (t *Tracker) ids() []string {
	t.mu.RLock()
	defer t.mu.RUnlock()
	out := make([]string, 0, len(t.workers))
	for id := range t.workers {
		out = append(out, id)
	}
	slices.Sort(out)
	return out
}
