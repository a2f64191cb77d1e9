package schedule

import (
	"fmt"
	"math"
	"strings"
	"testing"
	"time"
)

const second = time.Second

// gossip brings what one router did to another, late by delay.
func gossip(from, to *Scheduler, name string, now time.Time, delay time.Duration) {
	to.Remote(now.Add(delay), name, now, from.Deltas(now))
}

func twoRouters(t testing.TB) (a, b *Scheduler) {
	a, b = newScheduler(t, Settings{}), newScheduler(t, Settings{})
	for _, s := range []*Scheduler{a, b} {
		s.Deltas(start)                                           // begins to listen
		s.Decide(start, Request{}, candidates("u v", 10, 0, nil)) // knows the workers
	}
	return a, b
}

// What one router has sent to a worker counts for the other as if it had sent it.
func TestRoutersKnowOfEachOther(t *testing.T) {
	a, b := twoRouters(t)
	p := chain("p", 20)
	a.Decide(start, Request{ID: "r"}, candidates("u", 2000, 100, p))
	gossip(a, b, "a", start, 50*ms)
	d := b.Decide(at(50*ms), Request{}, candidates("u v", 2000, 100, p))
	// Anticipated, and behind its prefill of 2.02 s.
	if e := d.Estimates[0]; e.Anticipated != 1900 || e.InFlight != 1 || e.Wait < 1900*ms || e.Wait > 2020*ms {
		t.Errorf("got %d anticipated, %d in flight, wait %v", e.Anticipated, e.InFlight, e.Wait)
	}
	if b.InFlight("u") != 0 {
		t.Error("counts another router's request as its own")
	}
	a.FirstToken(at(second), "r", second)
	gossip(a, b, "a", at(second), 50*ms)
	if e := b.Decide(at(1050*ms), Request{}, candidates("u", 2000, 100, p)).Estimates[0]; e.Wait > 50*ms || e.InFlight != 1 {
		t.Errorf("after its first token: wait %v, %d in flight", e.Wait, e.InFlight)
	}
	a.Done(at(2*second), "r", Outcome{OK: true, CachedTokens: -1})
	gossip(a, b, "a", at(2*second), 50*ms)
	if in, _ := b.Totals(); in != 0 {
		t.Errorf("%d in flight at the end", in)
	}
	if d := b.Deltas(at(3 * second)); len(d) != 0 {
		t.Errorf("passes on what it heard: %+v", d)
	}
	checkLine(t, b)
}

// What comes late is left to the gauges; its end does no harm.
func TestLateGossipIsIgnored(t *testing.T) {
	a, b := twoRouters(t)
	a.Decide(start, Request{ID: "r"}, candidates("u", 2000, 100, nil))
	gossip(a, b, "a", start, 310*ms)
	if in, _ := b.Totals(); in != 0 {
		t.Error("booked")
	}
	a.FirstToken(at(second), "r", second)
	a.Done(at(2*second), "r", Outcome{})
	gossip(a, b, "a", at(2*second), second)
	checkLine(t, b)
}

// A router that is gone leaves nothing, whether it says goodbye or not.
func TestRouterGone(t *testing.T) {
	a, b := twoRouters(t)
	for i := range 4 {
		a.Decide(start, Request{ID: fmt.Sprint(i)}, candidates("u", 2000, 100, nil))
	}
	gossip(a, b, "a", start, 0)
	b.Remote(start, "c", start, []Delta{{Kind: Routed, ID: "0", At: start, Worker: "u", Tokens: 10, Work: second}})
	if in, _ := b.Totals(); in != 5 {
		t.Fatalf("%d in flight", in)
	}
	// The gauges show two, of which one is the other router's.
	b.Sample(at(20*second), "u", Load{Known: true, Running: 2})
	if in, _ := b.Totals(); in != 2 {
		t.Errorf("%d in flight, the gauges say 2", in)
	}
	b.Gone(at(20*second), "a")
	b.Gone(at(20*second), "c")
	if in, _ := b.Totals(); in != 0 {
		t.Errorf("%d in flight", in)
	}
	checkLine(t, b)
}

