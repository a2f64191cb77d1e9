package engine_test

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kinference/kinference/internal/fleetsim/engine"
	"github.com/kinference/kinference/internal/vllm"
)

// Random load: blocks are neither lost nor doubled, events rebuild the cache,
// everything finishes.
func TestConservation(t *testing.T) {
	preempted := uint64(0)
	defer func() {
		if preempted == 0 {
			t.Error("the load is too light to preempt")
		}
	}()
	for seed := range uint64(8) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			rnd := rand.New(rand.NewPCG(seed, 1))
			p := tiny(24 + rnd.IntN(40))
			p.StateBlocks = rnd.IntN(3)
			p.MaxSeqs = 2 + rnd.IntN(6)
			if rnd.IntN(2) == 0 {
				p.Groups = []engine.Group{{Kind: "full_attention"}, {Kind: "mamba"}, {Kind: "sliding_window", SlidingWindow: 9}}
			}
			e := engine.New(engine.Config{Profile: p, OnEvents: true, Seed: int64(seed)})
			mirror := newMirror(t)
			var live []*engine.Request
			finished, submitted, aborted := 0, 0, 0
			now := 0.0
			for round := 0; round < 2000 || e.InFlight() > 0; round++ {
				if round < 2000 && rnd.IntN(3) == 0 {
					r := &engine.Request{ID: fmt.Sprint(round), MaxTokens: 1 + rnd.IntN(20)}
					r.Tokens = append(sequence(1000*rnd.IntN(4), rnd.IntN(20)), sequence(9000+10*rnd.IntN(9), 1+rnd.IntN(30))...)
					r.LoRA = []string{"", "", "sql"}[rnd.IntN(3)]
					r.Salt = []string{"", "", "s"}[rnd.IntN(3)]
					submit(t, e, now, r)
					live = append(live, r)
					submitted++
				}
				if rnd.IntN(40) == 0 && len(live) > 0 {
					if e.Abort(live[rnd.IntN(len(live))].ID) {
						aborted++
					}
				}
				if rnd.IntN(100) == 0 {
					e.ResetPrefixCache()
				}
				end, ok := e.Begin(now)
				if !ok {
					continue
				}
				now = end
				if rnd.IntN(20) == 0 && len(live) > 0 && e.Abort(live[len(live)-1].ID) {
					aborted++
				}
				st := e.End()
				finished += len(st.Finished)
				mirror.apply(st.Events)
				if round%50 == 0 {
					mirror.compare(e)
				}
			}
			s := e.Stats()
			if s.Running+s.Waiting != 0 || s.FreeBlocks != p.Blocks {
				t.Errorf("not drained: %+v", s)
			}
			preempted += s.Preemptions
			if finished+aborted != submitted {
				t.Errorf("submitted %d, finished %d, aborted %d, preempted %d", submitted, finished, aborted, s.Preemptions)
			}
			// A clearing of the idle cache is announced by the next iteration only.
			submit(t, e, now, &engine.Request{ID: "last", Tokens: sequence(0, 5), MaxTokens: 1})
			_, steps := run(e, now)
			mirror.apply(steps[0].Events)
			mirror.compare(e)
		})
	}
}

// mirror rebuilds the cache from events, as an index does.
type mirror struct {
	t *testing.T
	n map[[2]uint64]int // copies by group and hash
}

func newMirror(t *testing.T) *mirror { return &mirror{t, map[[2]uint64]int{}} }

func (m *mirror) apply(events []vllm.Event) {
	for _, ev := range events {
		switch ev.Kind {
		case vllm.AllBlocksCleared:
			clear(m.n)
		case vllm.BlockStored:
			if ev.Group == 0 && len(ev.Tokens) != len(ev.Hashes)*ev.BlockSize || len(ev.ExtraKeys) != len(ev.Hashes) {
				m.t.Fatalf("malformed %+v", ev)
			}
			for _, h := range ev.Hashes {
				m.n[[2]uint64{uint64(ev.Group), h}]++
			}
			if ev.HasParent && ev.Group == 0 && m.n[[2]uint64{0, ev.Parent}] == 0 {
				m.t.Fatalf("parent %x is not cached", ev.Parent)
			}
		case vllm.BlockRemoved:
			for _, h := range ev.Hashes {
				k := [2]uint64{uint64(ev.Group), h}
				if m.n[k]--; m.n[k] < 0 {
					m.t.Fatalf("removal of %x in group %d, which is not there", h, ev.Group)
				} else if m.n[k] == 0 {
					delete(m.n, k)
				}
			}
		}
	}
}

func (m *mirror) compare(e *engine.Engine) {
	m.t.Helper()
	want := map[[2]uint64]int{}
	for c := range e.Cached() {
		want[[2]uint64{uint64(c.Group), c.Hash}]++
		if len(c.Tokens)%4 != 0 {
			m.t.Fatalf("chain of %d tokens", len(c.Tokens))
		}
	}
	if d := cmp.Diff(want, m.n); d != "" {
		m.t.Fatalf("events do not rebuild the cache (-true +events):\n%s", d)
	}
}

// One worker's share of the published shared-prefix run: 117 requests of
// 20,300 tokens and 210 outputs, two thirds of the prefix traffic hits.
func BenchmarkSharedPrefix(b *testing.B) {
	for _, p := range engine.Profiles() {
		b.Run(p.Name, func(b *testing.B) {
			b.ReportAllocs()
			prompts := make([][]uint32, 117)
			for i := range prompts {
				prompts[i] = append(sequence(100_000*(i%4), 20_000), sequence(7_000_000+1000*i, 300)...)
			}
			for b.Loop() {
				e := engine.New(engine.Config{Profile: p, OnEvents: true})
				now, next, events := 0.0, 0, 0
				for {
					for next < len(prompts) && e.InFlight() < 3 {
						e.Submit(now, &engine.Request{ID: fmt.Sprint(next), Tokens: prompts[next], MaxTokens: 210})
						next++
					}
					end, ok := e.Begin(now)
					if !ok {
						break
					}
					now = end
					events += len(e.End().Events)
				}
				b.ReportMetric(now, "sim-s/op")
				b.ReportMetric(float64(events), "events/op")
			}
		})
	}
}
