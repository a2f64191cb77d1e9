package ingress_test

import (
	"bufio"
	"context"
	"encoding/json"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
	"github.com/kinference/kinference/services/ingress"
)

// Each event reaches the client before the worker sends the next one.
func TestStreamIsNotBuffered(t *testing.T) {
	e := start(t, nil).ready()
	got := make(chan struct{})
	pieces := []string{textChunk("a"), textChunk("b"), ": ping\n\n", stopChunk, doneEvent}
	e.router.routes(newWorker(t, "w", func(w http.ResponseWriter, r *http.Request) {
		answers(roleChunk())(w, r)
		for _, p := range pieces {
			_, _ = io.WriteString(w, p)
			_ = http.NewResponseController(w).Flush()
			select {
			case <-got:
			case <-r.Context().Done():
				return
			}
		}
	}))
	resp, err := e.begin(context.Background(), chatPath, chatRequest(true, ""))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	r := bufio.NewReader(resp.Body)
	if ev := readEvent(t, r); ev != renamed(roleChunk()) {
		t.Errorf("got %q", ev)
	}
	for _, want := range pieces {
		if ev := readEvent(t, r); ev != renamed(want) {
			t.Errorf("got %q, want %q", ev, want)
		}
		got <- struct{}{}
	}
	for name, want := range map[string]string{"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache", "X-Accel-Buffering": "no", "Content-Length": ""} {
		if got := resp.Header.Get(name); got != want {
			t.Errorf("%s is %q, want %q", name, got, want)
		}
	}
}

// The usage chunk is always asked for, and shown to those who asked for it.
func TestUsageChunk(t *testing.T) {
	e := start(t, nil).ready()
	bodies := make(chan string, 1)
	e.router.routes(newWorker(t, "w", func(w http.ResponseWriter, r *http.Request) {
		b, _ := io.ReadAll(r.Body)
		bodies <- string(b)
		// Usage and [DONE] in frames of their own, and cut in the middle.
		answers(roleChunk(), textChunk("a"), textChunk("b"), stopChunk, usageChunk[:40], usageChunk[40:], doneEvent[:7], doneEvent[7:])(w, r)
	}))
	for _, tt := range []struct {
		name, more, options string
		shown               bool
	}{
		{"not asked", ``, `{"include_usage":true,"continuous_usage_stats":true}`, false},
		{"null", `,"stream_options":null`, `{"include_usage":true,"continuous_usage_stats":true}`, false},
		{"refused", `,"stream_options":{"include_usage":false,"x":1}`, `{"include_usage":true,"x":1,"continuous_usage_stats":true}`, false},
		{"asked", `,"stream_options":{"include_usage":true}`, `{"include_usage":true,"continuous_usage_stats":true}`, true},
		{"asked on each chunk", `,"stream_options":{"include_usage":true,"continuous_usage_stats":true}`, `{"include_usage":true,"continuous_usage_stats":true}`, true},
		{"each chunk without effect", `,"stream_options":{"continuous_usage_stats":true}`, `{"continuous_usage_stats":true,"include_usage":true}`, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			resp, body := e.post(chatPath, chatRequest(true, tt.more))
			var sent struct {
				Model         string
				StreamOptions json.RawMessage `json:"stream_options"`
			}
			if err := json.Unmarshal([]byte(<-bodies), &sent); err != nil || sent.Model != "base-model" || string(sent.StreamOptions) != tt.options {
				t.Errorf("worker got model %q and options %s, %v", sent.Model, sent.StreamOptions, err)
			}
			want := roleChunk() + textChunk("a") + textChunk("b") + stopChunk
			if tt.shown {
				want += usageChunk
			}
			if diff := cmp.Diff(renamed(want+doneEvent), body); diff != "" {
				t.Error(diff)
			}
			done, words := e.router.done(resp.Header.Get("X-Request-Id"))
			if done.GetPromptTokens() != 12 || done.GetCachedTokens() != 8 || done.GetOutputTokens() != 2 || strings.Join(words, ", ") != "first token, ok" {
				t.Errorf("reported %v, %v", words, done)
			}
		})
	}
}

