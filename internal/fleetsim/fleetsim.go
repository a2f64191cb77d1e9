// Package fleetsim runs simulated vLLM workers: HTTP servers with vLLM's
// routes, metrics and errors, which publish KV-cache events over ZMQ, around
// the scheduler and prefix cache of package engine. A client, a scraper and an
// event subscriber cannot tell one from vLLM; time may pass faster than real
// time, and faults may be switched on.
//
// Tests, benchmarks, the demo and cmd/fleetsim use it. A Worker's methods are
// safe for concurrent use. It opens sockets on the loopback address unless told
// otherwise, and Stop or Kill leaves no goroutine behind. Start fails if an
// address is taken; nothing that a client sends makes a worker fail.
//
// Answers are made of real words that depend on the prompt alone: text of the
// length asked for, without sense, whose tokens hit the cache when the next
// turn of a conversation brings them back.
package fleetsim

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"strconv"
	"sync"
	"time"

	"github.com/kinference/kinference/internal/chat"
	"github.com/kinference/kinference/internal/fleetsim/engine"
	"github.com/kinference/kinference/internal/tokens"
	"github.com/kinference/kinference/internal/vllm"
)

// Off as a port means that there is no such socket.
const Off = -1

// Config describes a worker. The zero value is a usable one: the L40S profile
// in real time on free loopback ports.
type Config struct {
	Name      string         // names it in logs; "worker" by default
	Profile   engine.Profile // default engine.L40SQwen27B
	Ranks     int            // data-parallel engines behind one HTTP address; default 1
	TimeScale float64        // simulated seconds per second; default 1
	Speed     float64        // of the accelerator, relative to the profile; default 1
	Seed      int64

	Version vllm.Version // whose wire format events and metrics have

	Model   string   // first served name; default Profile.Model
	Aliases []string // further served names
	LoRAs   []string // names of adapters on Model
	// MaxModelLen limits prompt plus output; default, and at most, what the
	// profile can hold.
	MaxModelLen int

	// VocabSize bounds the token ids of requests; 0: any will do.
	VocabSize int

	Tokenizer *tokens.Tokenizer // nil, together with Template: the simulated model's
	Template  *chat.Template    // nil with a Tokenizer: no chat

	// Listen is the HTTP address, "127.0.0.1:0" by default. The event sockets
	// use the same host.
	Listen string
	// EventsPort and ReplayPort are those of rank 0, the next ranks have the
	// next ports. 0: free ones. Off: no events, or no replay.
	EventsPort, ReplayPort int
	Topic                  string
	BufferSteps            int // batches kept for replay; default 10,000

	// HashAlgorithm is vLLM's --prefix-caching-hash-algo (sha256, sha256_cbor),
	// with HashSeed for PYTHONHASHSEED. Empty: a fast hash that differs from
	// process to process.
	HashAlgorithm vllm.HashAlgorithm
	HashSeed      string
	// LastCopyRemovals announces the eviction of a block's last copy only.
	LastCopyRemovals bool

	// AnswerTokens is where an answer ends by itself if the request does not set
	// ignore_eos. 0: at max_tokens, or after 256 tokens where that is absent.
	AnswerTokens int

	NoPromptDetails  bool          // no usage.prompt_tokens_details
	RequestIDHeaders bool          // echo X-Request-Id
	LoadTracking     bool          // /load counts
	DevMode          bool          // vLLM's development routes
	ScaleOut         bool          // the render routes, which 0.32 serves only if told to
	AutoTools        bool          // 0.32: takes tools without a tool_choice; answers call none
	Admin            bool          // our own routes under /sim/
	APIKey           string        // guards /v1; empty: open
	KeepAlive        time.Duration // of idle connections; default vLLM's 5 s
	// ShutdownTimeout is how long Stop lets requests finish; 0 ends them at once,
	// as vLLM does by default.
	ShutdownTimeout time.Duration

	Faults Faults
	Log    *slog.Logger // nil: silent

	// OnUsed is told, for each generation request that reached an engine, what it
	// used in truth; it is called by many goroutines. Nil: nobody is.
	OnUsed func(Used)
}

