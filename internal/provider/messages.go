package provider

import (
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
	if out.Body, out.Dropped, e = anthropic.AppendMessages(nil, in.Body, t.limits()); e != nil {
		return e
	}
	out.Header.Set("X-Api-Key", c.APIKey)
	out.Header.Set("Anthropic-Version", anthropicVersion)
	return nil
}

func (t *Target) limits() anthropic.Limits {
	return anthropic.Limits{Model: t.Model, Cap: t.MaxTokensCap}
}

// completion says how an answer is made out.
func (in *Call) completion() anthropic.Completion {
	return anthropic.Completion{ID: "chatcmpl-" + in.ID, Model: in.Model, Created: in.Created}
}
