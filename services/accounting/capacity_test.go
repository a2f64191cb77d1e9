package accounting

import (
	"fmt"
	"log/slog"
	"math"
	"path/filepath"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	accountingv1 "github.com/kinference/kinference/proto/gen/kinference/accounting/v1"
	kvtrackerv1 "github.com/kinference/kinference/proto/gen/kinference/kvtracker/v1"
	usagev1 "github.com/kinference/kinference/proto/gen/kinference/usage/v1"
	"github.com/kinference/kinference/services/accounting/internal/ledger"
)

// Where there are more requests than an answer looks at it is about the last ones, and
// they came as fast as all.
func TestCapacityOfManyRequests(t *testing.T) {
	led, err := ledger.Open(t.Context(), filepath.Join(t.TempDir(), "ledger.db"))
	if err != nil {
		t.Fatal(err)
	}
	defer led.Close()
	v := &server{log: slog.New(slog.DiscardHandler), ledger: led, watched: newWatched(), fewEvents: 400}
	from := time.Unix(1_800_000_000, 0)
	const seconds, requests = 1800, 3600
	for i := range seconds {
		v.watched.add(&kvtrackerv1.WorkerReport{Worker: "u/0", WorkerSet: "ns/set", Load: &kvtrackerv1.Load{Running: 1}, SampledUnixNanos: from.Add(time.Duration(i) * time.Second).UnixNano()})
	}
	var events []*usagev1.Usage
	for i := range requests {
		at := from.Add(time.Duration(i) * time.Second * seconds / requests)
		events = append(events, &usagev1.Usage{
			Id: fmt.Sprint(i), Received: timestamppb.New(at), Ended: timestamppb.New(at.Add(400 * time.Millisecond)), Model: "m", WorkerSet: "ns/set", Worker: "u/0",
			Ttft: proto.Float64(.1), Outcome: usagev1.Outcome_OUTCOME_OK, Tokens: &usagev1.Tokens{Input: proto.Uint32(100), Output: proto.Uint32(10)},
		})
	}
	if _, err := led.Add(t.Context(), events); err != nil {
		t.Fatal(err)
	}
	answer, err := v.Capacity(t.Context(), &accountingv1.CapacityRequest{From: timestamppb.New(from), To: timestamppb.New(from.Add(seconds * time.Second))})
	if err != nil {
		t.Fatal(err)
	}
	if s := answer.GetSets()[0]; math.Abs(s.GetRate()-2) > .05 || s.GetWallSeconds() > 151 || s.GetTenants()[0].GetRequests() > 400 {
		t.Errorf("%v requests a second of %d s, %d of them", s.GetRate(), int(s.GetWallSeconds()), s.GetTenants()[0].GetRequests())
	}
}
