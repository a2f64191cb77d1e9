package vllm_test

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net/http"
	"strings"
	"time"
	"unicode/utf16"

	"github.com/kinference/kinference/test/interop/vllm/rig"
)

// obj is a JSON object whose members keep their order, which templates show to
// the model. Equal names may stand in it twice.
type obj []kv

type kv struct {
	key   string
	value any
}

func (o *obj) set(key string, value any) { *o = append(*o, kv{key, value}) }

// add is set unless there is such a member: the ingress refuses repeated ones.
func (o *obj) add(key string, value any) {
	for _, m := range *o {
		if m.key == key {
			return
		}
	}
	o.set(key, value)
}

// raw is JSON text.
type raw string

// gen makes requests from a seed: the same seed, the same requests.
type gen struct{ r *rand.Rand }

func newGen(seed uint64) *gen { return &gen{rand.New(rand.NewPCG(seed, 3))} }

func (g *gen) n(n int) int          { return g.r.IntN(n) }
func (g *gen) between(a, b int) int { return a + g.r.IntN(b-a+1) }
func (g *gen) chance(percent int) bool {
	return g.r.IntN(100) < percent
}

func pick[T any](g *gen, list ...T) T { return list[g.r.IntN(len(list))] }

var vocabulary = strings.Fields(`the of and to in is you that it he was for on are as with his they at be this have from or one
	had by word but not what all were we when your can said there use an each which she do how their if will up other about out many
	then them these so some her would make like him into time has look two more write go see number no way could people my than first
	water been call who oil its now find long down day did get come made may part cache block prefix worker tokenizer latency I'll
	don't WE'RE HTTP/2 x86_64 1,234.56 2024-05-06T07:08:09Z foo_bar fooBar e.g. http://example.com/a?b=c&d=%20#f`)

var odd = []string{
	"<|im_start|>", "<|im_end|>", "<|im_start|>user\n", "<|im_end|>\n", "<|endoftext|>", "<|im_", "<|im_start", "|>", "<think>", "</think>",
	"<think>\n\n</think>\n\n", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<|begin_of_text|>", "<|eot_id|>",
	"<|start_header_id|>assistant<|end_header_id|>\n\n", "<|reserved_special_token_7|>", "<|fim_prefix|>", "<|vision_start|>", "<|python_tag|>",
	"[INST]", "<s>", "</s>", "{{ messages }}", "{% if x %}", "{#", "CONTINUE_FINAL_MESSAGE_TAG",
}

// planes holds ranges of characters by what is special about them.
var planes = [][2]rune{
	{0x4E00, 0x9FFF}, {0x3040, 0x30FF}, {0xAC00, 0xD7A3}, {0x1100, 0x11FF}, {0x0600, 0x06FF}, {0x0590, 0x05FF}, {0x0900, 0x097F},
	{0x0E00, 0x0E7F}, {0x0400, 0x04FF}, {0x1F300, 0x1FAFF}, {0x2600, 0x27BF}, {0xE000, 0xE0FF}, {0xFFF0, 0xFFFF}, {0xE0000, 0xE007F},
	{0x2000, 0x206F}, {0x00A0, 0x024F}, {0x1D400, 0x1D7FF}, {0x20000, 0x2A6DF}, {0xFE00, 0xFE0F}, {0xFF00, 0xFFEF},
}

func (g *gen) runes(n int, low, high rune) string {
	var b strings.Builder
	for range n {
		r := low + rune(g.n(int(high-low+1)))
		if utf16.IsSurrogate(r) {
			r = 'x'
		}
		b.WriteRune(r)
	}
	return b.String()
}

func (g *gen) words(n int) string {
	var b strings.Builder
	for i := range n {
		if i > 0 {
			b.WriteString(pick(g, " ", " ", " ", " ", " ", ", ", ". ", "\n", "  "))
		}
		b.WriteString(pick(g, vocabulary...))
	}
	return b.String()
}

