package kvtracker_test

import (
	"context"
	"testing"

	"connectrpc.com/connect"
	"github.com/google/go-cmp/cmp"

	"github.com/kinference/kinference/internal/fleetsim"
	"github.com/kinference/kinference/internal/natsd"
	"github.com/kinference/kinference/internal/shard"
	"github.com/kinference/kinference/internal/testenv"
	kvtrackerv1 "github.com/kinference/kinference/proto/gen/kinference/kvtracker/v1"
	"github.com/kinference/kinference/services/kvtracker"
)

// another starts one more tracker of a fleet.
func (f *fleet) another(config kvtracker.Config) *fleet {
	f.t.Helper()
	config.NATSURL = f.config.NATSURL
	g := &fleet{t: f.t, config: config, workers: f.workers}
	g.startTracker()
	return g
}

// TestLateReplica starts a second tracker of a fleet that has evicted for a while: once it
// says that it is ready it answers as the first one does.
func TestLateReplica(t *testing.T) {
	w := startWorker(t, fleetsim.Config{Profile: profile(200), Ranks: 2, TimeScale: 400, LoRAs: loras})
	f := newFleet(t, testenv.NATS(t), kvtracker.Config{}, w)
	stop := f.load(4)
	f.until("load", func() bool { return w.Stats(0).Removed > 300 && w.Stats(1).Removed > 300 })
	late := f.another(kvtracker.Config{}) // it is ready when this returns, under load
	if got := late.tracking(); got != kvtrackerv1.TrackerState_TRACKER_STATE_FOLLOWS {
		t.Errorf("a tracker that is ready is %v", got)
	}
	removed := w.Stats(0).Removed
	f.until("more load", func() bool { return w.Stats(0).Removed > removed+100 })
	stop()
	f.flush()
	f.check("first tracker")
	late.check("late tracker")
	f.stopTracker()
	late.check("late tracker, alone")
}

// tracking is what a tracker says of itself.
func (f *fleet) tracking() kvtrackerv1.TrackerState {
	f.t.Helper()
	ctx, cancel := context.WithTimeout(f.t.Context(), patience)
	defer cancel()
	stream, err := f.client.WatchWorkers(ctx, &kvtrackerv1.WatchWorkersRequest{})
	if err != nil {
		f.t.Fatal(err)
	}
	defer stream.Close()
	if !stream.Receive() {
		f.t.Fatal(stream.Err())
	}
	return stream.Msg().GetState()
}

// TestShards: of two shards the one that holds the worker set knows it all, and the other one
// nothing, and refuses to be asked.
func TestShards(t *testing.T) {
	w := startWorker(t, fleetsim.Config{Profile: profile(200), Ranks: 2, TimeScale: 400, LoRAs: loras})
	url := testenv.NATS(t)
	f := newFleet(t, url, kvtracker.Config{}, w)
	stop := f.load(2)
	f.until("load", func() bool { return w.Stats(0).Removed > 100 && w.Stats(1).Removed > 100 })
	stop()
	f.flush()
	f.check("one tracker for all")
	const set = "demo/sim"
	mine := shard.Of(set, 2)
	holds, other := f.another(kvtracker.Config{Shards: 2, Shard: mine + 2}), f.another(kvtracker.Config{Shards: 2, Shard: 1 - mine})
	holds.check("its shard")
	if got := other.state(id(0, 0)); got != nil {
		t.Errorf("the other shard knows %v", got)
	}
	_, err := other.client.Match(t.Context(), &kvtrackerv1.MatchRequest{Queries: []*kvtrackerv1.Query{{WorkerSet: set, BlockSize: 4, BlockHashes: []uint64{1}}}})
	if diff := cmp.Diff(connect.CodeOf(err), connect.CodeFailedPrecondition); diff != "" {
		t.Errorf("the other shard is asked (-got +want):\n%s", diff)
	}
	for h, holders := range other.holders(4, f.truth(0, 0)) {
		t.Errorf("block %x is held by %v in the other shard", h, holders)
	}
}

// TestCutOffTrackerSaysSo: a tracker that hears nothing is late, so that replicas are asked,
// until it has applied what it missed.
func TestCutOffTrackerSaysSo(t *testing.T) {
	w := startWorker(t, fleetsim.Config{Profile: profile(200), TimeScale: 400})
	o := natsd.Options{Dir: t.TempDir(), Port: testenv.FreePort(t)}
	server := startNATS(t, o)
	t.Cleanup(func() { server.Stop() })
	f := newFleet(t, server.URL(), kvtracker.Config{StreamFile: true}, w)
	tracking := func(want kvtrackerv1.TrackerState) func() bool {
		return func() bool { return f.tracking() == want }
	}
	f.until("follows", tracking(kvtrackerv1.TrackerState_TRACKER_STATE_FOLLOWS))
	server.Stop()
	f.until("late", tracking(kvtrackerv1.TrackerState_TRACKER_STATE_LATE))
	server = startNATS(t, o)
	f.until("follows again", tracking(kvtrackerv1.TrackerState_TRACKER_STATE_FOLLOWS))
	f.flush()
	f.check("after it was cut off")
}
