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

// UsageStream is the name of the stream of usage events.
const UsageStream = "USAGE"

const usagePrefix = "usage."

// UsageSubject is where a tenant's usage events go: usage.<namespace>.<tenant>,
// both escaped. tenant is namespace/name; the empty one stands for an open
// gateway and has the subject usage.=.=
func UsageSubject(tenant string) string {
	namespace, name, _ := strings.Cut(tenant, "/")
	b := make([]byte, 0, len(usagePrefix)+len(tenant)+16)
	b = append(b, usagePrefix...)
	b = appendEscaped(b, namespace)
	b = append(b, '.')
	return string(appendEscaped(b, name))
}

// UsageSettings bound the stream of usage events, where this process makes it.
// Zero values take the defaults. A production installation makes it with three
// replicas on servers that run with sync_interval: always; see docs/usage.md.
type UsageSettings struct {
	// MaxAge is how far back a ledger can be made again. Default 30 days.
	MaxAge time.Duration
	// MaxBytes of all events. A full stream takes no more, so that no reader
	// misses any: publishers keep them. Default 8 GiB.
	MaxBytes int64
	// Replicas in a NATS cluster. Default 1.
	Replicas int
	// Idle is how long a consumer stays that nobody reads with; 0: for ever, and the
	// stream keeps what it has not acknowledged.
	Idle time.Duration
}

func (s UsageSettings) config() jetstream.StreamConfig {
	c := jetstream.StreamConfig{
		Name:        UsageStream,
		Description: "Usage of every request, as CloudEvents",
		Subjects:    []string{usagePrefix + ">"},
		Storage:     jetstream.FileStorage,
		Retention:   jetstream.LimitsPolicy,
		Discard:     jetstream.DiscardNew,
		MaxAge:      s.MaxAge,
		MaxBytes:    s.MaxBytes,
		MaxMsgSize:  maxUsage,
		Replicas:    max(s.Replicas, 1),
		Duplicates:  2 * time.Minute,
		// An administrator may purge, nobody may change history message by message.
		DenyDelete: true,
	}
	if c.MaxAge <= 0 {
		c.MaxAge = 30 * 24 * time.Hour
	}
	if c.MaxBytes <= 0 {
		c.MaxBytes = 8 << 30
	}
	c.Duplicates = min(c.Duplicates, c.MaxAge)
	return c
}

// maxUsage bounds an event in bytes.
const maxUsage = 64 << 10

// EnsureUsageStream returns the stream of usage events and makes it if there is
// none, smaller than s asks if the server has no room for that. A stream that
// exists is left as it is.
func (c *Conn) EnsureUsageStream(ctx context.Context, s UsageSettings) (jetstream.Stream, error) {
	ctx, cancel := context.WithTimeout(ctx, apiTimeout)
	defer cancel()
	stream, err := c.js.Stream(ctx, UsageStream)
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		cfg := s.config()
		for stream, err = c.js.CreateStream(ctx, cfg); tooLarge(err) && cfg.MaxBytes > minBytes; {
			cfg.MaxBytes = max(cfg.MaxBytes/2, minBytes)
			stream, err = c.js.CreateStream(ctx, cfg)
		}
		if errors.Is(err, jetstream.ErrStreamNameAlreadyInUse) { // made by a peer meanwhile
			stream, err = c.js.Stream(ctx, UsageStream)
		}
	}
	if err != nil {
		return nil, fmt.Errorf("ensure stream %s: %w", UsageStream, err)
	}
	return stream, nil
}

// UsageMessage is a usage event on its way: its id, its subject and the
// CloudEvent.
type UsageMessage struct {
	ID, Subject string
	Data        []byte
}

// UsageResult tells what became of events that were published.
type UsageResult struct {
	// Left are those that are not known to be stored: sending them again is safe.
	Left []UsageMessage
	// Err is the first reason; nil if nothing is left.
	Err error
	// Low and High are the smallest and largest number that the stream gave to those
	// that it stored now; 0: it stored none. A number that is not above all
	// earlier ones tells that the stream lost messages.
	Low, High uint64
}

