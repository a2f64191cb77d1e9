package kvindex

// Held counts the blocks that the table holds for any worker.
func Held(t *Table) int {
	t.Sweep()
	t.mu.Lock()
	defer t.mu.Unlock()
	n := 0
	for i := range t.blocks.segments {
		n += t.blocks.segments[i].live
	}
	return n
}
