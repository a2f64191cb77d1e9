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

	for range most - 1 {
		c := e.raw("GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
		resp, err := http.ReadResponse(bufio.NewReader(c), nil)
		if err != nil || resp.StatusCode != http.StatusOK {
			t.Fatalf("%v %v", resp, err)
		}
	}
	refused := 0
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for deadline := time.After(patience); ; refused++ {
		c, err := net.Dial("tcp", strings.TrimPrefix(e.url, "http://"))
		if err != nil {
			t.Fatal(err)
		}
		_, _ = io.WriteString(c, "GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
		answer, _ := io.ReadAll(c)
		c.Close()
		if strings.HasPrefix(string(answer), "HTTP/1.1 200") {
			break
		}
		select {
		case <-deadline:
			t.Fatal("nobody else gets in")
		case <-tick.C:
		}
	}
	if refused == 0 {
		t.Error("there is no bound")
	}
	select {
	case <-left:
		t.Error("the stream was cut")
	default:
	}
	leave()
	await(t, "the worker to be left", left)
}
