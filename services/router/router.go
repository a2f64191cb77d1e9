package router

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/kinference/kinference/internal/daemon"
	"github.com/kinference/kinference/internal/kube/review"
	"github.com/kinference/kinference/internal/resources"
	"github.com/kinference/kinference/internal/rpc"
	"github.com/kinference/kinference/internal/schedule"
	"github.com/kinference/kinference/proto/gen/kinference/router/v1/routerv1connect"
	"github.com/kinference/kinference/services/router/internal/affinity"
	"github.com/kinference/kinference/services/router/internal/catalog"
	"github.com/kinference/kinference/services/router/internal/decisions"
	"github.com/kinference/kinference/services/router/internal/fleet"
	"github.com/kinference/kinference/services/router/internal/gossip"
	"github.com/kinference/kinference/services/router/internal/line"
	"github.com/kinference/kinference/services/router/internal/parity"
	"github.com/kinference/kinference/services/router/internal/providers"
)

// Service is the router. Its settings must not change once Run was called.
type Service struct {
	Config
}

var _ daemon.Service = (*Service)(nil)

// server is the state of one Run.
type server struct {
	Config
	log        *slog.Logger
	metrics    *metrics
	scheduler  *schedule.Scheduler
	fleet      *fleet.Table
	affinity   *affinity.Table
	decisions  *decisions.Log
	providers  providers.Table
	line       *line.Line
	tokens     *parity.Tokens
	cached     *parity.Cached
	catalog    *catalog.Publisher
	tracker    tracker             // nil: none
	gossip     *gossip.Exchange    // with other routers; nil: none
	keys       resources.KeyWriter // of API keys
	reviewer   *review.Client      // of ServiceAccounts; nil: the Kubernetes API is not used
	reviewSaid atomic.Int64        // when a failed review was logged

	mu        sync.Mutex
	resources *resources.Catalog // newest good one; nil before it
	problems  resources.Problems
	workers   map[string]string // URLs by ids of the ranks in resources

	publishing sync.Mutex     // held from reading resources until they are published
	blind      map[string]int // by worker set and cause: workers that the index cannot know, as logged
}

// Run serves until ctx is done. It is ready once the first good catalog is
// loaded. It fails for bad settings and when the port cannot be opened.
func (s *Service) Run(ctx context.Context) error {
	if err := s.Validate(); err != nil {
		return err
	}
	c := s.withDefaults()
	scheduler, err := schedule.New(schedule.Settings{Policy: c.Policy, Seed: c.Seed, TimeScale: c.TimeScale, Lease: c.Lease, MaxWaiting: c.MaxWaiting, MaxWait: c.MaxWait})
	if err != nil {
		return fmt.Errorf("policy: %w", err)
	}
	l, err := rpc.Listen(c.Listener, c.Listen)
	if err != nil {
		return err
	}
	defer l.Close()
	srv := &server{
		Config: c, log: daemon.Logger(ctx), scheduler: scheduler,
		affinity: &affinity.Table{}, decisions: decisions.New(c.DecisionLog), tokens: &parity.Tokens{}, catalog: catalog.NewPublisher(),
		workers: map[string]string{},
	}
	srv.cached = parity.NewCached(parity.Settings{TimeScale: c.TimeScale, Why: srv.whyBlind, Changed: srv.cachedChanged, Compared: srv.cachedCompared})
	srv.fleet = fleet.New(srv.restarted)
	srv.line = srv.follow(ctx)
	followed := srv.trackers(ctx)
	if followed != nil {
		srv.tracker = followed
	}
	if srv.metrics, err = newMetrics(daemon.Meter(ctx), srv); err != nil {
		return fmt.Errorf("make metrics: %w", err)
	}
	defer srv.metrics.close()

	g, ctx := errgroup.WithContext(ctx)
	if err := srv.exchange(ctx, g); err != nil {
		return err
	}
	if err := srv.serveAdmin(ctx, g); err != nil {
		return err
	}
	if followed != nil {
		g.Go(func() error { return followed.Follow(ctx) })
	}
	if c.Kubernetes {
		if err := srv.kubernetes(ctx, g); err != nil {
			return err
		}
	} else {
		srv.keys = &resources.KeyFolder{Dir: c.ConfigDir}
		source := resources.NewSource(c.ConfigDir, func(rc *resources.Catalog, ps resources.Problems) { srv.apply(ctx, rc, ps) })
		g.Go(func() error { return source.Run(ctx) })
	}
	g.Go(func() error { return srv.line.Run(ctx) })
	g.Go(func() error { return srv.fleet.Probe(ctx, c.ProbeInterval) })
	g.Go(func() error { return srv.publish(ctx) })
	g.Go(func() error {
		srv.log.Info("router serves", "addr", l.Addr().String(), "policy", c.Policy)
		return rpc.Serve(ctx, l, rpc.Mount[routerv1connect.RouterServiceHandler](ctx, srv, routerv1connect.NewRouterServiceHandler))
	})
	return g.Wait()
}

