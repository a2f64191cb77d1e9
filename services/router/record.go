package router

import (
	"bytes"
	"context"
	"encoding/json"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"

	"github.com/kinference/kinference/api/v1alpha1"
	"github.com/kinference/kinference/internal/plan"
	"github.com/kinference/kinference/internal/policy"
	"github.com/kinference/kinference/internal/schedule"
	adminv1 "github.com/kinference/kinference/proto/gen/kinference/admin/v1"
	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
	"github.com/kinference/kinference/services/router/internal/decisions"
)

// Bounds of what a record keeps of a request.
const (
	maxEntries = 64  // of each list and map
	maxText    = 256 // bytes of a name, tag or header
	maxClaim   = 1024
)

// record keeps the decision for whoever asks why.
func (x *routing) record() {
	if x.req.RequestId != "" {
		x.decisions.Add(x.recorded())
	}
}

// recorded is all that the decision went by.
func (x *routing) recorded() *decisions.Record {
	r := &decisions.Record{
		RequestID: x.req.RequestId, Model: x.req.Model, Tenant: x.req.Tenant, Pool: x.model.Pool.Name,
		Decided: x.at, CatalogVersion: x.version.Number, Policy: x.decision.Policy, Reason: x.decision.Reason,
		TimeScale: x.TimeScale, Windows: x.model.Windows, Thresholds: x.version.Plan.Thresholds, Request: requestRecord(&x.attributes, &x.model.Reads),
	}
	if r.Waited = x.waited(); r.Waited > 0 {
		r.Held, r.Ahead = string(x.dispatch.Why), x.dispatch.Ahead
	}
	if x.refusal != nil {
		r.Reason, r.Refused = x.refusal.Error(), x.refusal.Reason
	}
	if !x.model.Policies.Empty() || x.refusal != nil {
		r.Verdict = x.verdictOf(&x.verdict)
		if x.verdict.Shadow != nil {
			r.Shadow = x.verdictOf(x.verdict.Shadow)
		}
	}
	order := x.verdict.Order
	if x.verdict.Action == policy.Route {
		r.Chosen = x.endpoints[order[0]].ID
	} else {
		order = nil
	}
	ranked := min(len(order), decisions.MaxCandidates)
	r.OmittedCandidates = len(order) - ranked
	dropped := min(len(x.endpoints)-len(order), decisions.MaxCandidates)
	r.OmittedDropped = len(x.endpoints) - len(order) - dropped
	r.Candidates = make([]decisions.Candidate, 0, ranked+dropped)
	for _, i := range order[:ranked] {
		r.Candidates = append(r.Candidates, x.candidate(i))
	}
	for i := range x.endpoints {
		if len(r.Candidates) == cap(r.Candidates) {
			break
		}
		if x.verdict.Verdicts[i].Cause != policy.Kept || len(order) == 0 {
			r.Candidates = append(r.Candidates, x.candidate(i))
		}
	}
	return r
}

// candidate is an endpoint as it was at the decision.
func (x *routing) candidate(i int) decisions.Candidate {
	e, p := &x.endpoints[i], &x.seen[i]
	c := decisions.Candidate{
		Worker: e.ID, Index: int32(i), Unfit: p.Unfit, Verdict: x.verdict.Verdicts[i], Ignored: x.verdict.Action == policy.Reject,
		TTFT: p.TTFT, E2E: p.E2E, Cost: p.Cost, Labels: p.Labels, Fresh: e.Fresh, Mean30s: e.State.Mean30s, Held: e.State.Held,
	}
	if e.Provider != nil {
		c.UpstreamModel, c.Predicted, c.Tokens = e.Provider.UpstreamModel, true, int32(x.attributes.PromptTokens)
		return c
	}
	c.Profile = e.Profile.ID
	if st := &e.State; !st.Sampled.IsZero() {
		c.Sampled, c.Running, c.Waiting, c.KVUsage, c.Age = true, st.Running, st.Waiting, st.KVUsage, max(0, x.at.Sub(st.Sampled))
	}
	c.Tokens = int32(tokensOf(x.prompts, e.Profile.ID))
	if e.Means != nil {
		c.Means = e.Means.Loads
	}
	if i >= x.live {
		return c
	}
	est := &x.decision.Estimates[i]
	by := est.Predicted()
	c.Predicted, c.Matched, c.Anticipated, c.Cached, c.InFlight = true, int32(est.Matched), int32(est.Anticipated), int32(est.Cached), int32(est.InFlight)
	c.Wait, c.Prefill, c.Others, c.RecentWork, c.OwnWork = est.Wait, est.Prefill, by.Others, by.Recent, by.Work
	c.Interference, c.EvictionLoss, c.Score, c.Hold = est.Interference, est.EvictionLoss, by.J, string(est.Hold)
	c.Filled, c.Settles = int32(by.Filled), by.Settles
	c.Pages, c.Free = int32(min(est.Pages, 1<<30)), int32(min(est.Free, 1<<30))
	if own := x.prompts[e.Profile.ID]; own != nil {
		c.Tie = schedule.TieHash(x.req.RequestId, own.hashes, e.ID)
	} else {
		c.Tie = schedule.TieHash(x.req.RequestId, nil, e.ID)
	}
	return c
}

