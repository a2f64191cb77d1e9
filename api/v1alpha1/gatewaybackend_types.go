package v1alpha1

import metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

// KindGatewayBackend is the kind of GatewayBackend.
const KindGatewayBackend = "GatewayBackend"

// GatewayBackend is what the gateway exposes: under which hostnames and path a
// pool is reached, and who may.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:path=gatewaybackends,shortName=kgw,categories=kinference
// +kubebuilder:printcolumn:name="Pool",type=string,JSONPath=`.spec.poolRef.name`
// +kubebuilder:printcolumn:name="Hostnames",type=string,JSONPath=`.spec.hostnames`
// +kubebuilder:printcolumn:name="Path",type=string,JSONPath=`.spec.pathPrefix`,priority=1
// +kubebuilder:printcolumn:name="Accepted",type=string,JSONPath=`.status.conditions[?(@.type=="Accepted")].status`
// +kubebuilder:printcolumn:name="Programmed",type=string,JSONPath=`.status.conditions[?(@.type=="Programmed")].status`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
type GatewayBackend struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// Spec is what is wanted.
	Spec GatewayBackendSpec `json:"spec"`
	// Status is what the router observed.
	Status GatewayBackendStatus `json:"status,omitempty"`
}

// GatewayBackendList is a list of GatewayBackend.
//
// +kubebuilder:object:root=true
type GatewayBackendList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []GatewayBackend `json:"items"`
}

// GatewayBackendSpec describes what is exposed.
type GatewayBackendSpec struct {
	// Hostnames that clients use, whatever the port. Absent: every one. A star
	// stands for the first label. A request goes to the backend with its hostname
	// before one with a star, to that before one without, and then to the longest
	// path. As soon as there is any GatewayBackend, what matches none is not
	// served.
	//
	// +kubebuilder:validation:MaxItems=64
	// +listType=set
	Hostnames []Hostname `json:"hostnames,omitempty"`
	// PathPrefix of the requests. It is cut off, so that what follows is
	// /v1/chat/completions and the like. It matches whole path elements.
	//
	// +kubebuilder:default=/
	// +kubebuilder:validation:MaxLength=256
	// +kubebuilder:validation:Pattern=`^/([A-Za-z0-9._~-]+(/[A-Za-z0-9._~-]+)*)?$`
	// +kubebuilder:title="a path such as / or /team/llm, without a slash at its end"
	PathPrefix string `json:"pathPrefix,omitempty"`
	// PoolRef names the InferencePool that answers. In a namespace without pools
	// the name default stands for all that the namespace has.
	PoolRef LocalReference `json:"poolRef"`
	// Authentication says who may send requests. A request whose credential is
	// wrong is refused, whatever else is allowed.
	//
	// +kubebuilder:default={apiKeys: {}}
	Authentication *Authentication `json:"authentication,omitempty"`
	// DefaultQoS of requests whose tenant says nothing else. The header
	// X-Kinference-Qos of a request can only lower it.
	//
	// +kubebuilder:default=interactive
	DefaultQoS QoS `json:"defaultQos,omitempty"`
	// Limits of a request.
	//
	// +kubebuilder:default={}
	Limits *RequestLimits `json:"limits,omitempty"`
	// Timeouts of a request.
	//
	// +kubebuilder:default={}
	Timeouts *GatewayTimeouts `json:"timeouts,omitempty"`
}

// Hostname is a DNS name, whose first label may be a star.
//
// +kubebuilder:validation:MinLength=1
// +kubebuilder:validation:MaxLength=253
// +kubebuilder:validation:Pattern=`^(\*\.)?[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$`
// +kubebuilder:title="a hostname such as llm.example.com or *.example.com, in lower case and without port"
type Hostname string

