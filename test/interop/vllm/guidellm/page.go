package guidellm

import (
	"fmt"
	"math"
	"slices"
	"strings"

	"github.com/kinference/kinference/internal/bench/report"
	"github.com/kinference/kinference/internal/bench/stats"
	"github.com/kinference/kinference/internal/plot"
)

// Names of what carries the load, besides those of the router's policies.
const (
	Direct     = "direct"     // GuideLLM sends to the engine itself
	Kinference = "kinference" // the router's default policy
)

// Run is one run of a load through one policy.
type Run struct {
	Load   Load
	Policy string
	Round  int // counted from 1
	Report
	// Queried and Hits are prompt tokens that the engines looked up and found in
	// their prefix caches during the run, by their own counters.
	Queried, Hits float64
	Preemptions   float64
}

// HitRate is the share of prompt tokens that came from a cache.
func (r Run) HitRate() float64 { return r.Hits / r.Queried }

// Results are all runs of a session, in the order of running.
type Results struct {
	Runs []Run
	// VLLM is the engines' version, Machine what they ran on.
	VLLM, Machine string
	// LoadAverage of the machine before anything was started. Preliminary figures
	// are those of a machine that had other work.
	LoadAverage float64
	Preliminary bool
	// Engines is the number of engines, Engine the command line of each.
	Engines int
	Engine  string
	Model   string
}

// metrics are what the tables and rows show of a cell, in seconds and ratios.
var metrics = []struct {
	name, unit string
	of         func(Run) float64
}{
	{"hit_rate", "ratio", Run.HitRate},
	{"ttft_p50", "s", func(r Run) float64 { return r.TTFT.P50 }},
	{"ttft_p90", "s", func(r Run) float64 { return r.TTFT.P90 }},
	{"ttft_p99", "s", func(r Run) float64 { return r.TTFT.P99 }},
	{"ttft_mean", "s", func(r Run) float64 { return r.TTFT.Mean }},
	{"itl_p50", "s", func(r Run) float64 { return r.ITL.P50 }},
	{"e2e_p50", "s", func(r Run) float64 { return r.E2E.P50 }},
	{"e2e_p99", "s", func(r Run) float64 { return r.E2E.P99 }},
	{"rps", "requests/s", func(r Run) float64 { return r.RPS }},
}

// cell is the runs of one load through one policy.
type cell struct {
	load   Load
	policy string
	runs   []Run
}

func (c cell) median(of func(Run) float64) float64 {
	var v []float64
	for _, r := range c.runs {
		v = append(v, of(r))
	}
	return stats.Median(v)
}

func (c cell) metric(name string) float64 {
	for _, m := range metrics {
		if m.name == name {
			return c.median(m.of)
		}
	}
	panic("no metric " + name)
}

// cells groups the runs by load and policy, both in the order of appearance.
func (r Results) cells() []cell {
	var out []cell
	for _, run := range r.Runs {
		i := slices.IndexFunc(out, func(c cell) bool { return c.load.Name == run.Load.Name && c.policy == run.Policy })
		if i < 0 {
			i = len(out)
			out = append(out, cell{load: run.Load, policy: run.Policy})
		}
		out[i].runs = append(out[i].runs, run)
	}
	slices.SortStableFunc(out, func(a, b cell) int { return strings.Compare(a.load.Name, b.load.Name) })
	return out
}

// Rows are the medians for machines.
func (r Results) Rows() []report.Row {
	var rows []report.Row
	for _, c := range r.cells() {
		for _, m := range metrics {
			rows = append(rows, report.Row{Suite: "vllm", Scenario: c.load.Name, Policy: c.policy, Metric: m.name, Value: math.Round(1e5*c.metric(m.name)) / 1e5, Unit: m.unit})
		}
		rows = append(rows, report.Row{Suite: "vllm", Scenario: c.load.Name, Policy: c.policy, Metric: "runs", Value: float64(len(c.runs)), Unit: "runs"})
	}
	return rows
}

func percent(v float64) string { return fmt.Sprintf("%.1f %%", 100*v) }

func ms(v float64) string { return plot.Number(1000 * v) }

// base is the cell that the others of its load are compared with: the first.
func base(cells []cell, c cell) cell {
	return cells[slices.IndexFunc(cells, func(b cell) bool { return b.load.Name == c.load.Name })]
}

