package ledger_test

import (
	"context"
	"database/sql"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/kinference/kinference/internal/testenv"
	usagev1 "github.com/kinference/kinference/proto/gen/kinference/usage/v1"
	"github.com/kinference/kinference/services/accounting/internal/ledger"
)

// both runs a test on each database.
func both(t *testing.T, f func(t *testing.T, place string)) {
	t.Run("sqlite", func(t *testing.T) { f(t, filepath.Join(t.TempDir(), "sub dir", "ledger.db")) })
	t.Run("postgres", func(t *testing.T) { f(t, testenv.Postgres(t).URL) })
}

func open(t *testing.T, place string) *ledger.Ledger {
	t.Helper()
	l, err := ledger.Open(t.Context(), place)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l
}

var start = time.Date(2026, 11, 29, 22, 0, 0, 0, time.UTC)

// event is request i of a tenant: 10·i input tokens of which i cached, i output.
func event(i int, tenant string, at time.Duration) *usagev1.Usage {
	n := func(x int) *uint32 { return proto.Uint32(uint32(x)) }
	return &usagev1.Usage{
		Id: fmt.Sprintf("id-%05d", i), Ended: timestamppb.New(start.Add(at)), Tenants: []string{tenant, "ns/org"}, CostCenter: "cc", Model: "m",
		WorkerSet: "ns/set", Worker: "w/0", Outcome: usagev1.Outcome_OUTCOME_OK, Tokens: &usagev1.Tokens{Input: n(10 * i), CachedInput: n(i), Output: n(i)},
		Cost: &usagev1.Cost{Currency: "EUR", PriceVersion: "v", Input: "0.000000000001", Output: "123456.999999999999", Total: "0", InputPrice: "3"},
	}
}

func add(t *testing.T, l *ledger.Ledger, events ...*usagev1.Usage) ledger.Added {
	t.Helper()
	a, err := l.Add(t.Context(), events)
	if err != nil {
		t.Fatal(err)
	}
	return a
}

func query(t *testing.T, l *ledger.Ledger, q ledger.Query) []ledger.Row {
	t.Helper()
	rows, err := l.Query(t.Context(), q)
	if err != nil {
		t.Fatal(err)
	}
	return rows
}

// Events that come in any order, late, again and in other batches count once, and
// every step of time has the same sum.
func TestEachEventCountsOnce(t *testing.T) {
	both(t, func(t *testing.T, place string) {
		l := open(t, place)
		var all []*usagev1.Usage
		input := int64(0)
		for i := range 300 {
			tenant := "ns/a"
			if i%3 == 0 {
				tenant = "ns/b"
			}
			all = append(all, event(i, tenant, time.Duration(i)*time.Minute))
			input += int64(10 * i)
		}
		random := rand.New(rand.NewPCG(1, 2))
		total := ledger.Added{}
		for range 4 {
			random.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
			for batch := range slices.Chunk(all, 37) {
				a := add(t, l, append(batch, batch[0])...)
				total.New, total.Known = total.New+a.New, total.Known+a.Known
			}
			if err := l.Close(); err != nil { // killed, and started again
				t.Fatal(err)
			}
			l = open(t, place)
		}
		if total.New != 300 || total.Known != 3*300+4*9 {
			t.Errorf("got %+v", total)
		}
		for name, q := range map[string]ledger.Query{
			"whole":         {},
			"hours":         {Step: ledger.Hour},
			"days":          {Step: ledger.Day},
			"months":        {Step: ledger.Month},
			"tenants":       {GroupBy: []string{"tenant", "endpoint"}},
			"by everything": {Step: ledger.Hour, GroupBy: []string{"tenant", "organisation", "cost_center", "model", "backend", "endpoint", "price_version"}},
			"a range":       {Filter: ledger.Filter{From: start, To: start.Add(300 * time.Minute)}},
		} {
			var sum ledger.Row
			for _, r := range query(t, l, q) {
				sum.Requests, sum.Input, sum.Cached, sum.Output = sum.Requests+r.Requests, sum.Input+r.Input, sum.Cached+r.Cached, sum.Output+r.Output
				sum.InputCost, sum.OutputCost = sum.InputCost.Plus(r.InputCost), sum.OutputCost.Plus(r.OutputCost)
			}
			if sum.Requests != 300 || sum.Input != input || sum.Cached != input/10 || sum.Output != input/10 ||
				sum.InputCost.String() != "0.0000000003" || sum.OutputCost.String() != "37037099.9999999997" {
				t.Errorf("%s: got %+v", name, sum)
			}
		}
		byTenant := query(t, l, ledger.Query{Filter: ledger.Filter{Tenants: []string{"ns/b"}}, GroupBy: []string{"tenant"}})
		if len(byTenant) != 1 || byTenant[0].Requests != 100 || byTenant[0].Groups["tenant"] != "ns/b" || byTenant[0].Currency != "EUR" {
			t.Errorf("got %+v", byTenant)
		}
		hours := query(t, l, ledger.Query{Step: ledger.Hour})
		if len(hours) != 5 || !hours[0].Start.Equal(start) || hours[0].Requests != 60 {
			t.Errorf("hours: got %+v", hours)
		}
		if days := query(t, l, ledger.Query{Step: ledger.Day}); len(days) != 2 || days[0].Requests != 120 {
			t.Errorf("days: got %+v", days)
		}
		if _, err := l.Query(t.Context(), ledger.Query{GroupBy: []string{"event"}}); err == nil {
			t.Error("grouped by a column that is none")
		}
		if _, err := l.Query(t.Context(), ledger.Query{Step: ledger.Hour, Most: 4}); err != ledger.ErrTooMany {
			t.Errorf("too many rows: got %v", err)
		}

		var exported []string
		err := l.Export(t.Context(), ledger.Filter{From: start.Add(time.Hour), To: start.Add(3 * time.Hour), Tenants: []string{"ns/a"}}, func(page []*usagev1.Usage) error {
			for _, u := range page {
				exported = append(exported, u.GetId())
			}
			return nil
		})
		if err != nil || len(exported) != 80 || !slices.IsSorted(exported) || exported[0] != "id-00061" {
			t.Errorf("exported %d: %v, %v", len(exported), exported, err)
		}
		if n, err := l.Size(t.Context()); err != nil || n <= 0 {
			t.Errorf("size %d, %v", n, err)
		}
		if at, err := l.Newest(t.Context()); err != nil || !at.Equal(start.Add(299*time.Minute)) {
			t.Errorf("newest %v, %v", at, err)
		}
	})
}

