package parity

import (
	"maps"
	"sync"
	"time"

	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
)

// How a verdict on cached tokens comes about. A single request says little: its
// prefix may be evicted, or stored by a neighbour, between decision and start. A
// wrong index is wrong again and again, and by much.
const (
	// window is how many of the newest requests of a profile at a worker count,
	// and least how many there must be.
	window, least = 32, 12
	// A worker is suspected when two thirds of its window differ the same way,
	// distrusted when those decided hold later do so too, and trusted again
	// when less than a quarter does. Evictions, which take the tail of a prefix
	// first, stay far below: with every fourth request differing by them, 8 of
	// 12 come twice in a row once in 100,000 times.
	tripOver, tripOf, heal = 2, 3, 4
	// slack is the share of the larger number, a quarter, by which the two may
	// differ, but at least two blocks: speculative decoding gives up one, and
	// a block is being filled while the request is on its way.
	slack, slackBlocks = 4, 2
	// hold is the time until the second look. A cache that is emptied makes false
	// hits of all that is on its way, NATS that restarts delays events for
	// seconds, and either may fill a window at once.
	hold = 10 * time.Second
	// longWait is the predicted wait above which a missing prefix proves
	// nothing: what was there at the decision may well be evicted by those ahead.
	longWait = time.Second
	// maxPending bounds the requests in flight that are compared, and maxLinks
	// the profiles at workers. Above the bounds only a part is compared.
	maxPending, maxLinks = 1 << 14, 1 << 16
)

// Promise is what a decision expected of the worker that it chose.
type Promise struct {
	At                time.Time // of the decision
	Profile, Worker   string
	Tokens, BlockSize int // of the prompt
	// GPU and CPU are the leading tokens by the index: in GPU memory, and in
	// GPU or CPU memory.
	GPU, CPU int
	// Expected is what the decision counted on in all: the index and what
	// requests on their way will have cached.
	Expected int
	// Remembered says that the router's own memory stood in for the index.
	Remembered bool
	// Wait is the predicted time until the prefill starts.
	Wait time.Duration
}

// Settings of a Cached. The zero value of TimeScale means 1.
type Settings struct {
	// TimeScale is how many times faster than real the fleet runs.
	TimeScale float64
	// Why tells what could make the index know less than the worker holds;
	// nil: nothing but its hashes.
	Why func(worker string) routerv1.ParityCause
	// Changed is told, without a lock held, when a profile begins to differ at
	// the first of its workers, and when it does no more: cause 0 then.
	Changed func(profile, worker string, cause routerv1.ParityCause)
	// Compared is told of each request that is done; result is a name of a
	// Result.
	Compared func(profile string, result Result)
}

// Result is how a request's cached tokens compare with the promise.
type Result uint8

// The results. NotReported: the engine does not say. Uninformative: there was
// nothing to compare, or too much else can explain a difference.
const (
	Agree Result = iota
	TooFew
	TooMany
	Uninformative
	NotReported
	results
)

// Names of the results, for metrics.
var resultNames = [results]string{"agree", "too_few", "too_many", "uninformative", "not_reported"}

// String is the result as a label.
func (r Result) String() string { return resultNames[r] }

// Cached compares promises with reports. Use NewCached.
type Cached struct {
	set            Settings
	hold, longWait time.Duration

	mu       sync.Mutex
	pending  map[string]*Promise // by request
	ring     []string            // ids of pending, oldest at next
	next     int
	links    map[key]*link
	profiles map[string]*profile
}

type key struct{ profile, worker string }

// link is a profile at a worker.
type link struct {
	ring    [window]Result
	n, next int
	count   [results]int // in ring
	since   time.Time    // when a window looked wrong and was begun anew; zero: none did
	cause   routerv1.ParityCause
	reports bool // the engine does tell cached tokens
}

// profile sums up its links.
type profile struct {
	counts [results]uint64
	wrong  map[string]routerv1.ParityCause // by worker
}

