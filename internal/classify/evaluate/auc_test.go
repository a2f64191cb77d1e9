package evaluate

import (
	"fmt"
	"testing"

	"github.com/kinference/kinference/internal/classify"
)

func TestHeadsAUC(t *testing.T) {
	rows, _, _ := Read("/work/shared/data/classifier/complexity_dev.jsonl")
	c, _ := classify.New(classify.Settings{})
	m := map[string][]example{}
	for i := range rows {
		r := &rows[i]
		hard, ok := hardness(r)
		if !ok {
			continue
		}
		set := "train "
		if HeldOutComplexity(r) {
			set = "held "
		}
		res := c.Classify(t.Context(), classify.Input{Parts: []classify.Part{{Text: r.Content()}}})
		for _, k := range []string{"difficulty", "demand", "score"} {
			m[set+r.Source+" "+k] = append(m[set+r.Source+" "+k], example{float64(res.Complexity[k]), hard})
		}
	}
	for _, k := range keys(m) {
		fmt.Printf("%s %.3f\n", k, auc(m[k]))
	}
}
