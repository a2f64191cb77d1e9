package openai

import (
	"fmt"
	"math"
	"net/http"
	"strconv"
	"strings"
	"time"
)

// Error types and codes that clients know. SDKs choose their exception class
// by status and leave type and code to the caller.
const (
	TypeInvalidRequest = "invalid_request_error"
	TypeServer         = "server_error"
	TypeOverloaded     = "overloaded_error"

	CodeModelNotFound   = "model_not_found"
	CodeContextLength   = "context_length_exceeded"
	CodeRequestTooLarge = "request_too_large"
	CodeInvalidJSON     = "invalid_json"
	CodeUnavailable     = "service_unavailable"
	CodeUpstream        = "upstream_error"
	CodeTimeout         = "timeout"
)

// Error is an error in OpenAI's form. Message, Type, Param and Code are the
// body's members; empty Param and Code are sent as null.
type Error struct {
	Status     int // HTTP status
	Message    string
	Type       string
	Param      string
	Code       string
	RetryAfter time.Duration // 0: no advice
}

// Error implements error.
func (e *Error) Error() string { return fmt.Sprintf("%d %s: %s", e.Status, e.Type, e.Message) }

// Invalid is a 400 that blames the named parameter ("" for none).
func Invalid(param, code, message string) *Error {
	return &Error{Status: http.StatusBadRequest, Type: TypeInvalidRequest, Param: param, Code: code, Message: message}
}

// ModelNotFound is the 404 for a model that does not exist or is hidden.
func ModelNotFound(model string) *Error {
	return &Error{Status: http.StatusNotFound, Type: TypeInvalidRequest, Param: "model", Code: CodeModelNotFound,
		Message: "The model " + strconv.Quote(clip(model, 128)) + " does not exist or you do not have access to it."}
}

// ContextLength is the 400 for a prompt that leaves no room. param names the
// member that holds the prompt; output is 0 when the client set no limit.
// Clients match on "maximum context length".
func ContextLength(param string, limit, prompt, output int) *Error {
	message := fmt.Sprintf("This model's maximum context length is %d tokens, but the prompt has %d", limit, prompt)
	if output > 0 {
		message += fmt.Sprintf(" and %d tokens of output were asked for", output)
	}
	return Invalid(param, CodeContextLength, message+". Shorten the prompt or ask for less output.")
}

// TooLarge is the 413 for a body over limit bytes.
func TooLarge(limit int64) *Error {
	return &Error{Status: http.StatusRequestEntityTooLarge, Type: TypeInvalidRequest, Code: CodeRequestTooLarge,
		Message: fmt.Sprintf("The request body is larger than %d bytes.", limit)}
}

// Overloaded is the 503 of a fleet that cannot take the request now.
func Overloaded(message string, retryAfter time.Duration) *Error {
	return &Error{Status: http.StatusServiceUnavailable, Type: TypeOverloaded, Code: CodeUnavailable, Message: message, RetryAfter: retryAfter}
}

// Server is a fault on our side or behind us.
func Server(status int, code, message string) *Error {
	return &Error{Status: status, Type: TypeServer, Code: code, Message: message}
}

// AppendJSON appends the error's body.
func (e *Error) AppendJSON(dst []byte) []byte {
	orNull := func(name, s string) {
		dst = append(append(dst, name...), ':')
		if s == "" {
			dst = append(dst, "null"...)
			return
		}
		dst = AppendString(dst, s)
	}
	dst = append(dst, `{"error":{"message":`...)
	dst = AppendString(dst, e.Message)
	dst = append(dst, `,"type":`...)
	dst = AppendString(dst, e.Type)
	orNull(`,"param"`, e.Param)
	orNull(`,"code"`, e.Code)
	return append(dst, "}}"...)
}

// AppendEvent appends the error as a stream event.
func (e *Error) AppendEvent(dst []byte) []byte { return AppendEvent(dst, nil, e.AppendJSON(nil)) }

