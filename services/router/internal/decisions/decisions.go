// Package decisions keeps the records of recent routing decisions, so that
// any of them can be explained later, or decided anew under other policies.
//
// The router adds a record per decision and completes it by the reports that
// follow; the admin API reads them and subscribes to new ones. A Log holds a
// fixed number of records, and each the best candidates of its decision; the
// oldest makes room. It is safe for concurrent use, and readers, however
// slow, do not hold up decisions.
package decisions

import (
	"slices"
	"sync"
	"time"

	"github.com/kinference/kinference/internal/kvhash"
	"github.com/kinference/kinference/internal/policy"
	"github.com/kinference/kinference/internal/window"
	adminv1 "github.com/kinference/kinference/proto/gen/kinference/admin/v1"
	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
)

// MaxCandidates bounds the candidates and the dropped endpoints in a record: all
// of some hundred workers in each would take hundreds of megabytes.
const MaxCandidates = 64

// Record is one decision. It holds no prompt text.
type Record struct {
	RequestID, Model, Tenant, Pool string
	Decided                        time.Time
	// Waited is the time in line, Held what held it last there, and Ahead how many
	// were before it.
	Waited time.Duration
	Held   string
	// Refused is why the line did not take it, or not keep it.
	Refused        string
	Ahead          int
	CatalogVersion uint64
	// Policy is the scheduling policy, Reason says why the first is first.
	Policy, Reason string
	TimeScale      float64
	Request        *adminv1.RecordedRequest
	// Windows are those of Candidate.Means, Thresholds those that Candidate.Held may
	// have.
	Windows    []time.Duration
	Thresholds []policy.Threshold
	// Candidates are those in the order of preference, and then those that were
	// dropped.
	Candidates []Candidate
	// OmittedCandidates and OmittedDropped were left out of them.
	OmittedCandidates, OmittedDropped int
	// Chosen is the worker or provider chosen first; empty if none was.
	Chosen string
	// Verdict is what the policies decided, and Shadow what they would have with
	// those on dry run; nil if there are none.
	Verdict, Shadow *adminv1.Verdict

	servedBy string
	ttft     time.Duration
	ended    time.Time // zero: not reported
	outcome  routerv1.Outcome
	prompt   int // tokens as the engine said; -1: it did not
	cached   int
	output   int
}

// Candidate is an endpoint at the time of the decision.
type Candidate struct {
	Worker string
	// Profile is empty for a provider, UpstreamModel for a worker.
	Profile, UpstreamModel string
	// Unfit says why it could not take the request whatever the rules say.
	Unfit string
	// Verdict of the rule that decided; its zero value for those in the order.
	Verdict policy.Verdict
	// Ignored: a refusal does not look at endpoints.
	Ignored bool
	Labels  map[string]string
	// Predicted: the numbers below are known.
	Predicted                         bool
	Tokens, Matched, Anticipated      int32
	Cached, InFlight                  int32
	TTFT, Wait, Prefill, E2E          time.Duration
	Cost, Others, RecentWork, OwnWork float64
	Tie                               kvhash.Hash
	// What the scheduling policy k2 goes by beside: seconds of the scheduler's time
	// in Score, KV blocks needed and free, and what held the request.
	Interference, EvictionLoss time.Duration
	Score                      float64
	Pages, Free, Filled        int32
	Settles                    bool
	Hold                       string
	// Index in the list that the policies looked at.
	Index                     int32
	Sampled, Fresh            bool // the load is known, and counts
	Running, Waiting, KVUsage float64
	Age                       time.Duration
	Mean30s                   window.Load
	Means                     []window.Load
	Held                      []policy.Threshold
}

// Log is a ring of records. Use New.
type Log struct {
	mu   sync.Mutex
	ring []*Record
	next int
	byID map[string]*Record
	subs map[*Subscription]bool
}

// New returns a log of the newest size records; at least one.
func New(size int) *Log {
	return &Log{ring: make([]*Record, max(size, 1)), byID: map[string]*Record{}, subs: map[*Subscription]bool{}}
}

// Add enters a record; the log owns it from then on. A record of the same
// request is replaced.
func (l *Log) Add(r *Record) {
	r.prompt, r.cached, r.output = -1, -1, -1
	r.servedBy = r.Chosen
	l.mu.Lock()
	defer l.mu.Unlock()
	if old := l.ring[l.next]; old != nil && l.byID[old.RequestID] == old {
		delete(l.byID, old.RequestID)
	}
	l.ring[l.next] = r
	l.next = (l.next + 1) % len(l.ring)
	l.byID[r.RequestID] = r
	l.tell(r, r.Chosen == "")
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

// End is how a request ended. Tokens are as the engine reported, below 0 when it
// did not.
type End struct {
	At                     time.Time
	Outcome                routerv1.Outcome
	Prompt, Cached, Output int
}

// Done notes the end of a request.
func (l *Log) Done(id string, e End) {
	l.change(id, func(r *Record) {
		if !r.ended.IsZero() {
			return
		}
		r.ended, r.outcome, r.prompt, r.cached, r.output = e.At, e.Outcome, e.Prompt, e.Cached, e.Output
		l.tell(r, true)
	})
}

// Served returns the worker that a request is at, and the model that it asked for, by
// its record.
func (l *Log) Served(id string) (worker, model string, ok bool) {
	l.change(id, func(r *Record) { worker, model, ok = r.servedBy, r.Model, true })
	return worker, model, ok
}

// Explain returns the record of a request.
func (l *Log) Explain(id string) (*adminv1.Decision, bool) {
	var r Record
	found := false
	l.change(id, func(own *Record) { r, found = *own, true })
	if !found {
		return nil, false
	}
	return r.Proto(), true
}

// copyOf is a record as it is now; what it points to does not change.
func (l *Log) copyOf(r *Record) Record {
	l.mu.Lock()
	defer l.mu.Unlock()
	return *r
}

// Recent sums up what ended since some time by who served it.
func (l *Log) Recent(since time.Time) map[string]*adminv1.RecentRequests {
	type sum struct {
		*adminv1.RecentRequests
		ttft   time.Duration
		first  int
		misses []time.Duration
	}
	sums := map[string]*sum{}
	l.mu.Lock()
	for _, r := range l.ring {
		if r == nil || r.ended.Before(since) || r.servedBy == "" || r.outcome != routerv1.Outcome_OUTCOME_OK {
			continue
		}
		s := sums[r.servedBy]
		if s == nil {
			s = &sum{RecentRequests: &adminv1.RecentRequests{}}
			sums[r.servedBy] = s
		}
		s.Requests++
		if r.ttft > 0 {
			s.ttft, s.first = s.ttft+r.ttft, s.first+1
			if r.servedBy == r.Chosen && len(r.Candidates) > 0 && r.Candidates[0].Predicted {
				s.misses = append(s.misses, (r.Candidates[0].TTFT - r.ttft).Abs())
			}
		}
		if r.cached >= 0 && r.prompt > 0 {
			s.PromptTokens += uint64(r.prompt)
			s.CachedTokens += uint64(r.cached)
		}
	}
	l.mu.Unlock()
	out := make(map[string]*adminv1.RecentRequests, len(sums))
	for id, s := range sums {
		if s.first > 0 {
			s.Ttft = duration(s.ttft / time.Duration(s.first))
		}
		if n := len(s.misses); n > 0 {
			slices.Sort(s.misses)
			s.TtftError = duration(s.misses[n/2])
		}
		out[id] = s.RecentRequests
	}
	return out
}
