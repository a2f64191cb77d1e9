package relay

import (
	"context"
	"sync"

	"github.com/kinference/kinference/internal/bus"
)

const (
	// outboxBytes bounds what waits for NATS, per link. A busy engine fills it in
	// some ten seconds; what comes later is fetched again by replay.
	outboxBytes = 2 << 20
	// flushBytes is when a message goes out without waiting for more.
	flushBytes = 256 << 10
	// maxPerMessage bounds the batches in one message.
	maxPerMessage = 4096
)

// entry is one thing to publish: a batch, or another kind without payload.
type entry struct {
	kind    bus.Kind
	epoch   string
	seq     uint64
	payload []byte
	digest  string
	reason  string
	// sent is closed once the entry is published; may be nil.
	sent chan struct{}
}

// outbox is the queue between a link and NATS: one side never waits, the other
// takes whole messages. Safe for concurrent use.
type outbox struct {
	mu      sync.Mutex
	entries []entry
	bytes   int
	added   chan struct{} // capacity 1
	taken   chan struct{} // capacity 1
}

func newOutbox() *outbox {
	return &outbox{added: make(chan struct{}, 1), taken: make(chan struct{}, 1)}
}

func signal(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// tryPush adds a batch unless the box is full. A batch of any size fits into an
// empty box.
func (o *outbox) tryPush(e entry) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	n := len(e.payload) + bus.Overhead
	if o.bytes > 0 && o.bytes+n > outboxBytes {
		return false
	}
	o.entries = append(o.entries, e)
	o.bytes += n
	signal(o.added)
	return true
}

// push adds a batch, and waits while the box is full.
func (o *outbox) push(ctx context.Context, e entry) error {
	for !o.tryPush(e) {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-o.taken:
		}
	}
	return nil
}

// control adds an entry of another kind than batch; there is always room. A
// clear makes all that waits pointless, and a resume undoes a suspend that has
// not left: so what waits stays bounded however long NATS is away.
func (o *outbox) control(e entry) {
	o.mu.Lock()
	defer o.mu.Unlock()
	switch n := len(o.entries); {
	case e.kind == bus.KindClear:
		o.entries, o.bytes = o.entries[:0], 0
		signal(o.taken)
	case e.kind == bus.KindResume && n > 0 && o.entries[n-1].kind == bus.KindSuspend:
		o.entries = o.entries[:n-1]
		return
	}
	o.entries = append(o.entries, e)
	signal(o.added)
}

// state tells whether something waits, and whether it should leave at once.
func (o *outbox) state() (waiting, urgent bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	n := len(o.entries)
	if n == 0 {
		return false, false
	}
	return true, o.bytes >= flushBytes || n >= maxPerMessage ||
		o.entries[0].kind != bus.KindBatch || o.entries[n-1].kind != bus.KindBatch
}

// take removes the next message of at most limit bytes from the box into m; sent
// is to be closed when it is published, unless nil.
func (o *outbox) take(m *bus.KVMessage, limit int) (sent chan struct{}, ok bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if len(o.entries) == 0 {
		return nil, false
	}
	first := o.entries[0]
	*m = bus.KVMessage{
		Kind: first.kind, Epoch: first.epoch, First: first.seq, Last: first.seq,
		Payloads: m.Payloads[:0], Reason: first.reason, Digest: first.digest,
	}
	n := 1
	if first.kind == bus.KindBatch {
		n = 0
		for size := 0; n < len(o.entries) && n < maxPerMessage; n++ {
			e := &o.entries[n]
			size += len(e.payload) + bus.Overhead
			if e.kind != bus.KindBatch || e.epoch != first.epoch || e.seq != first.seq+uint64(n) || n > 0 && size > limit {
				break
			}
			m.Payloads = append(m.Payloads, e.payload)
			m.Last, m.Digest = e.seq, e.digest
			o.bytes -= len(e.payload) + bus.Overhead
		}
	}
	// Shift, so that the array does not grow for ever, and let go of payloads.
	rest := copy(o.entries, o.entries[n:])
	clear(o.entries[rest:])
	o.entries = o.entries[:rest]
	signal(o.taken)
	return first.sent, true
}
