package trackers

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"connectrpc.com/connect"

	"github.com/kinference/kinference/internal/shard"
	kvtrackerv1 "github.com/kinference/kinference/proto/gen/kinference/kvtracker/v1"
)

// avoid is how long a tracker that failed or was too slow is asked after its replicas.
const avoid = time.Second

var (
	errAway   = errors.New("no kvtracker can be asked")
	errAnswer = errors.New("kvtracker answered another number of queries")
)

// Match asks the trackers that hold the queries' worker sets, and no others. A result is nil
// where none of them answered. It fails if no query was answered.
func (s *Set) Match(ctx context.Context, r *kvtrackerv1.MatchRequest) (*kvtrackerv1.MatchResponse, error) {
	p := s.plan.Load()
	if p == nil {
		return nil, errAway
	}
	out := &kvtrackerv1.MatchResponse{Results: make([]*kvtrackerv1.MatchResult, len(r.GetQueries()))}
	all := make([]int, len(out.Results))
	for i := range all {
		all[i] = i
	}
	if err := p.ask(ctx, r, all, out.Results); err != nil && !slices.ContainsFunc(out.Results, func(r *kvtrackerv1.MatchResult) bool { return r != nil }) {
		return nil, err
	}
	return out, nil
}

// ask enters the results of some of the queries, and returns the last error.
func (p *plan) ask(ctx context.Context, r *kvtrackerv1.MatchRequest, queries []int, results []*kvtrackerv1.MatchResult) error {
	parts := map[int][]int{} // queries by shard
	for _, i := range queries {
		n := shard.Of(r.Queries[i].GetWorkerSet(), p.count)
		parts[n] = append(parts[n], i)
	}
	failed := make(chan error, len(parts))
	part := func(n int, queries []int) {
		q := r
		if len(queries) < len(r.Queries) {
			q = &kvtrackerv1.MatchRequest{}
			for _, i := range queries {
				q.Queries = append(q.Queries, r.Queries[i])
			}
		}
		resp, err := match(ctx, p.shards[n], q)
		switch {
		case err == nil:
			for k, i := range queries {
				results[i] = resp.Results[k]
			}
		case p.spare != nil && ctx.Err() == nil: // such as while trackers are replaced
			failed <- p.spare.ask(ctx, r, queries, results)
		default:
			failed <- err
		}
	}
	var wg sync.WaitGroup
	for n, queries := range parts {
		if len(parts) == 1 {
			part(n, queries)
		} else {
			wg.Go(func() { part(n, queries) })
		}
	}
	wg.Wait()
	close(failed)
	var err error
	for e := range failed {
		err = cmp.Or(e, err)
	}
	return err
}

// match asks one replica after the other.
func match(ctx context.Context, replicas []*tracker, r *kvtrackerv1.MatchRequest) (*kvtrackerv1.MatchResponse, error) {
	err := errAway
	now := time.Now().UnixNano()
	for _, shunned := range []bool{false, true} {
		for _, t := range replicas {
			if (t.avoided.Load() > now) != shunned {
				continue
			}
			var resp *kvtrackerv1.MatchResponse
			if resp, err = t.Client.Match(ctx, r); err == nil && len(resp.Results) == len(r.Queries) {
				return resp, nil
			}
			if err == nil {
				err = errAnswer
			}
			t.avoided.Store(time.Now().Add(avoid).UnixNano())
			// The other end may see a moment before us that the time is over: who would be
			// asked now could not answer, and is not to be avoided for that.
			if ctx.Err() != nil || connect.CodeOf(err) == connect.CodeDeadlineExceeded {
				return nil, err
			}
		}
	}
	return nil, err
}

// Inspect asks one tracker of each shard and adds up what they say. It fails if one of them
// does.
func (s *Set) Inspect(ctx context.Context, r *kvtrackerv1.InspectRequest) (*kvtrackerv1.InspectResponse, error) {
	p := s.plan.Load()
	if p == nil {
		return nil, connect.NewError(connect.CodeUnavailable, errAway)
	}
	out := &kvtrackerv1.InspectResponse{}
	for _, replicas := range p.shards {
		if len(replicas) == 0 {
			return nil, connect.NewError(connect.CodeUnavailable, errAway)
		}
		part, err := replicas[0].Client.Inspect(ctx, r)
		if err != nil {
			return nil, err
		}
		out.Blocks += part.Blocks
		out.Bytes += part.Bytes
		out.States += part.States
		out.Holed += part.Holed
		out.Prefixes = append(out.Prefixes, part.Prefixes...)
	}
	slices.SortStableFunc(out.Prefixes, func(a, b *kvtrackerv1.Prefix) int { return cmp.Compare(b.Below, a.Below) })
	out.Prefixes = out.Prefixes[:min(len(out.Prefixes), int(r.GetTop()))]
	return out, nil
}