// Used is what one generation request used, as the engine knows it.
type Used struct {
	RequestID string // X-Request-Id of the request
	// Prompt tokens, those of them that came from the cache, and generated tokens;
	// of several prompts and choices together.
	Prompt, Cached, Output int
	// Sent are the generated tokens that were written to the client.
	Sent int
	// Aborted says that the client left, or the connection was cut.
	Aborted bool
}

// Worker is one simulated vLLM server.
type Worker struct {
	cfg    Config
	text   *text
	clock  clock
	faults *faults

	background sync.WaitGroup // restarts asked for over HTTP
	ending     sync.Mutex     // held while a life ends

	mu      sync.Mutex
	life    *life  // nil: not running
	lives   int64  // how often it was started
	http    string // addresses, once known
	events  []string
	replays []string
}

// Start starts a worker, which serves when Start returns. The caller ends it
// with Stop or Kill; when ctx is done it is killed.
func Start(ctx context.Context, cfg Config) (*Worker, error) {
	if err := cfg.complete(); err != nil {
		return nil, fmt.Errorf("simulated worker %s: %w", cfg.Name, err)
	}
	t, err := simulated()
	if cfg.Tokenizer != nil {
		t, err = newText(cfg.Tokenizer, cfg.Template), nil
	}
	if err != nil {
		return nil, fmt.Errorf("simulated worker %s: %w", cfg.Name, err)
	}
	cfg.Tokenizer, cfg.Template = t.tokenizer, t.template
	w := &Worker{cfg: cfg, text: t, clock: clock{time.Now(), cfg.TimeScale}, faults: newFaults(cfg.Faults, cfg.Seed)}
	if err := w.start(); err != nil {
		return nil, fmt.Errorf("simulated worker %s: %w", cfg.Name, err)
	}
	context.AfterFunc(ctx, w.Kill)
	return w, nil
}

func (c *Config) complete() error {
	if c.Name == "" {
		c.Name = "worker"
	}
	if c.Profile.BlockSize == 0 {
		c.Profile = engine.L40SQwen27B
	}
	if c.Ranks == 0 {
		c.Ranks = 1
	}
	if c.TimeScale == 0 {
		c.TimeScale = 1
	}
	if c.Speed == 0 {
		c.Speed = 1
	}
	if c.Model == "" {
		c.Model = c.Profile.Model
	}
	if c.MaxModelLen > 0 {
		c.Profile.MaxModelLen = c.MaxModelLen
	}
	if c.Listen == "" {
		c.Listen = "127.0.0.1:0"
	}
	if c.BufferSteps == 0 {
		c.BufferSteps = 10_000
	}
	if c.KeepAlive == 0 {
		c.KeepAlive = 5 * time.Second
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	var errs []error
	if c.Ranks < 0 || c.Ranks > 1024 {
		errs = append(errs, fmt.Errorf("%d ranks", c.Ranks))
	}
	if c.TimeScale < 0 || c.Speed < 0 {
		errs = append(errs, errors.New("time scale and speed must be positive"))
	}
	if c.HashAlgorithm != "" {
		if _, err := vllm.ParseHashAlgorithm(string(c.HashAlgorithm)); err != nil {
			errs = append(errs, err)
		}
	}
	if _, _, err := net.SplitHostPort(c.Listen); err != nil {
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// URL is the base address for HTTP, such as http://127.0.0.1:8000.
func (w *Worker) URL() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return "http://" + w.http
}

// Addr is the host and port of URL.
func (w *Worker) Addr() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.http
}

// EventsAddr is where a rank's events come from, such as tcp://127.0.0.1:5557.
// It is empty if events are off.
func (w *Worker) EventsAddr(rank int) string { return w.addr(&w.events, rank) }

// ReplayAddr is where a rank's events are replayed, empty if they are not.
func (w *Worker) ReplayAddr(rank int) string { return w.addr(&w.replays, rank) }

func (w *Worker) addr(list *[]string, rank int) string {
	w.mu.Lock()
	defer w.mu.Unlock()
	if rank < 0 || rank >= len(*list) {
		return ""
	}
	return "tcp://" + (*list)[rank]
}

// Name is Config.Name.
func (w *Worker) Name() string { return w.cfg.Name }

// Config is the worker's configuration with its defaults filled in.
func (w *Worker) Config() Config { return w.cfg }

// Now is the worker's simulated time: seconds since it was first started.
func (w *Worker) Now() float64 { return w.clock.now() }

// Stop shuts the worker down as SIGTERM does: no new connections, then up to
// ShutdownTimeout for requests to finish.
func (w *Worker) Stop() { w.end(w.cfg.ShutdownTimeout) }

// Kill ends the worker as SIGKILL does: connections break, nothing is said.
func (w *Worker) Kill() { w.end(0) }

func (w *Worker) end(grace time.Duration) {
	w.background.Wait()
	w.stop(grace)
}

// stop ends the life, if there is one. Who comes second waits for the first.
func (w *Worker) stop(grace time.Duration) {
	w.ending.Lock()
	defer w.ending.Unlock()
	w.mu.Lock()
	l := w.life
	w.life = nil
	w.mu.Unlock()
	if l != nil {
		l.stop(grace)
	}
}

// Restart starts a worker that was stopped or killed, or kills and starts one
// that runs: a new process on the same addresses, with an empty cache, event
// numbers from 0, and another hash seed.
func (w *Worker) Restart() error {
	w.background.Wait()
	return w.restart()
}

func (w *Worker) restart() error {
	w.stop(0)
	return w.start()
}

// RestartEngine is Restart: vLLM's engine and server die together.
func (w *Worker) RestartEngine() error { return w.Restart() }

// start opens the sockets, on the addresses of the former life if there was one.
func (w *Worker) start() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.life != nil {
		return errors.New("already running")
	}
	s, err := w.listen()
	if err != nil {
		return err
	}
	w.http = s.http.Addr().String()
	w.events, w.replays = addresses(s.events), addresses(s.replays)
	w.life = w.live(s, w.lives)
	w.lives++
	return nil
}

