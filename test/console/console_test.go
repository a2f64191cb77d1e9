// Package console tests the web console as people meet it: in a real browser, on a
// running stack in front of a simulated fleet.
package console

import (
	"bytes"
	"context"
	"flag"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kinference/kinference/cmd/stack"
	"github.com/kinference/kinference/internal/fleetsim"
	"github.com/kinference/kinference/internal/fleetsim/engine"
	"github.com/kinference/kinference/internal/fleetsim/model"
	"github.com/kinference/kinference/internal/testenv"
)

func TestMain(m *testing.M) { testenv.Main(m) }

var update = flag.Bool("update", false, "write docs/console.png anew")

// hostile is a model's name that would run, were it taken for markup.
const hostile = `<img src=x onerror="document.title='owned'">`

const policies = `
---
apiVersion: kinference.buoyant.io/v1alpha1
kind: InferencePolicy
metadata: { name: short-prompts, namespace: shop }
spec:
  rules:
  - name: no-novels
    matches: [ { promptTokens: { greaterThan: 100000 } } ]
    reject: { reason: PromptTooLong, message: too long }
---
apiVersion: kinference.buoyant.io/v1alpha1
kind: InferencePolicy
metadata: { name: trial, namespace: shop }
spec:
  dryRun: true
  rules:
  - name: nobody
    reject: { reason: Trial, message: "not now" }
---
apiVersion: kinference.buoyant.io/v1alpha1
kind: InferencePool
metadata: { name: chat, namespace: shop }
spec:
  destinations: [ { kind: InferenceWorkerSet, name: l40s } ]
  objectives: [ { name: quick, indicator: TTFT, threshold: 5s, target: "95", window: 24h } ]
`

func start(t *testing.T) *stack.Stack {
	t.Helper()
	dir, err := model.Dir()
	if err != nil {
		t.Fatal(err)
	}
	var conf strings.Builder
	fmt.Fprintf(&conf, "apiVersion: kinference.buoyant.io/v1alpha1\nkind: InferenceWorkerSet\nmetadata: { name: l40s, namespace: shop }\nspec:\n  models: [ { name: sim/qwen, aliases: [ qwen, %q ] } ]\n  tokenizer: { path: %q }\n  endpoints:\n", hostile, dir)
	for i := range 3 {
		w, err := fleetsim.Start(t.Context(), fleetsim.Config{Name: fmt.Sprintf("gpu%d", i), Profile: engine.L40SPlain16, TimeScale: 5, Seed: int64(i + 1), Model: "sim/qwen", Admin: true})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(w.Kill)
		fmt.Fprintf(&conf, "  - { name: gpu%d, address: %q, kvEvents: %q, kvReplay: %q }\n", i, w.Addr(), w.EventsAddr(0), w.ReplayAddr(0))
	}
	folder := t.TempDir()
	if err := os.WriteFile(filepath.Join(folder, "fleet.yaml"), []byte(conf.String()+policies), 0o600); err != nil {
		t.Fatal(err)
	}
	var log bytes.Buffer
	st, err := stack.Start(t.Context(), stack.Options{ConfigDir: folder, TimeScale: 5, Seed: 1, Output: &log, DrainTimeout: 5 * time.Second})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := st.Stop(); err != nil {
			t.Errorf("stop: %v", err)
		}
		if t.Failed() {
			t.Logf("log of the stack:\n%s", log.String())
		}
	})
	return st
}

// ask sends one chat request and reads its answer.
func ask(t *testing.T, st *stack.Stack, model, prompt string, tokens int) *http.Response {
	t.Helper()
	body := fmt.Sprintf(`{"model": %q, "messages": [{"role": "user", "content": %q}], "max_tokens": %d, "stream": true}`, model, prompt, tokens)
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, st.URL()+"/v1/chat/completions", strings.NewReader(body))
	if err != nil {
		t.Error(err)
		return &http.Response{}
	}
	req.Header.Set("Content-Type", "application/json")
	r, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Error(err)
		return &http.Response{}
	}
	defer r.Body.Close()
	if _, err := io.Copy(io.Discard, r.Body); err != nil {
		t.Error(err)
	}
	return r
}

