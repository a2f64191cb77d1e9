package virtual

import (
	"fmt"
	"slices"

	"github.com/kinference/kinference/internal/bench/stats"
	"github.com/kinference/kinference/internal/bench/workload"
	"github.com/kinference/kinference/internal/fleetsim/engine"
	"github.com/kinference/kinference/internal/schedule"
)

// Case is a row of the routing tables: a load, and the fleet and faults that it
// meets.
type Case struct {
	Name, Title string
	Scenario    workload.Scenario
	// Mooncake, when not nil, replays the trace instead of the scenario.
	Mooncake *Mooncake
	// Options of the run; policy and seed are set for each.
	Options Options
}

// Mooncake is a window of the Mooncake conversation trace.
type Mooncake struct {
	// Requests in the window, which begins at a place drawn from the seed.
	Requests int
	// Stretch is the factor on the times of arrival.
	Stretch float64
}

// Oracle, K2TTFT and K2Throughput name rows besides the policies: K2 on workers
// that hold all that was ever computed in memory without end, and K2 with other
// objectives.
const (
	Oracle       = "oracle"
	K2TTFT       = "k2-ttft"
	K2Throughput = "k2-throughput"
)

// traceFleet are workers with the trace's own blocks as pages: 260 of 512 tokens
// are the bytes of 170 of 784, and five pages hold the state of three.
func traceFleet() engine.Profile {
	p := engine.L40SQwen27B
	p.Name, p.BlockSize, p.Blocks, p.StateBlocks = "l40s-pages512", 512, 260, 5
	p.MaxModelLen = (p.Blocks - p.StateBlocks) * p.BlockSize
	return p
}

// full is a fleet of n workers at full speed.
func full(n int) []float64 { return slices.Repeat([]float64{1}, n) }

// Cases lists the rows of the routing tables in their order.
func Cases() []Case {
	plain := func(names ...string) (out []Case) {
		for _, name := range names {
			sc, err := workload.Lookup(name)
			if err != nil {
				panic(err) // a name in this file
			}
			out = append(out, Case{Name: name, Title: sc.Title, Scenario: sc})
		}
		return out
	}
	with := func(name, scenario, what string, o Options) Case {
		c := plain(scenario)[0]
		c.Name, c.Options = name, o
		if what != "" {
			c.Title += ", " + what
		}
		return c
	}
	all := plain("S0", "S0s", "S1", "S1hi", "S1over", "S2", "S2hi", "S3", "S4", "S1hiln", "S2hiln", "ML")
	all = append(all,
		with("HET", "HET", "", Options{Speeds: []float64{.5, 1, 2}}),
		with("P16", "P16", "", Options{Profile: engine.L40SPlain16}),
		with("W8", "W8", "", Options{Speeds: full(8)}),
		with("W32", "W32", "", Options{Speeds: full(32)}))
	all = append(all, plain("MT", "MT2")...)
	all = append(all,
		Case{Name: "MC", Title: "Mooncake trace, overload", Mooncake: &Mooncake{900, 6}, Options: Options{Profile: traceFleet()}},
		Case{Name: "MCm", Title: "Mooncake trace", Mooncake: &Mooncake{900, 8.5}, Options: Options{Profile: traceFleet()}})
	for _, n := range []int{3, 8, 16, 64} {
		// The trace's own rate is what 20 such workers bear.
		all = append(all, Case{Name: fmt.Sprint("MC", n), Title: fmt.Sprintf("Mooncake trace, %d workers", n),
			Mooncake: &Mooncake{min(12031, 300*n), 24 / float64(n)}, Options: Options{Profile: traceFleet(), Speeds: full(n)}})
	}
	gossip := Options{Routers: 4, Gossip: .05}
	return append(all,
		with("R4S1", "S1m", "four routers, 50 ms gossip", gossip),
		with("R4S2", "S2m", "four routers, 50 ms gossip", gossip),
		with("R4S2hi", "S2hi", "four routers, 50 ms gossip", gossip),
		with("R2S3", "S3", "two routers, 50 ms gossip", Options{Routers: 2, Gossip: .05}),
		with("R4S1 alone", "S1m", "four routers, no gossip, gauges 2 s old", Options{Routers: 4, LoadDelay: 2}),
		with("R4S2 alone", "S2m", "four routers, no gossip, gauges 2 s old", Options{Routers: 4, LoadDelay: 2}),
		with("S1m", "S1m", "", Options{}),
		with("S2m", "S2m", "", Options{}),
		with("S2m slow", "S2m", "one worker at half speed", Options{Speeds: []float64{.5, 1, 1}}),
		with("S3 slow", "S3", "one worker at half speed", Options{Speeds: []float64{.5, 1, 1}}),
		with("S1m wipe", "S1m", "one cache wiped half-way", Options{Wipe: true}),
		with("S1m stale", "S1m", "events 1 s and gauges 2 s late", Options{KVDelay: 1, LoadDelay: 2}),
		with("S2m err", "S2m", "predictions wrong by up to 30 %", Options{Error: .3}))
}

// LookupCase finds a case by its name.
func LookupCase(name string) (Case, error) {
	for _, c := range Cases() {
		if c.Name == name {
			return c, nil
		}
	}
	if sc, err := workload.Lookup(name); err == nil {
		return Case{Name: name, Title: sc.Title, Scenario: sc}, nil
	}
	return Case{}, fmt.Errorf("unknown scenario %q", name)
}

// Run does one run of a case: policy is one of schedule's, Kinference, Oracle,
// K2TTFT or K2Throughput.
func (c Case) Run(policy string, seed uint64) (stats.Run, error) {
	o := c.Options
	o.Policy, o.Seed = policy, seed
	switch policy {
	case Oracle:
		o.Policy, o.Oracle = schedule.K2, true
	case K2TTFT:
		o.Policy, o.Objective = schedule.K2, schedule.TTFT
	case K2Throughput:
		o.Policy, o.Objective = schedule.K2, schedule.Throughput
	}
	if c.Mooncake == nil {
		return Run(c.Scenario, o)
	}
	trace, err := workload.MooncakeWindow(c.Mooncake.Requests, seed)
	if err != nil {
		return stats.Run{}, err
	}
	return RunTrace(trace, c.Mooncake.Stretch, o)
}
