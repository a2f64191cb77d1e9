// Package storetest is what every store of limits must do: examples with the
// wanted numbers, and random calls compared with a plain model. The tests of the
// stores call Run.
package storetest

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/kinference/kinference/services/limiter/internal/store"
)

var organisations atomic.Int64

// org is a name that no other test of this run uses.
func org() string {
	return fmt.Sprintf("acme/%d-%d", time.Now().UnixNano(), organisations.Add(1))
}

// pot never refills, so that the clock does not matter.
func pot(key string, capacity int64) store.Bucket {
	return store.Bucket{Key: key, Capacity: capacity, MaxDebt: capacity, Period: time.Minute, MaxLeased: capacity}
}

func window(key string, capacity int64, period time.Duration) store.Bucket {
	return store.Bucket{Key: key, Capacity: capacity, Rate: capacity, Period: period, MaxDebt: capacity, MaxLeased: capacity / 5}
}

func set(key string, n int64) store.Bucket { return store.Bucket{Key: key, Set: true, Capacity: n} }

func charge(n int64, bs ...store.Bucket) []store.Charge {
	var out []store.Charge
	for _, b := range bs {
		c := store.Charge{Bucket: b, Amount: n}
		if b.Set {
			c.Amount = 1
		}
		out = append(out, c)
	}
	return out
}

// tester calls a store for one organisation and fails the test on errors.
type tester struct {
	*testing.T
	s   store.Store
	org string
	ctx context.Context
}

func (t *tester) reserveFor(ttl time.Duration, id string, cs ...store.Charge) store.Result {
	t.Helper()
	r, err := t.s.Reserve(t.ctx, t.org, id, ttl, cs)
	if err != nil {
		t.Fatalf("reserve %s: %v", id, err)
	}
	return r
}

func (t *tester) reserve(id string, cs ...store.Charge) store.Result {
	t.Helper()
	return t.reserveFor(time.Minute, id, cs...)
}

func (t *tester) want(id string, want store.Outcome, cs ...store.Charge) store.Result {
	t.Helper()
	r := t.reserve(id, cs...)
	if r.Outcome != want {
		t.Errorf("reserve %s: got outcome %d, want %d", id, r.Outcome, want)
	}
	return r
}

func (t *tester) commit(id string, want store.Outcome, cs ...store.Charge) {
	t.Helper()
	r, err := t.s.Commit(t.ctx, t.org, id, cs)
	if err != nil || r.Outcome != want {
		t.Errorf("commit %s: got outcome %d, %v, want %d", id, r.Outcome, err, want)
	}
}

func (t *tester) release(id string, want bool) {
	t.Helper()
	r, err := t.s.Release(t.ctx, t.org, id)
	if had := r.Outcome == store.Granted; err != nil || had != want {
		t.Errorf("release %s: got %v, %v, want %v", id, had, err, want)
	}
}

func (t *tester) used(want int64, b store.Bucket) {
	t.Helper()
	r, err := t.s.Read(t.ctx, t.org, []store.Bucket{b})
	if err != nil {
		t.Fatalf("read %s: %v", b.Key, err)
	}
	if got := r.States[0].Used; got != want {
		t.Errorf("%s: got %d used, want %d", b.Key, got, want)
	}
}

// until polls, for what only time brings.
func (t *tester) until(what string, ok func() bool) {
	t.Helper()
	deadline, tick := time.After(20*time.Second), time.NewTicker(5*time.Millisecond)
	defer tick.Stop()
	for !ok() {
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatalf("after 20 s: no %s", what)
		}
	}
}

// Run runs the examples against s.
func Run(t *testing.T, s store.Store) {
	for name, f := range examples {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f(&tester{t, s, org(), t.Context()})
		})
	}
}

