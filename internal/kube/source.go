package kube

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/go-logr/logr"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"

	"github.com/kinference/kinference/api/v1alpha1"
	"github.com/kinference/kinference/internal/resources"
)

const (
	// quiet is how long nothing must arrive before a compilation, patience how
	// long the first change waits at most. A Pod that ends is out of the catalog
	// within them.
	quiet    = 50 * time.Millisecond
	patience = 500 * time.Millisecond
	// restFactor bounds what compiling costs: after one, as much time times this
	// passes before the next.
	restFactor = 4

	kindPod       = "Pod"
	kindSecret    = "Secret"
	kindExtension = "InferencePool." + v1alpha1.ExtensionGroup
)

// Settings of a Source.
type Settings struct {
	// Client reads the Kubernetes API; required.
	Client dynamic.Interface
	// Namespaces to follow; none: all of them.
	Namespaces []string
	// Served lists the models that the engine of a worker says it serves; see
	// resources.Options. Call Refresh when its answers have changed. May be nil.
	Served func(worker string) []string
	// Ended is told of a Pod with an engine, by its uid, as soon as it is being
	// deleted, has ended or is gone: before the catalog without it is made. It
	// must return at once. May be nil.
	Ended func(pod string)
	// Log may be nil.
	Log *slog.Logger
}

// Source follows the resources of the Kubernetes API. Use NewSource.
type Source struct {
	Settings
	apply     func(*resources.Catalog, resources.Problems)
	broken    error
	kinds     []*follower // of the six kinds
	others    []*follower // extension pools and Pods
	extension map[string]cache.Indexer
	secrets   map[string]cache.Indexer
	pods      pods
	dirty     chan struct{}
	versions  versions

	mu       sync.Mutex
	problems resources.Problems
	state    *State
	changed  chan struct{}
}

// State is what a Source has last applied.
type State struct {
	Catalog *resources.Catalog
	// Resources of the six kinds, by kind, namespace and name.
	Resources []Resource
}

// Resource is a resource with what became of it.
type Resource struct {
	// Object in its newest version. One that is of no form that this process
	// knows has metadata only, and a Problem.
	Object resources.Object
	Kind   *Kind
	// Scope names what has been followed to find it, as in Report.
	Scope string
	// Arrived is the version at which this generation was first seen.
	Arrived string
	// Served is the generation that the catalog holds; 0 for none.
	Served int64
	// Problems of the newest version.
	Problems resources.Problems

	checked *resources.Checked
}

// Report says how far a Source has come.
type Report struct {
	// Versions up to which every resource is in the catalog, by what is
	// followed: a kind, or kind/namespace.
	Versions map[string]string `json:"versions"`
	// Behind lists the resources of which an older generation is served, or
	// none (0), by uid.
	Behind map[types.UID]int64 `json:"behind,omitempty"`
	// More says that Behind is not complete: there were too many.
	More bool `json:"more,omitempty"`
}

// maxBehind bounds what a Report lists.
const maxBehind = 500

// NewSource returns a source of the resources that the settings' client sees.
// Once Run has started, apply is called from one goroutine with the first
// catalog and then whenever something has changed. Problems of severity Error
// with a catalog mean that those resources are left out, or served as they were
// before. The catalog is nil when there was none yet and the problems say why.
func NewSource(settings Settings, apply func(*resources.Catalog, resources.Problems)) *Source {
	if settings.Log == nil {
		settings.Log = slog.New(slog.DiscardHandler)
	}
	s := &Source{
		Settings: settings, apply: apply, extension: map[string]cache.Indexer{}, secrets: map[string]cache.Indexer{}, pods: pods{stores: map[string]cache.Indexer{}},
		dirty: make(chan struct{}, 1), versions: versions{}, changed: make(chan struct{}),
	}
	namespaces := slices.Compact(slices.Sorted(slices.Values(settings.Namespaces)))
	if len(namespaces) == 0 {
		namespaces = []string{""}
	}
	for _, ns := range namespaces {
		s.followAll(ns)
	}
	return s
}

