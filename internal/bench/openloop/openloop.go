// Package openloop runs the traffic of several tenants, as it arrives, on
// simulated engines in virtual time.
//
// What-if questions (kinfctl capacity) and the tests of what accounting learns
// use it: it knows which request used the engine for how long, which nobody
// knows of a real one. A run is deterministic for its settings and belongs to
// one goroutine; runs share nothing. Times are seconds since its start.
package openloop

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"

	"github.com/kinference/kinference/internal/fleetsim/engine"
)

// Tenant is one source of requests. Lengths are means in tokens.
type Tenant struct {
	Name string
	// Rate is in requests a second; they arrive independently of each other.
	Rate float64
	// Prompt is what is new in each prompt, Output the answer. Both vary around
	// their means by Spread: the deviation of their logarithm.
	Prompt, Output, Spread float64
	// Prefixes of PrefixTokens are shared: each prompt starts with one. 0: none.
	Prefixes, PrefixTokens int
}

// Settings of a run.
type Settings struct {
	Profile engine.Profile
	Speed   float64 // of each worker relative to the profile; 0: 1
	Workers int
	Tenants []Tenant
	// Seconds for which requests arrive. Then the run ends when all are done, or
	// after as long again.
	Seconds float64
	// Sample is the time between two samples; 0: 1 s.
	Sample float64
	Seed   uint64
}

// Request is what became of one. Times are zero for what did not happen.
type Request struct {
	ID, Tenant             string
	Worker                 int
	Sent, First, End       float64
	Prompt, Cached, Output int
	// Busy is the engine time that it caused, Preempted how often it had to give
	// way and was computed again.
	Busy      float64
	Preempted int
}

// Sample is the state of a worker.
type Sample struct {
	Worker           int
	At               float64
	Running, Waiting int
	KVUsage          float64
	// Busy is the engine time so far.
	Busy float64
}

// Result of a run: requests in the order in which they were sent.
type Result struct {
	Requests []Request
	Samples  []Sample
	Seconds  float64 // until the last thing happened
}

// Errors of Run.
var (
	errSettings = errors.New("a run needs workers, tenants, a profile and a time")
	errTooMuch  = errors.New("that is more traffic than a run can hold")
)

// maxRequests bounds a run.
const maxRequests = 500_000

type worker struct {
	e        *engine.Engine
	end      float64 // of the iteration under way
	busy     bool
	ahead    int // prompt tokens sent there and not computed
	inFlight int
}

// call is a request that will arrive. Its tokens are made when it does.
type call struct {
	at     float64
	tenant *Tenant
	prefix uint32 // the first token of what is shared
	shared int
	fresh  int
	seed   uint64
	output int
}

func (c *call) tokens() []uint32 {
	out := make([]uint32, 0, c.shared+c.fresh)
	for j := range c.shared {
		out = append(out, c.prefix+uint32(j))
	}
	rng := rand.New(rand.NewPCG(c.seed, 0))
	for range c.fresh {
		out = append(out, rng.Uint32())
	}
	return out
}

// Run sends the traffic and returns what happened.
func Run(s Settings) (*Result, error) {
	if s.Workers < 1 || len(s.Tenants) == 0 || s.Seconds <= 0 || s.Profile.BlockSize < 1 {
		return nil, errSettings
	}
	calls, err := arrivals(&s)
	if err != nil {
		return nil, err
	}
	r := &run{s: s, out: &Result{Requests: make([]Request, len(calls))}}
	for i := range s.Workers {
		r.workers = append(r.workers, &worker{e: engine.New(engine.Config{Profile: s.Profile, Speed: s.Speed, Seed: int64(s.Seed) + int64(i)})})
	}
	every := cmp.Or(s.Sample, 1)
	sample, next := 0.0, 0
	for {
		// The earliest of: an iteration's end, an arrival, a sample.
		at, which := math.Inf(1), -1
		for i, w := range r.workers {
			if w.busy && w.end < at {
				at, which = w.end, i
			}
		}
		idle := which < 0
		if next < len(calls) && calls[next].at < at {
			at, which = calls[next].at, len(r.workers)
		}
		if sample <= at && !(idle && next == len(calls)) {
			at, which = sample, len(r.workers)+1
		}
		if which < 0 || at > 2*s.Seconds {
			break
		}
		r.out.Seconds = at
		switch {
		case which < len(r.workers):
			r.finish(r.workers[which])
		case which == len(r.workers):
			next++
			if err := r.send(at, &calls[next-1], next-1); err != nil {
				return nil, err
			}
		default:
			r.sample(at)
			sample += every
		}
	}
	r.sample(r.out.Seconds)
	return r.out, nil
}

