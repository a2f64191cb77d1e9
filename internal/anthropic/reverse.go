package anthropic

import (
	"bytes"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/kinference/kinference/internal/openai"
)

// Limits are what a provider's request needs that a chat body may lack.
type Limits struct {
	Model string // the provider's name for the model; empty: the body's
	// MaxTokens is for a body that sets no limit, which this API demands; 0
	// means 4096. Cap bounds what a body sets; 0: no bound.
	MaxTokens, Cap int
	// Thinking turns reasoning_effort into a budget. Only some models think.
	Thinking bool
}

const defaultMaxTokens = 4096

// budgets are tokens to think by effort.
var budgets = map[string]int{"minimal": 1024, "low": 1024, "medium": 4096, "high": 16384, "xhigh": 32768, "max": 32768}

// carried are members of a chat body that have a counterpart.
var carried = []string{
	"model", "messages", "max_tokens", "max_completion_tokens", "stop", "temperature", "top_p", "top_k", "stream", "stream_options", "tools", "tool_choice",
	"parallel_tool_calls", "response_format", "n",
}

// AppendMessages appends a chat body, which openai.Request has accepted, as
// the body of a Messages request for a provider. What has no counterpart is
// left out; dropped names it, for a log. The error blames what cannot be left
// out without giving the client something else than it asked for.
func AppendMessages(dst []byte, chat *openai.Object, limits Limits) (out []byte, dropped []string, e *openai.Error) {
	c := converter{parser: parser{}, chat: chat, limits: limits, dst: dst}
	c.convert()
	return c.dst, c.dropped, c.err
}

type converter struct {
	parser

	chat    *openai.Object
	limits  Limits
	dst     []byte
	dropped []string

	system []openai.Value
	turns  []turn
}

// turn is one message to write: pieces of JSON text in order.
type turn struct {
	assistant       bool
	results, blocks [][]byte
	calls           bool
}

func (c *converter) drop(name string) {
	if len(c.dropped) < maxDropped {
		c.dropped = append(c.dropped, name[:min(len(name), 64)])
	}
}

func (c *converter) str(s string) { c.dst = append(c.dst, s...) }

func (c *converter) convert() {
	o := c.chat
	if n, ok := o.Get("n").Int(); ok && n != 1 {
		c.fail("n", "only one choice can be had from this model")
	}
	i := 0
	for m := range o.Get("messages").Elements() {
		if c.err != nil {
			return
		}
		c.message("messages."+strconv.Itoa(i), m)
		i++
	}
	model, _ := o.Get("model").Text()
	if c.limits.Model != "" {
		model = c.limits.Model
	}
	c.str(`{"model":`)
	c.dst = openai.AppendString(c.dst, model)
	limit := c.limit()
	c.str(`,"max_tokens":`)
	c.dst = strconv.AppendInt(c.dst, int64(limit), 10)
	for i, text := range c.system {
		if c.str(`,`); i == 0 {
			c.str(`"system":[`)
		}
		c.str(`{"type":"text","text":`)
		c.dst = append(append(c.dst, text.Raw...), '}')
	}
	if len(c.system) > 0 {
		c.str(`]`)
	}
	c.str(`,"messages":[`)
	some := false
	for i := range c.turns {
		c.turn(&c.turns[i], i == len(c.turns)-1, &some)
	}
	c.str(`]`)
	forced := c.tools()
	c.stops()
	c.sample(c.think(limit, forced))
	c.format()
	if stream, _ := o.Get("stream").Bool(); stream {
		c.str(`,"stream":true`)
	}
	c.str(`}`)
	for i := range o.Len() {
		if name := o.Name(i); !slices.Contains(carried, name) && o.At(i).Given() && (name != "reasoning_effort" || !c.limits.Thinking) {
			c.drop(name)
		}
	}
}

func (c *converter) limit() int {
	n, ok := c.chat.Get("max_completion_tokens").Int()
	if !ok || n < 1 {
		n, ok = c.chat.Get("max_tokens").Int()
	}
	switch {
	case ok && n >= 1:
	case c.limits.MaxTokens > 0:
		n = int64(c.limits.MaxTokens)
	default:
		n = defaultMaxTokens
	}
	if c.limits.Cap > 0 {
		n = min(n, int64(c.limits.Cap))
	}
	return int(min(n, math.MaxInt32))
}

