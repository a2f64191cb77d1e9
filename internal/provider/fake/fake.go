// Package fake has servers that stand for third-party providers in tests.
//
// They are written from the providers' own documents, apart from the code that
// they test, and refuse what the real ones refuse: requests without or with a
// wrong key, with a wrong signature, without the version header, to a path that
// is not there, and bodies with members that the API does not have. Each answers
// the same few words, or the first tool's call, whole or as a stream, and can be
// told to fail in the ways that were seen at real ones. A Server may be used by
// many goroutines.
package fake

import (
	"bytes"
	"compress/gzip"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/kinference/kinference/api/v1alpha1"
)

// What the servers answer, and what they say it cost.
const (
	Text      = "Hello from outside."
	Arguments = `{"city":"Paris"}`
	Prompt    = 12 // with Cached
	Cached    = 4  // of them from the provider's cache
	Output    = 5
	// Account is in the texts of errors, and nobody may get to see it.
	Account = "org-4KfTz9SecretAccount"
	// Key is what the servers let in, unless SetKey says otherwise.
	Key = "test-key-1"
	// Signature is of what Anthropic's model thinks, and no other is taken back.
	Signature = "EqQBCgIYAhIM1gbcDa9GJwZA2b3h"
	// AccessKey is Bedrock's, as in AWS's own examples.
	AccessKey = "AKIDEXAMPLE"
	SecretKey = "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY" // of AccessKey
	Region    = "eu-west-1"                                // where Bedrock is
)

// Fault is a way to fail.
type Fault int

// The faults.
const (
	None       Fault = iota
	Limited          // 429, with Retry-After of 30 s
	Broken           // 500, compressed
	Invalid          // 400, with a text about the account
	TooLong          // 400, for the length of the prompt
	ErrorEvent       // an error event after the first good content
	Cut              // the stream ends after the first content
	Hang             // nothing comes after the first content, or at all if it is no stream
	Redirect         // 307 to elsewhere
	Silent           // the connection is closed without an answer
)

// Seen is a request that was let in.
type Seen struct {
	Path   string
	Proto  string
	Remote string // address of the connection
	Header http.Header
	Body   map[string]any
	Raw    []byte // Body as it came
}

// Server is a provider.
type Server struct {
	*httptest.Server
	schema v1alpha1.ProviderSchema
	model  string

	left atomic.Int64

	mu      sync.Mutex
	key     string
	token   string // let in as a bearer beside the key; see SetToken
	client  [2]string
	given   int // tokens
	fault   Fault
	seen    []Seen
	refused []string
}

// New starts a provider that serves one model. Close it.
func New(schema v1alpha1.ProviderSchema, model string) *Server {
	s := &Server{schema: schema, model: model, key: Key}
	s.Server = httptest.NewServer(http.HandlerFunc(s.serve))
	return s
}

// NewTLS starts one that speaks HTTP/2 over TLS, as real ones do. Its certificate
// is one that only its Client trusts.
func NewTLS(schema v1alpha1.ProviderSchema, model string) *Server {
	s := &Server{schema: schema, model: model, key: Key}
	s.Server = httptest.NewUnstartedServer(http.HandlerFunc(s.serve))
	s.EnableHTTP2 = true
	s.StartTLS()
	return s
}

// SetKey changes the key that is let in.
func (s *Server) SetKey(key string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.key = key
}

// SetFault makes the server fail from now on.
func (s *Server) SetFault(f Fault) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.fault = f
}

// Seen are the requests that were let in.
func (s *Server) Seen() []Seen {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.seen)
}

// Left is how many requests ended while they hung, because the gateway left.
func (s *Server) Left() int { return int(s.left.Load()) }

// Refused says of each request that was not let in what was wrong with it.
func (s *Server) Refused() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.refused)
}

