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

// SweepBy makes the sweep as slow as that many blocks at a time, so that tests see what lies
// between its steps, until the result is called.
func SweepBy(blocks int) (end func()) {
	sweepStep = blocks
	return func() { sweepStep = 4096 }
}
