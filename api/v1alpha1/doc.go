// Package v1alpha1 holds the resources of the API group
// kinference.buoyant.io/v1alpha1 as plain Go types.
//
// internal/resources loads and compiles them; nothing here does I/O. Values
// are not safe for concurrent changes. The kinds GatewayBackend,
// InferencePolicy, InferenceProvider and InferenceTenant belong to the group
// too and have no types yet.
package v1alpha1

const (
	// Group is the API group of all kinds.
	Group = "kinference.buoyant.io"
	// Version is the version of this package's types.
	Version = "v1alpha1"
	// APIVersion is what resources carry in apiVersion.
	APIVersion = Group + "/" + Version
)
