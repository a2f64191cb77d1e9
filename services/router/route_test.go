package router_test

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/google/go-cmp/cmp"

	"github.com/kinference/kinference/internal/rpc"
	"github.com/kinference/kinference/internal/schedule"
	adminv1 "github.com/kinference/kinference/proto/gen/kinference/admin/v1"
	kvtrackerv1 "github.com/kinference/kinference/proto/gen/kinference/kvtracker/v1"
	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
	"github.com/kinference/kinference/services/router"
)

func TestGoesWhereThePromptIsCached(t *testing.T) {
	k := newTracker()
	k.serve(t)
	k.states = []*kvtrackerv1.WorkerState{ready("demo.sim.a/0", nil), ready("demo.sim.b/0", nil), ready("demo.sim.c/0", nil)}
	k.match(map[string]uint32{"demo.sim.b/0": 160})
	w := start(t, router.Config{KVTrackerURL: k.url()}, newEngine(t), newEngine(t), newEngine(t))
	w.until("the tracker's block size", blockSize(16))

	got := w.route(request("1", hashes(1, 10)...))
	if len(got) != 3 || got[0].Worker != "demo.sim.b/0" || got[0].MatchedTokens != 160 || got[0].UpstreamModel != "m" ||
		got[0].Profile != profile || got[0].DataParallelRank != nil || !strings.HasPrefix(got[0].Url, "http://127.0.0.1:") {
		t.Errorf("endpoints %v", got)
	}
	if got[0].PredictedTtft.AsDuration() >= got[1].PredictedTtft.AsDuration() {
		t.Errorf("predicted %v, then %v", got[0].PredictedTtft.AsDuration(), got[1].PredictedTtft.AsDuration())
	}

	// The alias is served by the same profile.
	r := request("2", hashes(1, 10)...)
	r.Model = "alias"
	if got := w.route(r); got[0].Worker != "demo.sim.b/0" {
		t.Errorf("alias: %v", workers(got))
	}
	// What failed the request is not tried again.
	r = request("3", hashes(1, 10)...)
	r.Exclude = []string{"demo.sim.b/0"}
	if got := w.route(r); len(got) != 2 || got[0].Worker == "demo.sim.b/0" || got[1].Worker == "demo.sim.b/0" {
		t.Errorf("with b excluded: %v", workers(got))
	}
	// A queue longer than a full prefill is worse than a miss.
	k.say(ready("demo.sim.a/0", nil), ready("demo.sim.c/0", nil), ready("demo.sim.b/0", func(s *kvtrackerv1.WorkerState) {
		s.Load.Waiting, s.BlockSize = 50, 32 // the block size shows when the message has arrived
	}))
	w.report("1", done(160))
	w.report("2", done(160))
	n := 0
	eventually(t, "the load arrives", func() bool {
		n++
		id := fmt.Sprint("q", n)
		w.route(request(id, hashes(1, 10)...))
		d := w.explain(id)
		w.report(id, done(0))
		busy := false
		for _, c := range d.Candidates {
			busy = busy || c.Worker == "demo.sim.b/0" && c.Waiting == 50
		}
		if busy && d.Chosen == "demo.sim.b/0" {
			t.Errorf("chosen with 50 waiting there: %s", d.Reason)
		}
		return busy
	})
}