// Usage is right whatever way it comes (GAIE 2026, ai-gateway 2470).
func TestUsageForms(t *testing.T) {
	e := start(t, nil).ready()
	withUsage := func(text, usage string) string {
		return strings.Replace(textChunk(text), `"choices"`, `"usage":`+usage+`,"choices"`, 1)
	}
	for _, tt := range []struct {
		name                   string
		pieces                 []string
		prompt, cached, output uint32
		known                  bool
	}{
		{"no space after data:", []string{strings.ReplaceAll(textChunk("a"), "data: ", "data:"), strings.ReplaceAll(usageChunk, "data: ", "data:"), "data:[DONE]\n\n"}, 12, 8, 2, true},
		{"CRLF", []string{strings.ReplaceAll(textChunk("a")+usageChunk+doneEvent, "\n", "\r\n")}, 12, 8, 2, true},
		{"null on the others", []string{withUsage("a", "null"), withUsage("b", "null"), usageChunk, doneEvent}, 12, 8, 2, true},
		{"cumulative on each", []string{withUsage("a", `{"prompt_tokens":12,"completion_tokens":1}`), withUsage("b", `{"prompt_tokens":12,"completion_tokens":2}`), doneEvent}, 12, 0, 2, true},
		{"explicit zeros", []string{withUsage("a", `{"prompt_tokens":0,"completion_tokens":0,"prompt_tokens_details":{"cached_tokens":0}}`), doneEvent}, 0, 0, 0, true},
		{"zero does not undo", []string{withUsage("a", `{"prompt_tokens":12,"completion_tokens":1}`), withUsage("b", `{"prompt_tokens":0,"completion_tokens":2}`), doneEvent}, 12, 0, 2, true},
		{"none: chunks are counted", []string{textChunk("a"), textChunk("b"), textChunk("c"), doneEvent}, 0, 0, 3, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			e.router.routes(newWorker(t, "w", answers(tt.pieces...)))
			resp, body := e.post(chatPath, chatRequest(true, `,"stream_options":{"include_usage":true,"continuous_usage_stats":true}`))
			if want := renamed(strings.Join(tt.pieces, "")); normal(body) != normal(want) {
				t.Errorf("got %q, want %q", body, want)
			}
			done, _ := e.router.done(resp.Header.Get("X-Request-Id"))
			if done.GetPromptTokens() != tt.prompt || done.GetCachedTokens() != tt.cached || done.GetOutputTokens() != tt.output || (done.PromptTokens != nil) != tt.known {
				t.Errorf("reported %v", done)
			}
		})
	}
}

// normal is a stream with the framing that ingress gives to events it edits.
func normal(s string) string {
	return strings.ReplaceAll(strings.ReplaceAll(s, "\r\n", "\n"), "data:{", "data: {")
}

func TestWholeAnswer(t *testing.T) {
	e := start(t, nil).ready()
	rank := uint32(3)
	got := make(chan *http.Request, 1)
	sent := make(chan string, 1)
	w := newWorker(t, "w", func(w http.ResponseWriter, r *http.Request) {
		b, _ := io.ReadAll(r.Body)
		got <- r
		sent <- string(b)
		h := w.Header()
		h.Set("Content-Type", "application/json")
		h.Set("L5d-Server-Id", "x")
		h.Set("X-Kinference-Worker", "x")
		h.Set("Endpoint-Load-Metrics", "x")
		h.Set("Set-Cookie", "x=y")
		h.Set("X-Request-Id", "worker's own")
		h.Set("X-Model-Note", "kept")
		_, _ = io.WriteString(w, strings.Replace(whole, `"id"`, `"error":null,"seed":18446744073709551615,"id"`, 1))
	})
	w.rank = &rank
	e.router.routes(w)
	request := `{ "seed" : 18446744073709551615, "model":"chat", "messages":[{"role":"user","content":"Hi"}], "top_k":1.10, "vllm_xargs":{"b":1,"a":2} }`
	resp, body := e.post(chatPath, request, "X-Request-Id", "my-id.1", "Authorization", "Bearer secret", "Cookie", "a=b", "L5d-Dst-Override", "x", "X-Kinference-Tenant", "boss",
		"X-Forwarded-For", "1.2.3.4", "X-Vllm-Priority", "-9", "X-Data-Parallel-Rank", "7", "Connection", "X-Hop", "X-Hop", "1", "Accept-Language", "de",
		"Traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")

	if want := strings.Replace(request, `"chat"`, `"base-model"`, 1); <-sent != want {
		t.Error("the body was changed beyond the model's name")
	}
	r := <-got
	for name, want := range map[string]string{
		"X-Request-Id": "my-id.1", "X-Data-Parallel-Rank": "3", "Content-Type": "application/json", "Accept-Language": "de", "Authorization": "", "Cookie": "",
		"L5d-Dst-Override": "", "X-Kinference-Tenant": "", "X-Forwarded-For": "", "X-Vllm-Priority": "", "Connection": "", "X-Hop": "", "X-Idempotency-Key": "", "Accept-Encoding": "",
	} {
		if got := r.Header.Get(name); got != want {
			t.Errorf("worker got %s %q, want %q", name, got, want)
		}
	}
	if strings.Contains(r.Header.Get("Traceparent"), "0af7651916cd43dd8448eb211c80319c") {
		t.Error("the client's trace id is taken over")
	}
	if want := strings.Replace(renamed(whole), `{"id"`, `{"seed":18446744073709551615,"id"`, 1); body != want {
		t.Errorf("got %s", body)
	}
	for name, want := range map[string]string{
		"X-Request-Id": "my-id.1", "X-Model-Note": "kept", "L5d-Server-Id": "", "X-Kinference-Worker": "", "Endpoint-Load-Metrics": "", "Set-Cookie": "", "Content-Type": "application/json",
	} {
		if got := resp.Header.Get(name); got != want {
			t.Errorf("client got %s %q, want %q", name, got, want)
		}
	}
	done, words := e.router.done("my-id.1")
	if done.GetPromptTokens() != 12 || done.GetCachedTokens() != 8 || done.GetOutputTokens() != 2 || strings.Join(words, ", ") != "ok" {
		t.Errorf("reported %v, %v", words, done)
	}
}

