package policy_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/kinference/kinference/api/v1alpha1"
	"github.com/kinference/kinference/internal/policy"
)

// generator makes rules, requests and fleets at random from a small world, so
// that they often have to do with each other.
type generator struct{ *rand.Rand }

func pick[T any](g generator, list ...T) T { return list[g.IntN(len(list))] }

func (g generator) request() *policy.Request {
	r := &policy.Request{
		ID: fmt.Sprint(g.Uint32()), Model: pick(g, "glm-5.3", "qwen", "standard-model", "none"), QoS: pick[v1alpha1.QoS](g, "interactive", "batch", "deferrable"),
		PromptTokens: g.IntN(1000), Tags: policy.Tags{Complete: g.IntN(3) > 0},
	}
	for _, tag := range []string{"pii-detected", "complexity-low", "injection"} {
		if g.IntN(3) == 0 {
			r.Tags.Present = append(r.Tags.Present, tag)
		}
	}
	return r
}

func (g generator) fleet() *policy.Fleet {
	f := fleet()
	for i := range f.Endpoints {
		e := &f.Endpoints[i]
		e.TTFT, e.E2E, e.Cost = time.Duration(g.IntN(1000))*time.Millisecond, time.Duration(g.IntN(1000))*time.Millisecond, g.Float64()
		if e.Load != nil {
			e.Load = load{queued: float64(g.IntN(5)), running: float64(g.IntN(9)), usage: g.Float64(), stale: g.IntN(8) == 0}
		}
		if g.IntN(4) == 0 {
			e.Unfit = "not ready"
		}
	}
	return f
}

func (g generator) match() string {
	return pick(g, `{}`, `{ model: glm-5.3 }`, `{ qos: batch }`, `{ tag: pii-detected }`, `{ tags: { none: [ "pii-*" ] } }`, `{ promptTokens: { greaterThan: 500 } }`, `{ when: "request.prompt_tokens > 300" }`)
}

func (g generator) exclude(name string) string {
	onlyIf := ""
	if g.IntN(2) == 0 {
		onlyIf = "if: " + g.match() + ","
	}
	return `{ name: ` + name + `, ` + onlyIf + ` drop: ` + pick(g, `{ backend: { type: Local } }`, `{ backend: { type: Provider } }`, `{ backend: { names: [ bedrock, qwen-worker ] } }`,
		`{ queuedPrompts: { greaterThan: 2, until: 1 } }`, `{ kvCacheUsage: { greaterThan: 0.5 } }`, `{ predictedTTFT: { greaterThan: 500ms } }`, `{ backend: { labels: { gpu: l40s } }, runningPrompts: { greaterThan: 3 } }`) + ` }`
}

func (g generator) rule(name, exclude, onEmpty string) string {
	return `{ name: ` + name + `, matches: [ ` + g.match() + ` ], route: { consider: [ ` +
		pick(g, `{ type: Local }`, `{ type: Provider }`, `{ models: { names: [ qwen, glm-5.3 ] } }`, `{ workerSets: { names: [ glm-worker ] } }`) + `, ` + pick(g, `{ type: Local }`, `{ models: { names: [ standard-model ] } }`) +
		` ], exclude: [ ` + exclude + ` ], select: [ ` + pick(g, `{ type: Local }`, `{ minimize: Cost }`, `{ order: [ databricks, glm-worker ] }`, `{ weights: [ { name: glm-worker, weight: 3 }, { name: bedrock, weight: 1 } ] }`) + `, ` +
		pick(g, `{ type: Provider }`, `{}`) + ` ], onEmpty: ` + onEmpty + ` } }`
}

// high is a load that has been above every threshold before.
type high struct{ load }

func (high) Held(policy.Threshold) bool { return true }

func named(t *testing.T, name, text string) *policy.Policy {
	t.Helper()
	p := spec(t, text)
	p.Name = name
	out, faults := policy.Compile(p)
	if out == nil {
		t.Fatal(faults)
	}
	return out
}

