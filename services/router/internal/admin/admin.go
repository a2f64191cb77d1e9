// Package admin serves the admin API: what people and their tools ask a running
// control plane.
//
// The router serves it on a port of its own. Every call is checked by package
// access before anything of it is looked at; there are no anonymous calls. Calls
// that change something, and calls that are refused for lack of rights, are written
// to the audit log. Handlers read the router's state and never hold it up; they are
// safe for concurrent use.
package admin

import (
	"context"
	"fmt"
	"maps"
	"net"
	"net/http"
	"slices"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	"github.com/kinference/kinference/internal/rpc"
	"github.com/kinference/kinference/proto/gen/kinference/accounting/v1/accountingv1connect"
	adminv1 "github.com/kinference/kinference/proto/gen/kinference/admin/v1"
	"github.com/kinference/kinference/proto/gen/kinference/admin/v1/adminv1connect"
	"github.com/kinference/kinference/services/router/internal/access"
	"github.com/kinference/kinference/services/router/internal/console"
	"github.com/kinference/kinference/services/router/internal/decisions"
)

// Router is what the API tells of: the router's server.
type Router interface {
	// Catalog is the newest one; empty before the first.
	Catalog() *adminv1.GetCatalogResponse
	// Status is the state of the fleet.
	Status() *adminv1.StatusResponse
	// Evaluate decides about a request without booking it. Its errors are for the
	// caller.
	Evaluate(ctx context.Context, r *adminv1.EvaluateRequest) (*adminv1.Decision, error)
	// InspectIndex asks kvtracker. Its errors are for the caller.
	InspectIndex(ctx context.Context, r *adminv1.InspectIndexRequest) (*adminv1.InspectIndexResponse, error)
}

// Settings of the API.
type Settings struct {
	Router    Router
	Decisions *decisions.Log
	Keys      Keys
	// Access says who may call; without a source nobody may.
	Access access.Sources
	// Recheck is how often it is looked whether a stream is still allowed; 0: 10 s.
	Recheck time.Duration
	// Refused is told of each call that is refused, with the reason: unauthenticated,
	// denied or unavailable; nil: nobody is.
	Refused func(reason string)
	// AccountingURL lists the URLs of accounting, whose usage and objectives are passed
	// on; empty: they are not.
	AccountingURL string
	// Console says that the web page is served, too.
	Console bool
	// Audit receives a line for each call that changes something or is refused; nil:
	// none.
	Audit *Audit
}

// needs is what each procedure needs. Whoever adds a call says here what it needs;
// one that is not here is only for those who may do everything. Those of keys have
// the resource keys, with get, create and delete.
var needs = map[string]access.Permission{
	adminv1connect.AdminServiceGetCatalogProcedure:     {Resource: "catalog", Verb: "get"},
	adminv1connect.AdminServiceStatusProcedure:         {Resource: "workers", Verb: "get"},
	adminv1connect.AdminServiceListWorkersProcedure:    {Resource: "workers", Verb: "get"},
	adminv1connect.AdminServiceExplainProcedure:        {Resource: "decisions", Verb: "get"},
	adminv1connect.AdminServiceWatchDecisionsProcedure: {Resource: "decisions", Verb: "watch"},
	adminv1connect.AdminServiceEvaluateProcedure:       {Resource: "decisions", Verb: "get"},
	adminv1connect.AdminServiceInspectIndexProcedure:   {Resource: "workers", Verb: "get"},
	adminv1connect.AdminServiceListKeysProcedure:       {Resource: "keys", Verb: "get"},
	adminv1connect.AdminServiceCreateKeyProcedure:      {Resource: "keys", Verb: "create"},
	adminv1connect.AdminServiceRevokeKeyProcedure:      {Resource: "keys", Verb: "delete"},
}

// Serve answers on l until ctx is done, with the certificate of this process if it
// has one. Callers show a token, no certificate.
func Serve(ctx context.Context, l net.Listener, s Settings) error {
	return rpc.ServeHTTP(ctx, l, &http.Server{Handler: handler(ctx, s), TLSConfig: rpc.TLS(ctx)})
}

