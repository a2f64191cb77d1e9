package main

import (
	"cmp"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/kinference/kinference/api/v1alpha1"
	"github.com/kinference/kinference/internal/policy"
	"github.com/kinference/kinference/internal/resources"
)

// loadConfig compiles a folder or file and prints what is wrong with it.
func loadConfig(errs io.Writer, path string) (*resources.Catalog, error) {
	c, problems := resources.Options{Elsewhere: true}.Load(path)
	for _, p := range problems {
		fmt.Fprintln(errs, p)
	}
	if problems.Err() != nil {
		return nil, fmt.Errorf("the resources of %s would not be loaded", path)
	}
	return c, nil
}

// plan is what requests for a model have to do with, as in the router's plan.
type plan struct {
	// pool is namespace/name; empty without resources.
	pool     string
	policies *policy.Set
	// backends are what the pool's members serve.
	backends []backend
	// reach are the names of models that the request may end up at.
	reach   []string
	catalog *resources.Catalog
}

// backend is a profile or a provider's model.
type backend struct {
	*policy.Backend
	// name is that of the worker set or provider, as namespace/name.
	name string
	// profile is empty for a provider.
	profile string
	// context in tokens; 0 when it is not known.
	context int
}

// newPlan prepares a catalog for a model. A catalog without any pool may have
// policies of one namespace, which apply then.
func newPlan(c *resources.Catalog, model string) (*plan, error) {
	out := &plan{catalog: c}
	var pool *resources.Pool
	if m := c.Models[model]; m != nil {
		// Of several the first by name, as in the router.
		for _, o := range m.Offers {
			pool = first(pool, o.Pool)
		}
		for _, o := range m.External {
			pool = first(pool, o.Pool)
		}
	}
	switch {
	case pool != nil:
		out.pool = pool.Name
	case len(c.Models) > 0:
		return nil, fmt.Errorf("no pool serves the model %q: there are %s", model, strings.Join(slices.Sorted(maps.Keys(c.Models)), ", "))
	case len(c.Policies) > 0:
		out.pool = c.Policies[0].Namespace + "/default"
	}
	ns, name, _ := strings.Cut(out.pool, "/")
	var own []*policy.Policy
	for _, p := range c.Policies {
		switch {
		case p.Namespace == ns:
			own = append(own, p)
		case pool == nil:
			return nil, fmt.Errorf("there are policies of %s and %s but no pool that says whose count: give one namespace only", ns, p.Namespace)
		}
	}
	out.policies = policy.NewSet(name, own)
	out.reach = append(out.policies.Models(model), model)
	if pool != nil {
		out.backends = backendsOf(pool.Members)
	}
	return out, nil
}

func first(a, b *resources.Pool) *resources.Pool {
	if a == nil || b.Name < a.Name {
		return b
	}
	return a
}

func backendsOf(members []resources.Member) []backend {
	var out []backend
	for _, m := range members {
		switch {
		case m.Set != nil:
			for _, p := range m.Set.Profiles {
				b := &policy.Backend{Type: v1alpha1.BackendLocal, Name: base(m.Set.Name), Models: p.Names, Labels: m.Set.Labels}
				out = append(out, backend{b, m.Set.Name, p.ID, p.MaxModelLen})
			}
		case m.Provider != nil:
			for _, p := range m.Provider.Models {
				b := &policy.Backend{Type: v1alpha1.BackendProvider, Name: base(m.Provider.Name), Models: p.Names, Labels: m.Provider.Labels}
				out = append(out, backend{b, m.Provider.Name, "", 0})
			}
		}
	}
	return out
}

func base(name string) string { return name[strings.LastIndexByte(name, '/')+1:] }

// qualify makes namespace/name of a name in the pool's namespace.
func (p *plan) qualify(name string) string {
	ns, _, ok := strings.Cut(p.pool, "/")
	if !ok || strings.Contains(name, "/") {
		return name
	}
	return ns + "/" + name
}

// reaches tells whether requests may end up at a backend.
func (p *plan) reaches(b *policy.Backend) bool {
	return slices.ContainsFunc(b.Models, func(n string) bool { return slices.Contains(p.reach, n) })
}

// tenant adds what the resources say of the caller: the tenants above it, and its
// QoS where the request names none.
func (p *plan) tenant(r *policy.Request) {
	if len(r.Tenants) == 1 {
		for _, t := range p.catalog.Tenants {
			if t.Name == p.qualify(r.Tenants[0]) {
				r.Tenants = t.Chain()
				r.QoS = cmp.Or(r.QoS, t.QoS)
				break
			}
		}
	}
	r.QoS = cmp.Or(r.QoS, v1alpha1.QoSInteractive)
}

// candidate is an endpoint with what a record says of it beside.
type candidate struct {
	policy.Endpoint
	backend backend
	load    *load
}

// load is what is known of a worker's load; it stands for the mean of any window.
type load struct {
	queued, running, usage float64
	stale                  bool
}

// Mean implements policy.Load.
func (l *load) Mean(m policy.Metric, _ time.Duration) (float64, bool) {
	return [...]float64{policy.QueuedPrompts: l.queued, policy.RunningPrompts: l.running, policy.KVCacheUsage: l.usage}[m], !l.stale
}
