// Command bench (built as bin/kinbench) runs the benchmarks.
//
//	kinbench quick      what a commit needs, in at most a minute; writes out/bench.json
//	kinbench full       everything; rewrites docs/benchmarks
//	kinbench routing    the virtual-time tables alone, on seeds of choice
//	kinbench tokenizer  tokenizer throughput alone
//	kinbench kvindex    the KV index alone
//	kinbench overhead   added latency of the gateway alone
//	kinbench wall       a scenario through the real HTTP stack
//	kinbench mooncake   the Mooncake trace through the real HTTP stack
//
// Workers are simulated in all of them: no GPU is used.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/kinference/kinference/internal/bench/report"
	"github.com/kinference/kinference/internal/bench/tokenspeed"
	"github.com/kinference/kinference/internal/bench/workload"
	"github.com/kinference/kinference/internal/plot"
)

type command struct {
	name, about string
	run         func(ctx context.Context, fs *flag.FlagSet, args []string, out io.Writer) error
}

var commands = []command{
	{"quick", "what a commit needs, in at most a minute; writes bench.json", quick},
	{"full", "everything; rewrites the published tables and plots", full},
	{"routing", "virtual-time tables, on seeds of choice", routing},
	{"tokenizer", "tokenizer throughput", tokenizer},
	{"kvindex", "look-ups, ingest and memory of the KV index", kvindexCommand},
	{"overhead", "latency that the gateway adds", overheadCommand},
	{"wall", "scenarios through the real HTTP stack", wallCommand},
	{"mooncake", "the Mooncake trace through the real HTTP stack", mooncake},
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, os.Args[1:], os.Stdout)
	stop()
	if err != nil {
		if !errors.Is(err, flag.ErrHelp) {
			fmt.Fprintln(os.Stderr, "kinbench:", err)
		}
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string, out io.Writer) error {
	if len(args) > 0 {
		for _, c := range commands {
			if c.name == args[0] {
				return c.run(ctx, flag.NewFlagSet("kinbench "+c.name, flag.ContinueOnError), args[1:], out)
			}
		}
	}
	fmt.Fprintln(out, "usage: kinbench COMMAND [flags]")
	for _, c := range commands {
		fmt.Fprintf(out, "  %-10s %s\n", c.name, c.about)
	}
	if len(args) > 0 && args[0] != "help" {
		return fmt.Errorf("unknown command %q", args[0])
	}
	return nil
}

// textStyle follows what the terminal says that it can show.
func textStyle() plot.Style {
	locale := strings.ToUpper(os.Getenv("LC_ALL") + os.Getenv("LC_CTYPE") + os.Getenv("LANG"))
	return plot.Style{ASCII: locale != "" && !strings.Contains(locale, "UTF")}
}

// seedsOf returns the first n published seeds, or tuning seeds.
func seedsOf(n int, tuning bool) []uint64 {
	seeds := make([]uint64, n)
	for i := range seeds {
		if seeds[i] = workload.HeldOutSeed(i); tuning {
			seeds[i] = workload.TuningSeed(i)
		}
	}
	return seeds
}

// scenariosOf resolves a comma-separated list of names.
func scenariosOf(list string) ([]workload.Scenario, error) {
	var out []workload.Scenario
	for name := range strings.SplitSeq(list, ",") {
		sc, err := workload.Lookup(strings.TrimSpace(name))
		if err != nil {
			return nil, err
		}
		out = append(out, sc)
	}
	return out, nil
}

func tokenizer(_ context.Context, fs *flag.FlagSet, args []string, out io.Writer) error {
	duration := fs.Duration("time", time.Second, "time for each text and tokenizer")
	if err := fs.Parse(args); err != nil {
		return err
	}
	_, _, err := measureTokenizers(*duration, out)
	return err
}

// measureTokenizers measures and shows tokenizer throughput.
func measureTokenizers(duration time.Duration, out io.Writer) ([]tokenspeed.Speed, []string, error) {
	speeds, missing, err := tokenspeed.Measure(tokenspeed.RealDir(), duration)
	if err != nil {
		return nil, nil, err
	}
	fmt.Fprintf(out, "\nTokenizer throughput on one core\n%s", report.TokenizerTable(speeds).Text(textStyle()))
	for _, m := range missing {
		fmt.Fprintln(out, "not measured:", m)
	}
	return speeds, missing, nil
}
