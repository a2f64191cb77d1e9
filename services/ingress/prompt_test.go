package ingress_test

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/kinference/kinference/internal/chat"
	"github.com/kinference/kinference/internal/kvhash"
	"github.com/kinference/kinference/internal/tokens"
	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
	"github.com/kinference/kinference/services/ingress"
)

// sent are the prompts of the last request that the router got.
func (r *router) sent() []*routerv1.Prompt {
	all := r.routed()
	return all[len(all)-1].GetPrompts()
}

func hashes(root kvhash.Hash, ids []uint32, block int) (out []uint64) {
	for _, h := range kvhash.Append(nil, root, ids, block) {
		out = append(out, uint64(h))
	}
	return out
}

func check(t *testing.T, got *routerv1.Prompt, profile string, ids []uint32, root kvhash.Hash, block int) {
	t.Helper()
	if got.GetProfile() != profile || int(got.GetTokens()) != len(ids) || int(got.GetBlockSize()) != block || got.GetApproximate() {
		t.Errorf("got %s with %d tokens, block size %d, approximate %v; want %s with %d", got.GetProfile(), got.GetTokens(), got.GetBlockSize(), got.GetApproximate(), profile, len(ids))
	}
	if diff := cmp.Diff(hashes(root, ids, block), got.GetBlockHashes()); diff != "" {
		t.Error(diff)
	}
}

// With a tokenizer: the same ids as the model's, hashed for each profile with
// its own block size, adapter and the request's salt.
func TestLocalPrompt(t *testing.T) {
	dir := modelDir(t)
	tok, err := tokens.Load(dir)
	if err != nil {
		t.Fatal(err)
	}
	tmpl, err := chat.Load(dir)
	if err != nil {
		t.Fatal(err)
	}
	e := start(t, func(_ *ingress.Config, c *routerv1.Catalog) {
		for _, p := range c.Profiles {
			p.TokenizerPath = dir
		}
		c.Profiles = append(c.Profiles, &routerv1.Profile{Id: "big", WorkerSet: "ns/other", TokenizerPath: dir, BlockSize: 32}, &routerv1.Profile{Id: "young", TokenizerPath: dir})
		c.Models[1].Profiles = []string{"p", "big", "young", "unknown"}
	}).ready()
	// No usage: a count of its own would be held against the tokenizer.
	e.router.routes(newWorker(t, "w", refuses(200, whole[:strings.Index(whole, `,"usage"`)]+"}")))

	long := strings.Repeat("The scheduler admits a request when its blocks fit. ", 20)
	messages := `[{"role":"system","content":"Be brief."},{"role":"user","content":"` + long + `"}]`
	text, err := tmpl.Render(chat.Request{Messages: json.RawMessage(messages), AddGenerationPrompt: true})
	if err != nil {
		t.Fatal(err)
	}
	ids := tok.Encode(nil, text, false)
	for range 2 { // cold and from the cache
		e.post(chatPath, `{"model":"chat","messages":`+messages+`,"cache_salt":"s","max_tokens":7}`)
		got := e.router.sent()
		if len(got) != 3 {
			t.Fatalf("%d prompts", len(got))
		}
		check(t, got[0], "p", ids, kvhash.Root("", "s"), 16)
		check(t, got[1], "big", ids, kvhash.Root("", "s"), 32)
		check(t, got[2], "young", ids, kvhash.Root("", "s"), 0)
	}
	all := e.router.routed()
	if r := all[len(all)-1]; r.GetMaxTokens() != 7 || r.GetModel() != "chat" {
		t.Errorf("routed %v with %d tokens", r.GetModel(), r.GetMaxTokens())
	}
	e.post(chatPath, `{"model":"sql","messages":`+messages+`}`)
	check(t, e.router.sent()[0], "sql", ids, kvhash.Root("sql", ""), 16)

	quoted, _ := json.Marshal(long)
	plain := tok.Encode(nil, long, true)
	e.post(textPath, `{"model":"base-model","prompt":`+string(quoted)+`}`)
	check(t, e.router.sent()[0], "p", plain, kvhash.Root("", ""), 16)
	e.post(textPath, `{"model":"base-model","prompt":[`+string(quoted)+`,"other"]}`)
	check(t, e.router.sent()[0], "p", plain, kvhash.Root("", ""), 16)
	e.post(textPath, `{"model":"base-model","prompt":[[1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17],[1]]}`)
	check(t, e.router.sent()[0], "p", []uint32{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17}, kvhash.Root("", ""), 16)

	for _, want := range []string{`mode="local"`, `mode="given"`, `result="hit"`} {
		if !strings.Contains(e.metrics(), want) {
			t.Errorf("metrics lack %s", want)
		}
	}
}

