package gputime

import (
	"fmt"
	"math"
	"strconv"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kinference/kinference/internal/bench/openloop"
	"github.com/kinference/kinference/internal/fleetsim/engine"
	"github.com/kinference/kinference/internal/schedule"
)

// tenants of five kinds; load scales how much they send.
func tenants(load float64) []openloop.Tenant {
	return []openloop.Tenant{
		{Name: "documents", Rate: .06 * load, Prompt: 9000, Output: 60, Spread: .5},
		{Name: "agents", Rate: .25 * load, Prompt: 500, Output: 250, Spread: .6, Prefixes: 4, PrefixTokens: 6272},
		{Name: "writers", Rate: .12 * load, Prompt: 400, Output: 700, Spread: .5},
		{Name: "chat", Rate: .3 * load, Prompt: 1500, Output: 180, Spread: .7},
		{Name: "short", Rate: .4 * load, Prompt: 250, Output: 25, Spread: .4},
	}
}

// simulate returns what accounting would know of a run, and what is true.
func simulate(t *testing.T, s openloop.Settings) (requests []Request, states []State, run *openloop.Result) {
	t.Helper()
	s.Workers, s.Sample = 2, .5
	run, err := openloop.Run(s)
	if err != nil {
		t.Fatal(err)
	}
	// Usage events have the gateway's clock: what is on the way costs time.
	const way = .004
	for _, r := range run.Requests {
		if r.End == 0 {
			continue
		}
		requests = append(requests, Request{Worker: strconv.Itoa(r.Worker), Sent: r.Sent - way, First: r.First + way, End: r.End + way, Uncached: r.Prompt - r.Cached, Cached: r.Cached, Output: r.Output})
	}
	for _, x := range run.Samples {
		states = append(states, State{Worker: strconv.Itoa(x.Worker), At: x.At, Running: float64(x.Running), Waiting: float64(x.Waiting), KVUsage: x.KVUsage})
	}
	return requests, states, run
}

// Of five tenants with prompts and answers of all kinds, each is charged for what
// it caused, to 2 %, whatever the load and however wrong the prior. Weights are
// learned from another run, at one load.
func TestAttributionAgainstTruth(t *testing.T) {
	speeds := schedule.DefaultSpeeds()
	for _, c := range []struct {
		name    string
		profile engine.Profile
		speed   float64
		prior   string
		load    float64 // of the run that teaches; those that are checked have parts of it and more
	}{
		{"as the prior", engine.L40SQwen27B, 1, "l40s", 1},
		{"slower than the prior", engine.L40SQwen27B, .6, "l40s", .7},
		{"prior of another class", engine.L40SQwen27B, 1, "h100", 1},
		{"small blocks", engine.L40SPlain16, 1.5, "a100", 2},
		{"fast", engine.H100Qwen27B, 1, "l40s", 4},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			s := openloop.Settings{Profile: c.profile, Speed: c.speed, Seconds: 1200, Tenants: tenants(c.load), Seed: 7}
			requests, states, _ := simulate(t, s)
			prior := Prior(speeds[c.prior])
			prior.Batch = c.profile.MaxBatchedTokens
			w, fit := Calibrate(prior, requests, Intervals(states, 15, 5))
			for i, load := range []float64{.3, 1, 1.6} {
				s.Tenants, s.Seed = tenants(load*c.load), uint64(i)
				requests, states, run := simulate(t, s)
				check(t, w, fit, requests, Intervals(states, 15, 5), run, .02)
			}
		})
	}
}

// With three times the load that the workers can bear, requests must give way and
// are computed again, which usage events do not tell: the error grows, but not far.
func TestAttributionInOverload(t *testing.T) {
	s := openloop.Settings{Profile: engine.L40SQwen27B, Seconds: 1200, Tenants: tenants(1), Seed: 7}
	requests, states, _ := simulate(t, s)
	w, fit := Calibrate(Prior(schedule.DefaultSpeeds()["l40s"]), requests, Intervals(states, 15, 5))
	s.Tenants = tenants(3.6)
	requests, states, run := simulate(t, s)
	check(t, w, fit, requests, Intervals(states, 15, 5), run, .05)
}

// Time is whole whatever comes in.
func TestTimeIsWhole(t *testing.T) {
	w := Prior(schedule.DefaultSpeeds()[""])
	nan := math.NaN()
	requests := []Request{
		{Worker: "a", Sent: 1, First: 2, End: 5, Uncached: 100, Output: 50},
		{Worker: "a", Sent: 3, First: 2, End: 1, Uncached: -5, Cached: -1, Output: -7},
		{Worker: "a", Sent: 4, End: 4},
		{Worker: "a", Sent: nan, First: 2, End: nan, Uncached: 5},
		{Worker: "b", Sent: 0, First: 1, End: 100, Uncached: 1, Output: 3},
		{Worker: "nowhere", Sent: 0, First: 1, End: 2, Uncached: 1, Output: 3},
	}
	intervals := []Interval{
		{Worker: "a", From: 0, To: 10, Busy: 4}, {Worker: "a", From: 10, To: 20, Busy: 3}, {Worker: "a", From: 20, To: 30, Busy: 99},
		{Worker: "b", From: 50, To: 60, Busy: -3}, {Worker: "c", From: 0, To: 0, Busy: 1},
	}
	for i, sp := range Attribute(w, requests, intervals) {
		sum := sp.Other + sp.Idle
		for _, sh := range sp.Shares {
			sum += sh.Prefill + sh.Decode
		}
		if wall := intervals[i].To - intervals[i].From; math.Abs(sum-wall) > 1e-9 || math.IsNaN(sum) {
			t.Errorf("interval %d: the parts are %v of %v s: %+v", i, sum, wall, sp)
		}
	}
	if got, fit := Calibrate(w, nil, intervals); got != w || fit.Intervals != 0 {
		t.Errorf("learned %+v from nothing", got)
	}
	got, _ := Calibrate(w, requests, intervals)
	for _, v := range got.vector() {
		if math.IsNaN(v) || v < 0 {
			t.Errorf("learned %+v", got)
		}
	}
}

