// Package usage turns what was measured of requests into usage events and gets
// each of them onto the stream, whatever dies meanwhile.
//
// A request is written down when it first goes to a backend, every now and then
// while its answer comes, and when it is over. All that goes to files in a
// folder of this process (the spool); a background task publishes the events
// from there and deletes them after they were acknowledged. While NATS is away
// they wait, serving goes on. When the process is killed, the next one with
// the same folder publishes what is left, and settles the requests that were
// under way with what was last known of them. So an event may come more than
// once but, as long as the disk holds, never not at all; readers keep one per
// id.
//
// What is written survives the death of the process at once, and that of the
// machine after Settings.Sync. The folder is bounded: when it is full, or the
// disk fails, events are dropped and counted, because serving comes first.
// All methods are safe for concurrent use.
package usage

import (
	"context"
	"log/slog"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/kinference/kinference/internal/bus"
	usagev1 "github.com/kinference/kinference/proto/gen/kinference/usage/v1"
	"github.com/kinference/kinference/services/ingress/internal/meter"
)

// Settings of a Recorder. Dir and Publisher are required.
type Settings struct {
	// Dir is the folder of the spool. One process at a time may use it.
	Dir string
	// Ingress names this process in its events.
	Ingress string
	// MaxBytes bounds the spool. Default 1 GiB, about two million requests.
	MaxBytes int64
	// SegmentBytes is the size of one file. Default 1 MiB. After a kill up to one
	// file of events that were acknowledged is published again.
	SegmentBytes int64
	// Sync is the longest time until what was written is safe from a loss of
	// power. Default 1 s.
	Sync time.Duration
	// Progress is how often running answers are written down. Default 1 s.
	Progress time.Duration
	// Keep is how long acknowledged events are kept, to publish them again if the
	// stream turns out to have lost some. Default 5 min: a NATS server that does
	// not sync always does so every 2 min.
	Keep time.Duration
	// Publisher stores events.
	Publisher Publisher
	Log       *slog.Logger // nil: silent
}

// Publisher stores events on the stream: *bus.Conn with its settings.
type Publisher interface {
	PublishUsage(ctx context.Context, messages []bus.UsageMessage) bus.UsageResult
}

func (s *Settings) defaults() {
	if s.MaxBytes <= 0 {
		s.MaxBytes = 1 << 30
	}
	if s.SegmentBytes <= 0 {
		s.SegmentBytes = 1 << 20
	}
	if s.Sync <= 0 {
		s.Sync = time.Second
	}
	if s.Progress <= 0 {
		s.Progress = time.Second
	}
	if s.Keep <= 0 {
		s.Keep = 5 * time.Minute
	}
	if s.Log == nil {
		s.Log = slog.New(slog.DiscardHandler)
	}
}

// Recorder writes usage down and publishes it. Use Open, then Run.
type Recorder struct {
	set   Settings
	spool *spool
	wake  chan struct{} // has a token when there is something to publish
	// high is the newest number on the stream that an acknowledgement told.
	high uint64

	published, replayed atomic.Uint64
}

// Stats are figures for metrics.
type Stats struct {
	// Bytes on disk, and those that are not acknowledged yet.
	Bytes, Pending int64
	// Running requests that are written down.
	Running int
	// Events since the start: acknowledged, dropped because the spool was full or
	// the disk failed, made for requests of a former process, and published again
	// because the stream lost them. Corrupt counts unreadable places in files.
	Published, Dropped, Recovered, Replayed, Corrupt uint64
}

// Open opens the spool, makes its folder if there is none, and settles the
// requests that a former process left. The caller calls Run.
func Open(s Settings) (*Recorder, error) {
	s.defaults()
	sp, err := openSpool(&s)
	if err != nil {
		return nil, err
	}
	return &Recorder{set: s, spool: sp, wake: make(chan struct{}, 1)}, nil
}

// Request is a request that was written down and is not over.
type Request struct {
	r  *Recorder
	id string
	// What is known of the answer so far, -1: nothing.
	input, output atomic.Int64

	written counts // what the last progress entry had; the spool's
	segment *segment
	frame   []byte // its open entry
}

