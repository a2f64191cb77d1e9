package fleetsim_test

import (
	"context"
	"fmt"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/go-zeromq/zmq4"
	"github.com/google/go-cmp/cmp"

	"github.com/kinference/kinference/internal/fleetsim"
	"github.com/kinference/kinference/internal/fleetsim/engine"
	"github.com/kinference/kinference/internal/vllm"
)

// subscriber is a ZMQ client of one rank's events.
type subscriber struct {
	t    testing.TB
	sock zmq4.Socket
}

// subscribe returns when the worker knows of the subscription.
func subscribe(t testing.TB, w *fleetsim.Worker, rank int, topic string) *subscriber {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	sock := zmq4.NewSub(ctx)
	t.Cleanup(func() { sock.Close(); cancel() })
	before := w.EventStats(rank).Subscriptions
	if err := sock.Dial(w.EventsAddr(rank)); err != nil {
		t.Fatal(err)
	}
	if err := sock.SetOption(zmq4.OptionSubscribe, topic); err != nil {
		t.Fatal(err)
	}
	eventually(t, "subscription", func() bool { return w.EventStats(rank).Subscriptions > before })
	return &subscriber{t, sock}
}

func (s *subscriber) next() (seq uint64, b vllm.Batch) {
	s.t.Helper()
	msg, err := s.sock.Recv()
	if err != nil {
		s.t.Fatal(err)
	}
	_, seq, payload, err := vllm.ParseEvent(msg.Frames)
	if err != nil {
		s.t.Fatal(err)
	}
	var d vllm.Decoder
	if err := d.Decode(payload, &b); err != nil || b.Skipped > 0 {
		s.t.Fatal(err, b.Skipped)
	}
	return seq, b
}

// replay asks for all batches from start on, as a DEALER.
func replay(t testing.TB, w *fleetsim.Worker, rank int, start uint64) (seqs []uint64, frames []int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	sock := zmq4.NewDealer(ctx)
	defer sock.Close()
	if err := sock.Dial(w.ReplayAddr(rank)); err != nil {
		t.Fatal(err)
	}
	// What is malformed is ignored.
	for _, bad := range [][][]byte{{[]byte("x")}, {nil, []byte("short")}, {nil, nil, nil, nil}} {
		if err := sock.SendMulti(zmq4.NewMsgFrom(bad...)); err != nil {
			t.Fatal(err)
		}
	}
	if err := sock.SendMulti(zmq4.NewMsgFrom(vllm.ReplayRequest(start)...)); err != nil {
		t.Fatal(err)
	}
	for {
		msg, err := sock.Recv()
		if err != nil {
			t.Fatal(err)
		}
		frames = append(frames, len(msg.Frames))
		seq, _, end, err := vllm.ParseReplay(msg.Frames)
		if err != nil {
			t.Fatal(err)
		}
		if end {
			return seqs, frames
		}
		seqs = append(seqs, seq)
	}
}

func TestEvents(t *testing.T) {
	w := start(t, fleetsim.Config{Topic: "kv@test"})
	sub := subscribe(t, w, 0, "kv@")
	subscribe(t, w, 0, "elsewhere")
	post(t, w, "/v1/completions", `{"prompt":`+ids(100, 40)+`,"max_tokens":10,"cache_salt":"s"}`)
	seq, b := sub.next()
	if seq != 0 || b.Rank != 0 || len(b.Events) != 1 || time.Since(time.Unix(int64(b.TS), 0)) > time.Minute {
		t.Fatalf("seq %d: %+v", seq, b)
	}
	ev := b.Events[0]
	if ev.Kind != vllm.BlockStored || len(ev.Hashes) != 2 || len(ev.Tokens) != 32 || ev.Tokens[0] != 100 || ev.BlockSize != 16 || ev.HasParent ||
		ev.Medium != "GPU" || ev.Group != 0 || ev.SpecKind != "full_attention" || ev.LoRAID != -1 {
		t.Errorf("%+v", ev)
	}
	if d := cmp.Diff([][]vllm.ExtraKey{{{Text: "s"}}, nil}, ev.ExtraKeys); d != "" {
		t.Errorf("the salt is in the first block only (-want +got):\n%s", d)
	}
	parent := ev.Hashes[1]
	seq, b = sub.next()
	ev = b.Events[0]
	if seq != 1 || len(ev.Hashes) != 1 || !ev.HasParent || ev.Parent != parent || ev.Tokens[0] != 132 {
		t.Errorf("generated tokens fill block 2: seq %d %+v", seq, ev)
	}
	// A hit announces nothing but what is computed again.
	post(t, w, "/v1/completions", `{"prompt":`+ids(100, 41)+`,"max_tokens":1,"cache_salt":"s"}`)
	post(t, w, "/v1/completions", `{"prompt":`+ids(900, 16)+`,"max_tokens":1}`)
	if seq, b = sub.next(); seq != 2 || b.Events[0].Tokens[0] != 900 {
		t.Errorf("seq %d %+v", seq, b)
	}
	// The other subscriber got nothing.
	if st := w.EventStats(0); st.Batches != 3 || st.Subscriptions != 2 || st.Sent != 3 {
		t.Errorf("%+v", st)
	}
}

