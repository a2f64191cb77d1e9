package virtual

import (
	"fmt"

	"github.com/kinference/kinference/internal/bench/stats"
	"github.com/kinference/kinference/internal/bench/workload"
	"github.com/kinference/kinference/internal/fleetsim/engine"
	"github.com/kinference/kinference/internal/kvhash"
)

// load schedules a scenario's requests.
func (s *sim) load(sc workload.Scenario) {
	gen := workload.New(sc, s.o.Seed, nil)
	if s.o.Wipe {
		s.wipeAt = sc.Warm + sc.Count/2
	}
	for i := range sc.Prefixes + sc.Victims {
		if s.o.Oracle {
			s.learn(kvhash.Append(nil, kvhash.Root("", ""), gen.Prefix(i), s.o.Profile.BlockSize))
		}
	}
	// A client that knows the length of its answer says so, as GuideLLM does.
	limit := 0
	if sc.Sigma == 0 {
		limit = sc.OutputTokens
	}
	loop := gen.Loop()
	warm := sc.Rate > 0 // past the warm-up, for the victims
	spent := false
	alone := func(r *workload.Request) float64 {
		shared := 0
		if r.Turn == 0 {
			shared = min(sc.PrefixTokens, len(r.Prompt)-1)
		}
		return alone(s.o.Profile, shared, len(r.Prompt), len(r.Output))
	}
	var send func(stream int)
	send = func(stream int) {
		r, ok := loop.Next(stream)
		if !ok {
			spent = true
			return
		}
		warm = warm || r.Measured
		s.send(&call{id: fmt.Sprint("r", r.Index), tenant: "load", prompt: r.Prompt, output: r.Output, limit: limit,
			sample: stats.Sample{Index: r.Index, Measured: r.Measured, Turn: r.Turn, Alone: alone(r)},
			done:   func() { send(stream) }})
	}
	if sc.Rate <= 0 {
		for i := range sc.Streams {
			s.feed(loop.Start(i), func() { send(i) })
		}
	}
	open := gen.Open()
	var arrive func()
	arrive = func() {
		at, r, ok := open.Next()
		if !ok {
			return
		}
		s.feed(at, func() {
			s.send(&call{id: fmt.Sprint("r", r.Index), tenant: "load", prompt: r.Prompt, output: r.Output, limit: limit,
				sample: stats.Sample{Index: r.Index, Measured: r.Measured, Alone: alone(r)}, done: func() {}})
			arrive()
		})
	}
	arrive()
	victims := gen.VictimRequests()
	var victim func()
	victim = func() {
		at, r, ok := victims.Next()
		if !ok {
			return
		}
		s.feed(at, func() {
			if spent {
				return
			}
			s.send(&call{id: fmt.Sprint("v", r.Index), tenant: fmt.Sprint("victim", r.Tenant), prompt: r.Prompt, output: r.Output, limit: limit,
				sample: stats.Sample{Index: r.Index, Measured: warm, Tenant: r.Tenant, Alone: alone(r)}, done: func() {}})
			victim()
		})
	}
	victim()
}

// feed schedules something that sends: the run is not over before it.
func (s *sim) feed(t float64, do func()) {
	s.fed++
	s.at(t, func() {
		s.fed--
		do()
	})
}

// busy tells whether anything is still to come.
func (s *sim) busy() bool { return s.open > 0 || s.fed > 0 }

// alone is the end-to-end time of a request on an idle worker that holds its
// first shared tokens: what a tenant could hope for.
func alone(p engine.Profile, shared, prompt, output int) float64 {
	u := float64(prompt - shared/p.BlockSize*p.BlockSize)
	steps := float64((int(u) + p.MaxBatchedTokens - 1) / p.MaxBatchedTokens)
	prefill := u*p.A + u*(float64(prompt)-u/2)*p.Q + steps*p.Ovh
	return p.Overhead + max(prefill, p.W+p.Ovh) + float64(output-1)*(p.W+p.Ovh+p.S+float64(prompt)*p.K)
}

// oracleTokens is more than any scenario's prompts and answers together.
const oracleTokens = 1 << 24

// knownBlocks is how many leading blocks of a prompt anybody has computed.
func (s *sim) knownBlocks(c *call) int {
	n := 0
	for n < len(c.hashes) && s.known[c.hashes[n]] {
		n++
	}
	return n
}

// learn notes that blocks were computed.
func (s *sim) learn(hashes []kvhash.Hash) {
	if !s.o.Oracle {
		return
	}
	for _, h := range hashes {
		s.known[h] = true
	}
}

// learnAnswer notes that a whole conversation so far was computed.
func (s *sim) learnAnswer(c *call) {
	if !s.o.Oracle {
		return
	}
	all := append(append(make([]uint32, 0, len(c.prompt)+len(c.output)), c.prompt...), c.output...)
	s.learn(kvhash.Append(nil, kvhash.Root("", ""), all[:len(all)-1], s.o.Profile.BlockSize))
}

// warm puts what anybody has computed of a prompt into the oracle's worker.
func (s *sim) warm(w *worker, c *call) {
	if s.o.Oracle {
		w.engine.Warm(c.prompt[:s.knownBlocks(c)*s.o.Profile.BlockSize])
	}
}

// wipe empties the first worker's cache; its requests are computed again.
func (s *sim) wipe() {
	s.wipeAt = 0
	e := s.workers[0].engine
	e.PreemptAll()
	e.ResetPrefixCache()
}
