package limiter

import "sync"

// cache keeps results of make by name, at most so many; then it starts anew.
type cache[V any] struct {
	mu   sync.Mutex
	most int
	make func(string) (V, error)
	held map[string]V
}

func newCache[V any](most int, make func(string) (V, error)) *cache[V] {
	return &cache[V]{most: most, make: make, held: map[string]V{}}
}

// get returns what was made of name. Errors are not kept.
func (c *cache[V]) get(name string) (V, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if v, ok := c.held[name]; ok {
		return v, nil
	}
	v, err := c.make(name)
	if err != nil {
		return v, err
	}
	if len(c.held) >= c.most {
		clear(c.held)
	}
	c.held[name] = v
	return v, nil
}
