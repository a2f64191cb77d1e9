package engine

import (
	"encoding/binary"
	"math/bits"

	"github.com/kinference/kinference/internal/vllm"
)

// Digest is an engine's block hash. Hashes shorter than 32 bytes leave its
// front zero: events carry only the end.
type Digest = vllm.Digest

// Hasher is an engine's block hash function. Implementations are pure.
type Hasher interface {
	// Root is the parent of every first block.
	Root() Digest
	// Next is the hash of the block that holds tokens and the extra keys (LoRA
	// name, then salt in a first block) and follows parent.
	Next(parent Digest, tokens []uint32, extra []vllm.ExtraKey) Digest
}

// RealHasher is vLLM's own hash with the given algorithm, seeded with the text
// noneSeed (PYTHONHASHSEED, or the constant "vllm-none-hash" since 2026-08-18):
// engines agree. It is far slower than RandomHasher.
func RealHasher(algorithm vllm.HashAlgorithm, noneSeed string) Hasher {
	return realHasher{algorithm, algorithm.NoneHash(noneSeed)}
}

type realHasher struct {
	algorithm vllm.HashAlgorithm
	root      Digest
}

func (h realHasher) Root() Digest { return h.root }

func (h realHasher) Next(parent Digest, tokens []uint32, extra []vllm.ExtraKey) Digest {
	return h.algorithm.Block(parent, tokens, extra)
}

// RandomHasher is a fast hash seeded by seed: engines with different seeds
// disagree on every hash, as vLLM processes without a fixed seed did before
// 2026-08-18.
func RandomHasher(seed uint64) Hasher { return randomHasher(mix(seed^0x9e3779b97f4a7c15, mixB)) }

type randomHasher uint64

const (
	mixA = 0xa0761d6478bd642f
	mixB = 0xe7037ed1a0b428db
)

func mix(a, b uint64) uint64 {
	hi, lo := bits.Mul64(a, b)
	return hi ^ lo
}

func (h randomHasher) Root() Digest { return wide(mix(uint64(h)^mixB, mixA)) }

func (h randomHasher) Next(parent Digest, tokens []uint32, extra []vllm.ExtraKey) Digest {
	x := parent.Wire() ^ uint64(h)
	for len(tokens) >= 2 {
		x = mix(x^uint64(tokens[0])^uint64(tokens[1])<<32^mixA, mixB)
		tokens = tokens[2:]
	}
	for _, t := range tokens {
		x = mix(x^uint64(t)^mixB, mixA)
	}
	for i, k := range extra {
		x = mix(x^uint64(i+1), mixA)
		for _, c := range []byte(k.Text) {
			x = mix(x^uint64(c)^mixB, mixA)
		}
		for _, c := range k.Bytes {
			x = mix(x^uint64(c)^mixA, mixB)
		}
		x = mix(x^uint64(k.Offset)^mixA, mixB)
	}
	return wide(mix(x^mixA, mixB))
}

func wide(x uint64) (d Digest) {
	binary.BigEndian.PutUint64(d[24:], x)
	return d
}
