package limit

import (
	"sync"
	"time"

	limiterv1 "github.com/kinference/kinference/proto/gen/kinference/limiter/v1"
)

// pool is the share of one bucket that this process holds.
//
//	free = held - inflight - spent
//
// held is what the limiter says is held, of which inflight is reserved by
// requests that run, and spent was used by requests that ended since the last
// report. All are part of what the limiter counts as used: a share that expires
// frees the requests in flight, too.
type pool struct {
	key string

	mu     sync.Mutex
	bucket *limiterv1.Bucket // newest specification
	state  *limiterv1.State  // newest state that was heard of
	gone   bool              // forgotten by the client: not to be used any more

	held, inflight, spent int64
	expires               time.Time // the share may not be spent later

	sequence uint64
	pending  *limiterv1.Share // was sent; until an answer is there, it is sent again
	asked    time.Time        // when it was sent first
	renewed  time.Time        // last answer

	target    int64     // what should be free
	enough    int64     // with less, more is asked for
	taken     int64     // since the last answer
	uses      [2]int    // in this second and the one before
	second    time.Time // begin of this one
	used      time.Time // last time
	quietTill time.Time // the bucket is nearly empty: no share until then
}

const (
	// hotUses within two seconds make a bucket worth a lease.
	hotUses = 3
	// quiet is how long a bucket that gives no shares is left alone.
	quiet = time.Second
	// gap is between two requests for more of one bucket.
	gap = 5 * time.Millisecond
	// firstTarget is how many requests like the first one a lease is for.
	firstTarget = 4
)

func capacity(b *limiterv1.Bucket) int64 {
	switch {
	case b.GetWindow() != nil && b.GetWindow().Burst != nil:
		return b.GetWindow().GetBurst()
	case b.GetWindow() != nil:
		return b.GetWindow().GetLimit()
	case b.GetCalendar() != nil:
		return b.GetCalendar().GetLimit()
	}
	return b.GetConcurrency().GetLimit()
}

// leasable reports whether a bucket may be spent from a share.
func leasable(b *limiterv1.Bucket) bool {
	return b.GetMaxLeased() > 0 && b.GetConcurrency() == nil && !b.GetShadow()
}

// same reports whether two specifications of a key mean the same limit.
func same(a, b *limiterv1.Bucket) bool {
	return a == b || capacity(a) == capacity(b) && a.GetWindow().GetLimit() == b.GetWindow().GetLimit() &&
		a.GetWindow().GetPeriod().AsDuration() == b.GetWindow().GetPeriod().AsDuration() &&
		a.GetCalendar().GetPeriod() == b.GetCalendar().GetPeriod() && a.GetMaxLeased() == b.GetMaxLeased()
}

func (p *pool) free() int64 { return p.held - p.inflight - p.spent }

// short reports whether more should be taken.
func (p *pool) short(now time.Time) bool {
	return p.free() < max(p.enough, 1) || !now.Before(p.expires)
}

func (p *pool) hot() bool { return p.uses[0]+p.uses[1] >= hotUses }

// take reserves an amount of the share. If there is not enough, nothing is taken
// and the bucket must be asked. sync says that the share should change.
func (p *pool) take(b *limiterv1.Bucket, amount int64, now time.Time) (st *limiterv1.State, ok, sync bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.gone {
		return nil, false, false
	}
	for now.Sub(p.second) >= time.Second {
		p.uses[1], p.uses[0] = p.uses[0], 0
		if p.second = p.second.Add(time.Second); now.Sub(p.second) >= time.Second {
			p.second = now
		}
	}
	p.uses[0]++
	p.used = now
	need := max(amount, 1)
	p.taken += need
	if !same(p.bucket, b) {
		p.expires = time.Time{} // of another limit: renewed first
	}
	p.bucket = b
	enough := now.Before(p.expires) && p.free() >= need
	if !enough && p.hot() {
		p.target = min(max(2*p.target, firstTarget*need), b.GetMaxLeased())
	}
	if enough {
		p.inflight += amount
		st = &limiterv1.State{Key: p.state.GetKey(), Limit: p.state.GetLimit(), Remaining: p.state.GetRemaining() + p.free(), Reset_: p.state.GetReset_(), Leased: p.state.GetLeased()}
	}
	return st, enough, p.hot() && now.After(p.quietTill) && p.short(now)
}

// settle ends a request that took reserved and used amount.
func (p *pool) settle(reserved, amount int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.inflight -= reserved
	p.spent += amount
}

// heard notes a state that the limiter told with a reservation, and reports
// whether the free part of the share should go back, because little is left.
func (p *pool) heard(st *limiterv1.State, now time.Time) (giveBack bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.state = st
	p.used = now
	if st.GetRemaining() < st.GetLimit()/lowDivisor {
		p.quietTill = now.Add(quiet)
	}
	return st.GetRemaining() < st.GetLimit()/lowDivisor && p.free() > 0
}

// lowDivisor is the limiter's: with less than this part left, a bucket gives no
// shares.
const lowDivisor = 20

// hush makes the pool return what is free of its share, and reports whether
// that is anything.
func (p *pool) hush(now time.Time) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.quietTill = now.Add(quiet)
	return p.free() > 0
}

// next is the change of the share to report now, nil if there is none. idle is
// the time after which an unused share goes back; 0: at once.
func (p *pool) next(now time.Time, ttl, idle time.Duration) *limiterv1.Share {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.pending != nil {
		return p.pending
	}
	wanted := p.inflight + p.target
	if idle == 0 || !p.hot() || now.Sub(p.used) >= idle || now.Before(p.quietTill) {
		wanted = p.inflight
	}
	wanted = min(wanted, p.bucket.GetMaxLeased())
	free := p.free()
	due := now.Sub(p.renewed) >= ttl/3
	switch {
	case idle == 0:
		// The end: nothing is taken any more.
		if wanted = min(wanted, p.held); free <= 0 && p.spent == 0 {
			return nil
		}
	case due && (p.held > 0 || p.spent > 0):
	case wanted > p.inflight && p.short(now) && now.Sub(p.renewed) >= gap:
	case wanted == p.inflight && free > 0:
	default:
		return nil
	}
	if due && p.taken < p.target/4 {
		p.target /= 2
	}
	p.sequence++
	p.asked = now
	p.pending = &limiterv1.Share{Bucket: p.bucket, Sequence: p.sequence, Spent: max(min(p.spent, maxAmount), 0), Want: max(wanted, 0)}
	return p.pending
}

// answered takes the answer to share.
func (p *pool) answered(share *limiterv1.Share, g *limiterv1.Grant, now time.Time, ttl time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.pending != share {
		return
	}
	p.pending = nil
	p.spent -= share.GetSpent()
	p.held = g.GetHeld()
	p.expires = p.asked.Add(ttl) // before the limiter's, whenever it answered
	p.enough = min(p.target, p.free()) / 2
	p.renewed = now
	p.taken = 0
	if g.GetState() != nil {
		p.state = g.GetState()
	}
	if g.GetSynchronous() {
		p.quietTill = now.Add(quiet)
	}
}

// retire reports whether the pool can be forgotten, and marks it.
func (p *pool) retire(now time.Time, idle time.Duration) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.gone = p.gone || p.held == 0 && p.inflight == 0 && p.spent == 0 && p.pending == nil && now.Sub(p.used) > idle
	return p.gone
}
