//go:build !linux

package fleetsim

import "time"

// alarm wakes one goroutine at given instants, as exactly as the runtime's
// timers do.
type alarm struct{ done chan struct{} }

func newAlarm() *alarm { return &alarm{make(chan struct{})} }

// wait returns when d has passed, or false if close was called.
func (a *alarm) wait(d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-a.done:
		return false
	}
}

// close ends a wait under way and all later ones.
func (a *alarm) close() { close(a.done) }
