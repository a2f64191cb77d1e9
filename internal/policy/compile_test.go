package policy_test

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/kinference/kinference/api/v1alpha1"
	"github.com/kinference/kinference/internal/policy"
)

// Each fault is named by its field, in words that say what to write.
func TestFaults(t *testing.T) {
	rule := func(inner string) string { return `rules: [ { name: r, ` + inner + ` } ]` }
	route := func(inner string) string { return rule(`route: { ` + inner + ` }`) }
	drop := func(inner string) string { return route(`exclude: [ { name: x, drop: { ` + inner + ` } } ]`) }
	match := func(inner string) string { return rule(`matches: [ { ` + inner + ` } ], reject: { reason: X }`) }
	for _, c := range []struct{ spec, field, message string }{
		{rule(`matches: []`), "spec.rules[0]", "exactly one of route and reject"},
		{rule(`route: {}, reject: { reason: X }`), "spec.rules[0]", "exactly one of route and reject"},
		{`rules: [ { route: {} } ]`, "spec.rules[0].name", "is required"},
		{`rules: [ { name: A_b, route: {} } ]`, "spec.rules[0].name", "lower-case"},
		{`rules: [ { name: a, reject: { reason: X } }, { name: a, route: {} } ]`, "spec.rules[1].name", "is used already"},
		{rule(`reject: { reason: too long }`), "spec.rules[0].reject.reason", "PascalCase"},
		{`targetRefs: [ { kind: Service, name: x } ]`, "spec.targetRefs[0].kind", "want InferencePool"},
		{`targetRefs: [ { kind: InferencePool } ]`, "spec.targetRefs[0].name", "is required"},
		{match(`qos: gold`), "spec.rules[0].matches[0].qos", "want interactive, batch, deferrable"},
		{match(`endpoint: Chat`), "spec.rules[0].matches[0].endpoint", "want ChatCompletions"},
		{match(`tenant: a, tenants: [ b ]`), "spec.rules[0].matches[0].tenants", "not both"},
		{match(`tenants: []`), "spec.rules[0].matches[0].tenants", "matches nobody"},
		{match(`tag: a, tags: { all: [ b ] }`), "spec.rules[0].matches[0].tags", "not both"},
		{match(`tag: "a*b"`), "spec.rules[0].matches[0].tag", "is no tag"},
		{match(`tags: {}`), "spec.rules[0].matches[0].tags", "is empty"},
		{match(`tags: { any: [ ok, "PII" ] }`), "spec.rules[0].matches[0].tags.any[1]", "is no tag"},
		{match(`promptTokens: {}`), "spec.rules[0].matches[0].promptTokens", "greaterThan"},
		{match(`promptTokens: { greaterThan: 10, lessThan: 11 }`), "spec.rules[0].matches[0].promptTokens.lessThan", "no number"},
		{match(`headers: [ { name: "a b", value: x } ]`), "spec.rules[0].matches[0].headers[0].name", "no header name"},
		{match(`headers: [ { name: Authorization, value: x } ]`), "spec.rules[0].matches[0].headers[0].name", "credentials"},
		{match(`when: "request.promt_tokens > 1"`), "spec.rules[0].matches[0].when", "undefined field 'promt_tokens'"},
		{match(`when: "request.model"`), "spec.rules[0].matches[0].when", "want bool"},
		{match(`when: "request.tools.all(a, request.tags.all(b, request.tenants.all(c, a == b && b == c)))"`), "spec.rules[0].matches[0].when", "may cost"},
		{match(`when: "("`), "spec.rules[0].matches[0].when", "CEL at column"},
		{route(`objective: fast`), "spec.rules[0].route.objective", "want ttft"},
		{route(`onEmpty: Wait`), "spec.rules[0].route.onEmpty", "want Reject, Continue, Queue"},
		{route(`queue: { timeout: 5s }`), "spec.rules[0].route.queue", "needs onEmpty: Queue"},
		{route(`onEmpty: Queue, queue: { timeout: 1h }`), "spec.rules[0].route.queue.timeout", "out of range"},
		{route(`consider: [ {} ]`), "spec.rules[0].route.consider[0]", "say what to consider"},
		{route(`consider: [ { type: Remote } ]`), "spec.rules[0].route.consider[0].type", "want Local, Provider"},
		{route(`consider: [ { type: Provider, workerSets: { names: [ a ] } } ]`), "spec.rules[0].route.consider[0].workerSets", "type Local"},
		{route(`consider: [ { models: { names: [] } } ]`), "spec.rules[0].route.consider[0].models.names", "is empty"},
		{route(`consider: [ { models: { names: [ a, a ] } } ]`), "spec.rules[0].route.consider[0].models.names[1]", "named twice"},
		{drop(``), "spec.rules[0].route.exclude[0].drop", "say what to drop"},
		{drop(`backend: {}`), "spec.rules[0].route.exclude[0].drop.backend", "is empty"},
		{drop(`queuedPrompts: { greaterThan: -1 }`), "spec.rules[0].route.exclude[0].drop.queuedPrompts.greaterThan", "0 or more"},
		{drop(`queuedPrompts: { greaterThan: 1, window: 1h }`), "spec.rules[0].route.exclude[0].drop.queuedPrompts.window", "out of range"},
		{drop(`queuedPrompts: { greaterThan: 1, window: soon }`), "spec.rules[0].route.exclude[0].drop.queuedPrompts.window", "is not a duration"},
		{drop(`queuedPrompts: { greaterThan: 2, until: 3 }`), "spec.rules[0].route.exclude[0].drop.queuedPrompts.until", "from 0 to greaterThan, which is 2"},
		{drop(`kvCacheUsage: { greaterThan: 0.7, until: -1 }`), "spec.rules[0].route.exclude[0].drop.kvCacheUsage.until", "from 0 to greaterThan"},
		{drop(`kvCacheUsage: { greaterThan: 70 }`), "spec.rules[0].route.exclude[0].drop.kvCacheUsage.greaterThan", "share from 0 to 1"},
		{drop(`predictedTTFT: { greaterThan: "" }`), "spec.rules[0].route.exclude[0].drop.predictedTTFT.greaterThan", "is required"},
		{drop(`backend: { type: Provider }, queuedPrompts: { greaterThan: 1 }`), "spec.rules[0].route.exclude[0].drop", "providers show no load"},
		{route(`select: [ { minimize: PredictedTTFT, order: [ a ] } ]`), "spec.rules[0].route.select[0]", "at most one"},
		{route(`select: [ { minimize: Latency } ]`), "spec.rules[0].route.select[0].minimize", "want PredictedTTFT"},
		{route(`select: [ { order: [] } ]`), "spec.rules[0].route.select[0].order", "is empty"},
		{route(`select: [ { weights: [ { name: a, weight: 0 } ] } ]`), "spec.rules[0].route.select[0].weights", "add up to 0"},
		{route(`select: [ { weights: [ { name: a, weight: 1 }, { name: a, weight: 2 } ] } ]`), "spec.rules[0].route.select[0].weights[1].name", "named twice"},
		{route(`retry: { attempts: 0 }`), "spec.rules[0].route.retry.attempts", "1 to 8"},
		{route(`retry: { attempts: 2, retryOn: [ "4xx" ] }`), "spec.rules[0].route.retry.retryOn[0]", "want ConnectFailure"},
		{route(`retry: { attempts: 2, hedge: {} }`), "spec.rules[0].route.retry.hedge.after", "is required"},
		{route(`retry: { attempts: 2, hedge: { after: 1ms } }`), "spec.rules[0].route.retry.hedge.after", "out of range"},
		{route(`retry: { attempts: 2, hedge: { after: 1s, percentile: 30 } }`), "spec.rules[0].route.retry.hedge.percentile", "50 to 99"},
		{route(`retry: { attempts: 1, hedge: { after: 1s } }`), "spec.rules[0].route.retry.hedge", "2 or more"},
		{`customTags: [ { name: a, any: [] } ]`, "spec.customTags[0].any", "is required"},
		{`customTags: [ { name: a, any: [ { keywords: [ x ], regex: y } ] } ]`, "spec.customTags[0].any[0]", "one of them"},
		{`customTags: [ { name: a, any: [ { regex: "(" } ] } ]`, "spec.customTags[0].any[0].regex", "missing closing )"},
		{`customTags: [ { name: a, any: [ { when: "part.length > 1", regex: y } ] } ]`, "spec.customTags[0].any[0]", "one of them"},
		{`customTags: [ { name: a, any: [ { when: "part.lenght > 1" } ] } ]`, "spec.customTags[0].any[0].when", "did you mean 'length'?"},
		{`customTags: [ { name: a, any: [ { when: "tags.a.found" } ] } ]`, "spec.customTags[0].any[0].when", "reads the tag \"a\" itself"},
		{`customTags: [ { name: a, any: [ { when: "part.text.matches('((a{1,9}b){1,9}c){1,9}')" } ] } ]`, "spec.customTags[0].any[0].when", "may cost"},
		{`customTags: [ { name: a, any: [ { when: "part.length > 1", validator: Luhn } ] } ]`, "spec.customTags[0].any[0].validator", "there is none"},
		{`customTags: [ { name: a, any: [ { when: "part.length > 1", wholeWord: true } ] } ]`, "spec.customTags[0].any[0].wholeWord", "for keywords"},
		{`customTags: [ { name: a, any: [ { keywords: [ "" ] } ] } ]`, "spec.customTags[0].any[0].keywords", "found everywhere"},
		{`limits: [ { name: a, requests: 1, window: 1m, matches: [ { qos: gold } ] } ]`, "spec.limits[0].matches[0].qos", "want interactive"},
		{`onUnclassified: { assumePresent: [ "Pii" ] }`, "spec.onUnclassified.assumePresent[0]", "is no tag"},
	} {
		p, faults := policy.Compile(spec(t, c.spec))
		if p != nil || len(faults) != 1 {
			t.Errorf("%s: %d faults, want one: %v", c.spec, len(faults), faults)
			continue
		}
		if f := faults[0]; f.Field != c.field || !strings.Contains(f.Message, c.message) {
			t.Errorf("%s:\n got %s: %s\nwant %s: …%s…", c.spec, f.Field, f.Message, c.field, c.message)
		}
	}
}

