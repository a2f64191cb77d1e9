package ingress_test

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kinference/kinference/internal/fleetsim"
	"github.com/kinference/kinference/internal/fleetsim/engine"
	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
	"github.com/kinference/kinference/services/ingress"
)

// simulate starts a worker that answers as vLLM does.
func simulate(t *testing.T, name string, faults fleetsim.Faults) *worker {
	s, err := fleetsim.Start(context.Background(), fleetsim.Config{
		Name: name, Profile: engine.L40SPlain16, TimeScale: 500, Model: "base-model", LoRAs: []string{"sql"}, MaxModelLen: 4096, Faults: faults,
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Kill)
	return &worker{name: name, url: s.URL(), model: "base-model"}
}

// The token count that ingress routes by is the one that the engine finds,
// whether ingress tokenises itself or the engine tells it.
func TestSimulatedWorker(t *testing.T) {
	w := simulate(t, "a", fleetsim.Faults{})
	conversation := `[{"role":"system","content":"Be brief."},{"role":"user","content":"` + strings.Repeat("Tell me about caches and queues. ", 30) + `"}`
	requests := []string{
		`"messages":` + conversation + `]`,
		`"messages":` + conversation + `,{"role":"assistant","content":"They keep things."},{"role":"user","content":"And why?"}]`,
		`"messages":[{"role":"user","content":"What is the weather?"}],"tools":[{"type":"function","function":{"name":"weather","description":"of a town","parameters":{"type":"object","properties":{"town":{"type":"string"}}}}}]`,
		`"prompt":"Once upon a time"`,
	}
	seen := map[string][]*routerv1.Prompt{}
	for _, mode := range []string{"local", "render"} {
		e := start(t, func(_ *ingress.Config, c *routerv1.Catalog) {
			c.Workers = []*routerv1.Worker{{Uid: "a", WorkerSet: "ns/set", Url: w.url}}
			if mode == "local" {
				c.Profiles[0].TokenizerPath = modelDir(t)
			}
		}).ready()
		e.router.routes(w)
		for i, r := range requests {
			path := chatPath
			if strings.Contains(r, `"prompt"`) {
				path = textPath
			}
			resp, body := e.post(path, `{"model":"chat","stream":true,"max_tokens":8,`+r+`}`)
			if resp.StatusCode != 200 || !strings.HasSuffix(body, "data: [DONE]\n\n") || strings.Contains(body, "base-model") || strings.Contains(body, `"usage":{`) {
				t.Errorf("%s: got %d %s", mode, resp.StatusCode, body)
			}
			p := e.router.sent()[0]
			done, words := e.router.done(resp.Header.Get("X-Request-Id"))
			if p.GetApproximate() || p.GetTokens() != done.GetPromptTokens() || done.GetOutputTokens() != 8 || strings.Join(words, ", ") != "first token, ok" {
				t.Errorf("%s request %d: routed with %d tokens, reported %v %v", mode, i, p.GetTokens(), words, done)
			}
			if cached := int(done.GetCachedTokens()); i == 1 && cached < 16*10 || cached > 16*len(p.GetBlockHashes()) {
				t.Errorf("%s request %d: %d tokens cached of %d", mode, i, cached, p.GetTokens())
			}
			seen[mode] = append(seen[mode], p)
		}
		if !strings.Contains(e.metrics(), `mode="`+mode+`"`) {
			t.Errorf("the mode is not %s", mode)
		}
		resp, body := e.post(chatPath, `{"model":"chat","messages":[],"max_tokens":-1}`)
		if resp.StatusCode != 400 {
			t.Errorf("got %d %s", resp.StatusCode, body)
		}
		parseError(t, body)
	}
	for i := range requests {
		if diff := cmp.Diff(seen["render"][i].GetBlockHashes(), seen["local"][i].GetBlockHashes()); diff != "" {
			t.Errorf("request %d: the engine's blocks are others than ours: %s", i, diff)
		}
	}
}

func TestSimulatedFaults(t *testing.T) {
	request := `{"model":"chat","stream":true,"max_tokens":20,"ignore_eos":true,"messages":[{"role":"user","content":"Count."}]}`
	good := simulate(t, "good", fleetsim.Faults{})
	for _, tt := range []struct {
		faults fleetsim.Faults
		want   string
	}{
		{fleetsim.Faults{ErrorNext: 1}, "moved to good after status, first token, ok"},
		{fleetsim.Faults{CloseNext: 1}, "moved to good after closed, first token, ok"},
		{fleetsim.Faults{CloseAfterNext: 1, CloseAfterTokens: 5}, "first token, failed"},
	} {
		t.Run(tt.want, func(t *testing.T) {
			e := start(t, func(_ *ingress.Config, c *routerv1.Catalog) { c.Profiles[0].TokenizerPath = modelDir(t) }).ready()
			e.router.routes(simulate(t, "bad", tt.faults), good)
			resp, body := e.post(chatPath, request)
			done, words := e.router.done(resp.Header.Get("X-Request-Id"))
			if got := strings.Join(words, ", "); resp.StatusCode != 200 || got != tt.want {
				t.Errorf("got %d, %s: %s", resp.StatusCode, got, body)
			}
			ok := strings.HasSuffix(tt.want, "ok")
			if strings.HasSuffix(body, "data: [DONE]\n\n") != ok || strings.Contains(body, `"error":{`) == ok || ok && done.GetOutputTokens() != 20 {
				t.Errorf("reported %v: %s", done, body)
			}
			text := content(t, body)
			if !ok && len(text) != 5 || ok && len(text) < 15 {
				t.Errorf("%d pieces of text", len(text))
			}
		})
	}
}

// content are the pieces of text in a stream.
func content(t *testing.T, stream string) (pieces []string) {
	for line := range strings.SplitSeq(stream, "\n") {
		data, ok := strings.CutPrefix(line, "data: ")
		if !ok || data == "[DONE]" {
			continue
		}
		var c struct {
			Choices []struct{ Delta struct{ Content string } }
		}
		if err := json.Unmarshal([]byte(data), &c); err != nil {
			t.Fatal(fmt.Errorf("%w in %s", err, data))
		}
		for _, choice := range c.Choices {
			pieces = append(pieces, choice.Delta.Content)
		}
	}
	return slices.DeleteFunc(pieces, func(s string) bool { return s == "" })
}
