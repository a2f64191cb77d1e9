package fleetsim

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strconv"

	"github.com/kinference/kinference/internal/fleetsim/engine"
)

// answer writes the response to one request.
type answer struct {
	life    *life
	job     *job
	choices []*choice
	w       http.ResponseWriter
	created int64
	cut     int    // tokens after which the connection breaks; 0: never
	sent    int    // tokens written or kept so far
	buf     []byte // events to be flushed
	begun   bool

	// told is the choice whose cached tokens usage tells: vLLM does not add those
	// of several prompts up. A stream tells those of its first event, a whole
	// answer those of the last prompt, and among its choices of the last to end.
	told *choice

	loadFormat string // of the load report in the header
}

// advance takes in new tokens of one choice, and streams them if asked to.
func (a *answer) advance(c *choice, ids []uint32, reason string) {
	if reason != "" && c.ending.reason != nil && c.generated+len(ids) == len(c.r.Output) {
		reason = engine.Stop // even if it was the last token that was allowed
	} else if reason != "" {
		c.ending.reason = nil
	}
	if a.told == nil && a.job.stream || reason != "" && !a.job.stream && c.index/a.job.n == len(a.job.prompts)-1 {
		a.told = c
	}
	for i, id := range ids {
		c.generated++
		a.sent++
		c.text.WriteString(a.life.w.text.token(id))
		last := ""
		if i == len(ids)-1 {
			last = reason
		}
		if a.job.stream {
			a.event(c, ids[i:i+1], last)
		} else if a.job.req.ReturnTokenIDs {
			c.ids = append(c.ids, id)
		}
		if a.cut > 0 && a.sent >= a.cut {
			a.flush()
			panic(http.ErrAbortHandler)
		}
	}
	if len(ids) == 0 && a.job.stream {
		a.event(c, nil, reason) // aborted between tokens
	}
	c.reason = reason
}

// shown is the part of a choice's text that may be shown by now.
func (c *choice) shown(ended bool) string {
	text := c.text.String()
	if !ended {
		return text[:max(0, len(text)-c.ending.hold)]
	}
	if c.ending.text >= 0 && c.ending.reason != nil {
		return text[:c.ending.text]
	}
	return text
}

// delta is the text for a choice's next event.
func (a *answer) delta(c *choice, ended bool) string {
	text := c.shown(ended)
	if len(text) <= c.sent {
		return ""
	}
	text, c.sent = text[c.sent:], len(text)
	return text
}

// echo is the prompt as an answer repeats it.
func (a *answer) echo(c *choice) string {
	switch {
	case a.job.chat || !a.job.req.Echo || a.job.req.ReturnTokenIDs:
		return ""
	case c.prompt.text == "":
		return a.life.w.text.tokenizer.Decode(c.prompt.ids)
	}
	return c.prompt.text
}

