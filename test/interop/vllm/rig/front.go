package rig

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kinference/kinference/cmd/stack"
	adminv1 "github.com/kinference/kinference/proto/gen/kinference/admin/v1"
	"github.com/kinference/kinference/proto/gen/kinference/admin/v1/adminv1connect"
)

// FrontOptions of a control plane. The zero value routes by predicted TTFT with
// the models' own tokenizers.
type FrontOptions struct {
	// Policy of the router; empty: its default.
	Policy string
	// PassTokenIDs hands our token ids to the engines.
	PassTokenIDs bool
	// NoTokenizer leaves the tokenizer out: workers are asked.
	NoTokenizer bool
	// Tokenizer is another folder than the model's own, for tests of divergence.
	Tokenizer string
	// Via is host:port to reach an engine at, for proxies; nil: its own.
	Via func(*Engine) string
}

// Front is the control plane in front of engines of one model, or of several,
// each a worker set of its own.
type Front struct {
	*stack.Stack
	API    adminv1connect.AdminServiceClient
	Dir    string // of resources
	tb     testing.TB
	client *http.Client
	log    *Log
}

// NewFront starts the services and waits until every engine is a candidate of
// its model and its block size is known.
func NewFront(tb testing.TB, env Env, o FrontOptions, engines ...*Engine) *Front {
	tb.Helper()
	f := &Front{tb: tb, Dir: tb.TempDir(), log: &Log{}, client: &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 64}}}
	byModel := map[string][]*Engine{}
	for _, e := range engines {
		byModel[e.Model] = append(byModel[e.Model], e)
	}
	for model, list := range byModel {
		if err := os.WriteFile(filepath.Join(f.Dir, model+".yaml"), []byte(WorkerSet(env, o, list...)), 0o644); err != nil {
			tb.Fatal(err)
		}
	}
	st, err := stack.Start(context.Background(), stack.Options{ConfigDir: f.Dir, Policy: o.Policy, Seed: 1, Output: f.log, DrainTimeout: 5 * time.Second})
	if err != nil {
		tb.Fatalf("start the services: %v", err)
	}
	f.Stack = st
	ctx, cancel := context.WithCancel(context.Background())
	f.API = st.Admin(ctx)
	tb.Cleanup(func() {
		f.client.CloseIdleConnections()
		cancel()
		if err := st.Stop(); err != nil {
			tb.Errorf("stop the services: %v", err)
		}
		if tb.Failed() {
			tb.Logf("the services wrote:\n%s", f.log.Tail(16<<10))
		}
	})
	ready, stop := context.WithTimeout(tb.Context(), time.Minute)
	defer stop()
	if err := st.WaitReady(ready); err != nil {
		tb.Fatalf("the services are not ready: %v", err)
	}
	for model, list := range byModel {
		f.WaitWorkers(model, len(list))
	}
	return f
}

// WaitWorkers waits until n workers of a model are ready and the block size of
// its engines is known.
func (f *Front) WaitWorkers(model string, n int) {
	f.tb.Helper()
	body, _ := json.Marshal(map[string]any{"model": model, "max_tokens": 1, "messages": []any{map[string]any{"role": "user", "content": "Are you there?"}}})
	f.Eventually(fmt.Sprintf("%d workers of %s are ready", n, model), func() bool {
		a := f.Post("/v1/chat/completions", body)
		if a.Status != http.StatusOK {
			return false
		}
		ready := 0
		for _, c := range f.Explain(a.ID).GetCandidates() {
			if c.GetDropped() == "" {
				ready++
			}
		}
		return ready == n
	})
}

// Eventually polls cond until it holds, at most a minute.
func (f *Front) Eventually(what string, cond func() bool) {
	f.tb.Helper()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for deadline := time.Now().Add(time.Minute); !cond(); <-tick.C {
		if time.Now().After(deadline) {
			f.tb.Fatalf("%s: not within a minute", what)
		}
	}
}

// Explain returns the record of a decision.
func (f *Front) Explain(id string) *adminv1.Decision {
	f.tb.Helper()
	resp, err := f.API.Explain(f.tb.Context(), &adminv1.ExplainRequest{RequestId: id})
	if err != nil {
		f.tb.Fatalf("explain %s: %v", id, err)
	}
	return resp.GetDecision()
}

// Decision is Explain, but nil where there is no record: the request never came
// to a decision.
func (f *Front) Decision(id string) *adminv1.Decision {
	resp, err := f.API.Explain(context.Background(), &adminv1.ExplainRequest{RequestId: id})
	if err != nil {
		return nil
	}
	return resp.GetDecision()
}

