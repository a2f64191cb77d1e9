package schedule

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kinference/kinference/internal/kvhash"
)

// plain is a speed model that can be computed by head: 1 ms per token, 10 ms
// per chunk of 1000, 20 ms for the weights, 1 ms per decoder.
var plain = Speed{W: 20e-3, A: 1e-3, Ovh: 10e-3, S: 1e-3, Chunk: 1000}

var start = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

func at(d time.Duration) time.Time { return start.Add(d) }

func newScheduler(t testing.TB, set Settings) *Scheduler {
	t.Helper()
	if set.Speeds == nil {
		set.Speeds = map[string]Speed{"": plain}
	}
	s, err := New(set)
	if err != nil {
		t.Fatal(err)
	}
	s.Decide(start, Request{}, nil) // fixes the origin of time
	return s
}

// chain makes the hashes of n blocks of the prompt called name; prompts whose
// names agree in the first shared letters share as many blocks.
func chain(name string, n int) []kvhash.Hash {
	out := make([]kvhash.Hash, n)
	h := kvhash.Root("", "")
	for i := range out {
		h = kvhash.Extra(h, name[min(i, len(name)-1):min(i, len(name)-1)+1])
		out[i] = h
	}
	return out
}

func candidates(workers string, tokens, blockSize int, hashes []kvhash.Hash) []Candidate {
	var c []Candidate
	for name := range strings.FieldsSeq(workers) {
		c = append(c, Candidate{Worker: name, Profile: "p", Tokens: tokens, BlockSize: blockSize, Hashes: hashes})
	}
	return c
}

func first(d Decision) string { return d.Estimates[d.Order[0]].Worker }

func near(got, want time.Duration) bool { return (got - want).Abs() <= time.Microsecond }

func TestPrediction(t *testing.T) {
	const ms = time.Millisecond
	load := func(running, waiting, usage float64) Load {
		return Load{Running: running, Waiting: waiting, KVUsage: usage, Known: true}
	}
	tests := []struct {
		name          string
		before        func(s *Scheduler)
		c             Candidate
		wait, prefill time.Duration
	}{
		{
			name:    "cold and idle",
			c:       Candidate{Tokens: 2500, BlockSize: 100},
			prefill: 2500*ms + 3*10*ms,
		},
		{
			name:    "one block short of all",
			c:       Candidate{Tokens: 2500, BlockSize: 100, GPUTokens: 2500},
			prefill: 100*ms + 10*ms, // the last token must be computed
		},
		{
			name:    "few tokens still read the weights",
			c:       Candidate{Tokens: 2405, BlockSize: 100, GPUTokens: 2400},
			prefill: 20*ms + 10*ms,
		},
		{
			name:    "more matched than the prompt has",
			c:       Candidate{Tokens: 50, BlockSize: 100, GPUTokens: 4000, CPUTokens: 9000},
			prefill: 50*ms + 10*ms,
		},
		{
			name: "behind one prefill",
			before: func(s *Scheduler) {
				s.Decide(start, Request{ID: "x"}, candidates("w", 1000, 100, nil))
			},
			c:       Candidate{Tokens: 500, BlockSize: 100},
			wait:    1010 * ms,
			prefill: 510 * ms,
		},
		{
			name: "beside one decoder",
			before: func(s *Scheduler) {
				s.Decide(start, Request{ID: "x"}, candidates("w", 1000, 100, nil))
				s.FirstToken(start, "x", 1010*ms)
			},
			c:       Candidate{Tokens: 1500, BlockSize: 100},
			wait:    (20 + 10 + 1) * ms / 2, // half a decode step
			prefill: 1500*ms + 2*(10+1)*ms,
		},
		{
			name:    "others wait and run",
			c:       Candidate{Tokens: 500, BlockSize: 100, Load: load(3, 2, 0)},
			wait:    2 * 510 * ms, // taken to be like this one
			prefill: 500*ms + 10*ms + 3*ms,
		},
		{
			name: "own requests are not counted twice",
			before: func(s *Scheduler) {
				s.Decide(start, Request{ID: "x"}, candidates("w", 1000, 100, nil))
			},
			c:       Candidate{Tokens: 500, BlockSize: 100, Load: load(0, 1, 0)},
			wait:    1010 * ms,
			prefill: 510 * ms,
		},
		{
			name:    "a stale sample is ignored",
			c:       Candidate{Tokens: 500, BlockSize: 100, Load: Load{Waiting: 9, Known: true, Age: 2 * time.Second}},
			prefill: 510 * ms,
		},
		{
			name:    "a mad sample is ignored",
			c:       Candidate{Tokens: 500, BlockSize: 100, Load: load(math.NaN(), math.Inf(1), -3), TotalBlocks: 100},
			prefill: 510 * ms,
		},
		{
			name:    "no room and nobody who would make some",
			c:       Candidate{Tokens: 500, BlockSize: 100, TotalBlocks: 100, Load: load(0, 0, 0.96)},
			wait:    5 * time.Second,
			prefill: 510 * ms,
		},
		{
			name: "room when the decoder is done",
			before: func(s *Scheduler) {
				s.Decide(start, Request{ID: "x", MaxTokens: 100}, candidates("w", 1000, 100, nil))
				s.FirstToken(start, "x", 1010*ms)
			},
			c:       Candidate{Tokens: 500, BlockSize: 100, TotalBlocks: 12, Load: load(1, 0, 10./12)},
			wait:    100 * (20 + 10 + 1) * ms,
			prefill: 510*ms + 1*ms,
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			s := newScheduler(t, Settings{Policy: PredictedTTFT})
			if tt.before != nil {
				tt.before(s)
			}
			tt.c.Worker = "w"
			e := s.Decide(start, Request{ID: "r"}, []Candidate{tt.c}).Estimates[0]
			if !near(e.Wait, tt.wait) || !near(e.Prefill, tt.prefill) {
				t.Errorf("wait %v, prefill %v; want %v, %v", e.Wait, e.Prefill, tt.wait, tt.prefill)
			}
			if e.TTFT != e.Wait+e.Prefill {
				t.Errorf("TTFT %v is not wait + prefill", e.TTFT)
			}
		})
	}
}

