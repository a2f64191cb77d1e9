package storetest

import (
	"cmp"
	"context"
	"fmt"
	"math/big"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	gocmp "github.com/google/go-cmp/cmp"

	"github.com/kinference/kinference/services/limiter/internal/store"
)

// model is a store of one organisation as plain as can be: fractions, lists and
// loops. It does what it is told at the time it is told.
type model struct {
	used    map[string]*big.Rat // of buckets, at times
	times   map[string]int64
	leased  map[string]int64
	members map[string]map[string]int64 // of sets: request -> expiry
	records map[string]*reservation
	shares  map[string]*share
}

type reservation struct {
	settled bool
	expires int64
	charges []store.Charge
}

type share struct {
	sequence uint64
	held     int64
	key      string
	expires  int64 // 0: nothing to expire
}

func newModel() *model {
	return &model{used: map[string]*big.Rat{}, times: map[string]int64{}, leased: map[string]int64{},
		members: map[string]map[string]int64{}, records: map[string]*reservation{}, shares: map[string]*share{}}
}

func integer(n int64) *big.Rat { return new(big.Rat).SetInt64(n) }

// advance lets b refill until now.
func (m *model) advance(b *store.Bucket, now int64) {
	u := m.used[b.Key]
	if u == nil {
		u = new(big.Rat)
		m.used[b.Key] = u
	}
	then, known := m.times[b.Key]
	if known && now > then && b.Rate > 0 {
		gain := new(big.Rat).SetFrac(new(big.Int).Mul(big.NewInt(now-then), big.NewInt(b.Rate)), big.NewInt(b.Period.Microseconds()))
		u.Sub(u, gain)
	}
	if u.Sign() < 0 {
		u.SetInt64(0)
	}
	m.times[b.Key] = max(then, now)
}

// add changes what is used, between 0 and most.
func (m *model) add(key string, n, most int64) {
	u := m.used[key]
	if u == nil {
		return
	}
	// Whole units are capped: the credit towards the next one stays.
	whole := ceil(u)
	u.Add(u, integer(min(whole+n, most)-whole))
	if u.Sign() < 0 || ceil(u) <= 0 {
		u.SetInt64(0)
	}
}

func ceil(u *big.Rat) int64 {
	q, r := new(big.Int).QuoRem(u.Num(), u.Denom(), new(big.Int))
	if r.Sign() > 0 {
		return q.Int64() + 1
	}
	return q.Int64()
}

const unbounded = 1 << 60

func (m *model) state(b *store.Bucket, now int64) store.State {
	if b.Set {
		s := store.State{}
		for id, expires := range m.members[b.Key] {
			if expires <= now {
				delete(m.members[b.Key], id)
				continue
			}
			s.Used++
			if s.First == 0 || expires < s.First {
				s.First = expires
			}
		}
		return s
	}
	m.advance(b, now)
	u := m.used[b.Key]
	whole := ceil(u)
	part := new(big.Rat).Mul(new(big.Rat).Sub(integer(whole), u), integer(max(b.Period.Microseconds(), 1)))
	return store.State{Used: whole, Credit: part.Num().Int64(), Leased: m.leased[b.Key]}
}

func (m *model) giveBack(cs []store.Charge, id string) {
	for _, c := range cs {
		if c.Set {
			delete(m.members[c.Key], id)
		} else {
			m.add(c.Key, -c.Amount, unbounded)
		}
	}
}

func (m *model) sweep(now int64) {
	type due struct {
		at   int64
		name string
	}
	var list []due
	for id, r := range m.records {
		if !r.settled && r.expires <= now {
			list = append(list, due{r.expires, "r:" + id})
		}
	}
	for name, s := range m.shares {
		if s.expires != 0 && s.expires <= now {
			list = append(list, due{s.expires, "l:" + name})
		}
	}
	slices.SortFunc(list, func(a, b due) int { return cmp.Or(cmp.Compare(a.at, b.at), strings.Compare(a.name, b.name)) })
	for _, d := range list[:min(len(list), store.Sweep)] {
		name := d.name[2:]
		if d.name[0] == 'r' {
			m.giveBack(m.records[name].charges, name)
			delete(m.records, name)
			continue
		}
		s := m.shares[name]
		m.add(s.key, -s.held, unbounded)
		m.leased[s.key] = max(m.leased[s.key]-s.held, 0)
		s.held, s.expires = 0, 0
	}
}

