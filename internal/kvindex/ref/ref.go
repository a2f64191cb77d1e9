// Package ref is an index that is easy to believe: plain lists, searched from
// end to end. Tests compare kvindex.Table and its successors with it, block by
// block. It shares no code with them beyond the types, is slow, and is not safe
// for concurrent use.
package ref

import (
	"slices"
	"strconv"

	"github.com/kinference/kinference/internal/kvhash"
	"github.com/kinference/kinference/internal/kvindex"
	"github.com/kinference/kinference/internal/vllm"
)

// Index implements kvindex.Index.
type Index struct {
	workers map[string]*worker
	// parents has the hash before each that was ever stored; 0 before the first of a
	// sequence.
	parents map[kvhash.Hash]kvhash.Hash
}

var _ kvindex.Index = (*Index)(nil)

type worker struct {
	index   *Index
	options kvindex.Options
	// sizes is the size of full blocks by group; -1 for groups without main
	// attention.
	sizes   map[int]int
	blocks  []block
	orphans []vllm.Event
}

type block struct {
	kvindex.Block
	engine uint64
}

// New returns an empty index.
func New() *Index {
	return &Index{workers: map[string]*worker{}, parents: map[kvhash.Hash]kvhash.Hash{}}
}

// Chain returns a block's hash and all before it, first to last: a prompt that ends there.
func (x *Index) Chain(h kvhash.Hash) []kvhash.Hash {
	var chain []kvhash.Hash
	for ; h != 0; h = x.parents[h] {
		chain = append(chain, h)
	}
	slices.Reverse(chain)
	return chain
}

func (x *Index) worker(name string) *worker {
	if x.workers[name] == nil {
		x.workers[name] = &worker{index: x, sizes: map[int]int{}}
	}
	return x.workers[name]
}

// Configure implements kvindex.Index.
func (x *Index) Configure(name string, o kvindex.Options) { x.worker(name).options = o }

// Clear implements kvindex.Index.
func (x *Index) Clear(name string) {
	if w := x.workers[name]; w != nil {
		w.clear()
	}
}

// Remove implements kvindex.Index.
func (x *Index) Remove(name string) { delete(x.workers, name) }

// Apply implements kvindex.Index; of the result it fills only Events.
func (x *Index) Apply(name string, b *vllm.Batch) kvindex.Result {
	w := x.worker(name)
	for i := range b.Events {
		switch e := &b.Events[i]; e.Kind {
		case vllm.AllBlocksCleared:
			w.clear()
		case vllm.BlockStored:
			w.store(e, true)
		case vllm.BlockRemoved:
			w.remove(e)
		}
	}
	return kvindex.Result{Events: len(b.Events)}
}

func (w *worker) clear() { w.sizes, w.blocks, w.orphans = map[int]int{}, nil, nil }

func group(e *vllm.Event) int { return max(e.Group, 0) }

func (w *worker) dropGroup(g int) {
	w.blocks = slices.DeleteFunc(w.blocks, func(b block) bool { return b.Group == g })
}

// find returns the place of a block, -1 for none.
func (w *worker) find(m kvindex.Medium, g int, engine uint64) int {
	return slices.IndexFunc(w.blocks, func(b block) bool {
		return b.Medium == m && b.Group == g && b.engine == engine
	})
}

// own translates an engine's hash, asking the given medium first.
func (w *worker) own(m kvindex.Medium, g int, engine uint64) (kvhash.Hash, bool) {
	for _, m := range []kvindex.Medium{m, kvindex.GPU, kvindex.CPU, kvindex.Storage} {
		if i := w.find(m, g, engine); i >= 0 {
			return w.blocks[i].Hash, true
		}
	}
	return 0, false
}

