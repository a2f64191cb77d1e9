package router

import (
	"context"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/kinference/kinference/internal/kvhash"
	"github.com/kinference/kinference/internal/rpc"
	"github.com/kinference/kinference/internal/schedule"
	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
	"github.com/kinference/kinference/proto/gen/kinference/router/v1/routerv1connect"
	"github.com/kinference/kinference/services/router/internal/decisions"
	"github.com/kinference/kinference/services/router/internal/evaluate"
)

var _ routerv1connect.RouterServiceHandler = (*server)(nil)

const (
	// retryDelay is what a client is told when no worker is ready: about
	// what a readiness probe needs to see one come back.
	retryDelay = time.Second
	// maxEndpoints bounds the answer of Route: nobody fails over more often.
	maxEndpoints = 8
	// maxPrompts bounds the profiles of one request.
	maxPrompts = 64
)

// prompt is one routerv1.Prompt with its hashes as kvhash has them.
type prompt struct {
	*routerv1.Prompt
	hashes []kvhash.Hash
}

// Route implements routerv1connect.RouterServiceHandler.
func (s *server) Route(ctx context.Context, req *routerv1.RouteRequest) (*routerv1.RouteResponse, error) {
	started := s.now()
	resp, outcome, err := s.route(ctx, req)
	s.metrics.decided(ctx, outcome, s.now().Sub(started))
	return resp, err
}

func (s *server) route(ctx context.Context, req *routerv1.RouteRequest) (*routerv1.RouteResponse, string, error) {
	version, _ := s.catalog.Current()
	if version == nil {
		return nil, "no_catalog", rpc.Error(connect.CodeUnavailable, "the resources are not loaded yet", retryDelay)
	}
	model := version.Resources.Models[req.Model]
	if model == nil {
		return nil, "unknown_model", rpc.Error(connect.CodeNotFound, "the model does not exist", 0)
	}
	if len(req.Prompts) > maxPrompts {
		return nil, "invalid", rpc.Error(connect.CodeInvalidArgument, "too many prompts", 0)
	}
	prompts := convert(req.Prompts)
	endpoints := evaluate.Endpoints(s.now(), evaluate.Request{
		Model: model, Exclude: req.Exclude,
		Tokens: func(profile string) int {
			if p := prompts[profile]; p != nil && p.Approximate {
				return 0 // an estimate is no reason to refuse
			}
			return tokensOf(prompts, profile)
		},
	}, s.fleet)
	live, dropped := split(endpoints)
	if len(live) == 0 {
		return s.nowhere(endpoints)
	}
	found := s.match(ctx, prompts, live)
	if ctx.Err() != nil { // nobody would report what is booked now
		return nil, "canceled", ctx.Err()
	}
	now := s.now()
	d := s.scheduler.Decide(now, schedule.Request{
		ID: req.RequestId, Tenant: req.Tenant, Model: req.Model, Connection: req.Connection, MaxTokens: int(min(req.MaxTokens, 1<<30)),
		Whole: req.Whole,
	}, candidates(now, live, prompts, found.held))

	chosen := live[d.Order[0]]
	if p := prompts[chosen.Profile.ID]; p != nil {
		s.affinity.Record(now, chosen.ID, p.hashes)
		if promise, ok := found.promise(now, p, chosen.ID, &d.Estimates[d.Order[0]]); ok {
			s.cached.Promised(req.RequestId, promise)
		}
	}
	s.metrics.chosen(ctx, model.Name, &d.Estimates[d.Order[0]])
	if req.RequestId != "" {
		s.decisions.Add(&decisions.Record{
			RequestID: req.RequestId, Model: req.Model, Tenant: req.Tenant, Pool: chosen.Pool.Name,
			Decided: now, CatalogVersion: version.Number, Decision: d, Dropped: dropped,
		})
	}
	resp := &routerv1.RouteResponse{}
	for _, i := range d.Order[:min(len(d.Order), maxEndpoints)] {
		resp.Endpoints = append(resp.Endpoints, endpoint(&live[i], &d.Estimates[i]))
	}
	return resp, "ok", nil
}