// What CEL says of an expression that it does not understand, in words for the
// author of the policy.
func TestCELMessages(t *testing.T) {
	for expression, want := range map[string]string{
		"(":                                    "CEL at column 2: the expression ends too early",
		"request.model ==":                     "CEL at column 17: the expression ends too early",
		"request.model in ['a', 'b'":           "CEL at column 27: the expression ends too early, want ']', ','",
		"request.model = 'x'":                  "CEL at column 15: unexpected '=', want ==",
		"request.stream &&& true":              "CEL at column 18: unexpected '&'",
		"request.stream and true":              "CEL at column 16: unexpected 'and', want &&",
		"request.stream or true":               "CEL at column 16: unexpected 'or', want ||",
		"request.[":                            "CEL at column 9: unexpected '.['",
		"\"abc":                                "CEL at column 1: unexpected '\"abc'",
		"request.model == 5":                   "CEL at column 15: '==' cannot be applied to (string, int)",
		"size(request) > 1":                    "CEL at column 5: 'size' cannot be applied to (kinference.Request)",
		"request.promt_tokens > 1":             "CEL at column 8: undefined field 'promt_tokens', did you mean 'prompt_tokens'?",
		"request.temperature > 1":              "CEL at column 8: undefined field 'temperature': `request` has claims, endpoint, headers, id, max_tokens, model, prompt_tokens, qos, stream, tags, tenant, tenants, tools",
		"req.model == 'x'":                     "CEL at column 1: undeclared reference to 'req': there is only `request`",
		"if request.stream":                    "CEL at column 1: reserved identifier: if",
		"request.stream ? request.model : 'x'": "CEL yields string, want bool",
		"request.model == '" + strings.Repeat("x", 200): "CEL at column 18: unexpected ''" + strings.Repeat("x", 63) + "…'",
	} {
		text, err := json.Marshal(expression)
		if err != nil {
			t.Fatal(err)
		}
		_, faults := policy.Compile(spec(t, `rules: [ { name: r, matches: [ { when: `+string(text)+` } ], reject: { reason: X } } ]`))
		if len(faults) != 1 || faults[0].Message != want {
			t.Errorf("%s:\n got %v\nwant %s", expression, faults, want)
		}
	}
}

