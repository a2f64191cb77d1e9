package kvindex

import "math/bits"

// set is a set of columns. The first 64 need no memory of their own.
type set struct {
	lo uint64
	hi []uint64
}

func (s *set) word(k int) uint64 {
	if k == 0 {
		return s.lo
	}
	if k <= len(s.hi) {
		return s.hi[k-1]
	}
	return 0
}

func (s *set) add(i int) {
	if i < 64 {
		s.lo |= 1 << i
		return
	}
	k := i/64 - 1
	for len(s.hi) <= k {
		s.hi = append(s.hi, 0)
	}
	s.hi[k] |= 1 << (i % 64)
}

func (s *set) remove(i int) {
	if i < 64 {
		s.lo &^= 1 << i
		return
	}
	if k := i/64 - 1; k < len(s.hi) {
		s.hi[k] &^= 1 << (i % 64)
	}
}

func (s *set) empty() bool {
	rest := s.lo
	for _, w := range s.hi {
		rest |= w
	}
	return rest == 0
}

// each calls f for each bit of word k.
func each(word uint64, k int, f func(column int)) {
	for ; word != 0; word &= word - 1 {
		f(k*64 + bits.TrailingZeros64(word))
	}
}
