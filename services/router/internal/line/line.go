// Package line lets requests wait in the router until the worker that is best for
// them can begin.
//
// An engine serves its queue as it comes: what was sent there cannot be called
// back when another worker is free sooner, or when somebody else's turn it is. So
// requests wait here, and internal/schedule says in which order they go, where and
// when (late binding). It is pure; this package gives it the clock, the events and
// the callers that wait.
//
// Route calls Wait. One goroutine, Run, drives passes over those that wait: when
// something happened (Kick), when gauges arrive (Sample), and when the scheduler
// asked to be woken. A request leaves at once when its caller's context ends. The
// line is bounded by requests, by bytes, and by the wait that is predicted and
// that came about; who is over a bound is told when to come back. When Run ends,
// all that wait are sent away. A Line is safe for concurrent use.
package line

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kinference/kinference/internal/schedule"
)

const (
	// again is the least time between two looks at the overlap of one that waits,
	// and each asks the trackers not more often than everyEach times the length of
	// the line: 500 looks a second in all.
	again     = 250 * time.Millisecond
	everyEach = 2 * time.Millisecond
	// soonest is the least time until the next pass without an event.
	soonest = time.Millisecond
	// maxRetry bounds what is told of when to come back.
	maxRetry = 5 * time.Minute
)

// Why a request was sent away.
const (
	Full    = "full"    // too many wait
	Bytes   = "bytes"   // their hashes take too much memory
	TooLong = "long"    // the wait is predicted to be too long
	Timeout = "timeout" // it was
	Stopped = "stopped" // the router stops
)

// Refusal is the answer to a request that may not wait, or not any longer.
type Refusal struct {
	// Reason is one of the constants.
	Reason string
	// RetryAfter is when it may come back.
	RetryAfter time.Duration
	// Waiting is the length of the line.
	Waiting int
}

// Error says why.
func (r *Refusal) Error() string {
	switch r.Reason {
	case Full, Bytes:
		return fmt.Sprintf("the line is full with %d requests", r.Waiting)
	case TooLong:
		return fmt.Sprintf("it would wait too long in a line of %d requests", r.Waiting)
	case Stopped:
		return "the router stops"
	}
	return fmt.Sprintf("it has waited too long in a line of %d requests", r.Waiting)
}

// Scheduler decides who goes where and when: *schedule.Scheduler.
type Scheduler interface {
	Enter(now time.Time, r schedule.Request, c []schedule.Candidate, choose schedule.Choose) error
	Refresh(now time.Time, id string, c []schedule.Candidate, choose schedule.Choose)
	Leave(now time.Time, id string)
	Sample(now time.Time, worker string, l schedule.Load)
	Pass(now time.Time) []schedule.Dispatch
	Wake(now time.Time) (time.Time, bool)
	Line(now time.Time) []schedule.Waiting
	Drop(now time.Time, id string)
}

// Settings of a Line. Functions may be nil.
type Settings struct {
	// Now is the clock; nil: time.Now.
	Now func() time.Time
	// MaxBytes bounds the sum of Ask.Bytes.
	MaxBytes int64
	// MaxWait bounds the time in line; 0: no bound.
	MaxWait time.Duration
	// Left is told of each request that leaves: of which class, how (Dispatched, Left
	// or a refusal's reason), and what held it last.
	Left func(qos schedule.QoS, how string, held schedule.Hold, waited time.Duration)
}

// How a request left, when not by a refusal.
const (
	Dispatched = "dispatched"
	Canceled   = "canceled"
)

// Ask is a request that wants a worker.
type Ask struct {
	// Request must have an ID.
	Request schedule.Request
	// Bytes that it takes while it waits.
	Bytes int64
	// Look finds out what could serve it now. It may take a while; it is called
	// without a lock, not twice at a time, and may return after Wait has. use says
	// that from now on Choose is about these candidates. Choose and uses are called
	// one after the other, also by other goroutines, but not after Wait has returned.
	Look   func() (c []schedule.Candidate, use func())
	Choose schedule.Choose
	// Stays tells whether what Choose decided last was to let it wait for an endpoint,
	// and how long in all; else MaxWait holds.
	Stays func() (time.Duration, bool)
}

