package console

import (
	"io/fs"
	"net/http/httptest"
	"regexp"
	"strings"
	"testing"
)

func TestHandler(t *testing.T) {
	h := Handler()
	for _, tt := range []struct {
		method, path string
		code         int
		contentType  string
	}{
		{"GET", "/console/", 200, "text/html; charset=utf-8"},
		{"GET", "/console/app.js", 200, "text/javascript; charset=utf-8"},
		{"HEAD", "/console/style.css", 200, "text/css; charset=utf-8"},
		{"POST", "/console/", 405, ""},
		{"GET", "/console/console.go", 404, ""},
		{"GET", "/console/../console.go", 404, ""},
		{"GET", "/console/%2e%2e/go.mod", 404, ""},
	} {
		w := httptest.NewRecorder()
		h.ServeHTTP(w, httptest.NewRequest(tt.method, tt.path, nil))
		if w.Code != tt.code {
			t.Errorf("%s %s: got %d, want %d", tt.method, tt.path, w.Code, tt.code)
		}
		if got := w.Header().Get("Content-Type"); tt.contentType != "" && got != tt.contentType {
			t.Errorf("%s %s: got type %q, want %q", tt.method, tt.path, got, tt.contentType)
		}
		for name, want := range map[string]string{"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer", "Content-Security-Policy": policy} {
			if got := w.Header().Get(name); got != want {
				t.Errorf("%s %s: %s is %q, want %q", tt.method, tt.path, name, got, want)
			}
		}
		if w.Header().Get("Access-Control-Allow-Origin") != "" {
			t.Errorf("%s %s: other origins are let in", tt.method, tt.path)
		}
	}
}

// What the files must not have: code or style within the page, which the policy would
// refuse, other hosts, and ways to turn text into markup.
func TestAssets(t *testing.T) {
	inline := regexp.MustCompile(`(?i)<script(?:\s[^>]*)?>[^<]|<style|\sstyle=|\son[a-z]+=|javascript:`)
	for _, page := range []string{"index.html", "app.js", "api.js", "dom.js", "style.css"} {
		raw, err := fs.ReadFile(files, "assets/"+page)
		if err != nil {
			t.Fatal(err)
		}
		text := string(raw)
		if strings.HasSuffix(page, ".html") && inline.MatchString(text) {
			t.Errorf("%s has %q", page, inline.FindString(text))
		}
		for _, bad := range []string{"http://", "https://", "innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "localStorage"} {
			if strings.Contains(text, bad) {
				t.Errorf("%s has %s", page, bad)
			}
		}
	}
}

func TestPolicyHasNoWideSource(t *testing.T) {
	for _, bad := range []string{"unsafe-inline", "unsafe-eval", "*", "data:", "http:"} {
		if strings.Contains(policy, bad) {
			t.Errorf("the policy allows %s", bad)
		}
	}
	if !strings.Contains(policy, "frame-ancestors 'none'") {
		t.Error("the page may be framed")
	}
}
