package policy

import (
	"fmt"
	"math"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/kinference/kinference/api/v1alpha1"
)

// Bounds and defaults of the fields of an InferencePolicy.
const (
	// DefaultWindow is the window of a mean where a threshold names none.
	DefaultWindow = 30 * time.Second
	// MinWindow is the shortest window of a threshold.
	MinWindow = time.Second
	// MaxWindow is the longest.
	MaxWindow = 10 * time.Minute

	// defaultUntil is the share of a threshold at which it ends. By the mean of 30 s
	// alone, requests at a worker near its limit change sides up to 278 times an
	// hour, with this 169 times (TestHysteresis of the router's evaluate).
	defaultUntil = 0.8
	defaultQueue = 20 * time.Second
	maxQueue     = 10 * time.Minute
	maxRules     = 128
	maxEntries   = 32
	maxStages    = 16
	maxNames     = 64
)

// Fault is something wrong with a policy.
type Fault struct {
	// Field is its path, as in spec.rules[0].route.select[1].order.
	Field string
	// Message says what is wrong and what to write instead.
	Message string
	// Warning: the policy works, but perhaps not as meant.
	Warning bool
}

// Policy is a compiled InferencePolicy. Make it with Compile.
type Policy struct {
	// Namespace and Name of the resource.
	Namespace, Name string
	// Created is when the resource was made; zero for files.
	Created time.Time
	// DryRun policies are evaluated aside and change nothing.
	DryRun bool
	// Targets are names of pools; empty: every pool of the namespace.
	Targets []string

	id     string
	assume assumption
	risk   []string // custom tags that count as present while unknown
	tags   []string // all custom tags
	custom []v1alpha1.CustomTag
	whens  []tagReads // expressions of custom tags
	rules  []*rule
	limits [][]match // of each limit; ORed, none: every request
}

// ID is namespace/name.
func (p *Policy) ID() string { return p.id }

// Rules are the names of its rules, in order.
func (p *Policy) Rules() []string {
	out := make([]string, len(p.rules))
	for i, r := range p.rules {
		out[i] = r.name
	}
	return out
}

// Rejects reports whether the rule by that name refuses requests.
func (p *Policy) Rejects(rule string) bool {
	for _, r := range p.rules {
		if r.name == rule {
			return r.reject != nil
		}
	}
	return false
}

// rule is a compiled PolicyRule.
type rule struct {
	policy  *Policy
	name    string
	matches []match // ORed; nil: every request
	reject  *v1alpha1.RejectAction
	route   *route
}

// route is a compiled RouteAction.
type route struct {
	objective v1alpha1.RouteObjective
	consider  []filter // ORed; nil: what serves the requested model
	exclude   []exclude
	stages    []stage // at least one
	retry     *v1alpha1.Retry
	onEmpty   v1alpha1.OnEmpty
	queue     time.Duration
}

// filter selects endpoints by what they are; its fields are ANDed.
type filter struct {
	kind                   v1alpha1.BackendType
	models, sets, provider []string
	names                  []string // of sets and providers
	labels                 map[string]v1alpha1.LabelValue
}

// exclude is a compiled Exclude.
type exclude struct {
	name   string
	onlyIf *match // nil: every request
	filter filter
	limits []Threshold
	ttft   time.Duration // 0: no threshold
}

// Threshold is one on the mean of a metric over a window. What was above Above
// counts as above it until the mean is Until or less.
type Threshold struct {
	Metric       Metric
	Window       time.Duration
	Above, Until float64
}

// stage is a compiled SelectStage.
type stage struct {
	filter   filter
	minimize v1alpha1.Criterion
	order    []string
	weights  []v1alpha1.Weight
	total    int64 // of the weights
}

// standard is what happens where no rule matches.
var standard = &route{objective: v1alpha1.ObjectiveBalanced, stages: []stage{{minimize: v1alpha1.MinimizePredictedTTFT}}, onEmpty: v1alpha1.OnEmptyReject}