func (w *worker) store(e *vllm.Event, wait bool) {
	g, m := group(e), kvindex.MediumOf(e)
	if _, seen := w.sizes[g]; !seen && (g >= kvindex.MaxGroups || len(w.sizes) >= kvindex.MaxGroups) {
		return
	}
	if !e.IsMainAttention() {
		w.dropGroup(g)
		w.sizes[g] = -1
	}
	size := w.sizes[g]
	w.sizes[g] = size // seen
	bad := size < 0 || len(e.Hashes) == 0 || e.BlockSize < 0 || e.BlockSize > kvindex.MaxBlockSize ||
		len(e.Tokens) != len(e.Hashes)*e.BlockSize
	placeholder := e.BlockSize == 0
	if bad || placeholder && m == kvindex.GPU {
		return
	}
	if !placeholder {
		if e.BlockSize < size || e.BlockSize > size && m != kvindex.GPU {
			return
		}
		if e.BlockSize > size {
			w.dropGroup(g)
			w.sizes[g] = e.BlockSize
		}
	}
	var parent kvhash.Hash
	if !placeholder {
		parent = start(e)
		if e.HasParent {
			var ok bool
			if parent, ok = w.own(m, g, e.Parent); !ok {
				if wait {
					w.adopt(e)
				}
				return
			}
		}
	}
	stored := []uint64{}
	for i, engine := range e.Hashes {
		own, known := kvhash.Hash(0), false
		if m != kvindex.GPU {
			own, known = w.own(kvindex.GPU, g, engine)
		}
		if !known && placeholder {
			continue
		}
		if !known {
			own = chain(parent, e, i)
			if i == 0 && !e.HasParent {
				w.index.parents[own] = 0
			} else {
				w.index.parents[own] = parent
			}
		}
		parent = own
		if !w.put(block{kvindex.Block{Medium: m, Group: g, Hash: own, Copies: 1}, engine}) {
			break
		}
		stored = append(stored, engine)
	}
	for _, engine := range stored {
		for {
			i := slices.IndexFunc(w.orphans, func(o vllm.Event) bool { return o.Parent == engine && group(&o) == g })
			if i < 0 {
				break
			}
			o := w.orphans[i]
			w.orphans = slices.Delete(w.orphans, i, i+1)
			w.store(&o, false)
		}
	}
}

// start is the hash that a sequence's first block follows.
func start(e *vllm.Event) kvhash.Hash {
	lora, salt := e.LoRAName, ""
	if lora == "" && e.LoRAID >= 0 {
		lora = strconv.Itoa(int(e.LoRAID))
	}
	if len(e.ExtraKeys) > 0 {
		texts := bare(e, e.ExtraKeys[0])
		if n := len(texts); n > 0 {
			salt = texts[n-1]
		}
	}
	return kvhash.Root(lora, salt)
}

// bare returns the extra keys of a block that are bare strings, without the
// adapter's name.
func bare(e *vllm.Event, keys []vllm.ExtraKey) (texts []string) {
	for i, k := range keys {
		switch {
		case k.HasOffset || k.Bytes != nil:
		case i == 0 && e.LoRAName != "" && k.Text == e.LoRAName:
		default:
			texts = append(texts, k.Text)
		}
	}
	return texts
}

func chain(parent kvhash.Hash, e *vllm.Event, i int) kvhash.Hash {
	if i < len(e.ExtraKeys) {
		texts := bare(e, e.ExtraKeys[i])
		if i == 0 && !e.HasParent && len(texts) > 0 {
			texts = texts[:len(texts)-1] // the salt
		}
		for j, k := range e.ExtraKeys[i] {
			switch {
			case k.HasOffset:
				parent = kvhash.Extra(parent, k.Text+"\x00"+strconv.Itoa(int(k.Offset)))
			case k.Bytes != nil:
				parent = kvhash.Extra(parent, string(k.Bytes))
			case j == 0 && e.LoRAName != "" && k.Text == e.LoRAName:
			case len(texts) > 0:
				parent = kvhash.Extra(parent, texts[0])
				texts = texts[1:]
			}
		}
	}
	return kvhash.Next(parent, e.Tokens[i*e.BlockSize:(i+1)*e.BlockSize])
}

func (w *worker) put(b block) bool {
	i := w.find(b.Medium, b.Group, b.engine)
	if i >= 0 {
		w.blocks[i].Hash = b.Hash
		if w.options.Removals == kvindex.PerCopy {
			w.blocks[i].Copies++
		}
		return true
	}
	count := 0
	for _, o := range w.blocks {
		if o.Medium == b.Medium {
			count++
		}
	}
	limit := kvindex.MaxBlocks
	if b.Medium == kvindex.GPU && w.options.GPUBlocks > 0 {
		limit = min(limit, 2*w.options.GPUBlocks)
	}
	if count >= limit {
		return false
	}
	w.blocks = append(w.blocks, b)
	return true
}

