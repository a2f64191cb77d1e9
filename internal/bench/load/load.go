// Package load sends OpenAI requests and measures the streams that come back,
// as a client of the gateway or of a worker sees them.
//
// The wall-clock benchmarks use it. It is written to cost little, because it
// shares its cores with what it measures: one buffer per connection, no JSON
// parsing per token unless the text is asked for. A Client is safe for
// concurrent use. Failures are part of a Response, not errors apart.
package load

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"time"
)

// Client sends requests over kept-alive HTTP/1.1 connections, as many as there
// are requests in flight.
type Client struct {
	http    *http.Client
	readers sync.Pool
}

// NewClient returns a client without connections. Close releases them.
func NewClient() *Client {
	return &Client{
		http: &http.Client{Transport: &http.Transport{
			DialContext:         (&net.Dialer{Timeout: 10 * time.Second}).DialContext,
			MaxIdleConnsPerHost: 4096,
			DisableCompression:  true,
			WriteBufferSize:     64 << 10, // long prompts go out in few writes
		}},
		readers: sync.Pool{New: func() any { return bufio.NewReaderSize(nil, 8<<10) }},
	}
}

// Close closes idle connections.
func (c *Client) Close() { c.http.CloseIdleConnections() }

// Request is one streaming request.
type Request struct {
	URL  string
	Body []byte
	// Text asks for the generated text.
	Text bool
	// OnFirst, when set, is called at the first content event.
	OnFirst func()
}

// Response is what came back. Times run from the moment before the request is
// written.
type Response struct {
	Err    error // of transport or HTTP status, or an error event in the stream
	Status int
	ID     string        // x-request-id of the answer
	TTFT   time.Duration // until the first event with content
	E2E    time.Duration // until the stream's end
	Text   string
	Events int // with content
	// From the usage of the last event; -1 where there was none.
	Prompt, Cached, Output int
}

// maxEvent bounds one event of a stream.
const maxEvent = 1 << 20

// Do sends r and reads the stream to its end.
func (c *Client) Do(ctx context.Context, r Request) Response {
	out := Response{Prompt: -1, Cached: -1, Output: -1}
	start := time.Now()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, r.URL, bytes.NewReader(r.Body))
	if err != nil {
		out.Err = err
		return out
	}
	req.Header.Set("Content-Type", "application/json")
	res, err := c.http.Do(req)
	if err != nil {
		out.Err, out.E2E = err, time.Since(start)
		return out
	}
	defer res.Body.Close()
	out.Status, out.ID = res.StatusCode, res.Header.Get("X-Request-Id")
	if res.StatusCode != http.StatusOK {
		body, _ := io.ReadAll(io.LimitReader(res.Body, 4<<10))
		out.Err, out.E2E = fmt.Errorf("status %d: %s", res.StatusCode, bytes.TrimSpace(body)), time.Since(start)
		return out
	}
	in := c.readers.Get().(*bufio.Reader)
	in.Reset(res.Body)
	out.Err = out.read(in, r, start)
	in.Reset(nil)
	c.readers.Put(in)
	out.E2E = time.Since(start)
	if out.Err == nil && out.Events == 0 {
		out.Err = errors.New("stream without content")
	}
	return out
}

// read takes in the events of a stream.
func (out *Response) read(in *bufio.Reader, r Request, start time.Time) error {
	var text strings.Builder
	var long []byte // an event that exceeds the reader's buffer
	for {
		line, err := in.ReadSlice('\n')
		if errors.Is(err, bufio.ErrBufferFull) {
			if long = append(long, line...); len(long) > maxEvent {
				return errors.New("event exceeds 1 MiB")
			}
			continue
		}
		if errors.Is(err, io.EOF) && len(line) == 0 && len(long) == 0 {
			return errors.New("stream ended without [DONE]")
		}
		if err != nil {
			return err
		}
		if len(long) > 0 {
			line = append(long, line...)
			long = long[:0]
		}
		data, ok := bytes.CutPrefix(bytes.TrimSpace(line), []byte("data:"))
		if !ok {
			continue
		}
		data = bytes.TrimSpace(data)
		if bytes.Equal(data, []byte("[DONE]")) {
			out.Text = text.String()
			// Reading to the end lets the connection be used again.
			_, err := io.Copy(io.Discard, io.LimitReader(in, 4<<10))
			return err
		}
		if err := out.event(data, r, start, &text); err != nil {
			return err
		}
	}
}

