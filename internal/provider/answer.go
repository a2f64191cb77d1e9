package provider

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"

	"github.com/kinference/kinference/internal/anthropic"
	"github.com/kinference/kinference/internal/openai"
)

// Whole turns the body of an answer that is no stream into that of OpenAI's API.
// The error says that it is none.
func (r *Request) Whole(body []byte) ([]byte, error) {
	switch r.kind {
	case messages:
		return r.completion(body)
	case converse:
		message, err := messageFrom(body)
		if err != nil {
			return nil, err
		}
		return r.completion(message)
	}
	return body, nil
}

// completion makes a chat completion of a message.
func (r *Request) completion(message []byte) ([]byte, error) {
	out, usage, err := anthropic.AppendChat(nil, message, r.call.completion())
	if err != nil || usage != openai.NoUsage {
		return out, err
	}
	var o openai.Object // zero would be a count
	if err := o.Parse(out, 0); err != nil {
		return nil, err
	}
	return o.Apply(nil, openai.Remove("usage"))
}

// IsStream reports whether an answer of this media type is a stream.
func (r *Request) IsStream(media string) bool {
	if r.kind == converse {
		return media == "application/vnd.amazon.eventstream"
	}
	return media == "text/event-stream"
}

// Stream is a stream of chat completion chunks, with usage in a chunk of its own
// and [DONE] at the end. One that ends without was cut off.
type Stream interface {
	io.Reader
	// Fault is the error event that was read, nil if none was.
	Fault() *openai.Error
	// Usage is what is known of it that no chunk has told yet, for a stream that was
	// cut off.
	Usage() openai.Usage
}

// Stream turns the body of an answer that is a stream into that of OpenAI's API.
// No event may be longer than limit.
func (r *Request) Stream(body io.Reader, limit int) Stream {
	switch r.kind {
	case messages:
		return &translation{rest: body, next: eventsOf(body, limit), chat: anthropic.NewChatStream(r.call.completion())}
	case converse:
		return &translation{rest: body, next: (&framed{frames: newFrames(body, limit)}).next, chat: anthropic.NewChatStream(r.call.completion())}
	}
	return plain{body}
}

// plain is a stream that is what it should be.
type plain struct{ io.Reader }

// Fault implements Stream.
func (plain) Fault() *openai.Error { return nil }

// Usage implements Stream.
func (plain) Usage() openai.Usage { return openai.NoUsage }

// translation is a stream made of events of the Messages API.
type translation struct {
	rest io.Reader // to be read to its end, so that the connection can be used again
	// next is the next event's data, nil for one without any.
	next  func() ([]byte, error)
	chat  *anthropic.ChatStream
	out   []byte // what was made and not read yet
	mem   []byte
	fault *openai.Error
	err   error
}

// Fault implements Stream.
func (t *translation) Fault() *openai.Error { return t.fault }

// Usage implements Stream.
func (t *translation) Usage() openai.Usage { return t.chat.Usage() }

// Read implements io.Reader. An event that says nothing, such as a ping, is a read
// without bytes: whoever waits learns that the provider is alive.
func (t *translation) Read(p []byte) (int, error) {
	for len(t.out) == 0 {
		if t.err != nil {
			if t.rest != nil && t.chat.Ended() {
				_, _ = io.Copy(io.Discard, io.LimitReader(t.rest, 16<<10))
			}
			t.rest = nil
			return 0, t.err
		}
		data, err := t.next()
		var tail *wholeError
		switch {
		case errors.As(err, &tail):
			t.fault, t.err = tail.e, io.EOF
			t.out = tail.e.AppendEvent(t.mem[:0])
		case errors.Is(err, errNoUsage): // all of the answer is there
			t.out, t.err = append(t.mem[:0], "data: [DONE]\n\n"...), io.EOF
		case err != nil:
			t.err = err
		case data != nil:
			t.mem, t.fault = t.chat.Event(t.mem[:0], data)
			if t.out = t.mem; t.chat.Ended() {
				t.err = io.EOF
			}
		}
		if len(t.out) == 0 && t.err == nil {
			return 0, nil
		}
	}
	n := copy(p, t.out)
	t.out = t.out[n:]
	return n, nil
}

