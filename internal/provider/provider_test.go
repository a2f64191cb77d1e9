package provider_test

import (
	"bytes"
	"compress/gzip"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/kinference/kinference/api/v1alpha1"
	"github.com/kinference/kinference/internal/openai"
	"github.com/kinference/kinference/internal/provider"
	"github.com/kinference/kinference/internal/provider/fake"
)

// targets are one of each kind of provider.
var targets = []struct {
	name   string
	schema v1alpha1.ProviderSchema
	model  string
	keys   provider.Credentials
}{
	{"OpenAI", v1alpha1.SchemaOpenAI, "gpt-9", provider.Credentials{APIKey: fake.Key}},
	{"Azure", v1alpha1.SchemaAzureOpenAI, "my-deployment", provider.Credentials{APIKey: fake.Key + "\n"}},
	{"Anthropic", v1alpha1.SchemaAnthropic, "claude-9", provider.Credentials{APIKey: fake.Key}},
	{"Databricks", v1alpha1.SchemaDatabricks, "databricks-llama", provider.Credentials{APIKey: fake.Key}},
	{"Bedrock", v1alpha1.SchemaBedrock, "anthropic.claude-9-v1:0", provider.Credentials{AccessKeyID: fake.AccessKey, SecretAccessKey: fake.SecretKey, SessionToken: "session"}},
	{"Bedrock by key", v1alpha1.SchemaBedrock, "openai.gpt-oss", provider.Credentials{APIKey: fake.Key}},
	{"compatible", v1alpha1.SchemaOpenAICompatible, "vendor/llama", provider.Credentials{APIKey: fake.Key}},
}

// body has all that must not leave the cluster.
const leaking = `"cache_salt":"SALT-OF-TENANT","kv_transfer_params":{"x":1},"vllm_xargs":{"a":"b"},"priority":3,"request_id":"req-tenant","user":"alice@example.com",` +
	`"metadata":{"team":"alice"},"safety_identifier":"alice","prompt_cache_key":"alice","store":true,"service_tier":"priority","chat_template_kwargs":{"enable_thinking":false},` +
	`"seed":9007199254740993,"temperature":0.5,"max_tokens":32000,"continue_final_message":false`

const conversation = `[{"role":"system","content":"Be brief."},{"role":"user","content":"Hi"},{"role":"assistant","content":"Hello","reasoning":"think"},{"role":"user","content":"What now?"}]`

const weather = `"tools":[{"type":"function","function":{"name":"weather","description":"of a city","parameters":{"type":"object","properties":{"city":{"type":"string"}}}}}],"tool_choice":"auto"`

func callOf(t *testing.T, stream bool, members string) *provider.Call {
	t.Helper()
	text := fmt.Sprintf(`{"model":"big","stream":%v,"messages":%s,%s}`, stream, conversation, members)
	var o openai.Object
	if err := o.Parse([]byte(text), 0); err != nil {
		t.Fatal(err)
	}
	return &provider.Call{Route: openai.RouteChat, Body: &o, Stream: stream, Model: "big", ID: "1", Created: 7}
}

