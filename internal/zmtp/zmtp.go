// Package zmtp is a small client of ZeroMQ sockets: one TCP or Unix connection,
// ZMTP 3.0 with the NULL mechanism (rfc.zeromq.org/spec/23).
//
// The relay reads engine events with it. It is used instead of a socket of a
// ZeroMQ library because the relay must see every loss of a connection (a new
// engine may sit behind the same address), must bound what a peer can make it
// allocate, and must not leave goroutines behind when it closes.
//
// A Conn may be read by one goroutine while others send and close. A connection
// that failed stays failed: the caller dials again.
package zmtp

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"time"
)

// SocketType is the role in which a connection is opened.
type SocketType string

// Socket types that a client can take.
const (
	Sub    SocketType = "SUB"
	Dealer SocketType = "DEALER"
)

// peers lists which types may be at the other end.
var peers = map[SocketType][]string{
	Sub:    {"PUB", "XPUB"},
	Dealer: {"ROUTER", "DEALER", "REP"},
}

const (
	// maxFrames bounds the frames of one message; vLLM sends at most five.
	maxFrames = 16
	// maxCommand bounds READY and other commands.
	maxCommand = 64 << 10
	// dialTimeout bounds connecting and, apart, the handshake.
	dialTimeout = 3 * time.Second
	// writeTimeout bounds a send: our messages are tiny, so only a dead peer
	// makes us wait.
	writeTimeout = 5 * time.Second
)

// Flags of a frame.
const (
	flagMore    = 1
	flagLong    = 2
	flagCommand = 4
)

// ErrProtocol is returned when the peer does not speak ZMTP as expected.
var ErrProtocol = errors.New("zmtp: protocol error")

// Options of Dial.
type Options struct {
	// MaxMessage bounds a received message in bytes. Default 16 MiB.
	MaxMessage int
}

// Conn is an open connection.
type Conn struct {
	conn net.Conn
	r    *bufio.Reader
	max  int
	stop func() bool

	mu sync.Mutex // serialises writes
}

// Dial connects to endpoint ("tcp://host:port" or "ipc://path") and does the
// handshake. The connection closes when ctx is done, also after Dial has
// returned. A peer that vanishes without a word is noticed by TCP keep-alive
// within about 12 seconds.
func Dial(ctx context.Context, endpoint string, kind SocketType, o Options) (*Conn, error) {
	network, addr, err := parseEndpoint(endpoint)
	if err != nil {
		return nil, err
	}
	d := net.Dialer{
		Timeout:         dialTimeout,
		KeepAliveConfig: net.KeepAliveConfig{Enable: true, Idle: 5 * time.Second, Interval: 2 * time.Second, Count: 3},
	}
	nc, err := d.DialContext(ctx, network, addr)
	if err != nil {
		return nil, fmt.Errorf("zmtp: %w", err)
	}
	c := &Conn{conn: nc, r: bufio.NewReaderSize(nc, 32<<10), max: o.MaxMessage}
	if c.max <= 0 {
		c.max = 16 << 20
	}
	c.stop = context.AfterFunc(ctx, func() { nc.Close() })
	if err := c.handshake(kind); err != nil {
		c.Close()
		return nil, fmt.Errorf("handshake with %s: %w", endpoint, err)
	}
	return c, nil
}

func parseEndpoint(endpoint string) (network, addr string, err error) {
	scheme, addr, ok := strings.Cut(endpoint, "://")
	switch {
	case ok && scheme == "tcp" && !strings.HasPrefix(addr, "*"):
		return "tcp", addr, nil
	case ok && scheme == "ipc":
		return "unix", addr, nil
	}
	return "", "", fmt.Errorf("zmtp: cannot dial endpoint %q", endpoint)
}

// Close closes the connection; a blocked Recv returns.
func (c *Conn) Close() error {
	c.stop()
	return c.conn.Close()
}

// SetReadDeadline bounds the following Recv calls; zero means no bound. A Recv
// that runs into it leaves the connection unusable.
func (c *Conn) SetReadDeadline(t time.Time) error { return c.conn.SetReadDeadline(t) }

// Subscribe asks a publisher for all topics with that prefix.
func (c *Conn) Subscribe(prefix string) error { return c.Send([]byte("\x01" + prefix)) }

// Send sends one message of one or more frames.
func (c *Conn) Send(frames ...[]byte) error {
	var b []byte
	for i, f := range frames {
		flags := byte(0)
		if i < len(frames)-1 {
			flags = flagMore
		}
		b = appendFrame(b, flags, f)
	}
	return c.write(b)
}

func (c *Conn) write(b []byte) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.conn.SetWriteDeadline(time.Now().Add(writeTimeout)); err != nil {
		return fmt.Errorf("zmtp: %w", err)
	}
	if _, err := c.conn.Write(b); err != nil {
		return fmt.Errorf("zmtp: %w", err)
	}
	return nil
}

// Recv returns the next message; its frames belong to the caller. The peer's
// pings are answered on the way.
func (c *Conn) Recv() ([][]byte, error) {
	frames := make([][]byte, 0, 4)
	for room := c.max; ; {
		flags, body, err := c.frame(room)
		if err != nil {
			return nil, err
		}
		if flags&flagCommand != 0 {
			if err := c.command(body); err != nil {
				return nil, err
			}
			continue
		}
		if len(frames) == maxFrames {
			return nil, fmt.Errorf("%w: more than %d frames", ErrProtocol, maxFrames)
		}
		frames = append(frames, body)
		room -= len(body)
		if flags&flagMore == 0 {
			return frames, nil
		}
	}
}

