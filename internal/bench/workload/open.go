package workload

import "math/rand/v2"

// Arrivals hands out the requests of a Poisson process in the order of their
// times.
type Arrivals struct {
	gen     *Generator
	r       *rand.Rand
	rate    float64
	at      float64
	n       int
	victims bool
}

// Open starts the scenario's open load (Scenario.Rate). There is none, and Next
// reports false, where the scenario is a closed loop.
func (g *Generator) Open() *Arrivals {
	return &Arrivals{gen: g, r: g.rand(streamArrival, 0), rate: g.Scenario.Rate}
}

// VictimRequests starts what the light tenants of the scenario send; it has no
// end. Whether a request is measured is for the caller to say: when the closed
// loop beside it is past its warm-up.
func (g *Generator) VictimRequests() *Arrivals {
	return &Arrivals{gen: g, r: g.rand(streamVictim, 0), rate: float64(g.Scenario.Victims) * g.Scenario.VictimRate, victims: true}
}

// Next is the next request and the time in seconds at which it is sent. It
// reports false when the scenario's requests are spent.
func (a *Arrivals) Next() (at float64, r *Request, ok bool) {
	sc := a.gen.Scenario
	if a.rate <= 0 || !a.victims && a.n >= sc.Warm+sc.Count {
		return 0, nil, false
	}
	a.at += a.r.ExpFloat64() / a.rate
	r = &Request{Index: a.n, Conversation: a.n, Measured: a.n >= sc.Warm}
	var c Conversation
	if a.victims {
		r.Tenant = 1 + a.r.IntN(sc.Victims)
		c = a.gen.victim(a.n, r.Tenant)
	} else {
		c = a.gen.Conversation(a.n)
	}
	a.n++
	r.Prompt = append(append(make([]uint32, 0, len(c.Prefix)+len(c.Turns[0].User)), c.Prefix...), c.Turns[0].User...)
	r.Parts, r.Output = [][]uint32{r.Prompt}, c.Turns[0].Output
	return a.at, r, true
}

// victim is the i-th one-turn conversation of the light tenants.
func (g *Generator) victim(i, tenant int) Conversation {
	r := g.rand(streamVictim, i+1)
	var c Conversation
	if g.Scenario.PrefixTokens > 0 {
		c.Prefix = g.Prefix(g.Scenario.Prefixes + tenant - 1)
	}
	out := g.outputTokens(r)
	c.Turns = []Turn{{User: g.tokens(r, g.Scenario.FirstTokens), Output: g.tokens(r, out)}}
	return c
}
