package chat_test

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/kinference/kinference/internal/chat"
	"github.com/kinference/kinference/internal/fleetsim/model"
)

// BenchmarkRender renders a conversation of 32,000 tokens (190 KB) in 40 turns, and a single short message.
func BenchmarkRender(b *testing.B) {
	rng := rand.New(rand.NewPCG(1, 1))
	var messages []map[string]string
	for i := range 40 {
		var text strings.Builder
		model.Text(&text, rng, 800)
		messages = append(messages, map[string]string{"role": []string{"user", "assistant"}[i%2], "content": fmt.Sprintf("%d:%s\n", i, text.String())})
	}
	long, err := json.Marshal(messages)
	if err != nil {
		b.Fatal(err)
	}
	short := json.RawMessage(`[{"role":"system","content":"You are helpful."},{"role":"user","content":"hi"}]`)
	for _, name := range []string{"model", "qwen3", "llama3_1", "deepseek_v3"} {
		tmpl := load(b, name)
		for size, messages := range map[string]json.RawMessage{"short": short, "32k": long} {
			b.Run(name+"/"+size, func(b *testing.B) {
				b.SetBytes(int64(len(messages)))
				b.ReportAllocs()
				for b.Loop() {
					if _, err := tmpl.Render(chat.Request{Messages: messages, AddGenerationPrompt: true}); err != nil {
						b.Fatal(err)
					}
				}
			})
		}
	}
}
