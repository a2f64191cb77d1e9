package kvtracker_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"

	"github.com/kinference/kinference/internal/daemon"
	"github.com/kinference/kinference/internal/fleetsim"
	"github.com/kinference/kinference/internal/fleetsim/engine"
	"github.com/kinference/kinference/internal/kvhash"
	"github.com/kinference/kinference/internal/natsd"
	"github.com/kinference/kinference/internal/rpc"
	"github.com/kinference/kinference/internal/testenv"
	kvtrackerv1 "github.com/kinference/kinference/proto/gen/kinference/kvtracker/v1"
	"github.com/kinference/kinference/proto/gen/kinference/kvtracker/v1/kvtrackerv1connect"
	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
	"github.com/kinference/kinference/proto/gen/kinference/router/v1/routerv1connect"
	"github.com/kinference/kinference/services/kvtracker"
)

func TestMain(m *testing.M) {
	if kind := os.Getenv(asProcess); kind != "" {
		os.Exit(runProcess(kind))
	}
	// nats.go 1.55 leaves it behind if storing an object ends before it has begun.
	goleak.VerifyTestMain(m, goleak.IgnoreTopFunction("github.com/nats-io/nats.go/jetstream.(*jetStream).resetPendingAcksOnReconnect"),
		goleak.IgnoreAnyFunction("github.com/go-zeromq/zmq4.(*pubMWriter).run")) // never ends
}

// patience bounds every wait; nothing waits that long unless it is broken.
const patience = 2 * time.Minute

// router serves the catalog that the relay reads.
type router struct {
	routerv1connect.UnimplementedRouterServiceHandler

	mu      sync.Mutex
	workers []*routerv1.Worker
	changed chan struct{}
}

func (r *router) set(workers ...*routerv1.Worker) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.workers = workers
	if r.changed != nil {
		close(r.changed)
	}
	r.changed = make(chan struct{})
}

func (r *router) WatchCatalog(ctx context.Context, _ *routerv1.WatchCatalogRequest, out *connect.ServerStream[routerv1.WatchCatalogResponse]) error {
	for {
		r.mu.Lock()
		workers, changed := r.workers, r.changed
		r.mu.Unlock()
		if err := out.Send(&routerv1.WatchCatalogResponse{Catalog: &routerv1.Catalog{Workers: workers}}); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return nil
		case <-changed:
		}
	}
}

// process runs f until stop is called or the test ends.
func process(t *testing.T, f func(context.Context) error) (stop func()) {
	t.Helper()
	return processIn(t, context.Background(), f)
}

// processIn is process under a context.
func processIn(t *testing.T, ctx context.Context, f func(context.Context) error) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan error, 1)
	go func() { done <- f(ctx) }()
	stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("process: %v", err)
		}
	})
	t.Cleanup(stop)
	return stop
}

// fleet is the whole chain: workers, relay, NATS, tracker.
type fleet struct {
	t       *testing.T
	config  kvtracker.Config // NATS and stream
	router  *router
	url     string // of the router
	workers []*fleetsim.Worker

	stopRelay   func()
	stopTracker func()
	client      kvtrackerv1connect.KVTrackerServiceClient
	admin       http.Handler // of the tracker
	// watched is what WatchWorkers said last.
	mu      sync.Mutex
	watched map[string]*kvtrackerv1.WorkerState
}

// newFleet starts all of it over these workers, with NATS at url.
func newFleet(t *testing.T, url string, config kvtracker.Config, workers ...*fleetsim.Worker) *fleet {
	t.Helper()
	config.NATSURL = url
	f := &fleet{t: t, config: config, router: &router{}, workers: workers}
	f.list()
	l := testenv.Listen(t)
	f.url = "http://" + l.Addr().String()
	process(t, func(ctx context.Context) error {
		return rpc.Serve(ctx, l, rpc.Mount[routerv1connect.RouterServiceHandler](ctx, f.router, routerv1connect.NewRouterServiceHandler))
	})
	f.startRelay()
	f.startTracker()
	return f
}

