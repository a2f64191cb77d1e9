package acceptance

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"google.golang.org/protobuf/encoding/protojson"

	"github.com/kinference/kinference/internal/fleetsim"
	"github.com/kinference/kinference/internal/rpc"
	adminv1 "github.com/kinference/kinference/proto/gen/kinference/admin/v1"
	classifierv1 "github.com/kinference/kinference/proto/gen/kinference/classifier/v1"
	"github.com/kinference/kinference/proto/gen/kinference/classifier/v1/classifierv1connect"
)

// card is a number that nobody has, with the check digit of one.
func card() string {
	digits := []byte("4")
	for len(digits) < 15 {
		digits = append(digits, byte('0'+rand.IntN(10)))
	}
	sum := 0
	for i, d := range slices.Backward(digits) {
		n := int(d - '0')
		if i%2 == 0 {
			if n *= 2; n > 9 {
				n -= 9
			}
		}
		sum += n
	}
	s := string(append(digits, byte('0'+(10-sum%10)%10)))
	return s[:4] + " " + s[4:8] + " " + s[8:12] + " " + s[12:]
}

// mail is an address that nobody has.
func mail() string { return fmt.Sprintf("k%07d@mailbox%06d.org", rand.IntN(1e7), rand.IntN(1e6)) }

const (
	cleanText  = "Please explain in simple words how bread is baked."
	databricks = "provider test/databricks"
)

func quote(s string) string { b, _ := json.Marshal(s); return string(b) }

// dialects are bodies that carry a text in different places. The engines' model
// knows no tools, so of those that have some only where they go is looked at.
var dialects = []struct{ name, path, body string }{
	{"user", "/v1/chat/completions", `{"model":"sim/qwen","max_tokens":2,"messages":[{"role":"user","content":TEXT}]}`},
	{"part", "/v1/chat/completions", `{"model":"sim/qwen","max_tokens":2,"messages":[{"role":"user","content":[{"type":"text","text":"Hello there."},{"type":"text","text":TEXT}]}]}`},
	{"system", "/v1/chat/completions", `{"model":"sim/qwen","max_tokens":2,"messages":[{"role":"system","content":TEXT},{"role":"user","content":"Hello there."}]}`},
	{"assistant", "/v1/chat/completions", `{"model":"sim/qwen","max_tokens":2,"messages":[{"role":"user","content":"Hello there."},{"role":"assistant","content":TEXT},{"role":"user","content":"And then?"}]}`},
	{"tool result", "/v1/chat/completions", `{"model":"sim/qwen","max_tokens":2,"messages":[{"role":"user","content":"Hello there."},{"role":"assistant","content":"","tool_calls":[{"id":"call_1","type":"function","function":{"name":"look","arguments":"{}"}}]},{"role":"tool","tool_call_id":"call_1","content":TEXT}]}`},
	{"tool arguments", "/v1/chat/completions", `{"model":"sim/qwen","max_tokens":2,"messages":[{"role":"user","content":"Hello there."},{"role":"assistant","content":"","tool_calls":[{"id":"call_1","type":"function","function":{"name":"look","arguments":ARGS}}]},{"role":"tool","tool_call_id":"call_1","content":"done"}]}`},
	{"tool", "/v1/chat/completions", `{"model":"sim/qwen","max_tokens":2,"messages":[{"role":"user","content":"Hello there."}],"tools":[{"type":"function","function":{"name":"look","description":TEXT,"parameters":{"type":"object"}}}]}`},
	{"another member", "/v1/chat/completions", `{"model":"sim/qwen","max_tokens":2,"messages":[{"role":"user","content":"Hello there."}],"user":TEXT}`},
	{"completions", "/v1/completions", `{"model":"sim/qwen","max_tokens":2,"prompt":TEXT}`},
	{"messages", "/v1/messages", `{"model":"sim/qwen","max_tokens":2,"messages":[{"role":"user","content":[{"type":"text","text":TEXT}]}]}`},
	{"messages system", "/v1/messages", `{"model":"sim/qwen","max_tokens":2,"system":TEXT,"messages":[{"role":"user","content":"Hello there."}]}`},
	{"messages title", "/v1/messages", `{"model":"sim/qwen","max_tokens":2,"messages":[{"role":"user","content":[{"type":"document","title":TEXT,"source":{"type":"text","data":"Hello there."}}]}]}`},
	{"messages of an agent", "/v1/messages", `{"model":"sim/qwen","max_tokens":2,"system":[{"type":"text","text":"x-anthropic-billing-header: cc_version=2.1.154.abc; cc_entrypoint=cli; cch=1a2b3;"},` +
		`{"type":"text","text":"Be brief.","cache_control":{"type":"ephemeral"}}],"context_management":{"edits":[{"type":"clear_tool_uses_20250919","keep":{"type":"tool_uses","value":3}}]},` +
		`"output_config":{"effort":"high"},"metadata":{"user_id":"user_0123456789abcdef"},"messages":[{"role":"user","content":[{"type":"text","text":TEXT,"cache_control":{"type":"ephemeral","ttl":"1h"}}]}]}`},
	{"responses", "/v1/responses", `{"model":"sim/qwen","max_output_tokens":2,"input":TEXT}`},
	{"responses instructions", "/v1/responses", `{"model":"sim/qwen","max_output_tokens":2,"instructions":TEXT,"input":"Hello there."}`},
}

