package proxy

import (
	"compress/gzip"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/kinference/kinference/internal/openai"
	"github.com/kinference/kinference/internal/provider"
)

// Provider is the destination of a Call that leaves the cluster.
type Provider struct {
	// Name is namespace/name.
	Name   string
	Target provider.Target
	// Credentials are asked for before each attempt.
	Credentials func(ctx context.Context) (provider.Credentials, error)
	// FirstByte and Idle are of streams, Total is of all; 0: the Proxy's, or none.
	FirstByte, Idle, Total time.Duration
	// Concurrency is the most requests at once; 0: no bound.
	Concurrency int
	// Call is the client's request.
	Call provider.Call
}

const (
	// maxProviders bounds the providers whose state is kept, maxModels the
	// breakers of one.
	maxProviders, maxModels = 1024, 1024
	// outsideKeepAlive is how long idle connections to providers are kept.
	outsideKeepAlive = time.Minute
)

var (
	errTotal   = errors.New("total timeout of the provider")
	errOpen    = errors.New("breaker is open")
	errFull    = errors.New("as many requests as its concurrency allows")
	errAddress = errors.New("address is not a public one")
)

// outside is what is known of the providers.
type outside struct {
	set Settings
	mu  sync.Mutex
	all map[string]*remote
}

// remote is one provider. Its connections are its own: providers share neither
// sessions nor limits.
type remote struct {
	transport *http.Transport
	running   atomic.Int64
	budget    Budget
	mu        sync.Mutex
	breakers  map[string]*breaker // by model
}

// remote returns what is known of a provider.
func (o *outside) remote(name string) *remote {
	o.mu.Lock()
	defer o.mu.Unlock()
	r := o.all[name]
	if r != nil {
		return r
	}
	if o.all == nil || len(o.all) >= maxProviders { // only ever after many changes of names
		for _, old := range o.all {
			old.transport.CloseIdleConnections()
		}
		o.all = map[string]*remote{}
	}
	protocols := new(http.Protocols)
	protocols.SetHTTP1(true)
	protocols.SetHTTP2(true)
	dialer := &net.Dialer{Timeout: o.set.Connect, KeepAlive: 15 * time.Second, ControlContext: o.control}
	r = &remote{breakers: map[string]*breaker{}, transport: &http.Transport{
		DialContext:            dialer.DialContext,
		Protocols:              protocols,
		HTTP2:                  &http.HTTP2Config{SendPingTimeout: 15 * time.Second, PingTimeout: 15 * time.Second},
		TLSClientConfig:        &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: o.set.Roots},
		TLSHandshakeTimeout:    o.set.Connect * 2,
		MaxIdleConnsPerHost:    o.set.PerHost,
		IdleConnTimeout:        outsideKeepAlive,
		DisableCompression:     true,
		MaxResponseHeaderBytes: 64 << 10,
	}}
	o.all[name] = r
	return r
}

func (o *outside) close() {
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, r := range o.all {
		r.transport.CloseIdleConnections()
	}
}

// control refuses to connect to addresses inside, whatever name led there and
// whoever answers for that name.
func (o *outside) control(_ context.Context, _, address string, _ syscall.RawConn) error {
	a, err := netip.ParseAddrPort(address)
	if err != nil {
		return errAddress
	}
	ip := a.Addr().WithZone("").Unmap()
	if public(ip) || slices.ContainsFunc(o.set.Private, func(p netip.Prefix) bool { return p.Contains(ip) }) {
		return nil
	}
	return errAddress
}

// special are blocks that are not of the public Internet and that netip has no
// word for: shared by carriers, benchmarks, protocols, reserved; and those that
// hold addresses of IPv4, which may be any.
var special = func() (out []netip.Prefix) {
	for _, s := range []string{
		"0.0.0.0/8", "100.64.0.0/10", "192.0.0.0/24", "192.0.2.0/24", "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24", "240.0.0.0/4",
		"64:ff9b::/96", "64:ff9b:1::/48", "100::/64", "2001::/23", "2001:db8::/32", "2002::/16", "::/96", "fec0::/10",
	} {
		out = append(out, netip.MustParsePrefix(s))
	}
	return out
}()

// Public reports whether an address is one of the public Internet.
func Public(ip net.IP) bool {
	a, ok := netip.AddrFromSlice(ip)
	return ok && public(a.Unmap())
}

func public(ip netip.Addr) bool {
	return ip.IsGlobalUnicast() && !ip.IsPrivate() && !ip.IsLoopback() && !slices.ContainsFunc(special, func(p netip.Prefix) bool { return p.Contains(ip) })
}

// breaker is that of a model.
func (r *remote) breaker(model string) *breaker {
	r.mu.Lock()
	defer r.mu.Unlock()
	b := r.breakers[model]
	if b == nil {
		if len(r.breakers) >= maxModels {
			clear(r.breakers)
		}
		b = &breaker{}
		r.breakers[model] = b
	}
	return b
}

