// Package libzmq_test checks the relay against libzmq, the ZeroMQ library that
// vLLM uses: testdata/engine.c is an engine's event side on libzmq's own sockets.
package libzmq_test

import (
	"bufio"
	"context"
	"encoding/hex"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"

	"github.com/kinference/kinference/internal/bus"
	"github.com/kinference/kinference/internal/rpc"
	"github.com/kinference/kinference/internal/testenv"
	"github.com/kinference/kinference/internal/vllm"
	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
	"github.com/kinference/kinference/proto/gen/kinference/router/v1/routerv1connect"
	"github.com/kinference/kinference/services/kvtracker"
)

// build compiles the peer. Where there is no C compiler or no libzmq the test
// is skipped, unless KINFERENCE_INTEROP=1 says that they must be there.
func build(t *testing.T) string {
	t.Helper()
	bin := filepath.Join(t.TempDir(), "engine")
	out, err := exec.Command("gcc", "-Wall", "-Wextra", "-Werror", "-O1", "-o", bin, "testdata/engine.c", "-lzmq").CombinedOutput()
	if err == nil {
		return bin
	}
	if os.Getenv("KINFERENCE_INTEROP") == "1" {
		t.Fatalf("build the libzmq peer: %v\n%s", err, out)
	}
	t.Skipf("NOT TESTED against libzmq: install gcc and libzmq3-dev (%v: %.200s)", err, out)
	return ""
}

// engine is a running peer.
type engine struct {
	t     *testing.T
	cmd   *exec.Cmd
	in    io.WriteCloser
	out   *bufio.Reader
	boot  string
	count int
}

func startEngine(t *testing.T, bin, boot, events, replay, framing string) *engine {
	t.Helper()
	e := &engine{t: t, cmd: exec.Command(bin, events, replay, framing), boot: boot}
	e.cmd.Stderr = os.Stderr
	var err error
	if e.in, err = e.cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	stdout, err := e.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	e.out = bufio.NewReader(stdout)
	if err := e.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(e.kill)
	e.answer("ready")
	return e
}

func (e *engine) kill() {
	_ = e.cmd.Process.Kill()
	_ = e.cmd.Wait()
}

func (e *engine) answer(want string) {
	e.t.Helper()
	got, err := e.out.ReadString('\n')
	if err != nil || strings.TrimSpace(got) != want {
		e.t.Fatalf("peer answers %q, %v; want %s", got, err, want)
	}
}

// batches has the peer make n batches, published or kept for replay only.
func (e *engine) batches(n int, verb string) {
	e.t.Helper()
	go func() {
		for i := range n {
			ev := vllm.NewEvent(vllm.BlockStored)
			ev.Hashes, ev.BlockSize, ev.LoRAName = []uint64{1}, 16, fmt.Sprintf("%s:%d", e.boot, e.count+i)
			ev.Tokens = make([]uint32, 256)
			b := vllm.AppendBatch(nil, &vllm.Batch{TS: float64(time.Now().UnixNano()) / 1e9, Events: []vllm.Event{ev}}, vllm.V0_24)
			fmt.Fprintf(e.in, "%s %s\n", verb, hex.EncodeToString(b))
		}
	}()
	for range n {
		e.answer("ok")
	}
	e.count += n
}

// catalog is a router that knows one worker.
type catalog struct {
	routerv1connect.UnimplementedRouterServiceHandler
	worker *routerv1.Worker
}

func (c catalog) WatchCatalog(ctx context.Context, _ *routerv1.WatchCatalogRequest, out *connect.ServerStream[routerv1.WatchCatalogResponse]) error {
	err := out.Send(&routerv1.WatchCatalogResponse{Catalog: &routerv1.Catalog{Workers: []*routerv1.Worker{c.worker}}})
	<-ctx.Done()
	return err
}

func background(t *testing.T, f func(context.Context) error) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- f(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("background: %v", err)
		}
	})
}

// view is what the stream says of the worker.
type view struct {
	t         *testing.T
	mu        sync.Mutex
	next      uint64
	labels    []string
	clears    []string
	suspended bool
	changed   chan struct{}
}

