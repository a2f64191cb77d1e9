package policy_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"sigs.k8s.io/yaml"

	"github.com/kinference/kinference/api/v1alpha1"
	"github.com/kinference/kinference/internal/policy"
)

// spec parses the spec of a policy.
func spec(t testing.TB, text string) *v1alpha1.InferencePolicy {
	t.Helper()
	p := &v1alpha1.InferencePolicy{}
	p.Namespace, p.Name = "inference", "p"
	if err := yaml.UnmarshalStrict([]byte(text), &p.Spec); err != nil {
		t.Fatalf("parse: %v\n%s", err, text)
	}
	return p
}

func compile(t testing.TB, text string) *policy.Policy {
	t.Helper()
	p, faults := policy.Compile(spec(t, text))
	if p == nil || len(faults) > 0 {
		t.Fatalf("compile: %v\n%s", faults, text)
	}
	return p
}

// load is a worker's means, whatever the window.
type load struct {
	queued, running, usage float64
	stale                  bool
}

func (l load) Mean(m policy.Metric, _ time.Duration) (float64, bool) {
	return [...]float64{l.queued, l.running, l.usage}[m], !l.stale
}

var (
	qwen       = &policy.Backend{Type: v1alpha1.BackendLocal, Name: "qwen-worker", Models: []string{"Qwen/Qwen3.6-27B", "standard-model", "qwen-3.6-27b", "qwen"}, Labels: map[string]string{"gpu": "l40s"}}
	glm        = &policy.Backend{Type: v1alpha1.BackendLocal, Name: "glm-worker", Models: []string{"zai-org/GLM-5.3", "standard-model", "glm-5.3"}}
	bedrock    = &policy.Backend{Type: v1alpha1.BackendProvider, Name: "bedrock", Models: []string{"glm-5.3", "standard-model"}}
	databricks = &policy.Backend{Type: v1alpha1.BackendProvider, Name: "databricks", Models: []string{"glm-5.3", "standard-model"}}
)

// fleet has two workers of each model and two providers; the predictions are
// 20, 10, 40, 30, 50 and 60 ms.
func fleet() *policy.Fleet {
	worker := func(b *policy.Backend, id string, ms int) policy.Endpoint {
		return policy.Endpoint{Backend: b, ID: id, TTFT: time.Duration(ms) * time.Millisecond, E2E: time.Duration(100-ms) * time.Millisecond, Load: load{}}
	}
	return &policy.Fleet{Endpoints: []policy.Endpoint{
		worker(qwen, "q0", 20), worker(qwen, "q1", 10), worker(glm, "g0", 40), worker(glm, "g1", 30),
		{Backend: bedrock, ID: "bedrock", TTFT: 50 * time.Millisecond, Cost: 2}, {Backend: databricks, ID: "databricks", TTFT: 60 * time.Millisecond, Cost: 1},
	}}
}

func set(policies ...*policy.Policy) *policy.Set { return policy.NewSet("pool", policies) }

// outcome is a decision in one line: the action, or the order of endpoints.
func outcome(f *policy.Fleet, d policy.Decision) string {
	if d.Action != policy.Route {
		return d.Action.String()
	}
	var ids []string
	for _, i := range d.Order {
		ids = append(ids, f.Endpoints[i].ID)
	}
	return strings.Join(ids, " ")
}

