package kvtracker_test

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/kinference/kinference/internal/bus"
	"github.com/kinference/kinference/internal/fleetsim"
	"github.com/kinference/kinference/internal/shard"
	"github.com/kinference/kinference/internal/testenv"
	kvtrackerv1 "github.com/kinference/kinference/proto/gen/kinference/kvtracker/v1"
	"github.com/kinference/kinference/services/kvtracker"
)

// saved reads the snapshot's place in the stream.
func saved(t *testing.T, conn *bus.Conn) (data []byte, at bus.Position) {
	t.Helper()
	data, _, err := conn.Snapshot(t.Context(), "index")
	if err != nil {
		return nil, at
	}
	n, k := binary.Uvarint(data)
	var head struct{ Position bus.Position }
	if err := json.Unmarshal(data[k:k+int(n)], &head); err != nil {
		t.Fatal(err)
	}
	return data, head.Position
}

// TestTrackerFromSnapshot restarts a tracker whose stream has lost everything that is in
// the snapshot, and goes on with the engines' events.
func TestTrackerFromSnapshot(t *testing.T) {
	w := startWorker(t, fleetsim.Config{Profile: profile(200), Ranks: 2, TimeScale: 400, LoRAs: loras})
	url := testenv.NATS(t)
	f := newFleet(t, url, kvtracker.Config{SnapshotInterval: 20 * time.Millisecond}, w)
	conn, err := bus.Connect(t.Context(), url, "test")
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	stop := f.load(4)
	var at bus.Position
	f.until("snapshot of a fleet that evicts", func() bool {
		_, at = saved(t, conn)
		return at.Seq > 20 && w.Stats(0).Removed > 50 && w.Stats(1).Removed > 50
	})
	stop()
	f.flush()
	f.check("before")
	f.stopRelay() // it could not help any more
	f.stopTracker()
	_, at = saved(t, conn)
	purge(t, url, at.Seq)
	f.config.SnapshotInterval = -1
	f.startTracker()
	if f.state(id(0, 0)) != nil && f.complete() {
		t.Log("the end of the stream alone is enough: this run shows little")
	}
	f.stopTracker()
	f.config.SnapshotInterval = 20 * time.Millisecond
	f.startTracker()
	f.check("from the snapshot")

	f.stopTracker()
	f.config.SnapshotInterval, f.config.Shards, f.config.Shard = time.Hour, 3, shard.Of("demo/sim", 3)
	f.startTracker()
	f.check("a shard, from the snapshot of the whole")
	f.stopTracker()
	f.config.Shard++
	f.startTracker()
	if f.state(id(0, 0)) != nil {
		t.Error("another shard knows the worker by the snapshot of the whole")
	}
	f.stopTracker()
	f.config.Shard, f.config.Shards = 0, 0
	f.startTracker()

	f.startRelay()
	stop = f.load(4)
	removed := w.Stats(0).Removed
	f.until("more load", func() bool { return w.Stats(0).Removed > removed+50 })
	stop()
	f.flush()
	f.check("after more events")
	f.inspect()
}

// inspect compares what the tracker says of its index with the workers' caches.
func (f *fleet) inspect() {
	f.t.Helper()
	distinct := map[uint64]bool{}
	for i, w := range f.workers {
		for r := range w.Config().Ranks {
			for h := range f.truth(i, r) {
				distinct[h] = true
			}
		}
	}
	got, err := f.client.Inspect(f.t.Context(), &kvtrackerv1.InspectRequest{Top: 3})
	if err != nil {
		f.t.Fatal(err)
	}
	if got.GetBlocks() != uint64(len(distinct)) || got.GetBytes() == 0 || len(got.GetPrefixes()) == 0 {
		f.t.Errorf("got %v, want %d blocks", got, len(distinct))
	}
	for _, p := range got.GetPrefixes() {
		if !distinct[p.GetFirst()] || !distinct[p.GetLast()] || p.GetBlocks() < 1 || p.GetBelow() < uint64(p.GetBlocks()) || p.GetHolders() < p.GetWhole() {
			f.t.Errorf("prefix %v is none of the workers'", p)
		}
	}
	if _, err := f.client.Inspect(f.t.Context(), &kvtrackerv1.InspectRequest{Top: 1001}); connect.CodeOf(err) != connect.CodeInvalidArgument {
		f.t.Errorf("too many prefixes: got %v", err)
	}
}

