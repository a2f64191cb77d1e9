package kvindex

import (
	"iter"
	"slices"
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/kinference/kinference/internal/kvhash"
	"github.com/kinference/kinference/internal/vllm"
)

// Table is an Index in a few large arrays (block.go, state.go): a block costs some 31
// bytes whoever holds it, and a look-up some dozen probes however long the prompt is.
//
// A column is one main attention group of one worker; nearly every worker has one.
// Blocks know which columns hold them.
type Table struct {
	blocks blocks
	states states
	view   atomic.Pointer[view]

	mu      sync.Mutex // of writers; guards all but what readers use atomically
	workers map[string]*worker
	columns []column
	free    []int // unused columns
	dead    []dead
	cursor  cursor
	gone    set      // the dead columns
	swept   []uint32 // one more than the number of each state without them; 0: not known yet
}

var _ Index = (*Table)(nil)

type column struct {
	name   string // of the worker
	w      *worker
	size   int // of the blocks it matches; 0: none
	others []int
	holes  *atomic.Int64
	// more counts the following blocks that a column holds beside the first, where a
	// conversation has branches: by block and plane.
	more map[uint64]uint32
}

// dead is a column whose bits must be swept out before it can be used again.
type dead struct {
	column int
	since  cursor
}

// cursor is where the sweep is.
type cursor struct {
	round   int
	segment int
	local   uint32
}

// New returns an empty table.
func New() *Table {
	t := &Table{workers: map[string]*worker{}}
	t.states.start()
	t.publish()
	return t
}

// publish shows the columns to readers.
func (t *Table) publish() {
	v := &view{columns: slices.Clone(t.columns), sizes: map[int]*set{}}
	for i := range v.columns {
		c := &v.columns[i]
		if c.size == 0 {
			continue
		}
		s := v.sizes[c.size]
		if s == nil {
			s = new(set)
			v.sizes[c.size] = s
		}
		s.add(i)
		for _, other := range c.w.columns {
			if other != i && t.columns[other].size == c.size {
				c.others = append(c.others, other)
			}
		}
	}
	t.view.Store(v)
}

// open returns a column for a group of w; ok is false if there are too many.
func (t *Table) open(w *worker, size int) (col int, ok bool) {
	if len(t.free) == 0 && len(t.columns) == MaxWorkers {
		t.sweep(1 << 40)
	}
	c := column{name: w.name, w: w, size: size, holes: new(atomic.Int64)}
	if n := len(t.free); n > 0 {
		col, t.free = t.free[n-1], t.free[:n-1]
		t.columns[col] = c
	} else if col = len(t.columns); col < MaxWorkers {
		t.columns = append(t.columns, c)
	} else {
		return 0, false
	}
	w.columns = append(w.columns, col)
	t.publish()
	return col, true
}

// retire takes a column out of use.
func (t *Table) retire(w *worker, col int) {
	t.columns[col] = column{}
	w.columns = slices.DeleteFunc(w.columns, func(c int) bool { return c == col })
	t.dead = append(t.dead, dead{col, t.cursor})
	t.swept = nil
	t.publish()
}

// sweep looks at some blocks and takes the dead columns out of them.
func (t *Table) sweep(blocks int) {
	c := &t.cursor
	for ; len(t.dead) > 0 && blocks > 0; blocks-- {
		if s := &t.blocks.segments[c.segment]; c.local < s.last {
			c.local++
			t.clean(newRef(c.segment, c.local))
		} else if c.local, c.segment = 0, c.segment+1; c.segment == len(t.blocks.segments) {
			c.segment, c.round = 0, c.round+1
		}
		for len(t.dead) > 0 && t.dead[0].since.passed(c) {
			t.free = append(t.free, t.dead[0].column)
			t.dead, t.swept = t.dead[1:], nil // who is given the column is not dead
		}
	}
}

// Sweep takes out now what clearing has left, instead of bit by bit: memory comes back
// at once, and writers wait meanwhile.
func (t *Table) Sweep() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.sweep(1 << 40)
}

// passed tells whether a sweep that is at now has seen everything since c.
func (c cursor) passed(now *cursor) bool {
	return now.round > c.round+1 || now.round == c.round+1 && (now.segment > c.segment || now.segment == c.segment && now.local >= c.local)
}

// clean takes the dead columns out of a block.
func (t *Table) clean(r ref) {
	b := t.blocks.at(r)
	if to := t.alive(b.state); to != b.state {
		t.turn(r, b, to)
	}
}

