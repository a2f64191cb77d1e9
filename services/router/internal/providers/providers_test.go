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
	if table.InFlight(p) != 0 || table.TTFT(now, p) != time.Second || table.Full(now, p) != "" {
		t.Errorf("at first: %d in flight, %v, %q", table.InFlight(p), table.TTFT(now, p), table.Full(now, p))
	}
	table.Book(now, "a", "ns/p")
	table.Book(now, "a", "ns/p") // again after a failure elsewhere
	table.Book(now, "b", "ns/p")
	if table.InFlight(p) != 2 || table.Full(now, p) == "" {
		t.Errorf("two of two: %d, %q", table.InFlight(p), table.Full(now, p))
	}
	if !table.FirstToken(now, "a", 2*time.Second) || table.TTFT(now, p) != 1200*time.Millisecond || table.FirstToken(now, "x", time.Second) {
		t.Errorf("learned %v", table.TTFT(now, p))
	}
	table.Done("a")
	table.Done("a")
	table.Done("x")
	table.Keep([]*resources.Provider{p})
	if table.InFlight(p) != 1 || table.Full(now, p) != "" || table.TTFT(now, p) != 1200*time.Millisecond {
		t.Errorf("one left: %d, %q", table.InFlight(p), table.Full(now, p))
	}
	table.Keep(nil)
	table.Done("b") // of a provider that is gone
	if table.TTFT(now, p) != time.Second {
		t.Errorf("forgotten: %v", table.TTFT(now, p))
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
	if n := table.InFlight(p); n != 1801 {
		t.Errorf("%d requests in flight after a lease of 1800 s at one a second", n)
	}

	// Nor do the few of an ingress that has failed keep a provider from being asked.
	p.Spec.Concurrency = 2
	table = providers.Table{}
	table.Keep([]*resources.Provider{p})
	table.Book(now, "a", "ns/p")
	table.Book(now, "b", "ns/p")
	if table.Full(now.Add(30*time.Minute), p) == "" {
		t.Error("there is room before the lease has ended")
	}
	if now = now.Add(30*time.Minute + time.Second); table.Full(now, p) != "" || table.InFlight(p) != 0 {
		t.Errorf("%d requests in flight after the lease", table.InFlight(p))
	}
}

// A provider that was slow is asked again some time later.
func TestSlownessFades(t *testing.T) {
	var table providers.Table
	p := &resources.Provider{Name: "ns/p", Spec: &v1alpha1.InferenceProviderSpec{}}
	table.Keep([]*resources.Provider{p})
	now := time.Unix(1000, 0)
	table.Book(now, "a", "ns/p")
	table.FirstToken(now, "a", 21*time.Second)
	for after, want := range map[time.Duration]time.Duration{0: 5 * time.Second, 5 * time.Minute: 5 * time.Second, 15 * time.Minute: 3 * time.Second, 25 * time.Minute: 2 * time.Second} {
		if got := table.TTFT(now.Add(after), p); got.Round(time.Millisecond) != want {
			t.Errorf("after %v: %v, want %v", after, got, want)
		}
	}
	now = now.Add(15 * time.Minute)
	if table.FirstToken(now, "a", 3*time.Second); table.TTFT(now, p).Round(time.Millisecond) != 3*time.Second {
		t.Errorf("it goes on at %v", table.TTFT(now, p))
	}
}
