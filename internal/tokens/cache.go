package tokens

import (
	"hash/maphash"
	"slices"
	"strings"
	"sync"
)

// Sizes of the pieces that a PrefixCache remembers, in bytes. A piece ends at the first safe cut from pieceBytes on, or at an
// earlier added token from turnBytes on, so that turns of a conversation and shared documents fall into the same pieces
// wherever they stand. What a prompt adds to a known one costs its own encoding and that of at most one piece.
const (
	pieceBytes    = 1024
	turnBytes     = 256
	maxPieceBytes = 64 << 10 // longer ones (no white space, no CJK punctuation) are not remembered
	entryOverhead = 160      // map slot, list links and headers of an entry, roughly
	cacheShards   = 16
	firstIDs      = 4096 // of a text are made before there is room for all, as many as they will be at the rate so far
)

// PrefixCache encodes texts that share long pieces with earlier ones: the next turn of a conversation, another question about the
// same document. It cuts a text where parts encode on their own (see safeCut) and remembers the ids of each part by its exact
// bytes, so its answers are those of Tokenizer.Encode whatever it holds. Memory is bounded; the least recently used pieces
// go first. It is safe for concurrent use.
type PrefixCache struct {
	t      *Tokenizer
	seed   maphash.Seed
	shards [cacheShards]cacheShard
}

type cacheShard struct {
	mu      sync.Mutex
	max     int // bytes
	bytes   int
	entries map[uint64]*piece
	lru     piece // ring: next is the most, prev the least recently used
}

type piece struct {
	hash       uint64
	text       string
	ids        []uint32
	prev, next *piece
}

func (p *piece) size() int { return len(p.text) + 4*len(p.ids) + entryOverhead }

// NewPrefixCache returns an empty cache of at most maxBytes (about twice the bytes of the text it covers); 0 or less remembers
// nothing.
func NewPrefixCache(t *Tokenizer, maxBytes int) *PrefixCache {
	c := &PrefixCache{t: t, seed: maphash.MakeSeed()}
	for i := range c.shards {
		s := &c.shards[i]
		s.max = maxBytes / cacheShards
		s.entries = make(map[uint64]*piece)
		s.lru.prev, s.lru.next = &s.lru, &s.lru
	}
	return c
}

// Encode returns the ids that Tokenizer.Encode would, and how many of them came from the cache. ids belongs to the caller.
func (c *PrefixCache) Encode(text string, addSpecial bool) (ids []uint32, cached int) {
	text = validUTF8(text)
	ids = make([]uint32, 0, min(len(text)/5+16, firstIDs))
	if addSpecial {
		ids = append(ids, c.t.prefix...)
	}
	for from, cut := 0, 0; from < len(text); {
		if from > 0 && cap(ids)-len(ids) < 1024 { // room for the rest at the rate so far
			ids = slices.Grow(ids, int(1.1*float64(len(ids))*float64(len(text)-from)/float64(from))+16)
		}
		var end int
		end, cut = c.t.pieceEnd(text, from, cut)
		part := text[from:end]
		from = end
		hash := maphash.String(c.seed, part)
		shard := &c.shards[hash%cacheShards]
		n := len(ids)
		var ok bool
		if ids, ok = shard.append(ids, hash, part); ok {
			cached += len(ids) - n
			continue
		}
		ids = c.t.encode(ids, part)
		shard.put(hash, part, ids[n:])
	}
	if addSpecial {
		ids = append(ids, c.t.suffix...)
	}
	return ids, cached
}

// pieceEnd returns the end of the piece that starts at from, itself a safe cut, which depends on nothing behind the piece but the
// character there. cut is the last safe cut that it returned, 0 at first: a text of many short pieces and no safe cut must not be
// searched to its end for each of them.
func (t *Tokenizer) pieceEnd(text string, from, cut int) (end, nextCut int) {
	if cut < min(from+pieceBytes, len(text)) {
		cut = len(text)
		if t.cuts {
			cut = safeCut(text, from+pieceBytes)
		}
	}
	if t.raw == nil {
		return cut, cut
	}
	for i := from; i < cut; {
		_, stop, token := t.raw.next(text[:cut], i)
		if token != nil && stop >= from+turnBytes {
			return stop, cut
		}
		i = stop
	}
	return cut, cut
}

// append appends the ids of the piece with this text, if it is there.
func (s *cacheShard) append(dst []uint32, hash uint64, text string) ([]uint32, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	p, ok := s.entries[hash]
	if !ok || p.text != text {
		return dst, false
	}
	s.unlink(p)
	s.pushFront(p)
	return append(dst, p.ids...), true
}

// put remembers a copy of text and ids, in place of an entry of the same hash.
func (s *cacheShard) put(hash uint64, text string, ids []uint32) {
	if len(text) > maxPieceBytes || len(text)+4*len(ids)+entryOverhead > s.max {
		return
	}
	p := &piece{hash: hash, text: strings.Clone(text), ids: append([]uint32(nil), ids...)}
	s.mu.Lock()
	defer s.mu.Unlock()
	if old, ok := s.entries[hash]; ok {
		s.remove(old)
	}
	s.entries[hash] = p
	s.bytes += p.size()
	s.pushFront(p)
	for s.bytes > s.max {
		s.remove(s.lru.prev)
	}
}

func (s *cacheShard) remove(p *piece) {
	s.unlink(p)
	delete(s.entries, p.hash)
	s.bytes -= p.size()
}

func (s *cacheShard) unlink(p *piece) { p.prev.next, p.next.prev = p.next, p.prev }

func (s *cacheShard) pushFront(p *piece) {
	p.prev, p.next = &s.lru, s.lru.next
	p.next.prev, s.lru.next = p, p
}

// Bytes returns how much memory the cache holds, roughly.
func (c *PrefixCache) Bytes() int {
	n := 0
	for i := range c.shards {
		s := &c.shards[i]
		s.mu.Lock()
		n += s.bytes
		s.mu.Unlock()
	}
	return n
}
