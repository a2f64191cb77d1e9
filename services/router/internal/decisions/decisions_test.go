package decisions

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/testing/protocmp"

	"github.com/kinference/kinference/internal/kvhash"
	"github.com/kinference/kinference/internal/policy"
	"github.com/kinference/kinference/internal/window"
	adminv1 "github.com/kinference/kinference/proto/gen/kinference/admin/v1"
	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
)

// The newest records are kept, a request made anew by its newest one.
func TestLogIsBounded(t *testing.T) {
	l := New(3)
	for i := range 10 {
		l.Add(&Record{RequestID: fmt.Sprint(i % 5), Model: fmt.Sprint(i)})
	}
	for i := range 5 {
		d, ok := l.Explain(fmt.Sprint(i))
		if want := i >= 2; ok != want || ok && d.Model != fmt.Sprint(i+5) {
			t.Errorf("request %d: %v %v", i, ok, d)
		}
	}
	if len(l.byID) != 3 {
		t.Errorf("%d ids are kept", len(l.byID))
	}
}

func TestProto(t *testing.T) {
	l := New(2)
	at := time.Unix(100, 0)
	l.Add(&Record{
		RequestID: "r", Model: "m", Tenant: "t", Pool: "n/p", Decided: at, Waited: time.Second, CatalogVersion: 7, Policy: "predictedttft", Reason: "so", TimeScale: 1,
		Request: &adminv1.RecordedRequest{Qos: "batch"}, Windows: []time.Duration{10 * time.Second}, Chosen: "a/0", OmittedDropped: 3,
		Verdict: &adminv1.Verdict{Action: "route", Rule: "n/p/r", Chosen: "a/0"},
		Candidates: []Candidate{
			{
				Worker: "a/0", Profile: "n/s/m", Predicted: true, Tokens: 10, Matched: 4, Cached: 3, InFlight: 2, TTFT: time.Second, Wait: time.Millisecond, Prefill: 2, E2E: time.Minute, Cost: 0.5,
				Others: 1, RecentWork: 0.25, OwnWork: 0.125, Tie: kvhash.Hash(5), Sampled: true, Fresh: true, Running: 1, Waiting: 2, KVUsage: 0.5, Age: time.Second,
				Mean30s: window.Load{Running: 3}, Means: []window.Load{{Waiting: 4}},
			},
			{Worker: "b/0", Profile: "n/s/m", Unfit: "not ready", Verdict: policy.Verdict{Cause: policy.NotConsidered}, Tie: 9, Labels: map[string]string{"zone": "a"}},
			{Worker: "c/0", Profile: "n/s/m", Unfit: "not ready", Verdict: policy.Verdict{Cause: policy.Unfit}},
			{Worker: "d/0", Profile: "n/s/m", Verdict: policy.Verdict{Cause: policy.TooBusy, Exclude: "busy"}},
			{Worker: "provider n/b", UpstreamModel: "x", Ignored: true},
		},
	})
	l.FirstToken("r", 2*time.Second)
	l.Moved("r", "b/0")
	l.Done("r", End{At: at.Add(4 * time.Second), Outcome: routerv1.Outcome_OUTCOME_OK, Prompt: 11, Cached: 5, Output: -1})
	l.Done("r", End{At: at.Add(9 * time.Second), Prompt: -1})
	l.Done("other", End{})
	got, _ := l.Explain("r")
	n, ok := func(n uint32) *uint32 { return &n }, routerv1.Outcome_OUTCOME_OK
	sec := func(n float64) *durationpb.Duration { return durationpb.New(time.Duration(n * float64(time.Second))) }
	want := &adminv1.Decision{
		RequestId: "r", Model: "m", Tenant: "t", Pool: "n/p", DecidedUnixNanos: at.UnixNano(), Waited: sec(1), CatalogVersion: 7, Policy: "predictedttft", Reason: "so", TimeScale: 1,
		Format: 1, Request: &adminv1.RecordedRequest{Qos: "batch"}, Chosen: "a/0", ServedBy: "b/0", OmittedDropped: 3, Verdict: &adminv1.Verdict{Action: "route", Rule: "n/p/r", Chosen: "a/0"},
		ActualTtft: sec(2), ActualE2E: sec(4), ActualPromptTokens: n(11), ActualCachedTokens: n(5), Outcome: &ok,
		Candidates: []*adminv1.Candidate{
			{
				Worker: "a/0", Profile: "n/s/m", PromptTokens: 10, MatchedTokens: 4, CachedTokens: 3, InFlight: 2, PredictedTtft: sec(1), PredictedWait: sec(.001), PredictedPrefill: durationpb.New(2),
				PredictedE2E: sec(60), Cost: 0.5, Others: 1, RecentWork: 0.25, Work: 0.125, Tie: 1, Running: 1, Waiting: 2, KvUsage: 0.5, SampleAge: sec(1),
				Means: []*adminv1.LoadMean{{Window: sec(30), Load: &adminv1.Load{Running: 3}}, {Window: sec(10), Load: &adminv1.Load{Waiting: 4}}},
			},
			{Worker: "b/0", Profile: "n/s/m", Unfit: "not ready", Dropped: "the rule does not consider it", Labels: map[string]string{"zone": "a"}},
			{Worker: "c/0", Profile: "n/s/m", Unfit: "not ready", Dropped: "not ready", Tie: 2},
			{Worker: "d/0", Profile: "n/s/m", Dropped: "too busy for busy", Tie: 3},
			{Worker: "provider n/b", UpstreamModel: "x", Dropped: "not looked at: the request is refused", Tie: 4},
		},
	}
	if diff := cmp.Diff(got, want, protocmp.Transform()); diff != "" {
		t.Error(diff)
	}
	recent := l.Recent(at)
	if diff := cmp.Diff(recent, map[string]*adminv1.RecentRequests{"b/0": {Requests: 1, Ttft: sec(2), PromptTokens: 11, CachedTokens: 5}}, protocmp.Transform()); diff != "" {
		t.Error(diff)
	}
	if recent := l.Recent(at.Add(time.Minute)); len(recent) != 0 {
		t.Errorf("old requests count: %v", recent)
	}
}

