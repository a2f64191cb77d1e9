package fleetsim_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/kinference/kinference/internal/fleetsim"
	"github.com/kinference/kinference/internal/vllm"
)

// What version 0.32 answers is compared with a real engine in test/interop/vllm.
// These tests keep the main points where no engine is.

func TestAnswerEnds(t *testing.T) {
	w := start(t, fleetsim.Config{Version: vllm.V0_32})
	_, _, text := post(t, w, "/tokenize", `{"prompt":" the"}`)
	id := decode[struct{ Tokens []int }](t, text).Tokens[0]
	for _, c := range []struct {
		name, members string
		tokens        int
		text          string
		finish, stop  string
	}{
		{"at the limit", `"max_tokens":3`, 3, " the the the", "length", "null"},
		{"by default", `"model":""`, 16, strings.Repeat(" the", 16), "length", "null"},
		{"stop string", `"max_tokens":9,"stop":"the the"`, 2, " ", "stop", `"the the"`},
		{"kept stop string", `"max_tokens":9,"stop":["x","e t"],"include_stop_str_in_output":true`, 2, " the t", "stop", `"e t"`},
		{"stop string at the limit", `"max_tokens":2,"stop":"the the"`, 2, " ", "stop", `"the the"`},
		{"min_tokens", `"max_tokens":9,"stop":"the","min_tokens":4`, 5, " the the the the ", "stop", `"the"`},
		{"stop token", fmt.Sprintf(`"max_tokens":9,"stop_token_ids":[%d]`, id), 1, "", "stop", fmt.Sprint(id)},
		{"never met", `"max_tokens":2,"stop":"other"`, 2, " the the", "length", "null"},
		{"echo", `"max_tokens":1,"echo":true`, 1, "over the hills the", "length", "null"},
		{"echo alone", `"max_tokens":0,"echo":true`, 1, "over the hills", "length", "null"},
	} {
		for _, stream := range []bool{false, true} {
			t.Run(fmt.Sprint(c.name, " stream ", stream), func(t *testing.T) {
				members := fmt.Sprintf(`"ignore_eos":true,"allowed_token_ids":[%d],%s`, id, c.members)
				if stream {
					members += `,"stream":true,"stream_options":{"include_usage":true}`
				}
				_, _, body := post(t, w, "/v1/completions", `{"prompt":"over the hills",`+members+`}`)
				events := []string{body}
				if stream {
					events = sse(t, body)
				}
				var text strings.Builder
				finish, stop, tokens := "", "", 0
				for _, data := range events {
					if data == "[DONE]" {
						continue
					}
					got := decode[struct {
						Choices []struct {
							Text   string
							Finish *string `json:"finish_reason"`
							Stop   any     `json:"stop_reason"`
						}
						Usage *usage
					}](t, data)
					for _, x := range got.Choices {
						text.WriteString(x.Text)
						if x.Finish != nil {
							finish, stop = *x.Finish, quoted(x.Stop)
						}
					}
					if got.Usage != nil {
						tokens = got.Usage.Completion
					}
				}
				if text.String() != c.text || finish != c.finish || stop != c.stop || tokens != c.tokens {
					t.Errorf("%q, %s, %s, %d tokens; want %q, %s, %s, %d", text.String(), finish, stop, tokens, c.text, c.finish, c.stop, c.tokens)
				}
			})
		}
	}
}

func quoted(v any) string {
	switch v := v.(type) {
	case nil:
		return "null"
	case string:
		return fmt.Sprintf("%q", v)
	}
	return fmt.Sprint(v)
}

