package router

import (
	"testing"

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
