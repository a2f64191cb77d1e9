package router

import (
	"context"
	"time"

	"connectrpc.com/connect"

	"github.com/kinference/kinference/internal/resources"
	"github.com/kinference/kinference/internal/rpc"
	"github.com/kinference/kinference/internal/schedule"
	adminv1 "github.com/kinference/kinference/proto/gen/kinference/admin/v1"
	kvtrackerv1 "github.com/kinference/kinference/proto/gen/kinference/kvtracker/v1"
	"github.com/kinference/kinference/proto/gen/kinference/kvtracker/v1/kvtrackerv1connect"
	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
	"github.com/kinference/kinference/services/router/internal/evaluate"
	"github.com/kinference/kinference/services/router/internal/fleet"
	"github.com/kinference/kinference/services/router/internal/parity"
	"github.com/kinference/kinference/services/router/internal/trackers"
)

const (
	// indexStale is how long after its last sample what kvtracker says of a
	// worker's cache counts: no relay has read its events since, and engines
	// under load keep a prefix for some minutes.
	indexStale = 30 * time.Second
	// indexLate is the lag of a worker's events above which they explain that
	// the index knows too little: the ledger covers less.
	indexLate = 2 * time.Second
)

// overlap is what a worker holds of a prompt.
type overlap struct{ gpu, cpu int }

// holding identifies a worker under a profile.
type holding struct{ profile, worker string }

// tracker is where blocks are asked for: trackers.Set.
type tracker interface {
	// Match leaves the results nil of queries that no tracker answered.
	Match(context.Context, *kvtrackerv1.MatchRequest) (*kvtrackerv1.MatchResponse, error)
	Inspect(context.Context, *kvtrackerv1.InspectRequest) (*kvtrackerv1.InspectResponse, error)
	// Followed tells whether there is a tracker for every worker set.
	Followed() bool
}

// trackers makes the set of those that the settings name; nil for none.
func (s *server) trackers(ctx context.Context) *trackers.Set {
	if s.KVTrackerURL == "" {
		return nil
	}
	var list []trackers.Tracker
	for _, url := range rpc.URLs(s.KVTrackerURL) {
		list = append(list, trackers.Tracker{URL: url, Client: rpc.Client(ctx, url, kvtrackerv1connect.NewKVTrackerServiceClient)})
	}
	return trackers.New(list, s.fleet, s.log)
}

// found is what the candidates of a decision hold of its prompts.
type found struct {
	// held is what the decision goes by; no entry means nothing.
	held map[holding]overlap
	// asked are the profiles whose blocks kvtracker was asked for.
	asked map[string]bool
	// own are the workers of which the router's own memory counts, with the word
	// of the index; nil where it has none that could be compared.
	own map[holding]*overlap
	// others are the tokens that workers hold of other prompts than the first.
	others map[holding]int
}

// match asks kvtracker which workers hold what. Where that says nothing, for
// approximate prompts, while the tracker is away or slow, and of workers whose
// relay is away or that the index cannot know or is wrong about, the router's own
// memory of what it routed stands in.
func (s *server) match(ctx context.Context, prompts map[string]*prompt, live []evaluate.Endpoint) *found {
	f := &found{held: make(map[holding]overlap, len(live)), asked: map[string]bool{}, own: map[holding]*overlap{}, others: map[holding]int{}}
	var queries []*kvtrackerv1.Query
	var exact []*prompt
	asked := map[*resources.Profile]bool{}
	for i := range live {
		profile := live[i].Profile
		p := prompts[profile.ID]
		if p == nil || !p.hashed() || asked[profile] {
			continue
		}
		asked[profile] = true
		if p.Approximate {
			s.recall(f, p, nil)
			s.recallOthers(f, p)
			continue
		}
		exact = append(exact, p)
		queries = append(queries, &kvtrackerv1.Query{WorkerSet: profile.Set.Name, BlockSize: p.BlockSize, BlockHashes: p.BlockHashes})
	}
	firsts := len(queries)
	queries, places := otherQueries(queries, exact)
	if len(queries) == 0 {
		return f
	}
	results, why := s.ask(ctx, queries)
	if why != "" {
		s.metrics.trackerAway(ctx, why)
		for _, p := range exact {
			s.recall(f, p, nil)
			s.recallOthers(f, p)
		}
		return f
	}
	s.takeOthers(f, exact, places, results)
	stale := map[string]bool{}
	for i := range live {
		if at := live[i].State.Sampled; !at.IsZero() && s.now().Sub(at) > indexStale {
			stale[live[i].ID] = true
		}
	}
	if len(stale) > 0 {
		s.metrics.trackerAway(ctx, "stale")
	}
	unanswered := false
	for i, r := range results[:firsts] {
		p := exact[i]
		if r == nil { // nobody follows its worker set now
			s.recall(f, p, nil)
			s.recallOthers(f, p)
			unanswered = true
			continue
		}
		for _, m := range r.Matches {
			f.held[holding{p.Profile, m.Worker}] = overlap{int(m.GpuTokens), int(m.CpuTokens)}
		}
		f.asked[p.Profile] = true
		s.distrust(f, p, live, stale)
	}
	if unanswered {
		s.metrics.trackerAway(ctx, "shard")
	}
	return f
}

