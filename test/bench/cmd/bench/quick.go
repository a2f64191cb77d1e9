package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"path/filepath"
	"time"

	"github.com/kinference/kinference/internal/bench/report"
	"github.com/kinference/kinference/internal/bench/virtual"
)

// quickStreams is a coarser sweep than the full one: its points lie around the
// peaks.
var quickStreams = []int{8, 12, 16, 24, 32, 48, 64, 96}

func quick(ctx context.Context, fs *flag.FlagSet, args []string, out io.Writer) error {
	dir := fs.String("out", "out", "folder for bench.json")
	if err := fs.Parse(args); err != nil {
		return err
	}
	start := time.Now()
	fmt.Fprintln(out, report.NoGPU)

	scenarios, err := scenariosOf("S0,S0s,S1,S2")
	if err != nil {
		return err
	}
	cells, err := virtual.Table(scenarios, virtual.Policies, seedsOf(5, false))
	if err != nil {
		return err
	}
	fmt.Fprintf(out, "\nRouting in virtual time: means of 5 held-out seeds; × and e2e against random\n%s", report.RoutingTable(cells).Text(textStyle()))
	scenarios, err = scenariosOf("S1cap,S2cap")
	if err != nil {
		return err
	}
	caps, err := virtual.Sweep(scenarios, virtual.Policies, quickStreams, seedsOf(2, false))
	if err != nil {
		return err
	}
	fmt.Fprintf(out, "\nThroughput in virtual time (requests/s) by number of streams: means of 2 held-out seeds\n%s", report.CapacityTable(caps).Text(textStyle()))
	rows := report.Routing(cells, caps)

	speeds, _, err := measureTokenizers(200*time.Millisecond, out)
	if err != nil {
		return err
	}
	rows = append(rows, report.Tokenizer(speeds)...)

	rows = append(rows, report.Index(measureIndex(indexBlocks, indexWorkers, out))...)

	results, rates, err := runOverhead(ctx, overheadOptions{rounds: 2, probes: 100, each: time.Second})
	if err != nil {
		return err
	}
	fmt.Fprint(out, overheadTitle, report.OverheadTable(results).Text(textStyle()), ratesTitle, report.RatesTable(rates).Text(textStyle()))
	rows = append(append(rows, report.Overhead(results)...), report.Rates(rates)...)

	path := filepath.Join(*dir, "bench.json")
	if err := report.WriteRows(path, rows); err != nil {
		return err
	}
	fmt.Fprintf(out, "\n%d rows in %s, %.0f s\n", len(rows), path, time.Since(start).Seconds())
	return nil
}
