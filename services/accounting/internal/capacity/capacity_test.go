package capacity

import (
	"math"
	"slices"
	"strconv"
	"testing"

	"github.com/kinference/kinference/internal/bench/openloop"
	"github.com/kinference/kinference/internal/fleetsim/engine"
	"github.com/kinference/kinference/internal/schedule"
	"github.com/kinference/kinference/services/accounting/internal/gputime"
)

const workers = 2

// observe is what accounting knows of a run.
func observe(t *testing.T, s openloop.Settings) (requests []gputime.Request, states []gputime.State, run *openloop.Result) {
	t.Helper()
	s.Workers, s.Sample = workers, 1
	run, err := openloop.Run(s)
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range run.Requests {
		if r.End > 0 {
			requests = append(requests, gputime.Request{Worker: strconv.Itoa(r.Worker), Sent: r.Sent, First: r.First, End: r.End, Uncached: r.Prompt - r.Cached, Cached: r.Cached, Output: r.Output})
		}
	}
	for _, x := range run.Samples {
		states = append(states, gputime.State{Worker: strconv.Itoa(x.Worker), At: x.At, Running: float64(x.Running), Waiting: float64(x.Waiting), KVUsage: x.KVUsage})
	}
	return requests, states, run
}

func kinds(requests []gputime.Request) (out []Kind) {
	for _, r := range requests {
		out = append(out, Kind{1, r.Uncached, r.Cached, r.Output})
	}
	return out
}

// ttft90 is the 90th percentile of a run; infinite if requests were left over.
func ttft90(run *openloop.Result) float64 {
	var v []float64
	for _, r := range run.Requests {
		if r.First == 0 {
			return math.Inf(1)
		}
		v = append(v, r.First-r.Sent)
	}
	slices.Sort(v)
	return v[len(v)*9/10]
}

func scaled(list []openloop.Tenant, factor float64) []openloop.Tenant {
	list = slices.Clone(list)
	for i := range list {
		list[i].Rate *= factor
	}
	return list
}

// measure finds the knee by trying: the rate at which the 90th percentile passes
// the limit.
func measure(t *testing.T, profile engine.Profile, mix []openloop.Tenant, limit, near, seconds float64) float64 {
	t.Helper()
	total := 0.0
	for _, x := range mix {
		total += x.Rate
	}
	lo, hi := .7*near/total, 1.4*near/total
	fits := func(f float64) bool {
		bad := 0
		for seed := range uint64(3) { // the median of three
			run, err := openloop.Run(openloop.Settings{Profile: profile, Workers: workers, Tenants: scaled(mix, f), Seconds: seconds, Seed: 100 + seed, Sample: 1e6})
			if err != nil {
				t.Fatal(err)
			}
			if ttft90(run) > limit {
				bad++
			}
		}
		return bad < 2
	}
	for fits(hi) {
		lo, hi = hi, 1.5*hi
	}
	for !fits(lo) {
		lo, hi = lo/1.5, lo
	}
	for hi-lo > .03*hi {
		if mid := (lo + hi) / 2; fits(mid) {
			lo = mid
		} else {
			hi = mid
		}
	}
	return total * (lo + hi) / 2
}

