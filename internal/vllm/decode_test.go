package vllm_test

import (
	"encoding/hex"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"reflect"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/kinference/kinference/internal/vllm"
)

// Batches as msgspec encodes them, computed by its rules for vLLM's structs.
const (
	wireMap   = `93cb3ff8000000000000938aa474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657391cf6ec84ae048faaaa6b1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f69647394010203cd012caa626c6f636b5f73697a6504a76c6f72615f6964c0a66d656469756da3475055a96c6f72615f6e616d65c0a967726f75705f69647800b26b765f63616368655f737065635f6b696e64ae66756c6c5f617474656e74696f6e84a474797065ac426c6f636b52656d6f766564ac626c6f636b5f68617368657391cf6ec84ae048faaaa6a66d656469756da3475055a967726f75705f6964780081a474797065b0416c6c426c6f636b73436c656172656400`
	wireArray = `93cb3ff8000000000000939cab426c6f636b53746f72656491cf6ec84ae048faaaa6c094010203cd012c04c0a3475055c0c000ae66756c6c5f617474656e74696f6ec094ac426c6f636b52656d6f76656491cf6ec84ae048faaaa6a34750550091b0416c6c426c6f636b73436c656172656400`
	wireV010  = `93cb3ff80000000000009196ab426c6f636b53746f72656491cf6ec84ae048faaaa6c094010203cd012c04c000`
	wireBytes = `93cb3ff8000000000000918ba474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657391c4206358e31578a64b75ebe28cdb99d3beae65de82a2087321dc6ec84ae048faaaa6b1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f6964739101aa626c6f636b5f73697a6501a76c6f72615f696407a66d656469756da3475055a96c6f72615f6e616d65a373716caa65787472615f6b6579739193a373716c92a7696d6768617368fda673616c742d61a967726f75705f69647800b26b765f63616368655f737065635f6b696e64ae66756c6c5f617474656e74696f6e03`

	// Captured from llm-d's simulator.
	simStored  = `93cb41dac313977d58809199ab426c6f636b53746f72656491cf82f9bd88b2a0fa06cf0000000000000000dc0010ce00000001ce00000002ce00000003ce00000004ce00000005ce00000006ce00000007ce00000008ce00000009ce0000000ace0000000bce0000000cce0000000dce0000000ece0000000fce0000001010c0a3475055c0c000`
	simRemoved = `93cb41dac3133aef25609493ac426c6f636b52656d6f76656491cf7d36ab6977e1787fa347505593ac426c6f636b52656d6f76656491cf492a8222dc29d7bfa347505593ac426c6f636b52656d6f76656491cf2e4a08d83dc9a8fba347505593ac426c6f636b52656d6f76656491cf2a4c2228b3f0cd2ca347505500`
	simCleared = `93cb41dac31397fd5e699191b0416c6c426c6f636b73436c656172656400`
	simMapTail = `9181a474797065b0416c6c426c6f636b73436c656172656401`
	// The capture elides 14 of the 16 token ids; they are 1 to 16.
	simMapHead = `93cb41dac31397fdba459186a474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657391cf82f9bd88b2a0fa06b1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f696473dc0010`
	simMapEnd  = `aa626c6f636b5f73697a6510a66d656469756da347505501`
)

