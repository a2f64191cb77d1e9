package bus_test

import (
	"context"
	"fmt"
	"math"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go/jetstream"
	"go.uber.org/goleak"
	"google.golang.org/protobuf/proto"

	"github.com/kinference/kinference/internal/bus"
	"github.com/kinference/kinference/internal/natsd"
	"github.com/kinference/kinference/internal/testenv"
	kvtrackerv1 "github.com/kinference/kinference/proto/gen/kinference/kvtracker/v1"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// batch is a message with payloads first to last, each naming its number.
func batch(first, last uint64) *bus.KVMessage {
	m := &bus.KVMessage{Kind: bus.KindBatch, Epoch: "e", First: first, Last: last}
	for i := first; i <= last; i++ {
		m.Payloads = append(m.Payloads, fmt.Append(nil, i))
	}
	return m
}

// log is what a consumer saw, as words.
type log struct {
	mu    sync.Mutex
	words []string
	grew  chan struct{}
}

func newLog() *log { return &log{grew: make(chan struct{})} }

func (l *log) add(w string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.words = append(l.words, w)
	close(l.grew)
	l.grew = make(chan struct{})
}

// wait returns once the log ends with want.
func (l *log) wait(t *testing.T, want ...string) {
	t.Helper()
	l.waitFor(t, func(string) bool { return true }, want...)
}

// waitFor is wait on those words that keep selects.
func (l *log) waitFor(t *testing.T, keep func(string) bool, want ...string) {
	t.Helper()
	timeout := time.After(30 * time.Second)
	for {
		l.mu.Lock()
		var words []string
		for _, w := range l.words {
			if keep(w) {
				words = append(words, w)
			}
		}
		grew := l.grew
		l.mu.Unlock()
		if n := len(words) - len(want); n >= 0 && cmp.Equal(words[n:], want) {
			return
		}
		select {
		case <-grew:
		case <-timeout:
			t.Fatalf("log is %q, want it to end with %q", words, want)
		}
	}
}

// notCaughtUp drops the words that come sooner or later: a stream may be found
// empty or not.
func notCaughtUp(w string) bool { return w != "caught up" }

func (l *log) handler(t *testing.T) bus.KVHandler {
	return bus.KVHandler{
		Start:    func() { l.add("start") },
		CaughtUp: func() { l.add("caught up") },
		Trouble:  func(err error) { t.Logf("trouble: %v", err) },
		Message: func(d bus.Delivery) {
			var m bus.KVMessage
			w, err := bus.ParseKVSubject(d.Subject)
			if err == nil {
				err = m.Decode(d.Header, d.Data)
			}
			if err != nil {
				l.add(err.Error())
				return
			}
			l.add(fmt.Sprintf("%s %d-%d", w.ID(), m.First, m.Last))
		},
	}
}

func connect(t *testing.T, url string) *bus.Conn {
	t.Helper()
	c, err := bus.Connect(t.Context(), url, t.Name())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c
}

// run runs f until the test ends.
func run(t *testing.T, f func(context.Context) error) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- f(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("background: %v", err)
		}
	})
}

func TestPublishAndConsume(t *testing.T) {
	c := connect(t, testenv.NATS(t))
	var s bus.StreamSettings
	if _, _, ok, err := c.LastKV(t.Context(), worker); ok || err != nil {
		t.Errorf("last message without a stream: got %v, %v; want false, nil", ok, err)
	}
	early := newLog()
	run(t, func(ctx context.Context) error { return c.ConsumeKV(ctx, s, bus.Position{}, early.handler(t)) })
	early.wait(t, "start", "caught up")

	other := worker
	other.Rank = 0
	for i, send := range []struct {
		w bus.Worker
		m *bus.KVMessage
	}{{worker, batch(0, 2)}, {other, batch(0, 0)}, {worker, batch(3, 3)}, {worker, batch(3, 3)}} {
		ack, err := c.PublishKV(t.Context(), s, send.w, send.m)
		if err != nil {
			t.Fatal(err)
		}
		if got, want := ack.Duplicate, i == 3; got != want {
			t.Errorf("message %d: duplicate is %v, want %v", i, got, want)
		}
	}
	want := []string{"demo.sim.a/1 0-2", "demo.sim.a/0 0-0", "demo.sim.a/1 3-3"}
	early.wait(t, append([]string{"start", "caught up"}, want...)...)
	late := newLog()
	run(t, func(ctx context.Context) error { return c.ConsumeKV(ctx, s, bus.Position{}, late.handler(t)) })
	late.wait(t, append(append([]string{"start"}, want...), "caught up")...)

	last, stored, ok, err := c.LastKV(t.Context(), worker)
	if err != nil || !ok {
		t.Fatalf("last message: %v, %v", ok, err)
	}
	if age := time.Since(stored); age < 0 || age > time.Minute {
		t.Errorf("the last message was stored %v ago", age)
	}
	if diff := cmp.Diff(last, *batch(3, 3)); diff != "" {
		t.Errorf("last message (-got +want):\n%s", diff)
	}
	if _, err := c.PublishKV(t.Context(), s, worker, &bus.KVMessage{}); !bus.Permanent(err) {
		t.Errorf("invalid message: got error %v, want a permanent one", err)
	}
	if n := c.MaxMessage(); n < 1<<20-4<<10 {
		t.Errorf("MaxMessage is %d", n)
	}
}

