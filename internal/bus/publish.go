package bus

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// KVStream is the name of the stream of KV events.
const KVStream = "KV_EVENTS"

// StreamSettings bound the stream of KV events. Zero values take the defaults.
type StreamSettings struct {
	// File keeps the stream on disk, so that it survives a server's restart.
	// Default: memory, because engines and relays can make it again.
	File bool
	// MaxAge drops older messages. A block that was stored longer ago is not
	// rebuilt by a tracker that restarts. Default 24 h.
	MaxAge time.Duration
	// MaxBytes drops the oldest messages beyond it. Default 1 GiB.
	MaxBytes int64
	// Replicas of the stream in a NATS cluster. Default 1.
	Replicas int
	// DedupeWindow is how long message ids are remembered. Default 2 min.
	DedupeWindow time.Duration
}

func (s StreamSettings) config() jetstream.StreamConfig {
	or := func(v, d time.Duration) time.Duration {
		if v <= 0 {
			return d
		}
		return v
	}
	c := jetstream.StreamConfig{
		Name:        KVStream,
		Description: "KV cache events of the inference engines, as their relay read them",
		Subjects:    []string{kvPrefix + ">"},
		Storage:     jetstream.MemoryStorage,
		Retention:   jetstream.LimitsPolicy,
		Discard:     jetstream.DiscardOld,
		MaxAge:      or(s.MaxAge, 24*time.Hour),
		MaxBytes:    s.MaxBytes,
		Replicas:    max(s.Replicas, 1),
		Duplicates:  or(s.DedupeWindow, 2*time.Minute),
	}
	if s.File {
		c.Storage = jetstream.FileStorage
	}
	if c.MaxBytes <= 0 {
		c.MaxBytes = 1 << 30
	}
	c.Duplicates = min(c.Duplicates, c.MaxAge) // the server insists
	return c
}

// minBytes is the least size of the stream that is tried.
const minBytes = 16 << 20

// tooLarge tells whether the server has no room for a stream of that size: it
// reserves the bytes of each stream. A cluster says that no server is suitable, for
// whatever reason; only its text tells that it is this one.
func tooLarge(err error) bool {
	const noPeers, insufficientResources, memoryExceeded, storageExceeded = 10005, 10023, 10028, 10047
	var api *jetstream.APIError
	if !errors.As(err, &api) {
		return false
	}
	switch api.ErrorCode {
	case insufficientResources, memoryExceeded, storageExceeded:
		return true
	case noPeers:
		return strings.Contains(api.Description, "insufficient storage")
	}
	return false
}

// EnsureKVStream returns the stream of KV events and makes it if there is
// none, smaller than s asks if the server has no room for that. A stream that
// exists is left as it is: an operator may have sized it.
func (c *Conn) EnsureKVStream(ctx context.Context, s StreamSettings) (jetstream.Stream, error) {
	ctx, cancel := context.WithTimeout(ctx, apiTimeout)
	defer cancel()
	stream, err := c.js.Stream(ctx, KVStream)
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		// The bucket first: the stream reserves up to all of the server's memory. A
		// failure shows when the bucket is used.
		_, _ = c.reports(ctx)
		cfg := s.config()
		for stream, err = c.js.CreateStream(ctx, cfg); tooLarge(err) && cfg.MaxBytes > minBytes; {
			cfg.MaxBytes = max(cfg.MaxBytes/2, minBytes)
			stream, err = c.js.CreateStream(ctx, cfg)
		}
		if errors.Is(err, jetstream.ErrStreamNameAlreadyInUse) { // made by a peer meanwhile
			stream, err = c.js.Stream(ctx, KVStream)
		}
	}
	if err != nil {
		return nil, fmt.Errorf("ensure stream %s: %w", KVStream, err)
	}
	return stream, nil
}

// PublishKVAsync sends m and returns a future of its ack. It blocks while 4096
// publishes are without an ack. The future fails within 5 s if no ack comes:
// then the message may be stored or not, and sending it again is safe.
//
// Order: JetStream stores messages of one connection in the order in which
// they were sent, but one that failed and is sent again comes late. A sender
// that must keep the order per worker has one message of it on the way at a
// time and gathers the next meanwhile.
func (c *Conn) PublishKVAsync(w Worker, m *KVMessage) (jetstream.PubAckFuture, error) {
	msg, err := m.Encode(w)
	if err != nil {
		return nil, err
	}
	f, err := c.js.PublishMsgAsync(msg, jetstream.WithStallWait(stallWait))
	if err != nil {
		return nil, fmt.Errorf("publish KV message: %w", err)
	}
	return f, nil
}

// PublishKV sends m and waits until it is stored. It retries until ctx is done
// and makes the stream with settings s where it is missing, so it fails only
// with ctx or when m itself is not acceptable. The ack's Sequence counts from 1 in each
// new stream: one below an earlier ack's tells that the stream was lost.
func (c *Conn) PublishKV(ctx context.Context, s StreamSettings, w Worker, m *KVMessage) (*jetstream.PubAck, error) {
	for try := 0; ; try++ {
		f, err := c.PublishKVAsync(w, m)
		if err == nil {
			select {
			case ack := <-f.Ok():
				return ack, nil
			case err = <-f.Err():
			case <-ctx.Done():
				return nil, ctx.Err()
			}
		}
		if noStream(err) {
			// A failure shows in the next publish.
			_, _ = c.EnsureKVStream(ctx, s)
		} else if Permanent(err) {
			return nil, err
		}
		if !backoff(ctx, try) {
			return nil, errors.Join(ctx.Err(), err)
		}
	}
}

// ErrInvalid says that a message can never be sent as it is.
var ErrInvalid = errors.New("KV message is not valid")

// Permanent tells whether sending the same message again would fail again: it
// is invalid or too large, or the connection was closed by its owner.
func Permanent(err error) bool {
	return errors.Is(err, ErrInvalid) || errors.Is(err, nats.ErrMaxPayload) ||
		errors.Is(err, jetstream.ErrStreamMessageExceedsMaximum) ||
		errors.Is(err, nats.ErrConnectionClosed)
}

// LastKV returns the newest KV message of a worker, and when the server stored
// it: a relay that starts again learns from it which epoch and number it had
// reached. ok is false when the stream or the message does not exist, or when
// the message is not readable.
func (c *Conn) LastKV(ctx context.Context, w Worker) (m KVMessage, stored time.Time, ok bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, apiTimeout)
	defer cancel()
	stream, err := c.js.Stream(ctx, KVStream)
	if err == nil {
		var raw *jetstream.RawStreamMsg
		raw, err = stream.GetLastMsgForSubject(ctx, w.KVSubject())
		if err == nil {
			ok = m.Decode(raw.Header, raw.Data) == nil
			return m, raw.Time, ok, nil
		}
	}
	if errors.Is(err, jetstream.ErrMsgNotFound) || errors.Is(err, jetstream.ErrStreamNotFound) {
		return m, stored, false, nil
	}
	return m, stored, false, fmt.Errorf("read last KV message: %w", err)
}
