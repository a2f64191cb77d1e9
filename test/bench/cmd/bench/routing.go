package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"

	"github.com/kinference/kinference/internal/bench/report"
	"github.com/kinference/kinference/internal/bench/stats"
	"github.com/kinference/kinference/internal/bench/virtual"
	"github.com/kinference/kinference/internal/bench/workload"
)

// routingOptions are those of the virtual-time tables.
type routingOptions struct {
	scenarios, policies string
	seeds               int
	tuning, sweep       bool
	quick               bool
	docs                string
	runs, again         string
}

func (o *routingOptions) flags(fs *flag.FlagSet) {
	fs.StringVar(&o.scenarios, "scenarios", "", "comma-separated scenarios; empty: all")
	fs.StringVar(&o.policies, "policies", "", "comma-separated policies; empty: those of each scenario's section")
	fs.IntVar(&o.seeds, "seeds", 5, "number of seeds")
	fs.BoolVar(&o.tuning, "tuning", false, "use tuning seeds instead of the held-out ones")
	fs.BoolVar(&o.sweep, "sweep", false, "sweep the load instead, for peak throughput")
	fs.BoolVar(&o.quick, "quick", false, "two seeds, and without the longest scenarios")
	fs.StringVar(&o.docs, "docs", "", "folder for routing2.json, routing2.md and plots; empty: none are written")
	fs.StringVar(&o.runs, "runs", "", "file of runs: those in it are not made again, and it holds those of this call afterwards, no others")
	fs.StringVar(&o.again, "again", "kinference,k2,k2-ttft,k2-throughput,oracle", "policies that are run again whatever -runs holds")
}

// slow are scenarios that --quick leaves out.
var slow = []string{"W32", "MC64", "MC16", "MC8"}

func routing(_ context.Context, fs *flag.FlagSet, args []string, out io.Writer) error {
	var o routingOptions
	o.flags(fs)
	if err := fs.Parse(args); err != nil {
		return err
	}
	fmt.Fprintln(out, report.NoGPU)
	if o.quick {
		o.seeds = min(o.seeds, 2)
	}
	seeds := seedsOf(o.seeds, o.tuning)
	if o.sweep {
		if o.scenarios == "" {
			o.scenarios = "S1cap,S2cap"
		}
		scenarios, err := scenariosOf(o.scenarios)
		if err != nil {
			return err
		}
		policies := virtual.Policies
		if o.policies != "" {
			policies = strings.Split(o.policies, ",")
		}
		caps, err := virtual.Sweep(scenarios, policies, virtual.SweepStreams, seeds)
		if err != nil {
			return err
		}
		fmt.Fprintf(out, "Throughput (requests/s) by number of streams, mean of %d seeds\n%s\n%s", o.seeds, report.CapacityTable(caps).Text(textStyle()), report.KeptTable(caps).Text(textStyle()))
		return nil
	}
	cells, err := routingCells(o, virtual.NewRunner(), seeds, out)
	if err != nil {
		return err
	}
	names := casesIn(cells)
	fmt.Fprintf(out, "Means of %d seeds at most\n%s\nDistance to the best other policy\n%s\nPredictions\n%s\nGoals\n%s", o.seeds,
		report.CaseTable(cells, subject(cells), names...).Text(textStyle()),
		report.GapTable(cells, subject(cells), rivals(cells), names...).Text(textStyle()),
		report.ErrorTable(cells, subject(cells), names...).Text(textStyle()),
		report.GoalTable(cells, subject(cells)).Text(textStyle()))
	if o.docs == "" {
		return nil
	}
	p := &publisher{docs: o.docs, out: out}
	return p.cases(o, cells, seeds)
}

// subject is the policy that the others are compared with.
func subject(cells []virtual.Cell) string {
	for _, name := range []string{virtual.Kinference, "k2"} {
		if slices.ContainsFunc(cells, func(c virtual.Cell) bool { return c.Policy == name }) {
			return name
		}
	}
	return cells[0].Policy
}

// rivals are the policies that could be used in place of the subject: not the
// bound, and not the subject by another name or objective.
func rivals(cells []virtual.Cell) []string {
	var out []string
	for _, c := range cells {
		switch c.Policy {
		case virtual.Oracle, virtual.Kinference, "k2", virtual.K2TTFT, virtual.K2Throughput:
		default:
			if !slices.Contains(out, c.Policy) {
				out = append(out, c.Policy)
			}
		}
	}
	return out
}

