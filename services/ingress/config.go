package ingress

import (
	"errors"
	"flag"
	"fmt"
	"net"
	"net/url"
	"time"
)

// Config are the settings of an operator. The zero value of a field means its
// default.
type Config struct {
	// Listen is the address of the OpenAI endpoint. Ignored if Listener is set.
	Listen string
	// Listener is an open port to serve on.
	Listener net.Listener
	// RouterURL is where the router is.
	RouterURL string

	// MaxBody bounds a request body in bytes, MaxBodies all bodies in memory
	// together, MaxHeader the headers of a request, MaxDepth the nesting of
	// its JSON.
	MaxBody, MaxBodies   int64
	MaxHeader, MaxDepth  int
	MaxAnswer            int64 // bytes of an answer that is no stream
	MaxEvent             int   // bytes of one event of a stream
	MaxConnectionStreams int   // requests at once on one HTTP/2 connection

	// BodyTimeout is for the client to send a body, RouteTimeout for the
	// router to decide.
	BodyTimeout, RouteTimeout time.Duration
	// ConnectTimeout, FirstByteTimeout (of streams, until content),
	// IdleTimeout (of streams, between events) and TotalTimeout bound a worker,
	// WriteTimeout a client that does not read.
	ConnectTimeout, FirstByteTimeout, IdleTimeout, TotalTimeout, WriteTimeout time.Duration
	// KeepAlive closes idle connections to workers. vLLM does so after 5 s.
	KeepAlive time.Duration
	// WorkerConnections is how many idle connections to keep for each worker.
	WorkerConnections int

	// TokenCacheBytes bounds the cache of prompt prefixes, for each tokenizer.
	TokenCacheBytes int
	// PromptTimeout bounds how long a worker is asked for token ids, and
	// PromptRetry is how long to wait after it could not tell.
	PromptTimeout, PromptRetry time.Duration
	// ParityInterval is the time between two checks that a worker makes the
	// same token ids.
	ParityInterval time.Duration
}

// Flags implements daemon.Service.
func (c *Config) Flags(fs *flag.FlagSet) {
	c.defaults()
	fs.StringVar(&c.Listen, "listen", c.Listen, "address of the OpenAI endpoint")
	fs.StringVar(&c.RouterURL, "router-url", c.RouterURL, "URL of the router")
	fs.Int64Var(&c.MaxBody, "max-body", c.MaxBody, "longest request body in bytes")
	fs.Int64Var(&c.MaxBodies, "max-bodies", c.MaxBodies, "bytes of all request bodies in memory together")
	fs.IntVar(&c.MaxHeader, "max-header", c.MaxHeader, "longest request header in bytes")
	fs.IntVar(&c.MaxDepth, "max-depth", c.MaxDepth, "deepest nesting of a request's JSON")
	fs.Int64Var(&c.MaxAnswer, "max-answer", c.MaxAnswer, "longest answer that is no stream, in bytes")
	fs.IntVar(&c.MaxEvent, "max-event", c.MaxEvent, "longest event of a stream in bytes")
	fs.IntVar(&c.MaxConnectionStreams, "max-connection-streams", c.MaxConnectionStreams, "requests at once on one HTTP/2 connection")
	fs.DurationVar(&c.BodyTimeout, "body-timeout", c.BodyTimeout, "time for a client to send its body")
	fs.DurationVar(&c.RouteTimeout, "route-timeout", c.RouteTimeout, "time for the router to decide")
	fs.DurationVar(&c.ConnectTimeout, "connect-timeout", c.ConnectTimeout, "time to connect to a worker")
	fs.DurationVar(&c.FirstByteTimeout, "first-byte-timeout", c.FirstByteTimeout, "time for a worker to send a stream's first content; then another one is tried")
	fs.DurationVar(&c.IdleTimeout, "idle-timeout", c.IdleTimeout, "time between two events of a stream")
	fs.DurationVar(&c.TotalTimeout, "total-timeout", c.TotalTimeout, "time for a whole request")
	fs.DurationVar(&c.WriteTimeout, "write-timeout", c.WriteTimeout, "time for a client to read what was sent")
	fs.DurationVar(&c.KeepAlive, "keep-alive", c.KeepAlive, "idle time of connections to workers; below the workers' own, which is 5s for vLLM")
	fs.IntVar(&c.WorkerConnections, "worker-connections", c.WorkerConnections, "idle connections kept for each worker")
	fs.IntVar(&c.TokenCacheBytes, "token-cache", c.TokenCacheBytes, "bytes of the cache of tokenised prompt prefixes, for each tokenizer")
	fs.DurationVar(&c.PromptTimeout, "prompt-timeout", c.PromptTimeout, "time to ask a worker for token ids where no tokenizer is configured")
	fs.DurationVar(&c.PromptRetry, "prompt-retry", c.PromptRetry, "time until a worker that could not tell token ids, or a tokenizer that did not load, is tried again")
	fs.DurationVar(&c.ParityInterval, "parity-interval", c.ParityInterval, "time between two checks that a worker makes the same token ids as the local tokenizer")
}