func (m *model) reserve(now int64, id string, ttl time.Duration, cs []store.Charge) (r store.Result) {
	m.sweep(now)
	r = store.Result{Now: now, Outcome: store.Granted}
	for i := range cs {
		r.States = append(r.States, m.state(&cs[i].Bucket, now))
	}
	if rec := m.records[id]; rec != nil {
		r.Outcome = store.Repeated
		if rec.settled {
			r.Outcome = store.Settled
		}
		return r
	}
	for i, c := range cs {
		if r.States[i].Used+max(c.Amount, 1) > c.Capacity {
			r.States[i].Refused = true
			if !c.Shadow {
				r.Outcome = store.Refused
			}
		}
	}
	if r.Outcome == store.Refused {
		return r
	}
	rec := &reservation{expires: now + ttl.Microseconds()}
	m.records[id] = rec
	for i, c := range cs {
		if r.States[i].Refused {
			continue
		}
		rec.charges = append(rec.charges, c)
		if c.Set {
			if m.members[c.Key] == nil {
				m.members[c.Key] = map[string]int64{}
			}
			m.members[c.Key][id] = rec.expires
		} else {
			m.add(c.Key, c.Amount, unbounded)
		}
		r.States[i] = m.state(&cs[i].Bucket, now)
	}
	return r
}

func (m *model) commit(now int64, id string, cs []store.Charge) (r store.Result) {
	m.sweep(now)
	r = store.Result{Now: now, Outcome: store.Granted}
	rec := m.records[id]
	if rec != nil && rec.settled {
		r.Outcome = store.Settled
	}
	var left []store.Charge
	if rec != nil && !rec.settled {
		left = slices.Clone(rec.charges)
	}
	for i, c := range cs {
		m.state(&cs[i].Bucket, now)
		if r.Outcome == store.Granted {
			at := slices.IndexFunc(left, func(l store.Charge) bool { return l.Key == c.Key && l.Set == c.Set })
			var was int64
			if at >= 0 {
				was = left[at].Amount
				left = slices.Delete(left, at, at+1)
			}
			switch {
			case c.Set:
				delete(m.members[c.Key], id)
			case at >= 0 || rec == nil || !c.Shadow:
				if c.Amount != was {
					m.add(c.Key, c.Amount-was, c.Capacity+c.MaxDebt)
				}
			}
		}
		r.States = append(r.States, m.state(&cs[i].Bucket, now))
	}
	if r.Outcome == store.Granted {
		m.giveBack(left, id)
		m.records[id] = &reservation{settled: true}
	}
	return r
}

func (m *model) release(now int64, id string) store.Result {
	m.sweep(now)
	rec := m.records[id]
	r := store.Result{Now: now}
	if rec != nil && !rec.settled {
		m.giveBack(rec.charges, id)
		r.Outcome = store.Granted
	}
	m.records[id] = &reservation{settled: true}
	return r
}

func (m *model) extend(now int64, ids []string, ttl time.Duration) (unknown []string) {
	m.sweep(now)
	for _, id := range ids {
		rec := m.records[id]
		if rec == nil || rec.settled || rec.expires <= now {
			unknown = append(unknown, id)
			continue
		}
		rec.expires = now + ttl.Microseconds()
		for _, c := range rec.charges {
			if _, in := m.members[c.Key][id]; c.Set && in {
				m.members[c.Key][id] = rec.expires
			}
		}
	}
	return unknown
}

func (m *model) lease(now int64, holder string, ttl time.Duration, sh store.Share) store.Grant {
	m.sweep(now)
	b := &sh.Bucket
	low := max(b.Capacity/store.LowDivisor, 1)
	st := m.state(b, now)
	s := m.shares[holder+"/"+b.Key]
	if s == nil {
		s = &share{key: b.Key}
		m.shares[holder+"/"+b.Key] = s
	} else if sh.Sequence <= s.sequence {
		return store.Grant{State: st, Held: s.held, Synchronous: b.Capacity-st.Used < low}
	}
	spent := min(sh.Spent, s.held)
	if sh.Spent > s.held {
		m.add(b.Key, sh.Spent-s.held, b.Capacity+b.MaxDebt)
	}
	s.held -= spent
	m.leased[b.Key] = max(m.leased[b.Key]-spent, 0)
	room := b.Capacity - ceil(m.used[b.Key])
	g := store.Grant{Synchronous: room < low}
	change := sh.Want - s.held
	if change > 0 {
		change = max(0, min(change, room/store.LeaseDivisor, b.MaxLeased-m.leased[b.Key]))
		if g.Synchronous {
			change = 0
		}
	}
	m.add(b.Key, change, unbounded)
	m.leased[b.Key] = max(m.leased[b.Key]+change, 0)
	s.held += change
	s.sequence = sh.Sequence
	s.expires = 0
	if s.held > 0 {
		s.expires = now + ttl.Microseconds()
	}
	g.Held, g.State = s.held, m.state(b, now)
	return g
}

// Aged makes a bucket look as if it had last been touched so many microseconds
// earlier.
type Aged func(org, key string, by int64)

