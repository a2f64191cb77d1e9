package limit

import (
	"cmp"
	"context"
	"fmt"
	"math/bits"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/durationpb"

	limiterv1 "github.com/kinference/kinference/proto/gen/kinference/limiter/v1"
)

// decision is one Reserve under way.
type decision struct {
	client  *Client
	request *Request
	res     *Reservation
	answer  *Answer
	now     time.Time
	trip    bool
}

func (d *decision) decide(ctx context.Context) error {
	for again := true; ; again = false {
		granted, retry, err := d.ask(ctx, d.lease())
		if err != nil {
			d.res.Release()
			return err
		}
		if granted {
			break
		}
		d.res.undo()
		if !retry || !again {
			d.tightest()
			return nil
		}
		// The bucket refused while this process holds a share of it: with the
		// share returned it may fit.
		d.now = time.Now()
		*d.answer = Answer{Refused: -1, Tightest: -1, States: make([]*limiterv1.State, len(d.request.Charges))}
		d.res = &Reservation{client: d.client, request: *d.request, parts: make([]part, len(d.request.Charges)), at: d.now.UnixMicro()}
		d.request.ID += "'" // the first one is settled
		d.res.request.ID = d.request.ID
	}
	d.tightest()
	d.answer.Reservation = d.res
	return nil
}

// lease takes from shares what it can. It returns the charges to ask for, by
// organisation, in the order of the charges.
func (d *decision) lease() (ask []group) {
	for i := range d.request.Charges {
		c, name := &d.request.Charges[i], d.request.organisation(i)
		if !d.client.s.NoLeases && leasable(c.Bucket) {
			o := d.client.org(name)
			if p := o.pool(c.Bucket); p != nil {
				st, ok, sync := p.take(c.Bucket, c.Amount, d.now)
				if sync {
					o.need(p)
					d.client.kick(o, false)
				}
				if ok {
					d.res.parts[i] = part{place: leased, pool: p}
					d.answer.States[i] = st
					continue
				}
			}
		}
		at := -1
		for j := range ask {
			if ask[j].name == name {
				at = j
			}
		}
		if at < 0 {
			at = len(ask)
			ask = append(ask, group{name: name})
		}
		ask[at].charges = append(ask[at].charges, i)
	}
	return ask
}

// group is the charges of one organisation.
type group struct {
	name    string
	charges []int
}

// ask reserves groups at the limiter, one after the other. retry says that a
// refusal may be due to a share of this process, which was returned.
func (d *decision) ask(ctx context.Context, groups []group) (granted, retry bool, err error) {
	for _, g := range groups {
		d.trip = true
		req := &limiterv1.ReserveRequest{Organisation: g.name, RequestId: d.request.ID, Ttl: durationpb.New(d.client.s.TTL), Holder: d.client.s.Holder}
		for _, i := range g.charges {
			req.Charges = append(req.Charges, &limiterv1.Charge{Bucket: d.request.Charges[i].Bucket, Amount: d.request.Charges[i].Amount})
		}
		var resp *limiterv1.ReserveResponse
		asked, err := d.client.call(ctx, func(ctx context.Context) (err error) {
			resp, err = d.client.s.Limiter.Reserve(ctx, req)
			return err
		})
		if asked {
			// Even without an answer: it may be reserved.
			for _, i := range g.charges {
				d.res.parts[i].place = remote
			}
		}
		switch {
		case err != nil && ctx.Err() != nil:
			return false, false, ctx.Err()
		case connect.CodeOf(err) == connect.CodeInvalidArgument:
			return false, false, fmt.Errorf("limit: %w", err)
		case err != nil || len(resp.GetStates()) != len(g.charges):
			if !d.degraded(g) {
				return false, false, nil
			}
			continue
		}
		if n := resp.GetHolders(); n > 0 {
			d.client.holders.Store(int64(n))
		}
		back := d.heard(g, resp)
		if !resp.GetGranted() {
			for _, i := range g.charges {
				d.res.parts[i].place = nowhere
			}
			d.refused(g, resp)
			return false, back && d.returnShare(ctx, g.name), nil
		}
		d.res.at = cmp.Or(resp.GetReservedUnixMicros(), d.res.at)
		d.client.remember(g.name, d.res)
	}
	return true, false, nil
}

