package tokens

import (
	"slices"
	"strings"
	"testing"

	"github.com/kinference/kinference/internal/fleetsim/model"
	"github.com/kinference/kinference/internal/tokens/corpus"
)

// pretokens returns the pre-tokens of text.
func pretokens(scan scanner, text string) []string {
	var all []string
	for i := 0; i < len(text); {
		end := scan(text, i)
		all = append(all, text[i:end])
		i = end
	}
	return all
}

// checkCuts cuts text at every safe place, and at one more that at names, and compares the pre-tokens of the parts with those of the whole.
func checkCuts(t *testing.T, text string) {
	t.Helper()
	for _, s := range scanners {
		for _, form := range []func(string) string{func(s string) string { return s }, nfc} {
			whole := pretokens(s.scan, form(text))
			for i := safeCut(text, 0); i < len(text); i = safeCut(text, i+1) {
				left, right := form(text[:i]), form(text[i:])
				if left+right != form(text) {
					t.Fatalf("normalising apart changes %q at %d", text, i)
				}
				parts := append(pretokens(s.scan, left), pretokens(s.scan, right)...)
				if !slices.Equal(parts, whole) {
					t.Fatalf("%s:\ncut %q | %q\n got %q\nwant %q", s.patterns, text[:i], text[i:], parts, whole)
				}
			}
		}
	}
}

func TestSafeCut(t *testing.T) {
	initClasses()
	for _, text := range corpus.Texts() {
		if len(text) < 700 { // every cut is tried: quadratic
			checkCuts(t, text)
		}
	}
	for _, c := range []struct {
		text string
		want int
	}{
		{"ab cd", 2}, {"ab  cd", 2}, {" ab", 3}, {"a\nb", 2}, {"a\n b", 4}, {"a\n/b", 4}, {"é a", 4}, {"你好，世", 6}, {"好\n好", 4}, {"あ，", 6}, {"a，", 4}, {"", 0},
	} {
		if got := safeCut(c.text, 0); got != c.want {
			t.Errorf("safeCut(%q) = %d, want %d", c.text, got, c.want)
		}
	}
}

// TestPieceEndIsLinear: whatever a text is made of, looking for the ends of all its pieces searches each byte about once.
func TestPieceEndIsLinear(t *testing.T) {
	dir, err := model.Dir()
	if err != nil {
		t.Fatal(err)
	}
	tok, err := Load(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, unit := range []string{"<|im_end|>", "<|im_end|", "<", "<|im_end|>" + strings.Repeat("x", 300), strings.Repeat("好", 100), "a b ", "a\n"} {
		text := strings.Repeat(unit, 1<<18/len(unit))
		searched, cut := 0, 0
		for from := 0; from < len(text); {
			before := cut
			from0 := from
			from, cut = tok.pieceEnd(text, from, cut)
			if cut != before {
				searched += cut - from0
			}
		}
		if searched > 2*len(text) {
			t.Errorf("%.12q...: searched %d bytes of %d", unit, searched, len(text))
		}
	}
}

func FuzzCut(f *testing.F) {
	initClasses()
	for i, text := range corpus.Texts() {
		if len(text) < 500 && i%8 == 0 {
			f.Add(text)
		}
	}
	f.Fuzz(func(t *testing.T, text string) {
		if len(text) > 600 {
			return
		}
		checkCuts(t, validUTF8(text))
	})
}
