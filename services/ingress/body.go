package ingress

import (
	"compress/gzip"
	"context"
	"errors"
	"io"
	"mime"
	"net/http"
	"os"
	"strings"
	"sync/atomic"
	"time"

	"github.com/kinference/kinference/internal/openai"
)

const (
	// firstRead is allocated for a body before any of it came, and growth is how
	// many times more than came is allocated then, as far as its length says so: a
	// body that does not come takes no memory, and one that does is copied once.
	firstRead, growth = 64 << 10, 8
	// maxRatio bounds what a compressed body grows to, in proportion to what was
	// read of it, past the first firstRead bytes. JSON of prompts shrinks to a
	// tenth, rarely to a fiftieth.
	maxRatio = 200
)

var (
	errBodies = errors.New("too many bytes of request bodies")
	errBomb   = errors.New("compressed body grows too much")
)

// readBody reads the body within the limits of size, time and memory, and
// decompresses it if need be: limits are of what it becomes. release gives the
// memory back; the error is nil with a nil body if the client left.
func (x *exchange) readBody() (body []byte, release func(), e *openai.Error) {
	release = func() {}
	h := x.r.Header
	zipped := false
	switch enc := strings.ToLower(strings.TrimSpace(h.Get("Content-Encoding"))); enc {
	case "", "identity":
	case "gzip", "x-gzip":
		zipped = true
	default:
		return nil, release, &openai.Error{Status: http.StatusUnsupportedMediaType, Type: openai.TypeInvalidRequest, Code: "unsupported_content_encoding",
			Message: "Request bodies may be compressed with gzip, and with nothing else."}
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
	var from io.Reader = http.MaxBytesReader(connection(x.w), x.r.Body, x.maxBody())
	length := x.r.ContentLength
	if zipped {
		from, length = &inflated{raw: tally{r: from}, limit: x.maxBody()}, -1
	}
	in := &countedBody{r: from, all: &x.bodies, limit: x.MaxBodies}
	release = func() { x.bodies.Add(-in.n) }
	body, err := readGrowing(in, length)
	if err == nil {
		_ = http.NewResponseController(x.w).SetReadDeadline(time.Time{})
		return body, release, nil
	}
	var large *http.MaxBytesError
	switch {
	case errors.Is(err, errBodies):
		x.w.Header().Set("Connection", "close") // rather than read the rest
		return nil, release, full
	case errors.Is(err, errBomb), errors.As(err, &large):
		x.w.Header().Set("Connection", "close")
		return nil, release, openai.TooLarge(x.maxBody())
	case errors.Is(err, os.ErrDeadlineExceeded):
		x.w.Header().Set("Connection", "close")
		return nil, release, &openai.Error{Status: http.StatusRequestTimeout, Type: openai.TypeInvalidRequest, Code: openai.CodeTimeout, Message: "The request body did not arrive in time."}
	case x.r.Context().Err() != nil || errors.Is(err, context.Canceled), errors.Is(err, io.ErrUnexpectedEOF) && !zipped:
		return nil, release, nil
	}
	x.w.Header().Set("Connection", "close")
	return nil, release, openai.Invalid("", "", "The request body could not be read.")
}

// readGrowing reads all of r, whose length is known if it is not negative.
func readGrowing(r io.Reader, length int64) ([]byte, error) {
	whole := int(length) + 1 // with room to see that there is no more
	size := firstRead
	if length >= 0 {
		size = min(whole, size)
	}
	b := make([]byte, 0, size)
	for {
		n, err := r.Read(b[len(b):cap(b)])
		b = b[:len(b)+n]
		if errors.Is(err, io.EOF) {
			return b, nil
		}
		if err != nil {
			return nil, err
		}
		if len(b) < cap(b) {
			continue
		}
		size = 2 * len(b)
		if whole > len(b) {
			size = min(whole, growth*len(b))
		}
		more := make([]byte, len(b), size)
		copy(more, b)
		b = more
	}
}

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

// tally counts what is read.
type tally struct {
	r io.Reader
	n int64
}

func (c *tally) Read(p []byte) (int, error) {
	n, err := c.r.Read(p)
	c.n += int64(n)
	return n, err
}

// inflated decompresses a body. It fails when more comes out than is allowed, or
// far more than went in.
type inflated struct {
	raw   tally
	z     *gzip.Reader
	n     int64
	limit int64
}

func (i *inflated) Read(p []byte) (n int, err error) {
	if i.z == nil {
		if i.z, err = gzip.NewReader(&i.raw); err != nil {
			return 0, err
		}
	}
	n, err = i.z.Read(p)
	if i.n += int64(n); i.n > i.limit || i.n > firstRead+maxRatio*i.raw.n {
		return n, errBomb
	}
	return n, err
}
