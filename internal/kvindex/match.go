package kvindex

import (
	"math/bits"
	"slices"
	"sync"

	"github.com/kinference/kinference/internal/kvhash"
)

// Readers take no lock. A writer beside them may change blocks that they have looked at,
// as it may right after them; what they must not see is an entry or a state that has
// been given to others meanwhile, and both have counters that tell (segment.reused,
// states.recycled).

// view is what readers know of the columns. It does not change.
type view struct {
	columns []column
	// sizes has the columns that match a block size.
	sizes map[int]*set
}

// match is the working memory of one Match.
type match struct {
	t      *Table
	v      *view
	hashes []kvhash.Hash
	each   bool   // look at every block
	at     uint32 // state of the block looked at last
	state  *state
	first  []uint64 // columns that hold the first block
	gpu    []uint64 // columns that hold every block so far
	any    []uint64
	holed  []uint64 // of first, those with holes
	depth  []depth  // by column
}

type depth struct{ gpu, any int32 }

var matches = sync.Pool{New: func() any { return new(match) }}

// Match implements Index. It never waits for a writer.
func (t *Table) Match(dst []Overlap, blockSize int, hashes []kvhash.Hash) []Overlap {
	return t.match(dst, blockSize, hashes, false)
}

// MatchEach is Match, but looks at every block: it does not rely on workers holding
// prefixes, and costs some 50 ns a block. It is there to check the other one.
func (t *Table) MatchEach(dst []Overlap, blockSize int, hashes []kvhash.Hash) []Overlap {
	return t.match(dst, blockSize, hashes, true)
}

func (t *Table) match(dst []Overlap, blockSize int, hashes []kvhash.Hash, each bool) []Overlap {
	if blockSize < 1 || len(hashes) == 0 {
		return dst
	}
	m := matches.Get().(*match)
	defer matches.Put(m)
	m.t, m.hashes, m.each = t, hashes, each
	for {
		recycled := t.states.recycled.Load()
		m.v = t.view.Load()
		m.walk(m.v.sizes[blockSize])
		if t.states.recycled.Load() == recycled {
			break
		}
	}
	return m.overlaps(dst)
}

// look turns to the block of a number.
func (m *match) look(i int) {
	if at := m.t.blocks.state(m.hashes[i]); at != m.at || m.state == nil {
		m.at, m.state = at, m.t.states.get(at)
	}
}

// walk finds for each of the columns at which block it drops out. A worker holds a
// block only if it holds those before it, so most blocks need not be looked at: if the
// columns of one hold a later one too, they hold all between them. Columns for which
// that is not so are known, and followed block by block.
func (m *match) walk(columns *set) {
	m.state = nil
	m.first, m.gpu, m.any, m.holed = m.first[:0], m.gpu[:0], m.any[:0], m.holed[:0]
	if columns == nil {
		return
	}
	m.look(0)
	for k, w := range columns.words {
		m.any = append(m.any, w&m.state.any.word(k))
		m.gpu = append(m.gpu, w&m.state.sets[inGPU].word(k))
	}
	m.first = append(m.first, m.any...)
	m.depth = slices.Grow(m.depth[:0], len(m.v.columns))[:len(m.v.columns)]
	holed := false
	for k, w := range m.any {
		h := uint64(0)
		for ; w != 0; w &= w - 1 {
			c := k*64 + bits.TrailingZeros64(w)
			m.depth[c] = depth{0, 0}
			if m.each || m.v.columns[c].holes.Load() > 0 {
				h |= w & -w
			}
		}
		m.holed = append(m.holed, h)
		holed = holed || h != 0
	}
	if m.each {
		m.follow()
		return
	}
	last := len(m.hashes) - 1
	low, step := 0, 4
	for low < last && m.alive() {
		high := min(low+step, last)
		step *= 2
		m.look(high)
		for !m.inside() {
			// Find the first block that some column lacks, which then drops out.
			a, b, at, state := low, high, m.at, m.state
			for b-a > 1 {
				mid := int(uint(a+b) / 2)
				if m.look(mid); m.inside() {
					a = mid
				} else {
					b = mid
				}
			}
			m.look(b)
			m.drop(b)
			low, m.at, m.state = b, at, state
		}
		low = high
	}
	for k := range m.any {
		each(m.gpu[k], k, func(c int) { m.depth[c].gpu = int32(len(m.hashes)) })
		each(m.any[k], k, func(c int) { m.depth[c].any = int32(len(m.hashes)) })
	}
	if holed {
		m.follow()
	}
}

func (m *match) alive() bool {
	for _, w := range m.any {
		if w != 0 {
			return true
		}
	}
	return false
}

// inside tells whether all columns that are left hold the block looked at.
func (m *match) inside() bool {
	gpu, all := m.state.sets[inGPU], m.state.any
	for k, w := range m.any {
		if w&^all.word(k) != 0 || m.gpu[k]&^gpu.word(k) != 0 {
			return false
		}
	}
	return true
}

// drop takes out the columns that lack block i, which is looked at.
func (m *match) drop(i int) {
	gpu, all := m.state.sets[inGPU], m.state.any
	for k := range m.any {
		each(m.gpu[k]&^gpu.word(k), k, func(c int) { m.depth[c].gpu = int32(i) })
		each(m.any[k]&^all.word(k), k, func(c int) { m.depth[c].any = int32(i) })
		m.gpu[k] &= gpu.word(k)
		m.any[k] &= all.word(k)
	}
}

// follow corrects the columns that have holes somewhere, looking at every block.
func (m *match) follow() {
	m.gpu, m.any = append(m.gpu[:0], m.holed...), append(m.any[:0], m.holed...)
	for i := range m.hashes {
		if !m.alive() {
			return
		}
		m.look(i)
		m.drop(i)
	}
	for k := range m.any {
		each(m.gpu[k], k, func(c int) { m.depth[c].gpu = int32(len(m.hashes)) })
		each(m.any[k], k, func(c int) { m.depth[c].any = int32(len(m.hashes)) })
	}
}

// overlaps lists the workers that hold the first block. A hit needs a block in all main
// attention groups, so a worker's overlap is the least of its columns'.
func (m *match) overlaps(dst []Overlap) []Overlap {
	for k, w := range m.first {
	columns:
		for ; w != 0; w &= w - 1 {
			i := k*64 + bits.TrailingZeros64(w)
			c, d := &m.v.columns[i], m.depth[i]
			for _, other := range c.others {
				if other < i || other/64 >= len(m.first) || m.first[other/64]>>(other%64)&1 == 0 {
					continue columns // listed already, or holds nothing there
				}
				d.gpu, d.any = min(d.gpu, m.depth[other].gpu), min(d.any, m.depth[other].any)
			}
			if d.any > 0 {
				dst = append(dst, Overlap{Worker: c.name, GPUBlocks: int(d.gpu), CPUBlocks: int(d.any)})
			}
		}
	}
	return dst
}
