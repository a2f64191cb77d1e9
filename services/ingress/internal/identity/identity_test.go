package identity

import (
	"context"
	"crypto"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-jose/go-jose/v4"

	"github.com/kinference/kinference/internal/apikey"
	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
	"github.com/kinference/kinference/services/ingress/internal/catalog"
)

func TestAPIKeys(t *testing.T) {
	w := newWorld(t, Settings{})
	unknown, _ := apikey.New()
	changed := w.key[:20] + "x" + w.key[21:]
	if w.key[20] == 'x' {
		changed = w.key[:20] + "y" + w.key[21:]
	}
	for name, c := range map[string]struct {
		host    string
		headers []string
		want    string
	}{
		"bearer":           {"keys.example.com", bearer(w.key), "api_key ns/search bob"},
		"x-api-key":        {"keys.example.com", []string{"X-Api-Key", w.key}, "api_key ns/search bob"},
		"both, the same":   {"keys.example.com", append(bearer(w.key), "X-Api-Key", w.key), "api_key ns/search bob"},
		"lower-case":       {"keys.example.com", []string{"authorization", "bearer " + w.key}, "api_key ns/search bob"},
		"both, different":  {"keys.example.com", append(bearer(w.key), "X-Api-Key", unknown), "Unauthorized: two_credentials"},
		"good and bad":     {"anyone.example.com", append(bearer(w.key), "X-Api-Key", "no"), "Unauthorized: two_credentials"},
		"twice":            {"keys.example.com", append(bearer(w.key), bearer(w.key)...), "Bad Request: duplicate"},
		"twice, x-api-key": {"keys.example.com", []string{"X-Api-Key", w.key, "X-Api-Key", w.key}, "Bad Request: duplicate"},
		"joined":           {"keys.example.com", []string{"Authorization", "Bearer " + w.key + ", Bearer " + w.key}, "Unauthorized: malformed"},
		"none":             {"keys.example.com", nil, "Unauthorized: missing"},
		"empty":            {"keys.example.com", []string{"Authorization", ""}, "Unauthorized: malformed"},
		"basic":            {"keys.example.com", []string{"Authorization", "Basic dTpw"}, "Unauthorized: malformed"},
		"no scheme":        {"keys.example.com", []string{"Authorization", w.key}, "Unauthorized: malformed"},
		"unknown":          {"keys.example.com", bearer(unknown), "Unauthorized: unknown_key"},
		"checksum":         {"keys.example.com", bearer(changed), "Unauthorized: malformed"},
		"expired":          {"keys.example.com", bearer(w.expired), "Unauthorized: expired"},
		"revoked":          {"keys.example.com", bearer(w.revoked), "Unauthorized: revoked"},
		"other namespace":  {"other.example.com", bearer(w.key), "Unauthorized: unknown_key"},
		"long":             {"keys.example.com", bearer(strings.Repeat("k", 20000)), "Unauthorized: malformed"},
		"host unknown":     {"nothing.example.com", bearer(w.key), "Not Found: no_backend"},

		// What is wrong is never taken for nothing.
		"anonymous":                {"anyone.example.com", nil, "anonymous ns/dev "},
		"bad key, not anonymous":   {"anyone.example.com", bearer(unknown), "Unauthorized: unknown_key"},
		"no key, not anonymous":    {"anyone.example.com", bearer("none"), "Unauthorized: malformed"},
		"basic, not anonymous":     {"anyone.example.com", []string{"Authorization", "Basic dTpw"}, "Unauthorized: malformed"},
		"revoked, not anonymous":   {"anyone.example.com", bearer(w.revoked), "Unauthorized: revoked"},
		"duplicate, not anonymous": {"anyone.example.com", append(bearer(w.key), bearer(w.key)...), "Bad Request: duplicate"},
	} {
		if got := w.call(request(c.host, c.headers...)); got != c.want {
			t.Errorf("%s: %s, want %s", name, got, c.want)
		}
	}
}

// What a newer catalog revokes is revoked before that catalog is in use.
func TestAnnouncedRevocation(t *testing.T) {
	w := newWorld(t, Settings{})
	request := func() *http.Request { return request("keys.example.com", bearer(w.key)...) }
	if got := w.call(request()); got != "api_key ns/search bob" {
		t.Fatal(got)
	}
	newer := message(w.idp.URL)
	newer.Version = 2
	for _, k := range w.view.Tenant("ns/search").Message.GetKeys() {
		newer.Tenants[1].Keys = append(newer.Tenants[1].Keys, &routerv1.Key{Id: k.GetId(), Sha256: k.GetSha256(), Revoked: true})
	}
	w.Announce(catalog.New(newer))
	if got := w.call(request()); got != "Unauthorized: revoked" {
		t.Error(got)
	}
	w.Announce(catalog.New(message(w.idp.URL))) // an older one means nothing
	if got := w.call(request()); got != "api_key ns/search bob" {
		t.Error(got)
	}
}

