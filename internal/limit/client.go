package limit

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/kinference/kinference/internal/daemon"
	limiterv1 "github.com/kinference/kinference/proto/gen/kinference/limiter/v1"
)

// Client asks the limiter.
type Client struct {
	s       Settings
	log     *slog.Logger
	metrics *metrics
	breaker breaker
	holders atomic.Int64 // processes to divide by; 0: unknown

	mu        sync.RWMutex
	orgs      map[string]*org
	fallbacks map[string]*fallback // by organisation and key, while the limiter is away

	queue     chan *settlement
	spill     *spill
	refilling sync.Mutex
	closing   chan struct{} // no new settlements: what is queued is sent
	closed    atomic.Bool

	base    context.Context // of calls in the background
	cancel  context.CancelFunc
	tick    context.Context // of the regular work
	halt    context.CancelFunc
	work    sync.WaitGroup // regular work and changes of leases
	senders sync.WaitGroup // settlers
}

// org is what a client has of one organisation.
type org struct {
	name string

	mu      sync.RWMutex
	pools   map[string]*pool
	running map[string]*Reservation // at the limiter, to extend

	syncing sync.Mutex  // one change of leases at a time
	kicked  atomic.Bool // a change is to come
	full    atomic.Bool // which looks at all pools

	needs sync.Mutex
	needy map[*pool]struct{} // that want another share before the next tick
}

// need has the share of a pool looked at with the next change of leases.
func (o *org) need(pools ...*pool) {
	o.needs.Lock()
	defer o.needs.Unlock()
	for _, p := range pools {
		o.needy[p] = struct{}{}
	}
}

// candidates are the pools to look at: all, or those in need.
func (o *org) candidates(all bool) []*pool {
	var out []*pool
	o.needs.Lock()
	for p := range o.needy {
		out = append(out, p)
	}
	clear(o.needy)
	o.needs.Unlock()
	if !all {
		return out
	}
	o.mu.RLock()
	defer o.mu.RUnlock()
	out = out[:0]
	for _, p := range o.pools {
		out = append(out, p)
	}
	return out
}

// Bounds of what a client holds. Buckets beyond are always asked for.
const (
	maxOrgs      = 10_000
	maxPools     = 10_000 // of an organisation
	maxFallbacks = 10_000
	maxCharges   = 64
	maxID        = 120 // the limiter takes a little more
	maxShares    = 64
	maxExtend    = 1000
)

// New starts a client. Its metrics and log are those of ctx; it lives until
// Close, whatever becomes of ctx.
func New(ctx context.Context, s Settings) (*Client, error) {
	if s.Limiter == nil {
		return nil, errors.New("limit: no limiter")
	}
	s.Timeout, s.TTL, s.LeaseTTL = cmp.Or(s.Timeout, 50*time.Millisecond), cmp.Or(s.TTL, 30*time.Second), cmp.Or(s.LeaseTTL, 3*time.Second)
	s.QueueLength, s.SpillBytes, s.Holder = cmp.Or(s.QueueLength, 10_000), cmp.Or(s.SpillBytes, 64<<20), cmp.Or(s.Holder, rand.Text())
	c := &Client{s: s, log: daemon.Logger(ctx), orgs: map[string]*org{}, fallbacks: map[string]*fallback{},
		queue: make(chan *settlement, s.QueueLength), closing: make(chan struct{})}
	c.holders.Store(int64(s.Replicas))
	var err error
	if c.spill, err = openSpill(s.SpillFile, s.SpillBytes); err != nil {
		return nil, err
	}
	if c.metrics, err = newMetrics(daemon.Meter(ctx), c); err != nil {
		return nil, errors.Join(err, c.spill.close())
	}
	c.base, c.cancel = context.WithCancel(context.WithoutCancel(ctx))
	c.tick, c.halt = context.WithCancel(c.base)
	c.work.Go(c.run)
	for range settlers {
		c.senders.Go(func() { c.settler(c.base) })
	}
	return c, nil
}

// organisation of a charge.
func (r *Request) organisation(i int) string {
	return cmp.Or(r.Charges[i].Organisation, r.Organisation)
}

