package resources

import (
	"cmp"

	"github.com/kinference/kinference/api/v1alpha1"
)

// compileBackends resolves what is exposed. A hostname with a path is one
// backend's, the one that claimed it first, in whatever namespace.
func (c *compiler) compileBackends() {
	owners := map[string]*object{}
	for _, o := range c.good[v1alpha1.KindGatewayBackend] {
		spec := &o.Object.(*v1alpha1.GatewayBackend).Spec
		hosts := spec.Hostnames
		if len(hosts) == 0 {
			hosts = []v1alpha1.Hostname{"*"}
		}
		path := cmp.Or(spec.PathPrefix, "/")
		for i, host := range hosts {
			field := "spec.pathPrefix"
			if len(spec.Hostnames) > 0 {
				field = index("spec.hostnames", i)
			}
			key := string(host) + " " + path
			if owner := owners[key]; owner != nil {
				o.claimed(field, "host %s with path %s is exposed by GatewayBackend %s already: change one of them", host, path, owner.id())
				continue
			}
			owners[key] = o
		}
		b := c.compileBackend(o, spec)
		if !o.bad {
			c.catalog.Backends = append(c.catalog.Backends, b)
		}
	}
	byName(c.catalog.Backends, func(b *Backend) string { return b.Name })
}

func (c *compiler) compileBackend(o *object, spec *v1alpha1.GatewayBackendSpec) *Backend {
	b := &Backend{Name: o.id(), Spec: spec, Body: defaultBody, Headers: defaultHeaders, Idle: defaultIdle, Total: defaultGatewayTotal}
	name := spec.PoolRef.Name
	b.Pool = c.pools[o.GetNamespace()+"/"+string(name)]
	if b.Pool == nil && c.known[place{v1alpha1.KindInferencePool, o.GetNamespace()}][string(name)] == nil {
		c.dangling(o, "spec.poolRef.name", v1alpha1.KindInferencePool, name)
	}
	if a := spec.Authentication; a != nil && a.Anonymous != nil {
		name := a.Anonymous.Tenant
		b.Anonymous = c.tenants[o.GetNamespace()+"/"+string(name)]
		if b.Anonymous == nil && c.known[place{v1alpha1.KindInferenceTenant, o.GetNamespace()}][string(name)] == nil {
			c.dangling(o, "spec.authentication.anonymous.tenant", v1alpha1.KindInferenceTenant, name)
		}
	}
	if l := spec.Limits; l != nil {
		if n, err := l.Body.Bytes(); err == nil {
			b.Body = n
		}
		if n, err := l.Headers.Bytes(); err == nil {
			b.Headers = n
		}
	}
	if t := spec.Timeouts; t != nil {
		b.Idle, b.Total = t.Idle.Or(b.Idle), t.Total.Or(b.Total)
	}
	return b
}