func TestFilter(t *testing.T) {
	routed := &Record{
		Model: "m", Tenant: "n/team", Chosen: "a/0", servedBy: "b/0", Request: &adminv1.RecordedRequest{Tenants: []string{"team", "org"}},
		Verdict: &adminv1.Verdict{Action: "route", Rule: "n/p/r", Chosen: "a/0"}, Shadow: &adminv1.Verdict{Action: "reject", Rule: "n/dry/r"},
		Candidates: []Candidate{{Worker: "a/0", Profile: "n/s/m"}, {Worker: "b/0", Profile: "n/t/m"}},
	}
	external := &Record{Model: "m", Chosen: "provider n/bedrock", servedBy: "provider n/bedrock"}
	none := &Record{Model: "m2", Verdict: &adminv1.Verdict{Action: "saturated"}, Shadow: &adminv1.Verdict{Action: "saturated"}}
	for _, c := range []struct {
		filter Filter
		want   [3]bool // routed, external, none
	}{
		{Filter{}, [3]bool{true, true, true}},
		{Filter{Model: "m"}, [3]bool{true, true, false}},
		{Filter{Tenant: "team"}, [3]bool{true, false, false}},
		{Filter{Tenant: "n/team"}, [3]bool{true, false, false}},
		{Filter{Tenant: "org"}, [3]bool{true, false, false}},
		{Filter{Tenant: "eam"}, [3]bool{}},
		{Filter{Policy: "p"}, [3]bool{true, false, false}},
		{Filter{Policy: "n/p", Rule: "r"}, [3]bool{true, false, false}},
		{Filter{Rule: "p"}, [3]bool{}},
		{Filter{Worker: "a"}, [3]bool{true, false, false}},
		{Filter{Worker: "b/0"}, [3]bool{true, false, false}},
		{Filter{Worker: "provider n/bedrock"}, [3]bool{false, true, false}},
		{Filter{Worker: "a/1"}, [3]bool{}},
		{Filter{Backend: "n/s"}, [3]bool{true, false, false}},
		{Filter{Backend: "n/bedrock"}, [3]bool{false, true, false}},
		{Filter{Action: "route"}, [3]bool{true, true, false}},
		{Filter{Action: "saturated"}, [3]bool{false, false, true}},
		{Filter{ShadowDiffers: true}, [3]bool{true, false, false}},
	} {
		for i, r := range []*Record{routed, external, none} {
			if got := c.filter.takes(r); got != c.want[i] {
				t.Errorf("%+v on record %d: %v", c.filter, i, got)
			}
		}
	}
}

func TestSubscribe(t *testing.T) {
	l := New(4)
	for i := range 6 {
		l.Add(&Record{RequestID: fmt.Sprint("old", i), Model: "m", Chosen: "a/0"})
	}
	l.Done("old4", End{At: time.Unix(1, 0)})
	s, ok := l.Subscribe(Filter{Model: "m"}, 3)
	over, ok2 := l.Subscribe(Filter{Finished: true}, 9)
	if !ok || !ok2 {
		t.Fatal("no subscription")
	}
	kept := func(s *Subscription) (out []string) {
		for {
			d, ok := s.Kept()
			if !ok {
				return out
			}
			out = append(out, d.RequestId)
		}
	}
	if got := kept(s); !cmp.Equal(got, []string{"old3", "old4", "old5"}) {
		t.Errorf("kept %v", got)
	}
	if got := kept(over); !cmp.Equal(got, []string{"old4"}) {
		t.Errorf("kept finished %v", got)
	}
	l.Add(&Record{RequestID: "1", Model: "m", Chosen: "a/0"})
	l.Add(&Record{RequestID: "2", Model: "other"})
	l.Done("1", End{At: time.Unix(2, 0)})
	l.Done("1", End{At: time.Unix(3, 0)})
	next := func(s *Subscription) string {
		d, missed, err := s.Next(t.Context())
		if err != nil || missed != 0 {
			t.Fatal(missed, err)
		}
		return d.RequestId
	}
	if got := next(s); got != "1" {
		t.Errorf("got %s", got)
	}
	if a, b := next(over), next(over); a != "2" || b != "1" { // refused at once, routed when over
		t.Errorf("finished: %s %s", a, b)
	}

	// Who does not read misses records, is told how many, and holds up nobody.
	for i := range maxPending + 10 {
		l.Add(&Record{RequestID: fmt.Sprint("new", i), Model: "m"})
	}
	missed := uint64(0)
	for range maxPending {
		_, n, err := s.Next(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		missed += n
	}
	if missed != 10 {
		t.Errorf("missed %d, want 10", missed)
	}
	done, cancel := context.WithCancel(t.Context())
	cancel()
	if _, _, err := s.Next(done); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
	s.Close()
	over.Close()
	var all []*Subscription
	for range maxSubscriptions {
		s, ok := l.Subscribe(Filter{}, 0)
		if !ok {
			t.Fatal("refused")
		}
		all = append(all, s)
	}
	if _, ok := l.Subscribe(Filter{}, 0); ok {
		t.Error("subscriptions are not bounded")
	}
	for _, s := range all {
		s.Close()
	}
}
