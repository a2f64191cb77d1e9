package schedule

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"
)

const ms = time.Millisecond

// enter puts a request in line and fails the test if there is no place.
func enter(t testing.TB, s *Scheduler, now time.Time, r Request, c []Candidate) {
	t.Helper()
	if err := s.Enter(now, r, c, nil); err != nil {
		t.Fatal(err)
	}
}

// pass returns "id@worker" of what a pass dispatches.
func pass(s *Scheduler, now time.Time) string {
	var out []string
	for _, d := range s.Pass(now) {
		where := "nowhere"
		if d.Booked {
			where = first(d.Decision)
		}
		out = append(out, d.ID+"@"+where)
	}
	return strings.Join(out, " ")
}

// why tells why a request waits.
func why(s *Scheduler, now time.Time, id string) Hold {
	for _, x := range s.Line(now) {
		if x.ID == id {
			return x.Why
		}
	}
	return "not in line"
}

func expect(t testing.TB, what, got, want string) {
	t.Helper()
	if got != want {
		t.Errorf("%s: got %q, want %q", what, got, want)
	}
}

func TestHoldsUntilTheQueueIsShort(t *testing.T) {
	s := newScheduler(t, Settings{})
	c := func() []Candidate { return candidates("w", 1000, 100, nil) }
	enter(t, s, start, Request{ID: "a"}, c())
	expect(t, "first", pass(s, start), "a@w") // 1.01 s of prefill
	enter(t, s, start, Request{ID: "b"}, c())
	expect(t, "second", pass(s, start), "")
	expect(t, "reason", string(why(s, start, "b")), string(HoldQueue))
	wake, ok := s.Wake(start)
	if want := at(860 * ms); !ok || wake.Sub(want).Abs() > ms {
		t.Errorf("wake at %v %v, want %v", wake.Sub(start), ok, want.Sub(start))
	}
	expect(t, "too early", pass(s, at(850*ms)), "")
	d := s.Pass(wake)
	if len(d) != 1 || d[0].ID != "b" || !d[0].Booked || d[0].Waited.Round(ms) != 860*ms || d[0].Why != HoldQueue || d[0].Ahead != 0 {
		t.Errorf("got %+v", d)
	}
	if _, ok := s.Wake(wake); ok {
		t.Error("nothing waits, but there is a wake")
	}
}

// A first token that comes early lets the next one go at once.
func TestFirstTokenOpensTheLine(t *testing.T) {
	s := newScheduler(t, Settings{})
	enter(t, s, start, Request{ID: "a"}, candidates("w", 1000, 100, nil))
	s.Pass(start)
	enter(t, s, start, Request{ID: "b"}, candidates("w", 1000, 100, nil))
	s.Pass(start)
	s.FirstToken(at(500*ms), "a", 500*ms)
	expect(t, "after the first token", pass(s, at(500*ms)), "b@w")
}

func TestHoldsForPages(t *testing.T) {
	s := newScheduler(t, Settings{})
	c := func(name string) []Candidate {
		c := candidates("w", 1050, 100, chain(name, 10))
		c[0].TotalBlocks = 20
		return c
	}
	enter(t, s, start, Request{ID: "a"}, c("a"))
	expect(t, "first", pass(s, start), "a@w")
	s.FirstToken(at(time.Second), "a", time.Second)
	enter(t, s, at(time.Second), Request{ID: "b"}, c("b"))
	expect(t, "no room", pass(s, at(time.Second)), "")
	expect(t, "reason", string(why(s, at(time.Second), "b")), string(HoldPages))
	// What runs already holds most of what this one needs.
	enter(t, s, at(time.Second), Request{ID: "a2"}, c("a"))
	expect(t, "shares pages", pass(s, at(time.Second)), "a2@w")
	s.Done(at(2*time.Second), "a2", Outcome{OK: true, CachedTokens: -1})
	s.Done(at(2*time.Second), "a", Outcome{OK: true, CachedTokens: -1})
	expect(t, "room", pass(s, at(2*time.Second)), "b@w")
}

