package ledger_test

import (
	"fmt"
	"path/filepath"
	"testing"
	"time"

	"github.com/kinference/kinference/internal/testenv"
	usagev1 "github.com/kinference/kinference/proto/gen/kinference/usage/v1"
	"github.com/kinference/kinference/services/accounting/internal/ledger"
)

// BenchmarkAdd is the time for a batch of 512 events of 20 tenants.
//
//	go test -run '^$' -bench Add -benchtime 20x ./services/accounting/internal/ledger
func BenchmarkAdd(b *testing.B) {
	for name, place := range map[string]func() string{
		"sqlite":   func() string { return filepath.Join(b.TempDir(), "ledger.db") },
		"postgres": func() string { return testenv.Postgres(b).URL },
	} {
		b.Run(name, func(b *testing.B) {
			l, err := ledger.Open(b.Context(), place())
			if err != nil {
				b.Fatal(err)
			}
			defer l.Close()
			n := 0
			for b.Loop() {
				b.StopTimer()
				batch := make([]*usagev1.Usage, 512)
				for i := range batch {
					batch[i] = event(n, fmt.Sprintf("ns/t%d", n%20), time.Duration(n)*time.Millisecond)
					n++
				}
				b.StartTimer()
				if _, err := l.Add(b.Context(), batch); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric(float64(n)/b.Elapsed().Seconds(), "events/s")
		})
	}
}