// distrust lets the router's own memory stand in for the index where that does
// not count.
func (s *server) distrust(f *found, p *prompt, live []evaluate.Endpoint, stale map[string]bool) {
	wrong := s.cached.Distrusted(p.Profile)
	var own map[string]bool
	for i := range live {
		e := &live[i]
		if e.Profile.ID != p.Profile {
			continue
		}
		h := holding{p.Profile, e.ID}
		said, hit := f.held[h]
		var word *overlap
		switch {
		case stale[e.ID] || !hit && unindexed(e.Worker, &e.State, int(p.BlockSize)) != 0:
		case wrong[e.ID] != 0:
			word = &overlap{said.gpu, said.cpu}
		default:
			continue
		}
		delete(f.held, h)
		f.own[h] = word
		if own == nil {
			own = map[string]bool{}
		}
		own[e.ID] = true
	}
	if own != nil {
		s.recall(f, p, own)
	}
}

// unindexed tells why the index can know nothing of a worker for prompts with
// blocks of a size; 0 if it can. Nobody would see it otherwise: what is nowhere
// cached by the index is just cold.
func unindexed(w *resources.Worker, st *fleet.State, blockSize int) routerv1.ParityCause {
	switch {
	case st.BlockSize > 0 && blockSize > 0 && st.BlockSize != blockSize:
		return routerv1.ParityCause_PARITY_CAUSE_BLOCK_SIZE
	case w.KVEvents == "":
		return routerv1.ParityCause_PARITY_CAUSE_EVENTS
	}
	return 0
}

// whyBlind tells what could make the index know less than a worker holds.
func (s *server) whyBlind(worker string) routerv1.ParityCause {
	index := s.fleet.Lookup(s.now(), uidOf(worker), worker).Index
	if !index.GetLive() || !index.GetComplete() || index.GetLag().AsDuration() > indexLate {
		return routerv1.ParityCause_PARITY_CAUSE_EVENTS
	}
	return routerv1.ParityCause_PARITY_CAUSE_HASH
}

// promise is what a decision expects of the worker that it chose. ok is false
// where there is no word of the index to compare with, and for several prompts,
// of which engines report the sum.
func (f *found) promise(now time.Time, p *prompt, worker string, est *schedule.Estimate) (out parity.Promise, ok bool) {
	h := holding{p.Profile, worker}
	word, own := f.own[h]
	if !f.asked[p.Profile] || own && word == nil || len(p.others) > 0 {
		return out, false
	}
	if !own {
		held := f.held[h]
		word = &held
	}
	return parity.Promise{
		At: now, Profile: p.Profile, Worker: worker, Tokens: int(p.Tokens), BlockSize: int(p.BlockSize), GPU: word.gpu, CPU: word.cpu,
		Expected: est.Matched + est.Anticipated + est.Fetched, Remembered: own, Wait: est.Wait,
	}, true
}

// inspectTime bounds the look at the whole index.
const inspectTime = 30 * time.Second

// inspectIndex asks kvtracker about its index.
func (s *server) inspectIndex(ctx context.Context, r *adminv1.InspectIndexRequest) (*adminv1.InspectIndexResponse, error) {
	if s.tracker == nil {
		return nil, rpc.Error(connect.CodeUnavailable, "this router has no kvtracker", 0)
	}
	ctx, cancel := context.WithTimeout(ctx, inspectTime)
	defer cancel()
	out, err := s.tracker.Inspect(ctx, &kvtrackerv1.InspectRequest{Top: r.GetTop()})
	switch connect.CodeOf(err) {
	case connect.CodeInvalidArgument:
		return nil, err
	default:
		if err != nil {
			return nil, rpc.Error(connect.CodeUnavailable, "kvtracker does not answer", time.Second)
		}
	}
	return &adminv1.InspectIndexResponse{Index: out}, nil
}

// ask calls the tracker; why names the reason when there is no answer.
func (s *server) ask(ctx context.Context, queries []*kvtrackerv1.Query) (results []*kvtrackerv1.MatchResult, why string) {
	if s.tracker == nil {
		return nil, "not_configured"
	}
	if !s.fleet.Flowing() {
		// Known to be away: do not make every request wait for a timeout.
		return nil, "away"
	}
	ctx, cancel := context.WithTimeout(ctx, s.MatchTimeout)
	defer cancel()
	resp, err := s.tracker.Match(ctx, &kvtrackerv1.MatchRequest{Queries: queries})
	switch {
	case ctx.Err() != nil:
		return nil, "slow"
	case err != nil:
		return nil, "failed"
	case len(resp.Results) != len(queries):
		return nil, "failed"
	}
	return resp.Results, ""
}

// recall enters what the router remembers of the workers in only; nil for all.
func (s *server) recall(f *found, p *prompt, only map[string]bool) {
	s.affinity.Match(s.now(), p.hashes, func(worker string, blocks int) {
		if only == nil || only[worker] {
			n := blocks * int(p.BlockSize)
			f.held[holding{p.Profile, worker}] = overlap{n, n}
		}
	})
}