func TestDefaultSpeedMatchesStudy(t *testing.T) {
	// docs/decisions/0004: 20,300 unique tokens take 6.5 s, and a hit of
	// 25 of 26 blocks 0.3 s, latency included.
	p := DefaultSpeeds()["l40s"]
	if got := p.prefill(0, 20300, 0, 0) + p.Latency; got < 6.3 || got > 6.7 {
		t.Errorf("cold prefill %.2f s, want 6.5", got)
	}
	if got := p.prefill(25*784, 20300, 0, 0) + p.Latency; got < 0.25 || got > 0.32 {
		t.Errorf("hit %.2f s, want 0.3", got)
	}
}

func TestBurstOfSiblings(t *testing.T) {
	s := newScheduler(t, Settings{})
	prompt := func(i int) []kvhash.Hash { return chain("ssssssss"+string(rune('a'+i)), 10) }
	var got []string
	for i := range 4 {
		// 8 of 10 blocks are the same; a hit costs 1/4 of a miss.
		d := s.Decide(at(time.Duration(i)*time.Millisecond), Request{ID: fmt.Sprint(i)},
			candidates("a b", 10000, 1000, prompt(i)))
		e := d.Estimates[d.Order[0]]
		got = append(got, first(d))
		if i == 1 && e.Anticipated != 0 {
			t.Errorf("second sibling should be sooner at the other worker, which has nothing")
		}
		if i >= 2 && e.Anticipated != 8000 {
			t.Errorf("sibling %d: anticipated %d tokens, want 8000", i, e.Anticipated)
		}
	}
	// The first two are cold on both workers (waiting for the first prefill
	// takes longer than one's own), the others share.
	if got[0] == got[1] || got[2] == got[3] {
		t.Errorf("workers %v", got)
	}
}

func TestSiblingsWaitForOneColdPrefill(t *testing.T) {
	s := newScheduler(t, Settings{})
	// The hit is so cheap (1 of 100 blocks) that waiting loses nothing.
	cold := 0
	home := ""
	for i := range 2 {
		d := s.Decide(start, Request{ID: fmt.Sprint(i)}, candidates("a b c", 10000, 100,
			chain(strings.Repeat("s", 99)+string(rune('a'+i)), 100)))
		if e := d.Estimates[d.Order[0]]; e.Cached == 0 {
			cold++
			home = e.Worker
		} else if e.Worker != home {
			t.Errorf("sibling went to %s, the prefix to %s", e.Worker, home)
		}
	}
	if cold != 1 {
		t.Errorf("%d cold prefills, want 1", cold)
	}
}

