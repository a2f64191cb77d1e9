package replay

import (
	"cmp"
	"strconv"
	"strings"
	"time"

	"github.com/kinference/kinference/api/v1alpha1"
	"github.com/kinference/kinference/internal/plan"
	"github.com/kinference/kinference/internal/policy"
)

// Usage is what a replay takes of a usage event (kinference.usage.v1 in a
// CloudEvent).
type Usage struct {
	ID   string `json:"id"`
	Data struct {
		RequestID  string   `json:"requestId"`
		Tenants    []string `json:"tenants"`
		QoS        string   `json:"qos"`
		Route      string   `json:"route"`
		Stream     bool     `json:"stream"`
		Model      string   `json:"model"`
		WorkerSet  string   `json:"workerSet"`
		Provider   string   `json:"provider"`
		Worker     string   `json:"worker"`
		Rule       string   `json:"rule"`
		Tags       []string `json:"tags"`
		Status     int      `json:"status"`
		TTFT       *float64 `json:"ttft"`
		E2E        *float64 `json:"e2e"`
		Classified bool     `json:"classified"`
		Tokens     struct {
			Input  int `json:"input"`
			Output int `json:"output"`
		} `json:"tokens"`
		Cost *struct {
			Total string `json:"total"`
		} `json:"cost"`
	} `json:"data"`
}

// backend is the worker set or provider that answered; empty if none did.
func (u *Usage) backend() string {
	if u.Data.Provider != "" {
		return plan.ProviderID(u.Data.Provider)
	}
	return u.Data.WorkerSet
}

func (u *Usage) cost() (float64, bool) {
	if u.Data.Cost == nil {
		return 0, false
	}
	v, err := strconv.ParseFloat(u.Data.Cost.Total, 64)
	return v, err == nil
}

// usual is what backends took on average, by the log.
type usual map[string]*sums

type sums struct {
	ttft, e2e, cost    float64
	ttfts, e2es, costs int
}

// Learn takes an event into the averages by which Event predicts: hand over the whole
// log first.
func (r *Replayer) Learn(u *Usage) {
	name := u.backend()
	if name == "" {
		return
	}
	if r.usual == nil {
		r.usual = usual{}
	}
	s := r.usual[name]
	if s == nil {
		s = &sums{}
		r.usual[name] = s
	}
	if t := u.Data.TTFT; t != nil {
		s.ttft, s.ttfts = s.ttft+*t, s.ttfts+1
	}
	if t := u.Data.E2E; t != nil {
		s.e2e, s.e2es = s.e2e+*t, s.e2es+1
	}
	if c, ok := u.cost(); ok {
		s.cost, s.costs = s.cost+c, s.costs+1
	}
}

func (s *sums) predict() (ttft, e2e time.Duration, cost float64) {
	ttft, e2e, cost = Unknown, Unknown, -1
	if s == nil {
		return ttft, e2e, cost
	}
	if s.ttfts > 0 {
		ttft = seconds(s.ttft / float64(s.ttfts))
	}
	if s.e2es > 0 {
		e2e = seconds(s.e2e / float64(s.e2es))
	}
	if s.costs > 0 {
		cost = s.cost / float64(s.costs)
	}
	return ttft, e2e, cost
}

func seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }

// routes of the public API.
var routes = map[string]v1alpha1.APIEndpoint{
	"/v1/chat/completions": v1alpha1.EndpointChatCompletions, "/v1/completions": v1alpha1.EndpointCompletions, "/v1/responses": v1alpha1.EndpointResponses,
	"/v1/messages": v1alpha1.EndpointMessages, "/v1/embeddings": v1alpha1.EndpointEmbeddings,
}

// idle is the load of a worker set of which nothing is known.
type idle struct{}

// Mean implements policy.Load.
func (idle) Mean(policy.Metric, time.Duration) (float64, bool) { return 0, true }

// Event decides about the request of a usage event: to which worker set or provider
// it would go if all were ready and idle, and took what they took on average in the
// log. It reports false where no pool serves the model now, and for requests that
// were refused before anything was decided.
func (r *Replayer) Event(u *Usage) (out Result, ok bool) {
	x := &u.Data
	m := r.plan.Models[x.Model]
	if m == nil || u.backend() == "" && x.Rule == "" {
		return out, false
	}
	q := &policy.Request{
		ID: x.RequestID, Model: x.Model, QoS: v1alpha1.QoS(x.QoS), Endpoint: routes[x.Route], Stream: x.Stream, PromptTokens: x.Tokens.Input,
		Tags: policy.Tags{Present: x.Tags, Complete: x.Classified || len(x.Tags) > 0},
	}
	for _, t := range x.Tenants {
		q.Tenants = append(q.Tenants, plan.Base(t))
	}
	plan.Complete(r.catalog, m.Pool, q)
	out.Lacks[Approximate] = true
	out.Lacks[Headers], out.Lacks[Claims] = len(m.Reads.Headers) > 0 || m.Reads.OtherHeaders, len(m.Reads.Claims) > 0 || m.Reads.OtherClaims

	var list []endpoint
	for i := range m.Targets {
		t := &m.Targets[i]
		e := endpoint{target: t, place: -1, Endpoint: policy.Endpoint{Backend: t.Backend, ID: backendOf(t)}}
		e.TTFT, e.E2E, e.Cost = r.usual[e.ID].predict()
		if t.Provider != nil {
			e.Cost = plan.ProviderCost(t.Provider, x.Tokens.Input, cmp.Or(x.Tokens.Output, plan.Output(0)))
		} else {
			e.Load = idle{}
			if len(t.Profile.Set.Workers) == 0 && t.Profile.Set.Selector == nil {
				e.Unfit = "has no workers"
			}
		}
		list = append(list, e)
	}
	v := evaluate(m, q, list, nil)

	out.Before = Outcome{Action: policy.Route.String(), Rule: x.Rule, Endpoint: u.backend(), Backend: u.backend(), TTFT: Unknown, E2E: Unknown, Cost: -1}
	if out.Before.Backend == "" {
		out.Before.Action = refusal(x.Status)
	}
	if x.TTFT != nil {
		out.Before.TTFT = seconds(*x.TTFT)
	}
	if x.E2E != nil {
		out.Before.E2E = seconds(*x.E2E)
	}
	if c, ok := u.cost(); ok {
		out.Before.Cost = c
	}
	out.After = after(&v, list)
	if out.After.Backend == out.Before.Backend && out.After.Backend != "" { // what it took it would take again
		out.After.TTFT, out.After.E2E, out.After.Cost = out.Before.TTFT, out.Before.E2E, out.Before.Cost
	}
	for _, i := range v.Order {
		out.Order = append(out.Order, list[i].ID)
	}
	out.Changed = out.Before.Action != out.After.Action || out.Before.Backend != out.After.Backend
	return out, true
}

// refusal is what was done, by the status that the client got.
func refusal(status int) string {
	switch {
	case status == 429:
		return policy.Saturated.String()
	case status >= 500:
		return policy.Unavailable.String()
	}
	return policy.Reject.String()
}

// IsUsage tells whether a line of JSON is a usage event rather than a record.
func IsUsage(line []byte) bool {
	return strings.Contains(string(line[:min(len(line), 4096)]), `"specversion"`)
}
