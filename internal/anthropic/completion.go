package anthropic

import (
	"bytes"
	"slices"
	"strconv"

	"github.com/kinference/kinference/internal/openai"
)

// Completion says how a provider's answer is made out for a client of
// OpenAI's API.
type Completion struct {
	ID      string // chatcmpl-…
	Model   string // as the client named it
	Created int64  // Unix time
	// Own puts the message or event that it was made of into each answer, for
	// [Stream] and [AppendMessage].
	Own bool
}

// AppendChat appends a provider's message as a chat completion. The error
// says that it is no message.
func AppendChat(dst, message []byte, a Completion) ([]byte, openai.Usage, error) {
	var o, block openai.Object
	if err := o.Parse(message, 0); err != nil {
		return nil, openai.NoUsage, err
	}
	if kind, _ := o.Get("type").Text(); kind != "message" {
		return nil, openai.NoUsage, errNoAnswer
	}
	var texts, thoughts []openai.Value
	var calls [][]byte
	for v := range o.Get("content").Elements() {
		if v.Kind != openai.Obj || block.Parse(v.Raw, 0) != nil {
			continue
		}
		switch kind, _ := block.Get("type").Text(); kind {
		case "text":
			texts = append(texts, block.Get("text"))
		case "thinking":
			thoughts = append(thoughts, block.Get("thinking"))
		case "tool_use":
			call := append([]byte(nil), `{"id":`...)
			call = append(append(call, raw(block.Get("id"))...), `,"type":"function","function":{"name":`...)
			call = append(append(call, raw(block.Get("name"))...), `,"arguments":`...)
			call = openai.AppendString(call, string(openai.Compact(block.Get("input").Raw)))
			calls = append(calls, append(call, "}}"...))
		}
	}
	dst = a.head(dst, "chat.completion")
	dst = append(dst, `{"index":0,"message":{"role":"assistant"`...)
	w := chatWriter{dst: dst}
	if len(thoughts) > 0 {
		w.str(`,"reasoning":`)
		w.join(stringsOnly(thoughts), "")
	}
	w.str(`,"content":`)
	if len(texts) == 0 && len(calls) > 0 {
		w.str("null")
	} else {
		w.join(stringsOnly(texts), "")
	}
	dst = w.dst
	if len(calls) > 0 {
		dst = append(dst, `,"tool_calls":[`...)
		dst = append(append(dst, bytes.Join(calls, []byte(","))...), ']')
	}
	dst = append(dst, `},"logprobs":null,"finish_reason":`...)
	reason, _ := o.Get("stop_reason").Text()
	dst = appendFinish(dst, reason, o.Get("stop_sequence"))
	u := messageUsage{}
	u.take(o.Get("usage"))
	dst = u.append(append(dst, `}],"usage":`...))
	if a.Own {
		dst = append(append(dst, `,"`+ownName+`":`...), openai.Compact(message)...)
	}
	return append(dst, '}'), u.total(), nil
}

func stringsOnly(list []openai.Value) []openai.Value {
	return slices.DeleteFunc(list, func(v openai.Value) bool { return v.Kind != openai.String })
}

// raw is a string's text, and "" for what is none.
func raw(v openai.Value) []byte {
	if v.Kind != openai.String {
		return []byte(`""`)
	}
	return v.Raw
}

func (a *Completion) head(dst []byte, object string) []byte {
	dst = append(dst, `{"id":`...)
	dst = openai.AppendString(dst, a.ID)
	dst = append(append(dst, `,"object":"`...), object...)
	dst = append(dst, `","created":`...)
	dst = strconv.AppendInt(dst, a.Created, 10)
	dst = append(dst, `,"model":`...)
	dst = openai.AppendString(dst, a.Model)
	return append(dst, `,"choices":[`...)
}

// appendFinish appends finish_reason's value, and stop_reason as vLLM has it.
func appendFinish(dst []byte, reason string, sequence openai.Value) []byte {
	finish := "stop"
	switch reason {
	case "max_tokens", "model_context_window_exceeded":
		finish = "length"
	case "tool_use":
		finish = "tool_calls"
	case "refusal":
		finish = "content_filter"
	}
	dst = append(append(append(dst, '"'), finish...), '"')
	if reason == "stop_sequence" && sequence.Kind == openai.String {
		dst = append(append(dst, `,"stop_reason":`...), sequence.Raw...)
	}
	return dst
}

// messageUsage collects usage of a message. Each report is cumulative and
// overrides what it names; it need not name everything, and zero is a value.
type messageUsage struct {
	input, created, cached, output int
	known                          bool
}

func (u *messageUsage) take(v openai.Value) {
	var o openai.Object
	if v.Kind != openai.Obj || o.Parse(v.Raw, 0) != nil {
		return
	}
	u.known = true
	for name, to := range map[string]*int{
		"input_tokens": &u.input, "cache_creation_input_tokens": &u.created, "cache_read_input_tokens": &u.cached, "output_tokens": &u.output,
	} {
		if n, ok := o.Get(name).Int(); ok && n >= 0 && n < 1<<40 {
			*to = int(n)
		}
	}
}

// total is the usage as OpenAI counts it: the prompt includes what was cached.
func (u *messageUsage) total() openai.Usage {
	if !u.known {
		return openai.NoUsage
	}
	return openai.Usage{Prompt: u.input + u.created + u.cached, Cached: u.cached, Output: u.output, Reasoning: openai.Unknown}
}

func (u *messageUsage) append(dst []byte) []byte {
	prompt := u.input + u.created + u.cached
	dst = append(dst, `{"prompt_tokens":`...)
	dst = strconv.AppendInt(dst, int64(prompt), 10)
	dst = append(dst, `,"completion_tokens":`...)
	dst = strconv.AppendInt(dst, int64(u.output), 10)
	dst = append(dst, `,"total_tokens":`...)
	dst = strconv.AppendInt(dst, int64(prompt+u.output), 10)
	dst = append(dst, `,"prompt_tokens_details":{"cached_tokens":`...)
	dst = strconv.AppendInt(dst, int64(u.cached), 10)
	if u.created > 0 {
		dst = append(dst, `,"cache_write_tokens":`...)
		dst = strconv.AppendInt(dst, int64(u.created), 10)
	}
	return append(dst, "}}"...)
}
