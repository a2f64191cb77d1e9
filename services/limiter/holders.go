package limiter

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kinference/kinference/services/limiter/internal/store"
)

// holders counts the processes that call, over all limiters: each tells the
// store now and then whom it has heard, and learns the number.
type holders struct {
	known atomic.Int64

	mu    sync.Mutex
	heard map[string]struct{}
}

// maxHeard bounds the names between two reports.
const maxHeard = 1000

const holdersInterval = 5 * time.Second

func (h *holders) hear(name string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.heard) < maxHeard {
		h.heard[name] = struct{}{}
	}
	h.known.CompareAndSwap(0, 1)
}

func (h *holders) count() int64 { return h.known.Load() }

// run reports until ctx is done. What cannot be reported now is, the next time.
func (h *holders) run(ctx context.Context, s store.Store) {
	tick := time.NewTicker(holdersInterval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		h.mu.Lock()
		names := make([]string, 0, len(h.heard))
		for name := range h.heard {
			names = append(names, name)
		}
		clear(h.heard)
		h.mu.Unlock()
		if n, err := s.Holders(ctx, names); err == nil {
			h.known.Store(int64(n))
		}
	}
}
