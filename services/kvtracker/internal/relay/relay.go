// Package relay carries what vLLM workers say of themselves to NATS: their
// KV-cache events to the stream KV_EVENTS, their load and readiness to the
// workers' reports.
//
// It is the relay mode of kvtracker. For each worker (engine process and rank)
// of the router's catalog a link follows the engine's event socket, fills gaps
// by replay, and publishes in order; each engine process is scraped besides.
// What a link publishes is either complete or says so: a gap that cannot be
// filled, an engine that may have been restarted and a stream that was lost all
// lead to a clear of that worker, never to entries that might be false.
//
// Router, NATS and workers may be away at start and at any later time; Run goes
// on until its context is done. Nothing here blocks on NATS but the goroutine
// that publishes, and what waits for it is bounded.
package relay

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"sync"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/kinference/kinference/internal/bus"
	"github.com/kinference/kinference/internal/daemon"
	"github.com/kinference/kinference/internal/rpc"
	kvtrackerv1 "github.com/kinference/kinference/proto/gen/kinference/kvtracker/v1"
	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
	"github.com/kinference/kinference/proto/gen/kinference/router/v1/routerv1connect"
)

// DefaultScrapeInterval is how often a worker's metrics are read unless its
// worker set says otherwise: four times a second, as fast as a step or two.
const DefaultScrapeInterval = 250 * time.Millisecond

// Config of a relay.
type Config struct {
	// RouterURL is where the catalog comes from.
	RouterURL string
	// Bus is an open connection to NATS; the caller closes it after Run.
	Bus *bus.Conn
	// Stream bounds the stream of KV events where the relay has to make it.
	Stream bus.StreamSettings
	// ScrapeInterval is the default for workers whose catalog entry has none.
	// Default DefaultScrapeInterval.
	ScrapeInterval time.Duration

	timing timing
}

// timing holds what tests shorten.
type timing struct {
	// coalesce is how long batches gather into one message.
	coalesce time.Duration
	// redial bounds the pause between dials of a worker.
	redialMin, redialMax time.Duration
	// patience is how long a replay is tried before the link goes on without.
	patience time.Duration
	// idle is when a silent engine is asked for events that got lost at the end
	// of a burst: first, and then each time.
	idleFirst, idleThen time.Duration
	// unseen is the age of a worker's last message at which a relay that starts
	// does not let it be trusted until it has looked itself.
	unseen time.Duration
	// streamCheck is how often the stream is asked whether it is still the same.
	streamCheck time.Duration
	// sweep is when, after the first catalog, workers that left while no relay
	// ran are cleared.
	sweep time.Duration
	// stop bounds how long a worker that left waits for its last message.
	stop time.Duration
}

func (t *timing) defaults() {
	set := func(d *time.Duration, v time.Duration) {
		if *d == 0 {
			*d = v
		}
	}
	set(&t.coalesce, 10*time.Millisecond)
	set(&t.redialMin, 50*time.Millisecond)
	set(&t.redialMax, 2*time.Second)
	set(&t.patience, 5*time.Second)
	set(&t.idleFirst, time.Second)
	set(&t.idleThen, 30*time.Second)
	set(&t.unseen, 2*time.Second) // as long as a tracker trusts a report of load
	set(&t.streamCheck, 2*time.Second)
	set(&t.sweep, 10*time.Second)
	set(&t.stop, 5*time.Second)
}

// maxReplays bounds the replays under way: each holds up to replayChunk bytes.
const maxReplays = 8

// relay is one running relay.
type relay struct {
	Config
	log     *slog.Logger
	metrics *instruments
	client  *http.Client
	replays chan struct{}
	stream  *streamWatch
	reports *reportStore
	unswept chan struct{} // capacity 1: a worker left and could not be cleared

	mu      sync.Mutex
	workers map[string]*worker // by worker set and uid
}

