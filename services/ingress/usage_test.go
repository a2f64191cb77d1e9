package ingress_test

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kinference/kinference/internal/bus"
	"github.com/kinference/kinference/internal/daemon"
	"github.com/kinference/kinference/internal/testenv"
	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
	usagev1 "github.com/kinference/kinference/proto/gen/kinference/usage/v1"
	"github.com/kinference/kinference/services/ingress"
)

// usageEvents collects the events of an ingress from a real stream.
type usageEvents struct {
	t    testing.TB
	mu   sync.Mutex
	byID map[string][]*usagev1.Usage // by request id
}

// collectUsage makes an ingress publish events, and collects them.
func collectUsage(t testing.TB) (u *usageEvents, change func(*ingress.Config, *routerv1.Catalog)) {
	t.Helper()
	url := testenv.NATS(t)
	conn, err := bus.Connect(t.Context(), url, "test")
	if err != nil {
		t.Fatal(err)
	}
	u = &usageEvents{t: t, byID: map[string][]*usagev1.Usage{}}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = conn.ConsumeUsage(ctx, bus.UsageSettings{}, "test", func(_ context.Context, batch []bus.UsageDelivery) error {
			u.mu.Lock()
			defer u.mu.Unlock()
			for _, d := range batch {
				e, err := bus.DecodeUsage(d.Data)
				if err != nil {
					t.Errorf("decode: %v", err)
					continue
				}
				u.byID[e.GetRequestId()] = append(u.byID[e.GetRequestId()], e)
			}
			return nil
		}, nil)
	}()
	t.Cleanup(func() { cancel(); <-done; conn.Close() })
	dir := t.TempDir()
	return u, func(c *ingress.Config, _ *routerv1.Catalog) { c.NATSURL, c.UsageDir = url, dir }
}

// event waits for the one event of a request.
func (u *usageEvents) event(id string) *usagev1.Usage {
	u.t.Helper()
	deadline, tick := time.After(patience), time.NewTicker(2*time.Millisecond)
	defer tick.Stop()
	for {
		u.mu.Lock()
		list := u.byID[id]
		u.mu.Unlock()
		if len(list) > 1 {
			u.t.Fatalf("%d events of %s", len(list), id)
		}
		if len(list) == 1 {
			return list[0]
		}
		select {
		case <-tick.C:
		case <-deadline:
			u.t.Fatalf("no event of %s", id)
		}
	}
}

// counted is what an event says about tokens, in words: ? for unknown, ~ for
// estimated.
func counted(u *usagev1.Usage) string {
	t := u.GetTokens()
	word := func(n *uint32, estimated bool) string {
		switch {
		case n == nil:
			return "?"
		case estimated:
			return fmt.Sprintf("~%d", *n)
		}
		return fmt.Sprint(*n)
	}
	return fmt.Sprintf("%s %s %s %s %s", word(t.Input, t.GetInputEstimated()), word(t.CachedInput, t.GetCachedInputEstimated()),
		word(t.Output, t.GetOutputEstimated()), word(t.Reasoning, t.GetReasoningEstimated()), strings.ToLower(strings.TrimPrefix(u.GetOutcome().String(), "OUTCOME_")))
}

// with adds usage to a chunk of content.
func with(chunk, usage string) string {
	return strings.TrimSuffix(chunk, "}\n\n") + `,"usage":` + usage + "}\n\n"
}

// running is what vLLM puts on each chunk.
func running(prompt, output int) string {
	return fmt.Sprintf(`{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d}`, prompt, prompt+output, output)
}

// of is a chunk of one choice.
func of(index int, text, usage string) string {
	return strings.Replace(with(textChunk(text), usage), `"index":0`, fmt.Sprintf(`"index":%d`, index), 1)
}

const onlyUsage = `data: {"id":"chatcmpl-1","model":"base-model","choices":[],"usage":%s}` + "\n\n"

