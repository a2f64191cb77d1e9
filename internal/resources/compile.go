package resources

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/kinference/kinference/api/v1alpha1"
	"github.com/kinference/kinference/internal/policy"
)

// Options of a compilation. The zero value is what a running router wants of a
// folder.
type Options struct {
	// Strict makes a reference to something that is not there an error. It is a
	// warning else, because a folder may be a part of a whole.
	Strict bool
	// Elsewhere tells that the resources are for another machine, so that the
	// files they name need not be here.
	Elsewhere bool
	// Partial leaves out resources with errors, instead of making no catalog.
	Partial bool
	// Pods lists the Pods of a namespace that have all these labels. Nil: Pods
	// are not known, so that a selector selects none.
	Pods func(namespace string, labels map[string]string) []Pod
	// Extension finds a pool of the Gateway API inference extension; nil where
	// it is not there. When the function is nil, such pools are not known.
	Extension func(namespace, name string) *ExtensionPool
	// Served lists the models that the engine of a worker says it serves, for
	// selectors that name none; nil while it has not answered.
	Served func(worker string) []string
	// Keys finds a Secret with records of API keys; nil where it is not there. When
	// the function is nil, they are those of the files.
	Keys func(namespace, secret string) *KeySecret
	// Guarded says that there is a GatewayBackend, even if it is too bad to be
	// among the resources.
	Guarded bool
}

// Pod is a Pod with an engine.
type Pod struct {
	UID, Name string
	// Address is the host without port.
	Address string
	Labels  map[string]string
	// NotReady Pods are workers that take no requests.
	NotReady bool
}

// ExtensionPool is an InferencePool of the group inference.networking.k8s.io.
type ExtensionPool struct {
	Selector map[string]string
	// Ports of each Pod; behind each is a worker.
	Ports []int32
}

// Compile checks resources that were read from the Kubernetes API and compiles
// them. It does not change them. The catalog is nil when any problem is an
// Error, unless the options say Partial.
func (o Options) Compile(objects []Object) (*Catalog, Problems) {
	checked := make([]*Checked, len(objects))
	for i, obj := range objects {
		checked[i] = Check(obj)
	}
	return o.CompileChecked(checked)
}

// Checked is a resource that was held against its schema, which is most of the
// work of a compilation. It does not change.
type Checked struct {
	// Object as it was given.
	Object Object
	// full is the object with defaults; nil after a fault.
	full     Object
	kind     string
	problems Problems
}

// Check holds a resource that was read from the Kubernetes API against its
// schema, for any number of compilations.
func Check(obj Object) *Checked {
	p := &parser{}
	p.typed(obj)
	c := &Checked{Object: obj, kind: kindOf(obj), problems: p.problems}
	if len(p.objects) > 0 {
		c.full = p.objects[0].Object
	}
	return c
}

// CompileChecked is Compile for resources that were checked before.
func (o Options) CompileChecked(checked []*Checked) (*Catalog, Problems) {
	p := &parser{}
	for _, c := range checked {
		for _, problem := range c.problems {
			p.report(problem)
		}
		if c.full != nil {
			p.objects = append(p.objects, &object{Object: c.full, kind: c.kind, report: p.report})
		}
	}
	return o.finish(p)
}

// ValidateObject checks one resource as it would be checked within a folder
// together with others, which are taken for good. It is what admission calls;
// a resource of the same kind and name among the others is the one to be
// replaced. Nothing is changed.
func ValidateObject(obj Object, others []Object) Problems {
	one := &parser{}
	one.typed(obj)
	if one.problems.Err() != nil {
		return one.problems
	}
	checked := one.objects[0]
	all := &parser{}
	for _, other := range others {
		// Resources refer to their own namespace; only hosts are shared by all.
		kind := kindOf(other)
		near := other.GetNamespace() == checked.GetNamespace() || checked.kind == v1alpha1.KindGatewayBackend && kind == checked.kind
		if near && (kind != checked.kind || objectID(other) != checked.id()) {
			all.objects = append(all.objects, &object{Object: other, kind: kind, report: func(Problem) {}})
		}
	}
	// The newest one is what a conflict is blamed on.
	all.objects = append(all.objects, checked)
	Options{Elsewhere: true, Pods: noPods, Extension: anyExtension, Served: nothingServed, Keys: anyKeys}.compile(all.objects)
	one.problems.sort()
	return one.problems
}

// What admission knows of the world: whatever is not a resource may be there.
func noPods(string, map[string]string) []Pod             { return nil }
func anyExtension(namespace, name string) *ExtensionPool { return &ExtensionPool{} }
func nothingServed(string) []string                      { return nil }

