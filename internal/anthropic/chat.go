package anthropic

import (
	"strconv"

	"github.com/kinference/kinference/internal/openai"
)

// Target is what a chat body is made for.
type Target int

// The targets. Workers run vLLM, with members of its own for reasoning and
// for counting while a stream runs; other providers would refuse those.
const (
	Worker Target = iota
	Provider
)

// AppendChat appends the request as the body of an OpenAI chat completion.
//
// A message becomes the same bytes whatever stands around it, and members that
// change from turn to turn (cache_control, metadata) have no place in them, so
// the next turn's messages begin with this turn's. Blocks become what vLLM's
// own Messages route makes of them: system blocks joined without separator,
// tool results as tool messages with their texts joined by line feeds, their
// images in a user message behind, thinking as reasoning.
func (r *Request) AppendChat(dst []byte, target Target) []byte {
	w := chatWriter{dst: dst, target: target}
	w.str(`{"model":`)
	w.text(r.Model)
	w.str(`,"messages":[`)
	w.system(r.system)
	for i := range r.messages {
		w.message(&r.messages[i])
	}
	prefilled := w.assistant.open && len(w.assistant.calls) == 0 && len(w.assistant.texts) > 0
	w.flush()
	w.str("]")
	r.appendTools(&w)
	if r.MaxTokens > 0 {
		w.str(`,"max_tokens":`)
		w.dst = strconv.AppendInt(w.dst, int64(r.MaxTokens), 10)
	}
	for i, v := range r.stops {
		if w.str(`,`); i == 0 {
			w.str(`"stop":[`)
		}
		w.raw(v.Raw)
		if i == len(r.stops)-1 {
			w.str(`]`)
		}
	}
	for i, v := range r.sampling {
		if v.Given() && (samples[i] != "top_k" || target == Worker) {
			w.str(`,"` + samples[i] + `":`)
			w.raw(v.Raw)
		}
	}
	if r.schema.Given() {
		w.str(`,"response_format":{"type":"json_schema","json_schema":{"name":"output","strict":true,"schema":`)
		w.raw(r.schema.Raw)
		w.str(`}}`)
	}
	r.appendThinking(&w)
	if prefilled && target == Worker {
		w.str(`,"add_generation_prompt":false,"continue_final_message":true`)
	}
	if r.salt.Given() && target == Worker {
		w.str(`,"cache_salt":`)
		w.raw(r.salt.Raw)
	}
	if r.Stream {
		w.str(`,"stream":true,"stream_options":{"include_usage":true`)
		if target == Worker { // the first chunk then says how long the prompt is
			w.str(`,"continuous_usage_stats":true`)
		}
		w.str(`}`)
	}
	w.str("}")
	return w.dst
}

func (r *Request) appendTools(w *chatWriter) {
	for i := range r.tools {
		t := &r.tools[i]
		if w.str(`,`); i == 0 {
			w.str(`"tools":[`)
		}
		w.str(`{"type":"function","function":{"name":`)
		w.text(t.name)
		if t.description.Given() {
			w.str(`,"description":`)
			w.raw(t.description.Raw)
		}
		w.str(`,"parameters":`)
		w.raw(t.schema.Raw)
		if t.strict.Given() {
			w.str(`,"strict":`)
			w.raw(t.strict.Raw)
		}
		w.str(`}`)
		if t.deferred.Given() && w.target == Worker {
			w.str(`,"defer_loading":`)
			w.raw(t.deferred.Raw)
		}
		w.str(`}`)
	}
	if len(r.tools) == 0 {
		return
	}
	w.str(`]`)
	switch r.choice.kind {
	case "auto", "none":
		w.str(`,"tool_choice":"` + r.choice.kind + `"`)
	case "any":
		w.str(`,"tool_choice":"required"`)
	case "tool":
		w.str(`,"tool_choice":{"type":"function","function":{"name":`)
		w.text(r.choice.name)
		w.str(`}}`)
	}
	if r.choice.serial {
		w.str(`,"parallel_tool_calls":false`)
	}
}

