// Package console is a web page on the admin API's port: workers, the line, live
// decisions with their reasons, usage and objectives, policies.
//
// It holds no data and no right of its own: files that the binary embeds, which ask
// the admin API with the token that a person types in. So the files need no
// credential, and the page can do what the token may. services/router/internal/admin
// serves it. Safe for concurrent use.
package console

import (
	"embed"
	"io/fs"
	"net/http"
)

// Path is where the page is.
const Path = "/console/"

//go:embed assets
var files embed.FS

// policy lets the page load its own files and ask its own host, nothing else: no
// script in the page, no frame around it, no form that goes elsewhere.
const policy = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"

// Handler serves the page below Path, by GET and HEAD.
func Handler() http.Handler {
	assets, err := fs.Sub(files, "assets")
	if err != nil {
		panic(err) // embedded
	}
	next := http.StripPrefix(Path, http.FileServerFS(assets))
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h := w.Header()
		h.Set("Content-Security-Policy", policy)
		h.Set("X-Content-Type-Options", "nosniff")
		h.Set("Referrer-Policy", "no-referrer")
		h.Set("Cross-Origin-Opener-Policy", "same-origin")
		h.Set("Cross-Origin-Resource-Policy", "same-origin")
		h.Set("Cache-Control", "no-cache") // a newer binary has newer files
		if r.Method != http.MethodGet && r.Method != http.MethodHead {
			h.Set("Allow", "GET, HEAD")
			http.Error(w, "the console can only be read", http.StatusMethodNotAllowed)
			return
		}
		next.ServeHTTP(w, r)
	})
}