// post sends what was prepared.
func post(t *testing.T, r *provider.Request) *http.Response {
	t.Helper()
	resp, err := http.DefaultTransport.RoundTrip((&http.Request{Method: http.MethodPost, URL: r.URL, Host: r.URL.Host, Header: r.Header,
		Body: io.NopCloser(bytes.NewReader(r.Body)), ContentLength: int64(len(r.Body))}).WithContext(t.Context()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { resp.Body.Close() })
	return resp
}

// answer is what a client makes of an answer.
type answer struct {
	Text, Tool, Arguments, Finish string
	Usage                         openai.Usage
	Done                          bool
}

func whole(t *testing.T, body []byte) answer {
	t.Helper()
	var c struct {
		Object  string
		Choices []struct {
			Message struct {
				Content   string
				ToolCalls []struct {
					Function struct{ Name, Arguments string }
				} `json:"tool_calls"`
			}
			FinishReason string `json:"finish_reason"`
		}
	}
	var chunk openai.Chunk
	if err := json.Unmarshal(body, &c); err != nil || len(c.Choices) != 1 || c.Object != "chat.completion" || chunk.Parse(body) != nil {
		t.Fatalf("%v in %s", err, body)
	}
	m := c.Choices[0].Message
	a := answer{Text: m.Content, Finish: c.Choices[0].FinishReason, Usage: chunk.Usage, Done: true}
	for _, call := range m.ToolCalls {
		a.Tool, a.Arguments = call.Function.Name, call.Function.Arguments
	}
	return a
}

func streamed(t *testing.T, src io.Reader) (a answer) {
	t.Helper()
	events := openai.NewReader(src, 1<<20)
	for {
		e, err := events.Next()
		if err == io.EOF {
			return a
		} else if err != nil {
			t.Fatal(err)
		}
		if e.Done() {
			a.Done = true
			continue
		}
		var c struct {
			Choices []struct {
				Delta struct {
					Content   string
					ToolCalls []struct {
						Function struct{ Name, Arguments string }
					} `json:"tool_calls"`
				}
				FinishReason *string `json:"finish_reason"`
			}
		}
		var chunk openai.Chunk
		if e.Data == nil {
			continue
		}
		if err := json.Unmarshal(e.Data, &c); err != nil || chunk.Parse(e.Data) != nil {
			t.Fatalf("%v in %s", err, e.Data)
		}
		if chunk.HasUsage {
			a.Usage = chunk.Usage
		}
		for _, choice := range c.Choices {
			a.Text += choice.Delta.Content
			for _, call := range choice.Delta.ToolCalls {
				a.Tool += call.Function.Name
				a.Arguments += call.Function.Arguments
			}
			if choice.FinishReason != nil {
				a.Finish = *choice.FinishReason
			}
		}
	}
}

// Each provider takes what it is sent, and its answers are those of OpenAI's API,
// text and tools, whole and as a stream, with input that includes what was cached.
func TestEveryProvider(t *testing.T) {
	for _, target := range targets {
		t.Run(target.name, func(t *testing.T) {
			s := fake.New(target.schema, target.model)
			defer s.Close()
			out := provider.Target{Schema: target.schema, Endpoint: s.URL, Region: fake.Region, Model: target.model, MaxTokensCap: 1000}
			for _, stream := range []bool{false, true} {
				for _, tools := range []bool{false, true} {
					members := leaking
					want := answer{Text: fake.Text, Finish: "stop", Done: true, Usage: openai.Usage{Prompt: fake.Prompt, Cached: fake.Cached, Output: fake.Output, Reasoning: openai.Unknown}}
					if tools {
						members += "," + weather
						want.Text, want.Tool, want.Arguments, want.Finish = "", "weather", fake.Arguments, "tool_calls"
					}
					if target.schema == v1alpha1.SchemaOpenAICompatible || !strings.HasPrefix(target.name, "Anth") {
						members = strings.Replace(members, `"continue_final_message":false`, `"stop":["END"]`, 1)
					}
					r, e := out.Prepare(callOf(t, stream, members), target.keys, time.Now())
					if e != nil {
						t.Fatal(e)
					}
					resp := post(t, r)
					if resp.StatusCode != http.StatusOK {
						t.Fatalf("stream %v: %d: %q", stream, resp.StatusCode, s.Refused())
					}
					var got answer
					kind, _, _ := strings.Cut(resp.Header.Get("Content-Type"), ";")
					if r.IsStream(kind) != stream {
						t.Errorf("stream %v has type %s", stream, kind)
					}
					if stream {
						got = streamed(t, r.Stream(resp.Body, 1<<20))
					} else {
						text, err := io.ReadAll(resp.Body)
						if err != nil {
							t.Fatal(err)
						}
						if text, err = r.Whole(text); err != nil {
							t.Fatal(err)
						}
						got = whole(t, text)
					}
					if diff := cmp.Diff(want, got); diff != "" {
						t.Errorf("stream %v, tools %v (-want +got):\n%s", stream, tools, diff)
					}
					for _, secret := range []string{"SALT", "alice", "req-tenant", "think", "big"} {
						if bytes.Contains(r.Body, []byte(secret)) {
							t.Errorf("%s left the cluster: %s", secret, r.Body)
						}
					}
					if bytes.Contains(r.Body, []byte("32000")) || !bytes.Contains(r.Body, []byte("1000")) {
						t.Errorf("output is not capped: %s", r.Body)
					}
				}
			}
		})
	}
}

// A request that the provider would refuse is refused by its stand-in too.
func TestFakesRefuse(t *testing.T) {
	for _, target := range targets {
		s := fake.New(target.schema, target.model)
		defer s.Close()
		out := provider.Target{Schema: target.schema, Endpoint: s.URL, Region: fake.Region, Model: target.model}
		for name, spoil := range map[string]func(r *provider.Request){
			"unsigned": func(r *provider.Request) {
				for _, h := range []string{"Authorization", "Api-Key", "X-Api-Key"} {
					r.Header.Del(h)
				}
			},
			"more members":  func(r *provider.Request) { r.Body = append([]byte(`{"cache_salt":"x",`), r.Body[1:]...) },
			"another model": func(r *provider.Request) { r.URL.RawPath = ""; r.URL.Path += "x" },
		} {
			r, e := out.Prepare(callOf(t, false, `"temperature":1`), target.keys, time.Now())
			if e != nil {
				t.Fatal(e)
			}
			spoil(r)
			if resp := post(t, r); resp.StatusCode < 400 {
				t.Errorf("%s, %s: %d", target.name, name, resp.StatusCode)
			}
		}
	}
}

// Nothing of a provider's errors tells about its account with us, and what is
// wrong with the request is the client's to know.
func TestRefused(t *testing.T) {
	r := prepared(t, targets[0].schema)
	for _, test := range []struct {
		status int
		header http.Header
		body   string
		want   string
		code   string
		out    int
		after  time.Duration
	}{
		{400, nil, `{"error":{"message":"'temperature' must be at most 2","param":"temperature","code":null}}`, "'temperature' must be at most 2", "", 400, 0},
		{400, nil, `{"error":{"message":"This model's maximum context length is 8192 tokens"}}`, "This model's maximum context length is 8192 tokens", openai.CodeContextLength, 400, 0},
		{400, nil, `{"message":"Input is too long for requested model."}`, "Input is too long for requested model.", openai.CodeContextLength, 400, 0},
		{400, nil, `{"message":"Invocation of arn:aws:bedrock:eu-west-1:123456789012:model/x is not allowed"}`, "The provider refused the request.", "", 400, 0},
		{400, nil, `{"error":{"message":"Your credit balance is too low"}}`, "The provider refused the gateway.", openai.CodeUpstream, 502, 0},
		{400, http.Header{"X-Amzn-Errortype": {"ServiceQuotaExceededException:http://x"}}, `{"message":"too many"}`, "The provider is busy. Try again later.", openai.CodeUnavailable, 503, time.Second},
		{400, nil, `{"error":{"message":"gpt-9 is not known"}}`, "The provider refused the request.", "", 400, 0},
		{400, nil, `{"error":{"message":"see req_011CSHoEeqs5C35K2UUqR7Fyzz"}}`, "The provider refused the request.", "", 400, 0},
		{400, nil, `<html>`, "The provider refused the request.", "", 400, 0},
		{401, nil, `{"error":{"message":"Incorrect API key provided: sk-abc"}}`, "The provider refused the gateway.", openai.CodeUpstream, 502, 0},
		{402, nil, `{}`, "The provider refused the gateway.", openai.CodeUpstream, 502, 0},
		{404, nil, `{"error":{"message":"no deployment gpt-9"}}`, "The provider does not serve the model.", openai.CodeUpstream, 502, 0},
		{429, http.Header{"Retry-After": {"30"}}, `{"error":{"message":"organization org-x"}}`, "The provider is busy. Try again later.", openai.CodeUnavailable, 503, 30 * time.Second},
		{429, http.Header{"Retry-After": {"1e99"}}, ``, "The provider is busy. Try again later.", openai.CodeUnavailable, 503, time.Second},
		{429, http.Header{"Retry-After": {"86400"}}, ``, "The provider is busy. Try again later.", openai.CodeUnavailable, 503, time.Minute},
		{529, http.Header{"Retry-After-Ms": {"1500"}}, `{}`, "The provider is busy. Try again later.", openai.CodeUnavailable, 503, 1500 * time.Millisecond},
		{500, nil, `{"error":{"message":"org-x"}}`, "The provider could not complete the request.", openai.CodeUpstream, 502, 0},
		{504, nil, ``, "The provider did not answer in time.", openai.CodeTimeout, 504, 0},
		{307, nil, ``, "The provider gave no valid answer.", openai.CodeUpstream, 502, 0},
	} {
		e := r.Refused(test.status, test.header, []byte(test.body))
		if e.Message != test.want || e.Code != test.code || e.Status != test.out || e.RetryAfter != test.after {
			t.Errorf("%d %s: %+v", test.status, test.body, e)
		}
	}
}

// A provider may keep us away for longer than a client is told to wait, but not
// for as long as it likes.
func TestRetryAfter(t *testing.T) {
	for text, want := range map[string]time.Duration{"": time.Second, "2.5": 2500 * time.Millisecond, "120": 2 * time.Minute, "86400": 5 * time.Minute, "-1": time.Second, "soon": time.Second, "0": time.Second} {
		if got := provider.RetryAfter(http.Header{"Retry-After": {text}}); got != want {
			t.Errorf("%q: %v, want %v", text, got, want)
		}
	}
}

func prepared(t *testing.T, schema v1alpha1.ProviderSchema) *provider.Request {
	t.Helper()
	for _, target := range targets {
		if target.schema == schema {
			out := provider.Target{Schema: schema, Endpoint: "https://provider.test", Region: fake.Region, Model: target.model}
			r, e := out.Prepare(callOf(t, true, `"temperature":1`), target.keys, time.Now())
			if e != nil {
				t.Fatal(e)
			}
			return r
		}
	}
	t.Fatal("no such target")
	return nil
}

// What goes wrong within a stream of Converse is not taken for its end.
func TestConverseFaults(t *testing.T) {
	start := fake.Frame("event", "messageStart", `{"role":"assistant"}`)
	text := fake.Frame("event", "contentBlockDelta", `{"delta":{"text":"Hi"}}`)
	stop := fake.Frame("event", "messageStop", `{"stopReason":"end_turn"}`)
	flipped := bytes.Clone(text)
	flipped[len(flipped)-6] ^= 1
	for name, test := range map[string]struct {
		frames [][]byte
		status int // of the fault; 0: none
		done   bool
	}{
		"throttled":     {[][]byte{start, text, fake.Frame("exception", "throttlingException", `{"message":"org"}`)}, 429, false},
		"unavailable":   {[][]byte{start, fake.Frame("exception", "serviceUnavailableException", `{}`)}, 503, false},
		"timeout":       {[][]byte{start, fake.Frame("exception", "modelTimeoutException", `{}`)}, 504, false},
		"internal":      {[][]byte{start, fake.Frame("exception", "internalServerException", `{}`)}, 502, false},
		"model error":   {[][]byte{start, text, fake.Frame("exception", "modelStreamErrorException", `{}`)}, 502, false},
		"invalid":       {[][]byte{start, fake.Frame("exception", "validationException", `{"message":"temperature is too high"}`)}, 400, false},
		"no JSON":       {[][]byte{start, fake.Frame("event", "contentBlockDelta", `{`)}, 502, false},
		"unknown event": {[][]byte{start, fake.Frame("event", "novelty", `{}`), text, stop, fake.Frame("event", "metadata", `{"usage":{"inputTokens":1,"outputTokens":1}}`)}, 0, true},
		"no usage":      {[][]byte{start, text, stop}, 0, true},
		"cut":           {[][]byte{start, text}, 0, false},
	} {
		s := prepared(t, v1alpha1.SchemaBedrock).Stream(bytes.NewReader(bytes.Join(test.frames, nil)), 1<<20)
		got, err := io.ReadAll(s)
		status := 0
		if e := s.Fault(); e != nil {
			status = e.Status
		}
		if err != nil || status != test.status || bytes.Contains(got, []byte("[DONE]")) != test.done {
			t.Errorf("%s: %v, fault %d, %s", name, err, status, got)
		}
	}
	for name, data := range map[string][]byte{
		"within a frame":   append(bytes.Clone(start), text[:len(text)/2]...),
		"within a prelude": append(bytes.Clone(start), text[:5]...),
		"wrong sum":        append(bytes.Clone(start), flipped...),
		"too long":         append(bytes.Clone(start), 0x7f, 0xff, 0xff, 0xff, 0, 0, 0, 0, 0, 0, 0, 0),
	} {
		if _, err := io.ReadAll(prepared(t, v1alpha1.SchemaBedrock).Stream(bytes.NewReader(data), 1<<20)); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}

// Credentials never get into a text, and those that cannot be sent are none.
func TestCredentials(t *testing.T) {
	c := provider.Credentials{APIKey: "hush", SecretAccessKey: "hush"}
	for _, format := range []string{"%v", "%+v", "%#v", "%s"} {
		if s := fmt.Sprintf(format, c); strings.Contains(s, "hush") {
			t.Errorf("%s prints %s", format, s)
		}
	}
	out := provider.Target{Schema: v1alpha1.SchemaOpenAI, Model: "m"}
	for _, key := range []string{"", " \n", "a\nb", "a\x00b", "ä"} {
		if _, e := out.Prepare(callOf(t, false, `"n":1`), provider.Credentials{APIKey: key}, time.Now()); e == nil || e.Status != http.StatusBadGateway {
			t.Errorf("key %q: %v", key, e)
		}
	}
}

// The endpoint is what SDKs take for a base URL.
func TestURL(t *testing.T) {
	for _, test := range []struct {
		target provider.Target
		want   string
	}{
		{provider.Target{Schema: v1alpha1.SchemaOpenAI, Model: "m"}, "https://api.openai.com/v1/chat/completions"},
		{provider.Target{Schema: v1alpha1.SchemaAnthropic, Model: "m"}, "https://api.anthropic.com/v1/messages"},
		{provider.Target{Schema: v1alpha1.SchemaBedrock, Region: "us-east-1", Model: "m"}, "https://bedrock-runtime.us-east-1.amazonaws.com/openai/v1/chat/completions"},
		{provider.Target{Schema: v1alpha1.SchemaAzureOpenAI, Endpoint: "https://x.openai.azure.com/", Model: "d"}, "https://x.openai.azure.com/openai/deployments/d/chat/completions?api-version=2024-10-21"},
		{provider.Target{Schema: v1alpha1.SchemaAzureOpenAI, Endpoint: "https://x.openai.azure.com/openai/v1", Model: "d"}, "https://x.openai.azure.com/openai/v1/chat/completions"},
		{provider.Target{Schema: v1alpha1.SchemaDatabricks, Endpoint: "https://w.databricks.com", Model: "m"}, "https://w.databricks.com/serving-endpoints/chat/completions"},
		{provider.Target{Schema: v1alpha1.SchemaOpenAICompatible, Endpoint: "https://h/openai/v1", Model: "m"}, "https://h/openai/v1/chat/completions"},
		{provider.Target{Schema: v1alpha1.SchemaOpenAICompatible, Endpoint: "http://h", Model: "m"}, "http://h/v1/chat/completions"},
	} {
		r, e := test.target.Prepare(callOf(t, false, `"n":1`), provider.Credentials{APIKey: "k"}, time.Now())
		if e != nil || r.URL.String() != test.want {
			t.Errorf("%v: %v", test.want, r.URL)
		}
	}
	arn := provider.Target{Schema: v1alpha1.SchemaBedrock, Region: "us-east-1", Model: "arn:aws:bedrock:us-east-1:1:inference-profile/a.b-v1:0"}
	r, e := arn.Prepare(callOf(t, true, `"n":1`), targets[4].keys, time.Now())
	if want := "https://bedrock-runtime.us-east-1.amazonaws.com/model/arn%3Aaws%3Abedrock%3Aus-east-1%3A1%3Ainference-profile%2Fa.b-v1%3A0/converse-stream"; e != nil || r.URL.String() != want {
		t.Errorf("%v %v", e, r.URL)
	}
}

// What a provider cannot do is refused before anything leaves.
func TestCannot(t *testing.T) {
	for _, schema := range []v1alpha1.ProviderSchema{v1alpha1.SchemaAnthropic, v1alpha1.SchemaBedrock} {
		out := provider.Target{Schema: schema, Region: "us-east-1", Model: "m"}
		in := callOf(t, false, `"n":3`)
		if _, e := out.Prepare(in, targets[4].keys, time.Now()); schema == v1alpha1.SchemaBedrock && (e == nil || e.Status != 400) {
			t.Errorf("%s: three answers: %v", schema, e)
		}
		in.Route = openai.RouteEmbeddings
		if _, e := out.Prepare(in, provider.Credentials{APIKey: "k", AccessKeyID: "a", SecretAccessKey: "s"}, time.Now()); schema == v1alpha1.SchemaAnthropic && (e == nil || e.Status != 400) {
			t.Errorf("%s: embeddings: %v", schema, e)
		}
	}
}

// FuzzStream gives arbitrary bytes to both translations: they end, never with
// [DONE] for what has no end, and what they make can be read.
func FuzzStream(f *testing.F) {
	f.Add(true, bytes.Join([][]byte{
		fake.Frame("event", "messageStart", `{"role":"assistant"}`), fake.Frame("event", "contentBlockStart", `{"start":{"toolUse":{"toolUseId":"1","name":"f"}}}`),
		fake.Frame("event", "contentBlockDelta", `{"delta":{"toolUse":{"input":"{}"}}}`), fake.Frame("event", "contentBlockStop", `{}`),
		fake.Frame("event", "messageStop", `{"stopReason":"tool_use"}`), fake.Frame("event", "metadata", `{"usage":{"inputTokens":1,"outputTokens":1}}`),
	}, nil))
	f.Add(true, fake.Frame("exception", "throttlingException", `{"message":"x"}`))
	f.Add(false, []byte("event: message_start\ndata: {\"type\":\"message_start\",\"message\":{\"usage\":{\"input_tokens\":1}}}\n\n"))
	f.Add(false, []byte("data:{\"type\":\"error\",\"error\":{\"type\":\"overloaded_error\",\"message\":\"x\"}}\n\n"))
	f.Fuzz(func(t *testing.T, aws bool, data []byte) {
		schema := v1alpha1.SchemaAnthropic
		if aws {
			schema = v1alpha1.SchemaBedrock
		}
		s := prepared(t, schema).Stream(bytes.NewReader(data), 64<<10)
		out, err := io.ReadAll(io.LimitReader(s, 64<<20))
		if err != nil {
			return
		}
		events := openai.NewReader(bytes.NewReader(out), 64<<20)
		for {
			e, err := events.Next()
			if err == io.EOF {
				return
			}
			var chunk openai.Chunk
			if err != nil || e.Cut || !e.Done() && chunk.Parse(e.Data) != nil {
				t.Fatalf("%v in %q", err, e.Raw)
			}
		}
	})
}

// FuzzPayload gives arbitrary payloads to whole frames, which is as deep as the
// sums let nobody else get.
func FuzzPayload(f *testing.F) {
	f.Add("contentBlockDelta", `{"delta":{"text":"x"}}`, "metadata", `{"usage":{"inputTokens":1}}`)
	f.Add("contentBlockStart", `{"start":{"toolUse":{"toolUseId":"1","name":"f"}}}`, "messageStop", `{"stopReason":"x"}`)
	f.Fuzz(func(t *testing.T, one, first, two, second string) {
		if len(one)+len(two) > 100 || len(first)+len(second) > 8<<10 {
			return
		}
		s := prepared(t, v1alpha1.SchemaBedrock).Stream(bytes.NewReader(append(fake.Frame("event", one, first), fake.Frame("event", two, second)...)), 64<<10)
		out, err := io.ReadAll(s)
		if err != nil {
			t.Fatal(err)
		}
		events := openai.NewReader(bytes.NewReader(out), 1<<20)
		for {
			e, err := events.Next()
			if err == io.EOF {
				return
			}
			var chunk openai.Chunk
			if err != nil || e.Cut || !e.Done() && chunk.Parse(e.Data) != nil {
				t.Fatalf("%v in %q", err, e.Raw)
			}
		}
	})
}

// FuzzPrepare gives arbitrary chat bodies to every kind of provider: what comes
// out is JSON without what must stay.
func FuzzPrepare(f *testing.F) {
	f.Add([]byte(`{"model":"m","messages":` + conversation + `,` + leaking + `,` + weather + `}`))
	f.Add([]byte(`{"model":"m","messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"data:image/png;base64,AAAA"}}]}],"stop":["a"," "],"response_format":{"type":"json_schema","json_schema":{"schema":{}}}}`))
	f.Fuzz(func(t *testing.T, body []byte) {
		var r openai.Request
		if r.Parse(openai.RouteChat, body, 0) != nil {
			return
		}
		for _, target := range targets {
			out := provider.Target{Schema: target.schema, Region: fake.Region, Model: target.model, MaxTokensCap: 100, Endpoint: "https://x.test"}
			p, e := out.Prepare(&provider.Call{Body: &r.Body, Stream: r.Stream, Model: r.Model}, target.keys, time.Unix(1, 0))
			if e != nil {
				continue
			}
			var o openai.Object
			if err := o.Parse(p.Body, 1000); err != nil {
				t.Fatalf("%s: %v in %s", target.name, err, p.Body)
			}
			for _, name := range []string{"cache_salt", "user", "priority", "metadata", "kv_transfer_params"} {
				if o.Get(name).Kind != openai.Absent {
					t.Fatalf("%s gets %s: %s", target.name, name, p.Body)
				}
			}
		}
	})
}

// Compressed errors are the caller's to open; this is how the fakes send them.
func TestFakeCompresses(t *testing.T) {
	s := fake.New(v1alpha1.SchemaOpenAI, "gpt-9")
	defer s.Close()
	s.SetFault(fake.Broken)
	out := provider.Target{Schema: v1alpha1.SchemaOpenAI, Endpoint: s.URL, Model: "gpt-9"}
	r, e := out.Prepare(callOf(t, false, `"n":1`), targets[0].keys, time.Now())
	if e != nil {
		t.Fatal(e)
	}
	resp := post(t, r)
	z, err := gzip.NewReader(resp.Body)
	if err != nil || resp.StatusCode != 500 {
		t.Fatal(err, resp.StatusCode)
	}
	if text, err := io.ReadAll(z); err != nil || !bytes.Contains(text, []byte(fake.Account)) {
		t.Errorf("%s %v", text, err)
	}
}

// Completions and embeddings go to providers of OpenAI's API, cleaned alike.
func TestOtherRoutes(t *testing.T) {
	for _, test := range []struct {
		route      openai.Route
		schema     v1alpha1.ProviderSchema
		body, want string
		path       string
	}{
		{openai.RouteCompletions, v1alpha1.SchemaOpenAI, `{"model":"big","prompt":"x","max_tokens":5000,"user":"u","top_k":3}`, `{"model":"m","prompt":"x","max_tokens":100}`, "/v1/completions"},
		{openai.RouteCompletions, v1alpha1.SchemaOpenAICompatible, `{"model":"big","prompt":[1,2],"top_k":3,"cache_salt":"s"}`, `{"model":"m","prompt":[1,2],"top_k":3,"max_tokens":100}`, "/v1/completions"},
		{openai.RouteEmbeddings, v1alpha1.SchemaAzureOpenAI, `{"model":"big","input":["a"],"encoding_format":"base64","user":"u"}`, `{"input":["a"],"encoding_format":"base64"}`, "/openai/deployments/m/embeddings"},
		{openai.RouteEmbeddings, v1alpha1.SchemaDatabricks, `{"model":"big","input":"a","truncate_prompt_tokens":5}`, `{"model":"m","input":"a"}`, "/serving-endpoints/embeddings"},
	} {
		var o openai.Object
		if err := o.Parse([]byte(test.body), 0); err != nil {
			t.Fatal(err)
		}
		out := provider.Target{Schema: test.schema, Endpoint: "https://x.test", Model: "m", MaxTokensCap: 100}
		r, e := out.Prepare(&provider.Call{Route: test.route, Body: &o}, provider.Credentials{APIKey: "k"}, time.Now())
		if e != nil || string(r.Body) != test.want || r.URL.Path != test.path {
			t.Errorf("%s: %v %s %s", test.body, e, r.URL, r.Body)
		}
	}
}

// BenchmarkPrepare makes requests of a conversation of 64 KB, and BenchmarkStream
// translates events: go test -bench . -benchmem ./internal/provider
func BenchmarkPrepare(b *testing.B) {
	turn := `{"role":"user","content":"` + strings.Repeat("word ", 200) + `"},{"role":"assistant","content":"` + strings.Repeat("word ", 200) + `"},`
	text := `{"model":"big","max_tokens":10,` + weather + `,"messages":[` + strings.Repeat(turn, 32) + `{"role":"user","content":"x"}]}`
	var o openai.Object
	if err := o.Parse([]byte(text), 0); err != nil {
		b.Fatal(err)
	}
	for _, target := range targets[1:5] {
		out := provider.Target{Schema: target.schema, Endpoint: "https://x.test", Region: fake.Region, Model: target.model}
		b.Run(target.name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if _, e := out.Prepare(&provider.Call{Body: &o}, target.keys, time.Unix(1e9, 0)); e != nil {
					b.Fatal(e)
				}
			}
		})
	}
}

