package fleetsim

import "time"

// maxLag is how far, in wall time, an engine may fall behind its own schedule
// before it gives up catching up. Below it a late wake-up shortens the next
// wait, so that errors never add up; above it the machine is too slow for the
// time scale or was stopped, and running iterations in a burst would serve
// requests before they arrived.
const maxLag = 20 * time.Millisecond

// clock is simulated time: seconds since start, passing scale times faster
// than real ones.
type clock struct {
	start time.Time
	scale float64
}

func (c clock) now() float64 { return time.Since(c.start).Seconds() * c.scale }

// until is how long, in wall time, it is to the simulated instant t.
func (c clock) until(t float64) time.Duration {
	return time.Duration(t/c.scale*1e9) - time.Since(c.start)
}
