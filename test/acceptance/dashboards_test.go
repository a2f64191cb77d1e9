package acceptance

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kinference/kinference/cmd/stack"
	"github.com/kinference/kinference/internal/rpc"
	"github.com/kinference/kinference/internal/testenv"
	accountingv1 "github.com/kinference/kinference/proto/gen/kinference/accounting/v1"
	"github.com/kinference/kinference/proto/gen/kinference/accounting/v1/accountingv1connect"
)

// busyStack is a control plane with tenants, limits and objectives, and with
// traffic behind it.
func busyStack(t *testing.T) (*env, accountingv1connect.AccountingServiceClient) {
	t.Helper()
	e := start(t, settings{
		workers: 2, set: "  accelerator: { class: l40s, hourlyPrice: \"1.10\", currency: USD }\n  maxBatchedTokens: 2048\n", stack: stack.Options{GPUEvery: time.Second},
	})
	objectives := `
  objectives:
    - { name: fast, indicator: TTFT, threshold: 2s, target: "99", window: 7d }
    - { name: up, indicator: Availability, target: "99.9", window: 30d }
`
	e.write("tenants.yaml", `apiVersion: kinference.buoyant.io/v1alpha1
kind: InferencePool
metadata: { name: all, namespace: test }
spec:
  destinations: [ { kind: InferenceWorkerSet, name: sim } ]`+objectives+`---
apiVersion: kinference.buoyant.io/v1alpha1
kind: GatewayBackend
metadata: { name: public, namespace: test }
spec: { poolRef: { name: all }, authentication: { anonymous: { tenant: team } } }
---
apiVersion: kinference.buoyant.io/v1alpha1
kind: InferenceTenant
metadata: { name: team, namespace: test }
spec:
  limits: [ { name: many, requests: 100000, window: 1m } ]`+objectives)
	client := rpc.Client(t.Context(), e.stack.AccountingURL(), accountingv1connect.NewAccountingServiceClient)
	e.eventually("objectives are known", func() bool {
		o, err := client.Objectives(t.Context(), &accountingv1.ObjectivesRequest{})
		return err == nil && len(o.GetObjectives()) == 4
	})
	for i := range 30 {
		if a := e.chat(req{text: words(i%5, 200+20*i), max: 20, stream: i%3 > 0}); a.status != http.StatusOK {
			t.Fatalf("status %d: %s", a.status, a.body)
		}
	}
	e.chat(req{model: "nothing", text: "x"})
	e.eventually("requests count for objectives", func() bool {
		o, err := client.Objectives(t.Context(), &accountingv1.ObjectivesRequest{})
		for _, s := range o.GetObjectives() {
			if s.GetTotal() < 20 {
				return false
			}
		}
		return err == nil
	})
	return e, client
}

// exposed are the names of the metrics that a stack has.
func exposed(t *testing.T, e *env) map[string]bool {
	t.Helper()
	r, err := e.client.Get(e.stack.AdminURL() + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer r.Body.Close()
	raw, err := io.ReadAll(r.Body)
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]bool{}
	for line := range strings.Lines(string(raw)) {
		if name, _, ok := strings.Cut(line, "{"); ok && !strings.HasPrefix(line, "#") {
			out[name] = true
		} else if fields := strings.Fields(line); len(fields) == 2 {
			out[fields[0]] = true
		}
	}
	return out
}

// query is one expression of a dashboard or a rule, and where it stands.
type query struct{ place, text string }

