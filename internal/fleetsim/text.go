package fleetsim

import (
	"encoding/json"
	"errors"
	"fmt"
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
	widest    func() int // bytes of the longest token
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
	return &text{t, tokens.NewPrefixCache(t, tokenCache), c, newWords(t), sync.OnceValue(func() int { return widest(t) })}
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
	ToolChoice           json.RawMessage `json:"tool_choice"`
	ChatTemplate         *string         `json:"chat_template"`
	AddSpecialTokens     *bool           `json:"add_special_tokens"`
}

// chat renders and tokenises messages.
func (t *text) chat(f *chatFields, v wording) (p prompt, e *vllm.Error) {
	if t.template == nil {
		return p, fail(vllm.BadRequest("", "As of transformers v4.44, default chat template is no longer allowed, so you must provide a chat template if the tokenizer does not define one."))
	}
	if len(f.Messages) == 0 {
		return p, v.missing("messages")
	}
	if string(f.Messages) == "null" {
		return p, fail(vllm.BadRequest("", "'NoneType' object is not iterable"))
	}
	if p.text, e = t.render(f); e == nil {
		p.ids = t.encode(p.text, f.AddSpecialTokens != nil && *f.AddSpecialTokens)
		return p, nil
	}
	// The template's complaint comes after those of vLLM's validation.
	if at, bad := misshapen(f.Messages); bad && v.modern() {
		return p, v.invalid("messages"+at, "list_type", "Input should be a list of messages")
	}
	return p, e
}

// misshapen finds the first message that is none: at is its place.
func misshapen(raw json.RawMessage) (at string, bad bool) {
	var list []json.RawMessage
	if json.Unmarshal(raw, &list) != nil {
		return "", true
	}
	for i, x := range list {
		var m struct {
			Role    *string `json:"role"`
			Content any     `json:"content"`
		}
		if json.Unmarshal(x, &m) != nil || m.Role == nil {
			return fmt.Sprint(".", i), true
		}
		switch m.Content.(type) {
		case nil, string, []any:
		default:
			return fmt.Sprint(".", i), true
		}
	}
	return "", false
}

func (t *text) render(f *chatFields) (string, *vllm.Error) {
	if string(f.Messages) == "[]" {
		return "", fail(vllm.BadRequest("", "Cannot apply chat template to an empty conversation. Provide at least one message."))
	}
	prompt, err := t.template.Render(chat.Request{
		Messages: f.Messages, Tools: f.Tools, Documents: f.Documents,
		AddGenerationPrompt:  f.AddGenerationPrompt == nil || *f.AddGenerationPrompt,
		ContinueFinalMessage: f.ContinueFinalMessage,
		Kwargs:               f.ChatTemplateKwargs, ReasoningEffort: f.ReasoningEffort,
	})
	var client *chat.Error
	switch {
	case err == nil:
		return prompt, nil
	case errors.As(err, &client):
		return "", fail(vllm.BadRequest("", client.Message))
	case errors.Is(err, chat.ErrMedia):
		return "", fail(vllm.BadRequest("", "The model is not a multimodal model"))
	}
	return "", fail(vllm.BadRequest("", err.Error()))
}

// prompts reads the four forms of a completion prompt.
func (t *text) prompts(raw json.RawMessage, special bool, v wording) (out []prompt, e *vllm.Error) {
	const most = 1024
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
		return nil, v.invalid("prompt"+fault(raw), "string_type", "Input should be a string, a list of strings, a list of token ids or a list of those")
	}
	switch n := max(len(texts), len(lists)); {
	case string(raw) == "[]" && v.modern():
		return nil, fail(vllm.BadRequest("", "You must pass at least one prompt"))
	case n > most:
		return nil, v.value("prompt", fmt.Sprintf("prompt list length %d exceeds the maximum allowed count of %d.", n, most))
	}
	for _, s := range texts {
		out = append(out, prompt{t.encode(s, special), s})
	}
	for _, l := range lists {
		out = append(out, prompt{ids: l})
	}
	return out, nil
}

// fault finds the first entry of a list that is no token id.
func fault(raw json.RawMessage) string {
	var list []json.RawMessage
	if json.Unmarshal(raw, &list) != nil {
		return ""
	}
	for i, x := range list {
		var id uint32
		if json.Unmarshal(x, &id) != nil {
			return fmt.Sprint(".", i)
		}
	}
	return ""
}

// token returns the text of one generated token.
func (t *text) token(id uint32) string {
	if t.tokenizer.IsSpecial(id) {
		return ""
	}
	return strings.ToValidUTF8(t.tokenizer.Token(id), "\ufffd")
}

// widest is the length of the longest token.
func widest(t *tokens.Tokenizer) (n int) {
	for id := range uint32(t.Size()) {
		n = max(n, len(t.Token(id)))
	}
	return n
}