// The knees of three mixes that were not used in calibration are found within
// 10 %: one that prompts bound, one that answers bound, one with shared prefixes.
func TestKneeAgainstMeasured(t *testing.T) {
	calibration := []openloop.Tenant{
		{Name: "chat", Rate: .3, Prompt: 1200, Output: 200, Spread: .6},
		{Name: "agents", Rate: .15, Prompt: 600, Output: 150, Spread: .5, Prefixes: 3, PrefixTokens: 4704},
		{Name: "documents", Rate: .05, Prompt: 7000, Output: 80, Spread: .5},
	}
	mixes := []struct {
		name string
		list []openloop.Tenant
	}{
		{"prompts", []openloop.Tenant{{Name: "a", Rate: .5, Prompt: 6000, Output: 30, Spread: .6}, {Name: "b", Rate: .5, Prompt: 2500, Output: 60, Spread: .4}}},
		{"answers", []openloop.Tenant{{Name: "a", Rate: .5, Prompt: 400, Output: 400, Spread: .5}, {Name: "b", Rate: .5, Prompt: 900, Output: 250, Spread: .6}}},
		{"shared", []openloop.Tenant{{Name: "a", Rate: .7, Prompt: 500, Output: 120, Spread: .5, Prefixes: 2, PrefixTokens: 7840}, {Name: "b", Rate: .3, Prompt: 3000, Output: 150, Spread: .5}}},
	}
	for _, p := range []struct {
		profile engine.Profile
		load    float64
		limit   float64
		seconds float64 // of a run
	}{{engine.L40SQwen27B, 1.5, 4, 1200}, {engine.H100Qwen27B, 6, 2, 400}} {
		requests, states, _ := observe(t, openloop.Settings{Profile: p.profile, Tenants: scaled(calibration, p.load), Seconds: 1800, Seed: 5})
		prior := gputime.Prior(schedule.DefaultSpeeds()["l40s"])
		prior.Batch = p.profile.MaxBatchedTokens
		class, fit := Learn(prior, requests, states, gputime.Intervals(states, 15, 5))
		class.MaxRunning = p.profile.MaxSeqs
		t.Logf("%s: fit %.2f %%, KV %.4f + %.2e a token, %.0f prefixes", p.profile.Name, 100*fit.Error, class.KVRequest, class.KVToken, class.Prefixes)
		for _, m := range mixes {
			t.Run(p.profile.Name+"/"+m.name, func(t *testing.T) {
				t.Parallel()
				// What such requests are is seen at a small load.
				seen, states, _ := observe(t, openloop.Settings{Profile: p.profile, Tenants: scaled(m.list, .4), Seconds: 1800, Seed: 9})
				class := class
				class.learnMemory(seen, states) // who shares prefixes is a matter of the mix
				got := class.Load(kinds(seen)).Knee(workers, p.limit)
				want := measure(t, p.profile, m.list, p.limit, got, p.seconds) // looked for nearby first
				at := class.Load(kinds(seen)).At(got, workers)
				t.Logf("knee %.2f requests/s, predicted %.2f (%+.1f %%), memory %v, running %.1f, KV %.2f of %.0f prefixes, prefill %.2f", want, got, 100*(got/want-1), at.Memory, at.Running, at.KVUsage, class.Prefixes, at.Prefill)
				if math.Abs(got/want-1) > .1 {
					t.Errorf("knee is predicted at %.2f, measured at %.2f", got, want)
				}
			})
		}
	}
}

// More load never makes it better, more workers never worse, and nothing that
// comes in breaks it.
func TestModelIsSane(t *testing.T) {
	c := Class{Weights: gputime.Prior(schedule.DefaultSpeeds()[""]), KVRequest: .02, KVToken: 7.5e-6}
	list := []Kind{{1, 1000, 0, 200}, {2, 300, 5000, 50}, {math.NaN(), 1, 1, 1}, {math.Inf(1), 5, 5, 5}, {-1, -1, -1, -1}}
	last := 0.0
	for rate := .05; rate < 20; rate *= 1.2 {
		p := c.Load(list).At(rate, 2)
		if p.TTFT90 < last-1e-9 || math.IsNaN(p.TTFT90) {
			t.Errorf("TTFT %v at %.2f, %v before", p.TTFT90, rate, last)
		}
		last = p.TTFT90
	}
	if !math.IsInf(last, 1) {
		t.Error("the model bears any load")
	}
	if one, two := c.Load(list).Knee(1, 2), c.Load(list).Knee(2, 2); two < 2*one || one <= 0 {
		t.Errorf("knee of one worker %v, of two %v", one, two)
	}
	for _, rate := range []float64{.1, 3, 20} {
		n := c.Load(list).WorkersFor(rate, 2)
		if c.Load(list).Knee(n, 2) < rate || n > 1 && c.Load(list).Knee(n-1, 2) >= rate {
			t.Errorf("%d workers for %v requests/s", n, rate)
		}
	}
	if c.Load(list).WorkersFor(1, 1e-6) != 0 || c.Load(nil).Knee(1, 1) != 0 || c.Load(list).Knee(0, 1) != 0 || c.Load(list).WorkersFor(1e12, 2) != 0 {
		t.Error("the impossible is promised")
	}
	learned, _ := Learn(c.Weights, nil, nil, nil)
	if learned.KVRequest != 0 || learned.KVToken != 0 {
		t.Errorf("learned %+v from nothing", learned)
	}
}
