package providers_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/kinference/kinference/api/v1alpha1"
	"github.com/kinference/kinference/internal/resources"
	"github.com/kinference/kinference/services/router/internal/providers"
)

func TestTable(t *testing.T) {
	var table providers.Table
	p := &resources.Provider{Name: "ns/p", Spec: &v1alpha1.InferenceProviderSpec{Concurrency: 2}}
	now := time.Unix(1000, 0)
	table.Book(now, "early", "ns/p") // not known yet
	table.Keep([]*resources.Provider{p})
	if table.InFlight(p) != 0 || table.TTFT(p) != time.Second || table.Full(p) != "" {
		t.Errorf("at first: %d in flight, %v, %q", table.InFlight(p), table.TTFT(p), table.Full(p))
	}
	table.Book(now, "a", "ns/p")
	table.Book(now, "a", "ns/p") // again after a failure elsewhere
	table.Book(now, "b", "ns/p")
	if table.InFlight(p) != 2 || table.Full(p) == "" {
		t.Errorf("two of two: %d, %q", table.InFlight(p), table.Full(p))
	}
	if !table.FirstToken("a", 2*time.Second) || table.TTFT(p) != 1200*time.Millisecond || table.FirstToken("x", time.Second) {
		t.Errorf("learned %v", table.TTFT(p))
	}
	table.Done("a")
	table.Done("a")
	table.Done("x")
	table.Keep([]*resources.Provider{p})
	if table.InFlight(p) != 1 || table.Full(p) != "" || table.TTFT(p) != 1200*time.Millisecond {
		t.Errorf("one left: %d, %q", table.InFlight(p), table.Full(p))
	}
	table.Keep(nil)
	table.Done("b") // of a provider that is gone
	if table.TTFT(p) != time.Second {
		t.Errorf("forgotten: %v", table.TTFT(p))
	}
}

// Requests whose end nobody reports do not stay for ever.
func TestLease(t *testing.T) {
	var table providers.Table
	p := &resources.Provider{Name: "ns/p", Spec: &v1alpha1.InferenceProviderSpec{}}
	table.Keep([]*resources.Provider{p})
	now := time.Unix(1000, 0)
	for i := range 5000 {
		now = now.Add(time.Second)
		table.Book(now, fmt.Sprint(i), "ns/p")
	}
	if n := table.InFlight(p); n > 3*1024 {
		t.Errorf("%d requests in flight after a lease of 1800 s at one a second", n)
	}
}
