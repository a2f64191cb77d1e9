package tokenspeed

import (
	"strings"
	"testing"
	"unicode/utf8"
)

func TestTexts(t *testing.T) {
	a, b := Texts(), Texts()
	for i, text := range a {
		if text != b[i] {
			t.Errorf("%s differs between calls", text.Name)
		}
		if n := len(text.Text); n < textBytes || n > textBytes+1000 || !utf8.ValidString(text.Text) {
			t.Errorf("%s: %d bytes, valid %v", text.Name, n, utf8.ValidString(text.Text))
		}
	}
	// A text that repeats itself would measure a cache.
	words := map[string]bool{}
	for _, w := range strings.Fields(a[0].Text) {
		words[w] = true
	}
	if len(words) < 8000 {
		t.Errorf("the English text has %d different words, want a natural number of them", len(words))
	}
}

func TestMeasure(t *testing.T) {
	speeds, missing, err := Measure(t.TempDir(), 1)
	if err != nil || len(speeds) != 3 || len(missing) != 1 {
		t.Fatalf("%d speeds, missing %q, error %v", len(speeds), missing, err)
	}
	for _, s := range speeds {
		if s.Tokenizer != Embedded || s.MBs <= 0 || s.BytesPerToken < 1 {
			t.Errorf("%+v", s)
		}
	}
}
