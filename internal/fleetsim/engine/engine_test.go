package engine_test

import (
	"fmt"
	"math"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kinference/kinference/internal/fleetsim/engine"
	"github.com/kinference/kinference/internal/vllm"
)

// tiny has round figures and blocks of 4 tokens: an iteration takes 1 s, a
// prefill token 1 ms more than that once there are over 1000 of them.
func tiny(blocks int) engine.Profile {
	return engine.Profile{Name: "tiny", BlockSize: 4, Blocks: blocks, MaxBatchedTokens: 16, MaxSeqs: 8, W: 1}
}

// sequence returns the tokens from, from+1, ...
func sequence(from, n int) []uint32 {
	t := make([]uint32, n)
	for i := range t {
		t[i] = uint32(from + i)
	}
	return t
}

// run drives e until it is idle and returns the time and all steps.
func run(e *engine.Engine, now float64) (float64, []engine.Step) {
	var steps []engine.Step
	for {
		end, ok := e.Begin(now)
		if !ok {
			return now, steps
		}
		now = end
		st := e.End()
		st.Tokens = slices.Clone(st.Tokens)
		steps = append(steps, st)
	}
}

func submit(t *testing.T, e *engine.Engine, now float64, r *engine.Request) *engine.Request {
	t.Helper()
	if err := e.Submit(now, r); err != nil {
		t.Fatalf("submit %s: %v", r.ID, err)
	}
	return r
}

func near(t *testing.T, what string, got, want float64) {
	t.Helper()
	if math.Abs(got-want) > 1e-9*math.Max(1, math.Abs(want)) {
		t.Errorf("%s = %.9f, want %.9f", what, got, want)
	}
}

