package kvtracker_test

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/kinference/kinference/internal/fleetsim"
	"github.com/kinference/kinference/internal/natsd"
	"github.com/kinference/kinference/internal/testenv"
	"github.com/kinference/kinference/internal/vllm"
	"github.com/kinference/kinference/services/kvtracker"
)

// TestIndexEqualsTheFleet runs the whole chain: simulated workers with two
// ranks each, whose event sockets drop, duplicate and reorder, relay, NATS,
// tracker. Under load there are evictions, cache wipes and engine restarts, the
// relay and the tracker are restarted; each time the traffic rests, the index
// equals the true caches block by block.
func TestIndexEqualsTheFleet(t *testing.T) {
	faults := fleetsim.Faults{DropEvents: .01, DuplicateEvents: .01, ReorderEvents: .01}
	var workers []*fleetsim.Worker
	for i, v := range []vllm.Version{vllm.V0_24, vllm.V0_23, vllm.V0_26} {
		workers = append(workers, startWorker(t, fleetsim.Config{
			Name: uid(i), Profile: profile(400), Ranks: 2, TimeScale: 400, Seed: int64(i), Version: v, LoRAs: loras, Faults: faults,
		}))
	}
	f := newFleet(t, testenv.NATS(t), kvtracker.Config{}, workers...)
	blocks := func() (n uint64) {
		for _, w := range workers {
			for r := range 2 {
				s := w.Stats(r)
				n += s.Stored + s.Removed
			}
		}
		return n
	}
	const perRound = 19_000
	var total uint64
	start := time.Now()
	round := func(what string, between func()) {
		t.Helper()
		before := blocks()
		stop := f.load(4)
		target := before + perRound
		f.until(what, func() bool { return blocks() >= target })
		total += blocks() - before
		if between != nil {
			between()
			before = blocks()
			target = before + perRound
			f.until(what, func() bool { return blocks() >= target })
			total += blocks() - before
		}
		answered := stop()
		// A loss at the very end shows late, at the relay's next look at an idle
		// engine: not what this test is about.
		for _, w := range workers {
			w.SetFaults(fleetsim.Faults{})
		}
		f.flush()
		t.Logf("%v: %s has ended", time.Since(start), what)
		defer func() {
			for _, w := range workers {
				w.SetFaults(faults)
			}
		}()
		f.check(fmt.Sprintf("%s, %d requests, %d blocks stored or removed so far", what, answered, total))
	}
	round("load", nil)
	round("cache wipes", func() {
		for _, w := range workers {
			w.WipeCache()
		}
	})
	round("engine restart", func() {
		if err := workers[1].RestartEngine(); err != nil {
			t.Fatal(err)
		}
	})
	round("relay restart", func() { f.stopRelay(); f.startRelay() })
	round("tracker restart", func() { f.stopTracker(); f.startTracker() })
	events := f.metric("kinference_kvtracker_events_total")
	t.Logf("%.0f events of the stream were applied by the last tracker; %v", events, time.Since(start))
	if events < 100_000 {
		t.Errorf("%.0f events, want 100,000", events)
	}
	if n := f.metric("kinference_kvtracker_blocks"); n < 1000 {
		t.Errorf("the gauge shows %v blocks", n)
	}
}

// TestTrackerRestart rebuilds the index from the stream alone.
func TestTrackerRestart(t *testing.T) {
	w := startWorker(t, fleetsim.Config{Profile: profile(200), Ranks: 2, TimeScale: 400, LoRAs: loras})
	f := newFleet(t, testenv.NATS(t), kvtracker.Config{}, w)
	stop := f.load(4)
	f.until("load", func() bool { return w.Stats(0).Removed > 500 && w.Stats(1).Removed > 500 })
	stop()
	f.flush()
	f.check("before")
	f.stopRelay() // it could not help any more
	f.stopTracker()
	f.startTracker()
	f.check("after")
}

// TestNATSRestart covers both kinds of storage: with a disk the stream goes on,
// without one the relay publishes anew what the engines still know.
func TestNATSRestart(t *testing.T) {
	for _, file := range []bool{true, false} {
		t.Run(fmt.Sprintf("file=%v", file), func(t *testing.T) {
			w := startWorker(t, fleetsim.Config{Profile: profile(200), Ranks: 1, TimeScale: 400, LoRAs: loras})
			o := natsd.Options{Dir: t.TempDir(), Port: testenv.FreePort(t)}
			server := startNATS(t, o)
			t.Cleanup(func() { server.Stop() })
			f := newFleet(t, server.URL(), kvtracker.Config{StreamFile: file}, w)
			stop := f.load(4)
			f.until("load", func() bool { return w.Stats(0).Removed > 300 })
			server.Stop()
			removed := w.Stats(0).Removed
			f.until("load while NATS is away", func() bool { return w.Stats(0).Removed > removed+100 })
			server = startNATS(t, o)
			f.until("load after NATS is back", func() bool { return w.Stats(0).Removed > removed+300 })
			if n := stop(); n == 0 {
				t.Error("no request was answered")
			}
			f.flush()
			f.check("after NATS was restarted")
			f.stopTracker()
			f.startTracker()
			f.check("rebuilt from the stream")
		})
	}
}