// Compile checks a policy and makes it ready for evaluation. The result is nil
// if one of the faults is no warning. Every check is made offline, at admission
// and at load alike; what needs other resources is Lint's.
func Compile(p *v1alpha1.InferencePolicy) (*Policy, []Fault) {
	c := &compiler{}
	out := &Policy{id: p.Namespace + "/" + p.Name, Namespace: p.Namespace, Name: p.Name, Created: p.CreationTimestamp.Time, DryRun: p.Spec.DryRun}
	c.assumptions(out, &p.Spec)
	for i, t := range p.Spec.TargetRefs {
		f := fmt.Sprintf("spec.targetRefs[%d]", i)
		switch {
		case t.Kind != v1alpha1.KindInferencePool || t.Group != "" && t.Group != v1alpha1.Group:
			c.errorf(f+".kind", "want InferencePool: policies apply to pools of this group")
		case t.Name == "":
			c.errorf(f+".name", "is required: the name of an InferencePool of this namespace")
		case slices.Contains(out.Targets, t.Name):
			c.errorf(f+".name", "%q is named twice", t.Name)
		default:
			out.Targets = append(out.Targets, t.Name)
		}
	}
	for i := range p.Spec.Limits {
		var matches []match
		for j := range p.Spec.Limits[i].Matches {
			matches = append(matches, c.match(fmt.Sprintf("spec.limits[%d].matches[%d]", i, j), &p.Spec.Limits[i].Matches[j]))
		}
		out.limits = append(out.limits, matches)
	}
	c.atMost("spec.rules", len(p.Spec.Rules), maxRules)
	names := map[string]bool{}
	for i := range p.Spec.Rules {
		f := fmt.Sprintf("spec.rules[%d]", i)
		c.name(f+".name", p.Spec.Rules[i].Name, names)
		out.rules = append(out.rules, c.rule(f, out, &p.Spec.Rules[i]))
	}
	if slices.ContainsFunc(c.faults, func(f Fault) bool { return !f.Warning }) {
		return nil, c.faults
	}
	return out, c.faults
}

type compiler struct {
	faults []Fault
	whens  []tagReads
}

func (c *compiler) errorf(field, format string, args ...any) {
	c.faults = append(c.faults, Fault{Field: field, Message: fmt.Sprintf(format, args...)})
}

func (c *compiler) atMost(field string, n, most int) {
	if n > most {
		c.errorf(field, "has %d entries, at most %d are allowed", n, most)
	}
}

var label = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$`)

func (c *compiler) name(field, name string, seen map[string]bool) {
	switch {
	case name == "":
		c.errorf(field, "is required: decisions are explained by it")
	case !label.MatchString(name):
		c.errorf(field, "%q must be lower-case letters, digits and dashes, at most 63", abbreviate(name))
	case seen[name]:
		c.errorf(field, "%q is used already: names are unique", name)
	}
	seen[name] = true
}

// abbreviate keeps a message short whatever was written.
func abbreviate(s string) string {
	if len(s) > 64 {
		return s[:64] + "…"
	}
	return s
}

// oneOf checks an enumeration; empty is allowed.
func oneOf[T ~string](c *compiler, field string, v T, allowed ...T) {
	if v == "" || slices.Contains(allowed, v) {
		return
	}
	words := make([]string, len(allowed))
	for i, a := range allowed {
		words[i] = string(a)
	}
	c.errorf(field, "unknown %q, want %s", abbreviate(string(v)), strings.Join(words, ", "))
}

func (c *compiler) duration(field string, d v1alpha1.Duration, def, least, most time.Duration) time.Duration {
	if d == "" {
		return def
	}
	v, err := d.Parse()
	switch {
	case err != nil:
		c.errorf(field, "%v", err)
	case v < least || v > most:
		c.errorf(field, "%s is out of range, want %v to %v", d, least, most)
	}
	return v
}

var tagForm = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]{0,62}[a-z0-9])?$`)

func (c *compiler) tags(field string, list []string) []glob {
	c.atMost(field, len(list), maxNames)
	for i, t := range list {
		f := field
		if i > 0 || !strings.HasSuffix(field, ".tag") {
			f = fmt.Sprintf("%s[%d]", field, i)
		}
		body, star := strings.CutSuffix(t, "*")
		if star {
			body = strings.TrimSuffix(body, "-")
		}
		if !(star && body == "") && !tagForm.MatchString(body) {
			c.errorf(f, "%q is no tag: lower-case letters, digits and dashes, with an optional * at the end", abbreviate(t))
		}
	}
	return newGlobs(list)
}

