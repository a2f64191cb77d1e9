package acceptance

import (
	"crypto"
	"crypto/rand"
	"crypto/rsa"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"math/big"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"go.opentelemetry.io/otel/sdk/trace/tracetest"

	adminv1 "github.com/kinference/kinference/proto/gen/kinference/admin/v1"
)

// guardedFile exposes the fleet to tenants with keys, and with tokens of an issuer.
func guardedFile(issuer string) string {
	tenant := func(name, spec string) string {
		return fmt.Sprintf("---\napiVersion: kinference.buoyant.io/v1alpha1\nkind: InferenceTenant\nmetadata: { name: %s, namespace: test }\n"+
			"spec: { parentRef: { name: acme }, identities: [ { apiKeySecretRef: { name: %s-keys } }, { claim: { issuer: %q, name: org, value: %s } } ]%s }\n", name, name, issuer, name, spec)
	}
	return fmt.Sprintf(`apiVersion: kinference.buoyant.io/v1alpha1
kind: GatewayBackend
metadata: { name: public, namespace: test }
spec:
  hostnames: [ 127.0.0.1, "*.example.com" ]
  pathPrefix: /llm
  poolRef: { name: default }
  limits: { body: 64Ki }
  authentication:
    apiKeys: {}
    jwt: [ { issuer: %q, audiences: [ kinference ], jwksURI: %q, tenantClaim: org } ]
---
apiVersion: kinference.buoyant.io/v1alpha1
kind: InferenceTenant
metadata: { name: acme, namespace: test }
spec: { qos: batch }
`, issuer, issuer+"/jwks") + tenant("search", "") + tenant("ads", "") + tenant("one", ", cache: { scope: 'Shared:docs' }") +
		tenant("two", ", cache: { scope: 'Shared:docs' }") + tenant("people", ", cache: { scope: User }")
}

// newKey makes a key through the admin API, as kinfctl keys create does.
func (e *env) newKey(tenant, user string) (key, id string) {
	e.t.Helper()
	resp, err := e.admin.CreateKey(e.t.Context(), &adminv1.CreateKeyRequest{Tenant: "test/" + tenant, User: user})
	if err != nil || !resp.InForce {
		e.t.Fatalf("create key: in force %v, %v", resp.GetInForce(), err)
	}
	return resp.Key, resp.Record.Id
}

// as sends a chat with headers in pairs, and waits until ingress knows the key.
func (e *env) as(key string, r req, header ...string) answer {
	e.t.Helper()
	return e.send("/llm/v1/chat/completions", r.body(), append([]string{"Authorization", "Bearer " + key}, header...)...)
}

func (e *env) send(path, body string, header ...string) answer {
	e.t.Helper()
	hr, err := http.NewRequestWithContext(e.t.Context(), http.MethodPost, e.stack.URL()+path, strings.NewReader(body))
	if err != nil {
		e.t.Fatal(err)
	}
	if body == "" {
		hr.Method = http.MethodGet
	}
	hr.Header.Set("Content-Type", "application/json")
	for i := 0; i < len(header); i += 2 {
		if header[i] == "Host" {
			hr.Host = header[i+1]
			continue
		}
		hr.Header.Add(header[i], header[i+1])
	}
	resp, err := e.client.Do(hr)
	if err != nil {
		return answer{err: err}
	}
	defer resp.Body.Close()
	raw, err := io.ReadAll(resp.Body)
	a := answer{status: resp.StatusCode, id: resp.Header.Get("X-Request-Id"), header: resp.Header, body: string(raw), err: err}
	var usage struct{ Usage json.RawMessage }
	if json.Unmarshal(raw, &usage) == nil && len(usage.Usage) > 0 {
		_ = json.Unmarshal(usage.Usage, &a.usage)
	}
	return a
}

// idp is an issuer of tokens.
type idp struct {
	*httptest.Server
	key *rsa.PrivateKey
}

func newIDP(t *testing.T) *idp {
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		t.Fatal(err)
	}
	i := &idp{key: key}
	i.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprintf(w, `{"keys":[{"kty":"RSA","kid":"k","use":"sig","alg":"RS256","n":%q,"e":%q}]}`,
			base64.RawURLEncoding.EncodeToString(key.N.Bytes()), base64.RawURLEncoding.EncodeToString(big.NewInt(int64(key.E)).Bytes()))
	}))
	t.Cleanup(i.Close)
	return i
}

func (i *idp) token(t *testing.T, org string) string {
	t.Helper()
	claims := fmt.Sprintf(`{"iss":%q,"sub":"carol","aud":"kinference","org":%q,"exp":%d}`, i.URL, org, time.Now().Add(time.Hour).Unix())
	text := base64.RawURLEncoding.EncodeToString([]byte(`{"alg":"RS256","kid":"k"}`)) + "." + base64.RawURLEncoding.EncodeToString([]byte(claims))
	sum := sha256.Sum256([]byte(text))
	signature, err := rsa.SignPKCS1v15(rand.Reader, i.key, crypto.SHA256, sum[:])
	if err != nil {
		t.Fatal(err)
	}
	return text + "." + base64.RawURLEncoding.EncodeToString(signature)
}