// Write answers a request with the error. Nothing may have been written.
func (e *Error) Write(w http.ResponseWriter) {
	h := w.Header()
	if e.RetryAfter > 0 {
		h.Set("Retry-After", strconv.Itoa(int(math.Ceil(e.RetryAfter.Seconds()))))
		h.Set("Retry-After-Ms", strconv.FormatInt(e.RetryAfter.Milliseconds(), 10))
	}
	body := e.AppendJSON(nil)
	h.Set("Content-Type", "application/json")
	h.Set("Content-Length", strconv.Itoa(len(body)))
	w.WriteHeader(e.Status)
	_, _ = w.Write(body) // a client that is gone has no use for it
}

// FromBody turns an engine's error answer into OpenAI's form. vLLM sends
// numbers or strings as code, exception names as type, and for a missing key
// just a string; frameworks before it send {"detail": …}. Texts of 5xx
// answers are not passed on: they describe our inside.
func FromBody(status int, body []byte) *Error {
	var o, inner Object
	text := ""
	e := &Error{Status: status, Type: TypeInvalidRequest}
	if o.Parse(body, 0) == nil {
		switch v := o.Get("error"); v.Kind {
		case Obj:
			if inner.Parse(v.Raw, 0) == nil {
				text = e.take(&inner)
			}
		case String:
			text, _ = v.Text()
		default:
			if text = e.take(&o); text == "" {
				text, _ = o.Get("detail").Text()
			}
		}
	}
	return e.finish(text)
}

// FromEvent turns the error member of a stream event into OpenAI's form. Its
// status comes from the code in it, 500 if there is none.
func FromEvent(v Value) *Error {
	e := &Error{Status: http.StatusInternalServerError, Type: TypeInvalidRequest}
	text := ""
	var o Object
	if v.Kind == Obj && o.Parse(v.Raw, 0) == nil {
		if n := httpCode(o.Get("code")); n >= 400 && n < 600 {
			e.Status = n
		} else if t, _ := o.Get("type").Text(); t == TypeInvalidRequest || t == "BadRequestError" {
			e.Status = http.StatusBadRequest
		}
		text = e.take(&o)
	}
	return e.finish(text)
}

// take copies what is useful of an error object and returns its message.
func (e *Error) take(o *Object) string {
	e.Param, _ = o.Get("param").Text()
	e.Param = clip(e.Param, 128)
	if code, ok := o.Get("code").Text(); ok && httpCode(o.Get("code")) == 0 {
		e.Code = clip(code, 64)
	}
	message, _ := o.Get("message").Text()
	return message
}

// httpCode reads a code that is a status, as a number or as a string.
func httpCode(v Value) int {
	if n, ok := v.Int(); ok {
		return int(n)
	}
	text, _ := v.Text()
	n, _ := strconv.Atoi(text)
	return n
}

func (e *Error) finish(text string) *Error {
	text = clip(text, 4096)
	switch {
	case e.Status >= 500:
		*e = *Server(e.Status, CodeUpstream, "The model server could not complete the request.")
	case IsContextLength(text):
		e.Code = CodeContextLength
		if strings.HasPrefix(e.Param, "input_") { // the engine's internal name
			e.Param = ""
		}
	case e.Status == http.StatusTooManyRequests:
		e.Type = "requests"
		e.Code = "rate_limit_exceeded"
	}
	if e.Status < 500 {
		if e.Message = text; text == "" {
			e.Message = "The model server refused the request."
		}
	}
	return e
}

// IsContextLength reports whether an engine's message says that the prompt is
// too long. The wording changed over versions; this part did not.
func IsContextLength(message string) bool {
	return strings.Contains(message, "maximum context length") || strings.Contains(message, "maximum model length")
}

// clip shortens s to at most n bytes.
func clip(s string, n int) string {
	if len(s) <= n {
		return s
	}
	return strings.ToValidUTF8(s[:n], "") + "…"
}