// dashboardQueries reads the expressions of all dashboards.
func dashboardQueries(t *testing.T, dir string) (out []query) {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(dir, "*.json"))
	if err != nil || len(files) < 8 {
		t.Fatalf("dashboards: %v, %v", files, err)
	}
	uids := map[string]string{}
	for _, file := range files {
		raw, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		var d struct {
			UID, Title string
			Panels     []struct {
				Title   string
				Targets []struct{ Expr string }
			}
			Templating struct {
				List []struct {
					Type, Query string
				}
			}
		}
		if err := json.Unmarshal(raw, &d); err != nil {
			t.Fatalf("%s: %v", file, err)
		}
		if d.UID == "" || uids[d.UID] != "" || len(d.Panels) == 0 {
			t.Errorf("%s: uid %q (as %s), %d panels", file, d.UID, uids[d.UID], len(d.Panels))
		}
		uids[d.UID] = file
		for _, p := range d.Panels {
			for _, x := range p.Targets {
				out = append(out, query{filepath.Base(file) + ": " + p.Title, x.Expr})
			}
		}
		for _, v := range d.Templating.List {
			if rest, ok := strings.CutPrefix(v.Query, "label_values("); ok && v.Type == "query" {
				metric, _, _ := strings.Cut(rest, ",")
				out = append(out, query{filepath.Base(file) + ": variable", metric})
			}
		}
	}
	return out
}

// metricName finds our names in an expression.
var metricName = regexp.MustCompile(`\b(?:kinference[_:]|gen_ai_server_|gen_ai_client_)[a-z0-9_:]*`)

// seldom are metrics that there are only once something has gone wrong, some minutes
// have passed, or with TLS.
var seldom = []string{
	"kinference_ingress_failovers_total", "kinference_router_moved_total", "kinference_router_tracker_unavailable_total", "kinference_accounting_stream_filled_ratio",
	"kinference_router_queue_refused_total", "kinference_router_gossip_dropped_total",
	"kinference_tls_certificate_not_after_seconds",
}

// quiet are the panels that show nothing while all is well.
var quiet = []string{
	"objectives.json: Firing", "overview.json: Degraded", "tenant.json: Failed", "tenant.json: Estimated tokens",
}

// What of a file of rules is looked at.
var (
	recordLine = regexp.MustCompile(`(?m)record: (\S+)`)
	exprLine   = regexp.MustCompile(`(?m)^\s*(?:expr: (.*)|(?:and )?(kinference:.*))$`)
)

// Each query of the dashboards and rules is about metrics that a running stack has,
// and Prometheus itself, scraping that stack, can answer it.
func TestDashboardsAndRules(t *testing.T) {
	for _, tool := range []string{"prometheus", "promtool"} {
		if _, err := exec.LookPath(tool); err != nil {
			t.Fatalf("%s is missing: run scripts/deps.sh", tool)
		}
	}
	e, client := busyStack(t)
	answer, err := client.Objectives(t.Context(), &accountingv1.ObjectivesRequest{Rules: true})
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	own := filepath.Join(dir, "objectives.yaml")
	if err := os.WriteFile(own, []byte(answer.GetRules()), 0o600); err != nil {
		t.Fatal(err)
	}
	rules, err := filepath.Glob("../../deploy/rules/*.yaml")
	if err != nil || len(rules) == 0 {
		t.Fatalf("rules: %v, %v", rules, err)
	}
	rules = append(rules, own)
	if out, err := exec.Command("promtool", append([]string{"check", "rules"}, rules...)...).CombinedOutput(); err != nil { //nolint:gosec // files of ours
		t.Fatalf("promtool: %v\n%s", err, out)
	}

	e.eventually("workers' time is charged", func() bool {
		e.chat(req{text: words(1, 500), max: 300, stream: true}) // long enough to be seen at work
		all := exposed(t, e)
		return all["kinference_tenant_cost_total"] && all["kinference_tenant_gpu_time_seconds_total"] && all["kinference_worker_time_seconds_total"]
	})
	names := exposed(t, e)
	queries := dashboardQueries(t, "../../deploy/dashboards")
	for _, file := range rules {
		raw, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range recordLine.FindAllStringSubmatch(string(raw), -1) {
			names[m[1]] = true
		}
		for _, m := range exprLine.FindAllStringSubmatch(string(raw), -1) {
			queries = append(queries, query{filepath.Base(file), m[1] + m[2]})
		}
	}
	for _, q := range queries {
		for _, name := range metricName.FindAllString(q.text, -1) {
			if !names[name] && !slices.Contains(seldom, name) {
				t.Errorf("%s: no metric %s", q.place, name)
			}
		}
	}
	if t.Failed() {
		var list []string
		for n := range names {
			if metricName.MatchString(n) {
				list = append(list, n)
			}
		}
		slices.Sort(list)
		t.Fatalf("there are: %s", strings.Join(list, " "))
	}

	prometheus := startPrometheus(t, dir, e.stack.AdminURL(), rules)
	up := func(expr string) bool { n, err := promQuery(t.Context(), prometheus, expr); return err == nil && n > 0 }
	e.eventually("Prometheus scrapes", func() bool { return up("count_over_time(up[1m]) > 3 and up == 1") })
	empty := 0
	for _, q := range queries {
		if strings.HasPrefix(q.place, "objectives.yaml") {
			continue // was checked by promtool, and is in several lines
		}
		n, err := promQuery(t.Context(), prometheus, grafana.Replace(q.text))
		if err != nil {
			t.Errorf("%s: %v", q.place, err)
		} else if n == 0 {
			empty++
			// Alerts have no answer, which is why they do not fire.
			rare := slices.ContainsFunc(seldom, func(name string) bool { return strings.Contains(q.text, name) })
			if !rare && !slices.Contains(quiet, q.place) && !strings.HasSuffix(q.place, ".yaml") {
				t.Errorf("%s shows nothing: %s", q.place, q.text)
			}
		}
	}
	t.Logf("%d queries, %d without an answer: alerts that do not fire, and panels of what goes wrong", len(queries), empty)
	e.eventually("objectives are recorded", func() bool { return up("count(kinference:objective_total:increase1h) >= 4") })
}

