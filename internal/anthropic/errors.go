package anthropic

import (
	"encoding/json"
	"math"
	"net/http"
	"strconv"

	"github.com/kinference/kinference/internal/openai"
)

// The error types of the API. Clients must tolerate others, but act on these.
const (
	typeInvalid        = "invalid_request_error"
	typeAuthentication = "authentication_error"
	typeBilling        = "billing_error"
	typePermission     = "permission_error"
	typeNotFound       = "not_found_error"
	typeTooLarge       = "request_too_large"
	typeRateLimit      = "rate_limit_error"
	typeAPI            = "api_error"
	typeTimeout        = "timeout_error"
	typeOverloaded     = "overloaded_error"
)

// statusOverloaded is the API's own status for what others call 503.
const statusOverloaded = 529

// statusOf are the statuses that come with the types.
var statusOf = map[string]int{
	typeInvalid: http.StatusBadRequest, typeAuthentication: http.StatusUnauthorized, typeBilling: http.StatusPaymentRequired,
	typePermission: http.StatusForbidden, typeNotFound: http.StatusNotFound, typeTooLarge: http.StatusRequestEntityTooLarge,
	typeRateLimit: http.StatusTooManyRequests, typeAPI: http.StatusInternalServerError, typeTimeout: http.StatusGatewayTimeout,
	typeOverloaded: http.StatusServiceUnavailable,
}

// ErrorType is the API's type for an error of a status.
func ErrorType(status int) string {
	switch status {
	case http.StatusUnauthorized:
		return typeAuthentication
	case http.StatusPaymentRequired:
		return typeBilling
	case http.StatusForbidden:
		return typePermission
	case http.StatusNotFound:
		return typeNotFound
	case http.StatusRequestEntityTooLarge:
		return typeTooLarge
	case http.StatusTooManyRequests:
		return typeRateLimit
	case http.StatusServiceUnavailable, statusOverloaded:
		return typeOverloaded
	case http.StatusGatewayTimeout, http.StatusRequestTimeout:
		return typeTimeout
	}
	if status >= 400 && status < 500 {
		return typeInvalid
	}
	return typeAPI
}

// Status is the API's status for an error that elsewhere has this one: a
// gateway's 503 is 529 here.
func Status(status int) int {
	if status == http.StatusServiceUnavailable {
		return statusOverloaded
	}
	return status
}

// AppendError appends an error's body. id may be empty.
func AppendError(dst []byte, e *openai.Error, id string) []byte {
	dst = append(dst, `{"type":"error","error":{"type":"`...)
	dst = append(dst, ErrorType(e.Status)...)
	dst = append(dst, `","message":`...)
	dst = openai.AppendString(dst, e.Message)
	dst = append(dst, '}')
	if id != "" {
		dst = append(dst, `,"request_id":`...)
		dst = openai.AppendString(dst, id)
	}
	return append(dst, '}')
}

// AppendErrorEvent appends an error as the event that ends a stream.
func AppendErrorEvent(dst []byte, e *openai.Error, id string) []byte {
	dst = append(dst, "event: error\ndata: "...)
	dst = AppendError(dst, e, id)
	return append(dst, "\n\n"...)
}

// WriteError answers a request with e. Nothing may have been written.
func WriteError(w http.ResponseWriter, e *openai.Error, id string) {
	h := w.Header()
	if e.RetryAfter > 0 {
		h.Set("Retry-After", strconv.Itoa(int(math.Ceil(e.RetryAfter.Seconds()))))
	}
	body := AppendError(nil, e, id)
	h.Set("Content-Type", "application/json")
	h.Set("Content-Length", strconv.Itoa(len(body)))
	w.WriteHeader(Status(e.Status))
	_, _ = w.Write(body) // a client that is gone has no use for it
}

// FromBody turns a provider's error answer into a gateway's error. Texts of
// 5xx answers are not passed on.
func FromBody(status int, body []byte) *openai.Error {
	if status == statusOverloaded {
		status = http.StatusServiceUnavailable
	}
	e := openai.FromBody(status, body) // {"error":{"message":…}} is common to both
	switch status {
	case http.StatusServiceUnavailable:
		*e = *openai.Overloaded("The provider is overloaded. Try again later.", 0)
	case http.StatusRequestEntityTooLarge:
		e.Code = openai.CodeRequestTooLarge
	case http.StatusNotFound:
		e.Code = openai.CodeModelNotFound
	}
	return e
}

// fromEvent turns a provider's error event into a gateway's error.
func fromEvent(data []byte) *openai.Error {
	var in struct {
		Error struct{ Type, Message string }
	}
	_ = json.Unmarshal(data, &in)
	status := statusOf[in.Error.Type]
	if status == 0 {
		status = http.StatusInternalServerError
	}
	switch {
	case status == http.StatusServiceUnavailable:
		return openai.Overloaded("The provider is overloaded. Try again later.", 0)
	case status == http.StatusGatewayTimeout:
		return openai.Server(status, openai.CodeTimeout, "The provider did not answer in time.")
	case status >= 500:
		return openai.Server(http.StatusBadGateway, openai.CodeUpstream, "The provider could not complete the request.")
	case status == http.StatusTooManyRequests:
		return &openai.Error{Status: status, Type: "requests", Code: "rate_limit_exceeded", Message: in.Error.Message}
	}
	return &openai.Error{Status: status, Type: openai.TypeInvalidRequest, Message: in.Error.Message}
}