func TestReplay(t *testing.T) {
	for _, v := range []vllm.Version{vllm.V0_10, vllm.V0_23, vllm.V0_24, vllm.V0_26} {
		t.Run(v.String(), func(t *testing.T) {
			w := start(t, fleetsim.Config{BufferSteps: 4, Version: v})
			for i := range 6 {
				post(t, w, "/v1/completions", `{"prompt":`+ids(1000*i, 16)+`,"max_tokens":1}`)
			}
			want := 3 // "", seq, payload
			if v == vllm.V0_26 {
				want = 4
			}
			for _, c := range []struct {
				start uint64
				want  []uint64
			}{{4, []uint64{4, 5}}, {0, []uint64{2, 3, 4, 5}}, {6, nil}} {
				seqs, frames := replay(t, w, 0, c.start)
				if d := cmp.Diff(c.want, seqs); d != "" {
					t.Errorf("from %d (-want +got):\n%s", c.start, d)
				}
				for _, n := range frames {
					if n != want {
						t.Errorf("%d frames, want %d", n, want)
					}
				}
			}
		})
	}
}

// Before 0.23 events had no group: hybrids ran with one.
func TestGroups(t *testing.T) {
	p := small
	p.Groups = []engine.Group{{Kind: "full_attention"}, {Kind: "mamba"}, {Kind: "sliding_window", SlidingWindow: 32}}
	for _, c := range []struct {
		v    vllm.Version
		want []string
	}{
		{vllm.V0_19, []string{"-1 full 4"}},
		{vllm.V0_24, []string{"0 full_attention 4", "1 mamba 1", "2 sliding_window 2"}},
	} {
		w := start(t, fleetsim.Config{Profile: p, Version: c.v})
		sub := subscribe(t, w, 0, "")
		post(t, w, "/v1/completions", `{"prompt":`+ids(1, 70)+`,"max_tokens":1}`)
		_, b := sub.next()
		var got []string
		for _, ev := range b.Events {
			kind := ev.SpecKind
			if kind == "" {
				kind = "full"
			}
			if ev.Kind != vllm.BlockStored {
				continue
			}
			got = append(got, fmt.Sprint(ev.Group, " ", kind, " ", len(ev.Hashes)))
			if len(ev.Tokens) != 64 {
				t.Errorf("%+v", ev)
			}
		}
		if d := cmp.Diff(c.want, got); d != "" {
			t.Errorf("%s (-want +got):\n%s", c.v, d)
		}
	}
}

func TestRanks(t *testing.T) {
	w := start(t, fleetsim.Config{Ranks: 3, LoRAs: []string{"sql"}})
	var port [3]int
	for rank := range 3 {
		_, p, err := net.SplitHostPort(strings.TrimPrefix(w.EventsAddr(rank), "tcp://"))
		if err != nil {
			t.Fatal(err)
		}
		fmt.Sscan(p, &port[rank])
	}
	if port[1] != port[0]+1 || port[2] != port[0]+2 || w.EventsAddr(3) != "" {
		t.Errorf("ports %v", port)
	}
	for rank := range 3 {
		sub := subscribe(t, w, rank, "")
		post(t, w, "/v1/completions", `{"model":"sql","prompt":`+ids(1, 16)+`,"max_tokens":1}`, "X-data-parallel-rank", fmt.Sprint(rank))
		seq, b := sub.next()
		if seq != 0 || b.Rank != rank || b.Events[0].LoRAName != "sql" || b.Events[0].LoRAID != 1 {
			t.Errorf("rank %d: seq %d %+v", rank, seq, b)
		}
	}
}

