package router

import (
	"slices"
	"testing"
	"time"

	"github.com/kinference/kinference/internal/schedule"
	kvtrackerv1 "github.com/kinference/kinference/proto/gen/kinference/kvtracker/v1"
	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
)

// A decision that began by an older catalog may bring a worker back that is gone: the
// next catalog forgets it.
func TestForgetsWhoCameBack(t *testing.T) {
	c := load(t, fleetYAML(2))
	s := newServer(t, c, &kvtrackerv1.MatchResponse{}, &kvtrackerv1.WatchWorkersResponse{})
	s.apply(t.Context(), c, nil)
	known := c.Sets[0].Workers[0].Ranks[0]
	s.scheduler.Decide(time.Now(), schedule.Request{}, []schedule.Candidate{{Worker: known}, {Worker: "gone/0"}})
	s.apply(t.Context(), c, nil)
	var left []string
	for _, w := range s.scheduler.Workers() {
		left = append(left, w.Worker)
	}
	if !slices.Equal(left, []string{known}) {
		t.Errorf("known are %q, want %q", left, known)
	}
}

// A request in line takes memory for each worker that may serve it, which the bound on
// bytes counts: 4,096 for some hundred workers would be more than the router has.
func TestBytesOfOneThatWaits(t *testing.T) {
	s := newServer(t, load(t, fleetYAML(100)), &kvtrackerv1.MatchResponse{}, &kvtrackerv1.WatchWorkersResponse{})
	x, _, err := s.newRouting(t.Context(), &routerv1.RouteRequest{Model: "small", Prompts: []*routerv1.Prompt{{Profile: "ns/small/small", BlockHashes: make([]uint64, 50)}}})
	if err != nil {
		t.Fatal(err)
	}
	if got, want := x.bytes(), int64(50*hashBytes+100*endpointBytes); got != want {
		t.Errorf("%d bytes, want %d", got, want)
	}
}
