// Command fleetsim runs simulated vLLM workers as a process of its own: HTTP
// servers with KV-cache events over ZMQ that need no GPU. It prints where they
// are, and the resources that put Kinference in front of them.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"sync"
	"syscall"

	"github.com/kinference/kinference/internal/chat"
	"github.com/kinference/kinference/internal/fleetsim"
	"github.com/kinference/kinference/internal/fleetsim/engine"
	"github.com/kinference/kinference/internal/fleetsim/model"
	"github.com/kinference/kinference/internal/tokens"
	"github.com/kinference/kinference/internal/vllm"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // a second signal ends the process at once
	err := run(ctx, os.Args[1:], os.Stdout, os.Stderr)
	stop()
	switch {
	case errors.Is(err, flag.ErrHelp):
	case err != nil:
		fmt.Fprintln(os.Stderr, "fleetsim:", err)
		os.Exit(1)
	}
}

// options are the command line.
type options struct {
	worker      fleetsim.Config // what all workers share
	workers     int
	host        string
	port        int
	profile     string
	version     string
	served      string
	loras       string
	hash        string
	speeds      string
	faults      string
	modelDir    string
	replay      bool
	lastCopy    bool
	eventsPort  int
	replayPort  int
	checkpoints bool
	printConfig bool
	verbose     bool
}

func parse(args []string, stderr io.Writer) (*options, error) {
	o := new(options)
	f := flag.NewFlagSet("fleetsim", flag.ContinueOnError)
	f.SetOutput(stderr)
	f.IntVar(&o.workers, "workers", 1, "how many workers to run")
	f.StringVar(&o.profile, "profile", engine.L40SQwen27B.Name, "accelerator and model: "+strings.Join(profileNames(), ", "))
	f.BoolVar(&o.checkpoints, "state-checkpoints", false, "let hits of a hybrid end where the recurrent state was kept, as in vLLM; published benchmarks were made without")
	f.StringVar(&o.speeds, "speed", "", "speed relative to the profile, one number or one per worker: 1,1,0.5")
	f.Float64Var(&o.worker.TimeScale, "time-scale", 1, "how many times faster than real time passes")
	f.Int64Var(&o.worker.Seed, "seed", 0, "seed of hashes and faults; worker i has seed+i")

	f.StringVar(&o.host, "host", "127.0.0.1", "address to listen on")
	f.IntVar(&o.port, "port", 0, "HTTP port of the first worker, the next ones follow; 0: free ports")
	f.IntVar(&o.eventsPort, "kv-events-port", 0, "event port of the first rank of the first worker, all others follow; 0: free ports, -1: no events")
	f.IntVar(&o.replayPort, "kv-replay-port", 0, "replay port, likewise")
	f.BoolVar(&o.replay, "replay", true, "offer replay of events")
	f.StringVar(&o.worker.Topic, "kv-events-topic", "", "topic of the events")
	f.IntVar(&o.worker.BufferSteps, "buffer-steps", 10_000, "batches of events kept for replay")
	f.IntVar(&o.worker.Ranks, "ranks", 1, "data-parallel ranks of each worker")
	f.StringVar(&o.version, "vllm-version", "0.32", "version of vLLM whose answers, events and metrics to copy: 0.10 to 0.32")
	f.StringVar(&o.hash, "prefix-caching-hash-algo", "", "sha256 or sha256_cbor as vLLM computes them; empty: fast, and different in every process")
	f.StringVar(&o.worker.HashSeed, "hash-seed", vllm.DefaultSeed, "PYTHONHASHSEED of those")
	f.BoolVar(&o.lastCopy, "last-copy-removals", false, "announce only the removal of a block's last copy")

	f.StringVar(&o.worker.Model, "model", "", "model name; empty: the profile's")
	f.StringVar(&o.served, "served-model-name", "", "names to serve it under, comma-separated; the first takes the place of --model")
	f.StringVar(&o.loras, "lora", "", "names of adapters, comma-separated")
	f.StringVar(&o.modelDir, "tokenizer", "", "folder of the tokenizer and chat template; empty: a small built-in one")
	f.IntVar(&o.worker.MaxModelLen, "max-model-len", 0, "longest prompt plus output, in tokens; 0: what the profile holds")
	f.IntVar(&o.worker.AnswerTokens, "answer-tokens", 0, "where answers end by themselves; 0: at max_tokens, or after 256 tokens without it")

	f.BoolVar(&o.worker.NoPromptDetails, "no-prompt-tokens-details", false, "leave cached_tokens out of usage")
	f.BoolVar(&o.worker.RequestIDHeaders, "enable-request-id-headers", false, "echo X-Request-Id")
	f.BoolVar(&o.worker.LoadTracking, "enable-server-load-tracking", false, "let /load count")
	f.BoolVar(&o.worker.ScaleOut, "enable-scale-out", false, "serve the render routes, which 0.32 keeps closed")
	f.BoolVar(&o.worker.AutoTools, "enable-auto-tool-choice", false, "take tools without a tool_choice, which 0.32 refuses; no answer calls one")
	f.BoolVar(&o.worker.DevMode, "dev-mode", false, "serve vLLM's development routes: /reset_prefix_cache, /sleep, /wake_up, /pause, /resume")
	f.BoolVar(&o.worker.Admin, "admin", false, "serve /sim/faults, /sim/wipe, /sim/restart and /sim/stats")
	f.StringVar(&o.faults, "faults", "", `faults from the start, as JSON: {"slow":2}`)
	f.DurationVar(&o.worker.ShutdownTimeout, "shutdown-timeout", 0, "time for requests to finish after a stop signal; 0: end them at once")
	f.BoolVar(&o.printConfig, "print-config", false, "print the resources for Kinference in YAML instead of one JSON line per worker")
	f.BoolVar(&o.verbose, "verbose", false, "log what the workers do")
	if err := f.Parse(args); err != nil {
		return nil, err
	}
	if f.NArg() > 0 {
		return nil, fmt.Errorf("unexpected argument %q", f.Arg(0))
	}
	o.worker.APIKey = os.Getenv("VLLM_API_KEY")
	return o, o.complete(stderr)
}