// Without a GatewayBackend everybody is served; with one only its callers are, as
// who they are and not as who they say they are, until their key is revoked. No
// credential gets anywhere.
func TestOnlyKnownCallersAreServed(t *testing.T) {
	spans := tracetest.NewInMemoryExporter()
	audit, data := filepath.Join(t.TempDir(), "audit"), t.TempDir()
	e := start(t, settings{workers: 1, spans: spans, adminAudit: audit, data: data})
	if a := e.chat(req{text: "open"}); a.status != http.StatusOK {
		t.Fatalf("open: %d %s", a.status, a.body)
	}
	issuer := newIDP(t)
	e.reload("guarded.yaml", guardedFile(issuer.URL))
	key, id := e.newKey("search", "alice")
	other, _ := e.newKey("ads", "")
	token := issuer.token(t, "ads")
	hi := req{text: "hi"}
	e.eventually("ingress knows the keys", func() bool { return e.as(key, hi).status == http.StatusOK && e.as(other, hi).status == http.StatusOK })

	is := func(a answer, tenant string) {
		t.Helper()
		if a.status != http.StatusOK {
			t.Fatalf("%d %s", a.status, a.body)
		}
		d := e.explain(a)
		if d.Tenant != "test/"+tenant || strings.Join(d.Request.Tenants, " ") != tenant+" acme" || d.Request.Qos != "batch" {
			t.Errorf("tenant %s, tenants %v, qos %s; want %s", d.Tenant, d.Request.Tenants, d.Request.Qos, tenant)
		}
	}
	is(e.as(key, hi), "search")
	is(e.as(token, hi), "ads")
	is(e.send("/llm/v1/chat/completions", hi.body(), "X-Api-Key", other), "ads")
	is(e.as(key, hi, "X-Tenant-Id", "ads", "X-Kinference-Tenant", "test/ads", "X-Kinference-Qos", "interactive", "X-Forwarded-User", "root", "L5d-Client-Id", "x"), "search")
	if a := e.as(key, hi, "X-Kinference-Qos", "deferrable"); e.explain(a).Request.Qos != "deferrable" {
		t.Error("a client may ask for less")
	}
	var bodies []string
	refused := func(what string, a answer, status int, code string) {
		t.Helper()
		bodies = append(bodies, a.body+fmt.Sprint(a.header))
		if a.status != status || a.errorBody().Code == nil || *a.errorBody().Code != code {
			t.Errorf("%s: %d %s, want %d %s", what, a.status, a.body, status, code)
		}
	}
	unknown := key[:len(key)-1] + "!"
	refused("no credential", e.send("/llm/v1/chat/completions", hi.body()), 401, "missing_api_key")
	refused("no key", e.as(unknown, hi), 401, "invalid_api_key")
	refused("both", e.as(key, hi, "X-Api-Key", other), 401, "invalid_api_key")
	refused("twice", e.as(key, hi, "Authorization", "Bearer "+key), 400, "duplicate_credentials")
	refused("forged", e.as(token[:len(token)-8]+"AAAAAAAA", hi), 401, "invalid_api_key")
	refused("another organisation", e.as(issuer.token(t, "unknown"), hi), 403, "no_tenant")
	refused("smuggled", e.as(key, hi, "Connection", "Authorization"), 401, "missing_api_key")
	refused("no prefix", e.send("/v1/chat/completions", hi.body(), "Authorization", "Bearer "+key), 404, "unknown_url")
	refused("other host", e.as(key, hi, "Host", "elsewhere.example.org"), 404, "unknown_url")
	refused("long body", e.as(key, req{text: strings.Repeat("x", 70_000)}), 413, "request_too_large")
	refused("models without a key", e.send("/llm/v1/models", ""), 401, "missing_api_key")
	if a := e.send("/llm/v1/models", "", "Authorization", "Bearer "+key); a.status != http.StatusOK || !strings.Contains(a.body, modelName) {
		t.Errorf("models: %d %s", a.status, a.body)
	}
	if a := e.as(key, hi, "Host", "llm.example.com:443"); a.status != http.StatusOK {
		t.Errorf("host with a star: %d", a.status)
	}

	start := time.Now()
	if resp, err := e.admin.RevokeKey(t.Context(), &adminv1.RevokeKeyRequest{Id: id}); err != nil || !resp.InForce || resp.Record.RevokedUnix == 0 {
		t.Fatalf("revoke: %v, %v", resp, err)
	}
	e.eventually("the key is of no use", func() bool { return e.as(key, hi).status == http.StatusUnauthorized })
	took := time.Since(start)
	t.Logf("revoked at every door after %v", took.Round(time.Millisecond))
	if took > 5*time.Second {
		t.Log("SLOW: that is more than 5 s")
	}
	is(e.as(other, hi), "ads")
	list, err := e.admin.ListKeys(t.Context(), &adminv1.ListKeysRequest{})
	if err != nil || len(list.Keys) != 2 {
		t.Fatalf("%v, %v", list, err)
	}

	// Nothing that came out of all this has a credential in it.
	decisions := fmt.Sprint(list)
	for _, a := range []answer{e.as(other, hi), e.as(token, hi)} {
		d, err := json.Marshal(e.explain(a))
		if err != nil {
			t.Fatal(err)
		}
		decisions += string(d)
	}
	e.eventually("spans are exported", func() bool {
		return slices.ContainsFunc(spans.GetSpans(), func(s tracetest.SpanStub) bool { return strings.Contains(s.Name, "chat") })
	})
	traces := ""
	for _, s := range spans.GetSpans() {
		traces += fmt.Sprint(s.Name, s.Attributes, s.Events, s.Status)
	}
	audited, err := os.ReadFile(audit)
	if err != nil {
		t.Fatal(err)
	}
	files := everyFile(t, e.dir)
	for name, text := range map[string]string{
		"log": e.log.String(), "metrics": e.metrics(), "traces": traces, "decisions": decisions, "answers": strings.Join(bodies, "\n"), "resources": files, "data": everyFile(t, data), "worker": e.workerRequests(), "audit": string(audited),
	} {
		if text == "" {
			t.Errorf("%s: nothing to look at", name)
		}
		for _, credential := range []string{key, other, token, key[17:60], other[17:60], token[len(token)-300:]} {
			if strings.Contains(text, credential) {
				t.Errorf("%s: a credential is in it", name)
			}
		}
	}
	if !strings.Contains(e.metrics(), `method="api_key"`) || !strings.Contains(e.metrics(), `reason="revoked"`) {
		t.Error("metrics do not say how callers are known")
	}
	if strings.Count(e.log.String(), "the gateway is open to everybody") != 1 {
		t.Error("that the gateway was open is not said once")
	}
}

