package ingress_test

import (
	"bytes"
	"compress/gzip"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/kinference/kinference/api/v1alpha1"
	"github.com/kinference/kinference/internal/openai"
	"github.com/kinference/kinference/internal/provider/fake"
)

// ending is what a client makes of a stream, by what its SDK looks at.
type ending struct {
	text  string
	done  bool   // it ended as it should
	fault string // type or code of the error that it ended with
}

// speakers are clients of the three APIs: how they ask for a stream and how they
// read it.
var speakers = []struct {
	name, path, body string
	read             func(*testing.T, string) ending
}{
	{"chat completions", chatPath, chatRequest(true, ""), readChat},
	{"messages", messagesPath, messagesRequest(true, ""), func(t *testing.T, body string) ending {
		m := message(t, body)
		return ending{m.Text("text"), m.StopReason != "", m.Error}
	}},
	{"responses", responsesPath, `{"model":"chat","input":"Hello there","stream":true}`, readResponse},
}

// readChat reads as OpenAI's SDKs do: to what begins with [DONE], an error where there
// is one.
func readChat(t *testing.T, body string) (out ending) {
	for events := openai.NewReader(strings.NewReader(body), 1<<20); ; {
		e, err := events.Next()
		if err != nil {
			return out
		}
		if bytes.HasPrefix(e.Data, []byte("[DONE]")) {
			out.done = out.fault == ""
			return out
		}
		var c struct {
			Choices []struct{ Delta struct{ Content string } }
			Error   *struct{ Code string }
		}
		if e.Data == nil {
			continue
		}
		if err := json.Unmarshal(e.Data, &c); err != nil || e.Cut {
			t.Fatalf("%v in %q", err, e.Raw)
		}
		for _, choice := range c.Choices {
			out.text += choice.Delta.Content
		}
		if c.Error != nil {
			out.fault = c.Error.Code
		}
	}
}

func readResponse(t *testing.T, body string) (out ending) {
	for events := openai.NewReader(strings.NewReader(body), 1<<20); ; {
		e, err := events.Next()
		if err != nil {
			return out
		}
		if e.Data == nil {
			continue
		}
		var c struct {
			Type, Delta string
			Response    struct{ Error *struct{ Code string } }
		}
		if err := json.Unmarshal(e.Data, &c); err != nil || e.Cut || c.Type != string(e.Type) {
			t.Fatalf("%v in %q", err, e.Raw)
		}
		switch c.Type {
		case "response.output_text.delta":
			out.text += c.Delta
		case "response.completed":
			out.done = true
		case "response.failed":
			out.fault = c.Response.Error.Code
		}
	}
}

// faults are the words that each API has for a fault.
func faults(code string) []string {
	return map[string][]string{
		"":                       {"", "", ""},
		openai.CodeUpstream:      {openai.CodeUpstream, "api_error", "server_error"},
		openai.CodeUnavailable:   {openai.CodeUnavailable, "overloaded_error", "server_error"},
		"rate_limit_exceeded":    {"rate_limit_exceeded", "rate_limit_error", "rate_limit_exceeded"},
		openai.CodeContextLength: {openai.CodeContextLength, "invalid_request_error", openai.CodeContextLength},
	}[code]
}

// TestStreamTraps sends what gateways were seen to get wrong from a worker to clients
// of each API.
func TestStreamTraps(t *testing.T) {
	const sentinel = "one data: [DONE]\n\ndata: [DONE] two"
	good := strings.Join([]string{roleChunk(), textChunk("Hel"), textChunk("lo"), stopChunk, usageChunk, doneEvent}, "")
	bytewise := strings.Split(good, "") // a segment for each byte, so that everything is cut everywhere
	crlf := strings.Split(strings.ReplaceAll(good, "\n", "\r\n"), "")
	for _, test := range []struct {
		name   string
		pieces []string
		text   string
		fault  string
	}{
		{"data: [DONE] inside of content", []string{roleChunk(), textChunk(sentinel), stopChunk, usageChunk, doneEvent}, sentinel, ""},
		{"[DONE] as all of the content", []string{textChunk("[DONE]"), stopChunk, doneEvent}, "[DONE]", ""},
		{"sentinel split across segments", append([]string{roleChunk(), textChunk("a"), stopChunk}, strings.Split(doneEvent, "")...), "a", ""},
		{"every byte a segment", bytewise, "Hello", ""},
		{"every byte a segment, CRLF", crlf, "Hello", ""},
		{"event: error after a good first event", []string{roleChunk(), textChunk("a"), "event: error\ndata: {\"error\":{\"message\":\"boom at /opt\",\"type\":\"x\",\"code\":500}}\n\n"}, "a", openai.CodeUpstream},
		{"error without a name, and [DONE]", []string{roleChunk(), textChunk("a"), engineError, doneEvent}, "a", openai.CodeUpstream},
		{"cut without [DONE]", []string{roleChunk(), textChunk("a")}, "a", openai.CodeUpstream},
		{"cut within an event", []string{roleChunk(), textChunk("a"), textChunk("bcd")[:60]}, "a", openai.CodeUpstream},
		{"cut after the finish reason", []string{roleChunk(), textChunk("a"), stopChunk}, "a", openai.CodeUpstream},
	} {
		t.Run(test.name, func(t *testing.T) {
			e := start(t, nil).ready()
			e.router.routes(newWorker(t, "w", answers(test.pieces...)))
			for i, client := range speakers {
				_, body := e.post(client.path, client.body)
				want := ending{test.text, test.fault == "", faults(test.fault)[i]}
				if got := client.read(t, body); got.text != want.text || got.fault != want.fault || got.done != want.done && want.fault == "" {
					t.Errorf("%s: got %+v, want %+v\n%s", client.name, got, want, body)
				}
			}
		})
	}
}