func (s *Server) serve(w http.ResponseWriter, r *http.Request) {
	if s.schema == v1alpha1.SchemaDatabricks && r.URL.Path == "/oidc/v1/token" {
		s.workspaceToken(w, r)
		return
	}
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return
	}
	s.mu.Lock()
	key, fault := s.key, s.fault
	s.mu.Unlock()
	var in map[string]any
	status, why := http.StatusBadRequest, ""
	if r.Method != http.MethodPost {
		status, why = http.StatusMethodNotAllowed, "POST only"
	} else if err := json.Unmarshal(body, &in); err != nil {
		why = "no JSON object"
	} else {
		status, why = s.check(r, key, body, in)
	}
	s.mu.Lock()
	if why != "" {
		s.refused = append(s.refused, why)
	} else {
		s.seen = append(s.seen, Seen{r.URL.RequestURI(), r.Proto, r.RemoteAddr, r.Header.Clone(), in, body})
	}
	s.mu.Unlock()
	if why != "" {
		s.refuse(w, status, why+" ("+Account+")")
		return
	}
	switch fault {
	case Limited:
		w.Header().Set("Retry-After", "30")
		s.refuse(w, http.StatusTooManyRequests, "Rate limit reached for "+s.model+" in organization "+Account)
		return
	case Broken:
		w.Header().Set("Content-Encoding", "gzip")
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(http.StatusInternalServerError)
		z := gzip.NewWriter(w)
		fmt.Fprintf(z, `{"error":{"message":"internal fault of %s"}}`, Account)
		z.Close()
		return
	case Invalid:
		s.refuse(w, http.StatusBadRequest, "Your account "+Account+" may not do this")
		return
	case TooLong:
		w.Header().Set("Content-Encoding", "gzip")
		var b bytes.Buffer
		z := gzip.NewWriter(&b)
		fmt.Fprint(z, `{"error":{"type":"invalid_request_error","message":"prompt is too long: 210000 tokens > 200000 maximum"},"message":"Input is too long for requested model."}`)
		z.Close()
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(http.StatusBadRequest)
		_, _ = w.Write(b.Bytes())
		return
	case Redirect:
		http.Redirect(w, r, "http://127.0.0.1:1/elsewhere", http.StatusTemporaryRedirect)
		return
	case Silent:
		panic(http.ErrAbortHandler)
	case Hang:
		if in["stream"] != true && !strings.HasSuffix(r.URL.Path, "-stream") {
			<-r.Context().Done()
			s.left.Add(1)
			return
		}
	}
	// What no client may get to see.
	w.Header().Set("Openai-Organization", Account)
	w.Header().Set("X-Ratelimit-Remaining-Tokens", "17")
	w.Header().Set("Set-Cookie", "account="+Account)
	s.answer(w, r, in, fault)
}

// check says what is wrong with a request.
func (s *Server) check(r *http.Request, key string, body []byte, in map[string]any) (status int, why string) {
	for name := range r.Header {
		if !slices.Contains([]string{
			"Content-Type", "Content-Length", "Accept", "Accept-Encoding", "User-Agent", "Authorization", "Api-Key", "X-Api-Key", "Anthropic-Version", "Anthropic-Beta",
			"X-Amz-Date", "X-Amz-Security-Token", "Traceparent",
		}, name) {
			return http.StatusBadRequest, "unexpected header " + name
		}
	}
	if !strings.HasPrefix(r.Header.Get("Content-Type"), "application/json") {
		return http.StatusUnsupportedMediaType, "content type"
	}
	bearer := r.Header.Get("Authorization") == "Bearer "+key || s.isToken(r)
	switch s.schema {
	case v1alpha1.SchemaAnthropic:
		switch {
		case r.URL.RequestURI() != "/v1/messages":
			return http.StatusNotFound, "path " + r.URL.RequestURI()
		case r.Header.Get("X-Api-Key") != key:
			return http.StatusUnauthorized, "invalid x-api-key"
		case r.Header.Get("Anthropic-Version") != "2023-06-01":
			return http.StatusBadRequest, "anthropic-version: header is required"
		}
		if _, ok := in["context_management"]; ok && !strings.Contains(r.Header.Get("Anthropic-Beta"), "context-management") {
			return http.StatusBadRequest, "context_management: Extra inputs are not permitted"
		}
		return s.checkMessages(in)
	case v1alpha1.SchemaBedrock:
		if r.URL.Path == "/openai/v1/chat/completions" {
			if !bearer {
				return http.StatusForbidden, "invalid bearer"
			}
			return s.checkChat(in, true)
		}
		if why := checkSignature(r, body); why != "" {
			return http.StatusForbidden, why
		}
		want := "/model/" + strings.ReplaceAll(url.PathEscape(s.model), ":", "%3A")
		if p := r.URL.EscapedPath(); p != want+"/converse" && p != want+"/converse-stream" {
			return http.StatusNotFound, "path " + p
		}
		return s.checkConverse(in)
	case v1alpha1.SchemaAzureOpenAI:
		switch {
		case r.URL.Path != "/openai/deployments/"+s.model+"/chat/completions":
			return http.StatusNotFound, "path " + r.URL.Path
		case r.URL.Query().Get("api-version") == "":
			return http.StatusNotFound, "api-version"
		case s.isToken(r) && r.Header.Get("Api-Key") == "":
		case r.Header.Get("Api-Key") != key:
			return http.StatusUnauthorized, "api-key"
		}
		return s.checkChat(in, false)
	case v1alpha1.SchemaDatabricks:
		if r.URL.RequestURI() != "/serving-endpoints/chat/completions" {
			return http.StatusNotFound, "path " + r.URL.RequestURI()
		}
	default:
		if r.URL.RequestURI() != "/v1/chat/completions" {
			return http.StatusNotFound, "path " + r.URL.RequestURI()
		}
	}
	if !bearer {
		return http.StatusUnauthorized, "Incorrect API key provided"
	}
	return s.checkChat(in, true)
}

func unknown(in map[string]any, known ...string) string {
	for name := range in {
		if !slices.Contains(known, name) {
			return name
		}
	}
	return ""
}

