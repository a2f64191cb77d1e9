package prompt

import (
	"bytes"
	"crypto/sha256"
	"math/rand/v2"
	"regexp"
	"strings"
	"testing"

	"github.com/kinference/kinference/internal/openai"
)

// TestShorten compares with what is meant: of each run of more than maxBase64
// characters of base64 the start stays and a digest stands for the rest.
func TestShorten(t *testing.T) {
	runs := regexp.MustCompile(`(?:[A-Za-z0-9+/_=-]|\\/)+`)
	rng := rand.New(rand.NewPCG(1, 2))
	for range 2000 {
		var text []byte
		for range rng.IntN(6) {
			n := rng.IntN(40)
			if rng.IntN(2) == 0 {
				n = maxBase64 - 2 + rng.IntN(5)
			}
			if rng.IntN(8) == 0 {
				n = 3 * maxBase64
			}
			text = append(text, bytes.Repeat([]byte{"aZ9+/-_=\\"[rng.IntN(9)]}, n)...)
			if rng.IntN(8) == 0 {
				text = append(text, strings.Repeat([]string{`\/`, `\u597d`}[rng.IntN(2)], n/2)...)
			}
			text = append(text, strings.Repeat(" ", rng.IntN(2))...)
			text = append(text, strings.Repeat("\"", rng.IntN(2))...)
		}
		want := runs.ReplaceAllFunc(text, func(run []byte) []byte {
			if len(run) <= maxBase64 {
				return run
			}
			head := maxBase64 - sha256.Size
			sum := sha256.Sum256(run[head:])
			return append(bytes.Clone(run[:head]), sum[:]...)
		})
		before := bytes.Clone(text)
		if got := shorten(text); !bytes.Equal(got, want) {
			t.Fatalf("%d bytes of %q became %d, want %d", len(text), text, len(got), len(want))
		}
		if !bytes.Equal(text, before) {
			t.Fatal("the text was changed")
		}
	}
}

func TestHasMedia(t *testing.T) {
	for text, want := range map[string]bool{
		``:  false,
		`"`: false,
		`[{"role":"user","content":"an image_url"}]`:                         false,
		`[{"role":"user","content":"an \"image_url\" in text"}]`:             false,
		`[{"role":"user","content":[{"type":"text","text":"x"}]}]`:           false,
		`[{"content":[{"type":"image_url","image_url":{"url":"data:,"}}]}]`:  true,
		`[{"content":[{"type":"input_audio"}]}]`:                             true,
		`[{"content":[{"video_url":{}}]}]`:                                   true,
		`[{"role":"user","content":[{"type":"text","text":"x"}],"image_pil"`: true,
	} {
		if got := hasMedia([]byte(text)); got != want {
			t.Errorf("%s: %v", text, got)
		}
	}
}

// BenchmarkApproximate is the cost of hashing text where nobody can tell its tokens.
//
//	go test -run '^$' -bench Approximate -benchmem ./services/ingress/internal/prompt
func BenchmarkApproximate(b *testing.B) {
	text := strings.Repeat("When a node drains, its pods get a signal and thirty seconds to finish. ", 400_000/72)
	r := &openai.Request{Messages: []byte(`[{"role":"user","content":"` + text + `"}]`)}
	b.SetBytes(int64(len(r.Messages)))
	b.ReportAllocs()
	for b.Loop() {
		if hasMedia(r.Messages) || len(pack(r)) == 0 {
			b.Fatal("odd")
		}
	}
}
