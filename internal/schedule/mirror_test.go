package schedule

import (
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/kinference/kinference/internal/kvhash"
)

// plainCache is a cache as an engine has it: free blocks by last use, and users.
type plainCache struct {
	free []kvhash.Hash // the next to be evicted first
	used map[kvhash.Hash]int
	size int
}

func (c *plainCache) begin(p []kvhash.Hash) {
	for _, h := range p {
		if i := slices.Index(c.free, h); i >= 0 {
			c.free = slices.Delete(c.free, i, i+1)
		}
		c.used[h]++
	}
	c.shrink()
}

func (c *plainCache) end(p []kvhash.Hash) {
	for _, h := range slices.Backward(p) {
		if c.used[h]--; c.used[h] == 0 {
			delete(c.used, h)
			c.free = append(c.free, h)
		}
	}
}

func (c *plainCache) shrink() {
	if over := len(c.free) + len(c.used) - c.size; over > 0 {
		c.free = slices.Delete(c.free, 0, min(over, len(c.free)))
	}
}

// The mirror keeps runs instead of blocks and evicts the same ones in the same
// order as a list of blocks does.
func TestMirrorIsAnLRU(t *testing.T) {
	names := []string{"aaaaaaaabb", "aaaaaaaacc", "aaaadd", "eeeeeeeeee", "eefffff", "g"}
	for seed := range uint64(40) {
		rng := rand.New(rand.NewPCG(seed, 2))
		plain := &plainCache{used: map[kvhash.Hash]int{}, size: 40}
		w := &worker{}
		w.pages.total, w.pages.size = 40, 100
		s := newScheduler(t, Settings{})
		s.workers["w"] = w
		var running []*entry
		for step := range 200 {
			if rng.IntN(2) == 0 && len(running) < 3 {
				name := names[rng.IntN(len(names))]
				e := &entry{w: w, prompt: blocks{chain(name, len(name)), 1}, tokens: 100 * len(name), first: 1}
				w.hold(float64(step), e)
				w.running = append(w.running, e)
				running = append(running, e)
				w.mirror.shrink(40 - w.pages.act)
				plain.begin(e.prompt.hashes)
			} else if len(running) > 0 {
				e := running[0]
				running = running[1:]
				w.free(float64(step), s, e)
				w.running = drop(w.running, e)
				plain.end(e.prompt.hashes)
			}
			var got []kvhash.Hash
			for _, r := range w.mirror.runs {
				for i := r.hi - 1; i >= r.lo; i-- {
					got = append(got, r.hashes[i])
				}
			}
			if !slices.Equal(got, plain.free) || w.pages.act != len(plain.used) {
				t.Fatalf("seed %d, step %d: %d blocks in the mirror and %d in use, want %d and %d", seed, step, len(got), w.pages.act, len(plain.free), len(plain.used))
			}
			// What would be evicted is what comes first, less what is the request's own.
			own := blocks{chain("aaaaaaaabb", 10), 1}
			n := rng.IntN(12)
			var evicted []kvhash.Hash
			w.mirror.evicted(own, n, func(r *run, lo, hi int) {
				for i := hi - 1; i >= lo; i-- {
					evicted = append(evicted, r.hashes[i])
				}
			})
			var want []kvhash.Hash
			for _, h := range plain.free {
				if len(want) < n && !slices.Contains(own.hashes, h) {
					want = append(want, h)
				}
			}
			if !slices.Equal(evicted, want) {
				t.Fatalf("seed %d, step %d: %d would be evicted, want %d", seed, step, len(evicted), len(want))
			}
		}
	}
}

func TestMirrorIsCorrectedByTheIndex(t *testing.T) {
	var m mirror
	m.add(blocks{chain("abcdefgh", 8), 1}, 0, 8, 1, 0, comeback{})
	m.trim(blocks{chain("abcxyz", 6), 1}, 2) // the third block, which both have, is gone, and so is what follows
	if m.cached != 2 || m.runs[0].hi != 2 {
		t.Errorf("got %d cached: %+v", m.cached, m.runs)
	}
	m.trim(blocks{chain("abcxyz", 6), 1}, 5) // the index knows more: nothing to say
	if m.cached != 2 {
		t.Errorf("got %d cached", m.cached)
	}
}

func TestMirrorIsBounded(t *testing.T) {
	var m mirror
	for i := range 3 * maxRuns {
		m.add(blocks{[]kvhash.Hash{kvhash.Hash(i)}, 1}, 0, 1, 1, 0, comeback{})
	}
	if len(m.runs) > maxRuns || m.cached != len(m.runs) {
		t.Errorf("%d runs of %d blocks", len(m.runs), m.cached)
	}
}

