package fleetsim

import (
	"net/http"
	"slices"
	"time"

	"github.com/kinference/kinference/internal/fleetsim/engine"
	"github.com/kinference/kinference/internal/vllm"
)

// metrics writes vLLM's page. Durations are simulated seconds.
func (l *life) metrics(w http.ResponseWriter, _ *http.Request) {
	c := &l.w.cfg
	page := vllm.Page{Model: c.Model, Version: c.Version}
	running, waiting := map[string]bool{}, map[string]bool{}
	for rank, k := range l.cores {
		st, h := k.shown()
		page.Engines = append(page.Engines, engineMetrics(rank, c, int(l.sleep.Load()), st, h))
		k.adapters(running, waiting)
	}
	if len(c.LoRAs) > 0 {
		page.LoRA = &vllm.LoRAInfo{
			Max: len(c.LoRAs), Running: sorted(running), Waiting: sorted(waiting),
			UnixTime: float64(time.Now().UnixNano()) / 1e9,
		}
	}
	w.Header().Set("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
	_, _ = w.Write(vllm.AppendMetrics(nil, &page))
}

func engineMetrics(rank int, c *Config, sleep int, st engine.Stats, h histograms) vllm.EngineMetrics {
	p := c.Profile
	algorithm := string(c.HashAlgorithm)
	if algorithm == "" {
		algorithm = string(vllm.SHA256)
	}
	share := "0.9"
	if wording(c.Version).modern() {
		share = "0.92"
	}
	return vllm.EngineMetrics{
		Rank: rank,
		Metrics: vllm.Metrics{
			Running: float64(st.Running), Waiting: float64(st.Waiting), KVUsage: st.KVUsage,
			PrefixQueries: float64(st.PrefixQueries), PrefixHits: float64(st.PrefixHits),
			PromptTokens: float64(st.PromptTokens), OutputTokens: float64(st.GeneratedTokens), Preemptions: float64(st.Preemptions),
			BlockSize: p.BlockSize, NumBlocks: p.Blocks, KVCacheTokens: (p.Blocks - p.StateBlocks) * p.BlockSize,
		},
		SleepLevel:         sleep,
		CachedPromptTokens: float64(st.CachedTokens),
		Finished:           map[string]float64{"stop": float64(st.Stopped), "length": float64(st.Lengthed), "abort": float64(st.Aborted)},
		CacheConfig: []string{
			"cache_dtype", "auto", "enable_prefix_caching", "True", "gpu_memory_utilization", share, "prefix_caching_hash_algo", algorithm,
		},
		TTFT: h.ttft, InterToken: h.interToken, TimePerOutputToken: h.perToken, E2E: h.e2e, Queue: h.queue, Inference: h.inference,
		Prefill: h.prefill, Decode: h.decode,
		RequestPromptTokens: h.promptTokens, RequestOutputTokens: h.outputTokens, PrefillComputed: h.computed, IterationTokens: h.iteration,
	}
}

func sorted(set map[string]bool) []string {
	var list []string
	for name := range set {
		list = append(list, name)
	}
	slices.Sort(list)
	return list
}
