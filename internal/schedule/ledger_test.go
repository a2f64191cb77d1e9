package schedule

import (
	"fmt"
	"math"
	"math/rand/v2"
	"sync"
	"testing"
	"time"
)

// A worker that comes and goes while requests are in flight keeps correct
// counters (llm-d-router 1739).
func TestFlappingWorker(t *testing.T) {
	s := newScheduler(t, Settings{})
	c := candidates("a", 1000, 100, nil)
	s.Decide(start, Request{ID: "1"}, c)
	s.Decide(start, Request{ID: "2"}, c)
	s.Forget("a")
	if got := s.InFlight("a"); got != 2 {
		t.Errorf("in flight after the worker went: %d, want 2", got)
	}
	s.Decide(start, Request{ID: "3"}, c) // it is back
	s.Done(start, "1", Outcome{})
	s.Done(start, "1", Outcome{})
	s.Done(start, "2", Outcome{})
	s.FirstToken(start, "2", time.Second)
	if got := s.InFlight("a"); got != 1 {
		t.Errorf("in flight: %d, want 1", got)
	}
	s.Forget("a")
	s.Done(start, "3", Outcome{})
	s.Done(start, "unknown", Outcome{})
	if got := s.InFlight("a"); got != 0 {
		t.Errorf("in flight: %d, want 0", got)
	}
	if len(s.workers) != 0 {
		t.Errorf("%d workers remain after they were forgotten", len(s.workers))
	}
}

func TestForgottenRequestsExpire(t *testing.T) {
	s := newScheduler(t, Settings{Lease: time.Minute})
	c := candidates("a", 1000, 100, nil)
	s.Decide(start, Request{ID: "silent"}, c)
	s.Decide(start, Request{ID: "streams"}, c)
	s.FirstToken(at(50*time.Second), "streams", time.Second)
	e := s.Decide(at(61*time.Second), Request{}, c).Estimates[0]
	if e.InFlight != 1 {
		t.Errorf("in flight %d, want 1", e.InFlight)
	}
	if n, expired := s.Totals(); n != 1 || expired != 1 {
		t.Errorf("in flight %d, expired %d; want 1, 1", n, expired)
	}
}

// Requests whose end nobody reports, because ingress died, leave the ledger when
// the engine's gauges show that they are gone, and no others do.
func TestLostRequestsLeave(t *testing.T) {
	for _, tt := range []struct {
		name          string
		running, wait float64
		progress      time.Duration // of another request; 0 for none
		after         time.Duration
		want          int
	}{
		{"idle engine", 0, 0, 40 * time.Second, 50 * time.Second, 0},
		{"too early to tell", 0, 0, 20 * time.Second, 30 * time.Second, 4},
		{"may be stuck", 0, 0, 20 * time.Second, 200 * time.Second, 4},
		{"stuck or idle for long", 0, 0, 0, 400 * time.Second, 0},
		{"two are gone", 1, 1, 40 * time.Second, 50 * time.Second, 2},
		{"all are there", 3, 1, 40 * time.Second, 50 * time.Second, 4},
		{"others are there too", 9, 9, 40 * time.Second, 50 * time.Second, 4},
		{"nonsense", math.NaN(), 0, 40 * time.Second, 50 * time.Second, 4},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := newScheduler(t, Settings{})
			c := candidates("a", 1000, 100, nil)
			for i := range 4 {
				s.Decide(start, Request{ID: fmt.Sprint(i)}, c)
			}
			s.FirstToken(at(time.Second), "2", time.Second)
			if tt.progress > 0 {
				s.Decide(at(tt.progress), Request{ID: "other"}, c)
				s.FirstToken(at(tt.progress), "other", time.Second)
				s.Done(at(tt.progress), "other", Outcome{OK: true})
			}
			c[0].Load = Load{Running: tt.running, Waiting: tt.wait, Known: true}
			if got := s.Decide(at(tt.after), Request{}, c).Estimates[0].InFlight; got != tt.want {
				t.Errorf("in flight %d, want %d", got, tt.want)
			}
			if n, expired := s.Totals(); n != tt.want || expired != 4-tt.want {
				t.Errorf("in flight %d, expired %d", n, expired)
			}
		})
	}
}

