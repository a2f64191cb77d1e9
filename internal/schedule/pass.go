package schedule

import (
	"math"
	"slices"
	"time"

	"github.com/kinference/kinference/internal/kvhash"
)

// Pass dispatches all requests that can go now and books them. Call it after
// Enter, Refresh, FirstToken, Done, Leave and Sample, and when Wake says.
func (s *Scheduler) Pass(now time.Time) []Dispatch {
	s.mu.Lock()
	defer s.mu.Unlock()
	t := s.clock(now)
	s.expire(t)
	if !s.k2 {
		return s.passAll(t)
	}
	s.unawaitSilent(t)
	defer s.tellLine(t)
	var out []Dispatch
	for len(s.waiters) > 0 {
		d, ok := s.next(t)
		if !ok {
			break
		}
		out = append(out, d)
	}
	return out
}

// passAll is a pass of policies that hold nothing back.
func (s *Scheduler) passAll(t float64) []Dispatch {
	var out []Dispatch
	for _, x := range s.sorted(t) {
		if s.ask(t, x); !x.answer.stays() {
			out = append(out, s.dispatch(t, x))
		}
	}
	return out
}

// next dispatches the first request of the line that can go.
func (s *Scheduler) next(t float64) (d Dispatch, ok bool) {
	open := s.open(t)
	for _, x := range s.waiters {
		if !open && x.asked && x.best >= 0 {
			continue // no worker can take anything: what is best can wait
		}
		if !x.asked {
			if s.ask(t, x); x.answer.leaves() {
				return s.dispatch(t, x), true
			}
		}
		s.best(t, x)
	}
	if !open {
		for _, x := range s.waiters {
			if x.why == HoldNone && x.best >= 0 {
				x.why = s.ready(t, x, &x.p[x.best], &x.c[x.best])
			}
		}
		return Dispatch{}, false
	}
	order := s.sorted(t)
	clear(s.most)
	for _, x := range order {
		s.most[x.contest()] = max(s.most[x.contest()], x.tenant.vtc)
	}
	reserved := map[*worker]bool{}
	for i, x := range order {
		x.ahead = i
		if x.best < 0 {
			x.hold = HoldNone
			continue
		}
		p, c := &x.p[x.best], &x.c[x.best]
		w := p.w
		if reserved[w] {
			x.hold = HoldReserve
			continue
		}
		age := t - x.entered
		poor := x.tenant.vtc < s.most[x.contest()]
		x.hold = s.ready(t, x, p, c)
		if x.hold != HoldNone && age > rescue && s.any(t, x) {
			p, c = &x.p[x.best], &x.c[x.best]
			w, x.hold = p.w, HoldNone
		}
		if x.hold == HoldNone && !poor && !s.empty(w) && age < rescue && s.spoils(t, x, p, c) {
			x.hold = HoldProtect
			continue
		}
		if x.hold == HoldNone && s.agreed(t, x, w) {
			return s.dispatch(t, x), true
		}
		if x.rank == 2 || x.hold == HoldDefer {
			continue
		}
		if poor || age > reserve && x.r.Objective != Throughput || age > rescue {
			reserved[w] = true
		}
	}
	for _, x := range s.waiters {
		if x.hold != HoldNone {
			x.why = x.hold
		}
	}
	return Dispatch{}, false
}

// open tells whether any worker's queue may be short enough to add to it: views may
// be out of date here, so it goes by the longest reach.
func (s *Scheduler) open(t float64) bool {
	for _, w := range s.workers {
		if v := &w.view; v.serial == 0 || w.queue(t)+v.ahead <= s.horizon || s.empty(w) || w.booked() == 0 {
			return true
		}
	}
	return false
}

// reach is the longest prefill queue of a worker to which requests are added.
func (s *Scheduler) reach(v *view) float64 {
	if v.b > 0 {
		return s.slack
	}
	return s.horizon
}

// empty tells whether nothing is in flight at the worker.
func (s *Scheduler) empty(w *worker) bool {
	return w.inFlight() == 0 && w.others() == 0
}

// ready tells why a request cannot go to its best worker now.
func (s *Scheduler) ready(t float64, x *waiter, p *pair, c *Candidate) Hold {
	w := p.w
	v := s.fit(t, p, c)
	if s.empty(w) {
		return HoldNone
	}
	if x.rank == 2 && slices.ContainsFunc(s.waiters, func(y *waiter) bool { return y.rank != 2 }) {
		return HoldDefer
	}
	if t-x.entered > patience && w.booked() == 0 {
		return HoldNone // what is there is not ours, and may never end
	}
	if v.queue > s.reach(v) {
		return HoldQueue
	}
	if s.kvWait(t, w, p.need) > 0 {
		return HoldPages
	}
	return HoldNone
}

