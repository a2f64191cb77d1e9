package classify_test

import (
	"strings"
	"testing"

	"github.com/kinference/kinference/internal/classify"
)

// An address is found wherever a body may hold it; media and token ids are unknown.
func TestFromBody(t *testing.T) {
	c := classifier(t, classify.Settings{})
	for name, body := range map[string]string{
		"system":              `{"messages":[{"role":"system","content":"X"}]}`,
		"user":                `{"messages":[{"role":"user","content":"X"}]}`,
		"part":                `{"messages":[{"role":"user","content":[{"type":"text","text":"X"}]}]}`,
		"assistant":           `{"messages":[{"role":"assistant","content":"X"}]}`,
		"reasoning":           `{"messages":[{"role":"assistant","content":"","reasoning_content":"X"}]}`,
		"tool result":         `{"messages":[{"role":"tool","tool_call_id":"1","content":"X"}]}`,
		"arguments":           `{"messages":[{"role":"assistant","tool_calls":[{"id":"1","function":{"name":"f","arguments":"{\"a\":\"X\"}"}}]}]}`,
		"name":                `{"messages":[{"role":"user","name":"X","content":"hi"}]}`,
		"tools":               `{"messages":[],"tools":[{"type":"function","function":{"name":"f","description":"X"}}]}`,
		"user field":          `{"messages":[],"user":"X"}`,
		"metadata":            `{"messages":[],"metadata":{"who":"X"}}`,
		"prompt":              `{"prompt":"X"}`,
		"prompts":             `{"prompt":["hello","X"]}`,
		"embedding":           `{"input":["X"]}`,
		"responses":           `{"instructions":"be nice","input":"X"}`,
		"responses items":     `{"input":[{"role":"user","content":[{"type":"input_text","text":"X"}]},{"type":"function_call_output","call_id":"1","output":"ok"}]}`,
		"responses call":      `{"input":[{"type":"function_call","name":"f","arguments":"{\"a\":\"X\"}"}]}`,
		"responses output":    `{"input":[{"type":"function_call_output","call_id":"1","output":"X"}]}`,
		"anthropic system":    `{"system":[{"type":"text","text":"X"}],"messages":[]}`,
		"anthropic tool use":  `{"messages":[{"role":"assistant","content":[{"type":"tool_use","name":"f","input":{"a":"X"}}]}]}`,
		"anthropic result":    `{"messages":[{"role":"user","content":[{"type":"tool_result","content":[{"type":"text","text":"X"}]}]}]}`,
		"anthropic document":  `{"messages":[{"role":"user","content":[{"type":"document","source":{"type":"text","data":"X"}}]}]}`,
		"something unknown":   `{"messages":[{"role":"user","content":[{"type":"hologram","inner":{"text":"X"}}]}]}`,
		"documents":           `{"messages":[],"documents":[{"text":"X"}]}`,
		"caption of an image": `{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"https://a.b/c.png"},"alt":"X"}]}]}`,
	} {
		parts, err := classify.FromBody([]byte(strings.Replace(body, "X", "write to jo.doe@mailbox.org", 1)))
		if err != nil {
			t.Fatal(err)
		}
		if got := c.Classify(t.Context(), classify.Input{Parts: parts}).Tag("pii-email"); got.State != classify.True {
			t.Errorf("%s: pii-email is %v, parts %d", name, got.State, len(parts))
		}
	}
	for name, body := range map[string]string{
		"image":     `{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"https://a.b/c.png"}}]}]}`,
		"file id":   `{"input":[{"role":"user","content":[{"type":"input_file","file_id":"f-1"}]}]}`,
		"pdf":       `{"messages":[{"role":"user","content":[{"type":"document","source":{"type":"base64","data":"JVBERi0="}}]}]}`,
		"audio":     `{"messages":[{"role":"user","content":[{"type":"input_audio","input_audio":{"data":"AAAA"}}]}]}`,
		"token ids": `{"prompt":[1,2,3]}`,
		"hologram":  `{"messages":[{"role":"user","content":[{"type":"hologram"}]}]}`,
	} {
		parts, err := classify.FromBody([]byte(body))
		if err != nil {
			t.Fatal(err)
		}
		if got := c.Classify(t.Context(), classify.Input{Parts: parts}).Tag("pii-detected"); got.State != classify.Unknown {
			t.Errorf("%s: pii-detected is %v", name, got.State)
		}
	}
	if _, err := classify.FromBody([]byte(`["jo.doe@mailbox.org"]`)); err == nil || strings.Contains(err.Error(), "jo.doe") {
		t.Errorf("no object: got %v", err)
	}
}
