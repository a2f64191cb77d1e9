package kvindex

import (
	"encoding/binary"
	"math/bits"
	"slices"
	"sync/atomic"
)

// Which columns hold a block, and which hold a block that follows it, are four
// sets of columns. Few combinations of them exist at a time, because blocks of
// one conversation are held by the same workers; so each is kept once, as a state,
// and a block costs four bytes for all of them.

// plane is one of the sets of a state.
type plane uint8

const (
	inGPU   plane = iota // columns that hold the block in GPU memory
	inCPU                // in the host's memory
	nextGPU              // columns that hold a following block in GPU memory
	nextAny              // that hold a following block in either
	planes  = 4
)

func (p plane) bit() uint8 { return 1 << p }

// set is an immutable set of columns without zero words at its end.
type set struct{ words []uint64 }

func (s *set) has(col int) bool {
	k := col / 64
	return k < len(s.words) && s.words[k]>>(col%64)&1 != 0
}

// add is for sets that nobody else knows yet.
func (s *set) add(col int) {
	for len(s.words) <= col/64 {
		s.words = append(s.words, 0)
	}
	s.words[col/64] |= 1 << (col % 64)
}

func (s *set) word(k int) uint64 {
	if k < len(s.words) {
		return s.words[k]
	}
	return 0
}

// each calls f for each bit of word k.
func each(word uint64, k int, f func(column int)) {
	for ; word != 0; word &= word - 1 {
		f(k*64 + bits.TrailingZeros64(word))
	}
}

// state is a combination of sets. It does not change.
type state struct {
	sets [planes]*set
	any  *set // in GPU or in CPU
}

func (s *state) in(p plane, col int) bool { return s.sets[p].has(col) }

// holes is how many kinds of holes a column has at a block of this state: it
// holds a following block, and not this one.
func (s *state) holes(col int) int {
	n := 0
	if s.in(nextGPU, col) && !s.in(inGPU, col) {
		n++
	}
	if s.in(nextAny, col) && !s.any.has(col) {
		n++
	}
	return n
}

// states are all states in use. One writer at a time may call the methods; get is
// for readers beside it.
type states struct {
	chunks [1 << 14]atomic.Pointer[[stateChunk]atomic.Pointer[state]]
	// recycled grows before numbers of states are given to others.
	recycled atomic.Uint64

	refs  []int32 // blocks by state; unused states keep their numbers for a while
	used  int     // states with a number
	free  []uint32
	next  int // used at which unused numbers are collected
	ids   map[[planes]*set]uint32
	sets  map[string]*set
	cache []move // direct-mapped
	words []uint64
	key   []byte
}

const (
	stateChunk = 1 << 10
	// minStates is how many there are before unused ones are looked for.
	minStates = 1 << 12
	// maxStates is how many there may be for new blocks to be taken: each costs some
	// hundred bytes.
	maxStates = 1 << 20
)

// move is a remembered transition.
type move struct {
	key   uint64
	to    uint32
	holes int8
}

func (s *states) start() {
	s.ids, s.sets, s.next = map[[planes]*set]uint32{}, map[string]*set{}, minStates
	s.cache = make([]move, 1<<8)
	none := s.intern(nil)
	s.id([planes]*set{none, none, none, none}) // number 0: a block of nobody
}

// get returns the state of a number.
func (s *states) get(id uint32) *state { return s.chunks[id/stateChunk].Load()[id%stateChunk].Load() }

// intern returns the one set of these words, which it does not keep.
func (s *states) intern(words []uint64) *set {
	for len(words) > 0 && words[len(words)-1] == 0 {
		words = words[:len(words)-1]
	}
	s.key = appendKey(s.key[:0], words)
	if x := s.sets[string(s.key)]; x != nil {
		return x
	}
	x := &set{slices.Clone(words)}
	s.sets[string(s.key)] = x
	return x
}

func appendKey(b []byte, words []uint64) []byte {
	for _, w := range words {
		b = binary.LittleEndian.AppendUint64(b, w)
	}
	return b
}

// id returns the number of the state of these sets.
func (s *states) id(sets [planes]*set) uint32 {
	if id, ok := s.ids[sets]; ok {
		return id
	}
	x := &state{sets: sets, any: sets[inGPU]}
	if cpu := sets[inCPU]; len(cpu.words) > 0 {
		s.words = s.words[:0]
		for k := range max(len(cpu.words), len(x.any.words)) {
			s.words = append(s.words, cpu.word(k)|x.any.word(k))
		}
		x.any = s.intern(s.words)
	}
	var id uint32
	if n := len(s.free); n > 0 {
		id, s.free = s.free[n-1], s.free[:n-1]
	} else {
		if id = uint32(len(s.refs)); int(id) == len(s.chunks)*stateChunk {
			return 0 // as good as impossible: the block is forgotten
		}
		s.refs = append(s.refs, 0)
		if id%stateChunk == 0 {
			s.chunks[id/stateChunk].Store(new([stateChunk]atomic.Pointer[state]))
		}
	}
	s.chunks[id/stateChunk].Load()[id%stateChunk].Store(x)
	s.ids[sets] = id
	s.used++
	return id
}

// move returns the state after a column entered and left sets (bits of planes), and how
// many holes more the column has then.
func (s *states) move(from uint32, col int, enter, leave uint8) (to uint32, holes int) {
	key := uint64(from)<<32 | uint64(col)<<8 | uint64(enter)<<4 | uint64(leave)
	m := &s.cache[key*0x9e3779b97f4a7c15>>32&uint64(len(s.cache)-1)]
	if m.key == key {
		return m.to, int(m.holes)
	}
	old := s.get(from)
	sets := old.sets
	for p := range plane(planes) {
		switch {
		case enter&p.bit() != 0 && !sets[p].has(col):
		case leave&p.bit() != 0 && sets[p].has(col):
		default:
			continue
		}
		s.words = append(s.words[:0], sets[p].words...)
		for len(s.words) <= col/64 {
			s.words = append(s.words, 0)
		}
		s.words[col/64] ^= 1 << (col % 64)
		sets[p] = s.intern(s.words)
	}
	to = s.id(sets)
	holes = s.get(to).holes(col) - old.holes(col)
	*m = move{key, to, int8(holes)}
	return to, holes
}

// without returns the state without some columns.
func (s *states) without(from uint32, gone *set) uint32 {
	sets := s.get(from).sets
	for p, x := range sets {
		s.words = s.words[:0]
		for k, w := range x.words {
			s.words = append(s.words, w&^gone.word(k))
		}
		sets[p] = s.intern(s.words)
	}
	return s.id(sets)
}

// count notes that a block went from one state to another.
func (s *states) count(from, to uint32) {
	s.refs[from]--
	s.refs[to]++
}

// collect gives the numbers of states without blocks to others, if there are many.
// It is called between operations, and reports whether it did.
func (s *states) collect() bool {
	if s.used < s.next {
		return false
	}
	s.recycled.Add(1)
	clear(s.sets)
	clear(s.cache)
	for sets, id := range s.ids {
		if s.refs[id] <= 0 && id != 0 {
			delete(s.ids, sets)
			s.free = append(s.free, id)
			s.used--
			continue
		}
		x := s.get(id)
		for _, y := range append(x.sets[:], x.any) {
			s.key = appendKey(s.key[:0], y.words)
			s.sets[string(s.key)] = y
		}
	}
	s.next = max(2*s.used, minStates)
	if len(s.cache) < 1<<16 && s.used > len(s.cache)/4 {
		s.cache = make([]move, 1<<16)
	}
	return true
}
