package engine

import "iter"

// none marks the absence of a block in links and tables.
const none = int32(-1)

// block is one physical page. A block with ref 0 is in the free list, cached
// or not; a cached block is in the pool's table under its hash.
type block struct {
	ref        int32
	prev, next int32 // free list
	copyPrev   int32 // other physical blocks with the same hash, oldest first
	copyNext   int32
	cached     bool
	hash       uint64
	chain      *chain // the sequence that stored it, up to token end
	end        int
}

// chain is the token sequence that a cached block belongs to. Its tokens only
// grow, so a prefix of them stays valid.
type chain struct {
	tokens     []uint32
	lora, salt string
}

// pool holds the physical blocks: one free list whose front is taken first,
// and a table from hash to the physical copies.
type pool struct {
	blocks []block // the last one is the free list's sentinel
	free   int
	cached int
	table  map[uint64]int32 // the oldest copy
}

func newPool(n int) *pool {
	p := &pool{blocks: make([]block, n+1)}
	p.reset()
	return p
}

// reset forgets all contents and makes every block free, in order.
func (p *pool) reset() {
	p.table = make(map[uint64]int32)
	last := int32(len(p.blocks) - 1)
	p.blocks[last] = block{prev: last, next: last}
	p.free, p.cached = 0, 0
	for i := range last {
		p.blocks[i] = block{}
		p.insert(i, last)
	}
}

func (p *pool) sentinel() int32 { return int32(len(p.blocks) - 1) }
func (p *pool) size() int       { return len(p.blocks) - 1 }

// insert puts block i into the free list just before block at.
func (p *pool) insert(i, at int32) {
	prev := p.blocks[at].prev
	p.blocks[i].prev, p.blocks[i].next = prev, at
	p.blocks[prev].next, p.blocks[at].prev = i, i
	p.free++
}

// remove takes block i out of the free list.
func (p *pool) remove(i int32) {
	b := &p.blocks[i]
	p.blocks[b.prev].next, p.blocks[b.next].prev = b.next, b.prev
	p.free--
}

// take allocates the block at the front of the free list. evicted tells that
// it was cached, under the hash returned. The caller made sure that a block is
// free.
func (p *pool) take() (i int32, hash uint64, evicted bool) {
	i = p.blocks[p.sentinel()].next
	p.remove(i)
	b := &p.blocks[i]
	b.ref = 1
	if !b.cached {
		return i, 0, false
	}
	hash = b.hash
	p.uncache(i)
	return i, hash, true
}

// touch adds a user to a cached block.
func (p *pool) touch(i int32) {
	if p.blocks[i].ref == 0 {
		p.remove(i)
	}
	p.blocks[i].ref++
}

// release drops a user. A block without users goes to the back of the free
// list if it is cached, else to the front: there is nothing in it to keep.
func (p *pool) release(i int32) {
	b := &p.blocks[i]
	b.ref--
	if b.ref > 0 {
		return
	}
	at := p.sentinel()
	if !b.cached {
		at = p.blocks[at].next
	}
	p.insert(i, at)
}

// cache enters block i under hash, as one more copy if there are others: the
// engine does not merge equal blocks.
func (p *pool) cache(i int32, hash uint64, c *chain, end int) {
	b := &p.blocks[i]
	b.cached, b.hash, b.chain, b.end = true, hash, c, end
	b.copyPrev, b.copyNext = none, none
	p.cached++
	first, ok := p.table[hash]
	if !ok {
		p.table[hash] = i
		return
	}
	last := first
	for p.blocks[last].copyNext != none {
		last = p.blocks[last].copyNext
	}
	p.blocks[last].copyNext, b.copyPrev = i, last
}

func (p *pool) uncache(i int32) {
	b := &p.blocks[i]
	switch {
	case b.copyPrev != none:
		p.blocks[b.copyPrev].copyNext = b.copyNext
	case b.copyNext != none:
		p.table[b.hash] = b.copyNext
	default:
		delete(p.table, b.hash)
	}
	if b.copyNext != none {
		p.blocks[b.copyNext].copyPrev = b.copyPrev
	}
	b.cached, b.chain = false, nil
	p.cached--
}

// lookup returns a physical block that holds hash, or none.
func (p *pool) lookup(hash uint64) int32 {
	if i, ok := p.table[hash]; ok {
		return i
	}
	return none
}

// cachedBlocks yields every cached block.
func (p *pool) cachedBlocks() iter.Seq2[int32, *block] {
	return func(yield func(int32, *block) bool) {
		for i := range p.blocks[:p.size()] {
			if p.blocks[i].cached && !yield(int32(i), &p.blocks[i]) {
				return
			}
		}
	}
}