// A caller has all that limits, usage and policies ask for.
func TestCaller(t *testing.T) {
	w := newWorld(t, Settings{})
	c, path, refusal := w.Caller(w.view, request("keys.example.com:8080", bearer(w.key)...))
	if refusal != nil {
		t.Fatal(refusal)
	}
	if c.KeyID != w.keyID || c.QoS != "interactive" || c.Organisation() != "ns/acme" || strings.Join(c.Tenants(), " ") != "ns/search ns/acme" ||
		strings.Join(c.Tenant.Short, " ") != "search acme" || c.Backend.Name != "ns/keys" || path != "/v1/chat/completions" || c.Claims != "" {
		t.Errorf("caller %+v at %s", c, path)
	}
	c, _, refusal = w.Caller(w.view, request("all.example.com", bearer(sign(t, jose.ES256, ecKey(), "ec", good("level", 3)))...))
	if refusal != nil {
		t.Fatal(refusal)
	}
	var claims map[string]any
	if err := json.Unmarshal([]byte(c.Claims), &claims); err != nil || claims["org"] != "search" || claims["level"] != 3.0 {
		t.Errorf("claims %s: %v", c.Claims, err)
	}
	if dev, _, _ := w.Caller(w.view, request("anyone.example.com")); dev.QoS != "interactive" || dev.User != "" {
		t.Errorf("anonymous %+v", dev)
	}
	var nobody *Caller
	if nobody.Name() != "" || nobody.Tenants() != nil || nobody.Organisation() != "" {
		t.Error("nobody is somebody")
	}
}

func TestOpen(t *testing.T) {
	w := newWorld(t, Settings{})
	w.view = catalog.New(&routerv1.Catalog{Version: 2})
	if got := w.call(request("any.example.com", bearer("whatever")...)); got != "open  " {
		t.Error(got)
	}
	// One that is broken keeps the gateway from being open.
	w.view = catalog.New(&routerv1.Catalog{Version: 3, Guarded: true})
	if got := w.call(request("any.example.com")); got != "Not Found: no_backend" {
		t.Error(got)
	}
	if got := w.call(request("any.example.com")); got != "Not Found: no_backend" {
		t.Error(got)
	}
	closed := newWorld(t, Settings{Closed: true})
	closed.view = catalog.New(&routerv1.Catalog{Version: 4})
	if got := closed.call(request("any.example.com")); got != "Not Found: no_backend" {
		t.Error(got)
	}
	if _, _, refusal := w.Caller(nil, request("any.example.com")); refusal.Status != http.StatusServiceUnavailable {
		t.Error(refusal)
	}
}

