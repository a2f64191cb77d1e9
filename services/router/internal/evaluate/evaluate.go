// Package evaluate selects the endpoints that may serve a request.
//
// It stands between the catalog and the scheduler: today every worker of
// every pool that offers the model is a candidate; the policy language (rules
// with consider, exclude and select) will be evaluated here. The package is
// pure and safe for concurrent use: state comes as an argument.
package evaluate

import (
	"strconv"
	"time"

	"github.com/kinference/kinference/internal/resources"
	"github.com/kinference/kinference/services/router/internal/fleet"
)

// Request is what decides about candidates.
type Request struct {
	Model *resources.Model
	// Tokens is the prompt length for a profile; 0 when it is not known.
	Tokens func(profile string) int
	// Exclude holds workers that have failed this request.
	Exclude []string
}

// States tells the state of a worker: *fleet.Table.
type States interface {
	Lookup(now time.Time, uid, id string) fleet.State
}

// Endpoint is one worker under one profile.
type Endpoint struct {
	ID      string // uid/rank
	Rank    int
	Worker  *resources.Worker
	Profile *resources.Profile
	Pool    *resources.Pool
	State   fleet.State
	// Dropped says why the endpoint is no candidate; empty when it is.
	Dropped string
	// TooLong is set when that is the length of the prompt.
	TooLong bool
}

// Endpoints returns all endpoints of the model, candidates and dropped ones.
// An endpoint that several pools offer stands under the first of them.
func Endpoints(now time.Time, r Request, states States) []Endpoint {
	var out []Endpoint
	seen := map[*resources.Profile]bool{}
	for _, offer := range r.Model.Offers {
		p := offer.Profile
		if seen[p] {
			continue
		}
		seen[p] = true
		tokens := r.Tokens(p.ID)
		limit := p.MaxModelLen
		for i := range p.Set.Workers {
			w := &p.Set.Workers[i]
			for rank, id := range w.Ranks {
				e := Endpoint{ID: id, Rank: rank, Worker: w, Profile: p, Pool: offer.Pool}
				e.State = states.Lookup(now, w.UID, e.ID)
				most := limit
				if most == 0 {
					most = e.State.MaxModelLen(p.UpstreamModel)
				}
				switch {
				case excluded(r.Exclude, e.ID, w.UID):
					e.Dropped = "failed this request already"
				case !e.State.Ready:
					e.Dropped = e.State.Why
				case most > 0 && tokens >= most: // there must be room for one token
					e.Dropped = "its context of " + strconv.Itoa(most) + " tokens is too short"
					e.TooLong = true
				}
				out = append(out, e)
			}
		}
	}
	return out
}

func excluded(list []string, id, uid string) bool {
	for _, x := range list {
		if x == id || x == uid {
			return true
		}
	}
	return false
}
