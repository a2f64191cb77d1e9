package fleetsim

// Lookup tells how many of a prompt's tokens a rank's cache holds at this
// moment: the truth that an index is measured against. It is 0 if the worker
// does not run.
func (w *Worker) Lookup(rank int, prompt []uint32, lora, salt string) int {
	l := w.current()
	if l == nil || rank < 0 || rank >= len(l.cores) {
		return 0
	}
	k := l.cores[rank]
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.eng.Lookup(prompt, lora, salt)
}