// nowhere is the answer when every endpoint was dropped.
func (s *server) nowhere(endpoints []evaluate.Endpoint) (*routerv1.RouteResponse, string, error) {
	ready := 0
	tooLong := 0
	for i := range endpoints {
		if endpoints[i].State.Ready {
			ready++
		}
		if endpoints[i].TooLong {
			tooLong++
		}
	}
	if tooLong > 0 && tooLong == ready {
		return nil, "too_long", rpc.Error(connect.CodeOutOfRange, "the prompt is longer than the context of every worker that is ready", 0)
	}
	return nil, "not_ready", rpc.Error(connect.CodeUnavailable, "no worker of the model is ready", retryDelay)
}

func convert(in []*routerv1.Prompt) map[string]*prompt {
	out := make(map[string]*prompt, len(in))
	for _, p := range in {
		hashes := make([]kvhash.Hash, len(p.BlockHashes))
		for i, h := range p.BlockHashes {
			hashes[i] = kvhash.Hash(h)
		}
		out[p.Profile] = &prompt{p, hashes}
	}
	return out
}

// tokensOf is the length of the prompt for a profile. An ingress whose catalog
// is a version behind may not have rendered it: another profile's length is
// then the best guess.
func tokensOf(prompts map[string]*prompt, profile string) int {
	if p := prompts[profile]; p != nil {
		return int(p.Tokens)
	}
	most := 0
	for _, p := range prompts {
		most = max(most, int(p.Tokens))
	}
	return most
}

// split moves the candidates to the front of all and describes the others.
func split(all []evaluate.Endpoint) (live []evaluate.Endpoint, dropped []decisions.Dropped) {
	live = all[:0]
	for i := range all {
		if e := &all[i]; e.Dropped == "" {
			live = append(live, *e)
		} else {
			dropped = append(dropped, decisions.Dropped{Worker: e.ID, Profile: e.Profile.ID, Why: e.Dropped})
		}
	}
	return live, dropped
}

func candidates(now time.Time, live []evaluate.Endpoint, prompts map[string]*prompt, matches map[holding]overlap) []schedule.Candidate {
	out := make([]schedule.Candidate, len(live))
	for i := range live {
		e := &live[i]
		st := &e.State
		c := schedule.Candidate{
			Worker: e.ID, Profile: e.Profile.ID, Tokens: tokensOf(prompts, e.Profile.ID),
			Class: e.Profile.Set.Class, Group: e.Profile.Set.Name, TotalBlocks: st.TotalBlocks,
			Load: schedule.Load{Running: st.Running, Waiting: st.Waiting, KVUsage: st.KVUsage, Known: !st.Sampled.IsZero()},
		}
		if c.Load.Known {
			c.Load.Age = max(0, now.Sub(st.Sampled))
		}
		if p := prompts[e.Profile.ID]; p != nil {
			m := matches[holding{e.Profile.ID, e.ID}]
			c.BlockSize, c.Hashes, c.GPUTokens, c.CPUTokens = int(p.BlockSize), p.hashes, m.gpu, m.cpu
			if st.BlockSize > 0 && st.BlockSize != c.BlockSize {
				c.TotalBlocks = 0 // counted in other blocks than the prompt
			}
		}
		out[i] = c
	}
	return out
}

func endpoint(e *evaluate.Endpoint, est *schedule.Estimate) *routerv1.Endpoint {
	out := &routerv1.Endpoint{
		Worker: e.ID, Url: e.Worker.URL, Profile: e.Profile.ID, UpstreamModel: e.Profile.UpstreamModel,
		PredictedTtft: durationpb.New(est.TTFT), MatchedTokens: uint32(est.Matched + est.Anticipated),
	}
	if e.Profile.Set.Ranks > 1 {
		rank := uint32(e.Rank)
		out.DataParallelRank = &rank
	}
	return out
}

