package chat

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"unicode"

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

// ErrUnsure is returned for what vLLM takes and this package cannot be sure to render alike. It is rare: integers beyond 64 bits,
// chat_template_kwargs that stand for members of the request, control characters where Python has them for white space.
var ErrUnsure = errors.New("chat: only the engine knows how this is rendered")

// ErrNoTemplate is returned by Load for a model folder without a chat template. That a model needs none of it (gpt-oss is rendered by
// vLLM's Harmony encoder) does not make its prompts knowable here.
var ErrNoTemplate = errors.New("chat: model has no chat template")

// ErrHarmony is the ErrNoTemplate of gpt-oss: vLLM makes its prompts by Harmony, whatever template is there. Its /tokenize does not know
// that; its render route does.
var ErrHarmony = fmt.Errorf("%w: prompts are made by Harmony", ErrNoTemplate)

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
	content   bool // it knows content, without which vLLM continues no message
	strips    bool // it strips white space by methods, which are the library's
}

// Load reads the chat template of the model in folder dir: chat_template.jinja, and else chat_template of tokenizer_config.json, which
// may be a string or a list of named templates (default and tool_use). It returns ErrNoTemplate if there is neither, or if the engine
// does not use them.
func Load(dir string) (*Template, error) {
	if harmony(dir) {
		return nil, fmt.Errorf("%s: %w", dir, ErrHarmony)
	}
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

// harmony reports whether the model in dir is gpt-oss, whose prompts vLLM makes without its template. What else may be wrong with
// config.json is the engine's business.
func harmony(dir string) bool {
	var config struct {
		ModelType string `json:"model_type"`
	}
	data, err := os.ReadFile(filepath.Join(dir, "config.json"))
	return err == nil && json.Unmarshal(data, &config) == nil && config.ModelType == "gpt_oss"
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
			content:   strings.Contains(c.source, "content"),
			strips:    methods.MatchString(c.source),
		}
	}
	return t, nil
}

// methods are those that take white space off or split at it.
var methods = regexp.MustCompile(`\.\s*(strip|lstrip|rstrip|split)\s*\(\s*\)`)

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
	list, err := member("messages", req.Messages)
	if err != nil {
		return "", err
	}
	messages, err := normalise(list, c)
	if err != nil {
		return "", err
	}
	final := ""
	if req.ContinueFinalMessage {
		if final, err = markFinal(messages, c); err != nil {
			return "", err
		}
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
	if c.strips && hasOddSpace(prompt) {
		return "", ErrUnsure
	}
	if req.ContinueFinalMessage {
		return cutFinal(prompt, final)
	}
	return prompt, nil
}

// member parses a member of a request.
func member(name string, data json.RawMessage) (jinja.Value, error) {
	v, err := decode(data)
	if err != nil && !errors.Is(err, ErrUnsure) {
		err = clientError("%s: %s", name, err)
	}
	return v, err
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
	thinking := false // the client said something about it, be it null
	if len(req.Kwargs) > 0 {
		kwargs, err := member("chat_template_kwargs", req.Kwargs)
		if err != nil {
			return nil, err
		}
		if !kwargs.IsDict() && !kwargs.IsNone() {
			return nil, clientError("chat_template_kwargs is not an object")
		}
		if kwargs.IsDict() {
			if thinking, err = addKwargs(vars, kwargs.AsDict()); err != nil {
				return nil, err
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
		v, err := member(list.name, list.data)
		if err != nil {
			return nil, err
		}
		if v.IsNone() {
			continue
		}
		if !v.IsList() {
			return nil, clientError("%s is not a list", list.name)
		}
		vars[list.name] = v
	}
	if tools := vars["tools"]; tools.IsList() {
		normalised, err := normaliseTools(tools.AsList().Items)
		if err != nil {
			return nil, err
		}
		vars["tools"] = jinja.NewList(normalised)
	}
	vars["add_generation_prompt"] = jinja.NewBool(req.AddGenerationPrompt)
	if req.ReasoningEffort != "" {
		vars["reasoning_effort"] = jinja.NewString(req.ReasoningEffort)
		if !thinking {
			vars["enable_thinking"] = jinja.NewBool(req.ReasoningEffort != "none")
		}
	}
	return vars, nil
}

// addKwargs adds the client's chat_template_kwargs; null and "auto" are to vLLM as if they were not there. thinking reports whether
// enable_thinking is among them all the same.
func addKwargs(vars map[string]jinja.Value, kwargs *jinja.Dict) (thinking bool, err error) {
	for _, name := range kwargs.Keys {
		value := kwargs.Data[name]
		switch name {
		case "chat_template", "tokenize":
			return false, clientError("Found unexpected chat template kwargs from request: {'%s'}", name)
		case "messages", "conversation":
			return false, clientError("chat_template_kwargs must not set %s", name)
		case "enable_thinking":
			thinking = true
		}
		if strings.HasPrefix(name, ours) {
			return false, clientError("chat_template_kwargs must not set %s", name)
		}
		if value.IsNone() || value.IsString() && value.AsString() == "auto" {
			continue
		}
		if name == "tools" { // in place of the request's, and as they stand
			return false, ErrUnsure
		}
		vars[name] = value
	}
	return thinking, nil
}

// finalTag is what transformers puts behind the message to continue, to find its end in the prompt.
const finalTag = "CONTINUE_FINAL_MESSAGE_TAG "

// markFinal puts finalTag behind the last message's content, or its last part of text, and returns what that was.
func markFinal(messages []jinja.Value, c *compiled) (final string, err error) {
	if len(messages) == 0 || !c.content {
		return "", clientError("continue_final_message is set but there is no message to continue")
	}
	holder, key := messages[len(messages)-1].AsDict(), "content"
	if content := holder.Data[key]; content.IsList() {
		holder, key = nil, "text"
		for _, part := range slices.Backward(content.AsList().Items) {
			if part.AsDict().Has(key) {
				holder = part.AsDict()
				break
			}
		}
		if holder == nil {
			return "", clientError("continue_final_message is set but we could not find any text to continue in the final message!")
		}
	}
	final = holder.Data[key].AsString()
	holder.Set(key, jinja.NewString(final+finalTag))
	return final, nil
}

// cutFinal cuts the prompt behind the last message's content, as transformers does.
func cutFinal(prompt, final string) (string, error) {
	at := strings.LastIndex(prompt, strings.TrimSpace(finalTag))
	if at < 0 || !strings.Contains(prompt, strings.TrimFunc(final, pythonSpace)) {
		return "", clientError("continue_final_message is set but the final message does not appear in the chat after applying the chat template")
	}
	if strings.HasPrefix(prompt[at:], finalTag) {
		return prompt[:at], nil
	}
	return strings.TrimRightFunc(prompt[:at], pythonSpace), nil
}

// pythonSpace reports whether Python takes r for white space: it has four control characters more than Go.
func pythonSpace(r rune) bool { return unicode.IsSpace(r) || 0x1c <= r && r <= 0x1f }

func hasOddSpace(s string) bool {
	for c := byte(0x1c); c <= 0x1f; c++ {
		if strings.IndexByte(s, c) >= 0 {
			return true
		}
	}
	return false
}
