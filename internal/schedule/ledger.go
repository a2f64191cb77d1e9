package schedule

import (
	"cmp"
	"container/list"
	"iter"
	"math"
	"slices"
)

// ledger knows every request that was routed and is not done. All its times
// are seconds of model time.
type ledger struct {
	entries map[string]*entry
	workers map[string]*worker
	// groups hold the calibration that equal workers have in common; there
	// are as many as candidates name.
	groups map[string]*learned
	// silent orders the entries by when they were last heard of.
	silent  *list.List
	expired int
	outputs outputs
	returns returns
	// changes counts what happened to any worker.
	changes uint64
}

func newLedger() ledger {
	return ledger{
		entries: map[string]*entry{},
		workers: map[string]*worker{},
		groups:  map[string]*learned{},
		silent:  list.New(),
		outputs: newOutputs(),
		returns: newReturns(),
	}
}

// entry is one booked request.
type entry struct {
	id        string
	from      string // the router that it belongs to; empty: this one
	group     string
	output    outputKey
	w         *worker
	prompt    blocks
	blockSize int
	tokens    int // of the prompt
	hit       int // predicted cached tokens, before the reuse ratio
	cached    int // those that the prediction counted on
	maxTokens int
	whole     bool

	routed, first, heard float64
	work                 float64 // prefill time that those behind wait for
	due                  float64 // when the first token is predicted
	ttft, wait, prefill  float64 // prediction, prefill without slowness
	slow                 float64 // the slowness that the prediction took
	queued               float64 // the part of wait that is not the current step
	nudge                float64 // what the first token changed in w.logS
	element              *list.Element

	uses []use   // how often requests use its blocks, at
	used float64 // this time
}

// worker is the state of one engine rank.
type worker struct {
	name  string
	class string
	group *learned
	learned
	sampledSpeed float64 // when logS had its last sample
	oddSamples   int     // in a row

	// waiting have no first token yet, oldest first; running do.
	waiting, running []*entry
	// recent are done: their prompts count as cached for a short while.
	recent []finished
	// drained is when the prefill queue will be empty, by our requests; work
	// is the sum over waiting.
	drained, work float64
	// context is the sum of prompt tokens of running.
	context float64

	// progress is when a request here was last reported to have got tokens.
	progress float64

	// What the newest load sample shows beyond our own requests.
	sampled, usage               float64
	othersWaiting, othersRunning float64
	// strangers is the running mean of their number: other routers tell of theirs a
	// moment later.
	strangers float64
	// meanWork and meanTokens are running means over the prompts routed
	// here, which stand for the unknown ones of others.
	meanWork, meanTokens float64
	// cold is the prefill work routed here of late, decaying: the last
	// tie-break but one, so that equal workers share what matches nowhere.
	cold, coldAt float64

	forgotten bool

	// changes counts what could alter an estimate; view is valid for one count.
	changes uint64
	view    view
	pages   pages
	mirror  mirror
	// held is the number of requests in line whose best worker this is, pace
	// that at which they go.
	held int
	pace pace
}

// finished is a request that left the ledger a moment ago.
type finished struct {
	prompt              blocks
	routed, first, done float64
	pages               float64 // that its prefill filled
	held                float64 // that it freed when it ended
}

const (
	// maxRecent bounds worker.recent: enough for 2 s at 250 requests/s.
	maxRecent = 512
	// maxLate bounds what one late request says of those after it, in seconds: word of
	// its first token may have been lost.
	maxLate = 10
	// coldHalf is the half-life of worker.cold in seconds.
	coldHalf = 600
)

func (w *worker) inFlight() int { return len(w.waiting) + len(w.running) }

// others is the number of requests there that are not in the ledger, by the newest sample.
func (w *worker) others() float64 { return w.othersWaiting + w.othersRunning }

// flight yields the requests in flight at the worker.
func (w *worker) flight() iter.Seq[*entry] {
	return func(yield func(*entry) bool) {
		for _, list := range [...][]*entry{w.waiting, w.running} {
			for _, e := range list {
				if !yield(e) {
					return
				}
			}
		}
	}
}

