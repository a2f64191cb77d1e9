package tracker

import (
	"testing"
	"time"

	"github.com/kinference/kinference/internal/bus"
	"github.com/kinference/kinference/internal/shard"
	"github.com/kinference/kinference/internal/vllm"
	kvtrackerv1 "github.com/kinference/kinference/proto/gen/kinference/kvtracker/v1"
)

// BenchmarkMessage applies one message of ten engine batches, each of which
// stores a chain of 16 blocks of 16 tokens and removes it: 320 block events.
func BenchmarkMessage(b *testing.B) {
	t, err := New(b.Context(), Shard{})
	if err != nil {
		b.Fatal(err)
	}
	store := vllm.NewEvent(vllm.BlockStored)
	store.BlockSize = 16
	for i := range 16 {
		store.Hashes = append(store.Hashes, uint64(i)<<40|1)
		for j := range 16 {
			store.Tokens = append(store.Tokens, uint32(i*16+j))
		}
	}
	gone := vllm.NewEvent(vllm.BlockRemoved)
	gone.Hashes = store.Hashes
	p := payload(store, gone)
	m := bus.KVMessage{Kind: bus.KindBatch, Epoch: "e"}
	for range 10 {
		m.Payloads = append(m.Payloads, p)
	}
	b.ReportAllocs()
	b.SetBytes(int64(10 * len(p)))
	for b.Loop() {
		m.Last = m.First + 9
		t.applyBatch(b.Context(), one, &m, time.Time{})
		m.First += 10
	}
}

// BenchmarkMatchRPC is the call without the network: a prompt of 1,000 blocks
// that three workers hold.
func BenchmarkMatchRPC(b *testing.B) {
	t, err := New(b.Context(), Shard{})
	if err != nil {
		b.Fatal(err)
	}
	t.setCaughtUp()
	q := &kvtrackerv1.Query{BlockSize: 2, BlockHashes: prompt(1000)}
	for _, uid := range []string{"a", "b", "c"} {
		w := bus.Worker{Namespace: "n", Set: "s", UID: uid}
		m := batch("e", 0, 999)
		t.applyBatch(b.Context(), w, &m, time.Time{})
	}
	req := &kvtrackerv1.MatchRequest{Queries: []*kvtrackerv1.Query{q}}
	b.ReportAllocs()
	for b.Loop() {
		if _, err := t.Match(b.Context(), req); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkForeign leaves out a message of a worker set that another shard holds.
func BenchmarkForeign(b *testing.B) {
	t, err := New(b.Context(), Shard{Index: 1 - shard.Of(one.SetName(), 2), Count: 2})
	if err != nil {
		b.Fatal(err)
	}
	m := batch("e", 0, 9)
	msg, err := m.Encode(one)
	if err != nil {
		b.Fatal(err)
	}
	d := bus.Delivery{Subject: msg.Subject, Header: msg.Header, Data: msg.Data}
	b.ReportAllocs()
	for b.Loop() {
		t.apply(b.Context(), d)
	}
}
