package kube

import (
	"maps"
	"slices"
	"strings"
	"sync"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/tools/cache"

	"github.com/kinference/kinference/internal/resources"
)

var podResource = schema.GroupVersionResource{Version: "v1", Resource: "pods"}

// pod is what is kept of a Pod.
type pod struct {
	metav1.ObjectMeta
	address string
	ready   bool
	// ending: it is being deleted, or all its containers have ended.
	ending bool
}

// toPod keeps of a Pod what is needed: a cluster has many.
func toPod(obj any) (any, error) {
	u, ok := obj.(*unstructured.Unstructured)
	if !ok {
		return obj, nil
	}
	p := &pod{ObjectMeta: slim(u)}
	status, _, _ := unstructured.NestedMap(u.Object, "status")
	p.address, _ = status["podIP"].(string)
	phase, _ := status["phase"].(string)
	p.ending = u.GetDeletionTimestamp() != nil || phase == "Succeeded" || phase == "Failed"
	conditions, _ := status["conditions"].([]any)
	for _, c := range conditions {
		if c, _ := c.(map[string]any); c["type"] == "Ready" {
			p.ready = c["status"] == "True"
		}
	}
	return p, nil
}

// worker tells whether an engine can be in the Pod: it has an address and is
// not about to end. It need not be ready.
func (p *pod) worker() bool { return p.address != "" && !p.ending }

func (p *pod) equal(o *pod) bool {
	return p.UID == o.UID && p.address == o.address && p.ready == o.ready && p.ending == o.ending && sameLabels(p.Labels, o.Labels)
}

func sameLabels(a, b map[string]string) bool { return maps.Equal(a, b) }

// pods finds the Pods that selectors select, and remembers the selectors, so that
// the coming and going of all other Pods costs nothing.
type pods struct {
	// stores by namespace, or the one of all namespaces under "".
	stores map[string]cache.Indexer

	mu sync.Mutex
	// selectors by namespace, of the catalog and of the one that is being made.
	selectors map[string][]map[string]string
	next      map[string][]map[string]string
}

// begin starts a compilation, end its use.
func (p *pods) begin() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.next = map[string][]map[string]string{}
}

func (p *pods) end() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.selectors, p.next = p.next, nil
}

// find implements resources.Options.Pods. The selector is remembered before the
// store is read: a Pod that comes between is not missed.
func (p *pods) find(namespace string, labels map[string]string) []resources.Pod {
	p.mu.Lock()
	p.next[namespace] = append(p.next[namespace], labels)
	p.mu.Unlock()
	store := p.stores[namespace]
	if store == nil {
		store = p.stores[""]
	}
	if store == nil {
		return nil
	}
	all, err := store.ByIndex(cache.NamespaceIndex, namespace)
	if err != nil {
		return nil // there is such an index
	}
	var out []resources.Pod
	for _, obj := range all {
		if pod, ok := obj.(*pod); ok && pod.worker() && matches(labels, pod.Labels) {
			out = append(out, resources.Pod{UID: string(pod.UID), Name: pod.Name, Address: pod.address, Labels: pod.Labels, NotReady: !pod.ready})
		}
	}
	slices.SortFunc(out, func(a, b resources.Pod) int { return strings.Compare(a.Name, b.Name) })
	return out
}

// relevant tells whether a change of a Pod is one of a worker.
func (p *pods) relevant(before, after any) bool {
	a, okA := before.(*pod)
	b, okB := after.(*pod)
	switch {
	case okA && okB && (a.equal(b) || !a.worker() && !b.worker()):
		return false
	case okA && !okB && !a.worker(), okB && !okA && !b.worker():
		return false
	}
	return okA && p.selected(a) || okB && p.selected(b)
}

func (p *pods) selected(x *pod) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	match := func(labels map[string]string) bool { return matches(labels, x.Labels) }
	return slices.ContainsFunc(p.selectors[x.Namespace], match) || slices.ContainsFunc(p.next[x.Namespace], match)
}

func matches(selector, labels map[string]string) bool {
	if len(selector) == 0 {
		return false // no selector takes every Pod
	}
	for k, v := range selector {
		if got, ok := labels[k]; !ok || got != v {
			return false
		}
	}
	return true
}
