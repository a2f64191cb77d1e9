package router

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.opentelemetry.io/otel/metric/noop"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/kinference/kinference/internal/kvhash"
	"github.com/kinference/kinference/internal/replay"
	"github.com/kinference/kinference/internal/resources"
	"github.com/kinference/kinference/internal/schedule"
	adminv1 "github.com/kinference/kinference/proto/gen/kinference/admin/v1"
	kvtrackerv1 "github.com/kinference/kinference/proto/gen/kinference/kvtracker/v1"
	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
	"github.com/kinference/kinference/services/router/internal/affinity"
	"github.com/kinference/kinference/services/router/internal/catalog"
	"github.com/kinference/kinference/services/router/internal/decisions"
	"github.com/kinference/kinference/services/router/internal/fleet"
	"github.com/kinference/kinference/services/router/internal/parity"
)

// load compiles resources.
func load(t testing.TB, files ...string) *resources.Catalog {
	t.Helper()
	dir := t.TempDir()
	for i, text := range files {
		if err := os.WriteFile(filepath.Join(dir, fmt.Sprint(i, ".yaml")), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	c, ps := resources.Load(dir)
	if c == nil {
		t.Fatal(ps)
	}
	return c
}

// newServer is a router over a catalog that listens nowhere.
func newServer(t testing.TB, c *resources.Catalog, match *kvtrackerv1.MatchResponse, states *kvtrackerv1.WatchWorkersResponse) *server {
	t.Helper()
	scheduler, err := schedule.New(schedule.Settings{})
	if err != nil {
		t.Fatal(err)
	}
	s := &server{
		Config: (&Config{}).withDefaults(), log: slog.New(slog.DiscardHandler), scheduler: scheduler, affinity: &affinity.Table{}, fleet: fleet.New(nil),
		decisions: decisions.New(64), catalog: catalog.NewPublisher(), tokens: &parity.Tokens{}, tracker: &stub{match},
	}
	s.line = s.follow(t.Context())
	s.cached = parity.NewCached(parity.Settings{Why: s.whyBlind, Changed: s.cachedChanged, Compared: s.cachedCompared})
	if s.metrics, err = newMetrics(noop.NewMeterProvider().Meter(""), s); err != nil {
		t.Fatal(err)
	}
	s.providers.Keep(c.Providers)
	plan := s.catalog.Publish(c, s.fleet, s.tokens).Plan
	s.fleet.Keep(plan.Longest, plan.Thresholds)
	s.fleet.Update(time.Now(), states)
	return s
}

// fleetYAML has two worker sets and two providers in a pool, and tenants.
func fleetYAML(workers int) string {
	var b strings.Builder
	for _, set := range []string{"small", "large"} {
		fmt.Fprintf(&b, `---
apiVersion: kinference.buoyant.io/v1alpha1
kind: InferenceWorkerSet
metadata: { name: %[1]s, namespace: ns, labels: { size: %[1]s } }
spec:
  models: [ { name: %[1]s, aliases: [ any ] } ]
  accelerator: { class: l40s, hourlyPrice: "1.50", currency: USD }
  endpoints:
`, set)
		for i := range workers {
			fmt.Fprintf(&b, "    - { name: w%d, address: %s%d }\n", i, set, i)
		}
	}
	for i, p := range []string{"cheap", "dear"} {
		fmt.Fprintf(&b, `---
apiVersion: kinference.buoyant.io/v1alpha1
kind: InferenceProvider
metadata: { name: %s, namespace: ns }
spec:
  schema: OpenAICompatible
  endpoint: https://%[1]s.example.com
  models: [ { name: up-%[1]s, aliases: [ large, any ], price: { currency: USD, perMillion: { input: "%d", output: "%d" } } } ]
`, p, 1+4*i, 2+9*i)
	}
	return b.String()
}

// policyYAML is a policy of random rules of all sorts.
func policyYAML(rng *rand.Rand) string {
	pick := func(list ...string) string { return list[rng.IntN(len(list))] }
	var b strings.Builder
	b.WriteString("apiVersion: kinference.buoyant.io/v1alpha1\nkind: InferencePolicy\nmetadata: { name: p, namespace: ns }\nspec:\n  rules:\n")
	for i := range 1 + rng.IntN(4) {
		match := pick("", `tag: "pii-*"`, "qos: batch", "promptTokens: { greaterThan: 500 }", `tenant: a`, `headers: [ { name: x-team, value: red } ]`, `claims: [ { name: groups, value: admin } ]`,
			`when: 'request.tools.exists(t, t == "search") || request.max_tokens > 100'`, `when: 'request.headers["x-beta"] == "yes"'`, "endpoint: Completions", "tags: { none: [ code ] }")
		fmt.Fprintf(&b, "    - name: r%d\n", i)
		if match != "" {
			fmt.Fprintf(&b, "      matches: [ { %s } ]\n", match)
		}
		if rng.IntN(6) == 0 {
			b.WriteString("      reject: { reason: Refused }\n")
			continue
		}
		b.WriteString("      route:\n")
		if rng.IntN(3) == 0 {
			b.WriteString("        consider: [ { " + pick("type: Local", "type: Provider", "models: { names: [ small, large ] }", "workerSets: { names: [ large ] }") + " } ]\n")
		}
		if rng.IntN(2) == 0 {
			b.WriteString("        exclude: [ { name: x, drop: { " + pick("backend: { type: Provider }", "queuedPrompts: { greaterThan: 2 }", "kvCacheUsage: { greaterThan: 0.6, until: 0.3 }", "kvCacheUsage: { greaterThan: 0.5, window: 10s }",
				"predictedTTFT: { greaterThan: 300ms }", "backend: { type: Local, labels: { size: small } }", "runningPrompts: { greaterThan: 3 }") + " } } ]\n")
		}
		b.WriteString("        select: [ " + pick("{ minimize: PredictedTTFT }", "{ minimize: PredictedE2E }", "{ minimize: Cost }", "{ minimize: QueuedPrompts }", "{ minimize: KVCacheUsage }",
			"{ type: Local, minimize: PredictedTTFT }, { type: Provider, order: [ dear, cheap ] }", "{ weights: [ { name: small, weight: 1 }, { name: large, weight: 2 }, { name: cheap, weight: 1 } ] }") + " ]\n")
		b.WriteString("        onEmpty: " + pick("Reject", "Continue") + "\n")
	}
	return b.String()
}

// watchYAML is a policy on dry run that looks at all that those of policyYAML do, so
// that records hold it.
const watchYAML = `apiVersion: kinference.buoyant.io/v1alpha1
kind: InferencePolicy
metadata: { name: watch, namespace: ns }
spec:
  dryRun: true
  rules:
    - name: all
      matches:
        - { headers: [ { name: x-team, value: red }, { name: x-beta, value: "yes" } ], claims: [ { name: groups, value: none } ] }
      route:
        consider: [ { models: { names: [ small, large ] } } ]
        exclude:
          - { name: window, drop: { kvCacheUsage: { greaterThan: 0.5, window: 10s } } }
          - { name: held, drop: { kvCacheUsage: { greaterThan: 0.6, until: 0.3 } } }
`

// randomRequest is one with attributes of all sorts.
func randomRequest(rng *rand.Rand, id string) *routerv1.RouteRequest {
	some := func(list ...string) (out []string) {
		for _, x := range list {
			if rng.IntN(2) == 0 {
				out = append(out, x)
			}
		}
		return out
	}
	tokens := uint32(16 * (1 + rng.IntN(100)))
	r := &routerv1.RouteRequest{
		RequestId: id, Model: []string{"any", "large", "small"}[rng.IntN(3)], MaxTokens: uint32(rng.IntN(3) * 80), Whole: rng.IntN(2) == 0, Tenant: "ns/a",
		Attributes: &routerv1.Attributes{
			Tenants: some("a", "b"), Qos: []string{"interactive", "batch"}[rng.IntN(2)], Endpoint: []string{"ChatCompletions", "Completions"}[rng.IntN(2)],
			Tools: some("search", "run"), Tags: some("code", "pii-detected"), Classified: rng.IntN(2) == 0,
			Headers:    map[string]string{"x-other": "1", "authorization": "Bearer sk-planted"},
			ClaimsJson: `{"groups":["admin"],"sub":"planted-subject","api_token":"planted-claim"}`,
		},
	}
	for _, h := range some("x-team=red", "x-beta=yes") {
		name, value, _ := strings.Cut(h, "=")
		r.Attributes.Headers[name] = value
	}
	for _, profile := range []string{"ns/small/small", "ns/large/large"} {
		p := &routerv1.Prompt{Profile: profile, Tokens: tokens, BlockSize: 16}
		for range tokens / 16 {
			p.BlockHashes = append(p.BlockHashes, rng.Uint64())
		}
		r.Prompts = append(r.Prompts, p)
	}
	return r
}

// A record made under some policies, decided anew under others, gives exactly what
// a router with those others decides in the same moment; under its own policies
// nothing changes. Time stands still in the bubble.
func TestReplayIsExact(t *testing.T) {
	const rounds, workers = 200, 4
	routed, changed, refused, actions := 0, 0, 0, map[string]int{}
	for round := range rounds {
		synctest.Test(t, func(t *testing.T) {
			rng := rand.New(rand.NewPCG(7, uint64(round)))
			fleetText, a, b := fleetYAML(workers), policyYAML(rng), policyYAML(rng)
			if round%4 > 0 {
				fleetText += "---\n" + watchYAML
			}
			states, match := &kvtrackerv1.WatchWorkersResponse{Synced: true}, &kvtrackerv1.MatchResponse{}
			for _, set := range []string{"small", "large"} {
				result := &kvtrackerv1.MatchResult{}
				for i := range workers {
					id := fmt.Sprintf("ns.%s.w%d/0", set, i)
					st := &kvtrackerv1.WorkerState{
						Worker: id, WorkerSet: "ns/" + set, Ready: rng.IntN(8) > 0, BlockSize: 16, TotalBlocks: 10_000, SampleAge: durationpb.New(0),
						Load:         &kvtrackerv1.Load{Running: float64(rng.IntN(3)), Waiting: float64(rng.IntN(2))},
						LoadMean_30S: &kvtrackerv1.Load{Running: float64(rng.IntN(5)), Waiting: float64(rng.IntN(4)), KvUsage: rng.Float64()},
					}
					if rng.IntN(6) == 0 {
						st.SampleAge = durationpb.New(time.Minute)
					}
					states.Workers = append(states.Workers, st)
					result.Matches = append(result.Matches, &kvtrackerv1.WorkerMatch{Worker: id, GpuTokens: uint32(16 * rng.IntN(3))})
				}
				match.Results = append(match.Results, result)
			}
			servers, catalogs := map[string]*server{}, map[string]*resources.Catalog{}
			for name, text := range map[string]string{"a": a, "b": b} {
				catalogs[name] = load(t, fleetText, text)
				servers[name] = newServer(t, catalogs[name], &kvtrackerv1.MatchResponse{Results: match.Results}, states)
				warm(servers[name], uint64(round), workers)
			}
			req := randomRequest(rng, fmt.Sprint("r", round))
			record := func(s *server) *adminv1.Decision {
				asked := len(req.Prompts)
				s.tracker.(*stub).match = &kvtrackerv1.MatchResponse{Results: match.Results[:asked]}
				_, _, _ = s.route(t.Context(), req)
				d, ok := s.decisions.Explain(req.RequestId)
				if !ok {
					t.Fatal("no record")
				}
				raw, err := protojson.Marshal(d) // as kinfctl writes it
				if err != nil {
					t.Fatal(err)
				}
				for _, secret := range []string{"planted", "sk-", "authorization"} {
					if strings.Contains(string(raw), secret) {
						t.Errorf("the record holds %q: %s", secret, raw)
					}
				}
				out := &adminv1.Decision{}
				if err := protojson.Unmarshal(raw, out); err != nil {
					t.Fatal(err)
				}
				return out
			}
			got, want := record(servers["a"]), record(servers["b"])

			same, ok := replay.New(catalogs["a"]).Decision(got)
			if !ok || same.Changed || same.Lacks != [replay.NumLacks]bool{} || !cmp.Equal(same.Before, same.After) {
				t.Errorf("round %d: the same policies decide otherwise: %+v", round, same)
			}
			if got.Refused != "" || want.Refused != "" {
				refused++ // by a queue that stands still, as time does
				return
			}
			other, ok := replay.New(catalogs["b"]).Decision(got)
			if !ok {
				t.Fatal("no pool")
			}
			actions[other.After.Action]++
			if other.Changed {
				changed++
			}
			if blind := other.Lacks[replay.Headers] || other.Lacks[replay.Claims] || other.Lacks[replay.Windows] || other.Lacks[replay.Unseen] || other.Lacks[replay.Unpredicted] || other.Lacks[replay.Memory]; blind {
				return // and said so
			}
			routed++
			var order []string
			for _, c := range want.Candidates {
				if c.Dropped == "" {
					order = append(order, c.Worker)
				}
			}
			if want.Chosen != "" {
				if c := want.Candidates[0]; c.PredictedTtft.AsDuration() != other.After.TTFT || c.PredictedE2E.AsDuration() != other.After.E2E || c.Cost != other.After.Cost {
					t.Errorf("round %d: predicted %v, %v, %v; live %v", round, other.After.TTFT, other.After.E2E, other.After.Cost, c)
				}
			}
			rule := want.GetVerdict().GetRule()
			if other.After.Action != want.GetVerdict().GetAction() || other.After.Rule != rule || other.After.Endpoint != want.Chosen || !cmp.Equal(other.Order, order) {
				raw, _ := json.MarshalIndent(other, "", " ")
				t.Errorf("round %d: replay says %s\nlive: %s by %s to %s, %v\na: %s\nb: %s", round, raw, want.GetVerdict().GetAction(), rule, want.Chosen, order, a, b)
			}
		})
	}
	t.Logf("%d of %d records held all that the other policies look at; %d decisions changed, %d were refused by the queue; %v", routed, rounds, changed, refused, actions)
	if refused > rounds/6 || routed < rounds/3 || changed < rounds/5 || len(actions) < 4 {
		t.Error("too few cases to say anything")
	}
}

// warm books requests, the same with the same seed, that have their first token: none
// that comes after them has to wait for a turn, as time stands still.
func warm(s *server, seed uint64, workers int) {
	rng := rand.New(rand.NewPCG(3, seed))
	for i := range rng.IntN(20) {
		var list []schedule.Candidate
		for _, set := range []string{"small", "large"} {
			for w := range workers {
				list = append(list, schedule.Candidate{
					Worker: fmt.Sprintf("ns.%s.w%d/0", set, w), Profile: "ns/" + set + "/" + set, Tokens: 500, BlockSize: 16, Hashes: []kvhash.Hash{kvhash.Hash(i)}, Class: "l40s", Group: "ns/" + set,
				})
			}
		}
		at := rng.IntN(len(list))
		s.scheduler.DecideBy(time.Now(), schedule.Request{ID: fmt.Sprint("warm", i), MaxTokens: 20}, list, func([]schedule.Estimate, func([]int)) ([]int, bool) { return []int{at}, true })
		s.scheduler.FirstToken(time.Now(), fmt.Sprint("warm", i), time.Duration(100+rng.IntN(300))*time.Millisecond)
	}
}
