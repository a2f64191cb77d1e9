package ingress

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"io"
	"mime"
	"net/http"
	"os"
	"strings"
	"sync/atomic"
	"time"

	"github.com/kinference/kinference/internal/anthropic"
	"github.com/kinference/kinference/internal/openai"
	"github.com/kinference/kinference/internal/responses"
	"github.com/kinference/kinference/services/ingress/internal/meter"
)

// ServeHTTP answers all paths. There is no mux: it would redirect odd paths
// and answer unknown ones in its own form.
func (v *server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	// It holds for what the server reads after a refusal, too, so it is lifted
	// only when a whole body is here. Writers without deadlines are those of tests.
	_ = http.NewResponseController(w).SetReadDeadline(time.Now().Add(v.BodyTimeout))
	client := v.newEdge(w, r)
	defer client.close()
	w = client
	a := v.admit(w, r)
	if a == nil {
		return
	}
	switch path := a.path; {
	case path == openai.RouteChat.Path():
		v.post(w, r, a, openai.RouteChat)
	case path == openai.RouteCompletions.Path():
		v.post(w, r, a, openai.RouteCompletions)
	case path == openai.RouteEmbeddings.Path():
		v.post(w, r, a, openai.RouteEmbeddings)
	case path == pathMessages || path == pathResponses:
		v.post(w, r, a, openai.RouteChat)
	case path == pathCount || path == pathTokenize:
		v.counts(w, r, a)
	case path == "/v1/models" || strings.HasPrefix(path, "/v1/models/"):
		w.Header().Set("X-Request-Id", v.requestID(r))
		if r.Method != http.MethodGet && r.Method != http.MethodHead {
			wrongMethod(w, "GET, HEAD")
			return
		}
		v.models(w, a, strings.TrimPrefix(strings.TrimPrefix(path, "/v1/models"), "/"))
	default:
		w.Header().Set("X-Request-Id", v.requestID(r))
		writeError(w, &openai.Error{Status: http.StatusNotFound, Type: openai.TypeInvalidRequest, Code: "unknown_url", Message: "There is nothing at this path."})
	}
}

func (v *server) post(w http.ResponseWriter, r *http.Request, a *admission, route openai.Route) {
	id := v.requestID(r)
	w.Header().Set("X-Request-Id", id)
	if r.Method != http.MethodPost {
		wrongMethod(w, "POST")
		return
	}
	// Until its last report is sent nobody else may use this id.
	if _, used := v.ids.LoadOrStore(id, nil); used {
		id = newID()
		w.Header().Set("X-Request-Id", id)
		v.ids.Store(id, nil)
	}
	x := &exchange{server: v, admission: a, w: w, r: r, id: id, unique: meter.NewID(), label: otherModel}
	x.req.Route = route
	switch a.path {
	case pathMessages:
		x.messages = &anthropic.Request{}
	case pathResponses:
		x.responses = &responses.Request{}
	}
	v.metrics.active.Add(v.ctx, 1)
	defer func() { // whatever happens, the router's ledger gets its end
		v.metrics.active.Add(v.ctx, -1)
		x.finishUsage()
		x.settle()
		if x.routed {
			x.compareCount()
			v.reports.Done(id, x.outcome(), x.reported(), func() { v.ids.Delete(id) })
		} else {
			v.ids.Delete(id)
		}
	}()
	x.serve()
	v.metrics.answered(v.ctx, x)
}

func wrongMethod(w http.ResponseWriter, allowed string) {
	w.Header().Set("Allow", allowed)
	writeError(w, &openai.Error{Status: http.StatusMethodNotAllowed, Type: openai.TypeInvalidRequest, Code: "method_not_allowed", Message: "This path takes " + allowed + " only."})
}

// requestID is the client's own id if it is a decent one, else a new one.
func (v *server) requestID(r *http.Request) string {
	id := r.Header.Get("X-Request-Id")
	if len(id) == 0 || len(id) > 128 {
		return newID()
	}
	for _, c := range []byte(id) {
		if !('a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || '0' <= c && c <= '9' || c == '-' || c == '_' || c == '.' || c == ':') {
			return newID()
		}
	}
	return id
}

func newID() string {
	var b [16]byte
	rand.Read(b[:]) // never fails
	return "req-" + hex.EncodeToString(b[:])
}

// readBody reads the body within the limits of size, time and memory. release
// gives the memory back; the error is nil with a nil body if the client left.
func (x *exchange) readBody() (body []byte, release func(), e *openai.Error) {
	release = func() {}
	h := x.r.Header
	if enc := h.Get("Content-Encoding"); enc != "" && !strings.EqualFold(enc, "identity") {
		return nil, release, &openai.Error{Status: http.StatusUnsupportedMediaType, Type: openai.TypeInvalidRequest, Code: "unsupported_content_encoding",
			Message: "Compressed request bodies are not accepted. Send the body without Content-Encoding."}
	}
	if ct := h.Get("Content-Type"); ct != "" {
		if kind, _, err := mime.ParseMediaType(ct); err != nil || kind != "application/json" && !strings.HasSuffix(kind, "+json") {
			return nil, release, &openai.Error{Status: http.StatusUnsupportedMediaType, Type: openai.TypeInvalidRequest, Code: "unsupported_content_type",
				Message: "The request body must be JSON. Send the header Content-Type: application/json."}
		}
	}
	if x.r.ContentLength > x.maxBody() {
		x.w.Header().Set("Connection", "close") // rather than read it all
		return nil, release, openai.TooLarge(x.maxBody())
	}

	// Only what has come counts, so bodies that do not come keep nobody out.
	full := openai.Overloaded("The gateway has too many requests in hand. Try again later.", time.Second)
	if x.bodies.Load()+x.r.ContentLength > x.MaxBodies {
		return nil, release, full
	}
	in := &countedBody{r: http.MaxBytesReader(connection(x.w), x.r.Body, x.maxBody()), all: &x.bodies, limit: x.MaxBodies}
	release = func() { x.bodies.Add(-in.n) }
	var b bytes.Buffer
	b.Grow(int(min(max(x.r.ContentLength, 0), 64<<10)) + bytes.MinRead)
	_, err := b.ReadFrom(in)
	if err == nil {
		_ = http.NewResponseController(x.w).SetReadDeadline(time.Time{})
		return b.Bytes(), release, nil
	}
	var large *http.MaxBytesError
	switch {
	case errors.Is(err, errBodies):
		x.w.Header().Set("Connection", "close") // rather than read the rest
		return nil, release, full
	case errors.As(err, &large):
		return nil, release, openai.TooLarge(x.maxBody())
	case errors.Is(err, os.ErrDeadlineExceeded):
		x.w.Header().Set("Connection", "close")
		return nil, release, &openai.Error{Status: http.StatusRequestTimeout, Type: openai.TypeInvalidRequest, Code: openai.CodeTimeout, Message: "The request body did not arrive in time."}
	case x.r.Context().Err() != nil || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, context.Canceled):
		return nil, release, nil
	}
	x.w.Header().Set("Connection", "close")
	return nil, release, openai.Invalid("", "", "The request body could not be read.")
}

var errBodies = errors.New("too many bytes of request bodies")

// countedBody counts what is read of a body among all bodies.
type countedBody struct {
	r     io.Reader
	n     int64 // bytes of this one
	all   *atomic.Int64
	limit int64
}

func (c *countedBody) Read(p []byte) (int, error) {
	n, err := c.r.Read(p)
	c.n += int64(n)
	if c.all.Add(int64(n)) > c.limit {
		return n, errBodies
	}
	return n, err
}
