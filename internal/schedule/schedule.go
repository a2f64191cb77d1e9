package schedule

import (
	"cmp"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/kinference/kinference/internal/kvhash"
)

// Settings configures a Scheduler. The zero value is ready for production.
type Settings struct {
	// Policy is one of Policies(); empty means K2.
	Policy string
	// Seed drives the random policies and nothing else.
	Seed uint64
	// Speeds are the priors by accelerator class, merged over DefaultSpeeds;
	// the class "" stands for every class that is not listed.
	Speeds map[string]Speed
	// TimeScale is how many times faster than real hardware the fleet runs;
	// 0 means 1. Only time-scaled simulated fleets set it.
	TimeScale float64
	// Lease is how long a request stays in the ledger without a report; 0
	// means 30 minutes, the longest that a stream may take.
	Lease time.Duration
	// Fresh is the age from which on a load sample is not used; 0 means 2 s.
	Fresh time.Duration
	// Grace is how long a finished prompt still counts as cached, because
	// KV events may be late; 0 means 2 s.
	Grace time.Duration
	// MaxInFlight bounds the ledger; the longest silent request makes room.
	// 0 means 100,000.
	MaxInFlight int
	// MaxWaiting bounds the line in requests; 0 means 4096.
	MaxWaiting int
	// MaxWait bounds the predicted wait in line of those who enter; 0 means
	// that it is not bounded.
	MaxWait time.Duration
}

// Request is what all candidates of one decision have in common.
type Request struct {
	// ID names the request in later reports. A request without ID is not
	// booked. An ID that is booked already replaces the older booking.
	ID     string
	Tenant string
	Model  string
	// Connection names the client's connection, for the Connection policy.
	Connection string
	// MaxTokens limits the output; 0 means no limit.
	MaxTokens int
	// Whole says that the answer comes in one piece. No first token will be
	// reported then, and the ledger takes it for granted when it is due.
	Whole bool
	// QoS is the class in which the request waits.
	QoS QoS
	// Weight is the tenant's share of the fleet beside other tenants that
	// wait; 0 means 1.
	Weight float64
	// Objective of the choice among workers.
	Objective Objective
	// Arrived is when the request came, where that was before it entered the
	// line: its age counts from then. Zero means when it enters.
	Arrived time.Time
}

// Candidate is a worker that could serve the request, with the prompt as that
// worker's profile sees it.
type Candidate struct {
	// Worker is <uid>/<rank>.
	Worker  string
	Profile string
	// Tokens is the length of the prompt.
	Tokens int
	// BlockSize is in tokens; 0 when unknown, and then Hashes are ignored.
	BlockSize int
	// Hashes of the prompt's full blocks. The ledger keeps the slice until
	// the request is done: do not change it afterwards.
	Hashes []kvhash.Hash
	// GPUTokens and CPUTokens are the leading tokens in the worker's GPU
	// memory, and in its GPU or CPU memory.
	GPUTokens, CPUTokens int
	Load                 Load
	// Class is the accelerator class, which selects the prior speed.
	Class string
	// Group names the workers that are alike in model and hardware, for
	// instance their worker set, and so share what is learned about speed;
	// empty means all of the class.
	Group string
	// TotalBlocks is the size of the worker's KV cache; 0 when unknown.
	TotalBlocks int
	// NoAdapter says that the request needs an adapter that the worker is known
	// not to have loaded.
	NoAdapter bool
}

// Load is a scraped sample of an engine's gauges.
type Load struct {
	Running, Waiting float64
	// KVUsage is the share of KV blocks that running requests use.
	KVUsage float64
	// Age of the sample at the time of the decision.
	Age time.Duration
	// Known is false when there has never been a sample.
	Known bool
}

