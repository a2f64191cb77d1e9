package router

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/kinference/kinference/internal/policy"
	adminv1 "github.com/kinference/kinference/proto/gen/kinference/admin/v1"
	kvtrackerv1 "github.com/kinference/kinference/proto/gen/kinference/kvtracker/v1"
	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
	"github.com/kinference/kinference/services/router/internal/decisions"
)

// A record keeps of a request what rules read, within bounds, and nothing that may
// hold a secret.
func TestRequestRecord(t *testing.T) {
	long := strings.Repeat("x", maxText+1)
	var many []string
	for i := range maxEntries + 9 {
		many = append(many, fmt.Sprint("tag-", i))
	}
	q := &policy.Request{
		Model: "m", Tenants: []string{"team", "org"}, Tools: many, Tags: policy.Tags{Present: []string{"code", long}},
		Headers: map[string]string{"x-team": "red", "authorization": "Bearer sk-1", "x-long": long, "x-other": "never", "cookie": "c", "x-bytes": "a\xff"},
		Claims:  map[string]any{"groups": []any{"a", "b"}, "refresh_token": "t", "sub": "never", "big": strings.Repeat("y", maxClaim)},
	}
	reads := &policy.Reads{
		Headers: []string{"authorization", "cookie", "x-absent", "x-bytes", "x-long", "x-team"}, Claims: []string{"absent", "big", "groups", "refresh_token"},
	}
	got := requestRecord(q, reads)
	if len(got.Tools) != maxEntries || !got.Cut || got.Tags[0] != "code" || len(got.Tags[1]) != maxText || len(q.Tags.Present[1]) != maxText+1 {
		t.Errorf("lists: %d tools, cut %v, %d", len(got.Tools), got.Cut, len(got.Tags[1]))
	}
	if h := got.Headers; len(h) != 2 || h["x-team"] != "red" || h["x-bytes"] != "a" || !slices.Equal(got.HeaderNames, []string{"x-absent", "x-bytes", "x-team"}) || !got.HeadersWithheld {
		t.Errorf("headers %v of %v, withheld %v", h, got.HeaderNames, got.HeadersWithheld)
	}
	if c := got.ClaimsJson; len(c) != 1 || c["groups"] != `["a","b"]` || !slices.Equal(got.ClaimNames, []string{"absent", "groups"}) || !got.ClaimsWithheld {
		t.Errorf("claims %v of %v, withheld %v", c, got.ClaimNames, got.ClaimsWithheld)
	}
	if _, err := proto.Marshal(got); err != nil {
		t.Error(err)
	}
	if few := requestRecord(&policy.Request{Tools: []string{"a"}, Headers: q.Headers}, &policy.Reads{Headers: []string{"x-team"}}); few.Cut || few.HeadersWithheld || few.ClaimsWithheld || few.ClaimsJson != nil {
		t.Errorf("little: %v", few)
	}
	if all := requestRecord(q, &policy.Reads{OtherHeaders: true, OtherClaims: true}); len(all.Headers)+len(all.ClaimsJson) != 0 || !all.HeadersWithheld || !all.ClaimsWithheld {
		t.Errorf("by no fixed name: %v", all)
	}
}

// states are those of workers, all idle.
func states(set string, workers int) *kvtrackerv1.WatchWorkersResponse {
	out := &kvtrackerv1.WatchWorkersResponse{Synced: true}
	for i := range workers {
		out.Workers = append(out.Workers, &kvtrackerv1.WorkerState{
			Worker: fmt.Sprintf("ns.%s.w%d/0", set, i), WorkerSet: "ns/" + set, Ready: true, BlockSize: 16, TotalBlocks: 1000, Load: &kvtrackerv1.Load{}, SampleAge: durationpb.New(0),
		})
	}
	return out
}