// booked is the number of this router's own requests in flight.
func (w *worker) booked() (n int) {
	for e := range w.flight() {
		if e.from == "" {
			n++
		}
	}
	return n
}

// worker returns the state for a candidate, creating it when new.
func (s *Scheduler) worker(c *Candidate) *worker {
	w := s.workers[c.Worker]
	if w == nil {
		group := cmp.Or(c.Group, c.Class)
		if s.groups[group] == nil {
			s.groups[group] = &learned{}
		}
		w = &worker{name: c.Worker, class: c.Class, group: s.groups[group]}
		s.workers[c.Worker] = w
	}
	w.forgotten = false
	return w
}

// release drops a worker that is gone and has no requests left.
func (s *Scheduler) release(w *worker) {
	if w.forgotten && w.inFlight() == 0 && s.workers[w.name] == w {
		delete(s.workers, w.name)
	}
}

// book enters a request at the worker of its estimate.
func (s *Scheduler) book(t float64, r *Request, est *Estimate) {
	for len(s.entries) >= s.maxInFlight {
		s.expired++
		s.remove(t, s.silent.Front().Value.(*entry))
	}
	w, c := est.w, est.c
	e := &entry{
		id: r.ID, group: c.Group, output: outputKey{r.Tenant, r.Model}, w: w, prompt: blocks{c.Hashes, 1}, blockSize: c.BlockSize,
		maxTokens: r.MaxTokens, whole: r.Whole,
		tokens: c.Tokens, hit: est.Matched + est.Anticipated + est.Fetched, cached: est.Cached,
		routed: t, heard: t, work: est.work, due: t + est.ttft,
		ttft: est.ttft, wait: est.wait, queued: est.queued, prefill: est.prefill, slow: est.Slowness,
	}
	if c.BlockSize > 0 {
		w.mirror.trim(e.prompt, (est.Matched+est.Anticipated)/c.BlockSize)
	}
	s.enterLedger(t, e)
	s.tell(t, e, Routed)
	if w.meanTokens == 0 {
		w.meanTokens, w.meanWork = float64(e.tokens), e.work
	}
	w.meanTokens += 0.1 * (float64(e.tokens) - w.meanTokens)
	w.meanWork += 0.1 * (e.work - w.meanWork)
}

// enterLedger adds an entry to those in flight at its worker.
func (s *Scheduler) enterLedger(t float64, e *entry) {
	w := e.w
	e.element = s.silent.PushBack(e)
	s.entries[e.id] = e
	w.hold(t, e)
	w.waiting = append(w.waiting, e)
	w.drained = max(w.drained, t) + e.work
	w.work += e.work
	w.cold = w.coldNow(t) + e.work
	w.coldAt = t
	s.changed(w)
}

// changed says that estimates for the worker are out of date.
func (s *Scheduler) changed(w *worker) {
	w.changes++
	s.changes++
}

// begin moves an entry from waiting to running.
func (s *Scheduler) begin(t float64, e *entry) {
	e.first = t
	s.hear(t, e)
	e.w.leaveQueue(t, e)
	e.w.running = append(e.w.running, e)
	e.w.context += float64(e.tokens)
	s.changed(e.w)
	s.tell(t, e, Began)
}

// assume begins the entries of w whose first token is due and will not be
// reported: waiting on, they would make w look stuck for as long as they run.
func (s *Scheduler) assume(t float64, w *worker) {
	for i := 0; i < len(w.waiting); {
		if e := w.waiting[i]; e.whole && e.due <= t {
			s.begin(t, e)
			continue
		}
		i++
	}
}

// firstToken begins an entry and takes a sample of the worker's speed.
func (s *Scheduler) firstToken(t float64, e *entry, ttft float64) {
	w := e.w
	w.progress = t
	s.begin(t, e)
	if w.forgotten || e.prefill <= 0 {
		return
	}
	sample, ok := e.slowness(ttft - s.speed(w.class).Latency)
	if !ok || w.odd(sample, t) {
		return
	}
	e.nudge = w.learnSpeed(t, sample)
}

