// Package gputime tells which request used how much of a worker's time.
//
// An engine computes many requests in one step, so its time has no owner. Here
// each interval of a worker's busy time is divided among its requests by the work
// that they caused: tokens of prompts that were not cached, what these attend to,
// and the decode steps, each shared by the requests in it. What such work costs
// is learned per class of workers (Calibrate). Time in which the worker did
// nothing is stated apart, and so is busy time that no request explains. The
// parts sum up to the time that passed.
//
// accounting calls it with the usage events of a span of time and the workers'
// states. All functions are pure and safe for concurrent use. Times are seconds
// from one origin. Bad input, such as an end before the start, is put right or
// left out, never fatal.
package gputime

import (
	"cmp"
	"math"
	"slices"

	"github.com/kinference/kinference/internal/schedule"
)

// Weights are what work costs, in seconds.
type Weights struct {
	// Step is the floor of a step: reading the weights and launching it.
	Step float64
	// Launch is the part of Step that every step costs, whatever it computes.
	Launch float64
	// Token is for a token of a prompt.
	Token float64
	// Attention is for a token of a prompt and a token before it.
	Attention float64
	// Sequence is for a generated token, Context for that and a token before it.
	Sequence, Context float64
	// Latency is what the way to the worker and back adds to the time of a prefill.
	Latency float64
	// Batch is the number of tokens that fit into one step.
	Batch int
}

// Prior are the weights of a class of workers before anything was learned.
func Prior(s schedule.Speed) Weights {
	return Weights{Step: s.W + s.Ovh, Launch: s.Ovh, Token: s.A, Attention: s.Q, Sequence: s.S, Context: s.K, Latency: latency, Batch: max(s.Chunk, 1)}
}

// latency in seconds, until it is known better.
const latency = 5e-3

// Request is what a usage event says of one.
type Request struct {
	Worker string
	// Sent is when it went to the worker, First when its first token came, End
	// when it was over. First is 0 if there was none.
	Sent, First, End float64
	// Uncached and Cached are tokens of the prompt, Output of the answer.
	Uncached, Cached, Output int
}

// Interval is a span of one worker's time. Busy is how much of it the worker
// computed, Memory the highest share of its KV cache that was in use: where there is
// none left requests wait and give way, and little can be learned.
type Interval struct {
	Worker                 string
	From, To, Busy, Memory float64
}

// Share is what one request used, in seconds.
type Share struct {
	Request         int // index
	Prefill, Decode float64
}

// Split is one interval divided. Shares, Other and Idle sum up to To − From.
type Split struct {
	Interval
	Shares []Share
	// Other is busy time that the requests do not explain: others use the worker,
	// or their events are not here yet.
	Other float64
	Idle  float64
}

// maxStretch is how many times longer than its work an interval may have been
// busy. What is beyond that was someone else's.
const maxStretch = 1.6

// Attribute divides intervals among requests. Intervals of one worker must not
// overlap. The splits have the order of the intervals, shares that of the requests.
func Attribute(w Weights, requests []Request, intervals []Interval) []Split {
	out := make([]Split, len(intervals))
	for worker, at := range byWorker(intervals) {
		of := intervals[:0:0]
		for _, i := range at {
			of = append(of, intervals[i])
		}
		spans, _ := timeline(w, worker, requests, of)
		for k, i := range at {
			out[i] = split(intervals[i], spans[k])
		}
	}
	return out
}

// byWorker lists the indices of each worker's intervals by time.
func byWorker(intervals []Interval) map[string][]int {
	out := map[string][]int{}
	for i := range intervals {
		out[intervals[i].Worker] = append(out[intervals[i].Worker], i)
	}
	for _, at := range out {
		slices.SortFunc(at, func(a, b int) int { return cmp.Compare(intervals[a].From, intervals[b].From) })
	}
	return out
}

func split(iv Interval, sp span) Split {
	wall := max(iv.To-iv.From, 0)
	iv.Busy = min(max(iv.Busy, 0), wall)
	s := Split{Interval: iv, Idle: wall - iv.Busy}
	caused := 0.0
	for _, sh := range sp.shares {
		caused += sh.Prefill + sh.Decode
	}
	if caused <= 0 {
		s.Other = iv.Busy
		return s
	}
	factor := min(iv.Busy/caused, maxStretch)
	s.Shares = make([]Share, 0, len(sp.shares))
	given := 0.0
	for _, sh := range sp.shares {
		sh.Prefill *= factor
		sh.Decode *= factor
		given += sh.Prefill + sh.Decode
		s.Shares = append(s.Shares, sh)
	}
	s.Other = max(iv.Busy-given, 0)
	slices.SortFunc(s.Shares, func(a, b Share) int { return cmp.Compare(a.Request, b.Request) })
	return s
}

// State is a sample of a worker's gauges.
type State struct {
	Worker string
	At     float64
	// Running and Waiting requests.
	Running, Waiting float64
	// KVUsage is the share of the KV cache in use.
	KVUsage float64
}

// Intervals makes intervals from samples, which end at multiples of a length: a worker
// is busy as long as it has requests. Each sample speaks for the time up to half way to its
// neighbours. Where samples are further apart than stale the time has no interval.
func Intervals(states []State, length, stale float64) []Interval {
	of := map[string][]State{}
	var names []string
	for _, s := range states {
		if of[s.Worker] == nil {
			names = append(names, s.Worker)
		}
		of[s.Worker] = append(of[s.Worker], s)
	}
	slices.Sort(names)
	var out []Interval
	for _, name := range names {
		list := of[name]
		slices.SortStableFunc(list, func(a, b State) int { return cmp.Compare(a.At, b.At) })
		var now *Interval
		end := 0.0 // of the interval
		for i := 1; i < len(list); i++ {
			a, b := list[i-1], list[i]
			if b.At-a.At > stale || b.At <= a.At {
				if b.At > a.At {
					now = nil
				}
				continue
			}
			busy := 0.0
			for _, s := range []State{a, b} {
				if s.Running+s.Waiting > 0 {
					busy += .5
				}
			}
			// What crosses the end of an interval is cut there.
			for from := a.At; from < b.At; {
				if now == nil || from >= end {
					out = append(out, Interval{Worker: name, From: from, To: from})
					now = &out[len(out)-1]
					end = (math.Floor(from/length) + 1) * length
				}
				to := min(b.At, end)
				if to <= from { // rounding
					to = b.At
				}
				now.Busy += busy * (to - from)
				now.Memory = max(now.Memory, a.KVUsage, b.KVUsage)
				now.To = to
				from = to
			}
		}
	}
	return out
}

// finite tells that a request's times can be used.
func (r *Request) finite() bool {
	for _, v := range []float64{r.Sent, r.First, r.End} {
		if math.IsNaN(v) || math.IsInf(v, 0) {
			return false
		}
	}
	return true
}
