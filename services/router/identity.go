package router

import (
	"context"
	"time"

	"connectrpc.com/connect"

	"github.com/kinference/kinference/internal/rpc"
	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
)

const (
	// reviewTime bounds what the Kubernetes API may take for a token.
	reviewTime = 3 * time.Second
	// maxToken bounds a token in bytes.
	maxToken = 16 << 10
)

// ReviewToken implements routerv1connect.RouterServiceHandler. Ingress remembers
// the answer for a while.
func (s *server) ReviewToken(ctx context.Context, req *routerv1.ReviewTokenRequest) (*routerv1.ReviewTokenResponse, error) {
	switch {
	case s.reviewer == nil:
		return nil, rpc.Error(connect.CodeFailedPrecondition, "this router does not use the Kubernetes API", 0)
	case req.GetToken() == "" || len(req.GetToken()) > maxToken || req.GetAudience() == "":
		return nil, rpc.Error(connect.CodeInvalidArgument, "want a token and an audience", 0)
	}
	ctx, cancel := context.WithTimeout(ctx, reviewTime)
	defer cancel()
	namespace, name, ok, err := s.reviewer.Account(ctx, req.GetToken(), req.GetAudience())
	if err != nil {
		if now, last := s.now().Unix(), s.reviewSaid.Load(); now-last >= 60 && s.reviewSaid.CompareAndSwap(last, now) { // anybody can make one fail
			s.log.Warn("token of a ServiceAccount was not reviewed", "err", err)
		}
		return nil, rpc.Error(connect.CodeUnavailable, "the Kubernetes API did not answer", retryDelay)
	}
	return &routerv1.ReviewTokenResponse{Authenticated: ok, Namespace: namespace, Name: name}, nil
}
