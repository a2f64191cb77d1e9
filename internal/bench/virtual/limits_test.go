package virtual

import (
	"encoding/json"
	"flag"
	"os"
	"runtime"
	"testing"

	"github.com/kinference/kinference/internal/bench/stats"
	"github.com/kinference/kinference/internal/bench/workload"
)

var update = flag.Bool("update", false, "rewrite testdata/limits.json from what is measured now")

const limitsPath = "testdata/limits.json"

// limits are the figures that the default policy must keep, and the runs that
// they came from.
type limits struct {
	Made  string   `json:"made"`
	Go    string   `json:"go"`
	Seeds []uint64 `json:"seeds"`
	// Tolerance is the share by which a figure may be worse.
	Tolerance map[string]float64            `json:"tolerance"`
	Cases     map[string]map[string]float64 `json:"cases"`
}

// limitedCases are a part of the tables that a commit can afford: the published
// loads, those beyond saturation, a flood, several routers and a slow worker.
var limitedCases = []string{"S0", "S1", "S1hi", "S1over", "S2", "S2hi", "S3", "S4", "ML", "W8", "MT2", "R4S2", "R4S2hi", "S2m slow"}

func figures(s stats.Summary) map[string]float64 {
	m := map[string]float64{"ttft_p50": s.TTFT50, "ttft_mean": s.TTFTMean, "ttft_p99": s.TTFT99, "rps": s.RPS}
	if s.Jain > 0 {
		m["light_ttft_p99"] = s.Light99
	}
	return m
}

// TestLimits fails when the default policy got worse than it was in the runs
// that limits.json notes. Virtual time makes the figures exact: what moves them
// is a change of behaviour. One that is worth it comes with new tables
// (kinbench routing) and
//
//	go test ./internal/bench/virtual -run TestLimits -update
func TestLimits(t *testing.T) {
	seeds := []uint64{workload.HeldOutSeed(0), workload.HeldOutSeed(1)}
	var cases []Case
	for _, name := range limitedCases {
		c, err := LookupCase(name)
		if err != nil {
			t.Fatal(err)
		}
		cases = append(cases, c)
	}
	cells, err := NewRunner().Cells(cases, []string{Kinference}, seeds)
	if err != nil {
		t.Fatal(err)
	}
	var want limits
	data, err := os.ReadFile(limitsPath)
	if err == nil {
		err = json.Unmarshal(data, &want)
	}
	if err != nil && !*update {
		t.Fatal(err)
	}
	if *update {
		want.Made, want.Go, want.Seeds = "go test ./internal/bench/virtual -run TestLimits -update", runtime.Version(), seeds
		want.Cases = map[string]map[string]float64{}
		for _, c := range cells {
			want.Cases[c.Scenario] = figures(c.Mean())
		}
		data, err := json.MarshalIndent(want, "", "  ")
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(limitsPath, append(data, '\n'), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range cells {
		m := c.Mean()
		if m.Failed != 0 {
			t.Errorf("%s: %d requests failed", c.Scenario, m.Failed)
		}
		kept := want.Cases[c.Scenario]
		if kept == nil {
			t.Errorf("%s has no limits", c.Scenario)
			continue
		}
		for name, got := range figures(m) {
			limit, tolerance := kept[name], want.Tolerance[name]
			worse := got/limit - 1
			if name == "rps" {
				worse = limit/got - 1
			}
			if !(worse <= tolerance) {
				t.Errorf("%s %s = %.3f, was %.3f: %+.1f %%, at most %.0f %% are allowed", c.Scenario, name, got, limit, 100*worse, 100*tolerance)
			}
		}
		t.Logf("%-8s TTFT %.2f mean %.2f p99 %.2f s, %.3f requests/s, light p99 %.2f", c.Scenario, m.TTFT50, m.TTFTMean, m.TTFT99, m.RPS, m.Light99)
	}
}
