package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"time"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	"github.com/kinference/kinference/internal/daemon"
	"github.com/kinference/kinference/internal/rpc"
	"github.com/kinference/kinference/internal/tlsfile"
	"github.com/kinference/kinference/proto/gen/kinference/admin/v1/adminv1connect"
)

// askTimeout bounds how long a control plane that does not answer is waited for.
const askTimeout = 5 * time.Second

// Environment variables that stand for flags.
const (
	envAdmin     = "KINFERENCE_ADMIN"
	envToken     = "KINFERENCE_ADMIN_TOKEN" //nolint:gosec // a name, not a credential
	envTokenFile = "KINFERENCE_ADMIN_TOKEN_FILE"
	envCAFile    = "KINFERENCE_CA_FILE"
)

const defaultAdmin = "http://127.0.0.1:7107"

// admin is how a command reaches the admin API.
type admin struct{ at, tokenFile string }

// secureFlags say whom a command believes at https:// addresses, and what it shows
// there. They are read before the command runs, whose context has them then.
func secureFlags(cmd *cobra.Command) {
	f := cmd.Flags()
	if f.Lookup("ca-file") != nil {
		return // it asks two services
	}
	var files tlsfile.Files
	f.StringVar(&files.CA, "ca-file", "", "PEM file with the authority of https:// addresses; empty: $"+envCAFile+", or the system's")
	f.StringVar(&files.Cert, "cert-file", "", "PEM file with a certificate to show there, which services other than the admin API may ask for")
	f.StringVar(&files.Key, "key-file", "", "PEM file with its key")
	cmd.PreRunE = func(cmd *cobra.Command, _ []string) error {
		files.CA = cmp.Or(files.CA, os.Getenv(envCAFile))
		if files == (tlsfile.Files{}) {
			return nil
		}
		src, err := tlsfile.Open(cmd.Context(), files, slog.New(slog.DiscardHandler))
		if err != nil {
			return usageError{err}
		}
		cmd.SetContext(daemon.WithClientTLS(cmd.Context(), src))
		return nil
	}
}

func adminFlags(cmd *cobra.Command) *admin {
	a := &admin{}
	cmd.Flags().StringVar(&a.at, "admin", "", "base URL of the admin API; empty: $"+envAdmin+", or "+defaultAdmin)
	cmd.Flags().StringVar(&a.tokenFile, "token-file", "", "file with a token for it; empty: $"+envTokenFile+", or the token in $"+envToken)
	secureFlags(cmd)
	return a
}

func (a *admin) url() string {
	for _, u := range []string{a.at, os.Getenv(envAdmin)} {
		if u != "" {
			return strings.TrimRight(u, "/")
		}
	}
	return defaultAdmin
}

func (a *admin) token() (string, error) {
	path := a.tokenFile
	if path == "" {
		path = os.Getenv(envTokenFile)
	}
	if path == "" {
		return os.Getenv(envToken), nil
	}
	raw, err := os.ReadFile(path)
	if err != nil {
		return "", usageError{fmt.Errorf("read token: %w", err)}
	}
	return strings.TrimSpace(string(raw)), nil
}

func (a *admin) client(ctx context.Context) (adminv1connect.AdminServiceClient, error) {
	token, err := a.token()
	if err != nil {
		return nil, err
	}
	return rpc.Client(ctx, a.url(), adminv1connect.NewAdminServiceClient, rpc.Bearer(token), rpc.Once(adminv1connect.AdminServiceCreateKeyProcedure)), nil
}

// ask makes one call.
func ask[T any](ctx context.Context, a *admin, call func(context.Context, adminv1connect.AdminServiceClient) (T, error)) (T, error) {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	var none T
	c, err := a.client(ctx)
	if err != nil {
		return none, err
	}
	out, err := call(ctx, c)
	if err != nil {
		return none, a.failed(err)
	}
	return out, nil
}

// failed says what a call failed with, and what to do about it.
func (a *admin) failed(err error) error {
	var hint string
	var ce *connect.Error
	switch code := connect.CodeOf(err); {
	case errors.As(err, &ce) && code == connect.CodeUnauthenticated:
		hint = ": give a token with --token-file or $" + envTokenFile
	case errors.As(err, &ce) && code == connect.CodePermissionDenied:
		hint = ": it needs another role, or in Kubernetes another right"
	}
	return fmt.Errorf("ask the admin API at %s: %w%s", a.url(), err, hint)
}
