package fleetsim_test

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/kinference/kinference/internal/fleetsim"
	"github.com/kinference/kinference/internal/fleetsim/engine"
	"github.com/kinference/kinference/internal/vllm"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// small has blocks of 16 tokens and iterations of 20 ms.
var small = engine.Profile{
	Name: "small", Model: "test/model", BlockSize: 16, Blocks: 256, MaxBatchedTokens: 512, MaxSeqs: 8, MaxModelLen: 2048,
	W: 20e-3, A: 1e-4, Ovh: 1e-3,
}

// start runs a worker for the test, 50 times faster than real.
func start(t testing.TB, cfg fleetsim.Config) *fleetsim.Worker {
	t.Helper()
	if cfg.Profile.BlockSize == 0 {
		cfg.Profile = small
	}
	if cfg.TimeScale == 0 {
		cfg.TimeScale = 50
	}
	w, err := fleetsim.Start(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(w.Kill)
	return w
}

// client leaves no idle connections behind.
func client(t testing.TB) *http.Client {
	tr := &http.Transport{}
	t.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: tr}
}

func post(t testing.TB, w *fleetsim.Worker, path, body string, headers ...string) (int, http.Header, string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), "POST", w.URL()+path, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	for i := 0; i < len(headers); i += 2 {
		req.Header.Set(headers[i], headers[i+1])
	}
	return do(t, req)
}

func get(t testing.TB, w *fleetsim.Worker, path string) (int, http.Header, string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), "GET", w.URL()+path, nil)
	if err != nil {
		t.Fatal(err)
	}
	return do(t, req)
}

func do(t testing.TB, req *http.Request) (int, http.Header, string) {
	t.Helper()
	resp, err := client(t).Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, resp.Header, string(b)
}

func decode[T any](t testing.TB, text string) (v T) {
	t.Helper()
	if err := json.Unmarshal([]byte(text), &v); err != nil {
		t.Fatalf("%v in %s", err, text)
	}
	return v
}

// sse returns the data of the events of a stream.
func sse(t testing.TB, text string) (events []string) {
	t.Helper()
	sc := bufio.NewScanner(strings.NewReader(text))
	sc.Buffer(nil, 10<<20)
	for sc.Scan() {
		if data, ok := strings.CutPrefix(sc.Text(), "data: "); ok {
			events = append(events, data)
		} else if sc.Text() != "" {
			t.Fatalf("line %q", sc.Text())
		}
	}
	return events
}

// ids is a JSON list of n token ids.
func ids(from, n int) string {
	var b bytes.Buffer
	for i := range n {
		if i > 0 {
			b.WriteByte(',')
		}
		fmt.Fprint(&b, from+i)
	}
	return "[" + b.String() + "]"
}

// eventually waits for a condition that other goroutines bring about.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	deadline := time.Now().Add(time.Minute)
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for !ok() {
		if time.Now().After(deadline) {
			t.Fatalf("timed out: %s", what)
		}
		<-tick.C
	}
}

type usage struct {
	Prompt     int `json:"prompt_tokens"`
	Total      int `json:"total_tokens"`
	Completion int `json:"completion_tokens"`
	Details    *struct {
		Cached int `json:"cached_tokens"`
	} `json:"prompt_tokens_details"`
}

type completion struct {
	ID, Object, Model string
	Created           int64
	Choices           []struct {
		Index          int
		Text           string
		Message        struct{ Role, Content string }
		Delta          struct{ Role, Content string }
		FinishReason   *string `json:"finish_reason"`
		TokenIDs       []int   `json:"token_ids"`
		PromptTokenIDs []int   `json:"prompt_token_ids"`
	}
	Usage          *usage
	PromptTokenIDs []int `json:"prompt_token_ids"`
}

