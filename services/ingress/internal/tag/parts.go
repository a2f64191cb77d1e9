package tag

import (
	"slices"
	"strings"

	"github.com/kinference/kinference/internal/openai"
	classifierv1 "github.com/kinference/kinference/proto/gen/kinference/classifier/v1"
)

const (
	// maxParts is how many parts the classifier reads of one prompt.
	maxParts = 1 << 16
	// maxURL is the longest text of a picture, sound or file that is read; what is
	// longer is the thing itself.
	maxURL = 2 << 10
)

// Prompt is what goes to the classifier.
type Prompt struct {
	Parts []*classifierv1.Part
	// Bytes of text in Parts.
	Bytes int
	// Whole says that all of the prompt is in Parts.
	Whole bool
}

// silent are members of a body that reach no model as text, or that do not leave
// us. Others, known or not, are read: a provider gets them as they stand.
var silent = []string{"model", "stream", "stream_options", "cache_salt", "kv_transfer_params", "logit_bias"}

// numeric are members whose numbers are settings.
var numeric = []string{
	"max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "min_p", "n", "seed", "best_of", "presence_penalty", "frequency_penalty",
	"repetition_penalty", "length_penalty", "logprobs", "top_logprobs", "prompt_logprobs", "min_tokens", "truncate_prompt_tokens", "priority", "dimensions",
}

// Take takes a prompt apart: everything in the body that a model or a provider
// gets to read, and what is beside it, of at most limit bytes. It copies what it
// takes.
func Take(body *openai.Object, limit int, beside ...openai.Value) Prompt {
	t := &taker{limit: limit}
	t.out.Whole = true
	rest := &strings.Builder{}
	for i := range body.Len() {
		name, v := body.Name(i), body.At(i)
		switch {
		case slices.Contains(silent, name), v.Kind == openai.Number && slices.Contains(numeric, name):
		case name == "messages" && v.Kind == openai.Array:
			for m := range v.Elements() {
				t.chat(m)
				t.message++
			}
		case name == "prompt", name == "input":
			t.prompt(v)
		case name == "suffix":
			t.prompt(v)
		case name == "prompt_embeds":
			t.add(classifierv1.Role_ROLE_USER, classifierv1.Media_MEDIA_UNKNOWN, "")
		case name == "tools" || name == "functions":
			for e := range elements(v) {
				t.add(classifierv1.Role_ROLE_METADATA, classifierv1.Media_MEDIA_TEXT, flat("", e))
			}
		case name == "documents":
			for e := range elements(v) {
				t.add(classifierv1.Role_ROLE_DOCUMENT, classifierv1.Media_MEDIA_TEXT, flat("", e))
			}
		case v.Given() && v.Kind != openai.Bool:
			rest.WriteString(flat(name, v))
		}
	}
	for _, v := range beside {
		rest.WriteString(flat("", v))
	}
	t.add(classifierv1.Role_ROLE_METADATA, classifierv1.Media_MEDIA_TEXT, rest.String())
	return t.out
}

// elements are those of a list, or a value that is none.
func elements(v openai.Value) func(func(openai.Value) bool) {
	if v.Kind == openai.Array {
		return v.Elements()
	}
	return func(yield func(openai.Value) bool) { yield(v) }
}

type taker struct {
	out     Prompt
	limit   int
	message int
	memory  [3]openai.Object // for objects within objects
}

func (t *taker) add(role classifierv1.Role, media classifierv1.Media, text string) {
	if text == "" && media == classifierv1.Media_MEDIA_TEXT {
		return
	}
	if rest := t.limit - t.out.Bytes; len(text) > rest {
		// Half a character at the cut would only be one more reason.
		text, t.out.Whole = strings.ToValidUTF8(text[:max(rest, 0)], ""), false
		t.limit = 0
	}
	if len(t.out.Parts) == maxParts || t.limit == 0 && text == "" {
		t.out.Whole = false
		return
	}
	t.out.Bytes += len(text)
	t.out.Parts = append(t.out.Parts, &classifierv1.Part{Role: role, Media: media, Text: []byte(text), Message: uint32(t.message)})
}

func (t *taker) text(role classifierv1.Role, v openai.Value) {
	if text, ok := v.Text(); ok {
		t.add(role, classifierv1.Media_MEDIA_TEXT, text)
		return
	}
	t.add(role, classifierv1.Media_MEDIA_TEXT, flat("", v))
}

