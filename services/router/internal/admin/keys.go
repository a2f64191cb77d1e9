package admin

import (
	"context"
	"errors"

	"connectrpc.com/connect"

	"github.com/kinference/kinference/internal/resources"
	"github.com/kinference/kinference/internal/rpc"
	adminv1 "github.com/kinference/kinference/proto/gen/kinference/admin/v1"
)

// Keys manages API keys: the router's server. Errors of package resources are for
// the caller.
type Keys interface {
	ListKeys(r *adminv1.ListKeysRequest) (*adminv1.ListKeysResponse, error)
	CreateKey(ctx context.Context, r *adminv1.CreateKeyRequest) (*adminv1.CreateKeyResponse, error)
	RevokeKey(ctx context.Context, r *adminv1.RevokeKeyRequest) (*adminv1.RevokeKeyResponse, error)
}

func (s *service) ListKeys(_ context.Context, r *adminv1.ListKeysRequest) (*adminv1.ListKeysResponse, error) {
	out, err := s.Keys.ListKeys(r)
	return out, keyError(err)
}

func (s *service) CreateKey(ctx context.Context, r *adminv1.CreateKeyRequest) (*adminv1.CreateKeyResponse, error) {
	out, err := s.Keys.CreateKey(ctx, r)
	return out, keyError(err)
}

func (s *service) RevokeKey(ctx context.Context, r *adminv1.RevokeKeyRequest) (*adminv1.RevokeKeyResponse, error) {
	out, err := s.Keys.RevokeKey(ctx, r)
	return out, keyError(err)
}

// ErrNoTenant is of a tenant that does not exist, or is too bad to be used.
var ErrNoTenant = errors.New("there is no such InferenceTenant: want namespace/name of one without errors")

// keyError gives an error its code.
func keyError(err error) error {
	code := connect.CodeFailedPrecondition
	switch {
	case err == nil:
		return nil
	case errors.Is(err, ErrNoTenant), errors.Is(err, resources.ErrNoKey):
		code = connect.CodeNotFound
	case errors.Is(err, resources.ErrKeyForm):
		code = connect.CodeInvalidArgument
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		code = connect.CodeUnavailable
	}
	return rpc.Error(code, err.Error(), 0)
}
