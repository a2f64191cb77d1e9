package status

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/resourceversion"
	"k8s.io/client-go/tools/cache"

	"github.com/kinference/kinference/api/v1alpha1"
	"github.com/kinference/kinference/internal/kube"
	"github.com/kinference/kinference/internal/resources"
)

const (
	// lookEvery is how often the fleet and the silence of replicas are looked
	// at, and failed writes tried again.
	lookEvery = 5 * time.Second
	// writeTimeout bounds one write.
	writeTimeout = 10 * time.Second
)

// leader writes the statuses that are not as they should be.
type leader struct {
	*Writer
	kick chan struct{}

	mu       sync.Mutex
	replicas map[string]*replica // by the name of their Lease

	// next is the resource at which the next round begins: one that was cut
	// short is not to favour the first ones.
	next int
	// written holds what the store of the source may not have yet, by uid.
	written map[types.UID]resources.Object
	failed  bool
}

func newLeader(w *Writer) *leader {
	return &leader{Writer: w, kick: make(chan struct{}, 1), replicas: map[string]*replica{}, written: map[types.UID]resources.Object{}}
}

// run writes until ctx is done.
func (l *leader) run(ctx context.Context) {
	informer := kube.NewInformer(l.Leases, leaseResource, l.Namespace, labelReplica+"="+l.Name)
	replicas, err := informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    func(obj any) { l.heard(nil, obj) },
		UpdateFunc: l.heard,
		DeleteFunc: func(obj any) { l.gone(obj) },
	})
	if err != nil {
		l.Log.Error("cannot follow the leases of replicas", "error", err.Error())
		return
	}
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() { informer.RunWithContext(ctx) })
	for {
		state, changed := l.Source.State()
		// All replicas have been noted, not only read: one that is missing here
		// could not count against anything.
		if state != nil && replicas.HasSynced() && !l.round(ctx, state, changed) {
			continue
		}
		t := time.NewTimer(lookEvery)
		select {
		case <-ctx.Done():
			t.Stop()
			return
		case <-changed:
		case <-l.kick:
		case <-t.C:
			l.forget(ctx)
		}
		t.Stop()
	}
}

// round looks at each resource once; false when there is something newer.
func (l *leader) round(ctx context.Context, state *kube.State, changed <-chan struct{}) bool {
	v := newView(state.Catalog, l.Fleet, l.list(), time.Now())
	n := len(state.Resources)
	var failed error
	for i := range n {
		at := (l.next + i) % n
		select {
		case <-changed:
			l.next = at
			return false
		case <-ctx.Done():
			return true
		default:
		}
		if err := l.update(ctx, v, &state.Resources[at]); err != nil && ctx.Err() == nil {
			failed = err
		}
	}
	l.next = 0
	if len(l.written) > 0 {
		there := map[types.UID]bool{}
		for i := range state.Resources {
			there[state.Resources[i].Object.GetUID()] = true
		}
		maps.DeleteFunc(l.written, func(uid types.UID, _ resources.Object) bool { return !there[uid] })
	}
	if failed != nil && !l.failed {
		l.Log.Warn("cannot write the status of a resource", "error", failed.Error())
	}
	l.failed = failed != nil
	return true
}

// update writes the status of a resource if it is not as it should be.
func (l *leader) update(ctx context.Context, v *view, r *kube.Resource) error {
	current := l.Source.Newest(r)
	if current == nil || current.GetUID() != r.Object.GetUID() || current.GetGeneration() != r.Object.GetGeneration() {
		return nil // there is a newer state soon
	}
	uid := current.GetUID()
	if w := l.written[uid]; w != nil {
		if n, err := resourceversion.CompareResourceVersion(w.GetResourceVersion(), current.GetResourceVersion()); err == nil && n > 0 {
			current = w
		} else {
			delete(l.written, uid)
		}
	}
	want := v.desired(r, current)
	if want == nil {
		return nil
	}
	u, err := toUnstructured(want, v1alpha1.APIVersion, r.Kind.Name)
	if err != nil {
		return err
	}
	// Only what is said here: zero values of the rest would be ours otherwise.
	u.Object = map[string]any{
		"apiVersion": v1alpha1.APIVersion, "kind": r.Kind.Name, "status": u.Object["status"],
		// The uid: not one that was made anew under the name.
		"metadata": map[string]any{"name": want.GetName(), "namespace": want.GetNamespace(), "uid": string(uid)},
	}
	ctx, cancel := context.WithTimeout(ctx, writeTimeout)
	defer cancel()
	got, err := l.Client.Resource(r.Kind.Resource).Namespace(want.GetNamespace()).
		ApplyStatus(ctx, want.GetName(), u, metav1.ApplyOptions{FieldManager: fieldManager, Force: true})
	switch {
	case apierrors.IsNotFound(err) || apierrors.IsConflict(err):
		return nil // gone, or made anew
	case err != nil:
		return fmt.Errorf("%s %s/%s: %w", r.Kind.Name, want.GetNamespace(), want.GetName(), err)
	}
	if o, err := r.Kind.Decode(got.Object); err == nil {
		l.written[uid] = o
	}
	return nil
}

// heard notes what a replica says.
func (l *leader) heard(before, after any) {
	u, ok := after.(*unstructured.Unstructured)
	if !ok {
		return
	}
	if b, ok := before.(*unstructured.Unstructured); ok && b.GetResourceVersion() == u.GetResourceVersion() {
		return // read again, not said again
	}
	now := toReplica(u, time.Now())
	l.mu.Lock()
	old := l.replicas[u.GetName()]
	l.replicas[u.GetName()] = now
	l.mu.Unlock()
	if old == nil || old.text != now.text {
		l.wake()
	}
}

func (l *leader) gone(obj any) {
	if d, ok := obj.(cache.DeletedFinalStateUnknown); ok {
		obj = d.Obj
	}
	if u, ok := obj.(*unstructured.Unstructured); ok {
		l.mu.Lock()
		delete(l.replicas, u.GetName())
		l.mu.Unlock()
		l.wake()
	}
}

func (l *leader) wake() {
	select {
	case l.kick <- struct{}{}:
	default:
	}
}

// list returns the replicas by name.
func (l *leader) list() []*replica {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.SortedFunc(maps.Values(l.replicas), func(a, b *replica) int { return strings.Compare(a.name, b.name) })
}

// forget removes the Leases of replicas that are silent for long.
func (l *leader) forget(ctx context.Context) {
	l.mu.Lock()
	var dead []string
	for name, r := range l.replicas {
		if time.Since(r.heard) > forgetAfter {
			dead = append(dead, name)
		}
	}
	l.mu.Unlock()
	for _, name := range dead {
		ctx, cancel := context.WithTimeout(ctx, writeTimeout)
		err := l.leases().Delete(ctx, name, metav1.DeleteOptions{})
		cancel()
		if err == nil {
			l.Log.Info("forgot a replica that is silent", "lease", name)
		}
	}
}