// What replicas of a kvtracker count alike the dashboards show once, and add up over its
// shards.
func TestTrackerReplicasCountOnce(t *testing.T) {
	if _, err := exec.LookPath("promtool"); err != nil {
		t.Fatal("promtool is missing: run scripts/deps.sh")
	}
	var rules, tests strings.Builder
	rules.WriteString("groups:\n- name: panels\n  rules:\n")
	// Ten each, and one more every 15 s: of two shards with two replicas each.
	tests.WriteString("rule_files: [ rules.yaml ]\ntests:\n- interval: 15s\n  input_series:\n")
	for _, series := range []string{`blocks{medium="gpu"`, `workers{state="known"`, `events_total{job="k"`, `clears_total{reason="gap"`} {
		for _, pod := range []string{`pod="a",shard="0/2"`, `pod="b",shard="0/2"`, `pod="c",shard="1/2"`, `pod="d",shard="1/2"`} {
			fmt.Fprintf(&tests, "  - series: 'kinference_kvtracker_%s,%s}'\n    values: 10+1x40\n", series, pod)
		}
	}
	tests.WriteString("  promql_expr_test:\n")
	n := 0
	for _, q := range dashboardQueries(t, "../../deploy/dashboards") {
		want, ok := map[string]string{
			"worker.json: Blocks in the index":          `{ labels: '{medium="gpu"}', value: 60 }`, // after 5 min
			"worker.json: Workers in the index":         `{ labels: '{state="known"}', value: 60 }`,
			"worker.json: Events applied":               `{ labels: '{}', value: 0.13333333333333333 }`,
			"worker.json: Workers whose cache was lost": `{ labels: '{reason="gap"}', value: 8 }`,
		}[q.place]
		if !ok {
			continue
		}
		n++
		fmt.Fprintf(&rules, "  - { record: panel%d, expr: %q }\n", n, grafana.Replace(q.text))
		fmt.Fprintf(&tests, "  - expr: %q\n    eval_time: 5m\n    exp_samples: [ %s ]\n", grafana.Replace(q.text), want)
	}
	if n != 4 {
		t.Errorf("%d panels are checked, want 4", n)
	}
	dir := t.TempDir()
	for name, text := range map[string]string{"rules.yaml": rules.String(), "tests.yaml": tests.String()} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if out, err := exec.CommandContext(t.Context(), "promtool", "test", "rules", filepath.Join(dir, "tests.yaml")).CombinedOutput(); err != nil { //nolint:gosec // a file of ours
		t.Errorf("%v\n%s", err, out)
	}
}

