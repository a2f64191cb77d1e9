package kube_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	dynamicfake "k8s.io/client-go/dynamic/fake"
	clienttesting "k8s.io/client-go/testing"
	"sigs.k8s.io/yaml"

	"github.com/kinference/kinference/internal/kube"
	"github.com/kinference/kinference/internal/resources"
)

var (
	secretsGVR = schema.GroupVersionResource{Version: "v1", Resource: "secrets"}
	podsGVR    = schema.GroupVersionResource{Version: "v1", Resource: "pods"}
	theirGVR   = schema.GroupVersionResource{Group: "inference.networking.k8s.io", Version: "v1", Resource: "inferencepools"}
)

// fixture is a Source over a fake API.
type fixture struct {
	t      *testing.T
	client *dynamicfake.FakeDynamicClient
	source *kube.Source

	mu       sync.Mutex
	applied  int
	catalog  *resources.Catalog // newest that is not nil
	problems resources.Problems
	version  int
}

// run starts a Source in the bubble that the test is in. Objects are YAML.
func run(t *testing.T, settings kube.Settings, prepare func(*dynamicfake.FakeDynamicClient), objects ...string) *fixture {
	t.Helper()
	kinds := map[schema.GroupVersionResource]string{podsGVR: "PodList", secretsGVR: "SecretList", theirGVR: "InferencePoolList"}
	for _, k := range kube.Kinds {
		kinds[k.Resource] = k.Name + "List"
	}
	f := &fixture{t: t, client: dynamicfake.NewSimpleDynamicClientWithCustomListKinds(runtime.NewScheme(), kinds)}
	for _, o := range objects {
		f.create(o)
	}
	if prepare != nil {
		prepare(f.client)
	}
	settings.Client = f.client
	f.source = kube.NewSource(settings, func(c *resources.Catalog, ps resources.Problems) {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.applied++
		f.problems = ps
		if c != nil {
			f.catalog = c
		}
	})
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- f.source.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	f.settle()
	return f
}

// settle waits until what has happened so far is applied.
func (f *fixture) settle() {
	time.Sleep(5 * time.Second) // of the bubble's clock
	synctest.Wait()
}

func parse(t *testing.T, text string) *unstructured.Unstructured {
	t.Helper()
	u := &unstructured.Unstructured{}
	raw, err := yaml.YAMLToJSON([]byte(text))
	if err == nil {
		err = u.UnmarshalJSON(raw) // numbers as the API's decoder makes them
	}
	if err != nil {
		t.Fatal(err)
	}
	if u.GetNamespace() == "" {
		u.SetNamespace("ns")
	}
	if u.GetUID() == "" {
		u.SetUID(types.UID("uid-" + u.GetName()))
	}
	if u.GetGeneration() == 0 {
		u.SetGeneration(1)
	}
	return u
}

func (f *fixture) resource(u *unstructured.Unstructured) schema.GroupVersionResource {
	switch {
	case u.GetKind() == "Pod":
		return podsGVR
	case u.GroupVersionKind().Group == theirGVR.Group:
		return theirGVR
	}
	return kube.KindOf(u.GetKind()).Resource
}

func (f *fixture) create(text string) {
	f.t.Helper()
	u := parse(f.t, text)
	f.version++
	u.SetResourceVersion(fmt.Sprint(f.version))
	if _, err := f.client.Resource(f.resource(u)).Namespace(u.GetNamespace()).Create(f.t.Context(), u, metav1.CreateOptions{}); err != nil {
		f.t.Fatal(err)
	}
}

func (f *fixture) update(text string) {
	f.t.Helper()
	u := parse(f.t, text)
	f.version++
	u.SetResourceVersion(fmt.Sprint(f.version))
	if _, err := f.client.Resource(f.resource(u)).Namespace(u.GetNamespace()).Update(f.t.Context(), u, metav1.UpdateOptions{}); err != nil {
		f.t.Fatal(err)
	}
	f.settle()
}

func (f *fixture) remove(text string) {
	f.t.Helper()
	u := parse(f.t, text)
	if err := f.client.Resource(f.resource(u)).Namespace(u.GetNamespace()).Delete(f.t.Context(), u.GetName(), metav1.DeleteOptions{}); err != nil {
		f.t.Fatal(err)
	}
	f.settle()
}

// now returns what was applied last, and how often.
func (f *fixture) now() (*resources.Catalog, resources.Problems, int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.catalog, f.problems, f.applied
}

