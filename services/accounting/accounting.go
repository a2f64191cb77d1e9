// Package accounting is the accounting service: it takes every usage event from
// the stream into a ledger, and answers who used what and what it cost.
//
// The all in one binary, its own main and tests run the same Service. The ledger
// is a SQLite file, or a PostgreSQL database that several of them share; they
// divide the stream among themselves. It is not on the request path: while it is
// away events wait on the stream, and nothing is lost or counted twice when it
// is killed. While NATS is away it answers from what it has.
package accounting

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"math"
	"net"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/kinference/kinference/internal/bus"
	"github.com/kinference/kinference/internal/daemon"
	"github.com/kinference/kinference/internal/rpc"
	"github.com/kinference/kinference/proto/gen/kinference/accounting/v1/accountingv1connect"
	usagev1 "github.com/kinference/kinference/proto/gen/kinference/usage/v1"
	"github.com/kinference/kinference/services/accounting/internal/ledger"
	"github.com/kinference/kinference/services/accounting/internal/objective"
)

// Config are the settings of an operator. The zero value of a field means its
// default.
type Config struct {
	// Listen is the address of the RPC port.
	Listen string
	// Listener is an open RPC port; Listen is then ignored.
	Listener net.Listener
	// NATSURL is where usage events come from; empty: nowhere.
	NATSURL string
	// NATS is how to get into it.
	NATS bus.Access
	// Ledger is a postgres:// URL or the path of a SQLite file; empty: a file in
	// memory's stead that is gone with the process, and made again from the stream.
	Ledger string
	// Events and Hours are how long events and the sums of hours are kept. Sums of
	// days are kept for ever.
	Events, Hours time.Duration
	// RouterURL is where the catalog comes from, which has the objectives; empty:
	// there are none.
	RouterURL string
	// GPUEvery is the length of the spans that the time of workers is divided in among
	// requests: up to 15 s, or a multiple of that; 0: a minute.
	GPUEvery time.Duration
	// Replicas, MaxAge and StreamBytes are those of the stream, where this process
	// makes it.
	Replicas    int
	MaxAge      time.Duration
	StreamBytes int64
	// Rebuild makes the ledger anew from the stream, as far as that reaches back,
	// and ends.
	Rebuild bool
	// Copies back the ledger up, or restore it, and end.
	Copies Copies
}

// Service is the accounting service.
type Service struct{ Config }

var _ daemon.Service = (*Service)(nil)

// Flags declares the settings.
func (s *Service) Flags(fs *flag.FlagSet) {
	s.defaults()
	fs.StringVar(&s.Listen, "listen", s.Listen, "address of the RPC port")
	fs.StringVar(&s.NATSURL, "nats-url", s.NATSURL, "URLs of NATS, comma separated; empty: no events come")
	s.NATS.Flags(fs)
	fs.StringVar(&s.Ledger, "ledger", s.Ledger, "where the ledger is: the path of a SQLite file, or a postgres:// URL, which is better given by the environment; empty: a temporary file, made again from the stream at each start")
	fs.StringVar(&s.RouterURL, "router-url", s.RouterURL, "URLs of the routers, with commas between them, whose catalog has the objectives; empty: there are none")
	fs.DurationVar(&s.Events, "keep-events", s.Events, "how long the ledger keeps events; later ones are not taken any more. Longer than the stream does")
	fs.DurationVar(&s.Hours, "keep-hours", s.Hours, "how long the ledger keeps sums by the hour; those by the day stay")
	fs.IntVar(&s.Replicas, "usage-replicas", s.Replicas, "replicas of the stream, where this process makes it")
	fs.DurationVar(&s.MaxAge, "usage-max-age", s.MaxAge, "how long the stream keeps events, where this process makes it")
	fs.Int64Var(&s.StreamBytes, "usage-stream-bytes", s.StreamBytes, "bytes of the stream, where this process makes it")
	s.Copies.flags(fs)
	fs.BoolVar(&s.Rebuild, "rebuild", s.Rebuild, "forget what the stream still holds, so that the next start reads it again, and end")
}

func (s *Service) defaults() {
	or(&s.Listen, "127.0.0.1:7106")
	or(&s.Events, 45*24*time.Hour)
	or(&s.Hours, 400*24*time.Hour)
	or(&s.Replicas, 1)
	or(&s.MaxAge, 30*24*time.Hour)
	or(&s.StreamBytes, 8<<30)
}

func or[T comparable](p *T, value T) {
	var zero T
	if *p == zero {
		*p = value
	}
}

