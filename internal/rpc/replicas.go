package rpc

import (
	"bytes"
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"time"

	"connectrpc.com/connect"

	"github.com/kinference/kinference/internal/daemon"
)

const (
	// lookEvery is the time between two looks at replicas that are away.
	lookEvery = time.Second
	// resolveEvery is the time between two look-ups of the names of a service.
	resolveEvery = 5 * time.Second
	// mostLate calls in a row that ran out of time, none of them answered, are
	// taken for the end of a replica: pings take seconds to find one that hangs.
	mostLate = 3
	// settled is how long a replica must have been well before clients that prefer it go
	// to it: one that was just started knows little yet, and may fail again.
	settled = time.Minute
	// maxReplicas bounds what a name server can make a client remember.
	maxReplicas = 64
)

// replicas sends calls to one of several replicas of a service. All calls go to
// the same one as long as it answers, because a router knows only of requests that
// it was asked about and a classifier remembers conversations. When it fails, the
// call is repeated at the next one. Each client has an order of its own, so that clients
// spread, and goes to the first in it once that has been well for a while: else those
// of a replica that was restarted would stay away from it, and a new one get none. What
// belongs to calls before, such as the ends of requests, goes where those went: see
// [Stay] and [At].
//
// Calls are repeated only if no answer has begun. The services allow for it: what
// a call did at a replica that died with the answer has no effect twice. Those that
// do not have the option Once.
type replicas struct {
	log   *slog.Logger
	seeds []*url.URL
	open  func(address string, several bool) *http.Transport
	look  chan struct{} // asks for a look-up of names
	every time.Duration // between two looks
	rests time.Duration // that one must have been well to be gone to

	mu      sync.Mutex
	list    []*replica // in order of preference
	current *replica
}

// replica is one address of a service.
type replica struct {
	base    *url.URL
	address string // host:port to dial, instead of that in base; empty: none
	*http.Transport

	// Guarded by replicas.mu.
	away bool
	late int       // calls in a row that ran out of time
	well time.Time // since when it is known, or back
}

func (r *replica) String() string {
	if r.address != "" {
		return r.address
	}
	return r.base.Host
}

// URLs are the parts of a list with commas, as Client takes it.
func URLs(list string) (urls []string) {
	for part := range strings.SplitSeq(list, ",") {
		if part = strings.TrimSpace(part); part != "" {
			urls = append(urls, part)
		}
	}
	return urls
}

// CheckURLs reports whether a list of URLs is of use to Client: http or https, with
// a host. A path counts of the first one only.
func CheckURLs(list string) error {
	urls := URLs(list)
	if len(urls) == 0 {
		return errors.New("want http://host:port, with commas between several")
	}
	for _, raw := range urls {
		u, err := url.Parse(raw)
		if err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" {
			return fmt.Errorf("%q: want http://host:port, with commas between several", raw)
		}
	}
	return nil
}

// dial makes the HTTP client of a service at one or several addresses, and the URL
// that stands for it.
func dial(ctx context.Context, list string) (client connect.HTTPClient, base string) {
	urls := URLs(list)
	var seeds []*url.URL
	for _, raw := range urls {
		if u, err := url.Parse(raw); err == nil && u.Host != "" {
			seeds = append(seeds, u)
		}
	}
	open := func(address string, several bool) *http.Transport { return transport(ctx, address, several) }
	if len(seeds) == 0 || len(seeds) == 1 && isAddress(seeds[0].Hostname()) {
		t := open("", false)
		context.AfterFunc(ctx, t.CloseIdleConnections)
		return &http.Client{Transport: t}, list
	}
	p := several(ctx, seeds, lookEvery, open)
	go p.follow(ctx)
	return p, urls[0]
}

func several(ctx context.Context, seeds []*url.URL, every time.Duration, open func(string, bool) *http.Transport) *replicas {
	p := &replicas{log: daemon.Logger(ctx), seeds: seeds, every: every, rests: settled, open: open, look: make(chan struct{}, 1)}
	for _, u := range seeds {
		p.list = append(p.list, &replica{base: u, Transport: open("", len(seeds) > 1)})
	}
	rand.Shuffle(len(p.list), func(i, j int) { p.list[i], p.list[j] = p.list[j], p.list[i] })
	p.current = p.list[0]
	return p
}

func isAddress(host string) bool { return net.ParseIP(host) != nil || host == "localhost" }