// The policies of the product's document, with what it says of each.
func TestDocument(t *testing.T) {
	low := policy.Tags{Present: []string{"complexity-low"}, Complete: true}
	clean, pii := policy.Tags{Complete: true}, policy.Tags{Present: []string{"pii-detected"}, Complete: true}
	cheap := `rules: [ { name: low-complexity-consider-qwen, matches: [ { model: glm-5.3, tag: complexity-low } ],
		route: { consider: [ { models: { names: [ qwen-3.6-27b, glm-5.3 ] } } ], select: [ { minimize: PredictedTTFT } ] } } ]`
	burst := `rules: [ { name: burst-to-cloud, route: {
		exclude: [ { name: drop-overloaded-workers, drop: { backend: { type: Local }, queuedPrompts: { greaterThan: 2 } } } ],
		select: [ { type: Local, minimize: PredictedTTFT }, { type: Provider, order: [ bedrock, databricks ] } ] } } ]`
	stays := `rules: [ { name: serve, route: {
		exclude: [ { name: pii-never-leaves-cluster, if: { tag: pii-detected }, drop: { backend: { type: Provider } } } ],
		select: [ { type: Provider, order: [ databricks ] }, { type: Local, minimize: PredictedTTFT } ], onEmpty: Reject } } ]`
	batch := `rules: [ { name: batch-only-to-idle-gpus, matches: [ { qos: batch }, { qos: deferrable } ], route: { consider: [ { type: Local } ],
		exclude: [ { name: busy, drop: { backend: { type: Local }, kvCacheUsage: { greaterThan: 0.7 } } } ],
		select: [ { type: Local, minimize: PredictedTTFT } ], onEmpty: Reject } } ]`
	alias := `rules: [ { name: fastest-standard-model, matches: [ { model: standard-model } ], route: { select: [ { type: Local, minimize: PredictedTTFT } ] } } ]`
	for _, c := range []struct {
		name, policy string
		request      policy.Request
		change       func(e []policy.Endpoint)
		want         string
	}{
		{"low complexity may go to the cheaper model", cheap, policy.Request{Model: "glm-5.3", Tags: low}, nil, "q1 q0 g1 g0 bedrock databricks"},
		{"cached at the expensive one", cheap, policy.Request{Model: "glm-5.3", Tags: low}, func(e []policy.Endpoint) { e[2].TTFT = time.Millisecond }, "g0 q1 q0 g1 bedrock databricks"},
		{"not low", cheap, policy.Request{Model: "glm-5.3", Tags: clean}, nil, "g1 g0 bedrock databricks"},
		{"complexity unknown counts as not low", cheap, policy.Request{Model: "glm-5.3"}, nil, "g1 g0 bedrock databricks"},

		{"nobody is busy", burst, policy.Request{Model: "glm-5.3"}, nil, "g1 g0 bedrock databricks"},
		{"two in the queue are fine", burst, policy.Request{Model: "glm-5.3"}, func(e []policy.Endpoint) { e[2].Load, e[3].Load = load{queued: 2}, load{queued: 2} }, "g1 g0 bedrock databricks"},
		{"one is busy", burst, policy.Request{Model: "glm-5.3"}, func(e []policy.Endpoint) { e[3].Load = load{queued: 2.1} }, "g0 bedrock databricks"},
		{"all are busy", burst, policy.Request{Model: "glm-5.3"}, func(e []policy.Endpoint) { e[2].Load, e[3].Load = load{queued: 3}, load{queued: 3} }, "bedrock databricks"},
		{"no sample counts as busy", burst, policy.Request{Model: "glm-5.3"}, func(e []policy.Endpoint) { e[2].Load, e[3].Load = load{stale: true}, nil }, "bedrock databricks"},

		{"clean goes to the provider", stays, policy.Request{Model: "glm-5.3", Tags: clean}, nil, "databricks g1 g0"},
		{"PII stays", stays, policy.Request{Model: "glm-5.3", Tags: pii}, nil, "g1 g0"},
		{"unclassified counts as PII", stays, policy.Request{Model: "glm-5.3"}, nil, "g1 g0"},
		{"PII and no worker", stays, policy.Request{Model: "glm-5.3", Tags: pii}, func(e []policy.Endpoint) { e[2].Unfit, e[3].Unfit = "not ready", "not ready" }, "unavailable"},

		{"batch, idle", batch, policy.Request{Model: "glm-5.3", QoS: "batch"}, nil, "g1 g0"},
		{"deferrable, one busy", batch, policy.Request{Model: "glm-5.3", QoS: "deferrable"}, func(e []policy.Endpoint) { e[3].Load = load{usage: 0.71} }, "g0"},
		{"batch, all busy", batch, policy.Request{Model: "glm-5.3", QoS: "batch"}, func(e []policy.Endpoint) { e[2].Load, e[3].Load = load{usage: 0.8}, load{usage: 0.9} }, "saturated"},
		{"interactive, all busy", batch, policy.Request{Model: "glm-5.3", QoS: "interactive"}, func(e []policy.Endpoint) { e[2].Load, e[3].Load = load{usage: 0.8}, load{usage: 0.9} }, "g1 g0 bedrock databricks"},

		{"the fastest of an alias", alias, policy.Request{Model: "standard-model"}, nil, "q1 q0 g1 g0"},
		{"one model of it", alias, policy.Request{Model: "qwen"}, nil, "q1 q0"},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := fleet()
			if c.change != nil {
				c.change(f.Endpoints)
			}
			if got := outcome(f, set(compile(t, c.policy)).Evaluate(&c.request, f)); got != c.want {
				t.Errorf("got %q, want %q", got, c.want)
			}
		})
	}
}

