package daemon

import "context"

// IsReady reports whether the service of ctx can do its work and is not about to
// end; without a shell only the latter.
func IsReady(ctx context.Context) bool {
	if ctx.Err() != nil {
		return false
	}
	s := from(ctx)
	if s == nil {
		return true
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.ready[s.name]
}
