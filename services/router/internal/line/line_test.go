package line

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/kinference/kinference/internal/schedule"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// stand is a line before one worker, in a bubble whose clock stands still while
// somebody works.
type stand struct {
	*Line
	t     *testing.T
	s     *schedule.Scheduler
	looks atomic.Int64
	stop  func()

	mu   sync.Mutex
	left map[string]int // by how
}

func open(t *testing.T, set schedule.Settings, limits Settings) *stand {
	t.Helper()
	if set.Policy == "" {
		set.Policy = schedule.K2
	}
	s, err := schedule.New(set)
	if err != nil {
		t.Fatal(err)
	}
	x := &stand{t: t, s: s, left: map[string]int{}}
	if limits.MaxBytes == 0 {
		limits.MaxBytes = 1 << 20
	}
	limits.Left = func(_ schedule.QoS, how string, _ schedule.Hold, _ time.Duration) {
		x.mu.Lock()
		defer x.mu.Unlock()
		x.left[how]++
	}
	x.Line = New(s, limits)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- x.Run(ctx) }()
	x.stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(x.stop)
	return x
}

func (x *stand) gone(how string) int {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.left[how]
}

// ask is a request of 20,000 tokens, which take an l40s some seconds.
func (x *stand) ask(id string) *Ask {
	return &Ask{
		Request: schedule.Request{ID: id, Model: "m"},
		Look: func() ([]schedule.Candidate, func()) {
			x.looks.Add(1)
			return []schedule.Candidate{{Worker: "w/0", Profile: "p", Tokens: 20_000, BlockSize: 16, Class: "l40s", TotalBlocks: 100_000}}, func() {}
		},
		Choose: func(e []schedule.Estimate, rank func([]int)) ([]int, bool) { return []int{0}, true },
		Stays:  func() (time.Duration, bool) { return 0, false },
	}
}

// result is how a wait ended.
type result struct {
	d   schedule.Dispatch
	err error
}

func (x *stand) wait(ctx context.Context, a *Ask) <-chan result {
	out := make(chan result, 1)
	go func() {
		d, err := x.Wait(ctx, a)
		out <- result{d, err}
	}()
	synctest.Wait()
	return out
}

func (x *stand) must(out <-chan result) schedule.Dispatch {
	x.t.Helper()
	select {
	case r := <-out:
		if r.err != nil {
			x.t.Fatal(r.err)
		}
		return r.d
	default:
		x.t.Fatal("it waits")
	}
	return schedule.Dispatch{}
}

func (x *stand) refused(out <-chan result, reason string) *Refusal {
	x.t.Helper()
	var r *Refusal
	select {
	case got := <-out:
		if !errors.As(got.err, &r) || r.Reason != reason {
			x.t.Fatalf("got %v, %v", got.d.ID, got.err)
		}
	default:
		x.t.Fatal("it waits")
	}
	if r.RetryAfter < time.Second {
		x.t.Errorf("told to come back after %v", r.RetryAfter)
	}
	return r
}

// empty checks that nothing is left of those that were there.
func (x *stand) empty(inFlight int) {
	x.t.Helper()
	if n, w, f := x.Len(), x.s.Waits(), x.s.InFlight("w/0"); n != 0 || w != 0 || f != inFlight || x.bytes != 0 {
		x.t.Errorf("%d wait, %d by the scheduler, %d bytes, %d in flight; want %d in flight", n, w, x.bytes, f, inFlight)
	}
}

func TestHeldUntilTheWorkerCanBegin(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		x := open(t, schedule.Settings{}, Settings{})
		if d := x.must(x.wait(t.Context(), x.ask("1"))); !d.Booked || d.Waited != 0 || x.Len() != 0 {
			t.Errorf("the first: %+v, %d wait", d, x.Len())
		}
		second := x.wait(t.Context(), x.ask("2"))
		third := x.wait(t.Context(), x.ask("3"))
		if x.Len() != 2 || x.Classes()[schedule.Interactive] != 2 {
			t.Fatalf("%d wait, %v", x.Len(), x.Classes())
		}
		list := x.List()
		if len(list) != 2 || list[0].ID != "2" || list[0].Worker != "w/0" || list[0].Why != schedule.HoldQueue || list[1].Ahead != 1 || list[0].Wait < time.Second {
			t.Errorf("the line is %+v", list)
		}
		time.Sleep(2 * time.Second) // by the bubble's clock
		if n := x.looks.Load(); n < 2+2*7 || n > 3+2*8 {
			t.Errorf("%d looks in 2 s of two that wait", n)
		}
		x.s.FirstToken(time.Now(), "1", 2*time.Second)
		x.Kick()
		synctest.Wait()
		if d := x.must(second); d.Waited != 2*time.Second || d.Why != schedule.HoldQueue || !d.Booked {
			t.Errorf("the second: %+v", d)
		}
		if x.Len() != 1 {
			t.Errorf("%d wait behind it", x.Len())
		}
		// Without any event the scheduler's own clock lets the next one go: its worker
		// should have come to it by then.
		synctest.Wait()
		time.Sleep(10 * time.Second)
		synctest.Wait()
		if d := x.must(third); d.Waited < 3*time.Second {
			t.Errorf("the third: %+v", d)
		}
		x.empty(3)
		if x.gone(Dispatched) != 3 {
			t.Errorf("left: %v", x.left)
		}
	})
}

