// Package virtual runs the benchmark's scenarios in virtual time: the real
// decision core (internal/schedule) and the real block index
// (internal/kvindex) in front of simulated engines (internal/fleetsim/engine),
// in one event loop without a clock, a network or a GPU.
//
// The benchmark command, the CI gate and the demo's reference figures use it.
// A run is deterministic: equal options give equal results to the last bit. A
// run belongs to one goroutine; runs share nothing, so many may go at once.
//
// What the decision core sees is as old as in production: KV events reach the
// index KVDelay after the iteration that made them, load is sampled each
// LoadInterval, and every request pays the profile's Overhead for HTTP and
// gateway on its way to the engine, under every policy alike.
package virtual

import (
	"container/heap"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/kinference/kinference/internal/bench/stats"
	"github.com/kinference/kinference/internal/bench/workload"
	"github.com/kinference/kinference/internal/fleetsim/engine"
	"github.com/kinference/kinference/internal/kvhash"
	"github.com/kinference/kinference/internal/kvindex"
	"github.com/kinference/kinference/internal/schedule"
	"github.com/kinference/kinference/internal/vllm"
)

// Kinference names the row of the scheduler's default policy in results,
// beside the policies that are asked for by their own names.
const Kinference = "kinference"

// Policies are the rows of the published tables. The first two are a
// Kubernetes Service: kube-proxy picks at random, once per request where each
// request opens a connection, once per connection where clients keep them.
var Policies = []string{"random", "connection", "roundrobin", "leastrequests", "predictedttft", Kinference}

// Options describes one run.
type Options struct {
	Policy string
	Seed   uint64
	// Profile of the workers; the zero value is engine.L40SQwen27B.
	Profile engine.Profile
	// Speeds has one entry per worker, relative to the profile; nil: three
	// workers at full speed.
	Speeds []float64
	// KVDelay and LoadInterval are in seconds; 0 means 20 ms and 250 ms.
	// LoadDelay is by how much a load sample arrives later than it was taken.
	KVDelay, LoadInterval, LoadDelay float64
	// Routers share the requests by connection, each with a scheduler of its
	// own; 0 means one. Gossip is after how many seconds each learns what the
	// others did; 0 means never.
	Routers int
	Gossip  float64
	// Objective of every request.
	Objective schedule.Objective
	// Error makes each prediction of each worker's speed wrong by a factor
	// between 1-Error and 1+Error.
	Error float64
	// Wipe empties the first worker's cache half-way through the measured
	// requests.
	Wipe bool
	// Oracle gives every worker what any of them ever computed, and memory
	// without end: the bound for routing by cache.
	Oracle bool
	// Truth asks the chosen worker's cache what it holds (stats.Sample.Possible),
	// which takes time.
	Truth bool
}

func (o *Options) fill() {
	if o.Profile.Name == "" {
		o.Profile = engine.L40SQwen27B
	}
	if o.Speeds == nil {
		o.Speeds = []float64{1, 1, 1}
	}
	if o.KVDelay == 0 {
		o.KVDelay = 0.020
	}
	if o.LoadInterval == 0 {
		o.LoadInterval = 0.250
	}
}

// Run sends a scenario's requests through one policy and returns what the
// clients saw. It fails for an unknown policy and for prompts that the
// profile's context cannot hold.
func Run(sc workload.Scenario, o Options) (stats.Run, error) {
	s, err := newSim(o)
	if err != nil {
		return stats.Run{}, err
	}
	s.load(sc)
	return s.run()
}

// RunTrace sends an open-loop trace, with its arrivals stretched by the given
// factor (8.5 brings the Mooncake trace to what three L40S can bear).
func RunTrace(trace []workload.TraceRequest, stretch float64, o Options) (stats.Run, error) {
	s, err := newSim(o)
	if err != nil {
		return stats.Run{}, err
	}
	for i, r := range trace {
		s.feed(r.At*stretch, func() {
			s.send(&call{id: fmt.Sprint("t", i), prompt: r.Tokens(nil), output: make([]uint32, r.Output),
				sample: stats.Sample{Index: i, Measured: true}, done: func() {}})
		})
	}
	return s.run()
}