// Each part of a match, alone.
func TestMatches(t *testing.T) {
	base := policy.Request{
		ID: "r", Model: "qwen", Tenants: []string{"search", "acme"}, QoS: "batch", PromptTokens: 100, MaxTokens: 50, Endpoint: "ChatCompletions",
		Headers: map[string]string{"x-app": "search"}, Claims: map[string]any{"org": "acme", "groups": []any{"a", "b"}},
		Tags: policy.Tags{Present: []string{"pii-email", "language-de"}, Complete: true},
	}
	unknown := base
	unknown.Tags = policy.Tags{Present: []string{"language-de"}}
	for _, c := range []struct {
		match string
		r     *policy.Request
		want  bool
	}{
		{`{}`, &base, true},
		{`{ model: qwen }`, &base, true}, {`{ model: Qwen }`, &base, false},
		{`{ tenant: search }`, &base, true}, {`{ tenant: acme }`, &base, true}, {`{ tenants: [ x, acme ] }`, &base, true}, {`{ tenant: x }`, &base, false},
		{`{ qos: batch }`, &base, true}, {`{ qos: interactive }`, &base, false},
		{`{ promptTokens: { greaterThan: 99, lessThan: 101 } }`, &base, true}, {`{ promptTokens: { greaterThan: 100 } }`, &base, false},
		{`{ promptTokens: { lessThan: 100 } }`, &base, false},
		{`{ headers: [ { name: X-App, value: search } ] }`, &base, true}, {`{ headers: [ { name: x-app, value: Search } ] }`, &base, false},
		{`{ headers: [ { name: x-none, value: "" } ] }`, &base, false},
		{`{ claims: [ { name: org, value: acme }, { name: groups, value: b } ] }`, &base, true}, {`{ claims: [ { name: groups, value: c } ] }`, &base, false},
		{`{ endpoint: ChatCompletions }`, &base, true}, {`{ endpoint: Embeddings }`, &base, false},
		{`{ tag: pii-email }`, &base, true}, {`{ tag: "pii-*" }`, &base, true}, {`{ tag: secret-key }`, &base, false},
		{`{ tags: { all: [ pii-email, language-de ] } }`, &base, true}, {`{ tags: { all: [ pii-email, language-en ] } }`, &base, false},
		{`{ tags: { any: [ language-en, language-de ] } }`, &base, true}, {`{ tags: { none: [ "pii-*" ] } }`, &base, false}, {`{ tags: { none: [ secret-key ] } }`, &base, true},
		// Risks that are unknown count as present, descriptions as absent.
		{`{ tag: pii-email }`, &unknown, true}, {`{ tag: "secret-*" }`, &unknown, true}, {`{ tag: injection }`, &unknown, true},
		{`{ tags: { none: [ pii-email ] } }`, &unknown, false}, {`{ tag: language-de }`, &unknown, true},
		{`{ tag: language-en }`, &unknown, false}, {`{ tag: complexity-low }`, &unknown, false},
		{`{ tag: falcon }`, &unknown, true}, {`{ tag: eagle }`, &unknown, false},
		{`{ when: "request.prompt_tokens < 20000 && !has(request.tools)" }`, &base, true},
		{`{ when: "request.tagged('pii-*') && request.tenant == 'search'" }`, &base, true},
		{`{ when: "request.tagged('pii-email')" }`, &unknown, true},
		{`{ when: "request.claims.none == 'x'" }`, &base, false}, // an error grants nothing
		{`{ model: qwen, qos: interactive }`, &base, false},      // fields are ANDed
	} {
		p := compile(t, `{ customTags: [ { name: falcon, any: [ { keywords: [ falcon ] } ], risk: true }, { name: eagle, any: [ { keywords: [ eagle ] } ] } ],
			rules: [ { name: r, matches: [ `+c.match+` ], reject: { reason: Refused } } ] }`)
		f := fleet()
		d := set(p).Evaluate(c.r, f)
		want := c.want
		if strings.Contains(c.match, "claims.none") {
			want = true // a restriction that cannot be evaluated holds
		}
		if got := d.Action == policy.Reject; got != want {
			t.Errorf("%s: matched %v, want %v", c.match, got, want)
		}
		if strings.Contains(c.match, "claims.none") {
			p := compile(t, `rules: [ { name: r, matches: [ `+c.match+` ], route: { select: [ { type: Provider } ] } } ]`)
			if d := set(p).Evaluate(c.r, f); d.Rule == "r" {
				t.Errorf("%s: a rule that grants matched by an error", c.match)
			}
		}
	}
}

