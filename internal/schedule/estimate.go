package schedule

import (
	"math"
	"slices"

	"github.com/kinference/kinference/internal/kvhash"
)

// maxPagesWait bounds the wait for KV pages under PredictedTTFT, in seconds; it
// is also the wait when even all requests that we know of would not free
// enough. The accounting is rough, and a long wait drives requests away from
// the worker that holds their prefix to one where they need even more pages: at
// 60 s the benchmark's S1over makes 1.6 requests/s, at 5 s 2.0, and S1hi has a
// p90 of 0.82 and 0.74 s (docs/decisions/0004).
const maxPagesWait = 5

func (s *Scheduler) speed(class string) *Speed {
	if p := s.speeds[class]; p != nil {
		return p
	}
	return s.speeds[""]
}

// view is what all predictions for a worker have in common until something
// happens there.
type view struct {
	at      float64 // when it was made
	checked float64 // when it was last found to hold
	changes uint64  // of the worker, and
	group   float64 // log of its group's slowness, at that time
	serial  uint64  // counts views; 0: there is none

	speed  *Speed
	slow   float64
	fresh  bool
	b, ctx float64 // decoders and their context
	ahead  float64 // prefill time of the requests of others that wait there
	queue  float64 // prefill time before a new request, when last checked
	cold   float64 // work sent there of late
	busy   int     // requests in flight, those of others too
	step   float64 // time of a decode step
	free   float64 // KV pages; infinite when not known
	room   float64 // those that are free or cached, for what is evicted next
	shared bool    // what the worker has cached of a prompt, others hold
	exits  []exit  // made when it is needed

	wanted    float64 // pages, made when they are needed,
	wantedFor uint64  // which this serial says
}

const (
	// viewAge is how long a view lasts at most, in seconds: waits for pages, the
	// age of samples and what fades of the calibration move with time alone.
	viewAge = 1
	// viewDrift is by how much the group's slowness may change meanwhile, in log
	// units: each sample of any worker moves it a little.
	viewDrift = 0.01
)

// look brings the view of c's worker up to date.
func (s *Scheduler) look(t float64, w *worker, c *Candidate) *view {
	v := &w.view
	if v.checked == t && v.changes == w.changes {
		return v
	}
	s.assume(t, w)
	if v.serial > 0 && v.changes == w.changes && math.Abs(v.group-w.group.logS) < viewDrift && t-v.at < viewAge {
		v.checked, v.queue = t, w.queue(t)+v.ahead
		return v
	}
	w.prune(t - s.grace)
	speed := s.speed(c.Class)
	*v = view{at: t, checked: t, changes: w.changes, group: w.group.logS, serial: v.serial + 1, speed: speed, slow: w.slowness(t),
		fresh: w.sampled > 0 && t-w.sampled < s.fresh, b: float64(len(w.running)), ctx: w.context, free: math.Inf(1)}
	if v.fresh {
		tokens, work := w.meanTokens, w.meanWork
		if tokens == 0 { // nothing routed there yet: they may be like this one
			tokens, work = float64(c.Tokens), speed.work(0, c.Tokens, 0, 0)*v.slow
		}
		v.b += w.othersRunning
		v.ctx += w.othersRunning * tokens
		v.ahead = w.othersWaiting * work
	}
	v.queue, v.cold = w.queue(t)+v.ahead, w.coldNow(t)
	v.busy = w.inFlight() + int(w.others()+0.5)
	v.step = speed.decodeStep(v.b, v.ctx) * v.slow
	if w.pages.total > 0 {
		s.count(t, w, v)
	}
	return v
}

// observe takes in a load sample. Older ones than the newest are ignored. What runs
// and waits counts while the sample is fresh (look), pages for longer: how many are in
// use moves with whole requests.
func (s *Scheduler) observe(t float64, w *worker, l *Load) {
	age := l.Age.Seconds() * s.scale
	if !l.Known || age < 0 || age >= max(s.fresh, biasExpiry) {
		return
	}
	at := t - age
	if at <= w.sampled+1e-3 {
		return
	}
	s.reconcile(t, at, w, l)
	w.sample(at, l)
	w.usage = clamp(l.KVUsage, 0, 1)
	s.account(t, at, w, l.KVUsage)
	s.changed(w)
}

