package tracker

import (
	"context"
	"math"
	"slices"
	"sync"
	"time"

	"connectrpc.com/connect"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/kinference/kinference/internal/kvhash"
	"github.com/kinference/kinference/internal/kvindex"
	"github.com/kinference/kinference/internal/rpc"
	kvtrackerv1 "github.com/kinference/kinference/proto/gen/kinference/kvtracker/v1"
	"github.com/kinference/kinference/proto/gen/kinference/kvtracker/v1/kvtrackerv1connect"
)

const (
	// coalesce is the least time between two messages to one watcher.
	coalesce = 50 * time.Millisecond
	// maxStates bounds the workers in one message, maxQueries the prompts in a
	// request and maxHashes the blocks of all of them.
	maxStates  = 512
	maxQueries = 64
	maxHashes  = 1 << 20
)

var _ kvtrackerv1connect.KVTrackerServiceHandler = (*Tracker)(nil)

// buffers of a Match.
type buffers struct {
	hashes   []kvhash.Hash
	overlaps []kvindex.Overlap
	audit    []kvindex.Overlap
}

var bufferPool = sync.Pool{New: func() any { return new(buffers) }}

var (
	hit  = metric.WithAttributeSet(attribute.NewSet(attribute.Bool("hit", true)))
	miss = metric.WithAttributeSet(attribute.NewSet(attribute.Bool("hit", false)))
)

// Match implements the RPC. It fails with Unavailable until the index has been
// rebuilt: a removal that is not applied yet would be a false hit.
func (t *Tracker) Match(ctx context.Context, req *kvtrackerv1.MatchRequest) (*kvtrackerv1.MatchResponse, error) {
	if !t.CaughtUp() {
		return nil, rpc.Error(connect.CodeUnavailable, "the index is being rebuilt", 100*time.Millisecond)
	}
	if len(req.GetQueries()) > maxQueries {
		return nil, rpc.Error(connect.CodeInvalidArgument, "too many queries", 0)
	}
	total := 0
	for _, q := range req.GetQueries() {
		total += len(q.GetBlockHashes())
		if q.GetBlockSize() > kvindex.MaxBlockSize || total > maxHashes {
			return nil, rpc.Error(connect.CodeInvalidArgument, "block size or number of blocks is out of range", 0)
		}
		if set := q.GetWorkerSet(); set != "" && !t.shard.holds(set) {
			// Nothing found would look like a cold fleet.
			return nil, rpc.Error(connect.CodeFailedPrecondition, "another shard holds this worker set", 0)
		}
	}
	b := bufferPool.Get().(*buffers)
	defer bufferPool.Put(b)
	resp := &kvtrackerv1.MatchResponse{Results: make([]*kvtrackerv1.MatchResult, 0, len(req.GetQueries()))}
	for _, q := range req.GetQueries() {
		resp.Results = append(resp.Results, t.match(ctx, b, q))
	}
	return resp, nil
}

func (t *Tracker) match(ctx context.Context, b *buffers, q *kvtrackerv1.Query) *kvtrackerv1.MatchResult {
	start := time.Now()
	b.hashes = b.hashes[:0]
	for _, h := range q.GetBlockHashes() {
		b.hashes = append(b.hashes, kvhash.Hash(h))
	}
	b.overlaps = t.index.Load().Match(b.overlaps[:0], int(q.GetBlockSize()), b.hashes)
	if t.asked.Add(1)%auditEvery == 0 {
		t.audit(ctx, b, int(q.GetBlockSize()))
	}
	t.mu.RLock()
	b.overlaps = slices.DeleteFunc(b.overlaps, func(o kvindex.Overlap) bool {
		w := t.workers[o.Worker]
		return w == nil || w.suspended || w.hidden || q.GetWorkerSet() != "" && w.set != q.GetWorkerSet()
	})
	t.mu.RUnlock()
	matches := make([]kvtrackerv1.WorkerMatch, len(b.overlaps))
	r := &kvtrackerv1.MatchResult{Matches: make([]*kvtrackerv1.WorkerMatch, len(b.overlaps))}
	for i, o := range b.overlaps {
		m := &matches[i]
		m.Worker = o.Worker
		m.GpuTokens = tokens(o.GPUBlocks, q.GetBlockSize())
		m.CpuTokens = tokens(o.CPUBlocks, q.GetBlockSize())
		r.Matches[i] = m
	}
	t.metrics.matching.Record(ctx, time.Since(start).Seconds())
	if len(matches) > 0 {
		t.metrics.matches.Add(ctx, 1, hit)
	} else {
		t.metrics.matches.Add(ctx, 1, miss)
	}
	return r
}

