package accounting

import (
	"context"
	"fmt"
	"log/slog"
	"path/filepath"
	"testing"
	"time"

	"go.opentelemetry.io/otel/metric/noop"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/kinference/kinference/internal/bus"
	"github.com/kinference/kinference/internal/testenv"
	kvtrackerv1 "github.com/kinference/kinference/proto/gen/kinference/kvtracker/v1"
	usagev1 "github.com/kinference/kinference/proto/gen/kinference/usage/v1"
	"github.com/kinference/kinference/services/accounting/internal/gputime"
	"github.com/kinference/kinference/services/accounting/internal/ledger"
	"github.com/kinference/kinference/services/accounting/internal/objective"
)

// After a time without its database a ledger takes the events that waited before the
// time of their workers is divided.
func TestTimeWaitsForEvents(t *testing.T) {
	led, err := ledger.Open(t.Context(), filepath.Join(t.TempDir(), "ledger.db"))
	if err != nil {
		t.Fatal(err)
	}
	defer led.Close()
	conn, err := bus.Connect(t.Context(), testenv.NATS(t), "test")
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	v := &server{log: slog.New(slog.DiscardHandler), ledger: led, conn: conn, board: objective.NewBoard(), watched: newWatched(), Config: Config{Events: time.Hour}}
	if err := v.metrics.init(noop.NewMeterProvider().Meter("test"), v); err != nil {
		t.Fatal(err)
	}
	publish := func(u *usagev1.Usage) {
		for left := []bus.UsageMessage{{ID: u.GetId(), Subject: bus.UsageSubject(""), Data: bus.EncodeUsage(nil, u)}}; len(left) > 0 && t.Context().Err() == nil; {
			left = conn.PublishUsage(t.Context(), v.settings(), left).Left
		}
	}
	takeOne := func() {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		if err := conn.ConsumeUsage(ctx, v.settings(), consumer(led.Name()), func(ctx context.Context, batch []bus.UsageDelivery) error {
			defer cancel()
			return v.take(ctx, batch)
		}, nil); err != nil {
			t.Fatal(err)
		}
	}
	now := time.Now()
	publish(&usagev1.Usage{Id: "before", Ended: timestamppb.New(now.Add(-2 * time.Minute))})
	takeOne()
	v.stored.Store(now.Add(-time.Minute).UnixMicro()) // the database goes away

	for i := range 80 {
		v.watched.add(&kvtrackerv1.WorkerReport{Worker: "u/0", WorkerSet: "ns/set", Load: &kvtrackerv1.Load{Running: 1}, SampledUnixNanos: now.Add(time.Duration(i-80) * time.Second).UnixNano()})
	}
	publish(&usagev1.Usage{
		Id: "meanwhile", Received: timestamppb.New(now.Add(-70 * time.Second)), Ended: timestamppb.New(now.Add(-20 * time.Second)), Worker: "u/0", WorkerSet: "ns/set",
		Ttft: proto.Float64(1), Outcome: usagev1.Outcome_OUTCOME_OK, Tokens: &usagev1.Tokens{Input: proto.Uint32(1000), Output: proto.Uint32(2000)},
	})
	d := &divider{v: v, every: time.Second, since: now.Add(-time.Hour), weights: map[string]gputime.Weights{}}
	from := now.Add(-time.Minute).Truncate(d.every)
	if _, err := led.Divided(t.Context(), from); err != nil {
		t.Fatal(err)
	}
	if more, err := d.next(t.Context(), now); more || err != nil {
		t.Errorf("it does not wait for events: %v", err)
	}
	takeOne() // it is back
	want := now.Truncate(d.every).Add(-gpuLate * d.every)
	deadline, tick := time.After(time.Minute), time.NewTicker(5*time.Millisecond)
	defer tick.Stop()
	for at := from; !at.Equal(want); {
		if _, err := d.next(t.Context(), now); err != nil {
			t.Fatal(err)
		}
		if at, err = led.Divided(t.Context(), from); err != nil {
			t.Fatal(err)
		}
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatalf("time is divided up to %v before now", now.Sub(at))
		}
	}
	if err := led.Export(t.Context(), ledger.Filter{}, func(page []*usagev1.Usage) error {
		for _, u := range page {
			if used := u.GetGpuPrefill() + u.GetGpuDecode(); u.GetId() == "meanwhile" && used < 20 {
				t.Errorf("it used %v s of 35", used)
			}
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
}

// Where there are more requests than are looked at, those of the span itself are.
func TestTimeOfManyRequests(t *testing.T) {
	led, err := ledger.Open(t.Context(), filepath.Join(t.TempDir(), "ledger.db"))
	if err != nil {
		t.Fatal(err)
	}
	defer led.Close()
	v := &server{log: slog.New(slog.DiscardHandler), ledger: led, board: objective.NewBoard(), watched: newWatched(), fewEvents: 250}
	if err := v.metrics.init(noop.NewMeterProvider().Meter("test"), v); err != nil {
		t.Fatal(err)
	}
	from := time.Unix(1_800_000_000, 0)
	for i := range 80 {
		v.watched.add(&kvtrackerv1.WorkerReport{Worker: "u/0", WorkerSet: "ns/set", Load: &kvtrackerv1.Load{Running: 10}, SampledUnixNanos: from.Add(time.Duration(i-40) * time.Second).UnixNano()})
	}
	var events []*usagev1.Usage
	for i := range 1000 { // a hundred a second, from five before the span on
		at := from.Add(time.Duration(i-500) * 10 * time.Millisecond)
		events = append(events, &usagev1.Usage{
			Id: fmt.Sprint(i), Received: timestamppb.New(at), Ended: timestamppb.New(at.Add(100 * time.Millisecond)), Worker: "u/0", WorkerSet: "ns/set",
			Ttft: proto.Float64(.05), Outcome: usagev1.Outcome_OUTCOME_OK, Tokens: &usagev1.Tokens{Input: proto.Uint32(100), Output: proto.Uint32(10)},
		})
	}
	if _, err := led.Add(t.Context(), events); err != nil {
		t.Fatal(err)
	}
	if _, err := led.Divided(t.Context(), from); err != nil {
		t.Fatal(err)
	}
	d := &divider{v: v, every: time.Second, weights: map[string]gputime.Weights{}, learned: time.Now()}
	if err := d.divide(t.Context(), from, from.Add(d.every)); err != nil {
		t.Fatal(err)
	}
	used := 0
	if err := led.Export(t.Context(), ledger.Filter{From: from.Add(100 * time.Millisecond), To: from.Add(d.every)}, func(page []*usagev1.Usage) error {
		for _, u := range page {
			if u.GetGpuPrefill() > 0 {
				used++
			}
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	if used < 88 {
		t.Errorf("%d of 90 requests of the span used something", used)
	}
}
