package chat

import (
	"errors"
	"slices"
	"strings"

	"github.com/ardanlabs/jinja"
)

// normalise turns the client's messages into what vLLM gives to the template: only the fields that it passes on, content as text
// or as parts, tool call arguments as objects, reasoning under both of its names, developer messages as the template knows them.
func normalise(list jinja.Value, c *compiled) ([]jinja.Value, error) {
	if !list.IsList() {
		return nil, clientError("messages is not a list")
	}
	items := list.AsList().Items
	messages := make([]jinja.Value, 0, len(items))
	developer := false
	for i, item := range items {
		if !item.IsDict() {
			return nil, clientError("messages[%d] is not an object", i)
		}
		in := item.AsDict()
		if !in.Data["role"].IsString() {
			return nil, clientError("messages[%d].role is not a string", i)
		}
		role := in.Data["role"].AsString()
		text := in.Data["content"]
		if role == "system" {
			text = withoutBilling(text)
		}
		content, err := normaliseContent(text, c.parts, i)
		if err != nil {
			return nil, err
		}
		v, out := item, in
		if !slices.Equal(in.Keys, plainKeys) {
			v = jinja.NewDict()
			out = v.AsDict()
			out.Set("role", in.Data["role"])
		}
		out.Set("content", content)
		switch role {
		case "assistant":
			if err := toolCalls(out, in.Data["tool_calls"], i); err != nil {
				return nil, err
			}
			reasoning := in.Data["reasoning"]
			if absent(reasoning) {
				reasoning = in.Data["reasoning_content"]
			}
			if !absent(reasoning) {
				out.Set("reasoning", reasoning)
				out.Set("reasoning_content", reasoning)
			}
		case "tool":
			if id, ok := in.Get("tool_call_id"); ok {
				out.Set("tool_call_id", id)
			}
			if content.IsList() && onlyText(content.AsList().Items) { // templates want text of tools whatever they want of others
				out.Set("content", jinja.NewString(flatten(content)))
			}
		case "developer":
			developer = true
		}
		for _, name := range []string{"name", "task"} {
			if in.Data[name].IsString() {
				out.Set(name, in.Data[name])
			}
		}
		if role == "developer" && c.developer {
			tools := in.Data["tools"]
			if tools.IsUndefined() {
				tools = jinja.None()
			}
			out.Set("tools", tools)
		}
		messages = append(messages, v)
	}
	if developer && !c.developer {
		return mergeSystem(messages), nil
	}
	return messages, nil
}

// plainKeys are the members of nearly all messages, which pass as they came.
var plainKeys = []string{"role", "content"}

func absent(v jinja.Value) bool { return v.IsUndefined() || v.IsNone() }

// normaliseContent returns a message's content as one text, or as a list of parts if the template wants that.
func normaliseContent(content jinja.Value, wantParts bool, message int) (jinja.Value, error) {
	var parts []jinja.Value
	switch {
	case absent(content):
	case content.IsString():
		if !wantParts {
			return content, nil
		}
		return jinja.NewList([]jinja.Value{textPart(content)}), nil
	case content.IsList():
		parts = content.AsList().Items
	default:
		return content, clientError("messages[%d].content is neither text nor a list of parts", message)
	}
	texts := make([]string, 0, len(parts))
	list := make([]jinja.Value, 0, len(parts))
	for _, part := range parts {
		text, err := partText(part, message)
		if err != nil {
			return content, err
		}
		switch {
		case absent(text):
		case wantParts && isReference(part):
			v := jinja.NewDict()
			v.AsDict().Set("type", jinja.NewString(toolReference))
			v.AsDict().Set("name", text)
			list = append(list, v)
		case wantParts:
			list = append(list, withMore(textPart(text), part))
		case text.AsString() == "": // vLLM drops these
		default:
			texts = append(texts, text.AsString())
		}
	}
	if wantParts {
		return jinja.NewList(list), nil
	}
	return jinja.NewString(strings.Join(texts, "\n")), nil
}

// billingHeader starts a line that Claude Code puts before its system prompt, with a value that is new in every request. vLLM drops
// the line, as else no prompt would begin like another.
const billingHeader = "x-anthropic-billing-header"

