package kvindex_test

import (
	"fmt"
	"math/rand/v2"
	"runtime"
	"sync"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"

	"github.com/kinference/kinference/internal/kvhash"
	"github.com/kinference/kinference/internal/kvindex"
	"github.com/kinference/kinference/internal/kvindex/ref"
	"github.com/kinference/kinference/internal/vllm"
)

// stored is a BlockStored of blocks first, first+1, …, whose tokens follow.
func stored(first uint64, parent *uint64, blockSize int, tokens ...uint32) vllm.Event {
	e := vllm.NewEvent(vllm.BlockStored)
	for i := range len(tokens) / blockSize {
		e.Hashes = append(e.Hashes, first+uint64(i))
	}
	if parent != nil {
		e.Parent, e.HasParent = *parent, true
	}
	e.Tokens, e.BlockSize = tokens, blockSize
	return e
}

func removed(hashes ...uint64) vllm.Event {
	e := vllm.NewEvent(vllm.BlockRemoved)
	e.Hashes = hashes
	return e
}

func cleared() vllm.Event { return vllm.NewEvent(vllm.AllBlocksCleared) }

func on(medium string, e vllm.Event) vllm.Event { e.Medium = medium; return e }

func inGroup(g int, kind string, e vllm.Event) vllm.Event { e.Group, e.SpecKind = g, kind; return e }

func placeholder(hashes ...uint64) vllm.Event {
	e := vllm.NewEvent(vllm.BlockStored)
	e.Hashes, e.Medium = hashes, "CPU"
	return e
}

func p(h uint64) *uint64 { return &h }

func text(keys ...string) []vllm.ExtraKey {
	var out []vllm.ExtraKey
	for _, k := range keys {
		out = append(out, vllm.ExtraKey{Text: k})
	}
	return out
}

func withKeys(e vllm.Event, lora string, keys ...[]vllm.ExtraKey) vllm.Event {
	e.LoRAName, e.ExtraKeys = lora, keys
	return e
}

func hashes(lora, salt string, blockSize int, tokens ...uint32) []kvhash.Hash {
	return kvhash.Append(nil, kvhash.Root(lora, salt), tokens, blockSize)
}

