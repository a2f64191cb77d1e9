package clients

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"strings"
	"sync"
	"testing"
)

// scriptedEngine is a worker as clients need it for all features: a simulated one,
// with answers of its own for chats whose last user message names a script.
// It follows vLLM's form of chat completions and refuses what vLLM refuses.
type scriptedEngine struct {
	t       *testing.T
	server  *httptest.Server
	forward *httputil.ReverseProxy

	mu     sync.Mutex
	failed map[string]bool // by session: its first try was refused
	left   int             // requests whose client went away
}

func newEngine(t *testing.T, behind string) *scriptedEngine {
	target, err := url.Parse(behind)
	if err != nil {
		t.Fatal(err)
	}
	e := &scriptedEngine{t: t, forward: httputil.NewSingleHostReverseProxy(target), failed: map[string]bool{}}
	e.forward.FlushInterval = -1
	e.server = httptest.NewServer(e)
	t.Cleanup(e.server.Close)
	return e
}

func (e *scriptedEngine) abandoned() int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.left
}

// chat is the part of a body that scripts look at.
type chat struct {
	Model    string
	Messages []struct {
		Role      string
		Content   json.RawMessage
		Reasoning string
		Calls     []struct {
			ID       string
			Function struct{ Name, Arguments string }
		} `json:"tool_calls"`
		CallID string `json:"tool_call_id"`
	}
	Stream   bool
	N        int
	Stop     json.RawMessage
	Logprobs bool
	Tools    []json.RawMessage
	Choice   json.RawMessage `json:"tool_choice"`
	Parallel *bool           `json:"parallel_tool_calls"`
	Format   *struct {
		Type   string
		Schema struct {
			Schema json.RawMessage
		} `json:"json_schema"`
	} `json:"response_format"`
	Options *struct {
		Usage      bool `json:"include_usage"`
		Continuous bool `json:"continuous_usage_stats"`
	} `json:"stream_options"`
	Kwargs map[string]any `json:"chat_template_kwargs"`
}

// text is a message's text, and the URL of its first image.
func text(content json.RawMessage) (text, image string) {
	if json.Unmarshal(content, &text) == nil {
		return text, ""
	}
	var parts []struct {
		Type, Text string
		Image      struct{ URL string } `json:"image_url"`
	}
	_ = json.Unmarshal(content, &parts)
	for _, p := range parts {
		text += p.Text
		if p.Type == "image_url" && image == "" {
			image = p.Image.URL
		}
	}
	return text, image
}

const script = "script: "

// step is one delta of an answer: its members, and of which choice.
type step struct {
	index   int
	members string
}

// reply is a scripted answer: the deltas of its stream, and the message that
// they make.
type reply struct {
	steps    []step
	messages []string // one for each choice
	finish   string
	stop     string // matched stop sequence
	logprobs string
}

func (e *scriptedEngine) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return
	}
	r.Body = io.NopCloser(bytes.NewReader(body))
	if r.URL.Path == "/v1/embeddings" {
		embed(w, body)
		return
	}
	var c chat
	if r.URL.Path != "/v1/chat/completions" || json.Unmarshal(body, &c) != nil {
		e.forward.ServeHTTP(w, r)
		return
	}
	said, image := "", ""
	for _, m := range c.Messages {
		if m.Role == "user" {
			said, image = text(m.Content)
		}
	}
	_, said, ok := strings.Cut(said, script)
	if !ok {
		e.forward.ServeHTTP(w, r)
		return
	}
	name, session, _ := strings.Cut(said, " ")
	if name == "slow" {
		e.slow(w, r, c)
		return
	}
	e.mu.Lock()
	first := name == "retry" && !e.failed[session]
	e.failed[session] = e.failed[session] || first
	e.mu.Unlock()
	if first {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(http.StatusServiceUnavailable)
		_, _ = io.WriteString(w, `{"error":{"message":"busy","type":"ServiceUnavailable","param":null,"code":503}}`)
		return
	}
	a, fault := play(name, &c, image)
	if fault != "" {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(http.StatusBadRequest)
		_ = json.NewEncoder(w).Encode(map[string]any{"error": map[string]any{"message": fault, "type": "BadRequestError", "param": nil, "code": 400}})
		return
	}
	if c.Stream {
		a.stream(w, &c)
		return
	}
	a.whole(w, &c)
}

