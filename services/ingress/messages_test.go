package ingress_test

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/google/go-cmp/cmp"

	"github.com/kinference/kinference/internal/anthropic/grammar"
	"github.com/kinference/kinference/internal/rpc"
	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
	"github.com/kinference/kinference/services/ingress"
)

const (
	messagesPath = "/v1/messages"
	countPath    = "/v1/messages/count_tokens"
)

// messagesRequest is what an SDK sends, with more members in front.
func messagesRequest(stream bool, more string) string {
	return fmt.Sprintf(`{%s"model":"chat","max_tokens":16,"stream":%v,"messages":[{"role":"user","content":"Hello there"}]}`, more, stream)
}

// message reads a Messages stream by the grammar.
func message(t testing.TB, body string) *grammar.Message {
	t.Helper()
	m, err := grammar.Read(strings.NewReader(body))
	if err != nil {
		t.Fatalf("%v in:\n%s", err, body)
	}
	return m
}

// messagesFault reads an error body in Anthropic's form.
func messagesFault(t testing.TB, resp *http.Response, body string) (kind, text string) {
	t.Helper()
	var e struct {
		Type  string
		Error struct{ Type, Message string }
		ID    string `json:"request_id"`
	}
	if err := json.Unmarshal([]byte(body), &e); err != nil || e.Type != "error" || e.Error.Message == "" {
		t.Fatalf("not an Anthropic error: %s", body)
	}
	if id := resp.Header.Get("Request-Id"); id == "" || e.ID != id || resp.Header.Get("X-Request-Id") != id {
		t.Errorf("request-id is %q, the body says %q, x-request-id %q", id, e.ID, resp.Header.Get("X-Request-Id"))
	}
	return e.Error.Type, e.Error.Message
}

func TestMessagesStream(t *testing.T) {
	e := start(t, nil).ready()
	bodies := make(chan string, 1)
	e.router.routes(newWorker(t, "w", func(w http.ResponseWriter, r *http.Request) {
		b, _ := io.ReadAll(r.Body)
		bodies <- r.URL.Path + " " + string(b)
		answers(roleChunk(), textChunk("Hel"), ": comment\n\n", textChunk("lo data: [DONE]"), stopChunk, usageChunk[:40], usageChunk[40:], doneEvent[:7], doneEvent[7:])(w, r)
	}))
	resp, body := e.post(messagesPath, messagesRequest(true, `"system":[{"type":"text","text":"x-anthropic-billing-header: cch=1"},{"type":"text","text":"Be terse"}],`), "anthropic-version", "2023-06-01")
	want := chatPath + ` {"model":"base-model","messages":[{"role":"system","content":"Be terse"},{"role":"user","content":"Hello there"}],"max_tokens":16,"stream":true,"stream_options":{"include_usage":true,"continuous_usage_stats":true}}`
	if diff := cmp.Diff(want, <-bodies); diff != "" {
		t.Errorf("the worker got (-want +got):\n%s", diff)
	}
	m := message(t, body)
	id := m.ID
	m.ID = ""
	if diff := cmp.Diff(&grammar.Message{
		Model: "chat", Blocks: []grammar.Block{{Type: "text", Text: "Hello data: [DONE]"}}, StopReason: "end_turn", Pings: 1,
		Start: m.Start, Usage: grammar.Usage{Input: 4, Cached: 8, Output: 2},
	}, m); diff != "" || !strings.HasPrefix(id, "msg_") || m.Start.Input == 0 || strings.Contains(body, "[DONE]\n") {
		t.Errorf("id %q (-want +got):\n%s\n%s", id, diff, body)
	}
	for name, want := range map[string]string{"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache", "Content-Length": "", "Request-Id": resp.Header.Get("X-Request-Id")} {
		if got := resp.Header.Get(name); got != want {
			t.Errorf("%s is %q, want %q", name, got, want)
		}
	}
	done, words := e.router.done(resp.Header.Get("X-Request-Id"))
	if done.GetPromptTokens() != 12 || done.GetCachedTokens() != 8 || done.GetOutputTokens() != 2 || strings.Join(words, ", ") != "first token, ok" {
		t.Errorf("reported %v, %v", words, done)
	}
	if a := e.router.routed()[0].GetAttributes(); a.GetEndpoint() != "Messages" {
		t.Errorf("the policy sees endpoint %q", a.GetEndpoint())
	}
	if text := e.metrics(); !strings.Contains(text, `route="/v1/messages"`) {
		t.Error("no metric with the route /v1/messages")
	}
}

