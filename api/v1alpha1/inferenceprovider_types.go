package v1alpha1

import metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

// KindInferenceProvider is the kind of InferenceProvider.
const KindInferenceProvider = "InferenceProvider"

// InferenceProvider is a third party that answers requests for money.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:path=inferenceproviders,shortName=kprov,categories=kinference
// +kubebuilder:printcolumn:name="Schema",type=string,JSONPath=`.spec.schema`
// +kubebuilder:printcolumn:name="Accepted",type=string,JSONPath=`.status.conditions[?(@.type=="Accepted")].status`
// +kubebuilder:printcolumn:name="Resolved",type=string,JSONPath=`.status.conditions[?(@.type=="ResolvedRefs")].status`
// +kubebuilder:printcolumn:name="Programmed",type=string,JSONPath=`.status.conditions[?(@.type=="Programmed")].status`,priority=1
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
type InferenceProvider struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// Spec is what is wanted.
	Spec InferenceProviderSpec `json:"spec"`
	// Status is what the router observed.
	Status InferenceProviderStatus `json:"status,omitempty"`
}

// InferenceProviderList is a list of InferenceProvider.
//
// +kubebuilder:object:root=true
type InferenceProviderList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []InferenceProvider `json:"items"`
}

// InferenceProviderSpec tells how the provider is reached and what it serves.
//
// +kubebuilder:validation:XValidation:rule="self.schema != 'Bedrock' || has(self.region)",message="is required with schema Bedrock, as in us-east-1",fieldPath=".region"
// +kubebuilder:validation:XValidation:rule="self.schema == 'Bedrock' || !has(self.region)",message="is of no use with this schema: only Bedrock has regions",fieldPath=".region"
// +kubebuilder:validation:XValidation:rule="!(self.schema in ['AzureOpenAI', 'Databricks', 'OpenAICompatible']) || has(self.endpoint)",message="is required with this schema: the URL of your deployment",fieldPath=".endpoint"
// +kubebuilder:validation:XValidation:rule="self.schema == 'OpenAICompatible' || !has(self.endpoint) || self.endpoint.matches('^(https://|http://(localhost|127[.]0[.]0[.]1)(:|/|$))')",message="must be an https URL; http, other than to the loopback interface, is for schema OpenAICompatible",fieldPath=".endpoint"
// +kubebuilder:validation:XValidation:rule="self.schema == 'OpenAICompatible' || has(self.credentials)",message="is required with this schema",fieldPath=".credentials"
// +kubebuilder:validation:XValidation:rule="!has(self.credentials) || !has(self.credentials.workloadIdentity) || self.schema in ['Bedrock', 'AzureOpenAI', 'Databricks']",message="workloadIdentity is for Bedrock, AzureOpenAI and Databricks: give secretRef",fieldPath=".credentials"
type InferenceProviderSpec struct {
	// Schema is the API that the provider speaks.
	Schema ProviderSchema `json:"schema"`
	// Endpoint is the base URL. Default: the public one of OpenAI, Anthropic and
	// of Bedrock in Region.
	Endpoint URL `json:"endpoint,omitempty"`
	// Region of Bedrock.
	//
	// +kubebuilder:validation:MaxLength=32
	// +kubebuilder:validation:Pattern=`^[a-z]{2,}(-[a-z]+)+-[0-9]{1,2}$`
	// +kubebuilder:title="a region such as us-east-1"
	Region string `json:"region,omitempty"`
	// Credentials of the account that pays.
	Credentials *ProviderCredentials `json:"credentials,omitempty"`
	// Models that requests may be sent to.
	//
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=256
	// +listType=map
	// +listMapKey=name
	Models []ProviderModel `json:"models"`
	// MaxTokensCap bounds max_tokens of each request, because providers charge
	// their own limits with it. Absent: as the client asks.
	//
	// +kubebuilder:validation:Minimum=1
	MaxTokensCap int32 `json:"maxTokensCap,omitempty"`
	// Timeouts of a request.
	//
	// +kubebuilder:default={}
	Timeouts *ProviderTimeouts `json:"timeouts,omitempty"`
	// Concurrency is the number of requests at the same time.
	//
	// +kubebuilder:default=64
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=100000
	Concurrency int32 `json:"concurrency,omitempty"`
}

// ProviderSchema is an API dialect.
//
// +kubebuilder:validation:Enum=OpenAI;AzureOpenAI;Anthropic;Bedrock;Databricks;OpenAICompatible
type ProviderSchema string