// transport makes a pool of connections to one replica. With an address it is
// dialled in place of the URL's host.
func transport(ctx context.Context, address string, several bool) *http.Transport {
	dialer := &net.Dialer{Timeout: 2 * time.Second, KeepAlive: 15 * time.Second}
	// A peer that vanished without closing its connection is found by pings, else
	// calls on that connection would hang until TCP gives up. It is found sooner
	// where another one can take its place.
	pings := &http.HTTP2Config{SendPingTimeout: 5 * time.Second, PingTimeout: 3 * time.Second}
	if several {
		dialer.Timeout = time.Second
		pings = &http.HTTP2Config{SendPingTimeout: time.Second, PingTimeout: 2 * time.Second}
	}
	to := func(addr string) string {
		if address != "" {
			return address
		}
		return addr
	}
	t := &http.Transport{
		DialContext: func(ctx context.Context, network, addr string) (net.Conn, error) {
			return dialer.DialContext(ctx, network, to(addr))
		},
		HTTP2:               pings,
		Protocols:           new2(),
		TLSHandshakeTimeout: 3 * time.Second,
	}
	if src := daemon.ClientTLS(ctx); src != nil {
		t.DialTLSContext = func(ctx context.Context, network, addr string) (net.Conn, error) {
			host, _, err := net.SplitHostPort(addr)
			if err != nil {
				return nil, err
			}
			conf := src.Client(host)
			conf.NextProtos = []string{"h2"}
			return (&tls.Dialer{NetDialer: dialer, Config: conf}).DialContext(ctx, network, to(addr))
		}
	}
	return t
}

var _ connect.HTTPClient = (*replicas)(nil)

// Do implements connect.HTTPClient.
func (p *replicas) Do(req *http.Request) (*http.Response, error) {
	// An attempt that failed may still be reading its body.
	var body []byte
	repeatable := req.GetBody != nil
	if repeatable && req.Body != nil && req.Body != http.NoBody {
		var err error
		body, err = io.ReadAll(req.Body)
		_ = req.Body.Close()
		if err != nil {
			return nil, err
		}
	}
	place, _ := req.Context().Value(placeKey{}).(*Place)
	var tried []*replica
	var last error
	for {
		r := p.pick(tried, place.get())
		if r == nil {
			return nil, last
		}
		tried = append(tried, r)
		attempt := req.WithContext(req.Context())
		u := *req.URL
		u.Scheme, u.Host = r.base.Scheme, r.base.Host
		attempt.URL, attempt.Host = &u, u.Host
		if body != nil {
			attempt.Body = io.NopCloser(bytes.NewReader(body))
			attempt.GetBody = func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(body)), nil }
		}
		resp, err := r.RoundTrip(attempt)
		if err == nil {
			p.answered(r)
			place.set(r)
			return resp, nil
		}
		last = err
		if cause := req.Context().Err(); cause != nil {
			if errors.Is(cause, context.DeadlineExceeded) {
				p.wasLate(r)
			}
			return nil, err
		}
		p.failed(r, err)
		if !repeatable || once(req.Context()) && !unsent(err) {
			return nil, err
		}
	}
}

// pick returns the replica to ask next, nil when all were tried: where the call belongs,
// the one in use, others that are well, and at last those that are said to be away.
func (p *replicas) pick(tried []*replica, belongs *replica) *replica {
	p.mu.Lock()
	defer p.mu.Unlock()
	if belongs != nil && !belongs.away && !slices.Contains(tried, belongs) {
		return belongs
	}
	if !p.current.away && !slices.Contains(tried, p.current) {
		return p.current
	}
	for _, away := range []bool{false, true} {
		for _, r := range p.list {
			if r.away == away && !slices.Contains(tried, r) {
				return r
			}
		}
	}
	return nil
}

func (p *replicas) answered(r *replica) {
	p.mu.Lock()
	defer p.mu.Unlock()
	r.late = 0
	if r != p.current && p.current.away && slices.Contains(p.list, r) {
		p.use(r)
	}
}

// use takes a replica from now on. The lock is held.
func (p *replicas) use(r *replica) {
	p.log.Info("calls go to another replica", "from", p.current.String(), "to", r.String())
	p.current = r
}

func (p *replicas) wasLate(r *replica) {
	p.mu.Lock()
	r.late++
	late := r.late >= mostLate
	p.mu.Unlock()
	if late {
		p.failed(r, context.DeadlineExceeded)
	}
}

// failed notes that a replica did not answer. Its idle connections are of no use.
func (p *replicas) failed(r *replica, err error) {
	p.mu.Lock()
	before := r.away
	r.away, r.late = true, 0
	p.mu.Unlock()
	if before {
		return
	}
	p.log.Warn("replica is away", "replica", r.String(), "err", err)
	r.CloseIdleConnections()
	select {
	case p.look <- struct{}{}:
	default:
	}
}

