package vllm_test

import (
	"bytes"
	"slices"
	"strconv"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/kinference/kinference/internal/kvhash"
	"github.com/kinference/kinference/internal/kvindex"
	"github.com/kinference/kinference/internal/vllm"
)

// seed is what the engine's hashes start from; false if it made it up.
func (c *capture) seed() (string, bool) {
	if s, ok := c.head.Env["PYTHONHASHSEED"]; ok {
		return s, true
	}
	// 0.29 and later; there is no generation of that name.
	return vllm.DefaultSeed, c.version.AtLeast(vllm.V0_31)
}

func (c *capture) algorithm() vllm.HashAlgorithm {
	if i := slices.Index(c.head.Flags, "--prefix-caching-hash-algo"); i >= 0 {
		return vllm.HashAlgorithm(c.head.Flags[i+1])
	}
	return vllm.SHA256
}

// blind tells that the events do not say what l was asked for: the adapter's
// name is missing before 0.14, where it has a number, and the salt before 0.17.
func (c *capture) blind(l *line) bool {
	return l.LoRA != "" && !c.version.AtLeast(vllm.V0_14) || l.Salt != "" && !c.version.AtLeast(vllm.V0_19)
}

// keys are the extra keys of a block of the sequence that l asked for.
func (c *capture) keys(l *line, first bool) (keys []vllm.ExtraKey) {
	if l.LoRA != "" {
		keys = append(keys, vllm.ExtraKey{Text: l.LoRA})
	}
	if l.Salt != "" && first {
		keys = append(keys, vllm.ExtraKey{Text: l.Salt})
	}
	return keys
}

// followed is what events told of a block.
type followed struct {
	prefix []uint32 // tokens up to its end
	digest vllm.Digest
}

// follower checks the events of one capture against what was asked.
type follower struct {
	c        *capture
	asked    *line
	adapters map[string]string
	blocks   map[uint64]followed
	first    bool // no event yet since it was asked
	hashes   int  // that were computed anew
}

// stored checks a stored event of the main group: its tokens are a part of what
// was asked and answered, right after its parent; its hashes are what the
// engine's algorithm gives for them.
func (f *follower) stored(t *testing.T, e *vllm.Event, payload []byte) {
	t.Helper()
	size := f.c.head.BlockSize
	if e.BlockSize != size || len(e.Tokens) != size*len(e.Hashes) {
		t.Fatalf("%d blocks of %d with %d tokens", len(e.Hashes), e.BlockSize, len(e.Tokens))
	}
	seed, known := f.c.seed()
	algorithm := f.c.algorithm()
	at := followed{digest: algorithm.NoneHash(seed)}
	if e.HasParent {
		var ok bool
		if at, ok = f.blocks[e.Parent]; !ok {
			t.Fatalf("parent %d was never stored", e.Parent)
		}
	}
	sequence := append(slices.Clone(f.asked.Prompt), f.asked.Output...)
	start := len(at.prefix)
	if end := start + len(e.Tokens); end > len(sequence) || !slices.Equal(e.Tokens, sequence[start:end]) {
		t.Errorf("%s: tokens %d to %d are not what was asked and answered", f.asked.Step, start, end)
	}
	if !slices.Equal(at.prefix, sequence[:start]) {
		t.Errorf("%s: the parent is of another sequence", f.asked.Step)
	}
	if f.first && start != f.asked.cached() {
		t.Errorf("%s: %d tokens were cached, the first block that is stored starts at %d", f.asked.Step, f.asked.cached(), start)
	}
	f.first = false
	if f.c.version.AtLeast(vllm.V0_14) && e.LoRAName != f.asked.LoRA {
		t.Errorf("%s: adapter %q, want %q", f.asked.Step, e.LoRAName, f.asked.LoRA)
	}
	if (e.LoRAID > 0) != (f.asked.LoRA != "") {
		t.Errorf("%s: number of the adapter is %d", f.asked.Step, e.LoRAID)
	}
	for i, hash := range e.Hashes {
		tokens := e.Tokens[i*size : (i+1)*size]
		keys := f.c.keys(f.asked, start+i*size == 0)
		if f.c.version.AtLeast(vllm.V0_19) {
			if diff := cmp.Diff(e.ExtraKeys[i], keys, cmpopts.EquateEmpty()); diff != "" {
				t.Errorf("%s: extra keys of block %d: event (-) want (+):\n%s", f.asked.Step, i, diff)
			}
		}
		if f.c.version.AtLeast(vllm.V0_31) {
			keys = vllm.Tagged(keys, f.asked.LoRA, f.adapters[f.asked.LoRA])
		}
		at.digest = algorithm.Block(at.digest, tokens, keys)
		at.prefix = append(slices.Clone(at.prefix), tokens...)
		if known && !f.c.blind(f.asked) {
			f.hashes++
			if at.digest.Wire() != hash {
				t.Errorf("%s: block %d has the hash %d, we compute %d", f.asked.Step, i, hash, at.digest.Wire())
			}
			if _, digests := f.c.head.Env["VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES"]; digests && !bytes.Contains(payload, at.digest[:]) {
				t.Errorf("%s: digest %x is not in the event", f.asked.Step, at.digest)
			}
		}
		f.blocks[hash] = at
	}
}