// appendThinking turns reasoning on or off by the two names that templates
// have for it; others ignore them. Without a word from the client the model's
// own default holds. Effort says how much to reason, so it goes with it only:
// vLLM takes any effort for a wish to reason.
func (r *Request) appendThinking(w *chatWriter) {
	effort := ""
	if r.thinking == thinkingOn {
		switch r.effort {
		case "low", "medium", "high":
			effort = r.effort
		case "xhigh", "max": // not known to every engine
			effort = "high"
		}
	}
	if effort != "" {
		w.str(`,"reasoning_effort":"` + effort + `"`)
	}
	if w.target != Worker {
		return
	}
	kwargs := openai.Object{}
	raw := r.kwargs.Raw
	if !r.kwargs.Given() {
		raw = []byte("{}")
	}
	if kwargs.Parse(raw, 0) != nil || r.thinking == thinkingDefault {
		if r.kwargs.Given() {
			w.str(`,"chat_template_kwargs":`)
			w.raw(raw)
		}
		return
	}
	value := strconv.AppendBool(nil, r.thinking == thinkingOn)
	var changes []openai.Change
	for _, name := range []string{"enable_thinking", "thinking"} {
		if !kwargs.Get(name).Given() {
			changes = append(changes, openai.Set(value, name))
		}
	}
	w.str(`,"chat_template_kwargs":`)
	w.dst, _ = kwargs.Apply(w.dst, changes...) // top-level members can always be set
}

// chatWriter writes messages. Those of one role that follow each other become
// one, as at Anthropic: many templates want the roles to alternate.
type chatWriter struct {
	dst       []byte
	target    Target
	wrote     bool // a message stands before
	user      []block
	asUser    bool // a user message is open
	assistant struct {
		open             bool
		texts, reasoning []openai.Value
		calls            []block
	}
}

func (w *chatWriter) str(s string)  { w.dst = append(w.dst, s...) }
func (w *chatWriter) raw(b []byte)  { w.dst = append(w.dst, b...) }
func (w *chatWriter) text(s string) { w.dst = openai.AppendString(w.dst, s) }

// join writes strings as one, with sep between those that are not empty.
func (w *chatWriter) join(values []openai.Value, sep string) {
	w.str(`"`)
	some := false
	for _, v := range values {
		in := v.Raw[1 : len(v.Raw)-1]
		if len(in) == 0 {
			continue
		}
		if some {
			w.str(sep)
		}
		some = true
		w.raw(in)
	}
	w.str(`"`)
}

func (w *chatWriter) begin(role string) {
	if w.wrote {
		w.str(`,`)
	}
	w.wrote = true
	w.str(`{"role":"` + role + `"`)
}

func (w *chatWriter) system(texts []openai.Value) {
	if len(texts) == 0 {
		return
	}
	w.begin("system")
	w.str(`,"content":`)
	w.join(texts, "")
	w.str(`}`)
}

func (w *chatWriter) message(m *message) {
	if m.assistant {
		w.flushUser()
		a := &w.assistant
		if len(a.calls) > 0 { // what follows calls is another turn
			w.flushAssistant()
		}
		a.open = true
		for _, b := range m.blocks {
			switch b.kind {
			case textBlock:
				if len(b.text.Raw) > 2 {
					a.texts = append(a.texts, b.text)
				}
			case thinkingBlock:
				a.reasoning = append(a.reasoning, b.text)
			case useBlock:
				a.calls = append(a.calls, b)
			case redactedBlock, imageBlock, resultBlock, referenceBlock: // only its maker can read it; the others cannot be here
			}
		}
		return
	}
	w.flushAssistant()
	begun := false
	var rest []block
	for _, b := range m.blocks {
		if b.kind != resultBlock {
			rest = append(rest, b)
			continue
		}
		if !begun { // results must follow the calls
			w.flushUser()
			begun = true
		}
		rest = append(rest, w.result(&b)...)
	}
	if len(rest) == 0 && begun {
		return
	}
	w.asUser = true
	w.user = append(w.user, rest...)
}

