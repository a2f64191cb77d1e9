package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"
	"sigs.k8s.io/yaml"

	"github.com/kinference/kinference/api/v1alpha1"
	"github.com/kinference/kinference/internal/plan"
	"github.com/kinference/kinference/internal/policy"
	"github.com/kinference/kinference/internal/replay"
	"github.com/kinference/kinference/internal/resources"
	adminv1 "github.com/kinference/kinference/proto/gen/kinference/admin/v1"
	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
)

// requestFile is a request as policies see it.
type requestFile struct {
	ID           string               `json:"id"`
	Model        string               `json:"model"`
	Tenants      []string             `json:"tenants"`
	QoS          v1alpha1.QoS         `json:"qos"`
	PromptTokens int                  `json:"promptTokens"`
	MaxTokens    int                  `json:"maxTokens"`
	Endpoint     v1alpha1.APIEndpoint `json:"endpoint"`
	Stream       bool                 `json:"stream"`
	Tools        []string             `json:"tools"`
	Headers      map[string]string    `json:"headers"`
	Claims       map[string]any       `json:"claims"`
	Tags         []string             `json:"tags"`
	Classified   bool                 `json:"classified"`
	AbsentTags   []string             `json:"absentTags"`
	UnknownTags  []policy.UnknownTag  `json:"unknownTags"`
}

func (f *requestFile) request() (*policy.Request, error) {
	r := &policy.Request{
		ID: f.ID, Model: f.Model, Tenants: f.Tenants, QoS: f.QoS, PromptTokens: f.PromptTokens, MaxTokens: f.MaxTokens, Endpoint: f.Endpoint, Stream: f.Stream,
		Tools: f.Tools, Headers: make(map[string]string, len(f.Headers)), Claims: f.Claims, Tags: policy.Tags{Present: f.Tags, Complete: f.Classified, Absent: f.AbsentTags, Unknown: f.UnknownTags},
	}
	for k, v := range f.Headers {
		r.Headers[strings.ToLower(k)] = v
	}
	if r.Endpoint == "" {
		r.Endpoint = v1alpha1.EndpointChatCompletions
	}
	qos := []v1alpha1.QoS{"", v1alpha1.QoSInteractive, v1alpha1.QoSBatch, v1alpha1.QoSDeferrable}
	endpoints := []v1alpha1.APIEndpoint{
		v1alpha1.EndpointChatCompletions, v1alpha1.EndpointCompletions, v1alpha1.EndpointResponses, v1alpha1.EndpointMessages, v1alpha1.EndpointEmbeddings,
	}
	switch {
	case r.Model == "":
		return nil, errors.New("model is required")
	case !slices.Contains(qos, r.QoS):
		return nil, fmt.Errorf("qos %q is unknown: want interactive, batch or deferrable", r.QoS)
	case !slices.Contains(endpoints, r.Endpoint):
		return nil, fmt.Errorf("endpoint %q is unknown: want one of %v", r.Endpoint, endpoints)
	case r.PromptTokens < 0 || r.MaxTokens < 0:
		return nil, errors.New("promptTokens and maxTokens are at least 0")
	}
	return r, nil
}

// fleetFile is the state of the endpoints.
type fleetFile struct {
	Endpoints []endpointFile `json:"endpoints"`
}

// endpointFile is a worker, or a provider. Loads that are not given are 0; with
// fresh: false none is known.
type endpointFile struct {
	ID             string            `json:"id"`
	WorkerSet      string            `json:"workerSet"`
	Provider       string            `json:"provider"`
	Models         []string          `json:"models"`
	Labels         map[string]string `json:"labels"`
	Ready          *bool             `json:"ready"`
	Unfit          string            `json:"unfit"`
	PredictedTTFT  duration          `json:"predictedTTFT"`
	PredictedE2E   duration          `json:"predictedE2E"`
	Cost           float64           `json:"cost"`
	QueuedPrompts  float64           `json:"queuedPrompts"`
	RunningPrompts float64           `json:"runningPrompts"`
	KVCacheUsage   float64           `json:"kvCacheUsage"`
	Fresh          *bool             `json:"fresh"`
}

// duration is written as 250ms.
type duration time.Duration

// UnmarshalJSON implements json.Unmarshaler.
func (d *duration) UnmarshalJSON(raw []byte) error {
	var s string
	if err := json.Unmarshal(raw, &s); err != nil {
		return errors.New("a duration is written as 250ms or 1.5s")
	}
	v, err := time.ParseDuration(s)
	*d = duration(v)
	return err
}

