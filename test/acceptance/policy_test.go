package acceptance

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"

	"github.com/kinference/kinference/internal/fleetsim"
	"github.com/kinference/kinference/internal/fleetsim/engine"
	"github.com/kinference/kinference/internal/rpc"
	adminv1 "github.com/kinference/kinference/proto/gen/kinference/admin/v1"
	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
	"github.com/kinference/kinference/proto/gen/kinference/router/v1/routerv1connect"
)

// cloud adds a third-party provider, which is another simulated server that no
// relay watches, and lets it serve the model too.
func (e *env) cloud() *fleetsim.Worker { return e.provider("cloud") }

func (e *env) provider(name string) *fleetsim.Worker {
	e.t.Helper()
	w, err := fleetsim.Start(context.Background(), fleetsim.Config{Name: name, TimeScale: 50, Model: "vendor/qwen", EventsPort: fleetsim.Off})
	if err != nil {
		e.t.Fatal(err)
	}
	e.t.Cleanup(w.Kill)
	e.reload(name+".yaml", `apiVersion: kinference.buoyant.io/v1alpha1
kind: InferenceProvider
metadata: { name: `+name+`, namespace: test }
spec: { schema: OpenAICompatible, endpoint: "`+w.URL()+`/v1", models: [ { name: `+modelName+`, upstreamName: vendor/qwen, aliases: [ qwen ] } ] }
`)
	return w
}

// policy writes the rules of an InferencePolicy and waits until they are in force.
func (e *env) policy(name, rules string) {
	e.t.Helper()
	e.reload(name+".yaml", "apiVersion: kinference.buoyant.io/v1alpha1\nkind: InferencePolicy\nmetadata: { name: "+name+", namespace: test }\nspec:\n  rules:\n"+rules)
}

// document puts an example of the product's document in force, to the letter but
// for the namespace.
func (e *env) document(name string) {
	e.t.Helper()
	text, err := os.ReadFile("../../internal/resources/testdata/good/document-" + name + ".good.yaml")
	if err != nil {
		e.t.Fatal(err)
	}
	e.reload(name+".yaml", strings.ReplaceAll(string(text), "namespace: inference", "namespace: test"))
}

// reload writes a file of resources and waits until the router and the ingress
// go by it.
func (e *env) reload(name, content string) {
	e.t.Helper()
	const line = `"msg":"catalog loaded"`
	before := strings.Count(e.log.String(), line)
	e.write(name, content)
	e.eventually("resources are loaded", func() bool { return strings.Count(e.log.String(), line) > before })
	version := fmt.Sprintf(`"msg":"catalog","service":"ingress","version":%d`, e.version())
	e.eventually("ingress has them", func() bool { return strings.Contains(e.log.String(), version) || e.overtaken(&version) })
}

// overtaken replaces a version that the router no longer has, which ingress may
// have skipped.
func (e *env) overtaken(version *string) bool {
	*version = fmt.Sprintf(`"msg":"catalog","service":"ingress","version":%d`, e.version())
	return false
}

// version is the version of the router's catalog.
func (e *env) version() uint64 {
	e.t.Helper()
	resp, err := e.admin.Status(e.t.Context(), &adminv1.StatusRequest{})
	if err != nil {
		e.t.Fatal(err)
	}
	return resp.GetCatalogVersion()
}

// busy keeps n requests in the engines until stop is called.
func (e *env) busy(n, prompt, output int) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() {
			for ctx.Err() == nil {
				e.post(ctx, "/v1/chat/completions", req{text: words(5000+i, prompt), max: output, extra: `,"ignore_eos":true`}.body())
			}
		})
	}
	return func() { cancel(); wg.Wait() }
}

// burst is like the document's, but quick.
const burst = `
  - name: burst-to-cloud
    route:
      exclude:
      - name: drop-overloaded-workers
        drop: { backend: { type: Local }, queuedPrompts: { greaterThan: 2, window: 1s } }
      select:
      - { type: Local, minimize: PredictedTTFT }
      - { type: Provider, order: [ cloud ] }
`

// mean is the 30 s mean of a worker's load as a decision saw it.
func mean(d *adminv1.Decision, worker string) *adminv1.Load {
	for _, c := range d.GetCandidates() {
		for _, m := range c.GetMeans() {
			if c.GetWorker() == worker && m.GetWindow().AsDuration() == 30*time.Second {
				return m.GetLoad()
			}
		}
	}
	return nil
}

