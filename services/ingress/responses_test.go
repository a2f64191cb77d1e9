package ingress_test

import (
	"encoding/json"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

const responsesPath = "/v1/responses"

func TestResponses(t *testing.T) {
	e := start(t, nil).ready()
	bodies := make(chan string, 1)
	e.router.routes(newWorker(t, "w", func(w http.ResponseWriter, r *http.Request) {
		b, _ := io.ReadAll(r.Body)
		bodies <- r.URL.Path + " " + string(b)
		if strings.Contains(string(b), `"stream":true`) {
			answers(roleChunk(), textChunk("Hel"), textChunk("lo"), stopChunk, usageChunk, doneEvent)(w, r)
			return
		}
		refuses(http.StatusOK, whole)(w, r)
	}))
	t.Run("stream", func(t *testing.T) {
		resp, body := e.post(responsesPath, `{"model":"chat","input":"Hello there","instructions":"Be terse","stream":true}`)
		want := chatPath + ` {"model":"base-model","messages":[{"role":"system","content":"Be terse"},{"role":"user","content":"Hello there"}],"stream":true,"stream_options":{"include_usage":true,"continuous_usage_stats":true}}`
		if diff := cmp.Diff(want, <-bodies); diff != "" {
			t.Errorf("the worker got (-want +got):\n%s", diff)
		}
		var kinds []string
		for _, line := range strings.Split(body, "\n") {
			if kind, ok := strings.CutPrefix(line, "event: response."); ok {
				kinds = append(kinds, kind)
			}
		}
		if diff := cmp.Diff(strings.Fields("created in_progress output_item.added content_part.added output_text.delta output_text.delta output_text.done content_part.done output_item.done completed"), kinds); diff != "" {
			t.Errorf("events (-want +got):\n%s", diff)
		}
		if strings.Contains(body, "[DONE]") || !strings.Contains(body, `"usage":{"input_tokens":12,"input_tokens_details":{"cached_tokens":8},"output_tokens":2,`) || !strings.Contains(body, `"model":"chat"`) {
			t.Errorf("got %s", body)
		}
		done, words := e.router.done(resp.Header.Get("X-Request-Id"))
		if done.GetPromptTokens() != 12 || done.GetOutputTokens() != 2 || strings.Join(words, ", ") != "first token, ok" {
			t.Errorf("reported %v, %v", words, done)
		}
		if a := e.router.routed()[0].GetAttributes(); a.GetEndpoint() != "Responses" {
			t.Errorf("the policy sees endpoint %q", a.GetEndpoint())
		}
	})
	t.Run("whole", func(t *testing.T) {
		_, body := e.post(responsesPath, `{"model":"chat","input":"Hello there","metadata":{"a":"b"}}`)
		<-bodies
		var got struct {
			Object, Status, Model string
			Metadata              map[string]string
			Output                []struct {
				Content []struct{ Text string }
			}
		}
		if err := json.Unmarshal([]byte(body), &got); err != nil || got.Object != "response" || got.Status != "completed" || got.Model != "chat" || got.Metadata["a"] != "b" || got.Output[0].Content[0].Text != "Hi" {
			t.Errorf("%v: %s", err, body)
		}
	})
	t.Run("refused", func(t *testing.T) {
		resp, body := e.post(responsesPath, `{"model":"chat","input":"x","previous_response_id":"resp_1"}`)
		if kind, param, code := parseError(t, body); resp.StatusCode != http.StatusBadRequest || kind != "invalid_request_error" || param != "previous_response_id" || code != "unsupported_parameter" {
			t.Errorf("%d %s", resp.StatusCode, body)
		}
		resp, body = e.post(responsesPath+"/resp_1/cancel", `{}`)
		if _, _, code := parseError(t, body); resp.StatusCode != http.StatusNotFound || code != "unknown_url" {
			t.Errorf("%d %s", resp.StatusCode, body)
		}
	})
	t.Run("a worker that dies in the middle", func(t *testing.T) {
		e.router.routes(newWorker(t, "bad", answers(roleChunk(), textChunk("Hi"))))
		_, body := e.post(responsesPath, `{"model":"chat","input":"x","stream":true}`)
		if !strings.Contains(body, "event: response.failed\n") || !strings.Contains(body, `"error":{"code":"server_error","message":"The model server went away`) || strings.Contains(body, "response.completed") {
			t.Errorf("got %s", body)
		}
	})
}
