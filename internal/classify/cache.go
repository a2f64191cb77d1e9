package classify

import (
	"container/list"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"sync"
)

// cache keeps what parts yielded, by a keyed hash of text, role and versions:
// nobody who sees a key can tell the text, and nobody who sends text can make
// two keys collide.
type cache struct {
	secret [32]byte
	limit  int

	mu    sync.Mutex
	used  int
	order *list.List // newest first
	byKey map[cacheKey]*list.Element
}

type cacheKey [16]byte

type cached struct {
	key  cacheKey
	res  *partResult
	size int
}

// newCache returns one that holds about limit bytes; 0 or less: nothing.
func newCache(limit int) *cache {
	c := &cache{limit: limit, order: list.New(), byKey: map[cacheKey]*list.Element{}}
	_, _ = rand.Read(c.secret[:]) // never fails
	return c
}

func (c *cache) key(text string, role Role, custom *Custom) cacheKey {
	h := hmac.New(sha256.New, c.secret[:])
	var head [16]byte
	head[0] = byte(role)
	binary.LittleEndian.PutUint64(head[8:], uint64(len(text)))
	h.Write(head[:])
	h.Write([]byte(detectorVersion))
	if custom != nil {
		h.Write([]byte(custom.version))
	}
	h.Write([]byte{0})
	h.Write([]byte(text))
	var sum [32]byte
	return cacheKey(h.Sum(sum[:0])[:16])
}

func (c *cache) get(k cacheKey) *partResult {
	c.mu.Lock()
	defer c.mu.Unlock()
	e := c.byKey[k]
	if e == nil {
		return nil
	}
	c.order.MoveToFront(e)
	return e.Value.(*cached).res
}

func (c *cache) put(k cacheKey, r *partResult) {
	size := 1024 + 96*len(r.hits)
	if size > c.limit {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.byKey[k] != nil {
		return
	}
	c.byKey[k] = c.order.PushFront(&cached{k, r, size})
	for c.used += size; c.used > c.limit; {
		e := c.order.Back()
		old := c.order.Remove(e).(*cached)
		delete(c.byKey, old.key)
		c.used -= old.size
	}
}

// Cached is how many parts the conversation cache holds, and about how many bytes.
func (c *Classifier) Cached() (parts, bytes int) {
	c.cache.mu.Lock()
	defer c.cache.mu.Unlock()
	return len(c.cache.byKey), c.cache.used
}
