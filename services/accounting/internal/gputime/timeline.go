package gputime

import (
	"cmp"
	"math"
	"slices"
)

// features of an interval: how much of each kind of work was in it.
const (
	fStep = iota // steps that the floor decided
	fLaunch
	fToken
	fAttention
	fSequence
	fContext
	fLatency // requests that were on their way there and back
	features
)

// span is what was computed in one interval, in seconds by the weights.
type span struct {
	shares []Share
	x      [features]float64
}

// job is a request on one worker's timeline.
type job struct {
	index            int
	prefill          float64 // when its prefill began
	first, end       float64
	uncached, cached float64
	generated        float64 // tokens after the first
	raw              float64 // generated tokens by the weights, before scaling

	began      float64 // when its prefill may have begun
	queued     bool    // behind the prefill of another
	work, wait [features]float64
}

// timeline sweeps over a worker's time and adds up the work of each interval.
//
// Of a request only three moments are known. An engine takes prompts in turn, so
// a prefill began when the one before it had made its first token, or when the
// request came, or as long before its own first token as its work takes,
// whichever is latest. Generated tokens come one a step; how fast steps go
// depends on whether a prompt is computed beside them, which is why tokens are
// laid out twice: once by the weights alone, then scaled to the number that came.
func timeline(w Weights, worker string, requests []Request, intervals []Interval) ([]span, []*job) {
	out := make([]span, len(intervals))
	if len(intervals) == 0 {
		return out, nil
	}
	jobs := arrange(w, worker, requests, intervals[0].From, intervals[len(intervals)-1].To)
	sweep(w, jobs, intervals, func(_ int, s *segment) {
		for _, j := range s.decoding {
			j.raw += s.tokens
		}
	})
	sums := make([]map[int]*Share, len(out))
	sweep(w, jobs, intervals, func(i int, s *segment) {
		if i < 0 {
			return
		}
		if sums[i] == nil {
			sums[i] = map[int]*Share{}
		}
		s.charge(w, &out[i].x, func(j *job, prefill, decode float64) {
			sh := sums[i][j.index]
			if sh == nil {
				sh = &Share{Request: j.index}
				sums[i][j.index] = sh
			}
			sh.Prefill += prefill
			sh.Decode += decode
		})
	})
	for i := range sums {
		for _, sh := range sums[i] {
			out[i].shares = append(out[i].shares, *sh)
		}
		slices.SortFunc(out[i].shares, func(a, b Share) int { return cmp.Compare(a.Request, b.Request) })
	}
	return out, jobs
}

// arrange makes the jobs of a worker whose time overlaps from..to.
func arrange(w Weights, worker string, requests []Request, from, to float64) []*job {
	var jobs []*job
	for i := range requests {
		r := &requests[i]
		if r.Worker != worker || !r.finite() {
			continue
		}
		first, end := r.First, max(r.End, r.First, r.Sent)
		if first < r.Sent || first > end {
			first = end // it never made a token: what it used was for its prompt
		}
		if end <= from || r.Sent >= to {
			continue
		}
		jobs = append(jobs, &job{
			index: i, prefill: min(r.Sent, first), first: first, end: end,
			uncached: float64(max(r.Uncached, 1)), cached: float64(max(r.Cached, 0)), generated: float64(max(r.Output-1, 0)),
		})
	}
	slices.SortStableFunc(jobs, func(a, b *job) int { return cmp.Compare(a.first, b.first) })
	const same = 1e-3 // first tokens closer together than this are of one step
	before, last := math.Inf(-1), math.Inf(-1)
	var decoding []*job
	v := w.vector()
	for _, j := range jobs {
		if j.first > last+same {
			before = last
		}
		last = max(last, j.first)
		decoding = slices.DeleteFunc(decoding, func(d *job) bool { return d.end <= j.first })
		j.queued = before > j.prefill
		j.began = max(j.prefill, before)
		j.work, j.wait = w.prefill(j, decoding)
		work := dot(j.work, v)
		j.prefill = min(j.began+dot(j.wait, v), j.first)
		if j.first-j.prefill > patience*work { // it waited for memory, not for others' prompts
			j.prefill = j.first - work
		}
		decoding = append(decoding, j)
	}
	return jobs
}

// patience is how much longer than its work the prefill of a request may seem.
const patience = 1.25

// prefill is the work of the prefill of j beside requests that generate, and how
// much of a step it waits for before.
func (w *Weights) prefill(j *job, beside []*job) (work, wait [features]float64) {
	b, context := float64(len(beside)), 0.0
	for _, d := range beside {
		context += d.cached + d.uncached + d.generated*min(max((j.first-d.first)/max(d.end-d.first, 1e-9), 0), 1)
	}
	room := max(float64(w.Batch)-b, 1)
	steps := j.uncached / room // what is left of the last one is for the next in the queue
	if !j.queued {
		steps = math.Ceil(steps)
	}
	work = [features]float64{fLaunch: steps, fToken: j.uncached + b*steps, fAttention: j.attention(), fSequence: b * steps, fContext: context * steps}
	if !j.queued {
		if last := j.uncached - (steps-1)*room + b; last*w.Token < w.Step-w.Launch {
			work[fToken] -= last
			work[fLaunch]--
			work[fStep]++
		}
		wait[fLatency] = 1
		if b > 0 {
			wait[fStep], wait[fSequence], wait[fContext] = .5, b/2, context/2
		}
	}
	return work, wait
}

