// Package overhead measures what a gateway adds to a request's latency, beside
// what a plain reverse proxy adds in the same run.
//
// The upstream answers at once (load.Fake), so all time is the path's own. For
// each cell (prompt length × streams) and each path the run holds streams-1
// streams open, which receive events and end and start again at a steady rate,
// and sends probes one after the other: their time to the first content event
// is the latency. Probes do not compete with each other for the cores, so the
// figure is the path's latency at that load and not the machine's capacity.
// Paths take turns in short rounds, so that all see the same disturbances.
//
// The benchmark command calls it. One run at a time.
package overhead

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/kinference/kinference/internal/bench/load"
	"github.com/kinference/kinference/internal/bench/stats"
	"github.com/kinference/kinference/internal/fleetsim/model"
)

// Direct names the path without anything between; added latencies are relative
// to it.
const Direct = "direct"

// ReverseProxy names the path through a plain reverse proxy, to whose latencies
// the others are stated as ratios.
const ReverseProxy = "reverse_proxy"

// Path is a way to the upstream.
type Path struct {
	Name string
	URL  string // of the server that the client talks to
	// Other is a gateway that may fail: what it does not answer counts as failed.
	Other bool
}

// Cell is a point of the measurement.
type Cell struct {
	// Prompt is in tokens. All but 100 of them are a prefix that requests of
	// the cell share, as the turns of a conversation do.
	Prompt  int
	Streams int
	// Body is the length of the request body in bytes, where that and not the
	// prompt's length is given.
	Body int
}

// Name is the cell's scenario name in results: 2k_prompt_64_streams, or
// 400KB_body_64_streams.
func (c Cell) Name() string {
	if c.Body > 0 {
		return fmt.Sprintf("%dKB_body_%d_streams", c.Body/1000, c.Streams)
	}
	return fmt.Sprintf("%dk_prompt_%d_streams", c.Prompt/1000, c.Streams)
}

// Cells and BodyCells are the published ones.
var (
	Cells     = []Cell{{Prompt: 2000, Streams: 1}, {Prompt: 2000, Streams: 64}, {Prompt: 2000, Streams: 512}, {Prompt: 32000, Streams: 1}, {Prompt: 32000, Streams: 64}, {Prompt: 32000, Streams: 512}}
	BodyCells = []Cell{{Body: 1000, Streams: 1}, {Body: 1000, Streams: 64}, {Body: 1000, Streams: 512}, {Body: 400_000, Streams: 1}, {Body: 400_000, Streams: 64}, {Body: 400_000, Streams: 512}}
)

// Result is what one path did in one cell, in milliseconds.
type Result struct {
	Cell     Cell
	Path     string
	P50, P99 float64 // latency
	// Added50 and Added99 are the differences to the direct path's.
	Added50, Added99 float64
	// Times50 and Times99 are the ratios to those of the path ReverseProxy; 0 if
	// there is none.
	Times50, Times99 float64
	Probes, Failed   int
}

// Options of a run.
type Options struct {
	Model  string
	Paths  []Path // the first one is Direct
	Cells  []Cell
	Rounds int // of all paths, per cell
	Probes int // per round and path
	// Interval is that of the upstream's events (load.Fake).
	Interval time.Duration
	// Patience bounds a probe, which fails then; 0: nothing does.
	Patience time.Duration
}

const unique = 100 // tokens of a prompt that no other one has

// bytesPerToken of the prompts' text.
const bytesPerToken = 5.4

// tokens are those of a prompt.
func (c Cell) tokens() int {
	if c.Body > 0 {
		return int(float64(c.Body) / bytesPerToken)
	}
	return c.Prompt
}

// rate is the rate of background requests of a cell, per second: what a small
// fleet would start at that prompt length.
func (c Cell) rate() float64 { return min(200_000/float64(c.tokens()), 100) }