func TestCancelLeavesNoTrace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		x := open(t, schedule.Settings{}, Settings{})
		x.must(x.wait(t.Context(), x.ask("1")))
		ctx, cancel := context.WithCancel(t.Context())
		a := x.ask("2")
		a.Bytes = 100
		second := x.wait(ctx, a)
		third := x.wait(t.Context(), x.ask("3"))
		if x.Len() != 2 || x.bytes != 100 {
			t.Fatalf("%d wait with %d bytes", x.Len(), x.bytes)
		}
		cancel()
		synctest.Wait() // its place is free at once
		if r := <-second; !errors.Is(r.err, context.Canceled) || x.Len() != 1 || x.s.Waits() != 1 || x.gone(Canceled) != 1 {
			t.Errorf("%v; %d wait", r.err, x.Len())
		}
		x.s.FirstToken(time.Now(), "1", time.Second)
		x.Kick()
		synctest.Wait()
		x.must(third)
		x.empty(2)
	})
}

// Whoever leaves in the moment of the turn has either got it or left nothing behind.
func TestCancelAtTheTurn(t *testing.T) {
	s, err := schedule.New(schedule.Settings{Policy: schedule.K2})
	if err != nil {
		t.Fatal(err)
	}
	l := New(s, Settings{MaxBytes: 1 << 20})
	ctx, stop := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() { _ = l.Run(ctx) })
	x := &stand{Line: l, t: t, s: s}
	var turns atomic.Int64
	var clients sync.WaitGroup
	for c := range 8 {
		clients.Go(func() {
			rng := rand.New(rand.NewPCG(1, uint64(c)))
			for i := range 150 {
				ctx, cancel := context.WithCancel(t.Context())
				id := fmt.Sprint(c, "/", i)
				wait := time.Duration(rng.IntN(300)) * time.Microsecond
				timer := time.AfterFunc(wait, cancel)
				_, err := l.Wait(ctx, x.ask(id))
				timer.Stop()
				cancel()
				if err == nil {
					turns.Add(1)
					s.FirstToken(time.Now(), id, time.Millisecond)
					s.Done(time.Now(), id, schedule.Outcome{OK: true, PromptTokens: -1, CachedTokens: -1, OutputTokens: 1})
				} else if !errors.Is(err, context.Canceled) {
					t.Error(err)
				}
				l.Kick()
			}
		})
	}
	clients.Wait()
	x.empty(0)
	stop()
	wg.Wait()
	t.Logf("%d of 1200 got their turn", turns.Load())
}

func TestBounds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		x := open(t, schedule.Settings{MaxWaiting: 2}, Settings{MaxBytes: 1000})
		x.must(x.wait(t.Context(), x.ask("1")))
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		a := x.ask("2")
		a.Bytes = 5000 // more than may be, but nobody else waits
		x.wait(ctx, a)
		b := x.ask("3")
		b.Bytes = 1
		if r := x.refused(x.wait(ctx, b), Bytes); r.Waiting != 1 || r.RetryAfter < 3*time.Second {
			t.Errorf("bytes: %+v", r) // a prefill of some seconds is ahead
		}
		x.wait(ctx, x.ask("4"))
		x.refused(x.wait(ctx, x.ask("5")), Full)
		if x.gone(Full) != 1 || x.gone(Bytes) != 1 {
			t.Errorf("left: %v", x.left)
		}
		cancel()
		synctest.Wait()
		x.empty(1)
	})
}

