package vllm_test

import (
	"bytes"
	"context"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kinference/kinference/test/interop/vllm/rig"
)

// clients: the official OpenAI clients, for JavaScript and for Python, get from
// a real engine through the services what they get from OpenAI.
func clients(t *testing.T, env rig.Env, e *rig.Engine) {
	front := rig.NewFront(t, env, rig.FrontOptions{}, e)
	base := front.URL() + "/v1"
	t.Run("node", func(t *testing.T) {
		dir := filepath.FromSlash("../openai")
		if _, err := os.Stat(filepath.Join(dir, "node_modules", "openai")); err != nil {
			t.Fatalf("the OpenAI client is not installed, run scripts/deps.sh: %v", err)
		}
		checkClient(t, e, drive(t, dir, "node", "client.mjs", base, e.Model))
	})
	t.Run("python", func(t *testing.T) {
		var ids []uint32
		tokenizer := newLocal(t, env.Model(e.Model)).tokenizer
		for _, text := range []string{`<tool_call>`, `{"name": "paint", "arguments": {"colour": "red"}}`, `"blue"`, `}`, `}}`, `"`, `red`, `blue`, `</tool_call>`, `<|im_end|>`} {
			ids = tokenizer.Encode(ids, text, false)
		}
		list, err := json.Marshal(ids)
		if err != nil {
			t.Fatal(err)
		}
		got := checkClient(t, e, drive(t, "testdata", filepath.Join(env.Venv, "bin", "python"), "client.py", base, e.Model, string(list)))
		var arguments struct{ Colour string }
		for name, c := range map[string]*clientCall{"whole": got.Tool, "streamed": got.ToolStream} {
			if c == nil {
				t.Errorf("no %s tool call", name)
			} else if err := json.Unmarshal([]byte(c.Arguments), &arguments); err != nil || c.Name != "paint" || arguments.Colour != "red" && arguments.Colour != "blue" {
				t.Errorf("%s tool call: %+v", name, *c)
			}
		}
		if f := got.BadEffort; f == nil || f.Status != 400 || f.Name != "BadRequestError" || f.RequestID == "" {
			t.Errorf("a reasoning effort that the engine refuses: %+v", f)
		}
		t.Logf("openai for Python %s; tool calls %+v and, streamed, %+v", got.Version, got.Tool, got.ToolStream)
		for _, text := range got.Parallel {
			if len(got.Parallel) != 4 || text == "" {
				t.Errorf("requests at the same time: %q", got.Parallel)
			}
		}
	})
}

// drive runs a client and returns what it printed.
func drive(t *testing.T, dir, program string, args ...string) []byte {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.Dir = dir
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%s: %v\n%s", args[0], err, stderr.String())
	}
	return out
}

type clientUsage struct {
	Prompt  int `json:"prompt_tokens"`
	Output  int `json:"completion_tokens"`
	Details *struct {
		Cached *int `json:"cached_tokens"`
	} `json:"prompt_tokens_details"`
}

type clientFailure struct {
	Name, Code, Type, RequestID string
	Status                      int
}

type clientCall struct{ Name, Arguments, Finish string }

// seen is what a client prints.
type seen struct {
	Version string
	Models  []string
	Chat    struct {
		Content, Finish, Model string
		Usage                  clientUsage
	}
	Stream struct {
		Content             string
		Chunks, UsageChunks int
	}
	Counted struct {
		Content string
		Usage   *clientUsage
	}
	Completion struct {
		Text  string
		Usage clientUsage
	}
	UnknownModel, TooLong, BadEffort *clientFailure
	Tool, ToolStream                 *clientCall
	AfterAbandon                     string
	Parallel                         []string
}

// checkClient checks what both clients do.
func checkClient(t *testing.T, e *rig.Engine, out []byte) (got seen) {
	t.Helper()
	if err := json.Unmarshal(out, &got); err != nil {
		t.Fatalf("decode %s: %v", out, err)
	}
	if want := "qwen style-a style-b"; strings.Join(got.Models, " ") != want {
		t.Errorf("models: %v, want %s", got.Models, want)
	}
	if c := got.Chat; c.Model != e.Model || c.Usage.Prompt == 0 || c.Usage.Output == 0 || c.Finish != "length" && c.Finish != "stop" {
		t.Errorf("chat: %+v", c)
	}
	if s := got.Stream; s.Chunks == 0 || s.UsageChunks != 0 {
		t.Errorf("stream: %+v; usage was not asked for", s)
	}
	if c := got.Counted; c.Usage == nil || c.Usage.Prompt != got.Chat.Usage.Prompt || c.Usage.Details == nil || c.Usage.Details.Cached == nil {
		t.Errorf("stream with usage: %+v", c)
	}
	if c := got.Completion; c.Usage.Prompt != 4 || c.Usage.Output == 0 {
		t.Errorf("completion: %+v", c)
	}
	if f := got.UnknownModel; f == nil || f.Status != 404 || f.Name != "NotFoundError" || f.Code != "model_not_found" || f.RequestID == "" {
		t.Errorf("unknown model: %+v", f)
	}
	if f := got.TooLong; f == nil || f.Status != 400 || f.Name != "BadRequestError" || f.Code != "context_length_exceeded" {
		t.Errorf("too long: %+v", f)
	}
	if got.AfterAbandon != "length" && got.AfterAbandon != "stop" {
		t.Errorf("after an abandoned stream: %q", got.AfterAbandon)
	}
	t.Logf("models %v; %d stream chunks, usage only when asked for; errors %s and %s; went on after an abandoned stream", got.Models, got.Stream.Chunks, got.UnknownModel.Name, got.TooLong.Name)
	return got
}