func addresses(list []net.Listener) []string {
	out := make([]string, len(list))
	for i, l := range list {
		out[i] = l.Addr().String()
	}
	return out
}

// sockets are all listeners of one life.
type sockets struct {
	http            net.Listener
	events, replays []net.Listener
}

func (s *sockets) close() {
	for _, l := range append(append([]net.Listener{s.http}, s.events...), s.replays...) {
		if l != nil {
			l.Close()
		}
	}
}

func (w *Worker) listen() (s sockets, err error) {
	defer func() {
		if err != nil {
			s.close()
		}
	}()
	address := w.cfg.Listen
	if w.http != "" {
		address = w.http
	}
	if s.http, err = listen(address); err != nil {
		return s, err
	}
	host, _, err := net.SplitHostPort(w.cfg.Listen)
	if err != nil || w.cfg.EventsPort == Off {
		return s, err
	}
	if s.events, err = listenRanks(host, w.cfg.EventsPort, w.cfg.Ranks, w.events); err != nil || w.cfg.ReplayPort == Off {
		return s, err
	}
	s.replays, err = listenRanks(host, w.cfg.ReplayPort, w.cfg.Ranks, w.replays)
	return s, err
}

// listen opens one address. One that was ours until just now may need a moment.
func listen(address string) (l net.Listener, err error) {
	for range 50 {
		if l, err = net.Listen("tcp", address); err == nil {
			return l, nil
		}
		if _, port, _ := net.SplitHostPort(address); port == "0" {
			return nil, err
		}
		time.Sleep(10 * time.Millisecond)
	}
	return nil, err
}

// listenRanks opens one port per rank, in a row: from port on, at the old
// addresses if there are any, or wherever there is room.
func listenRanks(host string, port, ranks int, old []string) (list []net.Listener, err error) {
	if port == 0 && len(old) > 0 {
		_, p, err := net.SplitHostPort(old[0])
		if err != nil {
			return nil, err
		}
		if port, err = strconv.Atoi(p); err != nil {
			return nil, err
		}
	}
	attempts := 1
	if port == 0 {
		attempts = 100
	}
	for range attempts {
		list = nil
		first := port
		for rank := range ranks {
			p := first + rank
			if first == 0 {
				p = 0
			}
			var l net.Listener
			if l, err = listen(net.JoinHostPort(host, strconv.Itoa(p))); err != nil {
				break
			}
			list = append(list, l)
			if first == 0 {
				first = l.Addr().(*net.TCPAddr).Port
			}
		}
		if err == nil {
			return list, nil
		}
		for _, l := range list {
			l.Close()
		}
	}
	return nil, err
}