// busyWorker is a scheduler whose worker w decodes one request, with a full cache
// of what others left, the prompt called "old" the next to go.
func busyWorker(t *testing.T) *Scheduler {
	s := newScheduler(t, Settings{})
	now := start
	for _, name := range []string{"old", "x", "y"} {
		c := candidates("w", 1000, 100, chain(name, 10))
		c[0].TotalBlocks = 44
		enter(t, s, now, Request{ID: name}, c)
		s.Pass(now)
		s.FirstToken(now, name, time.Second)
		if name != "y" {
			s.Done(now, name, Outcome{OK: true, CachedTokens: -1, OutputTokens: 10})
		}
		now = now.Add(10 * time.Second)
	}
	return s
}

func TestProtectsWhatOthersNeed(t *testing.T) {
	s := busyWorker(t)
	now := at(time.Minute)
	c := func(name string, cached int) []Candidate {
		c := candidates("w", 1050, 100, chain(name, 10))
		c[0].TotalBlocks, c[0].GPUTokens = 44, cached
		return c
	}
	// One that needs "old" waits for a worker with a queue; a cold one, which would
	// evict it, comes when there is room for its prefill.
	enter(t, s, now, Request{ID: "long"}, candidates("w", 3000, 0, nil))
	s.Pass(now)
	enter(t, s, now, Request{ID: "again"}, c("old", 1000))
	enter(t, s, now, Request{ID: "cold"}, c("cold", 0))
	expect(t, "queue", pass(s, now), "")
	now = now.Add(3020 * ms)
	expect(t, "the hit goes first", pass(s, now), "again@w")
	s.Leave(now, "cold")

	s = busyWorker(t)
	now = at(time.Minute)
	hit := c("old", 1000)
	hit[0].Worker = "elsewhere" // where it waits, for some reason
	enter(t, s, now, Request{ID: "long"}, candidates("elsewhere", 90000, 0, nil))
	s.Pass(now)
	enter(t, s, now, Request{ID: "again"}, hit)
	s.Pass(now)
	enter(t, s, now, Request{ID: "cold"}, c("cold", 0))
	enter(t, s, now, Request{ID: "cold2"}, c("dloc", 0))
	got := pass(s, now)
	if strings.Contains(got, "cold@w") && strings.Contains(got, "cold2@w") {
		t.Errorf("both went and evicted what waits: %s", got)
	}
	held := "cold2"
	if strings.Contains(got, "cold2") {
		held = "cold"
	}
	s.FirstToken(now, "cold", time.Second)
	s.FirstToken(now, "cold2", time.Second)
	s.Pass(now)
	expect(t, "reason", string(why(s, now, held)), string(HoldProtect))
	// Nobody is patient for ever.
	expect(t, "after patience", pass(s, now.Add((patience+1)*time.Second)), held+"@w")
}

// What a tenant of another model got does not make one poor, who may do what harms
// those that wait for the same workers.
func TestPoorOnlyBesideRivals(t *testing.T) {
	s := busyWorker(t)
	now := at(time.Minute)
	other := candidates("v", 90_000, 0, nil)
	other[0].Group = "other"
	enter(t, s, now, Request{ID: "hog", Tenant: "rich"}, slices.Clone(other))
	s.Pass(now)
	enter(t, s, now, Request{ID: "more", Tenant: "rich"}, other)
	s.tenants.of("rich", 1).vtc = 1000
	c := func(name, worker string) []Candidate {
		c := candidates(worker, 1050, 100, chain(name, 10))
		c[0].TotalBlocks = 44
		return c
	}
	enter(t, s, now, Request{ID: "long"}, candidates("elsewhere", 90_000, 0, nil))
	s.Pass(now)
	enter(t, s, now, Request{ID: "again"}, c("old", "elsewhere"))
	s.Pass(now)
	enter(t, s, now, Request{ID: "cold"}, c("cold", "w"))
	enter(t, s, now, Request{ID: "cold2"}, c("dloc", "w"))
	gone, held := pass(s, now), "cold2"
	if strings.Contains(gone, "cold2") {
		held = "cold"
	}
	s.FirstToken(now, "cold", time.Second)
	s.FirstToken(now, "cold2", time.Second)
	expect(t, "both would evict what waits", pass(s, now), "")
	expect(t, "reason", string(why(s, now, held)), string(HoldProtect))
}

