package router

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"connectrpc.com/connect"

	"github.com/kinference/kinference/internal/schedule"
	kvtrackerv1 "github.com/kinference/kinference/proto/gen/kinference/kvtracker/v1"
	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
)

// A look at the fleet may go on when the request has left the line and is looked at
// anew: neither takes the other's answers for its own.
func TestLooksAtOthersDoNotMix(t *testing.T) {
	c := load(t, fleetYAML(1))
	s := newServer(t, c, &kvtrackerv1.MatchResponse{}, &kvtrackerv1.WatchWorkersResponse{})
	prompts := convert([]*routerv1.Prompt{
		{Profile: "a", Tokens: 20, BlockSize: 16, BlockHashes: []uint64{1}, Others: []*routerv1.OtherPrompt{{Tokens: 20, BlockHashes: []uint64{2}}}},
		{Profile: "b", Tokens: 20, BlockSize: 16, BlockHashes: []uint64{3}, Others: []*routerv1.OtherPrompt{{Tokens: 20, BlockHashes: []uint64{4}}}},
	})
	both, one := []*prompt{prompts["a"], prompts["b"]}, []*prompt{prompts["b"]}
	_, first := otherQueries([]*kvtrackerv1.Query{{}, {}}, both)
	queries, second := otherQueries([]*kvtrackerv1.Query{{}}, one)
	f := &found{others: map[holding]int{}}
	results := make([]*kvtrackerv1.MatchResult, len(queries))
	results[1] = &kvtrackerv1.MatchResult{Matches: []*kvtrackerv1.WorkerMatch{{Worker: "w", GpuTokens: 16}}}
	s.takeOthers(f, one, second, results)
	if got := f.others[holding{"b", "w"}]; got != 16 || len(first) != 2 {
		t.Errorf("%d tokens held, %d asked about", got, len(first))
	}
}

// counting is a tracker that counts how often it is asked.
type counting struct {
	stub
	asked atomic.Int64
}

func (c *counting) Match(ctx context.Context, r *kvtrackerv1.MatchRequest) (*kvtrackerv1.MatchResponse, error) {
	c.asked.Add(1)
	return c.stub.Match(ctx, r)
}

// A request for which there is no place in line is looked at once: there are many of
// them when all are busy, kvtracker too.
func TestRefusedIsLookedAtOnce(t *testing.T) {
	c := load(t, fleetYAML(1))
	worker := c.Sets[1].Workers[0].Ranks[0]
	s := newServer(t, c, nil, &kvtrackerv1.WatchWorkersResponse{Synced: true, Workers: []*kvtrackerv1.WorkerState{
		{Worker: worker, WorkerSet: c.Sets[1].Name, Ready: true, BlockSize: 16, Load: &kvtrackerv1.Load{}}}})
	tracker := &counting{stub: stub{&kvtrackerv1.MatchResponse{Results: []*kvtrackerv1.MatchResult{{}}}}}
	s.tracker, s.line.MaxBytes, s.MatchTimeout = tracker, 1, time.Minute
	s.scheduler.Decide(time.Now(), schedule.Request{ID: "busy"}, []schedule.Candidate{{Worker: worker, Tokens: 100_000}})
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	route := func(id string) error {
		_, err := s.Route(ctx, &routerv1.RouteRequest{RequestId: id, Model: "small", Prompts: []*routerv1.Prompt{
			{Profile: "ns/small/small", Tokens: 40, BlockSize: 16, BlockHashes: []uint64{1, 2}}}})
		return err
	}
	wg.Go(func() { _ = route("waits") })
	tick, deadline := time.NewTicker(time.Millisecond), time.After(20*time.Second)
	defer tick.Stop()
	for s.line.Len() == 0 {
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatal("it does not wait")
		}
	}
	const refused = 20
	before := tracker.asked.Load()
	for i := range refused {
		if err := route(fmt.Sprint(i)); connect.CodeOf(err) != connect.CodeResourceExhausted {
			t.Fatalf("answer %v", err)
		}
	}
	if n := tracker.asked.Load() - before; n > refused+refused/2 { // one that waits is looked at, too
		t.Errorf("%d looks for %d that were refused", n, refused)
	}
	cancel()
	wg.Wait()
}
