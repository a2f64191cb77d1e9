package provider

import (
	"encoding/json"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/kinference/kinference/internal/anthropic"
	"github.com/kinference/kinference/internal/openai"
)

// The Converse API has the shape of the Messages API under other names, so a
// chat body becomes a Messages body first. What follows is the part of one that
// is carried over.
type (
	messagesBody struct {
		MaxTokens     int             `json:"max_tokens"`
		System        []contentBlock  `json:"system"`
		Messages      []contentTurn   `json:"messages"`
		Tools         []tool          `json:"tools"`
		ToolChoice    *toolChoice     `json:"tool_choice"`
		StopSequences []string        `json:"stop_sequences"`
		Temperature   json.RawMessage `json:"temperature"`
		TopP          json.RawMessage `json:"top_p"`
		OutputConfig  *struct {
			Format struct{ Schema json.RawMessage }
		} `json:"output_config"`
	}
	contentTurn struct {
		Role    string         `json:"role"`
		Content []contentBlock `json:"content"`
	}
	contentBlock struct {
		Type    string          `json:"type"`
		Text    json.RawMessage `json:"text"`
		ID      string          `json:"id"`
		Name    string          `json:"name"`
		Input   json.RawMessage `json:"input"`
		UseID   string          `json:"tool_use_id"`
		Content []contentBlock  `json:"content"`
		Source  struct {
			Type      string `json:"type"`
			MediaType string `json:"media_type"`
			Data      string `json:"data"`
		} `json:"source"`
	}
	tool struct {
		Name        string          `json:"name"`
		Description json.RawMessage `json:"description"`
		InputSchema json.RawMessage `json:"input_schema"`
	}
	toolChoice struct{ Type, Name string }
)

// What Converse takes.
type (
	converseBody struct {
		Messages        []converseTurn  `json:"messages"`
		System          []converseBlock `json:"system,omitempty"`
		InferenceConfig inferenceConfig `json:"inferenceConfig"`
		ToolConfig      *toolConfig     `json:"toolConfig,omitempty"`
		OutputConfig    map[string]any  `json:"outputConfig,omitempty"`
	}
	converseTurn struct {
		Role    string          `json:"role"`
		Content []converseBlock `json:"content"`
	}
	// converseBlock has one member.
	converseBlock map[string]any

	inferenceConfig struct {
		MaxTokens     int             `json:"maxTokens"`
		Temperature   json.RawMessage `json:"temperature,omitempty"`
		TopP          json.RawMessage `json:"topP,omitempty"`
		StopSequences []string        `json:"stopSequences,omitempty"`
	}
	toolConfig struct {
		Tools      []converseBlock `json:"tools"`
		ToolChoice converseBlock   `json:"toolChoice,omitempty"`
	}
)

func (t *Target) prepareConverse(out *Request, in *Call, c *Credentials, now time.Time) *openai.Error {
	if e := onlyChat(in); e != nil {
		return e
	}
	u, e := t.base("https://bedrock-runtime."+t.Region+".amazonaws.com", "")
	if e != nil {
		return e
	}
	text, dropped, e := anthropic.AppendMessages(nil, in.Body, t.limits())
	if e != nil {
		return e
	}
	out.Dropped = dropped
	if out.Body, e = converseFrom(text); e != nil {
		return e
	}
	action := "/converse"
	if in.Stream {
		action = "/converse-stream"
		out.Header.Set("Accept", "application/vnd.amazon.eventstream")
	}
	// Names of models have colons, and those that are ARNs have slashes.
	u.RawPath = u.EscapedPath() + "/model/" + escape(t.Model) + action
	u.Path += "/model/" + t.Model + action
	out.URL = u
	r := &http.Request{Method: http.MethodPost, URL: u, Host: u.Host, Header: out.Header}
	if err := sign(r, out.Body, c, t.Region, now); err != nil {
		return errCredentials()
	}
	return nil
}

