package catalog

import (
	"cmp"
	"slices"
	"strings"
	"time"

	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
)

// maxLevels bounds the chain of a tenant, whatever the catalog says.
const maxLevels = 8

// Backend is a GatewayBackend: what is exposed where, and to whom.
type Backend struct {
	// Name is namespace/name, Namespace the first half of it.
	Name, Namespace string
	// Pool is namespace/name; empty when it is not there.
	Pool   string
	Models []*Model // that the pool offers, by name
	byName map[string]*Model
	// Anonymous is the tenant of callers without a credential; nil: there are none.
	Anonymous *Tenant
	// DefaultQoS is the class of requests whose tenant says nothing.
	DefaultQoS string
	// MaxBody and MaxHeader are in bytes.
	MaxBody, MaxHeader int64
	Idle, Total        time.Duration
	// Message has the ways in. Do not modify it.
	Message *routerv1.Backend
}

// Model returns the model of the backend's pool with this name, nil if there is
// none.
func (b *Backend) Model(name string) *Model { return b.byName[name] }

// Tenant is an InferenceTenant.
type Tenant struct {
	// Name is namespace/name, Namespace the first half of it.
	Name, Namespace string
	// Chain has the tenant itself and those above it, nearest first.
	Chain []*Tenant
	// Names are those of Chain; Short are the same without namespace, as policies
	// know them.
	Names, Short []string
	// Organisation is the name of the top of the chain.
	Organisation string
	// Unbounded says that a level of the chain is not there, so that its limits
	// cannot be kept: no request is taken.
	Unbounded bool
	// Message has the limits and all else. Do not modify it.
	Message *routerv1.Tenant
}

// Tenant returns the tenant namespace/name, nil if there is none.
func (v *View) Tenant(name string) *Tenant { return v.tenants[name] }

// Tenants returns all tenants by name.
func (v *View) Tenants() []*Tenant {
	out := make([]*Tenant, 0, len(v.tenants))
	for _, t := range v.tenants {
		out = append(out, t)
	}
	slices.SortFunc(out, func(a, b *Tenant) int { return strings.Compare(a.Name, b.Name) })
	return out
}

// access reads who may what.
func (v *View) access(c *routerv1.Catalog, profiles map[string]*Profile) {
	v.Guarded = c.GetGuarded() || len(c.GetBackends()) > 0
	v.LimitPolicies, v.Objectives = c.GetLimitPolicies(), c.GetObjectives()
	v.tenants = make(map[string]*Tenant, len(c.GetTenants()))
	for _, m := range c.GetTenants() {
		v.tenants[m.GetName()] = &Tenant{Name: m.GetName(), Namespace: namespace(m.GetName()), Message: m}
	}
	for _, t := range v.tenants {
		v.chain(t)
	}
	pools := map[string][]*Model{}
	for _, p := range c.GetPools() {
		pools[p.GetName()] = models(p.GetModels(), profiles)
	}
	for _, m := range c.GetBackends() {
		b := &Backend{
			Name: m.GetName(), Namespace: namespace(m.GetName()), Pool: m.GetPool(), Models: pools[m.GetPool()], Anonymous: v.tenants[m.GetAnonymousTenant()],
			DefaultQoS: cmp.Or(m.GetDefaultQos(), "interactive"), MaxBody: m.GetMaxBody(), MaxHeader: m.GetMaxHeader(),
			Idle: m.GetIdleTimeout().AsDuration(), Total: m.GetTotalTimeout().AsDuration(), Message: m, byName: map[string]*Model{},
		}
		for _, model := range b.Models {
			b.byName[model.Name] = model
		}
		v.Backends = append(v.Backends, b)
	}
}

// chain enters the levels above a tenant.
func (v *View) chain(t *Tenant) {
	for next := t; ; {
		t.Chain, t.Names = append(t.Chain, next), append(t.Names, next.Name)
		t.Short = append(t.Short, next.Name[strings.IndexByte(next.Name, '/')+1:])
		t.Organisation = next.Name
		t.Unbounded = t.Unbounded || next.Message.GetOrphan()
		if next.Message.GetParent() == "" {
			return
		}
		if next = v.tenants[next.Message.GetParent()]; next == nil || len(t.Chain) == maxLevels {
			t.Unbounded = true
			return
		}
	}
}

func namespace(name string) string { return name[:max(0, strings.IndexByte(name, '/'))] }
