package kvindex

// Held counts the blocks that the table holds for any worker.
func Held(t *Table) int {
	n := 0
	for i := range t.shards {
		n += len(t.shards[i].blocks)
	}
	return n
}