func (x *routing) verdictOf(d *policy.Decision) *adminv1.Verdict {
	out := &adminv1.Verdict{Action: d.Action.String(), Rule: ruleOf(d), Stage: uint32(d.Stage), Emptied: d.Emptied}
	if d.Action == policy.Route {
		out.Chosen = x.endpoints[d.Order[0]].ID
	}
	return out
}

// requestRecord is what a record keeps of a request: all that policies look at,
// and of headers and claims only those that they do look at.
func requestRecord(r *policy.Request, reads *policy.Reads) *adminv1.RecordedRequest {
	out := &adminv1.RecordedRequest{
		Qos: string(r.QoS), Endpoint: string(r.Endpoint), Stream: r.Stream, PromptTokens: uint32(r.PromptTokens), MaxTokens: uint32(r.MaxTokens),
		Classified: r.Tags.Complete, HeadersWithheld: reads.OtherHeaders, ClaimsWithheld: reads.OtherClaims,
	}
	for _, l := range []struct {
		from []string
		to   *[]string
	}{{r.Tenants, &out.Tenants}, {r.Tools, &out.Tools}, {r.Tags.Present, &out.Tags}} {
		*l.to = l.from[:min(len(l.from), maxEntries)]
		out.Cut = out.Cut || len(l.from) > maxEntries
		if slices.ContainsFunc(*l.to, func(s string) bool { return len(s) > maxText }) {
			out.Cut = true
			*l.to = slices.Clone(*l.to)
			for i, s := range *l.to {
				(*l.to)[i] = strings.ToValidUTF8(s[:min(len(s), maxText)], "")
			}
		}
	}
	recordTags(out, &r.Tags)
	for _, name := range reads.Headers {
		if credential(name) || len(r.Headers[name]) > maxText || len(out.HeaderNames) == maxEntries {
			out.HeadersWithheld = true
			continue
		}
		out.HeaderNames = append(out.HeaderNames, name)
		if v, ok := r.Headers[name]; ok {
			put(&out.Headers, name, v)
		}
	}
	for _, name := range reads.Claims {
		v, ok := r.Claims[name]
		var raw []byte
		if ok {
			raw, _ = json.Marshal(v) // it came from JSON
		}
		if credential(name) || len(raw) > maxClaim || len(out.ClaimNames) == maxEntries {
			out.ClaimsWithheld = true
			continue
		}
		out.ClaimNames = append(out.ClaimNames, name)
		if ok {
			put(&out.ClaimsJson, name, string(bytes.TrimSpace(raw)))
		}
	}
	return out
}

func put(m *map[string]string, name, value string) {
	if *m == nil {
		*m = map[string]string{}
	}
	(*m)[name] = strings.ToValidUTF8(value, "")
}

// credential tells whether a header or claim by this name may hold a secret. A rule
// may read it all the same; no record keeps it.
func credential(name string) bool {
	name = strings.ToLower(name)
	for _, part := range []string{"authorization", "cookie", "token", "secret", "password", "credential", "api-key", "apikey", "api_key", "signature", "session"} {
		if strings.Contains(name, part) {
			return true
		}
	}
	return false
}

// evaluated is what would be decided about a request that nobody has made.
func (s *server) evaluated(ctx context.Context, req *adminv1.EvaluateRequest) (*adminv1.Decision, error) {
	asked := &routerv1.RouteRequest{
		RequestId: req.RequestId, Model: req.Model, MaxTokens: req.MaxTokens, Whole: req.Whole, Attributes: req.Attributes,
		Prompts: []*routerv1.Prompt{{Tokens: min(req.PromptTokens, 1<<30)}},
	}
	if list := req.GetAttributes().GetTenants(); len(list) > 0 {
		asked.Tenant = list[0]
	}
	x, _, err := s.newRouting(ctx, asked)
	if err != nil {
		return nil, err
	}
	x.attributes.QoS = v1alpha1.QoS(req.GetAttributes().GetQos())
	plan.Complete(x.version.Resources, x.model.Pool, &x.attributes)
	if x.attributes.ID == "" {
		x.attributes.ID = strconv.FormatUint(rand.Uint64(), 36)
	}
	x.dry = true
	x.decide()
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	return x.recorded().Proto(), nil
}
