package load

import (
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

func serve(t *testing.T, h http.HandlerFunc) (*Client, string) {
	t.Helper()
	s := httptest.NewServer(h)
	c := NewClient()
	t.Cleanup(func() { c.Close(); s.Close() })
	return c, s.URL
}

func TestDo(t *testing.T) {
	const role = `data: {"choices":[{"delta":{"role":"assistant","content":""}}],"usage":null}` + "\n\n"
	const a = `data: {"choices":[{"delta":{"content":" a"}}]}` + "\n\n"
	const b = `data: {"choices":[{"text":" b"}]}` + "\n\n"
	const usage = `data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":4}}}` + "\n\n"
	const done = "data: [DONE]\n\n"
	long := `data: {"choices":[{"delta":{"content":"` + strings.Repeat("x", 20000) + `"}}]}` + "\n\n"
	for _, c := range []struct {
		name, stream string
		status       int
		want         Response
		err          string
	}{
		{name: "chat", stream: role + a + b + usage + done, want: Response{Status: 200, Text: " a b", Events: 2, Prompt: 9, Cached: 4, Output: 2}},
		{name: "comments and no usage", stream: ": ping\n\nevent: x\r\n" + a + done, want: Response{Status: 200, Text: " a", Events: 1, Prompt: -1, Cached: -1, Output: -1}},
		{name: "long event", stream: long + done, want: Response{Status: 200, Text: strings.Repeat("x", 20000), Events: 1, Prompt: -1, Cached: -1, Output: -1}},
		{name: "reasoning", stream: `data: {"choices":[{"delta":{"reasoning":"hm"}}]}` + "\n\n" + done, want: Response{Status: 200, Events: 1, Prompt: -1, Cached: -1, Output: -1}},
		{name: "error event", stream: a + `data: {"error":{"message":"gone"}}` + "\n\n", err: "error event: ", want: Response{Status: 200, Events: 1, Prompt: -1, Cached: -1, Output: -1}},
		{name: "cut", stream: a, err: "without [DONE]", want: Response{Status: 200, Events: 1, Prompt: -1, Cached: -1, Output: -1}},
		{name: "no content", stream: role + done, err: "without content", want: Response{Status: 200, Prompt: -1, Cached: -1, Output: -1}},
		{name: "not JSON", stream: "data: {\n\n", err: "not JSON", want: Response{Status: 200, Prompt: -1, Cached: -1, Output: -1}},
		{name: "status", stream: `{"error":"busy"}`, status: 503, err: `status 503: {"error":"busy"}`, want: Response{Status: 503, Prompt: -1, Cached: -1, Output: -1}},
	} {
		t.Run(c.name, func(t *testing.T) {
			client, url := serve(t, func(w http.ResponseWriter, _ *http.Request) {
				if c.status != 0 {
					w.WriteHeader(c.status)
				}
				io.WriteString(w, c.stream)
			})
			for _, text := range []bool{true, false} {
				first := 0
				got := client.Do(t.Context(), Request{URL: url, Text: text, OnFirst: func() { first++ }})
				if (c.err == "") != (got.Err == nil) || c.err != "" && !strings.Contains(got.Err.Error(), c.err) {
					t.Errorf("error %v, want %q", got.Err, c.err)
				}
				want := c.want
				if !text {
					want.Text = ""
				}
				if diff := cmp.Diff(want, got, cmpopts.IgnoreFields(Response{}, "Err", "TTFT", "E2E")); diff != "" {
					t.Errorf("text %v (-want +got):\n%s", text, diff)
				}
				if got.Events > 0 && (first != 1 || got.TTFT <= 0 || got.TTFT > got.E2E) {
					t.Errorf("first called %d times, TTFT %v, e2e %v", first, got.TTFT, got.E2E)
				}
			}
		})
	}
}

func TestDoKeepsConnections(t *testing.T) {
	var mu sync.Mutex
	addrs := map[string]bool{}
	client, url := serve(t, func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		addrs[r.RemoteAddr] = true
		mu.Unlock()
		(&Fake{Model: "m"}).ServeHTTP(w, r)
	})
	for range 5 {
		if got := client.Do(t.Context(), Request{URL: url + "/v1/chat/completions"}); got.Err != nil {
			t.Fatal(got.Err)
		}
	}
	mu.Lock()
	defer mu.Unlock()
	if len(addrs) != 1 {
		t.Errorf("5 requests in turn used %d connections, want 1", len(addrs))
	}
}

func TestFake(t *testing.T) {
	client, url := serve(t, (&Fake{Model: "m", BlockSize: 16}).ServeHTTP)
	got := client.Do(t.Context(), Request{URL: url + "/v1/chat/completions", Body: Chat("m", []Message{{"user", "hi"}}, 12), Text: true})
	if got.Err != nil || got.Events != 12 || got.Output != 12 {
		t.Errorf("%+v, want 12 events", got)
	}
	for _, path := range []string{"/health", "/v1/models", "/metrics", "/version"} {
		res, err := http.Get(url + path)
		if err != nil || res.StatusCode != 200 {
			t.Errorf("%s: %v, %v", path, res, err)
		}
		res.Body.Close()
	}
}

func TestDoUnreachable(t *testing.T) {
	client, url := serve(t, func(http.ResponseWriter, *http.Request) {})
	if got := client.Do(t.Context(), Request{URL: strings.Replace(url, "http", "nope", 1)}); got.Err == nil {
		t.Error("no error for an unknown scheme")
	}
}

func TestBodies(t *testing.T) {
	for _, data := range [][]byte{Chat("m", []Message{{"user", "hi"}}, 7), Completion("m", "hi", 7)} {
		var got map[string]any
		if err := json.Unmarshal(data, &got); err != nil {
			t.Fatal(err)
		}
		if got["stream"] != true || got["max_tokens"] != 7.0 || got["ignore_eos"] != true || (got["messages"] == nil) == (got["prompt"] == nil) {
			t.Errorf("body %s", data)
		}
	}
}

func FuzzRead(f *testing.F) {
	f.Add([]byte("data: {\"choices\":[{\"text\":\"a\"}]}\n\ndata: [DONE]\n\n"))
	f.Fuzz(func(t *testing.T, stream []byte) {
		client, url := serve(t, func(w http.ResponseWriter, _ *http.Request) { w.Write(stream) })
		client.Do(t.Context(), Request{URL: url, Text: true})
	})
}
