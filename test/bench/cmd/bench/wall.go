package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/kinference/kinference/internal/bench/report"
	"github.com/kinference/kinference/internal/bench/stats"
	"github.com/kinference/kinference/internal/bench/virtual"
	"github.com/kinference/kinference/internal/bench/wall"
	"github.com/kinference/kinference/internal/bench/workload"
	"github.com/kinference/kinference/internal/fleetsim/engine"
	"github.com/kinference/kinference/test/bench/control"
)

// wallOptions are those of runs through the real stack.
type wallOptions struct {
	scenarios, policies string
	scale               float64
	warm, count         int
	seed                uint64
}

func (o *wallOptions) flags(fs *flag.FlagSet) {
	fs.StringVar(&o.scenarios, "scenarios", "S0,S1,S2", "comma-separated scenarios")
	fs.StringVar(&o.policies, "policies", "random,connection,kinference", "comma-separated; random and connection go straight to the workers, as through a Kubernetes Service")
	fs.Float64Var(&o.scale, "scale", 10, "simulated seconds per second")
	fs.IntVar(&o.warm, "warm", 50, "requests of the warm-up")
	fs.IntVar(&o.count, "count", 150, "requests measured")
	fs.Uint64Var(&o.seed, "seed", workload.HeldOutSeed(0), "seed")
}

func wallCommand(ctx context.Context, fs *flag.FlagSet, args []string, out io.Writer) error {
	var o wallOptions
	o.flags(fs)
	docs := fs.String("docs", "", "folder for wall-load.md; empty: it is not written")
	if err := fs.Parse(args); err != nil {
		return err
	}
	pairs, err := runWall(ctx, o, out)
	if err != nil {
		return err
	}
	about := fmt.Sprintf("%d requests after a warm-up of %d or one for each stream, seed %d, real text over HTTP to three simulated workers at %g times real time, through ingress, router, kvtracker, relay and NATS in one process. "+
		"Seconds are simulated ones; virtual time ran the same requests. Light tenants have a path of their own, which says who they are.", o.count, o.warm, o.seed, o.scale)
	p := &publisher{docs: *docs, out: out}
	command := fmt.Sprintf("kinbench wall -scenarios %s -policies %s -scale %g -warm %d -count %d -docs docs/benchmarks", o.scenarios, o.policies, o.scale, o.warm, o.count)
	if err := p.page("wall-load.md", "The real stack in wall time, under load", command, section("Beside virtual time", about, report.WallTable(pairs, o.scale))); err != nil {
		return err
	}
	fmt.Fprintf(out, "%s\nThrough HTTP at %g times real time (wall, in simulated seconds) and in virtual time; seed %d, %d requests after %d\n%s",
		report.NoGPU, o.scale, o.seed, o.count, o.warm, report.WallTable(pairs, o.scale).Text(textStyle()))
	return nil
}

// runWall runs scenarios in wall time and the same ones in virtual time. Every
// run has a fresh fleet with empty caches.
func runWall(ctx context.Context, o wallOptions, progress io.Writer) ([]report.Pair, error) {
	text, err := wall.NewText()
	if err != nil {
		return nil, err
	}
	scenarios, err := scenariosOf(o.scenarios)
	if err != nil {
		return nil, err
	}
	var pairs []report.Pair
	for _, sc := range scenarios {
		sc.Warm, sc.Count = max(o.warm, sc.Streams), o.count
		for policy := range strings.SplitSeq(o.policies, ",") {
			start := time.Now()
			run, err := wallOnce(ctx, text, sc, o, policy)
			if err != nil {
				return nil, fmt.Errorf("%s %s: %w", sc.Name, policy, err)
			}
			ref, err := virtual.Run(sc, virtual.Options{Policy: policy, Seed: o.seed})
			if err != nil {
				return nil, err
			}
			pairs = append(pairs, report.Pair{Scenario: sc.Name, Policy: policy, Wall: run.Summarise(), Virtual: ref.Summarise()})
			fmt.Fprintf(progress, "%s %s: %.0f s%s\n", sc.Name, policy, time.Since(start).Seconds(), failures(run))
		}
	}
	return pairs, nil
}

// failures says how many requests of a run failed, and why the first did.
func failures(run stats.Run) string {
	if run.FirstError == "" {
		return ""
	}
	n := 0
	for _, s := range run.Samples {
		if s.Failed {
			n++
		}
	}
	return fmt.Sprintf("; %d requests failed, the first one with: %s", n, run.FirstError)
}

func wallOnce(ctx context.Context, text *wall.Text, sc workload.Scenario, o wallOptions, policy string) (stats.Run, error) {
	fleet, err := wall.StartFleet(ctx, 3, engine.L40SQwen27B, o.scale, int64(o.seed))
	if err != nil {
		return stats.Run{}, err
	}
	defer fleet.Stop()
	route, stop, err := routeOf(ctx, fleet, policy, o.seed, sc.Victims, nil)
	if err != nil {
		return stats.Run{}, err
	}
	defer stop()
	var path func(int) string
	if policy == virtual.Kinference && sc.Victims > 0 {
		path = wall.TenantPath
	}
	return wall.RunTenants(ctx, text, sc, o.seed, o.scale, route, path)
}