func TestTokens(t *testing.T) {
	w := newWorld(t, Settings{})
	none := func(header string) string {
		payload, _ := json.Marshal(good())
		return base64.RawURLEncoding.EncodeToString([]byte(header)) + "." + base64.RawURLEncoding.EncodeToString(payload) + "."
	}
	public := func(key crypto.PublicKey) []byte {
		der, err := x509.MarshalPKIXPublicKey(key)
		if err != nil {
			t.Fatal(err)
		}
		return pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: der})
	}
	ok := sign(t, jose.RS256, rsaKey(), "rsa", good())
	parts := strings.Split(ok, ".")
	other, _ := json.Marshal(good("org", "ads"))
	forged := parts[0] + "." + base64.RawURLEncoding.EncodeToString(other) + "." + parts[2]
	twice := func(claims string) string {
		signer, err := jose.NewSigner(jose.SigningKey{Algorithm: jose.ES256, Key: ecKey()}, (&jose.SignerOptions{}).WithHeader("kid", "ec"))
		if err != nil {
			t.Fatal(err)
		}
		object, err := signer.Sign([]byte(claims))
		if err != nil {
			t.Fatal(err)
		}
		text, _ := object.CompactSerialize()
		return text
	}
	embedded := func() string {
		signer, err := jose.NewSigner(jose.SigningKey{Algorithm: jose.RS256, Key: otherRSA()}, &jose.SignerOptions{EmbedJWK: true})
		if err != nil {
			t.Fatal(err)
		}
		payload, _ := json.Marshal(good())
		object, err := signer.Sign(payload)
		if err != nil {
			t.Fatal(err)
		}
		text, _ := object.CompactSerialize()
		return text
	}
	hour := int64(3600)
	for name, c := range map[string]struct{ token, want string }{
		"RS256":               {ok, "jwt ns/search " + iss + "#alice"},
		"ES256":               {sign(t, jose.ES256, ecKey(), "ec", good()), "jwt ns/search " + iss + "#alice"},
		"PS512":               {sign(t, jose.PS512, rsaKey(), "rsa", good()), "jwt ns/search " + iss + "#alice"},
		"no kid":              {sign(t, jose.RS256, rsaKey(), "", good()), "jwt ns/search " + iss + "#alice"},
		"audience in a list":  {sign(t, jose.ES256, ecKey(), "ec", good("aud", []string{"x", "other"})), "jwt ns/search " + iss + "#alice"},
		"tenant in a list":    {sign(t, jose.ES256, ecKey(), "ec", good("org", []any{"x", "ads", 3})), "jwt ns/ads " + iss + "#alice"},
		"just expired":        {sign(t, jose.ES256, ecKey(), "ec", good("exp", clock.Add(-leeway/2).Unix())), "jwt ns/search " + iss + "#alice"},
		"alg none":            {none(`{"alg":"none","typ":"JWT"}`), "Unauthorized: malformed"},
		"alg None":            {none(`{"alg":"None","kid":"rsa"}`), "Unauthorized: malformed"},
		"alg nOnE, signed":    {none(`{"alg":"nOnE"}`) + parts[2], "Unauthorized: malformed"},
		"no alg":              {none(`{"typ":"JWT"}`), "Unauthorized: malformed"},
		"HS with public key":  {sign(t, jose.HS256, public(rsaKey().Public()), "rsa", good()), "Unauthorized: malformed"},
		"HS with modulus":     {sign(t, jose.HS256, rsaKey().N.Bytes(), "rsa", good()), "Unauthorized: malformed"},
		"HS with a JWKS key":  {sign(t, jose.HS256, []byte(strings.Repeat("s", 32)), "oct", good()), "Unauthorized: malformed"},
		"other key":           {sign(t, jose.RS256, otherRSA(), "rsa", good()), "Unauthorized: signature"},
		"other key, no kid":   {sign(t, jose.RS256, otherRSA(), "", good()), "Unauthorized: signature"},
		"own key in header":   {embedded(), "Unauthorized: signature"},
		"key for encryption":  {sign(t, jose.RS256, otherRSA(), "enc", good()), "Unauthorized: unknown_kid"},
		"weak key":            {sign(t, jose.RS256, weakRSA(), "weak", good()), "Unauthorized: unknown_kid"},
		"RS with EC's kid":    {sign(t, jose.RS256, rsaKey(), "ec", good()), "Unauthorized: signature"},
		"forged":              {forged, "Unauthorized: signature"},
		"no signature":        {parts[0] + "." + parts[1] + ".", "Unauthorized: signature"},
		"expired":             {sign(t, jose.ES256, ecKey(), "ec", good("exp", clock.Add(-leeway).Unix())), "Unauthorized: expired"},
		"no exp":              {sign(t, jose.ES256, ecKey(), "ec", good("exp", nil)), "Unauthorized: expired"},
		"exp a string":        {sign(t, jose.ES256, ecKey(), "ec", good("exp", "tomorrow")), "Unauthorized: expired"},
		"exp huge":            {sign(t, jose.ES256, ecKey(), "ec", good("exp", 1e30)), "Unauthorized: expired"},
		"not yet valid":       {sign(t, jose.ES256, ecKey(), "ec", good("nbf", clock.Unix()+hour)), "Unauthorized: not_yet"},
		"nbf huge":            {sign(t, jose.ES256, ecKey(), "ec", good("nbf", 1e30)), "Unauthorized: not_yet"},
		"issued in future":    {sign(t, jose.ES256, ecKey(), "ec", good("iat", clock.Unix()+hour)), "Unauthorized: not_yet"},
		"wrong audience":      {sign(t, jose.ES256, ecKey(), "ec", good("aud", "elsewhere")), "Unauthorized: audience"},
		"no audience":         {sign(t, jose.ES256, ecKey(), "ec", good("aud", nil)), "Unauthorized: audience"},
		"wrong issuer":        {sign(t, jose.ES256, ecKey(), "ec", good("iss", "https://evil.example.com")), "Unauthorized: method"},
		"issuer with slash":   {sign(t, jose.ES256, ecKey(), "ec", good("iss", iss+"/")), "Unauthorized: method"},
		"tenant of other iss": {sign(t, jose.ES256, ecKey(), "ec", good("org", "stolen")), "Forbidden: no_tenant"},
		"no subject":          {sign(t, jose.ES256, ecKey(), "ec", good("sub", nil)), "Unauthorized: subject"},
		"line in subject":     {sign(t, jose.ES256, ecKey(), "ec", good("sub", "a\nb")), "Unauthorized: subject"},
		"no tenant claim":     {sign(t, jose.ES256, ecKey(), "ec", good("org", nil)), "Forbidden: no_tenant"},
		"tenant a number":     {sign(t, jose.ES256, ecKey(), "ec", good("org", 7)), "Forbidden: no_tenant"},
		"two tenants":         {sign(t, jose.ES256, ecKey(), "ec", good("org", []string{"search", "ads"})), "Forbidden: no_tenant"},
		"limits not known":    {sign(t, jose.ES256, ecKey(), "ec", good("org", "lost")), "Service Unavailable: unbounded"},
		"claim twice":         {twice(fmt.Sprintf(`{"iss":%q,"sub":"a","aud":"kinference","org":"search","org":"ads","exp":%d}`, iss, clock.Unix()+hour)), "Unauthorized: malformed"},
		"other case":          {twice(fmt.Sprintf(`{"iss":%q,"sub":"a","aud":"kinference","Org":"search","exp":%d}`, iss, clock.Unix()+hour)), "Forbidden: no_tenant"},
		"garbage":             {"a.b.c", "Unauthorized: malformed"},
		"five parts":          {"a.b.c.d.e", "Unauthorized: malformed"},
	} {
		if got := w.call(request("all.example.com", bearer(c.token)...)); got != c.want {
			t.Errorf("%s: %s, want %s", name, got, c.want)
		}
		// Nowhere does it become somebody who needs no credential.
		if got := w.call(request("anyone.example.com", bearer(c.token)...)); strings.HasPrefix(got, "anonymous") {
			t.Errorf("%s: %s", name, got)
		}
	}
	if n := w.idp.asked.Load(); n != 2 && n != 1 {
		t.Errorf("the issuer was asked %d times", n)
	}
}

