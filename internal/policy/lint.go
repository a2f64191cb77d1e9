package policy

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/kinference/kinference/api/v1alpha1"
	"github.com/kinference/kinference/internal/spelling"
)

// Known is what else is in a namespace, for checking names.
type Known struct {
	// Pools, WorkerSets, Providers and Tenants by name.
	Pools, WorkerSets, Providers, Tenants map[string]bool
	// Models holds every name of every model.
	Models map[string]bool
}

// Finding is a Fault of one of several policies. It is always a warning: the
// policies work, but perhaps not as meant.
type Finding struct {
	Policy *Policy
	Fault
	// Dangling: it names something that is not there.
	Dangling bool
}

// classifierTags are the tags that the classifier can give, beside custom ones.
var classifierTags = newGlobs([]string{
	"complexity-low", "complexity-medium", "complexity-high", "complexity-unknown", "pii-*", "secret-*", "injection", "language-*", "modality-*", "length-*", "code",
})

// Lint checks what one policy of a namespace cannot know alone: names that
// nothing has, rules that no request reaches, tags that nobody gives, and
// promises that another rule breaks. The policies are all those of a namespace.
func Lint(policies []*Policy, specs map[*Policy]*v1alpha1.InferencePolicySpec, known Known) []Finding {
	l := &linter{known: known, tags: slices.Clone(classifierTags)}
	for _, p := range policies {
		l.tags = append(l.tags, newGlobs(p.tags)...)
	}
	for _, p := range policies {
		if spec := specs[p]; spec != nil {
			l.names(p, spec)
			l.emitted(p, spec)
		}
	}
	l.whens(policies)
	l.reach(policies)
	return l.out
}

type linter struct {
	known Known
	tags  []glob
	out   []Finding
}

func (l *linter) warnf(p *Policy, field, format string, args ...any) {
	l.out = append(l.out, Finding{Policy: p, Fault: Fault{Field: field, Message: fmt.Sprintf(format, args...), Warning: true}})
}

// dangling warns of a name that is not in a list.
func (l *linter) dangling(p *Policy, field, what, name string, lists ...map[string]bool) {
	if name == "" {
		return
	}
	var all []string
	for _, list := range lists {
		if list[name] {
			return
		}
		all = slices.AppendSeq(all, maps.Keys(list))
	}
	msg := fmt.Sprintf("there is no %s %q", what, abbreviate(name))
	if near := spelling.Nearest(name, all); near != "" {
		msg += fmt.Sprintf(", did you mean %q?", near)
	}
	l.out = append(l.out, Finding{Policy: p, Dangling: true, Fault: Fault{Field: field, Message: msg, Warning: true}})
}

func (l *linter) names(p *Policy, spec *v1alpha1.InferencePolicySpec) {
	k := &l.known
	for i, t := range spec.TargetRefs {
		l.dangling(p, fmt.Sprintf("spec.targetRefs[%d].name", i), "InferencePool", t.Name, k.Pools)
	}
	each := func(field, what string, list []string, known ...map[string]bool) {
		for i, n := range list {
			l.dangling(p, fmt.Sprintf("%s[%d]", field, i), what, n, known...)
		}
	}
	named := func(field, what string, n *v1alpha1.Names, known map[string]bool) {
		if n != nil {
			each(field+".names", what, n.Names, known)
		}
	}
	const backend = "InferenceWorkerSet or InferenceProvider"
	for i := range spec.Rules {
		r, f := &spec.Rules[i], fmt.Sprintf("spec.rules[%d]", i)
		for j, m := range r.Matches {
			l.matchNames(p, fmt.Sprintf("%s.matches[%d]", f, j), &m)
		}
		if r.Route == nil {
			continue
		}
		for j, c := range r.Route.Consider {
			cf := fmt.Sprintf("%s.route.consider[%d]", f, j)
			named(cf+".models", "model", c.Models, k.Models)
			named(cf+".workerSets", "InferenceWorkerSet", c.WorkerSets, k.WorkerSets)
			named(cf+".providers", "InferenceProvider", c.Providers, k.Providers)
		}
		for j := range r.Route.Exclude {
			x, xf := &r.Route.Exclude[j], fmt.Sprintf("%s.route.exclude[%d]", f, j)
			if x.If != nil {
				l.matchNames(p, xf+".if", x.If)
			}
			if b := x.Drop.Backend; b != nil {
				each(xf+".drop.backend.names", backend, b.Names, k.WorkerSets, k.Providers)
				each(xf+".drop.backend.models", "model", b.Models, k.Models)
			}
		}
		for j, s := range r.Route.Select {
			sf := fmt.Sprintf("%s.route.select[%d]", f, j)
			named(sf+".models", "model", s.Models, k.Models)
			named(sf+".workerSets", "InferenceWorkerSet", s.WorkerSets, k.WorkerSets)
			named(sf+".providers", "InferenceProvider", s.Providers, k.Providers)
			each(sf+".order", backend, s.Order, k.WorkerSets, k.Providers)
			for n, w := range s.Weights {
				l.dangling(p, fmt.Sprintf("%s.weights[%d].name", sf, n), backend, w.Name, k.WorkerSets, k.Providers)
			}
		}
	}
}

