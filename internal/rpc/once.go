package rpc

import (
	"context"
	"errors"
	"net"
	"slices"

	"connectrpc.com/connect"
)

// Once is a client option for procedures, such as /kinference.admin.v1.AdminService/CreateKey,
// that have an effect each time that they are called: a call of one that may have
// reached a replica is not repeated at another one. The caller gets the error.
func Once(procedures ...string) connect.ClientOption {
	return connect.WithInterceptors(connect.UnaryInterceptorFunc(func(next connect.UnaryFunc) connect.UnaryFunc {
		return func(ctx context.Context, r connect.AnyRequest) (connect.AnyResponse, error) {
			if slices.Contains(procedures, r.Spec().Procedure) {
				ctx = context.WithValue(ctx, onceKey{}, true)
			}
			return next(ctx, r)
		}
	}))
}

type onceKey struct{}

func once(ctx context.Context) bool { return ctx.Value(onceKey{}) != nil }

// unsent tells that a call that failed has not left: there was no connection.
func unsent(err error) bool {
	var op *net.OpError
	return errors.As(err, &op) && op.Op == "dial"
}