// any picks a worker that can begin with a waiter whose best one cannot.
func (s *Scheduler) any(t float64, x *waiter) bool {
	if x.pinned || x.rank == 2 {
		return false
	}
	for i := range x.p {
		if !x.p[i].barred && s.ready(t, x, &x.p[i], &x.c[i]) == HoldNone {
			s.pick(x, i)
			return true
		}
	}
	return false
}

// spoils tells whether a request is to wait since it would push out what others
// need: those in line, and those who left a moment ago and come back. It waits for
// as long as that is worth, less what it would lose itself by waiting, and longer the
// more wait for the worker: were each to break in after the same time, nobody would
// keep anything.
func (s *Scheduler) spoils(t float64, x *waiter, p *pair, c *Candidate) bool {
	w := p.w
	if w.pages.total <= 0 || c.BlockSize <= 0 {
		return false
	}
	n := s.pushes(p, c)
	if n <= 0 {
		return false
	}
	for _, y := range s.waiters {
		if y != x { // what it needs itself is not evicted
			s.claim(y)
		}
	}
	lost := 0
	w.mirror.evicted(blocks{c.Hashes, 1}, n, func(r *run, lo, hi int) {
		if r.back.likely(t) {
			lost += hi - lo
		} else {
			lost += max(0, min(hi, s.claimedUpTo(r, lo, hi))-lo)
		}
	})
	tokens := float64(lost*c.BlockSize) - ownRisk*float64(p.matched+p.anticipated)
	turns := max(1, float64(w.held)/few)
	return t-x.entered < turns*min(patience, protect*tokens*w.view.speed.A*w.view.slow)
}

// pushes is how many cached blocks a request would push out of its worker.
func (s *Scheduler) pushes(p *pair, c *Candidate) int {
	fresh := math.Ceil(float64(max(c.Tokens-p.cached, 0))/float64(c.BlockSize) + p.w.pages.extra)
	return int(fresh) - (int(p.w.view.room) - p.w.mirror.cached)
}

// loss is the expected prefill time of the blocks that a request would push out:
// what they took, by how probable it is that somebody needs them again soon.
func (s *Scheduler) loss(t float64, p *pair, c *Candidate) (sum float64) {
	w := p.w
	if w.pages.total <= 0 || c.BlockSize <= 0 {
		return 0
	}
	block := float64(c.BlockSize) * w.view.speed.A * w.view.slow
	w.mirror.evicted(blocks{c.Hashes, 1}, s.pushes(p, c), func(r *run, lo, hi int) {
		sum += float64(hi-lo) * block * -math.Expm1(-fade(r.rate, r.at, t)*lossHorizon)
	})
	return sum * lossWeight
}

// claimedUpTo is the end of the part of a run that requests in line need: as
// hashes are chained, who needs a block needs those before it. Other routers tell
// only some blocks of a long prompt, each of which stands for the next ones too.
func (s *Scheduler) claimedUpTo(r *run, lo, hi int) int {
	if len(r.hashes) == 0 {
		return lo
	}
	for lo < hi {
		mid := (lo + hi + 1) / 2
		if !s.claimedAt(r, mid) && !s.claimedAt(r, mid-mid%s.coarse) {
			hi = mid - 1
		} else {
			lo = mid
		}
	}
	return lo
}

// claimedAt tells whether requests in line need the first n blocks of a run.
func (s *Scheduler) claimedAt(r *run, n int) bool {
	i := n / r.stride
	return i > 0 && s.claims[r.hashes[i-1]] > 0
}

// answer is what choose said of a waiter.
type answer struct {
	at      float64
	changes uint64
	d       Decision
	book    bool
}

// stays tells that the policies have the request wait, leaves that it is not
// for workers any more.
func (a *answer) stays() bool  { return len(a.d.Order) == 0 && a.book }
func (a *answer) leaves() bool { return !a.book }

