package kube

import (
	"fmt"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/tools/cache"

	"github.com/kinference/kinference/api/v1alpha1"
	"github.com/kinference/kinference/internal/resources"
)

// Kind is one of the six kinds.
type Kind struct {
	Name string
	// Resource is its name in URLs.
	Resource schema.GroupVersionResource
	// Empty makes a resource of the kind.
	Empty func() resources.Object
	// restricts says that without these resources more would be allowed.
	restricts bool
}

// Kinds are the kinds of the group kinference.buoyant.io, by name.
var Kinds = []Kind{
	{v1alpha1.KindGatewayBackend, plural("gatewaybackends"), func() resources.Object { return &v1alpha1.GatewayBackend{} }, true},
	{v1alpha1.KindInferencePolicy, plural("inferencepolicies"), func() resources.Object { return &v1alpha1.InferencePolicy{} }, true},
	{v1alpha1.KindInferencePool, plural("inferencepools"), func() resources.Object { return &v1alpha1.InferencePool{} }, true},
	{v1alpha1.KindInferenceProvider, plural("inferenceproviders"), func() resources.Object { return &v1alpha1.InferenceProvider{} }, false},
	{v1alpha1.KindInferenceTenant, plural("inferencetenants"), func() resources.Object { return &v1alpha1.InferenceTenant{} }, true},
	{v1alpha1.KindInferenceWorkerSet, plural("inferenceworkersets"), func() resources.Object { return &v1alpha1.InferenceWorkerSet{} }, false},
}

func plural(name string) schema.GroupVersionResource { return v1alpha1.GroupVersion.WithResource(name) }

// KindOf returns the kind with a name; nil when it is none of the six.
func KindOf(name string) *Kind {
	for i := range Kinds {
		if Kinds[i].Name == name {
			return &Kinds[i]
		}
	}
	return nil
}

// Decode turns what the API holds into the type of the kind. After a fault the
// resource has its metadata only.
func (k *Kind) Decode(content map[string]any) (resources.Object, error) {
	o := k.Empty()
	err := runtime.DefaultUnstructuredConverter.FromUnstructured(content, o)
	if err != nil {
		o, err = k.Empty(), fmt.Errorf("is not of this version's form: %w", err)
		u := &unstructured.Unstructured{Object: content}
		o.SetName(u.GetName())
		o.SetNamespace(u.GetNamespace())
		o.SetUID(u.GetUID())
		o.SetResourceVersion(u.GetResourceVersion())
		o.SetGeneration(u.GetGeneration())
		o.SetCreationTimestamp(u.GetCreationTimestamp())
		o.SetLabels(u.GetLabels())
	}
	o.SetManagedFields(nil)
	return o, err
}

// stored is how a resource of the six kinds is kept.
type stored struct {
	resources.Object
	kind *Kind
	// checked is nil after a fault, which says why the resource has no spec.
	checked *resources.Checked
	fault   error
}

// transform decodes a resource on its way into the store.
func (k *Kind) transform(obj any) (any, error) {
	u, ok := obj.(*unstructured.Unstructured)
	if !ok {
		return obj, nil // stored already
	}
	o, err := k.Decode(u.Object)
	if err != nil {
		return &stored{Object: o, kind: k, fault: err}, nil
	}
	return &stored{Object: o, kind: k, checked: resources.Check(o)}, nil
}

// changesCatalog tells whether a change of a resource is more than one of its
// status.
func (k *Kind) changesCatalog(before, after any) bool {
	a, okA := before.(*stored)
	b, okB := after.(*stored)
	return !okA || !okB || a.GetUID() != b.GetUID() || a.GetGeneration() != b.GetGeneration() || !sameLabels(a.GetLabels(), b.GetLabels())
}

// extension is how a pool of the Gateway API inference extension is kept.
type extension struct {
	metav1.ObjectMeta
	pool resources.ExtensionPool
}

var extensionPools = schema.GroupVersionResource{Group: v1alpha1.ExtensionGroup, Version: "v1", Resource: "inferencepools"}

func toExtension(obj any) (any, error) {
	u, ok := obj.(*unstructured.Unstructured)
	if !ok {
		return obj, nil
	}
	e := &extension{ObjectMeta: slim(u)}
	e.pool.Selector, _, _ = unstructured.NestedStringMap(u.Object, "spec", "selector", "matchLabels")
	ports, _, _ := unstructured.NestedSlice(u.Object, "spec", "targetPorts")
	for _, p := range ports {
		entry, _ := p.(map[string]any)
		if n, ok := entry["number"].(int64); ok && n > 0 && n < 1<<16 {
			e.pool.Ports = append(e.pool.Ports, int32(n))
		}
	}
	return e, nil
}

// slim keeps what is needed to know a resource again.
func slim(u *unstructured.Unstructured) metav1.ObjectMeta {
	return metav1.ObjectMeta{
		Name: u.GetName(), Namespace: u.GetNamespace(), UID: u.GetUID(), ResourceVersion: u.GetResourceVersion(),
		Generation: u.GetGeneration(), Labels: u.GetLabels(),
	}
}

var _ cache.TransformFunc = toExtension
