package corpus_test

import (
	"testing"

	"github.com/kinference/kinference/internal/classify/corpus"
)

// The same seed makes the same texts, and labels lie within them.
func TestGenerator(t *testing.T) {
	a, err := corpus.New(7)
	if err != nil {
		t.Fatal(err)
	}
	b, err := corpus.New(7)
	if err != nil {
		t.Fatal(err)
	}
	for range 2000 {
		x, y := a.Doc(), b.Doc()
		if x.Text != y.Text || a.Attack() != b.Attack() || a.Benign() != b.Benign() {
			t.Fatal("two generators of one seed differ")
		}
		for _, s := range x.Spans {
			if s.Start < 0 || s.Start >= s.End || s.End > len(x.Text) {
				t.Fatalf("span out of bounds: %+v in %q", s, x.Text)
			}
		}
	}
}
