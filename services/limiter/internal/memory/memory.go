// Package memory is the store of limits for one process: the all-in-one, and
// tests. It counts what Redis counts, in the same way, and forgets it at its end.
//
// Organisations are spread over locks; an organisation is one lock, as it is one
// core in Redis. It holds at most so many things and then refuses new ones.
package memory

import (
	"context"
	"hash/maphash"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kinference/kinference/services/limiter/internal/store"
)

// DefaultMax is how many buckets, reservations and shares a store holds unless
// told otherwise: some 200 MB.
const DefaultMax = 1_000_000

// Store is a store in memory. It may be used by any number of goroutines.
type Store struct {
	clock func() int64
	max   int64
	held  atomic.Int64
	seed  maphash.Seed

	shards [64]shard

	mu      sync.Mutex
	holders queue
}

type shard struct {
	mu   sync.Mutex
	orgs map[string]*org
}

// org is an organisation. Buckets and records have a time to live, in ttl; sets
// end with their last member.
type org struct {
	buckets  map[string]*counter
	sets     map[string]*queue
	records  map[string]*record
	expiries queue
	ttl      queue
}

// counter is a bucket.
type counter struct{ used, t, credit, leased int64 }

// record is a reservation, that it is settled, or a share.
type record struct {
	settled bool
	entries []entry
	retain  time.Duration

	lease    bool
	sequence uint64
	held     int64
	bucket   string
}

type entry struct {
	set    bool
	key    string
	amount int64
}

var _ store.Store = (*Store)(nil)

// New returns a store of at most max things (0: DefaultMax). clock tells Unix
// microseconds; nil: the system's.
func New(maximum int64, clock func() int64) *Store {
	if clock == nil {
		clock = func() int64 { return time.Now().UnixMicro() }
	}
	if maximum == 0 {
		maximum = DefaultMax
	}
	return &Store{clock: clock, max: maximum, seed: maphash.MakeSeed()}
}

// Close does nothing.
func (s *Store) Close() error { return nil }

// Held is the number of things that it holds.
func (s *Store) Held() int64 { return s.held.Load() }

// view is one call on an organisation, under its lock.
type view struct {
	*org
	s   *Store
	now int64
}

// enter locks an organisation and gives back what has expired; what the call
// may add is need things.
func (s *Store) enter(name string, need int) (*view, func(), error) {
	sh := &s.shards[maphash.String(s.seed, name)%uint64(len(s.shards))]
	if s.held.Load()+int64(need) > s.max {
		s.purge()
		if s.held.Load()+int64(need) > s.max {
			return nil, nil, store.ErrFull
		}
	}
	sh.mu.Lock()
	o := sh.orgs[name]
	if o == nil {
		if sh.orgs == nil {
			sh.orgs = map[string]*org{}
		}
		o = &org{buckets: map[string]*counter{}, sets: map[string]*queue{}, records: map[string]*record{}}
		sh.orgs[name] = o
	}
	v := &view{org: o, s: s, now: s.clock()}
	v.forget(2 * store.Sweep)
	v.sweep()
	before := o.size()
	return v, func() {
		s.held.Add(int64(o.size() - before))
		if o.size() == 0 {
			delete(sh.orgs, name)
		}
		sh.mu.Unlock()
	}, nil
}

func (o *org) size() int { return len(o.buckets) + len(o.sets) + len(o.records) }

// purge forgets all that has outlived its time.
func (s *Store) purge() {
	for i := range s.shards {
		sh := &s.shards[i]
		sh.mu.Lock()
		for name, o := range sh.orgs {
			v := &view{org: o, s: s, now: s.clock()}
			v.forget(o.size())
			if o.size() == 0 {
				delete(sh.orgs, name)
			}
		}
		sh.mu.Unlock()
	}
}

// forget drops up to n things whose time to live is over.
func (v *view) forget(n int) {
	before := v.size()
	for range n {
		name, ok := v.ttl.due(v.now)
		if !ok {
			break
		}
		if key, ok := strings.CutPrefix(name, "b:"); ok {
			delete(v.buckets, key)
		} else {
			delete(v.records, name)
			v.expiries.remove(name)
		}
	}
	v.s.held.Add(int64(v.size() - before))
}

func (v *view) live(name string, d time.Duration) {
	v.ttl.set(name, v.now+d.Microseconds())
}

// sweep gives back what has expired, some of it.
func (v *view) sweep() {
	before := v.size()
	for range store.Sweep {
		name, ok := v.expiries.due(v.now)
		if !ok {
			break
		}
		r := v.records[name]
		switch {
		case r == nil:
		case r.lease:
			v.giveBack(r.bucket, r.held, r.held)
			r.held = 0
		case !r.settled:
			v.release(r, name[2:])
			delete(v.records, name)
			v.ttl.remove(name)
		}
	}
	v.s.held.Add(int64(v.size() - before))
}

func (v *view) giveBack(key string, amount, leased int64) {
	if c := v.buckets[key]; c != nil {
		c.used = max(c.used-amount, 0)
		c.leased = max(c.leased-leased, 0)
	}
}