// handler checks credentials before it reads a message, also for paths that are
// none of ours.
func handler(ctx context.Context, s Settings) http.Handler {
	h := rpc.Mount[adminv1connect.AdminServiceHandler](ctx, &service{Settings: s},
		func(svc adminv1connect.AdminServiceHandler, options ...connect.HandlerOption) (string, http.Handler) {
			return adminv1connect.NewAdminServiceHandler(svc, append(options, connect.WithInterceptors(outcomes{}))...)
		})
	all := maps.Clone(needs)
	maps.Copy(all, accountingNeeds)
	usage := &accounting{}
	if s.AccountingURL != "" {
		usage.client = rpc.Client(ctx, s.AccountingURL, accountingv1connect.NewAccountingServiceClient)
	}
	a := rpc.Mount[accountingv1connect.AccountingServiceHandler](ctx, usage, accountingv1connect.NewAccountingServiceHandler)
	calls := http.NewServeMux()
	calls.Handle(h.Path, h.Handler)
	calls.Handle(a.Path, a.Handler)
	guarded := guard(s, all, calls)
	if !s.Console {
		return guarded
	}
	mux := http.NewServeMux()
	mux.Handle("/", guarded)
	mux.Handle(console.Path, console.Handler())
	return mux
}

// service implements the calls. They are allowed when they arrive here.
type service struct {
	adminv1connect.UnimplementedAdminServiceHandler
	Settings
}

var _ adminv1connect.AdminServiceHandler = (*service)(nil)

func (s *service) GetCatalog(context.Context, *adminv1.GetCatalogRequest) (*adminv1.GetCatalogResponse, error) {
	return s.Router.Catalog(), nil
}

func (s *service) Status(context.Context, *adminv1.StatusRequest) (*adminv1.StatusResponse, error) {
	return s.Router.Status(), nil
}

func (s *service) ListWorkers(_ context.Context, r *adminv1.ListWorkersRequest) (*adminv1.ListWorkersResponse, error) {
	st := s.Router.Status()
	out := &adminv1.ListWorkersResponse{Workers: st.Workers, Providers: st.Providers}
	if r.WorkerSet != "" {
		out.Providers = nil
		out.Workers = slices.DeleteFunc(out.Workers, func(w *adminv1.WorkerStatus) bool { return w.WorkerSet != r.WorkerSet })
	}
	return out, nil
}

func (s *service) InspectIndex(ctx context.Context, r *adminv1.InspectIndexRequest) (*adminv1.InspectIndexResponse, error) {
	return s.Router.InspectIndex(ctx, r)
}

func (s *service) Explain(_ context.Context, r *adminv1.ExplainRequest) (*adminv1.ExplainResponse, error) {
	d, ok := s.Decisions.Explain(r.RequestId)
	if !ok {
		return nil, rpc.Error(connect.CodeNotFound, "no record of this request: it is unknown or too old", 0)
	}
	return &adminv1.ExplainResponse{Decision: d}, nil
}

func (s *service) Evaluate(ctx context.Context, r *adminv1.EvaluateRequest) (*adminv1.EvaluateResponse, error) {
	if n := proto.Size(r); n > maxRequest {
		return nil, rpc.Error(connect.CodeInvalidArgument, fmt.Sprintf("the request has %d bytes, at most %d are allowed", n, maxRequest), 0)
	}
	d, err := s.Router.Evaluate(ctx, r)
	if err != nil {
		return nil, err
	}
	return &adminv1.EvaluateResponse{Decision: d}, nil
}

// maxRequest bounds a request that is evaluated, in bytes.
const maxRequest = 256 << 10

func (s *service) WatchDecisions(ctx context.Context, r *adminv1.WatchDecisionsRequest, out *connect.ServerStream[adminv1.WatchDecisionsResponse]) error {
	f := decisions.Filter{
		Model: r.Model, Tenant: r.Tenant, Policy: r.Policy, Rule: r.Rule, Worker: r.Worker, Backend: r.Backend, Action: r.Action,
		ShadowDiffers: r.ShadowDiffers, Finished: r.Finished,
	}
	sub, ok := s.Decisions.Subscribe(f, int(min(r.Recent, 1<<30)))
	if !ok {
		return rpc.Error(connect.CodeResourceExhausted, "too many are watching decisions", 0)
	}
	defer sub.Close()
	// The headers go out at once, so that the client knows that it will miss none.
	if err := out.Send(nil); err != nil {
		return err
	}
	for {
		d, more := sub.Kept()
		if !more {
			break
		}
		if err := out.Send(&adminv1.WatchDecisionsResponse{Decision: d}); err != nil {
			return err
		}
	}
	if r.OnlyRecent {
		return nil
	}
	for {
		d, missed, err := sub.Next(ctx)
		if err != nil {
			return context.Cause(ctx) // why the stream ends: it may be allowed no longer
		}
		if err := out.Send(&adminv1.WatchDecisionsResponse{Decision: d, Missed: missed}); err != nil {
			return err
		}
	}
}
