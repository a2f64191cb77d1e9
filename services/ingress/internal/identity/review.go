package identity

import (
	"context"
	"crypto/sha256"
	"errors"
	"slices"
	"sync"
	"time"
)

const (
	// reviewKept is how long the word of the Kubernetes API about a good token
	// counts, reviewDenied that about a bad one.
	reviewKept, reviewDenied = time.Minute, 10 * time.Second
	// reviewTime bounds a review, maxReviews those at the same time: what anybody
	// can send must not keep the Kubernetes API busy.
	reviewTime, maxReviews = 3 * time.Second, 16
	// maxKept bounds the tokens that are remembered.
	maxKept = 10_000
)

// Reviewer asks Kubernetes for the ServiceAccount (namespace/name) whose token
// this is; empty: the token is not good.
type Reviewer func(ctx context.Context, token, audience string) (account string, err error)

var errBusy = errors.New("too many tokens are being reviewed")

// reviews remembers for a while whose tokens are whose.
type reviews struct {
	ask  Reviewer
	now  func() time.Time
	kept cache[string]
	slot chan struct{}

	mu      sync.Mutex
	pending map[[sha256.Size]byte]chan struct{}
}

func newReviews(ask Reviewer, now func() time.Time) *reviews {
	return &reviews{ask: ask, now: now, slot: make(chan struct{}, maxReviews), pending: map[[sha256.Size]byte]chan struct{}{}}
}

// account returns whose token it is, empty for nobody's.
func (r *reviews) account(ctx context.Context, t *token, audience string) (string, error) {
	now := r.now()
	// A token that says itself that it is of no use here is not asked about.
	if t.expires.IsZero() || !now.Before(t.expires) || !slices.Contains(t.audiences, audience) {
		return "", nil
	}
	sum := hashOf(audience, t.text)
	for {
		if account, ok := r.kept.get(now, sum); ok {
			return account, nil
		}
		r.mu.Lock()
		wait := r.pending[sum]
		if wait == nil {
			r.pending[sum] = make(chan struct{})
		}
		r.mu.Unlock()
		if wait == nil {
			return r.review(ctx, now, sum, t, audience)
		}
		select {
		case <-ctx.Done():
			return "", ctx.Err()
		case <-wait:
		}
		if _, ok := r.kept.get(now, sum); !ok { // the other one got no answer
			return "", errBusy
		}
	}
}

func (r *reviews) review(ctx context.Context, now time.Time, sum [sha256.Size]byte, t *token, audience string) (string, error) {
	defer func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		close(r.pending[sum])
		delete(r.pending, sum)
	}()
	select {
	case r.slot <- struct{}{}:
		defer func() { <-r.slot }()
	default:
		return "", errBusy
	}
	// Others may wait for it, whose client is still there.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), reviewTime)
	defer cancel()
	account, err := r.ask(ctx, t.text, audience)
	if err != nil {
		return "", err
	}
	until := now.Add(reviewDenied)
	if account != "" {
		if until = now.Add(reviewKept); t.expires.Before(until) {
			until = t.expires
		}
	}
	r.kept.put(now, sum, account, until)
	return account, nil
}

// hashOf tells lists of texts apart: their lengths take part.
func hashOf(texts ...string) [sha256.Size]byte {
	h := sha256.New()
	for _, s := range texts {
		n := uint64(len(s))
		h.Write([]byte{byte(n >> 56), byte(n >> 48), byte(n >> 40), byte(n >> 32), byte(n >> 24), byte(n >> 16), byte(n >> 8), byte(n)})
		h.Write([]byte(s))
	}
	return [sha256.Size]byte(h.Sum(nil))
}

// cache keeps values for a while. Its zero value is ready.
type cache[V any] struct {
	mu sync.Mutex
	m  map[[sha256.Size]byte]kept[V]
}

type kept[V any] struct {
	value V
	until time.Time
}

func (c *cache[V]) get(now time.Time, key [sha256.Size]byte) (value V, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	e, ok := c.m[key]
	if !ok || !now.Before(e.until) {
		return value, false
	}
	return e.value, true
}

// put remembers a value. Of a full cache what is over goes, or else any one.
func (c *cache[V]) put(now time.Time, key [sha256.Size]byte, value V, until time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.m == nil {
		c.m = map[[sha256.Size]byte]kept[V]{}
	}
	if len(c.m) >= maxKept {
		for k, e := range c.m {
			if !now.Before(e.until) {
				delete(c.m, k)
			}
		}
	}
	for k := range c.m {
		if len(c.m) < maxKept {
			break
		}
		delete(c.m, k)
	}
	c.m[key] = kept[V]{value, until}
}

// clear forgets everything.
func (c *cache[V]) clear() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.m = nil
}
