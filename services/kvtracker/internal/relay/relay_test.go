package relay

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"
	"go.uber.org/goleak"

	"github.com/kinference/kinference/internal/bus"
	"github.com/kinference/kinference/internal/natsd"
	"github.com/kinference/kinference/internal/rpc"
	"github.com/kinference/kinference/internal/testenv"
	"github.com/kinference/kinference/internal/vllm"
	kvtrackerv1 "github.com/kinference/kinference/proto/gen/kinference/kvtracker/v1"
	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
	"github.com/kinference/kinference/proto/gen/kinference/router/v1/routerv1connect"
)

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m,
		// The library's PUB socket never ends its writer.
		goleak.IgnoreAnyFunction("github.com/go-zeromq/zmq4.(*pubMWriter).run"),
		goleak.IgnoreAnyFunction("github.com/go-zeromq/zmq4.(*pubQReader).listen"),
		goleak.IgnoreAnyFunction("github.com/go-zeromq/zmq4.(*routerQReader).listen"),
		goleak.IgnoreAnyFunction("github.com/go-zeromq/zmq4.(*socket).connReaper"),
	)
}

// fast makes tests quick: they wait for conditions, which come sooner.
var fast = timing{
	coalesce: 2 * time.Millisecond, redialMin: 5 * time.Millisecond, redialMax: 50 * time.Millisecond,
	patience: 500 * time.Millisecond, idleFirst: 50 * time.Millisecond, idleThen: 100 * time.Millisecond,
	streamCheck: 50 * time.Millisecond, sweep: 50 * time.Millisecond,
}

// catalog is a router that serves a list of workers.
type catalog struct {
	routerv1connect.UnimplementedRouterServiceHandler
	mu      sync.Mutex
	workers []*routerv1.Worker
	changed chan struct{}
}

func (c *catalog) set(workers ...*routerv1.Worker) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.workers = workers
	close(c.changed)
	c.changed = make(chan struct{})
}

func (c *catalog) WatchCatalog(ctx context.Context, _ *routerv1.WatchCatalogRequest, out *connect.ServerStream[routerv1.WatchCatalogResponse]) error {
	for {
		c.mu.Lock()
		workers, changed := c.workers, c.changed
		c.mu.Unlock()
		if err := out.Send(&routerv1.WatchCatalogResponse{Catalog: &routerv1.Catalog{Workers: workers}}); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return nil
		case <-changed:
		}
	}
}

// serve serves the catalog on l until the returned function is called.
func (c *catalog) serve(t *testing.T, l net.Listener) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	h := rpc.Mount[routerv1connect.RouterServiceHandler](ctx, c, routerv1connect.NewRouterServiceHandler)
	go func() { done <- rpc.Serve(ctx, l, h) }()
	stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("catalog server: %v", err)
		}
	})
	t.Cleanup(stop)
	return stop
}

// fixture is a relay with everything around it.
type fixture struct {
	t       *testing.T
	catalog *catalog
	bus     *bus.Conn
	url     string // router
	view    *view
	stream  bus.StreamSettings
	timing  timing
	lossy   bool

	stopRelay func()
}

func newFixture(t *testing.T, natsURL string) *fixture {
	t.Helper()
	f := &fixture{t: t, catalog: &catalog{changed: make(chan struct{})}, bus: connect2(t, natsURL), timing: fast}
	l := testenv.Listen(t)
	f.url = "http://" + l.Addr().String()
	f.catalog.serve(t, l)
	return f
}

func connect2(t *testing.T, url string) *bus.Conn {
	t.Helper()
	c, err := bus.Connect(t.Context(), url, t.Name())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c
}

// start runs the relay; a view of the stream is made once.
func (f *fixture) start() {
	f.t.Helper()
	if f.view == nil {
		f.view = f.watch()
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() {
		done <- Run(ctx, Config{RouterURL: f.url, Bus: f.bus, Stream: f.stream, ScrapeInterval: 20 * time.Millisecond, timing: f.timing})
	}()
	f.stopRelay = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			f.t.Errorf("relay: %v", err)
		}
	})
	f.t.Cleanup(f.stopRelay)
}