func TestErrors(t *testing.T) {
	down := newEngine(t)
	w := start(t, router.Config{}, down)
	w.until("m ready", modelReady("m"))

	tests := []struct {
		name string
		edit func(*routerv1.RouteRequest)
		code connect.Code
	}{
		{"unknown model", func(r *routerv1.RouteRequest) { r.Model = "gpt-9" }, connect.CodeNotFound},
		{"prompt longer than the context", func(r *routerv1.RouteRequest) { r.Prompts[0].Tokens = 40_000 }, connect.CodeOutOfRange},
		{"every worker has failed", func(r *routerv1.RouteRequest) { r.Exclude = []string{"demo.sim.a/0"} }, connect.CodeUnavailable},
		{"too many prompts", func(r *routerv1.RouteRequest) {
			for range 100 {
				r.Prompts = append(r.Prompts, r.Prompts[0])
			}
		}, connect.CodeInvalidArgument},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			r := request("r", hashes(1, 4)...)
			tt.edit(r)
			_, err := w.client.Route(t.Context(), r)
			if connect.CodeOf(err) != tt.code {
				t.Errorf("error %v, want code %v", err, tt.code)
			}
			if after, ok := rpc.RetryAfter(err); ok != (tt.code == connect.CodeUnavailable) || ok && after <= 0 {
				t.Errorf("retry after %v, %v", after, ok)
			}
		})
	}
	if _, err := w.admin.Explain(t.Context(), &adminv1.ExplainRequest{RequestId: "never"}); connect.CodeOf(err) != connect.CodeNotFound {
		t.Errorf("explain: %v", err)
	}

	down.set(http.StatusServiceUnavailable)
	w.until("m not ready", func(c *routerv1.Catalog) bool { return !modelReady("m")(c) })
	if _, err := w.client.Route(t.Context(), request("r")); connect.CodeOf(err) != connect.CodeUnavailable {
		t.Errorf("no worker ready: %v", err)
	}
	down.set(http.StatusOK)
	w.until("m ready again", modelReady("m"))
	w.route(request("r"))
}

// A worker that is not ready, or gone, is never picked (production-stack 601).
func TestNotReadyIsNeverPicked(t *testing.T) {
	k := newTracker()
	k.serve(t)
	notReady := func(s *kvtrackerv1.WorkerState) { s.Ready = false }
	k.states = []*kvtrackerv1.WorkerState{ready("demo.sim.a/0", notReady), ready("demo.sim.b/0", nil)}
	k.match(map[string]uint32{"demo.sim.a/0": 160})
	a, b := newEngine(t), newEngine(t)
	a.set(http.StatusServiceUnavailable)
	w := start(t, router.Config{KVTrackerURL: k.url()}, a, b)
	w.until("the tracker's block size", blockSize(16))
	for i := range 20 {
		if got := workers(w.route(request(fmt.Sprint(i), hashes(1, 10)...))); len(got) != 1 || got[0] != "demo.sim.b/0" {
			t.Fatalf("request %d: %v", i, got)
		}
	}
	d := w.explain("7")
	last := d.Candidates[len(d.Candidates)-1]
	if last.Worker != "demo.sim.a/0" || !strings.Contains(last.Dropped, "not ready") {
		t.Errorf("record does not say why a was dropped: %v", last)
	}

	// Removed from the resources: gone at once, though it is ready.
	w.write("sim.yaml", sim(a))
	w.until("one worker", func(c *routerv1.Catalog) bool { return len(c.Workers) == 1 })
	if _, err := w.client.Route(t.Context(), request("x")); connect.CodeOf(err) != connect.CodeUnavailable {
		t.Errorf("after b was removed: %v", err)
	}
}

func TestTrackerAway(t *testing.T) {
	k := newTracker()
	stop := k.serve(t)
	k.states = []*kvtrackerv1.WorkerState{ready("demo.sim.a/0", nil), ready("demo.sim.b/0", nil), ready("demo.sim.c/0", nil)}
	w := start(t, router.Config{KVTrackerURL: k.url(), MatchTimeout: 200 * time.Millisecond}, newEngine(t), newEngine(t), newEngine(t))
	w.until("the tracker's block size", blockSize(16))

	// Slow: the decision does not wait longer than it may.
	k.mu.Lock()
	k.delay = make(chan struct{})
	k.mu.Unlock()
	homes := map[uint64]string{}
	for seed := range uint64(6) {
		id := fmt.Sprint("slow", seed)
		homes[seed] = w.route(request(id, hashes(seed, 12)...))[0].Worker
		w.report(id, firstToken(50*time.Millisecond), done(0))
	}
	k.mu.Lock()
	asked := k.asked
	k.delay = nil
	k.mu.Unlock()
	if asked < 6 { // a connection that is just being closed makes it ask twice
		t.Errorf("tracker was asked %d times, want at least 6", asked)
	}

	// Gone: conversations stay where they were, by what was routed.
	stop()
	for seed, home := range homes {
		id := fmt.Sprint("gone", seed)
		if got := w.route(request(id, hashes(seed, 14)...))[0]; got.Worker != home || got.MatchedTokens < 12*16*3/4 {
			t.Errorf("conversation %d moved from %s to %s (%d tokens matched)", seed, home, got.Worker, got.MatchedTokens)
		}
		w.report(id, firstToken(50*time.Millisecond), done(160))
	}

	// Back: its matches count again.
	k.match(map[string]uint32{"demo.sim.c/0": 160})
	k.serve(t)
	n := 0
	eventually(t, "it goes where the tracker says", func() bool {
		n++
		id := fmt.Sprint("back", n)
		e := w.route(request(id, hashes(99, 10)...))[0]
		w.report(id, done(0))
		k.mu.Lock()
		defer k.mu.Unlock()
		return k.asked > asked && e.Worker == "demo.sim.c/0"
	})
}