// call is one request on its way.
type call struct {
	id, tenant     string
	prompt, output []uint32
	limit          int // of the output, as the client says; 0: it does not
	hashes         []kvhash.Hash
	connection     int
	router         *router
	routed         float64
	sample         stats.Sample
	done           func()
}

// worker is an engine and what the control plane knows of it.
type worker struct {
	name    string
	engine  *engine.Engine
	busy    bool
	load    schedule.Load
	sampled float64
}

// sim is the event loop.
type sim struct {
	o           Options
	now         float64
	open        int // requests that are not done
	fed         int // events that will send more
	events      queue
	seq         int
	workers     []*worker
	byName      map[string]int
	index       kvindex.Index
	routers     []*router
	noise       *rand.Rand // of Options.Error
	classes     []string
	known       map[kvhash.Hash]bool // of Options.Oracle: what any worker computed
	wipeAt      int                  // the request before which a cache is wiped; 0: none
	connections []bool               // in use
	out         stats.Run
	err         error
}

func newSim(o Options) (*sim, error) {
	o.fill()
	s := &sim{o: o, index: kvindex.New(), byName: map[string]int{}}
	if o.Error > 0 {
		s.noise = rand.New(rand.NewPCG(o.Seed, 0x6e6f697365)) // "noise"
		for i := range errorSteps {
			s.classes = append(s.classes, fmt.Sprint("l40s-", i))
		}
	}
	for i := range max(o.Routers, 1) {
		scheduler, err := schedule.New(s.settings(i))
		if err != nil {
			return nil, err
		}
		s.routers = append(s.routers, &router{name: fmt.Sprint("router", i), scheduler: scheduler, line: map[string]*call{}})
	}
	if o.Oracle {
		s.known = map[kvhash.Hash]bool{}
		s.o.Profile.Blocks = oracleTokens / o.Profile.BlockSize
	}
	for i, speed := range o.Speeds {
		w := &worker{name: WorkerName(i)}
		w.engine = engine.New(engine.Config{Profile: s.o.Profile, Speed: speed, Seed: int64(o.Seed) + int64(i), OnEvents: !o.Oracle})
		s.byName[w.name] = i
		s.workers = append(s.workers, w)
	}
	return s, nil
}

// WorkerName is the id of the i-th worker.
func WorkerName(i int) string { return fmt.Sprintf("sim.%d/0", i) }

// ConnectionName names a client's n-th connection. It holds the seed, so that
// what a policy derives from it is drawn anew for each.
func ConnectionName(seed uint64, n int) string { return fmt.Sprint(seed, "/", n) }

// origin anchors virtual time; the decision core only looks at differences.
var origin = time.Unix(1_700_000_000, 0)

func (s *sim) clock() time.Time { return origin.Add(seconds(s.now)) }

func seconds(t float64) time.Duration { return time.Duration(t * float64(time.Second)) }

func (s *sim) run() (stats.Run, error) {
	s.at(0, s.scrape)
	s.gossip()
	for len(s.events) > 0 && s.err == nil {
		e := heap.Pop(&s.events).(event)
		s.now = e.at
		e.do()
	}
	return s.out, s.err
}

// scrape samples every worker's load, as long as there is something to do.
func (s *sim) scrape() {
	for _, w := range s.workers {
		st := w.engine.Stats()
		load := schedule.Load{Running: float64(st.Running), Waiting: float64(st.Waiting), KVUsage: st.KVUsage, Known: true}
		taken := s.now
		arrive := func() {
			w.load, w.sampled = load, taken
			s.tell(w)
		}
		if s.o.LoadDelay > 0 {
			s.at(s.now+s.o.LoadDelay, arrive)
		} else {
			arrive()
		}
	}
	s.refresh()
	if s.busy() {
		s.at(s.now+s.o.LoadInterval, s.scrape)
	}
}

