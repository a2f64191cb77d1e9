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
	"testing"
	"time"

	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
	"github.com/kinference/kinference/services/ingress"
)

// http2 makes the client speak h2c.
func (e *env) http2() *env {
	var p http.Protocols
	p.SetUnencryptedHTTP2(true)
	e.client.Transport = &http.Transport{Protocols: &p}
	return e
}

// A worker that closes an idle connection just when we use it has not failed:
// it gets the request again on a new one.
func TestStaleConnection(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var conns sync.WaitGroup
	conns.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			conns.Go(func() {
				defer c.Close()
				r := bufio.NewReader(c)
				for served := range 2 {
					req, err := http.ReadRequest(r)
					if err != nil {
						return
					}
					_, _ = io.Copy(io.Discard, req.Body)
					if served == 1 {
						return // as if the connection had been closed before
					}
					fmt.Fprintf(c, "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", len(whole), whole)
				}
			})
		}
	})
	t.Cleanup(func() { l.Close(); conns.Wait() })
	e := start(t, nil).ready()
	e.router.routes(&worker{name: "w", url: "http://" + l.Addr().String(), model: "base-model"})
	for range 3 {
		resp, body := e.post(chatPath, chatRequest(false, ""))
		if _, words := e.router.done(resp.Header.Get("X-Request-Id")); resp.StatusCode != 200 || strings.Join(words, ", ") != "ok" {
			t.Errorf("got %d %s, reported %v", resp.StatusCode, body, words)
		}
	}
}

// Long prompts pass whole, over both protocols.
func TestLongBody(t *testing.T) {
	e := start(t, func(_ *ingress.Config, c *routerv1.Catalog) {
		c.Profiles[0].TokenizerPath, c.Profiles[0].MaxModelLen = modelDir(t), 0
	}).ready()
	sizes := make(chan int, 1)
	e.router.routes(newWorker(t, "w", func(w http.ResponseWriter, r *http.Request) {
		n, _ := io.Copy(io.Discard, r.Body)
		sizes <- int(n)
		refuses(200, whole)(w, r)
	}))
	body := chatRequest(false, `,"x":"`+strings.Repeat("long prompt ", 1<<18)+`"`) // 3 MiB
	for range 2 {
		if resp, text := e.post(chatPath, body); resp.StatusCode != 200 || <-sizes != len(body)+len("base-model")-len("chat") {
			t.Errorf("got %d %.200s", resp.StatusCode, text)
		}
		e.http2()
	}
}

// Many streams at once do not mix.
func TestManyStreams(t *testing.T) {
	e := start(t, nil).ready().http2()
	e.router.routes(newWorker(t, "w", func(w http.ResponseWriter, r *http.Request) {
		b, _ := io.ReadAll(r.Body)
		_, mark, _ := strings.Cut(string(b), `"mark":"`)
		mark, _, _ = strings.Cut(mark, `"`)
		pieces := []string{roleChunk()}
		for range 20 {
			pieces = append(pieces, textChunk(mark))
		}
		answers(append(pieces, usageChunk, doneEvent)...)(w, r)
	}))
	var all sync.WaitGroup
	for i := range 60 {
		all.Go(func() {
			mark := fmt.Sprintf("mark-%d", i)
			resp, err := e.begin(context.Background(), chatPath, chatRequest(true, `,"mark":"`+mark+`"`))
			if err != nil {
				t.Error(err)
				return
			}
			defer resp.Body.Close()
			body, err := io.ReadAll(resp.Body)
			if want := renamed(roleChunk() + strings.Repeat(textChunk(mark), 20) + doneEvent); err != nil || string(body) != want {
				t.Errorf("stream %d: %v, %d bytes of %d", i, err, len(body), len(want))
			}
		})
	}
	all.Wait()
}

// Over HTTP/2 one client that leaves, and one that does not read, do no harm
// to other streams of the same connection.
func TestHTTP2Clients(t *testing.T) {
	e := start(t, func(c *ingress.Config, _ *routerv1.Catalog) { c.WriteTimeout = 300 * time.Millisecond }).ready().http2()
	h, begun, left := hang(roleChunk(), textChunk("a"))
	e.router.routes(newWorker(t, "w", h))
	ctx, cancel := context.WithCancel(context.Background())
	resp, err := e.begin(ctx, chatPath, chatRequest(true, ""))
	if err != nil {
		t.Fatal(err)
	}
	await(t, "the worker to begin", begun)
	cancel()
	await(t, "the worker to be left", left)
	resp.Body.Close()

	stuck := make(chan struct{})
	e.router.routes(newWorker(t, "w", func(w http.ResponseWriter, r *http.Request) {
		defer close(stuck)
		chunk := textChunk(strings.Repeat("x", 10000))
		answers(chunk)(w, r)
		for r.Context().Err() == nil {
			if _, err := io.WriteString(w, chunk); err != nil {
				return
			}
		}
	}))
	slow, err := e.begin(context.Background(), chatPath, chatRequest(true, ""))
	if err != nil {
		t.Fatal(err)
	}
	defer slow.Body.Close()

	// A stream that pauses longer than the write timeout is none of the slow.
	pause := make(chan struct{})
	e.router.routes(newWorker(t, "w", func(w http.ResponseWriter, r *http.Request) {
		answers(roleChunk(), textChunk("a"))(w, r)
		<-pause
		_, _ = io.WriteString(w, doneEvent)
	}))
	paused, err := e.begin(context.Background(), chatPath, chatRequest(true, ""))
	if err != nil {
		t.Fatal(err)
	}
	defer paused.Body.Close()
	await(t, "the slow client to be dropped", stuck)
	close(pause)
	if body, err := io.ReadAll(paused.Body); err != nil || string(body) != renamed(roleChunk()+textChunk("a"))+doneEvent {
		t.Errorf("the paused stream got %q, %v", body, err)
	}
}
