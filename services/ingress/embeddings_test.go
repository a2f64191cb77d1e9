package ingress_test

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"

	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
	"github.com/kinference/kinference/services/ingress"
)

// Embeddings pass as they are, whatever the client asks for.
func TestEmbeddings(t *testing.T) {
	e := start(t, func(_ *ingress.Config, c *routerv1.Catalog) { c.Profiles[0].TokenizerPath = modelDir(t) }).ready()
	bodies := make(chan string, 1)
	const embedded = `{"object":"list","model":"base-model","data":[{"object":"embedding","index":0,"embedding":"AACAPwAAAEA="}],"usage":{"prompt_tokens":5,"total_tokens":5}}`
	e.router.routes(newWorker(t, "w", func(w http.ResponseWriter, r *http.Request) {
		b, _ := io.ReadAll(r.Body)
		bodies <- r.URL.Path + " " + string(b)
		refuses(http.StatusOK, embedded)(w, r)
	}))
	const path = "/v1/embeddings"
	for _, c := range []struct{ name, input string }{
		{"text", `"Hello there"`}, {"texts", `["Hello there","and more"]`}, {"ids", `[1,2,3]`}, {"lists of ids", `[[1,2],[3]]`},
	} {
		t.Run(c.name, func(t *testing.T) {
			body := `{"model":"%s", "input":` + c.input + `,"encoding_format":"base64","dimensions":8,"stream":true}`
			resp, got := e.post(path, fmt.Sprintf(body, "chat"))
			if want := path + " " + fmt.Sprintf(body, "base-model"); <-bodies != want {
				t.Errorf("the worker got another body than %s", want)
			}
			if got != renamed(embedded) || resp.StatusCode != http.StatusOK {
				t.Errorf("%d %s", resp.StatusCode, got)
			}
			done, words := e.router.done(resp.Header.Get("X-Request-Id"))
			if done.OutputTokens == nil || done.GetOutputTokens() != 0 || strings.Join(words, ", ") != "ok" {
				t.Errorf("reported %v, %v", words, done)
			}
		})
	}
	asked := e.router.routed()[0]
	if a := asked.GetAttributes(); a.GetEndpoint() != "Embeddings" || asked.GetMaxTokens() != 1 || asked.GetPrompts()[0].GetTokens() == 0 || asked.GetPrompts()[0].GetApproximate() {
		t.Errorf("asked %v", asked)
	}
	for _, c := range []struct{ body, param string }{
		{`{"model":"chat"}`, "input"}, {`{"model":"chat","input":[]}`, "input"}, {`{"model":"chat","input":["a",1]}`, "input"},
		{`{"model":"chat","input":["a"` + strings.Repeat(`,"a"`, 2048) + `]}`, "input"},
	} {
		resp, body := e.post(path, c.body)
		if _, param, _ := parseError(t, body); resp.StatusCode != http.StatusBadRequest || param != c.param {
			t.Errorf("%d %s", resp.StatusCode, body)
		}
	}
}

// A model that generates has no embeddings, at whichever worker: that is the client's
// mistake, and costs no retries that others may need.
func TestModelWithoutRoute(t *testing.T) {
	e := start(t, nil).ready()
	e.router.routes(newWorker(t, "w", refuses(404, `{"detail":"Not Found"}`)), newWorker(t, "other", func(http.ResponseWriter, *http.Request) { t.Error("another worker was asked") }))
	resp, body := e.post("/v1/embeddings", `{"model":"chat","input":"Hello"}`)
	if kind, param, code := parseError(t, body); resp.StatusCode != http.StatusNotFound || kind != "invalid_request_error" || param != "model" || code != "unsupported_endpoint" {
		t.Errorf("%d %s", resp.StatusCode, body)
	}
	if m := e.metrics(); !strings.Contains(m, `outcome="refused"`) || strings.Contains(m, `outcome="failed"`) {
		t.Error("it counts as our failure")
	}
}
