package tracker

import (
	"fmt"
	"runtime"
	"testing"
	"time"

	"github.com/kinference/kinference/internal/kvindex"
	kvtrackerv1 "github.com/kinference/kinference/proto/gen/kinference/kvtracker/v1"
)

// sample is a report of worker one, taken ago before the clock's now.
func (f *fixture) sample(running float64, ago time.Duration) *kvtrackerv1.WorkerReport {
	return &kvtrackerv1.WorkerReport{
		Worker: one.ID(), WorkerSet: one.SetName(), Ready: true,
		Load:             &kvtrackerv1.Load{Running: running, Waiting: 2 * running, KvUsage: running / 100},
		SampledUnixNanos: f.clock.at.Add(-ago).UnixNano(), BlockSize: 16, TotalBlocks: 1000,
	}
}

func TestReports(t *testing.T) {
	f := newFixture(t)
	step := func(name, want string) {
		t.Helper()
		got := "gone"
		if s := f.state(one.ID()); s != nil {
			got = fmt.Sprintf("ready %v running %v mean %.2f age %v", s.GetReady(), s.GetLoad().GetRunning(),
				s.GetLoadMean_30S().GetRunning(), s.GetSampleAge().AsDuration())
		}
		if got != want {
			t.Errorf("%s: got %s, want %s", name, got, want)
		}
	}
	pass := func(d time.Duration) { f.clock.at = f.clock.at.Add(d) }

	step("unknown", "gone")
	f.report(f.sample(1, 5*time.Second))
	step("stored a while ago", "ready false running 1 mean 1.00 age 5s")
	f.report(f.sample(3, 0))
	step("fresh", "ready true running 3 mean 1.00 age 0s")
	pass(time.Second)
	f.report(f.sample(9, 1500*time.Millisecond))
	step("older one comes late", "ready true running 3 mean 1.00 age 1s")
	f.report(f.sample(5, 0))
	step("newer", "ready true running 5 mean 1.67 age 0s")
	pass(1900 * time.Millisecond)
	step("still fresh", "ready true running 5 mean 1.67 age 1.9s")
	pass(200 * time.Millisecond)
	step("stale", "ready false running 5 mean 1.67 age 2.1s")
	notReady := f.sample(5, 0)
	notReady.Ready = false
	f.report(notReady)
	step("not ready", "ready false running 5 mean 3.00 age 0s")

	gone := f.sample(0, 0)
	gone.Gone = true
	f.report(gone)
	step("left", "gone")
	f.report(f.sample(1, time.Millisecond))
	step("late report", "gone")
	pass(time.Second)
	f.report(f.sample(1, 0))
	step("back", "ready true running 1 mean 1.00 age 0s")

	if _, ok := f.index.Load().Stats(one.ID()); !ok {
		t.Error("the index is not configured")
	}
	if s := f.state(one.ID()); s.GetBlockSize() != 16 || s.GetTotalBlocks() != 1000 || s.GetIndex().GetLive() || s.GetIndex().GetLastSeq() != -1 {
		t.Errorf("state is %v", s)
	}
	f.send(one, batch("e", 0, 1))
	if s := f.state(one.ID()); s.GetBlockSize() != 2 || s.GetIndex().GetBlocks() != 2 || !s.GetIndex().GetLive() {
		t.Errorf("state with events is %v", s)
	}
}

// TestClockSetBack covers a relay whose clock was ahead: its workers must not
// stay without a sample until the time of the newest report has come again.
func TestClockSetBack(t *testing.T) {
	f := newFixture(t)
	f.report(f.sample(7, -time.Hour))
	f.clock.at = f.clock.at.Add(time.Second)
	f.report(f.sample(1, 0))
	if got := f.state(one.ID()).GetLoad().GetRunning(); got != 7 {
		t.Errorf("running %v while the newest report is fresh, want its 7", got)
	}
	f.clock.at = f.clock.at.Add(staleAfter)
	f.report(f.sample(3, 0))
	s := f.state(one.ID())
	if !s.GetReady() || s.GetLoad().GetRunning() != 3 || s.GetLoadMean_30S().GetRunning() != 3 {
		t.Errorf("after the clock was set back: %v", s)
	}
	f.clock.at = f.clock.at.Add(3 * time.Second)
	f.report(f.sample(4, 9*time.Second)) // stored a while ago
	if got := f.state(one.ID()); got.GetReady() || got.GetLoad().GetRunning() != 3 {
		t.Errorf("an old report was taken for news: %v", got)
	}
}

// TestMatchDoesNotWaitForReports: a report may change the index's options while
// the index is busy with that worker.
func TestMatchDoesNotWaitForReports(t *testing.T) {
	f := newFixture(t)
	f.send(one, batch("e", 0, 1))
	reported := make(chan struct{})
	f.index.Load().Blocks(one.ID(), func(kvindex.Block) bool { // holds the index's lock on the worker
		began := make(chan struct{})
		go func() {
			close(began)
			f.report(f.sample(0, 0))
			close(reported)
		}()
		<-began
		for t.Context().Err() == nil { // until the report is entered
			f.mu.RLock()
			w := f.workers[one.ID()]
			entered := w.report != nil
			f.mu.RUnlock()
			if entered {
				return false
			}
			runtime.Gosched()
		}
		return false
	})
	<-reported
}

// TestLastCopyRemovals checks that the policy of a report reaches the index.
func TestLastCopyRemovals(t *testing.T) {
	for _, lastCopy := range []bool{false, true} {
		f := newFixture(t)
		r := f.sample(0, 0)
		r.RemovalsLastCopy = lastCopy
		f.report(r)
		f.send(one, raw("e", 0, block(0), block(0), remove(0)))
		if got, want := f.blocks()[one.ID()] == 0, lastCopy; got != want {
			t.Errorf("last copy %v: block is gone: %v", lastCopy, got)
		}
	}
}

// TestForgotten covers workers that left while no relay ran: they go when other
// workers report and they do not, but not because all reports have ceased.
func TestForgotten(t *testing.T) {
	f := newFixture(t)
	f.send(one, batch("e", 0, 1))
	f.send(two, batch("e", 0, 1))
	f.clock.at = f.clock.at.Add(time.Hour)
	f.sweep()
	if got := len(f.blocks()); got != 2 {
		t.Errorf("%d workers while nobody reports, want 2", got)
	}
	f.report(f.sample(0, 0))
	f.sweep()
	if got := f.blocks(); len(got) != 1 || got[one.ID()] != 2 {
		t.Errorf("workers are %v, want only one", got)
	}
	if _, ok := f.index.Load().Stats(two.ID()); ok {
		t.Error("the index still knows the worker that left")
	}
}

func TestCounts(t *testing.T) {
	f := newFixture(t)
	f.send(one, batch("e", 0, 4))
	f.send(two, batch("e", 1, 1))
	f.send(two, control("suspend", "e", 2, ""))
	r := f.sample(0, 0)
	r.TotalBlocks = 3
	f.report(r)
	c := f.count()
	want := counts{excess: 2, known: 2, ready: 1, suspended: 1, incomplete: 1}
	want.blocks[kvindex.GPU] = 5
	if c != want {
		t.Errorf("got %+v, want %+v", c, want)
	}
}
