package ingress

import (
	"errors"
	"math"
	"net/http"
	"slices"
	"strings"
	"time"

	"connectrpc.com/connect"

	"github.com/kinference/kinference/internal/openai"
	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
	"github.com/kinference/kinference/services/ingress/internal/prompt"
	"github.com/kinference/kinference/services/ingress/internal/proxy"
)

// classes of service, highest first.
var classes = []string{"interactive", "batch", "deferrable"}

const (
	// maxToolName is how much of a tool's name policies see, in bytes.
	maxToolName = 256
	// maxHeaders and maxHeaderBytes bound the headers that policies see.
	maxHeaders, maxHeaderBytes = 64, 16 << 10
)

// attributesOf is what policies may ask about the request.
func (x *exchange) attributesOf() (*routerv1.Attributes, *openai.Error) {
	qos, e := x.qos()
	if e != nil {
		return nil, e
	}
	a := &routerv1.Attributes{Qos: qos, Endpoint: "ChatCompletions", EstimatedTokens: uint32(prompt.Estimate(&x.req)), ClaimsJson: x.caller.Claims}
	a.Tools = append(toolNames(x.req.Body.Get("tools")), toolNames(x.req.Body.Get("functions"))...)
	if t := x.caller.Tenant; t != nil {
		a.Tenants = t.Short
	}
	switch {
	case x.messages != nil:
		a.Endpoint = "Messages"
	case x.responses != nil:
		a.Endpoint = "Responses"
	case x.req.Route == openai.RouteCompletions:
		a.Endpoint = "Completions"
	case x.req.Route == openai.RouteEmbeddings:
		a.Endpoint = "Embeddings"
	}
	if x.model.ReadsHeaders || x.limits.table.Load().ReadsHeaders() {
		a.Headers = map[string]string{}
		n := 0
		for name, values := range proxy.CleanHeader(x.r.Header) {
			if n += len(name) + len(values[0]); len(a.Headers) == maxHeaders || n > maxHeaderBytes {
				return nil, openai.Invalid("", "headers_too_large", "The request has too many or too long headers.")
			}
			a.Headers[strings.ToLower(name)] = values[0]
		}
	}
	return a, nil
}

// toolNames are the names of a request's tools, or of what was called functions before
// there were tools. Agents send many KB of them each time, of which the names alone are
// wanted. How many there are was checked.
func toolNames(tools openai.Value) []string {
	var out []string
	var tool, inner openai.Object
	for t := range tools.Elements() {
		// Whatever is wrong with one the engine will say.
		if t.Kind != openai.Obj || tool.Parse(t.Raw, math.MaxInt) != nil {
			continue
		}
		names := [3]openai.Value{tool.Get("name")}
		for i, kind := range [...]string{"function", "custom"} {
			if v := tool.Get(kind); v.Kind == openai.Obj && inner.Parse(v.Raw, math.MaxInt) == nil {
				names[i+1] = inner.Get("name")
			}
		}
		for _, name := range names {
			if text, _ := name.Text(); text != "" {
				out = append(out, strings.ToValidUTF8(text[:min(len(text), maxToolName)], ""))
			}
		}
	}
	return out
}

// rejected is the answer for a request that a policy's rule refuses.
func rejected(err error) *openai.Error {
	out := &openai.Error{Status: http.StatusForbidden, Type: openai.TypeInvalidRequest, Code: "policy_rejected", Message: "A policy refuses this request."}
	var ce *connect.Error
	if !errors.As(err, &ce) {
		return out
	}
	for _, d := range ce.Details() {
		if v, verr := d.Value(); verr == nil {
			if r, ok := v.(*routerv1.Rejection); ok {
				out.Message = "A policy refuses this request (" + r.GetReason() + ")."
				if r.GetMessage() != "" {
					out.Message += " " + r.GetMessage()
				}
			}
		}
	}
	return out
}

// saturated is the answer when there are endpoints, all of them too busy.
func saturated(after time.Duration) *openai.Error {
	return &openai.Error{
		Status: http.StatusTooManyRequests, Type: "rate_limit_error", Code: "saturated", RetryAfter: after,
		Message: "All model servers that may serve this request are busy. Try again later.",
	}
}

// retry is what a policy says about failures before the first content.
type retry struct {
	attempts int      // in all; 0: as many as there are endpoints
	on       []string // empty: whatever can be retried
	hedge    *routerv1.Hedge
}

// allows reports whether another endpoint may be tried after a failure.
func (r *retry) allows(attempts int, failed *proxy.Result) bool {
	if r.attempts > 0 && attempts >= r.attempts {
		return false
	}
	word := "5xx"
	switch {
	case failed.Reason == proxy.Connect:
		word = "ConnectFailure"
	case failed.Reason == proxy.Timeout:
		word = "Timeout"
	case failed.Err != nil && (failed.Err.Status == http.StatusTooManyRequests || failed.Err.Status == http.StatusServiceUnavailable):
		word = "Overloaded"
	}
	return len(r.on) == 0 || slices.Contains(r.on, word)
}
