package shard_test

import (
	"fmt"
	"testing"

	"github.com/kinference/kinference/internal/shard"
)

// TestOf: each set has one shard, and they are about equally large. The named ones are
// fixed: trackers and routers of two releases must agree.
func TestOf(t *testing.T) {
	for count := range 9 {
		sizes := make([]int, max(count, 1))
		for i := range 1000 {
			sizes[shard.Of(fmt.Sprintf("team-%d/model-%d", i%17, i), count)]++
		}
		for i, n := range sizes {
			if share := 1000 / len(sizes); n < share*2/3 || n > share*4/3 {
				t.Errorf("shard %d of %d has %d of 1,000 sets", i, count, n)
			}
		}
	}
	for set, want := range map[string]int{"demo/sim": 2, "ns/small": 2, "ns/large": 2, "team-a/chat": 1} {
		if got := shard.Of(set, 5); got != want {
			t.Errorf("%s is in shard %d of 5, was %d", set, got, want)
		}
	}
}
