package relay

import (
	"encoding/binary"
	"io"
	"log/slog"
	"net"
	"testing"

	"github.com/kinference/kinference/internal/bus"
	"github.com/kinference/kinference/internal/daemon"
	"github.com/kinference/kinference/internal/zmtp"
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
