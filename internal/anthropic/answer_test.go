package anthropic_test

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/kinference/kinference/internal/anthropic"
	"github.com/kinference/kinference/internal/openai"
)

func TestAppendMessage(t *testing.T) {
	message := func(content, stop, sequence, usage string) string {
		return `{"id":"msg_1","type":"message","role":"assistant","model":"claude","content":[` + content + `],"stop_reason":"` + stop + `","stop_sequence":` + sequence + `,"usage":` + usage + `}`
	}
	const plain = `{"input_tokens":36,"cache_creation_input_tokens":0,"cache_read_input_tokens":64,"output_tokens":9}`
	const usage = `"usage":{"prompt_tokens":100,"completion_tokens":9,"prompt_tokens_details":{"cached_tokens":64}}`
	for _, c := range []struct{ name, in, want string }{
		{"text", `{"choices":[{"message":{"content":"Hi\n"},"finish_reason":"stop","stop_reason":null}],` + usage + `}`, message(`{"type":"text","text":"Hi\n"}`, "end_turn", "null", plain)},
		{"stop sequence", `{"choices":[{"message":{"content":"Hi"},"finish_reason":"stop","stop_reason":"END"}],` + usage + `}`, message(`{"type":"text","text":"Hi"}`, "stop_sequence", `"END"`, plain)},
		{"reasoning", `{"choices":[{"message":{"content":"Hi","reasoning":"hm","tool_calls":[]},"finish_reason":"length"}],` + usage + `}`,
			message(`{"type":"thinking","thinking":"hm","signature":"kinference-unsigned"},{"type":"text","text":"Hi"}`, "max_tokens", "null", plain)},
		{"calls", `{"choices":[{"message":{"content":null,"tool_calls":[{"id":"a","function":{"name":"f","arguments":"{\"x\": [1]}"}},{"id":"b.c","function":{"name":"g","arguments":""}},{"function":{"name":"h","arguments":"{\"x\":"}}]},"finish_reason":"stop"}],` + usage + `}`,
			message(`{"type":"tool_use","id":"a","name":"f","input":{"x": [1]}},{"type":"tool_use","id":"kin64_Yi5j","name":"g","input":{}},{"type":"tool_use","id":"toolu_msg_1_2","name":"h","input":{"raw_arguments":"{\"x\":"}}`, "tool_use", "null", plain)},
		{"refusal", `{"choices":[{"message":{"content":null,"refusal":"No"},"finish_reason":"stop"}],` + usage + `}`, message(`{"type":"text","text":"No"}`, "refusal", "null", plain)},
		{"no usage", `{"choices":[{"message":{"content":""},"finish_reason":"stop"}]}`,
			message(``, "end_turn", "null", `{"input_tokens":7,"cache_creation_input_tokens":0,"cache_read_input_tokens":0,"output_tokens":0}`)},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, err := anthropic.AppendMessage(nil, []byte(c.in), answer)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(c.want, string(got)); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
	for _, in := range []string{`{`, `{}`, `{"choices":[]}`, `{"choices":[1]}`, `{"choices":[{"message":"x"}]}`} {
		if got, err := anthropic.AppendMessage(nil, []byte(in), answer); err == nil {
			t.Errorf("%s became %s", in, got)
		}
	}
}

func TestAppendChatCompletion(t *testing.T) {
	in := `{"id":"msg_x","type":"message","role":"assistant","content":[{"type":"thinking","thinking":"h","signature":"s"},{"type":"text","text":"a"},{"type":"text","text":"b"},{"type":"tool_use","id":"t","name":"f","input":{"x": 1}}],
		"stop_reason":"tool_use","usage":{"input_tokens":1,"cache_creation_input_tokens":2,"cache_read_input_tokens":4,"output_tokens":8}}`
	got, usage, err := anthropic.AppendChat(nil, []byte(in), anthropic.Completion{ID: "chatcmpl-1", Model: "m", Created: 5})
	want := `{"id":"chatcmpl-1","object":"chat.completion","created":5,"model":"m","choices":[{"index":0,"message":{"role":"assistant","reasoning":"h","content":"ab","tool_calls":[{"id":"t","type":"function","function":{"name":"f","arguments":"{\"x\":1}"}}]},` +
		`"logprobs":null,"finish_reason":"tool_calls"}],"usage":{"prompt_tokens":7,"completion_tokens":8,"total_tokens":15,"prompt_tokens_details":{"cached_tokens":4,"cache_write_tokens":2}}}`
	if diff := cmp.Diff(want, string(got)); err != nil || diff != "" {
		t.Errorf("%v (-want +got):\n%s", err, diff)
	}
	if usage != (openai.Usage{Prompt: 7, Cached: 4, Output: 8, Reasoning: openai.Unknown}) {
		t.Errorf("usage: got %+v", usage)
	}
	if _, _, err := anthropic.AppendChat(nil, []byte(`{"type":"error"}`), anthropic.Completion{}); err == nil {
		t.Error("an error was taken for a message")
	}
}

func TestWriteError(t *testing.T) {
	for _, c := range []struct {
		e      *openai.Error
		status int
		kind   string
	}{
		{openai.Invalid("x", "", "bad"), 400, "invalid_request_error"},
		{&openai.Error{Status: 401, Message: "no"}, 401, "authentication_error"},
		{&openai.Error{Status: 402, Message: "pay"}, 402, "billing_error"},
		{&openai.Error{Status: 403, Message: "no"}, 403, "permission_error"},
		{openai.ModelNotFound("m"), 404, "not_found_error"},
		{&openai.Error{Status: 405, Message: "no"}, 405, "invalid_request_error"},
		{&openai.Error{Status: 408, Message: "late"}, 408, "timeout_error"},
		{openai.TooLarge(1), 413, "request_too_large"},
		{&openai.Error{Status: 429, Message: "later", RetryAfter: 1500 * time.Millisecond}, 429, "rate_limit_error"},
		{openai.Server(500, "", "x"), 500, "api_error"},
		{openai.Server(502, "", "x"), 502, "api_error"},
		{openai.Overloaded("full", time.Second), 529, "overloaded_error"},
		{openai.Server(504, "", "x"), 504, "timeout_error"},
	} {
		w := httptest.NewRecorder()
		anthropic.WriteError(w, c.e, "req-1")
		want := `{"type":"error","error":{"type":"` + c.kind + `","message":` + quote(c.e.Message) + `},"request_id":"req-1"}`
		if w.Code != c.status || w.Body.String() != want {
			t.Errorf("%v: got %d %s", c.e, w.Code, w.Body)
		}
		if want := map[bool]string{true: "2"}[c.e.Status == 429]; c.e.Status == 429 && w.Header().Get("Retry-After") != want {
			t.Errorf("Retry-After: got %q, want %q", w.Header().Get("Retry-After"), want)
		}
	}
}

func TestFromBody(t *testing.T) {
	for _, c := range []struct {
		status int
		body   string
		want   openai.Error
	}{
		{400, `{"type":"error","error":{"type":"invalid_request_error","message":"max_tokens: Field required"}}`, openai.Error{Status: 400, Type: "invalid_request_error", Message: "max_tokens: Field required"}},
		{529, `{"type":"error","error":{"type":"overloaded_error","message":"Overloaded in cell 7"}}`, openai.Error{Status: 503, Type: "overloaded_error", Code: "service_unavailable", Message: "The provider is overloaded. Try again later."}},
		{500, `{"type":"error","error":{"type":"api_error","message":"stack"}}`, openai.Error{Status: 500, Type: "server_error", Code: "upstream_error", Message: "The model server could not complete the request."}},
		{404, `{"type":"error","error":{"type":"not_found_error","message":"model: x"}}`, openai.Error{Status: 404, Type: "invalid_request_error", Code: "model_not_found", Message: "model: x"}},
	} {
		if diff := cmp.Diff(&c.want, anthropic.FromBody(c.status, []byte(c.body))); diff != "" {
			t.Errorf("(-want +got):\n%s", diff)
		}
	}
}

func TestContextError(t *testing.T) {
	// Claude Code looks for these words.
	if e := anthropic.ContextError(200000, 210000, 32000); e.Status != http.StatusBadRequest || e.Message != "prompt is too long: 210000 tokens > 200000 maximum" {
		t.Errorf("got %v", e)
	}
	if e := anthropic.ContextError(200000, 190000, 32000); !strings.HasPrefix(e.Message, "input length and `max_tokens` exceed context limit: 190000 + 32000 > 200000, ") {
		t.Errorf("got %v", e)
	}
}
