package gputime

import (
	"cmp"
	"math"
	"slices"
)

// Fit tells how well weights explain what was observed.
type Fit struct {
	// Intervals that were used.
	Intervals int
	// Error is the mean deviation of explained from observed busy time, as a share
	// of that.
	Error float64
}

// Constants of the fit: how far an interval may be off by chance, and how far a
// weight may be off its prior beside what all are. Own choices: the first is what
// sampling an engine twice a second does to intervals of 15 s.
const (
	rounds   = 6
	noise    = 0.02
	apart    = 0.7
	farthest = 8   // times more or less than the prior, beside what all are
	slowest  = 100 // and what all may be
	// enough intervals or prefills of the better kind do without the others.
	enough = 20
	// full is the share of the KV cache in use beyond which requests may wait for it.
	full = 0.9
	// minBusy is the share of an interval that must be busy to teach anything.
	minBusy = 0.1
)

// Calibrate learns the weights of one class of workers from intervals of its
// workers and their requests: the least squares of observed busy time, held near
// the prior where observations say little. With nothing to learn from it returns
// the prior.
func Calibrate(prior Weights, requests []Request, intervals []Interval) (Weights, Fit) {
	w := prior
	var fit Fit
	if calm := slices.DeleteFunc(slices.Clone(intervals), func(iv Interval) bool { return iv.Memory > full }); len(calm) >= enough {
		intervals = calm
	}
	for range rounds {
		var rows []row
		var prefills []*job
		for worker, at := range byWorker(intervals) {
			of := intervals[:0:0]
			for _, i := range at {
				of = append(of, intervals[i])
			}
			spans, jobs := timeline(w, worker, requests, of)
			prefills = append(prefills, jobs...)
			for k, sp := range spans {
				iv := of[k]
				if iv.Busy > minBusy*(iv.To-iv.From) && len(sp.shares) > 0 {
					rows = append(rows, row{x: sp.x, seconds: iv.Busy, deviate: noise * iv.Busy})
				}
			}
		}
		if len(rows) == 0 {
			return prior, Fit{}
		}
		seen := len(rows)
		rows = append(rows, prefillRows(w, prefills)...)
		next := solve(prior, rows)
		// Where requests waited for memory or had to give way the work is not what it
		// seems: what is far off counts less (least absolute deviations).
		for range 5 {
			for i := range rows {
				off := math.Abs(dot(rows[i].x, next.vector())/rows[i].seconds - 1)
				rows[i].doubt = max(math.Sqrt(off/noise), .5)
			}
			next = solve(prior, rows)
		}
		w = next
		fit = Fit{Intervals: seen}
		for _, r := range rows[:seen] {
			fit.Error += math.Abs(dot(r.x, w.vector())-r.seconds) / r.seconds / float64(seen)
		}
	}
	return w, fit
}

// row is an observation: work, and how long it took, give or take.
type row struct {
	x                [features]float64
	seconds, deviate float64
	ratio            float64 // of the seconds to what the weights say
	doubt            float64 // factor on deviate; 0: 1
}

// prefillRows are the observations of single prefills. Those that waited for no
// other one took their work and no longer. Behind others a request may also wait
// for memory, for an unknown time: where there are too few of the first kind, those
// large ones are taken that took least for their work.
func prefillRows(w Weights, jobs []*job) []row {
	free := observed(w, jobs, false, float64(w.Batch)/4)
	if kept := near(free, .5, .2, noise); len(kept) >= enough {
		return kept
	}
	return append(near(free, .5, .2, noise), near(observed(w, jobs, true, 2*float64(w.Batch)), .1, .1, 3*noise)...)
}

// observed are the prefills of requests with at least some tokens to compute, and
// how long each took.
func observed(w Weights, jobs []*job, queued bool, least float64) []row {
	var rows []row
	for _, j := range jobs {
		if j.queued != queued || j.uncached < least || j.end <= j.first || j.first <= j.began {
			continue
		}
		r := row{x: j.work, seconds: j.first - j.began}
		for k := range r.x {
			r.x[k] += j.wait[k]
		}
		r.ratio = r.seconds / dot(r.x, w.vector())
		rows = append(rows, r)
	}
	return rows
}

// near keeps the rows whose ratio of time and work is near that of a quantile.
func near(rows []row, quantile, band, deviate float64) []row {
	if len(rows) == 0 {
		return nil
	}
	slices.SortFunc(rows, func(a, b row) int { return cmp.Compare(a.ratio, b.ratio) })
	usual := rows[int(quantile*float64(len(rows)-1))].ratio
	kept := rows[:0]
	for _, r := range rows {
		if math.Abs(r.ratio/usual-1) <= band {
			r.deviate = deviate * r.seconds
			kept = append(kept, r)
		}
	}
	return kept
}

func (w Weights) vector() [features]float64 {
	return [features]float64{fStep: w.Step, fLaunch: w.Launch, fToken: w.Token, fAttention: w.Attention, fSequence: w.Sequence, fContext: w.Context, fLatency: w.Latency}
}

func dot(a, b [features]float64) (sum float64) {
	for i := range a {
		sum += a[i] * b[i]
	}
	return sum
}

// solve finds factors on the prior: first one for all, then each near that.
func solve(prior Weights, rows []row) Weights {
	p := prior.vector()
	all, explained := 0.0, 0.0
	for _, r := range rows {
		all += r.seconds
		explained += dot(r.x, p)
	}
	slow := min(max(all/max(explained, 1e-12), 1.0/slowest), slowest)
	var a [features][features + 1]float64
	for k := range features {
		pull := 1 / (apart * slow) / (apart * slow)
		a[k][k] = pull
		a[k][features] = pull * slow
	}
	for _, r := range rows {
		d := r.deviate * cmp.Or(r.doubt, 1)
		for k := range features {
			v := r.x[k] * p[k] / d / d
			for m := range features {
				a[k][m] += v * r.x[m] * p[m]
			}
			a[k][features] += v * r.seconds
		}
	}
	factors := eliminate(a)
	for k := range factors {
		factors[k] = min(max(factors[k], slow/farthest), slow*farthest)
	}
	w := prior
	w.Step, w.Launch, w.Token = p[fStep]*factors[fStep], p[fLaunch]*factors[fLaunch], p[fToken]*factors[fToken]
	w.Attention, w.Sequence, w.Context = p[fAttention]*factors[fAttention], p[fSequence]*factors[fSequence], p[fContext]*factors[fContext]
	w.Latency = p[fLatency] * factors[fLatency]
	w.Launch = min(w.Launch, w.Step)
	return w
}

// eliminate solves a symmetric positive system.
func eliminate(a [features][features + 1]float64) (out [features]float64) {
	for k := range features {
		best := k
		for i := k + 1; i < features; i++ {
			if math.Abs(a[i][k]) > math.Abs(a[best][k]) {
				best = i
			}
		}
		a[k], a[best] = a[best], a[k]
		if a[k][k] == 0 {
			continue
		}
		for i := range features {
			if i == k {
				continue
			}
			f := a[i][k] / a[k][k]
			for m := k; m <= features; m++ {
				a[i][m] -= f * a[k][m]
			}
		}
	}
	for k := range features {
		if a[k][k] != 0 {
			out[k] = a[k][features] / a[k][k]
		}
	}
	return out
}