// Nonsense from another router is ignored.
func TestGarbledGossip(t *testing.T) {
	_, b := twoRouters(t)
	good := Delta{Kind: Routed, ID: "x", At: start, Worker: "u", Tokens: 1000, BlockSize: 100, Hashes: chain("p", 10), Stride: 1, Work: second, TTFT: second}
	for name, change := range map[string]func(*Delta){
		"worker":   func(d *Delta) { d.Worker = "nobody" },
		"tokens":   func(d *Delta) { d.Tokens = -1 },
		"work":     func(d *Delta) { d.Work = -second },
		"stride":   func(d *Delta) { d.Stride = 3 },
		"negative": func(d *Delta) { d.Stride = -4 },
		"hashes":   func(d *Delta) { d.Hashes = chain("p", maxTold+1) },
		"kind":     func(d *Delta) { d.Kind = 77 },
	} {
		d := good
		change(&d)
		b.Remote(start, "a", start, []Delta{d})
		if in, _ := b.Totals(); in != 0 {
			t.Errorf("%s: booked", name)
		}
	}
	many := good
	many.Tokens = 100 // fewer than it has blocks
	b.Remote(start, "a", start, []Delta{many})
	if e := b.Decide(start, Request{}, candidates("u", 1000, 100, chain("p", 10))).Estimates[0]; e.Anticipated != 0 || e.InFlight != 1 {
		t.Errorf("got %+v", e)
	}
	checkLine(t, b)
}

func TestDeltasAreBounded(t *testing.T) {
	s := newScheduler(t, Settings{})
	s.Decide(start, Request{ID: "r"}, candidates("u", 10, 0, nil))
	if d := s.Deltas(start); len(d) != 0 {
		t.Error("tells what was before anybody asked")
	}
	for range 2 * maxDeltas {
		s.Decide(start, Request{ID: "r"}, candidates("u", 10, 0, nil))
	}
	if len(s.deltas) > maxDeltas {
		t.Errorf("%d deltas are kept", len(s.deltas))
	}
	s.Deltas(start)
	long := chain("p", 5000)
	s.Decide(start, Request{ID: "r"}, candidates("u", 500_009, 100, long))
	for _, d := range s.Deltas(start) {
		if len(d.Hashes) > maxTold || d.Kind == Routed && len(d.Hashes)*d.Stride < 4000 {
			t.Errorf("%d hashes with a stride of %d", len(d.Hashes), d.Stride)
		}
	}
}

// A late joiner believes the others and is right at once (user pain 9).
func TestLateJoinerLearns(t *testing.T) {
	a, b := twoRouters(t)
	now := start
	for i := range 60 { // u takes twice as long as it should
		for _, w := range []string{"u", "v"} {
			id := fmt.Sprint(w, i)
			a.Decide(now, Request{ID: id}, candidates(w, 1000, 0, nil))
			took := 1010 * ms
			if w == "u" {
				took = 2020 * ms
			}
			a.FirstToken(now.Add(took), id, took)
			a.Done(now.Add(took), id, Outcome{OK: true, CachedTokens: -1})
		}
		now = now.Add(10 * second)
	}
	b.Learn(now, "a", a.Calibration())
	for _, s := range []*Scheduler{a, b} {
		d := s.Decide(now, Request{}, candidates("u v", 1000, 0, nil))
		if r := d.Estimates[0].Slowness / d.Estimates[1].Slowness; r < 1.6 || r > 2.4 {
			t.Errorf("u is %v times as slow as v: %v", r, d.Estimates)
		}
	}
	b.Learn(now, "c", map[string]Learned{"u": {Slowness: math.NaN(), Samples: 9}, "v": {Slowness: -1, Samples: 9, Reuse: 7, Hits: 3}, "nobody": {Slowness: 1, Samples: 1}})
	if e := b.Decide(now, Request{}, candidates("u v", 1000, 0, nil)); !(e.Estimates[0].TTFT > 0 && e.Estimates[1].TTFT > 0) {
		t.Errorf("nonsense was learned: %+v", e.Estimates)
	}
}