// Validate joins all faults of the settings.
func (s *Service) Validate() error {
	var faults []error
	if s.Events < 0 || s.Hours < 0 || s.MaxAge < 0 || s.StreamBytes < 0 || s.Replicas < 0 {
		faults = append(faults, errors.New("keep-events, keep-hours, usage-max-age, usage-stream-bytes and usage-replicas must not be negative"))
	}
	if s.Events < s.MaxAge {
		faults = append(faults, errors.New("keep-events is shorter than usage-max-age: events that come again would be counted again"))
	}
	if s.Rebuild && (s.NATSURL == "" || s.Ledger == "") {
		faults = append(faults, errors.New("rebuild needs nats-url and ledger"))
	}
	return errors.Join(append(faults, s.Copies.validate(s.Ledger))...)
}

// Run serves until ctx is done.
func (s *Service) Run(ctx context.Context) error {
	s.defaults()
	if err := s.Validate(); err != nil {
		return err
	}
	place := s.Ledger
	if s.Copies.asked() {
		return s.Copies.run(ctx, place)
	}
	if place == "" {
		dir, remove, err := tempDir()
		if err != nil {
			return err
		}
		defer remove()
		place = filepath.Join(dir, "ledger.db")
	}
	l, err := rpc.Listen(s.Listener, s.Listen)
	if err != nil {
		return err
	}
	defer l.Close()
	log := daemon.Logger(ctx)
	led, err := open(ctx, log, place)
	if err != nil || led == nil {
		return err
	}
	defer led.Close()
	v := &server{Config: s.Config, log: log, ledger: led, board: objective.NewBoard(), watched: newWatched()}
	if s.NATSURL != "" {
		if v.conn, err = bus.Connect(ctx, s.NATSURL, "accounting", s.NATS.Options()...); err != nil {
			return err
		}
		defer v.conn.Close()
	} else {
		log.Warn("no usage events come: there is no nats-url")
	}
	if s.Rebuild {
		return v.rebuild(ctx)
	}
	if err := v.metrics.init(daemon.Meter(ctx), v); err != nil {
		return err
	}
	defer v.metrics.close()
	if v.counted, err = v.ledger.Seq(ctx); err != nil {
		return err
	}
	g, ctx := errgroup.WithContext(ctx)
	if v.conn != nil {
		g.Go(func() error { return v.consume(ctx) })
		g.Go(func() error { return v.watched.follow(ctx, v.conn) })
		g.Go(func() error { v.divideTime(ctx); return nil })
	}
	if v.RouterURL != "" {
		g.Go(func() error { v.followCatalog(ctx); return nil })
	}
	g.Go(func() error { v.housekeep(ctx); return nil })
	g.Go(func() error {
		log.Info("accounting serves", "addr", l.Addr().String(), "ledger", ledger.Redact(place))
		daemon.Ready(ctx, true)
		return rpc.Serve(ctx, l, rpc.Mount[accountingv1connect.AccountingServiceHandler](ctx, v, accountingv1connect.NewAccountingServiceHandler))
	})
	return g.Wait()
}

// open opens the ledger, again and again while its database is away. The ledger
// is nil when ctx is done first.
func open(ctx context.Context, log *slog.Logger, place string) (*ledger.Ledger, error) {
	for delay := 250 * time.Millisecond; ; delay = min(2*delay, 10*time.Second) {
		l, err := ledger.Open(ctx, place)
		if err == nil {
			return l, nil
		}
		if ctx.Err() != nil {
			return nil, nil
		}
		if !ledger.Temporary(err) {
			return nil, err
		}
		log.Warn("the ledger's database is away", "err", err, "retry_in", delay.String())
		select {
		case <-ctx.Done():
			return nil, nil
		case <-time.After(delay):
		}
	}
}

// server is one run of the service.
type server struct {
	Config
	log     *slog.Logger
	ledger  *ledger.Ledger
	conn    *bus.Conn
	metrics metrics

	// counting is held while the board counts. It has all events up to the number
	// counted, whoever put them into the ledger.
	counting sync.Mutex
	board    *objective.Board
	counted  int64

	stored  atomic.Int64 // when the newest event of the last batch came to the stream, in Unix µs
	known   atomic.Bool  // the catalog
	sets    atomic.Pointer[workerSets]
	watched *watched

	fewEvents int // instead of maxCapacityEvents, in tests
}

func (v *server) settings() bus.UsageSettings {
	s := bus.UsageSettings{Replicas: v.Replicas, MaxAge: v.MaxAge, MaxBytes: v.StreamBytes}
	if v.Ledger == "" { // nobody reads with its consumer again
		s.Idle = time.Hour
	}
	return s
}

// consumer names the durable consumer of a ledger: a new ledger reads the stream
// from its start.
func consumer(name string) string { return "accounting-" + name }

