// Package clients drives the whole control plane with the official clients of
// both APIs and with LangChain, feature by feature, and writes what holds into
// docs/compatibility.md.
//
// The clients for Go come with the module; setup.sh installs the others. Where
// those are not there their tests are skipped and say so, unless
// KINFERENCE_INTEROP=1 makes that a failure. `go test ./test/interop/clients
// -update` writes the table anew.
package clients

import (
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"

	"github.com/kinference/kinference/cmd/stack"
	"github.com/kinference/kinference/internal/fleetsim"
	"github.com/kinference/kinference/internal/fleetsim/engine"
	"github.com/kinference/kinference/internal/fleetsim/model"
)

var update = flag.Bool("update", false, "write docs/compatibility.md")

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const modelName = "sim/qwen"

// features are what a client can do, by name.
type features map[string]func() (any, error)

// start brings up the control plane in front of one scripted engine.
func start(t *testing.T) (url string, e *scriptedEngine) {
	w, err := fleetsim.Start(context.Background(), fleetsim.Config{Name: "w", Profile: engine.L40SPlain16, TimeScale: 50, Seed: 1, Model: modelName})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(w.Kill)
	e = newEngine(t, w.URL())
	dir, err := model.Dir()
	if err != nil {
		t.Fatal(err)
	}
	conf := t.TempDir()
	set := fmt.Sprintf(`apiVersion: kinference.buoyant.io/v1alpha1
kind: InferenceWorkerSet
metadata: { name: sim, namespace: test }
spec:
  models: [ { name: %q } ]
  tokenizer: { path: %q }
  endpoints: [ { name: w, address: %q } ]
`, modelName, dir, strings.TrimPrefix(e.server.URL, "http://"))
	if err := os.WriteFile(filepath.Join(conf, "fleet.yaml"), []byte(set), 0o644); err != nil {
		t.Fatal(err)
	}
	var log bytes.Buffer
	st, err := stack.Start(t.Context(), stack.Options{ConfigDir: conf, Seed: 1, TimeScale: 50, Output: &log, DrainTimeout: 5 * time.Second})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := st.Stop(); err != nil {
			t.Errorf("stop: %v", err)
		}
		if t.Failed() {
			t.Logf("log of the stack:\n%s", log.String()[max(0, log.Len()-8<<10):])
		}
	})
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	if err := st.WaitReady(ctx); err != nil {
		t.Fatal(err)
	}
	return st.URL(), e
}

// outcome is what a client did with a feature.
type outcome struct {
	Feature string          `json:"feature"`
	Got     json.RawMessage `json:"got"`
	Error   string          `json:"error"`
}

// command runs a driver and reads its lines.
func command(t *testing.T, name string, args ...string) []outcome {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, name, args...)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	cmd.Env = append(os.Environ(), "PYTHONDONTWRITEBYTECODE=1", "LANGSMITH_TRACING=false")
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%s %v: %v\n%s", name, args, err, stderr.String())
	}
	var list []outcome
	for dec := json.NewDecoder(bytes.NewReader(out)); dec.More(); {
		var o outcome
		if err := dec.Decode(&o); err != nil {
			t.Fatalf("%v in %s", err, out)
		}
		list = append(list, o)
	}
	if stderr.Len() > 0 {
		t.Logf("%s", stderr.String())
	}
	return list
}

// inProcess runs the features of a client for Go.
func inProcess(f features) (list []outcome) {
	for name, feature := range f {
		got, err := feature()
		o := outcome{Feature: name}
		if o.Got, _ = json.Marshal(got); err != nil {
			o.Error = err.Error()
		}
		list = append(list, o)
	}
	return list
}

const (
	textChat = "Hello from data: [DONE]\né漢😀."
	paris    = `weather {"city":"Paris","days":[1,2]}`
	rome     = "weather {\"city\":\"Rome \\\"eternal\\\" \u2028\"}"
)

// expected is what each client of an API must get. class maps a status to what
// the client throws.
func expected(api string, class map[int]string) map[string]any {
	end, calls := "stop", "tool_calls"
	if api == "anthropic" {
		end, calls = "end_turn", "tool_use"
	}
	counts := object{"input": 100, "cached": 64, "output": 7}
	if api == "anthropic" {
		counts["input"] = 36
	}
	fault := func(status int, code, kind string) object {
		o := object{"class": class[status], "status": status, "id": true}
		if o["code"] = code; code == "" {
			o["code"] = nil
		}
		if api == "anthropic" {
			delete(o, "code")
			o["type"] = kind
		} else if class[status] == "Error" && code == "" {
			o["code"] = ""
		}
		return o
	}
	want := map[string]any{
		"chat": object{"text": textChat, "stop": end}, "stream": object{"text": textChat, "stop": end},
		"tools": object{"calls": []string{paris}, "stop": calls, "final": "It is sunny."}, "tools, stream": object{"calls": []string{paris}, "stop": calls},
		"parallel tools":         object{"calls": []string{paris, rome}, "stop": calls, "final": "It is sunny."},
		"parallel tools, stream": object{"calls": []string{paris, rome}, "stop": calls},
		"JSON schema":            `{"answer": 42}`, "logprobs": -0.25, "n": []string{"first", "second"}, "stop": object{"text": "one two ", "stop": "stop"},
		"vision": "data:image/png;base64", "usage": object{"whole": counts, "stream": counts},
		"errors":  object{"model": fault(404, "model_not_found", "not_found_error"), "refused": fault(400, "", "invalid_request_error"), "too long": fault(400, "context_length_exceeded", "invalid_request_error")},
		"retries": textChat, "abort": "and on ", "thinking": object{"thinking": "Two and two.", "text": "The answer is 4."}, "models": true,
		"embeddings":        [][]float64{{1, 0.5}, {2, 0.5}},
		"responses":         object{"text": textChat, "status": "completed", "input": 100, "cached": 64, "output": 7},
		"responses, stream": object{"text": "The answer is 4.", "status": "completed", "thinking": "Two and two."},
		"responses, tools":  object{"calls": []string{paris, rome}, "final": "It is sunny."},
	}
	if api == "anthropic" {
		want["stop"] = object{"text": "one two ", "stop": "stop_sequence", "sequence": "three"}
		want["thinking"] = object{"thinking": "Two and two.", "text": "The answer is 4.", "again": "As I said: 4."}
		want["count_tokens"] = true
		delete(want, "n")
		delete(want, "logprobs")
		for _, name := range []string{"responses", "responses, stream", "responses, tools", "embeddings"} {
			delete(want, name)
		}
	}
	return want
}

