package tokens

import (
	"hash/maphash"
	"math"
	"strings"
	"sync"
	"sync/atomic"
)

// bpe merges the bytes of a pre-token into token ids. It is immutable after load but for its word cache.
type bpe struct {
	bytes        [256]uint32       // id of each single byte
	vocab        map[string]uint32 // raw bytes of a token to its id
	ignoreMerges bool              // a pre-token that is in vocab is that token, whatever merges would make of it
	pairs        pairTable
	words        wordCache
}

// pairTable maps a pair of adjacent ids to rank<<32 | id of the merged token. Open addressing with linear probing: Go's map
// costs three times as much here, and this look-up is most of the work of an uncached word.
type pairTable struct {
	slots []pairSlot
	shift uint
}

type pairSlot struct{ pair, value uint64 }

const (
	noPair  = math.MaxUint64 // both an empty slot and "these two do not merge": ids are below 2^32-1
	fibHash = 0x9E3779B97F4A7C15
)

func newPairTable(n int) pairTable {
	bits := uint(4)
	for 1<<bits < 2*n {
		bits++
	}
	t := pairTable{slots: make([]pairSlot, 1<<bits), shift: 64 - bits}
	for i := range t.slots {
		t.slots[i] = pairSlot{noPair, noPair}
	}
	return t
}

func (t *pairTable) set(a, b, rank, id uint32) {
	pair := uint64(a)<<32 | uint64(b)
	i := pair * fibHash >> t.shift
	for t.slots[i].pair != noPair && t.slots[i].pair != pair {
		i = (i + 1) & uint64(len(t.slots)-1)
	}
	t.slots[i] = pairSlot{pair, uint64(rank)<<32 | uint64(id)}
}

// get returns rank<<32 | id, or noPair.
func (t *pairTable) get(a, b uint32) uint64 {
	pair := uint64(a)<<32 | uint64(b)
	i := pair * fibHash >> t.shift
	for {
		slot := &t.slots[i&uint64(len(t.slots)-1)]
		if slot.pair == pair || slot.pair == noPair {
			return slot.value
		}
		i++
	}
}

// wordCache remembers the ids of words: a fixed number of slots, the newest word of a slot wins. Text follows Zipf's law, so a
// small lossy table answers almost all words; a slot is replaced whole, so readers need no lock.
type wordCache struct {
	seed  maphash.Seed
	slots []atomic.Pointer[cachedWord]
}

type cachedWord struct {
	word string
	ids  []uint32
}

const (
	wordSlots     = 1 << 15 // ~3 MB a tokenizer when full
	maxCachedWord = 48      // bytes; longer ones rarely come back
)

// append appends the ids of one pre-token.
func (b *bpe) append(dst []uint32, word string) []uint32 {
	if len(word) == 1 {
		return append(dst, b.bytes[word[0]])
	}
	if len(word) > maxCachedWord {
		return b.merge(dst, word)
	}
	slot := &b.words.slots[maphash.String(b.words.seed, word)%wordSlots]
	if w := slot.Load(); w != nil && w.word == word {
		return append(dst, w.ids...)
	}
	n := len(dst)
	dst = b.merge(dst, word)
	w := &cachedWord{word: strings.Clone(word)} // word belongs to a whole prompt
	w.ids = append(w.ids, dst[n:]...)
	slot.Store(w)
	return dst
}

// merge appends the ids of word by the merge rules: of all adjacent pairs that merge, the one of lowest rank first, the
// leftmost of equals.
func (b *bpe) merge(dst []uint32, word string) []uint32 {
	if b.ignoreMerges {
		if id, ok := b.vocab[word]; ok {
			return append(dst, id)
		}
	}
	if len(word) > maxShort {
		dst, _ = b.mergeLong(dst, word)
		return dst
	}
	return b.mergeShort(dst, word)
}

// maxShort is the longest word merged by scanning all pairs for each merge, which beats the heap on short words.
const maxShort = 48