// TestNATSRestart covers a server that comes late and is restarted under a
// consumer: with its disk the stream goes on, without it starts anew.
func TestNATSRestart(t *testing.T) {
	for _, file := range []bool{true, false} {
		t.Run(fmt.Sprintf("file=%v", file), func(t *testing.T) {
			port := testenv.FreePort(t)
			opts := natsd.Options{Dir: t.TempDir(), Port: port}
			c := connect(t, "nats://127.0.0.1:"+strconv.Itoa(port))
			s := bus.StreamSettings{File: file}
			l := newLog()
			run(t, func(ctx context.Context) error { return c.ConsumeKV(ctx, s, bus.Position{}, l.handler(t)) })

			server := start(t, opts)
			publish := func(m *bus.KVMessage) {
				t.Helper()
				if _, err := c.PublishKV(t.Context(), s, worker, m); err != nil {
					t.Fatal(err)
				}
			}
			publish(batch(0, 1))
			publish(batch(2, 2))
			l.waitFor(t, notCaughtUp, "demo.sim.a/1 0-1", "demo.sim.a/1 2-2")

			server.Stop()
			server = start(t, opts)
			t.Cleanup(func() { server.Stop() })
			publish(batch(3, 3))
			publish(batch(4, 4))
			if file {
				l.waitFor(t, notCaughtUp, "demo.sim.a/1 0-1", "demo.sim.a/1 2-2", "demo.sim.a/1 3-3", "demo.sim.a/1 4-4")
				return
			}
			// Either side may have made the stream first.
			l.waitFor(t, notCaughtUp, "demo.sim.a/1 3-3", "demo.sim.a/1 4-4")
			l.mu.Lock()
			starts := 0
			for _, w := range l.words {
				if w == "start" {
					starts++
				}
			}
			l.mu.Unlock()
			if starts != 2 {
				t.Errorf("%d starts, want 2: %q", starts, l.words)
			}
		})
	}
}

// TestStreamReplaced covers a stream that is deleted and made again while the
// connection stays up.
func TestStreamReplaced(t *testing.T) {
	c := connect(t, testenv.NATS(t))
	var s bus.StreamSettings
	l := newLog()
	run(t, func(ctx context.Context) error { return c.ConsumeKV(ctx, s, bus.Position{}, l.handler(t)) })
	for i := range uint64(5) {
		if _, err := c.PublishKV(t.Context(), s, worker, batch(i, i)); err != nil {
			t.Fatal(err)
		}
	}
	l.waitFor(t, notCaughtUp, "demo.sim.a/1 3-3", "demo.sim.a/1 4-4")
	if err := c.JetStream().DeleteStream(t.Context(), bus.KVStream); err != nil {
		t.Fatal(err)
	}
	ack, err := c.PublishKV(t.Context(), s, worker, batch(5, 5))
	if err != nil {
		t.Fatal(err)
	}
	if ack.Sequence != 1 {
		t.Errorf("sequence %d in the new stream, want 1", ack.Sequence)
	}
	l.waitFor(t, notCaughtUp, "demo.sim.a/1 4-4", "start", "demo.sim.a/1 5-5")
}

// TestConsumerThatIsStill covers a consumer that sends heartbeats and no messages: it
// is given up for another.
func TestConsumerThatIsStill(t *testing.T) {
	c := connect(t, testenv.NATS(t))
	var s bus.StreamSettings
	l := newLog()
	run(t, func(ctx context.Context) error { return c.ConsumeKV(ctx, s, bus.Position{}, l.handler(t)) })
	publish := func(n uint64) {
		t.Helper()
		if _, err := c.PublishKV(t.Context(), s, worker, batch(n, n)); err != nil {
			t.Fatal(err)
		}
	}
	publish(0)
	l.waitFor(t, notCaughtUp, "demo.sim.a/1 0-0")
	stream, err := c.JetStream().Stream(t.Context(), bus.KVStream)
	if err != nil {
		t.Fatal(err)
	}
	for name := range stream.ConsumerNames(t.Context()).Name() {
		if _, err := stream.PauseConsumer(t.Context(), name, time.Now().Add(time.Hour)); err != nil {
			t.Fatal(err)
		}
	}
	publish(1)
	publish(2)
	l.waitFor(t, notCaughtUp, "demo.sim.a/1 0-0", "demo.sim.a/1 1-1", "demo.sim.a/1 2-2")
}