// prompt takes a text, texts, or token ids.
func (t *taker) prompt(v openai.Value) {
	if v.Kind != openai.Array {
		t.text(classifierv1.Role_ROLE_USER, v)
		return
	}
	tokens := false
	for e := range v.Elements() {
		if e.Kind == openai.Number || e.Kind == openai.Array {
			tokens = true
			continue
		}
		t.text(classifierv1.Role_ROLE_USER, e)
	}
	if tokens {
		t.add(classifierv1.Role_ROLE_USER, classifierv1.Media_MEDIA_TOKENS, "")
	}
}

var chatRoles = map[string]classifierv1.Role{
	"system": classifierv1.Role_ROLE_SYSTEM, "developer": classifierv1.Role_ROLE_SYSTEM, "user": classifierv1.Role_ROLE_USER, "assistant": classifierv1.Role_ROLE_ASSISTANT,
	"tool": classifierv1.Role_ROLE_TOOL_RESULT, "function": classifierv1.Role_ROLE_TOOL_RESULT,
}

func (t *taker) chat(v openai.Value) {
	o := &t.memory[0]
	if v.Kind != openai.Obj || o.Parse(v.Raw, anyDepth) != nil {
		t.text(classifierv1.Role_ROLE_UNSPECIFIED, v)
		return
	}
	word, _ := o.Get("role").Text()
	role, known := chatRoles[word]
	rest := &strings.Builder{}
	for i := range o.Len() {
		name, v := o.Name(i), o.At(i)
		switch name {
		case "role":
			if !known {
				rest.WriteString(flat(name, v))
			}
		case "content":
			for e := range elements(v) {
				t.content(role, e)
			}
		case "reasoning", "reasoning_content", "thinking", "refusal":
			t.text(role, v)
		case "tool_calls", "function_call":
			for e := range elements(v) {
				t.call(e, rest)
			}
		case "tool_call_id":
			if id, ok := v.Text(); !ok || !generated(id) {
				rest.WriteString(flat(name, v))
			}
		case "audio":
			if v.Given() {
				t.add(role, classifierv1.Media_MEDIA_AUDIO, "")
			}
		default:
			rest.WriteString(flat(name, v))
		}
	}
	t.add(classifierv1.Role_ROLE_METADATA, classifierv1.Media_MEDIA_TEXT, rest.String())
}

// anyDepth: the whole body was checked already.
const anyDepth = 1 << 16

// texts are types of content that are no more than text.
var texts = []string{"", "text", "input_text", "output_text", "refusal", "thinking", "reasoning", "reasoning_text", "summary_text"}

var mediaMembers = map[string]classifierv1.Media{
	"image_url": classifierv1.Media_MEDIA_IMAGE, "image": classifierv1.Media_MEDIA_IMAGE, "image_pil": classifierv1.Media_MEDIA_IMAGE, "image_embeds": classifierv1.Media_MEDIA_IMAGE,
	"input_audio": classifierv1.Media_MEDIA_AUDIO, "audio": classifierv1.Media_MEDIA_AUDIO, "audio_url": classifierv1.Media_MEDIA_AUDIO, "audio_embeds": classifierv1.Media_MEDIA_AUDIO,
	"video": classifierv1.Media_MEDIA_VIDEO, "video_url": classifierv1.Media_MEDIA_VIDEO,
	"file": classifierv1.Media_MEDIA_FILE, "file_data": classifierv1.Media_MEDIA_FILE, "file_id": classifierv1.Media_MEDIA_FILE, "file_url": classifierv1.Media_MEDIA_FILE,
}

// content takes one element of a message's content. Engines look at the members
// more than at the type, so we do, too.
func (t *taker) content(role classifierv1.Role, v openai.Value) {
	if !v.Given() {
		return
	}
	o := &t.memory[1]
	if v.Kind != openai.Obj || o.Parse(v.Raw, anyDepth) != nil {
		t.text(role, v)
		return
	}
	word, ok := o.Get("type").Text()
	strange := !slices.Contains(texts, word) || o.Get("type").Given() && !ok
	for i := range o.Len() {
		_, is := mediaMembers[o.Name(i)]
		strange = strange && !(is && o.At(i).Given())
	}
	rest := &strings.Builder{}
	for i := range o.Len() {
		name, v := o.Name(i), o.At(i)
		if media, is := mediaMembers[name]; is && v.Given() {
			t.add(role, media, located(v))
			continue
		}
		switch name {
		case "type":
			if strange {
				rest.WriteString(flat(name, v))
			}
		case "text", "refusal", "thinking", "reasoning":
			t.text(role, v)
		default:
			rest.WriteString(flat(name, v))
		}
	}
	if strange { // a kind of content that we do not know
		t.add(role, classifierv1.Media_MEDIA_UNKNOWN, rest.String())
		return
	}
	t.add(classifierv1.Role_ROLE_METADATA, classifierv1.Media_MEDIA_TEXT, rest.String())
}

