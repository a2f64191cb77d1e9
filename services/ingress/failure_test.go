package ingress_test

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/kinference/kinference/internal/daemon"
	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
	"github.com/kinference/kinference/services/ingress"
)

// closes ends the connection after these pieces without ending the answer.
func closes(pieces ...string) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		if len(pieces) > 0 {
			answers(pieces...)(w, r)
		}
		panic(http.ErrAbortHandler)
	}
}

const engineError = `data: {"error":{"message":"EngineCore encountered an issue at /opt/vllm","type":"InternalServerError","param":null,"code":500}}` + "\n\n"

// A worker that fails before its first content is made good by the next one,
// and the client sees nothing of it.
func TestFailover(t *testing.T) {
	stuck, _, _ := hang()
	stuckAfterRole, _, _ := hang(roleChunk(), ": ping\n\n")
	tests := []struct {
		name   string
		first  http.HandlerFunc // nil: nobody listens
		reason string
		only   string // "stream" or "whole"
	}{
		{"connection refused", nil, "connect", ""},
		{"500", refuses(500, `{"error":{"message":"x","type":"InternalServerError","code":500}}`), "status", ""},
		{"502 without JSON", refuses(502, "bad gateway"), "status", ""},
		{"503", refuses(503, `{}`), "status", ""},
		{"429", refuses(429, `{}`), "status", ""},
		{"401", refuses(401, `{"error":"Unauthorized"}`), "status", ""},
		{"redirect", refuses(302, ``), "status", ""},
		{"closed at once", closes(), "closed", ""},
		{"closed after the header", closes(""), "closed", ""},
		{"closed after the role", closes(roleChunk()), "closed", "stream"},
		{"ended after the role", answers(roleChunk()), "closed", "stream"},
		{"ended at once", answers(), "closed", "stream"},
		{"[DONE] at once", answers(doneEvent), "closed", "stream"},
		{"half an event", answers(textChunk("a")[:50]), "closed", "stream"},
		{"error event first", answers(engineError, doneEvent), "status", "stream"},
		{"error event after the role", answers(roleChunk(), engineError, doneEvent), "status", "stream"},
		{"named error event", answers(roleChunk(), "event: error\ndata: oops\n\n"), "status", "stream"},
		{"no answer", stuck, "timeout", "stream"},
		{"no content", stuckAfterRole, "timeout", "stream"},
		{"half an answer", closes(whole[:60]), "closed", "whole"},
		{"no JSON", refuses(200, "<html>"), "status", "whole"},
		{"cut JSON", refuses(200, whole[:60]), "status", "whole"},
		{"error under 200", refuses(200, `{"error":{"message":"x","code":500}}`), "status", "whole"},
	}
	for _, tt := range tests {
		for _, stream := range []bool{true, false} {
			kind := map[bool]string{true: "stream", false: "whole"}[stream]
			if tt.only != "" && tt.only != kind {
				continue
			}
			t.Run(tt.name+" "+kind, func(t *testing.T) {
				e := start(t, func(c *ingress.Config, _ *routerv1.Catalog) {
					if tt.reason == "timeout" {
						c.FirstByteTimeout = 500 * time.Millisecond // the good worker answers within it on a busy machine, too
					}
				}).ready()
				bad := &worker{name: "bad", url: "http://127.0.0.1:1", model: "base-model"}
				if tt.first != nil {
					// Hanging handlers close channels, once for each worker.
					bad = newWorker(t, "bad", tt.first)
				}
				good := newWorker(t, "good", refuses(200, whole))
				want := renamed(whole)
				if stream {
					good = newWorker(t, "good", answers(roleChunk(), textChunk("a"), usageChunk, doneEvent))
					want = renamed(roleChunk() + textChunk("a") + doneEvent)
				}
				e.router.routes(bad, good)
				resp, body := e.post(chatPath, chatRequest(stream, ""))
				if resp.StatusCode != 200 || body != want {
					t.Errorf("got %d %q", resp.StatusCode, body)
				}
				end := "moved to good after " + tt.reason
				if stream {
					end += ", first token"
				}
				done, words := e.router.done(resp.Header.Get("X-Request-Id"))
				if got := strings.Join(words, ", "); got != end+", ok" || done.GetPromptTokens() != 12 {
					t.Errorf("reported %s, %v", got, done)
				}
				if !strings.Contains(e.metrics(), `reason="`+tt.reason+`"`) {
					t.Error("the failover is not in the metrics")
				}
			})
		}
	}
}