// PublishUsage sends events and waits until they are stored, ctx is done or an
// acknowledgement fails to come for 5 s. All are tried. The stream is made with
// settings s where it is missing.
func (c *Conn) PublishUsage(ctx context.Context, s UsageSettings, messages []UsageMessage) (r UsageResult) {
	futures := make([]jetstream.PubAckFuture, len(messages))
	for i, m := range messages {
		msg := &nats.Msg{Subject: m.Subject, Data: m.Data, Header: nats.Header{
			nats.MsgIdHdr:  {m.ID},
			"Content-Type": {"application/cloudevents+json; charset=UTF-8"},
		}}
		f, err := c.js.PublishMsgAsync(msg, jetstream.WithStallWait(stallWait))
		if err != nil {
			r.Err = err
			break
		}
		futures[i] = f
	}
	for i, f := range futures {
		var err error
		if f != nil {
			select {
			case ack := <-f.Ok():
				if !ack.Duplicate {
					r.High = max(r.High, ack.Sequence)
					if r.Low == 0 || ack.Sequence < r.Low {
						r.Low = ack.Sequence
					}
				}
				continue
			case err = <-f.Err():
			case <-ctx.Done():
				err = ctx.Err()
			}
		}
		r.Left = append(r.Left, messages[i])
		if r.Err == nil {
			r.Err = err
		}
	}
	if noStream(r.Err) {
		// A failure shows in the next publish.
		_, _ = c.EnsureUsageStream(ctx, s)
	}
	return r
}

// UsageDelivery is one message of the stream.
type UsageDelivery struct {
	Subject string
	Data    []byte
	Seq     uint64
	Stored  time.Time
}

// UsageHandler takes a batch of events, in the order of the stream but for
// those that come again. With an error all of them come again later.
type UsageHandler func(ctx context.Context, batch []UsageDelivery) error

const (
	// usageBatch is how many events are taken at once.
	usageBatch = 512
	// usageWait is how long an empty stream is waited for in one pull.
	usageWait = time.Second
	// usageAckWait is how long a handler has before its events come again.
	usageAckWait = 15 * time.Second
)

// ConsumeUsage gives all events of the stream to h, from its start on, by the
// durable consumer of this name; processes that use the same name share the
// events. It goes on until ctx is done and returns nil then. Events are
// acknowledged after h returned, and the last acknowledgement of a batch is
// itself confirmed; a lost one means that events come again, so h must know them
// by their id. trouble is told why consumption was interrupted; nil ignores it.
func (c *Conn) ConsumeUsage(ctx context.Context, s UsageSettings, name string, h UsageHandler, trouble func(error)) error {
	for try := 0; ; try++ {
		worked, err := c.consumeUsage(ctx, s, name, h)
		if ctx.Err() != nil {
			return nil
		}
		if worked {
			try = 0
		}
		if trouble != nil {
			trouble(err)
		}
		if !backoff(ctx, try) {
			return nil
		}
	}
}

func (c *Conn) consumeUsage(ctx context.Context, s UsageSettings, name string, h UsageHandler) (worked bool, err error) {
	stream, err := c.EnsureUsageStream(ctx, s)
	if err != nil {
		return false, err
	}
	cctx, cancel := context.WithTimeout(ctx, apiTimeout)
	consumer, err := stream.CreateOrUpdateConsumer(cctx, jetstream.ConsumerConfig{
		Durable:           name,
		DeliverPolicy:     jetstream.DeliverAllPolicy,
		AckPolicy:         jetstream.AckExplicitPolicy,
		AckWait:           usageAckWait,
		MaxAckPending:     8 * usageBatch,
		MaxDeliver:        -1,
		InactiveThreshold: s.Idle,
	})
	cancel()
	if err != nil {
		return false, fmt.Errorf("make consumer %s: %w", name, err)
	}
	for {
		messages, err := fetch(ctx, consumer)
		if err != nil {
			return worked, err
		}
		if len(messages) == 0 {
			continue
		}
		batch := make([]UsageDelivery, 0, len(messages))
		for _, m := range messages {
			d := UsageDelivery{Subject: m.Subject(), Data: m.Data()}
			if meta, err := m.Metadata(); err == nil {
				d.Seq, d.Stored = meta.Sequence.Stream, meta.Timestamp
			}
			batch = append(batch, d)
		}
		if err := h(ctx, batch); err != nil {
			for _, m := range messages {
				_ = m.NakWithDelay(time.Second) // else they come after usageAckWait
			}
			return worked, err
		}
		worked = true
		for _, m := range messages[:len(messages)-1] {
			_ = m.Ack() // a lost one shows by the event coming again
		}
		actx, cancel := context.WithTimeout(context.WithoutCancel(ctx), apiTimeout)
		err = messages[len(messages)-1].DoubleAck(actx) // those before it are in, too
		cancel()
		if err != nil {
			return worked, fmt.Errorf("acknowledge usage: %w", err)
		}
	}
}