var examples = map[string]func(*tester){
	"five concurrent requests on 100": func(t *tester) {
		var granted, n atomic.Int64
		var wg sync.WaitGroup
		for i, amount := range []int64{58, 80, 175, 175, 175} {
			wg.Go(func() {
				if t.reserve(fmt.Sprint(i), charge(amount, pot("team", 100))...).Outcome == store.Granted {
					granted.Add(amount)
					n.Add(1)
				}
			})
		}
		wg.Wait()
		if n.Load() != 1 || granted.Load() > 100 {
			t.Errorf("granted %d requests of %d tokens together, want one that fits", n.Load(), granted.Load())
		}
		t.used(granted.Load(), pot("team", 100))
	},
	"all levels or none": func(t *tester) {
		org, team, user := pot("org", 100), pot("team", 50), pot("user", 10)
		t.want("a", store.Granted, charge(10, org, team, user)...)
		r := t.want("b", store.Refused, charge(1, org, team, user)...)
		want := []bool{false, false, true}
		for i, st := range r.States {
			if st.Refused != want[i] {
				t.Errorf("level %d: got refused %v, want %v", i, st.Refused, want[i])
			}
		}
		t.used(10, org)
		t.used(10, team)
		t.want("c", store.Granted, charge(40, org, team)...)
		t.want("d", store.Refused, charge(1, org, team)...)
		t.used(50, org)
	},
	"the stricter limit holds whatever the order": func(t *tester) {
		strict, wide := pot("strict", 5), pot("wide", 100)
		t.want("a", store.Refused, charge(6, wide, strict)...)
		t.want("b", store.Refused, charge(6, strict, wide)...)
		t.used(0, wide)
	},
	"settled with the truth": func(t *tester) {
		b := pot("b", 100)
		t.want("less", store.Granted, charge(60, b)...)
		t.commit("less", store.Granted, charge(20, b)...)
		t.used(20, b)
		t.want("more", store.Granted, charge(10, b)...)
		t.commit("more", store.Granted, charge(50, b)...)
		t.used(70, b)
		t.want("nothing", store.Granted, charge(30, b)...)
		t.commit("nothing", store.Granted, charge(0, b)...)
		t.used(70, b)
	},
	"debt is kept, and capped": func(t *tester) {
		b := pot("b", 100)
		b.MaxDebt = 40
		t.want("a", store.Granted, charge(100, b)...)
		t.commit("a", store.Granted, charge(130, b)...)
		t.used(130, b)
		t.want("b", store.Refused, charge(1, b)...)
		t.want("c", store.Refused, charge(0, b)...)
		t.commit("late", store.Granted, charge(1000, b)...)
		t.used(140, b)
	},
	"nothing is charged or given back twice": func(t *tester) {
		b, c := pot("b", 100), set("c", 3)
		t.want("a", store.Granted, charge(30, b, c)...)
		t.want("a", store.Repeated, charge(30, b, c)...)
		t.used(30, b)
		t.used(1, c)
		t.commit("a", store.Granted, charge(40, b, c)...)
		t.commit("a", store.Settled, charge(40, b, c)...)
		t.release("a", false)
		t.want("a", store.Settled, charge(30, b, c)...)
		t.used(40, b)
		t.used(0, c)
		t.want("r", store.Granted, charge(30, b, c)...)
		t.release("r", true)
		t.release("r", false)
		t.commit("r", store.Settled, charge(40, b, c)...)
		t.used(40, b)
		t.used(0, c)
	},
	"a reservation after its release": func(t *tester) {
		b := pot("b", 100)
		t.release("a", false)
		t.want("a", store.Settled, charge(30, b)...)
		t.used(0, b)
	},
	"what was not reserved is committed in full": func(t *tester) {
		b, other := pot("b", 100), pot("other", 100)
		t.commit("lost", store.Granted, charge(30, b)...)
		t.used(30, b)
		t.want("a", store.Granted, charge(10, b)...)
		t.commit("a", store.Granted, charge(5, other)...)
		t.used(30, b) // named no more: given back
		t.used(5, other)
	},
	"zero denies, absent does not": func(t *tester) {
		t.want("a", store.Refused, charge(1, pot("b", 0))...)
		t.want("b", store.Refused, charge(0, pot("b", 0))...)
		t.want("c", store.Refused, charge(1, set("c", 0))...)
		t.want("d", store.Granted)
		t.commit("d", store.Granted)
	},
	"larger than the bucket": func(t *tester) {
		b := pot("b", 100)
		r := t.want("a", store.Refused, charge(101, b)...)
		if _, ever := b.Wait(r.States[0], 101, r.Now); ever {
			t.Error("it may be tried again, want never")
		}
		t.want("b", store.Granted, charge(100, b)...)
	},
	"refill": func(t *tester) {
		b := window("b", 1000, 500*time.Millisecond)
		r := t.want("a", store.Granted, charge(1000, b)...)
		start := r.Now
		r = t.want("b", store.Refused, charge(100, b)...)
		wait, ever := b.Wait(r.States[0], 100, r.Now)
		if !ever || wait <= 0 || wait > 50*time.Millisecond {
			t.Errorf("got wait %v, %v, want at most 50 ms", wait, ever)
		}
		at := r.Now + wait.Microseconds()
		t.until("refill", func() bool {
			r = t.reserve("b", charge(100, b)...)
			if r.Outcome == store.Refused && r.Now >= at {
				t.Errorf("refused %d us after the time that was told", r.Now-at)
			}
			return r.Outcome == store.Granted
		})
		if r.Now < at {
			t.Errorf("granted %d us before the time that was told", at-r.Now)
		}
		if least := start + 50_000; r.Now < least {
			t.Errorf("granted %d us before the bucket has it", least-r.Now)
		}
		t.until("full bucket", func() bool {
			r, _ := t.s.Read(t.ctx, t.org, []store.Bucket{b})
			return r.States[0].Used == 0
		})
	},
	"several windows at once": func(t *tester) {
		second, minute := window("second", 10, time.Second), window("minute", 25, 30*time.Minute)
		granted := 0
		t.until("end of the minute's tokens", func() bool {
			r := t.reserve(fmt.Sprint("r", granted), charge(5, second, minute)...)
			if r.Outcome == store.Granted {
				granted++
			}
			return r.Outcome == store.Refused && r.States[1].Refused
		})
		if granted != 5 {
			t.Errorf("granted %d requests of 5, want 5 in the longer window", granted)
		}
	},
	"budgets of a period": func(t *tester) {
		b := store.Bucket{Key: "usd@2026-11", Capacity: 100, MaxDebt: 100, Ends: time.Now().Add(time.Hour), Period: time.Hour}
		t.want("a", store.Granted, charge(100, b)...)
		r := t.want("b", store.Refused, charge(1, b)...)
		if wait, ever := b.Wait(r.States[0], 1, r.Now); !ever || wait < 59*time.Minute || wait > time.Hour {
			t.Errorf("got wait %v, %v, want the end of the period", wait, ever)
		}
		next := b
		next.Key = "usd@2026-12"
		t.want("c", store.Granted, charge(1, next)...)
	},
	"concurrency comes back at once and by itself": func(t *tester) {
		c := set("c", 2)
		t.want("a", store.Granted, charge(1, c)...)
		t.want("b", store.Granted, charge(1, c)...)
		r := t.want("c", store.Refused, charge(1, c)...)
		if wait, ever := c.Wait(r.States[0], 1, r.Now); !ever || wait <= 0 || wait > time.Second {
			t.Errorf("got wait %v, %v, want at most a second", wait, ever)
		}
		t.commit("a", store.Granted, charge(1, c)...)
		t.release("b", true)
		t.used(0, c)
		t.reserveFor(30*time.Millisecond, "crash 1", charge(1, c)...)
		t.reserveFor(30*time.Millisecond, "crash 2", charge(1, c)...)
		t.until("permit", func() bool { return t.reserve("d", charge(1, c)...).Outcome == store.Granted })
		t.used(1, c)
	},
	"what a crash left is given back": func(t *tester) {
		b, c := pot("b", 100), set("c", 1)
		t.reserveFor(30*time.Millisecond, "crash", charge(80, b, c)...)
		t.want("a", store.Refused, charge(50, b)...)
		t.until("refund", func() bool { return t.reserve("b", charge(50, b, c)...).Outcome == store.Granted })
		t.used(50, b)
		t.commit("crash", store.Granted, charge(20, b, c)...) // it lives after all
		t.used(70, b)
		t.used(1, c)
	},
	"heartbeat": func(t *tester) {
		b, c := pot("b", 100), set("c", 1)
		r := t.reserveFor(time.Second, "long", charge(80, b, c)...)
		unknown, _, err := t.s.Extend(t.ctx, t.org, []string{"long", "never"}, time.Hour)
		if err != nil || !cmp.Equal(unknown, []string{"never"}) {
			t.Errorf("extend: got unknown %v, %v, want never", unknown, err)
		}
		t.until("second", func() bool {
			got, _ := t.s.Read(t.ctx, t.org, []store.Bucket{b, c})
			if got.States[0].Used != 80 || got.States[1].Used != 1 {
				t.Fatalf("got %+v, want it kept", got.States)
			}
			return got.Now > r.Now+1_050_000
		})
		t.commit("long", store.Granted, charge(80, b, c)...)
		unknown, _, err = t.s.Extend(t.ctx, t.org, []string{"long"}, time.Hour)
		if err != nil || !cmp.Equal(unknown, []string{"long"}) {
			t.Errorf("extend a settled one: got unknown %v, %v", unknown, err)
		}
	},
	"shadow records only": func(t *tester) {
		b, s := pot("b", 100), pot("s", 10)
		s.Shadow = true
		r := t.want("a", store.Granted, charge(50, b, s)...)
		if !r.States[1].Refused || r.States[1].Used != 0 {
			t.Errorf("got %+v, want a refusal that is only recorded", r.States[1])
		}
		t.commit("a", store.Granted, charge(60, b, s)...)
		t.used(0, s)
		t.want("b", store.Granted, charge(5, b, s)...)
		t.commit("b", store.Granted, charge(7, b, s)...)
		t.used(7, s)
	},
	"a larger limit holds at once": func(t *tester) {
		t.want("a", store.Granted, charge(100, pot("b", 100))...)
		t.want("b", store.Granted, charge(100, pot("b", 200))...)
		t.want("c", store.Refused, charge(1, pot("b", 150))...)
		t.used(200, pot("b", 150))
	},
	"large numbers are exact": func(t *tester) {
		b := pot("b", store.Max)
		b.MaxDebt = store.Max
		t.want("a", store.Granted, charge(store.Max-1, b)...)
		t.used(store.Max-1, b)
		t.want("b", store.Granted, charge(1, b)...)
		t.want("c", store.Refused, charge(1, b)...)
		t.commit("a", store.Granted, charge(store.Max, b)...)
		t.used(store.Max+1, b)
	},
	"shares":             shares,
	"shares shrink":      sharesShrink,
	"shares of the dead": sharesExpire,
	"holders": func(t *tester) {
		a, b := t.org+"a", t.org+"b"
		before, err := t.s.Holders(t.ctx, []string{a})
		if err != nil || before < 1 {
			t.Fatalf("got %d, %v, want at least 1", before, err)
		}
		if n, err := t.s.Holders(t.ctx, []string{a, b}); err != nil || n < 2 {
			t.Errorf("got %d, %v, want at least 2", n, err)
		}
	},
	"names of any kind": func(t *tester) {
		for i, key := range []string{"a/b", "ns/t/limit/user=a b", "ключ", "100% {x}", "%d %s", "b:c:"} {
			b := pot(key, 10)
			t.want(fmt.Sprint("r/", i, " "), store.Granted, charge(3, b, set(key, 1))...)
			t.commit(fmt.Sprint("r/", i, " "), store.Granted, charge(4, b, set(key, 1))...)
			t.used(4, b)
			t.used(0, set(key, 1))
		}
	},
}