// TestApply states what events mean: after them, the prompt 1 2 3 4 5 6 of
// blocks of two tokens overlaps by so many blocks.
func TestApply(t *testing.T) {
	long := stored(1, nil, 2, 1, 2, 3, 4, 5, 6)
	tests := []struct {
		name     string
		options  kvindex.Options
		lora     string
		salt     string
		events   []vllm.Event
		gpu, cpu int
		skipped  kvindex.Reason
		skips    int
	}{
		{name: "stored", events: []vllm.Event{long}, gpu: 3, cpu: 3},
		{name: "continued", events: []vllm.Event{stored(1, nil, 2, 1, 2), stored(7, p(1), 2, 3, 4, 5, 6)}, gpu: 3, cpu: 3},
		{name: "removed at the end", events: []vllm.Event{long, removed(3)}, gpu: 2, cpu: 2},
		{name: "hole", events: []vllm.Event{long, removed(2)}, gpu: 1, cpu: 1},
		{name: "removed at the start", events: []vllm.Event{long, removed(1)}},
		{name: "cleared", events: []vllm.Event{long, cleared()}},
		{name: "stored after a clear", events: []vllm.Event{long, cleared(), stored(1, nil, 2, 1, 2)}, gpu: 1, cpu: 1},
		{name: "parent gone with a clear", events: []vllm.Event{long, cleared(), stored(3, p(2), 2, 5, 6)}},

		{name: "two copies, one removed", events: []vllm.Event{long, stored(3, p(2), 2, 5, 6), removed(3)}, gpu: 3, cpu: 3},
		{name: "two copies, both removed", events: []vllm.Event{long, stored(3, p(2), 2, 5, 6), removed(3), removed(3)}, gpu: 2, cpu: 2},
		{name: "last copy removed", options: kvindex.Options{Removals: kvindex.LastCopy},
			events: []vllm.Event{long, stored(3, p(2), 2, 5, 6), removed(3)}, gpu: 2, cpu: 2},
		{name: "remaining copies named", events: []vllm.Event{long, func() vllm.Event {
			e := removed(2, 3)
			e.RemainingCopies = []int{1, 0}
			return e
		}()}, gpu: 2, cpu: 2},
		{name: "removal of an unknown block", events: []vllm.Event{long, removed(99)}, gpu: 3, cpu: 3, skipped: kvindex.SkipUnknown, skips: 1},

		{name: "on the CPU only", events: []vllm.Event{long, on("cpu", long), removed(2, 3)}, gpu: 1, cpu: 3},
		{name: "placeholder of a GPU block", events: []vllm.Event{long, placeholder(1, 2), removed(2, 3)}, gpu: 1, cpu: 2},
		{name: "placeholder of an unknown block", events: []vllm.Event{placeholder(1)}, skipped: kvindex.SkipUnresolved, skips: 1},
		{name: "placeholder without a medium", events: []vllm.Event{long, func() vllm.Event { e := placeholder(9); e.Medium = ""; return e }()},
			gpu: 3, cpu: 3, skipped: kvindex.SkipShape, skips: 1},
		{name: "media are removed apart", events: []vllm.Event{long, placeholder(1, 2, 3), on("CPU", removed(3)), removed(1, 3)}, gpu: 0, cpu: 2},
		{name: "a clear covers all media", events: []vllm.Event{long, placeholder(1, 2, 3), cleared()}},
		{name: "storage is no hit", events: []vllm.Event{long, on("STORAGE", long), removed(1)}},
		{name: "a remote block is no hit", events: []vllm.Event{long, func() vllm.Event { e := on("CPU", long); e.Locality = "REMOTE"; return e }(), removed(1)}},
		{name: "CPU before GPU", events: []vllm.Event{on("CPU", long)}, skipped: kvindex.SkipPartial, skips: 1},

		{name: "other groups", events: []vllm.Event{
			inGroup(0, "mamba", stored(50, nil, 6, 1, 2, 3, 4, 5, 6)),
			inGroup(1, "full_attention", long),
			inGroup(0, "", removed(50)),
			inGroup(2, "sliding_window", stored(3, nil, 2, 5, 6)),
		}, gpu: 3, cpu: 3, skipped: kvindex.SkipGroup, skips: 3},
		{name: "two main groups need both", events: []vllm.Event{
			inGroup(0, "full_attention", long), inGroup(1, "mla_attention", long), inGroup(1, "", removed(3)),
		}, gpu: 2, cpu: 2},
		{name: "unnumbered group is the first", events: []vllm.Event{inGroup(0, "full_attention", long), removed(3)}, gpu: 2, cpu: 2},
		{name: "group turns out not to be main", events: []vllm.Event{inGroup(3, "", stored(1, nil, 2, 9, 9)), inGroup(0, "", long),
			inGroup(3, "mamba", stored(2, nil, 2, 9, 9))}, gpu: 3, cpu: 3, skipped: kvindex.SkipGroup, skips: 1},

		{name: "lengths contradict", events: []vllm.Event{long, func() vllm.Event {
			e := stored(3, p(2), 2, 5, 6)
			e.Tokens = append(e.Tokens, 7)
			return e
		}()}, gpu: 3, cpu: 3, skipped: kvindex.SkipShape, skips: 1},
		{name: "no hashes", events: []vllm.Event{vllm.NewEvent(vllm.BlockStored)}, skipped: kvindex.SkipShape, skips: 1},
		{name: "unknown kind", events: []vllm.Event{{}}, skipped: kvindex.SkipShape, skips: 1},
		{name: "partial block", events: []vllm.Event{long, stored(9, p(3), 1, 7)}, gpu: 3, cpu: 3, skipped: kvindex.SkipPartial, skips: 1},
		{name: "partial block first", events: []vllm.Event{stored(9, nil, 1, 1), removed(9), long}, gpu: 3, cpu: 3},

		{name: "orphan", events: []vllm.Event{stored(3, p(2), 2, 5, 6), stored(1, nil, 2, 1, 2, 3, 4)}, gpu: 3, cpu: 3},
		{name: "orphan of an orphan", events: []vllm.Event{stored(3, p(2), 2, 5, 6), stored(2, p(1), 2, 3, 4), stored(1, nil, 2, 1, 2)}, gpu: 3, cpu: 3},
		{name: "orphan removed meanwhile", events: []vllm.Event{stored(2, p(1), 2, 3, 4, 5, 6), removed(3), stored(1, nil, 2, 1, 2)}, gpu: 2, cpu: 2},
		{name: "orphan of before a clear", events: []vllm.Event{stored(2, p(1), 2, 3, 4), cleared(), stored(1, nil, 2, 1, 2)}, gpu: 1, cpu: 1,
			skipped: kvindex.SkipOrphan, skips: 1},

		{name: "other adapter", lora: "x", events: []vllm.Event{long}},
		{name: "same adapter", lora: "x", events: []vllm.Event{withKeys(long, "x", text("x"), text("x"), text("x"))}, gpu: 3, cpu: 3},
		{name: "adapter by number", lora: "3", events: []vllm.Event{func() vllm.Event { e := long; e.LoRAID = 3; return e }()}, gpu: 3, cpu: 3},
		{name: "other salt", salt: "x", events: []vllm.Event{long}},
		{name: "same salt, inherited", salt: "x", events: []vllm.Event{withKeys(stored(1, nil, 2, 1, 2, 3, 4), "", text("x"), nil), stored(3, p(2), 2, 5, 6)}, gpu: 3, cpu: 3},
		{name: "adapter is not a salt", lora: "x", events: []vllm.Event{withKeys(long, "", text("x"), nil, nil)}},
		{name: "salt is not an adapter", salt: "x", events: []vllm.Event{withKeys(long, "x", text("x"), text("x"), text("x"))}},
		{name: "adapter and salt of one name", lora: "x", salt: "x", events: []vllm.Event{withKeys(long, "x", text("x", "x"), text("x"), text("x"))}, gpu: 3, cpu: 3},
		{name: "image in the second block", events: []vllm.Event{withKeys(long, "", nil, []vllm.ExtraKey{{Text: "img", HasOffset: true}}, nil)}, gpu: 1, cpu: 1},
		{name: "image and salt", salt: "s", events: []vllm.Event{withKeys(long, "", nil, []vllm.ExtraKey{{Text: "img", HasOffset: true}}, nil),
			withKeys(stored(11, nil, 2, 1, 2, 3, 4), "", []vllm.ExtraKey{{Text: "s"}}, []vllm.ExtraKey{{Text: "old image"}})}, gpu: 1, cpu: 1},
		{name: "one engine hash, two contents", salt: "x", events: []vllm.Event{
			withKeys(stored(1, nil, 2, 1, 2), "x", text("x")), withKeys(stored(1, nil, 2, 1, 2), "", text("x"))}, gpu: 1, cpu: 1},

		{name: "more than the engine has", options: kvindex.Options{GPUBlocks: 1}, events: []vllm.Event{long}, gpu: 2, cpu: 2,
			skipped: kvindex.SkipCapacity, skips: 1},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			table, reference := kvindex.New(), ref.New()
			var r kvindex.Result
			for _, x := range []kvindex.Index{table, reference} {
				x.Configure("a/0", tt.options)
				r = kvindex.Result{}
				for _, e := range tt.events {
					got := x.Apply("a/0", &vllm.Batch{Events: []vllm.Event{e}})
					if x == kvindex.Index(table) {
						for i, n := range got.Skipped {
							r.Skipped[i] += n
						}
					}
				}
				var want []kvindex.Overlap
				if tt.cpu > 0 {
					want = []kvindex.Overlap{{Worker: "a/0", GPUBlocks: tt.gpu, CPUBlocks: tt.cpu}}
				}
				if diff := gocmp.Diff(x.Match(nil, 2, hashes(tt.lora, tt.salt, 2, 1, 2, 3, 4, 5, 6)), want); diff != "" {
					t.Errorf("%T (-got +want):\n%s", x, diff)
				}
				if x == kvindex.Index(table) {
					var want kvindex.Result
					want.Skipped[tt.skipped] = tt.skips
					if r.Skipped != want.Skipped {
						t.Errorf("skipped %v, want %v", r.Skipped, want.Skipped)
					}
				}
			}
		})
	}
}

