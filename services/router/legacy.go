package router

import (
	"context"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	"github.com/kinference/kinference/internal/rpc"
	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
)

// Explain implements routerv1connect.RouterServiceHandler until callers have moved.
func (s *server) Explain(_ context.Context, req *routerv1.ExplainRequest) (*routerv1.ExplainResponse, error) {
	d, ok := s.decisions.Explain(req.RequestId)
	if !ok {
		return nil, rpc.Error(connect.CodeNotFound, "no record of this request: it is unknown or too old", 0)
	}
	out := &routerv1.Decision{}
	return &routerv1.ExplainResponse{Decision: out}, recode(d, out)
}

// Status implements routerv1connect.RouterServiceHandler until callers have moved.
func (s *server) Status(context.Context, *routerv1.StatusRequest) (*routerv1.StatusResponse, error) {
	out := &routerv1.StatusResponse{}
	return out, recode(s.status(), out)
}

func recode(from, to proto.Message) error {
	raw, err := proto.Marshal(from)
	if err != nil {
		return err
	}
	return proto.Unmarshal(raw, to)
}
