package acceptance

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"connectrpc.com/connect"

	"github.com/kinference/kinference/internal/rpc"
	adminv1 "github.com/kinference/kinference/proto/gen/kinference/admin/v1"
	"github.com/kinference/kinference/proto/gen/kinference/admin/v1/adminv1connect"
	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
)

// adminTokens writes a file with a token for each role, "read" and "operate".
func adminTokens(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "tokens")
	var b strings.Builder
	for _, role := range []string{"read", "operate"} {
		fmt.Fprintf(&b, "%s-person %s %x\n", role, role, sha256.Sum256([]byte(role)))
	}
	if err := os.WriteFile(path, []byte(b.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// callAdmin makes a call of the admin API as plain JSON; a stream is left after its
// headers.
func (e *env) callAdmin(method, token, body string) (status int, text string) {
	e.t.Helper()
	ctx, cancel := context.WithTimeout(e.t.Context(), patience)
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, e.stack.AdminAPIURL()+"/kinference.admin.v1.AdminService/"+method, strings.NewReader(body))
	if err != nil {
		e.t.Fatal(err)
	}
	r.Header.Set("Content-Type", "application/json")
	if token != "" {
		r.Header.Set("Authorization", "Bearer "+token)
	}
	resp, err := e.client.Do(r)
	if err != nil {
		e.t.Fatal(err)
	}
	defer resp.Body.Close()
	raw, err := io.ReadAll(resp.Body)
	if err != nil {
		e.t.Fatal(err)
	}
	return resp.StatusCode, string(raw)
}

// Every call of the admin API, with no token, a wrong one, one that may read and one
// that may do all, over plain JSON. What is refused for lack of rights, and what
// changes something, is in the audit log; tokens are nowhere.
func TestAdminAPIRoles(t *testing.T) {
	audit := filepath.Join(t.TempDir(), "audit.log")
	e := start(t, settings{workers: 1, adminTokens: adminTokens(t), adminAudit: audit})
	methods := adminv1.File_kinference_admin_v1_admin_proto.Services().ByName("AdminService").Methods()
	refused, changed := 0, 0
	for i := range methods.Len() {
		m := methods.Get(i)
		name := string(m.Name())
		changes := slices.ContainsFunc([]string{"Create", "Revoke", "Delete", "Update", "Set"}, func(p string) bool { return strings.HasPrefix(name, p) })
		for token, want := range map[string]string{"": "unauthenticated", "wrong": "unauthenticated", "read": "", "operate": ""} {
			status, text := e.callAdmin(name, token, "{}")
			if token == "read" && changes {
				want = "permission_denied"
				refused++
			}
			if token == "operate" && changes {
				changed++
			}
			switch got := status == http.StatusUnauthorized || status == http.StatusForbidden; {
			case m.IsStreamingServer() && want == "": // plain JSON is no stream: it is let in, and told so
				if status != http.StatusUnsupportedMediaType {
					t.Errorf("%s with %q: %d %s", name, token, status, text)
				}
			case got != (want != "") || want != "" && !strings.Contains(text, `"`+want+`"`):
				t.Errorf("%s with %q: %d %s, want %q", name, token, status, text, want)
			}
		}
	}
	raw, err := os.ReadFile(audit)
	if err != nil {
		t.Fatal(err)
	}
	if n := bytes.Count(raw, []byte("\n")); n != refused+changed {
		t.Errorf("%d lines of audit, want %d refused and %d changes:\n%s", n, refused, changed, raw)
	}
	for line := range bytes.Lines(raw) {
		var l struct{ Who, Procedure, Outcome string }
		if err := json.Unmarshal(line, &l); err != nil || !strings.HasSuffix(l.Who, "-person") || l.Procedure == "" || l.Outcome == "" {
			t.Errorf("%v: %s", err, line)
		}
	}
	t.Logf("%d calls, %d refused for lack of rights, %d changes", methods.Len(), refused, changed)
	// The file is read again: who is taken out of it is let in no more.
	if status, _ := e.callAdmin("Status", "read", "{}"); status != http.StatusOK {
		t.Fatal(status)
	}
	if err := os.WriteFile(e.adminTokens, []byte("# nobody\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	e.eventually("the token is refused", func() bool {
		status, _ := e.callAdmin("Status", "read", "{}")
		return status == http.StatusUnauthorized
	})
	if log := e.log.String(); strings.Contains(log, e.secret()) {
		t.Error("the log holds a token")
	}
	if info, err := os.Stat(e.stack.AdminTokenFile()); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("token file: %v %v", info.Mode(), err)
	}
	// In-mesh, records and status are not to be had without a token.
	resp, err := e.client.Post(e.stack.RouterURL()+"/kinference.router.v1.RouterService/Status", "application/json", strings.NewReader("{}"))
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if resp.StatusCode == http.StatusOK {
		t.Error("the router's RPC port tells the status to anybody")
	}
}