func TestAnticipationEndsAfterGrace(t *testing.T) {
	s := newScheduler(t, Settings{})
	c := candidates("a", 1000, 100, chain("x", 9))
	ask := func(when time.Duration) int {
		return s.Decide(at(when), Request{}, c).Estimates[0].Anticipated
	}
	s.Decide(start, Request{ID: "r"}, c)
	if got := ask(time.Minute); got != 900 {
		t.Errorf("waiting: anticipated %d, want 900", got)
	}
	s.FirstToken(at(time.Minute), "r", time.Second)
	if got := ask(2 * time.Minute); got != 900 {
		t.Errorf("running: anticipated %d, want 900", got)
	}
	s.Done(at(2*time.Minute), "r", Outcome{OK: true, CachedTokens: -1})
	if got := ask(2*time.Minute + time.Second); got != 900 {
		t.Errorf("just done: anticipated %d, want 900", got)
	}
	if got := ask(2*time.Minute + 3*time.Second); got != 0 {
		t.Errorf("long done: anticipated %d, want 0", got)
	}

	s.Decide(at(3*time.Minute), Request{ID: "r"}, c)
	s.Done(at(3*time.Minute), "r", Outcome{CachedTokens: -1})
	if got := ask(3 * time.Minute); got != 0 {
		t.Errorf("failed before its first token: anticipated %d, want 0", got)
	}
	s.Decide(at(3*time.Minute), Request{ID: "r"}, c)
	s.Restarted("a")
	if got := ask(3 * time.Minute); got != 0 {
		t.Errorf("engine restarted: anticipated %d, want 0", got)
	}
}

func TestSpillsWhenQueueExceedsPrefill(t *testing.T) {
	s := newScheduler(t, Settings{})
	c := candidates("hot cold", 2000, 100, chain("x", 19))
	c[0].GPUTokens = 1900
	n := 0
	for ; n < 100; n++ {
		if first(s.Decide(start, Request{ID: fmt.Sprint(n)}, c)) == "cold" {
			break
		}
	}
	// A hit is 110 ms, a full prefill 2020 ms: about 18 hits queue up first.
	if n < 17 || n > 19 {
		t.Errorf("spilled after %d requests, want 18", n)
	}
}

// Equal workers share what matches nowhere (Infera 103 and 107, dynamo 737,
// sglang 32983).
func TestSpreadsColdTraffic(t *testing.T) {
	tests := []struct {
		name   string
		hashes func(i int) []kvhash.Hash
		tokens int
		gap    time.Duration
	}{
		{"serial turns without reuse", func(i int) []kvhash.Hash { return chain(string(rune('A'+i)), 5) }, 5000, 10 * time.Second},
		{"serial turns of an engine without cache", func(i int) []kvhash.Hash { return chain("same", 5) }, 5000, 10 * time.Second},
		{"prompts shorter than a block", func(int) []kvhash.Hash { return nil }, 300, 20 * time.Second},
		{"burst of short prompts", func(int) []kvhash.Hash { return nil }, 300, 0},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			s := newScheduler(t, Settings{})
			count := map[string]int{}
			const n = 48
			for i := range n {
				now := at(time.Duration(i) * tt.gap)
				id := fmt.Sprint(i)
				d := s.Decide(now, Request{ID: id}, candidates("a b", tt.tokens, 1000, tt.hashes(i)))
				count[first(d)]++
				if tt.gap > 0 {
					s.FirstToken(now.Add(time.Second), id, time.Second)
					s.Done(now.Add(2*time.Second), id, Outcome{OK: true, CachedTokens: 0})
				}
			}
			if min(count["a"], count["b"]) < n/3 {
				t.Errorf("not spread: %v", count)
			}
		})
	}
}

func TestColdPrefixesBalance(t *testing.T) {
	s := newScheduler(t, Settings{})
	count := map[string]int{}
	for i := range 12 {
		now, id := at(time.Duration(i)*10*time.Second), fmt.Sprint(i)
		count[first(s.Decide(now, Request{ID: id}, candidates("a b c", 5000, 1000, chain(string(rune('A'+i)), 4))))]++
		s.FirstToken(now.Add(time.Second), id, 5*time.Second)
		s.Done(now.Add(time.Second), id, Outcome{OK: true, CachedTokens: 0})
	}
	for w, n := range count {
		if n != 4 {
			t.Errorf("%s got %d of 12 prefixes, want 4", w, n)
		}
	}
}

func TestReplicasAgreeOnColdPrefix(t *testing.T) {
	a, b := newScheduler(t, Settings{Seed: 1}), newScheduler(t, Settings{Seed: 2})
	used := map[string]bool{}
	for i := range 20 {
		c := candidates("a b c d", 5000, 1000, chain(string(rune('A'+i)), 4))
		x, y := first(a.Decide(start, Request{}, c)), first(b.Decide(start, Request{}, c))
		if x != y {
			t.Errorf("prefix %d: %s and %s", i, x, y)
		}
		used[x] = true
	}
	if len(used) < 3 {
		t.Errorf("only %v used", used)
	}
}

