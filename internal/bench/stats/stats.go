// Package stats turns the samples of a run into the figures that are
// published, in one way for virtual-time and wall-clock runs.
//
// All functions are pure and safe for concurrent use.
package stats

import (
	"math"
	"slices"
)

// Sample is one request as its client saw it. Times are seconds of simulated
// time, lengths are tokens.
type Sample struct {
	Index, Turn, Worker int
	// Tenant is 0 for those who make the load, else a light tenant beside them.
	Tenant int
	// Measured is false for the warm-up.
	Measured bool
	Failed   bool
	// Sent is when the client sent it, from the run's start.
	Sent, TTFT, E2E        float64
	Prompt, Output, Cached int
	// Matched is what the router knew to be in the chosen worker's cache,
	// Possible what was in it when the choice was made; -1 when unknown.
	Matched, Possible int
	// Predicted is the predicted TTFT: what the request had waited when it was
	// sent to a worker, and the rest.
	Predicted float64
	// Alone is the end-to-end time that it would take on an idle worker; 0 when
	// unknown.
	Alone float64
}

// Run is what one run measured.
type Run struct {
	Samples []Sample // in order of completion
	// FirstError is why the first request that failed did; "" if none failed.
	FirstError string
}

// Summary holds the published metrics of one run, or their means over seeds.
type Summary struct {
	TTFT50   float64 `json:"ttft_p50"`
	TTFT90   float64 `json:"ttft_p90"`
	TTFT99   float64 `json:"ttft_p99"`
	TTFTMean float64 `json:"ttft_mean"`
	E2E50    float64 `json:"e2e_p50"`
	E2E99    float64 `json:"e2e_p99"`
	// RPS is the rate of completions while all streams were busy: from the end
	// of the warm-up to the last send, so that neither filling nor draining
	// counts.
	RPS float64 `json:"rps"`
	// Hit is the share of prompt tokens that came from a cache.
	Hit float64 `json:"hit_rate"`
	// Light50 and Light99 are the TTFT of the light tenants, Jain the fairness
	// index over all tenants of the mean share of the best possible end-to-end
	// time (Sample.Alone) that each got; 0 without light tenants.
	Light50 float64 `json:"light_ttft_p50,omitempty"`
	Light99 float64 `json:"light_ttft_p99,omitempty"`
	Jain    float64 `json:"jain,omitempty"`
	// Off is the median distance of the predicted TTFT from the observed one in
	// seconds, OffShare that of the distance over the observed one; 0 without
	// predictions.
	Off      float64 `json:"error_s"`
	OffShare float64 `json:"error_share"`
	Requests int     `json:"requests"`
	Failed   int     `json:"failed,omitempty"`
	// FirstError is one of the reasons, for people.
	FirstError string `json:"-"`
}

// Failure notes a request's error, of which the first is kept.
func (r *Run) Failure(err error) {
	if r.FirstError == "" && err != nil {
		r.FirstError = err.Error()
	}
}

// Summarise computes a run's metrics over its measured requests.
func (r Run) Summarise() Summary {
	s := Summary{FirstError: r.FirstError}
	var ttft, e2e, light, off, share []float64
	tenants := map[int][]float64{}
	var prompt, cached, lastSent float64
	warm := 0.0
	for _, x := range r.Samples {
		lastSent = max(lastSent, x.Sent)
		if !x.Measured {
			warm = max(warm, x.Sent)
		}
	}
	completed := 0
	for _, x := range r.Samples {
		if end := x.Sent + x.E2E; !x.Failed && end > warm && end <= lastSent {
			completed++
		}
		if !x.Measured {
			continue
		}
		s.Requests++
		if x.Failed {
			s.Failed++
			continue
		}
		ttft, e2e = append(ttft, x.TTFT), append(e2e, x.E2E)
		if x.Predicted > 0 {
			off = append(off, math.Abs(x.Predicted-x.TTFT))
			share = append(share, math.Abs(x.Predicted-x.TTFT)/x.TTFT)
		}
		if x.Tenant > 0 {
			light = append(light, x.TTFT)
		}
		tenants[x.Tenant] = append(tenants[x.Tenant], x.Alone/x.E2E)
		prompt += float64(x.Prompt)
		cached += float64(x.Cached)
	}
	slices.Sort(ttft)
	slices.Sort(e2e)
	s.TTFT50, s.TTFT90, s.TTFT99 = Quantile(ttft, .5), Quantile(ttft, .9), Quantile(ttft, .99)
	s.TTFTMean = Mean(ttft)
	s.E2E50, s.E2E99 = Quantile(e2e, .5), Quantile(e2e, .99)
	if len(off) > 0 {
		s.Off, s.OffShare = Median(off), Median(share)
	}
	if len(light) > 0 {
		slices.Sort(light)
		s.Light50, s.Light99 = Quantile(light, .5), Quantile(light, .99)
		s.Jain = jain(tenants)
	}
	if lastSent > warm {
		s.RPS = float64(completed) / (lastSent - warm)
	}
	if prompt > 0 {
		s.Hit = cached / prompt
	}
	return s
}