// A ping is nothing for the client, and tells who waits that the provider is alive: it
// may think for longer than a stream may be idle.
func TestPingsAreHeardOf(t *testing.T) {
	out := provider.Target{Schema: v1alpha1.SchemaAnthropic, Model: "m"}
	r, e := out.Prepare(callOf(t, true, `"temperature":1`), provider.Credentials{APIKey: "k"}, time.Now())
	if e != nil {
		t.Fatal(e)
	}
	const ping, word = "event: ping\ndata: {\"type\": \"ping\"}\n\n", "data: {\"type\":\"content_block_delta\",\"delta\":{\"type\":\"text_delta\",\"text\":\"word\"}}\n\n"
	s, b := r.Stream(strings.NewReader(ping+": alive\n\n"+word+ping), 1<<20), make([]byte, 1<<10)
	for i, want := range []string{"", "", `{"content":"word"}`, ""} {
		n, err := s.Read(b)
		if err != nil || !strings.Contains(string(b[:n]), want) || (n == 0) != (want == "") {
			t.Errorf("read %d: %q, %v", i, b[:n], err)
		}
	}
	if n, err := s.Read(b); n > 0 || err != io.EOF {
		t.Errorf("at the end %d, %v", n, err)
	}
}

// What a worker gets of a Messages client's tools, and OpenAI's API has not, goes to no
// provider that would refuse it.
func TestToolsOfMessages(t *testing.T) {
	var o openai.Object
	const tool = `{"type":"function","function":{"name":"f","parameters":{"defer_loading":1}}`
	if err := o.Parse([]byte(`{"model":"big","messages":[{"role":"user","content":[{"type":"text","text":"tool_reference"}]},`+
		`{"role":"tool","tool_call_id":"1","content":[{"type":"tool_reference","name":"f"},{"type":"text","text":"x"}]}],"tools":[`+tool+`,"defer_loading":true},`+tool+`}]}`), 0); err != nil {
		t.Fatal(err)
	}
	for schema, want := range map[v1alpha1.ProviderSchema]string{
		v1alpha1.SchemaOpenAI: `{"model":"m","messages":[{"role":"user","content":[{"type":"text","text":"tool_reference"}]},` +
			`{"role":"tool","tool_call_id":"1","content":[{"type":"text","text":"f"},{"type":"text","text":"x"}]}],"tools":[` + tool + `},` + tool + `}]}`,
		v1alpha1.SchemaOpenAICompatible: strings.Replace(string(o.Raw()), "big", "m", 1),
	} {
		out := provider.Target{Schema: schema, Endpoint: "https://x", Model: "m"}
		r, e := out.Prepare(&provider.Call{Route: openai.RouteChat, Body: &o, Model: "big"}, provider.Credentials{APIKey: "k"}, time.Now())
		if e != nil {
			t.Fatal(e)
		}
		if string(r.Body) != want {
			t.Errorf("%s got %s", schema, r.Body)
		}
	}
}