func (o Options) finish(p *parser) (*Catalog, Problems) {
	slices.SortStableFunc(p.objects, func(a, b *object) int {
		return a.GetCreationTimestamp().Compare(b.GetCreationTimestamp().Time)
	})
	if o.Keys == nil {
		o.Keys = p.secretsOf()
	}
	c := o.compile(p.objects)
	p.problems.sort()
	if p.problems.Err() != nil && !o.Partial {
		return nil, p.problems
	}
	return c, p.problems
}

// implicitPool is the name of the pool of a namespace that has none.
const implicitPool = "default"

// compiler resolves references. Problems go to the objects' report.
type compiler struct {
	Options
	catalog *Catalog
	// known holds all objects, bad ones too: a reference to one of those is not
	// what is wrong.
	known map[place]map[string]*object
	// good objects by kind, in their order.
	good map[string][]*object
	// What has been compiled, by id.
	sets      map[string]*WorkerSet
	providers map[string]*Provider
	pools     map[string]*Pool
	tenants   map[string]*Tenant
	// extensions are the worker sets of pools of the inference extension.
	extensions map[string]*WorkerSet
	specs      map[*policy.Policy]*v1alpha1.InferencePolicySpec
	policies   map[*policy.Policy]*object
	// keyOwners are the tenants that have keys, by namespace and id.
	keyOwners map[string]string
	// said holds warnings that are given once.
	said map[string]bool
}

// place is where names are unique.
type place struct{ kind, namespace string }

func placeOf(o *object) place { return place{o.kind, o.GetNamespace()} }

// compile makes a catalog of the objects that have no errors, oldest first.
func (o Options) compile(objects []*object) *Catalog {
	c := &compiler{
		Options: o, catalog: &Catalog{Models: map[string]*Model{}},
		known: map[place]map[string]*object{}, good: map[string][]*object{},
		sets: map[string]*WorkerSet{}, providers: map[string]*Provider{}, pools: map[string]*Pool{}, tenants: map[string]*Tenant{},
		extensions: map[string]*WorkerSet{},
		specs:      map[*policy.Policy]*v1alpha1.InferencePolicySpec{}, policies: map[*policy.Policy]*object{}, keyOwners: map[string]string{}, said: map[string]bool{},
	}
	for i, obj := range objects {
		obj.age = i
		names := c.known[placeOf(obj)]
		if names == nil {
			names = map[string]*object{}
			c.known[placeOf(obj)] = names
		}
		if first := names[obj.GetName()]; first != nil {
			obj.claimed("metadata.name", "is used already by the resource at %s:%d", first.file, lineOf(first.node, ""))
			continue
		}
		names[obj.GetName()] = obj
		if c.alone(obj); !obj.bad {
			c.good[obj.kind] = append(c.good[obj.kind], obj)
		}
	}
	c.catalog.Guarded = o.Guarded || slices.ContainsFunc(objects, func(x *object) bool { return x.kind == v1alpha1.KindGatewayBackend })
	c.compileTenants()
	c.compilePools()
	c.compileBackends()
	c.compilePolicies()
	c.checkLevels()
	c.notYet()
	return c.catalog
}

// alone checks what only code can say of one resource by itself.
func (c *compiler) alone(o *object) {
	switch r := o.Object.(type) {
	case *v1alpha1.InferenceWorkerSet:
		c.checkWorkerSet(o, &r.Spec)
	case *v1alpha1.InferencePool:
		checkModels(o, r.Spec.Models)
		if r.Spec.Selector != nil {
			c.checkSelector(o)
		}
	case *v1alpha1.InferenceProvider:
		names := uniqueNames{o, map[string]string{}}
		for i, m := range r.Spec.Models {
			names.add(fmt.Sprintf("spec.models[%d]", i), m.Name, m.Aliases)
		}
	case *v1alpha1.InferenceTenant:
		checkTenant(o, &r.Spec)
	case *v1alpha1.InferencePolicy:
		p, faults := policy.Compile(r)
		for _, f := range faults {
			o.problem(severity(f.Warning), f.Field, f.Message)
		}
		if !o.bad {
			checkPolicyLimits(o, r.Spec.Limits)
			c.catalog.Policies = append(c.catalog.Policies, p)
			c.specs[p], c.policies[p] = &r.Spec, o
		}
	}
}

func severity(warning bool) Severity {
	if warning {
		return Warning
	}
	return Error
}

// dangling reports a reference to something that is not there.
func (c *compiler) dangling(o *object, field, kind string, name v1alpha1.ResourceName) {
	near := slices.Collect(maps.Keys(c.known[place{kind, o.GetNamespace()}]))
	o.because(Missing, severity(!c.Strict), field, fmt.Sprintf("there is no %s %q in namespace %q%s",
		kind, abbreviate(name), o.GetNamespace(), didYouMean(string(name), near)))
}

