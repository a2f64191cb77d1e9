package wall

import (
	"context"
	"errors"
	"maps"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/kinference/kinference/internal/bench/load"
	"github.com/kinference/kinference/internal/bench/workload"
	"github.com/kinference/kinference/internal/fleetsim/engine"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func newText(t *testing.T) *Text {
	t.Helper()
	text, err := NewText()
	if err != nil {
		t.Fatal(err)
	}
	return text
}

func newFleet(t *testing.T, n int, scale float64) *Fleet {
	t.Helper()
	f, err := StartFleet(t.Context(), n, engine.L40SQwen27B, scale, 1)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(f.Stop)
	return f
}

// Run fails by itself if a prompt's length, as the worker counts it, is not
// what was planned.
func TestRun(t *testing.T) {
	text := newText(t)
	fleet := newFleet(t, 2, 2000)
	for _, sc := range []workload.Scenario{
		{Name: "prefix", Prefixes: 2, PrefixTokens: 1600, FirstTokens: 100, Turns: 1, OutputTokens: 5, Streams: 2, Count: 6},
		{Name: "turns", FirstTokens: 900, Turns: 3, TurnTokens: 900, OutputTokens: 20, Streams: 2, Ramp: 1, Warm: 1, Count: 8},
	} {
		for name, newRoute := range map[string]func([]string, uint64) (Route, error){
			"one worker":  func(urls []string, _ uint64) (Route, error) { return Gateway(urls[0]), nil },
			"per request": ServicePerRequest, "per connection": ServicePerConnection,
		} {
			t.Run(sc.Name+" "+name, func(t *testing.T) {
				route, err := newRoute(fleet.URLs(), 1)
				if err != nil {
					t.Fatal(err)
				}
				run, err := Run(t.Context(), text, sc, 1, fleet.Scale, route)
				if err != nil || len(run.Samples) != sc.Warm+sc.Count {
					t.Fatalf("%d samples, error %v", len(run.Samples), err)
				}
				cached := 0
				for _, s := range run.Samples {
					cached += s.Cached
					if s.Failed || s.TTFT <= 0 || s.E2E < s.TTFT || s.Output != sc.OutputTokens {
						t.Errorf("%+v", s)
					}
				}
				if name == "one worker" && cached == 0 {
					t.Error("nothing was reused, though all went to one worker")
				}
			})
		}
	}
}

// Light tenants send beside the streams, and to their own path.
func TestLightTenants(t *testing.T) {
	text := newText(t)
	fleet := newFleet(t, 1, 2000)
	sc := workload.Scenario{Name: "t", Prefixes: 2, PrefixTokens: 1600, FirstTokens: 100, Turns: 1, OutputTokens: 20, Sigma: .5, Streams: 2, Warm: 2, Count: 40,
		Victims: 2, VictimRate: .03}
	var mu sync.Mutex
	asked := map[int]int{}
	run, err := RunTenants(t.Context(), text, sc, 1, fleet.Scale, Gateway(fleet.URLs()[0]), func(tenant int) string {
		mu.Lock()
		defer mu.Unlock()
		asked[tenant]++
		return ""
	})
	if err != nil {
		t.Fatal(err)
	}
	got := map[int]int{}
	for _, s := range run.Samples {
		if s.Failed || s.Output < 1 {
			t.Errorf("%+v", s)
		}
		got[s.Tenant]++
	}
	if got[0] != sc.Warm+sc.Count || got[1] == 0 || got[2] == 0 || !maps.Equal(got, asked) {
		t.Errorf("requests by tenant %v, paths asked for %v", got, asked)
	}
	dir := t.TempDir()
	if err := errors.Join(fleet.WriteConfig(dir), WriteTenants(dir, 2)); err != nil {
		t.Fatal(err)
	}
	if TenantPath(0) != "" || TenantPath(2) != "/light2" {
		t.Errorf("paths %q, %q", TenantPath(0), TenantPath(2))
	}
}

// A prompt of another length than planned fails the run, also a light tenant's whose
// answer comes when the load is over.
func TestLightTenantsFail(t *testing.T) {
	text := newText(t)
	fleet := newFleet(t, 1, 2000)
	worker, err := url.Parse(fleet.URLs()[0])
	if err != nil {
		t.Fatal(err)
	}
	sc := workload.Scenario{Name: "t", Prefixes: 1, PrefixTokens: 1600, FirstTokens: 100, Turns: 1, OutputTokens: 5, Streams: 1, Count: 2, Victims: 1, VictimRate: .1}
	proxy, other := httputil.NewSingleHostReverseProxy(worker), &load.Fake{Model: Model} // which counts no tokens
	asked, over := make(chan struct{}), make(chan struct{})
	var light sync.Once
	var loaded atomic.Int32
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if strings.HasPrefix(r.URL.Path, TenantPath(1)) {
			light.Do(func() { close(asked) })
			<-over
			http.StripPrefix(TenantPath(1), other).ServeHTTP(w, r)
			return
		}
		last := int(loaded.Add(1)) == sc.Count
		if last {
			<-asked
		}
		proxy.ServeHTTP(w, r)
		if last {
			close(over)
		}
	}))
	defer server.Close()
	run, err := RunTenants(t.Context(), text, sc, 1, fleet.Scale, Gateway(server.URL), TenantPath)
	if err == nil || !strings.Contains(err.Error(), "counts 0 tokens") {
		t.Errorf("%d samples, error %v", len(run.Samples), err)
	}
}