// last is the turn that blocks of a side go to; turns alternate.
func (c *converter) last(assistant bool) *turn {
	if n := len(c.turns); n > 0 && c.turns[n-1].assistant == assistant {
		return &c.turns[n-1]
	}
	c.turns = append(c.turns, turn{assistant: assistant})
	return &c.turns[len(c.turns)-1]
}

func (c *converter) message(path string, v openai.Value) {
	o, ok := c.object(0, path, v)
	if !ok {
		return
	}
	role, content := c.text(o, path, "role"), o.Get("content")
	switch role {
	case "system", "developer":
		for _, text := range c.texts(path, content) {
			if len(c.turns) == 0 {
				c.system = append(c.system, text)
			} else { // the API has one system prompt, at the front
				c.last(false).blocks = append(c.last(false).blocks, textOf(text.Raw))
			}
		}
	case "user":
		t := c.last(false)
		t.blocks = append(t.blocks, c.blocks(path+".content", content)...)
	case "assistant":
		t := c.last(true)
		if t.calls {
			c.turns = append(c.turns, turn{assistant: true})
			t = c.last(true)
		}
		calls := o.Get("tool_calls")
		for _, text := range c.texts(path, content) {
			t.blocks = append(t.blocks, textOf(text.Raw))
		}
		i := 0
		for call := range calls.Elements() {
			t.calls = true
			t.blocks = append(t.blocks, appendUse(nil, call, "call_"+strconv.Itoa(i)))
			i++
		}
	case "tool":
		id := c.text(o, path, "tool_call_id")
		result := append([]byte(nil), `{"type":"tool_result","tool_use_id":`...)
		result = openai.AppendString(result, outID(id))
		if blocks := c.blocks(path+".content", content); len(blocks) > 0 {
			result = append(result, `,"content":[`...)
			result = append(append(result, bytes.Join(blocks, []byte(","))...), ']')
		}
		t := c.last(false)
		t.results = append(t.results, append(result, '}'))
	default:
		c.fail(path+".role", "messages of this role cannot be sent to this model")
	}
}

func textOf(raw []byte) []byte {
	out := append([]byte(nil), `{"type":"text","text":`...)
	return append(append(out, raw...), '}')
}

// blank reports whether a text holds nothing that the API takes for text.
func blank(v openai.Value) bool {
	s, _ := v.Text()
	return strings.TrimSpace(s) == ""
}

// texts are the texts of a content that can hold nothing else.
func (c *converter) texts(path string, v openai.Value) (out []openai.Value) {
	if v.Kind == openai.String {
		if !blank(v) {
			out = append(out, v)
		}
		return out
	}
	i := 0
	for part := range v.Elements() {
		at := path + ".content." + strconv.Itoa(i)
		o, ok := c.object(1, at, part)
		if !ok {
			return nil
		}
		name := "text"
		if kind := c.text(o, at, "type"); kind == "refusal" || kind == "thinking" {
			name = kind
		} else if kind != "text" {
			c.fail(at, "this content is not supported by this model")
		}
		if text := c.need(o, at, name); name != "thinking" && c.err == nil && !blank(text) {
			out = append(out, text)
		}
		i++
	}
	return out
}

// blocks are a user's or a tool's content.
func (c *converter) blocks(path string, v openai.Value) (out [][]byte) {
	if v.Kind == openai.String {
		if !blank(v) {
			out = append(out, textOf(v.Raw))
		}
		return out
	}
	i := 0
	for part := range v.Elements() {
		at := path + "." + strconv.Itoa(i)
		o, ok := c.object(1, at, part)
		if !ok {
			return nil
		}
		i++
		switch kind := c.text(o, at, "type"); kind {
		case "text":
			if text := c.need(o, at, "text"); c.err == nil && !blank(text) {
				out = append(out, textOf(text.Raw))
			}
		case "tool_reference":
		case "image_url":
			out = append(out, c.picture(at, o.Get("image_url")))
		default:
			c.fail(at, "content of this type is not supported by this model")
		}
	}
	return out
}