func TestRestart(t *testing.T) {
	w := start(t, fleetsim.Config{})
	url, events, replays := w.URL(), w.EventsAddr(0), w.ReplayAddr(0)
	prompt := `{"prompt":` + ids(1, 33) + `,"max_tokens":1}`
	sub := subscribe(t, w, 0, "")
	post(t, w, "/v1/completions", prompt)
	_, before := sub.next()
	if err := w.RestartEngine(); err != nil {
		t.Fatal(err)
	}
	if w.URL() != url || w.EventsAddr(0) != events || w.ReplayAddr(0) != replays {
		t.Errorf("addresses changed: %s %s %s", w.URL(), w.EventsAddr(0), w.ReplayAddr(0))
	}
	if msg, err := sub.sock.Recv(); err == nil {
		t.Errorf("the dying engine said %q", msg.Frames)
	}
	sub = subscribe(t, w, 0, "")
	_, _, text := post(t, w, "/v1/completions", prompt)
	if c := decode[completion](t, text); c.Usage.Details.Cached != 0 {
		t.Errorf("the cache survived: %s", text)
	}
	seq, after := sub.next()
	if seq != 0 || after.Events[0].Hashes[0] == before.Events[0].Hashes[0] {
		t.Errorf("seq %d, hashes %d and %d", seq, before.Events[0].Hashes[0], after.Events[0].Hashes[0])
	}
	if seqs, _ := replay(t, w, 0, 0); len(seqs) != 1 {
		t.Errorf("replay %v", seqs)
	}
	w.Stop()
	w.Stop()
	if err := w.Restart(); err != nil {
		t.Fatal(err)
	}
	if status, _, _ := get(t, w, "/health"); status != 200 {
		t.Error(status)
	}
}

// The clearing of an idle engine is announced with the next request.
func TestResetPrefixCache(t *testing.T) {
	w := start(t, fleetsim.Config{DevMode: true})
	sub := subscribe(t, w, 0, "")
	post(t, w, "/v1/completions", `{"prompt":`+ids(1, 33)+`,"max_tokens":1}`)
	sub.next()
	if _, _, text := post(t, w, "/reset_prefix_cache", ""); text != `{"success":true}` {
		t.Error(text)
	}
	if n := w.EventStats(0).Batches; n != 1 {
		t.Errorf("%d batches", n)
	}
	post(t, w, "/v1/completions", `{"prompt":`+ids(1, 33)+`,"max_tokens":1}`)
	_, b := sub.next()
	if len(b.Events) != 2 || b.Events[0].Kind != vllm.AllBlocksCleared || b.Events[1].Kind != vllm.BlockStored {
		t.Errorf("%+v", b)
	}
}

func TestEventFaults(t *testing.T) {
	seqs := func(f fleetsim.Faults, n int) (got []uint64) {
		w := start(t, fleetsim.Config{Faults: f})
		sub := subscribe(t, w, 0, "")
		for i := range 4 {
			post(t, w, "/v1/completions", `{"prompt":`+ids(1000*i, 16)+`,"max_tokens":1}`)
			w.SetFaults(fleetsim.Faults{}) // only the first batch is hit
		}
		for range n {
			seq, _ := sub.next()
			got = append(got, seq)
		}
		if all, _ := replay(t, w, 0, 0); len(all) != 4 {
			t.Errorf("the replay buffer has %v", all)
		}
		return got
	}
	for _, c := range []struct {
		f    fleetsim.Faults
		want []uint64
	}{
		{fleetsim.Faults{DropEvents: 1}, []uint64{1, 2, 3}},
		{fleetsim.Faults{DropNext: 1}, []uint64{1, 2, 3}},
		{fleetsim.Faults{ReorderEvents: 1}, []uint64{1, 0, 2, 3}},
		{fleetsim.Faults{DuplicateEvents: 1}, []uint64{0, 0, 1, 2, 3}},
	} {
		if d := cmp.Diff(c.want, seqs(c.f, len(c.want))); d != "" {
			t.Errorf("%+v (-want +got):\n%s", c.f, d)
		}
	}
}

// Garbage on the event sockets harms nobody.
func TestBadPeers(t *testing.T) {
	w := start(t, fleetsim.Config{})
	for _, addr := range []string{w.EventsAddr(0), w.ReplayAddr(0)} {
		for _, text := range []string{"", "GET / HTTP/1.1\r\n\r\n", strings.Repeat("\xff", 100), "\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f"} {
			conn, err := net.Dial("tcp", strings.TrimPrefix(addr, "tcp://"))
			if err != nil {
				t.Fatal(err)
			}
			if _, err := conn.Write([]byte(text)); err != nil {
				t.Error(err)
			}
			conn.Close()
		}
	}
	sub := subscribe(t, w, 0, "")
	post(t, w, "/v1/completions", `{"prompt":`+ids(1, 16)+`,"max_tokens":1}`)
	if seq, _ := sub.next(); seq != 0 {
		t.Error(seq)
	}
}
