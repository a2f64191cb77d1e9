package rpc

import (
	"context"
	"net/http"

	"connectrpc.com/connect"
)

// Bearer is a client option that shows a token with every call; an empty one is not
// shown.
func Bearer(token string) connect.ClientOption { return connect.WithInterceptors(bearer(token)) }

type bearer string

var _ connect.Interceptor = bearer("")

func (b bearer) show(h http.Header) {
	if b != "" {
		h.Set("Authorization", "Bearer "+string(b))
	}
}

func (b bearer) WrapUnary(next connect.UnaryFunc) connect.UnaryFunc {
	return func(ctx context.Context, r connect.AnyRequest) (connect.AnyResponse, error) {
		if r.Spec().IsClient {
			b.show(r.Header())
		}
		return next(ctx, r)
	}
}

func (b bearer) WrapStreamingClient(next connect.StreamingClientFunc) connect.StreamingClientFunc {
	return func(ctx context.Context, s connect.Spec) connect.StreamingClientConn {
		c := next(ctx, s)
		b.show(c.RequestHeader())
		return c
	}
}

func (b bearer) WrapStreamingHandler(next connect.StreamingHandlerFunc) connect.StreamingHandlerFunc {
	return next
}
