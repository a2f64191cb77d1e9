package limits

import (
	"sync"
	"time"
)

// Occupancy splits the time of workers among the requests that run on them: at
// each moment all of them have the same part. It knows only of the requests of
// this process, so with several of them the sum may exceed the time that went
// by; what tenants are billed is worked out from the engines' own counts by
// accounting. The zero value is ready. It is safe for concurrent use.
type Occupancy struct {
	mu      sync.Mutex
	workers map[string]*occupied // those with requests
}

// occupied has a clock that runs at the speed of one request's part.
type occupied struct {
	requests int
	part     time.Duration
	last     time.Time
}

func (o *occupied) advance(now time.Time) {
	if d := now.Sub(o.last); d > 0 {
		o.part += d / time.Duration(o.requests)
		o.last = now
	}
}

// Enter begins a request at a worker. The result ends it, at most once, and
// tells its part of the worker's time.
func (o *Occupancy) Enter(worker string, now time.Time) func(now time.Time) time.Duration {
	o.mu.Lock()
	defer o.mu.Unlock()
	w := o.workers[worker]
	if w == nil {
		if o.workers == nil {
			o.workers = map[string]*occupied{}
		}
		w = &occupied{last: now}
		o.workers[worker] = w
	} else {
		w.advance(now)
	}
	w.requests++
	began := w.part
	return func(now time.Time) time.Duration {
		o.mu.Lock()
		defer o.mu.Unlock()
		w.advance(now)
		if w.requests--; w.requests == 0 {
			delete(o.workers, worker)
		}
		return w.part - began
	}
}