// candidates are the endpoints of the file, those of known worker sets once for
// each of their models that the request could end up at.
func (f *fleetFile) candidates(p *scope, promptTokens int) ([]candidate, error) {
	known := slices.Clone(p.backends)
	elsewhere := members(p.catalog)
	var out []candidate
	for i := range f.Endpoints {
		e := &f.Endpoints[i]
		kind, name := v1alpha1.BackendLocal, e.WorkerSet
		if name == "" {
			kind, name = v1alpha1.BackendProvider, e.Provider
		}
		id := e.ID
		switch {
		case (e.WorkerSet == "") == (e.Provider == ""):
			return nil, fmt.Errorf("endpoints[%d]: give either workerSet or provider", i)
		case id == "" && kind == v1alpha1.BackendLocal:
			return nil, fmt.Errorf("endpoints[%d].id is required", i)
		case id == "":
			id = "provider " + p.qualify(name) // as the router names it
		}
		unfit := e.Unfit
		if unfit == "" && e.Ready != nil && !*e.Ready {
			unfit = "not ready"
		}
		found := named(known, kind, p.qualify(name))
		if len(found) == 0 {
			if found = named(elsewhere, kind, p.qualify(name)); len(found) > 0 && unfit == "" {
				unfit = "not in the pool " + p.pool
			}
		}
		switch {
		case len(e.Models) > 0:
			b := backend{&policy.Backend{Type: kind, Name: plan.Base(name), Models: e.Models}, p.qualify(name), "", 0}
			if len(found) > 0 {
				b.Labels = found[0].Labels
			}
			if kind == v1alpha1.BackendLocal {
				b.profile = b.name + "/" + e.Models[0]
			}
			found = []backend{b}
		case len(found) == 0:
			return nil, fmt.Errorf("endpoints[%d].models are required: --config has no %s that is called %s", i, strings.ToLower(string(kind)), p.qualify(name))
		default:
			found = reachable(p, found)
		}
		for _, b := range found {
			c := candidate{backend: b, Endpoint: policy.Endpoint{
				Backend: b.Backend, ID: id, Labels: e.Labels, Unfit: unfit, TTFT: time.Duration(e.PredictedTTFT), E2E: time.Duration(e.PredictedE2E), Cost: e.Cost,
			}}
			if b.context > 0 && promptTokens >= b.context && unfit == "" {
				c.Unfit = fmt.Sprintf("its context of %d tokens is too short", b.context)
			}
			if kind == v1alpha1.BackendLocal {
				c.load = &load{e.QueuedPrompts, e.RunningPrompts, e.KVCacheUsage, e.Fresh != nil && !*e.Fresh}
				c.Load = c.load
			}
			out = append(out, c)
		}
	}
	return out, nil
}

// reachable keeps the backends that the request could end up at; one if it is
// none, so that the endpoint is spoken of.
func reachable(p *scope, list []backend) []backend {
	var out []backend
	for _, b := range list {
		if p.reaches(b.Backend) {
			out = append(out, b)
		}
	}
	if out == nil {
		return list[:1]
	}
	return out
}

func members(c *resources.Catalog) []backend {
	var list []resources.Member
	for _, s := range c.Sets {
		list = append(list, resources.Member{Set: s})
	}
	for _, p := range c.Providers {
		list = append(list, resources.Member{Provider: p})
	}
	return backendsOf(list)
}

func named(list []backend, kind v1alpha1.BackendType, name string) []backend {
	var out []backend
	for _, b := range list {
		if b.Type == kind && b.name == name {
			out = append(out, b)
		}
	}
	return out
}

func fleetOf(list []candidate) *policy.Fleet {
	f := &policy.Fleet{Endpoints: make([]policy.Endpoint, len(list))}
	for i := range list {
		f.Endpoints[i] = list[i].Endpoint
	}
	return f
}

func readYAML(path string, into any) error {
	raw, err := os.ReadFile(path)
	if err != nil {
		return usageError{err}
	}
	if err := yaml.UnmarshalStrict(raw, into); err != nil {
		return usageError{fmt.Errorf("read %s: %w", path, err)}
	}
	return nil
}

// whatIf is a request decided offline.
type whatIf struct {
	request    *policy.Request
	scope      *scope
	candidates []candidate
	decision   policy.Decision
}

