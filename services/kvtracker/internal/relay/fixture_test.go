package relay

import (
	"context"
	"fmt"
	"net"
	"slices"
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
	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
	"github.com/kinference/kinference/proto/gen/kinference/router/v1/routerv1connect"
)

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m,
		// The server's clock is not stopped when a stream is made while it shuts down.
		goleak.IgnoreAnyFunction("github.com/nats-io/nats-server/v2/server/ats.Register.func1"),
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
		done <- f.bus.ConsumeKV(ctx, f.stream, bus.Position{}, bus.KVHandler{Message: v.message})
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
	timeout := time.After(time.Minute)
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

func startNATS(t *testing.T, o natsd.Options) *natsd.Server {
	t.Helper()
	s, err := natsd.Start(o)
	if err != nil {
		t.Fatal(err)
	}
	return s
}