func TestReservesForWhoWaitsLong(t *testing.T) {
	run := func(o Objective) string {
		s := newScheduler(t, Settings{})
		c := func(name string, tokens int) []Candidate {
			c := candidates("w", tokens, 100, chain(name, tokens/100))
			c[0].TotalBlocks = 40
			return c
		}
		enter(t, s, start, Request{ID: "first"}, c("f", 2000))
		s.Pass(start)
		s.FirstToken(at(2*time.Second), "first", 2*time.Second)
		// The big one needs more pages than there are while the first one runs.
		enter(t, s, at(2*time.Second), Request{ID: "big", Objective: o}, c("b", 3000))
		s.Pass(at(2 * time.Second))
		now := at(2*time.Second + 40*time.Second)
		enter(t, s, now, Request{ID: "small"}, c("s", 200))
		return pass(s, now)
	}
	expect(t, "balanced", run(Balanced), "")
	expect(t, "throughput", run(Throughput), "small@w")
}

// What hits overtakes what does not, unless that waits for long.
func TestOrderOfTheLine(t *testing.T) {
	s := newScheduler(t, Settings{})
	enter(t, s, start, Request{ID: "now"}, candidates("w", 9000, 0, nil))
	s.Pass(start)
	place := func(now time.Time) string {
		s.Pass(now)
		var ids []string
		for i, x := range s.Line(now) {
			if x.Ahead != i {
				t.Errorf("%s has %d ahead of it at place %d", x.ID, x.Ahead, i)
			}
			ids = append(ids, x.ID)
		}
		return strings.Join(ids, " ")
	}
	enter(t, s, start, Request{ID: "cold"}, candidates("w", 1000, 0, nil)) // 1.01 s: as if it came 5 s later
	enter(t, s, at(time.Second), Request{ID: "hit"}, candidates("w", 10, 0, nil))
	expect(t, "overtaken", place(at(time.Second)), "hit cold")
	enter(t, s, at(8*time.Second), Request{ID: "late"}, candidates("w", 10, 0, nil))
	expect(t, "but not by all", place(at(8*time.Second)), "hit cold late")
}

func TestTenantsShare(t *testing.T) {
	served := func(weights ...float64) map[string]int {
		s := newScheduler(t, Settings{})
		names := []string{"flood", "light"}
		n := 0
		add := func(now time.Time, tenant int) {
			n++
			enter(t, s, now, Request{ID: fmt.Sprintf("%s-%d", names[tenant], n), Tenant: names[tenant], Weight: weights[tenant]}, candidates("w", 500, 0, nil))
		}
		for range 50 {
			add(start, 0)
		}
		for range 50 {
			add(start, 1)
		}
		count := map[string]int{}
		now := start
		for i := 0; i < 30; {
			for _, d := range s.Pass(now) {
				count[strings.Split(d.ID, "-")[0]]++
				i++
			}
			now, _ = s.Wake(now)
		}
		return count
	}
	if c := served(1, 1); c["light"] < 14 || c["light"] > 16 {
		t.Errorf("equal weights: %v", c)
	}
	if c := served(1, 2); c["light"] < 19 || c["light"] > 21 {
		t.Errorf("twice the weight: %v", c)
	}
}

