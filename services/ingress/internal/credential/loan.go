package credential

import (
	"context"
	"sync"
	"time"

	"github.com/kinference/kinference/internal/provider"
)

const (
	// early is how long before their end keys and tokens are replaced, or a fifth of
	// the time that they hold if that is shorter, and again how long to wait after that
	// failed.
	early, again = 5 * time.Minute, 10 * time.Second
)

// loans are keys and tokens that others give for a while, by what they are given for.
// The zero value is ready. It is safe for concurrent use.
type loans struct {
	mu   sync.Mutex
	kept map[string]*loan
}

// loan is one of them. All its fields are of whoever has the turn, who may be asking.
type loan struct {
	turn   chan struct{} // of one
	keys   provider.Credentials
	until  time.Time
	fresh  time.Time // to be replaced after
	failed time.Time // when asking was last in vain
	reason error     // of that
}

// get returns what is lent for key. If there is none, or its end is near, ask gets it,
// and tells its end; while that fails the old one is used until it ends. Only one
// caller at a time asks; others wait for that until ctx is done. clock may be nil: the real one.
func (l *loans) get(ctx context.Context, key string, clock func() time.Time, ask func(now time.Time) (provider.Credentials, time.Time, error)) (c provider.Credentials, err error) {
	if clock == nil {
		clock = time.Now
	}
	l.mu.Lock()
	e := l.kept[key]
	if e == nil {
		if l.kept == nil || len(l.kept) >= maxKept {
			l.kept = map[string]*loan{}
		}
		e = &loan{turn: make(chan struct{}, 1)}
		l.kept[key] = e
	}
	l.mu.Unlock()
	select {
	case e.turn <- struct{}{}:
		defer func() { <-e.turn }()
	case <-ctx.Done():
		return c, context.Cause(ctx)
	}
	now := clock()
	valid := now.Before(e.until)
	recent := e.reason != nil && now.Sub(e.failed) < again
	switch {
	case valid && (now.Before(e.fresh) || recent):
		return e.keys, nil
	case recent:
		return c, e.reason
	}
	keys, until, err := ask(now)
	switch {
	case err == nil:
		e.keys, e.until, e.fresh, e.reason = keys, until, until.Add(-min(early, until.Sub(now)/5)), nil
		return keys, nil
	case ctx.Err() == nil: // else the request ended, which says nothing
		e.failed, e.reason = clock(), err // it may have taken long, and those who waited for their turn must not try as well
	}
	if valid {
		return e.keys, nil
	}
	return c, err
}
