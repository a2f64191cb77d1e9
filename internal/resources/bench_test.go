package resources_test

import (
	"fmt"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kinference/kinference/internal/resources"
)

// perNamespace is the number of resources that installation makes in each.
const perNamespace = 50

// installation writes a folder of resources of all kinds, with the shares of a
// large installation.
func installation(t testing.TB, namespaces int) string {
	t.Helper()
	dir, total := t.TempDir(), 0
	for ns := range namespaces {
		var b strings.Builder
		add := func(kind, name, spec string) {
			total++
			fmt.Fprintf(&b, "---\napiVersion: kinference.buoyant.io/v1alpha1\nkind: %s\nmetadata: { name: %s, namespace: team-%d }\nspec:\n  %s\n",
				kind, name, ns, strings.ReplaceAll(strings.TrimSpace(spec), "\n", "\n  "))
		}
		for i := range 10 {
			add("InferenceWorkerSet", fmt.Sprint("set-", i), fmt.Sprintf(`
endpoints:
  - { name: a, address: "10.%d.%d.1:8000", kvEvents: "tcp://10.%d.%d.1:5557" }
  - { name: b, address: "10.%d.%d.2:8000", kvEvents: "tcp://10.%d.%d.2:5557" }
models: [ { name: org/model-%d-%d, aliases: [ standard-%d, m%d ], loras: [ { name: lora-%d } ] } ]
accelerator: { class: l40s, count: 2, hourlyPrice: "1.10", currency: USD }`, ns, i, ns, i, ns, i, ns, i, ns, i, ns, i, i))
		}
		for i := range 5 {
			add("InferenceProvider", fmt.Sprint("provider-", i), fmt.Sprintf(`
schema: OpenAICompatible
endpoint: https://p%d.example.com/v1
credentials: { secretRef: { name: key-%d } }
models: [ { name: cloud-%d, aliases: [ standard-%d ], price: { currency: USD, perMillion: { input: "0.60", output: "2.20" } } } ]`, i, i, i, ns))
			add("InferencePool", fmt.Sprint("pool-", i), fmt.Sprintf(`
destinations:
  - { kind: InferenceWorkerSet, name: set-%d }
  - { kind: InferenceWorkerSet, name: set-%d }
  - { kind: InferenceProvider, name: provider-%d }
objectives: [ { name: ttft, match: { qos: [ interactive ] }, indicator: TTFT, threshold: 500ms, target: "99", window: 30d } ]`, 2*i, 2*i+1, i))
		}
		for i := range 20 {
			add("InferenceTenant", fmt.Sprint("tenant-", i), fmt.Sprintf(`
parentRef: { name: tenant-%d }
identities: [ { apiKeySecretRef: { name: keys-%d } }, { claim: { issuer: "https://idp.example.com", name: org, value: "t%d" } } ]
limits:
  - { name: tokens-per-minute, tokens: { total: %d, weights: { output: 3 } }, window: 1m }
  - { name: streams, per: [ Key ], concurrency: 16 }`, i/4, i, i, 1000*(20-i)))
			fmt.Fprintf(&b, "---\napiVersion: v1\nkind: Secret\nmetadata: { name: keys-%d, namespace: team-%d }\nstringData: { key%09d: '{\"sha256\":\"%064x\"}' }\n", i, ns, i, i)
			if i == 0 {
				text := strings.Replace(b.String(), "  parentRef: { name: tenant-0 }\n", "", 1)
				b.Reset()
				b.WriteString(text)
			}
		}
		for i := range 2 {
			add("GatewayBackend", fmt.Sprint("public-", i), fmt.Sprintf("hostnames: [ t%d-%d.example.com ]\npoolRef: { name: pool-%d }\n"+
				"authentication: { apiKeys: {}, jwt: [ { issuer: https://idp.example.com, audiences: [ a ], jwksURI: https://idp.example.com/jwks, tenantClaim: org } ] }\n", ns, i, i))
		}
		for i := range 8 {
			add("InferencePolicy", fmt.Sprint("policy-", i), fmt.Sprintf(`
targetRefs: [ { kind: InferencePool, name: pool-%d } ]
rules:
  - name: simple
    matches: [ { model: standard-%d, tag: complexity-low, tenant: tenant-%d, when: "request.prompt_tokens < 20000" } ]
    route:
      consider: [ { models: { names: [ m%d ] } } ]
      select: [ { minimize: PredictedTTFT } ]
  - name: rest
    matches: [ { tenant: tenant-%d } ]
    route:
      exclude: [ { name: busy, drop: { backend: { type: Local }, queuedPrompts: { greaterThan: 2 } } } ]
      select: [ { type: Local, minimize: PredictedTTFT }, { type: Provider, order: [ provider-%d ] } ]`, i%5, ns, i, i, i, i%5))
		}
		write(t, filepath.Join(dir, fmt.Sprintf("team-%d.yaml", ns)), b.String())
	}
	if total != namespaces*perNamespace {
		t.Fatalf("%d resources", total)
	}
	return dir
}

// BenchmarkLoad reads, checks and compiles 10,000 resources: less than 2 s. The
// CPU time says so on a busy machine too.
//
//	go test ./internal/resources -run xxx -bench Load -count 10
func BenchmarkLoad(b *testing.B) {
	dir := installation(b, 10_000/perNamespace)
	b.ReportAllocs()
	before := cpu(b)
	for b.Loop() {
		if c, problems := resources.Load(dir); c == nil {
			b.Fatal(problems)
		}
	}
	b.ReportMetric((cpu(b)-before).Seconds()/float64(b.N), "cpu-s/op")
}

func cpu(t testing.TB) time.Duration {
	t.Helper()
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		t.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// The folder of the benchmark is good.
func TestInstallation(t *testing.T) {
	c, problems := resources.Load(installation(t, 4))
	if c == nil || len(c.Sets) != 40 || len(c.Providers) != 20 || len(c.Pools) != 20 || len(c.Tenants) != 80 || len(c.Backends) != 8 || len(c.Policies) != 32 {
		t.Fatal(problems)
	}
	for _, p := range problems {
		if !strings.Contains(p.Message, "no effect yet") && !strings.Contains(p.Message, "not sent yet") {
			t.Fatalf("%d problems, such as %v", len(problems), p)
		}
	}
}
