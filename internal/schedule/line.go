package schedule

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"github.com/kinference/kinference/internal/kvhash"
)

// QoS is a class of service: the classes of api/v1alpha1. Empty is Interactive.
type QoS string

// The classes, first in the line first.
const (
	// Interactive requests have somebody who waits for the answer.
	Interactive QoS = "interactive"
	// Batch requests go after all interactive ones.
	Batch QoS = "batch"
	// Deferrable requests go when a worker is idle or nothing else waits.
	Deferrable QoS = "deferrable"
)

// Objective is what a choice among workers optimises. Empty is Balanced.
type Objective string

// The objectives.
const (
	// Balanced weighs a request's own wait against the delay that it causes.
	Balanced Objective = "balanced"
	// TTFT looks at the request's own time to first token only.
	TTFT Objective = "ttft"
	// Throughput weighs the delay of others more, and lets short prefills
	// overtake long ones without a bound.
	Throughput Objective = "throughput"
)

// Hold says why a request was not dispatched in a pass.
type Hold string

// Reasons to hold.
const (
	// HoldQueue: the best worker's prefill queue is longer than the horizon.
	HoldQueue Hold = "queue"
	// HoldPages: the best worker lacks free KV pages for the prompt.
	HoldPages Hold = "pages"
	// HoldProtect: its prefill would evict what others need, who wait or are about to
	// come back.
	HoldProtect Hold = "protect"
	// HoldReserve: a request that waits longer has the best worker reserved.
	HoldReserve Hold = "reserve"
	// HoldDefer: a deferrable request waits for an idle worker.
	HoldDefer Hold = "defer"
	// HoldNone: no candidate, or no pass has looked at it yet.
	HoldNone Hold = ""
)

// Dispatch is a request that leaves the line.
type Dispatch struct {
	ID string
	// Decision is that of the dispatch, as from DecideBy.
	Decision Decision
	// Booked tells that the first of the order has it. It is false when choose
	// said that the request is not for workers any more.
	Booked bool
	// Waited is the time in line, Why the last reason for it and Ahead the
	// number of requests that were before it then.
	Waited time.Duration
	Why    Hold
	Ahead  int
}

// Waiting is one request in line.
type Waiting struct {
	ID, Tenant, Model string
	QoS               QoS
	Since             time.Time
	// Ahead is the number of requests before it in the order of the line.
	Ahead int
	// Worker is the best one by the last look, empty without candidates.
	Worker string
	// Wait is how much longer the request is predicted to wait in line, TTFT the
	// predicted time until its first token, both from now.
	Wait, TTFT time.Duration
	// Why it was not dispatched.
	Why Hold
}

// LineFullError is the answer to a request that the line has no place for.
type LineFullError struct {
	// Waiting is the number of requests in line.
	Waiting int
	// RetryAfter is when a request like this one is predicted to be accepted.
	RetryAfter time.Duration
	// Wait is the predicted wait that was too long; 0 when the line is full.
	Wait time.Duration
}

// Error says which bound was met.
func (e *LineFullError) Error() string {
	if e.Wait > 0 {
		return fmt.Sprintf("the predicted wait of %v in a line of %d requests is too long", e.Wait.Round(time.Millisecond), e.Waiting)
	}
	return fmt.Sprintf("the line is full with %d requests", e.Waiting)
}

// line is the requests that wait.
type line struct {
	waiters []*waiter // in order of arrival
	byID    map[string]*waiter
	tenants tenants
	claims  map[kvhash.Hash]int32 // blocks that requests in line need, here or at other routers, how many do
	pace    pace
	rivals  []rival             // reused
	most    map[contest]float64 // virtual time of the best served tenant in each; reused
}

func newLine() line {
	return line{byID: map[string]*waiter{}, claims: map[kvhash.Hash]int32{}, tenants: newTenants(), most: map[contest]float64{}}
}

