// Package stack runs all services in one process: for laptops, tests and the
// demo. It is wiring only. Every service runs the same code as its own binary
// and talks to the others over real Connect and a real NATS server on
// loopback ports.
package stack

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/kinference/kinference/internal/daemon"
	"github.com/kinference/kinference/internal/natsd"
	"github.com/kinference/kinference/services/accounting"
	"github.com/kinference/kinference/services/classifier"
	"github.com/kinference/kinference/services/ingress"
	"github.com/kinference/kinference/services/kvtracker"
	"github.com/kinference/kinference/services/limiter"
	"github.com/kinference/kinference/services/router"
)

// Options of a stack. ConfigDir or Kubeconfig is required.
type Options struct {
	// ConfigDir is the folder of resources (YAML).
	ConfigDir string
	// Kubeconfig says how to reach the Kubernetes API that has the resources.
	Kubeconfig string
	// DataDir keeps JetStream's files and the admin token; empty: a temporary
	// folder that is removed when the stack stops.
	DataDir string
	// NATSURL names an existing NATS server; empty: an embedded one.
	NATSURL string
	// Listen is the address of the public endpoint; empty: a free loopback port.
	Listen string
	// AdminListen is the address of the admin port; empty: a free loopback port.
	AdminListen string
	// RouterListen is the address of the router's RPC port; empty: a free
	// loopback port.
	RouterListen string
	// AdminAPIListen is the address of the admin API; empty: a free loopback port.
	AdminAPIListen string
	// AdminTokens is a file of further tokens that it lets in, AdminAudit the file
	// that it appends to, as in the router.
	AdminTokens, AdminAudit string
	// AccountingListen is the address of accounting's RPC port; empty: a free
	// loopback port.
	AccountingListen string
	// Ledger is the place of the ledger of usage; empty: a file in DataDir.
	Ledger string
	// GPUEvery is how often the time of workers is divided among requests; 0: each
	// minute.
	GPUEvery time.Duration
	// Policy of the router; empty: its default.
	Policy string
	// MaxWaiting and MaxWait bound the router's line; 0: its defaults.
	MaxWaiting int
	MaxWait    time.Duration
	// Seed makes the router's random choices repeatable.
	Seed uint64
	// ProviderCredentials is the folder of providers' Secrets, as in ingress;
	// ProviderPrivate are the networks that providers may be in although they are
	// not public; empty: this machine itself.
	ProviderCredentials, ProviderPrivate string
	// LimiterTimeout is how long a request waits for its limits; 0: as ingress does.
	LimiterTimeout time.Duration
	// ClassifierURL names another classifier than the stack's own, for tests.
	// ClassifyTimeout is ingress's time for it; 0: as ingress does.
	ClassifierURL   string
	ClassifyTimeout time.Duration
	// ClassifierMaxBytes is how much of a prompt the classifier reads; 0: as it does.
	ClassifierMaxBytes int
	// TimeScale is how many times faster than real hardware the workers run; 0
	// means 1. For simulated fleets only.
	TimeScale float64

	// Output receives the log; nil discards it.
	Output       io.Writer
	LogFormat    string
	LogLevel     slog.Level
	DrainTimeout time.Duration
	// Spans receives finished spans; nil: as the OTEL_* variables say.
	Spans daemon.SpanExporter
}

// Stack is a running set of services. Its methods are safe for concurrent use.
type Stack struct {
	shell   *daemon.Shell
	ctx     context.Context
	cancel  context.CancelFunc
	failed  chan error
	tempDir string

	mu    sync.Mutex
	parts map[string]*part
	order []string // of starting; stopped in reverse
	nats  *natsd.Server
	opts  natsd.Options
	addrs map[string]string
	url   string // of NATS
	api   adminAPI
}

// part is one component that can be stopped and started again.
type part struct {
	run  func(ctx context.Context, l net.Listener) error
	addr string // empty: the part has no port
	stop func() error
	// halted until it is resumed.
	halted bool
}

// Start starts everything and returns at once; WaitReady tells when the stack
// can serve. The services live until Stop, whatever becomes of ctx.
func Start(ctx context.Context, o Options) (*Stack, error) {
	shell, err := daemon.NewShell(ctx, daemon.Settings{Output: o.Output, LogFormat: o.LogFormat, LogLevel: o.LogLevel, DrainTimeout: o.DrainTimeout, Spans: o.Spans})
	if err != nil {
		return nil, err
	}
	s := &Stack{shell: shell, failed: make(chan error, 8), parts: map[string]*part{}, addrs: map[string]string{}, url: o.NATSURL}
	s.ctx, s.cancel = context.WithCancel(context.WithoutCancel(ctx))
	if err := s.start(o); err != nil {
		return nil, errors.Join(err, s.Stop())
	}
	return s, nil
}

