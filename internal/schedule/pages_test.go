package schedule

import (
	"slices"
	"testing"
	"time"
)

// besideOthers is a scheduler that knows a worker w of 20 pages and how long prompts are,
// and a candidate for a prompt that is all cached there, with a sample of that age in
// which so many requests of others run and use that share of the pages.
func besideOthers(t *testing.T, running, usage float64, age time.Duration) (*Scheduler, []Candidate) {
	s := newScheduler(t, Settings{})
	c := func() []Candidate {
		c := candidates("w", 1050, 100, chain("p", 10))
		c[0].TotalBlocks = 20
		return c
	}
	s.Decide(start, Request{ID: "first"}, c())
	s.FirstToken(at(time.Second), "first", time.Second)
	s.Done(at(2*time.Second), "first", Outcome{OK: true, CachedTokens: -1})
	next := c()
	next[0].GPUTokens = 1000
	next[0].Load = Load{Known: true, Running: running, KVUsage: usage, Age: age}
	return s, next
}

// Where others hold fewer pages than prompts of their own would take, they have prompts
// in common, and what is cached of ours is taken to be in use, which needs no pages.
func TestPromptsThatOthersShare(t *testing.T) {
	now := at(time.Minute)
	for _, c := range []struct {
		running float64
		want    string
	}{{4, "r@w"}, {1, ""}} {
		s, next := besideOthers(t, c.running, .7, 0)
		enter(t, s, now, Request{ID: "r"}, next)
		expect(t, "14 pages in use", pass(s, now), c.want)
		if c.want == "" {
			expect(t, "reason", string(why(s, now, "r")), string(HoldPages))
		}
	}
	// Ours has come since the sample: its prompt is not counted twice.
	s, next := besideOthers(t, 4, .7, 10*ms)
	enter(t, s, now, Request{ID: "r"}, next)
	expect(t, "first", pass(s, now), "r@w")
	again := slices.Clone(next)
	again[0].Load.Age = 110 * ms
	if e := s.Decide(now.Add(100*ms), Request{}, again).Estimates[0]; e.Free != 5 {
		t.Errorf("%d pages free of 20, want 5: others hold 14, ours one beside its prompt", e.Free)
	}
}

// Of a sample that is too old for queues, the pages in use still count.
func TestOldSamplesTellPages(t *testing.T) {
	now := at(time.Minute)
	s, next := besideOthers(t, 1, .7, 5*time.Second)
	if e := s.Decide(now, Request{}, next).Estimates[0]; e.Free != 6 || e.Wait < 10*time.Second {
		t.Errorf("%d pages free, wait %v; want 6 and a long wait for 11", e.Free, e.Wait)
	}
	s, next = besideOthers(t, 1, .1, 5*time.Second)
	next[0].Load.Waiting = 9
	if e := s.Decide(now, Request{}, next).Estimates[0]; e.Free != 18 || e.Wait != 0 || e.Interference != 0 {
		t.Errorf("%d pages free, wait %v, interference %v; want 18 and none: what ran then may be over", e.Free, e.Wait, e.Interference)
	}
	s, next = besideOthers(t, 1, .7, time.Minute/2+time.Second)
	if e := s.Decide(now, Request{}, next).Estimates[0]; e.Free != 20 {
		t.Errorf("%d pages free by a sample that says nothing any more, want 20", e.Free)
	}
}

// A request that is late tells of others before it, for those after it too, but not for
// ever: its first token may have been lost. Without others the worker is just slow.
func TestLateBehindOthers(t *testing.T) {
	for _, c := range []struct {
		others     float64
		late, want time.Duration
	}{{1, 3 * time.Second, 3 * time.Second}, {1, time.Minute, maxLate * time.Second}, {0, 3 * time.Second, 0}} {
		s := newScheduler(t, Settings{})
		d := s.Decide(start, Request{ID: "late"}, candidates("w", 1000, 100, nil))
		now := start.Add(d.Estimates[0].TTFT + c.late)
		next := candidates("w", 100, 100, nil)
		next[0].Load = Load{Known: true, Running: 1 + c.others}
		if e := s.Decide(now, Request{}, next).Estimates[0]; c.others > 0 && !near(e.Wait, c.want) || c.others == 0 && e.Wait > 50*ms {
			t.Errorf("%v others, %v late: wait %v, want %v", c.others, c.late, e.Wait, c.want)
		}
	}
}

// What would be evicted is worked out by the pages of fresh samples only: by an old one
// all routers would send what is cached nowhere to where there was room then.
func TestOldSamplesEvictNothing(t *testing.T) {
	for _, c := range []struct {
		age   time.Duration
		loses bool
	}{{time.Second, true}, {5 * time.Second, false}} {
		s, _ := besideOthers(t, 0, 0, 0)
		next := candidates("w", 1050, 100, chain("q", 10))
		next[0].TotalBlocks = 40
		next[0].Load = Load{Known: true, Running: 2, KVUsage: .7, Age: c.age}
		if e := s.Decide(at(10*time.Second), Request{}, next).Estimates[0]; (e.EvictionLoss > 0) != c.loses {
			t.Errorf("sample %v old: loss %v", c.age, e.EvictionLoss)
		}
	}
}
