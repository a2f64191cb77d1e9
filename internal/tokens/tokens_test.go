package tokens_test

import (
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/kinference/kinference/internal/tokens"
)

func TestDecode(t *testing.T) {
	for _, name := range append([]string{"model"}, real...) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			tok := load(t, name)
			for i, text := range texts() {
				if name != "model" && i%3 != 0 {
					continue
				}
				ids := tok.Encode(nil, text, false)
				whole := tok.Decode(ids)
				if name != "model" && name != "qwen3" && whole != text { // those two normalise
					t.Fatalf("decoded %.200q, want %.200q", whole, text)
				}
				dec := tok.NewDecoder(false)
				var b strings.Builder
				for _, id := range ids {
					b.WriteString(dec.Push(id))
				}
				b.WriteString(dec.Flush())
				if b.String() != whole {
					t.Fatalf("piece by piece %.200q, want %.200q", b.String(), whole)
				}
			}
		})
	}
}

func TestDecoder(t *testing.T) {
	tok := load(t, "model") // ids 0 to 255 are the bytes
	for _, c := range []struct {
		name string
		ids  []uint32
		want []string // what each Push returns, then Flush
	}{
		{"ASCII", []uint32{'h', 'i'}, []string{"h", "i", ""}},
		{"é in two", []uint32{0xC3, 0xA9}, []string{"", "é", ""}},
		{"emoji in four", []uint32{0xF0, 0x9F, 0x98, 0x80, '!'}, []string{"", "", "", "😀", "!", ""}},
		{"cut off", []uint32{0xF0, 0x9F}, []string{"", "", "\ufffd"}},
		{"broken by a letter", []uint32{0xE4, 0xBD, 'a'}, []string{"", "", "\ufffda", ""}},
		{"never a start", []uint32{0x80, 0xFF}, []string{"\ufffd", "\ufffd", ""}},
		{"unknown id", []uint32{'a', 1 << 30}, []string{"a", "", ""}},
	} {
		dec := tok.NewDecoder(true)
		var got []string
		for _, id := range c.ids {
			got = append(got, dec.Push(id))
		}
		got = append(got, dec.Flush())
		if diff := cmp.Diff(c.want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", c.name, diff)
		}
	}
	ids := tok.Encode(nil, "<|im_start|>a<think>b<|im_end|>", false)
	for skip, want := range map[bool]string{true: "a<think>b", false: "<|im_start|>a<think>b<|im_end|>"} {
		dec := tok.NewDecoder(skip)
		got := ""
		for _, id := range ids {
			got += dec.Push(id)
		}
		if got != want {
			t.Errorf("skipSpecial %t: %q, want %q", skip, got, want)
		}
	}
}

func TestInvalidUTF8(t *testing.T) {
	tok := load(t, "model")
	for _, c := range []struct{ in, want string }{
		{"a\xffb", "a\ufffdb"},
		{"a\xff\xfeb", "a\ufffd\ufffdb"},
		{"\xe2\x82", "\ufffd"},                            // cut off: one
		{"\xe2\x82a", "\ufffda"},                          //
		{"\xf0\x9f\x98\xff", "\ufffd\ufffd"},              // three bytes of a character: one
		{"\xed\xa0\x80", "\ufffd\ufffd\ufffd"},            // a surrogate: three
		{"\xf0\x80\x80\x80", strings.Repeat("\ufffd", 4)}, // too long: four
		{"\xc3\xa9\xc3", "é\ufffd"},
	} {
		got, want := tok.Encode(nil, c.in, false), tok.Encode(nil, c.want, false)
		if !slices.Equal(got, want) {
			t.Errorf("%q: got %q, want %q", c.in, tok.Decode(got), c.want)
		}
	}
}

func TestAddSpecial(t *testing.T) {
	for name, want := range map[string]string{
		"model": "hi", "qwen3": "hi", "gptoss": "hi",
		"llama3_1":    "<|begin_of_text|>hi",
		"deepseek_v3": "<｜begin▁of▁sentence｜>hi", // from tokenizer_config.json
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			tok := load(t, name)
			if got := tok.Decode(tok.Encode(nil, "hi", true)); got != want {
				t.Errorf("got %q, want %q", got, want)
			}
			ids, _ := tokens.NewPrefixCache(tok, 1<<20).Encode("hi", true)
			if got := tok.Decode(ids); got != want {
				t.Errorf("cache: got %q, want %q", got, want)
			}
		})
	}
}

