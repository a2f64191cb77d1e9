package accounting

import (
	"context"

	"connectrpc.com/connect"

	"github.com/kinference/kinference/internal/rpc"
	accountingv1 "github.com/kinference/kinference/proto/gen/kinference/accounting/v1"
)

// Objectives implements the AccountingService.
func (v *server) Objectives(context.Context, *accountingv1.ObjectivesRequest) (*accountingv1.ObjectivesResponse, error) {
	return nil, rpc.Error(connect.CodeUnimplemented, "objectives are not there yet", 0)
}
