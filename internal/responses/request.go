package responses

import (
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/kinference/kinference/internal/openai"
)

// Bounds on what a body may hold.
const (
	maxItems   = 100_000
	maxTools   = 4096
	maxDropped = 16
)

// Settings say how a body is read.
type Settings struct {
	Depth     int  // nesting limit, openai.DefaultDepth if 0
	ImageURLs bool // take pictures by URL, which the engine fetches; else only data
}

// Request is the body of a Responses request, checked and taken apart. The zero
// value is ready for Parse. It keeps the body it was parsed from.
type Request struct {
	Body   openai.Object
	Model  string
	Stream bool
	// Dropped names up to 16 members that have no effect here, for a log.
	Dropped []string

	system   []openai.Value // strings
	turns    []turn
	tools    []openai.Value // as they stand
	choice   string         // of tools, as JSON text of a chat body
	limit    openai.Value
	sampling [2]openai.Value
	effort   string
	format   string // response_format as JSON text, empty for text
	serial   bool
	salt     openai.Value
	kwargs   openai.Value
}

// turn is one message of the chat.
type turn struct {
	role      string // user, assistant or tool
	parts     []part
	reasoning []openai.Value
	calls     []call
	id        openai.Value // of the call that a tool answers
}

type part struct{ text, image openai.Value }

type call struct{ id, name, arguments openai.Value }

// known are the members that are read or may be there without effect.
var known = []string{
	"model", "input", "instructions", "stream", "max_output_tokens", "temperature", "top_p", "tools", "tool_choice", "parallel_tool_calls", "text", "reasoning",
	"previous_response_id", "background", "store", "conversation", "prompt", "cache_salt", "chat_template_kwargs",
	"metadata", "user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "service_tier", "truncation", "include", "stream_options", "top_logprobs",
}

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
	levels [3]openai.Object // memory for nested objects
}

func (p *parser) fail(param, code, message string) {
	if p.err == nil {
		p.err = openai.Invalid(param, code, message)
	}
}

func (p *parser) wrong(param, want string) {
	p.fail(param, "", "The value of "+param+" must be "+want+".")
}

func (p *parser) object(level int, path string, v openai.Value) (o *openai.Object, ok bool) {
	if v.Kind != openai.Obj {
		p.wrong(path, "an object")
		return nil, false
	}
	o = &p.levels[level]
	if o.Parse(v.Raw, math.MaxInt) != nil { // cannot be: it is part of a parsed body
		p.wrong(path, "an object")
	}
	return o, p.err == nil
}

// need reads a string member that must be there.
func (p *parser) need(o *openai.Object, path, name string) openai.Value {
	v := o.Get(name)
	if v.Kind != openai.String {
		p.wrong(path+"."+name, "a string")
	}
	return v
}

func (p *parser) word(o *openai.Object, path, name string) string {
	v := o.Get(name)
	s, ok := v.Text()
	if !ok && v.Given() {
		p.wrong(strings.TrimPrefix(path+"."+name, "."), "a string")
	}
	return s
}

func (p *parser) flag(name string) (value, given bool) {
	v := p.r.Body.Get(name)
	if value, given = v.Bool(); !given && v.Given() {
		p.wrong(name, "true or false")
	}
	return value, given
}

func (p *parser) top() {
	r, o := p.r, &p.r.Body
	if r.Model = p.word(o, "", "model"); r.Model == "" {
		p.fail("model", "", "A model must be given.")
	}
	p.stateless()
	r.Stream, _ = p.flag("stream")
	if parallel, given := p.flag("parallel_tool_calls"); given {
		r.serial = !parallel
	}
	if v := o.Get("instructions"); v.Given() {
		if v.Kind != openai.String {
			p.wrong("instructions", "a string")
		}
		r.system = append(r.system, v)
	}
	p.input(o.Get("input"))
	p.tools(o.Get("tools"))
	p.choice(o.Get("tool_choice"))
	if r.limit = o.Get("max_output_tokens"); r.limit.Given() {
		if n, ok := r.limit.Int(); !ok || n < 1 {
			p.wrong("max_output_tokens", "a positive integer")
		}
	}
	for i, name := range []string{"temperature", "top_p"} {
		if r.sampling[i] = o.Get(name); r.sampling[i].Given() && r.sampling[i].Kind != openai.Number {
			p.wrong(name, "a number")
		}
	}
	p.format(o.Get("text"))
	if v := o.Get("reasoning"); v.Given() {
		if in, ok := p.object(0, "reasoning", v); ok {
			r.effort = p.word(in, "reasoning", "effort")
		}
	}
	if r.salt = o.Get("cache_salt"); r.salt.Given() && r.salt.Kind != openai.String {
		p.wrong("cache_salt", "a string")
	}
	if r.kwargs = o.Get("chat_template_kwargs"); r.kwargs.Given() && r.kwargs.Kind != openai.Obj {
		p.wrong("chat_template_kwargs", "an object")
	}
	for i := range o.Len() {
		if name := o.Name(i); !slices.Contains(known, name) && len(r.Dropped) < maxDropped {
			r.Dropped = append(r.Dropped, name[:min(len(name), 64)])
		}
	}
}

