package v1alpha1

import metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

// KindInferencePolicy is the kind of InferencePolicy.
const KindInferencePolicy = "InferencePolicy"

// InferencePolicy says which requests go where. Policies of a namespace apply
// oldest first, then by name; their rules in order; the first rule that
// matches decides.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:path=inferencepolicies,shortName=kpol,categories=kinference
// +kubebuilder:printcolumn:name="Accepted",type=string,JSONPath=`.status.conditions[?(@.type=="Accepted")].status`
// +kubebuilder:printcolumn:name="Programmed",type=string,JSONPath=`.status.conditions[?(@.type=="Programmed")].status`
// +kubebuilder:printcolumn:name="Dry-Run",type=boolean,JSONPath=`.spec.dryRun`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
type InferencePolicy struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec   InferencePolicySpec   `json:"spec"`
	Status InferencePolicyStatus `json:"status,omitempty"`
}

// InferencePolicyList is a list of InferencePolicy.
//
// +kubebuilder:object:root=true
type InferencePolicyList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []InferencePolicy `json:"items"`
}

// InferencePolicySpec holds rules and what they need.
type InferencePolicySpec struct {
	// TargetRefs are the pools that the policy is for. Absent: every pool of
	// the namespace.
	//
	// +kubebuilder:validation:MaxItems=16
	TargetRefs []PolicyTarget `json:"targetRefs,omitempty"`
	// OnUnclassified says what holds of tags that the classifier could not tell.
	OnUnclassified *OnUnclassified `json:"onUnclassified,omitempty"`
	// DryRun records what the policy would do and changes nothing.
	DryRun bool `json:"dryRun,omitempty"`
	// Limits hold for the requests that their matches select.
	//
	// +kubebuilder:validation:MaxItems=32
	// +listType=map
	// +listMapKey=name
	Limits []PolicyLimit `json:"limits,omitempty"`
	// CustomTags are further tags for the classifier.
	//
	// +kubebuilder:validation:MaxItems=64
	// +listType=map
	// +listMapKey=name
	CustomTags []CustomTag `json:"customTags,omitempty"`
	// Rules in the order of evaluation.
	//
	// +kubebuilder:validation:MaxItems=128
	// +listType=map
	// +listMapKey=name
	Rules []PolicyRule `json:"rules,omitempty"`
}

// PolicyTarget names a pool of the same namespace.
type PolicyTarget struct {
	// Group of Kind. Default: this group.
	//
	// +kubebuilder:validation:MaxLength=253
	Group string `json:"group,omitempty"`
	// Kind is InferencePool.
	//
	// +kubebuilder:validation:Enum=InferencePool
	Kind string `json:"kind"`
	// Name of the pool.
	//
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	Name string `json:"name"`
}

// OnUnclassified lists tags by name, or by a prefix and a star.
type OnUnclassified struct {
	// AssumePresent: these count as present. Default pii-*, secret-*, injection.
	//
	// +kubebuilder:validation:MaxItems=64
	// +kubebuilder:validation:items:MaxLength=64
	AssumePresent []string `json:"assumePresent,omitempty"`
	// AssumeAbsent: these count as absent. Default complexity-*, language-*. A
	// tag that neither list names counts as present if it is a custom tag with
	// risk, else as absent.
	//
	// +kubebuilder:validation:MaxItems=64
	// +kubebuilder:validation:items:MaxLength=64
	AssumeAbsent []string `json:"assumeAbsent,omitempty"`
}

// PolicyRule is what is done with requests that match. Exactly one of Route
// and Reject is given.
//
// +kubebuilder:validation:XValidation:rule="has(self.route) != has(self.reject)",message="give exactly one of route and reject"
type PolicyRule struct {
	// Name is unique in the policy.
	//
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	// +kubebuilder:validation:Pattern=`^[a-z0-9]([-a-z0-9]*[a-z0-9])?$`
	// +kubebuilder:title="a name: lower-case letters, digits and dashes"
	Name string `json:"name"`
	// Matches are ORed. Absent: every request.
	//
	// +kubebuilder:validation:MaxItems=32
	Matches []RequestMatch `json:"matches,omitempty"`
	// Route picks an endpoint.
	Route *RouteAction `json:"route,omitempty"`
	// Reject refuses the request.
	Reject *RejectAction `json:"reject,omitempty"`
}

