package kvindex_test

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"

	"github.com/kinference/kinference/internal/kvhash"
	"github.com/kinference/kinference/internal/kvindex"
	"github.com/kinference/kinference/internal/kvindex/ref"
	"github.com/kinference/kinference/internal/vllm"
)

// chooser makes decisions: from a seed in tests, from the input in fuzzing.
type chooser func(n int) int

func seeded(seed uint64) chooser { return rand.New(rand.NewPCG(seed, 7)).IntN }

// oneIn is true once in n.
func (c chooser) oneIn(n int) bool { return c(n) == 0 }

// event makes an event as no engine would, but any could: few hashes and
// tokens, so that they meet again in every combination.
func (c chooser) event() vllm.Event {
	kinds := []vllm.Kind{vllm.BlockStored, vllm.BlockStored, vllm.BlockStored, vllm.BlockRemoved, vllm.BlockRemoved}
	e := vllm.NewEvent(kinds[c(len(kinds))])
	if c.oneIn(150) {
		return vllm.NewEvent(vllm.AllBlocksCleared)
	}
	if c.oneIn(100) {
		e.Kind = vllm.Kind(9)
	}
	for range 1 + c(4) {
		e.Hashes = append(e.Hashes, uint64(c(40)))
	}
	e.Medium = []string{"", "GPU", "gpu", "cpu", "STORAGE", "odd"}[c(6)]
	if c.oneIn(12) {
		e.Locality = []string{"LOCAL", "REMOTE"}[c(2)]
	}
	e.Group = []int{-1, 0, 0, 0, 1, 2, 200}[c(7)]
	if e.Group == 2 {
		e.SpecKind = []string{"mamba", "sliding_window", ""}[c(3)]
	} else if c.oneIn(2) {
		e.SpecKind = []string{"full_attention", "mla_attention", "sink_full_attention"}[c(3)]
	}
	if c.oneIn(200) {
		e.SpecKind = "mamba"
	}
	if e.Kind == vllm.BlockRemoved {
		if c.oneIn(6) {
			for range len(e.Hashes) - c(2) {
				e.RemainingCopies = append(e.RemainingCopies, c(4)-1)
			}
		}
		return e
	}
	if e.HasParent = c(4) > 0; e.HasParent {
		e.Parent = uint64(c(40))
	}
	e.BlockSize = []int{2, 2, 2, 2, 2, 2, 1, 0}[c(8)]
	if c.oneIn(300) {
		e.BlockSize = []int{4, -1, kvindex.MaxBlockSize + 1}[c(3)]
	}
	for range len(e.Hashes) * max(e.BlockSize, 0) {
		e.Tokens = append(e.Tokens, uint32(c(3)))
	}
	if c.oneIn(25) {
		e.Tokens = append(e.Tokens, 1)
	}
	e.LoRAName = []string{"", "", "x"}[c(3)]
	if c.oneIn(8) {
		e.LoRAID = int64(c(3))
	}
	if c.oneIn(3) {
		for range len(e.Hashes) - c(2) {
			var keys []vllm.ExtraKey
			if e.LoRAName != "" {
				keys = append(keys, vllm.ExtraKey{Text: e.LoRAName})
			}
			for range c(3) {
				keys = append(keys, []vllm.ExtraKey{
					{Text: "x"}, {Text: "salt"}, {Text: "image", Offset: int64(c(3)) - 1, HasOffset: true}, {Bytes: []byte{1, byte(c(2))}},
				}[c(4)])
			}
			e.ExtraKeys = append(e.ExtraKeys, keys)
		}
	}
	return e
}

// workers of the tests: two ranks of one engine, and another one.
var workers = []string{"a/0", "a/1", "b/0"}

// step does one random thing to all indexes.
func (c chooser) step(indexes ...kvindex.Index) {
	w := workers[c(len(workers))]
	switch {
	case c.oneIn(300):
		for _, x := range indexes {
			x.Clear(w)
		}
	case c.oneIn(300):
		for _, x := range indexes {
			x.Remove(w)
		}
	case c.oneIn(200):
		o := kvindex.Options{Removals: kvindex.Removals(c(2)), GPUBlocks: c(20)}
		for _, x := range indexes {
			x.Configure(w, o)
		}
	default:
		var b vllm.Batch
		for range 1 + c(3) {
			b.Events = append(b.Events, c.event())
		}
		for _, x := range indexes {
			x.Apply(w, &b)
		}
	}
}

// hashes is a prompt: up to a block that some worker holds, and maybe a block or more
// that none does.
func (c chooser) hashes(x *ref.Index) []kvhash.Hash {
	var all []kvhash.Hash
	for _, w := range workers {
		x.Blocks(w, func(b kvindex.Block) bool { all = append(all, b.Hash); return true })
	}
	slices.Sort(all)
	var out []kvhash.Hash
	if len(all) > 0 && !c.oneIn(20) {
		out = x.Chain(all[c(len(all))])
	}
	for range c(3) {
		out = append(out, kvhash.Hash(c(100)))
	}
	return out
}

