package schedule

import (
	"fmt"
	"time"
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
	// HoldProtect: its prefill would evict what other waiting requests need.
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
	// Decision is that of DecideBy at the time of the dispatch. When choose
	// said that nothing is to be booked, nothing is.
	Decision Decision
	// Waited is the time in line, Held the last reason for it.
	Waited time.Duration
	Held   Hold
}

// Waiting is one request in line.
type Waiting struct {
	ID, Tenant, Model string
	QoS               QoS
	Since             time.Time
	// Place in the order of the line, from 0.
	Place int
	// Worker is the best one by the last look, empty without candidates.
	Worker string
	// Wait is how much longer the request is predicted to wait in line.
	Wait time.Duration
	// Hold is why it was not dispatched.
	Hold Hold
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

// waiter is a request in line.
type waiter struct {
	r       Request
	c       []Candidate
	choose  Choose
	entered float64
	hold    Hold
}

// Enter puts a request in line; a later Pass decides. Only policies that hold
// requests leave one there for long: with all others the next Pass dispatches
// it. The candidates belong to the scheduler from now on. choose, which may be
// nil, is called in passes as DecideBy does. An ID that waits or is booked
// already is replaced. The error is a *LineFullError, or says that the ID is
// missing.
func (s *Scheduler) Enter(now time.Time, r Request, c []Candidate, choose Choose) error {
	if r.ID == "" {
		return errNoID
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	t := s.clock(now)
	if choose == nil {
		choose = rankAll
	}
	s.leave(r.ID)
	if len(s.line) >= s.maxWaiting {
		return &LineFullError{Waiting: len(s.line), RetryAfter: time.Second}
	}
	s.remove(t, s.entries[r.ID])
	s.line = append(s.line, &waiter{r: r, c: c, choose: choose, entered: t})
	return nil
}

// Refresh replaces the candidates of a request that waits, for fresher overlap
// and loads. Others are ignored.
func (s *Scheduler) Refresh(now time.Time, id string, c []Candidate) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.clock(now)
	for _, x := range s.line {
		if x.r.ID == id {
			x.c = c
		}
	}
}

// Leave takes a request out of the line: it was cancelled, or has waited too
// long. Others are ignored.
func (s *Scheduler) Leave(now time.Time, id string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.clock(now)
	s.leave(id)
}

func (s *Scheduler) leave(id string) {
	for i, x := range s.line {
		if x.r.ID == id {
			s.line = append(s.line[:i], s.line[i+1:]...)
			return
		}
	}
}

// Sample brings a worker's newest gauges without a request. Age counts from now.
func (s *Scheduler) Sample(now time.Time, worker string, l Load) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.clock(now)
	for _, x := range s.line {
		for i := range x.c {
			if x.c[i].Worker == worker {
				x.c[i].Load = l
			}
		}
	}
}

// Pass dispatches all requests that can go now and books them.
func (s *Scheduler) Pass(now time.Time) []Dispatch {
	s.mu.Lock()
	defer s.mu.Unlock()
	t := s.clock(now)
	s.expire(t)
	var out []Dispatch
	for _, x := range s.line {
		out = append(out, Dispatch{ID: x.r.ID, Decision: s.decide(t, &x.r, x.c, x.choose), Waited: s.duration(t - x.entered), Held: x.hold})
	}
	s.line = s.line[:0]
	return out
}

// Wake is when a Pass may find something to dispatch though nothing has
// happened; ok is false when nothing waits.
func (s *Scheduler) Wake(now time.Time) (at time.Time, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.line) == 0 {
		return time.Time{}, false
	}
	return now, true
}

// Line returns who waits, in the order in which they go.
func (s *Scheduler) Line(now time.Time) []Waiting {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.clock(now)
	out := make([]Waiting, 0, len(s.line))
	for i, x := range s.line {
		out = append(out, Waiting{ID: x.r.ID, Tenant: x.r.Tenant, Model: x.r.Model, QoS: x.r.QoS, Since: s.time(x.entered), Place: i, Hold: x.hold})
	}
	return out
}
