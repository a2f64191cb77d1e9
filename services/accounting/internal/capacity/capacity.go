// Package capacity tells what workers can bear: how the time to the first token
// grows with the load, where that growth turns into a wall (the knee), and how
// many workers a load needs.
//
// The model has two queues. Prompts wait for those before them to be computed;
// requests wait for room in the KV cache until others are done. What computing
// costs is learned by gputime, what requests hold of the cache by Learn, both from
// what was observed of the class of workers; the traffic is a sample of requests
// that came. So a mix that was never seen together can be judged, as long as its
// requests are known. accounting calls it; everything is pure, and safe for
// concurrent use. Times are in seconds.
package capacity

import (
	"cmp"
	"math"
	"slices"

	"github.com/kinference/kinference/services/accounting/internal/gputime"
)

// Class is what is known of one class of workers.
type Class struct {
	Weights gputime.Weights
	// Shares of the KV cache that a request holds whatever its length, and that each
	// token holds.
	KVRequest, KVToken float64
	// Prefixes is how many different ones the requests of a worker that found a part
	// of their prompt in the cache share, as far as one can tell; 0: each has its own.
	Prefixes float64
	// MaxRunning requests run at once; 0: no bound.
	MaxRunning int
}

// Kind is one kind of requests in a mix.
type Kind struct {
	// Weight is its part of the rate, relative to the others'.
	Weight                   float64
	Uncached, Cached, Output int
}

// Point is what is expected at one rate.
type Point struct {
	// Rate of all workers in requests a second.
	Rate float64
	// Stable: what comes can be done. If not, queues grow for ever and TTFT is
	// infinite.
	Stable bool
	// TTFT is the mean, TTFT90 the 90th percentile.
	TTFT, TTFT90 float64
	// Of a worker: requests that run, share of the KV cache in use, share of the time
	// in which prompts are computed.
	Running, KVUsage, Prefill float64
	// Memory says that room in the KV cache is scarcer than time.
	Memory bool
}

// Load is a mix of requests to a class of workers. Use Class.Load.
type Load struct {
	c  *Class
	m  mix
	ok bool // there are any
}

// Load looks at a mix once, for any number of questions.
func (c *Class) Load(kinds []Kind) *Load {
	m, ok := c.mix(kinds)
	return &Load{c, m, ok}
}

// mix is what the model needs of a mix: means over its requests.
type mix struct {
	output, context   float64 // tokens generated after the first; before a generated token
	prefill, prefill2 float64 // seconds of computing a prompt alone, and their squares
	steps             float64 // steps with prompts
	p90               float64 // of the prefill
	own, own2         float64 // share of the cache that is a request's own, and its square
	hits, found       float64 // part of the requests that found something, and tokens of those
}

func (c *Class) mix(kinds []Kind) (m mix, ok bool) {
	type one struct{ prefill, weight float64 }
	all, generated := 0.0, 0.0
	w := &c.Weights
	var list []one
	for _, k := range kinds {
		if !(k.Weight > 0) || math.IsInf(k.Weight, 1) {
			continue
		}
		u, h, o := float64(max(k.Uncached, 1)), float64(max(k.Cached, 0)), float64(max(k.Output-1, 0))
		steps := math.Ceil(u / float64(max(w.Batch, 1)))
		last := u - (steps-1)*float64(max(w.Batch, 1))
		prefill := u*w.Token + u*(h+u/2)*w.Attention + steps*w.Launch + max(0, w.Step-w.Launch-last*w.Token)
		own := c.KVRequest + (u+o/2)*c.KVToken
		all += k.Weight
		m.output += k.Weight * o
		m.context += k.Weight * o * (u + h + o/2)
		generated += k.Weight * o
		m.prefill += k.Weight * prefill
		m.prefill2 += k.Weight * prefill * prefill
		m.steps += k.Weight * steps
		m.own += k.Weight * own
		m.own2 += k.Weight * own * own
		if h > 0 {
			m.hits += k.Weight
			m.found += k.Weight * h
		}
		list = append(list, one{prefill, k.Weight})
	}
	if all <= 0 {
		return m, false
	}
	if m.hits > 0 {
		m.found /= m.hits
	}
	for _, v := range []*float64{&m.output, &m.prefill, &m.prefill2, &m.steps, &m.own, &m.own2, &m.hits} {
		*v /= all
	}
	if generated > 0 {
		m.context /= generated
	}
	slices.SortFunc(list, func(a, b one) int { return cmp.Compare(a.prefill, b.prefill) })
	sum := 0.0
	for _, x := range list {
		if sum += x.weight; sum >= .9*all {
			m.p90 = x.prefill
			break
		}
	}
	return m, true
}

