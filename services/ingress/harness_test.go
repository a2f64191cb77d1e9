package ingress_test

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"
	"go.uber.org/goleak"

	"github.com/kinference/kinference/internal/daemon"
	"github.com/kinference/kinference/internal/fleetsim/model"
	"github.com/kinference/kinference/internal/rpc"
	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
	"github.com/kinference/kinference/proto/gen/kinference/router/v1/routerv1connect"
	"github.com/kinference/kinference/services/ingress"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// patience bounds waits for things that must happen; it is no measurement.
const patience = time.Minute // for busy machines

// router is a RouterService over real Connect whose answers a test sets.
type router struct {
	routerv1connect.UnimplementedRouterServiceHandler
	t testing.TB

	mu       sync.Mutex
	catalog  *routerv1.Catalog
	changed  chan struct{}
	answer   func(*routerv1.RouteRequest) (*routerv1.RouteResponse, error)
	requests []*routerv1.RouteRequest
	reports  []*routerv1.Report
	parity   *routerv1.ParityReport
	reported chan struct{}
}

var _ routerv1connect.RouterServiceHandler = (*router)(nil)

func (r *router) Route(_ context.Context, req *routerv1.RouteRequest) (*routerv1.RouteResponse, error) {
	r.mu.Lock()
	r.requests = append(r.requests, req)
	answer := r.answer
	r.mu.Unlock()
	return answer(req)
}

func (r *router) Report(_ context.Context, req *routerv1.ReportRequest) (*routerv1.ReportResponse, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.reports = append(r.reports, req.GetReports()...)
	if p := req.GetParity(); p != nil {
		r.parity = p
	}
	close(r.reported)
	r.reported = make(chan struct{})
	return &routerv1.ReportResponse{}, nil
}

func (r *router) WatchCatalog(ctx context.Context, _ *routerv1.WatchCatalogRequest, s *connect.ServerStream[routerv1.WatchCatalogResponse]) error {
	for {
		r.mu.Lock()
		c, changed := r.catalog, r.changed
		r.mu.Unlock()
		if err := s.Send(&routerv1.WatchCatalogResponse{Catalog: c}); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return nil
		case <-changed:
		}
	}
}

// routes lets the router answer with these workers, best first, minus those
// that the request excludes.
func (r *router) routes(workers ...*worker) {
	r.set(func(req *routerv1.RouteRequest) (*routerv1.RouteResponse, error) {
		out := &routerv1.RouteResponse{}
		for _, w := range workers {
			if !slices.Contains(req.GetExclude(), w.name) {
				out.Endpoints = append(out.Endpoints, w.endpoint())
			}
		}
		if len(out.Endpoints) == 0 {
			return nil, rpc.Error(connect.CodeUnavailable, "no worker is ready", 3*time.Second)
		}
		return out, nil
	})
}

func (r *router) set(answer func(*routerv1.RouteRequest) (*routerv1.RouteResponse, error)) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.answer = answer
}

func (r *router) routed() []*routerv1.RouteRequest {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.requests)
}

// done waits for the Done report of a request and returns it with all reports
// of that request in words.
func (r *router) done(id string) (*routerv1.Done, []string) {
	r.t.Helper()
	timeout := time.After(patience)
	for {
		r.mu.Lock()
		var words []string
		var done *routerv1.Done
		for _, rep := range r.reports {
			if rep.GetRequestId() != id {
				continue
			}
			switch e := rep.GetEvent().(type) {
			case *routerv1.Report_Moved:
				words = append(words, "moved to "+e.Moved.GetWorker()+" after "+e.Moved.GetReason())
			case *routerv1.Report_FirstToken:
				words = append(words, "first token")
			case *routerv1.Report_Done:
				done = e.Done
				words = append(words, strings.ToLower(strings.TrimPrefix(e.Done.GetOutcome().String(), "OUTCOME_")))
			}
		}
		reported := r.reported
		r.mu.Unlock()
		if done != nil {
			return done, words
		}
		select {
		case <-reported:
		case <-timeout:
			r.t.Fatalf("no Done report for %s, only %v", id, words)
		}
	}
}

// worker is an engine whose HTTP answers a test sets.
type worker struct {
	name, url, model string
	rank             *uint32
}

