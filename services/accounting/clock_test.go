package accounting

import (
	"database/sql"
	"log/slog"
	"path/filepath"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.opentelemetry.io/otel/metric/noop"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	kvtrackerv1 "github.com/kinference/kinference/proto/gen/kinference/kvtracker/v1"
	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
	usagev1 "github.com/kinference/kinference/proto/gen/kinference/usage/v1"
	"github.com/kinference/kinference/services/accounting/internal/ledger"
	"github.com/kinference/kinference/services/accounting/internal/objective"
)

// A relay whose clock is set back is heard on, and what it said of times that are
// still to come is forgotten; reports that were stored a moment ago change nothing.
func TestRelaysClockIsSetBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWatched()
		tell := func(at time.Time) {
			w.add(&kvtrackerv1.WorkerReport{Worker: "u/0", WorkerSet: "ns/set", Load: &kvtrackerv1.Load{Running: 1}, SampledUnixNanos: at.UnixNano()})
		}
		begin := time.Now()
		second := func(ahead time.Duration) {
			tell(time.Now().Add(ahead))
			tell(time.Now().Add(ahead - 5*time.Second)) // stored before
			time.Sleep(time.Second)
		}
		for range 100 {
			second(0)
		}
		for range 10 { // an hour ahead, and back
			second(time.Hour)
		}
		for range 100 {
			second(0)
		}
		o := w.between(unix(begin), unix(time.Now().Add(2*time.Hour)))["ns/set"]
		if n := len(o.states); n < 195 || n > 200 {
			t.Errorf("%d states of 200 s", n)
		}
		for i := 1; i < len(o.states); i++ {
			if o.states[i].At <= o.states[i-1].At {
				t.Errorf("state %d is of %v, before it of %v", i, o.states[i].At, o.states[i-1].At)
			}
		}
	})
}

// An event of an ingress whose clock is ahead counts, and is in nobody's way.
func TestIngressClockIsAhead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := objective.NewBoard()
		b.Set([]objective.Objective{{Kind: objective.Pool, Owner: "ns/chat", Name: "up", Indicator: objective.Availability, Target: .9, Window: time.Hour}})
		for range 1000 {
			for _, ahead := range []time.Duration{0, 10 * time.Minute} {
				b.Count(judged(&usagev1.Usage{Ended: timestamppb.New(time.Now().Add(ahead)), Pool: "ns/chat", Outcome: usagev1.Outcome_OUTCOME_OK}), nil)
			}
			time.Sleep(time.Second)
		}
		if s := b.States(time.Now())[0]; s.Total != 2000 || s.Burns[0].Events == 0 {
			t.Errorf("%d of 2000 requests count, %d for an alert", s.Total, s.Burns[0].Events)
		}
	})
}

// When the own clock is set back, time is divided on from then.
func TestOwnClockIsSetBack(t *testing.T) {
	led, err := ledger.Open(t.Context(), filepath.Join(t.TempDir(), "ledger.db"))
	if err != nil {
		t.Fatal(err)
	}
	defer led.Close()
	now := time.Unix(1_800_000_000, 0)
	if _, err := led.Divided(t.Context(), now.Add(time.Hour)); err != nil {
		t.Fatal(err)
	}
	d := &divider{v: &server{ledger: led, watched: newWatched()}, every: time.Minute, since: now, learned: time.Now()}
	for _, at := range []time.Time{now, now.Add((gpuLate + 1) * d.every)} {
		if _, err := d.next(t.Context(), at); err != nil {
			t.Fatal(err)
		}
	}
	if at, err := led.Divided(t.Context(), now); err != nil || !at.Equal(now.Add(d.every)) {
		t.Errorf("it is divided until %v of %v: %v", at, now, err)
	}
}

// A ledger that cannot be read when objectives come takes nothing from those who
// measure meanwhile.
func TestObjectivesWithoutLedger(t *testing.T) {
	place := filepath.Join(t.TempDir(), "ledger.db")
	led, err := ledger.Open(t.Context(), place)
	if err != nil {
		t.Fatal(err)
	}
	defer led.Close()
	db, err := sql.Open("sqlite", place)
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	if _, err := db.Exec("DROP TABLE usage_gpu"); err != nil { // events cannot be exported
		t.Fatal(err)
	}
	v := &server{log: slog.New(slog.DiscardHandler), ledger: led, board: objective.NewBoard()}
	if err := v.metrics.init(noop.NewMeterProvider().Meter("test"), v); err != nil {
		t.Fatal(err)
	}
	list := []*routerv1.Objective{}
	for _, name := range []string{"a", "b"} {
		list = append(list, &routerv1.Objective{Kind: objective.Pool, Owner: "ns/chat", Name: name, Indicator: objective.Availability, Target: "90", Window: durationpb.New(time.Hour)})
	}
	stop := make(chan struct{})
	var measuring sync.WaitGroup
	measuring.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
				v.measure(t.Context(), []*usagev1.Usage{{Ended: timestamppb.Now(), Pool: "ns/chat", Outcome: usagev1.Outcome_OUTCOME_OK}})
			}
		}
	})
	for range 300 {
		if err := v.setObjectives(t.Context(), list); err == nil {
			t.Error("they counted what cannot be read")
		}
	}
	close(stop)
	measuring.Wait()
	if !v.board.Empty() {
		t.Error("objectives without a past are judged")
	}
}
