package vllm_test

import (
	"fmt"
	"slices"
	"testing"

	"github.com/kinference/kinference/internal/fleetsim/engine"
)

// TestDifferentialHybrid compares events and cached tokens of a hybrid of the
// kind that the simulated profiles stand for: three groups of layers with
// recurrent state and one with attention. Its hits end where a state was kept.
// There is room for everything: which states are evicted is not simulated.
func TestDifferentialHybrid(t *testing.T) {
	p := newTwins(t, twinShape{
		model: "hybrid-mamba", blocks: 399, length: 4096, batched: 1000, seqs: 16, args: []string{"--enable-log-requests"},
		profile: func(e *engine.Profile) {
			e.Groups = engine.L40SQwen27B.Groups
			e.StateBlocks, e.Checkpoints = 3, true
		},
	})
	w := p.watch(t)
	b := p.block
	t.Logf("blocks of %d tokens", b)
	system := idSpan(1000, 3*b+b/2)
	user := func(i, n int) []int { return idSpan(10_000+2000*i, n) }
	for _, s := range []struct {
		name   string
		prompt diffPrompt
		cached int
	}{
		{"a prompt", diffPrompt{ids: system, output: 1}, 0},
		{"again", diffPrompt{ids: system, output: 1}, 3 * b},
		{"part of it: no state there", diffPrompt{ids: system[:2*b+5], output: 1}, 0},
		{"the part again", diffPrompt{ids: system[:2*b+5], output: 1}, 2 * b},
		{"longer", diffPrompt{ids: slices.Concat(system, user(0, b)), output: 1}, 3 * b},
		{"an aligned prompt", diffPrompt{ids: user(1, 3*b), output: 1}, 0},
		{"an aligned prompt again", diffPrompt{ids: user(1, 3*b), output: 1}, 2 * b},
		{"a first question", diffPrompt{ids: slices.Concat(user(2, 5*b), user(3, b+5)), output: 1}, 0},
		{"a second one finds no state", diffPrompt{ids: slices.Concat(user(2, 5*b), user(4, b+5)), output: 1}, 0},
		{"a third one does", diffPrompt{ids: slices.Concat(user(2, 5*b), user(5, b+5)), output: 1}, 5 * b},
		{"a long prompt in chunks", diffPrompt{ids: user(6, 12*b+7), output: 1}, 0},
		{"output leaves no state", diffPrompt{ids: user(7, 2*b+b/2), output: 2 * b}, 0},
		{"the next turn", diffPrompt{ids: slices.Concat(user(7, 2*b+b/2), forced(2*b), user(8, b)), output: 1}, 2 * b},
		{"and the one after", diffPrompt{ids: slices.Concat(user(7, 2*b+b/2), forced(2*b), user(8, b), user(9, b)), output: 1}, 5 * b},
		{"less than a block", diffPrompt{ids: user(10, b-1), output: 5}, 0},
	} {
		t.Run(s.name, func(t *testing.T) {
			if got := p.both(t, s.prompt); got.Cached != s.cached {
				t.Errorf("cached %d blocks and %d tokens, want %d and %d", got.Cached/b, got.Cached%b, s.cached/b, s.cached%b)
			}
			w.compare(t)
		})
	}
	t.Run("siblings", func(t *testing.T) {
		w.paused(t, 3, diffCall{path: "/v1/completions", body: fmt.Sprintf(`{"prompt":[%[1]s,%[1]s,%[2]s],"max_tokens":3,"ignore_eos":true,"allowed_token_ids":[%[3]d]}`,
			idList(user(11, 2*b+9)), idList(user(12, 20)), forcedID)})
		w.compare(t)
	})
}