// What the request itself is to blame for goes to the client, in OpenAI's form,
// and to no other worker.
func TestWorkerRefuses(t *testing.T) {
	e := start(t, nil).ready()
	for _, tt := range []struct {
		name              string
		h                 http.HandlerFunc
		status            int
		kind, param, code string
	}{
		{"bad request", refuses(400, `{"error":{"message":"temperature must be positive","type":"BadRequestError","param":"temperature","code":400}}`), 400, "invalid_request_error", "temperature", ""},
		{"context", refuses(400, `{"error":{"message":"This model's maximum context length is 10 tokens.","type":"BadRequestError","param":"input_tokens","code":400}}`), 400, "invalid_request_error", "", "context_length_exceeded"},
		{"unprocessable", refuses(422, `{"detail":[{"msg":"x"}]}`), 422, "invalid_request_error", "", ""},
		{"not implemented", refuses(501, `{"error":{"message":"x","type":"NotImplementedError","code":501}}`), 501, "server_error", "", "upstream_error"},
		{"bad request in the stream", answers(`data: {"error":{"message":"too bad","type":"BadRequestError","param":null,"code":400}}`+"\n\n", doneEvent), 400, "invalid_request_error", "", ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			e.router.routes(newWorker(t, "w", tt.h), newWorker(t, "other", func(http.ResponseWriter, *http.Request) { t.Error("another worker was asked") }))
			resp, body := e.post(chatPath, chatRequest(true, ""))
			if kind, param, code := parseError(t, body); resp.StatusCode != tt.status || kind != tt.kind || param != tt.param || code != tt.code {
				t.Errorf("got %d %s", resp.StatusCode, body)
			}
			if _, words := e.router.done(resp.Header.Get("X-Request-Id")); strings.Join(words, ", ") != "failed" {
				t.Errorf("reported %v", words)
			}
		})
	}
}

// When all workers failed the router is asked once more, without them.
// An error whose rest does not come is answered, or tried elsewhere, by its status.
func TestErrorStalls(t *testing.T) {
	stalls := func(status int, encoding string) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) {
			_, _ = io.Copy(io.Discard, r.Body)
			w.Header().Set("Content-Type", "application/json")
			text := `{"error":{"mess`
			if encoding == "gzip" {
				w.Header().Set("Content-Encoding", encoding)
				text = "\x1f\x8b"
			}
			w.WriteHeader(status)
			_, _ = io.WriteString(w, text)
			_ = http.NewResponseController(w).Flush()
			<-r.Context().Done()
		}
	}
	e := start(t, func(c *ingress.Config, _ *routerv1.Catalog) { c.IdleTimeout = 50 * time.Millisecond }).ready()
	other := newWorker(t, "other", refuses(http.StatusOK, usageText(8, 0, 3)))
	for _, c := range []struct {
		name     string
		status   int
		encoding string
		stream   bool
		want     int
	}{
		{"worker", 400, "", false, 400},
		{"worker", 400, "", true, 400},
		{"worker", 400, "gzip", false, 400},
		{"worker", 500, "", false, 200},
		{"worker", 429, "", false, 200},
		{"provider ns/cloud", 400, "", true, 400},
		{"provider ns/cloud", 500, "", false, 200},
	} {
		w := newWorker(t, c.name, stalls(c.status, c.encoding))
		e.router.set(func(*routerv1.RouteRequest) (*routerv1.RouteResponse, error) {
			first := w.endpoint()
			if provider, ok := strings.CutPrefix(c.name, "provider "); ok {
				first = &routerv1.Endpoint{Worker: w.name, Url: w.url, Provider: provider, UpstreamModel: "vendor/m"}
			}
			return &routerv1.RouteResponse{Endpoints: []*routerv1.Endpoint{first, other.endpoint()}}, nil
		})
		if resp, body := e.post(chatPath, chatRequest(c.stream, "")); resp.StatusCode != c.want {
			t.Errorf("%+v: %d %s", c, resp.StatusCode, body)
		}
	}
}

