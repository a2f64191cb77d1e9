package schedule

import (
	"maps"
	"math"
)

// Speed is the cost model of an engine that prefills in chunks beside its
// running decodes. A step of n prefill tokens at context c with B decoding
// sequences of C tokens in all takes
//
//	max(W, (n+B)*A) + n*(c+n/2)*Q + Ovh + B*S + C*K
//
// seconds. Only the relation between the constants must be about right:
// calibration scales them to the model and hardware in use.
type Speed struct {
	// W is the time to read the weights once: the least that a step takes.
	W float64
	// A is the time per token for the matrix products, and Q the time per
	// token and token of context for attention.
	A, Q float64
	// Ovh is the fixed cost of a step.
	Ovh float64
	// S is what one decoding sequence adds to a step, K what each token of
	// its context adds.
	S, K float64
	// Fetch is the time per token to bring KV blocks from CPU memory.
	Fetch float64
	// Adapter is the time to load an adapter that is not there.
	Adapter float64
	// Chunk is the number of prefill tokens in one step.
	Chunk int
	// Latency is the part of the TTFT that is not the engine's: HTTP,
	// tokenisation, queues in the API server. It is not calibrated.
	Latency float64
}

// DefaultSpeeds returns the priors by accelerator class. They hold for a 27B
// model in FP8: l40s is a fit (docs/decisions/0004), the others follow from it
// by memory bandwidth and peak arithmetic.
func DefaultSpeeds() map[string]Speed {
	l40s := Speed{W: 36.8e-3, A: 3.0e-4, Q: 1.62e-9, Ovh: 1.7e-3, S: 0.45e-3, K: 1.0e-7,
		Fetch: 3.3e-6, Adapter: 0.5, Chunk: 2048, Latency: 30e-3}
	return map[string]Speed{
		"":     l40s,
		"l40s": l40s,
		"a100": {W: 31e-3, A: 3.3e-4, Q: 1.5e-9, Ovh: 1.7e-3, S: 0.18e-3, K: 0.4e-7, Fetch: 2.8e-6, Adapter: 0.5, Chunk: 8192, Latency: 30e-3},
		"h100": {W: 9.5e-3, A: 0.8e-4, Q: 0.6e-9, Ovh: 1.7e-3, S: 0.11e-3, K: 0.25e-7, Fetch: 1.6e-6, Adapter: 0.5, Chunk: 8192, Latency: 30e-3},
		"h200": {W: 6.6e-3, A: 0.8e-4, Q: 0.6e-9, Ovh: 1.7e-3, S: 0.08e-3, K: 0.17e-7, Fetch: 1.6e-6, Adapter: 0.5, Chunk: 8192, Latency: 30e-3},
	}
}

func mergeSpeeds(over map[string]Speed) map[string]*Speed {
	all := DefaultSpeeds()
	maps.Copy(all, over)
	m := make(map[string]*Speed, len(all))
	for class, p := range all {
		m[class] = &p
	}
	return m
}

// work is the time that an engine spends on tokens [cached, total) of a
// prompt while b sequences with ctx tokens decode: what the requests behind
// it wait for.
func (p *Speed) work(cached, total int, b, ctx float64) float64 {
	u := float64(total - cached)
	if u <= 0 {
		return 0
	}
	steps := math.Ceil(u / float64(p.chunk()))
	return u*p.A + u*(float64(cached)+u/2)*p.Q + steps*(p.Ovh+b*p.S+ctx*p.K)
}

// prefill is work plus what the floor W adds to the last step. Requests with
// few uncached tokens share that step, so it is not in work.
func (p *Speed) prefill(cached, total int, b, ctx float64) float64 {
	u := total - cached
	last := u % p.chunk()
	if u <= 0 || last == 0 {
		return p.work(cached, total, b, ctx)
	}
	return p.work(cached, total, b, ctx) + max(0, p.W-(float64(last)+b)*p.A)
}

// decodeStep is the time of a step in which only decodes run.
func (p *Speed) decodeStep(b, ctx float64) float64 {
	return max(p.W, b*p.A) + p.Ovh + b*p.S + ctx*p.K
}

func (p *Speed) chunk() int { return max(p.Chunk, 1) }