// readRequest reads a request that the router is to be asked about.
func readRequest(path string) (*adminv1.EvaluateRequest, error) {
	var f requestFile
	if err := readYAML(path, &f); err != nil {
		return nil, err
	}
	r, err := f.request()
	if err != nil {
		return nil, usageError{fmt.Errorf("%s: %w", path, err)}
	}
	out := &adminv1.EvaluateRequest{
		RequestId: r.ID, Model: r.Model, MaxTokens: uint32(r.MaxTokens), PromptTokens: uint32(r.PromptTokens), Whole: !r.Stream,
		Attributes: &routerv1.Attributes{
			Tenants: r.Tenants, Qos: string(r.QoS), Endpoint: string(r.Endpoint), Tools: r.Tools, Headers: r.Headers, Tags: r.Tags.Present, Classified: r.Tags.Complete,
			AbsentTags: r.Tags.Absent, UnknownTags: unknownTags(&r.Tags),
		},
	}
	if len(r.Claims) > 0 {
		raw, err := json.Marshal(r.Claims)
		if err != nil {
			return nil, usageError{fmt.Errorf("%s: claims: %w", path, err)}
		}
		out.Attributes.ClaimsJson = string(raw)
	}
	return out, nil
}

func evaluateFiles(errs io.Writer, request, fleet, config string) (*whatIf, error) {
	var rf requestFile
	var ff fleetFile
	if err := errors.Join(readYAML(request, &rf), readYAML(fleet, &ff)); err != nil {
		return nil, err
	}
	r, err := rf.request()
	if err != nil {
		return nil, usageError{fmt.Errorf("%s: %w", request, err)}
	}
	catalog := &resources.Catalog{}
	if config != "" {
		if catalog, err = loadConfig(errs, config); err != nil {
			return nil, usageError{err}
		}
	}
	p, err := newScope(catalog, r.Model)
	if err != nil {
		return nil, usageError{err}
	}
	p.tenant(r)
	list, err := ff.candidates(p, r.PromptTokens)
	if err != nil {
		return nil, usageError{fmt.Errorf("%s: %w", fleet, err)}
	}
	return &whatIf{r, p, list, p.policies.Evaluate(r, fleetOf(list))}, nil
}

// order lists the candidates: those that may serve, best first, then the others.
func (x *whatIf) order() []int {
	out := slices.Clone(x.decision.Order)
	for i := range x.candidates {
		if !slices.Contains(x.decision.Order, i) {
			out = append(out, i)
		}
	}
	return out
}

// why says why a candidate was dropped; empty if it was not.
func (x *whatIf) why(i int) string {
	v := x.decision.Verdicts[i]
	switch {
	case x.decision.Action == policy.Reject: // endpoints were not looked at
		return ""
	case v.Cause == policy.Unfit:
		return x.candidates[i].Unfit
	}
	return causes[v.Cause] + v.Exclude
}

// causes in the words of the router's records.
var causes = [...]string{
	policy.Kept: "", policy.Unfit: "", policy.NotConsidered: "the rule does not consider it", policy.Excluded: "excluded by ",
	policy.TooBusy: "too busy for ", policy.NotSelected: "in no stage of the rule's select",
}

func (x *whatIf) verdict(d *policy.Decision) *adminv1.Verdict {
	v := &adminv1.Verdict{Action: d.Action.String(), Stage: uint32(d.Stage), Emptied: d.Emptied}
	if d.Rule != "" {
		v.Rule = d.Policy + "/" + d.Rule
	}
	if d.Action == policy.Route {
		v.Chosen = x.candidates[d.Order[0]].ID
	}
	return v
}

