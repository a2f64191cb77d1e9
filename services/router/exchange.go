package router

import (
	"context"
	"fmt"

	"golang.org/x/sync/errgroup"

	"github.com/kinference/kinference/internal/bus"
	"github.com/kinference/kinference/services/router/internal/gossip"
)

// exchange tells other routers what this one does, if there is a NATS to do so
// over; whether it can be reached now does not matter.
func (s *server) exchange(ctx context.Context, g *errgroup.Group) error {
	if s.NATSURL == "" {
		return nil
	}
	conn, err := bus.Connect(ctx, s.NATSURL, "router", s.NATS.Options()...)
	if err != nil {
		return fmt.Errorf("nats-url: %w", err)
	}
	s.gossip = gossip.New(s.scheduler, gossip.Settings{Now: s.now, Message: s.metrics.gossiped, Dropped: s.metrics.gossipDropped, Delay: s.metrics.gossipDelayed})
	g.Go(func() error {
		defer conn.Close()
		return s.gossip.Run(ctx, conn)
	})
	return nil
}