func (l *linter) matchNames(p *Policy, f string, m *v1alpha1.RequestMatch) {
	l.dangling(p, f+".model", "model", m.Model, l.known.Models)
	l.dangling(p, f+".tenant", "InferenceTenant", m.Tenant, l.known.Tenants)
	for i, t := range m.Tenants {
		l.dangling(p, fmt.Sprintf("%s.tenants[%d]", f, i), "InferenceTenant", t, l.known.Tenants)
	}
}

// emitted warns of tags that no classifier gives.
func (l *linter) emitted(p *Policy, spec *v1alpha1.InferencePolicySpec) {
	check := func(f string, list ...string) {
		for i, t := range list {
			at := f
			if !strings.HasSuffix(f, ".tag") {
				at = fmt.Sprintf("%s[%d]", f, i)
			}
			l.given(p, at, t)
		}
	}
	one := func(f string, m *v1alpha1.RequestMatch) {
		check(f+".tag", m.Tag)
		if m.Tags != nil {
			check(f+".tags.all", m.Tags.All...)
			check(f+".tags.any", m.Tags.Any...)
			check(f+".tags.none", m.Tags.None...)
		}
	}
	for i := range spec.Rules {
		for j := range spec.Rules[i].Matches {
			one(fmt.Sprintf("spec.rules[%d].matches[%d]", i, j), &spec.Rules[i].Matches[j])
		}
		if r := spec.Rules[i].Route; r != nil {
			for j := range r.Exclude {
				if r.Exclude[j].If != nil {
					one(fmt.Sprintf("spec.rules[%d].route.exclude[%d].if", i, j), r.Exclude[j].If)
				}
			}
		}
	}
}

// given warns of a tag that no classifier gives.
func (l *linter) given(p *Policy, field, tag string) {
	if tag == "" || slices.ContainsFunc(l.tags, newGlob(tag).meets) {
		return
	}
	var all []string
	for _, g := range l.tags {
		all = append(all, g.text)
	}
	msg := fmt.Sprintf("no classifier gives the tag %q", abbreviate(tag))
	if near := spelling.Nearest(tag, all); near != "" {
		msg += fmt.Sprintf(", did you mean %q?", near)
	} else {
		msg += ": define it in spec.customTags"
	}
	l.warnf(p, field, "%s", msg)
}

// placed is a rule with its place in its policy.
type placed struct {
	*rule
	p     *Policy
	index int
}

func (r placed) field() string { return fmt.Sprintf("spec.rules[%d]", r.index) }

// reach warns of rules that no request reaches, and of providers that a prompt
// reaches although another rule keeps prompts like it from providers.
func (l *linter) reach(policies []*Policy) {
	order := slices.Clone(policies)
	sortByAge(order)
	var rules []placed
	for _, p := range order {
		for i, r := range p.rules {
			rules = append(rules, placed{r, p, i})
		}
	}
	l.shadowed(rules)
	l.leaks(rules)
}

// hook is what a match that covers another one has in common with it: its model
// and one of its tenants, or empty where it names none.
type hook struct{ model, tenant string }