// Of many endpoints a record keeps the best candidates in order, some of those that
// were dropped, and how many more there were.
func TestRecordIsBounded(t *testing.T) {
	const workers = 150
	match := &kvtrackerv1.MatchResponse{Results: []*kvtrackerv1.MatchResult{{}}}
	s := newServer(t, load(t, fleetYAML(workers)), match, states("small", workers))
	route := func(id string, exclude ...string) *adminv1.Decision {
		_, _, err := s.route(t.Context(), &routerv1.RouteRequest{
			RequestId: id, Model: "small", Exclude: exclude, Prompts: []*routerv1.Prompt{{Profile: "ns/small/small", Tokens: 100, BlockSize: 16, BlockHashes: []uint64{1, 2}}},
		})
		if err != nil && connect.CodeOf(err) != connect.CodeUnavailable {
			t.Fatal(err)
		}
		d, _ := s.decisions.Explain(id)
		return d
	}
	d := route("all")
	if len(d.Candidates) != decisions.MaxCandidates || d.OmittedCandidates != workers-decisions.MaxCandidates || d.OmittedDropped != 0 || d.Candidates[0].Worker != d.Chosen {
		t.Errorf("all: %d candidates, %d and %d omitted", len(d.Candidates), d.OmittedCandidates, d.OmittedDropped)
	}
	var failed []string
	for i := range 100 {
		failed = append(failed, fmt.Sprintf("ns.small.w%d", i))
	}
	d = route("some", failed...)
	kept := 0
	for _, c := range d.Candidates {
		if c.Dropped == "" {
			kept++
		} else if c.Unfit == "" {
			t.Errorf("%s: %q", c.Worker, c.Dropped)
		}
	}
	if kept != 50 || len(d.Candidates) != 50+decisions.MaxCandidates || d.OmittedDropped != 100-decisions.MaxCandidates {
		t.Errorf("some: %d kept of %d, %d omitted", kept, len(d.Candidates), d.OmittedDropped)
	}
	for i := 100; i < workers; i++ {
		failed = append(failed, fmt.Sprintf("ns.small.w%d", i))
	}
	if d = route("none", failed...); len(d.Candidates) != decisions.MaxCandidates || d.OmittedDropped != workers-decisions.MaxCandidates || d.Chosen != "" {
		t.Errorf("none: %d, %d omitted", len(d.Candidates), d.OmittedDropped)
	}
}

// A what-if decides as a request would, and leaves no trace.
func TestEvaluateLeavesNoTrace(t *testing.T) {
	const workers = 3
	s := newServer(t, load(t, fleetYAML(workers), `apiVersion: kinference.buoyant.io/v1alpha1
kind: InferenceTenant
metadata: { name: org, namespace: ns }
spec: { qos: batch }
---
apiVersion: kinference.buoyant.io/v1alpha1
kind: InferenceTenant
metadata: { name: team, namespace: ns }
spec: { parentRef: { name: org } }
---
apiVersion: kinference.buoyant.io/v1alpha1
kind: InferencePolicy
metadata: { name: p, namespace: ns }
spec: { rules: [ { name: batch, matches: [ { qos: batch, tenant: org } ], reject: { reason: NoBatch } } ] }
`), &kvtrackerv1.MatchResponse{}, states("small", workers))
	booked := func() (n int) {
		for _, w := range s.scheduler.Workers() {
			n += w.InFlight
		}
		return n
	}
	if _, _, err := s.route(t.Context(), &routerv1.RouteRequest{RequestId: "real", Model: "small", Prompts: []*routerv1.Prompt{{Profile: "ns/small/small", Tokens: 10, BlockSize: 16}}}); err != nil {
		t.Fatal(err)
	}
	chosen := map[string]bool{}
	for range 20 {
		d, err := s.evaluated(t.Context(), &adminv1.EvaluateRequest{RequestId: "real", Model: "small", PromptTokens: 100, MaxTokens: 5})
		if err != nil {
			t.Fatal(err)
		}
		chosen[d.Chosen] = true
		if d.GetRequest().GetPromptTokens() != 100 || d.GetRequest().GetEndpoint() != "ChatCompletions" || d.GetRequest().GetQos() != "interactive" || d.Candidates[0].PredictedTtft.AsDuration() <= 0 {
			t.Errorf("%v", d)
		}
	}
	if len(chosen) != 1 || booked() != 1 {
		t.Errorf("chosen %v, %d booked", slices.Collect(maps.Keys(chosen)), booked())
	}
	if d, ok := s.decisions.Explain("real"); !ok || d.GetRequest().GetPromptTokens() != 10 {
		t.Errorf("the record of the real request: %v", d)
	}
	d, err := s.evaluated(t.Context(), &adminv1.EvaluateRequest{Model: "small", Attributes: &routerv1.Attributes{Tenants: []string{"team"}}})
	if err != nil || d.GetVerdict().GetRule() != "ns/p/batch" || d.GetRequest().GetQos() != "batch" || d.Tenant != "team" {
		t.Errorf("%v %v", d, err)
	}
	if _, err := s.evaluated(t.Context(), &adminv1.EvaluateRequest{Model: "none"}); connect.CodeOf(err) != connect.CodeNotFound {
		t.Error(err)
	}
	if _, err := s.evaluated(t.Context(), &adminv1.EvaluateRequest{Model: "small", Attributes: &routerv1.Attributes{ClaimsJson: "{"}}); connect.CodeOf(err) != connect.CodeInvalidArgument {
		t.Error(err)
	}
	if booked() != 1 {
		t.Errorf("%d booked", booked())
	}
}