// grafana puts values in the place of Grafana's variables.
var grafana = strings.NewReplacer("$__rate_interval", "1m", "$__range", "5m", "$tenant", ".*", "$model", ".*", "$pool", ".*", "$set", ".*", "$objective", ".*", "$organisation", ".*")

// startPrometheus runs a Prometheus that scrapes a stack, and returns its URL.
func startPrometheus(t *testing.T, dir, admin string, rules []string) string {
	t.Helper()
	target, err := url.Parse(admin)
	if err != nil {
		t.Fatal(err)
	}
	var config strings.Builder
	config.WriteString("global: { scrape_interval: 500ms, evaluation_interval: 500ms }\nrule_files:\n")
	for _, r := range rules {
		abs, err := filepath.Abs(r)
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(&config, "  - %q\n", abs)
	}
	fmt.Fprintf(&config, "scrape_configs:\n  - job_name: kinference\n    static_configs: [ { targets: [ %q ] } ]\n", target.Host)
	file := filepath.Join(dir, "prometheus.yaml")
	if err := os.WriteFile(file, []byte(config.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	addr := testenv.FreeAddr(t)
	run(t, "prometheus", "--config.file", file, "--storage.tsdb.path", filepath.Join(dir, "tsdb"), "--web.listen-address", addr, "--log.level", "warn")
	return "http://" + addr
}

// promQuery tells how many series an expression has.
func promQuery(ctx context.Context, at, expr string) (int, error) {
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, at+"/api/v1/query", bytes.NewBufferString(url.Values{"query": {expr}}.Encode()))
	if err != nil {
		return 0, err
	}
	r.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	resp, err := http.DefaultClient.Do(r)
	if err != nil {
		return 0, err
	}
	defer resp.Body.Close()
	var out struct {
		Error string
		Data  struct{ Result []json.RawMessage }
	}
	if err := json.NewDecoder(resp.Body).Decode(&out); err != nil {
		return 0, err
	}
	if out.Error != "" {
		return 0, fmt.Errorf("%s: %s", out.Error, expr)
	}
	return len(out.Data.Result), nil
}

// What was observed of a running fleet tells what it can bear and who used it, and
// the parts are the time of its workers.
func TestCapacityOfRunningFleet(t *testing.T) {
	e, client := busyStack(t)
	var got *accountingv1.SetCapacity
	e.eventually("capacity is known", func() bool {
		e.chat(req{text: words(1, 500), max: 30, stream: true})
		answer, err := client.Capacity(t.Context(), &accountingv1.CapacityRequest{})
		if err != nil || len(answer.GetSets()) != 1 {
			return false
		}
		got = answer.GetSets()[0]
		return got.GetWallSeconds() > 5 && len(got.GetTenants()) > 1 && got.GetIdleSeconds() < got.GetWallSeconds()
	})
	parts := got.GetIdleSeconds() + got.GetOtherSeconds()
	for _, x := range got.GetTenants() {
		parts += x.GetPrefillSeconds() + x.GetDecodeSeconds()
	}
	if d := parts/got.GetWallSeconds() - 1; d > .001 || d < -.001 {
		t.Errorf("parts are %v of %v s", parts, got.GetWallSeconds())
	}
	if got.GetWorkerSet() != "test/sim" || got.GetWorkers() != 2 || got.GetRate() <= 0 || got.GetKnee() <= got.GetRate() || got.GetWorkersNeeded() != 1 || len(got.GetCurve()) == 0 {
		t.Errorf("capacity: %v", got)
	}
}
