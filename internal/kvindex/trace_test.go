package kvindex_test

import (
	"fmt"
	"os"
	"strconv"
	"testing"

	"github.com/kinference/kinference/internal/bench/workload"
	"github.com/kinference/kinference/internal/fleetsim/engine"
	"github.com/kinference/kinference/internal/kvhash"
	"github.com/kinference/kinference/internal/kvindex"
	"github.com/kinference/kinference/internal/vllm"
)

// TestMooncake sends the Mooncake conversation trace, its ids expanded to blocks of 16
// tokens, to 16 simulated engines whose caches hold a part of it: at each arrival the index
// must find exactly what each engine would reuse. KINFERENCE_TRACE_REQUESTS=12031 takes
// the whole trace.
func TestMooncake(t *testing.T) {
	const workers, size = 16, 16
	limit := 100
	if s := os.Getenv("KINFERENCE_TRACE_REQUESTS"); s != "" {
		n, err := strconv.Atoi(s)
		if err != nil {
			t.Fatal(err)
		}
		limit = n
	}
	requests, source, err := workload.Mooncake(limit)
	if err != nil {
		t.Fatal(err)
	}
	t.Log(source)
	p := engine.L40SPlain16
	p.BlockSize, p.Blocks, p.StateBlocks = size, 40_000, 0
	p.MaxModelLen = 140_000
	x := kvindex.New()
	var engines []*engine.Engine
	var names []string
	for i := range workers {
		engines = append(engines, engine.New(engine.Config{Profile: p, Seed: int64(i), OnEvents: true}))
		names = append(names, fmt.Sprintf("w%d/0", i))
		x.Configure(names[i], kvindex.Options{GPUBlocks: p.Blocks})
	}
	busy := make([]float64, workers) // until when its iteration takes
	running := make([]bool, workers)
	advance := func(to float64) {
		for i, e := range engines {
			for {
				if !running[i] {
					end, ok := e.Begin(max(busy[i], 0))
					if !ok {
						break
					}
					busy[i], running[i] = end, true
				}
				if busy[i] > to {
					break
				}
				x.Apply(names[i], &vllm.Batch{Events: e.End().Events})
				running[i] = false
			}
			// An engine has blocks from the iteration's start and tells at its end, so the
			// two are compared between iterations.
			if running[i] {
				x.Apply(names[i], &vllm.Batch{Events: e.End().Events})
				running[i] = false
			}
			busy[i] = max(busy[i], to)
		}
	}
	found, possible, total := 0, 0, 0
	for n, q := range requests {
		advance(q.At)
		tokens := q.Tokens(nil)
		h := kvhash.Append(nil, kvhash.Root("", ""), tokens, size)
		overlap := map[string]int{}
		for _, o := range x.Match(nil, size, h) {
			overlap[o.Worker] = o.GPUBlocks
		}
		best := 0
		for i, e := range engines {
			got := min(overlap[names[i]], (len(tokens)-1)/size) * size
			want := e.Lookup(tokens, "", "")
			if got != want {
				t.Fatalf("request %d: %d tokens match at %s, the engine would reuse %d", n, got, names[i], want)
			}
			if b, w := overlap[names[best]], overlap[names[i]]; w > b || w == b && e.InFlight() < engines[best].InFlight() {
				best = i
			}
		}
		total += len(tokens)
		possible += engines[best].Lookup(tokens, "", "")
		found += min(overlap[names[best]], (len(tokens)-1)/size) * size
		if err := engines[best].Submit(q.At, &engine.Request{ID: fmt.Sprint(n), Tokens: tokens, MaxTokens: q.Output}); err != nil {
			t.Fatal(err)
		}
	}
	reusable, _ := workload.Reusable(requests)
	t.Logf("%d requests of %d tokens: %.2f %% found, %.2f %% possible in these caches, %.2f %% in endless ones", len(requests), total,
		100*float64(found)/float64(total), 100*float64(possible)/float64(total), 100*float64(reusable)/float64(total))
	if found != possible {
		t.Errorf("reuse found %d, possible %d", found, possible)
	}
}