// RequestMatch selects requests. Its fields are ANDed; an empty one matches
// every request.
//
// +kubebuilder:validation:XValidation:rule="!(has(self.tag) && has(self.tags))",message="give tag or tags, not both"
// +kubebuilder:validation:XValidation:rule="!(has(self.tenant) && has(self.tenants))",message="give tenant or tenants, not both"
type RequestMatch struct {
	// Model is the name that the client asked for.
	//
	// +kubebuilder:validation:MaxLength=253
	Model string `json:"model,omitempty"`
	// Tenant, or one that it belongs to.
	//
	// +kubebuilder:validation:MaxLength=253
	Tenant string `json:"tenant,omitempty"`
	// Tenants of which one must be the request's, or one that it belongs to.
	//
	// +kubebuilder:validation:MaxItems=64
	// +kubebuilder:validation:items:MaxLength=253
	Tenants []string `json:"tenants,omitempty"`
	// Tag that the prompt must have. A star at the end stands for anything.
	//
	// +kubebuilder:validation:MaxLength=64
	Tag string `json:"tag,omitempty"`
	// Tags combines several.
	Tags *TagMatch `json:"tags,omitempty"`
	// QoS class.
	QoS QoS `json:"qos,omitempty"`
	// PromptTokens bounds the length of the prompt.
	PromptTokens *IntRange `json:"promptTokens,omitempty"`
	// Headers that all must be there with these values.
	//
	// +kubebuilder:validation:MaxItems=16
	Headers []HeaderMatch `json:"headers,omitempty"`
	// Claims of the caller's token that all must have these values.
	//
	// +kubebuilder:validation:MaxItems=16
	Claims []ClaimMatch `json:"claims,omitempty"`
	// Endpoint is the API operation.
	Endpoint APIEndpoint `json:"endpoint,omitempty"`
	// When is a CEL expression over `request` that yields a bool.
	//
	// +kubebuilder:validation:MaxLength=4096
	When string `json:"when,omitempty"`
}

// TagMatch combines tags. Given fields are ANDed.
type TagMatch struct {
	// All of these.
	//
	// +kubebuilder:validation:MaxItems=32
	// +kubebuilder:validation:items:MaxLength=64
	All []string `json:"all,omitempty"`
	// Any of these.
	//
	// +kubebuilder:validation:MaxItems=32
	// +kubebuilder:validation:items:MaxLength=64
	Any []string `json:"any,omitempty"`
	// None of these.
	//
	// +kubebuilder:validation:MaxItems=32
	// +kubebuilder:validation:items:MaxLength=64
	None []string `json:"none,omitempty"`
}

// IntRange is an open interval.
//
// +kubebuilder:validation:XValidation:rule="has(self.greaterThan) || has(self.lessThan)",message="give greaterThan, lessThan or both"
type IntRange struct {
	// +kubebuilder:validation:Minimum=0
	GreaterThan *int64 `json:"greaterThan,omitempty"`
	// +kubebuilder:validation:Minimum=1
	LessThan *int64 `json:"lessThan,omitempty"`
}

// HeaderMatch is a request header with an exact value.
type HeaderMatch struct {
	// Name in any case.
	//
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=256
	Name string `json:"name"`
	// Value, exactly.
	//
	// +kubebuilder:validation:MaxLength=4096
	Value string `json:"value"`
}

// ClaimMatch is a claim with an exact value; a list claim matches if one of its
// entries does.
type ClaimMatch struct {
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=256
	Name string `json:"name"`
	// +kubebuilder:validation:MaxLength=4096
	Value string `json:"value"`
}

