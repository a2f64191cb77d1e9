package tokens

import (
	"hash/maphash"
	"math"
	"sync"
	"sync/atomic"
)

// bpe merges the bytes of a pre-token into token ids. It is immutable after load but for its word cache.
type bpe struct {
	bytes        [256]uint32       // id of each single byte
	vocab        map[string]uint32 // raw bytes of a token to its id; nil but for ignoreMerges
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

// wordCache remembers the ids of words: two slots for each hash, the older of them goes. Text follows Zipf's law, so a small lossy
// table answers almost all words. A slot is replaced whole, so readers need no lock.
type wordCache struct {
	seed  maphash.Seed
	slots []atomic.Pointer[cachedWord] // 2 * wordSets
}

// cachedWord holds no pointers: the garbage collector never looks inside.
type cachedWord struct {
	size  uint8 // of text
	count uint8 // of ids
	text  [maxCachedWord]byte
	ids   [maxCachedIDs]uint32
}

const (
	wordSets      = 1 << 14 // full, they hold 3 MB a tokenizer
	maxCachedWord = 46      // bytes; longer words rarely come back
	maxCachedIDs  = 12
)

func newWordCache() wordCache {
	return wordCache{seed: maphash.MakeSeed(), slots: make([]atomic.Pointer[cachedWord], 2*wordSets)}
}

// append appends the ids of one pre-token.
func (b *bpe) append(dst []uint32, word string) []uint32 {
	if len(word) == 1 {
		return append(dst, b.bytes[word[0]])
	}
	if len(word) > maxCachedWord {
		return b.merge(dst, word)
	}
	set := 2 * (maphash.String(b.words.seed, word) % wordSets)
	newer, older := &b.words.slots[set], &b.words.slots[set+1]
	first := newer.Load()
	if first != nil && string(first.text[:first.size]) == word {
		return append(dst, first.ids[:first.count]...)
	}
	if w := older.Load(); w != nil && string(w.text[:w.size]) == word {
		return append(dst, w.ids[:w.count]...)
	}
	n := len(dst)
	dst = b.merge(dst, word)
	if len(dst)-n > maxCachedIDs {
		return dst
	}
	w := &cachedWord{size: uint8(len(word)), count: uint8(len(dst) - n)}
	copy(w.text[:], word)
	copy(w.ids[:], dst[n:])
	older.Store(first)
	newer.Store(w)
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

// longScratch is the memory of one mergeLong. heap holds possible merges as rank<<32 | position of the left symbol, so that it
// gives them in order. One is stale if the pair at that position has another rank by then.
type longScratch struct {
	symbols []symbol
	heap    []uint64
}

var longPool = sync.Pool{New: func() any { return new(longScratch) }}

const (
	dead         = math.MaxUint32
	keepScratch  = 1 << 17 // symbols, 3 MB; larger scratch goes to the garbage collector
	maxLongBytes = 4 << 20 // bytes of one word merged at once: bounds the scratch to 112 MB
)

// mergeLong is mergeShort in n log n by a heap over a linked list. steps counts heap operations, for tests.
func (b *bpe) mergeLong(dst []uint32, word string) (ids []uint32, steps int) {
	for len(word) > maxLongBytes {
		// The one place where ids may differ from the reference's, by a few at the cut: in a word of more than 4 MiB.
		dst, _ = b.mergeLong(dst, word[:maxLongBytes])
		word = word[maxLongBytes:]
	}
	n := len(word)
	s := longPool.Get().(*longScratch)
	if cap(s.symbols) < n {
		s.symbols = make([]symbol, 0, n)
		s.heap = make([]uint64, 0, 2*n)
	}
	symbols, heap := s.symbols[:0], s.heap[:0]
	for i := range n {
		symbols = append(symbols, symbol{id: b.bytes[word[i]], prev: int32(i - 1), next: int32(i + 1)})
	}
	symbols[n-1].next = -1
	for i := range n - 1 {
		if p := b.pairs.get(symbols[i].id, symbols[i+1].id); p != noPair {
			heap = append(heap, p>>32<<32|uint64(i))
		}
	}
	for i := len(heap)/4 + 1; i >= 0; i-- {
		siftDown(heap, i)
	}
	push := func(at int32) {
		left := &symbols[at]
		if left.next < 0 {
			return
		}
		if p := b.pairs.get(left.id, symbols[left.next].id); p != noPair {
			heap = append(heap, p>>32<<32|uint64(at))
			siftUp(heap)
			steps++
		}
	}
	for len(heap) > 0 {
		key := heap[0]
		heap[0] = heap[len(heap)-1]
		heap = heap[:len(heap)-1]
		siftDown(heap, 0)
		steps++
		at := int32(uint32(key))
		left := &symbols[at]
		if left.id == dead || left.next < 0 {
			continue
		}
		right := &symbols[left.next]
		p := b.pairs.get(left.id, right.id)
		if p>>32 != key>>32 {
			continue
		}
		left.id, left.next = uint32(p), right.next
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
	if n <= keepScratch {
		s.symbols, s.heap = symbols, heap
		longPool.Put(s)
	}
	return dst, steps
}

// The heap has four children a node: half as many levels, and a node's children share a cache line.

func siftUp(h []uint64) {
	i := len(h) - 1
	v := h[i]
	for i > 0 {
		parent := (i - 1) / 4
		if h[parent] <= v {
			break
		}
		h[i] = h[parent]
		i = parent
	}
	h[i] = v
}

func siftDown(h []uint64, i int) {
	if i >= len(h) {
		return
	}
	v := h[i]
	for {
		first := 4*i + 1
		if first >= len(h) {
			break
		}
		child := first
		for j := first + 1; j < min(first+4, len(h)); j++ {
			if h[j] < h[child] {
				child = j
			}
		}
		if v <= h[child] {
			break
		}
		h[i] = h[child]
		i = child
	}
	h[i] = v
}
