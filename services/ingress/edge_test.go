package ingress_test

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kinference/kinference/internal/openai"
	"github.com/kinference/kinference/internal/rpc"
	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
	"github.com/kinference/kinference/services/ingress"
)

// raw sends bytes on a connection of its own.
func (e *env) raw(text string) *net.TCPConn {
	e.t.Helper()
	c, err := net.Dial("tcp", strings.TrimPrefix(e.url, "http://"))
	if err != nil {
		e.t.Fatal(err)
	}
	e.t.Cleanup(func() { c.Close() })
	if _, err := io.WriteString(c, text); err != nil {
		e.t.Fatal(err)
	}
	return c.(*net.TCPConn)
}

// A first event that is too long to hold (return_token_ids puts the prompt's
// ids in it) opens the stream, but is no first token.
func TestLongRoleChunk(t *testing.T) {
	e := start(t, nil).ready()
	role := strings.Replace(roleChunk(), `"choices"`, `"prompt_token_ids":[1`+strings.Repeat(",100000", 20000)+`],"choices"`, 1)
	e.router.routes(newWorker(t, "w", answers(role, textChunk("a"), textChunk("b"), usageChunk, doneEvent)))
	resp, body := e.post(chatPath, chatRequest(true, ""))
	if want := renamed(role + textChunk("a") + textChunk("b") + doneEvent); body != want {
		t.Errorf("got %d bytes, want %d", len(body), len(want))
	}
	if _, words := e.router.done(resp.Header.Get("X-Request-Id")); strings.Join(words, ", ") != "first token, ok" {
		t.Errorf("reported %v", words)
	}
	if !strings.Contains(e.metrics(), "time_to_first_token") {
		t.Error("no time to first token")
	}
}

// What is too large from one worker is too large from all: it is not
// generated again.
func TestAnswerTooLarge(t *testing.T) {
	e := start(t, func(c *ingress.Config, _ *routerv1.Catalog) { c.MaxAnswer, c.MaxEvent = 1000, 1000 }).ready()
	long := strings.Repeat("x", 2000)
	for stream, h := range map[bool]http.HandlerFunc{
		false: refuses(200, strings.Replace(whole, "Hi", long, 1)),
		true:  answers(roleChunk(), textChunk(long), doneEvent),
	} {
		e.router.routes(newWorker(t, "w", h), newWorker(t, "other", func(http.ResponseWriter, *http.Request) { t.Error("another worker was asked") }))
		resp, body := e.post(chatPath, chatRequest(stream, ""))
		if _, _, code := parseError(t, body); resp.StatusCode != 502 || code != "upstream_error" {
			t.Errorf("got %d %s", resp.StatusCode, body)
		}
	}
}

// A worker that lacks the model that the catalog has for it is at fault, not
// the request; the client does not get to know the engine's names.
func TestWorkerLacksModel(t *testing.T) {
	e := start(t, nil).ready()
	lacking := newWorker(t, "lacking", refuses(404, "{\"error\":{\"message\":\"The model `base-model` does not exist.\",\"type\":\"NotFoundError\",\"param\":\"model\",\"code\":404}}"))
	e.router.routes(lacking, newWorker(t, "good", refuses(200, whole)))
	if resp, body := e.post(chatPath, chatRequest(false, "")); resp.StatusCode != 200 {
		t.Errorf("got %d %s", resp.StatusCode, body)
	}
	e.router.routes(lacking)
	if resp, body := e.post(chatPath, chatRequest(false, "")); resp.StatusCode != 502 || strings.Contains(body, "base-model") {
		t.Errorf("got %d %s", resp.StatusCode, body)
	}
}

// A request that brings down whoever gets it does not go round the fleet.
func TestPoison(t *testing.T) {
	e := start(t, nil).ready()
	var hit atomic.Int32
	workers := []*worker{{name: "gone", url: "http://127.0.0.1:1", model: "base-model"}, newWorker(t, "busy", refuses(503, "{}"))}
	for i := range 6 {
		workers = append(workers, newWorker(t, fmt.Sprint("w", i), func(w http.ResponseWriter, r *http.Request) {
			hit.Add(1)
			closes()(w, r)
		}))
	}
	e.router.routes(workers...)
	resp, body := e.post(chatPath, chatRequest(true, ""))
	if _, _, code := parseError(t, body); resp.StatusCode != 502 || code != "upstream_error" {
		t.Errorf("got %d %s", resp.StatusCode, body)
	}
	if n := hit.Load(); n != 3 {
		t.Errorf("%d workers were brought down", n)
	}
}

