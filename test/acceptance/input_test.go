package acceptance

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
)

// Bad input gets a clear error in OpenAI's form and costs no worker anything.
func TestBadInput(t *testing.T) {
	e := start(t, settings{workers: 1})
	queries := func() float64 { s := e.workers[0].Stats(0); return float64(s.Running + s.Waiting) }
	before := e.workerRequests()
	deep := strings.Repeat("[", 2000) + strings.Repeat("]", 2000)
	chat, text := "/v1/chat/completions", "/v1/completions"
	ok := `"messages":[{"role":"user","content":"x"}]`
	for _, tc := range []struct {
		name, path, body string
		status           int
		code             string
		mention          string
	}{
		{"unknown model", chat, `{"model":"nope",` + ok + `}`, 404, "model_not_found", "nope"},
		{"no model", chat, `{` + ok + `}`, 400, "", "model"},
		{"prompt too long", chat, req{text: words(1, 200_000), max: 1}.body(), 400, "context_length_exceeded", "context length"},
		{"prompt too long, completions", text, fmt.Sprintf(`{"model":%q,"prompt":%q}`, modelName, words(1, 200_000)), 400, "context_length_exceeded", "context length"},
		{"prompt and output too long", chat, req{text: "x", max: 10_000_000}.body(), 400, "context_length_exceeded", ""},
		{"malformed", chat, `{"model":"x",`, 400, "", ""},
		{"not an object", chat, `[1,2]`, 400, "", "object"},
		{"empty", chat, ``, 400, "", ""},
		{"duplicate key", chat, `{"model":"nope","model":"qwen",` + ok + `}`, 400, "", "repeated key at byte 16"},
		{"duplicate nested key", chat, `{"model":"qwen","messages":[{"role":"user","content":"x","content":"y"}]}`, 400, "", "repeated key"},
		{"too deep", chat, `{"model":"qwen",` + ok + `,"x":` + deep + `}`, 400, "", "deep"},
		{"invalid UTF-8", chat, `{"model":"qwen","messages":[{"role":"user","content":"` + "\xff\xfe" + `"}]}`, 400, "", "UTF-8"},
		{"trailing data", chat, `{"model":"qwen",` + ok + `} {}`, 400, "", ""},
		{"wrong type", chat, `{"model":7,` + ok + `}`, 400, "", "model"},
		{"messages missing", chat, `{"model":"qwen"}`, 400, "", "messages"},
		{"stream is no bool", chat, `{"model":"qwen",` + ok + `,"stream":"yes"}`, 400, "", "stream"},
		{"max_tokens below one", chat, `{"model":"qwen",` + ok + `,"max_tokens":-5}`, 400, "", "max_tokens"},
		{"oversize", chat, `{"model":"qwen","messages":[{"role":"user","content":"` + strings.Repeat("x", 17<<20) + `"}]}`, 413, "", ""},
		{"unknown route", "/v1/nothing", `{}`, 404, "", ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			r := e.post(t.Context(), tc.path, tc.body)
			if r.status != tc.status {
				t.Fatalf("got status %d, want %d: %.300s", r.status, tc.status, r.body)
			}
			got := r.errorBody()
			if got.Message == "" || got.Type == "" {
				t.Errorf("not an OpenAI error: %.300s", r.body)
			}
			if tc.code != "" && (got.Code == nil || *got.Code != tc.code) {
				t.Errorf("got code %v, want %s: %.300s", got.Code, tc.code, r.body)
			}
			if !strings.Contains(strings.ToLower(r.body), strings.ToLower(tc.mention)) {
				t.Errorf("message does not mention %q: %.300s", tc.mention, r.body)
			}
			if r.id == "" {
				t.Error("no x-request-id")
			}
		})
	}
	if got := e.workerRequests(); got != before || queries() != 0 {
		t.Errorf("bad input reached the worker: %v requests before, %v after", before, got)
	}
	if log := e.log.String(); strings.Contains(log, "aa bb cc") || strings.Contains(log, strings.Repeat("x", 50)) {
		t.Error("prompt text is in the log")
	}
}

// workerRequests is what the first worker says it has served.
func (e *env) workerRequests() string {
	resp, err := e.client.Get(e.workers[0].URL() + "/metrics")
	if err != nil {
		e.t.Fatal(err)
	}
	defer resp.Body.Close()
	return grep(resp, "vllm:prompt_tokens_total") // grows with every prompt taken in
}

func grep(resp *http.Response, prefix string) string {
	var out []string
	buf := new(strings.Builder)
	b := make([]byte, 64<<10)
	for {
		n, err := resp.Body.Read(b)
		buf.Write(b[:n])
		if err != nil {
			break
		}
	}
	for _, l := range strings.Split(buf.String(), "\n") {
		if strings.HasPrefix(l, prefix) {
			out = append(out, l)
		}
	}
	return strings.Join(out, "\n")
}

// Invented model names make no new time series (llm-d-router 1625).
func TestLabelsAreBounded(t *testing.T) {
	e := start(t, settings{workers: 1})
	for i := range 50 {
		e.chat(req{model: fmt.Sprintf("invented-%d", i), text: "x"})
	}
	if m := e.metrics(); strings.Contains(m, "invented-") {
		t.Error("an invented model name became a label")
	}
}

// A broken file keeps what was there, names file and line, and mending it is
// enough.
func TestBrokenResourceKeepsTheLastGoodCatalog(t *testing.T) {
	e := start(t, settings{workers: 1})
	good := e.workerSet("")
	e.write("fleet.yaml", strings.Replace(good, "  models:", "  modles:", 1))
	e.eventually("the log names file and line", func() bool { return strings.Contains(e.log.String(), "fleet.yaml:5") })
	if r := e.chat(req{text: "still here", max: 1}); r.status != http.StatusOK {
		t.Errorf("with a broken file: got status %d, want 200: %s", r.status, r.body)
	}
	e.write("fleet.yaml", strings.Replace(good, "aliases: [ qwen ]", "aliases: [ renamed ]", 1))
	e.eventually("the new alias is served", func() bool { return e.chat(req{model: "renamed", text: "x", max: 1}).status == http.StatusOK })
	if r := e.chat(req{model: "qwen", text: "x", max: 1}); r.status != http.StatusNotFound {
		t.Errorf("old alias: got status %d, want 404", r.status)
	}
}