func (s *Server) checkChat(in map[string]any, model bool) (int, string) {
	known := []string{"model", "messages", "stream", "stream_options", "max_tokens", "max_completion_tokens", "temperature", "top_p", "n", "stop", "seed", "tools", "tool_choice", "parallel_tool_calls", "response_format"}
	if s.schema == v1alpha1.SchemaOpenAI {
		known = slices.DeleteFunc(known, func(k string) bool { return k == "max_tokens" }) // as its reasoning models do
	}
	if name := unknown(in, known...); name != "" {
		return http.StatusBadRequest, "Unrecognized request argument supplied: " + name
	}
	if model && in["model"] != s.model {
		return http.StatusNotFound, fmt.Sprint("no model ", in["model"])
	}
	if _, ok := in["stream_options"]; ok && in["stream"] != true {
		return http.StatusBadRequest, "stream_options without stream"
	}
	list, _ := in["messages"].([]any)
	if len(list) == 0 {
		return http.StatusBadRequest, "no messages"
	}
	for _, m := range list {
		m, _ := m.(map[string]any)
		if name := unknown(m, "role", "content", "name", "tool_calls", "tool_call_id", "refusal"); name != "" {
			return http.StatusBadRequest, "unknown member of a message: " + name
		}
	}
	return 0, ""
}

func (s *Server) checkMessages(in map[string]any) (int, string) {
	if name := unknown(in, "model", "messages", "max_tokens", "system", "stream", "temperature", "top_p", "top_k", "stop_sequences", "tools", "tool_choice", "thinking", "output_config", "context_management", "cache_control"); name != "" {
		return http.StatusBadRequest, name + ": Extra inputs are not permitted"
	}
	if n, ok := in["max_tokens"].(float64); !ok || n < 1 {
		return http.StatusBadRequest, "max_tokens: Field required"
	}
	if in["model"] != s.model {
		return http.StatusNotFound, fmt.Sprint("model: ", in["model"])
	}
	return alternate(in["messages"], func(b map[string]any) string {
		if b["type"] == "text" && b["text"] == "" {
			return "text content blocks must be non-empty"
		}
		if b["type"] == "thinking" && b["signature"] != Signature {
			return "Invalid `signature` in `thinking` block"
		}
		return unknown(b, "type", "text", "source", "id", "name", "input", "tool_use_id", "content", "is_error", "thinking", "signature", "cache_control")
	})
}

// alternate checks that messages are of user and assistant in turn.
func alternate(list any, block func(map[string]any) string) (int, string) {
	messages, _ := list.([]any)
	if len(messages) == 0 {
		return http.StatusBadRequest, "messages: at least one message is required"
	}
	last := ""
	for _, m := range messages {
		m, _ := m.(map[string]any)
		role, _ := m["role"].(string)
		if role != "user" && role != "assistant" || role == last || last == "" && role != "user" {
			return http.StatusBadRequest, "messages: roles must alternate"
		}
		last = role
		content, _ := m["content"].([]any)
		if text, ok := m["content"].(string); ok {
			content = []any{map[string]any{"type": "text", "text": text}}
		}
		if len(content) == 0 {
			return http.StatusBadRequest, "messages: content is empty"
		}
		for _, b := range content {
			b, _ := b.(map[string]any)
			if why := block(b); why != "" {
				return http.StatusBadRequest, "content: " + why
			}
		}
	}
	return 0, ""
}

func (s *Server) checkConverse(in map[string]any) (int, string) {
	if name := unknown(in, "messages", "system", "inferenceConfig", "toolConfig", "outputConfig"); name != "" {
		return http.StatusBadRequest, "extraneous key [" + name + "] is not permitted"
	}
	inference, _ := in["inferenceConfig"].(map[string]any)
	if name := unknown(inference, "maxTokens", "temperature", "topP", "stopSequences"); name != "" {
		return http.StatusBadRequest, "extraneous key [" + name + "]"
	}
	return alternate(in["messages"], func(b map[string]any) string {
		if len(b) != 1 {
			return "a block is a union"
		}
		return unknown(b, "text", "image", "toolUse", "toolResult")
	})
}

// refuse answers with an error in the provider's form.
func (s *Server) refuse(w http.ResponseWriter, status int, message string) {
	text, _ := json.Marshal(message)
	body := fmt.Sprintf(`{"error":{"message":%s,"type":"invalid_request_error","param":null,"code":null}}`, text)
	switch s.schema {
	case v1alpha1.SchemaAnthropic:
		kind := map[int]string{401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}[status]
		if kind == "" {
			kind = "invalid_request_error"
		}
		body = fmt.Sprintf(`{"type":"error","error":{"type":%q,"message":%s},"request_id":"req_011"}`, kind, text)
	case v1alpha1.SchemaBedrock:
		body = fmt.Sprintf(`{"message":%s}`, text)
	case v1alpha1.SchemaDatabricks:
		body = fmt.Sprintf(`{"error_code":"BAD_REQUEST","message":%s}`, text)
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_, _ = io.WriteString(w, body)
}
