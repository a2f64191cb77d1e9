// Package decisions keeps the records of recent routing decisions, so that
// any of them can be explained later.
//
// The router adds a record per decision and completes it by the reports that
// follow. A Log holds a fixed number of records, and each the best candidates of
// its decision; the oldest makes room. It is safe for concurrent use.
package decisions

import (
	"slices"
	"sync"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/kinference/kinference/internal/schedule"
	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
)

// Record is one decision. It holds no prompt text.
type Record struct {
	RequestID, Model, Tenant, Pool string
	Decided                        time.Time
	CatalogVersion                 uint64
	Decision                       schedule.Decision
	Dropped                        []Dropped
	// Chosen is the worker or provider chosen first; empty if none was.
	Chosen string
	// Verdict is what the policies decided, and Shadow what they would have with
	// those on dry run; nil if there are none.
	Verdict, Shadow *routerv1.Verdict

	servedBy string
	ttft     time.Duration
	cached   int // -1: not reported
}

// Dropped is an endpoint that was no candidate.
type Dropped struct {
	Worker, Profile, Why string
}

// maxCandidates bounds the candidates and the dropped endpoints in a record: all
// of some hundred workers in each would take hundreds of megabytes.
const maxCandidates = 64

// trim lets the record go of all but the best candidates.
func (r *Record) trim() {
	if d := &r.Decision; len(d.Order) > maxCandidates {
		best, order := make([]schedule.Estimate, maxCandidates), make([]int, maxCandidates)
		for n := range best {
			best[n], order[n] = d.Estimates[d.Order[n]], n
		}
		d.Estimates, d.Order = best, order
	}
	if len(r.Dropped) > maxCandidates {
		r.Dropped = slices.Clone(r.Dropped[:maxCandidates])
	}
}

// Log is a ring of records. Use New.
type Log struct {
	mu   sync.Mutex
	ring []*Record
	next int
	byID map[string]*Record
}

// New returns a log of the newest size records; at least one.
func New(size int) *Log {
	return &Log{ring: make([]*Record, max(size, 1)), byID: map[string]*Record{}}
}

// Add enters a record; the log owns it from then on. A record of the same
// request is replaced.
func (l *Log) Add(r *Record) {
	r.cached = -1
	r.trim()
	r.servedBy = r.Chosen
	l.mu.Lock()
	defer l.mu.Unlock()
	if old := l.ring[l.next]; old != nil && l.byID[old.RequestID] == old {
		delete(l.byID, old.RequestID)
	}
	l.ring[l.next] = r
	l.next = (l.next + 1) % len(l.ring)
	l.byID[r.RequestID] = r
}

func (l *Log) change(id string, f func(*Record)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if r := l.byID[id]; r != nil {
		f(r)
	}
}

// Moved notes where a request went after a failure.
func (l *Log) Moved(id, worker string) { l.change(id, func(r *Record) { r.servedBy = worker }) }

// FirstToken notes the time to first token.
func (l *Log) FirstToken(id string, ttft time.Duration) {
	l.change(id, func(r *Record) { r.ttft = ttft })
}

// Done notes the tokens that the engine had cached; below 0 when it did not
// say.
func (l *Log) Done(id string, cached int) { l.change(id, func(r *Record) { r.cached = cached }) }

// ServedBy returns the worker that a request is at, by its record.
func (l *Log) ServedBy(id string) (worker string, ok bool) {
	l.change(id, func(r *Record) { worker, ok = r.servedBy, true })
	return worker, ok
}

// Explain returns the record of a request.
func (l *Log) Explain(id string) (*routerv1.Decision, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	r := l.byID[id]
	if r == nil {
		return nil, false
	}
	return r.proto(), true
}

func (r *Record) proto() *routerv1.Decision {
	d := &routerv1.Decision{
		RequestId: r.RequestID, Model: r.Model, Tenant: r.Tenant, Pool: r.Pool,
		DecidedUnixNanos: r.Decided.UnixNano(), CatalogVersion: r.CatalogVersion,
		Policy: r.Decision.Policy, Reason: r.Decision.Reason, ServedBy: r.servedBy,
		Chosen: r.Chosen, Verdict: r.Verdict, Shadow: r.Shadow,
	}
	for _, i := range r.Decision.Order {
		e := &r.Decision.Estimates[i]
		d.Candidates = append(d.Candidates, &routerv1.Candidate{
			Worker: e.Worker, Profile: e.Profile, PromptTokens: uint32(e.Tokens),
			MatchedTokens: uint32(e.Matched), AnticipatedTokens: uint32(e.Anticipated),
			PredictedTtft: durationpb.New(e.TTFT), PredictedWait: durationpb.New(e.Wait), PredictedPrefill: durationpb.New(e.Prefill),
			InFlight: uint32(e.InFlight), Running: e.Load.Running, Waiting: e.Load.Waiting, KvUsage: e.Load.KVUsage,
			SampleAge: durationpb.New(e.Load.Age),
		})
	}
	for _, x := range r.Dropped {
		d.Candidates = append(d.Candidates, &routerv1.Candidate{Worker: x.Worker, Profile: x.Profile, Dropped: x.Why})
	}
	if r.ttft > 0 {
		d.ActualTtft = durationpb.New(r.ttft)
	}
	if r.cached >= 0 {
		n := uint32(r.cached)
		d.ActualCachedTokens = &n
	}
	return d
}
