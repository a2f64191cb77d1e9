package catalog

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/testing/protocmp"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/kinference/kinference/internal/resources"
	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
)

const everything = `
apiVersion: kinference.buoyant.io/v1alpha1
kind: InferenceWorkerSet
metadata: { name: small, namespace: a }
spec: { endpoints: [ { name: e, address: "127.0.0.1:9" } ], models: [ { name: m, aliases: [ both ] } ] }
---
apiVersion: kinference.buoyant.io/v1alpha1
kind: InferenceWorkerSet
metadata: { name: large, namespace: a }
spec: { endpoints: [ { name: f, address: "127.0.0.1:9" } ], models: [ { name: big, aliases: [ both ] } ], accelerator: { class: H100 }, maxBatchedTokens: 4096 }
---
apiVersion: kinference.buoyant.io/v1alpha1
kind: InferencePool
metadata: { name: a-small, namespace: a }
spec: { destinations: [ { kind: InferenceWorkerSet, name: small } ] }
---
apiVersion: kinference.buoyant.io/v1alpha1
kind: InferencePool
metadata: { name: b-large, namespace: a }
spec: { destinations: [ { kind: InferenceWorkerSet, name: large } ] }
---
apiVersion: kinference.buoyant.io/v1alpha1
kind: GatewayBackend
metadata: { name: public, namespace: a }
spec:
  hostnames: [ "*.example.com" ]
  pathPrefix: /llm
  poolRef: { name: b-large }
  authentication:
    apiKeys: {}
    jwt: [ { issuer: https://idp.example.com, audiences: [ kinference ], jwksURI: https://idp.example.com/jwks, tenantClaim: org } ]
    serviceAccounts: {}
    anonymous: { tenant: team }
  defaultQos: batch
  limits: { body: 1Mi, headers: 8Ki }
  timeouts: { idle: 5s, total: 1m }
---
apiVersion: kinference.buoyant.io/v1alpha1
kind: InferenceTenant
metadata: { name: acme, namespace: a }
spec: { qos: batch, costCenter: "1", maxTokens: { default: 500, maximum: 1000 } }
---
apiVersion: kinference.buoyant.io/v1alpha1
kind: InferenceTenant
metadata: { name: team, namespace: a }
spec:
  parentRef: { name: acme }
  weight: 2
  maxTokens: { maximum: 4000 }
  cache: { scope: "Shared:x" }
  identities:
    - apiKeySecretRef: { name: keys }
    - claim: { issuer: https://idp.example.com, name: org, value: search }
    - serviceAccount: { namespace: b, name: frontend }
  limits:
    - { name: tpm, per: [ Tenant, Model ], tokens: { total: 100, weights: { cachedInput: 0.1, output: 3 } }, window: 1m, onUnavailable: Deny }
    - { name: out, tokens: { output: 0 }, window: 1h, burst: 2h }
    - { name: streams, per: [ Key ], concurrency: 16, shadow: true }
    - { name: budget, per: [ User ], cost: { amount: "2000.1234567", currency: USD }, calendar: { period: Month, timeZone: Europe/Berlin } }
    - { name: gpu, gpuSeconds: 36000, calendar: { period: Day } }
    - { name: rpm, requests: 60, window: 1m, onUnavailable: Allow }
---
apiVersion: v1
kind: Secret
metadata: { name: keys, namespace: a }
stringData:
  abcdefghijkl: '{"sha256":"0000000000000000000000000000000000000000000000000000000000000001","user":"u","expires":"2027-01-01T00:00:00Z"}'
  abcdefghijkm: '{"sha256":"0000000000000000000000000000000000000000000000000000000000000002","revoked":"2026-01-01T00:00:00Z"}'
---
apiVersion: kinference.buoyant.io/v1alpha1
kind: InferencePolicy
metadata: { name: p, namespace: a }
spec:
  targetRefs: [ { kind: InferencePool, name: b-large } ]
  dryRun: true
  limits: [ { name: long, requests: 1, window: 1s, matches: [ { model: big, promptTokens: { greaterThan: 10 } } ] } ]
`

func publish(t *testing.T, yaml string) *routerv1.Catalog {
	t.Helper()
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "a.yaml"), []byte(yaml), 0o600); err != nil {
		t.Fatal(err)
	}
	c, problems := resources.Load(dir)
	if c == nil {
		t.Fatal(problems)
	}
	return NewPublisher().Publish(c, states(16), nil).Message.Catalog
}

