package vllm_test

import (
	"bytes"
	"encoding/json"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kinference/kinference/internal/openai"
	"github.com/kinference/kinference/test/interop/vllm/rig"
)

// passedIDs: an engine that gets our token ids answers as if it had made them
// itself, and does not make them.
func passedIDs(t *testing.T, env rig.Env, e *rig.Engine) {
	takesIDs(t, e)

	// Chats that the engine takes.
	g, l := newGen(41), newLocal(t, env.Model(e.Model))
	var bodies [][]byte
	unsure := 0
	for len(bodies) < 120 {
		body := []byte(g.encode(g.chat(e.Model)))
		if ids, err := render(e, openai.RouteChat, body); err != nil {
			t.Fatal(err)
		} else if ids == nil || len(ids) > 4000 || constrained(body) {
			continue
		}
		if _, err := l.ids(openai.RouteChat, body); err != nil {
			unsure++
		}
		members := `"max_tokens": 12, "temperature": 0`
		if len(bodies)%3 == 0 {
			members += `, "stream": true, "stream_options": {"include_usage": true}`
		}
		bodies = append(bodies, withMembers(bytes.Replace(body, []byte(`, "temperature": 0.0`), nil, 1), members))
	}

	tap := newTap(t, e)
	answers := func(o rig.FrontOptions) (all []replied) {
		front := rig.NewFront(t, env, o, e)
		if o.PassTokenIDs { // once the services have seen that their ids are the engine's
			probe := request(e.Model, "Shall we?", false, 1)
			front.Eventually("ids are passed on", func() bool {
				before := tap.with.Load()
				serve(front, "/v1/chat/completions", probe)
				return tap.with.Load() > before
			})
		}
		front.Eventually("the engine is idle", func() bool { return !busy(t, e) }) // and its cache is empty
		tap.with.Store(0)
		tap.without.Store(0)
		for _, body := range bodies {
			all = append(all, essence(t, serve(front, "/v1/chat/completions", body)))
		}
		return all
	}
	plain := answers(rig.FrontOptions{Via: tap.address})
	if n := tap.with.Load(); n != 0 {
		t.Errorf("%d requests had ids without being asked to", n)
	}
	passed := answers(rig.FrontOptions{Via: tap.address, PassTokenIDs: true})
	with, without := tap.with.Load(), tap.without.Load()
	same, tokens := 0, 0
	for i := range bodies {
		tokens += passed[i].usage.Prompt
		if diff := cmp.Diff(plain[i], passed[i], cmp.AllowUnexported(replied{})); diff != "" {
			t.Errorf("chat %d: another answer with ids (-without +with):\n%.2000s", i, diff)
			continue
		}
		same++
	}
	t.Logf("%d chats (%d prompt tokens): %d answers and usages the same; ids went along with %d, not with %d (%d that we leave to the engine)", len(bodies), tokens, same, with, without, unsure)
	if int(with) != len(bodies)-unsure {
		t.Errorf("ids went along with %d of %d requests", with, len(bodies)-unsure)
	}
}

// takesIDs sends ids that are not those of the messages.
func takesIDs(t *testing.T, e *rig.Engine) {
	t.Helper()
	ask := func(content string, ids []uint32) (ran []uint32, text string, prompt int) {
		r := map[string]any{
			"model": e.Model, "max_tokens": 8, "temperature": 0, "return_token_ids": true, "messages": []any{map[string]any{"role": "user", "content": content}},
		}
		if ids != nil {
			r["kv_transfer_params"] = map[string]any{"prompt_token_ids": ids}
		}
		body, _ := json.Marshal(r)
		status, answer, err := e.Post("/v1/chat/completions", body)
		if err != nil || status != http.StatusOK {
			t.Fatalf("status %d %v: %.300s", status, err, answer)
		}
		a := rig.Answer{Body: answer}
		return ranIDs(answer), a.Text(), a.Usage().Prompt
	}
	one, oneText, _ := ask("What is the tallest mountain?", nil)
	ran, text, prompt := ask("Nothing of the kind", one)
	if diff := cmp.Diff(one, ran); diff != "" || text != oneText || prompt != len(one) {
		t.Errorf("the engine did not take the ids: %s, text %q not %q, %d prompt tokens", diff, text, oneText, prompt)
	}
	t.Logf("an engine that is given the %d ids of another prompt runs those and gives that prompt's answer", len(one))
}

// replied is what must not depend on who makes the ids.
type replied struct {
	status       int
	text, finish string
	calls        []call
	usage        rig.Usage
}

type call struct{ Name, Arguments string }

func essence(t *testing.T, a rig.Answer) (out replied) {
	t.Helper()
	out = replied{status: a.Status, text: a.Text(), usage: a.Usage()}
	type message struct {
		Calls []struct {
			Index    int
			Function call
		} `json:"tool_calls"`
	}
	for _, event := range a.Events() {
		var body struct {
			Choices []struct {
				Finish         string `json:"finish_reason"`
				Message, Delta message
			}
		}
		if json.Unmarshal(event, &body) != nil || len(body.Choices) == 0 {
			continue
		}
		c := body.Choices[0]
		out.finish += c.Finish
		for i, x := range append(c.Message.Calls, c.Delta.Calls...) {
			for len(out.calls) <= max(i, x.Index) {
				out.calls = append(out.calls, call{})
			}
			at := &out.calls[max(i, x.Index)]
			at.Name, at.Arguments = at.Name+x.Function.Name, at.Arguments+x.Function.Arguments
		}
	}
	if a.Status != http.StatusOK {
		out.text = string(a.Body)
	}
	return out
}

// tap is a proxy in front of an engine that sees whether chats come with ids.
type tap struct {
	server        *httptest.Server
	with, without atomic.Int64
}

func newTap(t *testing.T, e *rig.Engine) *tap {
	target, err := url.Parse(e.URL())
	if err != nil {
		t.Fatal(err)
	}
	p := &tap{}
	proxy := httputil.NewSingleHostReverseProxy(target)
	proxy.FlushInterval = -1
	proxy.ErrorLog = log.New(io.Discard, "", 0) // those who left
	p.server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/v1/chat/completions" {
			body, err := io.ReadAll(r.Body)
			if err != nil {
				return
			}
			var b struct {
				KV struct {
					IDs []uint32 `json:"prompt_token_ids"`
				} `json:"kv_transfer_params"`
			}
			if json.Unmarshal(body, &b) == nil && len(b.KV.IDs) > 0 {
				p.with.Add(1)
			} else {
				p.without.Add(1)
			}
			r.Body = io.NopCloser(bytes.NewReader(body))
		}
		proxy.ServeHTTP(w, r)
	}))
	t.Cleanup(p.server.Close)
	return p
}

func (p *tap) address(*rig.Engine) string { return strings.TrimPrefix(p.server.URL, "http://") }
