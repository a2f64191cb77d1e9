package router_test

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"
	"go.uber.org/goleak"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/kinference/kinference/internal/daemon"
	"github.com/kinference/kinference/internal/rpc"
	"github.com/kinference/kinference/internal/testenv"
	adminv1 "github.com/kinference/kinference/proto/gen/kinference/admin/v1"
	"github.com/kinference/kinference/proto/gen/kinference/admin/v1/adminv1connect"
	kvtrackerv1 "github.com/kinference/kinference/proto/gen/kinference/kvtracker/v1"
	"github.com/kinference/kinference/proto/gen/kinference/kvtracker/v1/kvtrackerv1connect"
	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
	"github.com/kinference/kinference/proto/gen/kinference/router/v1/routerv1connect"
	"github.com/kinference/kinference/services/router"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const patience = time.Minute // for busy machines

// engine is the part of a worker that the router probes.
type engine struct {
	*httptest.Server
	mu     sync.Mutex
	status int
}

func newEngine(t *testing.T) *engine {
	e := &engine{status: http.StatusOK}
	mux := http.NewServeMux()
	mux.HandleFunc("/health", func(w http.ResponseWriter, _ *http.Request) {
		e.mu.Lock()
		defer e.mu.Unlock()
		w.WriteHeader(e.status)
	})
	mux.HandleFunc("/v1/models", func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprint(w, `{"object":"list","data":[{"id":"m","max_model_len":32768}]}`)
	})
	e.Server = httptest.NewServer(mux)
	t.Cleanup(e.Close)
	return e
}

func (e *engine) set(status int) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.status = status
}

// tracker is a kvtracker that says what a test wants.
type tracker struct {
	kvtrackerv1connect.UnimplementedKVTrackerServiceHandler
	addr string

	mu      sync.Mutex
	overlap map[string]uint32            // tokens by worker
	of      map[uint64]map[string]uint32 // the same by first hash of the prompt, where overlap does not count
	delay   chan struct{}                // Match waits for it to close
	asked   int
	streams []chan *kvtrackerv1.WatchWorkersResponse
	states  []*kvtrackerv1.WorkerState
}

func (k *tracker) Match(ctx context.Context, req *kvtrackerv1.MatchRequest) (*kvtrackerv1.MatchResponse, error) {
	k.mu.Lock()
	k.asked++
	delay := k.delay
	out := &kvtrackerv1.MatchResponse{}
	for _, q := range req.Queries {
		r := &kvtrackerv1.MatchResult{}
		overlap := k.overlap
		if k.of != nil && len(q.BlockHashes) > 0 {
			overlap = k.of[q.BlockHashes[0]]
		}
		for w, n := range overlap {
			r.Matches = append(r.Matches, &kvtrackerv1.WorkerMatch{Worker: w, GpuTokens: n, CpuTokens: n})
		}
		out.Results = append(out.Results, r)
	}
	k.mu.Unlock()
	if delay != nil {
		select {
		case <-delay:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	return out, nil
}

func (k *tracker) WatchWorkers(ctx context.Context, _ *kvtrackerv1.WatchWorkersRequest, out *connect.ServerStream[kvtrackerv1.WatchWorkersResponse]) error {
	updates := make(chan *kvtrackerv1.WatchWorkersResponse, 16)
	k.mu.Lock()
	k.streams = append(k.streams, updates)
	first := &kvtrackerv1.WatchWorkersResponse{Workers: k.states, Synced: true}
	k.mu.Unlock()
	if err := out.Send(first); err != nil {
		return err
	}
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case m := <-updates:
			if err := out.Send(m); err != nil {
				return err
			}
		}
	}
}

// say sends states to all streams and lists them to later ones.
func (k *tracker) say(states ...*kvtrackerv1.WorkerState) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.states = states
	for _, s := range k.streams {
		s <- &kvtrackerv1.WatchWorkersResponse{Workers: states}
	}
}

func (k *tracker) match(overlap map[string]uint32) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.overlap = overlap
}

func (k *tracker) url() string { return "http://" + k.addr }

// serve runs the tracker on its address and returns a function that stops it.
func (k *tracker) serve(t *testing.T) (stop func()) {
	t.Helper()
	if k.addr == "" {
		k.addr = testenv.FreeAddr(t)
	}
	l, err := net.Listen("tcp", k.addr)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error)
	go func() {
		done <- rpc.Serve(ctx, l, rpc.Mount[kvtrackerv1connect.KVTrackerServiceHandler](ctx, k, kvtrackerv1connect.NewKVTrackerServiceHandler))
	}()
	stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(stop)
	return stop
}

