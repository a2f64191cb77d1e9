package vllm_test

import (
	"maps"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// metricsPage is one side's page: types by family, values by series.
type metricsPage struct {
	types  map[string]string
	values map[string]float64
}

const cacheConfig, adapterInfo = "vllm:cache_config_info{", "vllm:lora_requests_info{"

// labels are those of the series with that prefix.
func (p metricsPage) labels(prefix string) map[string]string {
	out := map[string]string{}
	for series := range p.values {
		if !strings.HasPrefix(series, prefix) {
			continue
		}
		for _, m := range label.FindAllStringSubmatch(series, -1) {
			out[m[1]] = m[2]
		}
	}
	return out
}

var label = regexp.MustCompile(`(\w+)="((?:[^"\\]|\\.)*)"`)

// metrics reads a side's page. Labels are put in order.
func (s *twin) metrics(t *testing.T) metricsPage {
	t.Helper()
	p := metricsPage{map[string]string{}, map[string]float64{}}
	for line := range strings.Lines(s.do(t, diffCall{path: "/metrics"}).body) {
		line = strings.TrimSpace(line)
		if rest, ok := strings.CutPrefix(line, "# TYPE "); ok {
			name, kind, _ := strings.Cut(rest, " ")
			p.types[name] = kind
		}
		if !strings.HasPrefix(line, "vllm:") {
			continue
		}
		i := strings.LastIndexByte(line, ' ')
		v, err := strconv.ParseFloat(line[i+1:], 64)
		if err != nil {
			t.Fatalf("%s: %q", s.name, line)
		}
		name, labels, _ := strings.Cut(line[:i], "{")
		pairs := label.FindAllString(labels, -1)
		slices.Sort(pairs)
		p.values[name+"{"+strings.Join(pairs, ",")+"}"] = v
	}
	return p
}

// pages compares the forms of both pages: all that the simulated one has is on
// the real one, with the same types, labels and buckets.
func (p *twins) pages(t *testing.T) {
	real, sim := p.real.metrics(t), p.sim.metrics(t)
	for name, kind := range sim.types {
		if real.types[name] != kind {
			t.Errorf("%s is a %s, really %q", name, kind, real.types[name])
		}
	}
	for series := range sim.values {
		switch {
		case strings.HasPrefix(series, cacheConfig), strings.HasPrefix(series, adapterInfo):
			continue // below
		}
		if _, ok := real.values[series]; !ok {
			t.Errorf("%s is not on the real page", series)
		}
	}
	theirs := real.labels(cacheConfig)
	for name, v := range sim.labels(cacheConfig) {
		if name == "num_gpu_blocks" || name == "kv_cache_size_tokens" {
			// The engine counts its null block, which holds no tokens.
			one := map[string]int{"num_gpu_blocks": 1, "kv_cache_size_tokens": p.block}[name]
			n, err := strconv.Atoi(v)
			if err != nil {
				t.Fatal(err)
			}
			v = strconv.Itoa(n + one)
		}
		if theirs[name] != v {
			t.Errorf("cache_config_info: %s is %q, really %q", name, v, theirs[name])
		}
	}
	keys := func(m map[string]string) []string { return slices.Sorted(maps.Keys(m)) }
	if d := cmp.Diff(keys(real.labels(adapterInfo)), keys(sim.labels(adapterInfo))); d != "" {
		t.Errorf("labels of lora_requests_info (-real +sim):\n%s", d)
	}
}

// counts are the families whose values do not depend on time.
var counts = []string{
	"prompt_tokens_total", "generation_tokens_total", "prefix_cache_queries_total", "prefix_cache_hits_total", "prompt_tokens_by_source_total", "prompt_tokens_cached_total",
	"num_preemptions_total", "request_success_total", "request_prompt_tokens", "request_generation_tokens", "request_prefill_kv_computed_tokens", "iteration_tokens_total",
	"time_to_first_token_seconds_count", "inter_token_latency_seconds_count", "e2e_request_latency_seconds_count", "request_queue_time_seconds_count",
	"request_time_per_output_token_seconds_count", "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "engine_sleep_state",
	"external_prefix_cache_queries_total",
}

// counters compares the values that the same requests must give.
func (p *twins) counters(t *testing.T) {
	p.pages(t)
	real, sim := p.real.metrics(t), p.sim.metrics(t)
	compared := 0
	for _, series := range slices.Sorted(maps.Keys(sim.values)) {
		name := strings.TrimPrefix(series, "vllm:")
		for _, family := range counts {
			rest, ok := strings.CutPrefix(name, family)
			if !ok || rest[0] != '{' && rest[0] != '_' {
				continue
			}
			compared++
			if r, s := rounded(real.values[series]), rounded(sim.values[series]); r != s {
				t.Errorf("%s: real %v, sim %v", series, r, s)
			}
		}
	}
	if real.values[`vllm:num_preemptions_total{engine="0",model_name="qwen"}`] == 0 {
		t.Error("nothing was preempted")
	}
	t.Logf("%d series compared", compared)
}

func rounded(v float64) float64 { return math.Round(v*1e6) / 1e6 }
