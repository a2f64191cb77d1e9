package kvtracker_test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"log"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-zeromq/zmq4"

	"github.com/kinference/kinference/internal/daemon"
	"github.com/kinference/kinference/internal/kvhash"
	"github.com/kinference/kinference/internal/natsd"
	"github.com/kinference/kinference/internal/rpc"
	"github.com/kinference/kinference/internal/testenv"
	"github.com/kinference/kinference/internal/vllm"
	kvtrackerv1 "github.com/kinference/kinference/proto/gen/kinference/kvtracker/v1"
	"github.com/kinference/kinference/proto/gen/kinference/kvtracker/v1/kvtrackerv1connect"
	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
	"github.com/kinference/kinference/proto/gen/kinference/router/v1/routerv1connect"
	"github.com/kinference/kinference/services/kvtracker"
)

// asProcess lets the test binary be one of the processes that a test kills.
const asProcess = "KINFERENCE_TEST_PROCESS"

// runProcess is the process that the environment asks for; it ends by a signal, or when the
// test does.
func runProcess(kind string) int {
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		os.Exit(1)
	}()
	if kind == "nats" {
		port, err := strconv.Atoi(os.Args[2])
		if err == nil {
			_, err = natsd.Start(natsd.Options{Dir: os.Args[1], Port: port})
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		select {}
	}
	return daemon.Main("kvtracker", new(kvtracker.Service), os.Args[1:], os.Stderr)
}

// child is a process that can be killed and started again.
type child struct {
	t    *testing.T
	kind string
	args []string
	cmd  *exec.Cmd
	said bytes.Buffer
}

func (c *child) start() {
	c.t.Helper()
	self, err := os.Executable()
	if err != nil {
		c.t.Fatal(err)
	}
	c.cmd = exec.Command(self, c.args...)
	c.cmd.Env = append(os.Environ(), asProcess+"="+c.kind)
	c.cmd.Stderr = &c.said
	if _, err := c.cmd.StdinPipe(); err != nil { // closed when this process ends
		c.t.Fatal(err)
	}
	if err := c.cmd.Start(); err != nil {
		c.t.Fatal(err)
	}
}

// kill sends SIGKILL and waits for the process to be gone.
func (c *child) kill() {
	if c.cmd != nil {
		_ = c.cmd.Process.Kill()
		_ = c.cmd.Wait()
		c.cmd = nil
	}
}

func newChild(t *testing.T, kind string, args ...string) *child {
	c := &child{t: t, kind: kind, args: args}
	c.start()
	t.Cleanup(c.kill)
	return c
}

// A publisher's conversations, and how it stores them.
const (
	publishers    = 64
	conversations = 128
	blocksOf      = 32 // a conversation
	perBatch      = 4
	tokensOf      = 16 // a block
	keep          = 16 // conversations, before the oldest goes
	replayBuffer  = 10_000
)

// library is what is asked: the blocks of all conversations.
type library struct {
	tokens [conversations][]uint32
	own    [conversations][]kvhash.Hash
}

func newLibrary() *library {
	l := &library{}
	r := rand.New(rand.NewPCG(5, 5))
	for c := range conversations {
		for range blocksOf * tokensOf {
			l.tokens[c] = append(l.tokens[c], r.Uint32N(150_000))
		}
		l.own[c] = kvhash.Append(nil, kvhash.Root("", ""), l.tokens[c], tokensOf)
	}
	return l
}

// publisher is an engine that does nothing but store and evict.
type publisher struct {
	library *library
	r       *rand.Rand
	pub     zmq4.Socket
	events  string
	replay  string

	mu   sync.Mutex
	next uint64
	kept []numbered
	held []int // conversations, oldest first; the last one may be incomplete
	at   int   // blocks of the last one
}

type numbered struct {
	seq     uint64
	payload []byte
}

func startPublisher(t *testing.T, l *library, seed uint64) *publisher {
	t.Helper()
	p := &publisher{library: l, r: rand.New(rand.NewPCG(seed, 3)), at: blocksOf}
	ctx, cancel := context.WithCancel(context.Background())
	quiet := zmq4.WithLogger(log.New(io.Discard, "", 0))
	p.pub = zmq4.NewPub(ctx, quiet)
	router := zmq4.NewRouter(ctx, quiet)
	for socket, addr := range map[zmq4.Socket]*string{p.pub: &p.events, router: &p.replay} {
		*addr = "tcp://" + testenv.FreeAddr(t)
		if err := socket.Listen(*addr); err != nil {
			t.Fatal(err)
		}
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		for ctx.Err() == nil {
			if m, err := router.Recv(); err == nil {
				p.answer(router, m.Frames)
			}
		}
	})
	t.Cleanup(func() {
		cancel()
		p.pub.Close()
		router.Close()
		wg.Wait()
	})
	return p
}