func (v *view) message(d bus.Delivery) {
	var m bus.KVMessage
	if err := m.Decode(d.Header, d.Data); err != nil {
		v.t.Error(err)
		return
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	switch m.Kind {
	case bus.KindClear:
		v.next, v.labels, v.suspended = m.First, nil, false
		v.clears = append(v.clears, m.Reason)
	case bus.KindSuspend:
		v.suspended = true
	case bus.KindResume:
		v.suspended = false
	case bus.KindBatch:
		if m.First > v.next {
			v.t.Errorf("batch %d after %d", m.First, v.next)
		}
		for i, p := range m.Payloads {
			if m.First+uint64(i) < v.next {
				continue
			}
			v.next++
			var dec vllm.Decoder
			var b vllm.Batch
			if err := dec.Decode(p, &b); err != nil || len(b.Events) != 1 {
				v.t.Errorf("batch %d: %v", m.First, err)
				continue
			}
			v.labels = append(v.labels, b.Events[0].LoRAName)
		}
	}
	close(v.changed)
	v.changed = make(chan struct{})
}

func (v *view) wait(what string, ok func() bool) {
	v.t.Helper()
	timeout := time.After(60 * time.Second)
	for {
		v.mu.Lock()
		done, changed, n := ok(), v.changed, len(v.labels)
		v.mu.Unlock()
		if done {
			return
		}
		select {
		case <-changed:
		case <-timeout:
			v.t.Fatalf("%s: %d batches, suspended %v, clears %q", what, n, v.suspended, v.clears)
		}
	}
}

// expect waits for exactly the batches 0 to n-1 of a process.
func (v *view) expect(boot string, n int, clears ...string) {
	v.t.Helper()
	want := make([]string, n)
	for i := range want {
		want[i] = fmt.Sprintf("%s:%d", boot, i)
	}
	v.wait(fmt.Sprintf("batches of %s", boot), func() bool { return !v.suspended && slices.Equal(v.labels, want) })
	v.mu.Lock()
	defer v.mu.Unlock()
	if !slices.Equal(v.clears, clears) {
		v.t.Errorf("clears %q, want %q", v.clears, clears)
	}
}

func TestRelay(t *testing.T) {
	bin := build(t)
	for _, framing := range []string{"old", "new"} {
		t.Run(framing, func(t *testing.T) {
			events, replay := "tcp://"+testenv.FreeAddr(t), "tcp://"+testenv.FreeAddr(t)
			nats := testenv.NATS(t)
			l := testenv.Listen(t)
			background(t, func(ctx context.Context) error {
				h := catalog{worker: &routerv1.Worker{
					Uid: "a", WorkerSet: "demo/sim", Url: "http://127.0.0.1:1", Ranks: 1, KvEvents: events, KvReplay: replay, KvTopic: "k",
				}}
				return rpc.Serve(ctx, l, rpc.Mount[routerv1connect.RouterServiceHandler](ctx, h, routerv1connect.NewRouterServiceHandler))
			})
			conn, err := bus.Connect(t.Context(), nats, "test")
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(conn.Close)
			v := &view{t: t, changed: make(chan struct{})}
			background(t, func(ctx context.Context) error {
				return conn.ConsumeKV(ctx, bus.StreamSettings{}, bus.Position{}, bus.KVHandler{Message: v.message})
			})
			relay := &kvtracker.Service{Config: kvtracker.Config{
				Mode: kvtracker.ModeRelay, NATSURL: nats, RouterURL: "http://" + l.Addr().String(),
			}}
			background(t, relay.Run)

			e := startEngine(t, bin, "boot1", events, replay, framing)
			e.batches(3, "p")
			v.expect("boot1", 3, "start")
			e.batches(1500, "p") // more than the ROUTER's high-water mark, all together
			v.expect("boot1", 1503, "start")
			e.batches(1200, "l")
			e.batches(1, "p")
			v.expect("boot1", 2704, "start")

			e.kill()
			v.wait("suspend", func() bool { return v.suspended })
			e = startEngine(t, bin, "boot2", events, replay, framing)
			e.batches(3000, "l") // past the number that the old process had reached
			e.batches(1, "p")
			v.expect("boot2", 3001, "start", "restart")
		})
	}
}