// counts of tokens; those below 0 are unknown.
type counts struct{ input, output int64 }

var nothing = counts{-1, -1}

// Begin writes a request down before it goes to a backend for the first time.
// End must follow.
func (r *Recorder) Begin(rec *meter.Record) *Request {
	if r == nil {
		return nil
	}
	q := &Request{r: r, id: rec.ID, written: nothing}
	q.input.Store(-1)
	q.output.Store(-1)
	u := Event(rec, r.set.Ingress)
	u.Ended = timestamppb.Now() // until it is over
	r.spool.begin(q, bus.UsageSubject(rec.Tenant()), u)
	return q
}

// Progress tells the counts that the backend has reported so far; those below 0
// are unknown. It costs next to nothing.
func (q *Request) Progress(input, output int) {
	if q != nil {
		q.input.Store(int64(input))
		q.output.Store(int64(output))
	}
}

// End writes down how the request was.
func (q *Request) End(rec *meter.Record) {
	if q == nil {
		return
	}
	if q.r.spool.end(q, bus.UsageSubject(rec.Tenant()), Event(rec, q.r.set.Ingress)) {
		q.r.notify()
	}
}

func (r *Recorder) notify() {
	select {
	case r.wake <- struct{}{}:
	default:
	}
}

// Stats returns the figures as of now; zeros of a nil Recorder.
func (r *Recorder) Stats() Stats {
	if r == nil {
		return Stats{}
	}
	s := r.spool.stats()
	s.Published, s.Replayed = r.published.Load(), r.replayed.Load()
	return s
}

const (
	// publishBatch bounds the events on their way to NATS.
	publishBatch = 512
	// flushLimit bounds how long a stop waits for NATS. What is left is published
	// by the next process.
	flushLimit = 3 * time.Second
	// callLimit bounds one batch.
	callLimit = 10 * time.Second
	// tidyEvery is how often files that nobody needs are looked for.
	tidyEvery = 5 * time.Second
)

// Run publishes until ctx is done, then what is left for a short while, and
// closes the spool.
func (r *Recorder) Run(ctx context.Context) {
	var tasks sync.WaitGroup
	background, stop := context.WithCancel(context.WithoutCancel(ctx))
	tasks.Go(func() { every(background, r.set.Sync, r.spool.sync) })
	tasks.Go(func() { every(background, r.set.Progress, r.spool.progress) })
	tasks.Go(func() { every(background, tidyEvery, func() { r.spool.tidy(false) }) })
	for ctx.Err() == nil {
		if !r.publish(ctx) {
			select {
			case <-ctx.Done():
			case <-r.wake:
			}
		}
	}
	last, cancel := context.WithTimeout(context.WithoutCancel(ctx), flushLimit)
	for r.publish(last) {
	}
	cancel()
	stop()
	tasks.Wait()
	r.spool.close()
}

func every(ctx context.Context, d time.Duration, f func()) {
	t := time.NewTicker(d)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
			f()
		}
	}
}

// publish publishes one batch. It returns false when there is nothing to
// publish, or ctx is done.
func (r *Recorder) publish(ctx context.Context) bool {
	batch, at := r.spool.nextBatch(publishBatch)
	if at.segment == nil {
		return false
	}
	for try := 0; len(batch) > 0; try++ {
		call, cancel := context.WithTimeout(ctx, callLimit)
		result := r.set.Publisher.PublishUsage(call, batch)
		cancel()
		r.published.Add(uint64(len(batch) - len(result.Left)))
		batch = result.Left
		if r.lost(&result) {
			return true // from the start
		}
		if len(batch) == 0 {
			break
		}
		if try == 0 {
			r.set.Log.Warn("usage events wait for NATS", "events", len(batch), "err", result.Err)
		}
		if !pause(ctx, try) {
			return false
		}
	}
	r.spool.acked(at)
	return true
}

