package credential

import (
	"encoding/pem"
	"fmt"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"
)

// A labelled Secret is read by name, read again when it may have changed, used
// for a while when the API is away and not a moment longer when it is gone.
func TestKubernetes(t *testing.T) {
	var mu sync.Mutex
	key, label, status, asked := "first", "true", 200, 0
	set := func(f func()) { mu.Lock(); defer mu.Unlock(); f() }
	api := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		asked++
		if r.Method != http.MethodGet || r.URL.Path != "/api/v1/namespaces/ns/secrets/paid" || r.Header.Get("Authorization") != "Bearer pod-token" {
			w.WriteHeader(http.StatusForbidden)
			return
		}
		w.WriteHeader(status)
		fmt.Fprintf(w, `{"kind":"Secret","metadata":{"labels":{%q:%q}},"data":{"apiKey":%q,"other":"eA=="}}`, Label, label, map[string]string{"first": "Zmlyc3QK", "second": "c2Vjb25k"}[key])
	}))
	defer api.Close()
	folder := t.TempDir()
	write(t, filepath.Join(folder, "token"), "pod-token\n")
	write(t, filepath.Join(folder, "ca.crt"), string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: api.Certificate().Raw})))
	k, err := newKubernetes(api.URL, folder)
	if err != nil {
		t.Fatal(err)
	}
	defer k.Close()
	at := time.Unix(1000, 0)
	k.now = func() time.Time { return at }
	get := func() string {
		c, err := k.Secret(t.Context(), "ns/paid")
		if err != nil {
			return err.Error()
		}
		return c.APIKey
	}
	for range 3 {
		if got := get(); got != "first" {
			t.Fatal(got)
		}
	}
	if asked != 1 {
		t.Errorf("asked %d times", asked)
	}
	set(func() { key = "second" })
	at = at.Add(readAgain)
	if got := get(); got != "second" {
		t.Error(got)
	}
	set(func() { status = 503 })
	at = at.Add(readAgain)
	if got := get(); got != "second" {
		t.Error("while the API is away: " + got)
	}
	at = at.Add(stale)
	if got := get(); !strings.Contains(got, "503") {
		t.Error("long after it went away: " + got)
	}
	set(func() { status = 200 })
	at = at.Add(readAgain)
	if got := get(); got != "second" {
		t.Error(got)
	}
	set(func() { status = 404 })
	at = at.Add(readAgain)
	if got := get(); !strings.Contains(got, "404") {
		t.Error("a Secret that is gone is used: " + got)
	}
	set(func() { status, label = 200, "" })
	at = at.Add(readAgain)
	if got := get(); !strings.Contains(got, "not labelled") {
		t.Error("a Secret without the label is used: " + got)
	}
	before := asked
	for _, name := range []string{"", "ns", "../ns/x", "ns/x/y", "ns/x?y=1", "ns/.."} {
		if _, err := k.Secret(t.Context(), name); err == nil || asked != before {
			t.Errorf("%q was asked for", name)
		}
	}
	if _, err := k.Secret(t.Context(), "ns/forbidden"); err == nil || !strings.Contains(err.Error(), "403") {
		t.Errorf("got %v", err)
	}
}