// Each event reaches the client before the worker sends the next one.
func TestMessagesAreNotBuffered(t *testing.T) {
	e := start(t, nil).ready()
	got := make(chan struct{})
	e.router.routes(newWorker(t, "w", func(w http.ResponseWriter, r *http.Request) {
		answers(roleChunk())(w, r)
		for _, p := range []string{textChunk("a"), textChunk("b")} {
			_, _ = io.WriteString(w, p)
			_ = http.NewResponseController(w).Flush()
			select {
			case <-got:
			case <-r.Context().Done():
				return
			}
		}
		_, _ = io.WriteString(w, stopChunk+usageChunk+doneEvent)
	}))
	resp, err := e.begin(context.Background(), messagesPath, messagesRequest(true, ""))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	r := bufio.NewReader(resp.Body)
	for _, want := range []string{"message_start", "content_block_start", `"text":"a"`, `"text":"b"`} {
		if ev := readEvent(t, r); !strings.Contains(ev, want) {
			t.Fatalf("got %q, want %q", ev, want)
		}
		if strings.HasPrefix(want, `"text"`) {
			got <- struct{}{}
		}
	}
	rest, err := io.ReadAll(r)
	if err != nil || !strings.HasSuffix(string(rest), "event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n") {
		t.Errorf("%v after %q", err, rest)
	}
}