// Samples speak for the time around them; where they are missing nobody knows.
func TestIntervals(t *testing.T) {
	got := Intervals([]State{
		{Worker: "a", At: 0}, {Worker: "a", At: 1, Running: 2}, {Worker: "a", At: 2, Waiting: 1}, {Worker: "a", At: 3}, {Worker: "a", At: 4},
		{Worker: "a", At: 100, Running: 1}, {Worker: "a", At: 101, Running: 1, KVUsage: .5}, {Worker: "a", At: 101, Running: 1},
	}, 2, 10)
	want := []Interval{{"a", 0, 2, 1.5, 0}, {"a", 2, 4, .5, 0}, {"a", 100, 101, 1, .5}}
	if diff := cmp.Diff(got, want); diff != "" {
		t.Errorf("got, want:\n%s", diff)
	}
}

// The ledger divides a minute at a time, by what is known of it and of some minutes
// around it five minutes later. That is as good.
func TestAttributionByMinutes(t *testing.T) {
	const margin = 120
	s := openloop.Settings{Profile: engine.L40SQwen27B, Seconds: 1200, Tenants: tenants(1), Seed: 7}
	requests, states, _ := simulate(t, s)
	w, fit := Calibrate(Prior(schedule.DefaultSpeeds()["h100"]), requests, Intervals(states, 15, 5))
	for i, load := range []float64{.3, 1, 1.6} {
		s.Tenants, s.Seed = tenants(load), uint64(i)
		requests, states, run := simulate(t, s)
		intervals := Intervals(states, 15, 5)
		var splits []Split
		for from := 0.0; from < run.Seconds+60; from += 60 {
			var touch []Request
			var index []int
			for k, r := range requests {
				if r.End >= from-margin && r.Sent <= from+60+margin && r.End <= from+360 {
					touch, index = append(touch, r), append(index, k)
				}
			}
			var in []Interval
			for _, iv := range intervals {
				if iv.From >= from-margin && iv.To <= from+60+margin {
					in = append(in, iv)
				}
			}
			for _, sp := range Attribute(w, touch, in) {
				if sp.From < from || sp.To > from+60 {
					continue
				}
				for j := range sp.Shares {
					sp.Shares[j].Request = index[sp.Shares[j].Request]
				}
				splits = append(splits, sp)
			}
		}
		checkSplits(t, fit, len(requests), splits, run, .02)
	}
}

func check(t *testing.T, w Weights, fit Fit, requests []Request, intervals []Interval, run *openloop.Result, most float64) {
	t.Helper()
	checkSplits(t, fit, len(requests), Attribute(w, requests, intervals), run, most)
}

func checkSplits(t *testing.T, fit Fit, requests int, splits []Split, run *openloop.Result, most float64) {
	t.Helper()
	truth, got := map[string]float64{}, map[string]float64{}
	names := make([]string, 0, requests)
	for _, r := range run.Requests {
		if r.End > 0 {
			truth[r.Tenant] += r.Busy
			names = append(names, r.Tenant)
		}
	}
	wall, parts, idle, other := 0.0, 0.0, 0.0, 0.0
	for _, sp := range splits {
		wall += sp.To - sp.From
		idle += sp.Idle
		other += sp.Other
		for _, sh := range sp.Shares {
			got[names[sh.Request]] += sh.Prefill + sh.Decode
			parts += sh.Prefill + sh.Decode
		}
	}
	preempted := 0
	for _, r := range run.Requests {
		preempted += r.Preempted
	}
	worst := 0.0
	line := ""
	for _, n := range tenants(1) {
		d := got[n.Name]/truth[n.Name] - 1
		worst = max(worst, math.Abs(d))
		line += fmt.Sprintf(" %s %.0f s %+.2f %%", n.Name, truth[n.Name], 100*d)
	}
	t.Logf("%d requests, %d preemptions, idle %.0f %%, other %.2f %%, fit %.1f %% of %d:%s", requests, preempted, 100*idle/wall, 100*other/wall, 100*fit.Error, fit.Intervals, line)
	if worst > most {
		t.Errorf("worst tenant is %.2f %% off, want %.0f %%", 100*worst, 100*most)
	}
	whole := 2 * run.Seconds
	if d := (parts + other + idle) / whole; math.Abs(d-1) > .001 {
		t.Errorf("parts and idle are %.5f of wall time and workers, want 1 to 0.1 %%", d)
	}
	if other > .01*wall {
		t.Errorf("%.2f %% of the time is nobody's", 100*other/wall)
	}
}
