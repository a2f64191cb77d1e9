package proxy

import (
	"context"
	"errors"
	"sync"
)

// errLost ends an attempt that another one was faster than.
var errLost = errors.New("another endpoint had content first")

// Race is between attempts for the same client. The first one that has content
// answers it; the others end as Lost without having written anything. The zero
// value is ready. It is safe for concurrent use.
type Race struct {
	mu     sync.Mutex
	winner *attempt
	losers map[*attempt]context.CancelCauseFunc // while the race is open: all
}

// Won reports whether an attempt has won.
func (r *Race) Won() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.winner != nil
}

// enter adds an attempt. One that comes too late is lost at once.
func (r *Race) enter(a *attempt) {
	if r == nil {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.winner != nil {
		a.cancel(errLost)
		return
	}
	if r.losers == nil {
		r.losers = map[*attempt]context.CancelCauseFunc{}
	}
	r.losers[a] = a.cancel
}

// leave removes an attempt that is over.
func (r *Race) leave(a *attempt) {
	if r == nil {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.losers, a)
}

// claim reports whether the client is the attempt's, which ends all others. A
// nil race is always won.
func (r *Race) claim(a *attempt) bool {
	if r == nil {
		return true
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.winner != nil {
		return r.winner == a
	}
	r.winner = a
	for other, cancel := range r.losers {
		if other != a {
			cancel(errLost)
		}
	}
	return true
}
