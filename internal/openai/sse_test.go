package openai_test

import (
	"bytes"
	"errors"
	"io"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/google/go-cmp/cmp"

	"github.com/kinference/kinference/internal/openai"
)

type event struct {
	Data, Type string
	HasData    bool
	Cut        bool
}

// collect reads all events and checks that their raw bytes are the stream.
func collect(t *testing.T, r io.Reader, whole string) []event {
	t.Helper()
	s := openai.NewReader(r, 1<<20)
	var raw []byte
	var got []event
	for {
		e, err := s.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		raw = append(raw, e.Raw...)
		got = append(got, event{string(e.Data), string(e.Type), e.Data != nil, e.Cut})
	}
	if string(raw) != whole {
		t.Errorf("raw bytes are %q, want %q", raw, whole)
	}
	return got
}

// pieces cuts s in two at every place, and into single bytes.
func pieces(s string) map[string]io.Reader {
	m := map[string]io.Reader{
		"whole":       strings.NewReader(s),
		"bytes":       iotest.OneByteReader(strings.NewReader(s)),
		"data on EOF": iotest.DataErrReader(strings.NewReader(s)),
	}
	for i := 1; i < len(s); i++ {
		m["cut at "+s[:i]] = io.MultiReader(strings.NewReader(s[:i]), strings.NewReader(s[i:]))
	}
	return m
}

func TestReader(t *testing.T) {
	data := func(s string) event { return event{Data: s, HasData: true} }
	tests := []struct {
		name, in string
		want     []event
	}{
		{"empty", "", nil},
		{"LF", "data: a\n\ndata: [DONE]\n\n", []event{data("a"), data("[DONE]")}},
		{"CRLF", "data: a\r\n\r\ndata: b\r\n\r\n", []event{data("a"), data("b")}},
		{"CR", "data: a\r\rdata: b\r\r", []event{data("a"), data("b")}},
		{"mixed line ends", "data: a\r\n\ndata: b\n\r\n", []event{data("a"), data("b")}},
		{"no space", "data:{\"a\":1}\n\n", []event{data(`{"a":1}`)}},
		{"two spaces", "data:  a\n\n", []event{data(" a")}},
		{"no colon", "data\n\n", []event{data("")}},
		{"several lines", "data: a\ndata:b\ndata: \n\n", []event{data("a\nb\n")}},
		{"comment in between", ": ping\n\ndata: a\n\n:\n\n", []event{{}, data("a"), {}}},
		{"comment inside", ": x\ndata: a\n: y\nid: 5\nretry: 1\n\n", []event{data("a")}},
		{"event type", "event: error\ndata: x\n\n", []event{{Data: "x", Type: "error", HasData: true}}},
		{"byte order mark", "\ufeffdata: a\n\n", []event{data("a")}},
		{"byte order mark later", "data: a\n\n\ufeffdata: b\n\n", []event{data("a"), {}}},
		{"other field", "database: x\n\n", []event{{}}},
		{"cut in a line", "data: a\n\ndata: b", []event{data("a"), {Data: "b", HasData: true, Cut: true}}},
		{"cut before the blank line", "data: [DONE]\n", []event{{Data: "[DONE]", HasData: true, Cut: true}}},
		{"line separators that are none", "data: a\u2028b\x0bc\n\n", []event{data("a\u2028b\x0bc")}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			for how, r := range pieces(tt.in) {
				got := collect(t, r, tt.in)
				// A CRLF cut in two moves its LF to the next block, which may
				// then be that LF alone.
				if n := len(got); n == len(tt.want)+1 && !got[n-1].HasData && strings.HasSuffix(tt.in, "\r\n") {
					got = got[:n-1]
				}
				if diff := cmp.Diff(tt.want, got); diff != "" {
					t.Errorf("%q: %s", how, diff)
				}
			}
		})
	}
}

// What is complete must come without waiting for the next byte, even where a
// CR could be half of a CRLF.
func TestReaderDoesNotWait(t *testing.T) {
	for _, in := range []string{"data: a\n\n", "data: a\r\n\r\n", "data: a\r\r"} {
		r, w := io.Pipe()
		s := openai.NewReader(r, 1<<10)
		go w.Write([]byte(in))
		if e, err := s.Next(); err != nil || string(e.Data) != "a" {
			t.Errorf("%q: got %q, %v", in, e.Data, err)
		}
		w.Close()
	}
}

func TestReaderLimit(t *testing.T) {
	long := "data: " + strings.Repeat("x", 1000) + "\n\n"
	s := openai.NewReader(strings.NewReader(long+long+"data: "+strings.Repeat("y", 5000)), 1<<10)
	for range 2 {
		if e, err := s.Next(); err != nil || len(e.Data) != 1000 {
			t.Fatalf("got %d bytes, %v", len(e.Data), err)
		}
	}
	if _, err := s.Next(); !errors.Is(err, openai.ErrEventTooLarge) {
		t.Errorf("got %v, want ErrEventTooLarge", err)
	}
}

func TestReaderError(t *testing.T) {
	broken := errors.New("connection reset")
	s := openai.NewReader(io.MultiReader(strings.NewReader("data: a\n\ndata: b"), iotest.ErrReader(broken)), 1<<10)
	if e, err := s.Next(); err != nil || string(e.Data) != "a" {
		t.Fatalf("got %q, %v", e.Data, err)
	}
	for range 2 {
		if _, err := s.Next(); err != broken {
			t.Errorf("got %v", err)
		}
	}
}

func TestReaderBuffered(t *testing.T) {
	s := openai.NewReader(strings.NewReader("data: a\n\ndata: b\n\ndata: c"), 1<<10)
	if _, ok := s.Buffered(); ok {
		t.Fatal("an event before the first Fill")
	}
	if err := s.Fill(); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"a", "b"} {
		if e, ok := s.Buffered(); !ok || string(e.Data) != want {
			t.Errorf("got %q %v, want %q", e.Data, ok, want)
		}
	}
	if _, ok := s.Buffered(); ok {
		t.Error("half an event is not an event")
	}
}

func TestAppendEvent(t *testing.T) {
	got := openai.AppendEvent(nil, []byte("error"), []byte("a\nb"))
	if want := "event: error\ndata: a\ndata: b\n\n"; string(got) != want {
		t.Errorf("got %q", got)
	}
	e, err := openai.NewReader(bytes.NewReader(got), 100).Next()
	if err != nil || string(e.Data) != "a\nb" || e.Done() {
		t.Errorf("read back as %q, %v", e.Data, err)
	}
}
