package vllm_test

import (
	"bytes"
	"errors"
	"math"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kinference/kinference/internal/vllm"
)

func TestParseEvent(t *testing.T) {
	topic, seq, payload, err := vllm.ParseEvent(vllm.EventFrames("kv@pod@model", 1<<40, []byte("p")))
	if topic != "kv@pod@model" || seq != 1<<40 || string(payload) != "p" || err != nil {
		t.Errorf("got %q %d %q %v", topic, seq, payload, err)
	}
	for name, frames := range map[string][][]byte{
		"none":      nil,
		"one":       {[]byte("p")},
		"short seq": {[]byte("t"), []byte("1234567"), []byte("p")},
		"too many":  make([][]byte, 17),
	} {
		if _, _, _, err := vllm.ParseEvent(frames); !errors.Is(err, vllm.ErrFrames) {
			t.Errorf("%s: error %v", name, err)
		}
	}
}

func TestParseReplay(t *testing.T) {
	seq9 := []byte{0, 0, 0, 0, 0, 0, 0, 9}
	end := bytes.Repeat([]byte{0xff}, 8)
	tests := []struct {
		name   string
		frames [][]byte
		seq    uint64
		end    bool
	}{
		{"before July 2026", [][]byte{{}, seq9, []byte("p")}, 9, false},
		{"after", [][]byte{{}, []byte("topic"), seq9, []byte("p")}, 9, false},
		{"without delimiter", [][]byte{seq9, []byte("p")}, 9, false},
		{"end before", [][]byte{{}, end, {}}, math.MaxUint64, true},
		{"end after", [][]byte{{}, {}, end, {}}, math.MaxUint64, true},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			seq, _, isEnd, err := vllm.ParseReplay(tt.frames)
			if seq != tt.seq || isEnd != tt.end || err != nil {
				t.Errorf("got %d %v %v", seq, isEnd, err)
			}
		})
	}
	// The builders make what the tables of the versions show.
	for _, c := range []struct{ got, want [][]byte }{
		{vllm.ReplayFrames("topic", 9, []byte("p"), vllm.V0_24), tests[0].frames},
		{vllm.ReplayFrames("topic", 9, []byte("p"), vllm.V0_26), tests[1].frames},
	} {
		if diff := cmp.Diff(c.got, c.want); diff != "" {
			t.Error(diff)
		}
	}
	for _, v := range []vllm.Version{vllm.V0_24, vllm.V0_26} {
		if _, _, isEnd, err := vllm.ParseReplay(vllm.ReplayEndFrames(v)); !isEnd || err != nil {
			t.Errorf("%v: end is %v, %v", v, isEnd, err)
		}
	}
}

func TestReplayRequest(t *testing.T) {
	frames := append([][]byte{[]byte("id")}, vllm.ReplayRequest(77)...)
	id, start, err := vllm.ParseReplayRequest(frames)
	if string(id) != "id" || start != 77 || err != nil {
		t.Errorf("got %q %d %v", id, start, err)
	}
	if _, _, err := vllm.ParseReplayRequest(frames[1:]); !errors.Is(err, vllm.ErrFrames) {
		t.Errorf("request without identity: %v", err)
	}
}

func FuzzFrames(f *testing.F) {
	f.Add([]byte("topic"), []byte("\x00\x00\x00\x00\x00\x00\x00\x09"), []byte("payload"), byte(3))
	f.Add([]byte{}, bytes.Repeat([]byte{0xff}, 8), []byte{}, byte(4))
	addCaptures(f, func(l *line) {
		if n := len(l.Replay); n >= 3 {
			f.Add(l.Replay[n-3], l.Replay[n-2], l.Replay[n-1], byte(n))
		}
	})
	f.Fuzz(func(t *testing.T, a, b, c []byte, n byte) {
		frames := [][]byte{{}, a, b, c}
		for len(frames) < int(n) {
			frames = append(frames, a)
		}
		frames = frames[:min(int(n), len(frames))]
		_, seq, payload, err := vllm.ParseEvent(frames)
		rseq, rpayload, end, rerr := vllm.ParseReplay(frames)
		if (err == nil) != (rerr == nil) || seq != rseq || !bytes.Equal(payload, rpayload) {
			t.Errorf("event %d %v, replay %d %v", seq, err, rseq, rerr)
		}
		if err == nil && end != (len(payload) == 0) {
			t.Errorf("end is %v for %d bytes", end, len(payload))
		}
		_, _, _ = vllm.ParseReplayRequest(frames)
	})
}
