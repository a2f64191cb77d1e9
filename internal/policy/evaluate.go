package policy

import (
	"cmp"
	"iter"
	"slices"
	"strings"
	"time"

	"github.com/kinference/kinference/api/v1alpha1"
)

// Metric is a load of a worker that thresholds look at.
type Metric uint8

// The metrics.
const (
	QueuedPrompts  Metric = iota // requests that wait for the worker, in its engine or in line
	RunningPrompts               // requests that run
	KVCacheUsage                 // share of KV-cache blocks in use
)

// String is the metric as the field of a threshold is called.
func (m Metric) String() string {
	return [...]string{"queuedPrompts", "runningPrompts", "kvCacheUsage"}[m]
}

// Load tells what a worker's load was.
type Load interface {
	// Mean is the mean over the last window; false when there is no fresh
	// sample.
	Mean(m Metric, window time.Duration) (float64, bool)
}

// Memory is a Load that knows what was before. For one that is not, a threshold
// ends where it begins.
type Memory interface {
	// Held tells whether the mean was above the threshold and has not come down
	// to where that ends since.
	Held(t Threshold) bool
}

// Backend is what the endpoints of one profile or provider have in common.
type Backend struct {
	Type v1alpha1.BackendType
	// Name of the worker set or provider, without namespace.
	Name string
	// Models holds every name that it serves one model under.
	Models []string
	// Labels of the worker set or provider.
	Labels map[string]string
}

func (b *Backend) serves(model string) bool { return slices.Contains(b.Models, model) }

// Endpoint is something a request can be sent to: a worker under one profile,
// or a provider.
type Endpoint struct {
	*Backend
	// ID of the worker or provider.
	ID string
	// Labels of the worker itself, beside those of its backend.
	Labels map[string]string
	// Unfit says why it cannot take the request whatever the rules say: not
	// ready, too short a context, failed the request already. Empty: it can.
	Unfit string
	// TTFT and E2E are predictions for this request, Cost its expected price.
	TTFT, E2E time.Duration
	Cost      float64
	// Load is nil for providers and for workers that were never sampled.
	Load Load
}

// Fleet is what Evaluate knows of the endpoints of a pool.
type Fleet struct {
	Endpoints []Endpoint
	// Rank sorts indices into Endpoints, best first. Nil: by the endpoints'
	// own numbers, ties in the order given. It is called for PredictedTTFT
	// only: a scheduler knows better what to do with equals.
	Rank func(order []int)
}

// Action is what is to be done with a request.
type Action uint8

// The actions.
const (
	// Route sends it to the first endpoint of the order.
	Route Action = iota
	// Reject refuses it by a rule.
	Reject
	// Saturated refuses it for now: endpoints exist but are too busy.
	Saturated
	// Unavailable refuses it for lack of an endpoint that is ready and allowed.
	Unavailable
	// Queue lets it wait.
	Queue
)

// String is the action in one word.
func (a Action) String() string {
	return [...]string{"route", "reject", "saturated", "unavailable", "queue"}[a]
}

// Cause says why an endpoint was not chosen.
type Cause uint8

// The causes.
const (
	Kept          Cause = iota // it is in the order
	Unfit                      // Endpoint.Unfit says why
	NotConsidered              // the rule does not consider it
	Excluded                   // by what it is
	TooBusy                    // excluded by its load
	NotSelected                // it is in no stage
)

// Verdict on an endpoint.
type Verdict struct {
	Cause Cause
	// Exclude is the name of the exclude that dropped it.
	Exclude string
}

// Decision is the outcome of Evaluate.
type Decision struct {
	Action Action
	// Policy and Rule that decided; empty when no rule matched.
	Policy, Rule string
	// Order holds indices into the endpoints, best first: those of the stage
	// that decides, then those of the later ones. Empty unless Action is Route.
	Order []int
	// Stage is the number of the stage that decided.
	Stage int
	// Verdicts on all endpoints, by the rule that decided.
	Verdicts []Verdict
	// Emptied names rules, as policy/rule, that had no endpoint left and let
	// the next one go on.
	Emptied []string
	// Rejection is the rule's reason and message; nil unless Action is Reject.
	Rejection *v1alpha1.RejectAction
	// Wait bounds the queue.
	Wait      time.Duration
	Objective v1alpha1.RouteObjective
	Retry     *v1alpha1.Retry
	// Shadow is what would have been decided if the policies on dry run were in
	// force; nil if there are none.
	Shadow *Decision
}

// Set is the policies of a pool. Make it with NewSet.
type Set struct {
	live   []*rule
	shadow []*rule // with those on dry run; nil if there are none
}