// watch reads the stream as a tracker does.
func (f *fixture) watch() *view {
	f.t.Helper()
	v := &view{t: f.t, workers: map[string]*seen{}, grew: make(chan struct{}), lossy: f.lossy}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() {
		done <- f.bus.ConsumeKV(ctx, f.stream, bus.KVHandler{Message: v.message})
	}()
	f.t.Cleanup(func() {
		cancel()
		<-done
	})
	return v
}

// view is what a tracker would believe.
type view struct {
	t       *testing.T
	mu      sync.Mutex
	workers map[string]*seen
	grew    chan struct{}
	lossy   bool // the stream may be lost
}

// seen is what the stream says of one worker.
type seen struct {
	epoch     string
	next      uint64
	suspended bool
	labels    []string // of the batches since the last clear
	clears    []string // reasons, all of them
	suspends  int
	messages  int
}

func (v *view) message(d bus.Delivery) {
	w, err := bus.ParseKVSubject(d.Subject)
	var m bus.KVMessage
	if err == nil {
		err = m.Decode(d.Header, d.Data)
	}
	if err != nil {
		v.t.Errorf("message on %s: %v", d.Subject, err)
		return
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	s := v.workers[w.ID()]
	if s == nil {
		s = &seen{}
		v.workers[w.ID()] = s
	}
	s.messages++
	switch m.Kind {
	case bus.KindClear:
		s.epoch, s.next, s.suspended, s.labels = m.Epoch, m.First, false, nil
		s.clears = append(s.clears, m.Reason)
	case bus.KindSuspend:
		s.suspended = true
		s.suspends++
	case bus.KindResume:
		s.suspended = false
	case bus.KindBatch:
		if m.Epoch != s.epoch || m.First > s.next {
			// Only a stream that was lost may begin, or go on, like this; a clear
			// follows.
			if !v.lossy {
				v.t.Errorf("%s: batches %d-%d of %s after %d of %s", w.ID(), m.First, m.Last, m.Epoch, s.next, s.epoch)
			}
			s.epoch, s.next, s.labels = m.Epoch, m.First, nil
		}
		for i, p := range m.Payloads {
			if m.First+uint64(i) == s.next {
				s.next++
				s.labels = append(s.labels, label(v.t, p))
			}
		}
	}
	close(v.grew)
	v.grew = make(chan struct{})
}

// wait returns once the worker looks as ok says.
func (v *view) wait(worker string, ok func(*seen) bool) seen {
	v.t.Helper()
	timeout := time.After(20 * time.Second)
	for {
		v.mu.Lock()
		s, grew := v.workers[worker], v.grew
		var c seen
		if s != nil {
			c = *s
			c.labels, c.clears = slices.Clone(s.labels), slices.Clone(s.clears)
		}
		v.mu.Unlock()
		if s != nil && ok(&c) {
			return c
		}
		select {
		case <-grew:
		case <-timeout:
			v.t.Fatalf("%s is %+v", worker, c)
		}
	}
}

// expect waits until exactly these batches stand, trusted, and returns the view.
func (v *view) expect(worker string, labels ...string) seen {
	v.t.Helper()
	return v.wait(worker, func(s *seen) bool { return !s.suspended && slices.Equal(s.labels, labels) })
}

func (s seen) wantClears(t *testing.T, reasons ...string) {
	t.Helper()
	if !slices.Equal(s.clears, reasons) {
		t.Errorf("clears: %q, want %q", s.clears, reasons)
	}
}

// span makes boot:from … boot:to.
func span(boot string, from, to int) []string {
	var s []string
	for i := from; i <= to; i++ {
		s = append(s, fmt.Sprintf("%s:%d", boot, i))
	}
	return s
}

// label reads what the fake engine wrote into a batch; "empty" for no events.
func label(t *testing.T, payload []byte) string {
	var d vllm.Decoder
	var b vllm.Batch
	if err := d.Decode(payload, &b); err != nil {
		t.Errorf("published payload: %v", err)
		return "bad"
	}
	if len(b.Events) == 0 {
		return "empty"
	}
	return b.Events[0].LoRAName
}

func (e *engine) spec(uid string) *routerv1.Worker {
	w := &routerv1.Worker{Uid: uid, WorkerSet: "demo/sim", Url: "http://127.0.0.1:1", Ranks: 1, KvEvents: e.events}
	if e.buffer > 0 {
		w.KvReplay = e.replay
	}
	return w
}

func TestFollowFromTheStart(t *testing.T) {
	for _, v := range []vllm.Version{vllm.V0_23, vllm.V0_24, vllm.V0_25} {
		t.Run(v.String(), func(t *testing.T) {
			f := newFixture(t, testenv.NATS(t))
			e := newEngine(t, &engine{version: v, buffer: 100})
			e.publish(3)
			f.catalog.set(e.spec("a"))
			f.start()
			f.view.expect("a/0", span("boot1", 0, 2)...)
			e.publish(200)
			s := f.view.expect("a/0", span("boot1", 0, 202)...)
			s.wantClears(t, reasonStart)
			if s.messages > 150 {
				t.Errorf("%d messages for 203 batches: not coalesced", s.messages)
			}
		})
	}
}

func TestTwoRanks(t *testing.T) {
	f := newFixture(t, testenv.NATS(t))
	e0, e1 := newRanks(t)
	e0.publish(2)
	e1.publish(3)
	spec := e0.spec("a")
	spec.Ranks = 2
	f.catalog.set(spec)
	f.start()
	f.view.expect("a/0", span("boot1", 0, 1)...)
	f.view.expect("a/1", span("boot1", 0, 2)...)
}

func TestGapWithReplay(t *testing.T) {
	f := newFixture(t, testenv.NATS(t))
	e := newEngine(t, &engine{buffer: 100})
	f.catalog.set(e.spec("a"))
	f.start()
	e.publish(1)
	f.view.expect("a/0", "boot1:0")
	e.lose(4)
	e.publish(1)
	f.view.expect("a/0", span("boot1", 0, 5)...)
	// Nothing follows the loss: only asking finds it.
	e.lose(2)
	f.view.expect("a/0", span("boot1", 0, 7)...).wantClears(t, reasonStart)
}

func TestGapWithoutReplay(t *testing.T) {
	f := newFixture(t, testenv.NATS(t))
	e, other := newEngine(t, &engine{}), newEngine(t, &engine{})
	f.catalog.set(e.spec("a"), other.spec("b"))
	f.start()
	e.subscribed()
	other.subscribed()
	e.publish(2)
	other.publish(2)
	f.view.expect("a/0", span("boot1", 0, 1)...)
	f.view.expect("b/0", span("boot1", 0, 1)...)
	e.lose(1)
	e.publish(2)
	other.publish(1)
	f.view.expect("a/0", span("boot1", 3, 4)...).wantClears(t, reasonStart, reasonGap)
	f.view.expect("b/0", span("boot1", 0, 2)...).wantClears(t, reasonStart)
}

func TestReplayBufferOverrun(t *testing.T) {
	f := newFixture(t, testenv.NATS(t))
	e := newEngine(t, &engine{buffer: 5})
	f.catalog.set(e.spec("a"))
	f.start()
	e.publish(2)
	f.view.expect("a/0", span("boot1", 0, 1)...)
	e.lose(10)
	e.publish(1)
	f.view.expect("a/0", span("boot1", 8, 12)...).wantClears(t, reasonStart, reasonOverrun)
}

// A replay with a hole that stays is not taken for whole.
func TestHoleInReplay(t *testing.T) {
	f := newFixture(t, testenv.NATS(t))
	e := newEngine(t, &engine{buffer: 100})
	e.publish(6)
	e.forget(3)
	f.catalog.set(e.spec("a"))
	f.start()
	f.view.expect("a/0", span("boot1", 4, 5)...).wantClears(t, reasonStart, reasonGap)
}

func TestRestartOnTheSameAddress(t *testing.T) {
	for _, tt := range []struct {
		name   string
		buffer int
		fresh  int // batches of the new process before the relay sees it
		clears []string
	}{
		{"few batches", 100, 1, []string{reasonStart, reasonRestart}},
		{"as many batches", 100, 5, []string{reasonStart, reasonRestart}},
		{"past the old number", 100, 9, []string{reasonStart, reasonRestart}},
		{"past the old number and the buffer", 3, 20, []string{reasonStart, reasonRestart}},
		{"no batches", 100, 0, []string{reasonStart, reasonRestart}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f := newFixture(t, testenv.NATS(t))
			e := newEngine(t, &engine{buffer: tt.buffer})
			f.catalog.set(e.spec("a"))
			f.start()
			e.publish(5)
			f.view.wait("a/0", func(s *seen) bool { return s.next == 5 })
			e.stop()
			f.view.wait("a/0", func(s *seen) bool { return s.suspended })
			e.restart("boot2", tt.fresh)
			e.publish(1)
			s := f.view.expect("a/0", span("boot2", max(0, tt.fresh+1-tt.buffer), tt.fresh)...)
			s.wantClears(t, tt.clears...)
		})
	}
}

