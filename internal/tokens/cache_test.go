package tokens_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/kinference/kinference/internal/fleetsim/model"
	"github.com/kinference/kinference/internal/tokens"
)

func TestPrefixCacheIsExact(t *testing.T) {
	for _, name := range append([]string{"model"}, real...) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			tok := load(t, name)
			cache := tokens.NewPrefixCache(tok, 1<<20) // too small for the corpus: it evicts
			all := strings.Join(texts()[:100], "")
			for i, text := range append(texts(), all, all) {
				if name != "model" && i%3 != 0 {
					continue
				}
				got, _ := cache.Encode(text, false)
				if want := tok.Encode(nil, text, false); !slices.Equal(got, want) {
					t.Fatalf("ids differ for %.300q", text)
				}
			}
			if n := cache.Bytes(); n > 1<<20 {
				t.Errorf("cache of 1 MiB holds %d bytes", n)
			}
		})
	}
	t.Run("model_strip", func(t *testing.T) { // cuts only behind added tokens
		tok, err := loadChanged(t, "model", func(file map[string]any) {
			for _, a := range file["added_tokens"].([]any) {
				a.(map[string]any)["lstrip"], a.(map[string]any)["rstrip"] = true, true
			}
		})
		if err != nil {
			t.Fatal(err)
		}
		cache := tokens.NewPrefixCache(tok, 1<<22)
		all := strings.Join(texts(), " <|im_end|>\n ")
		for range 2 {
			got, _ := cache.Encode(all, false)
			if want := tok.Encode(nil, all, false); !slices.Equal(got, want) {
				t.Fatal("ids differ")
			}
		}
	})
}

// TestPrefixCacheReuse plays a conversation: each turn may cost only what it adds and one piece.
func TestPrefixCacheReuse(t *testing.T) {
	tok := load(t, "model")
	cache := tokens.NewPrefixCache(tok, 64<<20)
	rng := rand.New(rand.NewPCG(1, 2))
	var b strings.Builder
	b.WriteString("<|im_start|>system\n")
	model.Text(&b, rng, 5000)
	known := 0
	for turn := range 20 {
		fmt.Fprintf(&b, "<|im_end|>\n<|im_start|>user\n%d", turn)
		model.Text(&b, rng, 50+rng.IntN(300))
		b.WriteString("<|im_end|>\n<|im_start|>assistant\n")
		ids, cached := cache.Encode(b.String(), false)
		if cached < known-300 {
			t.Errorf("turn %d: %d of %d known tokens reused", turn, cached, known)
		}
		known = len(ids)
		model.Text(&b, rng, 100)
	}
	// Another question about the same text, which is not at its start.
	other := "<|im_start|>system\nToday is Sunday.<|im_end|>" + b.String()
	if ids, cached := cache.Encode(other, false); cached < len(ids)/2 {
		t.Errorf("same text behind another start: %d of %d tokens reused", cached, len(ids))
	}
}

func TestPrefixCacheOff(t *testing.T) {
	tok := load(t, "model")
	cache := tokens.NewPrefixCache(tok, 0)
	for range 2 {
		if _, cached := cache.Encode(strings.Repeat("some words ", 1000), false); cached != 0 || cache.Bytes() != 0 {
			t.Errorf("cache of no size reused %d tokens and holds %d bytes", cached, cache.Bytes())
		}
	}
}