// TestSmallStream: where the stream holds less than what comes between two snapshots, they are
// made before it has forgotten what came behind the last one.
func TestSmallStream(t *testing.T) {
	w := startWorker(t, fleetsim.Config{Profile: profile(200), Ranks: 2, TimeScale: 400, LoRAs: loras})
	url := testenv.NATS(t)
	f := newFleet(t, url, kvtracker.Config{SnapshotInterval: time.Hour, StreamMaxBytes: 2 << 20}, w)
	conn, err := bus.Connect(t.Context(), url, "test")
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	stop := f.load(4)
	var first bus.Position
	f.until("first snapshot", func() bool { _, first = saved(t, conn); return first.Seq > 0 })
	var at bus.Position
	f.until("the stream has forgotten what came behind it", func() bool {
		ok, err := conn.Continues(t.Context(), first)
		return err == nil && !ok
	})
	stop()
	f.flush()
	f.until("a later one from which it goes on", func() bool {
		_, at = saved(t, conn)
		ok, err := conn.Continues(t.Context(), at)
		return err == nil && ok
	})
	f.check("before")
	f.stopRelay() // it could not help any more
	f.stopTracker()
	f.startTracker()
	f.check("from the snapshot")
	t.Logf("snapshots at %d and %d", first.Seq, at.Seq)
}

// complete tells whether the tracker holds as many blocks as the workers do.
func (f *fleet) complete() bool {
	f.t.Helper()
	for i, w := range f.workers {
		for r := range w.Config().Ranks {
			truth := f.truth(i, r)
			held := 0
			for _, holders := range f.holders(w.Config().Profile.BlockSize, truth) {
				for _, h := range holders {
					if h == id(i, r) {
						held++
					}
				}
			}
			if held < len(truth) {
				return false
			}
		}
	}
	return true
}

// purge takes messages out of the stream, up to one of them.
func purge(t *testing.T, url string, upTo uint64) {
	t.Helper()
	nc, err := nats.Connect(url)
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	s, err := js.Stream(t.Context(), bus.KVStream)
	if err == nil {
		err = s.Purge(t.Context(), jetstream.WithPurgeSequence(upTo+1))
	}
	if err != nil {
		t.Fatal(err)
	}
}

// TestUnusableSnapshot: a broken snapshot, one of another stream and one with a gap behind
// it are left out, and the stream is read from its start.
func TestUnusableSnapshot(t *testing.T) {
	w := startWorker(t, fleetsim.Config{Profile: profile(200), Ranks: 1, TimeScale: 400})
	url := testenv.NATS(t)
	f := newFleet(t, url, kvtracker.Config{SnapshotInterval: 20 * time.Millisecond}, w)
	conn, err := bus.Connect(t.Context(), url, "test")
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	stop := f.load(2)
	f.until("snapshot", func() bool { _, at := saved(t, conn); return at.Seq > 20 && w.Stats(0).Removed > 100 })
	stop()
	f.flush()
	f.stopTracker()
	good, at := saved(t, conn)
	other := func(p bus.Position) []byte {
		n, k := binary.Uvarint(good)
		var head map[string]any
		if err := json.Unmarshal(good[k:k+int(n)], &head); err != nil {
			t.Fatal(err)
		}
		head["Position"] = p
		text, err := json.Marshal(head)
		if err != nil {
			t.Fatal(err)
		}
		return append(append(binary.AppendUvarint(nil, uint64(len(text))), text...), good[k+int(n):]...)
	}
	broken := append([]byte{}, good...)
	broken[len(broken)/2] ^= 1
	for name, data := range map[string][]byte{
		"broken": broken, "cut": good[:10], "empty": {},
		"of another stream": other(bus.Position{Created: at.Created.Add(time.Second), Seq: at.Seq}),
		"of the future":     other(bus.Position{Created: at.Created, Seq: at.Seq + 1_000_000}),
	} {
		put(t, conn, data)
		f.config.SnapshotInterval = time.Hour
		f.startTracker()
		f.check("snapshot " + name)
		f.stopTracker()
	}
}

func put(t *testing.T, conn *bus.Conn, data []byte) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if err := conn.PutSnapshot(ctx, "index", data); err != nil {
		t.Fatal(err)
	}
}
