package rpc

import (
	"context"
	"slices"

	"connectrpc.com/connect"
	"connectrpc.com/grpchealth"

	"github.com/kinference/kinference/internal/daemon"
)

// health says what the process says of itself on its admin port: a replica that
// still loads, or is about to end, is not to be called.
type health struct {
	ctx   context.Context // of the service's Run
	names []string
}

var _ grpchealth.Checker = (*health)(nil)

// Check implements grpchealth.Checker.
func (h *health) Check(_ context.Context, r *grpchealth.CheckRequest) (*grpchealth.CheckResponse, error) {
	if r.Service != "" && !slices.Contains(h.names, r.Service) {
		return nil, connect.NewError(connect.CodeNotFound, nil)
	}
	if !daemon.IsReady(h.ctx) {
		return &grpchealth.CheckResponse{Status: grpchealth.StatusNotServing}, nil
	}
	return &grpchealth.CheckResponse{Status: grpchealth.StatusServing}, nil
}