// Each way in which backends report usage has the right numbers, in words: input,
// cached, output, reasoning, outcome. The client gets the content, and of the
// usage what it asked for.
func TestUsageOfStreams(t *testing.T) {
	events, change := collectUsage(t)
	e := start(t, change).ready()
	content := textChunk("a") + textChunk("b") + stopChunk
	engineError := `data: {"error":{"message":"x","type":"InternalServerError","code":500}}` + "\n\n"
	for _, tt := range []struct {
		name, stream, want string
		shown              string // what the client gets; empty: content and [DONE]
		more               string
	}{
		{name: "usage in its own event", stream: content + usageChunk + doneEvent, want: "12 8 2 ? ok"},
		{name: "asked for", stream: content + usageChunk + doneEvent, want: "12 8 2 ? ok", shown: content + usageChunk + doneEvent, more: `,"stream_options":{"include_usage":true}`},
		{name: "running, then all", stream: with(textChunk("a"), running(12, 1)) + with(textChunk("b"), running(12, 2)) + with(stopChunk, running(12, 3)) + usageChunk + doneEvent, want: "12 8 2 ? ok"},
		{name: "running, asked for at the end", stream: with(textChunk("a"), running(12, 1)) + with(textChunk("b"), running(12, 2)) + stopChunk + usageChunk + doneEvent, want: "12 8 2 ? ok",
			shown: content + usageChunk + doneEvent, more: `,"stream_options":{"include_usage":true}`},
		{name: "running, asked for", stream: with(textChunk("a"), running(12, 1)) + usageChunk + doneEvent, want: "12 8 2 ? ok",
			shown: with(textChunk("a"), running(12, 1)) + usageChunk + doneEvent, more: `,"stream_options":{"include_usage":true,"continuous_usage_stats":true}`},
		{name: "running only", stream: with(textChunk("a"), running(12, 1)) + with(textChunk("b"), running(12, 2)) + with(stopChunk, running(12, 2)) + doneEvent, want: "12 0 2 ? ok"},
		{name: "running only, asked for at the end", stream: with(textChunk("a"), running(12, 1)) + with(stopChunk, running(12, 2)) + doneEvent, want: "12 0 2 ? ok",
			shown: textChunk("a") + stopChunk + strings.Replace(with(stopChunk, running(12, 2)), `[{"index":0,"delta":{},"finish_reason":"stop"}]`, "[]", 1) + doneEvent, more: `,"stream_options":{"include_usage":true}`},
		{name: "several tokens a chunk", stream: with(textChunk("a"), running(12, 4)) + with(textChunk("b"), running(12, 9)) + stopChunk + doneEvent, want: "12 0 9 ? ok"},
		{name: "on the last content", stream: textChunk("a") + textChunk("b") + with(stopChunk, `{"prompt_tokens":7,"completion_tokens":3}`) + doneEvent, want: "7 0 3 ? ok"},
		{name: "first of all", stream: fmt.Sprintf(onlyUsage, `{"prompt_tokens":7,"completion_tokens":0}`) + content + fmt.Sprintf(onlyUsage, `{"completion_tokens":3}`) + doneEvent, want: "7 0 3 ? ok"},
		{name: "usage before other members", stream: strings.Replace(content, `"id"`, `"usage":{"prompt_tokens":5,"completion_tokens":1},"id"`, 1) + doneEvent, want: "5 0 1 ? ok"},
		{name: "explicit zeros", stream: content + fmt.Sprintf(onlyUsage, `{"prompt_tokens":0,"completion_tokens":0,"prompt_tokens_details":{"cached_tokens":0},"completion_tokens_details":{"reasoning_tokens":0}}`) + doneEvent, want: "0 0 0 0 ok"},
		{name: "null on the others", stream: with(textChunk("a"), "null") + with(textChunk("b"), "null") + usageChunk + doneEvent, want: "12 8 2 ? ok", shown: with(textChunk("a"), "null") + with(textChunk("b"), "null") + doneEvent},
		{name: "details are null", stream: content + fmt.Sprintf(onlyUsage, `{"prompt_tokens":12,"completion_tokens":2,"prompt_tokens_details":null,"completion_tokens_details":null}`) + doneEvent, want: "12 0 2 ? ok"},
		{name: "reasoning", stream: content + fmt.Sprintf(onlyUsage, `{"prompt_tokens":12,"completion_tokens":40,"completion_tokens_details":{"reasoning_tokens":33}}`) + doneEvent, want: "12 0 40 33 ok"},
		{name: "a later zero does not undo", stream: with(textChunk("a"), running(12, 1)) + with(textChunk("b"), running(0, 2)) + stopChunk + doneEvent, want: "12 0 2 ? ok"},
		{name: "no numbers", stream: content + fmt.Sprintf(onlyUsage, `{"prompt_tokens":"12","completion_tokens":-3,"prompt_tokens_details":[8]}`) + doneEvent, want: "~10 ~0 ~3 ? ok"},
		{name: "far too large", stream: content + fmt.Sprintf(onlyUsage, `{"prompt_tokens":1e30,"completion_tokens":99999999999999999999}`) + doneEvent, want: "~10 ~0 ~3 ? ok"},
		{name: "none", stream: content + doneEvent, want: "~10 ~0 ~3 ? ok"},
		{name: "two choices", more: `,"n":2`, stream: of(0, "a", running(12, 1)) + of(1, "b", running(12, 1)) + of(1, "c", running(12, 2)) + of(0, "d", running(12, 2)) + of(1, "e", running(12, 3)) + doneEvent, want: "12 0 5 ? ok",
			shown: of(0, "a", "") + of(1, "b", "") + of(1, "c", "") + of(0, "d", "") + of(1, "e", "") + doneEvent},
		{name: "the engine fails", stream: with(textChunk("a"), running(12, 1)) + with(textChunk("b"), running(12, 2)) + engineError + doneEvent, want: "12 ~0 2 ? failed", shown: "-"},
		{name: "cut off", stream: with(textChunk("a"), running(12, 5)), want: "12 ~0 ~5 ? failed", shown: "-"},
		{name: "cut off without usage", stream: textChunk("a") + textChunk("b"), want: "~10 ~0 ~2 ? failed", shown: "-"},
	} {
		shown := tt.shown
		if shown == "" {
			shown = textChunk("a") + textChunk("b") + stopChunk + doneEvent
			if !strings.Contains(tt.stream, `"finish_reason":"stop"`) {
				shown = strings.ReplaceAll(shown, stopChunk, "")
			}
		}
		shown = renamed(strings.ReplaceAll(shown, `,"usage":}`, "}"))
		for framing, pieces := range map[string][]string{
			"events":                  strings.SplitAfter(tt.stream, "\n\n"),
			"one piece":               {tt.stream},
			"CRLF":                    {strings.ReplaceAll(tt.stream, "\n", "\r\n")},
			"no space":                {strings.ReplaceAll(tt.stream, "data: ", "data:")},
			"byte by byte":            strings.Split(tt.stream, ""),
			"no space, CR, in halves": halves(strings.ReplaceAll(strings.ReplaceAll(tt.stream, "data: ", "data:"), "\n", "\r")),
		} {
			t.Run(tt.name+"/"+framing, func(t *testing.T) {
				e.router.routes(newWorker(t, "w", answers(pieces...)))
				resp, body := e.post(chatPath, chatRequest(true, tt.more))
				u := events.event(resp.Header.Get("X-Request-Id"))
				want := tt.want
				if strings.HasPrefix(want, "~10") { // our own count, which is a guess here
					want = strings.Replace(want, "~10", fmt.Sprintf("~%d", u.GetTokens().GetInput()), 1)
				}
				if got := counted(u); loose(got) != loose(want) || u.GetTokens().GetInput() > 100 {
					t.Errorf("got %q, want %q", got, want)
				}
				if got := data(body); shown != "-" && got != data(shown) {
					t.Errorf("the client got\n%s\nwant\n%s", got, data(shown))
				}
			})
		}
	}
}