// A flood of kids that nobody has has the issuer asked once in a while, and one
// new key is found by it.
func TestUnknownKids(t *testing.T) {
	w := newWorld(t, Settings{})
	flood := func(n int) {
		var wg sync.WaitGroup
		for i := range n {
			wg.Go(func() {
				token := sign(t, jose.ES256, ecKey(), fmt.Sprint("kid-", i), good())
				if got := w.call(request("all.example.com", bearer(token)...)); got != "Unauthorized: unknown_kid" {
					t.Error(got)
				}
			})
		}
		wg.Wait()
	}
	flood(300)
	if n := w.idp.asked.Load(); n != 1 {
		t.Errorf("%d requests to the issuer for 300 unknown kids, want 1", n)
	}
	// Those with a known one are served meanwhile.
	if got := w.call(request("all.example.com", bearer(sign(t, jose.ES256, ecKey(), "ec", good()))...)); !strings.HasPrefix(got, "jwt") {
		t.Error(got)
	}
	for range 3 {
		w.pass(jwksPause)
		flood(100)
	}
	if n := w.idp.asked.Load(); n != 4 {
		t.Errorf("%d requests after three pauses, want 4", n)
	}
	w.idp.set(t, jose.JSONWebKey{Key: ecKey().Public(), KeyID: "new"})
	token := sign(t, jose.ES256, ecKey(), "new", good())
	if got := w.call(request("all.example.com", bearer(token)...)); got != "Unauthorized: unknown_kid" {
		t.Error(got)
	}
	w.pass(jwksPause)
	if got := w.call(request("all.example.com", bearer(token)...)); !strings.HasPrefix(got, "jwt") {
		t.Error(got)
	}
	// The key that went is not believed any more.
	if got := w.call(request("all.example.com", bearer(sign(t, jose.RS256, rsaKey(), "rsa", good()))...)); got != "Unauthorized: unknown_kid" {
		t.Error(got)
	}
}