func (s *Source) followAll(namespace string) {
	for i := range Kinds {
		k := &Kinds[i]
		f, err := s.follow(k.Name, namespace, k.Resource, k.transform)
		f.required, f.since, f.relevant = k.restricts, map[types.UID]arrival{}, k.changesCatalog
		s.kinds, s.broken = append(s.kinds, f), errors.Join(s.broken, err)
	}
	f, err := s.follow(kindExtension, namespace, extensionPools, toExtension)
	f.optional, f.relevant = true, func(before, after any) bool { return true }
	s.extension[namespace] = f.informer.GetIndexer()
	s.others, s.broken = append(s.others, f), errors.Join(s.broken, err)

	f, err = s.follow(kindPod, namespace, podResource, toPod)
	f.relevant = s.podChanged
	s.pods.stores[namespace] = f.informer.GetIndexer()
	s.others, s.broken = append(s.others, f), errors.Join(s.broken, err)

	f, err = s.follow(kindSecret, namespace, secretResource, toSecret, keySelector)
	f.relevant, f.severity = func(before, after any) bool { return true }, resources.Warning
	s.secrets[namespace] = f.informer.GetIndexer()
	s.others, s.broken = append(s.others, f), errors.Join(s.broken, err)
}

// podChanged tells whether a change of a Pod is one of a worker, and passes on
// that one ends.
func (s *Source) podChanged(before, after any) bool {
	if !s.pods.relevant(before, after) {
		return false
	}
	a, okA := before.(*pod)
	b, okB := after.(*pod)
	if s.Ended != nil && okA && a.worker() && (!okB || b.ending || b.UID != a.UID) {
		s.Ended(string(a.UID))
	}
	return true
}

// Run follows the API until ctx is done. That the API is away, or refuses
// something, is a Problem, not an error.
func (s *Source) Run(ctx context.Context) error {
	if s.broken != nil {
		return s.broken
	}
	var wg sync.WaitGroup
	defer wg.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	ctx = klog.NewContext(ctx, logr.FromSlogHandler(s.Log.Handler()))
	for _, f := range s.followers() {
		wg.Go(func() { f.informer.RunWithContext(ctx) })
		wg.Go(func() {
			select {
			case <-f.handled.HasSyncedChecker().Done():
				s.wake()
			case <-ctx.Done():
			}
		})
	}
	for s.settle(ctx) {
		start := time.Now()
		s.load()
		sleep(ctx, restFactor*time.Since(start))
	}
	return nil
}

func (s *Source) followers() []*follower { return slices.Concat(s.kinds, s.others) }

func (s *Source) wake() {
	select {
	case s.dirty <- struct{}{}:
	default:
	}
}

// Refresh compiles anew.
func (s *Source) Refresh() { s.wake() }

// settle waits for a change and until nothing more arrives; false when ctx is
// done.
func (s *Source) settle(ctx context.Context) bool {
	select {
	case <-ctx.Done():
		return false
	case <-s.dirty:
	}
	enough := time.NewTimer(patience)
	defer enough.Stop()
	for {
		pause := time.NewTimer(quiet)
		select {
		case <-ctx.Done():
			pause.Stop()
			return false
		case <-s.dirty:
			pause.Stop()
		case <-pause.C:
			return true
		case <-enough.C:
			pause.Stop()
			return true
		}
	}
}

func sleep(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
	case <-t.C:
	}
}

// load compiles what is there and applies it.
func (s *Source) load() {
	ready, faults := s.troubles()
	if !ready {
		if len(faults) > 0 && !slices.Equal(faults, s.Problems()) {
			s.publish(nil, faults)
			s.apply(nil, faults)
		}
		return
	}
	for _, f := range s.followers() {
		f.load()
	}
	s.pods.begin()
	state, problems := s.compile()
	problems = append(faults, problems...)
	s.apply(state.Catalog, problems)
	s.pods.end()
	for _, f := range s.followers() {
		f.loadedAll()
	}
	s.publish(state, problems)
}

func (s *Source) publish(state *State, problems resources.Problems) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.problems = problems
	if state != nil {
		s.state = state
		close(s.changed)
		s.changed = make(chan struct{})
	}
}

// troubles tells whether enough has been read for a catalog, and what cannot
// be read. That the API is away is no problem of a catalog that is there.
func (s *Source) troubles() (ready bool, problems resources.Problems) {
	s.mu.Lock()
	before := s.state != nil
	s.mu.Unlock()
	ready = true
	said := map[string]bool{}
	for _, f := range s.followers() {
		fault := f.trouble()
		if !f.handled.HasSynced() && (f.required || fault == nil || !fault.refused) {
			ready = false
		}
		switch {
		case fault == nil || f.optional && fault.unknown || before && !fault.refused:
		case fault.refused:
			problems = append(problems, resources.Problem{Severity: f.severity, Resource: f.scope, Message: fault.text})
		case !said[fault.text]:
			said[fault.text] = true
			problems = append(problems, resources.Problem{Severity: resources.Error, Message: fault.text})
		}
	}
	return ready || before, problems
}