// alive is a state without the dead columns.
func (t *Table) alive(state uint32) uint32 {
	if state == 0 {
		return 0
	}
	if t.swept == nil {
		gone := set{}
		for _, d := range t.dead {
			gone.add(d.column)
		}
		t.swept, t.gone = make([]uint32, len(t.states.refs)), gone
	}
	if int(state) >= len(t.swept) {
		t.swept = append(t.swept, make([]uint32, len(t.states.refs)-len(t.swept))...)
	}
	to := t.swept[state] - 1
	if to == unknown {
		to = t.states.without(state, &t.gone)
		t.swept[state] = to + 1
	}
	return to
}

// unknown is what t.swept says of a state that has not been seen.
const unknown = 1<<32 - 1

// turn gives a block another state; a block of nobody goes.
func (t *Table) turn(r ref, b *block, to uint32) {
	t.states.count(b.state, to)
	atomic.StoreUint32(&b.state, to)
	if to == 0 {
		t.blocks.remove(r)
	}
}

// change moves a column into and out of sets of a block.
func (t *Table) change(r ref, col int, enter, leave uint8) {
	b := t.blocks.at(r)
	to, holes := t.states.move(b.state, col, enter, leave)
	if holes > 0 { // readers must know before they can see it
		t.columns[col].holes.Add(int64(holes))
	}
	t.turn(r, b, to)
	if holes < 0 {
		t.columns[col].holes.Add(int64(holes))
	}
}

func planeOf(m Medium) plane {
	if m == GPU {
		return inGPU
	}
	return inCPU
}

// enter adds a column to those that hold a block in a medium, which it did not.
func (t *Table) enter(r ref, col int, m Medium, before before) {
	b := t.blocks.at(r)
	if len(t.dead) > 0 {
		// What only dead columns hold may follow a block that has been swept out already.
		to := t.alive(b.state)
		t.states.count(b.state, to)
		atomic.StoreUint32(&b.state, to)
	}
	s := t.states.get(b.state)
	if len(s.any.words) == 0 { // nobody holds it, so that it may not be known what it follows
		parent := ref(0)
		if before.first {
			parent = start
		} else if before.own != 0 {
			if parent = t.blocks.find(before.own); parent == 0 {
				parent = t.blocks.add(before.own)
			}
		}
		b.follow(parent)
	}
	parent := b.parent()
	if parent == 0 {
		// A hole before this block would not be seen: the column is followed block by
		// block until it is cleared.
		t.columns[col].holes.Add(1)
	}
	gained := uint8(0)
	if m == GPU {
		gained = nextGPU.bit()
	}
	if !s.any.has(col) {
		gained |= nextAny.bit()
	}
	t.change(r, col, planeOf(m).bit(), 0)
	t.gain(parent, col, gained)
}

// leave is the inverse of enter.
func (t *Table) leave(r ref, col int, m Medium) {
	b := t.blocks.at(r)
	s := t.states.get(b.state)
	parent := b.parent()
	lost := uint8(0)
	if m == GPU {
		lost = nextGPU.bit()
	}
	if other := inGPU + inCPU - planeOf(m); !s.in(other, col) {
		lost |= nextAny.bit()
	}
	t.change(r, col, 0, planeOf(m).bit())
	t.lose(parent, col, lost)
}

// gain notes that a column holds one more block that follows r.
func (t *Table) gain(r ref, col int, gained uint8) {
	if r == 0 || r == start || gained == 0 {
		return
	}
	s := t.states.get(t.blocks.at(r).state)
	for p := nextGPU; p <= nextAny; p++ {
		if gained&p.bit() != 0 && s.in(p, col) {
			c := &t.columns[col]
			if c.more == nil {
				c.more = map[uint64]uint32{}
			}
			c.more[moreKey(r, p)]++
			gained &^= p.bit()
		}
	}
	if gained != 0 {
		t.change(r, col, gained, 0)
	}
}

// lose is the inverse of gain.
func (t *Table) lose(r ref, col int, lost uint8) {
	if r == 0 || r == start || lost == 0 {
		return
	}
	c := &t.columns[col]
	for p := nextGPU; p <= nextAny && len(c.more) > 0; p++ {
		k := moreKey(r, p)
		switch n := c.more[k]; {
		case lost&p.bit() == 0 || n == 0:
			continue
		case n == 1:
			delete(c.more, k)
		default:
			c.more[k] = n - 1
		}
		lost &^= p.bit()
	}
	if lost != 0 {
		t.change(r, col, 0, lost)
	}
}

func moreKey(r ref, p plane) uint64 { return uint64(r)<<2 | uint64(p) }

