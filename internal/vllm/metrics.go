package vllm

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"strconv"
)

// Bounds of what ParseMetrics reads. A real page has 50 to 200 kB.
const (
	// MaxMetrics is the largest page in bytes.
	MaxMetrics = 16 << 20
	// maxEngines bounds the engines on one page.
	maxEngines = 1 << 12
)

// ErrNoMetrics is returned for a page without any series of an engine.
var ErrNoMetrics = errors.New("no vllm metrics")

// Metrics is what the control plane reads of one engine (rank). Series that are
// missing leave 0. Gauges are refreshed once per engine step, so they are the
// last values of an idle or stuck engine.
type Metrics struct {
	// Running and Waiting count requests.
	Running, Waiting float64
	// KVUsage is the share of blocks in use by running requests, 0 to 1; blocks
	// that are only cached count as free.
	KVUsage float64
	// Cumulative counters in tokens.
	PrefixQueries, PrefixHits     float64
	ExternalQueries, ExternalHits float64
	PromptTokens, OutputTokens    float64
	// Preemptions counts requests that were evicted and recomputed.
	Preemptions float64
	// BlockSize in tokens, NumBlocks of GPU memory. vLLM shows the blocks of all
	// engines of a page together at each of them; this is the engine's share.
	BlockSize, NumBlocks int
	// KVCacheTokens is how many tokens fit; blocks times size is wrong for hybrid
	// models. 0 on engines before v0.24.
	KVCacheTokens int
	// Sleeping is true while weights are offloaded or discarded.
	Sleeping bool
}

// ParseMetrics reads the page of /metrics: one entry per value of the engine
// label, which is the data-parallel rank, and is taken as 0 where it is absent.
// Series of old versions (gpu_cache_usage_perc) are known too. Lines that are
// not understood are skipped; of equal series the last one wins.
func ParseMetrics(text []byte) (map[int]Metrics, error) {
	if len(text) > MaxMetrics {
		return nil, fmt.Errorf("metrics page of %d bytes is too large", len(text))
	}
	engines := make(map[int]Metrics, 1)
	rank, current := -1, Metrics{}
	for len(text) > 0 {
		line := text
		if end := bytes.IndexByte(text, '\n'); end >= 0 {
			line, text = text[:end], text[end+1:]
		} else {
			text = nil
		}
		s, ok := parseSeries(line)
		if !ok {
			continue
		}
		// Few engines share a page: keep the current one out of the map.
		if s.engine != rank {
			if rank >= 0 {
				engines[rank] = current
			}
			if _, known := engines[s.engine]; !known && len(engines) >= maxEngines {
				rank = -1
				continue
			}
			rank, current = s.engine, engines[s.engine]
		}
		s.apply(&current)
	}
	if rank >= 0 {
		engines[rank] = current
	}
	if len(engines) == 0 {
		return nil, ErrNoMetrics
	}
	share(engines)
	return engines, nil
}

// share divides the blocks, which are those of all engines.
func share(engines map[int]Metrics) {
	n := 0
	for _, m := range engines {
		if m.NumBlocks > 0 {
			n++
		}
	}
	for rank, m := range engines {
		if n > 1 {
			m.NumBlocks /= n
			engines[rank] = m
		}
	}
}

type series uint8

const (
	seriesNone series = iota
	seriesRunning
	seriesWaiting
	seriesUsage
	seriesQueries
	seriesHits
	seriesExternalQueries
	seriesExternalHits
	seriesPrompt
	seriesOutput
	seriesPreemptions
	seriesSleep
	seriesConfig
)

// seriesByName knows names without the vllm: prefix.
func seriesByName(name []byte) series {
	switch string(name) {
	case "num_requests_running":
		return seriesRunning
	case "num_requests_waiting":
		return seriesWaiting
	case "kv_cache_usage_perc", "gpu_cache_usage_perc":
		return seriesUsage
	case "prefix_cache_queries_total", "prefix_cache_queries", "gpu_prefix_cache_queries_total", "gpu_prefix_cache_queries":
		return seriesQueries
	case "prefix_cache_hits_total", "prefix_cache_hits", "gpu_prefix_cache_hits_total", "gpu_prefix_cache_hits":
		return seriesHits
	case "external_prefix_cache_queries_total":
		return seriesExternalQueries
	case "external_prefix_cache_hits_total":
		return seriesExternalHits
	case "prompt_tokens_total":
		return seriesPrompt
	case "generation_tokens_total":
		return seriesOutput
	case "num_preemptions_total":
		return seriesPreemptions
	case "engine_sleep_state":
		return seriesSleep
	case "cache_config_info":
		return seriesConfig
	}
	return seriesNone
}

