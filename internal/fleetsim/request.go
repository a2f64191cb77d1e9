package fleetsim

import (
	"bytes"
	"cmp"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strconv"

	"github.com/kinference/kinference/internal/vllm"
)

const (
	// defaultAnswer is how long a chat answer is that nothing limits, in tokens.
	defaultAnswer = 256
	// defaultTokens is max_tokens of a completion that sets none.
	defaultTokens = 16
	// maxChoices bounds n times prompts of one request.
	maxChoices = 4096
)

const emptySalt = "Parameter 'cache_salt' must be a non-empty string if provided."

// request is the body of both generation routes. Other fields are ignored, as
// vLLM ignores what it does not know.
type request struct {
	chatFields
	Model               string          `json:"model"`
	RequestID           string          `json:"request_id"`
	Prompt              json.RawMessage `json:"prompt"`
	Stream              bool            `json:"stream"`
	StreamOptions       *streamOptions  `json:"stream_options"`
	N                   *int            `json:"n"`
	MaxTokens           *int            `json:"max_tokens"`
	MaxCompletionTokens *int            `json:"max_completion_tokens"`
	MinTokens           int             `json:"min_tokens"`
	Temperature         *float64        `json:"temperature"` // checked, no more
	TopP                *float64        `json:"top_p"`       // likewise
	Priority            int             `json:"priority"`    // likewise
	Seed                *int64          `json:"seed"`
	IgnoreEOS           bool            `json:"ignore_eos"`
	Stop                json.RawMessage `json:"stop"`
	StopTokenIDs        []int64         `json:"stop_token_ids"`
	IncludeStop         bool            `json:"include_stop_str_in_output"`
	AllowedTokenIDs     []uint32        `json:"allowed_token_ids"`
	Echo                bool            `json:"echo"` // completions only
	CacheSalt           *string         `json:"cache_salt"`
	ReturnTokenIDs      bool            `json:"return_token_ids"`
	KVTransferParams    *struct {
		PromptTokenIDs json.RawMessage `json:"prompt_token_ids"`
	} `json:"kv_transfer_params"`
}

type streamOptions struct {
	IncludeUsage         bool `json:"include_usage"`
	ContinuousUsageStats bool `json:"continuous_usage_stats"`
}

// job is a request that is fit to run.
type job struct {
	wording
	req     *request
	chat    bool
	id      string // of the response
	model   string // as the response names it
	lora    string
	prompts []prompt
	n       int
	limit   *int // max_tokens of either name
	stops   []string
	stream  bool
	rank    int // -1: any
	longest int // context length
	natural int // Config.AnswerTokens
	// vocabulary is Config.VocabSize.
	vocabulary int
}

// prompt is one of a request's prompts.
type prompt struct {
	ids  []uint32
	text string // "" if the request has ids
}