// loose makes one of an unreported cache of 0, estimated or known by other
// answers of the same backend.
func loose(s string) string { return strings.ReplaceAll(s, " ~0 ", " 0 ") }

func halves(s string) []string { return []string{s[:len(s)/2], s[len(s)/2:]} }

// data is the data of a stream's events, one a line.
func data(stream string) string {
	var b strings.Builder
	for line := range strings.Lines(strings.NewReplacer("\r\n", "\n", "\r", "\n").Replace(stream)) {
		if d, ok := strings.CutPrefix(line, "data:"); ok {
			b.WriteString(strings.TrimSpace(d) + "\n")
		}
	}
	return b.String()
}

func TestUsageOfWholeAnswers(t *testing.T) {
	events, change := collectUsage(t)
	e := start(t, change).ready()
	for name, tt := range map[string]struct{ usage, want string }{
		"reported":  {`{"prompt_tokens":12,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":8},"completion_tokens_details":{"reasoning_tokens":1}}`, "12 8 2 1 ok"},
		"zeros":     {`{"prompt_tokens":0,"completion_tokens":0}`, "0 ~0 0 ? ok"},
		"null":      {`null`, "~ ~0 ? ? ok"},
		"no output": {`{"prompt_tokens":12}`, "12 ~0 ? ? ok"},
	} {
		t.Run(name, func(t *testing.T) {
			body := whole[:strings.Index(whole, `,"usage"`)] + `,"usage":` + tt.usage + "}"
			e.router.routes(newWorker(t, "w", func(w http.ResponseWriter, r *http.Request) {
				_, _ = io.Copy(io.Discard, r.Body)
				w.Header().Set("Content-Type", "application/json")
				_, _ = io.WriteString(w, body)
			}))
			resp, got := e.post(chatPath, chatRequest(false, ""))
			if got != renamed(body) {
				t.Errorf("the client got %s", got)
			}
			u := events.event(resp.Header.Get("X-Request-Id"))
			want := tt.want
			if strings.HasPrefix(want, "~ ") && u.GetTokens().GetInput() > 0 {
				want = fmt.Sprintf("~%d%s", u.GetTokens().GetInput(), want[1:])
			}
			if got := counted(u); loose(got) != loose(want) {
				t.Errorf("got %q, want %q", got, want)
			}
			if u.Ttft != nil || u.Tpot != nil || u.GetE2E() <= 0 || u.GetStream() || u.GetAttempts() != 1 || u.GetWorkerSet() != "ns/set" || u.GetWorker() != "w" ||
				u.GetModel() != "chat" || u.GetServedModel() != "base-model" || u.GetRoute() != chatPath || u.GetStatus() != 200 {
				t.Errorf("got %v", u)
			}
		})
	}
}

