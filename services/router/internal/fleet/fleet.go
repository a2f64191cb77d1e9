// Package fleet knows the state of every worker: whether it is ready, its
// load, its block size and its longest context.
//
// kvtracker's streams (package trackers) are the source while they flow. What it does not say, and
// everything while it is away, comes from a light probe of the endpoints. The
// router asks for each candidate of each decision. A Table is safe for
// concurrent use; its loops retry for ever and end with their context.
package fleet

import (
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/kinference/kinference/internal/policy"
	"github.com/kinference/kinference/internal/window"
	kvtrackerv1 "github.com/kinference/kinference/proto/gen/kinference/kvtracker/v1"
)

// State is what is known of one worker (engine rank).
type State struct {
	Ready bool
	// Why says why the worker is not ready.
	Why string
	// Suspect says that it is not only because it refused a connection a moment ago
	// or closed one: it is still better than none.
	Suspect bool
	// Running, Waiting and KVUsage are the engine's gauges, sampled at Sampled; the
	// zero time means never.
	Running, Waiting, KVUsage float64
	Sampled                   time.Time
	// Mean30s is the mean over the 30 s before Sampled. Who waits in line for the
	// worker counts among its waiting, here and in all means: it would be in the
	// engine's queue if the router did not hold it.
	Mean30s window.Load
	// BlockSize in tokens and TotalBlocks are 0 while unknown.
	BlockSize, TotalBlocks int
	// Epoch names the engine process; empty while unknown.
	Epoch string
	// Index is what the tracker says of the worker's index; nil: nothing.
	Index *kvtrackerv1.IndexState
	// Held are thresholds that the load has been above without coming down to
	// where they end since.
	Held []policy.Threshold

	maxLen map[string]int
}

// MaxModelLen is the longest context that the endpoint allows for a model of
// its /v1/models; 0 while unknown.
func (s *State) MaxModelLen(model string) int { return s.maxLen[model] }

// Table holds the states. Use New.
type Table struct {
	// onRestart is called, without the lock, with a worker whose engine was
	// restarted.
	onRestart func(worker string)
	// onSamples is called, without the lock, with the workers that a message had
	// gauges of.
	onSamples func(now time.Time, samples []Sample)
	// inLine tells, without the lock, how many requests wait in line for each worker.
	inLine func() map[string]int
	// changed gets a token when readiness, an epoch or what is learned has changed.
	changed chan struct{}
	// learned gets one when an endpoint serves other models than before.
	learned chan struct{}
	// kick wakes the prober.
	kick chan struct{}

	mu        sync.RWMutex
	tracked   map[string]*tracked
	flowing   bool // a tracker's stream is open and complete
	endpoints []Endpoint
	probed    map[string]probed
	suspects  map[string]time.Time
	ended     map[string]bool // endpoints whose Pod ends, until the catalog is without them
	longest   time.Duration   // of the means that policies look at; 0: 30 s are enough
	watched   []policy.Threshold
}

type tracked struct {
	State
	history *window.Window // nil while no policy needs it
	line    *window.Window // who waits in line for it
	set     string
	live    bool // the index follows it
	clears  uint64
	asOf    time.Time // of the sample behind it
}

// probed is the newest answer of an endpoint.
type probed struct {
	at     time.Time
	ok     bool
	maxLen map[string]int // by model name
}

// Sample is a worker with its newest gauges.
type Sample struct {
	Worker string
	State  State
}

// OnSamples makes the table tell of gauges when they come, before the first message.
func (t *Table) OnSamples(f func(now time.Time, samples []Sample)) { t.onSamples = f }

// CountLine makes the table ask who waits in line for each worker, before the first
// message. f is called for each message.
func (t *Table) CountLine(f func() map[string]int) { t.inLine = f }

// New returns an empty table. onRestart may be nil.
func New(onRestart func(worker string)) *Table {
	if onRestart == nil {
		onRestart = func(string) {}
	}
	return &Table{
		onRestart: onRestart,
		inLine:    func() map[string]int { return nil },
		changed:   make(chan struct{}, 1),
		learned:   make(chan struct{}, 1),
		kick:      make(chan struct{}, 1),
		tracked:   map[string]*tracked{},
		probed:    map[string]probed{},
		suspects:  map[string]time.Time{},
		ended:     map[string]bool{},
	}
}

// Changed receives after the readiness of a worker, its epoch, a block size or a
// context length has changed. Changes in quick succession may be one token.
func (t *Table) Changed() <-chan struct{} { return t.changed }

// Learned receives after an endpoint was found to serve other models.
func (t *Table) Learned() <-chan struct{} { return t.learned }

// Served lists the models of an endpoint's /v1/models, by name; nil while unknown.
func (t *Table) Served(uid string) []string {
	t.mu.RLock()
	defer t.mu.RUnlock()
	return slices.Sorted(maps.Keys(t.probed[uid].maxLen))
}