func (p *publisher) answer(router zmq4.Socket, frames [][]byte) {
	id, start, err := vllm.ParseReplayRequest(frames)
	if err != nil {
		return
	}
	p.mu.Lock()
	kept := append([]numbered{}, p.kept...)
	p.mu.Unlock()
	for _, b := range kept {
		if b.seq >= start {
			_ = router.Send(zmq4.NewMsgFrom(append([][]byte{id}, vllm.ReplayFrames("kv", b.seq, b.payload, vllm.V0_24)...)...))
		}
	}
	_ = router.Send(zmq4.NewMsgFrom(append([][]byte{id}, vllm.ReplayEndFrames(vllm.V0_24)...)...))
}

// engineHash is what all engines call a block.
func engineHash(conversation, block int) uint64 { return uint64(conversation)<<20 | uint64(block) + 1 }

// step publishes one batch.
func (p *publisher) step() {
	p.mu.Lock()
	defer p.mu.Unlock()
	var events []vllm.Event
	if p.at == blocksOf {
		if len(p.held) == keep {
			gone := vllm.NewEvent(vllm.BlockRemoved)
			for b := blocksOf - 1; b >= 0; b-- {
				gone.Hashes = append(gone.Hashes, engineHash(p.held[0], b))
			}
			events = append(events, gone)
			p.held = p.held[1:]
		}
		c := p.r.IntN(conversations)
		for p.holds(c) {
			c = (c + 1) % conversations
		}
		p.held, p.at = append(p.held, c), 0
	}
	c := p.held[len(p.held)-1]
	e := vllm.NewEvent(vllm.BlockStored)
	e.BlockSize, e.Tokens = tokensOf, p.library.tokens[c][p.at*tokensOf:(p.at+perBatch)*tokensOf]
	if p.at > 0 {
		e.HasParent, e.Parent = true, engineHash(c, p.at-1)
	}
	for range perBatch {
		e.Hashes = append(e.Hashes, engineHash(c, p.at))
		p.at++
	}
	payload := vllm.AppendBatch(nil, &vllm.Batch{TS: float64(time.Now().UnixNano()) / 1e9, Events: append(events, e)}, vllm.V0_24)
	if len(p.kept) == 2*replayBuffer {
		p.kept = append([]numbered{}, p.kept[replayBuffer:]...)
	}
	p.kept = append(p.kept, numbered{p.next, payload})
	_ = p.pub.Send(zmq4.NewMsgFrom(vllm.EventFrames("kv", p.next, payload)...))
	p.next++
}

func (p *publisher) holds(c int) bool {
	for _, h := range p.held {
		if h == c {
			return true
		}
	}
	return false
}

// truth adds the worker to the holders of each of its blocks.
func (p *publisher) truth(worker string, holders map[kvhash.Hash]map[string]bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for i, c := range p.held {
		n := blocksOf
		if i == len(p.held)-1 {
			n = p.at
		}
		for _, h := range p.library.own[c][:n] {
			if holders[h] == nil {
				holders[h] = map[string]bool{}
			}
			holders[h][worker] = true
		}
	}
}

// crash is the fleet of publishers with all that follows it as processes.
type crash struct {
	t       *testing.T
	library *library
	fleet   []*publisher
	client  kvtrackerv1connect.KVTrackerServiceClient
	gate    sync.RWMutex // held by who wants them silent
	sent    atomic.Int64
	spoken  time.Duration // how long they were not silent
	since   time.Time
}

// publish lets each publisher send its share of the rate until ctx is done.
func (c *crash) publish(ctx context.Context, rate int) {
	var wg sync.WaitGroup
	const tick = 20 * time.Millisecond
	share := float64(rate) / publishers * tick.Seconds()
	for _, p := range c.fleet {
		wg.Go(func() {
			ticker := time.NewTicker(tick)
			defer ticker.Stop()
			for owed := 0.0; ; {
				select {
				case <-ctx.Done():
					return
				case <-ticker.C:
				}
				c.gate.RLock()
				for owed += share; owed >= 1; owed-- {
					p.step()
					c.sent.Add(1)
				}
				c.gate.RUnlock()
			}
		})
	}
	wg.Wait()
}

func (c *crash) silence() {
	c.gate.Lock()
	c.spoken += time.Since(c.since)
}

func (c *crash) speak() {
	c.since = time.Now()
	c.gate.Unlock()
}