// A client that leaves has used what was generated until then.
func TestUsageOfClientsThatLeave(t *testing.T) {
	events, change := collectUsage(t)
	e := start(t, change).ready()
	for name, tt := range map[string]struct {
		pieces []string
		want   string
	}{
		"in the middle":     {[]string{roleChunk(), with(textChunk("a"), running(12, 1)), with(textChunk("b"), running(12, 7))}, "12 ~0 ~7 ? canceled"},
		"without usage":     {[]string{roleChunk(), textChunk("a"), textChunk("b")}, "~ ~0 ~2 ? canceled"},
		"before the answer": {nil, "~ ~0 ~0 ? canceled"},
	} {
		t.Run(name, func(t *testing.T) {
			h, begun, left := hang(tt.pieces...)
			e.router.routes(newWorker(t, "w", h))
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			id := "left-" + strings.ReplaceAll(name, " ", "-")
			if tt.pieces == nil {
				go func() { <-begun; cancel() }()
			}
			resp, err := e.begin(ctx, chatPath, chatRequest(true, ""), "X-Request-Id", id)
			if err == nil {
				in := bufio.NewReader(resp.Body)
				for range tt.pieces {
					readEvent(t, in)
				}
				cancel()
				resp.Body.Close()
			}
			await(t, "the worker is left", left)
			u := events.event(id)
			want := tt.want
			if strings.HasPrefix(want, "~ ") && u.GetTokens().GetInput() > 0 {
				want = fmt.Sprintf("~%d%s", u.GetTokens().GetInput(), want[1:])
			}
			if got := counted(u); loose(got) != loose(want) {
				t.Errorf("got %q, want %q", got, want)
			}
		})
	}
}

// What no backend answered cost nobody anything, and a refusal is no usage.
func TestUsageOfFailures(t *testing.T) {
	events, change := collectUsage(t)
	e := start(t, change).ready()
	gone := newWorker(t, "gone", nil)
	gone.url = "http://127.0.0.1:1"
	e.router.routes(gone)
	resp, _ := e.post(chatPath, chatRequest(true, ""))
	if u := events.event(resp.Header.Get("X-Request-Id")); counted(u) != "? ? ? ? failed" || u.GetStatus() != 502 {
		t.Errorf("no connection: got %v", u)
	}
	e.router.routes(newWorker(t, "w", refuses(400, `{"error":{"message":"no","type":"BadRequestError","code":400}}`)))
	resp, _ = e.post(chatPath, chatRequest(true, ""))
	if u := events.event(resp.Header.Get("X-Request-Id")); counted(u) != "? ? ? ? refused" || u.GetStatus() != 400 {
		t.Errorf("refused: got %v", u)
	}
	// One that fails before its content, and one that serves: one event.
	e.router.routes(gone, newWorker(t, "good", answers(textChunk("a"), usageChunk, doneEvent)))
	resp, _ = e.post(chatPath, chatRequest(true, ""))
	u := events.event(resp.Header.Get("X-Request-Id"))
	if counted(u) != "12 8 2 ? ok" || u.GetAttempts() != 2 || u.GetWorker() != "good" {
		t.Errorf("failed over: got %v", u)
	}
	if u.Ttft == nil || u.GetTtft() <= 0 || u.GetE2E() < u.GetTtft() {
		t.Errorf("times: got %v", u)
	}
}

