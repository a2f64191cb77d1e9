package report

import (
	"fmt"

	"github.com/kinference/kinference/internal/bench/stats"
	"github.com/kinference/kinference/internal/bench/wall"
	"github.com/kinference/kinference/internal/plot"
)

// Pair is one policy on one scenario, in wall time and in virtual time.
type Pair struct {
	Scenario, Policy string
	Wall, Virtual    stats.Summary
}

// WallRows turns wall-clock results to rows of the suite "wall".
func WallRows(pairs []Pair) []Row {
	var rows []Row
	for _, p := range pairs {
		rows = append(rows, Summary("wall", p.Scenario, p.Policy, p.Wall)...)
	}
	return rows
}

// light is the p99 of the light tenants; "" without any.
func light(s stats.Summary) string {
	if s.Light99 == 0 {
		return ""
	}
	return plot.Number(s.Light99)
}

// WallTable shows both, and how far wall time is from virtual time.
func WallTable(pairs []Pair, scale float64) plot.Table {
	t := plot.Table{Left: 2, Header: []string{"scenario", "policy", "TTFT p50 wall ms", "TTFT p50 s", "virtual s", "Δ", "p99 s", "virtual s", "e2e p50 s", "virtual s", "Δ", "requests/s", "virtual", "Δ", "hit", "failed", "light tenants p99 s", "virtual s"}}
	delta := func(a, b float64) string { return fmt.Sprintf("%+.0f %%", 100*(a/b-1)) }
	for _, p := range pairs {
		w, v := p.Wall, p.Virtual
		t.Rows = append(t.Rows, []string{p.Scenario, p.Policy, plot.Number(w.TTFT50 / scale * 1000),
			plot.Number(w.TTFT50), plot.Number(v.TTFT50), delta(w.TTFT50, v.TTFT50), plot.Number(w.TTFT99), plot.Number(v.TTFT99),
			plot.Number(w.E2E50), plot.Number(v.E2E50), delta(w.E2E50, v.E2E50), plot.Number(w.RPS), plot.Number(v.RPS), delta(w.RPS, v.RPS),
			fmt.Sprintf("%.0f %%", 100*w.Hit), fmt.Sprint(w.Failed), light(w), light(v)})
	}
	return t
}

// TraceResult is one policy on a trace.
type TraceResult struct {
	Policy  string
	Summary stats.Summary
	Reuse   wall.Reuse
}

// TraceRows turns results to rows of the suite "wall".
func TraceRows(scenario string, results []TraceResult) []Row {
	var rows []Row
	for _, r := range results {
		rows = append(rows, Summary("wall", scenario, r.Policy, r.Summary)...)
		row := func(metric string, v int) Row { return Row{"wall", scenario, r.Policy, metric, float64(v), "tokens"} }
		rows = append(rows, row("prompt_tokens", r.Reuse.Prompt), row("cached_tokens", r.Reuse.Cached), row("reuse_bound_tokens", r.Reuse.Bound), row("best_worker_tokens", r.Reuse.Best))
		if r.Reuse.Matched > 0 {
			rows = append(rows, row("matched_tokens", r.Reuse.Matched), row("truth_tokens", r.Reuse.Truth), row("anticipated_tokens", r.Reuse.Anticipated))
		}
	}
	return rows
}

// TraceTable shows latency and reuse of a trace's requests.
func TraceTable(results []TraceResult) plot.Table {
	t := plot.Table{Left: 1, Header: []string{"policy", "TTFT p50 s", "p90", "p99", "mean", "e2e p50 s", "cached", "bound", "bound (512)", "any worker", "router matched", "truth", "matched/truth", "anticipated", "cached/(matched+anticipated)", "failed"}}
	share := func(n, of int) string {
		if of == 0 {
			return "-"
		}
		return fmt.Sprintf("%.1f %%", 100*float64(n)/float64(of))
	}
	for _, r := range results {
		u := r.Reuse
		t.Rows = append(t.Rows, []string{r.Policy, plot.Number(r.Summary.TTFT50), plot.Number(r.Summary.TTFT90), plot.Number(r.Summary.TTFT99), plot.Number(r.Summary.TTFTMean),
			plot.Number(r.Summary.E2E50), share(u.Cached, u.Prompt), share(u.Bound, u.Prompt), share(u.BoundFine, u.Prompt), share(u.Best, u.Prompt), share(u.Matched, u.Prompt), share(u.Truth, u.Prompt),
			share(u.Matched, u.Truth), share(u.Anticipated, u.Prompt), share(u.Cached, u.Matched+u.Anticipated), fmt.Sprint(u.Failed)})
	}
	return t
}