// learned is what calibration knows about a worker or a group of them.
type learned struct {
	logS    float64 // log of the slowness
	samples int
	waste   float64 // 1 - reuse ratio, so that the zero value is right
	hits    int     // samples in waste
	shared  mean    // of a group: the share of their pages that others' prompts have in common
}

// Calibration constants, from docs/decisions/0004 where not noted.
const (
	maxClip = 0.7  // most that one sample can say, in log units
	minGain = 0.05 // of a sample, once many were seen
	// The range of the slowness is wide: a small model on a new accelerator may be fifty
	// times as fast as the prior of an unknown class, and a line that holds requests by
	// a prior that is too slow would leave it idle.
	minS      = 1. / 128
	maxS      = 16
	maxWait   = 0.050 // s; a sample with a longer predicted wait says little about speed
	warm      = 16    // samples that teach a group before any teaches a worker (own choice)
	blend     = 4     // samples until a worker's own speed outweighs its group's (own choice)
	sameS     = 0.10  // log units; closer to the group than this is noise (own choice)
	fadeFrom  = 300   // s without a sample, after which what sets a worker apart fades
	fadeHalf  = 600   // s; its half-life from then on (own choices)
	oddUsage  = 0.8   // share of pages in use from which a slow sample is odd
	oddSample = 0.35  // log units above what is known
	oddRow    = 8     // in a row are believed (docs/decisions/0011)
	reuseMin  = 0.9   // above this the missing hits are evictions, not a broken cache (own choice)
)

// add moves the slowness towards a sample and returns the change.
func (l *learned) add(logS float64) float64 {
	gain := max(minGain, 1/float64(l.samples+3))
	was := l.logS
	l.logS += gain * clamp(logS-l.logS, -maxClip, maxClip)
	l.logS = clamp(l.logS, math.Log(minS), math.Log(maxS))
	l.samples++
	return l.logS - was
}

// addHits takes a sample of the engine's reported cached tokens.
func (l *learned) addHits(predicted, reported int) {
	if predicted <= 0 || reported < 0 {
		return
	}
	gain := max(minGain, 1/float64(l.hits+10))
	waste := 1 - min(1, float64(reported)/float64(predicted))
	l.waste += gain * (waste - l.waste)
	l.hits++
}

// reuse is the share of predicted hits to count on.
func (l *learned) reuse() float64 {
	if r := 1 - l.waste; r < reuseMin {
		return r
	}
	return 1
}

// slowness is the factor on the prior speed of the worker's class.
func (w *worker) slowness(t float64) float64 {
	return math.Exp(w.logSlowness(t))
}

// logSlowness takes a worker with few samples to be like its group: otherwise,
// where the prior is too slow, the first worker to be sampled would look fast
// and get all of the traffic. What sets it apart fades while it gets no more
// samples: else one that looked slow by chance would never be tried again.
func (w *worker) logSlowness(t float64) float64 {
	own := float64(w.samples) / float64(w.samples+blend)
	dev := own * w.apart(t)
	if math.Abs(dev) < sameS {
		dev = 0
	}
	return w.group.logS + dev
}

// apart is by how much the worker's own samples set it apart from its group.
func (w *worker) apart(t float64) float64 {
	return (w.logS - w.group.logS) * math.Exp2(-max(0, t-w.sampledSpeed-fadeFrom)/fadeHalf)
}

// odd tells that a sample says more about memory than about speed: when pages are
// short, an engine may let a prompt wait, or compute it twice, and calibration by
// such samples made workers look 1.4 times slower than they were (S1over). Where
// they come one after the other, the worker is slow.
func (w *worker) odd(logS, t float64) bool {
	if w.usage < oddUsage || logS-w.logSlowness(t) < oddSample {
		w.oddSamples = 0
		return false
	}
	w.oddSamples++
	return w.oddSamples < oddRow
}

// learnSpeed takes the observed slowness of a prefill as a sample. The first
// ones teach only the group: what a worker learned while the group was still
// far off would set it apart from workers that were sampled later.
func (w *worker) learnSpeed(t, logS float64) (change float64) {
	if w.group.samples >= warm {
		w.logS, w.sampledSpeed = w.group.logS+w.apart(t), t
		if w.samples == 0 {
			w.logS = w.group.logS
		}
		change = w.add(logS)
	}
	w.group.add(logS)
	return change
}

func clamp[T int | float64](v, lo, hi T) T { return min(max(v, lo), hi) }