func (c *compiler) assumptions(out *Policy, spec *v1alpha1.InferencePolicySpec) {
	present, absent := assumedPresent, assumedAbsent
	if o := spec.OnUnclassified; o != nil {
		if o.AssumePresent != nil {
			present = o.AssumePresent
		}
		if o.AssumeAbsent != nil {
			absent = o.AssumeAbsent
		}
	}
	out.assume = assumption{c.tags("spec.onUnclassified.assumePresent", present), c.tags("spec.onUnclassified.assumeAbsent", absent)}
	c.atMost("spec.customTags", len(spec.CustomTags), maxNames)
	seen := map[string]bool{}
	out.custom = spec.CustomTags
	for i := range spec.CustomTags {
		t := &spec.CustomTags[i]
		f := fmt.Sprintf("spec.customTags[%d]", i)
		c.name(f+".name", t.Name, seen)
		c.detectors(f, t)
		out.whens = c.whens
		out.tags = append(out.tags, t.Name)
		// An author who lists the tag as absent has thought about it.
		if t.Risk && !slices.ContainsFunc(out.assume.absent, func(g glob) bool { return g.matches(t.Name) }) {
			out.risk = append(out.risk, t.Name)
		}
	}
}

func (c *compiler) rule(f string, p *Policy, r *v1alpha1.PolicyRule) *rule {
	out := &rule{policy: p, name: r.Name}
	c.atMost(f+".matches", len(r.Matches), maxEntries)
	for i := range r.Matches {
		out.matches = append(out.matches, c.match(fmt.Sprintf("%s.matches[%d]", f, i), &r.Matches[i]))
	}
	switch {
	case (r.Route == nil) == (r.Reject == nil):
		c.errorf(f, "give exactly one of route and reject")
	case r.Reject != nil:
		out.reject = r.Reject
		if !regexp.MustCompile(`^[A-Z][A-Za-z0-9]{0,63}$`).MatchString(r.Reject.Reason) {
			c.errorf(f+".reject.reason", "want one word in PascalCase, such as PromptTooLong")
		}
		if len(r.Reject.Message) > 1024 {
			c.errorf(f+".reject.message", "is longer than 1024 bytes")
		}
	default:
		out.route = c.route(f+".route", r.Route)
	}
	return out
}

func (c *compiler) match(f string, m *v1alpha1.RequestMatch) match {
	out := match{model: m.Model, endpoint: string(m.Endpoint), qos: m.QoS, more: -1}
	oneOf(c, f+".qos", m.QoS, v1alpha1.QoSInteractive, v1alpha1.QoSBatch, v1alpha1.QoSDeferrable)
	oneOf(c, f+".endpoint", m.Endpoint, v1alpha1.EndpointChatCompletions, v1alpha1.EndpointCompletions, v1alpha1.EndpointResponses,
		v1alpha1.EndpointMessages, v1alpha1.EndpointEmbeddings)
	switch {
	case m.Tenant != "" && m.Tenants != nil:
		c.errorf(f+".tenants", "give tenant or tenants, not both")
	case m.Tenant != "":
		out.tenants = []string{m.Tenant}
	case m.Tenants != nil && len(m.Tenants) == 0:
		c.errorf(f+".tenants", "an empty list matches nobody: leave it out or name a tenant")
	default:
		out.tenants = m.Tenants
	}
	switch {
	case m.Tag != "" && m.Tags != nil:
		c.errorf(f+".tags", "give tag or tags, not both")
	case m.Tag != "":
		out.all = c.tags(f+".tag", []string{m.Tag})
	case m.Tags != nil:
		if len(m.Tags.All)+len(m.Tags.Any)+len(m.Tags.None) == 0 {
			c.errorf(f+".tags", "is empty: give all, any or none")
		}
		out.all, out.any, out.none = c.tags(f+".tags.all", m.Tags.All), c.tags(f+".tags.any", m.Tags.Any), c.tags(f+".tags.none", m.Tags.None)
	}
	if r := m.PromptTokens; r != nil {
		if r.GreaterThan == nil && r.LessThan == nil {
			c.errorf(f+".promptTokens", "give greaterThan, lessThan or both")
		}
		if r.GreaterThan != nil {
			if out.more = *r.GreaterThan; out.more < 0 {
				c.errorf(f+".promptTokens.greaterThan", "must not be negative")
			}
		}
		if r.LessThan != nil {
			if out.less = *r.LessThan; out.less < 1 || out.less-1 <= out.more {
				c.errorf(f+".promptTokens.lessThan", "no number is above %d and below %d", out.more, out.less)
			}
		}
	}
	c.headers(f, m, &out)
	if m.When != "" {
		e, err := newExpression(m.When)
		if err != nil {
			c.errorf(f+".when", "%v", err)
		}
		out.when = e
	}
	return out
}