func TestLedgerIsBounded(t *testing.T) {
	s := newScheduler(t, Settings{MaxInFlight: 10})
	for i := range 1000 {
		s.Decide(start, Request{ID: fmt.Sprint(i)}, candidates("a b", 1000, 100, nil))
	}
	if n, expired := s.Totals(); n != 10 || expired != 990 {
		t.Errorf("in flight %d, expired %d; want 10, 990", n, expired)
	}
	for name, w := range s.workers {
		if len(w.recent) > maxRecent {
			t.Errorf("%s: %d recent requests", name, len(w.recent))
		}
	}
}

func TestRebookingReplaces(t *testing.T) {
	s := newScheduler(t, Settings{})
	s.Decide(start, Request{ID: "r"}, candidates("a", 1000, 100, nil))
	s.Decide(start, Request{ID: "r"}, candidates("b", 1000, 100, nil))
	if a, b := s.InFlight("a"), s.InFlight("b"); a != 0 || b != 1 {
		t.Errorf("in flight a %d, b %d; want 0, 1", a, b)
	}
	s.Moved(start, "r", "c")
	s.Moved(start, "r", "c")
	if b, c := s.InFlight("b"), s.InFlight("c"); b != 0 || c != 1 {
		t.Errorf("in flight b %d, c %d; want 0, 1", b, c)
	}
}

// Whatever callers do, in whatever order: counters are never negative and the
// ledger is empty when all requests are done.
func TestLedgerReturnsToZero(t *testing.T) {
	for seed := range uint64(20) {
		rng := rand.New(rand.NewPCG(seed, 0))
		s := newScheduler(t, Settings{Seed: seed, Policy: Policies()[seed%5], Lease: 20 * time.Minute})
		names := []string{"a", "b", "c", "d"}
		now := start
		for step := range 2000 {
			now = now.Add(time.Duration(rng.IntN(2000)) * time.Millisecond)
			id, name := fmt.Sprint(rng.IntN(50)), names[rng.IntN(len(names))]
			switch rng.IntN(8) {
			case 0, 1, 2:
				c := candidates("a b c d", 1+rng.IntN(9000), 100, chain(id, 1+rng.IntN(20)))
				for i := range c {
					c[i].GPUTokens = rng.IntN(9000)
					c[i].TotalBlocks = rng.IntN(500)
					c[i].Load = Load{Running: float64(rng.IntN(9)), Waiting: float64(rng.IntN(9)), KVUsage: rng.Float64(),
						Known: rng.IntN(3) > 0, Age: time.Duration(rng.IntN(4000)) * time.Millisecond}
				}
				s.Decide(now, Request{ID: id, MaxTokens: rng.IntN(1000)}, c[:1+rng.IntN(4)])
			case 3:
				s.Moved(now, id, name)
			case 4:
				s.FirstToken(now, id, time.Duration(rng.IntN(9000))*time.Millisecond)
			case 5, 6:
				s.Done(now, id, Outcome{OK: rng.IntN(2) == 0, CachedTokens: rng.IntN(9000) - 1, OutputTokens: rng.IntN(900)})
			case 7:
				if rng.IntN(2) == 0 {
					s.Forget(name)
				} else {
					s.Restarted(name)
				}
			}
			checkLedger(t, s, fmt.Sprintf("seed %d step %d", seed, step))
		}
		for i := range 50 {
			s.Done(now, fmt.Sprint(i), Outcome{OK: true})
		}
		for _, name := range names {
			if n := s.InFlight(name); n != 0 {
				t.Fatalf("seed %d: %s has %d in flight", seed, name, n)
			}
			if w := s.workers[name]; w != nil && (w.work != 0 || w.context != 0 || w.queue(1e9) != 0) {
				t.Fatalf("seed %d: %s: work %v, context %v", seed, name, w.work, w.context)
			}
		}
		if n, _ := s.Totals(); n != 0 || s.silent.Len() != 0 {
			t.Fatalf("seed %d: %d entries, %d in the list", seed, n, s.silent.Len())
		}
	}
}