// NewSet gathers the policies of a namespace that apply to a pool: oldest
// first, then by name.
func NewSet(pool string, policies []*Policy) *Set {
	var apply []*Policy
	for _, p := range policies {
		if len(p.Targets) == 0 || slices.Contains(p.Targets, pool) {
			apply = append(apply, p)
		}
	}
	sortByAge(apply)
	// A tag that one policy calls a risk is one for all of them.
	var risk []glob
	for _, p := range apply {
		risk = append(risk, newGlobs(p.risk)...)
	}
	s, dry := &Set{}, false
	for _, p := range apply {
		q := *p
		q.assume.present = append(slices.Clip(q.assume.present), risk...)
		for _, r := range p.rules {
			r := *r
			r.policy = &q
			s.shadow = append(s.shadow, &r)
			if !p.DryRun {
				s.live = append(s.live, &r)
			}
		}
		dry = dry || p.DryRun
	}
	if !dry {
		s.shadow = nil
	}
	return s
}

// sortByAge puts the oldest first, those of one age by name.
func sortByAge(policies []*Policy) {
	slices.SortStableFunc(policies, func(a, b *Policy) int {
		return cmp.Or(a.Created.Compare(b.Created), strings.Compare(a.Namespace, b.Namespace), strings.Compare(a.Name, b.Name))
	})
}

// Empty reports whether there is no rule.
func (s *Set) Empty() bool { return len(s.live) == 0 && len(s.shadow) == 0 }

// all are the rules in force and on dry run.
func (s *Set) all() []*rule {
	if s.shadow != nil {
		return s.shadow
	}
	return s.live
}

// Models are the names of models that a request for one may end up at beside
// that model, by any rule that could match it.
func (s *Set) Models(model string) []string {
	var out []string
	for _, r := range s.all() {
		if r.route == nil || !r.couldMatch(model) {
			continue
		}
		for i := range r.route.consider {
			for _, m := range r.route.consider[i].models {
				if m != model && !slices.Contains(out, m) {
					out = append(out, m)
				}
			}
		}
	}
	return out
}

// ReadsTags reports whether a rule that could match a request for the model
// looks at tags, so that the prompt must be classified.
func (s *Set) ReadsTags(model string) bool { return s.reads(model, (*match).readsTags) }

// ReadsHeaders reports the same of headers.
func (s *Set) ReadsHeaders(model string) bool { return s.reads(model, (*match).readsHeaders) }

func (s *Set) reads(model string, what func(*match) bool) bool {
	for m := range s.matches(model) {
		if what(m) {
			return true
		}
	}
	return false
}

// matches are those of rules and their excludes that a request for the model may
// be held against.
func (s *Set) matches(model string) iter.Seq[*match] {
	return func(yield func(*match) bool) {
		for _, r := range s.all() {
			if !r.couldMatch(model) {
				continue
			}
			for i := range r.matches {
				if m := &r.matches[i]; (m.model == "" || m.model == model) && !yield(m) {
					return
				}
			}
			if r.route == nil {
				continue
			}
			for i := range r.route.exclude {
				if m := r.route.exclude[i].onlyIf; m != nil && !yield(m) {
					return
				}
			}
		}
	}
}

// Windows are the windows of means that rules look at, beside DefaultWindow.
func (s *Set) Windows() []time.Duration {
	var out []time.Duration
	for _, r := range s.all() {
		if r.route == nil {
			continue
		}
		for i := range r.route.exclude {
			for _, l := range r.route.exclude[i].limits {
				if l.Window != DefaultWindow && !slices.Contains(out, l.Window) {
					out = append(out, l.Window)
				}
			}
		}
	}
	return out
}

// Thresholds are those that a Memory is asked about.
func (s *Set) Thresholds() []Threshold {
	var out []Threshold
	for _, r := range s.all() {
		if r.route == nil {
			continue
		}
		for i := range r.route.exclude {
			for _, l := range r.route.exclude[i].limits {
				if l.Until < l.Above && !slices.Contains(out, l) {
					out = append(out, l)
				}
			}
		}
	}
	return out
}

func (r *rule) couldMatch(model string) bool {
	return len(r.matches) == 0 || slices.ContainsFunc(r.matches, func(m match) bool { return m.model == "" || m.model == model })
}

func (r *rule) matchesRequest(q *Request) bool {
	if len(r.matches) == 0 {
		return true
	}
	for i := range r.matches {
		// A restriction that cannot be evaluated holds; a grant does not.
		if r.matches[i].holds(q, &r.policy.assume, r.reject != nil) {
			return true
		}
	}
	return false
}

