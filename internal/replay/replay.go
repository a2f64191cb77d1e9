// Package replay decides recorded requests anew, under the policies of another
// catalog.
//
// kinfctl calls it with records of decisions, and with usage logs. From a record
// of the present format the same policies decide the same, and others what a router
// with them would have decided in that moment; what a record does not hold is taken
// as Lacks says. Each request is taken by itself: what another decision would have
// changed for later requests is not followed. A Replayer is not safe for concurrent
// use.
package replay

import (
	"cmp"
	"encoding/json"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/kinference/kinference/api/v1alpha1"
	"github.com/kinference/kinference/internal/plan"
	"github.com/kinference/kinference/internal/policy"
	"github.com/kinference/kinference/internal/resources"
	"github.com/kinference/kinference/internal/schedule"
	adminv1 "github.com/kinference/kinference/proto/gen/kinference/admin/v1"
)

// Unknown is a prediction that nobody has made; it is slower than all others.
const Unknown = time.Duration(math.MaxInt64)

// Offline is the scheduling policy of records that kinfctl made without a router:
// endpoints by their own numbers.
const Offline = "offline"

// Lack is something that was not recorded and had to be taken for something.
type Lack int

// The lacks.
const (
	OldFormat   Lack = iota // the record is of an older version
	Headers                 // headers that rules read: taken as absent
	Claims                  // claims that rules read: taken as absent
	Cut                     // tenants, tools or tags beyond the bounds of a record
	Memory                  // whether a threshold with an end of its own was held: taken as not
	Windows                 // means over a window that rules look at: that of 30 s is taken
	Omitted                 // endpoints beyond the bounds of a record
	Unseen                  // worker sets that the policies recorded could not send it to
	Unpredicted             // the prediction for a provider: taken as the slowest
	Gone                    // endpoints that the pool does not have now
	Unranked                // the scheduling policy cannot be repeated
	Approximate             // a usage event: neither loads nor single workers are known
	NumLacks
)

// Outcome is what was decided about a request.
type Outcome struct {
	// Action is route, reject, saturated, unavailable or queue.
	Action string
	// Rule that decided, as namespace/policy/rule; empty for none.
	Rule string
	// Endpoint is the id of the first endpoint, Backend its worker set, or "provider "
	// and the name of the provider. Empty unless routed.
	Endpoint, Backend string
	// TTFT and E2E are Unknown, and Cost below 0, where nobody knows.
	TTFT, E2E time.Duration
	Cost      float64
}

// Where is the backend, or what was done instead.
func (o *Outcome) Where() string { return cmp.Or(o.Backend, o.Action) }

// Result of one request.
type Result struct {
	Before, After Outcome
	// Changed: something else would be done, or be done elsewhere.
	Changed bool
	// Order are the ids of the endpoints that may serve it, best first.
	Order []string
	Lacks [NumLacks]bool
}

// Replayer decides by one catalog. Use New.
type Replayer struct {
	catalog *resources.Catalog
	plan    *plan.Plan
	pools   map[*resources.Pool][]plan.Target
	usual   usual
}

// New returns a Replayer of a catalog.
func New(c *resources.Catalog) *Replayer {
	return &Replayer{catalog: c, plan: plan.New(c), pools: map[*resources.Pool][]plan.Target{}}
}

// targets is all that a pool serves, whatever the policies are.
func (r *Replayer) targets(p *resources.Pool) []plan.Target {
	out, ok := r.pools[p]
	if !ok {
		out = plan.TargetsOf(p.Members)
		r.pools[p] = out
	}
	return out
}

// endpoint is one of a case, with what a decision about it needs beside.
type endpoint struct {
	policy.Endpoint
	target    *plan.Target
	predicted schedule.Predicted
	place     int // in the order that was recorded; -1: none
	index     int // in the list that the policies looked at
}

// Decision decides about a record anew. It reports false where no pool serves the
// model now.
func (r *Replayer) Decision(d *adminv1.Decision) (out Result, ok bool) {
	m := r.plan.Models[d.Model]
	if m == nil {
		return out, false
	}
	out.Lacks[OldFormat] = d.Format < 1
	out.Lacks[Omitted] = d.OmittedCandidates+d.OmittedDropped > 0
	q := r.request(m, d, &out.Lacks)
	list := r.endpoints(m, d, q, &out.Lacks)
	v := evaluate(m, q, list, ranking(d, list, &out.Lacks))
	if d.Refused != "" && (v.Action == policy.Unavailable || v.Action == policy.Queue) {
		v.Action = policy.Saturated // there were workers: it may come back
	}
	out.Before, out.After = before(d), after(&v, list)
	for _, i := range v.Order {
		out.Order = append(out.Order, list[i].ID)
	}
	out.Changed = out.Before.Action != out.After.Action || out.Before.Endpoint != out.After.Endpoint
	return out, true
}

