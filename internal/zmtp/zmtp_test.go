package zmtp_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/go-zeromq/zmq4"
	"github.com/google/go-cmp/cmp"

	"github.com/kinference/kinference/internal/zmtp"
)

// greeting as a peer sends it.
func greeting(mechanism string) []byte {
	b := make([]byte, 64)
	b[0], b[9], b[10], b[11] = 0xff, 0x7f, 3, 1
	copy(b[12:], mechanism)
	return b
}

func ready(kind string) []byte {
	body := "\x05READY\x0bSocket-Type\x00\x00\x00" + string(rune(len(kind))) + kind + "\x08Identity\x00\x00\x00\x00"
	return append([]byte{4, byte(len(body))}, body...)
}

// peer accepts one connection, swallows the client's handshake and sends b; what
// else the client sends comes back on the channel when the connection ends.
func peer(t *testing.T, b ...[]byte) (endpoint string, got <-chan []byte) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ch := make(chan []byte, 1)
	go func() {
		defer l.Close()
		c, err := l.Accept()
		if err != nil {
			ch <- nil
			return
		}
		defer c.Close()
		for _, p := range b {
			if _, err := c.Write(p); err != nil {
				break
			}
		}
		c.(*net.TCPConn).CloseWrite()
		all, _ := io.ReadAll(c)
		ch <- all
	}()
	return "tcp://" + l.Addr().String(), ch
}

func TestRecv(t *testing.T) {
	long := strings.Repeat("x", 300)
	ping := []byte("\x04\x0b\x04PING\x00\x0aabcd")
	subscribe := append([]byte{4, 11}, "\x09SUBSCRIBEt"...)
	endpoint, sent := peer(t,
		greeting("NULL"), ready("PUB"),
		[]byte("\x01\x01t\x01\x01s"), ping, []byte("\x02\x00\x00\x00\x00\x00\x00\x01\x2c"), []byte(long),
		subscribe, []byte("\x00\x00"),
	)
	c, err := zmtp.Dial(t.Context(), endpoint, zmtp.Sub, zmtp.Options{})
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Subscribe("top"); err != nil {
		t.Fatal(err)
	}
	for _, want := range [][][]byte{{[]byte("t"), []byte("s"), []byte(long)}, {{}}} {
		got, err := c.Recv()
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(got, want); diff != "" {
			t.Error(diff)
		}
	}
	if _, err := c.Recv(); !errors.Is(err, io.EOF) {
		t.Errorf("at the end: %v", err)
	}
	c.Close()
	all := <-sent
	if !bytes.Contains(all, []byte("\x00\x04\x01top")) || !bytes.Contains(all, []byte("\x04\x09\x04PONGabcd")) {
		t.Errorf("client sent %q", all)
	}
}

func TestBadPeers(t *testing.T) {
	huge := binary.BigEndian.AppendUint64([]byte{2}, 1<<62)
	tests := []struct {
		name string
		sent [][]byte
	}{
		{"HTTP", [][]byte{[]byte("HTTP/1.1 400 Bad Request\r\n\r\n" + strings.Repeat(" ", 64))}},
		{"closes", nil},
		{"other mechanism", [][]byte{greeting("CURVE"), ready("PUB")}},
		{"other socket", [][]byte{greeting("NULL"), ready("PULL")}},
		{"error command", [][]byte{greeting("NULL"), []byte("\x04\x08\x05ERROR\x01x")}},
		{"huge READY", [][]byte{greeting("NULL"), append([]byte{6}, huge[1:]...)}},
		{"huge frame", [][]byte{greeting("NULL"), ready("PUB"), huge}},
		{"many frames", [][]byte{greeting("NULL"), ready("PUB"), bytes.Repeat([]byte{1, 0}, 100)}},
		{"frames that are too long together", [][]byte{greeting("NULL"), ready("PUB"), bytes.Repeat([]byte("\x01\x0a0123456789"), 11)}},
		{"unknown flag", [][]byte{greeting("NULL"), ready("PUB"), {0x80, 0}}},
		{"truncated command", [][]byte{greeting("NULL"), ready("PUB"), {4, 2, 200, 1}}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			endpoint, sent := peer(t, tt.sent...)
			c, err := zmtp.Dial(t.Context(), endpoint, zmtp.Sub, zmtp.Options{MaxMessage: 100})
			if err == nil {
				_, err = c.Recv()
				c.Close()
			}
			if err == nil {
				t.Error("no error")
			}
			<-sent
		})
	}
	for _, endpoint := range []string{"", "tcp://*:5557", "udp://127.0.0.1:1", "127.0.0.1:1"} {
		if _, err := zmtp.Dial(t.Context(), endpoint, zmtp.Sub, zmtp.Options{}); err == nil {
			t.Errorf("%q can be dialled", endpoint)
		}
	}
}

// A cancelled context ends a blocked Recv.
func TestCancel(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() {
		c, err := l.Accept()
		if err != nil {
			return
		}
		defer c.Close()
		_, _ = c.Write(append(greeting("NULL"), ready("ROUTER")...))
		_, _ = io.Copy(io.Discard, c)
	}()
	ctx, cancel := context.WithCancel(t.Context())
	c, err := zmtp.Dial(ctx, "tcp://"+l.Addr().String(), zmtp.Dealer, zmtp.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	done := make(chan error)
	go func() {
		_, err := c.Recv()
		done <- err
	}()
	cancel()
	if err := <-done; err == nil {
		t.Error("Recv returned a message")
	}
}

// The sockets of a ZeroMQ library understand us.
func TestLibraryPeer(t *testing.T) {
	router := zmq4.NewRouter(t.Context())
	defer router.Close()
	if err := router.Listen("tcp://127.0.0.1:0"); err != nil {
		t.Fatal(err)
	}
	c, err := zmtp.Dial(t.Context(), "tcp://"+router.Addr().String(), zmtp.Dealer, zmtp.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := c.Send(nil, []byte("ask")); err != nil {
		t.Fatal(err)
	}
	m, err := router.Recv()
	if err != nil {
		t.Fatal(err)
	}
	if len(m.Frames) != 3 || string(m.Frames[2]) != "ask" {
		t.Fatalf("router got %q", m.Frames)
	}
	if err := router.Send(zmq4.NewMsgFrom(m.Frames[0], []byte{}, []byte("answer"))); err != nil {
		t.Fatal(err)
	}
	if err := c.SetReadDeadline(time.Now().Add(10 * time.Second)); err != nil {
		t.Fatal(err)
	}
	got, err := c.Recv()
	if err != nil || len(got) != 2 || string(got[1]) != "answer" {
		t.Errorf("got %q, %v", got, err)
	}
}

func FuzzPeer(f *testing.F) {
	f.Add(append(append(greeting("NULL"), ready("PUB")...), "\x01\x01t\x00\x01p"...))
	f.Fuzz(func(t *testing.T, b []byte) {
		endpoint, sent := peer(t, b)
		c, err := zmtp.Dial(t.Context(), endpoint, zmtp.Sub, zmtp.Options{MaxMessage: 1 << 10})
		for err == nil {
			_, err = c.Recv()
		}
		if c != nil {
			c.Close()
		}
		<-sent
	})
}