// prepare checks a request and finds its tokens.
func (l *life) prepare(r *http.Request, req *request, chat bool) (*job, *vllm.Error) {
	j := &job{wording: l.wording(), req: req, chat: chat, model: req.Model, n: 1, limit: req.MaxTokens, stream: req.Stream, rank: -1,
		longest: l.w.cfg.Profile.MaxLen(), natural: l.w.cfg.AnswerTokens,
		vocabulary: l.w.cfg.VocabSize}
	if e := j.rules(); e != nil {
		return nil, e
	}
	lora, e := l.served(req.Model)
	if e != nil {
		return nil, e
	}
	j.lora = lora
	if j.model == "" {
		j.model = l.w.cfg.Model
	}
	prefix, limit := "cmpl-", "max_tokens"
	if chat {
		prefix = "chatcmpl-"
		if req.MaxCompletionTokens != nil {
			j.limit, limit = req.MaxCompletionTokens, "max_completion_tokens"
		}
	}
	j.id = prefix + cmp.Or(r.Header.Get("X-Request-Id"), req.RequestID, randomID())
	if e := j.options(&l.w.cfg); e != nil {
		return nil, e
	}
	if e := j.tokens(l, limit); e != nil {
		return nil, e
	}
	if e := j.sampling(); e != nil {
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
	return j, nil
}

// rules checks what vLLM checks before anything else.
func (j *job) rules() *vllm.Error {
	req := j.req
	switch {
	case req.CacheSalt != nil && *req.CacheSalt == "":
		return j.rule("cache_salt", emptySalt)
	case req.StreamOptions != nil && *req.StreamOptions != (streamOptions{}) && !req.Stream:
		return j.rule("stream_options", "Stream options can only be defined when `stream=True`.")
	case j.chat && string(req.Tools) == "[]":
		return j.rule("tools", "`tools` must not be an empty array. Either provide at least one tool or omit the field entirely.")
	case j.chat && len(req.Messages) == 0:
		return j.missing("messages")
	case j.chat && j.modern() && !effort(req.ReasoningEffort):
		return j.invalid("reasoning_effort", "literal_error", "Input should be 'none', 'minimal', 'low', 'medium', 'high', 'xhigh' or 'max'")
	case j.chat && j.modern() && len(req.ChatTemplateKwargs) > 0 && req.ChatTemplateKwargs[0] != '{' && string(req.ChatTemplateKwargs) != "null":
		return j.invalid("chat_template_kwargs", "dict_type", "Input should be a valid dictionary")
	case j.chat && req.ContinueFinalMessage && req.AddGenerationPrompt != nil && *req.AddGenerationPrompt:
		return fail(vllm.BadRequest("", "Cannot set both `continue_final_message` and `add_generation_prompt` to True."))
	case !j.chat && emptyPrompt(req.Prompt):
		return j.value("prompt", "Either prompt or prompt_embeds must be provided and non-empty.")
	}
	if len(req.Stop) == 0 || string(req.Stop) == "null" {
		return nil
	}
	var one string
	if json.Unmarshal(req.Stop, &one) == nil {
		j.stops = []string{one}
	} else if json.Unmarshal(req.Stop, &j.stops) != nil {
		return j.invalid("stop", "string_type", "Input should be a valid string")
	}
	return nil
}

func effort(name string) bool {
	return name == "" || slices.Contains([]string{"none", "minimal", "low", "medium", "high", "xhigh", "max"}, name)
}

// options refuses what vLLM must be started with flags for.
func (j *job) options(c *Config) *vllm.Error {
	switch req := j.req; {
	case !j.chat || !j.modern():
	case req.ChatTemplate != nil:
		return fail(vllm.BadRequest("", "Chat template is passed with request, but --trust-request-chat-template is not set. Refused request with untrusted chat template."))
	case len(req.Tools) > 0 && string(req.Tools) != "null" && !c.AutoTools && (len(req.ToolChoice) == 0 || string(req.ToolChoice) == `"auto"`):
		return fail(vllm.BadRequest("", `"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set`))
	}
	return nil
}

func emptyPrompt(raw json.RawMessage) bool {
	return len(raw) == 0 || string(raw) == "null" || string(raw) == `""`
}

func randomID() string {
	var b [16]byte
	_, _ = rand.Read(b[:]) // never fails
	return hex.EncodeToString(b[:])
}

// role is that of a chat answer: of the last message if that is to be continued.
func (j *job) role() string {
	if j.req.AddGenerationPrompt == nil || *j.req.AddGenerationPrompt {
		return "assistant"
	}
	var messages []struct {
		Role string `json:"role"`
	}
	if json.Unmarshal(j.req.Messages, &messages) != nil || len(messages) == 0 {
		return "assistant"
	}
	return messages[len(messages)-1].Role
}

// tokens finds the prompts and checks their length. limit is the name of the
// member that limits the output.
func (j *job) tokens(l *life, limit string) (e *vllm.Error) {
	if j.modern() && j.limit != nil && *j.limit > j.longest {
		return j.value(limit, fmt.Sprintf("%s=%d cannot be greater than max_model_len=%d. Please request fewer output tokens.", limit, *j.limit, j.longest), *j.limit)
	}
	req := j.req
	param := "" // who is blamed for ids that do not exist
	switch {
	case j.chat && req.KVTransferParams != nil && req.KVTransferParams.PromptTokenIDs != nil:
		// Templating and tokenisation are skipped, but messages must be there.
		param = "kv_transfer_params.prompt_token_ids"
		var ids []uint32
		if json.Unmarshal(req.KVTransferParams.PromptTokenIDs, &ids) != nil || len(ids) == 0 {
			return j.value(param, "`kv_transfer_params['prompt_token_ids']` must be a non-empty list of non-negative integers.")
		}
		j.prompts = []prompt{{ids: ids}}
	case j.chat:
		var p prompt
		if p, e = l.w.text.chat(&req.chatFields, j.wording); e != nil {
			return e
		}
		j.prompts = []prompt{p}
	default:
		if j.prompts, e = l.w.text.prompts(req.Prompt, req.AddSpecialTokens == nil || *req.AddSpecialTokens, j.wording); e != nil {
			return e
		}
	}
	for _, p := range j.prompts {
		if e := j.fits(p, l.w.text); e != nil {
			return e
		}
		if e := j.known(p.ids, param); e != nil {
			return e
		}
	}
	return nil
}

// known checks that ids exist.
func (j *job) known(ids []uint32, param string) *vllm.Error {
	for _, id := range ids {
		if j.vocabulary == 0 || int(id) < j.vocabulary {
			continue
		}
		message := fmt.Sprintf("Token id %d is out of vocabulary", id)
		if param == "" {
			return fail(vllm.BadRequest("", message))
		}
		return j.value(param, message)
	}
	return nil
}

// fits checks the length of a prompt.
func (j *job) fits(p prompt, t *text) *vllm.Error {
	n := len(p.ids)
	if !j.modern() {
		return j.fitted(n)
	}
	if chars := len([]rune(p.text)); chars > j.longest*t.widest() {
		return fail(vllm.ContextChars(j.longest, chars, j.longest*t.widest()))
	}
	switch {
	case n == 0:
		return fail(vllm.BadRequest("", "The decoder prompt cannot be empty"))
	case n > j.longest:
		if p.text != "" {
			n = j.longest + 1 // tokenisation stops there
		}
		return fail(vllm.PromptLength(j.longest, n))
	}
	return nil
}

// fitted is the rule of versions that refused a prompt and an output which do
// not fit together. 0.32 shortens the output.
func (j *job) fitted(n int) *vllm.Error {
	output := 1
	if j.limit != nil {
		output = *j.limit
	}
	switch {
	case n == 0:
		return fail(vllm.BadRequest("", "The decoder prompt cannot be empty"))
	case n+output > j.longest:
		if j.limit == nil {
			output = 0
		}
		return fail(vllm.ContextLength(j.longest, output, n))
	}
	return nil
}

// sampling checks the parameters of sampling.
func (j *job) sampling() *vllm.Error {
	req := j.req
	if req.N != nil {
		j.n = *req.N
	}
	bad := func(format string, args ...any) *vllm.Error {
		return fail(vllm.BadRequest("", fmt.Sprintf(format, args...)))
	}
	switch {
	case j.n < 1:
		return bad("n must be at least 1, got %d.", j.n)
	case len(j.prompts)*j.n > maxChoices:
		return bad("n must be at most %d, got %d.", maxChoices, j.n)
	case req.Temperature != nil && *req.Temperature < 0:
		return j.value("temperature", "temperature must be non-negative, got "+python(*req.Temperature)+".", python(*req.Temperature))
	case req.Temperature != nil && *req.Temperature > 2:
		return j.value("temperature", "temperature must be in [0, 2], got "+python(*req.Temperature)+".", python(*req.Temperature))
	case req.TopP != nil && (*req.TopP <= 0 || *req.TopP > 1):
		return j.value("top_p", "top_p must be in (0, 1], got "+python(*req.TopP)+".", python(*req.TopP))
	}
	for _, p := range j.prompts {
		most := j.maxTokens(len(p.ids))
		switch {
		case most < 1 && j.echoOnly():
		case most < 1:
			return j.value("max_tokens", fmt.Sprintf("max_tokens must be at least 1, got %d.", most), most)
		case req.MinTokens < 0:
			return bad("min_tokens must be greater than or equal to 0, got %d.", req.MinTokens)
		case req.MinTokens > most:
			return bad("min_tokens must be less than or equal to max_tokens=%d, got %d.", most, req.MinTokens)
		}
	}
	for _, s := range j.stops {
		if s == "" {
			return bad("stop cannot contain an empty string.")
		}
	}
	for _, id := range req.AllowedTokenIDs {
		if j.vocabulary > 0 && int(id) >= j.vocabulary {
			return j.value("allowed_token_ids", "allowed_token_ids contains out-of-vocab token id!", req.AllowedTokenIDs)
		}
	}
	return nil
}

// python writes a float as Python does.
func python(f float64) string {
	b := strconv.AppendFloat(nil, f, 'g', -1, 64)
	if !bytes.ContainsAny(b, ".e") {
		b = append(b, ".0"...)
	}
	return string(b)
}

// echoOnly tells that only the prompt is asked for. vLLM generates a token even
// so, and does not show it.
func (j *job) echoOnly() bool { return !j.chat && j.req.Echo && j.limit != nil && *j.limit == 0 }

// maxTokens is the most that may be generated after a prompt of that length.
func (j *job) maxTokens(prompt int) int {
	most := j.longest - prompt
	switch {
	case j.limit != nil:
		return min(most, *j.limit)
	case !j.chat:
		return min(most, defaultTokens)
	}
	return most
}

// length is how many tokens the answer has.
func (j *job) length(prompt int) int {
	most := j.maxTokens(prompt)
	switch {
	case j.echoOnly():
		return 1
	case j.req.IgnoreEOS:
		return most
	case j.natural > 0:
		return min(most, max(j.natural, j.req.MinTokens))
	case j.limit == nil && j.chat:
		return min(most, max(defaultAnswer, j.req.MinTokens))
	}
	return most
}
