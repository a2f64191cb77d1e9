package kvindex_test

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"

	"github.com/kinference/kinference/internal/kvhash"
	"github.com/kinference/kinference/internal/kvindex"
	"github.com/kinference/kinference/internal/vllm"
)

// tree is a forest of conversations with branches, as long as real ones, and who holds
// what of it: a model of the fleet that is easy to believe.
type tree struct {
	r     *rand.Rand
	nodes []node
	held  []map[int]bool // by worker: nodes
	names []string
}

type node struct {
	parent   int // -1: starts a sequence
	children []int
	tokens   []uint32
	hash     kvhash.Hash
}

const treeBlock = 4

func newTree(seed uint64, nodes, workers int) *tree {
	g := &tree{r: rand.New(rand.NewPCG(seed, 11))}
	for i := range nodes {
		parent := i - 1 // mostly chains
		switch {
		case i == 0 || g.r.IntN(400) == 0:
			parent = -1
		case g.r.IntN(60) == 0:
			parent = g.r.IntN(i)
		}
		n := node{parent: parent, tokens: make([]uint32, treeBlock)}
		for j := range n.tokens {
			n.tokens[j] = g.r.Uint32()
		}
		before := kvhash.Root("", "")
		if parent >= 0 {
			before = g.nodes[parent].hash
			g.nodes[parent].children = append(g.nodes[parent].children, i)
		}
		n.hash = kvhash.Next(before, n.tokens)
		g.nodes = append(g.nodes, n)
	}
	for w := range workers {
		g.names = append(g.names, fmt.Sprintf("w%d/0", w))
		g.held = append(g.held, map[int]bool{})
	}
	return g
}

// path is the nodes from a start down to i.
func (g *tree) path(i int) []int {
	var p []int
	for ; i >= 0; i = g.nodes[i].parent {
		p = append(p, i)
	}
	slices.Reverse(p)
	return p
}

// engineHash is the hash that a worker's engine gives a node: those of even workers agree.
func engineHash(worker, i int) uint64 {
	if worker%2 == 0 {
		return uint64(i + 1)
	}
	return uint64(worker)<<32 | uint64(i+1)
}

// store lets a worker hold a whole path, by one event for what it lacks in a row.
func (g *tree) store(w, i int) []vllm.Event {
	var events []vllm.Event
	path := g.path(i)
	for k := 0; k < len(path); k++ {
		if g.held[w][path[k]] {
			continue
		}
		e := vllm.NewEvent(vllm.BlockStored)
		e.BlockSize = treeBlock
		if k > 0 {
			e.HasParent, e.Parent = true, engineHash(w, path[k-1])
		}
		for ; k < len(path) && !g.held[w][path[k]]; k++ {
			e.Hashes = append(e.Hashes, engineHash(w, path[k]))
			e.Tokens = append(e.Tokens, g.nodes[path[k]].tokens...)
			g.held[w][path[k]] = true
		}
		events = append(events, e)
	}
	return events
}

// evict takes up to n leaves of what a worker holds away, as engines do. A hole takes any.
func (g *tree) evict(w, n int, holes bool) []vllm.Event {
	e := vllm.NewEvent(vllm.BlockRemoved)
	held := slices.Sorted(maps.Keys(g.held[w]))
	for len(held) > 0 && len(e.Hashes) < n {
		at := g.r.IntN(len(held))
		i := held[at]
		if !holes {
			for { // down to a leaf
				next := slices.IndexFunc(g.nodes[i].children, func(c int) bool { return g.held[w][c] })
				if next < 0 {
					break
				}
				i = g.nodes[i].children[next]
			}
		}
		delete(g.held[w], i)
		e.Hashes = append(e.Hashes, engineHash(w, i))
		if at = slices.Index(held, i); at >= 0 {
			held = slices.Delete(held, at, at+1)
		}
	}
	if len(e.Hashes) == 0 {
		return nil
	}
	return []vllm.Event{e}
}

// depths are how many leading nodes of a path each worker holds.
func (g *tree) depths(path []int) map[string]int {
	out := map[string]int{}
	for w, name := range g.names {
		n := 0
		for n < len(path) && g.held[w][path[n]] {
			n++
		}
		if n > 0 {
			out[name] = n
		}
	}
	return out
}

func depths(x kvindex.Index, hashes []kvhash.Hash) map[string]int {
	out := map[string]int{}
	for _, o := range x.Match(nil, treeBlock, hashes) {
		out[o.Worker] = o.GPUBlocks
	}
	return out
}

func (g *tree) hashes(path []int) []kvhash.Hash {
	var out []kvhash.Hash
	for _, i := range path {
		out = append(out, g.nodes[i].hash)
	}
	return out
}

