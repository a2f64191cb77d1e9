package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/kinference/kinference/internal/bench/report"
	"github.com/kinference/kinference/internal/bench/virtual"
	"github.com/kinference/kinference/internal/bench/workload"
	"github.com/kinference/kinference/internal/fleetsim/engine"
	"github.com/kinference/kinference/internal/plot"
)

// full measures everything and rewrites the published tables. Each document
// names the command that made it.
func full(ctx context.Context, fs *flag.FlagSet, args []string, out io.Writer) error {
	dir := fs.String("out", "out", "folder for bench.json")
	docs := fs.String("docs", "", "folder for tables and plots; empty: none are written")
	seeds := fs.Int("seeds", 10, "number of held-out seeds")
	only := fs.String("only", "routing,tokenizer,kvindex,overhead,wall,mooncake", "comma-separated parts")
	w := wallOptions{}
	w.flags(fs)
	if err := fs.Parse(args); err != nil {
		return err
	}
	start := time.Now()
	p := &publisher{docs: *docs, out: out}
	for _, part := range []struct {
		name string
		run  func() ([]report.Row, error)
	}{
		{"routing", func() ([]report.Row, error) { return p.routing(*seeds) }},
		{"tokenizer", func() ([]report.Row, error) { return p.tokenizer() }},
		{"kvindex", func() ([]report.Row, error) { return p.kvindex() }},
		{"overhead", func() ([]report.Row, error) { return p.overhead(ctx) }},
		{"wall", func() ([]report.Row, error) { return p.wall(ctx, w) }},
		{"mooncake", func() ([]report.Row, error) { return p.mooncake(ctx) }},
	} {
		if !strings.Contains(","+*only+",", ","+part.name+",") {
			continue
		}
		rows, err := part.run()
		if err != nil {
			return fmt.Errorf("%s: %w", part.name, err)
		}
		p.rows = append(p.rows, rows...)
	}
	path := filepath.Join(*dir, "bench.json")
	if err := report.WriteRows(path, p.rows); err != nil {
		return err
	}
	fmt.Fprintf(out, "\n%d rows in %s, %.0f s\n", len(p.rows), path, time.Since(start).Seconds())
	return nil
}

// publisher shows results and, with a folder, publishes them.
type publisher struct {
	docs string
	out  io.Writer
	rows []report.Row
}

// page writes one document: title, how it came about, and its parts.
func (p *publisher) page(name, title, command string, parts ...string) error {
	if p.docs == "" {
		return nil
	}
	text := fmt.Sprintf("# %s\n\nWritten by `%s` (go %s, %d cores); do not edit. %s\nMethod, parameters and limits: [README](README.md).\n\n%s",
		title, command, strings.TrimPrefix(runtime.Version(), "go"), runtime.NumCPU(), report.NoGPU, strings.Join(parts, "\n"))
	return report.Write(filepath.Join(p.docs, name), []byte(text))
}

// plot writes an SVG and returns the Markdown that shows it.
func (p *publisher) plot(name, alt string, svg []byte) (string, error) {
	if p.docs == "" {
		return "", nil
	}
	return fmt.Sprintf("![%s](%s)\n", alt, name), report.Write(filepath.Join(p.docs, name), svg)
}

// section is a heading, a sentence and a table.
func section(heading, about string, t plot.Table) string {
	return fmt.Sprintf("## %s\n\n%s\n\n%s", heading, about, t.Markdown())
}

// routing makes both pages about routing.
func (p *publisher) routing(seeds int) ([]report.Row, error) {
	r := virtual.NewRunner()
	cells, sweep, err := p.published(r, seeds)
	if err != nil {
		return nil, err
	}
	o := routingOptions{seeds: 10 * seeds} // some scenarios are good or bad for all of a run
	all, err := routingCells(o, r, seedsOf(o.seeds, false), p.out)
	if err != nil {
		return nil, err
	}
	for _, c := range all {
		if !slices.ContainsFunc(cells, func(b virtual.Cell) bool { return b.Scenario == c.Scenario && b.Policy == c.Policy }) {
			cells = append(cells, c)
		}
	}
	rows := report.Routing(cells, sweep)
	if p.docs == "" {
		return rows, nil
	}
	return rows, p.cases(o, all, seedsOf(o.seeds, false))
}

