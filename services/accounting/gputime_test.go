package accounting_test

import (
	"fmt"
	"math"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/kinference/kinference/internal/bus"
	"github.com/kinference/kinference/internal/testenv"
	accountingv1 "github.com/kinference/kinference/proto/gen/kinference/accounting/v1"
	kvtrackerv1 "github.com/kinference/kinference/proto/gen/kinference/kvtracker/v1"
	usagev1 "github.com/kinference/kinference/proto/gen/kinference/usage/v1"
	"github.com/kinference/kinference/services/accounting"
)

// The time of workers goes to those who used it: a tenant with a long prompt and one
// with none, and nobody.
func TestGPUTimeOfTenants(t *testing.T) {
	nats := testenv.NATS(t)
	e := start(t, accounting.Config{NATSURL: nats, GPUEvery: time.Second})
	c, err := bus.Connect(t.Context(), nats, "worker")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	report := func(running float64) {
		r := &kvtrackerv1.WorkerReport{Worker: "u/0", WorkerSet: "ns/set", Ready: true, Load: &kvtrackerv1.Load{Running: running, KvUsage: running / 10}, SampledUnixNanos: time.Now().UnixNano(), TotalBlocks: 100, BlockSize: 16}
		if err := c.PublishReport(r); err != nil {
			t.Fatal(err)
		}
	}
	value := func(series string) (v float64) {
		page := httptest.NewRecorder()
		e.shell.Admin().ServeHTTP(page, httptest.NewRequest(http.MethodGet, "/metrics", nil))
		for line := range strings.Lines(page.Body.String()) {
			all := true
			for _, part := range strings.Fields(series) {
				all = all && strings.Contains(line, part)
			}
			if all {
				var one float64
				fmt.Sscan(line[strings.LastIndexByte(line, ' ')+1:], &one)
				v += one
			}
		}
		return v
	}
	deadline, tick := time.After(60*time.Second), time.NewTicker(200*time.Millisecond)
	defer tick.Stop()
	began, sent := time.Now(), false
	for {
		running := 0.0
		if time.Since(began) < 4*time.Second {
			running = 2
		}
		if !sent { // before they end: however slow this machine is, they are there in time
			sent = true
			var list []bus.UsageMessage
			for i, prompt := range []uint32{6000, 10} {
				u := event(i)
				u.Id, u.Worker, u.WorkerSet, u.Received, u.Ended = fmt.Sprint("g", i), "u/0", "ns/set", timestamppb.New(began), timestamppb.New(began.Add(4*time.Second))
				u.Cost = &usagev1.Cost{Currency: "EUR", PriceVersion: "set@1", HourlyPrice: "3.6"}
				u.Ttft, u.Tokens.Input, u.Tokens.Output = proto.Float64(2), proto.Uint32(prompt), proto.Uint32(20)
				list = append(list, bus.UsageMessage{ID: u.GetId(), Subject: bus.UsageSubject(u.GetTenants()[0]), Data: bus.EncodeUsage(nil, u)})
			}
			publish(t, nats, list...)
		}
		report(running)
		long, small := value(`kinference_tenant_gpu_time_seconds_total{ tenant="ns/a"`), value(`kinference_tenant_gpu_time_seconds_total{ tenant="ns/b"`)
		idle := value(`kinference_worker_time_seconds_total{ state="idle"`)
		if long > 1 && small > 0 && long > 1.5*small && idle > 1 {
			used := value(`kinference_worker_time_seconds_total{ state="used"`)
			if d := used - long - small; d > 1e-6 || d < -1e-6 {
				t.Errorf("used %v s, tenants %v and %v", used, long, small)
			}
			costs(t, e)
			return
		}
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatalf("long prompt %v s, small one %v, idle %v, other %v", long, small, idle, value(`kinference_worker_time_seconds_total{ state="other"`))
		}
	}
}

// costs checks that what tenants used, what nobody explains and idle time are the time
// of the workers, in seconds and in money, and that each request knows its part.
func costs(t *testing.T, e *env) {
	t.Helper()
	answer, err := e.client.QueryUsage(t.Context(), &accountingv1.QueryUsageRequest{Workers: true, GroupBy: []accountingv1.Group{accountingv1.Group_GROUP_TENANT, accountingv1.Group_GROUP_MODEL, accountingv1.Group_GROUP_PRICE_VERSION}})
	if err != nil || len(answer.GetRows()) != 2 || len(answer.GetWorkers()) == 0 {
		t.Fatalf("got %v, %v", answer, err)
	}
	// Without a catalog the price is that of the last request: before it there is none.
	w := answer.GetWorkers()[len(answer.GetWorkers())-1]
	seconds, cost := 0.0, 0.0
	for _, row := range answer.GetRows() {
		s := row.GetSums()
		seconds += s.GetGpuSeconds()
		cost += number(t, s.GetGpuCost())
		if s.GetGpuCost() != s.GetCost() || row.GetPriceVersion() != "set@1" || s.GetHourlyPrice() != "3.6" || number(t, s.GetGpuCost()) <= 0 {
			t.Errorf("row %v", row)
		}
	}
	if math.Abs(seconds-w.GetUsedSeconds()) > 1e-6 || math.Abs(cost-number(t, w.GetUsedCost())) > 1e-9 || w.GetWorkerSet() != "ns/set" || w.GetCurrency() != "EUR" {
		t.Errorf("requests used %v s for %v: %v", seconds, cost, w)
	}
	// 3.6 an hour is 0.001 a second.
	if d := number(t, w.GetIdleCost()) - w.GetIdleSeconds()/1000; math.Abs(d) > 1e-9 || w.GetIdleSeconds() <= 0 {
		t.Errorf("idle: %v", w)
	}
	stream, err := e.client.ExportUsage(t.Context(), &accountingv1.ExportUsageRequest{})
	if err != nil {
		t.Fatal(err)
	}
	defer stream.Close()
	own, events := 0.0, 0
	for stream.Receive() {
		for _, u := range stream.Msg().GetUsage() {
			events++
			own += number(t, u.GetCost().GetGpu())
			if d := (u.GetGpuPrefill()+u.GetGpuDecode())/1000 - number(t, u.GetCost().GetTotal()); math.Abs(d) > 1e-9 {
				t.Errorf("event %v", u)
			}
		}
	}
	if stream.Err() != nil || events != 2 || math.Abs(own-cost) > 1e-9 {
		t.Errorf("%d events for %v of %v: %v", events, own, cost, stream.Err())
	}
}

func number(t *testing.T, text string) float64 {
	t.Helper()
	v, err := strconv.ParseFloat(text, 64)
	if err != nil {
		t.Errorf("%q is no number", text)
	}
	return v
}
