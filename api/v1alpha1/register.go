package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

const (
	// Group is the API group of all kinds.
	Group = "kinference.buoyant.io"
	// Version is the version of this package's types.
	Version = "v1alpha1"
	// APIVersion is what resources carry in apiVersion.
	APIVersion = Group + "/" + Version
)

// GroupVersion of all kinds, for a client.
var GroupVersion = schema.GroupVersion{Group: Group, Version: Version}

// AddToScheme registers all kinds, so that clients can read and write them.
func AddToScheme(s *runtime.Scheme) error {
	s.AddKnownTypes(GroupVersion,
		&GatewayBackend{}, &GatewayBackendList{},
		&InferencePolicy{}, &InferencePolicyList{},
		&InferencePool{}, &InferencePoolList{},
		&InferenceProvider{}, &InferenceProviderList{},
		&InferenceTenant{}, &InferenceTenantList{},
		&InferenceWorkerSet{}, &InferenceWorkerSetList{},
	)
	metav1.AddToGroupVersion(s, GroupVersion)
	return nil
}