func evaluate(m *plan.Model, q *policy.Request, list []endpoint, rank func([]policy.Endpoint, []int)) policy.Decision {
	f := &policy.Fleet{Endpoints: make([]policy.Endpoint, len(list))}
	for i := range list {
		f.Endpoints[i] = list[i].Endpoint
	}
	if rank != nil {
		f.Rank = func(order []int) { rank(f.Endpoints, order) }
	}
	return m.Policies.Evaluate(q, f)
}

// request is what policies see of the request.
func (r *Replayer) request(m *plan.Model, d *adminv1.Decision, lacks *[NumLacks]bool) *policy.Request {
	q := &policy.Request{ID: d.RequestId, Model: d.Model}
	rec := d.Request
	if rec == nil {
		if d.Tenant != "" {
			q.Tenants = []string{plan.Base(d.Tenant)}
		}
		for _, c := range d.Candidates {
			q.PromptTokens = max(q.PromptTokens, int(c.PromptTokens))
		}
		lacks[Headers], lacks[Claims] = len(m.Reads.Headers) > 0 || m.Reads.OtherHeaders, len(m.Reads.Claims) > 0 || m.Reads.OtherClaims
		plan.Complete(r.catalog, m.Pool, q)
		return q
	}
	q.Tenants, q.QoS, q.Endpoint, q.Stream = rec.Tenants, v1alpha1.QoS(rec.Qos), v1alpha1.APIEndpoint(rec.Endpoint), rec.Stream
	q.PromptTokens, q.MaxTokens, q.Tools = int(rec.PromptTokens), int(rec.MaxTokens), rec.Tools
	q.Tags = policy.Tags{Present: rec.Tags, Complete: rec.Classified, Absent: rec.AbsentTags}
	for _, u := range rec.UnknownTags {
		q.Tags.Unknown = append(q.Tags.Unknown, policy.UnknownTag{Tag: u.Tag, Causes: u.Causes})
	}
	q.Tags.Doubt(m.Tags)
	q.Headers, q.Claims = rec.Headers, map[string]any{}
	for name, raw := range rec.ClaimsJson {
		var v any
		if json.Unmarshal([]byte(raw), &v) == nil {
			q.Claims[name] = v
		}
	}
	if len(q.Claims) == 0 {
		q.Claims = nil
	}
	missing := func(want, have []string) bool {
		return slices.ContainsFunc(want, func(n string) bool { return !slices.Contains(have, n) })
	}
	lacks[Headers] = m.Reads.OtherHeaders || missing(m.Reads.Headers, rec.HeaderNames)
	lacks[Claims] = m.Reads.OtherClaims || missing(m.Reads.Claims, rec.ClaimNames)
	lacks[Cut] = rec.Cut
	return q
}

