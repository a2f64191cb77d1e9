// Package providers knows how busy the third-party providers are with our
// requests and how soon they answer.
//
// Nobody tells a provider's queue, so all that is known is what the router sent
// there itself: the requests in flight, and the time to first token of those
// that were answered. The router books each request that goes to a provider and
// passes on what ingress reports. A Table is safe for concurrent use. A request
// whose end is never reported leaves after its lease.
package providers

import (
	"math"
	"sync"
	"time"

	"github.com/kinference/kinference/internal/resources"
)

const (
	// prior is the time to first token of a provider that has not answered yet.
	prior = time.Second
	// weight of the newest answer in the mean.
	weight = 0.2
	// What was learned counts for fadeFrom without an answer, and then goes back to
	// the prior by half in each fadeHalf: else a provider that was slow for a while
	// would never be asked again where others are quicker.
	fadeFrom, fadeHalf = 5 * time.Minute, 10 * time.Minute
	// lease bounds the time of a request in flight: the longest timeout of one.
	lease = 30 * time.Minute
	// sweep is the least time between two looks for leases that have ended.
	sweep = time.Second
)

// Table holds the providers. The zero value is empty and ready.
type Table struct {
	mu       sync.Mutex
	all      map[string]*provider // by namespace/name
	inFlight map[string]booking   // by request id
	swept    time.Time
}

type provider struct {
	ttft     time.Duration
	answered time.Time // last; zero: never
	inFlight int
}

type booking struct {
	*provider
	at time.Time
}

// Keep forgets all providers but these.
func (t *Table) Keep(list []*resources.Provider) {
	t.mu.Lock()
	defer t.mu.Unlock()
	all := make(map[string]*provider, len(list))
	for _, p := range list {
		if all[p.Name] = t.all[p.Name]; all[p.Name] == nil {
			all[p.Name] = &provider{ttft: prior}
		}
	}
	t.all = all
}

// Full says why a provider takes no request more; empty if it does.
func (t *Table) Full(now time.Time, p *resources.Provider) string {
	t.mu.Lock()
	defer t.mu.Unlock()
	own := t.all[p.Name]
	full := func() bool { return own != nil && p.Spec.Concurrency > 0 && own.inFlight >= int(p.Spec.Concurrency) }
	if full() {
		t.expire(now)
	}
	if full() {
		return "has as many requests as its concurrency allows"
	}
	return ""
}

// TTFT is the time to first token that a provider will take.
func (t *Table) TTFT(now time.Time, p *resources.Provider) time.Duration {
	t.mu.Lock()
	defer t.mu.Unlock()
	if own := t.all[p.Name]; own != nil {
		return own.learned(now)
	}
	return prior
}

// learned is the mean of the answers as far as it still counts.
func (p *provider) learned(now time.Time) time.Duration {
	silent := now.Sub(p.answered) - fadeFrom
	if p.answered.IsZero() || silent <= 0 {
		return p.ttft
	}
	return prior + time.Duration(float64(p.ttft-prior)*math.Exp2(-silent.Seconds()/fadeHalf.Seconds()))
}

// InFlight is how many requests are at a provider.
func (t *Table) InFlight(p *resources.Provider) int {
	t.mu.Lock()
	defer t.mu.Unlock()
	if own := t.all[p.Name]; own != nil {
		return own.inFlight
	}
	return 0
}

// Book notes that a request goes to a provider, from wherever it was; unknown
// providers are ignored.
func (t *Table) Book(now time.Time, id, name string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.release(id)
	p := t.all[name]
	if p == nil || id == "" {
		return
	}
	if t.inFlight == nil {
		t.inFlight = map[string]booking{}
	}
	p.inFlight++
	t.inFlight[id] = booking{p, now}
	t.expire(now)
}

// expire takes out those whose lease has ended. The lock is held.
func (t *Table) expire(now time.Time) {
	if now.Sub(t.swept) < sweep {
		return
	}
	t.swept = now
	for id, b := range t.inFlight {
		if now.Sub(b.at) > lease {
			t.release(id)
		}
	}
}

// release takes a request out. The lock is held.
func (t *Table) release(id string) {
	if b, ok := t.inFlight[id]; ok {
		b.inFlight--
		delete(t.inFlight, id)
	}
}

// FirstToken learns from a request's time to first token; it reports whether the
// request is at a provider.
func (t *Table) FirstToken(now time.Time, id string, ttft time.Duration) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	b, ok := t.inFlight[id]
	if ok {
		was := b.learned(now)
		b.ttft, b.answered = was+time.Duration(weight*float64(ttft-was)), now
	}
	return ok
}

// Done takes a request out that is at its end, or goes elsewhere.
func (t *Table) Done(id string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.release(id)
}