// The next turn must hit the blocks of the answer that the worker generated:
// its text, sent back, has the same tokens.
func TestAnswersAreReused(t *testing.T) {
	text := newText(t)
	profile := engine.L40SPlain16
	f, err := StartFleet(t.Context(), 1, profile, 2000, 1)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Stop()
	sc := workload.Scenario{Name: "t", FirstTokens: 64, Turns: 2, TurnTokens: 64, OutputTokens: 160, Streams: 1, Count: 2}
	run, err := Run(t.Context(), text, sc, 1, f.Scale, Gateway(f.URLs()[0]))
	if err != nil || len(run.Samples) != 2 {
		t.Fatalf("%d samples, error %v", len(run.Samples), err)
	}
	if got, want := run.Samples[1].Cached, (64+160-1)/16*16; got < want {
		t.Errorf("the second turn reused %d tokens, want %d at least", got, want)
	}
}

func TestRunCountsFailures(t *testing.T) {
	text := newText(t)
	fleet := newFleet(t, 1, 2000)
	fleet.Workers[0].Kill()
	sc := workload.Scenario{Name: "t", FirstTokens: 100, Turns: 1, OutputTokens: 5, Streams: 2, Count: 4}
	run, err := Run(t.Context(), text, sc, 1, fleet.Scale, Gateway(fleet.URLs()[0]))
	if err != nil || run.Summarise().Failed != 4 {
		t.Errorf("%+v, error %v; want 4 failures", run.Summarise(), err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := Run(ctx, text, sc, 1, fleet.Scale, Gateway(fleet.URLs()[0])); err == nil {
		t.Error("no error from a run that was cancelled")
	}
}

func TestRunTrace(t *testing.T) {
	text := newText(t)
	fleet := newFleet(t, 1, 2000)
	trace := []workload.TraceRequest{
		{At: 0, Input: 1600, Output: 3, IDs: []uint64{0, 1, 2, 3}},
		{At: 60, Input: 1700, Output: 3, IDs: []uint64{0, 1, 2, 4}},
		{At: 120, Input: 600, Output: 3, IDs: []uint64{9, 10}},
	}
	run, reuse, err := RunTrace(t.Context(), text, trace, fleet, TraceOptions{Stretch: 1, Route: Gateway(fleet.URLs()[0])})
	if err != nil || reuse.Requests != 3 || reuse.Failed != 0 || reuse.Prompt != 3900 {
		t.Fatalf("%+v, error %v", reuse, err)
	}
	// 1536 shared tokens are one page of 784.
	if reuse.Cached != 784 || reuse.Bound != 784 || reuse.Best != 784 || reuse.BoundFine != 1536 {
		t.Errorf("%+v, want 784 tokens reused of 784", reuse)
	}
	if len(run.Samples) != 3 {
		t.Errorf("%d samples", len(run.Samples))
	}
}

func TestWriteConfig(t *testing.T) {
	fleet := newFleet(t, 1, 20)
	dir := filepath.Join(t.TempDir(), "conf")
	if err := fleet.WriteConfig(dir); err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile(filepath.Join(dir, "workers.yaml"))
	w := fleet.Workers[0]
	for _, want := range []string{"kind: InferenceWorkerSet", "sim-0", w.Addr(), w.EventsAddr(0), w.ReplayAddr(0), "interval: 50ms"} {
		if err != nil || !strings.Contains(string(data), want) {
			t.Errorf("%q is not in the resource (%v):\n%s", want, err, data)
		}
	}
}

func TestWaitServing(t *testing.T) {
	s := httptest.NewServer(&load.Fake{Model: Model})
	defer s.Close()
	tries := 0
	if err := WaitServing(t.Context(), s.URL, func(context.Context) error {
		if tries++; tries < 3 {
			return os.ErrNotExist
		}
		return nil
	}); err != nil || tries != 3 {
		t.Errorf("%d tries, error %v", tries, err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := WaitServing(ctx, s.URL, func(context.Context) error { return os.ErrNotExist }); err == nil {
		t.Error("no error from a gateway that never serves")
	}
}

func TestHeld(t *testing.T) {
	truth := map[string]int{"sim-0": 5, "sim-1": 7}
	if got := held(truth, "bench.sim.sim-1/0"); got != 7 {
		t.Errorf("held = %d, want 7", got)
	}
}