func unhex(t testing.TB, s string) []byte {
	t.Helper()
	b, err := hex.DecodeString(s)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func event(kind vllm.Kind, set func(*vllm.Event)) vllm.Event {
	e := vllm.NewEvent(kind)
	if set != nil {
		set(&e)
	}
	return e
}

// referenceBatch is the batch of the wire vectors.
func referenceBatch() vllm.Batch {
	return vllm.Batch{TS: 1.5, Rank: 0, Events: []vllm.Event{
		event(vllm.BlockStored, func(e *vllm.Event) {
			e.Hashes, e.Tokens, e.BlockSize = []uint64{7982712666671721126}, []uint32{1, 2, 3, 300}, 4
			e.Medium, e.Group, e.SpecKind = "GPU", 0, "full_attention"
		}),
		event(vllm.BlockRemoved, func(e *vllm.Event) {
			e.Hashes, e.Medium, e.Group = []uint64{7982712666671721126}, "GPU", 0
		}),
		event(vllm.AllBlocksCleared, nil),
	}}
}

func numbers(from, to uint32) []uint32 {
	var s []uint32
	for t := from; t <= to; t++ {
		s = append(s, t)
	}
	return s
}

func simTokens() string {
	var b strings.Builder
	for _, t := range numbers(1, 16) {
		fmt.Fprintf(&b, "ce%08x", t)
	}
	return b.String()
}

func TestDecode(t *testing.T) {
	stored := func(hash uint64, tokens []uint32, size int, set func(*vllm.Event)) vllm.Event {
		return event(vllm.BlockStored, func(e *vllm.Event) {
			e.Hashes, e.Tokens, e.BlockSize = []uint64{hash}, tokens, size
			if set != nil {
				set(e)
			}
		})
	}
	gpu := func(e *vllm.Event) { e.Medium = "GPU" }
	removed := func(hash uint64) vllm.Event {
		return event(vllm.BlockRemoved, func(e *vllm.Event) { e.Hashes, e.Medium = []uint64{hash}, "GPU" })
	}
	tests := []struct {
		name, hex string
		want      vllm.Batch
	}{
		{"maps of v0.24", wireMap, referenceBatch()},
		{"arrays of v0.23", wireArray, referenceBatch()},
		{"arrays of v0.10", wireV010, vllm.Batch{TS: 1.5, Events: []vllm.Event{
			stored(7982712666671721126, []uint32{1, 2, 3, 300}, 4, nil),
		}}},
		{"digest, LoRA and extra keys", wireBytes, vllm.Batch{TS: 1.5, Rank: 3, Events: []vllm.Event{
			stored(7982712666671721126, []uint32{1}, 1, func(e *vllm.Event) {
				e.LoRAID, e.LoRAName, e.Medium, e.Group, e.SpecKind = 7, "sql", "GPU", 0, "full_attention"
				e.ExtraKeys = [][]vllm.ExtraKey{{{Text: "sql"}, {Text: "imghash", Offset: -3, HasOffset: true}, {Text: "salt-a"}}}
			}),
		}}},
		{"simulator, stored", simStored, vllm.Batch{TS: math.Float64frombits(0x41dac313977d5880), Events: []vllm.Event{
			stored(9437782888941681158, numbers(1, 16), 16, gpu),
		}}},
		{"simulator, removed", simRemoved, vllm.Batch{TS: math.Float64frombits(0x41dac3133aef2560), Events: []vllm.Event{
			removed(0x7d36ab6977e1787f), removed(0x492a8222dc29d7bf), removed(0x2e4a08d83dc9a8fb), removed(0x2a4c2228b3f0cd2c),
		}}},
		{"simulator, cleared", simCleared, vllm.Batch{TS: math.Float64frombits(0x41dac31397fd5e69), Events: []vllm.Event{
			event(vllm.AllBlocksCleared, nil),
		}}},
		{"simulator, cleared as map", `93cb3ff8000000000000` + simMapTail, vllm.Batch{TS: 1.5, Rank: 1, Events: []vllm.Event{
			event(vllm.AllBlocksCleared, nil),
		}}},
		{"simulator, stored as map", simMapHead + simTokens() + simMapEnd, vllm.Batch{
			TS: math.Float64frombits(0x41dac31397fdba45), Rank: 1,
			Events: []vllm.Event{stored(9437782888941681158, numbers(1, 16), 16, gpu)},
		}},
		// llm-d's adapter test: parent, LoRA, per-block extra keys.
		{"llm-d with LoRA", `93cb41d26580b48000009199ab426c6f636b53746f72656492ccc8ccc9ccc793040506202aa3677075a9746573742d6c6f72619292a6757569642d41a473616c74c0c0`, vllm.Batch{
			TS: 1234567890, Rank: -1, Events: []vllm.Event{
				stored(200, []uint32{4, 5, 6}, 32, func(e *vllm.Event) {
					e.Hashes, e.Parent, e.HasParent = []uint64{200, 201}, 199, true
					e.LoRAID, e.LoRAName, e.Medium = 42, "test-lora", "gpu"
					e.ExtraKeys = [][]vllm.ExtraKey{{{Text: "uuid-A"}, {Text: "salt"}}, nil}
				}),
			},
		}},
		{"two elements, before June 2025", `92cb3ff80000000000009191b0416c6c426c6f636b73436c6561726564`, vllm.Batch{
			TS: 1.5, Rank: -1, Events: []vllm.Event{event(vllm.AllBlocksCleared, nil)},
		}},
		{"four elements", `94cb3ff80000000000009002c3`, vllm.Batch{TS: 1.5, Rank: 2}},
		{"batch as map, in another order", `84a66576656e74739181a474797065b0416c6c426c6f636b73436c6561726564a16e93010203a27473cb3ff8000000000000b2646174615f706172616c6c656c5f72616e6b05`, vllm.Batch{
			TS: 1.5, Rank: 5, Events: []vllm.Event{event(vllm.AllBlocksCleared, nil)},
		}},
		{"negative hash of v0.10", `93cb3ff80000000000009192ac426c6f636b52656d6f76656491d3fffffffffffffffe00`, vllm.Batch{
			TS: 1.5, Events: []vllm.Event{event(vllm.BlockRemoved, func(e *vllm.Event) { e.Hashes = []uint64{math.MaxUint64 - 1} })},
		}},
		{"unknown tag is skipped", `93cb3ff80000000000009292a354616793c0c2c391b0416c6c426c6f636b73436c656172656400`, vllm.Batch{
			TS: 1.5, Skipped: 1, Events: []vllm.Event{event(vllm.AllBlocksCleared, nil)},
		}},
		{"malformed field skips its event only", `93cb3ff80000000000009292ac426c6f636b52656d6f766564a3616263` + `91b0416c6c426c6f636b73436c656172656400`, vllm.Batch{
			TS: 1.5, Skipped: 1, Events: []vllm.Event{event(vllm.AllBlocksCleared, nil)},
		}},
		{"unreadable extra key skips its event", `93cb3ff80000000000009199ab426c6f636b53746f726564910190910101c0c0c0919105` + `00`, vllm.Batch{
			TS: 1.5, Skipped: 1,
		}},
		{"unknown map keys", `93cb3ff80000000000009183a474797065b0416c6c426c6f636b73436c6561726564a16181a162d40102a163c70105ff00`, vllm.Batch{
			TS: 1.5, Events: []vllm.Event{event(vllm.AllBlocksCleared, nil)},
		}},
	}
	var d vllm.Decoder
	var got vllm.Batch // reused, so that leftovers show
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if err := d.Decode(unhex(t, tt.hex), &got); err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(got, tt.want, cmpopts.EquateEmpty()); diff != "" {
				t.Errorf("got (-) want (+):\n%s", diff)
			}
		})
	}
}

