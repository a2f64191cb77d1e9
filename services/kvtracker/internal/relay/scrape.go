package relay

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/kinference/kinference/internal/bus"
	"github.com/kinference/kinference/internal/vllm"
	kvtrackerv1 "github.com/kinference/kinference/proto/gen/kinference/kvtracker/v1"
	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
)

const (
	// scrapeTimeout bounds one request to a worker.
	scrapeTimeout = time.Second
	// healthInterval is how often a worker whose metrics are fine is asked for
	// its health.
	healthInterval = time.Second
	// freshFor is how long metrics that were read count as fresh, if that is
	// longer than four intervals.
	freshFor = 2 * time.Second
	// storeInterval is how often an unchanged report is stored for late joiners.
	storeInterval = 5 * time.Second
)

func newScrapeClient() *http.Client {
	return &http.Client{
		Transport: &http.Transport{
			DialContext:         (&net.Dialer{Timeout: scrapeTimeout}).DialContext,
			MaxIdleConnsPerHost: 1,
			// vLLM closes idle connections after 5 s.
			IdleConnTimeout: 4 * time.Second,
		},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
}

// scraper reads the metrics and the health of one engine process and reports on
// each of its ranks. One goroutine.
type scraper struct {
	relay    *relay
	uid      string
	labels   labels
	base     string
	path     string
	interval time.Duration
	ranks    []rankReport

	healthy     bool
	healthSeen  time.Time
	metricsSeen time.Time
	failing     bool // logged
}

// rankReport is the newest report of a rank, and the one stored last.
type rankReport struct {
	now    *kvtrackerv1.WorkerReport
	stored *kvtrackerv1.WorkerReport
	at     time.Time // when it was stored
	seen   time.Time // when the rank's metrics were read
	asleep bool
}

func newScraper(r *relay, spec *routerv1.Worker) *scraper {
	s := &scraper{relay: r, uid: spec.GetUid(), base: spec.GetUrl(), path: spec.GetMetricsPath(), interval: r.ScrapeInterval}
	if s.path == "" {
		s.path = "/metrics"
	}
	if d := spec.GetMetricsInterval().AsDuration(); d > 0 {
		s.interval = max(d, 10*time.Millisecond)
	}
	for rank := range rankCount(spec) {
		w, err := bus.ParseWorker(spec.GetUid()+"/"+strconv.Itoa(rank), spec.GetWorkerSet())
		if err != nil {
			break // apply has checked rank 0
		}
		if rank == 0 {
			s.labels = newLabels(w)
		}
		s.ranks = append(s.ranks, rankReport{now: &kvtrackerv1.WorkerReport{
			Worker: w.ID(), WorkerSet: w.SetName(), RemovalsLastCopy: spec.GetRemovalsLastCopy(),
		}})
	}
	return s
}

func (s *scraper) run(ctx context.Context) {
	// Spread the workers over the interval.
	wait := rand.N(s.interval)
	for {
		t := time.NewTimer(wait)
		select {
		case <-ctx.Done():
			t.Stop()
			return
		case <-t.C:
		}
		begin := time.Now()
		s.sample(ctx)
		if ctx.Err() != nil {
			return
		}
		s.report(time.Now())
		jitter := s.interval / 10
		wait = max(s.interval-jitter+rand.N(2*jitter+1)-time.Since(begin), 0)
	}
}

// sample reads metrics, and health when it is due or the metrics fail.
func (s *scraper) sample(ctx context.Context) {
	engines, err := s.metrics(ctx)
	now := time.Now()
	switch {
	case ctx.Err() != nil:
		return
	case err == nil:
		s.metricsSeen = now
		s.relay.metrics.scrape(s.labels, "ok")
		s.take(engines, now)
	default:
		s.relay.metrics.scrape(s.labels, "error")
	}
	if err != nil || !s.healthy || now.Sub(s.healthSeen) >= healthInterval {
		s.healthy = s.health(ctx)
		s.healthSeen = now
	}
	if failing := err != nil || !s.healthy; failing != s.failing {
		s.failing = failing
		s.relay.log.Info("worker's metrics or health changed", "worker", s.uid, "failing", failing, "err", err)
	}
}

func (s *scraper) take(engines map[int]vllm.Metrics, now time.Time) {
	for rank := range s.ranks {
		m, ok := engines[rank]
		if !ok && len(s.ranks) == 1 && len(engines) == 1 {
			// A pod per rank: the label is the global rank.
			for _, m = range engines {
				ok = true
			}
		}
		if !ok {
			continue
		}
		r := &s.ranks[rank]
		r.seen, r.asleep = now, m.Sleeping
		r.now.Load = &kvtrackerv1.Load{Running: m.Running, Waiting: m.Waiting, KvUsage: m.KVUsage}
		r.now.SampledUnixNanos = now.UnixNano()
		r.now.PrefixCacheQueries, r.now.PrefixCacheHits = m.PrefixQueries, m.PrefixHits
		if m.BlockSize > 0 {
			r.now.BlockSize = uint32(m.BlockSize)
			r.now.TotalBlocks = uint64(m.NumBlocks)
			if m.KVCacheTokens > 0 {
				// Hybrid models share blocks between groups: the count of blocks
				// says less than the tokens that fit.
				r.now.TotalBlocks = uint64(m.KVCacheTokens / m.BlockSize)
			}
		}
	}
}

// report publishes every rank, and stores what changed.
func (s *scraper) report(now time.Time) {
	fresh := max(freshFor, 4*s.interval)
	for i := range s.ranks {
		r := &s.ranks[i]
		r.now.Ready = s.healthy && !r.asleep && !r.seen.IsZero() && now.Sub(r.seen) < fresh
		if !r.now.Ready {
			// The newest report wins, and this one is news without a sample.
			r.now.SampledUnixNanos = now.UnixNano()
		}
		s.relay.publishReport(r.now)
		if now.Sub(r.at) >= storeInterval || !sameState(r.stored, r.now) {
			r.at, r.stored = now, proto.CloneOf(r.now)
			s.relay.reports.put(r.stored)
		}
	}
}

// sameState tells whether two reports agree in all that is not a sample.
func sameState(a, b *kvtrackerv1.WorkerReport) bool {
	return a.GetReady() == b.GetReady() && a.GetBlockSize() == b.GetBlockSize() && a.GetTotalBlocks() == b.GetTotalBlocks()
}

func (s *scraper) metrics(ctx context.Context) (map[int]vllm.Metrics, error) {
	ctx, cancel := context.WithTimeout(ctx, scrapeTimeout)
	defer cancel()
	resp, err := s.get(ctx, s.path)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("metrics: status %d", resp.StatusCode)
	}
	body, err := io.ReadAll(io.LimitReader(resp.Body, vllm.MaxMetrics+1))
	if err != nil {
		return nil, fmt.Errorf("read metrics: %w", err)
	}
	return vllm.ParseMetrics(body)
}

func (s *scraper) health(ctx context.Context) bool {
	ctx, cancel := context.WithTimeout(ctx, scrapeTimeout)
	defer cancel()
	resp, err := s.get(ctx, "/health")
	if err != nil {
		return false
	}
	defer resp.Body.Close()
	// Read a little, so that the connection can be used again.
	_, _ = io.CopyN(io.Discard, resp.Body, 4096)
	return resp.StatusCode == http.StatusOK
}

func (s *scraper) get(ctx context.Context, path string) (*http.Response, error) {
	u, err := url.JoinPath(s.base, path)
	if err != nil {
		return nil, err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, u, nil)
	if err != nil {
		return nil, err
	}
	resp, err := s.relay.client.Do(req)
	if err != nil {
		// The address inside is in the worker's entry already.
		if e := (*url.Error)(nil); errors.As(err, &e) {
			err = e.Err
		}
		return nil, err
	}
	return resp, nil
}