// An issuer that is away, or answers nonsense, locks out nobody whose key is
// known, and lets nobody in.
func TestIssuerAway(t *testing.T) {
	w := newWorld(t, Settings{})
	for name, answer := range map[string]struct {
		code int
		body string
	}{
		"fault": {500, ""}, "no JSON": {200, "<html>"}, "no keys": {200, `{"keys":[]}`}, "other": {200, `{}`}, "moved": {302, ""},
		"long": {200, `{"keys":[` + strings.Repeat(" ", jwksBytes) + `]}`}, "only secrets": {200, `{"keys":[{"kty":"oct","k":"c2VjcmV0"}]}`},
	} {
		fresh := newWorld(t, Settings{})
		fresh.idp.answer(answer.code, []byte(answer.body))
		for range 5 {
			if got := fresh.call(request("all.example.com", bearer(sign(t, jose.ES256, ecKey(), "ec", good()))...)); got != "Service Unavailable: unavailable" {
				t.Errorf("%s: %s", name, got)
			}
		}
		if n := fresh.idp.asked.Load(); n != 1 {
			t.Errorf("%s: asked %d times", name, n)
		}
	}
	token := func() []string {
		return bearer(sign(t, jose.ES256, ecKey(), "ec", good("exp", w.time().Add(time.Hour).Unix())))
	}
	if got := w.call(request("all.example.com", token()...)); !strings.HasPrefix(got, "jwt") {
		t.Fatal(got)
	}
	w.idp.answer(http.StatusInternalServerError, nil)
	w.pass(jwksLast - time.Minute)
	if got := w.call(request("all.example.com", token()...)); !strings.HasPrefix(got, "jwt") {
		t.Errorf("after a while: %s", got)
	}
	w.pass(time.Minute)
	if got := w.call(request("all.example.com", token()...)); got != "Service Unavailable: unavailable" {
		t.Errorf("after too long: %s", got)
	}
}

// Headers by which clients claim something are gone, however they are written.
func TestHeadersAreStripped(t *testing.T) {
	w := newWorld(t, Settings{})
	r := request("keys.example.com", "Authorization", "Bearer "+w.key, "X-Kinference-Tenant", "ns/ads", "X-Tenant-Id", "ads", "X-Maas-Username", "root", "X-Authz-User-Id", "root",
		"L5d-Client-Id", "frontend.apps.serviceaccount.identity.linkerd.cluster.local", "X-Forwarded-Client-Cert", "URI=spiffe://cluster.local/ns/apps/sa/frontend",
		"X-Gateway-Inference-Fairness-Id", "free", "X-Llm-D-Slo-Ttft-Ms", "9300000000000", "X-Forwarded-User", "root", "X-Data-Parallel-Rank", "3",
		"X-Kinference-Qos", "batch", "X-App", "search", "X-Smuggled", "1", "Connection", "X-Smuggled, keep-alive", "Connection", "x-other", "X-Other", "1", "Keep-Alive", "5")
	r.Header["X_Kinference_Tenant"] = []string{"ns/ads"}
	r.Header["x-tenant"] = []string{"ads"}
	r.Header["X_Kinference_Qos"] = []string{"interactive"}
	if got := w.call(r); got != "api_key ns/search bob" {
		t.Fatal(got)
	}
	for name := range r.Header {
		switch name {
		case "Authorization", "X-Kinference-Qos", "X-App", "Connection":
		default:
			t.Errorf("%s is still there", name)
		}
	}
}

// A credential that Connection names is for somebody else's hop.
func TestSmuggledByConnection(t *testing.T) {
	w := newWorld(t, Settings{Proxy: Proxy{Header: HeaderLinkerd, TrustDomain: "cluster.local"}})
	for name, r := range map[string]*http.Request{
		"credential": request("keys.example.com", "Authorization", "Bearer "+w.key, "Connection", "authorization"),
		"second one": request("keys.example.com", "Authorization", "Bearer "+w.key, "Connection", "close", "Connection", "keep-alive ,\tAuthorization"),
	} {
		if got := w.call(r); got != "Unauthorized: missing" {
			t.Errorf("%s: %s", name, got)
		}
	}
	r := request("all.example.com", HeaderLinkerd, "frontend.apps.serviceaccount.identity.linkerd.cluster.local", "Connection", HeaderLinkerd)
	r.RemoteAddr = "127.0.0.1:999"
	if got := w.call(r); got != "Unauthorized: missing" {
		t.Errorf("identity of a proxy: %s", got)
	}
}

