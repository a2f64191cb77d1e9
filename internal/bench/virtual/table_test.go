package virtual

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kinference/kinference/internal/bench/stats"
	"github.com/kinference/kinference/internal/bench/workload"
)

// scenario finds a built-in scenario.
func scenario(t testing.TB, name string) workload.Scenario {
	t.Helper()
	sc, err := workload.Lookup(name)
	if err != nil {
		t.Fatal(err)
	}
	return sc
}

// TestPublishedTable is the gate of what the product promises: the published
// table, on seeds that no parameter was chosen with, against a Kubernetes
// Service that picks at random per request. Virtual time makes it exact, so a
// failure is a change of behaviour, never noise of the machine.
func TestPublishedTable(t *testing.T) {
	seeds := []uint64{workload.HeldOutSeed(0), workload.HeldOutSeed(1), workload.HeldOutSeed(2)}
	scenarios := []workload.Scenario{scenario(t, "S0"), scenario(t, "S1"), scenario(t, "S2")}
	cells, err := Table(scenarios, []string{"random", "connection", Kinference}, seeds)
	if err != nil {
		t.Fatal(err)
	}
	mean := map[string]stats.Summary{}
	for _, c := range cells {
		m := c.Mean()
		mean[c.Scenario+" "+c.Policy] = m
		t.Logf("%-3s %-11s TTFT %.2f/%.2f/%.2f e2e %.2f/%.2f s, %.3f requests/s, hit %.3f",
			c.Scenario, c.Policy, m.TTFT50, m.TTFT90, m.TTFT99, m.E2E50, m.E2E99, m.RPS, m.Hit)
		if m.Failed != 0 {
			t.Errorf("%s %s: %d requests failed", c.Scenario, c.Policy, m.Failed)
		}
	}
	within := func(what string, got, lo, hi float64) {
		t.Helper()
		if got < lo || got > hi {
			t.Errorf("%s = %.3f, want %.3f to %.3f", what, got, lo, hi)
		}
	}
	const most = 1e9
	// The baselines are those of the published table and of the design study
	// (within 10 %): a model that drifts would make any ratio.
	within("S0 random TTFT p50", mean["S0 random"].TTFT50, 6.6*.9, 6.9*1.1)
	within("S1 random TTFT p50", mean["S1 random"].TTFT50, 6.5*.9, 6.9*1.1)
	within("S1 random TTFT p99", mean["S1 random"].TTFT99, 20*.8, 22*1.2)
	within("S1 random e2e p50", mean["S1 random"].E2E50, 19.7*.9, 20.5*1.1)
	within("S2 random TTFT p50", mean["S2 random"].TTFT50, 1.54*.9, 1.7*1.1)
	within("S2 connection TTFT p50", mean["S2 connection"].TTFT50, .63*.85, .63*1.15)

	s1, r1 := mean["S1 kinference"], mean["S1 random"]
	within("S1 TTFT p50 gain", r1.TTFT50/s1.TTFT50, 20, most)
	within("S1 TTFT p99 gain", r1.TTFT99/s1.TTFT99, 30, most)
	within("S1 e2e p50 ratio", s1.E2E50/r1.E2E50, 0, .55)
	s2, r2 := mean["S2 kinference"], mean["S2 random"]
	within("S2 TTFT p50 gain", r2.TTFT50/s2.TTFT50, 2.4, most)
	within("S2 e2e p50 ratio", s2.E2E50/r2.E2E50, 0, .72)
	// Where nothing is shared nothing can be gained: but nothing may be lost.
	for i := range seeds {
		within("S0 TTFT p50 ratio, paired", cells[2].Runs[i].TTFT50/cells[0].Runs[i].TTFT50, .9, 1.02)
	}
}

func TestRunIsDeterministic(t *testing.T) {
	sc := scenario(t, "S2")
	sc.Warm, sc.Count = 20, 60
	for _, p := range Policies {
		a, err := Run(sc, Options{Policy: p, Seed: 5})
		if err != nil {
			t.Fatal(err)
		}
		b, _ := Run(sc, Options{Policy: p, Seed: 5})
		if diff := cmp.Diff(a, b); diff != "" {
			t.Errorf("%s: equal seeds differ:\n%s", p, diff)
		}
		if len(a.Samples) != sc.Warm+sc.Count {
			t.Errorf("%s: %d samples, want %d", p, len(a.Samples), sc.Warm+sc.Count)
		}
	}
}

// The index is fed by events alone; what it says must be what is in the cache,
// up to what events on their way and evictions since have changed.
func TestIndexAgreesWithCaches(t *testing.T) {
	run, err := Run(scenario(t, "S1"), Options{Policy: Kinference, Seed: 5, Truth: true})
	if err != nil {
		t.Fatal(err)
	}
	matched, possible := 0, 0
	for _, s := range run.Samples {
		matched += s.Matched
		possible += s.Possible
	}
	if d := float64(matched)/float64(possible) - 1; d < -.01 || d > .01 {
		t.Errorf("the index found %d tokens, the caches held %d: %+.2f %%", matched, possible, 100*d)
	}
}

func TestConnectionReuse(t *testing.T) {
	// A conversation at a time: the connection of the previous turn is the first
	// idle one, so every turn goes to one worker.
	sc := scenario(t, "S2")
	sc.Streams, sc.Warm, sc.Count = 1, 0, 30
	run, err := Run(sc, Options{Policy: "connection", Seed: 1})
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range run.Samples {
		if s.Worker != run.Samples[0].Worker {
			t.Fatal("one connection led to two workers")
		}
	}
}

func TestRunErrors(t *testing.T) {
	sc := scenario(t, "S1")
	if _, err := Run(sc, Options{Policy: "nope"}); err == nil {
		t.Error("no error for an unknown policy")
	}
	sc.FirstTokens = 1 << 20
	if _, err := Run(sc, Options{Policy: "random"}); err == nil {
		t.Error("no error for a prompt that no worker can hold")
	}
	if _, err := Table([]workload.Scenario{sc}, []string{"random"}, []uint64{1}); err == nil {
		t.Error("no error from a table with an impossible prompt")
	}
}

func TestSweep(t *testing.T) {
	sc := scenario(t, "S1cap")
	sc.Warm, sc.Count = 10, 20
	caps, err := Sweep([]workload.Scenario{sc}, []string{"random", Kinference}, []int{2, 4}, []uint64{1})
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range caps {
		if len(c.Loads) != 2 || c.Peak < c.Loads[0].RPS || c.Peak < c.Loads[1].RPS || c.Peak <= 0 {
			t.Errorf("sweep of %s: %+v", c.Policy, c)
		}
	}
}

func TestTrace(t *testing.T) {
	trace := workload.GenerateTrace(1, 60)
	run, err := RunTrace(trace, 8.5, Options{Policy: Kinference, Seed: 1})
	if err != nil || len(run.Samples) != len(trace) {
		t.Errorf("%d of %d requests, error %v", len(run.Samples), len(trace), err)
	}
}

// One scenario with one policy: what a row of the table costs.
//
//	go test -bench Run ./internal/bench/virtual
func BenchmarkRun(b *testing.B) {
	sc := scenario(b, "S1")
	b.ReportAllocs()
	for b.Loop() {
		if _, err := Run(sc, Options{Policy: Kinference, Seed: 1}); err != nil {
			b.Fatal(err)
		}
	}
}
