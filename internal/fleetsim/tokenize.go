package fleetsim

import (
	"net/http"
	"strings"

	"github.com/kinference/kinference/internal/vllm"
)

func (l *life) tokenize(w http.ResponseWriter, r *http.Request) {
	var req struct {
		chatFields
		Model           string  `json:"model"`
		Prompt          *string `json:"prompt"`
		ReturnTokenStrs bool    `json:"return_token_strs"`
	}
	if e := body(w, r, &req); e != nil {
		writeError(w, *e)
		return
	}
	if _, e := l.served(req.Model); e != nil {
		writeError(w, *e)
		return
	}
	var ids []uint32
	if req.Prompt != nil && req.Messages == nil {
		ids = l.w.text.encode(*req.Prompt, req.AddSpecialTokens == nil || *req.AddSpecialTokens)
	} else {
		// This route never learned these two, so its ids may differ from chat's.
		req.ReasoningEffort, req.Documents = "", nil
		var e *vllm.Error
		if ids, e = l.w.text.chat(&req.chatFields); e != nil {
			writeError(w, *e)
			return
		}
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
	if e := body(w, r, &req); e != nil {
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
// /inference/v1/generate.
type generateRequest struct {
	RequestID      string         `json:"request_id"`
	TokenIDs       []uint32       `json:"token_ids"`
	Features       any            `json:"features"`
	SamplingParams map[string]any `json:"sampling_params"`
	Model          string         `json:"model"`
	Stream         bool           `json:"stream"`
	StreamOptions  *streamOptions `json:"stream_options"`
	CacheSalt      *string        `json:"cache_salt"`
	Priority       int            `json:"priority"`
	KVTransfer     any            `json:"kv_transfer_params"`
}

func (l *life) renderChat(w http.ResponseWriter, r *http.Request) {
	if j := l.render(w, r, true); j != nil {
		answerJSON(w, j.generate(j.prompts[0], j.id))
	}
}

func (l *life) renderCompletions(w http.ResponseWriter, r *http.Request) {
	j := l.render(w, r, false)
	if j == nil {
		return
	}
	out := []generateRequest{}
	for _, p := range j.prompts {
		out = append(out, j.generate(p, j.id))
	}
	answerJSON(w, out)
}

// render prepares a request without running it, and answers nil if it is bad.
func (l *life) render(w http.ResponseWriter, r *http.Request, chat bool) *job {
	var req request
	e := body(w, r, &req)
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
	return generateRequest{
		RequestID: id, TokenIDs: ids, Model: j.model, Stream: j.stream, StreamOptions: j.req.StreamOptions, CacheSalt: j.req.CacheSalt,
		SamplingParams: map[string]any{"n": j.n, "max_tokens": j.maxTokens(len(ids)), "ignore_eos": j.req.IgnoreEOS},
	}
}
