// Package testenv starts the real components that tests need, on loopback and
// free ports, and ends them with the test.
package testenv

import (
	"net"
	"testing"

	"github.com/kinference/kinference/internal/natsd"
)

// NATS starts a server with JetStream and returns its URL.
func NATS(t testing.TB) string {
	t.Helper()
	s, err := natsd.Start(natsd.Options{Dir: t.TempDir()})
	if err != nil {
		t.Fatalf("start NATS: %v", err)
	}
	t.Cleanup(s.Stop)
	return s.URL()
}

// Listen opens a free loopback port that closes with the test.
func Listen(t testing.TB) net.Listener {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatalf("open port: %v", err)
	}
	t.Cleanup(func() { l.Close() })
	return l
}
