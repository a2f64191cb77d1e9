package vllm_test

import (
	"bytes"
	"errors"
	"math"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"

	"github.com/kinference/kinference/internal/vllm"
)

// current has the forms of v0.24; older the ones of v0.8, before the renames.
const (
	current = `# HELP python_gc_objects_collected_total Objects collected during gc
# TYPE python_gc_objects_collected_total counter
python_gc_objects_collected_total{generation="0"} 12345.0
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 4.0
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 99.0
vllm:engine_sleep_state{engine="0",model_name="m",sleep_state="awake"} 1.0
vllm:engine_sleep_state{engine="0",model_name="m",sleep_state="weights_offloaded"} 0.0
vllm:engine_sleep_state{engine="0",model_name="m",sleep_state="discard_all"} 0.0
vllm:engine_sleep_state{engine="1",model_name="m",sleep_state="awake"} 0.0
vllm:engine_sleep_state{engine="1",model_name="m",sleep_state="weights_offloaded"} 1.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:prefix_cache_queries_total{engine="0",model_name="m"} 1.5e+06
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 1e6
vllm:external_prefix_cache_queries_total{engine="0",model_name="m"} 10.0
vllm:external_prefix_cache_hits_total{engine="0",model_name="m"} 5.0
vllm:prompt_tokens_total{engine="0",model_name="m"} 77.0
vllm:generation_tokens_total{engine="0",model_name="m"} 78.0
vllm:num_preemptions_total{engine="0",model_name="m"} 6.0
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.001",model_name="m"} 0.0
vllm:cache_config_info{block_size="784",cache_dtype="fp8",cpu_kvcache_space_bytes="None",engine="0",kv_cache_size_tokens="400000",num_gpu_blocks="510",prefix_match_unit="None"} 1.0
vllm:lora_requests_info{max_lora="4",running_lora_adapters="a,b",waiting_lora_adapters=""} 1.75e+09
`
	older = `vllm:num_requests_running{model_name="a \"quoted\" {name}, really\\"} 1.0
vllm:gpu_cache_usage_perc{model_name="m"} 0.5
vllm:gpu_prefix_cache_queries_total{model_name="m"} 20.0
vllm:gpu_prefix_cache_hits_total{model_name="m"} 10.0
vllm:cache_config_info{block_size="16",num_gpu_blocks="1000"} 1.0`
)

func TestParseMetrics(t *testing.T) {
	tests := []struct {
		name, page string
		want       map[int]vllm.Metrics
	}{
		{"current", current, map[int]vllm.Metrics{
			0: {
				Running: 3, Waiting: 2, KVUsage: .25, PrefixQueries: 1.5e6, PrefixHits: 1e6, ExternalQueries: 10, ExternalHits: 5,
				PromptTokens: 77, OutputTokens: 78, Preemptions: 6, BlockSize: 784, NumBlocks: 510, KVCacheTokens: 400000,
			},
			1: {Running: 4, Sleeping: true},
		}},
		{"older, no engine label", older, map[int]vllm.Metrics{
			0: {Running: 1, KVUsage: .5, PrefixQueries: 20, PrefixHits: 10, BlockSize: 16, NumBlocks: 1000},
		}},
		{"forms that Prometheus allows", "vllm:num_requests_running 5 1700000000000\nvllm:num_requests_waiting{ engine=\"0\", } 1\r\n", map[int]vllm.Metrics{
			0: {Running: 5, Waiting: 1},
		}},
		{"bad lines are skipped", `vllm:num_requests_running{engine="0"} NaN
vllm:num_requests_running{engine="0"} +Inf
vllm:num_requests_running{engine="0"} -1
vllm:num_requests_running{engine="x"} 1
vllm:num_requests_running{engine="99999"} 1
vllm:num_requests_running{engine="0" 1
vllm:num_requests_running{engine=0} 1
vllm:num_requests_running{engine="0"}
vllm:num_requests_running
vllm:num_requests_waiting{engine="0"} 9
`, map[int]vllm.Metrics{0: {Waiting: 9}}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got, err := vllm.ParseMetrics([]byte(tt.page))
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(got, tt.want); diff != "" {
				t.Errorf("got (-) want (+):\n%s", diff)
			}
		})
	}
	for name, page := range map[string][]byte{
		"empty": nil, "HTML": []byte("<html><body>502</body></html>"), "other exporter": []byte("go_goroutines 5\n"),
	} {
		if _, err := vllm.ParseMetrics(page); !errors.Is(err, vllm.ErrNoMetrics) {
			t.Errorf("%s: error %v", name, err)
		}
	}
	if _, err := vllm.ParseMetrics(make([]byte, vllm.MaxMetrics+1)); err == nil {
		t.Error("an oversize page is read")
	}
}