// piece is a short text of one kind.
func (g *gen) piece() string {
	switch g.n(16) {
	case 0, 1, 2:
		return g.words(g.between(1, 30))
	case 3:
		p := pick(g, planes...)
		return g.runes(g.between(1, 12), p[0], p[1])
	case 4:
		return g.runes(g.between(1, 20), 0x4E00, 0x9FFF) + pick(g, "，", "。", "、", "！", "\n", " ")
	case 5: // joined, coloured and flag emoji
		return pick(g, "👩‍👩‍👧‍👦", "👍🏽", "🇩🇪🇫🇷", "❤️", "☺", "🏴‍☠️", "👨🏿‍🚀", "🫠", "#️⃣") + pick(g, "", " ", "!")
	case 6: // marks on a base, in any order
		s := pick(g, "e", "a", "ộ", "क", "ก", "א", "x", "한", "ㅎ")
		for range g.between(1, 5) {
			s += pick(g, "\u0301", "\u0323", "\u0302", "\u0308", "\u0327", "\u094D", "\u05B0", "\u0345", "\u1AB0", "\u20D0", "\u1DC0", "\u0CCD")
		}
		return s
	case 7:
		return pick(g, "\u202E", "\u2067", "\u200F", "") + g.runes(g.between(2, 12), 0x0627, 0x064A) + pick(g, "\u202C", "\u2069", "", " 123")
	case 8:
		return g.runes(g.between(1, 4), 0, 0x1F) + pick(g, "", "\x7f", "\u0085", "\u2028", "\u2029", "\ufeff", "\ufffd", "\u200b", "\u00ad")
	case 9, 10:
		return pick(g, odd...)
	case 11:
		return pick(g, " ", "  ", "\n", "\n\n", "\t", "\r\n", "\u00a0", "\u3000", "\x1c", "\x1f", "\x0b", " \n ", "\u2003")
	case 12:
		return "def f(x):\n\tif x == '\\n':\r\n        return {\"a\": [1, 2.50], 'b': None}  # " + g.words(3) + "\n\n\n"
	case 13:
		return fmt.Sprintf("%d%s%x", g.r.Int64(), pick(g, "", ".", ",", " ", "-"), g.r.Uint64())
	case 14:
		return fmt.Sprintf(`{"k%d": "%s", "n": null}`, g.n(100), g.words(2))
	default:
		return g.runes(g.between(1, 5), 0x20, 0x2FFFF)
	}
}

func (g *gen) text() string {
	if g.chance(4) {
		return pick(g, "", "", " ", "\n", "\n\n ")
	}
	var b strings.Builder
	for range g.between(1, 7) {
		b.WriteString(g.piece())
		if g.chance(40) {
			b.WriteByte(' ')
		}
	}
	return b.String()
}

// long is a text of hundreds to thousands of tokens.
func (g *gen) long() string {
	var b strings.Builder
	size := g.between(2_000, 9_000)
	for b.Len() < size {
		b.WriteString(g.words(g.between(5, 60)))
		b.WriteString(pick(g, "\n", "\n\n", " ", ". ", g.piece()))
	}
	return b.String()
}

// number is a JSON number in one of its forms.
func (g *gen) number() raw {
	return pick[raw](g, "0", "-0", "1", "-17", "3.0", "0.1", "1e3", "1E-7", "-0.0", "1e22", "123456789012345678", "9223372036854775807",
		"-9223372036854775808", "0.30000000000000004", "1e16", "123456789.125", "5e-324", "1e-5", "0.0001", "100000000000000000000.0")
}

func (g *gen) value(depth int) any {
	switch k := g.n(9); {
	case k < 3:
		return g.text()
	case k == 3:
		return g.number()
	case k == 4:
		return g.chance(50)
	case k == 5:
		return nil
	case k == 6 && depth > 0:
		list := []any{}
		for range g.n(4) {
			list = append(list, g.value(depth-1))
		}
		return list
	case depth > 0:
		o := obj{}
		for range g.n(4) {
			o.add(g.name(), g.value(depth-1))
		}
		return o
	default:
		return g.words(1)
	}
}