// TestClients is the compatibility table: a test for each of its cells.
func TestClients(t *testing.T) {
	url, engine := start(t)
	python, node := installed(t)
	script := func(interpreter string, args ...string) func(*testing.T) []outcome {
		return func(t *testing.T) []outcome {
			if interpreter == "" {
				t.Skip("SKIPPED: this client is not installed; run test/interop/clients/setup.sh")
			}
			return command(t, interpreter, append(args[:1:1], append([]string{url, modelName}, args[1:]...)...)...)
		}
	}
	python4 := map[int]string{400: "BadRequestError", 404: "NotFoundError"}
	golang := map[int]string{400: "Error", 404: "Error"}
	table := newTable()
	for _, c := range []struct {
		name, api string
		class     map[int]string
		run       func(*testing.T) []outcome
	}{
		{"openai Python", "openai", python4, script(python, "openai_client.py")},
		{"openai Node.js", "openai", python4, script(node, "openai.mjs")},
		{"openai Go", "openai", golang, func(t *testing.T) []outcome { return inProcess(openaiGo(t, url, modelName)) }},
		{"anthropic Python", "anthropic", python4, script(python, "anthropic_client.py")},
		{"anthropic Node.js", "anthropic", python4, script(node, "anthropic.mjs")},
		{"anthropic Go", "anthropic", golang, func(t *testing.T) []outcome { return inProcess(anthropicGo(t, url, modelName)) }},
		{"LangChain, openai", "openai", python4, script(python, "langchain_client.py", "openai")},
		{"LangChain, anthropic", "anthropic", python4, script(python, "langchain_client.py", "anthropic")},
	} {
		t.Run(c.name, func(t *testing.T) {
			before := engine.abandoned()
			want := expected(c.api, c.class)
			if strings.HasPrefix(c.name, "LangChain") {
				want = langchain(c.api, want)
			}
			for _, o := range c.run(t) {
				t.Run(o.Feature, func(t *testing.T) {
					w, ok := want[o.Feature]
					if delete(want, o.Feature); !ok {
						t.Fatal("a feature that is not expected")
					}
					var got, expect any
					b, err := json.Marshal(w)
					if err != nil {
						t.Fatal(err)
					}
					_ = json.Unmarshal(b, &expect)
					_ = json.Unmarshal(o.Got, &got)
					if diff := cmp.Diff(expect, got); o.Error != "" || diff != "" {
						t.Errorf("%s (-want +got):\n%s", o.Error, diff)
					}
					table.set(c.name, o.Feature, !t.Failed())
				})
			}
			for name := range want {
				t.Errorf("%s was not tried", name)
			}
			if _, aborts := expected(c.api, c.class)["abort"]; aborts {
				eventually(t, "the engine is left", func() bool { return engine.abandoned() > before })
			}
		})
	}
	if *update && !t.Failed() && python != "" && node != "" {
		table.write(t, "../../../docs/compatibility.md")
	} else if python != "" && node != "" {
		table.compare(t, "../../../docs/compatibility.md")
	}
}

// langchain is what of an API's features it shows, in its own words.
func langchain(api string, want map[string]any) map[string]any {
	want["chat"], want["stream"] = textChat, textChat
	for _, name := range []string{"tools", "tools, stream", "parallel tools", "parallel tools, stream"} {
		delete(want[name].(object), "stop")
	}
	counts := object{"input": 100, "cached": 64, "output": 7} // of both: it adds up what Anthropic tells apart
	want["usage"] = object{"whole": counts, "stream": counts}
	delete(want, "models")
	if api == "openai" {
		want["responses, stream"] = object{"text": "The answer is 4.", "status": "completed"}
		delete(want, "thinking")
	}
	return want
}

func eventually(t *testing.T, what string, cond func() bool) {
	t.Helper()
	deadline := time.Now().Add(time.Minute)
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for !cond() {
		if time.Now().After(deadline) {
			t.Fatalf("%s: not within a minute", what)
		}
		<-tick.C
	}
}

// installed finds the interpreters that the clients are installed for.
func installed(t *testing.T) (python, node string) {
	t.Helper()
	must := os.Getenv("KINFERENCE_INTEROP") == "1"
	if _, err := os.Stat("node_modules/@anthropic-ai/sdk"); err == nil {
		node, _ = exec.LookPath("node")
	}
	cache := os.Getenv("KINFERENCE_CACHE")
	if home, err := os.UserHomeDir(); cache == "" && err == nil {
		cache = filepath.Join(home, ".cache", "kinference")
	}
	found, _ := filepath.Glob(filepath.Join(cache, "clients-"+digest(t, "requirements.txt")+"-*", ".complete"))
	if len(found) > 0 {
		python = filepath.Join(filepath.Dir(slices.Max(found)), "bin", "python")
	}
	if must && (python == "" || node == "") {
		t.Fatal("the clients are not installed: run test/interop/clients/setup.sh")
	}
	return python, node
}