// list puts the workers into the catalog.
func (f *fleet) list() {
	var out []*routerv1.Worker
	for i, w := range f.workers {
		out = append(out, &routerv1.Worker{
			Uid: uid(i), WorkerSet: "demo/sim", Name: w.Name(), Url: w.URL(), Ranks: uint32(w.Config().Ranks),
			KvEvents: w.EventsAddr(0), KvReplay: w.ReplayAddr(0), MetricsPath: "/metrics",
		})
	}
	f.router.set(out...)
}

func uid(worker int) string { return fmt.Sprintf("demo.sim.w%d", worker) }

func id(worker, rank int) string { return fmt.Sprintf("%s/%d", uid(worker), rank) }

func (f *fleet) startRelay() {
	c := f.config
	c.Mode, c.RouterURL, c.ScrapeInterval = kvtracker.ModeRelay, f.url, 100*time.Millisecond
	f.stopRelay = process(f.t, (&kvtracker.Service{Config: c}).Run)
}

// startTracker starts a tracker and waits until it is ready.
func (f *fleet) startTracker() {
	f.t.Helper()
	c := f.config
	l := testenv.Listen(f.t)
	c.Listener = l
	shell, err := daemon.NewShell(f.t.Context(), daemon.Settings{})
	if err != nil {
		f.t.Fatal(err)
	}
	f.admin = shell.Admin()
	url := "http://" + l.Addr().String()
	// Known to the shell before it is asked whether all are ready.
	stop := processIn(f.t, shell.Context(context.Background(), "kvtracker"), (&kvtracker.Service{Config: c}).Run)
	ctx, cancel := context.WithCancel(context.Background())
	f.client = rpc.Client(ctx, url, kvtrackerv1connect.NewKVTrackerServiceClient)
	watching := f.watch(ctx)
	f.stopTracker = sync.OnceFunc(func() {
		cancel()
		<-watching
		stop()
		shell.Close()
	})
	f.t.Cleanup(f.stopTracker)
	ready, done := context.WithTimeout(ctx, patience)
	defer done()
	if err := shell.WaitReady(ready); err != nil {
		f.t.Fatalf("tracker is not ready: %v", err)
	}
}

// watch keeps watched up to date until ctx is done.
func (f *fleet) watch(ctx context.Context) (done chan struct{}) {
	f.mu.Lock()
	f.watched = map[string]*kvtrackerv1.WorkerState{}
	f.mu.Unlock()
	client := f.client
	done = make(chan struct{})
	go func() {
		defer close(done)
		stream, err := client.WatchWorkers(ctx, &kvtrackerv1.WatchWorkersRequest{})
		if err != nil {
			return
		}
		defer stream.Close()
		for stream.Receive() {
			f.mu.Lock()
			for _, w := range stream.Msg().GetWorkers() {
				f.watched[w.GetWorker()] = w
			}
			for _, id := range stream.Msg().GetRemoved() {
				delete(f.watched, id)
			}
			f.mu.Unlock()
		}
	}()
	return done
}

func (f *fleet) state(id string) *kvtrackerv1.WorkerState {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.watched[id]
}

// metric sums up a metric of the tracker over its labels.
func (f *fleet) metric(name string) (sum float64) {
	f.t.Helper()
	rec := httptest.NewRecorder()
	f.admin.ServeHTTP(rec, httptest.NewRequest(http.MethodGet, "/metrics", nil))
	found := false
	for line := range strings.Lines(rec.Body.String()) {
		if series, value, ok := strings.Cut(strings.TrimSpace(line), "} "); ok && strings.HasPrefix(series, name+"{") {
			v, err := strconv.ParseFloat(value, 64)
			if err != nil {
				f.t.Fatalf("metric line %q: %v", line, err)
			}
			sum, found = sum+v, true
		}
	}
	if !found {
		f.t.Fatalf("no metric %s in:\n%s", name, rec.Body)
	}
	return sum
}

// until waits for a condition on what other processes do.
func (f *fleet) until(what string, ok func() bool) {
	f.t.Helper()
	if !f.eventually(ok) {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.t.Fatalf("%s: not within %v; workers: %v", what, patience, f.watched)
	}
}

// eventually polls a condition.
func (f *fleet) eventually(ok func() bool) bool {
	f.t.Helper()
	return f.eventuallyIn(patience, ok)
}