// Line is those that wait. Use New.
type Line struct {
	Settings
	scheduler Scheduler
	kick      chan struct{}
	n         atomic.Int64

	// mu is held around every call of the scheduler that calls Choose: what a
	// Choose is about does not change meanwhile.
	mu      sync.Mutex
	stopped bool
	waiters map[string]*waiter // by the id in the scheduler
	bytes   int64
	serial  int
	// What outlook has found, and when.
	forecast time.Duration
	foreseen time.Time
}

// waiter is one that waits.
type waiter struct {
	*Ask
	id      string // in the scheduler
	entered time.Time
	turn    chan schedule.Dispatch // gets one; closed without when the line stops
	left    bool
}

// New returns an empty line of a scheduler, whose other users call Kick.
func New(s Scheduler, set Settings) *Line {
	if set.Now == nil {
		set.Now = time.Now
	}
	if set.Left == nil {
		set.Left = func(schedule.QoS, string, schedule.Hold, time.Duration) {}
	}
	return &Line{Settings: set, scheduler: s, kick: make(chan struct{}, 1), waiters: map[string]*waiter{}}
}

// Len is how many wait.
func (l *Line) Len() int { return int(l.n.Load()) }

// Kick says that something has happened which may let somebody go.
func (l *Line) Kick() {
	if l.n.Load() == 0 {
		return
	}
	select {
	case l.kick <- struct{}{}:
	default:
	}
}

// Classes counts those that wait by class.
func (l *Line) Classes() map[schedule.QoS]int {
	out := map[schedule.QoS]int{schedule.Interactive: 0, schedule.Batch: 0, schedule.Deferrable: 0}
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, w := range l.waiters {
		out[class(w.Request.QoS)]++
	}
	return out
}

// class is one of the three.
func class(q schedule.QoS) schedule.QoS {
	switch q {
	case schedule.Batch, schedule.Deferrable:
		return q
	}
	return schedule.Interactive
}

// List returns who waits, in the order in which they go.
func (l *Line) List() []schedule.Waiting {
	l.mu.Lock()
	defer l.mu.Unlock()
	list := l.scheduler.Line(l.Now())
	for i := range list {
		x := &list[i]
		x.QoS = class(x.QoS)
		if w := l.waiters[x.ID]; w != nil {
			if _, stays := w.Stays(); stays {
				x.Why = Policy
			}
			x.ID = w.Request.ID
		}
	}
	return list
}

// Policy is why those wait whose policies let them.
const Policy schedule.Hold = "policy"

// Sample brings new gauges of a worker to those that wait. Kick follows when all
// have been brought.
func (l *Line) Sample(now time.Time, worker string, load schedule.Load) {
	if l.n.Load() > 0 {
		l.scheduler.Sample(now, worker, load)
	}
}

// Run drives passes until ctx ends; then nobody may wait any more.
func (l *Line) Run(ctx context.Context) error {
	timer, rest := time.NewTimer(time.Hour), time.NewTimer(time.Hour)
	defer timer.Stop()
	defer rest.Stop()
	for {
		select {
		case <-ctx.Done():
			l.stop()
			return nil
		case <-l.kick:
		case <-timer.C:
		}
		l.mu.Lock()
		now := l.Now()
		l.pass(now)
		next, took := l.next(now), l.Now().Sub(now)
		l.mu.Unlock()
		// A line of thousands takes a while to look through: events that come faster
		// than that are looked at together, in half of the time at most.
		if took > soonest {
			rest.Reset(min(took, again))
			select {
			case <-ctx.Done():
			case <-rest.C:
			}
		}
		timer.Reset(next)
	}
}

