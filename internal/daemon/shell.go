package daemon

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/pprof"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracehttp"
	otelprom "go.opentelemetry.io/otel/exporters/prometheus"
	"go.opentelemetry.io/otel/metric"
	metricnoop "go.opentelemetry.io/otel/metric/noop"
	"go.opentelemetry.io/otel/propagation"
	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/resource"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"
	tracenoop "go.opentelemetry.io/otel/trace/noop"

	"github.com/kinference/kinference/internal/tlsfile"
)

// SpanExporter receives finished spans.
type SpanExporter = sdktrace.SpanExporter

// Propagator carries trace context in HTTP headers (W3C Trace Context).
var Propagator propagation.TextMapPropagator = propagation.TraceContext{}

// Shell holds what all services of one process share.
type Shell struct {
	log      *slog.Logger
	drain    time.Duration
	pprof    bool
	registry *prometheus.Registry
	meters   *sdkmetric.MeterProvider
	tracers  trace.TracerProvider
	tls      *tlsfile.Source // nil: none
	callers  bool

	mu     sync.Mutex
	ready  map[string]bool
	closer []func()
}

// NewShell returns a shell; Close releases it.
func NewShell(ctx context.Context, s Settings) (*Shell, error) {
	sh := &Shell{drain: s.DrainTimeout, pprof: s.Pprof, ready: map[string]bool{}}
	if sh.drain == 0 {
		sh.drain = DefaultDrainTimeout
	}
	out := s.Output
	if out == nil {
		out = io.Discard
	}
	opts := &slog.HandlerOptions{Level: s.LogLevel}
	switch s.LogFormat {
	case "", "json":
		sh.log = slog.New(slog.NewJSONHandler(out, opts))
	case "text":
		sh.log = slog.New(slog.NewTextHandler(out, opts))
	default:
		return nil, fmt.Errorf("log-format %q: want json or text", s.LogFormat)
	}

	if s.TLSCallers && (s.TLS.Cert == "" || s.TLS.CA == "") {
		return nil, errors.New("tls-require-client-cert needs tls-cert-file and tls-ca-file")
	}
	if s.TLS != (tlsfile.Files{}) {
		following, stop := context.WithCancel(ctx)
		src, err := tlsfile.Open(following, s.TLS, sh.log)
		if err != nil {
			stop()
			return nil, fmt.Errorf("open TLS files: %w", err)
		}
		sh.onClose(stop)
		sh.tls, sh.callers = src, s.TLSCallers
	}

	res := resource.NewSchemaless(attribute.String("service.namespace", "kinference"))
	sh.registry = prometheus.NewRegistry()
	sh.registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	exporter, err := otelprom.New(otelprom.WithRegisterer(sh.registry), otelprom.WithoutTargetInfo())
	if err != nil {
		return nil, fmt.Errorf("start metrics: %w", err)
	}
	// A bound on series per instrument: labels are bounded by configured names
	// at their source, this is the net below.
	sh.meters = sdkmetric.NewMeterProvider(sdkmetric.WithReader(exporter), sdkmetric.WithResource(res), sdkmetric.WithCardinalityLimit(2000))
	sh.onClose(func() { _ = sh.meters.Shutdown(context.Background()) })

	if sh.tls != nil && sh.tls.HasCertificate() {
		_, err := sh.meters.Meter("kinference/daemon").Float64ObservableGauge("kinference.tls.certificate.not_after", metric.WithUnit("s"),
			metric.WithDescription("Unix time at which the certificate of this process ends."),
			metric.WithFloat64Callback(func(_ context.Context, o metric.Float64Observer) error {
				o.Observe(float64(sh.tls.NotAfter().Unix()))
				return nil
			}))
		if err != nil {
			return nil, fmt.Errorf("start metrics: %w", err)
		}
	}

	spans := s.Spans
	if spans == nil && (os.Getenv("OTEL_EXPORTER_OTLP_ENDPOINT") != "" || os.Getenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") != "") {
		if spans, err = otlptracehttp.New(ctx); err != nil {
			return nil, fmt.Errorf("start trace export: %w", err)
		}
	}
	sh.tracers = tracenoop.NewTracerProvider()
	if spans != nil {
		tp := sdktrace.NewTracerProvider(sdktrace.WithBatcher(spans), sdktrace.WithResource(res))
		sh.tracers = tp
		sh.onClose(func() {
			ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
			defer cancel()
			_ = tp.Shutdown(ctx)
		})
	}
	return sh, nil
}

func (s *Shell) onClose(f func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closer = append(s.closer, f)
}

// Close stops the admin port and flushes traces. Services must have ended.
func (s *Shell) Close() {
	s.mu.Lock()
	fs := s.closer
	s.closer = nil
	s.mu.Unlock()
	for _, f := range slices.Backward(fs) {
		f()
	}
}

