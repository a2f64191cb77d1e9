package kube_test

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"

	"github.com/kinference/kinference/internal/kube"
)

// All that needs a real API runs against one, which starts once.
func TestRealAPI(t *testing.T) {
	c := newCluster(t)
	t.Run("verdicts", func(t *testing.T) { testVerdicts(t, c) })
	t.Run("status", func(t *testing.T) { testStatus(t, c) })
	t.Run("leader", func(t *testing.T) { testLeader(t, c) })
	t.Run("takeover", func(t *testing.T) { testTakeover(t, c) })
	t.Run("pods", func(t *testing.T) { testPods(t, c) })
	t.Run("keys", func(t *testing.T) { testKeys(t, c) })
	t.Run("write keys", func(t *testing.T) { testWriteKeys(t, c) })
	t.Run("tokens", func(t *testing.T) { testTokens(t, c) })
	t.Run("rights", func(t *testing.T) { testRights(t, c) })
	t.Run("extension", func(t *testing.T) { testExtension(t, c) })
	t.Run("restart", func(t *testing.T) { testRestart(t, c) })
}

const samples = "../resources/testdata/"

// The API, with the webhook, gives the verdict of kinfctl on every sample.
func testVerdicts(t *testing.T, c *cluster) {
	for _, ns := range []string{"inference", "demo", "other"} {
		c.namespace(t, ns)
	}
	r := c.router(t, "kinference-router", "a")
	eventually(t, "the first catalog", func() bool { _, ok := r.source.Objects(); return ok })
	defer r.serve(t, c)()
	eventually(t, "the webhook to be asked", func() bool {
		err := c.apply(t, "inference", "apiVersion: kinference.buoyant.io/v1alpha1\nkind: InferenceWorkerSet\nmetadata: { name: probe }\n"+
			"spec: { selector: { matchLabels: { a: b } }, models: [ { name: m, aliases: [ m ] } ] }\n")
		return err != nil && strings.Contains(err.Error(), "admission webhook")
	})
	good, err := filepath.Glob(samples + "good/*.good.yaml")
	bad, errBad := filepath.Glob(samples + "bad/*.bad.yaml")
	if err != nil || errBad != nil || len(good) < 8 || len(bad) < 100 {
		t.Fatalf("%d good and %d bad samples: %v %v", len(good), len(bad), err, errBad)
	}
	for _, path := range good {
		objects := documents(t, read(t, path))
		for _, u := range objects {
			if err := c.create(t, u); err != nil {
				t.Errorf("%s: %s %s is refused: %v", filepath.Base(path), u.GetKind(), u.GetName(), err)
			}
		}
		c.clear(t, r, objects)
	}
	by := map[string]int{}
	for _, path := range bad {
		name := filepath.Base(path)
		if strings.HasPrefix(name, "file-") { // clients would not send it, so it goes as it is
			if code, answer := c.post(t, read(t, path)); code/100 != 4 {
				t.Errorf("%s: %d %s", name, code, answer)
			}
			by["form"]++
			continue
		}
		objects := documents(t, read(t, path))
		last := len(objects) - 1
		for _, u := range objects[:last] {
			if err := c.create(t, u); err != nil {
				t.Errorf("%s: %s is refused: %v", name, u.GetName(), err)
			}
			r.sees(t, u, true)
		}
		err := c.create(t, objects[last])
		switch {
		case err == nil:
			t.Errorf("%s: is accepted", name)
		case strings.Contains(err.Error(), "admission webhook"):
			by["webhook"]++
			// Word for word what kinfctl says.
			if want := message(t, path); !strings.Contains(err.Error(), want) {
				t.Errorf("%s: %v, want %s", name, err, want)
			}
		default:
			by["schema"]++
			if field := leaf(t, path); !strings.Contains(err.Error(), field) {
				t.Errorf("%s: %v does not name %s", name, err, field)
			}
		}
		c.clear(t, r, objects)
	}
	t.Logf("%d good samples accepted; bad ones refused by %v", len(good), by)
	if by["webhook"] < 5 || by["schema"] < 50 {
		t.Errorf("refused by %v", by)
	}
	// Warnings reach the client.
	out, err := c.Kubectl(t, `
apiVersion: kinference.buoyant.io/v1alpha1
kind: InferencePool
metadata: { name: p, namespace: inference }
spec: { destinations: [ { kind: InferenceWorkerSet, name: nowhere } ] }
`, "create", "-f", "-")
	if err != nil || !strings.Contains(out, `Warning: spec.destinations[0].name: there is no InferenceWorkerSet "nowhere"`) {
		t.Errorf("%v: %s", err, out)
	}
	if err := c.admin.Resource(kube.KindOf("InferencePool").Resource).Namespace("inference").Delete(t.Context(), "p", metav1.DeleteOptions{}); err != nil {
		t.Error(err)
	}
}