func TestRequestID(t *testing.T) {
	e := start(t, nil).ready()
	h, begun, left := hang()
	e.router.routes(newWorker(t, "w", h))
	ctx, cancel := context.WithCancel(context.Background())
	go func() {
		if resp, err := e.begin(ctx, chatPath, chatRequest(false, ""), "X-Request-Id", "twice"); err == nil {
			resp.Body.Close()
		}
	}()
	await(t, "the first request", begun)
	e.router.routes(newWorker(t, "w", refuses(200, whole)))
	for _, id := range []string{"twice", "", "bad id", "x\"y", strings.Repeat("x", 129), "<script>"} {
		resp, _ := e.post(chatPath, chatRequest(false, ""), "X-Request-Id", id)
		if got := resp.Header.Get("X-Request-Id"); got == id || !strings.HasPrefix(got, "req-") {
			t.Errorf("id %q was answered with %q", id, got)
		}
	}
	cancel()
	await(t, "the worker to be left", left)
	if _, words := e.router.done("twice"); strings.Join(words, ", ") != "canceled" {
		t.Errorf("reported %v", words)
	}
}

// The per-connection baseline tells connections apart, and only those.
func TestConnection(t *testing.T) {
	e := start(t, nil).ready()
	e.router.routes(newWorker(t, "w", refuses(200, whole)))
	e.post(chatPath, chatRequest(false, ""))
	e.post(chatPath, chatRequest(false, ""))
	e.client.CloseIdleConnections()
	e.post(chatPath, chatRequest(false, ""))
	r := e.router.routed()
	if r[0].GetConnection() == "" || r[0].GetConnection() != r[1].GetConnection() || r[1].GetConnection() == r[2].GetConnection() {
		t.Errorf("connections %q %q %q", r[0].GetConnection(), r[1].GetConnection(), r[2].GetConnection())
	}
}

func TestHTTP2(t *testing.T) {
	e := start(t, nil).ready().http2()
	e.router.routes(newWorker(t, "w", answers(roleChunk(), textChunk("a"), usageChunk, doneEvent)))
	resp, body := e.post(chatPath, chatRequest(true, ""))
	if want := renamed(roleChunk() + textChunk("a") + doneEvent); resp.ProtoMajor != 2 || body != want {
		t.Errorf("%s: %q", resp.Proto, body)
	}
}

// All models that the caller may use are listed, and whether somebody serves them now.
func TestModels(t *testing.T) {
	e := start(t, func(_ *ingress.Config, c *routerv1.Catalog) {
		c.Models = append(c.Models, &routerv1.Model{Name: "org/model 1", Root: "org/model 1"}) // not ready
	}).ready()
	status, body := e.get("/v1/models")
	var list struct {
		Object string
		Data   []struct {
			ID, Object, Root string
			Owned            string `json:"owned_by"`
			Parent           *string
			Max              *int `json:"max_model_len"`
			Created          int64
			Ready            bool
		}
	}
	if err := json.Unmarshal([]byte(body), &list); err != nil || status != 200 || list.Object != "list" || len(list.Data) != 4 {
		t.Fatalf("%d %s %v", status, body, err)
	}
	for i, want := range []string{"base-model", "chat", "org/model 1", "sql"} {
		d := list.Data[i]
		if d.ID != want || d.Object != "model" || d.Owned == "" || d.Created == 0 || d.Ready != (i != 2) {
			t.Errorf("model %d is %+v", i, d)
		}
	}
	if alias, lora := list.Data[1], list.Data[3]; alias.Root != "base-model" || alias.Parent != nil || *alias.Max != 4096 || lora.Parent == nil || *lora.Parent != "base-model" || lora.Max != nil {
		t.Errorf("alias %+v, adapter %+v", alias, lora)
	}
	for path, want := range map[string]int{"/v1/models/chat": 200, "/v1/models/org/model%201": 200, "/v1/models/org%2Fmodel%201": 200, "/v1/models/nope": 404} {
		if status, body := e.get(path); status != want || want == 200 && !strings.Contains(body, `"object":"model"`) {
			t.Errorf("%s: %d %s", path, status, body)
		}
	}
}