func TestModernErrors(t *testing.T) {
	w := start(t, fleetsim.Config{Version: vllm.V0_32, VocabSize: 5000})
	const messages = `"messages":[{"role":"user","content":"hello"}]`
	for _, c := range []struct {
		name, path, body string
		status           int
		kind, param      string
		message          string
	}{
		{"model", "/v1/completions", `{"model":"nobody","prompt":"a"}`, 404, "NotFoundError", "model", "The model `nobody` does not exist. Valid aliases: test/model."},
		{"prompt too long", "/v1/completions", `{"prompt":` + ids(1, 2050) + `}`, 400, "BadRequestError", "input_tokens", "contains 2050 input tokens"},
		{"text too long", "/v1/completions", `{"prompt":"` + strings.Repeat("a b c d ", 1000) + `"}`, 400, "BadRequestError", "input_tokens", "maximum context length is 2048 tokens. However, your prompt contains at least 2049 input tokens"},
		{"too many characters", "/v1/completions", `{"prompt":"` + strings.Repeat("many words ", 100_000) + `"}`, 400, "BadRequestError", "input_text", "maximum context length is 2048 tokens"},
		{"no room for output", "/v1/completions", `{"prompt":` + ids(1, 2048) + `}`, 400, "BadRequestError", "max_tokens", "max_tokens must be at least 1, got 0. (parameter=max_tokens, value=0)"},
		{"output over the context", "/v1/completions", `{"prompt":"a","max_tokens":2049}`, 400, "BadRequestError", "max_tokens", "max_tokens=2049 cannot be greater than max_model_len=2048"},
		{"no messages", "/v1/chat/completions", `{}`, 400, "Bad Request", "body.messages", "missing"},
		{"empty messages", "/v1/chat/completions", `{"messages":[]}`, 400, "BadRequestError", "", "empty conversation"},
		{"message without role", "/v1/chat/completions", `{"messages":[{"content":"a"}]}`, 400, "Bad Request", "body.messages.0", "list"},
		{"broken JSON", "/v1/completions", `{"prompt":`, 400, "Bad Request", "body.10", "json_invalid"},
		{"wrong type", "/v1/completions", `{"prompt":"a","max_tokens":"many"}`, 400, "Bad Request", "body.max_tokens", "integer"},
		{"wrong types inside", "/v1/completions", `{"prompt":[1,"a"]}`, 400, "Bad Request", "body.prompt.1", "string"},
		{"salt", "/v1/completions", `{"prompt":"a","cache_salt":""}`, 400, "BadRequestError", "cache_salt", "non-empty"},
		{"stream options", "/v1/completions", `{"prompt":"a","stream_options":{"include_usage":true}}`, 400, "BadRequestError", "stream_options", "stream=True"},
		{"token id", "/v1/completions", `{"prompt":[5000]}`, 400, "BadRequestError", "", "Token id 5000 is out of vocabulary"},
		{"passed token id", "/v1/chat/completions", `{` + messages + `,"kv_transfer_params":{"prompt_token_ids":[5000]}}`, 400, "BadRequestError", "kv_transfer_params.prompt_token_ids", "out of vocabulary"},
		{"min_tokens", "/v1/completions", `{"prompt":"a","max_tokens":2,"min_tokens":3}`, 400, "BadRequestError", "", "less than or equal to max_tokens=2, got 3"},
		{"top_p", "/v1/completions", `{"prompt":"a","top_p":2}`, 400, "BadRequestError", "top_p", "value=2.0"},
		{"tools", "/v1/chat/completions", `{` + messages + `,"tools":[{"type":"function","function":{"name":"f"}}]}`, 400, "BadRequestError", "", "--enable-auto-tool-choice"},
		{"template", "/v1/chat/completions", `{` + messages + `,"chat_template":"x"}`, 400, "BadRequestError", "", "untrusted chat template"},
		{"render", "/v1/chat/completions/render", `{` + messages + `}`, 403, "PermissionDeniedError", "", "--enable-scale-out"},
	} {
		t.Run(c.name, func(t *testing.T) {
			status, _, text := post(t, w, c.path, c.body)
			e, ok := vllm.ParseError([]byte(text))
			param := ""
			if e.Param != nil {
				param = *e.Param
			}
			if status != c.status || !ok || e.Type != c.kind || param != c.param || !strings.Contains(e.Message, c.message) {
				t.Errorf("%d %.500s", status, text)
			}
		})
	}
	if status, _, text := post(t, w, "/v1/completions", `{"prompt":`+ids(1, 2000)+`,"max_tokens":100}`); status != 200 || decode[completion](t, text).Usage.Completion != 48 {
		t.Errorf("an output that does not fit is shortened: %d %.300s", status, text)
	}
	if status, _, text := post(t, w, "/v1/completions", `{"prompt":"a","max_tokens":"2","stream":"no"}`); status != 200 || decode[completion](t, text).Usage.Completion != 2 {
		t.Errorf("numbers and truth values may be texts: %d %.300s", status, text)
	}
}

// Usage tells the cached tokens of one prompt, never of all.
func TestCachedOfSeveral(t *testing.T) {
	w := start(t, fleetsim.Config{})
	ask := func(members string) int {
		_, _, text := post(t, w, "/v1/completions", `{"max_tokens":1,`+members+`}`)
		return decode[completion](t, text).Usage.Details.Cached
	}
	if n := ask(`"prompt":` + ids(1, 100)); n != 0 {
		t.Errorf("cached %d of a new prompt", n)
	}
	if n := ask(`"prompt":[` + ids(1, 100) + `,` + ids(500, 100) + `]`); n != 0 {
		t.Errorf("cached %d, want those of the last prompt: 0", n)
	}
	if n := ask(`"prompt":[` + ids(700, 100) + `,` + ids(1, 100) + `]`); n != 96 {
		t.Errorf("cached %d, want those of the last prompt: 96", n)
	}
}

func TestPause(t *testing.T) {
	w := start(t, fleetsim.Config{Version: vllm.V0_32, DevMode: true})
	do := func(path, want string) {
		t.Helper()
		if status, _, text := post(t, w, path, ""); status != 200 || text != want {
			t.Fatalf("%s: %d %s", path, status, text)
		}
	}
	do("/pause?mode=keep&clear_cache=false", `{"status":"paused"}`)
	if _, _, text := get(t, w, "/is_paused"); text != `{"is_paused":true}` {
		t.Error(text)
	}
	done := make(chan string, 1)
	go func() {
		_, _, text := post(t, w, "/v1/completions", `{"prompt":[`+ids(1, 40)+`,`+ids(1, 40)+`],"max_tokens":1}`)
		done <- text
	}()
	eventually(t, "both prompts wait", func() bool { return w.Stats(0).Waiting == 2 })
	do("/resume", `{"status":"resumed"}`)
	if c := decode[completion](t, <-done); c.Usage.Completion != 2 || c.Usage.Details.Cached != 32 {
		t.Errorf("%+v: the second finds the blocks of the first in the same iteration", c.Usage)
	}
	do("/sleep", `{"level":1,"status":"sleeping"}`)
	do("/wake_up", `{"status":"awake","tags":null}`)
}

func TestEventSources(t *testing.T) {
	w := start(t, fleetsim.Config{Version: vllm.V0_32, Ranks: 2})
	_, _, text := get(t, w, "/kv_event_sources")
	got := decode[map[string]struct {
		Endpoint string
		Replay   string `json:"replay_endpoint"`
	}](t, text)
	for rank := range 2 {
		s := got[fmt.Sprint(rank)]
		if strings.Replace(s.Endpoint, "*", "127.0.0.1", 1) != w.EventsAddr(rank) || strings.Replace(s.Replay, "*", "127.0.0.1", 1) != w.ReplayAddr(rank) {
			t.Errorf("rank %d: %s", rank, text)
		}
	}
}
