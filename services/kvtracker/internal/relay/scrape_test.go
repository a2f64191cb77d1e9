package relay

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"
	"time"

	"github.com/kinference/kinference/internal/testenv"
	"github.com/kinference/kinference/internal/vllm"
	kvtrackerv1 "github.com/kinference/kinference/proto/gen/kinference/kvtracker/v1"
	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
)

// fakeHTTP is the HTTP side of an engine.
type fakeHTTP struct {
	mu     sync.Mutex
	page   vllm.Page
	health int
	broken bool
}

func (h *fakeHTTP) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	h.mu.Lock()
	defer h.mu.Unlock()
	switch r.URL.Path {
	case "/health":
		w.WriteHeader(h.health)
	case "/metrics":
		if h.broken {
			fmt.Fprint(w, "<html>not metrics</html>")
			return
		}
		_, _ = w.Write(vllm.AppendMetrics(nil, &h.page))
	}
}

func (h *fakeHTTP) set(f func(*fakeHTTP)) {
	h.mu.Lock()
	defer h.mu.Unlock()
	f(h)
}

func TestScrape(t *testing.T) {
	f := newFixture(t, testenv.NATS(t))
	h := &fakeHTTP{health: 200, page: vllm.Page{Model: "m", Engines: []vllm.EngineMetrics{
		{Rank: 0, Metrics: vllm.Metrics{Running: 1, Waiting: 2, KVUsage: .5, BlockSize: 16, NumBlocks: 100}},
		{Rank: 1, Metrics: vllm.Metrics{Running: 7, BlockSize: 784, NumBlocks: 100, KVCacheTokens: 39200}},
	}}}
	server := httptest.NewServer(h)
	t.Cleanup(server.Close)
	reports := f.reports()
	f.catalog.set(&routerv1.Worker{Uid: "a", WorkerSet: "demo/sim", Url: server.URL, Ranks: 2, RemovalsLastCopy: true})
	f.start()
	r := reports.wait("a/0", func(r *kvtrackerv1.WorkerReport) bool { return r.GetReady() })
	if l := r.GetLoad(); l.GetRunning() != 1 || l.GetWaiting() != 2 || l.GetKvUsage() != .5 || r.GetBlockSize() != 16 || r.GetTotalBlocks() != 100 || !r.GetRemovalsLastCopy() {
		t.Errorf("report of rank 0: %v", r)
	}
	r = reports.wait("a/1", func(r *kvtrackerv1.WorkerReport) bool { return r.GetReady() })
	if r.GetLoad().GetRunning() != 7 || r.GetBlockSize() != 784 || r.GetTotalBlocks() != 50 {
		t.Errorf("report of rank 1: %v", r)
	}
	notReady := func(r *kvtrackerv1.WorkerReport) bool { return !r.GetReady() }
	ready := func(r *kvtrackerv1.WorkerReport) bool { return r.GetReady() }
	for _, tt := range []struct {
		name      string
		broken    func(*fakeHTTP)
		mend      func(*fakeHTTP)
		otherRank func(*kvtrackerv1.WorkerReport) bool
	}{
		{"sleeping", func(h *fakeHTTP) { h.page.Engines[0].SleepLevel = 1 }, func(h *fakeHTTP) { h.page.Engines[0].SleepLevel = 0 }, ready},
		{"unhealthy", func(h *fakeHTTP) { h.health = 503 }, func(h *fakeHTTP) { h.health = 200 }, notReady},
		{"stale metrics", func(h *fakeHTTP) { h.broken = true }, func(h *fakeHTTP) { h.broken = false }, notReady},
	} {
		h.set(tt.broken)
		reports.wait("a/0", notReady)
		reports.wait("a/1", tt.otherRank)
		h.set(tt.mend)
		reports.wait("a/0", ready)
	}
	// Who joins late reads the bucket.
	late := f.reports()
	late.wait("a/1", ready)
}

// inbox keeps the newest report of each worker.
type inbox struct {
	t    *testing.T
	mu   sync.Mutex
	last map[string]*kvtrackerv1.WorkerReport
	grew chan struct{}
}

func (f *fixture) reports() *inbox {
	f.t.Helper()
	b := &inbox{t: f.t, last: map[string]*kvtrackerv1.WorkerReport{}, grew: make(chan struct{})}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() {
		done <- f.bus.ConsumeReports(ctx, func(r *kvtrackerv1.WorkerReport) {
			b.mu.Lock()
			defer b.mu.Unlock()
			if old := b.last[r.GetWorker()]; old.GetSampledUnixNanos() > r.GetSampledUnixNanos() {
				return
			}
			b.last[r.GetWorker()] = r
			close(b.grew)
			b.grew = make(chan struct{})
		}, nil)
	}()
	f.t.Cleanup(func() {
		cancel()
		<-done
	})
	return b
}

func (b *inbox) wait(worker string, ok func(*kvtrackerv1.WorkerReport) bool) *kvtrackerv1.WorkerReport {
	b.t.Helper()
	timeout := time.After(time.Minute)
	for {
		b.mu.Lock()
		r, grew := b.last[worker], b.grew
		b.mu.Unlock()
		if r != nil && ok(r) {
			return r
		}
		select {
		case <-grew:
		case <-timeout:
			b.t.Fatalf("report of %s is %v", worker, r)
		}
	}
}
