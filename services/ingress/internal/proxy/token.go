package proxy

import "net/http"

// Outside is by which a provider is reached, with all that guards that: TLS, its
// own connections, and the look at each address. It is for what must be asked
// before a request can be sent, such as where tokens are had. It does not follow
// redirects.
func (p *Proxy) Outside(name string) http.RoundTripper { return p.outside.remote(name).transport }
