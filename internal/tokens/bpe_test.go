package tokens

import (
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
)

// smallBPE returns a vocabulary over a, b, c with many overlapping merges.
func smallBPE(rng *rand.Rand) *bpe {
	b := &bpe{vocab: make(map[string]uint32)}
	var names []string
	for i := range b.bytes {
		b.bytes[i] = uint32(i)
		names = append(names, string([]byte{byte(i)}))
		b.vocab[names[i]] = uint32(i)
	}
	const merges = 60
	b.pairs = newPairTable(merges)
	letters := []uint32{'a', 'b', 'c'}
	for rank := uint32(0); rank < merges; rank++ {
		left, right := letters[rng.IntN(len(letters))], letters[rng.IntN(len(letters))]
		text := names[left] + names[right]
		if b.pairs.get(left, right) != noPair || len(text) > 24 {
			continue
		}
		id, ok := b.vocab[text]
		if !ok {
			id = uint32(len(names))
			b.vocab[text] = id
			names = append(names, text)
			letters = append(letters, id)
		}
		b.pairs.set(left, right, rank, id)
	}
	return b
}

// naive merges by the definition: all pairs are looked at for every merge.
func naive(b *bpe, word string) []uint32 {
	var ids []uint32
	for i := range len(word) {
		ids = append(ids, b.bytes[word[i]])
	}
	for {
		best, at := uint64(noPair), -1
		for i := range len(ids) - 1 {
			if p := b.pairs.get(ids[i], ids[i+1]); p>>32 < best>>32 {
				best, at = p, i
			}
		}
		if at < 0 {
			return ids
		}
		ids = slices.Replace(ids, at, at+2, uint32(best))
	}
}

func TestMergeIsDefinition(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	for range 300 {
		b := smallBPE(rng)
		for range 20 {
			word := make([]byte, 1+rng.IntN(maxShort))
			for i := range word {
				word[i] = "abc"[rng.IntN(3)]
			}
			want := naive(b, string(word))
			if got := b.mergeShort(nil, string(word)); !slices.Equal(got, want) {
				t.Fatalf("mergeShort(%q) = %v, want %v", word, got, want)
			}
			if got, _ := b.mergeLong(nil, string(word)); !slices.Equal(got, want) {
				t.Fatalf("mergeLong(%q) = %v, want %v", word, got, want)
			}
		}
	}
}

// TestMergeIsLinear counts heap operations: eight times the word must not cost much more than eight times as many.
func TestMergeIsLinear(t *testing.T) {
	b := smallBPE(rand.New(rand.NewPCG(5, 6)))
	rng := rand.New(rand.NewPCG(7, 8))
	mixed := make([]byte, 1<<17)
	for i := range mixed {
		mixed[i] = "abc"[rng.IntN(3)]
	}
	for name, word := range map[string]string{"one letter": strings.Repeat("a", 1<<17), "mixed": string(mixed), "no merge": strings.Repeat("x", 1<<17)} {
		_, few := b.mergeLong(nil, word[:len(word)/8])
		_, many := b.mergeLong(nil, word)
		if many > 9*few+100 {
			t.Errorf("%s: %d steps for %d bytes, %d for %d", name, few, len(word)/8, many, len(word))
		}
	}
}