func profileNames() (names []string) {
	for _, p := range engine.Profiles() {
		names = append(names, p.Name)
	}
	return names
}

// complete turns texts into values. It reports all faults at once.
func (o *options) complete(stderr io.Writer) error {
	var errs []error
	fail := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	c := &o.worker
	var ok bool
	if c.Profile, ok = engine.Lookup(o.profile); !ok {
		fail("profile: %q is unknown; there are %s", o.profile, strings.Join(profileNames(), ", "))
	}
	c.Profile.Checkpoints = o.checkpoints
	if c.Version, ok = vllm.ParseVersion(o.version); !ok {
		fail("vllm-version: %q is unknown", o.version)
	}
	if o.workers < 1 || o.workers > 1000 {
		fail("workers: %d is not in 1..1000", o.workers)
	}
	if c.Ranks < 1 || c.Ranks > 256 {
		fail("ranks: %d is not in 1..256", c.Ranks)
	}
	if c.TimeScale <= 0 {
		fail("time-scale: must be positive")
	}
	if o.hash != "" {
		var err error
		if c.HashAlgorithm, err = vllm.ParseHashAlgorithm(o.hash); err != nil {
			fail("prefix-caching-hash-algo: %w", err)
		}
	}
	if names := list(o.served); len(names) > 0 {
		c.Model, c.Aliases = names[0], names[1:]
	}
	if c.Model == "" {
		c.Model = c.Profile.Model
	}
	c.LoRAs = list(o.loras)
	c.LastCopyRemovals = o.lastCopy
	if o.faults != "" {
		if err := json.Unmarshal([]byte(o.faults), &c.Faults); err != nil {
			fail("faults: %w", err)
		}
	}
	for _, s := range list(o.speeds) {
		if v, err := strconv.ParseFloat(s, 64); err != nil || v <= 0 {
			fail("speed: %q is not a positive number", s)
		}
	}
	if n := len(list(o.speeds)); n > 1 && n != o.workers {
		fail("speed: %d numbers for %d workers", n, o.workers)
	}
	if o.verbose {
		c.Log = slog.New(slog.NewTextHandler(stderr, nil))
	}
	if err := o.load(); err != nil {
		fail("tokenizer: %w", err)
	}
	return errors.Join(errs...)
}

