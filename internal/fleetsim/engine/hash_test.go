package engine_test

import (
	"testing"

	"github.com/kinference/kinference/internal/fleetsim/engine"
	"github.com/kinference/kinference/internal/vllm"
)

// With vLLM's own hash the events carry vLLM's own numbers.
func TestRealHasher(t *testing.T) {
	p := tiny(8)
	p.BlockSize = 16
	for _, c := range []struct {
		algorithm vllm.HashAlgorithm
		seed      string
		want      [2]uint64
	}{
		{vllm.SHA256, vllm.DefaultSeed, [2]uint64{3262291359910021016, 7142137847444424233}},
		{vllm.SHA256, "42", [2]uint64{12181739546299357825, 7267745021275738674}},
		{vllm.SHA256CBOR, "0", [2]uint64{12687895063098490012, 1814341696565857452}},
	} {
		e := engine.New(engine.Config{Profile: p, OnEvents: true, Hash: func(uint64) engine.Hasher { return engine.RealHasher(c.algorithm, c.seed) }})
		submit(t, e, 0, &engine.Request{ID: "a", Tokens: sequence(0, 32), MaxTokens: 1})
		_, steps := run(e, 0)
		var got []uint64
		for _, ev := range events(steps, vllm.BlockStored) {
			got = append(got, ev.Hashes...)
		}
		if len(got) != 2 || got[0] != c.want[0] || got[1] != c.want[1] {
			t.Errorf("%s seed %s: %d, want %d", c.algorithm, c.seed, got, c.want)
		}
	}
}

func TestRandomHasher(t *testing.T) {
	key := func(s string) []vllm.ExtraKey { return []vllm.ExtraKey{{Text: s}} }
	seen := map[uint64]string{}
	add := func(what string, d engine.Digest) {
		if other, ok := seen[d.Wire()]; ok {
			t.Errorf("%s and %s collide", what, other)
		}
		seen[d.Wire()] = what
	}
	a, b := engine.RandomHasher(1), engine.RandomHasher(2)
	add("root of a", a.Root())
	add("root of b", b.Root())
	add("block", a.Next(a.Root(), sequence(0, 7), nil))
	add("block of b", b.Next(b.Root(), sequence(0, 7), nil))
	add("longer", a.Next(a.Root(), sequence(0, 8), nil))
	add("swapped", a.Next(a.Root(), []uint32{1, 0, 2, 3, 4, 5, 6}, nil))
	add("key", a.Next(a.Root(), sequence(0, 7), key("x")))
	add("other key", a.Next(a.Root(), sequence(0, 7), key("y")))
	add("two keys", a.Next(a.Root(), sequence(0, 7), append(key("x"), key("x")...)))
	add("child", a.Next(a.Next(a.Root(), sequence(0, 7), nil), sequence(0, 7), nil))
}
