package ingress

import (
	"net"
	"sync"
	"sync/atomic"
	"time"
)

// mostConnections bounds the connections of clients where the process may open more
// files than that.
const mostConnections = 1 << 16

// connectionsFor is how many connections clients may have. Half of the files stays for
// workers and services: without those nobody is served.
func connectionsFor(set int) int64 {
	if set > 0 {
		return int64(set)
	}
	return min(mostConnections, max(1, openFiles()/2))
}

// bounded is a listener with so many connections at most. One more is closed at once.
// When few are left full is called, once a second at most: it may make room.
type bounded struct {
	net.Listener
	most int64
	full func()
	open atomic.Int64
	said atomic.Int64 // when full was called, in seconds
}

// Accept implements net.Listener.
func (b *bounded) Accept() (net.Conn, error) {
	for {
		c, err := b.Listener.Accept()
		if err != nil {
			return nil, err
		}
		n := b.open.Add(1)
		if n >= b.most-b.most/8 {
			if now := time.Now().Unix(); b.said.Swap(now) != now {
				b.full()
			}
		}
		if n <= b.most {
			return &clientConn{Conn: c, open: &b.open}, nil
		}
		b.open.Add(-1)
		_ = c.Close()
	}
}

// clientConn is one that counts until it is closed.
type clientConn struct {
	net.Conn
	open *atomic.Int64
	once sync.Once
}

// Close implements net.Conn.
func (c *clientConn) Close() error {
	c.once.Do(func() { c.open.Add(-1) })
	return c.Conn.Close()
}

// CloseWrite is what net/http does before it closes a connection of which it has not read
// all, so that the answer gets there.
func (c *clientConn) CloseWrite() error {
	if half, ok := c.Conn.(interface{ CloseWrite() error }); ok {
		return half.CloseWrite()
	}
	return nil
}