func TestStreamIsLeftAsItIs(t *testing.T) {
	c := connect(t, testenv.NATS(t))
	if _, err := c.EnsureKVStream(t.Context(), bus.StreamSettings{MaxBytes: 1 << 20, MaxAge: time.Minute}); err != nil {
		t.Fatal(err)
	}
	stream, err := c.EnsureKVStream(t.Context(), bus.StreamSettings{File: true})
	if err != nil {
		t.Fatal(err)
	}
	got := stream.CachedInfo().Config
	if got.MaxBytes != 1<<20 || got.Storage != jetstream.MemoryStorage || got.Duplicates != time.Minute {
		t.Errorf("stream has bytes %d, storage %v, dedupe %v", got.MaxBytes, got.Storage, got.Duplicates)
	}
}

// TestStreamFitsTheServer asks for more than any machine has.
func TestStreamFitsTheServer(t *testing.T) {
	for _, file := range []bool{false, true} {
		c := connect(t, testenv.NATS(t))
		stream, err := c.EnsureKVStream(t.Context(), bus.StreamSettings{File: file, MaxBytes: 1 << 50})
		if err != nil {
			t.Fatal(err)
		}
		if n := stream.CachedInfo().Config.MaxBytes; n < 16<<20 || n >= 1<<50 {
			t.Errorf("file %v: stream of %d bytes", file, n)
		}
	}
}

// TestReportsFitTheServer has the stream reserve all of the server's memory.
func TestReportsFitTheServer(t *testing.T) {
	s, err := server.NewServer(&server.Options{
		Host: "127.0.0.1", Port: server.RANDOM_PORT, NoLog: true, NoSigs: true,
		JetStream: true, StoreDir: t.TempDir(), JetStreamMaxMemory: 1 << 30,
	})
	if err != nil {
		t.Fatal(err)
	}
	go s.Start()
	t.Cleanup(func() {
		s.Shutdown()
		s.WaitForShutdown()
	})
	if !s.ReadyForConnections(20 * time.Second) {
		t.Fatal("NATS does not start")
	}
	c := connect(t, s.ClientURL())
	if _, err := c.EnsureKVStream(t.Context(), bus.StreamSettings{}); err != nil {
		t.Fatal(err)
	}
	report := &kvtrackerv1.WorkerReport{Worker: worker.ID(), WorkerSet: worker.SetName(), SampledUnixNanos: 1}
	if err := c.StoreReport(t.Context(), report); err != nil {
		t.Error(err)
	}
}

func TestReports(t *testing.T) {
	c := connect(t, testenv.NATS(t))
	report := func(at int64) *kvtrackerv1.WorkerReport {
		return &kvtrackerv1.WorkerReport{Worker: worker.ID(), WorkerSet: worker.SetName(), SampledUnixNanos: at}
	}
	if err := c.StoreReport(t.Context(), report(1)); err != nil {
		t.Fatal(err)
	}
	if err := c.StoreReport(t.Context(), report(2)); err != nil {
		t.Fatal(err)
	}
	got, troubles := make(chan *kvtrackerv1.WorkerReport, 8), make(chan error, 8)
	run(t, func(ctx context.Context) error {
		return c.ConsumeReports(ctx, func(r *kvtrackerv1.WorkerReport) { got <- r }, func(err error) { troubles <- err })
	})
	next := func(want *kvtrackerv1.WorkerReport) {
		t.Helper()
		select {
		case r := <-got:
			if !proto.Equal(r, want) {
				t.Errorf("got report %v, want %v", r, want)
			}
		case <-time.After(time.Minute):
			t.Fatal("no report came")
		}
	}
	next(report(2))
	// Malformed and misattributed reports do not stop those behind them.
	if err := c.NATS().Publish(worker.StateSubject(), []byte{0xff}); err != nil {
		t.Fatal(err)
	}
	other := worker
	other.Rank = 0
	data, _ := proto.Marshal(report(4))
	if err := c.NATS().Publish(other.StateSubject(), data); err != nil {
		t.Fatal(err)
	}
	if err := c.PublishReport(report(math.MinInt64)); err != nil {
		t.Fatal(err)
	}
	if err := c.PublishReport(report(5)); err != nil {
		t.Fatal(err)
	}
	next(report(5))
	if len(troubles) != 3 {
		t.Errorf("%d troubles, want 3", len(troubles))
	}
	if err := c.PublishReport(&kvtrackerv1.WorkerReport{Worker: "x"}); err == nil {
		t.Error("report without a worker set was sent")
	}
}

func start(t *testing.T, o natsd.Options) *natsd.Server {
	t.Helper()
	s, err := natsd.Start(o)
	if err != nil {
		t.Fatal(err)
	}
	return s
}
