// Package plan finds out once per catalog what requests for a model have to do
// with: the pool that offers it, the policies that apply, and what serves it.
//
// The router makes a Plan of each catalog it loads and decides by it; kinfctl and
// internal/replay decide by the same one without a router. A Plan does not change
// and is safe for concurrent use.
package plan

import (
	"cmp"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/kinference/kinference/api/v1alpha1"
	"github.com/kinference/kinference/internal/policy"
	"github.com/kinference/kinference/internal/resources"
)

// Plan is a catalog prepared for decisions.
type Plan struct {
	// Models by the name that clients ask for.
	Models map[string]*Model
	// Pools that a GatewayBackend names, by name, each with the models that it
	// offers.
	Pools map[string]map[string]*Model
	// Longest is the longest window of a mean that some policy looks at; 0 if
	// none looks at another one than the default.
	Longest time.Duration
	// Thresholds are those that policies ask a policy.Memory about.
	Thresholds []policy.Threshold
	// Weights are the tenants' shares when workers are short, by name.
	Weights map[string]float64
}

// Model is a name that clients may ask for.
type Model struct {
	*resources.Model
	// Pool that offers it: the one that was asked for, else the first by name.
	Pool     *resources.Pool
	Policies *policy.Set
	// Targets are what serves it, or what a rule could send its requests to.
	Targets []Target
	// Reads are the headers and claims that its policies look at, Windows those of
	// means beside policy.DefaultWindow.
	Reads policy.Reads
	// Tags that its policies look at: names, or beginnings of names with a star.
	Tags    []string
	Windows []time.Duration
}

// Target is a profile or a provider's model: one of Profile and Provider is set.
type Target struct {
	Backend  *policy.Backend
	Profile  *resources.Profile
	Provider *resources.ProviderModel
}

// Name is that of the worker set or provider, as namespace/name.
func (t *Target) Name() string {
	if t.Provider != nil {
		return t.Provider.Provider.Name
	}
	return t.Profile.Set.Name
}

const providerPrefix = "provider "

// ProviderID is the id of a provider among those of workers, which have no
// space; its name is namespace/name.
func ProviderID(name string) string { return providerPrefix + name }

// ProviderName is the provider behind an id; false if it is a worker's.
func ProviderName(id string) (string, bool) { return strings.CutPrefix(id, providerPrefix) }

// New prepares a catalog.
func New(c *resources.Catalog) *Plan {
	p := &Plan{Models: make(map[string]*Model, len(c.Models)), Pools: map[string]map[string]*Model{}, Weights: make(map[string]float64, len(c.Tenants))}
	for _, t := range c.Tenants {
		p.Weights[t.Name] = float64(max(1, t.Spec.Weight))
	}
	for _, b := range c.Backends {
		if b.Pool != nil {
			p.Pools[b.Pool.Name] = map[string]*Model{}
		}
	}
	pools, thresholds := map[*resources.Pool]*pool{}, map[policy.Threshold]bool{}
	for _, rp := range c.Pools {
		pools[rp] = newPool(rp, c.Policies)
		for _, w := range pools[rp].policies.Windows() {
			p.Longest = max(p.Longest, w)
		}
		for _, t := range pools[rp].policies.Thresholds() {
			thresholds[t] = true
		}
	}
	p.Thresholds = slices.Collect(maps.Keys(thresholds))
	for name, rm := range c.Models {
		first := PoolOf(rm)
		if pools[first] == nil {
			continue
		}
		p.Models[name] = pools[first].model(rm)
		for rp := range poolsOf(rm) {
			switch models := p.Pools[rp.Name]; {
			case models == nil:
			case rp == first:
				models[name] = p.Models[name]
			default:
				models[name] = pools[rp].model(rm)
			}
		}
	}
	return p
}

// Model is what a name stands for in a pool that a GatewayBackend names, or where
// none is named in the first pool that offers it; nil for nothing.
func (p *Plan) Model(pool, name string) *Model {
	if pool == "" {
		return p.Models[name]
	}
	return p.Pools[pool][name]
}

// PoolOf is the pool that offers a model: of several the first by name; nil if
// none does.
func PoolOf(m *resources.Model) (first *resources.Pool) {
	for p := range poolsOf(m) {
		if first == nil || p.Name < first.Name {
			first = p
		}
	}
	return first
}

// poolsOf are all pools that offer a model.
func poolsOf(m *resources.Model) map[*resources.Pool]bool {
	pools := map[*resources.Pool]bool{}
	for _, o := range m.Offers {
		pools[o.Pool] = true
	}
	for _, o := range m.External {
		pools[o.Pool] = true
	}
	return pools
}

// model is what a name stands for in the pool.
func (from *pool) model(rm *resources.Model) *Model {
	m := &Model{Model: rm, Pool: from.Pool, Policies: from.policies, Reads: from.policies.Reads(rm.Name), Tags: from.policies.TagsRead(rm.Name), Windows: from.windows}
	reach := append(m.Policies.Models(rm.Name), rm.Name)
	for _, t := range from.targets {
		if slices.ContainsFunc(t.Backend.Models, func(n string) bool { return slices.Contains(reach, n) }) {
			m.Targets = append(m.Targets, t)
		}
	}
	return m
}

// pool is a pool with all that its members serve.
type pool struct {
	*resources.Pool
	policies *policy.Set
	windows  []time.Duration
	targets  []Target
}

func newPool(rp *resources.Pool, policies []*policy.Policy) *pool {
	set := PoliciesOf(rp.Name, policies)
	return &pool{Pool: rp, policies: set, windows: set.Windows(), targets: TargetsOf(rp.Members)}
}

