package router

import (
	"context"
	"encoding/json"
	"errors"
	"slices"
	"strings"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/kinference/kinference/api/v1alpha1"
	"github.com/kinference/kinference/internal/kvhash"
	"github.com/kinference/kinference/internal/plan"
	"github.com/kinference/kinference/internal/policy"
	"github.com/kinference/kinference/internal/rpc"
	"github.com/kinference/kinference/internal/schedule"
	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
	"github.com/kinference/kinference/services/router/internal/catalog"
	"github.com/kinference/kinference/services/router/internal/evaluate"
	"github.com/kinference/kinference/services/router/internal/line"
)

// prompt is one routerv1.Prompt with its hashes as kvhash has them.
type prompt struct {
	*routerv1.Prompt
	hashes []kvhash.Hash
	others []other
}

// Route implements routerv1connect.RouterServiceHandler.
func (s *server) Route(ctx context.Context, req *routerv1.RouteRequest) (*routerv1.RouteResponse, error) {
	started := s.now()
	resp, outcome, err := s.route(ctx, req)
	s.metrics.decided(ctx, outcome, s.now().Sub(started))
	return resp, err
}

func (s *server) route(ctx context.Context, req *routerv1.RouteRequest) (*routerv1.RouteResponse, string, error) {
	x, outcome, err := s.newRouting(ctx, req)
	if err != nil {
		return nil, outcome, err
	}
	if outcome, err := x.wait(); err != nil {
		return nil, outcome, err
	}
	x.record()
	switch x.verdict.Action {
	case policy.Reject:
		return nil, "rejected", x.rejected()
	case policy.Saturated:
		if x.refusal != nil {
			return nil, "queue_" + x.refusal.Reason, rpc.Error(connect.CodeResourceExhausted, "too many requests wait for the model", x.refusal.RetryAfter)
		}
		return nil, "saturated", rpc.Error(connect.CodeResourceExhausted, "every endpoint that may serve the request is too busy", retryDelay)
	case policy.Unavailable:
		return x.nowhere()
	}
	return x.answer(), "ok", nil
}

// newRouting looks up what a request has to do with; outcome names the error.
func (s *server) newRouting(ctx context.Context, req *routerv1.RouteRequest) (x *routing, outcome string, err error) {
	version, _ := s.catalog.Current()
	if version == nil {
		return nil, "no_catalog", rpc.Error(connect.CodeUnavailable, "the resources are not loaded yet", 0)
	}
	model := version.Plan.Model(req.Pool, req.Model)
	if model == nil {
		return nil, "unknown_model", errNoModel()
	}
	if len(req.Prompts) > maxPrompts {
		return nil, "invalid", rpc.Error(connect.CodeInvalidArgument, "too many prompts", 0)
	}
	attributes, err := requestOf(req)
	if err != nil {
		return nil, "invalid", rpc.Error(connect.CodeInvalidArgument, err.Error(), 0)
	}
	attributes.Tags.Doubt(model.Tags)
	x = &routing{server: s, ctx: ctx, req: req, version: version, model: model, attributes: attributes, prompts: convert(req.Prompts)}
	if x.attributes.PromptTokens = tokensOf(x.prompts, ""); len(x.prompts) == 0 {
		x.attributes.PromptTokens = int(min(req.GetAttributes().GetEstimatedTokens(), 1<<30))
	}
	return x, "", nil
}

// routing is one request on its way to a decision.
type routing struct {
	*server
	ctx        context.Context
	req        *routerv1.RouteRequest
	version    *catalog.Version
	model      *plan.Model
	attributes policy.Request
	prompts    map[string]*prompt

	// dry: nothing is booked, counted or recorded.
	dry bool
	// refusal is why the line did not let it wait, or not any longer; nil if it did.
	refusal *line.Refusal

	// While the request waits these belong to the line.
	*outlook
	dispatch schedule.Dispatch
	decision schedule.Decision
	verdict  policy.Decision
}

// requestOf is what policies see of a request.
func requestOf(req *routerv1.RouteRequest) (policy.Request, error) {
	a := req.GetAttributes()
	out := policy.Request{
		ID: req.RequestId, Model: req.Model, Tenants: a.GetTenants(), QoS: v1alpha1.QoS(a.GetQos()), MaxTokens: int(min(req.MaxTokens, 1<<30)),
		Endpoint: v1alpha1.APIEndpoint(a.GetEndpoint()), Stream: !req.Whole, Tools: a.GetTools(), Headers: a.GetHeaders(),
		Tags: tagsOf(a.GetTags(), a.GetClassified(), a.GetAbsentTags(), a.GetUnknownTags()),
	}
	if out.QoS == "" {
		out.QoS = v1alpha1.QoSInteractive
	}
	if a.GetClaimsJson() != "" {
		if err := json.Unmarshal([]byte(a.GetClaimsJson()), &out.Claims); err != nil {
			return out, errors.New("the claims are no JSON object")
		}
	}
	return out, nil
}

// workersFirst puts the workers that could serve before all others.
func workersFirst(all []evaluate.Endpoint) (sorted []evaluate.Endpoint, live int) {
	serves := func(e *evaluate.Endpoint) bool { return e.Worker != nil && e.Dropped == "" }
	for live < len(all) && serves(&all[live]) {
		live++
	}
	if !slices.ContainsFunc(all[live:], func(e evaluate.Endpoint) bool { return serves(&e) }) {
		return all, live // they are sorted, as nearly always
	}
	sorted = make([]evaluate.Endpoint, 0, len(all))
	for _, first := range [...]bool{true, false} {
		for i := range all {
			if e := &all[i]; serves(e) == first {
				sorted = append(sorted, *e)
			}
		}
		if first {
			live = len(sorted)
		}
	}
	return sorted, live
}