func (g *gen) name() string {
	return pick(g, "city", "unit", "a", "", "größe", "名前", "with space", "quote\"d", "snake_case", "camelCase", "n"+fmt.Sprint(g.n(100)))
}

// schema is a JSON schema as tool definitions have it.
func (g *gen) schema(depth int) obj {
	o := obj{{"type", "object"}}
	if g.chance(10) {
		return pick(g, obj{}, obj{{"type", "object"}, {"properties", obj{}}}, o)
	}
	properties := obj{}
	for range g.between(1, 4) {
		var p obj
		switch kind := g.n(7); {
		case kind == 0 && depth > 0:
			p = g.schema(depth - 1)
		case kind == 1:
			p = obj{{"type", "array"}, {"items", obj{{"type", pick(g, "string", "number", "integer")}}}, {"minItems", g.number()}}
		case kind == 2:
			p = obj{{"anyOf", []any{obj{{"type", "string"}}, obj{{"type", "null"}}}}, {"default", nil}}
		case kind == 3:
			p = obj{{"enum", []any{"celsius", g.text(), raw("3"), nil, true}}, {"description", g.text()}}
		case kind == 4:
			p = obj{{"type", []any{"integer", "null"}}, {"minimum", g.number()}, {"default", g.value(1)}}
		default:
			p = obj{{"type", "string"}, {"description", g.text()}}
		}
		properties.add(g.name(), p)
	}
	o.set("properties", properties)
	if g.chance(60) {
		o.set("required", []any{properties[0].key})
	}
	if g.chance(30) {
		o.set("additionalProperties", false)
	}
	if g.chance(10) {
		o.set("$defs", obj{{"T", obj{{"$ref", "#/$defs/T"}}}})
	}
	g.shuffle(o)
	return o
}

func (g *gen) shuffle(o obj) {
	if g.chance(30) {
		g.r.Shuffle(len(o), func(i, j int) { o[i], o[j] = o[j], o[i] })
	}
}

func (g *gen) tool(name string) obj {
	f := obj{{"name", name}}
	if g.chance(85) {
		f.set("description", pick[any](g, g.text(), g.words(12), nil))
	}
	if g.chance(85) {
		f.set("parameters", pick[any](g, g.schema(3), g.schema(2), g.schema(1), nil))
	}
	if g.chance(15) {
		f.set("strict", pick[any](g, true, false, nil))
	}
	if g.chance(5) {
		f.set("x-note", g.text())
	}
	g.shuffle(f)
	t := obj{}
	if g.chance(90) {
		t.set("type", "function")
	}
	t.set("function", f)
	if g.chance(5) {
		t.set("x-more", g.value(1))
	}
	if g.chance(3) {
		t.set("defer_loading", pick(g, true, false))
	}
	g.shuffle(t)
	return t
}

// arguments are the arguments of a tool call: text that should be a JSON object
// and is not always one.
func (g *gen) arguments() any {
	switch g.n(14) {
	case 0:
		return pick(g, "", "{}", " {} ", "null", "[]", "42", "\"text\"", "true", "{", "{\"a\": }", "not json", "{'a': 1}", "{\"a\": 1} x", "\ufeff{}")
	case 1:
		return pick(g, `{"a": NaN}`, `{"a": Infinity, "b": -Infinity}`, `{"a": 1, "a": 2, "b": 3}`, `{"a": 123456789012345678901234567890}`, `{"a": -0, "b": 1e400}`,
			`{"a": "\ud83d\ude00"}`, `{"a": "tab	raw"}`, `{"a":1.50,"b":[1,2,{"c":null}]}`, `{"a": 01}`, `{"a": 1.}`, `{"a":"\u00e9\n\/"}`,
			`{"a": `+strings.Repeat("[", 80)+strings.Repeat("]", 80)+`}`)
	default:
		o := obj{}
		for range g.n(5) {
			o.set(g.name(), g.value(2))
		}
		text := g.encode(o)
		if g.chance(20) {
			text = strings.ReplaceAll(text, `":`, "\" :\n\t")
		}
		return text
	}
}