// waiter is a request in line.
type waiter struct {
	r       Request
	c       []Candidate
	p       []pair // one per candidate
	choose  Choose // nil: rankAll
	tenant  *tenant
	entered float64
	seq     uint64

	best    int     // index of the best candidate, -1 for none
	work    float64 // its prefill there
	key     float64 // place in the order, among equals of class and tenant
	rank    int     // of its class
	pinned  bool    // policies prefer best, whatever its J
	asked   bool    // choose was asked about these candidates
	claimed bool    // its blocks are in line.claims
	told    *worker // the best one that other routers were told of,
	toldAt  float64 // at this time
	answer  answer
	hold    Hold // in the newest pass
	why     Hold // the last reason to hold
	ahead   int
}

// Enter puts a request in line; a later Pass decides. Only K2 lets requests
// wait: under all other policies the next Pass dispatches what is in line. The
// candidates belong to the scheduler from now on. choose, which may be nil, is
// called in passes as DecideBy does, with one addition: an empty order with
// book means that the request waits on. An ID that waits or is booked already
// is replaced. The error is a *LineFullError, or says that the ID is missing.
func (s *Scheduler) Enter(now time.Time, r Request, c []Candidate, choose Choose) error {
	if r.ID == "" {
		return errNoID
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	t := s.clock(now)
	s.leave(r.ID)
	s.remove(t, s.entries[r.ID])
	if n := len(s.waiters); n >= s.maxWaiting {
		return &LineFullError{Waiting: n, RetryAfter: s.duration(float64(n+1-s.maxWaiting) * max(s.pace.value, minGap))}
	}
	s.seq++
	x := &waiter{r: r, choose: choose, entered: t, seq: s.seq, best: -1, ahead: len(s.waiters)}
	if !r.Arrived.IsZero() {
		x.entered = clamp(s.clock(r.Arrived), t-maxArrived, t)
	}
	s.candidates(t, x, c)
	s.returned(t, blocks{x.hashes(), 1})
	s.join(t, x)
	if s.maxWait > 0 && s.k2 && len(s.waiters) > 0 {
		s.best(t, x)
		s.place(t, x)
		if wait := s.predict(t, x); wait > s.maxWait {
			s.unpick(x)
			s.tenants.leave(x.tenant)
			return &LineFullError{Waiting: len(s.waiters), Wait: s.duration(wait), RetryAfter: s.duration(max(wait-s.maxWait, minGap))}
		}
	}
	s.waiters = append(s.waiters, x)
	s.byID[r.ID] = x
	return nil
}

const (
	// minGap is the least time in seconds after which a full line has a place.
	minGap = 0.1
	// maxArrived bounds how long before it entered a request can have come, in
	// seconds.
	maxArrived = 7200
)

// candidates replaces those of a waiter.
func (s *Scheduler) candidates(t float64, x *waiter, c []Candidate) {
	s.unpick(x)
	x.c, x.asked, x.pinned = c, false, false
	x.p = slices.Grow(x.p[:0], len(c))[:len(c)]
	for i := range c {
		x.p[i] = s.pairOf(t, &c[i])
	}
}

// pick notes which candidate is a waiter's best; unpick takes that back.
func (s *Scheduler) pick(x *waiter, best int) {
	s.unpick(x)
	if x.best = best; best >= 0 {
		x.p[best].w.held++
	}
}

func (s *Scheduler) unpick(x *waiter) {
	if x.best >= 0 {
		x.p[x.best].w.held--
		x.best = -1
	}
}

// bar keeps the requests in line from a worker that is gone.
func (s *Scheduler) bar(w *worker) {
	for id, x := range s.waits {
		if x.w == w {
			s.unawait(id)
		}
	}
	for _, x := range s.waiters {
		for i := range x.p {
			if x.p[i].w != w {
				continue
			}
			if x.p[i].barred = true; x.best == i {
				s.unpick(x)
				x.pinned = false
			}
		}
	}
}

// Refresh replaces the candidates of a request that waits, for fresher overlap
// and loads, and choose unless it is nil. Requests that do not wait are ignored.
func (s *Scheduler) Refresh(now time.Time, id string, c []Candidate, choose Choose) {
	s.mu.Lock()
	defer s.mu.Unlock()
	t := s.clock(now)
	x := s.byID[id]
	if x == nil {
		return
	}
	if choose != nil {
		x.choose = choose
	}
	s.unclaim(x)
	s.candidates(t, x, c)
}

// Leave takes a request out of the line: it was cancelled, or has waited too
// long. Requests that do not wait are ignored.
func (s *Scheduler) Leave(now time.Time, id string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.clock(now)
	s.leave(id)
}

func (s *Scheduler) leave(id string) {
	if x := s.byID[id]; x != nil {
		s.out(x)
	}
}

// out takes a waiter out of the line.
func (s *Scheduler) out(x *waiter) {
	delete(s.byID, x.r.ID)
	i, _ := slices.BinarySearchFunc(s.waiters, x.seq, func(y *waiter, seq uint64) int { return cmp.Compare(y.seq, seq) })
	s.waiters = slices.Delete(s.waiters, i, i+1)
	s.tenants.leave(x.tenant)
	s.unpick(x)
	s.unclaim(x)
	s.untell(x)
}

// claim and unclaim keep count of the blocks that waiters need.
func (s *Scheduler) claim(x *waiter) {
	if x.claimed {
		return
	}
	x.claimed = true
	for _, h := range x.hashes() {
		s.claims[h]++
	}
}

func (s *Scheduler) unclaim(x *waiter) {
	if !x.claimed {
		return
	}
	x.claimed = false
	s.disclaim(x.hashes())
}

func (s *Scheduler) disclaim(hashes []kvhash.Hash) {
	for _, h := range hashes {
		if n := s.claims[h]; n > 1 {
			s.claims[h] = n - 1
		} else {
			delete(s.claims, h)
		}
	}
}

// hashes are those that a waiter claims: of its first candidate, as nearly all
// requests have one profile.
func (x *waiter) hashes() []kvhash.Hash {
	if len(x.c) == 0 {
		return nil
	}
	return x.c[0].Hashes
}

// Sample brings a worker's newest gauges without a request; the age counts from
// now. Unknown workers are ignored.
func (s *Scheduler) Sample(now time.Time, worker string, l Load) {
	s.mu.Lock()
	defer s.mu.Unlock()
	t := s.clock(now)
	if w := s.workers[worker]; w != nil {
		s.observe(t, w, &l)
	}
}

// Waits returns the number of requests in line.
func (s *Scheduler) Waits() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.waiters)
}