// Who rests saves up nothing: after a pause a tenant gets its share, not all.
func TestNobodySavesUp(t *testing.T) {
	s := newScheduler(t, Settings{})
	join := func(name string) *waiter {
		x := &waiter{r: Request{Tenant: name, Weight: 1}, best: -1}
		s.candidates(1, x, candidates("w", 100, 0, nil))
		s.join(1, x)
		s.waiters = append(s.waiters, x)
		return x
	}
	a := join("a")
	s.tenants.charge(a.tenant, 100)
	b := join("b")
	if b.tenant.vtc != 100 {
		t.Errorf("b begins at %v beside a at 100", b.tenant.vtc)
	}
	s.waiters = nil
	s.tenants.leave(a.tenant)
	s.tenants.leave(b.tenant)
	s.tenants.charge(b.tenant, 50)
	if c := join("c"); c.tenant.vtc < 100 {
		t.Errorf("c begins at %v when nobody waits", c.tenant.vtc)
	}
	for i := range 2 * maxTenants {
		s.tenants.leave(join(fmt.Sprint(i)).tenant)
		s.waiters = nil
	}
	if len(s.tenants.known) > maxTenants {
		t.Errorf("%d tenants are known", len(s.tenants.known))
	}
}

// A tenant whose batch work, or whose model, gets no turn has got nothing for long.
// A newcomer does not begin there: it would be served alone for as long.
func TestNewcomerBesideOneThatStarves(t *testing.T) {
	for name, starves := range map[string]struct {
		r      Request
		worker string
	}{
		"batch":         {Request{QoS: Batch}, "w"},
		"another model": {Request{}, "v"},
	} {
		t.Run(name, func(t *testing.T) {
			s := newScheduler(t, Settings{})
			n, now := 0, start
			add := func(count int, r Request, worker string, tokens int) {
				for range count {
					n++
					r.ID = fmt.Sprintf("%s-%d", r.Tenant, n)
					c := candidates(worker, tokens, 0, nil)
					c[0].Group = worker
					enter(t, s, now, r, c)
				}
			}
			add(1, Request{Tenant: "hog"}, "v", 500_000) // its worker takes nothing else for long
			s.Pass(now)
			add(100, Request{Tenant: "flood"}, "w", 500)
			starves.r.Tenant = "starves"
			add(1, starves.r, starves.worker, 500)
			served := func(most int) map[string]int {
				count := map[string]int{}
				for range most {
					for _, d := range s.Pass(now) {
						count[strings.Split(d.ID, "-")[0]]++
						s.FirstToken(now.Add(500*ms), d.ID, 500*ms)
						s.Done(now.Add(500*ms), d.ID, Outcome{OK: true, CachedTokens: -1})
					}
					now = now.Add(500 * ms)
				}
				return count
			}
			if c := served(40); c["flood"] != 40 {
				t.Fatalf("at first: %v", c)
			}
			add(40, Request{Tenant: "new"}, "w", 500)
			if c := served(20); c["new"] < 9 || c["new"] > 11 {
				t.Errorf("with a newcomer: %v", c)
			}
		})
	}
}

// Batch neither hurts nor starves (user pain 40).
func TestClasses(t *testing.T) {
	s := newScheduler(t, Settings{})
	c := func() []Candidate { return candidates("w", 100, 0, nil) }
	enter(t, s, start, Request{ID: "now"}, candidates("w", 1000, 0, nil))
	s.Pass(start)
	enter(t, s, start, Request{ID: "later", QoS: Deferrable}, c())
	enter(t, s, start, Request{ID: "batch", QoS: Batch}, c())
	enter(t, s, at(900*ms), Request{ID: "chat", QoS: Interactive}, c())
	expect(t, "interactive first", pass(s, at(900*ms)), "chat@w")
	expect(t, "then batch", pass(s, at(980*ms)), "batch@w")
	enter(t, s, at(980*ms), Request{ID: "huge"}, candidates("v", 100000, 0, nil))
	s.Pass(at(980 * ms))
	enter(t, s, at(980*ms), Request{ID: "waits"}, candidates("v", 100, 0, nil))
	for _, id := range []string{"now", "chat", "batch"} {
		s.FirstToken(at(1200*ms), id, time.Second)
	}
	expect(t, "somebody waits", pass(s, at(1200*ms)), "")
	expect(t, "reason", string(why(s, at(1200*ms), "later")), string(HoldDefer))
	s.Leave(at(1200*ms), "waits")
	expect(t, "nothing else waits", pass(s, at(1200*ms)), "later@w")

	// After ten minutes batch is in its turn.
	x := &waiter{r: Request{QoS: Batch}, entered: 1}
	for age, want := range map[float64]int{0: 1, batchLimit - 1: 1, batchLimit: 0} {
		if got := x.class(1 + age); got != want {
			t.Errorf("batch that waited %v s is of class %d, want %d", age, got, want)
		}
	}
}

