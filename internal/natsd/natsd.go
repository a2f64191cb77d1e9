// Package natsd embeds a NATS server with JetStream: for the all in one binary
// and for tests. A production installation runs NATS as its own cluster; the
// services see no difference, because they dial a URL in both cases.
package natsd

import (
	"errors"
	"fmt"
	"time"

	"github.com/nats-io/nats-server/v2/server"
)

// Options of an embedded server.
type Options struct {
	// Dir holds JetStream's files. Required.
	Dir string
	// Port on 127.0.0.1; 0 picks a free one.
	Port int
}

// Server is a running NATS server. Its methods are safe for concurrent use.
type Server struct{ s *server.Server }

// Start starts a server on the loopback address and returns once it accepts
// connections.
func Start(o Options) (*Server, error) {
	if o.Dir == "" {
		return nil, errors.New("natsd: no folder for JetStream")
	}
	port := o.Port
	if port == 0 {
		port = server.RANDOM_PORT
	}
	s, err := server.NewServer(&server.Options{
		ServerName: "kinference",
		Host:       "127.0.0.1",
		Port:       port,
		JetStream:  true,
		StoreDir:   o.Dir,
		NoSigs:     true,
		NoLog:      true,
		// A KV message holds up to 10 ms of one worker's events.
		MaxPayload: 4 << 20,
	})
	if err != nil {
		return nil, fmt.Errorf("natsd: configure: %w", err)
	}
	s.Start()
	if !s.ReadyForConnections(10 * time.Second) {
		s.Shutdown()
		return nil, errors.New("natsd: not ready after 10 s")
	}
	return &Server{s: s}, nil
}

// URL is the address for clients.
func (s *Server) URL() string { return s.s.ClientURL() }

// Stop ends the server and returns once its files are closed.
func (s *Server) Stop() {
	s.s.Shutdown()
	s.s.WaitForShutdown()
}
