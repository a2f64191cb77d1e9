package limits

import (
	"math"
	"sync"
	"time"
)

const (
	// learnFrom is how many answers must be known before their lengths count.
	learnFrom = 32
	// forgetAt halves the counts, so that about the last thousand answers count.
	forgetAt = 1024
	// quantile of the lengths that is reserved.
	quantile = 0.95
	// leastOutput is reserved whatever was learned, and unknownOutput where
	// nothing was and the client sets no limit.
	leastOutput   = 128
	unknownOutput = 1024
	// farMore is by how much a request must ask for more than what is learned,
	// so that less is reserved.
	farMore = 2
	// unknownGPU is reserved while nothing is known.
	unknownGPU = time.Second
	// unknownPace is what an engine is taken to generate, in tokens a second.
	unknownPace = 20

	maxLearned = 4096
	// MaxChoices bounds n. vLLM takes no more.
	MaxChoices = 16384
)

// Learner remembers how long the answers of a tenant's requests to a model are,
// for at most 4096 pairs of the two.
//
// Why reserving less than what a request may use is safe: the bucket is settled
// with the truth, its level goes below zero and the refill pays that before
// anybody is let in again, so over time nobody gets more than is granted. What
// can be taken too much at once is bounded: the differences between what was
// asked for and what was reserved, of all requests in flight here, add up to no
// more than lend (see Estimate); beyond that, all that was asked for is
// reserved.
type Learner struct {
	// Exact reserves all that is asked for, always.
	Exact bool

	mu    sync.Mutex
	pairs map[pair]*learned
}

type pair struct{ tenant, model string }

type learned struct {
	output, gpu histogram
	lent        int64   // tokens, of requests in flight
	pace        float64 // tokens a second of one choice, a moving mean
}

// Ask is what decides how long answers may get.
type Ask struct {
	// Max is the limit of tokens for each choice, 0 if none is set. Room is what
	// the model's context leaves for one, 0 if unknown.
	Max, Room int64
	// Choices is how many answers are generated, at least 1.
	Choices int64
}

// most is the most tokens of one choice; 0: unknown.
func (a *Ask) most() int64 {
	switch most, room := clamp(a.Max), clamp(a.Room); {
	case most == 0:
		return room
	case room == 0:
		return most
	default:
		return min(most, room)
	}
}

// Estimate is what to reserve.
type Estimate struct {
	// Output of all choices, in tokens.
	Output int64
	// GPU time of one device.
	GPU time.Duration
	// Guess says that Output may be exceeded. A request is never too large for
	// a bucket because of a guess.
	Guess bool

	pair pair
	lent int64
}

// Estimate tells how much output to reserve for a request: what it asks for,
// bounded by what is possible, unless it asks for far more than this tenant's
// answers of this model need. lend bounds the sum of what is left out, in
// tokens. Return must be called when the request is over.
func (l *Learner) Estimate(tenant, model string, a Ask, lend int64) Estimate {
	e := Estimate{pair: pair{tenant, model}, GPU: unknownGPU}
	choices := max(1, clamp(a.Choices))
	most := a.most()
	l.mu.Lock()
	defer l.mu.Unlock()
	known := l.pairs[e.pair]
	guess := int64(unknownOutput)
	if known != nil && known.output.total >= learnFrom {
		guess = max(leastOutput, known.output.quantile())
		e.GPU = time.Duration(known.gpu.quantile()) * time.Microsecond
	} else if a.Max > 0 { // nothing to go by but the client
		guess = most
	}
	switch {
	case most == 0, a.Max <= 0 && !l.Exact:
		// Nobody set a limit, so there is nothing to lend.
		e.Output, e.Guess = min(guess*choices, maxTokens), true
		if most > 0 {
			e.Output = min(e.Output, most*choices)
		}
		return e
	case l.Exact || most <= farMore*guess:
		// All of the context, for a client that set no limit: no reason to refuse it for good.
		e.Output, e.Guess = min(most*choices, maxTokens), a.Max <= 0
		return e
	}
	left := min((most-guess)*choices, maxTokens)
	if known.lent+left > lend {
		e.Output = min(most*choices, maxTokens)
		return e
	}
	known.lent += left
	e.Output, e.Guess, e.lent = min(guess*choices, maxTokens), true, left
	return e
}