func (c *compiler) headers(f string, m *v1alpha1.RequestMatch, out *match) {
	c.atMost(f+".headers", len(m.Headers), maxStages)
	for i, h := range m.Headers {
		name := strings.ToLower(h.Name)
		if !regexp.MustCompile("^[a-z0-9!#$%&'*+.^_`|~-]+$").MatchString(name) {
			c.errorf(fmt.Sprintf("%s.headers[%d].name", f, i), "%q is no header name", abbreviate(h.Name))
		}
		if slices.Contains([]string{"authorization", "cookie", "x-api-key", "proxy-authorization"}, name) {
			c.errorf(fmt.Sprintf("%s.headers[%d].name", f, i), "policies do not see credentials: match tenant or claims")
		}
		out.headers = append(out.headers, v1alpha1.HeaderMatch{Name: name, Value: h.Value})
	}
	c.atMost(f+".claims", len(m.Claims), maxStages)
	for i, cl := range m.Claims {
		if cl.Name == "" {
			c.errorf(fmt.Sprintf("%s.claims[%d].name", f, i), "is required")
		}
	}
	out.claims = m.Claims
}

func (c *compiler) names(field string, n *v1alpha1.Names) []string {
	if n == nil {
		return nil
	}
	if len(n.Names) == 0 {
		c.errorf(field+".names", "is empty: name at least one")
	}
	c.list(field+".names", n.Names)
	return n.Names
}

// list checks a list of names.
func (c *compiler) list(field string, names []string) {
	c.atMost(field, len(names), maxNames)
	for i, n := range names {
		if n == "" {
			c.errorf(fmt.Sprintf("%s[%d]", field, i), "is empty")
		} else if slices.Contains(names[:i], n) {
			c.errorf(fmt.Sprintf("%s[%d]", field, i), "%q is named twice", abbreviate(n))
		}
	}
}