// Context returns ctx with the shell's facilities for the service name. The
// shell is ready once every service that it made a context for is.
func (s *Shell) Context(ctx context.Context, name string) context.Context {
	s.mu.Lock()
	s.ready[name] = false
	s.mu.Unlock()
	return context.WithValue(ctx, key{}, &scope{Shell: s, name: name, log: s.log.With("service", name)})
}

// NotReady names the services that are not ready, sorted.
func (s *Shell) NotReady() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	var out []string
	for name, ok := range s.ready {
		if !ok {
			out = append(out, name)
		}
	}
	slices.Sort(out)
	return out
}

// Admin is the handler of the admin port: /livez, /readyz, /metrics.
func (s *Shell) Admin() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /livez", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") })
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) {
		if waiting := s.NotReady(); len(waiting) > 0 {
			http.Error(w, "not ready: "+strings.Join(waiting, ", "), http.StatusServiceUnavailable)
			return
		}
		fmt.Fprintln(w, "ok")
	})
	// Only that format, for those who ask for it, has exemplars.
	mux.Handle("GET /metrics", promhttp.HandlerFor(s.registry, promhttp.HandlerOpts{EnableOpenMetrics: true}))
	if s.pprof {
		mux.HandleFunc("GET /debug/pprof/", pprof.Index)
		mux.HandleFunc("GET /debug/pprof/profile", pprof.Profile)
		mux.HandleFunc("GET /debug/pprof/trace", pprof.Trace)
	}
	return mux
}

type key struct{}

// scope is a shell as one service sees it.
type scope struct {
	*Shell
	name string
	log  *slog.Logger
}

func from(ctx context.Context) *scope {
	s, _ := ctx.Value(key{}).(*scope)
	return s
}

// Ready says whether the service of ctx can do its work.
func Ready(ctx context.Context, ready bool) {
	if s := from(ctx); s != nil {
		s.mu.Lock()
		changed := s.ready[s.name] != ready
		s.ready[s.name] = ready
		s.mu.Unlock()
		if changed {
			s.log.Info("readiness changed", "ready", ready)
		}
	}
}

// Logger is the log of the service of ctx. Messages are constant, details are
// attributes; prompts, keys and personal data never appear.
func Logger(ctx context.Context) *slog.Logger {
	if s := from(ctx); s != nil {
		return s.log
	}
	return slog.New(slog.DiscardHandler)
}

// Meter makes the instruments of the service of ctx.
func Meter(ctx context.Context) metric.Meter { return Meters(ctx).Meter(scopeName(ctx)) }

// Tracer starts the spans of the service of ctx.
func Tracer(ctx context.Context) trace.Tracer { return Tracers(ctx).Tracer(scopeName(ctx)) }

// Meters is the provider behind Meter, for instrumentation libraries.
func Meters(ctx context.Context) metric.MeterProvider {
	if s := from(ctx); s != nil {
		return s.meters
	}
	return metricnoop.NewMeterProvider()
}

// Tracers is the provider behind Tracer, for instrumentation libraries.
func Tracers(ctx context.Context) trace.TracerProvider {
	if s := from(ctx); s != nil {
		return s.tracers
	}
	return tracenoop.NewTracerProvider()
}

// ServerTLS is what the services of this process serve RPC with, and whether only
// callers with a certificate are let in; nil: clear text.
func ServerTLS(ctx context.Context) (src *tlsfile.Source, callers bool) {
	if s := from(ctx); s != nil && s.tls != nil && s.tls.HasCertificate() {
		return s.tls, s.callers
	}
	return nil, false
}

// ClientTLS is what the services of this process dial https:// addresses of others
// with; nil: the authorities of the system, and no certificate.
func ClientTLS(ctx context.Context) *tlsfile.Source {
	if src, ok := ctx.Value(clientKey{}).(*tlsfile.Source); ok {
		return src
	}
	if s := from(ctx); s != nil {
		return s.tls
	}
	return nil
}

type clientKey struct{}

// WithClientTLS returns a ctx whose ClientTLS is src, for commands without a shell.
func WithClientTLS(ctx context.Context, src *tlsfile.Source) context.Context {
	return context.WithValue(ctx, clientKey{}, src)
}

// DrainTimeout is the time for requests to finish once ctx is done.
func DrainTimeout(ctx context.Context) time.Duration {
	if s := from(ctx); s != nil {
		return s.drain
	}
	return DefaultDrainTimeout
}

func scopeName(ctx context.Context) string {
	if s := from(ctx); s != nil {
		return "kinference/" + s.name
	}
	return "kinference"
}

// errNotReady is returned by WaitReady when ctx ends first.
var errNotReady = errors.New("services are not ready")

// WaitReady blocks until every service is ready or ctx is done.
func (s *Shell) WaitReady(ctx context.Context) error {
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for {
		waiting := s.NotReady()
		if len(waiting) == 0 {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%w: %s", errNotReady, strings.Join(waiting, ", "))
		case <-tick.C:
		}
	}
}
