package main

import (
	"context"
	"encoding/csv"
	"encoding/json"
	"net"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/kinference/kinference/internal/rpc"
	accountingv1 "github.com/kinference/kinference/proto/gen/kinference/accounting/v1"
	"github.com/kinference/kinference/proto/gen/kinference/accounting/v1/accountingv1connect"
	usagev1 "github.com/kinference/kinference/proto/gen/kinference/usage/v1"
)

// ledger answers from what a test sets.
type ledger struct {
	accountingv1connect.UnimplementedAccountingServiceHandler
	asked []*accountingv1.QueryUsageRequest
	rows  []*accountingv1.Row
}

func (l *ledger) QueryUsage(_ context.Context, r *accountingv1.QueryUsageRequest) (*accountingv1.QueryUsageResponse, error) {
	l.asked = append(l.asked, r)
	out := &accountingv1.QueryUsageResponse{Lag: proto.Uint64(3)}
	if at := time.Date(2026, 11, 30, 9, 0, 0, 0, time.UTC); r.GetWorkers() && !at.Before(r.GetFilter().GetFrom().AsTime()) && at.Before(r.GetFilter().GetTo().AsTime()) {
		out.Workers = []*accountingv1.WorkerTime{
			{Start: timestamppb.New(at), WorkerSet: "team-a/l40s", PriceVersion: "team-a/l40s@01", Currency: "USD", HourlyPrice: "1.1", UsedSeconds: 5400.5, IdleSeconds: 1800, UsedCost: "1.65015277778", OtherCost: "0", IdleCost: "0.55"},
			{Start: timestamppb.New(at), WorkerSet: "team-a/unpriced", IdleSeconds: 7200},
		}
	}
	for _, row := range l.rows {
		if at := row.GetStart().AsTime(); !at.Before(r.GetFilter().GetFrom().AsTime()) && at.Before(r.GetFilter().GetTo().AsTime()) || r.GetStep() == 0 {
			out.Rows = append(out.Rows, row)
		}
	}
	return out, nil
}

func (l *ledger) ExportUsage(_ context.Context, _ *accountingv1.ExportUsageRequest, s *connect.ServerStream[accountingv1.ExportUsageResponse]) error {
	for _, id := range []string{"a", "b"} {
		u := &usagev1.Usage{Id: id, Ended: timestamppb.New(time.Unix(0, 0)), Tokens: &usagev1.Tokens{Input: proto.Uint32(0)}}
		if err := s.Send(&accountingv1.ExportUsageResponse{Usage: []*usagev1.Usage{u}}); err != nil {
			return err
		}
	}
	return nil
}

func serveLedger(t *testing.T, l *ledger) (url string) {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() {
		done <- rpc.Serve(ctx, listener, rpc.Mount[accountingv1connect.AccountingServiceHandler](ctx, l, accountingv1connect.NewAccountingServiceHandler))
	}()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return "http://" + listener.Addr().String()
}

func usageRows() []*accountingv1.Row {
	at := func(hour int) *timestamppb.Timestamp {
		return timestamppb.New(time.Date(2026, 11, 30, hour, 0, 0, 0, time.UTC))
	}
	return []*accountingv1.Row{
		{Start: at(8), Tenant: "team-a/support", Organisation: "team-a/acme", CostCenter: "4711", Model: "chat", Backend: "team-a/paid", PriceVersion: "team-a/paid/big@0123", Sums: &accountingv1.Sums{
			Requests: 120, Failed: 1, Canceled: 3, Estimated: 3, Input: 3_000_000, CachedInput: 1_000_000, Output: 123_456, Currency: "EUR", Cost: "8.155384512345",
			InputCost: "6", CachedInputCost: "0.3", OutputCost: "1.853074560000", InputPrice: "3", CachedInputPrice: "0.3", OutputPrice: "15.01",
		}},
		{Start: at(9), Model: "chat", Backend: "team-a/l40s", PriceVersion: "team-a/l40s@01", Sums: &accountingv1.Sums{Requests: 1, Output: 7, GpuSeconds: 5400.5, GpuCost: "1.65015277778", Cost: "1.65015277778", Currency: "USD", HourlyPrice: "1.1"}},
	}
}