// published makes the page with the product's table and the sweeps.
func (p *publisher) published(r *virtual.Runner, seeds int) (cells []virtual.Cell, sweep []virtual.Capacity, err error) {
	published, err := scenariosOf("S0,S0s,S1,S2")
	if err != nil {
		return nil, nil, err
	}
	caps, err := scenariosOf("S1cap,S2cap")
	if err != nil {
		return nil, nil, err
	}
	for _, sc := range published {
		more, err := r.Cells([]virtual.Case{{Name: sc.Name, Title: sc.Title, Scenario: sc}}, virtual.Policies, seedsOf(seeds, false))
		if err != nil {
			return nil, nil, err
		}
		cells = append(cells, more...)
	}
	policies := slices.Concat(virtual.Policies[:len(virtual.Policies)-1], []string{"consistenthash", "llmd", "dynamo", "sglang", virtual.Kinference})
	few := max(seeds/3, 1)
	sweep, err = r.Sweep(caps, policies, virtual.SweepStreams, seedsOf(few, false))
	if err != nil {
		return nil, nil, err
	}
	over, err := overload(r, policies, seedsOf(few, false))
	if err != nil {
		return nil, nil, err
	}
	fmt.Fprintf(p.out, "\nRouting in virtual time, means of %d held-out seeds\n%s", seeds, report.RoutingTable(cells).Text(textStyle()))
	fmt.Fprintf(p.out, "\nThroughput (requests/s) by number of streams\n%s\n%s", report.CapacityTable(sweep).Text(textStyle()), report.KeptTable(over).Text(textStyle()))
	fmt.Fprint(p.out, "\n", report.LatencyBars(cells, "S0", "S1", "S2").Text(textStyle()))

	var parts []string
	for _, pl := range []struct {
		name, alt string
		svg       []byte
	}{
		{"ttft_p50.svg", "Median time to first token by scenario and policy", report.LatencyBars(cells, "S0", "S1", "S2").SVG()},
		{"ttft_p99.svg", "99th percentile of time to first token", report.TailBars(cells, "S0", "S1", "S2").SVG()},
		{"capacity_s1.svg", "Throughput by load, shared prefix", report.CapacityLines(chosen(sweep), "S1cap").SVG()},
		{"capacity_s2.svg", "Throughput by load, multi-turn", report.CapacityLines(chosen(sweep), "S2cap").SVG()},
	} {
		md, err := p.plot(pl.name, pl.alt, pl.svg)
		if err != nil {
			return nil, nil, err
		}
		parts = append(parts, md)
	}
	parts = []string{
		"Every scenario with every policy, and every loss: [routing2.md](routing2.md).\n",
		section("Published scenarios", fmt.Sprintf("Means of %d held-out seeds. The last three columns compare with random per request. `random` and `connection` are a Kubernetes Service: kube-proxy picks per request, or per connection where clients keep them alive.", seeds), report.RoutingTable(cells)),
		parts[0], parts[1],
		section("Spread over the seeds", "Seconds; the last two columns are medians over the seeds of the difference to random with the same seed.", report.SpreadTable(cells)),
		section("Throughput by load", fmt.Sprintf("Requests/s by number of streams, answers of 64 tokens; means of %d held-out seeds. The last column compares the peaks with that of random.", few), report.CapacityTable(sweep)),
		parts[2], parts[3],
		section("Beyond saturation", fmt.Sprintf("S1 with answers of 210 tokens at %d to %d streams, which is S1over: what each policy keeps of its own peak. Means of %d held-out seeds.", sweepOver[0], sweepOver[len(sweepOver)-1], few), report.KeptTable(over)),
		report.CapacityTable(over).Markdown(),
	}
	return cells, sweep, p.page("routing.md", "Routing in virtual time", "kinbench full --only routing --docs docs/benchmarks", parts...)
}

// chosen are the curves that one plot can show.
func chosen(caps []virtual.Capacity) []virtual.Capacity {
	shown := []string{"random", "connection", "leastrequests", "predictedttft", "consistenthash", "llmd", "sglang", virtual.Kinference}
	return slices.DeleteFunc(slices.Clone(caps), func(c virtual.Capacity) bool { return !slices.Contains(shown, c.Policy) })
}

func (p *publisher) tokenizer() ([]report.Row, error) {
	speeds, missing, err := measureTokenizers(time.Second, p.out)
	if err != nil {
		return nil, err
	}
	about := "Million bytes per second on one core, best of the passes within one second; texts of 1 MiB made from a seed (internal/bench/tokenspeed)."
	for _, m := range missing {
		about += "\nNot measured: " + m + "."
	}
	return report.Tokenizer(speeds), p.page("tokenizer.md", "Tokenizer throughput", "kinbench full --only tokenizer --docs docs/benchmarks", section("By text", about, report.TokenizerTable(speeds)))
}

func (p *publisher) kvindex() ([]report.Row, error) {
	figures := measureIndex(indexBlocks, indexWorkers, p.out)
	about := fmt.Sprintf("Conversations of 8,192 blocks of 16 tokens; all %d workers hold the first 64 blocks, three each of the others. Medians of repeated passes, one goroutine; `under_ingest` beside a second one that does nothing but ingest. "+
		"Ingest is of events as an engine at its capacity sends them (64 blocks evicted, tail first, and 64 stored), `decoded` without and otherwise with decoding the messages of the stream. A look-up of %d holders writes %d results, which is most of its time.", indexWorkers, indexWorkers, indexWorkers)
	return report.Index(figures), p.page("kvindex.md", "The KV index", "kinbench full --only kvindex --docs docs/benchmarks", section("At five million blocks", about, report.IndexTable(figures)))
}