func (f *fixture) workers() []string {
	c, _, _ := f.now()
	var out []string
	for _, s := range c.Sets {
		for _, w := range s.Workers {
			line := w.UID + " " + w.URL
			if w.NotReady {
				line += " not ready"
			}
			out = append(out, line)
		}
	}
	return out
}

func (f *fixture) want(want ...string) {
	f.t.Helper()
	if diff := cmp.Diff(want, f.workers()); diff != "" {
		f.t.Errorf("workers (-want +got):\n%s", diff)
	}
}

const set = `
apiVersion: kinference.buoyant.io/v1alpha1
kind: InferenceWorkerSet
metadata: { name: chat }
spec:
  selector: { matchLabels: { app: vllm } }
  models: [ { name: m } ]
`

func podOf(name, uid, status string) string {
	return "apiVersion: v1\nkind: Pod\nmetadata: { name: " + name + ", uid: " + uid + ", labels: { app: vllm } }\nstatus: " + status
}

const up = `{ podIP: 10.0.0.1, phase: Running, conditions: [ { type: Ready, status: "True" } ] }`

// Pods come and go. One that is not ready is a worker still, one that ends is
// none, and one that is made anew is another.
func TestPods(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var f *fixture
		var ended []string // with the workers of the catalog at that time
		f = run(t, kube.Settings{Ended: func(pod string) { ended = append(ended, pod+": "+strings.Join(f.workers(), ", ")) }},
			nil, set, podOf("a", "u1", "{ phase: Pending }"))
		f.want()
		f.update(podOf("a", "u1", "{ podIP: 10.0.0.1, phase: Running }"))
		f.want("ns.chat.u1 http://10.0.0.1:8000 not ready")
		f.update(podOf("a", "u1", up))
		f.want("ns.chat.u1 http://10.0.0.1:8000")
		f.update(strings.Replace(podOf("a", "u1", up), "uid", `deletionTimestamp: "2026-01-01T00:00:00Z", uid`, 1))
		f.want()
		f.remove(podOf("a", "u1", up))
		f.create(podOf("a", "u2", up))
		f.settle()
		f.want("ns.chat.u2 http://10.0.0.1:8000")
		f.update(podOf("a", "u2", "{ podIP: 10.0.0.1, phase: Failed }"))
		f.want()
		f.create(podOf("b", "u3", up))
		f.settle()
		f.remove(podOf("b", "u3", up))
		f.want()
		// Before the catalog is made anew, and once.
		at := " http://10.0.0.1:8000"
		if diff := cmp.Diff([]string{"u1: ns.chat.u1" + at, "u2: ns.chat.u2" + at, "u3: ns.chat.u3" + at}, ended); diff != "" {
			t.Errorf("ended (-want +got):\n%s", diff)
		}
	})
}

// What happens to Pods that no selector selects, or to a status, costs nothing.
func TestIrrelevantChanges(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := run(t, kube.Settings{}, nil, set, podOf("a", "u1", up))
		_, _, before := f.now()
		other := strings.Replace(podOf("b", "u2", up), "app: vllm", "app: web", 1)
		f.create(other)
		f.settle()
		f.update(strings.Replace(other, "Running", "Failed", 1))
		f.remove(other)
		f.create(strings.Replace(podOf("c", "u3", up), "uid", "namespace: elsewhere, uid", 1))
		f.update(strings.Replace(podOf("a", "u1", up), "phase", `hostIP: 10.1.1.1, phase`, 1))
		f.update(set + "status: { observedGeneration: 1 }\n")
		if _, _, n := f.now(); n != before {
			t.Errorf("applied %d times more", n-before)
		}
		// The newest versions are reported all the same.
		if r, ok := f.source.Report(); !ok || r.Versions["InferenceWorkerSet"] != fmt.Sprint(f.version) || len(r.Behind) > 0 {
			t.Errorf("report %+v, newest version %d", r, f.version)
		}
	})
}

