package tokens_test

import (
	"os"
	"slices"
	"testing"

	"golang.org/x/text/unicode/norm"

	"github.com/kinference/kinference/internal/tokens"
)

// FuzzEncode checks on any text that decoding gives the text back, that parts at split points encode to the same ids, that the
// cache gives the same ids cold and warm, and the same for a text that begins alike.
func FuzzEncode(f *testing.F) {
	names := append([]string{"model"}, real...)
	var toks []*tokens.Tokenizer
	var caches []*tokens.PrefixCache
	for _, name := range names {
		if _, err := find(f, name); err != nil && os.Getenv("KINFERENCE_INTEROP") != "1" {
			f.Logf("WITHOUT TOKENIZER %s: run scripts/fetch-tokenizers.sh", name)
			continue
		}
		tok := load(f, name)
		toks = append(toks, tok)
		caches = append(caches, tokens.NewPrefixCache(tok, 4<<20))
	}
	for i, text := range texts() {
		if len(text) < 500 && i%8 == 0 {
			f.Add(text)
		}
	}
	f.Fuzz(func(t *testing.T, text string) {
		if len(text) > 1<<16 {
			return
		}
		for i, tok := range toks {
			ids := tok.Encode(nil, text, false)
			valid := string([]rune(text)) // one U+FFFD for each bad byte
			if decoded := tok.Decode(ids); valid == text && decoded != text && norm.NFC.String(decoded) != norm.NFC.String(text) {
				t.Fatalf("%s: %q decodes to %q", names[i], text, decoded)
			}
			for _, id := range ids {
				if int(id) >= tok.Size() || tok.Token(id) == "" {
					t.Fatalf("%s: %q gives id %d", names[i], text, id)
				}
			}
			if valid == text {
				var parts []uint32
				from := 0
				for _, at := range append(tok.SplitPoints(nil, text), len(text)) {
					parts = tok.Encode(parts, text[from:at], false)
					from = at
				}
				if !slices.Equal(parts, ids) {
					t.Fatalf("%s: parts of %q encode to %v, whole to %v", names[i], text, parts, ids)
				}
			}
			// A prefix of 1.5 KiB puts cuts near and in the text.
			long := filler + text + filler + text
			want := tok.Encode(nil, long, false)
			for range 2 {
				if got, _ := caches[i].Encode(long, false); !slices.Equal(got, want) {
					t.Fatalf("%s: cached ids of filler and %q differ", names[i], text)
				}
			}
		}
	})
}

var filler = texts()[300][:min(1020, len(texts()[300]))]
