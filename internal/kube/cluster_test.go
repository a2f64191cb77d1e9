package kube_test

import (
	"bytes"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/yaml"
	goyaml "sigs.k8s.io/yaml/goyaml.v3"

	"github.com/kinference/kinference/api/crd"
	"github.com/kinference/kinference/internal/kube"
	"github.com/kinference/kinference/internal/kube/admission"
	"github.com/kinference/kinference/internal/kube/status"
	"github.com/kinference/kinference/internal/resources"
	"github.com/kinference/kinference/internal/testenv"
)

// cluster is a real Kubernetes API with our definitions and rights.
type cluster struct {
	*testenv.KubeAPI
	admin dynamic.Interface
}

var (
	namespaceGVR = schema.GroupVersionResource{Version: "v1", Resource: "namespaces"}
	crdGVR       = schema.GroupVersionResource{Group: "apiextensions.k8s.io", Version: "v1", Resource: "customresourcedefinitions"}
	webhookGVR   = schema.GroupVersionResource{Group: "admissionregistration.k8s.io", Version: "v1", Resource: "validatingwebhookconfigurations"}
	leaseGVR     = schema.GroupVersionResource{Group: "coordination.k8s.io", Version: "v1", Resource: "leases"}
)

func newCluster(t *testing.T) *cluster {
	t.Helper()
	c := &cluster{KubeAPI: testenv.Kube(t)}
	config, err := kube.Connect(c.Kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	config.QPS, config.Burst = 1000, 1000
	if c.admin, err = dynamic.NewForConfig(config); err != nil {
		t.Fatal(err)
	}
	c.namespace(t, "kinference")
	names, err := fs.Glob(crd.Files, "*.yaml")
	if err != nil || len(names) != len(kube.Kinds) {
		t.Fatalf("definitions %v: %v", names, err)
	}
	for _, name := range names {
		data, err := fs.ReadFile(crd.Files, name)
		if err != nil {
			t.Fatal(err)
		}
		c.install(t, data)
	}
	for _, name := range []string{"testdata/extension.yaml", "testdata/rbac.yaml"} {
		data, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		c.install(t, data)
	}
	eventually(t, "the definitions to be served", func() bool {
		list, err := c.admin.Resource(crdGVR).List(t.Context(), metav1.ListOptions{})
		return err == nil && strings.Count(fmt.Sprint(list.Object, list.Items), "type:Established") == len(kube.Kinds)+1
	})
	return c
}

// install creates whatever there is in a file.
func (c *cluster) install(t *testing.T, data []byte) {
	t.Helper()
	for _, u := range documents(t, data) {
		gvr := schema.GroupVersionResource{
			Group: u.GroupVersionKind().Group, Version: u.GroupVersionKind().Version, Resource: strings.ToLower(u.GetKind()) + "s",
		}
		if _, err := c.admin.Resource(gvr).Namespace(u.GetNamespace()).Create(t.Context(), u, metav1.CreateOptions{}); err != nil {
			t.Fatalf("%s %s: %v", u.GetKind(), u.GetName(), err)
		}
	}
}

func documents(t *testing.T, data []byte) []*unstructured.Unstructured {
	t.Helper()
	var out []*unstructured.Unstructured
	dec := goyaml.NewDecoder(bytes.NewReader(data))
	for {
		var n goyaml.Node
		err := dec.Decode(&n)
		if errors.Is(err, io.EOF) {
			return out
		}
		if err != nil {
			t.Fatal(err)
		}
		text, err := goyaml.Marshal(&n)
		if err != nil {
			t.Fatal(err)
		}
		raw, err := yaml.YAMLToJSON(text)
		if err != nil {
			t.Fatal(err)
		}
		if string(raw) == "null" {
			continue
		}
		u := &unstructured.Unstructured{}
		if err := u.UnmarshalJSON(raw); err != nil {
			t.Fatalf("%s: %v", raw, err)
		}
		out = append(out, u)
	}
}

func (c *cluster) namespace(t *testing.T, name string) string {
	t.Helper()
	u := &unstructured.Unstructured{Object: map[string]any{"apiVersion": "v1", "kind": "Namespace", "metadata": map[string]any{"name": name}}}
	if _, err := c.admin.Resource(namespaceGVR).Create(t.Context(), u, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	return name
}

func (c *cluster) of(u *unstructured.Unstructured, namespace string) dynamic.ResourceInterface {
	gvr := podsGVR
	if k := kube.KindOf(u.GetKind()); u.GroupVersionKind().Group == theirGVR.Group {
		gvr = theirGVR
	} else if k != nil {
		gvr = k.Resource
	}
	return c.admin.Resource(gvr).Namespace(namespace)
}

// apply makes or changes a resource, with strict checks of fields.
func (c *cluster) apply(t *testing.T, namespace, text string) error {
	t.Helper()
	for _, u := range documents(t, []byte(text)) {
		u.SetNamespace(namespace)
		raw, err := u.MarshalJSON()
		if err != nil {
			t.Fatal(err)
		}
		force := true
		_, err = c.of(u, namespace).Patch(t.Context(), u.GetName(), types.ApplyPatchType, raw,
			metav1.PatchOptions{FieldManager: "test", Force: &force, FieldValidation: metav1.FieldValidationStrict})
		if err != nil {
			return err
		}
	}
	return nil
}

func (c *cluster) must(t *testing.T, namespace, text string) {
	t.Helper()
	if err := c.apply(t, namespace, text); err != nil {
		t.Fatal(err)
	}
}

// conditions returns type=status reason of each, and the messages.
func (c *cluster) conditions(t *testing.T, gvr schema.GroupVersionResource, namespace, name string) (brief string, status map[string]any) {
	t.Helper()
	u, err := c.admin.Resource(gvr).Namespace(namespace).Get(t.Context(), name, metav1.GetOptions{})
	if err != nil {
		return err.Error(), nil
	}
	status, _ = u.Object["status"].(map[string]any)
	list, _, _ := unstructured.NestedSlice(u.Object, "status", "conditions")
	for _, entry := range list {
		m := entry.(map[string]any)
		old := ""
		if m["observedGeneration"] != u.GetGeneration() {
			old = " old"
		}
		brief += fmt.Sprintf("%s=%s %s: %s%s\n", m["type"], m["status"], m["reason"], m["message"], old)
	}
	return brief, status
}

// config is that of a ServiceAccount of the namespace kinference.
func (c *cluster) config(t *testing.T, account string) *rest.Config {
	t.Helper()
	config, err := kube.Connect(c.Kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	config.Impersonate = rest.ImpersonationConfig{
		UserName: "system:serviceaccount:kinference:" + account, Groups: []string{"system:serviceaccounts", "system:serviceaccounts:kinference", "system:authenticated"},
	}
	return config
}

// router is what a router replica runs of this package and those below it.
type router struct {
	source *kube.Source
	writer *status.Writer
	stop   func()
	wire   *wire
	// hold stops what is applied from being served.
	hold sync.Mutex

	mu       sync.Mutex
	catalog  *resources.Catalog
	problems resources.Problems
}

func (c *cluster) router(t *testing.T, account, name string, namespaces ...string) *router {
	t.Helper()
	config := c.config(t, account)
	r := &router{wire: &wire{}}
	config.Wrap(func(rt http.RoundTripper) http.RoundTripper { return r.wire.over(rt) })
	client := func() dynamic.Interface {
		client, err := kube.Client(config)
		if err != nil {
			t.Fatal(err)
		}
		return client
	}
	r.source = kube.NewSource(kube.Settings{Client: client(), Namespaces: namespaces}, func(c *resources.Catalog, ps resources.Problems) {
		r.hold.Lock()
		defer r.hold.Unlock()
		r.mu.Lock()
		defer r.mu.Unlock()
		r.problems = ps
		if c != nil {
			r.catalog = c
		}
	})
	writer, err := status.New(status.Settings{
		Source: r.source, Client: client(), Leases: client(), Namespace: "kinference", Name: "kinference-router", Identity: name,
	})
	if err != nil {
		t.Fatal(err)
	}
	r.writer = writer
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	for _, run := range []func(context.Context) error{r.source.Run, r.writer.Run} {
		wg.Go(func() {
			if err := run(ctx); err != nil {
				t.Error(err)
			}
		})
	}
	r.stop = sync.OnceFunc(func() { cancel(); wg.Wait() })
	t.Cleanup(r.stop)
	return r
}

// wire is what lies between a router and the API. It can be cut, and knows when
// statuses were written.
type wire struct {
	// cut: no request comes through; cutLeases: none for a Lease does.
	cut, cutLeases atomic.Bool

	mu     sync.Mutex
	writes []span
}

// span is the time of a request.
type span struct{ from, to time.Time }

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

func (w *wire) over(rt http.RoundTripper) http.RoundTripper {
	return roundTripper(func(r *http.Request) (*http.Response, error) {
		if w.cut.Load() || w.cutLeases.Load() && strings.Contains(r.URL.Path, "/leases") {
			return nil, errors.New("the wire is cut")
		}
		from := time.Now()
		resp, err := rt.RoundTrip(r)
		if r.Method == http.MethodPatch && strings.HasSuffix(r.URL.Path, "/status") {
			w.mu.Lock()
			w.writes = append(w.writes, span{from, time.Now()})
			w.mu.Unlock()
		}
		return resp, err
	})
}

// wrote returns when statuses were written, oldest first.
func (w *wire) wrote() []span {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Clone(w.writes)
}

func (r *router) now() (*resources.Catalog, resources.Problems) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.catalog, r.problems
}

// workers returns the names of the workers that are ready, and how many are not.
func (r *router) workers(set string) (ready []string, others int) {
	c, _ := r.now()
	if c == nil {
		return nil, 0
	}
	for _, s := range c.Sets {
		if s.Name != set {
			continue
		}
		for _, w := range s.Workers {
			if w.NotReady {
				others++
			} else {
				ready = append(ready, w.Name)
			}
		}
	}
	return ready, others
}

// serve serves the admission webhook and tells the API about it, until stop.
func (r *router) serve(t *testing.T, c *cluster) (stop func()) {
	t.Helper()
	dir, authority := t.TempDir(), testenv.NewAuthority(t, "webhook")
	authority.Secret(t, dir)
	l := testenv.Listen(t)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		done <- admission.Serve(ctx, l, &admission.Webhook{Others: r.source.Objects}, filepath.Join(dir, "tls.crt"), filepath.Join(dir, "tls.key"))
	}()
	c.install(t, fmt.Appendf(nil, `
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingWebhookConfiguration
metadata: { name: kinference }
webhooks:
  - name: validate.kinference.buoyant.io
    clientConfig: { url: "https://%s%s", caBundle: %s }
    rules: [ { apiGroups: [ kinference.buoyant.io ], apiVersions: [ "*" ], operations: [ CREATE, UPDATE ], resources: [ "*" ] } ]
    failurePolicy: Fail
    sideEffects: None
    admissionReviewVersions: [ v1 ]
`, l.Addr(), admission.Path, base64.StdEncoding.EncodeToString(authority.PEM)))
	return sync.OnceFunc(func() {
		if err := c.admin.Resource(webhookGVR).Delete(t.Context(), "kinference", metav1.DeleteOptions{}); err != nil {
			t.Error(err)
		}
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

// eventually waits until a condition holds.
func eventually(t *testing.T, what string, holds func() bool) {
	t.Helper()
	deadline, tick := time.After(2*time.Minute), time.NewTicker(50*time.Millisecond)
	defer tick.Stop()
	for !holds() {
		select {
		case <-deadline:
			t.Fatalf("waited for %s", what)
		case <-tick.C:
		}
	}
}
