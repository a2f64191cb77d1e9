package openloop

import (
	"math"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kinference/kinference/internal/fleetsim/engine"
)

func settings() Settings {
	return Settings{
		Profile: engine.L40SQwen27B, Workers: 2, Seconds: 60, Seed: 3,
		Tenants: []Tenant{
			{Name: "a", Rate: .2, Prompt: 4000, Output: 60, Spread: .5},
			{Name: "b", Rate: .3, Prompt: 300, Output: 100, Prefixes: 2, PrefixTokens: 3000},
		},
	}
}

// What requests caused is what the engines did, and time passes for all.
func TestTimeIsWhole(t *testing.T) {
	got, err := Run(settings())
	if err != nil {
		t.Fatal(err)
	}
	caused, busy, cached := 0.0, 0.0, 0
	for _, r := range got.Requests {
		if r.Sent > r.First || r.First > r.End || r.Output < 1 || r.Busy <= 0 {
			t.Fatalf("impossible: %+v", r)
		}
		caused += r.Busy
		cached += r.Cached
	}
	last := map[int]float64{}
	for _, s := range got.Samples {
		if s.Busy < last[s.Worker] || s.Busy > s.At+1e-9 {
			t.Fatalf("worker %d was busy for %v of %v s", s.Worker, s.Busy, s.At)
		}
		last[s.Worker] = s.Busy
	}
	for _, b := range last {
		busy += b
	}
	if math.Abs(caused-busy) > 1e-6*busy || busy == 0 || cached == 0 {
		t.Errorf("requests caused %v s, engines were busy for %v s, %d tokens were cached", caused, busy, cached)
	}
	again, _ := Run(settings())
	if diff := cmp.Diff(got, again); diff != "" {
		t.Errorf("equal settings, other results:\n%s", diff)
	}
}

func TestRefuses(t *testing.T) {
	none, much := settings(), settings()
	none.Workers = 0
	much.Tenants[0].Rate = 1e9
	for _, s := range []Settings{none, much} {
		if _, err := Run(s); err == nil {
			t.Errorf("no error for %+v", s)
		}
	}
}
