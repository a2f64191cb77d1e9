package parity

import (
	"context"
	"time"

	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
)

const (
	// repeat is the time between two reports without news, by which a router
	// knows that this ingress is alive, and one that restarted learns what its
	// predecessor knew.
	repeat = 30 * time.Second
	// gap is the least time between two reports.
	gap = 200 * time.Millisecond
	// maxVerdicts bounds a report, as the router does.
	maxVerdicts = 20_000
)

// report sends the verdicts when they have changed, and now and then.
func (c *Checker) report(ctx context.Context) {
	timer := time.NewTimer(repeat)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
		case <-c.news:
		}
		after := repeat
		if err := c.set.Report(ctx, c.verdicts()); err != nil {
			after = time.Second
		}
		// Many engines that are probed in a row make one report.
		select {
		case <-ctx.Done():
			return
		case <-time.After(gap):
		}
		timer.Reset(jitter(after))
	}
}

// verdicts is all that is known, what differs first: that must not be cut off.
func (c *Checker) verdicts() *routerv1.ParityReport {
	c.mu.Lock()
	defer c.mu.Unlock()
	out := &routerv1.ParityReport{Ingress: c.set.Name}
	add := func(v *routerv1.Parity, at time.Time) {
		if !at.IsZero() {
			v.CheckedUnixNanos = at.UnixNano()
		}
		if len(out.Verdicts) < maxVerdicts {
			out.Verdicts = append(out.Verdicts, v)
		}
	}
	for id, p := range c.profiles {
		switch {
		case p.cause == count:
			add(&routerv1.Parity{Profile: id, State: differs, Cause: count}, p.since)
		case p.cause != 0:
			add(&routerv1.Parity{Profile: id, Worker: p.set.example, State: differs, Cause: p.cause}, c.workers[p.set.example].checked)
		}
	}
	for _, state := range []routerv1.ParityState{differs, agrees} {
		for uid, w := range c.workers {
			if w.state == state {
				add(&routerv1.Parity{Worker: uid, State: state, Cause: w.cause}, w.checked)
			}
		}
	}
	return out
}