type run struct {
	s       Settings
	workers []*worker
	out     *Result
}

// arrivals draws who sends what when. Each tenant has a generator of its own, so
// that one more does not change what the others send.
func arrivals(s *Settings) ([]call, error) {
	var out []call
	for i := range s.Tenants {
		t := &s.Tenants[i]
		if !(t.Rate > 0) {
			continue
		}
		if t.Rate*s.Seconds > maxRequests {
			return nil, errTooMuch
		}
		rng := rand.New(rand.NewPCG(s.Seed, uint64(i)+0x6f70656e))
		prefix := uint32(rng.Uint64())
		for at := rng.ExpFloat64() / t.Rate; at < s.Seconds; at += rng.ExpFloat64() / t.Rate {
			if len(out) == maxRequests {
				return nil, errTooMuch
			}
			shared := 0
			if t.Prefixes > 0 {
				shared = t.PrefixTokens
			}
			most := s.Profile.MaxLen() - 2
			fresh := min(draw(rng, t.Prompt, t.Spread), max(most-shared, 1))
			output := min(draw(rng, t.Output, t.Spread), max(most-shared-fresh, 1))
			which := 0
			if shared > 0 {
				which = rng.IntN(t.Prefixes) * shared
			}
			out = append(out, call{at: at, tenant: t, prefix: prefix + uint32(which), shared: min(shared, most), fresh: fresh, seed: rng.Uint64(), output: output})
		}
	}
	slices.SortStableFunc(out, func(a, b call) int { return cmp.Compare(a.at, b.at) })
	return out, nil
}

// draw is a length with a mean, at least 1.
func draw(rng *rand.Rand, mean, spread float64) int {
	v := mean
	if spread > 0 {
		v = mean * math.Exp(spread*rng.NormFloat64()-spread*spread/2)
	}
	return int(min(max(math.Round(v), 1), 1e6))
}

// send routes a request to the worker with the least to compute before and for
// it, as the real prediction does, and starts that one if it is idle.
func (r *run) send(at float64, c *call, n int) error {
	tokens := c.tokens()
	best, need, least := 0, 0, math.Inf(1)
	for i, w := range r.workers {
		uncached := len(tokens) - w.e.Lookup(tokens, "", "")
		if work := float64(w.ahead+uncached) + perRequest*float64(w.inFlight); work < least {
			best, need, least = i, uncached, work
		}
	}
	w, out := r.workers[best], &r.out.Requests[n]
	*out = Request{ID: fmt.Sprint("r", n), Tenant: c.tenant.Name, Worker: best, Sent: at, Prompt: len(tokens)}
	if err := w.e.Submit(at, &engine.Request{ID: out.ID, Tokens: tokens, MaxTokens: c.output, Tag: tag{out, need}}); err != nil {
		return fmt.Errorf("send a prompt of %d tokens: %w", len(tokens), err)
	}
	w.ahead += need
	w.inFlight++
	r.begin(at, w)
	return nil
}

// perRequest is what a request in flight weighs in tokens of prompts to compute.
const perRequest = 64

type tag struct {
	r    *Request
	need int
}

func (r *run) begin(at float64, w *worker) {
	if !w.busy {
		w.end, w.busy = w.e.Begin(at)
	}
}

func (r *run) finish(w *worker) {
	step := w.e.End()
	w.busy = false
	at := w.end
	for _, x := range step.Tokens {
		t := x.R.Tag.(tag)
		if x.First {
			t.r.First, t.r.Cached = at, x.R.Cached
			w.ahead -= t.need
		}
		t.r.Output, t.r.Busy, t.r.Preempted = x.R.Generated, x.R.Busy, x.R.Preempted
		if x.Last {
			t.r.End = at
			w.inFlight--
		}
	}
	r.begin(at, w)
}

func (r *run) sample(at float64) {
	for i, w := range r.workers {
		st := w.e.Stats()
		busy := st.Busy
		if w.busy { // its iteration is counted whole when it begins
			busy -= max(w.end-at, 0)
		}
		r.out.Samples = append(r.out.Samples, Sample{Worker: i, At: at, Running: st.Running, Waiting: st.Waiting, KVUsage: st.KVUsage, Busy: busy})
	}
}
