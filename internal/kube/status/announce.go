package status

import (
	"context"
	"encoding/json"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"

	"github.com/kinference/kinference/internal/kube"
)

// A replica says what it serves when that has changed, at most once in
// announceGap, and at least every announceEvery. One that has said nothing for
// silentAfter is silent, and after forgetAfter its Lease is removed.
const (
	announceGap   = 500 * time.Millisecond
	announceEvery = 10 * time.Second
	silentAfter   = 30 * time.Second
	forgetAfter   = 5 * time.Minute

	// labelReplica has the name of the leader's Lease; it marks the Leases of
	// replicas. annotationServes holds the kube.Report of one.
	labelReplica     = "kinference.buoyant.io/replica-of"
	annotationServes = "kinference.buoyant.io/serves"

	fieldManager = "kinference-router"
)

// announce keeps a Lease that says what this replica serves. There is none
// before the first catalog, and none after the end.
func (w *Writer) announce(ctx context.Context) {
	announced, failed := false, false
	for {
		// Taken first: what comes after it is announced in the next round.
		_, changed := w.Source.State()
		if report, ok := w.Source.Report(); ok {
			err := w.sayServes(ctx, &report)
			if err != nil && !failed && ctx.Err() == nil {
				w.Log.Warn("cannot say what this replica serves", "error", err.Error())
			}
			failed = err != nil
			announced = announced || !failed
		}
		if !wait(ctx, announceGap, nil) || !wait(ctx, announceEvery, changed) {
			break
		}
	}
	if announced {
		ctx, cancel := afterEnd(ctx)
		defer cancel()
		_ = w.leases().Delete(ctx, w.leaseName(), metav1.DeleteOptions{}) // else it is forgotten later
	}
}

func (w *Writer) leases() dynamic.ResourceInterface {
	return w.Leases.Resource(leaseResource).Namespace(w.Namespace)
}

func (w *Writer) leaseName() string { return w.Name + "-" + w.Identity }

// wait returns false when ctx is done; else after d, or when the channel closes.
func wait(ctx context.Context, d time.Duration, early <-chan struct{}) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-early:
	case <-t.C:
	}
	return true
}

func (w *Writer) sayServes(ctx context.Context, report *kube.Report) error {
	ctx, cancel := context.WithTimeout(ctx, announceEvery)
	defer cancel()
	serves, err := json.Marshal(report)
	if err != nil {
		return err
	}
	now, seconds := metav1.NewMicroTime(time.Now()), int32(silentAfter/time.Second)
	lease := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{
		Name: w.leaseName(), Namespace: w.Namespace, Labels: map[string]string{labelReplica: w.Name},
		Annotations: map[string]string{annotationServes: string(serves)},
	}}
	if w.PodUID != "" {
		lease.OwnerReferences = []metav1.OwnerReference{{APIVersion: "v1", Kind: "Pod", Name: w.Identity, UID: types.UID(w.PodUID)}}
	}
	lease.Spec.HolderIdentity, lease.Spec.RenewTime, lease.Spec.LeaseDurationSeconds = &w.Identity, &now, &seconds
	u, err := toUnstructured(lease, "coordination.k8s.io/v1", "Lease")
	if err != nil {
		return err
	}
	_, err = w.leases().Apply(ctx, lease.Name, u, metav1.ApplyOptions{FieldManager: fieldManager, Force: true})
	return err
}

// replica is what a router replica says of itself.
type replica struct {
	name string
	// heard is when we last saw it say something, by our clock.
	heard time.Time
	// text is its report as it was written.
	text   string
	report kube.Report
	// fault: it said something that we do not understand.
	fault bool
}

func toReplica(u *unstructured.Unstructured, heard time.Time) *replica {
	r := &replica{name: u.GetName(), heard: heard, text: u.GetAnnotations()[annotationServes]}
	if id, _, _ := unstructured.NestedString(u.Object, "spec", "holderIdentity"); id != "" {
		r.name = id
	}
	r.fault = json.Unmarshal([]byte(r.text), &r.report) != nil
	return r
}
