package acceptance

import (
	"net/http"
	"strings"
	"testing"

	"go.opentelemetry.io/otel/sdk/trace/tracetest"
)

// One trace leads from ingress through router to kvtracker, linked to the
// client's own, and no span holds any of the prompt.
func TestTraceThroughAllServices(t *testing.T) {
	spans := tracetest.NewInMemoryExporter()
	e := start(t, settings{workers: 1, spans: spans})
	const trace = "0af7651916cd43dd8448eb211c80319c"
	ask := func() {
		hr, err := http.NewRequestWithContext(t.Context(), http.MethodPost, e.stack.URL()+"/v1/chat/completions", strings.NewReader(req{text: "verysecretword " + words(5, 200), max: 1}.body()))
		if err != nil {
			t.Fatal(err)
		}
		hr.Header.Set("Content-Type", "application/json")
		hr.Header.Set("Traceparent", "00-"+trace+"-b7ad6b7169203331-01")
		resp, err := e.client.Do(hr)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
	}
	ask()
	t.Cleanup(func() {
		for _, s := range spans.GetSpans() {
			if t.Failed() {
				t.Logf("span %s %s of trace %s", s.InstrumentationScope.Name, s.Name, s.SpanContext.TraceID())
			}
		}
	})
	e.eventually("spans of all three services are exported", func() bool {
		// The client's trace is linked, not joined: it may not decide what is
		// sampled here.
		seen, ours := map[string]bool{}, ""
		for _, s := range spans.GetSpans() {
			if len(s.Links) == 1 && s.Links[0].SpanContext.TraceID().String() == trace {
				ours = s.SpanContext.TraceID().String()
			}
		}
		for _, s := range spans.GetSpans() {
			if s.SpanContext.TraceID().String() != ours {
				continue
			}
			switch {
			case strings.Contains(s.Name, "Route"):
				seen["router"] = true
			case strings.Contains(s.Name, "Match"):
				seen["kvtracker"] = true
			case strings.Contains(s.Name, "chat"):
				seen["ingress"] = true
			}
		}
		return len(seen) == 3
	})
	for _, s := range spans.GetSpans() {
		if strings.HasPrefix(s.Name, "chat ") {
			names := map[string]bool{}
			for _, a := range s.Attributes {
				names[string(a.Key)] = true
			}
			if !names["gen_ai.request.model"] || !names["gen_ai.usage.input_tokens"] || !names["gen_ai.provider.name"] {
				t.Errorf("span %s has %v", s.Name, names)
			}
		}
		for _, a := range s.Attributes {
			if strings.Contains(a.Value.String(), "verysecretword") {
				t.Errorf("span %s holds prompt text in %s", s.Name, a.Key)
			}
		}
	}
}
