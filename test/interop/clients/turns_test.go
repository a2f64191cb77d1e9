package clients

import (
	"fmt"
	"strings"
	"testing"

	"github.com/anthropics/anthropic-sdk-go"
	"github.com/anthropics/anthropic-sdk-go/option"
)

// TestClaudeCodeTurns has a conversation as Claude Code has it: the first
// system block is new in every request, the mark of the cache moves on, and
// each request brings the whole conversation. The engine must find the turn
// before in its cache.
func TestClaudeCodeTurns(t *testing.T) {
	url, _ := start(t)
	client := anthropic.NewClient(option.WithBaseURL(url), option.WithAPIKey("unused"), option.WithMaxRetries(0))
	rules := strings.Repeat("Follow this rule of the house and say why. ", 200)
	var messages []anthropic.MessageParam
	last := int64(0)
	for turn := range 4 {
		block := anthropic.NewTextBlock(fmt.Sprintf("Please look at file %d again.", turn))
		block.OfText.CacheControl = anthropic.NewCacheControlEphemeralParam()
		messages = append(messages, anthropic.NewUserMessage(block))
		s := client.Messages.NewStreaming(t.Context(), anthropic.MessageNewParams{
			Model: modelName, MaxTokens: 40, Messages: messages, Metadata: anthropic.MetadataParam{UserID: anthropic.String(fmt.Sprint("session", turn))},
			System: []anthropic.TextBlockParam{
				{Text: fmt.Sprintf("x-anthropic-billing-header: cc_version=2.1; cc_entrypoint=cli; cch=%05x;", turn*7919)},
				{Text: "You are Claude Code. " + rules, CacheControl: anthropic.NewCacheControlEphemeralParam()},
			},
			Tools: []anthropic.ToolUnionParam{{OfTool: &anthropic.ToolParam{Name: "Read", Description: anthropic.String("reads"), InputSchema: anthropic.ToolInputSchemaParam{Properties: object{"path": object{"type": "string"}}}}}},
		})
		var m anthropic.Message
		for s.Next() {
			if err := m.Accumulate(s.Current()); err != nil {
				t.Fatal(err)
			}
		}
		if err := s.Err(); err != nil {
			t.Fatal(err)
		}
		u := m.Usage
		total := u.InputTokens + u.CacheReadInputTokens
		t.Logf("turn %d: %d tokens, %d cached", turn, total, u.CacheReadInputTokens)
		// All of the turn before but its last, partly filled block.
		if turn > 0 && u.CacheReadInputTokens < last-16 {
			t.Errorf("turn %d: %d of %d tokens were cached, the turn before had %d", turn, u.CacheReadInputTokens, total, last)
		}
		last = total
		block.OfText.CacheControl = anthropic.CacheControlEphemeralParam{} // the mark moves on
		messages[len(messages)-1] = anthropic.NewUserMessage(block)
		messages = append(messages, m.ToParam())
	}
}