// heard notes the states of an answer. It returns whether a charge was refused
// of whose bucket this process holds a free share.
func (d *decision) heard(g group, resp *limiterv1.ReserveResponse) (back bool) {
	for j, i := range g.charges {
		st, b := resp.States[j], d.request.Charges[i].Bucket
		d.answer.States[i] = st
		if b.GetConcurrency() != nil {
			continue
		}
		o := d.client.org(g.name)
		if p := o.pool(b); p != nil {
			if p.heard(st, d.now) {
				o.need(p)
				d.client.kick(o, false)
			}
			if st.GetRefused() && p.hush(d.now) {
				o.need(p)
				back = true
			}
		}
	}
	return back
}

func (d *decision) refused(g group, resp *limiterv1.ReserveResponse) {
	d.answer.Reason = Exhausted
	if resp.GetReason() == limiterv1.ReserveResponse_REASON_NEVER {
		d.answer.Reason = Never
	}
	if resp.Refused != nil && int(resp.GetRefused()) < len(g.charges) {
		d.answer.Refused = g.charges[resp.GetRefused()]
	}
	d.answer.RetryAfter = resp.GetRetryAfter().AsDuration()
}

// returnShare returns free shares of an organisation now.
func (d *decision) returnShare(ctx context.Context, name string) bool {
	o := d.client.org(name)
	if o == nil || ctx.Err() != nil {
		return false
	}
	ctx, cancel := context.WithTimeout(ctx, d.client.s.Timeout)
	defer cancel()
	d.client.sync(ctx, o, false, d.client.s.LeaseTTL)
	return ctx.Err() == nil
}

// remember has a reservation extended until it ends.
func (c *Client) remember(name string, r *Reservation) {
	if o := c.org(name); o != nil {
		o.mu.Lock()
		defer o.mu.Unlock()
		o.running[r.request.ID] = r
	}
}

// degraded decides on charges without the limiter, as each says. The charges
// may be reserved at the limiter, if it was asked: their settlement, which it
// gets later, is right in either case.
func (d *decision) degraded(g group) bool {
	d.answer.Degraded = true
	for _, i := range g.charges {
		c := &d.request.Charges[i]
		if c.OnUnavailable == Deny && !c.Bucket.GetShadow() {
			d.answer.Reason, d.answer.Refused = Away, i
			return false
		}
		if c.OnUnavailable == Allow {
			continue
		}
		f := d.client.fallback(g.name, c.Bucket, d.now)
		if f == nil {
			continue // too many to count: let it pass
		}
		ok, wait, st := f.take(c.Amount, c.Bucket.GetShadow(), d.now)
		st.Key, st.Shadow = c.Bucket.GetKey(), c.Bucket.GetShadow()
		d.answer.States[i] = st
		if !ok {
			d.answer.Reason, d.answer.Refused, d.answer.RetryAfter = Exhausted, i, wait
			if wait == 0 {
				d.answer.Reason = Never
			}
			return false
		}
		d.res.parts[i].fallback = f
	}
	return true
}

// fallback of a bucket while the limiter is away.
func (c *Client) fallback(name string, b *limiterv1.Bucket, now time.Time) *fallback {
	key := name + "\x00" + b.GetKey()
	c.mu.Lock()
	defer c.mu.Unlock()
	f := c.fallbacks[key]
	if f == nil && len(c.fallbacks) < maxFallbacks {
		var st *limiterv1.State
		if o := c.orgs[name]; o != nil {
			o.mu.RLock()
			if p := o.pools[b.GetKey()]; p != nil {
				st = p.last()
			}
			o.mu.RUnlock()
		}
		f = newFallback(b, st, c.replicas(), now)
		c.fallbacks[key] = f
	}
	return f
}

// last is the newest state that was heard of, nil if none was.
func (p *pool) last() *limiterv1.State {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.state
}

// tightest finds the bucket with the smallest share left.
func (d *decision) tightest() {
	for i, st := range d.answer.States {
		if st == nil || d.request.Charges[i].Bucket.GetShadow() {
			continue
		}
		if t := d.answer.Tightest; t < 0 || tighter(st, d.answer.States[t]) {
			d.answer.Tightest = i
		}
	}
}

func tighter(a, b *limiterv1.State) bool {
	if a.GetRemaining() <= 0 || b.GetRemaining() <= 0 {
		return a.GetRemaining() < b.GetRemaining()
	}
	h1, l1 := bits.Mul64(uint64(a.GetRemaining()), uint64(b.GetLimit()))
	h2, l2 := bits.Mul64(uint64(b.GetRemaining()), uint64(a.GetLimit()))
	return h1 < h2 || h1 == h2 && l1 < l2
}
