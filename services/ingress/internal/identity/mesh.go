package identity

import (
	"net/http"
	"net/url"
	"strings"
)

// Proxy names the header by which a trusted proxy on this machine, or in this
// Pod, says whose certificate a client has. The zero value trusts none.
type Proxy struct {
	// Header is l5d-client-id or x-forwarded-client-cert.
	Header string
	// TrustDomain that the identity must be of, such as cluster.local.
	TrustDomain string
}

// The headers that are understood.
const (
	HeaderLinkerd = "l5d-client-id"
	HeaderEnvoy   = "x-forwarded-client-cert"
)

// account takes the ServiceAccount (namespace/name) that the proxy names, empty
// for none: the client has no certificate, or one of something else.
func (p Proxy) account(r *http.Request) (string, *Refusal) {
	if p.Header == "" || !fromHere(r) {
		return "", nil
	}
	values := r.Header.Values(p.Header)
	switch len(values) {
	case 0:
		return "", nil
	case 1:
	default:
		return "", duplicate
	}
	if strings.EqualFold(p.Header, HeaderLinkerd) {
		return p.fromName(values[0]), nil
	}
	if strings.Contains(values[0], ",") { // of several hops: which one is meant is not ours to guess
		return "", nil
	}
	found := ""
	for part := range strings.SplitSeq(values[0], ";") {
		name, value, _ := strings.Cut(part, "=")
		if !strings.EqualFold(name, "URI") {
			continue
		}
		if found != "" {
			return "", nil
		}
		found = strings.Trim(value, `"`)
	}
	return p.fromURI(found), nil
}

// fromName reads Linkerd's names: account.namespace.serviceaccount.identity.
// followed by Linkerd's own namespace and the trust domain, or a SPIFFE id.
func (p Proxy) fromName(name string) string {
	if strings.HasPrefix(name, "spiffe://") {
		return p.fromURI(name)
	}
	account, domain, ok := strings.Cut(name, ".serviceaccount.identity.")
	control, domain, dotted := strings.Cut(domain, ".")
	dot := strings.LastIndexByte(account, '.') // an account's name may have one, a namespace's has none
	if !ok || !dotted || control == "" || dot < 0 || domain != p.TrustDomain {
		return ""
	}
	return join(account[dot+1:], account[:dot])
}

// fromURI reads spiffe://domain/ns/namespace/sa/account.
func (p Proxy) fromURI(text string) string {
	u, err := url.Parse(text)
	if err != nil || u.Scheme != "spiffe" || u.Host != p.TrustDomain || u.User != nil || u.RawQuery != "" || u.Fragment != "" {
		return ""
	}
	parts := strings.Split(u.Path, "/")
	if len(parts) != 5 || parts[0] != "" || parts[1] != "ns" || parts[3] != "sa" {
		return ""
	}
	return join(parts[2], parts[4])
}

// join makes namespace/name of two names that may be such.
func join(namespace, name string) string {
	for _, s := range [...]string{namespace, name} {
		if s == "" || len(s) > 253 || strings.ContainsFunc(s, func(c rune) bool {
			return !('a' <= c && c <= 'z' || '0' <= c && c <= '9' || c == '-' || c == '.')
		}) {
			return ""
		}
	}
	return namespace + "/" + name
}