// endpoints are the recorded ones as the pool has them now, and those providers of
// the pool that the record does not hold.
func (r *Replayer) endpoints(m *plan.Model, d *adminv1.Decision, q *policy.Request, lacks *[NumLacks]bool) []endpoint {
	var out []endpoint
	output := plan.Output(q.MaxTokens)
	seen := map[*plan.Target]bool{}
	for i, c := range d.Candidates {
		t := find(m.Targets, c)
		if t == nil {
			// What the policies now in force never send it to does not matter.
			all := r.targets(m.Pool)
			lacks[Gone] = lacks[Gone] || find(all, c) == nil
			continue
		}
		seen[t] = true
		e := endpoint{target: t, place: -1, Endpoint: policy.Endpoint{
			Backend: t.Backend, ID: c.Worker, Labels: c.Labels, Unfit: c.Unfit, TTFT: Unknown, E2E: Unknown, Cost: c.Cost,
		}}
		if c.Dropped == "" {
			e.place = i
		}
		if d.Format < 1 {
			e.Unfit = oldUnfit(c.Dropped)
		}
		if c.PredictedTtft != nil {
			e.TTFT = c.PredictedTtft.AsDuration()
			if c.PredictedE2E != nil {
				e.E2E = c.PredictedE2E.AsDuration()
			}
			e.predicted = schedule.Predicted{
				Worker: c.Worker, TTFT: e.TTFT.Seconds() * cmp.Or(d.TimeScale, 1), Cached: int(c.CachedTokens), InFlight: int(c.InFlight),
				Others: c.Others, Work: c.Work, Recent: c.RecentWork, J: c.Score, Tie: int(c.Tie),
				Loss: c.EvictionLoss.AsDuration().Seconds() * cmp.Or(d.TimeScale, 1), Filled: int(c.Filled), Settles: c.Settles,
			}
		}
		if t.Provider != nil {
			e.Cost = plan.ProviderCost(t.Provider, q.PromptTokens, output)
			lacks[Unpredicted] = lacks[Unpredicted] || c.PredictedTtft == nil
		} else {
			e.Load = loadOf(d, c, m, lacks)
		}
		e.index = int(c.Index)
		out = append(out, e)
	}
	slices.SortStableFunc(out, func(a, b endpoint) int { return cmp.Compare(a.index, b.index) })
	for i := range m.Targets {
		t := &m.Targets[i]
		switch {
		case seen[t]:
		case t.Provider != nil:
			lacks[Unpredicted] = true
			out = append(out, endpoint{target: t, place: -1, Endpoint: policy.Endpoint{
				Backend: t.Backend, ID: plan.ProviderID(t.Name()), TTFT: Unknown, E2E: Unknown, Cost: plan.ProviderCost(t.Provider, q.PromptTokens, output),
			}})
		case len(t.Profile.Set.Workers) > 0:
			lacks[Unseen] = true
		}
	}
	return out
}

// find is the target that a candidate belongs to.
func find(list []plan.Target, c *adminv1.Candidate) *plan.Target {
	name, external := plan.ProviderName(c.Worker)
	for i := range list {
		t := &list[i]
		switch {
		case external && t.Provider != nil && t.Name() == name && (c.UpstreamModel == "" || c.UpstreamModel == t.Provider.UpstreamModel),
			!external && t.Profile != nil && t.Profile.ID == c.Profile:
			return t
		}
	}
	return nil
}

// oldUnfit is why an endpoint could not serve, in records that do not say it apart:
// empty if only a rule was against it.
func oldUnfit(dropped string) string {
	for _, words := range []string{"the rule does not consider it", "excluded by ", "too busy for ", "in no stage of the rule's select"} {
		if strings.HasPrefix(dropped, words) {
			return ""
		}
	}
	return dropped
}

// load is a worker's load as it was recorded.
type load struct {
	means []*adminv1.LoadMean
	held  []policy.Threshold
}

func loadOf(d *adminv1.Decision, c *adminv1.Candidate, m *plan.Model, lacks *[NumLacks]bool) policy.Load {
	l := &load{means: c.Means}
	if d.Format < 1 && c.SampleAge != nil {
		l.means = []*adminv1.LoadMean{{Load: &adminv1.Load{Running: c.Running, Waiting: c.Waiting, KvUsage: c.KvUsage}}}
	}
	if len(l.means) == 0 {
		return nil
	}
	for _, i := range c.Held {
		if int(i) < len(d.Thresholds) {
			l.held = append(l.held, threshold(d.Thresholds[i]))
		}
	}
	for _, w := range m.Windows {
		if l.over(w) == nil {
			lacks[Windows] = true
		}
	}
	for _, t := range m.Policies.Thresholds() {
		v, _ := l.Mean(t.Metric, t.Window)
		between := v > t.Until && v <= t.Above // else what was before does not matter
		if between && !slices.ContainsFunc(d.Thresholds, func(known *adminv1.Threshold) bool { return threshold(known) == t }) {
			lacks[Memory] = true
		}
	}
	return l
}

func threshold(t *adminv1.Threshold) policy.Threshold {
	out := policy.Threshold{Window: t.Window.AsDuration(), Above: t.Above, Until: t.Until}
	for _, m := range []policy.Metric{policy.QueuedPrompts, policy.RunningPrompts, policy.KVCacheUsage} {
		if m.String() == t.Metric {
			out.Metric = m
		}
	}
	return out
}

