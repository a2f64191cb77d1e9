package chat

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/ardanlabs/jinja"
)

// Request is what a chat completion request gives to the template. Raw fields are JSON as the client sent it; an empty one is
// absent.
type Request struct {
	Messages json.RawMessage // the list of messages; required
	Tools    json.RawMessage // the list of tools
	// AddGenerationPrompt asks for the start of the assistant's turn at the end: true in a chat completion unless the client says no.
	AddGenerationPrompt bool
	// ContinueFinalMessage cuts the prompt off behind the last message's content, which the model goes on with. An error together
	// with AddGenerationPrompt.
	ContinueFinalMessage bool
	Kwargs               json.RawMessage // chat_template_kwargs, over the operator's defaults
	ReasoningEffort      string          // reasoning_effort
	Documents            json.RawMessage // documents
}

// Error is a request that vLLM would answer with status 400. Its text is for the client; it may quote what the template says, which
// no template is known to fill with a prompt's text.
type Error struct{ Message string }

// Error returns the message.
func (e *Error) Error() string { return e.Message }

func clientError(format string, args ...any) error { return &Error{fmt.Sprintf(format, args...)} }

// ErrMedia is returned for messages with images, audio or video: their tokens are known to the engine only.
var ErrMedia = errors.New("chat: messages have parts that are not text")

// ErrNoTemplate is returned by Load for a model folder without a chat template. That a model needs none of it (gpt-oss is rendered by
// vLLM's Harmony encoder) does not make its prompts knowable here.
var ErrNoTemplate = errors.New("chat: model has no chat template")

// maxOutput bounds a rendered prompt, in bytes. No engine takes a longer one: it is about ten million tokens.
const maxOutput = 64 << 20

// Template is a model's chat template. It is immutable and safe for concurrent use.
type Template struct {
	standard *compiled
	toolUse  *compiled // used for requests with tools; nil: standard is
	special  map[string]string
}

// compiled is one Jinja template with what vLLM reads off its source.
type compiled struct {
	template  *jinja.Template
	parts     bool // it wants message content as a list of parts
	developer bool // it knows the developer role
}

// Load reads the chat template of the model in folder dir: chat_template.jinja, and else chat_template of tokenizer_config.json, which
// may be a string or a list of named templates (default and tool_use). It returns ErrNoTemplate if there is neither.
func Load(dir string) (*Template, error) {
	var config struct {
		ChatTemplate json.RawMessage `json:"chat_template"`
		specialTokens
	}
	path := filepath.Join(dir, "tokenizer_config.json")
	data, err := os.ReadFile(path)
	if err == nil {
		err = json.Unmarshal(data, &config)
	} else if errors.Is(err, os.ErrNotExist) {
		err = nil
	}
	if err != nil {
		return nil, fmt.Errorf("load chat template: %s: %w", path, err)
	}
	sources := make(map[string]string)
	if len(config.ChatTemplate) > 0 {
		if sources, err = namedTemplates(config.ChatTemplate); err != nil {
			return nil, fmt.Errorf("load chat template: %s: %w", path, err)
		}
	}
	for name, file := range map[string]string{"default": "chat_template.jinja", "tool_use": "additional_chat_templates/tool_use.jinja"} {
		data, err := os.ReadFile(filepath.Join(dir, file))
		switch {
		case err == nil:
			sources[name] = string(data)
		case !errors.Is(err, os.ErrNotExist):
			return nil, fmt.Errorf("load chat template: %w", err)
		}
	}
	if sources["default"] == "" && sources["tool_use"] == "" {
		return nil, fmt.Errorf("%s: %w", dir, ErrNoTemplate)
	}
	t, err := newTemplate(sources["default"], sources["tool_use"], config.all())
	if err != nil {
		return nil, fmt.Errorf("load chat template: %s: %w", dir, err)
	}
	return t, nil
}

// Parse compiles a template given as text. special holds the special tokens that it may print by name (bos_token, eos_token).
func Parse(source string, special map[string]string) (*Template, error) {
	return newTemplate(source, "", special)
}