func (c *converter) picture(path string, v openai.Value) []byte {
	path += ".image_url"
	o, ok := c.object(2, path, v)
	if !ok {
		return nil
	}
	url := c.text(o, path, "url")
	data, inline := strings.CutPrefix(url, "data:")
	if !inline {
		if !strings.HasPrefix(url, "https://") {
			c.fail(path+".url", "images must be data or https URLs")
		}
		return append(openai.AppendString([]byte(`{"type":"image","source":{"type":"url","url":`), url), "}}"...)
	}
	kind, data, ok := strings.Cut(data, ";base64,")
	if !ok || !slices.Contains(media, kind) || !isBase64([]byte(data)) {
		c.fail(path+".url", "images must be base64 of one of "+strings.Join(media, ", "))
	}
	return append(openai.AppendString([]byte(`{"type":"image","source":{"type":"base64","media_type":"`+kind+`","data":`), data), "}}"...)
}

// turn writes a message. Results come first, as the API demands. An assistant
// message at the very end, which the model goes on with, must not end in white
// space.
func (c *converter) turn(t *turn, final bool, some *bool) {
	blocks := append(slices.Clone(t.results), t.blocks...)
	if len(blocks) == 0 {
		return // the API refuses empty ones
	}
	if n := len(blocks) - 1; final && t.assistant {
		blocks[n] = trimText(blocks[n])
	}
	sep := `,`
	if !*some {
		sep = ""
	}
	*some = true
	role := "user"
	if t.assistant {
		role = "assistant"
	}
	c.str(sep + `{"role":"` + role + `","content":[`)
	c.dst = append(c.dst, bytes.Join(blocks, []byte(","))...)
	c.str(`]}`)
}

func trimText(block []byte) []byte {
	var o openai.Object
	if o.Parse(block, 0) != nil {
		return block
	}
	text, ok := o.Get("text").Text()
	if !ok {
		return block
	}
	return textOf(openai.AppendString(nil, strings.TrimRight(text, " \t\r\n")))
}

// tools writes the tools and the choice; forced says that one must be used.
func (c *converter) tools() (forced bool) {
	n := 0
	for v := range c.chat.Get("tools").Elements() {
		path := "tools." + strconv.Itoa(n)
		o, ok := c.object(0, path, v)
		if !ok {
			return false
		}
		if kind := c.text(o, path, "type"); kind != "function" {
			c.fail(path+".type", "only functions are supported by this model")
		}
		f, ok := c.object(1, path+".function", o.Get("function"))
		if !ok {
			return false
		}
		if c.str(`,`); n == 0 {
			c.str(`"tools":[`)
		}
		n++
		c.str(`{"name":`)
		c.dst = append(c.dst, c.need(f, path+".function", "name").Raw...)
		if d := f.Get("description"); d.Kind == openai.String && len(d.Raw) > 2 {
			c.str(`,"description":`)
			c.dst = append(c.dst, d.Raw...)
		}
		if f.Get("strict").Given() {
			c.drop("strict")
		}
		c.str(`,"input_schema":`)
		c.schema(f.Get("parameters"))
		c.str(`}`)
	}
	if n == 0 {
		return false
	}
	c.str(`]`)
	return c.choice()
}

// schema writes a tool's schema, which the API wants to be an object's.
func (c *converter) schema(v openai.Value) {
	var o openai.Object
	if v.Kind != openai.Obj || o.Parse(v.Raw, 0) != nil {
		c.str(`{"type":"object","properties":{}}`)
		return
	}
	if o.Get("type").Given() {
		c.dst = append(c.dst, v.Raw...)
		return
	}
	c.dst, _ = o.Apply(c.dst, openai.Set([]byte(`"object"`), "type")) // a top-level member can always be set
}