func TestRestartWithoutReplay(t *testing.T) {
	f := newFixture(t, testenv.NATS(t))
	e := newEngine(t, &engine{})
	f.catalog.set(e.spec("a"))
	f.start()
	e.subscribed()
	e.publish(2)
	f.view.expect("a/0", span("boot1", 0, 1)...)
	e.stop()
	e.restart("boot2", 0)
	f.view.expect("a/0").wantClears(t, reasonStart, reasonUnverified)
	e.subscribed()
	e.publish(1)
	f.view.expect("a/0", "boot2:0")
}

// The connection breaks but the process lives: nothing is cleared.
func TestReconnectToTheSameProcess(t *testing.T) {
	f := newFixture(t, testenv.NATS(t))
	e := newEngine(t, &engine{buffer: 100})
	f.catalog.set(e.spec("a"))
	f.start()
	e.publish(3)
	f.view.expect("a/0", span("boot1", 0, 2)...)
	e.stop()
	e.lose(2)
	f.view.wait("a/0", func(s *seen) bool { return s.suspended })
	e.listen()
	s := f.view.expect("a/0", span("boot1", 0, 4)...)
	s.wantClears(t, reasonStart)
	if s.suspends == 0 {
		t.Error("no suspend")
	}
}

// Numbers that go back on one connection are a restart that a proxy hides.
func TestSequenceGoesBack(t *testing.T) {
	f := newFixture(t, testenv.NATS(t))
	e := newEngine(t, &engine{buffer: 100})
	f.catalog.set(e.spec("a"))
	f.start()
	e.subscribed()
	e.publish(3)
	f.view.expect("a/0", span("boot1", 0, 2)...)
	e.rename("boot2")
	e.publish(2)
	f.view.expect("a/0", span("boot2", 0, 1)...).wantClears(t, reasonStart, reasonRestart)
}