// load reads the tokenizer and template, and makes modelDir name them.
func (o *options) load() (err error) {
	if o.modelDir == "" {
		o.modelDir, err = model.Dir()
		return err
	}
	if o.worker.Tokenizer, err = tokens.Load(o.modelDir); err != nil {
		return err
	}
	o.worker.Template, err = chat.Load(o.modelDir)
	if errors.Is(err, chat.ErrNoTemplate) {
		return nil
	}
	return err
}

func list(s string) (out []string) {
	for part := range strings.SplitSeq(s, ",") {
		if part = strings.TrimSpace(part); part != "" {
			out = append(out, part)
		}
	}
	return out
}

// config is that of worker i.
func (o *options) config(i int) fleetsim.Config {
	c := o.worker
	c.Name = "sim-" + strconv.Itoa(i)
	c.Seed += int64(i)
	if s := list(o.speeds); len(s) > 0 {
		c.Speed, _ = strconv.ParseFloat(s[i%len(s)], 64) // checked by complete
	}
	port := o.port
	if port > 0 {
		port += i
	}
	c.Listen = net.JoinHostPort(o.host, strconv.Itoa(port))
	c.EventsPort, c.ReplayPort = o.eventsPort, o.replayPort
	if c.EventsPort > 0 {
		c.EventsPort += i * c.Ranks
	}
	if c.ReplayPort > 0 {
		c.ReplayPort += i * c.Ranks
	}
	if !o.replay {
		c.ReplayPort = fleetsim.Off
	}
	return c
}

// run serves until ctx is done.
func run(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	o, err := parse(args, stderr)
	if err != nil {
		return err
	}
	var fleet []*fleetsim.Worker
	defer func() {
		var wg sync.WaitGroup
		for _, w := range fleet {
			wg.Go(w.Stop)
		}
		wg.Wait()
	}()
	for i := range o.workers {
		w, err := fleetsim.Start(context.WithoutCancel(ctx), o.config(i))
		if err != nil {
			return err
		}
		fleet = append(fleet, w)
	}
	if o.printConfig {
		_, err = stdout.Write(o.resources(fleet))
	} else {
		err = describe(stdout, fleet)
	}
	if err != nil {
		return fmt.Errorf("print: %w", err)
	}
	if o.verbose {
		fmt.Fprintf(stderr, "fleetsim: %d workers serve %s at %g times real speed\n", len(fleet), o.worker.Model, o.worker.TimeScale)
	}
	<-ctx.Done()
	return nil
}

// describe prints one JSON line per worker.
func describe(w io.Writer, fleet []*fleetsim.Worker) error {
	type line struct {
		Name    string   `json:"name"`
		URL     string   `json:"url"`
		Model   string   `json:"model"`
		Profile string   `json:"profile"`
		Events  []string `json:"kvEvents,omitempty"`
		Replays []string `json:"kvReplay,omitempty"`
	}
	enc := json.NewEncoder(w)
	for _, f := range fleet {
		c := f.Config()
		l := line{Name: f.Name(), URL: f.URL(), Model: c.Model, Profile: c.Profile.Name}
		for rank := range c.Ranks {
			if a := f.EventsAddr(rank); a != "" {
				l.Events = append(l.Events, a)
			}
			if a := f.ReplayAddr(rank); a != "" {
				l.Replays = append(l.Replays, a)
			}
		}
		if err := enc.Encode(l); err != nil {
			return err
		}
	}
	return nil
}