func (f *fleet) eventuallyIn(patience time.Duration, ok func() bool) bool {
	f.t.Helper()
	deadline := time.After(patience)
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for !ok() {
		select {
		case <-deadline:
			return false
		case <-tick.C:
		}
	}
	return true
}

// settle waits until the tracker has applied all that the workers published.
// There must be no requests in flight.
func (f *fleet) settle() {
	f.t.Helper()
	for i, w := range f.workers {
		for r := range w.Config().Ranks {
			f.until("settle "+id(i, r), func() bool {
				n := w.EventStats(r).Batches
				s := f.state(id(i, r))
				return s != nil && s.GetIndex().GetLive() && s.GetIndex().GetLastSeq() == int64(n)-1
			})
		}
	}
}

// truth is what a rank holds: the own hash of every distinct cached block.
func (f *fleet) truth(worker, rank int) map[uint64]bool {
	w := f.workers[worker]
	out := map[uint64]bool{}
	for b := range w.Cached(rank) {
		if b.Group == 0 {
			h := kvhash.Append(nil, kvhash.Root(b.LoRA, b.Salt), b.Tokens, w.Config().Profile.BlockSize)
			out[uint64(h[len(h)-1])] = true
		}
	}
	return out
}

// holders asks the tracker, block by block, who holds a block of this size.
func (f *fleet) holders(blockSize int, hashes map[uint64]bool) map[uint64][]string {
	f.t.Helper()
	out := map[uint64][]string{}
	req, asked := &kvtrackerv1.MatchRequest{}, []uint64{}
	ask := func() {
		f.t.Helper()
		resp, err := f.client.Match(f.t.Context(), req)
		if err != nil {
			f.t.Fatal(err)
		}
		for i, r := range resp.GetResults() {
			for _, m := range r.GetMatches() {
				out[asked[i]] = append(out[asked[i]], m.GetWorker())
			}
		}
		req, asked = &kvtrackerv1.MatchRequest{}, nil
	}
	for h := range hashes {
		req.Queries = append(req.Queries, &kvtrackerv1.Query{BlockSize: uint32(blockSize), BlockHashes: []uint64{h}})
		if asked = append(asked, h); len(asked) == 64 {
			ask()
		}
	}
	ask()
	return out
}

// check compares the tracker with the workers' true caches, block by block. There
// must be no requests in flight; the chain may still be at work, so the two need
// not be equal at once, but must become and stay so.
func (f *fleet) check(when string) {
	f.t.Helper()
	blocks := 0
	for i, w := range f.workers {
		for r := range w.Config().Ranks {
			want := f.truth(i, r)
			blocks += len(want)
			diff := ""
			equal := func() bool {
				f.settle()
				got := map[uint64]bool{}
				for h, holders := range f.holders(w.Config().Profile.BlockSize, want) {
					if slices.Contains(holders, id(i, r)) {
						got[h] = true
					}
				}
				diff = cmp.Diff(got, want)
				// None besides: the count is the same.
				s := f.state(id(i, r)).GetIndex()
				return diff == "" && int(s.GetBlocks()) == len(want) && s.GetComplete()
			}
			if !f.eventually(equal) {
				f.t.Fatalf("%s: %s is %v, holds %d blocks; blocks differ (-tracker +engine):\n%s", when, id(i, r), f.state(id(i, r)), len(want), diff)
			}
		}
	}
	f.t.Logf("%s: %d blocks are equal", when, blocks)
}

// depth is how many blocks of a prompt the tracker says that a worker holds.
func (f *fleet) depth(worker string, blockSize int, prompt []uint32) int {
	f.t.Helper()
	q := &kvtrackerv1.Query{BlockSize: uint32(blockSize)}
	for _, h := range kvhash.Append(nil, kvhash.Root("", ""), prompt, blockSize) {
		q.BlockHashes = append(q.BlockHashes, uint64(h))
	}
	resp, err := f.client.Match(f.t.Context(), &kvtrackerv1.MatchRequest{Queries: []*kvtrackerv1.Query{q}})
	if err != nil {
		f.t.Fatal(err)
	}
	for _, m := range resp.GetResults()[0].GetMatches() {
		if m.GetWorker() == worker {
			return int(m.GetGpuTokens()) / blockSize
		}
	}
	return 0
}

