package acceptance

import (
	"context"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/kinference/kinference/internal/fleetsim"
	"github.com/kinference/kinference/internal/fleetsim/engine"
	adminv1 "github.com/kinference/kinference/proto/gen/kinference/admin/v1"
)

// In a cluster a workload is known by its ServiceAccount's token, which the API
// reviews, and keys are records in a Secret that the router writes; a key that is
// revoked, or whose Secret is deleted, is of no use within seconds.
func TestCallersInKubernetes(t *testing.T) {
	e := startKube(t, 50)
	w, err := fleetsim.Start(context.Background(), fleetsim.Config{Name: "w0", Profile: engine.L40SPlain16, TimeScale: 50, Seed: 1, Model: modelName})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(w.Kill)
	e.workers = []*fleetsim.Worker{w}
	e.kubectl(e.workerSet("")+`---
apiVersion: kinference.buoyant.io/v1alpha1
kind: InferenceTenant
metadata: { name: search, namespace: test }
spec: { identities: [ { apiKeySecretRef: { name: search-keys } }, { serviceAccount: { namespace: apps, name: frontend } } ] }
`, "apply", "-f", "-")
	e.waitReady(1)
	e.kubectl("", "create", "namespace", "apps")
	e.kubectl("", "-n", "apps", "create", "serviceaccount", "frontend")
	e.kubectl("", "-n", "apps", "create", "serviceaccount", "other")
	token := func(account, audience string) string {
		return strings.TrimSpace(e.kubectl("", "-n", "apps", "create", "token", account, "--audience", audience, "--duration", "10m"))
	}
	e.kubectl(`apiVersion: kinference.buoyant.io/v1alpha1
kind: GatewayBackend
metadata: { name: public, namespace: test }
spec: { pathPrefix: /llm, poolRef: { name: default }, authentication: { apiKeys: {}, serviceAccounts: {} } }
`, "apply", "-f", "-")
	hi := req{text: "hi", max: 1}
	e.eventually("the gateway is closed", func() bool { return e.chat(hi).status == http.StatusNotFound })

	good := token("frontend", "kinference")
	a := e.as(good, hi)
	if a.status != http.StatusOK {
		t.Fatalf("token of a ServiceAccount: %d %s", a.status, a.body)
	}
	if d := e.explain(a); d.Tenant != "test/search" {
		t.Errorf("tenant %q", d.Tenant)
	}
	for what, c := range map[string]struct {
		token string
		want  int
	}{
		"for the API server": {token("frontend", "https://kubernetes.default.svc"), http.StatusUnauthorized},
		"changed":            {good[:len(good)-8] + "AAAAAAAA", http.StatusUnauthorized},
		"of no tenant":       {token("other", "kinference"), http.StatusForbidden},
	} {
		if a := e.as(c.token, hi); a.status != c.want {
			t.Errorf("token %s: %d %s, want %d", what, a.status, a.body, c.want)
		}
	}

	key, id := e.newKey("search", "alice")
	e.eventually("the key is good", func() bool { return e.as(key, hi).status == http.StatusOK })
	e.eventually("the tenant counts it", func() bool { return e.status("inferencetenant/search", "{.status.apiKeys}") == "1" })
	if got := e.status("secret/search-keys", "{.data}"); strings.Contains(got, key) || !strings.Contains(got, id) {
		t.Errorf("secret %s", got)
	}
	start := time.Now()
	if _, err := e.admin.RevokeKey(t.Context(), &adminv1.RevokeKeyRequest{Id: id, Tenant: "test/search"}); err != nil {
		t.Fatal(err)
	}
	e.eventually("the revoked key is of no use", func() bool { return e.as(key, hi).status == http.StatusUnauthorized })
	t.Logf("revoked after %v", time.Since(start).Round(time.Millisecond))
	second, _ := e.newKey("search", "")
	e.eventually("the second key is good", func() bool { return e.as(second, hi).status == http.StatusOK })
	start = time.Now()
	e.kubectl("", "-n", "test", "delete", "secret", "search-keys")
	e.eventually("a key without a Secret is of no use", func() bool { return e.as(second, hi).status == http.StatusUnauthorized })
	t.Logf("gone with its Secret after %v", time.Since(start).Round(time.Millisecond))
	for name, text := range map[string]string{"log": e.log.String(), "metrics": e.metrics()} {
		for _, credential := range []string{key, second, good} {
			if strings.Contains(text, credential) {
				t.Errorf("%s: a credential is in it", name)
			}
		}
	}
}