// Run measures all cells. It fails if a path does not answer at all; single
// failures are counted.
func Run(ctx context.Context, o Options) ([]Result, error) {
	client := load.NewClient()
	defer client.Close()
	var out []Result
	for _, cell := range o.Cells {
		samples := make([][]float64, len(o.Paths))
		failed := make([]int, len(o.Paths))
		prompts := newPrompts(o.Model, cell)
		for round := range o.Rounds {
			for i := range o.Paths {
				i := (i + round) % len(o.Paths)
				ms, bad, err := measure(ctx, client, o, cell, o.Paths[i], prompts)
				switch {
				case err != nil && o.Paths[i].Other && ctx.Err() == nil:
					bad = o.Probes
				case err != nil:
					return out, fmt.Errorf("%s through %s: %w", cell.Name(), o.Paths[i].Name, err)
				}
				samples[i] = append(samples[i], ms...)
				failed[i] += bad
			}
		}
		for i, p := range o.Paths {
			slices.Sort(samples[i])
			r := Result{Cell: cell, Path: p.Name, P50: stats.Quantile(samples[i], .5), P99: stats.Quantile(samples[i], .99), Probes: len(samples[i]) + failed[i], Failed: failed[i]}
			r.Added50, r.Added99 = r.P50-stats.Quantile(samples[0], .5), r.P99-stats.Quantile(samples[0], .99)
			out = append(out, r)
		}
		relate(out[len(out)-len(o.Paths):])
	}
	return out, nil
}

// relate states the latencies of one cell as ratios.
func relate(results []Result) {
	i := slices.IndexFunc(results, func(r Result) bool { return r.Path == ReverseProxy })
	if i < 0 {
		return
	}
	plain := results[i]
	for j := range results {
		r := &results[j]
		r.Times50, r.Times99 = r.P50/plain.P50, r.P99/plain.P99
	}
}

// measure opens the streams of one round and sends its probes.
func measure(ctx context.Context, client *load.Client, o Options, cell Cell, path Path, prompts *prompts) (ms []float64, failed int, err error) {
	url := path.URL + "/v1/chat/completions"
	bg, stop := context.WithCancel(ctx)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer stop()
	open := make(chan struct{}, cell.Streams)
	hold := float64(cell.Streams) / cell.rate()
	events := max(int(hold/o.Interval.Seconds()), 4)
	for i := range cell.Streams - 1 {
		wg.Go(func() {
			// The first stream of each is cut short, so that ends do not come together.
			n := 1 + events*(i+1)/cell.Streams
			for first := true; bg.Err() == nil; first = false {
				var once sync.Once
				opened := func() { once.Do(func() { open <- struct{}{} }) }
				if !first {
					opened = nil
				}
				got := client.Do(bg, load.Request{URL: url, Body: prompts.next(n), OnFirst: opened})
				if first && got.Events == 0 && bg.Err() == nil {
					opened() // failed: the probes will tell
				}
				n = events
			}
		})
	}
	var late <-chan time.Time
	if path.Other {
		late = time.After(10 * time.Second) // it has as many streams as it can have
	}
	for n, waits := 0, true; n < cell.Streams-1 && waits; n++ {
		select {
		case <-open:
		case <-late:
			waits = false
		case <-ctx.Done():
			return nil, 0, ctx.Err()
		}
	}
	for i := range o.Probes + 5 {
		body := prompts.next(1)
		got := probe(ctx, client, o.Patience, load.Request{URL: url, Body: body})
		if i < 5 { // opens the connection and warms what has caches
			if got.Err != nil && i == 4 {
				return nil, 0, got.Err
			}
			continue
		}
		if got.Err != nil {
			failed++
			continue
		}
		ms = append(ms, float64(got.TTFT.Microseconds())/1000)
	}
	return ms, failed, ctx.Err()
}

// probe sends one request.
func probe(ctx context.Context, client *load.Client, patience time.Duration, r load.Request) load.Response {
	if patience > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, patience)
		defer cancel()
	}
	return client.Do(ctx, r)
}

// prompts makes the bodies of a cell. It is safe for concurrent use.
type prompts struct {
	model string
	mu    sync.Mutex
	rng   *rand.Rand
	long  string
}

func newPrompts(name string, cell Cell) *prompts {
	p := &prompts{model: name, rng: rand.New(rand.NewPCG(1, uint64(cell.tokens())))}
	var b strings.Builder
	model.Text(&b, p.rng, max(cell.tokens()-unique, 1))
	p.long = b.String()
	if cell.Body > 0 { // to within some bytes: what follows differs a little
		over := len(p.next(1)) - cell.Body
		p.long = p.long[:min(max(len(p.long)-over, 0), len(p.long))] + strings.Repeat(" and", max(-over, 0)/4)
	}
	return p
}

func (p *prompts) next(maxTokens int) []byte {
	p.mu.Lock()
	var b strings.Builder
	model.Text(&b, p.rng, unique)
	p.mu.Unlock()
	return load.Chat(p.model, []load.Message{{Role: "system", Content: p.long}, {Role: "user", Content: b.String()}}, maxTokens)
}
