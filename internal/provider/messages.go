package provider

import (
	"regexp"

	"github.com/kinference/kinference/internal/anthropic"
	"github.com/kinference/kinference/internal/openai"
)

// anthropicVersion is the version of the Messages API that is spoken.
const anthropicVersion = "2023-06-01"

func (t *Target) prepareMessages(out *Request, in *Call, c *Credentials) *openai.Error {
	if e := onlyChat(in); e != nil {
		return e
	}
	u, e := t.base("https://api.anthropic.com", "/v1")
	if e != nil {
		return e
	}
	u.Path += "/messages"
	out.URL = u
	out.Header.Set("X-Api-Key", c.APIKey)
	out.Header.Set("Anthropic-Version", anthropicVersion)
	if in.Messages != nil {
		return t.ownMessages(out, in)
	}
	out.Body, out.Dropped, e = anthropic.AppendMessages(nil, in.Body, t.limits())
	return e
}

// ownMessages sends what a client of the same API has sent.
func (t *Target) ownMessages(out *Request, in *Call) *openai.Error {
	limit := t.MaxTokensCap
	for _, name := range []string{"max_tokens", "max_completion_tokens"} { // our own limits are in the body that was made of it
		if n, ok := in.Body.Get(name).Int(); ok && n > 0 && (limit == 0 || n < int64(limit)) {
			limit = int(min(n, 1<<30))
		}
	}
	var err error
	if out.Body, out.Dropped, err = anthropic.OwnBody(in.Messages, t.Model, limit); err != nil {
		return openai.Invalid("", "", "The request cannot be sent to this model.")
	}
	if version.MatchString(in.Version) {
		out.Header.Set("Anthropic-Version", in.Version)
	}
	if beta.MatchString(in.Beta) {
		out.Header.Set("Anthropic-Beta", in.Beta)
	}
	return nil
}

// version and beta are what the client's headers may be.
var (
	version = regexp.MustCompile(`^[0-9]{4}-[0-9]{2}-[0-9]{2}$`)
	beta    = regexp.MustCompile(`^[A-Za-z0-9._, -]{1,512}$`)
)

func (t *Target) limits() anthropic.Limits {
	return anthropic.Limits{Model: t.Model, Cap: t.MaxTokensCap}
}

// completion says how an answer is made out.
func (in *Call) completion() anthropic.Completion {
	return anthropic.Completion{ID: "chatcmpl-" + in.ID, Model: in.Model, Created: in.Created, Own: in.Messages != nil}
}
