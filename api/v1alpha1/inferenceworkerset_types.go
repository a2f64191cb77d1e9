package v1alpha1

import metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

// KindInferenceWorkerSet is the kind of InferenceWorkerSet.
const KindInferenceWorkerSet = "InferenceWorkerSet"

// InferenceWorkerSet is a group of equal vLLM workers that exist already. It
// does not own them.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:path=inferenceworkersets,shortName=kws,categories=kinference
// +kubebuilder:printcolumn:name="Ready",type=integer,JSONPath=`.status.workers.ready`
// +kubebuilder:printcolumn:name="Workers",type=integer,JSONPath=`.status.workers.total`
// +kubebuilder:printcolumn:name="Model",type=string,JSONPath=`.spec.models[0].name`
// +kubebuilder:printcolumn:name="Cache-Aware",type=string,JSONPath=`.status.conditions[?(@.type=="CacheAware")].status`
// +kubebuilder:printcolumn:name="Programmed",type=string,JSONPath=`.status.conditions[?(@.type=="Programmed")].status`,priority=1
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
type InferenceWorkerSet struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// Spec is what is wanted.
	Spec InferenceWorkerSetSpec `json:"spec"`
	// Status is what the router observed.
	Status InferenceWorkerSetStatus `json:"status,omitempty"`
}

// InferenceWorkerSetList is a list of InferenceWorkerSet.
//
// +kubebuilder:object:root=true
type InferenceWorkerSetList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []InferenceWorkerSet `json:"items"`
}

// InferenceWorkerSetSpec describes the workers. Exactly one of Selector and
// Endpoints is given.
//
// +kubebuilder:validation:XValidation:rule="has(self.selector) != has(self.endpoints)",message="give selector or endpoints, one of the two"
type InferenceWorkerSetSpec struct {
	// Selector selects Pods of the same namespace.
	Selector *LabelSelector `json:"selector,omitempty"`
	// Endpoints lists workers by address.
	//
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=4096
	// +listType=map
	// +listMapKey=name
	Endpoints []WorkerEndpoint `json:"endpoints,omitempty"`
	// Port of the engine's HTTP server.
	//
	// +kubebuilder:default=8000
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=65535
	Port int32 `json:"port,omitempty"`
	// DataParallel tells how many ranks stand behind one HTTP server.
	DataParallel *DataParallel `json:"dataParallel,omitempty"`
	// Models that the engines serve. The first one is what they were started
	// with.
	//
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=256
	// +listType=map
	// +listMapKey=name
	Models []WorkerModel `json:"models"`
	// Tokenizer lets the gateway turn prompts into tokens by itself. Absent: the
	// worker is asked, else the overlap is estimated from the text.
	Tokenizer *Tokenizer `json:"tokenizer,omitempty"`
	// KVEvents is given where the engines publish KV-cache events.
	KVEvents *KVEvents `json:"kvEvents,omitempty"`
	// Metrics tells where the engine's metrics are.
	Metrics *Metrics `json:"metrics,omitempty"`
	// Accelerator selects the prior speed and prices GPU time.
	Accelerator *Accelerator `json:"accelerator,omitempty"`
	// MaxBatchedTokens is what the engines were given as --max-num-batched-tokens: how
	// many tokens a step has at most. The capacity model and the division of worker
	// time go by it. Absent: what is usual for the class of accelerator.
	//
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=1048576
	MaxBatchedTokens int32 `json:"maxBatchedTokens,omitempty"`
}

// WorkerEndpoint is a worker by address.
//
// +kubebuilder:validation:XValidation:rule="!has(self.kvReplay) || has(self.kvEvents)",message="is of no use without kvEvents",fieldPath=".kvReplay"
type WorkerEndpoint struct {
	// Name is unique in the set.
	Name EntryName `json:"name"`
	// Address is host:port, a host (then with the set's port), or an http or
	// https URL.
	//
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=1024
	Address string `json:"address"`
	// KVEvents is the tcp:// address of rank 0's event publisher. Rank r is at
	// port + r.
	KVEvents SocketAddress `json:"kvEvents,omitempty"`
	// KVReplay is the address of rank 0's replay socket.
	KVReplay SocketAddress `json:"kvReplay,omitempty"`
}

// SocketAddress is the address of a ZMQ socket.
//
// +kubebuilder:validation:MaxLength=512
// +kubebuilder:validation:Pattern=`^tcp://[^\s/*@]+:[0-9]{1,5}$`
// +kubebuilder:title="an address such as tcp://host:5557"
type SocketAddress string

// DataParallel describes engines with several ranks.
type DataParallel struct {
	// Ranks behind one HTTP server. Each is an endpoint of its own.
	//
	// +kubebuilder:default=1
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=256
	Ranks int32 `json:"ranks,omitempty"`
}

