package ingress_test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"

	"connectrpc.com/connect"

	"github.com/kinference/kinference/internal/rpc"
	"github.com/kinference/kinference/internal/testenv"
	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
	"github.com/kinference/kinference/services/ingress"
)

// What a client can do wrong, and that neither router nor worker hears of it.
func TestBadInput(t *testing.T) {
	e := start(t, func(c *ingress.Config, cat *routerv1.Catalog) {
		c.MaxBody = 64 << 10
		cat.Profiles[0].TokenizerPath = modelDir(t)
		cat.Profiles[0].MaxModelLen = 100
	}).ready()
	e.router.set(func(*routerv1.RouteRequest) (*routerv1.RouteResponse, error) {
		t.Error("the router was asked")
		return nil, rpc.Error(connect.CodeUnavailable, "", 1)
	})
	const messages = `"messages":[{"role":"user","content":"hi"}]}`
	long := strings.Repeat("one two three ", 200)
	tests := []struct {
		name, path, body  string
		header            []string
		status            int
		kind, param, code string
	}{
		{"unknown model", chatPath, `{"model":"nope",` + messages, nil, 404, "invalid_request_error", "model", "model_not_found"},
		{"unknown model, completions", textPath, `{"model":"nope","prompt":"x"}`, nil, 404, "invalid_request_error", "model", "model_not_found"},
		{"prompt too long", chatPath, `{"model":"chat","messages":[{"role":"user","content":"` + long + `"}]}`, nil, 400, "invalid_request_error", "messages", "context_length_exceeded"},
		{"prompt text too long", textPath, `{"model":"chat","prompt":"` + long + `"}`, nil, 400, "invalid_request_error", "prompt", "context_length_exceeded"},
		{"prompt ids too long", textPath, `{"model":"chat","prompt":[1` + strings.Repeat(",1", 100) + `]}`, nil, 400, "invalid_request_error", "prompt", "context_length_exceeded"},
		{"prompt and output too long", chatPath, `{"model":"chat","max_tokens":99,` + messages, nil, 400, "invalid_request_error", "messages", "context_length_exceeded"},
		{"hostile max_tokens", chatPath, `{"model":"chat","max_completion_tokens":999999999999,` + messages, nil, 400, "invalid_request_error", "messages", "context_length_exceeded"},
		{"malformed", chatPath, `{"model":"chat","messages":[`, nil, 400, "invalid_request_error", "", "invalid_json"},
		{"empty", chatPath, ``, nil, 400, "invalid_request_error", "", "invalid_json"},
		{"trailing data", chatPath, `{"model":"chat",` + messages + `{}`, nil, 400, "invalid_request_error", "", "invalid_json"},
		{"duplicate key", chatPath, `{"model":"chat","model":"other",` + messages, nil, 400, "invalid_request_error", "", "invalid_json"},
		{"duplicate key inside", chatPath, `{"model":"chat","messages":[{"role":"user","role":"system","content":"x"}]}`, nil, 400, "invalid_request_error", "", "invalid_json"},
		{"other case", chatPath, `{"model":"chat","Model":"other",` + messages, nil, 400, "invalid_request_error", "model", "invalid_json"},
		{"too deep", chatPath, `{"model":"chat","x":` + strings.Repeat("[", 100) + strings.Repeat("]", 100) + "," + messages, nil, 400, "invalid_request_error", "", "invalid_json"},
		{"invalid UTF-8", chatPath, "{\"model\":\"chat\",\"x\":\"\xff\"," + messages, nil, 400, "invalid_request_error", "", "invalid_json"},
		{"too large", chatPath, `{"model":"chat","x":"` + strings.Repeat("x", 65<<10) + `",` + messages, nil, 413, "invalid_request_error", "", "request_too_large"},
		{"compressed with what nobody reads", chatPath, `{}`, []string{"Content-Encoding", "br"}, 415, "invalid_request_error", "", "unsupported_content_encoding"},
		{"not compressed", chatPath, `{}`, []string{"Content-Encoding", "gzip"}, 400, "invalid_request_error", "", ""},
		{"hostile n", chatPath, `{"model":"chat","n":9007199254740993,` + messages, nil, 400, "invalid_request_error", "n", ""},
		{"too many stops", chatPath, `{"model":"chat","stop":["` + strings.Repeat(`x","`, 64) + `"],` + messages, nil, 400, "invalid_request_error", "stop", ""},
		{"too many tools", chatPath, `{"model":"chat","tools":[{}` + strings.Repeat(`,{}`, 1024) + `],` + messages, nil, 400, "invalid_request_error", "tools", ""},
		{"too many biases", chatPath, `{"model":"chat","logit_bias":{` + biases(4097) + `},` + messages, nil, 400, "invalid_request_error", "logit_bias", ""},
		{"a form", chatPath, `{}`, []string{"Content-Type", "application/x-www-form-urlencoded"}, 415, "invalid_request_error", "", "unsupported_content_type"},
		{"unknown path", "/v1/nothing", `{}`, nil, 404, "invalid_request_error", "", "unknown_url"},
		{"slash at the end", chatPath + "/", `{}`, nil, 404, "invalid_request_error", "", "unknown_url"},
		{"double slash", "//v1/chat/completions", `{}`, nil, 404, "invalid_request_error", "", "unknown_url"},
		{"wrong method", "/v1/models", `{}`, nil, 405, "invalid_request_error", "", "method_not_allowed"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			resp, body := e.post(tt.path, tt.body, tt.header...)
			kind, param, code := parseError(t, body)
			if resp.StatusCode != tt.status || kind != tt.kind || param != tt.param || code != tt.code {
				t.Errorf("got %d %s %q %q: %s", resp.StatusCode, kind, param, code, body)
			}
			if resp.Header.Get("X-Request-Id") == "" {
				t.Error("no request id")
			}
			if strings.Contains(body, "one two three") {
				t.Error("the error quotes the prompt")
			}
		})
	}
	if status, _ := e.get(chatPath); status != http.StatusMethodNotAllowed {
		t.Errorf("GET gave %d", status)
	}
	if n := len(e.router.routed()); n != 0 {
		t.Errorf("%d requests reached the router", n)
	}
	// Names from clients are no labels.
	if m := e.metrics(); strings.Contains(m, "nope") || !strings.Contains(m, `model="_unknown"`) {
		t.Error("the metrics name an unknown model, or count it nowhere")
	}
}

