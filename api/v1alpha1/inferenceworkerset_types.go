package v1alpha1

import metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

// KindInferenceWorkerSet is the kind of InferenceWorkerSet.
const KindInferenceWorkerSet = "InferenceWorkerSet"

// InferenceWorkerSet is a group of equal vLLM workers that exist already. It
// does not own them.
type InferenceWorkerSet struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec   InferenceWorkerSetSpec   `json:"spec"`
	Status InferenceWorkerSetStatus `json:"status,omitempty"`
}

// InferenceWorkerSetSpec describes the workers. Exactly one of Selector and
// Endpoints is given.
type InferenceWorkerSetSpec struct {
	// Selector selects Pods of the same namespace.
	Selector *metav1.LabelSelector `json:"selector,omitempty"`
	// Endpoints lists workers by address.
	Endpoints []WorkerEndpoint `json:"endpoints,omitempty"`
	// Port of the engine's HTTP server. Default 8000.
	Port int32 `json:"port,omitempty"`
	// DataParallel tells how many ranks stand behind one HTTP server.
	DataParallel *DataParallel `json:"dataParallel,omitempty"`
	// Models that the engines serve, at least one.
	Models []WorkerModel `json:"models"`
	// Tokenizer lets the gateway turn prompts into tokens by itself.
	Tokenizer *Tokenizer `json:"tokenizer,omitempty"`
	// KVEvents is given where the engines publish KV-cache events.
	KVEvents *KVEvents `json:"kvEvents,omitempty"`
	Metrics  *Metrics  `json:"metrics,omitempty"`
	// Accelerator selects the prior speed and prices GPU time.
	Accelerator *Accelerator `json:"accelerator,omitempty"`
}

// WorkerEndpoint is a worker by address.
type WorkerEndpoint struct {
	// Name is unique in the set: lower-case letters, digits and dashes.
	Name string `json:"name"`
	// Address is host:port, a host (then with the set's port), or an http or
	// https URL.
	Address string `json:"address"`
	// KVEvents is the tcp:// address of rank 0's event publisher, and
	// KVReplay that of its replay socket. Rank r is at port + r.
	KVEvents string `json:"kvEvents,omitempty"`
	KVReplay string `json:"kvReplay,omitempty"`
}

// DataParallel describes engines with several ranks.
type DataParallel struct {
	// Ranks behind one HTTP server, 1 to 256. Default 1.
	Ranks int32 `json:"ranks,omitempty"`
}

// WorkerModel is a model that the engines serve.
type WorkerModel struct {
	// Name as the engine knows it.
	Name string `json:"name"`
	// Aliases are further names that clients may use.
	Aliases []string `json:"aliases,omitempty"`
	// LoRAs are adapters that the engine has loaded.
	LoRAs []LoRA `json:"loras,omitempty"`
	// MaxModelLen is the longest context in tokens. Default: as the engine
	// says in /v1/models.
	MaxModelLen int32 `json:"maxModelLen,omitempty"`
}

// LoRA is an adapter.
type LoRA struct {
	// Name as the engine knows it.
	Name    string   `json:"name"`
	Aliases []string `json:"aliases,omitempty"`
}

// Tokenizer is a local copy of the model's tokenizer.
type Tokenizer struct {
	// Path of a folder with tokenizer.json, tokenizer_config.json and
	// chat_template.jinja.
	Path string `json:"path"`
	// PassTokenIDs hands our token ids to the engine where it accepts them.
	PassTokenIDs bool `json:"passTokenIds,omitempty"`
}

// KVEvents tells how the engines publish KV-cache events.
type KVEvents struct {
	// Port of the publisher of rank 0. Default 5557. With endpoints it holds
	// for those that give no kvEvents address, and only when it is written.
	Port int32 `json:"port,omitempty"`
	// ReplayPort of the replay socket of rank 0. Default 5558.
	ReplayPort int32 `json:"replayPort,omitempty"`
	// Topic that the engines publish under.
	Topic string `json:"topic,omitempty"`
	// Removals tells what a BlockRemoved event means. Default PerCopy.
	Removals Removals `json:"removals,omitempty"`
}

// Removals tells what a BlockRemoved event of the engine means.
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
	// Path on the engine's HTTP server. Default /metrics.
	Path string `json:"path,omitempty"`
	// Interval between scrapes, 50 ms to 1 s. Default 250ms.
	Interval Duration `json:"interval,omitempty"`
}

// Accelerator describes the hardware of one worker.
type Accelerator struct {
	// Class is a name such as l40s or h100.
	Class string `json:"class,omitempty"`
	// Count of devices per worker. Default 1.
	Count int32 `json:"count,omitempty"`
	// HourlyPrice of one device, a decimal string in Currency.
	HourlyPrice string `json:"hourlyPrice,omitempty"`
	// Currency is an ISO 4217 code.
	Currency string `json:"currency,omitempty"`
}

// InferenceWorkerSetStatus is what the router observed.
type InferenceWorkerSetStatus struct {
	Workers WorkerCount `json:"workers,omitempty"`
	// BlockSize in tokens, learned from the engines.
	BlockSize  int32              `json:"blockSize,omitempty"`
	Conditions []metav1.Condition `json:"conditions,omitempty"`
}

// WorkerCount counts workers.
type WorkerCount struct {
	Total int32 `json:"total"`
	Ready int32 `json:"ready"`
}