// NewCached makes a Cached that trusts everybody.
func NewCached(s Settings) *Cached {
	if s.TimeScale == 0 {
		s.TimeScale = 1
	}
	if s.Why == nil {
		s.Why = func(string) routerv1.ParityCause { return routerv1.ParityCause_PARITY_CAUSE_HASH }
	}
	if s.Changed == nil {
		s.Changed = func(string, string, routerv1.ParityCause) {}
	}
	if s.Compared == nil {
		s.Compared = func(string, Result) {}
	}
	return &Cached{
		set: s, hold: max(time.Duration(float64(hold)/s.TimeScale), time.Second), longWait: time.Duration(float64(longWait) / s.TimeScale),
		pending: map[string]*Promise{}, ring: make([]string, maxPending), links: map[key]*link{}, profiles: map[string]*profile{},
	}
}

// Promised notes what was expected of a request.
func (c *Cached) Promised(id string, p Promise) {
	if id == "" {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if _, again := c.pending[id]; !again {
		delete(c.pending, c.ring[c.next])
		c.ring[c.next] = id
		c.next = (c.next + 1) % len(c.ring)
	}
	c.pending[id] = &p
}

// Dropped forgets the promise of a request that failed or that another worker
// serves.
func (c *Cached) Dropped(id string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.pending, id)
}

// Done compares a request that a worker served to its end: prompt and cached as
// the engine reported them, below 0 if it did not. It returns cached, with 0 for
// what is absent from the report of an engine that only tells of hits, as older
// versions of vLLM do.
func (c *Cached) Done(now time.Time, id string, prompt, cached int) int {
	c.mu.Lock()
	p := c.pending[id]
	if p == nil {
		c.mu.Unlock()
		return cached
	}
	delete(c.pending, id)
	k := key{p.Profile, p.Worker}
	l := c.link(k)
	switch {
	case cached > 0:
		l.reports = true
	case cached < 0 && prompt >= 0 && l.reports:
		cached = 0
	}
	result := c.compare(p, cached)
	all := c.profile(p.Profile)
	all.counts[result]++
	told := func() {}
	if result <= TooMany && (l.cause != 0 || l.since.IsZero() || p.At.Sub(l.since) >= c.hold) {
		l.add(result)
		told = c.judge(now, k, l, all)
	}
	c.mu.Unlock()
	told()
	c.set.Compared(p.Profile, result)
	return cached
}

// compare judges one request.
func (c *Cached) compare(p *Promise, cached int) Result {
	if cached < 0 {
		return NotReported
	}
	block := max(p.BlockSize, 1)
	// An engine computes the last token itself, and uses whole blocks only.
	most := max(p.Tokens-1, 0) / block * block
	low, high := min(p.GPU, most), min(max(p.GPU, p.CPU), most)
	if max(low, cached) < block {
		return Uninformative
	}
	allowed := func(n int) int { return max(slackBlocks*block, n/slack) }
	switch {
	case cached-high > allowed(cached):
		if p.Remembered {
			// What the ledger anticipated is not known apart from what was
			// remembered: an index that knows nothing may just be early.
			if high < block {
				return Uninformative
			}
			return TooFew
		}
		if cached-p.Expected <= allowed(cached) {
			return Uninformative // requests on their way explain it
		}
		return TooFew
	case low-cached > allowed(low):
		if p.Wait > c.longWait {
			return Uninformative
		}
		return TooMany
	}
	return Agree
}

func (l *link) add(r Result) {
	if l.n == window {
		l.count[l.ring[l.next]]--
	} else {
		l.n++
	}
	l.ring[l.next] = r
	l.count[r]++
	l.next = (l.next + 1) % window
}

