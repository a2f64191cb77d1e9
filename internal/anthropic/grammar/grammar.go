// Package grammar checks that a Messages stream is one: a state machine over
// its events, as strict as the strictest client.
//
// Tests of the translation and of ingress feed it what a client would get. It
// shares no code with what it checks beyond the splitting into events. A
// Checker may be used by one goroutine at a time; a fault is an error that says
// which event broke which rule.
package grammar

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"

	"github.com/kinference/kinference/internal/openai"
)

// Block is one content block with its deltas put together.
type Block struct {
	Type      string
	Text      string // text or thinking
	Signature string
	ID, Name  string
	Input     string // partial JSON, joined
}

// Usage is a usage object; cached and created are apart from Input, as the API
// has it.
type Usage struct {
	Input   int `json:"input_tokens"`
	Created int `json:"cache_creation_input_tokens"`
	Cached  int `json:"cache_read_input_tokens"`
	Output  int `json:"output_tokens"`
}

// Message is what a client has when the stream is over.
type Message struct {
	ID, Model    string
	Blocks       []Block
	StopReason   string
	StopSequence string
	Start, Usage Usage // of message_start, and cumulative at the end
	Pings        int
	Error        string // type of the error event that ended the stream
	ErrorMessage string
}

// Text joins the text of all blocks of a type.
func (m *Message) Text(kind string) string {
	var out []byte
	for _, b := range m.Blocks {
		if b.Type == kind {
			out = append(out, b.Text...)
		}
	}
	return string(out)
}

// Checker follows one stream. The zero value is at its start.
type Checker struct {
	m                     Message
	started, open, signed bool
	delta, ended          bool
}

// event has the members of all events.
type event struct {
	Type    string `json:"type"`
	Index   *int   `json:"index"`
	Message *struct {
		ID         string            `json:"id"`
		Type       string            `json:"type"`
		Role       string            `json:"role"`
		Model      string            `json:"model"`
		Content    []json.RawMessage `json:"content"`
		StopReason *string           `json:"stop_reason"`
		Usage      *Usage            `json:"usage"`
	} `json:"message"`
	Block *struct {
		Type  string          `json:"type"`
		Text  *string         `json:"text"`
		Think *string         `json:"thinking"`
		ID    string          `json:"id"`
		Name  string          `json:"name"`
		Input json.RawMessage `json:"input"`
	} `json:"content_block"`
	Delta *struct {
		Type       string  `json:"type"`
		Text       *string `json:"text"`
		Think      *string `json:"thinking"`
		Signature  *string `json:"signature"`
		Partial    *string `json:"partial_json"`
		StopReason *string `json:"stop_reason"`
		Sequence   *string `json:"stop_sequence"`
	} `json:"delta"`
	Usage *Usage `json:"usage"`
	Error *struct {
		Type    string `json:"type"`
		Message string `json:"message"`
	} `json:"error"`
}

// errorTypes are those that the API names.
var errorTypes = map[string]bool{
	"invalid_request_error": true, "authentication_error": true, "billing_error": true, "permission_error": true, "not_found_error": true,
	"request_too_large": true, "rate_limit_error": true, "api_error": true, "timeout_error": true, "overloaded_error": true,
}

var stopReasons = map[string]bool{
	"end_turn": true, "max_tokens": true, "stop_sequence": true, "tool_use": true, "pause_turn": true, "refusal": true, "model_context_window_exceeded": true,
}

// Event takes the next event, by its name and data.
func (c *Checker) Event(name string, data []byte) error {
	var e event
	if err := json.Unmarshal(data, &e); err != nil {
		return fmt.Errorf("event %q: %w", name, err)
	}
	fail := func(format string, args ...any) error {
		return fmt.Errorf("event %q: "+format, append([]any{name}, args...)...)
	}
	switch {
	case name != e.Type:
		return fail("its data says %q", e.Type)
	case c.ended:
		return fail("after the end")
	case name == "ping":
		c.m.Pings++
		if !c.started {
			return fail("before message_start")
		}
		return nil
	case name == "error":
		c.ended = true
		if e.Error == nil || !errorTypes[e.Error.Type] || e.Error.Message == "" {
			return fail("no proper error: %s", data)
		}
		c.m.Error, c.m.ErrorMessage = e.Error.Type, e.Error.Message
		return nil
	case name == "message_start":
		return c.start(&e, fail)
	case !c.started:
		return fail("before message_start")
	case c.delta && name != "message_stop":
		return fail("after message_delta")
	}
	switch name {
	case "content_block_start", "content_block_delta", "content_block_stop":
		return c.block(name, &e, fail)
	case "message_delta":
		if c.open || e.Delta == nil || e.Delta.StopReason == nil || e.Usage == nil {
			return fail("a block is open, or no stop_reason or usage")
		}
		if c.delta = true; !stopReasons[*e.Delta.StopReason] {
			return fail("stop_reason %q", *e.Delta.StopReason)
		}
		c.m.StopReason, c.m.Usage = *e.Delta.StopReason, *e.Usage
		if (e.Delta.Sequence != nil) != (c.m.StopReason == "stop_sequence") {
			return fail("stop_sequence does not fit stop_reason")
		}
		if e.Delta.Sequence != nil {
			c.m.StopSequence = *e.Delta.Sequence
		}
	case "message_stop":
		if !c.delta {
			return fail("without message_delta")
		}
		c.ended = true
	default:
		return fail("unknown")
	}
	return nil
}