// result writes a tool message and returns the images, which it cannot hold.
func (w *chatWriter) result(b *block) (images []block) {
	w.begin("tool")
	w.str(`,"tool_call_id":`)
	w.text(inID(b.id))
	w.str(`,"content":`)
	var texts []openai.Value
	references := false
	for _, c := range b.content {
		switch {
		case c.kind == imageBlock:
			images = append(images, c)
		case c.kind == referenceBlock:
			references = true
			texts = append(texts, c.text)
		default:
			texts = append(texts, c.text)
		}
	}
	if references && w.target == Worker { // templates write those out in their own way
		w.parts(b.content)
	} else {
		w.join(texts, `\n`)
	}
	w.str(`}`)
	return images
}

// parts writes a list of content parts, without the images of a tool's result.
func (w *chatWriter) parts(blocks []block) {
	some := false
	for _, b := range blocks {
		if b.kind == imageBlock {
			continue
		}
		sep(&w.dst, &some)
		if b.kind == referenceBlock {
			w.str(`{"type":"tool_reference","name":`)
		} else {
			w.str(`{"type":"text","text":`)
		}
		w.raw(b.text.Raw)
		w.str(`}`)
	}
	if !some {
		w.str(`[`)
	}
	w.str(`]`)
}

func sep(dst *[]byte, some *bool) {
	c := byte('[')
	if *some {
		c = ','
	}
	*dst, *some = append(*dst, c), true
}

func (w *chatWriter) flush() {
	w.flushUser()
	w.flushAssistant()
}

func (w *chatWriter) flushUser() {
	if !w.asUser {
		return
	}
	w.begin("user")
	w.str(`,"content":`)
	switch {
	case len(w.user) == 0:
		w.str(`""`)
	case len(w.user) == 1 && w.user[0].kind == textBlock:
		w.raw(w.user[0].text.Raw)
	default:
		some := false
		for i := range w.user {
			sep(&w.dst, &some)
			w.part(&w.user[i])
		}
		w.str(`]`)
	}
	w.str(`}`)
	w.user, w.asUser = w.user[:0], false
}

func (w *chatWriter) part(b *block) {
	if b.kind != imageBlock {
		w.str(`{"type":"text","text":`)
		w.raw(b.text.Raw)
		w.str(`}`)
		return
	}
	w.str(`{"type":"image_url","image_url":{"url":"`)
	if b.media != "" {
		w.str("data:" + b.media + ";base64,")
	}
	w.raw(b.data.Raw[1:])
	w.str(`}}`)
}

func (w *chatWriter) flushAssistant() {
	a := &w.assistant
	if !a.open {
		return
	}
	w.begin("assistant")
	if len(a.reasoning) > 0 && w.target == Worker {
		w.str(`,"reasoning":`)
		w.join(a.reasoning, "")
	}
	w.str(`,"content":`)
	if len(a.texts) == 0 && len(a.calls) > 0 {
		w.str("null")
	} else {
		w.join(a.texts, "")
	}
	for i := range a.calls {
		c := &a.calls[i]
		if w.str(`,`); i == 0 {
			w.str(`"tool_calls":[`)
		}
		w.str(`{"id":`)
		w.text(inID(c.id))
		w.str(`,"type":"function","function":{"name":`)
		w.text(c.name)
		w.str(`,"arguments":`)
		w.text(string(openai.Compact(c.input.Raw)))
		w.str(`}}`)
	}
	if len(a.calls) > 0 {
		w.str(`]`)
	}
	w.str(`}`)
	a.open, a.texts, a.reasoning, a.calls = false, a.texts[:0], a.reasoning[:0], a.calls[:0]
}