// Two of the three may be asked beside each other.
func TestPoisonBeside(t *testing.T) {
	e := start(t, nil).ready()
	var hit atomic.Int32
	two := make(chan struct{})
	var endpoints []*routerv1.Endpoint
	for i := range 6 {
		endpoints = append(endpoints, newWorker(t, fmt.Sprint("w", i), func(w http.ResponseWriter, r *http.Request) {
			_, _ = io.Copy(io.Discard, r.Body)
			switch hit.Add(1) {
			case 1:
				<-two
			case 2:
				close(two)
			}
			closes()(w, r)
		}).endpoint())
	}
	hedges(e, time.Millisecond, 6, endpoints...)
	if resp, body := e.post(chatPath, chatRequest(true, "")); resp.StatusCode != 502 {
		t.Errorf("got %d %s", resp.StatusCode, body)
	}
	if n := hit.Load(); n != 3 {
		t.Errorf("%d workers were brought down", n)
	}
}

// Bodies of unknown length that do not come take no memory, so they do not
// keep others out.
func TestBodyMemoryIsWhatCame(t *testing.T) {
	e := start(t, func(c *ingress.Config, _ *routerv1.Catalog) { c.MaxBody, c.MaxBodies = 1000, 1000 }).ready()
	e.router.routes(newWorker(t, "w", refuses(200, whole)))
	const head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\n"
	for _, length := range []string{"Transfer-Encoding: chunked\r\n\r\n", "Content-Length: 900\r\n\r\n"} {
		c := e.raw(head + length)
		// It is being read when the 100 comes.
		if line, err := bufio.NewReader(c).ReadString('\n'); err != nil || !strings.HasPrefix(line, "HTTP/1.1 100") {
			t.Fatalf("got %q, %v", line, err)
		}
	}
	if resp, body := e.post(chatPath, chatRequest(false, "")); resp.StatusCode != 200 {
		t.Errorf("got %d %s", resp.StatusCode, body)
	}
}

// A client that closes its side only, before or after its request is whole,
// does not get an empty 200.
func TestHalfClosed(t *testing.T) {
	e := start(t, nil).ready()
	h, begun, _ := hang()
	e.router.routes(newWorker(t, "w", h))
	body := chatRequest(false, "")
	for cut, length := range map[bool]int{true: len(body) + 1, false: len(body)} {
		c := e.raw(fmt.Sprintf("POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s", length, body))
		if !cut {
			await(t, "the worker", begun)
		}
		if err := c.CloseWrite(); err != nil {
			t.Fatal(err)
		}
		answer, _ := io.ReadAll(c)
		if !strings.HasPrefix(string(answer), "HTTP/1.1 4") {
			t.Errorf("got %q", answer)
		}
	}
}

// A request that is still waiting for the router when the time for draining
// is over is told to come again.
func TestDrainWhileRouting(t *testing.T) {
	e := start(t, nil).ready()
	begun, release := make(chan struct{}), make(chan struct{})
	e.router.set(func(*routerv1.RouteRequest) (*routerv1.RouteResponse, error) {
		close(begun)
		<-release
		return nil, rpc.Error(13, "too late", 0)
	})
	t.Cleanup(func() { close(release) })
	type answer struct {
		status int
		err    error
	}
	got := make(chan answer, 1)
	go func() {
		resp, err := e.begin(context.Background(), chatPath, chatRequest(true, ""))
		if err != nil {
			got <- answer{0, err}
			return
		}
		resp.Body.Close()
		got <- answer{resp.StatusCode, nil}
	}()
	await(t, "the router to be asked", begun)
	e.stop()
	if a := <-got; a.status != 503 {
		t.Errorf("got %d, %v", a.status, a.err)
	}
}

