package provider

import (
	"log/slog"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/kinference/kinference/api/v1alpha1"
	"github.com/kinference/kinference/internal/openai"
)

// Target is one model at one provider.
type Target struct {
	Schema v1alpha1.ProviderSchema
	// Endpoint is the base URL, as SDKs take it; without a path the one that the
	// provider's API has by default is meant. Empty: the provider's public one.
	Endpoint string
	// Region of Bedrock.
	Region string
	// Model is the provider's name for it: at Azure that of the deployment.
	Model string
	// MaxTokensCap bounds the output of each request; 0: as the client asks.
	MaxTokensCap int
}

// Credentials pay for a request. Which of them are needed depends on the
// provider; see [Target.Prepare]. They print as nothing.
type Credentials struct {
	APIKey                                     string
	AccessKeyID, SecretAccessKey, SessionToken string
	// Bearer is a short-lived token in place of an APIKey, for AzureOpenAI and
	// Databricks.
	Bearer string
	// ClientID and ClientSecret are what such a token is got for. They are never
	// sent with a request.
	ClientID, ClientSecret string
}

// String implements fmt.Stringer, so that no credentials get into a text.
func (Credentials) String() string { return "[credentials]" }

// GoString implements fmt.GoStringer.
func (Credentials) GoString() string { return "[credentials]" }

// LogValue implements slog.LogValuer.
func (Credentials) LogValue() slog.Value { return slog.StringValue("[credentials]") }

// Call is a request of a client on its way out.
type Call struct {
	Route openai.Route
	// Body was accepted by openai.Request.
	Body   *openai.Object
	Stream bool
	// Model is the name that the client used, ID names its answer if the
	// provider does not, Created is a Unix time for the same.
	Model, ID string
	Created   int64
	// Messages is the body that the client of the Messages API sent, of which Body was
	// made, for a provider of the same API; nil for clients of other APIs. Version and
	// Beta are the client's own headers.
	Messages      *openai.Object
	Version, Beta string
}

// Request is what to send, by POST.
type Request struct {
	URL    *url.URL
	Header http.Header
	Body   []byte
	// Dropped names members of the client's body that are not sent, for a log.
	Dropped []string

	target *Target
	call   *Call
	kind   kind
}

// kind is the way in which a target is spoken to.
type kind int

const (
	chat     kind = iota // OpenAI's API, whoever serves it
	messages             // Anthropic's
	converse             // Bedrock's
)

func (t *Target) kind(c *Credentials) kind {
	switch t.Schema {
	case v1alpha1.SchemaAnthropic:
		return messages
	case v1alpha1.SchemaBedrock:
		if c.APIKey == "" {
			return converse
		}
	}
	return chat
}

// Prepare makes the request. now is the time that it is signed for, so a
// request that is sent again is prepared again. The error is the client's: it
// asks for something that the provider cannot do.
//
// OpenAI, AzureOpenAI, Anthropic and Databricks need Credentials.APIKey, and
// OpenAICompatible takes one; for AzureOpenAI and Databricks it may be a Bearer. Bedrock with an APIKey is asked at its door for
// OpenAI's API, and else by Converse, signed with the access key.
func (t *Target) Prepare(in *Call, c Credentials, now time.Time) (*Request, *openai.Error) {
	if e := t.credible(&c); e != nil {
		return nil, e
	}
	out := &Request{Header: http.Header{}, target: t, call: in, kind: t.kind(&c)}
	out.Header.Set("Content-Type", "application/json")
	// Answers are read while they come; a compressed stream would be held back.
	out.Header.Set("Accept-Encoding", "identity")
	out.Header.Set("User-Agent", "kinference")
	out.Header.Set("Accept", "application/json")
	if in.Stream {
		out.Header.Set("Accept", "text/event-stream")
	}
	var e *openai.Error
	switch out.kind {
	case messages:
		e = t.prepareMessages(out, in, &c)
	case converse:
		e = t.prepareConverse(out, in, &c, now)
	default:
		e = t.prepareChat(out, in, &c)
	}
	if e != nil {
		return nil, e
	}
	return out, nil
}

// errCredentials is what a client sees of credentials that are not there.
func errCredentials() *openai.Error {
	return openai.Server(http.StatusBadGateway, openai.CodeUpstream, "The gateway is not set up to use this provider.")
}

// credible checks that the credentials are there, and can be sent in a header.
func (t *Target) credible(c *Credentials) *openai.Error {
	c.APIKey = strings.TrimSpace(c.APIKey) // files end in a newline
	for _, s := range []*string{&c.AccessKeyID, &c.SecretAccessKey, &c.SessionToken, &c.Bearer} {
		*s = strings.TrimSpace(*s)
	}
	for _, s := range []string{c.APIKey, c.Bearer} {
		for i := range len(s) {
			if b := s[i]; b <= ' ' || b >= 0x7f {
				return errCredentials()
			}
		}
	}
	switch {
	case c.APIKey != "", t.Schema == v1alpha1.SchemaOpenAICompatible:
		return nil
	case c.Bearer != "" && (t.Schema == v1alpha1.SchemaAzureOpenAI || t.Schema == v1alpha1.SchemaDatabricks):
		return nil
	case t.Schema == v1alpha1.SchemaBedrock && c.AccessKeyID != "" && c.SecretAccessKey != "":
		return nil
	}
	return errCredentials()
}

// base is the base URL: the endpoint, with path if it has none of its own.
func (t *Target) base(public, path string) (*url.URL, *openai.Error) {
	s := t.Endpoint
	if s == "" {
		s = public
	}
	u, err := url.Parse(s)
	if err != nil || u.Host == "" || u.User != nil || u.Scheme != "https" && u.Scheme != "http" {
		return nil, errCredentials()
	}
	u.Path, u.RawPath = strings.TrimRight(u.Path, "/"), ""
	if u.Path == "" {
		u.Path = path
	}
	return u, nil
}

// onlyChat refuses routes that a provider's API has no counterpart of.
func onlyChat(in *Call) *openai.Error {
	if in.Route != openai.RouteChat {
		return openai.Invalid("", "unsupported_endpoint", "This model can be used by chat completions only.")
	}
	return nil
}