// ask lets the policies choose for a waiter. What they leave out is barred, and
// where they prefer another candidate than J does, the waiter is pinned to it.
func (s *Scheduler) ask(t float64, x *waiter) {
	d := Decision{Policy: s.policy.Name(), Estimates: make([]Estimate, len(x.c))}
	s.twins(t, x.c, x.p)
	for i := range x.c {
		held := x.p[i].w.held
		if i == x.best {
			held--
		}
		s.estimate(t, &x.c[i], &x.p[i], x.r.Objective, held, &d.Estimates[i])
		if s.k2 {
			d.Estimates[i].Hold = s.ready(t, x, &x.p[i], &x.c[i])
		}
	}
	fill(t, d.Estimates)
	if s.k2 {
		s.addLine(t, x, d.Estimates)
	}
	choose := x.choose
	if choose == nil {
		choose = rankAll
	}
	order, book := choose(d.Estimates, func(order []int) {
		if len(order) > 0 {
			s.policy.Rank(order, &x.r, d.Estimates, s.rng)
		}
	})
	if len(x.c) == 0 && x.choose == nil {
		book = false // nobody can serve it
	}
	order = slices.DeleteFunc(order, func(i int) bool { return x.p[i].w.forgotten })
	d.Order = order
	x.asked, x.pinned = true, false
	x.answer = answer{t, s.changes, d, book}
	if !s.k2 || !book {
		return
	}
	for i := range x.p {
		x.p[i].barred = true
	}
	for _, i := range order {
		x.p[i].barred = false
	}
	s.best(t, x)
	if len(order) > 0 && x.best != order[0] && x.choose != nil {
		s.pick(x, order[0])
		x.pinned = true
	}
}

// agreed tells whether the policies still want the waiter to go to w.
func (s *Scheduler) agreed(t float64, x *waiter, w *worker) bool {
	if x.answer.at != t || x.answer.changes != s.changes {
		if s.ask(t, x); x.answer.leaves() {
			return true
		}
	}
	if x.answer.stays() || x.best < 0 {
		return false
	}
	first := x.answer.d.Order[0]
	if x.p[first].w == w {
		return true
	}
	x.hold = s.ready(t, x, &x.p[first], &x.c[first])
	return x.hold == HoldNone
}

// dispatch takes a waiter out of the line as the policies said.
func (s *Scheduler) dispatch(t float64, x *waiter) Dispatch {
	a := &x.answer
	out := Dispatch{ID: x.r.ID, Waited: s.duration(t - x.entered), Why: x.why, Ahead: x.ahead}
	s.out(x)
	if len(a.d.Order) == 0 {
		a.d.Reason = "no candidate"
	} else {
		a.d.Reason = reason(a.d.Policy, a.d.Order, a.d.Estimates)
	}
	if out.Booked = a.book && len(a.d.Order) > 0; out.Booked {
		e := &a.d.Estimates[a.d.Order[0]]
		s.book(t, &x.r, e)
		v := &e.w.view
		tokens := s.outputs.expect(outputKey{x.r.Tenant, x.r.Model}, x.r.MaxTokens)
		s.tenants.charge(x.tenant, e.work+tokens*v.speed.W*v.slow/decodeShare)
		if t > x.entered {
			s.pace.tick(t)
			e.w.pace.tick(t)
		}
	}
	a.d.seal()
	out.Decision = a.d
	return out
}

// pace is the running mean of the time between dispatches of requests that had
// to wait.
type pace struct {
	mean
	last float64
}

func (p *pace) tick(t float64) {
	if p.last > 0 {
		p.add(min(t-p.last, maxGap))
	}
	p.last = t
}

// maxGap bounds what one pause says of the pace of the line, in seconds.
const maxGap = 60

// decodeShare is the number of requests that share a decode step, for what a
// tenant is charged.
const decodeShare = 8

// best finds the candidate with the least J, or with one that is as good.
func (s *Scheduler) best(t float64, x *waiter) {
	if x.pinned && x.best >= 0 {
		s.fit(t, &x.p[x.best], &x.c[x.best])
		x.work = x.p[x.best].work
		return
	}
	s.unpick(x)
	b := beta(x.r.Objective)
	if cap(s.rivals) < len(x.c) {
		s.rivals = make([]rival, len(x.c))
	}
	rivals := s.rivals[:len(x.c)]
	first, least := -1, math.Inf(1)
	s.twins(t, x.c, x.p)
	for i := range x.c {
		p := &x.p[i]
		if p.barred {
			rivals[i].score = math.Inf(1)
			continue
		}
		v := s.fit(t, p, &x.c[i])
		wait, _ := s.wait(t, p, v, &x.c[i])
		rivals[i].score = wait + p.prefill*v.slow + v.speed.Latency + p.work*(float64(p.w.held)+b*v.b) + p.loss + p.twin
		if rivals[i].score < least {
			first, least = i, rivals[i].score
		}
	}
	if first >= 0 && settles(x.r.Objective, &x.c[first], x.p[first].cached) {
		for i := range rivals {
			p := &x.p[i]
			rivals[i].work, rivals[i].loss, rivals[i].filled = p.work, p.loss, p.w.filled(t)
		}
		least = settle(rivals, first)
	}
	limit := least + max(tieSeconds, tieShare*least)
	best := -1
	for i := range x.c {
		if rivals[i].score <= limit && !x.p[i].barred && (best < 0 || s.better(x, i, best)) {
			best = i
		}
	}
	if best >= 0 {
		x.work = x.p[best].work
	}
	s.pick(x, best)
}