func (l *load) over(window time.Duration) *adminv1.Load {
	for _, m := range l.means {
		if m.Window.AsDuration() == window {
			return m.Load
		}
	}
	return nil
}

// Mean implements policy.Load.
func (l *load) Mean(m policy.Metric, window time.Duration) (float64, bool) {
	mean := l.over(window)
	if mean == nil {
		mean = l.means[0].Load
	}
	return [...]float64{policy.QueuedPrompts: mean.GetWaiting(), policy.RunningPrompts: mean.GetRunning(), policy.KVCacheUsage: mean.GetKvUsage()}[m], true
}

// Held implements policy.Memory.
func (l *load) Held(t policy.Threshold) bool { return slices.Contains(l.held, t) }

// ranking sorts as the scheduler would have.
func ranking(d *adminv1.Decision, list []endpoint, lacks *[NumLacks]bool) func([]policy.Endpoint, []int) {
	var workers func(order []int)
	switch {
	case d.Policy == Offline:
		return nil
	case d.Format < 1:
		workers = func(order []int) { rankOld(order, list, d.Chosen) }
	case schedule.Rank(d.Policy, nil, nil):
		predicted := make([]schedule.Predicted, len(list))
		for i := range list {
			predicted[i] = list[i].predicted
		}
		workers = func(order []int) { schedule.Rank(d.Policy, order, predicted) }
	default: // the others are random, or have a memory: what was ranked stays so
		lacks[Unranked] = true
		workers = func(order []int) {
			slices.SortStableFunc(order, func(a, b int) int {
				return cmp.Or(cmp.Compare(uint(list[a].place), uint(list[b].place)), cmp.Compare(list[a].TTFT, list[b].TTFT))
			})
		}
	}
	return func(e []policy.Endpoint, order []int) { plan.Rank(order, e, workers) }
}

// rankOld sorts by predicted TTFT; among those that are equal to the best
// (docs/decisions/0004), what was chosen stays first: the scheduler knew why.
func rankOld(order []int, list []endpoint, chosen string) {
	if len(order) == 0 {
		return
	}
	slices.SortStableFunc(order, func(a, b int) int { return cmp.Compare(list[a].TTFT, list[b].TTFT) })
	best := list[order[0]].TTFT
	at := slices.IndexFunc(order, func(i int) bool { return list[i].ID == chosen })
	if at > 0 && list[order[at]].TTFT-best <= max(5*time.Millisecond, best/50) {
		was := order[at]
		copy(order[1:at+1], order[:at])
		order[0] = was
	}
}

// before is what was decided.
func before(d *adminv1.Decision) Outcome {
	out := Outcome{Action: policy.Route.String(), TTFT: Unknown, E2E: Unknown, Cost: -1}
	switch {
	case d.Verdict != nil:
		out.Action, out.Rule = d.Verdict.Action, d.Verdict.Rule
	case d.Chosen == "":
		out.Action = policy.Unavailable.String()
	}
	if d.Chosen == "" {
		return out
	}
	out.Endpoint, out.Backend = d.Chosen, d.Chosen
	// The first by this id: a worker may stand there again, under a profile that was
	// dropped.
	for _, c := range d.Candidates {
		if c.Worker != d.Chosen {
			continue
		}
		if parts := strings.SplitN(c.Profile, "/", 3); len(parts) == 3 {
			out.Backend = parts[0] + "/" + parts[1]
		}
		if c.PredictedTtft != nil {
			out.TTFT = c.PredictedTtft.AsDuration()
		}
		if d.Format >= 1 {
			out.E2E, out.Cost = c.PredictedE2E.AsDuration(), c.Cost
		}
		break
	}
	return out
}

func after(v *policy.Decision, list []endpoint) Outcome {
	out := Outcome{Action: v.Action.String(), TTFT: Unknown, E2E: Unknown, Cost: -1}
	if v.Rule != "" {
		out.Rule = v.Policy + "/" + v.Rule
	}
	if v.Action != policy.Route {
		return out
	}
	e := &list[v.Order[0]]
	out.Endpoint, out.Backend, out.TTFT, out.E2E, out.Cost = e.ID, backendOf(e.target), e.TTFT, e.E2E, e.Cost
	return out
}

// backendOf names the worker set, or the provider as its id does.
func backendOf(t *plan.Target) string {
	if t.Provider != nil {
		return plan.ProviderID(t.Name())
	}
	return t.Name()
}