// maxCompared bounds with how many earlier rules of one hook a rule is compared,
// so that a namespace of very many rules costs seconds and not minutes.
const maxCompared = 256

// shadowed warns of rules that no request reaches.
func (l *linter) shadowed(rules []placed) {
	before := map[hook][]int{}
	for i, later := range rules {
		if at := firstShadow(rules, before, later); at >= 0 {
			earlier := rules[at]
			name := fmt.Sprintf("rule %q", earlier.name)
			if earlier.p != later.p {
				name += " of InferencePolicy " + earlier.p.Name
			}
			what := "matches every request"
			if len(earlier.matches) > 0 {
				what = "matches all of its requests"
			}
			l.warnf(later.p, later.field(), "no request reaches rule %q: %s, which comes first, %s", later.name, name, what)
		}
		if later.route != nil && later.route.onEmpty == v1alpha1.OnEmptyContinue {
			continue // others get what it leaves
		}
		for h := range later.hooks() {
			before[h] = append(before[h], i)
		}
	}
}

// firstShadow is the first earlier rule that leaves no request to a later one; -1
// for none.
func firstShadow(rules []placed, before map[hook][]int, later placed) int {
	var first match // a rule that covers all of them covers this one
	if len(later.matches) > 0 {
		first = later.matches[0]
	}
	tenants := []string{""}
	if len(first.tenants) > 0 {
		tenants = append(tenants, first.tenants[0])
	}
	models := []string{""}
	if first.model != "" {
		models = append(models, first.model)
	}
	found := -1
	for _, model := range models {
		for _, tenant := range tenants {
			list := before[hook{model, tenant}]
			for _, i := range list[:min(len(list), maxCompared)] {
				if found >= 0 && i > found {
					break
				}
				if e := rules[i]; (!e.p.DryRun || later.p.DryRun) && covers(e.p.Targets, later.p.Targets) && e.shadows(later.rule) {
					found = i
					break
				}
			}
		}
	}
	return found
}

// hooks are those of all of its matches.
func (r *rule) hooks() map[hook]bool {
	out := map[hook]bool{}
	if len(r.matches) == 0 {
		out[hook{}] = true
	}
	for i := range r.matches {
		m := &r.matches[i]
		if len(m.tenants) == 0 {
			out[hook{model: m.model}] = true
		}
		for _, t := range m.tenants {
			out[hook{m.model, t}] = true
		}
	}
	return out
}

// leaks warns of providers that a prompt reaches although another rule keeps
// prompts like it from providers: of each rule and tag once.
func (l *linter) leaks(rules []placed) {
	type promise struct {
		placed
		tag glob
	}
	// Of rules that promise the same for the same pools the first one is named.
	var promises []promise
	seen := map[string]bool{}
	for _, strict := range rules {
		for _, x := range strict.keptFromProviders() {
			if key := x.String() + " " + strings.Join(strict.p.Targets, " "); !seen[key] {
				seen[key] = true
				promises = append(promises, promise{strict, x})
			}
		}
	}
	for _, r := range rules {
		if r.route == nil || r.p.DryRun || !r.mayGoToProvider() {
			continue
		}
		said := map[glob]bool{}
		for _, strict := range promises {
			if said[strict.tag] || len(r.p.Targets) > 0 && len(strict.p.Targets) > 0 && !meet(r.p.Targets, strict.p.Targets) || r.keeps(strict.tag) {
				continue
			}
			said[strict.tag] = true
			l.warnf(r.p, r.field()+".route", "a prompt tagged %q can reach a provider by rule %q, while rule %q of InferencePolicy %s keeps such prompts local: exclude providers here too",
				strict.tag.String(), r.name, strict.name, strict.p.Name)
		}
	}
}

// covers reports whether a policy for pools a is for all of pools b.
func covers(a, b []string) bool {
	if len(a) == 0 {
		return true
	}
	return len(b) > 0 && !slices.ContainsFunc(b, func(n string) bool { return !slices.Contains(a, n) })
}

func meet(a, b []string) bool {
	return slices.ContainsFunc(a, func(n string) bool { return slices.Contains(b, n) })
}

