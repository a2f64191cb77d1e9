package tokens_test

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/kinference/kinference/internal/fleetsim/model"
	"github.com/kinference/kinference/internal/tokens"
)

// kinds of text for benchmarks, each about size bytes.
func benchText(kind string, size int) string {
	rng := rand.New(rand.NewPCG(1, 1))
	var b strings.Builder
	switch kind {
	case "english":
		words := model.Words()
		for b.Len() < size {
			// Zipf's law with a long tail of rare words, as in prose.
			w := words[int(float64(len(words))*rng.Float64()*rng.Float64()*rng.Float64())]
			if rng.IntN(20) == 0 {
				w += words[rng.IntN(len(words))]
			}
			if rng.IntN(12) == 0 {
				w = strings.ToUpper(w[:1]) + w[1:]
			}
			b.WriteString(w)
			b.WriteString([]string{" ", " ", " ", " ", " ", " ", " ", ", ", ". ", ".\n\n", "'s "}[rng.IntN(11)])
		}
	case "code", "chinese":
		from, to := 280, 400 // Go, Python and JSON in the corpus
		if kind == "chinese" {
			from, to = 140, 160
		}
		for b.Len() < size {
			b.WriteString(texts()[from+rng.IntN(to-from)])
		}
	case "rare":
		for b.Len() < size {
			for range 3 + rng.IntN(8) {
				b.WriteByte('a' + byte(rng.IntN(26)))
			}
			b.WriteByte(' ')
		}
	}
	return strings.ToValidUTF8(b.String()[:size], "")
}

// BenchmarkEncode: go test -run - -bench Encode ./internal/tokens
func BenchmarkEncode(b *testing.B) {
	for _, name := range append([]string{"model"}, real...) {
		for _, kind := range []string{"english", "code", "chinese", "rare"} {
			b.Run(name+"/"+kind, func(b *testing.B) {
				tok := load(b, name)
				text := benchText(kind, 128<<10)
				ids := make([]uint32, 0, len(text))
				tok.Encode(ids, text, false)
				b.SetBytes(int64(len(text)))
				b.ReportAllocs()
				for b.Loop() {
					tok.Encode(ids, text, false)
				}
			})
		}
	}
}

// BenchmarkEncodeLong shows that long words cost in proportion to their length: compare the MB/s of the sizes.
func BenchmarkEncodeLong(b *testing.B) {
	for kind, unit := range map[string]string{"a": "a", "chinese": "的一是不了在人有我", "spaces": " ", "newlines": "\n"} {
		for _, size := range []int{1 << 14, 1 << 17, 1 << 20} {
			b.Run(fmt.Sprintf("%s/%dKiB", kind, size>>10), func(b *testing.B) {
				tok := load(b, "qwen3")
				text := strings.Repeat(unit, size/len(unit))
				ids := make([]uint32, 0, len(text))
				b.SetBytes(int64(len(text)))
				b.ReportAllocs()
				for b.Loop() {
					tok.Encode(ids, text, false)
				}
			})
		}
	}
}

// BenchmarkPrefixCache encodes a prompt of 100 KiB of which all but the last 200 bytes are known.
func BenchmarkPrefixCache(b *testing.B) {
	for _, kind := range []string{"english", "chinese"} {
		b.Run(kind, func(b *testing.B) {
			tok := load(b, "qwen3")
			cache := tokens.NewPrefixCache(tok, 64<<20)
			text := "<|im_start|>user\n" + benchText(kind, 100<<10)
			b.SetBytes(int64(len(text)))
			b.ReportAllocs()
			var turns []string
			for turn := range 64 {
				turns = append(turns, fmt.Sprintf("%s Turn %d: what does it say about the weather in the north of the country?", text, turn))
			}
			for turn := 0; b.Loop(); turn++ {
				cache.Encode(turns[turn%len(turns)], false)
			}
		})
	}
}

func BenchmarkLoad(b *testing.B) {
	for _, name := range append([]string{"model"}, real...) {
		b.Run(name, func(b *testing.B) {
			dir := folder(b, name)
			b.ReportAllocs()
			for b.Loop() {
				if _, err := tokens.Load(dir); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
