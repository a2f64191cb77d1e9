// Package vllm_test runs the control plane in front of real vLLM engines.
// scripts/interop-vllm.sh makes the environment; without it every test here is
// skipped and says so.
package vllm_test

import (
	"encoding/json"
	"testing"

	"github.com/kinference/kinference/test/interop/vllm/rig"
)

// One engine, one question: the parts fit.
func TestSmoke(t *testing.T) {
	env := rig.Require(t)
	engines := rig.Start(t, env, rig.Options{})
	front := rig.NewFront(t, env, rig.FrontOptions{}, engines...)
	body, _ := json.Marshal(map[string]any{"model": "qwen", "max_tokens": 8, "messages": []any{map[string]any{"role": "user", "content": "Hello"}}})
	a := front.Post("/v1/chat/completions", body)
	if a.Status != 200 || a.Usage().Output == 0 {
		t.Errorf("answer: %d %.500s", a.Status, a.Body)
	}
	if c := rig.Chosen(front.Explain(a.ID)); int(c.GetPromptTokens()) != a.Usage().Prompt {
		t.Errorf("we count %d prompt tokens, the engine %d", c.GetPromptTokens(), a.Usage().Prompt)
	}
}
