package report

import (
	"fmt"

	"github.com/kinference/kinference/internal/bench/overhead"
	"github.com/kinference/kinference/internal/plot"
)

// Overhead turns results to rows of the suite "overhead".
func Overhead(results []overhead.Result) []Row {
	var rows []Row
	for _, r := range results {
		row := func(metric string, v float64, unit string) Row {
			return Row{"overhead", r.Cell.Name(), r.Path, metric, round(v), unit}
		}
		rows = append(rows, row("latency_p50_ms", r.P50, "ms"), row("latency_p99_ms", r.P99, "ms"))
		if r.Path != overhead.Direct {
			rows = append(rows, row("added_latency_p50_ms", r.Added50, "ms"), row("added_latency_p99_ms", r.Added99, "ms"))
		}
		if r.Times50 > 0 && r.Path != overhead.Direct && r.Path != overhead.ReverseProxy {
			rows = append(rows, row("times_reverse_proxy_p50", r.Times50, "ratio"), row("times_reverse_proxy_p99", r.Times99, "ratio"))
		}
	}
	return rows
}

// OverheadTable shows latencies to the first event, a path a row.
func OverheadTable(results []overhead.Result) plot.Table {
	t := plot.Table{Left: 2, Header: []string{"cell", "path", "p50 ms", "p99 ms", "added p50 ms", "added p99 ms", "× proxy p50", "× proxy p99", "probes", "failed"}}
	for _, r := range results {
		added, times := []string{"", ""}, []string{"", ""}
		if r.Path != overhead.Direct {
			added = []string{plot.Number(r.Added50), plot.Number(r.Added99)}
			if r.Times50 > 0 {
				times = []string{plot.Number(r.Times50), plot.Number(r.Times99)}
			}
		}
		t.Rows = append(t.Rows, []string{r.Cell.Name(), r.Path, plot.Number(r.P50), plot.Number(r.P99), added[0], added[1], times[0], times[1], fmt.Sprint(r.Probes), fmt.Sprint(r.Failed)})
	}
	return t
}

// Rates turns rates to rows of the suite "overhead".
func Rates(rates []overhead.Rate) []Row {
	var rows []Row
	for _, r := range rates {
		row := func(metric string, v float64, unit string) Row {
			return Row{"overhead", r.Cell.Name() + "_closed_loop", r.Path, metric, round(v), unit}
		}
		rows = append(rows, row("rps", r.PerSecond, "requests/s"), row("latency_p50_ms", r.P50, "ms"), row("latency_p99_ms", r.P99, "ms"))
	}
	return rows
}

// RatesTable shows what each path carries.
func RatesTable(rates []overhead.Rate) plot.Table {
	t := plot.Table{Left: 2, Header: []string{"cell", "path", "requests/s", "p50 ms", "p99 ms", "failed"}}
	for _, r := range rates {
		t.Rows = append(t.Rows, []string{r.Cell.Name(), r.Path, plot.Number(r.PerSecond), plot.Number(r.P50), plot.Number(r.P99), fmt.Sprint(r.Failed)})
	}
	return t
}

// Disconnects turns results to rows of the suite "overhead".
func Disconnects(path string, results []overhead.Disconnect) []Row {
	var rows []Row
	for i := range results {
		d := &results[i]
		row := func(metric string, v float64, unit string) Row {
			return Row{"overhead", d.Name(), path, metric, round(v), unit}
		}
		rows = append(rows, row("freed_p50_ms", d.P50, "ms"), row("freed_p99_ms", d.P99, "ms"), row("freed_over_100ms", float64(d.Over), "requests"))
	}
	return rows
}

// DisconnectsTable shows how soon workers were free.
func DisconnectsTable(results []overhead.Disconnect) plot.Table {
	t := plot.Table{Left: 1, Header: []string{"case", "p50 ms", "p99 ms", "max ms", "over 100 ms", "disconnects"}}
	for i := range results {
		d := &results[i]
		t.Rows = append(t.Rows, []string{d.Name(), plot.Number(d.P50), plot.Number(d.P99), plot.Number(d.Max), fmt.Sprint(d.Over), fmt.Sprint(d.Samples)})
	}
	return t
}
