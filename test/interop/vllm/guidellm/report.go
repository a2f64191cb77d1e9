package guidellm

import (
	"encoding/json"
	"errors"
	"fmt"
)

// Dist is a distribution over the requests of a run, in seconds.
type Dist struct{ P50, P90, P99, Mean float64 }

// Report is what GuideLLM measured in one run.
type Report struct {
	Version string
	// Completed and Failed count all requests; Error is the first failure.
	Completed, Failed int
	Error             string
	// Measured requests are those behind the warm-up; the figures below are theirs.
	Measured       int
	TTFT, ITL, E2E Dist
	// RPS is completed requests a second.
	RPS float64
	// Prompt and Cached are the tokens that the engines reported to the client
	// in all requests, warm-up included.
	Prompt, Cached int
	// Longest is the longest hit of a request in tokens.
	Longest int
}

// dist is GuideLLM's form of a metric. Values of requests that completed only.
type dist struct {
	Successful struct {
		Mean        float64
		Count       int
		Percentiles struct{ P50, P90, P99 float64 }
	}
}

func (d dist) times(unit float64) Dist {
	s := d.Successful
	return Dist{s.Percentiles.P50 * unit, s.Percentiles.P90 * unit, s.Percentiles.P99 * unit, s.Mean * unit}
}

// Parse reads the JSON report of GuideLLM 0.8 with one benchmark in it.
func Parse(raw []byte) (Report, error) {
	type request struct {
		Prompt int `json:"prompt_tokens"`
		Cached int `json:"cached_tokens"`
		Info   struct{ Error string }
	}
	var file struct {
		Metadata struct {
			Version string `json:"guidellm_version"`
		}
		Benchmarks []struct {
			Metrics struct {
				RPS  dist `json:"requests_per_second"`
				E2E  dist `json:"request_latency"`
				TTFT dist `json:"time_to_first_token_ms"`
				ITL  dist `json:"inter_token_latency_ms"`
			}
			Requests struct{ Successful, Errored, Incomplete []request }
		}
	}
	if err := json.Unmarshal(raw, &file); err != nil {
		return Report{}, fmt.Errorf("parse the report: %w", err)
	}
	if n := len(file.Benchmarks); n != 1 {
		return Report{}, fmt.Errorf("the report has %d benchmarks, want 1", n)
	}
	b := file.Benchmarks[0]
	m := b.Metrics
	r := Report{Version: file.Metadata.Version, Completed: len(b.Requests.Successful), Measured: m.TTFT.Successful.Count,
		TTFT: m.TTFT.times(1e-3), ITL: m.ITL.times(1e-3), E2E: m.E2E.times(1), RPS: m.RPS.Successful.Mean}
	for _, q := range b.Requests.Successful {
		r.Prompt += q.Prompt
		r.Cached += q.Cached
		r.Longest = max(r.Longest, q.Cached)
	}
	for _, q := range append(b.Requests.Errored, b.Requests.Incomplete...) {
		r.Failed++
		if r.Error == "" {
			r.Error = q.Info.Error
		}
	}
	if r.Measured == 0 {
		return r, errors.New("the report measures no request")
	}
	return r, nil
}
