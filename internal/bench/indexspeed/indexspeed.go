// Package indexspeed measures the KV index: look-ups, ingest, memory, clearing.
//
// The benchmark command calls it. The index is filled as a fleet with long conversations
// fills it: conversations of 8,192 blocks of 16 tokens that begin with the same 64 blocks,
// which all workers hold; three workers hold the rest of each. It runs on two goroutines
// at most and keeps what it measures from being optimised away.
package indexspeed

import (
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/kinference/kinference/internal/bus"
	"github.com/kinference/kinference/internal/kvhash"
	"github.com/kinference/kinference/internal/kvindex"
	"github.com/kinference/kinference/internal/vllm"
)

const (
	blockSize    = 16
	conversation = 8192 // blocks
	shared       = 64   // of them, the first ones
	holders      = 3
	perEvent     = 64
	perMessage   = 10 // engine batches in a message of the stream
)

// Figure is one measurement.
type Figure struct {
	Name  string
	Value float64
	Unit  string
}

// corpus makes the tokens of any block again.
type corpus struct{ workers, conversations int }

// tokens appends those of one block of a conversation.
func (corpus) tokens(dst []uint32, conversation, block int) []uint32 {
	if block < shared {
		conversation = 0
	}
	x := uint64(conversation)<<32 | uint64(block)
	for range blockSize / 2 {
		x += 0x9e3779b97f4a7c15 // SplitMix64
		z := (x ^ x>>30) * 0xbf58476d1ce4e5b9
		z = (z ^ z>>27) * 0x94d049bb133111eb
		dst = append(dst, uint32(z)%150_000, uint32(z>>32)%150_000)
	}
	return dst
}

// engine is the engine's hash of a block: all engines agree.
func (corpus) engine(conversation, block int) uint64 {
	if block < shared {
		conversation = 0
	}
	return uint64(conversation)<<20 | uint64(block) + 1
}

// event stores blocks [from, to) of a conversation.
func (c corpus) event(e *vllm.Event, conversation, from, to int) {
	*e = vllm.Event{Kind: vllm.BlockStored, Group: -1, LoRAID: -1, BlockSize: blockSize, Hashes: e.Hashes[:0], Tokens: e.Tokens[:0]}
	if from > 0 {
		e.HasParent, e.Parent = true, c.engine(conversation, from-1)
	}
	for i := from; i < to; i++ {
		e.Hashes = append(e.Hashes, c.engine(conversation, i))
		e.Tokens = c.tokens(e.Tokens, conversation, i)
	}
}

func (c corpus) prompt(conversation, blocks int) []uint32 {
	var tokens []uint32
	for i := range blocks {
		tokens = c.tokens(tokens, conversation, i)
	}
	return tokens
}

// worker is the name of a holder of a conversation.
func (c corpus) worker(conversation, k int) string {
	return fmt.Sprintf("w%d/0", (conversation*holders+k)%c.workers)
}

// Measure fills an index with about that many blocks of that many workers and measures.
func Measure(blocks, workers int) []Figure {
	c := corpus{workers: workers, conversations: max(blocks/(conversation-shared), 8)}
	var out []Figure
	add := func(name string, v float64, unit string) { out = append(out, Figure{name, v, unit}) }

	before := heap()
	x := kvindex.New()
	var e vllm.Event
	batch := vllm.Batch{Events: make([]vllm.Event, 1)}
	for w := range workers {
		c.event(&e, 0, 0, shared)
		batch.Events[0] = e
		x.Apply(fmt.Sprintf("w%d/0", w), &batch)
	}
	runtime.LockOSThread() // whose time is measured
	defer runtime.UnlockOSThread()
	var took time.Duration
	stored := 0
	for i := range c.conversations {
		for from := shared; from < conversation; from += perEvent {
			c.event(&e, i, from, from+perEvent)
			batch.Events[0] = e
			start := threadTime()
			for k := range holders {
				stored += x.Apply(c.worker(i, k), &batch).Stored
			}
			took += threadTime() - start
		}
	}
	held := float64(shared + c.conversations*(conversation-shared))
	add("fill_block_events_per_s", float64(stored)/took.Seconds(), "1/s")
	add("bytes_per_block", (heap()-before)/held, "B")
	add("blocks", held, "")

	lookups(x, c, add)
	churn(x, c, add)
	beside(x, c, add)

	recovery(x, c, add)

	victim := c.worker(1, 0)
	start := time.Now()
	x.Clear(victim)
	add("clear_hidden_us", float64(time.Since(start).Nanoseconds())/1e3, "us")
	x.Sweep()
	add("clear_ms", float64(time.Since(start).Nanoseconds())/1e6, "ms")
	return out
}