// A body of unknown length is cut at the limit as well.
func TestBodyTooLargeChunked(t *testing.T) {
	e := start(t, func(c *ingress.Config, _ *routerv1.Catalog) { c.MaxBody = 1 << 10 }).ready()
	resp, err := e.client.Post(e.url+chatPath, "application/json", io.MultiReader(strings.NewReader(`{"model":"`), bytes.NewReader(bytes.Repeat([]byte("x"), 1<<20))))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	body, _ := io.ReadAll(resp.Body)
	if _, _, code := parseError(t, string(body)); resp.StatusCode != 413 || code != "request_too_large" {
		t.Errorf("got %d %s", resp.StatusCode, body)
	}
}

func TestBodyInTime(t *testing.T) {
	e := start(t, func(c *ingress.Config, _ *routerv1.Catalog) { c.BodyTimeout = 1 }).ready()
	conn, err := net.Dial("tcp", strings.TrimPrefix(e.url, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	_, _ = io.WriteString(conn, "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
	answer, err := io.ReadAll(conn) // ends because the connection is closed
	if err != nil || !strings.HasPrefix(string(answer), "HTTP/1.1 408") {
		t.Errorf("got %q, %v", answer, err)
	}
}

// biases are n members of a logit_bias.
func biases(n int) string {
	var b strings.Builder
	for i := range n {
		fmt.Fprintf(&b, `"%d":1,`, i)
	}
	return strings.TrimSuffix(b.String(), ",")
}

// All bodies together are bounded; what does not fit is to come again.
func TestBodyMemory(t *testing.T) {
	e := start(t, func(c *ingress.Config, _ *routerv1.Catalog) { c.MaxBody, c.MaxBodies = 1000, 1000 }).ready()
	h, begun, left := hang()
	e.router.routes(newWorker(t, "w", h))
	ctx, cancel := context.WithCancel(context.Background())
	go func() {
		if resp, err := e.begin(ctx, chatPath, chatRequest(false, "")); err == nil {
			resp.Body.Close()
		}
	}()
	await(t, "the first request at the worker", begun)
	resp, body := e.post(chatPath, chatRequest(false, `,"x":"`+strings.Repeat("x", 880)+`"`))
	if _, _, code := parseError(t, body); resp.StatusCode != 503 || code != "service_unavailable" || resp.Header.Get("Retry-After") == "" {
		t.Errorf("got %d %s", resp.StatusCode, body)
	}
	cancel()
	await(t, "the worker to be left", left)
}

// rejection is the router's error where a policy's rule refuses a request.
func rejection() error {
	err := rpc.Error(connect.CodePermissionDenied, "secret detail", 0)
	d, _ := connect.NewErrorDetail(&routerv1.Rejection{Reason: "PromptTooLong", Message: "Use less words.", Rule: "secret/p/r"})
	err.AddDetail(d)
	return err
}

func TestNoWorker(t *testing.T) {
	e := start(t, nil).ready()
	for name, tt := range map[string]struct {
		err    error
		status int
		after  string
		code   string
	}{
		"none ready":    {rpc.Error(connect.CodeUnavailable, "no worker", 3e9), 503, "3", "service_unavailable"},
		"full":          {rpc.Error(connect.CodeResourceExhausted, "full", 0), 429, "1", "saturated"},
		"rejected":      {rejection(), 403, "", "policy_rejected"},
		"model is gone": {rpc.Error(connect.CodeNotFound, "no model", 0), 404, "", "model_not_found"},
		"too long":      {rpc.Error(connect.CodeOutOfRange, "too long", 0), 400, "", "context_length_exceeded"},
		"refused":       {rpc.Error(connect.CodeInvalidArgument, "bad", 0), 400, "", ""},
		"broken":        {rpc.Error(connect.CodeInternal, "secret detail", 0), 503, "1", "service_unavailable"},
	} {
		t.Run(name, func(t *testing.T) {
			e.router.set(func(*routerv1.RouteRequest) (*routerv1.RouteResponse, error) { return nil, tt.err })
			resp, body := e.post(chatPath, chatRequest(true, ""))
			if _, _, code := parseError(t, body); resp.StatusCode != tt.status || resp.Header.Get("Retry-After") != tt.after || code != tt.code {
				t.Errorf("got %d, Retry-After %q: %s", resp.StatusCode, resp.Header.Get("Retry-After"), body)
			}
			if strings.Contains(body, "secret") {
				t.Error("our inside shows")
			}
		})
	}
	e.router.set(func(*routerv1.RouteRequest) (*routerv1.RouteResponse, error) { return &routerv1.RouteResponse{}, nil })
	if resp, _ := e.post(chatPath, chatRequest(true, "")); resp.StatusCode != 503 {
		t.Errorf("an empty list of workers gave %d", resp.StatusCode)
	}
}

// Router and ingress start in any order; before the first catalog requests are
// answered 503, and the service is not ready.
func TestRouterComesLate(t *testing.T) {
	addr := testenv.FreeAddr(t)
	e := start(t, func(c *ingress.Config, _ *routerv1.Catalog) { c.RouterURL = "http://" + addr })
	resp, body := e.post(chatPath, chatRequest(true, ""))
	if resp.StatusCode != 503 || resp.Header.Get("Retry-After") == "" {
		t.Errorf("got %d %s", resp.StatusCode, body)
	}
	if status, _ := e.get("/v1/models"); status != 503 {
		t.Errorf("/v1/models gave %d", status)
	}
	if len(e.shell.NotReady()) == 0 {
		t.Error("ready without a catalog")
	}
	e.router.routes(newWorker(t, "w", refuses(200, whole)))
	serve := func() (stop func()) {
		l, err := net.Listen("tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		return e.serveRouter(l)
	}
	stop := serve()
	e.ready()
	if resp, body := e.post(chatPath, chatRequest(false, "")); resp.StatusCode != 200 {
		t.Errorf("got %d %s", resp.StatusCode, body)
	}

	// The router goes away: the catalog stays, routing fails, reports wait.
	stop()
	if status, _ := e.get("/v1/models"); status != 200 {
		t.Errorf("/v1/models gave %d without a router", status)
	}
	resp, body = e.post(chatPath, chatRequest(false, ""))
	if resp.StatusCode != 503 {
		t.Errorf("got %d %s", resp.StatusCode, body)
	}
	serve()
	e.router.done(resp.Header.Get("X-Request-Id"))
	if resp, body := e.post(chatPath, chatRequest(false, "")); resp.StatusCode != 200 {
		t.Errorf("got %d %s after the router came back", resp.StatusCode, body)
	}
}
