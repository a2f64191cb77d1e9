package limits_test

import (
	"encoding/json"
	"fmt"
	"math"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/kinference/kinference/api/v1alpha1"
	"github.com/kinference/kinference/internal/policy"
	limiterv1 "github.com/kinference/kinference/proto/gen/kinference/limiter/v1"
	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
	"github.com/kinference/kinference/services/ingress/internal/limits"
	"github.com/kinference/kinference/services/ingress/internal/meter"
)

type scope = routerv1.LimitScope

const (
	tenant = routerv1.LimitScope_LIMIT_SCOPE_TENANT
	user   = routerv1.LimitScope_LIMIT_SCOPE_USER
	key    = routerv1.LimitScope_LIMIT_SCOPE_KEY
	model  = routerv1.LimitScope_LIMIT_SCOPE_MODEL
)

// minute makes a limit of a minute's window.
func minute(name string, change func(*routerv1.Limit), per ...scope) *routerv1.Limit {
	l := &routerv1.Limit{Name: name, Per: per, Window: durationpb.New(time.Minute), Burst: durationpb.New(time.Minute)}
	if len(per) == 0 {
		l.Per = []scope{tenant}
	}
	change(l)
	return l
}

func tokens(sort routerv1.TokenSort, amount int64, weights ...int64) func(*routerv1.Limit) {
	t := &routerv1.TokenLimit{Sort: sort, Amount: amount}
	if sort == routerv1.TokenSort_TOKEN_SORT_TOTAL {
		t.InputMilli, t.CachedInputMilli, t.OutputMilli = 1000, 1000, 1000
	}
	if len(weights) == 3 {
		t.InputMilli, t.CachedInputMilli, t.OutputMilli = weights[0], weights[1], weights[2]
	}
	return func(l *routerv1.Limit) { l.Quantity = &routerv1.Limit_Tokens{Tokens: t} }
}

func total(n int64, weights ...int64) func(*routerv1.Limit) {
	return tokens(routerv1.TokenSort_TOKEN_SORT_TOTAL, n, weights...)
}

func requests(n int64) func(*routerv1.Limit) {
	return func(l *routerv1.Limit) { l.Quantity = &routerv1.Limit_Requests{Requests: n} }
}

func concurrency(n int64) func(*routerv1.Limit) {
	return func(l *routerv1.Limit) {
		l.Quantity, l.Window, l.Burst = &routerv1.Limit_Concurrency{Concurrency: n}, nil, nil
	}
}

func cost(micros int64, currency string) func(*routerv1.Limit) {
	return func(l *routerv1.Limit) {
		l.Quantity = &routerv1.Limit_Cost{Cost: &routerv1.CostLimit{AmountMicros: micros, Currency: currency}}
	}
}

func gpu(seconds int64) func(*routerv1.Limit) {
	return func(l *routerv1.Limit) { l.Quantity = &routerv1.Limit_GpuSeconds{GpuSeconds: seconds} }
}