func (c *converter) choice() (forced bool) {
	parallel, given := c.chat.Get("parallel_tool_calls").Bool()
	serial := given && !parallel
	kind, name := "", []byte(nil)
	v := c.chat.Get("tool_choice")
	switch v.Kind {
	case openai.String:
		kind, _ = v.Text()
	case openai.Obj:
		if o, ok := c.object(0, "tool_choice", v); ok && o.Get("function").Kind == openai.Obj {
			if f, ok := c.object(1, "tool_choice.function", o.Get("function")); ok {
				kind, name = "tool", c.need(f, "tool_choice.function", "name").Raw
			}
		}
	}
	switch kind {
	case "auto", "none", "tool":
	case "required":
		kind = "any"
	default:
		if v.Given() {
			c.drop("tool_choice")
		}
		if kind = "auto"; !serial {
			return false
		}
	}
	c.str(`,"tool_choice":{"type":"` + kind + `"`)
	if name != nil {
		c.str(`,"name":`)
		c.dst = append(c.dst, name...)
	}
	if serial && kind != "none" {
		c.str(`,"disable_parallel_tool_use":true`)
	}
	c.str(`}`)
	return kind == "any" || kind == "tool"
}

func (c *converter) stops() {
	v := c.chat.Get("stop")
	var list []openai.Value
	if v.Kind == openai.String {
		list = append(list, v)
	}
	for e := range v.Elements() {
		list = append(list, e)
	}
	n := 0
	for _, e := range list {
		if e.Kind != openai.String || blank(e) { // the API refuses white space
			c.drop("stop")
			continue
		}
		if c.str(`,`); n == 0 {
			c.str(`"stop_sequences":[`)
		}
		n++
		c.dst = append(c.dst, e.Raw...)
	}
	if n > 0 {
		c.str(`]`)
	}
}

// think asks for reasoning, where the API allows it: not if a tool is forced,
// and not in the middle of a round of tools, whose thinking it wants back and
// clients of OpenAI's API do not have. It reports whether it did.
func (c *converter) think(limit int, forced bool) bool {
	effort, _ := c.chat.Get("reasoning_effort").Text()
	budget := min(budgets[effort], limit-1)
	if !c.limits.Thinking || forced || budget < 1024 {
		return false
	}
	if n := len(c.turns); n > 0 && (len(c.turns[n-1].results) > 0 || c.turns[n-1].assistant) {
		return false
	}
	c.str(`,"thinking":{"type":"enabled","budget_tokens":` + strconv.Itoa(budget) + `}`)
	return true
}

// sample writes what of sampling the API has. It takes a temperature up to 1
// and not together with top_p, and none of it while it thinks.
func (c *converter) sample(thinks bool) {
	temperature, p, k := c.chat.Get("temperature"), c.chat.Get("top_p"), c.chat.Get("top_k")
	if thinks {
		for i, v := range []openai.Value{temperature, p, k} {
			if v.Given() {
				c.drop(samples[i])
			}
		}
		return
	}
	if f, err := strconv.ParseFloat(string(temperature.Raw), 64); temperature.Kind == openai.Number && err == nil {
		if c.str(`,"temperature":`); f > 1 {
			c.drop("temperature")
			c.str("1")
		} else {
			c.dst = append(c.dst, temperature.Raw...)
		}
		if p.Given() {
			c.drop("top_p")
		}
	} else if p.Kind == openai.Number {
		c.str(`,"top_p":`)
		c.dst = append(c.dst, p.Raw...)
	}
	if n, ok := k.Int(); ok && n > 0 {
		c.str(`,"top_k":` + strconv.FormatInt(n, 10))
	}
}

func (c *converter) format() {
	v := c.chat.Get("response_format")
	if !v.Given() {
		return
	}
	o, ok := c.object(0, "response_format", v)
	if !ok {
		return
	}
	switch kind := c.text(o, "response_format", "type"); kind {
	case "text":
	case "json_schema":
		in, ok := c.object(1, "response_format.json_schema", o.Get("json_schema"))
		if ok && in.Get("schema").Kind == openai.Obj {
			c.str(`,"output_config":{"format":{"type":"json_schema","schema":`)
			c.dst = append(c.dst, in.Get("schema").Raw...)
			c.str(`}}`)
		}
	default:
		c.fail("response_format.type", "this format is not supported by this model")
	}
}
