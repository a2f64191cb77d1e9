package vllm

import (
	"math"
	"slices"
	"strconv"
	"strings"
)

// Buckets of vLLM's histograms (vllm/v1/metrics/loggers.py), in seconds or
// tokens.
var (
	BucketsTTFT = []float64{
		.001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
	}
	BucketsITL     = []float64{.01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80}
	BucketsLatency = []float64{
		.3, .5, .8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
	}
	BucketsIteration = []float64{1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384}
)

// BucketsTokens returns the buckets of histograms over tokens of a request: 1,
// 2, 5, 10, … up to the longest context.
func BucketsTokens(maxModelLen int) []float64 {
	var b []float64
	for base := 1; ; base *= 10 {
		for _, m := range []int{1, 2, 5} {
			if base*m > maxModelLen {
				return b
			}
			b = append(b, float64(base*m))
		}
	}
}

// Histogram counts observations in cumulative buckets when written. Not safe for
// concurrent use.
type Histogram struct {
	bounds []float64
	counts []uint64 // one more than bounds: the last is +Inf
	sum    float64
}

// NewHistogram returns a histogram with those upper bounds, which must ascend
// and are not copied.
func NewHistogram(bounds []float64) *Histogram {
	return &Histogram{bounds: bounds, counts: make([]uint64, len(bounds)+1)}
}

// Observe adds v.
func (h *Histogram) Observe(v float64) {
	i, _ := slices.BinarySearch(h.bounds, v)
	h.counts[i]++
	h.sum += v
}

// Clone returns a copy for writing while h goes on.
func (h *Histogram) Clone() *Histogram {
	return &Histogram{bounds: h.bounds, counts: slices.Clone(h.counts), sum: h.sum}
}

// Page is what the metrics page of one API server shows.
type Page struct {
	// Model is the first served model name.
	Model string
	// Version decides which names are written: before V0_24 there is no
	// kv_cache_size_tokens, in V0_10 the gpu_ names are there.
	Version Version
	Engines []EngineMetrics
	LoRA    *LoRAInfo
}

// EngineMetrics is one engine's part of a Page. Nil histograms are left out.
type EngineMetrics struct {
	Rank int
	Metrics
	// SleepLevel is 0 awake, 1 weights offloaded, 2 all discarded. Metrics.Sleeping
	// is not read.
	SleepLevel int
	// WaitingDeferred is the part of Waiting that is not for lack of capacity.
	WaitingDeferred float64
	// CachedPromptTokens counts prompt tokens from the local cache.
	CachedPromptTokens float64
	// Finished counts requests by finished_reason: stop, length, abort, error.
	Finished map[string]float64
	// CacheConfig holds further labels of cache_config_info, in pairs of name and
	// value; block_size, num_gpu_blocks and kv_cache_size_tokens come from Metrics.
	CacheConfig []string

	TTFT, InterToken, TimePerOutputToken, E2E, Queue, Inference, Prefill, Decode *Histogram
	RequestPromptTokens, RequestOutputTokens, PrefillComputed, IterationTokens   *Histogram
}

// LoRAInfo is the series lora_requests_info, which has no engine label.
type LoRAInfo struct {
	Max              int
	Running, Waiting []string
	// UnixTime is the series' value in seconds.
	UnixTime float64
}

