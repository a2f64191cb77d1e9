package ingress

import (
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/kinference/kinference/internal/anthropic"
	"github.com/kinference/kinference/internal/daemon"
	"github.com/kinference/kinference/internal/openai"
	"github.com/kinference/kinference/internal/responses"
	"github.com/kinference/kinference/services/ingress/internal/catalog"
	"github.com/kinference/kinference/services/ingress/internal/limits"
)

// parse reads the body. One of the Messages or the Responses API becomes a chat body: from here
// on the request is a chat completion like any other.
func (x *exchange) parse(body []byte) *openai.Error {
	if x.responses != nil {
		if e := x.responses.Parse(body, responses.Settings{Depth: x.MaxDepth, ImageURLs: x.media.urls()}); e != nil {
			return e
		}
		x.dropped(x.responses.Dropped)
		return x.req.Parse(openai.RouteChat, x.responses.AppendChat(make([]byte, 0, len(body)+256)), x.MaxDepth+8)
	}
	if x.messages == nil {
		return x.req.Parse(x.req.Route, body, x.MaxDepth)
	}
	if e := x.messages.Parse(body, anthropic.Settings{Depth: x.MaxDepth, Count: x.path == pathCount, ImageURLs: x.media.urls()}); e != nil {
		return e
	}
	x.dropped(x.messages.Dropped)
	chat := x.messages.AppendChat(make([]byte, 0, len(body)+len(body)/8+256), anthropic.Worker)
	return x.req.Parse(openai.RouteChat, chat, x.MaxDepth+8) // a schema lies deeper there
}

// dropped says which members of a body have no effect here. Names are short and
// few; values are not told.
func (x *exchange) dropped(names []string) {
	if len(names) > 0 {
		daemon.Logger(x.server.ctx).Debug("members of the request without effect", "request_id", x.id, "members", names)
	}
}

// begin gets the client's side ready for the answer.
func (x *exchange) begin() {
	e, ok := x.w.(*edge)
	if !ok {
		return
	}
	id := strings.ReplaceAll(x.unique, "-", "")
	switch {
	case x.messages != nil:
		a := anthropic.Answer{ID: "msg_" + id, Model: x.req.Model, Input: x.inputTokens(), HideThinking: x.messages.HideThinking}
		e.speak(&speech{
			func() translator { return anthropic.NewStream(a) },
			func(dst, completion []byte) ([]byte, error) { return anthropic.AppendMessage(dst, completion, a) },
		}, x.req.Stream)
	case x.responses != nil:
		a := responses.Answer{ID: "resp_" + id, Model: x.req.Model, Created: x.began.Unix(), Input: x.inputTokens(), Echo: x.responses.Echo()}
		e.speak(&speech{
			func() translator { return responses.NewStream(a) },
			func(dst, completion []byte) ([]byte, error) { return responses.AppendResponse(dst, completion, a) },
		}, x.req.Stream)
	}
	if x.req.Stream {
		e.keepAlive(x.PingInterval)
	}
}

// inputTokens is how long the prompt is, as far as we know.
func (x *exchange) inputTokens() int {
	tokens := openai.Unknown
	for i := range x.prompts {
		if p := &x.prompts[i]; p.Exact() {
			return p.Tokens
		}
		tokens = max(tokens, x.prompts[i].Tokens)
	}
	return tokens
}

// levels is the form in which the client learns what its limits have left.
func (x *exchange) levels() limits.Dialect {
	if x.messages != nil {
		return limits.Anthropic{}
	}
	return limits.OpenAI{}
}

// contextError is the error for a prompt that leaves no room.
func (x *exchange) contextError(limit, tokens int) *openai.Error {
	if x.messages != nil {
		return anthropic.ContextError(limit, tokens, x.req.MaxTokens)
	}
	param := x.req.Route.PromptParam()
	if x.responses != nil {
		param = "input"
	}
	return openai.ContextLength(param, limit, tokens, x.req.MaxTokens)
}

// messagesError puts an error about the prompt's length into the words that
// clients of the Messages API look for, whoever found it.
func messagesError(e *openai.Error) *openai.Error {
	if e.Code != openai.CodeContextLength || strings.HasPrefix(e.Message, "prompt is too long") || strings.HasPrefix(e.Message, "input length") {
		return e
	}
	out := *e
	out.Message = "prompt is too long: " + e.Message
	return &out
}

// modelInfo is the Messages API's model object.
type modelInfo struct {
	Type        string `json:"type"`
	ID          string `json:"id"`
	DisplayName string `json:"display_name"`
	CreatedAt   string `json:"created_at"`
}

// defaultPage is how many models a page has unless the client says otherwise.
const defaultPage, maxPage = 20, 1000

// modelPage answers GET /v1/models for clients of the Messages API. m is one
// model or nil, all are those that the caller may use, by name.
func (v *server) modelPage(w http.ResponseWriter, query url.Values, m *catalog.Model, all []*catalog.Model) {
	created := time.Unix(v.started, 0).UTC().Format(time.RFC3339)
	info := func(m *catalog.Model) modelInfo { return modelInfo{"model", m.Name, m.Name, created} }
	if m != nil {
		writeJSON(w, info(m))
		return
	}
	limit := defaultPage
	if text := query.Get("limit"); text != "" {
		n, err := strconv.Atoi(text)
		if err != nil || n < 1 || n > maxPage {
			writeError(w, openai.Invalid("limit", "", "limit: Input should be from 1 to 1000"))
			return
		}
		limit = n
	}
	at := func(id string) int { return slices.IndexFunc(all, func(m *catalog.Model) bool { return m.Name == id }) }
	from, to := 0, len(all)
	more := false
	if after := query.Get("after_id"); after != "" {
		from = at(after) + 1
	}
	if before := query.Get("before_id"); before != "" {
		if to = at(before); to < 0 {
			to = len(all)
		}
		if more = to-limit > from; more {
			from = to - limit
		}
	} else if more = from+limit < to; more {
		to = from + limit
	}
	page := struct {
		Data    []modelInfo `json:"data"`
		HasMore bool        `json:"has_more"`
		FirstID *string     `json:"first_id"`
		LastID  *string     `json:"last_id"`
	}{Data: []modelInfo{}, HasMore: more}
	for _, m := range all[from:max(from, to)] {
		page.Data = append(page.Data, info(m))
	}
	if n := len(page.Data); n > 0 {
		page.FirstID, page.LastID = &page.Data[0].ID, &page.Data[n-1].ID
	}
	writeJSON(w, page)
}
