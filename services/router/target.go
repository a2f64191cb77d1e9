package router

import (
	"strings"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/kinference/kinference/api/v1alpha1"
	"github.com/kinference/kinference/internal/resources"
	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
)

// target is how ingress reaches a provider. The Secret is one of the provider's
// own namespace, and only its name is told.
func target(p *resources.Provider) *routerv1.ProviderTarget {
	out := &routerv1.ProviderTarget{
		Schema: string(p.Spec.Schema), Endpoint: string(p.Spec.Endpoint), Region: p.Spec.Region,
		MaxTokensCap: uint32(p.Spec.MaxTokensCap), Concurrency: uint32(p.Spec.Concurrency),
		FirstByte: durationpb.New(p.FirstByte), Idle: durationpb.New(p.Idle), Total: durationpb.New(p.Total),
	}
	if c := p.Spec.Credentials; c != nil {
		out.WorkloadIdentity = c.WorkloadIdentity != nil
		if c.SecretRef != nil {
			namespace, _, _ := strings.Cut(p.Name, "/")
			out.Secret = namespace + "/" + string(c.SecretRef.Name)
		}
	}
	return out
}

// bars are the conditions on tags that keep the request from an endpoint.
func (x *routing) bars(i int) (out []*routerv1.TagBar) {
	for _, b := range x.model.Policies.Bars(&x.attributes, &x.verdict, &x.seen[i]) {
		out = append(out, &routerv1.TagBar{All: b.All, Any: b.Any, None: b.None, Assumed: b.Assumed})
	}
	return out
}

// hedge is when a policy wants the next endpoint asked as well.
func hedge(h *v1alpha1.Hedge) *routerv1.Hedge {
	if h == nil {
		return nil
	}
	after, err := h.After.Parse()
	if err != nil { // policies are checked where they are compiled
		return nil
	}
	return &routerv1.Hedge{After: durationpb.New(after), Percentile: uint32(h.Percentile)}
}