// What changes the prompt in a way that only the engine knows is not taken
// for the prompt as it stands.
func TestPromptMadeByEngine(t *testing.T) {
	dir := modelDir(t)
	e := start(t, func(_ *ingress.Config, c *routerv1.Catalog) {
		c.Profiles[0].TokenizerPath, c.Profiles[0].PassTokenIds, c.Profiles[0].MaxModelLen = dir, true, 100
	}).ready()
	bodies := make(chan string, 1)
	e.router.routes(newWorker(t, "w", func(w http.ResponseWriter, r *http.Request) {
		b, _ := io.ReadAll(r.Body)
		bodies <- string(b)
		refuses(200, whole)(w, r)
	}))
	long := `"` + strings.Repeat("one two three ", 200) + `"`
	for _, tt := range []struct{ name, path, body string }{
		{"cut", chatPath, `{"model":"chat","messages":[{"role":"user","content":` + long + `}],"truncate_prompt_tokens":50}`},
		{"cut text", textPath, `{"model":"chat","prompt":` + long + `,"truncate_prompt_tokens":-1}`},
		{"cut ids", textPath, `{"model":"chat","prompt":[1` + strings.Repeat(",1", 200) + `],"truncate_prompt_tokens":50}`},
		{"own template", chatPath, `{"model":"chat","messages":[{"role":"user","content":"x"}],"chat_template":"{{ 1 }}"}`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			resp, body := e.post(tt.path, tt.body)
			if resp.StatusCode != 200 {
				t.Fatalf("got %d %s", resp.StatusCode, body)
			}
			if p := e.router.sent()[0]; !p.GetApproximate() || p.GetTokens() == 0 {
				t.Errorf("routed %v", p)
			}
			if strings.Contains(<-bodies, "prompt_token_ids") {
				t.Error("the worker got token ids")
			}
		})
	}
	// Null is as good as absent, and special tokens can be asked for in a chat.
	for more, want := range map[string]bool{`,"truncate_prompt_tokens":null,"chat_template":null`: false, `,"add_special_tokens":true`: false} {
		e.post(chatPath, chatRequest(false, more))
		<-bodies
		if got := e.router.sent()[0].GetApproximate(); got != want {
			t.Errorf("%s: approximate %v", more, got)
		}
	}
}

// There must be room for one token of output.
func TestPromptFillsContext(t *testing.T) {
	e := start(t, func(_ *ingress.Config, c *routerv1.Catalog) { c.Profiles[0].MaxModelLen = 100 }).ready()
	e.router.routes(newWorker(t, "w", refuses(200, whole)))
	for n, status := range map[int]int{99: 200, 100: 400} {
		resp, body := e.post(textPath, `{"model":"chat","prompt":[1`+strings.Repeat(",1", n-1)+`]}`)
		if resp.StatusCode != status || status == 400 && !strings.Contains(body, openai.CodeContextLength) {
			t.Errorf("%d tokens: got %d %s", n, resp.StatusCode, body)
		}
	}
}

// Pictures in a request count as a few tokens, not as their text, but tell
// requests apart.
func TestApproximateMedia(t *testing.T) {
	e := start(t, nil).ready()
	e.router.routes(newWorker(t, "w", refuses(200, whole)))
	ask := func(picture string) *routerv1.Prompt {
		e.post(chatPath, `{"model":"chat","messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"data:image/png;base64,`+picture+`"}},`+
			`{"type":"text","text":"`+strings.Repeat("what is this? ", 20)+`"}]}]}`)
		return e.router.sent()[0]
	}
	a, again, b := ask(strings.Repeat("iVBORw0K", 100_000)), ask(strings.Repeat("iVBORw0K", 100_000)), ask(strings.Repeat("iVBORw0J", 100_000))
	if !a.GetApproximate() || a.GetTokens() > 2000 {
		t.Errorf("%d tokens", a.GetTokens())
	}
	if !slices.Equal(a.GetBlockHashes(), again.GetBlockHashes()) || a.GetBlockHashes()[len(a.GetBlockHashes())-1] == b.GetBlockHashes()[len(b.GetBlockHashes())-1] {
		t.Error("the same picture has other hashes, or another one the same")
	}
}

// Workers are not asked to render pictures: it takes them long, and they would
// do it twice. One slow answer does not put an endpoint out of use.
func TestAskingIsForgiving(t *testing.T) {
	list, text := ids(40)
	var stuck atomic.Bool
	a := &asked{}
	a.render = func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		if stuck.Load() {
			<-r.Context().Done()
			return
		}
		_, _ = io.WriteString(w, `{"token_ids":`+text+`}`)
	}
	e := startAsked(t, a, func(c *ingress.Config) { c.PromptTimeout, c.PromptRetry = time.Second, time.Hour })
	e.post(chatPath, `{"model":"chat","messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"data:image/png;base64,AAAA"}}]}]}`)
	if n := a.renders.Load() + a.others.Load(); n != 0 || !e.router.sent()[0].GetApproximate() {
		t.Errorf("%d questions for a picture", n)
	}
	stuck.Store(true)
	e.post(chatPath, chatRequest(false, ""))
	if !e.router.sent()[0].GetApproximate() {
		t.Error("exact without an answer")
	}
	stuck.Store(false)
	e.post(chatPath, chatRequest(false, ""))
	if p := e.router.sent()[0]; p.GetApproximate() || int(p.GetTokens()) != len(list) {
		t.Errorf("after one slow answer: %v", p)
	}
}