// A bad resource is served as it was, and the others go on without it.
func TestLastGoodVersion(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		second := strings.Replace(set, "name: chat", "name: second", 1)
		f := run(t, kube.Settings{}, nil, set, second, podOf("a", "u1", up))
		bad := strings.NewReplacer("name: chat", "name: chat, generation: 2", "name: m", `name: "no  name"`).Replace(set)
		f.update(bad)
		c, problems, _ := f.now()
		if c.Models["m"] == nil || len(c.Models["m"].Offers) != 2 || len(problems) != 1 || problems[0].Resource != "InferenceWorkerSet ns/chat" {
			t.Fatalf("models %v, problems %v", c.Models, problems)
		}
		if r, _ := f.source.Report(); len(r.Behind) != 1 || r.Behind["uid-chat"] != 1 {
			t.Errorf("behind: %v", r.Behind)
		}
		// Another one that is bad from its first day on is left out.
		f.create(strings.Replace(bad, "chat", "third", 1))
		f.update(strings.NewReplacer("name: second", "name: second, generation: 2", "name: m", "name: new").Replace(second))
		c, problems, _ = f.now()
		if c.Models["new"] == nil || len(c.Models["m"].Offers) != 1 || len(problems) != 2 {
			t.Errorf("models %v, problems %v", c.Models, problems)
		}
		f.update(strings.NewReplacer("name: chat", "name: chat, generation: 3", "name: m", "name: mended").Replace(set))
		f.remove(strings.Replace(bad, "chat", "third", 1))
		c, problems, _ = f.now()
		if c.Models["mended"] == nil || c.Models["m"] != nil || len(problems) > 0 {
			t.Errorf("models %v, problems %v", c.Models, problems)
		}
		// A resource of the same name with another uid has no past.
		f.remove(set)
		f.create(strings.Replace(bad, "generation: 2", "uid: another", 1))
		f.settle()
		if c, problems, _ = f.now(); len(c.Sets) != 1 || len(problems) != 1 {
			t.Errorf("sets %v, problems %v", c.Sets, problems)
		}
	})
}

// A resource that this version does not understand at all is a bad one.
func TestUnknownForm(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := run(t, kube.Settings{}, nil, set, podOf("a", "u1", up))
		f.update(strings.NewReplacer("name: chat", "name: chat, generation: 2", "selector: {", "selector: [ 1 ]\n  x: {").Replace(set))
		c, problems, _ := f.now()
		if len(c.Sets) != 1 || len(problems) != 1 || !strings.Contains(problems[0].String(), "error: InferenceWorkerSet ns/chat: is not of this version's form") {
			t.Errorf("sets %v, problems %v", c.Sets, problems)
		}
		f.want("ns.chat.u1 http://10.0.0.1:8000")
	})
}

func refuse(resource string, allowed *atomic.Bool) func(*dynamicfake.FakeDynamicClient) {
	return func(c *dynamicfake.FakeDynamicClient) {
		c.PrependReactor("list", resource, func(a clienttesting.Action) (bool, runtime.Object, error) {
			if allowed.Load() {
				return false, nil, nil
			}
			return true, nil, apierrors.NewForbidden(a.GetResource().GroupResource(), "", errors.New("no rights"))
		})
	}
}

// Without the right to read what only adds capacity the rest is served; what
// restricts is waited for. Either way it is said, and heals.
func TestRefused(t *testing.T) {
	for resource, wanted := range map[string]bool{"inferenceproviders": true, "pods": true, "inferencepolicies": false, "inferencetenants": false} {
		t.Run(resource, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var allowed atomic.Bool
				f := run(t, kube.Settings{}, refuse(resource, &allowed), set)
				c, problems, _ := f.now()
				if (c != nil) != wanted || len(problems) != 1 || !strings.Contains(problems[0].Message, "grant the verbs list and watch") {
					t.Fatalf("catalog %v, problems %v", c != nil, problems)
				}
				if _, ok := f.source.Report(); ok != wanted {
					t.Error("there is a report without a catalog")
				}
				allowed.Store(true)
				time.Sleep(2 * time.Minute)
				f.settle()
				if c, problems, _ := f.now(); c == nil || len(problems) > 0 {
					t.Errorf("catalog %v, problems %v", c != nil, problems)
				}
			})
		})
	}
}

// At the start the API may be away; that is told once.
func TestAPIAway(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var back atomic.Bool
		f := run(t, kube.Settings{}, func(c *dynamicfake.FakeDynamicClient) {
			c.PrependReactor("list", "*", func(clienttesting.Action) (bool, runtime.Object, error) {
				if back.Load() {
					return false, nil, nil
				}
				return true, nil, errors.New("connection refused")
			})
		}, set)
		time.Sleep(5 * time.Minute)
		c, problems, n := f.now()
		if c != nil || len(problems) != 1 || n != 1 || !strings.Contains(problems[0].Message, "the Kubernetes API cannot be read: connection refused") {
			t.Fatalf("applied %d times, problems %v", n, problems)
		}
		back.Store(true)
		time.Sleep(2 * time.Minute)
		if c, problems, _ := f.now(); c == nil || len(problems) > 0 {
			t.Errorf("catalog %v, problems %v", c != nil, problems)
		}
	})
}

