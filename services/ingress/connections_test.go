package ingress_test

import (
	"bufio"
	"context"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
	"github.com/kinference/kinference/services/ingress"
)

// Connections on which nothing happens keep nobody out: beyond the bound they give way
// to new ones, and those in use stay.
func TestIdleConnectionsGiveWay(t *testing.T) {
	const most = 8
	e := start(t, func(c *ingress.Config, _ *routerv1.Catalog) { c.MaxConnections = most }).ready()
	h, begun, left := hang(roleChunk(), textChunk("a"))
	e.router.routes(newWorker(t, "w", h))
	ctx, leave := context.WithCancel(context.Background())
	defer leave()
	stream, err := e.begin(ctx, chatPath, chatRequest(true, ""))
	if err != nil {
		t.Fatal(err)
	}
	defer stream.Body.Close()
	await(t, "the stream", begun)
	in := bufio.NewReader(stream.Body)
	readEvent(t, in)

	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	deadline := time.After(patience)
	var first net.Conn
	for range 3 * most {
		for served := false; !served; {
			c, err := net.Dial("tcp", strings.TrimPrefix(e.url, "http://"))
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { c.Close() })
			_, _ = io.WriteString(c, "GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
			resp, err := http.ReadResponse(bufio.NewReader(c), nil)
			if served = err == nil && resp.StatusCode == http.StatusOK; served && first == nil {
				first = c
			}
			select { // one too many is closed, and makes room for the next
			case <-deadline:
				t.Fatal("nobody else gets in")
			case <-tick.C:
			}
		}
	}
	_ = first.SetReadDeadline(time.Now().Add(patience))
	if _, err := io.Copy(io.Discard, first); err != nil {
		t.Errorf("an idle connection stays: %v", err)
	}
	select {
	case <-left:
		t.Error("the stream was cut")
	default:
	}
	leave()
	await(t, "the worker to be left", left)
}
