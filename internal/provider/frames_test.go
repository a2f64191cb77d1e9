package provider_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"hash/crc32"
	"io"
	"testing"
	"testing/iotest"

	"github.com/aws/aws-sdk-go-v2/aws/protocol/eventstream"
	"github.com/google/go-cmp/cmp"

	"github.com/kinference/kinference/internal/openai"
	"github.com/kinference/kinference/internal/provider"
	"github.com/kinference/kinference/internal/provider/fake"
)

// frame is what a frame says: its headers that are strings, and its payload.
type frame struct {
	Headers map[string]string
	Payload string
}

// parseFrames reads frames by code of its own, from the description of AWS:
// lengths and sums first, then headers, whose type tells their length.
func parseFrames(data []byte, limit int) (out []frame, whole bool) {
	for len(data) > 0 {
		if len(data) < 16 {
			return out, false
		}
		n, headers := uint64(binary.BigEndian.Uint32(data)), uint64(binary.BigEndian.Uint32(data[4:]))
		if n > uint64(limit) || n > uint64(len(data)) || headers+16 > n || headers > provider.MaxFrameHeaders {
			return out, false
		}
		if crc32.ChecksumIEEE(data[:8]) != binary.BigEndian.Uint32(data[8:]) || crc32.ChecksumIEEE(data[:n-4]) != binary.BigEndian.Uint32(data[n-4:]) {
			return out, false
		}
		f := frame{map[string]string{}, string(data[12+headers : n-4])}
		if !f.parse(data[12 : 12+headers]) {
			return out, false
		}
		out, data = append(out, f), data[n:]
	}
	return out, true
}

func (f *frame) parse(h []byte) bool {
	for len(h) > 1 { // the SDK takes a lone length for the end, unless it is 0
		name := int(h[0])
		if len(h) < name+2 {
			return false
		}
		key, kind := string(h[1:1+name]), h[1+name]
		h = h[2+name:]
		size := map[byte]int{0: 0, 1: 0, 2: 1, 3: 2, 4: 4, 5: 8, 8: 8, 9: 16}
		n, ok := size[kind]
		if kind == 6 || kind == 7 {
			if len(h) < 2 {
				return false
			}
			n, ok = int(binary.BigEndian.Uint16(h)), true
			h = h[2:]
		}
		if !ok || len(h) < n {
			return false
		}
		if delete(f.Headers, key); kind == 7 { // the last one of a name holds
			f.Headers[key] = string(h[:n])
		}
		h = h[n:]
	}
	return len(h) == 0 || h[0] > 0
}

// readFrames reads frames by ours, to the first error.
func readFrames(src io.Reader, limit int) (out []frame, err error) {
	next := provider.Frames(src, limit)
	for {
		m, err := next()
		if err != nil {
			return out, err
		}
		f := frame{map[string]string{}, string(m.Payload)}
		for _, h := range m.Headers {
			if v, ok := h.Value.(eventstream.StringValue); ok {
				f.Headers[h.Name] = string(v)
			}
		}
		out = append(out, f)
	}
}

// repair makes the sums of frames right, so that what stands in them is read.
func repair(data []byte) {
	for len(data) >= 16 {
		n := uint64(binary.BigEndian.Uint32(data))
		binary.BigEndian.PutUint32(data[8:], crc32.ChecksumIEEE(data[:8]))
		if n < 16 || n > uint64(len(data)) {
			return
		}
		binary.BigEndian.PutUint32(data[n-4:], crc32.ChecksumIEEE(data[:n-4]))
		data = data[n:]
	}
}

// FuzzFrames reads frames by the decoder and by a second one, whole and in
// pieces, with the sums as they are and repaired.
func FuzzFrames(f *testing.F) {
	two := append(fake.Frame("event", "messageStart", `{"role":"assistant"}`), fake.Frame("exception", "throttlingException", `{"message":"x"}`)...)
	f.Add(two, false, uint8(5))
	f.Add(two, true, uint8(0))
	f.Add(two[:len(two)-3], false, uint8(20))
	f.Add([]byte{0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 1, 2, 3, 4, 5}, true, uint8(3))
	f.Add([]byte{0, 0, 0, 17, 255, 0, 0, 0, 0, 0, 0, 0, 1, 2, 3, 4, 5}, true, uint8(3))
	f.Fuzz(func(t *testing.T, data []byte, sums bool, step uint8) {
		const limit = 2 << 10
		if len(data) > 2*limit {
			return
		}
		if sums {
			data = bytes.Clone(data)
			repair(data)
		}
		want, whole := parseFrames(data, limit)
		for _, src := range []io.Reader{bytes.NewReader(data), iotest.HalfReader(bytes.NewReader(data)), &slow{data, int(step) + 1}} {
			got, err := readFrames(src, limit)
			if errors.Is(err, io.EOF) != whole {
				t.Fatalf("%v, the second decoder finds it whole: %v", err, whole)
			}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Fatalf("second decoder and ours: %s", diff)
			}
		}
	})
}

// slow gives a few bytes at a time.
type slow struct {
	rest []byte
	step int
}

func (s *slow) Read(p []byte) (int, error) {
	if len(s.rest) == 0 {
		return 0, io.EOF
	}
	n := copy(p, s.rest[:min(s.step, len(s.rest))])
	s.rest = s.rest[n:]
	return n, nil
}

// endless gives zeros for ever and counts them.
type endless struct{ read int }

func (e *endless) Read(p []byte) (int, error) {
	clear(p)
	e.read += len(p)
	return len(p), nil
}

// A frame whose lengths contradict each other is an error at once: it makes
// nobody read what the difference of two unsigned numbers says.
func TestFrameLengths(t *testing.T) {
	for name, head := range map[string][2]uint32{
		"no length":                  {0, 0},
		"shorter than itself":        {1, 0},
		"headers longer than frame":  {100, 90},
		"headers of gigabytes":       {1000, 1 << 31},
		"more headers than sensible": {1 << 20, provider.MaxFrameHeaders + 1},
	} {
		t.Run(name, func(t *testing.T) {
			data := binary.BigEndian.AppendUint32(binary.BigEndian.AppendUint32(nil, head[0]), head[1])
			data = binary.BigEndian.AppendUint32(data, crc32.ChecksumIEEE(data))
			rest := &endless{}
			got, err := readFrames(io.MultiReader(bytes.NewReader(data), rest), 2<<20)
			if err == nil || errors.Is(err, io.EOF) || len(got) > 0 || rest.read > 64<<10 {
				t.Errorf("%v, %v after %d bytes", got, err, rest.read)
			}
		})
	}
	data := binary.BigEndian.AppendUint32(nil, 3<<20)
	if _, err := readFrames(bytes.NewReader(append(data, make([]byte, 8)...)), 2<<20); !errors.Is(err, openai.ErrEventTooLarge) {
		t.Errorf("a frame above the limit: %v", err)
	}
}