func TestWorkersAreApart(t *testing.T) {
	x := kvindex.New()
	prompt := hashes("", "", 2, 1, 2, 3, 4)
	for i := range 200 {
		x.Apply(fmt.Sprintf("w%d/0", i), &vllm.Batch{Events: []vllm.Event{stored(uint64(i), nil, 2, 1, 2, 3, 4)}})
	}
	if got := len(x.Match(nil, 2, prompt)); got != 200 {
		t.Errorf("%d workers match, want 200", got)
	}
	if got := x.Match(nil, 4, hashes("", "", 4, 1, 2, 3, 4)); len(got) != 0 {
		t.Errorf("%d workers match with another block size", len(got))
	}
	for i := range 199 {
		if i%2 == 0 {
			x.Remove(fmt.Sprintf("w%d/0", i))
		} else {
			x.Clear(fmt.Sprintf("w%d/0", i))
		}
	}
	want := []kvindex.Overlap{{Worker: "w199/0", GPUBlocks: 2, CPUBlocks: 2}}
	if diff := gocmp.Diff(x.Match(nil, 2, prompt), want); diff != "" {
		t.Errorf("(-got +want):\n%s", diff)
	}
	if _, ok := x.Stats("w0/0"); ok {
		t.Error("a removed worker is known")
	}
	if s, ok := x.Stats("w199/0"); !ok || s.BlockSize != 2 || s.Total() != 2 {
		t.Errorf("stats are %+v, %v", s, ok)
	}
}