// begin starts an operation of a writer, who calls the result at its end. It does a
// little of the sweeping, so that nobody waits for all of it.
func (t *Table) begin() (end func()) {
	t.mu.Lock()
	if t.states.collect() {
		t.swept = nil
	}
	t.sweep(sweepStep)
	return t.mu.Unlock
}

// sweepStep is how many blocks are swept at a time: some ten microseconds. Tests change it.
var sweepStep = 4096

// worker returns the worker, and makes it if add is set; nil if there is none or no
// room for another.
func (t *Table) worker(name string, add bool) *worker {
	w := t.workers[name]
	if w == nil && add && len(t.workers) < MaxWorkers {
		w = &worker{table: t, name: name, groups: map[int]*group{}}
		t.workers[name] = w
	}
	return w
}

// Configure implements Index.
func (t *Table) Configure(worker string, o Options) {
	defer t.begin()()
	if w := t.worker(worker, true); w != nil {
		w.options = o
	}
}

// Apply implements Index.
func (t *Table) Apply(worker string, b *vllm.Batch) Result {
	r := Result{Events: len(b.Events)}
	defer t.begin()()
	w := t.worker(worker, true)
	if w == nil {
		r.Skipped[SkipCapacity] = len(b.Events)
		return r
	}
	for i := range b.Events {
		w.apply(&b.Events[i], &r)
	}
	return r
}

// Clear implements Index. What the worker held is hidden when it returns, and its
// memory comes back with the next operations.
func (t *Table) Clear(worker string) {
	defer t.begin()()
	if w := t.worker(worker, false); w != nil {
		w.clear(new(Result))
	}
}

// Remove implements Index.
func (t *Table) Remove(worker string) {
	defer t.begin()()
	if w := t.worker(worker, false); w != nil {
		w.clear(new(Result))
		delete(t.workers, worker)
	}
}

// Stats implements Index.
func (t *Table) Stats(worker string) (Stats, bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	w := t.workers[worker]
	if w == nil {
		return Stats{}, false
	}
	s := Stats{Orphans: len(w.orphans), Blocks: w.blocks}
	least := -1
	for n, g := range w.groups {
		if g.main && g.blockSize > 0 && (least < 0 || n < least) {
			least, s.BlockSize = n, g.blockSize
		}
	}
	return s, true
}

// Info describes the table as a whole.
type Info struct {
	// Blocks that anybody holds, each once.
	Blocks int
	// Bytes of the blocks and their slots, which is nearly all.
	Bytes int
	// States are combinations of holders.
	States int
	// Holed are columns that hold a block and not the one before it: their prompts are
	// followed block by block.
	Holed int
	// Clearing are columns whose memory has not come back yet.
	Clearing int
}

// Info describes the table as a whole.
func (t *Table) Info() Info {
	t.mu.Lock()
	defer t.mu.Unlock()
	x := Info{States: t.states.used, Clearing: len(t.dead)}
	for i := range t.blocks.segments {
		s := &t.blocks.segments[i]
		x.Blocks += s.live
		if chunks := s.chunks.Load(); chunks != nil {
			x.Bytes += len(*chunks) * chunkSize * int(unsafe.Sizeof(block{}))
		}
		if table := s.table.Load(); table != nil {
			x.Bytes += 4 * len(*table)
		}
		x.Bytes += 4 * len(t.blocks.engines[i].slots)
	}
	for i := range t.columns {
		if c := &t.columns[i]; c.size > 0 && c.holes.Load() > 0 {
			x.Holed++
		}
	}
	return x
}

// Blocks implements Index.
func (t *Table) Blocks(worker string, yield func(Block) bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	w := t.workers[worker]
	if w == nil {
		return
	}
	for n, g := range w.groups {
		for m := range numMedia {
			md := &g.media[m]
			for _, x := range md.odd {
				if !yield(Block{Medium: m, Group: n, Hash: x.own, Copies: int(x.copies)}) {
					return
				}
			}
			if m == Storage || md.hashes == len(md.odd) {
				continue
			}
			for own := range t.plain(g.column, planeOf(m)) {
				if n, listed := md.names[own]; listed && !n.plain {
					continue
				}
				if !yield(Block{Medium: m, Group: n, Hash: own, Copies: 1}) {
					return
				}
			}
		}
	}
}

// plain lists the blocks that a column holds.
func (t *Table) plain(col int, p plane) iter.Seq[kvhash.Hash] {
	return func(yield func(kvhash.Hash) bool) {
		for i := range t.blocks.segments {
			s := &t.blocks.segments[i]
			for local := uint32(1); local <= s.last; local++ {
				if b := s.at(local); b.state != 0 && t.states.get(b.state).in(p, col) && !yield(b.own()) {
					return
				}
			}
		}
	}
}
