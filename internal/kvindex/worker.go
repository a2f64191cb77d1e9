package kvindex

import (
	"sync"

	"github.com/kinference/kinference/internal/kvhash"
	"github.com/kinference/kinference/internal/vllm"
)

// worker is what the table knows of one worker.
type worker struct {
	table *Table
	name  string
	// columns are in use by main groups; guarded by table.mu.
	columns []int

	mu      sync.Mutex // guards all below; held while events are applied
	removed bool
	options Options
	groups  map[int]*group
	blocks  [numMedia]int
	// orphans wait for their parent, oldest first.
	orphans      []vllm.Event
	orphanWeight int
}

// group is one KV cache group of a worker.
type group struct {
	// main is false for groups whose blocks do not cover the whole prompt:
	// they are remembered, because their removals do not say what they are.
	main   bool
	column int
	// blockSize of full blocks; 0 until the first was stored.
	blockSize int
	media     [numMedia]medium
}

// medium translates the engine's hashes for one medium of a group.
type medium struct {
	blocks map[uint64]block
	// own counts the engine hashes that stand for an own hash: usually one. The
	// block is held until all of them are gone.
	own map[kvhash.Hash]int32
}

type block struct {
	own    kvhash.Hash
	copies int32
}

// apply applies one event.
func (w *worker) apply(e *vllm.Event, r *Result) {
	switch e.Kind {
	case vllm.AllBlocksCleared:
		w.clear(r)
	case vllm.BlockStored:
		if g, m, ok := w.accept(e, r); ok {
			w.store(g, m, e, true, r)
		}
	case vllm.BlockRemoved:
		w.remove(e, r)
	default:
		r.Skipped[SkipShape]++
	}
}

// groupOf is the number of the event's group: engines and connectors that know
// only one do not number it.
func groupOf(e *vllm.Event) int { return max(e.Group, 0) }

// accept checks a stored event and finds its group.
func (w *worker) accept(e *vllm.Event, r *Result) (g *group, m Medium, ok bool) {
	m = MediumOf(e)
	n := groupOf(e)
	g = w.groups[n]
	if g == nil {
		if n >= MaxGroups || len(w.groups) >= MaxGroups {
			r.Skipped[SkipShape]++
			return nil, m, false
		}
		g = &group{main: true, column: -1}
		w.groups[n] = g
	}
	if !e.IsMainAttention() && g.main {
		// Known better now: whatever was stored without a kind must go.
		g.drop(w, r)
		g.close(w)
		g.main = false
	}
	if !g.main {
		r.Skipped[SkipGroup]++
		return g, m, false
	}
	switch {
	case len(e.Hashes) == 0 || e.BlockSize < 0 || e.BlockSize > MaxBlockSize ||
		len(e.Tokens) != len(e.Hashes)*e.BlockSize:
		r.Skipped[SkipShape]++
		return g, m, false
	case e.BlockSize == 0:
		// A placeholder: the hashes must be known.
		if m == GPU {
			r.Skipped[SkipShape]++
			return g, m, false
		}
		return g, m, true
	case e.BlockSize < g.blockSize || m != GPU && e.BlockSize != g.blockSize:
		// Only what the GPU holds tells the size of full blocks.
		r.Skipped[SkipPartial]++
		return g, m, false
	case e.BlockSize > g.blockSize:
		// What was stored so far were parts of blocks.
		g.drop(w, r)
		if g.column < 0 {
			if g.column, ok = w.table.openColumn(w, n, e.BlockSize); !ok {
				g.column = -1
				r.Skipped[SkipCapacity]++
				return g, m, false
			}
		}
		g.blockSize = e.BlockSize
		w.table.resize(g.column, g.blockSize)
	}
	return g, m, true
}

// store adds the blocks of an accepted event, and of orphans that waited for them.
// wait tells whether the event may wait for its parent.
func (w *worker) store(g *group, m Medium, e *vllm.Event, wait bool, r *Result) {
	var parent kvhash.Hash
	switch {
	case e.BlockSize == 0:
	case isFirst(e):
		parent = root(e)
	default:
		var ok bool
		if parent, ok = g.find(m, e.Parent); !ok {
			if wait {
				w.adopt(e, r)
			} else {
				r.Skipped[SkipOrphan]++
			}
			return
		}
	}
	var found []uint64 // blocks that orphans wait for
	var full, unresolved bool
	for i, engine := range e.Hashes {
		own, known := kvhash.Hash(0), false
		if m != GPU {
			// A copy of what the GPU holds or held. Such events lack extra keys, so
			// the hash that is known is better than one from their tokens.
			own, known = g.find(GPU, engine)
		}
		switch {
		case known:
		case e.BlockSize == 0:
			unresolved = true
			continue
		default:
			own = next(parent, e, i)
		}
		parent = own
		if !w.put(g, m, engine, own, r) {
			full = true
			break // what follows would be a chain with a hole
		}
		if len(w.orphans) > 0 && w.waits(groupOf(e), engine) >= 0 {
			found = append(found, engine)
		}
	}
	if full {
		r.Skipped[SkipCapacity]++
	}
	if unresolved {
		r.Skipped[SkipUnresolved]++
	}
	for _, engine := range found {
		w.replay(groupOf(e), engine, r)
	}
}

