package limit

import (
	"sync"
	"time"

	limiterv1 "github.com/kinference/kinference/proto/gen/kinference/limiter/v1"
)

// fallback is a bucket of this process while the limiter is away: a part of
// what the bucket had left when it was last heard of, and of its refill.
type fallback struct {
	mu       sync.Mutex
	level    float64
	most     float64
	rate     float64 // a second
	then     time.Time
	set      bool
	capacity int64
}

// newFallback takes one of n parts of b, whose last known state is st or nil.
func newFallback(b *limiterv1.Bucket, st *limiterv1.State, n int, now time.Time) *fallback {
	f := &fallback{then: now, capacity: capacity(b), set: b.GetConcurrency() != nil}
	parts := float64(max(n, 1))
	f.most = float64(f.capacity) / parts
	if f.set {
		// A part of a permit is of no use; none at all would stop everybody.
		if f.most = max(f.most, 1); f.capacity == 0 {
			f.most = 0
		}
	}
	f.level = f.most
	if st != nil && !f.set {
		f.level = min(f.most, float64(st.GetRemaining())/parts)
	}
	if w := b.GetWindow(); w.GetPeriod().AsDuration() > 0 {
		f.rate = float64(w.GetLimit()) / w.GetPeriod().AsDuration().Seconds() / parts
	}
	return f
}

// take reserves; if there is no room it says how long that takes, 0 for never.
// shadow takes whatever there is.
func (f *fallback) take(amount int64, shadow bool, now time.Time) (ok bool, wait time.Duration, st *limiterv1.State) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if d := now.Sub(f.then); d > 0 {
		f.level = min(f.most, f.level+f.rate*d.Seconds())
		f.then = now
	}
	need := float64(max(amount, 1))
	st = &limiterv1.State{Limit: f.capacity, Remaining: int64(f.level)}
	if f.level < need && !shadow {
		switch {
		case f.set:
			wait = time.Second
		case need <= f.most && f.rate > 0:
			wait = time.Duration((need - f.level) / f.rate * float64(time.Second))
		}
		st.Refused = true
		return false, wait, st
	}
	f.level -= float64(amount)
	st.Remaining = int64(f.level)
	return true, 0, st
}

func (f *fallback) settle(reserved, amount int64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.set {
		amount = 0
	}
	f.level = max(min(f.most, f.level+float64(reserved)-float64(amount)), -f.most)
}
