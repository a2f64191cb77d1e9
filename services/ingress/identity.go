package ingress

import (
	"net/http"
	"time"

	"github.com/kinference/kinference/internal/openai"
	"github.com/kinference/kinference/services/ingress/internal/catalog"
	"github.com/kinference/kinference/services/ingress/internal/identity"
)

// admission is who sends a request, and under which catalog it is served from
// beginning to end.
type admission struct {
	view   *catalog.View
	caller *identity.Caller
	path   string // without the backend's prefix
}

// admit finds out who calls. What is wrong has been answered when it is nil.
func (v *server) admit(w http.ResponseWriter, r *http.Request) *admission {
	view := v.view.Load()
	if view == nil {
		return &admission{path: r.URL.Path}
	}
	caller, path, refusal := v.identity.Caller(view, r)
	if refusal != nil {
		w.Header().Set("X-Request-Id", v.requestID(r))
		refuse(r.URL.Path, refusal).Write(w)
		return nil
	}
	return &admission{view, caller, path}
}

// model is what the caller may use under a name; nil for nothing.
func (a *admission) model(name string) *catalog.Model {
	if b := a.caller.Backend; b != nil {
		return b.Model(name)
	}
	return a.view.Model(name)
}

// models are all that the caller may use, by name.
func (a *admission) models() []*catalog.Model {
	if b := a.caller.Backend; b != nil {
		return b.Models
	}
	return a.view.Models
}

// starting is the answer before there is a catalog.
func starting() *openai.Error {
	return openai.Overloaded("The gateway is starting. Try again later.", time.Second)
}

// answer is an error in the form of a dialect.
type answer interface{ Write(http.ResponseWriter) }

// refuse puts a refusal into the form of the dialect that is spoken at a path.
// The path may still have a backend's prefix.
func refuse(_ string, r *identity.Refusal) answer {
	return &openai.Error{Status: r.Status, Type: openai.TypeInvalidRequest, Code: r.Code, Message: r.Message, RetryAfter: r.RetryAfter}
}
