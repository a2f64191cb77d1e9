package identity

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"encoding/json"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-jose/go-jose/v4"
	"go.uber.org/goleak"

	"github.com/kinference/kinference/internal/apikey"
	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
	"github.com/kinference/kinference/services/ingress/internal/catalog"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// Keys are made once: a good RSA key takes its time.
var (
	rsaKey   = sync.OnceValue(func() *rsa.PrivateKey { return newRSA(2048) })
	otherRSA = sync.OnceValue(func() *rsa.PrivateKey { return newRSA(2048) })
	weakRSA  = sync.OnceValue(func() *rsa.PrivateKey { return newRSA(1024) })
	ecKey    = sync.OnceValue(func() *ecdsa.PrivateKey {
		k, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
		if err != nil {
			panic(err)
		}
		return k
	})
)

func newRSA(bits int) *rsa.PrivateKey {
	k, err := rsa.GenerateKey(rand.Reader, bits)
	if err != nil {
		panic(err)
	}
	return k
}

// issuer is a server of keys.
type issuer struct {
	*httptest.Server
	asked atomic.Int64
	mu    sync.Mutex
	body  []byte
	code  int
}

func newIssuer(t testing.TB, keys ...jose.JSONWebKey) *issuer {
	i := &issuer{code: http.StatusOK}
	i.set(t, keys...)
	i.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		i.asked.Add(1)
		i.mu.Lock()
		defer i.mu.Unlock()
		w.WriteHeader(i.code)
		_, _ = w.Write(i.body)
	}))
	t.Cleanup(i.Close)
	return i
}

func (i *issuer) set(t testing.TB, keys ...jose.JSONWebKey) {
	t.Helper()
	body, err := json.Marshal(jose.JSONWebKeySet{Keys: keys})
	if err != nil {
		t.Fatal(err)
	}
	i.answer(http.StatusOK, body)
}

func (i *issuer) answer(code int, body []byte) {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.code, i.body = code, body
}

const iss = "https://idp.example.com"

// sign makes a token with a key.
func sign(t testing.TB, alg jose.SignatureAlgorithm, key any, kid string, claims map[string]any) string {
	t.Helper()
	options := (&jose.SignerOptions{}).WithType("JWT")
	if kid != "" {
		options = options.WithHeader("kid", kid)
	}
	signer, err := jose.NewSigner(jose.SigningKey{Algorithm: alg, Key: key}, options)
	if err != nil {
		t.Fatal(err)
	}
	payload, err := json.Marshal(claims)
	if err != nil {
		t.Fatal(err)
	}
	object, err := signer.Sign(payload)
	if err != nil {
		t.Fatal(err)
	}
	text, err := object.CompactSerialize()
	if err != nil {
		t.Fatal(err)
	}
	return text
}

// good are the claims of a good token, changed by pairs.
func good(pairs ...any) map[string]any {
	c := map[string]any{"iss": iss, "sub": "alice", "aud": "kinference", "org": "search", "exp": clock.Add(time.Hour).Unix(), "iat": clock.Unix()}
	for i := 0; i < len(pairs); i += 2 {
		if pairs[i+1] == nil {
			delete(c, pairs[i].(string))
			continue
		}
		c[pairs[i].(string)] = pairs[i+1]
	}
	return c
}

// clock is the time of all tests.
var clock = time.Date(2026, 12, 1, 12, 0, 0, 0, time.UTC)

// world is a catalog with an authenticator.
type world struct {
	*Authenticator
	view    *catalog.View
	key     string // of ns/search
	keyID   string
	expired string
	revoked string
	idp     *issuer

	mu  sync.Mutex
	now time.Time
}

func (w *world) time() time.Time {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.now
}

func (w *world) pass(d time.Duration) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.now = w.now.Add(d)
}