// QoS is a class of service.
//
// +kubebuilder:validation:Enum=interactive;batch;deferrable
type QoS string

// The classes of service, highest first.
const (
	QoSInteractive QoS = "interactive"
	QoSBatch       QoS = "batch"
	QoSDeferrable  QoS = "deferrable"
)

// APIEndpoint is an operation of the public API.
//
// +kubebuilder:validation:Enum=ChatCompletions;Completions;Responses;Messages;Embeddings
type APIEndpoint string

// The operations.
const (
	EndpointChatCompletions APIEndpoint = "ChatCompletions"
	EndpointCompletions     APIEndpoint = "Completions"
	EndpointResponses       APIEndpoint = "Responses"
	EndpointMessages        APIEndpoint = "Messages"
	EndpointEmbeddings      APIEndpoint = "Embeddings"
)

// PolicyLimit is a limit on the requests that Matches select.
type PolicyLimit struct {
	Limit `json:",inline"`
	// Matches are ORed. Absent: every request.
	//
	// +kubebuilder:validation:MaxItems=32
	Matches []RequestMatch `json:"matches,omitempty"`
}

// RejectAction refuses a request.
type RejectAction struct {
	// Reason is one word in PascalCase, for machines.
	//
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=64
	// +kubebuilder:validation:Pattern=`^[A-Z][A-Za-z0-9]*$`
	// +kubebuilder:title="one word in PascalCase, such as PromptTooLong"
	Reason string `json:"reason"`
	// Message is for the caller.
	//
	// +kubebuilder:validation:MaxLength=1024
	Message string `json:"message,omitempty"`
}

// RouteAction picks an endpoint: of those that Consider names, those that no
// Exclude drops are offered to the stages of Select.
//
// +kubebuilder:validation:XValidation:rule="!has(self.queue) || (has(self.onEmpty) && self.onEmpty == 'Queue')",message="queue needs onEmpty: Queue"
type RouteAction struct {
	// Objective of the choice among workers. Default balanced.
	Objective RouteObjective `json:"objective,omitempty"`
	// Consider is a union. Absent: every endpoint of the pool that serves the
	// requested model.
	//
	// +kubebuilder:validation:MaxItems=32
	Consider []Consider `json:"consider,omitempty"`
	// Exclude drops endpoints.
	//
	// +kubebuilder:validation:MaxItems=32
	// +listType=map
	// +listMapKey=name
	Exclude []Exclude `json:"exclude,omitempty"`
	// Select holds stages; the first one with an endpoint left decides, the
	// later ones stand by should all of its endpoints fail. Absent: one stage
	// that minimizes PredictedTTFT.
	//
	// +kubebuilder:validation:MaxItems=16
	Select []SelectStage `json:"select,omitempty"`
	// Retry bounds the attempts before the first content.
	Retry *Retry `json:"retry,omitempty"`
	// OnEmpty says what happens when no endpoint is left. Default Reject.
	OnEmpty OnEmpty `json:"onEmpty,omitempty"`
	// Queue is given with onEmpty: Queue.
	Queue *Queue `json:"queue,omitempty"`
}

// RouteObjective is what the choice among workers optimises.
//
// +kubebuilder:validation:Enum=ttft;balanced;throughput
type RouteObjective string

// The objectives of a route.
const (
	// ObjectiveTTFT looks at the request's own time to first token only.
	ObjectiveTTFT RouteObjective = "ttft"
	// ObjectiveBalanced weighs it against the delay of others that run or wait.
	ObjectiveBalanced RouteObjective = "balanced"
	// ObjectiveThroughput weighs their delay more, and lets short prefills overtake
	// long ones without a bound: the worst tails.
	ObjectiveThroughput RouteObjective = "throughput"
)

// BackendType says what stands behind an endpoint.
//
// +kubebuilder:validation:Enum=Local;Provider
type BackendType string

