// Package limiter is the limiter service: it reserves what requests will use
// and settles what they used, against buckets that the caller specifies.
//
// Ingress calls it, through internal/limit. The counts are in Redis, or in
// memory for one process; the service itself has no state, so any number of
// limiters may run. While Redis is away each call answers Unavailable at once or
// within the timeout; what that means is for the caller to decide. Run blocks
// until its context is done.
package limiter

import (
	"cmp"
	"context"
	"errors"
	_ "time/tzdata" // budgets name time zones, images have none

	"golang.org/x/sync/errgroup"

	"github.com/kinference/kinference/internal/daemon"
	"github.com/kinference/kinference/internal/rpc"
	"github.com/kinference/kinference/proto/gen/kinference/limiter/v1/limiterv1connect"
	"github.com/kinference/kinference/services/limiter/internal/memory"
	"github.com/kinference/kinference/services/limiter/internal/redis"
	"github.com/kinference/kinference/services/limiter/internal/store"
)

// Service is the limiter service.
type Service struct{ Config }

var _ daemon.Service = (*Service)(nil)

// Run serves until ctx is done.
func (s *Service) Run(ctx context.Context) error {
	if err := s.Validate(); err != nil {
		return err
	}
	counts, held, err := s.open()
	if err != nil {
		return err
	}
	defer counts.Close()
	l, err := rpc.Listen(s.Listener, cmp.Or(s.Listen, defaultListen))
	if err != nil {
		return err
	}
	log := daemon.Logger(ctx)
	g := &guard{Store: counts, timeout: cmp.Or(s.RedisTimeout, defaultTimeout), failures: cmp.Or(s.BreakerFailures, defaultBreakerFailures), pause: cmp.Or(s.BreakerPause, defaultBreakerPause)}
	srv := &server{store: g, holders: &holders{heard: map[string]struct{}{}}}
	if srv.metrics, err = newMetrics(daemon.Meter(ctx), srv, g, held); err != nil {
		return errors.Join(err, l.Close())
	}
	defer srv.metrics.registration.Unregister() //nolint:errcheck // it was registered
	g.observed = srv.metrics.observe
	g.opened = func() { log.Warn("store does not answer; calls fail at once for a while", "pause", g.pause) }
	if r, ok := counts.(*redis.Store); ok {
		if err := r.Warm(ctx); err != nil {
			log.Warn("Redis does not answer yet", "err", err)
		}
	} else {
		log.Info("counting in memory: right for one limiter only")
	}
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { srv.holders.run(ctx, g); return nil })
	group.Go(func() error {
		// Ready without Redis, too: an answer that it is away is what callers
		// need to decide by themselves.
		daemon.Ready(ctx, true)
		return rpc.Serve(ctx, l, rpc.Mount[limiterv1connect.LimiterServiceHandler](ctx, srv, limiterv1connect.NewLimiterServiceHandler))
	})
	return group.Wait()
}

// open returns the store, and how much it holds in memory.
func (s *Service) open() (store.Store, func() int64, error) {
	if s.RedisAddrs == "" {
		m := memory.New(s.MemoryMax, nil)
		return m, m.Held, nil
	}
	client, err := s.client()
	if err != nil {
		return nil, nil, err
	}
	return redis.New(client), func() int64 { return 0 }, nil
}