// Requests burst to a provider once the 30 s mean of queued prompts is above 2,
// and come back when it has come down to 1.6.
func TestBurstToProvider(t *testing.T) {
	small := engine.L40SPlain16
	small.MaxSeqs = 1
	e := start(t, settings{workers: 1, scale: 20, worker: func(_ int, c *fleetsim.Config) { c.Profile = small }})
	e.provider("bedrock")
	e.provider("databricks")
	e.document("burst-to-cloud")
	const worker = "test.sim.w0/0"
	var queued float64 // mean at the last decision
	where := func() *adminv1.Decision {
		d := e.explain(e.chat(req{text: "where?", max: 1}))
		queued = mean(d, worker).GetWaiting()
		return d
	}
	if d := where(); d.GetChosen() != worker || d.GetVerdict().GetRule() != "test/burst-policy/burst-to-cloud" {
		t.Fatalf("idle: %v by %v", d.GetChosen(), d.GetVerdict())
	}
	stop := e.busy(12, 50, 400)
	var d *adminv1.Decision
	e.eventually("bursts", func() bool {
		d = where()
		if d.GetChosen() == worker && queued > 2 {
			t.Errorf("not at a mean of %v", queued)
		}
		return d.GetChosen() == "provider test/bedrock"
	})
	if queued <= 2 {
		t.Errorf("bursts at a mean of %v", queued)
	}
	dropped := ""
	for _, c := range d.GetCandidates() {
		if c.GetWorker() == worker {
			dropped = c.GetDropped()
		}
	}
	if dropped != "too busy for drop-overloaded-workers" || d.GetVerdict().GetStage() != 1 {
		t.Errorf("why not the worker: %q, stage %d", dropped, d.GetVerdict().GetStage())
	}
	stop()
	between := 0 // decisions for the provider although the mean is below 2
	deadline, tick := time.After(time.Minute), time.NewTicker(100*time.Millisecond)
	defer tick.Stop()
	for d = where(); d.GetChosen() != worker; d = where() {
		if queued <= 2 {
			between++
		}
		select {
		case <-deadline:
			t.Fatalf("not back at a mean of %v", queued)
		case <-tick.C:
		}
	}
	if queued > 1.6 || between == 0 {
		t.Errorf("back at a mean of %v, after %d bursts below 2", queued, between)
	}
}

// It is the same where requests wait in the router because the worker computes prompts
// all the time, and its engine's queue is short: by their number, and by what each would
// wait.
func TestBurstFromTheLine(t *testing.T) {
	for name, when := range map[string]string{"number": "queuedPrompts: { greaterThan: 2, window: 1s }", "time": "predictedTTFT: { greaterThan: 250ms }"} {
		t.Run(name, func(t *testing.T) {
			e := start(t, settings{workers: 1, scale: 20})
			e.cloud()
			e.policy("burst", `
  - name: burst-to-cloud
    route:
      exclude:
      - name: too-busy
        drop: { backend: { type: Local }, `+when+` }
      select:
      - { type: Local, minimize: PredictedTTFT }
      - { type: Provider, order: [ cloud ] }
`)
			ask := func(ctx context.Context, text string) answer {
				return e.post(ctx, "/v1/chat/completions", req{text: text, max: 20, extra: `,"ignore_eos":true`}.body())
			}
			if d := e.explain(ask(t.Context(), "idle?")); d.GetChosen() != "test.sim.w0/0" {
				t.Fatalf("idle: %v by %v", d.GetChosen(), d.GetVerdict())
			}
			var wg sync.WaitGroup
			ctx, cancel := context.WithCancel(t.Context())
			defer wg.Wait()
			defer cancel()
			for i := range 12 {
				wg.Go(func() {
					for j := 0; ctx.Err() == nil; j++ { // no prompt is cached
						ask(ctx, words(1_000_000*(i+1)+5_000*j, 3000))
					}
				})
			}
			var d *adminv1.Decision
			asked := 0
			e.eventually("bursts", func() bool {
				asked++
				d = e.explain(ask(t.Context(), words(50_000_000+5_000*asked, 3000)))
				return d.GetChosen() == "provider test/cloud"
			})
			for _, c := range d.GetCandidates() {
				if c.GetWorker() == "test.sim.w0/0" && (c.GetDropped() != "too busy for too-busy" || c.GetWaiting() > 2) {
					t.Errorf("the worker: %q, %v wait in its engine", c.GetDropped(), c.GetWaiting())
				}
			}
		})
	}
}

