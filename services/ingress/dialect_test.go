package ingress

import (
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/kinference/kinference/internal/openai"
)

// client is a client's side that tells of what is written.
type client struct {
	header http.Header
	wrote  chan struct{}
}

func (c *client) Header() http.Header { return c.header }
func (c *client) WriteHeader(int)     {}

func (c *client) Write(p []byte) (int, error) {
	select {
	case c.wrote <- struct{}{}:
	default:
	}
	return len(p), nil
}

// The timer may open a stream while the handler sets headers, which reach the client
// if they come first.
func TestHeadersBesidePings(t *testing.T) {
	v := &server{Config: Config{WriteTimeout: time.Minute, MaxEvent: 1 << 10}}
	start := func(every time.Duration) (*edge, *client) {
		c := &client{http.Header{}, make(chan struct{}, 1)}
		e := v.newEdge(c, httptest.NewRequest(http.MethodPost, openai.RouteChat.Path(), nil))
		t.Cleanup(e.close)
		e.Header().Set("X-Request-Id", "1")
		e.Header().Set("X-Gone", "1")
		e.keepAlive(every)
		return e, c
	}
	e, c := start(time.Microsecond)
	for n := 0; n < 100; {
		e.Header().Set("X-Should-Retry", "false")
		select {
		case <-c.wrote:
			n++
		default:
		}
	}

	e, c = start(time.Hour)
	e.Header().Set("X-Should-Retry", "false")
	e.Header().Del("X-Gone")
	if c.header.Get("X-Should-Retry") != "" {
		t.Error("the timer's header is the handler's")
	}
	e.WriteHeader(http.StatusOK)
	if h := c.header; h.Get("X-Request-Id") != "1" || h.Get("X-Should-Retry") != "false" || h.Get("X-Gone") != "" {
		t.Errorf("sent %v", h)
	}
}
