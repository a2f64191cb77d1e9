package router_test

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	adminv1 "github.com/kinference/kinference/proto/gen/kinference/admin/v1"
	kvtrackerv1 "github.com/kinference/kinference/proto/gen/kinference/kvtracker/v1"
	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
	"github.com/kinference/kinference/services/router"
)

const (
	agrees  = routerv1.ParityState_PARITY_STATE_AGREES
	differs = routerv1.ParityState_PARITY_STATE_DIFFERS
)

func (w *world) status() *adminv1.StatusResponse {
	w.t.Helper()
	s, err := w.admin.Status(w.t.Context(), &adminv1.StatusRequest{})
	if err != nil {
		w.t.Fatal(err)
	}
	return s
}

// profile is the status of the profile that tests use.
func (w *world) profile() *adminv1.ProfileStatus {
	w.t.Helper()
	for _, p := range w.status().GetProfiles() {
		if p.GetProfile() == profile {
			return p
		}
	}
	w.t.Fatal("the profile has no status")
	return nil
}

// serve is a request from its decision to its end; it returns where it went.
func (w *world) serve(id string, r *routerv1.RouteRequest, cached uint32) *routerv1.Endpoint {
	w.t.Helper()
	r.RequestId = id
	e := w.route(r)[0]
	w.report(id, firstToken(50*time.Millisecond), done(cached))
	return e
}

// What ingresses find reaches all ingresses by the catalog, and people by the
// status.
func TestTokenParity(t *testing.T) {
	w := start(t, router.Config{}, newEngine(t), newEngine(t))
	model := t.TempDir()
	if err := os.WriteFile(filepath.Join(model, "tokenizer.json"), []byte("{}"), 0o600); err != nil {
		t.Fatal(err)
	}
	w.write("sim.yaml", sim(newEngine(t), newEngine(t))+fmt.Sprintf("  tokenizer: { path: %q }\n", model))
	tokenizer := func(c *routerv1.Catalog) bool { return len(c.Profiles) > 0 && c.Profiles[0].TokenizerPath != "" }
	w.until("the tokenizer", tokenizer)
	if p := w.profile(); p.GetSource() != adminv1.TokenSource_TOKEN_SOURCE_LOCAL || p.GetTokens() != 0 {
		t.Errorf("before any report: %v", p)
	}
	say := func(verdicts ...*routerv1.Parity) {
		t.Helper()
		if _, err := w.client.Report(t.Context(), &routerv1.ReportRequest{Parity: &routerv1.ParityReport{Ingress: "i", Verdicts: verdicts}}); err != nil {
			t.Fatal(err)
		}
	}
	template := routerv1.ParityCause_PARITY_CAUSE_TEMPLATE
	say(&routerv1.Parity{Worker: "demo.sim.a", State: differs, Cause: template, CheckedUnixNanos: 5}, &routerv1.Parity{Worker: "demo.sim.b", State: agrees},
		&routerv1.Parity{Profile: profile, State: differs, Cause: template})
	c := w.until("the verdict", func(c *routerv1.Catalog) bool { return tokenizer(c) && c.Profiles[0].Parity == differs })
	if c.Profiles[0].ParityCause != template || c.Profiles[1].Parity != agrees {
		t.Errorf("catalog has %v", c.Profiles)
	}
	p := w.profile()
	if p.GetSource() != adminv1.TokenSource_TOKEN_SOURCE_DISTRUSTED || p.GetTokens() != differs || p.GetTokensCause() != template || p.GetWorkersAgree() != 1 || p.GetWorkersDiffer() != 1 {
		t.Errorf("status %v", p)
	}
	for _, worker := range w.status().GetWorkers() {
		want := map[string]routerv1.ParityState{"demo.sim.a/0": differs, "demo.sim.b/0": agrees}[worker.GetWorker()]
		if worker.GetTokens() != want {
			t.Errorf("%s: %v", worker.GetWorker(), worker)
		}
	}
	say(&routerv1.Parity{Worker: "demo.sim.a", State: agrees})
	w.until("it is over", func(c *routerv1.Catalog) bool { return c.Profiles[0].Parity == agrees })
}

