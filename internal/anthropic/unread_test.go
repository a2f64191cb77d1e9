package anthropic_test

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/kinference/kinference/internal/anthropic"
	"github.com/kinference/kinference/internal/openai"
)

// unreadBodies have a text, X, where a provider of this API gets it.
var unreadBodies = []string{
	`"messages":[{"role":"user","content":X}]`, `"messages":[{"role":"user","content":[{"type":"text","text":X}]}]`, `"messages":[{"role":"user","content":[{"type":"text","text":"a","title":X}]}]`,
	`"messages":[{"role":"user","content":"a","name":X}]`,
	`"messages":[{"role":"user","content":[{"type":"document","title":X,"source":{"type":"text","media_type":"text/plain","data":"a"}}]}]`,
	`"messages":[{"role":"user","content":[{"type":"document","context":X,"source":{"type":"text","data":"a"}}]}]`, `"messages":[{"role":"user","content":[{"type":"document","source":{"type":"text","media_type":X,"data":"a"}}]}]`,
	`"messages":[{"role":"user","content":[{"type":"document","source":{"type":"text","data":X}}]}]`, `"messages":[{"role":"user","content":[{"type":"image","alt":X,"source":{"type":"base64","media_type":"image/png","data":"QUJD"}}]}]`,
	`"messages":[{"role":"user","content":[{"type":"image","source":{"type":"base64","media_type":"image/png","data":"QUJD","name":X}}]}]`,
	`"messages":[{"role":"assistant","content":[{"type":"thinking","thinking":"a","signature":X}]},{"role":"user","content":"a"}]`, `"messages":[{"role":"assistant","content":[{"type":"thinking","thinking":X,"signature":"b"}]},{"role":"user","content":"a"}]`,
	`"messages":[{"role":"assistant","content":[{"type":"redacted_thinking","data":X}]},{"role":"user","content":"a"}]`,
	`"messages":[{"role":"assistant","content":[{"type":"tool_use","id":"a","name":"f","input":{"a":[X]}}]},{"role":"user","content":"a"}]`, `"messages":[{"role":"assistant","content":[{"type":"tool_use","id":"a","name":"f","input":{},"caller":{"type":X}}]},{"role":"user","content":"a"}]`,
	`"messages":[{"role":"user","content":[{"type":"tool_result","tool_use_id":"a","content":[{"type":"text","text":"b","citations":[X]}]}]}]`, `"messages":[{"role":"user","content":[{"type":"tool_result","tool_use_id":"a","content":[{"type":"text","text":X}]}]}]`,
	`"messages":[{"role":"user","content":[{"type":"tool_result","tool_use_id":"a","is_error":false,"note":X}]}]`, `"messages":[{"role":"user","content":[{"type":"text","text":"a","cache_control":{"type":X}}]}]`,
	`"messages":[{"role":"user","content":"a"}],"system":X`, `"messages":[{"role":"user","content":"a"}],"system":"x-anthropic-billing-header: "X`, `"messages":[{"role":"user","content":"a"}],"system":[{"type":"text","text":"x-anthropic-billing-header: "X}]`,
	`"messages":[{"role":"user","content":"a"}],"system":[{"type":"text","text":"a","citations":{"a":X}}]`, `"messages":[{"role":"user","content":"a"}],"tools":[{"name":"f","input_schema":{},"input_examples":[{"a":X}]}]`,
	`"messages":[{"role":"user","content":"a"}],"tools":[{"name":"f","description":X,"input_schema":{}}]`, `"messages":[{"role":"user","content":"a"}],"tools":[{"name":"f","input_schema":{}}],"tool_choice":{"type":"auto","why":X}`,
	`"messages":[{"role":"user","content":"a"}],"thinking":{"type":"adaptive","display":X}`, `"messages":[{"role":"user","content":"a"}],"output_config":{"effort":X}`, `"messages":[{"role":"user","content":"a"}],"context_management":{"edits":[{"type":X}]}`,
	`"messages":[{"role":"user","content":"a"}],"cache_control":{"type":X}`, `"messages":[{"role":"user","content":"a"}],"stop_sequences":[X]`,
}

// All that a provider gets in the client's own body is in the chat body, which is
// classified, or in what Unread tells.
func TestUnread(t *testing.T) {
	const needle = "jane.doe@example.com"
	for _, shape := range unreadBodies {
		body := `{"model":"m","max_tokens":9,` + strings.ReplaceAll(strings.ReplaceAll(shape, `"X`, needle+`"`), "X", `"`+needle+`"`) + `}`
		var r anthropic.Request
		if e := r.Parse([]byte(body), anthropic.Settings{}); e != nil {
			t.Fatalf("%v in %s", e, body)
		}
		own, _, err := anthropic.OwnBody(&r.Body, "claude", 0)
		if err != nil || !strings.Contains(string(own), needle) {
			t.Fatalf("the provider gets %s, %v", own, err)
		}
		read := string(r.AppendChat(nil, anthropic.Worker))
		for _, v := range anthropic.Unread(&r.Body) {
			if !json.Valid(v.Raw) {
				t.Errorf("%s is no JSON", v.Raw)
			}
			read += string(v.Raw)
		}
		if !strings.Contains(read, needle) {
			t.Errorf("nobody reads all of %s", body)
		}
	}
}

// What every request of an agent has is no news.
func TestNothingUnread(t *testing.T) {
	signature := `"` + strings.Repeat("EqQBCgIY", 20) + `="`
	body := `{"model":"m","max_tokens":9,"temperature":1,"system":[{"type":"text","text":"x-anthropic-billing-header: cc_version=2.1.36.fbd; cc_entrypoint=cli; cch=1a2b3;"},
		{"type":"text","text":"Be brief.","cache_control":{"type":"ephemeral", "ttl":"1h"}}],"tools":[{"name":"f","description":"d","input_schema":{"type":"object"}}],"tool_choice":{"type":"auto"},
		"thinking":{"type":"enabled","budget_tokens":1024},"metadata":{"user_id":"stays here"},"messages":[{"role":"user","content":"a"},{"role":"assistant","content":[
		{"type":"thinking","thinking":"t","signature":` + signature + `},{"type":"redacted_thinking","data":` + signature + `},{"type":"tool_use","id":"toolu_1","name":"f","input":{}}]},
		{"role":"user","content":[{"type":"tool_result","tool_use_id":"toolu_1","content":[{"type":"text","text":"b"}]},{"type":"text","text":"c","cache_control":{"type":"ephemeral"}}]}]}`
	var o openai.Object
	if err := o.Parse([]byte(body), 0); err != nil {
		t.Fatal(err)
	}
	for _, v := range anthropic.Unread(&o) {
		t.Errorf("unread: %s", v.Raw)
	}
}
