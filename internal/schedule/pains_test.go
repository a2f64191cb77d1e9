package schedule

import (
	"fmt"
	"testing"
	"time"
)

// Many requests between two load samples must not all go to the worker that
// the sample shows as idle (vllm-project/router 177).
func TestBurstBetweenSamples(t *testing.T) {
	s := newScheduler(t, Settings{})
	count := map[string]int{}
	for i := range 8 {
		c := candidates("p0 p1", 500, 1000, nil)
		for j := range c {
			c[j].Load = Load{Known: true, Running: float64(j), Age: time.Duration(i) * time.Millisecond}
		}
		count[first(s.Decide(at(time.Duration(i)*time.Millisecond), Request{ID: fmt.Sprint(i)}, c))]++
	}
	if min(count["p0"], count["p1"]) < 3 {
		t.Errorf("not spread: %v", count)
	}
}

// Many routers with the same sample must not all choose the same worker
// (dynamo 589).
func TestManyRoutersOneSample(t *testing.T) {
	count := map[string]int{}
	for i := range 16 {
		s := newScheduler(t, Settings{Seed: uint64(i)})
		c := candidates("a b c d", 5000, 1000, chain(string(rune('a'+i)), 4))
		for j := range c {
			c[j].Load = Load{Known: true, Running: 3, KVUsage: 0.2}
		}
		count[first(s.Decide(start, Request{ID: fmt.Sprint(i)}, c))]++
	}
	for w, n := range count {
		if n > 10 {
			t.Errorf("%s got %d of 16", w, n)
		}
	}
	if len(count) < 3 {
		t.Errorf("only %v used", count)
	}
}

// With a system prompt that all share, traffic does not stay on the one worker
// that is warm: it spills when the queue there costs more than a prefill, and
// from then on two are warm (dynamo 737).
func TestSharedSystemPromptSpreadsUnderLoad(t *testing.T) {
	s := newScheduler(t, Settings{})
	cached := map[string]int{"a": 1900}
	count := map[string]int{}
	for i := range 400 {
		now := at(time.Duration(i) * 20 * time.Millisecond) // 50/s, a worker does 9/s
		c := candidates("a b c d e f g h", 2000, 100, chain("s", 19))
		for j := range c {
			c[j].GPUTokens = cached[c[j].Worker]
		}
		w := first(s.Decide(now, Request{ID: fmt.Sprint(i)}, c))
		count[w]++
		cached[w] = 1900
	}
	for _, c := range candidates("a b c d e f g h", 0, 0, nil) {
		if n := count[c.Worker]; n < 20 {
			t.Errorf("%s got %d of 400: %v", c.Worker, n, count)
		}
	}
}
