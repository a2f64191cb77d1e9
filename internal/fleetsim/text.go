package fleetsim

import (
	"encoding/json"
	"errors"
	"strings"
	"sync"

	"github.com/kinference/kinference/internal/chat"
	"github.com/kinference/kinference/internal/fleetsim/model"
	"github.com/kinference/kinference/internal/tokens"
	"github.com/kinference/kinference/internal/vllm"
)

// tokenCache bounds a worker's memory of prompts that it has tokenised.
const tokenCache = 64 << 20

// text turns requests into tokens and tokens into text. Safe for concurrent use.
type text struct {
	tokenizer *tokens.Tokenizer
	cache     *tokens.PrefixCache
	template  *chat.Template // nil: no chat
	words     words
}

// simulated is the embedded model's, made once: many workers share it.
var simulated = sync.OnceValues(func() (*text, error) {
	dir, err := model.Dir()
	if err != nil {
		return nil, err
	}
	t, err := tokens.Load(dir)
	if err != nil {
		return nil, err
	}
	c, err := chat.Load(dir)
	if err != nil {
		return nil, err
	}
	return newText(t, c), nil
})

func newText(t *tokens.Tokenizer, c *chat.Template) *text {
	return &text{t, tokens.NewPrefixCache(t, tokenCache), c, newWords(t)}
}

func (t *text) encode(s string, special bool) []uint32 {
	ids, _ := t.cache.Encode(s, special)
	return ids
}

// chatFields are the fields of chat, render and tokenize requests that decide
// the prompt.
type chatFields struct {
	Messages             json.RawMessage `json:"messages"`
	Tools                json.RawMessage `json:"tools"`
	Documents            json.RawMessage `json:"documents"`
	AddGenerationPrompt  *bool           `json:"add_generation_prompt"`
	ContinueFinalMessage bool            `json:"continue_final_message"`
	ChatTemplateKwargs   json.RawMessage `json:"chat_template_kwargs"`
	ReasoningEffort      string          `json:"reasoning_effort"`
	AddSpecialTokens     *bool           `json:"add_special_tokens"`
}

// chat renders and tokenises messages.
func (t *text) chat(f *chatFields) ([]uint32, *vllm.Error) {
	if t.template == nil {
		return nil, fail(vllm.BadRequest("", "As of transformers v4.44, default chat template is no longer allowed, so you must provide a chat template if the tokenizer does not define one."))
	}
	if len(f.Messages) == 0 || string(f.Messages) == "null" {
		return nil, fail(missing("messages"))
	}
	prompt, err := t.template.Render(chat.Request{
		Messages: f.Messages, Tools: f.Tools, Documents: f.Documents,
		AddGenerationPrompt:  f.AddGenerationPrompt == nil || *f.AddGenerationPrompt,
		ContinueFinalMessage: f.ContinueFinalMessage,
		Kwargs:               f.ChatTemplateKwargs, ReasoningEffort: f.ReasoningEffort,
	})
	if err != nil {
		var client *chat.Error
		if errors.As(err, &client) {
			return nil, fail(vllm.BadRequest("", client.Message))
		}
		if errors.Is(err, chat.ErrMedia) {
			return nil, fail(vllm.BadRequest("", "The model is not a multimodal model"))
		}
		return nil, fail(vllm.BadRequest("", err.Error()))
	}
	return t.encode(prompt, f.AddSpecialTokens != nil && *f.AddSpecialTokens), nil
}

// prompts reads the four forms of a completion prompt.
func (t *text) prompts(raw json.RawMessage, special bool) ([][]uint32, *vllm.Error) {
	const most = 1024
	bad := func() ([][]uint32, *vllm.Error) {
		return nil, fail(vllm.InvalidBody("[{'type': 'string_type', 'loc': ('body', 'prompt'), 'msg': 'Input should be a string, a list of strings, a list of token ids or a list of those'}]"))
	}
	if len(raw) == 0 || string(raw) == "null" {
		return nil, fail(vllm.BadRequest("", "Either prompt or prompt_embeds must be provided and non-empty."))
	}
	// A list that turns out to be of another kind leaves junk behind: each kind
	// has its own variable.
	var (
		one   string
		many  []string
		ids   []uint32
		lists [][]uint32
		texts []string
	)
	switch {
	case json.Unmarshal(raw, &one) == nil:
		texts = []string{one}
	case json.Unmarshal(raw, &ids) == nil:
		lists = [][]uint32{ids}
	case json.Unmarshal(raw, &many) == nil:
		texts = many
	case json.Unmarshal(raw, &lists) == nil:
	default:
		return bad()
	}
	if len(texts) > most || len(lists) > most {
		return nil, fail(vllm.BadRequest("prompt", "Too many prompts in one request."))
	}
	for _, s := range texts {
		lists = append(lists, t.encode(s, special))
	}
	if len(lists) == 0 {
		return bad()
	}
	return lists, nil
}

// token returns the text of one generated token.
func (t *text) token(id uint32) string {
	if t.tokenizer.IsSpecial(id) {
		return ""
	}
	return strings.ToValidUTF8(t.tokenizer.Token(id), "\ufffd")
}

func fail(e vllm.Error) *vllm.Error { return &e }

// missing is FastAPI's complaint about an absent field, as vLLM passes it on.
func missing(field string) vllm.Error {
	return vllm.InvalidBody("[{'type': 'missing', 'loc': ('body', '" + field + "'), 'msg': 'Field required'}]")
}