func TestGarbage(t *testing.T) {
	f := newFixture(t, testenv.NATS(t))
	e := newEngine(t, &engine{buffer: 100})
	f.catalog.set(e.spec("a"))
	f.start()
	e.subscribed()
	e.publish(1)
	f.view.expect("a/0", "boot1:0")
	e.send([]byte("\xc1\xff not msgpack"))
	e.raw([]byte("frames"), []byte("that"), []byte("are not events"))
	e.raw([]byte("alone"))
	e.publish(1)
	f.view.expect("a/0", "boot1:0", "empty", "boot1:2").wantClears(t, reasonStart)
	// A batch that is garbage is known again after a restart of the relay.
	e.send([]byte{0xc1})
	f.view.expect("a/0", "boot1:0", "empty", "boot1:2", "empty")
	f.stopRelay()
	f.start()
	e.publish(1)
	f.view.expect("a/0", "boot1:0", "empty", "boot1:2", "empty", "boot1:4").wantClears(t, reasonStart)
}

// A batch that fits into no message costs the worker its entries, once.
func TestOversize(t *testing.T) {
	f := newFixture(t, testenv.NATS(t))
	e := newEngine(t, &engine{buffer: 100})
	f.catalog.set(e.spec("a"))
	f.start()
	e.publish(1)
	f.view.expect("a/0", "boot1:0")
	e.send(batch("big", make([]uint32, f.bus.MaxMessage()/4)))
	e.publish(2)
	f.view.expect("a/0", span("boot1", 2, 3)...).wantClears(t, reasonStart, reasonOversize)
}

