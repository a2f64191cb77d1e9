package identity

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/go-jose/go-jose/v4"
)

// Whatever headers come, nobody is let in but by one of the credentials, nothing
// that claims something is left, and nothing panics.
func FuzzHeaders(f *testing.F) {
	w := newWorld(f, Settings{Proxy: Proxy{Header: HeaderEnvoy, TrustDomain: "cluster.local"}})
	token := sign(f, jose.ES256, ecKey(), "ec", good())
	f.Add("Authorization", "Bearer "+w.key, "X-Api-Key", w.key, "all.example.com", "/v1/models")
	f.Add("Authorization", "Bearer "+token, "Connection", "Authorization", "all.example.com:80", "/team/llm/v1/models")
	f.Add("X-Forwarded-Client-Cert", `By=spiffe://a;URI="spiffe://cluster.local/ns/apps/sa/frontend"`, "l5d-client-id", "x", "[::1]:8080", "*")
	f.Add("X_Kinference_Tenant", "a", "x-tenant-id", "b", ".", "")
	f.Fuzz(func(t *testing.T, n1, v1, n2, v2, host, path string) {
		r := httptest.NewRequest(http.MethodGet, "/", nil)
		r.Host, r.URL.Path, r.RemoteAddr = host, path, "127.0.0.1:1"
		r.Header[http.CanonicalHeaderKey(n1)] = []string{v1}
		r.Header[n2] = append(r.Header[n2], v2)
		c, _, refusal := w.Caller(w.view, r)
		if (c == nil) == (refusal == nil) {
			t.Fatalf("caller %v, refusal %v", c, refusal)
		}
		for name := range r.Header {
			if isClaimed(plain(name)) && name != QoSHeader {
				t.Fatalf("%q is left", name)
			}
		}
		all := v1 + " " + v2
		if c == nil || c.Method == Anonymous || strings.Contains(all, w.key) || strings.Contains(all, token) ||
			c.Method == Mesh && strings.Contains(all, "spiffe://cluster.local/ns/apps/sa/frontend") {
			return
		}
		t.Fatalf("%q: %q, %q: %q made %+v", n1, v1, n2, v2, c)
	})
}

func FuzzToken(f *testing.F) {
	w := newWorld(f, Settings{})
	f.Add(sign(f, jose.ES256, ecKey(), "ec", good()))
	f.Add(sign(f, jose.RS256, rsaKey(), "", good("aud", []string{"a"}, "exp", nil)))
	f.Add("eyJhbGciOiJub25lIn0.e30.")
	f.Fuzz(func(t *testing.T, text string) {
		token := parseToken(text)
		if token == nil {
			return
		}
		if v, why, err := token.verify(t.Context(), clock, w.view.Backends[1].Message.GetJwt()[0], w.issuers.set(w.idp.URL)); (v == nil) != (err != nil) || (why == "") != (v != nil) && err == errToken {
			t.Fatalf("%+v, %q, %v", v, why, err)
		}
	})
}

// Finding out who calls must cost next to nothing beside a request.
//
//	go test ./services/ingress/internal/identity -run xxx -bench Authenticate
func BenchmarkAuthenticate(b *testing.B) {
	w := newWorld(b, Settings{})
	unknown := strings.Repeat("0", 10)
	token := sign(b, jose.RS256, rsaKey(), "rsa", good())
	for name, c := range map[string]struct{ host, credential string }{
		"APIKey": {"keys.example.com", w.key}, "JWTKnown": {"all.example.com", token}, "Malformed": {"keys.example.com", "kin_" + unknown}, "Anonymous": {"anyone.example.com", ""},
	} {
		b.Run(name, func(b *testing.B) {
			r := request(c.host, "Content-Type", "application/json", "User-Agent", "OpenAI/Python 2.1.0", "Accept", "application/json", "X-Stainless-Lang", "python")
			if c.credential != "" {
				r.Header.Set("Authorization", "Bearer "+c.credential)
			}
			b.ReportAllocs()
			for b.Loop() {
				w.Caller(w.view, r)
			}
		})
	}
	for name, key := range map[string]struct {
		alg jose.SignatureAlgorithm
		key any
		kid string
	}{"JWTRS256": {jose.RS256, rsaKey(), "rsa"}, "JWTES256": {jose.ES256, ecKey(), "ec"}} {
		b.Run(name, func(b *testing.B) {
			r := request("all.example.com", bearer(sign(b, key.alg, key.key, key.kid, good()))...)
			b.ReportAllocs()
			for b.Loop() {
				w.tokens.clear()
				w.Caller(w.view, r)
			}
		})
	}
}
