package ingress

import (
	"context"
	"fmt"
	"net/netip"
	"strings"
	"time"

	"github.com/kinference/kinference/api/v1alpha1"
	"github.com/kinference/kinference/internal/daemon"
	"github.com/kinference/kinference/internal/openai"
	"github.com/kinference/kinference/internal/policy"
	"github.com/kinference/kinference/internal/provider"
	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
	"github.com/kinference/kinference/services/ingress/internal/credential"
	"github.com/kinference/kinference/services/ingress/internal/proxy"
)

// leaving is what requests to providers need.
type leaving struct {
	secrets *credential.Store
	api     *credential.Kubernetes // nil: not asked
	role    credential.Role
	tokens  credential.Tokens
}

// startLeaving makes ready what requests to providers need.
func (v *server) startLeaving() (stop func(), err error) {
	v.leaving.secrets = credential.New(v.ProviderCredentials)
	if !v.ProviderSecrets {
		return func() {}, nil
	}
	if v.leaving.api, err = credential.NewKubernetes(); err != nil {
		return nil, err
	}
	return v.leaving.api.Close, nil
}

// secret returns the keys of a Secret: as it is mounted, or else from the API.
func (l *leaving) secret(ctx context.Context, name string) (provider.Credentials, error) {
	keys, err := l.secrets.Secret(ctx, name)
	if err == nil || l.api == nil {
		return keys, err
	}
	return l.api.Secret(ctx, name)
}

// podCredentials is what the identity of the Pod is worth at a provider.
func (v *server) podCredentials(ctx context.Context, p *proxy.Provider) (provider.Credentials, error) {
	switch p.Target.Schema {
	case v1alpha1.SchemaAzureOpenAI:
		return v.leaving.tokens.Azure(ctx, v.proxy.Outside(p.Name), p.Target.Endpoint)
	case v1alpha1.SchemaDatabricks:
		return v.leaving.tokens.DatabricksIdentity(ctx, v.proxy.Outside(p.Name), p.Target.Endpoint)
	}
	return v.leaving.role.Keys(ctx, p.Target.Region)
}

// privateNetworks are the blocks of addresses in a list.
func privateNetworks(list string) (out []netip.Prefix, err error) {
	for s := range strings.SplitSeq(list, ",") {
		if s = strings.TrimSpace(s); s == "" {
			continue
		}
		p, err := netip.ParsePrefix(s)
		if err != nil {
			return nil, fmt.Errorf("provider-private-networks: %q is no block of addresses such as 10.0.0.0/8", s)
		}
		out = append(out, p.Masked())
	}
	return out, nil
}

// breakerMoved logs what becomes of a provider.
func (v *server) breakerMoved(name, model string, open bool) {
	word := "closed"
	if open {
		word = "open"
	}
	v.metrics.breaker(v.ctx, name, word)
	daemon.Logger(v.ctx).Warn("breaker of a provider", "provider", name, "model", model, "state", word)
}

// barred reports whether the request may not go to an endpoint, by what is known
// of its tags now. The router has looked at them when it decided; that may be a
// failed attempt ago.
func (x *exchange) barred(endpoint *routerv1.Endpoint) bool {
	if len(endpoint.GetBars()) == 0 {
		return false
	}
	tags := x.policyRequest().Tags
	for _, b := range endpoint.GetBars() {
		bar := policy.Bar{All: b.GetAll(), Any: b.GetAny(), None: b.GetNone(), Assumed: b.GetAssumed()}
		if bar.Holds(tags) {
			daemon.Logger(x.server.ctx).Error("request was kept from a provider at the last moment", "request_id", x.id, "provider", endpoint.GetProvider())
			x.metrics.breaker(x.server.ctx, endpoint.GetProvider(), "barred")
			return true
		}
	}
	return false
}

// unsent notes that an endpoint was passed over.
func (x *exchange) unsent(endpoint *routerv1.Endpoint) {
	x.attempts--
	x.metrics.breaker(x.server.ctx, endpoint.GetProvider(), "skipped")
	daemon.Logger(x.server.ctx).Debug("provider was passed over", "request_id", x.id, "provider", endpoint.GetProvider(), "err", x.result.Cause)
}

// providerOf is the provider behind an endpoint, nil for a worker.
func (x *exchange) providerOf(endpoint *routerv1.Endpoint, body []byte) (*proxy.Provider, error) {
	if endpoint.GetProvider() == "" {
		return nil, nil
	}
	object := new(openai.Object)
	if err := object.Parse(body, x.MaxDepth); err != nil {
		return nil, err
	}
	t := endpoint.GetTarget()
	p := &proxy.Provider{
		Name: endpoint.GetProvider(),
		Target: provider.Target{
			Schema: v1alpha1.ProviderSchema(t.GetSchema()), Endpoint: t.GetEndpoint(), Region: t.GetRegion(), Model: endpoint.GetUpstreamModel(),
			MaxTokensCap: int(min(t.GetMaxTokensCap(), 1<<30)),
		},
		FirstByte: t.GetFirstByte().AsDuration(), Idle: t.GetIdle().AsDuration(), Total: t.GetTotal().AsDuration(), Concurrency: int(min(t.GetConcurrency(), 1<<30)),
		Call: provider.Call{Route: x.req.Route, Body: object, Stream: x.req.Stream, Model: x.req.Model, ID: x.unique, Created: time.Now().Unix()},
	}
	if x.messages != nil && p.Target.Schema == v1alpha1.SchemaAnthropic {
		p.Call.Messages = &x.messages.Body
		p.Call.Version, p.Call.Beta = x.r.Header.Get("Anthropic-Version"), strings.Join(x.r.Header.Values("Anthropic-Beta"), ",")
	}
	if t == nil { // from a router that is a version behind
		p.Target.Schema, p.Target.Endpoint = v1alpha1.SchemaOpenAICompatible, strings.TrimRight(endpoint.GetUrl(), "/")+"/v1"
	}
	if p.Target.Model == "" {
		p.Target.Model = x.req.Model
	}
	switch secret := t.GetSecret(); {
	case t.GetWorkloadIdentity():
		p.Credentials = func(ctx context.Context) (provider.Credentials, error) { return x.podCredentials(ctx, p) }
	case secret != "":
		p.Credentials = func(ctx context.Context) (provider.Credentials, error) {
			keys, err := x.leaving.secret(ctx, secret)
			if err != nil || p.Target.Schema != v1alpha1.SchemaDatabricks || keys.APIKey != "" || keys.ClientID == "" {
				return keys, err
			}
			return x.leaving.tokens.Databricks(ctx, x.proxy.Outside(p.Name), p.Target.Endpoint, keys)
		}
	}
	return p, nil
}
