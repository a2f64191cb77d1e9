package schedule

import (
	"math"
	"slices"
)

// returns learns who comes back: of the requests that end, which are soon followed
// by one that begins with their blocks, as in a conversation or an agent's loop.
// Somebody who waits for a worker begins there the moment another one ends, and
// would push out what that one's next turn, a moment later, needs.
type returns struct {
	share means // of those who come back within comebackTime
	gap   means // seconds until then
	gone  []departure
	last  float64 // when one was last noted in gone
}

// departure is a request that ended a while ago.
type departure struct {
	key    outputKey
	prompt blocks
	at     float64
}

const (
	// comebackTime is the time in seconds after its end within which who comes back
	// does so (docs/decisions/0011).
	comebackTime = 3.0
	// minComeback is the least time constant in seconds for those who come back:
	// messages take their time.
	minComeback = 0.1
	// maxGone bounds the departures that are watched at a time.
	maxGone = 256
)

func newReturns() returns { return returns{share: newMeans(0), gap: newMeans(0)} }

// comeback says how likely it is that what a request left is needed again.
type comeback struct {
	left  float64 // when it ended
	share float64 // of its like that come back
	gap   float64 // after this time, on average
}

// likely tells whether it rather comes back than not, though it has not until t.
func (c *comeback) likely(t float64) bool {
	return c.share*math.Exp((c.left-t)/max(c.gap, minComeback)) > 1-c.share
}

// left notes that a request has ended. Where many do, some are watched, at even
// distances: news of those who stay away come late, and would come all at once.
func (s *Scheduler) left(t float64, e *entry) comeback {
	r := &s.returns
	r.expire(t)
	if e.from == "" && len(e.prompt.hashes) > 0 && t-r.last >= comebackTime/maxGone {
		r.gone, r.last = append(r.gone, departure{e.output, e.prompt, t}), t
	}
	return comeback{t, r.share.of(e.output), r.gap.of(e.output)}
}

// returned looks for whom a new request with prompt p continues.
func (s *Scheduler) returned(t float64, p blocks) {
	r := &s.returns
	r.expire(t)
	for i, d := range r.gone {
		step := max(d.prompt.stride, p.stride)
		if n := d.prompt.len() / step * step; n > 0 && common(d.prompt, p, n-step) == n {
			r.share.add(d.key, 1)
			r.gap.add(d.key, t-d.at)
			r.gone = slices.Delete(r.gone, i, i+1)
			return
		}
	}
}

// expire gives up those that were gone for too long.
func (r *returns) expire(t float64) {
	n := 0
	for n < len(r.gone) && t-r.gone[n].at > comebackTime {
		r.share.add(r.gone[n].key, 0)
		n++
	}
	r.gone = slices.Delete(r.gone, 0, n)
}
