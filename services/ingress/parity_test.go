package ingress_test

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httputil"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kinference/kinference/internal/chat"
	"github.com/kinference/kinference/internal/fleetsim"
	"github.com/kinference/kinference/internal/fleetsim/engine"
	"github.com/kinference/kinference/internal/fleetsim/model"
	"github.com/kinference/kinference/internal/tokens"
	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
	"github.com/kinference/kinference/services/ingress"
)

// simulateModel starts a simulated worker with the model of a folder.
func simulateModel(t *testing.T, dir string) *worker {
	t.Helper()
	tok, err := tokens.Load(dir)
	if err != nil {
		t.Fatal(err)
	}
	tmpl, err := chat.Load(dir)
	if err != nil {
		t.Fatal(err)
	}
	s, err := fleetsim.Start(context.Background(), fleetsim.Config{
		Name: "w", Profile: engine.L40SPlain16, TimeScale: 500, Model: "base-model", LoRAs: []string{"sql"}, Tokenizer: tok, Template: tmpl,
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Kill)
	return &worker{name: "w/0", url: s.URL(), model: "base-model"}
}

// tells makes a worker that tells token ids by the model of a folder, and for the
// rest is served by h.
func tells(t *testing.T, dir string, h http.HandlerFunc) http.HandlerFunc {
	to, err := url.Parse(simulateModel(t, dir).url)
	if err != nil {
		t.Fatal(err)
	}
	transport := &http.Transport{}
	t.Cleanup(transport.CloseIdleConnections)
	proxy := &httputil.ReverseProxy{Transport: transport, Rewrite: func(r *httputil.ProxyRequest) { r.SetURL(to) }}
	return func(w http.ResponseWriter, r *http.Request) {
		if strings.HasSuffix(r.URL.Path, "/render") || r.URL.Path == "/tokenize" {
			proxy.ServeHTTP(w, r)
			return
		}
		h(w, r)
	}
}

// otherModel is a folder with the simulated model, changed.
func otherModel(t *testing.T, change func(dir string)) string {
	t.Helper()
	dir := t.TempDir()
	if err := model.CopyTo(dir); err != nil {
		t.Fatal(err)
	}
	change(dir)
	return dir
}

// otherTemplate adds a space to what a user says.
func otherTemplate(t *testing.T) string {
	return otherModel(t, func(dir string) {
		path := filepath.Join(dir, "chat_template.jinja")
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		changed := strings.Replace(string(text), `<|im_start|>user\n'`, `<|im_start|>user \n'`, 1)
		if changed == string(text) {
			t.Fatal("the template is another one than this test knows")
		}
		if err := os.WriteFile(path, []byte(changed), 0o644); err != nil {
			t.Fatal(err)
		}
	})
}

// otherTokenizer lacks the later half of the merges.
func otherTokenizer(t *testing.T) string {
	return otherModel(t, func(dir string) {
		path := filepath.Join(dir, "tokenizer.json")
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		var all map[string]any
		if err := json.Unmarshal(text, &all); err != nil {
			t.Fatal(err)
		}
		bpe := all["model"].(map[string]any)
		merges := bpe["merges"].([]any)
		bpe["merges"] = merges[:len(merges)/2]
		if text, err = json.Marshal(all); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, text, 0o644); err != nil {
			t.Fatal(err)
		}
	})
}

// verdict waits until the router was told of a verdict: on "profile|worker".
func (e *env) verdict(of, want string) {
	e.t.Helper()
	timeout := time.After(patience)
	for {
		e.router.mu.Lock()
		got := ""
		for _, v := range e.router.parity.GetVerdicts() {
			if v.GetProfile()+"|"+v.GetWorker() == of {
				got = strings.TrimPrefix(v.GetState().String(), "PARITY_STATE_") + " " + strings.TrimPrefix(v.GetCause().String(), "PARITY_CAUSE_")
			}
		}
		reported := e.router.reported
		e.router.mu.Unlock()
		if got == want {
			return
		}
		select {
		case <-reported:
		case <-timeout:
			e.t.Fatalf("verdict on %s is %q, want %q", of, got, want)
		}
	}
}