func TestRelayRestart(t *testing.T) {
	tests := []struct {
		name   string
		buffer int
		away   func(e *engine) // while no relay runs
		want   []string
		clears []string
	}{
		{"same process", 100, func(e *engine) { e.publish(2) }, span("boot1", 0, 4), []string{reasonStart}},
		{"nothing new", 100, func(*engine) {}, span("boot1", 0, 2), []string{reasonStart}},
		{"restarted engine", 100, func(e *engine) { e.stop(); e.restart("boot2", 1) }, span("boot2", 0, 0), []string{reasonStart, reasonRestart}},
		{"restarted engine past the old number", 100, func(e *engine) { e.stop(); e.restart("boot2", 7) }, span("boot2", 0, 6), []string{reasonStart, reasonRestart}},
		{"no replay", 0, func(*engine) {}, nil, []string{reasonStart, reasonUnverified}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			f := newFixture(t, testenv.NATS(t))
			e := newEngine(t, &engine{buffer: tt.buffer})
			f.catalog.set(e.spec("a"))
			f.start()
			e.subscribed()
			e.publish(3)
			f.view.expect("a/0", span("boot1", 0, 2)...)
			f.stopRelay()
			tt.away(e)
			f.start()
			f.view.expect("a/0", tt.want...).wantClears(t, tt.clears...)
			if tt.buffer == 0 {
				return
			}
			// And it follows on, without clearing what was verified.
			boot, n, _ := strings.Cut(tt.want[len(tt.want)-1], ":")
			last, _ := strconv.Atoi(n)
			e.publish(1)
			f.view.expect("a/0", span(boot, 0, last+1)...).wantClears(t, tt.clears...)
		})
	}
}

// The last message may be a resume: its digest verifies as well.
func TestRelayRestartAfterResume(t *testing.T) {
	f := newFixture(t, testenv.NATS(t))
	e := newEngine(t, &engine{buffer: 100})
	f.catalog.set(e.spec("a"))
	f.start()
	e.publish(3)
	f.view.expect("a/0", span("boot1", 0, 2)...)
	e.stop()
	f.view.wait("a/0", func(s *seen) bool { return s.suspended })
	f.stopRelay()
	e.listen()
	f.start()
	f.view.expect("a/0", span("boot1", 0, 2)...).wantClears(t, reasonStart)
	f.stopRelay()
	f.start()
	e.publish(1)
	f.view.expect("a/0", span("boot1", 0, 3)...).wantClears(t, reasonStart)
}

func TestNATSRestart(t *testing.T) {
	for _, file := range []bool{true, false} {
		t.Run(fmt.Sprintf("file=%v", file), func(t *testing.T) {
			opts := natsd.Options{Dir: t.TempDir(), Port: freePort(t)}
			server := startNATS(t, opts)
			f := newFixture(t, server.URL())
			f.stream.File, f.lossy = file, !file
			e := newEngine(t, &engine{buffer: 1000})
			idle := newEngine(t, &engine{buffer: 1000})
			f.catalog.set(e.spec("a"), idle.spec("b"))
			f.start()
			e.publish(10)
			idle.publish(2)
			f.view.expect("a/0", span("boot1", 0, 9)...)
			f.view.expect("b/0", span("boot1", 0, 1)...)
			server.Stop()
			e.publish(10)
			server = startNATS(t, opts)
			t.Cleanup(func() { server.Stop() })
			e.publish(5)
			a := f.view.expect("a/0", span("boot1", 0, 24)...)
			// A tracker that starts now knows as much, of silent workers too.
			late := f.watch()
			late.expect("a/0", span("boot1", 0, 24)...)
			late.expect("b/0", span("boot1", 0, 1)...)
			if file {
				a.wantClears(t, reasonStart)
			}
		})
	}
}

