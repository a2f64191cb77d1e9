package schedule

import (
	"cmp"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
)

// Constants of K2. Where they come from: docs/decisions/0011.
const (
	// horizon is the longest prefill queue, in seconds, to which K2 adds: what
	// is queued at a worker can neither be reordered nor go elsewhere. On fleets
	// that run faster than real ones, messages still take their time: it is at
	// least flight, in seconds of the caller's clock.
	horizon, flight = 0.15, 0.03
	// slack is the horizon of a worker that decodes, in seconds of the caller's
	// clock: it does not idle while a prompt is on its way. The queue is counted
	// from dispatches, so only what the way varies by is left to cover.
	slack = 0.02
	// patience is the age in seconds from which a request may evict what others
	// need, while few wait for its worker.
	patience = 60
	// few is the number of requests in line for a worker up to which that holds; with
	// more, patience grows in proportion, until rescue.
	few = 3.0
	// reserve is the age in seconds from which nobody overtakes a request at its
	// best worker.
	reserve = 30
	// rescue is the age in seconds from which a request takes any worker that
	// can begin, and is not overtaken under any objective.
	rescue = 300
	// order is how many seconds of waiting one second of prefill outweighs in
	// the order of the line, and orderThroughput that for Throughput.
	order, orderThroughput = 5, 10
	// stall is what a second of one stalled decoder counts in seconds of TTFT,
	// and stallThroughput that for Throughput.
	stall, stallThroughput = 0.1, 0.3
	// protect is for how many seconds at most a request waits for each second of
	// prefill of what it would push out and others need.
	protect = 10
	// ownRisk is the share of its own cached prompt that a request is taken to
	// lose by waiting.
	ownRisk = 0.2
	// lossHorizon is the time in seconds within which a block that is used again
	// counts as lost when it is pushed out, and lossWeight what that counts.
	lossHorizon = 60
	lossWeight  = 1
)

func beta(o Objective) float64 {
	switch o {
	case TTFT:
		return 0
	case Throughput:
		return stallThroughput
	}
	return stall
}

// k2Policy ranks by J: the TTFT and the delay of others.
type k2Policy struct{}

func (k2Policy) Name() string { return K2 }

// Rank puts the best by J first; of a prompt that settles, those where it may.
// Those that are equal to the best are ordered by more matched tokens, fewer requests
// in flight, less work sent there of late, and a hash that replicas agree on.
func (k2Policy) Rank(order []int, r *Request, e []Estimate, _ *rand.Rand) {
	rankBy(order, e, func(e *Estimate) float64 { return e.j }, byHash(r, e))
}

// rankBy sorts by a score in seconds, least first, and orders the ties of the
// first by what else speaks for a worker.
func rankBy(order []int, e []Estimate, score func(*Estimate) float64, tie func(i, j int) int) {
	slices.SortStableFunc(order, func(i, j int) int {
		if d := cmp.Compare(score(&e[i]), score(&e[j])); d != 0 {
			return d
		}
		return strings.Compare(e[i].Worker, e[j].Worker)
	})
	may := homes(order, e)
	best := &e[order[0]]
	limit := score(best) + max(tieSeconds, tieShare*score(best))
	n := 1
	for n < may && score(&e[order[n]]) <= limit {
		n++
	}
	if n == 1 {
		return
	}
	unit := max(best.work, 1e-6)
	slices.SortStableFunc(order[:n], func(i, j int) int {
		if d := equals(&e[i], &e[j], unit); d != 0 {
			return d
		}
		return tie(i, j)
	})
}

// equals orders two workers whose scores are equal: more of the prompt cached,
// fewer requests in flight, less work sent there of late, in units of this
// request's. The last spreads serial requests that match nothing, for which
// every worker is idle at each pick.
func equals(a, b *Estimate, unit float64) int {
	if d := b.Cached - a.Cached; d != 0 {
		return d
	}
	if d := a.InFlight + int(a.Others+0.5) - b.InFlight - int(b.Others+0.5); d != 0 {
		return d
	}
	return cmp.Compare(math.Round(a.cold/unit), math.Round(b.cold/unit))
}