// Evaluate decides about a request. It is a pure function of its arguments.
func (s *Set) Evaluate(r *Request, f *Fleet) Decision {
	d := evaluate(s.live, r, f)
	if s.shadow != nil {
		shadow := evaluate(s.shadow, r, f)
		d.Shadow = &shadow
	}
	return d
}

// Objective is that of the first rule that routes a request: what the order of those
// that wait goes by, before endpoints are looked at.
func (s *Set) Objective(r *Request) v1alpha1.RouteObjective {
	for _, x := range s.live {
		if x.route != nil && x.matchesRequest(r) {
			return x.route.objective
		}
	}
	return standard.objective
}

func evaluate(rules []*rule, r *Request, f *Fleet) Decision {
	d := Decision{Verdicts: make([]Verdict, len(f.Endpoints)), Objective: standard.objective}
	for _, x := range rules {
		if !x.matchesRequest(r) {
			continue
		}
		d.Policy, d.Rule = x.policy.ID(), x.name
		if x.reject != nil {
			d.Action, d.Rejection = Reject, x.reject
			return d
		}
		empty := d.route(x.route, x.policy, r, f)
		if !empty || x.route.onEmpty != v1alpha1.OnEmptyContinue {
			return d
		}
		d.Emptied = append(d.Emptied, d.Policy+"/"+d.Rule)
	}
	// A rule that came up empty has spoken: what it kept out must not come in
	// by the default.
	if len(d.Emptied) == 0 {
		d.route(standard, &Policy{}, r, f)
	}
	return d
}

// route applies one rule to the endpoints; it reports whether none is left.
func (d *Decision) route(x *route, p *Policy, r *Request, f *Fleet) (empty bool) {
	d.Objective, d.Retry = x.objective, x.retry
	busy := false
	n := 0
	for i := range f.Endpoints {
		e := &f.Endpoints[i]
		v := &d.Verdicts[i]
		*v = Verdict{}
		if !considered(x.consider, e, r.Model) {
			v.Cause = NotConsidered
			continue
		}
		if e.Unfit != "" {
			v.Cause = Unfit
			continue
		}
		for j := range x.exclude {
			if cause := x.exclude[j].drops(e, r, p); cause != Kept {
				*v = Verdict{cause, x.exclude[j].name}
				busy = busy || cause == TooBusy
				break
			}
		}
		if v.Cause == Kept {
			v.Cause = NotSelected // until a stage takes it
			n++
		}
	}
	d.Order = d.Order[:0]
	if n > 0 {
		if d.Order == nil {
			d.Order = make([]int, 0, n)
		}
		for i := range x.stages {
			before := len(d.Order)
			d.stage(&x.stages[i], r, f)
			if before == 0 && len(d.Order) > 0 {
				d.Stage = i
			}
		}
	}
	switch {
	case len(d.Order) > 0:
		d.Action = Route
		return false
	case x.onEmpty == v1alpha1.OnEmptyQueue:
		d.Action, d.Wait = Queue, x.queue
	case busy:
		d.Action = Saturated
	default:
		d.Action = Unavailable
	}
	return true
}

func considered(list []filter, e *Endpoint, model string) bool {
	if list == nil {
		return e.serves(model)
	}
	for i := range list {
		if (list[i].models != nil || e.serves(model)) && list[i].takes(e) {
			return true
		}
	}
	return false
}

// takes reports whether an endpoint is what the filter selects.
func (f *filter) takes(e *Endpoint) bool {
	switch {
	case f.kind != "" && f.kind != e.Type,
		f.sets != nil && (e.Type != v1alpha1.BackendLocal || !slices.Contains(f.sets, e.Name)),
		f.provider != nil && (e.Type != v1alpha1.BackendProvider || !slices.Contains(f.provider, e.Name)),
		len(f.names) > 0 && !slices.Contains(f.names, e.Name),
		len(f.models) > 0 && !slices.ContainsFunc(f.models, e.serves):
		return false
	case len(f.labels) == 0:
		return true
	}
	for k, v := range f.labels {
		got, ok := e.Labels[k]
		if !ok {
			got, ok = e.Backend.Labels[k]
		}
		if !ok || got != string(v) {
			return false
		}
	}
	return true
}