// slowness is the log of what the time to the first token says of the worker, where
// it says something. After a wait it says little, since that depends on others; but
// when all of it took less than half of what was predicted, the worker is faster. A
// line that holds requests needs to hear that: it sees to it that there is a wait
// whenever it takes a worker for slow, and would never learn otherwise.
func (e *entry) slowness(seen float64) (logS float64, ok bool) {
	if e.queued <= maxWait {
		return math.Log(max(seen-e.wait, e.prefill/100) / e.prefill), true
	}
	predicted := e.wait + e.prefill*e.slow
	return math.Log(e.slow * max(seen/predicted, 0.01)), seen < predicted/2
}

// learnOutcome learns from what the engine reported at the end.
func (s *Scheduler) learnOutcome(e *entry, o Outcome) {
	if o.OutputTokens > 0 && o.OK {
		s.outputs.add(e.output, float64(o.OutputTokens))
	}
	if o.CachedTokens < 0 || e.first == 0 || e.w.forgotten {
		return
	}
	e.w.addHits(e.hit, o.CachedTokens)
	// A first token that was late or early because the cache held something
	// else than predicted says nothing about speed: take it back.
	if off := o.CachedTokens - e.cached; off > max(e.blockSize, 64) || -off > max(e.blockSize, 64) {
		e.w.logS -= e.nudge
	}
}

// hear renews the lease of an entry.
func (s *Scheduler) hear(t float64, e *entry) {
	e.heard = t
	s.silent.MoveToBack(e.element)
}

// expire drops the entries of which nothing was heard for the lease.
func (s *Scheduler) expire(t float64) {
	for f := s.silent.Front(); f != nil; f = s.silent.Front() {
		e := f.Value.(*entry)
		if e.heard+s.lease > t {
			return
		}
		s.expired++
		s.remove(t, e)
	}
}

// Times in seconds of the caller's clock after which a request that is in no
// gauge counts as lost: lostAfter when the engine has given another request its
// first token since, and so has renewed its gauges; lostIdle when it may be
// stuck instead, for which its requests are the only sign.
const (
	lostAfter = 30
	lostIdle  = 300
)

// reconcile drops requests that a load sample taken at time at shows to be gone:
// their ingress was restarted or their last report was lost, and until the lease
// ended they would drive others away. Which ones they are is not known: the
// longest silent go.
func (s *Scheduler) reconcile(t, at float64, w *worker, l *Load) {
	known := l.Running + l.Waiting
	if w.seen(at) || !(known >= 0) {
		return
	}
	s.lost(t, at, known, w)
	limit := max(at-lostIdle*s.scale, min(at, w.progress)-lostAfter*s.scale)
	var old []*entry
	for e := range w.flight() {
		if e.heard < limit {
			old = append(old, e)
		}
	}
	slices.SortFunc(old, func(a, b *entry) int { return cmp.Compare(a.heard, b.heard) })
	for len(old) > 0 && float64(len(old)) > known {
		s.expired++
		s.remove(t, old[0])
		old = old[1:]
	}
}

// remove takes an entry out of the ledger; nil is allowed.
func (s *Scheduler) remove(t float64, e *entry) {
	if e == nil {
		return
	}
	w := e.w
	delete(s.entries, e.id)
	s.silent.Remove(e.element)
	held := w.free(t, s, e)
	if e.first == 0 {
		w.leaveQueue(t, e)
	} else {
		w.running = drop(w.running, e)
		w.context -= float64(e.tokens)
		if len(w.running) == 0 {
			w.context = 0 // no rounding error survives
		}
	}
	w.prune(t - s.grace)
	if len(w.recent) == maxRecent {
		w.recent = slices.Delete(w.recent, 0, maxRecent/4)
	}
	f := finished{routed: e.routed, first: e.first, done: t, pages: pagesOf(e.tokens-e.cached, e.blockSize), held: held}
	if e.first > 0 { // else its prompt may never have been computed
		f.prompt = e.prompt
	}
	w.recent = append(w.recent, f)
	s.changed(w)
	s.tell(t, e, Ended)
	s.release(w)
}