// view is all that can be seen of an index, in a defined order.
func view(x kvindex.Index, queries [][]kvhash.Hash) any {
	type worker struct {
		Blocks []kvindex.Block
		Stats  kvindex.Stats
		Known  bool
	}
	var v struct {
		Workers  []worker
		Overlaps [][]kvindex.Overlap
	}
	for _, name := range workers {
		var w worker
		w.Stats, w.Known = x.Stats(name)
		x.Blocks(name, func(b kvindex.Block) bool { w.Blocks = append(w.Blocks, b); return true })
		slices.SortFunc(w.Blocks, func(a, b kvindex.Block) int {
			return cmp.Or(cmp.Compare(a.Medium, b.Medium), cmp.Compare(a.Group, b.Group), cmp.Compare(a.Hash, b.Hash), cmp.Compare(a.Copies, b.Copies))
		})
		v.Workers = append(v.Workers, w)
	}
	for _, q := range queries {
		for _, size := range []int{0, 1, 2, 4} {
			o := slices.DeleteFunc(x.Match(nil, size, q), func(o kvindex.Overlap) bool { return !slices.Contains(workers, o.Worker) })
			slices.SortFunc(o, func(a, b kvindex.Overlap) int { return cmp.Compare(a.Worker, b.Worker) })
			v.Overlaps = append(v.Overlaps, append([]kvindex.Overlap{}, o...))
		}
	}
	return v
}

// check compares two indexes.
func check(t *testing.T, c chooser, got kvindex.Index, want *ref.Index) {
	t.Helper()
	var queries [][]kvhash.Hash
	for range 4 {
		queries = append(queries, c.hashes(want))
	}
	if diff := gocmp.Diff(view(got, queries), view(want, queries)); diff != "" {
		t.Fatalf("index differs from the reference (-got +want):\n%s", diff)
	}
}

// TestTableEqualsReference compares all the time, on streams with LoRA,
// salts, images, duplicates, evictions, clears, media, groups and nonsense.
func TestTableEqualsReference(t *testing.T) {
	defer kvindex.SweepBy(3)()
	for seed := range uint64(8) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			t.Parallel()
			c, table, reference := seeded(seed), kvindex.New(), ref.New()
			for i := range 70 * int(seed%3) { // put the workers beyond the first words of the sets
				b := vllm.Batch{Events: []vllm.Event{stored(1, nil, 2, 1, 1)}}
				table.Apply(fmt.Sprint("other", i), &b)
				if i%2 == 0 {
					table.Remove(fmt.Sprint("other", i))
				}
			}
			for i := range 2000 {
				c.step(table, reference)
				if i < 200 || i%8 == 0 { // comparing costs more than applying
					check(t, c, table, reference)
				}
			}
			for _, w := range workers {
				table.Remove(w)
			}
			for i := range 70 * int(seed%3) {
				table.Remove(fmt.Sprint("other", i))
			}
			if n := kvindex.Held(table); n != 0 {
				t.Errorf("%d blocks are held by nobody", n)
			}
		})
	}
}

// FuzzApply compares with the reference on streams that the input chooses.
func FuzzApply(f *testing.F) {
	for seed := range uint64(8) {
		c := seeded(seed)
		b := make([]byte, 400)
		for i := range b {
			b[i] = byte(c(256))
		}
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		c := chooser(func(n int) int {
			if len(data) == 0 {
				return 0
			}
			v := int(data[0])
			data = data[1:]
			return v % n
		})
		table, reference := kvindex.New(), ref.New()
		for steps := 0; len(data) > 0 && steps < 300; steps++ {
			c.step(table, reference)
		}
		check(t, seeded(1), table, reference)
	})
}

// FuzzDecoded applies whatever the decoder accepts.
func FuzzDecoded(f *testing.F) {
	for seed := range uint64(8) {
		c := seeded(seed)
		b := vllm.Batch{Rank: -1}
		for range 6 {
			b.Events = append(b.Events, c.event())
		}
		f.Add(vllm.AppendBatch(nil, &b, vllm.V0_24))
		f.Add(vllm.AppendBatch(nil, &b, vllm.V0_23))
	}
	f.Fuzz(func(t *testing.T, payload []byte) {
		var d vllm.Decoder
		var b vllm.Batch
		if d.Decode(payload, &b) != nil {
			return
		}
		table, reference := kvindex.New(), ref.New()
		for range 2 {
			table.Apply("a/0", &b)
			reference.Apply("a/0", &b)
		}
		check(t, seeded(1), table, reference)
	})
}