// A profile too small for the request is left out, others stay.
func TestProfileTooSmall(t *testing.T) {
	e := start(t, func(_ *ingress.Config, c *routerv1.Catalog) {
		c.Profiles[0].MaxModelLen = 20
		c.Profiles = append(c.Profiles, &routerv1.Profile{Id: "big", WorkerSet: "ns/other", BlockSize: 16, MaxModelLen: 40})
		c.Models[0].Profiles = []string{"p", "big"}
	}).ready()
	e.router.routes(newWorker(t, "w", refuses(200, whole)))
	ids := "1" + strings.Repeat(",1", 24)
	if resp, body := e.post(textPath, `{"model":"base-model","max_tokens":15,"prompt":[`+ids+`]}`); resp.StatusCode != 200 {
		t.Fatalf("got %d %s", resp.StatusCode, body)
	}
	if got := e.router.sent(); len(got) != 1 || got[0].GetProfile() != "big" {
		t.Errorf("prompts %v", got)
	}
	resp, body := e.post(textPath, `{"model":"base-model","max_tokens":16,"prompt":[`+ids+`]}`)
	if _, _, code := parseError(t, body); resp.StatusCode != 400 || code != "context_length_exceeded" || !strings.Contains(body, "maximum context length is 40 tokens") {
		t.Errorf("got %d %s", resp.StatusCode, body)
	}
}

// Our ids are passed on to an engine that makes the same ones, once that is
// known, and to no other.
func TestPassTokenIDs(t *testing.T) {
	dir := modelDir(t)
	bodies := make(chan string, 1)
	serve := func(w http.ResponseWriter, r *http.Request) {
		b, _ := io.ReadAll(r.Body)
		bodies <- string(b)
		refuses(200, whole)(w, r)
	}
	proven, silent := newWorker(t, "w/0", tells(t, dir, serve)), newWorker(t, "x/0", serve)
	e := start(t, func(_ *ingress.Config, c *routerv1.Catalog) {
		c.Profiles[0].TokenizerPath, c.Profiles[0].PassTokenIds = dir, true
		c.Workers = []*routerv1.Worker{{Uid: "w", WorkerSet: "ns/set", Url: proven.url}}
	}).ready()
	e.router.routes(proven)
	e.verdict("|w", "AGREES UNSPECIFIED")
	e.post(chatPath, chatRequest(false, `,"kv_transfer_params":{"x":1}`))
	var sent struct {
		Messages []any
		Params   struct {
			X   int
			IDs []uint32 `json:"prompt_token_ids"`
		} `json:"kv_transfer_params"`
	}
	if err := json.Unmarshal([]byte(<-bodies), &sent); err != nil || len(sent.Messages) != 1 || sent.Params.X != 1 || len(sent.Params.IDs) != int(e.router.sent()[0].GetTokens()) {
		t.Errorf("worker got %+v, %v", sent, err)
	}
	resp, body := e.post(chatPath, chatRequest(false, `,"kv_transfer_params":5`))
	if resp.StatusCode != 400 {
		t.Errorf("got %d %s", resp.StatusCode, body)
	}
	e.router.routes(silent)
	e.post(chatPath, chatRequest(false, ""))
	if got := <-bodies; strings.Contains(got, "prompt_token_ids") {
		t.Errorf("a worker that was never asked got %s", got)
	}
}

// asked is a worker that can tell token ids in some ways.
type asked struct {
	render, tokenize http.HandlerFunc // nil: 404
	renders, others  atomic.Int32
}

func (a *asked) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	h := http.HandlerFunc(refuses(404, `{"detail":"Not Found"}`))
	switch {
	case strings.HasSuffix(r.URL.Path, "/render"):
		a.renders.Add(1)
		if a.render != nil {
			h = a.render
		}
	case r.URL.Path == "/tokenize":
		a.others.Add(1)
		if a.tokenize != nil {
			h = a.tokenize
		}
	default:
		h = refuses(200, whole)
	}
	h(w, r)
}

// startAsked runs an ingress without a tokenizer in front of a.
func startAsked(t *testing.T, a *asked, change func(*ingress.Config)) *env {
	w := newWorker(t, "w", a.ServeHTTP)
	e := start(t, func(c *ingress.Config, cat *routerv1.Catalog) {
		cat.Workers = []*routerv1.Worker{{Uid: "w", WorkerSet: "ns/set", Url: w.url + "/"}}
		if change != nil {
			change(c)
		}
	}).ready()
	e.router.routes(w)
	return e
}

func ids(n int) (list []uint32, text string) {
	for i := range n {
		list = append(list, uint32(1000+i))
	}
	b, _ := json.Marshal(list)
	return list, string(b)
}