// Pools of the inference extension are looked up with their Pods.
func TestExtensionPool(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var served atomic.Value
		served.Store("m")
		f := run(t, kube.Settings{Served: func(string) []string { return []string{served.Load().(string)} }}, nil, `
apiVersion: kinference.buoyant.io/v1alpha1
kind: InferencePool
metadata: { name: ours }
spec: { destinations: [ { group: inference.networking.k8s.io, kind: InferencePool, name: theirs } ] }
`, podOf("a", "u1", up))
		if _, problems, _ := f.now(); len(problems) != 1 || problems[0].Reason != resources.Missing {
			t.Errorf("problems %v", problems)
		}
		f.create(`
apiVersion: inference.networking.k8s.io/v1
kind: InferencePool
metadata: { name: theirs }
spec: { selector: { matchLabels: { app: vllm } }, targetPorts: [ { number: 8000 }, { number: 8001 } ] }
`)
		f.settle()
		f.want("ns.theirs.u1-8000 http://10.0.0.1:8000", "ns.theirs.u1-8001 http://10.0.0.1:8001")
		served.Store("n")
		f.source.Refresh()
		f.settle()
		if c, _, _ := f.now(); c.Models["n"] == nil || c.Models["m"] != nil {
			t.Errorf("models %v", c.Models)
		}
	})
}

// Only the namespaces that were asked for are read.
func TestNamespaces(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		other := strings.Replace(set, "name: chat", "name: chat, namespace: other, uid: other", 1)
		third := strings.Replace(set, "name: chat", "name: chat, namespace: third, uid: third", 1)
		f := run(t, kube.Settings{Namespaces: []string{"other", "ns", "ns"}}, nil, set, other, third)
		c, _, _ := f.now()
		if names := []string{c.Sets[0].Name, c.Sets[len(c.Sets)-1].Name}; len(c.Sets) != 2 || !slices.Equal(names, []string{"ns/chat", "other/chat"}) {
			t.Errorf("sets %v", names)
		}
		r, _ := f.source.Report()
		if r.Versions["InferenceWorkerSet/ns"] == "" || r.Versions["InferenceWorkerSet/other"] == "" || len(r.Versions) != 12 {
			t.Errorf("report %v", r.Versions)
		}
		for _, a := range f.client.Actions() {
			if ns := a.GetNamespace(); a.GetVerb() == "list" && ns != "ns" && ns != "other" {
				t.Errorf("listed %s in namespace %q", a.GetResource().Resource, ns)
			}
		}
	})
}

// The last good version of one resource may be in conflict with the newest of
// another: then that one is served as it was, too.
func TestOldVersionInConflict(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tenant := func(name, created, generation, spec string) string {
			return "apiVersion: kinference.buoyant.io/v1alpha1\nkind: InferenceTenant\nmetadata: { name: " + name + ", creationTimestamp: \"" + created +
				"\", generation: " + generation + " }\nspec: " + spec
		}
		const older, newer = "2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z"
		f := run(t, kube.Settings{}, nil,
			tenant("a", older, "1", "{ identities: [ { apiKeySecretRef: { name: keys } } ] }"), tenant("b", newer, "1", "{ weight: 7 }"))
		f.update(tenant("a", older, "2", "{ qos: Best }"))
		f.update(tenant("b", newer, "2", "{ weight: 8, identities: [ { apiKeySecretRef: { name: keys } } ] }"))
		c, problems, _ := f.now()
		if len(c.Tenants) != 2 || len(c.Tenants[0].Spec.Identities) != 1 || c.Tenants[1].Spec.Weight != 7 {
			t.Errorf("tenants %+v", c.Tenants)
		}
		var got []string
		for _, p := range problems {
			if p.Severity == resources.Error {
				got = append(got, p.Resource+": "+p.Field)
			}
		}
		if want := []string{"InferenceTenant ns/a: spec.qos", "InferenceTenant ns/b: spec.identities[0]"}; !slices.Equal(got, want) {
			t.Errorf("problems %v", problems)
		}
		if r, _ := f.source.Report(); r.Behind["uid-a"] != 1 || r.Behind["uid-b"] != 1 {
			t.Errorf("behind %v", r.Behind)
		}
		// Once a is mended without the claim, b has it.
		f.update(tenant("a", older, "3", "{ qos: interactive }"))
		c, problems, _ = f.now()
		if c.Tenants[1].Spec.Weight != 8 || problems.Err() != nil {
			t.Errorf("tenants %+v, problems %v", c.Tenants[1], problems)
		}
	})
}