// follow looks up names, and looks at replicas that are away, until ctx is done.
func (p *replicas) follow(ctx context.Context) {
	tick := time.NewTicker(p.every)
	defer tick.Stop()
	defer func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		for _, r := range p.list {
			r.CloseIdleConnections()
		}
	}()
	named := slices.ContainsFunc(p.seeds, func(u *url.URL) bool { return !isAddress(u.Hostname()) })
	resolved := time.Time{}
	for {
		if named && time.Since(resolved) > resolveEvery {
			p.resolve(ctx)
			resolved = time.Now()
		}
		select {
		case <-ctx.Done():
			return
		case <-p.look:
			resolved = time.Time{}
		case <-tick.C:
			p.lookAt(ctx)
			p.prefer()
		}
	}
}

// prefer goes to the first replica in the client's order if that has settled.
func (p *replicas) prefer() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if first := p.list[0]; first != p.current && !first.away && time.Since(first.well) > p.rests {
		p.use(first)
	}
}

// resolve takes over the addresses of the names. What cannot be looked up stays.
func (p *replicas) resolve(ctx context.Context) {
	p.mu.Lock()
	old := slices.Clone(p.list)
	p.mu.Unlock()
	keep := make(map[*replica]bool, len(old))
	var added []*replica
	take := func(base *url.URL, address string) {
		for _, r := range old {
			if r.base == base && r.address == address {
				keep[r] = true
				return
			}
		}
		added = append(added, &replica{base: base, address: address, well: time.Now()})
	}
	for _, u := range p.seeds {
		addresses, err := lookUp(ctx, u)
		switch {
		case err != nil:
			for _, r := range old {
				if r.base == u {
					keep[r] = true
				}
			}
		case len(addresses) == 1:
			take(u, "") // such as a Service's own, behind which there may be several
		default:
			for _, a := range addresses {
				take(u, a)
			}
		}
	}
	// Those that are known stay: what is dropped would come and go with each look-up.
	added = added[:min(len(added), max(0, maxReplicas-len(keep)))]
	if ctx.Err() != nil || len(keep)+len(added) == 0 || len(added) == 0 && len(keep) == len(old) {
		return
	}
	several := len(keep)+len(added) > 1
	for _, r := range added {
		r.Transport = p.open(r.address, several)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	list := slices.DeleteFunc(slices.Clone(p.list), func(r *replica) bool { return !keep[r] })
	for _, r := range added {
		list = slices.Insert(list, rand.IntN(len(list)+1), r)
	}
	p.list = list
	if !slices.Contains(p.list, p.current) {
		p.use(p.list[0])
	}
	for _, r := range old {
		if !keep[r] {
			r.CloseIdleConnections()
		}
	}
}

// lookUp returns the addresses of a URL's host as host:port, sorted. Of two
// families one will do: they are of the same replicas.
func lookUp(ctx context.Context, u *url.URL) ([]string, error) {
	port := cmp.Or(u.Port(), map[string]string{"http": "80", "https": "443"}[u.Scheme])
	if isAddress(u.Hostname()) {
		return []string{net.JoinHostPort(u.Hostname(), port)}, nil
	}
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	ips, err := net.DefaultResolver.LookupNetIP(ctx, "ip4", u.Hostname())
	if err != nil || len(ips) == 0 {
		ips, err = net.DefaultResolver.LookupNetIP(ctx, "ip6", u.Hostname())
	}
	if err == nil && len(ips) == 0 {
		err = errors.New("no address")
	}
	var out []string
	for _, ip := range ips {
		out = append(out, net.JoinHostPort(ip.Unmap().String(), port))
	}
	slices.Sort(out)
	return slices.Compact(out), err
}

// lookAt asks replicas that are away for their health.
func (p *replicas) lookAt(ctx context.Context) {
	p.mu.Lock()
	var list []*replica
	for _, r := range p.list {
		if r.away {
			list = append(list, r)
		}
	}
	p.mu.Unlock()
	var all sync.WaitGroup
	for _, r := range list {
		all.Go(func() {
			if healthy(ctx, r) != nil {
				return
			}
			p.mu.Lock()
			defer p.mu.Unlock()
			p.log.Info("replica is back", "replica", r.String())
			r.away, r.late, r.well = false, 0, time.Now()
			if p.current.away && slices.Contains(p.list, r) {
				p.use(r)
			}
		})
	}
	all.Wait()
}

// healthy asks a replica whether it serves.
func healthy(ctx context.Context, r *replica) error {
	ctx, cancel := context.WithTimeout(ctx, lookEvery)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, r.base.JoinPath("grpc.health.v1.Health/Check").String(), strings.NewReader("{}"))
	if err != nil {
		return err
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := r.RoundTrip(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	answer, err := io.ReadAll(io.LimitReader(resp.Body, 1<<10))
	if err != nil {
		return err
	}
	if resp.StatusCode != http.StatusOK || !bytes.Contains(answer, []byte(`SERVING"`)) || bytes.Contains(answer, []byte("NOT_SERVING")) {
		return fmt.Errorf("status %d", resp.StatusCode)
	}
	return nil
}