func newTemplate(standard, toolUse string, special map[string]string) (*Template, error) {
	t := &Template{special: special}
	for _, c := range []struct {
		source string
		into   **compiled
	}{{standard, &t.standard}, {toolUse, &t.toolUse}} {
		if c.source == "" {
			continue
		}
		parts, err := segments(c.source)
		if err != nil {
			return nil, fmt.Errorf("compile chat template: %w", err)
		}
		template, err := jinja.Compile(rewrite(parts))
		if err != nil {
			return nil, fmt.Errorf("compile chat template: %w", err)
		}
		*c.into = &compiled{
			template:  template,
			parts:     loopsOverContent(parts),
			developer: strings.Contains(c.source, `'developer'`) || strings.Contains(c.source, `"developer"`),
		}
	}
	return t, nil
}

// namedTemplates reads the two forms of chat_template in tokenizer_config.json.
func namedTemplates(data json.RawMessage) (map[string]string, error) {
	var one *string
	if err := json.Unmarshal(data, &one); err == nil {
		if one == nil {
			return map[string]string{}, nil
		}
		return map[string]string{"default": *one}, nil
	}
	var list []struct{ Name, Template string }
	if err := json.Unmarshal(data, &list); err != nil {
		return nil, fmt.Errorf("chat_template is neither text nor a list of named templates")
	}
	named := make(map[string]string)
	for _, t := range list {
		named[t.Name] = t.Template
	}
	return named, nil
}

// specialTokens are the special tokens that transformers gives to a template.
type specialTokens struct {
	BOS  tokenName `json:"bos_token"`
	EOS  tokenName `json:"eos_token"`
	UNK  tokenName `json:"unk_token"`
	PAD  tokenName `json:"pad_token"`
	SEP  tokenName `json:"sep_token"`
	CLS  tokenName `json:"cls_token"`
	MASK tokenName `json:"mask_token"`
}

func (s *specialTokens) all() map[string]string {
	m := make(map[string]string)
	for name, token := range map[string]tokenName{"bos_token": s.BOS, "eos_token": s.EOS, "unk_token": s.UNK, "pad_token": s.PAD,
		"sep_token": s.SEP, "cls_token": s.CLS, "mask_token": s.MASK} {
		if token != "" {
			m[name] = string(token)
		}
	}
	return m
}

// tokenName is a token in tokenizer_config.json: a string, an object with content, or null.
type tokenName string

// UnmarshalJSON reads any of the forms.
func (n *tokenName) UnmarshalJSON(data []byte) error {
	if len(data) > 0 && data[0] == '{' {
		var o struct {
			Content string `json:"content"`
		}
		if err := json.Unmarshal(data, &o); err != nil {
			return err
		}
		*n = tokenName(o.Content)
		return nil
	}
	return json.Unmarshal(data, (*string)(n))
}

// Render returns the prompt text of a request. Errors are *Error for what the client must change, ErrMedia, or a fault of the
// template.
func (t *Template) Render(req Request) (prompt string, err error) {
	if req.AddGenerationPrompt && req.ContinueFinalMessage {
		return "", clientError("Cannot set both `continue_final_message` and `add_generation_prompt` to True.")
	}
	vars, err := t.variables(&req)
	if err != nil {
		return "", err
	}
	c := t.standard
	if t.toolUse != nil && (vars["tools"].IsList() || c == nil) {
		c = t.toolUse
	}
	list, err := decode(req.Messages)
	if err != nil {
		return "", clientError("messages: %s", err)
	}
	messages, err := normalise(list, c)
	if err != nil {
		return "", err
	}
	vars["messages"] = jinja.NewList(messages)

	defer func() {
		if p := recover(); p != nil { // a fault of the template or the library must not take the service down
			prompt, err = "", fmt.Errorf("chat: template panicked: %v", p)
		}
	}()
	prompt, err = c.template.RenderValues(vars)
	if err != nil {
		return "", clientError("%s", err)
	}
	if len(prompt) > maxOutput {
		return "", clientError("rendered prompt of %d bytes is over the limit of %d", len(prompt), maxOutput)
	}
	if req.ContinueFinalMessage {
		return continueFinal(prompt, messages)
	}
	return prompt, nil
}