// The figures are worked out by hand from the formula.
func TestTimes(t *testing.T) {
	p := engine.L40SQwen27B
	t.Run("prefill alone", func(t *testing.T) {
		e := engine.New(engine.Config{Profile: p})
		r := submit(t, e, 5, &engine.Request{ID: "a", Tokens: sequence(0, 5000), MaxTokens: 1})
		_, steps := run(e, 5)
		if len(steps) != 3 {
			t.Fatalf("%d iterations, want 3 of 2048, 2048 and 904 tokens", len(steps))
		}
		// (2048*3e-4) + 2048*1024*q + ovh; then at context 2048; then 904 at 4096.
		near(t, "chunk 1", steps[0].Time, 0.6144+2048*1024*1.62e-9+0.0017)
		near(t, "chunk 2", steps[1].Time, 0.6144+2048*(2048+1024)*1.62e-9+0.0017)
		near(t, "chunk 3", steps[2].Time, 0.2712+904*(4096+452)*1.62e-9+0.0017)
		// The closed form of the same: L*a + L*L/2*q + 3*ovh.
		near(t, "TTFT", r.FirstToken-r.Arrived, 5000*3e-4+5000*2500*1.62e-9+3*0.0017)
	})
	t.Run("prefill of a hit", func(t *testing.T) {
		e := engine.New(engine.Config{Profile: p})
		submit(t, e, 0, &engine.Request{ID: "a", Tokens: sequence(0, 5000), MaxTokens: 1})
		now, _ := run(e, 0)
		r := submit(t, e, now, &engine.Request{ID: "b", Tokens: sequence(0, 5000), MaxTokens: 1})
		run(e, now)
		if r.Cached != 6*784 {
			t.Errorf("cached %d tokens, want 6 pages", r.Cached)
		}
		// 296 tokens at context 4704.
		near(t, "TTFT", r.FirstToken-r.Arrived, 0.0888+296*(4704+148)*1.62e-9+0.0017)
	})
	t.Run("short prefill is bound by the weights", func(t *testing.T) {
		e := engine.New(engine.Config{Profile: p})
		r := submit(t, e, 0, &engine.Request{ID: "a", Tokens: sequence(0, 100), MaxTokens: 1})
		run(e, 0)
		near(t, "TTFT", r.FirstToken, 0.0368+100*50*1.62e-9+0.0017)
	})
	t.Run("twice the speed", func(t *testing.T) {
		e := engine.New(engine.Config{Profile: p, Speed: 2})
		r := submit(t, e, 0, &engine.Request{ID: "a", Tokens: sequence(0, 100), MaxTokens: 1})
		run(e, 0)
		near(t, "TTFT", r.FirstToken, (0.0368+100*50*1.62e-9+0.0017)/2)
	})
	for _, b := range []int{1, 8, 15} {
		t.Run(fmt.Sprintf("decode of %d", b), func(t *testing.T) {
			e := engine.New(engine.Config{Profile: p})
			shared := sequence(0, 784)
			for i := range b {
				// Each hits the first page, so that all prompts fit one budget.
				if i == 1 {
					e.Begin(0)
					e.End()
				}
				submit(t, e, 0, &engine.Request{ID: fmt.Sprint(i), Tokens: append(shared[:784:784], uint32(i)), MaxTokens: 50})
			}
			_, steps := run(e, 0)
			var last engine.Step
			for _, s := range steps {
				if s.PrefillTokens == 0 && s.DecodeRequests == b {
					last = s
					break
				}
			}
			// C: every sequence attends to its own length including the new token.
			// The first sequence is one token ahead of the others.
			context := 0
			for i := range b {
				context += 785 + 1
				if i == 0 && b > 1 {
					context++
				}
			}
			near(t, "TPOT", last.Time, 0.0368+0.0017+float64(b)*0.45e-3+float64(context)*1e-7)
		})
	}
	t.Run("published TPOT", func(t *testing.T) {
		// routing model: B=1 39 ms, B=8 at 20k context 58 ms, B=15 75 ms.
		tpot := func(b, c float64) float64 { return p.W + p.Ovh + b*p.S + b*c*p.K }
		for _, c := range []struct{ b, c, want float64 }{{1, 1000, 39e-3}, {8, 20000, 58e-3}, {15, 20000, 75e-3}} {
			if got := tpot(c.b, c.c); math.Abs(got-c.want) > 1e-3 {
				t.Errorf("TPOT(%v) = %.1f ms, want %.0f", c.b, got*1e3, c.want*1e3)
			}
		}
	})
	t.Run("decoders and a prefill share an iteration", func(t *testing.T) {
		e := engine.New(engine.Config{Profile: p})
		submit(t, e, 0, &engine.Request{ID: "d", Tokens: sequence(0, 100), MaxTokens: 100})
		end, _ := e.Begin(0)
		e.End()
		submit(t, e, end, &engine.Request{ID: "p", Tokens: sequence(5000, 3000), MaxTokens: 1})
		end2, _ := e.Begin(end)
		st := e.End()
		if st.PrefillTokens != 2047 || st.DecodeRequests != 1 {
			t.Errorf("prefill %d, decode %d; want 2047 and 1: the decoder comes first", st.PrefillTokens, st.DecodeRequests)
		}
		near(t, "time", end2-end, 2048*3e-4+2047*1023.5*1.62e-9+0.0017+0.45e-3+101*1e-7)
	})
}

func TestTokensAndReasons(t *testing.T) {
	e := engine.New(engine.Config{Profile: tiny(32)})
	stop := submit(t, e, 0, &engine.Request{ID: "stop", Tokens: sequence(0, 5), MaxTokens: 9, Output: []uint32{7, 8, 9}})
	long := submit(t, e, 0, &engine.Request{ID: "length", Tokens: sequence(10, 5), MaxTokens: 2, Output: []uint32{7, 8, 9}})
	full := submit(t, e, 0, &engine.Request{ID: "context", Tokens: sequence(20, 126), MaxTokens: 50})
	got := map[string][]uint32{}
	_, steps := run(e, 0)
	for _, s := range steps {
		for _, x := range s.Tokens {
			got[x.R.ID] = append(got[x.R.ID], x.Token)
			if x.First != (len(got[x.R.ID]) == 1) || x.Last != (len(got[x.R.ID]) == x.R.Generated) {
				t.Errorf("%s: first %v last %v at token %d", x.R.ID, x.First, x.Last, len(got[x.R.ID]))
			}
		}
	}
	if d := cmp.Diff([]uint32{7, 8, 9}, got["stop"]); d != "" || stop.Reason != engine.Stop {
		t.Errorf("stop: %s %s", stop.Reason, d)
	}
	if d := cmp.Diff([]uint32{7, 8}, got["length"]); d != "" || long.Reason != engine.Length {
		t.Errorf("length: %s %s", long.Reason, d)
	}
	if full.Generated != 2 || full.Reason != engine.Length {
		t.Errorf("context of 128: generated %d after 126, reason %s", full.Generated, full.Reason)
	}
	st := e.Stats()
	if st.Stopped != 1 || st.Lengthed != 2 || st.GeneratedTokens != 7 || st.PromptTokens != 136 || st.Running+st.Waiting+e.InFlight() != 0 || st.KVUsage != 0 {
		t.Errorf("stats %+v", st)
	}
	for _, c := range []struct {
		r    engine.Request
		want error
	}{
		{engine.Request{ID: "x"}, engine.ErrEmpty},
		{engine.Request{ID: "x", Tokens: sequence(0, 128)}, engine.ErrTooLong},
	} {
		if err := e.Submit(0, &c.r); err != c.want {
			t.Errorf("got %v, want %v", err, c.want)
		}
	}
	submit(t, e, 0, &engine.Request{ID: "twice", Tokens: sequence(0, 5)})
	if err := e.Submit(0, &engine.Request{ID: "twice", Tokens: sequence(0, 5)}); err != engine.ErrDuplicate {
		t.Errorf("second submit: %v", err)
	}
}