// TestRestartOnTheSameAddress covers an engine that comes back where it was:
// nothing that its predecessor held may be a hit.
func TestRestartOnTheSameAddress(t *testing.T) {
	for _, replay := range []int{0, fleetsim.Off} {
		t.Run(fmt.Sprintf("replay=%v", replay == 0), func(t *testing.T) {
			w := startWorker(t, fleetsim.Config{Profile: profile(200), ReplayPort: replay})
			f := newFleet(t, testenv.NATS(t), kvtracker.Config{}, w)
			// Without replay nobody hears what the engine said before the relay listened.
			var prompt []uint32
			first := uint32(0)
			f.until("index", func() bool {
				first++
				prompt = slices.Repeat([]uint32{first}, 40)
				return generate(w, 0, prompt, 1, "", "") == nil && f.eventuallyIn(time.Second, func() bool { return f.depth(id(0, 0), 4, prompt) == len(prompt)/4 })
			})
			epoch := f.state(id(0, 0)).GetEpoch()
			addr := w.EventsAddr(0)
			if err := w.RestartEngine(); err != nil {
				t.Fatal(err)
			}
			if got := w.EventsAddr(0); got != addr {
				t.Fatalf("the engine moved from %s to %s", addr, got)
			}
			f.until("no hit", func() bool { return f.depth(id(0, 0), 4, prompt) == 0 })
			// Without replay nobody hears what the new engine says before the relay is
			// back, so it is asked until it is heard.
			n := uint32(1000)
			f.until("new events", func() bool {
				n++
				other := []uint32{n, n, n, n, n}
				return generate(w, 0, other, 1, "", "") == nil && f.depth(id(0, 0), 4, other) == 1
			})
			if got := f.depth(id(0, 0), 4, prompt); got != 0 {
				t.Errorf("%d blocks of the dead engine are hits", got)
			}
			if got := f.state(id(0, 0)).GetEpoch(); got == epoch {
				t.Error("the epoch is the same")
			}
			client.CloseIdleConnections()
		})
	}
}

// TestGapWithoutReplay loses events of one worker for good: its blocks go, those
// of the other worker and the other rank stay.
func TestGapWithoutReplay(t *testing.T) {
	var workers []*fleetsim.Worker
	for i := range 2 {
		workers = append(workers, startWorker(t, fleetsim.Config{Name: uid(i), Profile: profile(200), Ranks: 2, ReplayPort: fleetsim.Off}))
	}
	f := newFleet(t, testenv.NATS(t), kvtracker.Config{}, workers...)
	prompt := []uint32{1, 2, 3, 4, 5, 6, 7, 8, 9}
	each := func(do func(i, r int)) {
		for i := range workers {
			for r := range 2 {
				do(i, r)
			}
		}
	}
	each(func(i, r int) {
		// A relay that has no replay knows nothing of what came before it.
		f.until("live", func() bool {
			s := f.state(id(i, r))
			return s.GetReady() && s.GetEpoch() != ""
		})
		if err := generate(workers[i], r, prompt, 1, "", ""); err != nil {
			t.Fatal(err)
		}
		f.until("index", func() bool { return f.depth(id(i, r), 4, prompt) == 2 })
	})
	workers[0].SetFaults(fleetsim.Faults{DropNext: 1})
	for _, p := range [][]uint32{{11, 12, 13, 14, 15}, {21, 22, 23, 24, 25}} {
		if err := generate(workers[0], 0, p, 1, "", ""); err != nil {
			t.Fatal(err)
		}
	}
	f.until("what came after the gap", func() bool { return f.depth(id(0, 0), 4, []uint32{21, 22, 23, 24}) == 1 })
	each(func(i, r int) {
		want := 2
		if i == 0 && r == 0 {
			want = 0
		}
		if got := f.depth(id(i, r), 4, prompt); got != want {
			t.Errorf("%s holds %d blocks, want %d", id(i, r), got, want)
		}
	})
	f.until("incomplete", func() bool { return !f.state(id(0, 0)).GetIndex().GetComplete() })
	client.CloseIdleConnections()
}

// TestWorkerLeaves takes a worker out of the catalog.
func TestWorkerLeaves(t *testing.T) {
	workers := []*fleetsim.Worker{
		startWorker(t, fleetsim.Config{Name: "a", Profile: profile(200)}),
		startWorker(t, fleetsim.Config{Name: "b", Profile: profile(200)}),
	}
	f := newFleet(t, testenv.NATS(t), kvtracker.Config{}, workers...)
	f.flush()
	f.check("before")
	for i := range workers {
		f.until("ready", func() bool {
			s := f.state(id(i, 0))
			return s.GetReady() && s.GetTotalBlocks() == 200 && s.GetBlockSize() == 4 && s.GetWorkerSet() == "demo/sim"
		})
	}
	f.workers = workers[:1]
	f.list()
	f.until("gone", func() bool { return f.state(id(1, 0)) == nil })
	f.check("after")
	f.stopTracker()
	f.startTracker()
	f.check("rebuilt")
	// Its report says that it left, and its last message in the stream does; the
	// second may have come after the new tracker had caught up.
	f.until("gone for the new tracker", func() bool { return f.state(id(1, 0)) == nil })
	// A dead worker is not ready, and says so while it is still listed.
	workers[0].Kill()
	f.until("not ready", func() bool { s := f.state(id(0, 0)); return s != nil && !s.GetReady() })
}
