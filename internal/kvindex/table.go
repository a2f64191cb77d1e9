package kvindex

import (
	"slices"
	"sync"

	"github.com/kinference/kinference/internal/kvhash"
	"github.com/kinference/kinference/internal/vllm"
)

const numShards = 64

// Table is an Index in plain maps: the blocks with the set of workers that
// hold each, in shards that are locked one at a time, and per worker what its
// engine's hashes mean.
//
// A column is one main attention group of one worker; nearly every worker has
// one. A hit needs the block in all main groups, so a worker's overlap is the
// least of its columns'.
//
// Locks are taken in the order worker, columns, shard.
type Table struct {
	shards [numShards]shard

	mu      sync.RWMutex
	workers map[string]*worker
	columns []column
	free    []int // unused columns
}

var _ Index = (*Table)(nil)

type shard struct {
	mu     sync.RWMutex
	blocks map[kvhash.Hash]holders
}

// holders tells which columns hold a block.
type holders struct{ gpu, cpu set }

type column struct {
	w     *worker // nil: unused
	group int
	// blockSize that the column matches; 0 for none.
	blockSize int
}

// New returns an empty table.
func New() *Table {
	t := &Table{workers: map[string]*worker{}}
	for i := range t.shards {
		t.shards[i].blocks = map[kvhash.Hash]holders{}
	}
	return t
}

func (t *Table) shard(h kvhash.Hash) *shard { return &t.shards[h%numShards] }

// mark adds the column to the holders of h. Storage is not matched, so it has
// no holders.
func (t *Table) mark(h kvhash.Hash, m Medium, col int) {
	if m == Storage {
		return
	}
	s := t.shard(h)
	s.mu.Lock()
	defer s.mu.Unlock()
	b := s.blocks[h]
	if m == GPU {
		b.gpu.add(col)
	} else {
		b.cpu.add(col)
	}
	s.blocks[h] = b
}

// unmark is the inverse of mark.
func (t *Table) unmark(h kvhash.Hash, m Medium, col int) {
	if m == Storage {
		return
	}
	s := t.shard(h)
	s.mu.Lock()
	defer s.mu.Unlock()
	b, ok := s.blocks[h]
	if !ok {
		return
	}
	if m == GPU {
		b.gpu.remove(col)
	} else {
		b.cpu.remove(col)
	}
	if b.gpu.empty() && b.cpu.empty() {
		delete(s.blocks, h)
		return
	}
	s.blocks[h] = b
}

// lock returns the worker with its lock held, and makes it if add is set; nil
// if there is none or no room for another.
func (t *Table) lock(name string, add bool) *worker {
	for {
		t.mu.RLock()
		w := t.workers[name]
		t.mu.RUnlock()
		if w == nil && add {
			w = t.add(name)
		}
		if w == nil {
			return nil
		}
		w.mu.Lock()
		if !w.removed {
			return w
		}
		w.mu.Unlock() // removed between the look-up and the lock
	}
}

func (t *Table) add(name string) *worker {
	t.mu.Lock()
	defer t.mu.Unlock()
	w := t.workers[name]
	if w == nil && len(t.workers) < MaxWorkers {
		w = &worker{table: t, name: name, groups: map[int]*group{}}
		t.workers[name] = w
	}
	return w
}

// openColumn returns a column for a group of w; ok is false if there are too many.
func (t *Table) openColumn(w *worker, group, blockSize int) (col int, ok bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	c := column{w: w, group: group, blockSize: blockSize}
	if n := len(t.free); n > 0 {
		col = t.free[n-1]
		t.free = t.free[:n-1]
		t.columns[col] = c
	} else if col = len(t.columns); col < MaxWorkers {
		t.columns = append(t.columns, c)
	} else {
		return 0, false
	}
	w.columns = append(w.columns, col)
	return col, true
}

// resize sets what block size a column matches; 0 hides it.
func (t *Table) resize(col, blockSize int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.columns[col].blockSize = blockSize
}

// closeColumn gives an empty column back.
func (t *Table) closeColumn(w *worker, col int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.columns[col] = column{}
	t.free = append(t.free, col)
	w.columns = slices.DeleteFunc(w.columns, func(c int) bool { return c == col })
}

// Configure implements Index.
func (t *Table) Configure(worker string, o Options) {
	if w := t.lock(worker, true); w != nil {
		defer w.mu.Unlock()
		w.options = o
	}
}

// Apply implements Index.
func (t *Table) Apply(worker string, b *vllm.Batch) Result {
	r := Result{Events: len(b.Events)}
	w := t.lock(worker, true)
	if w == nil {
		r.Skipped[SkipCapacity] = len(b.Events)
		return r
	}
	defer w.mu.Unlock()
	for i := range b.Events {
		w.apply(&b.Events[i], &r)
	}
	return r
}

