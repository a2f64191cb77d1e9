package fleetsim

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strconv"
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

	loadFormat string // of the load report in the header
}

type usage struct {
	Prompt     int            `json:"prompt_tokens"`
	Total      int            `json:"total_tokens"`
	Completion int            `json:"completion_tokens"`
	Details    *promptDetails `json:"prompt_tokens_details"`
}

type promptDetails struct {
	Cached int `json:"cached_tokens"`
}

func (a *answer) usage(details bool) usage {
	var u usage
	cached := 0
	for i, c := range a.choices {
		if i%a.job.n == 0 {
			u.Prompt += len(c.r.Tokens)
			if c.begun {
				cached += c.r.Cached
			}
		}
		u.Completion += c.generated
	}
	u.Total = u.Prompt + u.Completion
	if details && !a.life.w.cfg.NoPromptDetails {
		u.Details = &promptDetails{cached}
	}
	return u
}

// advance takes in new tokens of one choice, and streams them if asked to.
func (a *answer) advance(c *choice, ids []uint32, reason string) {
	for i, id := range ids {
		c.generated++
		a.sent++
		c.begun = true
		text := a.life.w.text.token(id)
		last := ""
		if i == len(ids)-1 {
			last = reason
		}
		if a.job.stream {
			a.event(c, text, id, last)
		} else {
			c.text.WriteString(text)
			if a.job.req.ReturnTokenIDs {
				c.ids = append(c.ids, id)
			}
		}
		if a.cut > 0 && a.sent >= a.cut {
			a.flush()
			panic(http.ErrAbortHandler)
		}
	}
	if len(ids) == 0 && a.job.stream {
		a.event(c, "", 0, reason) // aborted between tokens
	}
	c.reason = reason
}

// event appends the server-sent events for one token.
func (a *answer) event(c *choice, text string, id uint32, reason string) {
	if !a.begun {
		a.begun = true
		a.w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
		a.w.WriteHeader(http.StatusOK)
		if a.job.chat {
			for _, c := range a.choices {
				a.open()
				a.buf = fmt.Appendf(a.buf, `{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]`, c.index)
				a.buf = append(a.buf, `,"prompt_token_ids":`...)
				a.buf = a.tokenIDs(a.buf, c.r.Tokens)
				a.closeEvent(0)
			}
		}
	}
	prompt := c.generated == 1 && !a.job.chat
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
		a.buf = append(a.buf, `,"stop_reason":null`...)
	}
	if !a.job.chat {
		a.buf = append(a.buf, `,"prompt_token_ids":`...)
		if prompt {
			a.buf = a.tokenIDs(a.buf, c.r.Tokens)
		} else {
			a.buf = append(a.buf, "null"...)
		}
	}
	a.buf = append(a.buf, `,"token_ids":`...)
	a.buf = a.tokenIDs(a.buf, []uint32{id})
	a.buf = append(a.buf, "}]"...)
	a.closeEvent(a.sent)
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

// closeEvent ends an event behind its choices, with the running usage if the
// request wants that: completion tokens have been sent, this event included.
func (a *answer) closeEvent(completion int) {
	if o := a.job.req.StreamOptions; o != nil && o.IncludeUsage && o.ContinuousUsageStats {
		prompt := a.usage(false).Prompt
		a.buf = fmt.Appendf(a.buf, `,"usage":{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d}`, prompt, prompt+completion, completion)
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
	if o := a.job.req.StreamOptions; o != nil && o.IncludeUsage {
		a.open()
		a.buf = append(a.buf, `],"usage":`...)
		u, err := json.Marshal(a.usage(true))
		if err == nil {
			a.buf = append(a.buf, u...)
		}
		a.buf = append(a.buf, "}\n\n"...)
	}
	a.buf = append(a.buf, "data: [DONE]\n\n"...)
	a.flush()
}

type chatMessage struct {
	Role         string  `json:"role"`
	Content      string  `json:"content"`
	Refusal      *string `json:"refusal"`
	Annotations  *string `json:"annotations"`
	Audio        *string `json:"audio"`
	FunctionCall *string `json:"function_call"`
	ToolCalls    []any   `json:"tool_calls"`
	Reasoning    *string `json:"reasoning"`
}

type chatChoice struct {
	Index        int         `json:"index"`
	Message      chatMessage `json:"message"`
	Logprobs     *string     `json:"logprobs"`
	FinishReason string      `json:"finish_reason"`
	StopReason   *string     `json:"stop_reason"`
	TokenIDs     []uint32    `json:"token_ids"`
}

type textChoice struct {
	Index          int      `json:"index"`
	Text           string   `json:"text"`
	Logprobs       *string  `json:"logprobs"`
	FinishReason   string   `json:"finish_reason"`
	StopReason     *string  `json:"stop_reason"`
	TokenIDs       []uint32 `json:"token_ids"`
	PromptLogprobs *string  `json:"prompt_logprobs"`
	PromptTokenIDs []uint32 `json:"prompt_token_ids"`
}

type response struct {
	ID                string  `json:"id"`
	Object            string  `json:"object"`
	Created           int64   `json:"created"`
	Model             string  `json:"model"`
	Choices           any     `json:"choices"`
	ServiceTier       *string `json:"service_tier"`
	SystemFingerprint *string `json:"system_fingerprint"`
	Usage             usage   `json:"usage"`
}

type chatResponse struct {
	response
	PromptLogprobs *string  `json:"prompt_logprobs"`
	PromptTokenIDs []uint32 `json:"prompt_token_ids"`
	KVTransfer     *string  `json:"kv_transfer_params"`
}

type textResponse struct {
	response
	KVTransfer *string `json:"kv_transfer_params"`
}

func (a *answer) whole() {
	base := response{ID: a.job.id, Object: a.object(false), Created: a.created, Model: a.job.model, Usage: a.usage(true)}
	a.loadHeader()
	if !a.job.chat {
		var list []textChoice
		for _, c := range a.choices {
			t := textChoice{Index: c.index, Text: c.text.String(), FinishReason: c.reason, TokenIDs: c.ids}
			if a.job.req.ReturnTokenIDs {
				t.PromptTokenIDs = c.r.Tokens
			}
			list = append(list, t)
		}
		base.Choices = list
		answerJSON(a.w, textResponse{response: base})
		return
	}
	var list []chatChoice
	for _, c := range a.choices {
		list = append(list, chatChoice{
			Index: c.index, FinishReason: c.reason, TokenIDs: c.ids,
			Message: chatMessage{Role: "assistant", Content: c.text.String(), ToolCalls: []any{}},
		})
	}
	base.Choices = list
	out := chatResponse{response: base}
	if a.job.req.ReturnTokenIDs {
		out.PromptTokenIDs = a.job.prompts[0]
	}
	answerJSON(a.w, out)
}

// loadHeader reports the engine's load in the response, if the request asked.
func (a *answer) loadHeader() {
	if a.loadFormat == "" {
		return
	}
	st, _ := a.choices[0].core.shown()
	switch a.loadFormat {
	case "TEXT":
		a.w.Header().Set("endpoint-load-metrics", fmt.Sprintf("TEXT named_metrics.kv_cache_usage_perc=%g, named_metrics.num_requests_waiting=%d", st.KVUsage, st.Waiting))
	case "JSON":
		a.w.Header().Set("endpoint-load-metrics", fmt.Sprintf(`JSON {"named_metrics":{"kv_cache_usage_perc":%g,"num_requests_waiting":%d}}`, st.KVUsage, st.Waiting))
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