func TestWorkerRenders(t *testing.T) {
	list, text := ids(40)
	var got atomic.Value
	a := &asked{render: func(w http.ResponseWriter, r *http.Request) {
		b, _ := io.ReadAll(r.Body)
		got.Store(r.URL.Path + " " + string(b))
		answer := `{"request_id":"x","token_ids":` + text + `,"sampling_params":{}}`
		if r.URL.Path == "/v1/completions/render" {
			answer = "[" + answer + "]"
		}
		_, _ = io.WriteString(w, answer)
	}}
	e := startAsked(t, a, nil)
	e.post(chatPath, chatRequest(true, ""))
	check(t, e.router.sent()[0], "p", list, kvhash.Root("", ""), 16)
	if want := "/v1/chat/completions/render " + strings.Replace(chatRequest(true, ""), `"chat"`, `"base-model"`, 1); got.Load() != want {
		t.Errorf("worker was asked %s", got.Load())
	}
	e.post(textPath, `{"model":"sql","prompt":"x"}`)
	check(t, e.router.sent()[0], "sql", list, kvhash.Root("sql", ""), 16)
	if !strings.Contains(e.metrics(), `mode="render"`) {
		t.Error("the mode is not in the metrics")
	}
}

// gpt-oss: chats are made by Harmony, which a worker's /tokenize knows nothing
// of. Without a render route the text is hashed.
func TestHarmony(t *testing.T) {
	dir := t.TempDir()
	if err := os.CopyFS(dir, os.DirFS(modelDir(t))); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "config.json"), []byte(`{"model_type":"gpt_oss"}`), 0o600); err != nil {
		t.Fatal(err)
	}
	list, text := ids(40)
	for _, renders := range []bool{false, true} {
		a := &asked{tokenize: refuses(200, `{"tokens":[1,2,3]}`)}
		if renders {
			a.render = refuses(200, `{"token_ids":`+text+`}`)
		}
		w := newWorker(t, "w", a.ServeHTTP)
		e := start(t, func(_ *ingress.Config, c *routerv1.Catalog) {
			c.Workers = []*routerv1.Worker{{Uid: "w", WorkerSet: "ns/set", Url: w.url + "/"}}
			c.Profiles[0].TokenizerPath = dir
		}).ready()
		e.router.routes(w)
		e.post(chatPath, chatRequest(false, ""))
		got := e.router.sent()[0]
		if renders {
			check(t, got, "p", list, kvhash.Root("", ""), 16)
		} else if !got.GetApproximate() {
			t.Errorf("prompt of %d tokens, want text", got.GetTokens())
		}
		if n := a.others.Load(); n != 0 {
			t.Errorf("%d questions to /tokenize", n)
		}
	}
}

func TestWorkerTokenizes(t *testing.T) {
	list, text := ids(40)
	var got atomic.Value
	a := &asked{tokenize: func(w http.ResponseWriter, r *http.Request) {
		b, _ := io.ReadAll(r.Body)
		got.Store(string(b))
		_, _ = io.WriteString(w, `{"count":40,"max_model_len":4096,"tokens":`+text+`}`)
	}, render: refuses(403, `{"error":{"message":"Scale-out endpoints are disabled.","type":"PermissionDeniedError","param":null,"code":403}}`)}
	e := startAsked(t, a, nil)
	for range 3 {
		e.post(chatPath, `{"model":"chat","messages":[{"role":"user","content":"x"}],"tools":[{"type":"function"}],"chat_template_kwargs":{"a":1},"reasoning_effort":"low","add_generation_prompt":false}`)
		check(t, e.router.sent()[0], "p", list, kvhash.Root("", ""), 16)
	}
	want := `{"model":"base-model","messages":[{"role":"user","content":"x"}],"add_special_tokens":false,"add_generation_prompt":false,"continue_final_message":false,` +
		`"tools":[{"type":"function"}],"chat_template_kwargs":{"a":1,"reasoning_effort":"low"}}`
	if got.Load() != want {
		t.Errorf("worker was asked %s", got.Load())
	}
	if r, o := a.renders.Load(), a.others.Load(); r != 1 || o != 3 {
		t.Errorf("%d renders and %d others: what a worker lacks must be remembered", r, o)
	}
	e.post(textPath, `{"model":"base-model","prompt":"a\"b","add_special_tokens":false}`)
	if want := `{"model":"base-model","prompt":"a\"b","add_special_tokens":false}`; got.Load() != want {
		t.Errorf("worker was asked %s", got.Load())
	}
}

