package fleetsim

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"

	"github.com/kinference/kinference/internal/vllm"
)

func (l *life) tokenize(w http.ResponseWriter, r *http.Request) {
	var req struct {
		chatFields
		Model           string          `json:"model"`
		Prompt          json.RawMessage `json:"prompt"`
		ReturnTokenStrs bool            `json:"return_token_strs"`
	}
	v := l.wording()
	if e := v.body(w, r, &req); e != nil {
		writeError(w, *e)
		return
	}
	var text string
	switch {
	case req.Messages != nil:
	case req.Prompt == nil:
		writeError(w, *v.missing("prompt"))
		return
	case json.Unmarshal(req.Prompt, &text) != nil:
		writeError(w, *v.invalid("prompt", "string_type", "Input should be a valid string"))
		return
	}
	if _, e := l.served(req.Model); e != nil {
		writeError(w, *e)
		return
	}
	var ids []uint32
	if req.Messages == nil {
		ids = l.w.text.encode(text, req.AddSpecialTokens == nil || *req.AddSpecialTokens)
	} else {
		// This route never learned these two, so its ids may differ from chat's.
		req.ReasoningEffort, req.Documents = "", nil
		p, e := l.w.text.chat(&req.chatFields, v)
		if e != nil {
			writeError(w, *e)
			return
		}
		ids = p.ids
	}
	out := struct {
		Count       int      `json:"count"`
		MaxModelLen int      `json:"max_model_len"`
		Tokens      []uint32 `json:"tokens"`
		TokenStrs   []string `json:"token_strs"`
	}{len(ids), l.w.cfg.Profile.MaxLen(), notNil(ids), nil}
	if req.ReturnTokenStrs {
		out.TokenStrs = []string{}
		for _, id := range ids {
			out.TokenStrs = append(out.TokenStrs, strings.ToValidUTF8(l.w.text.tokenizer.Token(id), "\ufffd"))
		}
	}
	answerJSON(w, out)
}

func notNil(ids []uint32) []uint32 {
	if ids == nil {
		return []uint32{}
	}
	return ids
}

func (l *life) detokenize(w http.ResponseWriter, r *http.Request) {
	var req struct {
		Model  string   `json:"model"`
		Tokens []uint32 `json:"tokens"`
	}
	v := l.wording()
	e := v.body(w, r, &req)
	if e == nil && req.Tokens == nil {
		e = v.missing("tokens")
	}
	if e != nil {
		writeError(w, *e)
		return
	}
	if _, e := l.served(req.Model); e != nil {
		writeError(w, *e)
		return
	}
	answerJSON(w, map[string]string{"prompt": l.w.text.tokenizer.Decode(req.Tokens)})
}

// generateRequest is what the render routes return: the body of
// /inference/v1/generate. What 0.32 adds to it is null.
type generateRequest struct {
	RequestID      string         `json:"request_id"`
	TokenIDs       []uint32       `json:"token_ids"`
	Features       any            `json:"features"`
	SamplingParams map[string]any `json:"sampling_params"` // few of them
	Model          *string        `json:"model"`
	Stream         bool           `json:"stream"`
	StreamOptions  *streamOptions `json:"stream_options"`
	CacheSalt      *string        `json:"cache_salt"`
	Priority       int            `json:"priority"`
	KVTransfer     any            `json:"kv_transfer_params"`
	*generateMore
}

type generateMore struct {
	ContentParts    any    `json:"content_parts"`
	ECTransfer      any    `json:"ec_transfer_params"`
	OutputMode      string `json:"output_mode"`
	ReasoningEnded  any    `json:"reasoning_ended"`
	ReasoningParser any    `json:"reasoning_parser_kwargs"`
	ReturnTokenIDs  any    `json:"return_token_ids"`
	TokenOffsets    any    `json:"token_offsets"`
}

func (l *life) renderChat(w http.ResponseWriter, r *http.Request) {
	if j := l.render(w, r, true); j != nil {
		answerJSON(w, j.generate(j.prompts[0].ids, j.id))
	}
}

func (l *life) renderCompletions(w http.ResponseWriter, r *http.Request) {
	j := l.render(w, r, false)
	if j == nil {
		return
	}
	out := []generateRequest{}
	for i, p := range j.prompts {
		id := j.id
		if j.modern() && len(j.prompts) > 1 {
			id = fmt.Sprint(id, "-", i)
		}
		out = append(out, j.generate(p.ids, id))
	}
	answerJSON(w, out)
}

// render prepares a request without running it, and answers nil if it is bad.
func (l *life) render(w http.ResponseWriter, r *http.Request, chat bool) *job {
	if v := l.wording(); v.modern() && !l.w.cfg.ScaleOut {
		writeError(w, vllm.Error{
			Message: "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable them.",
			Type:    "PermissionDeniedError", Code: http.StatusForbidden,
		})
		return nil
	}
	var req request
	e := l.wording().body(w, r, &req)
	var j *job
	if e == nil {
		j, e = l.prepare(r, &req, chat)
	}
	if e != nil {
		writeError(w, *e)
		return nil
	}
	return j
}

func (j *job) generate(ids []uint32, id string) generateRequest {
	out := generateRequest{
		RequestID: id, TokenIDs: ids, Model: &j.model, Stream: j.stream, StreamOptions: j.req.StreamOptions, CacheSalt: j.req.CacheSalt, Priority: j.req.Priority,
		SamplingParams: map[string]any{},
	}
	// Defaults are left out.
	if most := j.maxTokens(len(ids)); most != defaultTokens {
		out.SamplingParams["max_tokens"] = most
	}
	if j.n > 1 {
		out.SamplingParams["n"] = j.n
	}
	if j.modern() {
		out.generateMore = &generateMore{OutputMode: "tokens"}
		if j.req.Model == "" {
			out.Model = nil
		}
	}
	return out
}