func TestDecodeRejects(t *testing.T) {
	huge := append([]byte{0x93, 0xc0, 0xdd, 0, 2, 0, 0}, make([]byte, 1<<17)...)
	tests := []struct {
		name    string
		payload []byte
	}{
		{"empty", nil},
		{"text", []byte("hello")},
		{"JSON", []byte(`{"ts":1}`)},
		{"no events", unhex(t, `91cb3ff8000000000000`)},
		{"events is a map", unhex(t, `93cb3ff80000000000008000`)},
		{"rank is text", unhex(t, `93cb3ff800000000000090a130`)},
		{"truncated in an event", unhex(t, wireMap[:200])},
		{"array longer than its bytes", unhex(t, `93cb3ff8000000000000dd7fffffff`)},
		{"bytes after the end", unhex(t, simCleared+"00")},
		{"too many events", huge},
		{"too large", make([]byte, vllm.MaxPayload+1)},
		{"nested a million deep", []byte("\x94\x01\x90\xc0" + strings.Repeat("\x91", 1_000_000))},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var d vllm.Decoder
			var b vllm.Batch
			if err := d.Decode(tt.payload, &b); err == nil {
				t.Errorf("Decode = %+v, want an error", b)
			}
			if len(b.Events) != 0 {
				t.Errorf("%d events left", len(b.Events))
			}
		})
	}
}

