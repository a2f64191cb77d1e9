package v1alpha1

import (
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// KindInferenceTenant is the kind of InferenceTenant.
const KindInferenceTenant = "InferenceTenant"

// InferenceTenant is someone who sends requests: who they are, and what they
// may use.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:path=inferencetenants,shortName=ktenant,categories=kinference
// +kubebuilder:printcolumn:name="Parent",type=string,JSONPath=`.spec.parentRef.name`
// +kubebuilder:printcolumn:name="QoS",type=string,JSONPath=`.spec.qos`
// +kubebuilder:printcolumn:name="Weight",type=integer,JSONPath=`.spec.weight`
// +kubebuilder:printcolumn:name="Keys",type=integer,JSONPath=`.status.apiKeys`
// +kubebuilder:printcolumn:name="Accepted",type=string,JSONPath=`.status.conditions[?(@.type=="Accepted")].status`
// +kubebuilder:printcolumn:name="Programmed",type=string,JSONPath=`.status.conditions[?(@.type=="Programmed")].status`,priority=1
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
type InferenceTenant struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// Spec is what is wanted.
	//
	// +kubebuilder:default={}
	Spec InferenceTenantSpec `json:"spec,omitempty"`
	// Status is what the router observed.
	Status InferenceTenantStatus `json:"status,omitempty"`
}

// InferenceTenantList is a list of InferenceTenant.
//
// +kubebuilder:object:root=true
type InferenceTenantList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []InferenceTenant `json:"items"`
}

// InferenceTenantSpec describes the tenant.
type InferenceTenantSpec struct {
	// ParentRef names the tenant that this one belongs to: a request must fit
	// the limits of both. Eight levels at most.
	ParentRef *LocalReference `json:"parentRef,omitempty"`
	// Identities by which a caller is known to be this tenant. Of several tenants
	// in a namespace with the same identity the oldest has it.
	//
	// +kubebuilder:validation:MaxItems=64
	// +listType=atomic
	Identities []Identity `json:"identities,omitempty"`
	// QoS class of its requests. Absent: the parent's, else the GatewayBackend's.
	QoS QoS `json:"qos,omitempty"`
	// Weight is the share when workers are short.
	//
	// +kubebuilder:default=1
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=1000
	Weight int32 `json:"weight,omitempty"`
	// CostCenter stands in usage records.
	//
	// +kubebuilder:validation:MaxLength=128
	CostCenter string `json:"costCenter,omitempty"`
	// MaxTokens bounds the length of answers.
	MaxTokens *MaxTokens `json:"maxTokens,omitempty"`
	// Cache tells with whom prefix-cache hits may be shared.
	//
	// +kubebuilder:default={}
	Cache *TenantCache `json:"cache,omitempty"`
	// Limits of what it may use.
	//
	// +kubebuilder:validation:MaxItems=64
	// +listType=map
	// +listMapKey=name
	Limits []Limit `json:"limits,omitempty"`
	// Objectives of its requests.
	//
	// +kubebuilder:validation:MaxItems=64
	// +listType=map
	// +listMapKey=name
	Objectives []Objective `json:"objectives,omitempty"`
}

// Identity is one way to know a caller. Exactly one field is given.
//
// +kubebuilder:validation:XValidation:rule="[has(self.apiKeySecretRef), has(self.claim), has(self.serviceAccount)].filter(given, given).size() == 1",message="give exactly one of apiKeySecretRef, claim and serviceAccount"
type Identity struct {
	// APIKeySecretRef names a Secret of the same namespace with records of API
	// keys, made by kinfctl keys create. In Kubernetes it must have the label
	// kinference.buoyant.io/api-keys: "true".
	APIKeySecretRef *LocalReference `json:"apiKeySecretRef,omitempty"`
	// Claim of a JWT: the one that the GatewayBackend names for its issuer.
	Claim *ClaimIdentity `json:"claim,omitempty"`
	// ServiceAccount of this cluster.
	ServiceAccount *ServiceAccountIdentity `json:"serviceAccount,omitempty"`
}

// ClaimIdentity is a claim with an exact value in the tokens of an issuer.
type ClaimIdentity struct {
	// Issuer is the token's iss, as a GatewayBackend trusts it.
	Issuer SecureURL `json:"issuer"`
	// Name of the claim.
	//
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=256
	Name string `json:"name"`
	// Value of the claim.
	//
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=256
	Value string `json:"value"`
}

// ServiceAccountIdentity is a ServiceAccount.
type ServiceAccountIdentity struct {
	// Namespace of the ServiceAccount.
	Namespace EntryName `json:"namespace"`
	// Name of the ServiceAccount.
	Name ResourceName `json:"name"`
}

// MaxTokens bounds the length of answers.
//
// +kubebuilder:validation:XValidation:rule="!has(self.default) || !has(self.maximum) || self.default <= self.maximum",message="is larger than maximum",fieldPath=".default"
type MaxTokens struct {
	// Default where a request does not say. Absent: as the engine decides.
	//
	// +kubebuilder:validation:Minimum=1
	Default int32 `json:"default,omitempty"`
	// Maximum that a request may ask for; more is cut to it.
	//
	// +kubebuilder:validation:Minimum=1
	Maximum int32 `json:"maximum,omitempty"`
}

// TenantCache tells with whom prefix-cache hits may be shared.
type TenantCache struct {
	// Scope is Tenant, User, or Shared:<group> for all tenants of the namespace
	// that name the same group.
	//
	// +kubebuilder:default=Tenant
	Scope CacheScope `json:"scope,omitempty"`
}

// CacheScope is Tenant, User or Shared:<group>.
//
// +kubebuilder:validation:MaxLength=70
// +kubebuilder:validation:Pattern=`^(Tenant|User|Shared:[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?)$`
// +kubebuilder:title="one of Tenant, User and Shared:<group>, where the group has lower-case letters, digits and dashes"
type CacheScope string

// The scopes without a group.
const (
	CacheScopeTenant CacheScope = "Tenant"
	CacheScopeUser   CacheScope = "User"
)

// Group returns the group of a scope Shared:<group>, else nothing.
func (s CacheScope) Group() string {
	group, _ := strings.CutPrefix(string(s), "Shared:")
	if group == string(s) {
		return ""
	}
	return group
}

// InferenceTenantStatus is what the router observed.
type InferenceTenantStatus struct {
	// ObservedGeneration that the status speaks of.
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`
	// APIKeys that were found in its Secrets.
	APIKeys int32 `json:"apiKeys,omitempty"`
	// Conditions: Accepted, ResolvedRefs, Programmed.
	//
	// +kubebuilder:validation:MaxItems=8
	// +listType=map
	// +listMapKey=type
	Conditions []metav1.Condition `json:"conditions,omitempty"`
}
