package resources

import (
	"time"

	"github.com/kinference/kinference/api/v1alpha1"
	"github.com/kinference/kinference/internal/apikey"
	"github.com/kinference/kinference/internal/policy"
)

// Catalog is the compiled form of all resources. It does not change.
type Catalog struct {
	// Sets and Providers that some pool serves, by name.
	Sets      []*WorkerSet
	Providers []*Provider
	// Pools, Tenants and Backends by name.
	Pools    []*Pool
	Tenants  []*Tenant
	Backends []*Backend
	// Policies of all namespaces, oldest first, then by namespace and name.
	Policies []*policy.Policy
	// Models by the name that clients ask for: models, aliases and LoRAs.
	Models map[string]*Model
	// Guarded says that there is a GatewayBackend, be it one that is not among
	// Backends: the gateway is not open to everybody.
	Guarded bool
	// LimitPolicies are the policies that have limits, in the order of Policies.
	LimitPolicies []*LimitPolicy
}

// LimitPolicy is an InferencePolicy with limits.
type LimitPolicy struct {
	// Name is namespace/name.
	Name string
	// Pools that it is for, as namespace/name.
	Pools []string
	// Spec with its defaults.
	Spec *v1alpha1.InferencePolicySpec
}

// WorkerSet is an InferenceWorkerSet, or what the selector of a pool selects,
// be it a pool of the inference extension.
type WorkerSet struct {
	// Name is namespace/name.
	Name     string
	Labels   map[string]string
	Workers  []Worker
	Profiles []*Profile
	// Selector selects the Pods that are Workers; nil for a set of endpoints.
	Selector map[string]string
	// Ranks of each worker, at least 1.
	Ranks int
	// Class of the accelerator, in lower case; empty when not given.
	Class string
	// Accelerators of each worker, at least 1, at HourlyPrice each; empty when
	// not given.
	Accelerators     int
	HourlyPrice      v1alpha1.Decimal
	Currency         v1alpha1.Currency
	MaxBatchedTokens int // 0 when not given
	TokenizerPath    string
	PassTokenIDs     bool
	KVTopic          string
	RemovalsLastCopy bool
	MetricsPath      string
	MetricsInterval  time.Duration
}

// Worker is one engine process.
type Worker struct {
	// UID is namespace.workerset.endpoint, or namespace.workerset.uid for a Pod:
	// one that is made anew under the same name is another worker. Where a Pod
	// has several servers, -port follows the uid.
	UID  string
	Name string
	// Labels of the Pod; nil for an endpoint.
	Labels map[string]string
	// NotReady says that its Pod is not ready: it is followed, but takes no
	// requests.
	NotReady bool
	// Ranks holds the id of each engine rank: uid/0, uid/1, …
	Ranks []string
	// URL of the HTTP server.
	URL string
	// KVEvents and KVReplay are the ZMQ addresses of rank 0; empty when the
	// engine publishes no events.
	KVEvents, KVReplay string
}

// Profile is one model or LoRA of a worker set.
type Profile struct {
	// ID is namespace/workerset/upstream model.
	ID  string
	Set *WorkerSet
	// UpstreamModel is the name that the engine expects in a request, and
	// Root the base model behind it.
	UpstreamModel, Root string
	// LoRA is the adapter's name; empty for the base model.
	LoRA string
	// Names that clients may use: the upstream model and its aliases.
	Names []string
	// MaxModelLen is 0 when the engine is to be asked.
	MaxModelLen int
}

// Provider is an InferenceProvider.
type Provider struct {
	// Name is namespace/name.
	Name   string
	Labels map[string]string
	// Spec with its defaults.
	Spec   *v1alpha1.InferenceProviderSpec
	Models []*ProviderModel
	// FirstByte, Idle and Total are its timeouts.
	FirstByte, Idle, Total time.Duration
}

// ProviderModel is a model of a provider.
type ProviderModel struct {
	Provider *Provider
	// UpstreamModel is the name that the provider expects.
	UpstreamModel string
	// Names that clients may use: the model and its aliases.
	Names []string
	// Price of tokens; nil when it is not known.
	Price *v1alpha1.TokenPrice
}

// Pool is an InferencePool, or the implicit one of a namespace without any.
type Pool struct {
	// Name is namespace/name.
	Name     string
	Implicit bool
	// Members in the order of their names, worker sets first.
	Members []Member
	// Sets are the worker sets among the members.
	Sets []*WorkerSet
	// Objectives of its requests.
	Objectives []v1alpha1.Objective
}

// Member of a pool: either Set or Provider.
type Member struct {
	Set      *WorkerSet
	Provider *Provider
	// Weight is its share in the sum of the pool's weights.
	Weight int
}

// name is namespace/name of the worker set or provider.
func (m Member) name() string {
	if m.Set != nil {
		return m.Set.Name
	}
	return m.Provider.Name
}

// Model is a name that clients may ask for.
type Model struct {
	Name string
	// Root is the model behind an alias or LoRA; equals Name for a model.
	Root string
	// Offers are the profiles that serve it, each with its pools.
	Offers []Offer
	// External are the providers that serve it, each with its pools.
	External []ExternalOffer
}

// Offer is a profile that serves a model in a pool.
type Offer struct {
	Pool    *Pool
	Profile *Profile
}

// ExternalOffer is a provider that serves a model in a pool.
type ExternalOffer struct {
	Pool  *Pool
	Model *ProviderModel
}

// Tenant is an InferenceTenant.
type Tenant struct {
	// Name is namespace/name.
	Name string
	// Parent is nil at the top. Orphan: a parent is named but not there, so that
	// its limits cannot be kept.
	Parent *Tenant
	Orphan bool
	// QoS of its requests, its own or the nearest parent's; empty for none.
	QoS v1alpha1.QoS
	// CostCenter is its own or the nearest parent's; empty for none.
	CostCenter string
	// DefaultTokens is its default of max_tokens or the nearest parent's, and
	// MaximumTokens the smallest maximum of all levels; 0 for none.
	DefaultTokens, MaximumTokens int32
	// Keys are the records in the Secrets that it names.
	Keys []apikey.Record
	// Spec with its defaults.
	Spec *v1alpha1.InferenceTenantSpec
}

// Chain returns the names without namespace, from the tenant to the top.
func (t *Tenant) Chain() []string {
	var names []string
	for ; t != nil; t = t.Parent {
		names = append(names, baseName(t.Name))
	}
	return names
}

// Backend is a GatewayBackend.
type Backend struct {
	// Name is namespace/name.
	Name string
	// Pool is nil when it is not there.
	Pool *Pool
	// Anonymous is the tenant of callers without a credential; nil when there
	// are none.
	Anonymous *Tenant
	// Spec with its defaults.
	Spec *v1alpha1.GatewayBackendSpec
	// Body and Headers are bounds in bytes.
	Body, Headers int64
	// Idle and Total are its timeouts.
	Idle, Total time.Duration
}