// filters are the ones that rewrite puts in place of the library's, and print for what {{ }} prints.
var filters = map[string]jinja.Value{
	"tojson": jinja.NewCallable("tojson", tojson),
	"map":    jinja.NewCallable("map", mapFilter),
	"trim":   jinja.NewCallable("trim", trim),
	"string": jinja.NewCallable("string", asString),
	"print":  jinja.NewCallable("print", asString),
}

// variables returns the template's variables other than messages: special tokens, then chat_template_kwargs, then what the request
// says itself.
func (t *Template) variables(req *Request) (map[string]jinja.Value, error) {
	vars := make(map[string]jinja.Value, 16)
	for name, token := range t.special {
		vars[name] = jinja.NewString(token)
	}
	for name, filter := range filters {
		vars[ours+name] = filter
	}
	vars["tools"], vars["documents"] = jinja.None(), jinja.None()
	if len(req.Kwargs) > 0 {
		kwargs, err := decode(req.Kwargs)
		if err != nil {
			return nil, clientError("chat_template_kwargs: %s", err)
		}
		if !kwargs.IsDict() && !kwargs.IsNone() {
			return nil, clientError("chat_template_kwargs is not an object")
		}
		if kwargs.IsDict() {
			for _, name := range kwargs.AsDict().Keys {
				switch name {
				case "chat_template", "tokenize":
					return nil, clientError("Found unexpected chat template kwargs from request: {'%s'}", name)
				case "messages", "conversation":
					return nil, clientError("chat_template_kwargs must not set %s", name)
				}
				if strings.HasPrefix(name, ours) {
					return nil, clientError("chat_template_kwargs must not set %s", name)
				}
				vars[name] = kwargs.AsDict().Data[name]
			}
		}
	}
	for _, list := range []struct {
		name string
		data json.RawMessage
	}{{"tools", req.Tools}, {"documents", req.Documents}} {
		if len(list.data) == 0 {
			continue
		}
		v, err := decode(list.data)
		if err != nil {
			return nil, clientError("%s: %s", list.name, err)
		}
		if v.IsNone() {
			continue
		}
		if !v.IsList() {
			return nil, clientError("%s is not a list", list.name)
		}
		vars[list.name] = v
	}
	if tools := vars["tools"]; tools.IsList() && len(req.Tools) > 0 {
		normalised, err := normaliseTools(tools.AsList().Items)
		if err != nil {
			return nil, err
		}
		vars["tools"] = jinja.NewList(normalised)
	}
	vars["add_generation_prompt"] = jinja.NewBool(req.AddGenerationPrompt)
	if req.ReasoningEffort != "" {
		vars["reasoning_effort"] = jinja.NewString(req.ReasoningEffort)
		if _, ok := vars["enable_thinking"]; !ok {
			vars["enable_thinking"] = jinja.NewBool(req.ReasoningEffort != "none")
		}
	}
	return vars, nil
}

// continueFinal cuts the prompt behind the last message's content, as transformers does.
func continueFinal(prompt string, messages []jinja.Value) (string, error) {
	if len(messages) == 0 {
		return "", clientError("continue_final_message is set but there are no messages")
	}
	content := messages[len(messages)-1].AsDict().Data["content"]
	if content.IsList() {
		items := content.AsList().Items
		content = jinja.NewString("")
		for i := len(items) - 1; i >= 0; i-- {
			if items[i].IsDict() && items[i].AsDict().Data["text"].IsString() {
				content = items[i].AsDict().Data["text"]
				break
			}
		}
	}
	final := content.AsString()
	at := strings.LastIndex(prompt, strings.TrimSpace(final))
	if at < 0 {
		return "", clientError("continue_final_message is set but the final message does not appear in the chat after applying the chat template")
	}
	left := strings.TrimLeftFunc(final, pythonSpace)
	if strings.HasPrefix(prompt[at:], final) {
		return prompt[:at+len(left)], nil
	}
	return prompt[:at+len(strings.TrimSpace(final))], nil
}

func pythonSpace(r rune) bool { return strings.TrimSpace(string(r)) == "" }
