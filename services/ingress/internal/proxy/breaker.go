package proxy

import (
	"sync"
	"time"
)

const (
	// failures in a row open a breaker.
	failures = 5
	// pause is how long it then stays open, twice as long each time that the
	// next request fails too, up to maxPause.
	pause, maxPause = time.Second, time.Minute
	// share of a provider's requests may be followed by a try elsewhere, and
	// spare such tries are there for one that gets few.
	share, spare = 0.2, 10
)

// verdict is what an attempt says about the provider.
type verdict int

const (
	none verdict = iota // a fault of the request, or the client left
	good
	bad
	limited // it wants to be left alone for a while
)

// breaker keeps requests from a model of a provider that does not answer. While
// it is open none goes there; after that one at a time, until one is answered.
type breaker struct {
	mu      sync.Mutex
	row     int // failures in a row
	until   time.Time
	wait    time.Duration // of the last pause; 0: closed
	probing bool
}

// allow reports whether a request may go there now; probe says that it is the
// one that the breaker depends on. If not, wait tells how long to stay away.
func (b *breaker) allow(now time.Time) (ok, probe bool, wait time.Duration) {
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case b.wait == 0:
		return true, false, 0
	case now.Before(b.until):
		return false, false, b.until.Sub(now)
	case b.probing:
		return false, false, pause
	}
	b.probing = true
	return true, true, 0
}

// done takes in how a request went that was allowed. It reports whether the
// breaker opened or closed by it. after is how long the provider wants to be
// left alone.
func (b *breaker) done(now time.Time, v verdict, probe bool, after time.Duration) (opened, closed bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if probe {
		b.probing = false
	}
	switch v {
	case good:
		b.row = 0
		if probe {
			b.wait = 0
			return false, true
		}
	case limited:
		return b.open(now, max(after, pause)), false
	case bad:
		if b.row++; probe || b.wait == 0 && b.row >= failures {
			return b.open(now, min(max(2*b.wait, pause), maxPause)), false
		}
	}
	return false, false
}

// open opens the breaker, or keeps it open for longer. The lock is held.
func (b *breaker) open(now time.Time, wait time.Duration) bool {
	was := b.wait > 0 && now.Before(b.until)
	if until := now.Add(wait); until.After(b.until) {
		b.until = until
	}
	b.wait = min(wait, maxPause)
	return !was
}

// budget bounds the tries that the failures of a provider cause elsewhere, so
// that its outage does not become a wave of requests for others.
type budget struct {
	mu     sync.Mutex
	begun  bool
	tokens float64
}

// sent counts a request.
func (b *budget) sent() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.begun {
		b.begun, b.tokens = true, spare
	}
	b.tokens = min(b.tokens+share, spare)
}

// take reports whether there may be one more try.
func (b *budget) take() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.tokens < 1 {
		return false
	}
	b.tokens--
	return true
}
