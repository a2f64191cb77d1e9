package vllm_test

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kinference/kinference/internal/vllm"
	"github.com/kinference/kinference/internal/zmtp"
)

// twinEvents reads the events of one side.
type twinEvents struct {
	conn *zmtp.Conn
	done chan struct{}

	mu      sync.Mutex
	batches []vllm.Batch
	seqs    []uint64
	err     error
}

// subscribe follows a side's events until the test ends or stop is called.
func (s *twin) subscribe(t *testing.T) *twinEvents {
	t.Helper()
	conn, err := zmtp.Dial(context.Background(), s.events, zmtp.Sub, zmtp.Options{})
	if err != nil {
		t.Fatalf("%s: %v", s.name, err)
	}
	if err := conn.Subscribe(""); err != nil {
		t.Fatalf("%s: %v", s.name, err)
	}
	r := &twinEvents{conn: conn, done: make(chan struct{})}
	go func() {
		defer close(r.done)
		for {
			frames, err := conn.Recv()
			if err != nil {
				return
			}
			seq, b, err := decodeBatch(frames)
			r.mu.Lock()
			if err != nil {
				r.err = err
			} else {
				r.batches, r.seqs = append(r.batches, b), append(r.seqs, seq)
			}
			r.mu.Unlock()
		}
	}()
	t.Cleanup(r.stop)
	return r
}

func (r *twinEvents) stop() {
	r.conn.Close()
	<-r.done
}

func decodeBatch(frames [][]byte) (uint64, vllm.Batch, error) {
	_, seq, payload, err := vllm.ParseEvent(frames)
	if err != nil {
		return 0, vllm.Batch{}, err
	}
	var d vllm.Decoder
	var b vllm.Batch // its own memory: it is kept
	if err := d.Decode(payload, &b); err != nil {
		return 0, vllm.Batch{}, err
	}
	if b.Skipped > 0 {
		return 0, vllm.Batch{}, fmt.Errorf("%d events of batch %d are not understood", b.Skipped, seq)
	}
	return seq, b, nil
}

// has tells whether a block that starts with token was stored.
func (r *twinEvents) has(token uint32) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, b := range r.batches {
		for _, e := range b.Events {
			if len(e.Tokens) > 0 && e.Tokens[0] == token {
				return true
			}
		}
	}
	return false
}

// take returns the batches since the last take.
func (r *twinEvents) take(t *testing.T) ([]vllm.Batch, []uint64) {
	t.Helper()
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.err != nil {
		t.Fatal(r.err)
	}
	b, s := r.batches, r.seqs
	r.batches, r.seqs = nil, nil
	return b, s
}

// watch follows the events of both sides, in one test.
type watch struct {
	*twins
	events [2]*twinEvents
	names  [2]map[uint64]string // of blocks, in the order of their first event
	keyed  [2]map[uint64]bool   // blocks of chains with an adapter
	fences int
	next   [2]uint64 // sequence numbers
}

func (p *twins) watch(t *testing.T) *watch {
	t.Helper()
	w := &watch{twins: p}
	w.attach(t)
	return w
}

// attach subscribes and waits until both sides' events arrive.
func (w *watch) attach(t *testing.T) {
	t.Helper()
	w.events = [2]*twinEvents{w.real.subscribe(t), w.sim.subscribe(t)}
	w.names = [2]map[uint64]string{{}, {}}
	w.keyed = [2]map[uint64]bool{{}, {}}
	var last uint32
	wait(t, "events arrive from both", func() bool {
		if last != 0 && w.events[0].has(last) && w.events[1].has(last) {
			return true
		}
		last = w.fence(t)
		return false
	})
	for i, e := range w.events {
		_, seqs := e.take(t)
		w.next[i] = seqs[len(seqs)-1] + 1
	}
}

// fence sends a prompt of one new block and returns its first token. When its
// event has come, so have all events before.
func (w *watch) fence(t *testing.T) uint32 {
	t.Helper()
	first := 100_000 + 40*w.fences
	w.fences++
	if first > 150_000 {
		t.Fatal("too many fences")
	}
	w.each(func(s *twin) { tallyOf(t, s.do(t, diffPrompt{ids: idSpan(first, w.block+1), output: 1}.call())) })
	return uint32(first)
}

// diffEvent is an event with names for hashes.
type diffEvent struct {
	Kind      string
	Blocks    []string
	Parent    string
	Tokens    []uint32
	BlockSize int
	Adapter   string
	Medium    string
	Keys      [][]vllm.ExtraKey
	Group     int
	Spec      string
	Window    int
	Locality  string
}

