package ingress_test

import (
	"strings"
	"testing"
)

// A first event that is too long to hold (return_token_ids puts the prompt's
// ids in it) opens the stream, but is no first token.
func TestLongRoleChunk(t *testing.T) {
	e := start(t, nil).ready()
	role := strings.Replace(roleChunk(), `"choices"`, `"prompt_token_ids":[1`+strings.Repeat(",100000", 20000)+`],"choices"`, 1)
	e.router.routes(newWorker(t, "w", answers(role, textChunk("a"), textChunk("b"), usageChunk, doneEvent)))
	resp, body := e.post(chatPath, chatRequest(true, ""))
	if want := renamed(role + textChunk("a") + textChunk("b") + doneEvent); body != want {
		t.Errorf("got %d bytes, want %d", len(body), len(want))
	}
	if _, words := e.router.done(resp.Header.Get("X-Request-Id")); strings.Join(words, ", ") != "first token, ok" {
		t.Errorf("reported %v", words)
	}
	if !strings.Contains(e.metrics(), "time_to_first_token") {
		t.Error("no time to first token")
	}
}