// A relay that died makes all workers look stale and not ready; the router
// asks them itself before it gives up on them.
func TestStaleTrackerIsChecked(t *testing.T) {
	k := newTracker()
	k.serve(t)
	stale := func(s *kvtrackerv1.WorkerState) {
		s.Ready, s.SampleAge.Seconds = false, 60
	}
	k.states = []*kvtrackerv1.WorkerState{ready("demo.sim.a/0", stale)}
	w := start(t, router.Config{KVTrackerURL: k.url()}, newEngine(t))
	w.until("the tracker's block size", blockSize(16))
	w.until("m ready", modelReady("m"))
	w.route(request("1"))
}

// Where no relay follows a worker any more, what the index says of its cache
// has no value, but what was routed there since has.
func TestStaleIndexIsNotTrusted(t *testing.T) {
	k := newTracker()
	k.serve(t)
	stale := func(s *kvtrackerv1.WorkerState) {
		s.Ready, s.SampleAge.Seconds = false, 60
	}
	k.states = []*kvtrackerv1.WorkerState{ready("demo.sim.a/0", stale), ready("demo.sim.b/0", nil)}
	k.match(map[string]uint32{"demo.sim.a/0": 160, "demo.sim.b/0": 16})
	w := start(t, router.Config{KVTrackerURL: k.url()}, newEngine(t), newEngine(t))
	w.until("the tracker's block size", blockSize(16))
	matched := func(id string) map[string]uint32 {
		for deadline := time.Now().Add(patience); ; {
			got := map[string]uint32{}
			for _, e := range w.route(request(id, hashes(1, 12)...)) {
				got[e.Worker] = e.MatchedTokens
			}
			w.report(id, firstToken(50*time.Millisecond), done(0))
			if len(got) == 2 { // a's probe has answered
				return got
			}
			if time.Now().After(deadline) {
				t.Fatalf("endpoints are %v", got)
			}
		}
	}
	if got := matched("1"); got["demo.sim.a/0"] != 0 || got["demo.sim.b/0"] < 16 {
		t.Errorf("matched %v, want nothing for a", got)
	}
	if !w.measured("kinference_router_tracker_unavailable_total", `reason="stale"`) {
		t.Error("nothing tells of it")
	}
	r := request("2", hashes(2, 12)...)
	r.Exclude = []string{"demo.sim.b"}
	w.route(r)
	w.report("2", moved("demo.sim.b/0", "status"))
	r.RequestId, r.Exclude = "3", nil
	for _, e := range w.route(r) {
		if e.Worker == "demo.sim.a/0" && e.MatchedTokens < 160 {
			t.Errorf("%d tokens matched at a, which got this prompt a moment ago", e.MatchedTokens)
		}
	}
}

