package identity

import (
	"context"
	"encoding/json"
	"errors"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/go-jose/go-jose/v4"
	josejson "github.com/go-jose/go-jose/v4/json" // refuses what is given twice
	"github.com/go-jose/go-jose/v4/jwt"

	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
)

// algorithms are those that signatures may be made with: with a key that the
// issuer alone has. What the token itself says decides nothing else.
var algorithms = []jose.SignatureAlgorithm{
	jose.RS256, jose.RS384, jose.RS512, jose.PS256, jose.PS384, jose.PS512, jose.ES256, jose.ES384, jose.ES512, jose.EdDSA,
}

// leeway is how far clocks may be apart.
const leeway = 30 * time.Second

// maxSubject bounds the name of a user in bytes.
const maxSubject = 512

// token is a JSON Web Token that nobody has checked yet.
type token struct {
	text   string
	signed *jwt.JSONWebToken
	// What it claims about itself.
	issuer    string
	audiences []string
	expires   time.Time
}

// parseToken reads a token without believing it; nil if it is none.
func parseToken(text string) *token {
	if strings.Count(text, ".") != 2 {
		return nil
	}
	signed, err := jwt.ParseSigned(text, algorithms)
	if err != nil || len(signed.Headers) != 1 {
		return nil
	}
	var c claims
	if signed.UnsafeClaimsWithoutVerification(&c) != nil {
		return nil
	}
	return &token{text: text, signed: signed, issuer: c.Issuer, audiences: c.Audience, expires: at(c.Expires)}
}

// claims are those that every token is held against.
type claims struct {
	Issuer    string          `json:"iss"`
	Subject   string          `json:"sub"`
	Audience  jwt.Audience    `json:"aud"`
	Expires   josejson.Number `json:"exp"`
	NotBefore josejson.Number `json:"nbf"`
	IssuedAt  josejson.Number `json:"iat"`
}

// at is a time in a token; zero if it is not given or no time.
func at(n josejson.Number) time.Time {
	f, err := n.Float64()
	if err != nil || !(math.Abs(f) < 1<<40) {
		return time.Time{}
	}
	return time.Unix(int64(f), 0)
}

// verified is what a good token says.
type verified struct {
	issuer  string
	user    string
	claim   string   // that says the tenant
	tenants []string // its values
	claims  string
	expires time.Time
}

var errToken = errors.New("the token is not good")

// verify checks a token against an issuer. The error is errToken, with a word
// that says why in the refusal, or says that the issuer's keys are not known.
func (t *token) verify(ctx context.Context, now time.Time, issuer *routerv1.JwtIssuer, keys *keySet) (*verified, string, error) {
	if t.issuer != issuer.GetIssuer() {
		return nil, "issuer", errToken
	}
	header := t.signed.Headers[0]
	candidates, err := keys.find(ctx, header.KeyID)
	if err != nil {
		return nil, "", err
	}
	if len(candidates) == 0 {
		return nil, "unknown_kid", errToken
	}
	var c claims
	var all map[string]any
	good := false
	for i := range candidates {
		key := &candidates[i]
		if key.Algorithm != "" && key.Algorithm != header.Algorithm {
			continue
		}
		if t.signed.Claims(key.Key, &c, &all) == nil {
			good = true
			break
		}
	}
	switch {
	case !good:
		return nil, "signature", errToken
	case c.Issuer != issuer.GetIssuer():
		return nil, "issuer", errToken
	case !slices.ContainsFunc(c.Audience, func(a string) bool { return slices.Contains(issuer.GetAudiences(), a) }):
		return nil, "audience", errToken
	case at(c.Expires).IsZero() || !now.Before(at(c.Expires).Add(leeway)):
		return nil, "expired", errToken
	case c.NotBefore != "" && (at(c.NotBefore).IsZero() || now.Add(leeway).Before(at(c.NotBefore))),
		c.IssuedAt != "" && (at(c.IssuedAt).IsZero() || now.Add(leeway).Before(at(c.IssuedAt))):
		return nil, "not_yet", errToken
	case c.Subject == "" || len(c.Subject) > maxSubject || !printable(c.Subject):
		return nil, "subject", errToken
	}
	text, err := json.Marshal(all)
	if err != nil { // cannot be: it was JSON
		return nil, "malformed", errToken
	}
	name := issuer.GetTenantClaim()
	return &verified{
		issuer: c.Issuer, user: c.Issuer + "#" + c.Subject, claim: name, tenants: texts(all[name]), claims: string(text), expires: at(c.Expires).Add(leeway),
	}, "", nil
}

// texts are a claim's value, or those of a list.
func texts(v any) []string {
	switch v := v.(type) {
	case string:
		return []string{v}
	case []any:
		var out []string
		for _, e := range v {
			if s, ok := e.(string); ok {
				out = append(out, s)
			}
		}
		return out
	}
	return nil
}

// printable keeps what ends a line or hides out of records.
func printable(s string) bool {
	for _, c := range s {
		if c < ' ' || c == 0x7f || c == '\uFFFD' {
			return false
		}
	}
	return true
}