func (v *view) release(r *record, id string) {
	for _, e := range r.entries {
		if e.set {
			v.leave(e.key, id)
		} else {
			v.giveBack(e.key, e.amount, 0)
		}
	}
}

func (v *view) leave(key, id string) {
	q := v.sets[key]
	if q == nil {
		return
	}
	q.remove(id)
	if len(q.at) == 0 {
		delete(v.sets, key)
	}
}

// state of a bucket now; nothing changes but that expired members leave sets.
func (v *view) state(b *store.Bucket) (store.State, int64) {
	if !b.Set {
		c := v.buckets[b.Key]
		if c == nil {
			return store.State{}, v.now
		}
		used, credit, t := b.Decay(c.used, c.credit, c.t, v.now)
		return store.State{Used: used, Credit: credit, Leased: c.leased}, t
	}
	q := v.sets[b.Key]
	if q == nil {
		return store.State{}, 0
	}
	for {
		if _, ok := q.due(v.now); !ok {
			break
		}
	}
	first, ok := q.first()
	if !ok {
		delete(v.sets, b.Key)
		return store.State{}, 0
	}
	return store.State{Used: int64(len(q.at)), First: first.at}, 0
}

func (v *view) save(b *store.Bucket, s *store.State, t int64) {
	if s.Used == 0 {
		s.Credit = 0
	}
	c := v.buckets[b.Key]
	if c == nil {
		c = new(counter)
		v.buckets[b.Key] = c
	}
	*c = counter{s.Used, t, s.Credit, s.Leased}
	v.live("b:"+b.Key, b.Lifetime(time.UnixMicro(v.now))+61*time.Second)
}

// Reserve charges all or nothing.
func (s *Store) Reserve(_ context.Context, name, id string, ttl time.Duration, charges []store.Charge) (store.Result, error) {
	v, leave, err := s.enter(name, len(charges)+1)
	if err != nil {
		return store.Result{}, err
	}
	defer leave()
	r := store.Result{Now: v.now, Outcome: store.Granted}
	times := make([]int64, len(charges))
	for i := range charges {
		c := &charges[i]
		st, t := v.state(&c.Bucket)
		times[i] = t
		r.States = append(r.States, st)
	}
	if rec := v.records["r:"+id]; rec != nil {
		r.Outcome = store.Repeated
		if rec.settled {
			r.Outcome = store.Settled
		}
		return r, nil
	}
	for i := range charges {
		c, st := &charges[i], &r.States[i]
		st.Refused = c.Capacity-st.Used < store.Need(c.Amount)
		if st.Refused && !c.Shadow {
			r.Outcome = store.Refused
		}
	}
	if r.Outcome == store.Refused {
		return r, nil
	}
	rec := &record{retain: store.Retention(time.UnixMicro(v.now), each(charges))}
	expires := v.now + ttl.Microseconds()
	for i := range charges {
		c, st := &charges[i], &r.States[i]
		if st.Refused {
			continue
		}
		rec.entries = append(rec.entries, entry{c.Set, c.Key, c.Amount})
		switch {
		case c.Set:
			q := v.sets[c.Key]
			if q == nil {
				q = new(queue)
				v.sets[c.Key] = q
			}
			q.set(id, expires)
			first, _ := q.first()
			st.Used, st.First = int64(len(q.at)), first.at
		case c.Amount > 0:
			st.Used += c.Amount
			v.save(&c.Bucket, st, times[i])
		}
	}
	v.records["r:"+id] = rec
	v.expiries.set("r:"+id, expires)
	v.live("r:"+id, ttl+rec.retain)
	return r, nil
}

func each(cs []store.Charge) func(func(*store.Bucket) bool) {
	return func(yield func(*store.Bucket) bool) {
		for i := range cs {
			if !yield(&cs[i].Bucket) {
				return
			}
		}
	}
}

// settle remembers that a request is settled.
func (v *view) settle(id string) {
	v.records["r:"+id] = &record{settled: true}
	v.expiries.remove("r:" + id)
	v.live("r:"+id, store.Remembered)
}

// Commit settles.
func (s *Store) Commit(_ context.Context, name, id string, charges []store.Charge) (store.Result, error) {
	v, leave, err := s.enter(name, len(charges)+1)
	if err != nil {
		return store.Result{}, err
	}
	defer leave()
	r := store.Result{Now: v.now, Outcome: store.Granted}
	rec := v.records["r:"+id]
	reserved := map[string]entry{}
	if rec != nil {
		for _, e := range rec.entries {
			reserved[e.kind()+e.key] = e
		}
	}
	for i := range charges {
		c := &charges[i]
		st, t := v.state(&c.Bucket)
		e := entry{set: c.Set, key: c.Key}
		was, had := reserved[e.kind()+e.key]
		switch {
		case rec != nil && rec.settled:
		case c.Set:
			v.leave(c.Key, id)
			st, _ = v.state(&c.Bucket)
		case had || rec == nil || !c.Shadow:
			// A shadow charge that did not fit stays uncharged.
			if delta := c.Amount - was.amount; delta != 0 {
				st.Used = max(min(st.Used+delta, c.Capacity+c.MaxDebt), 0)
				v.save(&c.Bucket, &st, t)
			}
		}
		delete(reserved, e.kind()+e.key)
		r.States = append(r.States, st)
	}
	if rec != nil && rec.settled {
		r.Outcome = store.Settled
		return r, nil
	}
	for _, e := range reserved {
		v.release(&record{entries: []entry{e}}, id)
	}
	v.settle(id)
	return r, nil
}