// jain is Jain's index of the tenants' means: 1 when all fare alike, 1/n when one
// has everything.
func jain(tenants map[int][]float64) float64 {
	var sum, squares float64
	for _, v := range tenants {
		m := Mean(v)
		sum += m
		squares += m * m
	}
	if squares == 0 {
		return 0 // nobody knows the best possible times
	}
	return sum * sum / (float64(len(tenants)) * squares)
}

// Average is the mean of each metric over runs; the counts are summed.
func Average(runs []Summary) Summary {
	mean := func(f func(Summary) float64) float64 {
		var v []float64
		for _, r := range runs {
			v = append(v, f(r))
		}
		return Mean(v)
	}
	s := Summary{
		TTFT50: mean(func(s Summary) float64 { return s.TTFT50 }), TTFT90: mean(func(s Summary) float64 { return s.TTFT90 }),
		TTFT99: mean(func(s Summary) float64 { return s.TTFT99 }), TTFTMean: mean(func(s Summary) float64 { return s.TTFTMean }),
		E2E50: mean(func(s Summary) float64 { return s.E2E50 }), E2E99: mean(func(s Summary) float64 { return s.E2E99 }),
		RPS: mean(func(s Summary) float64 { return s.RPS }), Hit: mean(func(s Summary) float64 { return s.Hit }),
		Light50: mean(func(s Summary) float64 { return s.Light50 }), Light99: mean(func(s Summary) float64 { return s.Light99 }),
		Jain: mean(func(s Summary) float64 { return s.Jain }),
		Off:  mean(func(s Summary) float64 { return s.Off }), OffShare: mean(func(s Summary) float64 { return s.OffShare }),
	}
	for _, r := range runs {
		s.Requests += r.Requests
		s.Failed += r.Failed
		if s.FirstError == "" {
			s.FirstError = r.FirstError
		}
	}
	return s
}

// Quantile interpolates between the values of a sorted slice; NaN when empty.
func Quantile(sorted []float64, q float64) float64 {
	if len(sorted) == 0 {
		return math.NaN()
	}
	at := q * float64(len(sorted)-1)
	i := int(at)
	if i+1 >= len(sorted) {
		return sorted[len(sorted)-1]
	}
	return sorted[i] + (at-float64(i))*(sorted[i+1]-sorted[i])
}

// Mean is NaN when there is nothing.
func Mean(v []float64) float64 {
	if len(v) == 0 {
		return math.NaN()
	}
	sum := 0.0
	for _, x := range v {
		sum += x
	}
	return sum / float64(len(v))
}

// StandardError is that of the mean of v; NaN for less than two values.
func StandardError(v []float64) float64 {
	mean, squares := Mean(v), 0.0
	for _, x := range v {
		squares += (x - mean) * (x - mean)
	}
	n := float64(len(v))
	return math.Sqrt(squares / (n - 1) / n)
}

// Median is that of v in any order; v is not changed. NaN when empty.
func Median(v []float64) float64 {
	v = slices.Clone(v)
	slices.Sort(v)
	return Quantile(v, .5)
}