// InLine returns how many requests wait in line for each worker, as far as known also
// those at other routers. Workers for which none does are not in it.
func (s *Scheduler) InLine() map[string]int {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := map[string]int{}
	if len(s.waiters)+len(s.waits) == 0 {
		return out
	}
	for name, w := range s.workers {
		if w.held > 0 {
			out[name] = w.held
		}
	}
	return out
}

// Line returns who waits, in the order in which they go.
func (s *Scheduler) Line(now time.Time) []Waiting {
	s.mu.Lock()
	defer s.mu.Unlock()
	t := s.clock(now)
	out := make([]Waiting, 0, len(s.waiters))
	ahead := map[*worker]before{}
	for i, x := range s.sorted(t) {
		y := Waiting{ID: x.r.ID, Tenant: x.r.Tenant, Model: x.r.Model, QoS: x.r.QoS, Since: s.time(x.entered), Ahead: i, Why: x.why}
		if x.best >= 0 {
			p, c := &x.p[x.best], &x.c[x.best]
			v := s.fit(t, p, c)
			wait := s.waitBehind(t, p, v, ahead[p.w])
			y.Worker, y.Wait = c.Worker, s.duration(wait)
			y.TTFT = s.duration(wait + min(s.reach(v), v.queue) + p.prefill*v.slow + v.speed.Latency)
			b := ahead[p.w]
			ahead[p.w] = before{b.n + 1, b.work + x.work}
		}
		out = append(out, y)
	}
	return out
}