// The types of backends.
const (
	// BackendLocal is a worker of an InferenceWorkerSet.
	BackendLocal BackendType = "Local"
	// BackendProvider is an InferenceProvider.
	BackendProvider BackendType = "Provider"
)

// Names is a list of names.
type Names struct {
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=64
	// +kubebuilder:validation:items:MaxLength=253
	Names []string `json:"names"`
}

// Consider adds endpoints of the pool. Its fields are ANDed. Without Models
// only those that serve the requested model are meant.
//
// +kubebuilder:validation:XValidation:rule="has(self.type) || has(self.models) || has(self.workerSets) || has(self.providers)",message="say what to consider: type, models, workerSets or providers"
type Consider struct {
	Type       BackendType `json:"type,omitempty"`
	Models     *Names      `json:"models,omitempty"`
	WorkerSets *Names      `json:"workerSets,omitempty"`
	Providers  *Names      `json:"providers,omitempty"`
}

// Exclude drops the endpoints for which Drop holds.
type Exclude struct {
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	// +kubebuilder:validation:Pattern=`^[a-z0-9]([-a-z0-9]*[a-z0-9])?$`
	// +kubebuilder:title="a name: lower-case letters, digits and dashes"
	Name string `json:"name"`
	// If limits it to some requests. Absent: every request.
	If *RequestMatch `json:"if,omitempty"`
	// Drop selects the endpoints.
	Drop Drop `json:"drop"`
}

// Drop selects endpoints. Its fields are ANDed. A worker without a fresh sample
// counts as above each threshold; thresholds on load do not hold for providers,
// which show none.
//
// +kubebuilder:validation:XValidation:rule="has(self.backend) || has(self.queuedPrompts) || has(self.runningPrompts) || has(self.kvCacheUsage) || has(self.predictedTTFT)",message="say what to drop: backend, queuedPrompts, runningPrompts, kvCacheUsage or predictedTTFT"
type Drop struct {
	Backend *BackendMatch `json:"backend,omitempty"`
	// QueuedPrompts is the number of requests that wait for the worker, in its engine
	// or in the router.
	QueuedPrompts *Threshold `json:"queuedPrompts,omitempty"`
	// RunningPrompts is the number of requests that run.
	RunningPrompts *Threshold `json:"runningPrompts,omitempty"`
	// KVCacheUsage is the share of KV-cache blocks in use, 0 to 1.
	KVCacheUsage *Threshold `json:"kvCacheUsage,omitempty"`
	// PredictedTTFT of this request on the endpoint.
	PredictedTTFT *DurationThreshold `json:"predictedTTFT,omitempty"`
}

// BackendMatch selects endpoints by what they are. Its fields are ANDed.
type BackendMatch struct {
	Type BackendType `json:"type,omitempty"`
	// Names of worker sets and providers.
	//
	// +kubebuilder:validation:MaxItems=64
	// +kubebuilder:validation:items:MaxLength=253
	Names []string `json:"names,omitempty"`
	// Models of which the endpoint serves one.
	//
	// +kubebuilder:validation:MaxItems=64
	// +kubebuilder:validation:items:MaxLength=253
	Models []string `json:"models,omitempty"`
	// Labels of the worker set or provider, and of the worker's Pod.
	//
	// +kubebuilder:validation:MaxProperties=16
	Labels map[string]LabelValue `json:"labels,omitempty"`
}

// Threshold on a mean over the last Window. What was above it counts as above
// until the mean has come down to Until, so that endpoints are not dropped and
// taken back all the time while their load is near the threshold.
//
// +kubebuilder:validation:XValidation:rule="!has(self.until) || self.until <= self.greaterThan",message="must not be more than greaterThan",fieldPath=".until"
type Threshold struct {
	// GreaterThan is a decimal number, 0 or more.
	//
	// +kubebuilder:validation:Minimum=0
	GreaterThan float64 `json:"greaterThan"`
	// Until is at most GreaterThan. Default: four fifths of it.
	//
	// +kubebuilder:validation:Minimum=0
	Until *float64 `json:"until,omitempty"`
	// Window of the mean, 1s to 10m. Default 30s.
	Window Duration `json:"window,omitempty"`
}