func TestChat(t *testing.T) {
	w := start(t, fleetsim.Config{Aliases: []string{"alias"}})
	const messages = `"messages":[{"role":"user","content":"tell me about rivers and the sea"}]`
	status, h, text := post(t, w, "/v1/chat/completions", `{"model":"alias",`+messages+`,"max_tokens":40,"return_token_ids":true}`, "X-Request-Id", "abc")
	if status != 200 || h.Get("Content-Type") != "application/json" {
		t.Fatalf("%d %v %s", status, h, text)
	}
	c := decode[completion](t, text)
	if c.ID != "chatcmpl-abc" || c.Object != "chat.completion" || c.Model != "alias" || len(c.Choices) != 1 || *c.Choices[0].FinishReason != "length" {
		t.Errorf("%s", text)
	}
	if c.Usage.Completion != 40 || c.Usage.Prompt != len(c.PromptTokenIDs) || c.Usage.Total != 40+c.Usage.Prompt || c.Usage.Details.Cached != 0 {
		t.Errorf("usage %+v", c.Usage)
	}
	answer := c.Choices[0].Message.Content
	if n := len(strings.Fields(answer)); n != 40 || c.Choices[0].Message.Role != "assistant" {
		t.Errorf("%d words: %q", n, answer)
	}

	t.Run("the next turn finds prompt and answer in the cache", func(t *testing.T) {
		_, _, text := post(t, w, "/v1/chat/completions", `{"model":"test/model","messages":[{"role":"user","content":"tell me about rivers and the sea"},
			{"role":"assistant","content":"`+answer+`"},{"role":"user","content":"and then?"}],"max_tokens":5,"return_token_ids":true}`)
		n := decode[completion](t, text)
		first := append(c.PromptTokenIDs, c.Choices[0].TokenIDs...)
		for i, id := range first {
			if n.PromptTokenIDs[i] != id {
				t.Fatalf("token %d of the next prompt is %d, was %d", i, n.PromptTokenIDs[i], id)
			}
		}
		// The last generated token was never computed.
		if want := (len(first) - 1) / 16 * 16; n.Usage.Details.Cached != want {
			t.Errorf("cached %d tokens, want %d", n.Usage.Details.Cached, want)
		}
	})
	t.Run("streaming gives the same", func(t *testing.T) {
		_, h, text := post(t, w, "/v1/chat/completions", `{"model":"test/model",`+messages+`,"max_tokens":40,"stream":true,"stream_options":{"include_usage":true}}`)
		if h.Get("Content-Type") != "text/event-stream; charset=utf-8" {
			t.Errorf("%v", h)
		}
		ev := sse(t, text)
		if len(ev) != 1+40+1+1 || ev[len(ev)-1] != "[DONE]" {
			t.Fatalf("%d events, want role, 40 deltas, usage and the end:\n%s", len(ev), text)
		}
		var got strings.Builder
		for i, data := range ev[:len(ev)-1] {
			c := decode[completion](t, data)
			if c.Object != "chat.completion.chunk" || !strings.HasPrefix(c.ID, "chatcmpl-") {
				t.Fatal(data)
			}
			switch {
			case i == 0:
				if c.Choices[0].Delta.Role != "assistant" || c.Choices[0].Delta.Content != "" || c.Usage != nil {
					t.Errorf("first: %s", data)
				}
			case i <= 40:
				got.WriteString(c.Choices[0].Delta.Content)
				if (c.Choices[0].FinishReason != nil) != (i == 40) || c.Usage != nil {
					t.Errorf("delta %d: %s", i, data)
				}
			default:
				if len(c.Choices) != 0 || c.Usage.Completion != 40 || c.Usage.Details.Cached == 0 {
					t.Errorf("usage: %s", data)
				}
			}
		}
		if got.String() != answer {
			t.Errorf("streamed %q, whole %q", got.String(), answer)
		}
	})
	t.Run("continuous usage", func(t *testing.T) {
		_, _, text := post(t, w, "/v1/chat/completions", `{`+messages+`,"max_completion_tokens":3,"stream":true,"stream_options":{"include_usage":true,"continuous_usage_stats":true}}`)
		ev := sse(t, text)
		for i, data := range ev[:4] {
			if c := decode[completion](t, data); c.Usage == nil || c.Usage.Completion != i || c.Usage.Prompt == 0 || c.Usage.Details != nil {
				t.Errorf("%s", data)
			}
		}
		if !strings.Contains(ev[0], `"model":"test/model"`) {
			t.Errorf("without a model: %s", ev[0])
		}
	})
	t.Run("token ids skip the template", func(t *testing.T) {
		_, _, text := post(t, w, "/v1/chat/completions", `{`+messages+`,"max_tokens":1,"kv_transfer_params":{"prompt_token_ids":`+ids(5, 33)+`}}`)
		if c := decode[completion](t, text); c.Usage.Prompt != 33 {
			t.Errorf("%s", text)
		}
	})
	t.Run("answers end by themselves", func(t *testing.T) {
		_, _, text := post(t, w, "/v1/chat/completions", `{`+messages+`}`)
		if c := decode[completion](t, text); c.Usage.Completion != 256 || *c.Choices[0].FinishReason != "stop" {
			t.Errorf("%s", text)
		}
	})
	t.Run("several choices", func(t *testing.T) {
		_, _, text := post(t, w, "/v1/chat/completions", `{`+messages+`,"n":3,"max_tokens":4}`)
		c := decode[completion](t, text)
		if len(c.Choices) != 3 || c.Choices[0].Message.Content == c.Choices[1].Message.Content || c.Usage.Completion != 12 {
			t.Errorf("%s", text)
		}
	})
}