// Estimate is what the scheduler thinks of one candidate.
type Estimate struct {
	Worker, Profile string
	// Tokens is the prompt's length, Matched the part of it in the worker's
	// cache by its events, Anticipated what requests on their way add to
	// that, Fetched the part to be read from CPU memory.
	Tokens, Matched, Anticipated, Fetched int
	// Cached is the number of tokens that the prediction does not prefill:
	// the three above times the learned reuse ratio.
	Cached int
	// TTFT = Wait + Prefill. Wait is that in the engine, or what the request would
	// wait in line and there if it cannot go now.
	TTFT, Wait, Prefill time.Duration
	// ITL is the time of a decode step with the request among those that run,
	// and Work that of its prefill without what runs beside it.
	ITL, Work time.Duration
	// InFlight counts the worker's requests in the ledger.
	InFlight int
	// Others counts requests that the engine reports and the ledger does
	// not know: those of other routers and clients.
	Others float64
	// Slowness is the learned factor on the class's prior speed.
	Slowness float64
	Load     Load

	// What follows is filled by the K2 policy only.

	// Interference is the delay of others that the prefill would cause, as
	// counted in J: of those that decode there and of those that wait for the
	// worker. EvictionLoss is the expected prefill time of the blocks that it
	// would push out, and what computing it there costs while another worker does.
	Interference, EvictionLoss time.Duration
	// J is what K2 ranks by: the TTFT without the time in line, and these two.
	J time.Duration
	// Pages is the number of free KV pages that the request needs, Free that of
	// those there are; both 0 when unknown.
	Pages, Free int
	// Hold is why the request cannot go to this worker now.
	Hold Hold

	// Seconds of model time, for ranking and booking.
	ttft, j, loss, wait, queued, prefill, work, cold float64
	filled                                           int
	settles                                          bool
	w                                                *worker
	c                                                *Candidate
}

// Decision is the outcome of Decide.
type Decision struct {
	// Order holds indices into the candidates, best first.
	Order []int
	// Estimates has one element per candidate, in the order of candidates.
	Estimates []Estimate
	// Policy is the name of the policy that ranked.
	Policy string
	// Reason says in one sentence why the first is first.
	Reason string
}

// Outcome is how a request ended. Token counts are -1 when unknown.
type Outcome struct {
	OK                                       bool
	PromptTokens, CachedTokens, OutputTokens int
}

// Scheduler decides and keeps the ledger. Use New.
type Scheduler struct {
	speeds      map[string]*Speed
	scale       float64
	lease       float64
	fresh       float64
	grace       float64
	maxInFlight int
	maxWaiting  int
	maxWait     float64
	horizon     float64 // seconds of model time,
	slack       float64 // these too

	mu      sync.Mutex
	policy  Policy
	k2      bool // the policy holds requests
	rng     *rand.Rand
	base    time.Time // origin of model time, set by the first call
	started bool
	seq     uint64 // of requests that entered the line
	line
	remotes
	afar
	ledger
}

var errNoID = errors.New("a request in line needs an ID")

// New returns a Scheduler with an empty ledger. It fails for a policy that is
// not in Policies() and for a negative time scale.
func New(set Settings) (*Scheduler, error) {
	p, err := newPolicy(set.Policy)
	if err != nil {
		return nil, err
	}
	if set.TimeScale < 0 {
		return nil, fmt.Errorf("time scale %v is negative", set.TimeScale)
	}
	s := &Scheduler{
		speeds:      mergeSpeeds(set.Speeds),
		scale:       cmp.Or(set.TimeScale, 1),
		lease:       cmp.Or(set.Lease, 30*time.Minute).Seconds(),
		fresh:       cmp.Or(set.Fresh, 2*time.Second).Seconds(),
		grace:       cmp.Or(set.Grace, 2*time.Second).Seconds(),
		maxInFlight: cmp.Or(set.MaxInFlight, 100_000),
		maxWaiting:  cmp.Or(set.MaxWaiting, 4096),
		maxWait:     set.MaxWait.Seconds() * cmp.Or(set.TimeScale, 1),
		horizon:     max(horizon, flight*cmp.Or(set.TimeScale, 1)),
		slack:       slack * cmp.Or(set.TimeScale, 1),
		policy:      p,
		k2:          p.Name() == K2,
		rng:         rand.New(rand.NewPCG(set.Seed, 0x6b696e)),
		line:        newLine(),
		afar:        newAfar(),
		ledger:      newLedger(),
	}
	return s, nil
}