// event appends the server-sent event for one token, and those that open the
// stream before the first.
func (a *answer) event(c *choice, ids []uint32, reason string) {
	if !a.begun {
		a.begun = true
		a.w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
		a.w.WriteHeader(http.StatusOK)
		if a.job.chat {
			role := a.job.role()
			for _, c := range a.choices {
				a.open()
				a.buf = fmt.Appendf(a.buf, `{"index":%d,"delta":{"role":%q,"content":""},"logprobs":null,"finish_reason":null}]`, c.index, role)
				a.buf = append(a.buf, `,"prompt_token_ids":`...)
				a.buf = a.tokenIDs(a.buf, c.r.Tokens)
				if a.job.modern() {
					a.buf = append(a.buf, `,"prompt_text":null`...)
				}
				a.closeEvent(c, 0)
			}
		}
	}
	text := a.delta(c, reason != "")
	first := c.generated == 1
	if a.job.echoOnly() {
		text = ""
	}
	if first {
		text = a.echo(c) + text
	}
	a.open()
	a.buf = append(a.buf, `{"index":`...)
	a.buf = strconv.AppendInt(a.buf, int64(c.index), 10)
	if a.job.chat {
		a.buf = append(a.buf, `,"delta":{"content":`...)
		a.buf = appendString(a.buf, text)
		a.buf = append(a.buf, '}')
	} else {
		a.buf = append(a.buf, `,"text":`...)
		a.buf = appendString(a.buf, text)
	}
	a.buf = append(a.buf, `,"logprobs":null,"finish_reason":`...)
	if reason == "" {
		a.buf = append(a.buf, "null"...)
	} else {
		a.buf = appendString(a.buf, reason)
	}
	if reason != "" || !a.job.chat {
		a.buf = append(a.buf, `,"stop_reason":`...)
		a.buf = a.stopReason(a.buf, c, reason)
	}
	if !a.job.chat {
		a.buf = append(a.buf, `,"prompt_token_ids":`...)
		switch {
		case first && a.job.req.Echo:
			a.buf = appendIDs(a.buf, c.r.Tokens)
		case first:
			a.buf = a.tokenIDs(a.buf, c.r.Tokens)
		default:
			a.buf = append(a.buf, "null"...)
		}
	}
	a.buf = append(a.buf, `,"token_ids":`...)
	a.buf = a.tokenIDs(a.buf, ids)
	a.buf = append(a.buf, "}]"...)
	if reason != "" && a.job.modern() && !a.includeUsage() {
		a.buf = append(a.buf, `,"system_fingerprint":"`+fingerprint+`"`...)
	}
	a.closeEvent(c, c.generated)
}

func (a *answer) stopReason(dst []byte, c *choice, reason string) []byte {
	switch r := c.ending.reason.(type) {
	case string:
		if reason != "" {
			return appendString(dst, r)
		}
	case uint32:
		if reason != "" {
			return strconv.AppendUint(dst, uint64(r), 10)
		}
	}
	return append(dst, "null"...)
}

func (a *answer) includeUsage() bool {
	o := a.job.req.StreamOptions
	return o != nil && o.IncludeUsage
}

// open starts an event up to the list of choices.
func (a *answer) open() {
	a.buf = append(a.buf, `data: {"id":`...)
	a.buf = appendString(a.buf, a.job.id)
	a.buf = append(a.buf, `,"object":"`...)
	a.buf = append(a.buf, a.object(true)...)
	a.buf = append(a.buf, `","created":`...)
	a.buf = strconv.AppendInt(a.buf, a.created, 10)
	a.buf = append(a.buf, `,"model":`...)
	a.buf = appendString(a.buf, a.job.model)
	a.buf = append(a.buf, `,"choices":[`...)
}

// closeEvent ends an event of choice c, with the running usage if the request
// wants that: completion tokens of the choice, this event included.
func (a *answer) closeEvent(c *choice, completion int) {
	if a.includeUsage() && a.job.req.StreamOptions.ContinuousUsageStats {
		n := len(c.prompt.ids)
		a.buf = fmt.Appendf(a.buf, `,"usage":{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d`, n, n+completion, completion)
		if a.job.chat && a.job.modern() {
			a.buf = append(a.buf, `,"completion_tokens_details":null`...)
		}
		a.buf = append(a.buf, '}')
	}
	a.buf = append(a.buf, "}\n\n"...)
}

func (a *answer) object(chunk bool) string {
	switch {
	case !a.job.chat:
		return "text_completion"
	case chunk:
		return "chat.completion.chunk"
	}
	return "chat.completion"
}

func (a *answer) tokenIDs(dst []byte, ids []uint32) []byte {
	if !a.job.req.ReturnTokenIDs {
		return append(dst, "null"...)
	}
	return appendIDs(dst, ids)
}

func appendIDs(dst []byte, ids []uint32) []byte {
	dst = append(dst, '[')
	for i, id := range ids {
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = strconv.AppendUint(dst, uint64(id), 10)
	}
	return append(dst, ']')
}