func (w *worker) endpoint() *routerv1.Endpoint {
	return &routerv1.Endpoint{Worker: w.name, Url: w.url, Profile: "p", UpstreamModel: w.model, DataParallelRank: w.rank}
}

func newWorker(t testing.TB, name string, h http.HandlerFunc) *worker {
	s := httptest.NewServer(h)
	t.Cleanup(s.Close)
	return &worker{name: name, url: s.URL, model: "base-model"}
}

// env is an ingress with a router behind it.
type env struct {
	t      testing.TB
	url    string
	router *router
	shell  *daemon.Shell
	stop   context.CancelFunc
	done   chan error
	client *http.Client
}

// start runs an ingress whose catalog has "base-model" without a tokenizer,
// its alias "chat" and the adapter "sql".
func start(t testing.TB, change func(*ingress.Config, *routerv1.Catalog)) *env {
	t.Helper()
	return startIn(t, daemon.Settings{}, change)
}

func startIn(t testing.TB, settings daemon.Settings, change func(*ingress.Config, *routerv1.Catalog)) *env {
	t.Helper()
	r := &router{t: t, changed: make(chan struct{}), reported: make(chan struct{}), catalog: &routerv1.Catalog{
		Version: 1,
		Models: []*routerv1.Model{
			{Name: "base-model", Root: "base-model", Profiles: []string{"p"}, MaxModelLen: 4096, Ready: true},
			{Name: "chat", Root: "base-model", Profiles: []string{"p"}, MaxModelLen: 4096, Ready: true},
			{Name: "sql", Root: "base-model", Profiles: []string{"sql"}, Ready: true},
		},
		Profiles: []*routerv1.Profile{
			{Id: "p", WorkerSet: "ns/set", UpstreamModel: "base-model", BlockSize: 16, MaxModelLen: 4096},
			{Id: "sql", WorkerSet: "ns/set", UpstreamModel: "sql", Lora: "sql", BlockSize: 16},
		},
	}}
	r.set(func(*routerv1.RouteRequest) (*routerv1.RouteResponse, error) {
		return nil, rpc.Error(connect.CodeUnavailable, "no worker is ready", 3*time.Second)
	})
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	svc := &ingress.Service{Config: ingress.Config{Listener: l, PromptTimeout: patience, ProviderPrivate: "127.0.0.0/8"}}
	if change != nil {
		change(&svc.Config, r.catalog)
	}

	settings.DrainTimeout = cmp.Or(settings.DrainTimeout, 2*time.Second)
	shell, err := daemon.NewShell(context.Background(), settings)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(shell.Close)
	e := &env{t: t, url: "http://" + l.Addr().String(), router: r, shell: shell, done: make(chan error, 1), client: &http.Client{Transport: &http.Transport{}}}
	if svc.RouterURL == "" {
		rl, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		svc.RouterURL = "http://" + rl.Addr().String()
		e.serveRouter(rl)
	}
	ctx, stop := context.WithCancel(context.Background())
	e.stop = stop
	ctx = shell.Context(ctx, "ingress")
	go func() { e.done <- svc.Run(ctx) }()
	t.Cleanup(func() {
		stop()
		e.client.CloseIdleConnections()
		if err := <-e.done; err != nil {
			t.Errorf("Run returned %v", err)
		}
	})
	return e
}

// serveRouter serves the router on l; it returns what stops it.
func (e *env) serveRouter(l net.Listener) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = rpc.Serve(ctx, l, rpc.Mount[routerv1connect.RouterServiceHandler](ctx, e.router, routerv1connect.NewRouterServiceHandler))
	}()
	stop = sync.OnceFunc(func() { cancel(); <-ended })
	e.t.Cleanup(stop)
	return stop
}

func (e *env) ready() *env {
	e.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if err := e.shell.WaitReady(ctx); err != nil {
		e.t.Fatal(err)
	}
	return e
}

// begin sends a request and returns the answer with its body still open.
func (e *env) begin(ctx context.Context, path, body string, header ...string) (*http.Response, error) {
	e.t.Helper()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, e.url+path, strings.NewReader(body))
	if err != nil {
		e.t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	for i := 0; i < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	return e.client.Do(req)
}

