package engine_test

import (
	"fmt"
	"testing"

	"github.com/kinference/kinference/internal/fleetsim/engine"
	"github.com/kinference/kinference/internal/vllm"
)

// TestCheckpoints follows the rules that TestDifferentialHybrid of
// test/interop/vllm compares with a real engine.
func TestCheckpoints(t *testing.T) {
	const b = 16
	p := engine.Profile{
		Name: "hybrid", BlockSize: b, Blocks: 64, StateBlocks: 3, MaxBatchedTokens: 6 * b, MaxSeqs: 4, W: 1, Checkpoints: true,
		Groups: engine.L40SQwen27B.Groups,
	}
	e := engine.New(engine.Config{Profile: p, OnEvents: true})
	n := 0
	var events []vllm.Event
	run := func(tokens []uint32) (cached int, steps int) {
		t.Helper()
		n++
		r := &engine.Request{ID: fmt.Sprint(n), Tokens: tokens, MaxTokens: 1}
		if err := e.Submit(0, r); err != nil {
			t.Fatal(err)
		}
		events = nil
		for r.Reason == "" {
			if _, ok := e.Begin(0); !ok {
				t.Fatal("nothing to do")
			}
			events = append(events, e.End().Events...)
			steps++
		}
		return r.Cached, steps
	}
	prompt := func(first, tokens int) []uint32 {
		out := make([]uint32, tokens)
		for i := range out {
			out[i] = uint32(first + i)
		}
		return out
	}
	long := prompt(1000, 3*b+5)
	for _, c := range []struct {
		name          string
		tokens        []uint32
		cached, steps int
	}{
		{"the state before the tail is computed by itself", long, 0, 2},
		{"a hit", long, 3 * b, 1},
		{"no state in the middle", long[:2*b+1], 0, 2},
		{"but now", long[:2*b+1], 2 * b, 1},
		{"an aligned prompt", prompt(3000, 3*b), 0, 2},
		{"keeps the state before its last block", prompt(3000, 3*b), 2 * b, 1},
		{"shares a prefix without a state", append(prompt(3000, 3*b)[:b+4], prompt(5000, 2*b)...), 0, 3},
		{"which is kept for the next", append(prompt(3000, 3*b)[:b+4], prompt(6000, 2*b)...), b, 2},
		{"chunks end between blocks", prompt(7000, 8*b+3), 0, 3},
	} {
		t.Run(c.name, func(t *testing.T) {
			if cached, steps := run(c.tokens); cached != c.cached || steps != c.steps {
				t.Errorf("cached %d in %d steps, want %d in %d", cached, steps, c.cached, c.steps)
			}
		})
	}
	t.Run("groups", func(t *testing.T) {
		run(prompt(9000, 2*b+1))
		var got []string
		for _, ev := range events {
			if ev.Kind == vllm.BlockStored {
				got = append(got, fmt.Sprint(ev.Group, ev.SpecKind, len(ev.Hashes)))
			}
		}
		if want := "[0mamba1 1mamba1 2mamba1 3full_attention2]"; fmt.Sprint(got) != want {
			t.Errorf("stored %v, want %s", got, want)
		}
	})
	t.Run("a state goes with its block", func(t *testing.T) {
		removed := map[int]int{}
		for i := range 20 {
			run(prompt(20_000+1000*i, 5*b+1))
			for _, ev := range events {
				if ev.Kind == vllm.BlockRemoved {
					removed[ev.Group]++
				}
			}
		}
		if removed[0] == 0 || removed[0] != removed[1] || removed[3] <= removed[0] {
			t.Errorf("removed by group: %v", removed)
		}
	})
}