// frame reads one frame of at most limit bytes.
func (c *Conn) frame(limit int) (flags byte, body []byte, err error) {
	var head [9]byte
	if _, err := io.ReadFull(c.r, head[:2]); err != nil {
		return 0, nil, fmt.Errorf("zmtp: %w", err)
	}
	flags = head[0]
	size := uint64(head[1])
	if flags&flagLong != 0 {
		if _, err := io.ReadFull(c.r, head[2:]); err != nil {
			return 0, nil, fmt.Errorf("zmtp: %w", err)
		}
		size = binary.BigEndian.Uint64(head[1:])
	}
	if flags&flagCommand != 0 {
		limit = min(limit, maxCommand)
	}
	if flags&^(flagMore|flagLong|flagCommand) != 0 || size > uint64(limit) {
		return 0, nil, fmt.Errorf("%w: frame of %d bytes, flags %#x", ErrProtocol, size, flags)
	}
	body = make([]byte, size)
	if _, err := io.ReadFull(c.r, body); err != nil {
		return 0, nil, fmt.Errorf("zmtp: %w", err)
	}
	return flags, body, nil
}

// command answers PING (rfc.zeromq.org/spec/37) and ignores other commands.
func (c *Conn) command(body []byte) error {
	name, data, ok := splitName(body)
	if !ok {
		return fmt.Errorf("%w: truncated command", ErrProtocol)
	}
	if name != "PING" || len(data) < 2 {
		return nil
	}
	// After a time to live of two bytes comes a context of at most 16 to echo.
	context := data[2:min(len(data), 18)]
	return c.write(appendFrame(nil, flagCommand, append([]byte("\x04PONG"), context...)))
}

// splitName splits off a name that its length precedes.
func splitName(b []byte) (name string, rest []byte, ok bool) {
	if len(b) == 0 || len(b) < 1+int(b[0]) {
		return "", nil, false
	}
	n := 1 + int(b[0])
	return string(b[1:n]), b[n:], true
}

func appendFrame(dst []byte, flags byte, body []byte) []byte {
	if n := len(body); n > 255 {
		dst = binary.BigEndian.AppendUint64(append(dst, flags|flagLong), uint64(n))
	} else {
		dst = append(dst, flags, byte(n))
	}
	return append(dst, body...)
}

// greetingSize is the fixed length of a greeting: signature 10, version 2,
// mechanism 20, as-server 1, filler 31.
const greetingSize = 64

// handshake exchanges greetings and READY commands. We speak version 3.0, where
// subscriptions are messages, which every later peer understands.
func (c *Conn) handshake(kind SocketType) error {
	if err := c.conn.SetReadDeadline(time.Now().Add(dialTimeout)); err != nil {
		return err
	}
	greeting := make([]byte, greetingSize)
	greeting[0], greeting[9], greeting[10] = 0xff, 0x7f, 3
	copy(greeting[12:], "NULL")
	if err := c.write(greeting); err != nil {
		return err
	}
	if _, err := io.ReadFull(c.r, greeting); err != nil {
		return fmt.Errorf("read greeting: %w", err)
	}
	mechanism := string(bytes.TrimRight(greeting[12:32], "\x00"))
	if greeting[0] != 0xff || greeting[9]&1 != 1 || greeting[10] < 3 || mechanism != "NULL" {
		return fmt.Errorf("%w: peer offers version %d, mechanism %.20q", ErrProtocol, greeting[10], mechanism)
	}
	ready := []byte("\x05READY")
	ready = appendProperty(ready, "Socket-Type", string(kind))
	if kind == Dealer {
		// Empty: the router makes one up.
		ready = appendProperty(ready, "Identity", "")
	}
	if err := c.write(appendFrame(nil, flagCommand, ready)); err != nil {
		return err
	}
	flags, body, err := c.frame(maxCommand)
	if err != nil {
		return err
	}
	name, data, ok := splitName(body)
	if flags&flagCommand == 0 || !ok || name != "READY" {
		return fmt.Errorf("%w: %.16q instead of READY", ErrProtocol, name)
	}
	peer := property(data, "Socket-Type")
	for _, p := range peers[kind] {
		if peer == p {
			return c.conn.SetReadDeadline(time.Time{})
		}
	}
	return fmt.Errorf("%w: peer is a %.16q, which a %s cannot talk to", ErrProtocol, peer, kind)
}

func appendProperty(dst []byte, name, value string) []byte {
	dst = append(append(dst, byte(len(name))), name...)
	dst = binary.BigEndian.AppendUint32(dst, uint32(len(value)))
	return append(dst, value...)
}

// property returns the value of a property of READY, empty if there is none.
func property(data []byte, want string) string {
	for len(data) > 0 {
		name, rest, ok := splitName(data)
		if !ok || len(rest) < 4 {
			return ""
		}
		n := uint64(binary.BigEndian.Uint32(rest))
		rest = rest[4:]
		if n > uint64(len(rest)) {
			return ""
		}
		if strings.EqualFold(name, want) {
			return string(rest[:n])
		}
		data = rest[n:]
	}
	return ""
}
