package schedule

import (
	"fmt"
	"math"
	"testing"
	"time"

	"github.com/kinference/kinference/internal/kvhash"
)

// talk lets somebody have n turns of a conversation at worker w, beside a request that
// runs on, each a while after the one before, and returns the time after the last.
func talk(t *testing.T, s *Scheduler, n int, pause time.Duration) time.Time {
	now := start
	enter(t, s, now, Request{ID: "beside"}, room(chain("b", 10), 0))
	s.Pass(now)
	s.FirstToken(now, "beside", time.Second)
	for i := range n {
		now = now.Add(pause)
		id := fmt.Sprint("turn", i)
		enter(t, s, now, Request{ID: id}, room(chain("t", 20+i), 0))
		expect(t, id, pass(s, now), id+"@w")
		now = now.Add(4 * time.Second)
		s.FirstToken(now, id, 4*time.Second)
		now = now.Add(time.Second)
		s.Done(now, id, Outcome{OK: true, CachedTokens: -1, OutputTokens: 30})
	}
	return now
}

// room is a worker with pages for the conversation and what runs beside it, of whose
// pages a prompt's cached tokens are known to be there.
func room(hashes []kvhash.Hash, cached int) []Candidate {
	c := candidates("w", 100*len(hashes)+50, 100, hashes)
	c[0].TotalBlocks, c[0].GPUTokens = 50, cached
	return c
}

// Who waits for pages does not push out what the next turn of a conversation needs,
// when it comes at once as a rule: the turn's end is not the conversation's.
func TestWaitsForWhoComesBack(t *testing.T) {
	s := newScheduler(t, Settings{})
	now := talk(t, s, 6, 50*ms)
	enter(t, s, now, Request{ID: "cold"}, room(chain("c", 30), 0))
	expect(t, "at the end of a turn", pass(s, now), "")
	expect(t, "reason", string(why(s, now, "cold")), string(HoldProtect))
	if wake, ok := s.Wake(now); !ok || wake.Sub(now) > 260*ms {
		t.Errorf("wake after %v %v", wake.Sub(now), ok)
	}
	now = now.Add(50 * ms)
	enter(t, s, now, Request{ID: "next"}, room(chain("t", 26), 2500))
	expect(t, "the next turn", pass(s, now), "next@w")

	// The conversation was over.
	s = newScheduler(t, Settings{})
	now = talk(t, s, 6, 50*ms)
	enter(t, s, now, Request{ID: "cold"}, room(chain("c", 30), 0))
	expect(t, "at the end of the last turn", pass(s, now), "")
	expect(t, "a second later", pass(s, now.Add(time.Second)), "cold@w")

	// Those who think before they answer are not waited for.
	s = newScheduler(t, Settings{})
	now = talk(t, s, 6, time.Minute)
	enter(t, s, now, Request{ID: "cold"}, room(chain("c", 30), 0))
	expect(t, "at the end of a slow one's turn", pass(s, now), "cold@w")
}

// What other routers route continues a conversation, too, though they tell fewer hashes.
func TestReturnsElsewhere(t *testing.T) {
	s := newScheduler(t, Settings{})
	at := 1.0
	for range 20 {
		s.left(at, &entry{prompt: blocks{chain("t", 300), 1}})
		s.returned(at+0.2, thin(chain("u", 310), maxTold))
		s.returned(at+0.2, thin(chain("t", 310), maxTold))
		at += 10
	}
	if v, gap := s.returns.share.of(outputKey{}), s.returns.gap.of(outputKey{}); v < 0.9 || math.Abs(gap-0.2) > 0.02 {
		t.Errorf("share %v after %v s, want nearly all after 0.2 s", v, gap)
	}
}

func TestComeback(t *testing.T) {
	for _, x := range []struct {
		share, gap, after float64
		want              bool
	}{
		{0, 0, 0, false}, {0.4, 1, 0, false}, {0.6, 1, 0, true}, {0.6, 1, 0.5, false},
		{0.9, 1, 2, true}, {0.9, 1, 2.5, false}, {0.9, 0, 0.2, true}, {0.9, 0, 0.25, false}, {1, 1, 10, true},
	} {
		if c := (comeback{5, x.share, x.gap}); c.likely(5+x.after) != x.want {
			t.Errorf("share %v, gap %v s, not there after %v s: got %v", x.share, x.gap, x.after, !x.want)
		}
	}
}

// However many requests end, few are watched, and those are a fair sample.
func TestReturnsAreBounded(t *testing.T) {
	s := newScheduler(t, Settings{})
	e := func(i int) *entry { return &entry{prompt: blocks{[]kvhash.Hash{kvhash.Hash(i)}, 1}} }
	sum, n := 0.0, 0
	for i := range 20000 {
		at := 1 + float64(i)/1000
		s.left(at, e(i))
		if back := i - 100; back > 0 && back%17 < 10 {
			s.returned(at, e(back).prompt)
		}
		if len(s.returns.gone) > maxGone {
			t.Fatalf("%d are watched", len(s.returns.gone))
		}
		if v := s.returns.share.of(outputKey{}); at > 2*comebackTime {
			sum += v
			n++
		}
	}
	if v := sum / float64(n); math.Abs(v-10./17) > 0.05 {
		t.Errorf("%v come back, want %v", v, 10./17)
	}
}

// needed is a scheduler in whose line one waits elsewhere that needs what a conversation
// left at w a moment ago.
func needed(t *testing.T) (*Scheduler, time.Time) {
	s := newScheduler(t, Settings{})
	now := talk(t, s, 1, time.Minute)
	again := room(chain("t", 20), 2000)
	again[0].Worker = "elsewhere"
	enter(t, s, now, Request{ID: "long"}, candidates("elsewhere", 90000, 0, nil))
	s.Pass(now)
	enter(t, s, now, Request{ID: "again"}, again)
	s.Pass(now)
	return s, now
}

// pushedOut is how many seconds of prefill a request in line would push out.
func pushedOut(s *Scheduler, id string) float64 {
	x := s.byID[id]
	return float64(s.pushes(&x.p[0], &x.c[0])) * 100 * x.p[0].w.view.speed.A * x.p[0].w.view.slow
}

// A request waits for what others need in proportion to what that is worth.
func TestProtectsInProportion(t *testing.T) {
	s, now := needed(t)
	enter(t, s, now, Request{ID: "cold"}, room(chain("c", 30), 0))
	expect(t, "would push it out", pass(s, now), "")
	lost := pushedOut(s, "cold")
	if lost < 0.1 {
		t.Fatalf("it would push out %v s", lost)
	}
	wait := time.Duration(protect * lost * float64(time.Second))
	expect(t, "before that is outweighed", pass(s, now.Add(wait-50*ms)), "")
	expect(t, "and then", pass(s, now.Add(wait+50*ms)), "cold@w")
}

// The more wait for a worker, the longer each does before it pushes out what others need:
// that happens as often as if few waited, and what is cached stays of use in overload.
func TestPatienceGrowsWithTheLine(t *testing.T) {
	s, now := needed(t)
	for _, name := range []string{"c", "d", "e", "f", "g", "h"} {
		enter(t, s, now, Request{ID: name}, room(chain(name, 30), 0))
	}
	expect(t, "would push it out", pass(s, now), "")
	wait := time.Duration(6 / few * protect * pushedOut(s, "c") * float64(time.Second))
	expect(t, "while six wait", pass(s, now.Add(wait-50*ms)), "")
	expect(t, "after twice the time", pass(s, now.Add(wait+50*ms)), "c@w")
}