// What a map holds is learned, and who is gone is removed, in one order: sums of
// floats round by it, and decisions must be the same each time.
func TestMapsDoNotDecide(t *testing.T) {
	run := func() string {
		s := newScheduler(t, Settings{})
		names := strings.Fields("a b c d e f g h")
		s.Decide(start, Request{}, candidates(strings.Join(names, " "), 10, 0, nil))
		known := map[string]Learned{}
		for i, name := range names {
			known[name] = Learned{Slowness: 0.3 + 0.1*float64(i), Samples: 9}
			d := Delta{Kind: Routed, ID: name, At: start, Worker: "a", Tokens: 100, Work: time.Duration(i*i+1) * 1234567, TTFT: second}
			s.Remote(start, "other", start, []Delta{d})
		}
		s.Decide(start, Request{ID: "own"}, candidates("a", 100, 0, nil))
		s.Learn(start, "other", known)
		s.Gone(start, "other")
		w := s.workers["a"]
		return fmt.Sprint(w.group.logS, w.work, w.recent)
	}
	want := run()
	for range 50 {
		if got := run(); got != want {
			t.Fatalf("got %s, then %s", want, got)
		}
	}
}

// Replicas that tell each other spread what comes at once (user pains 14, 18).
func TestReplicasSpreadTogether(t *testing.T) {
	const n = 4
	var routers []*Scheduler
	for range n {
		s := newScheduler(t, Settings{})
		s.Deltas(start)
		s.Decide(start, Request{}, candidates("a b c d", 10, 0, nil))
		routers = append(routers, s)
	}
	count := map[string]int{}
	for i := range 80 {
		now := at(time.Duration(i) * 60 * ms)
		from := i % n
		c := candidates("a b c d", 1000, 100, chain(fmt.Sprint("abcdefghijklm"[i%13:]), 10))
		for j := range c {
			c[j].Load = Load{Known: true, Age: time.Duration(i%40) * 50 * ms} // two seconds old at most
		}
		count[first(routers[from].Decide(now, Request{ID: fmt.Sprint(i)}, c))]++
		d := routers[from].Deltas(now)
		for to := range routers {
			if to != from {
				routers[to].Remote(now.Add(50*ms), fmt.Sprint(from), now, d)
			}
		}
	}
	for _, w := range []string{"a", "b", "c", "d"} {
		if count[w] < 12 || count[w] > 28 {
			t.Errorf("not spread: %v", count)
			break
		}
	}
}