func TestMesh(t *testing.T) {
	const name, uri = "frontend.apps.serviceaccount.identity.linkerd.cluster.local", "spiffe://cluster.local/ns/apps/sa/frontend"
	unknown, _ := apikey.New()
	for title, c := range map[string]struct {
		header, peer, host string
		headers            []string
		want               string
	}{
		"linkerd":             {HeaderLinkerd, "127.0.0.1:1", "all.example.com", []string{HeaderLinkerd, name}, "mesh ns/search system:serviceaccount:apps:frontend"},
		"linkerd over IPv6":   {HeaderLinkerd, "[::1]:1", "all.example.com", []string{HeaderLinkerd, uri}, "mesh ns/search system:serviceaccount:apps:frontend"},
		"envoy":               {HeaderEnvoy, "127.0.0.1:1", "all.example.com", []string{HeaderEnvoy, "By=spiffe://x;Hash=ab;URI=" + uri}, "mesh ns/search system:serviceaccount:apps:frontend"},
		"not from here":       {HeaderLinkerd, "10.0.0.7:1", "all.example.com", []string{HeaderLinkerd, name}, "Unauthorized: missing"},
		"no flag":             {"", "127.0.0.1:1", "all.example.com", []string{HeaderLinkerd, name}, "Unauthorized: missing"},
		"other header":        {HeaderEnvoy, "127.0.0.1:1", "all.example.com", []string{HeaderLinkerd, name}, "Unauthorized: missing"},
		"other domain":        {HeaderLinkerd, "127.0.0.1:1", "all.example.com", []string{HeaderLinkerd, "frontend.apps.serviceaccount.identity.linkerd.evil.local"}, "Unauthorized: missing"},
		"domain at the end":   {HeaderLinkerd, "127.0.0.1:1", "all.example.com", []string{HeaderLinkerd, "frontend.apps.serviceaccount.identity.linkerd.x.cluster.local"}, "Unauthorized: missing"},
		"uri of other domain": {HeaderLinkerd, "127.0.0.1:1", "all.example.com", []string{HeaderLinkerd, "spiffe://evil/ns/apps/sa/frontend"}, "Unauthorized: missing"},
		"uri with more":       {HeaderLinkerd, "127.0.0.1:1", "all.example.com", []string{HeaderLinkerd, uri + "/x"}, "Unauthorized: missing"},
		"two hops":            {HeaderEnvoy, "127.0.0.1:1", "all.example.com", []string{HeaderEnvoy, "URI=spiffe://cluster.local/ns/a/sa/b,URI=" + uri}, "Unauthorized: missing"},
		"two uris":            {HeaderEnvoy, "127.0.0.1:1", "all.example.com", []string{HeaderEnvoy, "URI=" + uri + ";URI=" + uri}, "Unauthorized: missing"},
		"twice":               {HeaderLinkerd, "127.0.0.1:1", "all.example.com", []string{HeaderLinkerd, name, HeaderLinkerd, name}, "Bad Request: duplicate"},
		"not for accounts":    {HeaderLinkerd, "127.0.0.1:1", "keys.example.com", []string{HeaderLinkerd, name}, "Unauthorized: missing"},
		"of no tenant":        {HeaderLinkerd, "127.0.0.1:1", "anyone.example.com", []string{HeaderLinkerd, "x.y.serviceaccount.identity.linkerd.cluster.local"}, "anonymous ns/dev "},
		"with a bad key":      {HeaderLinkerd, "127.0.0.1:1", "all.example.com", []string{HeaderLinkerd, name, "X-Api-Key", unknown}, "Unauthorized: unknown_key"},
	} {
		w := newWorld(t, Settings{Proxy: Proxy{Header: c.header, TrustDomain: "cluster.local"}})
		r := request(c.host, c.headers...)
		r.RemoteAddr = c.peer
		if got := w.call(r); got != c.want {
			t.Errorf("%s: %s, want %s", title, got, c.want)
		}
	}
}

// A proxy in the same Pod may connect from the Pod's own address.
func TestMeshFromOwnAddress(t *testing.T) {
	w := newWorld(t, Settings{Proxy: Proxy{Header: HeaderLinkerd, TrustDomain: "cluster.local"}})
	for peer, want := range map[string]string{"10.1.2.3:5": "mesh ns/search system:serviceaccount:apps:frontend", "10.1.2.4:5": "Unauthorized: missing", "nonsense": "Unauthorized: missing"} {
		r := request("all.example.com", HeaderLinkerd, "frontend.apps.serviceaccount.identity.linkerd.cluster.local")
		r.RemoteAddr = peer
		r = r.WithContext(context.WithValue(r.Context(), http.LocalAddrContextKey, &net.TCPAddr{IP: net.IPv4(10, 1, 2, 3), Port: 8080}))
		if got := w.call(r); got != want {
			t.Errorf("%s: %s, want %s", peer, got, want)
		}
	}
}

