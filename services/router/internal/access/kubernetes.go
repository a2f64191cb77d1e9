package access

import (
	"context"
	"crypto/sha256"
	"fmt"
	"sync"
	"time"

	"github.com/kinference/kinference/internal/kube/review"
)

// Reviewer asks the Kubernetes API: *review.Client.
type Reviewer interface {
	// Authenticate finds out whose token it is; nil for nobody's.
	Authenticate(ctx context.Context, token string) (*review.User, error)
	// Allowed tells whether a user may do something with a resource of the group
	// kinference.buoyant.io.
	Allowed(ctx context.Context, u *review.User, resource, verb string) (bool, error)
}

const (
	// remembered is how long an answer counts, and refused how long that a token is
	// nobody's: whoever was given a right just now is not kept waiting.
	remembered = 20 * time.Second
	refused    = 5 * time.Second
	// maxRemembered bounds what is remembered, of users and of rights each.
	maxRemembered = 1024
	// maxReviews bounds the questions under way: wrong tokens must not flood the API.
	maxReviews = 8
	// reviewTimeout bounds one of them.
	reviewTimeout = 5 * time.Second
)

// Kubernetes is a source that asks the Kubernetes API whose a token is
// (TokenReview) and what its user may do (SubjectAccessReview, with group
// kinference.buoyant.io). Answers are remembered for a short while. Use
// NewKubernetes.
type Kubernetes struct {
	api   Reviewer
	clock func() time.Time
	slots chan struct{}

	// Apart, so that a flood of wrong tokens does not crowd out the good ones.
	users   memory[[sha256.Size]byte, *review.User]
	unknown memory[[sha256.Size]byte, bool]
	rights  memory[right, bool]
}

type right struct {
	token [sha256.Size]byte
	Permission
}

// NewKubernetes returns a source with nothing remembered.
func NewKubernetes(api Reviewer) *Kubernetes {
	return &Kubernetes{api: api, clock: time.Now, slots: make(chan struct{}, maxReviews)}
}

// Lookup implements Source.
func (k *Kubernetes) Lookup(ctx context.Context, token string) (*Caller, error) {
	hash := sha256.Sum256([]byte(token))
	u, ok := k.users.get(k.clock(), hash)
	if _, wrong := k.unknown.get(k.clock(), hash); wrong {
		return nil, nil
	}
	if !ok {
		err := k.ask(ctx, func(ctx context.Context) (err error) {
			u, err = k.api.Authenticate(ctx, token)
			return err
		})
		if err != nil {
			return nil, err
		}
		if u == nil {
			k.unknown.put(k.clock(), hash, true, refused)
			return nil, nil
		}
		k.users.put(k.clock(), hash, u, remembered)
	}
	return &Caller{Name: u.Name, Source: "kubernetes", allowed: func(ctx context.Context, p Permission) (bool, error) { return k.allowed(ctx, hash, u, p) }}, nil
}

func (k *Kubernetes) allowed(ctx context.Context, hash [sha256.Size]byte, u *review.User, p Permission) (bool, error) {
	key := right{hash, p}
	if may, ok := k.rights.get(k.clock(), key); ok {
		return may, nil
	}
	may := false
	err := k.ask(ctx, func(ctx context.Context) (err error) {
		may, err = k.api.Allowed(ctx, u, p.Resource, p.Verb)
		return err
	})
	if err != nil {
		return false, err
	}
	keep := remembered
	if !may {
		keep = refused
	}
	k.rights.put(k.clock(), key, may, keep)
	return may, nil
}

// ask waits for a slot and asks.
func (k *Kubernetes) ask(ctx context.Context, question func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, reviewTimeout)
	defer cancel()
	select {
	case k.slots <- struct{}{}:
	case <-ctx.Done():
		return fmt.Errorf("%w: too many are", ErrAway)
	}
	defer func() { <-k.slots }()
	if err := question(ctx); err != nil {
		return fmt.Errorf("%w: %w", ErrAway, err)
	}
	return nil
}

// memory keeps answers until they are too old. Its zero value is empty.
type memory[K comparable, V any] struct {
	mu  sync.Mutex
	all map[K]answer[V]
}

type answer[V any] struct {
	v     V
	until time.Time
}

func (m *memory[K, V]) get(now time.Time, key K) (v V, ok bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	a, ok := m.all[key]
	if !ok || now.After(a.until) {
		return v, false
	}
	return a.v, true
}

func (m *memory[K, V]) put(now time.Time, key K, v V, keep time.Duration) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.all == nil {
		m.all = map[K]answer[V]{}
	}
	if _, there := m.all[key]; !there && len(m.all) >= maxRemembered {
		for k, a := range m.all {
			if now.After(a.until) {
				delete(m.all, k)
			}
		}
		for k := range m.all { // still full: any one makes room
			if len(m.all) < maxRemembered {
				break
			}
			delete(m.all, k)
		}
	}
	m.all[key] = answer[V]{v, now.Add(keep)}
}