// wholeError is an error of the provider in place of an event.
type wholeError struct{ e *openai.Error }

// Error implements error.
func (w *wholeError) Error() string { return "error of the provider" }

// errNoUsage ends a stream whose answer is complete, but that has no usage.
var errNoUsage = errors.New("stream ended without usage")

// eventsOf are the data of a stream's events.
func eventsOf(body io.Reader, limit int) func() ([]byte, error) {
	events := openai.NewReader(body, limit)
	return func() ([]byte, error) {
		e, err := events.Next()
		if err != nil || e.Cut {
			return nil, cmpErr(err)
		}
		return e.Data, nil
	}
}

func cmpErr(err error) error {
	if err == nil {
		return io.EOF
	}
	return err
}

// What Converse answers with.
type (
	converseAnswer struct {
		Output struct {
			Message *struct {
				Content []answerBlock `json:"content"`
			} `json:"message"`
		} `json:"output"`
		StopReason string         `json:"stopReason"`
		Usage      *converseUsage `json:"usage"`
	}
	answerBlock struct {
		Text    *string `json:"text"`
		ToolUse *struct {
			ID    string          `json:"toolUseId"`
			Name  string          `json:"name"`
			Input json.RawMessage `json:"input"`
		} `json:"toolUse"`
		Reasoning *struct {
			Text *struct {
				Text string `json:"text"`
			} `json:"reasoningText"`
		} `json:"reasoningContent"`
	}
	converseUsage struct {
		Input  *int `json:"inputTokens"`
		Output *int `json:"outputTokens"`
		Read   *int `json:"cacheReadInputTokens"`
		Write  *int `json:"cacheWriteInputTokens"`
	}
)

var errNoAnswer = errors.New("no answer of the Converse API")

// messageFrom makes a message of the Messages API of a Converse answer.
func messageFrom(body []byte) ([]byte, error) {
	var in converseAnswer
	if err := json.Unmarshal(body, &in); err != nil || in.Output.Message == nil {
		return nil, errNoAnswer
	}
	blocks := []map[string]any{}
	for i := range in.Output.Message.Content {
		switch b := &in.Output.Message.Content[i]; {
		case b.Text != nil:
			blocks = append(blocks, map[string]any{"type": "text", "text": *b.Text})
		case b.ToolUse != nil:
			blocks = append(blocks, map[string]any{"type": "tool_use", "id": b.ToolUse.ID, "name": b.ToolUse.Name, "input": object(b.ToolUse.Input)})
		case b.Reasoning != nil && b.Reasoning.Text != nil:
			blocks = append(blocks, map[string]any{"type": "thinking", "thinking": b.Reasoning.Text.Text})
		}
	}
	out := map[string]any{"type": "message", "content": blocks, "stop_reason": stopReason(in.StopReason)}
	if in.Usage != nil {
		out["usage"] = in.Usage.counts()
	}
	return json.Marshal(out)
}

// object is a call's input, which must be an object for those who read it.
func object(text json.RawMessage) json.RawMessage {
	if !bytes.HasPrefix(bytes.TrimSpace(text), []byte("{")) {
		return json.RawMessage("{}")
	}
	return text
}

// stopReason is a stop reason under the name that the Messages API has for it.
func stopReason(s string) string {
	switch s {
	case "guardrail_intervened", "content_filtered":
		return "refusal"
	}
	return s
}

// counts is the usage under the names of the Messages API, which counts alike:
// what was read from the cache, or written to it, is not in the input.
func (u *converseUsage) counts() map[string]int {
	out := map[string]int{}
	for name, n := range map[string]*int{
		"input_tokens": u.Input, "output_tokens": u.Output, "cache_read_input_tokens": u.Read, "cache_creation_input_tokens": u.Write,
	} {
		if n != nil {
			out[name] = *n
		}
	}
	return out
}
