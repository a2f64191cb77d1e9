// Package ingress answers clients in the dialects of OpenAI and Anthropic: it
// parses a request once, turns it into tokens and block hashes, asks the router
// for workers and proxies the answer as it comes.
//
// The all in one binary, its own main and tests run the same Service. It keeps
// no state but a copy of the catalog and caches, so any number of them may run
// side by side. When the router is away, requests are answered 503 and the
// catalog in hand stays; when a worker is away, the next one is asked.
package ingress

import (
	"context"
	"crypto/rand"
	"errors"
	"net"
	"net/http"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel/trace"

	"github.com/kinference/kinference/internal/daemon"
	"github.com/kinference/kinference/internal/rpc"
	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
	"github.com/kinference/kinference/proto/gen/kinference/router/v1/routerv1connect"
	"github.com/kinference/kinference/services/ingress/internal/catalog"
	"github.com/kinference/kinference/services/ingress/internal/parity"
	"github.com/kinference/kinference/services/ingress/internal/prompt"
	"github.com/kinference/kinference/services/ingress/internal/proxy"
	"github.com/kinference/kinference/services/ingress/internal/report"
)

// Service is the ingress service.
type Service struct{ Config }

var _ daemon.Service = (*Service)(nil)

// server is one run of the service.
type server struct {
	Config
	ctx         context.Context // of Run: logs, metrics, traces; done when draining
	router      routerv1connect.RouterServiceClient
	view        atomic.Pointer[catalog.View]
	identity    identifying
	prompts     *prompt.Maker
	parity      *parity.Checker
	proxy       *proxy.Proxy
	reports     *report.Queue
	limits      limiting
	classifying classifying
	leaving     leaving
	trying      trying
	media       media
	usage       metering
	metrics     *metrics
	tracer      trace.Tracer
	bodies      atomic.Int64 // bytes of request bodies in memory
	ids         sync.Map     // request ids in use
	started     int64        // Unix time
}

// Run serves until ctx is done, then lets requests finish for
// daemon.DrainTimeout.
func (s *Service) Run(ctx context.Context) error {
	s.defaults()
	if err := s.Validate(); err != nil {
		return err
	}
	private, err := privateNetworks(s.ProviderPrivate)
	if err != nil {
		return err
	}
	m, err := newMetrics(daemon.Meter(ctx))
	if err != nil {
		return err
	}
	l, err := rpc.Listen(s.Listener, s.Listen)
	if err != nil {
		return err
	}
	// What requests need outlives ctx until the last of them is answered, and
	// the client of the router until the last report is sent.
	reporting, close := context.WithCancel(context.WithoutCancel(ctx))
	defer close()
	serving, stop := context.WithCancel(reporting)
	router := rpc.Client(reporting, s.RouterURL, routerv1connect.NewRouterServiceClient)
	v := &server{
		Config: s.Config, ctx: ctx, router: router, metrics: m, media: newMedia(s.MediaURLDomains), tracer: daemon.Tracer(ctx), started: time.Now().Unix(),
		reports: report.New(router, func(n int) { m.reportsLost.Add(serving, int64(n)) }),
	}
	v.proxy = proxy.New(proxy.Settings{
		Connect: s.ConnectTimeout, FirstByte: s.FirstByteTimeout, Idle: s.IdleTimeout, Write: s.WriteTimeout, KeepAlive: s.KeepAlive,
		PerHost: s.WorkerConnections, MaxEvent: s.MaxEvent, MaxAnswer: s.MaxAnswer, Private: private, Breaker: v.breakerMoved, Worker: v.workerMoved,
	})
	defer v.proxy.Close()
	v.prompts = prompt.New(prompt.Settings{
		CacheBytes: s.TokenCacheBytes, WorkerTime: s.PromptTimeout, Retry: s.PromptRetry, Transport: v.proxy.Transport(), Log: daemon.Logger(ctx),
		Distrusts: func(p *catalog.Profile) bool { return v.parity.Distrusts(p) },
	})
	v.parity = parity.New(parity.Settings{
		Compare: v.prompts.Compare, Loaded: v.prompts.Loaded, Name: rand.Text(), Every: s.ParityInterval, Log: daemon.Logger(ctx),
		Report: func(ctx context.Context, r *routerv1.ParityReport) error {
			ctx, cancel := context.WithTimeout(ctx, s.RouteTimeout)
			defer cancel()
			_, err := router.Report(ctx, &routerv1.ReportRequest{Parity: r})
			return err
		},
		Checked: func(profile, kind, result string) { m.checked(serving, profile, kind, result) },
	})

	var tasks sync.WaitGroup
	defer tasks.Wait()
	defer stop()
	stay, err := v.startLeaving()
	if err != nil {
		return err
	}
	defer stay()
	known, err := v.startIdentity(reporting)
	if err != nil {
		return err
	}
	defer known()
	metered, err := v.startMetering(reporting)
	if err != nil {
		return err
	}
	defer metered()
	tagging, err := v.startClassifying(reporting)
	if err != nil {
		return err
	}
	defer tagging()
	settled, err := v.startLimiting(reporting)
	if err != nil {
		return err
	}
	defer settled()
	if err := m.observe(v.parity); err != nil {
		return err
	}
	defer m.close()
	tasks.Go(func() { v.reports.Run(serving) })
	tasks.Go(func() { v.watch(serving) })
	tasks.Go(func() { v.parity.Run(serving) })
	context.AfterFunc(ctx, func() { daemon.Ready(ctx, false) })
	return v.serve(ctx, l)
}