// sample is one parsed line.
type sample struct {
	series series
	engine int
	value  float64
	// Labels of engine_sleep_state and cache_config_info.
	awake                    bool
	blockSize, blocks, total int
}

var vllmPrefix = []byte("vllm:")

// parseSeries parses a line of the text format if it holds a series of interest.
func parseSeries(line []byte) (s sample, ok bool) {
	line, ok = bytes.CutPrefix(line, vllmPrefix)
	if !ok {
		return s, false
	}
	end := bytes.IndexAny(line, "{ \t")
	if end < 0 {
		return s, false
	}
	if s.series = seriesByName(line[:end]); s.series == seriesNone {
		return s, false
	}
	line = line[end:]
	if line[0] == '{' {
		if line, ok = s.labels(line[1:]); !ok {
			return s, false
		}
	}
	line = bytes.TrimSpace(line)
	if end := bytes.IndexAny(line, " \t"); end >= 0 {
		line = line[:end] // a timestamp follows
	}
	v, err := strconv.ParseFloat(string(line), 64)
	// No series here is ever negative or infinite.
	if err != nil || !(v >= 0 && v <= math.MaxFloat64) {
		return s, false
	}
	s.value = v
	return s, true
}

// labels reads name="value" pairs up to the closing brace and returns the rest.
func (s *sample) labels(p []byte) (rest []byte, ok bool) {
	for {
		p = bytes.TrimLeft(p, ", \t")
		if len(p) == 0 {
			return nil, false
		}
		if p[0] == '}' {
			return p[1:], true
		}
		eq := bytes.IndexByte(p, '=')
		if eq < 0 || eq+1 >= len(p) || p[eq+1] != '"' {
			return nil, false
		}
		name := p[:eq]
		p = p[eq+2:]
		// The values read here never hold escapes: only find the end.
		end := 0
		for end < len(p) && p[end] != '"' {
			if p[end] == '\\' {
				end++
			}
			end++
		}
		if end >= len(p) {
			return nil, false
		}
		if !s.label(name, p[:end]) {
			return nil, false
		}
		p = p[end+1:]
	}
}

func (s *sample) label(name, value []byte) bool {
	switch string(name) {
	case "engine":
		n, err := strconv.ParseUint(string(value), 10, 16)
		s.engine = int(n)
		return err == nil
	case "sleep_state":
		s.awake = string(value) == "awake"
	case "block_size":
		s.blockSize = count(value)
	case "num_gpu_blocks":
		s.blocks = count(value)
	case "kv_cache_size_tokens":
		s.total = count(value)
	}
	return true
}

// count parses a label that Python printed; "None" and nonsense are 0.
func count(value []byte) int {
	n, err := strconv.ParseUint(string(value), 10, 40)
	if err != nil {
		return 0
	}
	return int(n)
}

func (s *sample) apply(m *Metrics) {
	switch s.series {
	case seriesRunning:
		m.Running = s.value
	case seriesWaiting:
		m.Waiting = s.value
	case seriesUsage:
		m.KVUsage = min(s.value, 1)
	case seriesQueries:
		m.PrefixQueries = s.value
	case seriesHits:
		m.PrefixHits = s.value
	case seriesExternalQueries:
		m.ExternalQueries = s.value
	case seriesExternalHits:
		m.ExternalHits = s.value
	case seriesPrompt:
		m.PromptTokens = s.value
	case seriesOutput:
		m.OutputTokens = s.value
	case seriesPreemptions:
		m.Preemptions = s.value
	case seriesSleep:
		// One series per state; exactly one of them is 1.
		if s.value != 0 {
			m.Sleeping = !s.awake
		}
	case seriesConfig:
		if s.value != 0 {
			m.BlockSize, m.NumBlocks, m.KVCacheTokens = s.blockSize, s.blocks, s.total
		}
	}
}