// withoutBilling returns a system message's content without such lines.
func withoutBilling(content jinja.Value) jinja.Value {
	strip := func(text jinja.Value) (rest jinja.Value, found bool) {
		if !text.IsString() || !strings.HasPrefix(text.AsString(), billingHeader) {
			return text, false
		}
		_, after, _ := strings.Cut(text.AsString(), "\n")
		return jinja.NewString(after), true
	}
	if rest, found := strip(content); found {
		if rest.AsString() == "" {
			return jinja.NewList(nil)
		}
		return rest
	}
	if !content.IsList() {
		return content
	}
	parts := make([]jinja.Value, 0, content.AsList().Len())
	for _, part := range content.AsList().Items {
		rest, found := strip(part)
		if part.IsDict() && part.AsDict().Data["type"].IsString() && part.AsDict().Data["type"].AsString() == "text" {
			if rest, found = strip(part.AsDict().Data["text"]); found {
				part.AsDict().Set("text", rest)
			}
		} else if found {
			part = rest
		}
		if !found || rest.AsString() != "" {
			parts = append(parts, part)
		}
	}
	return jinja.NewList(parts)
}

// toolReference is the type of a part that names a tool, for the template to write out.
const toolReference = "tool_reference"

func isReference(part jinja.Value) bool {
	if !part.IsDict() {
		return false
	}
	kind := part.AsDict().Data["type"]
	return kind.IsString() && kind.AsString() == toolReference
}

func onlyText(parts []jinja.Value) bool { return !slices.ContainsFunc(parts, isReference) }

// withMore adds what the client put into a part beyond what vLLM knows there, such as cache_control: vLLM hands it on.
func withMore(to, part jinja.Value) jinja.Value {
	if part.IsDict() {
		for _, key := range part.AsDict().Keys {
			if !slices.Contains(partFields, key) {
				to.AsDict().Set(key, part.AsDict().Data[key])
			}
		}
	}
	return to
}

// partFields are the members of content parts of all types that vLLM knows.
var partFields = []string{
	"audio_embeds", "audio_url", "closed", "data", "file", "image_embeds", "image_pil", "image_url", "input_audio", "name", "prompt_cache_breakpoint",
	"refusal", "text", "thinking", "type", "uuid", "video_embeds", "video_url",
}

func textPart(text jinja.Value) jinja.Value {
	v := jinja.NewDict()
	v.AsDict().Set("type", jinja.NewString("text"))
	v.AsDict().Set("text", text)
	return v
}

// partText returns the text of a content part, none if it has none.
func partText(part jinja.Value, message int) (jinja.Value, error) {
	if part.IsString() {
		return part, nil
	}
	if !part.IsDict() {
		return part, clientError("messages[%d].content has a part that is not an object", message)
	}
	fields := part.AsDict().Data
	if !fields["type"].IsString() {
		for _, media := range []string{"image_url", "image_pil", "image_embeds", "audio_url", "audio_embeds", "input_audio", "video_url"} {
			if _, ok := fields[media]; ok {
				return part, ErrMedia
			}
		}
		return part, clientError("messages[%d].content has a part without a type", message)
	}
	name := ""
	switch kind := fields["type"].AsString(); kind {
	case "text", "input_text", "output_text":
		name = "text"
	case "refusal", "thinking":
		name = kind
	case toolReference:
		name = "name"
	case "image_url", "input_image", "image_pil", "image_embeds", "audio_url", "audio_embeds", "input_audio", "video_url":
		return part, ErrMedia
	default:
		return part, clientError("Unknown part type: %s", kind)
	}
	text := fields[name]
	if !absent(text) && !text.IsString() {
		return part, clientError("messages[%d].content has a part whose %s is not a string", message, name)
	}
	return text, nil
}

// toolCalls sets the assistant's tool calls in out, with arguments as objects. An empty list is left out. Arguments that are no JSON
// object become an empty one, so that one bad turn in a conversation does not break all later ones. Members are in the order of
// vLLM's request model, which shows where a template prints a whole call.
func toolCalls(out *jinja.Dict, calls jinja.Value, message int) error {
	if absent(calls) {
		return nil
	}
	if !calls.IsList() {
		return clientError("messages[%d].tool_calls is not a list", message)
	}
	list := make([]jinja.Value, 0, calls.AsList().Len())
	for _, call := range calls.AsList().Items {
		if !call.IsDict() || !call.AsDict().Data["function"].IsDict() {
			return clientError("assistant tool_calls entries must be objects of type 'function'")
		}
		if kind, ok := call.AsDict().Get("type"); ok && (!kind.IsString() || kind.AsString() != "function") {
			return clientError("chat completions only support assistant tool_calls of type 'function'")
		}
		function := call.AsDict().Data["function"].AsDict()
		arguments := function.Data["arguments"]
		if arguments.IsString() {
			parsed, err := decodePython(arguments.AsString())
			if errors.Is(err, ErrUnsure) {
				return err
			}
			if err != nil {
				parsed = jinja.None()
			}
			arguments = parsed
		}
		if !arguments.IsDict() {
			arguments = jinja.NewDict()
		}
		function.Set("arguments", arguments)
		call.AsDict().Set("function", ordered(function, "arguments", "name"))
		call.AsDict().Set("type", jinja.NewString("function"))
		list = append(list, ordered(call.AsDict(), "id", "function", "type"))
	}
	if len(list) > 0 {
		out.Set("tool_calls", jinja.NewList(list))
	}
	return nil
}