func (t *tester) lease(ttl time.Duration, holder string, sh store.Share) store.Grant {
	t.Helper()
	g, _, err := t.s.Lease(t.ctx, t.org, holder, ttl, []store.Share{sh})
	if err != nil {
		t.Fatalf("lease: %v", err)
	}
	return g[0]
}

func shares(t *tester) {
	b := pot("b", 1000)
	b.MaxLeased = 150
	g := t.lease(time.Minute, "a", store.Share{Bucket: b, Sequence: 1, Want: 100})
	if g.Held != 100 || g.Used != 100 || g.Leased != 100 {
		t.Errorf("first: got %+v, want 100 held, used and leased", g)
	}
	if g = t.lease(time.Minute, "a", store.Share{Bucket: b, Sequence: 1, Want: 100}); g.Held != 100 || g.Used != 100 {
		t.Errorf("repeated: got %+v, want no change", g)
	}
	if g = t.lease(time.Minute, "b", store.Share{Bucket: b, Sequence: 1, Want: 100}); g.Held != 50 || g.Leased != 150 {
		t.Errorf("another holder: got %+v, want the 50 that may still be leased", g)
	}
	if g = t.lease(time.Minute, "a", store.Share{Bucket: b, Sequence: 2, Spent: 60, Want: 100}); g.Held != 100 || g.Used != 210 || g.Leased != 150 {
		t.Errorf("spent 60: got %+v, want 100 held, 210 used", g)
	}
	if g = t.lease(time.Minute, "a", store.Share{Bucket: b, Sequence: 3, Spent: 130, Want: 0}); g.Held != 0 || g.Used != 240 || g.Leased != 50 {
		t.Errorf("overspent and returned: got %+v, want 0 held, 240 used, 50 leased", g)
	}
	if g = t.lease(time.Minute, "b", store.Share{Bucket: b, Sequence: 2, Spent: 10, Want: 0}); g.Held != 0 || g.Used != 200 || g.Leased != 0 {
		t.Errorf("returned: got %+v, want what was spent, 60+130+10, used", g)
	}
}

