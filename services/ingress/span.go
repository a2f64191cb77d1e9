package ingress

import (
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"

	"github.com/kinference/kinference/internal/openai"
	"github.com/kinference/kinference/services/ingress/internal/proxy"
)

// operation is what OpenTelemetry calls a route.
func operation(route openai.Route) string {
	switch route {
	case openai.RouteCompletions:
		return "text_completion"
	case openai.RouteEmbeddings:
		return "embeddings"
	case openai.RouteChat:
	}
	return "chat"
}

// endSpan ends the request's span with what the GenAI conventions of OpenTelemetry want
// to know of it: never a word of the prompt or the answer, and no count that nobody
// knows. Input includes cached input, output includes reasoning.
func (x *exchange) endSpan() {
	defer x.span.End()
	if !x.span.IsRecording() {
		return
	}
	op := operation(x.req.Route)
	x.span.SetName(op + " " + x.label)
	x.span.SetAttributes(
		attribute.String("kinference.request.id", x.id), attribute.Int("kinference.attempts", x.attempts), attribute.Int("http.response.status_code", x.status),
		attribute.String("gen_ai.operation.name", op), attribute.String("gen_ai.request.model", x.label),
	)
	if e := x.endpoint; e != nil {
		provider := "vllm" // our own workers
		if name := e.GetProvider(); name != "" {
			provider = name
		}
		x.span.SetAttributes(attribute.String("gen_ai.provider.name", provider))
		if name := e.GetUpstreamModel(); name != "" {
			x.span.SetAttributes(attribute.String("gen_ai.response.model", name))
		}
	}
	u := x.usage()
	for name, n := range map[string]int{
		"gen_ai.usage.input_tokens": u.Prompt, "gen_ai.usage.output_tokens": u.Output,
		"gen_ai.usage.cache_read.input_tokens": u.Cached, "gen_ai.usage.reasoning.output_tokens": u.Reasoning,
	} {
		if n != openai.Unknown {
			x.span.SetAttributes(attribute.Int(name, n))
		}
	}
	if x.status >= 500 || x.result.Reason != proxy.Served {
		x.span.SetStatus(codes.Error, string(x.result.Reason))
		x.span.SetAttributes(attribute.String("error.type", x.outcomeWord()))
	}
}