// Return ends what Estimate lent. It may be called again.
func (l *Learner) Return(e *Estimate) {
	if e.lent == 0 {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if known := l.pairs[e.pair]; known != nil {
		known.lent = max(0, known.lent-e.lent)
	}
	e.lent = 0
}

// Learn takes in an answer that was complete: the tokens of each choice, the
// time of one device, and how long it took.
func (l *Learner) Learn(tenant, model string, output int64, gpu, took time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	p := pair{tenant, model}
	known := l.pairs[p]
	if known == nil {
		known = l.add(p)
	}
	known.output.add(clamp(output))
	known.gpu.add(max(0, gpu.Microseconds()))
	if took > 0 && output > 0 {
		pace := float64(clamp(output)) / took.Seconds()
		if known.pace > 0 {
			pace = known.pace + (pace-known.pace)/16
		}
		known.pace = pace
	}
}

// Pace is about how many tokens of one choice were generated in a time.
func (l *Learner) Pace(tenant, model string, d time.Duration) int64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	pace := float64(unknownPace)
	if known := l.pairs[pair{tenant, model}]; known != nil && known.pace > 0 {
		pace = known.pace
	}
	return clamp(int64(pace * max(0, d.Seconds())))
}

// Lend is how much may be left out of what requests reserve, in tokens: what the
// smallest of the limits holds that count output.
func Lend(charges []Charge) int64 {
	least := int64(maxTokens)
	for i := range charges {
		if l := charges[i].Limit; !l.Shadow && (l.Count == OutputTokens || l.Count == TotalTokens) {
			least = min(least, l.Bucket()/l.Scale)
		}
	}
	return least
}

// Reserve is the amount to reserve of a charge. What is only guessed does not
// make a request too large for good.
func (c *Charge) Reserve(u *Use, e *Estimate) int64 {
	n := c.Limit.Amount(u)
	bucket := c.Limit.Bucket()
	if n <= bucket || !e.Guess && c.Limit.Count != GPUTime {
		return n
	}
	without := *u
	without.Output, without.GPU = 0, 0
	return max(bucket, c.Limit.Amount(&without))
}

// add makes room for a pair if need be: of all pairs any may go.
func (l *Learner) add(p pair) *learned {
	if l.pairs == nil {
		l.pairs = map[pair]*learned{}
	}
	if len(l.pairs) >= maxLearned {
		for old, known := range l.pairs {
			if known.lent == 0 {
				delete(l.pairs, old)
				break
			}
		}
	}
	known := &learned{}
	l.pairs[p] = known
	return known
}

// histogram counts values in steps of a quarter of an octave, so that a
// quantile is at most a fifth too large.
type histogram struct {
	counts [4 * 40]uint16
	total  int
}

func (h *histogram) add(v int64) {
	i := 0
	if v > 1 {
		i = min(int(math.Ceil(4*math.Log2(float64(v)))), len(h.counts)-1)
	}
	h.counts[i]++
	if h.total++; h.total >= forgetAt {
		h.total = 0
		for i := range h.counts {
			h.counts[i] /= 2
			h.total += int(h.counts[i])
		}
	}
}

// quantile is a value that is not exceeded by that share of the values.
func (h *histogram) quantile() int64 {
	want := int(math.Ceil(quantile * float64(h.total)))
	for i, n := range h.counts {
		if want -= int(n); want <= 0 {
			return int64(math.Ceil(math.Exp2(float64(i) / 4)))
		}
	}
	return 0
}

// Len is how many pairs of tenant and model are known.
func (l *Learner) Len() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.pairs)
}
