package schedule

import "math"

// A prompt that is computed anew makes its worker a home: whatever shares its
// beginning will go there for minutes, while J looks no further than the prefill.
// So among workers that are about as good for the prompt itself, it goes where the
// least memory is wanted already. Prefixes that fit in the fleet then spread so that
// each worker can keep its own; the numbers are in docs/decisions/0011.
const (
	// homeNew is the part of a prompt, a quarter, of which less must be cached for it
	// to settle: a conversation whose turns are long stays with its history.
	homeNew = 4
	// homeShare is the largest share of a worker's pages that settles. What is
	// larger passes through, and pushes out the same wherever it goes.
	homeShare = 0.25
	// homeLoss is the largest difference of eviction losses that count as equal,
	// in units of the prompt's prefill.
	homeLoss = 0.02
	// homeHorizon is the time in seconds within which a block that is used again
	// counts as wanted. It is longer than that of E, which looks at one eviction.
	homeHorizon = 300
	// homeFull is the share of its pages from which a worker counts as full, and
	// homeSteps the number of steps in which shares are told apart.
	homeFull  = 0.7
	homeSteps = 20
	// twin is what it costs to compute a prompt that another worker is computing now, or
	// did a moment ago, in units of its prefill: little time is saved, and memory is taken
	// twice.
	twin = 0.1
	// strangersGain is the gain of the running mean of the requests that nobody tells of.
	strangersGain = 0.1
)

// rival is a candidate as seen by those that rank by J. Times are in seconds.
type rival struct {
	score float64 // J; infinite: out
	work  float64 // of the prompt's prefill
	loss  float64 // E
	// filled says how much of its memory is wanted, in steps.
	filled int
}

// settle leaves of the rivals of a prompt that settles those where it may: they cost
// less than one prefill more than first, which has the least J, push out no more of
// value, and have the least memory wanted. The scores of the others become infinite.
// It returns the least score.
func settle(rivals []rival, first int) float64 {
	best := rivals[first]
	may := func(r *rival) bool {
		return r.score <= best.score+best.work && r.loss <= best.loss+homeLoss*best.work
	}
	low := math.MaxInt
	for i := range rivals {
		if r := &rivals[i]; may(r) {
			low = min(low, r.filled)
		}
	}
	least := math.Inf(1)
	for i := range rivals {
		r := &rivals[i]
		if !may(r) || r.filled > low {
			r.score = math.Inf(1)
		}
		least = min(least, r.score)
	}
	return least
}

// homes brings those to the front of what is sorted by J where a prompt that settles
// may go, and returns how many they are: all, if it does not settle.
func homes(order []int, e []Estimate) int {
	if !e[order[0]].settles {
		return len(order)
	}
	rivals := make([]rival, len(order))
	for n, i := range order {
		rivals[n] = rival{e[i].j, e[i].work, e[i].loss, e[i].filled}
	}
	settle(rivals, 0)
	var front, rest []int
	for n, i := range order {
		if math.IsInf(rivals[n].score, 1) {
			rest = append(rest, i)
		} else {
			front = append(front, i)
		}
	}
	copy(order[copy(order, front):], rest)
	return len(front)
}

// twins adds to the pairs of a prompt what computing it twice at a time would cost.
func (s *Scheduler) twins(t float64, c []Candidate, pairs []pair) {
	if !s.k2 {
		return
	}
	home := -1
	for i := range pairs {
		p := &pairs[i]
		p.twin = 0
		if p.barred {
			continue
		}
		if s.fit(t, p, &c[i]); home < 0 || p.cached > pairs[home].cached {
			home = i
		}
	}
	if home < 0 || isNew(&c[home], pairs[home].cached) || 2*pairs[home].anticipated <= pairs[home].cached {
		return
	}
	for i := range pairs {
		if p := &pairs[i]; !p.barred && isNew(&c[i], p.cached) {
			p.twin = twin * p.work
		}
	}
}

// isNew tells whether a worker that holds so much of a prompt would compute most of it.
func isNew(c *Candidate, cached int) bool { return homeNew*cached < c.Tokens }

// settles tells whether a prompt of which a worker holds so much would make a home
// there: most of it is new, and there is room for several like it.
func settles(o Objective, c *Candidate, cached int) bool {
	fresh := c.Tokens - cached
	return o != TTFT && c.TotalBlocks > 0 && c.BlockSize > 0 && isNew(c, cached) &&
		float64(fresh) <= homeShare*float64(c.TotalBlocks)*float64(c.BlockSize)
}

// fill adds to the estimates of a prompt how much memory is wanted at each worker; for
// nothing but prompts that settle, since it takes a look at all that is cached.
func fill(t float64, e []Estimate) {
	needed := false
	for i := range e {
		needed = needed || e[i].settles
	}
	for i := 0; needed && i < len(e); i++ {
		e[i].filled = e[i].w.filled(t)
	}
}

// filled is how much of a worker's memory is in use or will be wanted again soon, in
// steps. A worker that is slow for its class counts as smaller: what it has
// keeps it busy for longer. One counts as full where requests are that nobody tells
// of, or without news: who knows what else lives there.
func (w *worker) filled(t float64) int {
	const full = homeSteps * homeFull
	v := &w.view
	if w.pages.total <= 0 || !v.fresh || w.strangers >= 1 {
		return full
	}
	if v.wantedFor != v.serial {
		v.wantedFor, v.wanted = v.serial, w.wanted(t)
	}
	return int(math.Round(min(full, homeSteps*v.wanted/float64(w.pages.total)*v.slow)))
}

// wanted is the number of pages in use, and of those cached that are expected to be
// used within homeHorizon. Pages in use beyond those of prompts count half: they are of
// the moment, a prompt stays.
func (w *worker) wanted(t float64) float64 {
	used, prompts := float64(w.pages.total)-w.view.free, float64(w.pages.act)+w.pages.bias
	sum := (used + prompts) / 2
	for i := range w.mirror.runs {
		if r := &w.mirror.runs[i]; len(r.hashes) > 0 {
			sum += float64(r.hi-r.lo) * -math.Expm1(-fade(r.rate, r.at, t)*homeHorizon)
		}
	}
	return sum
}