// TestOrphansAreBounded floods a worker with events whose parents never come.
func TestOrphansAreBounded(t *testing.T) {
	x := kvindex.New()
	given := 0
	for i := range uint64(1000) {
		r := x.Apply("a/0", &vllm.Batch{Events: []vllm.Event{stored(10+i, p(1), 2, 1, 2, 3, 4)}})
		given += r.Skipped[kvindex.SkipOrphan]
	}
	s, _ := x.Stats("a/0")
	if s.Orphans != 64 || given != 1000-64 {
		t.Errorf("%d wait, %d were given up; want 64 and 936", s.Orphans, given)
	}
	big := stored(1, p(2), 1<<10, make([]uint32, 40<<10)...)
	for range 3 {
		x.Apply("a/0", &vllm.Batch{Events: []vllm.Event{big}})
	}
	if s, _ := x.Stats("a/0"); s.Orphans != 1 {
		t.Errorf("%d events of 40k tokens wait, want 1", s.Orphans)
	}
	huge := stored(1, p(2), 1<<10, make([]uint32, 80<<10)...)
	if r := x.Apply("a/0", &vllm.Batch{Events: []vllm.Event{huge}}); r.Skipped[kvindex.SkipOrphan] != 1 {
		t.Error("an event of 80k tokens waits")
	}
}

func TestNames(t *testing.T) {
	seen := map[string]bool{kvindex.GPU.String(): true, kvindex.CPU.String(): true, kvindex.Storage.String(): true}
	for _, r := range kvindex.Reasons() {
		seen[r.String()] = true
	}
	if len(seen) != 10 {
		t.Errorf("names are not distinct: %v", seen)
	}
}

// TestConcurrency is for the race detector: all methods at once.
func TestConcurrency(t *testing.T) {
	defer kvindex.SweepBy(3)()
	x := kvindex.New()
	var wg sync.WaitGroup
	for n, w := range workers {
		wg.Go(func() {
			c := seeded(uint64(n))
			for range 2000 {
				x.Apply(w, &vllm.Batch{Events: []vllm.Event{c.event()}})
				switch c(100) {
				case 0:
					x.Clear(w)
				case 1:
					x.Remove(w)
				case 2:
					x.Configure(w, kvindex.Options{GPUBlocks: c(9)})
				case 3:
					x.Blocks(w, func(kvindex.Block) bool { return false })
				}
			}
		})
		wg.Go(func() {
			r := rand.New(rand.NewPCG(uint64(n), 3))
			var dst []kvindex.Overlap
			for range 4000 {
				dst = x.Match(dst[:0], 2, hashes("", "", 2, r.Uint32N(3), r.Uint32N(3), r.Uint32N(3), r.Uint32N(3)))
				x.Stats(w)
			}
		})
	}
	wg.Wait()
}