// stateless refuses what needs answers to be kept: no replica keeps any, and
// one that did would have to ask whose they are.
func (p *parser) stateless() {
	for _, name := range []string{"previous_response_id", "conversation", "prompt"} {
		if p.r.Body.Get(name).Given() {
			p.fail(name, "unsupported_parameter", "The parameter "+name+" is not supported: nothing is stored here. Send the whole conversation as input.")
		}
	}
	if background, _ := p.flag("background"); background {
		p.fail("background", "unsupported_parameter", "Background responses are not supported: nothing is stored here.")
	}
	_, _ = p.flag("store") // either way nothing is
}

func (p *parser) input(v openai.Value) {
	switch v.Kind {
	case openai.String:
		p.r.turns = append(p.r.turns, turn{role: "user", parts: []part{{text: v}}})
		return
	case openai.Array:
	case openai.Absent, openai.Null:
		p.fail("input", "", "Input must be given.")
		return
	default:
		p.wrong("input", "a string or a list of items")
		return
	}
	i := 0
	for e := range v.Elements() {
		if p.err != nil {
			return
		}
		if i == maxItems {
			p.fail("input", "", "There are too many items in input.")
			return
		}
		p.item("input["+strconv.Itoa(i)+"]", e)
		i++
	}
	if len(p.r.turns) == 0 && len(p.r.system) == 0 {
		p.fail("input", "", "Input must not be empty.")
	}
}

// item reads one item. What a model said at a time (reasoning, text, calls) is
// one message of the chat.
func (p *parser) item(path string, v openai.Value) {
	o, ok := p.object(0, path, v)
	if !ok {
		return
	}
	kind := p.word(o, path, "type")
	if kind == "" && o.Get("role").Given() {
		kind = "message"
	}
	switch kind {
	case "message":
		p.message(path, o)
	case "function_call":
		c := call{p.need(o, path, "call_id"), p.need(o, path, "name"), p.need(o, path, "arguments")}
		t := p.assistant()
		t.calls = append(t.calls, c)
	case "function_call_output":
		t := turn{role: "tool", id: p.need(o, path, "call_id")}
		output := o.Get("output")
		t.parts = p.parts(path+".output", output)
		p.r.turns = append(p.r.turns, t)
	case "reasoning":
		texts := p.reasoning(path, o.Get("content"))
		if len(texts) == 0 {
			texts = p.reasoning(path, o.Get("summary"))
		}
		t := p.assistant()
		if len(t.parts) > 0 || len(t.calls) > 0 { // it begins the next step
			p.r.turns = append(p.r.turns, turn{role: "assistant"})
			t = &p.r.turns[len(p.r.turns)-1]
		}
		t.reasoning = append(t.reasoning, texts...)
	case "item_reference":
		p.fail(path, "unsupported_parameter", "References to items are not supported: nothing is stored here. Send the item itself.")
	default:
		p.fail(path+".type", "unsupported_parameter", "Items of type "+strconv.Quote(clip(kind))+" are not supported.")
	}
}

// assistant is the assistant's turn that is open, or a new one.
func (p *parser) assistant() *turn {
	if n := len(p.r.turns); n == 0 || p.r.turns[n-1].role != "assistant" {
		p.r.turns = append(p.r.turns, turn{role: "assistant"})
	}
	return &p.r.turns[len(p.r.turns)-1]
}

// message reads a message. System and developer messages at the front are the
// system prompt; later ones are the user's, as many templates refuse them
// there and moving their text to the front would change the whole prompt.
func (p *parser) message(path string, o *openai.Object) {
	role := p.word(o, path, "role")
	parts := p.parts(path+".content", o.Get("content"))
	if p.err != nil {
		return
	}
	switch role {
	case "system", "developer":
		if len(p.r.turns) == 0 {
			for _, part := range parts {
				if part.image.Given() {
					p.fail(path+".content", "", "A system message holds text only.")
				}
				p.r.system = append(p.r.system, part.text)
			}
			return
		}
		role = "user"
	case "user":
	case "assistant":
		t := p.assistant()
		if len(t.calls) > 0 { // text after calls is another step
			p.r.turns = append(p.r.turns, turn{role: "assistant"})
			t = &p.r.turns[len(p.r.turns)-1]
		}
		for _, part := range parts {
			if part.image.Given() {
				p.fail(path+".content", "", "An assistant message holds text only.")
			}
		}
		t.parts = append(t.parts, parts...)
		return
	default:
		p.fail(path+".role", "", "The value of "+path+".role must be user, assistant, system or developer.")
	}
	if n := len(p.r.turns); n > 0 && p.r.turns[n-1].role == role {
		p.r.turns[n-1].parts = append(p.r.turns[n-1].parts, parts...)
		return
	}
	p.r.turns = append(p.r.turns, turn{role: role, parts: parts})
}