func newTracker() *tracker { return new(tracker) }

func ready(id string, edit func(*kvtrackerv1.WorkerState)) *kvtrackerv1.WorkerState {
	s := &kvtrackerv1.WorkerState{Worker: id, WorkerSet: "demo/sim", Ready: true, BlockSize: 16, TotalBlocks: 10000,
		Load: &kvtrackerv1.Load{}, SampleAge: durationpb.New(10 * time.Millisecond), Epoch: "1"}
	if edit != nil {
		edit(s)
	}
	return s
}

// world is a running router with its client.
type world struct {
	t      *testing.T
	client routerv1connect.RouterServiceClient
	admin  adminv1connect.AdminServiceClient
	dir    string
	shell  *daemon.Shell
	log    chan string
}

// Write takes a line of the router's log.
func (w *world) Write(line []byte) (int, error) {
	select {
	case w.log <- string(line):
	default: // nobody reads: the test does not care about the log
	}
	return len(line), nil
}

// logged waits for a line with both texts.
func (w *world) logged(a, b string) {
	w.t.Helper()
	timeout := time.After(patience)
	for {
		select {
		case line := <-w.log:
			if strings.Contains(line, a) && strings.Contains(line, b) {
				return
			}
		case <-timeout:
			w.t.Fatalf("not logged: %s … %s", a, b)
		}
	}
}

// measured tells whether a line of /metrics has all of the texts.
func (w *world) measured(texts ...string) bool {
	rec := httptest.NewRecorder()
	w.shell.Admin().ServeHTTP(rec, httptest.NewRequest(http.MethodGet, "/metrics", nil))
	for line := range strings.Lines(rec.Body.String()) {
		all := !strings.HasPrefix(line, "#")
		for _, x := range texts {
			all = all && strings.Contains(line, x)
		}
		if all {
			return true
		}
	}
	return false
}

// start runs a router over a set demo/sim of the engines named a, b, …
func start(t *testing.T, c router.Config, engines ...*engine) *world {
	t.Helper()
	w := &world{t: t, dir: t.TempDir(), log: make(chan string, 1000)}
	w.write("sim.yaml", sim(engines...))
	c.ConfigDir, c.Listener = w.dir, testenv.Listen(t)
	c.AdminAPIListener, c.AdminSecret = testenv.Listen(t), "secret of the test"
	if c.ProbeInterval == 0 {
		c.ProbeInterval = 20 * time.Millisecond
	}
	if c.MatchTimeout == 0 {
		c.MatchTimeout = patience // a busy test machine is not a slow tracker
	}
	shell, err := daemon.NewShell(t.Context(), daemon.Settings{Output: w, LogFormat: "text"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(shell.Close)
	w.shell = shell
	ctx, cancel := context.WithCancel(shell.Context(context.Background(), "router"))
	done := make(chan error)
	go func() { done <- (&router.Service{Config: c}).Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run: %v", err)
		}
	})
	w.admin = rpc.Client(ctx, "http://"+c.AdminAPIListener.Addr().String(), adminv1connect.NewAdminServiceClient, rpc.Bearer(c.AdminSecret))
	w.client = rpc.Client(ctx, "http://"+c.Listener.Addr().String(), routerv1connect.NewRouterServiceClient)
	return w
}

func sim(engines ...*engine) string {
	var b strings.Builder
	b.WriteString("apiVersion: kinference.buoyant.io/v1alpha1\nkind: InferenceWorkerSet\nmetadata: { name: sim, namespace: demo }\nspec:\n  endpoints:\n")
	for i, e := range engines {
		fmt.Fprintf(&b, "    - { name: %c, address: %q }\n", 'a'+i, e.URL)
	}
	b.WriteString("  models: [ { name: m, aliases: [ alias ], loras: [ { name: lora } ] } ]\n")
	return b.String()
}

// withEvents lets the endpoints of a set publish events.
func withEvents(set string) string {
	return strings.ReplaceAll(set, " }\n  models", `, kvEvents: "tcp://127.0.0.1:5557" }`+"\n  models")
}

