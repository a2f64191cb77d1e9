package classify

import (
	"strings"
	"testing"
	"unicode/utf8"
)

func TestNormaliseOffsets(t *testing.T) {
	for in, want := range map[string]struct{ find, source string }{
		"a &#106;o@x.org b":        {"jo@x.org", "&#106;o@x.org"},
		"x\u200b1\u200b2\u200b3 y": {"123", "1\u200b2\u200b3"},
		`say \u006ao\u0040x`:       {"jo@x", `\u006ao\u0040x`},
		"１２３ z":                    {"123", "１２３"},
		"%34%31%31 q":              {"411", "%34%31%31"},
		"&amp;#52;1 q":             {"41", "&amp;#52;1"},
		"jоhn@x.org":               {"john@x.org", "jоhn@x.org"}, // Cyrillic о
		"plain text":               {"plain", "plain"},
		"тест и слово":             {"слово", "слово"}, // a word of one alphabet stays
	} {
		var n normaliser
		v, deeper := n.normalise([]byte(in), 0)
		i := strings.Index(string(v.text), want.find)
		if i < 0 || deeper {
			t.Errorf("%q: became %q, without %q", in, v.text, want.find)
			continue
		}
		a, b := v.span(i, i+len(want.find))
		if got := in[a:b]; got != want.source {
			t.Errorf("%q: %q stands for %q, want %q", in, want.find, got, want.source)
		}
	}
}

// Every span of the normalised text is one of the text, in order.
func FuzzNormalise(f *testing.F) {
	for _, s := range []string{"", "a&#64;b", `\\u0041\n`, "%2541", "=C3=A9=20", "\u200b\u0301x", "аb1", "\xff\xfe", "&amp;amp;#65;", "𝟙𝟚", "\U000e0041"} {
		f.Add(s, uint16(0), uint16(3))
	}
	f.Fuzz(func(t *testing.T, in string, x, y uint16) {
		var n normaliser
		v, _ := n.normalise([]byte(in), 0)
		if !utf8.Valid(v.text) {
			t.Fatalf("%q became %q, which is no UTF-8", in, v.text)
		}
		if len(v.text) == 0 {
			return
		}
		a, b := int(x)%len(v.text), int(y)%len(v.text)
		if a > b {
			a, b = b, a
		}
		s, e := v.span(a, b+1)
		if s < 0 || s > e || e > len(in) {
			t.Fatalf("%q: [%d, %d) of %q maps to [%d, %d)", in, a, b+1, v.text, s, e)
		}
		if p, _ := v.span(b, b+1); p < s {
			t.Fatalf("%q: the map goes backwards", in)
		}
	})
}

// Decoders end, and what they find is within bounds.
func FuzzBlobs(f *testing.F) {
	for _, s := range []string{"NDExMSAxMTExIDExMTEgMTExMQ==", "34313131203131313120313131312031313131", "H4sIAAAAAAAAAzM0NDQEAGEYrGQEAAAA", "34 31 31 31 31 31 31 31", "eJwzNDQ0BAAB8wDH"} {
		f.Add("x " + s + " y")
	}
	f.Fuzz(func(t *testing.T, in string) {
		root := &view{text: []byte(in), source: len(in)}
		total := 0
		blobs(root, func(v *view) {
			total += len(v.text)
			if a, b := v.span(0, len(v.text)); a < 0 || a >= b || b > len(in) {
				t.Fatalf("%q: blob at [%d, %d)", in, a, b)
			}
		}, func(string) {})
		if total > maxInflated*maxBlobs {
			t.Fatalf("%d bytes decoded", total)
		}
	})
}