func TestLint(t *testing.T) {
	const keep = `{ name: keep, matches: [ { model: glm-5.3 } ], route: { exclude: [ { name: pii, if: { tag: pii-detected }, drop: { backend: { type: Provider } } } ], select: [ { type: Provider } ] } }`
	known := policy.Known{
		Pools: map[string]bool{"pool": true}, WorkerSets: map[string]bool{"glm-worker": true}, Providers: map[string]bool{"bedrock": true},
		Tenants: map[string]bool{"search": true}, Models: map[string]bool{"glm-5.3": true, "qwen": true},
	}
	for _, c := range []struct {
		name, spec string
		want       []string // field: a part of the message
	}{
		{"nothing", `rules: [ ` + keep + ` ]`, nil},
		{"dangling", `{ targetRefs: [ { kind: InferencePool, name: pol } ], rules: [ { name: a, matches: [ { model: glm-5.4, tenant: serach } ], route: {
			consider: [ { workerSets: { names: [ nope ] } } ], select: [ { order: [ bedrok ] }, { weights: [ { name: glm-worker, weight: 1 }, { name: x, weight: 1 } ] } ] } } ] }`, []string{
			`spec.targetRefs[0].name: "pool"`, `spec.rules[0].matches[0].model: "glm-5.3"`, `spec.rules[0].matches[0].tenant: "search"`,
			`spec.rules[0].route.consider[0].workerSets.names[0]: no InferenceWorkerSet "nope"`, `spec.rules[0].route.select[0].order[0]: "bedrock"`, `spec.rules[0].route.select[1].weights[1].name: "x"`,
		}},
		{"tags that nobody gives", `{ customTags: [ { name: falcon, any: [ { keywords: [ falcon ] } ] } ], rules: [ { name: a, matches: [ { tag: complexity-lo }, { tags: { any: [ falcon, "pii-*", owl ] } } ], reject: { reason: X } } ] }`, []string{
			`spec.rules[0].matches[0].tag: "complexity-low"`, `spec.rules[0].matches[1].tags.any[2]: customTags`,
		}},
		{"tags that a custom tag never sees", `customTags: [ { name: own, any: [ { when: "part.length > 9" } ] }, { name: a, any: [ { when: 'tags["pii-email"].found || tags.own.found || tags["length-long"].found || tags.wren.found' } ] } ]`, []string{
			`spec.customTags[1].any[0].when: has a when itself`, `spec.customTags[1].any[0].when: customTags`,
		}},
		{"unreachable", `rules: [ { name: all, route: { select: [ { type: Local } ] } }, { name: b, matches: [ { model: qwen } ], reject: { reason: X } } ]`, []string{`spec.rules[1]: matches every request`}},
		{"not after Continue", `rules: [ { name: all, route: { onEmpty: Continue, select: [ { type: Local } ] } }, { name: b, matches: [ { model: qwen } ], reject: { reason: X } } ]`, nil},
		{"shadowed", `rules: [ { name: a, matches: [ { model: qwen }, { promptTokens: { greaterThan: 10 } } ], reject: { reason: X } },
			{ name: b, matches: [ { model: qwen, qos: batch }, { promptTokens: { greaterThan: 20, lessThan: 30 } } ], reject: { reason: X } },
			{ name: c, matches: [ { model: qwen }, { qos: batch } ], reject: { reason: X } } ]`, []string{`spec.rules[1]: matches all of its requests`}},
		{"PII leaks by another rule", `rules: [ { name: leak, matches: [ { model: qwen } ], route: { select: [ { type: Provider } ] } }, { name: fine, matches: [ { model: qwen, qos: batch, tags: { none: [ "pii-*" ] } } ], route: { onEmpty: Continue, select: [ { type: Provider } ] } }, ` + keep + ` ]`,
			[]string{`spec.rules[1]: matches all`, `spec.rules[0].route: keeps such prompts local`}},
	} {
		t.Run(c.name, func(t *testing.T) {
			in := spec(t, c.spec)
			p, faults := policy.Compile(in)
			if p == nil {
				t.Fatal(faults)
			}
			got := policy.Lint([]*policy.Policy{p}, map[*policy.Policy]*v1alpha1.InferencePolicySpec{p: &in.Spec}, known)
			var lines []string
			for _, f := range got {
				lines = append(lines, f.Field+": "+f.Message)
			}
			ok := len(got) == len(c.want)
			for i := range min(len(got), len(c.want)) {
				field, part, _ := strings.Cut(c.want[i], ": ")
				ok = ok && got[i].Field == field && strings.Contains(got[i].Message, part)
			}
			if !ok {
				t.Errorf("got\n  %s\nwant\n  %s", strings.Join(lines, "\n  "), strings.Join(c.want, "\n  "))
			}
		})
	}
}