func TestMessagesWhole(t *testing.T) {
	e := start(t, nil).ready()
	e.router.routes(newWorker(t, "w", refuses(http.StatusOK, whole)))
	resp, body := e.post(messagesPath, messagesRequest(false, ""))
	var got map[string]any
	if err := json.Unmarshal([]byte(body), &got); err != nil || resp.StatusCode != http.StatusOK {
		t.Fatalf("%d %v: %s", resp.StatusCode, err, body)
	}
	delete(got, "id")
	want := map[string]any{
		"type": "message", "role": "assistant", "model": "chat", "content": []any{map[string]any{"type": "text", "text": "Hi"}}, "stop_reason": "end_turn", "stop_sequence": nil,
		"usage": map[string]any{"input_tokens": 4., "cache_creation_input_tokens": 0., "cache_read_input_tokens": 8., "output_tokens": 2.},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if resp.Header.Get("Request-Id") == "" || resp.ContentLength != int64(len(body)) {
		t.Errorf("headers %v", resp.Header)
	}
}

// Errors of every stage come in the client's dialect.
func TestMessagesErrors(t *testing.T) {
	fails := func(code connect.Code) func(*env) {
		return func(e *env) {
			e.router.set(func(*routerv1.RouteRequest) (*routerv1.RouteResponse, error) {
				return nil, rpc.Error(code, "no", 3*time.Second)
			})
		}
	}
	serves := func(status int, body string) func(*env) {
		return func(e *env) { e.router.routes(newWorker(e.t, "w", refuses(status, body))) }
	}
	e := start(t, func(c *ingress.Config, _ *routerv1.Catalog) { c.MaxBody = 4096; c.MaxBodies = 8192 }).ready()
	for _, c := range []struct {
		name, path, body string
		prepare          func(*env)
		status           int
		kind, text       string
	}{
		{"bad JSON", messagesPath, `{`, nil, 400, "invalid_request_error", "not valid JSON"},
		{"no max_tokens", messagesPath, `{"model":"chat","messages":[{"role":"user","content":"x"}]}`, nil, 400, "invalid_request_error", "max_tokens: Field required"},
		{"unknown model", messagesPath, strings.Replace(messagesRequest(false, ""), `"chat"`, `"claude"`, 1), nil, 404, "not_found_error", "does not exist"},
		{"body too large", messagesPath, messagesRequest(false, `"metadata":{"x":"`+strings.Repeat("x", 5000)+`"},`), nil, 413, "request_too_large", "larger than"},
		{"too much asked for", messagesPath, strings.Replace(messagesRequest(false, ""), `"max_tokens":16`, `"max_tokens":50000`, 1), fails(connect.CodeOutOfRange), 400, "invalid_request_error", "prompt is too long"},
		{"no worker", messagesPath, messagesRequest(true, ""), fails(connect.CodeUnavailable), 529, "overloaded_error", "No model server"},
		{"saturated", messagesPath, messagesRequest(true, ""), fails(connect.CodeResourceExhausted), 429, "rate_limit_error", "busy"},
		{"policy", messagesPath, messagesRequest(true, ""), fails(connect.CodePermissionDenied), 403, "permission_error", "policy refuses"},
		{"the engine finds the prompt too long", messagesPath, messagesRequest(false, ""), serves(400, `{"error":{"message":"This model's maximum context length is 10 tokens.","type":"BadRequestError","param":null,"code":400}}`), 400, "invalid_request_error", "prompt is too long: This model's"},
		{"the engine breaks", messagesPath, messagesRequest(false, ""), serves(500, `secret`), 502, "api_error", "could not complete"},
		{"an answer that is none", messagesPath, messagesRequest(false, ""), serves(200, `{"choices":[]}`), 502, "api_error", "no valid answer"},
		{"count_tokens without messages", countPath, `{"model":"chat"}`, nil, 400, "invalid_request_error", "messages: Field required"},
		{"count_tokens of an unknown model", countPath, `{"model":"x","messages":[{"role":"user","content":"x"}]}`, nil, 404, "not_found_error", "does not exist"},
		{"another path of the API", "/v1/messages/batches", `{}`, nil, 404, "not_found_error", "nothing at this path"},
	} {
		t.Run(c.name, func(t *testing.T) {
			if c.prepare != nil {
				c.prepare(e)
			}
			resp, body := e.post(c.path, c.body, "anthropic-version", "2023-06-01")
			kind, text := messagesFault(t, resp, body)
			if resp.StatusCode != c.status || kind != c.kind || !strings.Contains(text, c.text) || strings.Contains(body, "secret") {
				t.Errorf("got %d %s %q, want %d %s %q", resp.StatusCode, kind, text, c.status, c.kind, c.text)
			}
			if c.status == 429 || c.status == 529 {
				if resp.Header.Get("Retry-After") == "" {
					t.Error("no Retry-After")
				}
			}
		})
	}
	resp, err := e.client.Get(e.url + messagesPath)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	body, _ := io.ReadAll(resp.Body)
	if kind, _ := messagesFault(t, resp, string(body)); resp.StatusCode != 405 || kind != "invalid_request_error" || resp.Header.Get("Allow") != "POST" {
		t.Errorf("GET: %d %s", resp.StatusCode, body)
	}
}

// Limits and credentials speak the client's dialect as well, and a tenant's
// salt takes the place of the client's.
func TestMessagesTenants(t *testing.T) {
	e := startLimited(t, nil, perMinute("rpm", requestCount(60)), perMinute("tpm", totalTokens(60)))
	bodies := make(chan string, 1)
	e.router.routes(newWorker(t, "w", func(w http.ResponseWriter, r *http.Request) {
		b, _ := io.ReadAll(r.Body)
		bodies <- string(b)
		refuses(http.StatusOK, usageText(8, 0, 20))(w, r)
	}))
	resp, body := e.post(messagesPath, messagesRequest(false, `"cache_salt":"mine",`))
	if resp.StatusCode != http.StatusOK || resp.Header.Get("Anthropic-Ratelimit-Requests-Remaining") != "59" || resp.Header.Get("Anthropic-Ratelimit-Tokens-Limit") != "60" ||
		resp.Header.Get("X-Ratelimit-Limit-Requests") != "" {
		t.Errorf("%d %s %v", resp.StatusCode, body, resp.Header)
	}
	if sent := <-bodies; strings.Contains(sent, "mine") || strings.Count(sent, `"cache_salt"`) != 1 {
		t.Errorf("the worker got %s", sent)
	}
	e.limiter.end(1)
	resp, body = e.post(messagesPath, strings.Replace(messagesRequest(false, ""), `"max_tokens":16`, `"max_tokens":40`, 1))
	if kind, _ := messagesFault(t, resp, body); resp.StatusCode != http.StatusTooManyRequests || kind != "rate_limit_error" || resp.Header.Get("Retry-After") == "" {
		t.Errorf("%d %s %v", resp.StatusCode, body, resp.Header)
	}
	guarded := startLimited(t, func(_ *ingress.Config, c *routerv1.Catalog) { c.Backends[0].AnonymousTenant = "" })
	resp, body = guarded.post(messagesPath, messagesRequest(false, ""))
	if kind, _ := messagesFault(t, resp, body); resp.StatusCode != http.StatusUnauthorized || kind != "authentication_error" {
		t.Errorf("%d %s %v", resp.StatusCode, body, resp.Header)
	}
}

// A stream fails over until its first content, and ends with a typed error
// after it.
func TestMessagesFailures(t *testing.T) {
	e := start(t, nil).ready()
	good := newWorker(t, "good", answers(roleChunk(), textChunk("Hi"), stopChunk, usageChunk, doneEvent))
	engineError := `data: {"error":{"message":"CUDA secret","type":"InternalServerError","param":null,"code":500}}` + "\n\n"
	for _, c := range []struct {
		name   string
		pieces []string
		want   string // error type; empty: the good worker's answer
	}{
		{"cut before content", []string{roleChunk()}, ""},
		{"error before content", []string{roleChunk(), engineError, doneEvent}, ""},
		{"cut after content, without [DONE]", []string{roleChunk(), textChunk("Hi")}, "api_error"},
		{"error after good text (vLLM sends [DONE] behind it)", []string{roleChunk(), textChunk("Hi"), engineError, doneEvent}, "api_error"},
	} {
		t.Run(c.name, func(t *testing.T) {
			e.router.routes(newWorker(t, "bad", answers(c.pieces...)), good)
			_, body := e.post(messagesPath, messagesRequest(true, ""))
			m := message(t, body)
			if m.Error != c.want || m.Text("text") != "Hi" || strings.Contains(body, "secret") {
				t.Errorf("got %+v", m)
			}
		})
	}
}

// waits makes a worker that sends nothing until go is closed.
func waits(release <-chan struct{}, h http.HandlerFunc) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		select {
		case <-release:
			h(w, r)
		case <-r.Context().Done():
		}
	}
}

