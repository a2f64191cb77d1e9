package proxy_test

import (
	"context"
	"crypto/x509"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kinference/kinference/api/v1alpha1"
	"github.com/kinference/kinference/internal/openai"
	"github.com/kinference/kinference/internal/provider"
	"github.com/kinference/kinference/internal/provider/fake"
	"github.com/kinference/kinference/services/ingress/internal/proxy"
)

// schemas are all that providers speak.
var schemas = []v1alpha1.ProviderSchema{
	v1alpha1.SchemaOpenAI, v1alpha1.SchemaAzureOpenAI, v1alpha1.SchemaAnthropic, v1alpha1.SchemaDatabricks, v1alpha1.SchemaBedrock, v1alpha1.SchemaOpenAICompatible,
}

type moves struct {
	mu   sync.Mutex
	list []string
}

func (m *moves) add(name, model string, open bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	word := " closed"
	if open {
		word = " open"
	}
	m.list = append(m.list, name+" "+model+word)
}

func newProxy(t *testing.T, private string, change func(*proxy.Settings)) *proxy.Proxy {
	t.Helper()
	s := proxy.Settings{
		Connect: time.Second, FirstByte: 5 * time.Second, Idle: 5 * time.Second, Write: 5 * time.Second, KeepAlive: time.Second, PerHost: 8,
		MaxEvent: 1 << 20, MaxAnswer: 1 << 20,
	}
	if private != "" {
		s.Private = []netip.Prefix{netip.MustParsePrefix(private)}
	}
	if change != nil {
		change(&s)
	}
	p := proxy.New(s)
	t.Cleanup(p.Close)
	return p
}

// out is a call to a provider.
func out(t *testing.T, s *fake.Server, schema v1alpha1.ProviderSchema, model string, stream bool) *proxy.Call {
	t.Helper()
	text := `{"model":"big","messages":[{"role":"user","content":"Hi"}],"max_tokens":9}`
	if stream {
		text = strings.Replace(text, "{", `{"stream":true,`, 1)
	}
	body := new(openai.Object)
	if err := body.Parse([]byte(text), 0); err != nil {
		t.Fatal(err)
	}
	keys := provider.Credentials{APIKey: fake.Key}
	if schema == v1alpha1.SchemaBedrock {
		keys = provider.Credentials{AccessKeyID: fake.AccessKey, SecretAccessKey: fake.SecretKey}
	}
	return &proxy.Call{Stream: stream, Model: []byte(`"big"`), HideUsage: true, HideRunning: true, Provider: &proxy.Provider{
		Name: "ns/" + string(schema), Target: provider.Target{Schema: schema, Endpoint: s.URL, Region: fake.Region, Model: model},
		Credentials: func(context.Context) (provider.Credentials, error) { return keys, nil },
		Call:        provider.Call{Body: body, Stream: stream, Model: "big", ID: "1"},
	}}
}

// The client gets OpenAI's form from every provider, whole and as a stream, and
// nothing of the provider's header; usage is counted, with what was cached in it.
func TestOutside(t *testing.T) {
	p := newProxy(t, "127.0.0.0/8", nil)
	for _, schema := range schemas {
		s := fake.New(schema, "model-9")
		defer s.Close()
		for _, stream := range []bool{false, true} {
			w := httptest.NewRecorder()
			r := p.Do(t.Context(), w, out(t, s, schema, "model-9", stream))
			if r.Reason != proxy.Served || !r.Committed {
				t.Fatalf("%s, stream %v: %+v, %q", schema, stream, r, s.Refused())
			}
			if u := r.Usage; u.Prompt != fake.Prompt || u.Cached != fake.Cached || u.Output != fake.Output {
				t.Errorf("%s, stream %v: usage %+v", schema, stream, u)
			}
			body := w.Body.String()
			if stream {
				if !strings.HasSuffix(body, "data: [DONE]\n\n") || strings.Contains(body, "usage\":{") || strings.Contains(body, "prompt_filter") || strings.Contains(body, `"choices":[]`) {
					t.Errorf("%s: %s", schema, body)
				}
			} else if !strings.Contains(body, fake.Text) {
				t.Errorf("%s: %s", schema, body)
			}
			if strings.Contains(body, "model-9") || !strings.Contains(body, `"model":"big"`) {
				t.Errorf("%s: the model's name: %s", schema, body)
			}
			for name, v := range w.Header() {
				if strings.Contains(strings.Join(v, ""), fake.Account) || strings.HasPrefix(name, "X-Ratelimit") {
					t.Errorf("%s: header %s: %s", schema, name, v)
				}
			}
		}
	}
}