func TestAllFail(t *testing.T) {
	e := start(t, nil).ready()
	a, b := newWorker(t, "a", closes()), newWorker(t, "b", refuses(500, "{}"))
	e.router.routes(a, b)
	resp, body := e.post(chatPath, chatRequest(true, ""))
	if _, _, code := parseError(t, body); resp.StatusCode != 502 || code != "upstream_error" {
		t.Errorf("got %d %s", resp.StatusCode, body)
	}
	r := e.router.routed()
	if len(r) != 2 || strings.Join(r[1].GetExclude(), ",") != "a,b" || r[0].GetRequestId() != r[1].GetRequestId() {
		t.Errorf("the router was asked %v", r)
	}
	if _, words := e.router.done(resp.Header.Get("X-Request-Id")); strings.Join(words, ", ") != "moved to b after closed, failed" {
		t.Errorf("reported %v", words)
	}

	busy := newWorker(t, "busy", func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Retry-After", "7")
		refuses(503, "{}")(w, r)
	})
	e.router.routes(busy)
	if resp, _ := e.post(chatPath, chatRequest(false, "")); resp.StatusCode != 503 || resp.Header.Get("Retry-After") != "7" {
		t.Errorf("got %d, Retry-After %q", resp.StatusCode, resp.Header.Get("Retry-After"))
	}

	// The second answer of the router has another worker.
	good := newWorker(t, "good", refuses(200, whole))
	e.router.set(func(req *routerv1.RouteRequest) (*routerv1.RouteResponse, error) {
		w := a
		if len(req.GetExclude()) > 0 {
			w = good
		}
		return &routerv1.RouteResponse{Endpoints: []*routerv1.Endpoint{w.endpoint()}}, nil
	})
	if resp, body := e.post(chatPath, chatRequest(false, "")); resp.StatusCode != 200 {
		t.Errorf("got %d %s", resp.StatusCode, body)
	}
}

// After the first content a failure ends the stream with one typed error, and
// with [DONE] only if the worker sent it.
func TestFailureInStream(t *testing.T) {
	stuck, _, _ := hang(roleChunk(), textChunk("a"))
	for _, tt := range []struct {
		name string
		h    http.HandlerFunc
		code string
		tail string
	}{
		{"connection lost", closes(roleChunk(), textChunk("a"), textChunk("b")[:30]), "upstream_error", ""},
		{"ended without [DONE]", answers(roleChunk(), textChunk("a")), "upstream_error", ""},
		{"error event", answers(roleChunk(), textChunk("a"), engineError), "upstream_error", ""},
		{"error event and [DONE]", answers(roleChunk(), textChunk("a"), engineError, doneEvent), "upstream_error", doneEvent},
		{"nothing more", stuck, "timeout", ""},
		{"an endless event", answers(roleChunk(), textChunk("a"), "data: "+strings.Repeat("x", 5000)), "upstream_error", ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			e := start(t, func(c *ingress.Config, _ *routerv1.Catalog) {
				c.MaxEvent = 4096
				if tt.code == "timeout" {
					c.IdleTimeout = 500 * time.Millisecond // pieces come within it on a busy machine, too
				}
			}).ready()
			e.router.routes(newWorker(t, "w", tt.h), newWorker(t, "other", func(http.ResponseWriter, *http.Request) { t.Error("another worker was asked") }))
			resp, body := e.post(chatPath, chatRequest(true, ""))
			rest, ok := strings.CutPrefix(body, renamed(roleChunk()+textChunk("a")))
			event, tail, _ := strings.Cut(rest, "\n\n")
			data, isData := strings.CutPrefix(event, "data: ")
			if resp.StatusCode != 200 || !ok || !isData || tail != tt.tail {
				t.Fatalf("got %d %q", resp.StatusCode, body)
			}
			if kind, _, code := parseError(t, data); kind != "server_error" || code != tt.code {
				t.Errorf("event %s", data)
			}
			if strings.Contains(body, "/opt") {
				t.Error("the worker's inside shows")
			}
			done, words := e.router.done(resp.Header.Get("X-Request-Id"))
			if strings.Join(words, ", ") != "first token, failed" || done.GetOutputTokens() != 1 {
				t.Errorf("reported %v, %v", words, done)
			}
		})
	}
}

