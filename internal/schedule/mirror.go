package schedule

import (
	"cmp"
	"math"
	"slices"

	"github.com/kinference/kinference/internal/kvhash"
)

// mirror is a guess of what a worker's cache holds besides the blocks in use,
// in the order in which the engine would evict it. Engines of vLLM's kind keep
// free blocks in a list by last use and free a request's blocks deepest first,
// so whatever a request leaves behind is a run of its chain that loses blocks
// at its end. The index is not asked: it knows what is held, not which goes
// next. What it does know corrects the mirror (trim).
type mirror struct {
	runs   []run // the next to be evicted first
	cached int   // sum of their lengths
}

// run is blocks [lo, hi) of a chain; without hashes it is blocks of generated
// text, whose hashes the router does not know.
type run struct {
	blocks
	lo, hi int
	first  kvhash.Hash // of block lo, so that most chains are told apart without a look at hashes
	rate   float64     // how often requests use its blocks, per second, at time at
	at     float64
	back   comeback
}

// apart tells that chain b certainly does not go as far as the run's first block.
func (r *run) apart(b blocks) bool {
	return r.stride == 1 && b.stride == 1 && (r.lo >= len(b.hashes) || b.hashes[r.lo] != r.first)
}

// from makes the run begin at block lo of its chain.
func (r *run) from(lo int) {
	r.lo = lo
	if r.stride == 1 && lo < len(r.hashes) {
		r.first = r.hashes[lo]
	}
}

// use says that the first end blocks of a chain are used at least rate times a
// second. A list of uses is ordered by falling ends and rising rates: who uses a
// block uses those before it.
type use struct {
	end  int
	rate float64
}

const (
	// useTau is the time constant of rates of use in seconds.
	useTau = 120.0
	// maxUses bounds a list of uses.
	maxUses = 8
)

// fade is a rate of use at time at, seen at time t.
func fade(rate, at, t float64) float64 { return rate * math.Exp(min(at-t, 0)/useTau) }

// uses puts a list in order and drops what says nothing.
func uses(list []use) []use {
	slices.SortFunc(list, func(a, b use) int {
		if a.end != b.end {
			return b.end - a.end
		}
		return cmp.Compare(b.rate, a.rate)
	})
	n, most := 0, 0.0
	for _, u := range list {
		if u.end > 0 && u.rate > most*1.01 && n < maxUses {
			list[n], most = u, u.rate
			n++
		}
	}
	return list[:n]
}

// maxRuns bounds a mirror; the oldest go.
const maxRuns = 2048

// add puts blocks [lo, hi) of a chain at the end: the last to be evicted.
func (m *mirror) add(b blocks, lo, hi int, rate, at float64, back comeback) {
	if lo >= hi {
		return
	}
	if len(m.runs) >= maxRuns {
		for i := range maxRuns / 8 {
			m.cached -= m.runs[i].hi - m.runs[i].lo
		}
		m.runs = slices.Delete(m.runs, 0, maxRuns/8)
	}
	r := run{blocks: b, hi: hi, rate: rate, at: at, back: back}
	r.from(lo)
	m.runs = append(m.runs, r)
	m.cached += hi - lo
}

// pin takes the blocks of a chain out, since a request uses them, and appends how
// often they were used to list.
func (m *mirror) pin(t float64, b blocks, list []use) []use {
	m.edit(func(r *run) {
		if r.apart(b) {
			return
		}
		if k := min(common(r.blocks, b, r.lo), r.hi); k > r.lo {
			list = append(list, use{k, fade(r.rate, r.at, t)})
			r.from(k)
		}
	})
	return list
}

// trim corrects the mirror by the index: of chain b it holds held blocks.
func (m *mirror) trim(b blocks, held int) {
	m.edit(func(r *run) {
		if held >= r.hi || held >= r.lo && r.apart(b) {
			return
		}
		if common(r.blocks, b, held) > held {
			r.hi = max(r.lo, held)
		}
	})
}

// edit lets f shorten the runs and drops those that are empty. Each booking does
// it, mostly for nothing: runs move only behind one that was dropped.
func (m *mirror) edit(f func(*run)) {
	n := 0
	for i := range m.runs {
		r := &m.runs[i]
		if len(r.hashes) > 0 {
			was := r.hi - r.lo
			f(r)
			m.cached -= was - (r.hi - r.lo)
		}
		if r.lo >= r.hi {
			continue
		}
		if n < i {
			m.runs[n] = *r
		}
		n++
	}
	clear(m.runs[n:])
	m.runs = m.runs[:n]
}

// shrink evicts until the mirror holds at most n blocks.
func (m *mirror) shrink(n int) {
	gone := 0
	for m.cached > max(n, 0) {
		r := &m.runs[gone]
		k := min(r.hi-r.lo, m.cached-max(n, 0))
		r.hi -= k
		m.cached -= k
		if r.lo == r.hi {
			gone++
		}
	}
	m.runs = slices.Delete(m.runs, 0, gone)
}

// evicted calls f for the blocks [lo, hi) of each run that n more blocks would
// push out, spared the blocks of chain b, which would be in use.
func (m *mirror) evicted(b blocks, n int, f func(r *run, lo, hi int)) {
	for i := range m.runs {
		if n <= 0 {
			return
		}
		r := &m.runs[i]
		lo := r.lo
		if !r.apart(b) {
			lo = common(r.blocks, b, lo)
		}
		if k := min(n, r.hi-lo); k > 0 {
			f(r, r.hi-k, r.hi)
			n -= k
		}
	}
}
