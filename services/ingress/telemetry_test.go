package ingress_test

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"

	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"

	"github.com/kinference/kinference/internal/daemon"
	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
	"github.com/kinference/kinference/services/ingress"
)

// syncBuffer is a log that may be read while it is written.
type syncBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (s *syncBuffer) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}

func (s *syncBuffer) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.String()
}

// Traces, logs and metrics tell how a request went, and nothing of its text
// or keys.
func TestTelemetry(t *testing.T) {
	log := &syncBuffer{}
	e := startIn(t, daemon.Settings{Output: log, LogLevel: slog.LevelDebug}, func(_ *ingress.Config, c *routerv1.Catalog) {
		c.Profiles[0].TokenizerPath = modelDir(t)
	}).ready()
	w := newWorker(t, "w", answers(roleChunk(), textChunk("secret answer"), stopChunk, usageChunk, doneEvent))
	e.router.routes(newWorker(t, "bad", closes()), w)
	secret := strings.Replace(chatRequest(true, ""), "Hello there", "my secret prompt", 1)
	resp, _ := e.post(chatPath, secret, "Authorization", "Bearer secret-key")
	e.post(chatPath, strings.Replace(secret, `"model"`, `"secret model":1,"model"`, 1)+"{")
	e.post(chatPath, strings.Replace(secret, `"chat"`, `"secret-model"`, 1))
	e.router.done(resp.Header.Get("X-Request-Id"))
	e.stop()
	if err := <-e.done; err != nil {
		t.Error(err)
	}
	e.done <- nil // for the cleanup
	metrics := e.metrics()
	for name, text := range map[string]string{"log": log.String(), "metrics": metrics} {
		if strings.Contains(text, "secret") {
			t.Errorf("the %s tells a secret: %s", name, text)
		}
		if text == "" {
			t.Errorf("the %s is empty", name)
		}
	}
	for _, want := range []string{
		`gen_ai_server_time_to_first_token_seconds_count{gen_ai_operation_name="chat",gen_ai_request_model="chat"`,
		`gen_ai_server_request_duration_seconds_count{gen_ai_operation_name="chat",gen_ai_request_model="chat"`,
		`kinference_ingress_cached_tokens_total{model="chat"`,
		`outcome="ok"`, `outcome="refused"`, `status="404"`, `gen_ai_token_type="input"`,
	} {
		if !strings.Contains(metrics, want) {
			t.Errorf("metrics lack %s", want)
		}
	}
}

// keeper keeps spans after its shutdown.
type keeper struct{ spans tracetest.SpanStubs }

func (k *keeper) ExportSpans(_ context.Context, spans []sdktrace.ReadOnlySpan) error {
	k.spans = append(k.spans, tracetest.SpanStubsFromReadOnlySpans(spans)...)
	return nil
}

func (*keeper) Shutdown(context.Context) error { return nil }

// One span for each request, with counts and without text.
func TestSpans(t *testing.T) {
	spans := &keeper{}
	e := startIn(t, daemon.Settings{Spans: spans}, nil).ready()
	e.router.routes(newWorker(t, "w", answers(roleChunk(), textChunk("secret answer"), usageChunk, doneEvent)))
	e.post(chatPath, strings.Replace(chatRequest(true, ""), "Hello there", "my secret prompt", 1), "Traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
	e.stop()
	if err := <-e.done; err != nil {
		t.Error(err)
	}
	e.done <- nil
	e.shell.Close()
	found := false
	for _, s := range spans.spans {
		text := fmt.Sprint(s.Attributes, s.Events, s.Name)
		if strings.Contains(text, "secret") {
			t.Errorf("a span tells a secret: %s", text)
		}
		if s.Name == "chat chat" { // operation and model
			found = true
			got := map[string]string{}
			for _, a := range s.Attributes {
				got[string(a.Key)] = a.Value.String()
			}
			for name, want := range map[string]string{
				"http.route": chatPath, "gen_ai.operation.name": "chat", "gen_ai.request.model": "chat", "gen_ai.provider.name": "vllm",
				"gen_ai.usage.input_tokens": "12", "gen_ai.usage.output_tokens": "2", "gen_ai.usage.cache_read.input_tokens": "8", "http.response.status_code": "200",
			} {
				if got[name] != want {
					t.Errorf("%s is %q, want %q", name, got[name], want)
				}
			}
			if _, unknown := got["gen_ai.usage.reasoning.output_tokens"]; s.Parent.IsValid() || len(s.Links) != 1 || unknown {
				t.Errorf("span %+v", s)
			}
		}
	}
	if !found {
		t.Errorf("no span of the request among %d", len(spans.spans))
	}
}