// PoliciesOf are those that apply to a pool, named namespace/name.
func PoliciesOf(poolName string, policies []*policy.Policy) *policy.Set {
	ns, name, _ := strings.Cut(poolName, "/")
	var own []*policy.Policy
	for _, p := range policies {
		if p.Namespace == ns {
			own = append(own, p)
		}
	}
	return policy.NewSet(name, own)
}

// TargetsOf is all that members of a pool serve.
func TargetsOf(members []resources.Member) []Target {
	var out []Target
	for _, m := range members {
		switch {
		case m.Set != nil:
			for _, p := range m.Set.Profiles {
				b := &policy.Backend{Type: v1alpha1.BackendLocal, Name: Base(m.Set.Name), Models: p.Names, Labels: m.Set.Labels}
				out = append(out, Target{Backend: b, Profile: p})
			}
		case m.Provider != nil:
			for _, p := range m.Provider.Models {
				b := &policy.Backend{Type: v1alpha1.BackendProvider, Name: Base(m.Provider.Name), Models: p.Names, Labels: m.Provider.Labels}
				out = append(out, Target{Backend: b, Provider: p})
			}
		}
	}
	return out
}

// ModelsOf are the names that clients may ask members of a pool for, sorted.
func ModelsOf(members []resources.Member) []string {
	out := []string{}
	for _, t := range TargetsOf(members) {
		out = append(out, t.Backend.Models...)
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// PolicyNames are the names of those that apply to a pool, as namespace/name in
// their order.
func PolicyNames(poolName string, policies []*policy.Policy) []string {
	ns, name, _ := strings.Cut(poolName, "/")
	out := []string{}
	for _, p := range policies {
		if p.Namespace == ns && (len(p.Targets) == 0 || slices.Contains(p.Targets, name)) {
			out = append(out, p.ID())
		}
	}
	return out
}

// Base is a name without its namespace.
func Base(name string) string { return name[strings.LastIndexByte(name, '/')+1:] }

// Considered are the profiles that requests for the model may end up at, in the
// order of their ids, and whether providers are among the targets.
func (m *Model) Considered() (profiles []*resources.Profile, external bool) {
	seen := map[*resources.Profile]bool{}
	for _, t := range m.Targets {
		if t.Profile != nil {
			seen[t.Profile] = true
		}
		external = external || t.Provider != nil
	}
	return slices.SortedFunc(maps.Keys(seen), func(a, b *resources.Profile) int { return cmp.Compare(a.ID, b.ID) }), external
}

// Complete adds what the resources say of a caller of whom only the tenant is known:
// the tenants above it, and its QoS where the request names none. It sets what
// ingress would where nothing is said.
func Complete(c *resources.Catalog, pool *resources.Pool, q *policy.Request) {
	if len(q.Tenants) == 1 {
		name := q.Tenants[0]
		if !strings.Contains(name, "/") && pool != nil {
			ns, _, _ := strings.Cut(pool.Name, "/")
			name = ns + "/" + name
		}
		for _, t := range c.Tenants {
			if t.Name == name {
				q.Tenants = t.Chain()
				q.QoS = cmp.Or(q.QoS, t.QoS)
				break
			}
		}
	}
	q.QoS = cmp.Or(q.QoS, v1alpha1.QoSInteractive)
	q.Endpoint = cmp.Or(q.Endpoint, v1alpha1.EndpointChatCompletions)
}

// usualOutput stands for the tokens of an answer without a limit.
const usualOutput = 256

// Output is about how many tokens an answer will have; maxTokens is 0 for no
// limit.
func Output(maxTokens int) int {
	if maxTokens > 0 {
		return min(maxTokens, usualOutput)
	}
	return usualOutput
}

// providerITL is the time between tokens that a provider is thought to take.
const providerITL = 20 * time.Millisecond

// ProviderE2E is when a provider's answer is thought to be over.
func ProviderE2E(ttft time.Duration, output int) time.Duration {
	return ttft + time.Duration(output)*providerITL
}

// ProviderCost is the price of the tokens; 0 where the provider has none.
func ProviderCost(m *resources.ProviderModel, prompt, output int) float64 {
	if m.Price == nil {
		return 0
	}
	return (float64(prompt)*m.Price.PerMillion.Input.Float() + float64(output)*m.Price.PerMillion.Output.Float()) / 1e6
}

// WorkerCost is the price of the GPU time that a request takes: its prefill and
// its share of the decode steps, which running others have a part in. 0 where the
// worker set has no price.
func WorkerCost(set *resources.WorkerSet, prefill, itl time.Duration, running float64, output int) float64 {
	seconds := prefill.Seconds() + float64(output)*itl.Seconds()/(1+running)
	return set.HourlyPrice.Float() * float64(max(1, set.Accelerators)) * seconds / 3600
}

// Rank sorts endpoints by predicted TTFT, best first. workers sorts those of
// workers: a scheduler knows what to do with nearly equal ones. Providers stand
// where their TTFT belongs.
func Rank(order []int, e []policy.Endpoint, workers func(order []int)) {
	own := make([]int, 0, len(order))
	var others []int
	for _, i := range order {
		if e[i].Type == v1alpha1.BackendLocal {
			own = append(own, i)
		} else {
			others = append(others, i)
		}
	}
	workers(own)
	order = order[:0]
	for _, w := range own {
		for len(others) > 0 && e[others[0]].TTFT < e[w].TTFT {
			order, others = append(order, others[0]), others[1:]
		}
		order = append(order, w)
	}
	_ = append(order, others...)
}