// find translates an engine's hash, looking in medium m first.
func (g *group) find(m Medium, engine uint64) (kvhash.Hash, bool) {
	if b, ok := g.media[m].blocks[engine]; ok {
		return b.own, true
	}
	for m := range g.media {
		if b, ok := g.media[m].blocks[engine]; ok {
			return b.own, true
		}
	}
	return 0, false
}

// put adds one copy of a block; false if there is no room.
func (w *worker) put(g *group, m Medium, engine uint64, own kvhash.Hash, r *Result) bool {
	md := &g.media[m]
	b, ok := md.blocks[engine]
	switch {
	case ok && b.own == own:
		if w.options.Removals == PerCopy && b.copies < 1<<30 {
			b.copies++
		}
		md.blocks[engine] = b
		return true
	case ok:
		// The engine takes both contents for one block (vLLM issue 44701): it has
		// the copies of both, and the newest is what it will be asked for.
		r.Conflicts++
		w.unhold(g, m, b.own, r)
		b.own = own
		if w.options.Removals == PerCopy && b.copies < 1<<30 {
			b.copies++
		}
	default:
		limit := MaxBlocks
		if m == GPU {
			limit = w.options.gpuLimit()
		}
		if w.blocks[m] >= limit {
			return false
		}
		if md.blocks == nil {
			md.blocks = map[uint64]block{}
		}
		w.blocks[m]++
		b = block{own: own, copies: 1}
	}
	md.blocks[engine] = b
	w.hold(g, m, own, r)
	return true
}

// hold notes that one more engine hash stands for own.
func (w *worker) hold(g *group, m Medium, own kvhash.Hash, r *Result) {
	md := &g.media[m]
	if md.own == nil {
		md.own = map[kvhash.Hash]int32{}
	}
	md.own[own]++
	if md.own[own] == 1 {
		w.table.mark(own, m, g.column)
		r.Stored++
	}
}

// unhold is the inverse of hold.
func (w *worker) unhold(g *group, m Medium, own kvhash.Hash, r *Result) {
	md := &g.media[m]
	if md.own[own]--; md.own[own] > 0 {
		return
	}
	delete(md.own, own)
	w.table.unmark(own, m, g.column)
	r.Removed++
}

// remove takes copies of the event's blocks back.
func (w *worker) remove(e *vllm.Event, r *Result) {
	g, m := w.groups[groupOf(e)], MediumOf(e)
	if g != nil && !g.main {
		r.Skipped[SkipGroup]++
		return
	}
	unknown := g == nil
	for i, engine := range e.Hashes {
		left := -1 // one copy less
		if len(e.RemainingCopies) == len(e.Hashes) {
			left = max(e.RemainingCopies[i], 0)
		} else if w.options.Removals == LastCopy {
			left = 0
		}
		if g == nil {
			break
		}
		b, ok := g.media[m].blocks[engine]
		if !ok {
			unknown = !w.disown(groupOf(e), m, engine, left, r) || unknown
			continue
		}
		if left < 0 {
			b.copies--
		} else {
			b.copies = int32(min(left, 1<<30))
		}
		if b.copies > 0 {
			g.media[m].blocks[engine] = b
			continue
		}
		delete(g.media[m].blocks, engine)
		w.blocks[m]--
		w.unhold(g, m, b.own, r)
	}
	if unknown {
		r.Skipped[SkipUnknown]++
	}
}

// drop forgets the blocks of a group. It is hidden from Match at once, and is
// until the caller sets a block size.
func (g *group) drop(w *worker, r *Result) {
	if g.column >= 0 {
		w.table.resize(g.column, 0)
	}
	for m := range g.media {
		md := &g.media[m]
		for own := range md.own {
			w.table.unmark(own, Medium(m), g.column)
		}
		r.Removed += len(md.own)
		w.blocks[m] -= len(md.blocks)
		*md = medium{}
	}
	g.blockSize = 0
}

// close gives the column of a dropped group back.
func (g *group) close(w *worker) {
	if g.column >= 0 {
		w.table.closeColumn(w, g.column)
		g.column = -1
	}
}

// clear forgets all blocks, orphans and groups: what follows may come from an
// engine with other settings.
func (w *worker) clear(r *Result) {
	for _, g := range w.groups {
		g.drop(w, r)
		g.close(w)
	}
	clear(w.groups)
	r.Skipped[SkipOrphan] += len(w.orphans)
	w.orphans, w.orphanWeight = nil, 0
}