// Every truncation of every vector fails cleanly.
func TestDecodeTruncated(t *testing.T) {
	var d vllm.Decoder
	var b vllm.Batch
	for _, h := range []string{wireMap, wireArray, wireV010, wireBytes, simStored, simRemoved} {
		whole := unhex(t, h)
		for n := range whole {
			if err := d.Decode(whole[:n], &b); err == nil {
				t.Fatalf("%s cut to %d bytes decodes", h, n)
			}
		}
	}
}

func TestAppendBatch(t *testing.T) {
	ref := referenceBatch()
	stored := ref
	stored.Events = ref.Events[:1]
	tests := []struct {
		name    string
		version vllm.Version
		batch   vllm.Batch
		want    string
	}{
		{"v0.26", vllm.V0_26, ref, wireMap},
		{"v0.24", vllm.V0_24, ref, wireMap},
		{"v0.23", vllm.V0_23, ref, wireArray},
		{"v0.10", vllm.V0_10, stored, wireV010},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got := hex.EncodeToString(vllm.AppendBatch(nil, &tt.batch, tt.version))
			if got != tt.want {
				t.Errorf("got  %s\nwant %s", got, tt.want)
			}
		})
	}
}

// structs.jsonl holds what the event classes of many releases encode to, by
// test/interop/vllm/structs.py: we write the same and read it in full.
func TestStructs(t *testing.T) {
	full := event(vllm.BlockStored, func(e *vllm.Event) {
		e.Hashes, e.Parent, e.HasParent = []uint64{7982712666671721126, 5}, 12675106281628537544, true
		e.Tokens, e.BlockSize = []uint32{1, 2, 3, 300, 5, 6, 7, 70000}, 4
		e.LoRAID, e.Medium, e.LoRAName = 7, "GPU", "sql"
		e.ExtraKeys = [][]vllm.ExtraKey{{{Text: "sql"}, {Text: "image", Offset: -3, HasOffset: true}, {Text: "salt"}}, {{Text: "sql"}}}
		e.Group, e.SpecKind, e.SlidingWindow, e.Locality = 1, "sliding_window", 1024, "LOCAL"
	})
	least := event(vllm.BlockStored, func(e *vllm.Event) { e.Hashes, e.Tokens, e.BlockSize = []uint64{5}, []uint32{9}, 1 })
	removed := event(vllm.BlockRemoved, func(e *vllm.Event) {
		e.Hashes, e.Medium, e.Group, e.Locality = full.Hashes, "GPU", 1, "LOCAL"
	})
	removedLeast := event(vllm.BlockRemoved, func(e *vllm.Event) { e.Hashes = []uint64{5} })
	batch := vllm.Batch{TS: 1.5, Rank: 3, Events: []vllm.Event{full, least, removed, removedLeast, event(vllm.AllBlocksCleared, nil)}}
	raw, err := os.ReadFile("testdata/structs.jsonl")
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(strings.TrimSpace(string(raw)), "\n")
	if len(lines) < 20 {
		t.Errorf("%d releases only", len(lines))
	}
	for _, text := range lines {
		var l struct{ VLLM, Payload string }
		if err := json.Unmarshal([]byte(text), &l); err != nil {
			t.Fatal(err)
		}
		t.Run(l.VLLM, func(t *testing.T) {
			v, ok := vllm.ParseVersion(l.VLLM)
			if got := hex.EncodeToString(vllm.AppendBatch(nil, &batch, v)); !ok || got != l.Payload {
				t.Errorf("as %v:\nours %s\nwant %s", v, got, l.Payload)
			}
			b := decode(t, unhex(t, l.Payload))
			if len(b.Events) != len(batch.Events) || !cmp.Equal(b.Events[0].Tokens, full.Tokens) {
				t.Errorf("read as %+v", b)
			}
		})
	}
}

