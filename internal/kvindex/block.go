package kvindex

import (
	"sync/atomic"

	"github.com/kinference/kinference/internal/kvhash"
)

// Blocks are kept in 64 segments by their hash. A segment has its blocks in
// chunks, where they stay, and finds them by an open-addressing table of 32-bit
// slots, which it can replace without moving a block. That makes 20 bytes for a
// block and some five for each of two slots: one by our own hash, and one by the
// hash of the engine that announced the block first.
//
// One writer at a time changes them; readers look up own hashes beside it without
// waiting (segment.state).

const (
	segmentBits = 6
	localBits   = 20 // of a block's number within its segment
	tagBits     = 32 - localBits
	refTagBits  = 32 - segmentBits - localBits
	chunkBits   = 10
	chunkSize   = 1 << chunkBits
	// fullest is how many slots in 1,000 may be in use, removed ones among them. Then
	// a search for what is not there looks at about 20 slots, that is two cache lines.
	fullest = 840
	// A table grows to a size at which this many in 1,000 are.
	roomy    = 700
	minSlots = 16
)

// ref names a block: its segment and its number there. 0 is none, and start stands for
// what the first block of a sequence follows.
type ref uint32

const start ref = 1 << localBits

func newRef(segment int, local uint32) ref { return ref(segment)<<localBits | ref(local) }
func (r ref) segment() int                 { return int(r >> localBits) }
func (r ref) local() uint32                { return uint32(r) & (1<<localBits - 1) }

// block is one entry. Readers use the first three words, atomically.
type block struct {
	lo, hi uint32 // own hash
	state  uint32
	// link is the block before this one in its lower bits, 0 where this one starts a
	// sequence or the other is not known, and the segment of engine in its upper ones. In
	// a free entry it is the next free one.
	link   uint32
	engine uint32 // part of the engine's mixed hash; 0: not found by an engine's hash
}

func (b *block) own() kvhash.Hash { return kvhash.Hash(b.hi)<<32 | kvhash.Hash(b.lo) }
func (b *block) parent() ref      { return ref(b.link & (goneRef - 1)) }

func (b *block) follow(parent ref) { b.link = b.link&^(goneRef-1) | uint32(parent) }

type segment struct {
	table  atomic.Pointer[[]uint32] // slots: tag and number; 0 is empty
	chunks atomic.Pointer[[]*[chunkSize]block]
	// reused grows before an entry may be given to another block.
	reused atomic.Uint32

	last uint32 // numbers given out so far
	free uint32 // first free entry
	live int
	used int // slots that are not empty
}

// gone is a slot whose block was removed: a search goes on behind it. No block has
// the number 0.
const gone = 1 << localBits

// place of a hash: segment, where its search begins and what its slots are marked with.
func place(h uint64) (segment int, home, tag uint32) {
	return int(h >> (64 - segmentBits)), uint32(h >> (32 - segmentBits)), uint32(h>>(32-segmentBits-tagBits)) & (1<<tagBits - 1)
}

// first is the slot at which a search in a table of n slots begins.
func first(home uint32, n int) int { return int(uint64(home) * uint64(n) >> 32) }

func (s *segment) at(local uint32) *block {
	return &(*s.chunks.Load())[local>>chunkBits][local%chunkSize]
}

// find returns the number of the block with an own hash, 0 for none. For readers, who
// check reused as state does.
func (s *segment) find(own kvhash.Hash, home, tag uint32) uint32 {
	table := s.table.Load()
	if table == nil {
		return 0
	}
	slots := *table
	for i := first(home, len(slots)); ; {
		slot := atomic.LoadUint32(&slots[i])
		switch {
		case slot == 0:
			return 0
		case slot>>localBits == tag && slot != gone:
			if b := s.at(slot & (1<<localBits - 1)); atomic.LoadUint32(&b.lo) == uint32(own) && atomic.LoadUint32(&b.hi) == uint32(own>>32) {
				return slot & (1<<localBits - 1)
			}
		}
		if i++; i == len(slots) {
			i = 0
		}
	}
}

