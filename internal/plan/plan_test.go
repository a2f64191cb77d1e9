package plan_test

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/kinference/kinference/api/v1alpha1"
	"github.com/kinference/kinference/internal/plan"
	"github.com/kinference/kinference/internal/policy"
	"github.com/kinference/kinference/internal/resources"
)

const text = `
apiVersion: kinference.buoyant.io/v1alpha1
kind: InferenceWorkerSet
metadata: { name: small, namespace: ns }
spec: { models: [ { name: small, aliases: [ any ] } ], endpoints: [ { name: a, address: a } ], accelerator: { class: l40s, count: 2, hourlyPrice: "1.50", currency: USD } }
---
apiVersion: kinference.buoyant.io/v1alpha1
kind: InferenceWorkerSet
metadata: { name: large, namespace: ns }
spec: { models: [ { name: large } ], endpoints: [ { name: a, address: b } ] }
---
apiVersion: kinference.buoyant.io/v1alpha1
kind: InferenceProvider
metadata: { name: cloud, namespace: ns }
spec:
  schema: OpenAICompatible
  endpoint: https://cloud.example.com
  models: [ { name: up, aliases: [ any ], price: { currency: USD, perMillion: { input: "2", output: "10" } } } ]
---
apiVersion: kinference.buoyant.io/v1alpha1
kind: InferencePolicy
metadata: { name: p, namespace: ns }
spec:
  rules:
    - name: bigger
      matches: [ { model: small, headers: [ { name: x-team, value: red } ] } ]
      route: { consider: [ { models: { names: [ small, large ] } } ], exclude: [ { name: x, drop: { queuedPrompts: { greaterThan: 2, window: 10s } } } ] }
---
apiVersion: kinference.buoyant.io/v1alpha1
kind: InferenceTenant
metadata: { name: org, namespace: ns }
spec: { qos: batch }
---
apiVersion: kinference.buoyant.io/v1alpha1
kind: InferenceTenant
metadata: { name: team, namespace: ns }
spec: { parentRef: { name: org } }
`

func catalog(t *testing.T) *resources.Catalog {
	t.Helper()
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "a.yaml"), []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	c, ps := resources.Load(dir)
	if c == nil {
		t.Fatal(ps)
	}
	return c
}

func TestPlan(t *testing.T) {
	p := plan.New(catalog(t))
	if p.Longest != 10*time.Second {
		t.Errorf("longest window %v", p.Longest)
	}
	for model, want := range map[string][]string{"small": {"ns/large", "ns/small"}, "large": {"ns/large"}, "any": {"ns/small", "ns/cloud"}, "up": {"ns/cloud"}} {
		m := p.Models[model]
		var got []string
		for i := range m.Targets {
			got = append(got, m.Targets[i].Name())
		}
		if !cmp.Equal(got, want) || m.Pool.Name != "ns/default" {
			t.Errorf("%s of %s goes to %v, want %v", model, m.Pool.Name, got, want)
		}
		if _, external := m.Considered(); external != (model == "any" || model == "up") {
			t.Errorf("%s external: %v", model, external)
		}
		if reads := len(m.Reads.Headers) > 0; reads != (model == "small") {
			t.Errorf("%s reads %v", model, m.Reads)
		}
	}
	pool := p.Models["any"].Pool
	if got := plan.ModelsOf(pool.Members); !cmp.Equal(got, []string{"any", "large", "small", "up"}) {
		t.Errorf("models %v", got)
	}
	if id := plan.ProviderID("ns/cloud"); id != "provider ns/cloud" {
		t.Error(id)
	}
	if name, ok := plan.ProviderName("provider ns/cloud"); !ok || name != "ns/cloud" {
		t.Error(name)
	}
	if _, ok := plan.ProviderName("ns.small.a/0"); ok {
		t.Error("a worker is a provider")
	}
}

func TestCost(t *testing.T) {
	c := catalog(t)
	if got := plan.ProviderCost(c.Providers[0].Models[0], 1000, 100); got != 0.003 {
		t.Errorf("provider %v", got)
	}
	for _, s := range c.Sets {
		// Two devices for 36 s of prefill and a quarter of 144 s of decoding.
		want := map[string]float64{"ns/small": 0.06, "ns/large": 0}[s.Name]
		if got := plan.WorkerCost(s, 36*time.Second, 1440*time.Millisecond, 3, 100); got != want {
			t.Errorf("%s: %v, want %v", s.Name, got, want)
		}
	}
	if plan.Output(0) != 256 || plan.Output(10) != 10 || plan.Output(1000) != 256 {
		t.Error("output")
	}
}

// Providers stand among workers where their prediction belongs, however the workers
// are sorted.
func TestRank(t *testing.T) {
	local, provider := &policy.Backend{Type: v1alpha1.BackendLocal}, &policy.Backend{Type: v1alpha1.BackendProvider}
	e := []policy.Endpoint{
		{Backend: provider, TTFT: 25}, {Backend: local, TTFT: 30}, {Backend: local, TTFT: 20}, {Backend: provider, TTFT: 5}, {Backend: local, TTFT: 21},
	}
	order := []int{3, 0, 1, 2, 4}
	plan.Rank(order, e, func(order []int) {
		if !cmp.Equal(order, []int{1, 2, 4}) {
			t.Errorf("workers %v", order)
		}
		copy(order, []int{4, 2, 1})
	})
	if !cmp.Equal(order, []int{3, 4, 2, 0, 1}) {
		t.Errorf("got %v", order)
	}
}

func TestComplete(t *testing.T) {
	c := catalog(t)
	pool := plan.New(c).Models["any"].Pool
	for _, x := range []struct {
		tenants []string
		qos     v1alpha1.QoS
		want    policy.Request
	}{
		{[]string{"team"}, "", policy.Request{Tenants: []string{"team", "org"}, QoS: "batch"}},
		{[]string{"ns/team"}, "deferrable", policy.Request{Tenants: []string{"team", "org"}, QoS: "deferrable"}},
		{[]string{"team", "other"}, "", policy.Request{Tenants: []string{"team", "other"}, QoS: "interactive"}},
		{nil, "", policy.Request{QoS: "interactive"}},
	} {
		q := policy.Request{Tenants: x.tenants, QoS: x.qos}
		plan.Complete(c, pool, &q)
		x.want.Endpoint = v1alpha1.EndpointChatCompletions
		if diff := cmp.Diff(q, x.want); diff != "" {
			t.Errorf("%v: %s", x.tenants, diff)
		}
	}
}