// In Kubernetes its users are let in by their tokens, and RBAC says what they may.
func TestAdminAPIInKubernetes(t *testing.T) {
	c := startKube(t, 50)
	c.kubectl(`apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata: { name: unrelated, namespace: test }
rules: [ { apiGroups: [ kinference.buoyant.io ], resources: [ decisions ], verbs: [ get ] } ]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: { name: kinference-workers }
rules: [ { apiGroups: [ kinference.buoyant.io ], resources: [ workers ], verbs: [ get ] } ]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: { name: kinference-workers }
roleRef: { apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: kinference-workers }
subjects: [ { kind: ServiceAccount, namespace: test, name: person } ]
---
apiVersion: v1
kind: ServiceAccount
metadata: { name: person, namespace: test }
`, "apply", "-f", "-")
	token := strings.TrimSpace(c.kubectl("", "-n", "test", "create", "token", "person"))
	c.waitStack()
	c.eventually("RBAC lets the person in", func() bool { status, _ := c.callAdmin("Status", token, "{}"); return status == http.StatusOK })
	for _, x := range []struct {
		method, token string
		want          int
	}{
		{"ListWorkers", token, http.StatusOK}, {"GetCatalog", token, http.StatusForbidden}, {"Explain", token, http.StatusForbidden},
		{"Status", token[:len(token)-8] + "AAAAAAAA", http.StatusUnauthorized}, {"Status", "", http.StatusUnauthorized}, {"GetCatalog", c.secret(), http.StatusOK},
	} {
		if status, text := c.callAdmin(x.method, x.token, "{}"); status != x.want {
			t.Errorf("%s: %d %s, want %d", x.method, status, text, x.want)
		}
	}
	if log := c.log.String(); strings.Contains(log, token) {
		t.Error("the log holds a token")
	}
}

func (e *env) secret() string {
	e.t.Helper()
	raw, err := os.ReadFile(e.stack.AdminTokenFile())
	if err != nil {
		e.t.Fatal(err)
	}
	return strings.TrimSpace(string(raw))
}

