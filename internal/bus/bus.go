// Package bus carries KV events and worker reports over NATS.
//
// The relay publishes what the engines say, trackers consume it, and both use
// this package so that subjects, headers and stream bounds are written down
// once. KV events live on the JetStream stream KV_EVENTS: derived state that a
// tracker reads from its start, so it may be lost and made again. Worker
// reports are plain messages, with a copy in a key-value bucket for those who
// join late.
//
// NATS may be absent at start and may go away at any time: Connect returns at
// once and reconnects for ever, publishers get an error that says whether to
// retry, Consume picks up where it was or, if the stream was lost, from the
// start of its successor. All methods are safe for concurrent use.
package bus

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

const (
	// maxPending bounds the publishes without an ack; beyond it publishers wait.
	maxPending = 4096
	// stallWait is how long a publisher waits for a free slot. The client's
	// default of 200 ms fails under load on a busy machine.
	stallWait = 10 * time.Second
	// ackTimeout is how long an ack may take before its publish has failed.
	ackTimeout = 5 * time.Second
	// apiTimeout bounds one call of the JetStream API.
	apiTimeout = 5 * time.Second
)

// Conn is a connection to NATS that reconnects until it is closed.
type Conn struct {
	nc *nats.Conn
	js jetstream.JetStream
}

// Connect returns a connection to the servers in url (comma separated), named
// name in their monitoring. It does not wait for a server: while none answers,
// publishes are buffered or fail, and consumers wait. An error means that the
// url or an option is wrong. The caller closes the connection; ctx bounds
// nothing beyond the call.
func Connect(ctx context.Context, url, name string, opts ...nats.Option) (*Conn, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	nc, err := nats.Connect(url, append([]nats.Option{
		nats.Name(name),
		nats.RetryOnFailedConnect(true),
		nats.MaxReconnects(-1),
		nats.Timeout(2 * time.Second),
		nats.ReconnectWait(200 * time.Millisecond),
		nats.ReconnectJitter(100*time.Millisecond, 500*time.Millisecond),
		// A server that hangs is left after three of them. A relay has room for some
		// ten seconds of a busy engine's events.
		nats.PingInterval(2 * time.Second),
		// Credentials are renewed while we run: one that was refused twice is tried
		// again.
		nats.IgnoreAuthErrorAbort(),
		// Little is kept while disconnected: callers retry.
		nats.ReconnectBufSize(1 << 20),
		// The default prints to stderr. What matters reaches the callers: failed
		// publishes and interrupted consumers; reports may be lost.
		nats.ErrorHandler(func(*nats.Conn, *nats.Subscription, error) {}),
	}, opts...)...)
	if err != nil {
		return nil, fmt.Errorf("connect to NATS: %w", err)
	}
	js, err := jetstream.New(nc,
		jetstream.WithPublishAsyncMaxPending(maxPending),
		jetstream.WithPublishAsyncTimeout(ackTimeout),
		jetstream.WithDefaultTimeout(apiTimeout))
	if err != nil {
		nc.Close()
		return nil, fmt.Errorf("open JetStream: %w", err)
	}
	return &Conn{nc: nc, js: js}, nil
}

// Close drops the connection; consumers and subscriptions end.
func (c *Conn) Close() { c.nc.Close() }

// NATS is the underlying connection, for uses that this package has no helper for.
func (c *Conn) NATS() *nats.Conn { return c.nc }

// JetStream is the underlying JetStream context.
func (c *Conn) JetStream() jetstream.JetStream { return c.js }

// Connected tells whether a server answers now.
func (c *Conn) Connected() bool { return c.nc.IsConnected() }

// MaxMessage is the largest payload in bytes that a KV message may have on
// this connection: the server's limit less room for headers.
func (c *Conn) MaxMessage() int {
	const headers = 4 << 10
	limit := int(c.nc.MaxPayload())
	if limit <= 0 {
		limit = 1 << 20 // not connected yet: the server's default
	}
	return min(max(limit-headers, 1<<10), maxData)
}

// backoff waits before try n (from 0), between 50 ms and 2 s and jittered. It
// returns false when ctx is done.
func backoff(ctx context.Context, n int) bool {
	d := min(50*time.Millisecond<<min(n, 6), 2*time.Second)
	d = d/2 + rand.N(d/2+1)
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-t.C:
		return true
	}
}

// noStream tells whether err says that the stream does not exist.
func noStream(err error) bool {
	return errors.Is(err, jetstream.ErrNoStreamResponse) || errors.Is(err, jetstream.ErrStreamNotFound) ||
		errors.Is(err, nats.ErrNoResponders)
}
