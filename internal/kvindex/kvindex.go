// Package kvindex knows which worker holds which KV-cache blocks.
//
// It is fed with the engines' events (vllm.Batch) and asked with the chained
// hashes of a prompt (kvhash). kvtracker serves one; virtual-time benchmarks
// and tests use the same. Blocks are keyed by our own hash over token ids,
// never by the engine's, which differs from engine to engine; per worker,
// medium and group a map translates the engine's hashes, which later events
// use for parents and removals.
//
// What goes into a block's own hash, and so must go into a prompt's: LoRA
// adapter and cache salt through kvhash.Root, then per block its extra keys in
// the engine's order through kvhash.Extra (an image as identifier, NUL, offset
// in decimal), then its tokens. Continuations inherit all of it from their
// parent.
//
// An Index is safe for concurrent use. Events of one worker must be applied in
// their order; different workers do not wait for each other. Nothing that an
// engine sends is fatal: what makes no sense is skipped and counted. If in
// doubt the index forgets: it may miss a block that a worker holds, but what it
// shows was announced and not taken back. Memory is bounded per worker.
package kvindex

import (
	"github.com/kinference/kinference/internal/kvhash"
	"github.com/kinference/kinference/internal/vllm"
)

// Index is what the tracker needs. Table implements it; ref.Index is a slow
// one to compare with.
type Index interface {
	// Configure sets how the worker's events are read. Without it the zero
	// Options hold. It may be called at any time; blocks are kept.
	Configure(worker string, o Options)
	// Apply applies one batch of the worker's events. It does not keep b.
	Apply(worker string, b *vllm.Batch) Result
	// Clear forgets all blocks of the worker.
	Clear(worker string)
	// Remove forgets the worker.
	Remove(worker string)
	// Match appends to dst how much of a prompt each worker holds: workers that
	// hold nothing are left out, the order is not defined. hashes are the
	// prompt's full blocks of blockSize tokens.
	Match(dst []Overlap, blockSize int, hashes []kvhash.Hash) []Overlap
	// Stats describes one worker; ok is false for a worker never seen.
	Stats(worker string) (s Stats, ok bool)
	// Blocks calls yield for each block of the worker until it returns false,
	// in no order. It is for tests and inspection: the worker's events wait
	// meanwhile, and yield must not call the index.
	Blocks(worker string, yield func(Block) bool)
}

// Medium is where a worker keeps a block.
type Medium uint8

// Media. Anything that is neither GPU nor the host's memory counts as Storage,
// and so do blocks that another host keeps.
const (
	GPU Medium = iota
	CPU
	Storage
	numMedia
)

// String returns gpu, cpu or storage.
func (m Medium) String() string { return [...]string{"gpu", "cpu", "storage"}[m] }

// MediumOf is the medium that an event is about.
func MediumOf(e *vllm.Event) Medium {
	if e.Locality == "REMOTE" {
		return Storage
	}
	switch e.MediumName() {
	case vllm.MediumGPU:
		return GPU
	case vllm.MediumCPU:
		return CPU
	}
	return Storage
}

// Removals tells what one removal in an event stands for.
type Removals uint8

const (
	// PerCopy means that one physical copy went; the block stays while copies are left.
	// This is what vLLM does. Each announcement counts as a copy, also those of
	// blocks that are reused (vLLM's kv_cache_report_mode "full", per request):
	// with these the index holds blocks too long, up to the bound of GPUBlocks.
	PerCopy Removals = iota
	// LastCopy means that the last copy went (vLLM PR 55092, open).
	LastCopy
)

// Options of one worker.
type Options struct {
	Removals Removals
	// GPUBlocks is the number of blocks that the engine reports, 0 while
	// unknown. The index keeps at most twice as many GPU blocks: more than the
	// engine has means that removals were missed.
	GPUBlocks int
}

// Overlap is how much of a prompt a worker holds, in blocks from the start
// without a hole.
type Overlap struct {
	Worker string
	// GPUBlocks are in GPU memory.
	GPUBlocks int
	// CPUBlocks are in GPU or CPU memory; never less than GPUBlocks.
	CPUBlocks int
}

// Block is what one of a worker's engine hashes stands for.
type Block struct {
	Medium Medium
	Group  int
	Hash   kvhash.Hash
	Copies int
}

// Stats describes one worker.
type Stats struct {
	// Blocks per medium, each counted once however many copies there are.
	Blocks [numMedia]int
	// BlockSize in tokens of the main attention group; 0 while unknown.
	BlockSize int
	// Orphans wait for their parent.
	Orphans int
}

// Total is the number of (hash, medium) pairs.
func (s Stats) Total() int { return s.Blocks[GPU] + s.Blocks[CPU] + s.Blocks[Storage] }

// Reason says why an event, or part of it, was left out.
type Reason uint8

// Reasons.
const (
	// SkipGroup: the group is not one of main attention.
	SkipGroup Reason = iota
	// SkipShape: the event's lengths contradict each other or are out of range.
	SkipShape
	// SkipPartial: the blocks are smaller than the group's full blocks.
	SkipPartial
	// SkipOrphan: the parent is not known and did not come while the event waited.
	SkipOrphan
	// SkipUnresolved: a block without tokens whose hash is not known.
	SkipUnresolved
	// SkipUnknown: removal of a block that is not known.
	SkipUnknown
	// SkipCapacity: the worker holds too many blocks already.
	SkipCapacity
	numReasons
)

// Reasons lists all of them.
func Reasons() []Reason {
	r := make([]Reason, numReasons)
	for i := range r {
		r[i] = Reason(i)
	}
	return r
}

// String is the reason as a metric label.
func (r Reason) String() string {
	return [...]string{"group", "shape", "partial", "orphan", "unresolved", "unknown", "capacity"}[r]
}

// Result tells what became of one batch.
type Result struct {
	// Events in the batch.
	Events int
	// Stored and Removed count blocks: those that appeared and disappeared,
	// not copies.
	Stored, Removed int
	// Conflicts counts blocks that were announced again with other contents.
	Conflicts int
	// Skipped counts events by reason; one that was left out in part counts
	// once. Events that waited for a parent count when they are given up.
	Skipped [numReasons]int
}

// Bounds.
const (
	// MaxBlockSize in tokens. Pages of hybrid models have about a thousand.
	MaxBlockSize = 1 << 16
	// MaxBlocks bounds the blocks of one worker and medium.
	MaxBlocks = 1 << 23
	// MaxWorkers bounds the workers, counting each main attention group apart.
	MaxWorkers = 1 << 14
	// MaxGroups bounds the KV cache groups of a worker.
	MaxGroups = 64
	// maxOrphans and maxOrphanWeight bound the events that wait for a parent.
	maxOrphans      = 64
	maxOrphanWeight = 1 << 16
)

// gpuLimit is the number of GPU blocks to keep.
func (o Options) gpuLimit() int {
	if o.GPUBlocks <= 0 {
		return MaxBlocks
	}
	return min(2*o.GPUBlocks, MaxBlocks)
}
