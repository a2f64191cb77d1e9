package limit

import (
	"sync/atomic"
	"time"

	limiterv1 "github.com/kinference/kinference/proto/gen/kinference/limiter/v1"
)

// place is where a charge was reserved.
type place uint8

const (
	nowhere place = iota // not reserved: passed while the limiter is away
	leased               // in a pool of this process
	remote               // at the limiter, or perhaps: its answer is missing
)

// part is where one charge of a reservation is.
type part struct {
	place
	pool *pool
	// fallback counts it while the limiter is away, beside its place.
	fallback *fallback
}

// Reservation is a granted request. Its methods may be called by any goroutine;
// the first call of Commit or Release counts, none blocks.
type Reservation struct {
	client  *Client
	request Request
	parts   []part
	at      int64 // Unix microseconds, limiter's clock if it answered
	ended   atomic.Bool
}

// maxAmount is what the limiter takes.
const maxAmount = 1 << 51

// Commit settles with what was used, by charge. Fewer amounts than charges
// leave the others as they were estimated. Amounts for concurrency are ignored.
func (r *Reservation) Commit(amounts []int64) {
	if !r.ended.CompareAndSwap(false, true) {
		return
	}
	requests := map[string]*limiterv1.CommitRequest{}
	for i := range r.parts {
		c, p := &r.request.Charges[i], &r.parts[i]
		amount := c.Amount
		if i < len(amounts) && c.Bucket.GetConcurrency() == nil {
			amount = min(max(amounts[i], 0), maxAmount)
		}
		if p.fallback != nil {
			p.fallback.settle(c.Amount, amount)
		}
		if p.place == leased {
			p.pool.settle(c.Amount, amount)
			continue
		}
		org := r.request.organisation(i)
		req := requests[org]
		if req == nil {
			req = &limiterv1.CommitRequest{Organisation: org, RequestId: r.request.ID, ReservedUnixMicros: r.at}
			requests[org] = req
		}
		if p.place != remote && stale(c.Bucket, r.at) {
			continue
		}
		req.Charges = append(req.Charges, &limiterv1.Charge{Bucket: c.Bucket, Amount: amount})
	}
	for org, req := range requests {
		r.client.forget(org, r)
		if len(req.Charges) == 0 {
			continue
		}
		r.client.settle(&settlement{Organisation: org, ID: r.request.ID, commit: req})
	}
}

// stale reports that what was used of b then, without a reservation, has
// refilled since.
func stale(b *limiterv1.Bucket, at int64) bool {
	w := b.GetWindow()
	return w != nil && w.GetLimit() > 0 && time.Since(time.UnixMicro(at)) > w.GetPeriod().AsDuration()
}

// Release gives everything back: the request never reached an engine.
func (r *Reservation) Release() {
	if r.ended.CompareAndSwap(false, true) {
		r.undo()
	}
}

// undo gives all parts back.
func (r *Reservation) undo() {
	orgs := map[string]bool{}
	for i := range r.parts {
		c, p := &r.request.Charges[i], &r.parts[i]
		if p.fallback != nil {
			p.fallback.settle(c.Amount, 0)
		}
		switch p.place {
		case leased:
			p.pool.settle(c.Amount, 0)
		case remote:
			orgs[r.request.organisation(i)] = true
		}
	}
	for org := range orgs {
		r.client.forget(org, r)
		r.client.settle(&settlement{Organisation: org, ID: r.request.ID})
	}
}