// Expressions come from outside: whatever they are, compiling and evaluating
// them ends, and quickly.
func FuzzWhen(f *testing.F) {
	for _, s := range []string{
		`request.prompt_tokens < 20000 && !has(request.tools)`, `request.claims.groups.exists(g, g.startsWith("a"))`, `request.tagged("pii-*")`,
		`request.headers["x"] == "y" ? true : false`, `[1,2,3].map(x, x * 2).all(y, y > 0)`, `"a" + "b" == request.model`, `request == request`, `{"a": request.model}["a"] == ""`,
	} {
		f.Add(s)
	}
	r := &policy.Request{Model: "m", Tenants: []string{"t"}, Claims: map[string]any{"groups": []any{"a", 1.5, nil}}, Tags: policy.Tags{Present: []string{"x"}}}
	f.Fuzz(func(t *testing.T, text string) {
		if len(text) > 4096 {
			return
		}
		in := &v1alpha1.InferencePolicy{}
		in.Spec.Rules = []v1alpha1.PolicyRule{{Name: "r", Matches: []v1alpha1.RequestMatch{{When: text}}, Reject: &v1alpha1.RejectAction{Reason: "X"}}}
		p, faults := policy.Compile(in)
		if (p == nil) != slices.ContainsFunc(faults, func(f policy.Fault) bool { return !f.Warning }) {
			t.Fatalf("policy %v with faults %v", p, faults)
		}
		if p != nil {
			policy.NewSet("pool", []*policy.Policy{p}).Evaluate(r, &policy.Fleet{})
		}
	})
}