func TestDeferrableTakesAnIdleWorker(t *testing.T) {
	s := newScheduler(t, Settings{})
	enter(t, s, start, Request{ID: "a"}, candidates("v", 90000, 0, nil))
	s.Pass(start)
	enter(t, s, start, Request{ID: "b"}, candidates("v", 100, 0, nil))
	enter(t, s, start, Request{ID: "later", QoS: Deferrable}, candidates("v w", 100, 0, nil))
	expect(t, "idle", pass(s, start), "later@w")
}

func TestLineIsBounded(t *testing.T) {
	s := newScheduler(t, Settings{MaxWaiting: 3, MaxWait: 10 * time.Second})
	c := func(tokens int) []Candidate { return candidates("w", tokens, 0, nil) }
	enter(t, s, start, Request{ID: "now"}, c(4000))
	s.Pass(start)
	enter(t, s, start, Request{ID: "a"}, c(4000))
	s.Pass(start)
	enter(t, s, start, Request{ID: "b"}, c(4000))
	s.Pass(start)
	// Two of 4.04 s and the rest of the first are before this one.
	err := s.Enter(start, Request{ID: "c"}, c(4000), nil)
	var full *LineFullError
	if !errors.As(err, &full) || full.Waiting != 2 || full.Wait < 11*time.Second || full.Wait > 13*time.Second || full.RetryAfter < time.Second || full.RetryAfter > 3*time.Second {
		t.Errorf("got %v %+v", err, full)
	}
	// It is true: then there is a place.
	later := start.Add(full.RetryAfter + 10*ms)
	enter(t, s, later, Request{ID: "c"}, c(4000))
	enter(t, s, later, Request{ID: "c"}, c(4000)) // replaces itself
	err = s.Enter(later, Request{ID: "d"}, c(1), nil)
	if !errors.As(err, &full) || full.Waiting != 3 || full.Wait != 0 || full.RetryAfter <= 0 {
		t.Errorf("got %v", err)
	}
	if err := s.Enter(later, Request{}, nil, nil); err == nil || errors.As(err, &full) && full.Waiting == 0 {
		t.Errorf("without ID: %v", err)
	}
	if n := s.Waits(); n != 3 {
		t.Errorf("%d wait", n)
	}
}

// A request that leaves the line leaves no trace.
func TestLeaveLeavesNoTrace(t *testing.T) {
	s := newScheduler(t, Settings{})
	enter(t, s, start, Request{ID: "now"}, candidates("w", 9000, 100, chain("n", 90)))
	s.Pass(start)
	for i := range 5 {
		enter(t, s, start, Request{ID: fmt.Sprint(i), Tenant: fmt.Sprint("t", i)}, candidates("w", 900, 100, chain("abcdefghi", 9)))
	}
	s.Pass(start)
	for _, x := range s.waiters {
		s.claim(x)
	}
	if len(s.claims) != 9 {
		t.Errorf("%d blocks are claimed, want 9", len(s.claims))
	}
	for i := range 5 {
		s.Leave(start, fmt.Sprint(i))
		s.Leave(start, fmt.Sprint(i))
	}
	checkLine(t, s)
	if len(s.waiters)+len(s.byID)+len(s.claims)+s.workers["w"].held != 0 {
		t.Errorf("left: %d waiters, %d ids, %d claims, held %d", len(s.waiters), len(s.byID), len(s.claims), s.workers["w"].held)
	}
	s.Done(at(time.Second), "now", Outcome{})
	if in, _ := s.Totals(); in != 0 {
		t.Errorf("%d in flight", in)
	}
}

