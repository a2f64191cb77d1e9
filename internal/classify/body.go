package classify

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
)

// Bounds of FromBody.
const maxBodyDepth = 64

// FromBody lists the parts of a request in any dialect that we serve: chat and
// text completions, Responses, Anthropic messages, embeddings. All text that
// leaves with the request is listed, tools, names and metadata too; images,
// audio, files and token ids become parts that are not text, and so do shapes
// that it does not know, beside their strings. The error tells that the body is
// no JSON object, and nothing of what is in it.
func FromBody(body []byte) ([]Part, error) {
	var top map[string]any
	if json.Unmarshal(body, &top) != nil {
		return nil, fmt.Errorf("the body is no JSON object")
	}
	w := &walker{}
	for _, k := range []string{"system", "instructions"} { // Anthropic, Responses
		if v, ok := top[k]; ok {
			w.content(v, RoleSystem, 0)
		}
	}
	if v, ok := top["tools"]; ok {
		w.raw(v, RoleMetadata)
	}
	if v, ok := top["documents"]; ok {
		w.raw(v, RoleDocument)
	}
	if list, ok := top["messages"].([]any); ok {
		for _, m := range list {
			w.item(m)
		}
	} else if v, ok := top["messages"]; ok {
		w.content(v, RoleUser, 0)
	}
	switch v := top["input"].(type) {
	case nil:
	case []any:
		for _, m := range v {
			if _, ok := m.(map[string]any); ok {
				w.item(m)
			} else {
				w.prompt(m)
			}
		}
	default:
		w.prompt(v)
	}
	if v, ok := top["prompt"]; ok {
		w.prompt(v)
	}
	for _, k := range slices.Sorted(maps.Keys(top)) {
		switch k {
		case "system", "instructions", "tools", "documents", "messages", "input", "prompt", "model":
			continue
		}
		switch v := top[k].(type) {
		case string:
			w.text(RoleMetadata, v)
		case map[string]any, []any:
			w.raw(v, RoleMetadata)
		}
	}
	return w.parts, nil
}

// walker gathers parts.
type walker struct {
	parts   []Part
	message int
	tokens  bool
}

func (w *walker) text(r Role, s string) {
	if s != "" {
		w.parts = append(w.parts, Part{Role: r, Message: w.message, Text: s})
	}
}

func (w *walker) media(r Role, m Media) {
	w.parts = append(w.parts, Part{Role: r, Media: m, Message: w.message})
}

// raw lists a value as JSON text: names count as well as values.
func (w *walker) raw(v any, r Role) {
	if b, err := json.Marshal(v); err == nil {
		w.text(r, string(b))
	}
}

// item is a message, or an item of Responses.
func (w *walker) item(v any) {
	m, ok := v.(map[string]any)
	if !ok {
		w.content(v, RoleUser, 0)
		w.message++
		return
	}
	role := RoleUser
	switch m["role"] {
	case "system", "developer":
		role = RoleSystem
	case "assistant":
		role = RoleAssistant
	case "tool", "function":
		role = RoleToolResult
	}
	switch m["type"] {
	case "function_call", "custom_tool_call", "mcp_call":
		role = RoleToolArguments
	case "function_call_output", "custom_tool_call_output":
		role = RoleToolResult
	case "reasoning":
		role = RoleAssistant
	}
	for _, k := range slices.Sorted(maps.Keys(m)) {
		switch k {
		case "role", "type", "id", "call_id", "tool_call_id", "status", "cache_control":
		case "tool_calls", "function_call":
			w.calls(m[k])
		case "arguments":
			w.content(m[k], RoleToolArguments, 0)
		case "name":
			w.content(m[k], RoleMetadata, 0)
		default:
			w.content(m[k], role, 0)
		}
	}
	w.message++
}

// calls lists the names and arguments of tool calls.
func (w *walker) calls(v any) {
	switch v := v.(type) {
	case []any:
		for _, c := range v {
			w.calls(c)
		}
	case map[string]any:
		if f, ok := v["function"]; ok {
			w.calls(f)
			return
		}
		for _, k := range slices.Sorted(maps.Keys(v)) {
			switch s := v[k].(type) {
			case string:
				switch k {
				case "arguments", "input":
					w.text(RoleToolArguments, s)
				case "name":
					w.text(RoleMetadata, s)
				}
			case map[string]any, []any:
				w.raw(s, RoleToolArguments)
			}
		}
	}
}

// content lists a string, or content blocks.
func (w *walker) content(v any, r Role, depth int) {
	if depth > maxBodyDepth {
		w.media(r, MediaUnknown)
		return
	}
	switch v := v.(type) {
	case string:
		w.text(r, v)
	case []any:
		for _, e := range v {
			w.content(e, r, depth+1)
		}
	case map[string]any:
		w.block(v, r, depth)
	}
}

func (w *walker) block(b map[string]any, r Role, depth int) {
	kind, _ := b["type"].(string)
	media := MediaText
	switch {
	case kind == "tool_use" || kind == "server_tool_use":
		if s, ok := b["name"].(string); ok {
			w.text(RoleMetadata, s)
		}
		w.raw(b["input"], RoleToolArguments)
		return
	case kind == "tool_result" || strings.HasSuffix(kind, "_tool_result"):
		w.content(b["content"], RoleToolResult, depth+1)
		return
	case kind == "document":
		if src, ok := b["source"].(map[string]any); ok && (src["type"] == "text" || src["type"] == "content") {
			for _, k := range []string{"data", "content"} {
				w.content(src[k], RoleDocument, depth+1)
			}
		} else {
			w.media(RoleDocument, MediaFile)
		}
		for _, k := range []string{"title", "context"} {
			w.content(b[k], RoleDocument, depth+1)
		}
		return
	case strings.Contains(kind, "image"):
		media = MediaImage
	case strings.Contains(kind, "audio"):
		media = MediaAudio
	case strings.Contains(kind, "video"):
		media = MediaVideo
	case strings.Contains(kind, "file"):
		media = MediaFile
	case kind != "" && !strings.Contains(kind, "text") && kind != "refusal" && kind != "thinking" && kind != "summary" && kind != "redacted_thinking":
		media = MediaUnknown
	}
	if media != MediaText {
		w.media(r, media)
		// A caption, a file's name or an address is text all the same; the data itself was counted as media.
		for _, k := range slices.Sorted(maps.Keys(b)) {
			if s, ok := b[k].(string); ok && k != "type" && len(s) < 4096 {
				w.text(RoleMetadata, s)
			} else if media == MediaUnknown && !ok {
				w.content(b[k], r, depth+1)
			}
		}
		return
	}
	for _, k := range slices.Sorted(maps.Keys(b)) {
		switch k {
		case "type", "cache_control", "signature", "id", "index":
		default:
			w.content(b[k], r, depth+1)
		}
	}
}

// prompt is that of a completion, or the input of Responses or embeddings: text,
// or token ids.
func (w *walker) prompt(v any) {
	switch v := v.(type) {
	case string:
		w.text(RoleUser, v)
		w.message++
	case []any:
		for _, e := range v {
			w.prompt(e)
		}
	case map[string]any:
		w.item(v)
	case float64:
		if !w.tokens {
			w.tokens = true
			w.media(RoleUser, MediaTokens)
		}
	}
}
