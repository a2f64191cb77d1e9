package decisions

import (
	"fmt"
	"testing"

	"github.com/kinference/kinference/internal/schedule"
)

// With many workers a record keeps the best candidates, in order.
func TestRecordsAreBounded(t *testing.T) {
	const workers = 500
	r := &Record{RequestID: "1", Chosen: "499"}
	for i := range workers {
		r.Decision.Estimates = append(r.Decision.Estimates, schedule.Estimate{Worker: fmt.Sprint(i)})
		r.Decision.Order = append(r.Decision.Order, workers-1-i)
		r.Dropped = append(r.Dropped, Dropped{Worker: fmt.Sprint("dropped", i)})
	}
	l := New(1)
	l.Add(r)
	d, ok := l.Explain("1")
	if !ok || len(d.Candidates) != 2*maxCandidates || d.Chosen != "499" || d.ServedBy != "499" {
		t.Fatalf("record %v", d)
	}
	for i, c := range d.Candidates[:maxCandidates] {
		if want := fmt.Sprint(workers - 1 - i); c.Worker != want {
			t.Errorf("candidate %d is %s, want %s", i, c.Worker, want)
		}
	}
	if cap(r.Decision.Estimates) >= workers || cap(r.Dropped) >= workers {
		t.Error("the whole lists are still in memory")
	}
}