// At predicts what happens at a rate on a number of workers.
func (l *Load) At(rate float64, workers int) Point {
	p := Point{Rate: rate, Stable: true}
	if !l.ok || rate < 0 || workers < 1 {
		return p
	}
	c, m := l.c, &l.m
	w := &c.Weights
	n := float64(workers)
	each := rate / n // of one worker
	// How many generate at once: they need each·output tokens a second, and get one
	// for each step; steps with prompts take so much of the time, the others the rest.
	generating := c.generating(m, each)
	if math.IsInf(generating, 1) {
		p.Stable = false
	}
	beside := w.Launch + generating*(w.Sequence+m.context*w.Context)
	// A prompt beside those that generate: their part of its steps is its wait too.
	slow := 1.0
	if m.prefill > 0 && p.Stable {
		slow = (m.prefill + m.steps*(beside-w.Launch+generating*w.Token)) / m.prefill
	}
	service := m.prefill * slow
	p.Prefill = each * service
	step := w.Step + generating*(w.Sequence+m.context*w.Context)
	residence := service
	if each > 0 && m.output > 0 && p.Stable {
		residence += generating / each
	}
	p.Running = each * residence
	room := c.room(m)
	p.KVUsage = c.memory(m, p.Running)
	full := p.Running / room
	p.Memory = full > p.Prefill
	if p.Prefill >= 1 || full >= 1 {
		p.Stable = false
	}
	if !p.Stable {
		p.TTFT, p.TTFT90 = math.Inf(1), math.Inf(1)
		return p
	}
	spread := max(m.prefill2/(m.prefill*m.prefill)-1, 0) // squared coefficient of variation
	first, first90 := wait(p.Prefill, service, spread, n)
	// A request that finds no room waits until enough others are done. Long and short
	// ones hold different parts, which makes the effective room smaller.
	second, second90 := wait(full, residence, max(m.own2/max(m.own*m.own, 1e-18)-1, 0)+1, n*math.Floor(max(room, 1)))
	half := 0.0
	if generating > .5 {
		half = step / 2
	}
	p.TTFT = first + second + service + half + w.Latency
	p.TTFT90 = max(first90, second90) + max(m.p90*slow, service) + half + w.Latency
	if p.TTFT90 < p.TTFT {
		p.TTFT90 = p.TTFT
	}
	return p
}

// memory is the share of the KV cache that n requests hold. What they found there
// counts once for all that found the same.
func (c *Class) memory(m *mix, n float64) float64 {
	return n*m.own + m.found*distinct(n*m.hits, c.Prefixes)*c.KVToken
}

// distinct is how many of some prefixes n requests have, if each is as likely.
func distinct(n, prefixes float64) float64 {
	if prefixes <= 0 {
		return n
	}
	if prefixes <= 1 {
		return min(n, prefixes)
	}
	return prefixes * (1 - math.Pow(1-1/prefixes, n))
}

// room is how many requests of a mix can run at once.
func (c *Class) room(m *mix) float64 {
	most := float64(cmp.Or(c.MaxRunning, 1<<20))
	if c.memory(m, most) <= 1 {
		return most
	}
	lo, hi := 0.0, most
	for range 60 {
		if mid := (lo + hi) / 2; c.memory(m, mid) <= 1 {
			lo = mid
		} else {
			hi = mid
		}
	}
	return max(lo, 1e-9)
}

// generating solves for the number of requests that generate at once: infinite if
// the tokens cannot be made in the time that prompts leave.
func (c *Class) generating(m *mix, each float64) float64 {
	w := &c.Weights
	tokens := each * m.output
	if tokens <= 0 {
		return 0
	}
	// b requests get a token with each step, be it one with prompts or one without:
	// steps a second · b = tokens.
	made := func(b float64) float64 {
		per := w.Sequence + m.context*w.Context
		prompts := each * m.steps
		busy := each*m.prefill + prompts*b*(per+w.Token)
		left := max(1-busy, 0)
		step := max(w.Step, b*w.Token+w.Launch) + b*per
		return (prompts + left/step) * b
	}
	lo, hi := 0.0, 1.0
	best := 0.0
	for ; hi < 1e5; hi *= 2 {
		v := made(hi)
		if v >= tokens {
			break
		}
		if v < best*.98 { // more at once make fewer tokens from here on
			return math.Inf(1)
		}
		best = max(best, v)
		lo = hi
	}
	if hi >= 1e5 {
		return math.Inf(1)
	}
	for range 60 {
		if mid := (lo + hi) / 2; made(mid) < tokens {
			lo = mid
		} else {
			hi = mid
		}
	}
	return hi
}

// wait is the mean and the 90th percentile of the time in a queue of n servers
// (Sakasegawa's approximation; the tail is exponential).
func wait(load, service, spread, n float64) (mean, p90 float64) {
	if load <= 0 {
		return 0, 0
	}
	busy := math.Pow(load, math.Sqrt(2*(n+1))-1) // that all servers are
	mean = (1 + spread) / 2 * service / n * busy / (1 - load)
	if busy > .1 {
		p90 = mean / busy * math.Log(busy/.1)
	}
	return mean, p90
}

// Knee is the highest rate at which the 90th percentile of the TTFT is within the
// limit; 0 if even an idle worker takes longer.
func (l *Load) Knee(workers int, limit float64) float64 {
	fits := func(rate float64) bool { p := l.At(rate, workers); return p.Stable && p.TTFT90 <= limit }
	if !l.ok || workers < 1 || !fits(1e-6) {
		return 0
	}
	lo, hi := 1e-6, 1e-3
	for fits(hi) {
		if lo, hi = hi, 2*hi; hi > 1e7 {
			return hi
		}
	}
	for range 60 {
		if mid := (lo + hi) / 2; fits(mid) {
			lo = mid
		} else {
			hi = mid
		}
	}
	return lo
}

// maxWorkers bounds the answer of WorkersFor.
const maxWorkers = 100_000

// WorkersFor is how many workers a rate needs to keep the limit; 0 if no number
// does.
func (l *Load) WorkersFor(rate, limit float64) int {
	if l.Knee(1, limit) <= 0 {
		return 0
	}
	lo, hi := 0, 1
	for l.Knee(hi, limit) < rate {
		if lo, hi = hi, 2*hi; hi > maxWorkers {
			return 0
		}
	}
	for hi-lo > 1 {
		if mid := (lo + hi) / 2; l.Knee(mid, limit) < rate {
			lo = mid
		} else {
			hi = mid
		}
	}
	return hi
}
