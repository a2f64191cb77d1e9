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
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"log/slog"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kinference/kinference/internal/apikey"
	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
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

var (
	noBackend = &Refusal{Status: http.StatusNotFound, Code: "unknown_url", Reason: "no_backend", Message: "There is nothing at this host and path."}
	noTenant  = &Refusal{Status: http.StatusForbidden, Code: "no_tenant", Reason: "no_tenant", Message: "The credential is good, but belongs to no tenant here."}
	unbounded = &Refusal{Status: http.StatusServiceUnavailable, Code: "tenant_unavailable", Reason: "unbounded", RetryAfter: 5 * time.Second,
		Message: "The tenant's limits are not known at present. Try again later."}
	unchecked = &Refusal{Status: http.StatusServiceUnavailable, Code: "authentication_unavailable", Reason: "unavailable", RetryAfter: 5 * time.Second,
		Message: "Credentials of this kind cannot be checked at present. Try again later."}
	tooLarge = &Refusal{Status: http.StatusRequestHeaderFieldsTooLarge, Code: "headers_too_large", Reason: "headers", Message: "The headers of the request are too large."}
	starting = &Refusal{Status: http.StatusServiceUnavailable, Code: "service_unavailable", Reason: "starting", RetryAfter: time.Second,
		Message: "The gateway is starting. Try again later."}
)

// Settings of an Authenticator.
type Settings struct {
	// Review asks whose ServiceAccount token it is; nil: none is accepted.
	Review Reviewer
	// Proxy is trusted to tell who has a client certificate.
	Proxy Proxy
	// Closed serves nobody while there is no GatewayBackend.
	Closed bool
	// Log gets what is wrong with issuers, never anything of a credential.
	Log *slog.Logger
	// Now is the clock; nil: time.Now.
	Now func() time.Time
}

// Authenticator finds out who calls. Use New and Close.
type Authenticator struct {
	Settings
	issuers *keySets
	reviews *reviews
	tokens  cache[*verified]
	cancel  context.CancelFunc

	mu     sync.Mutex // held to make a directory
	dir    atomic.Pointer[directory]
	newest atomic.Pointer[directory]
}

// New returns an authenticator.
func New(ctx context.Context, s Settings) *Authenticator {
	if s.Now == nil {
		s.Now = time.Now
	}
	ctx, cancel := context.WithCancel(ctx)
	return &Authenticator{Settings: s, issuers: newKeySets(ctx, s.Log, s.Now), reviews: newReviews(s.Review, s.Now), cancel: cancel}
}

// Close ends what is under way.
func (a *Authenticator) Close() {
	a.cancel()
	a.issuers.close()
}

// directory is a view prepared for finding callers.
type directory struct {
	view   *catalog.View
	routes routes
	// By namespace.
	keys     map[string]keyring
	claims   map[string]map[claim]*catalog.Tenant
	accounts map[string]map[string]*catalog.Tenant
}

type claim struct{ issuer, name, value string }

// Announce tells of a view that will be in use soon: what it revokes is revoked at
// once, also for requests that come with an older view.
func (a *Authenticator) Announce(view *catalog.View) { a.newest.Store(newDirectory(view)) }

// withdrawn says why a key of an older view is not good any more; nil: it is.
func (a *Authenticator) withdrawn(d *directory, namespace, key string) *Refusal {
	n := a.newest.Load()
	if n == nil || n.view.Version <= d.view.Version || !n.view.Guarded {
		return nil
	}
	_, refusal := n.keys[namespace].find(a.Now(), key)
	return refusal
}