// A hit never covers the last token, and counts whole blocks only.
func TestHits(t *testing.T) {
	for _, c := range []struct{ first, second, want int }{
		{16, 16, 12}, // exactly full: the last block is computed again
		{16, 17, 16},
		{16, 19, 16},
		{3, 10, 0},
		{10, 5, 4},
		{10, 4, 0},
	} {
		e := engine.New(engine.Config{Profile: tiny(32)})
		submit(t, e, 0, &engine.Request{ID: "a", Tokens: sequence(0, c.first), MaxTokens: 1})
		now, _ := run(e, 0)
		b := &engine.Request{ID: "b", Tokens: sequence(0, c.second), MaxTokens: 1}
		if got := e.Lookup(b.Tokens, "", ""); got != c.want {
			t.Errorf("%d after %d: lookup %d, want %d", c.second, c.first, got, c.want)
		}
		submit(t, e, now, b)
		run(e, now)
		if b.Cached != c.want {
			t.Errorf("%d after %d: cached %d, want %d", c.second, c.first, b.Cached, c.want)
		}
	}
	t.Run("generated tokens form blocks", func(t *testing.T) {
		e := engine.New(engine.Config{Profile: tiny(32)})
		a := submit(t, e, 0, &engine.Request{ID: "a", Tokens: sequence(0, 6), MaxTokens: 7, Output: sequence(6, 7)})
		now, _ := run(e, 0)
		b := submit(t, e, now, &engine.Request{ID: "b", Tokens: sequence(0, 20), MaxTokens: 1})
		run(e, now)
		// 13 tokens, of which the last was never computed: 12 in full blocks.
		if a.Generated != 7 || b.Cached != 12 {
			t.Errorf("generated %d, then cached %d; want 7 and 12", a.Generated, b.Cached)
		}
	})
	t.Run("hittable when scheduled", func(t *testing.T) {
		p := tiny(64)
		p.MaxBatchedTokens = 64
		e := engine.New(engine.Config{Profile: p})
		submit(t, e, 0, &engine.Request{ID: "a", Tokens: sequence(0, 20), MaxTokens: 1})
		b := submit(t, e, 0, &engine.Request{ID: "b", Tokens: sequence(0, 21), MaxTokens: 1})
		_, steps := run(e, 0)
		if len(steps) != 1 || b.Cached != 20 {
			t.Errorf("%d iterations, sibling cached %d; want both in one, 20", len(steps), b.Cached)
		}
	})
	t.Run("adapter and salt are apart", func(t *testing.T) {
		e := engine.New(engine.Config{Profile: tiny(64)})
		now := 0.0
		for i, c := range []struct {
			lora, salt string
			want       int
		}{
			{"", "", 0}, {"l", "", 0}, {"", "s", 0}, {"l", "s", 0},
			{"l", "", 8}, {"", "s", 8}, {"", "", 8},
			// vLLM's keys are bare strings: a salt named like an adapter meets its
			// first block, though not the others (vLLM issue 44701).
			{"", "l", 4},
		} {
			r := submit(t, e, now, &engine.Request{ID: fmt.Sprint(i), Tokens: sequence(0, 10), MaxTokens: 1, LoRA: c.lora, Salt: c.salt})
			now, _ = run(e, now)
			if r.Cached != c.want {
				t.Errorf("%d (lora %q, salt %q): cached %d, want %d", i, c.lora, c.salt, r.Cached, c.want)
			}
		}
	})
}

