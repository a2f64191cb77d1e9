package fleetsim

import (
	"math/rand/v2"

	"github.com/kinference/kinference/internal/kvhash"
	"github.com/kinference/kinference/internal/tokens"
)

// maxWords bounds how many different words the answers are made of.
const maxWords = 2000

// words makes answers: whole words of the tokenizer that encode to themselves
// wherever they stand, so that an answer pasted into the next turn's prompt
// gets the ids that the engine generated, and hits its blocks.
type words struct {
	first []uint32 // words without a space before them: they open an answer
	next  []uint32 // words with one
}

func newWords(t *tokens.Tokenizer) words {
	var w words
	var buf []uint32
	for id := range uint32(t.Size()) {
		text := t.Token(id)
		spaced := len(text) > 0 && text[0] == ' '
		letters := text
		if spaced {
			letters = text[1:]
		}
		if len(letters) < 3 || !lowercase(letters) || t.IsSpecial(id) {
			continue
		}
		if buf = t.Encode(buf[:0], text, false); len(buf) != 1 || buf[0] != id {
			continue
		}
		if spaced && len(w.next) < maxWords {
			w.next = append(w.next, id)
		} else if !spaced && len(w.first) < maxWords {
			w.first = append(w.first, id)
		}
	}
	if len(w.next) == 0 {
		// A vocabulary without words: any ids will do.
		for id := range uint32(min(t.Size(), maxWords)) {
			w.next = append(w.next, id)
		}
	}
	if len(w.first) == 0 {
		w.first = w.next
	}
	return w
}

func lowercase(s string) bool {
	for _, c := range []byte(s) {
		if c < 'a' || c > 'z' {
			return false
		}
	}
	return true
}

// answer returns n tokens that depend on the prompt and seed alone, so that
// every replica gives the same answer. A fresh answer starts with a word
// without space, a continuation of the prompt's text with a space.
func (w words) answer(prompt []uint32, seed uint64, n int, fresh bool) []uint32 {
	h := kvhash.Next(kvhash.Root("", ""), prompt)
	rnd := rand.New(rand.NewPCG(uint64(h), seed))
	out := make([]uint32, n)
	for i := range out {
		list := w.next
		if i == 0 && fresh {
			list = w.first
		}
		out[i] = list[rnd.IntN(len(list))]
	}
	return out
}

// only returns words made of the given ids; none means no restriction.
func (w words) only(ids []uint32) words {
	if len(ids) == 0 {
		return w
	}
	return words{first: ids, next: ids}
}