// blocks are all segments, and the tables that find blocks by engine hash.
type blocks struct {
	segments [1 << segmentBits]segment
	engines  [1 << segmentBits]engineTable
}

// engineTable finds blocks by the hash of the engine that announced them first. It
// knows 44 bits of a hash: among ten million blocks one unknown hash in two million
// is taken for a known one. Callers see what a new block is by its own hash, so only
// parents and removals that were never announced can be mistaken.
type engineTable struct {
	slots []uint32 // tag and ref; 0 is empty
	live  int
	used  int
}

const goneRef = 1 << (segmentBits + localBits)

// enginePlace mixes an engine's hash, which may be a small number, without losing any.
func enginePlace(engine uint64) (segment int, home, tag uint32) {
	engine ^= engine >> 33 // the finaliser of MurmurHash3
	engine *= 0xff51afd7ed558ccd
	engine ^= engine >> 33
	engine *= 0xc4ceb9fe1a85ec53
	engine ^= engine >> 33
	segment, home, tag = place(engine)
	return segment, home, tag >> (tagBits - refTagBits)
}

// state is the state of the block with an own hash; 0 if there is none. For readers.
func (t *blocks) state(own kvhash.Hash) uint32 {
	segment, home, tag := place(uint64(own))
	s := &t.segments[segment]
	for {
		reused := s.reused.Load()
		state := uint32(0)
		if local := s.find(own, home, tag); local != 0 {
			state = atomic.LoadUint32(&s.at(local).state)
		}
		if s.reused.Load() == reused {
			return state
		}
	}
}

func (t *blocks) at(r ref) *block { return t.segments[r.segment()].at(r.local()) }

// find returns the block with an own hash, 0 for none.
func (t *blocks) find(own kvhash.Hash) ref {
	segment, home, tag := place(uint64(own))
	if local := t.segments[segment].find(own, home, tag); local != 0 {
		return newRef(segment, local)
	}
	return 0
}

// add makes a block that is not there, for nobody; 0 if there is no room.
func (t *blocks) add(own kvhash.Hash) ref {
	segment, home, tag := place(uint64(own))
	s := &t.segments[segment]
	local := s.free
	if local != 0 {
		s.free = s.at(local).link
	} else {
		if s.last == 1<<localBits-1 {
			return 0
		}
		s.last++
		local = s.last
		if chunks := s.chunks.Load(); chunks == nil || int(local>>chunkBits) == len(*chunks) {
			var grown []*[chunkSize]block
			if chunks != nil {
				grown = *chunks
			}
			// Readers have the old length, so the new element is nothing to them.
			grown = append(grown, new([chunkSize]block))
			s.chunks.Store(&grown)
		}
	}
	b := s.at(local)
	atomic.StoreUint32(&b.lo, uint32(own))
	atomic.StoreUint32(&b.hi, uint32(own>>32))
	b.link, b.engine = 0, 0
	s.live++
	if table := s.table.Load(); table == nil || s.used+1 > len(*table)*fullest/1000 {
		s.rebuild()
	}
	slots := *s.table.Load()
	i := first(home, len(slots))
	for slots[i] != 0 && slots[i] != gone {
		if i++; i == len(slots) {
			i = 0
		}
	}
	if slots[i] == 0 {
		s.used++
	}
	atomic.StoreUint32(&slots[i], tag<<localBits|local)
	return newRef(segment, local)
}

// rebuild makes a new table with room.
func (s *segment) rebuild() {
	var old []uint32
	if table := s.table.Load(); table != nil {
		old = *table
	}
	slots := make([]uint32, size(s.live, len(old)))
	for _, slot := range old {
		if slot == 0 || slot == gone {
			continue
		}
		_, home, _ := place(uint64(s.at(slot & (1<<localBits - 1)).own()))
		insert(slots, home, slot)
	}
	s.used = s.live - 1 // without the one that is being added
	s.table.Store(&slots)
}

