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

// A serial agent on equal workers: the turns of one conversation stay where its
// cache is, other conversations go elsewhere (Infera 103).
func TestSerialAgentsUseAllWorkers(t *testing.T) {
	s := newScheduler(t, Settings{})
	count := map[string]int{}
	cached := map[string]string{}
	now := start
	for i := range 64 {
		name := fmt.Sprint("session", i/8)
		c := candidates("a b", 1000, 100, chain(string(rune('a'+i/8)), 9))
		for j := range c {
			if cached[name] == c[j].Worker {
				c[j].GPUTokens = 900
			}
		}
		if err := s.Enter(now, Request{ID: "r"}, c, nil); err != nil {
			t.Fatal(err)
		}
		d := s.Pass(now)
		w := first(d[0].Decision)
		if cached[name] != "" && cached[name] != w {
			t.Errorf("turn %d left %s for %s", i, cached[name], w)
		}
		cached[name] = w
		count[w]++
		s.FirstToken(now.Add(time.Second), "r", time.Second)
		s.Done(now.Add(2*time.Second), "r", Outcome{OK: true, CachedTokens: -1})
		now = now.Add(3 * time.Second)
	}
	if min(count["a"], count["b"]) < 24 {
		t.Errorf("not spread: %v", count)
	}
}

// Prompts shorter than a block have nothing in the index and no load between
// them, and still do not all go to one worker (Infera 107).
func TestShortPromptsSpread(t *testing.T) {
	s := newScheduler(t, Settings{})
	count := map[string]int{}
	for i := range 12 {
		now := at(time.Duration(i) * time.Second)
		id := fmt.Sprint("r", i)
		if err := s.Enter(now, Request{ID: id}, candidates("a b c", 200, 768, nil), nil); err != nil {
			t.Fatal(err)
		}
		count[first(s.Pass(now)[0].Decision)]++
		s.FirstToken(now, id, 210*time.Millisecond)
		s.Done(now.Add(500*time.Millisecond), id, Outcome{OK: true, CachedTokens: -1})
	}
	for _, w := range []string{"a", "b", "c"} {
		if count[w] < 2 {
			t.Errorf("not spread: %v", count)
		}
	}
}

// A router that comes back with an empty ledger goes by the gauges and by what
// the index says, and does not scatter prefixes (user pains 9, 18).
func TestFreshRouterKeepsPrefixes(t *testing.T) {
	s := newScheduler(t, Settings{})
	for i := range 20 {
		c := candidates("a b c d", 2000, 100, chain(string(rune('a'+i)), 19))
		c[i%4].GPUTokens = 1900
		for j := range c {
			c[j].Load = Load{Known: true, Running: 2, KVUsage: 0.4}
		}
		now := at(time.Duration(i) * time.Second)
		if w := first(s.Decide(now, Request{ID: fmt.Sprint(i)}, c)); w != c[i%4].Worker {
			t.Errorf("request %d went to %s, its prefix is at %s", i, w, c[i%4].Worker)
		}
		s.FirstToken(now.Add(200*ms), fmt.Sprint(i), 200*ms)
	}
}

// Batch work behind a stream of interactive requests gets its turn in the end
// (GAIE 1861, llm-d-router 1995).
func TestBatchDoesNotStarve(t *testing.T) {
	s := newScheduler(t, Settings{})
	now := start
	if err := s.Enter(now, Request{ID: "batch", QoS: Batch}, candidates("w", 500, 0, nil), nil); err != nil {
		t.Fatal(err)
	}
	for i := 0; now.Before(at(20 * time.Minute)); i++ {
		// More than the worker can do: 0.51 s of work each 0.5 s.
		if err := s.Enter(now, Request{ID: fmt.Sprint(i)}, candidates("w", 500, 0, nil), nil); err != nil {
			t.Fatal(err)
		}
		for _, d := range s.Pass(now) {
			if d.ID == "batch" {
				if i > 0 && d.Waited < batchLimit*time.Second {
					t.Errorf("went before interactive requests after %v", d.Waited)
				}
				return
			}
			s.FirstToken(now.Add(510*time.Millisecond), d.ID, 510*time.Millisecond)
			s.Done(now.Add(520*time.Millisecond), d.ID, Outcome{OK: true, CachedTokens: -1})
		}
		now = now.Add(500 * time.Millisecond)
	}
	t.Error("batch starves")
}