func TestCalibration(t *testing.T) {
	s := newScheduler(t, Settings{})
	rng := rand.New(rand.NewPCG(1, 1))
	truth := map[string]float64{"fast": 1, "slow": 2}
	var errs []float64
	for i := range 400 {
		now, id := at(time.Duration(i)*time.Minute), fmt.Sprint(i)
		name := []string{"fast", "slow"}[i%2]
		e := s.Decide(now, Request{ID: id}, candidates(name, 3000, 1000, nil)).Estimates[0]
		ttft := 3.030 * truth[name] * (0.9 + 0.2*rng.Float64())
		if i%10 == 9 {
			ttft *= 20 // a hiccup
		} else if i > 100 {
			errs = append(errs, math.Abs(e.TTFT.Seconds()/ttft-1))
		}
		s.FirstToken(now.Add(time.Second), id, time.Duration(ttft*1e9))
		s.Done(now.Add(2*time.Second), id, Outcome{OK: true, CachedTokens: 0})
	}
	slices.Sort(errs)
	if got := errs[len(errs)/2]; got > 0.10 {
		t.Errorf("median error of the prediction %.3f, want at most 0.10", got)
	}
	for _, w := range s.Workers() {
		if got := w.Slowness / truth[w.Worker]; got < 0.85 || got > 1.25 {
			t.Errorf("%s: slowness %.2f, want %.0f", w.Worker, w.Slowness, truth[w.Worker])
		}
	}
}

func TestCalibrationStaysInRange(t *testing.T) {
	s := newScheduler(t, Settings{})
	for i := range 200 {
		now, id := at(time.Duration(i)*time.Minute), fmt.Sprint(i)
		for name, ttft := range map[string]time.Duration{"instant": 0, "stuck": time.Hour} {
			s.Decide(now, Request{ID: name + id}, candidates(name, 3000, 1000, nil))
			s.FirstToken(now, name+id, ttft)
			s.Done(now, name+id, Outcome{CachedTokens: -1})
		}
	}
	for _, w := range s.Workers() {
		if w.Slowness < minS || w.Slowness > maxS {
			t.Errorf("%s: slowness %v", w.Worker, w.Slowness)
		}
	}
}

// Where the prior is too slow, the first worker to be sampled must not look
// better than those that nobody has tried.
func TestUnsampledWorkersInheritFromClass(t *testing.T) {
	s := newScheduler(t, Settings{})
	count := map[string]int{}
	for i := range 60 {
		now, id := at(time.Duration(i)*time.Minute), fmt.Sprint(i)
		d := s.Decide(now, Request{ID: id}, candidates("a b c", 3000, 1000, chain(id, 3)))
		count[first(d)]++
		s.FirstToken(now.Add(time.Second), id, 1500*time.Millisecond) // half of the prior
		s.Done(now.Add(2*time.Second), id, Outcome{OK: true, CachedTokens: 0})
	}
	for _, name := range []string{"a", "b", "c"} {
		if count[name] < 10 {
			t.Errorf("herd: %v", count)
		}
	}
}

func TestReuseRatioIsLearned(t *testing.T) {
	s := newScheduler(t, Settings{})
	c := candidates("off on", 2000, 100, chain("x", 19))
	c[0].GPUTokens, c[1].GPUTokens = 1900, 1900
	cached := map[string]int{"off": 0, "on": 1900}
	for i := range 60 {
		now, id := at(time.Duration(i)*time.Minute), fmt.Sprint(i)
		d := s.Decide(now, Request{ID: id}, c[i%2:i%2+1])
		s.FirstToken(now, id, 110*time.Millisecond)
		s.Done(now, id, Outcome{OK: true, CachedTokens: cached[first(d)]})
	}
	for _, w := range s.Workers() {
		if w.Worker == "off" && w.Reuse > 0.2 || w.Worker == "on" && w.Reuse != 1 {
			t.Errorf("%s: reuse %v", w.Worker, w.Reuse)
		}
	}
	if got := first(s.Decide(at(2*time.Hour), Request{}, c)); got != "on" {
		t.Errorf("picked %s, whose cache is off", got)
	}
}