// The client of a provider's answer sees the model that it asked for, in whole
// answers and in streams.
func TestProviderAnswers(t *testing.T) {
	e := start(t, settings{workers: 1})
	e.cloud()
	e.policy("all-to-cloud", `
  - { name: cloud, route: { consider: [ { type: Provider } ] } }
`)
	for _, stream := range []bool{true, false} {
		a := e.chat(req{model: "qwen", text: "Hello", max: 5, stream: stream, extra: `,"cache_salt":"s"`})
		if a.status != http.StatusOK || a.text == "" || !strings.Contains(a.body, `"model":"qwen"`) || strings.Contains(a.body, "vendor") {
			t.Errorf("stream %v: %d %.300s", stream, a.status, a.body)
		}
		e.eventually("usage was reported", func() bool { return e.explain(a).GetServedBy() == "provider test/cloud" })
	}
}

const piiStaysLocal = `
  - name: serve
    route:
      exclude:
      - name: pii-never-leaves-cluster
        if: { tag: pii-detected }
        drop: { backend: { type: Provider } }
      select:
      - { type: Provider, order: [ cloud ] }
      - { type: Local, minimize: PredictedTTFT }
      onEmpty: Reject
`

// router is the router's door for ingresses.
func (e *env) router() routerv1connect.RouterServiceClient {
	ctx, cancel := context.WithCancel(context.Background())
	e.t.Cleanup(cancel)
	return rpc.Client(ctx, e.stack.RouterURL(), routerv1connect.NewRouterServiceClient)
}

// route asks the router itself, with tags that a test gives.
func (e *env) route(id string, a *routerv1.Attributes) (*routerv1.RouteResponse, error) {
	router := e.router()
	resp, err := router.Route(e.t.Context(), &routerv1.RouteRequest{RequestId: id, Model: modelName, Attributes: a})
	if err == nil {
		_, rerr := router.Report(e.t.Context(), &routerv1.ReportRequest{Reports: []*routerv1.Report{{RequestId: id, Event: &routerv1.Report_Done{Done: &routerv1.Done{}}}}})
		if rerr != nil {
			e.t.Fatal(rerr)
		}
	}
	return resp, err
}

// No prompt with PII, and none that nobody classified, ever gets to a provider:
// not when workers fail, not when all of them are gone.
func TestPIINeverReachesAProvider(t *testing.T) {
	e := start(t, settings{workers: 2})
	cloud := e.cloud()
	e.policy("pii-stays-local", piiStaysLocal)
	clean, err := e.route("clean", &routerv1.Attributes{Classified: true})
	if err != nil || clean.GetEndpoints()[0].GetProvider() != "test/cloud" {
		t.Fatalf("a clean prompt: %v %v", clean, err)
	}
	pii, err := e.route("pii", &routerv1.Attributes{Classified: true, Tags: []string{"pii-detected"}})
	if err != nil {
		t.Fatal(err)
	}
	for _, endpoint := range pii.GetEndpoints() {
		if endpoint.GetProvider() != "" {
			t.Error("a provider is among the endpoints of a prompt with PII")
		}
	}
	if err := e.stack.Halt("classifier"); err != nil { // so that nothing is known of these
		t.Fatal(err)
	}
	ask := func(want int) {
		t.Helper()
		for i := range 5 {
			a := e.chat(req{text: words(i, 50), max: 1})
			if a.status != want {
				t.Errorf("status %d, want %d: %s", a.status, want, a.body)
			}
		}
	}
	ask(http.StatusOK)
	e.workers[0].SetFaults(fleetsim.Faults{ErrorNext: 100})
	ask(http.StatusOK)
	e.workers[1].SetFaults(fleetsim.Faults{CloseNext: 100})
	if a := e.chat(req{text: "x"}); a.status < 500 {
		t.Errorf("all workers fail: %d", a.status)
	}
	for _, w := range e.workers {
		w.Kill()
	}
	e.eventually("nobody is left", func() bool { return e.chat(req{text: "x"}).status == http.StatusServiceUnavailable })
	if n := cloud.Stats(0); n.PromptTokens != 0 {
		t.Errorf("the provider got %v prompt tokens", n.PromptTokens)
	}
}

