package anthropic

import (
	"bytes"
	"fmt"
	"math"
	"net/http"
	"slices"
	"strconv"
	"strings"

	"github.com/kinference/kinference/internal/openai"
)

// Bounds on what a body may hold; the first is the API's own.
const (
	maxMessages = 100_000
	maxTools    = 4096
	maxStops    = 256
	maxDropped  = 16
)

// Settings say how a body is read. The zero value is ready to use.
type Settings struct {
	Depth     int  // nesting limit, openai.DefaultDepth if 0
	Count     bool // a count_tokens body: max_tokens may be absent
	ImageURLs bool // take pictures by URL, which the engine fetches; else only data
}

// Request is the body of a Messages request, checked and taken apart. The
// zero value is ready for Parse. It keeps the body it was parsed from.
type Request struct {
	Body      openai.Object
	Model     string
	Stream    bool
	MaxTokens int // 0 in a count_tokens body without one
	// Dropped names up to 16 members of the body that have no counterpart at
	// the engine and no effect here, for a log: context_management, say.
	Dropped []string
	// Pictures is how many images the messages have.
	Pictures int
	// HideThinking says that the client wants no text of the reasoning.
	HideThinking bool

	system   []openai.Value // strings
	messages []message
	tools    []tool
	choice   choice
	stops    []openai.Value // strings
	sampling [3]openai.Value
	thinking thinking
	effort   string
	schema   openai.Value
	kwargs   openai.Value
	salt     openai.Value
}

type message struct {
	assistant bool
	blocks    []block
}

type blockKind int

const (
	textBlock blockKind = iota
	imageBlock
	thinkingBlock
	redactedBlock
	useBlock
	resultBlock
	referenceBlock
)

// block is one content block. Values are parts of the body.
type block struct {
	kind     blockKind
	text     openai.Value // text, thinking, redacted data; name of a reference
	id, name string
	input    openai.Value // of a tool's use
	content  []block      // of a tool's result
	media    string       // image: type of the data, empty for a URL
	data     openai.Value // image: base64, or the URL
}

type tool struct {
	name                string
	description, schema openai.Value
	strict, deferred    openai.Value
}

type choice struct {
	kind, name string
	serial     bool // no parallel tool calls
}

type thinking int

const (
	thinkingDefault thinking = iota
	thinkingOn
	thinkingOff
)

// known are the members that are read; ignored ones have no effect on what a
// model answers, or none that an engine could give them.
var (
	known = []string{
		"model", "messages", "system", "max_tokens", "stream", "tools", "tool_choice", "stop_sequences", "temperature", "top_p", "top_k",
		"thinking", "metadata", "output_config", "output_format", "chat_template_kwargs", "cache_salt", "mcp_servers", "container",
	}
	ignored = []string{"service_tier", "cache_control", "metadata"}
	samples = [...]string{"temperature", "top_p", "top_k"}
)

// Parse checks a body and takes it apart.
func (r *Request) Parse(body []byte, set Settings) *openai.Error {
	*r = Request{}
	if e := r.Body.ParseBody(body, set.Depth); e != nil {
		return e
	}
	if e := openai.CheckSpelling(&r.Body, known); e != nil {
		return e
	}
	p := parser{set: set, r: r}
	p.top()
	return p.err
}

// parser keeps the first fault; after one the rest is not worth reading.
type parser struct {
	set    Settings
	r      *Request
	err    *openai.Error
	levels [4]openai.Object // memory for nested objects
}

func (p *parser) fail(path, what string) {
	if p.err == nil {
		p.err = openai.Invalid(path, "", path+": "+what)
	}
}

// object opens the object at path. level keeps objects apart that are open at
// the same time.
func (p *parser) object(level int, path string, v openai.Value) (o *openai.Object, ok bool) {
	if v.Kind != openai.Obj {
		p.fail(path, "Input should be an object")
		return nil, false
	}
	o = &p.levels[level]
	if o.Parse(v.Raw, math.MaxInt) != nil { // cannot be: it is part of a parsed body
		p.fail(path, "Input should be an object")
	}
	return o, p.err == nil
}

// need reads a string member that must be there.
func (p *parser) need(o *openai.Object, path, name string) openai.Value {
	v := o.Get(name)
	switch v.Kind {
	case openai.String:
	case openai.Absent:
		p.fail(path+"."+name, "Field required")
	default:
		p.fail(path+"."+name, "Input should be a string")
	}
	return v
}

