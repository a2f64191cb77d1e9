package main

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/kinference/kinference/internal/plan"
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

// scope is what requests for a model have to do with. It is the router's plan, but
// for catalogs without pools, such as a policy alone: there policies of one namespace
// apply.
type scope struct {
	// pool is namespace/name; empty without resources.
	pool     string
	policies *policy.Set
	// backends are what the pool's members serve.
	backends []backend
	// reach are the names of models that the request may end up at.
	reach   []string
	catalog *resources.Catalog
	of      *resources.Pool // nil without one
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

func newScope(c *resources.Catalog, model string) (*scope, error) {
	out := &scope{catalog: c}
	if m := c.Models[model]; m != nil {
		out.of = plan.PoolOf(m)
	}
	switch {
	case out.of != nil:
		out.pool = out.of.Name
		out.backends = backendsOf(out.of.Members)
	case len(c.Models) > 0:
		return nil, fmt.Errorf("no pool serves the model %q: there are %s", model, strings.Join(slices.Sorted(maps.Keys(c.Models)), ", "))
	case len(c.Policies) > 0:
		ns := c.Policies[0].Namespace
		out.pool = ns + "/default"
		for _, p := range c.Policies {
			if p.Namespace != ns {
				return nil, fmt.Errorf("there are policies of %s and %s but no pool that says whose count: give one namespace only", ns, p.Namespace)
			}
		}
	}
	out.policies = plan.PoliciesOf(out.pool, c.Policies)
	out.reach = append(out.policies.Models(model), model)
	return out, nil
}

func backendsOf(members []resources.Member) []backend {
	var out []backend
	for _, t := range plan.TargetsOf(members) {
		b := backend{Backend: t.Backend, name: t.Name()}
		if t.Profile != nil {
			b.profile, b.context = t.Profile.ID, t.Profile.MaxModelLen
		}
		out = append(out, b)
	}
	return out
}

// qualify makes namespace/name of a name in the pool's namespace.
func (p *scope) qualify(name string) string {
	ns, _, ok := strings.Cut(p.pool, "/")
	if !ok || strings.Contains(name, "/") {
		return name
	}
	return ns + "/" + name
}

// reaches tells whether requests may end up at a backend.
func (p *scope) reaches(b *policy.Backend) bool {
	return slices.ContainsFunc(b.Models, func(n string) bool { return slices.Contains(p.reach, n) })
}

// tenant adds what the resources say of the caller.
func (p *scope) tenant(r *policy.Request) {
	pool := p.of
	if pool == nil {
		pool = &resources.Pool{Name: p.pool}
	}
	plan.Complete(p.catalog, pool, r)
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