// Records stream with filters while requests come and go, over gRPC too. They hold
// what policies look at, and no credential: neither one that a rule reads.
func TestWatchDecisions(t *testing.T) {
	e := start(t, settings{workers: 2})
	e.policy("rules", `
  - name: red
    matches: [ { headers: [ { name: x-team, value: red } ] } ]
    reject: { reason: NotRed }
  - name: nosy
    matches: [ { when: '"authorization" in request.headers && request.headers["authorization"].contains("sk-") || "x-api-token" in request.headers && request.headers["x-api-token"] != ""' } ]
    reject: { reason: Nosy }
  - name: claims
    matches: [ { claims: [ { name: groups, value: refused } ] }, { claims: [ { name: api_token, value: x } ] } ]
    reject: { reason: Claims }
`)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	grpc := rpc.Client(ctx, e.stack.AdminAPIURL(), adminv1connect.NewAdminServiceClient, rpc.Bearer(e.secret()), connect.WithGRPC())
	refused, err := grpc.WatchDecisions(ctx, &adminv1.WatchDecisionsRequest{Action: "reject", Rule: "red"})
	if err != nil {
		t.Fatal(err)
	}
	defer refused.Close()
	over, err := e.admin.WatchDecisions(ctx, &adminv1.WatchDecisionsRequest{Action: "route", Finished: true})
	if err != nil {
		t.Fatal(err)
	}
	defer over.Close()

	send := func(header ...string) (code int, id string) {
		r, err := http.NewRequestWithContext(ctx, http.MethodPost, e.stack.URL()+"/v1/chat/completions", strings.NewReader(req{text: "a prompt that is planted", max: 3, stream: true}.body()))
		if err != nil {
			t.Fatal(err)
		}
		r.Header.Set("Content-Type", "application/json")
		for i := 0; i < len(header); i += 2 {
			r.Header.Set(header[i], header[i+1])
		}
		resp, err := e.client.Do(r)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		_, _ = io.Copy(io.Discard, resp.Body)
		return resp.StatusCode, resp.Header.Get("X-Request-Id")
	}
	code, routed := send("Authorization", "Bearer sk-planted-key")
	if code != http.StatusOK {
		t.Fatalf("routed: %d", code)
	}
	send("X-Api-Token", "planted-token")
	if code, _ := send("X-Team", "red", "Authorization", "Bearer sk-planted-key"); code != http.StatusForbidden {
		t.Fatalf("refused: %d", code)
	}
	if !refused.Receive() {
		t.Fatal(refused.Err())
	}
	d := refused.Msg().Decision
	if d.GetVerdict().GetRule() != "test/rules/red" || d.GetRequest().GetHeaders()["x-team"] != "red" || len(d.GetRequest().GetHeaders()) != 1 || !d.GetRequest().GetHeadersWithheld() {
		t.Errorf("refused: %v", d)
	}
	for d = nil; d.GetRequestId() != routed; d = over.Msg().Decision { // requests of before may end now
		if !over.Receive() {
			t.Fatal(over.Err())
		}
	}
	if d.Outcome == nil || d.ActualTtft == nil || d.ActualE2E == nil || d.GetActualPromptTokens() == 0 || d.GetActualOutputTokens() != 3 || d.GetRequest().GetEndpoint() != "ChatCompletions" {
		t.Errorf("over: %v, %v, %d tokens, %d out", d.ActualTtft, d.ActualE2E, d.GetActualPromptTokens(), d.GetActualOutputTokens())
		t.Logf("outcome %v, %v", d.Outcome, d.GetRequest())
	}
	e.eventually("a record has fresh loads", func() bool {
		d := e.explain(e.chat(req{text: "loads", max: 1}))
		return len(d.Candidates) == 2 && len(d.Candidates[0].Means) > 0
	})

	// Claims come from ingress in the mesh; a rule reads two of these three.
	if _, err := e.route("claims", &routerv1.Attributes{
		Endpoint: "ChatCompletions", Headers: map[string]string{"x-other": "planted"},
		ClaimsJson: `{"sub":"planted-subject","api_token":"planted-claim","groups":["staff"]}`,
	}); err != nil {
		t.Fatal(err)
	}
	if q := e.explain(answer{id: "claims"}).GetRequest(); len(q.GetClaimsJson()) != 1 || q.GetClaimsJson()["groups"] != `["staff"]` || !q.GetClaimsWithheld() || len(q.GetHeaders()) != 0 {
		t.Errorf("claims: %v", q)
	}

	all, err := e.admin.WatchDecisions(ctx, &adminv1.WatchDecisionsRequest{Recent: 1000, OnlyRecent: true})
	if err != nil {
		t.Fatal(err)
	}
	defer all.Close()
	n := 0
	for all.Receive() {
		n++
		if text := all.Msg().String(); strings.Contains(text, "planted") || strings.Contains(text, "sk-") {
			t.Errorf("a record holds a secret or a prompt: %s", text)
		}
	}
	if err := all.Err(); err != nil || n < 4 {
		t.Errorf("%d records: %v", n, err)
	}
	if log := e.log.String(); strings.Contains(log, "planted") {
		t.Error("the log holds a secret or a prompt")
	}
}