func TestSelect(t *testing.T) {
	for _, c := range []struct{ route, want string }{
		{`{ select: [ { type: Provider, minimize: Cost }, { type: Local } ] }`, "databricks bedrock g1 g0"},
		{`{ select: [ { minimize: PredictedE2E, type: Local } ] }`, "g0 g1"},
		{`{ select: [ { order: [ databricks, glm-worker ] } ] }`, "databricks g1 g0"},
		{`{ consider: [ { workerSets: { names: [ glm-worker ] } } ] }`, "g1 g0"},
		{`{ consider: [ { providers: { names: [ bedrock ] } }, { models: { names: [ qwen ] } } ] }`, "q1 q0 bedrock"},
		{`{ consider: [ { workerSets: { names: [ qwen-worker ] } } ] }`, "unavailable"}, // it does not serve the model
		{`{ consider: [ { models: { names: [ qwen ] }, workerSets: { names: [ qwen-worker ] } } ] }`, "q1 q0"},
		{`{ exclude: [ { name: x, drop: { predictedTTFT: { greaterThan: 45ms } } } ] }`, "g1 g0"},
		{`{ exclude: [ { name: x, drop: { backend: { names: [ bedrock, glm-worker ] } } } ] }`, "databricks"},
		{`{ exclude: [ { name: x, drop: { backend: { models: [ glm-5.3 ] } } } ] }`, "unavailable"},
		{`{ select: [ { weights: [ { name: glm-worker, weight: 0 }, { name: bedrock, weight: 1 } ] } ] }`, "bedrock"},
		{`{ exclude: [ { name: x, drop: { backend: { type: Local }, runningPrompts: { greaterThan: 0 } } } ], select: [ { type: Local } ] }`, "g1 g0"},
		{`{ select: [ { type: Provider, providers: { names: [ nobody ] } } ], onEmpty: Queue, queue: { timeout: 5s } }`, "queue"},
	} {
		f := fleet()
		d := set(compile(t, `rules: [ { name: r, route: `+c.route+` } ]`)).Evaluate(&policy.Request{Model: "glm-5.3", ID: "x"}, f)
		if got := outcome(f, d); got != c.want {
			t.Errorf("%s: got %q, want %q", c.route, got, c.want)
		}
		if d.Action == policy.Queue && d.Wait != 5*time.Second {
			t.Errorf("%s: waits %v", c.route, d.Wait)
		}
	}
}

// A canary gets its share, and one request always the same answer.
func TestWeights(t *testing.T) {
	s := set(compile(t, `rules: [ { name: r, route: { select: [ { weights: [ { name: glm-worker, weight: 90 }, { name: bedrock, weight: 10 } ] } ] } } ]`))
	f, n := fleet(), 0
	const all = 10_000
	for i := range all {
		r := policy.Request{ID: fmt.Sprintf("req-%d", i), Model: "glm-5.3"}
		d := s.Evaluate(&r, f)
		if len(d.Order) != 3 {
			t.Fatalf("order %v: the other one stands by", d.Order)
		}
		if f.Endpoints[d.Order[0]].ID == "bedrock" {
			n++
		}
	}
	if n < all/10-100 || n > all/10+100 { // four standard deviations are 120
		t.Errorf("bedrock got %d of %d, want about a tenth", n, all)
	}
	for i := range f.Endpoints[:4] {
		f.Endpoints[i].Unfit = "not ready"
	}
	if got := outcome(f, s.Evaluate(&policy.Request{ID: "a", Model: "glm-5.3"}, f)); got != "bedrock" {
		t.Errorf("without workers: %q", got)
	}
}

func TestOrderOfPolicies(t *testing.T) {
	reject := func(name, reason string, age time.Duration, more string) *policy.Policy {
		p := spec(t, `{ `+more+` rules: [ { name: r, reject: { reason: `+reason+` } } ] }`)
		p.Name, p.CreationTimestamp.Time = name, time.Unix(1000, 0).Add(-age)
		out, faults := policy.Compile(p)
		if out == nil {
			t.Fatal(faults)
		}
		return out
	}
	r, f := &policy.Request{Model: "glm-5.3"}, fleet()
	for _, c := range []struct {
		name string
		set  *policy.Set
		want string
	}{
		{"oldest first", set(reject("a", "Young", 0, ""), reject("b", "Old", time.Hour, "")), "Old"},
		{"then by name", set(reject("b", "B", 0, ""), reject("a", "A", 0, "")), "A"},
		{"of this pool only", set(reject("a", "A", 0, "targetRefs: [ { kind: InferencePool, name: other } ],"), reject("b", "B", 0, "targetRefs: [ { kind: InferencePool, name: pool } ],")), "B"},
	} {
		d := c.set.Evaluate(r, f)
		if d.Action != policy.Reject || d.Rejection.Reason != c.want {
			t.Errorf("%s: %v %+v, want %s", c.name, d.Action, d.Rejection, c.want)
		}
	}
	// A dry run changes nothing and says what it would do.
	d := set(reject("a", "Dry", time.Hour, "dryRun: true,")).Evaluate(r, f)
	if d.Action != policy.Route || d.Shadow == nil || d.Shadow.Action != policy.Reject || d.Shadow.Policy != "inference/a" {
		t.Errorf("dry run: %+v", d)
	}
}