// lost notes the numbers of acknowledgements. They grow unless the stream lost
// messages, or is a new one: then all events that are kept go out again.
func (r *Recorder) lost(result *bus.UsageResult) bool {
	if result.Low == 0 {
		return false
	}
	known := r.high
	r.high = result.High
	if result.Low > known {
		return false
	}
	n := r.spool.rewind()
	r.replayed.Add(uint64(n))
	r.set.Log.Error("the stream of usage events lost messages that it had acknowledged: publishing again", "bytes", n, "had", known, "has", result.Low)
	return n > 0
}

// pause waits before the next try, from 50 ms to 5 s; false when ctx is done.
func pause(ctx context.Context, try int) bool {
	d := min(50*time.Millisecond<<min(try, 7), 5*time.Second)
	t := time.NewTimer(d/2 + rand.N(d/2))
	defer t.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-t.C:
		return true
	}
}

// Event is the usage event of a record.
func Event(r *meter.Record, ingress string) *usagev1.Usage {
	u := &usagev1.Usage{
		Id: r.ID, RequestId: r.RequestID, Ingress: ingress, Received: timestamppb.New(r.Received), Ended: timestamppb.New(r.Ended),
		Tenants: r.Tenants, User: r.User, KeyId: r.KeyID, CostCenter: r.CostCenter, Qos: r.QoS,
		Route: r.Route, Stream: r.Stream, Model: r.Model, ServedModel: r.ServedModel, Pool: r.Pool, WorkerSet: r.WorkerSet,
		Provider: r.Provider, Worker: r.Worker, Rule: r.Rule, Tags: r.Tags, Attempts: uint32(r.Attempts), Status: uint32(r.Status),
		Tokens: tokens(&r.Tokens),
	}
	u.Overload, u.Hedge = r.Overload, r.Hedge
	switch r.Outcome {
	case meter.OK:
		u.Outcome = usagev1.Outcome_OUTCOME_OK
	case meter.Canceled:
		u.Outcome = usagev1.Outcome_OUTCOME_CANCELED
	case meter.Failed:
		u.Outcome = usagev1.Outcome_OUTCOME_FAILED
	case meter.Refused:
		u.Outcome = usagev1.Outcome_OUTCOME_REFUSED
	}
	if d, ok := r.TTFT(); ok {
		u.Ttft = seconds(d)
	}
	if v, ok := r.ITL(); ok {
		u.ItlMean, u.ItlMax = &v, seconds(r.MaxGap)
	}
	if v, ok := r.TPOT(); ok {
		u.Tpot = &v
	}
	u.Queue = seconds(r.Queued)
	if !r.Ended.IsZero() {
		u.E2E = seconds(r.E2E())
	}
	u.Cost = cost(r.Price, &r.Tokens)
	return u
}

func seconds(d time.Duration) *float64 {
	s := d.Seconds()
	return &s
}

func tokens(t *meter.Tokens) *usagev1.Tokens {
	var out usagev1.Tokens
	out.Input, out.InputEstimated = count(t.Input)
	out.CachedInput, out.CachedInputEstimated = count(t.Cached)
	out.Output, out.OutputEstimated = count(t.Output)
	out.Reasoning, out.ReasoningEstimated = count(t.Reasoning)
	return &out
}

func count(c meter.Count) (*uint32, bool) {
	if !c.Known() {
		return nil, false
	}
	n := uint32(min(max(c.N, 0), 1<<32-1))
	return &n, c.Source == meter.Estimated || c.Source == meter.Least
}

func cost(p *meter.Price, t *meter.Tokens) *usagev1.Cost {
	if p == nil {
		return nil
	}
	out := &usagev1.Cost{Currency: p.Currency, PriceVersion: p.Version}
	if p.Hourly > 0 {
		out.HourlyPrice = p.Hourly.String()
	}
	if !p.Tokens {
		return out
	}
	out.InputPrice, out.CachedInputPrice, out.OutputPrice = p.Input.String(), p.Cached.String(), p.Output.String()
	if c, ok := p.Cost(t); ok {
		out.Total, out.Input, out.CachedInput, out.Output = c.Total().String(), c.Input.String(), c.Cached.String(), c.Output.String()
	}
	return out
}
