package anthropic

import (
	"bytes"
	"crypto/rand"
	"math"
	"slices"
	"strconv"

	"github.com/kinference/kinference/internal/openai"
)

// A request of a client of this API that goes to a provider of this API needs no
// translation, and would lose by it what OpenAI's API has no words for: what is
// cached, signatures of thinking, features in beta. So the provider gets the
// client's own body, and the client the provider's own events. The latter travel
// inside of chat chunks, as all that is between provider and client.

// ownName is the member of a chunk or completion that holds the event or message
// that it was made of. It is another one in each process, so that no engine can
// write it.
var ownName = "kinference_" + rand.Text()

// sent are the members that a provider gets. metadata tells who our clients are;
// service_tier, speed and the like have prices of their own, and what is not known
// here may have as well.
var sent = []string{
	"model", "messages", "system", "max_tokens", "stream", "tools", "tool_choice", "stop_sequences", "temperature", "top_p", "top_k",
	"thinking", "output_config", "output_format", "context_management", "cache_control",
}

// leastBudget is the smallest thinking budget that the API takes.
const leastBudget = 1024

// OwnBody is a body of this API as a provider of it gets it: byte for byte as the
// client sent it, but for the model's name, members that must stay, a limit of output
// above limit, and thinking that no provider has signed. dropped names members that
// are not sent, for a log.
func OwnBody(body *openai.Object, model string, limit int) (out []byte, dropped []string, err error) {
	changes := []openai.Change{openai.Set(openai.AppendString(nil, model), "model")}
	for i := range body.Len() {
		if name := body.Name(i); !slices.Contains(sent, name) {
			changes = append(changes, openai.Remove(name))
			if len(dropped) < maxDropped {
				dropped = append(dropped, name[:min(len(name), 64)])
			}
		}
	}
	asked, _ := body.Get("max_tokens").Int()
	if limit > 0 && asked > int64(limit) {
		changes = append(changes, openai.Set(strconv.AppendInt(nil, int64(limit), 10), "max_tokens"))
		changes = append(changes, lessThinking(body.Get("thinking"), limit)...)
	}
	text, changed, last := signedOnly(body.Get("messages"))
	if changed {
		changes = append(changes, openai.Set(text, "messages"))
	}
	if last { // a turn that is still going on must begin with its thinking
		changes = append(changes, openai.Remove("thinking"))
	}
	out, err = body.Apply(make([]byte, 0, len(body.Raw())+64), changes...)
	return out, dropped, err
}

// lessThinking keeps the budget below the limit of output, as the API demands.
func lessThinking(v openai.Value, limit int) []openai.Change {
	var o openai.Object
	if v.Kind != openai.Obj || o.Parse(v.Raw, math.MaxInt) != nil {
		return nil
	}
	switch budget, ok := o.Get("budget_tokens").Int(); {
	case !ok || budget < int64(limit):
		return nil
	case limit <= leastBudget:
		return []openai.Change{openai.Remove("thinking")}
	}
	return []openai.Change{openai.Set(strconv.AppendInt(nil, int64(limit-1), 10), "thinking", "budget_tokens")}
}

// signedOnly leaves out thinking that has no signature of a provider, which would
// refuse it: what our engines thought in earlier turns. last says that some of it was
// in the last message of the assistant.
func signedOnly(v openai.Value) (text []byte, changed, last bool) {
	text = append(text, '[')
	for m := range v.Elements() {
		kept, some := m.Raw, true
		if body, cut, left := signedMessage(m); cut {
			kept, some, changed, last = body, left, true, true
		} else if isAssistant(m) {
			last = false
		}
		if !some {
			continue
		}
		if len(text) > 1 {
			text = append(text, ',')
		}
		text = append(text, kept...)
	}
	return append(text, ']'), changed, last
}

func isAssistant(m openai.Value) bool {
	var o openai.Object
	if m.Kind != openai.Obj || o.Parse(m.Raw, math.MaxInt) != nil {
		return false
	}
	role, _ := o.Get("role").Text()
	return role == "assistant"
}

// signedMessage leaves it out of one message; left says that something remains.
func signedMessage(m openai.Value) (text []byte, cut, left bool) {
	if m.Kind != openai.Obj || !bytes.Contains(m.Raw, []byte(`"thinking"`)) {
		return nil, false, true
	}
	var o, block openai.Object
	if o.Parse(m.Raw, math.MaxInt) != nil {
		return nil, false, true
	}
	list := []byte{'['}
	for b := range o.Get("content").Elements() {
		if b.Kind == openai.Obj && block.Parse(b.Raw, math.MaxInt) == nil {
			kind, _ := block.Get("type").Text()
			signature, _ := block.Get("signature").Text()
			if kind == "thinking" && (signature == "" || signature == unsigned) {
				cut = true
				continue
			}
		}
		if len(list) > 1 {
			list = append(list, ',')
		}
		list = append(list, b.Raw...)
	}
	if !cut {
		return nil, false, true
	}
	out, err := o.Apply(nil, openai.Set(append(list, ']'), "content"))
	return out, err == nil, len(list) > 1
}

// own puts the event that a chunk was made of into it. out is what was made: nothing,
// or one chunk and perhaps what ends the stream.
func (s *ChatStream) own(dst []byte, from int, data []byte) []byte {
	if len(dst) == from {
		dst = s.delta(dst, "")
	}
	end := from + bytes.Index(dst[from:], []byte("}\n\n"))
	rest := bytes.Clone(dst[end:])
	dst = append(dst[:end], `,"`+ownName+`":`...)
	return append(append(dst, openai.Compact(data)...), rest...)
}

// ownEvents are those that clients get as they are. Pings are ours, and the last event
// follows from the stream's end.
var ownEvents = map[string]bool{
	"message_start": true, "content_block_start": true, "content_block_delta": true, "content_block_stop": true, "message_delta": true,
}

// passed writes the event that a chunk was made of, if it has one; false if it has
// none.
func (s *Stream) passed(dst []byte, own openai.Value) ([]byte, bool) {
	var o openai.Object
	if own.Kind != openai.Obj || o.Parse(own.Raw, 0) != nil {
		return dst, false
	}
	kind, _ := o.Get("type").Text()
	if !ownEvents[kind] {
		return dst, false
	}
	s.own = true
	data := own.Raw
	if kind == "message_start" {
		if s.opened { // by a ping
			return dst, true
		}
		var err error
		if data, err = o.Apply(nil, openai.Set(openai.AppendString(nil, s.a.Model), "message", "model")); err != nil {
			return dst, false
		}
		s.opened = true
	}
	return openai.AppendEvent(s.Open(dst), []byte(kind), data), true
}

// ownMessage is the message that a completion was made of, nil if it has none.
func ownMessage(completion *openai.Object, a *Answer) []byte {
	var o openai.Object
	v := completion.Get(ownName)
	if v.Kind != openai.Obj || o.Parse(v.Raw, 0) != nil {
		return nil
	}
	out, err := o.Apply(nil, openai.Set(openai.AppendString(nil, a.Model), "model"))
	if err != nil {
		return nil
	}
	return out
}
