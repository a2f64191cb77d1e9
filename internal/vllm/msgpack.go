package vllm

import (
	"encoding/binary"
	"math"
)

// reader reads msgpack from p at i. Its methods return false when the next value
// is of another type or truncated; the position is then unspecified, except for
// array, bin and nil, which leave it alone.
type reader struct {
	p []byte
	i int
}

// size reads a big-endian length of the given width after the type byte.
func (r *reader) size(width int) (int, bool) {
	if len(r.p)-r.i < 1+width {
		return 0, false
	}
	b := r.p[r.i+1:]
	r.i += 1 + width
	switch width {
	case 1:
		return int(b[0]), true
	case 2:
		return int(binary.BigEndian.Uint16(b)), true
	}
	return int(binary.BigEndian.Uint32(b)), true
}

// container reads the header of an array or a map. The number of elements is at
// most the number of bytes that are left, so that callers may allocate by it.
func (r *reader) container() (n int, isMap, ok bool) {
	if r.i >= len(r.p) {
		return 0, false, false
	}
	switch c := r.p[r.i]; {
	case c&0xf0 == 0x90:
		n, ok = int(c&0x0f), true
		r.i++
	case c&0xf0 == 0x80:
		n, isMap, ok = int(c&0x0f), true, true
		r.i++
	case c == 0xdc:
		n, ok = r.size(2)
	case c == 0xdd:
		n, ok = r.size(4)
	case c == 0xde:
		n, ok = r.size(2)
		isMap = true
	case c == 0xdf:
		n, ok = r.size(4)
		isMap = true
	}
	return n, isMap, ok && n <= len(r.p)-r.i
}

// array reads the header of an array.
func (r *reader) array() (n int, ok bool) {
	start := r.i
	n, isMap, ok := r.container()
	if !ok || isMap {
		r.i = start
		return 0, false
	}
	return n, true
}

func (r *reader) nil() bool {
	if r.i < len(r.p) && r.p[r.i] == 0xc0 {
		r.i++
		return true
	}
	return false
}

// take returns the next n bytes without copying.
func (r *reader) take(n int) ([]byte, bool) {
	if n > len(r.p)-r.i {
		return nil, false
	}
	b := r.p[r.i : r.i+n]
	r.i += n
	return b, true
}

func (r *reader) text() ([]byte, bool) {
	if r.i >= len(r.p) {
		return nil, false
	}
	var n int
	var ok bool
	switch c := r.p[r.i]; {
	case c&0xe0 == 0xa0:
		n, ok = int(c&0x1f), true
		r.i++
	case c == 0xd9:
		n, ok = r.size(1)
	case c == 0xda:
		n, ok = r.size(2)
	case c == 0xdb:
		n, ok = r.size(4)
	}
	if !ok {
		return nil, false
	}
	return r.take(n)
}

func (r *reader) bin() ([]byte, bool) {
	if r.i >= len(r.p) {
		return nil, false
	}
	start := r.i
	var n int
	var ok bool
	switch r.p[r.i] {
	case 0xc4:
		n, ok = r.size(1)
	case 0xc5:
		n, ok = r.size(2)
	case 0xc6:
		n, ok = r.size(4)
	}
	if ok {
		if b, ok := r.take(n); ok {
			return b, true
		}
	}
	r.i = start
	return nil, false
}

// bits reads any integer as 64 bits in two's complement.
func (r *reader) bits() (v uint64, negative, ok bool) {
	if r.i >= len(r.p) {
		return 0, false, false
	}
	c := r.p[r.i]
	switch {
	case c < 0x80:
		r.i++
		return uint64(c), false, true
	case c >= 0xe0:
		r.i++
		return uint64(int64(int8(c))), true, true
	case c < 0xcc || c > 0xd3:
		return 0, false, false
	}
	width := 1 << (c & 3)
	b := r.p[r.i+1:]
	if len(b) < width {
		return 0, false, false
	}
	r.i += 1 + width
	switch c {
	case 0xcc:
		return uint64(b[0]), false, true
	case 0xcd:
		return uint64(binary.BigEndian.Uint16(b)), false, true
	case 0xce:
		return uint64(binary.BigEndian.Uint32(b)), false, true
	case 0xcf:
		return binary.BigEndian.Uint64(b), false, true
	}
	var s int64
	switch c {
	case 0xd0:
		s = int64(int8(b[0]))
	case 0xd1:
		s = int64(int16(binary.BigEndian.Uint16(b)))
	case 0xd2:
		s = int64(int32(binary.BigEndian.Uint32(b)))
	default:
		s = int64(binary.BigEndian.Uint64(b))
	}
	return uint64(s), s < 0, true
}

// int reads an integer that fits an int64.
func (r *reader) int() (int64, bool) {
	v, negative, ok := r.bits()
	if !ok || !negative && v > math.MaxInt64 {
		return 0, false
	}
	return int64(v), true
}

// smallInt reads a non-negative integer of at most 31 bits.
func (r *reader) smallInt() (int, bool) {
	v, negative, ok := r.bits()
	if !ok || negative || v > math.MaxInt32 {
		return 0, false
	}
	return int(v), true
}

// hash reads a block hash, an integer or a digest: see Event.Hashes.
func (r *reader) hash() (uint64, bool) {
	if v, _, ok := r.bits(); ok {
		return v, true
	}
	digest, ok := r.bin()
	if !ok || len(digest) == 0 {
		return 0, false
	}
	return WireHash(digest), true
}

