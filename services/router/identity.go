package router

import (
	"context"

	"connectrpc.com/connect"

	"github.com/kinference/kinference/internal/rpc"
	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
)

// ReviewToken implements routerv1connect.RouterServiceHandler.
func (s *server) ReviewToken(context.Context, *routerv1.ReviewTokenRequest) (*routerv1.ReviewTokenResponse, error) {
	return nil, rpc.Error(connect.CodeFailedPrecondition, "this router does not use the Kubernetes API", 0)
}