// policyEndpoints are endpoints as policies see them; the predictions for workers
// follow when the scheduler has made them.
func (x *routing) policyEndpoints(now time.Time, list []evaluate.Endpoint) []policy.Endpoint {
	output := plan.Output(x.attributes.MaxTokens)
	out := make([]policy.Endpoint, len(list))
	for i := range list {
		e := &list[i]
		p := &out[i]
		*p = policy.Endpoint{Backend: e.Backend, ID: e.ID, Unfit: e.Dropped, Load: e.Load()}
		switch {
		case e.Provider != nil:
			p.TTFT = x.providers.TTFT(now, e.Provider.Provider)
			p.E2E, p.Cost = plan.ProviderE2E(p.TTFT, output), plan.ProviderCost(e.Provider, x.attributes.PromptTokens, output)
		case e.Worker != nil:
			p.Labels = e.Worker.Labels
		}
	}
	return out
}

// workers are those of an order that the scheduler knows, and whether the first
// of the order is one.
func (x *routing) workers(order []int) (known []int, first bool) {
	for _, i := range order {
		if i < x.live {
			known = append(known, i)
		}
	}
	return known, len(order) > 0 && order[0] < x.live
}

func errNoModel() error { return rpc.Error(connect.CodeNotFound, "the model does not exist", 0) }

// nowhere is the answer when no endpoint is there for the request.
func (x *routing) nowhere() (*routerv1.RouteResponse, string, error) {
	if x.offered == nil { // it was there when the request came
		return nil, "unknown_model", errNoModel()
	}
	ready, tooLong := 0, 0
	for i := range x.endpoints {
		if e := &x.endpoints[i]; e.TooLong {
			ready, tooLong = ready+1, tooLong+1
		} else if e.Dropped == "" {
			ready++
		}
	}
	if tooLong > 0 && tooLong == ready {
		return nil, "too_long", rpc.Error(connect.CodeOutOfRange, "the prompt is longer than the context of every worker that is ready", 0)
	}
	return nil, "not_ready", rpc.Error(connect.CodeUnavailable, "no endpoint that may serve the request is ready", retryDelay)
}

// rejected is the error for a request that a rule refuses.
func (x *routing) rejected() error {
	err := rpc.Error(connect.CodePermissionDenied, "a policy refuses the request", 0)
	if d, derr := connect.NewErrorDetail(&routerv1.Rejection{Reason: x.verdict.Rejection.Reason, Message: x.verdict.Rejection.Message, Rule: ruleOf(&x.verdict)}); derr == nil {
		err.AddDetail(d)
	}
	return err
}

func ruleOf(d *policy.Decision) string {
	if d.Rule == "" {
		return ""
	}
	return d.Policy + "/" + d.Rule
}

// answer lists the endpoints, best first.
func (x *routing) answer() *routerv1.RouteResponse {
	resp := &routerv1.RouteResponse{Rule: ruleOf(&x.verdict), Pool: x.model.Pool.Name}
	if waited := x.waited(); waited > 0 {
		resp.Queued = durationpb.New(waited)
	}
	if r := x.verdict.Retry; r != nil {
		resp.Attempts, resp.Hedge = uint32(r.Attempts), hedge(r.Hedge)
		for _, on := range r.RetryOn {
			resp.RetryOn = append(resp.RetryOn, string(on))
		}
	}
	for _, i := range x.verdict.Order[:min(len(x.verdict.Order), maxEndpoints)] {
		if e := &x.endpoints[i]; e.Provider != nil {
			resp.Endpoints = append(resp.Endpoints, &routerv1.Endpoint{
				Worker: e.ID, Url: strings.TrimSuffix(strings.TrimRight(string(e.Provider.Provider.Spec.Endpoint), "/"), "/v1"), UpstreamModel: e.Provider.UpstreamModel, Provider: e.Provider.Provider.Name,
				PredictedTtft: durationpb.New(x.providers.TTFT(x.at, e.Provider.Provider)), Target: target(e.Provider.Provider), Bars: x.bars(i),
			})
		} else {
			resp.Endpoints = append(resp.Endpoints, endpoint(e, &x.decision.Estimates[i]))
		}
	}
	return resp
}

func convert(in []*routerv1.Prompt) map[string]*prompt {
	out := make(map[string]*prompt, len(in))
	for _, p := range in {
		out[p.Profile] = &prompt{p, hashesOf(p.BlockHashes), othersOf(p)}
	}
	return out
}

// tokensOf is the length of all prompts for a profile. An ingress whose catalog
// is a version behind may not have rendered it: another profile's length is
// then the best guess.
func tokensOf(prompts map[string]*prompt, profile string) int {
	if p := prompts[profile]; p != nil {
		return p.all()
	}
	most := 0
	for _, p := range prompts {
		most = max(most, p.all())
	}
	return most
}

func candidates(now time.Time, live []evaluate.Endpoint, prompts map[string]*prompt, found *found) []schedule.Candidate {
	out := make([]schedule.Candidate, len(live))
	for i := range live {
		e := &live[i]
		st := &e.State
		c := schedule.Candidate{
			Worker: e.ID, Profile: e.Profile.ID, Tokens: tokensOf(prompts, e.Profile.ID),
			Class: e.Profile.Set.Class, Group: e.Profile.Set.Name, TotalBlocks: st.TotalBlocks,
			Load: loadOf(now, st),
		}
		if p := prompts[e.Profile.ID]; p != nil {
			h := holding{e.Profile.ID, e.ID}
			m := found.held[h]
			c.BlockSize, c.Hashes, c.GPUTokens, c.CPUTokens = int(p.BlockSize), p.hashes, m.gpu, m.cpu
			c.Tokens -= found.others[h] // of the other prompts the worker need not compute these
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
