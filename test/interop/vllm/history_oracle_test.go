package vllm_test

import (
	"fmt"

	"github.com/kinference/kinference/internal/kvhash"
	"github.com/kinference/kinference/internal/kvindex"
	"github.com/kinference/kinference/internal/kvindex/ref"
	"github.com/kinference/kinference/internal/vllm"
)

// A lifetime is all that one process of an engine published, from batch 0 on.
type lifetime []vllm.Batch

// contents is what somebody believes to be in an engine's cache.
type contents struct {
	hashes map[kvhash.Hash]bool
	// entries counts the engine's hashes of all main attention groups.
	entries int
	size    int // of a block in tokens; 0: no block was ever seen
}

func (c contents) without(o contents) (n int) {
	for h := range c.hashes {
		if !o.hashes[h] {
			n++
		}
	}
	return n
}

// chained is a block with all that is before it.
type chained struct {
	lora, salt string
	tokens     []uint32
	copies     int
	hash       kvhash.Hash
}

// truth plays a whole lifetime by vLLM's rules, sharing no code with the index:
// a block is its whole prefix, and is there as long as one of its copies is.
// Every hash that was ever announced goes into seen.
func (l lifetime) truth(seen map[kvhash.Hash]bool) (contents, error) {
	type name struct {
		group int
		hash  uint64
	}
	blocks := map[name]*chained{}
	sizes := map[int]int{} // of main groups
	for seq := range l {
		for i := range l[seq].Events {
			e := &l[seq].Events[i]
			group := max(e.Group, 0)
			fault := func(what string) error {
				return fmt.Errorf("the recorded history makes no sense: batch %d, event %d: %s", seq, i, what)
			}
			switch e.Kind {
			case vllm.AllBlocksCleared:
				clear(blocks)
			case vllm.BlockRemoved:
				if sizes[group] == 0 {
					continue // not a main group
				}
				for _, h := range e.Hashes {
					b := blocks[name{group, h}]
					if b == nil {
						return contents{}, fault("an unknown block is removed")
					}
					if b.copies--; b.copies == 0 {
						delete(blocks, name{group, h})
					}
				}
			case vllm.BlockStored:
				switch e.SpecKind {
				case "", "full_attention", "mla_attention", "sink_full_attention":
				default:
					continue
				}
				if len(e.Tokens) != len(e.Hashes)*e.BlockSize {
					return contents{}, fault("tokens and blocks differ in number")
				}
				if n := sizes[group]; n != 0 && n != e.BlockSize {
					return contents{}, fault("the block size changed")
				}
				sizes[group] = e.BlockSize
				before := &chained{lora: e.LoRAName}
				if e.HasParent {
					if before = blocks[name{group, e.Parent}]; before == nil {
						return contents{}, fault("the parent is unknown")
					}
				} else if len(e.ExtraKeys) > 0 {
					keys := e.ExtraKeys[0]
					if e.LoRAName != "" && len(keys) > 0 {
						keys = keys[1:]
					}
					if len(keys) > 0 {
						before.salt = keys[0].Text
					}
				}
				for j, h := range e.Hashes {
					b := &chained{lora: before.lora, salt: before.salt}
					b.tokens = append(append(b.tokens, before.tokens...), e.Tokens[j*e.BlockSize:(j+1)*e.BlockSize]...)
					own := kvhash.Append(nil, kvhash.Root(b.lora, b.salt), b.tokens, e.BlockSize)
					b.hash = own[len(own)-1]
					seen[b.hash] = true
					if old := blocks[name{group, h}]; old != nil {
						if old.hash != b.hash {
							return contents{}, fault("one name for two blocks")
						}
						b.copies = old.copies
					}
					b.copies++
					blocks[name{group, h}] = b
					before = b
				}
			}
		}
	}
	held := map[int]map[kvhash.Hash]bool{}
	for n, b := range blocks {
		if held[n.group] == nil {
			held[n.group] = map[kvhash.Hash]bool{}
		}
		held[n.group][b.hash] = true
	}
	return collect(held, sizes, len(blocks)), nil
}

// knowable is what a reader makes of a lifetime of which it has only the batches
// from first on, by the plain reference index.
func (l lifetime) knowable(first int) contents {
	x := ref.New()
	for i := range l {
		if i >= first {
			x.Apply("w", &l[i])
		}
	}
	held, sizes, entries := map[int]map[kvhash.Hash]bool{}, map[int]int{}, 0
	x.Blocks("w", func(b kvindex.Block) bool {
		if held[b.Group] == nil {
			held[b.Group] = map[kvhash.Hash]bool{}
		}
		held[b.Group][b.Hash] = true
		entries++
		return true
	})
	if s, ok := x.Stats("w"); ok {
		for g := range held {
			sizes[g] = s.BlockSize
		}
	}
	return collect(held, sizes, entries)
}

// collect keeps the blocks that every main group holds: a prefix is a hit where
// all of them have it.
func collect(held map[int]map[kvhash.Hash]bool, sizes map[int]int, entries int) contents {
	c := contents{hashes: map[kvhash.Hash]bool{}, entries: entries}
	for g, size := range sizes {
		c.size = max(c.size, size)
		for h := range held[g] {
			all := true
			for other := range sizes {
				all = all && held[other][h]
			}
			if all {
				c.hashes[h] = true
			}
		}
	}
	return c
}

// cleared tells whether the engine emptied its cache in or after batch first.
func (l lifetime) cleared(first int) bool {
	for i := range l {
		for j := range l[i].Events {
			if i >= first && l[i].Events[j].Kind == vllm.AllBlocksCleared {
				return true
			}
		}
	}
	return false
}