func TestMispredictedHitDoesNotChangeSpeed(t *testing.T) {
	s := newScheduler(t, Settings{})
	c := candidates("a", 2000, 100, chain("x", 19))
	c[0].GPUTokens = 1900
	s.Decide(start, Request{ID: "r"}, c)
	s.FirstToken(start, "r", 2020*time.Millisecond) // the blocks were evicted
	s.Done(start, "r", Outcome{OK: true, CachedTokens: 0})
	if got := s.workers["a"].logS; math.Abs(got) > 1e-9 {
		t.Errorf("log slowness %v, want 0", got)
	}
}

// A worker that answers nothing does not look idle once the time of what it
// was given is over.
func TestStuckWorkerRepels(t *testing.T) {
	s := newScheduler(t, Settings{})
	for i := range 3 {
		s.Decide(start, Request{ID: fmt.Sprint(i)}, candidates("stuck", 1000, 100, nil))
	}
	e := s.Decide(at(time.Hour/4), Request{}, candidates("stuck", 100, 100, nil)).Estimates[0]
	if want := 2 * 1010 * time.Millisecond; !near(e.Wait, want) {
		t.Errorf("wait %v behind three requests that are late, want %v", e.Wait, want)
	}
}

func TestCPUHitIsPricedBetween(t *testing.T) {
	sp := plain
	sp.Fetch = 0.1e-3
	s := newScheduler(t, Settings{Speeds: map[string]Speed{"": sp}})
	c := candidates("gpu cpu none", 2000, 100, chain("x", 19))
	c[0].GPUTokens, c[0].CPUTokens = 1900, 1900
	c[1].CPUTokens = 1900
	e := s.Decide(start, Request{}, c).Estimates
	if !near(e[1].Prefill-e[0].Prefill, 190*time.Millisecond) || e[1].Fetched != 1900 {
		t.Errorf("gpu %v, cpu %v (fetched %d)", e[0].Prefill, e[1].Prefill, e[1].Fetched)
	}
	if e[1].Prefill >= e[2].Prefill {
		t.Errorf("cpu %v is not better than a miss %v", e[1].Prefill, e[2].Prefill)
	}
}

func TestTimeScale(t *testing.T) {
	s := newScheduler(t, Settings{TimeScale: 20})
	s.Decide(start, Request{ID: "x"}, candidates("a", 1000, 100, nil))
	e := s.Decide(start, Request{}, candidates("a", 1000, 100, nil)).Estimates[0]
	if want := 1010 * time.Millisecond / 20; !near(e.Wait, want) || !near(e.Prefill, want) {
		t.Errorf("wait %v, prefill %v; want %v", e.Wait, e.Prefill, want)
	}
	s.FirstToken(at(50500*time.Microsecond), "x", 50500*time.Microsecond)
	if got := s.Workers()[0].Slowness; math.Abs(got-1) > 1e-6 {
		t.Errorf("slowness %v, want 1", got)
	}
}

// Absurd gauges give long waits, not negative ones.
func TestPredictionDoesNotOverflow(t *testing.T) {
	s := newScheduler(t, Settings{})
	c := candidates("a b", 1<<31, 0, nil)
	c[0].Load = Load{Running: 1e300, Waiting: 1e8, KVUsage: 5, Known: true}
	for _, e := range s.Decide(start, Request{}, c).Estimates {
		if e.TTFT < e.Wait || e.Wait < 0 || e.Prefill < 0 {
			t.Errorf("%s: TTFT %v, wait %v, prefill %v", e.Worker, e.TTFT, e.Wait, e.Prefill)
		}
	}
}

// A worker that looked slow by chance gets no traffic and so no samples: what
// sets it apart must fade, or it would be idle for ever.
func TestUnluckyWorkerIsTriedAgain(t *testing.T) {
	s := newScheduler(t, Settings{})
	now := start
	ask := func(factor map[string]float64) string {
		now = now.Add(2 * time.Minute)
		id := now.String()
		d := s.Decide(now, Request{ID: id}, candidates("a b", 4000, 100, nil))
		w := first(d)
		e := d.Estimates[d.Order[0]]
		ttft := time.Duration(float64(e.TTFT) / e.Slowness * factor[w])
		s.FirstToken(now.Add(ttft), id, ttft)
		s.Done(now.Add(ttft), id, Outcome{OK: true, CachedTokens: -1, OutputTokens: 1})
		return w
	}
	for range 60 { // b is slow at first
		ask(map[string]float64{"a": 1, "b": 2})
	}
	served := map[string]int{}
	for range 200 { // and then as fast as a
		served[ask(map[string]float64{"a": 1, "b": 1})]++
	}
	if served["b"] < 50 {
		t.Errorf("requests went to %v, want the worker that recovered to have its share", served)
	}
}
