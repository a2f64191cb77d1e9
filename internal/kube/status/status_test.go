package status

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	coordinationv1 "k8s.io/api/coordination/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"
	dynamicfake "k8s.io/client-go/dynamic/fake"
	clienttesting "k8s.io/client-go/testing"

	"github.com/kinference/kinference/api/v1alpha1"
	"github.com/kinference/kinference/internal/kube"
	"github.com/kinference/kinference/internal/resources"
)

func resource(generation, served int64, problems ...resources.Problem) *kube.Resource {
	o := &v1alpha1.InferenceWorkerSet{}
	o.Namespace, o.Name, o.UID, o.Generation = "ns", "chat", "u", generation
	return &kube.Resource{Object: o, Kind: kube.KindOf("InferenceWorkerSet"), Scope: "InferenceWorkerSet", Arrived: "100", Served: served, Problems: problems}
}

func brief(c metav1.Condition) string {
	return fmt.Sprintf("%s=%s %s: %s", c.Type, c.Status, c.Reason, c.Message)
}

func TestAcceptedAndResolvedRefs(t *testing.T) {
	fault := resources.Problem{Severity: resources.Error, Field: "spec.port", Message: "is odd"}
	claimed := resources.Problem{Severity: resources.Error, Reason: resources.Claimed, Field: "spec.hostnames[0]", Message: "is taken"}
	warning := resources.Problem{Field: "spec.x", Message: "has no effect"}
	missing := resources.Problem{Reason: resources.Missing, Field: "spec.poolRef.name", Message: `there is no InferencePool "p"`}
	for name, c := range map[string]struct {
		problems []resources.Problem
		want     []string
	}{
		"good":     {nil, []string{"Accepted=True Accepted: is valid", "ResolvedRefs=True ResolvedRefs: all that it refers to is there"}},
		"warning":  {[]resources.Problem{warning}, []string{"Accepted=True Accepted: is valid, but spec.x: has no effect", "ResolvedRefs=True ResolvedRefs: all that it refers to is there"}},
		"missing":  {[]resources.Problem{missing}, []string{"Accepted=True Accepted: is valid", `ResolvedRefs=False RefNotFound: spec.poolRef.name: there is no InferencePool "p"`}},
		"conflict": {[]resources.Problem{claimed}, []string{"Accepted=False Conflicted: spec.hostnames[0]: is taken", "ResolvedRefs=Unknown Invalid: references are followed once the resource is valid"}},
		"both": {[]resources.Problem{claimed, fault, missing}, []string{
			"Accepted=False Invalid: spec.hostnames[0]: is taken; spec.port: is odd", `ResolvedRefs=False RefNotFound: spec.poolRef.name: there is no InferencePool "p"`}},
	} {
		r := resource(1, 1, c.problems...)
		if diff := cmp.Diff(c.want, []string{brief(accepted(r)), brief(resolvedRefs(r))}); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
	long := resources.Problem{Severity: resources.Error, Message: strings.Repeat("ü", maxMessage)}
	if m := accepted(resource(1, 0, long)).Message; len(m) > maxMessage || !strings.HasSuffix(m, "ü...") {
		t.Errorf("%d bytes: %q", len(m), m[len(m)-8:])
	}
}

func TestProgrammed(t *testing.T) {
	now := time.Now()
	at := func(name, version string) *replica {
		return &replica{name: name, heard: now, report: kube.Report{Versions: map[string]string{"InferenceWorkerSet": version}}}
	}
	behind := func(generation int64) *replica {
		r := at("b", "200")
		r.report.Behind = map[types.UID]int64{"u": generation}
		return r
	}
	silent := at("b", "50")
	silent.heard = now.Add(-time.Minute)
	more := at("b", "200")
	more.report.More = true
	settled := &metav1.Condition{Status: metav1.ConditionTrue, ObservedGeneration: 3}
	for name, c := range map[string]struct {
		served   int64
		before   *metav1.Condition
		replicas []*replica
		want     string
	}{
		"all serve it":           {3, nil, []*replica{at("a", "100"), at("b", "1000")}, "True Programmed: every router replica serves this generation"},
		"one has not seen it":    {3, nil, []*replica{at("a", "100"), at("b", "99")}, "False Pending: router replica b does not serve this generation yet"},
		"one has seen nothing":   {3, nil, []*replica{at("a", "100"), at("b", "")}, "False Pending: router replica b does not serve this generation yet"},
		"one does not read it":   {3, nil, []*replica{at("a", "100"), {name: "b", heard: now}}, "False Pending: router replica b does not read InferenceWorkerSet"},
		"one serves an older":    {3, nil, []*replica{at("a", "100"), behind(2)}, "False Pending: router replica b serves generation 2"},
		"one serves none":        {3, settled, []*replica{at("a", "100"), behind(0)}, "False Pending: router replica b serves no generation of it"},
		"one is silent":          {3, nil, []*replica{at("a", "100"), silent}, "Unknown Pending: router replica b has not answered for a while"},
		"one says too much":      {3, nil, []*replica{more}, "False Pending: router replica b serves older generations of too many resources to name"},
		"one says nonsense":      {3, nil, []*replica{{name: "b", heard: now, fault: true}}, "False Pending: router replica b says something that this version does not understand"},
		"nobody says anything":   {3, nil, nil, "False Pending: no router replica has said what it serves"},
		"it was so before":       {3, settled, []*replica{silent}, "True Programmed: every router replica serves this generation"},
		"an older one was":       {4, settled, []*replica{at("b", "99")}, "False Pending: router replica b does not serve this generation yet"},
		"this one is bad":        {2, settled, []*replica{at("a", "100")}, "False Invalid: the router serves generation 2"},
		"this one was never any": {0, nil, []*replica{at("a", "100")}, "False Invalid: the router serves no generation of it"},
	} {
		generation := int64(3)
		if c.served > generation {
			generation = c.served
		}
		got := programmed(resource(generation, c.served), c.before, c.replicas, now)
		if got := strings.TrimPrefix(brief(got), "Programmed="); got != c.want {
			t.Errorf("%s: %s, want %s", name, got, c.want)
		}
	}
}

type fleet map[string]SetState

func (f fleet) WorkerSet(name string) (SetState, bool) { s, ok := f[name]; return s, ok }

// What is there already is not written again; what somebody else says is kept
// out of it.
func TestDesired(t *testing.T) {
	now := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	set := &resources.WorkerSet{Name: "ns/chat", Workers: []resources.Worker{{UID: "a"}, {UID: "b", NotReady: true}}}
	catalog := &resources.Catalog{
		Sets:  []*resources.WorkerSet{set},
		Pools: []*resources.Pool{{Name: "ns/pool", Members: []resources.Member{{Set: set}, {Provider: &resources.Provider{Name: "ns/p"}}}}},
	}
	replicas := []*replica{{name: "a", heard: now, report: kube.Report{Versions: map[string]string{"InferenceWorkerSet": "100", "InferencePool": "100"}}}}
	r := resource(1, 1)
	first := newView(catalog, nil, replicas, now).desired(r, r.Object)
	status := first.(*v1alpha1.InferenceWorkerSet).Status
	if status.Workers.Total != 2 || status.Workers.Ready != 1 || len(status.Conditions) != 3 || status.ObservedGeneration != 1 {
		t.Errorf("status %+v", status)
	}
	current := first.DeepCopyObject().(*v1alpha1.InferenceWorkerSet)
	current.Status.Conditions = append(current.Status.Conditions, metav1.Condition{Type: "Others", Status: "True"})
	later := now.Add(time.Hour)
	if again := newView(catalog, nil, replicas, later).desired(r, current); again != nil {
		t.Errorf("written again: %+v", again)
	}
	// The time of a condition is that of its last change.
	aware := metav1.Condition{Status: metav1.ConditionFalse, Reason: v1alpha1.ReasonLagging, Message: "events come late"}
	f := fleet{"ns/chat": {Total: 2, Ready: 2, BlockSize: 16, CacheAware: aware}}
	second := newView(catalog, f, replicas, later).desired(r, current).(*v1alpha1.InferenceWorkerSet)
	if c := find(second.Status.Conditions, "Accepted"); !c.LastTransitionTime.Time.Equal(now) {
		t.Errorf("Accepted changed at %v", c.LastTransitionTime)
	}
	if c := find(second.Status.Conditions, "CacheAware"); c == nil || !c.LastTransitionTime.Time.Equal(later) || c.Reason != "Lagging" || second.Status.BlockSize != 16 {
		t.Errorf("status %+v", second.Status)
	}
	if third := newView(catalog, nil, replicas, later).desired(r, second); third == nil || find(*conditionsOf(third), "CacheAware") != nil {
		t.Errorf("CacheAware stays: %+v", third)
	}
	pool := &v1alpha1.InferencePool{}
	pool.Namespace, pool.Name, pool.Generation = "ns", "pool", 1
	rp := &kube.Resource{Object: pool, Kind: kube.KindOf("InferencePool"), Scope: "InferencePool", Arrived: "7", Served: 1}
	got := newView(catalog, f, replicas, now).desired(rp, pool).(*v1alpha1.InferencePool).Status
	if got.Workers.Total != 2 || got.Workers.Ready != 2 || got.Providers != 1 {
		t.Errorf("pool %+v", got)
	}
}

// leases is a fake API with optimistic concurrency, which the fake client lacks.
func leases(t *testing.T) dynamic.ResourceInterface {
	t.Helper()
	client := dynamicfake.NewSimpleDynamicClientWithCustomListKinds(runtime.NewScheme(), map[schema.GroupVersionResource]string{leaseResource: "LeaseList"})
	var mu sync.Mutex
	version := 0
	stamp := func(a clienttesting.Action) (bool, runtime.Object, error) {
		mu.Lock()
		defer mu.Unlock()
		u := a.(clienttesting.UpdateAction).GetObject().(*unstructured.Unstructured)
		if a.GetVerb() == "update" && u.GetResourceVersion() != fmt.Sprint(version) {
			return true, nil, apierrors.NewConflict(leaseResource.GroupResource(), u.GetName(), errors.New("changed"))
		}
		version++
		u.SetResourceVersion(fmt.Sprint(version))
		return false, nil, nil
	}
	client.PrependReactor("create", "leases", stamp)
	client.PrependReactor("update", "leases", stamp)
	return client.Resource(leaseResource).Namespace("ns")
}

// One replica leads at a time. When it ends another one leads at once; when it
// dies, after its time.
func TestElection(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		api := leases(t)
		var mu sync.Mutex
		leading := map[string]bool{}
		start := func(name string, api dynamic.ResourceInterface) context.CancelFunc {
			ctx, cancel := context.WithCancel(t.Context())
			e := &elector{leases: api, name: "leader", identity: name}
			done := make(chan struct{})
			go func() {
				defer close(done)
				e.run(ctx, func(ctx context.Context) {
					mu.Lock()
					leading[name] = true
					if len(leading) > 1 {
						t.Errorf("lead together: %v", leading)
					}
					mu.Unlock()
					<-ctx.Done()
					mu.Lock()
					delete(leading, name)
					mu.Unlock()
				}, func(error) {})
			}()
			return func() { cancel(); <-done }
		}
		leads := func(want string) {
			t.Helper()
			synctest.Wait()
			mu.Lock()
			defer mu.Unlock()
			if !leading[want] || len(leading) != 1 {
				t.Errorf("%v lead, want %s", leading, want)
			}
		}
		stopA := start("a", api)
		time.Sleep(time.Second)
		leads("a")
		cut := &broken{ResourceInterface: api}
		stopB := start("b", cut)
		time.Sleep(time.Minute)
		leads("a")
		stopA()
		time.Sleep(tryEvery)
		leads("b")
		stopC := start("c", api)
		time.Sleep(time.Minute)
		leads("b")
		// b does not reach the API any more: it steps down before c takes over.
		cut.set(true)
		time.Sleep(giveUp + tryEvery)
		synctest.Wait()
		if mu.Lock(); len(leading) > 0 {
			t.Errorf("%v lead", leading)
		}
		mu.Unlock()
		time.Sleep(holdFor)
		leads("c")
		cut.set(false)
		time.Sleep(time.Minute)
		leads("c")
		stopB()
		stopC()
		lease, err := (&elector{leases: api, name: "leader"}).get(t.Context())
		if err != nil || *lease.Spec.HolderIdentity != "" || *lease.Spec.LeaseTransitions != 2 {
			t.Errorf("lease %+v: %v", lease.Spec, err)
		}
	})
}

