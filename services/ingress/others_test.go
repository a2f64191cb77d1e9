package ingress_test

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kinference/kinference/internal/kvhash"
	"github.com/kinference/kinference/internal/tokens"
	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
	"github.com/kinference/kinference/services/ingress"
)

// Each prompt of a completions request with several is counted and hashed on its
// own, whatever form they have, and the body goes on as it came.
func TestSeveralPrompts(t *testing.T) {
	dir := modelDir(t)
	tok, err := tokens.Load(dir)
	if err != nil {
		t.Fatal(err)
	}
	e := start(t, func(_ *ingress.Config, c *routerv1.Catalog) {
		c.Profiles[0].TokenizerPath, c.Profiles[0].MaxModelLen = dir, 300
	}).ready()
	bodies := make(chan string, 1)
	e.router.routes(newWorker(t, "w", func(w http.ResponseWriter, r *http.Request) {
		b := new(strings.Builder)
		_ = r.Write(b)
		bodies <- b.String()
		refuses(http.StatusOK, whole)(w, r)
	}))
	texts := []string{
		strings.Repeat("The scheduler admits a request when its blocks fit. ", 10), "short", strings.Repeat("Another prompt that has nothing in common. ", 12),
	}
	list, _ := json.Marshal(texts)
	lists := make([]string, len(texts))
	for i, text := range texts {
		ids, _ := json.Marshal(tok.Encode(nil, text, true))
		lists[i] = string(ids)
	}
	for name, prompt := range map[string]string{"texts": string(list), "token ids": "[" + strings.Join(lists, ", ") + "]"} {
		t.Run(name, func(t *testing.T) {
			body := `{"model":"base-model","max_tokens":5,"prompt":` + prompt + `}`
			if resp, answer := e.post(textPath, body); resp.StatusCode != http.StatusOK {
				t.Fatalf("%d %s", resp.StatusCode, answer)
			}
			if got := <-bodies; !strings.HasSuffix(got, body) {
				t.Errorf("the worker got %s", got)
			}
			got := e.router.sent()[0]
			check(t, got, "p", tok.Encode(nil, texts[0], true), kvhash.Root("", ""), 16)
			if len(got.Others) != 2 {
				t.Fatalf("%d others", len(got.Others))
			}
			for i, o := range got.Others {
				ids := tok.Encode(nil, texts[i+1], true)
				if diff := cmp.Diff(hashes(kvhash.Root("", ""), ids, 16), o.BlockHashes); int(o.Tokens) != len(ids) || diff != "" {
					t.Errorf("prompt %d: %d tokens, want %d; %s", i+1, o.Tokens, len(ids), diff)
				}
			}
		})
	}

	// The longest must fit, wherever it stands; all together need not.
	ids := func(n int) string { return "[1" + strings.Repeat(",1", n-1) + "]" }
	go func() { <-bodies }()
	if resp, body := e.post(textPath, fmt.Sprintf(`{"model":"base-model","max_tokens":5,"prompt":[%s,%s]}`, ids(290), ids(295))); resp.StatusCode != http.StatusOK {
		t.Errorf("%d %s", resp.StatusCode, body)
	}
	resp, body := e.post(textPath, fmt.Sprintf(`{"model":"base-model","max_tokens":5,"prompt":[%s,%s]}`, ids(10), ids(296)))
	if _, param, code := parseError(t, body); resp.StatusCode != http.StatusBadRequest || param != "prompt" || code != "context_length_exceeded" {
		t.Errorf("%d %s", resp.StatusCode, body)
	}

	// There is a bound on how many.
	resp, body = e.post(textPath, `{"model":"base-model","prompt":["a"`+strings.Repeat(`,"a"`, 2048)+`]}`)
	if _, param, _ := parseError(t, body); resp.StatusCode != http.StatusBadRequest || param != "prompt" {
		t.Errorf("%d %s", resp.StatusCode, body)
	}
}

// Without a tokenizer texts are hashed as they are, each on its own, and beyond
// the first few only their length counts.
func TestManyPromptsApproximate(t *testing.T) {
	e := start(t, nil).ready()
	e.router.routes(newWorker(t, "w", refuses(http.StatusOK, whole)))
	same := strings.Repeat("a prompt of some length ", 40)
	list := make([]string, 40)
	for i := range list {
		list[i] = same
	}
	list[1] = "x" + same
	text, _ := json.Marshal(list)
	if resp, body := e.post(textPath, `{"model":"base-model","prompt":`+string(text)+`}`); resp.StatusCode != http.StatusOK {
		t.Fatalf("%d %s", resp.StatusCode, body)
	}
	got := e.router.sent()[0]
	if !got.Approximate || len(got.Others) != 39 || len(got.BlockHashes) == 0 {
		t.Fatalf("%d others, %d blocks, approximate %v", len(got.Others), len(got.BlockHashes), got.Approximate)
	}
	if cmp.Diff(got.BlockHashes, got.Others[0].BlockHashes) == "" || cmp.Diff(got.BlockHashes, got.Others[1].BlockHashes) != "" {
		t.Error("the same text has other hashes, or another the same")
	}
	if last := got.Others[38]; len(last.BlockHashes) > 0 || int(last.Tokens) != len(same)/4 {
		t.Errorf("the last has %d blocks and %d tokens", len(last.BlockHashes), last.Tokens)
	}
}