// profile evicts soon: few blocks, of few tokens.
func profile(blocks int) engine.Profile {
	p := engine.L40SPlain16
	p.BlockSize, p.Blocks = 4, blocks
	p.MaxBatchedTokens, p.MaxSeqs, p.MaxModelLen = 512, 16, 256
	return p
}

func startWorker(t *testing.T, c fleetsim.Config) *fleetsim.Worker {
	t.Helper()
	if c.TimeScale == 0 {
		c.TimeScale = 50
	}
	w, err := fleetsim.Start(t.Context(), c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(w.Kill)
	return w
}

var client = &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 64}}

// generate has a rank complete a prompt, and reports whether it did.
func generate(w *fleetsim.Worker, rank int, prompt []uint32, maxTokens int, lora, salt string) error {
	body := map[string]any{"model": w.Config().Model, "prompt": prompt, "max_tokens": maxTokens, "ignore_eos": true}
	if lora != "" {
		body["model"] = lora
	}
	if salt != "" {
		body["cache_salt"] = salt
	}
	data, err := json.Marshal(body)
	if err != nil {
		return err
	}
	req, err := http.NewRequest(http.MethodPost, w.URL()+"/v1/completions", bytes.NewReader(data))
	if err != nil {
		return err
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("X-data-parallel-rank", fmt.Sprint(rank))
	resp, err := client.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	answer, err := io.ReadAll(resp.Body)
	if err != nil {
		return err
	}
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %s", resp.Status, answer)
	}
	return nil
}

// prompts makes prompts that share prefixes.
type prompts struct {
	r       *rand.Rand
	history [][]uint32
}

func newPrompts(seed uint64) *prompts { return &prompts{r: rand.New(rand.NewPCG(seed, 11))} }

func (p *prompts) next() []uint32 {
	var out []uint32
	if len(p.history) > 0 && p.r.IntN(4) > 0 {
		old := p.history[p.r.IntN(len(p.history))]
		out = append(out, old[:1+p.r.IntN(len(old))]...)
	}
	for range 1 + p.r.IntN(60) {
		out = append(out, 10+p.r.Uint32N(3000))
	}
	out = out[:min(len(out), 180)]
	if len(p.history) < 30 {
		p.history = append(p.history, out)
	} else {
		p.history[p.r.IntN(30)] = out
	}
	return out
}

// load keeps n requests in flight per rank until stop is called; it returns
// how many were answered. Failures are allowed: workers restart under it.
func (f *fleet) load(n int) (stop func() int) {
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	var mu sync.Mutex
	answered := 0
	for i, w := range f.workers {
		for r := range w.Config().Ranks {
			for k := range n {
				wg.Go(func() {
					p := newPrompts(uint64(i*100 + r*10 + k))
					for ctx.Err() == nil {
						lora := []string{"", "", "adapter-a", "adapter-b"}[p.r.IntN(4)]
						salt := []string{"", "", "salt-a", "salt-b"}[p.r.IntN(4)]
						if generate(w, r, p.next(), 1+p.r.IntN(40), lora, salt) == nil {
							mu.Lock()
							answered++
							mu.Unlock()
						}
					}
				})
			}
		}
	}
	return func() int {
		cancel()
		wg.Wait()
		client.CloseIdleConnections()
		return answered
	}
}

// flush has every rank publish what it holds back, such as a clear: an idle
// engine is silent.
func (f *fleet) flush() {
	f.t.Helper()
	for i, w := range f.workers {
		for r := range w.Config().Ranks {
			prompt := []uint32{9, 9, 9, 9, uint32(i), uint32(r), 1, 2, 3}
			f.until("flush "+id(i, r), func() bool { return generate(w, r, prompt, 1, "", "") == nil })
		}
	}
	client.CloseIdleConnections()
}

func startNATS(t *testing.T, o natsd.Options) *natsd.Server {
	t.Helper()
	s, err := natsd.Start(o)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

var loras = strings.Fields("adapter-a adapter-b")