func hashes(e *engine.Engine) map[uint64]int {
	n := map[uint64]int{}
	for c := range e.Cached() {
		if c.Group == 0 {
			n[c.Hash]++
		}
	}
	return n
}

func events(steps []engine.Step, kind vllm.Kind) (out []vllm.Event) {
	for _, s := range steps {
		for _, ev := range s.Events {
			if ev.Kind == kind {
				out = append(out, ev)
			}
		}
	}
	return out
}

// The oldest request's blocks go first, and of one request the deepest.
func TestEvictionOrder(t *testing.T) {
	e := engine.New(engine.Config{Profile: tiny(8), OnEvents: true})
	submit(t, e, 0, &engine.Request{ID: "a", Tokens: sequence(0, 13), MaxTokens: 1})
	now, sa := run(e, 0)
	submit(t, e, now, &engine.Request{ID: "b", Tokens: sequence(100, 13), MaxTokens: 1})
	now, sb := run(e, now)
	a, b := events(sa, vllm.BlockStored)[0].Hashes, events(sb, vllm.BlockStored)[0].Hashes
	if len(a) != 3 || len(b) != 3 {
		t.Fatalf("stored %d and %d blocks, want 3 each", len(a), len(b))
	}
	// a is used again, so b is the older one now. The tails of both requests were
	// never hashed: those two blocks are taken before anything is evicted.
	submit(t, e, now, &engine.Request{ID: "a2", Tokens: sequence(0, 13), MaxTokens: 1})
	now, _ = run(e, now)
	submit(t, e, now, &engine.Request{ID: "c", Tokens: sequence(200, 31), MaxTokens: 1})
	_, sc := run(e, now)
	var gone []uint64
	for _, ev := range events(sc, vllm.BlockRemoved) {
		gone = append(gone, ev.Hashes...)
	}
	if d := cmp.Diff([]uint64{b[2], b[1], b[0], a[2], a[1], a[0]}, gone); d != "" {
		t.Errorf("eviction order (-want +got):\n%s", d)
	}
}

// Equal blocks are not merged: a second copy is stored and removed by itself.
func TestCopies(t *testing.T) {
	e := engine.New(engine.Config{Profile: tiny(6), OnEvents: true})
	submit(t, e, 0, &engine.Request{ID: "a", Tokens: sequence(0, 8), MaxTokens: 1})
	now, first := run(e, 0)
	submit(t, e, now, &engine.Request{ID: "b", Tokens: sequence(0, 8), MaxTokens: 1})
	now, second := run(e, now)
	h := events(first, vllm.BlockStored)[0].Hashes
	again := events(second, vllm.BlockStored)
	if len(again) != 1 || len(again[0].Hashes) != 1 || again[0].Hashes[0] != h[1] || again[0].Parent != h[0] {
		t.Fatalf("second run stored %+v, want one more copy of block 1", again)
	}
	if d := cmp.Diff(map[uint64]int{h[0]: 1, h[1]: 2}, hashes(e)); d != "" {
		t.Fatalf("cache (-want +got):\n%s", d)
	}
	if got := e.Lookup(sequence(0, 9), "", ""); got != 8 {
		t.Errorf("lookup %d, want 8", got)
	}
	submit(t, e, now, &engine.Request{ID: "c", Tokens: sequence(100, 23), MaxTokens: 1})
	_, third := run(e, now)
	removed := map[uint64]int{}
	for _, ev := range events(third, vllm.BlockRemoved) {
		for _, x := range ev.Hashes {
			removed[x]++
		}
	}
	if d := cmp.Diff(map[uint64]int{h[0]: 1, h[1]: 2}, removed); d != "" {
		t.Errorf("removals, one per physical copy (-want +got):\n%s", d)
	}
}

