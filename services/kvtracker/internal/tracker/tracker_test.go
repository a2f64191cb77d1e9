package tracker

import (
	"fmt"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/google/go-cmp/cmp"
	"github.com/nats-io/nats.go"
	"go.uber.org/goleak"

	"github.com/kinference/kinference/internal/bus"
	"github.com/kinference/kinference/internal/kvhash"
	"github.com/kinference/kinference/internal/vllm"
	kvtrackerv1 "github.com/kinference/kinference/proto/gen/kinference/kvtracker/v1"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var (
	one = bus.Worker{Namespace: "demo", Set: "sim", UID: "one", Rank: 0}
	two = bus.Worker{Namespace: "demo", Set: "sim", UID: "one", Rank: 1}
)

// clock is a clock that tests move.
type clock struct{ at time.Time }

func (c *clock) now() time.Time { return c.at }

// fixture is a tracker without NATS: messages are handed to it.
type fixture struct {
	*Tracker
	t     *testing.T
	clock *clock
	seq   uint64
}

func newFixture(t *testing.T) *fixture {
	t.Helper()
	tr, err := New(t.Context(), Shard{})
	if err != nil {
		t.Fatal(err)
	}
	c := &clock{at: time.Unix(1_700_000_000, 0)}
	tr.now = c.now
	tr.setCaughtUp()
	return &fixture{Tracker: tr, t: t, clock: c}
}

func (f *fixture) send(w bus.Worker, m bus.KVMessage) {
	f.t.Helper()
	msg, err := m.Encode(w)
	if err != nil {
		f.t.Fatal(err)
	}
	f.seq++
	f.apply(f.t.Context(), bus.Delivery{Subject: msg.Subject, Header: msg.Header, Data: msg.Data, Position: bus.Position{Seq: f.seq}, Stored: f.clock.at})
}

// block is the payload of an engine batch that stores block n of a sequence in
// which each block is two tokens and follows the one before.
func block(n uint64) []byte {
	e := vllm.NewEvent(vllm.BlockStored)
	e.Hashes, e.Tokens, e.BlockSize = []uint64{100 + n}, []uint32{uint32(n), uint32(n)}, 2
	if n > 0 {
		e.Parent, e.HasParent = 99+n, true
	}
	return payload(e)
}

func remove(n uint64) []byte {
	e := vllm.NewEvent(vllm.BlockRemoved)
	e.Hashes = []uint64{100 + n}
	return payload(e)
}

func payload(events ...vllm.Event) []byte {
	return vllm.AppendBatch(nil, &vllm.Batch{TS: 1_700_000_000, Events: events, Rank: -1}, vllm.V0_24)
}

// prompt is n blocks of that sequence.
func prompt(n int) []uint64 {
	var out []uint64
	h := kvhash.Root("", "")
	for i := range n {
		h = kvhash.Next(h, []uint32{uint32(i), uint32(i)})
		out = append(out, uint64(h))
	}
	return out
}

// batch carries blocks first to last under the same sequence numbers.
func batch(epoch string, first, last uint64) bus.KVMessage {
	m := bus.KVMessage{Kind: bus.KindBatch, Epoch: epoch, First: first, Last: last}
	for n := first; n <= last; n++ {
		m.Payloads = append(m.Payloads, block(n))
	}
	return m
}

func raw(epoch string, first uint64, payloads ...[]byte) bus.KVMessage {
	return bus.KVMessage{Kind: bus.KindBatch, Epoch: epoch, First: first, Last: first + uint64(len(payloads)) - 1, Payloads: payloads}
}

func control(kind bus.Kind, epoch string, next uint64, reason string) bus.KVMessage {
	return bus.KVMessage{Kind: kind, Epoch: epoch, First: next, Last: next, Reason: reason}
}

// blocks is how many leading blocks of the sequence each worker holds.
func (f *fixture) blocks() map[string]int {
	f.t.Helper()
	resp, err := f.Match(f.t.Context(), &kvtrackerv1.MatchRequest{Queries: []*kvtrackerv1.Query{{BlockSize: 2, BlockHashes: prompt(20)}}})
	if err != nil {
		f.t.Fatal(err)
	}
	out := map[string]int{}
	for _, m := range resp.GetResults()[0].GetMatches() {
		out[m.GetWorker()] = int(m.GetGpuTokens()) / 2
	}
	return out
}

func TestSequences(t *testing.T) {
	long := batch("e", 0, 5)
	tests := []struct {
		name     string
		messages []bus.KVMessage
		blocks   int
		complete bool
		last     int64
		skipped  uint64
		gone     bool
		idle     bool // not live
	}{
		{name: "in order", messages: []bus.KVMessage{batch("e", 0, 2), batch("e", 3, 5)}, blocks: 6, complete: true, last: 5},
		{name: "twice", messages: []bus.KVMessage{long, long}, blocks: 6, complete: true, last: 5},
		{name: "twice does not count copies twice", messages: []bus.KVMessage{long, long, raw("e", 6, remove(5))}, blocks: 5, complete: true, last: 6},
		{name: "in other pieces", messages: []bus.KVMessage{batch("e", 0, 3), batch("e", 1, 2), batch("e", 2, 5)}, blocks: 6, complete: true, last: 5},
		{name: "from the middle", messages: []bus.KVMessage{batch("e", 3, 5)}, last: 5},
		{name: "gap", messages: []bus.KVMessage{batch("e", 0, 2), batch("e", 4, 5)}, last: 5},
		{name: "gap, then all again", messages: []bus.KVMessage{batch("e", 0, 2), batch("e", 4, 5), control(bus.KindClear, "e", 0, "replay"), long},
			blocks: 6, complete: true, last: 5},
		{name: "gap, then the engine clears", messages: []bus.KVMessage{batch("e", 0, 2),
			raw("e", 4, payload(vllm.NewEvent(vllm.AllBlocksCleared)), block(0))}, blocks: 1, complete: true, last: 5},
		{name: "restart", messages: []bus.KVMessage{long, batch("f", 0, 1)}, blocks: 2, complete: true, last: 1},
		{name: "restart, late", messages: []bus.KVMessage{long, batch("f", 1, 1)}, last: 1},
		{name: "restart, then the old epoch", messages: []bus.KVMessage{batch("e", 0, 1), batch("f", 0, 2), batch("e", 2, 5)}, blocks: 3, complete: true, last: 2},
		{name: "clear by relay", messages: []bus.KVMessage{long, control(bus.KindClear, "e", 6, "gap")}, last: 5},
		{name: "clear into a new epoch", messages: []bus.KVMessage{long, control(bus.KindClear, "f", 0, "restart"), batch("f", 0, 0)}, blocks: 1, complete: true},
		{name: "clear of the old epoch", messages: []bus.KVMessage{long, batch("f", 0, 2), control(bus.KindClear, "e", 9, "gap")}, blocks: 3, complete: true, last: 2},
		{name: "suspended", messages: []bus.KVMessage{long, control(bus.KindSuspend, "e", 6, "away")}, complete: true, last: 5, idle: true},
		{name: "resumed", messages: []bus.KVMessage{long, control(bus.KindSuspend, "e", 6, "away"), control(bus.KindResume, "e", 6, "")}, blocks: 6, complete: true, last: 5},
		{name: "suspended, then cleared", messages: []bus.KVMessage{long, control(bus.KindSuspend, "e", 6, "away"),
			control(bus.KindClear, "e", 0, "replay"), batch("e", 0, 1)}, blocks: 2, complete: true, last: 1},
		{name: "suspended in another epoch", messages: []bus.KVMessage{long, batch("f", 0, 0), control(bus.KindSuspend, "e", 6, "away")}, blocks: 1, complete: true},
		{name: "batches while suspended", messages: []bus.KVMessage{batch("e", 0, 1), control(bus.KindSuspend, "e", 2, "away"), batch("e", 2, 3),
			control(bus.KindResume, "e", 4, "")}, blocks: 4, complete: true, last: 3},
		{name: "gone", messages: []bus.KVMessage{long, control(bus.KindClear, "e", 6, "gone")}, gone: true},
		{name: "gone and back", messages: []bus.KVMessage{long, control(bus.KindClear, "e", 6, "gone"), batch("f", 0, 1)}, blocks: 2, complete: true, last: 1},
		{name: "unreadable payload", messages: []bus.KVMessage{batch("e", 0, 2), raw("e", 3, []byte{0xc1}, block(0))}, blocks: 1, last: 4, skipped: 1},
		{name: "event of an unknown kind", messages: []bus.KVMessage{long, raw("e", 6, append([]byte{0x92, 0x01, 0x91, 0x91, 0xa1}, 'x'))},
			blocks: 6, complete: true, last: 6, skipped: 1},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			f := newFixture(t)
			f.send(two, batch("z", 0, 0))
			for _, m := range tt.messages {
				f.send(one, m)
			}
			want := map[string]int{two.ID(): 1} // nothing touches the other rank
			if tt.blocks > 0 {
				want[one.ID()] = tt.blocks
			}
			if diff := cmp.Diff(f.blocks(), want); diff != "" {
				t.Errorf("blocks (-got +want):\n%s", diff)
			}
			s := f.state(one.ID())
			if tt.gone {
				if s != nil {
					t.Errorf("state of a worker that is gone: %v", s)
				}
				return
			}
			i := s.GetIndex()
			got := fmt.Sprintf("complete %v last %d skipped %d live %v", i.GetComplete(), i.GetLastSeq(), i.GetSkipped(), i.GetLive())
			if want := fmt.Sprintf("complete %v last %d skipped %d live %v", tt.complete, tt.last, tt.skipped, !tt.idle); got != want {
				t.Errorf("got %s, want %s", got, want)
			}
		})
	}
}

