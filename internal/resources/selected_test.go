package resources_test

import (
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/kinference/kinference/api/v1alpha1"
	"github.com/kinference/kinference/internal/resources"
)

// A pool of the inference extension has a worker behind each port of each Pod,
// and serves what all engines that have answered say.
func TestExtensionPool(t *testing.T) {
	pool := &v1alpha1.InferencePool{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "ours"}}
	pool.Spec.Destinations = []v1alpha1.Destination{
		{Group: v1alpha1.ExtensionGroup, Kind: "InferencePool", Name: "theirs"},
		{Group: v1alpha1.ExtensionGroup, Kind: "InferencePool", Name: "nowhere"},
	}
	options := resources.Options{
		Pods: func(_ string, labels map[string]string) []resources.Pod {
			if labels["app"] != "vllm" {
				t.Errorf("labels %v", labels)
			}
			return []resources.Pod{{UID: "u1", Name: "a", Address: "10.0.0.1"}, {UID: "u2", Name: "b", Address: "fd00::1", NotReady: true}}
		},
		Extension: func(namespace, name string) *resources.ExtensionPool {
			if namespace+"/"+name != "ns/theirs" {
				return nil
			}
			return &resources.ExtensionPool{Selector: map[string]string{"app": "vllm"}, Ports: []int32{8000, 8001}}
		},
		Served: func(worker string) []string {
			return map[string][]string{"ns.theirs.u1-8000": {"m", "lora"}, "ns.theirs.u1-8001": {"m"}, "ns.theirs.u2-8000": {"m", "other"}}[worker]
		},
	}
	c, problems := options.Compile([]resources.Object{pool})
	if len(problems) != 1 || problems[0].Reason != resources.Missing || !strings.Contains(problems[0].String(), `spec.destinations[1].name: there is no InferencePool "nowhere"`) {
		t.Error(problems)
	}
	var got []string
	for _, w := range c.Sets[0].Workers {
		state := ""
		if w.NotReady {
			state = " not ready"
		}
		got = append(got, w.UID+" "+w.URL+state)
	}
	want := []string{
		"ns.theirs.u1-8000 http://10.0.0.1:8000", "ns.theirs.u1-8001 http://10.0.0.1:8001",
		"ns.theirs.u2-8000 http://[fd00::1]:8000 not ready", "ns.theirs.u2-8001 http://[fd00::1]:8001 not ready",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	if models := slices.Sorted(maps.Keys(c.Models)); !slices.Equal(models, []string{"m"}) || len(c.Pools[0].Sets) != 1 {
		t.Errorf("models %v, pools %+v", models, c.Pools[0])
	}
}

// Whoever came first keeps a host; the problem says that it is about that.
func TestClaimed(t *testing.T) {
	_, problems := load(t, resources.Options{}, "testdata/bad/gateway-same-host.bad.yaml")
	if i := slices.IndexFunc(problems, func(p resources.Problem) bool { return p.Severity == resources.Error }); i < 0 || problems[i].Reason != resources.Claimed {
		t.Error(problems)
	}
}