func page(v vllm.Version) *vllm.Page {
	engines := make([]vllm.EngineMetrics, 2)
	for i := range engines {
		e := &engines[i]
		e.Rank = i
		e.Metrics = vllm.Metrics{
			Running: 3, Waiting: 2, KVUsage: .125, PrefixQueries: 1e6, PrefixHits: 5e5, PromptTokens: 2e6, OutputTokens: 3e5,
			Preemptions: 1, BlockSize: 16, NumBlocks: 1000, KVCacheTokens: 16000, Sleeping: i == 1,
		}
		if !v.AtLeast(vllm.V0_24) {
			e.KVCacheTokens = 0
		}
		e.SleepLevel = i
		e.CacheConfig = []string{"cache_dtype", "auto", "enable_prefix_caching", "True"}
		e.Finished = map[string]float64{"stop": 4}
		e.TTFT = vllm.NewHistogram(vllm.BucketsTTFT)
		e.InterToken = vllm.NewHistogram(vllm.BucketsITL)
		e.E2E = vllm.NewHistogram(vllm.BucketsLatency)
		e.RequestPromptTokens = vllm.NewHistogram(vllm.BucketsTokens(32768))
		for _, s := range []float64{.0005, .3, 5000} {
			e.TTFT.Observe(s)
		}
	}
	return &vllm.Page{Model: `org/"m"`, Version: v, Engines: engines, LoRA: &vllm.LoRAInfo{Max: 2, Running: []string{"a", "b"}, UnixTime: 1.75e9}}
}

// The page is read back by our own parser, and by the reference one.
func TestAppendMetrics(t *testing.T) {
	for _, v := range []vllm.Version{vllm.V0_10, vllm.V0_24} {
		t.Run(v.String(), func(t *testing.T) {
			p := page(v)
			text := vllm.AppendMetrics(nil, p)
			got, err := vllm.ParseMetrics(text)
			if err != nil {
				t.Fatal(err)
			}
			want := map[int]vllm.Metrics{0: p.Engines[0].Metrics, 1: p.Engines[1].Metrics}
			if diff := cmp.Diff(got, want); diff != "" {
				t.Errorf("got (-) want (+):\n%s", diff)
			}
			families := parseReference(t, text)
			h := families["vllm:time_to_first_token_seconds"].GetMetric()[1].GetHistogram()
			if h.GetSampleCount() != 3 || h.GetBucket()[0].GetCumulativeCount() != 1 || h.GetBucket()[21].GetCumulativeCount() != 2 {
				t.Errorf("histogram of time to first token: %v", h)
			}
			if !math.IsInf(h.GetBucket()[22].GetUpperBound(), 1) {
				t.Error("no +Inf bucket")
			}
			if c := families["vllm:prompt_tokens_total"]; c.GetType() != dto.MetricType_COUNTER || len(c.GetMetric()) != 2 {
				t.Errorf("prompt_tokens_total: %v", c)
			}
			if got := families["vllm:cache_config_info"].GetMetric()[0].GetLabel(); len(got) < 5 {
				t.Errorf("labels of cache_config_info: %v", got)
			}
			if _, old := families["vllm:gpu_cache_usage_perc"]; old != (v == vllm.V0_10) {
				t.Errorf("old names are there: %v", old)
			}
		})
	}
}

func parseReference(t *testing.T, text []byte) map[string]*dto.MetricFamily {
	t.Helper()
	p := expfmt.NewTextParser(model.UTF8Validation)
	families, err := p.TextToMetricFamilies(bytes.NewReader(text))
	if err != nil {
		t.Fatal(err)
	}
	return families
}

func TestBucketsTokens(t *testing.T) {
	if diff := cmp.Diff(vllm.BucketsTokens(120), []float64{1, 2, 5, 10, 20, 50, 100}); diff != "" {
		t.Error(diff)
	}
}

func TestHistogramClone(t *testing.T) {
	h := vllm.NewHistogram([]float64{1})
	c := h.Clone()
	h.Observe(.5)
	if cmp.Equal(h, c, cmp.AllowUnexported(vllm.Histogram{})) {
		t.Error("the clone follows the original")
	}
}

func BenchmarkParseMetrics(b *testing.B) {
	p := page(vllm.V0_24)
	text := vllm.AppendMetrics(nil, p)
	text = append(text, strings.Repeat("vllm:request_params_n_bucket{engine=\"0\",le=\"1.0\",model_name=\"m\"} 0.0\n", 500)...)
	b.SetBytes(int64(len(text)))
	b.ReportAllocs()
	for b.Loop() {
		if _, err := vllm.ParseMetrics(text); err != nil {
			b.Fatal(err)
		}
	}
}

func FuzzMetrics(f *testing.F) {
	f.Add([]byte(current))
	f.Add([]byte(older))
	f.Add(vllm.AppendMetrics(nil, page(vllm.V0_10)))
	pages, err := filepath.Glob(filepath.Join(captures, "*", "metrics-*.txt"))
	if err != nil || len(pages) == 0 {
		f.Fatalf("no captures: %v", err)
	}
	for _, path := range pages {
		f.Add(read(f, filepath.Dir(path), filepath.Base(path)))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		engines, err := vllm.ParseMetrics(text)
		if (err == nil) != (len(engines) > 0) {
			t.Fatalf("%d engines, error %v", len(engines), err)
		}
		for rank, m := range engines {
			if rank < 0 || m.BlockSize < 0 || m.NumBlocks < 0 || !(m.KVUsage >= 0 && m.KVUsage <= 1) || !(m.Running >= 0) {
				t.Fatalf("engine %d: %+v", rank, m)
			}
		}
	})
}

func FuzzParseError(f *testing.F) {
	f.Add(vllm.ContextLength(1, 2, 3).JSON())
	f.Add([]byte(vllm.UnauthorizedBody))
	addCaptures(f, func(l *line) {
		if l.Status >= 400 {
			f.Add([]byte(l.Body))
		}
	})
	f.Fuzz(func(t *testing.T, body []byte) {
		if e, ok := vllm.ParseError(body); ok && e.Message == "" && e.Type == "" {
			t.Errorf("empty error from %q", body)
		}
	})
}
