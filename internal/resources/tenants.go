package resources

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"
	_ "time/tzdata" // time zones are checked alike on every machine

	"github.com/kinference/kinference/api/v1alpha1"
)

// maxLevels bounds the hierarchy of tenants: a request is counted at each.
const maxLevels = 8

// maxLimits bounds the limits of a tenant and those above it: the limiter counts
// all that a request must fit in one step.
const maxLimits = 64

// checkTenant checks what the schema cannot say.
func checkTenant(o *object, s *v1alpha1.InferenceTenantSpec) {
	for i, l := range s.Limits {
		at := index("spec.limits", i)
		if l.Calendar != nil {
			if _, err := time.LoadLocation(l.Calendar.TimeZone); err != nil {
				o.errorf(at+".calendar.timeZone", "unknown time zone %q: use a name such as UTC or Europe/Berlin", abbreviate(l.Calendar.TimeZone))
			}
		}
		for j := range s.Limits[:i] {
			o.redundant(at, &s.Limits[j], &l)
		}
	}
	seen := map[string]int{}
	for i, id := range s.Identities {
		if first, dup := seen[identityKey(&id)]; dup {
			o.errorf(index("spec.identities", i), "is the same as spec.identities[%d]: remove one", first)
			continue
		}
		seen[identityKey(&id)] = i
	}
}

func identityKey(id *v1alpha1.Identity) string {
	switch {
	case id.APIKeySecretRef != nil:
		return "secret " + string(id.APIKeySecretRef.Name)
	case id.Claim != nil:
		return fmt.Sprintf("claim %q of %q with value %q", id.Claim.Name, id.Claim.Issuer, id.Claim.Value)
	case id.ServiceAccount != nil:
		return fmt.Sprintf("ServiceAccount %s/%s", id.ServiceAccount.Namespace, id.ServiceAccount.Name)
	}
	return ""
}

// compileTenants resolves the hierarchy. An identity has one tenant in its
// namespace, the one that claimed it first.
func (c *compiler) compileTenants() {
	owners := map[string]*object{}
	for _, o := range c.good[v1alpha1.KindInferenceTenant] {
		spec := &o.Object.(*v1alpha1.InferenceTenant).Spec
		for i, id := range spec.Identities {
			key := o.GetNamespace() + " " + identityKey(&id)
			if owner := owners[key]; owner != nil {
				o.claimed(index("spec.identities", i), "identifies InferenceTenant %q already: a caller has one tenant", owner.GetName())
				continue
			}
			owners[key] = o
		}
		c.checkParents(o, spec)
		c.checkObjectives(o, spec.Objectives)
	}
	for _, o := range c.good[v1alpha1.KindInferenceTenant] {
		if !o.bad {
			c.tenant(o)
		}
	}
	byName(c.catalog.Tenants, func(t *Tenant) string { return t.Name })
}

// parent returns the tenant that one names as its parent, or nil.
func (c *compiler) parent(o *object) *object {
	ref := o.Object.(*v1alpha1.InferenceTenant).Spec.ParentRef
	if ref == nil {
		return nil
	}
	return c.known[place{o.kind, o.GetNamespace()}][string(ref.Name)]
}

func (c *compiler) checkParents(o *object, spec *v1alpha1.InferenceTenantSpec) {
	const field = "spec.parentRef.name"
	if spec.ParentRef == nil {
		return
	}
	parent := c.parent(o)
	if parent == nil {
		c.dangling(o, field, o.kind, spec.ParentRef.Name)
		return
	}
	names, newest := []string{o.GetName()}, o
	for p := parent; p != nil; p = c.parent(p) {
		switch {
		case p == o && newest == o: // the newest closes the cycle
			o.errorf(field, "closes a cycle, %s: remove one parentRef", strings.Join(append(names, o.GetName()), " → "))
			return
		case p == o || slices.Contains(names, p.GetName()):
			return // another one is to blame
		case len(names) == maxLevels:
			o.errorf(field, "puts the tenant on level %d or deeper: %d levels at most", maxLevels+1, maxLevels)
			return
		case p.age > newest.age:
			newest = p
		}
		names = append(names, p.GetName())
	}
	limits := len(spec.Limits)
	for p := parent; p != nil; p = c.parent(p) {
		above := p.Object.(*v1alpha1.InferenceTenant).Spec.Limits
		limits += len(above)
		for i := range spec.Limits {
			for j := range above {
				a, b := measureOf(&spec.Limits[i]), measureOf(&above[j])
				if a.comparable(b) && a.amount > b.amount && b.tenant {
					o.warnf(index("spec.limits", i), "never holds anything back: limit %q of InferenceTenant %q, which must fit too, allows only %s",
						above[j].Name, p.GetName(), plain(b.amount))
				}
			}
		}
	}
	if limits > maxLimits {
		o.errorf(field, "gives the tenant %d limits together with those above it: a request is counted in %d at most", limits, maxLimits)
	}
}

// tenant compiles a tenant and those above it, once.
func (c *compiler) tenant(o *object) *Tenant {
	if t := c.tenants[o.id()]; t != nil {
		return t
	}
	spec := &o.Object.(*v1alpha1.InferenceTenant).Spec
	t := &Tenant{Name: o.id(), Spec: spec, QoS: spec.QoS, CostCenter: spec.CostCenter, Keys: c.keys(o, spec)}
	if m := spec.MaxTokens; m != nil {
		t.DefaultTokens, t.MaximumTokens = m.Default, m.Maximum
	}
	c.tenants[o.id()] = t
	if parent := c.parent(o); parent != nil && !parent.bad {
		t.Parent = c.tenant(parent)
		t.inherit(t.Parent)
	}
	t.Orphan = spec.ParentRef != nil && t.Parent == nil
	c.catalog.Tenants = append(c.catalog.Tenants, t)
	return t
}

// inherit takes over what a tenant does not say itself from the one above it.
func (t *Tenant) inherit(from *Tenant) {
	t.QoS, t.CostCenter, t.DefaultTokens = cmp.Or(t.QoS, from.QoS), cmp.Or(t.CostCenter, from.CostCenter), cmp.Or(t.DefaultTokens, from.DefaultTokens)
	if t.MaximumTokens == 0 || from.MaximumTokens != 0 && from.MaximumTokens < t.MaximumTokens {
		t.MaximumTokens = from.MaximumTokens
	}
	if t.MaximumTokens != 0 {
		t.DefaultTokens = min(t.DefaultTokens, t.MaximumTokens)
	}
}

// checkObjectives checks whom objectives are for.
func (c *compiler) checkObjectives(o *object, list []v1alpha1.Objective) {
	for i, objective := range list {
		if objective.Match == nil {
			continue
		}
		for j, name := range objective.Match.Tenant {
			if c.known[place{v1alpha1.KindInferenceTenant, o.GetNamespace()}][string(name)] == nil {
				c.dangling(o, index(index("spec.objectives", i)+".match.tenant", j), v1alpha1.KindInferenceTenant, name)
			}
		}
	}
}
