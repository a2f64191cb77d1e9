package line

import (
	"fmt"
	"testing"
	"time"

	"github.com/kinference/kinference/internal/kvhash"
	"github.com/kinference/kinference/internal/schedule"
)

// noted notes whose turn came.
type noted struct {
	*schedule.Scheduler
	turns []string
	went  int
}

func (n *noted) Pass(now time.Time) []schedule.Dispatch {
	out := n.Scheduler.Pass(now)
	for _, d := range out {
		n.turns = append(n.turns, d.ID)
	}
	n.went += len(out)
	return out
}

// BenchmarkLongLine is what an event costs while many wait: one request ends, a pass
// lets another one go, and a new one comes.
//
//	go test -run - -bench LongLine ./services/router/internal/line
func BenchmarkLongLine(b *testing.B) {
	const workers, blocks = 16, 500
	for _, waiting := range []int{10, 100, 1000, 4000} {
		b.Run(fmt.Sprintf("waiting=%d", waiting), func(b *testing.B) {
			k2, err := schedule.New(schedule.Settings{Policy: schedule.K2, MaxWaiting: 10_000})
			if err != nil {
				b.Fatal(err)
			}
			s := &noted{Scheduler: k2}
			now := time.Now()
			l := New(s, Settings{MaxBytes: 1 << 40, Now: func() time.Time { return now }})
			n := 0
			come := func() {
				n++
				hashes := make([]kvhash.Hash, blocks)
				for i := range hashes {
					hashes[i] = kvhash.Hash(uint64(n%200)<<32 | uint64(i))
				}
				c := make([]schedule.Candidate, workers)
				for i := range c {
					c[i] = schedule.Candidate{Worker: fmt.Sprint("w", i), Profile: "p", Tokens: 16*blocks + 5, BlockSize: 16, Hashes: hashes, Class: "l40s", TotalBlocks: 10_000}
				}
				a := &Ask{
					Request: schedule.Request{ID: fmt.Sprint(n), Tenant: fmt.Sprint("t", n%7)}, Stays: func() (time.Duration, bool) { return 0, false },
					Choose: func(e []schedule.Estimate, rank func([]int)) ([]int, bool) {
						order := make([]int, len(e))
						for i := range order {
							order[i] = i
						}
						rank(order)
						return order, true
					},
				}
				if _, err := l.enter(a, found{c, func() {}}); err != nil {
					b.Fatal(err)
				}
			}
			pass := func() {
				l.mu.Lock()
				defer l.mu.Unlock()
				l.pass(now)
			}
			for l.Len() < waiting {
				come()
			}
			pass()
			b.ReportAllocs()
			for b.Loop() {
				now = now.Add(5 * time.Millisecond)
				if len(s.turns) > 0 {
					s.FirstToken(now, s.turns[0], time.Second)
					s.Done(now, s.turns[0], schedule.Outcome{OK: true, PromptTokens: -1, CachedTokens: -1, OutputTokens: 100})
					s.turns = s.turns[1:]
				}
				if l.Len() < waiting {
					come()
				}
				pass()
			}
			b.ReportMetric(float64(s.went)/float64(b.N), "dispatches/op")
		})
	}
}