// While a stream waits, its client hears of it; then it goes on as if nothing
// had been, or ends with an error event.
func TestPings(t *testing.T) {
	for _, c := range []struct {
		name, path, body, ping string
		fault                  string
		handler                http.HandlerFunc
		check                  func(*testing.T, string)
	}{
		{"messages", messagesPath, messagesRequest(true, ""), "event: ping", "", answers(roleChunk(), textChunk("Hi"), stopChunk, usageChunk, doneEvent), func(t *testing.T, body string) {
			if m := message(t, body); m.Text("text") != "Hi" || m.Pings < 2 || m.Error != "" || m.Start.Input == 0 || m.Usage.Cached != 8 {
				t.Errorf("got %+v", m)
			}
		}},
		{"messages that fail", messagesPath, messagesRequest(true, ""), "event: ping", "", refuses(500, ""), func(t *testing.T, body string) {
			if m := message(t, body); m.Error != "api_error" || len(m.Blocks) > 0 {
				t.Errorf("got %+v", m)
			}
		}},
		{"chat", chatPath, chatRequest(true, ""), ": waiting", "", answers(roleChunk(), textChunk("Hi"), stopChunk, usageChunk, doneEvent), func(t *testing.T, body string) {
			if got, want := strings.ReplaceAll(body, ": waiting\n\n", ""), renamed(roleChunk()+textChunk("Hi")+stopChunk+doneEvent); got != want {
				t.Errorf("got %q", got)
			}
		}},
		{"chat that fails", chatPath, chatRequest(true, ""), ": waiting", "", refuses(500, ""), func(t *testing.T, body string) {
			last := strings.TrimPrefix(strings.ReplaceAll(body, ": waiting\n\n", ""), "data: ")
			if kind, _, code := parseError(t, last); kind != "server_error" || code != "upstream_error" {
				t.Errorf("got %q", body)
			}
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			e := start(t, func(cfg *ingress.Config, _ *routerv1.Catalog) { cfg.PingInterval = 5 * time.Millisecond }).ready()
			release := make(chan struct{})
			e.router.routes(newWorker(t, "w", waits(release, c.handler)))
			resp, err := e.begin(context.Background(), c.path, c.body)
			if err != nil {
				t.Fatal(err)
			}
			defer resp.Body.Close()
			if resp.StatusCode != http.StatusOK || resp.Header.Get("Content-Type") != "text/event-stream; charset=utf-8" {
				t.Fatalf("%d %v", resp.StatusCode, resp.Header)
			}
			r := bufio.NewReader(resp.Body)
			var body strings.Builder
			for pings := 0; pings < 2; {
				ev := readEvent(t, r)
				body.WriteString(ev)
				if strings.HasPrefix(ev, c.ping) {
					pings++
				}
			}
			close(release)
			rest, err := io.ReadAll(r)
			if err != nil {
				t.Fatal(err)
			}
			c.check(t, body.String()+string(rest))
		})
	}
}

