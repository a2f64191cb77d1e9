package kvindex

import (
	"github.com/kinference/kinference/internal/kvhash"
	"github.com/kinference/kinference/internal/vllm"
)

// worker is what the table knows of one worker. The table's writers change it.
type worker struct {
	table   *Table
	name    string
	columns []int // in use by main groups
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

// medium is what a group holds in one medium.
//
// An engine's hash stands for one block, and nearly always the other way round; there
// is one copy; and all engines with the same settings give a block the same hash. Such
// a block is plain: the column's bit at the block that is found by the engine's hash
// says all. Everything else is odd and listed here.
type medium struct {
	odd map[uint64]odd
	// names counts the odd hashes of each own hash, and whether a plain one stands for
	// it too. A block without odd hashes is not in it.
	names map[kvhash.Hash]names
	// hashes that are held, and blocks.
	hashes, blocks int
}

type odd struct {
	own    kvhash.Hash
	copies int32
}

type names struct {
	odd   int32
	plain bool
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
		column, ok := w.table.open(w, e.BlockSize)
		if !ok {
			r.Skipped[SkipCapacity]++
			return g, m, false
		}
		g.column, g.blockSize = column, e.BlockSize
	}
	return g, m, true
}

// store adds the blocks of an accepted event, and of orphans that waited for them.
// wait tells whether the event may wait for its parent.
func (w *worker) store(g *group, m Medium, e *vllm.Event, wait bool, r *Result) {
	var parent kvhash.Hash // of what follows
	known := false         // that it is a block
	switch {
	case e.BlockSize == 0:
	case isFirst(e):
		parent = root(e)
	default:
		if parent, known = w.find(g, m, e.Parent); !known {
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
	prev := before{first: !known && e.BlockSize > 0}
	if known {
		prev.own = parent
	}
	for i, engine := range e.Hashes {
		own, copied := kvhash.Hash(0), false
		if m != GPU {
			// A copy of what the GPU holds or held. Such events lack extra keys, so
			// the hash that is known is better than one from their tokens.
			own, copied = w.find(g, GPU, engine)
		}
		switch {
		case copied:
		case e.BlockSize == 0:
			unresolved = true
			continue
		default:
			own = next(parent, e, i)
		}
		parent = own
		if !w.put(g, m, engine, own, prev, r) {
			full = true
			break // what follows would be a chain with a hole
		}
		if e.BlockSize > 0 {
			prev = before{own: own}
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

// before is the block before another one: a hash, the start of a sequence, or not known.
type before struct {
	own   kvhash.Hash
	first bool
}

// held tells what an engine's hash stands for in a medium, and whether it is a plain one.
// at is the block that is found by the hash, whoever holds it.
func (w *worker) held(g *group, m Medium, engine uint64) (x odd, at ref, plain, ok bool) {
	md := &g.media[m]
	if m == Storage {
		x, ok = md.odd[engine]
		return x, 0, false, ok
	}
	if at = w.table.blocks.byEngine(engine); len(md.odd) > 0 {
		if x, ok = md.odd[engine]; ok {
			return x, at, false, true
		}
	}
	if at == 0 || md.hashes == 0 {
		return x, at, false, false
	}
	b := w.table.blocks.at(at)
	if !w.table.states.get(b.state).in(planeOf(m), g.column) {
		return x, at, false, false
	}
	if len(md.names) > 0 {
		if n, listed := md.names[b.own()]; listed && !n.plain {
			return x, at, false, false
		}
	}
	return odd{b.own(), 1}, at, true, true
}

// find translates an engine's hash, looking in medium m first.
func (w *worker) find(g *group, m Medium, engine uint64) (kvhash.Hash, bool) {
	if x, _, _, ok := w.held(g, m, engine); ok {
		return x.own, true
	}
	for other := range numMedia {
		if x, _, _, ok := w.held(g, other, engine); ok && other != m {
			return x.own, true
		}
	}
	return 0, false
}

// put adds one copy of a block; false if there is no room.
func (w *worker) put(g *group, m Medium, engine uint64, own kvhash.Hash, prev before, r *Result) bool {
	md := &g.media[m]
	x, at, plain, ok := w.held(g, m, engine)
	switch {
	case ok && x.own == own:
		if w.options.Removals == PerCopy && x.copies < 1<<30 {
			x.copies++
			w.list(md, engine, x, plain)
		}
		return true
	case ok:
		// The engine takes both contents for one block (vLLM issue 44701): it has
		// the copies of both, and the newest is what it will be asked for.
		r.Conflicts++
		w.release(g, m, engine, x.own, at, plain, r)
		at = w.table.blocks.byEngine(engine)
		x.own = own
		if w.options.Removals == PerCopy && x.copies < 1<<30 {
			x.copies++
		}
	default:
		limit := MaxBlocks
		if m == GPU {
			limit = w.options.gpuLimit()
		}
		if w.blocks[m] >= limit || w.table.states.used > maxStates {
			return false
		}
		x = odd{own, 1}
	}
	return w.give(g, m, engine, x, at, prev, r)
}

// list keeps an engine's hash as an odd one, which may have been plain.
func (w *worker) list(md *medium, engine uint64, x odd, plain bool) {
	if md.odd == nil {
		md.odd, md.names = map[uint64]odd{}, map[kvhash.Hash]names{}
	}
	if plain {
		n := md.names[x.own]
		md.names[x.own] = names{odd: n.odd + 1}
	}
	md.odd[engine] = x
}

// unlist makes an odd hash a plain one again if it is: otherwise blocks that had two
// copies once would cost more for ever.
func (w *worker) unlist(md *medium, m Medium, engine uint64, x odd) {
	at := w.table.blocks.byEngine(engine)
	if x.copies != 1 || m == Storage || at == 0 || w.table.blocks.at(at).own() != x.own {
		return
	}
	delete(md.odd, engine)
	if n := md.names[x.own]; n.odd > 1 {
		md.names[x.own] = names{odd: n.odd - 1, plain: true}
	} else {
		delete(md.names, x.own)
	}
}

// give adds an engine's hash that is not held; false if there is no room. at is the block
// that is found by the hash.
func (w *worker) give(g *group, m Medium, engine uint64, x odd, at ref, prev before, r *Result) bool {
	md, t := &g.media[m], w.table
	isNew := false // the worker did not hold the block
	plain := false
	if m == Storage {
		isNew = md.names[x.own] == names{}
	} else {
		named := at != 0
		if !named || t.blocks.at(at).own() != x.own {
			if at = t.blocks.find(x.own); at == 0 {
				if at = t.blocks.add(x.own); at == 0 {
					return false
				}
			}
			named = !named && t.blocks.name(at, engine)
		}
		plain = named && x.copies == 1
		if isNew = !t.states.get(t.blocks.at(at).state).in(planeOf(m), g.column); isNew {
			t.enter(at, g.column, m, prev)
		}
	}
	n, listed := md.names[x.own]
	if !listed && !isNew {
		n.plain = true // as a block is that is held and not listed
	}
	if plain {
		n.plain = true
	} else {
		w.list(md, engine, x, false)
		n.odd++
	}
	if n.odd > 0 {
		md.names[x.own] = n
	}
	md.hashes++
	w.blocks[m]++
	if isNew {
		md.blocks++
		r.Stored++
	}
	return true
}

// release is the inverse of give. at is the block that is found by the hash, which is the
// one that goes if the hash is a plain one.
func (w *worker) release(g *group, m Medium, engine uint64, own kvhash.Hash, at ref, plain bool, r *Result) {
	md := &g.media[m]
	md.hashes--
	w.blocks[m]--
	n, listed := md.names[own]
	if plain {
		n.plain = false
	} else {
		delete(md.odd, engine)
		n.odd--
	}
	switch {
	case n.odd > 0:
		md.names[own] = n
		return
	case listed:
		delete(md.names, own)
	}
	if n.plain {
		return
	}
	if m != Storage {
		if !plain {
			at = w.table.blocks.find(own)
		}
		w.table.leave(at, g.column, m)
	}
	md.blocks--
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
		x, at, plain, ok := w.held(g, m, engine)
		if !ok {
			unknown = !w.disown(groupOf(e), m, engine, left, r) || unknown
			continue
		}
		had := x.copies
		if left < 0 {
			x.copies--
		} else {
			x.copies = int32(min(left, 1<<30))
		}
		switch {
		case x.copies <= 0:
			w.release(g, m, engine, x.own, at, plain, r)
		case x.copies != had:
			w.list(&g.media[m], engine, x, plain)
			w.unlist(&g.media[m], m, engine, x)
		}
	}
	if unknown {
		r.Skipped[SkipUnknown]++
	}
}

// drop forgets the blocks of a group. What the table has of them is hidden from
// Match at once, and swept out bit by bit.
func (g *group) drop(w *worker, r *Result) {
	for m := range g.media {
		md := &g.media[m]
		r.Removed += md.blocks
		w.blocks[m] -= md.hashes
		*md = medium{}
	}
	if g.column >= 0 {
		w.table.retire(w, g.column)
		g.column = -1
	}
	g.blockSize = 0
}

// clear forgets all blocks, orphans and groups: what follows may come from an
// engine with other settings.
func (w *worker) clear(r *Result) {
	for _, g := range w.groups {
		g.drop(w, r)
	}
	clear(w.groups)
	r.Skipped[SkipOrphan] += len(w.orphans)
	w.orphans, w.orphanWeight = nil, 0
}
