package openai_test

import (
	"bytes"
	"encoding/json"
	"io"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kinference/kinference/internal/openai"
)

// FuzzSSE reads a stream whole and in pieces: the events must be the same, those
// of a second, naive parser, and their raw bytes the stream.
func FuzzSSE(f *testing.F) {
	for _, s := range []string{
		"data: {\"a\":1}\n\ndata: [DONE]\n\n", "data:x\r\n\r\n: ping\r\n\r\n", "data: a\r\rdata\r\r", "\ufeffevent: error\ndata: a\ndata: b\n\n",
		"data: a\r\n\r", "\r\n\r\n\n\r", "event:x\r\ndata:\r\r\n",
	} {
		f.Add([]byte(s), uint8(3))
	}
	f.Fuzz(func(t *testing.T, stream []byte, step uint8) {
		whole := read(t, bytes.NewReader(stream), stream)
		cut := read(t, &stepReader{stream, int(step)%7 + 1}, stream)
		if diff := cmp.Diff(whole, cut); diff != "" {
			t.Error(diff)
		}
		if diff := cmp.Diff(naive(string(stream)), whole); diff != "" {
			t.Errorf("naive parser and ours: %s", diff)
		}
	})
}

// naive splits all of a stream into lines and looks at one after another, as the
// standard tells it.
func naive(stream string) (events []event) {
	stream = strings.TrimPrefix(stream, "\ufeff")
	stream = strings.ReplaceAll(strings.ReplaceAll(stream, "\r\n", "\n"), "\r", "\n")
	var e event
	var data []string
	end := func(cut bool) {
		e.Data, e.HasData, e.Cut = strings.Join(data, "\n"), data != nil, cut
		if e.HasData || e.Type != "" {
			events = append(events, e)
		}
		e, data = event{}, nil
	}
	lines := strings.Split(stream, "\n")
	for i, line := range lines {
		name, value, _ := strings.Cut(line, ":")
		value = strings.TrimPrefix(value, " ")
		switch {
		case line == "" && i < len(lines)-1:
			end(false)
		case name == "data":
			data = append(data, value)
		case name == "event":
			e.Type = value
		}
	}
	end(true)
	return events
}

// FuzzWriter writes an event and reads it back, with the next one after it.
func FuzzWriter(f *testing.F) {
	f.Add("", []byte(`{"choices":[{"delta":{"content":"data: [DONE]\n\n"}}]}`), uint8(1))
	f.Add("error", []byte("a\nb\n"), uint8(3))
	f.Add("ping", []byte("a\r\rb\r\nc"), uint8(2))
	f.Fuzz(func(t *testing.T, typ string, data []byte, step uint8) {
		typ = strings.Map(func(r rune) rune {
			if r == '\n' || r == '\r' {
				return -1
			}
			return r
		}, typ)
		stream := openai.AppendEvent(openai.AppendEvent([]byte(": ping\n\n"), []byte(typ), data), nil, []byte("[DONE]"))
		text := strings.ReplaceAll(strings.ReplaceAll(string(data), "\r\n", "\n"), "\r", "\n")
		want := []event{{Data: text, Type: typ, HasData: true}, {Data: "[DONE]", HasData: true}}
		if diff := cmp.Diff(want, read(t, &stepReader{stream, int(step)%7 + 1}, stream)); diff != "" {
			t.Error(diff)
		}
	})
}

// read returns the blocks that say anything: an LF that was cut from its CR
// makes a block of its own, which says nothing.
func read(t *testing.T, src io.Reader, stream []byte) (events []event) {
	r := openai.NewReader(src, 1<<20)
	var raw []byte
	for {
		e, err := r.Next()
		if err != nil {
			if err != io.EOF || !bytes.Equal(raw, stream) {
				t.Errorf("%v; raw bytes %q of %q", err, raw, stream)
			}
			return events
		}
		raw = append(raw, e.Raw...)
		if e.Data != nil || len(e.Type) > 0 {
			events = append(events, event{string(e.Data), string(e.Type), e.Data != nil, e.Cut})
		}
	}
}

type stepReader struct {
	rest []byte
	step int
}

func (r *stepReader) Read(p []byte) (int, error) {
	if len(r.rest) == 0 {
		return 0, io.EOF
	}
	n := copy(p, r.rest[:min(r.step, len(r.rest))])
	r.rest = r.rest[n:]
	return n, nil
}

// FuzzChatJSON parses a body as both routes do, and edits it as ingress does:
// what we accept encoding/json accepts, what the edit does not name stays.
func FuzzChatJSON(f *testing.F) {
	for _, s := range []string{
		`{"model":"m","messages":[{"role":"user","content":"h\u00e9\ud83d\ude00"}],"stream":true,"stream_options":{"include_usage":false},"seed":18446744073709551615}`,
		` { "messages" : [ ] , "model":"a" , "x":{"a":[1,2.50,-0.0e1]} } `,
		`{"model":"m","prompt":[1,2,3],"max_tokens":16}`, `{"model":"m","prompt":["a","b"],"stream_options":null}`,
		`{"model":"m","prompt":[[1],[2]]}`, `{"mo\u0064el":"x","messages":[],"Model":"y"}`, `{"a":{"b":1,"b":2}}`, "{\"a\":\"\xff\"}", `{"a":1e999}`,
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		for _, route := range []openai.Route{openai.RouteChat, openai.RouteCompletions} {
			var r openai.Request
			if e := r.Parse(route, bytes.Clone(body), 0); e == nil {
				checkEdit(t, &r.Body)
			} else if e.Status != 400 || !json.Valid(e.AppendJSON(nil)) {
				t.Errorf("bad error %+v", e)
			}
		}
		var c openai.Chunk
		if c.Parse(body) == nil {
			c.Content()
			if c.Error.Given() {
				openai.FromEvent(c.Error)
			}
		}
		openai.FromBody(400, body)
		var o openai.Object
		if err := o.Parse(body, 0); err == nil {
			checkEdit(t, &o)
		}
	})
}

func checkEdit(t *testing.T, o *openai.Object) {
	before := members(t, o.Raw())
	if len(before) != o.Len() {
		t.Fatalf("%d members, encoding/json has %d", o.Len(), len(before))
	}
	out, err := o.Apply(nil, openai.Set([]byte(`"new"`), "model"), openai.Set([]byte("true"), "stream_options", "include_usage"), openai.Remove("seed"))
	if err != nil {
		if !strings.Contains(err.Error(), "stream_options") {
			t.Error(err)
		}
		return
	}
	after := members(t, out)
	if string(after["model"]) != `"new"` {
		t.Errorf("model is %s", after["model"])
	}
	if inner := members(t, after["stream_options"]); string(inner["include_usage"]) != "true" {
		t.Errorf("stream_options is %s", after["stream_options"])
	}
	if _, ok := after["seed"]; ok {
		t.Error("seed is still there")
	}
	for _, name := range []string{"model", "stream_options", "seed"} {
		delete(before, name)
		delete(after, name)
	}
	if diff := cmp.Diff(before, after); diff != "" {
		t.Error(diff)
	}
}

// members decodes an object with encoding/json, each value as its raw text.
func members(t *testing.T, text []byte) map[string]json.RawMessage {
	var m map[string]json.RawMessage
	if err := json.Unmarshal(text, &m); err != nil {
		t.Fatalf("encoding/json refuses what we accept or made: %v in %q", err, text)
	}
	var deep any
	if err := json.Unmarshal(text, &deep); err != nil { // checks the range of numbers as well
		t.Fatalf("encoding/json refuses what we accept: %v", err)
	}
	return m
}
