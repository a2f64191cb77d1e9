package relay

import (
	"context"
	"encoding/binary"
	"io"
	"log/slog"
	"net"
	"testing"
	"time"

	"github.com/kinference/kinference/internal/bus"
	"github.com/kinference/kinference/internal/daemon"
	"github.com/kinference/kinference/internal/natsd"
	"github.com/kinference/kinference/internal/testenv"
	"github.com/kinference/kinference/internal/zmtp"
	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
)

// BenchmarkAccept is what a live batch of 256 tokens costs between the socket
// and NATS: check, digest, queue, and its share of a message of 16.
func BenchmarkAccept(b *testing.B) {
	m, err := newInstruments(daemon.Meter(b.Context()))
	if err != nil {
		b.Fatal(err)
	}
	conn, err := bus.Connect(b.Context(), "nats://127.0.0.1:1", "bench")
	if err != nil {
		b.Fatal(err)
	}
	defer conn.Close()
	w := bus.Worker{Namespace: "demo", Set: "sim", UID: "a"}
	l := &link{
		relay: &relay{Config: Config{Bus: conn}, metrics: m}, worker: w, labels: newLabels(w),
		out: newOutbox(), log: slog.New(slog.DiscardHandler), known: true, epoch: newEpoch(),
	}
	payload := batch("x", make([]uint32, 256))
	var msg bus.KVMessage
	b.SetBytes(int64(len(payload)))
	b.ReportAllocs()
	for b.Loop() {
		if !l.accept(l.next, payload, l.out.tryPush) {
			b.Fatal("outbox is full")
		}
		if l.next%16 == 0 {
			l.out.take(&msg, flushBytes)
			if _, err := msg.Encode(w); err != nil {
				b.Fatal(err)
			}
		}
	}
}

// newTestLink is a link to e that only the test drives.
func newTestLink(t *testing.T, e *engine) *link {
	t.Helper()
	r, err := newRelay(t.Context(), Config{Bus: connect2(t, testenv.NATS(t)), timing: fast})
	if err != nil {
		t.Fatal(err)
	}
	l, err := newLink(r, e.spec("a"), 0)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// TestRestartInAnEmptyEpoch: the connection was lost when an epoch had begun
// behind a gap and nothing of it was published. Behind the next one is another
// engine, whose numbers are lower: they must not count as seen.
func TestRestartInAnEmptyEpoch(t *testing.T) {
	e := newEngine(t, &engine{buffer: 100})
	e.publish(3)
	l := newTestLink(t, e)
	l.begin(50, "")
	l.handle(item{kind: itemUp, session: &session{ctx: t.Context()}})
	got := drain(l.out, flushBytes)
	if l.next != 3 || len(got) != 2 {
		t.Errorf("next is %d, outbox holds %q, want a clear and three batches", l.next, got)
	}
}

// TestStopDoesNotSuspend: a relay that stops while another has taken over must
// not tell the trackers that the engine is out of sight.
func TestStopDoesNotSuspend(t *testing.T) {
	e := newEngine(t, &engine{buffer: 100})
	for range 20 { // the order of what follow is told is random
		l := newTestLink(t, e)
		l.begin(0, "")
		drain(l.out, flushBytes)
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		for range 8 {
			l.items <- item{kind: itemDown}
		}
		l.follow(ctx)
		if got := drain(l.out, flushBytes); len(got) > 0 {
			t.Fatalf("outbox holds %q", got)
		}
	}
}

// A worker that stays but whose events are not followed any more must not keep
// the blocks that it had.
func TestEventsSwitchedOff(t *testing.T) {
	f := newFixture(t, testenv.NATS(t))
	e := newEngine(t, &engine{buffer: 100})
	e.publish(2)
	without := e.spec("a")
	without.KvEvents, without.KvReplay = "", ""
	f.catalog.set(e.spec("a"))
	f.start()
	f.view.expect("a/0", span("boot1", 0, 1)...)
	f.catalog.set(without)
	f.view.expect("a/0").wantClears(t, reasonStart, reasonGone)
	// The same while no relay is there.
	f.catalog.set(e.spec("a"))
	f.view.expect("a/0", span("boot1", 0, 1)...)
	f.stopRelay()
	f.catalog.set(without)
	f.start()
	f.view.expect("a/0").wantClears(t, reasonStart, reasonGone, reasonStart, reasonGone)
}

// A worker that leaves while NATS is away is cleared when it is back.
func TestWorkerLeavesWithoutNATS(t *testing.T) {
	opts := natsd.Options{Dir: t.TempDir(), Port: testenv.FreePort(t)}
	server := startNATS(t, opts)
	f := newFixture(t, server.URL())
	f.stream.File = true
	f.view = f.watch()
	quick := fast
	quick.stop = 20 * time.Millisecond
	r, err := newRelay(t.Context(), Config{Bus: f.bus, Stream: f.stream, ScrapeInterval: time.Hour, timing: quick})
	if err != nil {
		t.Fatal(err)
	}
	defer r.stop()
	e := newEngine(t, &engine{buffer: 100})
	e.publish(2)
	r.apply(t.Context(), []*routerv1.Worker{e.spec("a")})
	f.view.expect("a/0", span("boot1", 0, 1)...)
	server.Stop()
	r.apply(t.Context(), nil)
	if len(r.unswept) != 1 {
		t.Fatal("nobody will clear the worker")
	}
	server = startNATS(t, opts)
	t.Cleanup(func() { server.Stop() })
	for r.sweep(t.Context()) != nil {
		pause(t.Context(), 0, 10*time.Millisecond, 10*time.Millisecond)
	}
	f.view.expect("a/0").wantClears(t, reasonStart, reasonGone)
}

// BenchmarkReceive is what one message costs to read from a socket.
func BenchmarkReceive(b *testing.B) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	defer l.Close()
	payload := batch("x", make([]uint32, 256))
	message := append([]byte("\x01\x02kv\x01\x08"), make([]byte, 8)...)
	message = binary.BigEndian.AppendUint64(append(message, 2), uint64(len(payload)))
	message = append(message, payload...)
	greeting := make([]byte, 64)
	greeting[0], greeting[9], greeting[10] = 0xff, 0x7f, 3
	copy(greeting[12:], "NULL")
	go func() {
		c, err := l.Accept()
		if err != nil {
			return
		}
		defer c.Close()
		go func() { _, _ = io.Copy(io.Discard, c) }()
		if _, err := c.Write(append(greeting, "\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x03PUB"...)); err != nil {
			return
		}
		for range 64 {
			message = append(message, message[:14+9+len(payload)]...)
		}
		for err == nil {
			_, err = c.Write(message)
		}
	}()
	c, err := zmtp.Dial(b.Context(), "tcp://"+l.Addr().String(), zmtp.Sub, zmtp.Options{})
	if err != nil {
		b.Fatal(err)
	}
	defer c.Close()
	b.SetBytes(int64(len(payload)))
	b.ReportAllocs()
	for b.Loop() {
		if _, err := c.Recv(); err != nil {
			b.Fatal(err)
		}
	}
}