func TestLastCopyRemovals(t *testing.T) {
	e := engine.New(engine.Config{Profile: tiny(6), OnEvents: true, LastCopyRemovals: true})
	now := 0.0
	for i := range 3 {
		submit(t, e, now, &engine.Request{ID: fmt.Sprint(i), Tokens: sequence(0, 8), MaxTokens: 1})
		now, _ = run(e, now)
	}
	submit(t, e, now, &engine.Request{ID: "c", Tokens: sequence(100, 23), MaxTokens: 1})
	_, steps := run(e, now)
	if got := len(events(steps, vllm.BlockRemoved)); got != 2 {
		t.Errorf("%d removals, want one for each of 2 hashes in 4 copies", got)
	}
}

func TestPreemptAll(t *testing.T) {
	e := engine.New(engine.Config{Profile: tiny(32)})
	for i := range 3 {
		submit(t, e, 0, &engine.Request{ID: fmt.Sprint(i), Tokens: sequence(10*i, 5), MaxTokens: 4})
	}
	end, _ := e.Begin(0)
	e.PreemptAll()
	if !e.ResetPrefixCache() {
		t.Error("blocks are still in use")
	}
	e.End()
	_, steps := run(e, end)
	var order []string
	for _, s := range steps {
		for _, x := range s.Tokens {
			if x.Last {
				order = append(order, x.R.ID)
			}
		}
	}
	if d := cmp.Diff([]string{"0", "1", "2"}, order); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
}

func TestPreemption(t *testing.T) {
	// 8 blocks of 4: two requests of 9 tokens each hold 3 blocks and grow to 5.
	e := engine.New(engine.Config{Profile: tiny(8)})
	a := submit(t, e, 0, &engine.Request{ID: "a", Tokens: sequence(0, 8), MaxTokens: 11})
	b := submit(t, e, 0, &engine.Request{ID: "b", Tokens: sequence(100, 8), MaxTokens: 11})
	c := submit(t, e, 0, &engine.Request{ID: "c", Tokens: sequence(200, 20), MaxTokens: 1})
	var order []string
	now := 0.0
	for {
		end, ok := e.Begin(now)
		if !ok {
			break
		}
		now = end
		for _, r := range e.End().Finished {
			order = append(order, r.ID)
		}
	}
	if a.Preempted != 0 || b.Preempted == 0 || c.Preempted != 0 {
		t.Errorf("preempted a %d, b %d, c %d times; want only b, the last running", a.Preempted, b.Preempted, c.Preempted)
	}
	if d := cmp.Diff([]string{"a", "b", "c"}, order); d != "" {
		t.Errorf("b goes back to the front of the queue (-want +got):\n%s", d)
	}
	if b.Generated != 11 || b.Cached != 0 {
		t.Errorf("b generated %d (want 11), cached %d (want 0: the first admission counts)", b.Generated, b.Cached)
	}
	st := e.Stats()
	if st.PrefixQueries != 36 || st.Preemptions != uint64(b.Preempted) {
		t.Errorf("queries %d (want 36: re-admission is not counted), preemptions %d", st.PrefixQueries, st.Preemptions)
	}
}

