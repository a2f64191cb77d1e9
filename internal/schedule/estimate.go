package schedule

import (
	"math"
	"slices"
)

// maxPagesWait bounds the wait for KV pages, in seconds; it is also the wait
// when even all requests that we know of would not free enough. The accounting
// is rough, and a long wait drives requests away from the worker that holds
// their prefix to one where they need even more pages: at 60 s the benchmark's
// S1over makes 1.6 requests/s, at 5 s 2.0, and S1hi has a p90 of 0.82 and
// 0.74 s (docs/decisions/0004).
const maxPagesWait = 5

func (s *Scheduler) speed(class string) *Speed {
	if p := s.speeds[class]; p != nil {
		return p
	}
	return s.speeds[""]
}

// estimate predicts the TTFT at c.
func (s *Scheduler) estimate(t float64, c *Candidate, est *Estimate) {
	w := s.worker(c)
	speed := s.speed(c.Class)
	slow := w.slowness(t)
	fresh := c.Load.Known && c.Load.Age >= 0 && c.Load.Age.Seconds()*s.scale <= s.fresh
	at := t - c.Load.Age.Seconds()*s.scale
	if fresh {
		s.reconcile(t, at, w, &c.Load)
	}
	*est = Estimate{
		Worker: c.Worker, Profile: c.Profile, Tokens: max(c.Tokens, 0),
		InFlight: w.inFlight(), Load: c.Load, Slowness: slow, w: w, c: c,
	}
	w.prune(t - s.grace)
	s.assume(t, w)

	// What is cached. An engine computes at least the last token itself, and
	// can use whole blocks only.
	est.Matched = max(c.GPUTokens, 0)
	gpu := est.Matched
	if c.BlockSize > 0 {
		gpu = max(gpu, c.BlockSize*w.overlap(c.Hashes, gpu/c.BlockSize, true))
	}
	most := max(est.Tokens-1, 0)
	if c.BlockSize > 0 {
		most -= most % c.BlockSize
	}
	est.Matched = min(est.Matched, most)
	est.Anticipated = min(gpu, most) - est.Matched
	est.Fetched = max(0, min(c.CPUTokens, most)-min(gpu, most))
	hit := est.Matched + est.Anticipated + est.Fetched
	est.Cached = int(float64(hit) * w.reuse())

	// Who else is there.
	b, ctx, wait := float64(len(w.running)), w.context, w.queue(t)
	if fresh {
		w.sample(at, &c.Load)
		tokens, work := w.meanTokens, w.meanWork
		if tokens == 0 { // nothing routed there yet: they may be like this one
			tokens, work = float64(est.Tokens), speed.work(0, est.Tokens, 0, 0)*slow
		}
		est.Others = w.othersWaiting + w.othersRunning
		b += w.othersRunning
		ctx += w.othersRunning * tokens
		wait += w.othersWaiting * work
	}

	// How long it takes.
	fetch := float64(est.Fetched) * speed.Fetch
	est.prefill = speed.prefill(est.Cached, est.Tokens, b, ctx) + fetch
	est.work = (speed.work(est.Cached, est.Tokens, b, ctx) + fetch) * slow
	if fresh && c.TotalBlocks > 0 && c.BlockSize > 0 {
		wait = max(wait, s.pagesWait(t, w, c, speed, slow, b, ctx))
	}
	est.queued = wait
	if wait == 0 && b > 0 { // the decode step under way is half through
		wait = speed.decodeStep(b, ctx) * slow / 2
	}
	est.wait, est.cold = wait, w.coldNow(t)
	prefill := est.prefill*slow + speed.Latency
	est.ttft = wait + prefill
	est.Wait, est.Prefill = s.duration(wait), s.duration(prefill)
	est.TTFT = est.Wait + est.Prefill
	est.ITL = s.duration(speed.decodeStep(b+1, ctx+float64(est.Tokens)) * slow)
	est.Work = s.duration(est.work)
}

// pagesWait is the time until the worker has enough free KV blocks to hold
// the prompt: 0 when it has them now. The scraped usage is brought up to date
// by the requests that came and went since. Admission needs the prompt's
// blocks only, as in vLLM, not those of the whole output.
func (s *Scheduler) pagesWait(t float64, w *worker, c *Candidate, speed *Speed, slow, b, ctx float64) float64 {
	total := float64(c.TotalBlocks)
	used := clamp(c.Load.KVUsage, 0, 1) * total
	for i := range w.recent {
		if f := &w.recent[i]; f.routed <= w.sampled && f.done > w.sampled {
			used -= f.pages
		}
	}
	for _, e := range w.waiting {
		// Not yet in the sample: routed later, or still queued at that time.
		if e.routed > w.sampled || e.due-e.work > w.sampled {
			used += pages(e.tokens-e.cached, e.blockSize)
		}
	}
	for _, e := range w.running {
		if e.routed > w.sampled {
			used += pages(e.tokens-e.cached, e.blockSize)
		}
	}
	need := pages(c.Tokens, c.BlockSize)
	free := total - max(used, 0)
	if need <= free {
		return 0
	}
	// Blocks that requests in flight hold already need no room.
	need -= float64(w.overlap(c.Hashes, 0, false))
	if need <= free {
		return 0
	}
	type exit struct{ at, pages float64 }
	exits := make([]exit, 0, w.inFlight())
	step := speed.decodeStep(b, ctx) * slow
	for _, e := range w.running {
		rest := max(s.outputOf(e)-(t-e.first)/step, s.outputOf(e)/4)
		exits = append(exits, exit{rest * step, pages(e.tokens-e.cached, e.blockSize)})
	}
	for _, e := range w.waiting {
		exits = append(exits, exit{max(0, e.due-t) + s.outputOf(e)*step, pages(e.tokens-e.cached, e.blockSize)})
	}
	slices.SortFunc(exits, func(a, b exit) int {
		if a.at < b.at {
			return -1
		}
		return 1
	})
	for _, x := range exits {
		if free += x.pages; need <= free {
			return min(x.at, maxPagesWait)
		}
	}
	return maxPagesWait
}

// outputOf is the expected number of output tokens.
func (s *Scheduler) outputOf(e *entry) float64 {
	if e.maxTokens > 0 {
		return math.Min(s.output, float64(e.maxTokens))
	}
	return s.output
}
