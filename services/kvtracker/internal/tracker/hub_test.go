package tracker

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/kinference/kinference/internal/bus"
	"github.com/kinference/kinference/internal/rpc"
	"github.com/kinference/kinference/internal/testenv"
	kvtrackerv1 "github.com/kinference/kinference/proto/gen/kinference/kvtracker/v1"
	"github.com/kinference/kinference/proto/gen/kinference/kvtracker/v1/kvtrackerv1connect"
)

// TestHubIsBounded has a watcher that never looks: what waits for it is one id
// for each worker, however much happens.
func TestHubIsBounded(t *testing.T) {
	var h hub
	w := h.watch()
	for i := range 10_000 {
		h.notify(fmt.Sprint(i%3), false)
	}
	<-w.wake
	ids := w.take()
	slices.Sort(ids)
	if diff := cmp.Diff(ids, []string{"0", "1", "2"}); diff != "" {
		t.Errorf("(-got +want):\n%s", diff)
	}
	w.close()
	h.notify("4", false)
	if len(w.take()) != 0 {
		t.Error("a closed watcher is told")
	}
}

// TestWatchWorkers follows a stream over the network: all workers in bounded
// messages, then what changes, then who leaves.
func TestWatchWorkers(t *testing.T) {
	f := newFixture(t)
	const n = maxStates + 88
	worker := func(i int) bus.Worker { return bus.Worker{Namespace: "demo", Set: "sim", UID: fmt.Sprintf("w%03d", i)} }
	for i := range n {
		f.send(worker(i), batch("e", 0, 0))
	}
	f.sweep() // nothing is left to tell
	ctx, cancel := context.WithCancel(context.Background())
	l := testenv.Listen(t)
	served := make(chan error, 1)
	go func() {
		served <- rpc.Serve(ctx, l, rpc.Mount[kvtrackerv1connect.KVTrackerServiceHandler](ctx, f.Tracker, kvtrackerv1connect.NewKVTrackerServiceHandler))
	}()
	defer func() {
		cancel()
		if err := <-served; err != nil {
			t.Error(err)
		}
	}()
	call, hangUp := context.WithTimeout(ctx, 30*time.Second)
	defer hangUp()
	stream, err := rpc.Client(ctx, "http://"+l.Addr().String(), kvtrackerv1connect.NewKVTrackerServiceClient).
		WatchWorkers(call, &kvtrackerv1.WatchWorkersRequest{})
	if err != nil {
		t.Fatal(err)
	}
	defer stream.Close()
	next := func() *kvtrackerv1.WatchWorkersResponse {
		t.Helper()
		if !stream.Receive() {
			t.Fatal(stream.Err())
		}
		return stream.Msg()
	}
	listed := 0
	for {
		m := next()
		listed += len(m.GetWorkers())
		if len(m.GetWorkers()) > maxStates {
			t.Errorf("%d workers in one message", len(m.GetWorkers()))
		}
		if m.GetSynced() {
			break
		}
	}
	if listed != n {
		t.Errorf("%d workers are listed, want %d", listed, n)
	}
	f.send(worker(7), batch("f", 0, 1))
	if m := next(); len(m.GetWorkers()) != 1 || m.GetWorkers()[0].GetEpoch() != "f" || m.GetSynced() {
		t.Errorf("after a restart: %d workers, synced %v", len(m.GetWorkers()), m.GetSynced())
	}
	f.sweep() // the index alone is not worth a message each
	next()
	f.send(worker(8), batch("e", 1, 4))
	f.sweep()
	if m := next(); len(m.GetWorkers()) != 1 || m.GetWorkers()[0].GetIndex().GetBlocks() != 5 {
		t.Errorf("after events: %d workers", len(m.GetWorkers()))
	}
	f.send(worker(9), control(bus.KindClear, "e", 1, "gone"))
	if m := next(); !slices.Equal(m.GetRemoved(), []string{"w009/0"}) {
		t.Errorf("after it left: %v removed, %d workers", m.GetRemoved(), len(m.GetWorkers()))
	}
}
