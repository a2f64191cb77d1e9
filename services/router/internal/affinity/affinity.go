// Package affinity remembers for a short while which workers got which
// prompts, so that conversations stay where their cache is when nothing
// better is known: for profiles without a tokenizer, whose hashes are of text
// chunks that no engine event names, and while kvtracker is away.
//
// The router records every decision and asks when it must. A Table is bounded
// in entries and in time, and safe for concurrent use. It can be wrong about
// what an engine evicted meanwhile: the scheduler's learned reuse ratio
// corrects for that.
package affinity

import (
	"slices"
	"sync"
	"time"

	"github.com/kinference/kinference/internal/kvhash"
)

const (
	// generation bounds a generation's entries; with two of them and some
	// 120 bytes per entry the table stays under 16 MB.
	generation = 1 << 16
	// lifetime of a generation: an entry lives one to two of them. Engines
	// under load keep a prefix for some minutes.
	lifetime = 5 * time.Minute
	// holders is the number of workers remembered per block.
	holders = 4
)

// Table maps blocks to the workers that computed them last. The zero value is
// ready for use.
type Table struct {
	mu         sync.Mutex
	young, old map[kvhash.Hash]entry
	born       time.Time
}

type entry [holders]string // most recent first

// Record notes that the prompt of these blocks went to the worker.
func (t *Table) Record(now time.Time, worker string, hashes []kvhash.Hash) {
	if len(hashes) == 0 {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.rotate(now)
	for i, h := range hashes {
		if kept(i+1) || i == len(hashes)-1 {
			t.put(h, worker)
		}
	}
}

// kept tells whether the block that ends a prefix of n blocks is recorded:
// all of the first eight, then four for each doubling, and the last one. A
// long prompt so costs few entries, and the length that is found for another
// prompt is at most a fifth too short.
func kept(n int) bool {
	for n > 8 {
		if n&1 != 0 {
			return false
		}
		n >>= 1
	}
	return true
}

func (t *Table) put(h kvhash.Hash, worker string) {
	e, ok := t.young[h]
	if !ok {
		e = t.old[h]
	}
	at := slices.Index(e[:], worker)
	if at < 0 {
		at = holders - 1
	}
	copy(e[1:at+1], e[:at])
	e[0] = worker
	t.young[h] = e
}

// Match visits the workers that got a prompt with a common prefix, each with
// the number of blocks in common.
func (t *Table) Match(now time.Time, hashes []kvhash.Hash, visit func(worker string, blocks int)) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.rotate(now)
	var seen []string
	for i := len(hashes) - 1; i >= 0; i-- {
		e, ok := t.young[hashes[i]]
		if !ok {
			e, ok = t.old[hashes[i]]
		}
		if !ok {
			continue
		}
		for _, w := range e {
			if w != "" && !slices.Contains(seen, w) {
				seen = append(seen, w)
				visit(w, i+1)
			}
		}
	}
}

// Forget drops all that is known of a worker: its cache was lost.
func (t *Table) Forget(worker string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, m := range []map[kvhash.Hash]entry{t.young, t.old} {
		for h, e := range m {
			if at := slices.Index(e[:], worker); at >= 0 {
				copy(e[at:], e[at+1:])
				e[holders-1] = ""
				m[h] = e
			}
		}
	}
}

// rotate ages the table when the young generation is full or over its time.
func (t *Table) rotate(now time.Time) {
	age := now.Sub(t.born)
	if t.young != nil && len(t.young) < generation && age < lifetime {
		return
	}
	t.old, t.young, t.born = t.young, map[kvhash.Hash]entry{}, now
	if age >= 2*lifetime {
		t.old = nil
	}
}
