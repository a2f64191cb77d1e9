package accounting

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/kinference/kinference/internal/bus"
	kvtrackerv1 "github.com/kinference/kinference/proto/gen/kinference/kvtracker/v1"
	"github.com/kinference/kinference/services/accounting/internal/gputime"
)

// Bounds of what is remembered of workers: a sample a second for an hour and a
// half each.
const (
	sampleEvery = 900 * time.Millisecond
	maxSamples  = 5400
	maxWatched  = 2000
)

// A report this far behind the newest one, that long after it came, says that the
// relay's clock was set back, as to a kvtracker: stored reports are up to 5 s old.
const (
	clockStep = 10.0 // seconds
	stepAfter = 2 * time.Second
)

// watched remembers the states of workers. It is safe for concurrent use.
type watched struct {
	mu      sync.Mutex
	workers map[string]*history
}

// history is one worker's. States are in the order of time.
type history struct {
	set         string
	totalBlocks uint64
	blockSize   uint32
	states      []gputime.State
	heard       time.Time // when the newest one came, by our clock
}

func newWatched() *watched { return &watched{workers: map[string]*history{}} }

func (w *watched) follow(ctx context.Context, conn *bus.Conn) error {
	return conn.ConsumeReports(ctx, w.add, nil)
}

func (w *watched) add(r *kvtrackerv1.WorkerReport) {
	at := float64(r.GetSampledUnixNanos()) / 1e9
	if r.GetGone() || r.GetLoad() == nil || at <= 0 {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	h := w.workers[r.GetWorker()]
	if h == nil {
		if len(w.workers) >= maxWatched {
			w.forget(at)
		}
		if len(w.workers) >= maxWatched {
			return
		}
		h = &history{}
		w.workers[r.GetWorker()] = h
	}
	h.set = r.GetWorkerSet()
	if n := r.GetTotalBlocks(); n > 0 {
		h.totalBlocks, h.blockSize = n, r.GetBlockSize()
	}
	s := gputime.State{Worker: r.GetWorker(), At: at, Running: r.GetLoad().GetRunning(), Waiting: r.GetLoad().GetWaiting(), KVUsage: r.GetLoad().GetKvUsage()}
	now := time.Now()
	if n := len(h.states); n > 0 && h.states[n-1].At-at >= clockStep && now.Sub(h.heard) > stepAfter {
		// What was said of later times is of a clock that was wrong.
		h.states = slices.DeleteFunc(h.states, func(s gputime.State) bool { return s.At >= at })
	}
	if n := len(h.states); n > 0 {
		if at-h.states[n-1].At < sampleEvery.Seconds() {
			return // a part of the samples is as true as all
		}
		if n >= maxSamples {
			h.states = slices.Delete(h.states, 0, maxSamples/4)
		}
	}
	h.states, h.heard = append(h.states, s), now
}

// forget drops workers of which nothing was heard for an hour.
func (w *watched) forget(now float64) {
	for id, h := range w.workers {
		if n := len(h.states); n == 0 || now-h.states[n-1].At > 3600 {
			delete(w.workers, id)
		}
	}
}

// seen is what was seen of the workers of one set.
type seen struct {
	states      []gputime.State
	workers     int // of which something was heard in the last minute of the span
	totalBlocks uint64
	blockSize   uint32
}

// between returns what was seen of each worker set in a span of time, as Unix
// seconds.
func (w *watched) between(from, to float64) map[string]*seen {
	w.mu.Lock()
	defer w.mu.Unlock()
	out := map[string]*seen{}
	for _, h := range w.workers {
		last := 0.0
		for _, s := range h.states {
			if s.At < from || s.At > to {
				continue
			}
			if out[h.set] == nil {
				out[h.set] = &seen{}
			}
			out[h.set].states = append(out[h.set].states, s)
			last = s.At
		}
		if last > 0 {
			o := out[h.set]
			o.totalBlocks, o.blockSize = max(o.totalBlocks, h.totalBlocks), max(o.blockSize, h.blockSize)
			if last > to-60 {
				o.workers++
			}
		}
	}
	return out
}