// Many clients at once, on two ranks, more than fit: all are served and
// nothing stays behind.
func TestConcurrency(t *testing.T) {
	w := start(t, fleetsim.Config{Ranks: 2, TimeScale: 500, LoRAs: []string{"sql"}})
	var wg sync.WaitGroup
	c := client(t)
	for k := range 64 {
		wg.Go(func() {
			for i := range 4 {
				body := fmt.Sprintf(`{"model":"%s","prompt":%s,"max_tokens":%d,"stream":%v}`, []string{"test/model", "sql"}[k%2], ids(1000*(k%5), 100+10*i), 20+k, i%2 == 0)
				resp, err := c.Post(w.URL()+"/v1/completions", "application/json", strings.NewReader(body))
				if err != nil {
					t.Error(err)
					return
				}
				b, err := io.ReadAll(resp.Body)
				resp.Body.Close()
				if err != nil || resp.StatusCode != 200 {
					t.Errorf("%s %v %s", resp.Status, err, b)
				}
			}
		})
	}
	done := make(chan struct{})
	go func() { wg.Wait(); close(done) }()
	for stop := false; !stop; {
		select {
		case <-done:
			stop = true
		default:
			get(t, w, "/metrics")
		}
	}
	n := uint64(0)
	for rank := range 2 {
		st := w.Stats(rank)
		if st.Running+st.Waiting != 0 || st.FreeBlocks != small.Blocks || st.Steps == 0 {
			t.Errorf("rank %d: %+v", rank, st)
		}
		n += st.Lengthed
	}
	if n != 256 || w.InFlight() != 0 {
		t.Errorf("%d requests finished, want 256; %d in flight", n, w.InFlight())
	}
}

func TestCompletions(t *testing.T) {
	w := start(t, fleetsim.Config{})
	for _, c := range []struct {
		name, prompt string
		choices      int
		tokens       int
	}{
		{"text", `"over the hills"`, 1, -1},
		{"texts", `["over the hills","far away"]`, 2, -1},
		{"ids", ids(10, 20), 1, 20},
		{"lists of ids", `[` + ids(10, 20) + `,` + ids(50, 7) + `]`, 2, 27},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, _, text := post(t, w, "/v1/completions", `{"model":"test/model","prompt":`+c.prompt+`,"max_tokens":5,"return_token_ids":true}`, "X-Request-Id", "q")
			got := decode[completion](t, text)
			if got.ID != "cmpl-q" || got.Object != "text_completion" || len(got.Choices) != c.choices || got.Usage.Completion != 5*c.choices || c.tokens >= 0 && got.Usage.Prompt != c.tokens {
				t.Fatal(text)
			}
			for i, ch := range got.Choices {
				if ch.Index != i || len(ch.TokenIDs) != 5 || len(ch.PromptTokenIDs) == 0 || !strings.HasPrefix(ch.Text, " ") {
					t.Errorf("choice %d: %+v", i, ch)
				}
			}
		})
	}
	t.Run("stream", func(t *testing.T) {
		_, _, text := post(t, w, "/v1/completions", `{"prompt":[`+ids(10, 20)+`,`+ids(50, 7)+`],"max_tokens":5,"stream":true}`)
		ev := sse(t, text)
		if len(ev) != 11 || strings.Contains(text, "usage") {
			t.Fatalf("%d events: %s", len(ev), text)
		}
		n := map[int]int{}
		for _, data := range ev[:10] {
			n[decode[completion](t, data).Choices[0].Index]++
		}
		if n[0] != 5 || n[1] != 5 {
			t.Errorf("%v", n)
		}
	})
}

