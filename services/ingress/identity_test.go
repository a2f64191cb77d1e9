package ingress_test

import (
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/kinference/kinference/internal/apikey"
	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
	"github.com/kinference/kinference/services/ingress"
)

// guarded is an ingress with a GatewayBackend at /llm that offers the model chat to
// the tenant ns/team, with its key.
func guarded(t *testing.T, change func(*ingress.Config, *routerv1.Catalog)) (e *env, key string) {
	t.Helper()
	key, id := apikey.New()
	sum := apikey.Hash(key)
	e = start(t, func(c *ingress.Config, m *routerv1.Catalog) {
		m.Guarded = true
		m.Pools = []*routerv1.Pool{{Name: "ns/small", Models: []*routerv1.Model{{Name: "chat", Root: "base-model", Profiles: []string{"p"}, MaxModelLen: 4096, Ready: true}}}}
		m.Backends = []*routerv1.Backend{{
			Name: "ns/public", PathPrefix: "/llm", Pool: "ns/small", ApiKeys: true, DefaultQos: "batch", MaxBody: 4 << 10, MaxHeader: 2 << 10,
			IdleTimeout: durationpb.New(500 * time.Millisecond), TotalTimeout: durationpb.New(time.Minute),
		}}
		m.Tenants = []*routerv1.Tenant{{Name: "ns/acme"}, {Name: "ns/team", Parent: "ns/acme", CacheScope: "Tenant", Keys: []*routerv1.Key{{Id: id, Sha256: sum[:], User: "alice"}}}}
		if change != nil {
			change(c, m)
		}
	}).ready()
	return e, "Bearer " + key
}

// What the caller is goes to the router, and what the client claims nowhere; the
// engine gets the tenant's salt in the place of the client's.
func TestCallerDecides(t *testing.T) {
	e, key := guarded(t, nil)
	var mu sync.Mutex
	var body string
	var header http.Header
	e.router.routes(newWorker(t, "w", func(w http.ResponseWriter, r *http.Request) {
		raw, _ := io.ReadAll(r.Body)
		mu.Lock()
		body, header = string(raw), r.Header.Clone()
		mu.Unlock()
		answers(roleChunk(), textChunk("hi"), stopChunk, usageChunk, doneEvent)(w, r)
	}))
	resp, text := e.post("/llm"+chatPath, chatRequest(true, `,"cache_salt":"mine"`), "Authorization", key, "X-Tenant", "ns/other", "X-Kinference-Qos", "interactive")
	if resp.StatusCode != http.StatusOK {
		t.Fatal(resp.StatusCode, text)
	}
	r := e.router.routed()[0]
	if r.Tenant != "ns/team" || r.Pool != "ns/small" || strings.Join(r.Attributes.Tenants, " ") != "team acme" || r.Attributes.Qos != "batch" {
		t.Errorf("routed as %q in %q: %v", r.Tenant, r.Pool, r.Attributes)
	}
	mu.Lock()
	defer mu.Unlock()
	if strings.Contains(body, "mine") || strings.Count(body, `"cache_salt":"`) != 1 {
		t.Errorf("the engine got %s", body)
	}
	for name := range header {
		if strings.HasPrefix(name, "X-Tenant") || strings.HasPrefix(name, "X-Kinference") || name == "Authorization" {
			t.Errorf("the engine got %s", name)
		}
	}
}

// A backend offers what its pool has, at its path, and holds its bounds.
func TestBackendHolds(t *testing.T) {
	e, key := guarded(t, nil)
	e.router.routes(newWorker(t, "w", func(w http.ResponseWriter, r *http.Request) {
		answers(roleChunk(), textChunk("hi"))(w, r)
		w.(http.Flusher).Flush()
		<-r.Context().Done()
	}))
	status := func(what string, want int, code string, resp *http.Response, text string) {
		t.Helper()
		if resp.StatusCode != want || !strings.Contains(text, code) {
			t.Errorf("%s: %d %s, want %d %s", what, resp.StatusCode, text, want, code)
		}
	}
	post := func(path, body string, header ...string) (*http.Response, string) {
		t.Helper()
		return e.post(path, body, append([]string{"Authorization", key}, header...)...)
	}
	resp, text := post("/llm"+chatPath, strings.Replace(chatRequest(false, ""), `"chat"`, `"base-model"`, 1))
	status("model of another pool", 404, "model_not_found", resp, text)
	resp, text = post(chatPath, chatRequest(false, ""))
	status("without the prefix", 404, "unknown_url", resp, text)
	resp, text = post("/llm"+chatPath, chatRequest(false, `,"x":"`+strings.Repeat("x", 5000)+`"`))
	status("long body", 413, "request_too_large", resp, text)
	resp, text = post("/llm"+chatPath, chatRequest(false, ""), "X-Long", strings.Repeat("x", 3000))
	status("long headers", 431, "headers_too_large", resp, text)
	resp, text = post("/llm"+chatPath, chatRequest(true, ""))
	status("silent stream", 200, `"error"`, resp, text)
	req, err := http.NewRequest(http.MethodGet, e.url+"/llm/v1/models", nil)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Authorization", key)
	models, err := e.client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer models.Body.Close()
	list, _ := io.ReadAll(models.Body)
	if !strings.Contains(string(list), `"chat"`) || strings.Contains(string(list), `"id":"base-model"`) || strings.Contains(string(list), `"sql"`) {
		t.Errorf("models %s", list)
	}
}

// Each dialect has its own form for a refusal, and none reads the body first.
func TestRefusals(t *testing.T) {
	e, _ := guarded(t, nil)
	resp, text := e.post("/llm"+chatPath, "this is no JSON", "Authorization", "Bearer kin_x")
	if resp.StatusCode != 401 || resp.Header.Get("Www-Authenticate") == "" || !strings.Contains(text, `"type":"authentication_error"`) || !strings.Contains(text, `"code":"invalid_api_key"`) {
		t.Errorf("%d %v %s", resp.StatusCode, resp.Header, text)
	}
	resp, text = e.post("/llm/v1/messages", "this is no JSON", "X-Api-Key", "kin_x", "Anthropic-Version", "2023-06-01")
	if resp.StatusCode != 401 || !strings.HasPrefix(text, `{"type":"error"`) || !strings.Contains(text, "authentication_error") {
		t.Errorf("%d %s", resp.StatusCode, text)
	}
	if m := e.metrics(); !strings.Contains(m, `reason="malformed"`) {
		t.Error("the reason is not counted")
	}
}

// One that is required and not there serves nobody.
func TestRequireBackend(t *testing.T) {
	e := start(t, func(c *ingress.Config, _ *routerv1.Catalog) { c.RequireBackend = true }).ready()
	if resp, text := e.post(chatPath, chatRequest(false, "")); resp.StatusCode != 404 {
		t.Errorf("%d %s", resp.StatusCode, text)
	}
}
