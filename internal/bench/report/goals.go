package report

import (
	"fmt"
	"math"
	"slices"

	"github.com/kinference/kinference/internal/bench/stats"
	"github.com/kinference/kinference/internal/bench/virtual"
	"github.com/kinference/kinference/internal/plot"
)

// GoalTable compares a policy with what the project wants of its routing; cells
// that are missing leave their goals out.
func GoalTable(cells []virtual.Cell, policy string) plot.Table {
	g := goals{cells: cells, policy: policy, table: plot.Table{Left: 2, Header: []string{"goal", "bound", "measured", "met"}}}
	p50 := func(s stats.Summary) float64 { return s.TTFT50 }
	p90 := func(s stats.Summary) float64 { return s.TTFT90 }
	p99 := func(s stats.Summary) float64 { return s.TTFT99 }
	e2e := func(s stats.Summary) float64 { return s.E2E50 }

	gain := func(scenario, name string, of func(stats.Summary) float64, bound float64) {
		g.least(fmt.Sprintf("%s, TTFT %s of random over ours", scenario, name), bound, "×", g.of(scenario, "random", of)/g.of(scenario, policy, of))
	}
	gain("S1", "p50", p50, 21)
	gain("S1", "p99", p99, 35)
	g.most("S1, e2e p50 of ours over random", .52, "", g.of("S1", policy, e2e)/g.of("S1", "random", e2e))
	gain("S2", "p50", p50, 2.4)
	gain("S2", "p99", p99, 10)
	g.most("S2, e2e p50 of ours over random", .70, "", g.of("S2", policy, e2e)/g.of("S2", "random", e2e))
	g.most("S0, TTFT p50 of ours over random", 1.02, "", g.of("S0", policy, p50)/g.of("S0", "random", p50))
	g.most("S0, TTFT p99 of ours over random", 1, "", g.of("S0", policy, p99)/g.of("S0", "random", p99))
	g.most("MT2, light tenants' TTFT p99", 15, " s", g.of("MT2", policy, func(s stats.Summary) float64 { return s.Light99 }))
	for _, c := range []struct{ many, one, what string }{
		{"R4S1", "S1m", "four routers, gossip"}, {"R4S2", "S2m", "four routers, gossip"}, {"R4S2hi", "S2hi", "four routers, gossip"}, {"R2S3", "S3", "two routers, gossip"},
	} {
		g.most(fmt.Sprintf("%s over %s (%s), TTFT p50", c.many, c.one, c.what), 1.05, "", g.of(c.many, policy, p50)/g.of(c.one, policy, p50))
		g.most(fmt.Sprintf("%s over %s (%s), TTFT p90", c.many, c.one, c.what), 1.5, "", g.of(c.many, policy, p90)/g.of(c.one, policy, p90))
	}
	for _, c := range [][2]string{{"R4S1 alone", "S1m"}, {"R4S2 alone", "S2m"}} {
		g.most(c[0]+" over "+c[1]+", TTFT p90", 1.6, "", g.of(c[0], policy, p90)/g.of(c[1], policy, p90))
	}
	g.most("S2m slow, TTFT p99", 5, " s", g.of("S2m slow", policy, p99))
	for _, name := range []string{"S0", "S1", "S1hi", "S1over", "S2", "S2hi", "S3", "S4", "MT2"} {
		off, share := g.of(name, policy, func(s stats.Summary) float64 { return s.Off }), g.of(name, policy, func(s stats.Summary) float64 { return s.OffShare })
		if !math.IsNaN(off) {
			g.row(name+", median error of predictions", "30 ms or 10 %", fmt.Sprintf("%.0f ms, %.1f %%", 1000*off, 100*share), off <= .03 || share <= .1)
		}
	}
	return g.table
}

type goals struct {
	cells  []virtual.Cell
	policy string
	table  plot.Table
}

// of is the mean over the seeds of a metric, NaN where the cell is missing.
func (g *goals) of(scenario, policy string, f func(stats.Summary) float64) float64 {
	c, ok := find(g.cells, scenario, policy)
	if !ok {
		return math.NaN()
	}
	return f(c.Mean())
}

func (g *goals) least(goal string, bound float64, unit string, got float64) {
	if !math.IsNaN(got) {
		g.row(goal, "≥ "+plot.Number(bound)+unit, plot.Number(got)+unit, got >= bound)
	}
}

func (g *goals) most(goal string, bound float64, unit string, got float64) {
	if !math.IsNaN(got) {
		g.row(goal, "≤ "+plot.Number(bound)+unit, plot.Number(got)+unit, got <= bound)
	}
}

func (g *goals) row(goal, bound, got string, met bool) {
	word := "**no**"
	if met {
		word = "yes"
	}
	g.table.Rows = append(g.table.Rows, []string{goal, bound, got, word})
}

// Missed tells how many goals of a GoalTable are not met.
func Missed(t plot.Table) int {
	n := 0
	for _, r := range t.Rows {
		if slices.Contains(r, "**no**") {
			n++
		}
	}
	return n
}
