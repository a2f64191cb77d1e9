package replay_test

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/kinference/kinference/internal/replay"
	"github.com/kinference/kinference/internal/resources"
	"github.com/kinference/kinference/internal/schedule"
	adminv1 "github.com/kinference/kinference/proto/gen/kinference/admin/v1"
)

const fleet = `
apiVersion: kinference.buoyant.io/v1alpha1
kind: InferenceWorkerSet
metadata: { name: small, namespace: ns }
spec: { models: [ { name: small, aliases: [ any ] } ], endpoints: [ { name: a, address: a }, { name: b, address: b } ] }
---
apiVersion: kinference.buoyant.io/v1alpha1
kind: InferenceWorkerSet
metadata: { name: large, namespace: ns }
spec: { models: [ { name: large } ], endpoints: [ { name: a, address: c } ] }
---
apiVersion: kinference.buoyant.io/v1alpha1
kind: InferenceProvider
metadata: { name: cloud, namespace: ns }
spec: { schema: OpenAICompatible, endpoint: "https://cloud.example.com", models: [ { name: up, aliases: [ any ], price: { currency: USD, perMillion: { input: "2", output: "10" } } } ] }
---
apiVersion: kinference.buoyant.io/v1alpha1
kind: InferencePolicy
metadata: { name: p, namespace: ns }
spec:
  rules: [ %s ]
`

func replayer(t *testing.T, rule string) *replay.Replayer {
	t.Helper()
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "a.yaml"), fmt.Appendf(nil, fleet, rule), 0o600); err != nil {
		t.Fatal(err)
	}
	c, ps := resources.Load(dir)
	if c == nil {
		t.Fatal(ps)
	}
	return replay.New(c)
}

// record is a decision between two workers, one of which is faster, and a provider.
func record() *adminv1.Decision {
	ms := func(n int) *durationpb.Duration { return durationpb.New(time.Duration(n) * time.Millisecond) }
	means := []*adminv1.LoadMean{{Window: durationpb.New(30 * time.Second), Load: &adminv1.Load{Waiting: 3}}}
	return &adminv1.Decision{
		RequestId: "r", Model: "any", Format: 1, Policy: schedule.PredictedTTFT, TimeScale: 1, Chosen: "ns.small.a/0", Verdict: &adminv1.Verdict{Action: "route"},
		Request: &adminv1.RecordedRequest{Qos: "interactive", Endpoint: "ChatCompletions", PromptTokens: 1000, MaxTokens: 100, Classified: true},
		Candidates: []*adminv1.Candidate{
			{Worker: "ns.small.a/0", Profile: "ns/small/small", PredictedTtft: ms(100), PredictedE2E: ms(900), Means: means, Index: 1},
			{Worker: "ns.small.b/0", Profile: "ns/small/small", PredictedTtft: ms(200), PredictedE2E: ms(800), Means: means},
			{Worker: "provider ns/cloud", UpstreamModel: "up", PredictedTtft: ms(300), PredictedE2E: ms(700), Index: 2},
		},
	}
}