func casesIn(cells []virtual.Cell) []string {
	var out []string
	for _, c := range cells {
		if !slices.Contains(out, c.Scenario) {
			out = append(out, c.Scenario)
		}
	}
	return out
}

// routingCells runs what the options ask for, and says so if the trace was missing.
func routingCells(o routingOptions, r *virtual.Runner, seeds []uint64, out io.Writer) ([]virtual.Cell, error) {
	if o.runs != "" {
		if err := know(r, o, out); err != nil {
			return nil, err
		}
	}
	cells, err := runCases(o, r, seeds, out)
	if err != nil {
		return nil, err
	}
	if o.runs != "" {
		if err := keep(o, cells, seeds); err != nil {
			return nil, err
		}
	}
	missing, err := noTrace(casesIn(cells)...)
	if missing != "" {
		fmt.Fprintln(out, missing)
	}
	return cells, err
}

// noTrace says that the cases of the Mooncake trace among some have generated
// requests; empty if they are the trace's, or there are none.
func noTrace(cases ...string) (string, error) {
	for _, name := range cases {
		if c, err := virtual.LookupCase(name); err == nil && c.Mooncake != nil {
			return workload.MooncakeMissing()
		}
	}
	return "", nil
}

// runCases runs the cases that the options name; without any, section by section.
func runCases(o routingOptions, r *virtual.Runner, seeds []uint64, out io.Writer) ([]virtual.Cell, error) {
	var cells []virtual.Cell
	if o.scenarios == "" {
		for _, g := range virtual.Groups() {
			for _, name := range g.Cases {
				if o.quick && slices.Contains(slow, name) {
					continue
				}
				more, err := runCase(o, r, g.Policies, name, seeds)
				if err != nil {
					return nil, err
				}
				cells = append(cells, more...)
				fmt.Fprint(out, name, " ")
			}
		}
		fmt.Fprintln(out)
		return cells, nil
	}
	for name := range strings.SplitSeq(o.scenarios, ",") {
		name = strings.TrimSpace(name)
		policies := virtual.Policies
		for _, g := range virtual.Groups() {
			if slices.Contains(g.Cases, name) {
				policies = g.Policies
			}
		}
		more, err := runCase(o, r, policies, name, seeds)
		if err != nil {
			return nil, err
		}
		cells = append(cells, more...)
	}
	return cells, nil
}

// mostRequests bounds the seeds of a case with many requests, but for two: one run over
// most of the trace says as much as many of a short scenario.
const mostRequests = 60_000

func runCase(o routingOptions, r *virtual.Runner, policies []string, name string, seeds []uint64) ([]virtual.Cell, error) {
	c, err := virtual.LookupCase(name)
	if err != nil {
		return nil, err
	}
	if o.policies != "" {
		policies = strings.Split(o.policies, ",")
	}
	requests := c.Scenario.Warm + c.Scenario.Count
	if c.Mooncake != nil {
		requests = c.Mooncake.Requests
	}
	seeds = seeds[:min(len(seeds), max(2, mostRequests/requests))]
	return r.Cells([]virtual.Case{c}, policies, seeds)
}

// know gives the runner what an earlier file holds of unchanged cases.
func know(r *virtual.Runner, o routingOptions, out io.Writer) error {
	data, err := os.ReadFile(o.runs)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	var kept report.Results
	if err := json.Unmarshal(data, &kept); err != nil {
		return fmt.Errorf("read %s: %w", o.runs, err)
	}
	used := 0
	for _, cell := range kept.Cells {
		c, err := virtual.LookupCase(cell.Scenario)
		if err != nil || c.Fingerprint() != cell.Case || slices.Contains(strings.Split(o.again, ","), cell.Policy) {
			continue
		}
		missing, err := noTrace(c.Name)
		if err != nil {
			return err
		}
		if c.Mooncake != nil && missing != kept.NoTrace {
			continue // of other requests
		}
		for i := range min(len(cell.Runs), len(kept.Seeds)) {
			r.Know(c, cell.Policy, kept.Seeds[i], cell.Runs[i])
			used++
		}
	}
	fmt.Fprintf(out, "%d runs from %s\n", used, o.runs)
	return nil
}

// command is how the page was made, for its head.
func (o routingOptions) command() string {
	return fmt.Sprintf("kinbench routing -seeds %d -docs docs/benchmarks", o.seeds)
}

// origin is what results came from.
func (o routingOptions) origin(missing string) report.Origin {
	return report.Origin{Command: o.command(), Go: runtime.Version(), Note: report.NoGPU, NoTrace: missing}
}