func notify(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// How old the tracker's word on a worker may be to count without question.
// When a relay dies, all of its workers look as if they had stopped answering:
// a report of trouble is to be checked soon.
const (
	trustReady    = 5 * time.Second
	trustNotReady = 1500 * time.Millisecond
)

// trusted tells whether the tracker's word needs no probe beside it.
func (t *Table) trusted(tr *tracked, now time.Time) bool {
	limit := trustNotReady
	if tr.Ready {
		limit = trustReady
	}
	return t.flowing && now.Sub(tr.asOf) < limit
}

// Lookup returns the state of rank id of the endpoint uid. Of the tracker's
// word and the probe's the newer one counts, unless the former is fresh.
func (t *Table) Lookup(now time.Time, uid, id string) State {
	t.mu.RLock()
	defer t.mu.RUnlock()
	var s State
	tr := t.tracked[id]
	if tr != nil {
		s = tr.State
	}
	p, known := t.probed[uid]
	s.maxLen = p.maxLen
	if t.ended[uid] {
		s.Ready, s.Why = false, "its Pod ends"
		return s
	}
	if tr != nil && (t.trusted(tr, now) || !known || p.at.Before(tr.asOf)) {
		if !s.Ready {
			s.Why = "not ready: its health check or metrics fail"
		}
	} else if s.Ready = known && p.ok; !s.Ready {
		s.Why = "not ready: no answer to the probe"
	}
	if until, ok := t.suspects[uid]; ok && s.Ready && now.Before(until) {
		s.Ready, s.Suspect, s.Why = false, true, "refused a connection a moment ago"
	}
	return s
}

// Keep makes the table keep the load of workers for means over that long, 0 for
// none but Mean30s, and note which of these thresholds each was above.
func (t *Table) Keep(longest time.Duration, thresholds []policy.Threshold) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.longest, t.watched = longest, thresholds
}

// Mean is the mean load of a worker over some time before its newest sample, as
// long as Keep says; false while nothing is kept.
func (t *Table) Mean(id string, over time.Duration) (window.Load, bool) {
	t.mu.RLock()
	defer t.mu.RUnlock()
	if tr := t.tracked[id]; tr != nil && tr.history != nil {
		return tr.history.Mean(over), true
	}
	return window.Load{}, false
}

// due lists the endpoints that a probe can tell something about: those that the
// tracker does not call ready, and those that never were asked. One that was
// asked less than gap ago is left alone.
func (t *Table) due(now time.Time, gap time.Duration) []Endpoint {
	t.mu.RLock()
	defer t.mu.RUnlock()
	fine := map[string]bool{}
	for id, tr := range t.tracked {
		uid := id[:max(0, strings.LastIndexByte(id, '/'))]
		ok, seen := fine[uid]
		fine[uid] = (ok || !seen) && tr.Ready && t.trusted(tr, now)
	}
	var due []Endpoint
	for _, e := range t.endpoints {
		if p, asked := t.probed[e.UID]; !asked || !fine[e.UID] && now.Sub(p.at) >= gap {
			due = append(due, e)
		}
	}
	return due
}

// BlockSize returns the block size that most workers of a set use; 0 while
// none is known.
func (t *Table) BlockSize(set string) int {
	t.mu.RLock()
	defer t.mu.RUnlock()
	votes := map[int]int{}
	best := 0
	for _, tr := range t.tracked {
		if n := tr.BlockSize; tr.set == set && n > 0 {
			votes[n]++
			if v := votes[n] - votes[best]; best == 0 || v > 0 || v == 0 && n < best {
				best = n
			}
		}
	}
	return best
}

// MaxModelLen returns the longest context that all of the endpoints which
// serve the model allow, as they said; 0 while unknown.
func (t *Table) MaxModelLen(uids []string, model string) int {
	t.mu.RLock()
	defer t.mu.RUnlock()
	least := 0
	for _, uid := range uids {
		if n := t.probed[uid].maxLen[model]; n > 0 && (least == 0 || n < least) {
			least = n
		}
	}
	return least
}

// suspicion is how long a worker that refused a connection is left alone:
// longer than the tracker needs to notice that it is gone.
const suspicion = 2 * time.Second

// Suspect notes that an endpoint refused a connection or closed it. It counts
// as not ready for a moment, else its empty queue would attract everybody.
func (t *Table) Suspect(now time.Time, uid string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, e := range t.endpoints { // bounds the map by the catalog
		if e.UID == uid {
			t.suspects[uid] = now.Add(suspicion)
		}
	}
}

// Ended notes that a Pod ends: its endpoints are not ready any more, whatever
// they answer, while the catalog that is without them is made. The uid is the
// Pod's, which is the last part of those of its endpoints.
func (t *Table) Ended(pod string) {
	t.mu.Lock()
	found := false
	for _, e := range t.endpoints { // bounds the map by the catalog
		if _, port, ok := strings.Cut(e.UID, "."+pod); ok && (port == "" || port[0] == '-') {
			t.ended[e.UID], found = true, true
		}
	}
	t.mu.Unlock()
	if found {
		notify(t.changed)
	}
}