// send routes a request now.
func (s *sim) send(c *call) {
	s.open++
	c.sample.Sent = s.now
	c.connection = s.connect()
	c.router = s.routerOf(c.connection)
	p := s.o.Profile
	c.hashes = kvhash.Append(nil, kvhash.Root("", ""), c.prompt, p.BlockSize)
	if s.wipeAt > 0 && c.sample.Index >= s.wipeAt {
		s.wipe()
	}
	s.enter(c)
}

// dispatch sends a call to the first worker of its decision.
func (s *sim) dispatch(c *call, d schedule.Decision) {
	chosen := d.Order[0]
	w := s.workers[chosen]
	c.routed = s.now
	c.sample.Worker = chosen
	c.sample.Matched = d.Estimates[chosen].Matched
	c.sample.Predicted = s.now - c.sample.Sent + d.Estimates[chosen].TTFT.Seconds()
	c.sample.Possible = -1
	if s.o.Truth {
		c.sample.Possible = w.engine.Lookup(c.prompt, "", "")
	}
	s.at(s.now+s.o.Profile.Overhead, func() {
		s.warm(w, c)
		err := w.engine.Submit(s.now, &engine.Request{ID: c.id, Tokens: c.prompt, MaxTokens: len(c.output), Output: c.output, Tag: c})
		if err != nil {
			s.err = fmt.Errorf("request %s of %d tokens: %w", c.id, len(c.prompt), err)
			return
		}
		s.begin(w)
	})
}

// connect is what a client with keep-alive does: the first idle connection, or
// a new one.
func (s *sim) connect() int {
	for i, used := range s.connections {
		if !used {
			s.connections[i] = true
			return i
		}
	}
	s.connections = append(s.connections, true)
	return len(s.connections) - 1
}

// begin starts an iteration on an idle engine that has work.
func (s *sim) begin(w *worker) {
	if w.busy {
		return
	}
	end, ok := w.engine.Begin(s.now)
	if !ok {
		return
	}
	w.busy = true
	s.at(end, func() { s.end(w) })
}

func (s *sim) end(w *worker) {
	w.busy = false
	step := w.engine.End()
	if len(step.Events) > 0 {
		s.at(s.now+s.o.KVDelay, func() { s.index.Apply(w.name, &vllm.Batch{TS: s.now, Events: step.Events, Rank: 0}) })
	}
	for _, t := range step.Tokens {
		c := t.R.Tag.(*call)
		if t.First {
			c.sample.TTFT = s.now - c.sample.Sent
			s.learn(c.hashes)
			c.router.scheduler.FirstToken(s.clock(), c.id, seconds(s.now-c.routed))
		}
		if t.Last {
			s.finish(c, t.R)
		}
	}
	s.begin(w)
	for _, t := range step.Tokens {
		if t.First || t.Last {
			s.passAll()
			break
		}
	}
}

func (s *sim) finish(c *call, r *engine.Request) {
	c.sample.E2E = s.now - c.sample.Sent
	c.sample.Prompt, c.sample.Cached, c.sample.Output = len(c.prompt), r.Cached, r.Generated
	s.open--
	s.learnAnswer(c)
	c.router.scheduler.Done(s.clock(), c.id, schedule.Outcome{OK: true, PromptTokens: len(c.prompt), CachedTokens: r.Cached, OutputTokens: r.Generated})
	s.connections[c.connection] = false
	s.out.Samples = append(s.out.Samples, c.sample)
	// What the client does next comes after what the engine does now.
	s.at(s.now, c.done)
}

// at schedules do for time t; equal times keep the order of the calls.
func (s *sim) at(t float64, do func()) {
	s.seq++
	heap.Push(&s.events, event{t, s.seq, do})
}

type event struct {
	at  float64
	seq int
	do  func()
}

type queue []event

func (q queue) Len() int { return len(q) }
func (q queue) Less(i, j int) bool {
	return q[i].at < q[j].at || q[i].at == q[j].at && q[i].seq < q[j].seq
}
func (q queue) Swap(i, j int) { q[i], q[j] = q[j], q[i] }
func (q *queue) Push(e any)   { *q = append(*q, e.(event)) }
func (q *queue) Pop() any {
	old := *q
	e := old[len(old)-1]
	old[len(old)-1] = event{}
	*q = old[:len(old)-1]
	return e
}