func (s *Stack) start(o Options) error {
	if o.DataDir == "" {
		dir, err := os.MkdirTemp("", "kinference-")
		if err != nil {
			return fmt.Errorf("make data folder: %w", err)
		}
		s.tempDir, o.DataDir = dir, dir
	}
	var err error
	if s.api, err = newAdminAPI(o.DataDir); err != nil {
		return err
	}
	if s.url == "" {
		s.opts = natsd.Options{Dir: o.DataDir}
		srv, err := natsd.Start(s.opts)
		if err != nil {
			return err
		}
		s.nats, s.url = srv, srv.URL()
	}

	if o.Ledger == "" {
		o.Ledger = filepath.Join(o.DataDir, "ledger.db")
	}
	usageDir := filepath.Join(o.DataDir, "usage")
	saltFile := filepath.Join(o.DataDir, "cache-salt")
	if err := ingress.KeepCacheSalt(saltFile); err != nil {
		return err
	}

	// All ports are opened first, so that each service knows its peers.
	listeners := map[string]net.Listener{}
	for name, addr := range map[string]string{"ingress": o.Listen, "admin": o.AdminListen,
		"admin API": o.AdminAPIListen, "router": o.RouterListen, "kvtracker": "", "limiter": "", "classifier": "", "accounting": o.AccountingListen} {
		if addr == "" {
			addr = "127.0.0.1:0"
		}
		l, err := net.Listen("tcp", addr)
		if err != nil {
			for _, open := range listeners {
				open.Close()
			}
			return fmt.Errorf("open port of %s: %w", name, err)
		}
		listeners[name] = l
		s.addrs[name] = l.Addr().String()
	}
	go s.shell.ServeAdmin(listeners["admin"])
	s.api.listener = listeners["admin API"]

	natsURL, routerURL, trackerURL, limiterURL := s.url, s.RouterURL(), s.KVTrackerURL(), s.LimiterURL()
	classifierURL := s.ClassifierURL()
	if o.ClassifierURL != "" {
		classifierURL = o.ClassifierURL
	}
	for _, p := range []struct {
		name string
		run  func(ctx context.Context, l net.Listener) error
	}{
		{"kvtracker", func(ctx context.Context, l net.Listener) error {
			return (&kvtracker.Service{Config: kvtracker.Config{Mode: kvtracker.ModeTracker, Listener: l, NATSURL: natsURL}}).Run(ctx)
		}},
		{"router", func(ctx context.Context, l net.Listener) error {
			return (&router.Service{Config: s.configure(router.Config{Listener: l, ConfigDir: o.ConfigDir, Kubernetes: o.Kubeconfig != "", Kubeconfig: o.Kubeconfig, KVTrackerURL: trackerURL, NATSURL: natsURL, Policy: o.Policy, MaxWaiting: o.MaxWaiting, MaxWait: o.MaxWait, Seed: o.Seed, TimeScale: o.TimeScale}, o)}).Run(ctx)
		}},
		{"relay", func(ctx context.Context, _ net.Listener) error {
			return (&kvtracker.Service{Config: kvtracker.Config{Mode: kvtracker.ModeRelay, NATSURL: natsURL, RouterURL: routerURL}}).Run(ctx)
		}},
		{"limiter", func(ctx context.Context, l net.Listener) error {
			return (&limiter.Service{Config: limiter.Config{Listener: l}}).Run(ctx)
		}},
		{"classifier", func(ctx context.Context, l net.Listener) error {
			return (&classifier.Service{Config: classifier.Config{Listener: l, RouterURL: routerURL, MaxBytes: o.ClassifierMaxBytes}}).Run(ctx)
		}},
		{"accounting", func(ctx context.Context, l net.Listener) error {
			return (&accounting.Service{Config: accounting.Config{Listener: l, NATSURL: natsURL, RouterURL: routerURL, Ledger: o.Ledger, GPUEvery: o.GPUEvery}}).Run(ctx)
		}},
		{"ingress", func(ctx context.Context, l net.Listener) error {
			return (&ingress.Service{Config: ingress.Config{Listener: l, NATSURL: natsURL, UsageDir: usageDir, CacheSaltFile: saltFile, RouterURL: routerURL, LimiterURL: limiterURL, LimiterTimeout: o.LimiterTimeout, ClassifierURL: classifierURL, ClassifyTimeout: o.ClassifyTimeout, ProviderCredentials: o.ProviderCredentials, ProviderPrivate: cmp.Or(o.ProviderPrivate, "127.0.0.0/8,::1/128")}}).Run(ctx)
		}},
	} {
		s.parts[p.name] = &part{run: p.run, addr: s.addrs[p.name]}
		s.order = append(s.order, p.name)
		s.launch(p.name, listeners[p.name])
	}
	return nil
}