func (c *compiler) route(f string, r *v1alpha1.RouteAction) *route {
	out := &route{objective: standard.objective, onEmpty: v1alpha1.OnEmptyReject, retry: r.Retry}
	oneOf(c, f+".objective", r.Objective, v1alpha1.ObjectiveTTFT, v1alpha1.ObjectiveBalanced, v1alpha1.ObjectiveThroughput)
	oneOf(c, f+".onEmpty", r.OnEmpty, v1alpha1.OnEmptyReject, v1alpha1.OnEmptyContinue, v1alpha1.OnEmptyQueue)
	if r.Objective != "" {
		out.objective = r.Objective
	}
	if r.OnEmpty != "" {
		out.onEmpty = r.OnEmpty
	}
	c.atMost(f+".consider", len(r.Consider), maxEntries)
	for i, x := range r.Consider {
		cf := fmt.Sprintf("%s.consider[%d]", f, i)
		if x.Type == "" && x.Models == nil && x.WorkerSets == nil && x.Providers == nil {
			c.errorf(cf, "say what to consider: type, models, workerSets or providers")
		}
		out.consider = append(out.consider, c.filter(cf, x.Type, x.Models, x.WorkerSets, x.Providers))
	}
	c.atMost(f+".exclude", len(r.Exclude), maxEntries)
	seen := map[string]bool{}
	for i := range r.Exclude {
		xf := fmt.Sprintf("%s.exclude[%d]", f, i)
		c.name(xf+".name", r.Exclude[i].Name, seen)
		out.exclude = append(out.exclude, c.exclude(xf, &r.Exclude[i]))
	}
	c.atMost(f+".select", len(r.Select), maxStages)
	for i := range r.Select {
		out.stages = append(out.stages, c.stage(fmt.Sprintf("%s.select[%d]", f, i), &r.Select[i]))
	}
	if len(r.Select) == 0 {
		out.stages = standard.stages
	}
	if r.Queue != nil && out.onEmpty != v1alpha1.OnEmptyQueue {
		c.errorf(f+".queue", "needs onEmpty: Queue")
	}
	if out.onEmpty == v1alpha1.OnEmptyQueue {
		out.queue = defaultQueue
		if r.Queue != nil {
			out.queue = c.duration(f+".queue.timeout", r.Queue.Timeout, defaultQueue, time.Millisecond, maxQueue)
		}
	}
	if r.Retry != nil {
		if r.Retry.Attempts < 1 || r.Retry.Attempts > 8 {
			c.errorf(f+".retry.attempts", "want 1 to 8, the first one counts")
		}
		for i, on := range r.Retry.RetryOn {
			oneOf(c, fmt.Sprintf("%s.retry.retryOn[%d]", f, i), on, v1alpha1.RetryConnectFailure, v1alpha1.Retry5xx, v1alpha1.RetryOverloaded, v1alpha1.RetryTimeout)
		}
		if h := r.Retry.Hedge; h != nil {
			c.hedge(f+".retry", r.Retry.Attempts, h)
		}
	}
	return out
}

// hedge checks when a second endpoint is asked.
func (c *compiler) hedge(f string, attempts int32, h *v1alpha1.Hedge) {
	if h.After == "" {
		c.errorf(f+".hedge.after", "is required")
	} else {
		c.duration(f+".hedge.after", h.After, 0, 10*time.Millisecond, time.Minute)
	}
	if h.Percentile != 0 && (h.Percentile < 50 || h.Percentile > 99) {
		c.errorf(f+".hedge.percentile", "want 50 to 99")
	}
	if attempts == 1 {
		c.errorf(f+".hedge", "needs attempts: 2 or more")
	}
}

func (c *compiler) filter(f string, kind v1alpha1.BackendType, models, sets, providers *v1alpha1.Names) filter {
	oneOf(c, f+".type", kind, v1alpha1.BackendLocal, v1alpha1.BackendProvider)
	switch {
	case sets != nil && providers != nil:
		c.errorf(f, "no endpoint is of a worker set and of a provider: make two entries")
	case sets != nil && kind == v1alpha1.BackendProvider:
		c.errorf(f+".workerSets", "worker sets are of type Local")
	case providers != nil && kind == v1alpha1.BackendLocal:
		c.errorf(f+".providers", "providers are of type Provider")
	}
	return filter{kind: kind, models: c.names(f+".models", models), sets: c.names(f+".workerSets", sets), provider: c.names(f+".providers", providers)}
}

