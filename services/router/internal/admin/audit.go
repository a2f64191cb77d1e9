package admin

import (
	"context"
	"io"
	"log/slog"

	"github.com/kinference/kinference/services/router/internal/access"
)

// Audit writes who did what: a line of JSON per call. It has no contents of calls
// and no tokens. Use NewAudit; nil writes nothing.
type Audit struct{ log *slog.Logger }

// NewAudit returns an audit log that appends to w, line by line.
func NewAudit(w io.Writer) *Audit {
	return &Audit{slog.New(slog.NewJSONHandler(w, nil))}
}

type entry struct {
	caller    *access.Caller
	need      access.Permission
	procedure string
	outcome   string
}

func (a *Audit) write(e entry) {
	if a == nil {
		return
	}
	a.log.LogAttrs(context.Background(), slog.LevelInfo, "admin call", slog.String("who", e.caller.Name), slog.String("source", e.caller.Source),
		slog.String("procedure", e.procedure), slog.String("resource", e.need.Resource), slog.String("verb", e.need.Verb), slog.String("outcome", e.outcome))
}
