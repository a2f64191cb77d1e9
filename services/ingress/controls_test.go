package ingress_test

import (
	"io"
	"net/http"
	"strings"
	"testing"

	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
	"github.com/kinference/kinference/services/ingress"
)

// A tenant's client does not say how soon an engine serves it, nor whose blocks the
// engine fetches from where; and nobody has a prompt that is not the one which was
// counted, classified and judged by policies.
func TestEngineControls(t *testing.T) {
	const (
		ids      = `,"kv_transfer_params":{"prompt_token_ids":[9,9,9],"x":1}`
		controls = `,"kv_transfer_params":{"do_remote_prefill":true,"remote_host":"10.0.0.9"},"ec_transfer_params":{"a":1},"priority":-1000`
	)
	for _, tt := range []struct {
		name, more  string
		tenant      bool
		sent, never []string
	}{
		{"ids of an open gateway", ids, false, []string{`"kv_transfer_params":{"x":1}`}, []string{"prompt_token_ids"}},
		{"controls of an open gateway", controls, false, []string{"remote_host", "ec_transfer_params", "priority"}, nil},
		{"ids of a tenant", ids, true, nil, []string{"kv_transfer_params"}},
		{"controls of a tenant", controls, true, nil, []string{"kv_transfer_params", "ec_transfer_params", "priority"}},
	} {
		for _, stream := range []bool{true, false} {
			bodies := make(chan string, 1)
			e := startLimited(t, func(_ *ingress.Config, cat *routerv1.Catalog) {
				if !tt.tenant {
					cat.Guarded, cat.Backends, cat.Tenants = false, nil, nil
				}
			})
			e.router.routes(newWorker(t, "w", func(w http.ResponseWriter, r *http.Request) {
				b, _ := io.ReadAll(r.Body)
				bodies <- string(b)
				if stream {
					answers(textChunk("a"), usageChunk, doneEvent)(w, r)
					return
				}
				refuses(200, whole)(w, r)
			}))
			if resp, body := e.post(chatPath, chatRequest(stream, tt.more)); resp.StatusCode != http.StatusOK {
				t.Fatalf("%s: %d %s", tt.name, resp.StatusCode, body)
			}
			got := <-bodies
			for _, want := range tt.sent {
				if !strings.Contains(got, want) {
					t.Errorf("%s: %s is missing in %s", tt.name, want, got)
				}
			}
			for _, never := range tt.never {
				if strings.Contains(got, never) {
					t.Errorf("%s: the engine got %s", tt.name, got)
				}
			}
		}
	}
}

// Nor does a worker that is asked for token ids tell those of another prompt.
func TestAskedWithoutControls(t *testing.T) {
	_, text := ids(40)
	a := &asked{}
	bodies := make(chan string, 1)
	a.render = func(w http.ResponseWriter, r *http.Request) {
		b, _ := io.ReadAll(r.Body)
		bodies <- string(b)
		_, _ = io.WriteString(w, `{"token_ids":`+text+`}`)
	}
	e := startAsked(t, a, nil)
	e.post(chatPath, chatRequest(false, `,"kv_transfer_params":{"prompt_token_ids":[1]}`))
	if got := <-bodies; strings.Contains(got, "prompt_token_ids") {
		t.Errorf("asked with %s", got)
	}
}

// A prompt that the engine may cut counts as it stands: policies about long prompts are
// not for the client to switch off.
func TestCutPromptCountsWhole(t *testing.T) {
	e := start(t, func(_ *ingress.Config, c *routerv1.Catalog) {
		c.Profiles[0].TokenizerPath, c.Profiles[0].MaxModelLen = modelDir(t), 100_000
	}).ready()
	e.router.routes(newWorker(t, "w", refuses(200, whole)))
	for _, text := range []string{strings.Repeat("73", 2000), strings.Repeat(`\u597d`, 1000)} {
		ask := func(more string) *routerv1.Prompt {
			e.post(chatPath, `{"model":"chat","messages":[{"role":"user","content":"`+text+`"}]`+more+`}`)
			return e.router.sent()[0]
		}
		counted, cut := ask(""), ask(`,"truncate_prompt_tokens":50000`)
		if counted.GetApproximate() || !cut.GetApproximate() || cut.GetTokens() < counted.GetTokens() {
			t.Errorf("%.20s: %d tokens, and %d if it may be cut", text, counted.GetTokens(), cut.GetTokens())
		}
	}
}
