package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/kinference/kinference/cmd/stack"
	"github.com/kinference/kinference/internal/bench/load"
	"github.com/kinference/kinference/internal/bench/overhead"
	"github.com/kinference/kinference/internal/bench/report"
	"github.com/kinference/kinference/internal/bench/virtual"
	"github.com/kinference/kinference/internal/bench/wall"
	"github.com/kinference/kinference/internal/fleetsim/engine"
	"github.com/kinference/kinference/internal/schedule"
	"github.com/kinference/kinference/test/bench/control"
)

const ratesTitle = "\nRequests that a path carries when clients do not wait; clients and upstream share the cores\n"

const overheadTitle = "\nAdded latency to the first event; the upstream answers at once\n"

const disconnectsTitle = "\nFrom the client's leaving until the engine's count of running requests is down\n"

// fakeInterval is the distance of events in the streams that are held open.
const fakeInterval = 250 * time.Millisecond

// overheadOptions say how much is measured.
type overheadOptions struct {
	rounds, probes int
	each           time.Duration // for each path at full load; 0: not measured
	bodies         bool          // the cells by length of the body as well
	cells          string        // only those whose name has this in it
	peers          []string      // NAME=COMMAND
}

func overheadCommand(ctx context.Context, fs *flag.FlagSet, args []string, out io.Writer) error {
	o := overheadOptions{bodies: true}
	fs.IntVar(&o.rounds, "rounds", 3, "rounds of each cell and path")
	fs.IntVar(&o.probes, "probes", 100, "probes per round")
	fs.DurationVar(&o.each, "full-load", 3*time.Second, "time at full load for each path and cell; 0: not measured")
	fs.StringVar(&o.cells, "cells", "", "only cells with this in their name, such as 1KB or 64_streams; empty: all")
	disconnects := fs.Int("disconnects", 200, "clients that leave, for each protocol and kind of answer")
	fs.Func("peer", "NAME=COMMAND of another gateway to measure: it serves the model $MODEL of the upstream $UPSTREAM at $LISTEN until it is ended; may be given again", func(s string) error {
		if name, command, ok := strings.Cut(s, "="); !ok || name == "" || command == "" {
			return errors.New("want NAME=COMMAND")
		}
		o.peers = append(o.peers, s)
		return nil
	})
	dir := fs.String("out", "", "folder for overhead.json; empty: none is written")
	docs := fs.String("docs", "", "folder for overhead.md; empty: none is written")
	if err := fs.Parse(args); err != nil {
		return err
	}
	p := &publisher{docs: *docs, out: out}
	rows, err := p.overheadOf(ctx, o, *disconnects)
	if err != nil {
		return err
	}
	if *dir == "" {
		return nil
	}
	return report.WriteRows(filepath.Join(*dir, "overhead.json"), rows)
}

// overhead is the part of "full".
func (p *publisher) overhead(ctx context.Context) ([]report.Row, error) {
	return p.overheadOf(ctx, overheadOptions{rounds: 5, probes: 100, each: 5 * time.Second, bodies: true}, 200)
}

// overheadOf measures, shows and publishes.
func (p *publisher) overheadOf(ctx context.Context, o overheadOptions, disconnects int) ([]report.Row, error) {
	results, rates, err := runOverhead(ctx, o)
	if err != nil {
		return nil, err
	}
	fmt.Fprint(p.out, overheadTitle, report.OverheadTable(results).Text(textStyle()))
	about := "Time to the first event through each path, in front of one upstream that answers at once; client, upstream, proxy and gateway share the machine. " +
		"`reverse_proxy` is a plain `httputil.ReverseProxy`. Added latencies are differences of percentiles to `direct`, the columns with × ratios of percentiles to `reverse_proxy`. While one probe at a time measures, the cell's other streams are open on the same path."
	if len(o.peers) > 0 {
		about += " Other gateways ran in the same run with the settings of their scripts in test/bench/peers, as processes of their own."
	}
	parts := []string{section("By prompt length and open streams", about, report.OverheadTable(results))}
	rows := report.Overhead(results)
	if o.each > 0 {
		fmt.Fprint(p.out, ratesTitle, report.RatesTable(rates).Text(textStyle()))
		parts = append(parts, section("At full load", "Clients send the next request as soon as the last is answered. Clients, upstream and path share the cores, so the rates compare paths and are no capacity of one alone.", report.RatesTable(rates)))
		rows = append(rows, report.Rates(rates)...)
	}
	if disconnects > 0 {
		gone, err := runDisconnects(ctx, disconnects)
		if err != nil {
			return nil, err
		}
		fmt.Fprint(p.out, disconnectsTitle, report.DisconnectsTable(gone).Text(textStyle()))
		parts = append(parts, section("When clients leave", "A client of the whole control plane leaves in the middle of an answer (`h1`: by closing the connection, `h2`: by resetting its stream), and the simulated engine's count of running requests is watched: time from the one to the other. "+
			"The engine counts at the end of a step, as vLLM does.", report.DisconnectsTable(gone)))
		rows = append(rows, report.Disconnects(virtual.Kinference, gone)...)
	}
	return rows, p.page("overhead.md", "Latency that the gateway adds", "kinbench overhead --docs docs/benchmarks", parts...)
}