// A rule without an endpoint may hand over, but not to the default.
func TestContinue(t *testing.T) {
	f := fleet()
	for i := range f.Endpoints[:4] {
		f.Endpoints[i].Load = load{usage: 0.9}
	}
	first := `{ name: idle, route: { consider: [ { type: Local } ], exclude: [ { name: busy, drop: { kvCacheUsage: { greaterThan: 0.7 } } } ], onEmpty: Continue } }`
	d := set(compile(t, `rules: [ `+first+` ]`)).Evaluate(&policy.Request{Model: "glm-5.3"}, f)
	if d.Action != policy.Saturated {
		t.Errorf("no next rule: %v", outcome(f, d))
	}
	d = set(compile(t, `rules: [ `+first+`, { name: cloud, route: { consider: [ { type: Provider } ] } } ]`)).Evaluate(&policy.Request{Model: "glm-5.3"}, f)
	if got := outcome(f, d); got != "bedrock databricks" || !cmp.Equal(d.Emptied, []string{"inference/p/idle"}) {
		t.Errorf("next rule: %q after %v", got, d.Emptied)
	}
}

func TestVerdicts(t *testing.T) {
	f := fleet()
	f.Endpoints[2].Unfit = "not ready"
	f.Endpoints[3].Load = load{queued: 5}
	d := set(compile(t, `rules: [ { name: r, route: { exclude: [ { name: long-queue, drop: { queuedPrompts: { greaterThan: 2 } } }, { name: no-bedrock, drop: { backend: { names: [ bedrock ] } } } ],
		select: [ { type: Local } ] } } ]`)).Evaluate(&policy.Request{Model: "glm-5.3"}, f)
	want := []policy.Verdict{{Cause: policy.NotConsidered}, {Cause: policy.NotConsidered}, {Cause: policy.Unfit}, {policy.TooBusy, "long-queue"}, {policy.Excluded, "no-bedrock"}, {Cause: policy.NotSelected}}
	if diff := cmp.Diff(want, d.Verdicts); diff != "" {
		t.Errorf("verdicts (-want +got):\n%s", diff)
	}
	if d.Action != policy.Saturated || d.Policy != "inference/p" || d.Rule != "r" {
		t.Errorf("got %v by %s %s", d.Action, d.Policy, d.Rule)
	}
}

func TestReach(t *testing.T) {
	s := set(compile(t, `rules: [
		{ name: a, matches: [ { model: glm-5.3, tag: complexity-low } ], route: { consider: [ { models: { names: [ qwen, glm-5.3 ] } } ] } },
		{ name: b, matches: [ { model: big } ], route: { exclude: [ { name: x, if: { tag: pii-detected }, drop: { backend: { type: Provider } } }, { name: y, drop: { queuedPrompts: { greaterThan: 1, window: 5m } } } ] } },
		{ name: c, matches: [ { model: cel, when: "request.tagged('x')" } ], reject: { reason: X } },
		{ name: d, matches: [ { qos: batch } ], route: { consider: [ { models: { names: [ small ] } } ] } } ]`))
	for model, want := range map[string][]string{"glm-5.3": {"qwen", "small"}, "other": {"small"}} {
		if diff := cmp.Diff(want, s.Models(model)); diff != "" {
			t.Errorf("models of %s (-want +got):\n%s", model, diff)
		}
	}
	for model, want := range map[string]bool{"glm-5.3": true, "big": true, "cel": true, "other": false} {
		if got := s.ReadsTags(model); got != want {
			t.Errorf("a request for %s reads tags: %v", model, got)
		}
	}
	if got := s.Windows(); !slices.Equal(got, []time.Duration{5 * time.Minute}) {
		t.Errorf("windows %v", got)
	}
}