// embed answers with the vectors 1, 0.5 and 2, 0.5, in base64 if asked to.
func embed(w http.ResponseWriter, body []byte) {
	var in struct {
		Model  string
		Input  []string
		Format string `json:"encoding_format"`
	}
	if json.Unmarshal(body, &in) != nil || len(in.Input) != 2 {
		w.WriteHeader(http.StatusBadRequest)
		return
	}
	first, second := `[1,0.5]`, `[2,0.5]`
	if in.Format == "base64" {
		first, second = `"AACAPwAAAD8="`, `"AAAAQAAAAD8="`
	}
	w.Header().Set("Content-Type", "application/json")
	fmt.Fprintf(w, `{"id":"embd-1","object":"list","created":1,"model":%q,"data":[{"index":0,"object":"embedding","embedding":%s},{"index":1,"object":"embedding","embedding":%s}],"usage":{"prompt_tokens":4,"total_tokens":4,"completion_tokens":0,"prompt_tokens_details":null}}`,
		in.Model, first, second)
}

func content(s string) string { b, _ := json.Marshal(s); return `"content":` + string(b) }

func plain(texts ...string) reply {
	r := reply{finish: "stop"}
	all := strings.Join(texts, "")
	for _, s := range texts {
		r.steps = append(r.steps, step{members: content(s)})
	}
	r.messages = []string{content(all)}
	return r
}

const (
	weatherParis = `{"city": "Paris", "days": [1, 2]}`
	weatherRome  = `{"city": "Rome \"eternal\" \u2028"}`
)

// call is a piece of a tool call.
func call(index int, id, name, arguments string) step {
	head := ""
	if id != "" {
		head = fmt.Sprintf(`"id":%q,"type":"function",`, id)
		name = fmt.Sprintf(`"name":%q,`, name)
	}
	args, _ := json.Marshal(arguments)
	return step{members: fmt.Sprintf(`"tool_calls":[{"index":%d,%s"function":{%s"arguments":%s}}]`, index, head, name, args)}
}

func calls(list ...string) string {
	for i, args := range list {
		b, _ := json.Marshal(args)
		list[i] = fmt.Sprintf(`{"id":"functions.weather:%d","type":"function","function":{"name":"weather","arguments":%s}}`, i, b)
	}
	return `"content":null,"tool_calls":[` + strings.Join(list, ",") + `]`
}

// play makes the answer of a script. fault is what the engine refuses it with.
func play(name string, c *chat, image string) (a reply, fault string) {
	last := c.Messages[len(c.Messages)-1]
	switch name {
	case "chat", "retry":
		return plain("Hello ", "from data: [DONE]\n", "é漢😀."), ""
	case "tools", "parallel":
		if len(c.Tools) != 1 || !bytes.Contains(c.Tools[0], []byte(`"weather"`)) {
			return a, "no tool weather"
		}
		if last.Role == "tool" {
			seen := 0
			for _, m := range c.Messages {
				for _, k := range m.Calls {
					if k.Function.Name != "weather" || !strings.HasPrefix(k.ID, "functions.weather:") || !json.Valid([]byte(k.Function.Arguments)) {
						return a, "the history has another call: " + k.ID
					}
					seen++
				}
				if m.Role == "tool" {
					if got, _ := text(m.Content); got != "sunny" || m.CallID != fmt.Sprintf("functions.weather:%d", seen-1) && seen == 1 {
						return a, "the history has another result: " + m.CallID
					}
				}
			}
			return plain("It is ", "sunny."), ""
		}
		a = reply{finish: "tool_calls", messages: []string{calls(weatherParis)}}
		a.steps = []step{call(0, "functions.weather:0", "weather", ""), call(0, "", "", weatherParis[:9]), call(0, "", "", weatherParis[9:])}
		if name == "parallel" {
			if c.Parallel != nil && !*c.Parallel {
				return a, "parallel calls are off"
			}
			a.messages = []string{calls(weatherParis, weatherRome)}
			a.steps = []step{call(0, "functions.weather:0", "weather", ""), call(0, "", "", weatherParis[:9]), call(1, "functions.weather:1", "weather", weatherRome[:5]),
				call(0, "", "", weatherParis[9:]), call(1, "", "", weatherRome[5:])}
		}
		return a, ""
	case "schema":
		if c.Format == nil || c.Format.Type != "json_schema" || !bytes.Contains(c.Format.Schema.Schema, []byte(`"answer"`)) {
			return a, "no schema"
		}
		return plain(`{"answer"`, `: 42}`), ""
	case "logprobs":
		if !c.Logprobs {
			return a, "no logprobs asked for"
		}
		a = plain("Yes")
		a.logprobs = `{"content":[{"token":"Yes","logprob":-0.25,"bytes":[89,101,115],"top_logprobs":[]}]}`
		return a, ""
	case "n":
		if c.N != 2 {
			return a, "n is not 2"
		}
		return reply{finish: "stop", steps: []step{{0, content("first")}, {1, content("second")}}, messages: []string{content("first"), content("second")}}, ""
	case "stop":
		if !bytes.Contains(c.Stop, []byte(`"three"`)) {
			return a, "no stop sequence"
		}
		a = plain("one ", "two ")
		a.stop = "three"
		return a, ""
	case "vision":
		kind, _, _ := strings.Cut(image, ",")
		return plain(kind), ""
	case "think":
		a = plain("The answer is 4.")
		a.steps = append([]step{{members: `"reasoning":"Two and "`}, {members: `"reasoning":"two."`}}, a.steps...)
		a.messages[0] += `,"reasoning":"Two and two."`
		for _, m := range c.Messages { // a second turn brings it back
			if m.Role == "assistant" && m.Reasoning == "Two and two." {
				return plain("As I said: 4."), ""
			}
		}
		return a, ""
	}
	return a, "no script " + name
}