func (c *Checker) start(e *event, fail func(string, ...any) error) error {
	m := e.Message
	switch {
	case c.started:
		return fail("twice")
	case m == nil || m.Type != "message" || m.Role != "assistant" || m.Usage == nil || m.Content == nil || len(m.Content) > 0 || m.StopReason != nil || m.ID == "":
		return fail("no proper message")
	}
	c.started = true
	c.m.ID, c.m.Model, c.m.Start = m.ID, m.Model, *m.Usage
	return nil
}

func (c *Checker) block(name string, e *event, fail func(string, ...any) error) error {
	if e.Index == nil {
		return fail("without index")
	}
	last := len(c.m.Blocks) - 1
	if name == "content_block_start" {
		b := e.Block
		switch {
		case c.open:
			return fail("while a block is open")
		case *e.Index != last+1:
			return fail("index %d after %d blocks", *e.Index, last+1)
		case b == nil:
			return fail("without block")
		case b.Type == "text" && (b.Text == nil || *b.Text != ""), b.Type == "thinking" && (b.Think == nil || *b.Think != ""):
			return fail("block does not begin empty")
		case b.Type == "tool_use" && (b.ID == "" || string(b.Input) != "{}"):
			return fail("tool_use without id or with input")
		case b.Type != "text" && b.Type != "thinking" && b.Type != "tool_use":
			return fail("block type %q", b.Type)
		}
		c.open, c.signed = true, false
		c.m.Blocks = append(c.m.Blocks, Block{Type: b.Type, ID: b.ID, Name: b.Name})
		return nil
	}
	if !c.open || *e.Index != last {
		return fail("index %d, but block %d is the last and open is %v", *e.Index, last, c.open)
	}
	b := &c.m.Blocks[last]
	if name == "content_block_stop" {
		if c.open = false; b.Type == "thinking" && !c.signed {
			return fail("thinking without signature")
		}
		return nil
	}
	d := e.Delta
	switch {
	case d == nil:
		return fail("without delta")
	case c.signed:
		return fail("after the signature")
	case d.Type == "text_delta" && b.Type == "text" && d.Text != nil:
		b.Text += *d.Text
	case d.Type == "thinking_delta" && b.Type == "thinking" && d.Think != nil:
		b.Text += *d.Think
	case d.Type == "signature_delta" && b.Type == "thinking" && d.Signature != nil:
		b.Signature, c.signed = *d.Signature, true
	case d.Type == "input_json_delta" && b.Type == "tool_use" && d.Partial != nil:
		b.Input += *d.Partial
	default:
		return fail("delta %q in a block of type %q", d.Type, b.Type)
	}
	return nil
}

// End gives the message, and an error if the stream is not over.
func (c *Checker) End() (*Message, error) {
	if !c.ended {
		return &c.m, errors.New("the stream has no end")
	}
	return &c.m, nil
}

// Read checks a whole stream.
func Read(r io.Reader) (*Message, error) {
	var c Checker
	events := openai.NewReader(r, 64<<20)
	for {
		e, err := events.Next()
		switch {
		case errors.Is(err, io.EOF):
			return c.End()
		case err != nil:
			return &c.m, err
		case e.Data == nil && len(bytes.TrimSpace(e.Raw)) == 0:
			continue
		case e.Data == nil || e.Cut || len(e.Type) == 0:
			return &c.m, fmt.Errorf("not a named event: %q", e.Raw)
		}
		if err := c.Event(string(e.Type), e.Data); err != nil {
			return &c.m, err
		}
	}
}
