// Package status writes what became of each resource into its status.
//
// Every router replica runs a Writer beside its kube.Source. Each says in a
// Lease of its own which versions it serves; one of them, which holds the Lease
// of the leader, compares that with the resources and writes the conditions
// Accepted, ResolvedRefs, Programmed and CacheAware, counts and block sizes. It
// writes only what has changed, by server-side apply, and at a bounded rate.
// docs/decisions/0005-programmed.md says why it is done so.
//
// A Writer is safe for concurrent use. While the Kubernetes API is away nothing
// is written, and nothing is lost: a status is made from what is, not from
// events.
package status

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-logr/logr"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/client-go/dynamic"
	"k8s.io/klog/v2"

	"github.com/kinference/kinference/internal/kube"
)

// Settings of a Writer.
type Settings struct {
	// Source of what is served; required.
	Source *kube.Source
	// Client writes statuses, Leases reads and writes Leases. They have rate
	// limits of their own, so that neither holds up the other; required.
	Client, Leases dynamic.Interface
	// Namespace of the Leases, and the name of that of the leader; required.
	Namespace, Name string
	// Identity of this replica, such as the name of its Pod; required.
	Identity string
	// PodUID lets the replica's Lease go with its Pod. May be empty.
	PodUID string
	// Fleet may be nil: then workers count as ready when their Pods are.
	Fleet Fleet
	// Log may be nil.
	Log *slog.Logger
}

// Fleet tells what the router sees of workers. It is asked often, from one
// goroutine.
type Fleet interface {
	// WorkerSet returns the state of a worker set of the catalog, by its name
	// namespace/name; false when nothing is known of it.
	WorkerSet(name string) (SetState, bool)
}

// SetState is what the router sees of a worker set.
type SetState struct {
	// Total and Ready count engine processes.
	Total, Ready int
	// BlockSize is 0 while unknown.
	BlockSize int
	// CacheAware is the condition of that name: status, reason and message. An
	// empty status leaves the condition out.
	CacheAware metav1.Condition
}

// Writer announces what this replica serves and writes statuses while it leads.
// Use New.
type Writer struct {
	Settings
	leading atomic.Bool
}

// New returns a Writer, or what is missing in the settings.
func New(s Settings) (*Writer, error) {
	if s.Source == nil || s.Client == nil || s.Leases == nil {
		return nil, errors.New("source and clients are required")
	}
	if s.Namespace == "" || s.Name == "" || s.Identity == "" {
		return nil, errors.New("namespace and name of the Lease, and an identity, are required")
	}
	if faults := validation.IsDNS1123Subdomain(s.Name + "-" + s.Identity); len(faults) > 0 {
		return nil, fmt.Errorf("%s-%s is no name of a Lease: %s", s.Name, s.Identity, faults[0])
	}
	if s.Log == nil {
		s.Log = slog.New(slog.DiscardHandler)
	}
	return &Writer{Settings: s}, nil
}

// Leading tells whether this replica writes the statuses.
func (w *Writer) Leading() bool { return w.leading.Load() }

// Run announces and writes until ctx is done. Then it gives up its Leases, so
// that another replica takes over at once.
func (w *Writer) Run(ctx context.Context) error {
	ctx = klog.NewContext(ctx, logr.FromSlogHandler(w.Log.Handler()))
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() { w.announce(ctx) })
	e := &elector{leases: w.Leases.Resource(leaseResource).Namespace(w.Namespace), name: w.Name, identity: w.Identity}
	e.run(ctx, func(ctx context.Context) {
		w.leading.Store(true)
		defer w.leading.Store(false)
		w.Log.Info("writes the statuses of resources", "replica", w.Identity)
		newLeader(w).run(ctx)
		w.Log.Info("no longer writes the statuses of resources", "replica", w.Identity)
	}, func(err error) { w.Log.Warn("lease of the leader", "error", err.Error()) })
	return nil
}

// released bounds the requests that are made after the end.
const released = 5 * time.Second

// afterEnd is a context for the last requests of one that is done.
func afterEnd(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.WithoutCancel(ctx), released)
}