// What each version can say comes back from its own encoding.
func TestRoundTrip(t *testing.T) {
	full := event(vllm.BlockStored, func(e *vllm.Event) {
		e.Hashes, e.Parent, e.HasParent = []uint64{1, math.MaxUint64}, 1<<40, true
		e.Tokens, e.BlockSize = []uint32{0, 127, 128, 255, 256, 65535, 65536, math.MaxUint32}, 4
		e.LoRAID, e.Medium, e.LoRAName = 3, "CPU", strings.Repeat("l", 300)
		e.ExtraKeys = [][]vllm.ExtraKey{{{Text: "l"}, {Text: "img", Offset: -40000, HasOffset: true}, {Bytes: []byte{1, 2}}}, nil}
		e.Group, e.SpecKind, e.SlidingWindow, e.Locality = 2, "sliding_window", 1024, "REMOTE"
	})
	removed := event(vllm.BlockRemoved, func(e *vllm.Event) {
		e.Hashes, e.Medium, e.Group, e.Locality, e.RemainingCopies = []uint64{9}, "GPU", 1, "LOCAL", []int{2}
	})
	for _, v := range versions {
		t.Run(v.String(), func(t *testing.T) {
			want := vllm.Batch{TS: 2.25, Rank: -1, Events: []vllm.Event{full, removed, event(vllm.AllBlocksCleared, nil)}}
			s, r := &want.Events[0], &want.Events[1]
			if !v.AtLeast(vllm.V0_11) {
				s.Medium, r.Medium = "", ""
			}
			if !v.AtLeast(vllm.V0_14) {
				s.LoRAName = ""
			}
			if !v.AtLeast(vllm.V0_19) {
				s.ExtraKeys = nil
			}
			if !v.AtLeast(vllm.V0_20) {
				s.Group, r.Group = -1, -1
			}
			if !v.AtLeast(vllm.V0_23) {
				s.SpecKind, s.SlidingWindow = "", 0
			}
			if !v.AtLeast(vllm.V0_26) {
				s.Locality, r.Locality = "", ""
			}
			if !v.AtLeast(vllm.V0_24) {
				r.RemainingCopies = nil
			}
			in := vllm.Batch{TS: 2.25, Rank: -1, Events: []vllm.Event{full, {Kind: 77}, removed, event(vllm.AllBlocksCleared, nil)}}
			var d vllm.Decoder
			var got vllm.Batch
			if err := d.Decode(vllm.AppendBatch(nil, &in, v), &got); err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(got, want, cmpopts.EquateEmpty()); diff != "" {
				t.Errorf("got (-) want (+):\n%s", diff)
			}
		})
	}
}

func TestEventHelpers(t *testing.T) {
	for medium, want := range map[string]string{
		"": vllm.MediumGPU, "GPU": vllm.MediumGPU, "gpu": vllm.MediumGPU, "CPU": vllm.MediumCPU, "cpu": vllm.MediumCPU,
		"STORAGE": vllm.MediumStorage, "lmcache": vllm.MediumOther,
	} {
		e := vllm.Event{Medium: medium}
		if got := e.MediumName(); got != want {
			t.Errorf("MediumName(%q) = %q, want %q", medium, got, want)
		}
		if got := e.IsGPU(); got != (want == vllm.MediumGPU) {
			t.Errorf("IsGPU(%q) = %v", medium, got)
		}
	}
	for kind, want := range map[string]bool{
		"": true, "full_attention": true, "mla_attention": true, "sink_full_attention": true,
		"sliding_window": false, "mamba": false, "chunked_local_attention": false, "cross_attention": false, "unknown": false,
	} {
		e := vllm.Event{SpecKind: kind}
		if got := e.IsMainAttention(); got != want {
			t.Errorf("IsMainAttention(%q) = %v, want %v", kind, got, want)
		}
	}
	for _, v := range versions {
		if got, ok := vllm.ParseVersion("v" + v.String()); !ok || got != v {
			t.Errorf("ParseVersion(%q) = %v, %v", v.String(), got, ok)
		}
	}
	for release, want := range map[string]vllm.Version{
		"": vllm.V0_24, "0.10.1.1": vllm.V0_10, "0.10.2": vllm.V0_11, "v0.21.0": vllm.V0_20, "0.22": vllm.V0_23, "0.25.1": vllm.V0_24, "0.32.0+cpu": vllm.V0_32, "0.40": vllm.V0_32,
	} {
		if got, ok := vllm.ParseVersion(release); !ok || got != want {
			t.Errorf("ParseVersion(%q) = %v, %v, want %v", release, got, ok, want)
		}
	}
	for _, release := range []string{"9", "0.9.2", "1.0", "0.x"} {
		if _, ok := vllm.ParseVersion(release); ok {
			t.Errorf("ParseVersion(%q) succeeds", release)
		}
	}
}

