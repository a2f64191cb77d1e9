// Package rpc is the one place that knows how services talk to each other:
// Connect over h2c (gRPC and JSON are answered too), with health, reflection,
// metrics, traces, panic recovery and one error mapping. With the TLS files of
// internal/daemon it is HTTP/2 over TLS.
//
// Services mount their implementation with Mount, serve with Serve and call
// each other through Client. Everything is safe for concurrent use.
package rpc

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"strings"
	"time"

	"connectrpc.com/connect"
	"connectrpc.com/grpchealth"
	"connectrpc.com/grpcreflect"
	"connectrpc.com/otelconnect"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/kinference/kinference/internal/daemon"
)

// Handler is a mounted service or any other HTTP handler of a service's port.
type Handler struct {
	// Path is a pattern of http.ServeMux.
	Path    string
	Handler http.Handler
	// Service is the full name for health and reflection; empty for plain
	// HTTP handlers.
	Service string
}

// maxMessage bounds one RPC message. A prompt of a million tokens in blocks of
// 16 has 62,500 hashes of 8 bytes: half a megabyte for each profile.
const maxMessage = 16 << 20

// Mount makes a Handler of svc; new is the generated New…Handler function and S
// its generated interface, which callers must name. ctx
// is the context of the service's Run: when it is done, streams end, so that a
// drain does not wait for watchers.
func Mount[S any](ctx context.Context, svc S, new func(S, ...connect.HandlerOption) (string, http.Handler)) Handler {
	path, h := new(svc,
		connect.WithInterceptors(observe(ctx), &edge{ctx: ctx}),
		connect.WithRecover(func(_ context.Context, spec connect.Spec, _ http.Header, p any) error {
			daemon.Logger(ctx).Error("handler panicked", "procedure", spec.Procedure, "panic", fmt.Sprintf("%T", p))
			return connect.NewError(connect.CodeInternal, errors.New("internal error"))
		}),
		connect.WithReadMaxBytes(maxMessage),
		// Clients accept gzip by default, and it costs a decision more than it
		// saves on the way to a neighbour.
		connect.WithCompressMinBytes(maxMessage),
	)
	return Handler{Path: path, Handler: h, Service: strings.Trim(path, "/")}
}

// Client returns a client of the service at url (http://host:port, or https:// for
// TLS as daemon.ClientTLS has it); new is the generated New…Client function. Several
// URLs, with commas between them, and a name with several addresses, such as that of a
// headless Service, are replicas: calls go to one of them, and to the next one when it
// fails. Connections close when ctx is done.
// More options, such as Bearer and Once, may follow.
func Client[C any](ctx context.Context, url string, new func(connect.HTTPClient, string, ...connect.ClientOption) C, options ...connect.ClientOption) C {
	client, base := dial(ctx, url)
	return new(client, base,
		append([]connect.ClientOption{connect.WithInterceptors(observe(ctx)), connect.WithReadMaxBytes(maxMessage)}, options...)...)
}

func new2() *http.Protocols {
	p := new(http.Protocols)
	p.SetHTTP2(true)
	p.SetUnencryptedHTTP2(true)
	return p
}

// TLS is the configuration for servers of people and tools, which show no
// certificate of their own: that of daemon.ServerTLS, or nil for clear text.
func TLS(ctx context.Context) *tls.Config {
	if src, _ := daemon.ServerTLS(ctx); src != nil {
		return src.Server(false)
	}
	return nil
}

// Serve serves handlers on l, with health and reflection for those that are
// services, until ctx is done. It then stops accepting, waits for calls in
// progress up to daemon.DrainTimeout(ctx), and returns nil.
func Serve(ctx context.Context, l net.Listener, handlers ...Handler) error {
	mux := http.NewServeMux()
	var names []string
	for _, h := range handlers {
		mux.Handle(h.Path, h.Handler)
		if h.Service != "" {
			names = append(names, h.Service)
		}
	}
	mux.Handle(grpchealth.NewHandler(&health{ctx, names}))
	mux.Handle(grpcreflect.NewHandlerV1(grpcreflect.NewStaticReflector(names...)))
	srv := &http.Server{Handler: mux}
	if src, callers := daemon.ServerTLS(ctx); src != nil {
		srv.TLSConfig = src.Server(callers)
	}
	return ServeHTTP(ctx, l, srv)
}

