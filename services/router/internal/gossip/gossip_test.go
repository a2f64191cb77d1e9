package gossip

import (
	"context"
	"fmt"
	"maps"
	"net/url"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"

	"github.com/kinference/kinference/internal/bus"
	"github.com/kinference/kinference/internal/kvhash"
	"github.com/kinference/kinference/internal/natsd"
	"github.com/kinference/kinference/internal/schedule"
	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// book is a ledger that writes down what it hears.
type book struct {
	mu      sync.Mutex
	deltas  []schedule.Delta
	known   map[string]schedule.Learned
	heard   []string // of requests
	last    schedule.Delta
	age     time.Duration // of the last message
	learned map[string]schedule.Learned
	gone    []string
}

func (b *book) Deltas(time.Time) []schedule.Delta {
	b.mu.Lock()
	defer b.mu.Unlock()
	out := b.deltas
	b.deltas = nil
	return out
}

func (b *book) Remote(now time.Time, _ string, at time.Time, d []schedule.Delta) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for i := range d {
		b.heard = append(b.heard, d[i].ID)
		b.last = d[i]
	}
	b.age = now.Sub(at)
}

func (b *book) Gone(_ time.Time, from string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.gone = append(b.gone, from)
}

func (b *book) Calibration() map[string]schedule.Learned { return b.known }

func (b *book) Learn(_ time.Time, _ string, l map[string]schedule.Learned) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.learned == nil {
		b.learned = map[string]schedule.Learned{}
	}
	maps.Copy(b.learned, l)
}

func (b *book) add(d ...schedule.Delta) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.deltas = append(b.deltas, d...)
}

func (b *book) look(f func() bool) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return f()
}

func eventually(t *testing.T, what string, f func() bool) {
	t.Helper()
	tick, deadline := time.NewTicker(5*time.Millisecond), time.After(time.Minute)
	defer tick.Stop()
	for !f() {
		select {
		case <-deadline:
			t.Fatalf("never: %s", what)
		case <-tick.C:
		}
	}
}

// counts are what an exchange counts, by words.
type counts struct {
	mu sync.Mutex
	n  map[string]int
}

func (c *counts) settings() Settings {
	c.n = map[string]int{}
	add := func(word string, n int) {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.n[word] += n
	}
	return Settings{Message: func(d string) { add(d, 1) }, Dropped: add}
}

func (c *counts) of(word string) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.n[word]
}

// run lets an exchange talk until the test ends or stop is called.
func run(t *testing.T, x *Exchange, server string) (conn *bus.Conn, stop func()) {
	t.Helper()
	conn, err := bus.Connect(t.Context(), server, "test")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- x.Run(ctx, conn) }()
	stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
		conn.Close()
	})
	t.Cleanup(stop)
	return conn, stop
}