func TestServiceAccounts(t *testing.T) {
	var asked atomic.Int64
	var fail atomic.Bool
	w := newWorld(t, Settings{Review: func(_ context.Context, token, audience string) (string, error) {
		asked.Add(1)
		switch {
		case fail.Load():
			return "", errors.New("away")
		case audience != "kinference":
			return "", nil
		}
		parsed := parseToken(token)
		var c struct {
			Sub string `json:"sub"`
		}
		if err := parsed.signed.UnsafeClaimsWithoutVerification(&c); err != nil {
			return "", err
		}
		return c.Sub, nil
	}})
	token := func(account string, pairs ...any) string {
		return sign(t, jose.RS256, otherRSA(), "cluster", good(append([]any{"iss", "https://kubernetes.default.svc", "sub", account, "exp", w.time().Add(time.Hour).Unix()}, pairs...)...))
	}
	call := func(token string) string { return w.call(request("all.example.com", bearer(token)...)) }
	front := token("apps/frontend")
	for range 5 {
		if got := call(front); got != "service_account ns/search system:serviceaccount:apps:frontend" {
			t.Fatal(got)
		}
	}
	if n := asked.Load(); n != 1 {
		t.Errorf("reviewed %d times, want 1", n)
	}
	if got := call(token("apps/backend")); got != "Forbidden: no_tenant" {
		t.Error(got)
	}
	bad := token("")
	for range 5 {
		if got := call(bad); got != "Unauthorized: review" {
			t.Error(got)
		}
	}
	before := asked.Load()
	for name, useless := range map[string]string{"expired": token("apps/frontend", "exp", clock.Unix()-1), "audience": token("apps/frontend", "aud", "elsewhere"), "none": token("apps/frontend", "exp", nil)} {
		if got := call(useless); got != "Unauthorized: review" {
			t.Errorf("%s: %s", name, got)
		}
	}
	if asked.Load() != before {
		t.Error("tokens that are of no use by their own word were reviewed")
	}
	fail.Store(true)
	if got := call(token("apps/frontend", "jti", "2")); got != "Service Unavailable: unavailable" {
		t.Error(got)
	}
	if got := call(front); !strings.HasPrefix(got, "service_account") {
		t.Errorf("remembered: %s", got)
	}
	w.pass(reviewKept)
	if got := call(front); got != "Service Unavailable: unavailable" {
		t.Errorf("not remembered for ever: %s", got)
	}
}

// Reviews of many tokens do not all go to the Kubernetes API at once, and those of
// one token only once.
func TestReviewsAreBounded(t *testing.T) {
	release := make(chan struct{})
	var now, most atomic.Int64
	w := newWorld(t, Settings{Review: func(context.Context, string, string) (string, error) {
		n := now.Add(1)
		for m := most.Load(); n > m && !most.CompareAndSwap(m, n); m = most.Load() {
		}
		<-release
		now.Add(-1)
		return "apps/frontend", nil
	}})
	var wg sync.WaitGroup
	var busy atomic.Int64
	for i := range 100 {
		token := sign(t, jose.ES256, ecKey(), "", good("iss", "k8s", "jti", i))
		wg.Go(func() {
			if strings.HasPrefix(w.call(request("all.example.com", bearer(token)...)), "Service Unavailable") {
				if busy.Add(1) == 100-maxReviews {
					close(release)
				}
			}
		})
	}
	wg.Wait()
	if most.Load() > maxReviews {
		t.Errorf("%d reviews at once", most.Load())
	}
}

// Requests with one token at the same time have it reviewed once.
func TestOneReview(t *testing.T) {
	release := make(chan struct{})
	var asked, arrived atomic.Int64
	w := newWorld(t, Settings{Review: func(context.Context, string, string) (string, error) {
		asked.Add(1)
		<-release
		return "apps/frontend", nil
	}})
	token := sign(t, jose.ES256, ecKey(), "", good("iss", "k8s"))
	var wg sync.WaitGroup
	for range 30 {
		wg.Go(func() {
			if arrived.Add(1) == 30 {
				close(release)
			}
			if got := w.call(request("all.example.com", bearer(token)...)); !strings.HasPrefix(got, "service_account") {
				t.Error(got)
			}
		})
	}
	wg.Wait()
	if asked.Load() != 1 {
		t.Errorf("reviewed %d times", asked.Load())
	}
}

