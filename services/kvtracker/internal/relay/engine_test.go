package relay

import (
	"context"
	"fmt"
	"io"
	"log"
	"net"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/go-zeromq/zmq4"

	"github.com/kinference/kinference/internal/testenv"
	"github.com/kinference/kinference/internal/vllm"
)

// engine is the event side of an engine rank on the library's PUB and ROUTER
// sockets, with the faults that a relay must bear.
type engine struct {
	version vllm.Version
	buffer  int // batches kept for replay; 0: no replay socket
	tokens  int // per batch, to make it big
	// hold delays the answers to replay requests until it is closed; may be nil.
	hold chan struct{}

	t              *testing.T
	events, replay string // endpoints

	mu   sync.Mutex
	boot string
	next uint64
	kept []kept
	asks int // replay requests
	pub  zmq4.Socket

	cancel context.CancelFunc
	done   sync.WaitGroup
}

type kept struct {
	seq     uint64
	payload []byte
}

func newEngine(t *testing.T, e *engine) *engine {
	t.Helper()
	return newEngineAt(t, e, testenv.FreePort(t), testenv.FreePort(t))
}

// newRanks makes two engines whose ports follow each other, as those of two
// ranks do.
func newRanks(t *testing.T) (*engine, *engine) {
	t.Helper()
	pair := func() int {
		for range 50 {
			p := testenv.FreePort(t)
			if l, err := net.Listen("tcp", "127.0.0.1:"+strconv.Itoa(p+1)); err == nil {
				l.Close()
				return p
			}
		}
		t.Fatal("no two ports in a row")
		return 0
	}
	events, replay := pair(), pair()
	return newEngineAt(t, &engine{buffer: 100}, events, replay), newEngineAt(t, &engine{buffer: 100}, events+1, replay+1)
}

func newEngineAt(t *testing.T, e *engine, events, replay int) *engine {
	t.Helper()
	e.t, e.boot = t, "boot1"
	e.events = "tcp://127.0.0.1:" + strconv.Itoa(events)
	e.replay = "tcp://127.0.0.1:" + strconv.Itoa(replay)
	e.listen()
	t.Cleanup(e.stop)
	return e
}

// listen opens the sockets.
func (e *engine) listen() {
	e.t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	e.cancel = cancel
	quiet := zmq4.WithLogger(log.New(io.Discard, "", 0))
	pub := zmq4.NewPub(ctx, quiet)
	if err := pub.Listen(e.events); err != nil {
		e.t.Fatal(err)
	}
	e.mu.Lock()
	e.pub = pub
	e.mu.Unlock()
	if e.buffer == 0 {
		return
	}
	router := zmq4.NewRouter(ctx, quiet)
	if err := router.Listen(e.replay); err != nil {
		e.t.Fatal(err)
	}
	e.done.Go(func() {
		<-ctx.Done()
		router.Close()
	})
	e.done.Go(func() { e.serve(ctx, router) })
}

func (e *engine) serve(ctx context.Context, router zmq4.Socket) {
	for {
		m, err := router.Recv()
		if ctx.Err() != nil {
			return
		}
		if err != nil {
			continue
		}
		id, start, err := vllm.ParseReplayRequest(m.Frames)
		if err != nil {
			e.t.Errorf("replay request: %v", err)
			continue
		}
		if e.hold != nil {
			select {
			case <-e.hold:
			case <-ctx.Done():
				return
			}
		}
		e.mu.Lock()
		e.asks++
		batches := append([]kept{}, e.kept...)
		e.mu.Unlock()
		answer := func(frames [][]byte) {
			_ = router.Send(zmq4.NewMsgFrom(append([][]byte{id}, frames...)...))
		}
		for _, b := range batches {
			if b.seq >= start {
				answer(vllm.ReplayFrames("topic", b.seq, b.payload, e.version))
			}
		}
		answer(vllm.ReplayEndFrames(e.version))
	}
}

// asked is the number of replay requests so far.
func (e *engine) asked() int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.asks
}

// stop closes the sockets, as a process that dies does. The buffer stays, for
// listen; restart is another process.
func (e *engine) stop() {
	e.mu.Lock()
	pub := e.pub
	e.pub = nil
	e.mu.Unlock()
	if pub == nil {
		return
	}
	e.cancel()
	pub.Close()
	e.done.Wait()
}

// restart opens the sockets as another process that has already published n
// batches.
func (e *engine) restart(boot string, n int) {
	e.t.Helper()
	e.rename(boot)
	e.lose(n)
	e.listen()
}

// rename makes the engine another process whose sockets stay open.
func (e *engine) rename(boot string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.boot, e.next, e.kept = boot, 0, nil
}

// publish makes and sends n batches.
func (e *engine) publish(n int) { e.make(n, true) }

// lose makes n batches that no subscriber gets.
func (e *engine) lose(n int) { e.make(n, false) }

func (e *engine) make(n int, send bool) {
	for range n {
		e.mu.Lock()
		name := fmt.Sprintf("%s:%d", e.boot, e.next)
		e.mu.Unlock()
		e.add(batch(name, make([]uint32, e.tokens)), send)
	}
}

// send publishes a payload as the next batch.
func (e *engine) send(payload []byte) { e.add(payload, true) }

func (e *engine) add(payload []byte, send bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	seq := e.next
	e.next++
	e.kept = append(e.kept, kept{seq, payload})
	e.kept = e.kept[max(0, len(e.kept)-e.buffer):]
	if send && e.pub != nil {
		_ = e.pub.Send(zmq4.NewMsgFrom(vllm.EventFrames("topic", seq, payload)...))
	}
}

// raw sends any message to the subscribers.
func (e *engine) raw(frames ...[]byte) {
	e.mu.Lock()
	defer e.mu.Unlock()
	_ = e.pub.Send(zmq4.NewMsgFrom(frames...))
}

// forget drops one batch from the replay buffer.
func (e *engine) forget(seq uint64) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for i, b := range e.kept {
		if b.seq == seq {
			e.kept = append(e.kept[:i], e.kept[i+1:]...)
			return
		}
	}
}

// subscribed waits until a subscriber is there.
func (e *engine) subscribed() {
	e.t.Helper()
	timeout := time.After(time.Minute)
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for {
		e.mu.Lock()
		pub := e.pub
		e.mu.Unlock()
		if len(pub.(zmq4.Topics).Topics()) > 0 {
			return
		}
		select {
		case <-tick.C:
		case <-timeout:
			e.t.Fatal("no subscriber came")
		}
	}
}

// batch is a payload that label recognises. Its time is never the same twice.
func batch(name string, tokens []uint32) []byte {
	e := vllm.NewEvent(vllm.BlockStored)
	e.Hashes, e.BlockSize, e.LoRAName = []uint64{1}, 16, name
	for i := range tokens {
		tokens[i] = 100_000 + uint32(i)
	}
	e.Tokens = tokens
	return vllm.AppendBatch(nil, &vllm.Batch{TS: float64(time.Now().UnixNano()) / 1e9, Rank: 0, Events: []vllm.Event{e}}, vllm.V0_24)
}