// A time that does not begin or end with a day is summed up from days as far as it has
// whole ones, which are there when their hours are not any more.
func TestWholeTimesAreOfDaysAndHours(t *testing.T) {
	both(t, func(t *testing.T, place string) {
		l := open(t, place)
		var all []*usagev1.Usage
		for i := range 200 { // until the evening of the first of December
			all = append(all, event(i, []string{"ns/a", "ns/b"}[i%2], time.Duration(i)*15*time.Minute))
		}
		add(t, l, all...)
		requests := func(q ledger.Query) (n int64) {
			for _, r := range query(t, l, q) {
				n += r.Requests
			}
			return n
		}
		at := []time.Time{{}, start.Add(10 * time.Minute), start.Add(2 * time.Hour), start.Add(150 * time.Minute), start.Add(5 * time.Hour), start.Add(26 * time.Hour), start.Add(27 * time.Hour), start.Add(49 * time.Hour)}
		for i, from := range at {
			for _, to := range append([]time.Time{{}}, at[i+1:]...) {
				f := ledger.Filter{From: from, To: to, Tenants: []string{"ns/b"}}
				if got, want := requests(ledger.Query{Filter: f}), requests(ledger.Query{Filter: f, Step: ledger.Hour}); got != want || got == 0 {
					t.Errorf("from %v to %v: %d requests, %d by hours", from, to, got, want)
				}
			}
		}
		if err := l.Prune(t.Context(), start, start.Add(26*time.Hour)); err != nil { // the morning of that day
			t.Fatal(err)
		}
		if n := requests(ledger.Query{Filter: ledger.Filter{To: start.Add(31 * time.Hour)}}); n != 124 {
			t.Errorf("%d of 124 requests are left without hours", n)
		}
		if got, err := l.Since(t.Context(), start.Add(100*time.Minute), 4); err != nil || !got.Equal(start.Add(45*time.Minute)) {
			t.Errorf("the last 4 of 7 events began at %v: %v", got, err)
		}
		if got, err := l.Since(t.Context(), start.Add(100*time.Minute), 8); err != nil || !got.IsZero() {
			t.Errorf("the last 8 of 7 events began at %v: %v", got, err)
		}
	})
}