// While NATS is away more piles up than is kept: replay brings it.
func TestBacklogOverflow(t *testing.T) {
	opts := natsd.Options{Dir: t.TempDir(), Port: freePort(t)}
	server := startNATS(t, opts)
	f := newFixture(t, server.URL())
	f.stream.File = true
	e := newEngine(t, &engine{buffer: 1000, tokens: 10_000})
	f.catalog.set(e.spec("a"))
	f.start()
	e.subscribed()
	e.publish(1)
	f.view.expect("a/0", "boot1:0")
	server.Stop()
	e.publish(300) // 15 MB
	server = startNATS(t, opts)
	t.Cleanup(func() { server.Stop() })
	f.view.expect("a/0", span("boot1", 0, 300)...).wantClears(t, reasonStart)
}

func TestWorkerLeaves(t *testing.T) {
	f := newFixture(t, testenv.NATS(t))
	e, other := newEngine(t, &engine{buffer: 100}), newEngine(t, &engine{buffer: 100})
	e.publish(2)
	other.publish(2)
	reports := f.reports()
	f.catalog.set(e.spec("a"), other.spec("b"))
	f.start()
	f.view.expect("a/0", span("boot1", 0, 1)...)
	f.view.expect("b/0", span("boot1", 0, 1)...)
	f.catalog.set(other.spec("b"))
	f.view.expect("a/0").wantClears(t, reasonStart, reasonGone)
	reports.wait("a/0", func(r *kvtrackerv1.WorkerReport) bool { return r.GetGone() })
	f.view.expect("b/0", span("boot1", 0, 1)...).wantClears(t, reasonStart)
	// It comes back, and later leaves while no relay is there.
	f.catalog.set(e.spec("a"), other.spec("b"))
	f.view.expect("a/0", span("boot1", 0, 1)...)
	f.stopRelay()
	f.catalog.set(other.spec("b"))
	f.start()
	f.view.expect("a/0").wantClears(t, reasonStart, reasonGone, reasonStart, reasonGone)
	f.view.expect("b/0", span("boot1", 0, 1)...).wantClears(t, reasonStart)
}

// The router goes away and comes back: the list stays and is then renewed.
func TestRouterRestart(t *testing.T) {
	f := newFixture(t, testenv.NATS(t))
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	f.url = "http://" + l.Addr().String()
	stop := f.catalog.serve(t, l)
	e := newEngine(t, &engine{buffer: 100})
	f.catalog.set(e.spec("a"))
	f.start()
	e.publish(1)
	f.view.expect("a/0", "boot1:0")
	stop()
	e.publish(1)
	f.view.expect("a/0", span("boot1", 0, 1)...)
	other := newEngine(t, &engine{buffer: 100})
	other.publish(1)
	f.catalog.set(e.spec("a"), other.spec("b"))
	if l, err = net.Listen("tcp", l.Addr().String()); err != nil {
		t.Fatal(err)
	}
	f.catalog.serve(t, l)
	f.view.expect("b/0", "boot1:0")
	f.view.expect("a/0", span("boot1", 0, 1)...).wantClears(t, reasonStart)
}

// fakeHTTP is the HTTP side of an engine.
type fakeHTTP struct {
	mu     sync.Mutex
	page   vllm.Page
	health int
	broken bool
}

func (h *fakeHTTP) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	h.mu.Lock()
	defer h.mu.Unlock()
	switch r.URL.Path {
	case "/health":
		w.WriteHeader(h.health)
	case "/metrics":
		if h.broken {
			fmt.Fprint(w, "<html>not metrics</html>")
			return
		}
		_, _ = w.Write(vllm.AppendMetrics(nil, &h.page))
	}
}

func (h *fakeHTTP) set(f func(*fakeHTTP)) {
	h.mu.Lock()
	defer h.mu.Unlock()
	f(h)
}

