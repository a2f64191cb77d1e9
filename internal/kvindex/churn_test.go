package kvindex_test

import (
	"os"
	"runtime"
	"testing"
	"time"

	"github.com/kinference/kinference/internal/kvindex"
	"github.com/kinference/kinference/internal/vllm"
)

// TestMemoryIsFlat runs a fleet of 100 workers that store, evict, restart and wipe their
// caches, with adapters, and looks at the memory in between: it must not grow.
// KINFERENCE_CHURN=10m runs it that long.
func TestMemoryIsFlat(t *testing.T) {
	defer kvindex.SweepBy(3)()
	length := 2 * time.Second
	if s := os.Getenv("KINFERENCE_CHURN"); s != "" {
		d, err := time.ParseDuration(s)
		if err != nil {
			t.Fatal(err)
		}
		length = d
	}
	heap := func() float64 {
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return float64(m.HeapAlloc)
	}
	g := newTree(21, 8000, 100)
	x := kvindex.New()
	goroutines := runtime.NumGoroutine()
	steps := 0
	round := func() {
		for range 100 {
			w := g.r.IntN(len(g.names))
			switch g.r.IntN(200) {
			case 0:
				x.Remove(g.names[w])
				clear(g.held[w])
			case 1:
				x.Apply(g.names[w], &vllm.Batch{Events: []vllm.Event{cleared()}})
				clear(g.held[w])
			case 2: // the blocks of another adapter, gone with the next wipe
				e := withKeys(stored(g.r.Uint64(), nil, treeBlock, g.nodes[g.r.IntN(len(g.nodes))].tokens...), "adapter")
				x.Apply(g.names[w], &vllm.Batch{Events: []vllm.Event{e}})
			default:
				for len(g.held[w]) > 400 { // at the engine's capacity
					x.Apply(g.names[w], &vllm.Batch{Events: g.evict(w, 200, g.r.IntN(20) == 0)})
				}
				x.Apply(g.names[w], &vllm.Batch{Events: g.store(w, g.r.IntN(len(g.nodes)))})
			}
			steps++
		}
	}
	for range 10 {
		round()
	}
	first, most := heap(), 0.0
	begin := time.Now()
	for time.Since(begin) < length {
		round()
		if h := heap(); h > most {
			most = h
		}
	}
	last := heap()
	i := x.Info()
	t.Logf("%d steps in %v: heap %.1f MB at first, %.1f at most, %.1f at last; %d blocks, %d states, %.1f MB of index", steps, length, first/1e6, most/1e6, last/1e6, i.Blocks, i.States, float64(i.Bytes)/1e6)
	if last > 1.5*first+4e6 {
		t.Errorf("the heap grew from %.1f to %.1f MB", first/1e6, last/1e6)
	}
	if n := runtime.NumGoroutine(); n > goroutines {
		t.Errorf("%d goroutines, %d at first", n, goroutines)
	}
	runtime.KeepAlive(x)
}
