package kvindex_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"

	"github.com/kinference/kinference/internal/fleetsim/engine"
	"github.com/kinference/kinference/internal/kvhash"
	"github.com/kinference/kinference/internal/kvindex"
	"github.com/kinference/kinference/internal/vllm"
)

// small is a profile with so few blocks that it evicts and preempts all the time.
func small(blockSize, blocks int, groups []engine.Group) engine.Profile {
	p := engine.L40SPlain16
	p.BlockSize, p.Blocks, p.StateBlocks, p.Groups = blockSize, blocks, 0, groups
	p.MaxBatchedTokens, p.MaxSeqs, p.MaxModelLen = 512, 12, blockSize*40
	return p
}

// traffic makes prompts that share prefixes, adapters and salts.
type traffic struct {
	r       *rand.Rand
	history [][]uint32
	n       int
}

func (g *traffic) request(p engine.Profile) *engine.Request {
	g.n++
	limit := p.MaxModelLen - p.BlockSize*6
	var tokens []uint32
	if len(g.history) > 0 && g.r.IntN(4) > 0 { // go on with an old prompt, or part of it
		old := g.history[g.r.IntN(len(g.history))]
		tokens = append(tokens, old[:g.r.IntN(len(old))+1]...)
		if g.r.IntN(3) == 0 { // the same again, to the block
			tokens = append([]uint32{}, old[:len(old)/p.BlockSize*p.BlockSize]...)
		}
	}
	for range 1 + g.r.IntN(p.BlockSize*12) {
		tokens = append(tokens, g.r.Uint32N(50_000))
	}
	if len(tokens) > limit {
		tokens = tokens[:limit]
	}
	if len(g.history) < 40 {
		g.history = append(g.history, tokens)
	} else {
		g.history[g.r.IntN(40)] = tokens
	}
	return &engine.Request{
		ID: fmt.Sprint(g.n), Tokens: tokens, MaxTokens: 1 + g.r.IntN(p.BlockSize*5),
		// No salt is named as an adapter: the engine takes them for the same
		// (vLLM issue 44701), the index does not.
		LoRA: []string{"", "", "x", "y"}[g.r.IntN(4)], Salt: []string{"", "", "s", "t"}[g.r.IntN(4)],
	}
}

// truth is what an engine's cache really holds, in the index's terms.
func truth(e *engine.Engine) map[kvhash.Hash]int {
	blocks := map[kvhash.Hash]int{}
	size := e.Profile().BlockSize
	for b := range e.Cached() {
		if b.Group == 0 {
			h := kvhash.Append(nil, kvhash.Root(b.LoRA, b.Salt), b.Tokens, size)
			blocks[h[len(h)-1]]++
		}
	}
	return blocks
}

func indexed(x kvindex.Index, worker string) map[kvhash.Hash]int {
	blocks := map[kvhash.Hash]int{}
	x.Blocks(worker, func(b kvindex.Block) bool { blocks[b.Hash] += b.Copies; return true })
	return blocks
}

