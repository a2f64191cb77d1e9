package schedule

import (
	"cmp"
	"slices"
)

// tenants are those that share the fleet by virtual time: what each got of it,
// in worker-seconds by weight. The one that got least goes first.
type tenants struct {
	known map[string]*tenant
	// floor is the virtual time of the tenant that was served last: who comes
	// back from a rest starts there, since nobody saves up.
	floor float64
}

type tenant struct {
	name    string
	vtc     float64
	weight  float64
	waiting int // requests in line
}

// maxTenants bounds tenants.known.
const maxTenants = 4096

func newTenants() tenants { return tenants{known: map[string]*tenant{}} }

// of is a tenant by name, with its newest weight.
func (ts *tenants) of(name string, weight float64) *tenant {
	x := ts.known[name]
	if x == nil {
		if len(ts.known) >= maxTenants {
			ts.prune()
		}
		x = &tenant{name: name}
		ts.known[name] = x
	}
	x.weight = weight
	if !(weight > 0) {
		x.weight = 1
	}
	return x
}

// join counts one more request in line for its tenant.
func (s *Scheduler) join(t float64, x *waiter) {
	x.tenant = s.tenants.of(x.r.Tenant, x.r.Weight)
	if x.tenant.waiting == 0 {
		x.tenant.vtc = max(x.tenant.vtc, s.least(t, x))
	}
	x.tenant.waiting++
}

// least is the virtual time at which the tenant of a waiter begins that was away: that
// of the one that got least of those it competes with. Who waits for other workers, or
// as batch work behind it, may have got nothing for long: beginning there, a newcomer
// would be served alone until it had got as much as all others.
func (s *Scheduler) least(t float64, x *waiter) float64 {
	least, found := 0.0, false
	for _, y := range s.waiters {
		if y.class(t) <= x.class(t) && y.group() != nil && y.group() == x.group() && (!found || y.tenant.vtc < least) {
			least, found = y.tenant.vtc, true
		}
	}
	if !found {
		return s.tenants.floor
	}
	return least
}

// group is that of the workers that a request is for, by its first candidate: nearly
// all requests have those of one group. Nil without candidates.
func (x *waiter) group() *learned {
	if len(x.p) == 0 {
		return nil
	}
	return x.p[0].w.group
}

// contest is between requests of one class for the same workers.
type contest struct {
	group *learned
	rank  int
}

// contest is that of a waiter whose place was worked out.
func (x *waiter) contest() contest { return contest{x.group(), x.rank} }

func (ts *tenants) leave(x *tenant) { x.waiting-- }

// charge adds the worker-seconds that a request of the tenant will take.
func (ts *tenants) charge(x *tenant, seconds float64) {
	ts.floor = max(ts.floor, x.vtc)
	x.vtc += seconds / x.weight
}

// prune forgets the tenants that do not wait and got little: they would begin
// at the floor anyhow. Where there are none, the one that got least goes.
func (ts *tenants) prune() {
	var least *tenant
	for name, x := range ts.known {
		switch {
		case x.waiting > 0:
		case x.vtc <= ts.floor:
			delete(ts.known, name)
		case least == nil || cmp.Or(cmp.Compare(x.vtc, least.vtc), cmp.Compare(name, least.name)) < 0:
			least = x
		}
	}
	if len(ts.known) >= maxTenants && least != nil {
		delete(ts.known, least.name)
	}
}

// class is the rank of a class of service. Batch work that has waited for very
// long joins the interactive: it must not starve.
func (x *waiter) class(t float64) int {
	switch x.r.QoS {
	case Batch:
		if t-x.entered < batchLimit {
			return 1
		}
	case Deferrable:
		if t-x.entered < deferLimit {
			return 2
		}
	}
	return 0
}

// Ages in seconds from which batch and deferrable requests count as interactive.
const (
	batchLimit = 600
	deferLimit = 3600
)

// place works out a waiter's place in the order.
func (s *Scheduler) place(t float64, x *waiter) {
	weight := float64(order)
	if x.r.Objective == Throughput {
		weight = orderThroughput
	}
	x.key, x.rank = x.entered+weight*x.work, x.class(t)
}

// sorted is the line in the order in which it goes: by class, then the tenant
// that got least, then the time of arrival, later by what the prefill takes.
func (s *Scheduler) sorted(t float64) []*waiter {
	out := slices.Clone(s.waiters)
	for _, x := range out {
		s.place(t, x)
	}
	slices.SortFunc(out, compare)
	return out
}

// compare orders two waiters whose places were worked out.
func compare(a, b *waiter) int {
	if d := a.rank - b.rank; d != 0 {
		return d
	}
	if a.tenant != b.tenant {
		if d := cmp.Compare(a.tenant.vtc, b.tenant.vtc); d != 0 {
			return d
		}
	}
	if d := cmp.Compare(a.key, b.key); d != 0 {
		return d
	}
	return cmp.Compare(a.seq, b.seq)
}