const usage = `"usage":{"prompt_tokens":100,"completion_tokens":7,"total_tokens":107,"prompt_tokens_details":{"cached_tokens":64}}`

func (a *reply) end() string {
	stop := "null"
	if a.stop != "" {
		stop = fmt.Sprintf("%q", a.stop)
	}
	return fmt.Sprintf(`"finish_reason":%q,"stop_reason":%s`, a.finish, stop)
}

func (a *reply) logs() string {
	if a.logprobs == "" {
		return "null"
	}
	return a.logprobs
}

func (a *reply) whole(w http.ResponseWriter, c *chat) {
	var choices []string
	for i, m := range a.messages {
		choices = append(choices, fmt.Sprintf(`{"index":%d,"message":{"role":"assistant",%s,"refusal":null},"logprobs":%s,%s}`, i, m, a.logs(), a.end()))
	}
	w.Header().Set("Content-Type", "application/json")
	fmt.Fprintf(w, `{"id":"chatcmpl-9","object":"chat.completion","created":1,"model":%q,"choices":[%s],%s}`, c.Model, strings.Join(choices, ","), usage)
}

func (a *reply) stream(w http.ResponseWriter, c *chat) {
	w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
	n := 0
	send := func(choices string) {
		fmt.Fprintf(w, `data: {"id":"chatcmpl-9","object":"chat.completion.chunk","created":1,"model":%q,"choices":[%s]`, c.Model, choices)
		if c.Options != nil && c.Options.Usage && c.Options.Continuous && choices != "" {
			fmt.Fprintf(w, `,"usage":{"prompt_tokens":100,"completion_tokens":%d,"total_tokens":%d}`, n, 100+n)
		}
		if choices == "" {
			_, _ = io.WriteString(w, `,`+usage)
		}
		_, _ = io.WriteString(w, "}\n\n")
		_ = http.NewResponseController(w).Flush()
	}
	for i := range a.messages {
		send(fmt.Sprintf(`{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}`, i))
	}
	for _, s := range a.steps {
		n++
		send(fmt.Sprintf(`{"index":%d,"delta":{%s},"logprobs":%s,"finish_reason":null}`, s.index, s.members, a.logs()))
	}
	for i := range a.messages {
		send(fmt.Sprintf(`{"index":%d,"delta":{},"logprobs":null,%s}`, i, a.end()))
	}
	if c.Options != nil && c.Options.Usage {
		send("")
	}
	_, _ = io.WriteString(w, "data: [DONE]\n\n")
}

// slow answers without end until it is left.
func (e *scriptedEngine) slow(w http.ResponseWriter, r *http.Request, c chat) {
	w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
	if c.Stream {
		for _, s := range []string{`"role":"assistant","content":""`, content("and on ")} {
			fmt.Fprintf(w, `data: {"id":"chatcmpl-9","object":"chat.completion.chunk","created":1,"model":%q,"choices":[{"index":0,"delta":{%s},"finish_reason":null}]}`+"\n\n", c.Model, s)
		}
		_ = http.NewResponseController(w).Flush()
	}
	<-r.Context().Done()
	e.mu.Lock()
	e.left++
	e.mu.Unlock()
}