// size is the number of slots for live blocks, where there were old ones so far.
func size(live, old int) int {
	n := live * 1000 / roomy
	if n <= 1<<12 {
		n = live * 2 // small tables need not be tight
	}
	if old >= n && old <= 4*n {
		n = old
	}
	return max(n, minSlots)
}

func insert(slots []uint32, home, slot uint32) {
	i := first(home, len(slots))
	for slots[i] != 0 {
		if i++; i == len(slots) {
			i = 0
		}
	}
	slots[i] = slot
}

// remove takes a block of nobody away.
func (t *blocks) remove(r ref) {
	s, b := &t.segments[r.segment()], t.at(r)
	_, home, tag := place(uint64(b.own()))
	slots := *s.table.Load()
	s.used -= bury(slots, first(home, len(slots)), tag<<localBits|r.local(), 1<<32-1, gone)
	if b.engine != 0 {
		e := &t.engines[b.link/goneRef]
		e.used -= bury(e.slots, first(b.engine, len(e.slots)), uint32(r), goneRef-1, goneRef)
		e.live--
	}
	// From here on no search finds it, and whoever found it looks again.
	s.reused.Add(1)
	s.live--
	b.link = s.free
	s.free = r.local()
}

// bury takes the slot whose masked bits are given out of a table, searching from i, and
// returns how many slots became empty: one that nothing follows need not be marked, nor
// those before it.
func bury(slots []uint32, i int, slot, mask, mark uint32) (emptied int) {
	for slots[i]&mask != slot {
		if slots[i] == 0 {
			return 0 // it is not there
		}
		if i++; i == len(slots) {
			i = 0
		}
	}
	if slots[(i+1)%len(slots)] != 0 {
		atomic.StoreUint32(&slots[i], mark)
		return 0
	}
	atomic.StoreUint32(&slots[i], 0)
	for emptied = 1; ; emptied++ {
		if i--; i < 0 {
			i = len(slots) - 1
		}
		if slots[i] != mark {
			return emptied
		}
		atomic.StoreUint32(&slots[i], 0)
	}
}

// byEngine returns the block that was announced first by an engine's hash, 0 for none.
func (t *blocks) byEngine(engine uint64) ref {
	segment, home, tag := enginePlace(engine)
	slots := t.engines[segment].slots
	if len(slots) == 0 {
		return 0
	}
	for i := first(home, len(slots)); slots[i] != 0; {
		if slots[i]>>(segmentBits+localBits) == tag && slots[i] != goneRef {
			if r := ref(slots[i] & (goneRef - 1)); t.at(r).engine == home {
				return r
			}
		}
		if i++; i == len(slots) {
			i = 0
		}
	}
	return 0
}

// name lets a block be found by an engine's hash that finds none yet. It reports false if
// the block has another one or the hash cannot be used.
func (t *blocks) name(r ref, engine uint64) bool {
	segment, home, tag := enginePlace(engine)
	b, e := t.at(r), &t.engines[segment]
	if b.engine != 0 || home == 0 {
		return false
	}
	e.live++
	if e.used+1 > len(e.slots)*fullest/1000 {
		slots := make([]uint32, size(e.live, len(e.slots)))
		for _, slot := range e.slots {
			if slot != 0 && slot != goneRef {
				insert(slots, t.at(ref(slot&(goneRef-1))).engine, slot)
			}
		}
		e.slots, e.used = slots, e.live-1
	}
	i := first(home, len(e.slots))
	for e.slots[i] != 0 && e.slots[i] != goneRef {
		if i++; i == len(e.slots) {
			i = 0
		}
	}
	if e.slots[i] == 0 {
		e.used++
	}
	e.slots[i] = tag<<(segmentBits+localBits) | uint32(r)
	b.engine = home
	b.link |= uint32(segment) * goneRef
	return true
}