func TestTooLong(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const most = 10 * time.Second
		x := open(t, schedule.Settings{MaxWait: most}, Settings{MaxWait: most})
		x.must(x.wait(t.Context(), x.ask("1")))
		var refusal *Refusal
		var waiting []<-chan result
		for i := range 20 {
			out := x.wait(t.Context(), x.ask(fmt.Sprint("w", i)))
			if x.Len() == len(waiting) {
				refusal = x.refused(out, TooLong)
				break
			}
			waiting = append(waiting, out)
		}
		if refusal == nil || len(waiting) == 0 || len(waiting) > 4 {
			t.Fatalf("%d wait before one is told that it would wait too long", len(waiting))
		}
		// It is told the truth: then there is a place.
		time.Sleep(refusal.RetryAfter)
		x.s.FirstToken(time.Now(), "1", refusal.RetryAfter)
		x.Kick()
		synctest.Wait()
		late := x.wait(t.Context(), x.ask("again"))
		select {
		case r := <-late:
			t.Errorf("refused again after %v: %v", refusal.RetryAfter, r.err)
		default:
		}
	})
	synctest.Test(t, func(t *testing.T) {
		const most = 3 * time.Second // less than was predicted
		x := open(t, schedule.Settings{}, Settings{MaxWait: most})
		x.must(x.wait(t.Context(), x.ask("1")))
		second := x.wait(t.Context(), x.ask("2"))
		time.Sleep(most - time.Millisecond)
		synctest.Wait()
		if x.Len() != 1 {
			t.Error("it gave up before the time")
		}
		time.Sleep(time.Millisecond)
		synctest.Wait()
		if r := x.refused(second, Timeout); r.RetryAfter < 2*time.Second {
			t.Errorf("told to come back after %v, with seconds of work ahead", r.RetryAfter)
		}
		x.empty(1)
	})
}

// A policy lets a request wait, and decides otherwise later, or never does.
func TestPoliciesLetWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		x := open(t, schedule.Settings{}, Settings{MaxWait: time.Minute})
		var free atomic.Bool
		patient := func(id string) *Ask {
			a := x.ask(id)
			var stays bool
			a.Choose = func([]schedule.Estimate, func([]int)) ([]int, bool) {
				if stays = !free.Load(); stays {
					return nil, true
				}
				return []int{0}, true
			}
			a.Stays = func() (time.Duration, bool) { return 3 * time.Second, stays }
			return a
		}
		gives := x.wait(t.Context(), patient("1"))
		time.Sleep(2 * time.Second)
		synctest.Wait()
		gets := x.wait(t.Context(), patient("2"))
		if list := x.List(); len(list) != 2 || list[0].Why != Policy {
			t.Errorf("the line is %+v", list)
		}
		time.Sleep(1100 * time.Millisecond)
		synctest.Wait()
		x.refused(gives, Timeout)
		free.Store(true)
		time.Sleep(300 * time.Millisecond)
		synctest.Wait()
		x.must(gets)
		// What is not for workers leaves unbooked.
		a := x.ask("3")
		a.Choose = func([]schedule.Estimate, func([]int)) ([]int, bool) { return nil, false }
		if d := x.must(x.wait(t.Context(), a)); d.Booked {
			t.Error("booked")
		}
		a.Look = func() ([]schedule.Candidate, func()) { return nil, func() {} }
		if d := x.must(x.wait(t.Context(), a)); d.Booked {
			t.Error("booked without a candidate")
		}
		x.empty(1)
	})
}

func TestStop(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		x := open(t, schedule.Settings{}, Settings{})
		x.must(x.wait(t.Context(), x.ask("1")))
		second := x.wait(t.Context(), x.ask("2"))
		x.stop()
		synctest.Wait()
		x.refused(second, Stopped)
		x.refused(x.wait(t.Context(), x.ask("3")), Stopped)
		x.empty(1)
	})
}

// Clients may choose ids: two under one do not disturb each other.
func TestSameID(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		x := open(t, schedule.Settings{}, Settings{})
		x.must(x.wait(t.Context(), x.ask("1")))
		first, second := x.wait(t.Context(), x.ask("same")), x.wait(t.Context(), x.ask("same"))
		if list := x.List(); len(list) != 2 || list[0].ID != "same" || list[1].ID != "same" {
			t.Errorf("the line is %+v", list)
		}
		for i, next := range []<-chan result{first, second} {
			x.s.Done(time.Now(), fmt.Sprint(i+1), schedule.Outcome{})
			x.s.Done(time.Now(), "same", schedule.Outcome{})
			x.Kick()
			synctest.Wait()
			x.must(next)
		}
		x.empty(0) // nobody reports on the second
	})
}
