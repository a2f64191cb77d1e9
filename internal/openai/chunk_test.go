package openai_test

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/kinference/kinference/internal/openai"
)

func TestChunkContent(t *testing.T) {
	tests := []struct {
		choice string
		want   bool
	}{
		{`{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}`, false},
		{`{"delta":{"role":"assistant"}}`, false},
		{`{"delta":{"content":null}}`, false},
		{`{"delta":{"content":" "}}`, true},
		{`{"delta":{"reasoning_content":"x"}}`, true},
		{`{"delta":{"reasoning":"x"}}`, true},
		{`{"delta":{"tool_calls":[]}}`, false},
		{`{"delta":{"tool_calls":[ ]}}`, false},
		{`{"delta":{"tool_calls":[{"index":0}]}}`, true},
		{`{"delta":{"refusal":"no"}}`, true},
		{`{"delta":{},"finish_reason":"stop"}`, true},
		{`{"text":"x"}`, true},
		{`{"text":""}`, false},
		{`{"text":"","finish_reason":"length"}`, true},
		{`{"delta":{"content":""}},{"index":1,"delta":{"content":"x"}}`, true},
		{`5`, false},
	}
	var c openai.Chunk
	for _, tt := range tests {
		if err := c.Parse([]byte(`{"choices":[` + tt.choice + `]}`)); err != nil {
			t.Fatal(err)
		}
		if got := c.Content(); got != tt.want || !c.HasChoices {
			t.Errorf("%s: got %v", tt.choice, got)
		}
	}
	for _, in := range []string{`{"choices":[]}`, `{"choices":null}`, `{}`} {
		if err := c.Parse([]byte(in)); err != nil || c.Content() || c.HasChoices {
			t.Errorf("%s: content %v, choices %v, %v", in, c.Content(), c.HasChoices, err)
		}
	}
}

func TestChunkUsage(t *testing.T) {
	const no = openai.Unknown
	tests := []struct {
		in   string
		has  bool
		want openai.Usage
	}{
		{`{}`, false, openai.NoUsage},
		{`{"usage":null}`, false, openai.NoUsage},
		{`{"usage":{"prompt_tokens":7,"completion_tokens":0,"total_tokens":7}}`, true, openai.Usage{Prompt: 7, Cached: no, Output: 0, Reasoning: no}},
		{`{"usage":{"prompt_tokens":7,"completion_tokens":3,"prompt_tokens_details":null}}`, true, openai.Usage{Prompt: 7, Cached: no, Output: 3, Reasoning: no}},
		{`{"usage":{"prompt_tokens":7,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":0},"completion_tokens_details":{"reasoning_tokens":2}}}`, true, openai.Usage{Prompt: 7, Cached: 0, Output: 3, Reasoning: 2}},
		{`{"usage":{"prompt_tokens":-1,"completion_tokens":"x"}}`, true, openai.NoUsage},
		{`{"usage":[1]}`, false, openai.NoUsage},
	}
	var c openai.Chunk
	for _, tt := range tests {
		if err := c.Parse([]byte(tt.in)); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(tt.want, c.Usage); diff != "" || c.HasUsage != tt.has {
			t.Errorf("%s: has %v %s", tt.in, c.HasUsage, diff)
		}
	}

	// Cumulative reports; the last one alone has details, a broken one zeros.
	u := openai.NoUsage
	for _, later := range []openai.Usage{{10, no, 0, no}, {10, no, 1, no}, {0, no, 0, no}, {10, 8, 5, no}} {
		u.Merge(later)
	}
	if want := (openai.Usage{Prompt: 10, Cached: 8, Output: 5, Reasoning: no}); u != want {
		t.Errorf("merged to %+v", u)
	}
}

func TestChunkErrors(t *testing.T) {
	var c openai.Chunk
	if err := c.Parse([]byte(`{"model":"m","error":null}`)); err != nil || !c.NullError || c.Error.Given() {
		t.Errorf("null error: %v %v %v", err, c.NullError, c.Error)
	}
	if err := c.Parse([]byte(`{"error":{"message":"x"}}`)); err != nil || c.NullError || !c.Error.Given() {
		t.Errorf("error: %v", err)
	}
	if err := c.Parse([]byte(`{"error":`)); err == nil || c.Error.Given() || c.NullError {
		t.Error("half a chunk was accepted")
	}
}

