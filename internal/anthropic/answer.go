package anthropic

import (
	"errors"
	"strconv"

	"github.com/kinference/kinference/internal/openai"
)

var errNoAnswer = errors.New("not a chat completion")

// AppendMessage appends a whole chat completion as a message. The error says
// that it is none.
func AppendMessage(dst, completion []byte, a Answer) ([]byte, error) {
	var chunk openai.Chunk
	if err := chunk.Parse(completion); err != nil {
		return nil, err
	}
	if own := ownMessage(chunk.Object(), &a); own != nil {
		return append(dst, own...), nil
	}
	var choice, message openai.Object
	for v := range chunk.Object().Get("choices").Elements() {
		if v.Kind != openai.Obj || choice.Parse(v.Raw, 0) != nil {
			return nil, errNoAnswer
		}
		break
	}
	v := choice.Get("message")
	if v.Kind != openai.Obj || message.Parse(v.Raw, 0) != nil {
		return nil, errNoAnswer
	}
	dst = append(dst, `{"id":`...)
	dst = openai.AppendString(dst, a.ID)
	dst = append(dst, `,"type":"message","role":"assistant","model":`...)
	dst = openai.AppendString(dst, a.Model)
	dst = append(dst, `,"content":[`...)
	some := false
	block := func(head string) {
		if some {
			dst = append(dst, ',')
		}
		some = true
		dst = append(dst, head...)
	}
	reasoning := message.Get("reasoning")
	if reasoning.Kind != openai.String {
		reasoning = message.Get("reasoning_content")
	}
	if reasoning.Kind == openai.String && len(reasoning.Raw) > 2 && !a.HideThinking {
		block(`{"type":"thinking","thinking":`)
		dst = append(append(dst, reasoning.Raw...), `,"signature":"`+unsigned+`"}`...)
	}
	refused := false
	for _, name := range []string{"content", "refusal"} {
		if text := message.Get(name); text.Kind == openai.String && len(text.Raw) > 2 {
			block(`{"type":"text","text":`)
			dst = append(append(dst, text.Raw...), '}')
			refused = name == "refusal"
		}
	}
	tools := 0
	for c := range message.Get("tool_calls").Elements() {
		if tools++; tools > maxBlocks {
			return nil, errNoAnswer
		}
		block("")
		dst = appendUse(dst, c, a.ID+"_"+strconv.Itoa(tools-1))
	}
	finish, _ := choice.Get("finish_reason").Text()
	dst = append(dst, "],"...)
	dst = appendStop(dst, finish, choice.Get("stop_reason"), tools > 0, refused)
	dst = append(dst, `,"usage":`...)
	u := chunk.Usage
	if u.Prompt == openai.Unknown {
		u.Prompt = a.Input
	}
	dst = appendUsage(dst, u)
	return append(dst, '}'), nil
}

// appendUse appends a tool call as a block. Arguments that are no JSON object
// go to the client as they are, under a name that no tool has: it will refuse
// them, and the model sees why.
func appendUse(dst []byte, v openai.Value, id string) []byte {
	var call, function, input openai.Object
	if v.Kind == openai.Obj {
		_ = call.Parse(v.Raw, 0)
	}
	if f := call.Get("function"); f.Kind == openai.Obj {
		_ = function.Parse(f.Raw, 0)
	}
	if given, _ := call.Get("id").Text(); given != "" {
		id = given
	} else {
		id = "toolu_" + id
	}
	name, _ := function.Get("name").Text()
	dst = append(dst, `{"type":"tool_use","id":`...)
	dst = openai.AppendString(dst, outID(id))
	dst = append(dst, `,"name":`...)
	dst = openai.AppendString(dst, name)
	dst = append(dst, `,"input":`...)
	args := function.Get("arguments")
	text, _ := args.Text()
	switch {
	case args.Kind == openai.Obj:
		dst = append(dst, args.Raw...)
	case text == "":
		dst = append(dst, "{}"...)
	case input.Parse([]byte(text), 0) == nil:
		dst = append(dst, text...)
	default:
		dst = append(dst, `{"raw_arguments":`...)
		dst = append(openai.AppendString(dst, text), '}')
	}
	return append(dst, '}')
}