// The worker stops when a client leaves, whatever it speaks and waits for.
func TestMessagesClientLeaves(t *testing.T) {
	e := start(t, nil).ready()
	for _, stream := range []bool{true, false} {
		var pieces []string
		if stream {
			pieces = []string{roleChunk(), textChunk("Hi")}
		}
		h, begun, left := hang(pieces...)
		e.router.routes(newWorker(t, "w", h))
		ctx, cancel := context.WithCancel(context.Background())
		answered := make(chan struct{})
		go func() {
			defer close(answered)
			if resp, err := e.begin(ctx, messagesPath, messagesRequest(stream, "")); err == nil {
				_, _ = io.Copy(io.Discard, resp.Body)
				resp.Body.Close()
			}
		}()
		await(t, "the worker has the request", begun)
		cancel()
		await(t, "the worker is left", left)
		<-answered
	}
}

func TestCountTokens(t *testing.T) {
	const ask = `{"model":"chat","system":"Be terse","messages":[{"role":"user","content":"Hello there"}]}`
	count := func(e *env, body string) (int, *http.Response) {
		e.t.Helper()
		resp, text := e.post(countPath, body)
		var got struct {
			Tokens int `json:"input_tokens"`
		}
		if err := json.Unmarshal([]byte(text), &got); err != nil || resp.StatusCode != http.StatusOK {
			e.t.Fatalf("%d %s", resp.StatusCode, text)
		}
		return got.Tokens, resp
	}
	t.Run("by our tokenizer, as routed", func(t *testing.T) {
		e := start(t, func(_ *ingress.Config, c *routerv1.Catalog) { c.Profiles[0].TokenizerPath = modelDir(t) }).ready()
		e.router.routes(newWorker(t, "w", refuses(http.StatusOK, whole)))
		got, resp := count(e, ask)
		e.post(messagesPath, strings.Replace(ask, `"model"`, `"max_tokens":1,"model"`, 1))
		if want := e.router.routed()[0].GetPrompts()[0].GetTokens(); got != int(want) || got == 0 || resp.Header.Get("X-Kinference-Estimated") != "" {
			t.Errorf("counted %d, routed %d tokens", got, want)
		}
		picture := strings.Replace(ask, `"content":"Hello there"`, `"content":[{"type":"image","source":{"type":"base64","media_type":"image/png","data":"AAAA"}}]`, 1)
		if got, resp := count(e, picture); got < 1000 || resp.Header.Get("X-Kinference-Estimated") != "true" {
			t.Errorf("a picture counts %d, headers %v", got, resp.Header)
		}
	})
	t.Run("by a worker's", func(t *testing.T) {
		w := newWorker(t, "w", func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Path != "/tokenize" {
				http.NotFound(w, r)
				return
			}
			_, _ = io.WriteString(w, `{"count":3,"tokens":[1,2,3]}`)
		})
		e := start(t, func(_ *ingress.Config, c *routerv1.Catalog) {
			c.Workers = []*routerv1.Worker{{Uid: "w", WorkerSet: "ns/set", Url: w.url}}
		}).ready()
		if got, resp := count(e, ask); got != 3 || resp.Header.Get("X-Kinference-Estimated") != "" {
			t.Errorf("counted %d", got)
		}
	})
	t.Run("by length", func(t *testing.T) {
		e := start(t, nil).ready()
		if got, resp := count(e, ask); got < 5 || resp.Header.Get("X-Kinference-Estimated") != "true" {
			t.Errorf("counted %d", got)
		}
	})
}

