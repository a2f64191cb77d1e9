package limiter

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/kinference/kinference/services/limiter/internal/store"
)

// guard bounds the time of calls to a store and spares it calls while it fails:
// after so many failures in a row it is not asked for a pause, then one call
// tries, and the others follow when that succeeds.
type guard struct {
	store.Store
	timeout  time.Duration
	failures int
	pause    time.Duration

	mu     sync.Mutex
	failed int       // in a row
	until  time.Time // not asked before
	trying bool

	// observed is told of each call that was made, opened of a closed breaker.
	observed func(call string, took time.Duration, err error)
	opened   func()
}

var _ store.Store = (*guard)(nil)

var errOpen = fmt.Errorf("%w: it failed before", store.ErrUnavailable)

// admit reports whether a call may be made, and if it is a try.
func (g *guard) admit() (try bool, err error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.failed < g.failures {
		return false, nil
	}
	if g.trying || time.Now().Before(g.until) {
		return false, errOpen
	}
	g.trying = true
	return true, nil
}

func (g *guard) done(try bool, err error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if try {
		g.trying = false
	}
	switch {
	case err == nil || errors.Is(err, store.ErrFull):
		g.failed = 0
	case errors.Is(err, context.Canceled):
		// The caller left; that says nothing of the store.
	default:
		g.failed++
		if g.failed >= g.failures {
			g.until = time.Now().Add(g.pause)
			if g.failed == g.failures {
				g.opened()
			}
		}
	}
}

// open reports whether the store is not asked.
func (g *guard) open() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.failed >= g.failures
}

// do makes one call within the timeout.
func (g *guard) do(ctx context.Context, call string, f func(context.Context) error) error {
	try, err := g.admit()
	if err != nil {
		return err
	}
	start := time.Now()
	bounded, cancel := context.WithTimeout(ctx, g.timeout)
	err = f(bounded)
	cancel()
	if err != nil && ctx.Err() != nil {
		err = ctx.Err()
	}
	g.done(try, err)
	g.observed(call, time.Since(start), err)
	return err
}

func (g *guard) Reserve(ctx context.Context, org, id string, ttl time.Duration, cs []store.Charge) (r store.Result, err error) {
	err = g.do(ctx, "reserve", func(ctx context.Context) (err error) {
		r, err = g.Store.Reserve(ctx, org, id, ttl, cs)
		return err
	})
	return r, err
}

func (g *guard) Commit(ctx context.Context, org, id string, cs []store.Charge) (r store.Result, err error) {
	err = g.do(ctx, "commit", func(ctx context.Context) (err error) {
		r, err = g.Store.Commit(ctx, org, id, cs)
		return err
	})
	return r, err
}

func (g *guard) Release(ctx context.Context, org, id string) (r store.Result, err error) {
	err = g.do(ctx, "release", func(ctx context.Context) (err error) {
		r, err = g.Store.Release(ctx, org, id)
		return err
	})
	return r, err
}

func (g *guard) Extend(ctx context.Context, org string, ids []string, ttl time.Duration) (unknown []string, r store.Result, err error) {
	err = g.do(ctx, "extend", func(ctx context.Context) (err error) {
		unknown, r, err = g.Store.Extend(ctx, org, ids, ttl)
		return err
	})
	return unknown, r, err
}

func (g *guard) Read(ctx context.Context, org string, bs []store.Bucket) (r store.Result, err error) {
	err = g.do(ctx, "read", func(ctx context.Context) (err error) {
		r, err = g.Store.Read(ctx, org, bs)
		return err
	})
	return r, err
}

func (g *guard) Lease(ctx context.Context, org, holder string, ttl time.Duration, shares []store.Share) (gs []store.Grant, r store.Result, err error) {
	err = g.do(ctx, "lease", func(ctx context.Context) (err error) {
		gs, r, err = g.Store.Lease(ctx, org, holder, ttl, shares)
		return err
	})
	return gs, r, err
}

func (g *guard) Holders(ctx context.Context, heard []string) (n int, err error) {
	err = g.do(ctx, "holders", func(ctx context.Context) (err error) {
		n, err = g.Store.Holders(ctx, heard)
		return err
	})
	return n, err
}
