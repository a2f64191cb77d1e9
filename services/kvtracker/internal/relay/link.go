package relay

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"log/slog"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kinference/kinference/internal/bus"
	"github.com/kinference/kinference/internal/vllm"
	"github.com/kinference/kinference/internal/zmtp"
	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
)

// Reasons of clears and suspends.
const (
	reasonStart        = "start"              // first sight of this worker
	reasonRestart      = "restart"            // another engine process answers
	reasonUnverified   = bus.ReasonUnverified // no replay tells what was missed
	reasonGap          = "gap"                // replay does not fill a gap
	reasonOverrun      = "overrun"            // the replay buffer starts too late
	reasonOversize     = "oversize"           // a batch does not fit into a message
	reasonStream       = "stream"             // the stream was lost
	reasonGone         = bus.ReasonGone       // the worker left the catalog
	reasonDisconnected = "disconnected"       // the connection is down
	reasonBackwards    = "backwards"          // the sequence went back
	reasonUnseen       = "unseen"             // no relay followed for a while
)

const (
	// queueItems and queueBytes bound what the receiver holds for the follower;
	// what does not fit is a gap, which replay fills.
	queueItems = 4096
	queueBytes = 8 << 20
)

// link follows the events of one worker. Three goroutines: receive reads the
// socket and never waits, follow keeps the sequence whole and never waits for
// NATS while events are live, publish waits for NATS.
//
// follow is the state machine. Published is the run of batches up to next in
// epoch. After each connect, and when a gap shows, sync replays from the last
// published batch on and compares that batch by digest: the same bytes mean the
// same process, and the rest of the replay is what was missed. Other bytes, or
// none, mean another process, whose events start a new epoch. Until that is
// settled the worker is suspended, so that no one trusts what may be gone.
type link struct {
	relay  *relay
	worker bus.Worker
	log    *slog.Logger
	events string
	replay string // empty: the engine has none
	topic  string
	out    *outbox
	labels labels

	items   chan item
	queued  atomic.Int64 // bytes in items
	restart chan string  // capacity 1: reason to publish all anew

	cancel  context.CancelFunc // receive and follow
	running sync.WaitGroup
	stopPub context.CancelFunc
	stopped sync.WaitGroup

	// The rest belongs to follow.
	session   *session // nil while disconnected
	known     bool     // the published state is valid; else a clear comes next
	epoch     string
	next      uint64
	digest    string // of batch next-1; empty: unknown or none
	suspended bool
	behind    bool   // the outbox was full: replay once it has room
	why       string // reason of the next clear, if not known
	// replayFailed is when a replay was given up.
	replayFailed time.Time
}

// session is one connection to the engine.
type session struct {
	ctx  context.Context // done when the connection is lost
	conn *zmtp.Conn
	// Last live sequence number, valid if seen.
	last uint64
	seen bool
}

// item is what receive tells follow: a batch, or that session is up or down.
type item struct {
	session *session // nil with down: dialling failed
	kind    itemKind
	seq     uint64
	payload []byte
}

type itemKind uint8

const (
	itemBatch itemKind = iota
	itemUp
	itemDown
)

func newLink(r *relay, spec *routerv1.Worker, rank int) (*link, error) {
	w, err := bus.ParseWorker(spec.GetUid()+"/"+strconv.Itoa(rank), spec.GetWorkerSet())
	if err != nil {
		return nil, err
	}
	l := &link{
		relay: r, worker: w, topic: spec.GetKvTopic(), out: newOutbox(), labels: newLabels(w),
		log:     r.log.With("worker", w.ID(), "workerSet", w.SetName()),
		items:   make(chan item, queueItems),
		restart: make(chan string, 1),
		why:     reasonStart,
	}
	if l.events, err = rankEndpoint(spec.GetKvEvents(), rank); err != nil {
		return nil, err
	}
	l.replay, err = rankEndpoint(spec.GetKvReplay(), rank)
	return l, err
}

func (l *link) start(ctx context.Context) {
	// The publisher outlives the others, to send the last clear.
	pub, stopPub := context.WithCancel(context.WithoutCancel(ctx))
	ctx, l.cancel = context.WithCancel(ctx)
	l.stopPub = stopPub
	l.running.Go(func() { l.receive(ctx) })
	l.running.Go(func() { l.follow(ctx) })
	l.stopped.Go(func() { l.publish(pub) })
}

