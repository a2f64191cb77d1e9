package schedule

import (
	"cmp"
	"math"
	"slices"
)

// pages is what is known of a worker's KV pages.
type pages struct {
	total int // 0 when unknown
	size  int // tokens in a page
	// act is the number of different full prompt blocks of requests in flight.
	act int
	// extra is the learned number of pages that a sequence holds besides those
	// of its tokens, such as the recurrent state of a hybrid model.
	extra float64
	// bias is what the newest sample shows in use beyond our own requests.
	bias float64
}

// Constants of page accounting, from docs/decisions/0011.
const (
	maxKVWait  = 60  // s; also the wait when no end in sight frees enough
	exitSlack  = 1.1 // decode steps are taken to be slower by this
	restShare  = 4   // of the expected output that a request still has ahead at least: 1/4
	extraGain  = 0.1
	maxExtra   = 64
	maxExits   = 256 // bounds the look ahead
	biasExpiry = 30  // s; an older sample says nothing of others any more
	// sharedFrom is the share of their pages that the prompts of others have in common
	// from which on they are taken to hold what is cached of ours: 0.04 where each session
	// has a prompt of its own, 0.4 where twelve prefixes serve all.
	sharedFrom = 0.1
)

// tail is the number of pages that an entry holds beyond its full prompt blocks.
func (w *worker) tail(t float64, e *entry, step float64, s *Scheduler) float64 {
	if w.pages.size <= 0 {
		return 1
	}
	generated := 0.0
	if e.first > 0 && step > 0 {
		generated = min((t-e.first)/step, s.outputOf(e)*2)
	}
	return 1 + math.Floor((float64(e.tokens%w.pages.size)+generated)/float64(w.pages.size))
}

// own is the number of pages that the requests of the ledger hold.
func (w *worker) own(t, step float64, s *Scheduler) float64 {
	used := float64(w.pages.act)
	for e := range w.flight() {
		used += w.pages.extra + w.tail(t, e, step, s)
	}
	return used
}

// hold takes the pages of an entry that is about to join those in flight.
func (w *worker) hold(t float64, e *entry) {
	shared := 0
	var list []use
	for o := range w.flight() {
		k := common(o.prompt, e.prompt, 0)
		if k == 0 {
			continue
		}
		shared = max(shared, k)
		var more []use
		for _, u := range o.uses {
			rate := fade(u.rate, o.used, t)
			list = append(list, use{min(u.end, k), rate})
			more = append(more, use{u.end, rate}, use{min(u.end, k), rate + 1/useTau})
		}
		o.uses, o.used = uses(more), t
	}
	w.pages.act += max(0, e.prompt.len()-shared)
	list = uses(w.mirror.pin(t, e.prompt, list))
	for i := range list {
		list[i].rate += 1 / useTau
	}
	e.uses, e.used = uses(append(list, use{e.prompt.len(), 1 / useTau})), t
}

// free gives back the pages of an entry that is about to leave, and returns how
// many. What was computed stays cached, the deepest blocks the first to go.
func (w *worker) free(t float64, s *Scheduler, e *entry) float64 {
	shared := w.shared(e)
	n := max(0, e.prompt.len()-shared)
	w.pages.act = max(0, w.pages.act-n)
	if w.inFlight() == 1 {
		w.pages.act = 0 // no error of thinned chains survives
	}
	tail := w.tail(t, e, w.view.step, s)
	if e.first > 0 && w.pages.total > 0 {
		hi := e.prompt.len()
		back := s.left(t, e)
		w.mirror.add(blocks{}, 0, int(tail)-1, 1/useTau, e.used, back)
		for i, u := range e.uses { // the deepest blocks first
			lo := shared
			if i+1 < len(e.uses) {
				lo = max(lo, e.uses[i+1].end)
			}
			w.mirror.add(e.prompt, lo, min(u.end, hi), u.rate, e.used, back)
			hi = min(hi, lo)
		}
	}
	return float64(n) + tail + w.pages.extra
}

// count works out how many pages are free at a worker.
func (s *Scheduler) count(t float64, w *worker, v *view) {
	v.room = float64(w.pages.total) - w.own(t, v.step, s)
	v.free = v.room
	if t-w.sampled < biasExpiry {
		v.shared = w.shares()
		v.free -= w.pages.bias
		if v.shared {
			v.free += w.twice()
		}
	}
	if v.fresh { // by an old sample all would go where there was room then
		v.room = v.free
	}
	w.mirror.shrink(int(v.room))
}