// DurationThreshold on a prediction.
type DurationThreshold struct {
	GreaterThan Duration `json:"greaterThan"`
}

// SelectStage orders some of the endpoints that are left. At most one of
// Minimize, Order and Weights is given; without any, PredictedTTFT is minimized.
//
// +kubebuilder:validation:XValidation:rule="(has(self.minimize) ? 1 : 0) + (has(self.order) ? 1 : 0) + (has(self.weights) ? 1 : 0) <= 1",message="give at most one of minimize, order and weights"
type SelectStage struct {
	Type       BackendType `json:"type,omitempty"`
	Models     *Names      `json:"models,omitempty"`
	WorkerSets *Names      `json:"workerSets,omitempty"`
	Providers  *Names      `json:"providers,omitempty"`
	// Minimize picks the endpoint with the least of this.
	Minimize Criterion `json:"minimize,omitempty"`
	// Order takes the named worker sets and providers, first one first.
	//
	// +kubebuilder:validation:MaxItems=64
	// +kubebuilder:validation:items:MaxLength=253
	Order []string `json:"order,omitempty"`
	// Weights spreads over the named worker sets and providers by share.
	//
	// +kubebuilder:validation:MaxItems=64
	// +listType=map
	// +listMapKey=name
	Weights []Weight `json:"weights,omitempty"`
}

// Criterion is what a stage minimizes.
//
// +kubebuilder:validation:Enum=PredictedTTFT;PredictedE2E;QueuedPrompts;KVCacheUsage;Cost
type Criterion string

// The criteria.
const (
	MinimizePredictedTTFT Criterion = "PredictedTTFT"
	MinimizePredictedE2E  Criterion = "PredictedE2E"
	MinimizeQueuedPrompts Criterion = "QueuedPrompts"
	MinimizeKVCacheUsage  Criterion = "KVCacheUsage"
	MinimizeCost          Criterion = "Cost"
)

// Weight is the share of a worker set or provider in the sum of weights.
type Weight struct {
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	Name string `json:"name"`
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=1000000
	Weight int32 `json:"weight"`
}

// Retry bounds attempts before the first content. Whatever it says, attempts that
// were caused by failures or hedging are a fifth of the requests at most.
//
// +kubebuilder:validation:XValidation:rule="!has(self.hedge) || self.attempts >= 2",message="hedge needs attempts: 2 or more"
type Retry struct {
	// Attempts in all, 1 to 8.
	//
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=8
	Attempts int32 `json:"attempts"`
	// RetryOn lists what is tried again: ConnectFailure, 5xx, Overloaded, Timeout.
	// Absent: all of them.
	//
	// +kubebuilder:validation:MaxItems=4
	RetryOn []RetryReason `json:"retryOn,omitempty"`
	// Hedge asks a second endpoint as well while the first one is silent. Absent:
	// it does not.
	Hedge *Hedge `json:"hedge,omitempty"`
}

// Hedge asks the next endpoint as well when the one that was asked has sent no
// content of a stream for a while. The first content answers the client, and the
// other one is given up; what it used counts. It is one of the attempts.
type Hedge struct {
	// After is how long the first endpoint has for its first content, 10ms to 1m.
	After Duration `json:"after"`
	// Percentile, 50 to 99, lets it have as long as that share of the model's recent
	// streams took, in proportion to what was predicted for each, if that is longer
	// than After. Absent: After decides alone.
	//
	// +kubebuilder:validation:Minimum=50
	// +kubebuilder:validation:Maximum=99
	Percentile int32 `json:"percentile,omitempty"`
}

// RetryReason is a failure after which the next endpoint is tried.
//
// +kubebuilder:validation:Enum=ConnectFailure;"5xx";Overloaded;Timeout
type RetryReason string