func TestApproximateKeepsAffinity(t *testing.T) {
	w := start(t, router.Config{}, newEngine(t), newEngine(t), newEngine(t))
	w.allReady()
	used := map[string]bool{}
	for seed := range uint64(9) {
		home := ""
		for turn := range 4 {
			id := fmt.Sprintf("%d-%d", seed, turn)
			r := request(id, hashes(seed, 8+4*turn)...)
			r.Prompts[0].Approximate = true
			got := w.route(r)[0]
			w.report(id, firstToken(50*time.Millisecond), done(0))
			if turn == 0 {
				home = got.Worker
				used[home] = true
			} else if got.Worker != home {
				t.Errorf("turn %d of %d moved from %s to %s", turn, seed, home, got.Worker)
			}
		}
	}
	if len(used) != 3 {
		t.Errorf("only %v used", used)
	}
	// The length is an estimate, of a picture's text perhaps.
	r := request("long", hashes(1, 4)...)
	r.Prompts[0].Approximate, r.Prompts[0].Tokens = true, 1_000_000
	w.route(r)
}

func TestExplain(t *testing.T) {
	k := newTracker()
	k.serve(t)
	k.states = []*kvtrackerv1.WorkerState{ready("demo.sim.a/0", nil), ready("demo.sim.b/0", func(s *kvtrackerv1.WorkerState) {
		s.Load.Running, s.Load.KvUsage = 3, 0.25
	})}
	k.match(map[string]uint32{"demo.sim.b/0": 1600})
	w := start(t, router.Config{KVTrackerURL: k.url(), DecisionLog: 5}, newEngine(t), newEngine(t))
	c := w.until("the tracker's block size", blockSize(16))
	w.route(request("r", hashes(1, 100)...))
	w.report("r", moved("demo.sim.a/0", "status"), firstToken(123*time.Millisecond), done(32))
	d := w.explain("r")
	if d.RequestId != "r" || d.Model != "m" || d.Tenant != "team" || d.Pool != "demo/default" || d.Policy != schedule.K2 ||
		d.CatalogVersion < c.Version || d.Chosen != "demo.sim.b/0" || d.ServedBy != "demo.sim.a/0" ||
		d.ActualTtft.AsDuration() != 123*time.Millisecond || d.GetActualCachedTokens() != 32 || !strings.HasPrefix(d.Reason, "demo.sim.b/0 costs least") {
		t.Errorf("record %v", d)
	}
	if len(d.Candidates) != 2 {
		t.Fatalf("candidates %v", d.Candidates)
	}
	if b := d.Candidates[0]; b.Worker != "demo.sim.b/0" || b.MatchedTokens != 1600 || b.Running != 3 || b.KvUsage != 0.25 || b.PromptTokens != 1608 ||
		b.PredictedTtft.AsDuration() != b.PredictedWait.AsDuration()+b.PredictedPrefill.AsDuration() ||
		!(b.Score > b.PredictedTtft.AsDuration().Seconds()) || b.Interference.AsDuration() <= 0 || b.PagesNeeded != 101 || b.PagesFree != 7500 || b.Hold != "" {
		t.Errorf("candidate %v", b)
	}
	for i := range 5 {
		w.route(request(fmt.Sprint(i)))
	}
	if _, err := w.admin.Explain(t.Context(), &adminv1.ExplainRequest{RequestId: "r"}); connect.CodeOf(err) != connect.CodeNotFound {
		t.Errorf("the log is not bounded: %v", err)
	}
}

// A worker that refuses connections is left alone before anyone else notices, unless
// there is no other.
func TestSuspect(t *testing.T) {
	k := newTracker()
	k.serve(t)
	k.states = []*kvtrackerv1.WorkerState{ready("demo.sim.a/0", nil), ready("demo.sim.b/0", nil)}
	k.match(map[string]uint32{"demo.sim.a/0": 160})
	w := start(t, router.Config{KVTrackerURL: k.url()}, newEngine(t), newEngine(t))
	w.until("the tracker's block size", blockSize(16))
	if got := workers(w.route(request("1", hashes(1, 10)...))); got[0] != "demo.sim.a/0" {
		t.Fatalf("first: %v", got)
	}
	w.report("1", moved("demo.sim.b/0", "connect"))
	w.report("1", moved("no.such.worker/0", "connect")) // nonsense has no effect
	if got := workers(w.route(request("2", hashes(1, 10)...))); len(got) != 1 || got[0] != "demo.sim.b/0" {
		t.Errorf("after a refused: %v", got)
	}
	w.report("2", moved("demo.sim.a/0", "closed"))
	if got := workers(w.route(request("3", hashes(1, 10)...))); len(got) != 2 {
		t.Errorf("after both have: %v", got)
	}
	again := request("4", hashes(1, 10)...)
	again.Exclude = []string{"demo.sim.a/0"}
	if got := workers(w.route(again)); len(got) != 1 || got[0] != "demo.sim.b/0" {
		t.Errorf("after a failed the request: %v", got)
	}
}