// next is the time until the pass after this one. The caller holds mu.
func (l *Line) next(now time.Time) time.Duration {
	if at, ok := l.scheduler.Wake(now); ok {
		return max(at.Sub(now), soonest)
	}
	return time.Hour
}

// pass lets those go whose turn it is. The caller holds mu.
func (l *Line) pass(now time.Time) {
	for _, d := range l.scheduler.Pass(now) {
		w := l.waiters[d.ID]
		if w == nil { // cannot be: who leaves has left the scheduler's line
			l.scheduler.Drop(now, d.ID)
			continue
		}
		if w.id != w.Request.ID {
			// Another one under this id was here first; reports are about that one.
			// The engine's gauges will show this one.
			l.scheduler.Drop(now, w.id)
		}
		l.forget(w)
		w.turn <- d
	}
}

// forget takes one off the books. The caller holds mu and has seen to it that it is
// not in the scheduler's line.
func (l *Line) forget(w *waiter) {
	delete(l.waiters, w.id)
	l.bytes -= w.Bytes
	l.n.Store(int64(len(l.waiters)))
	w.left = true
}

// Wait waits until it is the request's turn. The error is a *Refusal, or that of the
// context; nothing is booked then.
func (l *Line) Wait(ctx context.Context, a *Ask) (schedule.Dispatch, error) {
	first := look(a)
	if err := ctx.Err(); err != nil {
		return schedule.Dispatch{}, err
	}
	w, err := l.enter(a, first)
	if err != nil {
		return schedule.Dispatch{}, err
	}
	select { // nothing holds it, as is usual
	case t, ok := <-w.turn:
		return l.went(w, t, ok)
	default:
	}
	again, end := time.NewTimer(l.interval()), time.NewTimer(l.remaining(w))
	defer again.Stop()
	defer end.Stop()
	fresh := make(chan found, 1)
	for {
		select {
		case t, ok := <-w.turn:
			return l.went(w, t, ok)
		case <-ctx.Done():
			l.leave(w)
			return schedule.Dispatch{}, ctx.Err()
		case <-end.C:
			if left := l.remaining(w); left > 0 {
				end.Reset(left)
			} else if r := l.expire(w); r != nil {
				return schedule.Dispatch{}, r
			}
		case <-again.C:
			go func() { fresh <- look(a) }()
		case f := <-fresh:
			l.use(w, f)
			again.Reset(l.interval())
			end.Reset(l.remaining(w)) // policies may see it otherwise now
		}
	}
}

// found is what a Look has found.
type found struct {
	c   []schedule.Candidate
	use func()
}

func look(a *Ask) found {
	c, use := a.Look()
	return found{c, use}
}

// went is the end of a wait; ok is false if the line stopped.
func (l *Line) went(w *waiter, d schedule.Dispatch, ok bool) (schedule.Dispatch, error) {
	if !ok {
		l.Left(class(w.Request.QoS), Stopped, schedule.HoldNone, l.Now().Sub(w.entered))
		return d, &Refusal{Reason: Stopped, RetryAfter: time.Second}
	}
	l.Left(class(w.Request.QoS), Dispatched, d.Why, d.Waited)
	return d, nil
}

