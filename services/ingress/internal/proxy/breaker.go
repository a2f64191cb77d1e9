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
	// share of the requests may be followed by a try elsewhere, and spare such tries
	// are there where there are few. What was not needed is kept for so many tries
	// as there are in memory of requests, so that the loss of one worker among few
	// finds enough.
	share, spare, memory = 0.2, 10, 10 * time.Second
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
// it is open none goes there; after that one at a time waits for its answer to
// begin, until one was answered whole.
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

// wouldAllow is allow without taking the place of the probe.
func (b *breaker) wouldAllow(now time.Time) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.wait == 0 || !now.Before(b.until) && !b.probing
}

// opened reports whether the breaker is not closed.
func (b *breaker) opened() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.wait > 0
}

// begun notes that the answer to the probe has begun, so that the next request may
// try: a stream can take half an hour to its end.
func (b *breaker) begun() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.probing = false
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
	decides := probe && b.wait > 0 && !now.Before(b.until) // no other probe was faster
	switch v {
	case good:
		b.row = 0
		if decides {
			b.wait = 0
			return false, true
		}
	case limited:
		return b.open(now, max(after, pause)), false
	case bad:
		if b.row++; decides || b.wait == 0 && b.row >= failures {
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

// Budget bounds the tries that failures and slowness cause elsewhere, so that an
// outage does not become a wave of requests for others: a fifth of the requests,
// and ten more. The zero value is ready. It is safe for concurrent use.
type Budget struct {
	mu        sync.Mutex
	tokens    float64
	began     time.Time // of the span of time that now counts
	now, last float64   // requests in it and in the one before
}

// Sent counts a request.
func (b *Budget) Sent(now time.Time) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.began.IsZero() {
		b.began, b.tokens = now, spare
	}
	if d := now.Sub(b.began); d >= memory {
		b.began, b.last, b.now = now, b.now, 0
		if d >= 2*memory {
			b.last = 0
		}
	}
	b.now++
	b.tokens = min(b.tokens+share, max(spare, share*(b.now+b.last)))
}

// Take reports whether there may be one more try, and counts it.
func (b *Budget) Take() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.tokens < 1 {
		return false
	}
	b.tokens--
	return true
}

// Back takes back a Take whose try was not made.
func (b *Budget) Back() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.tokens++
}
