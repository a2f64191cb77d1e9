package limiter_test

import (
	"context"
	"strconv"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kinference/kinference/internal/limit"
	"github.com/kinference/kinference/services/limiter"
	"github.com/kinference/kinference/services/limiter/internal/memory"
)

// BenchmarkReserve: what ingress pays for a request with six buckets, from
// leases and by a trip to a limiter that counts in memory.
//
//	go test ./services/limiter -bench Reserve -run '^$'
func BenchmarkReserve(b *testing.B) {
	for name, no := range map[string]bool{"leases": false, "trip": true} {
		b.Run(name, func(b *testing.B) {
			rpc, _ := serve(b, limiter.Config{})
			c := client(b, rpc, limit.Settings{NoLeases: no, Timeout: 5 * time.Second})
			cs := charges()
			var n atomic.Int64
			b.ReportAllocs()
			b.ResetTimer()
			b.RunParallel(func(pb *testing.PB) {
				for pb.Next() {
					a, err := c.Reserve(context.Background(), limit.Request{Organisation: "ns/acme", ID: strconv.FormatInt(n.Add(1), 36), Charges: cs})
					if err != nil || !a.Granted() {
						b.Errorf("got %+v, %v", a, err)
						return
					}
					a.Reservation.Commit(nil)
				}
			})
		})
	}
}

// BenchmarkMemory: a reservation of six buckets and its settlement in the store
// of the all-in-one.
func BenchmarkMemory(b *testing.B) {
	s := memory.New(1<<40, nil)
	cs := levels(1)
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		id := strconv.Itoa(i)
		if _, err := s.Reserve(context.Background(), "acme", id, 1e9, cs); err != nil {
			b.Fatal(err)
		}
		if _, err := s.Commit(context.Background(), "acme", id, cs); err != nil {
			b.Fatal(err)
		}
	}
}