// The parts of as many rows as an installation has in years are summed up.
func TestManyRows(t *testing.T) {
	both(t, func(t *testing.T, place string) {
		l := open(t, place)
		add(t, l, event(1, "ns/a", 0), event(2, "ns/b", 0))
		driver := "sqlite"
		if strings.Contains(place, "://") {
			driver = "pgx"
		}
		db, err := sql.Open(driver, place)
		if err != nil {
			t.Fatal(err)
		}
		defer db.Close()
		// Each row stands for six million.
		if _, err := db.Exec("UPDATE usage_day SET output_cost = 0, output_cost_pico = 6000000000000999999"); err != nil {
			t.Fatal(err)
		}
		rows := query(t, l, ledger.Query{})
		if len(rows) != 1 || rows[0].OutputCost.String() != "12000000.000001999998" {
			t.Errorf("got %+v", rows)
		}
		from, err := l.Divided(t.Context(), start)
		if err != nil {
			t.Fatal(err)
		}
		if _, _, err := l.Divide(t.Context(), from, from.Add(time.Minute), nil, []ledger.WorkerTime{{WorkerSet: "ns/a"}, {WorkerSet: "ns/b"}}); err != nil {
			t.Fatal(err)
		}
		for most, want := range map[int]error{0: nil, 1: ledger.ErrTooMany, 2: nil} {
			if times, err := l.Times(t.Context(), time.Time{}, time.Time{}, ledger.Hour, most); err != want || err == nil && len(times) != 2 {
				t.Errorf("at most %d rows: %v, %v", most, times, err)
			}
		}
	})
}

// What was settled for an ingress that died gives way to what that ingress said.
func TestRecoveredGivesWay(t *testing.T) {
	both(t, func(t *testing.T, place string) {
		l := open(t, place)
		guess := event(7, "ns/a", 0)
		guess.Recovered, guess.Outcome, guess.Tokens.Output, guess.Tokens.OutputEstimated = true, usagev1.Outcome_OUTCOME_FAILED, proto.Uint32(3), true
		guess.Cost.Output = "0.5"
		truth := event(7, "ns/a", 90*time.Minute)
		check := func(step string, want ledger.Added, got ledger.Added, output, recovered int64, cost string) {
			t.Helper()
			rows := query(t, l, ledger.Query{})
			if got.New != want.New || got.Known != want.Known || got.Replaced != want.Replaced || len(rows) != 1 || rows[0].Requests != 1 || rows[0].Output != output || rows[0].Recovered != recovered || rows[0].OutputCost.String() != cost {
				t.Errorf("%s: got %+v and %+v", step, got, rows)
			}
		}
		check("guess", ledger.Added{New: 1}, add(t, l, guess), 3, 1, "0.5")
		check("guess again", ledger.Added{Known: 1}, add(t, l, guess), 3, 1, "0.5")
		check("truth", ledger.Added{Replaced: 1}, add(t, l, truth), 7, 0, "123456.999999999999")
		check("truth again", ledger.Added{Known: 1}, ledger.Added{Known: add(t, l, truth, guess, truth).Known - 2}, 7, 0, "123456.999999999999")
		for _, r := range query(t, l, ledger.Query{Step: ledger.Hour}) {
			if r.Start.Equal(start) && (r.Requests != 0 || !r.OutputCost.IsZero()) {
				t.Errorf("the hour of the guess has %+v", r)
			}
		}
	})
}

// What an endpoint used that was asked beside another one and given up is used and
// paid for, and is no request, neither one that was canceled.
func TestHedgesLoserIsNoRequest(t *testing.T) {
	both(t, func(t *testing.T, place string) {
		l := open(t, place)
		served, lost, left := event(2, "ns/a", 0), event(3, "ns/a", time.Minute), event(5, "ns/a", 2*time.Minute)
		lost.RequestId, lost.Hedge, lost.Outcome = served.RequestId, true, usagev1.Outcome_OUTCOME_CANCELED
		left.Outcome = usagev1.Outcome_OUTCOME_CANCELED
		for range 2 { // each comes twice
			add(t, l, served, lost, left)
		}
		for name, q := range map[string]ledger.Query{"whole": {}, "hours": {Step: ledger.Hour}, "months": {Step: ledger.Month}} {
			rows := query(t, l, q)
			if len(rows) != 1 {
				t.Fatalf("%s: got %d rows", name, len(rows))
			}
			r := rows[0]
			got := [7]int64{r.Requests, r.Canceled, r.Failed, r.Refused, r.Input, r.Cached, r.Output}
			if want := [7]int64{2, 1, 0, 0, 100, 10, 10}; got != want {
				t.Errorf("%s: got %v, want %v", name, got, want)
			}
			if got, want := r.Cost().String(), "370371"; got != want {
				t.Errorf("%s: cost %s, want %s", name, got, want)
			}
		}
	})
}