func (w *world) write(name, content string) {
	w.t.Helper()
	// By rename, so that no half-written file is loaded.
	tmp := filepath.Join(w.dir, "."+name)
	if err := os.WriteFile(tmp, []byte(content), 0o644); err != nil {
		w.t.Fatal(err)
	}
	if err := os.Rename(tmp, filepath.Join(w.dir, name)); err != nil {
		w.t.Fatal(err)
	}
}

// until waits for a catalog that has what a test needs.
func (w *world) until(what string, ok func(*routerv1.Catalog) bool) *routerv1.Catalog {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(w.t.Context(), patience)
	defer cancel()
	s, err := w.client.WatchCatalog(ctx, &routerv1.WatchCatalogRequest{})
	if err != nil {
		w.t.Fatal(err)
	}
	defer s.Close()
	var last *routerv1.Catalog
	var version uint64
	for s.Receive() {
		last = s.Msg().Catalog
		if last.Version <= version {
			w.t.Errorf("version %d after %d", last.Version, version)
		}
		version = last.Version
		if ok(last) {
			return last
		}
	}
	w.t.Fatalf("no catalog with %s; last %v, error %v", what, last, s.Err())
	return nil
}

func modelReady(name string) func(*routerv1.Catalog) bool {
	return func(c *routerv1.Catalog) bool {
		for _, m := range c.Models {
			if m.Name == name {
				return m.Ready
			}
		}
		return false
	}
}

// allReady waits for all workers: a model is ready with the first of its own.
func (w *world) allReady() {
	w.t.Helper()
	eventually(w.t, "all workers ready", func() bool {
		s, err := w.admin.ListWorkers(w.t.Context(), &adminv1.ListWorkersRequest{})
		if err != nil {
			w.t.Fatal(err)
		}
		return len(s.GetWorkers()) > 0 && !slices.ContainsFunc(s.GetWorkers(), func(x *adminv1.WorkerStatus) bool { return !x.GetReady() })
	})
}

func blockSize(n uint32) func(*routerv1.Catalog) bool {
	return func(c *routerv1.Catalog) bool { return len(c.Profiles) > 0 && c.Profiles[0].BlockSize == n }
}

const profile = "demo/sim/m"

func request(id string, hashes ...uint64) *routerv1.RouteRequest {
	return &routerv1.RouteRequest{RequestId: id, Model: "m", Tenant: "team", Prompts: []*routerv1.Prompt{
		{Profile: profile, Tokens: uint32(16*len(hashes)) + 8, BlockSize: 16, BlockHashes: hashes},
	}}
}

func hashes(seed uint64, n int) []uint64 {
	out := make([]uint64, n)
	for i := range out {
		out[i] = seed<<32 + uint64(i)
	}
	return out
}

func (w *world) route(r *routerv1.RouteRequest) []*routerv1.Endpoint {
	w.t.Helper()
	resp, err := w.client.Route(w.t.Context(), r)
	if err != nil {
		w.t.Fatalf("route %s: %v", r.RequestId, err)
	}
	return resp.Endpoints
}

func (w *world) report(id string, reports ...*routerv1.Report) {
	w.t.Helper()
	for _, r := range reports {
		r.RequestId = id
	}
	if _, err := w.client.Report(w.t.Context(), &routerv1.ReportRequest{Reports: reports}); err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) explain(id string) *adminv1.Decision {
	w.t.Helper()
	resp, err := w.admin.Explain(w.t.Context(), &adminv1.ExplainRequest{RequestId: id})
	if err != nil {
		w.t.Fatal(err)
	}
	return resp.Decision
}

func firstToken(d time.Duration) *routerv1.Report {
	return &routerv1.Report{Event: &routerv1.Report_FirstToken{FirstToken: &routerv1.FirstToken{Ttft: durationpb.New(d)}}}
}

func done(cached uint32) *routerv1.Report {
	return &routerv1.Report{Event: &routerv1.Report_Done{Done: &routerv1.Done{Outcome: routerv1.Outcome_OUTCOME_OK, CachedTokens: &cached}}}
}

func moved(worker, reason string) *routerv1.Report {
	return &routerv1.Report{Event: &routerv1.Report_Moved{Moved: &routerv1.Moved{Worker: worker, Reason: reason}}}
}

func workers(endpoints []*routerv1.Endpoint) []string {
	var out []string
	for _, e := range endpoints {
		out = append(out, e.Worker)
	}
	return out
}