var versions = []vllm.Version{
	vllm.V0_10, vllm.V0_11, vllm.V0_14, vllm.V0_19, vllm.V0_20, vllm.V0_23, vllm.V0_24, vllm.V0_26, vllm.V0_31, vllm.V0_32,
}

// stepBatch is a batch of the usual size: 256 new tokens in 16 blocks.
func stepBatch() *vllm.Batch {
	e := vllm.NewEvent(vllm.BlockStored)
	for i := range uint64(16) {
		e.Hashes = append(e.Hashes, 0x9e3779b97f4a7c15*(i+1))
	}
	for i := range uint32(256) {
		e.Tokens = append(e.Tokens, i*i*7%151_000)
	}
	e.Parent, e.HasParent, e.BlockSize, e.Medium, e.Group, e.SpecKind = 1<<63+5, true, 16, "GPU", 0, "full_attention"
	return &vllm.Batch{TS: 1.75e9, Events: []vllm.Event{e}}
}

func TestDecodeAllocatesNothing(t *testing.T) {
	payload := vllm.AppendBatch(nil, stepBatch(), vllm.V0_24)
	var d vllm.Decoder
	var b vllm.Batch
	decode := func() {
		if err := d.Decode(payload, &b); err != nil {
			t.Fatal(err)
		}
	}
	decode()
	if n := testing.AllocsPerRun(100, decode); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

func BenchmarkDecode(b *testing.B) {
	for _, v := range []vllm.Version{vllm.V0_23, vllm.V0_24} {
		b.Run(v.String(), func(b *testing.B) {
			payload := vllm.AppendBatch(nil, stepBatch(), v)
			var d vllm.Decoder
			var batch vllm.Batch
			b.SetBytes(int64(len(payload)))
			b.ReportAllocs()
			for b.Loop() {
				if err := d.Decode(payload, &batch); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

func BenchmarkAppendBatch(b *testing.B) {
	batch := stepBatch()
	var buf []byte
	b.ReportAllocs()
	for b.Loop() {
		buf = vllm.AppendBatch(buf[:0], batch, vllm.V0_24)
	}
}

// FuzzDecode checks that no input panics, and that what decodes without loss
// survives encoding and decoding.
func FuzzDecode(f *testing.F) {
	for _, h := range []string{wireMap, wireArray, wireV010, wireBytes, simStored, simRemoved, simCleared, simMapHead + simTokens() + simMapEnd} {
		f.Add(unhex(f, h))
	}
	for _, v := range versions {
		f.Add(vllm.AppendBatch(nil, stepBatch(), v))
	}
	addCaptures(f, func(l *line) {
		if l.Live != nil {
			f.Add(l.Live[len(l.Live)-1])
		}
	})
	f.Fuzz(func(t *testing.T, payload []byte) {
		var d vllm.Decoder
		var b, again vllm.Batch
		if d.Decode(payload, &b) != nil || len(b.Events) == 0 {
			return
		}
		b.Skipped = 0
		if math.IsNaN(b.TS) {
			b.TS = 0
		}
		if err := d.Decode(vllm.AppendBatch(nil, &b, vllm.V0_26), &again); err != nil {
			t.Fatal(err)
		}
		if len(b.Events) != len(again.Events) || again.Skipped != 0 {
			t.Fatalf("%d events, then %d and %d skipped", len(b.Events), len(again.Events), again.Skipped)
		}
		for i := range b.Events {
			x, y := b.Events[i], again.Events[i]
			if x.Kind != vllm.BlockStored && x.Kind != vllm.BlockRemoved {
				continue
			}
			if x.Kind != y.Kind || !reflect.DeepEqual(x.Hashes, y.Hashes) && len(x.Hashes)+len(y.Hashes) > 0 {
				t.Fatalf("event %d: %+v became %+v", i, x, y)
			}
			if x.Kind == vllm.BlockStored && !cmp.Equal(x.Tokens, y.Tokens, cmpopts.EquateEmpty()) {
				t.Fatalf("event %d: tokens %v became %v", i, x.Tokens, y.Tokens)
			}
		}
	})
}