// apply takes a load of the resources. A broken one changes nothing but what
// is said about it.
func (s *server) apply(ctx context.Context, c *resources.Catalog, ps resources.Problems) {
	s.mu.Lock()
	said := s.problems
	s.mu.Unlock()
	for _, p := range ps {
		if slices.Contains(said, p) {
			continue
		}
		if p.Severity == resources.Error {
			s.log.Error("resource is broken", "at", p.String())
		} else {
			s.log.Warn("resource is not as it seems", "at", p.String())
		}
	}
	s.metrics.reloaded(ctx, c != nil)
	s.mu.Lock()
	s.problems = ps
	if c == nil {
		kept := s.resources != nil
		s.mu.Unlock()
		s.log.Error("resources not loaded", "last_good_catalog_kept", kept)
		return
	}
	s.resources = c
	workers := map[string]string{}
	var endpoints []fleet.Endpoint
	for _, set := range c.Sets {
		for i := range set.Workers {
			w := &set.Workers[i]
			endpoints = append(endpoints, fleet.Endpoint{UID: w.UID, URL: w.URL})
			for _, id := range w.Ranks {
				workers[id] = w.URL
			}
		}
	}
	gone := map[string]bool{}
	for id, url := range s.workers {
		if workers[id] != url { // at another address is another engine
			gone[id] = true
		}
	}
	s.workers = workers
	s.mu.Unlock()
	for _, w := range s.scheduler.Workers() { // by a look at the catalog before this one, it may have come back
		if workers[w.Worker] == "" {
			gone[w.Worker] = true
		}
	}
	for id := range gone {
		s.scheduler.Forget(id)
		s.affinity.Forget(id)
		s.cached.Forget(id)
	}
	profiles := map[string]bool{}
	for _, set := range c.Sets {
		for _, p := range set.Profiles {
			profiles[p.ID] = true
		}
	}
	s.cached.Keep(func(id string) bool { return profiles[id] })
	s.fleet.Watch(endpoints)
	s.providers.Keep(c.Providers)
	v := s.republish()
	s.log.Info("catalog loaded", "version", v.Number, "models", len(c.Models), "workers", len(endpoints))
	daemon.Ready(ctx, true)
}

// publish makes a new version of the catalog when the fleet has changed, and now
// and then: the word of an ingress that is gone does not count for ever.
func (s *server) publish(ctx context.Context) error {
	tick := time.NewTicker(30 * time.Second)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-s.fleet.Changed():
		case <-tick.C:
		}
		s.republish()
	}
}

// republish publishes the newest resources with what the fleet knows of them;
// nil while there are none. Older resources are never published after newer.
func (s *server) republish() *catalog.Version {
	s.publishing.Lock()
	defer s.publishing.Unlock()
	s.mu.Lock()
	c := s.resources
	s.mu.Unlock()
	if c == nil {
		return nil
	}
	s.noteBlind(c)
	v := s.catalog.Publish(c, s.fleet, s.tokens)
	s.fleet.Keep(v.Plan.Longest, v.Plan.Thresholds)
	return v
}

// restarted is told of a worker whose engine process is a new one.
func (s *server) restarted(worker string) {
	s.log.Info("engine restarted", "worker", worker)
	s.scheduler.Restarted(worker)
	s.line.Kick()
	s.affinity.Forget(worker)
}

// now is the clock of decisions.
func (s *server) now() time.Time { return time.Now() }