func with(body, text string) string {
	body = strings.ReplaceAll(body, "TEXT", quote(text))
	return strings.ReplaceAll(body, "ARGS", quote(`{"note":`+quote(text)+`}`))
}

// The document's example, to the letter, with a real classifier: a prompt with
// personal data stays in, whatever API and whatever part it comes in; a clean one
// goes to the provider; what cannot be read stays in, too.
func TestPIIStaysLocal(t *testing.T) {
	e := start(t, settings{workers: 1})
	e.provider("databricks")
	e.document("pii-stays-local")
	for _, d := range dialects {
		for what, text := range map[string]string{"clean": cleanText, "card": "My card number is " + card() + ", is it valid?", "e-mail": "Write to " + mail() + " please."} {
			a := e.post(t.Context(), d.path, with(d.body, text))
			if a.status != http.StatusOK {
				t.Errorf("%s, %s: status %d: %s", d.name, what, a.status, a.body)
				continue
			}
			r := e.explain(a)
			if local := r.GetChosen() != databricks; local != (what != "clean") {
				t.Errorf("%s, %s: went to %s, tags %v, unknown %v", d.name, what, r.GetChosen(), r.GetRequest().GetTags(), r.GetRequest().GetUnknownTags())
			}
			if what == "clean" && (!r.GetRequest().GetClassified() || !slices.Contains(r.GetRequest().GetAbsentTags(), "pii-detected")) {
				t.Errorf("%s: the record says %v", d.name, r.GetRequest())
			}
			if what != "clean" && !slices.Contains(r.GetRequest().GetTags(), "pii-detected") {
				t.Errorf("%s, %s: tags %v", d.name, what, r.GetRequest().GetTags())
			}
		}
	}
	a := e.post(t.Context(), "/v1/completions", `{"model":"sim/qwen","max_tokens":2,"prompt":[1,2,3,4,5]}`)
	if r := e.explain(a); r.GetChosen() == databricks || !unknownFor(r, "pii-*", "tokens") {
		t.Errorf("token ids: %s, %v", r.GetChosen(), r.GetRequest())
	}
}

// unknownFor reports whether a record says that tags were unknown for a cause.
func unknownFor(d *adminv1.Decision, tag, cause string) bool {
	for _, u := range d.GetRequest().GetUnknownTags() {
		if u.GetTag() == tag && slices.Contains(u.GetCauses(), cause) {
			return true
		}
	}
	return false
}

// The document's other example: simple prompts may go to the cheaper model, which
// is faster here; demanding ones stay. A tag of one's own holds, too, as soon as it
// is written down.
func TestComplexityAndCustomTags(t *testing.T) {
	e := start(t, settings{workers: 1})
	e.provider("cloud")
	e.policy("simple", `
  - name: low-complexity
    matches: [ { tag: complexity-low } ]
    route: { consider: [ { type: Provider } ] }
  - name: falcon
    matches: [ { tag: project-falcon } ]
    reject: { reason: Secret, message: Not here. }
  customTags: [ { name: project-falcon, risk: true, any: [ { keywords: [ peregrine ] } ] } ]
`)
	chosen := func(text string) string { return e.explain(e.chat(req{text: text, max: 1})).GetChosen() }
	e.eventually("a simple prompt goes to the cheaper one", func() bool { return chosen("What is the capital of France?") == "provider test/cloud" })
	hard := "Prove that for every finite group G whose order is divisible by a prime p there is an element of order p, first for abelian groups by induction and then in general with the class equation. Afterwards design a distributed lock service with fencing tokens, derive its safety and liveness properties formally, compare it with Paxos and Raft under asymmetric partitions, and analyse the amortised complexity of the lease renewal protocol step by step."
	if c := chosen(hard); c == "provider test/cloud" {
		t.Errorf("a demanding prompt went to %s", c)
	}
	e.eventually("the custom tag holds", func() bool {
		a := e.chat(req{text: hard + " Mention the peregrine in it.", max: 1})
		return a.status == http.StatusForbidden && strings.Contains(a.body, "Secret") && !strings.Contains(a.body, "peregrine")
	})
}