func BenchmarkStream(b *testing.B) {
	const n = 1000
	event := "event: content_block_delta\ndata: {\"type\":\"content_block_delta\",\"index\":0,\"delta\":{\"type\":\"text_delta\",\"text\":\"word \"}}\n\n"
	frame := fake.Frame("event", "contentBlockDelta", `{"contentBlockIndex":0,"delta":{"text":"word "},"p":"abcdefghijklmnop"}`)
	for schema, data := range map[v1alpha1.ProviderSchema][]byte{v1alpha1.SchemaAnthropic: bytes.Repeat([]byte(event), n), v1alpha1.SchemaBedrock: bytes.Repeat(frame, n)} {
		out := provider.Target{Schema: schema, Region: fake.Region, Model: "m"}
		var o openai.Object
		if err := o.Parse([]byte(`{"messages":[{"role":"user","content":"x"}]}`), 0); err != nil {
			b.Fatal(err)
		}
		keys := provider.Credentials{APIKey: "k"}
		if schema == v1alpha1.SchemaBedrock {
			keys = targets[4].keys
		}
		r, e := out.Prepare(&provider.Call{Body: &o, Stream: true}, keys, time.Now())
		if e != nil {
			b.Fatal(e)
		}
		b.Run(string(schema), func(b *testing.B) {
			for b.Loop() {
				if _, err := io.Copy(io.Discard, r.Stream(bytes.NewReader(data), 1<<20)); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/n, "ns/event")
		})
	}
}