// enter takes a request in, and lets it go at once if nobody else waits.
func (l *Line) enter(a *Ask, f found) (*waiter, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	now := l.Now()
	refuse := func(reason string, after time.Duration) (*waiter, error) {
		l.Left(class(a.Request.QoS), reason, schedule.HoldNone, 0)
		return nil, &Refusal{Reason: reason, RetryAfter: min(max(after, time.Second), maxRetry), Waiting: len(l.waiters)}
	}
	f.use() // also of who is refused: what follows goes by it
	switch {
	case l.stopped:
		return refuse(Stopped, time.Second)
	case a.Bytes > 0 && l.bytes > 0 && l.bytes+a.Bytes > l.MaxBytes:
		return refuse(Bytes, l.outlook(now))
	}
	w := &waiter{Ask: a, id: a.Request.ID, entered: now, turn: make(chan schedule.Dispatch, 1)}
	if l.waiters[w.id] != nil {
		// Clients may choose ids. Who comes under one that waits must not end that
		// one's wait, nor take its place.
		l.serial++
		w.id = fmt.Sprintf("%s #%d", w.id, l.serial)
	}
	r := a.Request
	r.ID = w.id
	if err := l.scheduler.Enter(now, r, f.c, a.Choose); err != nil {
		var full *schedule.LineFullError
		switch {
		case !errors.As(err, &full):
			return nil, err
		case full.Wait > 0:
			return refuse(TooLong, full.RetryAfter)
		}
		return refuse(Full, full.RetryAfter)
	}
	l.waiters[w.id] = w
	l.bytes += a.Bytes
	l.n.Store(int64(len(l.waiters)))
	if len(l.waiters) == 1 {
		l.pass(now) // without a line there is nobody to be fair to
	}
	if !w.left {
		l.Kick()
	}
	return w, nil
}

// use gives one that waits what its Look has found.
func (l *Line) use(w *waiter, f found) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if w.left {
		return
	}
	f.use()
	l.scheduler.Refresh(l.Now(), w.id, f.c, nil)
	l.Kick()
}

// leave takes out one whose caller has left. If its turn came that moment, what was
// booked is given back.
func (l *Line) leave(w *waiter) {
	l.mu.Lock()
	defer l.mu.Unlock()
	now := l.Now()
	if w.left {
		l.scheduler.Drop(now, w.id)
	} else {
		l.scheduler.Leave(now, w.id)
		l.forget(w)
	}
	l.Left(class(w.Request.QoS), Canceled, schedule.HoldNone, now.Sub(w.entered))
	l.Kick()
}

// remaining is how long one may wait yet.
func (l *Line) remaining(w *waiter) time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	limit := l.MaxWait
	if !w.left {
		if wait, stays := w.Stays(); stays {
			limit = wait
		}
	}
	if limit <= 0 {
		return time.Hour
	}
	return w.entered.Add(limit).Sub(l.Now())
}

// expire takes out one that has waited too long; nil if its turn has come.
func (l *Line) expire(w *waiter) *Refusal {
	l.mu.Lock()
	defer l.mu.Unlock()
	if w.left {
		return nil
	}
	now := l.Now()
	r := &Refusal{Reason: Timeout, RetryAfter: l.outlook(now), Waiting: len(l.waiters)}
	l.scheduler.Leave(now, w.id)
	l.forget(w)
	l.Left(class(w.Request.QoS), Timeout, schedule.HoldNone, now.Sub(w.entered))
	l.Kick()
	return r
}

// outlook is about when there is a place: the median of what those that wait are
// predicted to wait, looked up once a second at most. The caller holds mu.
func (l *Line) outlook(now time.Time) time.Duration {
	if now.Sub(l.foreseen) < time.Second && l.forecast > 0 {
		return l.forecast
	}
	var waits []time.Duration
	for _, w := range l.scheduler.Line(now) {
		waits = append(waits, w.Wait)
	}
	slices.Sort(waits)
	l.forecast, l.foreseen = time.Second, now
	if len(waits) > 0 {
		l.forecast = min(max(waits[len(waits)/2], time.Second), maxRetry)
	}
	return l.forecast
}

// interval is the time between two looks of one that waits.
func (l *Line) interval() time.Duration {
	return max(again, time.Duration(l.n.Load())*everyEach)
}

// stop sends all away.
func (l *Line) stop() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.stopped = true
	now := l.Now()
	for _, w := range l.waiters {
		l.scheduler.Leave(now, w.id)
		l.forget(w)
		close(w.turn)
	}
}