func (p *parser) text(o *openai.Object, path, name string) string {
	s, _ := p.need(o, path, name).Text()
	return s
}

func (p *parser) top() {
	r, o := p.r, &p.r.Body
	switch v := o.Get("model"); v.Kind {
	case openai.String:
		if r.Model, _ = v.Text(); r.Model == "" {
			p.fail("model", "Input should have at least 1 character")
		}
	case openai.Absent:
		p.fail("model", "Field required")
	default:
		p.fail("model", "Input should be a string")
	}
	p.limit(o.Get("max_tokens"))
	if v := o.Get("stream"); v.Given() {
		ok := false
		if r.Stream, ok = v.Bool(); !ok {
			p.fail("stream", "Input should be true or false")
		}
	}
	p.system(o.Get("system"))
	p.messages(o.Get("messages"))
	p.tools(o.Get("tools"))
	p.choice(o.Get("tool_choice"))
	p.stops(o.Get("stop_sequences"))
	p.sampling(o)
	p.thinking(o.Get("thinking"))
	p.output(o)
	if v := o.Get("metadata"); v.Given() && v.Kind != openai.Obj {
		p.fail("metadata", "Input should be an object")
	}
	if v := o.Get("chat_template_kwargs"); v.Given() {
		if r.kwargs = v; v.Kind != openai.Obj {
			p.fail("chat_template_kwargs", "Input should be an object")
		}
	}
	if v := o.Get("cache_salt"); v.Given() {
		if r.salt = v; v.Kind != openai.String {
			p.fail("cache_salt", "Input should be a string")
		}
	}
	for range o.Get("mcp_servers").Elements() {
		p.fail("mcp_servers", "MCP servers are not supported here: call them from the client")
	}
	if o.Get("container").Given() {
		p.fail("container", "Containers are not supported here")
	}
	for i := range o.Len() {
		if name := o.Name(i); !slices.Contains(known, name) && !slices.Contains(ignored, name) && len(r.Dropped) < maxDropped {
			r.Dropped = append(r.Dropped, name[:min(len(name), 64)])
		}
	}
}

func (p *parser) limit(v openai.Value) {
	if !v.Given() && p.set.Count {
		return
	}
	n, ok := v.Int()
	switch {
	case v.Kind == openai.Absent:
		p.fail("max_tokens", "Field required")
	case !ok:
		p.fail("max_tokens", "Input should be a valid integer")
	case n < 1:
		p.fail("max_tokens", "Input should be greater than or equal to 1")
	}
	p.r.MaxTokens = int(max(0, min(n, math.MaxInt32)))
}

// billing begins a system block that Claude Code puts first, with a value that
// is new in every request: with it no prompt would begin like another.
const billing = "x-anthropic-billing-header"

func (p *parser) system(v openai.Value) {
	switch v.Kind {
	case openai.Absent, openai.Null:
	case openai.String:
		p.r.system = append(p.r.system, withoutBilling(v))
	case openai.Array:
		i := 0
		for e := range v.Elements() {
			b := p.block(0, "system."+strconv.Itoa(i), e)
			if p.err == nil && b.kind != textBlock {
				p.fail("system."+strconv.Itoa(i)+".type", "Input should be 'text'")
			}
			if p.err != nil {
				return
			}
			if i > 0 || !bytes.HasPrefix(b.text.Raw[1:], []byte(billing)) {
				p.r.system = append(p.r.system, b.text)
			}
			i++
		}
	default:
		p.fail("system", "Input should be a string or a list of text blocks")
	}
}

// withoutBilling drops the line from a system prompt that is one string.
func withoutBilling(v openai.Value) openai.Value {
	raw := v.Raw
	if !bytes.HasPrefix(raw[1:], []byte(billing)) {
		return v
	}
	for i := 1; i < len(raw)-1; i++ {
		if raw[i] != '\\' {
			continue
		}
		if i++; raw[i] == 'n' {
			rest := append([]byte{'"'}, raw[i+1:]...)
			return openai.Value{Raw: rest, Kind: openai.String}
		}
	}
	return openai.Value{Raw: []byte(`""`), Kind: openai.String}
}

