package ingress_test

import (
	"net/http"
	"strings"
	"testing"

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
