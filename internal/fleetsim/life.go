package fleetsim

import (
	"context"
	"iter"
	"log/slog"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kinference/kinference/internal/fleetsim/engine"
	"github.com/kinference/kinference/internal/vllm"
)

// life is one process of a worker, from start to end.
type life struct {
	w       *Worker
	server  *http.Server
	cores   []*core
	events  []*eventServer
	created int64 // Unix time

	mu   sync.Mutex
	over bool // no more handlers may start

	requests atomic.Int64 // in flight on the generation routes
	nextID   atomic.Uint64
	sleep    atomic.Int32 // sleep level
	paused   atomic.Bool
	aborted  atomic.Uint64
	handlers sync.WaitGroup
	serving  sync.WaitGroup
	cancel   context.CancelFunc
}

// live starts the engines and servers on open sockets, which it owns from here.
func (w *Worker) live(s sockets, n int64) *life {
	l := &life{w: w, created: time.Now().Unix()}
	for rank := range w.cfg.Ranks {
		cfg := engine.Config{
			Profile: w.cfg.Profile, Speed: w.speed(), OnEvents: w.cfg.EventsPort != Off, LastCopyRemovals: w.cfg.LastCopyRemovals,
			LoRAs: w.cfg.LoRAs, Tagged: w.cfg.Version.AtLeast(vllm.V0_31),
			// Every process draws its own seed.
			Seed: w.cfg.Seed + 1_000_003*n + 7919*int64(rank),
		}
		if a := w.cfg.HashAlgorithm; a != "" {
			cfg.Hash = func(uint64) engine.Hasher { return engine.RealHasher(a, w.cfg.HashSeed) }
		}
		var events *eventServer
		if rank < len(s.events) {
			sock := eventSockets{pub: s.events[rank]}
			if rank < len(s.replays) {
				sock.router = s.replays[rank]
			}
			events = serveEvents(sock, w.cfg.Topic, rank, w.cfg.BufferSteps, w.cfg.Version, w.faults)
			l.events = append(l.events, events)
		}
		l.cores = append(l.cores, startCore(engine.New(cfg), w.clock, events))
	}
	var ctx context.Context
	ctx, l.cancel = context.WithCancel(context.Background())
	l.server = &http.Server{
		Handler:           l.handler(),
		ReadHeaderTimeout: 30 * time.Second,
		IdleTimeout:       w.cfg.KeepAlive,
		ErrorLog:          slog.NewLogLogger(slog.DiscardHandler, slog.LevelError),
	}
	l.server.BaseContext = baseContext(ctx)
	l.serving.Go(func() { _ = l.server.Serve(s.http) })
	w.cfg.Log.Info("simulated worker is up", "worker", w.cfg.Name, "address", s.http.Addr().String(), "life", n)
	return l
}

func (w *Worker) speed() float64 {
	if slow := w.faults.get().Slow; slow > 0 {
		return w.cfg.Speed / slow
	}
	return w.cfg.Speed
}

// stop ends the life. Requests get the grace period to finish.
func (l *life) stop(grace time.Duration) {
	if grace > 0 {
		ctx, cancel := context.WithTimeout(context.Background(), grace)
		_ = l.server.Shutdown(ctx)
		cancel()
	}
	l.mu.Lock()
	l.over = true
	l.mu.Unlock()
	_ = l.server.Close()
	l.cancel()
	l.handlers.Wait()
	l.serving.Wait()
	for _, k := range l.cores {
		k.close()
	}
	for _, e := range l.events {
		e.close()
	}
}

// current returns the running life, or nil.
func (w *Worker) current() *life {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.life
}

// SetFaults replaces the worker's faults.
func (w *Worker) SetFaults(f Faults) {
	w.faults.set(f)
	if l := w.current(); l != nil {
		for _, k := range l.cores {
			k.setSpeed(w.speed())
		}
	}
}

// Faults returns the faults that are set, with their counts as far down as
// they have run.
func (w *Worker) Faults() Faults { return w.faults.get() }

// WipeCache empties the prefix caches of all ranks; requests under way are
// computed again. As in vLLM, the event follows with the next iteration. It
// reports false if the worker does not run.
func (w *Worker) WipeCache() bool {
	l := w.current()
	return l != nil && l.resetAll(true)
}

func (l *life) resetAll(force bool) bool {
	ok := true
	for _, k := range l.cores {
		ok = k.reset(force) && ok
	}
	return ok
}

// Stats returns a rank's true state, which /metrics shows a little late. It is
// zero if the worker does not run.
func (w *Worker) Stats(rank int) engine.Stats {
	if l := w.current(); l != nil && rank >= 0 && rank < len(l.cores) {
		return l.cores[rank].state()
	}
	return engine.Stats{}
}

// EventStats returns what a rank's event socket did in this life.
func (w *Worker) EventStats(rank int) EventStats {
	if l := w.current(); l != nil && rank >= 0 && rank < len(l.events) {
		return l.events[rank].snapshot()
	}
	return EventStats{}
}

// InFlight counts the HTTP requests for generation under way.
func (w *Worker) InFlight() int {
	if l := w.current(); l != nil {
		return int(l.requests.Load())
	}
	return 0
}

// Aborted counts the requests of this life whose client went away.
func (w *Worker) Aborted() int {
	if l := w.current(); l != nil {
		return int(l.aborted.Load())
	}
	return 0
}

// Cached yields the true contents of a rank's cache, for comparison with what
// its events say. The engine stands still meanwhile: do not linger. An
// iteration under way has changed the cache already, and will announce it when
// it ends.
func (w *Worker) Cached(rank int) iter.Seq[engine.CachedBlock] {
	return func(yield func(engine.CachedBlock) bool) {
		l := w.current()
		if l == nil || rank < 0 || rank >= len(l.cores) {
			return
		}
		k := l.cores[rank]
		k.mu.Lock()
		defer k.mu.Unlock()
		k.eng.Cached()(yield)
	}
}
