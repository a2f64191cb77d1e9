package provider

import (
	"net/http"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/kinference/kinference/internal/openai"
)

const (
	// maxRetryAfter is the longest that a provider may keep us away.
	maxRetryAfter = 5 * time.Minute
	// MaxWait is the longest that a client is told to wait: some SDKs sleep for
	// however long they are told, others give up.
	MaxWait = time.Minute
)

// Texts in place of the provider's own.
const (
	busyText    = "The provider is busy. Try again later."
	failedText  = "The provider could not complete the request."
	refusedText = "The provider refused the request."
	timeoutText = "The provider did not answer in time."
	invalidText = "The provider gave no valid answer."
)

// Refused turns an answer with another status than 200 into an error of ours.
// A fault of the request is the client's, with the provider's words if they are
// only about the request. What is between the provider and us is not: keys,
// limits and money are ours, so the client sees that the provider was busy or
// could not do it.
func (r *Request) Refused(status int, h http.Header, body []byte) *openai.Error {
	switch {
	case status == http.StatusTooManyRequests:
		return openai.Overloaded(busyText, min(RetryAfter(h), MaxWait))
	case status == http.StatusServiceUnavailable || status == 529: // Anthropic's own
		return openai.Overloaded(busyText, min(RetryAfter(h), MaxWait))
	case strings.HasPrefix(h.Get("X-Amzn-Errortype"), "ServiceQuotaExceeded"): // comes as a 400
		return openai.Overloaded(busyText, min(RetryAfter(h), MaxWait))
	case status == http.StatusBadRequest || status == http.StatusUnprocessableEntity || status == http.StatusRequestEntityTooLarge:
		e := openai.FromBody(status, bedrockText(body))
		if money.MatchString(e.Message) { // Anthropic says it with a 400
			return openai.Server(http.StatusBadGateway, openai.CodeUpstream, "The provider refused the gateway.")
		}
		if status == http.StatusRequestEntityTooLarge {
			e.Code = openai.CodeRequestTooLarge
		}
		return r.clean(e)
	case status == http.StatusGatewayTimeout || status == http.StatusRequestTimeout:
		return openai.Server(http.StatusGatewayTimeout, openai.CodeTimeout, timeoutText)
	case status == http.StatusUnauthorized || status == http.StatusForbidden || status == http.StatusPaymentRequired || status == http.StatusProxyAuthRequired:
		return openai.Server(http.StatusBadGateway, openai.CodeUpstream, "The provider refused the gateway.")
	case status == http.StatusNotFound || status == http.StatusMethodNotAllowed:
		return openai.Server(http.StatusBadGateway, openai.CodeUpstream, "The provider does not serve the model.")
	case status >= 400 && status < 500:
		return openai.Invalid("", "", refusedText)
	case status >= 500:
		return openai.Server(http.StatusBadGateway, openai.CodeUpstream, failedText)
	}
	return openai.Server(http.StatusBadGateway, openai.CodeUpstream, invalidText)
}

// bedrockText gives the error of AWS, which is a message and no more, the form
// that others have.
func bedrockText(body []byte) []byte {
	var o openai.Object
	if o.Parse(body, 0) != nil || o.Get("error").Given() {
		return body
	}
	for _, name := range []string{"message", "Message"} {
		if text, ok := o.Get(name).Text(); ok {
			return append(openai.AppendString([]byte(`{"error":{"message":`), text), "}}"...)
		}
	}
	return body
}

// telling are words in errors that are about the account rather than the request.
var telling = []string{
	"arn:", "account", "organi", "org-", "proj_", "project", "subscription", "billing", "quota", "credit", "key", "credential", "secret", "signature", "sk-",
	"://", "@", "tenant", "workspace", "deployment", "resource", "endpoint", "region", "throughput", "role", "user:", "permission", "authoriz",
}

// opaque finds what looks like an id: of an account, a request, a key.
var opaque = regexp.MustCompile(`[0-9]{10,}|[A-Za-z0-9_-]{28,}|[0-9a-f]{8}-[0-9a-f]{4}-`)