// chunk holds what is read of an event, of chat and of plain completions.
type chunk struct {
	Choices []struct {
		Text  string `json:"text"`
		Delta struct {
			Content   string `json:"content"`
			Reasoning string `json:"reasoning"`
			Older     string `json:"reasoning_content"`
		} `json:"delta"`
	} `json:"choices"`
	Usage *struct {
		Prompt  int `json:"prompt_tokens"`
		Output  int `json:"completion_tokens"`
		Details *struct {
			Cached int `json:"cached_tokens"`
		} `json:"prompt_tokens_details"`
	} `json:"usage"`
	Error json.RawMessage `json:"error"`
}

var (
	usageKey = []byte(`"usage":{`)
	errorKey = []byte(`"error":`)
)

func (out *Response) event(data []byte, r Request, start time.Time, text *strings.Builder) error {
	now := time.Since(start)
	// Once content flows, most events differ in one word only.
	if out.Events > 0 && !r.Text && !bytes.Contains(data, usageKey) && !bytes.Contains(data, errorKey) {
		out.Events++
		return nil
	}
	var c chunk
	if err := json.Unmarshal(data, &c); err != nil {
		return fmt.Errorf("event is not JSON: %w", err)
	}
	if len(c.Error) > 0 && string(c.Error) != "null" {
		return fmt.Errorf("error event: %s", c.Error)
	}
	content := false
	for _, ch := range c.Choices {
		s := ch.Text + ch.Delta.Content
		if r.Text {
			text.WriteString(s)
		}
		content = content || s != "" || ch.Delta.Reasoning != "" || ch.Delta.Older != ""
	}
	if content {
		if out.Events == 0 {
			out.TTFT = now
			if r.OnFirst != nil {
				r.OnFirst()
			}
		}
		out.Events++
	}
	if c.Usage != nil {
		out.Prompt, out.Output, out.Cached = c.Usage.Prompt, c.Usage.Output, 0
		if c.Usage.Details != nil {
			out.Cached = c.Usage.Details.Cached
		}
	}
	return nil
}

// Message is one message of a chat.
type Message struct {
	Role    string `json:"role"`
	Content string `json:"content"`
}

type body struct {
	Model         string          `json:"model"`
	Messages      []Message       `json:"messages,omitempty"`
	Prompt        string          `json:"prompt,omitempty"`
	MaxTokens     int             `json:"max_tokens"`
	IgnoreEOS     bool            `json:"ignore_eos"` // vLLM: always generate max_tokens
	Stream        bool            `json:"stream"`
	StreamOptions map[string]bool `json:"stream_options"`
}

func encode(b body) []byte {
	b.Stream, b.IgnoreEOS, b.StreamOptions = true, true, map[string]bool{"include_usage": true}
	data, err := json.Marshal(b)
	if err != nil {
		panic(err) // strings and numbers always encode
	}
	return data
}

// Chat is the body of a streaming /v1/chat/completions request that generates
// maxTokens tokens.
func Chat(model string, messages []Message, maxTokens int) []byte {
	return encode(body{Model: model, Messages: messages, MaxTokens: maxTokens})
}

// Completion is the body of a streaming /v1/completions request.
func Completion(model, prompt string, maxTokens int) []byte {
	return encode(body{Model: model, Prompt: prompt, MaxTokens: maxTokens})
}
