package ingress

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"connectrpc.com/connect"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	"github.com/kinference/kinference/internal/daemon"
	"github.com/kinference/kinference/internal/openai"
	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
	"github.com/kinference/kinference/services/ingress/internal/catalog"
	"github.com/kinference/kinference/services/ingress/internal/identity"
	"github.com/kinference/kinference/services/ingress/internal/salt"
)

// identifying is what callers are known by.
type identifying struct {
	*identity.Authenticator
	salts salt.Secret
	calls metric.Int64Counter
	said  atomic.Int64 // when a review failed, as logged: anybody can make one fail
}

// startIdentity makes what callers are known by.
func (v *server) startIdentity(ctx context.Context) (stop func(), err error) {
	log := daemon.Logger(v.ctx)
	i := &v.identity
	if i.calls, err = daemon.Meter(v.ctx).Int64Counter("kinference.ingress.authentications", metric.WithUnit("{request}"),
		metric.WithDescription("Requests by how their caller is known (method), or by why they were refused (reason).")); err != nil {
		return nil, err
	}
	if v.CacheSaltFile != "" {
		if i.salts, err = salt.Read(v.CacheSaltFile); err != nil {
			return nil, err
		}
	} else {
		i.salts = salt.New()
		log.Info("cache salts are of this process alone: tenants find nothing that another ingress, or this one before, left in a prefix cache; give all the same cache-salt-file")
	}
	i.Authenticator = identity.New(ctx, identity.Settings{
		Review: v.review, Proxy: identity.Proxy{Header: v.TrustedProxyHeader, TrustDomain: v.TrustDomain}, Closed: v.RequireBackend, Log: log,
	})
	return i.Close, nil
}

// review asks the router, which asks Kubernetes, whose token it is.
func (v *server) review(ctx context.Context, token, audience string) (string, error) {
	answer, err := v.router.ReviewToken(ctx, &routerv1.ReviewTokenRequest{Token: token, Audience: audience})
	switch {
	case connect.CodeOf(err) == connect.CodeFailedPrecondition:
		v.noteReview("the router does not use the Kubernetes API")
		return "", nil
	case err != nil:
		v.noteReview(connect.CodeOf(err).String())
		return "", errors.New("not reviewed") // what the cause says of the token nobody shall see
	case !answer.GetAuthenticated() || answer.GetName() == "":
		return "", nil
	}
	return answer.GetNamespace() + "/" + answer.GetName(), nil
}

// noteReview says once in a while why tokens of ServiceAccounts are not reviewed.
func (v *server) noteReview(why string) {
	now, last := time.Now().Unix(), v.identity.said.Load()
	if now-last >= 60 && v.identity.said.CompareAndSwap(last, now) {
		daemon.Logger(v.ctx).Warn("tokens of ServiceAccounts are not reviewed", "reason", why)
	}
}

// sayWhoMayCall says once which it is: open to everybody, or not.
func (v *server) sayWhoMayCall(before, now *catalog.View) {
	if before != nil && before.Guarded == now.Guarded {
		return
	}
	log := daemon.Logger(v.ctx)
	switch {
	case now.Guarded:
		log.Info("only callers that a GatewayBackend admits are served")
	case v.RequireBackend:
		log.Warn("nobody is served: there is no GatewayBackend, and one is required")
	default:
		log.Warn("the gateway is open to everybody who reaches it: there is no GatewayBackend")
	}
}

// admission is who sends a request, and under which catalog it is served from
// beginning to end.
type admission struct {
	view   *catalog.View
	caller *identity.Caller
	path   string // without the backend's prefix
}

// byMethod labels callers by how they are known.
var byMethod = func() map[identity.Method]metric.MeasurementOption {
	out := map[identity.Method]metric.MeasurementOption{}
	for _, m := range []identity.Method{identity.Open, identity.Anonymous, identity.APIKey, identity.JWT, identity.ServiceAccount, identity.Mesh} {
		out[m] = metric.WithAttributeSet(attribute.NewSet(attribute.String("method", string(m))))
	}
	return out
}()