// Choose picks among the candidates of a decision. It gets the estimates and a
// function that sorts any of their indices, best first, and returns the indices
// of those that may serve, best first, and whether the first one is to be booked.
// It is called under the scheduler's lock: it must be quick and not call back.
type Choose func(e []Estimate, rank func(order []int)) (order []int, book bool)

// Decide ranks the candidates, books the request at the first one and
// explains. Without candidates the decision is empty and nothing is booked.
// now must not go backwards by more than the jitter between callers.
func (s *Scheduler) Decide(now time.Time, r Request, c []Candidate) Decision {
	return s.DecideBy(now, r, c, rankAll)
}

// rankAll lets all candidates serve, best first.
func rankAll(e []Estimate, rank func([]int)) ([]int, bool) {
	order := make([]int, len(e))
	for i := range order {
		order[i] = i
	}
	rank(order)
	return order, true
}

// DecideBy is Decide with a choice of its own. Estimates and booking are one
// step: no other decision comes in between.
func (s *Scheduler) DecideBy(now time.Time, r Request, c []Candidate, choose Choose) Decision {
	s.mu.Lock()
	defer s.mu.Unlock()
	t := s.clock(now)
	s.expire(t)
	return s.decide(t, &r, c, choose)
}

func (s *Scheduler) decide(t float64, r *Request, c []Candidate, choose Choose) Decision {
	s.leave(r.ID)
	s.remove(t, s.entries[r.ID])
	d := Decision{Policy: s.policy.Name(), Estimates: make([]Estimate, len(c))}
	pairs := make([]pair, len(c))
	for i := range c {
		pairs[i] = s.pairOf(t, &c[i])
	}
	s.twins(t, c, pairs)
	for i := range c {
		p := &pairs[i]
		s.estimate(t, &c[i], p, r.Objective, p.w.held, &d.Estimates[i])
	}
	fill(t, d.Estimates)
	book := false
	d.Order, book = choose(d.Estimates, func(order []int) {
		if len(order) > 0 {
			s.policy.Rank(order, r, d.Estimates, s.rng)
		}
	})
	if len(d.Order) == 0 {
		d.Reason = "no candidate"
	} else {
		d.Reason = reason(d.Policy, d.Order, d.Estimates)
		if book && r.ID != "" {
			s.book(t, r, &d.Estimates[d.Order[0]])
		}
	}
	d.seal()
	return d
}

// seal drops what a decision must not keep alive.
func (d *Decision) seal() {
	for i := range d.Estimates {
		d.Estimates[i].w, d.Estimates[i].c = nil, nil
	}
}

// Moved books a request at another worker after its first one failed it.
// What the new worker holds of the prompt is known from the ledger only.
func (s *Scheduler) Moved(now time.Time, id, worker string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	t := s.clock(now)
	e := s.entries[id]
	if e == nil || e.w.name == worker {
		return
	}
	s.remove(t, e)
	// A worker that is not known yet is most likely of the same set.
	c := Candidate{Worker: worker, Tokens: e.tokens, BlockSize: e.blockSize, Hashes: e.prompt.hashes, Class: e.w.class, Group: e.group}
	if w := s.workers[worker]; w != nil {
		c.Class = w.class
		if w.pages.size == c.BlockSize {
			c.TotalBlocks = w.pages.total
		}
	}
	r := Request{ID: id, Tenant: e.output.tenant, Model: e.output.model, MaxTokens: e.maxTokens, Whole: e.whole}
	var est Estimate
	p := s.pairOf(t, &c)
	s.estimate(t, &c, &p, Balanced, 0, &est)
	s.book(t, &r, &est)
}