// fetch takes what there is, and waits a moment for the next event if there is
// nothing. A connection that goes away shows as nothing.
func fetch(ctx context.Context, consumer jetstream.Consumer) ([]jetstream.Msg, error) {
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	list, err := collect(consumer.FetchNoWait(usageBatch))
	if err != nil || len(list) > 0 {
		return list, err
	}
	wctx, cancel := context.WithTimeout(ctx, usageWait)
	defer cancel()
	list, err = collect(consumer.Fetch(1, jetstream.FetchContext(wctx)))
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	return list, err
}

func collect(batch jetstream.MessageBatch, err error) ([]jetstream.Msg, error) {
	if err != nil {
		return nil, fmt.Errorf("pull usage: %w", err)
	}
	var list []jetstream.Msg
	for m := range batch.Messages() {
		list = append(list, m)
	}
	err = batch.Error()
	if err != nil && len(list) == 0 && !errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, nats.ErrTimeout) && !errors.Is(err, jetstream.ErrNoMessages) {
		return nil, fmt.Errorf("pull usage: %w", err)
	}
	return list, nil
}

// UsageLag is how many events the consumer of this name has not acknowledged.
func (c *Conn) UsageLag(ctx context.Context, name string) (uint64, error) {
	ctx, cancel := context.WithTimeout(ctx, apiTimeout)
	defer cancel()
	consumer, err := c.js.Consumer(ctx, UsageStream, name)
	if err != nil {
		return 0, fmt.Errorf("find consumer %s: %w", name, err)
	}
	info := consumer.CachedInfo()
	return info.NumPending + uint64(info.NumAckPending), nil
}

// DropUsageConsumer removes a consumer that nobody will use again. One that does
// not exist is no error.
func (c *Conn) DropUsageConsumer(ctx context.Context, name string) error {
	ctx, cancel := context.WithTimeout(ctx, apiTimeout)
	defer cancel()
	err := c.js.DeleteConsumer(ctx, UsageStream, name)
	if err != nil && !errors.Is(err, jetstream.ErrConsumerNotFound) && !noStream(err) {
		return fmt.Errorf("drop consumer %s: %w", name, err)
	}
	return nil
}

// UsageState is how full the stream of usage events is.
type UsageState struct {
	Bytes, MaxBytes uint64
	Events          uint64
	// Removed events that all consumers had acknowledged, to make room.
	Removed uint64
	// Slow names the consumer that keeps the next ones; empty if there was room.
	Slow string
}

// TrimUsage makes room in a stream that is more than four fifths full: it removes
// the oldest events until three fifths are left, but none that a consumer has not
// acknowledged. A stream without a consumer keeps all.
func (c *Conn) TrimUsage(ctx context.Context) (UsageState, error) {
	ctx, cancel := context.WithTimeout(ctx, apiTimeout)
	defer cancel()
	stream, err := c.js.Stream(ctx, UsageStream)
	if err != nil {
		return UsageState{}, fmt.Errorf("trim %s: %w", UsageStream, err)
	}
	info := stream.CachedInfo()
	s := UsageState{Bytes: info.State.Bytes, MaxBytes: uint64(max(info.Config.MaxBytes, 0)), Events: info.State.Msgs}
	if s.MaxBytes == 0 || s.Bytes < s.MaxBytes/5*4 || s.Events == 0 {
		return s, nil
	}
	floor, slow := info.State.FirstSeq-1, ""
	list := stream.ListConsumers(ctx)
	first := true
	for consumer := range list.Info() {
		if first || consumer.AckFloor.Stream < floor {
			floor, slow, first = consumer.AckFloor.Stream, consumer.Name, false
		}
	}
	if err := list.Err(); err != nil {
		return s, fmt.Errorf("trim %s: %w", UsageStream, err)
	}
	surplus := s.Bytes - s.MaxBytes/5*3
	last := min(info.State.FirstSeq+surplus/(s.Bytes/s.Events)-1, floor)
	if last == floor {
		s.Slow = slow
	}
	if last < info.State.FirstSeq {
		return s, nil
	}
	if err := stream.Purge(ctx, jetstream.WithPurgeSequence(last+1)); err != nil {
		return s, fmt.Errorf("trim %s: %w", UsageStream, err)
	}
	s.Removed = last + 1 - info.State.FirstSeq
	return s, nil
}
