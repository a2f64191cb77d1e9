package admission_test

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
	admissionv1 "k8s.io/api/admission/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/kinference/kinference/api/v1alpha1"
	"github.com/kinference/kinference/internal/kube/admission"
	"github.com/kinference/kinference/internal/resources"
	"github.com/kinference/kinference/internal/testenv"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func webhook(others ...resources.Object) *admission.Webhook {
	return &admission.Webhook{Others: func() ([]resources.Object, bool) { return others, true }}
}

const (
	good  = `{"apiVersion":"kinference.buoyant.io/v1alpha1","kind":"InferencePool","metadata":{"name":"p"},"spec":{"destinations":[{"kind":"InferenceWorkerSet","name":"nowhere"}]}}`
	twice = `{"apiVersion":"kinference.buoyant.io/v1alpha1","kind":"InferenceWorkerSet","metadata":{"name":"s"},
		"spec":{"selector":{"matchLabels":{"app":"x"}},"models":[{"name":"m","aliases":["n"]},{"name":"n"}]}}`
)

// review asks the webhook about one object, given as JSON.
func review(t *testing.T, w http.Handler, kind string, op admissionv1.Operation, object, old string) *admissionv1.AdmissionResponse {
	t.Helper()
	in := admissionv1.AdmissionReview{
		TypeMeta: metav1.TypeMeta{APIVersion: "admission.k8s.io/v1", Kind: "AdmissionReview"},
		Request: &admissionv1.AdmissionRequest{
			UID: "7", Kind: metav1.GroupVersionKind{Group: v1alpha1.Group, Version: "v1alpha1", Kind: kind}, Namespace: "ns", Name: "x", Operation: op,
			Object: raw(object), OldObject: raw(old),
		},
	}
	body, err := json.Marshal(in)
	if err != nil {
		t.Fatal(err)
	}
	rec := httptest.NewRecorder()
	w.ServeHTTP(rec, httptest.NewRequest(http.MethodPost, admission.Path, bytes.NewReader(body)))
	var out admissionv1.AdmissionReview
	if err := json.Unmarshal(rec.Body.Bytes(), &out); err != nil || rec.Code != http.StatusOK || out.Response == nil || out.Response.UID != "7" || out.Kind != "AdmissionReview" {
		t.Fatalf("%d %s: %v", rec.Code, rec.Body, err)
	}
	return out.Response
}

func raw(object string) runtime.RawExtension {
	if object == "" {
		return runtime.RawExtension{}
	}
	return runtime.RawExtension{Raw: []byte(object)}
}

func TestVerdicts(t *testing.T) {
	tenant := &v1alpha1.InferenceTenant{}
	tenant.Namespace, tenant.Name = "ns", "first"
	tenant.Spec.Identities = []v1alpha1.Identity{{APIKeySecretRef: &v1alpha1.LocalReference{Name: "keys"}}}
	second := `{"apiVersion":"kinference.buoyant.io/v1alpha1","kind":"InferenceTenant","metadata":{"name":"second"},"spec":{"identities":[{"apiKeySecretRef":{"name":"keys"}}]}}`
	for name, c := range map[string]struct {
		kind        string
		op          admissionv1.Operation
		object, old string
		others      []resources.Object
		// Empty for what is allowed.
		refused, warning string
	}{
		"good with a warning": {kind: "InferencePool", op: "CREATE", object: good, warning: `spec.destinations[0].name: there is no InferenceWorkerSet "nowhere" in namespace "ns"`},
		"bad":                 {kind: "InferenceWorkerSet", op: "CREATE", object: twice, refused: `spec.models[1].name: "n" is a name in this resource already`},
		"bad beside others":   {kind: "InferenceTenant", op: "CREATE", object: second, others: []resources.Object{tenant}, refused: `identifies InferenceTenant "first" already`},
		"worse than before":   {kind: "InferenceWorkerSet", op: "UPDATE", object: twice, old: strings.Replace(twice, `"n"]`, `"o"]`, 1), refused: "is a name in this resource already"},
		"as bad as before":    {kind: "InferenceWorkerSet", op: "UPDATE", object: twice, old: strings.Replace(twice, `"name":"s"`, `"name":"s","finalizers":["x"]`, 1)},
		"bad but on its way":  {kind: "InferenceWorkerSet", op: "UPDATE", object: strings.Replace(twice, `"name":"s"`, `"name":"s","deletionTimestamp":"2026-01-01T00:00:00Z"`, 1), old: good},
		"deleted":             {kind: "InferenceWorkerSet", op: "DELETE", old: twice},
		"of another group":    {kind: "Deployment", op: "CREATE", object: good, refused: "unknown kind Deployment"},
		"no object":           {kind: "InferencePool", op: "CREATE", object: `[1]`, refused: "the object of the review cannot be read"},
		"of another form":     {kind: "InferencePool", op: "CREATE", object: `{"metadata":{"name":"p"},"spec":{"port":"x"}}`, refused: "is not of this version's form"},
	} {
		t.Run(name, func(t *testing.T) {
			got := review(t, webhook(c.others...), c.kind, c.op, c.object, c.old)
			switch {
			case got.Allowed != (c.refused == ""):
				t.Errorf("allowed %v: %+v", got.Allowed, got.Result)
			case !got.Allowed && (!strings.Contains(got.Result.Message, c.refused) || got.Result.Code != 422):
				t.Errorf("refused with %+v", got.Result)
			}
			if c.warning != "" && (len(got.Warnings) == 0 || !strings.HasPrefix(got.Warnings[0], c.warning)) {
				t.Errorf("warnings %q", got.Warnings)
			}
		})
	}
}