// A model folder that is not that of the engine is found out before it costs a
// hit, the engine is asked instead, and a metric and the router are told why.
func TestOtherModelFolder(t *testing.T) {
	for cause, dir := range map[string]string{"TEMPLATE": otherTemplate(t), "TOKENIZER": otherTokenizer(t)} {
		t.Run(cause, func(t *testing.T) {
			w := simulateModel(t, modelDir(t))
			e := start(t, func(_ *ingress.Config, c *routerv1.Catalog) {
				for _, p := range c.Profiles {
					p.TokenizerPath, p.PassTokenIds = dir, true
				}
				c.Workers = []*routerv1.Worker{{Uid: "w", WorkerSet: "ns/set", Url: w.url}}
			}).ready()
			e.router.routes(w)
			e.verdict("|w", "DIFFERS "+cause)
			e.verdict("p|w", "DIFFERS "+cause)
			e.verdict("sql|w", "DIFFERS "+cause)
			resp, body := e.post(chatPath, chatRequest(false, `,"max_tokens":3`))
			done, _ := e.router.done(resp.Header.Get("X-Request-Id"))
			if p := e.router.sent()[0]; resp.StatusCode != 200 || p.GetApproximate() || p.GetTokens() != done.GetPromptTokens() {
				t.Errorf("got %d %s; routed with %d tokens, the engine counts %d", resp.StatusCode, body, p.GetTokens(), done.GetPromptTokens())
			}
			metrics := e.metrics()
			for _, want := range []string{
				`kinference_ingress_prompt_mode_total{mode="render",`,
				`kinference_ingress_parity_distrusted{cause="` + strings.ToLower(cause) + `",`,
				`kinference_ingress_parity_checks_total{kind="probe",`,
			} {
				if !strings.Contains(metrics, want) {
					t.Errorf("metrics lack %s", want)
				}
			}
			if strings.Contains(metrics, `mode="local"`) {
				t.Error("ids of the wrong model were used")
			}
		})
	}
}

// The engine is mended: its new process is asked at once, and the tokenizer is
// used again.
func TestParityHeals(t *testing.T) {
	var now atomic.Pointer[http.HandlerFunc]
	wrong, right := tells(t, otherTemplate(t), refuses(200, whole)), tells(t, modelDir(t), refuses(200, whole))
	now.Store(&wrong)
	w := newWorker(t, "w/0", func(w http.ResponseWriter, r *http.Request) { (*now.Load())(w, r) })
	e := start(t, func(_ *ingress.Config, c *routerv1.Catalog) {
		c.Profiles[0].TokenizerPath, c.Epochs = modelDir(t), map[string]string{"w": "1"}
		c.Workers = []*routerv1.Worker{{Uid: "w", WorkerSet: "ns/set", Url: w.url}}
	}).ready()
	e.router.routes(w)
	e.verdict("p|w", "DIFFERS TEMPLATE")
	now.Store(&right)
	e.router.publish(func(c *routerv1.Catalog) { c.Epochs = map[string]string{"w": "2"} })
	e.verdict("|w", "AGREES UNSPECIFIED")
	e.verdict("p|w", "")
	e.post(chatPath, chatRequest(false, ""))
	if !strings.Contains(e.metrics(), `mode="local"`) || !strings.Contains(e.metrics(), `kinference_ingress_parity_distrusted{cause="none",`) {
		t.Error("the tokenizer is not used again")
	}
}

// publish changes the catalog.
func (r *router) publish(change func(*routerv1.Catalog)) {
	r.mu.Lock()
	defer r.mu.Unlock()
	c := &routerv1.Catalog{Version: r.catalog.GetVersion() + 1, Models: r.catalog.GetModels(), Profiles: r.catalog.GetProfiles(), Workers: r.catalog.GetWorkers()}
	change(c)
	r.catalog = c
	close(r.changed)
	r.changed = make(chan struct{})
}