func (r Results) table(names ...string) plot.Table {
	t := plot.Table{Left: 2, Header: []string{"scenario", "policy", "runs", "hit rate", "TTFT p50 ms", "p90", "p99", "ITL p50 ms", "e2e p50 ms", "p99", "requests/s",
		"TTFT p50 ×", "p90 ×", "p99 ×"}}
	cells := r.cells()
	for _, c := range cells {
		if !slices.Contains(names, c.load.Name) {
			continue
		}
		row := []string{c.load.Name, c.policy, fmt.Sprint(len(c.runs)), percent(c.metric("hit_rate"))}
		for _, name := range []string{"ttft_p50", "ttft_p90", "ttft_p99", "itl_p50", "e2e_p50", "e2e_p99"} {
			row = append(row, ms(c.metric(name)))
		}
		row = append(row, plot.Number(c.metric("rps")))
		for _, name := range []string{"ttft_p50", "ttft_p90", "ttft_p99"} {
			row = append(row, fmt.Sprintf("%.1f", base(cells, c).metric(name)/c.metric(name)))
		}
		t.Rows = append(t.Rows, row)
	}
	return t
}

// bound is the hit rate of the shared-prefix load if each prefix is computed
// once and the longest hit is everybody's; 0 if it was not run.
func (r Results) bound() float64 {
	longest, queried := 0, 0.0
	for _, x := range r.Runs {
		if x.Load.Name == SharedPrefix.Name {
			longest, queried = max(longest, x.Longest), x.Queried
		}
	}
	if queried == 0 {
		return 0
	}
	return float64((SharedPrefix.Requests()-SharedPrefix.Prefixes)*longest) / queried
}

// everyRun shows the runs one by one, and the two counts of cached tokens.
func (r Results) everyRun() plot.Table {
	t := plot.Table{Left: 2, Header: []string{"scenario", "policy", "round", "queried tokens", "hits, by engines", "by clients", "hit rate", "TTFT p50 ms", "p90", "p99", "e2e p50 ms", "requests/s"}}
	for _, x := range r.Runs {
		t.Rows = append(t.Rows, []string{x.Load.Name, x.Policy, fmt.Sprint(x.Round), plot.Number(x.Queried), plot.Number(x.Hits), plot.Number(float64(x.Cached)), percent(x.HitRate()),
			ms(x.TTFT.P50), ms(x.TTFT.P90), ms(x.TTFT.P99), ms(x.E2E.P50), plot.Number(x.RPS)})
	}
	return t
}

// Plots are the SVG files of the page by name.
func (r Results) Plots() map[string][]byte {
	loads := []Load{SharedPrefix, MultiTurn}
	bars := func(title string, y plot.Axis, of func(cell) float64) []byte {
		b := plot.Bars{Title: title, Subtitle: fmt.Sprintf("%d vLLM engines on CPUs, %s; load by GuideLLM; no GPU was used", r.Engines, r.Model), Y: y}
		series := map[string]int{}
		for g, l := range loads {
			b.Groups = append(b.Groups, l.Name+" "+l.Title)
			for _, c := range r.cells() {
				if c.load.Name != l.Name {
					continue
				}
				i, seen := series[c.policy]
				if !seen {
					i = len(b.Series)
					series[c.policy] = i
					b.Series = append(b.Series, plot.BarSeries{Name: c.policy, Values: slices.Repeat([]float64{math.NaN()}, len(loads))})
				}
				b.Series[i].Values[g] = of(c)
			}
		}
		return b.SVG()
	}
	return map[string][]byte{
		"vllm_hit.svg": bars("Prefix cache hit rate of real engines", plot.Axis{Label: "prompt tokens from a cache", Unit: "%"},
			func(c cell) float64 { return 100 * c.metric("hit_rate") }),
		"vllm_ttft_p50.svg": bars("Time to first token, median", plot.Axis{Label: "TTFT p50", Unit: "ms"},
			func(c cell) float64 { return 1000 * c.metric("ttft_p50") }),
		"vllm_ttft_p90.svg": bars("Time to first token, 90th percentile", plot.Axis{Label: "TTFT p90", Unit: "ms"},
			func(c cell) float64 { return 1000 * c.metric("ttft_p90") }),
	}
}