// fill gives each worker the shared first blocks and three of them each one of
// 32 conversations of n blocks.
func fill(workers, n int) (*kvindex.Table, [][]kvhash.Hash) {
	x := kvindex.New()
	r := rand.New(rand.NewPCG(1, 1))
	var prompts [][]kvhash.Hash
	shared := make([]uint32, 16*min(64, n))
	for i := range shared {
		shared[i] = r.Uint32N(1 << 17)
	}
	for c := range 32 {
		tokens := append([]uint32{}, shared...)
		for len(tokens) < 16*n {
			tokens = append(tokens, r.Uint32N(1<<17))
		}
		prompts = append(prompts, hashes("", "", 16, tokens...))
		for k := range 3 {
			e := stored(uint64(c*n), nil, 16, tokens...)
			x.Apply(fmt.Sprintf("w%d/0", (c+k)%workers), &vllm.Batch{Events: []vllm.Event{e}})
		}
	}
	for w := range workers {
		x.Apply(fmt.Sprintf("w%d/0", w), &vllm.Batch{Events: []vllm.Event{stored(1<<40, nil, 16, shared...)}})
	}
	return x, prompts
}

func BenchmarkMatch(b *testing.B) {
	for _, workers := range []int{3, 16, 64} {
		for _, n := range []int{10, 100, 1000, 8000} {
			b.Run(fmt.Sprintf("workers=%d/n=%d", workers, n), func(b *testing.B) {
				x, prompts := fill(workers, n)
				var dst []kvindex.Overlap
				b.ReportAllocs()
				for i := 0; b.Loop(); i++ {
					dst = x.Match(dst[:0], 16, prompts[i%len(prompts)])
				}
				b.ReportMetric(float64(len(dst)), "matches")
			})
		}
	}
	b.Run("miss/n=8000", func(b *testing.B) {
		x, _ := fill(16, 100)
		miss := hashes("other", "", 16, make([]uint32, 16*8000)...)
		b.ReportAllocs()
		for b.Loop() {
			x.Match(nil, 16, miss)
		}
	})
}

// BenchmarkMemory gives each of three workers the same 100,000 blocks, and tells
// what a block costs in all, with three holders, and per holder.
func BenchmarkMemory(b *testing.B) {
	const blocks, size = 100_000, 16
	heap := func() float64 {
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return float64(m.HeapAlloc)
	}
	r := rand.New(rand.NewPCG(1, 1))
	tokens := make([]uint32, blocks*size)
	for i := range tokens {
		tokens[i] = r.Uint32()
	}
	e := stored(1, nil, size, tokens...)
	for b.Loop() {
		before := heap()
		x := kvindex.New()
		for w := range 3 {
			x.Apply(fmt.Sprint(w), &vllm.Batch{Events: []vllm.Event{e}})
		}
		used := heap() - before
		b.ReportMetric(used/blocks, "B/block")
		b.ReportMetric(used/blocks/3, "B/holder")
		runtime.KeepAlive(x)
	}
}

// BenchmarkApply stores and removes a chain of 64 blocks; one operation is one
// block stored and removed.
func BenchmarkApply(b *testing.B) {
	for _, workers := range []int{1, 16} {
		b.Run(fmt.Sprintf("workers=%d", workers), func(b *testing.B) {
			x, _ := fill(16, 1000)
			tokens := make([]uint32, 64*16)
			add := stored(1<<50, nil, 16, tokens...)
			batch := vllm.Batch{Events: []vllm.Event{add, removed(add.Hashes...)}}
			b.ReportAllocs()
			for i := 0; i < b.N; i += 64 {
				x.Apply(fmt.Sprintf("w%d/0", i/64%workers), &batch)
			}
		})
	}
}
