package status

import (
	"slices"
	"strings"
	"time"

	apiequality "k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/kinference/kinference/api/v1alpha1"
	"github.com/kinference/kinference/internal/kube"
	"github.com/kinference/kinference/internal/resources"
)

// view is all that statuses are made from.
type view struct {
	sets     map[string]*resources.WorkerSet
	pools    map[string]*resources.Pool
	tenants  map[string]*resources.Tenant
	backends map[string]*resources.Backend
	fleet    Fleet // may be nil
	replicas []*replica
	now      time.Time
}

func newView(c *resources.Catalog, fleet Fleet, replicas []*replica, now time.Time) *view {
	v := &view{
		sets: map[string]*resources.WorkerSet{}, pools: map[string]*resources.Pool{}, tenants: map[string]*resources.Tenant{},
		backends: map[string]*resources.Backend{}, fleet: fleet, replicas: replicas, now: now,
	}
	for _, s := range c.Sets {
		v.sets[s.Name] = s
	}
	for _, p := range c.Pools {
		v.pools[p.Name] = p
	}
	for _, b := range c.Backends {
		v.backends[b.Name] = b
	}
	for _, t := range c.Tenants {
		v.tenants[t.Name] = t
	}
	return v
}

// desired returns the resource with the status that it should have and nothing
// else, or nil when the one that it has, in current, says the same.
func (v *view) desired(r *kube.Resource, current resources.Object) resources.Object {
	out := r.Kind.Empty()
	out.SetName(r.Object.GetName())
	out.SetNamespace(r.Object.GetNamespace())
	out.SetUID(r.Object.GetUID())
	has := *conditionsOf(current)
	conditions := []metav1.Condition{accepted(r), resolvedRefs(r), programmed(r, find(has, v1alpha1.ConditionProgrammed), v.replicas, v.now)}
	if cacheAware := v.fill(r, out); cacheAware.Status != "" {
		conditions = append(conditions, cacheAware)
	}
	same := true
	for i := range conditions {
		c := &conditions[i]
		c.ObservedGeneration, c.LastTransitionTime = r.Object.GetGeneration(), metav1.NewTime(v.now.Truncate(time.Second))
		before := find(has, c.Type)
		if before != nil && before.Status == c.Status {
			c.LastTransitionTime = before.LastTransitionTime
		}
		same = same && before != nil && apiequality.Semantic.DeepEqual(*before, *c)
	}
	*conditionsOf(out) = conditions
	// A condition of ours that is said no more goes; others' are none of our business.
	if find(conditions, v1alpha1.ConditionCacheAware) == nil && find(has, v1alpha1.ConditionCacheAware) != nil {
		same = false
	}
	if same && apiequality.Semantic.DeepEqual(rest(out), rest(current)) {
		return nil
	}
	return out
}

// fill enters what is not a condition, and returns the condition CacheAware.
func (v *view) fill(r *kube.Resource, out resources.Object) metav1.Condition {
	id, generation := r.Object.GetNamespace()+"/"+r.Object.GetName(), r.Object.GetGeneration()
	switch o := out.(type) {
	case *v1alpha1.InferenceWorkerSet:
		o.Status.ObservedGeneration = generation
		state := v.set(id)
		o.Status.Workers = &v1alpha1.WorkerCount{Total: int32(state.Total), Ready: int32(state.Ready)}
		o.Status.BlockSize = int32(state.BlockSize)
		state.CacheAware.Type = v1alpha1.ConditionCacheAware
		state.CacheAware.Message = cut(state.CacheAware.Message)
		return state.CacheAware
	case *v1alpha1.InferencePool:
		o.Status.ObservedGeneration = generation
		o.Status.Workers = &v1alpha1.WorkerCount{}
		if p := v.pools[id]; p != nil {
			for _, m := range p.Members {
				if m.Set == nil {
					o.Status.Providers++
					continue
				}
				state := v.set(m.Set.Name)
				o.Status.Workers.Total += int32(state.Total)
				o.Status.Workers.Ready += int32(state.Ready)
			}
		}
	case *v1alpha1.InferenceProvider:
		o.Status.ObservedGeneration = generation
		if p, ok := r.Object.(*v1alpha1.InferenceProvider); ok {
			o.Status.Models = int32(len(p.Spec.Models))
		}
	case *v1alpha1.InferenceTenant:
		o.Status.ObservedGeneration = generation
		if t := v.tenants[id]; t != nil {
			o.Status.APIKeys = int32(len(t.Keys))
		}
	case *v1alpha1.GatewayBackend:
		o.Status.ObservedGeneration = generation
		if b := v.backends[id]; b != nil {
			for _, t := range v.tenants {
				if strings.HasPrefix(t.Name, r.Object.GetNamespace()+"/") && admits(b, t) {
					o.Status.Tenants++
				}
			}
		}
	}
	return metav1.Condition{}
}

