package responses

import "github.com/kinference/kinference/internal/openai"

// AppendChat appends the request as the body of an OpenAI chat completion for
// a worker. A turn becomes the same bytes whatever stands around it, so the
// next request of a conversation begins with this one's messages.
func (r *Request) AppendChat(dst []byte) []byte {
	w := writer{dst}
	w.str(`{"model":`)
	w.dst = openai.AppendString(w.dst, r.Model)
	w.str(`,"messages":[`)
	wrote := false
	next := func(role string) {
		if wrote {
			w.str(`,`)
		}
		wrote = true
		w.str(`{"role":"` + role + `"`)
	}
	if len(r.system) > 0 {
		next("system")
		w.str(`,"content":`)
		w.join(r.system, `\n\n`)
		w.str(`}`)
	}
	for i := range r.turns {
		next(r.turns[i].role)
		w.turn(&r.turns[i])
	}
	w.str(`]`)
	r.appendTools(&w)
	if r.limit.Given() {
		w.str(`,"max_tokens":`)
		w.raw(r.limit.Raw)
	}
	for i, name := range []string{"temperature", "top_p"} {
		if r.sampling[i].Given() {
			w.str(`,"` + name + `":`)
			w.raw(r.sampling[i].Raw)
		}
	}
	if r.format != "" {
		w.str(`,"response_format":` + r.format)
	}
	switch r.effort {
	case "none", "low", "medium", "high":
		w.str(`,"reasoning_effort":"` + r.effort + `"`)
	case "minimal":
		w.str(`,"reasoning_effort":"low"`)
	case "xhigh", "max": // not known to every engine
		w.str(`,"reasoning_effort":"high"`)
	}
	if r.kwargs.Given() {
		w.str(`,"chat_template_kwargs":`)
		w.raw(r.kwargs.Raw)
	}
	if r.salt.Given() {
		w.str(`,"cache_salt":`)
		w.raw(r.salt.Raw)
	}
	if r.Stream {
		w.str(`,"stream":true,"stream_options":{"include_usage":true,"continuous_usage_stats":true}`)
	}
	w.str(`}`)
	return w.dst
}

func (r *Request) appendTools(w *writer) {
	var o openai.Object
	for i, v := range r.tools {
		if o.Parse(v.Raw, 0) != nil {
			continue // cannot be: it is part of a parsed body
		}
		if w.str(`,`); i == 0 {
			w.str(`"tools":[`)
		}
		w.str(`{"type":"function","function":{"name":`)
		w.raw(o.Get("name").Raw)
		for _, name := range []string{"description", "parameters", "strict"} {
			if m := o.Get(name); m.Given() {
				w.str(`,"` + name + `":`)
				w.raw(m.Raw)
			}
		}
		w.str(`}}`)
	}
	if len(r.tools) == 0 {
		return
	}
	w.str(`]`)
	if r.choice != "" {
		w.str(`,"tool_choice":` + r.choice)
	}
	if r.serial {
		w.str(`,"parallel_tool_calls":false`)
	}
}

type writer struct{ dst []byte }

func (w *writer) str(s string) { w.dst = append(w.dst, s...) }
func (w *writer) raw(b []byte) { w.dst = append(w.dst, b...) }

// join writes strings as one, with sep between those that are not empty.
func (w *writer) join(values []openai.Value, sep string) {
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

// turn writes the rest of a message behind its role.
func (w *writer) turn(t *turn) {
	if t.role == "tool" {
		w.str(`,"tool_call_id":`)
		w.raw(t.id.Raw)
	}
	if len(t.reasoning) > 0 {
		w.str(`,"reasoning":`)
		w.join(t.reasoning, "")
	}
	w.str(`,"content":`)
	switch {
	case t.role == "assistant" && len(t.parts) == 0 && len(t.calls) > 0:
		w.str(`null`)
	case t.role == "assistant":
		w.join(texts(t.parts), "")
	case len(t.parts) == 1 && !t.parts[0].image.Given():
		w.raw(t.parts[0].text.Raw)
	default:
		w.str(`[`)
		for i := range t.parts {
			if i > 0 {
				w.str(`,`)
			}
			if image := t.parts[i].image; image.Given() {
				w.str(`{"type":"image_url","image_url":{"url":`)
				w.raw(image.Raw)
				w.str(`}}`)
				continue
			}
			w.str(`{"type":"text","text":`)
			w.raw(t.parts[i].text.Raw)
			w.str(`}`)
		}
		w.str(`]`)
	}
	for i, c := range t.calls {
		if w.str(`,`); i == 0 {
			w.str(`"tool_calls":[`)
		}
		w.str(`{"id":`)
		w.raw(c.id.Raw)
		w.str(`,"type":"function","function":{"name":`)
		w.raw(c.name.Raw)
		w.str(`,"arguments":`)
		w.raw(c.arguments.Raw)
		w.str(`}}`)
	}
	if len(t.calls) > 0 {
		w.str(`]`)
	}
	w.str(`}`)
}

func texts(parts []part) []openai.Value {
	out := make([]openai.Value, 0, len(parts))
	for _, p := range parts {
		out = append(out, p.text)
	}
	return out
}
