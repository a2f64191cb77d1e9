// Package gossip lets routers know of each other's requests.
//
// Each router keeps a ledger of what it sent where. The engines' gauges show the
// requests of all, but a quarter of a second late and without their prompts: until
// then two routers would send the same worker what only one of them should. So
// each tells the others over core NATS what it did, at most every 50 ms, and every
// ten seconds what it learned about the workers. Nothing is stored: a router that
// joins late or misses messages goes by the gauges, as one does that is alone or
// has no NATS.
//
// The router runs one Exchange. It is safe for concurrent use and holds up no
// decision. Peers, messages and batches are bounded; what is lost or garbled is
// counted.
package gossip

import (
	"context"
	"crypto/rand"
	"errors"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/kinference/kinference/internal/bus"
	"github.com/kinference/kinference/internal/schedule"
	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
)

const (
	// interval is the time between two batches. In simulation four routers are as
	// good as one with it (routing2.md, R4).
	interval = 50 * time.Millisecond
	// learning is the time between two messages of what was learned.
	learning = 10 * time.Second
	// silence is how long after its last word a peer counts as gone: it misses
	// two messages.
	silence = 3 * learning
	// late is the age from which on a message says less than the gauges do.
	late = 300 * time.Millisecond
	// span is how long, up to twice, the least delay seen counts: clocks part, and
	// one that is set makes all messages look old or new from then on.
	span = silence

	maxPeers = 64
)

// Ledger is what routers share: *schedule.Scheduler.
type Ledger interface {
	// Deltas are those since the last call.
	Deltas(now time.Time) []schedule.Delta
	// Remote takes those of another router, which were sent at a time.
	Remote(now time.Time, from string, at time.Time, d []schedule.Delta)
	// Gone drops what another router has told.
	Gone(now time.Time, from string)
	// Calibration is what was learned here, by worker.
	Calibration() map[string]schedule.Learned
	// Learn takes what another router has learned.
	Learn(now time.Time, from string, workers map[string]schedule.Learned)
}

// Reasons for which something that was said is not used.
const (
	Garbled = "garbled" // it cannot be read
	Version = "version" // of another version
	Late    = "late"    // it came when the gauges know more
	Slow    = "slow"    // the reader did not keep up
	Unsent  = "unsent"  // NATS is away
	Crowd   = "crowd"   // more peers than are followed
)

// Settings of an Exchange. Functions may be nil.
type Settings struct {
	// Now is the clock; nil: time.Now.
	Now func() time.Time
	// Message is told of each message, sent or received, and Dropped of what was
	// not used, by a reason.
	Message func(direction string)
	Dropped func(reason string, n int)
	// Delay is told how old a message was when it came.
	Delay func(time.Duration)
}

// Exchange talks with the other routers. Use New.
type Exchange struct {
	Settings
	self   string
	ledger Ledger

	mu    sync.Mutex
	peers map[string]*peer
	greet bool // a peer has asked what we know
}

// peer is another router.
type peer struct {
	heard time.Time
	// least is the smallest difference of our clock when a message came and the
	// sender's when it was sent, since a time: the offset of the clocks and the
	// quickest way. before is that of the span before.
	least, before time.Duration
	since         time.Time
}

// Peer is another router as it is shown.
type Peer struct {
	Name string
	Age  time.Duration
}

// New returns an Exchange for a ledger, under a name that nobody else has.
func New(l Ledger, s Settings) *Exchange {
	if s.Now == nil {
		s.Now = time.Now
	}
	if s.Message == nil {
		s.Message = func(string) {}
	}
	if s.Dropped == nil {
		s.Dropped = func(string, int) {}
	}
	if s.Delay == nil {
		s.Delay = func(time.Duration) {}
	}
	return &Exchange{Settings: s, self: rand.Text(), ledger: l, peers: map[string]*peer{}}
}

// Peers are the routers that were heard of lately, by name.
func (x *Exchange) Peers() []Peer {
	x.mu.Lock()
	defer x.mu.Unlock()
	now := x.Now()
	out := make([]Peer, 0, len(x.peers))
	for name, p := range x.peers {
		if age := now.Sub(p.heard); age < silence {
			out = append(out, Peer{name, max(0, age)})
		}
	}
	slices.SortFunc(out, func(a, b Peer) int { return strings.Compare(a.Name, b.Name) })
	return out
}