// flush sends what has been appended. A client that is gone shows in the
// request's context.
func (a *answer) flush() {
	if len(a.buf) == 0 {
		return
	}
	_, _ = a.w.Write(a.buf)
	a.buf = a.buf[:0]
	_ = http.NewResponseController(a.w).Flush()
}

// finish ends the stream, or sends the whole response.
func (a *answer) finish() {
	if !a.job.stream {
		a.whole()
		return
	}
	if a.includeUsage() {
		a.open()
		a.buf = append(a.buf, `],"usage":`...)
		a.buf = a.usage(a.buf)
		if a.job.modern() {
			a.buf = append(a.buf, `,"system_fingerprint":"`+fingerprint+`"`...)
		}
		a.buf = append(a.buf, "}\n\n"...)
	}
	a.buf = append(a.buf, "data: [DONE]\n\n"...)
	a.flush()
}

// usage appends what the whole request used. Since 0.32 a stream leaves out
// what is null.
func (a *answer) usage(dst []byte) []byte {
	prompt, completion := 0, 0
	for i, c := range a.choices {
		if i%a.job.n == 0 {
			prompt += len(c.prompt.ids)
		}
		completion += c.generated
	}
	dst = fmt.Appendf(dst, `{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d`, prompt, prompt+completion, completion)
	sparse := a.job.modern() && a.job.stream
	switch {
	case !a.life.w.cfg.NoPromptDetails:
		cached, created := 0, 0
		if a.told != nil {
			cached = a.told.r.Cached
			size := a.life.w.cfg.Profile.BlockSize
			created = max(0, len(a.told.prompt.ids)/size*size-cached)
		}
		dst = fmt.Appendf(dst, `,"prompt_tokens_details":{"cached_tokens":%d`, cached)
		switch {
		case a.job.modern() && a.job.chat:
			dst = fmt.Appendf(dst, `,"created_cache_tokens":%d`, created)
		case a.job.modern() && !sparse:
			dst = append(dst, `,"created_cache_tokens":null`...)
		}
		if a.job.modern() && !sparse {
			dst = append(dst, `,"multimodal_tokens":null`...)
		}
		dst = append(dst, '}')
	case !sparse:
		dst = append(dst, `,"prompt_tokens_details":null`...)
	}
	if a.job.modern() && !sparse {
		dst = append(dst, `,"completion_tokens_details":null`...)
	}
	return append(dst, '}')
}

// fingerprint names the version and, in vLLM, a digest of its configuration.
const fingerprint = "vllm-0.32.0-00000000"

type chatMessage struct {
	Role         string  `json:"role"`
	Content      string  `json:"content"`
	Refusal      *string `json:"refusal"`
	Annotations  *string `json:"annotations"`
	Audio        *string `json:"audio"`
	FunctionCall *string `json:"function_call"`
	*toolCalls
	Reasoning *string `json:"reasoning"`
}

// toolCalls is left out where it is empty since 0.32.
type toolCalls struct {
	ToolCalls []any `json:"tool_calls"`
}

// routed is a member that 0.32 adds to choices, more are those that it adds to
// responses. All are null here.
type routed struct {
	RoutedExperts *string `json:"routed_experts"`
}

type more struct {
	ECTransfer *string `json:"ec_transfer_params"`
	Metrics    *string `json:"metrics"`
}

type chatMore struct {
	more
	PromptText *string `json:"prompt_text"`
}

type chatChoice struct {
	Index        int         `json:"index"`
	Message      chatMessage `json:"message"`
	Logprobs     *string     `json:"logprobs"`
	FinishReason string      `json:"finish_reason"`
	StopReason   any         `json:"stop_reason"`
	TokenIDs     []uint32    `json:"token_ids"`
	*routed
}