// step does one thing to the index and returns how many blocks it was about.
func (g *tree) step(t *testing.T, x kvindex.Index, holes bool) (events int) {
	t.Helper()
	w := g.r.IntN(len(g.names))
	var b vllm.Batch
	switch g.r.IntN(40) {
	case 0:
		x.Clear(g.names[w])
		clear(g.held[w])
	case 1, 2, 3, 4, 5, 6, 7, 8, 9, 10:
		b.Events = g.evict(w, 1+g.r.IntN(300), holes && g.r.IntN(4) == 0)
	default:
		b.Events = g.store(w, g.r.IntN(len(g.nodes)))
	}
	for _, e := range b.Events {
		events += len(e.Hashes)
	}
	if r := x.Apply(g.names[w], &b); r.Skipped != (kvindex.Result{}).Skipped {
		t.Fatalf("skipped %v", r.Skipped)
	}
	return events
}

// compare compares the depths of two prompts with the model.
func (g *tree) compare(t *testing.T, x kvindex.Index) {
	t.Helper()
	for range 2 {
		path := g.path(g.r.IntN(len(g.nodes)))
		if diff := gocmp.Diff(depths(x, g.hashes(path)), g.depths(path)); diff != "" {
			t.Fatalf("depths in a path of %d (-got +want):\n%s", len(path), diff)
		}
	}
}

// TestMatchEach finds the same, block by block.
func TestMatchEach(t *testing.T) {
	g := newTree(9, 3000, 70)
	x := kvindex.New()
	for range 300 {
		g.step(t, x, true)
		path := g.path(g.r.IntN(len(g.nodes)))
		got := map[string]int{}
		for _, o := range x.MatchEach(nil, treeBlock, g.hashes(path)) {
			got[o.Worker] = o.GPUBlocks
		}
		if diff := gocmp.Diff(got, g.depths(path)); diff != "" {
			t.Fatalf("depths in a path of %d (-got +want):\n%s", len(path), diff)
		}
	}
}

// TestDepthsOfLongChains compares the depths of prompts of hundreds of blocks with the
// model, on streams that evict as engines do and on such that leave holes.
func TestDepthsOfLongChains(t *testing.T) {
	defer kvindex.SweepBy(3)()
	for _, holes := range []bool{false, true} {
		t.Run(fmt.Sprintf("holes=%v", holes), func(t *testing.T) {
			t.Parallel()
			g := newTree(uint64(len(t.Name())), 6000, 70)
			x := kvindex.New()
			events := 0
			for range 1200 {
				events += g.step(t, x, holes)
				g.compare(t, x)
			}
			for w, name := range g.names {
				x.Apply(name, &vllm.Batch{Events: g.evict(w, len(g.nodes), false)})
			}
			if n := kvindex.Held(x); n != 0 {
				t.Errorf("%d blocks are held by nobody", n)
			}
			t.Logf("%d block events", events)
		})
	}
}

// TestDepthsBesideWriters asks while writers change the index. Each worker grows and
// shrinks one conversation between two lengths, all the while other blocks come and go in
// the same memory: an answer must lie between the lengths, whatever it meets.
func TestDepthsBesideWriters(t *testing.T) {
	g := newTree(3, 3000, 8)
	long := 0 // the node at the end of the longest path
	for i := range g.nodes {
		if len(g.path(i)) > len(g.path(long)) {
			long = i
		}
	}
	path := g.path(long)
	least := len(path) / 3
	x := kvindex.New()
	for w := range g.names {
		x.Apply(g.names[w], &vllm.Batch{Events: g.store(w, path[least-1])})
	}
	var writers, readers sync.WaitGroup
	var stop atomic.Bool
	for w, name := range g.names {
		r := rand.New(rand.NewPCG(uint64(w), 9))
		own := &tree{r: r, nodes: g.nodes, names: g.names, held: g.held} // a random source of its own
		writers.Go(func() {
			for range 100 {
				x.Apply(name, &vllm.Batch{Events: own.store(w, path[least+r.IntN(len(path)-least)])})
				x.Apply(name, &vllm.Batch{Events: own.store(w, r.IntN(len(g.nodes)))})
				e := vllm.NewEvent(vllm.BlockRemoved)
				for i := len(g.nodes) - 1; i >= 0; i-- { // children have higher numbers
					if own.held[w][i] && !slices.Contains(path[:least], i) {
						delete(own.held[w], i)
						e.Hashes = append(e.Hashes, engineHash(w, i))
					}
				}
				x.Apply(name, &vllm.Batch{Events: []vllm.Event{e}})
			}
		})
	}
	hashes := g.hashes(path)
	asked := new(atomic.Int64)
	for range 2 {
		readers.Go(func() {
			for !stop.Load() {
				got := depths(x, hashes)
				asked.Add(1)
				for _, name := range g.names {
					if got[name] < least || got[name] > len(path) {
						t.Errorf("%s holds %d of %d, at least %d at all times", name, got[name], len(path), least)
						return
					}
				}
			}
		})
	}
	writers.Wait()
	stop.Store(true)
	readers.Wait()
	t.Logf("%d answers", asked.Load())
}