// kinfctl runs a built kinfctl against the stack.
func (e *env) kinfctl(bin string, args ...string) (stdout, stderr string, err error) {
	e.t.Helper()
	cmd := exec.CommandContext(e.t.Context(), filepath.Join(bin, "kinfctl"), args...)
	cmd.Env = append(os.Environ(), "KINFERENCE_ADMIN="+e.stack.AdminAPIURL(), "KINFERENCE_ADMIN_TOKEN_FILE="+e.stack.AdminTokenFile())
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	err = cmd.Run()
	return out.String(), errs.String(), err
}

// Every command of kinfctl that asks a running control plane.
func TestKinfctlLive(t *testing.T) {
	bin := build(t, "cmd/kinfctl")
	e := start(t, settings{workers: 2})
	e.cloud()
	e.policy("burst", burst)
	a := e.chat(req{text: words(1, 2000), max: 4})
	e.eventually("it is over", func() bool { return e.explain(a).Outcome != nil })
	request := filepath.Join(t.TempDir(), "request.yaml")
	if err := os.WriteFile(request, []byte("{ model: qwen, promptTokens: 100, maxTokens: 10 }"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		args []string
		want []string
	}{
		{[]string{"status"}, []string{"test.sim.w0/0", "kvtracker followed"}},
		{[]string{"top", "--once"}, []string{"2 of 2 workers ready", "queue", "cache hits", "test.sim.w1/0", "provider test/cloud", "%"}},
		{[]string{"get", "workers"}, []string{"test.sim.w0/0", "test/sim", "yes"}},
		{[]string{"get", "pools"}, []string{"test/default", "sim, cloud", "2 of 2 ready", "burst"}},
		{[]string{"get", "tenants"}, []string{"none"}},
		{[]string{"get", "policies"}, []string{"test/burst", "burst-to-cloud"}},
		{[]string{"explain", a.id}, []string{"rule test/burst/burst-to-cloud: route to", "tokens in", "e2e", "provider test/cloud", "interactive"}},
		{[]string{"explain", "--request", request}, []string{"chosen     test.sim.w", "rule test/burst/burst-to-cloud", "100 tokens, at most 10 out"}},
		{[]string{"decisions", "--recent", "3"}, []string{"by test/burst/burst-to-cloud", a.id}},
		{[]string{"decisions", "--action", "reject"}, nil},
		{[]string{"check"}, []string{"√ answers at", "√ test.sim.w0/0 is ready"}},
	} {
		out, errs, err := e.kinfctl(bin, c.args...)
		if err != nil && c.args[0] != "check" { // what nothing is known of yet may fail it
			t.Errorf("%v: %v %s", c.args, err, errs)
		}
		for _, w := range c.want {
			if !strings.Contains(out, w) {
				t.Errorf("%v lacks %q:\n%s", c.args, w, out)
			}
		}
		if c.want == nil && out != "" {
			t.Errorf("%v: %s", c.args, out)
		}
	}
	// The what-if booked nothing.
	s, err := e.admin.Status(t.Context(), &adminv1.StatusRequest{})
	if err != nil {
		t.Fatal(err)
	}
	for _, w := range s.Workers {
		if w.InFlight != 0 {
			t.Errorf("%s has %d requests", w.Worker, w.InFlight)
		}
	}
}

// Decisions recorded under some policies, decided anew by kinfctl: under the same
// ones nothing changes, under others it says what the stack then really does with
// the same requests.
func TestReplayAgreesWithTheStack(t *testing.T) {
	bin := build(t, "cmd/kinfctl")
	e := start(t, settings{workers: 2})
	e.cloud()
	e.policy("p", `
  - name: teams # reads what the next version reads
    matches: [ { headers: [ { name: x-team, value: nobody } ] } ]
    reject: { reason: Nobody }
  - name: long
    matches: [ { promptTokens: { greaterThan: 400 } } ]
    route: { consider: [ { type: Provider } ] }
  - name: local
    route: { select: [ { type: Local, minimize: PredictedTTFT }, { type: Provider, order: [ cloud ] } ] }
`)
	run := func(prefix string) {
		for i := range 24 {
			r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, e.stack.URL()+"/v1/chat/completions",
				strings.NewReader(req{text: words(i, 100+250*(i%3)), max: 1 + i%2, stream: i%4 == 0}.body()))
			if err != nil {
				t.Fatal(err)
			}
			r.Header.Set("Content-Type", "application/json")
			r.Header.Set("X-Request-Id", fmt.Sprint(prefix, i))
			r.Header.Set("X-Team", []string{"red", "blue"}[i%2])
			resp, err := e.client.Do(r)
			if err != nil {
				t.Fatal(err)
			}
			_, _ = io.Copy(io.Discard, resp.Body)
			resp.Body.Close()
		}
	}
	record := func(prefix string) map[string]*adminv1.Decision {
		out := map[string]*adminv1.Decision{}
		for i := range 24 {
			d := e.explain(answer{id: fmt.Sprint(prefix, i)})
			out[d.RequestId] = d
		}
		return out
	}
	run("a")
	out, errs, err := e.kinfctl(bin, "decisions", "--recent", "24", "-o", "json")
	if err != nil || strings.Count(out, "\n") != 24 {
		t.Fatalf("%v %s: %d lines", err, errs, strings.Count(out, "\n"))
	}
	file := filepath.Join(t.TempDir(), "decisions.jsonl")
	if err := os.WriteFile(file, []byte(out), 0o600); err != nil {
		t.Fatal(err)
	}
	type report struct {
		Decisions, Changed, Compared int
		Changes                      []struct {
			From, To  string
			Decisions int
		}
		Lacks []string
	}
	replay := func() (r report) {
		out, errs, err := e.kinfctl(bin, "replay", "--config", e.dir, "--decisions", file, "-o", "json")
		if err != nil || json.Unmarshal([]byte(out), &r) != nil {
			t.Fatalf("%v %s: %s", err, errs, out)
		}
		return r
	}
	if r := replay(); r.Decisions != 24 || r.Changed != 0 || len(r.Lacks) != 0 {
		t.Errorf("the same policies: %+v", r)
	}
	before := record("a")

	e.policy("p", `
  - name: red-is-refused
    matches: [ { headers: [ { name: x-team, value: red } ], promptTokens: { lessThan: 400 } } ]
    reject: { reason: Red }
  - name: whole-answers-leave
    matches: [ { when: '!request.stream && request.max_tokens > 1' } ]
    route: { consider: [ { type: Provider } ] }
  - name: local
    route: { consider: [ { type: Local } ], select: [ { minimize: PredictedTTFT } ] }
`)
	r := replay()
	run("b")
	after := record("b")
	// What really changed, by where requests go.
	where := func(d *adminv1.Decision) string {
		switch {
		case d.Chosen == "":
			return d.GetVerdict().GetAction()
		case strings.HasPrefix(d.Chosen, "provider "):
			return d.Chosen
		}
		return "test/sim"
	}
	want := map[string]int{}
	for i := range 24 {
		if from, to := where(before[fmt.Sprint("a", i)]), where(after[fmt.Sprint("b", i)]); from != to {
			want[from+" > "+to]++
		}
	}
	got := map[string]int{}
	for _, c := range r.Changes {
		if c.From != c.To { // from worker to worker: both depend on what was sent before
			got[c.From+" > "+c.To] += c.Decisions
		}
	}
	if len(want) < 3 || fmt.Sprint(got) != fmt.Sprint(want) || len(r.Lacks) != 0 {
		t.Errorf("replay says %v, the stack did %v; %v", got, want, r.Lacks)
	}
	t.Logf("of 24 decisions %d change: %v", r.Changed, want)
}
