package fleetsim

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"net"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// output is a connection that can only be written to.
type output struct {
	net.Conn
	sent bytes.Buffer
}

func (o *output) Write(b []byte) (int, error) { return o.sent.Write(b) }

func TestReceive(t *testing.T) {
	long := bytes.Repeat([]byte("x"), 300)
	for _, c := range []struct {
		name, wire string
		want       [][]byte
		sent       string
		err        error
	}{
		{"one frame", "\x00\x02hi", [][]byte{[]byte("hi")}, "", nil},
		{"two frames", "\x01\x00\x00\x01a", [][]byte{{}, []byte("a")}, "", nil},
		{"long frame", string(appendFrame(nil, 0, long)), [][]byte{long}, "", nil},
		{"subscribe command", "\x04\x0c\x09SUBSCRIBEkv", [][]byte{[]byte("\x01kv")}, "", nil},
		{"cancel command", "\x04\x09\x06CANCELkv", [][]byte{[]byte("\x00kv")}, "", nil},
		{"ping, then a message", "\x04\x09\x04PING\x00\x0aab\x00\x01m", [][]byte{[]byte("m")}, "\x04\x07\x04PONGab", nil},
		{"unknown command", "\x04\x04\x03FOO\x00\x01m", [][]byte{[]byte("m")}, "", nil},
		{"truncated", "\x00\x05hi", nil, "", io.ErrUnexpectedEOF},
		{"huge", "\x02\x7f\xff\xff\xff\xff\xff\xff\xff", nil, "", errFrame},
		{"bad command", "\x04\x02\x09S", nil, "", errFrame},
	} {
		t.Run(c.name, func(t *testing.T) {
			out := new(output)
			p := &peer{out, bufio.NewReader(bytes.NewReader([]byte(c.wire)))}
			got, err := p.receive()
			if d := cmp.Diff(c.want, got); d != "" || !errors.Is(err, c.err) || out.sent.String() != c.sent {
				t.Errorf("err %v, sent %q, (-want +got):\n%s", err, out.sent.String(), d)
			}
		})
	}
}

func FuzzReceive(f *testing.F) {
	f.Add([]byte("\x01\x00\x00\x01a"))
	f.Add([]byte("\x04\x09\x04PING\x00\x0aab\x00\x01m"))
	f.Add(appendFrame(nil, frameMore, bytes.Repeat([]byte("x"), 300)))
	f.Fuzz(func(t *testing.T, wire []byte) {
		p := &peer{new(output), bufio.NewReader(bytes.NewReader(wire))}
		for {
			frames, err := p.receive()
			if err != nil {
				return
			}
			if len(frames) == 0 || len(frames) > maxFrames {
				t.Fatalf("%d frames", len(frames))
			}
		}
	})
}