// AppendMetrics appends the page in Prometheus text format.
func AppendMetrics(dst []byte, p *Page) []byte {
	w := metricsWriter{buf: dst, page: p}
	w.gauge("num_requests_running", "Number of requests in model execution batches.", func(e *EngineMetrics) float64 { return e.Running })
	w.gauge("num_requests_waiting", "Number of requests waiting to be processed.", func(e *EngineMetrics) float64 { return e.Waiting })
	if p.Version.AtLeast(V0_24) {
		w.family("num_requests_waiting_by_reason", "gauge", "Number of waiting requests by reason.", func(e *EngineMetrics) {
			w.series("", e, e.Waiting-e.WaitingDeferred, "reason", "capacity")
			w.series("", e, e.WaitingDeferred, "reason", "deferred")
		})
	}
	w.family("engine_sleep_state", "gauge", "Engine sleep state; 1 for the current one.", func(e *EngineMetrics) {
		for level, state := range []string{"awake", "weights_offloaded", "discard_all"} {
			v := 0.0
			if level == e.SleepLevel {
				v = 1
			}
			w.series("", e, v, "sleep_state", state)
		}
	})
	w.gauge("kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", func(e *EngineMetrics) float64 { return e.KVUsage })
	if p.Version == V0_10 {
		w.gauge("gpu_cache_usage_perc", "GPU KV-cache usage. 1 means 100 percent usage.", func(e *EngineMetrics) float64 { return e.KVUsage })
		w.counter("gpu_prefix_cache_queries", "GPU prefix cache queries, in tokens.", func(e *EngineMetrics) float64 { return e.PrefixQueries })
		w.counter("gpu_prefix_cache_hits", "GPU prefix cache hits, in tokens.", func(e *EngineMetrics) float64 { return e.PrefixHits })
	}
	w.counter("prefix_cache_queries", "Prefix cache queries, in tokens.", func(e *EngineMetrics) float64 { return e.PrefixQueries })
	w.counter("prefix_cache_hits", "Prefix cache hits, in tokens.", func(e *EngineMetrics) float64 { return e.PrefixHits })
	if p.Version != V0_10 {
		w.counter("external_prefix_cache_queries", "External prefix cache queries, in tokens.", func(e *EngineMetrics) float64 { return e.ExternalQueries })
		w.counter("external_prefix_cache_hits", "External prefix cache hits, in tokens.", func(e *EngineMetrics) float64 { return e.ExternalHits })
	}
	w.counter("num_preemptions", "Cumulative number of preemptions.", func(e *EngineMetrics) float64 { return e.Preemptions })
	w.counter("prompt_tokens", "Number of prefill tokens processed.", func(e *EngineMetrics) float64 { return e.PromptTokens })
	if p.Version != V0_10 {
		w.family("prompt_tokens_by_source_total", "counter", "Number of prompt tokens by source.", func(e *EngineMetrics) {
			w.series("", e, e.PromptTokens-e.CachedPromptTokens-e.ExternalHits, "source", "local_compute")
			w.series("", e, e.CachedPromptTokens, "source", "local_cache_hit")
			w.series("", e, e.ExternalHits, "source", "external_kv_transfer")
		})
		w.counter("prompt_tokens_cached", "Number of cached prompt tokens.", func(e *EngineMetrics) float64 { return e.CachedPromptTokens })
	}
	w.counter("generation_tokens", "Number of generation tokens processed.", func(e *EngineMetrics) float64 { return e.OutputTokens })
	w.family("request_success_total", "counter", "Count of successfully processed requests.", func(e *EngineMetrics) {
		for _, reason := range []string{"stop", "length", "abort", "error"} {
			w.series("", e, e.Finished[reason], "finished_reason", reason)
		}
	})
	w.histogram("time_to_first_token_seconds", "Histogram of time to first token in seconds.", func(e *EngineMetrics) *Histogram { return e.TTFT })
	w.histogram("inter_token_latency_seconds", "Histogram of inter-token latency in seconds.", func(e *EngineMetrics) *Histogram { return e.InterToken })
	if p.Version == V0_10 {
		w.histogram("time_per_output_token_seconds", "Histogram of time per output token in seconds.", func(e *EngineMetrics) *Histogram { return e.InterToken })
	}
	w.histogram("request_time_per_output_token_seconds", "Histogram of a request's mean time per output token.", func(e *EngineMetrics) *Histogram { return e.TimePerOutputToken })
	w.histogram("e2e_request_latency_seconds", "Histogram of e2e request latency in seconds.", func(e *EngineMetrics) *Histogram { return e.E2E })
	w.histogram("request_queue_time_seconds", "Histogram of time spent in WAITING phase.", func(e *EngineMetrics) *Histogram { return e.Queue })
	w.histogram("request_inference_time_seconds", "Histogram of time spent in RUNNING phase.", func(e *EngineMetrics) *Histogram { return e.Inference })
	w.histogram("request_prefill_time_seconds", "Histogram of time spent in PREFILL phase.", func(e *EngineMetrics) *Histogram { return e.Prefill })
	w.histogram("request_decode_time_seconds", "Histogram of time spent in DECODE phase.", func(e *EngineMetrics) *Histogram { return e.Decode })
	w.histogram("request_prompt_tokens", "Number of prefill tokens of a request.", func(e *EngineMetrics) *Histogram { return e.RequestPromptTokens })
	w.histogram("request_generation_tokens", "Number of generation tokens of a request.", func(e *EngineMetrics) *Histogram { return e.RequestOutputTokens })
	w.histogram("request_prefill_kv_computed_tokens", "Number of new KV tokens computed during prefill.", func(e *EngineMetrics) *Histogram { return e.PrefillComputed })
	w.histogram("iteration_tokens_total", "Histogram of tokens per engine step.", func(e *EngineMetrics) *Histogram { return e.IterationTokens })
	w.cacheConfig()
	w.lora()
	return w.buf
}

