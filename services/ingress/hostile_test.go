package ingress_test

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
	"github.com/kinference/kinference/services/ingress"
)

// whatever sends text on a connection of its own and returns what comes until the
// other side closes it.
func (e *env) whatever(text string) string {
	e.t.Helper()
	conn, err := net.Dial("tcp", strings.TrimPrefix(e.url, "http://"))
	if err != nil {
		e.t.Fatal(err)
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(patience))
	if _, err := io.WriteString(conn, text); err != nil {
		return "" // it may be closed already
	}
	answer, _ := io.ReadAll(conn)
	return string(answer)
}

// A client that opens streams and resets them at once (CVE-2023-44487) makes no
// more work at a time than its connection may, keeps nobody out, and leaves
// nothing behind.
func TestRapidReset(t *testing.T) {
	const streams = 8
	e := start(t, func(c *ingress.Config, _ *routerv1.Catalog) { c.MaxConnectionStreams = streams }).ready().http2()
	var running, most atomic.Int32
	e.router.routes(newWorker(t, "w", func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		n := running.Add(1)
		defer running.Add(-1)
		for m := most.Load(); n > m && !most.CompareAndSwap(m, n); m = most.Load() {
		}
		if r.Header.Get("X-Request-Id") == "honest" {
			answers(textChunk("a"), usageChunk, doneEvent)(w, r)
			return
		}
		<-r.Context().Done()
	}))
	var wg sync.WaitGroup
	for range streams {
		wg.Go(func() {
			for range 100 {
				ctx, cancel := context.WithTimeout(context.Background(), time.Millisecond)
				if resp, err := e.begin(ctx, chatPath, chatRequest(true, "")); err == nil {
					resp.Body.Close()
				}
				cancel()
			}
		})
	}
	wg.Wait()
	if resp, text := e.post(chatPath, chatRequest(true, ""), "X-Request-Id", "honest"); resp.StatusCode != http.StatusOK || !strings.HasSuffix(text, doneEvent) {
		t.Errorf("got %d %s", resp.StatusCode, text)
	}
	// A handler lives on for a moment after its stream is gone.
	if n := most.Load(); n > 2*streams+1 {
		t.Errorf("%d requests at the worker at once, of a connection that may have %d", n, streams)
	}
	deadline := time.After(patience)
	for tick := time.NewTicker(time.Millisecond); running.Load() > 0; {
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatalf("%d requests are still at the worker", running.Load())
		}
	}
}

// What a client does to its connection ends with an error or with the connection,
// and never with work.
func TestHostileConnections(t *testing.T) {
	e := start(t, func(c *ingress.Config, _ *routerv1.Catalog) { c.BodyTimeout, c.MaxHeader = time.Second, 8<<10 }).ready()
	var got atomic.Int32
	e.router.routes(newWorker(t, "w", func(w http.ResponseWriter, r *http.Request) {
		got.Add(1)
		body, _ := io.ReadAll(r.Body)
		if len(r.TransferEncoding) > 0 || r.ContentLength != int64(len(body)) || strings.Contains(string(body), "smuggled") {
			t.Errorf("the worker got %v %d: %s", r.TransferEncoding, r.ContentLength, body)
		}
		for name := range r.Header {
			if strings.HasPrefix(name, "X-Hop") || name == "Connection" || name == "Upgrade" || name == "Te" || name == "Keep-Alive" {
				t.Errorf("the worker got the header %s", name)
			}
		}
		refuses(200, whole)(w, r)
	}))
	body := chatRequest(false, "")
	head := "POST " + chatPath + " HTTP/1.1\r\nHost: x\r\n"
	chunked := fmt.Sprintf("%x\r\n%s\r\n0\r\n\r\n", len(body), body)
	for _, tt := range []struct {
		name, text, status string // of the first answer; empty: none
		work               int32
	}{
		{"a header that does not end", head + "X-Slow: 1\r\n", "", 0},
		{"a header that is too long", head + "X-Long: " + strings.Repeat("x", 16<<10) + "\r\n\r\n", "431", 0},
		{"more headers than fit", head + strings.Repeat("X-Many: 1\r\n", 2000) + "\r\n", "431", 0},
		{"a body that does not end", head + "Content-Length: 1000\r\n\r\n{", "408", 0},
		{"two lengths", head + "Content-Length: 3\r\nContent-Length: 4\r\n\r\n{}  ", "400", 0},
		{"a length and chunks: chunks count, and the connection is over", head + "Connection: close\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n" + chunked + "GET /smuggled HTTP/1.1\r\n\r\n", "200", 1},
		{"unknown transfer encoding", head + "Transfer-Encoding: gzip, chunked\r\n\r\n" + chunked, "501", 0},
		{"no number of a chunk", head + "Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n", "400", 0},
		{"hop-by-hop headers", head + "Connection: close, X-Hop-One\r\nX-Hop-One: 1\r\nTE: trailers\r\nKeep-Alive: 5\r\n" + fmt.Sprintf("Content-Length: %d\r\n\r\n%s", len(body), body), "200", 1},
	} {
		got.Store(0)
		answer := e.whatever(tt.text)
		if tt.status == "" && answer != "" && !strings.HasPrefix(answer, "HTTP/1.1 408") || tt.status != "" && !strings.HasPrefix(answer, "HTTP/1.1 "+tt.status) {
			t.Errorf("%s: got %.120q", tt.name, answer)
		}
		if n := got.Load(); n != tt.work {
			t.Errorf("%s: %d requests at the worker", tt.name, n)
		}
	}
}

// A request may wait in the router's queue for longer than a decision takes, and
// its stream is kept alive meanwhile.
func TestWaitsInTheQueue(t *testing.T) {
	e := start(t, func(c *ingress.Config, _ *routerv1.Catalog) {
		c.RouteTimeout, c.PingInterval = 20*time.Millisecond, 5*time.Millisecond
	}).ready()
	w := newWorker(t, "w", answers(textChunk("a"), usageChunk, doneEvent))
	turn := make(chan struct{})
	e.router.set(func(*routerv1.RouteRequest) (*routerv1.RouteResponse, error) {
		<-turn
		return &routerv1.RouteResponse{Endpoints: []*routerv1.Endpoint{w.endpoint()}}, nil
	})
	resp, err := e.begin(context.Background(), chatPath, chatRequest(true, ""))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	in := bufio.NewReader(resp.Body)
	for range 10 {
		if ev := readEvent(t, in); ev != ": waiting\n\n" {
			t.Fatalf("got %q while it waits", ev)
		}
	}
	close(turn)
	rest, err := io.ReadAll(in)
	if text := strings.ReplaceAll(string(rest), ": waiting\n\n", ""); err != nil || text != renamed(textChunk("a"))+doneEvent {
		t.Errorf("got %q, %v", text, err)
	}
}