// watch keeps the catalog. A new view is used once its tokenizers are loaded;
// those that could not be are tried again now and then.
func (v *server) watch(ctx context.Context) {
	log := daemon.Logger(v.ctx)
	views := make(chan *catalog.View)
	var tasks sync.WaitGroup
	defer tasks.Wait()
	tasks.Go(func() {
		catalog.Watch(ctx, log, v.router, func(view *catalog.View) {
			select {
			case views <- view:
			case <-ctx.Done():
			}
		})
	})
	retry := time.NewTimer(0)
	<-retry.C
	for {
		select {
		case <-ctx.Done():
			return
		case view := <-views:
			v.identity.Announce(view)
			if v.prompts.Prepare(view) {
				retry.Reset(v.PromptRetry)
			}
			v.parity.Watch(view)
			v.limit(view)
			if err := v.metrics.golden.open(view.Objectives); err != nil {
				log.Error("latencies of tenants are not measured", "err", err)
			}
			before := v.view.Swap(view)
			v.sayWhoMayCall(before, view)
			if before == nil {
				daemon.Ready(v.ctx, v.ctx.Err() == nil)
			}
			log.Info("catalog", "version", view.Version, "models", len(view.Models))
		case <-retry.C:
			view := v.view.Load()
			if view == nil {
				continue
			}
			if v.prompts.Prepare(view) {
				retry.Reset(v.PromptRetry)
			}
			v.parity.Watch(view)
		}
	}
}

type connKey struct{}

// serve runs the HTTP server. Streams that are left when the time for draining
// is nearly over end with an error event rather than without one.
func (v *server) serve(ctx context.Context, l net.Listener) error {
	requests, abort := context.WithCancelCause(context.WithoutCancel(ctx))
	defer abort(nil)
	drain := daemon.DrainTimeout(ctx)
	defer context.AfterFunc(ctx, func() {
		time.AfterFunc(drain-min(drain/10, time.Second), func() { abort(proxy.ErrStopping) })
	})()
	var conns atomic.Uint64
	srv := &http.Server{
		Handler:        v,
		MaxHeaderBytes: v.MaxHeader, ReadHeaderTimeout: min(v.BodyTimeout+time.Second, 10*time.Second),
		HTTP2:       &http.HTTP2Config{MaxConcurrentStreams: v.MaxConnectionStreams},
		BaseContext: func(net.Listener) context.Context { return requests },
		ConnContext: func(ctx context.Context, c net.Conn) context.Context {
			// The address names a connection among all that clients have open;
			// the number tells it from a later one of the same address.
			return context.WithValue(ctx, connKey{}, c.RemoteAddr().String()+"#"+strconv.FormatUint(conns.Add(1), 10))
		},
	}
	daemon.Logger(ctx).Info("serving", "addr", l.Addr().String())
	err := rpc.ServeHTTP(ctx, &bounded{Listener: l, most: connectionsFor(v.MaxConnections), full: func() {
		daemon.Logger(ctx).Warn("too many connections of clients: those that are idle are closed")
		srv.SetKeepAlivesEnabled(false) // which closes them
		srv.SetKeepAlivesEnabled(true)
	}}, srv)
	if errors.Is(err, http.ErrServerClosed) {
		return nil
	}
	return err
}