func (w *worker) remove(e *vllm.Event) {
	g, m := group(e), kvindex.MediumOf(e)
	size, seen := w.sizes[g]
	if !seen || size < 0 {
		return
	}
	for i, engine := range e.Hashes {
		left := -1
		if len(e.RemainingCopies) == len(e.Hashes) {
			left = max(e.RemainingCopies[i], 0)
		} else if w.options.Removals == kvindex.LastCopy {
			left = 0
		}
		j := w.find(m, g, engine)
		if j < 0 {
			w.disown(m, g, engine, left)
			continue
		}
		if left < 0 {
			left = w.blocks[j].Copies - 1
		}
		w.blocks[j].Copies = left
		if left == 0 {
			w.blocks = slices.Delete(w.blocks, j, j+1)
		}
	}
}

// Bounds of the orphans, as in kvindex.
const (
	maxOrphans = 64
	maxWeight  = 1 << 16
)

func weight(events ...vllm.Event) int {
	n := 0
	for _, e := range events {
		n += len(e.Tokens)
		for _, k := range slices.Concat(e.ExtraKeys...) {
			n += 16 + (len(k.Text)+len(k.Bytes))/4
		}
	}
	return n
}

func (w *worker) adopt(e *vllm.Event) {
	o := *e
	o.Hashes, o.Tokens, o.ExtraKeys = slices.Clone(e.Hashes), slices.Clone(e.Tokens), slices.Clone(e.ExtraKeys)
	for i := range o.ExtraKeys {
		o.ExtraKeys[i] = slices.Clone(o.ExtraKeys[i])
	}
	if weight(o) > maxWeight {
		return
	}
	w.orphans = append(w.orphans, o)
	for len(w.orphans) > maxOrphans || weight(w.orphans...) > maxWeight {
		w.orphans = w.orphans[1:]
	}
}

// disown cuts orphans at a block that was removed: the first one that has it,
// or all of them if no copy is left.
func (w *worker) disown(m kvindex.Medium, g int, engine uint64, left int) {
	if left > 0 {
		return
	}
	var kept []vllm.Event
	done := false
	for _, o := range w.orphans {
		at := slices.Index(o.Hashes, engine)
		if !done && at >= 0 && group(&o) == g && kvindex.MediumOf(&o) == m {
			done = left < 0
			if at == 0 {
				continue
			}
			o.Hashes, o.Tokens, o.ExtraKeys = o.Hashes[:at], o.Tokens[:at*o.BlockSize], o.ExtraKeys[:min(at, len(o.ExtraKeys))]
		}
		kept = append(kept, o)
	}
	w.orphans = kept
}

// Match implements kvindex.Index.
func (x *Index) Match(dst []kvindex.Overlap, blockSize int, hashes []kvhash.Hash) []kvindex.Overlap {
	for name, w := range x.workers {
		o := kvindex.Overlap{Worker: name}
		o.GPUBlocks = w.prefix(blockSize, hashes, kvindex.GPU)
		o.CPUBlocks = w.prefix(blockSize, hashes, kvindex.GPU, kvindex.CPU)
		if o.CPUBlocks > 0 {
			dst = append(dst, o)
		}
	}
	return dst
}

// prefix counts the leading hashes that all main groups of the block size hold
// on one of the media.
func (w *worker) prefix(blockSize int, hashes []kvhash.Hash, media ...kvindex.Medium) int {
	for i, h := range hashes {
		groups := 0
		for g, size := range w.sizes {
			if size != blockSize || blockSize < 1 {
				continue
			}
			groups++
			if !slices.ContainsFunc(w.blocks, func(b block) bool {
				return b.Group == g && b.Hash == h && slices.Contains(media, b.Medium)
			}) {
				return i
			}
		}
		if groups == 0 {
			return 0
		}
	}
	return len(hashes)
}

// Stats implements kvindex.Index.
func (x *Index) Stats(name string) (kvindex.Stats, bool) {
	w := x.workers[name]
	if w == nil {
		return kvindex.Stats{}, false
	}
	s := kvindex.Stats{Orphans: len(w.orphans)}
	for _, b := range w.blocks {
		s.Blocks[b.Medium]++
	}
	for g := range kvindex.MaxGroups {
		if w.sizes[g] > 0 {
			s.BlockSize = w.sizes[g]
			break
		}
	}
	return s, true
}

// Blocks implements kvindex.Index.
func (x *Index) Blocks(name string, yield func(kvindex.Block) bool) {
	if w := x.workers[name]; w != nil {
		for _, b := range w.blocks {
			if !yield(b.Block) {
				return
			}
		}
	}
}