// better tells whether candidate i of a waiter wins its tie with j.
func (s *Scheduler) better(x *waiter, i, j int) bool {
	a, b := &x.p[i], &x.p[j]
	if a.cached != b.cached {
		return a.cached > b.cached
	}
	v, w := &a.w.view, &b.w.view
	if v.busy != w.busy {
		return v.busy < w.busy
	}
	unit := max(min(a.work, b.work), 1e-6)
	if d := math.Round(v.cold/unit) - math.Round(w.cold/unit); d != 0 {
		return d < 0
	}
	return x.tie(i) > x.tie(j)
}

// tie is the hash that decides last for candidate i.
func (x *waiter) tie(i int) kvhash.Hash {
	p := &x.p[i]
	if !p.tied {
		p.tie, p.tied = tieHash(&x.r, &x.c[i], p.w.name), true
	}
	return p.tie
}

// before is who goes to a worker before a request: how many, and their prefills.
type before struct {
	n    int
	work float64
}

// waitBehind is how long a request waits in line behind those: for their
// prefills, and at the pace at which the worker took requests of late.
func (s *Scheduler) waitBehind(t float64, p *pair, v *view, b before) float64 {
	pace := 0.0
	if g := &p.w.pace; g.n > 0 && t-g.last < maxGap {
		pace = float64(b.n) * g.value
	}
	return max(v.queue-s.reach(v)+b.work, pace, s.kvWait(t, p.w, p.need), 0)
}

// aheadOf tells who goes before a waiter whose place was worked out, by worker.
func (s *Scheduler) aheadOf(x *waiter) map[*worker]before {
	out := map[*worker]before{}
	for _, y := range s.waiters {
		if y != x && y.best >= 0 && compare(y, x) < 0 {
			w := y.p[y.best].w
			out[w] = before{out[w].n + 1, out[w].work + y.work}
		}
	}
	return out
}

// addLine adds to the predictions for a waiter how long it would stay in line for each
// worker that it cannot go to now: policies are to know what its client will see.
func (s *Scheduler) addLine(t float64, x *waiter, e []Estimate) {
	var ahead map[*worker]before
	for i := range e {
		if e[i].Hold == HoldNone {
			continue
		}
		if ahead == nil {
			s.place(t, x)
			ahead = s.aheadOf(x)
		}
		p := &x.p[i]
		v := s.fit(t, p, &x.c[i])
		wait := s.waitBehind(t, p, v, ahead[p.w]) + min(s.reach(v), v.queue)
		e[i].Wait = max(e[i].Wait, s.duration(wait))
		e[i].TTFT = e[i].Wait + e[i].Prefill
	}
}

// predict is how much longer a request will wait in line.
func (s *Scheduler) predict(t float64, x *waiter) float64 {
	if x.best < 0 {
		return 0
	}
	p := &x.p[x.best]
	v := s.fit(t, p, &x.c[x.best])
	return s.waitBehind(t, p, v, s.aheadOf(x)[p.w])
}

// Wake is when a Pass may find something to dispatch though nothing has
// happened; ok is false when nothing waits.
func (s *Scheduler) Wake(now time.Time) (at time.Time, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.waiters) == 0 {
		return time.Time{}, false
	}
	t := s.clock(now)
	next := t + maxNap
	for _, x := range s.waiters {
		if x.best < 0 {
			continue
		}
		p := &x.p[x.best]
		v := s.fit(t, p, &x.c[x.best])
		if over := v.queue - s.reach(v); over > 0 {
			next = min(next, t+over)
		}
		if x.hold == HoldProtect {
			next = min(next, t+protectNap)
		}
		for _, e := range p.w.waiting {
			if e.whole {
				next = min(next, max(t, e.due))
			}
		}
	}
	return s.time(max(next+1e-6, t+1e-3)), true
}

// maxNap is the longest time in seconds between passes while requests wait, and
// protectNap that while one is kept from what others need.
const maxNap, protectNap = 1, 0.25