// auditEvery is how many matches there are for each that is checked.
const auditEvery = 512

// audit checks an answer block by block. Events that are applied meanwhile make the two
// differ for a moment, so only what differs again and again counts.
func (t *Tracker) audit(ctx context.Context, b *buffers, blockSize int) {
	index := t.index.Load()
	for range 3 {
		b.audit = index.MatchEach(b.audit[:0], blockSize, b.hashes)
		if slices.Equal(b.audit, b.overlaps) {
			t.metrics.audit(ctx, true)
			return
		}
		b.overlaps = index.Match(b.overlaps[:0], blockSize, b.hashes)
	}
	t.metrics.audit(ctx, false)
}

// maxTop bounds the prefixes that are listed.
const maxTop = 1000

// Inspect implements the RPC.
func (t *Tracker) Inspect(_ context.Context, r *kvtrackerv1.InspectRequest) (*kvtrackerv1.InspectResponse, error) {
	if r.GetTop() > maxTop {
		return nil, rpc.Error(connect.CodeInvalidArgument, "too many prefixes", 0)
	}
	index := t.index.Load()
	i := index.Info()
	out := &kvtrackerv1.InspectResponse{Blocks: uint64(i.Blocks), Bytes: uint64(i.Bytes), States: uint64(i.States), Holed: uint32(i.Holed)}
	if r.GetTop() > 0 {
		for _, p := range index.Top(int(r.GetTop())) {
			out.Prefixes = append(out.Prefixes, &kvtrackerv1.Prefix{
				First: uint64(p.First), Last: uint64(p.Last), Blocks: uint32(p.Blocks), Below: uint64(p.Below), Holders: uint32(p.Holders), Whole: uint32(p.Whole),
			})
		}
	}
	return out, nil
}

func tokens(blocks int, size uint32) uint32 {
	return uint32(min(uint64(blocks)*uint64(size), math.MaxUint32))
}

// WatchWorkers implements the RPC.
func (t *Tracker) WatchWorkers(ctx context.Context, _ *kvtrackerv1.WatchWorkersRequest, stream *connect.ServerStream[kvtrackerv1.WatchWorkersResponse]) error {
	w := t.hub.watch() // before the list, so that no change is missed
	defer w.close()
	if err := t.send(stream, t.ids(), true); err != nil {
		return err
	}
	pause := time.NewTimer(coalesce)
	defer pause.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-w.wake:
		}
		select { // let changes gather
		case <-ctx.Done():
			return nil
		case <-pause.C:
		case <-w.now:
		}
		if err := t.send(stream, w.take(), false); err != nil {
			return err
		}
		pause.Reset(coalesce)
	}
}

// send sends the present state of workers, in messages of bounded size.
func (t *Tracker) send(stream *connect.ServerStream[kvtrackerv1.WatchWorkersResponse], ids []string, listing bool) error {
	for first := true; first || len(ids) > 0; first = false {
		n := min(len(ids), maxStates)
		m := &kvtrackerv1.WatchWorkersResponse{Synced: listing && n == len(ids), Shard: t.shard.proto(), State: t.tracking()}
		for _, id := range ids[:n] {
			if s := t.state(id); s != nil {
				m.Workers = append(m.Workers, s)
			} else {
				m.Removed = append(m.Removed, id)
			}
		}
		ids = ids[n:]
		if err := stream.Send(m); err != nil {
			return err
		}
	}
	return nil
}

// state describes the worker. Called with the tracker's lock held.
func (w *worker) state(now time.Time, stats kvindex.Stats) *kvtrackerv1.WorkerState {
	s := &kvtrackerv1.WorkerState{
		Worker:    w.id,
		WorkerSet: w.set,
		Ready:     w.isReady(now),
		BlockSize: uint32(stats.BlockSize),
		Epoch:     w.epoch,
		Clears:    w.clears,
		Index: &kvtrackerv1.IndexState{
			Live:     w.started && !w.suspended,
			Complete: w.complete,
			Blocks:   uint64(stats.Total()),
			LastSeq:  -1,
			Lag:      durationpb.New(w.lag),
			Skipped:  w.skipped,
		},
	}
	if w.started && w.next > 0 {
		s.Index.LastSeq = int64(min(w.next-1, math.MaxInt64))
	}
	if w.report != nil {
		last, _ := w.window.Last()
		s.Load, s.LoadMean_30S = protoOf(last), protoOf(w.window.Mean(meanOver))
		s.SampleAge = durationpb.New(max(now.Sub(w.fresh), 0))
		s.TotalBlocks = w.report.GetTotalBlocks()
		if s.BlockSize == 0 {
			s.BlockSize = w.report.GetBlockSize()
		}
	}
	return s
}