// learnShared takes a sample of what the prompts of others have in common: then they
// hold fewer pages than as many prompts like ours would.
func (w *worker) learnShared() {
	if w.othersRunning < 1 || w.meanTokens == 0 || w.pages.size <= 0 {
		return
	}
	each := w.meanTokens/float64(w.pages.size) + 1 + w.pages.extra
	w.group.shared.add(clamp(1-w.pages.bias/(w.othersRunning*each), 0, 1))
}

// shares tells that others are at the worker, whose prompts have much in common. What
// is cached there of a prompt needs no pages then: they hold it. Taken for free pages,
// it drives requests away from the prefix to where it takes pages once more.
func (w *worker) shares() bool {
	return w.pages.bias > 0 && w.others() > 0.5 && w.group.shared.value > sharedFrom
}

// twice is the number of pages that count for us and for others: what was cached, and
// is held by none but one of our requests, which came after the newest sample.
func (w *worker) twice() (n float64) {
	for e := range w.flight() {
		if e.routed > w.sampled && e.blockSize > 0 {
			n += float64(max(0, min(e.hit/e.blockSize, e.prompt.len())-w.shared(e)))
		}
	}
	return n
}

// account compares a sample of the gauge, taken at time at, with the ledger as
// it was then.
func (s *Scheduler) account(t, at float64, w *worker, usage float64) {
	if w.pages.total <= 0 {
		return
	}
	used := clamp(usage, 0, 1) * float64(w.pages.total)
	own, n := w.own(t, w.view.step, s), w.inFlight()
	clean := w.others() == 0 && n > 0 && len(w.waiting) == 0
	for e := range w.flight() {
		if e.routed > at {
			own -= float64(e.prompt.len()-w.shared(e)) + w.pages.extra + w.tail(t, e, w.view.step, s)
			clean = false
		}
	}
	for i := range w.recent {
		if f := &w.recent[i]; f.routed <= at && f.done > at {
			own += f.held
			clean = false
		}
	}
	if clean {
		each := w.pages.extra + (used-own)/float64(n)
		w.pages.extra += extraGain * (clamp(each, 0, maxExtra) - w.pages.extra)
		own = w.own(t, w.view.step, s)
	}
	w.pages.bias = max(0, used-own)
	w.learnShared()
}

// shared is the number of an entry's blocks that others in flight hold too.
func (w *worker) shared(e *entry) (n int) {
	for o := range w.flight() {
		if o != e {
			n = common(o.prompt, e.prompt, n)
		}
	}
	return n
}

// exit is when a request ends, and the pages that it frees; in a list of exits
// those of all that end before it as well.
type exit struct{ at, freed float64 }

// exits predicts when the requests in flight free their pages, soonest first.
func (s *Scheduler) exits(t float64, w *worker, step float64) []exit {
	type end struct {
		at float64
		e  *entry
	}
	ends := make([]end, 0, w.inFlight())
	step *= exitSlack
	for _, e := range w.running {
		out := s.outputOf(e)
		ends = append(ends, end{t + max(out-(t-e.first)/max(step, 1e-6), out/restShare)*step, e})
	}
	for _, e := range w.waiting {
		ends = append(ends, end{max(t, e.due) + s.outputOf(e)*step, e})
	}
	slices.SortFunc(ends, func(a, b end) int { return cmp.Compare(a.at, b.at) })
	ends = ends[:min(len(ends), maxExits)]
	out := make([]exit, len(ends))
	freed := 0.0
	for i, x := range ends {
		shared := 0
		for _, later := range ends[i+1 : min(len(ends), i+65)] {
			shared = common(later.e.prompt, x.e.prompt, shared)
		}
		freed += float64(max(0, x.e.prompt.len()-shared)) + w.pages.extra + w.tail(t, x.e, step, s)
		out[i] = exit{x.at, freed}
	}
	return out
}

// kvWait is the time until need pages are free at the worker.
func (s *Scheduler) kvWait(t float64, w *worker, need float64) float64 {
	v := &w.view
	if need <= v.free {
		return 0
	}
	if v.exits == nil {
		v.exits = s.exits(t, w, v.step)
	}
	i, _ := slices.BinarySearchFunc(v.exits, need-v.free, func(x exit, missing float64) int { return cmp.Compare(x.freed, missing) })
	if i == len(v.exits) {
		return maxKVWait
	}
	return clamp(v.exits[i].at-t, 1e-3, maxKVWait)
}
