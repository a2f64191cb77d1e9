// Package evaluate lists the endpoints that a request may be sent to, with what
// policies look at.
//
// It stands between the catalog and the policies: internal/plan finds out once
// per catalog what a model's requests have to do with, Endpoints lists for each
// request the workers and providers with their state. The package is pure and
// safe for concurrent use: state comes as an argument.
package evaluate

import (
	"slices"
	"strconv"
	"time"

	"github.com/kinference/kinference/internal/plan"
	"github.com/kinference/kinference/internal/policy"
	"github.com/kinference/kinference/internal/resources"
	"github.com/kinference/kinference/internal/window"
	"github.com/kinference/kinference/services/router/internal/fleet"
)

// Request is what decides about candidates.
type Request struct {
	Model *plan.Model
	// Tokens is the prompt length for a profile; 0 when it is not known.
	Tokens func(profile string) int
	// Exclude holds workers and providers that have failed this request.
	Exclude []string
}

// States tells the state of a worker: *fleet.Table.
type States interface {
	Lookup(now time.Time, uid, id string) fleet.State
	Mean(id string, over time.Duration) (window.Load, bool)
}

// Providers tells whether a provider takes a request more; a reason if not.
type Providers interface {
	Full(now time.Time, p *resources.Provider) (why string)
}

// Endpoint is one worker under one profile, or a provider.
type Endpoint struct {
	ID      string // uid/rank, or plan.ProviderID
	Rank    int
	Worker  *resources.Worker
	Profile *resources.Profile
	// Provider is set instead of Worker and Profile.
	Provider *resources.ProviderModel
	Backend  *policy.Backend
	State    fleet.State
	// Dropped says why the endpoint is no candidate whatever the policies say;
	// empty when it is.
	Dropped string
	// Fresh says that the load in State counts.
	Fresh bool
	// Means are those over other windows than policy.DefaultWindow; nil where no
	// policy looks at any.
	Means *Means
	// TooLong is set when that is the length of the prompt.
	TooLong bool
}

// Endpoints returns all endpoints that the request could have to do with,
// candidates and dropped ones.
func Endpoints(now time.Time, r Request, states States, providers Providers) []Endpoint {
	n := 0
	for i := range r.Model.Targets {
		if p := r.Model.Targets[i].Profile; p != nil {
			n += len(p.Set.Workers) * p.Set.Ranks
		} else {
			n++
		}
	}
	out := make([]Endpoint, 0, n)
	for i := range r.Model.Targets {
		t := &r.Model.Targets[i]
		if t.Provider != nil {
			out = append(out, Endpoint{ID: plan.ProviderID(t.Provider.Provider.Name), Provider: t.Provider, Backend: t.Backend})
			continue
		}
		for i := range t.Profile.Set.Workers {
			w := &t.Profile.Set.Workers[i]
			for rank, id := range w.Ranks {
				out = append(out, Endpoint{ID: id, Rank: rank, Worker: w, Profile: t.Profile, Backend: t.Backend})
			}
		}
	}
	Update(now, r, out, states, providers)
	return out
}

// Update looks at endpoints of the request as they are now: their state, and whether
// they can take it. Workers that are only suspected of being gone can if no other
// worker can: a connection may end for less.
func Update(now time.Time, r Request, list []Endpoint, states States, providers Providers) {
	var profile *resources.Profile
	tokens, able := 0, false
	for i := range list {
		e := &list[i]
		e.Dropped, e.TooLong = "", false
		if e.Provider != nil {
			if e.Dropped = failed; !excluded(r.Exclude, e.ID, e.ID) {
				e.Dropped = providers.Full(now, e.Provider.Provider)
			}
			continue
		}
		if e.Profile != profile {
			profile = e.Profile
			tokens = r.Tokens(profile.ID)
		}
		w := e.Worker
		e.State = states.Lookup(now, w.UID, e.ID)
		e.measure(now, states, r.Model.Windows)
		most := profile.MaxModelLen
		if most == 0 {
			most = e.State.MaxModelLen(profile.UpstreamModel)
		}
		switch {
		case excluded(r.Exclude, e.ID, w.UID):
			e.Dropped = failed
		case w.NotReady:
			e.Dropped = "not ready: its Pod is not"
		case !e.State.Ready && !e.State.Suspect:
			e.Dropped = e.State.Why
		case most > 0 && tokens >= most: // there must be room for one token
			e.Dropped = "its context of " + strconv.Itoa(most) + " tokens is too short"
			e.TooLong = true
		case e.State.Suspect:
			e.Dropped = e.State.Why
		}
		able = able || e.Dropped == ""
	}
	for i := range list {
		if e := &list[i]; !able && e.Provider == nil && e.Dropped == e.State.Why && e.State.Suspect {
			e.Dropped = ""
		}
	}
}

const failed = "failed this request already"

func excluded(list []string, id, uid string) bool {
	for _, x := range list {
		if x == id || x == uid {
			return true
		}
	}
	return false
}

// fresh is how old the newest sample of a worker's load may be to count for a
// policy.
const fresh = 5 * time.Second

// Means are loads over windows.
type Means struct {
	Windows []time.Duration
	Loads   []window.Load
}

// measure takes the load as it is now: it must not change while rules are
// evaluated, or until it is recorded.
func (e *Endpoint) measure(now time.Time, states States, windows []time.Duration) {
	e.Fresh = !e.State.Sampled.IsZero() && now.Sub(e.State.Sampled) <= fresh
	if len(windows) == 0 || !e.Fresh {
		return
	}
	e.Means = &Means{windows, make([]window.Load, len(windows))}
	for i, over := range windows {
		mean, ok := states.Mean(e.ID, over)
		if !ok {
			mean = e.State.Mean30s // the history begins with the next sample
		}
		e.Means.Loads[i] = mean
	}
}

// Load is what policies may know of a worker's load; nil for a provider.
func (e *Endpoint) Load() policy.Load {
	if e.Worker == nil {
		return nil
	}
	return (*load)(e)
}

// load is an endpoint as policies ask for its load.
type load Endpoint

// Mean implements policy.Load.
func (l *load) Mean(m policy.Metric, over time.Duration) (float64, bool) {
	if !l.Fresh {
		return 0, false
	}
	mean := &l.State.Mean30s
	if l.Means != nil {
		if i := slices.Index(l.Means.Windows, over); i >= 0 {
			mean = &l.Means.Loads[i]
		}
	}
	return fleet.Value(m, mean), true
}

// Held implements policy.Memory.
func (l *load) Held(t policy.Threshold) bool { return slices.Contains(l.State.Held, t) }