// pair is what is known of one request at one worker, until the worker's view
// changes.
type pair struct {
	w      *worker
	serial uint64 // of the view
	barred bool   // the policies do not let the request go there

	matched, anticipated, fetched, cached int // tokens

	prefill float64 // without slowness
	work    float64 // what the requests behind wait for
	need    float64 // KV pages
	loss    float64 // expected prefill time of what it would push out
	twin    float64 // what computing it here costs while another worker does

	tie  kvhash.Hash // decides between equals
	tied bool        // it has been made
}

// fit brings the pair of c and its worker up to date.
func (s *Scheduler) fit(t float64, p *pair, c *Candidate) *view {
	w := p.w
	v := s.look(t, w, c)
	if p.serial == v.serial {
		return v
	}
	p.serial = v.serial
	tokens := max(c.Tokens, 0)
	own := blocks{c.Hashes, 1}

	// What is cached. An engine computes at least the last token itself, and
	// can use whole blocks only.
	p.matched = max(c.GPUTokens, 0)
	gpu := p.matched
	if c.BlockSize > 0 {
		gpu = max(gpu, c.BlockSize*w.overlap(own, gpu/c.BlockSize, true))
	}
	most := max(tokens-1, 0)
	if c.BlockSize > 0 {
		most -= most % c.BlockSize
	}
	p.matched = min(p.matched, most)
	p.anticipated = min(gpu, most) - p.matched
	p.fetched = max(0, min(c.CPUTokens, most)-min(gpu, most))
	p.cached = int(float64(p.matched+p.anticipated+p.fetched) * w.reuse())

	// How long it takes.
	fetch := float64(p.fetched) * v.speed.Fetch
	if c.NoAdapter {
		fetch += v.speed.Adapter
	}
	p.prefill = v.speed.prefill(p.cached, tokens, v.b, v.ctx) + fetch
	p.work = (v.speed.work(p.cached, tokens, v.b, v.ctx) + fetch) * v.slow

	p.need = 0
	if w.pages.total > 0 && c.BlockSize > 0 {
		p.need = w.pages.extra + 1 + float64(tokens/c.BlockSize)
		if p.need > v.free {
			held := w.overlap(own, 0, false) // in use already
			if v.shared {
				held = max(held, gpu/c.BlockSize)
			}
			p.need -= float64(held)
		}
	}
	if p.loss = 0; s.k2 {
		p.loss = s.loss(t, p, c)
	}
	return v
}

// pairOf makes the pair of a candidate and its worker, and takes in what the
// candidate tells of the worker.
func (s *Scheduler) pairOf(t float64, c *Candidate) pair {
	w := s.worker(c)
	if c.TotalBlocks != w.pages.total || c.BlockSize != w.pages.size {
		if c.BlockSize > 0 || w.pages.size == 0 {
			w.pages.total, w.pages.size = max(c.TotalBlocks, 0), c.BlockSize
			s.changed(w)
		}
	}
	s.observe(t, w, &c.Load)
	return pair{w: w}
}

// wait is how long the request waits at the worker until its prefill begins;
// queued is the part of it that is not the decode step under way.
func (s *Scheduler) wait(t float64, p *pair, v *view, c *Candidate) (wait, queued float64) {
	queued = v.queue
	if s.k2 {
		if p.need > v.free {
			queued = max(queued, s.kvWait(t, p.w, p.need))
		}
	} else if v.fresh && c.TotalBlocks > 0 && c.BlockSize > 0 {
		queued = max(queued, s.pagesWait(t, p.w, c, v))
	}
	if queued == 0 && v.b > 0 { // the decode step under way is half through
		return v.step / 2, 0
	}
	return queued, queued
}