func TestPoliciesChooseInTheLine(t *testing.T) {
	only := func(workers ...string) Choose {
		return func(e []Estimate, rank func([]int)) ([]int, bool) {
			var order []int
			for i := range e {
				if slices.Contains(workers, e[i].Worker) {
					order = append(order, i)
				}
			}
			rank(order)
			return order, true
		}
	}
	prefer := func(worker string) Choose {
		return func(e []Estimate, rank func([]int)) ([]int, bool) {
			order, _ := rankAll(e, rank)
			i := slices.IndexFunc(order, func(i int) bool { return e[i].Worker == worker })
			rotate(order, i)
			return order, true
		}
	}
	c := func() []Candidate { return candidates("a b", 1000, 0, nil) }
	s := newScheduler(t, Settings{})
	in := func(id string, choose Choose) {
		t.Helper()
		if err := s.Enter(start, Request{ID: id}, c(), choose); err != nil {
			t.Fatal(err)
		}
	}
	in("1", only("a"))
	expect(t, "only a", pass(s, start), "1@a")
	in("2", only("a"))
	expect(t, "a is busy", pass(s, start), "")
	in("3", prefer("a"))
	expect(t, "a is preferred", pass(s, start), "")
	in("4", nil)
	expect(t, "b is free", pass(s, start), "4@b")
	in("5", func([]Estimate, func([]int)) ([]int, bool) { return nil, false })
	expect(t, "refused", pass(s, start), "5@nowhere")
	free := false
	in("6", func(e []Estimate, rank func([]int)) ([]int, bool) {
		if !free {
			return nil, true
		}
		return rankAll(e, rank)
	})
	expect(t, "told to wait", pass(s, at(2*time.Second)), "2@a")
	free = true
	expect(t, "still", pass(s, at(2*time.Second)), "")
	s.Refresh(at(2*time.Second), "6", c(), nil)
	expect(t, "no more", pass(s, at(2*time.Second)), "6@b")
	// The word of the newest call holds.
	in("7", only("a"))
	s.Pass(at(2 * time.Second))
	s.Refresh(at(2*time.Second), "7", c(), only("b"))
	s.FirstToken(at(2500*ms), "4", time.Second)
	s.FirstToken(at(2500*ms), "6", 500*ms)
	expect(t, "changed", pass(s, at(2500*ms)), "7@b")
	checkLine(t, s)
}

func TestNoCandidates(t *testing.T) {
	s := newScheduler(t, Settings{})
	enter(t, s, start, Request{ID: "r"}, nil)
	d := s.Pass(start)
	if len(d) != 1 || d[0].Booked || len(d[0].Decision.Order) != 0 {
		t.Errorf("got %+v", d)
	}
}

// Requests in line do not go to a worker that is gone.
func TestForgottenWorkerInLine(t *testing.T) {
	s := newScheduler(t, Settings{})
	enter(t, s, start, Request{ID: "a"}, candidates("w", 1000, 0, nil))
	s.Pass(start)
	enter(t, s, start, Request{ID: "b"}, candidates("w", 1000, 0, nil))
	s.Pass(start)
	s.Forget("w")
	s.Done(start, "a", Outcome{})
	expect(t, "gone", pass(s, at(9*time.Second)), "")
	s.Refresh(at(9*time.Second), "b", candidates("v", 1000, 0, nil), nil)
	expect(t, "another one", pass(s, at(9*time.Second)), "b@v")
	checkLine(t, s)
}