// stop ends the link; with gone, its worker's entries are cleared first.
func (l *link) stop(gone bool) {
	l.cancel()
	l.running.Wait()
	if gone {
		sent := make(chan struct{})
		l.out.control(entry{kind: bus.KindClear, epoch: newEpoch(), reason: reasonGone, sent: sent})
		select {
		case <-sent:
		case <-time.After(l.relay.timing.stop):
			l.log.Warn("worker left, but its clear could not be published in time, will retry")
			signal(l.relay.unswept)
		}
	}
	l.stopPub()
	l.stopped.Wait()
}

// startOver has follow publish everything anew. It does not wait.
func (l *link) startOver(reason string) {
	select {
	case l.restart <- reason:
	default:
	}
}

// receive keeps a connection to the event socket. Each one is a session of its
// own: behind a new connection may be a new engine.
func (l *link) receive(ctx context.Context) {
	for try := 0; ctx.Err() == nil; try++ {
		s, err := l.connect(ctx)
		if err != nil {
			if try == 0 {
				l.log.Info("engine's event socket cannot be reached, will retry", "err", err)
				l.tell(ctx, item{kind: itemDown})
			}
			pause(ctx, try, l.relay.timing.redialMin, l.relay.timing.redialMax)
			continue
		}
		if l.tell(ctx, item{session: s.session, kind: itemUp}) {
			err = l.read(s.session)
		}
		s.end()
		if ctx.Err() == nil {
			l.log.Info("connection to the engine's event socket lost", "err", err)
		}
		l.tell(ctx, item{session: s.session, kind: itemDown})
		// The engine was there: look again at once, but do not spin.
		try = -1
		pause(ctx, 0, l.relay.timing.redialMin, l.relay.timing.redialMin)
	}
}

type openSession struct {
	*session
	end func()
}

func (l *link) connect(ctx context.Context) (openSession, error) {
	ctx, cancel := context.WithCancel(ctx)
	conn, err := zmtp.Dial(ctx, l.events, zmtp.Sub, zmtp.Options{MaxMessage: vllm.MaxPayload + 4096})
	if err == nil {
		if err = conn.Subscribe(l.topic); err != nil {
			conn.Close()
		}
	}
	if err != nil {
		cancel()
		return openSession{}, err
	}
	return openSession{&session{ctx: ctx, conn: conn}, func() {
		cancel()
		conn.Close()
	}}, nil
}

// read hands over what arrives until the connection ends. It never waits for
// follow: a batch that does not fit is dropped, which shows as a gap.
func (l *link) read(s *session) error {
	for {
		frames, err := s.conn.Recv()
		if err != nil {
			return err
		}
		_, seq, payload, err := vllm.ParseEvent(frames)
		if err != nil {
			l.relay.metrics.malformed(l.labels)
			continue
		}
		if l.queued.Load() > queueBytes {
			l.relay.metrics.overflow(l.labels)
			continue
		}
		select {
		case l.items <- item{session: s, kind: itemBatch, seq: seq, payload: payload}:
			l.queued.Add(int64(len(payload)))
		default:
			l.relay.metrics.overflow(l.labels)
		}
	}
}

// tell hands over an item that must not be lost.
func (l *link) tell(ctx context.Context, it item) bool {
	select {
	case l.items <- it:
		return true
	case <-ctx.Done():
		return false
	}
}

func (l *link) follow(ctx context.Context) {
	l.load(ctx)
	t := l.relay.timing
	idle := time.NewTimer(t.idleFirst)
	defer idle.Stop()
	for {
		// While batches wait, room in the outbox is the publisher's affair.
		var room <-chan struct{}
		if l.behind {
			room = l.out.taken
		}
		select {
		case <-ctx.Done():
			l.disconnected()
			return
		case it := <-l.items:
			l.queued.Add(-int64(len(it.payload)))
			if ctx.Err() != nil {
				continue // the end of our own connection says nothing of the engine
			}
			l.handle(it)
			idle.Reset(t.idleFirst)
		case <-room:
			if waiting, _ := l.out.state(); !waiting {
				l.recover()
			}
		case reason := <-l.restart:
			l.known, l.why = false, reason
			if l.session != nil {
				l.sync(syncConnect)
			}
		case <-idle.C:
			// The engine dropped the end of a burst, or published before our
			// subscription had arrived: nothing later would tell.
			if l.session != nil && l.replay != "" && !l.behind {
				l.sync(syncIdle)
			}
			idle.Reset(t.idleThen)
		}
	}
}