func TestStatus(t *testing.T) {
	k := newTracker()
	k.serve(t)
	k.states = []*kvtrackerv1.WorkerState{ready("demo.sim.a/0", func(s *kvtrackerv1.WorkerState) {
		s.Index = &kvtrackerv1.IndexState{Live: true, Complete: true, Blocks: 7, Skipped: 2}
	})}
	b := newEngine(t)
	b.set(503)
	w := start(t, router.Config{KVTrackerURL: k.url()}, newEngine(t), b)
	c := w.until("the tracker's block size and the context", func(c *routerv1.Catalog) bool { return blockSize(16)(c) && c.Profiles[0].MaxModelLen > 0 })
	if c.Epochs["demo.sim.a"] != "1" || len(c.Epochs) != 1 {
		t.Errorf("epochs %v", c.Epochs)
	}
	s := w.status()
	if !s.GetTrackerConnected() || s.GetCatalogVersion() != c.Version || len(s.GetWorkers()) != 2 || len(s.GetProfiles()) != 2 {
		t.Fatalf("status %v", s)
	}
	a := s.GetWorkers()[0]
	if !a.GetReady() || a.GetBlockSize() != 16 || a.GetMaxModelLen() != 32768 || a.GetEpoch() != "1" || a.SampleAge == nil || !a.GetIndex().GetLive() || a.GetIndex().GetBlocks() != 7 {
		t.Errorf("worker a: %v", a)
	}
	if got := s.GetWorkers()[1]; got.GetReady() || got.GetReason() == "" || got.SampleAge != nil || got.Index != nil {
		t.Errorf("worker b: %v", got)
	}
	if p := w.profile(); p.GetBlockSize() != 16 || p.GetSource() != adminv1.TokenSource_TOKEN_SOURCE_ASKED || p.GetWorkerSet() != "demo/sim" {
		t.Errorf("profile: %v", p)
	}
}

// A worker whose blocks are of another size can be in no index of ours: it is
// shown, and what was routed there is remembered instead.
func TestBlockSizeDiffers(t *testing.T) {
	k := newTracker()
	k.serve(t)
	big := func(s *kvtrackerv1.WorkerState) { s.BlockSize = 32 }
	k.states = []*kvtrackerv1.WorkerState{ready("demo.sim.a/0", nil), ready("demo.sim.b/0", nil), ready("demo.sim.c/0", big)}
	w := start(t, router.Config{KVTrackerURL: k.url()}, newEngine(t), newEngine(t), newEngine(t))
	w.until("the block size of most", blockSize(16))
	r := request("", hashes(1, 100)...)
	r.Exclude = []string{"demo.sim.a/0", "demo.sim.b/0"}
	w.serve("first", r, 0)
	w.logged("the index cannot know", "cause=block_size")
	r.Exclude = nil
	e := w.serve("again", r, 1600)
	if e.Worker != "demo.sim.c/0" || e.MatchedTokens < 1200 {
		t.Errorf("went to %s, %d tokens matched", e.Worker, e.MatchedTokens)
	}
	p := w.profile()
	if p.GetCached() != differs || p.GetCachedCause() != routerv1.ParityCause_PARITY_CAUSE_BLOCK_SIZE || !slices.Contains(p.GetCachedDiffers(), "demo.sim.c/0") {
		t.Errorf("status %v", p)
	}
	if !w.measured("kinference_router_parity_differs", `cause="block_size"`, profile, " 1") {
		t.Error("not in the metrics")
	}
}

// An index that knows nothing of what an engine has is found out by what the
// engine reports: own memory then stands in, until the index is right again.
func TestBlindIndex(t *testing.T) {
	k := newTracker()
	k.serve(t)
	live := func(s *kvtrackerv1.WorkerState) { s.Index = &kvtrackerv1.IndexState{Live: true, Complete: true} }
	k.states = []*kvtrackerv1.WorkerState{ready("demo.sim.a/0", live)}
	w := start(t, router.Config{KVTrackerURL: k.url(), TimeScale: 100}, newEngine(t))
	w.write("sim.yaml", withEvents(sim(newEngine(t))))
	w.until("events and the block size", func(c *routerv1.Catalog) bool { return blockSize(16)(c) && c.Workers[0].KvEvents != "" })
	deadline := time.Now().Add(patience)
	n := 0
	serve := func(cached uint32) *routerv1.Endpoint {
		t.Helper()
		if n++; time.Now().After(deadline) {
			t.Fatalf("not within %v; status %v", patience, w.profile())
		}
		return w.serve(fmt.Sprint(n), request("", hashes(uint64(n%50), 100)...), cached)
	}
	// Nobody else has these prompts on the way: the ledger forgets a request
	// two seconds of the fleet's time after its end.
	for w.profile().GetCached() != differs {
		serve(1600)
	}
	if p := w.profile(); p.GetCachedCause() != routerv1.ParityCause_PARITY_CAUSE_HASH || p.GetCachedCounts().GetTooFew() == 0 {
		t.Errorf("status %v", p)
	}
	w.logged("the index does not agree", "cause=hash")
	if e := serve(1600); e.MatchedTokens < 1200 {
		t.Errorf("%d tokens matched by own memory", e.MatchedTokens)
	}
	k.match(map[string]uint32{"demo.sim.a/0": 1600})
	for w.profile().GetCached() != agrees {
		serve(1600)
	}
	if !w.measured("kinference_router_parity_requests", `result="agree"`, profile) || !w.measured("kinference_router_parity_differs", `cause="none"`, profile, " 0") {
		t.Error("not in the metrics")
	}
}