func (r *Request) validate() error {
	if r.Organisation == "" || r.ID == "" {
		return errors.New("limit: a request needs an organisation and an id")
	}
	if len(r.ID) > maxID {
		return fmt.Errorf("limit: id has %d bytes, at most %d", len(r.ID), maxID)
	}
	if len(r.Charges) > maxCharges {
		return fmt.Errorf("limit: %d charges, at most %d", len(r.Charges), maxCharges)
	}
	for i := range r.Charges {
		if c := &r.Charges[i]; c.Bucket == nil || c.Amount < 0 || c.Amount > maxAmount {
			return fmt.Errorf("limit: charge %d has no bucket, or an amount that is not from 0 to 2^51", i)
		}
	}
	return nil
}

// org returns what is known of an organisation, nil if there are too many.
func (c *Client) org(name string) *org {
	c.mu.RLock()
	o := c.orgs[name]
	c.mu.RUnlock()
	if o != nil {
		return o
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if o = c.orgs[name]; o == nil && len(c.orgs) < maxOrgs {
		o = &org{name: name, pools: map[string]*pool{}, running: map[string]*Reservation{}, needy: map[*pool]struct{}{}}
		c.orgs[name] = o
	}
	return o
}

// pool of a bucket, made if need be; nil if there are too many.
func (o *org) pool(b *limiterv1.Bucket) *pool {
	if o == nil {
		return nil
	}
	o.mu.RLock()
	p := o.pools[b.GetKey()]
	o.mu.RUnlock()
	if p != nil {
		return p
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	if p = o.pools[b.GetKey()]; p == nil && len(o.pools) < maxPools {
		p = &pool{key: b.GetKey(), bucket: b}
		o.pools[b.GetKey()] = p
	}
	return p
}

// Reserve decides on a request. It errs only on a request that is malformed,
// and when ctx ends before the decision; nothing stays charged then.
func (c *Client) Reserve(ctx context.Context, r Request) (*Answer, error) {
	if err := r.validate(); err != nil {
		return nil, err
	}
	start := time.Now()
	d := &decision{
		client: c, request: &r, now: start,
		res:    &Reservation{client: c, request: r, parts: make([]part, len(r.Charges)), at: start.UnixMicro()},
		answer: &Answer{Refused: -1, Tightest: -1, States: make([]*limiterv1.State, len(r.Charges))},
	}
	if err := d.decide(ctx); err != nil {
		return nil, err
	}
	c.metrics.decide(ctx, d.answer, d.trip, time.Since(start))
	return d.answer, nil
}

// forget ends the heartbeat of a reservation.
func (c *Client) forget(name string, r *Reservation) {
	if o := c.org(name); o != nil {
		o.mu.Lock()
		defer o.mu.Unlock()
		if o.running[r.request.ID] == r {
			delete(o.running, r.request.ID)
		}
	}
}

// call makes one call that a request waits for. asked says that it was made, so
// that it may have had an effect.
func (c *Client) call(ctx context.Context, f func(context.Context) error) (asked bool, err error) {
	ok, try := c.breaker.admit()
	if !ok {
		return false, errAway
	}
	bounded, cancel := context.WithTimeout(ctx, c.s.Timeout)
	defer cancel()
	err = f(bounded)
	if err != nil && ctx.Err() != nil {
		// The caller left: that says nothing of the limiter.
		c.breaker.done(try, false, true)
		return true, ctx.Err()
	}
	c.report(try, err)
	return true, err
}

var errAway = connect.NewError(connect.CodeUnavailable, errors.New("limiter does not answer"))

// replicas to divide by.
func (c *Client) replicas() int { return int(max(c.holders.Load(), int64(c.s.Replicas), 1)) }

// run does the regular work until the client closes.
func (c *Client) run() {
	leases, beats := time.NewTicker(c.s.LeaseTTL/6), time.NewTicker(c.s.TTL/3)
	defer leases.Stop()
	defer beats.Stop()
	for {
		select {
		case <-c.tick.Done():
			return
		case <-leases.C:
			c.refill()
			for _, o := range c.all() {
				c.kick(o, true)
			}
		case <-beats.C:
			for _, o := range c.all() {
				c.extend(o)
			}
			c.drop()
		}
	}
}

func (c *Client) all() []*org {
	c.mu.RLock()
	defer c.mu.RUnlock()
	out := make([]*org, 0, len(c.orgs))
	for _, o := range c.orgs {
		out = append(out, o)
	}
	return out
}

// drop forgets the fallback buckets once the limiter answers.
func (c *Client) drop() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.breaker.open() {
		clear(c.fallbacks)
	}
}

// kick has the leases of an organisation changed soon: of all pools, or those in
// need.
func (c *Client) kick(o *org, all bool) {
	if all {
		o.full.Store(true)
	}
	if c.tick.Err() != nil || !o.kicked.CompareAndSwap(false, true) {
		return
	}
	c.work.Go(func() { c.sync(c.tick, o, false, c.s.LeaseTTL) })
}

// sync reports what was spent and changes leases until nothing is due. Unused
// shares go back after idle.
func (c *Client) sync(ctx context.Context, o *org, all bool, idle time.Duration) {
	o.syncing.Lock()
	defer o.syncing.Unlock()
	o.kicked.Store(false)
	all = o.full.Swap(false) || all
	for ctx.Err() == nil {
		pools, shares := o.due(all, c.s.LeaseTTL, idle)
		if len(shares) == 0 {
			return
		}
		var resp *limiterv1.LeaseResponse
		_, err := c.call(ctx, func(ctx context.Context) (err error) {
			resp, err = c.s.Limiter.Lease(ctx, &limiterv1.LeaseRequest{Organisation: o.name, Holder: c.s.Holder, Shares: shares, Ttl: durationpb.New(c.s.LeaseTTL)})
			return err
		})
		if connect.CodeOf(err) == connect.CodeInvalidArgument {
			c.log.Warn("limiter refuses a lease", "err", err)
			for i, p := range pools {
				p.answered(shares[i], &limiterv1.Grant{Synchronous: true}, time.Now(), 0)
			}
			return
		}
		if err != nil || len(resp.GetGrants()) != len(shares) {
			return // the same again with the next tick
		}
		now := time.Now()
		for i, p := range pools {
			p.answered(shares[i], resp.Grants[i], now, c.s.LeaseTTL)
		}
	}
}

// due collects changes of shares, and forgets pools without use.
func (o *org) due(all bool, ttl, idle time.Duration) (pools []*pool, shares []*limiterv1.Share) {
	now := time.Now()
	candidates := o.candidates(all)
	for i, p := range candidates {
		if len(shares) == maxShares {
			o.need(candidates[i:]...)
			break
		}
		if s := p.next(now, ttl, idle); s != nil {
			pools, shares = append(pools, p), append(shares, s)
		} else if all && p.retire(now, 10*ttl) {
			o.mu.Lock()
			delete(o.pools, p.key)
			o.mu.Unlock()
		}
	}
	return pools, shares
}

// leases counts the shares that are held.
func (c *Client) leases() (n int64) {
	for _, o := range c.all() {
		o.mu.RLock()
		for _, p := range o.pools {
			p.mu.Lock()
			if p.held > 0 {
				n++
			}
			p.mu.Unlock()
		}
		o.mu.RUnlock()
	}
	return n
}

// extend is the heartbeat of an organisation's running requests.
func (c *Client) extend(o *org) {
	o.mu.RLock()
	ids := make([]string, 0, len(o.running))
	for id := range o.running {
		ids = append(ids, id)
	}
	o.mu.RUnlock()
	for len(ids) > 0 {
		n := min(len(ids), maxExtend)
		var resp *limiterv1.ExtendResponse
		_, err := c.call(c.tick, func(ctx context.Context) (err error) {
			resp, err = c.s.Limiter.Extend(ctx, &limiterv1.ExtendRequest{Organisation: o.name, RequestIds: ids[:n], Ttl: durationpb.New(c.s.TTL)})
			return err
		})
		if err == nil {
			c.metrics.unknown.Add(c.tick, int64(len(resp.GetUnknown())))
		}
		ids = ids[n:]
	}
}

// Close settles what waits and returns the leases, until ctx is done. What is
// left goes to the spill file. Requests must have ended before.
func (c *Client) Close(ctx context.Context) error {
	if !c.closed.CompareAndSwap(false, true) {
		return nil
	}
	c.halt()
	// The work in the background ends with its calls, within their timeout.
	c.work.Wait()
	stop := context.AfterFunc(ctx, c.cancel)
	defer stop()
	for _, o := range c.all() {
		c.sync(c.base, o, true, 0)
	}
	close(c.closing)
	c.senders.Wait()
	c.cancel()
	return errors.Join(c.metrics.registration.Unregister(), c.spill.close())
}
