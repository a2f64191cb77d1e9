package evaluate

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

// Plan is a catalog prepared for decisions: which endpoints and policies a
// request for a model has to do with. It does not change.
type Plan struct {
	// Models by the name that clients ask for.
	Models map[string]*Model
	// Longest is the longest window of a mean that some policy looks at; 0 if
	// none looks at another one than the default.
	Longest time.Duration
}

// Model is a name that clients may ask for.
type Model struct {
	*resources.Model
	// Pool that offers it: of several the first by name.
	Pool     *resources.Pool
	Policies *policy.Set
	// targets are what serves it, or what a rule could send its requests to.
	targets []target
}

// target is a profile or a provider's model.
type target struct {
	backend  *policy.Backend
	profile  *resources.Profile
	provider *resources.ProviderModel
}

// NewPlan prepares a catalog.
func NewPlan(c *resources.Catalog) *Plan {
	p := &Plan{Models: make(map[string]*Model, len(c.Models))}
	pools := map[*resources.Pool]*pool{}
	for _, rp := range c.Pools {
		pools[rp] = newPool(rp, c.Policies)
		for _, w := range pools[rp].policies.Windows() {
			p.Longest = max(p.Longest, w)
		}
	}
	for name, rm := range c.Models {
		m := &Model{Model: rm}
		for _, o := range rm.Offers {
			m.Pool = before(m.Pool, o.Pool)
		}
		for _, o := range rm.External {
			m.Pool = before(m.Pool, o.Pool)
		}
		from := pools[m.Pool]
		if from == nil {
			continue
		}
		m.Policies = from.policies
		reach := append(m.Policies.Models(name), name)
		for _, t := range from.targets {
			if slices.ContainsFunc(t.backend.Models, func(n string) bool { return slices.Contains(reach, n) }) {
				m.targets = append(m.targets, t)
			}
		}
		p.Models[name] = m
	}
	return p
}

func before(a, b *resources.Pool) *resources.Pool {
	if a == nil || strings.Compare(b.Name, a.Name) < 0 {
		return b
	}
	return a
}

// pool is a pool with all that its members serve.
type pool struct {
	policies *policy.Set
	targets  []target
}

func newPool(rp *resources.Pool, policies []*policy.Policy) *pool {
	ns, name, _ := strings.Cut(rp.Name, "/")
	var own []*policy.Policy
	for _, p := range policies {
		if p.Namespace == ns {
			own = append(own, p)
		}
	}
	out := &pool{policies: policy.NewSet(name, own)}
	for _, m := range rp.Members {
		switch {
		case m.Set != nil:
			for _, p := range m.Set.Profiles {
				b := &policy.Backend{Type: v1alpha1.BackendLocal, Name: base(m.Set.Name), Models: p.Names, Labels: m.Set.Labels}
				out.targets = append(out.targets, target{backend: b, profile: p})
			}
		case m.Provider != nil:
			for _, p := range m.Provider.Models {
				b := &policy.Backend{Type: v1alpha1.BackendProvider, Name: base(m.Provider.Name), Models: p.Names, Labels: m.Provider.Labels}
				out.targets = append(out.targets, target{backend: b, provider: p})
			}
		}
	}
	return out
}

func base(name string) string { return name[strings.LastIndexByte(name, '/')+1:] }

// Considered are the profiles that requests for the model may end up at, in the
// order of their ids, and whether providers are among the targets.
func (m *Model) Considered() (profiles []*resources.Profile, external bool) {
	seen := map[*resources.Profile]bool{}
	for _, t := range m.targets {
		if t.profile != nil {
			seen[t.profile] = true
		}
		external = external || t.provider != nil
	}
	return slices.SortedFunc(maps.Keys(seen), func(a, b *resources.Profile) int { return cmp.Compare(a.ID, b.ID) }), external
}
