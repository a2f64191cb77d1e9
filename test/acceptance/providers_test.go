package acceptance

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kinference/kinference/api/v1alpha1"
	"github.com/kinference/kinference/cmd/stack"
	"github.com/kinference/kinference/internal/provider/fake"
	"github.com/kinference/kinference/internal/rpc"
	"github.com/kinference/kinference/proto/gen/kinference/accounting/v1/accountingv1connect"
	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
	usagev1 "github.com/kinference/kinference/proto/gen/kinference/usage/v1"
)

// abroad is a third party of each kind, with the model that it serves.
type abroad struct {
	*fake.Server
	name  string
	model string // as clients name it
}

// secret writes a Secret as Kubernetes mounts it.
func secret(t *testing.T, dir, name string, keys map[string]string) {
	t.Helper()
	dir = filepath.Join(dir, "test", name)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	for key, value := range keys {
		if err := os.WriteFile(filepath.Join(dir, key), []byte(value+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
}

// providers starts one of each kind and makes it known.
func (e *env) providers(keys string) []abroad {
	e.t.Helper()
	var out []abroad
	yaml := ""
	for _, p := range []struct {
		name, model string
		schema      v1alpha1.ProviderSchema
	}{
		{"openai", "gpt-9", v1alpha1.SchemaOpenAI}, {"azure", "deployed", v1alpha1.SchemaAzureOpenAI}, {"anthropic", "claude-9", v1alpha1.SchemaAnthropic},
		{"databricks", "dbrx", v1alpha1.SchemaDatabricks}, {"bedrock", "anthropic.claude-9-v1:0", v1alpha1.SchemaBedrock},
		{"bedrock-key", "openai.gpt-oss", v1alpha1.SchemaBedrock}, {"compatible", "vendor/llama", v1alpha1.SchemaOpenAICompatible},
	} {
		s := fake.New(p.schema, p.model)
		e.t.Cleanup(s.Close)
		region := ""
		if p.schema == v1alpha1.SchemaBedrock {
			region = "\n  region: " + fake.Region
		}
		held := map[string]string{"apiKey": fake.Key}
		if p.name == "bedrock" {
			held = map[string]string{"accessKeyId": fake.AccessKey, "secretAccessKey": fake.SecretKey}
		}
		secret(e.t, keys, p.name, held)
		out = append(out, abroad{s, p.name, "via-" + p.name})
		yaml += fmt.Sprintf(`---
apiVersion: kinference.buoyant.io/v1alpha1
kind: InferenceProvider
metadata: { name: %s, namespace: test }
spec:
  schema: %s%s
  endpoint: %q
  credentials: { secretRef: { name: %s } }
  maxTokensCap: 500
  timeouts: { firstByte: 5s, idle: 2s }
  models:
  - { name: via-%s, upstreamName: %q, price: { currency: EUR, perMillion: { input: "10", cachedInput: "1", output: "100" } } }
`, p.name, p.schema, region, s.URL, p.name, p.name, p.model)
	}
	e.reload("providers.yaml", yaml)
	return out
}

const weather = `,"tools":[{"type":"function","function":{"name":"weather","parameters":{"type":"object","properties":{"city":{"type":"string"}}}}}]`

// Requests go out to every kind of provider, whole and as streams, with tools and
// back with their results, and each is in the ledger with its tokens and price.
// What belongs to the cluster or to a tenant stays.
func TestProvidersOfEveryKind(t *testing.T) {
	keys := t.TempDir()
	e := start(t, settings{workers: 1, stack: stack.Options{ProviderCredentials: keys}})
	want := map[string]int{}
	for _, p := range e.providers(keys) {
		for _, stream := range []bool{false, true} {
			a := e.chat(req{model: p.model, text: "Hello", max: 4000, stream: stream, extra: `,"user":"alice","cache_salt":"s","priority":1`})
			if a.status != http.StatusOK || a.text != fake.Text || strings.Contains(a.body, fake.Account) || !strings.Contains(a.body, `"model":"`+p.model+`"`) {
				t.Errorf("%s, stream %v: %d %.500s; %q", p.name, stream, a.status, a.body, p.Refused())
			}
			if got := strings.Contains(a.body, `"prompt_tokens"`); got == stream {
				t.Errorf("%s, stream %v: usage is there: %v", p.name, stream, got)
			}
			a = e.chat(req{model: p.model, text: "What is the weather?", max: 50, stream: stream, extra: weather})
			if a.status != http.StatusOK || !strings.Contains(a.body, `"weather"`) || !strings.Contains(a.body, "tool_calls") {
				t.Errorf("%s, stream %v, tools: %d %.500s", p.name, stream, a.status, a.body)
			}
			a = e.post(t.Context(), "/v1/chat/completions", fmt.Sprintf(`{"model":%q,"stream":%v,"messages":[{"role":"user","content":"And there?"},`+
				`{"role":"assistant","content":null,"tool_calls":[{"id":"call_1","type":"function","function":{"name":"weather","arguments":"{\"city\":\"Paris\"}"}}]},`+
				`{"role":"tool","tool_call_id":"call_1","content":"sunny"}]%s}`, p.model, stream, weather))
			if a.status != http.StatusOK || a.text != fake.Text {
				t.Errorf("%s, stream %v, result: %d %.500s; %q", p.name, stream, a.status, a.body, p.Refused())
			}
			want["test/"+p.name] += 3
		}
		// Clients of other APIs get there too. Anthropic's own usage is passed on, which
		// tells apart what was written to the cache.
		input := `"input_tokens":8,`
		if p.name == "anthropic" {
			input = `"input_tokens":6,"cache_creation_input_tokens":2,`
		}
		a := e.post(t.Context(), "/v1/messages", fmt.Sprintf(`{"model":%q,"max_tokens":9,"messages":[{"role":"user","content":"Hi"}]}`, p.model))
		if a.status != http.StatusOK || !strings.Contains(a.body, `"type":"message"`) || !strings.Contains(a.body, fake.Text) ||
			!strings.Contains(a.body, input) || !strings.Contains(a.body, `"cache_read_input_tokens":4`) {
			t.Errorf("%s, Messages: %d %.500s", p.name, a.status, a.body)
		}
		a = e.post(t.Context(), "/v1/messages", fmt.Sprintf(`{"model":%q,"max_tokens":9,"stream":true,"messages":[{"role":"user","content":"Hi"}]}`, p.model))
		if a.status != http.StatusOK || !strings.Contains(a.body, "event: message_stop") || strings.Contains(a.body, "[DONE]") {
			t.Errorf("%s, Messages as a stream: %d %.900s", p.name, a.status, a.body)
		}
		a = e.post(t.Context(), "/v1/responses", fmt.Sprintf(`{"model":%q,"input":"Hi","store":false}`, p.model))
		if a.status != http.StatusOK || !strings.Contains(a.body, fake.Text) {
			t.Errorf("%s, Responses: %d %.500s", p.name, a.status, a.body)
		}
		want["test/"+p.name] += 3
		if r := p.Refused(); len(r) > 0 {
			t.Errorf("%s refused: %q", p.name, r)
		}
		for _, seen := range p.Seen() {
			text, _ := json.Marshal(seen.Body)
			if s := string(text); strings.Contains(s, "alice") || strings.Contains(s, "salt") || strings.Contains(s, "4000") {
				t.Errorf("%s got %s", p.name, s)
			}
		}
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	ledger := rpc.Client(ctx, e.stack.AccountingURL(), accountingv1connect.NewAccountingServiceClient)
	var events []*usagev1.Usage
	e.eventually("the ledger has all", func() bool {
		var err error
		events, err = export(ctx, ledger)
		events = slices.DeleteFunc(events, func(u *usagev1.Usage) bool { return u.GetProvider() == "" })
		return err == nil && len(events) == 9*len(want)
	})
	got := map[string]int{}
	for _, u := range events {
		got[u.GetProvider()]++
		// 8 tokens at 10, 4 from the cache at 1, 5 at 100 for a million.
		if text := fmt.Sprint(u); !strings.Contains(text, "0.000584") {
			t.Errorf("%s costs something else: %s", u.GetProvider(), text)
		}
	}
	for name, n := range want {
		if got[name] != n {
			t.Errorf("%s: %d events, want %d", name, got[name], n)
		}
	}
}

// What goes wrong at a provider ends in a typed error or at a worker, and never
// with words about the account.
func TestProviderFaults(t *testing.T) {
	keys := t.TempDir()
	e := start(t, settings{workers: 1, stack: stack.Options{ProviderCredentials: keys}})
	for _, p := range e.providers(keys) {
		p.SetFault(fake.ErrorEvent)
		a := e.chat(req{model: p.model, text: "x", max: 9, stream: true})
		if a.status != http.StatusOK || !strings.HasPrefix(fake.Text, a.text) || a.text == "" || len(a.events) == 0 || !strings.Contains(a.events[len(a.events)-1], `{"error":`) {
			t.Errorf("%s, error event: %d %s", p.name, a.status, a.body)
		}
		checkQuiet(t, p.name, a)
		if p.name == "openai" || p.name == "bedrock" { // they spoke of limits, so that model is left alone
			e.chat(req{model: p.model, text: "x"})
			if n := len(p.Seen()); n != 1 {
				t.Errorf("%s got %d requests after a limit", p.name, n)
			}
			continue
		}
		if p.name == "azure" || p.name == "databricks" || p.name == "compatible" || p.name == "bedrock-key" {
			continue
		}
		p.SetFault(fake.Cut)
		a = e.chat(req{model: p.model, text: "x", max: 9, stream: true})
		if a.status != http.StatusOK || a.text == "" || strings.Contains(a.body, "[DONE]") || !strings.Contains(a.events[len(a.events)-1], `{"error":`) {
			t.Errorf("%s, cut: %d %s", p.name, a.status, a.body)
		}
		p.SetFault(fake.Broken)
		a = e.chat(req{model: p.model, text: "x"})
		if a.status != http.StatusBadGateway {
			t.Errorf("%s, broken: %d %s", p.name, a.status, a.body)
		}
		checkQuiet(t, p.name, a)
		p.SetFault(fake.TooLong)
		a = e.chat(req{model: p.model, text: "x"})
		if code := a.errorBody().Code; a.status != http.StatusBadRequest || code == nil || *code != "context_length_exceeded" {
			t.Errorf("%s, too long: %d %s", p.name, a.status, a.body)
		}
	}
}

func checkQuiet(t *testing.T, name string, a answer) {
	t.Helper()
	if strings.Contains(a.body, fake.Account) || strings.Contains(fmt.Sprint(a.header), fake.Account) {
		t.Errorf("%s tells about the account: %s %v", name, a.body, a.header)
	}
}

// A provider with a limit is left alone at once, for that model only; requests go
// to the workers meanwhile. A key that is replaced is used a moment later, and
// nothing anybody can read has one in it.
func TestProviderLimitAndRotation(t *testing.T) {
	keys := t.TempDir()
	e := start(t, settings{workers: 1, stack: stack.Options{ProviderCredentials: keys}})
	s := fake.New(v1alpha1.SchemaAnthropic, "claude-9")
	defer s.Close()
	secret(t, keys, "claude", map[string]string{"apiKey": fake.Key})
	e.reload("claude.yaml", `apiVersion: kinference.buoyant.io/v1alpha1
kind: InferenceProvider
metadata: { name: claude, namespace: test }
spec:
  schema: Anthropic
  endpoint: "`+s.URL+`"
  credentials: { secretRef: { name: claude } }
  models: [ { name: `+modelName+`, upstreamName: claude-9 }, { name: second, upstreamName: claude-9b } ]
`)
	e.policy("burst", `
  - { name: burst, matches: [ { model: `+modelName+` } ], route: { select: [ { type: Provider, order: [ claude ] }, { type: Local, minimize: PredictedTTFT } ] } }
`)
	if a := e.chat(req{text: "x"}); a.text != fake.Text {
		t.Fatalf("%d %s %q", a.status, a.body, s.Refused())
	}
	s.SetFault(fake.Limited)
	before := len(s.Seen())
	for i := range 10 {
		if a := e.chat(req{text: words(i, 10), max: 2, stream: i%2 == 0}); a.status != http.StatusOK || a.text == fake.Text {
			t.Errorf("request %d: %d %s", i, a.status, a.body)
		}
	}
	if n := len(s.Seen()) - before; n != 1 {
		t.Errorf("%d requests at a provider that said 429", n)
	}
	refused := len(s.Refused())
	e.chat(req{model: "second", text: "x"})
	if len(s.Refused()) != refused+1 { // it does not know the model, but it was asked
		t.Error("the other model is kept from the provider too")
	}

	// Rotation, at a provider of its own, since that one is left alone.
	r := fake.New(v1alpha1.SchemaOpenAI, "gpt-9")
	defer r.Close()
	secret(t, keys, "rotated", map[string]string{"apiKey": fake.Key})
	e.reload("rotated.yaml", `apiVersion: kinference.buoyant.io/v1alpha1
kind: InferenceProvider
metadata: { name: rotated, namespace: test }
spec:
  schema: OpenAI
  endpoint: "`+r.URL+`/v1"
  credentials: { secretRef: { name: rotated } }
  models: [ { name: turning, upstreamName: gpt-9 } ]
`)
	if a := e.chat(req{model: "turning", text: "x"}); a.status != http.StatusOK {
		t.Fatalf("%d %s", a.status, a.body)
	}
	const next = "rotated-key-2"
	r.SetKey(next)
	if a := e.chat(req{model: "turning", text: "x"}); a.status != http.StatusBadGateway {
		t.Errorf("old key: %d %s", a.status, a.body)
	}
	secret(t, keys, "rotated", map[string]string{"apiKey": next})
	began := time.Now()
	e.eventually("the new key is used", func() bool { return e.chat(req{model: "turning", text: "x"}).status == http.StatusOK })
	t.Logf("a new key was used after %v", time.Since(began).Round(time.Millisecond))
	for _, key := range []string{fake.Key, next} {
		if strings.Contains(e.log.String(), key) || strings.Contains(e.metrics(), key) {
			t.Errorf("%s is in logs or metrics", key)
		}
	}
}

// What the policy says about tags goes with the decision to ingress, for its look
// at the last moment.
func TestBarsTravel(t *testing.T) {
	e := start(t, settings{workers: 1})
	e.cloud()
	e.policy("pii-stays-local", piiStaysLocal)
	clean, err := e.route("clean", &routerv1.Attributes{Classified: true})
	if err != nil || clean.GetEndpoints()[0].GetProvider() != "test/cloud" {
		t.Fatal(clean, err)
	}
	bars := clean.GetEndpoints()[0].GetBars()
	if len(bars) != 1 || !slices.Contains(slices.Concat(bars[0].GetAll(), bars[0].GetAny()), "pii-detected") || !slices.Contains(bars[0].GetAssumed(), "pii-detected") {
		t.Errorf("got %v", bars)
	}
	if len(clean.GetEndpoints()[1].GetBars()) > 0 {
		t.Error("a worker has bars")
	}
}