// call takes what the model passed to a tool.
func (t *taker) call(v openai.Value, rest *strings.Builder) {
	o := &t.memory[1]
	if v.Kind != openai.Obj || o.Parse(v.Raw, anyDepth) != nil {
		t.text(classifierv1.Role_ROLE_TOOL_ARGUMENTS, v)
		return
	}
	f := &t.memory[2]
	for i := range o.Len() {
		name, v := o.Name(i), o.At(i)
		switch {
		case name == "arguments" || name == "input":
			t.text(classifierv1.Role_ROLE_TOOL_ARGUMENTS, v)
		case (name == "function" || name == "custom") && v.Kind == openai.Obj && f.Parse(v.Raw, anyDepth) == nil:
			for j := range f.Len() {
				if n := f.Name(j); n == "arguments" || n == "input" {
					t.text(classifierv1.Role_ROLE_TOOL_ARGUMENTS, f.At(j))
				} else {
					rest.WriteString(flat(n, f.At(j)))
				}
			}
		case name == "type" || name == "index":
		case name == "id":
			if id, ok := v.Text(); !ok || !generated(id) {
				rest.WriteString(flat(name, v))
			}
		default:
			rest.WriteString(flat(name, v))
		}
	}
}

// generated reports that an id is one that a server has made up: random letters,
// in which detectors would see secrets.
func generated(id string) bool {
	if len(id) > 80 {
		return false
	}
	for _, p := range [...]string{"call_", "toolu_", "chatcmpl-tool-", "fc_", "functions."} {
		if rest, ok := strings.CutPrefix(id, p); ok {
			return strings.IndexFunc(rest, func(r rune) bool {
				return !(r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || r == '_' || r == '-' || r == ':')
			}) < 0
		}
	}
	return false
}

// located is the text of a picture, sound or file: where it is and its name, not
// the thing itself, which nobody reads.
func located(v openai.Value) string {
	var b strings.Builder
	walk(v.Raw, func(text string, key bool) {
		if len(text) <= maxURL && !strings.HasPrefix(text, "data:") {
			b.WriteString(text)
			b.WriteString(end(key))
		}
	})
	return b.String()
}

// flat is a value as lines of text: names, then their values. Detectors look at
// names for context, and see no escapes and brackets.
func flat(name string, v openai.Value) string {
	if !v.Given() || v.Kind == openai.Bool {
		return ""
	}
	var b strings.Builder
	if name != "" {
		b.WriteString(name)
		b.WriteString(": ")
	}
	walk(v.Raw, func(text string, key bool) {
		b.WriteString(text)
		b.WriteString(end(key))
	})
	return b.String()
}

func end(key bool) string {
	if key {
		return ": "
	}
	return "\n"
}

// walk calls f with all names, strings and numbers of a valid JSON text, in one
// pass however deep it is.
func walk(raw []byte, f func(text string, key bool)) {
	for i := 0; i < len(raw); {
		switch c := raw[i]; {
		case c == '"':
			end := i + 1
			for raw[end] != '"' {
				if raw[end] == '\\' {
					end++
				}
				end++
			}
			end++
			text, _ := openai.Value{Raw: raw[i:end], Kind: openai.String}.Text()
			i = end
			for i < len(raw) && (raw[i] == ' ' || raw[i] == '\n' || raw[i] == '\t' || raw[i] == '\r') {
				i++
			}
			f(text, i < len(raw) && raw[i] == ':')
		case c == '-' || c >= '0' && c <= '9':
			end := i
			for end < len(raw) && strings.IndexByte("+-.eE0123456789", raw[end]) >= 0 {
				end++
			}
			f(string(raw[i:end]), false)
			i = end
		default:
			i++
		}
	}
}