// A client that leaves does not end the review that others wait for.
func TestReviewGoesOn(t *testing.T) {
	begun, release := make(chan struct{}, 2), make(chan struct{})
	w := newWorld(t, Settings{Review: func(ctx context.Context, _, _ string) (string, error) {
		begun <- struct{}{}
		select {
		case <-release:
			return "apps/frontend", nil
		case <-ctx.Done():
			return "", ctx.Err()
		}
	}})
	r := func() *http.Request {
		return request("all.example.com", bearer(sign(t, jose.RS256, otherRSA(), "", good("iss", "k8s")))...)
	}
	ctx, leave := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() { w.call(r().WithContext(ctx)) })
	<-begun
	leave()
	wg.Go(func() {
		if got := w.call(r()); !strings.HasPrefix(got, "service_account") {
			t.Error(got)
		}
	})
	close(release)
	wg.Wait()
	if len(begun) > 0 {
		t.Error("reviewed twice")
	}
}

// A catalog of another router may have a smaller number, and is in use nevertheless.
func TestSmallerVersion(t *testing.T) {
	w := newWorld(t, Settings{})
	w.Announce(w.view)
	w.directory(w.view)
	older := message(w.idp.URL)
	older.Version = 0
	view := catalog.New(older)
	w.Announce(view)
	d := w.directory(view)
	w.Announce(catalog.New(older)) // which is not in use yet
	if w.directory(view) != d {
		t.Error("each request makes a directory of its own")
	}
}

func TestRoutes(t *testing.T) {
	w := newWorld(t, Settings{})
	for url, want := range map[string]string{
		"http://all.example.com/v1/models":              "ns/all /v1/models",
		"http://ALL.example.com:8443/v1/models":         "ns/all /v1/models",
		"http://all.example.com./v1/models":             "ns/all /v1/models",
		"http://all.example.com/team/llm/v1/models":     "ns/team /v1/models",
		"http://all.example.com/team/llm":               "ns/team ",
		"http://all.example.com/team/llmx/v1/models":    "ns/all /team/llmx/v1/models",
		"http://all.example.com/team/v1/models":         "ns/all /team/v1/models",
		"http://all.example.com/Team/llm/v1/models":     "ns/all /Team/llm/v1/models",
		"http://x.wild.example.com/v1/models":           "ns/all /v1/models",
		"http://x.y.wild.example.com/v1/models":         "no_backend",
		"http://wild.example.com/v1/models":             "no_backend",
		"http://.wild.example.com/v1/models":            "no_backend",
		"http://all.example.com.evil.example/v1/models": "no_backend",
	} {
		r := httptest.NewRequest(http.MethodGet, url, nil)
		r.Header.Set("X-Api-Key", w.key)
		c, path, refusal := w.Caller(w.view, r)
		got := ""
		if refusal != nil {
			got = refusal.Reason
		} else {
			got = c.Backend.Name + " " + path
		}
		if got != want {
			t.Errorf("%s: %q, want %q", url, got, want)
		}
	}
	r := httptest.NewRequest(http.MethodGet, "http://all.example.com/team/llm/v1/models", nil)
	r.Header.Set("X-Api-Key", w.key)
	r.Header.Set("X-Long", strings.Repeat("x", 2000))
	if got := w.call(r); got != "Request Header Fields Too Large: headers" {
		t.Error(got)
	}
}

// Whatever is wrong with a key, the caller is told the same.
func TestNoOracle(t *testing.T) {
	w := newWorld(t, Settings{})
	unknown, _ := apikey.New()
	first := ""
	for name, credential := range map[string]string{
		"unknown": unknown, "expired": w.expired, "revoked": w.revoked, "malformed": "kin_x", "token": "a.b.c", "signature": sign(t, jose.RS256, otherRSA(), "rsa", good()),
		"audience": sign(t, jose.ES256, ecKey(), "ec", good("aud", "x")), "issuer": sign(t, jose.ES256, ecKey(), "ec", good("iss", "x")),
	} {
		_, _, r := w.Caller(w.view, request("all.example.com", bearer(credential)...))
		text := fmt.Sprint(r.Status, r.Code, r.Message, r.RetryAfter)
		if first == "" {
			first = text
		}
		if text != first {
			t.Errorf("%s: %s, want %s", name, text, first)
		}
		if strings.Contains(r.Error(), credential) {
			t.Errorf("%s: the refusal shows the credential", name)
		}
	}
}