// Report implements routerv1connect.RouterServiceHandler.
func (s *server) Report(ctx context.Context, req *routerv1.ReportRequest) (*routerv1.ReportResponse, error) {
	now := s.now()
	for _, r := range req.Reports {
		switch ev := r.Event.(type) {
		case *routerv1.Report_Moved:
			s.moved(ctx, now, r.RequestId, ev.Moved)
		case *routerv1.Report_FirstToken:
			ttft := ev.FirstToken.GetTtft().AsDuration()
			if predicted, ok := s.scheduler.FirstToken(now, r.RequestId, max(0, ttft)); ok {
				s.decisions.FirstToken(r.RequestId, ttft)
				s.metrics.firstToken(ctx, predicted, ttft)
			}
		case *routerv1.Report_Done:
			if ev.Done == nil {
				continue
			}
			o := schedule.Outcome{
				OK:           ev.Done.GetOutcome() == routerv1.Outcome_OUTCOME_OK,
				PromptTokens: known(ev.Done.PromptTokens), CachedTokens: known(ev.Done.CachedTokens), OutputTokens: known(ev.Done.OutputTokens),
			}
			if o.OK {
				o.CachedTokens = s.cached.Done(now, r.RequestId, o.PromptTokens, o.CachedTokens)
			} else {
				s.cached.Dropped(r.RequestId)
			}
			s.scheduler.Done(now, r.RequestId, o)
			s.decisions.Done(r.RequestId, o.CachedTokens)
			s.metrics.done(ctx, ev.Done.GetOutcome())
		}
	}
	if req.Parity != nil && s.tokens.Take(now, req.Parity) {
		s.republish()
	}
	return &routerv1.ReportResponse{}, nil
}

// moved books a request elsewhere and is wary of the worker that failed it.
func (s *server) moved(ctx context.Context, now time.Time, id string, m *routerv1.Moved) {
	s.metrics.movedAway(ctx, m.GetReason())
	s.mu.Lock()
	_, known := s.workers[m.GetWorker()]
	s.mu.Unlock()
	if !known { // a catalog of the past, or nonsense: the ledger must not grow by it
		return
	}
	if from, ok := s.decisions.ServedBy(id); ok && from != m.GetWorker() && (m.GetReason() == "connect" || m.GetReason() == "closed") {
		s.fleet.Suspect(now, uidOf(from))
	}
	s.cached.Dropped(id)
	s.scheduler.Moved(now, id, m.GetWorker())
	s.decisions.Moved(id, m.GetWorker())
}

// uidOf is the endpoint of a worker id: uid/rank.
func uidOf(id string) string {
	for i := len(id) - 1; i >= 0; i-- {
		if id[i] == '/' {
			return id[:i]
		}
	}
	return id
}

func known(v *uint32) int {
	if v == nil {
		return -1
	}
	return int(min(*v, 1<<30))
}

// WatchCatalog implements routerv1connect.RouterServiceHandler. A watcher that
// is slow skips versions.
func (s *server) WatchCatalog(ctx context.Context, _ *routerv1.WatchCatalogRequest, out *connect.ServerStream[routerv1.WatchCatalogResponse]) error {
	var sent uint64
	for {
		v, changed := s.catalog.Current()
		if v != nil && v.Number != sent {
			if err := out.Send(v.Message); err != nil {
				return err
			}
			sent = v.Number
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-changed:
		}
	}
}

// Explain implements routerv1connect.RouterServiceHandler.
func (s *server) Explain(_ context.Context, req *routerv1.ExplainRequest) (*routerv1.ExplainResponse, error) {
	d, ok := s.decisions.Explain(req.RequestId)
	if !ok {
		return nil, rpc.Error(connect.CodeNotFound, "no record of this request: it is unknown or too old", 0)
	}
	return &routerv1.ExplainResponse{Decision: d}, nil
}
