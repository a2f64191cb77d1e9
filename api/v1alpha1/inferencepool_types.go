package v1alpha1

import metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

// KindInferencePool is the kind of InferencePool.
const KindInferencePool = "InferencePool"

// ExtensionGroup is the group of the Gateway API inference extension, whose
// InferencePool a Destination may name.
const ExtensionGroup = "inference.networking.k8s.io"

// InferencePool gathers the destinations among which requests are spread.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:path=inferencepools,shortName=kpool,categories=kinference
// +kubebuilder:printcolumn:name="Ready",type=integer,JSONPath=`.status.workers.ready`
// +kubebuilder:printcolumn:name="Workers",type=integer,JSONPath=`.status.workers.total`
// +kubebuilder:printcolumn:name="Providers",type=integer,JSONPath=`.status.providers`
// +kubebuilder:printcolumn:name="Resolved",type=string,JSONPath=`.status.conditions[?(@.type=="ResolvedRefs")].status`
// +kubebuilder:printcolumn:name="Programmed",type=string,JSONPath=`.status.conditions[?(@.type=="Programmed")].status`,priority=1
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
type InferencePool struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// Spec is what is wanted.
	Spec InferencePoolSpec `json:"spec"`
	// Status is what the router observed.
	Status InferencePoolStatus `json:"status,omitempty"`
}

// InferencePoolList is a list of InferencePool.
//
// +kubebuilder:object:root=true
type InferencePoolList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []InferencePool `json:"items"`
}

// InferencePoolSpec lists destinations, or selects worker Pods directly:
// exactly one of the two is given.
//
// +kubebuilder:validation:XValidation:rule="has(self.destinations) != has(self.selector)",message="give destinations or selector, one of the two"
// +kubebuilder:validation:XValidation:rule="has(self.selector) || !has(self.models)",message="is of no use without selector: worker sets and providers name their models",fieldPath=".models"
// +kubebuilder:validation:XValidation:rule="has(self.selector) || !has(self.port)",message="is of no use without selector",fieldPath=".port"
type InferencePoolSpec struct {
	// Destinations are worker sets, providers and pools of the Gateway API
	// inference extension.
	//
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=256
	// +listType=map
	// +listMapKey=group
	// +listMapKey=kind
	// +listMapKey=name
	// +kubebuilder:validation:XValidation:rule="self.exists(d, d.weight > 0)",message="at least one weight must be above 0"
	Destinations []Destination `json:"destinations,omitempty"`
	// Selector selects worker Pods of the same namespace. They are served as if
	// by a worker set with this pool's name, of which all else is default.
	Selector *LabelSelector `json:"selector,omitempty"`
	// Port of the selected Pods' HTTP server. Default 8000.
	//
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=65535
	Port int32 `json:"port,omitempty"`
	// Models that the selected Pods serve. Absent: what the engines say in
	// /v1/models.
	//
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=256
	// +listType=map
	// +listMapKey=name
	Models []WorkerModel `json:"models,omitempty"`
	// Objectives of the pool's requests.
	//
	// +kubebuilder:validation:MaxItems=64
	// +listType=map
	// +listMapKey=name
	Objectives []Objective `json:"objectives,omitempty"`
}

// Destination refers to a resource of the same namespace.
//
// +kubebuilder:validation:XValidation:rule="self.group == 'inference.networking.k8s.io' ? self.kind == 'InferencePool' : self.kind in ['InferenceWorkerSet', 'InferenceProvider']",message="is not of this group: want InferenceWorkerSet or InferenceProvider, or InferencePool of group inference.networking.k8s.io",fieldPath=".kind"
type Destination struct {
	// Group of Kind.
	//
	// +kubebuilder:default=kinference.buoyant.io
	// +kubebuilder:validation:Enum=kinference.buoyant.io;inference.networking.k8s.io
	Group string `json:"group,omitempty"`
	// Kind is InferenceWorkerSet, InferenceProvider or, in the group
	// inference.networking.k8s.io, InferencePool.
	//
	// +kubebuilder:validation:Enum=InferenceWorkerSet;InferenceProvider;InferencePool
	Kind string `json:"kind"`
	// Name of the resource.
	Name ResourceName `json:"name"`
	// Weight as a share of the sum of weights.
	//
	// +kubebuilder:default=1
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=1000000
	Weight *int32 `json:"weight,omitempty"`
}

// InferencePoolStatus is what the router observed.
type InferencePoolStatus struct {
	// ObservedGeneration that the status speaks of.
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`
	// Workers of all destinations.
	Workers *WorkerCount `json:"workers,omitempty"`
	// Providers among the destinations.
	Providers int32 `json:"providers,omitempty"`
	// Conditions: Accepted, ResolvedRefs, Programmed.
	//
	// +kubebuilder:validation:MaxItems=8
	// +listType=map
	// +listMapKey=type
	Conditions []metav1.Condition `json:"conditions,omitempty"`
}
