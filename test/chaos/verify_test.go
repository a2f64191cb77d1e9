package chaos

import (
	"context"
	"errors"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/kinference/kinference/internal/bus"
	"github.com/kinference/kinference/internal/kvhash"
	"github.com/kinference/kinference/internal/testenv"
	accountingv1 "github.com/kinference/kinference/proto/gen/kinference/accounting/v1"
	kvtrackerv1 "github.com/kinference/kinference/proto/gen/kinference/kvtracker/v1"
	limiterv1 "github.com/kinference/kinference/proto/gen/kinference/limiter/v1"
	usagev1 "github.com/kinference/kinference/proto/gen/kinference/usage/v1"
)

// patience bounds how long what was counted may take to arrive after the load.
const patience = 45 * time.Second

// book is what the ledger has of a session.
type book struct {
	Requests  int `json:"requests"` // that an engine saw or a client got an answer to
	Lost      int `json:"lost"`
	Doubled   int `json:"doubled"`
	Different int `json:"different"` // that ended well, with other tokens than the engine counted
	Recovered int `json:"recovered"` // written after the death of their ingress
	// After is when the ledger had all, in seconds since the load ended.
	After float64 `json:"after_s"`
}

// audit waits until the ledger has each request of a session, and compares.
func (s *session) audit(results []result) book {
	truth := s.c.truth.of(s.name + "-")
	want := map[string]bool{}
	for id := range truth {
		want[id] = true
	}
	for _, r := range results {
		if r.kind == "ok" {
			want[r.id] = true
		}
	}
	out := book{Requests: len(want)}
	var events map[string][]*usagev1.Usage
	began := time.Now()
	eventually(patience, func() bool {
		got, err := s.export()
		if err != nil {
			return false
		}
		events = got
		for id := range want {
			if len(events[id]) == 0 {
				return false
			}
		}
		return true
	})
	out.After = time.Since(began).Seconds()
	for id := range want {
		switch len(events[id]) {
		case 0:
			out.Lost++
		case 1:
		default:
			out.Doubled++
		}
	}
	for id, list := range events {
		u := list[0]
		if u.GetRecovered() {
			out.Recovered++
		}
		used := truth[id]
		if u.GetOutcome() != usagev1.Outcome_OUTCOME_OK || len(used) != 1 {
			continue
		}
		if t := u.GetTokens(); int(t.GetInput()) != used[0].Prompt || int(t.GetOutput()) != used[0].Output {
			out.Different++
		}
	}
	return out
}

// export reads the events of the session.
func (s *session) export() (map[string][]*usagev1.Usage, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	stream, err := s.c.ledger.ExportUsage(ctx, &accountingv1.ExportUsageRequest{Filter: &accountingv1.Filter{From: timestamppb.New(s.began.Add(-time.Second))}})
	if err != nil {
		return nil, err
	}
	out := map[string][]*usagev1.Usage{}
	for stream.Receive() {
		for _, u := range stream.Msg().GetUsage() {
			if id := u.GetRequestId(); len(id) > len(s.name) && id[:len(s.name)+1] == s.name+"-" {
				out[id] = append(out[id], u)
			}
		}
	}
	return out, errors.Join(stream.Err(), stream.Close())
}

// index is how the trackers' indexes differ from what the engines hold.
type index struct {
	Blocks  int `json:"blocks"`  // in all engines
	Missing int `json:"missing"` // of the worse tracker
	False   int `json:"false"`
	// After is when both were equal to the engines, in seconds since the load ended.
	After float64 `json:"after_s"`
}

// compareIndex waits until both trackers know exactly what the engines hold. There
// must be no load.
func (c *cluster) compareIndex() index {
	var out index
	began := time.Now()
	eventually(patience, func() bool {
		out = index{}
		for i := range c.trackers {
			blocks, missing, extra, err := c.differs(i)
			if err != nil {
				missing = max(blocks, 1)
			}
			out.Blocks, out.Missing, out.False = blocks, max(out.Missing, missing), max(out.False, extra)
		}
		return out.Missing == 0 && out.False == 0
	})
	out.After = time.Since(began).Seconds()
	if out.Missing+out.False > 0 {
		c.explainIndex()
	}
	return out
}

// explainIndex logs what each tracker and server knows, for who looks for the cause.
func (c *cluster) explainIndex() {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	for _, w := range c.fleet {
		c.t.Logf("%s has published %d batches", w.Name(), w.EventStats(0).Batches)
	}
	for i := range c.trackers {
		blocks, missing, extra, err := c.differs(i)
		c.t.Logf("kvtracker-%d: %d of %d blocks are missing, %d false; %v", i, missing, blocks, extra, err)
		list, err := c.states(ctx, i)
		for _, s := range list {
			c.t.Logf("  %s: %v, epoch %s, cleared %d times; %v", s.GetWorker(), s.GetIndex(), s.GetEpoch(), s.GetClears(), err)
		}
	}
	if s, err := c.streams.Stream(ctx, bus.KVStream); err == nil {
		i := s.CachedInfo()
		c.t.Logf("stream: %d messages, %d to %d, leader %s", i.State.Msgs, i.State.FirstSeq, i.State.LastSeq, i.Cluster.Leader)
	}
}

