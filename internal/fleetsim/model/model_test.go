package model_test

import (
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/kinference/kinference/internal/fleetsim/model"
	"github.com/kinference/kinference/internal/tokens"
)

func load(t *testing.T) *tokens.Tokenizer {
	t.Helper()
	dir, err := model.Dir()
	if err != nil {
		t.Fatal(err)
	}
	tok, err := tokens.Load(dir)
	if err != nil {
		t.Fatal(err)
	}
	return tok
}

func TestWordsAreSingleTokens(t *testing.T) {
	tok := load(t)
	for _, w := range model.Words() {
		if ids := tok.Encode(nil, " "+w, true); len(ids) != 1 {
			t.Errorf("%q is %d tokens, want 1", " "+w, len(ids))
		}
	}
}

func TestText(t *testing.T) {
	tok := load(t)
	var b strings.Builder
	model.Text(&b, rand.New(rand.NewPCG(1, 1)), 20000)
	ids := tok.Encode(nil, "<|im_start|>"+b.String()+"<|im_end|>", true)
	if len(ids) != 20002 {
		t.Errorf("got %d tokens, want 20002", len(ids))
	}
	if n := b.Len(); n < 80_000 || n > 150_000 {
		t.Errorf("20,000 tokens are %d bytes", n)
	}
}

func TestSize(t *testing.T) {
	tok := load(t)
	if tok.Size() < 2000 || tok.Size() > 8192 {
		t.Errorf("vocabulary of %d", tok.Size())
	}
	for _, s := range []string{"<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</think>"} {
		if ids := tok.Encode(nil, s, false); len(ids) != 1 || tok.Token(ids[0]) != s {
			t.Errorf("%s encodes to %v", s, ids)
		}
	}
	const prose = "The quick brown fox jumps over the lazy dog, and nobody knew why; it's 2026.\n\nfunc main() { return nil }"
	ids := tok.Encode(nil, prose, false)
	t.Logf("%d ids, %d tokens for %d bytes of prose", tok.Size(), len(ids), len(prose))
	if got := tok.Decode(ids); got != prose {
		t.Errorf("decoded %q", got)
	}
}