func TestDecision(t *testing.T) {
	for name, c := range map[string]struct {
		rule   string
		change func(*adminv1.Decision)
		want   string // action, or where to
		lacks  []replay.Lack
	}{
		"the same":       {"{ name: r, route: {} }", nil, "ns.small.a/0", nil},
		"by end":         {"{ name: r, route: { select: [ { minimize: PredictedE2E } ] } }", nil, "provider ns/cloud", nil},
		"equals stay":    {"{ name: r, route: { select: [ { type: Local, minimize: QueuedPrompts } ] } }", nil, "ns.small.b/0", nil},
		"busy":           {"{ name: r, route: { exclude: [ { name: x, drop: { queuedPrompts: { greaterThan: 2 } } } ] } }", nil, "provider ns/cloud", nil},
		"other window":   {"{ name: r, route: { exclude: [ { name: x, drop: { queuedPrompts: { greaterThan: 2, window: 10s } } } ] } }", nil, "provider ns/cloud", []replay.Lack{replay.Windows}},
		"memory":         {"{ name: r, route: { exclude: [ { name: x, drop: { queuedPrompts: { greaterThan: 5, until: 1 } } } ] } }", nil, "ns.small.a/0", []replay.Lack{replay.Memory}},
		"reads a header": {"{ name: r, matches: [ { headers: [ { name: a, value: b } ] } ], reject: { reason: Refused } }", nil, "ns.small.a/0", []replay.Lack{replay.Headers}},
		"the header was read": {"{ name: r, matches: [ { headers: [ { name: a, value: b } ] } ], reject: { reason: Refused } }", func(d *adminv1.Decision) {
			d.Request.HeaderNames, d.Request.Headers = []string{"a"}, map[string]string{"a": "b"}
		}, "reject", nil},
		"reads a claim":     {"{ name: r, matches: [ { claims: [ { name: a, value: b } ] } ], reject: { reason: Refused } }", nil, "ns.small.a/0", []replay.Lack{replay.Claims}},
		"considers more":    {"{ name: r, route: { consider: [ { models: { names: [ any, large ] } } ] } }", nil, "ns.small.a/0", []replay.Lack{replay.Unseen}},
		"nobody fits":       {"{ name: r, route: {} }", func(d *adminv1.Decision) { unfit(d, 3) }, "unavailable", nil},
		"one does not fit":  {"{ name: r, route: {} }", func(d *adminv1.Decision) { unfit(d, 1) }, "ns.small.b/0", nil},
		"left out":          {"{ name: r, route: {} }", func(d *adminv1.Decision) { d.OmittedDropped = 1 }, "ns.small.a/0", []replay.Lack{replay.Omitted}},
		"no provider then":  {"{ name: r, route: { select: [ { type: Provider } ] } }", func(d *adminv1.Decision) { d.Candidates = d.Candidates[:2] }, "provider ns/cloud", []replay.Lack{replay.Unpredicted}},
		"gone":              {"{ name: r, route: {} }", func(d *adminv1.Decision) { d.Candidates[1].Profile = "ns/old/m" }, "ns.small.a/0", []replay.Lack{replay.Gone}},
		"another scheduler": {"{ name: r, route: {} }", func(d *adminv1.Decision) { d.Policy = "random" }, "ns.small.a/0", []replay.Lack{replay.Unranked}},
		"old":               {"{ name: r, route: {} }", func(d *adminv1.Decision) { d.Format, d.Request = 0, nil }, "ns.small.a/0", []replay.Lack{replay.OldFormat}},
	} {
		t.Run(name, func(t *testing.T) {
			d := record()
			if c.change != nil {
				c.change(d)
			}
			before := proto.Clone(d)
			got, ok := replayer(t, c.rule).Decision(d)
			if !ok || !proto.Equal(before, d) {
				t.Fatalf("ok %v, or the record was changed", ok)
			}
			where := got.After.Endpoint
			if where == "" {
				where = got.After.Action
			}
			var want [replay.NumLacks]bool
			for _, l := range c.lacks {
				want[l] = true
			}
			if where != c.want || got.Lacks != want || got.Changed != (where != d.Chosen) {
				t.Errorf("to %s, want %s; changed %v, lacks %v, want %v", where, c.want, got.Changed, got.Lacks, want)
			}
		})
	}
}

func unfit(d *adminv1.Decision, n int) {
	for _, c := range d.Candidates[:n] {
		c.Unfit = "not ready"
	}
}

// A provider costs its price under the new catalog.
func TestCost(t *testing.T) {
	got, _ := replayer(t, "{ name: r, route: { select: [ { type: Provider } ] } }").Decision(record())
	if got.After.Cost != 0.003 || got.Before.Cost != 0 || got.After.TTFT != 300*time.Millisecond || got.Before.TTFT != 100*time.Millisecond {
		t.Errorf("%+v", got)
	}
	if d := record(); true {
		d.Model = "unknown"
		if _, ok := replayer(t, "").Decision(d); ok {
			t.Error("a model that no pool serves is decided about")
		}
	}
}

func TestEvent(t *testing.T) {
	r := replayer(t, "{ name: r, matches: [ { qos: batch } ], route: { select: [ { type: Provider }, { type: Local } ] } }")
	event := func(text string) *replay.Usage {
		u := &replay.Usage{}
		if err := json.Unmarshal([]byte(text), u); err != nil {
			t.Fatal(err)
		}
		r.Learn(u)
		return u
	}
	a := event(`{"id":"1","data":{"model":"any","qos":"batch","workerSet":"ns/small","ttft":0.5,"tokens":{"input":1000,"output":100},"cost":{"total":"0.5"}}}`)
	b := event(`{"id":"2","data":{"model":"any","qos":"interactive","provider":"ns/cloud","ttft":1.5,"e2e":3,"tokens":{"input":1000,"output":100}}}`)
	c := event(`{"id":"3","data":{"model":"any","status":401}}`)
	got, ok := r.Event(a)
	if !ok || !got.Changed || got.Before.Where() != "ns/small" || got.After.Where() != "provider ns/cloud" || got.Before.Cost != 0.5 || got.After.Cost != 0.003 ||
		got.After.TTFT != 1500*time.Millisecond || !got.Lacks[replay.Approximate] {
		t.Errorf("%v %+v", ok, got)
	}
	if got, ok := r.Event(b); !ok || got.After.Where() != "ns/small" || got.After.TTFT != 500*time.Millisecond || got.After.Cost != 0.5 || got.Before.E2E != 3*time.Second {
		t.Errorf("%v %+v", ok, got)
	}
	if _, ok := r.Event(c); ok {
		t.Error("what was refused before any decision is decided about")
	}
}
