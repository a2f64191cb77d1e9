package affinity

import (
	"fmt"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/kinference/kinference/internal/kvhash"
)

func prompt(name string, shared, total int) []kvhash.Hash {
	h := kvhash.Root("", "")
	out := make([]kvhash.Hash, total)
	for i := range out {
		if i >= shared {
			h = kvhash.Extra(h, name)
		}
		h = kvhash.Extra(h, fmt.Sprint(i))
		out[i] = h
	}
	return out
}

func match(t *Table, now time.Time, hashes []kvhash.Hash) map[string]int {
	got := map[string]int{}
	t.Match(now, hashes, func(w string, blocks int) { got[w] = blocks })
	return got
}

func TestMatch(t *testing.T) {
	var table Table
	now := time.Now()
	table.Record(now, "a", prompt("x", 20, 30))
	table.Record(now, "b", prompt("y", 5, 9))
	tests := []struct {
		name   string
		prompt []kvhash.Hash
		want   map[string]int
	}{
		{"the next turn of a conversation", prompt("x", 20, 50), map[string]int{"a": 30, "b": 5}},
		{"a sibling", prompt("z", 20, 30), map[string]int{"a": 20, "b": 5}},
		{"a sibling that ends between two entries", prompt("z", 23, 30), map[string]int{"a": 20, "b": 5}},
		{"a shorter one", prompt("y", 5, 5), map[string]int{"a": 5, "b": 5}},
		{"a stranger", prompt("w", 0, 9), map[string]int{}},
		{"nothing", nil, map[string]int{}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if diff := cmp.Diff(tt.want, match(&table, now, tt.prompt)); diff != "" {
				t.Error(diff)
			}
		})
	}
	table.Forget("a")
	if got := match(&table, now, prompt("x", 20, 30)); got["a"] != 0 || got["b"] != 5 {
		t.Errorf("after a is forgotten: %v", got)
	}
}

func TestTableIsBounded(t *testing.T) {
	var table Table
	now := time.Now()
	for i := range 3 * generation / 8 {
		table.Record(now, "w", prompt(fmt.Sprint(i), 0, 8))
	}
	if n := len(table.young) + len(table.old); n > 2*generation+16 {
		t.Errorf("%d entries", n)
	}
	for i := range 20 {
		table.Record(now, fmt.Sprint("w", i), prompt("p", 0, 1))
	}
	if got := match(&table, now, prompt("p", 0, 1)); len(got) != holders {
		t.Errorf("%d holders of one block", len(got))
	}
}

func TestEntriesAge(t *testing.T) {
	var table Table
	now := time.Now()
	table.Record(now, "a", prompt("x", 0, 4))
	if got := match(&table, now.Add(lifetime+time.Second), prompt("x", 0, 4)); got["a"] != 4 {
		t.Errorf("after one lifetime: %v", got)
	}
	if got := match(&table, now.Add(2*lifetime+2*time.Second), prompt("x", 0, 4)); len(got) != 0 {
		t.Errorf("after two lifetimes: %v", got)
	}
	table.Record(now.Add(3*lifetime), "a", prompt("x", 0, 4))
	if got := match(&table, now.Add(9*lifetime), prompt("x", 0, 4)); len(got) != 0 {
		t.Errorf("after a long pause: %v", got)
	}
}

func BenchmarkRecord(b *testing.B) {
	var table Table
	now := time.Now()
	hashes := prompt("x", 0, 1250)
	b.ReportAllocs()
	for b.Loop() {
		table.Record(now, "w", hashes)
	}
}
