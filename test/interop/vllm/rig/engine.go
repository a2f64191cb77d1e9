package rig

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// startTime is the most that an engine may take to come up; several start at
// once on few cores.
const startTime = 10 * time.Minute

// Options of an engine. The zero value serves the model qwen with events and
// replay.
type Options struct {
	// Name of the engine in messages. Default: engine0, engine1, ….
	Name string
	// Model is a name below Env.Models. Default: qwen. The engine serves it
	// under the same name.
	Model string
	// Blocks of the KV cache (one of them is the engine's null block). Default 2000.
	Blocks int
	// BlockSize in tokens. Default 32: the CPU backend takes multiples of 32 only.
	BlockSize int
	// MaxModelLen in tokens. Default 4096.
	MaxModelLen int
	// LoRAs are adapters to load, name to folder below Env.Models.
	LoRAs map[string]string
	// BufferSteps of replay. Default: the engine's own, 10,000 batches.
	BufferSteps int
	// NoEvents and NoReplay switch those off.
	NoEvents, NoReplay bool
	// Args are further flags of vllm serve.
	Args []string
	// Env holds further variables, NAME=value.
	Env []string
}

// Engine is a vLLM server. Its methods may be called from one goroutine at a
// time, except Post and Get.
type Engine struct {
	Options
	env                Env
	tb                 testing.TB
	port, events, repl int
	cmd                *exec.Cmd
	done               chan struct{} // closed when the process is reaped
	log                *Log
	client             *http.Client
}

// Start starts engines at the same time and waits until all of them serve.
// They end with the test.
func Start(tb testing.TB, env Env, options ...Options) []*Engine {
	tb.Helper()
	lock(tb)
	engines := make([]*Engine, len(options))
	for i, o := range options {
		if o.Name == "" {
			o.Name = fmt.Sprintf("engine%d", i)
		}
		if o.Model == "" {
			o.Model = "qwen"
		}
		if o.Blocks == 0 {
			o.Blocks = 2000
		}
		if o.BlockSize == 0 {
			o.BlockSize = 32
		}
		if o.MaxModelLen == 0 {
			o.MaxModelLen = 4096
		}
		e := &Engine{Options: o, env: env, tb: tb, log: &Log{}, client: &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 16, IdleConnTimeout: time.Second}}}
		e.port, e.events, e.repl = freePort(tb), freePort(tb), freePort(tb)
		engines[i] = e
		tb.Cleanup(func() {
			e.Kill()
			e.client.CloseIdleConnections()
			if tb.Failed() {
				tb.Logf("%s wrote:\n%s", e.Name, e.log.Tail(4<<10))
			}
		})
		e.Launch()
	}
	for _, e := range engines {
		e.WaitReady()
	}
	return engines
}

// Launch starts the process, for the first time or again on the same ports,
// and does not wait for it.
func (e *Engine) Launch() {
	e.tb.Helper()
	args := e.args()
	e.tb.Logf("%s: vllm %s", e.Name, strings.Join(args, " "))
	e.cmd = exec.Command(filepath.Join(e.env.Venv, "bin", "vllm"), args...)
	e.cmd.Env = slices.Concat(os.Environ(), variables, e.Env)
	e.cmd.Stdout, e.cmd.Stderr = e.log, e.log
	// A group of its own: the engine core is a child process of the server.
	e.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := e.cmd.Start(); err != nil {
		e.tb.Fatalf("start %s: %v", e.Name, err)
	}
	note(e.tb, e.cmd.Process.Pid)
	e.done = make(chan struct{})
	go func(cmd *exec.Cmd, done chan struct{}) {
		_ = cmd.Wait()
		close(done)
	}(e.cmd, e.done)
}

// variables of every engine.
var variables = []string{
	"VLLM_CPU_KVCACHE_SPACE=1", "VLLM_CPU_OMP_THREADS_BIND=nobind", "OMP_NUM_THREADS=1", "HF_HUB_OFFLINE=1", "TRANSFORMERS_OFFLINE=1",
	"VLLM_SERVER_DEV_MODE=1", "VLLM_NO_USAGE_STATS=1", "DO_NOT_TRACK=1",
}

// Command is the command line of the engine as a reader would type it.
func (e *Engine) Command() string {
	parts := slices.Concat(variables, e.Env, []string{filepath.Join(e.env.Venv, "bin", "vllm")}, e.args())
	for i, p := range parts {
		if strings.ContainsAny(p, "{* ") {
			parts[i] = "'" + p + "'"
		}
	}
	return strings.Join(parts, " ")
}