// post sends a request and reads the whole answer.
func (e *env) post(path, body string, header ...string) (*http.Response, string) {
	e.t.Helper()
	resp, err := e.begin(context.Background(), path, body, header...)
	if err != nil {
		e.t.Fatal(err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		e.t.Fatal(err)
	}
	return resp, string(text)
}

func (e *env) get(path string) (int, string) {
	e.t.Helper()
	resp, err := e.client.Get(e.url + path)
	if err != nil {
		e.t.Fatal(err)
	}
	defer resp.Body.Close()
	text, _ := io.ReadAll(resp.Body)
	return resp.StatusCode, string(text)
}

// metrics is the text of the admin port's metrics.
func (e *env) metrics() string {
	w := httptest.NewRecorder()
	e.shell.Admin().ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/metrics", nil))
	return w.Body.String()
}

const (
	chatPath = "/v1/chat/completions"
	textPath = "/v1/completions"
)

func chatRequest(stream bool, more string) string {
	return fmt.Sprintf(`{"model":"chat","messages":[{"role":"user","content":"Hello there"}],"stream":%v%s}`, stream, more)
}

// The events of a vLLM stream, for a model name.
func roleChunk() string {
	return `data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"base-model","choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}` + "\n\n"
}

func textChunk(text string) string {
	return fmt.Sprintf(`data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"base-model","choices":[{"index":0,"delta":{"content":%q},"finish_reason":null}]}`+"\n\n", text)
}

const (
	stopChunk  = `data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"base-model","choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}` + "\n\n"
	usageChunk = `data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"base-model","choices":[],"usage":{"prompt_tokens":12,"completion_tokens":2,"total_tokens":14,"prompt_tokens_details":{"cached_tokens":8}}}` + "\n\n"
	doneEvent  = "data: [DONE]\n\n"
	whole      = `{"id":"chatcmpl-1","object":"chat.completion","created":1,"model":"base-model","choices":[{"index":0,"message":{"role":"assistant","content":"Hi"},"finish_reason":"stop"}],"usage":{"prompt_tokens":12,"completion_tokens":2,"total_tokens":14,"prompt_tokens_details":{"cached_tokens":8}}}`
)

// renamed is a worker's text as the client must get it.
func renamed(s string) string {
	return strings.ReplaceAll(s, `"model":"base-model"`, `"model":"chat"`)
}

// answers makes a worker that sends these pieces, each flushed.
func answers(pieces ...string) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
		w.WriteHeader(http.StatusOK)
		for _, p := range pieces {
			_, _ = io.WriteString(w, p)
			_ = http.NewResponseController(w).Flush()
		}
	}
}

// refuses makes a worker that answers with a status.
func refuses(status int, body string) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(status)
		_, _ = io.WriteString(w, body)
	}
}

// hang makes a worker that sends pieces and then nothing until it is left;
// left is closed then.
func hang(pieces ...string) (h http.HandlerFunc, begun, left chan struct{}) {
	begun, left = make(chan struct{}), make(chan struct{})
	return func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		if len(pieces) > 0 {
			answers(pieces...)(w, r)
		}
		close(begun)
		<-r.Context().Done()
		close(left)
	}, begun, left
}

func await(t testing.TB, what string, c <-chan struct{}) {
	t.Helper()
	select {
	case <-c:
	case <-time.After(patience):
		t.Fatalf("waited too long: %s", what)
	}
}

type apiError struct {
	Error struct {
		Message     string
		Type        string
		Param, Code *string
	}
}

// parseError reads an error body in OpenAI's form.
func parseError(t testing.TB, body string) (kind, param, code string) {
	t.Helper()
	var e apiError
	if err := json.Unmarshal([]byte(body), &e); err != nil || e.Error.Message == "" || e.Error.Type == "" {
		t.Fatalf("not an OpenAI error: %s", body)
	}
	if e.Error.Param != nil {
		param = *e.Error.Param
	}
	if e.Error.Code != nil {
		code = *e.Error.Code
	}
	return e.Error.Type, param, code
}

// readEvent reads one event of a stream.
func readEvent(t testing.TB, r *bufio.Reader) string {
	t.Helper()
	var b strings.Builder
	for {
		line, err := r.ReadString('\n')
		b.WriteString(line)
		if err != nil {
			t.Fatalf("stream ended with %v after %q", err, b.String())
		}
		if line == "\n" {
			return b.String()
		}
	}
}

func modelDir(t testing.TB) string {
	t.Helper()
	dir, err := model.Dir()
	if err != nil {
		t.Fatal(err)
	}
	return dir
}
