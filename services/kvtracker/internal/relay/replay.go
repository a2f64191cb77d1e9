package relay

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/kinference/kinference/internal/vllm"
	"github.com/kinference/kinference/internal/zmtp"
)

const (
	// replayChunk is when a replay is cut off and what came so far is passed on;
	// the rest is asked for again.
	replayChunk = 8 << 20
	// replayTimeout bounds the wait for the first message: an engine serves
	// replays between its steps, every 0.1 s when idle.
	replayTimeout = 3 * time.Second
	// replayPause bounds the wait for each further one. When an engine's ROUTER
	// socket is full it drops the rest, the end marker too, so silence is common.
	replayPause = 300 * time.Millisecond
	// replayRest is how long after a failure a replay is tried only once, so that
	// an engine whose replay endpoint is wrong does not stall at each gap.
	replayRest = 30 * time.Second
	// holeTries is how often a hole inside a replay is asked for again: the
	// engine's socket drops when we read too slowly.
	holeTries = 3
)

// syncMode is why a link replays, which decides what follows from failure.
type syncMode uint8

const (
	// syncConnect: it is unknown who answers and what was missed.
	syncConnect syncMode = iota
	// syncGap: the process is the same, batches are missing.
	syncGap
	// syncIdle: nothing is known to be missing.
	syncIdle
)

// replayed is a batch of a replay.
type replayed struct {
	seq     uint64
	payload []byte
}

// errHole is a sequence that a replay skips.
type errHole struct{ next uint64 }

func (e errHole) Error() string { return fmt.Sprintf("replay goes on at %d", e.next) }

// sync makes what is published equal to what the engine has, by replay. It
// returns false if the engine gave no answer, or its connection was lost, which
// the next item then tells.
func (l *link) sync(mode syncMode) bool {
	s := l.session
	if mode == syncConnect && l.digest == "" && l.next > 0 {
		// The epoch is empty, and nothing would tell whether the engine that
		// answers is the one whose numbers it counts.
		l.known, l.why = false, reasonUnverified
	}
	ok := l.replayAll(mode, s)
	if l.session != s || s.ctx.Err() != nil {
		return false
	}
	if !ok && mode == syncConnect {
		// What was missed is unknown, and so is who answers: start from nothing.
		if l.known {
			l.why = reasonUnverified
		}
		l.begin(0, "")
	}
	l.resume()
	return ok
}

func (l *link) replayAll(mode syncMode, s *session) bool {
	if l.replay == "" {
		return false
	}
	if mode != syncIdle {
		l.relay.metrics.replay(l.labels)
	}
	deadline := time.Now().Add(l.relay.timing.patience)
	if time.Since(l.replayFailed) < replayRest {
		deadline = time.Now()
	}
	hole, holes := uint64(0), 0
	for try := 0; ; try++ {
		before := l.next
		more, err := l.catchUp(mode, s)
		if l.session != s || s.ctx.Err() != nil {
			return false
		}
		if err == nil && !more {
			return true
		}
		if h := (errHole{}); errors.As(err, &h) {
			if hole != l.next {
				hole, holes = l.next, 0
			}
			if holes++; holes >= holeTries {
				l.why = reasonGap
				l.begin(h.next, "")
			}
			continue
		}
		if err == nil || l.next != before { // progress
			try, deadline = 0, time.Now().Add(l.relay.timing.patience)
		}
		if err != nil {
			if time.Now().After(deadline) {
				l.log.Warn("engine does not replay its events", "err", err)
				l.relay.metrics.replayFailed(l.labels)
				l.replayFailed = time.Now()
				return false
			}
			pause(s.ctx, try, 20*time.Millisecond, 500*time.Millisecond)
		}
	}
}

// catchUp replays once, from the last published batch on, and publishes what
// comes. more tells that the engine has more.
func (l *link) catchUp(mode syncMode, s *session) (more bool, err error) {
	from, verify := uint64(0), false
	switch {
	case l.known && l.digest != "":
		from, verify = l.next-1, true
	case l.known:
		from = l.next
	}
	batches, end, err := l.fetch(s.ctx, from)
	if len(batches) == 0 && err != nil {
		return true, err
	}
	if verify {
		switch {
		case len(batches) == 0, batches[0].seq == from && digest(batches[0].payload) != l.digest:
			// Another process: ask it for all that it has.
			l.known, l.why = false, reasonRestart
			l.relay.metrics.restart(l.labels)
			if mode != syncConnect {
				l.reconnect(reasonRestart)
			}
			return true, nil
		case batches[0].seq > from:
			l.why = reasonOverrun
			if mode == syncConnect {
				l.why = reasonRestart
				l.relay.metrics.restart(l.labels)
			}
			l.begin(batches[0].seq, "")
		}
	}
	if !l.known {
		first := uint64(0)
		if len(batches) > 0 {
			first = batches[0].seq
		}
		l.begin(first, "")
	}
	push := func(e entry) bool { return l.out.push(s.ctx, e) == nil }
	for _, b := range batches {
		switch {
		case b.seq < l.next:
			continue
		case b.seq > l.next && l.next == 0:
			// Nothing is published of this epoch, so nothing is lost by starting
			// where the engine's buffer starts.
			l.why = reasonOverrun
			l.begin(b.seq, "")
		case b.seq > l.next:
			return true, errHole{b.seq}
		}
		if !l.accept(b.seq, b.payload, push) {
			return true, s.ctx.Err()
		}
	}
	return !end, err
}

// fetch asks the engine for its batches from a number on, and returns what came
// until the end, the limit or an error.
func (l *link) fetch(ctx context.Context, from uint64) (batches []replayed, end bool, err error) {
	select {
	case l.relay.replays <- struct{}{}:
		defer func() { <-l.relay.replays }()
	case <-ctx.Done():
		return nil, false, ctx.Err()
	}
	conn, err := zmtp.Dial(ctx, l.replay, zmtp.Dealer, zmtp.Options{MaxMessage: vllm.MaxPayload + 4096})
	if err != nil {
		return nil, false, fmt.Errorf("dial replay: %w", err)
	}
	defer conn.Close()
	if err := conn.Send(vllm.ReplayRequest(from)...); err != nil {
		return nil, false, fmt.Errorf("request replay: %w", err)
	}
	timeout := replayTimeout
	for size := 0; size < replayChunk; {
		if err := conn.SetReadDeadline(time.Now().Add(timeout)); err != nil {
			return batches, false, fmt.Errorf("read replay: %w", err)
		}
		frames, err := conn.Recv()
		if err != nil {
			return batches, false, fmt.Errorf("read replay: %w", err)
		}
		seq, payload, last, err := vllm.ParseReplay(frames)
		if err != nil {
			return batches, false, fmt.Errorf("read replay: %w", err)
		}
		if last {
			return batches, true, nil
		}
		timeout = replayPause
		n := len(batches)
		if seq < from || n > 0 && seq <= batches[n-1].seq {
			continue // not asked for, or twice
		}
		batches = append(batches, replayed{seq, payload})
		size += len(payload)
		if n > 0 && seq != batches[n-1].seq+1 {
			return batches, false, nil // a hole: what follows is asked for again
		}
	}
	return batches, false, nil
}
