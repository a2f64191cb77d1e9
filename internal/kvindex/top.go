package kvindex

import (
	"cmp"
	"math/bits"
	"slices"

	"github.com/kinference/kinference/internal/kvhash"
)

// Prefix is what some conversations begin with, up to where they part.
type Prefix struct {
	// First and Last are the hashes of its first and last block, Blocks how many it has.
	First, Last kvhash.Hash
	Blocks      int
	// Below counts all blocks of the conversations that begin with it, its own among them.
	Below int
	// Holders is how many workers hold its first block, Whole how many its last.
	Holders, Whole int
}

// Top lists the prefixes with the most blocks below them, at most n. Writers wait meanwhile,
// a second for some ten million blocks: it is for people.
func (t *Table) Top(n int) []Prefix {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.sweep(1 << 40)                    // what only dead columns hold may follow anything
	var base [1<<segmentBits + 1]uint32 // number of a segment's first block among all
	for i := range t.blocks.segments {
		base[i+1] = base[i] + t.blocks.segments[i].last + 1
	}
	number := func(r ref) uint32 { return base[r.segment()] + r.local() }
	total := base[len(base)-1]
	roots := make([]ref, total)     // the first block of its conversation; 0: not known yet
	child := make([]ref, total)     // the last following block
	children := make([]byte, total) // how many there are; 2 stands for more
	below := map[ref]int{}
	var path []ref
	for i := range t.blocks.segments {
		for local := uint32(1); local <= t.blocks.segments[i].last; local++ {
			r := newRef(i, local)
			if !t.held(r) {
				continue
			}
			root := ref(0)
			for x := r; root == 0; {
				path = append(path, x)
				p := t.blocks.at(x).parent()
				if p == 0 || p == start || !t.held(p) {
					root = x
				} else if root = roots[number(p)]; root == 0 {
					x = p
				}
			}
			for _, x := range path {
				roots[number(x)] = root
			}
			path = path[:0]
			below[root]++
			if p := t.blocks.at(r).parent(); p != 0 && p != start {
				child[number(p)] = r
				children[number(p)] = min(children[number(p)]+1, 2)
			}
		}
	}
	out := make([]Prefix, 0, len(below))
	last := map[kvhash.Hash]ref{}
	for r, count := range below {
		first := t.blocks.at(r).own()
		last[first] = r
		out = append(out, Prefix{First: first, Below: count})
	}
	slices.SortFunc(out, func(a, b Prefix) int {
		return cmp.Or(cmp.Compare(b.Below, a.Below), cmp.Compare(a.First, b.First))
	})
	out = out[:min(n, len(out))]
	for i := range out {
		p := &out[i]
		r := last[p.First]
		p.Holders = t.holders(r)
		for p.Blocks = 1; children[number(r)] == 1; p.Blocks++ {
			r = child[number(r)]
		}
		p.Last, p.Whole = t.blocks.at(r).own(), t.holders(r)
	}
	return out
}

// held tells whether any worker holds a block.
func (t *Table) held(r ref) bool {
	s := t.blocks.at(r).state
	return s != 0 && len(t.states.get(s).any.words) > 0
}

// holders counts the workers that hold a block.
func (t *Table) holders(r ref) int {
	n := 0
	for _, w := range t.states.get(t.blocks.at(r).state).any.words {
		n += bits.OnesCount64(w)
	}
	return n
}