// Rates of use rise towards the beginning of a chain, and fall with time.
func TestUses(t *testing.T) {
	got := uses([]use{{4, 3}, {10, 1}, {8, 2}, {9, .5}, {0, 9}, {8, 1}})
	if want := []use{{10, 1}, {8, 2}, {4, 3}}; !slices.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
	if r := fade(2, 10, 10+useTau); r < 0.73 || r > 0.74 {
		t.Errorf("after one time constant: %v", r)
	}
	if r := fade(2, 10, 9); r != 2 {
		t.Errorf("before its time: %v", r)
	}
}

// A prefix that all share is worth more than what only one had.
func TestWhatIsUsedOftenIsNotPushedOut(t *testing.T) {
	s := newScheduler(t, Settings{})
	now := start
	put := func(worker, name string) {
		c := candidates(worker, 2000, 100, chain(name, 20))
		c[0].TotalBlocks = 22
		s.Decide(now, Request{ID: "x"}, c)
		s.FirstToken(now, "x", 2*second)
		s.Done(now, "x", Outcome{OK: true, CachedTokens: -1})
		now = now.Add(second)
	}
	for range 10 {
		put("a", "often")
	}
	for i := range 10 {
		put("b", string(rune('k'+i)))
	}
	c := candidates("a b", 2000, 100, chain("new", 20))
	c[0].TotalBlocks, c[1].TotalBlocks = 22, 22
	d := s.Decide(now.Add(second), Request{}, c)
	if a, b := d.Estimates[0].EvictionLoss, d.Estimates[1].EvictionLoss; a <= b || b <= 0 {
		t.Errorf("loss %v where a hot prefix is, %v where none is", a, b)
	}
	expect(t, "choice", first(d), "b")
}

// blocksNaive is common by its definition, for chains of any stride.
func blocksNaive(a, b []kvhash.Hash) int {
	n := 0
	for n < min(len(a), len(b)) && a[n] == b[n] {
		n++
	}
	return n
}

func TestCommonOfThinnedChains(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 1))
	for range 5000 {
		shared := rng.IntN(40)
		build := func(tail string) []kvhash.Hash {
			h := chain("s", shared)
			last := kvhash.Root("", "")
			if shared > 0 {
				last = h[shared-1]
			}
			for range rng.IntN(40) {
				last = kvhash.Extra(last, tail)
				h = append(h, last)
			}
			return h
		}
		a, b := build("a"), build("b")
		want := blocksNaive(a, b)
		for _, most := range []int{1000, 16, 7, 3} {
			for _, most2 := range []int{1000, 16, 5} {
				x, y := thin(a, most), thin(b, most2)
				step := max(x.stride, y.stride)
				if got := common(x, y, 0); got != want/step*step || got != common(y, x, 0) {
					t.Fatalf("%d and %d blocks, %d in common: got %d with strides %d and %d", len(a), len(b), want, got, x.stride, y.stride)
				}
				if len(x.hashes) > most {
					t.Fatalf("%d hashes are left, at most %d are wanted", len(x.hashes), most)
				}
			}
		}
		if k := rng.IntN(50); common(blocks{a, 1}, blocks{b, 1}, k) != max(k, want) {
			t.Fatalf("known %d, common %d", k, want)
		}
	}
}

func TestOutputLengths(t *testing.T) {
	o := newOutputs()
	long, short := outputKey{"writer", "m"}, outputKey{"tagger", "m"}
	if v := o.expect(long, 0); v != firstOutput {
		t.Errorf("nothing known: %v", v)
	}
	for range 200 {
		o.add(long, 1000)
		o.add(short, 10)
	}
	for _, x := range []struct {
		key    outputKey
		max    int
		lo, hi float64
	}{{long, 0, 990, 1000}, {short, 0, 10, 15}, {long, 100, 100, 100}, {outputKey{"new", "m"}, 0, 300, 800}, {outputKey{"new", "other"}, 0, 300, 800}} {
		if v := o.expect(x.key, x.max); v < x.lo || v > x.hi {
			t.Errorf("%v: %v, want %v to %v", x.key, v, x.lo, x.hi)
		}
	}
	for i := range 2 * maxOutputs {
		o.add(outputKey{string(rune(i + 1)), "m"}, 1)
	}
	if len(o.keys) > maxOutputs {
		t.Errorf("%d means are kept", len(o.keys))
	}
}