// runOverhead measures the gateway beside a plain reverse proxy, both in this
// process, and beside peers, all in front of the same upstream.
func runOverhead(ctx context.Context, o overheadOptions) ([]overhead.Result, []overhead.Rate, error) {
	var closers []func() error
	defer func() {
		for _, c := range closers {
			_ = c()
		}
	}()
	serve := func(h http.Handler) (string, error) {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return "", err
		}
		s := &http.Server{Handler: h, ReadHeaderTimeout: time.Minute}
		closers = append(closers, s.Close)
		go func() { _ = s.Serve(l) }() // ends with Close
		return l.Addr().String(), nil
	}
	upstream, err := serve(&load.Fake{Model: wall.Model, Interval: fakeInterval, BlockSize: 16})
	if err != nil {
		return nil, nil, err
	}
	proxy := httputil.NewSingleHostReverseProxy(&url.URL{Scheme: "http", Host: upstream})
	// The default keeps two idle connections per host: with many streams it
	// would measure dialling.
	proxy.Transport = &http.Transport{MaxIdleConnsPerHost: 4096, DisableCompression: true}
	plain, err := serve(proxy)
	if err != nil {
		return nil, nil, err
	}
	c, err := control.Start(ctx, 1, 1, func(dir string) error {
		return wall.WriteConfig(dir, wall.Model, []wall.Endpoint{{Name: "fake", Address: upstream}}, 250*time.Millisecond)
	}, func(o *stack.Options) {
		// The default lets requests wait until a worker can begin, and no real one
		// begins with 512 prompts of 75,000 tokens as this one does.
		o.Policy = schedule.PredictedTTFT
	})
	if err != nil {
		return nil, nil, fmt.Errorf("start the gateway: %w", err)
	}
	closers = append(closers, c.Stop)
	options := overhead.Options{
		Model: wall.Model, Cells: overhead.Cells, Rounds: o.rounds, Probes: o.probes, Interval: fakeInterval, Patience: 10 * time.Second,
		Paths: []overhead.Path{{Name: overhead.Direct, URL: "http://" + upstream}, {Name: overhead.ReverseProxy, URL: "http://" + plain}, {Name: virtual.Kinference, URL: c.URL}},
	}
	if o.bodies {
		options.Cells = slices.Concat(overhead.Cells, overhead.BodyCells)
	}
	options.Cells = slices.DeleteFunc(slices.Clone(options.Cells), func(c overhead.Cell) bool { return !strings.Contains(c.Name(), o.cells) })
	for _, p := range o.peers {
		name, command, _ := strings.Cut(p, "=")
		address, stop, err := startPeer(ctx, command, upstream)
		if err != nil {
			return nil, nil, fmt.Errorf("start %s: %w", name, err)
		}
		closers = append(closers, stop)
		options.Paths = append(options.Paths, overhead.Path{Name: name, URL: address, Other: true})
	}
	results, err := overhead.Run(ctx, options)
	for _, r := range results {
		if r.Failed > 0 && r.Path == virtual.Kinference {
			err = errors.Join(err, fmt.Errorf("%s through %s: %d of %d probes failed", r.Cell.Name(), r.Path, r.Failed, r.Probes))
		}
	}
	var rates []overhead.Rate
	for _, cell := range overhead.CapacityCells {
		if err != nil || o.each == 0 {
			break
		}
		var more []overhead.Rate
		more, err = overhead.Capacity(ctx, options, cell, o.each)
		rates = append(rates, more...)
	}
	return results, rates, err
}

// startPeer starts another gateway in front of the upstream, and waits until a
// request gets through.
func startPeer(ctx context.Context, command, upstream string) (address string, stop func() error, err error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", nil, err
	}
	listen := l.Addr().String()
	l.Close()
	// It is killed at the end: what it wrote goes with its folder.
	dir, err := os.MkdirTemp("", "kinbench-peer-")
	if err != nil {
		return "", nil, err
	}
	log, err := os.Create(filepath.Join(dir, "log"))
	if err != nil {
		return "", nil, err
	}
	cmd := exec.Command("/bin/sh", "-c", command)
	cmd.Env = append(os.Environ(), "TMPDIR="+dir, "UPSTREAM="+upstream, "LISTEN="+listen, "MODEL="+wall.Model)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := cmd.Start(); err != nil {
		return "", nil, err
	}
	ready, cancel := context.WithTimeout(ctx, 5*time.Minute) // it may have to be installed
	defer cancel()
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = cmd.Wait() // how it ended its log says
		cancel()
	}()
	stop = func() error {
		_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
		<-ended
		log.Close()
		return os.RemoveAll(dir)
	}
	client := load.NewClient()
	defer client.Close()
	body := load.Chat(wall.Model, []load.Message{{Role: "user", Content: " ready"}}, 1)
	err = wall.WaitServing(ready, "http://"+listen, func(ctx context.Context) error {
		return client.Do(ctx, load.Request{URL: "http://" + listen + "/v1/chat/completions", Body: body}).Err
	})
	if err != nil {
		text, _ := os.ReadFile(log.Name())
		_ = stop()
		return "", nil, fmt.Errorf("%w\n%s", err, text[max(len(text)-2000, 0):])
	}
	return "http://" + listen, stop, nil
}

// runDisconnects lets clients leave the whole control plane in front of one
// simulated worker.
func runDisconnects(ctx context.Context, n int) ([]overhead.Disconnect, error) {
	fleet, err := wall.StartFleet(ctx, 1, engine.L40SQwen27B, 1, 1)
	if err != nil {
		return nil, err
	}
	defer fleet.Stop()
	c, err := control.Start(ctx, 1, 1, fleet.WriteConfig)
	if err != nil {
		return nil, fmt.Errorf("start the gateway: %w", err)
	}
	defer func() { _ = c.Stop() }()
	return overhead.Disconnects(ctx, c.URL, wall.Model, n, func() int { return fleet.Workers[0].Stats(0).Running })
}