// Events mean what was asked, and the index that is fed with them knows what
// the engine has cached: before each question it predicts the engine's own
// count of cached tokens.
func TestCapturedBlocks(t *testing.T) {
	eachCapture(t, "*.jsonl", func(t *testing.T, c *capture) {
		index := kvindex.New()
		f := &follower{c: c, blocks: map[uint64]followed{}}
		main, removals, cleared, upper, reset := -1, 0, 0, 0, false
		worker := func(rank int) string { return "rank " + strconv.Itoa(rank) }
		matched := func(l *line) int {
			size := c.head.BlockSize
			hashes := kvhash.Append(nil, kvhash.Root(l.LoRA, l.Salt), l.Prompt, size)
			rank, _ := strconv.Atoi(l.Headers["X-data-parallel-rank"])
			for _, o := range index.Match(nil, size, hashes) {
				if o.Worker == worker(rank) {
					return o.GPUBlocks * size
				}
			}
			return 0
		}
		finish := func() {
			if f.asked == nil {
				return
			}
			// What events do not tell the index cannot know: it finds nothing.
			blocks := len(f.asked.Prompt) / c.head.BlockSize
			if c.blind(f.asked) {
				blocks = 0
			}
			if got, want := matched(f.asked), blocks*c.head.BlockSize; got != want {
				t.Errorf("after %s the index has %d of %d tokens", f.asked.Step, got, want)
			}
			f.asked = nil
		}
		for i := range c.lines {
			l := &c.lines[i]
			switch {
			case l.Adapters != nil:
				f.adapters = l.Adapters
			case l.Step != "":
				finish()
				f.asked, f.first = l, true
				if l.Usage.Prompt != len(l.Prompt) || l.Usage.Output != len(l.Output) {
					t.Errorf("%s: %d and %d tokens, counted as %d and %d", l.Step, len(l.Prompt), len(l.Output), l.Usage.Prompt, l.Usage.Output)
				}
				// The last token is always computed.
				size := c.head.BlockSize
				got := min(matched(l), (len(l.Prompt)-1)/size*size)
				if c.name == "hybrid" && got > l.cached() {
					got = l.cached() // the other groups must have the prefix too
					upper++
				}
				if got != l.cached() && !c.blind(l) {
					t.Errorf("%s: the index predicts %d cached tokens, the engine had %d", l.Step, got, l.cached())
				}
			case l.Reset != 0:
				finish()
				// Whoever resets an idle engine must know: it tells nobody until the
				// next request runs.
				if l.Reset != 200 || l.BatchesWhileIdle != 0 {
					t.Errorf("reset is answered %d, %d batches follow", l.Reset, l.BatchesWhileIdle)
				}
				index.Clear(worker(0))
				reset = true
			case l.Live != nil:
				_, _, payload, err := vllm.ParseEvent(l.Live)
				if err != nil {
					t.Fatal(err)
				}
				b := decode(t, payload)
				if reset && b.Events[0].Kind != vllm.AllBlocksCleared {
					t.Errorf("the first event after the reset is %v", b.Events[0].Kind)
				}
				reset = false
				for i := range b.Events {
					switch e := &b.Events[i]; {
					case e.Kind == vllm.BlockRemoved:
						removals++
					case e.Kind == vllm.AllBlocksCleared:
						cleared++
					case e.IsMainAttention() && (main < 0 || e.Group == main):
						main = e.Group
						f.stored(t, e, payload)
					case e.IsMainAttention():
						t.Errorf("two groups of main attention: %d and %d", main, e.Group)
					}
				}
				index.Apply(worker(b.Rank), b)
			}
		}
		finish()
		// Newer engines keep the windows only at the ends of prompts.
		if c.name == "hybrid" && c.version.AtLeast(vllm.V0_32) && upper == 0 {
			t.Error("no prefix was missing in the group of windows only")
		}
		if c.name == "chat" && (removals == 0 || cleared != 1) {
			t.Errorf("%d removals, %d times cleared", removals, cleared)
		}
		if _, known := c.seed(); known && len(f.blocks) > 0 && f.hashes == 0 {
			t.Error("no hash was computed")
		}
	})
}