// money finds refusals that are about what the account has left, which another
// endpoint does not mind.
var money = regexp.MustCompile(`(?i)credit balance|billing|insufficient (funds|quota|credit)|spend limit|usage limit|payment`)

// clean takes out of an error what its reader has no business with.
func (r *Request) clean(e *openai.Error) *openai.Error {
	if e.Status >= 500 {
		return e
	}
	if e.Code != openai.CodeRequestTooLarge && contextLength(e.Message) {
		e.Code = openai.CodeContextLength
	}
	text := strings.ToLower(e.Message)
	own := r.target.Model
	tells := own != r.call.Model && own != "" && strings.Contains(text, strings.ToLower(own)) || opaque.MatchString(e.Message) || len(text) > 1024
	for _, word := range telling {
		tells = tells || strings.Contains(text, word)
	}
	if tells || text == "" || text == "the model server refused the request." {
		e.Message = refusedText
		if e.Code == openai.CodeContextLength {
			e.Message = "The prompt is longer than the maximum context length of the model."
		}
	}
	if e.Code != openai.CodeContextLength && e.Code != openai.CodeRequestTooLarge {
		e.Code = ""
	}
	if opaque.MatchString(e.Param) {
		e.Param = ""
	}
	e.Type, e.RetryAfter = openai.TypeInvalidRequest, 0
	return e
}

// contextLength reports whether a message says that the prompt is too long, by
// the words of the providers.
func contextLength(message string) bool {
	message = strings.ToLower(message)
	for _, s := range []string{"maximum context length", "prompt is too long", "input is too long", "too many input tokens", "context window", "exceeds the context"} {
		if strings.Contains(message, s) {
			return true
		}
	}
	return false
}

// Fault turns an error that came in place of content, after the status, into
// what Refused makes of its like.
func (r *Request) Fault(e *openai.Error) *openai.Error {
	switch {
	case e.Status == http.StatusTooManyRequests || e.Status == http.StatusServiceUnavailable:
		return openai.Overloaded(busyText, e.RetryAfter)
	case e.Status == http.StatusGatewayTimeout:
		return openai.Server(http.StatusGatewayTimeout, openai.CodeTimeout, timeoutText)
	case e.Status == http.StatusUnauthorized || e.Status == http.StatusForbidden || e.Status == http.StatusPaymentRequired || e.Status == http.StatusNotFound || e.Status >= 500:
		return openai.Server(http.StatusBadGateway, openai.CodeUpstream, failedText)
	}
	return r.clean(e)
}

// RetryAfter is what a provider says about when to come back; a second if it
// does not, and never longer than a few minutes.
func RetryAfter(h http.Header) time.Duration {
	d := time.Second
	if ms, err := strconv.ParseFloat(h.Get("Retry-After-Ms"), 64); err == nil && ms > 0 && ms < 1e9 {
		d = time.Duration(ms * float64(time.Millisecond))
	} else if s, err := strconv.ParseFloat(h.Get("Retry-After"), 64); err == nil && s > 0 && s < 1e6 {
		d = time.Duration(s * float64(time.Second))
	}
	return min(max(d, 100*time.Millisecond), maxRetryAfter)
}

// EventFault is the error that a stream brought in place of content, or an
// answer under status 200; s is the stream, if it was one.
func (r *Request) EventFault(v openai.Value, s Stream) *openai.Error {
	if s != nil {
		if e := s.Fault(); e != nil {
			return e
		}
	}
	e := openai.FromEvent(v)
	var o openai.Object
	if v.Kind != openai.Obj || o.Parse(v.Raw, 0) != nil {
		return e
	}
	for _, name := range []string{"code", "type"} {
		switch text, _ := o.Get(name).Text(); text {
		case "rate_limit_exceeded", "rate_limit_error", "insufficient_quota", "tokens", "requests", "429":
			return &openai.Error{Status: http.StatusTooManyRequests, Type: "requests", Code: "rate_limit_exceeded", Message: busyText}
		case "overloaded", "overloaded_error", "service_unavailable", "service_unavailable_error", "engine_overloaded":
			return openai.Overloaded(busyText, 0)
		}
	}
	return e
}