// Several processes that take the same events together count each once.
func TestTogether(t *testing.T) {
	both(t, func(t *testing.T, place string) {
		var tasks sync.WaitGroup
		var mu sync.Mutex
		fresh := 0
		for p := range 4 {
			l := open(t, place)
			tasks.Go(func() {
				random := rand.New(rand.NewPCG(uint64(p), 1))
				for _, from := range random.Perm(20) {
					var batch []*usagev1.Usage
					for _, i := range random.Perm(20) {
						batch = append(batch, event(20*from+i, fmt.Sprintf("ns/t%d", i%5), 0))
					}
					for {
						a, err := l.Add(context.Background(), batch)
						if err != nil { // as for a batch that comes again
							continue
						}
						mu.Lock()
						fresh += a.New
						mu.Unlock()
						break
					}
				}
			})
		}
		tasks.Wait()
		rows := query(t, open(t, place), ledger.Query{})
		if fresh != 400 || len(rows) != 1 || rows[0].Requests != 400 || rows[0].Output != 400*399/2 {
			t.Errorf("%d were new, the ledger has %+v", fresh, rows)
		}
	})
}

// A ledger that forgets has another name, so that the stream is read again, and
// comes to the same sums.
func TestForgetAndReadAgain(t *testing.T) {
	both(t, func(t *testing.T, place string) {
		l := open(t, place)
		var all []*usagev1.Usage
		for i := range 200 {
			all = append(all, event(i, "ns/a", time.Duration(i)*time.Minute))
		}
		add(t, l, all...)
		want := query(t, l, ledger.Query{Step: ledger.Hour})
		name := l.Name()
		for _, since := range []time.Time{{}, time.Date(2026, 11, 30, 0, 0, 0, 0, time.UTC)} {
			if err := l.Forget(t.Context(), since); err != nil {
				t.Fatal(err)
			}
			if l.Name() == name {
				t.Error("the name is the same")
			}
			if left := query(t, l, ledger.Query{Filter: ledger.Filter{From: since}}); since.IsZero() && len(left) != 0 {
				t.Errorf("left: %+v", left)
			}
			add(t, l, all...)
			if diff := cmp.Diff(want, query(t, l, ledger.Query{Step: ledger.Hour})); diff != "" {
				t.Error(diff)
			}
		}
		if err := l.Forget(t.Context(), start); err == nil {
			t.Error("forgot from the middle of a day on")
		}
		if again := open(t, place); again.Name() != l.Name() {
			t.Error("the name is not kept")
		}
		if err := l.Prune(t.Context(), start.Add(time.Hour), start.Add(2*time.Hour)); err != nil {
			t.Fatal(err)
		}
		if rows := query(t, l, ledger.Query{Step: ledger.Hour}); len(rows) != len(want)-2 {
			t.Errorf("after pruning: %d hours", len(rows))
		}
		if rows := query(t, l, ledger.Query{Step: ledger.Day}); len(rows) != 2 || rows[0].Requests != 120 {
			t.Errorf("after pruning: days %+v", rows)
		}
	})
}

// Text that one of the databases refuses must not keep the others out.
func TestOddText(t *testing.T) {
	both(t, func(t *testing.T, place string) {
		l := open(t, place)
		u := event(1, "ns/a\x00b'\"; DROP TABLE usage_event; --", 0)
		u.Model, u.Cost.Input, u.Cost.Output = "ü\x00\n", "-5", "1e9"
		if a := add(t, l, u, event(2, "ns/a", 0)); a.New != 2 {
			t.Errorf("got %+v", a)
		}
		if rows := query(t, l, ledger.Query{}); rows[0].Requests != 2 || rows[0].InputCost.String() != "0.000000000001" {
			t.Errorf("got %+v", rows)
		}
	})
}

func TestOpenRefuses(t *testing.T) {
	if _, err := ledger.Open(t.Context(), "postgres://test@127.0.0.1:1/none?sslmode=disable&connect_timeout=1"); err == nil || !ledger.Temporary(err) {
		t.Errorf("a server that is away: got %v", err)
	}
	if _, err := ledger.Open(t.Context(), "/dev/null/ledger.db"); err == nil || ledger.Temporary(err) {
		t.Errorf("a folder that cannot be: got %v", err)
	}
	if got := ledger.Redact("postgres://u:secret@h/db"); got != "postgres://u:xxxxx@h/db" {
		t.Errorf("got %s", got)
	}
}

func TestMoney(t *testing.T) {
	for _, s := range []string{"0", "1", "0.000000000001", "999999.999999999999", "12.5"} {
		if m, ok := ledger.ParseMoney(s); !ok || m.String() != s {
			t.Errorf("%s: got %s, %v", s, m, ok)
		}
	}
	for _, s := range []string{"", "-1", "1e3", ".5", "1.0000000000001", "9999999999999", "0x1", "1.-5", "+1"} {
		if m, ok := ledger.ParseMoney(s); ok {
			t.Errorf("%q was taken for %s", s, m)
		}
	}
}
