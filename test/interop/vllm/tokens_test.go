package vllm_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"hash/fnv"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kinference/kinference/internal/chat"
	"github.com/kinference/kinference/internal/openai"
	"github.com/kinference/kinference/internal/tokens"
	"github.com/kinference/kinference/test/interop/vllm/rig"
)

// local renders and tokenises as the ingress does for a model folder.
type local struct {
	tokenizer *tokens.Tokenizer
	cache     *tokens.PrefixCache
	template  *chat.Template // nil: the engine must be asked
}

func newLocal(t *testing.T, dir string) *local {
	t.Helper()
	tok, err := tokens.Load(dir)
	if err != nil {
		t.Fatal(err)
	}
	l := &local{tokenizer: tok, cache: tokens.NewPrefixCache(tok, 64<<20)}
	if l.template, err = chat.Load(dir); err != nil && !errors.Is(err, chat.ErrNoTemplate) {
		t.Fatal(err)
	}
	return l
}

// ids are the token ids that the ingress makes of a body. With an error it asks
// a worker.
func (l *local) ids(route openai.Route, body []byte) ([]uint32, error) {
	var r openai.Request
	if e := r.Parse(route, body, 128); e != nil {
		return nil, fmt.Errorf("refused: %s", e.Message)
	}
	text := r.Prompt
	if route == openai.RouteChat {
		if l.template == nil {
			return nil, chat.ErrNoTemplate
		}
		var err error
		if text, err = l.template.Render(chat.Request{
			Messages: r.Messages, Tools: r.Tools, Documents: r.Documents, Kwargs: r.TemplateKwargs, ReasoningEffort: r.ReasoningEffort,
			AddGenerationPrompt: r.AddGenerationPrompt, ContinueFinalMessage: r.ContinueFinalMessage,
		}); err != nil {
			return nil, err
		}
	}
	ids, _ := l.cache.Encode(text, r.AddSpecial)
	return ids, nil
}

// render asks the engine for the token ids of a body; nil if it refuses it.
func render(e *rig.Engine, route openai.Route, body []byte) ([]uint32, error) {
	status, answer, err := e.Post(route.Path()+"/render", body)
	if err != nil || status >= 400 && status < 500 {
		return nil, err
	}
	type rendered struct {
		IDs []uint32 `json:"token_ids"`
	}
	list := make([]rendered, 1)
	if route == openai.RouteCompletions {
		err = json.Unmarshal(answer, &list)
	} else {
		err = json.Unmarshal(answer, &list[0])
	}
	if err == nil && (status != http.StatusOK || list[0].IDs == nil) {
		err = fmt.Errorf("status %d: %.300s", status, answer)
	}
	return list[0].IDs, err
}

// compared counts how the ids of requests compare.
type compared struct {
	mu                                    sync.Mutex
	exact, asked, differ, refused, tokens int
	reasons                               map[string]int // why we ask
}

func (c *compared) String() string {
	return fmt.Sprintf("%d with the engine's very ids (%d tokens), %d left to the engine %v, %d differ; the engine refused %d more",
		c.exact, c.tokens, c.asked, c.reasons, c.differ, c.refused)
}

// compare generates bodies until the engine has taken n of them. next returns
// them as we get them and as the engine does.
func compare(t *testing.T, e *rig.Engine, l *local, route openai.Route, n int, next func() (ours, theirs []byte), more func(body []byte, ids []uint32)) *compared {
	t.Helper()
	c := &compared{reasons: map[string]int{}}
	var wg sync.WaitGroup
	var source sync.Mutex
	for range 4 {
		wg.Go(func() {
			for {
				source.Lock()
				c.mu.Lock()
				done := c.exact+c.asked+c.differ >= n || c.refused > n || c.differ > 20
				c.mu.Unlock()
				ours, theirs := next()
				source.Unlock()
				if done {
					return
				}
				want, err := render(e, route, theirs)
				if err != nil {
					t.Errorf("render: %v", err)
					return
				}
				got, err := l.ids(route, ours)
				c.mu.Lock()
				switch {
				case want == nil:
					c.refused++
				case err != nil:
					c.asked++
					c.reasons[fmt.Sprintf("%.80s", err)]++
				case !slices.Equal(got, want):
					c.differ++
					at := 0
					for at < min(len(got), len(want)) && got[at] == want[at] {
						at++
					}
					show := func(ids []uint32) string { return l.tokenizer.Decode(ids[max(0, at-8):min(len(ids), at+12)]) }
					t.Errorf("token %d of %d: we make %q, the engine %q", at, len(want), show(got), show(want))
				default:
					c.exact++
					c.tokens += len(got)
				}
				c.mu.Unlock()
				if want != nil && more != nil {
					more(ours, want)
				}
			}
		})
	}
	wg.Wait()
	return c
}