// shadows reports whether every request that a later rule matches is matched
// by r already.
func (r *rule) shadows(later *rule) bool {
	if len(r.matches) == 0 {
		return true
	}
	if len(later.matches) == 0 {
		return slices.ContainsFunc(r.matches, func(m match) bool { return m.covers(&match{more: -1}) })
	}
	for i := range later.matches {
		if !slices.ContainsFunc(r.matches, func(m match) bool { return m.covers(&later.matches[i]) }) {
			return false
		}
	}
	return true
}

// covers reports whether m matches every request that o matches, as far as can
// be told from their fields.
func (m *match) covers(o *match) bool {
	one := func(a, b string) bool { return a == "" || a == b }
	some := slices.ContainsFunc[[]glob]
	if m.when != nil || !one(m.model, o.model) || !one(m.endpoint, o.endpoint) || !one(string(m.qos), string(o.qos)) ||
		m.more > o.more || m.less > 0 && (o.less == 0 || o.less > m.less) {
		return false
	}
	if len(m.tenants) > 0 && (len(o.tenants) == 0 || slices.ContainsFunc(o.tenants, func(t string) bool { return !slices.Contains(m.tenants, t) })) {
		return false
	}
	for _, g := range m.all {
		if !some(o.all, g.covers) {
			return false
		}
	}
	if len(m.any) > 0 {
		byAll := some(o.all, func(b glob) bool { return some(m.any, func(a glob) bool { return a.covers(b) }) })
		byAny := len(o.any) > 0 && !some(o.any, func(b glob) bool { return !some(m.any, func(a glob) bool { return a.covers(b) }) })
		if !byAll && !byAny {
			return false
		}
	}
	for _, g := range m.none {
		if !some(o.none, func(b glob) bool { return b.covers(g) }) {
			return false
		}
	}
	for _, h := range m.headers {
		if !slices.Contains(o.headers, h) {
			return false
		}
	}
	for _, c := range m.claims {
		if !slices.Contains(o.claims, c) {
			return false
		}
	}
	return true
}

// String is the tag as it is written.
func (g glob) String() string {
	if g.prefix {
		return g.text + "*"
	}
	return g.text
}

// risky are the tags of prompts that must not leave the house.
var risky = newGlobs([]string{"pii-*", "secret-*"})

// keptFromProviders are the risk tags of prompts that the rule keeps from all
// providers.
func (r *rule) keptFromProviders() []glob {
	if r.route == nil {
		return nil
	}
	var out []glob
	for i := range r.route.exclude {
		x := &r.route.exclude[i]
		if x.onlyIf == nil || x.filter.kind != v1alpha1.BackendProvider || len(x.filter.models)+len(x.filter.names)+len(x.filter.labels) > 0 || x.ttft > 0 {
			continue
		}
		for _, g := range append(slices.Clone(x.onlyIf.all), x.onlyIf.any...) {
			if slices.ContainsFunc(risky, g.meets) {
				out = append(out, g)
			}
		}
	}
	return out
}

// mayGoToProvider reports whether a stage of the rule takes providers.
func (r *rule) mayGoToProvider() bool {
	if r.route.consider != nil && !slices.ContainsFunc(r.route.consider, func(f filter) bool { return f.kind != v1alpha1.BackendLocal && f.sets == nil }) {
		return false
	}
	for i := range r.route.exclude { // no provider at all?
		if x := &r.route.exclude[i]; x.onlyIf == nil && x.filter.kind == v1alpha1.BackendProvider &&
			len(x.filter.models)+len(x.filter.names)+len(x.filter.labels) == 0 && x.ttft == 0 {
			return false
		}
	}
	return slices.ContainsFunc(r.route.stages, func(s stage) bool {
		return s.filter.kind == v1alpha1.BackendProvider || s.filter.provider != nil
	})
}

// keeps reports whether the rule keeps prompts with a tag from providers, or
// does not match them.
func (r *rule) keeps(tag glob) bool {
	if len(r.matches) > 0 && !slices.ContainsFunc(r.matches, func(m match) bool {
		return !slices.ContainsFunc(m.none, func(g glob) bool { return g.covers(tag) })
	}) {
		return true
	}
	return slices.ContainsFunc(r.keptFromProviders(), func(g glob) bool { return g.covers(tag) })
}
