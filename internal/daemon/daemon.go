// Package daemon is the shell around every service process: flags and
// environment, logs, metrics and traces, the admin port, signals and drain.
//
// A service implements Service and its main is one call of Main. The all in
// one binary and tests run the same services under one Shell. A service asks
// its context for what the shell provides (Logger, Meter, Tracer, Ready,
// DrainTimeout); without a shell these are silent defaults, so packages can be
// tested without one. Everything here is safe for concurrent use.
package daemon

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/kinference/kinference/internal/tlsfile"
)

// Service is one service of the control plane.
type Service interface {
	// Flags declares the service's settings. Each flag can be set by the
	// environment as well: nats-url of the router is
	// KINFERENCE_ROUTER_NATS_URL; a flag on the command line wins.
	Flags(*flag.FlagSet)
	// Run serves until ctx is done, drains within DrainTimeout(ctx) and
	// returns nil, or returns the error that keeps it from serving. It calls
	// Ready once it can do its work.
	Run(ctx context.Context) error
}

// Main runs s as the process name until SIGINT or SIGTERM and returns the exit
// code: 0 after a graceful stop, 1 when the service failed, 2 for bad flags. A
// second signal ends the process at once.
func Main(name string, s Service, args []string, stderr io.Writer) int {
	fs := flag.NewFlagSet(name, flag.ContinueOnError)
	fs.SetOutput(stderr)
	settings := Settings{Output: stderr}
	admin := fs.String("admin-listen", "127.0.0.1:0", "address of the admin port with /livez, /readyz and /metrics; empty for none")
	level := fs.String("log-level", "info", "least level to log: debug, info, warn or error")
	fs.StringVar(&settings.LogFormat, "log-format", "json", "format of the log: json or text")
	fs.BoolVar(&settings.Pprof, "pprof", false, "serve /debug/pprof on the admin port")
	fs.DurationVar(&settings.DrainTimeout, "drain-timeout", DefaultDrainTimeout, "time for requests to finish after a stop signal")
	fs.StringVar(&settings.TLS.Cert, "tls-cert-file", "", "PEM file with the certificate of this service, served on its RPC port and shown to other services; empty: clear text")
	fs.StringVar(&settings.TLS.Key, "tls-key-file", "", "PEM file with its key; both are read again when they change")
	fs.StringVar(&settings.TLS.CA, "tls-ca-file", "", "PEM file with the authorities of other services, read again when it changes; empty: the system's")
	fs.BoolVar(&settings.TLSCallers, "tls-require-client-cert", false, "answer RPCs only of callers with a certificate of those authorities")
	s.Flags(fs)
	if err := parse(fs, name, args, os.LookupEnv); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			return 0
		}
		fmt.Fprintln(stderr, err)
		return 2
	}
	if err := settings.LogLevel.UnmarshalText([]byte(*level)); err != nil {
		fmt.Fprintf(stderr, "log-level: %v\n", err)
		return 2
	}

	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	// Once the first signal has arrived, the next one has its default effect.
	context.AfterFunc(ctx, stop)

	shell, err := NewShell(ctx, settings)
	if err != nil {
		fmt.Fprintln(stderr, err)
		return 1
	}
	defer shell.Close()
	if *admin != "" {
		l, err := net.Listen("tcp", *admin)
		if err != nil {
			fmt.Fprintf(stderr, "open admin port: %v\n", err)
			return 1
		}
		go shell.ServeAdmin(l)
	}
	svcCtx := shell.Context(ctx, name)
	if err := s.Run(svcCtx); err != nil && !errors.Is(err, context.Canceled) {
		Logger(svcCtx).Error("service failed", "err", err)
		return 1
	}
	return 0
}

// parse reads flags and, for those not given, the environment. All faults are
// reported together.
func parse(fs *flag.FlagSet, name string, args []string, lookup func(string) (string, bool)) error {
	if err := fs.Parse(args); err != nil {
		return err
	}
	var faults []error
	if fs.NArg() > 0 {
		faults = append(faults, fmt.Errorf("unexpected argument %q", fs.Arg(0)))
	}
	given := map[string]bool{}
	fs.Visit(func(f *flag.Flag) { given[f.Name] = true })
	fs.VisitAll(func(f *flag.Flag) {
		env := EnvName(name, f.Name)
		v, ok := lookup(env)
		if !ok || given[f.Name] {
			return
		}
		if err := fs.Set(f.Name, v); err != nil {
			faults = append(faults, fmt.Errorf("environment variable %s: %w", env, err))
		}
	})
	return errors.Join(faults...)
}

// EnvName is the environment variable that sets a flag of a service.
func EnvName(service, flagName string) string {
	return "KINFERENCE_" + strings.ToUpper(strings.NewReplacer("-", "_").Replace(service+"_"+flagName))
}

// DefaultDrainTimeout is how long streams may finish after a stop signal. It
// equals Kubernetes' default termination grace period.
const DefaultDrainTimeout = 30 * time.Second

// Settings of a Shell. The zero value logs nothing and exports no traces.
type Settings struct {
	// Output receives the log; nil discards it.
	Output io.Writer
	// LogFormat is json or text; empty means json.
	LogFormat string
	LogLevel  slog.Level
	// Pprof serves /debug/pprof on the admin port.
	Pprof bool
	// DrainTimeout is zero for DefaultDrainTimeout.
	DrainTimeout time.Duration
	// Spans receives finished spans. Nil: an OTLP exporter if the standard
	// OTEL_EXPORTER_OTLP_* variables ask for one, else none.
	Spans SpanExporter
	// TLS are the files of the certificate and of the authorities of RPC between
	// services; see ServerTLS and ClientTLS.
	TLS tlsfile.Files
	// TLSCallers lets only callers with a certificate of those authorities in.
	TLSCallers bool
}

// ServeAdmin serves the admin handler on l until the shell closes.
func (s *Shell) ServeAdmin(l net.Listener) {
	s.log.Info("admin port open", "addr", l.Addr().String())
	srv := &http.Server{Handler: s.Admin(), ReadHeaderTimeout: 5 * time.Second}
	s.onClose(func() { srv.Close() })
	if err := srv.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		s.log.Error("admin port closed", "err", err)
	}
}
