package ingress

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/kinference/kinference/internal/daemon"
	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
	"github.com/kinference/kinference/services/ingress/internal/meter"
)

// Ten thousand tenants and models leave a bounded number of series, each kind of
// which still counts all.
func TestTenantSeriesAreBounded(t *testing.T) {
	shell, err := daemon.NewShell(t.Context(), daemon.Settings{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(shell.Close)
	ctx := shell.Context(context.Background(), "ingress")
	m, err := newMetrics(daemon.Meter(ctx))
	if err != nil {
		t.Fatal(err)
	}
	now := time.Now()
	const n = 10_000
	for i := range n {
		r := &meter.Record{
			Tenants: []string{fmt.Sprintf("ns/tenant-%d", i*7919%n)}, Attempts: 1, Outcome: meter.OK, Received: now, Sent: now, FirstContent: now.Add(time.Second),
			FirstWritten: now.Add(time.Second), LastContent: now.Add(3 * time.Second), Ended: now.Add(3 * time.Second), Chunks: 5,
			Tokens: meter.Tokens{Input: meter.Report(10), Cached: meter.Report(4), Output: meter.Report(5)},
		}
		m.used(nil, ctx, r, fmt.Sprintf("model-%d", i%50)) //nolint:staticcheck // nil: the request had no span
	}
	page := httptest.NewRecorder()
	shell.Admin().ServeHTTP(page, httptest.NewRequest(http.MethodGet, "/metrics", nil))
	series, requests, tokens := 0, 0, 0
	tenants := map[string]bool{}
	for line := range strings.Lines(page.Body.String()) {
		if !strings.HasPrefix(line, "kinference_tenant_") {
			continue
		}
		series++
		_, rest, _ := strings.Cut(line, `tenant="`)
		name, _, _ := strings.Cut(rest, `"`)
		tenants[name] = true
		var value int
		fmt.Sscan(line[strings.LastIndexByte(line, ' ')+1:], &value)
		switch {
		case strings.HasPrefix(line, "kinference_tenant_requests_total"):
			requests += value
		case strings.HasPrefix(line, "kinference_tenant_tokens_total"):
			tokens += value
		}
	}
	t.Logf("%d series of %d tenants", series, len(tenants))
	if len(tenants) != maxTenants+1 || !tenants[otherTenant] || requests != n || tokens != n*15 {
		t.Errorf("%d tenants, %d requests, %d tokens", len(tenants), requests, tokens)
	}
	if most := (maxTenants + 1) * 50 * 120; series > most {
		t.Errorf("%d series", series)
	}
	if strings.Contains(page.Body.String(), "otel_metric_overflow") {
		t.Error("the SDK folded series, and lost their labels")
	}
}

// Thresholds of objectives are buckets, each once and no more than some.
func TestThresholdsAreBuckets(t *testing.T) {
	var list []*routerv1.Objective
	add := func(indicator string, threshold time.Duration) {
		list = append(list, &routerv1.Objective{Indicator: indicator, Threshold: durationpb.New(threshold)})
	}
	for i := range 2 * maxThresholds {
		add("TTFT", 1900*time.Millisecond+time.Duration(i/2)*100*time.Millisecond)
	}
	add("TTFT", 2500*time.Millisecond) // is one
	add("Availability", 0)
	add("ITL", 42*time.Millisecond)
	for i := range 3 * maxThresholds {
		add("EndToEnd", time.Duration(i+1)*time.Second)
	}
	shell, err := daemon.NewShell(t.Context(), daemon.Settings{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(shell.Close)
	ctx := shell.Context(context.Background(), "ingress")
	m, err := newMetrics(daemon.Meter(ctx))
	if err != nil {
		t.Fatal(err)
	}
	if err := m.golden.open(list); err != nil {
		t.Fatal(err)
	}
	if err := m.golden.open(nil); err != nil { // does nothing
		t.Fatal(err)
	}
	now := time.Now()
	m.used(ctx, ctx, &meter.Record{Attempts: 1, Outcome: meter.OK, Received: now, Sent: now, FirstContent: now, FirstWritten: now.Add(2 * time.Second), LastContent: now.Add(3 * time.Second), Ended: now.Add(3 * time.Second), Chunks: 5}, "m")
	page := httptest.NewRecorder()
	shell.Admin().ServeHTTP(page, httptest.NewRequest(http.MethodGet, "/metrics", nil))
	text := page.Body.String()
	for _, want := range []string{"ttft_seconds_bucket", `le="1.9"`, `le="2"`, `le="2.5"`, `le="0.042"`} {
		if !strings.Contains(text, want) {
			t.Errorf("no %s", want)
		}
	}
	for name, most := range map[string]int{"ttft": len(firstBuckets) + maxThresholds, "e2e": len(durationBuckets) + maxThresholds, "itl": len(perTokenBuckets) + 1, "tpot": len(perTokenBuckets)} {
		if n := strings.Count(text, "kinference_tenant_"+name+"_seconds_bucket{") - 1; n > most || n < most-1 {
			t.Errorf("%s has %d buckets, want %d", name, n, most)
		}
	}
}
