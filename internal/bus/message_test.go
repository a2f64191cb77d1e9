package bus_test

import (
	"bytes"
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/nats-io/nats.go"

	"github.com/kinference/kinference/internal/bus"
)

var worker = bus.Worker{Namespace: "demo", Set: "sim", UID: "demo.sim.a", Rank: 1}

func TestMessages(t *testing.T) {
	tests := []struct {
		name string
		m    bus.KVMessage
		id   string
	}{
		{"one payload", bus.KVMessage{Kind: bus.KindBatch, Epoch: "e1", Payloads: [][]byte{[]byte("x")}}, "demo.sim.demo=2Esim=2Ea.1/e1/0-0"},
		{"three payloads, one empty", bus.KVMessage{Kind: bus.KindBatch, Epoch: "1:2.3_4-5", First: 7, Last: 9,
			Payloads: [][]byte{bytes.Repeat([]byte("y"), 300), {}, {0}}}, "demo.sim.demo=2Esim=2Ea.1/1:2.3_4-5/7-9"},
		{"clear", bus.KVMessage{Kind: bus.KindClear, Epoch: "e", First: 4, Last: 4, Reason: "gap"}, ""},
		{"suspend", bus.KVMessage{Kind: bus.KindSuspend, Epoch: "e", Reason: "disconnected", Digest: "00ff"}, ""},
		{"resume", bus.KVMessage{Kind: bus.KindResume, Epoch: "e", First: 1 << 63, Last: 1 << 63}, ""},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			msg, err := tt.m.Encode(worker)
			if err != nil {
				t.Fatal(err)
			}
			if got := msg.Header.Get("Nats-Msg-Id"); got != tt.id {
				t.Errorf("message id: got %q, want %q", got, tt.id)
			}
			got := bus.KVMessage{Payloads: make([][]byte, 5)}
			if err := got.Decode(msg.Header, msg.Data); err != nil {
				t.Fatal(err)
			}
			if len(got.Payloads) == 0 {
				got.Payloads = nil
			}
			if diff := cmp.Diff(got, tt.m); diff != "" {
				t.Errorf("(-got +want):\n%s", diff)
			}
		})
	}
}

func TestBadMessagesAreNotSent(t *testing.T) {
	one := [][]byte{{1}}
	for name, m := range map[string]bus.KVMessage{
		"no kind":          {Epoch: "e", Payloads: one},
		"unknown kind":     {Kind: "hello", Epoch: "e", Payloads: one},
		"no epoch":         {Kind: bus.KindBatch, Payloads: one},
		"long epoch":       {Kind: bus.KindBatch, Epoch: strings.Repeat("e", 65), Payloads: one},
		"header injection": {Kind: bus.KindBatch, Epoch: "e\r\nX: y", Payloads: one},
		"bad digest":       {Kind: bus.KindClear, Epoch: "e", Digest: "a b"},
		"bad reason":       {Kind: bus.KindClear, Epoch: "e", Reason: "because of this"},
		"no payload":       {Kind: bus.KindBatch, Epoch: "e"},
		"range and count":  {Kind: bus.KindBatch, Epoch: "e", First: 1, Last: 2, Payloads: one},
		"backwards":        {Kind: bus.KindBatch, Epoch: "e", First: 2, Last: 1, Payloads: one},
		"clear + payload":  {Kind: bus.KindClear, Epoch: "e", Payloads: one},
		"clear of range":   {Kind: bus.KindClear, Epoch: "e", Last: 1},
		"too many":         {Kind: bus.KindBatch, Epoch: "e", Last: 1 << 14, Payloads: make([][]byte, 1<<14+1)},
		"too large":        {Kind: bus.KindBatch, Epoch: "e", Payloads: [][]byte{make([]byte, 9<<20)}},
	} {
		if _, err := m.Encode(worker); !errors.Is(err, bus.ErrInvalid) || !bus.Permanent(err) {
			t.Errorf("%s: got error %v, want ErrInvalid", name, err)
		}
	}
	m := bus.KVMessage{Kind: bus.KindBatch, Epoch: "e", Payloads: one}
	if _, err := m.Encode(bus.Worker{Rank: -1}); !errors.Is(err, bus.ErrInvalid) {
		t.Errorf("bad worker: got error %v, want ErrInvalid", err)
	}
}

// FuzzMessage checks that any message is decoded or refused, and that what was
// decoded is written back with the same meaning.
func FuzzMessage(f *testing.F) {
	f.Add("batch", "e1", "3", "4", "", []byte{1, 'x', 2, 'y', 'z'})
	f.Add("batch", "e1", "18446744073709551615", "0", "", []byte{0, 0})
	f.Add("clear", "e1", "3", "3", "gap", []byte{})
	f.Add("resume", "1:2", "+3", "03", "", []byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1})
	f.Fuzz(func(t *testing.T, kind, epoch, first, last, reason string, data []byte) {
		h := nats.Header{"Kin-Kind": {kind}, "Kin-Epoch": {epoch}, "Kin-First": {first}, "Kin-Last": {last}, "Kin-Reason": {reason}}
		var m, again bus.KVMessage
		if m.Decode(h, data) != nil {
			return
		}
		size := 0
		for _, p := range m.Payloads {
			size += len(p)
		}
		if size > len(data) {
			t.Fatalf("%d bytes of payload from %d", size, len(data))
		}
		msg, err := m.Encode(worker)
		if err != nil {
			t.Fatalf("decoded but cannot be encoded: %v", err)
		}
		if err := again.Decode(msg.Header, msg.Data); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(again, m); diff != "" {
			t.Errorf("(-got +want):\n%s", diff)
		}
	})
}

func BenchmarkDecode(b *testing.B) {
	m := bus.KVMessage{Kind: bus.KindBatch, Epoch: "e", Last: 9, Payloads: make([][]byte, 10)}
	for i := range m.Payloads {
		m.Payloads[i] = make([]byte, 200)
	}
	msg, err := m.Encode(worker)
	if err != nil {
		b.Fatal(err)
	}
	b.ReportAllocs()
	for b.Loop() {
		if err := m.Decode(msg.Header, msg.Data); err != nil {
			b.Fatal(err)
		}
	}
}
