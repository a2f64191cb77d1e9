package vllm

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"math"
)

// HashAlgorithm is a value of vLLM's --prefix-caching-hash-algo. The xxhash
// forms, which need an optional Python package, are not provided.
type HashAlgorithm string

// Algorithms.
const (
	// SHA256 hashes the pickled block; vLLM's default.
	SHA256 HashAlgorithm = "sha256"
	// SHA256CBOR hashes the block in canonical CBOR.
	SHA256CBOR HashAlgorithm = "sha256_cbor"
)

// DefaultSeed is what vLLM hashes when PYTHONHASHSEED is unset (since 0.29;
// random per process before).
const DefaultSeed = "vllm-none-hash"

// Digest is vLLM's internal hash of one block.
type Digest [sha256.Size]byte

// NoneHash returns the parent of the first block of every sequence.
func (a HashAlgorithm) NoneHash(seed string) Digest {
	if a == SHA256CBOR {
		return sha256.Sum256(cborText(nil, seed))
	}
	return sha256.Sum256(pickle(pickleText(nil, seed)))
}

// Block returns the hash of the block that follows parent. Keys are as in
// Event.ExtraKeys, or Tagged for vLLM 0.31 and later. Blocks must stay below
// about 13,000 tokens, where pickle starts to split its frames.
func (a HashAlgorithm) Block(parent Digest, tokens []uint32, keys []ExtraKey) Digest {
	if a == SHA256CBOR {
		return sha256.Sum256(cborBlock(make([]byte, 0, 64+5*len(tokens)), parent, tokens, keys))
	}
	return sha256.Sum256(pickleBlock(parent, tokens, keys))
}

// Sources of extra keys, as vLLM 0.31 and later hash them.
const (
	sourceLoRA   = "lora"
	sourceImage  = "mm"
	sourceSalt   = "cache_salt"
	sourceEmbeds = "prompt_embeds"
)

// Tagged returns a block's extra keys as vLLM 0.31 and later hash them: each
// begins with its source, so that a salt never equals an adapter's name, and an
// adapter has its path beside it. Events still carry the plain keys. lora is the
// adapter's name, empty for none, path its folder on the engine's disk.
func Tagged(keys []ExtraKey, lora, path string) []ExtraKey {
	out := make([]ExtraKey, len(keys))
	for i, k := range keys {
		switch {
		case k.HasOffset:
			k.Source = sourceImage
		case k.Bytes != nil:
			k.Source = sourceEmbeds
		case i == 0 && lora != "" && k.Text == lora:
			k.Source, k.Path = sourceLoRA, path
		default:
			k.Source = sourceSalt
		}
		out[i] = k
	}
	return out
}

// items is the number of elements of the key's tuple; a plain key of one is no
// tuple.
func (k *ExtraKey) items() int {
	n := 1
	if k.Source != "" {
		n++
	}
	if k.Source == sourceLoRA {
		n++
	}
	if k.HasOffset {
		n++
	}
	return n
}

// Wire returns the digest as it appears in events.
func (d Digest) Wire() uint64 { return WireHash(d[:]) }

// ParseHashAlgorithm returns the algorithm of that name; empty means SHA256.
func ParseHashAlgorithm(name string) (HashAlgorithm, error) {
	switch a := HashAlgorithm(name); a {
	case "":
		return SHA256, nil
	case SHA256, SHA256CBOR:
		return a, nil
	}
	return "", fmt.Errorf("unknown block hash algorithm %q", name)
}

// WireHash returns the integer that vLLM publishes for a digest: its last 8
// bytes, big-endian. Shorter digests count as a big-endian number.
func WireHash(digest []byte) uint64 {
	if n := len(digest); n >= 8 {
		return binary.BigEndian.Uint64(digest[n-8:])
	}
	var v uint64
	for _, c := range digest {
		v = v<<8 | uint64(c)
	}
	return v
}

// cborBlock encodes (parent, tokens, keys or None) as cbor2 does in canonical
// mode.
func cborBlock(dst []byte, parent Digest, tokens []uint32, keys []ExtraKey) []byte {
	dst = cborHead(dst, 4, 3)
	dst = cborBytes(dst, parent[:])
	dst = cborHead(dst, 4, uint64(len(tokens)))
	for _, t := range tokens {
		dst = cborHead(dst, 0, uint64(t))
	}
	if len(keys) == 0 {
		return append(dst, 0xf6)
	}
	dst = cborHead(dst, 4, uint64(len(keys)))
	for _, k := range keys {
		if n := k.items(); n > 1 {
			dst = cborHead(dst, 4, uint64(n))
		}
		if k.Source != "" {
			dst = cborText(dst, k.Source)
		}
		if k.Bytes != nil {
			dst = cborBytes(dst, k.Bytes)
		} else {
			dst = cborText(dst, k.Text)
		}
		if k.Source == sourceLoRA {
			dst = cborText(dst, k.Path)
		}
		switch {
		case !k.HasOffset:
		case k.Offset < 0:
			dst = cborHead(dst, 1, uint64(-(k.Offset + 1)))
		default:
			dst = cborHead(dst, 0, uint64(k.Offset))
		}
	}
	return dst
}

