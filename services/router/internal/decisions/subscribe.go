package decisions

import (
	"context"
	"slices"
	"strings"

	adminv1 "github.com/kinference/kinference/proto/gen/kinference/admin/v1"
)

const (
	// maxSubscriptions bounds the readers at one time, and maxPending the records
	// that wait for one of them; the others it misses. Together they hold no more
	// than the log itself does by default.
	maxSubscriptions = 32
	maxPending       = 64
)

// Filter says which records somebody wants. Its zero value takes all when they
// are decided.
type Filter struct {
	Model, Tenant, Policy, Rule, Worker, Backend, Action string
	// ShadowDiffers: only those about which policies on dry run differ.
	ShadowDiffers bool
	// Finished: routed requests when they are over.
	Finished bool
}

func (f *Filter) takes(r *Record) bool {
	policyName, rule := "", ""
	if v := r.Verdict; v != nil {
		if i := strings.LastIndexByte(v.Rule, '/'); i >= 0 {
			policyName, rule = v.Rule[:i], v.Rule[i+1:]
		}
	}
	switch {
	case f.Model != "" && f.Model != r.Model,
		f.Tenant != "" && !named(r.Tenant, f.Tenant) && !slices.ContainsFunc(r.Request.GetTenants(), func(t string) bool { return named(t, f.Tenant) }),
		f.Policy != "" && !named(policyName, f.Policy),
		f.Rule != "" && rule != f.Rule,
		f.Worker != "" && !serves(r.Chosen, f.Worker) && !serves(r.servedBy, f.Worker),
		f.Backend != "" && !r.from(r.Chosen, f.Backend) && !r.from(r.servedBy, f.Backend),
		f.Action != "" && r.action() != f.Action,
		f.ShadowDiffers && !r.shadowDiffers():
		return false
	}
	return true
}

// named tells whether a name, which may be namespace/name, is what is asked for.
func named(name, want string) bool {
	return name == want || !strings.Contains(want, "/") && strings.HasSuffix(name, "/"+want)
}

// serves tells whether an endpoint is the wanted one, or a rank of it.
func serves(id, want string) bool {
	return id != "" && (id == want || strings.HasPrefix(id, want) && id[len(want)] == '/')
}

// from tells whether an endpoint belongs to a worker set or provider.
func (r *Record) from(id, backend string) bool {
	if id == "" {
		return false
	}
	if name, ok := strings.CutPrefix(id, "provider "); ok {
		return name == backend
	}
	for i := range r.Candidates {
		if c := &r.Candidates[i]; c.Worker == id && strings.HasPrefix(c.Profile, backend+"/") {
			return true
		}
	}
	return false
}

// action is what was done.
func (r *Record) action() string {
	switch {
	case r.Verdict != nil:
		return r.Verdict.Action
	case r.Chosen != "":
		return "route"
	}
	return "unavailable"
}

func (r *Record) shadowDiffers() bool {
	a, b := r.Verdict, r.Shadow
	return b != nil && (a.GetAction() != b.Action || a.GetChosen() != b.Chosen || a.GetRule() != b.Rule)
}

// Subscription delivers records. Use Log.Subscribe, and Close it.
type Subscription struct {
	log    *Log
	filter Filter
	kept   []*Record // what was there before
	ch     chan *Record
	missed uint64 // guarded by log.mu
}

// Subscribe delivers records that pass the filter: first at most recent of those
// that are kept, the newest of them in the order of their decision, then new ones.
// It reports false when there are too many subscriptions.
func (l *Log) Subscribe(f Filter, recent int) (*Subscription, bool) {
	s := &Subscription{log: l, filter: f, ch: make(chan *Record, maxPending)}
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.subs) >= maxSubscriptions {
		return nil, false
	}
	for i := range l.ring {
		if len(s.kept) == recent {
			break
		}
		r := l.ring[(l.next-1-i+2*len(l.ring))%len(l.ring)]
		if r == nil {
			break
		}
		if (!f.Finished || !r.ended.IsZero() || r.Chosen == "") && f.takes(r) {
			s.kept = append(s.kept, r)
		}
	}
	slices.Reverse(s.kept)
	l.subs[s] = true
	return s, true
}

// Close ends the subscription.
func (s *Subscription) Close() {
	s.log.mu.Lock()
	defer s.log.mu.Unlock()
	delete(s.log.subs, s)
}

// Kept returns the next record that was there before the subscription; false when
// there is none left.
func (s *Subscription) Kept() (*adminv1.Decision, bool) {
	if len(s.kept) == 0 {
		return nil, false
	}
	r := s.kept[0]
	s.kept[0], s.kept = nil, s.kept[1:]
	own := s.log.copyOf(r)
	return own.Proto(), true
}

// Next waits for a new record. missed counts those that were left out since the
// last one because they were not read in time.
func (s *Subscription) Next(ctx context.Context) (d *adminv1.Decision, missed uint64, err error) {
	select {
	case <-ctx.Done():
		return nil, 0, ctx.Err()
	case r := <-s.ch:
		s.log.mu.Lock()
		own := *r
		missed, s.missed = s.missed, 0
		s.log.mu.Unlock()
		return own.Proto(), missed, nil
	}
}

// tell passes a record on when it is decided, and when nothing more will be heard
// of it. The lock is held.
func (l *Log) tell(r *Record, over bool) {
	for s := range l.subs {
		decided := r.ended.IsZero()
		if s.filter.Finished && !over || !s.filter.Finished && !decided || !s.filter.takes(r) {
			continue
		}
		select {
		case s.ch <- r:
		default:
			s.missed++
		}
	}
}