// ordered returns d with the named keys first, where it has them.
func ordered(d *jinja.Dict, keys ...string) jinja.Value {
	v := jinja.NewDict()
	out := v.AsDict()
	for _, key := range append(keys, d.Keys...) {
		if value, ok := d.Get(key); ok {
			out.Set(key, value)
		}
	}
	return v
}

// mergeSystem makes developer messages system ones and, where a system message is not the first, merges all into one at the front.
func mergeSystem(messages []jinja.Value) []jinja.Value {
	system := jinja.NewString("system")
	var texts []string
	others := make([]jinja.Value, 1, len(messages)+1)
	merge := false
	for i, m := range messages {
		fields := m.AsDict()
		if fields.Data["role"].AsString() == "developer" {
			fields.Set("role", system)
		}
		if fields.Data["role"].AsString() != "system" {
			others = append(others, m)
			continue
		}
		merge = merge || i > 0
		if text := flatten(fields.Data["content"]); text != "" {
			texts = append(texts, text)
		}
	}
	if !merge {
		return messages
	}
	first := jinja.NewDict()
	first.AsDict().Set("role", system)
	first.AsDict().Set("content", jinja.NewString(strings.Join(texts, "\n\n")))
	others[0] = first
	return others
}

func flatten(content jinja.Value) string {
	if content.IsString() {
		return content.AsString()
	}
	var texts []string
	for _, part := range content.AsList().Items {
		if part.IsString() {
			texts = append(texts, part.AsString())
		} else if text := part.AsDict().Data["text"]; text.IsString() {
			texts = append(texts, text.AsString())
		}
	}
	return strings.Join(texts, "\n")
}

// normaliseTools gives tools the members that vLLM's request model has, in its order and with its defaults, which all reach the
// prompt through tojson: type, then function with name, description and parameters (null if absent), then strict and
// defer_loading where they are set. Others it drops.
func normaliseTools(tools []jinja.Value) ([]jinja.Value, error) {
	out := make([]jinja.Value, 0, len(tools))
	for i, tool := range tools {
		if !tool.IsDict() {
			return nil, clientError("tools[%d] is not an object", i)
		}
		in := tool.AsDict()
		if kind := in.Data["type"]; !kind.IsUndefined() && (!kind.IsString() || kind.AsString() != "function") {
			return nil, clientError("tools[%d].type is not 'function'", i)
		}
		if !in.Data["function"].IsDict() || !in.Data["function"].AsDict().Data["name"].IsString() {
			return nil, clientError("tools[%d].function has no name", i)
		}
		from := in.Data["function"].AsDict()
		function, whole := jinja.NewDict(), jinja.NewDict()
		for _, key := range []string{"name", "description", "parameters"} {
			value := from.Data[key]
			if value.IsUndefined() {
				value = jinja.None()
			}
			function.AsDict().Set(key, value)
		}
		whole.AsDict().Set("type", jinja.NewString("function"))
		whole.AsDict().Set("function", function)
		if strict := from.Data["strict"]; !absent(strict) {
			if !strict.IsBool() { // vLLM takes "yes" and 1 as well
				return nil, ErrUnsure
			}
			function.AsDict().Set("strict", strict)
		}
		late := from.Data["defer_loading"]
		if mine := in.Data["defer_loading"]; !absent(mine) {
			whole.AsDict().Set("defer_loading", mine)
			if absent(late) {
				late = mine
			}
		}
		if !absent(late) {
			function.AsDict().Set("defer_loading", late)
		}
		out = append(out, whole)
	}
	return out, nil
}