// equal waits until the tracker says of every block who holds it, and returns how long that
// took; the comparison itself takes a part of it.
func (c *crash) equal(what string) time.Duration {
	c.t.Helper()
	start := time.Now()
	want := map[kvhash.Hash]map[string]bool{}
	for i, p := range c.fleet {
		p.truth(id(i, 0), want)
	}
	deadline := time.After(patience)
	for {
		begin := time.Now()
		wrong, err := c.compare(want)
		if err == nil && wrong == "" {
			c.t.Logf("%s: equal after %v, of which the last comparison took %v", what, time.Since(start).Round(time.Millisecond), time.Since(begin).Round(time.Millisecond))
			return time.Since(start)
		}
		select {
		case <-deadline:
			c.t.Fatalf("%s: %s, %v", what, wrong, err)
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// compare asks for every block; the result is empty if all is as it should be.
func (c *crash) compare(want map[kvhash.Hash]map[string]bool) (wrong string, err error) {
	ctx, cancel := context.WithTimeout(c.t.Context(), patience)
	defer cancel()
	for conversation := range conversations {
		r := &kvtrackerv1.MatchRequest{}
		own := c.library.own[conversation]
		for _, h := range own {
			r.Queries = append(r.Queries, &kvtrackerv1.Query{BlockSize: tokensOf, BlockHashes: []uint64{uint64(h)}})
		}
		resp, err := c.client.Match(ctx, r)
		if err != nil {
			return "", err
		}
		for i, result := range resp.Results {
			if got := len(result.Matches); got != len(want[own[i]]) {
				return fmt.Sprintf("block %d of conversation %d is held by %d, want %d", i, conversation, got, len(want[own[i]])), nil
			}
			for _, m := range result.Matches {
				if !want[own[i]][m.Worker] {
					return fmt.Sprintf("block %d of conversation %d is not held by %s", i, conversation, m.Worker), nil
				}
			}
		}
	}
	return "", nil
}

// TestKilledInTurn is killedInTurn with both kinds of storage: without a disk the stream is lost
// with its server, and the relay publishes anew what the engines can replay.
func TestKilledInTurn(t *testing.T) {
	for _, file := range []bool{true, false} {
		t.Run(fmt.Sprintf("file=%v", file), func(t *testing.T) { killedInTurn(t, file) })
	}
}

// killedInTurn kills tracker, relay and NATS server, each a process, with SIGKILL while 64
// engines publish, starts each again a while later, and compares the index with what the
// engines hold, block by block. KINFERENCE_CRASH sets the batches a second of all engines.
func killedInTurn(t *testing.T, file bool) {
	rate := 2000
	if s := os.Getenv("KINFERENCE_CRASH"); s != "" {
		n, err := strconv.Atoi(s)
		if err != nil {
			t.Fatal(err)
		}
		rate = n
	}
	c := &crash{t: t, library: newLibrary()}
	engine := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprintln(w, `vllm:num_requests_running{engine="0",model_name="m"} 0`)
	}))
	t.Cleanup(engine.Close)
	catalog := &router{}
	var workers []*routerv1.Worker
	for i := range publishers {
		p := startPublisher(t, c.library, uint64(i))
		c.fleet = append(c.fleet, p)
		workers = append(workers, &routerv1.Worker{Uid: uid(i), WorkerSet: "demo/sim", Name: fmt.Sprint("w", i), Url: engine.URL, Ranks: 1,
			KvEvents: p.events, KvReplay: p.replay, MetricsPath: "/metrics"})
	}
	catalog.set(workers...)
	l := testenv.Listen(t)
	process(t, func(ctx context.Context) error {
		return rpc.Serve(ctx, l, rpc.Mount[routerv1connect.RouterServiceHandler](ctx, catalog, routerv1connect.NewRouterServiceHandler))
	})
	port, listen := testenv.FreePort(t), testenv.FreeAddr(t)
	url := fmt.Sprintf("nats://127.0.0.1:%d", port)
	nats := newChild(t, "nats", t.TempDir(), strconv.Itoa(port))
	service := []string{"--nats-url", url, fmt.Sprintf("--stream-file=%v", file), "--drain-timeout", "1s", "--admin-listen"}
	relay := newChild(t, "relay", append(service, "127.0.0.1:0", "--mode", "relay", "--router-url", "http://"+l.Addr().String(), "--scrape-interval", "2s")...)
	tracker := newChild(t, "tracker", append(service, "127.0.0.1:0", "--listen", listen, "--snapshot-interval", "1s")...)
	ctx, cancel := context.WithCancel(context.Background())
	t.Cleanup(cancel)
	c.client = rpc.Client(ctx, "http://"+listen, kvtrackerv1connect.NewKVTrackerServiceClient)
	t.Cleanup(func() {
		if t.Failed() {
			for _, p := range []*child{nats, relay, tracker} {
				p.kill()
				t.Logf("%s said:\n%s", p.kind, p.said.String())
			}
		}
	})

	pause := func(d time.Duration) { <-time.After(d) } // time for load, not for a condition
	c.since = time.Now()
	publishing, stop := context.WithCancel(ctx)
	done := make(chan struct{})
	go func() { defer close(done); c.publish(publishing, rate) }()
	defer func() { stop(); <-done }()
	pause(2 * time.Second)
	c.silence()
	c.equal("at first")
	c.speak()
	worst := time.Duration(0)
	var times []string
	for _, p := range []*child{tracker, relay, nats} {
		pause(time.Second)
		p.kill()
		pause(time.Second) // they go on publishing
		c.silence()
		p.start()
		took := c.equal(p.kind + " was killed")
		c.speak()
		worst = max(worst, took)
		times = append(times, fmt.Sprintf("%s %d ms", p.kind, took.Milliseconds()))
	}
	c.silence()
	c.equal("at last")
	c.speak()
	t.Logf("%.0f batches a second of %d engines, %d in all; from start to equality: %s", float64(c.sent.Load())/c.spoken.Seconds(), publishers, c.sent.Load(), strings.Join(times, ", "))
	if worst > 20*time.Second {
		t.Logf("SLOW: equality took %v", worst)
	}
}
