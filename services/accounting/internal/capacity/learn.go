package capacity

import (
	"cmp"
	"maps"
	"math"
	"slices"

	"github.com/kinference/kinference/services/accounting/internal/gputime"
)

// Learn learns a class from what was observed of its workers: requests and the
// states of the workers that had them. intervals are those of the states.
func Learn(prior gputime.Weights, requests []gputime.Request, states []gputime.State, intervals []gputime.Interval) (Class, gputime.Fit) {
	w, fit := gputime.Calibrate(prior, requests, intervals)
	c := Class{Weights: w}
	c.learnMemory(requests, states)
	return c, fit
}

// guesses are the numbers of prefixes that are tried; 0: each request has its own.
var guesses = []float64{0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64}

// held is one observation of the KV cache.
type held struct {
	usage, running, own, hits, found float64
}

// learnMemory explains the share of the KV cache in use by the requests that ran,
// their tokens and the prefixes that they share: least squares, nothing below 0.
func (c *Class) learnMemory(requests []gputime.Request, states []gputime.State) {
	list := observations(requests, states)
	best := math.Inf(1)
	for _, prefixes := range guesses {
		var a [2][2]float64
		var b [2]float64
		tokens := func(h held) float64 { return h.own + h.found/max(h.hits, 1)*distinct(h.hits, prefixes) }
		for _, h := range list {
			x := [2]float64{h.running, tokens(h)}
			for i := range x {
				for j := range x {
					a[i][j] += x[i] * x[j]
				}
				b[i] += x[i] * h.usage
			}
		}
		v := nonnegative(a, b)
		off := 0.0
		for _, h := range list {
			d := v[0]*h.running + v[1]*tokens(h) - h.usage
			off += d * d
		}
		// Another number must explain more than chance does.
		if off < .98*best {
			best = off
			c.KVRequest, c.KVToken, c.Prefixes = v[0], v[1], prefixes
		}
	}
}

func observations(requests []gputime.Request, states []gputime.State) (out []held) {
	byWorker := map[string][]gputime.State{}
	for _, s := range states {
		if s.Running > 0 && s.KVUsage > 0 {
			byWorker[s.Worker] = append(byWorker[s.Worker], s)
		}
	}
	for _, worker := range slices.Sorted(maps.Keys(byWorker)) {
		list := byWorker[worker]
		slices.SortFunc(list, func(x, y gputime.State) int { return cmp.Compare(x.At, y.At) })
		var mine []gputime.Request
		for _, r := range requests {
			if r.Worker == worker && r.End > r.Sent {
				mine = append(mine, r)
			}
		}
		slices.SortFunc(mine, func(x, y gputime.Request) int { return cmp.Compare(x.First, y.First) })
		var running []gputime.Request
		next := 0
		for _, s := range list {
			for next < len(mine) && mine[next].First <= s.At {
				running = append(running, mine[next])
				next++
			}
			running = slices.DeleteFunc(running, func(r gputime.Request) bool { return r.End <= s.At })
			if len(running) == 0 || math.Abs(float64(len(running))-s.Running) > .3*s.Running {
				continue // others are there, or many prompts are only being computed
			}
			h := held{usage: s.KVUsage, running: float64(len(running))}
			for _, r := range running {
				done := min(max((s.At-r.First)/max(r.End-r.First, 1e-9), 0), 1)
				h.own += float64(r.Uncached) + done*float64(r.Output)
				if r.Cached > 0 {
					h.hits++
					h.found += float64(r.Cached)
				}
			}
			out = append(out, h)
		}
	}
	return out
}

// nonnegative minimises the squares under x >= 0, one unknown at a time.
func nonnegative(a [2][2]float64, b [2]float64) (x [2]float64) {
	for range 2000 {
		for i := range x {
			if a[i][i] > 0 {
				x[i] = max((b[i]-a[i][1-i]*x[1-i])/a[i][i], 0)
			}
		}
	}
	return x
}
