package resources

import (
	"cmp"
	"slices"
	"strings"

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
	c.checkWaysIn()
}

// checkWaysIn warns of identities by which nobody can come in: the backends of the
// namespace take other credentials.
func (c *compiler) checkWaysIn() {
	ways := map[string][]*v1alpha1.Authentication{} // by namespace
	for _, b := range c.catalog.Backends {
		if a := b.Spec.Authentication; a != nil {
			ns, _, _ := strings.Cut(b.Name, "/")
			ways[ns] = append(ways[ns], a)
		}
	}
	for _, o := range c.good[v1alpha1.KindInferenceTenant] {
		all := ways[o.GetNamespace()]
		if len(all) == 0 {
			continue
		}
		for i, id := range o.Object.(*v1alpha1.InferenceTenant).Spec.Identities {
			field := index("spec.identities", i)
			switch {
			case id.APIKeySecretRef != nil && !slices.ContainsFunc(all, func(a *v1alpha1.Authentication) bool { return a.APIKeys != nil }):
				o.warnf(field, "lets nobody in: no GatewayBackend of the namespace has authentication.apiKeys")
			case id.ServiceAccount != nil && !slices.ContainsFunc(all, func(a *v1alpha1.Authentication) bool { return a.ServiceAccounts != nil }):
				o.warnf(field, "lets nobody in: no GatewayBackend of the namespace has authentication.serviceAccounts")
			case id.Claim != nil && !slices.ContainsFunc(all, func(a *v1alpha1.Authentication) bool {
				return slices.ContainsFunc(a.JWT, func(j v1alpha1.JWTIssuer) bool { return j.Issuer == id.Claim.Issuer && j.TenantClaim == id.Claim.Name })
			}):
				o.warnf(field, "lets nobody in: no GatewayBackend of the namespace has this issuer with tenantClaim %q in authentication.jwt", abbreviate(id.Claim.Name))
			}
		}
	}
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