// Clear implements Index.
func (t *Table) Clear(worker string) {
	if w := t.lock(worker, false); w != nil {
		defer w.mu.Unlock()
		w.clear(new(Result))
	}
}

// Remove implements Index.
func (t *Table) Remove(worker string) {
	w := t.lock(worker, false)
	if w == nil {
		return
	}
	defer w.mu.Unlock()
	w.clear(new(Result))
	w.removed = true
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.workers, worker)
}

// Stats implements Index.
func (t *Table) Stats(worker string) (Stats, bool) {
	w := t.lock(worker, false)
	if w == nil {
		return Stats{}, false
	}
	defer w.mu.Unlock()
	s := Stats{Orphans: len(w.orphans), Blocks: w.blocks}
	least := -1
	for n, g := range w.groups {
		if g.main && g.blockSize > 0 && (least < 0 || n < least) {
			least, s.BlockSize = n, g.blockSize
		}
	}
	return s, true
}

// Blocks implements Index.
func (t *Table) Blocks(worker string, yield func(Block) bool) {
	w := t.lock(worker, false)
	if w == nil {
		return
	}
	defer w.mu.Unlock()
	for n, g := range w.groups {
		for m := range g.media {
			for engine, b := range g.media[m].blocks {
				if !yield(Block{Medium: Medium(m), Group: n, Engine: engine, Hash: b.own, Copies: int(b.copies)}) {
					return
				}
			}
		}
	}
}

// scratch is the working memory of one Match.
type scratch struct {
	gpu, any []uint64 // columns that hold every block so far
	depth    []depth  // by column
}

type depth struct{ gpu, any int }

var scratches = sync.Pool{New: func() any { return new(scratch) }}

// Match implements Index. It ends with the first block that no worker holds
// behind all those before it.
func (t *Table) Match(dst []Overlap, blockSize int, hashes []kvhash.Hash) []Overlap {
	if blockSize < 1 || len(hashes) == 0 {
		return dst
	}
	s := scratches.Get().(*scratch)
	defer scratches.Put(s)
	t.mu.RLock()
	defer t.mu.RUnlock()
	s.start(t.columns, blockSize)
	t.walk(s, hashes)
	for k := range s.any {
		each(s.gpu[k], k, func(c int) { s.depth[c].gpu = len(hashes) })
		each(s.any[k], k, func(c int) { s.depth[c].any = len(hashes) })
	}
	for i := range t.columns {
		c := &t.columns[i]
		if c.w == nil || c.blockSize != blockSize || s.depth[i].any == 0 {
			continue
		}
		d := s.depth[i]
		first := true
		for _, other := range c.w.columns {
			if other != i && t.columns[other].blockSize == blockSize {
				first = first && i < other // the worker is listed once
				d.gpu = min(d.gpu, s.depth[other].gpu)
				d.any = min(d.any, s.depth[other].any)
			}
		}
		if first && d.any > 0 {
			dst = append(dst, Overlap{Worker: c.w.name, GPUBlocks: d.gpu, CPUBlocks: d.any})
		}
	}
	return dst
}

// start selects the columns of a block size.
func (s *scratch) start(columns []column, blockSize int) {
	words := (len(columns) + 63) / 64
	s.gpu, s.any = zeroed(s.gpu, words), zeroed(s.any, words)
	s.depth = zeroed(s.depth, len(columns))
	for i := range columns {
		if columns[i].blockSize == blockSize {
			s.any[i/64] |= 1 << (i % 64)
		}
	}
	copy(s.gpu, s.any)
}

func zeroed[T any](s []T, n int) []T {
	s = slices.Grow(s[:0], n)[:n]
	clear(s)
	return s
}

// walk notes for each column at which block it drops out.
func (t *Table) walk(s *scratch, hashes []kvhash.Hash) {
	for i, h := range hashes {
		sh := t.shard(h)
		sh.mu.RLock()
		b := sh.blocks[h]
		alive := uint64(0)
		// The words are read under the lock: a writer changes them in place.
		for k := range s.any {
			gpu := b.gpu.word(k)
			if lost := s.gpu[k] &^ gpu; lost != 0 {
				each(lost, k, func(c int) { s.depth[c].gpu = i })
				s.gpu[k] &= gpu
			}
			both := gpu | b.cpu.word(k)
			if lost := s.any[k] &^ both; lost != 0 {
				each(lost, k, func(c int) { s.depth[c].any = i })
				s.any[k] &= both
			}
			alive |= s.any[k]
		}
		sh.mu.RUnlock()
		if alive == 0 {
			return
		}
	}
}