// RunModel makes n random calls, the same for the same seed, and compares every
// number of each answer with the model's. age may be nil. between is called
// before each.
func RunModel(t *testing.T, s store.Store, seed uint64, n int, age Aged, between func(*rand.Rand)) {
	t.Helper()
	r := rand.New(rand.NewPCG(seed, 0))
	m := newModel()
	tester := &tester{t, s, org(), context.Background()}
	buckets := randomBuckets(r)
	sequences := map[string]uint64{}
	for i := range n {
		between(r)
		at := func(what string) string { return fmt.Sprintf("seed %d, call %d: %s", seed, i, what) }
		id := fmt.Sprint("request ", max(0, i/5-r.IntN(6))) // so that calls meet
		cs := randomCharges(r, buckets)
		ttl := time.Duration(r.Int64N(20_000)+1) * time.Microsecond
		if r.IntN(3) == 0 {
			ttl = time.Hour
		}
		switch op := r.IntN(20); {
		case op < 8:
			got := tester.reserveFor(ttl, id, cs...)
			same(t, at("reserve"), got, m.reserve(got.Now, id, ttl, cs))
		case op < 12:
			for j := range cs {
				if !cs[j].Set {
					cs[j].Amount *= r.Int64N(3)
				}
			}
			got, err := s.Commit(tester.ctx, tester.org, id, cs)
			fail(t, err)
			same(t, at("commit"), got, m.commit(got.Now, id, cs))
		case op < 14:
			got, err := s.Release(tester.ctx, tester.org, id)
			fail(t, err)
			same(t, at("release"), got, m.release(got.Now, id))
		case op < 15:
			ids := []string{id, "request 0", "none"}
			unknown, got, err := s.Extend(tester.ctx, tester.org, ids, ttl)
			fail(t, err)
			same(t, at("extend"), unknown, m.extend(got.Now, ids, ttl))
		case op < 16 && age != nil:
			b := &buckets[r.IntN(len(buckets))]
			by := r.Int64N(1 << r.IntN(40))
			if _, known := m.times[b.Key]; known && !b.Set {
				age(tester.org, b.Key, by)
				m.times[b.Key] -= by
			}
		case op < 19:
			b := buckets[r.IntN(len(buckets))]
			if b.Set {
				continue
			}
			holder := fmt.Sprint("h", r.IntN(2))
			if r.IntN(8) > 0 {
				sequences[holder+b.Key]++
			}
			sh := store.Share{Bucket: b, Sequence: sequences[holder+b.Key], Spent: r.Int64N(b.Capacity/20 + 1), Want: r.Int64N(b.Capacity/5 + 1)}
			grants, got, err := s.Lease(tester.ctx, tester.org, holder, ttl, []store.Share{sh})
			fail(t, err)
			same(t, at("lease"), grants[0], m.lease(got.Now, holder, ttl, sh))
		default:
			got, err := s.Read(tester.ctx, tester.org, buckets)
			fail(t, err)
			m.sweep(got.Now)
			want := store.Result{Now: got.Now, Outcome: store.Granted}
			for j := range buckets {
				want.States = append(want.States, m.state(&buckets[j], got.Now))
			}
			same(t, at("read"), got, want)
		}
	}
}

func fail(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func same(t *testing.T, at string, got, want any) {
	t.Helper()
	if diff := gocmp.Diff(want, got); diff != "" {
		t.Fatalf("%s (-want +got):\n%s", at, diff)
	}
}

// randomBuckets makes buckets of all kinds and sizes, from a few units to the
// largest, that fill within microseconds or within weeks.
func randomBuckets(r *rand.Rand) []store.Bucket {
	var out []store.Bucket
	for i := range 8 {
		b := store.Bucket{Key: fmt.Sprint("bucket", i), Shadow: r.IntN(8) == 0, Capacity: 1 + r.Int64N(1<<(1+r.IntN(51)))}
		b.MaxDebt = r.Int64N(b.Capacity + 1)
		b.MaxLeased = r.Int64N(b.Capacity + 1)
		b.Period = time.Duration(1+r.Int64N(min(1<<(10+r.IntN(32)), store.MaxPeriod.Microseconds()))) * time.Microsecond
		switch i {
		case 0, 1:
			b = store.Bucket{Key: b.Key, Set: true, Capacity: r.Int64N(6), Shadow: b.Shadow}
		case 2:
			b.Rate = 0
		case 3:
			b.Rate, b.Ends = 0, time.Now().Add(time.Hour)
		case 4:
			b.Capacity, b.MaxDebt, b.MaxLeased = 0, 0, 0
			b.Rate = 5
		default:
			b.Rate = 1 + r.Int64N(1<<(1+r.IntN(51)))
		}
		out = append(out, b)
	}
	return out
}

func randomCharges(r *rand.Rand, buckets []store.Bucket) []store.Charge {
	var out []store.Charge
	for _, i := range r.Perm(len(buckets))[:r.IntN(5)] {
		c := store.Charge{Bucket: buckets[i], Amount: 1}
		if !c.Set {
			c.Amount = r.Int64N(c.Capacity/(1+r.Int64N(10)) + 1)
		}
		out = append(out, c)
	}
	return out
}