// broken is a connection that can be cut.
type broken struct {
	dynamic.ResourceInterface
	mu  sync.Mutex
	cut bool
}

func (b *broken) set(cut bool) { b.mu.Lock(); defer b.mu.Unlock(); b.cut = cut }

func (b *broken) Get(ctx context.Context, name string, o metav1.GetOptions, sub ...string) (*unstructured.Unstructured, error) {
	b.mu.Lock()
	cut := b.cut
	b.mu.Unlock()
	if cut {
		return nil, errors.New("no route to host")
	}
	return b.ResourceInterface.Get(ctx, name, o, sub...)
}

func TestReplica(t *testing.T) {
	who := "router-a"
	lease := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Name: "x", Annotations: map[string]string{annotationServes: `{"versions":{"InferencePool":"7"},"behind":{"u":0}}`}}}
	lease.Spec.HolderIdentity = &who
	u, err := toUnstructured(lease, "coordination.k8s.io/v1", "Lease")
	if err != nil {
		t.Fatal(err)
	}
	r := toReplica(u, time.Now())
	if r.name != who || r.fault || r.report.Versions["InferencePool"] != "7" || len(r.report.Behind) != 1 {
		t.Errorf("%+v", r)
	}
	u.SetAnnotations(map[string]string{annotationServes: "[1"})
	if r := toReplica(u, time.Now()); !r.fault {
		t.Error("nonsense is understood")
	}
}

func TestSettings(t *testing.T) {
	s := kube.NewSource(kube.Settings{Client: dynamicfake.NewSimpleDynamicClient(runtime.NewScheme())}, nil)
	client := dynamicfake.NewSimpleDynamicClient(runtime.NewScheme())
	good := Settings{Source: s, Client: client, Leases: client, Namespace: "ns", Name: "kinference-router", Identity: "router-0"}
	if _, err := New(good); err != nil {
		t.Error(err)
	}
	bad := good
	bad.Identity = "No Name"
	if _, err := New(bad); err == nil || !strings.Contains(err.Error(), "is no name of a Lease") {
		t.Error(err)
	}
	if _, err := New(Settings{}); err == nil {
		t.Error("nothing is needed")
	}
}
