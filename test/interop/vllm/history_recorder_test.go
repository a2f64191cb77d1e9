package vllm_test

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/kinference/kinference/internal/kvhash"
	"github.com/kinference/kinference/internal/vllm"
	"github.com/kinference/kinference/test/interop/vllm/rig"
)

// recorder keeps all that engines publish, as testdata/recorder.py reads it:
// with libzmq and msgspec, beside and without our relay. It reads on while the
// relay is down, and a batch that it misses itself fails the test.
type recorder struct {
	tb testing.TB

	mu      sync.Mutex
	engines map[string]*recorded
	err     error
}

type recorded struct {
	ups   int // connections
	lives []lifetime
}

// record starts a recorder. It returns once it is connected to every engine;
// none may have published yet.
func record(tb testing.TB, env rig.Env, endpoints map[string]string) *recorder {
	tb.Helper()
	r := &recorder{tb: tb, engines: map[string]*recorded{}}
	args := []string{"testdata/recorder.py"}
	for name, endpoint := range endpoints {
		r.engines[name] = &recorded{}
		args = append(args, name+"="+endpoint)
	}
	cmd := exec.Command(filepath.Join(env.Venv, "bin", "python"), args...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	var stderr strings.Builder
	cmd.Stderr = &stderr
	stdin, err := cmd.StdinPipe()
	if err != nil {
		tb.Fatal(err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		tb.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		tb.Fatal(err)
	}
	read := make(chan struct{})
	go func() {
		defer close(read)
		r.read(stdout)
	}()
	tb.Cleanup(func() {
		stdin.Close()
		<-read
		if err := cmd.Wait(); err != nil {
			tb.Errorf("recorder: %v %s", err, stderr.String())
		}
	})
	for name := range endpoints {
		within(tb, "the recorder is connected to "+name, func() bool {
			r.mu.Lock()
			defer r.mu.Unlock()
			return r.engines[name].ups > 0
		})
	}
	return r
}

// recordedEvent is an event in vLLM's own words.
type recordedEvent struct {
	Type      string   `json:"type"`
	Hashes    []uint64 `json:"block_hashes"`
	Parent    *uint64  `json:"parent_block_hash"`
	Tokens    []uint32 `json:"token_ids"`
	BlockSize int      `json:"block_size"`
	Medium    *string  `json:"medium"`
	LoRA      *string  `json:"lora_name"`
	ExtraKeys [][]any  `json:"extra_keys"`
	Group     *int     `json:"group_idx"`
	Kind      *string  `json:"kv_cache_spec_kind"`
}

func (e recordedEvent) event() (vllm.Event, error) {
	out := vllm.NewEvent(vllm.AllBlocksCleared)
	switch e.Type {
	case "BlockStored":
		out.Kind = vllm.BlockStored
	case "BlockRemoved":
		out.Kind = vllm.BlockRemoved
	case "AllBlocksCleared":
		return out, nil
	default:
		return out, fmt.Errorf("event %q is new to this test", e.Type)
	}
	if e.Medium != nil && *e.Medium != "GPU" {
		return out, fmt.Errorf("medium %q is new to this test", *e.Medium)
	}
	out.Hashes, out.Tokens, out.BlockSize = e.Hashes, e.Tokens, e.BlockSize
	if e.Parent != nil {
		out.Parent, out.HasParent = *e.Parent, true
	}
	if e.Group != nil {
		out.Group = *e.Group
	}
	if e.LoRA != nil {
		out.LoRAName = *e.LoRA
	}
	if e.Kind != nil {
		out.SpecKind = *e.Kind
	}
	for _, keys := range e.ExtraKeys {
		var list []vllm.ExtraKey
		for _, k := range keys {
			text, ok := k.(string)
			if !ok {
				return out, fmt.Errorf("extra key %v is new to this test", k)
			}
			list = append(list, vllm.ExtraKey{Text: text})
		}
		out.ExtraKeys = append(out.ExtraKeys, list)
	}
	return out, nil
}

func (r *recorder) read(from io.Reader) {
	lines := bufio.NewReaderSize(from, 1<<20)
	for {
		raw, err := lines.ReadBytes('\n')
		if err != nil {
			return
		}
		if err := r.take(raw); err != nil {
			r.mu.Lock()
			if r.err == nil {
				r.err = err
			}
			r.mu.Unlock()
		}
	}
}

func (r *recorder) take(raw []byte) error {
	var line struct {
		Engine string
		Up     bool
		Seq    int
		Batch  []json.RawMessage
	}
	if err := json.Unmarshal(raw, &line); err != nil {
		return err
	}
	var b vllm.Batch
	if !line.Up {
		var events []recordedEvent
		if len(line.Batch) < 2 {
			return fmt.Errorf("batch of %d parts", len(line.Batch))
		}
		if err := json.Unmarshal(line.Batch[0], &b.TS); err != nil {
			return err
		}
		if err := json.Unmarshal(line.Batch[1], &events); err != nil {
			return fmt.Errorf("events of %s: %w: %.300s", line.Engine, err, line.Batch[1])
		}
		for _, e := range events {
			event, err := e.event()
			if err != nil {
				return err
			}
			b.Events = append(b.Events, event)
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	e := r.engines[line.Engine]
	if line.Up {
		e.ups++
		return nil
	}
	if line.Seq == 0 {
		e.lives = append(e.lives, nil)
	}
	n := len(e.lives) - 1
	if n < 0 || line.Seq != len(e.lives[n]) {
		return fmt.Errorf("the recorder itself missed batches of %s: %d came out of turn", line.Engine, line.Seq)
	}
	e.lives[n] = append(e.lives[n], b)
	return nil
}

// life is what the present process of an engine published, and how many came
// before it. A process that published nothing yet is not known.
func (r *recorder) life(name string) (l lifetime, before int) {
	r.tb.Helper()
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.err != nil {
		r.tb.Fatalf("recorder: %v", r.err)
	}
	lives := r.engines[name].lives
	if len(lives) == 0 {
		return nil, 0
	}
	return lives[len(lives)-1], len(lives) - 1
}

// batches is the number of batches of the present process.
func (r *recorder) batches(name string) int {
	l, _ := r.life(name)
	return len(l)
}

// total is the number of batches of all processes.
func (r *recorder) total(name string) (n int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, l := range r.engines[name].lives {
		n += len(l)
	}
	return n
}

// everything is every block that any of the engines announced in any life.
func (r *recorder) everything() map[kvhash.Hash]bool {
	r.tb.Helper()
	r.mu.Lock()
	all := []lifetime{}
	for e := range maps.Values(r.engines) {
		all = append(all, e.lives...)
	}
	r.mu.Unlock()
	seen := map[kvhash.Hash]bool{}
	for _, l := range all {
		if _, err := l.truth(seen); err != nil {
			r.tb.Fatal(err)
		}
	}
	return seen
}

// storedAt is the engine's time of the batch that announced a block; 0: none did.
func (r *recorder) storedAt(name string, tokens []uint32) float64 {
	l, _ := r.life(name)
	for i := len(l) - 1; i >= max(0, len(l)-200); i-- {
		for _, event := range l[i].Events {
			if event.Kind == vllm.BlockStored && len(event.Tokens) >= len(tokens) && slices.Equal(event.Tokens[:len(tokens)], tokens) {
				return l[i].TS
			}
		}
	}
	return 0
}

// patience bounds every wait: an engine that starts on a busy machine takes
// minutes.
const patience = 5 * time.Minute

// within polls cond until it holds.
func within(tb testing.TB, what string, cond func() bool) {
	tb.Helper()
	if !poll(cond) {
		tb.Fatalf("%s: not within %v", what, patience)
	}
}

func poll(cond func() bool) bool {
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for deadline := time.Now().Add(patience); !cond(); <-tick.C {
		if time.Now().After(deadline) {
			return false
		}
	}
	return true
}
