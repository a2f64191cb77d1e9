package bus

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

const (
	// heartbeat is how often the server speaks up while there is no message;
	// after two of them without a word the consumer is made again.
	heartbeat = 2 * time.Second
	// pollInterval is how often the stream is asked whether it is still the same.
	pollInterval = 2 * time.Second
)

// Delivery is one message of the stream. Its fields are valid until the call
// that got it returns.
type Delivery struct {
	Subject string
	Header  nats.Header
	Data    []byte
	// Position is the message's place in the stream.
	Position
	// Pending is how many messages were waiting behind it.
	Pending uint64
	// Stored is when the server stored it.
	Stored time.Time
}

// KVHandler receives the stream. Its functions are called from one goroutine,
// one after another; Message is required.
type KVHandler struct {
	Message func(Delivery)
	// Start is called before the first message of a stream: once at the
	// beginning, and again whenever the stream was lost and made anew. Messages
	// seen before may then come again, but need not.
	Start func()
	// CaughtUp is called once per Start, when all messages that the stream held
	// at that time have been delivered.
	CaughtUp func()
	// Held is told now and then, behind which message the reader is and which ones the
	// stream holds.
	Held func(at Position, first, last uint64)
	// Reading is called whenever consumption begins or goes on, with how many messages
	// wait for it.
	Reading func(pending uint64)
	// Trouble is told why consumption was interrupted; it goes on by itself.
	Trouble func(error)
}

// ConsumeKV reads the stream of KV events from a place, or from its start if the zero
// Position is given or the stream is not that one, and then as messages
// come, in order and without a hole, until ctx is done; it returns nil then.
// The stream is made with settings s where it is missing. Disconnects and
// server restarts are survived: reading goes on behind the last message, or
// from the start of the new stream if the old one was lost.
func (c *Conn) ConsumeKV(ctx context.Context, s StreamSettings, from Position, h KVHandler) error {
	r := reader{conn: c, settings: s, h: h, created: from.Created, seq: from.Seq, first: true}
	for try := 0; ; try++ {
		seq := r.seq
		err := r.read(ctx)
		if ctx.Err() != nil {
			return nil
		}
		if h.Trouble != nil && err != nil {
			h.Trouble(err)
		}
		if r.seq > seq {
			try = 0
		}
		if !backoff(ctx, try) {
			return nil
		}
	}
}

// reader is the position of one ConsumeKV.
type reader struct {
	conn     *Conn
	settings StreamSettings
	h        KVHandler

	// created identifies the stream: a new one of the same name has another.
	created time.Time
	// seq is the number of the last message that was delivered.
	seq uint64
	// first is set until the stream was looked at.
	first bool
	// target is the number at which the reader has caught up; caughtUp tells
	// whether that was said.
	target   uint64
	caughtUp bool
}