// The schemas.
const (
	SchemaOpenAI           ProviderSchema = "OpenAI"
	SchemaAzureOpenAI      ProviderSchema = "AzureOpenAI"
	SchemaAnthropic        ProviderSchema = "Anthropic"
	SchemaBedrock          ProviderSchema = "Bedrock"
	SchemaDatabricks       ProviderSchema = "Databricks"
	SchemaOpenAICompatible ProviderSchema = "OpenAICompatible"
)

// ProviderCredentials are a Secret, or the identity that the platform gives
// the Pod.
//
// +kubebuilder:validation:XValidation:rule="has(self.secretRef) != has(self.workloadIdentity)",message="give secretRef or workloadIdentity, one of the two"
type ProviderCredentials struct {
	// SecretRef names a Secret of the same namespace: with the key apiKey, or
	// for Bedrock accessKeyId, secretAccessKey and, if need be, sessionToken, or
	// for Databricks clientId and clientSecret.
	SecretRef *LocalReference `json:"secretRef,omitempty"`
	// WorkloadIdentity uses what the platform gives the Pod.
	WorkloadIdentity *WorkloadIdentity `json:"workloadIdentity,omitempty"`
}

// WorkloadIdentity has no settings: the platform's environment tells all.
type WorkloadIdentity struct{}

// ProviderModel is a model of the provider.
type ProviderModel struct {
	// Name by which clients and policies know the model.
	Name ModelName `json:"name"`
	// UpstreamName is what the provider calls it. Default: Name.
	UpstreamName ModelName `json:"upstreamName,omitempty"`
	// Aliases are further names that clients may use.
	//
	// +kubebuilder:validation:MaxItems=256
	// +listType=set
	Aliases []ModelName `json:"aliases,omitempty"`
	// Price of tokens. Absent: unknown, so that cost limits cannot count it.
	Price *TokenPrice `json:"price,omitempty"`
}

// TokenPrice is what tokens cost.
type TokenPrice struct {
	// Currency of the prices.
	Currency Currency `json:"currency"`
	// PerMillion tokens.
	PerMillion PricePerMillion `json:"perMillion"`
}

// PricePerMillion is the price of a million tokens of each sort.
type PricePerMillion struct {
	// Input tokens.
	Input Decimal `json:"input"`
	// CachedInput tokens. Default: as Input.
	CachedInput Decimal `json:"cachedInput,omitempty"`
	// Output tokens.
	Output Decimal `json:"output"`
}

// ProviderTimeouts bound a request.
//
// +kubebuilder:validation:XValidation:rule="!has(self.firstByte) || !has(self.total) || duration(self.firstByte) <= duration(self.total)",message="is longer than total",fieldPath=".firstByte"
// +kubebuilder:validation:XValidation:rule="!has(self.idle) || !has(self.total) || duration(self.idle) <= duration(self.total)",message="is longer than total",fieldPath=".idle"
type ProviderTimeouts struct {
	// FirstByte of the answer, 100ms to 1h.
	//
	// +kubebuilder:default="20s"
	// +kubebuilder:validation:XValidation:rule="duration(self) >= duration('100ms') && duration(self) <= duration('1h')",message="is not between 100ms and 1h"
	FirstByte Duration `json:"firstByte,omitempty"`
	// Idle is the longest silence within an answer, 100ms to 1h.
	//
	// +kubebuilder:default="60s"
	// +kubebuilder:validation:XValidation:rule="duration(self) >= duration('100ms') && duration(self) <= duration('1h')",message="is not between 100ms and 1h"
	Idle Duration `json:"idle,omitempty"`
	// Total of the request, 1s to 24h.
	//
	// +kubebuilder:default="10m"
	// +kubebuilder:validation:XValidation:rule="duration(self) >= duration('1s') && duration(self) <= duration('24h')",message="is not between 1s and 24h"
	Total Duration `json:"total,omitempty"`
}

// InferenceProviderStatus is what the router observed.
type InferenceProviderStatus struct {
	// ObservedGeneration that the status speaks of.
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`
	// Models that are offered.
	Models int32 `json:"models,omitempty"`
	// Conditions: Accepted, ResolvedRefs, Programmed.
	//
	// +kubebuilder:validation:MaxItems=8
	// +listType=map
	// +listMapKey=type
	Conditions []metav1.Condition `json:"conditions,omitempty"`
}
