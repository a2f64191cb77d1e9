package ingress

import (
	"io"
	"net"
	"testing"
)

func TestBounded(t *testing.T) {
	inner, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	said := 0
	l := &bounded{Listener: inner, most: 2, full: func() { said++ }}
	accepted := make(chan net.Conn)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			accepted <- c
		}
	}()
	dial := func() net.Conn {
		c, err := net.Dial("tcp", inner.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		return c
	}
	dial()
	first := <-accepted
	dial()
	<-accepted
	// The third is closed, and the one after it gets the place that is free then.
	if n, _ := io.Copy(io.Discard, dial()); n != 0 {
		t.Errorf("%d bytes", n)
	}
	_ = first.Close()
	_ = first.Close() // counts once
	dial()
	<-accepted
	if n, _ := io.Copy(io.Discard, dial()); n != 0 {
		t.Errorf("%d bytes", n)
	}
	inner.Close()
	<-done
	if said == 0 {
		t.Error("nobody was told")
	}
	if n := connectionsFor(7); n != 7 {
		t.Errorf("%d connections", n)
	}
	if n := connectionsFor(0); n < 1 || n > mostConnections {
		t.Errorf("%d connections by the files", n)
	}
}