// Batch work is refused while every worker's cache is full, and only batch work.
func TestBatchOnlyToIdleWorkers(t *testing.T) {
	small := engine.L40SPlain16
	small.Blocks, small.MaxModelLen = 200, 3200
	e := start(t, settings{workers: 1, scale: 20, worker: func(_ int, c *fleetsim.Config) { c.Profile = small }})
	e.document("batch-on-idle")
	batch := func() answer {
		hr, _ := http.NewRequestWithContext(t.Context(), http.MethodPost, e.stack.URL()+"/v1/chat/completions", strings.NewReader(req{text: "x", max: 1}.body()))
		hr.Header.Set("X-Kinference-Qos", "batch")
		resp, err := e.client.Do(hr)
		if err != nil {
			return answer{err: err}
		}
		resp.Body.Close()
		return answer{status: resp.StatusCode, id: resp.Header.Get("X-Request-Id"), header: resp.Header}
	}
	if a := batch(); a.status != http.StatusOK {
		t.Fatalf("idle: %d", a.status)
	}
	stop := e.busy(2, 500, 1000)
	defer stop()
	var a answer
	deadline, tick := time.After(2*time.Minute), time.NewTicker(100*time.Millisecond)
	defer tick.Stop()
	for a = batch(); a.status != http.StatusTooManyRequests; a = batch() {
		select {
		case <-deadline:
			t.Fatalf("batch is served still: %d", a.status)
		case <-tick.C:
		}
	}
	// Once above 0.7 it holds until the mean is down to four fifths of that.
	if usage := mean(e.explain(a), "test.sim.w0/0").GetKvUsage(); usage <= 0.7*0.8 || a.header.Get("Retry-After") == "" {
		t.Errorf("refused at a mean of %v, Retry-After %q", usage, a.header.Get("Retry-After"))
	}
	if a := e.chat(req{text: "I am in a hurry", max: 1}); a.status != http.StatusOK {
		t.Errorf("interactive: %d %s", a.status, a.body)
	}
}

