package limit

import (
	"sync"
	"time"
)

// breaker spares calls while the limiter fails: after a few failures in a row
// none is made for a pause, then one tries.
type breaker struct {
	mu     sync.Mutex
	failed int
	until  time.Time
	trying bool
}

const (
	breakerFailures = 5
	breakerPause    = 500 * time.Millisecond
)

// admit reports whether a call may be made now, and if it is a try, for done.
func (b *breaker) admit() (ok, try bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case b.failed < breakerFailures:
		return true, false
	case b.trying || time.Now().Before(b.until):
		return false, false
	}
	b.trying = true
	return true, true
}

// done tells how a call ended; neutral ones tell nothing.
func (b *breaker) done(try, failed, neutral bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if try {
		b.trying = false
	}
	switch {
	case neutral:
	case failed:
		b.failed++
		b.until = time.Now().Add(breakerPause)
	default:
		b.failed = 0
	}
}

func (b *breaker) open() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.failed >= breakerFailures
}