// A short-lived token goes into the bearer's place, also where a key does not.
func TestBearer(t *testing.T) {
	for _, schema := range []v1alpha1.ProviderSchema{v1alpha1.SchemaAzureOpenAI, v1alpha1.SchemaDatabricks} {
		s := fake.New(schema, "m")
		s.SetToken("token-1")
		out := provider.Target{Schema: schema, Endpoint: s.URL, Model: "m"}
		r, e := out.Prepare(callOf(t, false, `"temperature":1`), provider.Credentials{Bearer: "token-1\n", ClientID: "id", ClientSecret: "never sent"}, time.Now())
		if e != nil {
			t.Fatal(e)
		}
		if resp := post(t, r); resp.StatusCode != http.StatusOK || r.Header.Get("Api-Key") != "" {
			t.Errorf("%s: %d, refused %v", schema, resp.StatusCode, s.Refused())
		}
		s.Close()
	}
	for _, schema := range []v1alpha1.ProviderSchema{v1alpha1.SchemaOpenAI, v1alpha1.SchemaAnthropic, v1alpha1.SchemaBedrock} {
		out := provider.Target{Schema: schema, Region: fake.Region, Model: "m"}
		if _, e := out.Prepare(callOf(t, false, `"temperature":1`), provider.Credentials{Bearer: "token-1"}, time.Now()); e == nil {
			t.Errorf("%s takes a token", schema)
		}
	}
}
