package proxy

import (
	"net/http"
	"net/textproto"
	"slices"
	"strings"
)

// private headers never cross the gateway, in either direction: they belong
// to one connection, to the mesh, to our own services or to credentials, or
// they are made anew for each hop.
var private = map[string]bool{
	"Connection": true, "Keep-Alive": true, "Proxy-Connection": true, "Proxy-Authenticate": true, "Proxy-Authorization": true, "Te": true, "Trailer": true,
	"Transfer-Encoding": true, "Upgrade": true, "Http2-Settings": true, "Expect": true, "Host": true, "Content-Length": true, "Content-Encoding": true, "Accept-Encoding": true,
	"Content-Type": true, "Date": true, "Server": true, "Alt-Svc": true,
	"Authorization": true, "Www-Authenticate": true, "Api-Key": true, "X-Api-Key": true, "Cookie": true, "Set-Cookie": true,
	"Forwarded": true, "X-Real-Ip": true, "True-Client-Ip": true, "Cf-Connecting-Ip": true, "Via": true, "Traceparent": true, "Tracestate": true, "Baggage": true,
	"X-Request-Id": true, "X-Should-Retry": true, "Retry-After": true, "Retry-After-Ms": true,
	// Engine controls that only the control plane may use.
	"X-Data-Parallel-Rank": true, "X-Vllm-Priority": true, "Endpoint-Load-Metrics-Format": true, "Endpoint-Load-Metrics": true,
	"Idempotency-Key": true, "X-Idempotency-Key": true,
}

var privatePrefixes = [...]string{"L5d-", "X-Kinference-", "X-Forwarded-", "X-Envoy-", "X-B3-", "X-Ratelimit-", "Anthropic-Ratelimit-"}

// secrets are words in the names that clouds, proxies and SDKs give to
// credentials. No engine reads a header with one of them.
var secrets = [...]string{"auth", "token", "secret", "key", "jwt", "oidc", "cert", "password", "credential"}

// CleanHeader copies what of a client's header workers may get.
func CleanHeader(h http.Header) http.Header {
	out := make(http.Header, len(h)+8)
	copyHeader(out, h)
	for k := range out {
		name := strings.ToLower(k)
		if slices.ContainsFunc(secrets[:], func(word string) bool { return strings.Contains(name, word) }) {
			delete(out, k)
		}
	}
	return out
}

func copyHeader(dst, src http.Header) {
	named := src["Connection"]
	for k, v := range src {
		if private[k] || listed(named, k) || hasPrivatePrefix(k) {
			continue
		}
		dst[k] = v
	}
}

func hasPrivatePrefix(k string) bool {
	for _, p := range privatePrefixes {
		if strings.HasPrefix(k, p) {
			return true
		}
	}
	return false
}

// listed reports whether the Connection header makes k a hop-by-hop one.
func listed(connection []string, k string) bool {
	for _, line := range connection {
		for name := range strings.SplitSeq(line, ",") {
			if textproto.CanonicalMIMEHeaderKey(strings.TrimSpace(name)) == k {
				return true
			}
		}
	}
	return false
}