func (p *parser) messages(v openai.Value) {
	switch {
	case v.Kind == openai.Absent:
		p.fail("messages", "Field required")
	case v.Kind != openai.Array:
		p.fail("messages", "Input should be a list")
	}
	n := 0
	for e := range v.Elements() {
		if p.err != nil {
			return
		}
		if n == maxMessages {
			p.fail("messages", "at most 100000 messages are allowed")
			return
		}
		p.message("messages."+strconv.Itoa(n), e)
		n++
	}
	if n == 0 {
		p.fail("messages", "at least one message is required")
	}
}

// message reads one message. Claude Code sends the roles ctx and msg for what
// is the user's; system messages at the front are the system prompt, and later
// ones the user's too: many templates refuse a system message there, and
// moving its text to the front would change the whole prompt.
func (p *parser) message(path string, v openai.Value) {
	o, ok := p.object(0, path, v)
	if !ok {
		return
	}
	role, content := p.text(o, path, "role"), o.Get("content")
	m := message{assistant: role == "assistant"}
	switch role {
	case "user", "assistant", "ctx", "msg", "system":
	default:
		p.fail(path+".role", "Input should be 'user' or 'assistant'")
	}
	if path += ".content"; content.Kind == openai.Absent {
		p.fail(path, "Field required")
	}
	m.blocks = p.content(1, path, content)
	if p.err != nil {
		return
	}
	if role == "system" {
		for _, b := range m.blocks {
			if b.kind != textBlock {
				p.fail(path, "a system message holds text only")
				return
			}
			if len(p.r.messages) == 0 {
				p.r.system = append(p.r.system, b.text)
			}
		}
		if len(p.r.messages) == 0 {
			return
		}
	}
	for i, b := range m.blocks {
		wrong := ""
		switch b.kind {
		case useBlock, thinkingBlock, redactedBlock:
			if !m.assistant {
				wrong = "belongs into an assistant message"
			}
		case resultBlock, imageBlock:
			if m.assistant {
				wrong = "belongs into a user message"
			}
		case referenceBlock:
			wrong = "belongs into a tool_result"
		case textBlock:
		}
		if wrong != "" {
			p.fail(path+"."+strconv.Itoa(i), "this block "+wrong)
		}
	}
	p.r.messages = append(p.r.messages, m)
}

func (p *parser) tools(v openai.Value) {
	if v.Given() && v.Kind != openai.Array {
		p.fail("tools", "Input should be a list")
	}
	names := map[string]bool{}
	i := 0
	for e := range v.Elements() {
		path := "tools." + strconv.Itoa(i)
		o, ok := p.object(0, path, e)
		if !ok {
			return
		}
		if i++; i > maxTools {
			p.fail("tools", "too many tools")
			return
		}
		if kind := o.Get("type"); kind.Given() {
			if s, _ := kind.Text(); s != "custom" {
				p.fail(path, "tools of type "+strconv.Quote(clip(s))+" run at Anthropic and are not supported here")
			}
		}
		t := tool{name: p.text(o, path, "name"), description: o.Get("description"), schema: o.Get("input_schema"), strict: o.Get("strict"), deferred: o.Get("defer_loading")}
		switch {
		case p.err != nil:
		case t.name == "":
			p.fail(path+".name", "Input should have at least 1 character")
		case names[t.name]:
			p.fail("tools", "Tool names must be unique")
		case t.schema.Kind == openai.Absent:
			p.fail(path+".input_schema", "Field required")
		case t.schema.Kind != openai.Obj:
			p.fail(path+".input_schema", "Input should be an object")
		case t.description.Given() && t.description.Kind != openai.String:
			p.fail(path+".description", "Input should be a string")
		case t.strict.Given() && t.strict.Kind != openai.Bool:
			p.fail(path+".strict", "Input should be true or false")
		case t.deferred.Given() && t.deferred.Kind != openai.Bool:
			p.fail(path+".defer_loading", "Input should be true or false")
		}
		if p.err != nil {
			return
		}
		names[t.name] = true
		p.r.tools = append(p.r.tools, t)
	}
}

func (p *parser) choice(v openai.Value) {
	if !v.Given() {
		return
	}
	o, ok := p.object(0, "tool_choice", v)
	if !ok {
		return
	}
	c := &p.r.choice
	c.kind = p.text(o, "tool_choice", "type")
	c.serial, _ = o.Get("disable_parallel_tool_use").Bool()
	switch c.kind {
	case "auto", "none":
	case "any", "tool":
		if len(p.r.tools) == 0 {
			p.fail("tool_choice", "may only be "+c.kind+" if tools are given")
		}
	default:
		p.fail("tool_choice.type", "Input should be 'auto', 'any', 'tool' or 'none'")
	}
	if c.kind == "tool" {
		c.name = p.text(o, "tool_choice", "name")
		if p.err == nil && !slices.ContainsFunc(p.r.tools, func(t tool) bool { return t.name == c.name }) {
			p.fail("tool_choice.name", "there is no tool of this name")
		}
	}
}