func TestUsage(t *testing.T) {
	l := &ledger{rows: usageRows()}
	url := serveLedger(t, l)
	out, errs, code := kinfctl(t, "usage", "--accounting", url, "--by", "tenant,model", "--from", "2026-11-01", "--to", "2026-12-01", "--step", "hour", "--tenant", "team-a/support", "--tenant", "-")
	const want = `START              TENANT          MODEL  REQUESTS  FAILED  CANCELED  INPUT    CACHED   OUTPUT  REASONING  ESTIMATED  UNMETERED  GPU S   COST            CURRENCY
2026-11-30T08:00Z  team-a/support  chat   120       1       3         3000000  1000000  123456  0          3          0          0.0     8.155384512345  EUR
2026-11-30T09:00Z  -               chat   1         0       0         0        0        7       0          0          0          5400.5  1.65015277778   USD
`
	if out != want || code != 0 || !strings.Contains(errs, "3 requests are on their way") {
		t.Errorf("got %d, %s\n%s", code, errs, out)
	}
	asked := l.asked[0]
	if f := asked.GetFilter(); len(f.GetTenants()) != 2 || !f.GetFrom().AsTime().Equal(time.Date(2026, 11, 1, 0, 0, 0, 0, time.UTC)) || asked.GetStep() != accountingv1.Step_STEP_HOUR || len(asked.GetGroupBy()) != 2 {
		t.Errorf("asked %v", asked)
	}
	out, _, code = kinfctl(t, "usage", "--accounting", url, "--workers", "--from", "2026-11-01", "--to", "2026-12-01")
	const workers = `WORKERS          USED S  OTHER S  IDLE S  USED COST      OTHER COST  IDLE COST  CURRENCY  HOURLY PRICE
team-a/l40s      5400.5  0.0      1800.0  1.65015277778  0           0.55       USD       1.1
team-a/unpriced  0.0     0.0      7200.0  -              -           -          -         -
`
	if out != workers || code != 0 {
		t.Errorf("workers: %d\n%s", code, out)
	}
	out, _, code = kinfctl(t, "usage", "--accounting", url, "-o", "csv")
	if rows, err := csv.NewReader(strings.NewReader(out)).ReadAll(); err != nil || len(rows) != 3 || rows[0][0] != "tenant" || code != 0 {
		t.Errorf("CSV: %v, %d, %v", err, code, rows)
	}
	out, _, _ = kinfctl(t, "usage", "--accounting", url, "-o", "json")
	var answer struct {
		Rows []struct{ Sums struct{ Cost string } }
	}
	if err := json.Unmarshal([]byte(out), &answer); err != nil || len(answer.Rows) != 2 || answer.Rows[0].Sums.Cost != "8.155384512345" {
		t.Errorf("JSON: %v, %s", err, out)
	}
	for _, wrong := range [][]string{{"--by", "colour"}, {"--step", "year"}, {"-o", "xml"}, {"--from", "yesterday"}, {"--from", "2026-11-02", "--to", "2026-11-01"}} {
		if _, _, code := kinfctl(t, append([]string{"usage", "--accounting", url}, wrong...)...); code != 2 {
			t.Errorf("%v: exit code %d, want 2", wrong, code)
		}
	}
	if _, errs, code := kinfctl(t, "usage", "--accounting", "http://127.0.0.1:1"); code != 1 || !strings.Contains(errs, "ask accounting") {
		t.Errorf("nobody there: %d, %s", code, errs)
	}
}