func TestFromBody(t *testing.T) {
	const context = `This model's maximum context length is 10 tokens. However, you requested 5 output tokens and your prompt contains 8 input tokens (parameter=input_tokens, value=8)`
	tests := []struct {
		name   string
		status int
		body   string
		want   openai.Error
	}{
		{"vLLM", 404, `{"error":{"message":"The model x does not exist.","type":"NotFoundError","param":"model","code":404}}`,
			openai.Error{Status: 404, Type: "invalid_request_error", Param: "model", Message: "The model x does not exist."}},
		{"Rust front end", 400, `{"error":{"message":"bad","type":"invalid_request_error","param":null,"code":"400"}}`,
			openai.Error{Status: 400, Type: "invalid_request_error", Message: "bad"}},
		{"own code", 400, `{"error":{"message":"bad","type":"t","code":"too_bad"}}`,
			openai.Error{Status: 400, Type: "invalid_request_error", Code: "too_bad", Message: "bad"}},
		{"context", 400, `{"error":{"message":"` + context + `","type":"BadRequestError","param":"input_tokens","code":400}}`,
			openai.Error{Status: 400, Type: "invalid_request_error", Code: "context_length_exceeded", Message: context}},
		{"old form", 400, `{"object":"error","message":"bad","type":"BadRequestError","param":null,"code":400}`,
			openai.Error{Status: 400, Type: "invalid_request_error", Message: "bad"}},
		{"string", 401, `{"error":"Unauthorized"}`, openai.Error{Status: 401, Type: "invalid_request_error", Message: "Unauthorized"}},
		{"detail", 405, `{"detail":"Method Not Allowed"}`, openai.Error{Status: 405, Type: "invalid_request_error", Message: "Method Not Allowed"}},
		{"HTML", 400, `<html>`, openai.Error{Status: 400, Type: "invalid_request_error", Message: "The model server refused the request."}},
		{"inside is hidden", 500, `{"error":{"message":"CUDA error at /opt/x","type":"InternalServerError","code":500}}`,
			openai.Error{Status: 500, Type: "server_error", Code: "upstream_error", Message: "The model server could not complete the request."}},
		{"busy", 429, `{}`, openai.Error{Status: 429, Type: "requests", Code: "rate_limit_exceeded", Message: "The model server refused the request."}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if diff := cmp.Diff(tt.want, *openai.FromBody(tt.status, []byte(tt.body))); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestFromEvent(t *testing.T) {
	for body, want := range map[string]int{
		`{"error":{"message":"x","type":"InternalServerError","code":500}}`: 500,
		`{"error":{"message":"x","type":"BadRequestError","code":400}}`:     400,
		`{"error":{"message":"x","code":"503"}}`:                            503,
		`{"error":{"message":"x","type":"BadRequestError"}}`:                400,
		`{"error":{"message":"x"}}`:                                         500,
		`{"error":"x"}`:                                                     500,
	} {
		var c openai.Chunk
		if err := c.Parse([]byte(body)); err != nil {
			t.Fatal(err)
		}
		if e := openai.FromEvent(c.Error); e.Status != want || e.Message == "" {
			t.Errorf("%s: got %+v, want status %d", body, e, want)
		}
	}
}

func TestErrorWrite(t *testing.T) {
	w := httptest.NewRecorder()
	openai.Overloaded("Try \"later\".", 1500*time.Millisecond).Write(w)
	if w.Code != http.StatusServiceUnavailable || w.Header().Get("Retry-After") != "2" || w.Header().Get("Retry-After-Ms") != "1500" {
		t.Errorf("status %d, header %v", w.Code, w.Header())
	}
	want := `{"error":{"message":"Try \"later\".","type":"overloaded_error","param":null,"code":"service_unavailable"}}`
	if w.Body.String() != want {
		t.Errorf("body %s", w.Body)
	}
	got := string(openai.ContextLength("messages", 100, 90, 20).AppendEvent(nil))
	if !strings.HasPrefix(got, `data: {"error":{"message":"This model's maximum context length is 100 tokens`) || !strings.HasSuffix(got, "\n\n") {
		t.Errorf("event %q", got)
	}
	if m := openai.ModelNotFound(strings.Repeat("x", 5000)).Message; len(m) > 300 {
		t.Errorf("message of %d bytes for a long name", len(m))
	}
}