// An alias over two worker sets picks the faster one; so does a rule that lets
// simple prompts for the large model go to either.
func TestFasterModel(t *testing.T) {
	// Slow enough that the predictions differ by more than a busy machine's noise.
	e := start(t, settings{workers: 1, scale: 4})
	fast, err := fleetsim.Start(context.Background(), fleetsim.Config{Name: "fast", Profile: engine.H100Qwen27B, TimeScale: 4, Model: "sim/fast", Admin: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(fast.Kill)
	set := strings.Replace(e.workerSet("  accelerator: { class: l40s }\n"), "aliases: [ qwen ]", "aliases: [ qwen, standard-model ]", 1)
	e.reload("fleet.yaml", set+`---
apiVersion: kinference.buoyant.io/v1alpha1
kind: InferenceWorkerSet
metadata: { name: fast, namespace: test }
spec:
  models: [ { name: sim/fast, aliases: [ standard-model ] } ]
  accelerator: { class: h100 }
  endpoints: [ { name: fast, address: "`+fast.Addr()+`" } ]
`)
	n := 0 // each prompt is new to every cache
	chosen := func(model string) string {
		n++
		return e.explain(e.chat(req{model: model, text: words(100*n, 500), max: 1})).GetChosen()
	}
	e.eventually("alias goes to the faster set", func() bool { return chosen("standard-model") == "test.fast.fast/0" })
	if c := chosen(modelName); c != "test.sim.w0/0" {
		t.Errorf("one model by its own name: %s", c)
	}
	e.policy("simple", `
  - name: low-complexity
    matches: [ { model: `+modelName+`, tag: complexity-low } ]
    route: { consider: [ { models: { names: [ `+modelName+`, sim/fast ] } } ], select: [ { minimize: PredictedTTFT } ] }
`)
	for tag, want := range map[string]string{"complexity-low": "test.fast.fast/0", "complexity-high": "test.sim.w0/0"} {
		resp, err := e.route(tag, &routerv1.Attributes{Classified: true, Tags: []string{tag}})
		if err != nil || resp.GetEndpoints()[0].GetWorker() != want {
			t.Errorf("%s: %v %v, want %s", tag, resp, err, want)
		}
	}
}

// Rules can refuse, in the caller's dialect; a dry run only says what it would do.
func TestRejectAndDryRun(t *testing.T) {
	e := start(t, settings{workers: 1})
	e.policy("long", `
  - { name: no-novels, matches: [ { promptTokens: { greaterThan: 500 } } ], reject: { reason: PromptTooLong, message: "Prompts over 500 tokens are not served here." } }
  - { name: by-header, matches: [ { headers: [ { name: x-app, value: search } ], when: "has(request.tools)" } ], reject: { reason: NoTools } }
`)
	a := e.chat(req{text: words(1, 600), max: 1})
	if b := a.errorBody(); a.status != http.StatusForbidden || !strings.Contains(b.Message, "PromptTooLong") || !strings.Contains(b.Message, "over 500 tokens") {
		t.Errorf("got %d %s", a.status, a.body)
	}
	if d := e.explain(a); d.GetVerdict().GetAction() != "reject" || d.GetVerdict().GetRule() != "test/long/no-novels" {
		t.Errorf("record %v", d.GetVerdict())
	}
	if a := e.chat(req{text: "short", max: 1}); a.status != http.StatusOK {
		t.Errorf("a short one: %d", a.status)
	}
	hr, _ := http.NewRequestWithContext(t.Context(), http.MethodPost, e.stack.URL()+"/v1/chat/completions",
		strings.NewReader(req{text: "x", extra: `,"tools":[{"type":"function","function":{"name":"f"}}]`}.body()))
	hr.Header.Set("X-App", "search")
	resp, err := e.client.Do(hr)
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if resp.StatusCode != http.StatusForbidden {
		t.Errorf("by header and CEL: %d", resp.StatusCode)
	}

	e.reload("long.yaml", `apiVersion: kinference.buoyant.io/v1alpha1
kind: InferencePolicy
metadata: { name: long, namespace: test }
spec: { dryRun: true, rules: [ { name: nobody, reject: { reason: Closed } } ] }
`)
	a = e.chat(req{text: "x", max: 1})
	if d := e.explain(a); a.status != http.StatusOK || d.GetShadow().GetAction() != "reject" || d.GetVerdict().GetAction() != "route" {
		t.Errorf("dry run: %d %v %v", a.status, d.GetVerdict(), d.GetShadow())
	}
}

// A request may wait for an endpoint, in order, and gives up in time.
func TestQueue(t *testing.T) {
	e := start(t, settings{workers: 1})
	const hold = `
  - { name: hold, route: { exclude: [ { name: all, drop: { backend: { type: Local } } } ], onEmpty: Queue, queue: { timeout: %s } } }
`
	e.policy("hold", fmt.Sprintf(hold, "1s"))
	if a := e.chat(req{text: "x", max: 1}); a.status != http.StatusTooManyRequests {
		t.Errorf("nobody came: %d %s", a.status, a.body)
	}
	ctx, cancel := context.WithCancel(t.Context())
	e.policy("hold", fmt.Sprintf(hold, "5m"))
	done, router := make(chan error, 1), e.router()
	go func() {
		_, err := router.Route(ctx, &routerv1.RouteRequest{RequestId: "waits", Model: modelName})
		done <- err
	}()
	e.eventually("it waits", func() bool {
		select {
		case err := <-done:
			t.Fatalf("does not wait: %v", err)
		default:
		}
		return e.status().GetQueued() == 1
	})
	cancel()
	if err := <-done; connect.CodeOf(err) != connect.CodeCanceled {
		t.Errorf("the caller left: %v", err)
	}
}

// Policies that change all the time, and are wrong now and then, cost no stream.
func TestReloadDropsNoRequest(t *testing.T) {
	const reloads = 100
	e := start(t, settings{workers: 2, scale: 20})
	var mu sync.Mutex
	var answers []answer
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	for i := range 6 {
		wg.Go(func() {
			for n := 0; ctx.Err() == nil; n++ {
				a := e.post(context.Background(), "/v1/chat/completions", req{text: words(i*1000+n, 20), max: 50, stream: true, extra: `,"ignore_eos":true`}.body())
				mu.Lock()
				answers = append(answers, a)
				mu.Unlock()
			}
		})
	}
	for i := range reloads {
		rules := fmt.Sprintf("\n  - { name: r%d, route: { select: [ { type: Local } ] } }\n", i)
		if i%10 == 0 { // it stays as it was
			e.write("changes.yaml", "kind: InferencePolicy\nspec: { rules: "+rules)
			e.eventually("the fault is found", func() bool { return strings.Count(e.log.String(), `"msg":"resources not loaded"`) == i/10+1 })
		}
		e.policy("changes", rules)
		e.eventually("streams end under it", func() bool {
			mu.Lock()
			defer mu.Unlock()
			return len(answers) > i
		})
	}
	cancel()
	wg.Wait()
	for _, a := range answers {
		if !a.whole() || len(a.events) < 50 {
			t.Errorf("status %d, %d events, %v: %.200s", a.status, len(a.events), a.err, a.body)
		}
	}
	t.Logf("%d streams, %d reloads and %d bad files", len(answers), reloads, reloads/10)
}
