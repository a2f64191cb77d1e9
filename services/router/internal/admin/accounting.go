package admin

import (
	"context"
	"time"

	"connectrpc.com/connect"

	"github.com/kinference/kinference/internal/rpc"
	accountingv1 "github.com/kinference/kinference/proto/gen/kinference/accounting/v1"
	"github.com/kinference/kinference/proto/gen/kinference/accounting/v1/accountingv1connect"
	"github.com/kinference/kinference/services/router/internal/access"
)

// accountingTime bounds what accounting may take for an answer.
const accountingTime = 10 * time.Second

// accounting passes on what may be asked of accounting with a token of the admin API:
// accounting's own port has no credentials, and is not for people.
type accounting struct {
	accountingv1connect.UnimplementedAccountingServiceHandler
	client accountingv1connect.AccountingServiceClient // nil: there is none
}

var _ accountingv1connect.AccountingServiceHandler = (*accounting)(nil)

// accountingNeeds is what its calls need. Exports are not passed on.
var accountingNeeds = map[string]access.Permission{
	accountingv1connect.AccountingServiceQueryUsageProcedure: {Resource: "usage", Verb: "get"},
	accountingv1connect.AccountingServiceObjectivesProcedure: {Resource: "usage", Verb: "get"},
}

func (a *accounting) QueryUsage(ctx context.Context, r *accountingv1.QueryUsageRequest) (*accountingv1.QueryUsageResponse, error) {
	return pass(ctx, a, r, accountingv1connect.AccountingServiceClient.QueryUsage)
}

func (a *accounting) Objectives(ctx context.Context, r *accountingv1.ObjectivesRequest) (*accountingv1.ObjectivesResponse, error) {
	return pass(ctx, a, r, accountingv1connect.AccountingServiceClient.Objectives)
}

func pass[Q, A any](ctx context.Context, a *accounting, r *Q, call func(accountingv1connect.AccountingServiceClient, context.Context, *Q) (*A, error)) (*A, error) {
	if a.client == nil {
		return nil, rpc.Error(connect.CodeFailedPrecondition, "the router has no URL of accounting", 0)
	}
	ctx, cancel := context.WithTimeout(ctx, accountingTime)
	defer cancel()
	return call(a.client, ctx, r)
}