// Rules that other ones leave no request, found without a look at each pair.
func TestShadowed(t *testing.T) {
	reject := func(name, match string) string {
		return `{ name: ` + name + `, matches: [ ` + match + ` ], reject: { reason: X } }`
	}
	for _, c := range []struct{ rules, want string }{
		{reject("a", `{ model: m }`) + `, ` + reject("b", `{ model: m, tenant: t }`), "b by a"},
		{reject("a", `{ tenant: t }`) + `, ` + reject("b", `{ model: m, tenant: t }`), "b by a"},
		{reject("a", `{ tenants: [ s, t ] }`) + `, ` + reject("b", `{ tenant: t }`), "b by a"},
		{reject("a", `{ tenant: t }`) + `, ` + reject("b", `{ tenants: [ s, t ] }`), ""},
		{reject("a", `{ model: m }, { model: n }`) + `, ` + reject("b", `{ model: n }, { model: m, qos: batch }`), "b by a"},
		{reject("a", `{ model: m }`) + `, ` + reject("b", `{ model: m }, { model: n }`), ""},
		{reject("a", `{ qos: batch }`) + `, ` + reject("b", `{}`) + `, ` + reject("c", `{ model: m, tenant: t }`), "c by b"},
		{reject("a", `{ model: m, tenant: t }`) + `, ` + reject("b", `{ tenant: t }`) + `, ` + reject("c", `{ model: m, tenant: t, qos: batch }`), "c by a"},
		{`{ name: a, route: { onEmpty: Continue } }, ` + reject("b", `{ model: m }`), ""},
	} {
		p := compile(t, `rules: [ `+c.rules+` ]`)
		got := ""
		for _, f := range policy.Lint([]*policy.Policy{p}, nil, policy.Known{}) {
			parts := strings.Split(f.Message, `"`)
			got += parts[1] + " by " + parts[3]
		}
		if got != c.want {
			t.Errorf("%s: got %q, want %q", c.rules, got, c.want)
		}
	}
}

// BenchmarkLint is 2,000 policies of one namespace, each with two rules of which
// one keeps PII local and one forgets to, and most come after another one like
// them. go test -bench Lint ./internal/policy
func BenchmarkLint(b *testing.B) {
	var all []*policy.Policy
	for i := range 2000 {
		p := spec(b, fmt.Sprintf(`{ targetRefs: [ { kind: InferencePool, name: pool-%d } ], rules: [
			{ name: keeps, matches: [ { model: m%d, tag: complexity-low, tenant: t%d } ], route: { exclude: [ { name: pii, if: { tag: pii-detected }, drop: { backend: { type: Provider } } } ], select: [ { type: Provider } ] } },
			{ name: rest, matches: [ { tenant: t%d } ], route: { select: [ { type: Provider } ] } } ] }`, i%5, i%50, i%100, i))
		p.Name = fmt.Sprint("p", i)
		compiled, faults := policy.Compile(p)
		if compiled == nil {
			b.Fatal(faults)
		}
		all = append(all, compiled)
	}
	for b.Loop() {
		if n := len(policy.Lint(all, nil, policy.Known{})); n != 3900 {
			b.Fatalf("%d findings", n)
		}
	}
}
