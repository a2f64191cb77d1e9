// Package objective tells how far the objectives of pools and tenants are kept:
// attainment, the error budget that is left, and how fast it burns.
//
// accounting puts every usage event in once and asks at any time; Rules makes
// rules for Prometheus of the same objectives. The package has no clock and no
// I/O. A Board is safe for concurrent use. Its memory is bounded: a few kilobytes
// for each objective and day of its window. What cannot be judged, such as the
// time per token of an answer of one token, does not count.
package objective

import (
	"slices"
	"sync"
	"time"
)

// Objective is a promise about requests. The zero value of a selecting field
// selects all.
type Objective struct {
	// Kind is Pool or Tenant, and Owner the resource as namespace/name.
	Kind, Owner string
	Name        string
	Models      []string
	Tenants     []string // namespace/name
	QoS         []string
	Indicator   string
	Threshold   time.Duration // of all but Availability
	// Target is the share of requests, above 0 and up to 1.
	Target float64
	Window time.Duration
}

// The kinds of owners.
const (
	Pool   = "InferencePool"
	Tenant = "InferenceTenant"
)

// The indicators.
const (
	TTFT         = "TTFT"
	ITL          = "ITL"
	TPOT         = "TPOT"
	EndToEnd     = "EndToEnd"
	Availability = "Availability"
)

// ID is kind/namespace/owner/name, unique in a catalog.
func (o *Objective) ID() string { return o.Kind + "/" + o.Owner + "/" + o.Name }

// Outcome is how a request ended.
type Outcome int

// The outcomes.
const (
	OK       Outcome = iota
	Failed           // by the gateway or the backend
	Overload         // refused because there was no room: as bad as failed
	Quota            // refused because its tenant has used its share: its own doing
	Refused          // a fault of the client's
	Canceled         // the client left
)

// Event is what an objective looks at in a request. Times are below 0 if there
// was none.
type Event struct {
	Ended       time.Time
	Pool, Model string
	Tenants     []string // nearest first
	QoS         string
	Outcome     Outcome
	// Seconds.
	TTFT, ITL, TPOT, E2E float64
}

// applies reports whether o is about e.
func (o *Objective) applies(e *Event) bool {
	switch o.Kind {
	case Pool:
		if e.Pool != o.Owner {
			return false
		}
	case Tenant:
		if !slices.Contains(e.Tenants, o.Owner) { // those below it count too
			return false
		}
	default:
		return false
	}
	within := func(list []string, v string) bool { return len(list) == 0 || slices.Contains(list, v) }
	if len(o.Tenants) > 0 && !slices.ContainsFunc(e.Tenants, func(t string) bool { return slices.Contains(o.Tenants, t) }) {
		return false
	}
	return within(o.Models, e.Model) && within(o.QoS, e.QoS)
}

// Judge tells whether a request counts for the objective, and whether it kept it.
// The fault of a client and its own quota do not count; overload does. A client
// that left counts where the thing had happened by then.
func (o *Objective) Judge(e *Event) (counts, good bool) {
	if !o.applies(e) {
		return false, false
	}
	switch e.Outcome {
	case Quota, Refused:
		return false, false
	case Failed, Overload:
		return true, false
	case OK, Canceled:
	}
	if o.Indicator == Availability {
		return e.Outcome == OK, e.Outcome == OK
	}
	v := -1.0
	switch o.Indicator {
	case TTFT:
		v = e.TTFT
	case ITL:
		v = e.ITL
	case TPOT:
		v = e.TPOT
	case EndToEnd:
		if e.Outcome == OK {
			v = e.E2E
		}
	}
	return v >= 0, v >= 0 && v <= o.Threshold.Seconds()
}

// Board counts for a set of objectives. Make it with NewBoard.
type Board struct {
	mu     sync.Mutex
	list   []Objective
	counts map[string]*counts // by ID
}

// NewBoard returns a board without objectives.
func NewBoard() *Board { return &Board{counts: map[string]*counts{}} }

// Set replaces the objectives. Those that stay keep what was counted, and those
// that are new or changed are returned: they have no past yet, which Count gives
// them. The board keeps the slice.
func (b *Board) Set(list []Objective) (fresh []Objective) {
	b.mu.Lock()
	defer b.mu.Unlock()
	next := make(map[string]*counts, len(list))
	for i := range list {
		o := &list[i]
		c := b.counts[o.ID()]
		if c == nil || !same(&c.o, o) {
			c = newCounts(*o)
			fresh = append(fresh, *o)
		}
		next[o.ID()] = c
	}
	b.list, b.counts = list, next
	return fresh
}

func same(a, b *Objective) bool {
	return a.Indicator == b.Indicator && a.Threshold == b.Threshold && a.Window == b.Window && a.Target == b.Target &&
		slices.Equal(a.Models, b.Models) && slices.Equal(a.Tenants, b.Tenants) && slices.Equal(a.QoS, b.QoS)
}

// Empty reports that there are no objectives.
func (b *Board) Empty() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.list) == 0
}

// Judgement is how one request stands to one objective.
type Judgement struct {
	Objective *Objective
	Good      bool
}

// Count counts a request for the objectives that it is about. only, if given, are
// the ones that it is new to, by ID. Each request must come once.
func (b *Board) Count(e *Event, only map[string]bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, j := range b.judge(e) {
		if id := j.Objective.ID(); only == nil || only[id] {
			b.counts[id].add(e.Ended, j.Good)
		}
	}
}

// Judge tells how a request stands to the objectives that it is about, and counts
// nothing.
func (b *Board) Judge(e *Event) []Judgement {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.judge(e)
}

func (b *Board) judge(e *Event) (out []Judgement) {
	for i := range b.list {
		if counted, good := b.list[i].Judge(e); counted {
			out = append(out, Judgement{&b.list[i], good})
		}
	}
	return out
}

// States tells how all objectives stand.
func (b *Board) States(now time.Time) []State {
	b.mu.Lock()
	defer b.mu.Unlock()
	out := make([]State, 0, len(b.list))
	for i := range b.list {
		o := &b.list[i]
		out = append(out, b.counts[o.ID()].state(o, now))
	}
	return out
}
