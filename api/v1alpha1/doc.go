// Package v1alpha1 holds the resources of the API group
// kinference.buoyant.io/v1alpha1 as plain Go types.
//
// They are the one source of the CustomResourceDefinitions, of the checks that
// need no code and of the reference: `make generate` writes deepcopy code
// beside them and the definitions into api/crd and the CRD chart. Defaults,
// bounds and rules between fields are markers here; internal/resources applies
// them offline as the Kubernetes API does, and adds what only code can say.
// Nothing here does I/O. Values are not safe for concurrent changes.
//
// +kubebuilder:object:generate=true
// +groupName=kinference.buoyant.io
// +versionName=v1alpha1
package v1alpha1