// leaveQueue takes an entry off the prefill queue.
func (w *worker) leaveQueue(t float64, e *entry) {
	w.waiting = drop(w.waiting, e)
	w.work -= e.work
	if len(w.waiting) == 0 {
		w.work = 0
	}
	if e.first > 0 {
		w.drained = t + w.work
	} else {
		w.drained = min(w.drained, t+w.work)
	}
}

// prune forgets the requests that were done before t.
func (w *worker) prune(t float64) {
	n := 0
	for n < len(w.recent) && w.recent[n].done < t {
		n++
	}
	if n > 0 {
		w.recent = slices.Delete(w.recent, 0, n)
	}
}

// restarted notes that the worker's cache is empty.
func (w *worker) restarted() {
	w.recent, w.mirror = nil, mirror{}
	for e := range w.flight() {
		e.prompt.hashes = nil
	}
	w.pages.act = 0
	w.changes++
}

func (w *worker) coldNow(t float64) float64 {
	return w.cold * math.Exp2((w.coldAt-t)/coldHalf)
}

// queue is the time until our own prefills at the worker are through.
func (w *worker) queue(t float64) float64 {
	if len(w.waiting) == 0 {
		return 0
	}
	// When the time of the whole queue is over and its requests still wait,
	// the worker is slower than we think: all but the first must still be
	// prefilled. Adding that the first is late, and so will be later still,
	// sounds right and is not while nobody else uses the worker: in overload
	// every worker is late, requests leave those that hold their prefix, and
	// throughput halves (S1over of the benchmark: 1.6 instead of 0.7
	// requests/s without it).
	wait := max(w.drained-t, w.work-w.waiting[0].work, 0)
	if w.others() > 0.5 {
		// With others there, who is late waits behind them or for their pages: for about
		// as long again, and all who come now do so too.
		wait = max(wait, min(t-w.waiting[0].due, maxLate))
	}
	return wait
}

// seen tells whether a load sample taken at time at is the one seen last.
func (w *worker) seen(at float64) bool { return math.Abs(at-w.sampled) < 1e-3 }

// sample works out what a load sample taken at time at shows beyond our own
// requests. The gauges are compared with the ledger as it was at that time.
func (w *worker) sample(at float64, l *Load) {
	if w.seen(at) {
		return
	}
	w.sampled = at
	var waiting, running float64
	for _, e := range w.waiting {
		if e.routed <= at {
			waiting++
		}
	}
	for _, e := range w.running {
		switch {
		case e.first <= at:
			running++
		case e.routed <= at:
			waiting++
		}
	}
	for i := range w.recent {
		f := &w.recent[i]
		switch {
		case f.done <= at || f.routed > at:
		case f.first > 0 && f.first <= at:
			running++
		default:
			waiting++
		}
	}
	// The engine counts a request as running once its prefill has begun, so
	// ours without a first token may be in either gauge: only the sum tells
	// how many there are of others, and they wait at most as the gauge says.
	others := max(0, sane(l.Waiting)+sane(l.Running)-waiting-running)
	w.othersWaiting = min(others, max(0, sane(l.Waiting)-waiting))
	w.othersRunning = others - w.othersWaiting
	w.strangers += strangersGain * (others - w.strangers)
}

func drop(list []*entry, e *entry) []*entry {
	if i := slices.Index(list, e); i >= 0 {
		return slices.Delete(list, i, i+1)
	}
	return list
}

// pagesOf is the number of KV blocks that tokens fill.
func pagesOf(tokens, blockSize int) float64 {
	if blockSize <= 0 || tokens <= 0 {
		return 0
	}
	return float64((tokens + blockSize - 1) / blockSize)
}

// sane makes a gauge safe to compute with.
func sane(v float64) float64 {
	if v > 0 && v < 1e9 {
		return v
	}
	return 0
}