// A client that leaves stops its worker at once, and what was generated until
// then is reported.
func TestClientLeaves(t *testing.T) {
	for _, tt := range []struct {
		name   string
		stream bool
		pieces []string
		tokens uint32
	}{
		{"whole", false, nil, 0},
		{"stream before content", true, nil, 0},
		{"stream before content with role", true, []string{roleChunk()}, 0},
		{"stream", true, []string{roleChunk(), textChunk("a"), textChunk("b")}, 2},
	} {
		t.Run(tt.name, func(t *testing.T) {
			e := start(t, nil).ready()
			h, begun, left := hang(tt.pieces...)
			e.router.routes(newWorker(t, "w", h), newWorker(t, "other", func(http.ResponseWriter, *http.Request) { t.Error("another worker was asked") }))
			ctx, cancel := context.WithCancel(context.Background())
			defer cancel()
			read := make(chan struct{})
			go func() {
				defer close(read)
				resp, err := e.begin(ctx, chatPath, chatRequest(tt.stream, ""), "X-Request-Id", "leaver")
				if err != nil {
					return
				}
				defer resp.Body.Close()
				r := bufio.NewReader(resp.Body)
				for range tt.pieces {
					readEvent(t, r)
				}
				cancel()
			}()
			await(t, "the worker to begin", begun)
			if tt.tokens == 0 {
				cancel()
			}
			await(t, "the client", read)
			began := time.Now()
			await(t, "the worker to be left", left)
			t.Logf("the worker saw it after %v", time.Since(began))
			done, words := e.router.done("leaver")
			if words[len(words)-1] != "canceled" || done.GetOutputTokens() != tt.tokens {
				t.Errorf("reported %v, %v", words, done)
			}
		})
	}
}

// A client that does not read holds up its own worker, without memory growing,
// and is dropped after a while.
func TestSlowClient(t *testing.T) {
	e := start(t, func(c *ingress.Config, _ *routerv1.Catalog) {
		c.WriteTimeout, c.IdleTimeout = 2*time.Second, time.Second
	}).ready()
	left := make(chan struct{})
	sent := 0
	e.router.routes(newWorker(t, "w", func(w http.ResponseWriter, r *http.Request) {
		defer close(left)
		answers(roleChunk())(w, r)
		chunk := textChunk(strings.Repeat("x", 10000))
		for ; r.Context().Err() == nil; sent += len(chunk) {
			if _, err := io.WriteString(w, chunk); err != nil {
				return
			}
		}
	}))
	resp, err := e.begin(context.Background(), chatPath, chatRequest(true, ""))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	await(t, "the worker to be left", left)
	// What fits in the sockets' buffers, four of a few MiB at most.
	if sent > 64<<20 {
		t.Errorf("took %d bytes for a client that reads none", sent)
	}
	if _, words := e.router.done(resp.Header.Get("X-Request-Id")); words[len(words)-1] != "canceled" {
		t.Errorf("reported %v", words)
	}
}

func TestTotalTimeout(t *testing.T) {
	e := start(t, func(c *ingress.Config, _ *routerv1.Catalog) { c.TotalTimeout = 2 * time.Second }).ready()
	h, _, left := hang()
	e.router.routes(newWorker(t, "w", h), newWorker(t, "other", func(http.ResponseWriter, *http.Request) { t.Error("another worker was asked") }))
	resp, body := e.post(chatPath, chatRequest(false, ""))
	if _, _, code := parseError(t, body); resp.StatusCode != 504 || code != "timeout" {
		t.Errorf("got %d %s", resp.StatusCode, body)
	}
	await(t, "the worker to be left", left)
}