// metricsWriter writes families in order, each with one series per engine.
type metricsWriter struct {
	buf    []byte
	page   *Page
	name   string
	labels []string
}

func (w *metricsWriter) family(name, kind, help string, each func(*EngineMetrics)) {
	w.name = name
	w.header(name, kind, help)
	for i := range w.page.Engines {
		each(&w.page.Engines[i])
	}
}

func (w *metricsWriter) header(name, kind, help string) {
	w.buf = append(w.buf, "# HELP vllm:"+name+" "+help+"\n# TYPE vllm:"+name+" "+kind+"\n"...)
}

func (w *metricsWriter) gauge(name, help string, value func(*EngineMetrics) float64) {
	w.family(name, "gauge", help, func(e *EngineMetrics) { w.series("", e, value(e)) })
}

func (w *metricsWriter) counter(name, help string, value func(*EngineMetrics) float64) {
	w.family(name+"_total", "counter", help, func(e *EngineMetrics) { w.series("", e, value(e)) })
}

func (w *metricsWriter) histogram(name, help string, value func(*EngineMetrics) *Histogram) {
	if !slices.ContainsFunc(w.page.Engines, func(e EngineMetrics) bool { return value(&e) != nil }) {
		return
	}
	w.family(name, "histogram", help, func(e *EngineMetrics) {
		h := value(e)
		if h == nil {
			return
		}
		var n uint64
		for i, c := range h.counts {
			n += c
			le := math.Inf(1)
			if i < len(h.bounds) {
				le = h.bounds[i]
			}
			w.series("_bucket", e, float64(n), "le", string(appendValue(nil, le)))
		}
		w.series("_count", e, float64(n))
		w.series("_sum", e, h.sum)
	})
}

// series writes one line of the current family; labels are pairs.
func (w *metricsWriter) series(suffix string, e *EngineMetrics, value float64, labels ...string) {
	w.labels = append(w.labels[:0], "engine", strconv.Itoa(e.Rank), "model_name", w.page.Model)
	w.line(w.name+suffix, value, append(w.labels, labels...))
}

func (w *metricsWriter) line(name string, value float64, labels []string) {
	w.buf = append(append(w.buf, "vllm:"...), name...)
	sep := byte('{')
	for i := 0; i+1 < len(labels); i += 2 {
		w.buf = append(append(append(w.buf, sep), labels[i]...), '=', '"')
		w.buf = append(append(w.buf, labelEscaper.Replace(labels[i+1])...), '"')
		sep = ','
	}
	w.buf = append(w.buf, '}', ' ')
	w.buf = append(appendValue(w.buf, value), '\n')
}

var labelEscaper = strings.NewReplacer(`\`, `\\`, "\n", `\n`, `"`, `\"`)

// appendValue formats as prometheus_client does in Python: always with a point.
func appendValue(dst []byte, v float64) []byte {
	switch {
	case math.IsInf(v, 1):
		return append(dst, "+Inf"...)
	case v == math.Trunc(v) && math.Abs(v) < 1e15:
		return append(strconv.AppendInt(dst, int64(v), 10), ".0"...)
	}
	return strconv.AppendFloat(dst, v, 'g', -1, 64)
}

func (w *metricsWriter) cacheConfig() {
	w.header("cache_config_info", "gauge", "Information of the LLMEngine CacheConfig")
	blocks := 0 // of all engines together, as vLLM has it
	for i := range w.page.Engines {
		blocks += w.page.Engines[i].NumBlocks
	}
	for i := range w.page.Engines {
		e := &w.page.Engines[i]
		labels := []string{
			"block_size", strconv.Itoa(e.BlockSize),
			"engine", strconv.Itoa(e.Rank),
			"num_gpu_blocks", strconv.Itoa(blocks),
		}
		if w.page.Version.AtLeast(V0_24) {
			labels = append(labels, "kv_cache_size_tokens", strconv.Itoa(e.KVCacheTokens))
		}
		w.line("cache_config_info", 1, append(labels, e.CacheConfig...))
	}
}

func (w *metricsWriter) lora() {
	l := w.page.LoRA
	if l == nil {
		return
	}
	w.header("lora_requests_info", "gauge", "Running stats on lora requests.")
	w.line("lora_requests_info", l.UnixTime, []string{
		"max_lora", strconv.Itoa(l.Max),
		"running_lora_adapters", strings.Join(l.Running, ","),
		"waiting_lora_adapters", strings.Join(l.Waiting, ","),
	})
}