// Run relays until ctx is done, and returns nil then. An error means that the
// configuration is wrong.
func Run(ctx context.Context, c Config) error {
	if c.Bus == nil || c.RouterURL == "" {
		return errors.New("relay: NATS connection and router URL are required")
	}
	r, err := newRelay(ctx, c)
	if err != nil {
		return err
	}
	var wg sync.WaitGroup
	wg.Go(func() { r.stream.run(ctx) })
	wg.Go(func() { r.reports.run(ctx) })
	r.watchCatalog(ctx)
	r.stop()
	wg.Wait()
	r.client.CloseIdleConnections()
	return nil
}

func newRelay(ctx context.Context, c Config) (*relay, error) {
	c.timing.defaults()
	if c.ScrapeInterval <= 0 {
		c.ScrapeInterval = DefaultScrapeInterval
	}
	r := &relay{
		Config:  c,
		log:     daemon.Logger(ctx),
		client:  newScrapeClient(),
		replays: make(chan struct{}, maxReplays),
		unswept: make(chan struct{}, 1),
		workers: make(map[string]*worker),
	}
	var err error
	if r.metrics, err = newInstruments(daemon.Meter(ctx)); err != nil {
		return nil, fmt.Errorf("relay: %w", err)
	}
	r.stream = &streamWatch{bus: c.Bus, settings: c.Stream, every: c.timing.streamCheck, lost: r.streamLost, check: make(chan struct{}, 1)}
	r.reports = &reportStore{bus: c.Bus, log: r.log, wake: make(chan struct{}, 1), pending: make(map[string]*kvtrackerv1.WorkerReport)}
	return r, nil
}

// watchCatalog applies every catalog that the router sends. While the router is
// away the last one stays.
func (r *relay) watchCatalog(ctx context.Context) {
	client := rpc.Client(ctx, r.RouterURL, routerv1connect.NewRouterServiceClient)
	var sweep <-chan time.Time
	var wg sync.WaitGroup
	defer wg.Wait()
	catalogs := make(chan *routerv1.Catalog)
	go func() {
		defer close(catalogs)
		for try := 0; ctx.Err() == nil; try++ {
			got, err := r.readCatalogs(ctx, client, catalogs)
			if got {
				try = 0
			}
			if ctx.Err() == nil {
				r.log.Warn("catalog stream ended, will reconnect", "err", err)
			}
			pause(ctx, try, 100*time.Millisecond, 5*time.Second)
		}
	}()
	first := true
	for {
		select {
		case c, ok := <-catalogs:
			if !ok {
				return
			}
			r.apply(ctx, c.GetWorkers())
			if first {
				first = false
				daemon.Ready(ctx, true)
				sweep = time.After(r.timing.sweep)
			}
		case <-r.unswept:
			sweep = time.After(r.timing.sweep)
		case <-sweep:
			wg.Go(func() {
				for try := 0; ctx.Err() == nil; try++ {
					err := r.sweep(ctx)
					if err == nil || ctx.Err() != nil {
						return
					}
					r.log.Warn("cannot look for workers that left earlier, will retry", "err", err)
					pause(ctx, try, r.timing.sweep/4, 30*time.Second)
				}
			})
		}
	}
}

func (r *relay) readCatalogs(ctx context.Context, client routerv1connect.RouterServiceClient, out chan<- *routerv1.Catalog) (got bool, err error) {
	stream, err := client.WatchCatalog(ctx, &routerv1.WatchCatalogRequest{})
	if err != nil {
		return false, err
	}
	defer stream.Close()
	for stream.Receive() {
		got = true
		select {
		case out <- stream.Msg().GetCatalog():
		case <-ctx.Done():
			return got, ctx.Err()
		}
	}
	return got, stream.Err()
}

