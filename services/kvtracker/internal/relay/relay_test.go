package relay

import (
	"fmt"
	"net"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/kinference/kinference/internal/natsd"
	"github.com/kinference/kinference/internal/testenv"
	"github.com/kinference/kinference/internal/vllm"
	kvtrackerv1 "github.com/kinference/kinference/proto/gen/kinference/kvtracker/v1"
)

func TestFollowFromTheStart(t *testing.T) {
	for _, v := range []vllm.Version{vllm.V0_23, vllm.V0_24, vllm.V0_26} {
		t.Run(v.String(), func(t *testing.T) {
			f := newFixture(t, testenv.NATS(t))
			e := newEngine(t, &engine{version: v, buffer: 1000})
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

// What replay brought joins up with what comes next: live events after a
// recovery are no gap, else each would start another (dynamo 7072).
func TestRecoveryEnds(t *testing.T) {
	f := newFixture(t, testenv.NATS(t))
	f.timing.idleFirst, f.timing.idleThen = time.Hour, time.Hour // nothing else asks
	e := newEngine(t, &engine{buffer: 100})
	f.catalog.set(e.spec("a"))
	f.start()
	e.publish(1)
	f.view.expect("a/0", "boot1:0")
	e.lose(4)
	e.publish(1)
	f.view.expect("a/0", span("boot1", 0, 5)...)
	asked := e.asked()
	for i := range 20 {
		e.publish(1)
		f.view.expect("a/0", span("boot1", 0, 6+i)...)
	}
	if n := e.asked() - asked; n != 0 {
		t.Errorf("%d more replays after the gap was filled", n)
	}
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

// A replay endpoint that is wrong costs patience once, and then works like none.
func TestReplayUnreachable(t *testing.T) {
	f := newFixture(t, testenv.NATS(t))
	e := newEngine(t, &engine{buffer: 100})
	spec := e.spec("a")
	spec.KvReplay = "tcp://" + testenv.FreeAddr(t)
	f.catalog.set(spec)
	f.start()
	f.view.expect("a/0").wantClears(t, reasonStart)
	e.publish(2)
	f.view.expect("a/0", span("boot1", 0, 1)...)
	e.lose(1)
	e.publish(1)
	f.view.expect("a/0", "boot1:3").wantClears(t, reasonStart, reasonGap)
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

// What no relay has followed for a while is not to be trusted before the next
// one has looked: the engine may have been restarted, or have evicted blocks.
func TestUnseenIsNotTrusted(t *testing.T) {
	for _, tt := range []struct {
		name   string
		away   func(e *engine)
		want   []string
		clears []string
	}{
		{"same process", func(e *engine) { e.publish(2) }, span("boot1", 0, 4), []string{reasonStart}},
		{"restarted engine", func(e *engine) { e.stop(); e.restart("boot2", 7) }, span("boot2", 0, 6), []string{reasonStart, reasonRestart}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f := newFixture(t, testenv.NATS(t))
			e := newEngine(t, &engine{buffer: 100})
			f.catalog.set(e.spec("a"))
			f.start()
			e.publish(3)
			f.view.expect("a/0", span("boot1", 0, 2)...)
			f.stopRelay()
			e.stop()
			e.hold = make(chan struct{})
			e.listen()
			tt.away(e)
			f.timing.unseen = time.Nanosecond
			f.timing.patience = time.Minute
			f.start()
			if s := f.view.wait("a/0", func(s *seen) bool { return s.suspended }); s.next != 3 {
				t.Errorf("the worker is %+v", s)
			}
			close(e.hold)
			f.view.expect("a/0", tt.want...).wantClears(t, tt.clears...)
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
			opts := natsd.Options{Dir: t.TempDir(), Port: testenv.FreePort(t)}
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
	opts := natsd.Options{Dir: t.TempDir(), Port: testenv.FreePort(t)}
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
	addr := testenv.FreeAddr(t)
	f.url = "http://" + addr
	serve := func() (stop func()) {
		l, err := net.Listen("tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		return f.catalog.serve(t, l)
	}
	stop := serve()
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
	serve()
	f.view.expect("b/0", "boot1:0")
	f.view.expect("a/0", span("boot1", 0, 1)...).wantClears(t, reasonStart)
}
