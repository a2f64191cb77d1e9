// Package accounting is the accounting service: it will turn usage events into per-tenant tokens, cost and objectives.
//
// So far it is a process with health, reflection, metrics and drain only:
// nothing on the request path calls it yet, and it answers no RPC of its own
// rather than a made-up one. Usage is visible in the metrics of ingress until it does.
package accounting

import (
	"context"
	"flag"
	"net"

	"github.com/kinference/kinference/internal/daemon"
	"github.com/kinference/kinference/internal/rpc"
)

// Config of the service.
type Config struct {
	// Listen is the address of the RPC port.
	Listen string
	// Listener is an open RPC port; Listen is then ignored.
	Listener net.Listener
}

// Service is the accounting service.
type Service struct{ Config }

var _ daemon.Service = (*Service)(nil)

// Flags declares the settings.
func (s *Service) Flags(fs *flag.FlagSet) {
	fs.StringVar(&s.Listen, "listen", "127.0.0.1:7106", "address of the RPC port")
}

// Run serves until ctx is done.
func (s *Service) Run(ctx context.Context) error {
	l, err := rpc.Listen(s.Listener, s.Listen)
	if err != nil {
		return err
	}
	daemon.Ready(ctx, true)
	return rpc.Serve(ctx, l)
}