func TestScrape(t *testing.T) {
	f := newFixture(t, testenv.NATS(t))
	h := &fakeHTTP{health: 200, page: vllm.Page{Model: "m", Engines: []vllm.EngineMetrics{
		{Rank: 0, Metrics: vllm.Metrics{Running: 1, Waiting: 2, KVUsage: .5, BlockSize: 16, NumBlocks: 100}},
		{Rank: 1, Metrics: vllm.Metrics{Running: 7, BlockSize: 784, NumBlocks: 500, KVCacheTokens: 78400}},
	}}}
	server := httptest.NewServer(h)
	t.Cleanup(server.Close)
	reports := f.reports()
	f.catalog.set(&routerv1.Worker{Uid: "a", WorkerSet: "demo/sim", Url: server.URL, Ranks: 2, RemovalsLastCopy: true})
	f.start()
	r := reports.wait("a/0", func(r *kvtrackerv1.WorkerReport) bool { return r.GetReady() })
	if l := r.GetLoad(); l.GetRunning() != 1 || l.GetWaiting() != 2 || l.GetKvUsage() != .5 || r.GetBlockSize() != 16 || r.GetTotalBlocks() != 100 || !r.GetRemovalsLastCopy() {
		t.Errorf("report of rank 0: %v", r)
	}
	r = reports.wait("a/1", func(r *kvtrackerv1.WorkerReport) bool { return r.GetReady() })
	if r.GetLoad().GetRunning() != 7 || r.GetBlockSize() != 784 || r.GetTotalBlocks() != 100 {
		t.Errorf("report of rank 1: %v", r)
	}
	notReady := func(r *kvtrackerv1.WorkerReport) bool { return !r.GetReady() }
	ready := func(r *kvtrackerv1.WorkerReport) bool { return r.GetReady() }
	for _, tt := range []struct {
		name      string
		break_    func(*fakeHTTP)
		mend      func(*fakeHTTP)
		otherRank func(*kvtrackerv1.WorkerReport) bool
	}{
		{"sleeping", func(h *fakeHTTP) { h.page.Engines[0].SleepLevel = 1 }, func(h *fakeHTTP) { h.page.Engines[0].SleepLevel = 0 }, ready},
		{"unhealthy", func(h *fakeHTTP) { h.health = 503 }, func(h *fakeHTTP) { h.health = 200 }, notReady},
		{"stale metrics", func(h *fakeHTTP) { h.broken = true }, func(h *fakeHTTP) { h.broken = false }, notReady},
	} {
		h.set(tt.break_)
		reports.wait("a/0", notReady)
		reports.wait("a/1", tt.otherRank)
		h.set(tt.mend)
		reports.wait("a/0", ready)
	}
	// Who joins late reads the bucket.
	late := f.reports()
	late.wait("a/1", ready)
}

// inbox keeps the newest report of each worker.
type inbox struct {
	t    *testing.T
	mu   sync.Mutex
	last map[string]*kvtrackerv1.WorkerReport
	grew chan struct{}
}

func (f *fixture) reports() *inbox {
	f.t.Helper()
	b := &inbox{t: f.t, last: map[string]*kvtrackerv1.WorkerReport{}, grew: make(chan struct{})}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() {
		done <- f.bus.ConsumeReports(ctx, func(r *kvtrackerv1.WorkerReport) {
			b.mu.Lock()
			defer b.mu.Unlock()
			if old := b.last[r.GetWorker()]; old.GetSampledUnixNanos() > r.GetSampledUnixNanos() {
				return
			}
			b.last[r.GetWorker()] = r
			close(b.grew)
			b.grew = make(chan struct{})
		}, nil)
	}()
	f.t.Cleanup(func() {
		cancel()
		<-done
	})
	return b
}

func (b *inbox) wait(worker string, ok func(*kvtrackerv1.WorkerReport) bool) *kvtrackerv1.WorkerReport {
	b.t.Helper()
	timeout := time.After(20 * time.Second)
	for {
		b.mu.Lock()
		r, grew := b.last[worker], b.grew
		b.mu.Unlock()
		if r != nil && ok(r) {
			return r
		}
		select {
		case <-grew:
		case <-timeout:
			b.t.Fatalf("report of %s is %v", worker, r)
		}
	}
}

func startNATS(t *testing.T, o natsd.Options) *natsd.Server {
	t.Helper()
	s, err := natsd.Start(o)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// freePort returns a port that no one listens on, below the range from which the
// system takes ports for outgoing connections: none of those takes it meanwhile.
func freePort(t *testing.T) int {
	t.Helper()
	for range 100 {
		port := 15_000 + rand.IntN(15_000)
		if l, err := net.Listen("tcp", "127.0.0.1:"+strconv.Itoa(port)); err == nil {
			l.Close()
			return port
		}
	}
	t.Fatal("no free port")
	return 0
}
