package vllm_test

import (
	"encoding/json"
	"fmt"
	"net/http"
	"testing"

	"github.com/kinference/kinference/test/interop/vllm/rig"
)

// TestOneEngine runs what needs one engine only: starting one takes longest.
func TestOneEngine(t *testing.T) {
	env := rig.Require(t)
	e := rig.Start(t, env, rig.Options{
		MaxModelLen: 8192, LoRAs: adapters, Blocks: 6000,
		// Small steps: a long prompt is under way for long enough to leave it.
		Args: append(chatFlags("qwen"), "--max-loras", "2", "--max-num-batched-tokens", "256", "--max-num-seqs", "4"),
	})[0]
	t.Run("isolation", func(t *testing.T) { isolation(t, env, e) })
	t.Run("passed ids", func(t *testing.T) { passedIDs(t, env, e) })
	t.Run("clients", func(t *testing.T) { clients(t, env, e) })
	t.Run("aborts", func(t *testing.T) { aborts(t, env, e) })
}

// identity is what besides tokens makes a cached block another one.
type identity struct{ model, salt string }

func (i identity) String() string { return fmt.Sprintf("%s/%q", i.model, i.salt) }

// isolation: a prompt hits what the same prompt left under the same adapter and
// salt, and nothing else; what the engine reports and what we predict agree.
func isolation(t *testing.T, env rig.Env, e *rig.Engine) {
	front := rig.NewFront(t, env, rig.FrontOptions{}, e)
	all := []identity{
		{"qwen", ""}, {"qwen", "tenant 1"}, {"qwen", "tenant 2"}, {"qwen", "style-a"}, // a salt that is an adapter's name
		{"style-a", ""}, {"style-b", ""}, {"style-a", "tenant 1"}, {"style-a", "style-a"}, {"style-a", "style-b"},
	}
	g := newGen(23)
	ask := func(i identity, text string) (prompt, cached, predicted int) {
		request := map[string]any{"model": i.model, "max_tokens": 1, "messages": []any{map[string]any{"role": "user", "content": text}}}
		if i.salt != "" {
			request["cache_salt"] = i.salt
		}
		body, _ := json.Marshal(request)
		a := serve(front, "/v1/chat/completions", body)
		if a.Status != http.StatusOK {
			t.Fatalf("%v: status %d: %.300s", i, a.Status, a.Body)
		}
		c := rig.Chosen(front.Explain(a.ID))
		return a.Usage().Prompt, a.Usage().Details.Cached, int(c.GetMatchedTokens() + c.GetAnticipatedTokens())
	}
	shared, apart, wrong := 0, 0, 0
	for _, first := range all {
		for _, second := range all {
			text := g.words(200) // no other pair's
			if _, cached, predicted := ask(first, text); cached != 0 || predicted != 0 {
				t.Errorf("%v alone: %d cached, %d predicted", first, cached, predicted)
			}
			prompt, cached, predicted := ask(second, text)
			want := 0
			if first == second {
				want = (prompt - 1) / blockSize * blockSize
				shared++
			} else {
				apart++
			}
			if cached != want || predicted != want {
				wrong++
				t.Errorf("%v after %v: %d cached, %d predicted, want %d of %d", second, first, cached, predicted, want, prompt)
			}
			// And once more, now that both are there.
			want = (prompt - 1) / blockSize * blockSize
			if _, cached, predicted := ask(second, text); cached != want || predicted != want {
				wrong++
				t.Errorf("%v again: %d cached, %d predicted, want %d of %d", second, cached, predicted, want, prompt)
			}
		}
	}
	t.Logf("%d pairs of salts and adapters: %d of the same shared all they can, %d of others nothing; %d wrong, by the engine and by us alike", len(all)*len(all), shared, apart, wrong)
}
