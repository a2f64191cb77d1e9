package accounting

import (
	"context"

	"connectrpc.com/connect"

	"github.com/kinference/kinference/internal/rpc"
	accountingv1 "github.com/kinference/kinference/proto/gen/kinference/accounting/v1"
)

// Capacity implements the AccountingService.
func (v *server) Capacity(context.Context, *accountingv1.CapacityRequest) (*accountingv1.CapacityResponse, error) {
	return nil, rpc.Error(connect.CodeUnimplemented, "capacity is not there yet", 0)
}