// FirstToken notes that the request's first token arrived ttft after it was
// sent to the worker, learns the worker's speed from that, and returns what
// had been predicted. ok is false for a request that is unknown or had its
// first token already.
func (s *Scheduler) FirstToken(now time.Time, id string, ttft time.Duration) (predicted time.Duration, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	t := s.clock(now)
	e := s.entries[id]
	if e == nil || e.first > 0 {
		return 0, false
	}
	s.firstToken(t, e, ttft.Seconds()*s.scale)
	return s.duration(e.ttft), true
}

// Done takes the request out of the ledger and learns from its outcome.
// Unknown requests are ignored.
func (s *Scheduler) Done(now time.Time, id string, o Outcome) {
	s.mu.Lock()
	defer s.mu.Unlock()
	t := s.clock(now)
	s.expire(t)
	if e := s.entries[id]; e != nil {
		if e.whole && e.first == 0 && o.OK {
			s.begin(t, e) // the answer is there, so the prompt was computed
		}
		if o.OK {
			e.w.progress = t
		}
		s.learnOutcome(e, o)
		s.remove(t, e)
	}
}

// Drop takes a request out of the ledger that its worker does not serve: it was not
// sent, or went elsewhere. Nothing is learned from it; unknown requests are ignored.
func (s *Scheduler) Drop(now time.Time, id string) {
	s.Done(now, id, Outcome{PromptTokens: -1, CachedTokens: -1, OutputTokens: -1})
}

// Restarted says that the worker's engine process is a new one: its cache is
// empty, whatever was routed there before.
func (s *Scheduler) Restarted(worker string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if w := s.workers[worker]; w != nil {
		w.restarted()
	}
}

// Forget drops what was learned about a worker that is gone for good. Its
// requests in flight stay in the ledger until they are done.
func (s *Scheduler) Forget(worker string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if w := s.workers[worker]; w != nil {
		w.restarted()
		w.learned = learned{}
		w.forgotten = true
		s.bar(w)
		s.release(w)
	}
}

// InFlight returns how many requests are booked at the worker.
func (s *Scheduler) InFlight(worker string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	if w := s.workers[worker]; w != nil {
		return w.booked()
	}
	return 0
}

// Status is what the scheduler has learned about one worker.
type Status struct {
	Worker   string
	InFlight int
	// Slowness is the factor on the prior speed of the worker's class, from
	// Samples first tokens.
	Slowness float64
	Samples  int
	// Reuse is the ratio of the tokens that the engine reported as cached to
	// those that were predicted.
	Reuse float64
}

// Workers returns the status of every known worker, in no order.
func (s *Scheduler) Workers() []Status {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := make([]Status, 0, len(s.workers))
	for _, w := range s.workers {
		out = append(out, Status{w.name, w.booked(), w.slowness(w.sampledSpeed), w.samples, w.reuse()})
	}
	return out
}

// Totals returns the number of requests in flight, and how many left the
// ledger so far because nothing was heard of them.
func (s *Scheduler) Totals() (inFlight, expired int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.entries), s.expired
}

// clock converts to seconds of model time since the first call. They start at
// 1 so that 0 can mean "not yet".
func (s *Scheduler) clock(now time.Time) float64 {
	if !s.started {
		s.base, s.started = now, true
	}
	return 1 + now.Sub(s.base).Seconds()*s.scale
}

// time converts model time to the caller's clock.
func (s *Scheduler) time(t float64) time.Time { return s.base.Add(s.duration(t - 1)) }

// duration converts seconds of model time to the caller's time.
func (s *Scheduler) duration(t float64) time.Duration {
	const most = 1e9 // half of the room, so that two can be added
	return time.Duration(min(t/s.scale, most) * float64(time.Second))
}
