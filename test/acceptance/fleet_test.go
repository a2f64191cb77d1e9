// Package acceptance tells the user stories of Kinference and checks them
// through its public doors only: HTTP, resources in a folder, the admin port
// and the admin API. The fleet is simulated, everything else is real.
package acceptance

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kinference/kinference/cmd/stack"
	"github.com/kinference/kinference/internal/daemon"
	"github.com/kinference/kinference/internal/fleetsim"
	"github.com/kinference/kinference/internal/fleetsim/engine"
	"github.com/kinference/kinference/internal/fleetsim/model"
	"github.com/kinference/kinference/internal/testenv"
	adminv1 "github.com/kinference/kinference/proto/gen/kinference/admin/v1"
	"github.com/kinference/kinference/proto/gen/kinference/admin/v1/adminv1connect"
)

func TestMain(m *testing.M) { testenv.Main(m) }

const modelName = "sim/qwen"

// env is a fleet with the control plane in front of it.
type env struct {
	t       *testing.T
	workers []*fleetsim.Worker
	dir     string // of resources
	stack   *stack.Stack
	admin   adminv1connect.AdminServiceClient
	client  *http.Client
	log     *syncBuffer

	adminTokens string // file
}

// settings of an env; the zero value is three quick workers.
type settings struct {
	workers int
	scale   float64
	worker  func(i int, c *fleetsim.Config)
	set     string // more lines of the worker set's spec
	policy  string
	data    string // JetStream's folder
	spans   daemon.SpanExporter

	adminTokens, adminAudit string // files

	stack stack.Options // more of them
}

// start brings everything up and waits until a request can be answered with
// the cache in view.
func start(t *testing.T, s settings) *env {
	t.Helper()
	if s.workers == 0 {
		s.workers = 3
	}
	if s.scale == 0 {
		s.scale = 50
	}
	e := &env{t: t, dir: t.TempDir(), log: &syncBuffer{}, adminTokens: s.adminTokens}
	for i := range s.workers {
		cfg := fleetsim.Config{
			Name: fmt.Sprintf("w%d", i), Profile: engine.L40SPlain16, TimeScale: s.scale, Seed: int64(i + 1),
			Model: modelName, Admin: true,
		}
		if s.worker != nil {
			s.worker(i, &cfg)
		}
		w, err := fleetsim.Start(context.Background(), cfg)
		if err != nil {
			t.Fatalf("start worker: %v", err)
		}
		t.Cleanup(w.Kill)
		e.workers = append(e.workers, w)
	}
	e.write("fleet.yaml", e.workerSet(s.set))
	o := s.stack
	o.ConfigDir, o.DataDir, o.Policy, o.Seed, o.TimeScale, o.LimiterTimeout, o.Output = e.dir, s.data, s.policy, 1, s.scale, 10*time.Second, e.log
	o.DrainTimeout, o.Spans, o.AdminTokens, o.AdminAudit = 5*time.Second, s.spans, s.adminTokens, s.adminAudit
	if o.ClassifyTimeout == 0 {
		o.ClassifyTimeout = 10 * time.Second
	}
	st, err := stack.Start(t.Context(), o)
	if err != nil {
		t.Fatalf("start stack: %v", err)
	}
	e.stack = st
	rpcCtx, closeRPC := context.WithCancel(context.Background())
	e.admin = st.Admin(rpcCtx)
	e.client = &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 64}}
	t.Cleanup(func() {
		e.client.CloseIdleConnections()
		closeRPC()
		if err := st.Stop(); err != nil {
			t.Errorf("stop stack: %v", err)
		}
		if t.Failed() {
			t.Logf("log of the stack:\n%s", e.log.tail(16<<10))
		}
	})
	e.waitReady(s.workers)
	return e
}

func (e *env) write(name, content string) {
	e.t.Helper()
	tmp := filepath.Join(e.t.TempDir(), name)
	if err := os.WriteFile(tmp, []byte(content), 0o644); err != nil {
		e.t.Fatal(err)
	}
	if err := os.Rename(tmp, filepath.Join(e.dir, name)); err != nil {
		e.t.Fatal(err)
	}
}

// workerSet is the resource that describes the fleet.
func (e *env) workerSet(more string) string {
	dir, err := model.Dir()
	if err != nil {
		e.t.Fatal(err)
	}
	var b strings.Builder
	fmt.Fprintf(&b, `apiVersion: kinference.buoyant.io/v1alpha1
kind: InferenceWorkerSet
metadata: { name: sim, namespace: test }
spec:
  models: [ { name: %q, aliases: [ qwen ] } ]
  tokenizer: { path: %q }
`, modelName, dir)
	if more != "" {
		b.WriteString(more)
	}
	b.WriteString("  endpoints:\n")
	for _, w := range e.workers {
		fmt.Fprintf(&b, "    - { name: %q, address: %q", w.Name(), w.Addr())
		if a := w.EventsAddr(0); a != "" {
			fmt.Fprintf(&b, ", kvEvents: %q", a)
		}
		if a := w.ReplayAddr(0); a != "" {
			fmt.Fprintf(&b, ", kvReplay: %q", a)
		}
		b.WriteString(" }\n")
	}
	return b.String()
}

// patience is for machines that are busy with other things: a test that passes needs
// far less.
const patience = 3 * time.Minute