// Chosen is the candidate that a decision chose first.
func Chosen(d *adminv1.Decision) *adminv1.Candidate {
	for _, c := range d.GetCandidates() {
		if c.GetWorker() == d.GetChosen() {
			return c
		}
	}
	return nil
}

// Answer is what came back for a request.
type Answer struct {
	Status int
	ID     string // x-request-id
	Header http.Header
	Body   []byte
	Err    error
}

// Usage is what the engine counted.
type Usage struct {
	Prompt  int `json:"prompt_tokens"`
	Output  int `json:"completion_tokens"`
	Details struct {
		Cached int `json:"cached_tokens"`
	} `json:"prompt_tokens_details"`
}

// Usage of an answer that is no stream, or of a stream that was asked for it.
func (a Answer) Usage() (u Usage) {
	for _, event := range a.Events() {
		var body struct{ Usage *Usage }
		if json.Unmarshal(event, &body) == nil && body.Usage != nil {
			u = *body.Usage
		}
	}
	return u
}

// Events are the data of a stream's events, or the one body of a whole answer.
func (a Answer) Events() [][]byte {
	if !strings.HasPrefix(a.Header.Get("Content-Type"), "text/event-stream") {
		return [][]byte{a.Body}
	}
	var out [][]byte
	for _, line := range strings.Split(string(a.Body), "\n") {
		if data, ok := strings.CutPrefix(line, "data: "); ok {
			out = append(out, []byte(data))
		}
	}
	return out
}

// Text is the content of the first choice.
func (a Answer) Text() string {
	var b strings.Builder
	for _, event := range a.Events() {
		var body struct {
			Choices []struct {
				Text           string
				Message, Delta struct{ Content string }
			}
		}
		if json.Unmarshal(event, &body) == nil && len(body.Choices) > 0 {
			c := body.Choices[0]
			b.WriteString(c.Text + c.Message.Content + c.Delta.Content)
		}
	}
	return b.String()
}

// Post sends JSON to the public endpoint and reads the whole answer. It is safe
// for concurrent use.
func (f *Front) Post(path string, body []byte) Answer {
	return f.Send(context.Background(), path, body, nil)
}

// Send is Post with a context and more headers.
func (f *Front) Send(ctx context.Context, path string, body []byte, header http.Header) Answer {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, f.URL()+path, strings.NewReader(string(body)))
	if err != nil {
		return Answer{Err: err}
	}
	req.Header.Set("Content-Type", "application/json")
	for k, v := range header {
		req.Header[k] = v
	}
	resp, err := f.client.Do(req)
	if err != nil {
		return Answer{Err: err}
	}
	defer resp.Body.Close()
	raw, err := io.ReadAll(resp.Body)
	return Answer{Status: resp.StatusCode, ID: resp.Header.Get("X-Request-Id"), Header: resp.Header, Body: raw, Err: err}
}

// WorkerSet is the resource that describes engines of one model.
func WorkerSet(env Env, o FrontOptions, engines ...*Engine) string {
	var b strings.Builder
	e := engines[0]
	fmt.Fprintf(&b, "apiVersion: kinference.buoyant.io/v1alpha1\nkind: InferenceWorkerSet\nmetadata: { name: %s, namespace: test }\nspec:\n  models:\n    - name: %s\n", e.Model, e.Model)
	if len(e.LoRAs) > 0 {
		b.WriteString("      loras:\n")
		for name := range e.LoRAs {
			fmt.Fprintf(&b, "        - { name: %s }\n", name)
		}
	}
	if !o.NoTokenizer {
		dir := o.Tokenizer
		if dir == "" {
			dir = env.Model(e.Model)
		}
		fmt.Fprintf(&b, "  tokenizer: { path: %q, passTokenIds: %v }\n", dir, o.PassTokenIDs)
	}
	b.WriteString("  endpoints:\n")
	for _, e := range engines {
		address := e.Addr()
		if o.Via != nil {
			address = o.Via(e)
		}
		fmt.Fprintf(&b, "    - { name: %s, address: %q", e.Name, address)
		if a := e.Events(); a != "" {
			fmt.Fprintf(&b, ", kvEvents: %q", a)
		}
		if a := e.Replay(); a != "" {
			fmt.Fprintf(&b, ", kvReplay: %q", a)
		}
		b.WriteString(" }\n")
	}
	return b.String()
}
