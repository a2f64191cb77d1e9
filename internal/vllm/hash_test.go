package vllm_test

import (
	"encoding/hex"
	"testing"

	"github.com/kinference/kinference/internal/vllm"
)

// Computed with CPython 3.11 and cbor2 5.4.6: block size 16, tokens 0 to 15, then
// 16 to 31.
func TestBlockHash(t *testing.T) {
	tests := []struct {
		algorithm        vllm.HashAlgorithm
		seed             string
		none, block0     string
		block0W, block1W uint64
	}{
		{
			vllm.SHA256, "vllm-none-hash", "066b1e8987e027138e98701c46128929378935f9b6cd1549105ae6b4f0d71198",
			"fe8fa5dda3210d0ca2031e37cbe3b001186773cd1c710beb2d45fcb51d434798", 3262291359910021016, 7142137847444424233,
		},
		{
			vllm.SHA256, "0", "1973e23848344dc43a988a9b478663803cfffe1243480253f9a3cf004b14aa7c",
			"6358e31578a64b75ebe28cdb99d3beae65de82a2087321dc6ec84ae048faaaa6", 7982712666671721126, 12675106281628537544,
		},
		{
			vllm.SHA256, "42", "c0bc02c9fc92a4944335649961b9e55cc41b194bece4801e8c6ef0f0f3f5884a",
			"63921f8159563637aa932c18cfc4224074360df1a31b1c60a90e3b9363805a81", 12181739546299357825, 7267745021275738674,
		},
		{
			vllm.SHA256CBOR, "vllm-none-hash", "9bd96a485ad84efdafb72ee48a1d7a69bcead0f8f0433173941b276b9581eef0",
			"dc918a88b139e5afe60b88eda27508d4aee16c10fdc354791efea06206ac0749", 2233398808101521225, 17911472383915781900,
		},
		{
			vllm.SHA256CBOR, "0", "4e1195df020de59e0d65a33a4279f1183e7ae4e5d980e309f8b55adff2e61c3e",
			"d830de3d42c00f25a2949b5d12d98642664a44872c1614c5b0147556276afc9c", 12687895063098490012, 1814341696565857452,
		},
	}
	for _, tt := range tests {
		t.Run(string(tt.algorithm)+" "+tt.seed, func(t *testing.T) {
			none := tt.algorithm.NoneHash(tt.seed)
			if got := hex.EncodeToString(none[:]); got != tt.none {
				t.Errorf("NoneHash = %s, want %s", got, tt.none)
			}
			b0 := tt.algorithm.Block(none, numbers(0, 15), nil)
			if got := hex.EncodeToString(b0[:]); got != tt.block0 {
				t.Errorf("block 0 = %s, want %s", got, tt.block0)
			}
			b1 := tt.algorithm.Block(b0, numbers(16, 31), nil)
			if b0.Wire() != tt.block0W || b1.Wire() != tt.block1W {
				t.Errorf("on the wire %d, %d, want %d, %d", b0.Wire(), b1.Wire(), tt.block0W, tt.block1W)
			}
		})
	}
}

func TestBlockHashExtraKeys(t *testing.T) {
	tokens := []uint32{0, 23, 24, 255, 256, 65535, 65536, 151644}
	salt := []vllm.ExtraKey{{Text: "salt-a"}}
	all := []vllm.ExtraKey{{Text: "lora1"}, {Text: "mmhash", Offset: -3, HasOffset: true}, {Text: "salt-a"}}
	tests := []struct {
		algorithm vllm.HashAlgorithm
		keys      []vllm.ExtraKey
		want      string
	}{
		{vllm.SHA256CBOR, salt, "7f47c52508ea59f3005e25305dcd459a23faf307123cafff10c5563ee9e9d7b6"},
		{vllm.SHA256CBOR, all, "f69d5bbd0402cb181b3994f60c820786dc712150a2ce2aec7a40bd0e35397ea1"},
		{vllm.SHA256, salt, "b58b676504623d527c7984b7e604a20d48667b467b09ea4f622d45735599a943"},
		{vllm.SHA256, all, "471cd2866837f5db7b949086f7236e4cfe1ed8ecab73c9ea7d0240188b453cc6"},
	}
	for _, tt := range tests {
		d := tt.algorithm.Block(tt.algorithm.NoneHash("0"), tokens, tt.keys)
		if got := hex.EncodeToString(d[:]); got != tt.want {
			t.Errorf("%s with %d keys: %s, want %s", tt.algorithm, len(tt.keys), got, tt.want)
		}
	}
}

// Computed with CPython 3.11 and cbor2 from the tuples that vLLM 0.31 makes.
func TestBlockHashTagged(t *testing.T) {
	tokens := []uint32{0, 23, 24, 255, 256, 65535, 65536, 151644}
	salt := []vllm.ExtraKey{{Text: "salt-a"}}
	all := []vllm.ExtraKey{
		{Text: "lora1"}, {Text: "mmhash", Offset: -3, HasOffset: true}, {Text: "other", Offset: 7, HasOffset: true},
		{Text: "salt-a"}, {Bytes: []byte{1, 2, 3}},
	}
	tests := []struct {
		algorithm vllm.HashAlgorithm
		lora      string
		keys      []vllm.ExtraKey
		want      string
	}{
		{vllm.SHA256CBOR, "", salt, "0fd56b61d008d71a822c942777202a9df3e9562d28e5ed4efff874574a8d4e2f"},
		{vllm.SHA256CBOR, "lora1", all, "477504b645dcc691691db7600f4a12653b38a043f4c78706fe463c716d5df0fc"},
		{vllm.SHA256, "", salt, "378b14f121c44b98b318628a4a21502126ec567db9e0d893e776fb8485e9a689"},
		{vllm.SHA256, "lora1", all, "b04117513729aa8093b7d5c4b437820fa0e48110ce185d492038be7871d5f6c7"},
	}
	for _, tt := range tests {
		d := tt.algorithm.Block(tt.algorithm.NoneHash("0"), tokens, vllm.Tagged(tt.keys, tt.lora, "/models/lora1"))
		if got := hex.EncodeToString(d[:]); got != tt.want {
			t.Errorf("%s with %d keys: %s, want %s", tt.algorithm, len(tt.keys), got, tt.want)
		}
	}
}

func TestWireHash(t *testing.T) {
	if got := vllm.WireHash([]byte{9, 0, 0, 0, 0, 0, 0, 1, 2}); got != 258 {
		t.Errorf("last 8 bytes: %d, want 258", got)
	}
	if got := vllm.WireHash([]byte{1, 2}); got != 258 {
		t.Errorf("short digest: %d, want 258", got)
	}
}

func TestParseHashAlgorithm(t *testing.T) {
	if a, err := vllm.ParseHashAlgorithm(""); a != vllm.SHA256 || err != nil {
		t.Errorf("default: %q, %v", a, err)
	}
	if _, err := vllm.ParseHashAlgorithm("builtin"); err == nil {
		t.Error("builtin is accepted")
	}
}

func BenchmarkBlockHash(b *testing.B) {
	for _, a := range []vllm.HashAlgorithm{vllm.SHA256, vllm.SHA256CBOR} {
		b.Run(string(a), func(b *testing.B) {
			parent, tokens := a.NoneHash("0"), numbers(1000, 1015)
			b.ReportAllocs()
			for b.Loop() {
				parent = a.Block(parent, tokens, nil)
			}
		})
	}
}
