package workload

import (
	"fmt"
	"slices"
)

// The scenarios. S0 to S2hi are those of the published table, with the
// parameters that reproduce it (docs/benchmarks): S1 and S2 are what their names
// say; S0 shares nothing, so no routing can gain anything on it and none may
// lose; the "hi" and "over" forms load the fleet to 3.5 and 12 times of it. The
// others look at one question each.
var scenarios = []Scenario{
	{Name: "S0", Title: "control: nothing shared", FirstTokens: 20300, Turns: 1, OutputTokens: 210, Streams: 8, Ramp: 10, Warm: 24, Count: 300},
	{Name: "S0s", Title: "control: short prompts", FirstTokens: 1500, Turns: 1, OutputTokens: 210, Streams: 8, Ramp: 10, Warm: 24, Count: 300},
	{Name: "S1", Title: "shared prefix", Prefixes: 12, PrefixTokens: 20000, FirstTokens: 300, Turns: 1, OutputTokens: 210, Streams: 8, Ramp: 10, Warm: 100, Count: 500},
	{Name: "S2", Title: "multi-turn", FirstTokens: 3000, Turns: 12, TurnTokens: 1200, OutputTokens: 160, Streams: 12, Ramp: 10, Warm: 144, Count: 600},
	{Name: "S1cap", Title: "shared prefix, short answers", Prefixes: 12, PrefixTokens: 20000, FirstTokens: 300, Turns: 1, OutputTokens: 64, Streams: 8, Ramp: 10, Warm: 100, Count: 400},
	{Name: "S2cap", Title: "multi-turn, short answers", FirstTokens: 3000, Turns: 12, TurnTokens: 1200, OutputTokens: 64, Streams: 12, Ramp: 10, Warm: 144, Count: 400},
	{Name: "S1hi", Title: "shared prefix, 3.5 times the load", Prefixes: 12, PrefixTokens: 20000, FirstTokens: 300, Turns: 1, OutputTokens: 210, Streams: 28, Ramp: 10, Warm: 100, Count: 500},
	{Name: "S1over", Title: "shared prefix, overload", Prefixes: 12, PrefixTokens: 20000, FirstTokens: 300, Turns: 1, OutputTokens: 210, Streams: 96, Ramp: 10, Warm: 192, Count: 600},
	{Name: "S2hi", Title: "multi-turn, KV cache full", FirstTokens: 3000, Turns: 12, TurnTokens: 1200, OutputTokens: 160, Streams: 30, Ramp: 10, Warm: 180, Count: 600},

	{Name: "S1m", Title: "shared prefix, 2.5 times the load", Prefixes: 12, PrefixTokens: 20000, FirstTokens: 300, Turns: 1, OutputTokens: 210, Streams: 20, Ramp: 10, Warm: 100, Count: 500},
	{Name: "S2m", Title: "multi-turn, 1.5 times the load", FirstTokens: 3000, Turns: 12, TurnTokens: 1200, OutputTokens: 160, Streams: 18, Ramp: 10, Warm: 144, Count: 600},
	{Name: "S1hiln", Title: "S1hi with answers of all lengths", Prefixes: 12, PrefixTokens: 20000, FirstTokens: 300, Turns: 1, OutputTokens: 210, Sigma: .8, Streams: 28, Ramp: 10, Warm: 100, Count: 500},
	{Name: "S2hiln", Title: "S2hi with answers of all lengths", FirstTokens: 3000, Turns: 12, TurnTokens: 1200, OutputTokens: 160, Sigma: .8, Streams: 30, Ramp: 10, Warm: 180, Count: 600},
	{Name: "S3", Title: "more prefixes than the fleet can hold", Prefixes: 60, PrefixTokens: 9000, PrefixSpread: .5, Zipf: 1, FirstTokens: 300, Turns: 1, OutputTokens: 210, Rate: 1.1, Warm: 100, Count: 500},
	{Name: "S4", Title: "one hot prefix", Prefixes: 60, PrefixTokens: 9000, PrefixSpread: .5, Zipf: 1.6, FirstTokens: 300, Turns: 1, OutputTokens: 210, Rate: 1.5, Warm: 100, Count: 500},
	{Name: "ML", Title: "short prompts beside long ones", Prefixes: 16, PrefixTokens: 2800, FirstTokens: 300, LongShare: .05, LongTokens: 37000, Turns: 1, OutputTokens: 210, Sigma: .7, Rate: 1.1, Warm: 100, Count: 500},
	{Name: "HET", Title: "workers at half, full and double speed", Prefixes: 60, PrefixTokens: 9000, PrefixSpread: .5, Zipf: 1, FirstTokens: 300, Turns: 1, OutputTokens: 210, Sigma: .7, Rate: 1.1, Warm: 100, Count: 500},
	{Name: "P16", Title: "pages of 16 tokens", Prefixes: 12, PrefixTokens: 17500, FirstTokens: 300, Turns: 1, OutputTokens: 210, Sigma: .7, Streams: 14, Ramp: 10, Warm: 100, Count: 500},
	{Name: "W8", Title: "eight workers", Prefixes: 30, PrefixTokens: 20000, FirstTokens: 300, Turns: 1, OutputTokens: 210, Sigma: .7, Streams: 58, Ramp: 10, Warm: 200, Count: 600},
	{Name: "W32", Title: "32 workers", Prefixes: 128, PrefixTokens: 20000, FirstTokens: 300, Turns: 1, OutputTokens: 210, Sigma: .7, Streams: 192, Ramp: 10, Warm: 600, Count: 1200},
	{Name: "MT", Title: "one tenant of 64 streams, three light ones", Prefixes: 12, PrefixTokens: 5900, FirstTokens: 300, Turns: 1, OutputTokens: 230, Sigma: .7, Streams: 64, Ramp: 10, Warm: 128, Count: 600, Victims: 3, VictimRate: .15},
	{Name: "MT2", Title: "one tenant floods with 120 streams, three light ones", Prefixes: 12, PrefixTokens: 5900, FirstTokens: 300, Turns: 1, OutputTokens: 230, Sigma: .7, Streams: 120, Ramp: 10, Warm: 240, Count: 600, Victims: 3, VictimRate: .15},
}

// Scenarios lists the built-in scenarios; the slice is the caller's own.
func Scenarios() []Scenario { return slices.Clone(scenarios) }

// Lookup finds a built-in scenario by name.
func Lookup(name string) (Scenario, error) {
	for _, s := range scenarios {
		if s.Name == name {
			return s, nil
		}
	}
	return Scenario{}, fmt.Errorf("unknown scenario %q", name)
}