// Objectives decide what a stalled decoder counts.
func TestObjectives(t *testing.T) {
	choice := func(o Objective) string {
		s := newScheduler(t, Settings{})
		for i := range 4 { // four decode at a, which has half of the prompt
			id := fmt.Sprint(i)
			s.Decide(start, Request{ID: id}, candidates("a", 10, 100, nil))
			s.FirstToken(start, id, 10*ms)
		}
		c := candidates("a b", 2000, 100, chain("p", 20))
		c[0].GPUTokens = 500
		enter(t, s, at(time.Second), Request{ID: "r", Objective: o}, c)
		return pass(s, at(time.Second))
	}
	expect(t, "ttft", choice(TTFT), "r@a")
	expect(t, "balanced", choice(Balanced), "r@b") // 1.5 s of 4 stalled decoders count 0.6 s, the hit saves 0.5 s
	expect(t, "throughput", choice(Throughput), "r@b")
}

// All policies but K2 dispatch at once, in order of arrival.
func TestOtherPoliciesHoldNothing(t *testing.T) {
	for _, p := range Policies() {
		if p == K2 {
			continue
		}
		s := newScheduler(t, Settings{Policy: p})
		for i := range 20 {
			enter(t, s, start, Request{ID: fmt.Sprint(i)}, candidates("a b", 5000, 0, nil))
		}
		d := s.Pass(start)
		if len(d) != 20 || s.Waits() != 0 {
			t.Fatalf("%s: %d of 20 went", p, len(d))
		}
		for i := range d {
			if d[i].ID != fmt.Sprint(i) || !d[i].Booked {
				t.Errorf("%s: %s went as number %d", p, d[i].ID, i)
			}
		}
	}
}

// An adapter that must be loaded costs time.
func TestAdapterResidency(t *testing.T) {
	s := newScheduler(t, Settings{Speeds: DefaultSpeeds()})
	c := candidates("a b", 100, 16, nil)
	c[0].NoAdapter = true
	enter(t, s, start, Request{ID: "r"}, c)
	expect(t, "loaded", pass(s, start), "r@b")
}

// A fleet that runs faster does not make messages faster.
func TestHorizonAndTimeScale(t *testing.T) {
	if s := newScheduler(t, Settings{}); s.horizon != 0.15 || s.slack != 0.02 {
		t.Errorf("got %v and %v", s.horizon, s.slack)
	}
	if s := newScheduler(t, Settings{TimeScale: 20}); s.horizon != 0.6 || s.slack != 0.4 {
		t.Errorf("got %v and %v", s.horizon, s.slack)
	}
}

// A worker that decodes does not idle while a prompt is on its way: nothing goes
// there before the prefill ahead is as good as done.
func TestHoldsLongerForAWorkerThatDecodes(t *testing.T) {
	s := newScheduler(t, Settings{})
	enter(t, s, start, Request{ID: "decodes"}, candidates("w", 100, 0, nil))
	s.Pass(start)
	s.FirstToken(start, "decodes", 110*ms)
	enter(t, s, start, Request{ID: "a"}, candidates("w", 1000, 0, nil))
	expect(t, "nothing ahead", pass(s, start), "a@w")
	enter(t, s, start, Request{ID: "b"}, candidates("w", 1000, 0, nil))
	ends := at(time.Duration(s.workers["w"].queue(s.clock(start)) * float64(time.Second)))
	expect(t, "150 ms before the end", pass(s, ends.Add(-149*ms)), "")
	expect(t, "21 ms before it", pass(s, ends.Add(-21*ms)), "")
	if wake, ok := s.Wake(ends.Add(-21 * ms)); !ok || ends.Sub(wake).Round(ms) != 20*ms {
		t.Errorf("wake %v before the end, %v", ends.Sub(wake), ok)
	}
	expect(t, "20 ms before it", pass(s, ends.Add(-19*ms)), "b@w")
}