func checkLedger(t *testing.T, s *Scheduler, when string) {
	t.Helper()
	booked := map[*worker]int{}
	for _, e := range s.entries {
		booked[e.w]++
	}
	total := 0
	for name, w := range s.workers {
		if w.inFlight() != booked[w] {
			t.Fatalf("%s: %s: %d in flight, %d booked", when, name, w.inFlight(), booked[w])
		}
		if w.work < -1e-6 || w.context < 0 || w.othersWaiting < 0 || w.othersRunning < 0 {
			t.Fatalf("%s: %s: negative: %+v", when, name, w)
		}
		total += w.inFlight()
	}
	if total != len(s.entries) || total != s.silent.Len() {
		t.Fatalf("%s: %d at workers, %d entries, %d in the list", when, total, len(s.entries), s.silent.Len())
	}
}

func TestConcurrentUse(t *testing.T) {
	s := newScheduler(t, Settings{})
	var wg sync.WaitGroup
	for g := range 4 {
		wg.Go(func() {
			for i := range 200 {
				id := fmt.Sprint(g, i)
				s.Decide(start, Request{ID: id}, candidates("a b c", 1000, 100, chain(id, 5)))
				s.FirstToken(start, id, time.Second)
				s.Workers()
				s.Done(start, id, Outcome{OK: true})
			}
		})
	}
	wg.Wait()
	if n, _ := s.Totals(); n != 0 {
		t.Errorf("%d in flight", n)
	}
}

// Nobody reports the first token of an answer in one piece. Its worker must
// not look stuck while it runs, and its prompt counts as cached afterwards.
func TestWholeAnswers(t *testing.T) {
	s := newScheduler(t, Settings{})
	now := start
	prompt := func(worker string) Candidate {
		return Candidate{Worker: worker, Tokens: 2000, BlockSize: 16, Hashes: chain("whole", 125)}
	}
	first := s.Decide(now, Request{ID: "a", Whole: true}, []Candidate{prompt("w/0")})
	ttft := first.Estimates[0].TTFT

	// Long after its first token was due it still runs: no queue is left.
	now = now.Add(ttft + 20*time.Second)
	other := Candidate{Worker: "w/0", Tokens: 2000, BlockSize: 16, Hashes: chain("other", 125)}
	if got := s.Decide(now, Request{}, []Candidate{other}).Estimates[0]; got.InFlight != 1 || got.Wait > 100*time.Millisecond {
		t.Errorf("beside a running whole answer: got %d in flight and %v of wait, want 1 and at most a decode step", got.InFlight, got.Wait)
	}

	// One that ends before it was due has been computed as well.
	s.Done(now, "a", Outcome{OK: true, CachedTokens: -1, OutputTokens: 1})
	s.Decide(now, Request{ID: "b", Whole: true}, []Candidate{{Worker: "v/0", Tokens: 2000, BlockSize: 16, Hashes: chain("whole", 125)}})
	now = now.Add(time.Millisecond)
	s.Done(now, "b", Outcome{OK: true, CachedTokens: -1, OutputTokens: 1})
	if got := s.Decide(now, Request{}, []Candidate{prompt("v/0")}).Estimates[0]; got.Anticipated < 1900 {
		t.Errorf("right after a whole answer: %d tokens of its prompt count as cached, want all of about 2000", got.Anticipated)
	}
	// One that failed has not.
	s.Decide(now, Request{ID: "c", Whole: true}, []Candidate{prompt("u/0")})
	s.Done(now, "c", Outcome{CachedTokens: -1, OutputTokens: -1})
	if got := s.Decide(now, Request{}, []Candidate{prompt("u/0")}).Estimates[0]; got.Anticipated != 0 {
		t.Errorf("after a failure: %d tokens count as cached, want none", got.Anticipated)
	}
}