// TestProviderTraps does the same with providers, whose errors come in three forms:
// as a chunk, as event: error, and as a frame that is an exception.
func TestProviderTraps(t *testing.T) {
	for schema, code := range map[v1alpha1.ProviderSchema]string{
		v1alpha1.SchemaOpenAI: openai.CodeUnavailable, v1alpha1.SchemaAnthropic: openai.CodeUnavailable, v1alpha1.SchemaBedrock: openai.CodeUnavailable,
	} {
		for fault, want := range map[fake.Fault]string{fake.ErrorEvent: code, fake.Cut: openai.CodeUpstream} {
			t.Run(fmt.Sprint(schema, " fault ", fault), func(t *testing.T) {
				e, s := bursting(t, schema, "model-9", 0)
				s.SetFault(fault)
				for i, client := range speakers {
					_, body := e.post(client.path, client.body)
					got := client.read(t, body)
					if first := fake.Text[:len(fake.Text)/2]; got.text != first || got.done || got.fault != faults(want)[i] || strings.Contains(body, fake.Account) {
						t.Errorf("%s: got %+v, want %q and then %s\n%s", client.name, got, first, faults(want)[i], body)
					}
					if i < len(speakers)-1 { // what the breaker has learned is of one gateway
						e, s = bursting(t, schema, "model-9", 0)
						s.SetFault(fault)
					}
				}
			})
		}
	}
}

// TestCompressedErrors reads errors that come compressed although nobody asked for
// it: the client gets them in its own form and not compressed.
func TestCompressedErrors(t *testing.T) {
	zipped := func(status int, text string) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) {
			_, _ = io.Copy(io.Discard, r.Body)
			w.Header().Set("Content-Encoding", "gzip")
			w.Header().Set("Content-Type", "application/json")
			w.WriteHeader(status)
			z := gzip.NewWriter(w)
			_, _ = io.WriteString(z, text)
			_ = z.Close()
		}
	}
	bomb := `{"error":{"message":"` + strings.Repeat("a", 64<<20) + `","type":"BadRequestError","code":400}}`
	for name, c := range map[string]struct {
		handler http.HandlerFunc
		status  int
		message string
	}{
		"refused":       {zipped(400, `{"error":{"message":"Temperature is wrong.","type":"BadRequestError","param":"temperature","code":400}}`), 400, "Temperature is wrong."},
		"of the server": {zipped(500, `{"error":{"message":"fault at /opt/vllm","type":"InternalServerError","code":500}}`), 502, ""},
		"no gzip at all": {func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Encoding", "gzip")
			refuses(400, "{}")(w, r)
		}, 400, ""},
		"a bomb": {zipped(400, bomb), 400, ""},
	} {
		e := start(t, nil).ready()
		e.router.routes(newWorker(t, "w", c.handler))
		for _, stream := range []bool{false, true} {
			resp, body := e.post(chatPath, chatRequest(stream, ""))
			var in struct{ Error struct{ Message string } }
			if err := json.Unmarshal([]byte(body), &in); err != nil || resp.StatusCode != c.status || resp.Header.Get("Content-Encoding") != "" || len(body) > 16<<10 ||
				in.Error.Message == "" || c.message != "" && in.Error.Message != c.message || strings.Contains(body, "/opt") {
				t.Errorf("%s: %d %v %.300s", name, resp.StatusCode, err, body)
			}
		}
	}
	e, s := bursting(t, v1alpha1.SchemaAnthropic, "claude-9", 0)
	s.SetFault(fake.TooLong)
	for _, client := range speakers {
		resp, body := e.post(client.path, client.body)
		if resp.StatusCode != http.StatusBadRequest || resp.Header.Get("Content-Encoding") != "" || !strings.Contains(body, "too long") && !strings.Contains(body, openai.CodeContextLength) {
			t.Errorf("%s: %d %s", client.name, resp.StatusCode, body)
		}
	}
}

// An answer under status 200 may come compressed as well.
func TestCompressedAnswers(t *testing.T) {
	e := start(t, nil).ready()
	e.router.routes(newWorker(t, "w", func(w http.ResponseWriter, r *http.Request) {
		in, _ := io.ReadAll(r.Body)
		kind, pieces := "application/json", []string{whole}
		if bytes.Contains(in, []byte(`"stream":true`)) {
			kind, pieces = "text/event-stream", []string{roleChunk(), textChunk("Hi"), stopChunk, doneEvent}
		}
		w.Header().Set("Content-Type", kind)
		w.Header().Set("Content-Encoding", "gzip")
		z := gzip.NewWriter(w)
		for _, p := range pieces {
			_, _ = io.WriteString(z, p)
			_ = z.Flush()
			_ = http.NewResponseController(w).Flush()
		}
		_ = z.Close()
	}))
	for _, stream := range []bool{false, true} {
		resp, body := e.post(chatPath, chatRequest(stream, ""))
		if resp.StatusCode != http.StatusOK || resp.Header.Get("Content-Encoding") != "" || !strings.Contains(body, `"content":"Hi"`) {
			t.Errorf("%d %v %q", resp.StatusCode, resp.Header, body)
		}
	}
}
