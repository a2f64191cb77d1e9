package router

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/kinference/kinference/internal/daemon"
	"github.com/kinference/kinference/internal/resources"
	"github.com/kinference/kinference/internal/schedule"
	kvtrackerv1 "github.com/kinference/kinference/proto/gen/kinference/kvtracker/v1"
	"github.com/kinference/kinference/services/router/internal/affinity"
	"github.com/kinference/kinference/services/router/internal/catalog"
	"github.com/kinference/kinference/services/router/internal/fleet"
	"github.com/kinference/kinference/services/router/internal/parity"
)

// News of the fleet that comes while the resources are reloaded must not bring
// the former ones back.
func TestReloadIsNotUndone(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	scheduler, err := schedule.New(schedule.Settings{})
	if err != nil {
		t.Fatal(err)
	}
	s := &server{
		log: daemon.Logger(ctx), scheduler: scheduler, affinity: &affinity.Table{}, fleet: fleet.New(nil), catalog: catalog.NewPublisher(),
		tokens: &parity.Tokens{}, cached: parity.NewCached(parity.Settings{}),
	}
	if s.metrics, err = newMetrics(daemon.Meter(ctx), s); err != nil {
		t.Fatal(err)
	}
	defer s.metrics.close()
	var running sync.WaitGroup
	for range 8 { // one is the router's; more make the race likely
		running.Go(func() { _ = s.publish(ctx) })
	}
	running.Go(func() {
		for n := uint32(0); ctx.Err() == nil; n++ {
			s.fleet.Update(time.Now(), &kvtrackerv1.WatchWorkersResponse{
				Workers: []*kvtrackerv1.WorkerState{{Worker: "w/0", WorkerSet: "ns/s", BlockSize: n%2 + 1}},
			})
		}
	})
	undone := 0
	for range 10_000 {
		set := &resources.WorkerSet{Name: "ns/s"}
		set.Profiles = []*resources.Profile{{ID: "ns/s/m", Set: set}}
		c := &resources.Catalog{Sets: []*resources.WorkerSet{set}}
		s.apply(ctx, c, nil)
		if v, _ := s.catalog.Current(); v.Resources != c {
			undone++
		}
	}
	cancel()
	running.Wait()
	if undone > 0 {
		t.Errorf("%d reloads were undone", undone)
	}
}