// routeOf makes the way to a fleet: a Service straight to the workers, or a
// fresh control plane in front of them, with so many light tenants beside the one
// that makes the load, or 0. started, when not nil, is given the control plane.
func routeOf(ctx context.Context, fleet *wall.Fleet, policy string, seed uint64, light int, started func(*control.Control)) (route wall.Route, stop func(), err error) {
	switch policy {
	case "random":
		route, err = wall.ServicePerRequest(fleet.URLs(), seed)
		return route, func() {}, err
	case "connection":
		route, err = wall.ServicePerConnection(fleet.URLs(), seed)
		return route, func() {}, err
	case virtual.Kinference:
		c, err := control.Start(ctx, fleet.Scale, seed, func(dir string) error {
			if light > 0 {
				if err := wall.WriteTenants(dir, light); err != nil {
					return err
				}
			}
			return fleet.WriteConfig(dir)
		})
		if err != nil {
			return nil, nil, err
		}
		if started != nil {
			started(c)
		}
		return wall.Gateway(c.URL), func() { _ = c.Stop() }, nil
	}
	return nil, nil, fmt.Errorf("policy %q does not run in wall time", policy)
}

// traceOptions are those of the Mooncake replay.
type traceOptions struct {
	requests       int
	scale, stretch float64
	policies       string
	profile        string
	cache          int // tokens per worker
	seed           uint64
}

func (o *traceOptions) flags(fs *flag.FlagSet) {
	fs.IntVar(&o.requests, "requests", 400, "number of requests, from the trace's start")
	fs.Float64Var(&o.scale, "scale", 20, "simulated seconds per second")
	fs.Float64Var(&o.stretch, "stretch", 8.5, "factor on the trace's times of arrival: the trace's own rate overloads three workers")
	fs.StringVar(&o.policies, "policies", "random,kinference", "comma-separated")
	fs.StringVar(&o.profile, "profile", engine.L40SPlain16.Name, "hardware profile of the workers")
	// The conversations of the trace go on after one to four million tokens of
	// others: a cache in GPU memory alone has forgotten them by then.
	fs.IntVar(&o.cache, "cache", 2_000_000, "tokens that each worker's cache holds; 0: as the profile")
	fs.Uint64Var(&o.seed, "seed", workload.HeldOutSeed(0), "seed")
}

func mooncake(ctx context.Context, fs *flag.FlagSet, args []string, out io.Writer) error {
	var o traceOptions
	o.flags(fs)
	if err := fs.Parse(args); err != nil {
		return err
	}
	results, source, err := runTrace(ctx, o, out)
	if err != nil {
		return err
	}
	fmt.Fprintf(out, "%s\n%s, arrivals stretched %g times, at %g times real time, workers %s with a cache of %d tokens (0: as the profile)\n%s",
		report.NoGPU, source, o.stretch, o.scale, o.profile, o.cache, report.TraceTable(results).Text(textStyle()))
	return nil
}

// workers is the profile with the size of cache that was asked for.
func (o traceOptions) workers() (engine.Profile, error) {
	p, ok := engine.Lookup(o.profile)
	if !ok {
		return p, fmt.Errorf("unknown profile %q", o.profile)
	}
	if o.cache > 0 {
		p.Blocks = max(o.cache/p.BlockSize, 1)
	}
	return p, nil
}

func runTrace(ctx context.Context, o traceOptions, progress io.Writer) ([]report.TraceResult, string, error) {
	profile, err := o.workers()
	if err != nil {
		return nil, "", err
	}
	trace, source, err := workload.Mooncake(o.requests)
	if err != nil {
		return nil, "", err
	}
	text, err := wall.NewText()
	if err != nil {
		return nil, "", err
	}
	var results []report.TraceResult
	for policy := range strings.SplitSeq(o.policies, ",") {
		start := time.Now()
		r, err := traceOnce(ctx, text, trace, profile, o, policy)
		if err != nil {
			return nil, "", fmt.Errorf("%s: %w", policy, err)
		}
		results = append(results, r)
		fmt.Fprintf(progress, "trace %s: %.0f s", policy, time.Since(start).Seconds())
		if r.Reuse.Failed > 0 {
			fmt.Fprintf(progress, "; %d requests failed, the first one with: %s", r.Reuse.Failed, r.Summary.FirstError)
		}
		fmt.Fprintln(progress)
	}
	return results, source, nil
}

func traceOnce(ctx context.Context, text *wall.Text, trace []workload.TraceRequest, profile engine.Profile, o traceOptions, policy string) (report.TraceResult, error) {
	fleet, err := wall.StartFleet(ctx, 3, profile, o.scale, int64(o.seed))
	if err != nil {
		return report.TraceResult{}, err
	}
	defer fleet.Stop()
	options := wall.TraceOptions{Stretch: o.stretch}
	route, stop, err := routeOf(ctx, fleet, policy, o.seed, 0, func(c *control.Control) {
		options.Explain = c.Explain
	})
	if err != nil {
		return report.TraceResult{}, err
	}
	defer stop()
	options.Route = route
	run, reuse, err := wall.RunTrace(ctx, text, trace, fleet, options)
	return report.TraceResult{Policy: policy, Summary: run.Summarise(), Reuse: reuse}, err
}