// eventually polls cond until it holds or patience ends.
func (e *env) eventually(what string, cond func() bool) {
	e.t.Helper()
	deadline := time.Now().Add(patience)
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for !cond() {
		if time.Now().After(deadline) {
			e.t.Fatalf("%s: not within %v", what, patience)
		}
		<-tick.C
	}
}

// waitReady waits until n workers are candidates of a decision.
func (e *env) waitReady(n int) {
	e.t.Helper()
	e.waitStack()
	e.eventually(fmt.Sprintf("%d workers ready", n), func() bool {
		r := e.chat(req{text: "ping", max: 1})
		if r.status != http.StatusOK {
			return false
		}
		ready := 0
		for _, c := range e.explain(r).Candidates {
			if c.Dropped == "" {
				ready++
			}
		}
		return ready == n
	})
	// The block size is learned from the engines: until then nothing matches.
	// The text fills a page of the largest profile.
	text := words(9999, 1000)
	e.eventually("index follows the workers", func() bool {
		r := e.chat(req{text: text, max: 1})
		return r.status == http.StatusOK && slices.ContainsFunc(e.explain(r).Candidates, func(c *adminv1.Candidate) bool { return c.MatchedTokens > 0 })
	})
}

// waitStack waits until every part of the stack says that it is ready.
func (e *env) waitStack() {
	e.t.Helper()
	ctx, cancel := context.WithTimeout(e.t.Context(), patience)
	defer cancel()
	if err := e.stack.WaitReady(ctx); err != nil {
		e.t.Fatalf("stack is not ready: %v\n%s", err, e.log.tail(8<<10))
	}
}

// explain returns the record of the decision behind an answer.
func (e *env) explain(a answer) *adminv1.Decision {
	e.t.Helper()
	resp, err := e.admin.Explain(e.t.Context(), &adminv1.ExplainRequest{RequestId: a.id})
	if err != nil {
		e.t.Fatalf("explain %s: %v; its answer was %d %v %.500s", a.id, err, a.status, a.err, a.body)
	}
	return resp.Decision
}

// req is a chat request.
type req struct {
	model  string
	text   string
	max    int
	stream bool
	extra  string // more JSON members, each with a leading comma
	ctx    context.Context
}

// answer is what came back.
type answer struct {
	status int
	id     string
	header http.Header
	body   string
	events []string // of a stream, without "data: "
	text   string
	err    error // of reading the body
	usage  struct {
		Prompt  int `json:"prompt_tokens"`
		Output  int `json:"completion_tokens"`
		Details struct {
			Cached int `json:"cached_tokens"`
		} `json:"prompt_tokens_details"`
	}
}

func (r req) body() string {
	if r.model == "" {
		r.model = modelName
	}
	text, _ := json.Marshal(r.text)
	return fmt.Sprintf(`{"model":%q,"messages":[{"role":"user","content":%s}],"max_tokens":%d,"stream":%v%s}`, r.model, text, max(r.max, 1), r.stream, r.extra)
}

func (e *env) chat(r req) answer {
	e.t.Helper()
	return e.post(r.ctx, "/v1/chat/completions", r.body())
}

func (e *env) post(ctx context.Context, path, body string) answer {
	if ctx == nil {
		ctx = e.t.Context()
	}
	hr, err := http.NewRequestWithContext(ctx, http.MethodPost, e.stack.URL()+path, strings.NewReader(body))
	if err != nil {
		return answer{err: err}
	}
	hr.Header.Set("Content-Type", "application/json")
	resp, err := e.client.Do(hr)
	if err != nil {
		return answer{err: err}
	}
	defer resp.Body.Close()
	raw, err := io.ReadAll(resp.Body)
	a := answer{status: resp.StatusCode, id: resp.Header.Get("X-Request-Id"), header: resp.Header, body: string(raw), err: err}
	type chunk struct {
		Choices []struct {
			Message struct{ Content string }
			Delta   struct{ Content string }
		}
		Usage json.RawMessage
	}
	take := func(data []byte) {
		var c chunk
		if json.Unmarshal(data, &c) != nil {
			return
		}
		for _, ch := range c.Choices {
			a.text += ch.Message.Content + ch.Delta.Content
		}
		if len(c.Usage) > 0 && string(c.Usage) != "null" {
			_ = json.Unmarshal(c.Usage, &a.usage)
		}
	}
	if strings.HasPrefix(resp.Header.Get("Content-Type"), "text/event-stream") {
		for _, line := range strings.Split(a.body, "\n") {
			if data, ok := strings.CutPrefix(line, "data: "); ok {
				a.events = append(a.events, data)
				take([]byte(data))
			}
		}
	} else {
		take(raw)
	}
	return a
}

// errorBody decodes an OpenAI error.
func (a answer) errorBody() (out struct {
	Message, Type string
	Param, Code   *string
}) {
	var body struct {
		Error json.RawMessage
	}
	_ = json.Unmarshal([]byte(a.body), &body)
	_ = json.Unmarshal(body.Error, &out)
	return out
}

// words is n tokens of text that nobody else sent: the number makes it unique.
func words(unique, n int) string {
	var b strings.Builder
	for i := range n {
		fmt.Fprintf(&b, "%c%c ", 'a'+(unique+i)%26, 'a'+(unique/26+i*7)%26)
	}
	return fmt.Sprintf("%d %s", unique, b.String())
}

// syncBuffer is a log that can be read while it is written.
type syncBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *syncBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *syncBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}

func (b *syncBuffer) tail(n int) string {
	s := b.String()
	return s[max(0, len(s)-n):]
}
