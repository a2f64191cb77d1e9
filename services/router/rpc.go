package router

import (
	"context"
	"time"

	"connectrpc.com/connect"

	"github.com/kinference/kinference/internal/plan"
	"github.com/kinference/kinference/internal/schedule"
	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
	"github.com/kinference/kinference/proto/gen/kinference/router/v1/routerv1connect"
	"github.com/kinference/kinference/services/router/internal/decisions"
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

// Report implements routerv1connect.RouterServiceHandler.
func (s *server) Report(ctx context.Context, req *routerv1.ReportRequest) (*routerv1.ReportResponse, error) {
	now := s.now()
	for _, r := range req.Reports {
		switch ev := r.Event.(type) {
		case *routerv1.Report_Moved:
			s.moved(ctx, now, r.RequestId, ev.Moved)
		case *routerv1.Report_FirstToken:
			ttft := ev.FirstToken.GetTtft().AsDuration()
			if s.providers.FirstToken(now, r.RequestId, max(0, ttft)) {
				s.decisions.FirstToken(r.RequestId, ttft)
			} else if predicted, ok := s.scheduler.FirstToken(now, r.RequestId, max(0, ttft)); ok {
				s.decisions.FirstToken(r.RequestId, ttft)
				worker, model, _ := s.decisions.Served(r.RequestId)
				s.metrics.firstToken(ctx, worker, model, predicted, ttft)
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
			s.providers.Done(r.RequestId)
			s.scheduler.Done(now, r.RequestId, o)
			s.decisions.Done(r.RequestId, decisions.End{
				At: now, Outcome: ev.Done.GetOutcome(), Prompt: o.PromptTokens, Cached: o.CachedTokens, Output: o.OutputTokens,
			})
			s.metrics.done(ctx, ev.Done.GetOutcome())
		}
	}
	s.line.Kick()
	if req.Parity != nil && s.tokens.Take(now, req.Parity) {
		s.republish()
	}
	return &routerv1.ReportResponse{}, nil
}

// moved books a request elsewhere and is wary of the worker that failed it.
func (s *server) moved(ctx context.Context, now time.Time, id string, m *routerv1.Moved) {
	s.metrics.movedAway(ctx, m.GetReason())
	if _, ok := plan.ProviderName(m.GetWorker()); !ok {
		s.mu.Lock()
		_, known := s.workers[m.GetWorker()]
		s.mu.Unlock()
		if !known { // a catalog of the past, or nonsense: the ledger must not grow by it
			return
		}
	}
	if from, _, ok := s.decisions.Served(id); ok && from != m.GetWorker() && (m.GetReason() == "connect" || m.GetReason() == "closed") {
		s.fleet.Suspect(now, uidOf(from))
	}
	s.cached.Dropped(id)
	if name, ok := plan.ProviderName(m.GetWorker()); ok {
		s.scheduler.Drop(now, id)
		s.providers.Book(now, id, name)
	} else {
		s.providers.Done(id)
		s.scheduler.Moved(now, id, m.GetWorker())
	}
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