// An id that a client repeats names two requests.
func TestUsageOfRepeatedIDs(t *testing.T) {
	events, change := collectUsage(t)
	e := start(t, change).ready()
	e.router.routes(newWorker(t, "w", answers(textChunk("a"), usageChunk, doneEvent)))
	ids := map[string]bool{}
	for range 3 {
		e.post(chatPath, chatRequest(true, ""), "X-Request-Id", "mine")
	}
	deadline, tick := time.After(patience), time.NewTicker(2*time.Millisecond)
	defer tick.Stop()
	for len(ids) < 3 {
		events.mu.Lock()
		for _, list := range events.byID { // one that comes too soon gets another request id
			for _, u := range list {
				ids[u.GetId()] = true
			}
		}
		events.mu.Unlock()
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatalf("%d events of three requests", len(ids))
		}
	}
}

// Requests of a price have their cost, exactly, with the price that it was made by.
func TestUsageHasItsCost(t *testing.T) {
	events, change := collectUsage(t)
	e := start(t, func(c *ingress.Config, catalog *routerv1.Catalog) {
		change(c, catalog)
		catalog.Prices = []*routerv1.Price{
			{Backend: "ns/paid", Model: "big", Currency: "EUR", Input: "3", CachedInput: "0.3", Output: "15.01", Version: "ns/paid/big@1", Names: []string{"chat"}},
			{Backend: "ns/set", Currency: "USD", Hourly: "15.84", Version: "ns/set@2", Names: []string{"chat"}},
		}
	}).ready()
	w := newWorker(t, "provider ns/paid", answers(textChunk("a"), usageChunk, doneEvent))
	e.router.set(func(*routerv1.RouteRequest) (*routerv1.RouteResponse, error) {
		return &routerv1.RouteResponse{Rule: "ns/policy/rule", Pool: "ns/pool", Endpoints: []*routerv1.Endpoint{{Worker: w.name, Url: w.url, UpstreamModel: "big", Provider: "ns/paid"}}}, nil
	})
	resp, _ := e.post(chatPath, chatRequest(true, ""))
	u := events.event(resp.Header.Get("X-Request-Id"))
	// 4 uncached at 3, 8 cached at 0.3 and 2 out at 15.01, each a millionth.
	if c := u.GetCost(); c.GetInput() != "0.000012" || c.GetCachedInput() != "0.0000024" || c.GetOutput() != "0.00003002" || c.GetTotal() != "0.00004442" ||
		c.GetCurrency() != "EUR" || c.GetPriceVersion() != "ns/paid/big@1" || c.GetOutputPrice() != "15.01" {
		t.Errorf("got %v", c)
	}
	if u.GetProvider() != "ns/paid" || u.GetWorker() != "" || u.GetRule() != "ns/policy/rule" || u.GetPool() != "ns/pool" {
		t.Errorf("got %v", u)
	}
	e.router.routes(newWorker(t, "w", answers(textChunk("a"), usageChunk, doneEvent)))
	resp, _ = e.post(chatPath, chatRequest(true, ""))
	if c := events.event(resp.Header.Get("X-Request-Id")).GetCost(); c.GetHourlyPrice() != "15.84" || c.GetTotal() != "" || c.GetPriceVersion() != "ns/set@2" {
		t.Errorf("got %v", c)
	}
}

// Ten thousand models that nobody has leave one series.
func TestUnknownModelsAreOneSeries(t *testing.T) {
	e := start(t, nil).ready()
	before := strings.Count(e.metrics(), "\n")
	for i := range 10_000 {
		e.post(chatPath, fmt.Sprintf(`{"model":"random-%d","messages":[]}`, i))
	}
	page := e.metrics()
	if after := strings.Count(page, "\n"); after > before+400 || strings.Contains(page, "random-") {
		t.Errorf("%d lines of metrics, %d before", after, before)
	}
	if !strings.Contains(page, `kinference_tenant_requests_total{model="_unknown",otel_scope_name="ingress",outcome="refused",tenant="_open"} 10000`) &&
		!strings.Contains(page, `tenant="_open"} 10000`) {
		t.Error("they are not counted")
	}
}

