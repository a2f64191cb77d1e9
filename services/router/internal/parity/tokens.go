// Package parity tells whether what is predicted agrees with what the engines do.
//
// Tokens merges what the ingresses found about token ids. Cached compares the
// cached tokens that engines report with those that the index promised, so that
// an index that is blind or wrong is noticed and the router's own memory stands
// in for it until it is right again.
//
// The router tells both of what ingresses report and asks Cached in every
// decision. Both are bounded, safe for concurrent use, and take the time as an
// argument. What they do not know counts as unchecked, never as a fault.
package parity

import (
	"sync"
	"time"

	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
)

// Short names of the states.
const (
	unknown = routerv1.ParityState_PARITY_STATE_UNSPECIFIED
	agrees  = routerv1.ParityState_PARITY_STATE_AGREES
	differs = routerv1.ParityState_PARITY_STATE_DIFFERS
)

const (
	// life is how long the word of an ingress counts: it repeats it every half
	// minute.
	life = 2 * time.Minute
	// maxIngresses, maxVerdicts of each and maxTotal of all bound what is kept, to
	// some 60 MB.
	maxIngresses = 256
	maxVerdicts  = 20_000
	maxTotal     = 400_000
	// maxName bounds the names in a report, in bytes.
	maxName = 1024
)

// Verdict is what is known of one subject.
type Verdict struct {
	State   routerv1.ParityState
	Cause   routerv1.ParityCause
	Checked time.Time // zero: never
}

// Tokens holds the newest report of each ingress. The zero value is ready.
type Tokens struct {
	mu      sync.Mutex
	reports map[string]*report
}

type report struct {
	at                time.Time
	profiles, workers map[string]Verdict
}

// Take enters a report in place of the former one of the same ingress. It
// reports whether a verdict is another one than before.
func (t *Tokens) Take(now time.Time, in *routerv1.ParityReport) (changed bool) {
	if len(in.GetIngress()) > maxName {
		return false
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.reports == nil {
		t.reports = map[string]*report{}
	}
	old := t.reports[in.GetIngress()]
	if old == nil {
		old = &report{}
		t.drop(now)
	}
	room := maxTotal + old.size()
	for _, x := range t.reports {
		room -= x.size()
	}
	r := read(now, in.GetVerdicts()[:min(len(in.GetVerdicts()), maxVerdicts, max(room, 0))])
	t.reports[in.GetIngress()] = r
	return !same(old.profiles, r.profiles) || !same(old.workers, r.workers)
}

func (r *report) size() int { return len(r.profiles) + len(r.workers) }

// read takes over verdicts, those that differ first: what is cut off agrees.
func read(now time.Time, verdicts []*routerv1.Parity) *report {
	r := &report{at: now, profiles: map[string]Verdict{}, workers: map[string]Verdict{}}
	for _, v := range verdicts {
		verdict := Verdict{State: v.GetState(), Cause: v.GetCause()}
		if n := v.GetCheckedUnixNanos(); n > 0 {
			verdict.Checked = time.Unix(0, n)
		}
		switch {
		case len(v.GetProfile()) > maxName || len(v.GetWorker()) > maxName:
		case v.GetProfile() != "":
			r.profiles[v.GetProfile()] = verdict
		case v.GetWorker() != "":
			r.workers[v.GetWorker()] = verdict
		}
	}
	return r
}

// drop forgets the ingresses that are gone, and makes room for one more. The
// lock is held.
func (t *Tokens) drop(now time.Time) {
	oldest := ""
	for name, r := range t.reports {
		if now.Sub(r.at) > life {
			delete(t.reports, name)
		} else if oldest == "" || r.at.Before(t.reports[oldest].at) {
			oldest = name
		}
	}
	if len(t.reports) >= maxIngresses {
		delete(t.reports, oldest)
	}
}

func same(a, b map[string]Verdict) bool {
	if len(a) != len(b) {
		return false
	}
	for k, v := range a {
		if w, ok := b[k]; !ok || v.State != w.State || v.Cause != w.Cause {
			return false
		}
	}
	return true
}

// Worker returns the verdict on an engine, by its uid: that it differs, if any
// ingress says so.
func (t *Tokens) Worker(now time.Time, uid string) Verdict {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.worst(now, func(r *report) Verdict { return r.workers[uid] })
}

// Profile returns the verdict on a profile: that its tokenizer is not in use, if
// any ingress says so, else what is known of the engines of its set.
func (t *Tokens) Profile(now time.Time, id string, uids []string) Verdict {
	t.mu.Lock()
	defer t.mu.Unlock()
	v := t.worst(now, func(r *report) Verdict { return r.profiles[id] })
	for _, uid := range uids {
		if v.State != unknown {
			break
		}
		if w := t.worst(now, func(r *report) Verdict { return r.workers[uid] }); w.State == agrees {
			v = w
		}
	}
	return v
}

// worst merges the word of all ingresses. The lock is held.
func (t *Tokens) worst(now time.Time, of func(*report) Verdict) (out Verdict) {
	for _, r := range t.reports {
		v := of(r)
		if now.Sub(r.at) > life || v.State == unknown {
			continue
		}
		if v.State > out.State || v.State == out.State && v.Checked.After(out.Checked) {
			out = v
		}
	}
	return out
}
