package kvhash_test

import (
	"math/bits"
	"math/rand/v2"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kinference/kinference/internal/kvhash"
)

func tokens(n int, seed uint64) []uint32 {
	r := rand.New(rand.NewPCG(seed, 1))
	out := make([]uint32, n)
	for i := range out {
		out[i] = r.Uint32N(150_000)
	}
	return out
}

func TestAppendIsAPrefixProperty(t *testing.T) {
	toks := tokens(1000, 1)
	root := kvhash.Root("", "")
	for _, bs := range []int{1, 3, 4, 16, 784, 1000, 1001} {
		all := kvhash.Append(nil, root, toks, bs)
		if got, want := len(all), len(toks)/bs; got != want {
			t.Errorf("block size %d: got %d hashes, want %d", bs, got, want)
		}
		half := kvhash.Append(nil, root, toks[:500], bs)
		if diff := cmp.Diff(append([]kvhash.Hash{}, half...), append([]kvhash.Hash{}, all[:len(half)]...)); diff != "" {
			t.Errorf("block size %d: prefix differs (-got +want):\n%s", bs, diff)
		}
	}
	if got := kvhash.Append(nil, root, toks, 0); got != nil {
		t.Errorf("unknown block size: got %d hashes, want none", len(got))
	}
}

func TestEveryInputTakesPart(t *testing.T) {
	base := []uint32{1, 2, 3, 4, 5, 6, 7}
	seen := map[kvhash.Hash]string{}
	add := func(name string, h kvhash.Hash) {
		t.Helper()
		if other, ok := seen[h]; ok {
			t.Errorf("%s and %s have the same hash", name, other)
		}
		seen[h] = name
	}
	root := kvhash.Root("", "")
	add("base", kvhash.Next(root, base))
	for i := range base {
		changed := append([]uint32{}, base...)
		changed[i] = 0
		add("zeroed "+string(rune('0'+i)), kvhash.Next(root, changed))
	}
	add("shorter", kvhash.Next(root, base[:6]))
	add("swapped", kvhash.Next(root, []uint32{3, 4, 1, 2, 5, 6, 7}))
	add("twice", kvhash.Next(kvhash.Next(root, base), base))
	add("lora x", kvhash.Next(kvhash.Root("x", ""), base))
	add("salt x", kvhash.Next(kvhash.Root("", "x"), base))
	add("lora x salt x", kvhash.Next(kvhash.Root("x", "x"), base))
	add("lora xx", kvhash.Next(kvhash.Root("xx", ""), base))
	add("image", kvhash.Next(kvhash.Extra(root, "img"), base))
	add("zeros 16", kvhash.Next(root, make([]uint32, 16)))
	add("zeros 32", kvhash.Next(root, make([]uint32, 32)))
}

// One changed input bit must change about half of the output bits, wherever
// it stands: otherwise structured token ids would collide.
func TestAvalanche(t *testing.T) {
	for _, n := range []int{1, 4, 16, 784} {
		toks := tokens(n, uint64(n))
		h := kvhash.Next(kvhash.Root("", ""), toks)
		flipped, trials := 0, 0
		for i := range toks {
			for bit := range 18 {
				toks[i] ^= 1 << bit
				flipped += bits.OnesCount64(uint64(h ^ kvhash.Next(kvhash.Root("", ""), toks)))
				toks[i] ^= 1 << bit
				trials++
			}
		}
		if mean := float64(flipped) / float64(trials); mean < 30 || mean > 34 {
			t.Errorf("%d tokens: %.1f output bits change on average, want about 32", n, mean)
		}
	}
}

func BenchmarkAppend(b *testing.B) {
	toks := tokens(128<<10, 1)
	dst := make([]kvhash.Hash, 0, len(toks)/16)
	b.SetBytes(int64(len(toks) * 4))
	b.ReportAllocs()
	for b.Loop() {
		dst = kvhash.Append(dst[:0], kvhash.Root("", ""), toks, 16)
	}
}