func sharesShrink(t *tester) {
	b := pot("b", 1000)
	var last int64 = 1000
	for i := range 100 {
		g := t.lease(time.Minute, "a", store.Share{Bucket: b, Sequence: uint64(i + 1), Spent: last % 1000, Want: 1000})
		if g.Held > last {
			t.Fatalf("share %d grew from %d to %d", i, last, g.Held)
		}
		if g.Synchronous {
			if left := 1000 - g.Used; left >= 50 || g.Held > 0 {
				t.Errorf("synchronous with %d left and %d held, want below 50 and none", left, g.Held)
			}
			t.want("rest", store.Granted, charge(1000-g.Used, b)...)
			return
		}
		last = g.Held
	}
	t.Error("shares never end")
}

func sharesExpire(t *tester) {
	b := pot("b", 1000)
	t.lease(30*time.Millisecond, "a", store.Share{Bucket: b, Sequence: 1, Want: 100})
	t.used(100, b)
	t.until("refund", func() bool {
		r, _ := t.s.Read(t.ctx, t.org, []store.Bucket{b})
		return r.States[0].Used == 0 && r.States[0].Leased == 0
	})
	// It had spent 40 and lives after all; that is charged once.
	for range 2 {
		if g := t.lease(time.Minute, "a", store.Share{Bucket: b, Sequence: 2, Spent: 40, Want: 0}); g.Used != 40 || g.Held != 0 {
			t.Errorf("late: got %+v, want 40 used", g)
		}
	}
}
