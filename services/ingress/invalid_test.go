package ingress_test

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
)

// translated are requests of the APIs whose answers are made of chat completions.
func translated(stream bool) map[string]string {
	return map[string]string{messagesPath: messagesRequest(stream, ""), "/v1/responses": fmt.Sprintf(`{"model":"chat","stream":%v,"input":"Hello"}`, stream)}
}

// An answer without choices is one of a broken worker: another one is asked, and if there
// is none the request has failed.
func TestAnswerWithoutChoices(t *testing.T) {
	e := start(t, nil).ready()
	empty := newWorker(t, "empty", func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("X-Of", "empty")
		refuses(http.StatusOK, `{"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":7}}`)(w, r)
	})
	good := newWorker(t, "good", refuses(http.StatusOK, usageText(8, 0, 20)))
	for path, request := range translated(false) {
		e.router.routes(empty)
		resp, body := e.post(path, request)
		if _, words := e.router.done(resp.Header.Get("X-Request-Id")); resp.StatusCode != http.StatusBadGateway || !strings.Contains(body, "no valid answer") || strings.Join(words, ", ") != "failed" {
			t.Errorf("%s: %d %s, reported %v", path, resp.StatusCode, body, words)
		}
		if text := e.metrics(); !strings.Contains(text, `outcome="failed",`) || !strings.Contains(text, `route="`+path+`",status="502"`) || strings.Contains(text, `outcome="ok",route="`+path) {
			t.Errorf("%s is not counted as failed", path)
		}
		e.router.routes(empty, good)
		resp, body = e.post(path, request)
		_, words := e.router.done(resp.Header.Get("X-Request-Id"))
		if resp.StatusCode != http.StatusOK || resp.Header.Get("X-Of") != "" || strings.Join(words, ", ") != "moved to good after status, ok" {
			t.Errorf("%s: %d %s %v, reported %v", path, resp.StatusCode, body, resp.Header, words)
		}
	}
}

// A worker whose stream makes no sense stops at once, though its client stays.
func TestStreamMakesNoSense(t *testing.T) {
	for path, request := range translated(true) {
		e := start(t, nil).ready()
		h, _, left := hang(roleChunk(), textChunk("a"), "data: {no JSON\n\n")
		e.router.routes(newWorker(t, "w", h))
		resp, body := e.post(path, request)
		await(t, "the worker is left", left)
		if resp.StatusCode != http.StatusOK || strings.Count(body, "no valid answer") != 1 {
			t.Errorf("%s: %d %s", path, resp.StatusCode, body)
		}
		if _, words := e.router.done(resp.Header.Get("X-Request-Id")); strings.Join(words, ", ") != "first token, failed" {
			t.Errorf("%s: reported %v", path, words)
		}
	}
}
