package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"sync/atomic"
	"time"

	"github.com/spf13/cobra"

	"github.com/kinference/kinference/cmd/stack"
	"github.com/kinference/kinference/internal/bench/load"
	"github.com/kinference/kinference/internal/bench/report"
	"github.com/kinference/kinference/internal/bench/stats"
	"github.com/kinference/kinference/internal/bench/wall"
	"github.com/kinference/kinference/internal/bench/workload"
	"github.com/kinference/kinference/internal/fleetsim/engine"
	"github.com/kinference/kinference/internal/plot"
)

// demoScenarios are the published workloads, with as many requests as fit in
// the demo's time.
var demoScenarios = []struct {
	name        string
	warm, count int
}{
	{"S0", 8, 16},
	{"S1", 24, 48},
	{"S2", 24, 96},
}

// demoTimeout ends a demo that hangs.
const demoTimeout = 5 * time.Minute

type demo struct {
	scale float64
	seed  uint64
	dir   string // of results
	keep  bool
	out   io.Writer
	live  bool // out is a terminal
}

func demoCommand() *cobra.Command {
	d := &demo{}
	cmd := &cobra.Command{
		Use:   "demo",
		Short: "Show before and after on three simulated workers (no GPU needed)",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			d.out = cmd.OutOrStdout()
			if f, ok := d.out.(*os.File); ok {
				info, err := f.Stat()
				d.live = err == nil && info.Mode()&os.ModeCharDevice != 0
			}
			return d.run(cmd.Context())
		},
	}
	f := cmd.Flags()
	f.Float64Var(&d.scale, "time-scale", 22, "how many times faster than real hardware time passes")
	f.Uint64Var(&d.seed, "seed", workload.HeldOutSeed(0), "seed of prompts and choices")
	f.StringVar(&d.dir, "out", "out", "folder for demo.json and demo.svg")
	f.BoolVar(&d.keep, "keep", false, "keep serving afterwards, until interrupted")
	return cmd
}

// result is one scenario, without and with Kinference.
type result struct {
	scenario      workload.Scenario
	before, after stats.Summary
}

func (d *demo) run(ctx context.Context) error {
	text, err := wall.NewText()
	if err != nil {
		return err
	}
	timed, cancel := context.WithTimeout(ctx, demoTimeout)
	defer cancel()
	var results []result
	for _, s := range demoScenarios {
		sc, err := workload.Lookup(s.name)
		if err != nil {
			return err
		}
		sc.Warm, sc.Count = s.warm, s.count
		results = append(results, result{scenario: sc})
	}

	// Both sides get a fresh fleet for each scenario: nobody starts with caches
	// that somebody else has filled. The gateway stays, its fleet changes.
	gateway, stop, err := d.gateway(timed)
	if err != nil {
		return err
	}
	defer stop()
	for i := range results {
		r := &results[i]
		if r.before, err = d.service(timed, text, r.scenario); err != nil {
			return err
		}
		if r.after, err = gateway(timed, text, r.scenario); err != nil {
			return err
		}
	}
	if err := d.show(results); err != nil {
		return err
	}
	if d.keep {
		fmt.Fprintln(d.out, "\nServing until interrupted.")
		<-ctx.Done()
	}
	return nil
}

// fleet starts three workers with cold caches.
func (d *demo) fleet(ctx context.Context) (*wall.Fleet, error) {
	return wall.StartFleet(ctx, 3, engine.L40SQwen27B, d.scale, int64(d.seed))
}

// service measures a scenario on a fleet behind what a Kubernetes Service does
// for clients that open a connection per request.
func (d *demo) service(ctx context.Context, text *wall.Text, sc workload.Scenario) (stats.Summary, error) {
	f, err := d.fleet(ctx)
	if err != nil {
		return stats.Summary{}, err
	}
	defer f.Stop()
	route, err := wall.ServicePerRequest(f.URLs(), d.seed)
	if err != nil {
		return stats.Summary{}, err
	}
	return d.measure(ctx, text, sc, "Kubernetes Service", route)
}

type measure func(ctx context.Context, text *wall.Text, sc workload.Scenario) (stats.Summary, error)

// gateway starts Kinference in front of a first fleet and returns how to
// measure a scenario through it.
func (d *demo) gateway(ctx context.Context) (run measure, stop func(), err error) {
	conf, err := os.MkdirTemp("", "kinference-demo-")
	if err != nil {
		return nil, nil, err
	}
	f, err := d.fleet(ctx)
	if err != nil {
		return nil, nil, errors.Join(err, os.RemoveAll(conf))
	}
	var s *stack.Stack
	stop = func() {
		if s != nil {
			_ = s.Stop()
		}
		f.Stop()
		_ = os.RemoveAll(conf)
	}
	if err = f.WriteConfig(conf); err == nil {
		s, err = stack.Start(ctx, stack.Options{ConfigDir: conf, Seed: d.seed, TimeScale: d.scale, DrainTimeout: time.Second, Output: os.Stderr, LogFormat: "text", LogLevel: slog.LevelError})
	}
	if err == nil {
		err = s.WaitReady(ctx)
	}
	if err == nil {
		err = ready(ctx, s.URL())
	}
	if err != nil {
		stop()
		return nil, nil, err
	}
	fmt.Fprintf(d.out, `Three simulated workers (a 27B FP8 model on one L40S each) run %gx faster than real time. No GPU is used.
Kinference serves them at %[2]s/v1. From another terminal:

  curl -N %[2]s/v1/chat/completions -H 'content-type: application/json' \
    -d '{"model": "%[3]s", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 20, "stream": true}'

`, d.scale, s.URL(), wall.Model)

	used := false
	run = func(ctx context.Context, text *wall.Text, sc workload.Scenario) (stats.Summary, error) {
		if used { // engines start anew behind the same addresses: cold caches
			for _, w := range f.Workers {
				if err := w.Restart(); err != nil {
					return stats.Summary{}, err
				}
			}
			if err := ready(ctx, s.URL()); err != nil {
				return stats.Summary{}, err
			}
		}
		used = true
		return d.measure(ctx, text, sc, "Kinference", wall.Gateway(s.URL()))
	}
	return run, stop, nil
}

