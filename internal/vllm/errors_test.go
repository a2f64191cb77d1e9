package vllm_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kinference/kinference/internal/vllm"
)

func TestErrorBodies(t *testing.T) {
	e := vllm.ContextLength(8192, 100, 9000)
	const want = `{"error":{"message":"This model's maximum context length is 8192 tokens. However, you requested 100 output tokens and your prompt contains at least 9000 input tokens, for a total of at least 9100 tokens. Please reduce the length of the input prompt or the number of requested output tokens. (parameter=input_tokens, value=9000)","type":"BadRequestError","param":"input_tokens","code":400}}`
	if got := string(e.JSON()); got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	if got, ok := vllm.ParseError(e.JSON()); !ok || !vllm.IsContextLength(got) {
		t.Errorf("parsed as %+v, %v", got, ok)
	}
	for _, e := range []vllm.Error{
		vllm.ModelNotFound("a<b>"), vllm.InvalidBody("x"), vllm.NotImplemented("x"), vllm.Internal("x"), vllm.BadRequest("", "x"),
	} {
		if got, ok := vllm.ParseError(e.JSON()); !ok || !cmp.Equal(got, e) {
			t.Errorf("%+v came back as %+v, %v", e, got, ok)
		}
		if vllm.IsContextLength(e) {
			t.Errorf("%+v counts as too long", e)
		}
	}
	if got, want := string(vllm.BadRequest("", "m").AnthropicJSON()), `{"type":"error","error":{"type":"BadRequestError","message":"m"}}`; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
}

func TestParseError(t *testing.T) {
	param := "model"
	tests := []struct {
		name, body string
		want       vllm.Error
		ok         bool
	}{
		{"Rust frontend, code as text", `{"error":{"message":"m","type":"invalid_request_error","param":null,"code":"400"}}`, vllm.Error{Message: "m", Type: "invalid_request_error", Code: 400}, true},
		{"code as words", `{"error":{"message":"m","code":"context_length_exceeded"}}`, vllm.Error{Message: "m"}, true},
		{"top level, old", `{"object":"error","message":"m","type":"NotFoundError","param":"model","code":404}`, vllm.Error{Message: "m", Type: "NotFoundError", Param: &param, Code: 404}, true},
		{"Anthropic", `{"type":"error","error":{"type":"BadRequestError","message":"m"}}`, vllm.Error{Message: "m", Type: "BadRequestError"}, true},
		{"wrong key", vllm.UnauthorizedBody, vllm.Error{Message: "Unauthorized", Code: 401}, true},
		{"FastAPI", `{"detail":"Not Found"}`, vllm.Error{}, false},
		{"HTML", `<html>`, vllm.Error{}, false},
		{"empty error", `{"error":{}}`, vllm.Error{}, false},
		{"null error", `{"error":null}`, vllm.Error{}, false},
		{"list", `{"error":[1]}`, vllm.Error{}, false},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got, ok := vllm.ParseError([]byte(tt.body))
			if ok != tt.ok || !cmp.Equal(got, tt.want) {
				t.Errorf("got %+v, %v, want %+v, %v", got, ok, tt.want, tt.ok)
			}
		})
	}
}