// drops says whether and why an exclude drops an endpoint.
func (x *exclude) drops(e *Endpoint, r *Request, p *Policy) Cause {
	if !x.filter.takes(e) || x.onlyIf != nil && !x.onlyIf.holds(r, &p.assume, true) {
		return Kept
	}
	if len(x.limits) == 0 && x.ttft == 0 {
		return Excluded
	}
	for _, l := range x.limits {
		if e.Type == v1alpha1.BackendProvider {
			return Kept
		}
		// Nobody knows the load of a worker that shows none: it may be any.
		if e.Load == nil {
			continue
		}
		v, fresh := e.Load.Mean(l.Metric, l.Window)
		if !fresh || v > l.Above {
			continue
		}
		if v > l.Until {
			if m, ok := e.Load.(Memory); ok && m.Held(l) {
				continue
			}
		}
		return Kept
	}
	if x.ttft > 0 && e.TTFT <= x.ttft {
		return Kept
	}
	return TooBusy
}

// stage appends the endpoints of a stage that no earlier one has, best first.
func (d *Decision) stage(s *stage, r *Request, f *Fleet) {
	from := len(d.Order)
	for i := range f.Endpoints {
		if d.Verdicts[i].Cause == NotSelected && s.takes(&f.Endpoints[i]) {
			d.Order = append(d.Order, i)
			d.Verdicts[i].Cause = Kept
		}
	}
	order := d.Order[from:]
	if len(order) < 2 {
		return
	}
	s.rank(order, f)
	switch {
	case s.order != nil:
		byPlace(order, f, func(name string) int { return slices.Index(s.order, name) })
	case s.weights != nil:
		first := s.draw(r, order, f)
		byPlace(order, f, func(name string) int {
			if name == first {
				return -1
			}
			return slices.IndexFunc(s.weights, func(w v1alpha1.Weight) bool { return w.Name == name })
		})
	}
}

// takes reports whether a stage selects an endpoint: order and weights name all
// that it may.
func (s *stage) takes(e *Endpoint) bool {
	switch {
	case s.order != nil && !slices.Contains(s.order, e.Name),
		s.weights != nil && !slices.ContainsFunc(s.weights, func(w v1alpha1.Weight) bool { return w.Name == e.Name && w.Weight > 0 }):
		return false
	}
	return s.filter.takes(e)
}

// byPlace sorts by the place of the backend and keeps the order within one.
func byPlace(order []int, f *Fleet, place func(name string) int) {
	slices.SortStableFunc(order, func(a, b int) int {
		return cmp.Compare(place(f.Endpoints[a].Name), place(f.Endpoints[b].Name))
	})
}

// draw picks a backend by weight among those that have an endpoint here.
func (s *stage) draw(r *Request, order []int, f *Fleet) string {
	here := func(name string) bool {
		return slices.ContainsFunc(order, func(i int) bool { return f.Endpoints[i].Name == name })
	}
	total := int64(0)
	for _, w := range s.weights {
		if here(w.Name) {
			total += int64(w.Weight)
		}
	}
	at := int64(r.seed(uint64(total)))
	for _, w := range s.weights {
		if here(w.Name) {
			if at -= int64(w.Weight); at < 0 {
				return w.Name
			}
		}
	}
	return ""
}

// rank sorts by the stage's criterion, best first.
func (s *stage) rank(order []int, f *Fleet) {
	e := f.Endpoints
	// The order is that of the endpoints so far, which settles ties: faster than
	// a stable sort.
	by := func(less func(a, b *Endpoint) int) {
		slices.SortFunc(order, func(a, b int) int {
			if c := less(&e[a], &e[b]); c != 0 {
				return c
			}
			return a - b
		})
	}
	switch s.minimize {
	case v1alpha1.MinimizePredictedE2E:
		by(func(a, b *Endpoint) int { return cmp.Compare(a.E2E, b.E2E) })
	case v1alpha1.MinimizeCost:
		by(func(a, b *Endpoint) int { return cmp.Compare(a.Cost, b.Cost) })
	case v1alpha1.MinimizeQueuedPrompts:
		by(func(a, b *Endpoint) int { return cmp.Compare(a.mean(QueuedPrompts), b.mean(QueuedPrompts)) })
	case v1alpha1.MinimizeKVCacheUsage:
		by(func(a, b *Endpoint) int { return cmp.Compare(a.mean(KVCacheUsage), b.mean(KVCacheUsage)) })
	default:
		if f.Rank != nil {
			f.Rank(order)
			return
		}
		by(func(a, b *Endpoint) int { return cmp.Compare(a.TTFT, b.TTFT) })
	}
}

// mean is for ranking: an endpoint that shows no load comes last.
func (e *Endpoint) mean(m Metric) float64 {
	if e.Load != nil {
		if v, fresh := e.Load.Mean(m, DefaultWindow); fresh {
			return v
		}
	}
	return 1e18
}
