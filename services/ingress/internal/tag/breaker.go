package tag

import (
	"sync"
	"time"
)

// State of a breaker.
type State int

// The states: calls pass; one call passes, to see; none passes.
const (
	Closed State = iota
	HalfOpen
	Open
)

const (
	// maxFailures in a row open the breaker.
	maxFailures = 5
	// leastOpen and mostOpen bound how long it stays open; the time doubles while
	// nothing gets better.
	leastOpen, mostOpen = time.Second, 15 * time.Second
)

// breaker spares requests the wait for a classifier that does not answer. The
// zero value is closed.
type breaker struct {
	mu       sync.Mutex
	failures int
	open     time.Duration // how long it opened last; 0: it is closed
	until    time.Time
	probing  bool
}

// allow reports whether a call may be made; done must follow if so.
func (b *breaker) allow(now time.Time) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.open == 0 {
		return true
	}
	if b.probing || now.Before(b.until) {
		return false
	}
	b.probing = true
	return true
}

// outcome of a call, for the breaker.
type outcome int

const (
	worked outcome = iota
	failed
	neither // the caller left before it was known
)

func (b *breaker) done(now time.Time, o outcome) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.probing = false
	switch o {
	case worked:
		b.failures, b.open = 0, 0
	case failed:
		if b.failures++; b.failures < maxFailures && b.open == 0 {
			return
		}
		if now.Before(b.until) {
			return // calls that were on their way when it opened
		}
		b.open = min(max(2*b.open, leastOpen), mostOpen)
		b.until = now.Add(b.open)
	case neither:
	}
}

func (b *breaker) state(now time.Time) State {
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case b.open == 0:
		return Closed
	case b.probing || !now.Before(b.until):
		return HalfOpen
	}
	return Open
}