func (c *Config) defaults() {
	or(&c.Listen, "127.0.0.1:8080")
	or(&c.RouterURL, "http://127.0.0.1:7102")
	or(&c.MaxBody, 16<<20)
	or(&c.MaxBodies, 1<<30)
	or(&c.MaxHeader, 64<<10)
	or(&c.MaxDepth, 64)
	or(&c.MaxAnswer, 64<<20)
	or(&c.MaxEvent, 8<<20)
	or(&c.MaxConnectionStreams, 250)
	or(&c.BodyTimeout, 30*time.Second)
	or(&c.RouteTimeout, 10*time.Second)
	or(&c.ConnectTimeout, 2*time.Second)
	or(&c.FirstByteTimeout, 5*time.Minute)
	or(&c.IdleTimeout, time.Minute)
	or(&c.TotalTimeout, 30*time.Minute)
	or(&c.WriteTimeout, 30*time.Second)
	or(&c.KeepAlive, 4*time.Second)
	or(&c.WorkerConnections, 1024)
	or(&c.TokenCacheBytes, 256<<20)
	or(&c.PromptTimeout, 250*time.Millisecond)
	or(&c.PromptRetry, 30*time.Second)
	or(&c.ParityInterval, 10*time.Minute)
}

func or[T comparable](p *T, value T) {
	var zero T
	if *p == zero {
		*p = value
	}
}

// Validate joins all faults of the settings.
func (c *Config) Validate() error {
	var faults []error
	if u, err := url.Parse(c.RouterURL); err != nil || u.Scheme == "" || u.Host == "" {
		faults = append(faults, fmt.Errorf("router-url %q is no URL", c.RouterURL))
	}
	for name, v := range map[string]int64{
		"max-body": c.MaxBody, "max-bodies": c.MaxBodies, "max-header": int64(c.MaxHeader), "max-depth": int64(c.MaxDepth), "max-answer": c.MaxAnswer,
		"max-event": int64(c.MaxEvent), "max-connection-streams": int64(c.MaxConnectionStreams), "body-timeout": int64(c.BodyTimeout),
		"route-timeout": int64(c.RouteTimeout), "connect-timeout": int64(c.ConnectTimeout), "first-byte-timeout": int64(c.FirstByteTimeout),
		"idle-timeout": int64(c.IdleTimeout), "total-timeout": int64(c.TotalTimeout), "write-timeout": int64(c.WriteTimeout), "keep-alive": int64(c.KeepAlive),
		"worker-connections": int64(c.WorkerConnections), "token-cache": int64(c.TokenCacheBytes), "prompt-timeout": int64(c.PromptTimeout), "prompt-retry": int64(c.PromptRetry),
		"parity-interval": int64(c.ParityInterval),
	} {
		if v < 0 {
			faults = append(faults, fmt.Errorf("%s is negative", name))
		}
	}
	if c.MaxBodies < c.MaxBody {
		faults = append(faults, errors.New("max-bodies is below max-body"))
	}
	return errors.Join(faults...)
}
