package tracker

import (
	"time"

	"github.com/kinference/kinference/internal/shard"
	kvtrackerv1 "github.com/kinference/kinference/proto/gen/kinference/kvtracker/v1"
)

// Shard is the part of the worker sets that a tracker follows. The zero value is all.
//
// A tracker reads the whole stream, because which sets there will be is not known; what is
// of others costs it some hundred nanoseconds a message and no memory.
type Shard struct{ Index, Count int }

func (s Shard) holds(set string) bool { return s.Count <= 1 || shard.Of(set, s.Count) == s.Index }

func (s Shard) proto() *kvtrackerv1.Shard {
	return &kvtrackerv1.Shard{Index: uint32(s.Index), Count: uint32(max(s.Count, 1))}
}

// lateAfter is how old the next message of the stream may be before the tracker calls itself
// late. Replicas that are not are asked instead.
const lateAfter = 2 * time.Second

// follows is how the tracker follows the stream. Guarded by Tracker.mu.
type follows struct {
	state   kvtrackerv1.TrackerState
	pending uint64    // messages behind the last one applied
	stored  time.Time // when that was stored
	broken  bool      // reading was interrupted and has not gone on
}

// setCaughtUp notes that the index covers all that the stream held at the start.
func (t *Tracker) setCaughtUp() {
	t.mu.Lock()
	t.caughtUp = true
	t.mu.Unlock()
	t.follow(true)
}

// CaughtUp tells whether the index covers all that the stream held at the start.
func (t *Tracker) CaughtUp() bool {
	t.mu.RLock()
	defer t.mu.RUnlock()
	return t.caughtUp
}

// reading notes that the stream is read, and how much of it waits.
func (t *Tracker) reading(pending uint64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.follows.pending, t.follows.broken = pending, false
}

func (t *Tracker) interrupted() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.follows.broken = true
}

// follow tells watchers when the tracker starts or ceases to be one to ask.
func (t *Tracker) follow(connected bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	f := &t.follows
	state := kvtrackerv1.TrackerState_TRACKER_STATE_FOLLOWS
	switch {
	case !t.caughtUp:
		state = kvtrackerv1.TrackerState_TRACKER_STATE_REBUILDING
	case !connected || f.broken || f.pending > 0 && t.now().Sub(f.stored) > lateAfter:
		state = kvtrackerv1.TrackerState_TRACKER_STATE_LATE
	}
	if state != f.state {
		f.state = state
		t.hub.wake()
	}
}

// tracking is the state as watchers are told.
func (t *Tracker) tracking() kvtrackerv1.TrackerState {
	t.mu.RLock()
	defer t.mu.RUnlock()
	if t.follows.state == kvtrackerv1.TrackerState_TRACKER_STATE_UNSPECIFIED {
		return kvtrackerv1.TrackerState_TRACKER_STATE_REBUILDING
	}
	return t.follows.state
}
