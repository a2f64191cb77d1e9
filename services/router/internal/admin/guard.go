package admin

import (
	"cmp"
	"context"
	"errors"
	"net/http"
	"strings"
	"time"

	"connectrpc.com/connect"

	"github.com/kinference/kinference/internal/rpc"
	"github.com/kinference/kinference/services/router/internal/access"
)

// guard lets calls through whose token allows them. What is refused is refused in
// the caller's protocol, before a byte of its message is read.
func guard(s Settings, needs map[string]access.Permission, next http.Handler) http.Handler {
	refuse := connect.NewErrorWriter()
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		need, known := needs[r.URL.Path]
		if !known { // not a call at all: nothing is told without a token
			need = access.Permission{Resource: "unknown", Verb: "unknown"}
		}
		caller, err := s.Access.Check(r.Context(), bearer(r.Header), need)
		changes := known && need.Role() == access.Operate
		if err != nil {
			if s.Refused != nil {
				s.Refused(outcomeOf(err))
			}
			if caller != nil {
				s.Audit.write(entry{caller, need, r.URL.Path, outcomeOf(err)})
			}
			if werr := refuse.Write(w, r, refusal(s.Access, err)); werr != nil {
				return // the caller is gone
			}
			return
		}
		if need.Verb == "watch" {
			ctx, stop := s.whileAllowed(r, need)
			defer stop()
			r = r.WithContext(ctx)
		}
		if !changes {
			next.ServeHTTP(w, r)
			return
		}
		ctx := context.WithValue(r.Context(), outcomeKey{}, new(error))
		next.ServeHTTP(w, r.WithContext(ctx))
		s.Audit.write(entry{caller, need, r.URL.Path, outcomeOf(*ctx.Value(outcomeKey{}).(*error))})
	})
}

// whileAllowed is the context of a stream, which ends when its token no longer
// allows it. While that cannot be found out the stream goes on.
func (s *Settings) whileAllowed(r *http.Request, need access.Permission) (ctx context.Context, stop func()) {
	ctx, cancel := context.WithCancelCause(r.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		tick := time.NewTicker(cmp.Or(s.Recheck, 10*time.Second))
		defer tick.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
			if _, err := s.Access.Check(ctx, bearer(r.Header), need); err != nil && !errors.Is(err, access.ErrAway) && ctx.Err() == nil {
				cancel(refusal(s.Access, err))
			}
		}
	}()
	return ctx, func() { cancel(nil); <-done }
}

// bearer is the token of a call; empty if there is none.
func bearer(h http.Header) string {
	scheme, token, _ := strings.Cut(h.Get("Authorization"), " ")
	if !strings.EqualFold(scheme, "bearer") {
		return ""
	}
	return strings.TrimSpace(token)
}

func refusal(sources access.Sources, err error) *connect.Error {
	switch {
	case errors.Is(err, access.ErrDenied):
		return rpc.Error(connect.CodePermissionDenied, "the token does not allow this call", 0)
	case errors.Is(err, access.ErrAway):
		return rpc.Error(connect.CodeUnavailable, "the token cannot be checked now", time.Second)
	case len(sources) == 0:
		return rpc.Error(connect.CodeUnauthenticated, "nobody is let in: the router has no admin tokens and no Kubernetes to ask", 0)
	}
	return rpc.Error(connect.CodeUnauthenticated, "a good bearer token is needed", 0)
}

// outcomeKey is of the context value in which a call leaves its error.
type outcomeKey struct{}

// note leaves the error of a call for the audit log.
func note(ctx context.Context, err error) {
	if p, ok := ctx.Value(outcomeKey{}).(*error); ok {
		*p = err
	}
}

func outcomeOf(err error) string {
	switch {
	case err == nil:
		return "ok"
	case errors.Is(err, access.ErrDenied):
		return "denied"
	case errors.Is(err, access.ErrAway):
		return "unavailable"
	case errors.Is(err, access.ErrUnknown):
		return "unauthenticated"
	}
	return connect.CodeOf(err).String()
}

// outcomes notes how calls end.
type outcomes struct{}

var _ connect.Interceptor = outcomes{}

func (outcomes) WrapUnary(next connect.UnaryFunc) connect.UnaryFunc {
	return func(ctx context.Context, r connect.AnyRequest) (connect.AnyResponse, error) {
		resp, err := next(ctx, r)
		note(ctx, err)
		return resp, err
	}
}

func (outcomes) WrapStreamingClient(next connect.StreamingClientFunc) connect.StreamingClientFunc {
	return next
}

func (outcomes) WrapStreamingHandler(next connect.StreamingHandlerFunc) connect.StreamingHandlerFunc {
	return func(ctx context.Context, c connect.StreamingHandlerConn) error {
		err := next(ctx, c)
		note(ctx, err)
		return err
	}
}