// compile makes a state of what is in the stores.
func (s *Source) compile() (*State, resources.Problems) {
	options := resources.Options{Elsewhere: true, Partial: true, Pods: s.pods.find, Extension: s.extensionPool, Served: s.Served, Keys: s.keySecret}
	list := s.list()
	options.Guarded = slices.ContainsFunc(list, func(r Resource) bool { return r.Kind.Name == v1alpha1.KindGatewayBackend })
	catalog, problems := s.versions.compile(options, list)
	return &State{Catalog: catalog, Resources: list}, problems
}

// list returns the resources in a fixed order, so that all replicas agree on
// those of the same age.
func (s *Source) list() []Resource {
	var out []Resource
	for _, f := range s.kinds {
		for _, obj := range f.informer.GetStore().List() {
			o, ok := obj.(*stored)
			if !ok {
				continue
			}
			r := Resource{Object: o.Object, Kind: o.kind, Scope: f.scope, Arrived: f.arrived(o.GetUID()), checked: o.checked}
			if o.fault != nil {
				r.Problems = resources.Problems{{Severity: resources.Error, Resource: r.id(), Message: o.fault.Error()}}
			}
			out = append(out, r)
		}
	}
	slices.SortFunc(out, func(a, b Resource) int {
		return cmp.Or(strings.Compare(a.Kind.Name, b.Kind.Name), strings.Compare(a.Object.GetNamespace(), b.Object.GetNamespace()),
			strings.Compare(a.Object.GetName(), b.Object.GetName()))
	})
	return out
}

// id is as in Problem.Resource.
func (r *Resource) id() string {
	return r.Kind.Name + " " + r.Object.GetNamespace() + "/" + r.Object.GetName()
}

func (s *Source) extensionPool(namespace, name string) *resources.ExtensionPool {
	store := s.extension[namespace]
	if store == nil {
		store = s.extension[""]
	}
	if store == nil {
		return nil
	}
	obj, _, err := store.GetByKey(namespace + "/" + name)
	if e, ok := obj.(*extension); ok && err == nil {
		return &e.pool
	}
	return nil
}

// Problems returns those of the newest load.
func (s *Source) Problems() resources.Problems {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.problems
}

// State returns what was last applied, nil before the first catalog, and a
// channel that is closed when there is something newer.
func (s *Source) State() (*State, <-chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.state, s.changed
}

// Report says how far the newest State has come; ok is false before the first.
func (s *Source) Report() (r Report, ok bool) {
	// Versions first: what is applied meanwhile may be newer, but never older.
	r.Versions = map[string]string{}
	for _, f := range s.kinds {
		if f.handled.HasSynced() {
			r.Versions[f.scope] = f.version()
		}
	}
	state, _ := s.State()
	if state == nil {
		return r, false
	}
	r.Behind = map[types.UID]int64{}
	for i := range state.Resources {
		x := &state.Resources[i]
		if x.Served == x.Object.GetGeneration() {
			continue
		}
		if len(r.Behind) == maxBehind {
			r.More = true
			break
		}
		r.Behind[x.Object.GetUID()] = x.Served
	}
	return r, true
}

// Objects returns all resources of the six kinds as they are now, for checks of
// one against the others; false before the first catalog.
func (s *Source) Objects() ([]resources.Object, bool) {
	state, _ := s.State()
	if state == nil {
		return nil, false
	}
	var out []resources.Object
	for _, r := range s.list() {
		if len(r.Problems) == 0 {
			out = append(out, r.Object)
		}
	}
	return out, true
}

// Newest returns a resource as it is now, with its status; nil when it is gone.
func (s *Source) Newest(r *Resource) resources.Object {
	for _, f := range s.kinds {
		if f.scope != r.Scope {
			continue
		}
		obj, _, err := f.informer.GetStore().GetByKey(r.Object.GetNamespace() + "/" + r.Object.GetName())
		if o, ok := obj.(*stored); ok && err == nil {
			return o.Object
		}
	}
	return nil
}