// parts reads content: a string or a list of parts.
func (p *parser) parts(path string, v openai.Value) []part {
	switch v.Kind {
	case openai.String:
		return []part{{text: v}}
	case openai.Array:
	default:
		p.wrong(path, "a string or a list of parts")
		return nil
	}
	var out []part
	i := 0
	for e := range v.Elements() {
		at := path + "[" + strconv.Itoa(i) + "]"
		i++
		o, ok := p.object(1, at, e)
		if !ok {
			return nil
		}
		switch kind := p.word(o, at, "type"); kind {
		case "input_text", "output_text", "text", "refusal":
			name := "text"
			if kind == "refusal" {
				name = kind
			}
			out = append(out, part{text: p.need(o, at, name)})
		case "input_image":
			image := p.need(o, at, "image_url")
			if p.err == nil && !begins(image, "data:image/") && (!p.set.ImageURLs || !begins(image, "https://")) {
				p.fail(at+".image_url", "", "Images by URL are not taken here: send the image as a data URL.")
			}
			out = append(out, part{image: image})
		default:
			p.fail(at+".type", "unsupported_parameter", "Content of type "+strconv.Quote(clip(kind))+" is not supported.")
		}
	}
	return out
}

// begins reports whether a string begins with prefix; slashes may be escaped.
// A picture is too long to decode for that.
func begins(v openai.Value, prefix string) bool {
	raw := v.Raw[1:min(len(v.Raw), 2*len(prefix))]
	return strings.HasPrefix(strings.ReplaceAll(string(raw), `\/`, "/"), prefix)
}

func (p *parser) reasoning(path string, v openai.Value) (out []openai.Value) {
	for e := range v.Elements() {
		o, ok := p.object(1, path, e)
		if !ok {
			return nil
		}
		if text := o.Get("text"); text.Kind == openai.String {
			out = append(out, text)
		}
	}
	return out
}

func (p *parser) tools(v openai.Value) {
	if v.Given() && v.Kind != openai.Array {
		p.wrong("tools", "a list")
	}
	i := 0
	for e := range v.Elements() {
		path := "tools[" + strconv.Itoa(i) + "]"
		if i++; i > maxTools {
			p.fail("tools", "", "There are too many tools.")
		}
		o, ok := p.object(0, path, e)
		if !ok {
			return
		}
		if kind := p.word(o, path, "type"); kind != "function" {
			p.fail(path+".type", "unsupported_parameter", "Tools of type "+strconv.Quote(clip(kind))+" are not supported: only functions, which the client calls.")
		}
		if name, _ := p.need(o, path, "name").Text(); name == "" {
			p.wrong(path+".name", "a name")
		}
		if params := o.Get("parameters"); params.Given() && params.Kind != openai.Obj {
			p.wrong(path+".parameters", "an object")
		}
		p.r.tools = append(p.r.tools, e)
	}
}

func (p *parser) choice(v openai.Value) {
	switch v.Kind {
	case openai.Absent, openai.Null:
	case openai.String:
		if s, _ := v.Text(); s != "auto" && s != "none" && s != "required" {
			p.wrong("tool_choice", "auto, none, required or a function")
		}
		p.r.choice = string(v.Raw)
	default:
		o, ok := p.object(0, "tool_choice", v)
		if !ok {
			return
		}
		if kind := p.word(o, "tool_choice", "type"); kind != "function" {
			p.fail("tool_choice.type", "unsupported_parameter", "A tool choice of type "+strconv.Quote(clip(kind))+" is not supported.")
		}
		p.r.choice = `{"type":"function","function":{"name":` + string(p.need(o, "tool_choice", "name").Raw) + `}}`
	}
}

func (p *parser) format(v openai.Value) {
	if !v.Given() {
		return
	}
	o, ok := p.object(0, "text", v)
	if !ok || !o.Get("format").Given() {
		return
	}
	f, ok := p.object(1, "text.format", o.Get("format"))
	if !ok {
		return
	}
	switch kind := p.word(f, "text.format", "type"); kind {
	case "text":
	case "json_object":
		p.r.format = `{"type":"json_object"}`
	case "json_schema":
		schema := f.Get("schema")
		if schema.Kind != openai.Obj {
			p.wrong("text.format.schema", "an object")
			return
		}
		p.r.format = `{"type":"json_schema","json_schema":{"name":` + string(p.need(f, "text.format", "name").Raw) + `,"schema":` + string(schema.Raw)
		if strict := f.Get("strict"); strict.Kind == openai.Bool {
			p.r.format += `,"strict":` + string(strict.Raw)
		}
		p.r.format += `}}`
	default:
		p.fail("text.format.type", "unsupported_parameter", "The format "+strconv.Quote(clip(kind))+" is not supported.")
	}
}

// clip shortens a name that a client sent for a message.
func clip(s string) string {
	if len(s) > 64 {
		return strings.ToValidUTF8(s[:64], "") + "…"
	}
	return s
}