func heap() float64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return float64(m.HeapAlloc)
}

// median runs f, which does n operations, for a while and returns nanoseconds for each, by
// the median of the runs. They are of the processor, so that other processes do not count
// but for what they do to its caches.
func median(n int, f func()) float64 {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var took []float64
	for begin := time.Now(); len(took) < 5 || time.Since(begin) < 200*time.Millisecond; {
		start := threadTime()
		f()
		took = append(took, float64((threadTime()-start).Nanoseconds())/float64(n))
	}
	slices.Sort(took)
	return took[len(took)/2]
}

func lookups(x *kvindex.Table, c corpus, add func(string, float64, string)) {
	const prompts = 64
	var hashes [][]kvhash.Hash
	for i := range prompts {
		hashes = append(hashes, kvhash.Append(nil, kvhash.Root("", ""), c.prompt(i*7%c.conversations, conversation), blockSize))
	}
	var dst []kvindex.Overlap
	for _, n := range []int{10, 100, 1000, 8000} {
		ns := median(prompts, func() {
			for _, h := range hashes {
				dst = x.Match(dst[:0], blockSize, h[:n])
			}
		})
		add(fmt.Sprintf("lookup_%d_blocks_%d_workers_ns", n, c.workers), ns, "ns")
	}
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	mallocs := m.Mallocs
	for range 100 {
		for _, h := range hashes {
			dst = x.Match(dst[:0], blockSize, h)
		}
	}
	runtime.ReadMemStats(&m)
	add("lookup_allocs", float64((m.Mallocs-mallocs)/(100*prompts)), "")

	miss := kvhash.Append(nil, kvhash.Root("nobody", ""), c.prompt(1, 8000), blockSize)
	add("lookup_8000_blocks_miss_ns", median(1000, func() {
		for range 1000 {
			dst = x.Match(dst[:0], blockSize, miss)
		}
	}), "ns")

	prompt := c.prompt(3%c.conversations, 8000)
	own := make([]kvhash.Hash, 0, 8000)
	add("request_128k_tokens_hash_and_lookup_us", median(1, func() {
		own = kvhash.Append(own[:0], kvhash.Root("", ""), prompt, blockSize)
		dst = x.Match(dst[:0], blockSize, own)
	})/1e3, "us")
}

// recovery measures a snapshot, and how long an index takes that starts from it and then
// applies what came after it: 20,000 batches, which is a second of 64 busy engines.
func recovery(x *kvindex.Table, c corpus, add func(string, float64, string)) {
	start := time.Now()
	snapshot := x.Snapshot(nil)
	add("snapshot_ms", float64(time.Since(start).Nanoseconds())/1e6, "ms")
	add("snapshot_bytes_per_block", float64(len(snapshot))/float64(x.Info().Blocks), "B")
	workers, batches, _ := turns(c, 2000)
	start = time.Now()
	y, err := kvindex.Restore(snapshot)
	if err != nil {
		panic(err) // a fault of this benchmark
	}
	add("restore_ms", float64(time.Since(start).Nanoseconds())/1e6, "ms")
	for range tailRounds {
		for i := range batches {
			y.Apply(workers[i], &batches[i])
		}
	}
	add("restore_and_tail_ms", float64(time.Since(start).Nanoseconds())/1e6, "ms")
	runtime.KeepAlive(y)
}

// tailRounds times 2,000 batches are what is applied behind a snapshot.
const tailRounds = 10