func (g *gen) toolCall(name string, id int) obj {
	f := obj{{"name", name}, {"arguments", g.arguments()}}
	g.shuffle(f)
	c := obj{{"id", fmt.Sprintf("call_%d", id)}, {"type", "function"}, {"function", f}}
	if g.chance(5) {
		c.set("index", raw("0"))
	}
	g.shuffle(c)
	return c
}

// content is a message's content: text, or parts of it. Only an assistant's may be null.
func (g *gen) content(null bool) any {
	if null && g.chance(15) {
		return nil
	}
	if g.chance(8) {
		return pick[any](g, "", []any{})
	}
	if g.chance(75) {
		return g.text()
	}
	parts := []any{}
	for range g.between(1, 4) {
		p := obj{{"type", "text"}, {"text", g.text()}}
		if g.chance(5) {
			p = obj{{"type", "text"}, {"text", ""}}
		}
		if g.chance(5) {
			p.set("cache_control", obj{{"type", "ephemeral"}})
		}
		g.shuffle(p)
		parts = append(parts, p)
	}
	return parts
}

// chat is the body of a chat request for a model.
func (g *gen) chat(model string) obj {
	body := obj{{"model", model}}
	var names []string
	if g.chance(45) {
		tools := []any{}
		for range g.between(1, 4) {
			names = append(names, pick(g, "get_weather", "search", "run", "f", "größe", "a.b-c")+fmt.Sprint(len(names)))
			tools = append(tools, g.tool(names[len(names)-1]))
		}
		body.set("tools", tools)
		if g.chance(40) {
			choice := any(pick(g, "auto", "none", "required"))
			if g.chance(25) {
				choice = obj{{"type", "function"}, {"function", obj{{"name", pick(g, names...)}}}}
			}
			body.set("tool_choice", choice)
		}
	}
	messages := []any{}
	add := func(m obj) {
		if g.chance(6) {
			m.set("name", pick(g, "bob", "näme", "x y"))
		}
		g.shuffle(m)
		messages = append(messages, m)
	}
	if g.chance(45) {
		text := g.content(false)
		if g.chance(4) {
			text = "x-anthropic-billing-header: cch=" + fmt.Sprint(g.n(1e6)) + pick(g, "", "\n"+g.text())
		}
		add(obj{{"role", "system"}, {"content", text}})
	}
	if g.chance(10) {
		add(obj{{"role", "developer"}, {"content", g.content(false)}})
	}
	calls := 0
	for turn := range pick(g, 1, 1, 1, 2, 3, 5, 8) {
		if turn > 0 {
			calls = g.assistant(add, names, calls)
		}
		text := g.content(false)
		if g.chance(4) {
			text = g.long()
		}
		add(obj{{"role", "user"}, {"content", text}})
		if g.chance(4) {
			add(obj{{"role", pick(g, "system", "developer")}, {"content", g.content(false)}})
		}
	}
	ends := false
	if g.chance(15) {
		g.assistant(add, names, calls)
		ends = true
	}
	body.set("messages", messages)
	switch {
	case ends && g.chance(70):
		body.set("continue_final_message", true)
		body.set("add_generation_prompt", false)
	case g.chance(8):
		body.set("add_generation_prompt", false)
	case g.chance(3):
		body.set("continue_final_message", true)
		body.set("add_generation_prompt", false)
	}
	if g.chance(15) {
		body.set("reasoning_effort", pick(g, "none", "low", "medium", "high"))
	}
	if g.chance(20) {
		kwargs := obj{}
		if g.chance(80) {
			kwargs.set("enable_thinking", pick[any](g, true, false, false, nil, "auto"))
		}
		if g.chance(20) {
			kwargs.set(pick(g, "custom", "tools_in_user_message", "date_string", "add_generation_prompt", "preserve_thinking"), pick[any](g, true, false, "text", nil))
		}
		body.set("chat_template_kwargs", kwargs)
	}
	if g.chance(6) {
		body.set("documents", []any{obj{{"title", g.text()}, {"text", g.text()}}, obj{{"title", "t"}, {"text", g.words(9)}}})
	}
	if g.chance(6) {
		body.set("add_special_tokens", g.chance(60))
	}
	if g.chance(10) {
		body.set("user", g.words(1))
		body.set("temperature", raw("0.0"))
	}
	g.shuffle(body)
	return body
}

