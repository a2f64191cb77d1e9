package overhead

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/kinference/kinference/internal/bench/load"
	"github.com/kinference/kinference/internal/bench/stats"
)

// Rate is how many requests a path carried when clients sent the next one as
// soon as the last was answered. Clients, upstream and path share the machine,
// so rates compare paths and are no capacity of a path alone.
type Rate struct {
	Cell      Cell
	Path      string
	PerSecond float64
	P50, P99  float64 // latency to the first event in milliseconds, at that rate
	Failed    int
}

// CapacityCells are the published ones of Capacity.
var CapacityCells = []Cell{{Prompt: 2000, Streams: 64}, {Prompt: 32000, Streams: 64}}

// Capacity measures every path for the duration d with cell.Streams clients.
func Capacity(ctx context.Context, o Options, cell Cell, d time.Duration) ([]Rate, error) {
	client := load.NewClient()
	defer client.Close()
	prompts := newPrompts(o.Model, cell)
	var out []Rate
	for _, p := range o.Paths {
		var mu sync.Mutex
		var ms []float64
		r := Rate{Cell: cell, Path: p.Name}
		end := time.Now().Add(d)
		start := time.Now()
		var wg sync.WaitGroup
		for range cell.Streams {
			wg.Go(func() {
				for ctx.Err() == nil && time.Now().Before(end) {
					got := client.Do(ctx, load.Request{URL: p.URL + "/v1/chat/completions", Body: prompts.next(1)})
					mu.Lock()
					if got.Err != nil {
						r.Failed++
					} else {
						ms = append(ms, float64(got.TTFT.Microseconds())/1000)
					}
					mu.Unlock()
				}
			})
		}
		wg.Wait()
		if len(ms) == 0 {
			return out, fmt.Errorf("%s through %s: no request succeeded", cell.Name(), p.Name)
		}
		slices.Sort(ms)
		r.PerSecond = float64(len(ms)) / time.Since(start).Seconds()
		r.P50, r.P99 = stats.Quantile(ms, .5), stats.Quantile(ms, .99)
		out = append(out, r)
	}
	return out, ctx.Err()
}
