package anthropic

import (
	"bytes"
	"math"
	"regexp"
	"slices"

	"github.com/kinference/kinference/internal/openai"
)

// Unread is what a provider of this API gets of a body (see [OwnBody]) and no chat body
// made of it has: titles of documents, examples of tools, Claude Code's billing block,
// members that are new. Who judges a request by its chat body has not seen it. What
// only a provider can read, such as signatures, is left out if it looks like it.
func Unread(body *openai.Object) []openai.Value {
	u := &unread{}
	for i := range body.Len() {
		switch name, v := body.Name(i), body.At(i); name {
		case "model", "max_tokens", "stream", "stop_sequences", "temperature", "top_p", "top_k": // the chat body has them
		case "system":
			u.system(v)
		case "messages":
			for m := range v.Elements() {
				o := u.object(0, m)
				u.rest(o, "role", "content")
				for b := range o.Get("content").Elements() {
					u.block(1, b)
				}
			}
		case "tools":
			for t := range v.Elements() {
				u.rest(u.object(0, t), "name", "description", "input_schema")
			}
		case "tool_choice":
			u.rest(u.object(0, v), "type", "name")
		case "thinking":
			u.rest(u.object(0, v), "type", "budget_tokens")
		default:
			if slices.Contains(sent, name) {
				u.add(v)
			}
		}
	}
	return u.out
}

// unread collects. levels is memory for objects that are open at the same time.
type unread struct {
	out    []openai.Value
	levels [4]openai.Object
}

func (u *unread) add(v openai.Value) {
	if v.Given() {
		u.out = append(u.out, v)
	}
}

// object opens an object. What is none has no members.
func (u *unread) object(level int, v openai.Value) *openai.Object {
	o := &u.levels[level]
	if v.Kind != openai.Obj || o.Parse(v.Raw, math.MaxInt) != nil {
		_ = o.Parse([]byte("{}"), 0)
	}
	return o
}

// rest adds what an object has beside members that were read.
func (u *unread) rest(o *openai.Object, read ...string) {
	var known []openai.Change
	for i := range o.Len() {
		if name := o.Name(i); slices.Contains(read, name) || name == "cache_control" && plainCache.Match(o.At(i).Raw) {
			known = append(known, openai.Remove(name))
		}
	}
	if len(known) == o.Len() {
		return
	}
	if raw, err := o.Apply(nil, known...); err == nil { // always, as none of them is nested
		u.add(openai.Value{Raw: raw, Kind: openai.Obj})
	}
}

var (
	// plainCache is what nearly every request of an agent has, many times.
	plainCache = regexp.MustCompile(`^\{\s*"type"\s*:\s*"ephemeral"\s*(,\s*"ttl"\s*:\s*"[0-9]+[mh]"\s*)?\}$`)
	// plainBilling is the billing block as Claude Code writes it.
	plainBilling = regexp.MustCompile(`^"` + billing + `:( ?[a-z_]{1,32}=[a-z0-9.-]{1,32};)*"$`)
)

func (u *unread) system(v openai.Value) {
	bills := func(text openai.Value) bool {
		return text.Kind == openai.String && bytes.HasPrefix(text.Raw[1:], []byte(billing)) && !plainBilling.Match(text.Raw)
	}
	if bills(v) {
		u.add(v)
	}
	for b := range v.Elements() {
		o := u.object(0, b)
		if u.rest(o, "type", "text"); bills(o.Get("text")) {
			u.add(o.Get("text"))
		}
	}
}

// blockMembers are those of each kind of block that its chat message has, or that are
// looked at below.
var blockMembers = map[string][]string{
	"text": {"type", "text"}, "image": {"type", "source"}, "document": {"type", "source"}, "thinking": {"type", "thinking", "signature"}, "redacted_thinking": {"type", "data"},
	"tool_use": {"type", "id", "name", "input"}, "tool_result": {"type", "tool_use_id", "content"}, "tool_reference": {"type", "tool_name"},
}

func (u *unread) block(level int, v openai.Value) {
	if level+1 >= len(u.levels) { // no request has that
		u.add(v)
		return
	}
	o := u.object(level, v)
	kind, _ := o.Get("type").Text()
	u.rest(o, blockMembers[kind]...)
	switch kind {
	case "image":
		u.rest(u.object(level+1, o.Get("source")), "type", "media_type", "data", "url")
	case "document":
		u.rest(u.object(level+1, o.Get("source")), "type", "data")
	case "thinking":
		u.opaque(o.Get("signature"))
	case "redacted_thinking":
		u.opaque(o.Get("data"))
	case "tool_result":
		for b := range o.Get("content").Elements() {
			u.block(level+1, b)
		}
	}
}

// shortestOpaque is the least length of a signature, or of thinking that is encrypted.
const shortestOpaque = 64

// opaque adds what should be encrypted and does not look like it.
func (u *unread) opaque(v openai.Value) {
	if v.Kind != openai.String || len(v.Raw) < shortestOpaque+2 || !isBase64(v.Raw[1:len(v.Raw)-1]) {
		u.add(v)
	}
}