func TestHotReloadKeepsLastGood(t *testing.T) {
	a := newEngine(t)
	w := start(t, router.Config{}, a)
	c := w.until("m ready", modelReady("m"))
	want := []string{"alias", "lora", "m"}
	var names []string
	for _, m := range c.Models {
		names = append(names, m.Name)
	}
	if diff := cmp.Diff(want, names); diff != "" {
		t.Error(diff)
	}
	if c.Models[1].Root != "m" || c.Models[1].Profiles[0] != "demo/sim/lora" || c.Profiles[0].MaxModelLen != 32768 {
		t.Errorf("catalog %v", c)
	}

	// A broken file changes nothing; the next good one does.
	w.write("broken.yaml", "kind: [")
	w.logged("resource is broken", "broken.yaml:1:")
	w.route(request("1"))
	w.write("more.yaml", strings.NewReplacer("name: sim", "name: more", "name: m,", "name: m2,", "[ alias ]", "[]", "name: lora", "name: lora2").Replace(sim(a)))
	w.logged("resources not loaded", "")
	if !w.measured("kinference_router_catalog_problems", `kind="other"`, `severity="error"`, "} 1") {
		t.Error("the broken file is not in the metrics")
	}
	w.route(request("2"))
	if v := w.until("any", func(*routerv1.Catalog) bool { return true }); v.Version != c.Version {
		t.Errorf("version %d after %d though nothing good was loaded", v.Version, c.Version)
	}
	if err := os.Remove(w.dir + "/broken.yaml"); err != nil {
		t.Fatal(err)
	}
	w.write("pool.yaml", "apiVersion: kinference.buoyant.io/v1alpha1\nkind: InferencePool\nmetadata: { name: p, namespace: demo }\nspec:\n"+
		"  destinations: [ { kind: InferenceWorkerSet, name: sim }, { kind: InferenceWorkerSet, name: more }, { kind: InferenceWorkerSet, name: nowhere } ]\n")
	w.logged("resource is not as it seems", "nowhere")
	c = w.until("m2 ready", modelReady("m2"))
	if !modelReady("m")(c) || len(c.Workers) != 2 {
		t.Errorf("catalog %v", c)
	}

	for _, want := range [][]string{
		{"kinference_router_catalog_reloads_total", `result="failed"`},
		{"kinference_router_decisions_total", `outcome="ok"`, `policy="k2"`, "} 2"},
		{"kinference_router_workers_ready", `worker_set="demo/sim"`, "} 1"},
		{"kinference_router_tracker_connected", "} 0"},
		{"kinference_router_requests_in_flight", `worker="demo.sim.a/0"`, "} 2"},
		{"kinference_router_catalog_version", ""},
		{"kinference_router_catalog_problems", `kind="other"`, `severity="error"`, "} 0"},
		{"kinference_router_catalog_problems", `kind="InferencePool"`, `severity="warning"`, "} 1"},
	} {
		if !w.measured(want...) {
			t.Errorf("no metric with %q", want)
		}
	}
}

func TestRunRefusesBadSettings(t *testing.T) {
	err := (&router.Service{Config: router.Config{KVTrackerURL: "kvtracker:9092", Lease: -1}}).Run(t.Context())
	for _, want := range []string{"config:", "kvtracker-url:", "lease:"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v does not name %s", err, want)
		}
	}
	err = (&router.Service{Config: router.Config{ConfigDir: t.TempDir(), Policy: "nearest"}}).Run(context.Background())
	if err == nil || !strings.Contains(err.Error(), "nearest") {
		t.Errorf("error %v", err)
	}
}