// admit finds out who calls. What is wrong has been answered when it is nil.
func (v *server) admit(w http.ResponseWriter, r *http.Request) *admission {
	view := v.view.Load()
	caller, path, refusal := v.identity.Caller(view, r)
	if refusal != nil {
		v.identity.calls.Add(v.ctx, 1, metric.WithAttributes(attribute.String("reason", refusal.Reason)))
		w.Header().Set("X-Request-Id", v.requestID(r))
		if refusal.Status == http.StatusUnauthorized {
			w.Header().Set("WWW-Authenticate", `Bearer realm="kinference"`)
		}
		writeError(w, refuse(refusal))
		return nil
	}
	v.identity.calls.Add(v.ctx, 1, byMethod[caller.Method])
	return &admission{view, caller, path}
}

// named is what the caller may use under a name; nil for nothing.
func (a *admission) named(name string) *catalog.Model {
	if b := a.caller.Backend; b != nil {
		return b.Model(name)
	}
	return a.view.Model(name)
}

// offered are all models that the caller may use, by name.
func (a *admission) offered() []*catalog.Model {
	if b := a.caller.Backend; b != nil {
		return b.Models
	}
	return a.view.Models
}

// maxBody is how long a body may be.
func (x *exchange) maxBody() int64 {
	if b := x.caller.Backend; b != nil && b.MaxBody > 0 {
		return min(b.MaxBody, x.MaxBody)
	}
	return x.MaxBody
}

// totalTimeout and idleTimeout are the shorter ones of the gateway's and the
// backend's.
func (x *exchange) totalTimeout() time.Duration {
	if b := x.caller.Backend; b != nil && b.Total > 0 {
		return min(b.Total, x.TotalTimeout)
	}
	return x.TotalTimeout
}

func (x *exchange) idleTimeout() time.Duration {
	if b := x.caller.Backend; b != nil && b.Idle > 0 {
		return min(b.Idle, x.IdleTimeout)
	}
	return x.IdleTimeout
}

// pool is the one that the caller's backend names; empty while the gateway is
// open.
func (a *admission) pool() string {
	if b := a.caller.Backend; b != nil {
		return b.Pool
	}
	return ""
}

// qos is the caller's class of service, or the lower one that the client asks
// for.
func (x *exchange) qos() (string, *openai.Error) {
	asked := x.r.Header.Get(identity.QoSHeader)
	if asked == "" {
		return x.caller.QoS, nil
	}
	i := slices.Index(classes, asked)
	if i < 0 {
		return "", openai.Invalid("", "invalid_qos", "The header "+identity.QoSHeader+" must be one of "+strings.Join(classes, ", ")+".")
	}
	return classes[max(i, slices.Index(classes, x.caller.QoS))], nil
}

// saltCache puts a tenant's salt in the place of the client's, in the body that
// engines get and in the hashes of blocks alike. Those of an open gateway keep
// their own.
func (x *exchange) saltCache() {
	t := x.caller.Tenant
	if t == nil {
		return
	}
	scope := t.Message.GetCacheScope()
	group, shared := strings.CutPrefix(scope, "Shared:")
	switch {
	case shared:
		x.salt = x.identity.salts.Salt("Shared", t.Namespace, group)
	case scope == "User":
		x.salt = x.identity.salts.Salt("User", t.Name, x.caller.User)
	default:
		x.salt = x.identity.salts.Salt("Tenant", t.Name)
	}
	x.req.CacheSalt = x.salt
}

// refuse makes a refusal an error, which is told in the client's dialect.
func refuse(r *identity.Refusal) *openai.Error {
	e := &openai.Error{Status: r.Status, Type: openai.TypeInvalidRequest, Code: r.Code, Message: r.Message, RetryAfter: r.RetryAfter}
	switch {
	case r.Status >= 500:
		e.Type = openai.TypeOverloaded
	case r.Status == http.StatusForbidden:
		e.Type = "permission_error"
	case r.Status == http.StatusUnauthorized:
		e.Type = "authentication_error"
	}
	return e
}

// KeepCacheSalt makes the file that CacheSaltFile names, with a random secret, unless
// it is there.
func KeepCacheSalt(path string) error { return salt.Keep(path) }

// validateIdentity checks the settings about callers.
func (c *Config) validateIdentity() error {
	switch strings.ToLower(c.TrustedProxyHeader) {
	case "", identity.HeaderLinkerd, identity.HeaderEnvoy:
		return nil
	}
	return fmt.Errorf("trusted-proxy-header: want %s or %s", identity.HeaderLinkerd, identity.HeaderEnvoy)
}
