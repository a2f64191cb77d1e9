// Package kvhash names KV-cache blocks by a chained hash over token ids.
//
// A block's hash stands for its tokens and for everything before them, so two
// prompts share a cached prefix exactly as far as their hashes agree. Ingress
// hashes prompts, kvtracker hashes the tokens in the engines' events, and the
// two meet in the index: both must use this package. Engine hashes are never
// used for look-ups, because their seed and algorithm differ from engine to
// engine (vLLM before 2026-08-18 seeds each process at random).
//
// The hash is 64 bits wide and not cryptographic: with 10 million blocks the
// chance of any collision is about 3 in a million, and a collision costs a
// wrong estimate, never a wrong answer. All functions are pure and safe for
// concurrent use.
package kvhash

import "math/bits"

// Hash identifies a block together with all blocks before it.
type Hash uint64

// Odd constants with balanced bits; multiplying by them spreads every input
// bit over the 128-bit product whose halves are then folded together.
const (
	mixA = 0x9e3779b97f4a7c15 // 2^64 / golden ratio
	mixB = 0xd6e8feb86659fd93
	mixC = 0xa0761d6478bd642f
)

// mix folds the 128-bit product of its operands. A zero operand would absorb
// the other one, which the XORs at the call sites make unlikely.
func mix(a, b uint64) uint64 {
	hi, lo := bits.Mul64(a, b)
	return hi ^ lo
}

// Root is the parent of a prompt's first block. LoRA adapter and cache salt
// take part, as in the engine: equal tokens under another adapter or salt are
// other blocks. The two are hashed apart from each other, so that an adapter
// named X never equals a salt X (vLLM issue 44701).
func Root(lora, salt string) Hash {
	h := Hash(mixC)
	h = text(h^0x1, lora)
	return text(h^0x2, salt)
}

// Extra mixes a key that is not a token into h: the identifier of an image
// inside the block that follows, for instance.
func Extra(h Hash, key string) Hash { return text(h^0x3, key) }

// Next is the hash of the block that holds tokens and follows parent.
func Next(parent Hash, tokens []uint32) Hash {
	h := uint64(parent) ^ mixA*uint64(len(tokens))
	for len(tokens) >= 4 {
		a := uint64(tokens[0]) | uint64(tokens[1])<<32
		b := uint64(tokens[2]) | uint64(tokens[3])<<32
		h = mix(h^a^mixB, bits.RotateLeft64(h, 31)^b^mixC)
		tokens = tokens[4:]
	}
	for _, t := range tokens {
		h = mix(h^uint64(t)^mixB, mixA)
	}
	return Hash(mix(h^mixC, mixA))
}

// Append appends the hashes of all full blocks of tokens to dst. A partial
// block at the end has no hash, because engines do not cache it. A blockSize
// below 1 means that it is unknown: nothing is appended.
func Append(dst []Hash, root Hash, tokens []uint32, blockSize int) []Hash {
	if blockSize < 1 {
		return dst
	}
	for h := root; len(tokens) >= blockSize; tokens = tokens[blockSize:] {
		h = Next(h, tokens[:blockSize])
		dst = append(dst, h)
	}
	return dst
}

func text(h Hash, s string) Hash {
	x := uint64(h) ^ mixA*uint64(len(s)+1)
	for i := 0; i < len(s); i++ {
		x = mix(x^uint64(s[i])^mixB, mixC)
	}
	return Hash(x)
}
