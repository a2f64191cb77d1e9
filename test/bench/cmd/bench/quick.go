package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/kinference/kinference/internal/bench/report"
	"github.com/kinference/kinference/internal/bench/virtual"
)

// quickStreams is a coarser sweep than the full one: its points lie around the
// peaks.
var quickStreams = []int{8, 16, 24, 32, 48, 64}

// quickPolicies are the usual rows and four that stand for other products.
var quickPolicies = slices.Concat(virtual.Policies, []string{"consistenthash", "llmd", "dynamo", "sglang"})

func quick(ctx context.Context, fs *flag.FlagSet, args []string, out io.Writer) error {
	dir := fs.String("out", "out", "folder for bench.json")
	if err := fs.Parse(args); err != nil {
		return err
	}
	start := time.Now()
	fmt.Fprintln(out, report.NoGPU)

	rows, err := quickRouting(out)
	if err != nil {
		return err
	}

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

// quickRouting runs the published scenarios with five seeds, those under load
// with two, and a sweep.
func quickRouting(out io.Writer) ([]report.Row, error) {
	r := virtual.NewRunner()
	var cells []virtual.Cell
	for _, part := range []struct {
		scenarios string
		seeds     int
	}{{"S0,S0s,S1,S2", 5}, {"S1hi,S1over,S2hi,S3,S4,MT2", 2}} {
		var cases []virtual.Case
		for name := range strings.SplitSeq(part.scenarios, ",") {
			c, err := virtual.LookupCase(name)
			if err != nil {
				return nil, err
			}
			cases = append(cases, c)
		}
		more, err := r.Cells(cases, quickPolicies, seedsOf(part.seeds, false))
		if err != nil {
			return nil, err
		}
		fmt.Fprintf(out, "\nRouting in virtual time: means of %d held-out seeds; × and e2e against random\n%s", part.seeds, report.RoutingTable(more).Text(textStyle()))
		cells = append(cells, more...)
	}
	scenarios, err := scenariosOf("S1cap,S2cap")
	if err != nil {
		return nil, err
	}
	caps, err := r.Sweep(scenarios, virtual.Policies, quickStreams, seedsOf(2, false))
	if err != nil {
		return nil, err
	}
	fmt.Fprintf(out, "\nThroughput in virtual time (requests/s) by number of streams: means of 2 held-out seeds\n%s", report.CapacityTable(caps).Text(textStyle()))
	return report.Routing(cells, caps), nil
}
