package vllm_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kinference/kinference/internal/fleetsim"
)

// TestDifferentialHTTP compares answers: status, headers, every key and value
// of bodies and streams, and errors.
func TestDifferentialHTTP(t *testing.T) {
	p := newTwins(t, twinShape{
		blocks: 499, length: 1024, batched: 2048, seqs: 128, key: "secret", loras: map[string]string{"lora-a": "qwen-lora-a", "lora-b": "qwen-lora-b"},
		args:   []string{"--max-loras", "2", "--enable-scale-out", "--enable-request-id-headers", "--enable-server-load-tracking"},
		config: func(c *fleetsim.Config) { c.ScaleOut, c.RequestIDHeaders, c.LoadTracking = true, true, true },
	})
	t.Run("adapters", func(t *testing.T) {
		w := p.watch(t)
		for _, q := range []diffPrompt{
			{ids: idSpan(1000, 100), output: 40},
			{ids: idSpan(1000, 100), output: 40, lora: "lora-a"},
			{ids: idSpan(1000, 100), output: 40, lora: "lora-b"},
			{ids: idSpan(1000, 100), output: 1, lora: "lora-a"},
			{ids: idSpan(1000, 100), output: 1, lora: "lora-a", salt: "salt"},
			{ids: idSpan(1000, 100), output: 1, salt: "lora-a"},
		} {
			p.both(t, q)
			w.compare(t)
		}
		p.reset(t)
		w.compare(t)
	})
	for _, c := range httpScript() {
		t.Run(c.name, func(t *testing.T) { p.same(t, c.diffCall) })
	}
	t.Run("metrics", p.pages)
}

// same sends a request to both sides and compares the answers.
func (p *twins) same(t *testing.T, c diffCall) {
	t.Helper()
	var got [2][]string
	i := 0
	p.each(func(s *twin) {
		got[i] = canonical(s.do(t, c))
		i++
	})
	// A short answer may come in one event, which is the last.
	first := func(line string) bool { return strings.HasPrefix(line, "first: ") }
	if !slices.ContainsFunc(got[0], first) || !slices.ContainsFunc(got[1], first) {
		got[0], got[1] = slices.DeleteFunc(got[0], first), slices.DeleteFunc(got[1], first)
	}
	if d := cmp.Diff(got[0], got[1]); d != "" {
		t.Errorf("%s %.300s (-real +sim):\n%s", c.path, c.body, shorten(d))
	}
}

type httpCase struct {
	name string
	diffCall
}