func compile(t testing.TB, l *routerv1.Limit) *limits.Limit {
	t.Helper()
	out, err := limits.Compile("ns/team", false, l)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

var price = &meter.Price{Currency: "USD", Tokens: true, Input: 600_000_000_000, Cached: 60_000_000_000, Output: 2_200_000_000_000, Hourly: 0}

// Each kind of limit counts what it says, before the answer and after it.
func TestAmounts(t *testing.T) {
	use := limits.Use{Input: 1000, Cached: 800, Output: 50, GPU: 1500 * time.Millisecond, Prices: []*meter.Price{nil, price}}
	hourly := &meter.Price{Currency: "EUR", Hourly: 3_600_000_000_000} // 3.60 an hour
	for _, c := range []struct {
		name                string
		limit               func(*routerv1.Limit)
		prices              []*meter.Price
		scale, before, then int64
	}{
		{"requests", requests(5), nil, 1, 1, 1},
		{"concurrency", concurrency(5), nil, 1, 1, 1},
		{"input", tokens(routerv1.TokenSort_TOKEN_SORT_INPUT, 100), nil, 1, 1000, 200},
		{"cached", tokens(routerv1.TokenSort_TOKEN_SORT_CACHED_INPUT, 100), nil, 1, 1000, 800},
		{"output", tokens(routerv1.TokenSort_TOKEN_SORT_OUTPUT, 100), nil, 1, 50, 50},
		{"total", total(100), nil, 1, 1050, 1050},
		{"weighed", total(100, 1000, 100, 3000), nil, 1000, 1_150_000, 200_000 + 80_000 + 150_000},
		{"dear cache", total(100, 0, 2000, 1000), nil, 1, 2050, 1650},
		{"tiny weight", total(100, 1, 0, 0), nil, 1000, 1000, 200},
		// 1000 × 0.60 + 50 × 2.20 per million; then 200 × 0.60 + 800 × 0.06 + 50 × 2.20.
		{"cost", cost(2_000_000, "USD"), nil, 1e9, 710_000, 278_000},
		{"cost in another currency", cost(2_000_000, "EUR"), nil, 1e9, 0, 0},
		{"cost of a device", cost(2_000_000, "EUR"), []*meter.Price{price, hourly}, 1e9, 1_500_000, 1_500_000},
		{"large cost", cost(1<<50, "USD"), nil, 1e6, 710, 278},
		{"device time", gpu(60), nil, 1e6, 1_500_000, 1_500_000},
	} {
		t.Run(c.name, func(t *testing.T) {
			l := compile(t, minute("l", c.limit))
			u := use
			if c.prices != nil {
				u.Prices = c.prices
			}
			after := l.Amount(&u)
			u.Estimated, u.Cached = true, 0
			if before := l.Amount(&u); l.Scale != c.scale || before != c.before || after != c.then {
				t.Errorf("scale %d, %d before and %d after, want %d, %d and %d", l.Scale, before, after, c.scale, c.before, c.then)
			}
		})
	}
}

// Whatever clients and resources say, amounts and capacities stay within what
// the limiter takes, are never negative, and never less than what fewer tokens count.
func TestAmountsAreBounded(t *testing.T) {
	hostile := []int64{math.MinInt64, -1, 0, 1, 999_999_999, math.MaxInt32, 1 << 40, math.MaxInt64}
	dear := &meter.Price{Currency: "USD", Tokens: true, Input: math.MaxInt64, Cached: math.MaxInt64, Output: math.MaxInt64, Hourly: math.MaxInt64}
	for i, f := range []func(*routerv1.Limit){requests(math.MaxInt64), total(math.MaxInt64, 1_000_000, 1, 1_000_000), total(1e12, 1_000_000, 1, 1_000_001),
		tokens(routerv1.TokenSort_TOKEN_SORT_OUTPUT, 1), cost(math.MaxInt64, "USD"), cost(1, "USD"), gpu(1e12), gpu(math.MaxInt64)} {
		l := compile(t, minute("l", f))
		if l.Capacity < 0 || l.Capacity > limits.MaxUnits {
			t.Errorf("%d: capacity %d", i, l.Capacity)
		}
		for _, in := range hostile {
			for _, out := range hostile {
				u := limits.Use{Input: in, Cached: out, Output: out, GPU: time.Duration(in), Prices: []*meter.Price{dear}}
				n := l.Amount(&u)
				if n < 0 || n > limits.MaxUnits {
					t.Errorf("%d: input %d, output %d: amount %d", i, in, out, n)
				}
			}
		}
	}
	for _, bad := range []*routerv1.Limit{
		{Name: "nothing"},
		minute("negative", requests(-1)),
		minute("negative weight", total(1, -1, 0, 0)),
		{Name: "no time", Quantity: &routerv1.Limit_Requests{Requests: 1}},
		minute("unknown sort", tokens(99, 1)),
	} {
		if l, err := limits.Compile("ns/t", false, bad); err == nil {
			t.Errorf("%s: %+v", bad.GetName(), l)
		}
	}
}

func table(t testing.TB, tenants []*routerv1.Tenant, policies ...*routerv1.LimitPolicy) *limits.Table {
	t.Helper()
	out, err := limits.New(tenants, policies, nil)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func keys(charges []limits.Charge) (out []string) {
	for i := range charges {
		c := &charges[i]
		word := "other's"
		if c.Own {
			word = "own"
		}
		out = append(out, strings.TrimSpace(fmt.Sprintf("%s %s %s", c.Bucket.GetKey(), word, c.Organisation())))
	}
	return out
}

// A request must fit the limits of its tenant, of those above it and of the
// policies that select it; each has a bucket for what it is per.
func TestCharges(t *testing.T) {
	spec := func(s v1alpha1.InferencePolicySpec) string {
		text, err := json.Marshal(s)
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}
	policies := []*routerv1.LimitPolicy{
		{Name: "ns/night", Pools: []string{"ns/pool"}, Limits: []*routerv1.Limit{minute("batch", requests(5)), minute("all", requests(6), model)}, SpecJson: spec(v1alpha1.InferencePolicySpec{Limits: []v1alpha1.PolicyLimit{
			{Limit: v1alpha1.Limit{Name: "batch"}, Matches: []v1alpha1.RequestMatch{{QoS: "batch"}, {Tenant: "team", When: "request.prompt_tokens > 100"}}},
			{Limit: v1alpha1.Limit{Name: "all"}},
		}})},
		{Name: "ns/other-pool", Pools: []string{"ns/elsewhere"}, Limits: []*routerv1.Limit{minute("no", requests(1))}, SpecJson: spec(v1alpha1.InferencePolicySpec{Limits: make([]v1alpha1.PolicyLimit, 1)})},
		{Name: "ns/trial", Pools: []string{"ns/pool"}, DryRun: true, Limits: []*routerv1.Limit{minute("each", requests(1), user)}, SpecJson: spec(v1alpha1.InferencePolicySpec{Limits: make([]v1alpha1.PolicyLimit, 1)})},
	}
	tb := table(t, []*routerv1.Tenant{
		{Name: "ns/team", Limits: []*routerv1.Limit{minute("tpm", total(100)), minute("weighed", total(100, 500, 500, 1000)), minute("streams", concurrency(2), key), minute("mine", requests(3), tenant, user, model)}},
		{Name: "ns/acme", Limits: []*routerv1.Limit{minute("org", total(1000)), minute("each", requests(3), user)}},
		{Name: "ns/stranger", Limits: []*routerv1.Limit{minute("x", requests(0))}},
	}, policies...)
	asked := 0
	request := limits.Request{Tenants: []string{"ns/team", "ns/acme"}, User: "alice@example.com", Key: "k1", Model: "org/model", Pool: "ns/pool", Policy: func() *policy.Request {
		asked++
		return &policy.Request{Tenants: []string{"team", "acme"}, PromptTokens: 101, QoS: "interactive"}
	}}
	got := tb.Charges(nil, &request)
	want := []string{
		"ns/team/tpm own",
		"ns/team/weighed/per=1000 own",
		"ns/team/streams/key=k1 own",
		"ns/team/mine/user=alice@example.com/model=org/model own",
		"ns/acme/org other's",
		"ns/acme/each/user=alice@example.com own",
		"policy:ns/night/batch/tenant=ns/team own",
		"policy:ns/night/all/model=org/model other's policy:ns/night",
		"policy:ns/trial/each/user=alice@example.com own",
	}
	if d := cmp.Diff(want, keys(got)); d != "" {
		t.Error(d)
	}
	if asked != 1 {
		t.Errorf("policies asked %d times", asked)
	}
	if last := got[len(got)-1]; !last.Limit.Shadow || !last.Bucket.GetShadow() {
		t.Error("a limit of a policy on dry run denies")
	}
	// Nothing is left of a match that does not hold; a caller without user or key
	// does not get to know what others of its kind used.
	request.User, request.Key = "", ""
	request.Policy = func() *policy.Request {
		return &policy.Request{Tenants: []string{"team"}, PromptTokens: 100, QoS: "interactive"}
	}
	want = []string{
		"ns/team/tpm own", "ns/team/weighed/per=1000 own", "ns/team/streams/key= own", "ns/team/mine/user=/model=org/model own", "ns/acme/org other's", "ns/acme/each/user= other's",
		"policy:ns/night/all/model=org/model other's policy:ns/night", "policy:ns/trial/each/user= other's",
	}
	if d := cmp.Diff(want, keys(tb.Charges(nil, &request))); d != "" {
		t.Error(d)
	}
	if got := tb.Charges(nil, &limits.Request{Tenants: []string{"ns/nobody"}, Pool: "ns/x"}); len(got) != 0 {
		t.Errorf("a tenant without limits is charged %v", keys(got))
	}
}

// Names that callers choose cannot leave their place in a key, nor meet another's.
func TestNamesInKeys(t *testing.T) {
	tb := table(t, []*routerv1.Tenant{{Name: "ns/t", Limits: []*routerv1.Limit{minute("l", requests(1), user)}}})
	seen := map[string]string{}
	for _, name := range []string{"", "a", "A", "a/model=b", "~a", strings.Repeat("x", 64), strings.Repeat("x", 65), strings.Repeat("x", 66), "{x}", "a\n", "a b", "https://idp.example.com#sub", "é"} {
		k := tb.Charges(nil, &limits.Request{Tenants: []string{"ns/t"}, User: name})[0].Bucket.GetKey()
		rest := strings.TrimPrefix(k, "ns/t/l/user=")
		if len(k) > 200 || strings.ContainsAny(rest, "/{}\n ") {
			t.Errorf("%q: key %q", name, k)
		}
		if other, ok := seen[k]; ok {
			t.Errorf("%q and %q share %q", name, other, k)
		}
		seen[k] = name
	}
}

// A limit that cannot be understood denies, and says so.
func TestUnknownLimitDenies(t *testing.T) {
	tb, err := limits.New([]*routerv1.Tenant{{Name: "ns/t", Limits: []*routerv1.Limit{{Name: "new-kind"}, minute("old", requests(3))}}},
		[]*routerv1.LimitPolicy{{Name: "ns/p", Pools: []string{"ns/pool"}, SpecJson: "{", Limits: []*routerv1.Limit{minute("held", requests(1))}}}, nil)
	if err == nil || !strings.Contains(err.Error(), "new-kind") || !strings.Contains(err.Error(), "ns/p") {
		t.Errorf("error %v", err)
	}
	got := tb.Charges(nil, &limits.Request{Tenants: []string{"ns/t"}, Pool: "ns/pool"})
	if d := cmp.Diff([]string{"ns/t/new-kind own", "ns/t/old own", "policy:ns/p/held/tenant=ns/t own"}, keys(got)); d != "" {
		t.Fatal(d)
	}
	if got[0].Limit.Bucket() != 0 || got[1].Limit.Bucket() != 3 {
		t.Error("the unknown limit grants something")
	}
}

// Buckets are what the limiter is told.
func TestBuckets(t *testing.T) {
	daily := func(l *routerv1.Limit) {
		cost(5_000_000, "USD")(l)
		l.Window, l.Burst, l.Calendar = nil, nil, &routerv1.Calendar{Period: routerv1.CalendarPeriod_CALENDAR_PERIOD_WEEK, TimeZone: "Europe/Berlin"}
	}
	burst := func(l *routerv1.Limit) {
		requests(600)(l)
		l.Burst = durationpb.New(6 * time.Second)
	}
	year := func(l *routerv1.Limit) {
		requests(366)(l)
		l.Window, l.Burst = durationpb.New(366*24*time.Hour), durationpb.New(366*24*time.Hour)
	}
	tb := table(t, []*routerv1.Tenant{{Name: "ns/t", Limits: []*routerv1.Limit{minute("week", daily), minute("burst", burst), minute("year", year), minute("at-once", concurrency(3))}}})
	got := tb.Charges(nil, &limits.Request{Tenants: []string{"ns/t"}})
	if c := got[0].Bucket.GetCalendar(); c.GetLimit() != 5e9 || c.GetPeriod() != limiterv1.Calendar_PERIOD_WEEK || c.GetTimeZone() != "Europe/Berlin" || got[0].Bucket.GetMaxLeased() != 5e8 {
		t.Errorf("calendar %v", got[0].Bucket)
	}
	if w := got[1].Bucket.GetWindow(); w.GetLimit() != 600 || w.GetPeriod().AsDuration() != time.Minute || w.GetBurst() != 60 {
		t.Errorf("window %v", got[1].Bucket)
	}
	if w := got[2].Bucket.GetWindow(); w.GetLimit() != 45 || w.GetPeriod().AsDuration() != 45*24*time.Hour || w.GetBurst() != 366 {
		t.Errorf("year %v", got[2].Bucket)
	}
	if c := got[3].Bucket; c.GetConcurrency().GetLimit() != 3 || c.GetMaxLeased() != 0 {
		t.Errorf("concurrency %v", c)
	}
}

// What is reserved is what is asked for, bounded by what is possible, until
// much shorter answers are known.
func TestEstimate(t *testing.T) {
	const plenty = 1 << 30
	var l limits.Learner
	check := func(what string, a limits.Ask, lend, output int64, guess bool) {
		t.Helper()
		e := l.Estimate("t", "m", a, lend)
		if e.Output != output || e.Guess != guess {
			t.Errorf("%s: %d (guess %v), want %d (%v)", what, e.Output, e.Guess, output, guess)
		}
		l.Return(&e)
		l.Return(&e)
	}
	check("as asked", limits.Ask{Max: 200, Room: 4000, Choices: 1}, plenty, 200, false)
	check("for each choice", limits.Ask{Max: 200, Room: 4000, Choices: 5}, plenty, 1000, false)
	check("for each of many prompts", limits.Ask{Max: 2, Room: 4000, Choices: 100_000}, plenty, 200_000, false)
	check("hostile max_tokens", limits.Ask{Max: 999_999_999, Room: 4000, Choices: 1}, plenty, 4000, false)
	check("hostile n", limits.Ask{Max: math.MaxInt64, Choices: math.MaxInt64}, plenty, 1<<31, false)
	check("negative", limits.Ask{Max: -5, Room: -1, Choices: -3}, plenty, 1024, true)
	check("no limit set", limits.Ask{Room: 100_000, Choices: 1}, plenty, 1024, true)
	check("no limit set, short context", limits.Ask{Room: 10, Choices: 2}, plenty, 20, true)
	for range 31 {
		l.Learn("t", "m", 300, time.Second, time.Second)
	}
	check("too few are known", limits.Ask{Max: 32_000, Choices: 1}, plenty, 32_000, false)
	l.Learn("t", "m", 300, time.Second, time.Second)
	// The quantile's step is a quarter of an octave.
	check("learned", limits.Ask{Max: 32_000, Choices: 1}, plenty, 305, true)
	check("learned, of several", limits.Ask{Max: 32_000, Choices: 3}, plenty, 915, true)
	check("not far more", limits.Ask{Max: 600, Choices: 1}, plenty, 600, false)
	check("no limit set, learned", limits.Ask{Room: 100_000, Choices: 1}, plenty, 305, true)
	// What is left out is bounded: two requests leave out 31,695 each.
	first := l.Estimate("t", "m", limits.Ask{Max: 32_000, Choices: 1}, 40_000)
	check("nothing left to lend", limits.Ask{Max: 32_000, Choices: 1}, 40_000, 32_000, false)
	if got := l.Estimate("t", "other", limits.Ask{Max: 32_000, Choices: 1}, 40_000); got.Output != 32_000 {
		t.Errorf("another model: %d", got.Output)
	}
	l.Return(&first)
	check("it is back", limits.Ask{Max: 32_000, Choices: 1}, 40_000, 305, true)
	// Answers that get longer are learned soon.
	for range 64 {
		l.Learn("t", "m", 5000, time.Second, time.Second)
	}
	check("longer", limits.Ask{Max: 32_000, Choices: 1}, plenty, 5793, true)
	l.Exact = true
	check("exact", limits.Ask{Max: 32_000, Choices: 1}, plenty, 32_000, false)
	check("exact without a limit", limits.Ask{Room: 5000, Choices: 1}, plenty, 5000, true)
	if got := l.Pace("t", "m", 2*time.Second); got < 300 || got > 10_000 {
		t.Errorf("pace %d", got)
	}
	if got := l.Pace("nobody", "m", 2*time.Second); got != 40 {
		t.Errorf("unknown pace %d", got)
	}
}

// At any time, what is left out of reservations is at most what may be lent; and a
// quantile is not below its share of what was learned, nor a fifth above.
func TestLearnerProperties(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for range 200 {
		var l limits.Learner
		var seen []int64
		for range 40 + r.IntN(400) {
			n := int64(math.Exp(r.Float64() * 10))
			seen = append(seen, n)
			l.Learn("t", "m", n, 0, 0)
		}
		slices.Sort(seen)
		exact := seen[int(math.Ceil(.95*float64(len(seen))))-1]
		e := l.Estimate("t", "m", limits.Ask{Max: 1 << 30, Choices: 1}, 1<<31)
		if want := max(exact, 128); e.Output < want || e.Output > want+want/5+1 {
			t.Fatalf("learned %d, want about %d", e.Output, want)
		}
		l.Return(&e)
		lend := int64(r.IntN(100_000))
		left := int64(0)
		var open []limits.Estimate
		var asked []int64
		for range 100 {
			if len(open) > 0 && r.IntN(3) == 0 {
				i := r.IntN(len(open))
				left -= asked[i] - open[i].Output
				l.Return(&open[i])
				open, asked = slices.Delete(open, i, i+1), slices.Delete(asked, i, i+1)
				continue
			}
			a := limits.Ask{Max: int64(r.IntN(50_000) + 1), Choices: int64(r.IntN(3) + 1)}
			e := l.Estimate("t", "m", a, lend)
			open, asked = append(open, e), append(asked, a.Max*a.Choices)
			if left += a.Max*a.Choices - e.Output; left > lend || e.Output > a.Max*a.Choices {
				t.Fatalf("%d are left out of %d", left, lend)
			}
		}
	}
}

// The table of what was learned is bounded.
func TestLearnerIsBounded(t *testing.T) {
	var l limits.Learner
	for i := range 10_000 {
		l.Learn("t", fmt.Sprint(i), 1, 0, 0)
	}
	if n := l.Len(); n > 4096 {
		t.Errorf("%d pairs", n)
	}
}

// The parts of a worker's time add up to the time it was busy.
func TestOccupancy(t *testing.T) {
	now := time.Unix(0, 0)
	at := func(ms int) time.Time { return now.Add(time.Duration(ms) * time.Millisecond) }
	var o limits.Occupancy
	a := o.Enter("w", at(0))
	b := o.Enter("w", at(100))
	other := o.Enter("v", at(100))
	if got := a(at(300)); got != 200*time.Millisecond {
		t.Errorf("a: %v", got)
	}
	if got := b(at(400)); got != 200*time.Millisecond {
		t.Errorf("b: %v", got)
	}
	if got := other(at(400)); got != 300*time.Millisecond {
		t.Errorf("other: %v", got)
	}
	if got := o.Enter("w", at(1000))(at(1500)); got != 500*time.Millisecond {
		t.Errorf("later: %v", got)
	}
}

func state(l *limits.Limit, key string, remaining int64, reset time.Duration) *limiterv1.State {
	return &limiterv1.State{Key: key, Limit: l.Bucket(), Remaining: remaining, Reset_: durationpb.New(reset)}
}

// Clients are told of the tightest limits that are their own, in their dialect.
func TestHeaders(t *testing.T) {
	tb := table(t, []*routerv1.Tenant{
		{Name: "ns/team", Limits: []*routerv1.Limit{
			minute("rpm", requests(60)), minute("rph", requests(1000)), minute("tpm", total(100, 500, 500, 1000)), minute("in", tokens(routerv1.TokenSort_TOKEN_SORT_INPUT, 1000)),
			minute("shadow", func(l *routerv1.Limit) { total(10)(l); l.Shadow = true }), minute("at-once", concurrency(2)), minute("gpu", gpu(5)),
		}},
		{Name: "ns/acme", Limits: []*routerv1.Limit{minute("org", total(1000))}},
	})
	charges := tb.Charges(nil, &limits.Request{Tenants: []string{"ns/team", "ns/acme"}})
	states := make([]*limiterv1.State, len(charges))
	for i, remaining := range []int64{30, 100, 12_345, 900, 0, 0, 0, 1} {
		states[i] = state(charges[i].Limit, charges[i].Bucket.GetKey(), remaining, 90*time.Second+12500*time.Microsecond)
	}
	h := http.Header{}
	now := time.Date(2026, 1, 2, 3, 4, 5, 6, time.FixedZone("x", 3600))
	limits.OpenAI{}.Levels(h, now, charges, states)
	want := http.Header{
		"X-Ratelimit-Limit-Requests": {"1000"}, "X-Ratelimit-Remaining-Requests": {"100"}, "X-Ratelimit-Reset-Requests": {"1m30.013s"},
		"X-Ratelimit-Limit-Tokens": {"100"}, "X-Ratelimit-Remaining-Tokens": {"12"}, "X-Ratelimit-Reset-Tokens": {"1m30.013s"},
	}
	if d := cmp.Diff(want, h); d != "" {
		t.Error(d)
	}
	h = http.Header{}
	limits.Anthropic{}.Levels(h, now, charges, states)
	reset := []string{"2026-01-02T02:05:36Z"}
	want = http.Header{
		"Anthropic-Ratelimit-Requests-Limit": {"1000"}, "Anthropic-Ratelimit-Requests-Remaining": {"100"}, "Anthropic-Ratelimit-Requests-Reset": reset,
		"Anthropic-Ratelimit-Tokens-Limit": {"100"}, "Anthropic-Ratelimit-Tokens-Remaining": {"12"}, "Anthropic-Ratelimit-Tokens-Reset": reset,
		"Anthropic-Ratelimit-Input-Tokens-Limit": {"1000"}, "Anthropic-Ratelimit-Input-Tokens-Remaining": {"900"}, "Anthropic-Ratelimit-Input-Tokens-Reset": reset,
	}
	if d := cmp.Diff(want, h); d != "" {
		t.Error(d)
	}
	// Debt is no negative number, and what never resets has no time.
	states[2].Remaining, states[2].Reset_ = -5000, nil
	h = http.Header{}
	limits.OpenAI{}.Levels(h, now, charges, states)
	if h.Get("X-Ratelimit-Remaining-Tokens") != "0" || h.Values("X-Ratelimit-Reset-Tokens") != nil {
		t.Errorf("in debt: %v", h)
	}
	// Nothing is known, nothing is said.
	h = http.Header{}
	limits.OpenAI{}.Levels(h, now, charges, nil)
	if len(h) != 0 {
		t.Errorf("unknown: %v", h)
	}
}

// A refusal names the caller's own limit, and no other; it tells whether and
// when to come back.
func TestRefusals(t *testing.T) {
	monthly := func(f func(*routerv1.Limit)) func(*routerv1.Limit) {
		return func(l *routerv1.Limit) {
			f(l)
			l.Window, l.Burst, l.Calendar = nil, nil, &routerv1.Calendar{Period: routerv1.CalendarPeriod_CALENDAR_PERIOD_MONTH}
		}
	}
	for _, c := range []struct {
		name                string
		limit               func(*routerv1.Limit)
		own, never          bool
		wanted, left        int64
		after               time.Duration
		kind, code, message string
		seconds, ms         string
		retry               bool
	}{
		{"tokens", total(100), true, false, 58, 42, 9600*time.Millisecond + 100*time.Microsecond, "tokens", "rate_limit_exceeded",
			"The request exceeds limit l (tokens): limit 100, remaining 42, requested 58. Try again in 9.601s.", "10", "9601", true},
		{"requests", requests(5), true, false, 1, 0, time.Millisecond, "requests", "rate_limit_exceeded",
			"The request exceeds limit l (requests): limit 5, remaining 0, requested 1. Try again in 1ms.", "1", "1", true},
		{"concurrency", concurrency(2), true, false, 1, 0, time.Second, "requests", "rate_limit_exceeded",
			"The request exceeds limit l (requests at the same time): limit 2, remaining 0, requested 1. Try again in 1s.", "1", "1000", true},
		{"too large", total(100), true, true, 175, 100, 0, "tokens", "rate_limit_exceeded",
			"The request is too large for limit l (tokens): limit 100, requested 175. Shorten the prompt or ask for less output.", "", "", false},
		{"zero", total(0), true, true, 5, 0, 0, "insufficient_quota", "insufficient_quota",
			"The request exceeds limit l (tokens): limit 0, requested 5. Waiting does not help.", "", "", false},
		{"spent without refill", total(100), true, true, 5, 0, 0, "insufficient_quota", "insufficient_quota",
			"The request exceeds limit l (tokens): limit 100, requested 5. Waiting does not help.", "", "", false},
		{"budget", monthly(cost(2_500_000, "EUR")), true, false, 710_001, 0, 48 * time.Hour, "insufficient_quota", "insufficient_quota",
			"The request exceeds limit l (money): limit 2.5 EUR, remaining 0 EUR, requested 0.000710001 EUR. Try again in 48h0m0s.", "172800", "172800000", false},
		{"tokens of a month", monthly(total(100)), true, false, 5, -20, time.Hour, "insufficient_quota", "insufficient_quota",
			"The request exceeds limit l (tokens): limit 100, remaining 0, requested 5. Try again in 1h0m0s.", "3600", "3600000", false},
		{"long wait", total(100), true, false, 5, 0, 2 * time.Minute, "tokens", "rate_limit_exceeded",
			"The request exceeds limit l (tokens): limit 100, remaining 0, requested 5. Try again in 2m0s.", "120", "120000", false},
		{"of another level", total(100), false, false, 5, 3, 2 * time.Second, "tokens", "rate_limit_exceeded",
			"The request exceeds a limit that it shares with others. Try again in 2s.", "2", "2000", true},
		{"too large for another level", total(100), false, true, 175, 3, 0, "tokens", "rate_limit_exceeded",
			"The request is too large for a limit that it shares with others. Shorten the prompt or ask for less output.", "", "", false},
	} {
		t.Run(c.name, func(t *testing.T) {
			l := compile(t, minute("l", c.limit))
			r := limits.Refusal{Charge: &limits.Charge{Limit: l, Own: c.own}, Wanted: c.wanted, State: state(l, "", c.left, 0), Never: c.never, After: c.after}
			h := http.Header{}
			e := r.OpenAIError(h)
			w := recorder{h: h}
			e.Write(&w)
			if w.status != 429 || e.Type != c.kind || e.Code != c.code || e.Message != c.message {
				t.Errorf("%d %s %s\n got %s\nwant %s", w.status, e.Type, e.Code, e.Message, c.message)
			}
			if h.Get("Retry-After") != c.seconds || h.Get("Retry-After-Ms") != c.ms || (h.Get("X-Should-Retry") != "false") != c.retry {
				t.Errorf("headers %v", h)
			}
		})
	}
}

type recorder struct {
	h      http.Header
	status int
}

func (r *recorder) Header() http.Header         { return r.h }
func (r *recorder) WriteHeader(status int)      { r.status = status }
func (r *recorder) Write(p []byte) (int, error) { return len(p), nil }

// A guess never makes a request larger than a bucket; what is asked for does.
func TestReserve(t *testing.T) {
	l := compile(t, minute("l", total(100)))
	c := limits.Charge{Limit: l}
	for _, x := range []struct {
		input, output int64
		guess         bool
		want          int64
	}{{10, 20, false, 30}, {10, 1024, true, 100}, {10, 1024, false, 1034}, {150, 1024, true, 150}, {10, 50, true, 60}} {
		u := limits.Use{Input: x.input, Output: x.output, Estimated: true}
		if got := c.Reserve(&u, &limits.Estimate{Guess: x.guess}); got != x.want {
			t.Errorf("%+v: %d", x, got)
		}
	}
}

// BenchmarkCharges lists and weighs the charges of a tenant with six limits
// below one with two.
//
//	go test -bench Charges -benchmem ./internal/limits
func BenchmarkCharges(b *testing.B) {
	tb := table(b, []*routerv1.Tenant{
		{Name: "ns/team", Limits: []*routerv1.Limit{
			minute("rpm", requests(60)), minute("tpm", total(100_000, 1000, 100, 3000)), minute("in", tokens(routerv1.TokenSort_TOKEN_SORT_INPUT, 1000)),
			minute("streams", concurrency(2), key), minute("budget", cost(1e9, "USD")), minute("gpu", gpu(5)),
		}},
		{Name: "ns/acme", Limits: []*routerv1.Limit{minute("org", total(1000)), minute("each", requests(3), user)}},
	})
	var learned limits.Learner
	for range 100 {
		learned.Learn("ns/team", "m", 300, time.Second, time.Second)
	}
	request := limits.Request{Tenants: []string{"ns/team", "ns/acme"}, User: "alice", Key: "k", Model: "m"}
	use := limits.Use{Estimated: true, Input: 2000, Prices: []*meter.Price{price}}
	var charges []limits.Charge
	b.ReportAllocs()
	for b.Loop() {
		charges = tb.Charges(charges[:0], &request)
		e := learned.Estimate("ns/team", "m", limits.Ask{Max: 1000, Room: 30_000, Choices: 1}, limits.Lend(charges))
		use.Output = e.Output
		for i := range charges {
			charges[i].Reserve(&use, &e)
		}
		learned.Return(&e)
	}
}
