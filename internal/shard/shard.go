// Package shard says which tracker follows which worker set.
//
// kvtracker and the router call it; both must come to the same answer, so it depends on
// nothing but the name and the number of shards. It keeps no state and cannot fail.
package shard

import "hash/fnv"

// Of is the shard, from 0, of a worker set (namespace/name) where there are count of them.
// One count says nothing about another: trackers of a new count are started beside the old
// ones, not in place of them.
func Of(set string, count int) int {
	if count <= 1 {
		return 0
	}
	h := fnv.New64a()
	_, _ = h.Write([]byte(set))
	x := h.Sum64()
	return int((x ^ x>>32) % uint64(count)) // the low bits alone hardly mix
}
