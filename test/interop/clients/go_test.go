package clients

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/anthropics/anthropic-sdk-go"
	anthropicoption "github.com/anthropics/anthropic-sdk-go/option"
	"github.com/openai/openai-go/v3"
	openaioption "github.com/openai/openai-go/v3/option"
	"github.com/openai/openai-go/v3/packages/ssestream"
	"github.com/openai/openai-go/v3/responses"
	"github.com/openai/openai-go/v3/shared"
)

const (
	picture  = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
	retryGo  = "script: retry "
	scripted = "script: "
)

// canonical writes a tool call as all drivers do.
func canonical(name, arguments string) (string, error) {
	var v map[string]any
	if err := json.Unmarshal([]byte(arguments), &v); err != nil {
		return "", fmt.Errorf("arguments %q: %w", arguments, err)
	}
	var b strings.Builder
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	err := e.Encode(v)
	// Python and JavaScript write U+2028 as it is.
	return name + " " + strings.ReplaceAll(strings.TrimSpace(b.String()), `\u2028`, "\u2028"), err
}

type object = map[string]any

// openaiGo drives an endpoint with the official OpenAI client for Go.
func openaiGo(t *testing.T, url, model string) features {
	client := openai.NewClient(openaioption.WithBaseURL(url+"/v1"), openaioption.WithAPIKey("unused"), openaioption.WithMaxRetries(0))
	ctx := t.Context()
	tool := openai.ChatCompletionFunctionTool(shared.FunctionDefinitionParam{
		Name: "weather", Description: openai.String("tells it"), Parameters: shared.FunctionParameters{"type": "object", "properties": object{"city": object{"type": "string"}}},
	})
	params := func(name string) openai.ChatCompletionNewParams {
		return openai.ChatCompletionNewParams{Model: model, MaxTokens: openai.Int(50), Messages: []openai.ChatCompletionMessageParamUnion{openai.UserMessage(scripted + name)}}
	}
	ask := func(p openai.ChatCompletionNewParams) (*openai.ChatCompletion, error) {
		return client.Chat.Completions.New(ctx, p)
	}
	streamed := func(p openai.ChatCompletionNewParams) (*openai.ChatCompletion, error) {
		s := client.Chat.Completions.NewStreaming(ctx, p)
		defer s.Close()
		var all openai.ChatCompletionAccumulator
		for s.Next() {
			if !all.AddChunk(s.Current()) {
				return nil, errors.New("a chunk does not fit")
			}
		}
		return &all.ChatCompletion, s.Err()
	}
	calls := func(m openai.ChatCompletionMessage) (out []string, err error) {
		for _, c := range m.ToolCalls {
			s, err := canonical(c.Function.Name, c.Function.Arguments)
			if err != nil {
				return nil, err
			}
			out = append(out, s)
		}
		return out, nil
	}
	said := func(c *openai.ChatCompletion, err error) (any, error) {
		if err != nil {
			return nil, err
		}
		return object{"text": c.Choices[0].Message.Content, "stop": c.Choices[0].FinishReason}, nil
	}
	tools := func(name string) (any, error) {
		p := params(name)
		p.Tools = []openai.ChatCompletionToolUnionParam{tool}
		first, err := ask(p)
		if err != nil {
			return nil, err
		}
		message := first.Choices[0].Message
		list, err := calls(message)
		if err != nil {
			return nil, err
		}
		p.Messages = append(p.Messages, message.ToParam())
		for _, c := range message.ToolCalls {
			p.Messages = append(p.Messages, openai.ToolMessage("sunny", c.ID))
		}
		last, err := ask(p)
		if err != nil {
			return nil, err
		}
		return object{"calls": list, "stop": first.Choices[0].FinishReason, "final": last.Choices[0].Message.Content}, nil
	}
	streamTools := func(name string) (any, error) {
		p := params(name)
		p.Tools = []openai.ChatCompletionToolUnionParam{tool}
		c, err := streamed(p)
		if err != nil {
			return nil, err
		}
		list, err := calls(c.Choices[0].Message)
		return object{"calls": list, "stop": c.Choices[0].FinishReason}, err
	}
	counts := func(u openai.CompletionUsage) object {
		return object{"input": u.PromptTokens, "cached": u.PromptTokensDetails.CachedTokens, "output": u.CompletionTokens}
	}
	failure := func(p openai.ChatCompletionNewParams) any {
		_, err := ask(p)
		var e *openai.Error
		if !errors.As(err, &e) {
			return fmt.Sprint(err)
		}
		return object{"class": "Error", "status": e.StatusCode, "code": e.Code, "id": e.Response.Header.Get("X-Request-Id") != ""}
	}
	return features{
		"chat":                   func() (any, error) { return said(ask(params("chat"))) },
		"stream":                 func() (any, error) { return said(streamed(params("chat"))) },
		"tools":                  func() (any, error) { return tools("tools") },
		"tools, stream":          func() (any, error) { return streamTools("tools") },
		"parallel tools":         func() (any, error) { return tools("parallel") },
		"parallel tools, stream": func() (any, error) { return streamTools("parallel") },
		"JSON schema": func() (any, error) {
			p := params("schema")
			p.ResponseFormat.OfJSONSchema = &shared.ResponseFormatJSONSchemaParam{JSONSchema: shared.ResponseFormatJSONSchemaJSONSchemaParam{
				Name: "a", Schema: object{"type": "object", "properties": object{"answer": object{"type": "integer"}}},
			}}
			c, err := ask(p)
			if err != nil {
				return nil, err
			}
			return c.Choices[0].Message.Content, nil
		},
		"logprobs": func() (any, error) {
			p := params("logprobs")
			p.Logprobs = openai.Bool(true)
			c, err := ask(p)
			if err != nil {
				return nil, err
			}
			return c.Choices[0].Logprobs.Content[0].Logprob, nil
		},
		"n": func() (any, error) {
			p := params("n")
			p.N = openai.Int(2)
			c, err := ask(p)
			if err != nil || len(c.Choices) != 2 {
				return nil, fmt.Errorf("%w, %v", err, c)
			}
			return []string{c.Choices[0].Message.Content, c.Choices[1].Message.Content}, nil
		},
		"stop": func() (any, error) {
			p := params("stop")
			p.Stop.OfStringArray = []string{"three"}
			return said(ask(p))
		},
		"vision": func() (any, error) {
			p := params("")
			p.Messages = []openai.ChatCompletionMessageParamUnion{openai.UserMessage([]openai.ChatCompletionContentPartUnionParam{
				openai.TextContentPart(scripted + "vision"), openai.ImageContentPart(openai.ChatCompletionContentPartImageImageURLParam{URL: "data:image/png;base64," + picture}),
			})}
			c, err := ask(p)
			if err != nil {
				return nil, err
			}
			return c.Choices[0].Message.Content, nil
		},
		"usage": func() (any, error) {
			c, err := ask(params("chat"))
			if err != nil {
				return nil, err
			}
			p := params("chat")
			p.StreamOptions.IncludeUsage = openai.Bool(true)
			s, err := streamed(p)
			if err != nil {
				return nil, err
			}
			return object{"whole": counts(c.Usage), "stream": counts(s.Usage)}, nil
		},
		"errors": func() (any, error) {
			nobody, long := params("chat"), params("")
			nobody.Model = "nobody"
			long.Messages = []openai.ChatCompletionMessageParamUnion{openai.UserMessage(strings.Repeat("word ", 300_000))}
			return object{"model": failure(nobody), "refused": failure(params("no-such-script")), "too long": failure(long)}, nil
		},
		"retries": func() (any, error) {
			p := params("")
			p.Messages = []openai.ChatCompletionMessageParamUnion{openai.UserMessage(retryGo + "openai-go")}
			c, err := client.Chat.Completions.New(ctx, p, openaioption.WithMaxRetries(2))
			if err != nil {
				return nil, err
			}
			return c.Choices[0].Message.Content, nil
		},
		"abort": func() (any, error) {
			ctx, cancel := context.WithCancel(ctx)
			defer cancel()
			s := client.Chat.Completions.NewStreaming(ctx, params("slow"))
			defer s.Close()
			for s.Next() {
				if text := s.Current().Choices[0].Delta.Content; text != "" {
					return text, nil
				}
			}
			return nil, s.Err()
		},
		"thinking": func() (any, error) {
			c, err := ask(params("think"))
			if err != nil {
				return nil, err
			}
			var thought string
			err = json.Unmarshal([]byte(c.Choices[0].Message.JSON.ExtraFields["reasoning"].Raw()), &thought)
			return object{"thinking": thought, "text": c.Choices[0].Message.Content}, err
		},
		"responses": func() (any, error) {
			r, err := client.Responses.New(ctx, responses.ResponseNewParams{Model: model, MaxOutputTokens: openai.Int(50), Input: responses.ResponseNewParamsInputUnion{OfString: openai.String(scripted + "chat")}})
			if err != nil {
				return nil, err
			}
			u := r.Usage
			return object{"text": r.OutputText(), "status": r.Status, "input": u.InputTokens, "cached": u.InputTokensDetails.CachedTokens, "output": u.OutputTokens}, nil
		},
		"responses, stream": func() (any, error) {
			r, err := streamedResponse(client.Responses.NewStreaming(ctx, responses.ResponseNewParams{Model: model, Input: responses.ResponseNewParamsInputUnion{OfString: openai.String(scripted + "think")}}))
			if err != nil {
				return nil, err
			}
			thought := ""
			for _, i := range r.Output {
				if i.Type == "reasoning" {
					thought += i.Content[0].Text
				}
			}
			return object{"text": r.OutputText(), "status": r.Status, "thinking": thought}, nil
		},
		"responses, tools": func() (any, error) {
			p := responses.ResponseNewParams{Model: model}
			p.Tools = []responses.ToolUnionParam{{OfFunction: &responses.FunctionToolParam{Name: "weather", Parameters: object{"type": "object", "properties": object{"city": object{"type": "string"}}}}}}
			p.Input.OfInputItemList = responses.ResponseInputParam{responses.ResponseInputItemParamOfMessage(scripted+"parallel", responses.EasyInputMessageRoleUser)}
			first, err := streamedResponse(client.Responses.NewStreaming(ctx, p))
			if err != nil {
				return nil, err
			}
			var list []string
			var results responses.ResponseInputParam
			for _, i := range first.Output {
				if i.Type != "function_call" {
					continue
				}
				c := i.AsFunctionCall()
				s, err := canonical(c.Name, c.Arguments)
				if err != nil {
					return nil, err
				}
				list = append(list, s)
				p.Input.OfInputItemList = append(p.Input.OfInputItemList, responses.ResponseInputItemParamOfFunctionCall(c.Arguments, c.CallID, c.Name))
				result := responses.ResponseInputItemParamOfFunctionCallOutput("sunny")
				result.OfFunctionCallOutput.CallID = openai.String(c.CallID)
				results = append(results, result)
			}
			p.Input.OfInputItemList = append(p.Input.OfInputItemList, results...)
			last, err := client.Responses.New(ctx, p)
			if err != nil {
				return nil, err
			}
			return object{"calls": list, "final": last.OutputText()}, nil
		},
		"embeddings": func() (any, error) {
			r, err := client.Embeddings.New(ctx, openai.EmbeddingNewParams{Model: model, Input: openai.EmbeddingNewParamsInputUnion{OfArrayOfStrings: []string{"a", "b"}}})
			if err != nil {
				return nil, err
			}
			return [][]float64{r.Data[0].Embedding, r.Data[1].Embedding}, nil
		},
		"models": func() (any, error) {
			found := false
			list := client.Models.ListAutoPaging(ctx)
			for list.Next() {
				found = found || list.Current().ID == model
			}
			return found, list.Err()
		},
	}
}