// turns makes batches that evict the end of conversations, tail first, and store it again:
// events as an engine at its capacity sends them.
func turns(c corpus, n int) (workers []string, batches []vllm.Batch, events int) {
	r := rand.New(rand.NewPCG(1, 1))
	for range n {
		i := r.IntN(c.conversations)
		gone := vllm.NewEvent(vllm.BlockRemoved)
		for b := conversation - 1; b >= conversation-perEvent; b-- {
			gone.Hashes = append(gone.Hashes, c.engine(i, b))
		}
		var e vllm.Event
		c.event(&e, i, conversation-perEvent, conversation)
		workers = append(workers, c.worker(i, r.IntN(holders)))
		batches = append(batches, vllm.Batch{Events: []vllm.Event{gone, e}})
		events += 2 * perEvent
	}
	return workers, batches, events
}

func churn(x *kvindex.Table, c corpus, add func(string, float64, string)) {
	workers, batches, events := turns(c, 2000)
	ns := median(events, func() {
		for i := range batches {
			x.Apply(workers[i], &batches[i])
		}
	})
	add("ingest_decoded_block_events_per_s", 1e9/ns, "1/s")

	var messages []*nats.Msg
	for i := 0; i+perMessage <= len(batches); i += perMessage {
		m := bus.KVMessage{Kind: bus.KindBatch, Epoch: "e", First: uint64(i), Last: uint64(i + perMessage - 1)}
		for k := range perMessage {
			m.Payloads = append(m.Payloads, vllm.AppendBatch(nil, &batches[i+k], vllm.V0_24))
		}
		msg, err := m.Encode(bus.Worker{Namespace: "n", Set: "s", UID: "u"})
		if err != nil {
			panic(err) // a fault of this benchmark, as below
		}
		messages = append(messages, msg)
	}
	bytes := 0
	for _, msg := range messages {
		bytes += len(msg.Data)
	}
	add("stream_bytes_per_block_stored_and_removed", float64(bytes)/float64(len(messages)*perMessage*perEvent), "B")
	var d vllm.Decoder
	var b vllm.Batch
	var m bus.KVMessage
	ns = median(len(messages)*perMessage*2*perEvent, func() {
		for i, msg := range messages {
			if err := m.Decode(msg.Header, msg.Data); err != nil {
				panic(err)
			}
			for k, p := range m.Payloads {
				if err := d.Decode(p, &b); err != nil {
					panic(err)
				}
				x.Apply(workers[i*perMessage+k], &b)
			}
		}
	})
	add("ingest_block_events_per_s", 1e9/ns, "1/s")
}

// beside measures look-ups while another goroutine does nothing but ingest.
func beside(x *kvindex.Table, c corpus, add func(string, float64, string)) {
	workers, batches, events := turns(c, 2000)
	var hashes [][]kvhash.Hash
	for i := range 64 {
		hashes = append(hashes, kvhash.Append(nil, kvhash.Root("", ""), c.prompt(i*5%c.conversations, 8000), blockSize))
	}
	var stop atomic.Bool
	var wg sync.WaitGroup
	applied, start := 0, time.Now()
	wg.Go(func() {
		for !stop.Load() {
			for i := range batches {
				x.Apply(workers[i], &batches[i])
			}
			applied += events
		}
	})
	var dst []kvindex.Overlap
	var took []float64
	for i := 0; len(took) < 100 || time.Since(start) < time.Second; i++ {
		begin := time.Now()
		dst = x.Match(dst[:0], blockSize, hashes[i%len(hashes)])
		took = append(took, float64(time.Since(begin).Nanoseconds()))
	}
	stop.Store(true)
	wg.Wait()
	slices.Sort(took)
	add("lookup_p50_under_ingest_ns", took[len(took)/2], "ns")
	add("lookup_p99_under_ingest_us", took[len(took)*99/100]/1e3, "us")
	add("ingest_under_lookups_block_events_per_s", float64(applied)/time.Since(start).Seconds(), "1/s")
}
