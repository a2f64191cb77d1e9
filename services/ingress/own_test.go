package ingress_test

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kinference/kinference/api/v1alpha1"
	"github.com/kinference/kinference/internal/anthropic/grammar"
	"github.com/kinference/kinference/internal/provider/fake"
	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
	"github.com/kinference/kinference/services/ingress"
)

// bursting is a gateway whose router sends everything to a provider.
func bursting(t *testing.T, schema v1alpha1.ProviderSchema, model string, tokens uint32) (*env, *fake.Server) {
	t.Helper()
	s := fake.New(schema, model)
	t.Cleanup(s.Close)
	dir := t.TempDir()
	if err := os.MkdirAll(filepath.Join(dir, "ns", "paid"), 0o700); err != nil {
		t.Fatal(err)
	}
	keys := map[string]string{"apiKey": fake.Key}
	region := ""
	if schema == v1alpha1.SchemaBedrock {
		keys, region = map[string]string{"accessKeyId": fake.AccessKey, "secretAccessKey": fake.SecretKey}, fake.Region
	}
	for name, key := range keys {
		if err := os.WriteFile(filepath.Join(dir, "ns", "paid", name), []byte(key), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	e := start(t, func(c *ingress.Config, _ *routerv1.Catalog) {
		c.ProviderCredentials, c.ProviderPrivate = dir, "127.0.0.0/8"
	}).ready()
	e.router.set(func(*routerv1.RouteRequest) (*routerv1.RouteResponse, error) {
		return &routerv1.RouteResponse{Endpoints: []*routerv1.Endpoint{{
			Worker: "provider ns/cloud", Provider: "ns/cloud", UpstreamModel: model,
			Target: &routerv1.ProviderTarget{Schema: string(schema), Endpoint: s.URL, Secret: "ns/paid", MaxTokensCap: tokens, Region: region},
		}}}, nil
	})
	return e, s
}

// ownRequest is what an agent sends in its second turn, where the first was answered
// half by Anthropic's model and half by one of ours.
const ownRequest = `{"model":"chat","max_tokens":9000,"stream":%v,"thinking":{"type":"enabled","budget_tokens":6000},"temperature":1.0,` +
	`"system":[{"type":"text","text":"x-anthropic-billing-header: cc_version=2; cch=abcde;"},{"type":"text","text":"Be brief.","cache_control":{"type":"ephemeral","ttl":"1h"}}],` +
	`"tools":[{"name":"weather","description":"of a city","input_schema":{"type":"object"},"cache_control":{"type":"ephemeral"}}],` +
	`"context_management":{"edits":[{"type":"clear_tool_uses_20250919"}]},"metadata":{"user_id":"alice@example.com"},"service_tier":"auto",` +
	`"chat_template_kwargs":{"a":1},"cache_salt":"mine","messages":[` +
	`{"role":"user","content":"Hello"},` +
	`{"role":"assistant","content":[{"type":"thinking","thinking":"ours","signature":"kinference-unsigned"},{"type":"text","text":"Hi"}]},` +
	`{"role":"user","content":"And the weather?"},` +
	`{"role":"assistant","content":[{"type":"thinking","thinking":"theirs","signature":"` + fake.Signature + `"},{"type":"tool_use","id":"toolu_1","name":"weather","input":{"b" :1.50,"a":2}}]},` +
	`{"role":"user","content":[{"type":"tool_result","tool_use_id":"toolu_1","is_error":false,"content":[{"type":"text","text":"sun"}],"cache_control":{"type":"ephemeral"}}]}]}`

// A client of the Messages API whose request goes to Anthropic loses nothing on the
// way: what is cached, thinking with its signature, features in beta; and it gets
// Anthropic's own events. What is ours and what tells who it is stays here.
func TestMessagesToAnthropic(t *testing.T) {
	e, s := bursting(t, v1alpha1.SchemaAnthropic, "claude-9", 8000)
	for _, stream := range []bool{true, false} {
		t.Run(fmt.Sprint("stream ", stream), func(t *testing.T) {
			resp, body := e.post(messagesPath, fmt.Sprintf(ownRequest, stream), "anthropic-version", "2023-06-01", "anthropic-beta", "context-management-2025-06-27,interleaved-thinking-2025-05-14",
				"x-api-key", "sk-of-the-client", "cookie", "a=b", "x-claude-code-session-id", "s1")
			if resp.StatusCode != http.StatusOK {
				t.Fatalf("%d %s; refused %v", resp.StatusCode, body, s.Refused())
			}
			seen := s.Seen()
			got := seen[len(seen)-1]
			sent := strings.NewReplacer(`"model":"chat"`, `"model":"claude-9"`, `"max_tokens":9000`, `"max_tokens":8000`, `"metadata":{"user_id":"alice@example.com"},"service_tier":"auto",`, "",
				`"chat_template_kwargs":{"a":1},"cache_salt":"mine",`, "", `{"type":"thinking","thinking":"ours","signature":"kinference-unsigned"},`, "").Replace(fmt.Sprintf(ownRequest, stream))
			if diff := cmp.Diff(sent, string(got.Raw)); diff != "" {
				t.Errorf("Anthropic got (-want +got):\n%s", diff)
			}
			if got.Header.Get("Anthropic-Beta") != "context-management-2025-06-27,interleaved-thinking-2025-05-14" || got.Header.Get("X-Api-Key") != fake.Key {
				t.Errorf("header %v", got.Header)
			}
			m := &grammar.Message{}
			if stream {
				m = message(t, body)
				if !strings.Contains(body, `"service_tier":"standard"`) || !strings.Contains(body, `"ephemeral_5m_input_tokens":2`) {
					t.Errorf("usage is not Anthropic's own:\n%s", body)
				}
			} else {
				var whole struct {
					ID, Model string
					Reason    string `json:"stop_reason"`
					Content   []struct{ Type, Text, Thinking, Signature string }
					Usage     grammar.Usage
				}
				if err := json.Unmarshal([]byte(body), &whole); err != nil {
					t.Fatal(err)
				}
				m.ID, m.Model, m.StopReason, m.Usage = whole.ID, whole.Model, whole.Reason, whole.Usage
				for _, c := range whole.Content {
					m.Blocks = append(m.Blocks, grammar.Block{Type: c.Type, Text: c.Text + c.Thinking, Signature: c.Signature})
				}
			}
			m.Start, m.Pings = grammar.Usage{}, 0
			if diff := cmp.Diff(&grammar.Message{
				ID: "msg_1", Model: "chat", StopReason: "end_turn", Usage: grammar.Usage{Input: 6, Created: 2, Cached: 4, Output: 5},
				Blocks: []grammar.Block{{Type: "thinking", Text: "Hm.", Signature: fake.Signature}, {Type: "text", Text: fake.Text}},
			}, m); diff != "" {
				t.Errorf("the client got (-want +got):\n%s\n%s", diff, body)
			}
			if strings.Contains(body, "kinference_") || strings.Contains(body, "claude-9") {
				t.Errorf("what is ours is in the answer: %s", body)
			}
			done, words := e.router.done(resp.Header.Get("X-Request-Id"))
			if done.GetOutputTokens() != 5 || done.GetPromptTokens() != 12 || words[len(words)-1] != "ok" {
				t.Errorf("reported %v %v", words, done)
			}
		})
	}
}

// What fails on the way is told in the client's form, whoever's events it gets.
func TestMessagesToAnthropicFails(t *testing.T) {
	e, s := bursting(t, v1alpha1.SchemaAnthropic, "claude-9", 0)
	for _, c := range []struct {
		fault fake.Fault
		want  string
	}{{fake.ErrorEvent, "overloaded_error"}, {fake.Cut, "api_error"}} {
		s.SetFault(c.fault)
		_, body := e.post(messagesPath, messagesRequest(true, ""))
		if m := message(t, body); m.Error != c.want || m.Text("text") == "" || strings.Contains(body, fake.Account) {
			t.Errorf("fault %d: %q in %s", c.fault, m.Error, body)
		}
	}
}
