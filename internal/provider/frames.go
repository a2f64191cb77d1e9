package provider

import (
	"bufio"
	"encoding/binary"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"strings"

	"github.com/aws/aws-sdk-go-v2/aws/protocol/eventstream"

	"github.com/kinference/kinference/internal/openai"
)

// frames reads the event stream of AWS, whose decoder checks lengths and sums.
type frames struct {
	src     *bufio.Reader
	decoder *eventstream.Decoder
	payload []byte
	limit   int
}

func newFrames(src io.Reader, limit int) *frames {
	return &frames{src: bufio.NewReaderSize(src, 16<<10), decoder: eventstream.NewDecoder(), limit: limit}
}

const (
	// prelude is the length of a frame's first part: the length of all of it, that
	// of its headers, and their sum.
	prelude = 12
	// frameLeast is a frame without headers and payload.
	frameLeast = prelude + 4
	// maxFrameHeaders bounds the headers, of which a frame of Bedrock has three: the
	// decoder compares each with all before it.
	maxFrameHeaders = 16 << 10
)

// errFrame says that a frame's lengths contradict each other.
var errFrame = errors.New("malformed frame")

// next returns the next frame, whose memory is used again for the one after.
// io.EOF is an end between frames; one within is unexpected. After any other
// error there are no more.
func (f *frames) next() (eventstream.Message, error) {
	head, err := f.src.Peek(prelude)
	if err != nil {
		if len(head) > 0 && errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		}
		return eventstream.Message{}, err
	}
	n, headers := int64(binary.BigEndian.Uint32(head)), int64(binary.BigEndian.Uint32(head[4:]))
	switch {
	case n > int64(f.limit):
		return eventstream.Message{}, openai.ErrEventTooLarge
	case n < frameLeast || headers > n-frameLeast || headers > maxFrameHeaders:
		// The decoder would subtract them, and read gigabytes.
		return eventstream.Message{}, errFrame
	}
	m, err := f.decoder.Decode(io.LimitReader(f.src, n), f.payload[:0])
	if errors.Is(err, io.EOF) {
		err = io.ErrUnexpectedEOF
	}
	f.payload = m.Payload
	return m, err
}

// framed makes events of the Messages API of a ConverseStream.
type framed struct {
	*frames
	stopped bool // messageStop came; only usage is missing
	pending []byte
}

// streamPart is what the events of a ConverseStream have in them.
type streamPart struct {
	Start struct {
		ToolUse *struct {
			ID   string `json:"toolUseId"`
			Name string `json:"name"`
		} `json:"toolUse"`
	} `json:"start"`
	Delta struct {
		Text    *string `json:"text"`
		ToolUse *struct {
			Input string `json:"input"`
		} `json:"toolUse"`
		Reasoning *struct {
			Text *string `json:"text"`
		} `json:"reasoningContent"`
	} `json:"delta"`
	StopReason string         `json:"stopReason"`
	Usage      *converseUsage `json:"usage"`
}

func (f *framed) next() ([]byte, error) {
	if f.pending != nil {
		data := f.pending
		f.pending = nil
		return data, nil
	}
	m, err := f.frames.next()
	if err != nil {
		if errors.Is(err, io.EOF) && f.stopped {
			err = errNoUsage
		}
		return nil, err
	}
	if kind := header(&m, ":message-type"); kind != "event" {
		return nil, exception(kind, &m)
	}
	var part streamPart
	if json.Unmarshal(m.Payload, &part) != nil {
		return nil, &wholeError{openai.Server(http.StatusBadGateway, openai.CodeUpstream, invalidText)}
	}
	return f.event(header(&m, ":event-type"), &part), nil
}

// event is the data of the event that a frame becomes, nil if it says nothing.
func (f *framed) event(kind string, part *streamPart) []byte {
	type members = map[string]any
	switch kind {
	case "messageStart":
		return []byte(`{"type":"message_start","message":{}}`)
	case "contentBlockStart":
		if t := part.Start.ToolUse; t != nil {
			return encode(members{"type": "content_block_start", "content_block": members{"type": "tool_use", "id": t.ID, "name": t.Name, "input": members{}}})
		}
	case "contentBlockDelta":
		switch d := &part.Delta; {
		case d.Text != nil:
			return encode(members{"type": "content_block_delta", "delta": members{"type": "text_delta", "text": *d.Text}})
		case d.ToolUse != nil:
			return encode(members{"type": "content_block_delta", "delta": members{"type": "input_json_delta", "partial_json": d.ToolUse.Input}})
		case d.Reasoning != nil && d.Reasoning.Text != nil:
			return encode(members{"type": "content_block_delta", "delta": members{"type": "thinking_delta", "thinking": *d.Reasoning.Text}})
		}
	case "contentBlockStop":
		return []byte(`{"type":"content_block_stop"}`)
	case "messageStop":
		f.stopped = true
		return encode(members{"type": "message_delta", "delta": members{"stop_reason": stopReason(part.StopReason)}})
	case "metadata": // comes last
		if part.Usage == nil || !f.stopped {
			return nil
		}
		f.pending = []byte(`{"type":"message_stop"}`)
		return encode(members{"type": "message_delta", "delta": members{}, "usage": part.Usage.counts()})
	}
	return nil
}

func encode(v map[string]any) []byte {
	data, _ := json.Marshal(v) // maps of strings and numbers
	return data
}

func header(m *eventstream.Message, name string) string {
	if v, ok := m.Headers.Get(name).(eventstream.StringValue); ok {
		return string(v)
	}
	return ""
}

// exception is the error that a frame tells of. Its text is the provider's
// inside, and is not looked at but for a fault of the request.
func exception(kind string, m *eventstream.Message) error {
	name := header(m, ":exception-type")
	if kind == "error" || name == "" {
		name = header(m, ":error-code")
	}
	e := openai.Server(http.StatusBadGateway, openai.CodeUpstream, failedText)
	switch name = strings.ToLower(name); {
	case strings.Contains(name, "throttling"), strings.Contains(name, "quota"):
		e = &openai.Error{Status: http.StatusTooManyRequests, Type: "requests", Code: "rate_limit_exceeded", Message: busyText}
	case strings.Contains(name, "unavailable"):
		e = openai.Overloaded(busyText, 0)
	case strings.Contains(name, "timeout"):
		e = openai.Server(http.StatusGatewayTimeout, openai.CodeTimeout, timeoutText)
	case strings.Contains(name, "validation"):
		e = openai.FromBody(http.StatusBadRequest, bedrockText(m.Payload))
	}
	return &wholeError{e}
}