// differs compares one tracker with the engines, block by block.
func (c *cluster) differs(tracker int) (blocks, missing, extra int, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	held, err := c.holdings(ctx, tracker)
	for _, w := range c.fleet {
		size := w.Config().Profile.BlockSize
		hashes := map[uint64]bool{}
		for b := range w.Cached(0) {
			if b.Group == 0 {
				h := kvhash.Append(nil, kvhash.Root(b.LoRA, b.Salt), b.Tokens, size)
				hashes[uint64(h[len(h)-1])] = true
			}
		}
		blocks += len(hashes)
		if err != nil {
			continue
		}
		worker := "test.sim." + w.Name() + "/0"
		known := 0
		req := &kvtrackerv1.MatchRequest{}
		ask := func() error {
			resp, err := c.trackers[tracker].Match(ctx, req)
			if err != nil {
				return err
			}
			for _, r := range resp.GetResults() {
				for _, m := range r.GetMatches() {
					if m.GetWorker() == worker && m.GetGpuTokens() > 0 {
						known++
					}
				}
			}
			req = &kvtrackerv1.MatchRequest{}
			return nil
		}
		for h := range hashes {
			req.Queries = append(req.Queries, &kvtrackerv1.Query{BlockSize: uint32(size), BlockHashes: []uint64{h}})
			if len(req.Queries) == 64 {
				if err := ask(); err != nil {
					return blocks, 0, 0, err
				}
			}
		}
		if err := ask(); err != nil {
			return blocks, 0, 0, err
		}
		missing += len(hashes) - known
		extra += max(0, held[worker]-known)
	}
	return blocks, missing, extra, err
}

// holdings is how many blocks a tracker says that each worker holds.
func (c *cluster) holdings(ctx context.Context, tracker int) (map[string]int, error) {
	list, err := c.states(ctx, tracker)
	out := map[string]int{}
	for _, w := range list {
		if i := w.GetIndex(); i.GetLive() {
			out[w.GetWorker()] = int(i.GetBlocks())
		}
	}
	return out, err
}

// states is what a tracker says of the workers; an error too if it does not follow.
func (c *cluster) states(ctx context.Context, tracker int) (list []*kvtrackerv1.WorkerState, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := c.trackers[tracker].WatchWorkers(ctx, &kvtrackerv1.WatchWorkersRequest{})
	if err != nil {
		return nil, err
	}
	defer stream.Close()
	for stream.Receive() {
		m := stream.Msg()
		list = append(list, m.GetWorkers()...)
		if m.GetSynced() {
			if m.GetState() != kvtrackerv1.TrackerState_TRACKER_STATE_FOLLOWS {
				return list, errors.New("the tracker does not follow")
			}
			return list, nil
		}
	}
	return list, errors.Join(errors.New("the stream ended"), stream.Err())
}

// counted is what the limiter counts of the daily budget of plain requests, and
// whether all shares and reservations are back.
func (c *cluster) counted() (used int64, settled bool) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	resp, err := c.limits.Read(ctx, &limiterv1.ReadRequest{Organisation: "test/chat", Buckets: []*limiterv1.Bucket{{
		Key: "test/chat/day", Kind: &limiterv1.Bucket_Calendar{Calendar: &limiterv1.Calendar{Limit: dayLimit, Period: limiterv1.Calendar_PERIOD_DAY, TimeZone: testenv.Noon()}},
	}}})
	if err != nil {
		return 0, false
	}
	s := resp.GetStates()[0]
	return dayLimit - s.GetRemaining(), s.GetLeased() == 0
}

// settled is what is counted once all shares and reservations are back.
func (c *cluster) settled() (used int64) {
	c.t.Helper()
	if !eventually(patience, func() (ok bool) { used, ok = c.counted(); return ok }) {
		c.t.Errorf("shares of limits are still out %v after the load", patience)
	}
	return used
}

// limits is what limits let through.
type limits struct {
	// Granted tokens of the tight limit, and the most that may be: what the limit
	// and its burst give in that time, and the shares that may be out.
	Granted int64 `json:"granted"`
	Bound   int64 `json:"bound"`
	// Used tokens of the daily budget by the engines, and as the limiter counted.
	Used    int64 `json:"used"`
	Counted int64 `json:"counted"`
}

// checkLimits waits until what plain requests used is counted. before is what was
// counted when the session began.
func (s *session) checkLimits(before int64, took time.Duration) limits {
	var out limits
	for id, list := range s.c.truth.of(s.name + "-") {
		path, _ := pathOf(number(id))
		for _, u := range list {
			switch n := int64(u.Prompt + u.Output); path {
			case "tight":
				out.Granted += n
			case "chat":
				out.Used += n
			}
		}
	}
	rate := int64(s.c.tight())
	bucket := rate * tightBurst
	out.Bound = bucket + int64(took.Seconds()*float64(rate)) + bucket/10
	began := time.Now()
	eventually(patience, func() bool {
		n, settled := s.c.counted()
		if !settled {
			return false
		}
		out.Counted = n - before
		// What a dead ingress held comes back in the end.
		return out.Counted == out.Used || time.Since(began) > 2*limitTTL+2*time.Second
	})
	return out
}