// record is the decision as the router would record it.
func (x *whatIf) record() *adminv1.Decision {
	q := x.request
	d := &adminv1.Decision{
		RequestId: q.ID, Model: q.Model, Pool: x.scope.pool, Policy: replay.Offline, Reason: x.outcome(), Verdict: x.verdict(&x.decision), Format: 1,
		Request: &adminv1.RecordedRequest{
			Tenants: q.Tenants, Qos: string(q.QoS), Endpoint: string(q.Endpoint), Stream: q.Stream, PromptTokens: uint32(q.PromptTokens), MaxTokens: uint32(q.MaxTokens),
			Tools: q.Tools, Tags: q.Tags.Present, Classified: q.Tags.Complete, AbsentTags: q.Tags.Absent, UnknownTags: unknownTags(&q.Tags), Headers: q.Headers, ClaimsJson: map[string]string{},
		},
	}
	reads := x.scope.policies.Reads(q.Model)
	d.Request.HeaderNames, d.Request.ClaimNames = reads.Headers, reads.Claims
	for name, v := range q.Claims {
		if raw, err := json.Marshal(v); err == nil {
			d.Request.ClaimsJson[name] = string(raw)
		}
	}
	d.Chosen = d.Verdict.Chosen
	if len(q.Tenants) > 0 {
		d.Tenant = q.Tenants[0]
	}
	if x.decision.Shadow != nil {
		d.Shadow = x.verdict(x.decision.Shadow)
	}
	for _, t := range x.scope.policies.Thresholds() { // nothing was before, so none is held
		d.Thresholds = append(d.Thresholds, &adminv1.Threshold{Metric: t.Metric.String(), Window: durationpb.New(t.Window), Above: t.Above, Until: t.Until})
	}
	windows := append([]time.Duration{policy.DefaultWindow}, x.scope.policies.Windows()...)
	for _, i := range x.order() {
		e := &x.candidates[i]
		c := &adminv1.Candidate{
			Worker: e.ID, Profile: e.backend.profile, PromptTokens: uint32(q.PromptTokens), Index: uint32(i), Dropped: x.why(i), Unfit: e.Unfit,
			PredictedTtft: durationpb.New(e.TTFT), PredictedE2E: durationpb.New(e.E2E), Cost: e.Cost, Labels: e.Labels,
		}
		if e.load != nil && !e.load.stale {
			c.Running, c.Waiting, c.KvUsage, c.SampleAge = e.load.running, e.load.queued, e.load.usage, durationpb.New(0)
			for _, w := range windows {
				c.Means = append(c.Means, &adminv1.LoadMean{Window: durationpb.New(w), Load: &adminv1.Load{Running: c.Running, Waiting: c.Waiting, KvUsage: c.KvUsage}})
			}
		}
		d.Candidates = append(d.Candidates, c)
	}
	return d
}

// outcome is the decision in one sentence.
func (x *whatIf) outcome() string {
	d := &x.decision
	switch d.Action {
	case policy.Reject:
		return strings.TrimSuffix(fmt.Sprintf("refused with %s: %s", d.Rejection.Reason, d.Rejection.Message), ": ")
	case policy.Saturated:
		return "refused for now (429): every endpoint that may serve it is too busy"
	case policy.Unavailable:
		return "refused for now (503): no endpoint that may serve it is there and ready"
	case policy.Queue:
		return fmt.Sprintf("waits up to %v for an endpoint", d.Wait)
	}
	return "routed to " + x.candidates[d.Order[0]].ID
}

func (x *whatIf) print(w io.Writer) error {
	d := &x.decision
	pool := x.scope.pool
	if pool == "" {
		pool = "none"
	}
	fmt.Fprintf(w, "model      %s (pool %s)\noutcome    %s\npolicy     %s\n", x.request.Model, pool, x.outcome(), policyVerdict(x.verdict(d)))
	if d.Shadow != nil {
		fmt.Fprintf(w, "dry run    %s\n", policyVerdict(x.verdict(d.Shadow)))
	}
	fmt.Fprintln(w)
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "place\tendpoint\tbackend\tmodel\tpredicted\te2e\tcost\tqueued\trunning\tkv\tdropped")
	for n, i := range x.order() {
		e := &x.candidates[i]
		place := "-"
		if n < len(d.Order) {
			place = fmt.Sprint(n + 1)
		}
		queued, running, usage := "-", "-", "-"
		if e.load != nil && !e.load.stale {
			queued, running, usage = fmt.Sprint(e.load.queued), fmt.Sprint(e.load.running), fmt.Sprintf("%.0f %%", 100*e.load.usage)
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%v\t%v\t%v\t%s\t%s\t%s\t%s\n", place, e.ID, e.Name, e.Models[0], e.TTFT, e.E2E, e.Cost, queued, running, usage, x.why(i))
	}
	return t.Flush()
}

// err tells callers that look at the exit code only that the request is refused.
func (x *whatIf) err() error {
	if x.decision.Action == policy.Route {
		return nil
	}
	return refusedError{errors.New("the request would not be routed: " + x.decision.Action.String())}
}
