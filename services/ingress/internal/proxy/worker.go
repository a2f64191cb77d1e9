package proxy

import (
	"errors"
	"net/http"
	"sync"
	"time"

	"github.com/kinference/kinference/internal/openai"
)

const (
	// ejectable is the share of a group's workers that may be ejected at once:
	// what fails everywhere is no worker's own fault, and somebody must serve.
	ejectable = 0.5
	// maxWorkers bounds the workers that are known; of those that nobody named for
	// forgetAfter none is.
	maxWorkers, forgetAfter = 16384, 10 * time.Minute
	// recent is how long ago a worker was named at most to count as one of its
	// group.
	recent = time.Minute
)

// Worker names a worker of the cluster, and the group of those that could serve
// in its place: its worker set.
type Worker struct{ ID, Group string }

// workers is what is known of the health of workers. Those that fail several
// times in a row are ejected: asked last, but for one request at a time after a
// pause that grows with each failure, the next when its answer has begun. It is safe
// for concurrent use.
type workers struct {
	say func(worker, group string, ejected bool)

	mu  sync.Mutex
	all map[string]*health
}

type health struct {
	Worker
	breaker breaker
	seen    time.Time
}

// named notes that a worker exists and returns what is known of it; nil if too
// many are.
func (w *workers) named(now time.Time, who Worker) *health {
	w.mu.Lock()
	defer w.mu.Unlock()
	h := w.all[who.ID]
	if h == nil {
		if w.all == nil {
			w.all = map[string]*health{}
		}
		if len(w.all) >= maxWorkers && !w.forget(now) {
			return nil
		}
		h = &health{Worker: who}
		w.all[who.ID] = h
	}
	h.seen = now
	return h
}

// forget drops workers that nobody named for long. The lock is held.
func (w *workers) forget(now time.Time) bool {
	for id, h := range w.all {
		if now.Sub(h.seen) > forgetAfter {
			delete(w.all, id)
		}
	}
	return len(w.all) < maxWorkers
}

// full reports whether no further worker of a group may be ejected. The lock is
// held.
func (w *workers) full(now time.Time, who *health) bool {
	known, ejected := 0, 1 // with this one
	for _, h := range w.all {
		if h.Group != who.Group || now.Sub(h.seen) > recent {
			continue
		}
		known++
		if h != who && h.breaker.opened() {
			ejected++
		}
	}
	return float64(ejected) > ejectable*float64(known)
}

// done takes in how an attempt went.
func (w *workers) done(now time.Time, h *health, v verdict, probe bool) {
	w.mu.Lock()
	if v == bad && !h.breaker.opened() && w.full(now, h) {
		v = none
	}
	opened, closed := h.breaker.done(now, v, probe, 0)
	w.mu.Unlock()
	if w.say != nil && (opened || closed) {
		w.say(h.ID, h.Group, opened)
	}
}

// Ejected reports whether a worker is to be asked only if no other one is left,
// because it failed several times in a row. Naming all that could be asked tells
// how many there are, which bounds how many are ejected: half of a group.
func (p *Proxy) Ejected(who Worker) bool {
	now := time.Now()
	h := p.workers.named(now, who)
	return h != nil && !h.breaker.wouldAllow(now)
}

// work makes the attempt at a worker.
func (a *attempt) work(w http.ResponseWriter) {
	now := time.Now()
	var h *health
	if a.c.Worker.ID != "" {
		h = a.p.workers.named(now, a.c.Worker)
	}
	if h == nil {
		a.send(w, a.p.transport)
		return
	}
	_, probe, _ := h.breaker.allow(now) // one that is ejected is asked if the caller has no other
	if probe {
		a.begun = h.breaker.begun
	}
	v := none
	defer func() { a.p.workers.done(time.Now(), h, v, probe) }()
	a.send(w, a.p.transport)
	v = a.blame()
}

// blame says what the attempt tells about the worker.
func (a *attempt) blame() verdict {
	v, _ := a.judge()
	switch {
	case errors.Is(a.r.Cause, errTooLarge), errors.Is(a.r.Cause, openai.ErrEventTooLarge):
		return none // from any worker
	case v == limited, v == bad && a.refusal == http.StatusServiceUnavailable && a.after > 0:
		return none // busy, and able to say so
	case v == bad && a.refusal == http.StatusNotImplemented:
		return none // what the request asks for
	}
	return v
}

// refusedWith notes the status that a worker refused with.
func (a *attempt) refusedWith(status int, h http.Header) {
	a.refusal = status
	if h.Get("Retry-After") != "" {
		a.after = retryAfter(h)
	}
}