// judge settles whether a link is trusted. It returns what to call without the
// lock, which is held.
func (c *Cached) judge(now time.Time, k key, l *link, all *profile) func() {
	few, many := l.count[TooFew], l.count[TooMany]
	bad := max(few, many)
	if l.cause != 0 {
		if l.n < least || bad*heal >= l.n {
			return func() {}
		}
		l.cause, l.since = 0, time.Time{}
		delete(all.wrong, k.worker)
		if len(all.wrong) > 0 {
			return func() {}
		}
		return func() { c.set.Changed(k.profile, k.worker, 0) }
	}
	switch {
	case l.n < least:
		return func() {}
	case bad*tripOf < l.n*tripOver:
		l.since = time.Time{}
		return func() {}
	case l.since.IsZero():
		*l = link{since: now, reports: l.reports}
		return func() {}
	}
	l.cause = routerv1.ParityCause_PARITY_CAUSE_FALSE_HITS
	if few >= many {
		l.cause = c.set.Why(k.worker)
	}
	cause := l.cause
	all.wrong[k.worker] = cause
	if len(all.wrong) > 1 {
		return func() {}
	}
	return func() { c.set.Changed(k.profile, k.worker, cause) }
}

// link returns the state of a profile at a worker. At the bound any other one
// makes room: it fills again within minutes. The lock is held.
func (c *Cached) link(k key) *link {
	l := c.links[k]
	if l == nil {
		if len(c.links) >= maxLinks {
			for old := range c.links {
				c.remove(old)
				break
			}
		}
		l = &link{}
		c.links[k] = l
	}
	return l
}

func (c *Cached) profile(id string) *profile {
	p := c.profiles[id]
	if p == nil {
		p = &profile{wrong: map[string]routerv1.ParityCause{}}
		c.profiles[id] = p
	}
	return p
}

func (c *Cached) remove(k key) {
	delete(c.links, k)
	if p := c.profiles[k.profile]; p != nil {
		delete(p.wrong, k.worker)
	}
}

// Distrusted returns the workers at which the index is wrong about a profile; nil
// if there are none.
func (c *Cached) Distrusted(profile string) map[string]routerv1.ParityCause {
	c.mu.Lock()
	defer c.mu.Unlock()
	if p := c.profiles[profile]; p != nil && len(p.wrong) > 0 {
		return maps.Clone(p.wrong)
	}
	return nil
}

// Forget drops what is known of a worker that is gone for good.
func (c *Cached) Forget(worker string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for k := range c.links {
		if k.worker == worker {
			c.remove(k)
		}
	}
}

// Keep drops the profiles that left the catalog.
func (c *Cached) Keep(profile func(id string) bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for k := range c.links {
		if !profile(k.profile) {
			delete(c.links, k)
		}
	}
	for id := range c.profiles {
		if !profile(id) {
			delete(c.profiles, id)
		}
	}
}

// Summary is what is known of the cached tokens of a profile.
type Summary struct {
	State routerv1.ParityState
	Cause routerv1.ParityCause
	// Wrong are the workers that differ, with the cause.
	Wrong map[string]routerv1.ParityCause
	// Counts of requests by result, since the profile is known.
	Counts [results]uint64
}

// Profile sums up a profile. Without enough requests to tell, its state is
// unknown; the cause says if that is because the engine does not report.
func (c *Cached) Profile(id string) (s Summary) {
	c.mu.Lock()
	defer c.mu.Unlock()
	s.Wrong = map[string]routerv1.ParityCause{}
	p := c.profiles[id]
	if p == nil {
		return s
	}
	s.Counts = p.counts
	for w, cause := range p.wrong {
		s.Wrong[w], s.State, s.Cause = cause, differs, max(s.Cause, cause)
	}
	compared := s.Counts[Agree] + s.Counts[TooFew] + s.Counts[TooMany]
	switch {
	case s.State == differs:
	case compared >= least:
		s.State = agrees
	case compared+s.Counts[Uninformative] == 0 && s.Counts[NotReported] > 0:
		s.Cause = routerv1.ParityCause_PARITY_CAUSE_NOT_REPORTED
	}
	return s
}
