package vllm_test

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	adminv1 "github.com/kinference/kinference/proto/gen/kinference/admin/v1"
	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
	"github.com/kinference/kinference/test/interop/vllm/rig"
)

// The self-check against a real engine. With the engine's own folder its token
// ids and its cached tokens agree with what is predicted; a folder whose template
// or tokenizer is another one is named, and costs neither an answer nor a hit.
func TestParitySelfCheck(t *testing.T) {
	env := rig.Require(t)
	// One with the render routes, which vLLM 0.32 serves only if told to, and one
	// that can be asked at /tokenize only.
	engines := rig.Start(t, env, rig.Options{Args: []string{"--enable-scale-out"}}, rig.Options{Model: "llama"})
	f := rig.NewFront(t, env, rig.FrontOptions{PassTokenIDs: true}, engines...)
	engines = engines[:1] // llama only proves its own folder
	statusOf := func(model string) *adminv1.ProfileStatus {
		t.Helper()
		s, err := f.API.Status(t.Context(), &adminv1.StatusRequest{})
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range s.GetProfiles() {
			if p.GetProfile() == "test/"+model+"/"+model {
				return p
			}
		}
		t.Fatalf("no status of %s: %v", model, s)
		return nil
	}
	status := func() *adminv1.ProfileStatus { return statusOf("qwen") }
	ask := func(text string) (rig.Answer, *adminv1.Candidate) {
		t.Helper()
		body, err := json.Marshal(map[string]any{"model": "qwen", "max_tokens": 8, "temperature": 0, "messages": []any{
			map[string]any{"role": "system", "content": "Be brief."}, map[string]any{"role": "user", "content": text}}})
		if err != nil {
			t.Fatal(err)
		}
		a := f.Post("/v1/chat/completions", body)
		if a.Status != 200 {
			t.Fatalf("answer: %d %.500s", a.Status, a.Body)
		}
		return a, rig.Chosen(f.Explain(a.ID))
	}
	long := func(i int) string {
		return fmt.Sprint(i, strings.Repeat(" Tell me about caches, queues and schedulers.", 30))
	}

	proven := func(model string) bool {
		p := statusOf(model)
		return p.GetTokens() == routerv1.ParityState_PARITY_STATE_AGREES && p.GetSource() == adminv1.TokenSource_TOKEN_SOURCE_LOCAL && p.GetWorkersAgree() == 1
	}
	for _, model := range []string{"qwen", "llama"} {
		f.Eventually("the tokenizer of "+model+" is proven", func() bool { return proven(model) })
	}
	answers := map[int]string{}
	for range 2 {
		for i := range 20 {
			a, _ := ask(long(i))
			answers[i] = a.Text()
		}
	}
	p := status()
	if n := p.GetCachedCounts(); p.GetCached() != routerv1.ParityState_PARITY_STATE_AGREES || n.GetTooFew()+n.GetTooMany() > 1 || n.GetNotReported() > 0 {
		t.Errorf("cached tokens: %v", p)
	}
	t.Logf("own folder: %v", p)

	for _, tt := range []struct {
		cause routerv1.ParityCause
		dir   string
	}{
		{routerv1.ParityCause_PARITY_CAUSE_TEMPLATE, folderWith(t, env, "chat_template.jinja", []byte("{{ ' ' }}"+templateOf(t, env.Model("qwen"))))},
		{routerv1.ParityCause_PARITY_CAUSE_TOKENIZER, folderWith(t, env, "tokenizer.json", read(t, filepath.Join(env.Model("llama"), "tokenizer.json")))},
	} {
		set := rig.WorkerSet(env, rig.FrontOptions{PassTokenIDs: true, Tokenizer: tt.dir}, engines...)
		replaceFile(t, filepath.Join(f.Dir, "qwen.yaml"), set)
		f.Eventually(tt.cause.String()+" is named", func() bool {
			p := status()
			return p.GetTokens() == routerv1.ParityState_PARITY_STATE_DIFFERS && p.GetTokensCause() == tt.cause && p.GetSource() == adminv1.TokenSource_TOKEN_SOURCE_DISTRUSTED
		})
		exact := 0
		for i := range 20 {
			a, c := ask(long(i))
			if a.Text() != answers[i] {
				t.Errorf("%v: answer %d is %q, was %q", tt.cause, i, a.Text(), answers[i])
			}
			u := a.Usage()
			if int(c.GetPromptTokens()) != u.Prompt || u.Details.Cached == 0 || int(c.GetMatchedTokens()) != u.Details.Cached {
				t.Errorf("%v: %d tokens, %d of them cached; predicted %d and %d", tt.cause, u.Prompt, u.Details.Cached, c.GetPromptTokens(), c.GetMatchedTokens())
				continue
			}
			exact++
		}
		t.Logf("%v: %d of 20 hits predicted to the token", tt.cause, exact)
	}
}

// folderWith copies the folder of qwen with another file in it.
func folderWith(t *testing.T, env rig.Env, name string, content []byte) string {
	t.Helper()
	dir := t.TempDir()
	for _, file := range []string{"config.json", "tokenizer.json", "tokenizer_config.json"} {
		if err := os.WriteFile(filepath.Join(dir, file), read(t, filepath.Join(env.Model("qwen"), file)), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(dir, name), content, 0o600); err != nil {
		t.Fatal(err)
	}
	return dir
}

func templateOf(t *testing.T, dir string) string {
	t.Helper()
	var config struct {
		ChatTemplate string `json:"chat_template"`
	}
	if err := json.Unmarshal(read(t, filepath.Join(dir, "tokenizer_config.json")), &config); err != nil || config.ChatTemplate == "" {
		t.Fatalf("no chat template: %v", err)
	}
	return config.ChatTemplate
}

func read(t *testing.T, path string) []byte {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

func replaceFile(t *testing.T, path, content string) {
	t.Helper()
	if err := os.WriteFile(path+".new", []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(path+".new", path); err != nil {
		t.Fatal(err)
	}
}