// Page is docs/benchmarks/vllm.md.
func (r Results) Page() []byte {
	var b strings.Builder
	add := func(format string, args ...any) { fmt.Fprintf(&b, format, args...) }
	version := "?"
	if len(r.Runs) > 0 {
		version = r.Runs[0].Version
	}
	add("# Real vLLM engines under GuideLLM\n\n")
	add("Written by `make bench-vllm` (%s); do not edit. vLLM %s on CPUs, load by GuideLLM %s; **no GPU was used**.\n\n", r.Machine, r.VLLM, version)
	add(`%d engines with real prefix caches, KV events and metrics serve the model %s: Qwen3's architecture and tokenizer at a small
size, with random weights. In front of them runs the whole control plane. Every policy is the router's own, over the same
engines: %s is what a Kubernetes Service does, %s the default. GuideLLM's own percentiles are shown.

`, r.Engines, "`"+r.Model+"`", "`random`", "`"+Kinference+"`")
	add("The machine is small: all engines, the control plane and GuideLLM share its cores, so that **absolute times mean nothing**\nand only comparisons within this page do. Hit rates are exact: they are the engines' own counters.\n\n")
	if r.Preliminary {
		add("**Preliminary: the machine was busy with other work.** Times are not fit for comparison; hit rates are exact all the same.\n\n")
	}
	add("## Results\n\nMedians over the runs. × says how many times lower a time is than that of `random`.\n\n%s\n", r.table(SharedPrefix.Name, MultiTurn.Name).Markdown())
	if bound := r.bound(); bound > 0 {
		add("Each of the %d prefixes of %s has to be computed once, so that at most %s of its tokens can be hits.\n\n", SharedPrefix.Prefixes, SharedPrefix.Name, percent(bound))
	}
	add("![Prefix cache hit rate by scenario and policy](vllm_hit.svg)\n\n![Median time to first token](vllm_ttft_p50.svg)\n\n![90th percentile of time to first token](vllm_ttft_p90.svg)\n\n")
	add("## What was sent\n\nThe published scenarios S1 and S2 ([README](README.md)) at a tenth of their lengths, on engines with a tenth of their cache.\n\n%s\n", loads().Markdown())
	add(`* One seed: every run of a scenario sends the same texts. Answers are greedy and of fixed length, so that they are the same
  too. Only the order in which streams finish differs.
* Before each run the engines' caches are emptied (%s) and the services are started anew, so that nothing is
  remembered. Policies take turns.
* Latencies leave out GuideLLM's warm-up, as in the published scenarios; hit rates count every request, cold ones too.
`, "`POST /reset_prefix_cache`")
	add("* The machine's load average before anything was started was %.1f.\n", r.LoadAverage)
	if t := r.table(OneByOne.Name); len(t.Rows) > 0 {
		add("\n## Overhead of the way\n\n%s: %d requests one after the other to one engine, straight and through the gateway. × compares with `%s`.\n\n%s",
			OneByOne.Name, OneByOne.Requests(), Direct, t.Markdown())
	}
	add("\n## Every run\n\nIn the order of running. Engines count the prompt tokens that they looked up and found; clients add up the `cached_tokens` of\ntheir answers.\n\n%s\n", r.everyRun().Markdown())
	add("## Commands\n\n`make bench-vllm` makes the environments, runs all of this and rewrites this page. An engine, with its own ports:\n\n```sh\n%s\n```\n\n", r.Engine)
	add("GuideLLM, where `$URL` is the gateway, or the engine where the policy is `%s`:\n", Direct)
	for _, l := range []Load{SharedPrefix, MultiTurn, OneByOne} {
		add("\n```sh\n# %s %s\n%s\n```\n", l.Name, l.Title, l.Command(Target{URL: "$URL", Model: r.Model, Tokenizer: "$KINFERENCE_VLLM_MODELS/" + r.Model, Report: "report.json"}))
	}
	add("%s", limits)
	return []byte(b.String())
}

const limits = `
## What this does not show

* Speed on a GPU: prefill on a core is slow beside decoding and HTTP, and engines that share cores slow each other down.
  A policy that leaves an engine idle gives its core to the others here, which no fleet of GPUs does.
* A real model's answers: weights are random. Prompts are random words.
* Several gateways, engines that come and go, other engines' block sizes: see [test/acceptance](../../test/acceptance).
* p99 of so few requests is nearly the worst one.
`

// loads describes what each scenario sends.
func loads() plot.Table {
	t := plot.Table{Left: 2, Header: []string{"scenario", "prompts (tokens)", "answers", "streams", "requests", "of them warm-up"}}
	for _, l := range []struct {
		Load
		prompts, answers string
	}{
		{SharedPrefix, "one of 12 prefixes of 2,000 as system message, then 30", "21"},
		{MultiTurn, "12 turns: 300, then the answer and 120 more each turn", "16"},
		{OneByOne, "a prefix of 400, then 100", "8"},
	} {
		t.Rows = append(t.Rows, []string{l.Name + " " + l.Title, l.prompts, l.answers, fmt.Sprint(l.Streams), fmt.Sprint(l.Requests()), fmt.Sprint(l.WarmUp)})
	}
	return t
}