// launch starts a part; the caller holds mu or is the only user.
func (s *Stack) launch(name string, l net.Listener) {
	p := s.parts[name]
	ctx, cancel := context.WithCancel(s.shell.Context(s.ctx, name))
	g := new(errgroup.Group)
	g.Go(func() error {
		err := p.run(ctx, l)
		if err != nil && ctx.Err() == nil {
			err = fmt.Errorf("%s: %w", name, err)
			select {
			case s.failed <- err:
			default: // the first failures tell enough
			}
			return err
		}
		return nil
	})
	p.stop = func() error { cancel(); return g.Wait() }
}

// URL is the base URL of the public endpoint.
func (s *Stack) URL() string { return "http://" + s.addrs["ingress"] }

// RouterURL is the base URL of the router's RPC port.
func (s *Stack) RouterURL() string { return "http://" + s.addrs["router"] }

// KVTrackerURL is the base URL of the tracker's RPC port.
func (s *Stack) KVTrackerURL() string { return "http://" + s.addrs["kvtracker"] }

// LimiterURL is the base URL of the limiter's RPC port.
func (s *Stack) LimiterURL() string { return "http://" + s.addrs["limiter"] }

// ClassifierURL is the base URL of the classifier's RPC port.
func (s *Stack) ClassifierURL() string { return "http://" + s.addrs["classifier"] }

// AccountingURL is the base URL of accounting's RPC port.
func (s *Stack) AccountingURL() string { return "http://" + s.addrs["accounting"] }

// AdminURL is the base URL of the admin port.
func (s *Stack) AdminURL() string { return "http://" + s.addrs["admin"] }

// NATSURL is the address of the NATS server.
func (s *Stack) NATSURL() string { return s.url }

// Failed delivers the error of a service that ended by itself.
func (s *Stack) Failed() <-chan error { return s.failed }

// WaitReady blocks until all services are ready, one fails or ctx is done.
func (s *Stack) WaitReady(ctx context.Context) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	go func() {
		select {
		case err := <-s.failed:
			cancel(err)
		case <-ctx.Done():
		}
	}()
	if err := s.shell.WaitReady(ctx); err != nil {
		if cause := context.Cause(ctx); cause != nil && !errors.Is(cause, ctx.Err()) {
			return cause
		}
		return err
	}
	return nil
}

// Restart stops one service (kvtracker, router, relay, limiter, classifier,
// accounting, ingress) or the embedded server (nats) and starts it again at
// the same address. It returns once the new one runs, not when it is ready.
func (s *Stack) Restart(name string) error {
	if err := s.Halt(name); err != nil {
		return err
	}
	return s.Resume(name)
}

// Halt stops what Restart restarts and leaves it down until Resume. The others
// go on without it.
func (s *Stack) Halt(name string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if name == "nats" {
		if s.nats == nil {
			return errors.New("halt nats: the server is not embedded, or halted")
		}
		s.nats.Stop()
		s.nats = nil
		return nil
	}
	p := s.parts[name]
	if p == nil || p.halted {
		return fmt.Errorf("halt %s: no such service runs", name)
	}
	p.halted = true
	if err := p.stop(); err != nil {
		return fmt.Errorf("halt %s: %w", name, err)
	}
	return nil
}

// Resume starts what Halt stopped, at the same address.
func (s *Stack) Resume(name string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if name == "nats" {
		return s.resumeNATS()
	}
	p := s.parts[name]
	if p == nil || !p.halted {
		return fmt.Errorf("resume %s: it was not halted", name)
	}
	var l net.Listener
	if p.addr != "" {
		var err error
		if l, err = net.Listen("tcp", p.addr); err != nil {
			return fmt.Errorf("resume %s: %w", name, err)
		}
	}
	p.halted = false
	s.launch(name, l)
	return nil
}

func (s *Stack) resumeNATS() error {
	if s.opts.Dir == "" || s.nats != nil {
		return errors.New("resume nats: the server is not embedded, or runs")
	}
	_, port, err := net.SplitHostPort(s.url[len("nats://"):])
	if err != nil {
		return fmt.Errorf("resume nats: %w", err)
	}
	if _, err := fmt.Sscan(port, &s.opts.Port); err != nil {
		return fmt.Errorf("resume nats: %w", err)
	}
	srv, err := natsd.Start(s.opts)
	if err != nil {
		return fmt.Errorf("resume nats: %w", err)
	}
	s.nats = srv
	return nil
}

// Stop drains and stops everything, clients' side first: ingress finishes its
// streams while the others still answer it.
func (s *Stack) Stop() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	var errs []error
	for i := len(s.order) - 1; i >= 0; i-- {
		if p := s.parts[s.order[i]]; !p.halted {
			errs = append(errs, p.stop())
		}
	}
	s.order = nil
	s.cancel()
	if s.nats != nil {
		s.nats.Stop()
		s.nats = nil
	}
	s.shell.Close()
	if s.tempDir != "" {
		errs = append(errs, os.RemoveAll(s.tempDir))
	}
	return errors.Join(errs...)
}
