package kvindex

// Held counts the blocks that the table holds for any worker.
func Held(t *Table) int {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.sweep(1 << 32)
	n := 0
	for i := range t.blocks.segments {
		n += t.blocks.segments[i].live
	}
	return n
}