// TestTop compares the list of prefixes with one made from the model.
func TestTop(t *testing.T) {
	g := newTree(4, 2000, 20)
	x := kvindex.New()
	for range 200 {
		g.step(t, x, false)
	}
	x.Sweep()
	holders := func(i int) (n int) {
		for w := range g.held {
			if g.held[w][i] {
				n++
			}
		}
		return n
	}
	want := map[kvhash.Hash]kvindex.Prefix{}
	for i := range g.nodes {
		if holders(i) == 0 {
			continue
		}
		root := g.path(i)[0]
		p := want[g.nodes[root].hash]
		p.Below++
		want[g.nodes[root].hash] = p
	}
	for i, n := range g.nodes {
		p, ok := want[n.hash]
		if !ok {
			continue
		}
		p.First, p.Holders, p.Blocks = n.hash, holders(i), 1
		at := i
		for {
			var next []int
			for _, c := range g.nodes[at].children {
				if holders(c) > 0 {
					next = append(next, c)
				}
			}
			if len(next) != 1 {
				break
			}
			at = next[0]
			p.Blocks++
		}
		p.Last, p.Whole = g.nodes[at].hash, holders(at)
		want[n.hash] = p
	}
	got := x.Top(len(g.nodes))
	for i, p := range got {
		if i > 0 && p.Below > got[i-1].Below {
			t.Errorf("prefix %d has more blocks below than the one before", i)
		}
		if diff := gocmp.Diff(p, want[p.First]); diff != "" {
			t.Errorf("prefix %d (-got +want):\n%s", i, diff)
		}
	}
	if len(got) != len(want) || len(x.Top(3)) != 3 {
		t.Errorf("%d prefixes, want %d", len(got), len(want))
	}
}

// TestStoreWhileSwept stores a long sequence again while what a cleared worker held of it is
// swept out: some blocks have gone then, and others that follow them have not.
func TestStoreWhileSwept(t *testing.T) {
	const n = 20_000 // several steps of the sweep
	x := kvindex.New()
	var tokens []uint32
	for i := range uint32(n) {
		tokens = append(tokens, i)
	}
	own := hashes("", "", 1, tokens...)
	e := stored(1, nil, 1, tokens...)
	held := 0
	check := func(what string) {
		t.Helper()
		for _, each := range []bool{false, true} {
			match := x.Match
			if each {
				match = x.MatchEach
			}
			got := 0
			for _, o := range match(nil, 1, own) {
				if o.Worker == "b" {
					got = o.GPUBlocks
				}
			}
			if got != held {
				t.Fatalf("%s: depth %d, want %d (each %v)", what, got, held, each)
			}
		}
		if i := x.Info(); i.Holed != 0 {
			t.Fatalf("%s: %d workers have holes", what, i.Holed)
		}
	}
	for round := range 6 {
		x.Apply("a", &vllm.Batch{Events: []vllm.Event{e}})
		x.Clear("a")
		for range round {
			x.Configure("c", kvindex.Options{}) // sweeps a part
		}
		x.Apply("b", &vllm.Batch{Events: []vllm.Event{e}})
		held = n
		check("stored")
		for held > 0 { // tail first
			r := x.Apply("b", &vllm.Batch{Events: []vllm.Event{removed(e.Hashes[held-2000 : held]...)}})
			if held -= 2000; r.Removed != 2000 {
				t.Fatalf("%d blocks removed of 2000", r.Removed)
			}
			check("removed")
		}
		x.Sweep()
		if i := x.Info(); i.Blocks != 0 {
			t.Fatalf("round %d: %d blocks of nobody are left", round, i.Blocks)
		}
	}
}

// TestColumnIsGivenOn clears one worker after another, so that the column of the first is given
// to a new one while that of the second is still swept out.
func TestColumnIsGivenOn(t *testing.T) {
	const n = 20_000
	var tokens []uint32
	for i := range uint32(n) {
		tokens = append(tokens, i)
	}
	own := hashes("", "", 1, tokens...)
	e := stored(1, nil, 1, tokens...)
	for steps := range 16 {
		x := kvindex.New()
		some := func(n int) {
			for range n {
				x.Configure("other", kvindex.Options{}) // sweeps a part
			}
		}
		for _, w := range []string{"a", "b"} {
			x.Apply(w, &vllm.Batch{Events: []vllm.Event{e}})
		}
		x.Clear("a")
		some(3)
		x.Clear("b")
		some(steps)
		x.Apply("c", &vllm.Batch{Events: []vllm.Event{e}})
		some(16)
		got := x.Match(nil, 1, own)
		if diff := gocmp.Diff(got, []kvindex.Overlap{{Worker: "c", GPUBlocks: n, CPUBlocks: n}}); diff != "" || x.Info().Holed != 0 {
			t.Errorf("after %d steps, %d workers with holes (-got +want):\n%s", steps, x.Info().Holed, diff)
		}
	}
}