func (p *publisher) wall(ctx context.Context, o wallOptions) ([]report.Row, error) {
	pairs, err := runWall(ctx, o, p.out)
	if err != nil {
		return nil, err
	}
	table := report.WallTable(pairs, o.scale)
	fmt.Fprintf(p.out, "\nThrough HTTP at %g times real time, beside virtual time\n%s", o.scale, table.Text(textStyle()))
	about := fmt.Sprintf("%d requests after a warm-up of %d, seed %d, real text over HTTP to three simulated workers at %g times real time. `random` and `connection` go straight to the workers, `kinference` through ingress, router, kvtracker, relay and NATS. "+
		"Seconds are simulated ones; the first column is what a stopwatch would show. Virtual time ran the same requests.", o.count, o.warm, o.seed, o.scale)
	return report.WallRows(pairs), p.page("wall.md", "The real stack in wall time", "kinbench full --only wall --docs docs/benchmarks", section("Beside virtual time", about, table))
}

func (p *publisher) mooncake(ctx context.Context) ([]report.Row, error) {
	var o traceOptions
	o.flags(flag.NewFlagSet("", flag.ContinueOnError)) // the defaults
	results, source, err := runTrace(ctx, o, p.out)
	if err != nil {
		return nil, err
	}
	table := report.TraceTable(results)
	fmt.Fprintf(p.out, "\n%s\n%s", source, table.Text(textStyle()))
	sizes, err := p.cacheSizes(o)
	if err != nil {
		return nil, err
	}
	profile, err := o.workers()
	if err != nil {
		return nil, err
	}
	about := fmt.Sprintf("%s, each 512-token id expanded to words, arrivals stretched %g times, three workers (%s) at %g times real time, each with a cache of %s tokens in blocks of %d. Shares are of prompt tokens.\n\n"+
		"* *cached*: what the engines reported in `usage`\n"+
		"* *bound*: one cache that never forgets, in the workers' blocks (in the trace's own blocks beside it)\n"+
		"* *any worker*: the most that any one worker held when the request was sent\n"+
		"* *router matched*: what the index knew to be in the chosen worker's cache; *truth*: what was in it when the request was sent, which an ideal index would know\n"+
		"* *anticipated*: what the router expected requests under way to add by the time the prompt's turn comes",
		source, o.stretch, o.profile, o.scale, plot.Number(float64(profile.Blocks*profile.BlockSize)), profile.BlockSize)
	return report.TraceRows("mooncake", results), p.page("mooncake.md", "Mooncake conversation trace through the real stack", "kinbench full --only mooncake --docs docs/benchmarks",
		section("Latency and reuse", about, table),
		section("Why the cache is that large", "The same requests in virtual time. A conversation of this trace goes on after one to four million tokens of others; GPU memory alone has forgotten it by then, "+
			"so that with the caches of the profiles routing gains by balancing load and hardly by reuse.", sizes))
}

// cacheSizes replays the trace in virtual time on several fleets.
func (p *publisher) cacheSizes(o traceOptions) (plot.Table, error) {
	t := plot.Table{Left: 2, Header: []string{"workers", "policy", "cache tokens", "TTFT p50 s", "p90", "p99", "e2e p50 s", "cached"}}
	trace, _, err := workload.Mooncake(o.requests)
	if err != nil {
		return t, err
	}
	for _, fleet := range []traceOptions{{profile: engine.L40SQwen27B.Name}, {profile: engine.H100Qwen27B.Name}, {profile: engine.L40SPlain16.Name}, {profile: o.profile, cache: o.cache}} {
		profile, err := fleet.workers()
		if err != nil {
			return t, err
		}
		for _, policy := range virtual.Policies {
			run, err := virtual.RunTrace(trace, o.stretch, virtual.Options{Policy: policy, Seed: o.seed, Profile: profile})
			if err != nil {
				return t, err
			}
			s := run.Summarise()
			t.Rows = append(t.Rows, []string{profile.Name, policy, plot.Number(float64(profile.Blocks * profile.BlockSize)), plot.Number(s.TTFT50), plot.Number(s.TTFT90), plot.Number(s.TTFT99),
				plot.Number(s.E2E50), fmt.Sprintf("%.1f %%", 100*s.Hit)})
		}
	}
	fmt.Fprintf(p.out, "\nThe same in virtual time\n%s", t.Text(textStyle()))
	return t, nil
}