// named gives the events of a batch names instead of hashes.
func named(names map[uint64]string, events []vllm.Event) []diffEvent {
	var out []diffEvent
	for _, e := range events {
		d := diffEvent{Kind: e.Kind.String(), Tokens: e.Tokens, BlockSize: e.BlockSize, Medium: e.Medium, Group: e.Group, Spec: e.SpecKind,
			Window: e.SlidingWindow, Locality: e.Locality, Adapter: fmt.Sprint(e.LoRAID, " ", e.LoRAName)}
		for _, keys := range e.ExtraKeys {
			d.Keys = append(d.Keys, append([]vllm.ExtraKey{}, keys...))
		}
		if e.HasParent {
			d.Parent = names[e.Parent]
			if d.Parent == "" {
				d.Parent = fmt.Sprintf("unknown %d", e.Parent)
			}
		}
		for _, h := range e.Hashes {
			n, ok := names[h]
			switch {
			case ok:
			case e.Kind == vllm.BlockStored:
				n = fmt.Sprint("block", len(names))
				names[h] = n
			default:
				n = fmt.Sprintf("unknown %d", h)
			}
			d.Blocks = append(d.Blocks, n)
		}
		out = append(out, d)
	}
	return out
}

// compare waits until all events until now have come, and compares them: their
// order, their batches and all of their fields.
func (w *watch) compare(t *testing.T) {
	t.Helper()
	token := w.fence(t)
	var got [2][]string
	var hashes [2][]uint64
	for i, e := range w.events {
		wait(t, "events of the fence", func() bool { return e.has(token) })
		batches, seqs := e.take(t)
		for j, b := range batches {
			if seqs[j] != w.next[i] {
				t.Errorf("%s: batch %d, want %d", [2]string{"real", "sim"}[i], seqs[j], w.next[i])
			}
			w.next[i] = seqs[j] + 1
			for _, ev := range named(w.names[i], b.Events) {
				got[i] = append(got[i], oneLine(ev))
			}
			got[i] = append(got[i], fmt.Sprintf("batch of rank %d ends", b.Rank))
			hashes[i] = append(hashes[i], w.plain(i, b.Events)...)
		}
	}
	if d := cmp.Diff(got[0], got[1]); d != "" {
		t.Errorf("events differ (-real +sim):\n%s", shorten(d))
	}
	if d := cmp.Diff(hashes[0], hashes[1]); d != "" {
		t.Errorf("hashes differ (-real +sim):\n%s", shorten(d))
	}
}

// plain lists the hashes of stored blocks whose chains have no adapter: those are
// hashed with its folder, which the simulated worker does not have.
func (w *watch) plain(i int, events []vllm.Event) (out []uint64) {
	for _, e := range events {
		if e.Kind != vllm.BlockStored {
			continue
		}
		keyed := e.HasParent && w.keyed[i][e.Parent]
		keyed = keyed || e.LoRAName != ""
		for _, h := range e.Hashes {
			if w.keyed[i][h] = keyed; !keyed {
				out = append(out, h)
			}
		}
	}
	return out
}

// resync empties both caches and forgets the events until now.
func (w *watch) resync(t *testing.T) {
	t.Helper()
	w.reset(t)
	token := w.fence(t)
	for i, e := range w.events {
		wait(t, "events of the fence", func() bool { return e.has(token) })
		_, seqs := e.take(t)
		w.next[i] = seqs[len(seqs)-1] + 1
		clear(w.names[i])
	}
	w.reset(t)
	w.compare(t)
}

// reset empties both caches, as soon as nothing is in flight any more.
func (p *twins) reset(t *testing.T) {
	t.Helper()
	p.each(func(s *twin) {
		wait(t, s.name+": the prefix cache is reset", func() bool {
			return s.do(t, diffCall{method: "POST", path: "/reset_prefix_cache"}).body == `{"success":true}`
		})
	})
}

// shorten cuts long lines and long differences.
func shorten(d string) string {
	var b strings.Builder
	for i, line := range strings.Split(d, "\n") {
		if i == 200 {
			b.WriteString("…\n")
			break
		}
		if len(line) > 600 {
			line = line[:400] + "…" + line[len(line)-200:]
		}
		b.WriteString(line + "\n")
	}
	return b.String()
}

// both sends one prompt to both sides and compares usage; it returns that of
// the real one.
func (p *twins) both(t *testing.T, q diffPrompt) tally {
	t.Helper()
	var got [2]tally
	i := 0
	p.each(func(s *twin) {
		got[i] = tallyOf(t, s.do(t, q.call()))
		i++
	})
	if got[0] != got[1] {
		t.Errorf("%d tokens from %v: real %+v, sim %+v", len(q.ids), q.ids[:min(3, len(q.ids))], got[0], got[1])
	}
	return got[0]
}
