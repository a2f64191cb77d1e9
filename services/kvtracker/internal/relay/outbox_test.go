package relay

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kinference/kinference/internal/bus"
)

func batchEntry(epoch string, seq uint64, size int) entry {
	return entry{kind: bus.KindBatch, epoch: epoch, seq: seq, payload: make([]byte, size), digest: "d"}
}

// drain takes all messages and names them.
func drain(o *outbox, limit int) (got []string) {
	var m bus.KVMessage
	for {
		if _, ok := o.take(&m, limit); !ok {
			return got
		}
		s := string(m.Kind) + " " + m.Epoch
		for range m.Payloads {
			s += "."
		}
		got = append(got, s)
	}
}

func TestOutboxTake(t *testing.T) {
	o := newOutbox()
	for _, e := range []entry{
		batchEntry("a", 0, 10), batchEntry("a", 1, 10), batchEntry("a", 2, 100), // the third is beyond the limit
		batchEntry("a", 4, 10), // not the next number
		batchEntry("b", 5, 10), // another epoch
	} {
		if !o.tryPush(e) {
			t.Fatal("full")
		}
	}
	o.control(entry{kind: bus.KindSuspend, epoch: "b"})
	o.tryPush(batchEntry("b", 6, 1000)) // beyond the limit, alone
	if diff := cmp.Diff(drain(o, 50), []string{"batch a..", "batch a.", "batch a.", "batch b.", "suspend b", "batch b."}); diff != "" {
		t.Error(diff)
	}
	if o.bytes != 0 {
		t.Errorf("%d bytes left", o.bytes)
	}
}

// However often the connection comes and goes, what waits stays bounded.
func TestOutboxIsBounded(t *testing.T) {
	o := newOutbox()
	for i := range uint64(1000) {
		o.tryPush(batchEntry("a", i, 1<<20))
		o.control(entry{kind: bus.KindSuspend, epoch: "a"})
		o.control(entry{kind: bus.KindResume, epoch: "a"})
	}
	if o.bytes > outboxBytes || len(o.entries) > 2 {
		t.Errorf("%d entries, %d bytes", len(o.entries), o.bytes)
	}
	o.control(entry{kind: bus.KindClear, epoch: "b"})
	o.tryPush(batchEntry("b", 0, 1))
	if diff := cmp.Diff(drain(o, 50), []string{"clear b", "batch b."}); diff != "" {
		t.Error(diff)
	}
}

func TestRankEndpoint(t *testing.T) {
	for _, tt := range []struct {
		base string
		rank int
		want string
		ok   bool
	}{
		{"", 3, "", true},
		{"ipc:///run/kv", 0, "ipc:///run/kv", true},
		{"ipc:///run/kv", 1, "", false},
		{"tcp://host:5557", 2, "tcp://host:5559", true},
		{"tcp://[::1]:5557", 1, "tcp://[::1]:5558", true},
		{"tcp://host", 1, "", false},
		{"tcp://host:65535", 1, "", false},
		{"tcp://host:x", 1, "", false},
	} {
		got, err := rankEndpoint(tt.base, tt.rank)
		if got != tt.want || (err == nil) != tt.ok {
			t.Errorf("rankEndpoint(%q, %d) = %q, %v", tt.base, tt.rank, got, err)
		}
	}
}
