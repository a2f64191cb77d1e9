// Package report writes what the benchmarks measured: rows for machines
// (out/bench.json), tables and plots for people.
//
// Functions are pure except for the Write ones; none is for concurrent writers
// of one path.
package report

import (
	"encoding/json"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strings"

	"github.com/kinference/kinference/internal/bench/stats"
	"github.com/kinference/kinference/internal/bench/tokenspeed"
	"github.com/kinference/kinference/internal/bench/virtual"
	"github.com/kinference/kinference/internal/bench/workload"
	"github.com/kinference/kinference/internal/plot"
)

// NoGPU goes with every figure about latency or throughput of a fleet.
const NoGPU = "Simulated workers (timing model of an L40S with a 27B FP8 model); no GPU was used."

// Row is one figure of out/bench.json.
type Row struct {
	Suite    string  `json:"suite"`
	Scenario string  `json:"scenario"`
	Policy   string  `json:"policy"`
	Metric   string  `json:"metric"`
	Value    float64 `json:"value"`
	Unit     string  `json:"unit"`
}

// WriteRows writes rows as a JSON array, one row a line. Figures that do not
// exist (NaN) are left out: JSON has no word for them.
func WriteRows(path string, rows []Row) error {
	var b strings.Builder
	b.WriteString("[")
	sep := "\n"
	for _, r := range rows {
		if math.IsNaN(r.Value) || math.IsInf(r.Value, 0) {
			continue
		}
		line, err := json.Marshal(r)
		if err != nil {
			return fmt.Errorf("encode row %+v: %w", r, err)
		}
		b.WriteString(sep + "  " + string(line))
		sep = ",\n"
	}
	b.WriteString("\n]\n")
	return Write(path, []byte(b.String()))
}

// Write writes a file and the folder that it is in.
func Write(path string, data []byte) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	return os.WriteFile(path, data, 0o644)
}

// Summary turns one cell's metrics to rows.
func Summary(suite, scenario, policy string, s stats.Summary) []Row {
	row := func(metric string, value float64, unit string) Row {
		return Row{suite, scenario, policy, metric, round(value), unit}
	}
	rows := []Row{
		row("ttft_p50", s.TTFT50, "s"), row("ttft_p90", s.TTFT90, "s"), row("ttft_p99", s.TTFT99, "s"),
		row("e2e_p50", s.E2E50, "s"), row("e2e_p99", s.E2E99, "s"),
		row("rps", s.RPS, "requests/s"), row("hit_rate", s.Hit, "ratio"),
	}
	if s.Light99 > 0 {
		rows = append(rows, row("light_ttft_p50", s.Light50, "s"), row("light_ttft_p99", s.Light99, "s"))
	}
	if s.Jain > 0 {
		rows = append(rows, row("jain", s.Jain, "ratio"))
	}
	return rows
}

// round keeps six significant digits: more are noise in diffs.
func round(v float64) float64 {
	if v == 0 || math.IsNaN(v) || math.IsInf(v, 0) {
		return v
	}
	p := math.Pow(10, 5-math.Floor(math.Log10(math.Abs(v))))
	return math.Round(v*p) / p
}

// Routing turns tables and sweeps to rows of the suite "routing".
func Routing(cells []virtual.Cell, caps []virtual.Capacity) []Row {
	var rows []Row
	for _, c := range cells {
		rows = append(rows, Summary("routing", c.Scenario, c.Policy, c.Mean())...)
	}
	for _, c := range caps {
		rows = append(rows, Row{"routing", c.Scenario, c.Policy, "peak_rps", round(c.Peak), "requests/s"})
	}
	return rows
}

// RoutingTable shows cells, and how much better than the first policy of its
// scenario each one is.
func RoutingTable(cells []virtual.Cell) plot.Table {
	t := plot.Table{Left: 2, Header: []string{"scenario", "policy", "TTFT p50 s", "p90", "p99", "e2e p50 s", "p99", "requests/s", "hit", "TTFT p50 ×", "p99 ×", "e2e"}}
	base := map[string]stats.Summary{}
	for _, c := range cells {
		m := c.Mean()
		b, seen := base[c.Scenario]
		if !seen {
			base[c.Scenario], b = m, m
		}
		t.Rows = append(t.Rows, []string{
			c.Scenario, c.Policy, plot.Number(m.TTFT50), plot.Number(m.TTFT90), plot.Number(m.TTFT99), plot.Number(m.E2E50), plot.Number(m.E2E99),
			plot.Number(m.RPS), fmt.Sprintf("%.0f %%", 100*m.Hit),
			fmt.Sprintf("%.1f", b.TTFT50/m.TTFT50), fmt.Sprintf("%.1f", b.TTFT99/m.TTFT99), fmt.Sprintf("%+.0f %%", 100*(m.E2E50/b.E2E50-1)),
		})
	}
	return t
}

// SpreadTable shows, for each cell, the lowest, median and highest TTFT p50 and
// p99 over the seeds, and the median of the paired differences to the first
// policy of the scenario.
func SpreadTable(cells []virtual.Cell) plot.Table {
	t := plot.Table{Left: 2, Header: []string{"scenario", "policy", "TTFT p50 min", "median", "max", "p99 min", "median", "max", "paired TTFT mean", "paired e2e p50"}}
	base := map[string]virtual.Cell{}
	for _, c := range cells {
		b, seen := base[c.Scenario]
		if !seen {
			base[c.Scenario], b = c, c
		}
		spread := func(f func(stats.Summary) float64) []string {
			var v []float64
			lo, hi := math.Inf(1), math.Inf(-1)
			for _, r := range c.Runs {
				v = append(v, f(r))
				lo, hi = min(lo, f(r)), max(hi, f(r))
			}
			return []string{plot.Number(lo), plot.Number(stats.Median(v)), plot.Number(hi)}
		}
		paired := func(f func(stats.Summary) float64) string {
			return fmt.Sprintf("%+.1f %%", 100*Paired(b, c, f))
		}
		cells := append([]string{c.Scenario, c.Policy}, spread(func(s stats.Summary) float64 { return s.TTFT50 })...)
		cells = append(cells, spread(func(s stats.Summary) float64 { return s.TTFT99 })...)
		t.Rows = append(t.Rows, append(cells, paired(func(s stats.Summary) float64 { return s.TTFTMean }), paired(func(s stats.Summary) float64 { return s.E2E50 })))
	}
	return t
}

