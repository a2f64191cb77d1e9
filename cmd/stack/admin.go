package stack

import (
	"context"
	"crypto/rand"
	"fmt"
	"net"
	"os"
	"path/filepath"

	"github.com/kinference/kinference/internal/rpc"
	"github.com/kinference/kinference/proto/gen/kinference/admin/v1/adminv1connect"
	"github.com/kinference/kinference/services/router"
)

// adminAPI is how the stack reaches its own admin API.
type adminAPI struct {
	secret    string
	tokenFile string
	listener  net.Listener // until the router has it
}

// newAdminAPI makes a token that may do all and writes it into the data folder, for
// its owner only.
func newAdminAPI(dir string) (adminAPI, error) {
	file, err := filepath.Abs(filepath.Join(dir, "admin-token"))
	if err != nil {
		return adminAPI{}, fmt.Errorf("find data folder: %w", err)
	}
	a := adminAPI{secret: rand.Text() + rand.Text(), tokenFile: file}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return a, fmt.Errorf("make data folder: %w", err)
	}
	// A file of its own, so that nobody holds it open or has made it readable.
	f, err := os.CreateTemp(dir, ".admin-token-")
	if err != nil {
		return a, fmt.Errorf("write admin token: %w", err)
	}
	_, err = f.WriteString(a.secret + "\n")
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err == nil {
		err = os.Rename(f.Name(), a.tokenFile)
	}
	if err != nil {
		_ = os.Remove(f.Name())
		return a, fmt.Errorf("write admin token: %w", err)
	}
	return a, nil
}

// configure tells a router, also one that is started again, of its admin API.
func (s *Stack) configure(c router.Config, o Options) router.Config {
	c.AdminAPIListener, s.api.listener = s.api.listener, nil
	c.AdminAPIListen, c.AdminSecret = s.addrs["admin API"], s.api.secret
	c.AdminTokens, c.AdminAudit = o.AdminTokens, o.AdminAudit
	c.AccountingURL = s.AccountingURL()
	return c
}

// AdminAPIURL is the base URL of the admin API.
func (s *Stack) AdminAPIURL() string { return "http://" + s.addrs["admin API"] }

// ConsoleURL is the web page's.
func (s *Stack) ConsoleURL() string { return s.AdminAPIURL() + "/console/" }

// AdminTokenFile is the file with a token that may do all there. It is new with each
// stack.
func (s *Stack) AdminTokenFile() string { return s.api.tokenFile }

// Admin is a client of the admin API that may do all, until ctx is done.
func (s *Stack) Admin(ctx context.Context) adminv1connect.AdminServiceClient {
	return rpc.Client(ctx, s.AdminAPIURL(), adminv1connect.NewAdminServiceClient, rpc.Bearer(s.api.secret))
}