// Approximate mode still recognises the next turn of a conversation.
func TestApproximate(t *testing.T) {
	a := &asked{}
	e := startAsked(t, a, func(c *ingress.Config) { c.PromptRetry = time.Hour })
	history := `{"role":"user","content":"` + strings.Repeat("tell me about caches ", 50) + `"}`
	body := func(model, more, salt string) string {
		return fmt.Sprintf(`{"model":%q,"messages":[%s%s],"cache_salt":%q}`, model, history, more, salt)
	}
	e.post(chatPath, body("chat", "", ""))
	first := e.router.sent()[0]
	if !first.GetApproximate() || first.GetBlockSize() != 16 || first.GetTokens() < 200 || len(first.GetBlockHashes()) < 12 {
		t.Fatalf("got %v", first)
	}
	e.post(chatPath, body("chat", `,{"role":"assistant","content":"They keep things."}`, ""))
	next := e.router.sent()[0]
	n := len(first.GetBlockHashes())
	if diff := cmp.Diff(first.GetBlockHashes(), next.GetBlockHashes()[:n]); diff != "" || len(next.GetBlockHashes()) <= n-1 {
		t.Errorf("the next turn shares no prefix: %s", diff)
	}
	for _, other := range []string{body("sql", "", ""), body("chat", "", "salt")} {
		e.post(chatPath, other)
		if e.router.sent()[0].GetBlockHashes()[0] == first.GetBlockHashes()[0] {
			t.Error("another adapter or salt has the same hash")
		}
	}
	if !strings.Contains(e.metrics(), `mode="approximate"`) {
		t.Error("the mode is not in the metrics")
	}
	// One question of each kind for each of the two profiles, then no more.
	if r, o := a.renders.Load(), a.others.Load(); r != 2 || o != 2 {
		t.Errorf("%d renders and %d others", r, o)
	}
}

// A worker that is slow to tell does not hold up requests, nor does one that
// is at fault; after a while they are asked again.
func TestSlowToTell(t *testing.T) {
	stuck := func(_ http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		<-r.Context().Done()
	}
	a := &asked{render: stuck, tokenize: stuck}
	// Long enough to get there on a busy machine.
	e := startAsked(t, a, func(c *ingress.Config) { c.PromptTimeout, c.PromptRetry = 500*time.Millisecond, time.Nanosecond })
	for i := range 2 {
		if resp, body := e.post(chatPath, chatRequest(false, "")); resp.StatusCode != 200 || !e.router.sent()[0].GetApproximate() {
			t.Errorf("got %d %s", resp.StatusCode, body)
		}
		if int(a.renders.Load()) != i+1 {
			t.Errorf("%d questions after %d requests", a.renders.Load(), i+1)
		}
	}

	list, text := ids(40)
	flaky := &asked{render: refuses(400, `{"error":{"message":"x"}}`)}
	e = startAsked(t, flaky, nil)
	e.post(chatPath, chatRequest(false, ""))
	if !e.router.sent()[0].GetApproximate() || flaky.others.Load() != 0 {
		t.Error("a refused request was put to other endpoints")
	}
	flaky.render = refuses(200, `{"token_ids":`+text+`}`)
	e.post(chatPath, chatRequest(false, ""))
	check(t, e.router.sent()[0], "p", list, kvhash.Root("", ""), 16)
	flaky.render = refuses(200, `{"nothing":1}`)
	e.post(chatPath, chatRequest(false, ""))
	if !e.router.sent()[0].GetApproximate() {
		t.Error("an answer without ids counts")
	}
}

func TestClientLeavesWhileAsking(t *testing.T) {
	begun := make(chan struct{})
	a := &asked{render: func(_ http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		close(begun)
		<-r.Context().Done()
	}}
	e := startAsked(t, a, nil)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() {
		_, err := e.begin(ctx, chatPath, chatRequest(false, ""))
		ended <- err
	}()
	await(t, "the question", begun)
	cancel()
	if err := <-ended; err == nil {
		t.Error("the request went on")
	}
	// The worker is not held to be at fault.
	list, text := ids(40)
	a.render = refuses(200, `{"token_ids":`+text+`}`)
	e.post(chatPath, chatRequest(false, ""))
	check(t, e.router.sent()[0], "p", list, kvhash.Root("", ""), 16)
}

// A tokenizer that cannot be used is no reason not to serve.
func TestTokenizerMissing(t *testing.T) {
	e := start(t, func(_ *ingress.Config, c *routerv1.Catalog) { c.Profiles[0].TokenizerPath = t.TempDir() }).ready()
	e.router.routes(newWorker(t, "w", refuses(200, whole)))
	if resp, _ := e.post(chatPath, chatRequest(false, "")); resp.StatusCode != 200 || !e.router.sent()[0].GetApproximate() {
		t.Errorf("got %d", resp.StatusCode)
	}
}

// Images are known to the engine only.
func TestMedia(t *testing.T) {
	e := start(t, func(_ *ingress.Config, c *routerv1.Catalog) { c.Profiles[0].TokenizerPath = modelDir(t) }).ready()
	e.router.routes(newWorker(t, "w", refuses(200, whole)))
	body := `{"model":"chat","messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"data:x"}}]}]}`
	if resp, _ := e.post(chatPath, body); resp.StatusCode != 200 || !e.router.sent()[0].GetApproximate() {
		t.Errorf("got %d", resp.StatusCode)
	}
}
