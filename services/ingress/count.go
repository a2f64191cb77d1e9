package ingress

import (
	"context"
	"encoding/json"
	"net/http"
	"slices"
	"time"

	"github.com/kinference/kinference/internal/anthropic"
	"github.com/kinference/kinference/internal/openai"
	"github.com/kinference/kinference/services/ingress/internal/meter"
	"github.com/kinference/kinference/services/ingress/internal/prompt"
	"github.com/kinference/kinference/services/ingress/internal/proxy"
)

// pathTokenize is vLLM's.
const pathTokenize = "/tokenize"

const (
	// pictureTokens is about what a picture costs, for a count that no tokenizer
	// can make.
	pictureTokens = 1500
	// estimatedHeader says that a count is an estimate.
	estimatedHeader = "X-Kinference-Estimated"
)

// counts answers what only asks how many tokens a request has: by our own
// tokenizer, else by a worker's. Nothing is routed. It is a request in limits of
// requests, and uses nothing else: no tokens are generated or charged.
func (v *server) counts(w http.ResponseWriter, r *http.Request, a *admission) {
	id := v.requestID(r)
	w.Header().Set("X-Request-Id", id)
	if r.Method != http.MethodPost {
		wrongMethod(w, "POST")
		return
	}
	x := &exchange{server: v, admission: a, w: w, r: r, id: id, unique: meter.NewID(), label: otherModel, counting: true}
	if a.path == pathCount {
		x.messages = &anthropic.Request{}
	}
	defer func() {
		x.finishUsage()
		x.settle()
	}()
	body, release, e := x.readBody()
	defer release()
	x.began = time.Now()
	if e == nil && body == nil {
		x.leave()
		return
	}
	var cancel context.CancelFunc
	x.ctx, cancel = context.WithTimeoutCause(r.Context(), x.totalTimeout(), proxy.ErrTotal)
	defer cancel()
	if e == nil {
		e = x.parseCount(body)
	}
	if e == nil {
		e = x.resolve()
	}
	if e == nil { // a worker may be asked, which fetches what is named by URL
		e = x.checkShape()
	}
	if e == nil {
		x.attributes, e = x.attributesOf()
	}
	if e == nil {
		e = x.reserve()
	}
	if e == nil {
		x.prompts = v.prompts.Make(x.ctx, &x.req, x.model.Considered)
		if x.messages != nil {
			x.countMessages()
		} else {
			e = x.tokenize()
		}
	}
	if e != nil {
		x.status = e.Status
		writeError(w, e)
		return
	}
	x.status, x.result.Committed = http.StatusOK, true
}

// parseCount reads a body of count_tokens, or of /tokenize: a chat or a prompt.
func (x *exchange) parseCount(body []byte) *openai.Error {
	if x.messages != nil {
		return x.parse(body)
	}
	if e := x.req.Parse(openai.RouteChat, body, x.MaxDepth); e == nil {
		return nil
	} else if x.req.Body.Get("messages").Given() || x.req.Body.Len() == 0 {
		return e
	}
	return x.req.Parse(openai.RouteCompletions, body, x.MaxDepth)
}

// countMessages answers a count_tokens request. Where no tokenizer can tell it
// goes by the length of the text, and a header says so.
func (x *exchange) countMessages() {
	tokens := x.inputTokens()
	if !slices.ContainsFunc(x.prompts, func(p prompt.Prompt) bool { return p.Exact() }) {
		tokens = max(tokens, prompt.Estimate(&x.req)) + pictureTokens*x.messages.Pictures
		x.w.Header().Set(estimatedHeader, "true")
	}
	writeJSON(x.w, struct {
		InputTokens int `json:"input_tokens"`
	}{tokens})
}

// tokenize answers as vLLM's route does.
func (x *exchange) tokenize() *openai.Error {
	i := slices.IndexFunc(x.prompts, func(p prompt.Prompt) bool { return p.Exact() })
	if i < 0 {
		return &openai.Error{Status: http.StatusNotImplemented, Type: openai.TypeServer, Code: "not_tokenizable", Message: "Only the model server knows the tokens of this request."}
	}
	p := &x.prompts[i]
	out := struct {
		Count       int             `json:"count"`
		MaxModelLen *int            `json:"max_model_len"`
		Tokens      []uint32        `json:"tokens"`
		TokenStrs   json.RawMessage `json:"token_strs"`
	}{Count: p.Tokens, Tokens: p.IDs}
	if n := p.Profile.MaxModelLen; n > 0 {
		out.MaxModelLen = &n
	}
	writeJSON(x.w, out)
	return nil
}