// cborHead writes a major type and its argument in the shortest form (RFC 8949,
// section 3).
func cborHead(dst []byte, major byte, n uint64) []byte {
	major <<= 5
	switch {
	case n < 24:
		return append(dst, major|byte(n))
	case n <= math.MaxUint8:
		return append(dst, major|24, byte(n))
	case n <= math.MaxUint16:
		return binary.BigEndian.AppendUint16(append(dst, major|25), uint16(n))
	case n <= math.MaxUint32:
		return binary.BigEndian.AppendUint32(append(dst, major|26), uint32(n))
	}
	return binary.BigEndian.AppendUint64(append(dst, major|27), n)
}

func cborBytes(dst, b []byte) []byte { return append(cborHead(dst, 2, uint64(len(b))), b...) }

func cborText(dst []byte, s string) []byte { return append(cborHead(dst, 3, uint64(len(s))), s...) }

// Opcodes of Python's pickle protocol 5 (Lib/pickletools.py describes them).
const (
	pickleProto         = 0x80
	pickleFrame         = 0x95
	pickleMemoize       = 0x94
	pickleGet           = 'h'
	pickleStop          = '.'
	pickleNone          = 'N'
	pickleMark          = '('
	pickleTuple         = 't'
	pickleEmptyTuple    = ')'
	pickleTuple1        = 0x85
	pickleInt1          = 'K'
	pickleInt2          = 'M'
	pickleInt4          = 'J'
	pickleLong1         = 0x8a
	pickleShortBytes    = 'C'
	pickleBytes         = 'B'
	pickleShortText     = 0x8c
	pickleText4         = 'X'
	pickleProtocol      = 5
	pickleShortTupleMax = 3
)

// pickle wraps a body in protocol header, one frame and stop. The standard
// pickler does not frame bodies of fewer than 4 bytes; ours are longer.
func pickle(body []byte) []byte {
	body = append(body, pickleStop)
	out := append(make([]byte, 0, len(body)+11), pickleProto, pickleProtocol, pickleFrame)
	out = binary.LittleEndian.AppendUint64(out, uint64(len(body)))
	return append(out, body...)
}

func pickleBlock(parent Digest, tokens []uint32, keys []ExtraKey) []byte {
	b := make([]byte, 0, 64+5*len(tokens))
	b = pickleBinary(b, parent[:])
	b = pickleOpen(b, len(tokens))
	for _, t := range tokens {
		b = pickleInt(b, int64(t))
	}
	b = pickleClose(b, len(tokens))
	if len(keys) == 0 {
		b = append(b, pickleNone)
	} else {
		b = pickleKeys(b, keys)
	}
	return pickle(pickleClose(b, 3))
}

// pickleKeys writes the tuple of keys. Python writes the constant name of a
// source once and refers to it by its number after that: parent and tokens have
// the numbers 0 and 1.
func pickleKeys(dst []byte, keys []ExtraKey) []byte {
	memo, sources := byte(2), map[string]byte{}
	dst = pickleOpen(dst, len(keys))
	for _, k := range keys {
		if at, ok := sources[k.Source]; ok {
			dst = append(dst, pickleGet, at)
		} else if k.Source != "" {
			dst = pickleText(dst, k.Source)
			sources[k.Source] = memo
			memo++
		}
		if k.Bytes != nil {
			dst = pickleBinary(dst, k.Bytes)
		} else {
			dst = pickleText(dst, k.Text)
		}
		memo++
		if k.Source == sourceLoRA {
			dst = pickleText(dst, k.Path)
			memo++
		}
		if k.HasOffset {
			dst = pickleInt(dst, k.Offset)
		}
		if n := k.items(); n > 1 {
			dst = pickleClose(dst, n)
			memo++
		}
	}
	return pickleClose(dst, len(keys))
}

func pickleOpen(dst []byte, n int) []byte {
	if n > pickleShortTupleMax {
		return append(dst, pickleMark)
	}
	return dst
}

func pickleClose(dst []byte, n int) []byte {
	switch {
	case n == 0:
		return append(dst, pickleEmptyTuple)
	case n <= pickleShortTupleMax:
		return append(dst, pickleTuple1+byte(n-1), pickleMemoize)
	}
	return append(dst, pickleTuple, pickleMemoize)
}

func pickleInt(dst []byte, v int64) []byte {
	switch {
	case v >= 0 && v <= math.MaxUint8:
		return append(dst, pickleInt1, byte(v))
	case v >= 0 && v <= math.MaxUint16:
		return binary.LittleEndian.AppendUint16(append(dst, pickleInt2), uint16(v))
	case v >= math.MinInt32 && v <= math.MaxInt32:
		return binary.LittleEndian.AppendUint32(append(dst, pickleInt4), uint32(v))
	}
	// Little-endian two's complement in as few bytes as hold the sign.
	n := 8
	for n > 1 && v>>(8*(n-1)-1) == v>>63 {
		n--
	}
	dst = append(dst, pickleLong1, byte(n))
	for i := range n {
		dst = append(dst, byte(v>>(8*i)))
	}
	return dst
}

func pickleBinary(dst, b []byte) []byte {
	if len(b) <= math.MaxUint8 {
		dst = append(dst, pickleShortBytes, byte(len(b)))
	} else {
		dst = binary.LittleEndian.AppendUint32(append(dst, pickleBytes), uint32(len(b)))
	}
	return append(append(dst, b...), pickleMemoize)
}

func pickleText(dst []byte, s string) []byte {
	if len(s) <= math.MaxUint8 {
		dst = append(dst, pickleShortText, byte(len(s)))
	} else {
		dst = binary.LittleEndian.AppendUint32(append(dst, pickleText4), uint32(len(s)))
	}
	return append(append(dst, s...), pickleMemoize)
}
