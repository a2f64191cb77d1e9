package resources

import (
	"reflect"
	"time"

	"github.com/kinference/kinference/api/v1alpha1"
)

// measure is what a limit counts, and how much it allows.
type measure struct {
	counted
	amount float64
}

// counted is what two limits must have in common to be compared: the quantity,
// the time, and whether each caller has a count of its own.
type counted struct {
	quantity, currency               string
	input, cachedInput, output       float64 // weights of tokens
	window, burst                    time.Duration
	calendar                         v1alpha1.Calendar
	tenant, user, key, model, shadow bool
}

// comparable reports whether one of two limits makes the other one pointless.
func (m measure) comparable(o measure) bool { return m.counted == o.counted }

func measureOf(l *v1alpha1.Limit) measure {
	var m measure
	set := func(name string, v *int64) {
		if v != nil {
			m.quantity, m.amount = name, float64(*v)
		}
	}
	switch {
	case l.Tokens != nil:
		set("input", l.Tokens.Input)
		set("cachedInput", l.Tokens.CachedInput)
		set("output", l.Tokens.Output)
		set("total", l.Tokens.Total)
		m.input, m.cachedInput, m.output = 1, 1, 1
		if w := l.Tokens.Weights; w != nil {
			m.input, m.cachedInput, m.output = value(w.Input), value(w.CachedInput), value(w.Output)
		}
	case l.Concurrency != nil:
		m.quantity, m.amount = "concurrency", float64(*l.Concurrency)
	case l.Cost != nil:
		m.quantity, m.currency, m.amount = "cost", string(l.Cost.Currency), l.Cost.Amount.Float()
	default:
		set("requests", l.Requests)
		set("gpuSeconds", l.GPUSeconds)
	}
	m.window = l.Window.Or(0)
	m.burst = l.Burst.Or(m.window)
	if l.Calendar != nil {
		m.calendar = *l.Calendar
	}
	for _, p := range l.Per {
		m.tenant = m.tenant || p == v1alpha1.PerTenant
		m.user = m.user || p == v1alpha1.PerUser
		m.key = m.key || p == v1alpha1.PerKey
		m.model = m.model || p == v1alpha1.PerModel
	}
	m.shadow = l.Shadow
	return m
}

func value(f *float64) float64 {
	if f == nil {
		return 1
	}
	return *f
}

// redundant warns if one of two limits that hold for the same requests makes the
// other one pointless.
func (o *object) redundant(at string, first, second *v1alpha1.Limit) {
	a, b := measureOf(first), measureOf(second)
	if !a.comparable(b) {
		return
	}
	if a.amount == b.amount {
		o.warnf(at, "is the same limit as %q: remove one", first.Name)
		return
	}
	loose, amount := first.Name, b.amount
	if a.amount < b.amount {
		loose, amount = second.Name, a.amount
	}
	o.warnf(at, "%q and %q limit the same, so that %q never holds anything back: the other one allows only %s", first.Name, second.Name, loose, plain(amount))
}

// checkPolicyLimits finds limits of one policy that make each other pointless.
func checkPolicyLimits(o *object, limits []v1alpha1.PolicyLimit) {
	for i := range limits {
		for j := range limits[:i] {
			if reflect.DeepEqual(limits[i].Matches, limits[j].Matches) {
				o.redundant(index("spec.limits", i), &limits[j].Limit, &limits[i].Limit)
			}
		}
	}
}

// everybody is a limit of a policy that every request of a namespace must fit.
type everybody struct {
	amount       float64
	name, policy string
	perTenant    bool
}

// checkLevels warns of limits of tenants that a policy for every request of their
// namespace makes pointless.
func (c *compiler) checkLevels() {
	type place struct {
		namespace string
		counted
	}
	tightest := map[place]everybody{}
	for _, o := range c.good[v1alpha1.KindInferencePolicy] {
		spec := &o.Object.(*v1alpha1.InferencePolicy).Spec
		if spec.DryRun || len(spec.TargetRefs) > 0 {
			continue
		}
		for i := range spec.Limits {
			l := &spec.Limits[i]
			if len(l.Matches) > 0 || l.Shadow {
				continue
			}
			m := measureOf(&l.Limit)
			key := place{o.GetNamespace(), m.counted}
			if t, ok := tightest[key]; !ok || m.amount < t.amount {
				tightest[key] = everybody{m.amount, string(l.Name), o.GetName(), m.tenant}
			}
		}
	}
	if len(tightest) == 0 {
		return
	}
	parents := map[*object]bool{}
	for _, o := range c.good[v1alpha1.KindInferenceTenant] {
		parents[c.parent(o)] = true
	}
	for _, o := range c.good[v1alpha1.KindInferenceTenant] {
		limits := o.Object.(*v1alpha1.InferenceTenant).Spec.Limits
		for i := range limits {
			m := measureOf(&limits[i])
			t, ok := tightest[place{o.GetNamespace(), m.counted}]
			// What a policy counts for each tenant is without the tenants below.
			if !ok || m.amount <= t.amount || t.perTenant && parents[o] {
				continue
			}
			o.warnf(index("spec.limits", i), "never holds anything back: limit %q of InferencePolicy %q, which must fit too, allows only %s",
				t.name, t.policy, plain(t.amount))
		}
	}
}
