package status

import (
	"context"
	"fmt"
	"sync"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/dynamic"
)

// The leader renews its Lease every tryEvery and steps down when that has failed
// for giveUp. Others take it over when it was not renewed for holdFor by their
// own clocks: those of machines need not agree.
const (
	tryEvery = 2 * time.Second
	giveUp   = 10 * time.Second
	holdFor  = 15 * time.Second
)

var leaseResource = coordinationv1.SchemeGroupVersion.WithResource("leases")

// elector holds a Lease that one replica has at a time. It is the protocol of
// client-go's leaderelection, which would bring the types of the whole
// Kubernetes API into the router.
type elector struct {
	leases         dynamic.ResourceInterface
	name, identity string

	// observed is the version of another's Lease, since when we know it.
	observed string
	since    time.Time
	// renewed is when we last wrote ours; zero while another leads.
	renewed time.Time
}

// run calls lead while this replica has the Lease, with a context that ends when
// it has no more. It returns when ctx is done and the Lease is given up. report
// is called with the first error of a row.
func (e *elector) run(ctx context.Context, lead func(context.Context), report func(error)) {
	var wg sync.WaitGroup
	defer wg.Wait()
	stop := func() {}
	tick := time.NewTicker(tryEvery)
	defer tick.Stop()
	failed := false
	for leads := false; ; {
		now, err := e.try(ctx)
		if err != nil && !failed && ctx.Err() == nil {
			report(err)
		}
		failed = err != nil
		if now != leads {
			stop()
			wg.Wait()
			stop = func() {}
			if leads = now; leads {
				var term context.Context
				term, stop = context.WithCancel(ctx)
				wg.Go(func() { lead(term) })
			}
		}
		select {
		case <-ctx.Done():
			stop()
			wg.Wait()
			e.release(ctx)
			return
		case <-tick.C:
		}
	}
}

// try takes or renews the Lease and tells whether this replica has it.
func (e *elector) try(ctx context.Context) (bool, error) {
	ctx, cancel := context.WithTimeout(ctx, giveUp/2)
	defer cancel()
	now := time.Now()
	leads := func() bool { return !e.renewed.IsZero() && now.Sub(e.renewed) < giveUp }
	lease, err := e.get(ctx)
	if err != nil {
		return leads(), fmt.Errorf("read: %w", err)
	}
	holder := ""
	if lease.Spec.HolderIdentity != nil {
		holder = *lease.Spec.HolderIdentity
	}
	if holder != e.identity {
		e.renewed = time.Time{}
		if lease.ResourceVersion != e.observed {
			e.observed, e.since = lease.ResourceVersion, now
		}
		if holder != "" && now.Sub(e.since) < holdFor {
			return false, nil
		}
	}
	e.fill(lease, holder, now)
	switch err := e.put(ctx, lease); {
	case apierrors.IsConflict(err) || apierrors.IsAlreadyExists(err):
		return false, nil // another one was faster
	case err != nil:
		return leads(), fmt.Errorf("write: %w", err)
	}
	e.renewed = now
	return true, nil
}

func (e *elector) fill(lease *coordinationv1.Lease, holder string, now time.Time) {
	stamp, seconds := metav1.NewMicroTime(now), int32(holdFor/time.Second)
	if holder != e.identity {
		transitions := int32(0)
		if lease.Spec.LeaseTransitions != nil {
			transitions = *lease.Spec.LeaseTransitions
		}
		if lease.ResourceVersion != "" {
			transitions++
		}
		lease.Spec.AcquireTime, lease.Spec.LeaseTransitions = &stamp, &transitions
	}
	lease.Spec.HolderIdentity, lease.Spec.RenewTime, lease.Spec.LeaseDurationSeconds = &e.identity, &stamp, &seconds
}

// release lets others take the Lease without waiting.
func (e *elector) release(ctx context.Context) {
	if e.renewed.IsZero() {
		return
	}
	ctx, cancel := afterEnd(ctx)
	defer cancel()
	lease, err := e.get(ctx)
	if err != nil || lease.Spec.HolderIdentity == nil || *lease.Spec.HolderIdentity != e.identity {
		return
	}
	nobody := ""
	lease.Spec.HolderIdentity = &nobody
	_ = e.put(ctx, lease) // else they wait
}

// get reads the Lease; one that is not there has no version.
func (e *elector) get(ctx context.Context) (*coordinationv1.Lease, error) {
	lease := &coordinationv1.Lease{}
	u, err := e.leases.Get(ctx, e.name, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		lease.Name = e.name
		return lease, nil
	case err != nil:
		return nil, err
	}
	return lease, runtime.DefaultUnstructuredConverter.FromUnstructured(u.Object, lease)
}

// put creates or updates the Lease, unless somebody else has changed it.
func (e *elector) put(ctx context.Context, lease *coordinationv1.Lease) error {
	u, err := toUnstructured(lease, "coordination.k8s.io/v1", "Lease")
	if err != nil {
		return err
	}
	if lease.ResourceVersion == "" {
		_, err = e.leases.Create(ctx, u, metav1.CreateOptions{})
	} else {
		_, err = e.leases.Update(ctx, u, metav1.UpdateOptions{})
	}
	return err
}

func toUnstructured(obj any, apiVersion, kind string) (*unstructured.Unstructured, error) {
	m, err := runtime.DefaultUnstructuredConverter.ToUnstructured(obj)
	if err != nil {
		return nil, err
	}
	u := &unstructured.Unstructured{Object: m}
	u.SetAPIVersion(apiVersion)
	u.SetKind(kind)
	return u, nil
}