// The status tells loads, means, requests in flight and what ended lately.
func TestStatusTellsLoads(t *testing.T) {
	st := states("small", 1)
	st.Workers[0].Load = &kvtrackerv1.Load{Running: 3, Waiting: 2, KvUsage: 0.5}
	st.Workers[0].LoadMean_30S = &kvtrackerv1.Load{Running: 1, Waiting: 1, KvUsage: 0.25}
	s := newServer(t, load(t, fleetYAML(1), watchYAML), &kvtrackerv1.MatchResponse{}, st)
	if _, _, err := s.route(t.Context(), &routerv1.RouteRequest{RequestId: "r", Model: "small", Prompts: []*routerv1.Prompt{{Profile: "ns/small/small", Tokens: 10, BlockSize: 16}}}); err != nil {
		t.Fatal(err)
	}
	s.decisions.FirstToken("r", time.Second)
	var w *adminv1.WorkerStatus
	for _, x := range s.status().Workers {
		if x.Worker == "ns.small.w0/0" {
			w = x
		}
	}
	if l := w.GetLoad(); l.GetRunning() != 3 || l.GetWaiting() != 2 || l.GetKvUsage() != 0.5 || len(w.Means) != 2 || w.Means[0].Load.GetKvUsage() != 0.25 || w.Means[1].Window.AsDuration() != 10*time.Second || w.InFlight != 1 || w.Recent != nil {
		t.Errorf("%v", w)
	}
	five, four := uint32(5), uint32(4)
	if _, err := s.Report(t.Context(), &routerv1.ReportRequest{Reports: []*routerv1.Report{{RequestId: "r", Event: &routerv1.Report_Done{Done: &routerv1.Done{
		Outcome: routerv1.Outcome_OUTCOME_OK, PromptTokens: &five, CachedTokens: &four}}}}}); err != nil {
		t.Fatal(err)
	}
	for _, x := range s.status().Workers {
		if x.Worker == w.Worker && (x.InFlight != 0 || x.Recent.GetRequests() != 1 || x.Recent.GetTtft().AsDuration() != time.Second || x.Recent.GetPromptTokens() != 5 || x.Recent.GetCachedTokens() != 4) {
			t.Errorf("%v", x)
		}
	}
	if p := s.status().Providers; len(p) != 2 || p[0].Provider != "ns/cheap" || p[0].PredictedTtft.AsDuration() != time.Second {
		t.Errorf("%v", p)
	}
}

// Other hosts do not reach a port that nobody guards.
func TestAdminAddress(t *testing.T) {
	for addr, want := range map[string]bool{
		"": true, "127.0.0.1:7107": true, "localhost:7107": true, "[::1]:7107": true,
		":7107": false, "0.0.0.0:7107": false, "10.0.0.1:7107": false, "example.com:7107": false, "[::]:7107": false, "nonsense": false,
	} {
		c := &Config{ConfigDir: "d", AdminAPIListen: addr}
		if err := c.Validate(); (err == nil) != want {
			t.Errorf("%q: %v", addr, err)
		}
		c.AdminTokens = "file"
		if err := c.Validate(); err != nil {
			t.Errorf("%q with tokens: %v", addr, err)
		}
	}
}