// escape escapes all but the characters that never are, as AWS does.
func escape(s string) string {
	return strings.ReplaceAll(url.QueryEscape(s), "+", "%20")
}

// converseFrom makes a Converse body of a Messages body.
func converseFrom(text []byte) ([]byte, *openai.Error) {
	var in messagesBody
	if err := json.Unmarshal(text, &in); err != nil {
		return nil, openai.Invalid("", "", "The request cannot be sent to this model.")
	}
	out := converseBody{Messages: []converseTurn{}, InferenceConfig: inferenceConfig{in.MaxTokens, in.Temperature, in.TopP, in.StopSequences}}
	var e *openai.Error
	if out.System, e = converseBlocks(in.System); e != nil {
		return nil, e
	}
	for i := range in.Messages {
		blocks, e := converseBlocks(in.Messages[i].Content)
		if e != nil {
			return nil, e
		}
		out.Messages = append(out.Messages, converseTurn{in.Messages[i].Role, blocks})
	}
	out.ToolConfig = toolsFrom(&in)
	if in.OutputConfig != nil {
		out.OutputConfig = map[string]any{"textFormat": map[string]any{
			"type": "json_schema", "structure": map[string]any{"jsonSchema": map[string]any{"name": "output", "schema": string(in.OutputConfig.Format.Schema)}},
		}}
	}
	body, err := json.Marshal(&out)
	if err != nil {
		return nil, openai.Invalid("", "", "The request cannot be sent to this model.")
	}
	return body, nil
}

func converseBlocks(in []contentBlock) ([]converseBlock, *openai.Error) {
	var out []converseBlock
	for i := range in {
		b := &in[i]
		switch b.Type {
		case "text":
			out = append(out, converseBlock{"text": b.Text})
		case "image":
			if b.Source.Type != "base64" {
				return nil, openai.Invalid("messages", "", "This model takes images as data only, not by URL.")
			}
			out = append(out, converseBlock{"image": map[string]any{
				"format": strings.TrimPrefix(b.Source.MediaType, "image/"), "source": map[string]string{"bytes": b.Source.Data},
			}})
		case "tool_use":
			out = append(out, converseBlock{"toolUse": map[string]any{"toolUseId": b.ID, "name": b.Name, "input": b.Input}})
		case "tool_result":
			content, e := converseBlocks(b.Content)
			if e != nil {
				return nil, e
			}
			if content == nil { // it is required
				content = []converseBlock{{"text": "(no output)"}}
			}
			out = append(out, converseBlock{"toolResult": map[string]any{"toolUseId": b.UseID, "content": content}})
		}
	}
	return out, nil
}

// toolsFrom makes the tools. Converse has no way to forbid them: a request that
// must not use any gets none, unless its messages speak of them, which needs
// them to be there.
func toolsFrom(in *messagesBody) *toolConfig {
	if len(in.Tools) == 0 {
		return nil
	}
	out := &toolConfig{}
	for i := range in.Tools {
		t := &in.Tools[i]
		spec := map[string]any{"name": t.Name, "inputSchema": map[string]any{"json": t.InputSchema}}
		if t.Description != nil {
			spec["description"] = t.Description
		}
		out.Tools = append(out.Tools, converseBlock{"toolSpec": spec})
	}
	if in.ToolChoice == nil {
		return out
	}
	switch in.ToolChoice.Type {
	case "any":
		out.ToolChoice = converseBlock{"any": struct{}{}}
	case "tool":
		out.ToolChoice = converseBlock{"tool": map[string]string{"name": in.ToolChoice.Name}}
	case "auto":
		out.ToolChoice = converseBlock{"auto": struct{}{}}
	case "none":
		for i := range in.Messages {
			for j := range in.Messages[i].Content {
				if k := in.Messages[i].Content[j].Type; k == "tool_use" || k == "tool_result" {
					return out
				}
			}
		}
		return nil
	}
	return out
}