// Whatever goes wrong at whatever provider, the client learns what it can do
// about it and nothing of the account; what came too late for another try ends
// the stream with an error.
func TestFaults(t *testing.T) {
	for _, test := range []struct {
		fault  fake.Fault
		stream bool
		reason proxy.Reason
		retry  bool
		status int
		code   string
		begun  bool
	}{
		{fake.Limited, true, proxy.Status, true, 503, openai.CodeUnavailable, false},
		{fake.Broken, false, proxy.Status, true, 502, openai.CodeUpstream, false},
		{fake.Invalid, false, proxy.Status, false, 400, "", false},
		{fake.TooLong, true, proxy.Status, false, 400, openai.CodeContextLength, false},
		{fake.Redirect, false, proxy.Status, true, 502, openai.CodeUpstream, false},
		{fake.Silent, true, proxy.Closed, true, 502, openai.CodeUpstream, false},
		{fake.ErrorEvent, true, proxy.Status, false, 503, openai.CodeUnavailable, true},
		{fake.Cut, true, proxy.Closed, false, 502, openai.CodeUpstream, true},
		{fake.Hang, true, proxy.Timeout, false, 504, openai.CodeTimeout, true},
	} {
		for _, schema := range schemas {
			p := newProxy(t, "127.0.0.0/8", nil)
			s := fake.New(schema, "model-9")
			s.SetFault(test.fault)
			c := out(t, s, schema, "model-9", test.stream)
			if test.fault == fake.Hang {
				c.Provider.Idle = 500 * time.Millisecond
			}
			w := httptest.NewRecorder()
			r := p.Do(t.Context(), w, c)
			if r.Reason != test.reason || r.Retry != test.retry || r.Err == nil || r.Err.Status != test.status || r.Err.Code != test.code || r.Committed != test.begun {
				t.Errorf("fault %d of %s: %+v, error %+v", test.fault, schema, r, r.Err)
			}
			body := w.Body.String()
			if test.begun && (!strings.Contains(body, "Hello") || !strings.Contains(body, `data: {"error":{`)) {
				t.Errorf("fault %d of %s: %s", test.fault, schema, body)
			}
			if u := r.Usage; test.begun && schema == v1alpha1.SchemaAnthropic && (u.Prompt != fake.Prompt || u.Cached != fake.Cached || u.Output != openai.Unknown) {
				t.Errorf("fault %d: %+v, the prompt's is told at the beginning", test.fault, u)
			}
			if test.begun != (body != "") || strings.Contains(body+r.Err.Message, fake.Account) {
				t.Errorf("fault %d of %s: the client sees %q %v", test.fault, schema, body, r.Err)
			}
			s.Close()
		}
	}
}

// A 429 keeps requests from that model of that provider and from no other, and
// the client's own faults and its leaving say nothing about the provider.
func TestBreakerOfOneModel(t *testing.T) {
	var m moves
	p := newProxy(t, "127.0.0.0/8", func(s *proxy.Settings) { s.Breaker = m.add })
	schema := v1alpha1.SchemaOpenAI
	s, other := fake.New(schema, "a"), fake.New(schema, "b")
	defer s.Close()
	defer other.Close()
	do := func(s *fake.Server, model string) proxy.Result {
		return p.Do(t.Context(), httptest.NewRecorder(), out(t, s, schema, model, false))
	}
	s.SetFault(fake.Invalid)
	for range 20 {
		if r := do(s, "a"); r.Err.Status != 400 {
			t.Fatalf("%+v", r)
		}
	}
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	for range 20 {
		if r := p.Do(gone, httptest.NewRecorder(), out(t, s, schema, "a", true)); r.Reason != proxy.Canceled {
			t.Fatalf("%+v", r)
		}
	}
	if len(m.list) > 0 {
		t.Errorf("opened by clients: %q", m.list)
	}
	s.SetFault(fake.Limited)
	if r := do(s, "a"); r.Err.RetryAfter != 30*time.Second {
		t.Errorf("%+v", r.Err)
	}
	seen := len(s.Seen())
	s.SetFault(fake.None)
	if r := do(s, "a"); r.Err == nil || r.Err.Status != 503 || !r.Retry || r.Err.RetryAfter < 25*time.Second || len(s.Seen()) != seen {
		t.Errorf("open: %+v, %d requests", r, len(s.Seen())-seen)
	}
	if r := do(other, "b"); r.Reason != proxy.Served {
		t.Errorf("another model: %+v", r)
	}
	if strings.Join(m.list, ", ") != "ns/OpenAI a open" {
		t.Errorf("%q", m.list)
	}
}

