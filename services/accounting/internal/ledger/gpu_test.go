package ledger_test

import (
	"database/sql"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	usagev1 "github.com/kinference/kinference/proto/gen/kinference/usage/v1"
	"github.com/kinference/kinference/services/accounting/internal/ledger"
)

const hourly = "1.980000000001"

// timed is an event of a worker whose time has a price.
func timed(i int, tenant string, at time.Duration) *usagev1.Usage {
	u := event(i, tenant, at)
	u.Cost = &usagev1.Cost{Currency: "EUR", PriceVersion: "set@1", HourlyPrice: hourly}
	return u
}

// exported are all events by id, and the sum of what their time cost.
func exported(t *testing.T, l *ledger.Ledger) (map[string]*usagev1.Usage, ledger.Money) {
	t.Helper()
	out, cost := map[string]*usagev1.Usage{}, ledger.Money{}
	if err := l.Export(t.Context(), ledger.Filter{}, func(page []*usagev1.Usage) error {
		for _, u := range page {
			out[u.GetId()] = u
			m, _ := ledger.ParseMoney(u.GetCost().GetGpu())
			cost = cost.Plus(m)
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	return out, cost
}

// What requests used of workers is written once for each span of time, whoever tries;
// sums, events and the time of the workers agree to the last digit, also when an event
// is replaced, or the stream is read again.
func TestDivide(t *testing.T) {
	both(t, func(t *testing.T, place string) {
		l := open(t, place)
		recovered := timed(0, "ns/a", 0)
		recovered.Recovered = true
		all := []*usagev1.Usage{recovered}
		for i := range 1200 {
			all = append(all, timed(i+1, []string{"ns/a", "ns/b"}[i%2], time.Duration(i%90)*time.Minute))
		}
		add(t, l, all...)
		from, err := l.Divided(t.Context(), start)
		if err != nil {
			t.Fatal(err)
		}
		if again, err := l.Divided(t.Context(), start.Add(time.Hour)); err != nil || !again.Equal(from) || !from.Equal(start) {
			t.Fatalf("begins at %v, then %v: %v", from, again, err)
		}
		random := rand.New(rand.NewPCG(1, 2))
		var used time.Duration
		for span := range 4 {
			var shares []ledger.Share
			w := ledger.WorkerTime{WorkerSet: "ns/set", PriceVersion: "set@1", Currency: "EUR", HourlyPrice: hourly, Other: time.Second, Idle: 3 * time.Second}
			for i := range 1201 {
				if i%4 > span {
					continue // a request has several spans, or one
				}
				s := ledger.Share{ID: fmt.Sprintf("id-%05d", i), Prefill: time.Duration(random.IntN(1e6)) * time.Microsecond, Decode: time.Duration(random.IntN(1e6)) * time.Microsecond}
				shares, w.Used = append(shares, s), w.Used+s.Prefill+s.Decode
			}
			shares = append(shares, ledger.Share{ID: "unknown", Prefill: time.Second})
			used += w.Used
			to := from.Add(time.Minute)
			// Of many that try one writes.
			var wrote atomic.Int32
			var tasks sync.WaitGroup
			for range 3 {
				tasks.Go(func() {
					switch _, done, err := l.Divide(t.Context(), from, to, shares, []ledger.WorkerTime{w}); {
					case err != nil:
						t.Error(err)
					case done:
						wrote.Add(1)
					}
				})
			}
			tasks.Wait()
			if wrote.Load() != 1 {
				t.Fatalf("%d wrote span %d", wrote.Load(), span)
			}
			from = to
		}
		agree := func(what string) {
			t.Helper()
			events, cost := exported(t, l)
			for _, step := range []ledger.Step{ledger.Whole, ledger.Hour, ledger.Day, ledger.Month} {
				var micros int64
				var sum ledger.Money
				for _, r := range query(t, l, ledger.Query{Step: step, GroupBy: []string{"tenant"}}) {
					micros, sum = micros+r.GPU, sum.Plus(r.GPUCost)
				}
				if micros != used.Microseconds() || sum != cost {
					t.Errorf("%s: step %d has %d µs for %s, %d µs for %s were used", what, step, micros, sum, used.Microseconds(), cost)
				}
				times, err := l.Times(t.Context(), time.Time{}, time.Time{}, step, 0)
				if err != nil || len(times) != 1 || times[0].Used != used || times[0].Other != 4*time.Second || times[0].Idle != 12*time.Second || times[0].Start.IsZero() != (step == ledger.Whole) {
					t.Errorf("%s: step %d: %+v, %v", what, step, times, err)
				}
			}
			if u := events["id-00007"]; u.GetGpuPrefill() <= 0 || u.GetGpuDecode() <= 0 || u.GetCost().GetGpu() == "" || u.GetCost().GetTotal() != u.GetCost().GetGpu() {
				t.Errorf("%s: %v", what, u)
			}
		}
		agree("divided")
		rows := query(t, l, ledger.Query{GroupBy: []string{"price_version"}})
		if len(rows) != 1 || rows[0].Prices[3] != hourly || rows[0].Requests != 1201 {
			t.Errorf("by price: %+v", rows)
		}
		// Rounding is for each request: at most half a part of 10⁻¹².
		times, _ := l.Times(t.Context(), time.Time{}, time.Time{}, ledger.Whole, 0)
		whole, other, idle, ok := times[0].Cost()
		_, cost := exported(t, l)
		if d := whole.Pico - cost.Pico; !ok || whole.Whole != cost.Whole || d > 601 || d < -601 {
			t.Errorf("the time cost %s, its parts %s", whole, cost)
		}
		if other.String() != "0.0022" || idle.String() != "0.0066" {
			t.Errorf("other %s, idle %s", other, idle)
		}
		better := timed(0, "ns/b", time.Minute)
		if a := add(t, l, better); a.Replaced != 1 {
			t.Errorf("got %+v", a)
		}
		agree("replaced")
		if err := l.Forget(t.Context(), time.Time{}); err != nil {
			t.Fatal(err)
		}
		if a := add(t, l, append([]*usagev1.Usage{better}, all[1:]...)...); a.New != 1201 || a.Fresh[7].GetCost().GetGpu() == "" {
			t.Errorf("read again: %d", a.New)
		}
		agree("read again")
		if err := l.Prune(t.Context(), from.Add(time.Hour), start); err != nil {
			t.Fatal(err)
		}
	})
}

// Followers see each event once, in one order, whoever adds it.
func TestFollow(t *testing.T) {
	both(t, func(t *testing.T, place string) {
		l, other := open(t, place), open(t, place)
		add(t, l, event(1, "ns/a", 0))
		at, err := l.Seq(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		var tasks sync.WaitGroup
		for k, from := range []*ledger.Ledger{l, other, l, other} {
			tasks.Go(func() {
				for i := range 25 {
					for {
						if _, err := from.Add(t.Context(), []*usagev1.Usage{event(100*k+2*i+10, "ns/a", 0), event(100*k+2*i+11, "ns/b", 0)}); err == nil {
							break
						}
					}
				}
			})
		}
		seen := map[string]int{}
		done := make(chan struct{})
		go func() { tasks.Wait(); close(done) }()
		for over := false; !over; {
			select {
			case <-done:
				over = true // one more time
			default:
			}
			if at, err = other.Follow(t.Context(), at, func(u *usagev1.Usage) { seen[u.GetId()]++ }); err != nil {
				t.Fatal(err)
			}
		}
		for id, n := range seen {
			if n != 1 {
				t.Errorf("%s came %d times", id, n)
			}
		}
		if len(seen) != 200 {
			t.Errorf("%d of 200 events came", len(seen))
		}
		n := 0
		if err := l.Export(t.Context(), ledger.Filter{UpTo: at - 50}, func(page []*usagev1.Usage) error { n += len(page); return nil }); err != nil || n != 151 {
			t.Errorf("%d events before the last 50: %v", n, err)
		}
	})
}

// A ledger of the first version is taken over with what is in it.
func TestFirstVersion(t *testing.T) {
	place := filepath.Join(t.TempDir(), "ledger.db")
	add(t, open(t, place), event(1, "ns/a", 0), event(2, "ns/b", time.Minute))
	db, err := sql.Open("sqlite", place)
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range []string{
		`DROP INDEX usage_event_seq`, `ALTER TABLE usage_event DROP COLUMN seq`, `ALTER TABLE usage_hour DROP COLUMN gpu_us`, `ALTER TABLE usage_day DROP COLUMN gpu_us`,
		`ALTER TABLE usage_hour DROP COLUMN hourly_price`, `ALTER TABLE usage_day DROP COLUMN hourly_price`, `DROP TABLE usage_gpu`, `DROP TABLE worker_hour`,
		`DELETE FROM ledger_meta WHERE name = 'seq'`, `UPDATE ledger_meta SET value = '1' WHERE name = 'schema'`,
	} {
		if _, err := db.Exec(s); err != nil {
			t.Fatalf("%s: %v", s, err)
		}
	}
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}
	l := open(t, place)
	if a := add(t, l, event(2, "ns/b", time.Minute), event(3, "ns/b", time.Hour)); a.New != 1 {
		t.Errorf("got %+v", a)
	}
	rows := query(t, l, ledger.Query{})
	if len(rows) != 1 || rows[0].Requests != 3 {
		t.Errorf("got %+v", rows)
	}
	if diff := cmp.Diff(rows, query(t, open(t, place), ledger.Query{})); diff != "" {
		t.Error(diff)
	}
}