// number reads a float or an integer.
func (r *reader) number() (float64, bool) {
	if r.i >= len(r.p) {
		return 0, false
	}
	switch b := r.p[r.i:]; {
	case b[0] == 0xcb && len(b) >= 9:
		r.i += 9
		return math.Float64frombits(binary.BigEndian.Uint64(b[1:])), true
	case b[0] == 0xca && len(b) >= 5:
		r.i += 5
		return float64(math.Float32frombits(binary.BigEndian.Uint32(b[1:]))), true
	}
	v, negative, ok := r.bits()
	if negative {
		return float64(int64(v)), ok
	}
	return float64(v), ok
}

// skip moves past one value of any type. It does not recurse, so depth costs
// nothing, and it gives up as soon as more values are due than bytes are left.
func (r *reader) skip() bool {
	for due := 1; due > 0; due-- {
		if due > len(r.p)-r.i {
			return false
		}
		c := r.p[r.i]
		if c&0xf0 == 0x80 || c&0xf0 == 0x90 || c >= 0xdc && c <= 0xdf {
			n, isMap, ok := r.container()
			if !ok {
				return false
			}
			due += n
			if isMap {
				due += n
			}
			continue
		}
		if !r.skipScalar(c) {
			return false
		}
	}
	return true
}

func (r *reader) skipScalar(c byte) bool {
	n, ok := 0, true
	switch {
	case c < 0x80, c >= 0xe0, c == 0xc0, c == 0xc2, c == 0xc3:
		r.i++
	case c&0xe0 == 0xa0:
		r.i++
		n = int(c & 0x1f)
	case c == 0xc4, c == 0xd9:
		n, ok = r.size(1)
	case c == 0xc5, c == 0xda:
		n, ok = r.size(2)
	case c == 0xc6, c == 0xdb:
		n, ok = r.size(4)
	case c >= 0xc7 && c <= 0xc9: // ext with a length, then its type byte
		n, ok = r.size(1 << (c - 0xc7))
		n++
	case c == 0xca:
		n = 5
	case c == 0xcb:
		n = 9
	case c >= 0xcc && c <= 0xd3:
		n = 1 + 1<<(c&3)
	case c >= 0xd4 && c <= 0xd8: // ext of 1, 2, 4, 8, 16 bytes
		n = 2 + 1<<(c-0xd4)
	default: // 0xc1 is never used
		return false
	}
	if !ok {
		return false
	}
	_, ok = r.take(n)
	return ok
}

// The writers below use the shortest form, as msgspec does.

func appendUint(dst []byte, v uint64) []byte {
	switch {
	case v < 0x80:
		return append(dst, byte(v))
	case v <= math.MaxUint8:
		return append(dst, 0xcc, byte(v))
	case v <= math.MaxUint16:
		return binary.BigEndian.AppendUint16(append(dst, 0xcd), uint16(v))
	case v <= math.MaxUint32:
		return binary.BigEndian.AppendUint32(append(dst, 0xce), uint32(v))
	}
	return binary.BigEndian.AppendUint64(append(dst, 0xcf), v)
}

func appendInt(dst []byte, v int64) []byte {
	switch {
	case v >= 0:
		return appendUint(dst, uint64(v))
	case v >= -32:
		return append(dst, byte(v))
	case v >= math.MinInt8:
		return append(dst, 0xd0, byte(v))
	case v >= math.MinInt16:
		return binary.BigEndian.AppendUint16(append(dst, 0xd1), uint16(v))
	case v >= math.MinInt32:
		return binary.BigEndian.AppendUint32(append(dst, 0xd2), uint32(v))
	}
	return binary.BigEndian.AppendUint64(append(dst, 0xd3), uint64(v))
}

func appendFloat(dst []byte, v float64) []byte {
	return binary.BigEndian.AppendUint64(append(dst, 0xcb), math.Float64bits(v))
}

func appendNil(dst []byte) []byte { return append(dst, 0xc0) }

func appendText(dst []byte, s string) []byte {
	switch n := len(s); {
	case n < 32:
		dst = append(dst, 0xa0|byte(n))
	case n <= math.MaxUint8:
		dst = append(dst, 0xd9, byte(n))
	case n <= math.MaxUint16:
		dst = binary.BigEndian.AppendUint16(append(dst, 0xda), uint16(n))
	default:
		dst = binary.BigEndian.AppendUint32(append(dst, 0xdb), uint32(n))
	}
	return append(dst, s...)
}

func appendBin(dst, b []byte) []byte {
	switch n := len(b); {
	case n <= math.MaxUint8:
		dst = append(dst, 0xc4, byte(n))
	case n <= math.MaxUint16:
		dst = binary.BigEndian.AppendUint16(append(dst, 0xc5), uint16(n))
	default:
		dst = binary.BigEndian.AppendUint32(append(dst, 0xc6), uint32(n))
	}
	return append(dst, b...)
}

func appendArray(dst []byte, n int) []byte {
	switch {
	case n < 16:
		return append(dst, 0x90|byte(n))
	case n <= math.MaxUint16:
		return binary.BigEndian.AppendUint16(append(dst, 0xdc), uint16(n))
	}
	return binary.BigEndian.AppendUint32(append(dst, 0xdd), uint32(n))
}

// appendMap writes the header of a map of at most 15 pairs.
func appendMap(dst []byte, n int) []byte { return append(dst, 0x80|byte(n)) }