func start(t *testing.T) *natsd.Server {
	srv, err := natsd.Start(natsd.Options{Dir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(srv.Stop)
	return srv
}

func routed(id string) schedule.Delta {
	return schedule.Delta{Kind: schedule.Routed, ID: id, At: time.Now(), Worker: "w/0", Class: "l40s", Group: "n/s", Tokens: 100, Cached: 32, MaxTokens: 7,
		BlockSize: 16, Hashes: []kvhash.Hash{3, 4}, Stride: 2, Work: time.Second, TTFT: 2 * time.Second, Whole: true}
}

func TestRoutersHearEachOther(t *testing.T) {
	server := start(t).URL()
	var as, bs counts
	a, b := &book{known: map[string]schedule.Learned{"w/0": {Slowness: 2, Samples: 9, Reuse: .5, Hits: 4}}}, &book{}
	x, y := New(a, as.settings()), New(b, bs.settings())
	conn, _ := run(t, x, server)
	eventually(t, "one router said hello", func() bool { return as.of("sent") == 1 })
	a.add(routed("alone")) // nobody listens: it is not sent
	eventually(t, "it is gone", func() bool { return a.look(func() bool { return a.deltas == nil }) })

	_, stop := run(t, y, server) // joins late
	eventually(t, "both know of each other", func() bool { return len(x.Peers()) == 1 && len(y.Peers()) == 1 })
	eventually(t, "the newcomer learns at once", func() bool { return b.look(func() bool { return cmp.Equal(b.learned, a.known) }) })
	want := routed("1")
	same := func() {
		t.Helper()
		b.look(func() bool {
			if d := b.last.At.Sub(want.At).Abs(); d > time.Second {
				t.Errorf("its time is off by %v", d)
			}
			b.last.At = want.At
			if diff := cmp.Diff(want, b.last); diff != "" {
				t.Errorf("- sent + heard\n%s", diff)
			}
			return true
		})
	}
	a.add(want, schedule.Delta{Kind: schedule.Began, ID: "1", At: time.Now()}, schedule.Delta{Kind: schedule.Ended, ID: "1", At: time.Now()})
	eventually(t, "the other hears of it", func() bool { return b.look(func() bool { return len(b.heard) == 3 }) })
	a.add(want)
	eventually(t, "and again", func() bool { return b.look(func() bool { return len(b.heard) == 4 }) })
	same()
	want.Kind = schedule.Waits
	a.add(want)
	eventually(t, "and of one that waits", func() bool { return b.look(func() bool { return len(b.heard) == 5 }) })
	same()
	if len(a.heard) > 0 || as.of("received") == 0 {
		t.Errorf("a router heard %v, its own words?", a.heard)
	}

	// More than one message holds comes in several, in order.
	many := make([]schedule.Delta, 4096)
	for i := range many {
		many[i] = routed(fmt.Sprint("m", i))
		many[i].Hashes = make([]kvhash.Hash, 64)
	}
	a.add(many...)
	eventually(t, "all of a large batch", func() bool { return b.look(func() bool { return len(b.heard) == 5+len(many) }) })
	b.look(func() bool {
		for i, id := range b.heard[5:] {
			if id != many[i].ID {
				t.Fatalf("%s is at the place of %s", id, many[i].ID)
			}
		}
		return true
	})

	if err := conn.NATS().Publish(bus.GossipSubject, []byte("nonsense")); err != nil {
		t.Fatal(err)
	}
	eventually(t, "garbage is counted by both", func() bool { return as.of(Garbled) == 1 && bs.of(Garbled) == 1 })
	stop()
	a.add(routed("2")) // the other one is gone, which nobody knows yet
	eventually(t, "it is sent all the same", func() bool { return a.look(func() bool { return a.deltas == nil }) })
	if n := bs.of(Slow) + as.of(Slow) + as.of(Unsent) + bs.of(Unsent); n > 0 {
		t.Errorf("%d dropped", n)
	}
}

func TestServerAway(t *testing.T) {
	opts := natsd.Options{Dir: t.TempDir()}
	srv, err := natsd.Start(opts)
	if err != nil {
		t.Fatal(err)
	}
	var as, bs counts
	a, b := &book{}, &book{}
	x, y := New(a, as.settings()), New(b, bs.settings())
	run(t, x, srv.URL())
	run(t, y, srv.URL())
	eventually(t, "both know of each other", func() bool { return len(x.Peers()) == 1 && len(y.Peers()) == 1 })
	u, err := url.Parse(srv.URL())
	if err != nil {
		t.Fatal(err)
	}
	if opts.Port, err = strconv.Atoi(u.Port()); err != nil {
		t.Fatal(err)
	}
	srv.Stop()
	eventually(t, "a batch is lost and counted", func() bool { a.add(routed("lost")); return as.of(Unsent) > 0 })
	if srv, err = natsd.Start(opts); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(srv.Stop)
	eventually(t, "the next one is heard", func() bool {
		a.add(routed("new"))
		return b.look(func() bool { return len(b.heard) > 0 && b.heard[len(b.heard)-1] == "new" })
	})
}

// Clocks of hosts differ by more than a message takes: its age goes by the quickest
// that came.
func TestAgeByAnotherClock(t *testing.T) {
	var c counts
	b := &book{}
	x := New(b, c.settings())
	now := time.Unix(1000, 0)
	say := func(sent time.Time) time.Duration {
		x.take(now, &routerv1.Gossip{From: "p", SentUnixNanos: sent.UnixNano(), Events: []*routerv1.GossipEvent{{Kind: routerv1.GossipKind_GOSSIP_KIND_DONE, Request: "r"}}})
		return b.age
	}
	for _, step := range []struct{ sent, want time.Duration }{
		{-7 * time.Second, 0}, {-7*time.Second - 20*time.Millisecond, 20 * time.Millisecond}, {-6900 * time.Millisecond, 0},
		{-7900 * time.Millisecond, time.Second},
	} {
		if got := say(now.Add(step.sent)); got != step.want {
			t.Errorf("sent %v by its clock: %v old, want %v", step.sent, got, step.want)
		}
	}
	if c.of(Late) != 1 {
		t.Errorf("%d counted as late", c.of(Late))
	}
	// Clocks part slowly: a minute later what is 60 ms behind is new.
	now = now.Add(time.Minute)
	if got := say(now.Add(-6960 * time.Millisecond)); got != 0 {
		t.Errorf("after a minute: %v old", got)
	}
}

// A clock that is set, here or there, makes messages look late for a minute at most.
func TestClockIsSet(t *testing.T) {
	for name, step := range map[string]time.Duration{"back": -time.Hour, "on": time.Hour} {
		t.Run(name, func(t *testing.T) {
			var c counts
			b := &book{}
			x := New(b, c.settings())
			now, theirs := time.Unix(10_000, 0), time.Unix(9_000, 0)
			late := 0
			for i := range 180 {
				if i == 60 {
					theirs = theirs.Add(step)
				}
				x.take(now, &routerv1.Gossip{From: "p", SentUnixNanos: theirs.UnixNano(), Events: []*routerv1.GossipEvent{{Kind: routerv1.GossipKind_GOSSIP_KIND_DONE, Request: "r"}}})
				if b.age > 0 {
					late++
				}
				now, theirs = now.Add(time.Second), theirs.Add(time.Second)
			}
			if late > 60 || late != c.of(Late) || step > 0 && late > 0 {
				t.Errorf("%d of 180 messages looked late", late)
			}
		})
	}
}

// What is predicted to take very long does not make others refuse the message.
func TestLongPredictions(t *testing.T) {
	d := routed("1")
	d.Work, d.TTFT = 20*time.Hour, 30*time.Hour
	if e := event(time.Now(), &d); e.GetWork().AsDuration() != longest || e.GetTtft().AsDuration() != longest {
		t.Errorf("tells %v and %v", e.GetWork().AsDuration(), e.GetTtft().AsDuration())
	}
}

func TestPeersAreBoundedAndForgotten(t *testing.T) {
	var c counts
	b := &book{}
	s := c.settings()
	now := time.Unix(1000, 0)
	s.Now = func() time.Time { return now }
	x := New(b, s)
	for i := range 2 * maxPeers {
		x.take(now, &routerv1.Gossip{From: fmt.Sprint("p", i), SentUnixNanos: now.UnixNano()})
	}
	if len(x.Peers()) != maxPeers || c.of(Crowd) != maxPeers {
		t.Errorf("%d peers, %d refused", len(x.Peers()), c.of(Crowd))
	}
	now = now.Add(silence)
	x.forget(now)
	if len(x.Peers()) != 0 || len(b.gone) != maxPeers {
		t.Errorf("%d peers, %d gone", len(x.Peers()), len(b.gone))
	}
}