// Embeddings have input only.
func TestUsageOfEmbeddings(t *testing.T) {
	events, change := collectUsage(t)
	e := start(t, change).ready()
	e.router.routes(newWorker(t, "w", func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		w.Header().Set("Content-Type", "application/json")
		_, _ = io.WriteString(w, `{"object":"list","model":"base-model","data":[{"object":"embedding","index":0,"embedding":[0.5]}],"usage":{"prompt_tokens":7,"total_tokens":7}}`)
	}))
	resp, body := e.post("/v1/embeddings", `{"model":"chat","input":"Hello"}`)
	if resp.StatusCode != http.StatusOK {
		t.Fatalf("%s: %s", resp.Status, body)
	}
	if u := events.event(resp.Header.Get("X-Request-Id")); loose(counted(u)) != "7 0 0 ? ok" || u.GetRoute() != "/v1/embeddings" {
		t.Errorf("got %q, %v", counted(u), u)
	}
}

// Every route of every dialect has its event, with the route that the client used.
func TestUsageOfEveryRoute(t *testing.T) {
	events, change := collectUsage(t)
	e := start(t, change).ready()
	text := func(s string) string {
		return fmt.Sprintf(`data: {"id":"cmpl-1","object":"text_completion","created":1,"model":"base-model","choices":[{"index":0,"text":%q,"finish_reason":null}],"usage":%s}`+"\n\n", s, running(12, 1))
	}
	for path, tt := range map[string]struct{ body, stream string }{
		chatPath:        {chatRequest(true, ""), with(textChunk("a"), running(12, 1)) + stopChunk + usageChunk + doneEvent},
		textPath:        {`{"model":"chat","prompt":"Hello","stream":true}`, text("a") + usageChunk + doneEvent},
		"/v1/messages":  {`{"model":"chat","max_tokens":9,"messages":[{"role":"user","content":"Hello"}],"stream":true}`, with(textChunk("a"), running(12, 1)) + stopChunk + usageChunk + doneEvent},
		"/v1/responses": {`{"model":"chat","input":"Hello","stream":true,"store":false}`, with(textChunk("a"), running(12, 1)) + stopChunk + usageChunk + doneEvent},
	} {
		t.Run(path, func(t *testing.T) {
			e.router.routes(newWorker(t, "w", answers(strings.SplitAfter(tt.stream, "\n\n")...)))
			resp, body := e.post(path, tt.body, "Anthropic-Version", "2023-06-01")
			if resp.StatusCode != http.StatusOK {
				t.Fatalf("%s: %s", resp.Status, body)
			}
			u := events.event(resp.Header.Get("X-Request-Id"))
			if got := counted(u); got != "12 8 2 ? ok" || u.GetRoute() != path || u.Ttft == nil || u.GetModel() != "chat" {
				t.Errorf("got %q, %v", got, u)
			}
		})
	}
}

// Latencies of a tenant lead to the trace of a request that had one.
func TestTenantLatenciesHaveExemplars(t *testing.T) {
	e := startIn(t, daemon.Settings{Spans: new(keeper)}, nil).ready()
	e.router.routes(newWorker(t, "w", answers(textChunk("a"), usageChunk, doneEvent)))
	resp, _ := e.post(chatPath, chatRequest(true, ""))
	e.router.done(resp.Header.Get("X-Request-Id"))
	deadline, tick := time.After(patience), time.NewTicker(5*time.Millisecond)
	defer tick.Stop()
	for {
		w := httptest.NewRecorder()
		r := httptest.NewRequest(http.MethodGet, "/metrics", nil)
		r.Header.Set("Accept", "application/openmetrics-text; version=1.0.0")
		e.shell.Admin().ServeHTTP(w, r)
		for line := range strings.Lines(w.Body.String()) {
			if strings.HasPrefix(line, "kinference_tenant_ttft_seconds_bucket") && strings.Contains(line, "trace_id=") {
				return
			}
		}
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatalf("no exemplar: %.3000s", w.Body.String()[max(0, strings.Index(w.Body.String(), "kinference_tenant_ttft")):])
		}
	}
}
