package kube

import (
	"context"
	"errors"
	"net/url"
	"strings"
	"sync"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/resourceversion"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/tools/cache"

	"github.com/kinference/kinference/internal/resources"
)

// follower keeps a copy of one kind of resources in one namespace.
type follower struct {
	// kind is for people; scope is the kind, with the namespace unless all are
	// followed.
	kind, scope string
	informer    cache.SharedIndexInformer
	handled     cache.ResourceEventHandlerRegistration
	// required: nothing is compiled before it has been read once.
	required bool
	// severity of a refusal by the API.
	severity resources.Severity
	// optional: it may be unknown to the API without any word about it.
	optional bool
	// relevant tells whether a change can change the catalog; before is nil for
	// a new resource, after for one that is gone.
	relevant func(before, after any) bool
	wake     func()

	mu    sync.Mutex
	fault *fault
	// seen is the newest version of any resource that has arrived, loaded the
	// one up to which the catalog takes account of all.
	seen, loaded string
	// pending: something arrived that the catalog does not know yet; loading
	// keeps seen from the start of a compilation until it is served.
	pending bool
	loading *string
	// since is when the generation of each resource has arrived; nil where that
	// is not asked for.
	since map[types.UID]arrival
}

type arrival struct {
	generation int64
	version    string
}

// fault says why a kind cannot be read.
type fault struct {
	// refused: asking again soon will not help.
	refused, unknown bool
	text             string
}

// follow keeps a copy of the resources of a kind; of those with the labels of a
// selector, if one is given.
func (s *Source) follow(kind, namespace string, gvr schema.GroupVersionResource, transform cache.TransformFunc, selector ...string) (*follower, error) {
	f := &follower{kind: kind, scope: scope(kind, namespace), severity: resources.Error, wake: s.wake}
	labels := strings.Join(selector, ",")
	client := s.Client.Resource(gvr).Namespace(namespace)
	lw := &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			o.LabelSelector = labels
			list, err := client.List(ctx, o)
			if err != nil { // what can be listed but not watched is a fault still
				f.answered(ctx, err)
			}
			return list, err
		},
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			o.LabelSelector = labels
			w, err := client.Watch(ctx, o)
			f.answered(ctx, err)
			return w, err
		},
	}
	f.informer = newInformer(s.Client, lw, gvr.String())
	err := f.informer.SetTransform(transform)
	// What it would log is a Problem, said once.
	silent := f.informer.SetWatchErrorHandlerWithContext(func(context.Context, *cache.Reflector, error) {})
	handled, added := f.informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    func(after any) { f.event(nil, after) },
		UpdateFunc: f.event,
		DeleteFunc: func(before any) { f.event(before, nil) },
	})
	f.handled = handled
	return f, errors.Join(err, silent, added)
}

// NewInformer keeps a copy of the resources of a namespace that have the labels
// of a selector. It is for few resources, which are kept as they come.
func NewInformer(client dynamic.Interface, gvr schema.GroupVersionResource, namespace, selector string) cache.SharedIndexInformer {
	r := client.Resource(gvr).Namespace(namespace)
	return newInformer(client, &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			o.LabelSelector = selector
			return r.List(ctx, o)
		},
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			o.LabelSelector = selector
			return r.Watch(ctx, o)
		},
	}, gvr.String())
}

func newInformer(client dynamic.Interface, lw *cache.ListWatch, name string) cache.SharedIndexInformer {
	return cache.NewSharedIndexInformerWithOptions(cache.ToListWatcherWithWatchListSemantics(lw, client), &unstructured.Unstructured{},
		cache.SharedIndexInformerOptions{ObjectDescription: name, Indexers: cache.Indexers{cache.NamespaceIndex: cache.MetaNamespaceIndexFunc}})
}

// scope names what a follower follows.
func scope(kind, namespace string) string {
	if namespace == "" {
		return kind
	}
	return kind + "/" + namespace
}

// answered notes whether the API lets the kind be read.
func (f *follower) answered(ctx context.Context, err error) {
	if ctx.Err() != nil {
		return // we are stopping
	}
	var now *fault
	if err != nil && !apierrors.IsResourceExpired(err) && !apierrors.IsGone(err) {
		now = explain(err)
	}
	f.mu.Lock()
	same := f.fault == now || f.fault != nil && now != nil && *f.fault == *now
	f.fault = now
	f.mu.Unlock()
	if !same {
		f.wake()
	}
}

func explain(err error) *fault {
	var u *url.Error
	switch {
	case apierrors.IsForbidden(err):
		return &fault{refused: true, text: "may not be read, so there are none: grant the verbs list and watch (" + err.Error() + ")"}
	case apierrors.IsNotFound(err):
		return &fault{refused: true, unknown: true, text: "is not known to the Kubernetes API, so there are none: install its CustomResourceDefinition"}
	case errors.As(err, &u): // without the address, which differs by kind
		return &fault{text: "the Kubernetes API cannot be read: " + u.Err.Error()}
	}
	return &fault{text: "the Kubernetes API cannot be read: " + err.Error()}
}

// event notes what has arrived. Handlers of one informer are called in order.
func (f *follower) event(before, after any) {
	if d, ok := before.(cache.DeletedFinalStateUnknown); ok {
		before = d.Obj
	}
	f.mu.Lock()
	if o, ok := after.(metav1.Object); ok {
		f.seen = newer(f.seen, o.GetResourceVersion())
		if f.since != nil && f.since[o.GetUID()].generation != o.GetGeneration() {
			f.since[o.GetUID()] = arrival{o.GetGeneration(), o.GetResourceVersion()}
		}
	}
	if o, ok := before.(metav1.Object); ok {
		f.seen = newer(f.seen, o.GetResourceVersion())
		if a, ok := after.(metav1.Object); !ok || a.GetUID() != o.GetUID() {
			delete(f.since, o.GetUID())
		}
	}
	relevant := f.relevant(before, after)
	f.pending = f.pending || relevant
	f.mu.Unlock()
	if relevant {
		f.wake()
	}
}

// newer returns the newer of two resource versions of one kind.
func newer(a, b string) string {
	if n, err := resourceversion.CompareResourceVersion(a, b); err == nil && n > 0 {
		return a
	}
	return b
}

// load begins to compile what has arrived; loadedAll ends it.
func (f *follower) load() {
	f.mu.Lock()
	defer f.mu.Unlock()
	seen := f.seen
	f.loading, f.pending = &seen, false
}

func (f *follower) loadedAll() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.loaded, f.loading = *f.loading, nil
}

// version is the one up to which the catalog takes account of every resource.
func (f *follower) version() string {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.pending && f.loading == nil {
		f.loaded = f.seen // what came since does not change the catalog
	}
	return f.loaded
}

func (f *follower) trouble() *fault {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.fault
}

func (f *follower) arrived(uid types.UID) string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.since[uid].version
}