// Who waits behind whom shows in the predicted waits, and they come true.
func TestPredictedWaits(t *testing.T) {
	s := newScheduler(t, Settings{})
	enter(t, s, start, Request{ID: "decodes"}, candidates("w", 100, 0, nil))
	s.Pass(start)
	s.FirstToken(start, "decodes", 110*ms)
	enter(t, s, start, Request{ID: "now"}, candidates("w", 6000, 0, nil))
	s.Pass(start)
	for i := range 4 {
		enter(t, s, start, Request{ID: fmt.Sprint(i)}, candidates("w", 2000, 0, nil))
	}
	s.Pass(start)
	line := s.Line(start)
	for i, x := range line {
		if want := time.Duration(6066+2022*i-20) * ms; x.Wait.Round(10*ms) != want.Round(10*ms) || x.TTFT.Round(10*ms) != (want+2042*ms).Round(10*ms) || x.Why != HoldQueue || x.Ahead != i {
			t.Errorf("%+v, want a wait of %v", x, want)
		}
	}
	running, prefill := "now", 6066*ms
	for i := range 4 {
		wake := start.Add(line[i].Wait)
		expect(t, "not before", pass(s, wake.Add(-20*ms)), "")
		goes := wake.Add(time.Duration(20+20*i) * ms) // decoders stretch prefills
		expect(t, "in its turn", pass(s, goes), fmt.Sprint(i, "@w"))
		s.FirstToken(goes, running, prefill)
		running, prefill = fmt.Sprint(i), 2022*ms
	}
}

// A request that enters again keeps its age.
func TestArrivedBefore(t *testing.T) {
	s := newScheduler(t, Settings{})
	enter(t, s, start, Request{ID: "now"}, candidates("w", 6000, 0, nil))
	s.Pass(start)
	enter(t, s, at(2*time.Second), Request{ID: "new"}, candidates("w", 100, 0, nil))
	enter(t, s, at(3*time.Second), Request{ID: "old", Arrived: at(time.Second)}, candidates("w", 100, 0, nil))
	s.Pass(at(3 * time.Second))
	line := s.Line(at(3 * time.Second))
	if line[0].ID != "old" || !line[0].Since.Equal(at(time.Second)) {
		t.Errorf("got %+v", line)
	}
}

// Policies see what a request would wait in line, and how many wait for a worker; a
// worker that can begin at once is not touched by that.
func TestPoliciesSeeTheLine(t *testing.T) {
	s := newScheduler(t, Settings{})
	if got := s.InLine(); len(got) != 0 {
		t.Errorf("in line: %v", got)
	}
	for i := range 4 { // 1.01 s each, one of them begins
		enter(t, s, start, Request{ID: fmt.Sprint(i)}, candidates("w", 1000, 100, nil))
		s.Pass(start)
	}
	if got := s.InLine(); len(got) != 1 || got["w"] != 3 {
		t.Errorf("in line: %v", got)
	}
	both := append(candidates("w", 1000, 100, nil), candidates("free", 3000, 100, nil)...)
	var seen []Estimate
	err := s.Enter(start, Request{ID: "x"}, both, func(e []Estimate, rank func([]int)) ([]int, bool) {
		seen = slices.Clone(e)
		order := []int{0} // the policy wants this one
		rank(order)
		return order, true
	})
	if err != nil {
		t.Fatal(err)
	}
	s.Pass(start)
	if len(seen) != 2 || seen[0].Hold != HoldQueue || seen[0].TTFT < 5*time.Second || seen[0].TTFT > 5200*ms || seen[0].TTFT != seen[0].Wait+seen[0].Prefill {
		t.Errorf("behind four: %+v", seen[0])
	}
	if seen[1].Hold != HoldNone || seen[1].Wait != 0 || seen[1].TTFT > 3100*ms {
		t.Errorf("idle: %+v", seen[1])
	}
	if got := s.InLine(); got["w"] != 4 {
		t.Errorf("in line: %v", got)
	}
}