// assistant adds an assistant's turn, perhaps with tool calls and their results.
func (g *gen) assistant(add func(obj), names []string, calls int) int {
	m := obj{{"role", "assistant"}}
	if len(names) == 0 || !g.chance(60) {
		text := g.content(true)
		if g.chance(10) {
			text = "<think>\n" + g.text() + "\n</think>\n\n" + g.text()
		}
		m.set("content", text)
		if g.chance(15) {
			m.set(pick(g, "reasoning_content", "reasoning"), pick[any](g, g.text(), g.text(), "", nil))
		}
		if g.chance(5) {
			m.set("tool_calls", pick[any](g, []any{}, nil))
		}
		add(m)
		return calls
	}
	if g.chance(80) {
		m.set("content", pick[any](g, nil, "", g.text(), g.content(true)))
	}
	list := []any{}
	first := calls
	for range g.between(1, 3) {
		list = append(list, g.toolCall(pick(g, names...), calls))
		calls++
	}
	m.set("tool_calls", list)
	if g.chance(15) {
		m.set("reasoning_content", g.text())
	}
	add(m)
	for id := first; id < calls; id++ {
		add(obj{{"role", "tool"}, {"tool_call_id", fmt.Sprintf("call_%d", id)}, {"content", g.content(false)}})
	}
	return calls
}

// completion is the body of a completions request.
func (g *gen) completion(model string) obj {
	text := g.text()
	if g.chance(10) {
		text = g.long()
	}
	body := obj{{"model", model}, {"prompt", text}}
	if g.chance(5) {
		body[1].value = []any{text, g.text()}
	}
	if g.chance(60) {
		body.set("add_special_tokens", g.chance(50))
	}
	g.shuffle(body)
	return body
}

// encode writes v as JSON. Strings come in the ways that clients write them:
// as they are, or with everything but ASCII escaped.
func (g *gen) encode(v any) string {
	var b strings.Builder
	g.write(&b, v)
	return b.String()
}

func (g *gen) write(b *strings.Builder, v any) {
	switch v := v.(type) {
	case obj:
		b.WriteByte('{')
		for i, m := range v {
			if i > 0 {
				b.WriteString(", ")
			}
			g.write(b, m.key)
			b.WriteString(": ")
			g.write(b, m.value)
		}
		b.WriteByte('}')
	case []any:
		b.WriteByte('[')
		for i, e := range v {
			if i > 0 {
				b.WriteString(", ")
			}
			g.write(b, e)
		}
		b.WriteByte(']')
	case raw:
		b.WriteString(string(v))
	case string:
		ascii := g.chance(30)
		b.WriteByte('"')
		for _, r := range v {
			switch {
			case r == '"' || r == '\\':
				b.WriteByte('\\')
				b.WriteRune(r)
			case r < ' ' || ascii && r > '~':
				for _, u := range utf16.Encode([]rune{r}) {
					fmt.Fprintf(b, `\u%04x`, u)
				}
			default:
				b.WriteRune(r)
			}
		}
		b.WriteByte('"')
	default: // null, true, false, an int
		text, err := json.Marshal(v)
		if err != nil {
			panic(err)
		}
		b.Write(text)
	}
}

// serve is front.Post, again while no worker is ready: on a machine that is busy
// with other things an engine may miss its health check.
func serve(front *rig.Front, path string, body []byte) (a rig.Answer) {
	for deadline := time.Now().Add(time.Minute); time.Now().Before(deadline); <-time.After(100 * time.Millisecond) {
		if a = front.Post(path, body); a.Status != http.StatusServiceUnavailable {
			break
		}
	}
	return a
}
