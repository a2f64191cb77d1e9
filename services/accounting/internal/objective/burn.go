package objective

import (
	"math"
	"time"
)

// Alert is how urgent an objective is.
type Alert int

// The alerts.
const (
	None   Alert = iota
	TooFew       // events to tell
	Ticket
	Page
)

// Tally is a number of requests.
type Tally struct{ Total, Good uint64 }

// bad is the share of those that did not keep the objective.
func (t Tally) bad() float64 {
	if t.Total == 0 {
		return 0
	}
	return float64(t.Total-t.Good) / float64(t.Total)
}

// Policy is one pair of windows: an alert when the budget burns faster than Factor
// in both.
type Policy struct {
	Long, Short time.Duration
	// Factor is the burn rate; 1 uses the budget up at the end of the window.
	Factor float64
	Alert  Alert
}

// Policies are the pairs for an objective. For 30 days they are those of Google's
// SRE workbook ("Alerting on SLOs", 2018): 2 % of the budget in an hour, 5 % in six
// hours, 10 % in a day and in three. For other windows the times shrink with the
// window, so that the same parts of the budget are meant.
func Policies(window time.Duration) []Policy {
	const month = 30 * 24 * time.Hour
	scale := min(float64(window)/float64(month), 1)
	at := func(d time.Duration) time.Duration {
		return max(time.Duration(float64(d)*scale).Round(time.Second), minWindow)
	}
	var out []Policy
	for _, p := range []Policy{
		{time.Hour, 5 * time.Minute, 14.4, Page},
		{6 * time.Hour, 30 * time.Minute, 6, Page},
		{24 * time.Hour, 2 * time.Hour, 3, Ticket},
		{72 * time.Hour, 6 * time.Hour, 1, Ticket},
	} {
		p.Long, p.Short = at(p.Long), at(p.Short)
		if len(out) > 0 && out[len(out)-1].Long == p.Long {
			continue // windows so short that the pairs are the same
		}
		out = append(out, p)
	}
	return out
}

// minWindow is the shortest time over which anything is counted.
const minWindow = 10 * time.Second

// Burn is how fast a budget burns by one policy.
type Burn struct {
	Policy
	LongRate, ShortRate float64
	// Events in the long window.
	Events uint64
	Firing bool
}

// State is how an objective stands.
type State struct {
	Objective Objective
	Tally
	// Attainment is the share of good requests, and BudgetLeft what is left of the
	// error budget; both are NaN without requests.
	Attainment, BudgetLeft float64
	Burns                  []Burn
	Alert                  Alert
}

// MinEvents is how many requests a window needs before it may alert: so many that
// at the policy's rate at least minBad of them would be bad. Else one failure of a
// small tenant would wake somebody.
func MinEvents(target, factor float64) uint64 {
	budget := (1 - target) * factor
	if budget <= 0 {
		return minBad
	}
	return uint64(math.Ceil(max(minBad/min(budget, 1), minBad)))
}

const minBad = 3

// judge computes the state from tallies over windows.
func judge(o *Objective, over func(time.Duration) Tally) State {
	s := State{Objective: *o, Tally: over(o.Window), Attainment: math.NaN(), BudgetLeft: math.NaN()}
	budget := 1 - o.Target
	if s.Total > 0 {
		s.Attainment = 1 - s.bad()
		s.BudgetLeft = 1 - rate(s.bad(), budget)
	}
	enough := false
	for _, p := range Policies(o.Window) {
		long, short := over(p.Long), over(p.Short)
		b := Burn{Policy: p, LongRate: rate(long.bad(), budget), ShortRate: rate(short.bad(), budget), Events: long.Total}
		if long.Total >= MinEvents(o.Target, p.Factor) {
			enough = enough || p.Factor*budget < 1 // else it can never fire
			b.Firing = b.LongRate > p.Factor && b.ShortRate > p.Factor
		}
		if b.Firing && p.Alert > s.Alert {
			s.Alert = p.Alert
		}
		s.Burns = append(s.Burns, b)
	}
	if !enough {
		s.Alert = TooFew
	}
	return s
}

// rate is how fast a budget burns. A target of 100 % has none: any bad request
// burns it as fast as can be said.
func rate(bad, budget float64) float64 {
	const most = 1e6
	if bad == 0 {
		return 0
	}
	if budget <= 0 {
		return most
	}
	return min(bad/budget, most)
}

// counts are those of one objective: in fine slices for as long as windows of
// alerts reach back, in coarse ones for the objective's own window.
type counts struct {
	o    Objective
	fine ring
	all  ring
}

// slices of a ring; a window is off by one of them at most.
const (
	fineSlices   = 2160
	coarseSlices = 720
)

func newCounts(o Objective) *counts {
	longest := minWindow
	for _, p := range Policies(o.Window) {
		longest = max(longest, p.Long)
	}
	return &counts{o: o, fine: newRing(longest, fineSlices), all: newRing(o.Window, coarseSlices)}
}

func (c *counts) add(at time.Time, good bool) {
	c.fine.add(at, good)
	c.all.add(at, good)
}

func (c *counts) state(o *Objective, now time.Time) State {
	return judge(o, func(d time.Duration) Tally {
		if d == o.Window {
			return c.all.over(now, d)
		}
		return c.fine.over(now, d)
	})
}

// ring holds tallies of slices of time; what is older than its length is
// overwritten.
type ring struct {
	step   time.Duration
	slices []slice
}

type slice struct {
	n int64 // number of the slice since 1970
	Tally
}

func newRing(length time.Duration, n int) ring {
	step := max(length/time.Duration(n), time.Second)
	return ring{step: step, slices: make([]slice, int(length/step)+2)}
}

func (r *ring) add(at time.Time, good bool) {
	n := at.UnixNano() / int64(r.step)
	if n < 0 {
		return
	}
	s := &r.slices[n%int64(len(r.slices))]
	if s.n > n {
		return // older than the ring is long
	}
	if s.n < n {
		*s = slice{n: n}
	}
	s.Total++
	if good {
		s.Good++
	}
}

// over sums up the time before now, to a slice.
func (r *ring) over(now time.Time, d time.Duration) (t Tally) {
	last := now.UnixNano() / int64(r.step)
	first := now.Add(-d).UnixNano()/int64(r.step) + 1
	for i := range r.slices {
		if s := &r.slices[i]; s.n >= first && s.n <= last {
			t.Total += s.Total
			t.Good += s.Good
		}
	}
	return t
}