func TestErrors(t *testing.T) {
	w := start(t, fleetsim.Config{APIKey: "key", Ranks: 2})
	auth := []string{"Authorization", "Bearer key"}
	for _, c := range []struct {
		name, path, body string
		headers          []string
		status           int
		kind, param      string
		message          string
	}{
		{"model", "/v1/chat/completions", `{"model":"nobody","messages":[]}`, auth, 404, "NotFoundError", "model", "does not exist"},
		{"context", "/v1/completions", `{"prompt":` + ids(1, 2048) + `}`, auth, 400, "BadRequestError", "input_tokens", "maximum context length is 2048 tokens"},
		{"context with output", "/v1/completions", `{"prompt":` + ids(1, 2000) + `,"max_tokens":100}`, auth, 400, "BadRequestError", "input_tokens", "requested 100 output tokens"},
		{"no messages", "/v1/chat/completions", `{"model":"test/model"}`, auth, 400, "Bad Request", "", "messages"},
		{"bad json", "/v1/chat/completions", `{"model":`, auth, 400, "Bad Request", "", "json_invalid"},
		{"bad field", "/v1/chat/completions", `{"model":7}`, auth, 400, "Bad Request", "", "model"},
		{"bad prompt", "/v1/completions", `{"prompt":{"a":1}}`, auth, 400, "Bad Request", "", "prompt"},
		{"empty prompt", "/v1/completions", `{"prompt":[]}`, auth, 400, "BadRequestError", "", "cannot be empty"},
		{"max_tokens", "/v1/completions", `{"prompt":"a","max_tokens":0}`, auth, 400, "BadRequestError", "max_tokens", "at least 1"},
		{"salt", "/v1/completions", `{"prompt":"a","cache_salt":""}`, auth, 400, "Bad Request", "", "cache_salt"},
		{"stream options", "/v1/completions", `{"prompt":"a","stream_options":{"include_usage":true}}`, auth, 400, "Bad Request", "", "stream=True"},
		{"rank", "/v1/completions", `{"prompt":"a"}`, append(auth, "X-data-parallel-rank", "2"), 400, "BadRequestError", "", "out of range"},
		{"content type", "/v1/completions", `{"prompt":"a"}`, append(auth, "Content-Type", "text/plain"), 400, "Bad Request", "", "Unsupported Media Type"},
	} {
		t.Run(c.name, func(t *testing.T) {
			status, _, text := post(t, w, c.path, c.body, c.headers...)
			e, ok := vllm.ParseError([]byte(text))
			param := ""
			if e.Param != nil {
				param = *e.Param
			}
			if status != c.status || !ok || e.Code != c.status || e.Type != c.kind || param != c.param || !strings.Contains(e.Message, c.message) {
				t.Errorf("%d %s", status, text)
			}
		})
	}
	if status, _, text := post(t, w, "/v1/nowhere", `{}`, auth...); status != 404 || text != `{"detail":"Not Found"}` {
		t.Errorf("%d %s", status, text)
	}
	if status, h, text := post(t, w, "/v1/models", `{}`, auth...); status != 405 || text != `{"detail":"Method Not Allowed"}` || h.Get("Allow") != "GET" {
		t.Errorf("%d %s", status, text)
	}
	if status, _, text := post(t, w, "/v1/completions", `{"prompt":"a"}`); status != 401 || text != vllm.UnauthorizedBody {
		t.Errorf("%d %s", status, text)
	}
	if status, _, _ := post(t, w, "/v1/completions", `{"prompt":"a","max_tokens":1}`, append(auth, "X-data-parallel-rank", "many")...); status != 200 {
		t.Errorf("a rank that is no number is ignored: %d", status)
	}
	if status, _, _ := get(t, w, "/metrics"); status != 200 {
		t.Errorf("/metrics is open: %d", status)
	}
}

func TestInformation(t *testing.T) {
	w := start(t, fleetsim.Config{Aliases: []string{"alias"}, LoRAs: []string{"sql"}, Version: vllm.V0_26, LoadTracking: true})
	type models struct {
		Data []struct {
			ID, Root    string
			Parent      *string
			MaxModelLen *int `json:"max_model_len"`
		}
	}
	_, _, text := get(t, w, "/v1/models")
	m := decode[models](t, text)
	if len(m.Data) != 3 || m.Data[0].ID != "test/model" || *m.Data[0].MaxModelLen != 2048 || m.Data[1].ID != "alias" || m.Data[1].Root != "test/model" ||
		m.Data[2].ID != "sql" || *m.Data[2].Parent != "test/model" || m.Data[2].MaxModelLen != nil {
		t.Errorf("%s", text)
	}
	for _, c := range []struct{ path, want string }{
		{"/health", ""}, {"/ping", ""}, {"/version", `{"version":"0.26.0"}`}, {"/load", `{"server_load":0}`},
	} {
		if status, _, text := get(t, w, c.path); status != 200 || text != c.want {
			t.Errorf("%s: %d %q", c.path, status, text)
		}
	}
	if status, _, _ := post(t, w, "/reset_prefix_cache", ""); status != 404 {
		t.Errorf("development routes are off: %d", status)
	}
	_, _, text = post(t, w, "/v1/chat/completions", `{"model":"sql","messages":[{"role":"user","content":"hello"}],"max_tokens":2}`, "endpoint-load-metrics-format", "TEXT")
	if c := decode[completion](t, text); c.Model != "sql" {
		t.Errorf("%s", text)
	}
}