// classifier stands before the real one and does what a test says.
type classifier struct {
	classifierv1connect.UnimplementedClassifierServiceHandler
	mu   sync.Mutex
	mode string
	real classifierv1connect.ClassifierServiceClient
	seen int // calls in this mode
}

func (c *classifier) set(mode string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.mode, c.seen = mode, 0
}

func (c *classifier) calls() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.seen
}

func (c *classifier) Classify(ctx context.Context, r *classifierv1.ClassifyRequest) (*classifierv1.ClassifyResponse, error) {
	c.mu.Lock()
	c.seen++
	mode := c.mode
	c.mu.Unlock()
	var text string
	for _, p := range r.GetParts() {
		text += string(p.GetText())
	}
	clean := &classifierv1.ClassifyResponse{
		Bytes: uint64(len(text)), Tags: []*classifierv1.Tag{{Name: "pii-detected", State: classifierv1.State_STATE_FALSE}, {Name: "complexity-low", State: classifierv1.State_STATE_FALSE}},
		Coverage: []*classifierv1.Coverage{{Detector: "pii", Bytes: uint64(len(text)), Of: uint64(len(text)), Complete: true}},
	}
	switch mode {
	case "stalled":
		<-ctx.Done()
		return nil, ctx.Err()
	case "failing":
		return nil, connect.NewError(connect.CodeInternal, errors.New("cannot read "+text))
	case "overloaded":
		return nil, rpc.Error(connect.CodeResourceExhausted, "the classifier is busy", 50*time.Millisecond)
	case "empty":
		return &classifierv1.ClassifyResponse{}, nil
	case "other prompt":
		clean.Bytes += 7
	case "half read":
		clean.Coverage[0].Bytes, clean.Coverage[0].Complete, clean.Coverage[0].Causes = 3, false, []string{"oversize"}
		clean.Tags[0].State, clean.Tags[0].Unknown = classifierv1.State_STATE_UNKNOWN, []string{"oversize", text}
	case "contradicting":
		clean.Tags = append(clean.Tags, &classifierv1.Tag{Name: "pii-detected", State: classifierv1.State_STATE_UNKNOWN, Unknown: []string{"panic"}})
	case "without it":
		clean.Tags = clean.Tags[1:]
	case "stateless":
		clean.Tags[0].State = 99
	default:
		return c.real.Classify(ctx, r)
	}
	return clean, nil
}

// door serves a classifier; what is not of its service gets junk.
func (c *classifier) door(t *testing.T) (url string) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	_, h := classifierv1connect.NewClassifierServiceHandler(c)
	srv := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		c.mu.Lock()
		mode := c.mode
		if mode == "junk" || mode == "html" {
			c.seen++
		}
		c.mu.Unlock()
		switch mode {
		case "junk":
			w.Header().Set("Content-Type", "application/proto")
			_, _ = w.Write([]byte{0xff, 0xff, 0x01, 0x02, 0xff})
		case "html":
			w.Header().Set("Content-Type", "text/html")
			_, _ = w.Write([]byte("<html>hello"))
		default:
			h.ServeHTTP(w, r)
		}
	}), Protocols: new(http.Protocols), ReadHeaderTimeout: 10 * time.Second}
	srv.Protocols.SetHTTP1(true)
	srv.Protocols.SetUnencryptedHTTP2(true)
	done := make(chan struct{})
	go func() { defer close(done); _ = srv.Serve(l) }()
	t.Cleanup(func() { _ = srv.Close(); <-done })
	return "http://" + l.Addr().String()
}