func (e entry) kind() string {
	if e.set {
		return "c:"
	}
	return "b:"
}

// Release gives all back.
func (s *Store) Release(_ context.Context, name, id string) (store.Result, error) {
	v, leave, err := s.enter(name, 1)
	if err != nil {
		return store.Result{}, err
	}
	r := store.Result{Now: v.now}
	defer leave()
	rec := v.records["r:"+id]
	had := rec != nil && !rec.settled
	if had {
		v.release(rec, id)
		r.Outcome = store.Granted
	}
	if rec == nil || had {
		v.settle(id)
	}
	return r, nil
}

// Extend prolongs reservations.
func (s *Store) Extend(_ context.Context, name string, ids []string, ttl time.Duration) ([]string, store.Result, error) {
	v, leave, err := s.enter(name, 0)
	if err != nil {
		return nil, store.Result{}, err
	}
	defer leave()
	var unknown []string
	expires := v.now + ttl.Microseconds()
	for _, id := range ids {
		rec := v.records["r:"+id]
		if at, ok := v.expiries.at["r:"+id]; rec == nil || rec.settled || !ok || at <= v.now {
			unknown = append(unknown, id)
			continue
		}
		v.expiries.set("r:"+id, expires)
		v.live("r:"+id, ttl+rec.retain)
		for _, e := range rec.entries {
			if q := v.sets[e.key]; e.set && q != nil {
				if _, in := q.at[id]; in {
					q.set(id, expires)
				}
			}
		}
	}
	return unknown, store.Result{Now: v.now, Outcome: store.Granted}, nil
}

// Read looks at buckets.
func (s *Store) Read(_ context.Context, name string, buckets []store.Bucket) (store.Result, error) {
	v, leave, err := s.enter(name, 0)
	if err != nil {
		return store.Result{}, err
	}
	defer leave()
	r := store.Result{Now: v.now, Outcome: store.Granted}
	for i := range buckets {
		st, _ := v.state(&buckets[i])
		r.States = append(r.States, st)
	}
	return r, nil
}

// Lease changes shares.
func (s *Store) Lease(_ context.Context, name, holder string, ttl time.Duration, shares []store.Share) ([]store.Grant, store.Result, error) {
	v, leave, err := s.enter(name, 2*len(shares))
	if err != nil {
		return nil, store.Result{}, err
	}
	defer leave()
	var retain time.Duration
	for i := range shares {
		retain = max(retain, time.Minute, shares[i].Lifetime(time.UnixMicro(v.now)))
	}
	grants := make([]store.Grant, len(shares))
	for i := range shares {
		grants[i] = v.share(holder, ttl, retain, &shares[i])
	}
	return grants, store.Result{Now: v.now, Outcome: store.Granted}, nil
}

func (v *view) share(holder string, ttl, retain time.Duration, sh *store.Share) store.Grant {
	st, t := v.state(&sh.Bucket)
	low := max(sh.Capacity/store.LowDivisor, 1)
	name := "l:" + holder + "/" + sh.Key
	rec := v.records[name]
	if rec != nil && sh.Sequence <= rec.sequence {
		return store.Grant{State: st, Held: rec.held, Synchronous: sh.Capacity-st.Used < low}
	}
	var held int64
	if rec != nil {
		held = rec.held
	}
	if sh.Spent > held {
		st.Used = min(st.Used+sh.Spent-held, sh.Capacity+sh.MaxDebt)
		st.Leased = max(st.Leased-held, 0)
		held = 0
	} else {
		st.Leased = max(st.Leased-sh.Spent, 0)
		held -= sh.Spent
	}
	room := sh.Capacity - st.Used
	g := store.Grant{Synchronous: room < low}
	change := sh.Want - held
	if change > 0 {
		change = max(min(change, room/store.LeaseDivisor, sh.MaxLeased-st.Leased), 0)
		if g.Synchronous {
			change = 0
		}
	}
	st.Used = max(st.Used+change, 0)
	st.Leased = max(st.Leased+change, 0)
	g.Held = held + change
	v.save(&sh.Bucket, &st, t)
	g.State = st
	v.records[name] = &record{lease: true, sequence: sh.Sequence, held: g.Held, bucket: sh.Key}
	v.live(name, ttl+retain)
	if g.Held > 0 {
		v.expiries.set(name, v.now+ttl.Microseconds())
	} else {
		v.expiries.remove(name)
	}
	return g
}

// Holders counts processes.
func (s *Store) Holders(_ context.Context, heard []string) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.clock()
	for _, h := range heard {
		s.holders.set(strings.Clone(h), now+store.HeardFor.Microseconds())
	}
	for {
		if _, ok := s.holders.due(now); !ok {
			return len(s.holders.at), nil
		}
	}
}