// A router counts those that wait at another one among those that want a worker,
// and protects their blocks, until it hears that they left, or nothing for a while.
func TestRoutersKnowWhoWaitsElsewhere(t *testing.T) {
	hit := func() []Candidate {
		c := candidates("w", 1050, 100, chain("old", 10))
		c[0].TotalBlocks, c[0].GPUTokens = 44, 1000
		return c
	}
	wants := func(s *Scheduler, now time.Time) time.Duration {
		return s.Decide(now, Request{}, candidates("w", 2000, 0, nil)).Estimates[0].Interference
	}
	set := func() (a, b *Scheduler) {
		a, b = newScheduler(t, Settings{}), busyWorker(t)
		a.Deltas(at(time.Minute)) // somebody listens
		b.Decide(at(time.Minute), Request{}, hit())
		enter(t, a, at(time.Minute), Request{ID: "long"}, candidates("w", 9000, 0, nil))
		a.Pass(at(time.Minute))
		a.Deltas(at(time.Minute)) // leave the long one to the gauges
		enter(t, a, at(time.Minute), Request{ID: "again"}, hit())
		expect(t, "it waits", pass(a, at(time.Minute)), "")
		return a, b
	}
	now := at(time.Minute)

	a, b := set()
	alone := wants(b, now)
	gossip(a, b, "a", now, 0)
	if d := wants(b, now) - alone; d < 1900*ms || d > 2200*ms {
		t.Errorf("one that waits elsewhere would be delayed by %v, want its 2 s", d)
	}
	checkLine(t, b)
	a.Leave(now, "again")
	gossip(a, b, "a", now, 0)
	if d := wants(b, now); d != alone {
		t.Errorf("after it left: %v, want %v", d, alone)
	}
	checkLine(t, b)

	a, b = set()
	gossip(a, b, "a", now, 0)
	for range 3 {
		now = now.Add(2 * second)
		a.Pass(now)
		gossip(a, b, "a", now, 0)
		b.Pass(now)
	}
	if len(b.waits) != 1 {
		t.Error("forgot one of which it hears")
	}
	b.Pass(now.Add(6 * second))
	if len(b.waits) != 0 {
		t.Error("remembers one of which it hears no more")
	}
	checkLine(t, b)

	for _, end := range []func(b *Scheduler){
		func(b *Scheduler) { b.Gone(now, "a") },
		func(b *Scheduler) { b.Forget("w") },
		func(b *Scheduler) { b.Remote(now, "a", now, []Delta{{Kind: Ended, ID: "again"}}) },
		func(b *Scheduler) {
			b.Remote(now, "a", now, []Delta{{Kind: Routed, ID: "again", At: now, Worker: "w"}})
		},
		func(b *Scheduler) { b.Remote(now, "a", now, []Delta{{Kind: Waits, ID: "again", Worker: "nobody"}}) },
	} {
		now = at(time.Minute)
		a, b = set()
		gossip(a, b, "a", now, 0)
		if end(b); len(b.waits) != 0 {
			t.Error("still waits")
		}
		checkLine(t, b)
	}
}

// What one router's request would evict is protected for the sake of another's.
func TestProtectsWhatOtherRoutersNeed(t *testing.T) {
	for _, told := range []bool{false, true} {
		s := busyWorker(t)
		now := at(time.Minute)
		cold := func(name string) []Candidate {
			c := candidates("w", 1050, 100, chain(name, 10))
			c[0].TotalBlocks = 44
			return c
		}
		s.Decide(now, Request{}, cold("other"))
		if told {
			p := thin(chain("old", 10), 2)
			s.Remote(now, "a", now, []Delta{{Kind: Waits, ID: "again", At: now, Worker: "w", Tokens: 1050, BlockSize: 100, Hashes: p.hashes, Stride: p.stride}})
		}
		enter(t, s, now, Request{ID: "cold"}, cold("cold"))
		enter(t, s, now, Request{ID: "cold2"}, cold("dloc"))
		s.Pass(now)
		s.FirstToken(now, "cold", second)
		s.FirstToken(now, "cold2", second)
		s.Pass(now)
		if in := s.Waits(); in != map[bool]int{true: 1}[told] {
			t.Errorf("told %v: %d wait", told, in)
		}
		checkLine(t, s)
	}
}

// A long line is told in part, and leaves room for what was routed.
func TestTellsLineInBounds(t *testing.T) {
	s := newScheduler(t, Settings{})
	s.Deltas(start)
	for i := range 2 * maxToldWaits {
		enter(t, s, start, Request{ID: fmt.Sprint(i)}, candidates("w", 9000, 0, nil))
	}
	s.Pass(start)
	if n := len(s.deltas); n != maxToldWaits+1 {
		t.Errorf("%d deltas, want one that was sent and %d that wait", n, maxToldWaits)
	}
	s.Pass(at(10 * ms))
	if n := len(s.deltas); n != maxToldWaits+1 {
		t.Errorf("told again at once: %d", n)
	}
	for i := range 100 {
		s.Pass(at(time.Duration(i) * 3 * second))
	}
	if n := len(s.deltas); n > maxDeltas/2+maxToldWaits {
		t.Errorf("%d deltas that nobody fetches", n)
	}
}