// Run talks until ctx is done.
func (x *Exchange) Run(ctx context.Context, conn *bus.Conn) error {
	sub, err := conn.SubscribeGossip()
	if err != nil {
		return err
	}
	defer sub.Close()
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { x.receive(ctx, sub); return nil })
	g.Go(func() error { x.send(ctx, conn, sub); return nil })
	return g.Wait()
}

func (x *Exchange) receive(ctx context.Context, sub *bus.Gossips) {
	for {
		m, err := sub.Next(ctx)
		switch {
		case ctx.Err() != nil:
			return
		case errors.Is(err, bus.ErrGossipVersion):
			x.Dropped(Version, 1)
		case err != nil:
			x.Dropped(Garbled, 1)
		case m.From != x.self:
			x.take(x.Now(), m)
		}
	}
}

// take hears what a peer says.
func (x *Exchange) take(now time.Time, m *routerv1.Gossip) {
	x.mu.Lock()
	age, ok := x.age(now, m)
	x.greet = x.greet || ok && m.Hello
	x.mu.Unlock()
	if !ok {
		x.Dropped(Crowd, 1)
		return
	}
	x.Message("received")
	if len(m.Events) > 0 {
		x.Delay(age)
		if age > late {
			x.Dropped(Late, 1) // the ledger decides what it is still good for
		}
		at := now.Add(-age)
		x.ledger.Remote(now, m.From, at, deltas(at, m.Events))
	}
	if len(m.Learned) > 0 {
		x.ledger.Learn(now, m.From, learned(m.Learned))
	}
}

// age is how old a message is, by the quickest that came from this peer: clocks
// need not agree. It reports false for a peer too many.
func (x *Exchange) age(now time.Time, m *routerv1.Gossip) (time.Duration, bool) {
	behind := now.Sub(time.Unix(0, m.SentUnixNanos))
	p := x.peers[m.From]
	if p == nil {
		if len(x.peers) >= maxPeers {
			return 0, false
		}
		p = &peer{since: now, least: behind, before: behind}
		x.peers[m.From] = p
	}
	switch over := now.Sub(p.since); {
	case over >= 2*span:
		p.since, p.least, p.before = now, behind, behind
	case over >= span:
		p.since, p.least, p.before = now, behind, p.least
	}
	p.least = min(p.least, behind)
	p.heard = now
	return behind - min(p.least, p.before), true
}

// forget drops the peers that say nothing any more, and what they said. The caller
// does not hold mu.
func (x *Exchange) forget(now time.Time) {
	var gone []string
	x.mu.Lock()
	for name, p := range x.peers {
		if now.Sub(p.heard) >= silence {
			delete(x.peers, name)
			gone = append(gone, name)
		}
	}
	x.mu.Unlock()
	for _, name := range gone {
		x.ledger.Gone(now, name)
	}
}

// send tells the others what happens here.
func (x *Exchange) send(ctx context.Context, conn *bus.Conn, sub *bus.Gossips) {
	tick := time.NewTicker(interval)
	defer tick.Stop()
	var said time.Time // when we last said what we know; zero: hello is due
	for lost := 0; ; {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		if n := sub.Lost(); n > lost {
			x.Dropped(Slow, n-lost)
			lost = n
		}
		now := x.Now()
		said = x.tell(now, said, conn)
	}
}

// tell sends one batch, and what was learned when that is due; it returns when that
// was said last.
func (x *Exchange) tell(now, said time.Time, conn *bus.Conn) time.Time {
	x.forget(now)
	list := x.ledger.Deltas(now)
	x.mu.Lock()
	if len(x.peers) == 0 {
		list = nil // nobody listens
	}
	greet := x.greet
	x.greet = false
	x.mu.Unlock()
	if !conn.Connected() {
		if len(list) > 0 {
			x.Dropped(Unsent, 1)
		}
		return time.Time{} // peers may have gone and come meanwhile
	}
	var out []*routerv1.Gossip
	if greet || now.Sub(said) >= learning {
		out = lessons(x.ledger.Calibration())
		out[0].Hello = said.IsZero()
		said = now
	}
	for _, m := range append(out, batches(now, list)...) {
		m.From, m.SentUnixNanos = x.self, now.UnixNano()
		if err := conn.PublishGossip(m); err != nil {
			x.Dropped(Unsent, 1)
			continue
		}
		x.Message("sent")
	}
	return said
}