// Whole JSON in place of a stream would look like an empty one to SDKs.
func TestNoStream(t *testing.T) {
	e := start(t, nil).ready()
	e.router.routes(newWorker(t, "bad", refuses(200, whole)), newWorker(t, "good", answers(textChunk("a"), doneEvent)))
	resp, body := e.post(chatPath, chatRequest(true, ""))
	if want := renamed(textChunk("a") + doneEvent); body != want {
		t.Errorf("got %s", body)
	}
	if _, words := e.router.done(resp.Header.Get("X-Request-Id")); strings.Join(words, ", ") != "moved to good after status, first token, ok" {
		t.Errorf("reported %v", words)
	}
}

// Credentials of whatever a client's platform calls them stay here.
func TestCredentialHeaders(t *testing.T) {
	e := start(t, nil).ready()
	got := make(chan http.Header, 1)
	e.router.routes(newWorker(t, "w", func(w http.ResponseWriter, r *http.Request) {
		got <- r.Header
		w.Header().Set("Alt-Svc", `h2="elsewhere:443"`)
		w.Header().Set("X-Ratelimit-Remaining-Tokens", "5")
		refuses(200, whole)(w, r)
	}))
	secret := []string{
		"X-Goog-Api-Key", "Ocp-Apim-Subscription-Key", "X-Amz-Security-Token", "X-Auth-Request-Access-Token", "X-Goog-Iap-Jwt-Assertion", "X-Amzn-Oidc-Data",
		"X-My-Secret", "X-Apikey", "X-Authenticated-User", "X-Client-Cert", "Cf-Connecting-Ip", "True-Client-Ip",
	}
	header := []string{"X-Session-Id", "s", "User-Agent", "u"}
	for _, name := range secret {
		header = append(header, name, "x")
	}
	resp, _ := e.post(chatPath, chatRequest(false, ""), header...)
	h := <-got
	for _, name := range secret {
		if h.Get(name) != "" {
			t.Errorf("the worker got %s", name)
		}
	}
	if h.Get("X-Session-Id") != "s" || h.Get("User-Agent") != "u" {
		t.Errorf("the worker got %v", h)
	}
	// What is left of our account with a provider is nobody's business, and no limit
	// of the client's.
	if resp.Header.Get("Alt-Svc") != "" || resp.Header.Get("X-Ratelimit-Remaining-Tokens") != "" {
		t.Errorf("the client got %v", resp.Header)
	}
}

// Nothing follows [DONE], and the client does not wait for the worker's end.
func TestAfterDone(t *testing.T) {
	e := start(t, nil).ready()
	left := make(chan struct{})
	e.router.routes(newWorker(t, "w", func(w http.ResponseWriter, r *http.Request) {
		answers(textChunk("a")+doneEvent+textChunk("late"), engineError)(w, r)
		<-r.Context().Done()
		close(left)
	}))
	resp, body := e.post(chatPath, chatRequest(true, ""))
	if want := renamed(textChunk("a") + doneEvent); body != want {
		t.Errorf("got %s", body)
	}
	if done, words := e.router.done(resp.Header.Get("X-Request-Id")); strings.Join(words, ", ") != "first token, ok" || done.GetOutputTokens() != 1 {
		t.Errorf("reported %v, %v", words, done)
	}
	await(t, "the worker to be left", left)
}

// A body that does not come holds no connection, whatever it was meant for.
func TestRefusedBodyInTime(t *testing.T) {
	e := start(t, func(c *ingress.Config, _ *routerv1.Catalog) { c.BodyTimeout = 50 * time.Millisecond }).ready()
	for _, line := range []string{"POST /nothing", "PUT /v1/chat/completions", "POST /v1/models", "GET /v1/models"} {
		c := e.raw(line + " HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
		_ = c.SetReadDeadline(time.Now().Add(patience))
		if answer, err := io.ReadAll(c); err != nil {
			t.Errorf("%s: got %q, %v", line, answer, err)
		}
	}
}

// An engine may put usage on every chunk; a client that did not ask for it
// sees none, and it counts all the same.
func TestUsageOnEachChunkHidden(t *testing.T) {
	e := start(t, nil).ready()
	with := func(text string, n int) string {
		return strings.Replace(textChunk(text), `,"choices"`, fmt.Sprintf(`,"usage":{"prompt_tokens":12,"completion_tokens":%d},"choices"`, n), 1)
	}
	e.router.routes(newWorker(t, "w", answers(with("", 0), with("a", 1), with("b", 2), usageChunk, doneEvent)))
	resp, body := e.post(chatPath, chatRequest(true, ""))
	if want := renamed(textChunk("") + textChunk("a") + textChunk("b") + doneEvent); body != want {
		t.Errorf("got %s", body)
	}
	if done, _ := e.router.done(resp.Header.Get("X-Request-Id")); done.GetOutputTokens() != 2 || done.GetCachedTokens() != 8 {
		t.Errorf("reported %v", done)
	}
}