func (b *bpe) mergeShort(dst []uint32, word string) []uint32 {
	var ids [maxShort]uint32
	var pairs [maxShort]uint64 // pairs[i]: how ids[i] and ids[i+1] merge
	n := len(word)
	for i := range n {
		ids[i] = b.bytes[word[i]]
	}
	for i := range n - 1 {
		pairs[i] = b.pairs.get(ids[i], ids[i+1])
	}
	for n > 1 {
		best, at := uint64(noPair), 0
		for i, p := range pairs[:n-1] {
			if p < best { // rank is the high half; equal ranks are equal pairs, of which the first stays
				best, at = p, i
			}
		}
		if best == noPair {
			break
		}
		ids[at] = uint32(best)
		copy(ids[at+1:n-1], ids[at+2:n])
		copy(pairs[at:n-2], pairs[at+1:n-1])
		n--
		if at > 0 {
			pairs[at-1] = b.pairs.get(ids[at-1], ids[at])
		}
		if at < n-1 {
			pairs[at] = b.pairs.get(ids[at], ids[at+1])
		}
	}
	return append(dst, ids[:n]...)
}

// symbol is a node of the doubly linked list of mergeLong; id is dead once merged into its left neighbour.
type symbol struct {
	id         uint32
	prev, next int32
}

// candidate is a possible merge: key is rank<<32 | position of its left symbol, so that the heap pops merges in order. It is
// stale if its two symbols have changed since.
type candidate struct {
	key         uint64
	left, right uint32
	id          uint32
}

type longScratch struct {
	symbols []symbol
	heap    []candidate
}

var longPool = sync.Pool{New: func() any { return new(longScratch) }}

const (
	dead         = math.MaxUint32
	keepScratch  = 1 << 20 // symbols; larger scratch goes to the garbage collector
	maxLongBytes = 1 << 30 // positions are int32
)

// mergeLong is mergeShort in n log n by a heap over a linked list. steps counts heap operations, for tests.
func (b *bpe) mergeLong(dst []uint32, word string) (ids []uint32, steps int) {
	for len(word) > maxLongBytes { // unreachable by any request: bodies are bounded far below
		dst, steps = b.mergeLong(dst, word[:maxLongBytes])
		word = word[maxLongBytes:]
	}
	s := longPool.Get().(*longScratch)
	symbols, heap := s.symbols[:0], s.heap[:0]
	n := len(word)
	for i := range n {
		symbols = append(symbols, symbol{id: b.bytes[word[i]], prev: int32(i - 1), next: int32(i + 1)})
	}
	symbols[n-1].next = -1
	for i := range n - 1 {
		left, right := symbols[i].id, symbols[i+1].id
		if p := b.pairs.get(left, right); p != noPair {
			heap = append(heap, candidate{p>>32<<32 | uint64(i), left, right, uint32(p)})
		}
	}
	for i := len(heap)/2 - 1; i >= 0; i-- {
		siftDown(heap, i)
	}
	push := func(at int32) {
		left := &symbols[at]
		if left.next < 0 {
			return
		}
		right := symbols[left.next].id
		if p := b.pairs.get(left.id, right); p != noPair {
			heap = append(heap, candidate{p>>32<<32 | uint64(at), left.id, right, uint32(p)})
			siftUp(heap)
			steps++
		}
	}
	for len(heap) > 0 {
		c := heap[0]
		heap[0] = heap[len(heap)-1]
		heap = heap[:len(heap)-1]
		siftDown(heap, 0)
		steps++
		at := int32(uint32(c.key))
		left := &symbols[at]
		if left.id != c.left || left.next < 0 || symbols[left.next].id != c.right {
			continue
		}
		right := &symbols[left.next]
		left.id, left.next = c.id, right.next
		right.id = dead
		if left.next >= 0 {
			symbols[left.next].prev = at
		}
		if left.prev >= 0 {
			push(left.prev)
		}
		push(at)
	}
	for i := int32(0); i >= 0; i = symbols[i].next {
		dst = append(dst, symbols[i].id)
	}
	if cap(symbols) <= keepScratch {
		s.symbols, s.heap = symbols, heap
		longPool.Put(s)
	}
	return dst, steps
}

func siftUp(h []candidate) {
	i := len(h) - 1
	for i > 0 {
		parent := (i - 1) / 2
		if h[parent].key <= h[i].key {
			return
		}
		h[parent], h[i] = h[i], h[parent]
		i = parent
	}
}

func siftDown(h []candidate, i int) {
	for {
		child := 2*i + 1
		if child >= len(h) {
			return
		}
		if child+1 < len(h) && h[child+1].key < h[child].key {
			child++
		}
		if h[i].key <= h[child].key {
			return
		}
		h[i], h[child] = h[child], h[i]
		i = child
	}
}
