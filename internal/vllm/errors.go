package vllm

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"strconv"
	"strings"
)

// maxErrorBody bounds the error bodies that ParseError reads.
const maxErrorBody = 1 << 20

// Error is the body that vLLM's OpenAI routes answer with; its Code is also the
// HTTP status.
type Error struct {
	Message string  `json:"message"`
	Type    string  `json:"type"`
	Param   *string `json:"param"`
	Code    int     `json:"code"`
}

// Error returns the message.
func (e Error) Error() string { return e.Message }

// JSON returns the body of the OpenAI routes.
func (e Error) JSON() []byte {
	return encode(struct {
		Error Error `json:"error"`
	}{e})
}

// AnthropicJSON returns the body of vLLM's /v1/messages, which keeps vLLM's own
// type names.
func (e Error) AnthropicJSON() []byte {
	type inner struct {
		Type    string `json:"type"`
		Message string `json:"message"`
	}
	return encode(struct {
		Type  string `json:"type"`
		Error inner  `json:"error"`
	}{"error", inner{e.Type, e.Message}})
}

// encode leaves <, > and & alone, as Python's json does.
func encode(v any) []byte {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	// The types above hold only strings and integers: they always encode.
	_ = enc.Encode(v)
	return bytes.TrimSuffix(b.Bytes(), []byte("\n"))
}

// UnauthorizedBody is vLLM's answer to a wrong API key: not the usual shape.
const UnauthorizedBody = `{"error":"Unauthorized"}`

func newError(code int, kind, param, message string) Error {
	e := Error{Message: message, Type: kind, Code: code}
	if param != "" {
		e.Param = &param
	}
	return e
}

// BadRequest is a 400 about a parameter; param may be empty.
func BadRequest(param, message string) Error {
	return newError(http.StatusBadRequest, "BadRequestError", param, message)
}

// InvalidBody is a 400 for a body that does not validate.
func InvalidBody(message string) Error {
	return newError(http.StatusBadRequest, "Bad Request", "", message)
}

// ContextLength is a 400 for a prompt that, with the output, does not fit. All
// arguments are in tokens.
func ContextLength(maxModelLen, output, prompt int) Error {
	return BadRequest("input_tokens", fmt.Sprintf("This model's maximum context length is %d tokens. However, you requested %d output tokens "+
		"and your prompt contains at least %d input tokens, for a total of at least %d tokens. Please reduce the length of the input prompt "+
		"or the number of requested output tokens. (parameter=input_tokens, value=%d)", maxModelLen, output, prompt, output+prompt, prompt))
}

// PromptLength is ContextLength as 0.32 says it, which shortens an output that
// does not fit: the prompt alone is too long. All arguments are in tokens.
func PromptLength(maxModelLen, prompt int) Error {
	atLeast := ""
	if prompt == maxModelLen+1 { // where tokenisation stops
		atLeast = "at least "
	}
	return BadRequest("input_tokens", fmt.Sprintf("This model's maximum context length is %d tokens. However, your prompt contains %s%d input tokens, "+
		"which exceeds this limit even without any output tokens. Please reduce the length of the input prompt. (parameter=input_tokens, value=%d)",
		maxModelLen, atLeast, prompt, prompt))
}

// ContextChars is a 400 for a prompt of so many characters that tokenisation
// is not even tried, in 0.32's words.
func ContextChars(maxModelLen, chars, limit int) Error {
	return BadRequest("input_text", fmt.Sprintf("This model's maximum context length is %d tokens. However, your prompt contains %d characters "+
		"(more than %d characters, which is the upper bound for %d input tokens). Please reduce the length of the input prompt. (parameter=input_text, value=%d)",
		maxModelLen, chars, limit, maxModelLen, chars))
}

// ModelNotFound is a 404 for an unknown model. 0.32 lists the aliases of its
// model.
func ModelNotFound(model string, aliases ...string) Error {
	message := fmt.Sprintf("The model `%s` does not exist.", model)
	if len(aliases) > 0 {
		message += " Valid aliases: " + strings.Join(aliases, ", ") + "."
	}
	return newError(http.StatusNotFound, "NotFoundError", "model", message)
}

// NotImplemented is a 501.
func NotImplemented(message string) Error {
	return newError(http.StatusNotImplemented, "NotImplementedError", "", message)
}

// Internal is a 500.
func Internal(message string) Error {
	return newError(http.StatusInternalServerError, "InternalServerError", "", message)
}

// IsContextLength reports whether the error says that the prompt is too long.
// The wording has changed over versions; these words have not.
func IsContextLength(e Error) bool {
	return e.Code/100 == 4 && strings.Contains(e.Message, "maximum context length")
}

// ParseError reads an error body of any vLLM version and frontend: with the code
// as number or string, at the top level (old), of the Anthropic routes, or of a
// failed authentication. Code is 0 when the body has none. It reports false for
// anything else.
func ParseError(body []byte) (Error, bool) {
	if len(body) > maxErrorBody {
		return Error{}, false
	}
	type wire struct {
		Object  string          `json:"object"`
		Message string          `json:"message"`
		Type    string          `json:"type"`
		Param   json.RawMessage `json:"param"`
		Code    json.RawMessage `json:"code"`
		Error   json.RawMessage `json:"error"`
	}
	var w wire
	if json.Unmarshal(body, &w) != nil {
		return Error{}, false
	}
	if len(w.Error) > 0 {
		var text string
		if json.Unmarshal(w.Error, &text) == nil && text != "" {
			e := Error{Message: text}
			if text == "Unauthorized" {
				e.Code = http.StatusUnauthorized
			}
			return e, true
		}
		var inner wire
		if json.Unmarshal(w.Error, &inner) != nil {
			return Error{}, false
		}
		w = inner
	} else if w.Object != "error" {
		return Error{}, false
	}
	if w.Message == "" && w.Type == "" {
		return Error{}, false
	}
	e := Error{Message: w.Message, Type: w.Type}
	if param := ""; json.Unmarshal(w.Param, &param) == nil && param != "" {
		e.Param = &param
	}
	if code, err := strconv.Atoi(strings.Trim(string(w.Code), `"`)); err == nil {
		e.Code = code
	}
	return e, true
}