// An engine that tells no ids still tells how many there were. What it counts
// otherwise for a reason is not held against the tokenizer.
func TestCountsDiffer(t *testing.T) {
	dir := modelDir(t)
	tok, err := tokens.Load(dir)
	if err != nil {
		t.Fatal(err)
	}
	right := len(tok.Encode(nil, "Once upon a time", true))
	var counts atomic.Int64
	w := newWorker(t, "w/0", func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != textPath && r.URL.Path != chatPath {
			refuses(404, `{}`)(w, r)
			return
		}
		_, _ = io.Copy(io.Discard, r.Body)
		fmt.Fprintf(w, `{"model":"base-model","choices":[{"index":0,"text":"x","finish_reason":"stop"}],"usage":{"prompt_tokens":%d,"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":3}}}`, counts.Load())
	})
	e := start(t, func(_ *ingress.Config, c *routerv1.Catalog) {
		c.Profiles[0].TokenizerPath = dir
		c.Workers = []*routerv1.Worker{{Uid: "w", WorkerSet: "ns/set", Url: w.url}}
	}).ready()
	e.router.routes(w)
	ask := func(path, members string) *routerv1.Prompt {
		if resp, body := e.post(path, `{"model":"base-model",`+members+`}`); resp.StatusCode != 200 {
			t.Fatalf("got %d %s", resp.StatusCode, body)
		}
		return e.router.sent()[0]
	}
	counts.Store(int64(right))
	for range 3 {
		ask(textPath, `"prompt":"Once upon a time"`)
	}
	counts.Store(10_000)
	for range 5 {
		ask(textPath, `"prompt":["Once upon a time","there was"]`)
		ask(textPath, `"prompt":[1,2,3]`)
		ask(textPath, `"prompt":"Once","truncate_prompt_tokens":2`)
		ask(textPath, `"prompt":"Once","prompt_embeds":"x"`)
		ask(chatPath, `"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"data:x"}}]}]`)
		ask(chatPath, `"messages":[{"role":"user","content":"x"}],"chat_template":"{{ messages }}"`)
		ask(chatPath, `"messages":[{"role":"user","content":"x"}],"kv_transfer_params":{"prompt_token_ids":[1]}`)
	}
	// Nor is it compared with the tokens that the router predicted.
	resp, _ := e.post(textPath, `{"model":"base-model","prompt":["Once upon a time","there was"]}`)
	if done, _ := e.router.done(resp.Header.Get("X-Request-Id")); done.PromptTokens != nil || done.CachedTokens != nil || done.OutputTokens == nil {
		t.Errorf("reported %v of a list of prompts", done)
	}
	counts.Store(int64(right))
	resp, _ = e.post(textPath, `{"model":"base-model","prompt":"Once upon a time","n":2}`)
	if done, _ := e.router.done(resp.Header.Get("X-Request-Id")); done.PromptTokens == nil || done.CachedTokens != nil {
		t.Errorf("reported %v of several choices", done)
	}
	counts.Store(10_000)
	if p := ask(textPath, `"prompt":"Once upon a time"`); p.GetApproximate() {
		t.Fatal("the tokenizer is distrusted for counts that differ for a reason")
	}
	for range 2 {
		ask(textPath, `"prompt":"Once upon a time"`)
	}
	e.verdict("p|", "DIFFERS COUNT")
	if p := ask(textPath, `"prompt":"Once upon a time"`); !p.GetApproximate() {
		t.Error("the tokenizer is trusted still")
	}
	if !strings.Contains(e.metrics(), `kinference_ingress_parity_checks_total{kind="count",`) {
		t.Error("the comparisons are not in the metrics")
	}
}