// compilePools compiles pools and what they serve.
func (c *compiler) compilePools() {
	for _, o := range c.good[v1alpha1.KindInferencePool] {
		if p := c.compilePool(o); !o.bad {
			c.addPool(p)
		}
	}
	implicit := map[string]*Pool{}
	members := slices.Concat(c.good[v1alpha1.KindInferenceWorkerSet], c.good[v1alpha1.KindInferenceProvider])
	for _, o := range members {
		ns := o.GetNamespace()
		if len(c.known[place{v1alpha1.KindInferencePool, ns}]) > 0 { // be it a bad one
			if c.sets[o.id()] == nil && o.kind == v1alpha1.KindInferenceWorkerSet || c.providers[o.id()] == nil && o.kind == v1alpha1.KindInferenceProvider {
				o.warnf("", "no InferencePool of the namespace names this resource: it is not served")
			}
			continue
		}
		p := implicit[ns]
		if p == nil {
			p = &Pool{Name: ns + "/" + implicitPool, Implicit: true}
			implicit[ns] = p
		}
		p.Members = append(p.Members, c.member(o, 1))
	}
	for _, p := range implicit {
		c.addPool(p)
	}
	byName(c.catalog.Sets, func(s *WorkerSet) string { return s.Name })
	byName(c.catalog.Providers, func(p *Provider) string { return p.Name })
	byName(c.catalog.Pools, func(p *Pool) string { return p.Name })
	for _, p := range c.catalog.Pools {
		c.catalog.offer(p)
	}
}

func (c *compiler) addPool(p *Pool) {
	slices.SortStableFunc(p.Members, func(a, b Member) int {
		return cmp.Or(cmp.Compare(kindRank(a), kindRank(b)), strings.Compare(a.name(), b.name()))
	})
	for _, m := range p.Members {
		if m.Set != nil {
			p.Sets = append(p.Sets, m.Set)
		}
	}
	c.pools[p.Name] = p
	c.catalog.Pools = append(c.catalog.Pools, p)
}

func kindRank(m Member) int {
	if m.Set != nil {
		return 0
	}
	return 1
}

func (c *compiler) compilePool(o *object) *Pool {
	spec := &o.Object.(*v1alpha1.InferencePool).Spec
	p := &Pool{Name: o.id(), Objectives: spec.Objectives}
	c.checkObjectives(o, spec.Objectives)
	if spec.Selector != nil {
		if s := c.compileSelected(o, spec); s != nil {
			c.catalog.Sets = append(c.catalog.Sets, s)
			p.Members = append(p.Members, Member{Set: s, Weight: 1})
		}
	}
	for i, d := range spec.Destinations {
		if d.Group == v1alpha1.ExtensionGroup {
			if s := c.compileExtension(o, index("spec.destinations", i), d); s != nil {
				p.Members = append(p.Members, Member{Set: s, Weight: weightOf(d)})
			}
			continue
		}
		target := c.known[place{d.Kind, o.GetNamespace()}][string(d.Name)]
		switch {
		case target == nil:
			c.dangling(o, index("spec.destinations", i)+".name", d.Kind, d.Name)
		case !target.bad:
			weight := weightOf(d)
			if weight != 1 {
				c.once("weights "+p.Name, o, index("spec.destinations", i)+".weight", "has no effect yet: weights are those of a policy's select")
			}
			p.Members = append(p.Members, c.member(target, weight))
		}
	}
	return p
}

func weightOf(d v1alpha1.Destination) int {
	if d.Weight == nil {
		return 1
	}
	return int(*d.Weight)
}

// member compiles a worker set or provider, once.
func (c *compiler) member(o *object, weight int) Member {
	id := o.id()
	if r, ok := o.Object.(*v1alpha1.InferenceProvider); ok {
		if c.providers[id] == nil {
			c.providers[id] = compileProvider(id, r)
			c.catalog.Providers = append(c.catalog.Providers, c.providers[id])
		}
		return Member{Provider: c.providers[id], Weight: weight}
	}
	if c.sets[id] == nil {
		c.sets[id] = c.compileSet(o)
		c.catalog.Sets = append(c.catalog.Sets, c.sets[id])
	}
	return Member{Set: c.sets[id], Weight: weight}
}

func compileProvider(id string, r *v1alpha1.InferenceProvider) *Provider {
	p := &Provider{Name: id, Labels: r.Labels, Spec: &r.Spec}
	t := cmp.Or(r.Spec.Timeouts, &v1alpha1.ProviderTimeouts{})
	p.FirstByte, p.Idle, p.Total = t.FirstByte.Or(defaultFirstByte), t.Idle.Or(defaultIdle), t.Total.Or(defaultProviderTotal)
	for i := range r.Spec.Models {
		m := &r.Spec.Models[i]
		p.Models = append(p.Models, &ProviderModel{
			Provider: p, UpstreamModel: string(cmp.Or(m.UpstreamName, m.Name)), Names: allNames(m.Name, m.Aliases), Price: m.Price,
		})
	}
	return p
}