// A stop lets streams finish and takes no new connections.
func TestDrain(t *testing.T) {
	e := startIn(t, daemon.Settings{DrainTimeout: patience}, nil).ready()
	finish := make(chan struct{})
	e.router.routes(newWorker(t, "w", func(w http.ResponseWriter, r *http.Request) {
		answers(roleChunk(), textChunk("a"))(w, r)
		<-finish
		_, _ = io.WriteString(w, textChunk("b")+usageChunk+doneEvent)
	}))
	resp, err := e.begin(context.Background(), chatPath, chatRequest(true, ""))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	r := bufio.NewReader(resp.Body)
	readEvent(t, r)
	readEvent(t, r)
	e.stop()
	other := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	for { // until the port is closed
		resp, err := other.Get(e.url + "/v1/models")
		if err != nil {
			break
		}
		resp.Body.Close()
	}
	if len(e.shell.NotReady()) == 0 {
		t.Error("ready while draining")
	}
	close(finish)
	rest, err := io.ReadAll(r)
	if err != nil || string(rest) != renamed(textChunk("b"))+doneEvent {
		t.Errorf("got %q, %v", rest, err)
	}
	if err := <-e.done; err != nil {
		t.Error(err)
	}
	e.done <- nil // for the cleanup
	done, words := e.router.done(resp.Header.Get("X-Request-Id"))
	if strings.Join(words, ", ") != "first token, ok" || done.GetPromptTokens() != 12 {
		t.Errorf("reported %v, %v", words, done)
	}
}

// A stream that outlasts the drain ends with an error event.
func TestDrainEnds(t *testing.T) {
	e := start(t, nil).ready()
	h, _, left := hang(roleChunk(), textChunk("a"))
	e.router.routes(newWorker(t, "w", h))
	resp, err := e.begin(context.Background(), chatPath, chatRequest(true, ""))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	e.stop()
	body, err := io.ReadAll(resp.Body)
	rest := strings.TrimPrefix(string(body), renamed(roleChunk()+textChunk("a")))
	if err != nil || !strings.HasPrefix(rest, `data: {"error":{`) || strings.Contains(rest, "[DONE]") {
		t.Errorf("got %q, %v", body, err)
	}
	await(t, "the worker to be left", left)
}

// Workers that are gone cost no tries of the retry budget, however many requests meet
// them before that is known: what nobody got makes nobody work.
func TestGoneWorkersCostNoTry(t *testing.T) {
	e := start(t, nil).ready()
	good := newWorker(t, "good", answers(textChunk("a"), usageChunk, doneEvent))
	n := 0
	e.router.set(func(*routerv1.RouteRequest) (*routerv1.RouteResponse, error) {
		n++ // no worker is ejected
		gone := func(name string) *routerv1.Endpoint {
			return &routerv1.Endpoint{Worker: fmt.Sprint(name, n), Url: "http://127.0.0.1:1", Profile: good.endpoint().GetProfile()}
		}
		return &routerv1.RouteResponse{Endpoints: []*routerv1.Endpoint{gone("a"), gone("b"), good.endpoint()}}, nil
	})
	for i := range 40 {
		if resp, text := e.post(chatPath, chatRequest(true, "")); resp.StatusCode != http.StatusOK {
			t.Fatalf("request %d: %d %s", i, resp.StatusCode, text)
		}
	}
}

// Nor do workers that close their connections as they go: the transport sends the
// request again, which nobody gets.
func TestLeavingWorkersCostNoTry(t *testing.T) {
	e := start(t, nil).ready()
	good := newWorker(t, "good", answers(textChunk("a"), usageChunk, doneEvent))
	for i := range 40 {
		served := 0
		var s *httptest.Server
		s = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if served++; served == 1 {
				answers(textChunk("a"), usageChunk, doneEvent)(w, r)
				return
			}
			_ = s.Listener.Close()
			conn, _, err := w.(http.Hijacker).Hijack()
			if err != nil {
				t.Error(err)
				return
			}
			_ = conn.Close()
		}))
		leaver := &worker{name: fmt.Sprint("leaver-", i), url: s.URL, model: "base-model"}
		e.router.set(func(*routerv1.RouteRequest) (*routerv1.RouteResponse, error) {
			return &routerv1.RouteResponse{Endpoints: []*routerv1.Endpoint{leaver.endpoint(), good.endpoint()}}, nil
		})
		for range 2 {
			if resp, text := e.post(chatPath, chatRequest(true, "")); resp.StatusCode != http.StatusOK {
				t.Fatalf("worker %d: %d %s", i, resp.StatusCode, text)
			}
		}
		if s.Close(); served != 2 {
			t.Fatalf("worker %d got %d requests", i, served)
		}
	}
}