// read consumes until something is wrong.
func (r *reader) read(ctx context.Context) error {
	stream, err := r.conn.EnsureKVStream(ctx, r.settings)
	if err != nil {
		return err
	}
	info, err := r.info(ctx, stream)
	if err != nil {
		return err
	}
	if !info.Created.Equal(r.created) || info.State.LastSeq < r.seq {
		r.created, r.seq, r.target, r.caughtUp = info.Created, 0, info.State.LastSeq, false
		if r.h.Start != nil {
			r.h.Start()
		}
	} else if r.first {
		r.target = info.State.LastSeq
	}
	r.first = false
	r.checkCaughtUp(info)

	// The consumer is made again after any irregularity, so it needs neither
	// acks nor to be kept anywhere but in memory.
	cctx, cancel := context.WithTimeout(ctx, apiTimeout)
	consumer, err := stream.CreateConsumer(cctx, jetstream.ConsumerConfig{
		DeliverPolicy:     jetstream.DeliverByStartSequencePolicy,
		OptStartSeq:       r.seq + 1,
		AckPolicy:         jetstream.AckNonePolicy,
		MaxDeliver:        1,
		MemoryStorage:     true,
		Replicas:          1,
		InactiveThreshold: 30 * time.Second,
	})
	cancel()
	if err != nil {
		return fmt.Errorf("make consumer: %w", err)
	}
	name := consumer.CachedInfo().Name
	if r.h.Reading != nil {
		r.h.Reading(consumer.CachedInfo().NumPending)
	}
	defer func() {
		dctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
		defer cancel()
		if r.conn.Connected() {
			_ = stream.DeleteConsumer(dctx, name) // else it goes when inactive
		}
	}()
	it, err := consumer.Messages(jetstream.PullHeartbeat(heartbeat), jetstream.PullExpiry(30*time.Second),
		jetstream.PullMaxMessages(2048), jetstream.WithMessagesErrOnMissingHeartbeat(true))
	if err != nil {
		return fmt.Errorf("pull messages: %w", err)
	}
	defer it.Stop()

	// The watch runs beside the pull loop and ends it by the context.
	wctx, stop := context.WithCancelCause(ctx)
	infos := make(chan *jetstream.StreamInfo, 1)
	done := make(chan struct{})
	go func() {
		defer close(done)
		stop(r.watch(wctx, stream, r.created, infos))
	}()
	defer func() { stop(nil); <-done }()

	// The deadline lets news of a quiet stream through.
	nctx, end := wctx, context.CancelFunc(func() {})
	wait := func() {
		end()
		nctx, end = context.WithTimeout(wctx, pollInterval)
	}
	wait()
	defer func() { end() }()
	// At the last news of the stream: whether there was more to read, and where.
	var behind, still bool
	at := r.seq
	for delivered := uint64(0); ; {
		msg, err := it.Next(jetstream.NextContext(nctx))
		select {
		case i := <-infos:
			// A consumer that was made while the stream had no leader may give nothing
			// and say that it is well; and so may one that an operator has paused.
			if behind, still = i.State.Msgs > 0 && i.State.LastSeq > r.seq, behind && r.seq == at; behind && still {
				return errors.New("the consumer does not deliver")
			}
			at = r.seq
			r.checkCaughtUp(i)
			if r.h.Held != nil {
				r.h.Held(Position{r.created, r.seq}, i.State.FirstSeq, i.State.LastSeq)
			}
		default:
		}
		switch {
		case wctx.Err() != nil:
			return context.Cause(wctx)
		case errors.Is(err, context.DeadlineExceeded):
			wait()
			continue
		case err != nil:
			return fmt.Errorf("next message: %w", err)
		}
		md, err := msg.Metadata()
		if err != nil {
			return fmt.Errorf("message metadata: %w", err)
		}
		// Without acks a message that was lost on the way is not sent again.
		if delivered++; md.Sequence.Consumer != delivered {
			return errors.New("a message was lost on the way")
		}
		r.h.Message(Delivery{
			Subject: msg.Subject(), Header: msg.Headers(), Data: msg.Data(),
			Position: Position{r.created, md.Sequence.Stream}, Pending: md.NumPending, Stored: md.Timestamp,
		})
		r.seq = md.Sequence.Stream
		if r.seq >= r.target || md.NumPending == 0 {
			r.sayCaughtUp()
		}
	}
}

func (r *reader) info(ctx context.Context, s jetstream.Stream) (*jetstream.StreamInfo, error) {
	ctx, cancel := context.WithTimeout(ctx, apiTimeout)
	defer cancel()
	info, err := s.Info(ctx)
	if err != nil {
		return nil, fmt.Errorf("stream info: %w", err)
	}
	return info, nil
}

// watch returns when the pull loop must look again: the connection was lost
// (messages on the way are gone) or the stream is not the one that it reads.
func (r *reader) watch(ctx context.Context, s jetstream.Stream, created time.Time, infos chan<- *jetstream.StreamInfo) error {
	status := r.conn.nc.StatusChanged(nats.RECONNECTING, nats.DISCONNECTED, nats.CLOSED)
	defer r.conn.nc.RemoveStatusListener(status)
	tick := time.NewTicker(pollInterval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case st := <-status:
			return fmt.Errorf("connection is %s", st)
		case <-tick.C:
		}
		info, err := r.info(ctx, s)
		if err != nil {
			return err
		}
		if !info.Created.Equal(created) {
			return errors.New("the stream was replaced")
		}
		select {
		case infos <- info:
		default:
		}
	}
}

// checkCaughtUp covers the cases in which no message will come to tell:
// nothing to read, or what was to be read has expired.
func (r *reader) checkCaughtUp(info *jetstream.StreamInfo) {
	if r.seq >= r.target || info.State.Msgs == 0 || info.State.FirstSeq > r.target {
		r.sayCaughtUp()
	}
}

func (r *reader) sayCaughtUp() {
	if r.caughtUp {
		return
	}
	r.caughtUp = true
	if r.h.CaughtUp != nil {
		r.h.CaughtUp()
	}
}