// Paired is the median over seeds of the relative difference that cell c makes
// to base on the same seed: -0.5 means half of it.
func Paired(base, c virtual.Cell, f func(stats.Summary) float64) float64 {
	var v []float64
	for i := range min(len(base.Runs), len(c.Runs)) {
		v = append(v, f(c.Runs[i])/f(base.Runs[i])-1)
	}
	return stats.Median(v)
}

// CapacityTable shows throughput by load.
func CapacityTable(caps []virtual.Capacity) plot.Table {
	t := plot.Table{Left: 2, Header: []string{"scenario", "policy"}}
	base := map[string]float64{}
	for i, c := range caps {
		row := []string{c.Scenario, c.Policy}
		for _, l := range c.Loads {
			if i == 0 {
				t.Header = append(t.Header, fmt.Sprint(l.Streams))
			}
			row = append(row, plot.Number(l.RPS))
		}
		if _, seen := base[c.Scenario]; !seen {
			base[c.Scenario] = c.Peak
		}
		t.Rows = append(t.Rows, append(row, plot.Number(c.Peak), fmt.Sprintf("%.1f", c.Peak/base[c.Scenario])))
	}
	t.Header = append(t.Header, "peak", "×")
	return t
}

// LatencyBars plots the TTFT medians of a table's scenarios.
func LatencyBars(cells []virtual.Cell, scenarios ...string) plot.Bars {
	return bars(cells, scenarios, "Time to first token, median", plot.Axis{Label: "TTFT p50", Unit: "s"}, func(s stats.Summary) float64 { return s.TTFT50 })
}

// TailBars plots the TTFT 99th percentiles.
func TailBars(cells []virtual.Cell, scenarios ...string) plot.Bars {
	return bars(cells, scenarios, "Time to first token, 99th percentile", plot.Axis{Label: "TTFT p99", Unit: "s", Log: true}, func(s stats.Summary) float64 { return s.TTFT99 })
}

func bars(cells []virtual.Cell, scenarios []string, title string, y plot.Axis, f func(stats.Summary) float64) plot.Bars {
	b := plot.Bars{Title: title, Subtitle: NoGPU, Y: y}
	series := map[string]int{}
	for _, name := range scenarios {
		group := name
		if sc, err := workload.Lookup(name); err == nil {
			group += " " + sc.Title
		}
		b.Groups = append(b.Groups, group)
	}
	for _, c := range cells {
		for g, name := range scenarios {
			if c.Scenario != name {
				continue
			}
			i, seen := series[c.Policy]
			if !seen {
				i = len(b.Series)
				series[c.Policy] = i
				b.Series = append(b.Series, plot.BarSeries{Name: c.Policy, Values: make([]float64, len(scenarios))})
				for j := range b.Series[i].Values {
					b.Series[i].Values[j] = math.NaN()
				}
			}
			b.Series[i].Values[g] = f(c.Mean())
		}
	}
	return b
}

// CapacityLines plots one scenario's sweep.
func CapacityLines(caps []virtual.Capacity, scenario string) plot.Lines {
	title := "Throughput by load: " + scenario
	if sc, err := workload.Lookup(scenario); err == nil {
		title += ", " + sc.Title
	}
	l := plot.Lines{Title: title, Subtitle: NoGPU,
		X: plot.Axis{Label: "concurrent streams", Log: true}, Y: plot.Axis{Label: "throughput", Unit: "requests/s"}}
	for _, c := range caps {
		if c.Scenario != scenario {
			continue
		}
		s := plot.Series{Name: c.Policy}
		for _, load := range c.Loads {
			s.Points = append(s.Points, plot.Point{X: float64(load.Streams), Y: load.RPS})
		}
		l.Series = append(l.Series, s)
	}
	return l
}

// Tokenizer turns speeds to rows of the suite "tokenizer": the text is the
// scenario, the tokenizer the policy.
func Tokenizer(speeds []tokenspeed.Speed) []Row {
	var rows []Row
	for _, s := range speeds {
		rows = append(rows, Row{"tokenizer", s.Text, s.Tokenizer, "mb_per_s", round(s.MBs), "MB/s"})
	}
	return rows
}

// TokenizerTable shows speeds, a tokenizer a row.
func TokenizerTable(speeds []tokenspeed.Speed) plot.Table {
	t := plot.Table{Left: 1, Header: []string{"tokenizer"}}
	for i, s := range speeds {
		if i == 0 || s.Tokenizer != speeds[i-1].Tokenizer {
			t.Rows = append(t.Rows, []string{s.Tokenizer})
		}
		if s.Tokenizer == speeds[0].Tokenizer {
			t.Header = append(t.Header, s.Text+" MB/s", "bytes/token")
		}
		last := &t.Rows[len(t.Rows)-1]
		*last = append(*last, plot.Number(s.MBs), fmt.Sprintf("%.1f", s.BytesPerToken))
	}
	return t
}