// load takes up where the relay before this one ended, as its last message says.
// If that was a while ago, blocks may have gone since, or the engine may have
// been restarted: trackers would trust them again with the first report of load,
// which does not wait for the engine's replay.
func (l *link) load(ctx context.Context) {
	for try := 0; ctx.Err() == nil; try++ {
		m, stored, ok, err := l.relay.Bus.LastKV(ctx, l.worker)
		if err != nil {
			pause(ctx, try, 50*time.Millisecond, 2*time.Second)
			continue
		}
		if !ok || m.Reason == reasonGone {
			return
		}
		l.epoch, l.next, l.digest = m.Epoch, m.First, m.Digest
		if m.Kind == bus.KindBatch {
			l.next = m.Last + 1
		}
		l.suspended = m.Kind == bus.KindSuspend
		// Without a digest nothing tells whether it is the same process.
		l.known = l.next == 0 || l.digest != ""
		l.why = reasonRestart
		if time.Since(stored) > l.relay.timing.unseen {
			l.suspend(reasonUnseen)
		}
		return
	}
}

func (l *link) handle(it item) {
	switch it.kind {
	case itemUp:
		l.session, l.behind = it.session, false
		l.relay.metrics.connected(l.labels, 1)
		l.sync(syncConnect)
	case itemDown:
		if it.session == nil || it.session == l.session {
			l.disconnected()
			l.suspend(reasonDisconnected)
		}
	case itemBatch:
		if it.session == l.session {
			l.live(it.seq, it.payload)
		}
	}
}

func (l *link) disconnected() {
	if l.session != nil {
		l.session = nil
		l.relay.metrics.connected(l.labels, -1)
	}
}

// reconnect gives the session up: what comes through it is not to be trusted.
// The next one is verified.
func (l *link) reconnect(reason string) {
	l.suspend(reason)
	l.session.conn.Close()
	l.disconnected()
}

// live takes a batch from the event socket.
func (l *link) live(seq uint64, payload []byte) {
	s := l.session
	if s.seen && seq <= s.last {
		// Numbers only grow within a process; see who is there now.
		l.reconnect(reasonBackwards)
		return
	}
	s.last, s.seen = seq, true
	if l.behind {
		return // fetched later
	}
	if l.known && seq > l.next {
		l.relay.metrics.gap(l.labels)
		l.sync(syncGap)
		if l.session != s || s.ctx.Err() != nil {
			return
		}
	}
	switch {
	case l.known && seq < l.next:
		return // came by replay already
	case !l.known || seq > l.next:
		if l.known {
			l.why = reasonGap
		}
		l.begin(seq, "")
	}
	if !l.accept(seq, payload, l.out.tryPush) {
		l.relay.metrics.overflow(l.labels)
		l.behind = true
	}
}

// recover fetches what was dropped while the outbox was full.
func (l *link) recover() {
	l.behind = false
	if l.session == nil {
		return // the next connect does it
	}
	if !l.sync(syncGap) && l.session != nil && l.session.ctx.Err() == nil {
		// The next batch starts anew.
		l.known, l.why = false, reasonGap
		l.suspend(reasonGap)
	}
}

// begin starts a new epoch whose first batch is next, and clears what was before.
func (l *link) begin(next uint64, digest string) {
	l.epoch, l.next, l.digest = newEpoch(), next, digest
	l.known, l.suspended = true, false
	l.relay.metrics.clear(l.labels, l.why)
	l.log.Info("worker's blocks are cleared", "reason", l.why, "next", next)
	l.control(bus.KindClear, l.why)
	l.why = reasonGap
}

// suspend says that what is published may be wrong, until resume or begin.
func (l *link) suspend(reason string) {
	if l.suspended || l.epoch == "" {
		return
	}
	l.suspended = true
	l.control(bus.KindSuspend, reason)
}