// through starts an env whose ingress asks a classifier that a test controls.
func through(t *testing.T, s settings) (*env, *classifier) {
	t.Helper()
	c := &classifier{}
	s.stack.ClassifierURL = c.door(t)
	e := start(t, s)
	ctx, cancel := context.WithCancel(context.Background())
	t.Cleanup(cancel)
	c.real = rpc.Client(ctx, e.stack.ClassifierURL(), classifierv1connect.NewClassifierServiceClient)
	return e, c
}

// However the classifier fails, a prompt never gets to a provider while it is not
// known to be clean, also when workers fail; and policies that ask for complexity
// alone go on serving.
func TestClassifierFails(t *testing.T) {
	s := settings{workers: 2}
	s.stack.ClassifyTimeout = 300 * time.Millisecond
	e, c := through(t, s)
	cloud := e.provider("databricks")
	e.document("pii-stays-local")
	e.reload("complexity.yaml", `apiVersion: kinference.buoyant.io/v1alpha1
kind: InferencePolicy
metadata: { name: a-complexity, namespace: test }
spec:
  rules:
  - { name: hard, matches: [ { tag: complexity-high, qos: batch } ], route: { select: [ { type: Local } ] } }
  - { name: easy, matches: [ { tags: { none: [ complexity-high ] }, qos: batch } ], route: { select: [ { type: Local } ] } }
`)
	clean := func() bool { return e.explain(e.chat(req{text: cleanText, max: 1})).GetChosen() == databricks }
	for _, m := range []struct{ mode, tag, cause string }{
		{"stalled", "*", "timeout"}, {"failing", "*", "garbled"}, {"overloaded", "*", "overloaded"}, {"empty", "*", "garbled"}, {"junk", "*", "garbled"}, {"html", "*", "garbled"},
		{"other prompt", "*", "garbled"}, {"half read", "pii-detected", "oversize"}, {"contradicting", "pii-detected", "panic"}, {"without it", "pii-detected", "not_looked_for"},
		{"stateless", "pii-detected", "other"},
	} {
		c.set("")
		e.eventually("the classifier is believed again before "+m.mode, clean)
		before := cloud.Stats(0).PromptTokens
		c.set(m.mode)
		said := false
		for i := range 8 { // more than the breaker takes
			a := e.chat(req{text: cleanText, max: 1})
			d := e.explain(a)
			if a.status != http.StatusOK || d.GetChosen() == databricks || d.GetServedBy() == databricks {
				t.Errorf("%s: %d at %s", m.mode, a.status, d.GetChosen())
			}
			said = said || unknownFor(d, m.tag, m.cause)
			if i == 7 && c.calls() == 0 {
				t.Errorf("%s: nobody asked the classifier", m.mode)
			}
		}
		if !said {
			t.Errorf("%s: no record says %s (%s)", m.mode, m.tag, m.cause)
		}
		// Failing over stays among the workers.
		e.workers[0].SetFaults(fleetsim.Faults{ErrorNext: 1})
		e.workers[1].SetFaults(fleetsim.Faults{CloseNext: 1})
		for range 3 {
			e.chat(req{text: cleanText, max: 1})
		}
		e.workers[0].SetFaults(fleetsim.Faults{})
		e.workers[1].SetFaults(fleetsim.Faults{})
		if a := e.send("/v1/chat/completions", req{text: cleanText, max: 1}.body(), "X-Kinference-Qos", "batch"); a.status != http.StatusOK {
			t.Errorf("%s: complexity alone: %d", m.mode, a.status)
		}
		if n := cloud.Stats(0).PromptTokens - before; n != 0 {
			t.Errorf("%s: the provider got %v prompt tokens", m.mode, n)
		}
	}
}

