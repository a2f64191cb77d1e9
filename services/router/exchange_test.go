package router_test

import (
	"fmt"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/kinference/kinference/internal/testenv"
	adminv1 "github.com/kinference/kinference/proto/gen/kinference/admin/v1"
	kvtrackerv1 "github.com/kinference/kinference/proto/gen/kinference/kvtracker/v1"
	"github.com/kinference/kinference/services/router"
)

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	if !within(patience, ok) {
		t.Fatalf("never: %s", what)
	}
}

// within reports whether something comes true in time.
func within(d time.Duration, ok func() bool) bool {
	tick, deadline := time.NewTicker(5*time.Millisecond), time.After(d)
	defer tick.Stop()
	for !ok() {
		select {
		case <-deadline:
			return false
		case <-tick.C:
		}
	}
	return true
}

// Two routers before the same workers: what one books counts at the other, until its
// end is told.
func TestRoutersExchangeBookings(t *testing.T) {
	url := testenv.NATS(t)
	k := newTracker()
	k.serve(t)
	sample := func(s *kvtrackerv1.WorkerState) { s.SampleAge = durationpb.New(0) }
	k.states = []*kvtrackerv1.WorkerState{ready("demo.sim.a/0", sample), ready("demo.sim.b/0", sample)}
	a := start(t, router.Config{KVTrackerURL: k.url(), NATSURL: url}, newEngine(t), newEngine(t))
	b := start(t, router.Config{KVTrackerURL: k.url(), NATSURL: url}, newEngine(t), newEngine(t))
	for _, w := range []*world{a, b} {
		w.until("the tracker's block size", blockSize(16))
		w.route(request("known", hashes(1, 1)...)) // each knows the workers now
		w.report("known", done(0))
	}
	status := func(w *world) *adminv1.StatusResponse {
		s, err := w.admin.Status(t.Context(), &adminv1.StatusRequest{})
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	seen := func(w *world) (n uint32) {
		d, err := w.admin.Evaluate(t.Context(), &adminv1.EvaluateRequest{Model: "m", PromptTokens: 100})
		if err != nil {
			t.Fatal(err)
		}
		for _, c := range d.GetDecision().GetCandidates() {
			n += c.GetInFlight()
		}
		return n
	}
	eventually(t, "they know of each other", func() bool { return len(status(a).GetPeers()) == 1 && len(status(b).GetPeers()) == 1 })
	id, n := "", 0
	eventually(t, "the booking of one counts at the other", func() bool {
		if id != "" {
			b.report(id, done(0))
		}
		id = fmt.Sprint("theirs-", n)
		n++
		b.route(request(id, hashes(2, 100)...))
		// What a busy machine tells too late is left to the gauges.
		return within(time.Second, func() bool { return seen(a) == 1 && seen(b) == 1 })
	})
	b.report(id, done(0))
	eventually(t, "its end too", func() bool { return seen(a) == 0 && seen(b) == 0 })
	if !a.measured("kinference_router_gossip_peers", "} 1") || !a.measured("kinference_router_gossip_messages_total", `direction="received"`) {
		t.Error("no metrics of gossip")
	}
}