// httpScript lists the requests. They come in this order, since they share a
// cache.
func httpScript() (script []httpCase) {
	add := func(name, path, body string, header ...string) {
		c := httpCase{name, diffCall{path: path, body: body, header: map[string]string{}}}
		for i := 0; i < len(header); i += 2 {
			c.header[header[i]] = header[i+1]
		}
		script = append(script, c)
	}
	method := func(name, method, path string) {
		script = append(script, httpCase{name, diffCall{method: method, path: path}})
	}
	const chatPath, textPath = "/v1/chat/completions", "/v1/completions"
	force := fmt.Sprintf(`"ignore_eos":true,"allowed_token_ids":[%d]`, forcedID)
	text := func(name, members string, header ...string) {
		add("completions: "+name, textPath, fmt.Sprintf(`{"model":"qwen",%s,%s}`, force, members), header...)
	}
	hi := `"messages":[{"role":"user","content":"hi"}]`
	talk := func(name, members string, header ...string) {
		add("chat: "+name, chatPath, fmt.Sprintf(`{"model":"qwen",%s,%s}`, force, members), header...)
	}

	// Answers.
	text("text", `"prompt":"hello there","max_tokens":3`)
	text("token ids", `"prompt":[14990,1052],"max_tokens":3`)
	text("list of texts", `"prompt":["hello there","you"],"max_tokens":3`)
	text("list of lists", `"prompt":[[14990,1052],[1,2,3]],"max_tokens":3`)
	text("no model", `"prompt":"hello","max_tokens":1`)
	text("n", `"prompt":"hello there","max_tokens":3,"n":3`)
	text("list and n", `"prompt":["hello there","you"],"max_tokens":2,"n":2`)
	text("default length", `"prompt":"hello there"`)
	text("null length", `"prompt":"hello there","max_tokens":null`)
	text("return_token_ids", `"prompt":"hello there","max_tokens":3,"return_token_ids":true`)
	text("echo", `"prompt":"hello there","max_tokens":2,"echo":true`)
	text("echo of token ids", `"prompt":[14990,1052],"max_tokens":2,"echo":true`)
	text("echo alone", `"prompt":"hello there","max_tokens":0,"echo":true`)
	text("min_tokens", `"prompt":"hello there","max_tokens":5,"min_tokens":3`)
	text("stop string", `"prompt":"hello there","max_tokens":50,"stop":"word word word"`)
	text("stop strings", `"prompt":"hello there","max_tokens":50,"stop":["nothing"," word word"]`)
	text("stop string after min_tokens", `"prompt":"hello there","max_tokens":50,"stop":"word","min_tokens":4`)
	text("stop string kept", `"prompt":"hello there","max_tokens":50,"stop":"word w","include_stop_str_in_output":true`)
	text("stop token", fmt.Sprintf(`"prompt":"hello there","max_tokens":50,"stop_token_ids":[%d],"return_token_ids":true`, forcedID))
	text("stop is never met", `"prompt":"hello there","max_tokens":3,"stop":["nothing"]`)
	text("add_special_tokens", `"prompt":"hello there","max_tokens":1,"add_special_tokens":false,"return_token_ids":true`)
	text("more than the context leaves", `"prompt":"hello there","max_tokens":1023`)
	text("unknown members", `"prompt":"hello there","max_tokens":1,"nonsense":{"a":[1]}`)
	text("salt", `"prompt":"hello there","max_tokens":1,"cache_salt":"salt"`)
	text("priority", `"prompt":"hello there","max_tokens":1,"priority":5`)
	long := idList(idSpan(2000, 100))
	text("a long prompt", `"prompt":`+long+`,"max_tokens":1`)
	text("a hit", `"prompt":`+long+`,"max_tokens":1`)
	text("a hit of the second prompt", `"prompt":[[1,2,3],`+long+`],"max_tokens":1`)
	text("a hit of the first prompt", `"prompt":[`+long+`,[1,2,3]],"max_tokens":1`)
	text("an adapter's own cache", `"model":"lora-a","prompt":`+long+`,"max_tokens":1`)
	text("an adapter's hit", `"model":"lora-a","prompt":`+long+`,"max_tokens":1`)
	text("another adapter", `"model":"lora-b","prompt":`+long+`,"max_tokens":1`)
	text("lax types", `"prompt":"hello there","max_tokens":"2","n":1.0,"ignore_eos":"yes"`)

	talk("messages", hi+`,"max_tokens":3`)
	talk("max_completion_tokens", hi+`,"max_tokens":3,"max_completion_tokens":2`)
	talk("n", hi+`,"max_tokens":3,"n":2`)
	talk("return_token_ids", hi+`,"max_tokens":3,"return_token_ids":true`)
	talk("stop", hi+`,"max_tokens":30,"stop":["word word"]`)
	talk("parts", `"messages":[{"role":"user","content":[{"type":"text","text":"hello"},{"type":"text","text":"there"}]}],"max_tokens":1,"return_token_ids":true`)
	talk("system and assistant", `"messages":[{"role":"system","content":"Be brief."},{"role":"user","content":"hi"},{"role":"assistant","content":"hello"},{"role":"user","content":"more"}],"max_tokens":1,"return_token_ids":true`)
	talk("no generation prompt", hi+`,"max_tokens":1,"add_generation_prompt":false,"return_token_ids":true`)
	talk("continue_final_message", `"messages":[{"role":"user","content":"hi"},{"role":"assistant","content":"hel"}],"max_tokens":1,"add_generation_prompt":false,"continue_final_message":true,"return_token_ids":true`)
	talk("chat_template_kwargs", hi+`,"max_tokens":1,"chat_template_kwargs":{"enable_thinking":false},"return_token_ids":true`)
	talk("reasoning_effort", hi+`,"max_tokens":1,"reasoning_effort":"none","return_token_ids":true`)
	talk("tools, none chosen", hi+`,"max_tokens":1,"tool_choice":"none","tools":[{"type":"function","function":{"name":"f","description":"d","parameters":{"type":"object","properties":{}}}}],"return_token_ids":true`)
	talk("adapter", `"model":"lora-a",`+hi+`,"max_tokens":1`)
	talk("prompt_token_ids", hi+`,"max_tokens":1,"kv_transfer_params":{"prompt_token_ids":[1,2,3,4]},"return_token_ids":true`)
	talk("prompt_token_ids without messages", `"messages":[],"max_tokens":1,"kv_transfer_params":{"prompt_token_ids":[1,2,3,4]}`)
	talk("other kv_transfer_params", hi+`,"max_tokens":1,"kv_transfer_params":{"a":1}`)
	longChat := `"messages":[{"role":"user","content":"` + strings.Repeat("word ", 100) + `"}]`
	talk("a long prompt", longChat+`,"max_tokens":1`)
	talk("a hit", longChat+`,"max_tokens":1`)

	// Streams.
	const include = `,"stream":true,"stream_options":{"include_usage":true}`
	const continuous = `,"stream":true,"stream_options":{"include_usage":true,"continuous_usage_stats":true}`
	for _, s := range []struct{ name, members string }{
		{"stream", `,"stream":true`},
		{"stream, usage", include},
		{"stream, continuous usage", continuous},
		{"stream, continuous usage alone", `,"stream":true,"stream_options":{"continuous_usage_stats":true}`},
		{"stream, no options", `,"stream":true,"stream_options":null`},
		{"stream, return_token_ids", include + `,"return_token_ids":true`},
		{"stream, n", include + `,"n":2`},
		{"stream, continuous usage, n", continuous + `,"n":2`},
		{"stream, stop", include + `,"stop":["word word word"]`},
		{"stream, an answer of one token", include + `,"min_tokens":0,"stop_token_ids":[3409]`},
	} {
		text(s.name, `"prompt":"hello there","max_tokens":6`+s.members)
		talk(s.name, hi+`,"max_tokens":6`+s.members)
	}
	text("stream, echo", `"prompt":"hello there","max_tokens":4,"echo":true`+include)
	text("stream, list", `"prompt":["hello there","you"],"max_tokens":4`+continuous)
	text("stream, a hit", `"prompt":`+long+`,"max_tokens":2`+include)
	talk("stream, a hit", longChat+`,"max_tokens":2`+include)

	// Headers.
	text("request id", `"prompt":"x","max_tokens":1`, "X-Request-Id", "abc")
	talk("request id", hi+`,"max_tokens":1`, "X-Request-Id", "abc")
	talk("request id of a stream", hi+`,"max_tokens":1,"stream":true`, "X-Request-Id", "abc")
	text("request id in the body", `"prompt":"x","max_tokens":1,"request_id":"body"`)
	text("both request ids", `"prompt":"x","max_tokens":1,"request_id":"body"`, "X-Request-Id", "abc")
	text("load as text", `"prompt":"x","max_tokens":1`, "endpoint-load-metrics-format", "TEXT")
	text("load as JSON", `"prompt":"x","max_tokens":1`, "endpoint-load-metrics-format", "JSON")
	text("load in a stream", `"prompt":"x","max_tokens":1,"stream":true`, "endpoint-load-metrics-format", "JSON")
	text("rank", `"prompt":"x","max_tokens":1`, "X-data-parallel-rank", "0")
	text("rank out of range", `"prompt":"x","max_tokens":1`, "X-data-parallel-rank", "1")
	text("rank that is none", `"prompt":"x","max_tokens":1`, "X-data-parallel-rank", "x")

	// Bad requests.
	for _, s := range []struct{ name, members string }{
		{"max_tokens 0", `"max_tokens":0`},
		{"max_tokens negative", `"max_tokens":-1`},
		{"max_tokens over the context", `"max_tokens":1025`},
		{"max_tokens a text", `"max_tokens":"x"`},
		{"max_tokens a fraction", `"max_tokens":1.5`},
		{"max_tokens a list", `"max_tokens":[1]`},
		{"n 0", `"n":0,"max_tokens":1`},
		{"n negative", `"n":-1,"max_tokens":1`},
		{"n a text", `"n":"x","max_tokens":1`},
		{"min_tokens over max_tokens", `"min_tokens":3,"max_tokens":2`},
		{"min_tokens negative", `"min_tokens":-1,"max_tokens":2`},
		{"temperature negative", `"temperature":-1,"max_tokens":1`},
		{"temperature a text", `"temperature":"a","max_tokens":1`},
		{"top_p over 1", `"top_p":2,"max_tokens":1`},
		{"top_p 0", `"top_p":0,"max_tokens":1`},
		{"stop a number", `"stop":3,"max_tokens":1`},
		{"stop empty", `"stop":"","max_tokens":1`},
		{"salt empty", `"cache_salt":"","max_tokens":1`},
		{"salt a number", `"cache_salt":1,"max_tokens":1`},
		{"stream a word", `"stream":"maybe","max_tokens":1`},
		{"stream_options without stream", `"stream_options":{"include_usage":true},"max_tokens":1`},
		{"model a number", `"model":5,"max_tokens":1`},
		{"model unknown", `"model":"nope","max_tokens":1`},
		{"model empty", `"model":"","max_tokens":1`},
		{"allowed_token_ids out of the vocabulary", `"allowed_token_ids":[999999],"max_tokens":1`},
	} {
		text(s.name, `"prompt":"x",`+s.members)
		talk(s.name, hi+`,`+s.members)
	}
	talk("max_completion_tokens 0", hi+`,"max_completion_tokens":0`)
	talk("max_completion_tokens over the context", hi+`,"max_completion_tokens":1025`)
	for _, v := range []string{`""`, `[]`, `[[]]`, `["","x"]`, `[1,2,"x"]`, `{}`, `5`, `[-1]`, `[151936]`, `[[1],[151936]]`, `null`} {
		text("prompt "+v, `"max_tokens":1,"prompt":`+v)
	}
	text("no prompt", `"max_tokens":1`)
	for _, n := range []int{1023, 1024, 1025, 1030} {
		text(fmt.Sprint("prompt of ", n, " tokens"), fmt.Sprintf(`"prompt":%s,"max_tokens":2`, idList(idSpan(3000, n))))
		text(fmt.Sprint("prompt of ", n, " tokens, no limit"), fmt.Sprintf(`"prompt":%s,"max_tokens":null`, idList(idSpan(3000, n))))
	}
	words := func(n int) string { return strings.Repeat(" word", n) }
	text("a text too long", `"max_tokens":10,"prompt":"`+words(1500)+`"`)
	talk("messages too long", `"max_tokens":10,"messages":[{"role":"user","content":"`+words(1500)+`"}]`)
	text("far too many characters", `"max_tokens":10,"prompt":"`+words(60_000)+`"`)
	talk("far too many characters", `"max_tokens":10,"messages":[{"role":"user","content":"`+words(60_000)+`"}]`)
	for _, v := range []string{`[]`, `{}`, `"x"`, `[{}]`, `[{"role":"user"}]`, `[{"role":5,"content":"x"}]`, `[{"role":"nobody","content":"x"}]`, `[{"role":"user","content":5}]`, `null`} {
		talk("messages "+v, `"max_tokens":1,"messages":`+v)
	}
	talk("no messages", `"max_tokens":1`)
	talk("prompt_token_ids empty", hi+`,"max_tokens":1,"kv_transfer_params":{"prompt_token_ids":[]}`)
	talk("prompt_token_ids a text", hi+`,"max_tokens":1,"kv_transfer_params":{"prompt_token_ids":"x"}`)
	talk("prompt_token_ids out of the vocabulary", hi+`,"max_tokens":1,"kv_transfer_params":{"prompt_token_ids":[999999]}`)
	talk("prompt_token_ids without a member messages", `"max_tokens":1,"kv_transfer_params":{"prompt_token_ids":[1]}`)
	talk("continue and generate", hi+`,"max_tokens":1,"add_generation_prompt":true,"continue_final_message":true`)
	talk("tools empty", hi+`,"max_tokens":1,"tools":[]`)
	talk("tools without a parser", hi+`,"max_tokens":1,"tools":[{"type":"function","function":{"name":"f","parameters":{"type":"object","properties":{}}}}]`)
	talk("reasoning_effort unknown", hi+`,"max_tokens":1,"reasoning_effort":"huge"`)
	talk("chat_template_kwargs a list", hi+`,"max_tokens":1,"chat_template_kwargs":[]`)
	talk("chat_template", hi+`,"max_tokens":1,"chat_template":"x"`)
	for _, path := range []string{textPath, chatPath} {
		add(path+": broken JSON", path, `{`)
		add(path+": JSON cut off", path, `{"model":"qwen"`)
		add(path+": a list", path, `[]`)
		add(path+": a number", path, `5`)
		add(path+": null", path, `null`)
		add(path+": an empty object", path, `{}`)
		add(path+": no content type", path, `{}`, "Content-Type", "")
		add(path+": other content type", path, `{}`, "Content-Type", "text/plain")
		add(path+": content type with charset", path, `{}`, "Content-Type", "application/json; charset=utf-8")
		method(path+": no body", "POST", path)
	}

	// Tokens.
	for _, s := range []struct{ name, path, body string }{
		{"text", "/tokenize", `{"prompt":"hello there"}`},
		{"text, strings", "/tokenize", `{"model":"qwen","prompt":"hello there","return_token_strs":true}`},
		{"messages", "/tokenize", `{` + hi + `}`},
		{"no generation prompt", "/tokenize", `{` + hi + `,"add_generation_prompt":false}`},
		{"empty", "/tokenize", `{"prompt":""}`},
		{"no messages", "/tokenize", `{"messages":[]}`},
		{"nothing", "/tokenize", `{}`},
		{"a list", "/tokenize", `{"prompt":["a"]}`},
		{"unknown model", "/tokenize", `{"model":"nope","prompt":"x"}`},
		{"too long", "/tokenize", `{"prompt":"` + words(1500) + `"}`},
		{"ids", "/detokenize", `{"tokens":[14990,1052]}`},
		{"no ids", "/detokenize", `{"tokens":[]}`},
		{"nothing", "/detokenize", `{}`},
		{"wrong type", "/detokenize", `{"tokens":"x"}`},
		{"unknown model", "/detokenize", `{"model":"nope","tokens":[1]}`},
		{"out of the vocabulary", "/detokenize", `{"tokens":[999999]}`},
		{"messages", chatPath + "/render", `{"model":"qwen",` + hi + `,"max_tokens":3}`},
		{"no model", chatPath + "/render", `{` + hi + `}`},
		{"stream and more", chatPath + "/render", `{"model":"qwen",` + hi + `,"max_tokens":3,"stream":true,"stream_options":{"include_usage":true},"cache_salt":"s","priority":2,"n":2}`},
		{"unknown model", chatPath + "/render", `{"model":"nope",` + hi + `}`},
		{"nothing", chatPath + "/render", `{}`},
		{"max_tokens 0", chatPath + "/render", `{` + hi + `,"max_tokens":0}`},
		{"too long", chatPath + "/render", `{"messages":[{"role":"user","content":"` + words(1500) + `"}]}`},
		{"text", textPath + "/render", `{"prompt":"hello there","max_tokens":3}`},
		{"texts", textPath + "/render", `{"prompt":["hello","you there"],"max_tokens":3}`},
		{"ids", textPath + "/render", `{"prompt":[1,2,3]}`},
		{"no prompt", textPath + "/render", `{}`},
	} {
		add(s.path+": "+s.name, s.path, s.body)
	}

	// The rest.
	for _, path := range []string{"/v1/models", "/health", "/ping", "/version", "/load", "/is_sleeping", "/is_paused", "/nope", "/v1/nope", "/", "/v1/models/qwen", "/kv_event_sources",
		textPath, chatPath, "/tokenize", "/reset_prefix_cache"} {
		method("GET "+path, "GET", path)
	}
	for _, path := range []string{"/ping", "/health", "/v1/models", "/reset_prefix_cache", "/reset_prefix_cache?reset_running_requests=true", "/sleep?level=1", "/wake_up",
		"/pause?mode=keep", "/resume", "/nope"} {
		method("POST "+path, "POST", path)
	}
	method("HEAD", "HEAD", "/health")
	method("PUT", "PUT", textPath)
	for _, path := range []string{"/v1/models", textPath, "/v1/nope", "/health", "/tokenize", "/version"} {
		script = append(script, httpCase{"no key: " + path, diffCall{path: path, noKey: true, body: `{}`}})
	}
	return script
}