func TestTokenize(t *testing.T) {
	w := start(t, fleetsim.Config{})
	type tokens struct {
		Count       int
		MaxModelLen int `json:"max_model_len"`
		Tokens      []int
		TokenStrs   []string `json:"token_strs"`
	}
	const messages = `"messages":[{"role":"system","content":"be kind"},{"role":"user","content":"tell me about rivers"}]`
	_, _, text := post(t, w, "/tokenize", `{"prompt":"hello to the world","return_token_strs":true}`)
	p := decode[tokens](t, text)
	if p.Count == 0 || p.Count != len(p.Tokens) || p.MaxModelLen != 2048 || strings.Join(p.TokenStrs, "") != "hello to the world" {
		t.Errorf("%s", text)
	}
	list, err := json.Marshal(p.Tokens)
	if err != nil {
		t.Fatal(err)
	}
	if _, _, text := post(t, w, "/detokenize", `{"tokens":`+string(list)+`}`); text != `{"prompt":"hello to the world"}` {
		t.Errorf("%s", text)
	}
	_, _, text = post(t, w, "/tokenize", `{`+messages+`}`)
	c := decode[tokens](t, text)
	type rendered struct {
		RequestID string `json:"request_id"`
		TokenIDs  []int  `json:"token_ids"`
	}
	_, _, text = post(t, w, "/v1/chat/completions/render", `{`+messages+`}`)
	r := decode[rendered](t, text)
	_, _, text = post(t, w, "/v1/chat/completions", `{`+messages+`,"max_tokens":1,"return_token_ids":true}`)
	g := decode[completion](t, text)
	if fmt.Sprint(c.Tokens) != fmt.Sprint(g.PromptTokenIDs) || fmt.Sprint(r.TokenIDs) != fmt.Sprint(g.PromptTokenIDs) || !strings.HasPrefix(r.RequestID, "chatcmpl-") {
		t.Errorf("tokenize %v\nrender %v\ngenerated from %v", c.Tokens, r.TokenIDs, g.PromptTokenIDs)
	}
	_, _, text = post(t, w, "/v1/completions/render", `{"prompt":["a b","c"]}`)
	if l := decode[[]rendered](t, text); len(l) != 2 || len(l[0].TokenIDs) == 0 {
		t.Errorf("%s", text)
	}
	if st := w.Stats(0); st.Steps != 1 {
		t.Errorf("only the generation reached the engine: %+v", st)
	}
}

func TestMetrics(t *testing.T) {
	w := start(t, fleetsim.Config{Ranks: 2, LoRAs: []string{"sql"}})
	for range 2 {
		post(t, w, "/v1/completions", `{"model":"sql","prompt":`+ids(1, 100)+`,"max_tokens":4}`, "X-data-parallel-rank", "1")
	}
	_, h, text := get(t, w, "/metrics")
	m, err := vllm.ParseMetrics([]byte(text))
	if err != nil || len(m) != 2 || !strings.HasPrefix(h.Get("Content-Type"), "text/plain") {
		t.Fatalf("%v: %s", err, text)
	}
	if x := m[1]; x.PrefixQueries != 200 || x.PrefixHits != 96 || x.PromptTokens != 200 || x.OutputTokens != 8 || x.BlockSize != 16 || x.NumBlocks != 256 || x.KVCacheTokens != 4096 || x.Running != 0 {
		t.Errorf("rank 1: %+v", x)
	}
	if x := m[0]; x.PrefixQueries != 0 || x.BlockSize != 16 {
		t.Errorf("rank 0: %+v", x)
	}
	for _, line := range []string{
		`vllm:time_to_first_token_seconds_count{engine="1",model_name="test/model"} 2.0`,
		`vllm:time_to_first_token_seconds_bucket{engine="1",model_name="test/model",le="0.06"} 2.0`,
		`vllm:request_success_total{engine="1",model_name="test/model",finished_reason="length"} 2.0`,
		`vllm:inter_token_latency_seconds_count{engine="1",model_name="test/model"} 6.0`,
	} {
		if !strings.Contains(text, line+"\n") {
			t.Errorf("no line %s in\n%s", line, text)
		}
	}
}