// The reasons of a retry.
const (
	RetryConnectFailure RetryReason = "ConnectFailure"
	Retry5xx            RetryReason = "5xx"
	RetryOverloaded     RetryReason = "Overloaded"
	RetryTimeout        RetryReason = "Timeout"
)

// OnEmpty says what happens with a request that has no endpoint left.
//
// +kubebuilder:validation:Enum=Reject;Continue;Queue
type OnEmpty string

// What can happen.
const (
	// OnEmptyReject answers 429 where capacity exists but is too busy, else 503.
	OnEmptyReject OnEmpty = "Reject"
	// OnEmptyContinue goes on with the next rule.
	OnEmptyContinue OnEmpty = "Continue"
	// OnEmptyQueue waits for an endpoint.
	OnEmptyQueue OnEmpty = "Queue"
)

// Queue bounds the wait.
type Queue struct {
	// Timeout, 1ms to 10m. Default 20s.
	Timeout Duration `json:"timeout,omitempty"`
}

// CustomTag is a tag that the classifier gives where one of Any is found.
type CustomTag struct {
	// Name: lower-case letters, digits and dashes.
	//
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=64
	// +kubebuilder:validation:Pattern=`^[a-z0-9]([-a-z0-9]*[a-z0-9])?$`
	// +kubebuilder:title="a name: lower-case letters, digits and dashes"
	Name string `json:"name"`
	// Any of these detectors.
	//
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=32
	Any []TagDetector `json:"any"`
	// Scope of the text. Absent: all that goes to the model. An expression that
	// reads no `part` is of the whole prompt.
	//
	// +kubebuilder:validation:MaxItems=4
	Scope []TextScope `json:"scope,omitempty"`
	// Risk: it counts as present when it is unknown.
	Risk bool `json:"risk,omitempty"`
}

// TagDetector finds a tag by words, by a regular expression (RE2) or by a CEL
// expression.
//
// +kubebuilder:validation:XValidation:rule="[has(self.keywords), has(self.regex), has(self.when)].filter(x, x).size() == 1",message="give keywords, regex or when, one of them"
type TagDetector struct {
	// Keywords in any case.
	//
	// +kubebuilder:validation:MaxItems=256
	// +kubebuilder:validation:items:MaxLength=256
	Keywords []string `json:"keywords,omitempty"`
	// WholeWord: keywords only between word boundaries.
	WholeWord bool `json:"wholeWord,omitempty"`
	// Regex in RE2's syntax.
	//
	// +kubebuilder:validation:MaxLength=1024
	Regex string `json:"regex,omitempty"`
	// Validator checks what the regular expression found.
	Validator TagValidator `json:"validator,omitempty"`
	// When is a CEL expression that yields a bool, over `part`, `prompt` and `tags`
	// (see docs/classifier.md). One that reads `part` is asked of each part in the
	// scope, any other once of the prompt.
	//
	// +kubebuilder:validation:MaxLength=4096
	When string `json:"when,omitempty"`
}

// TagValidator checks what a regular expression found.
//
// +kubebuilder:validation:Enum=Luhn;IBAN
type TagValidator string

// The validators.
const (
	ValidatorLuhn TagValidator = "Luhn"
	ValidatorIBAN TagValidator = "IBAN"
)

// TextScope is a part of a prompt.
//
// +kubebuilder:validation:Enum=System;User;Assistant;ToolResult
type TextScope string

// The parts.
const (
	ScopeSystem     TextScope = "System"
	ScopeUser       TextScope = "User"
	ScopeAssistant  TextScope = "Assistant"
	ScopeToolResult TextScope = "ToolResult"
)

// InferencePolicyStatus is what the router observed.
type InferencePolicyStatus struct {
	// Conditions: Accepted, ResolvedRefs, Programmed.
	//
	// +kubebuilder:validation:MaxItems=8
	// +listType=map
	// +listMapKey=type
	Conditions []metav1.Condition `json:"conditions,omitempty"`
}