// estimate predicts the TTFT at c, given its pair.
func (s *Scheduler) estimate(t float64, c *Candidate, p *pair, o Objective, held int, est *Estimate) {
	v := s.fit(t, p, c)
	w := p.w
	*est = Estimate{
		Worker: c.Worker, Profile: c.Profile, Tokens: max(c.Tokens, 0), Matched: p.matched, Anticipated: p.anticipated, Fetched: p.fetched, Cached: p.cached,
		InFlight: w.inFlight(), Load: c.Load, Slowness: v.slow, w: w, c: c, prefill: p.prefill, work: p.work, cold: v.cold,
	}
	if t-w.sampled < biasExpiry {
		est.Others = w.others()
	}
	est.wait, est.queued = s.wait(t, p, v, c)
	prefill := est.prefill*v.slow + v.speed.Latency
	est.ttft = est.wait + prefill
	est.j = est.ttft
	if s.k2 {
		interference := p.work * (float64(held) + beta(o)*v.b)
		est.j += interference + p.loss + p.twin
		est.loss, est.settles = p.loss, settles(o, c, p.cached)
		est.Interference, est.EvictionLoss, est.J = s.duration(interference), s.duration(p.loss+p.twin), s.duration(est.j)
		if !math.IsInf(v.free, 0) {
			est.Pages, est.Free = int(math.Ceil(p.need)), int(max(v.free, 0))
		}
	}
	est.Wait, est.Prefill = s.duration(est.wait), s.duration(prefill)
	est.TTFT = est.Wait + est.Prefill
	est.ITL = s.duration(v.speed.decodeStep(v.b+1, v.ctx+float64(est.Tokens)) * v.slow)
	est.Work = s.duration(est.work)
}

// pagesWait is the time until the worker has enough free KV blocks to hold
// the prompt: 0 when it has them now. The scraped usage is brought up to date
// by the requests that came and went since. Admission needs the prompt's
// blocks only, as in vLLM, not those of the whole output.
func (s *Scheduler) pagesWait(t float64, w *worker, c *Candidate, v *view) float64 {
	total := float64(c.TotalBlocks)
	used := w.usage * total
	for i := range w.recent {
		if f := &w.recent[i]; f.routed <= w.sampled && f.done > w.sampled {
			used -= f.pages
		}
	}
	for _, e := range w.waiting {
		// Not yet in the sample: routed later, or still queued at that time.
		if e.routed > w.sampled || e.due-e.work > w.sampled {
			used += pagesOf(e.tokens-e.cached, e.blockSize)
		}
	}
	for _, e := range w.running {
		if e.routed > w.sampled {
			used += pagesOf(e.tokens-e.cached, e.blockSize)
		}
	}
	need := pagesOf(c.Tokens, c.BlockSize)
	free := total - max(used, 0)
	if need <= free {
		return 0
	}
	// Blocks that requests in flight hold already need no room.
	need -= float64(w.overlap(blocks{c.Hashes, 1}, 0, false))
	if need <= free {
		return 0
	}
	exits := make([]exit, 0, w.inFlight())
	for _, e := range w.running {
		rest := max(s.outputOf(e)-(t-e.first)/v.step, s.outputOf(e)/4)
		exits = append(exits, exit{rest * v.step, pagesOf(e.tokens-e.cached, e.blockSize)})
	}
	for _, e := range w.waiting {
		exits = append(exits, exit{max(0, e.due-t) + s.outputOf(e)*v.step, pagesOf(e.tokens-e.cached, e.blockSize)})
	}
	slices.SortFunc(exits, func(a, b exit) int {
		if a.at < b.at {
			return -1
		}
		return 1
	})
	for _, x := range exits {
		if free += x.freed; need <= free {
			return min(x.at, maxPagesWait)
		}
	}
	return maxPagesWait
}

// outputOf is the expected number of output tokens.
func (s *Scheduler) outputOf(e *entry) float64 { return s.outputs.expect(e.output, e.maxTokens) }