// Value is a metric of a load.
func Value(m policy.Metric, l *window.Load) float64 {
	switch m {
	case policy.QueuedPrompts:
		return l.Waiting
	case policy.RunningPrompts:
		return l.Running
	}
	return l.KVUsage
}

// hold notes which thresholds the load is above now, or was above and has not
// come down enough.
func (tr *tracked) hold(thresholds []policy.Threshold) {
	var held []policy.Threshold
	for _, h := range thresholds {
		mean := tr.Mean30s
		if h.Window != policy.DefaultWindow && tr.history != nil {
			mean = tr.history.Mean(h.Window)
		}
		if v := Value(h.Metric, &mean); v > h.Above || v > h.Until && slices.Contains(tr.Held, h) {
			held = append(held, h)
		}
	}
	tr.Held = held
}

// Flowing tells whether a tracker's stream is open and complete.
func (t *Table) Flowing() bool {
	t.mu.RLock()
	defer t.mu.RUnlock()
	return t.flowing
}

// Away notes that no tracker is followed any more.
func (t *Table) Away() {
	t.mu.Lock()
	was := t.flowing
	t.flowing = false
	t.mu.Unlock()
	if was {
		notify(t.kick)
		notify(t.changed)
	}
}

// Update takes one message of the stream, which arrived at now.
func (t *Table) Update(now time.Time, m *kvtrackerv1.WatchWorkersResponse) { t.update(now, m, false) }

// Switch takes one of another tracker than before: what that has counted is not compared.
func (t *Table) Switch(now time.Time, m *kvtrackerv1.WatchWorkersResponse) { t.update(now, m, true) }

func (t *Table) update(now time.Time, m *kvtrackerv1.WatchWorkersResponse, other bool) {
	var restarted []string
	var samples []Sample
	changed, trouble := false, false
	line := t.inLine()
	t.mu.Lock()
	for _, w := range m.Workers {
		old := t.tracked[w.Worker]
		// Without a sample the tracker has heard its events but not its state:
		// asOf stays zero, and a probe's word counts more.
		tr := &tracked{set: w.WorkerSet}
		tr.Ready, tr.live, tr.clears = w.Ready, w.Index.GetLive(), w.Clears
		tr.Epoch, tr.Index = w.Epoch, w.Index
		tr.BlockSize, tr.TotalBlocks = int(w.BlockSize), int(min(w.TotalBlocks, 1<<40))
		if l := w.Load; l != nil {
			tr.Running, tr.Waiting, tr.KVUsage = l.Running, l.Waiting, l.KvUsage
			tr.Sampled = now.Add(-w.SampleAge.AsDuration())
			tr.asOf = tr.Sampled
			held := window.Load{Waiting: float64(line[w.Worker])}
			if old != nil {
				tr.line = old.line
			}
			if tr.line == nil {
				tr.line = window.New(policy.DefaultWindow, trustReady)
			}
			tr.line.Add(tr.Sampled, held)
			if m := w.LoadMean_30S; m != nil {
				tr.Mean30s = window.Load{Running: m.Running, Waiting: m.Waiting + tr.line.Mean(policy.DefaultWindow).Waiting, KVUsage: m.KvUsage}
			}
			if t.longest > 0 {
				if old != nil && old.history != nil && old.history.Length() >= t.longest {
					tr.history = old.history
				} else {
					tr.history = window.New(t.longest, trustReady)
				}
				tr.history.Add(tr.Sampled, window.Load{Running: l.Running, Waiting: l.Waiting + held.Waiting, KVUsage: l.KvUsage})
			}
			if old != nil {
				tr.Held = old.Held
			}
			tr.hold(t.watched)
			if t.onSamples != nil {
				samples = append(samples, Sample{w.Worker, tr.State})
			}
		}
		t.tracked[w.Worker] = tr
		if old == nil || old.Ready != tr.Ready || old.BlockSize != tr.BlockSize || old.Epoch != tr.Epoch {
			changed = true
			trouble = trouble || !tr.Ready
		}
		// The cache is gone, or the connection was lost: who answers next may be
		// another process.
		if old != nil && old.Epoch != "" && (old.Epoch != tr.Epoch || !other && (tr.clears > old.clears || old.live && !tr.live)) {
			restarted = append(restarted, w.Worker)
		}
	}
	for _, id := range m.Removed {
		delete(t.tracked, id)
		changed = true
	}
	if m.Synced && !t.flowing {
		t.flowing, changed = true, true
	}
	t.mu.Unlock()
	for _, id := range restarted {
		t.onRestart(id)
	}
	if len(samples) > 0 {
		t.onSamples(now, samples)
	}
	if trouble {
		notify(t.kick)
	}
	if changed {
		notify(t.changed)
	}
}
