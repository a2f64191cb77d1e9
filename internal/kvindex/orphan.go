package kvindex

import (
	"slices"

	"github.com/kinference/kinference/internal/vllm"
)

// An orphan is a stored event whose parent is not known: it came out of order,
// or the parent's own event was lost. It waits a while; if it is given up, its
// blocks are missing, which costs a cache hit and no more.

// adopt keeps a copy of the event, and gives up the oldest ones for it.
func (w *worker) adopt(e *vllm.Event, r *Result) {
	if weight(e) > maxOrphanWeight {
		r.Skipped[SkipOrphan]++
		return
	}
	for len(w.orphans) == maxOrphans || w.orphanWeight+weight(e) > maxOrphanWeight {
		w.take(0)
		r.Skipped[SkipOrphan]++
	}
	c := *e
	c.Hashes = slices.Clone(e.Hashes)
	c.Tokens = slices.Clone(e.Tokens)
	c.RemainingCopies = nil
	c.ExtraKeys = make([][]vllm.ExtraKey, len(e.ExtraKeys))
	for i, keys := range e.ExtraKeys {
		c.ExtraKeys[i] = slices.Clone(keys)
		for j := range keys {
			c.ExtraKeys[i][j].Bytes = slices.Clone(keys[j].Bytes)
		}
	}
	w.orphans = append(w.orphans, c)
	w.orphanWeight += weight(&c)
}

// weight is the memory that an orphan costs, in tokens.
func weight(e *vllm.Event) int {
	n := len(e.Tokens)
	for _, keys := range e.ExtraKeys {
		for _, k := range keys {
			n += 16 + (len(k.Text)+len(k.Bytes))/4
		}
	}
	return n
}

// take removes an orphan and returns it.
func (w *worker) take(i int) vllm.Event {
	o := w.orphans[i]
	w.orphans = slices.Delete(w.orphans, i, i+1)
	w.orphanWeight -= weight(&o)
	return o
}

// waits finds an orphan that waits for a block; -1 for none.
func (w *worker) waits(group int, engine uint64) int {
	return slices.IndexFunc(w.orphans, func(o vllm.Event) bool { return o.Parent == engine && groupOf(&o) == group })
}

// replay applies the orphans that waited for a block.
func (w *worker) replay(group int, engine uint64, r *Result) {
	for i := w.waits(group, engine); i >= 0; i = w.waits(group, engine) {
		o := w.take(i)
		if g, m, ok := w.accept(&o, r); ok {
			w.store(g, m, &o, false, r)
		}
	}
}

// disown takes a block back from the orphans, and with it the rest of its
// chain: left is the number of copies that stay, -1 for one less. It reports
// whether there was one.
func (w *worker) disown(group int, m Medium, engine uint64, left int, r *Result) bool {
	known := false
	for i := 0; i < len(w.orphans); i++ {
		o := &w.orphans[i]
		if groupOf(o) != group || MediumOf(o) != m {
			continue
		}
		at := slices.Index(o.Hashes, engine)
		if at < 0 {
			continue
		}
		known = true
		if left > 0 {
			return true
		}
		if at == 0 {
			w.take(i)
			i--
			r.Skipped[SkipOrphan]++
		} else {
			w.orphanWeight -= weight(o)
			o.Hashes, o.Tokens = o.Hashes[:at], o.Tokens[:at*o.BlockSize]
			o.ExtraKeys = o.ExtraKeys[:min(at, len(o.ExtraKeys))]
			w.orphanWeight += weight(o)
		}
		if left < 0 {
			return true
		}
	}
	return known
}