// TestRefused changes a good tokenizer.json in ways that are not supported; the error must say what it was.
func TestRefused(t *testing.T) {
	type object = map[string]any
	pre := func(file object) []any { return file["pre_tokenizer"].(object)["pretokenizers"].([]any) }
	for _, c := range []struct {
		name string
		edit func(file object)
		want string
	}{
		{"model type", func(f object) { f["model"].(object)["type"] = "Unigram" }, `model type "Unigram"`},
		{"byte fallback", func(f object) { f["model"].(object)["byte_fallback"] = true }, "byte_fallback"},
		{"dropout", func(f object) { f["model"].(object)["dropout"] = 0.1 }, "dropout"},
		{"prefix", func(f object) { f["model"].(object)["continuing_subword_prefix"] = "##" }, "continuing_subword_prefix"},
		{"normalizer", func(f object) { f["normalizer"] = object{"type": "NFKC"} }, `normalizer "NFKC"`},
		{"normalizer in sequence", func(f object) {
			f["normalizer"] = object{"type": "Sequence", "normalizers": []any{object{"type": "Lowercase"}}}
		}, `normalizer "Lowercase"`},
		{"pattern", func(f object) { pre(f)[0].(object)["pattern"] = object{"Regex": `\w+`} }, `\\w+`},
		{"string pattern", func(f object) { pre(f)[0].(object)["pattern"] = object{"String": " "} }, `type "Split"`},
		{"behavior", func(f object) { pre(f)[0].(object)["behavior"] = "Removed" }, `behavior "Removed"`},
		{"invert", func(f object) { pre(f)[0].(object)["invert"] = true }, "invert true"},
		{"use_regex", func(f object) { pre(f)[1].(object)["use_regex"] = true }, "use_regex true"},
		{"prefix space", func(f object) { pre(f)[1].(object)["add_prefix_space"] = true }, "add_prefix_space true"},
		{"pre-tokenizer", func(f object) { f["pre_tokenizer"] = object{"type": "Metaspace"} }, `"Metaspace"`},
		{"no pre-tokenizer", func(f object) { f["pre_tokenizer"] = nil }, "no pre_tokenizer"},
		{"decoder", func(f object) { f["decoder"] = object{"type": "WordPiece"} }, `decoder "WordPiece"`},
		{"post-processor", func(f object) { f["post_processor"] = object{"type": "BertProcessing"} }, `post_processor "BertProcessing"`},
		{"single word", func(f object) { f["added_tokens"].([]any)[0].(object)["single_word"] = true }, "single_word"},
		{"merge", func(f object) { f["model"].(object)["merges"] = []any{"a zzzz"} }, "merge 0"},
		{"malformed merge", func(f object) { f["model"].(object)["merges"] = []any{"a b c"} }, "merge 0"},
		{"bytes", func(f object) { delete(f["model"].(object)["vocab"].(object), "A") }, "byte 0x41"},
		{"huge id", func(f object) { f["model"].(object)["vocab"].(object)["A"] = 4000000000 }, "highest id"},
	} {
		_, err := loadChanged(t, "model", c.edit)
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: got error %v, want one with %q", c.name, err, c.want)
		}
	}
}

// Merges may be pairs in place of "a b", and a template may put tokens around the text.
func TestOtherForms(t *testing.T) {
	tok, err := loadChanged(t, "model", func(file map[string]any) {
		merges := file["model"].(map[string]any)["merges"].([]any)
		for i, m := range merges {
			a, b, _ := strings.Cut(m.(string), " ")
			merges[i] = []any{a, b}
		}
		file["post_processor"] = map[string]any{
			"type": "TemplateProcessing",
			"single": []any{
				map[string]any{"SpecialToken": map[string]any{"id": "X", "type_id": 0}},
				map[string]any{"Sequence": map[string]any{"id": "A", "type_id": 0}},
				map[string]any{"SpecialToken": map[string]any{"id": "Y", "type_id": 0}},
			},
			"special_tokens": map[string]any{"X": map[string]any{"ids": []int{1, 2}}, "Y": map[string]any{"ids": []int{3}}},
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	want := append(append([]uint32{1, 2}, load(t, "model").Encode(nil, "the model", false)...), 3)
	if diff := cmp.Diff(want, tok.Encode(nil, "the model", true)); diff != "" {
		t.Error(diff)
	}
}

func TestSplitPoints(t *testing.T) {
	tok := load(t, "model")
	const text = "a<|im_start|><|im_end|> b<|im_sta<think>"
	if diff := cmp.Diff([]int{13, 23, len(text)}, tok.SplitPoints(nil, text)); diff != "" {
		t.Error(diff)
	}
	for _, text := range texts() {
		var parts []uint32
		from := 0
		for _, i := range append(tok.SplitPoints(nil, text), len(text)) {
			parts = tok.Encode(parts, text[from:i], false)
			from = i
		}
		if whole := tok.Encode(nil, text, false); !slices.Equal(parts, whole) {
			t.Fatalf("parts of %q encode to %v, whole to %v", text, parts, whole)
		}
	}
}

func TestConcurrent(t *testing.T) {
	tok := load(t, "model")
	cache := tokens.NewPrefixCache(tok, 1<<20)
	sample := texts()[:200]
	want := make([][]uint32, len(sample))
	for i, text := range sample {
		want[i] = tok.Encode(nil, text, false)
	}
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for i, text := range sample {
				if got := tok.Encode(nil, text, false); !slices.Equal(got, want[i]) {
					t.Errorf("text %d: ids differ", i)
				}
				if got, _ := cache.Encode(text, false); !slices.Equal(got, want[i]) {
					t.Errorf("text %d: cached ids differ", i)
				}
			}
		})
	}
	wg.Wait()
}