// message is the golden one, without place and resource.
func message(t *testing.T, path string) string {
	t.Helper()
	golden := strings.TrimSpace(string(read(t, strings.TrimSuffix(path, ".yaml")+".golden")))
	parts := strings.SplitN(golden, ": ", 4)
	return parts[len(parts)-1]
}

// leaf is the last part of the field in the golden message.
func leaf(t *testing.T, path string) string {
	t.Helper()
	field, _, _ := strings.Cut(message(t, path), ": ")
	parts := strings.FieldsFunc(field, func(r rune) bool { return strings.ContainsRune(".[]", r) })
	last := len(parts) - 1
	for last > 0 && strings.Trim(parts[last], "0123456789") == "" {
		last--
	}
	return parts[last]
}

// post sends YAML as it is to be created as an InferencePool.
func (c *cluster) post(t *testing.T, body []byte) (code int, answer string) {
	t.Helper()
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(c.CA)
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true, TLSClientConfig: &tls.Config{RootCAs: roots}}}
	url := c.URL + "/apis/kinference.buoyant.io/v1alpha1/namespaces/inference/inferencepools?fieldValidation=Strict"
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, url, bytes.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+c.Token)
	req.Header.Set("Content-Type", "application/yaml")
	resp, err := client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(text)
}

func read(t *testing.T, path string) []byte {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

func (c *cluster) create(t *testing.T, u *unstructured.Unstructured) error {
	t.Helper()
	namespace := u.GetNamespace()
	if namespace == "" {
		namespace = "default"
	}
	_, err := c.of(u, namespace).Create(t.Context(), u, metav1.CreateOptions{FieldValidation: metav1.FieldValidationStrict})
	return err
}

// clear deletes samples and waits until the webhook does not know them any more.
func (c *cluster) clear(t *testing.T, r *router, objects []*unstructured.Unstructured) {
	t.Helper()
	for _, u := range objects {
		namespace := u.GetNamespace()
		if namespace == "" {
			namespace = "default"
		}
		if err := c.of(u, namespace).Delete(t.Context(), u.GetName(), metav1.DeleteOptions{}); err != nil && !apierrors.IsNotFound(err) && u.GetName() != "" {
			t.Error(err)
		}
	}
	for _, u := range objects {
		r.sees(t, u, false)
	}
}

func (r *router) sees(t *testing.T, u *unstructured.Unstructured, want bool) {
	t.Helper()
	eventually(t, "the source to see "+u.GetName(), func() bool {
		objects, _ := r.source.Objects()
		for _, o := range objects {
			if o.GetName() == u.GetName() && fmt.Sprintf("%T", o) == "*v1alpha1."+u.GetKind() {
				return want
			}
		}
		return !want
	})
}

// Statuses say what became of each generation, and Programmed when every replica
// serves it.
func testStatus(t *testing.T, c *cluster) {
	ns := c.namespace(t, "status")
	a := c.router(t, "kinference-router", "a")
	eventually(t, "a to lead", a.writer.Leading)
	b := c.router(t, "kinference-router", "b")
	eventually(t, "two replicas", func() bool { return len(c.leases(t)) == 3 })
	sets, pools := kube.KindOf("InferenceWorkerSet").Resource, kube.KindOf("InferencePool").Resource
	c.must(t, ns, set+`
---
apiVersion: kinference.buoyant.io/v1alpha1
kind: InferencePool
metadata: { name: pool }
spec: { destinations: [ { kind: InferenceWorkerSet, name: chat }, { kind: InferenceProvider, name: nowhere } ] }
`)
	want := func(what string, gvr string, name, text string) {
		t.Helper()
		resource := sets
		if gvr == "pool" {
			resource = pools
		}
		var got string
		deadline := time.Now().Add(2 * time.Minute)
		eventually(t, what, func() bool {
			got, _ = c.conditions(t, resource, ns, name)
			if time.Now().After(deadline.Add(-time.Second)) {
				t.Fatalf("waited for %s:\n%sin place of\n%s", what, got, text)
			}
			return got == text
		})
	}
	const refs, served = "ResolvedRefs=True ResolvedRefs: all that it refers to is there\n", "Programmed=True Programmed: every router replica serves this generation\n"
	want("the set to be served", "set", "chat", "Accepted=True Accepted: is valid\n"+refs+served)
	want("the pool to be served", "pool", "pool", "Accepted=True Accepted: is valid\n"+
		"ResolvedRefs=False RefNotFound: spec.destinations[1].name: there is no InferenceProvider \"nowhere\" in namespace \"status\"\n"+served)

	// b is slow: the new generation is not served by all.
	b.hold.Lock()
	c.must(t, ns, strings.Replace(set, "name: m", "name: m2", 1))
	want("b to be waited for", "set", "chat", "Accepted=True Accepted: is valid\n"+refs+"Programmed=False Pending: router replica b does not serve this generation yet\n")
	if ca, _ := a.now(); ca.Models["m2"] == nil {
		t.Error("a waits for b")
	}
	b.hold.Unlock()
	want("b to come after", "set", "chat", "Accepted=True Accepted: is valid\n"+refs+served)

	// A bad generation past the webhook: the one before is served.
	c.must(t, ns, strings.Replace(set, "{ name: m }", "{ name: m, aliases: [ m ] }", 1))
	want("the bad generation to be named", "set", "chat", "Accepted=False Invalid: spec.models[0].aliases[0]: \"m\" is a name in this resource already, as spec.models[0].name\n"+
		"ResolvedRefs=Unknown Invalid: references are followed once the resource is valid\nProgrammed=False Invalid: the router serves generation 2\n")
	for _, r := range []*router{a, b} {
		if catalog, _ := r.now(); catalog.Models["m2"] == nil {
			t.Error("the last good generation is not served")
		}
	}
	c.must(t, ns, set)
	want("it to be mended", "set", "chat", "Accepted=True Accepted: is valid\n"+refs+served)

	// Nothing is written where nothing changes.
	_, before := c.version(t, sets, ns, "chat")
	c.must(t, ns, podText("p", "node"))
	c.ready(t, ns, "p", "127.0.0.2")
	eventually(t, "the worker to be counted", func() bool {
		_, status := c.conditions(t, sets, ns, "chat")
		return fmt.Sprint(status["workers"]) == "map[ready:1 total:1]"
	})
	_, status := c.conditions(t, pools, ns, "pool")
	if fmt.Sprint(status["workers"]) != "map[ready:1 total:1]" {
		eventually(t, "the pool to count it", func() bool {
			_, status = c.conditions(t, pools, ns, "pool")
			return fmt.Sprint(status["workers"]) == "map[ready:1 total:1]"
		})
	}
	writes, after := c.version(t, sets, ns, "chat")
	if writes != "kinference-router" || before == after {
		t.Errorf("written by %q: version %s, then %s", writes, before, after)
	}
	b.stop()
	eventually(t, "b's lease to go", func() bool { return len(c.leases(t)) == 2 })
	if got, again := c.version(t, sets, ns, "chat"); again != after {
		t.Errorf("%s wrote %s over %s for no reason", got, again, after)
	}
}

// version returns who manages the status, and the resourceVersion.
func (c *cluster) version(t *testing.T, gvr schema.GroupVersionResource, namespace, name string) (manager, version string) {
	t.Helper()
	u, err := c.admin.Resource(gvr).Namespace(namespace).Get(t.Context(), name, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range u.GetManagedFields() {
		if m.Subresource == "status" {
			manager += m.Manager
		}
	}
	return manager, u.GetResourceVersion()
}

func (c *cluster) leases(t *testing.T) []string {
	t.Helper()
	list, err := c.admin.Resource(leaseGVR).Namespace("kinference").List(t.Context(), metav1.ListOptions{})
	if err != nil {
		return nil
	}
	var out []string
	for _, u := range list.Items {
		out = append(out, u.GetName())
	}
	return out
}

// When the leader ends, it gives up its Lease at once and another replica writes
// on.
func testLeader(t *testing.T, c *cluster) {
	ns := c.namespace(t, "leader")
	a := c.router(t, "kinference-router", "a")
	eventually(t, "a to lead", a.writer.Leading)
	b := c.router(t, "kinference-router", "b")
	eventually(t, "b to be there", func() bool { return slices.Contains(c.leases(t), "kinference-router-b") })
	if b.writer.Leading() {
		t.Error("b leads too")
	}
	start := time.Now()
	a.stop()
	if holder := c.holder(t); holder != "" && holder != "b" {
		t.Errorf("the lease is with %q still", holder)
	}
	eventually(t, "b to lead", b.writer.Leading)
	t.Logf("b leads %v after a was told to end", time.Since(start).Round(time.Millisecond))
	if leases := c.leases(t); slices.Contains(leases, "kinference-router-a") {
		t.Errorf("a left its lease: %v", leases)
	}
	c.must(t, ns, set)
	eventually(t, "b to write", func() bool {
		got, _ := c.conditions(t, kube.KindOf("InferenceWorkerSet").Resource, ns, "chat")
		return strings.Contains(got, "Programmed=True")
	})
	neverBoth(t, a, b)
}

// A leader that cannot renew its Lease writes no more before another one does,
// though it could; and one that is killed is replaced when its Lease has run out.
func testTakeover(t *testing.T, c *cluster) {
	ns := c.namespace(t, "takeover")
	sets := kube.KindOf("InferenceWorkerSet").Resource
	a := c.router(t, "kinference-router", "a")
	eventually(t, "a to lead", a.writer.Leading)
	b := c.router(t, "kinference-router", "b")
	generations := 0
	// followed makes a new generation and waits for its status. It returns false.
	followed := func(who string) bool {
		generations++
		c.must(t, ns, strings.Replace(set, "name: m", fmt.Sprint("name: m", generations), 1))
		eventually(t, who+" to write", func() bool {
			got, _ := c.conditions(t, sets, ns, "chat")
			return strings.HasPrefix(got, "Accepted=True") && !strings.Contains(got, " old")
		})
		return false
	}
	followed("a")
	eventually(t, "both to say what they serve", func() bool {
		leases := c.leases(t)
		return slices.Contains(leases, "kinference-router-a") && slices.Contains(leases, "kinference-router-b")
	})

	a.wire.cutLeases.Store(true)
	start := time.Now()
	eventually(t, "b to lead", func() bool { return b.writer.Leading() || followed("either") })
	t.Logf("b leads %v after a could not renew any more", time.Since(start).Round(time.Millisecond))
	followed("b")
	if a.writer.Leading() {
		t.Error("a leads too")
	}
	neverBoth(t, a, b)
	// a cannot say that it serves this generation, so nobody claims it.
	if got, _ := c.conditions(t, sets, ns, "chat"); !strings.Contains(got, "Programmed=False Pending: router replica a does not serve") &&
		!strings.Contains(got, "Programmed=Unknown") {
		t.Errorf("without a word from a:\n%s", got)
	}

	before := len(a.wire.wrote())
	a.wire.cutLeases.Store(false)
	b.wire.cut.Store(true) // as if it were killed
	start = time.Now()
	b.stop()
	if holder := c.holder(t); holder != "b" {
		t.Fatalf("b was not killed: the lease is with %q", holder)
	}
	eventually(t, "a to lead again", a.writer.Leading)
	t.Logf("a leads %v after b was killed", time.Since(start).Round(time.Millisecond))
	followed("a")
	if again := a.wire.wrote()[before:]; len(again) == 0 || again[0].from.Before(b.wire.wrote()[len(b.wire.wrote())-1].to) {
		t.Errorf("a wrote %d times, b last at %v", len(again), b.wire.wrote())
	}
	// As the Lease goes with its Pod.
	if err := c.admin.Resource(leaseGVR).Namespace("kinference").Delete(t.Context(), "kinference-router-b", metav1.DeleteOptions{}); err != nil {
		t.Error(err)
	}
}

// neverBoth checks that one replica has written its last status before the other
// began with its first.
func neverBoth(t *testing.T, first, second *router) {
	t.Helper()
	earlier, later := first.wire.wrote(), second.wire.wrote()
	if len(later) == 0 {
		t.Error("the second replica wrote nothing")
	} else if n := len(earlier); n > 0 && earlier[n-1].to.After(later[0].from) {
		t.Errorf("the first replica still wrote %v after the second began", earlier[n-1].to.Sub(later[0].from))
	}
}

// holder is who has the leader's Lease.
func (c *cluster) holder(t *testing.T) string {
	t.Helper()
	u, err := c.admin.Resource(leaseGVR).Namespace("kinference").Get(t.Context(), "kinference-router", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	name, _, err := unstructured.NestedString(u.Object, "spec", "holderIdentity")
	if err != nil {
		t.Fatal(err)
	}
	return name
}

func podText(name, node string) string {
	return "apiVersion: v1\nkind: Pod\nmetadata: { name: " + name + ", labels: { app: vllm } }\n" +
		"spec: { nodeName: " + node + ", containers: [ { name: vllm, image: vllm } ] }\n"
}

// ready does what kubelet would do for a Pod that has started.
func (c *cluster) ready(t *testing.T, namespace, name, address string) {
	t.Helper()
	status := fmt.Sprintf(`{"status":{"phase":"Running","podIP":%q,"podIPs":[{"ip":%q}],"conditions":[{"type":"Ready","status":"True"}]}}`, address, address)
	_, err := c.admin.Resource(podsGVR).Namespace(namespace).Patch(t.Context(), name, types.MergePatchType, []byte(status), metav1.PatchOptions{}, "status")
	if err != nil {
		t.Fatal(err)
	}
}

func (c *cluster) deletePod(t *testing.T, namespace, name string, grace int64) {
	t.Helper()
	err := c.admin.Resource(podsGVR).Namespace(namespace).Delete(t.Context(), name, metav1.DeleteOptions{GracePeriodSeconds: &grace})
	if err != nil {
		t.Fatal(err)
	}
}

// Pods come and go: one that ends is not picked while it still runs, and one that
// is made anew under its name is another worker.
func testPods(t *testing.T, c *cluster) {
	ns := c.namespace(t, "pods")
	r := c.router(t, "kinference-router", "a", ns)
	c.must(t, ns, set)
	workers := func(ready, others int) func() bool {
		return func() bool {
			names, n := r.workers(ns + "/chat")
			return len(names) == ready && n == others
		}
	}
	const pods = 40
	for i := range pods {
		c.must(t, ns, podText(fmt.Sprintf("vllm-%d", i), "node"))
	}
	for i := range pods {
		c.ready(t, ns, fmt.Sprintf("vllm-%d", i), fmt.Sprintf("127.0.1.%d", i+1))
	}
	eventually(t, "all workers", workers(pods, 0))
	first := r.uid(ns+"/chat", "vllm-0")
	start := time.Now()
	for i := range pods / 2 {
		c.deletePod(t, ns, fmt.Sprintf("vllm-%d", i), 30)
	}
	eventually(t, "half of them to end", workers(pods/2, 0))
	t.Logf("%d Pods that end were out of the catalog %v after the first was deleted", pods/2, time.Since(start).Round(time.Millisecond))
	list, err := c.admin.Resource(podsGVR).Namespace(ns).List(t.Context(), metav1.ListOptions{})
	if err != nil || len(list.Items) != pods {
		t.Fatalf("%d Pods run: %v", len(list.Items), err)
	}
	for i := range pods / 2 {
		c.deletePod(t, ns, fmt.Sprintf("vllm-%d", i), 0)
	}
	c.must(t, ns, podText("vllm-0", "node"))
	c.ready(t, ns, "vllm-0", "127.0.1.1")
	eventually(t, "a new worker", workers(pods/2+1, 0))
	if again := r.uid(ns+"/chat", "vllm-0"); again == "" || again == first {
		t.Errorf("the new worker is %q, the old one was %q", again, first)
	}
	notReady := `{"status":{"conditions":[{"type":"Ready","status":"False"}]}}`
	if _, err := c.admin.Resource(podsGVR).Namespace(ns).Patch(t.Context(), "vllm-0", types.MergePatchType, []byte(notReady), metav1.PatchOptions{}, "status"); err != nil {
		t.Fatal(err)
	}
	eventually(t, "it to be followed but not ready", workers(pods/2, 1))
}

func (r *router) uid(set, name string) string {
	c, _ := r.now()
	for _, s := range c.Sets {
		for _, w := range s.Workers {
			if s.Name == set && w.Name == name {
				return w.UID
			}
		}
	}
	return ""
}

// Without rights nothing is served and it is said why; with them it heals.
func testRights(t *testing.T, c *cluster) {
	ns := c.namespace(t, "rights")
	c.must(t, ns, set)
	r := c.router(t, "nobody", "a", ns)
	eventually(t, "refusals", func() bool { _, problems := r.now(); return len(problems) == 9 })
	catalog, problems := r.now()
	if catalog != nil || !strings.Contains(problems.Err().Error(), `User "system:serviceaccount:kinference:nobody" cannot`) {
		t.Errorf("catalog %v, problems %v", catalog != nil, problems)
	}
	c.install(t, []byte(`
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: { name: nobody, namespace: rights }
roleRef: { apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: kinference-router }
subjects: [ { kind: ServiceAccount, namespace: kinference, name: nobody } ]
`))
	// Without the right to read Secrets there are no API keys, and all else is well.
	eventually(t, "a catalog", func() bool {
		catalog, problems := r.now()
		return catalog != nil && len(problems) == 1 && problems.Err() == nil && strings.Contains(problems[0].String(), "Secret/rights: may not be read")
	})
}

func testExtension(t *testing.T, c *cluster) {
	ns := c.namespace(t, "extension")
	r := c.router(t, "kinference-router", "a", ns)
	c.must(t, ns, `
apiVersion: inference.networking.k8s.io/v1
kind: InferencePool
metadata: { name: theirs }
spec: { selector: { matchLabels: { app: vllm } }, targetPorts: [ { number: 8000 } ] }
---
apiVersion: kinference.buoyant.io/v1alpha1
kind: InferencePool
metadata: { name: ours }
spec: { destinations: [ { group: inference.networking.k8s.io, kind: InferencePool, name: theirs } ] }
---
`+podText("vllm-0", "node"))
	c.ready(t, ns, "vllm-0", "127.0.2.1")
	eventually(t, "their worker", func() bool { names, _ := r.workers(ns + "/theirs"); return slices.Equal(names, []string{"vllm-0"}) })
}

// While the API is away the catalog stays; afterwards the source catches up.
func testRestart(t *testing.T, c *cluster) {
	ns := c.namespace(t, "restart")
	c.must(t, ns, set)
	a := c.router(t, "kinference-router", "a")
	eventually(t, "a to lead", a.writer.Leading)
	eventually(t, "the set to be served", func() bool {
		got, _ := c.conditions(t, kube.KindOf("InferenceWorkerSet").Resource, ns, "chat")
		return strings.Contains(got, "Programmed=True")
	})
	c.Stop()
	late := c.router(t, "kinference-router", "late") // starts with the API away
	eventually(t, "the late one to say why it waits", func() bool { _, problems := late.now(); return len(problems) == 1 })
	if catalog, problems := late.now(); catalog != nil || !strings.Contains(problems[0].String(), "the Kubernetes API cannot be read") {
		t.Errorf("catalog %v, problems %v", catalog != nil, problems)
	}
	if catalog, _ := a.now(); catalog.Models["m"] == nil {
		t.Error("the catalog is gone with the API")
	}
	c.Start(t)
	start := time.Now()
	eventually(t, "the API to take a change", func() bool { return c.apply(t, ns, strings.Replace(set, "name: m", "name: m2", 1)) == nil })
	for _, r := range []*router{a, late} {
		eventually(t, "the change to be seen", func() bool { catalog, _ := r.now(); return catalog != nil && catalog.Models["m2"] != nil })
	}
	t.Logf("both serve the change %v after the API was back", time.Since(start).Round(time.Millisecond))
	eventually(t, "the status to follow", func() bool {
		got, _ := c.conditions(t, kube.KindOf("InferenceWorkerSet").Resource, ns, "chat")
		return strings.Contains(got, "Programmed=True") && !strings.Contains(got, " old")
	})
}
