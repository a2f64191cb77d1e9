package ingress_test

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
	"github.com/kinference/kinference/services/ingress"
)

// Who only counts tokens uses up requests and nothing else, is refused like everybody,
// and is in the ledger with no tokens and no costs.
func TestCountsAreRequests(t *testing.T) {
	events, collect := collectUsage(t)
	e := startLimited(t, func(cfg *ingress.Config, c *routerv1.Catalog) {
		collect(cfg, c)
		c.Profiles[0].TokenizerPath = modelDir(t)
	}, perMinute("rpm", requestCount(3)), perMinute("tpm", totalTokens(1)), perMinute("together", atOnce(1)))
	const chat = `{"model":"chat","messages":[{"role":"user","content":"Hello there"}]}`
	for path, body := range map[string]string{countPath: chat, "/tokenize": chat} {
		resp, text := e.post(path, body)
		if resp.StatusCode != http.StatusOK || !strings.Contains(text, `:`) {
			t.Fatalf("%s: %d %s", path, resp.StatusCode, text)
		}
		u := events.event(resp.Header.Get("X-Request-Id"))
		if got := counted(u); got != "0 ? 0 ? ok" || u.GetRoute() != path || u.GetModel() != "chat" || u.GetCost().GetTotal() != "" || u.GetAttempts() != 0 || u.GetWorker() != "" {
			t.Errorf("%s: %s, %v", path, got, u)
		}
		e.limiter.end(1)
	}
	// One that cannot be answered counts too; after three it is over.
	if resp, text := e.post("/tokenize", `{"model":"chat","messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"data:image/png;base64,AAAA"}}]}]}`); resp.StatusCode != http.StatusNotImplemented {
		t.Errorf("a picture: %d %s", resp.StatusCode, text)
	}
	e.limiter.end(1)
	for path, word := range map[string]string{countPath: "rate_limit_error", "/tokenize": "rate_limit"} {
		resp, text := e.post(path, chat)
		if resp.StatusCode != http.StatusTooManyRequests || !strings.Contains(text, word) || resp.Header.Get("Retry-After") == "" {
			t.Errorf("%s: %d %s", path, resp.StatusCode, text)
		}
	}
	if n := e.limiter.level("ns/team/tpm"); n != 0 {
		t.Errorf("%d tokens were charged", n)
	}
	e.limiter.end(2)
	page := e.metrics()
	for _, want := range []string{`kinference_tenant_requests_total{`, `outcome="refused"`, `outcome="ok"`} {
		if !strings.Contains(page, want) {
			t.Errorf("no %s", want)
		}
	}
}

// Who does not read the ids that were asked for does not hold the memory of its
// body for long.
func TestTokensAreRead(t *testing.T) {
	body := `{"model":"chat","prompt":[1234567` + strings.Repeat(",1234567", 1_700_000) + `]}`
	e := start(t, func(c *ingress.Config, _ *routerv1.Catalog) {
		c.WriteTimeout, c.MaxBody, c.MaxBodies = 200*time.Millisecond, int64(len(body))+10, int64(len(body))+10
	}).ready()
	c := e.raw("")
	if err := c.SetReadBuffer(4 << 10); err != nil {
		t.Fatal(err)
	}
	if _, err := fmt.Fprintf(c, "POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s", len(body), body); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(c, make([]byte, len("HTTP/1.1 200"))); err != nil {
		t.Fatal(err)
	}
	deadline := time.After(patience)
	for tick := time.NewTicker(5 * time.Millisecond); ; {
		resp, text := e.post("/tokenize", `{"model":"chat","prompt":[1]}`)
		if resp.StatusCode == http.StatusOK {
			return
		}
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatalf("the body is still in memory: %d %s", resp.StatusCode, text)
		}
	}
}

// Who only counts tokens cannot have a worker fetch what it would not fetch for a chat,
// however the name is written.
func TestCountsFetchNothing(t *testing.T) {
	_, text := ids(40)
	a := &asked{}
	a.render = func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, `{"token_ids":`+text+`}`) }
	e := startAsked(t, a, nil)
	for _, name := range []string{"image_url", `\u0069mage_url`} {
		resp, body := e.post("/tokenize", `{"model":"chat","messages":[{"role":"user","content":[{"`+name+`":{"url":"http://169.254.169.254/x"}}]}]}`)
		if _, _, code := parseError(t, body); resp.StatusCode != http.StatusBadRequest || code != "media_url_not_allowed" {
			t.Errorf("%s: %d %s", name, resp.StatusCode, body)
		}
	}
	if n := a.renders.Load() + a.others.Load(); n != 0 {
		t.Errorf("a worker was asked %d times", n)
	}
}