func (c *compiler) exclude(f string, x *v1alpha1.Exclude) exclude {
	out := exclude{name: x.Name}
	if x.If != nil {
		m := c.match(f+".if", x.If)
		out.onlyIf = &m
	}
	d, df := &x.Drop, f+".drop"
	if d.Backend == nil && d.QueuedPrompts == nil && d.RunningPrompts == nil && d.KVCacheUsage == nil && d.PredictedTTFT == nil {
		c.errorf(df, "say what to drop: backend, queuedPrompts, runningPrompts, kvCacheUsage or predictedTTFT")
	}
	if b := d.Backend; b != nil {
		bf := df + ".backend"
		oneOf(c, bf+".type", b.Type, v1alpha1.BackendLocal, v1alpha1.BackendProvider)
		if b.Type == "" && len(b.Names) == 0 && len(b.Models) == 0 && len(b.Labels) == 0 {
			c.errorf(bf, "is empty: give type, names, models or labels")
		}
		c.list(bf+".names", b.Names)
		c.list(bf+".models", b.Models)
		out.filter = filter{kind: b.Type, names: b.Names, models: b.Models, labels: b.Labels}
	}
	c.limit(df+".queuedPrompts", d.QueuedPrompts, QueuedPrompts, &out)
	c.limit(df+".runningPrompts", d.RunningPrompts, RunningPrompts, &out)
	c.limit(df+".kvCacheUsage", d.KVCacheUsage, KVCacheUsage, &out)
	if t := d.PredictedTTFT; t != nil {
		out.ttft = c.duration(df+".predictedTTFT.greaterThan", t.GreaterThan, 0, time.Millisecond, time.Hour)
		if t.GreaterThan == "" {
			c.errorf(df+".predictedTTFT.greaterThan", "is required: a duration such as 5s")
		}
	}
	if out.filter.kind == v1alpha1.BackendProvider && len(out.limits) > 0 {
		c.errorf(df, "providers show no load: thresholds on it are for type Local")
	}
	return out
}

func (c *compiler) limit(f string, t *v1alpha1.Threshold, m Metric, out *exclude) {
	if t == nil {
		return
	}
	switch v := t.GreaterThan; {
	case math.IsNaN(v) || v < 0:
		c.errorf(f+".greaterThan", "must be a number, 0 or more")
	case m == KVCacheUsage && v >= 1:
		c.errorf(f+".greaterThan", "%v is never exceeded: usage is a share from 0 to 1", v)
	}
	until := t.GreaterThan * defaultUntil
	if t.Until != nil {
		if until = *t.Until; math.IsNaN(until) || until < 0 || until > t.GreaterThan {
			c.errorf(f+".until", "must be a number from 0 to greaterThan, which is %v", t.GreaterThan)
		}
	}
	out.limits = append(out.limits, Threshold{m, c.duration(f+".window", t.Window, DefaultWindow, MinWindow, MaxWindow), t.GreaterThan, until})
}

func (c *compiler) stage(f string, s *v1alpha1.SelectStage) stage {
	out := stage{filter: c.filter(f, s.Type, s.Models, s.WorkerSets, s.Providers), minimize: s.Minimize, order: s.Order, weights: s.Weights}
	oneOf(c, f+".minimize", s.Minimize, v1alpha1.MinimizePredictedTTFT, v1alpha1.MinimizePredictedE2E, v1alpha1.MinimizeQueuedPrompts,
		v1alpha1.MinimizeKVCacheUsage, v1alpha1.MinimizeCost)
	ways := 0
	for _, given := range []bool{s.Minimize != "", s.Order != nil, s.Weights != nil} {
		if given {
			ways++
		}
	}
	if ways > 1 {
		c.errorf(f, "give at most one of minimize, order and weights")
	}
	if s.Order != nil && len(s.Order) == 0 {
		c.errorf(f+".order", "is empty: name at least one")
	}
	c.list(f+".order", s.Order)
	if out.minimize == "" {
		out.minimize = v1alpha1.MinimizePredictedTTFT
	}
	c.atMost(f+".weights", len(s.Weights), maxNames)
	seen := map[string]bool{}
	for i, w := range s.Weights {
		wf := fmt.Sprintf("%s.weights[%d]", f, i)
		switch {
		case w.Name == "":
			c.errorf(wf+".name", "is required: a worker set or provider")
		case seen[w.Name]:
			c.errorf(wf+".name", "%q is named twice", abbreviate(w.Name))
		case w.Weight < 0 || w.Weight > 1_000_000:
			c.errorf(wf+".weight", "want 0 to 1000000")
		}
		seen[w.Name] = true
		out.total += int64(max(0, w.Weight))
	}
	if s.Weights != nil && out.total == 0 {
		c.errorf(f+".weights", "add up to 0: nothing would be chosen")
	}
	return out
}

// CustomTags are the policy's own tags, for whoever runs the classifier.
func (p *Policy) CustomTags() []v1alpha1.CustomTag { return p.custom }