func TestMalformedMessages(t *testing.T) {
	f := newFixture(t)
	f.send(one, batch("e", 0, 1))
	msg, _ := (&bus.KVMessage{Kind: bus.KindBatch, Epoch: "e", First: 2, Last: 2, Payloads: [][]byte{block(2)}}).Encode(one)
	for _, d := range []bus.Delivery{
		{Subject: "kv.events.x", Header: msg.Header, Data: msg.Data},
		{Subject: msg.Subject},
		{Subject: msg.Subject, Header: nats.Header{"Kin-Kind": {"hello"}}, Data: msg.Data},
		{Subject: msg.Subject, Header: msg.Header, Data: msg.Data[:len(msg.Data)-1]},
	} {
		f.apply(t.Context(), d)
	}
	if got := f.blocks()[one.ID()]; got != 2 {
		t.Errorf("%d blocks after malformed messages, want 2", got)
	}
	f.send(one, batch("e", 3, 3)) // what was lost shows now
	if got := f.blocks()[one.ID()]; got != 0 {
		t.Errorf("%d blocks after a gap, want 0", got)
	}
}

func TestMatchLimits(t *testing.T) {
	f := newFixture(t)
	f.send(one, batch("e", 0, 3))
	other := bus.Worker{Namespace: "demo", Set: "other", UID: "two"}
	f.send(other, batch("e", 0, 1))
	match := func(qs ...*kvtrackerv1.Query) (*kvtrackerv1.MatchResponse, error) {
		return f.Match(t.Context(), &kvtrackerv1.MatchRequest{Queries: qs})
	}
	resp, err := match(
		&kvtrackerv1.Query{BlockSize: 2, BlockHashes: prompt(3), WorkerSet: "demo/other"},
		&kvtrackerv1.Query{BlockSize: 4, BlockHashes: prompt(3)},
		&kvtrackerv1.Query{},
	)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, r := range resp.GetResults() {
		for _, m := range r.GetMatches() {
			got = append(got, fmt.Sprint(m.GetWorker(), " ", m.GetGpuTokens(), " ", m.GetCpuTokens()))
		}
		got = append(got, ".")
	}
	if diff := cmp.Diff(got, []string{"two/0 4 4", ".", ".", "."}); diff != "" {
		t.Errorf("(-got +want):\n%s", diff)
	}
	for name, qs := range map[string][]*kvtrackerv1.Query{
		"too many queries": make([]*kvtrackerv1.Query, 65),
		"block size":       {{BlockSize: 1 << 20}},
		"too many blocks":  {{BlockSize: 2, BlockHashes: make([]uint64, 1<<20+1)}},
	} {
		if _, err := match(qs...); connect.CodeOf(err) != connect.CodeInvalidArgument {
			t.Errorf("%s: got error %v, want InvalidArgument", name, err)
		}
	}
	f.caughtUp = false
	if _, err := match(); connect.CodeOf(err) != connect.CodeUnavailable {
		t.Errorf("while rebuilding: got error %v, want Unavailable", err)
	}
}