// Authentication lists the ways in. At least one is given.
//
// +kubebuilder:validation:XValidation:rule="has(self.apiKeys) || has(self.jwt) || has(self.serviceAccounts) || has(self.anonymous)",message="give at least one of apiKeys, jwt, serviceAccounts and anonymous"
type Authentication struct {
	// APIKeys accepts the keys of the InferenceTenants in this namespace.
	APIKeys *APIKeys `json:"apiKeys,omitempty"`
	// JWT accepts tokens of these issuers.
	//
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=16
	// +listType=map
	// +listMapKey=issuer
	JWT []JWTIssuer `json:"jwt,omitempty"`
	// ServiceAccounts accepts tokens of this cluster's ServiceAccounts.
	ServiceAccounts *ServiceAccounts `json:"serviceAccounts,omitempty"`
	// Anonymous takes requests without any credential for those of a tenant. It
	// is never what a wrong credential falls back to.
	Anonymous *Anonymous `json:"anonymous,omitempty"`
}

// APIKeys has no settings: the tenants name the Secrets.
type APIKeys struct{}

// JWTIssuer is trusted to say who a caller is.
type JWTIssuer struct {
	// Issuer is the token's iss.
	Issuer SecureURL `json:"issuer"`
	// Audiences of which the token's aud must have one.
	//
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=16
	// +kubebuilder:validation:items:MinLength=1
	// +kubebuilder:validation:items:MaxLength=256
	// +listType=set
	Audiences []string `json:"audiences"`
	// JWKSURI is where the issuer's keys are.
	JWKSURI SecureURL `json:"jwksURI"`
	// TenantClaim whose value, a string or a list of them, identifies the tenant
	// by its identities.
	//
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=256
	TenantClaim string `json:"tenantClaim"`
}

// ServiceAccounts accepts tokens of ServiceAccounts.
type ServiceAccounts struct {
	// Audience that the token must be made for.
	//
	// +kubebuilder:default=kinference
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=256
	Audience string `json:"audience,omitempty"`
}

// Anonymous takes callers without a credential for a tenant.
type Anonymous struct {
	// Tenant is an InferenceTenant of this namespace.
	Tenant ResourceName `json:"tenant"`
}

// RequestLimits bound the size of a request.
type RequestLimits struct {
	// Body of a request, 99Mi at most.
	//
	// +kubebuilder:default="4Mi"
	// +kubebuilder:validation:Pattern=`^([1-9][0-9]{0,3}Ki|[1-9][0-9]?Mi)$`
	// +kubebuilder:title="a size such as 512Ki or 4Mi (99Mi at most)"
	Body Size `json:"body,omitempty"`
	// Headers of a request together, 999Ki at most.
	//
	// +kubebuilder:default="64Ki"
	// +kubebuilder:validation:Pattern=`^[1-9][0-9]{0,2}Ki$`
	// +kubebuilder:title="a size such as 64Ki (999Ki at most)"
	Headers Size `json:"headers,omitempty"`
}

// GatewayTimeouts bound a request.
//
// +kubebuilder:validation:XValidation:rule="!has(self.idle) || !has(self.total) || duration(self.idle) <= duration(self.total)",message="is longer than total",fieldPath=".idle"
type GatewayTimeouts struct {
	// Idle is the longest silence on a connection, 1s to 1h.
	//
	// +kubebuilder:default="60s"
	// +kubebuilder:validation:XValidation:rule="duration(self) >= duration('1s') && duration(self) <= duration('1h')",message="is not between 1s and 1h"
	Idle Duration `json:"idle,omitempty"`
	// Total of a request, 1s to 24h.
	//
	// +kubebuilder:default="30m"
	// +kubebuilder:validation:XValidation:rule="duration(self) >= duration('1s') && duration(self) <= duration('24h')",message="is not between 1s and 24h"
	Total Duration `json:"total,omitempty"`
}

// GatewayBackendStatus is what the router observed.
type GatewayBackendStatus struct {
	// ObservedGeneration that the status speaks of.
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`
	// Tenants that can send requests.
	Tenants int32 `json:"tenants,omitempty"`
	// Conditions: Accepted, ResolvedRefs, Programmed.
	//
	// +kubebuilder:validation:MaxItems=8
	// +listType=map
	// +listMapKey=type
	Conditions []metav1.Condition `json:"conditions,omitempty"`
}