// consume takes events from the stream into the ledger.
func (v *server) consume(ctx context.Context) error {
	return v.conn.ConsumeUsage(ctx, v.settings(), consumer(v.ledger.Name()), v.take, func(err error) {
		v.log.Warn("usage events do not come", "err", err)
	})
}

// takeTime bounds the transaction of one batch: less than the stream waits for
// an acknowledgement.
const takeTime = 12 * time.Second

// take adds a batch. What is no event is counted and left out, since it would
// come again for ever.
func (v *server) take(ctx context.Context, batch []bus.UsageDelivery) error {
	oldest := time.Now().Add(-v.Events)
	events := make([]*usagev1.Usage, 0, len(batch))
	invalid, old := 0, 0
	var stored time.Time
	for _, d := range batch {
		if d.Stored.After(stored) {
			stored = d.Stored
		}
		u, err := bus.DecodeUsage(d.Data)
		switch {
		case err != nil:
			v.log.Error("a message on the stream is left out", "seq", d.Seq, "err", err)
			invalid++
		case u.GetEnded().AsTime().Before(oldest):
			old++ // whether it was counted already nobody knows any more
		default:
			events = append(events, u)
		}
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), takeTime)
	defer cancel()
	added, err := v.ledger.Add(ctx, events)
	if err != nil {
		v.metrics.failed(ctx)
		return err
	}
	v.stored.Store(stored.UnixMicro())
	v.metrics.took(ctx, added, invalid, old)
	v.measure(ctx, added.Fresh)
	return nil
}

// rebuild forgets the days that the stream holds from their beginning, and gives
// the ledger a new consumer.
func (v *server) rebuild(ctx context.Context) error {
	stream, err := v.conn.EnsureUsageStream(ctx, v.settings())
	if err != nil {
		return err
	}
	info, err := stream.Info(ctx)
	if err != nil {
		return fmt.Errorf("look at the stream: %w", err)
	}
	// The stream has all that ended since, and it is taken from there: what ended longer
	// ago than events are kept is not. A stream that has its first message yet may be
	// younger than the ledger: one that took the place of a lost one.
	begin := info.State.FirstTime
	switch {
	case info.State.Msgs == 0:
		return errors.New("the stream is empty: there is nothing to make the ledger of, and it stays as it is")
	case info.State.FirstSeq <= 1:
		begin = info.Created
	}
	if oldest := time.Now().Add(-v.Events); begin.Before(oldest) {
		begin = oldest
	}
	since := begin.UTC().Truncate(24 * time.Hour).Add(24 * time.Hour)
	former := consumer(v.ledger.Name())
	if err := v.ledger.Forget(ctx, since); err != nil {
		return err
	}
	if err := v.conn.DropUsageConsumer(ctx, former); err != nil {
		v.log.Warn("the former consumer stays", "err", err)
	}
	v.log.Info("the next start reads the stream again", "since", since.Format(time.RFC3339), "events", info.State.Msgs)
	return nil
}

// housekeep removes what is too old, and makes room on the stream.
func (v *server) housekeep(ctx context.Context) {
	const trimEvery, pruneEvery = time.Minute, 60
	t := time.NewTicker(trimEvery)
	defer t.Stop()
	for n := 0; ; n++ {
		if v.conn != nil && v.conn.Connected() {
			v.trim(ctx)
		}
		if err := v.catchUp(ctx); err != nil && ctx.Err() == nil { // so that an answer has little to read
			v.log.Debug("objectives do not count", "err", err)
		}
		if n%pruneEvery > 0 {
			select {
			case <-ctx.Done():
				return
			case <-t.C:
			}
			continue
		}
		if err := v.ledger.Prune(ctx, time.Now().Add(-v.Events), time.Now().Add(-v.Hours)); err != nil && ctx.Err() == nil {
			v.log.Warn("old events stay", "err", err)
		}
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
	}
}

// trim makes room on the stream by what every consumer has: a full one refuses new
// events, which would fill the spools.
func (v *server) trim(ctx context.Context) {
	s, err := v.conn.TrimUsage(ctx)
	switch {
	case err != nil && ctx.Err() == nil:
		v.log.Debug("the stream was not looked at", "err", err)
	case s.Slow != "":
		v.log.Error("the stream of usage events is filling up: this consumer does not acknowledge", "consumer", s.Slow, "bytes", s.Bytes, "max_bytes", s.MaxBytes)
	case s.Removed > 0:
		v.log.Info("made room on the stream of usage events", "events", s.Removed)
	}
	if err == nil && s.MaxBytes > 0 {
		v.metrics.filled.Store(math.Float64bits(float64(s.Bytes) / float64(s.MaxBytes)))
	}
}