// leave makes the attempt at a provider.
func (a *attempt) leave(w http.ResponseWriter) {
	p := a.c.Provider
	r := a.p.outside.remote(p.Name)
	b := r.breaker(p.Target.Model)
	ok, probe, wait := b.allow(time.Now())
	if !ok {
		a.skip(errOpen, max(wait, time.Second))
		return
	}
	if probe {
		a.begun = b.begun
	}
	v, after := none, time.Duration(0)
	defer func() {
		opened, closed := b.done(time.Now(), v, probe, after)
		if say := a.p.set.Breaker; say != nil && (opened || closed) {
			say(p.Name, p.Target.Model, opened)
		}
	}()
	if n := r.running.Add(1); p.Concurrency > 0 && n > int64(p.Concurrency) {
		r.running.Add(-1)
		a.skip(errFull, time.Second)
		return
	}
	defer r.running.Add(-1)
	if p.Total > 0 {
		var cancel context.CancelFunc
		a.ctx, cancel = context.WithTimeoutCause(a.ctx, p.Total, errTotal)
		defer cancel()
	}
	if !a.prepare() {
		return
	}
	r.budget.Sent(time.Now())
	a.send(w, r.transport)
	if v, after = a.judge(); a.r.Retry && !r.budget.Take() {
		a.r.Retry = false
	}
}

// skip ends the attempt before anything was sent.
func (a *attempt) skip(cause error, after time.Duration) {
	a.fail(Status, cause)
	a.unsent()
	a.r.Err = openai.Overloaded("The provider is busy. Try again later.", min(after, provider.MaxWait))
}

// unsent notes that nothing was sent, so that nothing can have been used.
func (a *attempt) unsent() { a.r.Unsent, a.r.Sent = true, time.Time{} }

// prepare makes the provider's request.
func (a *attempt) prepare() bool {
	p := a.c.Provider
	var keys provider.Credentials
	if p.Credentials != nil {
		var err error
		if keys, err = p.Credentials(a.ctx); err != nil {
			a.fail(Status, fmt.Errorf("read credentials: %w", err))
			a.unsent()
			a.r.Err = openai.Server(http.StatusBadGateway, openai.CodeUpstream, "The gateway is not set up to use this provider.")
			return false
		}
	}
	out, e := p.Target.Prepare(&p.Call, keys, time.Now())
	if e != nil {
		a.fail(Status, errors.New("request cannot be made for the provider"))
		a.unsent()
		// What one provider cannot do a worker may.
		a.r.Err = e
		return false
	}
	a.prepared, a.r.Dropped = out, out.Dropped
	return true
}

// judge says what the attempt tells about who was asked.
func (a *attempt) judge() (verdict, time.Duration) {
	switch {
	case a.r.Reason == Served:
		return good, 0
	case a.r.Reason == Canceled, a.r.Reason == Lost, a.ctx.Err() != nil && (errors.Is(context.Cause(a.ctx), ErrTotal) || errors.Is(context.Cause(a.ctx), ErrStopping)):
		return none, 0
	case a.r.Reason != Status:
		return bad, 0
	case a.refusal == http.StatusTooManyRequests:
		return limited, a.after
	case a.refusal >= 500:
		return bad, 0
	}
	return none, 0
}

// rejected handles a provider's answer other than 200.
func (a *attempt) rejected(resp *http.Response) {
	body, _ := io.ReadAll(io.LimitReader(resp.Body, 64<<10)) // half an error is enough
	if a.ctx.Err() != nil {
		a.fail(Closed, errors.New("closed within an error"))
		return
	}
	status := resp.StatusCode
	a.fail(Status, fmt.Errorf("status %d", status))
	a.r.Err = a.prepared.Refused(status, resp.Header, body)
	a.refusal, a.after = status, provider.RetryAfter(resp.Header)
	if status == 529 { // Anthropic's word for a full house
		a.refusal = http.StatusServiceUnavailable
	}
	// A fault of the request is one for every provider; ours with this one is not.
	a.r.Retry = a.r.Err.Status >= 500
}

// unzip opens a body that is compressed although nobody asked for it. What is
// read of it is bounded like any other.
func unzip(resp *http.Response) error {
	switch strings.ToLower(resp.Header.Get("Content-Encoding")) {
	case "", "identity":
		return nil
	case "gzip", "x-gzip":
		z, err := gzip.NewReader(resp.Body)
		if err != nil {
			return err
		}
		body := resp.Body
		resp.Body, resp.ContentLength = struct {
			io.Reader
			io.Closer
		}{z, body}, -1
		resp.Header.Del("Content-Encoding")
		resp.Header.Del("Content-Length")
		return nil
	}
	return errors.New("content encoding is unknown")
}