// apply makes the running workers equal to the listed ones. A worker whose
// addresses changed starts over; its identity did not change, so it is not gone.
func (r *relay) apply(ctx context.Context, list []*routerv1.Worker) {
	wanted := make(map[string]*routerv1.Worker, len(list))
	for _, w := range list {
		if _, err := bus.ParseWorker(w.GetUid()+"/0", w.GetWorkerSet()); err != nil {
			r.log.Warn("catalog has a worker that cannot be relayed", "err", err)
			continue
		}
		wanted[w.GetWorkerSet()+"/"+w.GetUid()] = w
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	var wg sync.WaitGroup
	for key, w := range r.workers {
		next, ok := wanted[key]
		if ok && sameWorker(w.spec, next) {
			delete(wanted, key)
			continue
		}
		delete(r.workers, key)
		ranks, followed := 0, 0
		if ok {
			ranks, followed = rankCount(next), followedCount(next)
		}
		wg.Go(func() { w.stop(ranks, followed) })
	}
	wg.Wait()
	for key, spec := range wanted {
		r.workers[key] = r.start(ctx, spec)
	}
}

// stop ends all workers without a word to the trackers: a relay that starts
// again goes on where this one ended.
func (r *relay) stop() {
	r.mu.Lock()
	defer r.mu.Unlock()
	var wg sync.WaitGroup
	for _, w := range r.workers {
		wg.Go(func() { w.stop(rankCount(w.spec), len(w.links)) })
	}
	wg.Wait()
	clear(r.workers)
}

// streamLost has every link publish anew what its engine still knows.
func (r *relay) streamLost() {
	r.log.Warn("stream of KV events was lost, publishing anew")
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, w := range r.workers {
		for _, l := range w.links {
			l.startOver("stream")
		}
	}
}

// sweep clears the workers that the stream speaks of but no link follows: they
// left, or their events were switched off, while no relay was running.
func (r *relay) sweep(ctx context.Context) error {
	stream, err := r.Bus.JetStream().Stream(ctx, bus.KVStream)
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	info, err := stream.Info(ctx, jetstream.WithSubjectFilter(bus.AllKVSubjects))
	if err != nil {
		return err
	}
	for subject := range info.State.Subjects {
		w, err := bus.ParseKVSubject(subject)
		if err != nil {
			continue
		}
		listed, followed := r.has(w)
		if followed {
			continue
		}
		last, _, ok, err := r.Bus.LastKV(ctx, w)
		if err != nil {
			return err
		}
		if ok && last.Kind == bus.KindClear && last.Reason == reasonGone {
			continue
		}
		r.log.Info("clearing a worker that is not followed any more", "worker", w.ID(), "workerSet", w.SetName())
		m := &bus.KVMessage{Kind: bus.KindClear, Epoch: newEpoch(), Reason: reasonGone}
		if _, err := r.Bus.PublishKV(ctx, r.Stream, w, m); err != nil {
			return err
		}
		if !listed {
			r.gone(w)
		}
	}
	return nil
}

// has tells whether the catalog lists w and whether a link follows its events.
func (r *relay) has(w bus.Worker) (listed, followed bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	k, ok := r.workers[w.SetName()+"/"+w.UID]
	if !ok {
		return false, false
	}
	return w.Rank < rankCount(k.spec), w.Rank < len(k.links)
}

// gone reports that a worker left the catalog.
func (r *relay) gone(w bus.Worker) {
	report := &kvtrackerv1.WorkerReport{
		Worker: w.ID(), WorkerSet: w.SetName(), Gone: true, SampledUnixNanos: time.Now().UnixNano(),
	}
	r.publishReport(report)
	r.reports.put(report)
}

func (r *relay) publishReport(report *kvtrackerv1.WorkerReport) {
	if err := r.Bus.PublishReport(report); err != nil {
		r.log.Debug("report not published", "worker", report.GetWorker(), "err", err)
	}
}

// pause waits before try n (from 0), doubling from least to most, jittered.
func pause(ctx context.Context, n int, least, most time.Duration) {
	d := min(least<<min(n, 16), most)
	t := time.NewTimer(d/2 + rand.N(d/2+1))
	defer t.Stop()
	select {
	case <-ctx.Done():
	case <-t.C:
	}
}
