package router

import (
	"slices"
	"testing"
	"time"

	"github.com/kinference/kinference/internal/schedule"
	kvtrackerv1 "github.com/kinference/kinference/proto/gen/kinference/kvtracker/v1"
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