func (e *Engine) args() []string {
	args := []string{
		"serve", e.env.Model(e.Model), "--served-model-name", e.Model, "--load-format", "dummy", "--dtype", "bfloat16", "--enforce-eager",
		"--host", "127.0.0.1", "--port", strconv.Itoa(e.port), "--max-model-len", strconv.Itoa(e.MaxModelLen),
		"--block-size", strconv.Itoa(e.BlockSize), "--num-gpu-blocks-override", strconv.Itoa(e.Blocks), "--enable-prompt-tokens-details",
	}
	if !e.NoEvents {
		// vLLM binds only what has a star in it.
		config := map[string]any{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": fmt.Sprintf("tcp://*:%d", e.events)}
		if !e.NoReplay {
			config["replay_endpoint"] = fmt.Sprintf("tcp://*:%d", e.repl)
		}
		if e.BufferSteps > 0 {
			config["buffer_steps"] = e.BufferSteps
		}
		text, err := json.Marshal(config)
		if err != nil {
			e.tb.Fatal(err)
		}
		args = append(args, "--kv-events-config", string(text))
	}
	if len(e.LoRAs) > 0 {
		args = append(args, "--enable-lora", "--max-lora-rank", "8", "--lora-modules")
		for _, name := range slices.Sorted(maps.Keys(e.LoRAs)) { // their order numbers them
			args = append(args, name+"="+e.env.Model(e.LoRAs[name]))
		}
	}
	return append(args, e.Args...)
}

// WaitReady waits until the engine answers its health check.
func (e *Engine) WaitReady() {
	e.tb.Helper()
	began := time.Now()
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for deadline := began.Add(startTime); ; {
		if status, _, err := e.Get("/health"); err == nil && status == http.StatusOK {
			e.tb.Logf("%s: ready after %.0f s", e.Name, time.Since(began).Seconds())
			return
		}
		select {
		case <-e.done:
			e.tb.Fatalf("%s ended before it was ready", e.Name)
		case <-tick.C:
		}
		if time.Now().After(deadline) {
			e.tb.Fatalf("%s is not ready after %v", e.Name, startTime)
		}
	}
}

// Kill ends the engine and its children at once, like a node that is lost.
func (e *Engine) Kill() {
	if e.cmd == nil {
		return
	}
	_ = syscall.Kill(-e.cmd.Process.Pid, syscall.SIGKILL)
	<-e.done
	e.cmd = nil
}

// Restart kills the engine and starts it again on the same addresses.
func (e *Engine) Restart() {
	e.tb.Helper()
	e.Kill()
	e.Launch()
	e.WaitReady()
}

// Addr is host:port of the HTTP server, URL its base URL.
func (e *Engine) Addr() string { return net.JoinHostPort("127.0.0.1", strconv.Itoa(e.port)) }

// URL is the base URL of the HTTP server.
func (e *Engine) URL() string { return "http://" + e.Addr() }

// Events is the ZMQ address of the event publisher, empty if there is none.
func (e *Engine) Events() string {
	if e.NoEvents {
		return ""
	}
	return fmt.Sprintf("tcp://127.0.0.1:%d", e.events)
}

// Replay is the ZMQ address of the replay socket, empty if there is none.
func (e *Engine) Replay() string {
	if e.NoEvents || e.NoReplay {
		return ""
	}
	return fmt.Sprintf("tcp://127.0.0.1:%d", e.repl)
}

// Log is what the engine wrote.
func (e *Engine) Log() *Log { return e.log }

// Get asks the engine itself.
func (e *Engine) Get(path string) (status int, body []byte, err error) {
	return e.do(http.MethodGet, path, nil)
}

// Post sends JSON to the engine itself.
func (e *Engine) Post(path string, body []byte) (status int, answer []byte, err error) {
	return e.do(http.MethodPost, path, body)
}

func (e *Engine) do(method, path string, body []byte) (int, []byte, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, method, e.URL()+path, bytes.NewReader(body))
	if err != nil {
		return 0, nil, err
	}
	if body != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	resp, err := e.client.Do(req)
	if err != nil {
		return 0, nil, err
	}
	defer resp.Body.Close()
	answer, err := io.ReadAll(resp.Body)
	return resp.StatusCode, answer, err
}

// ResetPrefixCache empties the prefix cache through the engine's own route. It
// fails the test if the engine refuses, which it does while it has requests.
func (e *Engine) ResetPrefixCache() {
	e.tb.Helper()
	if status, body, err := e.Post("/reset_prefix_cache", nil); err != nil || status != http.StatusOK || !bytes.Contains(body, []byte("true")) {
		e.tb.Fatalf("reset the prefix cache of %s: status %d %v %.200s", e.Name, status, err, body)
	}
}

// note writes the process group into $KINFERENCE_VLLM_PIDS, so that the script
// can end what a test that was killed left behind.
func note(tb testing.TB, pid int) {
	file := os.Getenv("KINFERENCE_VLLM_PIDS")
	if file == "" {
		return
	}
	f, err := os.OpenFile(file, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644)
	if err != nil {
		tb.Fatal(err)
	}
	defer f.Close()
	fmt.Fprintln(f, pid)
}

var handed sync.Map // ports that freePort gave out

// freePort is a loopback port that was free a moment ago and that no other
// engine of this process got.
func freePort(tb testing.TB) int {
	tb.Helper()
	for {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			tb.Fatal(err)
		}
		port := l.Addr().(*net.TCPAddr).Port
		l.Close()
		if _, used := handed.LoadOrStore(port, true); !used {
			return port
		}
	}
}

// Log is output that can be read while it is written. It keeps the last MiB.
type Log struct {
	mu sync.Mutex
	b  []byte
}

// Write implements io.Writer.
func (l *Log) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.b = append(l.b, p...)
	if n := len(l.b) - 1<<20; n > 0 {
		l.b = append(l.b[:0], l.b[n:]...)
	}
	return len(p), nil
}

// Tail is the last n bytes.
func (l *Log) Tail(n int) string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return string(l.b[max(0, len(l.b)-n):])
}