// Addresses inside are not connected to, whatever name leads there, unless the
// operator says so, and nobody is believed without a certificate.
func TestAddresses(t *testing.T) {
	s := fake.New(v1alpha1.SchemaOpenAICompatible, "m")
	defer s.Close()
	c := out(t, s, v1alpha1.SchemaOpenAICompatible, "m", false)
	for _, endpoint := range []string{s.URL, strings.Replace(s.URL, "127.0.0.1", "localhost", 1), "http://[::ffff:127.0.0.1]:1", "http://169.254.169.254", "http://10.0.0.1", "http://[fd00:ec2::254]", "http://0.0.0.0:1", "http://100.64.0.1", "http://[64:ff9b::a00:1]"} {
		c.Provider.Target.Endpoint = endpoint
		if r := newProxy(t, "", nil).Do(t.Context(), httptest.NewRecorder(), c); r.Reason != proxy.Connect || !strings.Contains(r.Cause.Error(), "address is not a public one") {
			t.Errorf("%s: %+v", endpoint, r)
		}
	}
	if len(s.Seen()) > 0 {
		t.Error("a request got there")
	}
	secure := httptest.NewTLSServer(http.NotFoundHandler())
	defer secure.Close()
	c.Provider.Target.Endpoint = secure.URL
	if r := newProxy(t, "127.0.0.0/8", nil).Do(t.Context(), httptest.NewRecorder(), c); r.Reason == proxy.Served || !strings.Contains(r.Cause.Error(), "certificate") {
		t.Errorf("%+v", r)
	}
}

// No more requests are at a provider than its concurrency allows, and a total
// timeout of its own ends one.
func TestConcurrencyAndTotal(t *testing.T) {
	p := newProxy(t, "127.0.0.0/8", nil)
	s := fake.New(v1alpha1.SchemaAnthropic, "m")
	defer s.Close()
	s.SetFault(fake.Hang)
	c := out(t, s, v1alpha1.SchemaAnthropic, "m", true)
	c.Provider.Concurrency, c.Provider.Total = 1, 2*time.Second
	begun, done := make(chan struct{}), make(chan proxy.Result)
	c.OnFirst = func(time.Duration) { close(begun) }
	go func() { done <- p.Do(t.Context(), httptest.NewRecorder(), c) }()
	<-begun
	second := out(t, s, v1alpha1.SchemaAnthropic, "m", true)
	second.Provider.Concurrency = 1
	if r := p.Do(t.Context(), httptest.NewRecorder(), second); !r.Retry || r.Err == nil || r.Err.Status != 503 {
		t.Errorf("second: %+v", r)
	}
	if r := <-done; r.Reason != proxy.Timeout || !r.Committed {
		t.Errorf("first: %+v", r)
	}
}

// A connection is used again after a stream, whatever its form.
func TestConnectionsAreKept(t *testing.T) {
	p := newProxy(t, "127.0.0.0/8", nil)
	for _, schema := range schemas {
		s := fake.New(schema, "m")
		for i := range 6 {
			if r := p.Do(t.Context(), httptest.NewRecorder(), out(t, s, schema, "m", i%2 == 0)); r.Reason != proxy.Served {
				t.Fatalf("%s: %+v", schema, r)
			}
		}
		opened := map[string]bool{}
		for _, seen := range s.Seen() {
			opened[seen.Remote] = true
		}
		if len(opened) != 1 {
			t.Errorf("%s: %d connections for 6 requests", schema, len(opened))
		}
		s.Close()
	}
}

// Over HTTP/2 and TLS, as real providers speak, it is all the same, and a client
// that leaves ends the request there, be it a stream or not.
func TestHTTP2AndLeaving(t *testing.T) {
	for _, schema := range []v1alpha1.ProviderSchema{v1alpha1.SchemaOpenAI, v1alpha1.SchemaAnthropic, v1alpha1.SchemaBedrock} {
		s := fake.NewTLS(schema, "m")
		p := newProxy(t, "127.0.0.0/8", func(set *proxy.Settings) {
			set.Roots = x509.NewCertPool()
			set.Roots.AddCert(s.Certificate())
		})
		for _, stream := range []bool{false, true} {
			w := httptest.NewRecorder()
			if r := p.Do(t.Context(), w, out(t, s, schema, "m", stream)); r.Reason != proxy.Served || r.Usage.Output != fake.Output {
				t.Errorf("%s, stream %v: %+v", schema, stream, r)
			}
		}
		for _, seen := range s.Seen() {
			if seen.Proto != "HTTP/2.0" {
				t.Errorf("%s spoke %s", schema, seen.Proto)
			}
		}
		s.SetFault(fake.Hang)
		for i, stream := range []bool{false, true} {
			ctx, leave := context.WithCancel(t.Context())
			c := out(t, s, schema, "m", stream)
			c.OnFirst = func(time.Duration) { leave() }
			if before := len(s.Seen()); !stream {
				go func() { // once it is there
					eventually(func() bool { return len(s.Seen()) > before })
					leave()
				}()
			}
			if r := p.Do(ctx, httptest.NewRecorder(), c); r.Reason != proxy.Canceled || r.Retry {
				t.Errorf("%s, stream %v: %+v", schema, stream, r)
			}
			leave()
			if !eventually(func() bool { return s.Left() > i }) {
				t.Errorf("%s, stream %v: the provider goes on", schema, stream)
			}
		}
		s.Close()
	}
}

// eventually waits until something holds, for a generous while.
func eventually(holds func() bool) bool {
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for deadline := time.Now().Add(20 * time.Second); time.Now().Before(deadline); <-tick.C {
		if holds() {
			return true
		}
	}
	return holds()
}