func allNames(name v1alpha1.ModelName, aliases []v1alpha1.ModelName) []string {
	out := []string{string(name)}
	for _, a := range aliases {
		out = append(out, string(a))
	}
	return out
}

// offer enters what a pool serves under all of its names.
func (c *Catalog) offer(p *Pool) {
	model := func(name, root string) *Model {
		if c.Models[name] == nil {
			c.Models[name] = &Model{Name: name, Root: root}
		}
		return c.Models[name]
	}
	for _, m := range p.Members {
		if m.Set != nil {
			for _, profile := range m.Set.Profiles {
				for _, name := range profile.Names {
					entry := model(name, profile.Root)
					entry.Offers = append(entry.Offers, Offer{p, profile})
				}
			}
			continue
		}
		for _, pm := range m.Provider.Models {
			for _, name := range pm.Names {
				entry := model(name, pm.Names[0])
				entry.External = append(entry.External, ExternalOffer{p, pm})
			}
		}
	}
}

// compilePolicies sorts the policies and checks them against all else.
func (c *compiler) compilePolicies() {
	slices.SortStableFunc(c.catalog.Policies, func(a, b *policy.Policy) int {
		return cmp.Or(a.Created.Compare(b.Created), strings.Compare(a.Namespace, b.Namespace), strings.Compare(a.Name, b.Name))
	})
	byNamespace := map[string][]*policy.Policy{}
	for _, p := range c.catalog.Policies {
		byNamespace[p.Namespace] = append(byNamespace[p.Namespace], p)
		if spec := c.specs[p]; len(spec.Limits) > 0 {
			limits := &LimitPolicy{Name: p.ID(), Spec: spec}
			for _, pool := range c.catalog.Pools {
				if ns, name, _ := strings.Cut(pool.Name, "/"); ns == p.Namespace && (len(p.Targets) == 0 || slices.Contains(p.Targets, name)) {
					limits.Pools = append(limits.Pools, pool.Name)
				}
			}
			c.catalog.LimitPolicies = append(c.catalog.LimitPolicies, limits)
		}
	}
	if len(byNamespace) == 0 {
		return
	}
	models := map[string]map[string]bool{} // by namespace
	add := func(p *Pool, name string) {
		ns, _, _ := strings.Cut(p.Name, "/")
		if models[ns] == nil {
			models[ns] = map[string]bool{}
		}
		models[ns][name] = true
	}
	for name, m := range c.catalog.Models {
		for _, o := range m.Offers {
			add(o.Pool, name)
		}
		for _, o := range m.External {
			add(o.Pool, name)
		}
	}
	for ns, policies := range byNamespace {
		for _, f := range policy.Lint(policies, c.specs, c.knownIn(ns, models[ns])) {
			if f.Dangling {
				c.policies[f.Policy].because(Missing, severity(!c.Strict), f.Field, f.Message)
			} else {
				c.policies[f.Policy].warnf(f.Field, "%s", f.Message)
			}
		}
	}
}

// knownIn lists what a policy of a namespace may refer to.
func (c *compiler) knownIn(ns string, models map[string]bool) policy.Known {
	names := func(kind string) map[string]bool {
		out := map[string]bool{}
		for name := range c.known[place{kind, ns}] {
			out[name] = true
		}
		return out
	}
	k := policy.Known{
		Pools: names(v1alpha1.KindInferencePool), WorkerSets: names(v1alpha1.KindInferenceWorkerSet),
		Providers: names(v1alpha1.KindInferenceProvider), Tenants: names(v1alpha1.KindInferenceTenant), Models: models,
	}
	if len(k.Pools) == 0 {
		k.Pools[implicitPool] = true
	}
	return k
}

// once warns of the first resource that something is the matter with.
func (c *compiler) once(what string, o *object, field, msg string) {
	if !c.said[what] {
		c.said[what] = true
		o.problem(Warning, field, msg)
	}
}

// notYet says what is checked but has no effect so far.
func (c *compiler) notYet() {
	if list := c.good[v1alpha1.KindInferenceTenant]; len(list) > 0 && !c.catalog.Guarded {
		c.once(v1alpha1.KindInferenceTenant, list[0], "", "has no effect: without any GatewayBackend the gateway is open to everybody, who are nobody's tenants")
	}
}

func byName[T any](list []T, name func(T) string) {
	slices.SortFunc(list, func(a, b T) int { return strings.Compare(name(a), name(b)) })
}

func baseName(id string) string { return id[strings.LastIndex(id, "/")+1:] }

func objectID(o Object) string { return o.GetNamespace() + "/" + o.GetName() }