// admits reports whether there is a way in by a backend for a tenant.
func admits(b *resources.Backend, t *resources.Tenant) bool {
	a := b.Spec.Authentication
	if b.Anonymous == t {
		return true
	}
	return a != nil && slices.ContainsFunc(t.Spec.Identities, func(id v1alpha1.Identity) bool {
		switch {
		case id.APIKeySecretRef != nil:
			return a.APIKeys != nil && len(t.Keys) > 0
		case id.ServiceAccount != nil:
			return a.ServiceAccounts != nil
		}
		return id.Claim != nil && slices.ContainsFunc(a.JWT, func(j v1alpha1.JWTIssuer) bool {
			return j.Issuer == id.Claim.Issuer && j.TenantClaim == id.Claim.Name
		})
	})
}

// set is the state of a worker set; without a word of the router, workers are
// ready when their Pods are.
func (v *view) set(name string) SetState {
	s := v.sets[name]
	if s == nil {
		return SetState{} // not in any pool
	}
	if v.fleet != nil {
		if state, ok := v.fleet.WorkerSet(name); ok {
			return state
		}
	}
	state := SetState{Total: len(s.Workers)}
	for i := range s.Workers {
		if !s.Workers[i].NotReady {
			state.Ready++
		}
	}
	return state
}

// conditionsOf returns the place of the conditions of a resource.
func conditionsOf(obj resources.Object) *[]metav1.Condition {
	switch o := obj.(type) {
	case *v1alpha1.GatewayBackend:
		return &o.Status.Conditions
	case *v1alpha1.InferencePolicy:
		return &o.Status.Conditions
	case *v1alpha1.InferencePool:
		return &o.Status.Conditions
	case *v1alpha1.InferenceProvider:
		return &o.Status.Conditions
	case *v1alpha1.InferenceTenant:
		return &o.Status.Conditions
	case *v1alpha1.InferenceWorkerSet:
		return &o.Status.Conditions
	}
	return &[]metav1.Condition{}
}

// rest returns the status of a resource without its conditions.
func rest(obj resources.Object) any {
	switch o := obj.(type) {
	case *v1alpha1.GatewayBackend:
		s := o.Status
		s.Conditions = nil
		return s
	case *v1alpha1.InferencePolicy:
		s := o.Status
		s.Conditions = nil
		return s
	case *v1alpha1.InferencePool:
		s := o.Status
		s.Conditions = nil
		return s
	case *v1alpha1.InferenceProvider:
		s := o.Status
		s.Conditions = nil
		return s
	case *v1alpha1.InferenceTenant:
		s := o.Status
		s.Conditions = nil
		return s
	case *v1alpha1.InferenceWorkerSet:
		s := o.Status
		s.Conditions = nil
		return s
	}
	return nil
}

func find(conditions []metav1.Condition, name string) *metav1.Condition {
	i := slices.IndexFunc(conditions, func(c metav1.Condition) bool { return c.Type == name })
	if i < 0 {
		return nil
	}
	return &conditions[i]
}