// everyFile is the content of all files of a folder.
func everyFile(t *testing.T, dir string) string {
	t.Helper()
	var b strings.Builder
	err := filepath.WalkDir(dir, func(path string, f os.DirEntry, err error) error {
		if err != nil || !f.Type().IsRegular() {
			return nil // gone meanwhile
		}
		data, err := os.ReadFile(path)
		b.Write(data)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return b.String()
}

// Two tenants share no prefix-cache hit, whatever salt they send; those of one
// group do, and users of a tenant that keeps them apart do not.
func TestTenantsShareNoCacheHits(t *testing.T) {
	e := start(t, settings{workers: 1})
	issuer := newIDP(t)
	e.reload("guarded.yaml", guardedFile(issuer.URL))
	keys := map[string]string{}
	for _, who := range []string{"search", "ads", "one", "two", "people alice", "people bob"} {
		tenant, user, _ := strings.Cut(who, " ")
		keys[who], _ = e.newKey(tenant, user)
	}
	e.eventually("ingress knows the keys", func() bool {
		return !slices.ContainsFunc([]string{"search", "ads", "one", "two", "people alice", "people bob"}, func(who string) bool {
			return e.as(keys[who], req{text: "hello " + who}).status != http.StatusOK
		})
	})
	prefix := words(1, 1500)
	cached := func(who, extra string) int {
		t.Helper()
		a := e.as(keys[who], req{text: prefix, max: 1, extra: extra})
		if a.status != http.StatusOK {
			t.Fatalf("%s: %d %s", who, a.status, a.body)
		}
		return a.usage.Details.Cached
	}
	for _, step := range []struct {
		who, extra string
		hits       bool
	}{
		{"search", "", false}, {"search", "", true}, {"ads", "", false}, {"ads", `,"cache_salt":"test/search"`, true}, {"search", `,"cache_salt":"another"`, true},
		{"one", "", false}, {"two", "", true}, {"people alice", "", false}, {"people bob", "", false}, {"people alice", "", true},
	} {
		if n := cached(step.who, step.extra); (n >= 1400) != step.hits || !step.hits && n > 100 {
			t.Errorf("%s%s: %d tokens were cached, want hits %v", step.who, step.extra, n, step.hits)
		}
	}
	// The index has the same salts: it expects of each tenant what the engine has.
	e.eventually("the index knows the prefix of the tenant", func() bool {
		a := e.as(keys["ads"], req{text: prefix, max: 1})
		d := e.explain(a)
		return len(d.Candidates) == 1 && d.Candidates[0].MatchedTokens >= 1400
	})
	fresh, _ := e.newKey("search", "")
	e.eventually("ingress knows the new key", func() bool { return e.as(fresh, req{text: "hello"}).status == http.StatusOK })
	if a := e.as(fresh, req{text: prefix, max: 1}); a.usage.Details.Cached < 1400 {
		t.Errorf("keys of one tenant share its cache: %d tokens", a.usage.Details.Cached)
	}
}