// ServeHTTP serves srv on l over HTTP/1.1 and h2c, or over TLS if srv has a
// TLSConfig, with the drain of Serve. Unset timeouts for headers and idle connections get bounds.
func ServeHTTP(ctx context.Context, l net.Listener, srv *http.Server) error {
	p := new2()
	p.SetHTTP1(true)
	srv.Protocols = p
	if srv.ReadHeaderTimeout == 0 {
		srv.ReadHeaderTimeout = 10 * time.Second
	}
	if srv.IdleTimeout == 0 {
		srv.IdleTimeout = 2 * time.Minute
	}
	failed := make(chan error, 1)
	serve := srv.Serve
	if srv.TLSConfig != nil {
		serve = func(l net.Listener) error { return srv.ServeTLS(l, "", "") }
		srv.ErrorLog = log.New(io.Discard, "", 0) // a line for each port scan
	}
	go func() { failed <- serve(l) }()
	select {
	case err := <-failed:
		return fmt.Errorf("serve %s: %w", l.Addr(), err)
	case <-ctx.Done():
	}
	grace, cancel := context.WithTimeout(context.WithoutCancel(ctx), daemon.DrainTimeout(ctx))
	defer cancel()
	if err := srv.Shutdown(grace); err != nil {
		daemon.Logger(ctx).Warn("drain cut short", "err", err)
		_ = srv.Close()
	}
	<-failed //nolint:errcheck // always http.ErrServerClosed by now
	return nil
}

// Listen returns l if it is open already and else opens addr.
func Listen(l net.Listener, addr string) (net.Listener, error) {
	if l != nil {
		return l, nil
	}
	l, err := net.Listen("tcp", addr)
	if err != nil {
		return nil, fmt.Errorf("open port: %w", err)
	}
	return l, nil
}

// Error is an answer to a peer: msg travels, a retryAfter above zero too.
func Error(code connect.Code, msg string, retryAfter time.Duration) *connect.Error {
	err := connect.NewError(code, errors.New(msg))
	if retryAfter > 0 {
		if d, derr := connect.NewErrorDetail(durationpb.New(retryAfter)); derr == nil {
			err.AddDetail(d)
		}
	}
	return err
}

// RetryAfter is the delay that the peer asked for in Error.
func RetryAfter(err error) (time.Duration, bool) {
	var ce *connect.Error
	if !errors.As(err, &ce) {
		return 0, false
	}
	for _, d := range ce.Details() {
		if v, err := d.Value(); err == nil {
			if dur, ok := v.(*durationpb.Duration); ok {
				return dur.AsDuration(), true
			}
		}
	}
	return 0, false
}

func observe(ctx context.Context) connect.Interceptor {
	i, err := otelconnect.NewInterceptor(
		otelconnect.WithMeterProvider(daemon.Meters(ctx)),
		otelconnect.WithTracerProvider(daemon.Tracers(ctx)),
		otelconnect.WithPropagator(daemon.Propagator),
		otelconnect.WithTrustRemote(),
		// Peer addresses as labels would make a series per client port.
		otelconnect.WithoutServerPeerAttributes(),
	)
	if err != nil {
		// Only invalid instrument names fail, and these are the library's own.
		panic(fmt.Sprintf("rpc: otelconnect: %v", err))
	}
	return i
}

// edge maps errors of handlers to codes and ends streams on drain.
type edge struct{ ctx context.Context }

var _ connect.Interceptor = (*edge)(nil)

func (e *edge) WrapUnary(next connect.UnaryFunc) connect.UnaryFunc {
	return func(ctx context.Context, req connect.AnyRequest) (connect.AnyResponse, error) {
		if req.Spec().IsClient {
			return next(ctx, req)
		}
		resp, err := next(ctx, req)
		return resp, e.coded(req.Spec().Procedure, err)
	}
}

func (e *edge) WrapStreamingClient(next connect.StreamingClientFunc) connect.StreamingClientFunc {
	return next
}

func (e *edge) WrapStreamingHandler(next connect.StreamingHandlerFunc) connect.StreamingHandlerFunc {
	return func(ctx context.Context, conn connect.StreamingHandlerConn) error {
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		defer context.AfterFunc(e.ctx, cancel)()
		err := next(ctx, conn)
		if e.ctx.Err() != nil {
			return connect.NewError(connect.CodeUnavailable, errors.New("service is stopping"))
		}
		return e.coded(conn.Spec().Procedure, err)
	}
}

// coded is the one mapping from errors to codes. Causes are logged, not sent:
// an error that is not meant for the peer reads "internal error" there.
func (e *edge) coded(procedure string, err error) error {
	var ce *connect.Error
	switch {
	case err == nil:
		return nil
	case errors.As(err, &ce):
		return ce
	case errors.Is(err, context.Canceled):
		return connect.NewError(connect.CodeCanceled, errors.New("canceled"))
	case errors.Is(err, context.DeadlineExceeded):
		return connect.NewError(connect.CodeDeadlineExceeded, errors.New("deadline exceeded"))
	}
	daemon.Logger(e.ctx).Error("call failed", "procedure", procedure, "err", err)
	return connect.NewError(connect.CodeInternal, errors.New("internal error"))
}