// streamedResponse is the response at the end of a stream.
func streamedResponse(s *ssestream.Stream[responses.ResponseStreamEventUnion]) (*responses.Response, error) {
	defer s.Close()
	var last *responses.Response
	for s.Next() {
		if e := s.Current(); e.Type == "response.completed" {
			last = &e.Response
		}
	}
	if s.Err() == nil && last == nil {
		return nil, errors.New("the stream was not completed")
	}
	return last, s.Err()
}

// anthropicGo drives an endpoint with the official Anthropic client for Go.
func anthropicGo(t *testing.T, url, model string) features {
	client := anthropic.NewClient(anthropicoption.WithBaseURL(url), anthropicoption.WithAPIKey("unused"), anthropicoption.WithMaxRetries(0))
	ctx := t.Context()
	user := func(name string) anthropic.MessageParam {
		return anthropic.NewUserMessage(anthropic.NewTextBlock(scripted + name))
	}
	params := func(name string) anthropic.MessageNewParams {
		return anthropic.MessageNewParams{Model: anthropic.Model(model), MaxTokens: 50, Messages: []anthropic.MessageParam{user(name)}}
	}
	tool := anthropic.ToolUnionParam{OfTool: &anthropic.ToolParam{
		Name: "weather", Description: anthropic.String("tells it"), InputSchema: anthropic.ToolInputSchemaParam{Properties: object{"city": object{"type": "string"}}},
	}}
	ask := func(p anthropic.MessageNewParams) (*anthropic.Message, error) { return client.Messages.New(ctx, p) }
	streamed := func(p anthropic.MessageNewParams) (*anthropic.Message, error) {
		s := client.Messages.NewStreaming(ctx, p)
		defer s.Close()
		var m anthropic.Message
		for s.Next() {
			if err := m.Accumulate(s.Current()); err != nil {
				return nil, err
			}
		}
		return &m, s.Err()
	}
	texts := func(m *anthropic.Message) (out string) {
		for _, b := range m.Content {
			if b.Type == "text" {
				out += b.Text
			}
		}
		return out
	}
	calls := func(m *anthropic.Message) (out []string, err error) {
		for _, b := range m.Content {
			if b.Type == "tool_use" {
				s, err := canonical(b.Name, string(b.Input))
				if err != nil {
					return nil, err
				}
				out = append(out, s)
			}
		}
		return out, nil
	}
	text := func(m *anthropic.Message, err error) (any, error) {
		if err != nil {
			return nil, err
		}
		return texts(m), nil
	}
	said := func(m *anthropic.Message, err error) (any, error) {
		if err != nil {
			return nil, err
		}
		return object{"text": texts(m), "stop": m.StopReason}, nil
	}
	tools := func(name string) (any, error) {
		p := params(name)
		p.Tools = []anthropic.ToolUnionParam{tool}
		first, err := ask(p)
		if err != nil {
			return nil, err
		}
		list, err := calls(first)
		if err != nil {
			return nil, err
		}
		var results []anthropic.ContentBlockParamUnion
		for _, b := range first.Content {
			if b.Type == "tool_use" {
				results = append(results, anthropic.NewToolResultBlock(b.ID, "sunny", false))
			}
		}
		p.Messages = append(p.Messages, first.ToParam(), anthropic.NewUserMessage(results...))
		last, err := ask(p)
		if err != nil {
			return nil, err
		}
		return object{"calls": list, "stop": first.StopReason, "final": texts(last)}, nil
	}
	streamTools := func(name string) (any, error) {
		p := params(name)
		p.Tools = []anthropic.ToolUnionParam{tool}
		m, err := streamed(p)
		if err != nil {
			return nil, err
		}
		list, err := calls(m)
		return object{"calls": list, "stop": m.StopReason}, err
	}
	counts := func(u anthropic.Usage) object {
		return object{"input": u.InputTokens, "cached": u.CacheReadInputTokens, "output": u.OutputTokens}
	}
	failure := func(p anthropic.MessageNewParams) any {
		_, err := ask(p)
		var e *anthropic.Error
		if !errors.As(err, &e) {
			return fmt.Sprint(err)
		}
		var in struct{ Error struct{ Type string } }
		_ = json.Unmarshal([]byte(e.RawJSON()), &in)
		return object{"class": "Error", "status": e.StatusCode, "type": in.Error.Type, "id": e.RequestID != ""}
	}
	return features{
		"chat":                   func() (any, error) { return said(ask(params("chat"))) },
		"stream":                 func() (any, error) { return said(streamed(params("chat"))) },
		"tools":                  func() (any, error) { return tools("tools") },
		"tools, stream":          func() (any, error) { return streamTools("tools") },
		"parallel tools":         func() (any, error) { return tools("parallel") },
		"parallel tools, stream": func() (any, error) { return streamTools("parallel") },
		"JSON schema": func() (any, error) {
			p := params("schema")
			p.OutputConfig.Format = anthropic.JSONOutputFormatParam{Schema: object{"type": "object", "properties": object{"answer": object{"type": "integer"}}}}
			return text(ask(p))
		},
		"stop": func() (any, error) {
			p := params("stop")
			p.StopSequences = []string{"three"}
			m, err := ask(p)
			if err != nil {
				return nil, err
			}
			return object{"text": texts(m), "stop": m.StopReason, "sequence": m.StopSequence}, nil
		},
		"vision": func() (any, error) {
			p := params("")
			p.Messages = []anthropic.MessageParam{anthropic.NewUserMessage(anthropic.NewTextBlock(scripted+"vision"), anthropic.NewImageBlockBase64("image/png", picture))}
			return text(ask(p))
		},
		"usage": func() (any, error) {
			m, err := ask(params("chat"))
			if err != nil {
				return nil, err
			}
			s, err := streamed(params("chat"))
			if err != nil {
				return nil, err
			}
			return object{"whole": counts(m.Usage), "stream": counts(s.Usage)}, nil
		},
		"errors": func() (any, error) {
			nobody, long := params("chat"), params("")
			nobody.Model = "nobody"
			long.Messages = []anthropic.MessageParam{anthropic.NewUserMessage(anthropic.NewTextBlock(strings.Repeat("word ", 300_000)))}
			return object{"model": failure(nobody), "refused": failure(params("no-such-script")), "too long": failure(long)}, nil
		},
		"retries": func() (any, error) {
			p := params("")
			p.Messages = []anthropic.MessageParam{anthropic.NewUserMessage(anthropic.NewTextBlock(retryGo + "anthropic-go"))}
			return text(client.Messages.New(ctx, p, anthropicoption.WithMaxRetries(2)))
		},
		"abort": func() (any, error) {
			ctx, cancel := context.WithCancel(ctx)
			defer cancel()
			s := client.Messages.NewStreaming(ctx, params("slow"))
			defer s.Close()
			for s.Next() {
				if text := s.Current().Delta.Text; text != "" {
					return text, nil
				}
			}
			return nil, s.Err()
		},
		"thinking": func() (any, error) {
			p := params("think")
			p.Thinking = anthropic.ThinkingConfigParamOfEnabled(1024)
			first, err := streamed(p)
			if err != nil {
				return nil, err
			}
			thought := ""
			for _, b := range first.Content {
				thought += b.Thinking
			}
			p.Messages = append(p.Messages, first.ToParam(), user("think"))
			again, err := ask(p)
			if err != nil {
				return nil, err
			}
			return object{"thinking": thought, "text": texts(first), "again": texts(again)}, nil
		},
		"count_tokens": func() (any, error) {
			messages := []anthropic.MessageParam{anthropic.NewUserMessage(anthropic.NewTextBlock("Hello there"))}
			counted, err := client.Messages.CountTokens(ctx, anthropic.MessageCountTokensParams{
				Model: anthropic.Model(model), Messages: messages, System: anthropic.MessageCountTokensParamsSystemUnion{OfString: anthropic.String("Be terse.")},
			})
			if err != nil {
				return nil, err
			}
			m, err := ask(anthropic.MessageNewParams{Model: anthropic.Model(model), MaxTokens: 1, Messages: messages, System: []anthropic.TextBlockParam{{Text: "Be terse."}}})
			if err != nil {
				return nil, err
			}
			return counted.InputTokens == m.Usage.InputTokens+m.Usage.CacheReadInputTokens, nil
		},
		"models": func() (any, error) {
			found := false
			list := client.Models.ListAutoPaging(ctx, anthropic.ModelListParams{})
			for list.Next() {
				found = found || list.Current().ID == model
			}
			return found, list.Err()
		},
	}
}
