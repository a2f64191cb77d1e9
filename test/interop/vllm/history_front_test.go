package vllm_test

import (
	"encoding/json"
	"maps"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/kinference/kinference/internal/kvhash"
	"github.com/kinference/kinference/test/interop/vllm/rig"
)

// mispredicted asks the front for what engines held before they were restarted,
// and counts the decisions that took them for more than they hold now.
func (c *chain) mispredicted(when string, old map[*rig.Engine][]prompt, allowed bool) {
	c.t.Helper()
	asked, wrong := 0, 0
	for e, prompts := range old {
		for _, p := range prompts[:min(8, len(prompts))] {
			life, _ := c.rec.life(e.Name)
			truth, err := life.truth(map[kvhash.Hash]bool{})
			if err != nil {
				c.t.Fatal(err)
			}
			held := 0
			for _, h := range p.hashes(e.BlockSize) {
				if !truth.hashes[h] {
					break
				}
				held += e.BlockSize
			}
			if a, ok := c.through(p); ok {
				asked++
				if a.predicted[id(e)] > held {
					wrong++
				}
			}
		}
	}
	c.t.Logf("%s: %d of %d predictions for restarted engines were wrong", when, wrong, asked)
	if wrong > 0 && !allowed {
		c.t.Errorf("%s: predicted more than was cached", when)
	}
}

// answered is what became of a prompt that went through the front.
type answered struct {
	worker string
	// predicted by worker, and reported by the one that answered, in tokens. The
	// last block, which is always computed anew, is left out.
	predicted map[string]int
	reported  int
}

// through sends a prompt through the front and asks for the decision.
func (c *chain) through(p prompt) (answered, bool) {
	body, _ := json.Marshal(p.body(c.engines[0].Model, 1))
	r := c.front.Post("/v1/completions", body)
	if r.Status != http.StatusOK {
		c.t.Errorf("status %d %v: %.200s", r.Status, r.Err, r.Body)
		return answered{}, false
	}
	d := c.front.Explain(r.ID)
	size := c.engines[0].BlockSize
	a := answered{worker: d.GetServedBy(), predicted: map[string]int{}, reported: r.Usage().Details.Cached}
	for _, x := range d.GetCandidates() {
		a.predicted[x.GetWorker()] = min(int(x.GetMatchedTokens()), (len(p.tokens)-1)/size*size)
	}
	return a, true
}

// stepReset empties caches of idle engines. They tell of it with their next
// batch only: what is sent to them until that is in the index is mispredicted,
// and nothing after it.
func (c *chain) stepReset() {
	for round, many := range []int{1, 8} {
		l := c.load(2, c.engines...)
		c.grow(60, c.engines...)
		c.quiet(l)
		var prompts []prompt
		for _, e := range c.engines {
			c.check("before the reset", e)
			for _, p := range l.recent(e, 40) {
				if c.predict(e, p) > 0 && len(prompts) < 40 && p.lora == "" {
					prompts = append(prompts, p)
				}
			}
		}
		shown, published := map[string]string{}, map[string]int{}
		for _, e := range c.engines {
			shown[e.Name], published[e.Name] = gauges(c.t, e), c.rec.batches(e.Name)
			e.ResetPrefixCache()
		}
		stale := 0
		for _, p := range prompts {
			for _, e := range c.engines {
				if c.predict(e, p) > 0 {
					stale++
				}
			}
		}
		for _, e := range c.engines {
			if now := gauges(c.t, e); now != shown[e.Name] && round == 0 {
				c.t.Logf("the metrics of %s tell of a reset: %s, before %s", e.Name, now, shown[e.Name])
			}
		}
		// Through the front, many at a time.
		var mu sync.Mutex
		wrong, after, asked := map[string]int{}, 0, 0
		began := map[string]bool{} // workers that have answered since, and the index knows
		for batch := range slices.Chunk(prompts, many) {
			known := maps.Clone(began)
			var wg sync.WaitGroup
			for _, p := range batch {
				wg.Go(func() {
					a, ok := c.through(p)
					mu.Lock()
					defer mu.Unlock()
					asked++
					began[a.worker] = true
					if said := a.predicted[a.worker]; ok && said > a.reported {
						wrong[a.worker]++
						if known[a.worker] {
							after++
							c.t.Errorf("%s: %d tokens were predicted, %d were cached", a.worker, said, a.reported)
						}
					}
				})
			}
			wg.Wait()
			for _, e := range c.engines {
				if began[id(e)] {
					within(c.t, "the index has the reset of "+e.Name, func() bool {
						return c.rec.batches(e.Name) > published[e.Name] && c.settled(e)
					})
				}
			}
		}
		c.t.Logf("reset of idle engines: %d hits were shown that were none; of %d requests, %d at a time, these were mispredicted: %v, %d of them after their engine's next batch was in the index",
			stale, asked, many, wrong, after)
		for w, n := range wrong {
			if n > many {
				c.t.Errorf("%s: %d requests were mispredicted, want %d at most", w, n, many)
			}
		}
		for _, e := range c.engines {
			c.flush(e)
			c.check("after a reset", e)
			if !c.state(e).GetIndex().GetComplete() {
				c.t.Errorf("%s emptied its cache, and its index is incomplete", e.Name)
			}
		}
	}
}

// gauges are an engine's metrics of its cache.
func gauges(tb testing.TB, e *rig.Engine) string {
	tb.Helper()
	_, body, err := e.Get("/metrics")
	if err != nil {
		tb.Fatal(err)
	}
	var lines []string
	for line := range strings.Lines(string(body)) {
		if strings.HasPrefix(line, "vllm:") && strings.Contains(line, "cache") && !strings.Contains(line, "_created") {
			lines = append(lines, strings.TrimSpace(line))
		}
	}
	return strings.Join(lines, "\n")
}