func TestTokenize(t *testing.T) {
	e := start(t, func(_ *ingress.Config, c *routerv1.Catalog) { c.Profiles[0].TokenizerPath = modelDir(t) }).ready()
	e.router.routes(newWorker(t, "w", refuses(http.StatusOK, whole)))
	e.post(chatPath, chatRequest(false, ""))
	for body, want := range map[string]int{
		`{"model":"chat","messages":[{"role":"user","content":"Hello there"}]}`: int(e.router.routed()[0].GetPrompts()[0].GetTokens()),
		`{"model":"chat","prompt":[1,2,3]}`:                                     3,
	} {
		resp, text := e.post("/tokenize", body)
		var got struct {
			Count  int
			Max    int `json:"max_model_len"`
			Tokens []int
		}
		if err := json.Unmarshal([]byte(text), &got); err != nil || got.Count != want || len(got.Tokens) != want || got.Max != 4096 || resp.StatusCode != http.StatusOK {
			t.Errorf("%s: got %s, want %d tokens", body, text, want)
		}
	}
	for body, want := range map[string]int{
		`{"model":"chat","messages":5}`: 400, `{"model":"chat"}`: 400, `{"model":"x","prompt":"a"}`: 404, `{`: 400,
		`{"model":"chat","messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"data:image/png;base64,AA"}}]}]}`: 501,
	} {
		resp, text := e.post("/tokenize", body)
		if parseError(t, text); resp.StatusCode != want {
			t.Errorf("%s: %d %s", body, resp.StatusCode, text)
		}
	}
	if n := len(e.router.routed()); n != 1 {
		t.Errorf("%d requests were routed", n)
	}
}

func TestMessagesModels(t *testing.T) {
	e := start(t, nil).ready()
	get := func(path string) (*http.Response, string) {
		req, _ := http.NewRequest(http.MethodGet, e.url+path, nil)
		req.Header.Set("Anthropic-Version", "2023-06-01")
		resp, err := e.client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		body, _ := io.ReadAll(resp.Body)
		return resp, string(body)
	}
	for _, c := range []struct {
		query, ids string
		more       bool
	}{
		{"", "base-model chat sql", false}, {"?limit=2", "base-model chat", true}, {"?limit=2&after_id=chat", "sql", false}, {"?limit=1&before_id=sql", "chat", true}, {"?after_id=sql", "", false},
	} {
		_, body := get("/v1/models" + c.query)
		var page struct {
			Data []struct {
				Type, ID string
				Name     string    `json:"display_name"`
				Created  time.Time `json:"created_at"`
			}
			More        bool    `json:"has_more"`
			First, Last *string `json:"-"`
		}
		if err := json.Unmarshal([]byte(body), &page); err != nil {
			t.Fatal(err)
		}
		var ids []string
		for _, m := range page.Data {
			ids = append(ids, m.ID)
			if m.Type != "model" || m.Name == "" || m.Created.IsZero() {
				t.Errorf("got %s", body)
			}
		}
		if got := strings.Join(ids, " "); got != c.ids || page.More != c.more {
			t.Errorf("%s: got %s", c.query, body)
		}
	}
	if resp, body := get("/v1/models/chat"); resp.StatusCode != http.StatusOK || !strings.Contains(body, `"type":"model","id":"chat"`) {
		t.Errorf("got %s", body)
	}
	resp, body := get("/v1/models/x")
	if kind, _ := messagesFault(t, resp, body); resp.StatusCode != http.StatusNotFound || kind != "not_found_error" {
		t.Errorf("got %s", body)
	}
	resp, body = get("/v1/models?limit=0")
	if kind, _ := messagesFault(t, resp, body); resp.StatusCode != http.StatusBadRequest || kind != "invalid_request_error" {
		t.Errorf("got %s", body)
	}
}
