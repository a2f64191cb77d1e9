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
	var all []evaluate.Row
	for f := range strings.SplitSeq(files, ",") {
		rows, _, err := evaluate.Read(f)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, rows...)
	}
	r, err := evaluate.Run(t.Context(), c, all, evaluate.Settings{Misses: 30, MissesTo: os.Stderr, Keep: evaluate.HeldOutRow})
	if err != nil {
		t.Fatal(err)
	}
	r.Write(os.Stdout)
}
