package testenv

import (
	"math/rand/v2"
	"net"
	"strconv"
	"sync"
	"testing"
)

var given struct {
	sync.Mutex
	ports map[int]bool
}

// FreePort returns a loopback port for a program that cannot be given an open one, or that
// comes back to its port. It is below those that systems give to listeners without one and
// to connections, any of which could take it meanwhile, and nobody else in this process
// gets it. Who can keep a port open uses Listen.
func FreePort(t testing.TB) int {
	t.Helper()
	given.Lock()
	defer given.Unlock()
	for range 1000 {
		port := 15_000 + rand.N(17_000)
		if given.ports[port] {
			continue
		}
		if l, err := net.Listen("tcp", loopback(port)); err == nil {
			l.Close()
			if given.ports == nil {
				given.ports = map[int]bool{}
			}
			given.ports[port] = true
			return port
		}
	}
	t.Fatal("no free port between 15000 and 32000")
	return 0
}

// FreeAddr is a loopback address with a FreePort.
func FreeAddr(t testing.TB) string {
	t.Helper()
	return loopback(FreePort(t))
}

func loopback(port int) string { return net.JoinHostPort("127.0.0.1", strconv.Itoa(port)) }