type textChoice struct {
	Index          int      `json:"index"`
	Text           string   `json:"text"`
	Logprobs       *string  `json:"logprobs"`
	FinishReason   string   `json:"finish_reason"`
	StopReason     any      `json:"stop_reason"`
	TokenIDs       []uint32 `json:"token_ids"`
	PromptLogprobs *string  `json:"prompt_logprobs"`
	PromptTokenIDs []uint32 `json:"prompt_token_ids"`
	*routed
}

type response struct {
	ID                string          `json:"id"`
	Object            string          `json:"object"`
	Created           int64           `json:"created"`
	Model             string          `json:"model"`
	Choices           any             `json:"choices"`
	ServiceTier       *string         `json:"service_tier"`
	SystemFingerprint *string         `json:"system_fingerprint"`
	Usage             json.RawMessage `json:"usage"`
}

type chatResponse struct {
	response
	PromptLogprobs *string  `json:"prompt_logprobs"`
	PromptTokenIDs []uint32 `json:"prompt_token_ids"`
	KVTransfer     *string  `json:"kv_transfer_params"`
	*chatMore
}

type textResponse struct {
	response
	KVTransfer *string `json:"kv_transfer_params"`
	*more
}

func (a *answer) whole() {
	base := response{ID: a.job.id, Object: a.object(false), Created: a.created, Model: a.job.model, Usage: a.usage(nil)}
	var experts *routed
	calls := &toolCalls{[]any{}}
	if a.job.modern() {
		f := fingerprint
		base.SystemFingerprint, experts, calls = &f, new(routed), nil
	}
	a.loadHeader()
	if !a.job.chat {
		var list []textChoice
		for _, c := range a.choices {
			t := textChoice{Index: c.index, FinishReason: c.reason, StopReason: c.ending.reason, TokenIDs: c.ids, routed: experts, Text: a.echo(c)}
			if !a.job.echoOnly() {
				t.Text += c.shown(true)
			}
			if a.job.req.ReturnTokenIDs {
				t.PromptTokenIDs = c.prompt.ids
			}
			list = append(list, t)
		}
		base.Choices = list
		out := textResponse{response: base}
		if a.job.modern() {
			out.more = new(more)
		}
		answerJSON(a.w, out)
		return
	}
	var list []chatChoice
	for _, c := range a.choices {
		list = append(list, chatChoice{
			Index: c.index, FinishReason: c.reason, StopReason: c.ending.reason, TokenIDs: c.ids, routed: experts,
			Message: chatMessage{Role: a.job.role(), Content: c.shown(true), toolCalls: calls},
		})
	}
	base.Choices = list
	out := chatResponse{response: base}
	if a.job.modern() {
		out.chatMore = new(chatMore)
	}
	if a.job.req.ReturnTokenIDs {
		out.PromptTokenIDs = a.job.prompts[0].ids
	}
	answerJSON(a.w, out)
}

// loadHeader reports the engine's load in the response, if the request asked.
func (a *answer) loadHeader() {
	if a.loadFormat == "" {
		return
	}
	st, _ := a.choices[0].core.shown()
	usage, waiting := python(st.KVUsage), python(float64(st.Waiting))
	switch a.loadFormat {
	case "TEXT":
		a.w.Header().Set("endpoint-load-metrics", "TEXT named_metrics.num_requests_waiting="+waiting+", named_metrics.kv_cache_usage_perc="+usage)
	case "JSON":
		a.w.Header().Set("endpoint-load-metrics", `JSON {"named_metrics": {"num_requests_waiting": `+waiting+`, "kv_cache_usage_perc": `+usage+`}}`)
	}
}

// appendString appends s as JSON. Answers and names are plain, so the library
// is seldom needed.
func appendString(dst []byte, s string) []byte {
	for _, c := range []byte(s) {
		if c < ' ' || c == '"' || c == '\\' || c >= 0x7f {
			b, err := json.Marshal(s)
			if err != nil {
				return append(dst, `""`...)
			}
			return append(dst, b...)
		}
	}
	dst = append(dst, '"')
	dst = append(dst, s...)
	return append(dst, '"')
}