// The rows of FOCUS have each meter once, exact quantities and costs, and days are
// asked for one by one.
func TestUsageExport(t *testing.T) {
	l := &ledger{rows: usageRows()}
	url := serveLedger(t, l)
	out, errs, code := kinfctl(t, "usage", "export", "--accounting", url, "--from", "2026-11-29", "--to", "2026-12-01", "--billing-account", "acme")
	rows, err := csv.NewReader(strings.NewReader(out)).ReadAll()
	if err != nil || code != 0 || len(rows) != 7 || len(l.asked) != 2 {
		t.Fatalf("got %d, %v, %s, %d questions\n%s", code, err, errs, len(l.asked), out)
	}
	var list []map[string]string
	for _, r := range rows[1:] {
		m := map[string]string{}
		for i, name := range rows[0] {
			m[name] = r[i]
		}
		list = append(list, m)
	}
	for i, want := range []map[string]string{
		{"SkuMeter": "Input Tokens", "ConsumedQuantity": "2000000", "PricingQuantity": "2", "BilledCost": "6", "ListUnitPrice": "3", "SubAccountId": "team-a/support", "SkuPriceId": "team-a/paid/big@0123/input-tokens"},
		{"SkuMeter": "Cached Input Tokens", "ConsumedQuantity": "1000000", "PricingQuantity": "1", "BilledCost": "0.3"},
		{"SkuMeter": "Output Tokens", "ConsumedQuantity": "123456", "PricingQuantity": "0.123456", "EffectiveCost": "1.853074560000", "BillingCurrency": "EUR"},
		{"SkuMeter": "Output Tokens", "ConsumedQuantity": "7", "PricingQuantity": "0.000007", "BilledCost": "0", "SubAccountId": "-", "BillingCurrency": "USD", "SkuPriceId": ""},
		{"SkuMeter": "Worker Time", "ConsumedQuantity": "5400.5", "ConsumedUnit": "Seconds", "PricingQuantity": "1.500138888889", "PricingUnit": "Hours", "ListUnitPrice": "1.1", "BilledCost": "1.65015277778", "SkuPriceId": "team-a/l40s@01/worker-time"},
		{"SkuMeter": "Worker Time", "ConsumedQuantity": "1800", "PricingQuantity": "0.500000000000", "BilledCost": "0.55", "SubAccountId": "", "ResourceType": "Worker Set", "Tags": `{"unallocated":"idle"}`},
	} {
		for name, value := range want {
			if list[i][name] != value {
				t.Errorf("row %d: %s is %q, want %q", i, name, list[i][name], value)
			}
		}
	}
	first := list[0]
	for name, value := range map[string]string{
		"BillingPeriodStart": "2026-11-01T00:00:00Z", "BillingPeriodEnd": "2026-12-01T00:00:00Z", "ChargePeriodStart": "2026-11-30T08:00:00Z",
		"ChargePeriodEnd": "2026-11-30T09:00:00Z", "ChargeCategory": "Usage", "ConsumedUnit": "Tokens", "ServiceCategory": "AI and Machine Learning", "BillingAccountId": "acme",
	} {
		if first[name] != value {
			t.Errorf("%s is %q, want %q", name, first[name], value)
		}
	}
	var tags map[string]string
	if err := json.Unmarshal([]byte(first["Tags"]), &tags); err != nil || tags["cost_center"] != "4711" {
		t.Errorf("tags %v, %v", tags, err)
	}
	// None of the mandatory columns may be empty in any row; ChargeClass is null
	// for what is no correction.
	for i, m := range list {
		for _, name := range rows[0][:13] {
			if m[name] == "" && name != "ChargeClass" {
				t.Errorf("row %d: %s is empty", i, name)
			}
		}
	}
	out, _, code = kinfctl(t, "usage", "export", "--accounting", url, "--format", "events")
	if lines := strings.Split(strings.TrimSpace(out), "\n"); code != 0 || len(lines) != 2 || !strings.Contains(lines[1], `"type":"kinference.usage.v1","id":"b"`) {
		t.Errorf("events: %d\n%s", code, out)
	}
	if _, _, code := kinfctl(t, "usage", "export", "--accounting", url, "--format", "pdf"); code != 2 {
		t.Errorf("a format that is none: %d", code)
	}
}
