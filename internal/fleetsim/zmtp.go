package fleetsim

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"time"

	"github.com/go-zeromq/zmq4"
	"github.com/go-zeromq/zmq4/security/null"
)

// ZMTP 3.0 frames (rfc.zeromq.org/spec/23). The library does the handshake; its
// sockets are not used, because a PUB socket must drop for one slow subscriber
// without holding up the others, and must close without leaving goroutines.
const (
	frameMore    = 1
	frameLong    = 2
	frameCommand = 4

	maxFrame         = 1 << 20 // peers send subscriptions and requests: short
	maxFrames        = 16
	handshakeTimeout = 10 * time.Second
	writeTimeout     = 10 * time.Second
)

var errFrame = errors.New("bad ZMTP frame")

// peer is the other end of a connection to one of our sockets. One goroutine
// may read and others may send.
type peer struct {
	conn net.Conn
	r    *bufio.Reader
}

// accept does the handshake on a fresh connection, for a socket of the given
// type.
func accept(conn net.Conn, kind zmq4.SocketType) (*peer, error) {
	if err := conn.SetDeadline(time.Now().Add(handshakeTimeout)); err != nil {
		return nil, err
	}
	// No identity of ours, as a ROUTER or PUB has none.
	if _, err := zmq4.Open(conn, null.Security(), kind, nil, true, nil); err != nil {
		return nil, err
	}
	return &peer{conn, bufio.NewReader(conn)}, conn.SetDeadline(time.Time{})
}

// send writes one message with a single write, so that several senders never
// mix their frames.
func (p *peer) send(frames [][]byte) error {
	size := 0
	for _, f := range frames {
		size += len(f) + 9
	}
	buf := make([]byte, 0, size)
	for i, f := range frames {
		flags := byte(0)
		if i < len(frames)-1 {
			flags = frameMore
		}
		buf = appendFrame(buf, flags, f)
	}
	if err := p.conn.SetWriteDeadline(time.Now().Add(writeTimeout)); err != nil {
		return err
	}
	_, err := p.conn.Write(buf)
	return err
}

func appendFrame(dst []byte, flags byte, body []byte) []byte {
	if len(body) > 255 {
		dst = append(dst, flags|frameLong)
		dst = binary.BigEndian.AppendUint64(dst, uint64(len(body)))
	} else {
		dst = append(dst, flags, byte(len(body)))
	}
	return append(dst, body...)
}

// receive returns the next message. It answers heartbeats by itself, and turns
// the subscription commands of ZMTP 3.1 into messages of 3.0.
func (p *peer) receive() ([][]byte, error) {
	var frames [][]byte
	for {
		flags, err := p.r.ReadByte()
		if err != nil {
			return nil, err
		}
		body, err := p.body(flags)
		if err != nil {
			return nil, err
		}
		if flags&frameCommand != 0 {
			msg, err := p.command(body)
			if err != nil {
				return nil, err
			}
			if msg != nil {
				return [][]byte{msg}, nil
			}
			continue
		}
		if len(frames) == maxFrames {
			return nil, fmt.Errorf("%w: more than %d in a message", errFrame, maxFrames)
		}
		frames = append(frames, body)
		if flags&frameMore == 0 {
			return frames, nil
		}
	}
}

func (p *peer) body(flags byte) ([]byte, error) {
	var size uint64
	if flags&frameLong != 0 {
		var b [8]byte
		if _, err := io.ReadFull(p.r, b[:]); err != nil {
			return nil, err
		}
		size = binary.BigEndian.Uint64(b[:])
	} else {
		b, err := p.r.ReadByte()
		if err != nil {
			return nil, err
		}
		size = uint64(b)
	}
	if size > maxFrame {
		return nil, fmt.Errorf("%w of %d bytes", errFrame, size)
	}
	body := make([]byte, size)
	_, err := io.ReadFull(p.r, body)
	return body, err
}

func (p *peer) command(body []byte) (message []byte, err error) {
	if len(body) == 0 || len(body) < 1+int(body[0]) {
		return nil, fmt.Errorf("%w: truncated command", errFrame)
	}
	name, rest := string(body[1:1+body[0]]), body[1+body[0]:]
	switch name {
	case "PING":
		if len(rest) < 2 {
			return nil, fmt.Errorf("%w: truncated ping", errFrame)
		}
		// The two bytes are a time to live; what follows is echoed.
		_, err := p.conn.Write(appendFrame(nil, frameCommand, append([]byte("\x04PONG"), rest[2:]...)))
		return nil, err
	case "SUBSCRIBE":
		return append([]byte{1}, rest...), nil
	case "CANCEL":
		return append([]byte{0}, rest...), nil
	}
	return nil, nil
}
