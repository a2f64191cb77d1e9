package v1alpha1

import metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

// KindInferencePool is the kind of InferencePool.
const KindInferencePool = "InferencePool"

// InferencePool gathers the destinations among which requests are spread.
type InferencePool struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec   InferencePoolSpec   `json:"spec"`
	Status InferencePoolStatus `json:"status,omitempty"`
}

// InferencePoolSpec lists destinations, or selects worker Pods directly:
// exactly one of the two is given.
type InferencePoolSpec struct {
	Destinations []Destination         `json:"destinations,omitempty"`
	Selector     *metav1.LabelSelector `json:"selector,omitempty"`
	Objectives   []Objective           `json:"objectives,omitempty"`
}

// Destination refers to a resource of the same namespace.
type Destination struct {
	// Group of Kind. Default: this group.
	Group string `json:"group,omitempty"`
	// Kind is InferenceWorkerSet, InferenceProvider or, in the group
	// inference.networking.k8s.io, InferencePool.
	Kind string `json:"kind"`
	Name string `json:"name"`
	// Weight as a share of the sum of weights. Default 1.
	Weight *int32 `json:"weight,omitempty"`
}

// InferencePoolStatus is what the router observed.
type InferencePoolStatus struct {
	Conditions []metav1.Condition `json:"conditions,omitempty"`
}
