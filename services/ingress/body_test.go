package ingress_test

import (
	"bytes"
	"compress/gzip"
	"io"
	"net/http"
	"strings"
	"testing"

	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
	"github.com/kinference/kinference/services/ingress"
)

func zip(t *testing.T, text string) []byte {
	t.Helper()
	var b bytes.Buffer
	z := gzip.NewWriter(&b)
	if _, err := io.WriteString(z, text); err != nil {
		t.Fatal(err)
	}
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// Compressed bodies are taken within the limits of what they become; workers get
// them as they were.
func TestCompressedBody(t *testing.T) {
	e := start(t, func(c *ingress.Config, _ *routerv1.Catalog) { c.MaxBody = 1 << 20 }).ready()
	got := make(chan string, 1)
	e.router.routes(newWorker(t, "w", func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		got <- r.Header.Get("Content-Encoding") + string(body)
		refuses(200, whole)(w, r)
	}))
	words := strings.Repeat("all of these words are as good as any others; ", 2000)
	good := chatRequest(false, `,"x":"`+words+`"`)
	resp, text := e.post(chatPath, string(zip(t, good)), "Content-Encoding", "gzip")
	if resp.StatusCode != http.StatusOK {
		t.Fatalf("got %d %s", resp.StatusCode, text)
	}
	if sent := <-got; !strings.HasPrefix(sent, `{"model":"base-model"`) || !strings.Contains(sent, words) {
		t.Errorf("the worker got %.80s", sent)
	}
	for _, tt := range []struct {
		name, code string
		body       []byte
		status     int
	}{
		{"longer than allowed when it is whole", "request_too_large", zip(t, `{"x":"`+words+strings.Repeat("0123456789", 100_000)+`"}`), 413},
		{"grows out of proportion", "request_too_large", zip(t, `{"x":"`+strings.Repeat("x", 900_000)+`"}`), 413},
		{"cut", "", zip(t, good)[:100], 400},
		{"empty", "invalid_json", nil, 400},
	} {
		resp, text := e.post(chatPath, string(tt.body), "Content-Encoding", "gzip")
		if _, _, code := parseError(t, text); resp.StatusCode != tt.status || code != tt.code {
			t.Errorf("%s: got %d %s", tt.name, resp.StatusCode, text)
		}
	}
}

// A body of tiny pieces, which take a hundred times their bytes once they are apart, is
// refused in every dialect before they are.
func TestManyMembers(t *testing.T) {
	e := start(t, nil).ready()
	e.router.routes(newWorker(t, "w", refuses(200, whole)))
	for n, status := range map[int]int{1000: 200, 100_000: 400} {
		pieces := func(piece string) string { return strings.TrimSuffix(strings.Repeat(piece+",", n), ",") }
		for path, body := range map[string]string{
			chatPath:      `{"model":"sql","messages":[{"role":"user","content":[` + pieces(`{"type":"text","text":"a"}`) + `]}]}`,
			textPath:      `{"model":"sql","prompt":"a","x":{"y":[` + pieces(`[[],[]]`) + `]}}`,
			messagesPath:  `{"model":"sql","max_tokens":9,"messages":[{"role":"user","content":[` + pieces(`{"type":"text","text":"a"}`) + `]}]}`,
			responsesPath: `{"model":"sql","input":[{"role":"user","content":[` + pieces(`{"type":"input_text","text":"a"}`) + `]}]}`,
		} {
			if resp, text := e.post(path, body); resp.StatusCode != status || status == 400 && !strings.Contains(text, "too many members and elements") {
				t.Errorf("%s, %d pieces: %d %.200s", path, n, resp.StatusCode, text)
			}
		}
	}
}