// chatFlags make an engine take all that chats may hold.
func chatFlags(model string) []string {
	parser := "hermes"
	switch model {
	case "llama":
		parser = "pythonic"
	case "gptoss":
		parser = "openai"
	}
	return []string{"--enable-scale-out", "--trust-request-chat-template", "--enable-auto-tool-choice", "--tool-call-parser", parser}
}

// TestTokenIDs: the ids that we make of a request are those of the engine, for
// generated chats and prompts, with each model and with further templates.
func TestTokenIDs(t *testing.T) {
	env := rig.Require(t)
	for _, group := range [][]string{{"qwen", "llama"}, {"hybrid", "hybrid-mamba", "gptoss"}} {
		t.Run(group[0], func(t *testing.T) {
			var options []rig.Options
			for _, model := range group {
				if _, err := os.Stat(env.Model(model)); err != nil {
					t.Errorf("model %s: %v", model, err)
					continue
				}
				options = append(options, rig.Options{Model: model, MaxModelLen: 8192, Args: chatFlags(model)})
			}
			engines := rig.Start(t, env, options...)
			for _, e := range engines {
				t.Run(e.Model, func(t *testing.T) { tokenIDs(t, env, e) })
			}
			if engines[0].Model == "qwen" {
				t.Run("templates", func(t *testing.T) { templates(t, env, engines[0]) })
				t.Run("cases", func(t *testing.T) { templateCases(t, engines[0]) })
			}
		})
	}
}

// sent is what the whole stack made of a request.
type sent struct {
	body []byte
	ids  []uint32 // of the engine
}

func tokenIDs(t *testing.T, env rig.Env, e *rig.Engine) {
	l := newLocal(t, env.Model(e.Model))
	g := newGen(seed(e.Model))
	n, chats := 0, []sent(nil)
	var mu sync.Mutex
	sample := func(every int, into *[]sent) func([]byte, []uint32) {
		return func(body []byte, ids []uint32) {
			mu.Lock()
			defer mu.Unlock()
			if n++; n%every == 0 && !constrained(body) {
				*into = append(*into, sent{body, ids})
			}
		}
	}
	c := compare(t, e, l, openai.RouteChat, 520, func() (_, _ []byte) { b := []byte(g.encode(g.chat(e.Model))); return b, b }, sample(3, &chats))
	t.Logf("%s: chats: %v", e.Model, c)
	if l.template != nil && (c.exact < 500 || c.differ > 0) || l.template == nil && c.asked < 500 {
		t.Errorf("too few chats are exact: %v", c)
	}
	var prompts []sent
	c = compare(t, e, l, openai.RouteCompletions, 200, func() (_, _ []byte) { b := []byte(g.encode(g.completion(e.Model))); return b, b }, sample(4, &prompts))
	t.Logf("%s: completions: %v", e.Model, c)
	if c.exact < 200 || c.differ > 0 {
		t.Errorf("too few completions are exact: %v", c)
	}

	// What the services make of them, by the number that the router got, and the
	// ids by which the engine really ran.
	front := rig.NewFront(t, env, rig.FrontOptions{}, e)
	for name, list := range map[string][]sent{"/v1/chat/completions": chats, "/v1/completions": prompts} {
		var served, same int
		each(4, list, func(s sent) {
			a := serve(front, name, withMembers(s.body, `"max_tokens": 1, "return_token_ids": true`))
			if a.Status == http.StatusBadRequest && strings.Contains(string(a.Body), "context length") {
				return // it fits without any output only
			}
			d := front.Explain(a.ID)
			counted, usage := int(rig.Chosen(d).GetPromptTokens()), a.Usage().Prompt
			ran := ranIDs(a.Body)
			several := strings.Contains(string(s.body), `"prompt": [`) // their tokens add up
			mu.Lock()
			defer mu.Unlock()
			served++
			if a.Status == http.StatusOK && counted == len(s.ids) && (usage == counted || several) && slices.Equal(ran, s.ids) {
				same++
			} else {
				t.Errorf("%s: status %d: the router counted %d tokens, the engine rendered %d and used %d (its ids equal: %t): %.200s", name, a.Status, counted, len(s.ids), usage,
					slices.Equal(ran, s.ids), a.Body)
			}
		})
		t.Logf("%s: %s through the services: %d of %d with the engine's count and ids", e.Model, name, same, served)
	}
}

// seed is another one for each name, so that models which share a tokenizer get
// other requests.
func seed(name string) uint64 {
	h := fnv.New64a()
	h.Write([]byte(name))
	return h.Sum64()
}

// ranIDs are the ids by which the engine ran a request that asked for them.
func ranIDs(body []byte) []uint32 {
	var a struct {
		IDs     []uint32 `json:"prompt_token_ids"`
		Choices []struct {
			IDs []uint32 `json:"prompt_token_ids"`
		}
	}
	if json.Unmarshal(body, &a) == nil && a.IDs == nil && len(a.Choices) > 0 {
		a.IDs = a.Choices[0].IDs
	}
	return a.IDs
}