// attention is the number of pairs of a prompt's new tokens and those before them.
func (j *job) attention() float64 { return j.uncached * (j.cached + j.uncached/2) }

// segment is a span of time in which the same requests are at the same work.
type segment struct {
	from, to            float64
	prefilling          []*job
	decoding            []*job
	steps, tokens, fill float64 // steps; tokens of one decoding request; tokens of prompts
}

// sweep calls f for each segment with the number of its interval, -1 for those
// in none. Segments outside still matter: requests reach over the edges.
func sweep(w Weights, jobs []*job, intervals []Interval, f func(interval int, s *segment)) {
	type edge struct {
		at   float64
		kind int // 0: ends decoding, 1: ends prefill and decodes, 2: begins prefill, 3: nothing
		j    *job
	}
	edges := make([]edge, 0, 3*len(jobs)+2*len(intervals))
	for _, j := range jobs {
		edges = append(edges, edge{j.prefill, 2, j}, edge{j.first, 1, j}, edge{j.end, 0, j})
	}
	for _, iv := range intervals {
		edges = append(edges, edge{iv.From, 3, nil}, edge{iv.To, 3, nil})
	}
	slices.SortStableFunc(edges, func(a, b edge) int { return cmp.Compare(a.at, b.at) })
	s := &segment{}
	at, which := math.Inf(-1), 0
	for _, e := range edges {
		if e.at > at && len(s.prefilling)+len(s.decoding) > 0 {
			s.from, s.to = at, e.at
			s.pace(w)
			for which < len(intervals) && intervals[which].To <= at {
				which++
			}
			i := -1
			if which < len(intervals) && intervals[which].From <= at {
				i = which
			}
			f(i, s)
		}
		at = e.at
		switch e.kind {
		case 0:
			s.decoding = remove(s.decoding, e.j)
			s.prefilling = remove(s.prefilling, e.j) // of one without length
		case 1:
			s.prefilling = remove(s.prefilling, e.j)
			if e.j.end > e.j.first {
				s.decoding = append(s.decoding, e.j)
			}
		case 2:
			if e.j.first > e.j.prefill {
				s.prefilling = append(s.prefilling, e.j)
			}
		}
	}
}

func remove(list []*job, j *job) []*job {
	if i := slices.Index(list, j); i >= 0 {
		return slices.Delete(list, i, i+1)
	}
	return list
}

// context is the mean number of tokens before those that j generates in s.
func (s *segment) context(j *job) float64 {
	done := 0.0
	if j.end > j.first {
		done = ((s.from+s.to)/2 - j.first) / (j.end - j.first)
	}
	return j.cached + j.uncached + done*j.generated
}

// pace tells how many steps a segment had.
func (s *segment) pace(w Weights) {
	dt, b := s.to-s.from, float64(len(s.decoding))
	s.fill, s.steps = 0, 0
	if len(s.prefilling) == 0 {
		step := max(w.Step, b*w.Token+w.Launch) + b*w.Sequence
		for _, j := range s.decoding {
			step += s.context(j) * w.Context
		}
		s.steps = dt / step
		s.tokens = s.steps
		return
	}
	for _, j := range s.prefilling {
		rate := 1 / (j.first - j.prefill)
		s.fill += j.uncached * rate * dt
		s.steps = max(s.steps, rate*dt)
	}
	s.steps = max(s.steps, s.fill/max(float64(w.Batch)-b, 1))
	s.tokens = s.steps
}

// of is how many tokens j generated in s.
func (s *segment) of(j *job) float64 {
	if j.raw <= 0 {
		return 0
	}
	return s.tokens * j.generated / j.raw
}

// charge divides the work of a segment among its requests, and adds it up by kind.
// What serves all tokens alike is divided by tokens, the launch evenly, and what
// one caused goes to it alone.
func (s *segment) charge(w Weights, x *[features]float64, to func(j *job, prefill, decode float64)) {
	dt := s.to - s.from
	tokens := s.fill
	for _, j := range s.decoding {
		tokens += s.of(j)
	}
	steps := s.steps
	if len(s.prefilling) == 0 && len(s.decoding) > 0 {
		// One token a step of each: their number tells how many steps there were.
		steps = tokens / float64(len(s.decoding))
	}
	launch := steps * w.Launch
	dense := steps * (w.Step - w.Launch)
	if tokens*w.Token > dense {
		dense = tokens * w.Token
		x[fToken] += tokens
		x[fLaunch] += steps
	} else {
		x[fStep] += steps
	}
	perToken := dense / max(tokens, 1e-12)
	each := launch / float64(len(s.prefilling)+len(s.decoding))
	for _, j := range s.prefilling {
		part := dt / (j.first - j.prefill)
		pairs := j.attention() * part
		x[fAttention] += pairs
		to(j, j.uncached*part*perToken+each+pairs*w.Attention, 0)
	}
	for _, j := range s.decoding {
		n := s.of(j)
		context := n * s.context(j)
		x[fSequence] += n
		x[fContext] += context
		to(j, 0, n*perToken+each+n*w.Sequence+context*w.Context)
	}
}
