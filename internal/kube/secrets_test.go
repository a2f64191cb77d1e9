package kube_test

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/kinference/kinference/internal/apikey"
	"github.com/kinference/kinference/internal/kube"
	"github.com/kinference/kinference/internal/kube/review"
	"github.com/kinference/kinference/internal/resources"
)

func secretObject(name string, labels map[string]any, entries map[string]string) *unstructured.Unstructured {
	data := map[string]any{}
	for id, text := range entries {
		data[id] = base64.StdEncoding.EncodeToString([]byte(text))
	}
	return &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "v1", "kind": "Secret", "type": "Opaque", "metadata": map[string]any{"name": name, "labels": labels}, "data": data,
	}}
}

// Records are read of Secrets with the label only, and a change is known within
// seconds. The status counts keys, and names the Secret that is not there.
func testKeys(t *testing.T, c *cluster) {
	ns := c.namespace(t, "keys")
	secrets := c.admin.Resource(secretsGVR).Namespace(ns)
	r := c.router(t, "kinference-router", "a")
	c.must(t, ns, `
apiVersion: kinference.buoyant.io/v1alpha1
kind: InferenceTenant
metadata: { name: team }
spec: { identities: [ { apiKeySecretRef: { name: team-keys } } ] }
---
apiVersion: kinference.buoyant.io/v1alpha1
kind: GatewayBackend
metadata: { name: public }
spec: { hostnames: [ keys.example.com ], poolRef: { name: default } }
`)
	key, id := apikey.New()
	record := apikey.Record{ID: id, SHA256: apikey.Hash(key), User: "alice"}
	keys := func() []apikey.Record {
		catalog, _ := r.now()
		if catalog == nil {
			return nil
		}
		for _, tenant := range catalog.Tenants {
			if tenant.Name == ns+"/team" {
				return tenant.Keys
			}
		}
		return nil
	}
	tenants := kube.KindOf("InferenceTenant").Resource
	status := func(name string, gvr schema.GroupVersionResource, want string) func() bool {
		return func() bool {
			brief, fields := c.conditions(t, gvr, ns, name)
			return strings.Contains(brief+fmt.Sprint(fields), want)
		}
	}
	eventually(t, "the missing Secret to be named", status("team", tenants, `ResolvedRefs=False RefNotFound: spec.identities[0].apiKeySecretRef.name: there is no Secret "team-keys"`))

	// Without the label it stays unread.
	made, err := secrets.Create(t.Context(), secretObject("team-keys", nil, map[string]string{id: string(record.Encode())}), metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	c.must(t, ns, strings.Replace(set, "name: m", "name: marker", 1))
	eventually(t, "what came later", func() bool { catalog, _ := r.now(); return catalog != nil && catalog.Models["marker"] != nil })
	if len(keys()) != 0 {
		t.Error("a Secret without the label was read")
	}
	made.SetLabels(map[string]string{apikey.Label: "true"})
	if made, err = secrets.Update(t.Context(), made, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the key", func() bool { k := keys(); return len(k) == 1 && k[0].User == "alice" })
	eventually(t, "the count", status("team", tenants, "apiKeys:1"))
	eventually(t, "the reference", status("team", tenants, "ResolvedRefs=True"))
	eventually(t, "the backend's count", status("public", kube.KindOf("GatewayBackend").Resource, "tenants:1"))

	record.Revoked = time.Now()
	if err := unstructured.SetNestedField(made.Object, base64.StdEncoding.EncodeToString(record.Encode()), "data", id); err != nil {
		t.Fatal(err)
	}
	start := time.Now()
	if made, err = secrets.Update(t.Context(), made, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the revocation", func() bool { k := keys(); return len(k) == 1 && !k[0].Revoked.IsZero() })
	t.Logf("revoked %v after the Secret was changed", time.Since(start).Round(time.Millisecond))

	// What is no record is said and shown nowhere.
	if err := unstructured.SetNestedField(made.Object, base64.StdEncoding.EncodeToString([]byte("hunter2")), "data", "password"); err != nil {
		t.Fatal(err)
	}
	if _, err = secrets.Update(t.Context(), made, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "what is wrong", status("team", tenants, `entry "password"`))
	if brief, _ := c.conditions(t, tenants, ns, "team"); strings.Contains(brief, "hunter2") || strings.Contains(brief, key) {
		t.Error(brief)
	}
}

// The router writes records: into a Secret that it makes, of several writers at once
// all, and not into one of somebody else.
func testWriteKeys(t *testing.T, c *cluster) {
	ns := c.namespace(t, "write-keys")
	client, err := kube.Client(c.config(t, "kinference-router"))
	if err != nil {
		t.Fatal(err)
	}
	r := c.router(t, "kinference-router", "a")
	c.must(t, ns, `
apiVersion: kinference.buoyant.io/v1alpha1
kind: InferenceTenant
metadata: { name: team }
spec: { identities: [ { apiKeySecretRef: { name: team-keys } } ] }
`)
	tenant := func() *resources.Tenant {
		catalog, _ := r.now()
		if catalog == nil {
			return nil
		}
		return catalog.TenantNamed(ns + "/team")
	}
	eventually(t, "the tenant", func() bool { return tenant() != nil })
	w := &kube.KeySecrets{Client: client}
	var wg sync.WaitGroup
	for range 6 {
		wg.Go(func() {
			key, secret, made, err := resources.CreateKey(t.Context(), w, tenant(), apikey.Record{User: "u", Created: time.Now()}, time.Hour)
			if err != nil || secret != "team-keys" || made.SHA256 != apikey.Hash(key) {
				t.Errorf("%s %+v: %v", secret, made, err)
			}
		})
	}
	wg.Wait()
	eventually(t, "all keys", func() bool { return len(tenant().Keys) == 6 })
	id := tenant().Keys[3].ID
	if _, revoked, err := resources.RevokeKey(t.Context(), w, tenant(), id, time.Now()); err != nil || revoked.Revoked.IsZero() {
		t.Errorf("%+v: %v", revoked, err)
	}
	eventually(t, "the revocation", func() bool { return !tenant().Keys[3].Revoked.IsZero() && tenant().Keys[2].Revoked.IsZero() })

	if _, err := c.admin.Resource(secretsGVR).Namespace(ns).Create(t.Context(), secretObject("password", nil, nil), metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	err = w.Put(t.Context(), ns, "password", func([]apikey.Record) (apikey.Record, error) { return tenant().Keys[0], nil })
	if !errors.Is(err, resources.ErrNotOurs) {
		t.Errorf("a Secret without the label: %v", err)
	}
}

func (c *cluster) reviewer(t *testing.T, account string) *review.Client {
	t.Helper()
	client, err := kube.Client(c.config(t, account))
	if err != nil {
		t.Fatal(err)
	}
	return review.New(client)
}

// The API tells whose a token is, and takes none that was made for others.
func testTokens(t *testing.T, c *cluster) {
	ns := c.namespace(t, "tokens")
	reviewer := c.reviewer(t, "kinference-router")
	accounts := c.admin.Resource(schema.GroupVersionResource{Version: "v1", Resource: "serviceaccounts"}).Namespace(ns)
	account := &unstructured.Unstructured{Object: map[string]any{"apiVersion": "v1", "kind": "ServiceAccount", "metadata": map[string]any{"name": "frontend"}}}
	if _, err := accounts.Create(t.Context(), account, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	token := func(audience string) string {
		request := &unstructured.Unstructured{Object: map[string]any{
			"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "metadata": map[string]any{"name": "frontend"},
			"spec": map[string]any{"audiences": []any{audience}, "expirationSeconds": int64(600)},
		}}
		answer, err := accounts.Create(t.Context(), request, metav1.CreateOptions{}, "token")
		if err != nil {
			t.Fatal(err)
		}
		text, _, _ := unstructured.NestedString(answer.Object, "status", "token")
		return text
	}
	good := token("kinference")
	namespace, name, ok, err := reviewer.Account(t.Context(), good, "kinference")
	if err != nil || !ok || namespace != ns || name != "frontend" {
		t.Errorf("%s/%s, %v, %v", namespace, name, ok, err)
	}
	for what, bad := range map[string]string{"other audience": token("elsewhere"), "changed": good[:len(good)-4] + "AAAA", "nonsense": "a.b.c"} {
		if _, _, ok, err := reviewer.Account(t.Context(), bad, "kinference"); ok || err != nil {
			t.Errorf("%s: %v, %v", what, ok, err)
		}
	}
	nobody := c.reviewer(t, "no-rights")
	if _, _, ok, err := nobody.Account(t.Context(), good, "kinference"); ok || err == nil || strings.Contains(err.Error(), good) || !strings.Contains(err.Error(), "tokenreviews") {
		t.Errorf("without the right: %v, %v", ok, err)
	}
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	if _, _, ok, err := reviewer.Account(gone, good, "kinference"); ok || err == nil || strings.Contains(err.Error(), good) {
		t.Errorf("without an answer: %v, %v", ok, err)
	}
}