// All that the resources say of who may what is in the message, with inherited
// values and defaults.
func TestAccess(t *testing.T) {
	got := publish(t, everything)
	sum := func(last byte) []byte { b := make([]byte, 32); b[31] = last; return b }
	const tenant, model = routerv1.LimitScope_LIMIT_SCOPE_TENANT, routerv1.LimitScope_LIMIT_SCOPE_MODEL
	local, deny, allow := routerv1.OnUnavailable_ON_UNAVAILABLE_LOCAL, routerv1.OnUnavailable_ON_UNAVAILABLE_DENY, routerv1.OnUnavailable_ON_UNAVAILABLE_ALLOW
	want := &routerv1.Catalog{
		Guarded: true,
		Backends: []*routerv1.Backend{{
			Name: "a/public", Hostnames: []string{"*.example.com"}, PathPrefix: "/llm", Pool: "a/b-large", ApiKeys: true,
			Jwt:                    []*routerv1.JwtIssuer{{Issuer: "https://idp.example.com", Audiences: []string{"kinference"}, JwksUri: "https://idp.example.com/jwks", TenantClaim: "org"}},
			ServiceAccountAudience: "kinference", AnonymousTenant: "a/team", DefaultQos: "batch", MaxBody: 1 << 20, MaxHeader: 8 << 10,
			IdleTimeout: durationpb.New(5 * time.Second), TotalTimeout: durationpb.New(time.Minute),
		}},
		Tenants: []*routerv1.Tenant{
			{Name: "a/acme", Qos: "batch", Weight: 1, CostCenter: "1", DefaultMaxTokens: 500, MaximumMaxTokens: 1000, CacheScope: "Tenant"},
			{
				Name: "a/team", Parent: "a/acme", Qos: "batch", Weight: 2, CostCenter: "1", DefaultMaxTokens: 500, MaximumMaxTokens: 1000, CacheScope: "Shared:x",
				Keys: []*routerv1.Key{
					{Id: "abcdefghijkl", Sha256: sum(1), User: "u", ExpiresUnix: time.Date(2027, 1, 1, 0, 0, 0, 0, time.UTC).Unix()},
					{Id: "abcdefghijkm", Sha256: sum(2), Revoked: true},
				},
				Claims:          []*routerv1.ClaimIdentity{{Issuer: "https://idp.example.com", Name: "org", Value: "search"}},
				ServiceAccounts: []string{"b/frontend"},
				Limits: []*routerv1.Limit{
					{Name: "tpm", Per: []routerv1.LimitScope{tenant, model}, Window: durationpb.New(time.Minute), Burst: durationpb.New(time.Minute), OnUnavailable: deny,
						Quantity: &routerv1.Limit_Tokens{Tokens: &routerv1.TokenLimit{Sort: routerv1.TokenSort_TOKEN_SORT_TOTAL, Amount: 100, InputMilli: 1000, CachedInputMilli: 100, OutputMilli: 3000}}},
					{Name: "out", Per: []routerv1.LimitScope{tenant}, Window: durationpb.New(time.Hour), Burst: durationpb.New(2 * time.Hour), OnUnavailable: local,
						Quantity: &routerv1.Limit_Tokens{Tokens: &routerv1.TokenLimit{Sort: routerv1.TokenSort_TOKEN_SORT_OUTPUT}}},
					{Name: "streams", Per: []routerv1.LimitScope{routerv1.LimitScope_LIMIT_SCOPE_KEY}, Shadow: true, OnUnavailable: local, Quantity: &routerv1.Limit_Concurrency{Concurrency: 16}},
					{Name: "budget", Per: []routerv1.LimitScope{routerv1.LimitScope_LIMIT_SCOPE_USER}, OnUnavailable: local,
						Calendar: &routerv1.Calendar{Period: routerv1.CalendarPeriod_CALENDAR_PERIOD_MONTH, TimeZone: "Europe/Berlin"},
						Quantity: &routerv1.Limit_Cost{Cost: &routerv1.CostLimit{AmountMicros: 2000123456, Currency: "USD"}}},
					{Name: "gpu", Per: []routerv1.LimitScope{tenant}, OnUnavailable: local, Quantity: &routerv1.Limit_GpuSeconds{GpuSeconds: 36000},
						Calendar: &routerv1.Calendar{Period: routerv1.CalendarPeriod_CALENDAR_PERIOD_DAY, TimeZone: "UTC"}},
					{Name: "rpm", Per: []routerv1.LimitScope{tenant}, Window: durationpb.New(time.Minute), Burst: durationpb.New(time.Minute), OnUnavailable: allow,
						Quantity: &routerv1.Limit_Requests{Requests: 60}},
				},
			},
		},
		LimitPolicies: []*routerv1.LimitPolicy{{
			Name: "a/p", Pools: []string{"a/b-large"}, DryRun: true,
			Limits: []*routerv1.Limit{{Name: "long", Per: []routerv1.LimitScope{tenant}, OnUnavailable: local, Quantity: &routerv1.Limit_Requests{Requests: 1},
				Window: durationpb.New(time.Second), Burst: durationpb.New(time.Second)}},
		}},
		WorkerSets: []*routerv1.WorkerSet{{Name: "a/large", Accelerator: "h100", MaxBatchedTokens: 4096}, {Name: "a/small"}},
	}
	if len(got.LimitPolicies) == 1 && !strings.Contains(got.LimitPolicies[0].SpecJson, `"matches":[{"model":"big","promptTokens":{"greaterThan":10}}]`) {
		t.Errorf("spec %s", got.LimitPolicies[0].SpecJson)
	}
	ignore := protocmp.IgnoreFields(&routerv1.Catalog{}, "version", "models", "profiles", "workers", "epochs", "pools")
	if diff := cmp.Diff(want, got, protocmp.Transform(), ignore, protocmp.IgnoreFields(&routerv1.LimitPolicy{}, "spec_json")); diff != "" {
		t.Errorf("catalog (-want +got):\n%s", diff)
	}
}

// A backend's pool has its own models; a name that two pools offer is what its
// own pool makes of it.
func TestPools(t *testing.T) {
	got := publish(t, everything)
	if len(got.Pools) != 1 || got.Pools[0].Name != "a/b-large" {
		t.Fatalf("pools %v", got.Pools)
	}
	profiles := func(models []*routerv1.Model) map[string]string {
		out := map[string]string{}
		for _, m := range models {
			out[m.Name] = strings.Join(m.Profiles, " ")
		}
		return out
	}
	if diff := cmp.Diff(map[string]string{"both": "a/large/big", "big": "a/large/big"}, profiles(got.Pools[0].Models)); diff != "" {
		t.Errorf("models of the pool (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(map[string]string{"both": "a/small/m", "m": "a/small/m", "big": "a/large/big"}, profiles(got.Models)); diff != "" {
		t.Errorf("models of all (-want +got):\n%s", diff)
	}
}