func TestConsole(t *testing.T) {
	t.Cleanup(http.DefaultClient.CloseIdleConnections)
	b := open(t)
	st := start(t)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if err := st.WaitReady(ctx); err != nil {
		t.Fatal(err)
	}
	raw, err := os.ReadFile(st.AdminTokenFile())
	if err != nil {
		t.Fatal(err)
	}

	// Nothing is shown without a token, and a wrong one is refused.
	b.goTo(st.ConsoleURL())
	b.until("login is shown", `!document.getElementById('login').hidden && document.getElementById('app').hidden`)
	b.fill("#token", "wrong")
	b.click("#login button")
	b.until("a wrong token is refused", `document.getElementById('refused').textContent.includes('token') && document.getElementById('app').hidden`)
	refused := len(b.complaints()) // the browser logs the 401

	b.fill("#token", strings.TrimSpace(string(raw)))
	b.click("#login button")
	b.until("the fleet is shown", `document.querySelectorAll('#fleet article.good').length === 3`)

	// Values change with the requests.
	prefix := strings.Repeat("The river bends towards the old mill and the road. ", 120)
	for i := range 12 {
		if r := ask(t, st, "qwen", prefix+fmt.Sprint(i), 8); r.StatusCode != 200 {
			t.Fatalf("request %d: status %d", i, r.StatusCode)
		}
	}
	b.until("workers show requests", `[...document.querySelectorAll('#fleet article')].some((a) => /\d+ requests/.test(a.textContent))`)
	b.until("workers show cache hits", `[...document.querySelectorAll('#fleet article')].some((a) => /Cache hits\s*([5-9]\d|100) %/.test(a.textContent))`)
	b.until("workers show times", `[...document.querySelectorAll('#fleet article')].some((a) => /TTFT\s*[\d.]+ m?s/.test(a.textContent))`)
	var load sync.WaitGroup
	var shown atomic.Bool
	end := func() { shown.Store(true); load.Wait() }
	defer end() // of a test that fails, too
	for i := range 30 {
		load.Go(func() {
			for first := true; first || !shown.Load(); first = false { // until the page was looked at
				ask(t, st, "qwen", strings.Repeat(fmt.Sprintf("Part %d of the manual says so. ", i%5), 300), 400)
			}
		})
	}
	b.until("workers are busy", `[...document.querySelectorAll('#fleet article')].filter((a) => /Running\s*[1-9]/.test(a.textContent)).length > 1`)
	shot := b.screenshot()
	end()

	// Decisions come live; names that callers choose are text.
	b.click("#tab-decisions")
	b.until("kept decisions are shown", `document.querySelectorAll('#stream tbody tr').length >= 40`)
	r := ask(t, st, hostile, "hello", 8)
	id := r.Header.Get("X-Request-Id")
	if r.StatusCode != 200 || id == "" {
		t.Fatalf("request for the hostile name: status %d, id %q", r.StatusCode, id)
	}
	b.until("the new decision is shown", fmt.Sprintf(`document.querySelector('#stream tbody tr').dataset.request === %q`, id))
	b.until("its model is text", fmt.Sprintf(`document.querySelector('#stream tbody tr').textContent.includes(%q)`, hostile))
	b.click("#stream tbody tr")
	b.until("it is explained", `document.querySelectorAll('#explain table[aria-label=Candidates] tbody tr').length === 3`)
	b.until("the dry run is told", `document.getElementById('explain').textContent.includes('reject by shop/trial/nobody')`)
	var title string
	if err := b.eval("document.title + document.querySelectorAll('img').length", &title); err != nil || title != "Kinference0" {
		t.Errorf("the hostile name ran or became markup: %q, %v", title, err)
	}
	var text string
	if err := b.eval("document.documentElement.textContent", &text); err != nil || strings.Contains(text, "old mill") {
		t.Errorf("a prompt is shown, or: %v", err)
	}

	b.click("#tab-usage")
	b.until("usage is shown", `(() => { document.getElementById('tab-usage').click(); return [...document.querySelectorAll('#usage table[aria-label=Usage] tbody tr')].some((r) => r.textContent.includes('sim/qwen') || r.textContent.includes('qwen')); })()`)
	b.until("objectives are shown", `document.getElementById('usage').textContent.includes('quick')`)
	b.click("#tab-policies")
	b.until("policies are shown", `/short-prompts[\s\S]*in force[\s\S]*trial[\s\S]*dry run/.test(document.getElementById('policies').textContent)`)

	// The keyboard does, too; the token survives a reload of this tab and goes when asked.
	b.do(`document.getElementById('tab-policies').dispatchEvent(new KeyboardEvent('keydown', { key: 'ArrowRight', bubbles: true }))`)
	b.until("an arrow leads to the next view", `!document.getElementById('fleet').hidden && document.activeElement.id === 'tab-fleet'`)
	b.goTo(st.ConsoleURL())
	b.until("the fleet is shown again", `document.querySelectorAll('#fleet article').length === 3`)
	b.click("#leave")
	b.until("nothing is left", `document.getElementById('app').hidden && document.querySelectorAll('article, tbody tr').length === 0 && sessionStorage.length === 0`)

	for _, c := range b.complaints()[refused:] {
		t.Errorf("the page's console says: %s", c)
	}
	if *update {
		if err := os.WriteFile("../../docs/console.png", shot, 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

// The page needs no token, its data does.
func TestConsoleWithoutToken(t *testing.T) {
	t.Cleanup(http.DefaultClient.CloseIdleConnections)
	st := start(t)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if err := st.WaitReady(ctx); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]int{
		"/console/": 200, "/": 401, "/other": 401, "/kinference.admin.v1.AdminService/Status": 401,
		"/kinference.accounting.v1.AccountingService/QueryUsage": 401, "/kinference.accounting.v1.AccountingService/ExportUsage": 401,
	} {
		method := http.MethodPost
		if path == "/console/" {
			method = http.MethodGet
		}
		req, err := http.NewRequestWithContext(ctx, method, st.AdminAPIURL()+path, strings.NewReader("{}"))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Content-Type", "application/json")
		r, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		r.Body.Close()
		if r.StatusCode != want {
			t.Errorf("%s: got %d, want %d", path, r.StatusCode, want)
		}
	}
}