// ready waits until a request gets through.
func ready(ctx context.Context, url string) error {
	client := load.NewClient()
	defer client.Close()
	body := load.Chat(wall.Model, []load.Message{{Role: "user", Content: " ready"}}, 1)
	return wall.WaitServing(ctx, url, func(ctx context.Context) error {
		return client.Do(ctx, load.Request{URL: url + "/v1/chat/completions", Body: body}).Err
	})
}

// measure runs one scenario and shows how it goes on.
func (d *demo) measure(ctx context.Context, text *wall.Text, sc workload.Scenario, who string, route wall.Route) (stats.Summary, error) {
	var sent atomic.Int64
	total := sc.Warm + sc.Count
	line := func(note string) string {
		return fmt.Sprintf("%-3s %-24s %-19s %3d of %3d requests  %s", sc.Name, sc.Title, who, sent.Load(), total, note)
	}
	done := make(chan struct{})
	shown := make(chan struct{})
	go func() {
		defer close(shown)
		tick := time.NewTicker(100 * time.Millisecond)
		defer tick.Stop()
		for d.live {
			select {
			case <-tick.C:
				fmt.Fprint(d.out, "\r"+line(""))
			case <-done:
				fmt.Fprint(d.out, "\r")
				return
			}
		}
	}()
	run, err := wall.Run(ctx, text, sc, d.seed, d.scale, func(connection int) string {
		sent.Add(1)
		return route(connection)
	})
	close(done)
	<-shown
	if err != nil {
		return stats.Summary{}, err
	}
	s := run.Summarise()
	if s.Failed > 0 {
		return s, fmt.Errorf("%s, %s: %d requests failed, the first with: %s", sc.Name, who, s.Failed, s.FirstError)
	}
	fmt.Fprintln(d.out, line(fmt.Sprintf("TTFT p50 %s s", plot.Number(s.TTFT50))))
	return s, nil
}

// show prints the comparison and writes it to files.
func (d *demo) show(results []result) error {
	table := plot.Table{Header: []string{"workload", "", "TTFT p50 (s)", "TTFT p99 (s)", "end to end p50 (s)", "requests/s", "from cache"}, Left: 2}
	bars := plot.Bars{
		Title: "Median time to first token", Subtitle: report.NoGPU,
		Y:      plot.Axis{Label: "TTFT p50", Unit: "s"},
		Series: []plot.BarSeries{{Name: "Kubernetes Service (random)"}, {Name: "Kinference"}},
	}
	var rows []report.Row
	for _, r := range results {
		for _, side := range []struct {
			who, policy string
			s           stats.Summary
		}{{"Kubernetes Service", "random", r.before}, {"Kinference", "kinference", r.after}} {
			table.Rows = append(table.Rows, []string{r.scenario.Name + " " + r.scenario.Title, side.who, plot.Number(side.s.TTFT50), plot.Number(side.s.TTFT99),
				plot.Number(side.s.E2E50), plot.Number(side.s.RPS), fmt.Sprintf("%.0f %%", 100*side.s.Hit)})
			rows = append(rows, report.Summary("demo", r.scenario.Name, side.policy, side.s)...)
		}
		table.Rows = append(table.Rows, []string{"", "", fmt.Sprintf("%.1fx", r.before.TTFT50/r.after.TTFT50), fmt.Sprintf("%.1fx", r.before.TTFT99/r.after.TTFT99),
			fmt.Sprintf("%+.0f %%", 100*(r.after.E2E50/r.before.E2E50-1)), fmt.Sprintf("%.1fx", r.after.RPS/r.before.RPS), ""})
		bars.Groups = append(bars.Groups, r.scenario.Name+" "+r.scenario.Title)
		bars.Series[0].Values = append(bars.Series[0].Values, r.before.TTFT50)
		bars.Series[1].Values = append(bars.Series[1].Values, r.after.TTFT50)
	}
	style := plot.Style{}
	fmt.Fprintf(d.out, "\n%s\n%s\n", table.Text(style), bars.Text(style))

	jsonPath, svgPath := filepath.Join(d.dir, "demo.json"), filepath.Join(d.dir, "demo.svg")
	if err := report.WriteRows(jsonPath, rows); err != nil {
		return err
	}
	if err := report.Write(svgPath, bars.SVG()); err != nil {
		return err
	}
	fmt.Fprintf(d.out, "Written: %s, %s. Times are simulated seconds; %s\n", jsonPath, svgPath, report.NoGPU)
	return nil
}