// message is the catalog of the tests; idp is where the issuer's keys are.
func message(idp string, keys ...*routerv1.Key) *routerv1.Catalog {
	jwt := []*routerv1.JwtIssuer{{Issuer: iss, Audiences: []string{"kinference", "other"}, JwksUri: idp, TenantClaim: "org"}}
	return &routerv1.Catalog{
		Version: 1, Guarded: true,
		Backends: []*routerv1.Backend{
			{Name: "ns/keys", Hostnames: []string{"keys.example.com"}, PathPrefix: "/", ApiKeys: true, DefaultQos: "batch"},
			{Name: "ns/all", Hostnames: []string{"all.example.com", "*.wild.example.com"}, PathPrefix: "/", ApiKeys: true, Jwt: jwt, ServiceAccountAudience: "kinference"},
			{Name: "ns/team", Hostnames: []string{"all.example.com"}, PathPrefix: "/team/llm", ApiKeys: true, MaxHeader: 2000},
			{Name: "ns/anyone", Hostnames: []string{"anyone.example.com"}, PathPrefix: "/", ApiKeys: true, ServiceAccountAudience: "kinference", AnonymousTenant: "ns/dev"},
			{Name: "other/keys", Hostnames: []string{"other.example.com"}, PathPrefix: "/", ApiKeys: true},
		},
		Tenants: []*routerv1.Tenant{
			{Name: "ns/acme", Qos: "batch"},
			{
				Name: "ns/search", Parent: "ns/acme", Qos: "interactive", Keys: keys, ServiceAccounts: []string{"apps/frontend"},
				Claims: []*routerv1.ClaimIdentity{{Issuer: iss, Name: "org", Value: "search"}, {Issuer: "https://else.example.com", Name: "org", Value: "stolen"}},
			},
			{Name: "ns/ads", Claims: []*routerv1.ClaimIdentity{{Issuer: iss, Name: "org", Value: "ads"}, {Issuer: iss, Name: "sub", Value: "alice"}}},
			{Name: "ns/dev"},
			{Name: "ns/lost", Parent: "ns/gone", Claims: []*routerv1.ClaimIdentity{{Issuer: iss, Name: "org", Value: "lost"}}},
		},
	}
}

func newWorld(t testing.TB, settings Settings) *world {
	t.Helper()
	w := &world{now: clock}
	w.idp = newIssuer(t,
		jose.JSONWebKey{Key: rsaKey().Public(), KeyID: "rsa", Use: "sig"}, jose.JSONWebKey{Key: ecKey().Public(), KeyID: "ec", Algorithm: "ES256"},
		jose.JSONWebKey{Key: weakRSA().Public(), KeyID: "weak"}, jose.JSONWebKey{Key: otherRSA().Public(), KeyID: "enc", Use: "enc"},
		jose.JSONWebKey{Key: []byte(strings.Repeat("s", 32)), KeyID: "oct"},
	)
	var keys []*routerv1.Key
	add := func(change func(*routerv1.Key)) string {
		key, id := apikey.New()
		sum := apikey.Hash(key)
		k := &routerv1.Key{Id: id, Sha256: sum[:]}
		change(k)
		keys = append(keys, k)
		return key
	}
	w.key = add(func(k *routerv1.Key) { k.User = "bob"; w.keyID = k.Id })
	w.expired = add(func(k *routerv1.Key) { k.ExpiresUnix = clock.Unix() })
	w.revoked = add(func(k *routerv1.Key) { k.Revoked = true })
	w.view = catalog.New(message(w.idp.URL, keys...))
	if settings.Log == nil {
		settings.Log = slog.New(slog.DiscardHandler)
	}
	settings.Now = w.time
	w.Authenticator = New(context.Background(), settings)
	t.Cleanup(w.Close)
	return w
}

// request is one to a host, with headers in pairs.
func request(host string, pairs ...string) *http.Request {
	r := httptest.NewRequest(http.MethodPost, "/v1/chat/completions", nil)
	r.Host, r.RemoteAddr = host, "203.0.113.9:4711"
	for i := 0; i < len(pairs); i += 2 {
		r.Header.Add(pairs[i], pairs[i+1])
	}
	return r
}

// call is what became of a request: method and tenant, or status and reason.
func (w *world) call(r *http.Request) string {
	c, _, refusal := w.Caller(w.view, r)
	if refusal != nil {
		return http.StatusText(refusal.Status) + ": " + refusal.Reason
	}
	return string(c.Method) + " " + c.Name() + " " + c.User
}

func bearer(token string) []string { return []string{"Authorization", "Bearer " + token} }
