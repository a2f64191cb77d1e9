package router_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
	"github.com/kinference/kinference/services/router"
)

// One router is enough for many models that few people use: each has its pool,
// its rule and its workers.
func TestManyModels(t *testing.T) {
	const models = 200
	e := newEngine(t)
	w := start(t, router.Config{ProbeInterval: time.Second}, e)
	w.until("m ready", modelReady("m"))
	var b strings.Builder
	for i := range models {
		fmt.Fprintf(&b, `---
apiVersion: kinference.buoyant.io/v1alpha1
kind: InferenceWorkerSet
metadata: { name: set-%[1]d, namespace: many }
spec: { endpoints: [ { name: a, address: %[2]q }, { name: b, address: %[3]q } ], models: [ { name: model-%[1]d } ] }
---
apiVersion: kinference.buoyant.io/v1alpha1
kind: InferencePool
metadata: { name: pool-%[1]d, namespace: many }
spec: { destinations: [ { kind: InferenceWorkerSet, name: set-%[1]d } ] }
---
apiVersion: kinference.buoyant.io/v1alpha1
kind: InferencePolicy
metadata: { name: policy-%[1]d, namespace: many }
spec: { targetRefs: [ { kind: InferencePool, name: pool-%[1]d } ], rules: [ { name: rule-%[1]d, matches: [ { model: model-%[1]d } ], route: { select: [ { type: Local } ] } } ] }
`, i, e.URL, strings.Replace(e.URL, "127.0.0.1", "localhost", 1))
	}
	w.write("many.yaml", b.String())
	w.until("the last of many", modelReady(fmt.Sprint("model-", models-1)))
	w.allReady()
	ask := func(model, id string) time.Duration {
		t.Helper()
		start := time.Now()
		r := request(id)
		r.Model, r.Prompts = model, nil
		got := w.route(r)
		took := time.Since(start)
		w.report(id, &routerv1.Report{Event: &routerv1.Report_Done{Done: &routerv1.Done{Outcome: routerv1.Outcome_OUTCOME_OK}}})
		if model == "m" {
			return took
		}
		want := "many.set-" + strings.TrimPrefix(model, "model-") + "."
		if len(got) != 2 || !strings.HasPrefix(got[0].Worker, want) || !strings.HasPrefix(got[1].Worker, want) {
			t.Errorf("%s goes to %v", model, got)
		}
		return took
	}
	var one, many time.Duration
	for i := range models {
		one += ask("m", fmt.Sprint("one-", i))
		many += ask(fmt.Sprint("model-", i), fmt.Sprint("many-", i))
	}
	if d := w.explain("many-7"); d.GetVerdict().GetRule() != "many/policy-7/rule-7" {
		t.Errorf("decided by %q", d.GetVerdict().GetRule())
	}
	t.Logf("%d models: %v a decision, %v for the only one of its namespace", models, many/models, one/models)
}