// directory returns that of a view. Requests come with the newest one, or the one
// before it.
func (a *Authenticator) directory(view *catalog.View) *directory {
	if d := a.dir.Load(); d != nil && d.view == view {
		return d
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	old := a.dir.Load()
	if old != nil && old.view == view {
		return old
	}
	d := a.newest.Load()
	announced := d != nil && d.view == view
	if !announced {
		d = newDirectory(view)
	}
	if old == nil || announced || old.view.Version < view.Version { // another router's numbers may be smaller
		a.dir.Store(d)
		uris := map[string]bool{}
		for _, b := range view.Backends {
			for _, j := range b.Message.GetJwt() {
				uris[j.GetJwksUri()] = true
			}
		}
		a.issuers.keep(uris)
		a.tokens.clear() // issuers and audiences may have changed
	}
	return d
}

func newDirectory(view *catalog.View) *directory {
	d := &directory{
		view: view, routes: newRoutes(view.Backends), keys: map[string]keyring{}, claims: map[string]map[claim]*catalog.Tenant{},
		accounts: map[string]map[string]*catalog.Tenant{},
	}
	for _, t := range view.Tenants() {
		ns := t.Namespace
		if d.keys[ns] == nil {
			d.keys[ns], d.claims[ns], d.accounts[ns] = keyring{}, map[claim]*catalog.Tenant{}, map[string]*catalog.Tenant{}
		}
		for _, k := range t.Message.GetKeys() {
			d.keys[ns][k.GetId()] = &keyEntry{t, k}
		}
		for _, c := range t.Message.GetClaims() {
			d.claims[ns][claim{c.GetIssuer(), c.GetName(), c.GetValue()}] = t
		}
		for _, name := range t.Message.GetServiceAccounts() {
			d.accounts[ns][name] = t
		}
	}
	return d
}

// Clean takes from a request what it must not have, and returns what a trusted
// proxy says about the client. It comes before anything reads a header.
func (a *Authenticator) Clean(r *http.Request) (account string, refusal *Refusal) {
	stripNamed(r.Header)
	account, refusal = a.Proxy.account(r)
	strip(r.Header)
	return account, refusal
}

// Caller finds out who sends a request, and cleans it first. path is the
// request's without the backend's prefix. The view is nil before the first one.
func (a *Authenticator) Caller(view *catalog.View, r *http.Request) (c *Caller, path string, refusal *Refusal) {
	size := sizeOf(r)
	account, refusal := a.Clean(r)
	switch {
	case refusal != nil:
		return nil, "", refusal
	case view == nil:
		return nil, "", starting
	case !view.Guarded && !a.Closed:
		return open, r.URL.Path, nil
	}
	d := a.directory(view)
	b, path := d.routes.find(r.Host, r.URL.Path)
	if b == nil {
		return nil, "", noBackend
	}
	if b.MaxHeader > 0 && size > b.MaxHeader {
		return nil, "", tooLarge
	}
	c, refusal = a.identify(r, d, b, account)
	if refusal != nil {
		return nil, "", refusal
	}
	if c.Tenant.Unbounded {
		return nil, "", unbounded
	}
	c.Backend, c.QoS = b, cmp.Or(c.Tenant.Message.GetQos(), b.DefaultQoS)
	return c, path, nil
}

// identify finds the tenant by the credential, or where there is none by what
// stands for it.
func (a *Authenticator) identify(r *http.Request, d *directory, b *catalog.Backend, account string) (*Caller, *Refusal) {
	text, refusal := credentialOf(r.Header)
	switch {
	case refusal != nil:
		return nil, refusal
	case text == "":
		return absent(d, b, account)
	case strings.HasPrefix(text, apikey.Prefix):
		if !b.Message.GetApiKeys() {
			return nil, because("method")
		}
		entry, refusal := d.keys[b.Namespace].find(a.Now(), text)
		if refusal == nil {
			refusal = a.withdrawn(d, b.Namespace, text)
		}
		if refusal != nil {
			return nil, refusal
		}
		return &Caller{Tenant: entry.tenant, User: entry.user(), KeyID: entry.key.GetId(), Method: APIKey}, nil
	}
	sum := hashOf(strconv.FormatUint(d.view.Version, 10), b.Name, text)
	if v, ok := a.tokens.get(a.Now(), sum); ok {
		return v.caller(d, b)
	}
	t := parseToken(text)
	if t == nil {
		return nil, because("malformed")
	}
	for _, issuer := range b.Message.GetJwt() {
		if issuer.GetIssuer() == t.issuer {
			v, refusal := a.verify(r.Context(), sum, t, issuer)
			if refusal != nil {
				return nil, refusal
			}
			return v.caller(d, b)
		}
	}
	if audience := b.Message.GetServiceAccountAudience(); audience != "" && a.Review != nil {
		return a.byAccount(r.Context(), d, b, t, audience)
	}
	return nil, because("method")
}

// absent is the caller without a credential: whom the proxy knows, or anybody.
func absent(d *directory, b *catalog.Backend, account string) (*Caller, *Refusal) {
	if account != "" && b.Message.GetServiceAccountAudience() != "" {
		if t := d.accounts[b.Namespace][account]; t != nil {
			return &Caller{Tenant: t, User: accountUser(account), Method: Mesh}, nil
		}
	}
	if b.Anonymous != nil {
		return &Caller{Tenant: b.Anonymous, Method: Anonymous}, nil
	}
	return nil, missing
}

// accountUser is the name of a ServiceAccount (namespace/name) as a user.
func accountUser(account string) string {
	return "system:serviceaccount:" + strings.Replace(account, "/", ":", 1)
}

func (a *Authenticator) byAccount(ctx context.Context, d *directory, b *catalog.Backend, t *token, audience string) (*Caller, *Refusal) {
	account, err := a.reviews.account(ctx, t, audience)
	switch {
	case err != nil:
		return nil, unchecked
	case account == "":
		return nil, because("review")
	}
	tenant := d.accounts[b.Namespace][account]
	if tenant == nil {
		return nil, noTenant
	}
	return &Caller{Tenant: tenant, User: accountUser(account), Method: ServiceAccount}, nil
}

// verify checks a token, and remembers for a while that it is good.
func (a *Authenticator) verify(ctx context.Context, sum [sha256.Size]byte, t *token, issuer *routerv1.JwtIssuer) (*verified, *Refusal) {
	now := a.Now()
	v, why, err := t.verify(ctx, now, issuer, a.issuers.set(issuer.GetJwksUri()))
	switch {
	case errors.Is(err, errToken):
		return nil, because(why)
	case err != nil:
		return nil, unchecked
	}
	until := now.Add(tokenKept)
	if v.expires.Before(until) {
		until = v.expires
	}
	a.tokens.put(now, sum, v, until)
	return v, nil
}

// caller is whom a good token is of.
func (v *verified) caller(d *directory, b *catalog.Backend) (*Caller, *Refusal) {
	var tenant *catalog.Tenant
	for _, value := range v.tenants {
		found := d.claims[b.Namespace][claim{v.issuer, v.claim, value}]
		if found != nil && tenant != nil && found != tenant {
			return nil, noTenant // a caller has one tenant
		}
		tenant = cmp.Or(found, tenant)
	}
	if tenant == nil {
		return nil, noTenant
	}
	return &Caller{Tenant: tenant, User: v.user, Method: JWT, Claims: v.claims}, nil
}

// tokenKept is how long a token that was checked is not checked again: a key that
// the issuer withdraws counts so much longer.
const tokenKept = time.Minute