// The classifier is killed; a prompt is longer than it reads; all workers are gone.
func TestClassifierAwayOrCutShort(t *testing.T) {
	s := settings{workers: 1}
	s.stack.ClassifierMaxBytes = 2000
	e := start(t, s)
	cloud := e.provider("databricks")
	e.document("pii-stays-local")
	if c := e.explain(e.chat(req{text: cleanText, max: 1})).GetChosen(); c != databricks {
		t.Fatalf("a clean prompt: %s", c)
	}
	before := cloud.Stats(0).PromptTokens
	long := strings.Repeat(cleanText+" ", 60)
	if d := e.explain(e.chat(req{text: long, max: 1})); d.GetChosen() == databricks || !unknownFor(d, "pii-*", "oversize") {
		t.Errorf("half scanned: %s %v", d.GetChosen(), d.GetRequest())
	}
	if err := e.stack.Halt("classifier"); err != nil {
		t.Fatal(err)
	}
	for range 8 {
		if d := e.explain(e.chat(req{text: cleanText, max: 1})); d.GetChosen() == databricks || d.GetRequest().GetClassified() || len(d.GetRequest().GetUnknownTags()) == 0 {
			t.Errorf("killed: %s %v", d.GetChosen(), d.GetRequest())
		}
	}
	if m := e.metrics(); !strings.Contains(m, "kinference_ingress_classify_breaker") || !strings.Contains(m, `outcome="breaker_open"`) {
		t.Error("metrics say nothing of the breaker")
	}
	e.workers[0].Kill()
	e.eventually("nobody is left", func() bool { return e.chat(req{text: cleanText, max: 1}).status == http.StatusServiceUnavailable })
	if n := cloud.Stats(0).PromptTokens - before; n != 0 {
		t.Errorf("the provider got %v prompt tokens", n)
	}
	if err := e.stack.Resume("classifier"); err != nil {
		t.Fatal(err)
	}
	e.eventually("clean prompts go to the provider again", func() bool { return e.explain(e.chat(req{text: cleanText, max: 1})).GetChosen() == databricks })
}

// Nothing of a prompt gets into logs, metrics, traces, records or errors, be it
// classified or not.
func TestPromptsStayPrivate(t *testing.T) {
	spans := tracetest.NewInMemoryExporter()
	s := settings{workers: 1, spans: spans}
	s.stack.ClassifyTimeout = 300 * time.Millisecond
	s.stack.LogLevel = -8
	e, c := through(t, s)
	e.provider("databricks")
	e.document("pii-stays-local")
	e.reload("own.yaml", `apiVersion: kinference.buoyant.io/v1alpha1
kind: InferencePolicy
metadata: { name: a-own, namespace: test }
spec:
  customTags: [ { name: own, any: [ { regex: "zyx[0-9]{9}" } ] } ]
  rules:
  - { name: own, matches: [ { tag: own } ], reject: { reason: Own } }
`)
	planted := map[string]string{
		"card": card(), "mail": mail(), "key": "AKIA" + strings.ToUpper(fmt.Sprintf("%016s", fmt.Sprintf("QZ%014d", rand.Int64N(1e14)))),
		"own": fmt.Sprintf("zyx%09d", rand.IntN(1e9)), "name": fmt.Sprintf("Wilhelmina Quzenberry%06d", rand.IntN(1e6)),
	}
	var seen []string
	for _, mode := range []string{"", "stalled", "failing", "overloaded", "half read", "junk"} {
		c.set(mode)
		for _, d := range dialects {
			for what, value := range planted {
				if mode != "" && (d.name != "user" || what != "mail") {
					continue
				}
				a := e.post(t.Context(), d.path, with(d.body, "My "+what+" is "+value+"."))
				if seen = append(seen, fmt.Sprint(a.header)); a.status != http.StatusOK || d.name != "responses instructions" { // which the API repeats to its client
					seen = append(seen, a.body)
				}
				if a.status == http.StatusOK || a.status == http.StatusForbidden {
					record, err := protojson.Marshal(e.explain(a))
					if err != nil {
						t.Fatal(err)
					}
					seen = append(seen, string(record))
				}
			}
		}
	}
	e.workers[0].Kill()
	seen = append(seen, e.chat(req{text: planted["card"]}).body, e.metrics(), e.log.String())
	failed := func(s tracetest.SpanStub) bool {
		return strings.HasSuffix(s.Name, "Classify") && s.Status.Code == codes.Error
	}
	e.eventually("spans are exported, also of calls that failed", func() bool { return slices.ContainsFunc(spans.GetSpans(), failed) })
	for _, s := range spans.GetSpans() {
		seen = append(seen, fmt.Sprintf("%+v", s))
	}
	all := strings.Join(seen, "\n")
	for what, value := range planted {
		for _, form := range []string{value, strings.ReplaceAll(value, " ", "")} {
			if i := strings.Index(all, form); i >= 0 {
				t.Errorf("a planted value (%s) is in …%s…", what, all[max(0, i-200):min(len(all), i+60)])
			}
		}
	}
}