func (l *link) resume() {
	if l.suspended && l.known {
		l.suspended = false
		l.control(bus.KindResume, "")
	}
}

func (l *link) control(kind bus.Kind, reason string) {
	l.out.control(entry{kind: kind, epoch: l.epoch, seq: l.next, digest: l.digest, reason: reason})
}

// accept publishes batch seq, which must be the next one, through push. It
// returns false, and changes nothing, if push does.
func (l *link) accept(seq uint64, payload []byte, push func(entry) bool) bool {
	e := entry{kind: bus.KindBatch, epoch: l.epoch, seq: seq, payload: payload, digest: digest(payload)}
	ts, valid := check(payload)
	if !valid {
		// The number must not be missing: it goes on as a batch without events.
		l.relay.metrics.malformed(l.labels)
		e.payload = emptyBatch
	}
	if len(e.payload)+bus.Overhead > l.relay.Bus.MaxMessage() {
		// Removals may be among what is lost.
		l.why = reasonOversize
		l.begin(seq+1, e.digest)
		return true
	}
	if !push(e) {
		return false
	}
	l.next, l.digest = seq+1, e.digest
	l.relay.metrics.batch(l.labels, ts)
	return true
}

// publish sends what is in the outbox, one message at a time, so that order is
// kept. The first batch after a pause goes out at once; then they gather.
func (l *link) publish(ctx context.Context) {
	var flushed time.Time
	var lastAck uint64
	var m bus.KVMessage
	for {
		if !l.gather(ctx, flushed) {
			return
		}
		sent, ok := l.out.take(&m, l.relay.Bus.MaxMessage())
		if !ok {
			continue
		}
		flushed = time.Now()
		ack, err := l.relay.Bus.PublishKV(ctx, l.relay.Stream, l.worker, &m)
		clear(m.Payloads)
		switch {
		case ctx.Err() != nil:
			return
		case err != nil:
			// Refused as it is: publish from the engine's buffer, in other pieces.
			l.log.Error("events cannot be published", "err", err)
			l.startOver(reasonGap)
			pause(ctx, 0, time.Second, time.Second)
		default:
			l.relay.stream.acked(ack, lastAck)
			lastAck = ack.Sequence
		}
		if sent != nil {
			close(sent)
		}
	}
}

// gather waits until a message is due; false when ctx is done.
func (l *link) gather(ctx context.Context, flushed time.Time) bool {
	var due <-chan time.Time
	for {
		waiting, urgent := l.out.state()
		if waiting && !urgent {
			left := l.relay.timing.coalesce - time.Since(flushed)
			urgent = left <= 0
			if due == nil && !urgent {
				t := time.NewTimer(left)
				defer t.Stop()
				due = t.C
			}
		}
		if urgent {
			return ctx.Err() == nil
		}
		select {
		case <-ctx.Done():
			return false
		case <-l.out.added:
		case <-due:
			due = nil
		}
	}
}

// newEpoch names a run of an engine process: unique, and later ones sort later.
func newEpoch() string {
	var b [4]byte
	_, _ = rand.Read(b[:]) // never fails
	return strconv.FormatInt(time.Now().UnixNano(), 36) + "-" + hex.EncodeToString(b[:])
}

// digest names the bytes of a batch. They hold the engine's clock with a
// resolution below a microsecond, so two processes do not agree by chance.
func digest(payload []byte) string {
	sum := sha256.Sum256(payload)
	return hex.EncodeToString(sum[:12])
}

var emptyBatch = vllm.AppendBatch(nil, &vllm.Batch{Rank: -1}, vllm.V0_24)

// checkers holds decoders with their memory: a payload is decoded only to see
// whether a tracker could.
var checkers = sync.Pool{New: func() any { return new(checker) }}

type checker struct {
	d vllm.Decoder
	b vllm.Batch
}

// check returns the engine's time of a batch, and whether it can be decoded.
func check(payload []byte) (ts float64, ok bool) {
	c := checkers.Get().(*checker)
	defer checkers.Put(c)
	err := c.d.Decode(payload, &c.b)
	return c.b.TS, err == nil
}
