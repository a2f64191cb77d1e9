package fleetsim

import (
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"net/http"
	"strconv"

	"github.com/kinference/kinference/internal/vllm"
)

// defaultAnswer is how long an answer is that nothing limits, in tokens.
const defaultAnswer = 256

// maxChoices bounds n times prompts of one request.
const maxChoices = 4096

// request is the body of both generation routes. Other fields are ignored, as
// vLLM ignores what it does not know.
type request struct {
	chatFields
	Model               string          `json:"model"`
	Prompt              json.RawMessage `json:"prompt"`
	Stream              bool            `json:"stream"`
	StreamOptions       *streamOptions  `json:"stream_options"`
	N                   *int            `json:"n"`
	MaxTokens           *int            `json:"max_tokens"`
	MaxCompletionTokens *int            `json:"max_completion_tokens"`
	Seed                *int64          `json:"seed"`
	IgnoreEOS           bool            `json:"ignore_eos"`
	CacheSalt           *string         `json:"cache_salt"`
	ReturnTokenIDs      bool            `json:"return_token_ids"`
	KVTransferParams    *struct {
		PromptTokenIDs []uint32 `json:"prompt_token_ids"`
	} `json:"kv_transfer_params"`
}

type streamOptions struct {
	IncludeUsage         bool `json:"include_usage"`
	ContinuousUsageStats bool `json:"continuous_usage_stats"`
}

// job is a request that is fit to run.
type job struct {
	req     *request
	chat    bool
	id      string // of the response
	model   string // as the response names it
	lora    string
	prompts [][]uint32
	n       int
	limit   *int // max_tokens of either name
	stream  bool
	rank    int // -1: any
	longest int // context length
	natural int // Config.AnswerTokens
}

// prepare checks a request and finds its tokens.
func (l *life) prepare(r *http.Request, req *request, chat bool) (*job, *vllm.Error) {
	lora, e := l.served(req.Model)
	if e != nil {
		return nil, e
	}
	j := &job{req: req, chat: chat, model: req.Model, lora: lora, n: 1, limit: req.MaxTokens, stream: req.Stream, rank: -1,
		longest: l.w.cfg.Profile.MaxLen(), natural: l.w.cfg.AnswerTokens}
	if j.model == "" {
		j.model = l.w.cfg.Model
	}
	prefix := "cmpl-"
	if chat {
		prefix = "chatcmpl-"
		if req.MaxCompletionTokens != nil {
			j.limit = req.MaxCompletionTokens
		}
	}
	name := r.Header.Get("X-Request-Id")
	if name == "" {
		name = randomID()
	}
	j.id = prefix + name
	if e := j.check(); e != nil {
		return nil, e
	}
	if v := r.Header.Get("X-data-parallel-rank"); v != "" {
		if rank, err := strconv.Atoi(v); err == nil {
			if rank < 0 || rank >= len(l.cores) {
				return nil, fail(vllm.BadRequest("", fmt.Sprintf("data_parallel_rank %d is out of range [0, %d).", rank, len(l.cores))))
			}
			j.rank = rank
		}
	}
	switch {
	case chat && req.KVTransferParams != nil && len(req.KVTransferParams.PromptTokenIDs) > 0:
		// Templating and tokenisation are skipped, but messages must be there.
		if len(req.Messages) == 0 {
			return nil, fail(missing("messages"))
		}
		j.prompts = [][]uint32{req.KVTransferParams.PromptTokenIDs}
	case chat:
		ids, e := l.w.text.chat(&req.chatFields)
		if e != nil {
			return nil, e
		}
		j.prompts = [][]uint32{ids}
	default:
		if j.prompts, e = l.w.text.prompts(req.Prompt, req.AddSpecialTokens == nil || *req.AddSpecialTokens); e != nil {
			return nil, e
		}
	}
	if len(j.prompts)*j.n > maxChoices {
		return nil, fail(vllm.BadRequest("n", "Too many choices in one request."))
	}
	for _, p := range j.prompts {
		if e := j.fits(len(p)); e != nil {
			return nil, e
		}
	}
	return j, nil
}

// check validates what needs no tokens.
func (j *job) check() *vllm.Error {
	req := j.req
	if req.N != nil {
		j.n = *req.N
	}
	switch {
	case j.n < 1:
		return fail(vllm.BadRequest("n", fmt.Sprintf("n must be at least 1, got %d.", j.n)))
	case j.limit != nil && *j.limit < 1:
		return fail(vllm.BadRequest("max_tokens", fmt.Sprintf("max_tokens must be at least 1, got %d.", *j.limit)))
	case req.CacheSalt != nil && *req.CacheSalt == "":
		return fail(vllm.InvalidBody("Value error, Parameter 'cache_salt' must be a non-empty string if provided."))
	case req.StreamOptions != nil && !req.Stream:
		return fail(vllm.InvalidBody("Value error, Stream options can only be defined when `stream=True`."))
	}
	return nil
}

// fits checks the length of a prompt.
func (j *job) fits(prompt int) *vllm.Error {
	output := 1
	if j.limit != nil {
		output = *j.limit
	}
	switch {
	case prompt == 0:
		return fail(vllm.BadRequest("", "The decoder prompt cannot be empty"))
	case prompt+output > j.longest:
		if j.limit == nil {
			output = 0
		}
		return fail(vllm.ContextLength(j.longest, output, prompt))
	}
	return nil
}

// maxTokens is the most that may be generated after a prompt of that length.
func (j *job) maxTokens(prompt int) int {
	if j.limit != nil {
		return *j.limit
	}
	return j.longest - prompt
}

// length is how many tokens the answer has.
func (j *job) length(prompt int) int {
	most := j.maxTokens(prompt)
	switch {
	case j.req.IgnoreEOS:
		return most
	case j.natural > 0:
		return min(most, j.natural)
	case j.limit == nil:
		return min(most, defaultAnswer)
	}
	return most
}

func randomID() string {
	var b [16]byte
	_, _ = rand.Read(b[:]) // never fails
	return hex.EncodeToString(b[:])
}