func TestProperties(t *testing.T) {
	g := generator{rand.New(rand.NewPCG(1, 2))}
	var seen [5]int
	held := 0
	for n := range 500 {
		excludes := g.exclude("x")
		rule := g.rule("r", excludes, pick(g, "Reject", "Queue"))
		r, f := g.request(), g.fleet()
		rules := compile(t, "rules: [ "+rule+" ]")
		d := set(rules).Evaluate(r, f)
		seen[d.Action]++

		if again := set(compile(t, "rules: [ "+rule+" ]")).Evaluate(r, f); !cmp.Equal(d, again) {
			t.Fatalf("%d: two evaluations differ: %s", n, cmp.Diff(d, again))
		}
		for _, i := range d.Order {
			if f.Endpoints[i].Unfit != "" || d.Verdicts[i].Cause != policy.Kept {
				t.Fatalf("%d: %s is chosen with verdict %v %q", n, f.Endpoints[i].ID, d.Verdicts[i], f.Endpoints[i].Unfit)
			}
		}
		for i, v := range d.Verdicts {
			if (v.Cause == policy.Kept) != slices.Contains(d.Order, i) {
				t.Fatalf("%d: %s has verdict %v, order %v", n, f.Endpoints[i].ID, v, d.Order)
			}
		}
		switch busy := slices.ContainsFunc(d.Verdicts, func(v policy.Verdict) bool { return v.Cause == policy.TooBusy }); {
		case d.Action == policy.Route && len(d.Order) == 0, d.Action != policy.Route && len(d.Order) > 0,
			d.Action == policy.Saturated && !busy, d.Action == policy.Unavailable && busy:
			t.Fatalf("%d: %v with order %v, busy %v", n, d.Action, d.Order, busy)
		}

		// One exclude more never lets an endpoint in.
		more := strings.Replace(rule, excludes, excludes+", "+g.exclude("y"), 1)
		narrower := set(compile(t, "rules: [ "+more+" ]")).Evaluate(r, f)
		for _, i := range narrower.Order {
			if !slices.Contains(d.Order, i) {
				t.Fatalf("%d: an exclude more let %s in\n%s\n%s", n, f.Endpoints[i].ID, rule, more)
			}
		}

		// Neither does a load that remembers, and only near a threshold does it matter.
		remembering := &policy.Fleet{Endpoints: slices.Clone(f.Endpoints)}
		for i := range remembering.Endpoints {
			if l, ok := remembering.Endpoints[i].Load.(load); ok {
				remembering.Endpoints[i].Load = high{l}
			}
		}
		after := set(rules).Evaluate(r, remembering)
		for _, i := range after.Order {
			if !slices.Contains(d.Order, i) {
				t.Fatalf("%d: what was before let %s in\n%s", n, f.Endpoints[i].ID, rule)
			}
		}
		if len(after.Order) < len(d.Order) {
			held++
		}

		// Policies are in force in the order of their age and names, in whatever
		// order they come.
		other := named(t, "other", "rules: [ "+g.rule("r", g.exclude("x"), "Reject")+" ]")
		one := named(t, "one", "rules: [ "+g.rule("r", excludes, "Continue")+" ]")
		if a, b := set(one, other).Evaluate(r, f), set(other, one).Evaluate(r, f); !cmp.Equal(a, b) {
			t.Fatalf("%d: the order of policies matters: %s", n, cmp.Diff(a, b))
		}

		// Nobody is ready: no endpoint, whatever the rules.
		for i := range f.Endpoints {
			f.Endpoints[i].Unfit = "not ready"
		}
		if d := set(rules).Evaluate(r, f); d.Action != policy.Unavailable && d.Action != policy.Queue {
			t.Fatalf("%d: nobody is ready and the action is %v", n, d.Action)
		}
	}
	if held == 0 {
		t.Error("what was before never mattered")
	}
	for a, n := range seen {
		if n == 0 && policy.Action(a) != policy.Reject {
			t.Errorf("action %v never came up", policy.Action(a))
		}
	}
}

// world is a large set of rules and workers of which the last rule matches.
func world(b testing.TB, rules, workers int) (*policy.Set, *policy.Request, *policy.Fleet) {
	var y strings.Builder
	y.WriteString("rules:\n")
	for i := range rules - 1 {
		fmt.Fprintf(&y, "- { name: r%d, matches: [ { model: other-%d, qos: batch }, { tenant: t%d, tag: complexity-low } ], reject: { reason: X } }\n", i, i, i)
	}
	y.WriteString(`- { name: last, matches: [ { model: glm-5.3, when: "request.prompt_tokens < 20000 && !has(request.tools)" } ], route: {
    exclude: [ { name: pii, if: { tag: pii-detected }, drop: { backend: { type: Provider } } }, { name: busy, drop: { backend: { type: Local }, queuedPrompts: { greaterThan: 2 }, kvCacheUsage: { greaterThan: 0.7 } } } ],
    select: [ { type: Local, minimize: PredictedTTFT }, { type: Provider, order: [ bedrock ] } ] } }`)
	f := &policy.Fleet{}
	for i := range workers {
		f.Endpoints = append(f.Endpoints, policy.Endpoint{Backend: glm, ID: fmt.Sprint("w", i), TTFT: time.Duration(i*7919%1000) * time.Millisecond, Load: load{queued: float64(i % 4), usage: 0.5}})
	}
	return set(compile(b, y.String())), &policy.Request{ID: "x", Model: "glm-5.3", Tenants: []string{"a", "b"}, QoS: "interactive", PromptTokens: 2000, Tags: policy.Tags{Complete: true, Present: []string{"language-en"}}}, f
}

// BenchmarkEvaluate is 50 rules and 64 workers; the goal is 20 µs and at most
// 5 allocations. go test -bench Evaluate -run ^$ ./internal/policy
func BenchmarkEvaluate(b *testing.B) {
	s, r, f := world(b, 50, 64)
	b.ReportAllocs()
	for b.Loop() {
		if d := s.Evaluate(r, f); d.Rule != "last" || len(d.Order) != 64 {
			b.Fatal(d.Rule, len(d.Order))
		}
	}
}

// The benchmark's figure for allocations is a promise.
func TestEvaluateAllocations(t *testing.T) {
	s, r, f := world(t, 50, 64)
	if n := testing.AllocsPerRun(100, func() { s.Evaluate(r, f) }); n > 5 {
		t.Errorf("%.0f allocations, want at most 5", n)
	}
}
