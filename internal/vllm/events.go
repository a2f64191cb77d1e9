// Package vllm speaks vLLM's wire formats: KV-cache events (msgpack over ZMQ),
// metrics (Prometheus text), error bodies (JSON) and the engine's own block
// hashes.
//
// The relay and the index decode with it, the simulated fleet encodes with it.
// It does no I/O and starts no goroutines. Values are not safe for concurrent
// use unless a type says so; functions are. Everything that reads outside bytes
// is bounded, never panics, and skips and counts what it does not understand.
package vllm

import "strings"

// Kind is the type of an Event.
type Kind uint8

// The three events that vLLM publishes.
const (
	// BlockStored: consecutive full blocks of one sequence are cached now.
	BlockStored Kind = iota + 1
	// BlockRemoved: one physical copy of each listed block was evicted.
	BlockRemoved
	// AllBlocksCleared: every block on every medium and in every group is gone.
	AllBlocksCleared
)

// String returns the tag that vLLM writes.
func (k Kind) String() string {
	switch k {
	case BlockStored:
		return "BlockStored"
	case BlockRemoved:
		return "BlockRemoved"
	case AllBlocksCleared:
		return "AllBlocksCleared"
	}
	return "unknown"
}

// Batch holds the events of one scheduler step of one engine rank, in order.
type Batch struct {
	// TS is when the engine published, in seconds since the Unix epoch.
	TS     float64
	Events []Event
	// Rank is the engine's data-parallel rank; -1 when the batch names none.
	Rank int
	// Skipped counts events that Decode left out: unknown tags and malformed
	// fields. The encoder ignores it.
	Skipped int
}

// Event is one event of any kind; fields that a kind does not have keep the
// value for "absent". Hashes are opaque handles: they are comparable only
// within one (worker, rank, group). A decoded event's slices belong to the Batch
// and are overwritten by the next Decode into it.
type Event struct {
	Kind Kind
	// Hashes name the blocks: integers as they are (negative ones in two's
	// complement), digests by their last 8 bytes in big-endian order, which is
	// vLLM's own rule for its integer form.
	Hashes []uint64
	// Parent names the block before the first one; valid if HasParent.
	Parent    uint64
	HasParent bool
	// Tokens are the ids of exactly the stored blocks (full-attention groups).
	// Other groups skip blocks: Tokens may be longer than len(Hashes)*BlockSize.
	// Offloaded blocks come with no tokens and BlockSize 0 by default.
	Tokens    []uint32
	BlockSize int
	// LoRAID is deprecated in vLLM; -1 for none.
	LoRAID int64
	// Medium as written by the engine; empty for nil, which means GPU.
	Medium   string
	LoRAName string
	// ExtraKeys holds, per block, what besides tokens went into the block's
	// hash; empty when the engine sends none. Continuation events do not repeat
	// the salt of their sequence.
	ExtraKeys [][]ExtraKey
	// Group is the KV cache group; -1 when absent.
	Group int
	// SpecKind is the kind of attention of the group; empty when absent.
	SpecKind string
	// SlidingWindow in tokens; 0 when absent.
	SlidingWindow int
	// Locality is LOCAL or REMOTE; empty when absent.
	Locality string
	// RemainingCopies, aligned with Hashes, tells how many copies are left after
	// a removal; empty on engines that do not send it (vLLM PR 48933, open).
	RemainingCopies []int
}

// ExtraKey is one entry of a block's extra keys: a LoRA name, a cache salt, a
// multimodal item (identifier and offset) or a digest of prompt embeddings.
type ExtraKey struct {
	Text string
	// Bytes is set instead of Text for digests.
	Bytes []byte
	// Offset of the multimodal item relative to its block in tokens, possibly
	// negative; valid if HasOffset.
	Offset    int64
	HasOffset bool
	// Source and Path are for hashing only and never on the wire: see Tagged.
	Source, Path string
}

// The media that MediumName returns.
const (
	MediumGPU     = "gpu"
	MediumCPU     = "cpu"
	MediumStorage = "storage"
	MediumOther   = "other"
)

// IsMainAttention reports whether the event is about blocks whose chain covers
// the whole prompt. Groups with sliding windows or recurrent state are not. An
// event that names no kind (older engines, and every removal) counts as main:
// the caller knows the group from the stored event.
func (e *Event) IsMainAttention() bool {
	switch e.SpecKind {
	case "", "full_attention", "mla_attention", "sink_full_attention":
		return true
	}
	return false
}

// IsGPU reports whether the blocks are in GPU memory, which is also what an
// absent medium means.
func (e *Event) IsGPU() bool { return e.Medium == "" || strings.EqualFold(e.Medium, MediumGPU) }

// MediumName returns the medium as one of the Medium constants. Engines and
// connectors disagree on the case ("CPU", "cpu").
func (e *Event) MediumName() string {
	switch {
	case e.IsGPU():
		return MediumGPU
	case strings.EqualFold(e.Medium, "cpu"):
		return MediumCPU
	case strings.EqualFold(e.Medium, "storage"), strings.EqualFold(e.Medium, "fs"), strings.EqualFold(e.Medium, "obj"):
		return MediumStorage
	}
	return MediumOther
}

// NewEvent returns an event with all optional fields absent.
func NewEvent(kind Kind) Event { return Event{Kind: kind, LoRAID: -1, Group: -1} }

// reset makes e absent in every field but keeps its memory.
func (e *Event) reset() {
	*e = Event{
		Hashes:          e.Hashes[:0],
		Tokens:          e.Tokens[:0],
		ExtraKeys:       e.ExtraKeys[:0],
		RemainingCopies: e.RemainingCopies[:0],
		LoRAID:          -1,
		Group:           -1,
	}
}
