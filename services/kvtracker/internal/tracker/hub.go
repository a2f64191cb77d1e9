package tracker

import "sync"

// hub tells watchers which workers changed. A watcher that is slow finds a
// longer list of ids when it comes back, never old states: it reads the state
// when it sends it. The list is bounded by the number of workers.
type hub struct {
	mu       sync.Mutex
	watchers map[*watcher]struct{}
}

// watcher is one WatchWorkers call.
type watcher struct {
	hub   *hub
	wake  chan struct{} // holds one token while there is something to send
	now   chan struct{} // holds one token after a change that cannot wait
	dirty map[string]struct{}
}

// watch returns a watcher of all changes from now on; the caller closes it.
func (h *hub) watch() *watcher {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.watchers == nil {
		h.watchers = map[*watcher]struct{}{}
	}
	w := &watcher{hub: h, wake: make(chan struct{}, 1), now: make(chan struct{}, 1), dirty: map[string]struct{}{}}
	h.watchers[w] = struct{}{}
	return w
}

func (w *watcher) close() {
	w.hub.mu.Lock()
	defer w.hub.mu.Unlock()
	delete(w.hub.watchers, w)
}

// notify marks a worker as changed. An urgent change, the loss of a cache, does
// not wait for others to gather: until watchers know of it they count on what
// is gone.
func (h *hub) notify(id string, urgent bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for w := range h.watchers {
		w.dirty[id] = struct{}{}
		signal(w.wake)
		if urgent {
			signal(w.now)
		}
	}
}

// wake lets all watchers send a message at once, whether workers have changed or not.
func (h *hub) wake() {
	h.mu.Lock()
	defer h.mu.Unlock()
	for w := range h.watchers {
		signal(w.wake)
		signal(w.now)
	}
}

func signal(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// take returns the workers that changed since the last call, in no order.
func (w *watcher) take() []string {
	w.hub.mu.Lock()
	defer w.hub.mu.Unlock()
	ids := make([]string, 0, len(w.dirty))
	for id := range w.dirty {
		ids = append(ids, id)
	}
	clear(w.dirty)
	return ids
}
