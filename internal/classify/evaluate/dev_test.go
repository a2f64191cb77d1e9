package evaluate_test

import (
	"os"
	"strings"
	"testing"

	"github.com/kinference/kinference/internal/classify"
	"github.com/kinference/kinference/internal/classify/evaluate"
)

func TestDev(t *testing.T) {
	files := os.Getenv("EVAL")
	c, err := classify.New(classify.Settings{})
	if err != nil {
		t.Fatal(err)
	}
	for f := range strings.SplitSeq(files, ",") {
		rows, bad, err := evaluate.Read(f)
		if err != nil {
			t.Fatal(err)
		}
		r, err := evaluate.Run(t.Context(), c, rows, evaluate.Settings{Misses: 25, MissesTo: os.Stderr})
		if err != nil {
			t.Fatal(err)
		}
		r.Bad = bad
		r.Write(os.Stdout)
	}
}