func TestBadRequests(t *testing.T) {
	for name, c := range map[string]struct {
		method, body string
		want         int
	}{
		"GET":             {http.MethodGet, "", http.StatusMethodNotAllowed},
		"no JSON":         {http.MethodPost, "{", http.StatusBadRequest},
		"another version": {http.MethodPost, `{"apiVersion":"admission.k8s.io/v1beta1","request":{}}`, http.StatusBadRequest},
		"no request":      {http.MethodPost, `{"apiVersion":"admission.k8s.io/v1"}`, http.StatusBadRequest},
		"too large":       {http.MethodPost, strings.Repeat(" ", 9<<20), http.StatusBadRequest},
	} {
		rec := httptest.NewRecorder()
		webhook().ServeHTTP(rec, httptest.NewRequest(c.method, admission.Path, strings.NewReader(c.body)))
		if rec.Code != c.want {
			t.Errorf("%s: %d %s", name, rec.Code, rec.Body)
		}
	}
	early := &admission.Webhook{Others: func() ([]resources.Object, bool) { return nil, false }}
	rec := httptest.NewRecorder()
	early.ServeHTTP(rec, httptest.NewRequest(http.MethodPost, admission.Path, strings.NewReader(`{"apiVersion":"admission.k8s.io/v1","request":{}}`)))
	if rec.Code != http.StatusServiceUnavailable {
		t.Errorf("before the first catalog: %d", rec.Code)
	}
}

// lines are what was logged, as long as there is room.
type lines chan string

func (l lines) Write(p []byte) (int, error) {
	select {
	case l <- string(p):
	default:
	}
	return len(p), nil
}

// A certificate is changed without a restart; one that is of no use is not taken.
func TestCertificateChanges(t *testing.T) {
	dir, first, second := t.TempDir(), testenv.NewAuthority(t, "first"), testenv.NewAuthority(t, "second")
	first.Secret(t, dir)
	l := testenv.Listen(t)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	log, hook := make(lines, 100), webhook()
	hook.Log = slog.New(slog.NewTextHandler(log, nil))
	go func() {
		done <- admission.Serve(ctx, l, hook, filepath.Join(dir, "tls.crt"), filepath.Join(dir, "tls.key"))
	}()
	trusts := func(ca *testenv.Authority) error {
		roots := x509.NewCertPool()
		roots.AppendCertsFromPEM(ca.PEM)
		client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true, TLSClientConfig: &tls.Config{RootCAs: roots}}}
		resp, err := client.Get(fmt.Sprintf("https://%s%s", l.Addr(), admission.Path))
		if err == nil {
			resp.Body.Close()
		}
		return err
	}
	if err := trusts(first); err != nil {
		t.Error(err)
	}
	second.Secret(t, dir)
	deadline, tick := time.After(30*time.Second), time.NewTicker(10*time.Millisecond)
	defer tick.Stop()
	for trusts(first) == nil || trusts(second) != nil {
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatal("the new certificate is not in use")
		}
	}
	crt := filepath.Join(dir, "tls.crt")
	if err := errors.Join(os.Remove(crt), os.WriteFile(crt, first.PEM, 0o600)); err != nil { // not the key's
		t.Fatal(err)
	}
	for refused := false; !refused; {
		select {
		case line := <-log:
			refused = strings.Contains(line, "the last good ones stay")
		case <-deadline:
			t.Fatal("the log does not tell of a certificate that is not the key's")
		}
	}
	if err := trusts(second); err != nil {
		t.Error("the last good certificate is not in use:", err)
	}
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
	if err := admission.Serve(t.Context(), testenv.Listen(t), webhook(), "/no/such/file", "/no/such/file"); err == nil {
		t.Error("serves without a certificate")
	}
}