// keep writes the file of runs.
func keep(o routingOptions, cells []virtual.Cell, seeds []uint64) error {
	missing, err := noTrace(casesIn(cells)...)
	if err != nil {
		return err
	}
	kept := report.Results{Origin: o.origin(missing), Seeds: seeds}
	for _, c := range cells {
		of, err := virtual.LookupCase(c.Scenario)
		if err != nil {
			return err
		}
		kept.Cells = append(kept.Cells, report.Kept{Scenario: c.Scenario, Policy: c.Policy, Case: of.Fingerprint(), Runs: c.Runs})
	}
	data, err := report.MarshalResults(kept)
	if err != nil {
		return err
	}
	return report.Write(o.runs, data)
}

// cases writes the page of all scenarios, its data and plots.
func (p *publisher) cases(o routingOptions, cells []virtual.Cell, seeds []uint64) error {
	names := casesIn(cells)
	missing, err := noTrace(names...)
	if err != nil {
		return err
	}
	data, err := report.MarshalMeans(report.MeansOf(o.origin(missing), cells))
	if err != nil {
		return err
	}
	if err := report.Write(filepath.Join(p.docs, "routing2.json"), data); err != nil {
		return err
	}
	who := subject(cells)
	shown := []string{"random", "consistenthash", "llmd", "dynamo", "sglang", "predictedttft", who, virtual.Oracle}
	loads := []string{"S1", "S1hi", "S1over", "S2", "S2hi", "S3", "S4", "MT2"}
	var plots []string
	for _, pl := range []struct {
		name, alt, title, label string
		of                      func(stats.Summary) float64
	}{
		{"routing2_mean.svg", "Mean time to first token by scenario and policy", "Time to first token, mean", "TTFT mean", func(s stats.Summary) float64 { return s.TTFTMean }},
		{"routing2_p99.svg", "99th percentile of time to first token by scenario and policy", "Time to first token, 99th percentile", "TTFT p99", func(s stats.Summary) float64 { return s.TTFT99 }},
	} {
		md, err := p.plot(pl.name, pl.alt, report.CaseBars(cells, pl.title, pl.label, pl.of, shown, loads...).SVG())
		if err != nil {
			return err
		}
		plots = append(plots, md)
	}
	goals := report.GoalTable(cells, who)
	losses := report.Losses(cells, who, rivals(cells), .03, names...)
	parts := []string{
		fmt.Sprintf("Means of %d held-out seeds, fewer where they would hold more than %d requests: the figures with their standard errors and numbers of runs are in [routing2.json](routing2.json). Scenarios and policies: [README](README.md).\n", len(seeds), mostRequests),
		section("Goals", fmt.Sprintf("What the project wants of `%s`: %d of %d are met.", who, len(goals.Rows)-report.Missed(goals), len(goals.Rows)), goals),
		section("Distance to the best other policy", "By how much `"+who+"` is worse than the best of the other policies in each metric, which may be another one in each: a minus is better than all of them. The number after ± is two standard errors of the difference, seed by seed. The oracle is no rival: it cannot be had.",
			report.GapTable(cells, who, rivals(cells), names...)),
		"## Losses\n\nEvery metric in which `" + who + "` is more than 3 % worse than the best other policy; in bold those that still are with the noise taken off:\n\n* " + strings.Join(losses, "\n* ") + "\n",
		plots[0], plots[1],
	}
	if missing != "" {
		parts = slices.Insert(parts, 0, "**"+missing+".**\n")
	}
	for _, g := range virtual.Groups() {
		parts = append(parts, section(g.Title, g.About, report.CaseTable(cells, who, g.Cases...)))
	}
	parts = append(parts, section("Predictions", "How far the TTFT that `"+who+"` predicted when it sent a request to a worker was from what came; time in line is part of both. `S2m err` has wrong predictions by design.", report.ErrorTable(cells, who, names...)))
	return p.page("routing2.md", "Routing: every scenario and policy", o.command(), parts...)
}

// sweepOver are the loads at which S1's throughput is looked at beyond its peak.
var sweepOver = []int{8, 16, 24, 32, 48, 64, 96}

// overload sweeps S1 with its answers of full length beyond saturation.
func overload(r *virtual.Runner, policies []string, seeds []uint64) ([]virtual.Capacity, error) {
	sc, err := workload.Lookup("S1")
	if err != nil {
		return nil, err
	}
	return r.Sweep([]workload.Scenario{sc}, policies, sweepOver, seeds)
}