// withMembers puts members before those of an object.
func withMembers(object []byte, members string) []byte {
	return slices.Concat([]byte("{"+members+", "), object[1:])
}

// each calls f for each element, for up to n at a time.
func each[T any](n int, list []T, f func(T)) {
	var next atomic.Int64
	var wg sync.WaitGroup
	for range n {
		wg.Go(func() {
			for i := next.Add(1) - 1; int(i) < len(list); i = next.Add(1) - 1 {
				f(list[i])
			}
		})
	}
	wg.Wait()
}

// constrained reports whether an engine would hold its answer to the schemas of
// the tools. It refuses that for some generated schemas.
func constrained(body []byte) bool {
	for _, sign := range []string{`"tool_choice": "required"`, `"tool_choice": {`, `"strict": true`} {
		if bytes.Contains(body, []byte(sign)) {
			return true
		}
	}
	return false
}

// Templates that print all that a template gets to see.
const (
	printAll = `{{ messages | tojson }}
{{ tools | tojson }}{{ documents | tojson }}
{% if enable_thinking is defined %}T{{ enable_thinking }}{% endif %}{% if reasoning_effort is defined %}R{{ reasoning_effort }}{% endif %}
{% if custom is defined %}C{{ custom }}{% endif %}{% if add_generation_prompt %}G{% endif %}{# content #}`
	printParts = printAll + `{% if false %}{% for m in messages %}{% for c in m.content %}{% endfor %}{% endfor %}{% endif %}{{ '' if 'developer' }}`
	byMacro    = `{% macro put(body, role) -%}
    <{{ role }}>
    {%- if body is string %}{{ body.strip() }}{% else %}
        {%- for item in body %}{{ item.text | trim }}|{% endfor %}
    {%- endif %}</{{ role }}>
{% endmacro -%}
{% for m in messages %}{{ put(m.content, m.role) }}{% if m.tool_calls %}{{ m.tool_calls | tojson(indent=2) }}{% endif %}{% endfor %}`
)

// templates compares further templates than the models' own, which requests
// bring along.
func templates(t *testing.T, env rig.Env, e *rig.Engine) {
	sources := map[string]string{"all": printAll, "parts": printParts, "macro": byMacro}
	for name, path := range map[string]string{
		"testdata": "../../../internal/chat/testdata/parts.jinja", "fleetsim": "../../../internal/fleetsim/model/chat_template.jinja",
	} {
		source, err := os.ReadFile(filepath.FromSlash(path))
		if err != nil {
			t.Fatal(err)
		}
		sources[name] = string(source)
	}
	for name, source := range sources {
		l := newLocal(t, env.Model(e.Model))
		var err error
		if l.template, err = chat.Parse(source, map[string]string{"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}); err != nil {
			t.Fatal(err)
		}
		quoted, err := json.Marshal(source)
		if err != nil {
			t.Fatal(err)
		}
		g := newGen(11)
		c := compare(t, e, l, openai.RouteChat, 150, func() (ours, theirs []byte) {
			ours = []byte(g.encode(g.chat(e.Model)))
			return ours, withMembers(ours, `"chat_template": `+string(quoted))
		}, nil)
		t.Logf("template %s: %v", name, c)
		if c.exact < 90 || c.differ > 0 {
			t.Errorf("template %s: too few chats are exact: %v", name, c)
		}
	}
}

// templateCases asks the engine again for what internal/chat is tested against.
func templateCases(t *testing.T, e *rig.Engine) {
	data, err := os.ReadFile(filepath.FromSlash("../../../internal/chat/testdata/engine.json"))
	if err != nil {
		t.Fatal(err)
	}
	var cases []struct {
		Name, Template string
		Messages       json.RawMessage
		Want           *string
	}
	if err := json.Unmarshal(data, &cases); err != nil {
		t.Fatal(err)
	}
	for _, c := range cases {
		body, _ := json.Marshal(map[string]any{"model": e.Model, "messages": c.Messages, "chat_template": c.Template})
		ids, err := render(e, openai.RouteChat, body)
		if err != nil {
			t.Errorf("%s: %v", c.Name, err)
			continue
		}
		var got *string
		if ids != nil {
			body, _ = json.Marshal(map[string]any{"model": e.Model, "tokens": ids})
			var text struct{ Prompt string }
			if status, answer, err := e.Post("/detokenize", body); err != nil || status != http.StatusOK || json.Unmarshal(answer, &text) != nil {
				t.Errorf("%s: status %d %v", c.Name, status, err)
			}
			got = &text.Prompt
		}
		if diff := cmp.Diff(c.Want, got); diff != "" {
			t.Errorf("%s: the engine renders another prompt than in engine.json:\n%s", c.Name, diff)
		}
	}
	t.Logf("%d cases of internal/chat as before", len(cases))
}