func (p *parser) stops(v openai.Value) {
	if v.Given() && v.Kind != openai.Array {
		p.fail("stop_sequences", "Input should be a list")
	}
	i := 0
	for e := range v.Elements() {
		if text, ok := e.Text(); !ok || text == "" {
			p.fail("stop_sequences."+strconv.Itoa(i), "Input should be a string that is not empty")
			return
		}
		if i++; i > maxStops {
			p.fail("stop_sequences", "too many stop sequences")
			return
		}
		p.r.stops = append(p.r.stops, e)
	}
}

func (p *parser) sampling(o *openai.Object) {
	for i, name := range samples {
		v := o.Get(name)
		if !v.Given() {
			continue
		}
		f, err := strconv.ParseFloat(string(v.Raw), 64)
		n, whole := v.Int()
		switch {
		case v.Kind != openai.Number || err != nil:
			p.fail(name, "Input should be a valid number")
		case name == "top_k" && (!whole || n < 0):
			p.fail(name, "Input should be an integer that is not negative")
		case name != "top_k" && (f < 0 || f > 1):
			p.fail(name, "Input should be between 0 and 1")
		}
		p.r.sampling[i] = v
	}
}

func (p *parser) thinking(v openai.Value) {
	if !v.Given() {
		return
	}
	o, ok := p.object(0, "thinking", v)
	if !ok {
		return
	}
	switch kind := p.text(o, "thinking", "type"); kind {
	case "disabled":
		p.r.thinking = thinkingOff
	case "adaptive":
		p.r.thinking = thinkingOn
	case "enabled":
		p.r.thinking = thinkingOn
		// No engine takes a budget without further settings, so it is only checked.
		if n, whole := o.Get("budget_tokens").Int(); !whole || n < 1 {
			p.fail("thinking.budget_tokens", "Input should be a positive integer")
		}
	default:
		p.fail("thinking.type", "Input should be 'enabled', 'adaptive' or 'disabled'")
	}
	if s, _ := o.Get("display").Text(); s == "omitted" {
		p.r.HideThinking = true
	}
}

// output reads what the answer shall be like: how much effort, and a schema.
func (p *parser) output(o *openai.Object) {
	format := o.Get("output_format")
	path := "output_format"
	if v := o.Get("output_config"); v.Given() {
		config, ok := p.object(0, "output_config", v)
		if !ok {
			return
		}
		if effort := config.Get("effort"); effort.Given() {
			if p.r.effort, ok = effort.Text(); !ok {
				p.fail("output_config.effort", "Input should be a string")
			}
		}
		if f := config.Get("format"); f.Given() {
			format, path = f, "output_config.format"
		}
	}
	if !format.Given() {
		return
	}
	f, ok := p.object(1, path, format)
	if !ok {
		return
	}
	if kind := p.text(f, path, "type"); kind != "json_schema" {
		p.fail(path+".type", "Input should be 'json_schema'")
	}
	if p.r.schema = f.Get("schema"); p.r.schema.Kind != openai.Obj {
		p.fail(path+".schema", "Input should be an object")
	}
}

// clip shortens a name that a client sent for a message.
func clip(s string) string {
	if len(s) > 64 {
		return strings.ToValidUTF8(s[:64], "") + "…"
	}
	return s
}

// ContextError is the error for a prompt that leaves no room, in the words
// that clients of this API look for to shorten the conversation by themselves.
func ContextError(limit, prompt, output int) *openai.Error {
	message := fmt.Sprintf("prompt is too long: %d tokens > %d maximum", prompt, limit)
	if output > 0 && prompt < limit {
		message = fmt.Sprintf("input length and `max_tokens` exceed context limit: %d + %d > %d, decrease input length or `max_tokens` and try again", prompt, output, limit)
	}
	return &openai.Error{Status: http.StatusBadRequest, Type: openai.TypeInvalidRequest, Code: openai.CodeContextLength, Param: "messages", Message: message}
}