// A prompt is admitted only if all of it fits, and nothing overtakes it.
func TestAdmission(t *testing.T) {
	e := engine.New(engine.Config{Profile: tiny(10)})
	submit(t, e, 0, &engine.Request{ID: "a", Tokens: sequence(0, 15), MaxTokens: 3})
	big := submit(t, e, 0, &engine.Request{ID: "big", Tokens: sequence(100, 30), MaxTokens: 1})
	small := submit(t, e, 0, &engine.Request{ID: "small", Tokens: sequence(200, 2), MaxTokens: 1})
	now, _ := e.Begin(0)
	e.End()
	now, _ = e.Begin(now)
	e.End()
	if st := e.Stats(); st.Running != 1 || st.Waiting != 2 {
		t.Errorf("running %d waiting %d, want 1 and 2", st.Running, st.Waiting)
	}
	run(e, now)
	if big.Scheduled < 3 || small.Scheduled < big.Scheduled {
		t.Errorf("big scheduled at %v, small at %v", big.Scheduled, small.Scheduled)
	}
	t.Run("state pages count", func(t *testing.T) {
		p := tiny(10)
		p.StateBlocks = 3
		e := engine.New(engine.Config{Profile: p})
		if got, want := e.Profile().MaxLen(), 28; got != want {
			t.Errorf("MaxLen %d, want %d", got, want)
		}
		submit(t, e, 0, &engine.Request{ID: "a", Tokens: sequence(0, 8), MaxTokens: 5})
		submit(t, e, 0, &engine.Request{ID: "b", Tokens: sequence(50, 8), MaxTokens: 5})
		submit(t, e, 0, &engine.Request{ID: "c", Tokens: sequence(90, 3), MaxTokens: 5})
		e.Begin(0)
		if st := e.Stats(); st.Running != 2 || st.FreeBlocks != 0 {
			t.Errorf("running %d, free %d; want 2 of 2+3 blocks each", st.Running, st.FreeBlocks)
		}
	})
	t.Run("most sequences", func(t *testing.T) {
		p := tiny(100)
		p.MaxSeqs = 3
		e := engine.New(engine.Config{Profile: p})
		for i := range 5 {
			submit(t, e, 0, &engine.Request{ID: fmt.Sprint(i), Tokens: sequence(i*10, 2), MaxTokens: 5})
		}
		e.Begin(0)
		if st := e.Stats(); st.Running != 3 || st.Waiting != 2 {
			t.Errorf("running %d waiting %d, want 3 and 2", st.Running, st.Waiting)
		}
	})
}

func TestAbort(t *testing.T) {
	e := engine.New(engine.Config{Profile: tiny(16)})
	a := submit(t, e, 0, &engine.Request{ID: "a", Tokens: sequence(0, 10), MaxTokens: 5})
	b := submit(t, e, 0, &engine.Request{ID: "b", Tokens: sequence(50, 10), MaxTokens: 5})
	if !e.Abort("b") || e.Abort("b") || e.Abort("nobody") {
		t.Error("abort of a waiting request must succeed once")
	}
	e.Begin(0)
	if !e.Abort("a") {
		t.Error("abort in the middle of an iteration failed")
	}
	st := e.End()
	if len(st.Tokens) != 0 || a.Reason != engine.Abort || b.Reason != engine.Abort {
		t.Errorf("step %+v, reasons %s %s", st, a.Reason, b.Reason)
	}
	if s := e.Stats(); s.FreeBlocks != 16 || s.CachedBlocks != 2 || s.Aborted != 2 || s.Running != 0 {
		t.Errorf("blocks are free and stay cached: %+v", s)
	}
	if _, ok := e.Begin(1); ok {
		t.Error("work left")
	}
}

func TestResetAndRestart(t *testing.T) {
	e := engine.New(engine.Config{Profile: tiny(16), OnEvents: true, Seed: 3})
	prompt := sequence(0, 9)
	submit(t, e, 0, &engine.Request{ID: "a", Tokens: prompt, MaxTokens: 1})
	e.Begin(0)
	if e.ResetPrefixCache() {
		t.Error("reset while blocks are in use")
	}
	first := e.End().Events[0].Hashes[0]
	if !e.ResetPrefixCache() || e.Lookup(prompt, "", "") != 0 {
		t.Error("reset of an idle engine")
	}
	if _, ok := e.Begin(2); ok {
		t.Fatal("an idle engine must not run for the sake of an event")
	}
	submit(t, e, 5, &engine.Request{ID: "b", Tokens: prompt, MaxTokens: 3})
	e.Begin(5)
	ev := e.End().Events
	if len(ev) != 2 || ev[0].Kind != vllm.AllBlocksCleared || ev[1].Kind != vllm.BlockStored || ev[1].Hashes[0] != first {
		t.Errorf("events %+v, want the clearing first, then the same hash", ev)
	}
	lost := e.Restart()
	if len(lost) != 1 || lost[0].ID != "b" || lost[0].Reason != engine.Abort {
		t.Errorf("lost %+v", lost)
	}
	submit(t, e, 9, &engine.Request{ID: "b", Tokens: prompt, MaxTokens: 1})
	e.Begin(9)
	ev = e.End().Events
	if len(ev) != 1 || ev[0].Hashes[0] == first {
		t.Errorf("after the restart: %+v, want another hash and nothing else", ev)
	}
}
