package identity

import (
	"net"
	"slices"
	"strings"

	"github.com/kinference/kinference/services/ingress/internal/catalog"
)

// routes finds backends by host and path.
type routes struct {
	exact map[string][]*catalog.Backend // by hostname
	wild  map[string][]*catalog.Backend // by what follows the first label and its dot
	any   []*catalog.Backend
}

func newRoutes(backends []*catalog.Backend) routes {
	out := routes{exact: map[string][]*catalog.Backend{}, wild: map[string][]*catalog.Backend{}}
	for _, b := range backends {
		if len(b.Message.GetHostnames()) == 0 {
			out.any = append(out.any, b)
		}
		for _, h := range b.Message.GetHostnames() {
			if rest, ok := strings.CutPrefix(h, "*."); ok {
				out.wild[rest] = append(out.wild[rest], b)
			} else {
				out.exact[h] = append(out.exact[h], b)
			}
		}
	}
	longestFirst(out.any)
	for _, list := range out.exact {
		longestFirst(list)
	}
	for _, list := range out.wild {
		longestFirst(list)
	}
	return out
}

func longestFirst(list []*catalog.Backend) {
	slices.SortStableFunc(list, func(a, b *catalog.Backend) int { return len(prefix(b)) - len(prefix(a)) })
}

// prefix is a backend's path without a slash at its end.
func prefix(b *catalog.Backend) string { return strings.TrimSuffix(b.Message.GetPathPrefix(), "/") }

// find returns the backend for a host and path, and the path without its prefix.
// A hostname wins over a star, a star over none; then the longest path wins.
func (r *routes) find(host, path string) (*catalog.Backend, string) {
	host = hostname(host)
	lists := [...][]*catalog.Backend{r.exact[host], nil, r.any}
	if label, rest, ok := strings.Cut(host, "."); ok && label != "" {
		lists[1] = r.wild[rest]
	}
	for _, list := range lists {
		for _, b := range list {
			rest, ok := strings.CutPrefix(path, prefix(b))
			if ok && (rest == "" || rest[0] == '/') {
				return b, rest
			}
		}
	}
	return nil, ""
}

// hostname is a Host header without port and final dot, in lower case.
func hostname(host string) string {
	if h, _, err := net.SplitHostPort(host); err == nil {
		host = h
	}
	return strings.ToLower(strings.TrimSuffix(host, "."))
}
