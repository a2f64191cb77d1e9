package identity

import (
	"net"
	"net/http"
	"net/textproto"
	"slices"
	"strings"
)

// QoSHeader lets a client ask for less than its class of service.
const QoSHeader = "X-Kinference-Qos"

// claimed are beginnings of headers by which clients have claimed to be somebody,
// or to be served before others, at some gateway, proxy or engine. Nothing behind
// this package ever sees one. In lower case, and with a dash where a name may have
// an underscore.
var claimed = [...]string{
	"x-kinference-", "x-tenant", "x-user-", "x-org-", "x-consumer-", "x-account-", "x-identity", "x-auth-", "x-authz-", "x-authenticated-", "x-remote-", "x-maas-",
	"x-gateway-", "x-llm-d-", "x-slo-", "x-priority", "x-data-parallel-", "x-vllm-", "x-mse-", "x-credential-",
	"l5d-", "x-forwarded-", "x-envoy-", "x-b3-", "x-spiffe-", "x-client-cert", "x-ssl-", "x-real-ip", "x-original-", "x-rewrite-url", "x-http-method",
	"true-client-ip", "cf-connecting-ip", "forwarded", "remote-user", "ssl-client-",
}

// strip removes what only connects two neighbours, and what claims something that
// only the caller's credential says.
func strip(h http.Header) {
	for k := range h {
		if name := plain(k); k != QoSHeader && isClaimed(name) {
			delete(h, k)
		}
	}
}

// stripNamed removes the headers that Connection names: they are for the last
// hop, and not part of the request.
func stripNamed(h http.Header) {
	for _, line := range h["Connection"] {
		for name := range strings.SplitSeq(line, ",") {
			if name = textproto.TrimString(name); name != "" {
				h.Del(name)
			}
		}
	}
}

func isClaimed(name string) bool {
	return slices.ContainsFunc(claimed[:], func(prefix string) bool { return strings.HasPrefix(name, prefix) })
}

// plain is a header's name as some servers behind us may understand it.
func plain(name string) string { return strings.ReplaceAll(strings.ToLower(name), "_", "-") }

// sizeOf is about how many bytes the headers had.
func sizeOf(r *http.Request) int64 {
	n := int64(len(r.Host) + len("Host: \r\n"))
	for k, values := range r.Header {
		for _, v := range values {
			n += int64(len(k) + len(v) + len(": \r\n"))
		}
	}
	return n
}

// maxCredential bounds a key or token.
const maxCredential = 16 << 10

var (
	duplicate = &Refusal{Status: http.StatusBadRequest, Code: "duplicate_credentials", Reason: "duplicate",
		Message: "The request has a header with credentials more than once. Send Authorization or X-Api-Key, once."}
	missing = &Refusal{Status: http.StatusUnauthorized, Code: "missing_api_key", Reason: "missing",
		Message: "No credential was given. Send it as Authorization: Bearer KEY, or as X-Api-Key: KEY."}
	invalid = &Refusal{Status: http.StatusUnauthorized, Code: "invalid_api_key", Reason: "invalid",
		Message: "The credential is not valid here."}
)

// because is a refusal that tells the caller nothing more, and metrics why.
func because(reason string) *Refusal {
	r := *invalid
	r.Reason = reason
	return &r
}

// credentialOf returns the key or token of a request, empty for none.
func credentialOf(h http.Header) (string, *Refusal) {
	authorization, key := h["Authorization"], h["X-Api-Key"]
	if len(authorization) > 1 || len(key) > 1 {
		return "", duplicate
	}
	var bearer string
	if len(authorization) == 1 {
		scheme, token, _ := strings.Cut(authorization[0], " ")
		bearer = strings.Trim(token, " ")
		if !strings.EqualFold(scheme, "Bearer") || !isToken(bearer) {
			return "", because("malformed")
		}
	}
	if len(key) == 0 {
		return bearer, nil
	}
	switch {
	case !isToken(key[0]):
		return "", because("malformed")
	case len(authorization) == 1 && !same(bearer, key[0]):
		return "", because("two_credentials")
	}
	return key[0], nil
}

// isToken reports whether a text can be a credential: none has a space, a comma
// or a control character.
func isToken(s string) bool {
	if s == "" || len(s) > maxCredential {
		return false
	}
	for _, c := range []byte(s) {
		if c <= ' ' || c == ',' || c == ';' || c == '"' || c >= 0x7f {
			return false
		}
	}
	return true
}

// fromHere reports whether the peer is on this machine, or in this Pod: on loopback,
// or with the very address that it has connected to, as a proxy has that keeps the
// destination of what it took over.
func fromHere(r *http.Request) bool {
	host, _, err := net.SplitHostPort(r.RemoteAddr)
	ip := net.ParseIP(host)
	if err != nil || ip == nil {
		return false
	}
	local, ok := r.Context().Value(http.LocalAddrContextKey).(*net.TCPAddr)
	return ip.IsLoopback() || ok && ip.Equal(local.IP)
}
