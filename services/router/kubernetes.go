package router

import (
	"cmp"
	"context"
	"fmt"
	"net"
	"os"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/kinference/kinference/api/v1alpha1"
	"github.com/kinference/kinference/internal/kube"
	"github.com/kinference/kinference/internal/kube/admission"
	"github.com/kinference/kinference/internal/kube/review"
	"github.com/kinference/kinference/internal/kube/status"
	"github.com/kinference/kinference/internal/resources"
	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
)

// kubernetes reads the resources from the Kubernetes API, writes their status
// and, where a port is set, answers admission reviews.
func (s *server) kubernetes(ctx context.Context, g *errgroup.Group) error {
	config, err := kube.Connect(s.Kubeconfig)
	if err != nil {
		return fmt.Errorf("find the Kubernetes API: %w", err)
	}
	reading, err := kube.Client(config)
	if err != nil {
		return fmt.Errorf("make a client of the Kubernetes API: %w", err)
	}
	asking, err := kube.Client(config)
	if err != nil {
		return fmt.Errorf("make a client of the Kubernetes API: %w", err)
	}
	s.reviewer, s.keys = review.New(asking), &kube.KeySecrets{Client: asking}
	source := kube.NewSource(kube.Settings{Client: reading, Namespaces: list(s.Namespaces), Served: s.served, Ended: s.fleet.Ended, Log: s.log},
		func(c *resources.Catalog, ps resources.Problems) { s.apply(ctx, c, ps) })
	g.Go(func() error { return source.Run(ctx) })
	g.Go(func() error { return s.refresh(ctx, source) })

	writing, err := kube.Client(config)
	if err != nil {
		return fmt.Errorf("make a client of the Kubernetes API: %w", err)
	}
	leases, err := kube.Client(config)
	if err != nil {
		return fmt.Errorf("make a client of the Kubernetes API: %w", err)
	}
	writer, err := status.New(status.Settings{
		Source: source, Client: writing, Leases: leases, Namespace: s.LeaseNamespace, Name: "kinference-router",
		Identity: s.Identity, PodUID: s.PodUID, Fleet: s, Log: s.log,
	})
	if err != nil {
		return fmt.Errorf("write status: %w", err)
	}
	g.Go(func() error { return writer.Run(ctx) })

	if s.WebhookListen == "" {
		return nil
	}
	l, err := net.Listen("tcp", s.WebhookListen)
	if err != nil {
		return fmt.Errorf("open the webhook's port: %w", err)
	}
	hook := &admission.Webhook{Others: source.Objects, Log: s.log}
	g.Go(func() error { return admission.Serve(ctx, l, hook, s.WebhookCert, s.WebhookKey) })
	return nil
}

// served lists the models that a worker said it serves.
func (s *server) served(worker string) []string { return s.fleet.Served(worker) }

// refresh compiles anew when workers were found to serve other models: pools that
// select Pods name none.
func (s *server) refresh(ctx context.Context, source *kube.Source) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-s.fleet.Learned():
			source.Refresh()
		}
	}
}

// WorkerSet implements status.Fleet.
func (s *server) WorkerSet(name string) (out status.SetState, ok bool) {
	v, _ := s.catalog.Current()
	if v == nil {
		return out, false
	}
	for _, set := range v.Resources.Sets {
		if set.Name == name {
			return s.setState(s.now(), set), true
		}
	}
	return out, false
}

func (s *server) setState(now time.Time, set *resources.WorkerSet) status.SetState {
	out := status.SetState{Total: len(set.Workers), BlockSize: s.fleet.BlockSize(set.Name)}
	lagging := 0
	for i := range set.Workers {
		w := &set.Workers[i]
		ready := !w.NotReady
		for _, id := range w.Ranks {
			st := s.fleet.Lookup(now, w.UID, id)
			ready = ready && st.Ready
			if st.Index == nil || !st.Index.GetLive() || st.Index.GetLag().AsDuration() > indexLate {
				lagging++
			}
		}
		if ready {
			out.Ready++
		}
	}
	reason, message := s.whyUnaware(now, set, lagging)
	out.CacheAware = metav1.Condition{Type: v1alpha1.ConditionCacheAware, Status: metav1.ConditionTrue, Reason: v1alpha1.ReasonCacheAware, Message: "Prefix-cache hits are predicted from the engines' events."}
	if reason != "" {
		out.CacheAware.Status, out.CacheAware.Reason, out.CacheAware.Message = metav1.ConditionFalse, reason, message
	}
	return out
}

// whyUnaware says why the hits of a worker set cannot be predicted; empty when
// they can. The message has nothing that changes all the time: each change is
// written.
func (s *server) whyUnaware(now time.Time, set *resources.WorkerSet, lagging int) (reason, message string) {
	for _, p := range set.Profiles {
		st := s.profileStatus(now, p, 0)
		switch tokens, cached := st.TokensCause, st.CachedCause; {
		case tokens != 0:
			return v1alpha1.ReasonParityTemplate, "The token ids made with the tokenizer's folder are not those of the engines (" + word(tokens) + "), which are asked instead."
		case cached == routerv1.ParityCause_PARITY_CAUSE_EVENTS:
			return v1alpha1.ReasonNoEvents, "Engines publish no KV events, or they do not arrive."
		case cached == routerv1.ParityCause_PARITY_CAUSE_BLOCK_SIZE:
			return v1alpha1.ReasonParityBlockSize, "Engines have other block sizes than the prompts are hashed with."
		case cached != 0:
			return v1alpha1.ReasonParityHash, "What engines report as cached is not what the index knows (" + word(cached) + ")."
		}
	}
	if lagging > 0 {
		return v1alpha1.ReasonLagging, "The index does not follow all engines closely."
	}
	return "", ""
}

// list splits a list with commas; empty for none.
func list(text string) []string {
	var out []string
	for part := range strings.SplitSeq(text, ",") {
		if part = strings.TrimSpace(part); part != "" {
			out = append(out, part)
		}
	}
	return out
}

// identity names this replica.
func identity() string {
	host, err := os.Hostname()
	return cmp.Or(host, fmt.Sprintf("router (%v)", err))
}