// WorkerModel is a model that the engines serve.
type WorkerModel struct {
	// Name as the engine knows it.
	Name ModelName `json:"name"`
	// Aliases are further names that clients may use.
	//
	// +kubebuilder:validation:MaxItems=256
	// +listType=set
	Aliases []ModelName `json:"aliases,omitempty"`
	// LoRAs are adapters that the engine has loaded.
	//
	// +kubebuilder:validation:MaxItems=256
	// +listType=map
	// +listMapKey=name
	LoRAs []LoRA `json:"loras,omitempty"`
	// MaxModelLen is the longest context in tokens. Default: as the engine says
	// in /v1/models.
	//
	// +kubebuilder:validation:Minimum=1
	MaxModelLen int32 `json:"maxModelLen,omitempty"`
}

// LoRA is an adapter.
type LoRA struct {
	// Name as the engine knows it.
	Name ModelName `json:"name"`
	// Aliases are further names that clients may use.
	//
	// +kubebuilder:validation:MaxItems=256
	// +listType=set
	Aliases []ModelName `json:"aliases,omitempty"`
}

// Tokenizer is a local copy of the model's tokenizer.
type Tokenizer struct {
	// Path of a folder with tokenizer.json, tokenizer_config.json and
	// chat_template.jinja.
	//
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=1024
	Path string `json:"path"`
	// PassTokenIDs hands our token ids to the engine where it accepts them.
	PassTokenIDs bool `json:"passTokenIds,omitempty"`
}

// KVEvents tells how the engines publish KV-cache events.
type KVEvents struct {
	// Port of the publisher of rank 0. Default 5557. With endpoints it holds
	// for those that give no kvEvents address, and only when it is written.
	//
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=65535
	Port int32 `json:"port,omitempty"`
	// ReplayPort of the replay socket of rank 0. Default 5558.
	//
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=65535
	ReplayPort int32 `json:"replayPort,omitempty"`
	// Topic that the engines publish under.
	//
	// +kubebuilder:validation:MaxLength=256
	Topic string `json:"topic,omitempty"`
	// Removals tells what a BlockRemoved event means.
	//
	// +kubebuilder:default=PerCopy
	Removals Removals `json:"removals,omitempty"`
}

// Removals tells what a BlockRemoved event of the engine means.
//
// +kubebuilder:validation:Enum=PerCopy;LastCopy
type Removals string

// The meanings of a removal.
const (
	// RemovalsPerCopy: one event for each copy of a block.
	RemovalsPerCopy Removals = "PerCopy"
	// RemovalsLastCopy: one event when the last copy goes.
	RemovalsLastCopy Removals = "LastCopy"
)

// Metrics tells where the engine's metrics are.
type Metrics struct {
	// Path on the engine's HTTP server.
	//
	// +kubebuilder:default=/metrics
	// +kubebuilder:validation:MaxLength=256
	// +kubebuilder:validation:Pattern=`^/[^\s?#]*$`
	// +kubebuilder:title="a path that begins with /"
	Path string `json:"path,omitempty"`
	// Interval between scrapes, 50ms to 1s: a sample counts for two seconds.
	//
	// +kubebuilder:default="250ms"
	// +kubebuilder:validation:XValidation:rule="duration(self) >= duration('50ms') && duration(self) <= duration('1s')",message="is not between 50ms and 1s"
	Interval Duration `json:"interval,omitempty"`
}

// Accelerator describes the hardware of one worker.
//
// +kubebuilder:validation:XValidation:rule="!has(self.hourlyPrice) || has(self.currency)",message="is required with hourlyPrice",fieldPath=".currency"
type Accelerator struct {
	// Class is a name such as l40s or h100.
	//
	// +kubebuilder:validation:MaxLength=63
	Class string `json:"class,omitempty"`
	// Count of devices per worker.
	//
	// +kubebuilder:default=1
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=1024
	Count int32 `json:"count,omitempty"`
	// HourlyPrice of one device in Currency.
	HourlyPrice Decimal `json:"hourlyPrice,omitempty"`
	// Currency of HourlyPrice.
	Currency Currency `json:"currency,omitempty"`
}

// InferenceWorkerSetStatus is what the router observed.
type InferenceWorkerSetStatus struct {
	// ObservedGeneration that the status speaks of.
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`
	// Workers that were found and are ready.
	Workers *WorkerCount `json:"workers,omitempty"`
	// BlockSize of the prefix cache in tokens, learned from the engines.
	BlockSize int32 `json:"blockSize,omitempty"`
	// Conditions: Accepted, ResolvedRefs, Programmed, CacheAware.
	//
	// +kubebuilder:validation:MaxItems=8
	// +listType=map
	// +listMapKey=type
	Conditions []metav1.Condition `json:"conditions,omitempty"`
}
