package schedule_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/kinference/kinference/internal/kvhash"
	"github.com/kinference/kinference/internal/schedule"
)

// peer is a fleet of three workers under one of the policies of other products.
type peer struct {
	t   *testing.T
	s   *schedule.Scheduler
	now time.Time
	n   int
}

func newPeerFleet(t *testing.T, policy string) *peer {
	t.Helper()
	s, err := schedule.New(schedule.Settings{Policy: policy, Seed: 1})
	if err != nil {
		t.Fatal(err)
	}
	return &peer{t: t, s: s, now: time.Unix(1_700_000_000, 0)}
}

// send routes a prompt of blocks that begin with those of a prefix, and returns
// the worker; matched and waiting are what each worker shows.
func (p *peer) send(prefix, blocks int, matched, waiting [3]int) int {
	p.t.Helper()
	p.n++
	hashes := make([]kvhash.Hash, blocks)
	h := kvhash.Extra(0, fmt.Sprint("prefix", prefix))
	for i := range hashes {
		h = kvhash.Extra(h, "block")
		hashes[i] = h
	}
	var c []schedule.Candidate
	for i := range 3 {
		c = append(c, schedule.Candidate{Worker: fmt.Sprint("w", i), Tokens: 16*blocks + 5, BlockSize: 16, Hashes: hashes, TotalBlocks: 1000,
			GPUTokens: 16 * matched[i], Load: schedule.Load{Known: true, Waiting: float64(waiting[i])}})
	}
	d := p.s.Decide(p.now, schedule.Request{ID: fmt.Sprint("r", p.n)}, c)
	if len(d.Order) != 3 {
		p.t.Fatalf("order %v", d.Order)
	}
	return d.Order[0]
}

func TestHashPeers(t *testing.T) {
	var none [3]int
	plain := newPeerFleet(t, schedule.ConsistentHash)
	first := plain.send(1, 10, none, none)
	for range 20 {
		if got := plain.send(1, 10, none, none); got != first {
			t.Fatal("one prefix led to two workers")
		}
	}
	// Of 12 requests in flight none may hold more than 1.25 of a third: 5.
	bounded := newPeerFleet(t, schedule.BoundedHash)
	count := map[int]int{}
	for range 12 {
		count[bounded.send(1, 10, none, none)]++
	}
	for w, n := range count {
		if n > 5 {
			t.Errorf("worker %d has %d of 12 requests", w, n)
		}
	}
}

func TestLLMDPeers(t *testing.T) {
	var none [3]int
	// The whole prompt was sent there: 3 outweighs a queue's 2, until the queue
	// and something else speak against it.
	approx := newPeerFleet(t, schedule.LLMD)
	home := approx.send(1, 10, none, none)
	var queue [3]int
	queue[home] = 5
	if got := approx.send(1, 10, none, queue); got != home {
		t.Errorf("worker %d, want %d which holds all of the prompt", got, home)
	}
	if got := approx.send(2, 10, none, queue); got == home {
		t.Error("a prompt of its own went to the only worker with a queue")
	}
	precise := newPeerFleet(t, schedule.LLMDPrecise)
	if got := precise.send(1, 10, [3]int{0, 4, 0}, [3]int{0, 9, 0}); got != 1 {
		t.Errorf("worker %d, want 1: the only one that holds any of the prompt", got)
	}
}

func TestDynamoPeer(t *testing.T) {
	var none [3]int
	p := newPeerFleet(t, schedule.Dynamo)
	// Nothing to prefill and 20 blocks to hold cost less than 20 and 20.
	if got := p.send(1, 20, [3]int{20, 0, 0}, none); got != 0 {
		t.Fatalf("worker %d, want 0, which holds the prompt", got)
	}
	// 5 to prefill and 40 to hold there, 20 and 20 elsewhere.
	if got := p.send(2, 20, [3]int{15, 0, 0}, none); got == 0 {
		t.Error("worker 0 costs 45, the idle ones 40")
	}
	// Shared blocks are held once: 2 to prefill and 20 to hold.
	if got := p.send(1, 20, [3]int{18, 0, 0}, none); got != 0 {
		t.Errorf("worker %d, want 0, where the prompt is in use", got)
	}
}

func TestSGLangPeer(t *testing.T) {
	var none [3]int
	p := newPeerFleet(t, schedule.SGLang)
	home := p.send(1, 10, none, none)
	for range 30 {
		if got := p.send(1, 10, none, none); got != home {
			t.Fatal("a known prefix left its worker below the thresholds")
		}
	}
	if got := p.send(2, 10, none, none); got == home {
		t.Error("a new prefix went to the worker that had got most")
	}
	// Beyond 64 more than the least loaded, load decides.
	away := false
	for range 60 {
		away = away || p.send(1, 10, none, none) != home
	}
	if !away {
		t.Error("nothing left a worker with more than 64 requests more than another")
	}
}