// TestIndexEqualsTheFleet runs simulated engines, two ranks each, through
// evictions, preemptions, cache wipes and restarts, sends their events over the
// wire's encoding, and compares the index with the engines' true caches, block
// by block and copy by copy.
func TestIndexEqualsTheFleet(t *testing.T) {
	hybrid := []engine.Group{{Kind: "full_attention"}, {Kind: "mamba"}, {Kind: "sliding_window", SlidingWindow: 64}}
	type rank struct {
		name   string
		e      *engine.Engine
		g      *traffic
		wire   vllm.Version
		last   bool
		events int
		now    float64
	}
	var ranks []*rank
	for i, w := range []struct {
		name string
		p    engine.Profile
		wire vllm.Version
		last bool
	}{
		{"plain", small(16, 300, nil), vllm.V0_24, false},
		{"old", small(8, 200, nil), vllm.V0_19, false},
		{"hybrid", small(32, 150, hybrid), vllm.V0_26, false},
		{"lastcopy", small(16, 300, nil), vllm.V0_23, true},
	} {
		for r := range 2 {
			seed := int64(i*2 + r)
			ranks = append(ranks, &rank{
				name: fmt.Sprintf("%s/%d", w.name, r), wire: w.wire, last: w.last,
				e: engine.New(engine.Config{Profile: w.p, Seed: seed, OnEvents: true, LastCopyRemovals: w.last}),
				g: &traffic{r: rand.New(rand.NewPCG(uint64(seed), 5))},
			})
		}
	}
	x := kvindex.New()
	for _, r := range ranks {
		o := kvindex.Options{GPUBlocks: r.e.Profile().Blocks}
		if r.last {
			o.Removals = kvindex.LastCopy
		}
		x.Configure(r.name, o)
	}
	var d vllm.Decoder
	var b vllm.Batch
	total, checks, conflicts := 0, 0, 0
	var skipped [8]int
	check := func(r *rank) {
		t.Helper()
		checks++
		want, got := truth(r.e), indexed(x, r.name)
		if r.last { // such an engine does not say how many copies there are
			for h := range want {
				want[h] = 1
			}
		}
		if diff := gocmp.Diff(got, want); diff != "" {
			t.Fatalf("%s after %d events: index differs from the cache (-got +want):\n%s", r.name, r.events, diff)
		}
		// And the index says what the engine would find.
		q := r.g.request(r.e.Profile())
		size := r.e.Profile().BlockSize
		h := kvhash.Append(nil, kvhash.Root(q.LoRA, q.Salt), q.Tokens, size)
		overlap := 0
		for _, o := range x.Match(nil, size, h) {
			if o.Worker == r.name {
				overlap = o.GPUBlocks
			}
		}
		// The engine leaves at least one token to compute.
		if got, want := min(overlap, (len(q.Tokens)-1)/size)*size, r.e.Lookup(q.Tokens, q.LoRA, q.Salt); got != want {
			t.Fatalf("%s: %d tokens match, the engine finds %d", r.name, got, want)
		}
	}
	var restarts, wipes, evictions int
	for step := 0; total < 300_000; step++ {
		for _, r := range ranks {
			for r.e.InFlight() < 1+r.g.r.IntN(24) {
				if err := r.e.Submit(r.now, r.g.request(r.e.Profile())); err != nil {
					t.Fatal(err)
				}
			}
			switch r.g.r.IntN(1500) {
			case 0:
				restarts++
				evictions += int(r.e.Stats().Removed)
				r.e.Restart()
				x.Clear(r.name) // the relay notices a new process
			case 1, 2:
				r.e.PreemptAll()
				if r.e.ResetPrefixCache() {
					wipes++
				}
			}
			end, ok := r.e.Begin(r.now)
			if !ok {
				continue
			}
			r.now = end
			s := r.e.End()
			if len(s.Events) == 0 {
				continue
			}
			payload := vllm.AppendBatch(nil, &vllm.Batch{TS: r.now, Events: s.Events, Rank: 0}, r.wire)
			if err := d.Decode(payload, &b); err != nil || b.Skipped > 0 {
				t.Fatalf("decode: %v, %d skipped", err, b.Skipped)
			}
			res := x.Apply(r.name, &b)
			for i, n := range res.Skipped {
				skipped[i] += n
			}
			conflicts += res.Conflicts
			total += res.Events
			r.events += res.Events
			if step%32 == 0 {
				check(r)
			}
		}
	}
	for _, r := range ranks {
		for r.e.InFlight() > 0 { // let it finish, so that the last events are out
			end, ok := r.e.Begin(r.now)
			if !ok {
				break
			}
			r.now = end
			x.Apply(r.name, &vllm.Batch{Events: r.e.End().Events})
		}
		check(r)
	}
	skipped[kvindex.SkipGroup] = 0 // side groups of the hybrid
	t.Logf("%d events, %d comparisons, %d restarts, %d wipes, over %d removals, %d conflicts", total, checks, restarts, wipes, evictions, conflicts)
	if restarts < 5 || wipes < 5 || evictions < 10_000 {
		t.Error("the run was too tame to show anything")
	}
	if slices.Max(skipped[:]) > 0 {
		t.Errorf("skipped by reason: %v, want none", skipped)
	}
}
