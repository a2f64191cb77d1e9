package accounting

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/kinference/kinference/internal/rpc"
	accountingv1 "github.com/kinference/kinference/proto/gen/kinference/accounting/v1"
	usagev1 "github.com/kinference/kinference/proto/gen/kinference/usage/v1"
	"github.com/kinference/kinference/services/accounting/internal/ledger"
)

const (
	// maxRows bounds an answer of QueryUsage.
	maxRows = 100_000
	// maxValues bounds the values of one field of a filter.
	maxValues = 1000
	// lagTime bounds how long an answer waits for the stream's lag.
	lagTime = 500 * time.Millisecond
	// exportBatch is how many events one message of an export has.
	exportBatch = 200
	// openTenant stands for the tenant of an open gateway in filters.
	openTenant = "-"
)

// columns are the names of what can be grouped by.
var columns = map[accountingv1.Group]string{
	accountingv1.Group_GROUP_TENANT: "tenant", accountingv1.Group_GROUP_ORGANISATION: "organisation", accountingv1.Group_GROUP_COST_CENTER: "cost_center",
	accountingv1.Group_GROUP_MODEL: "model", accountingv1.Group_GROUP_BACKEND: "backend", accountingv1.Group_GROUP_ENDPOINT: "endpoint",
	accountingv1.Group_GROUP_PRICE_VERSION: "price_version",
}

// QueryUsage implements the AccountingService.
func (v *server) QueryUsage(ctx context.Context, r *accountingv1.QueryUsageRequest) (*accountingv1.QueryUsageResponse, error) {
	filter, err := filterOf(r.GetFilter())
	if err != nil {
		return nil, err
	}
	q := ledger.Query{Filter: filter, Most: maxRows}
	switch r.GetStep() {
	case accountingv1.Step_STEP_UNSPECIFIED:
	case accountingv1.Step_STEP_HOUR:
		q.Step = ledger.Hour
	case accountingv1.Step_STEP_DAY:
		q.Step = ledger.Day
	case accountingv1.Step_STEP_MONTH:
		q.Step = ledger.Month
	default:
		return nil, invalid("step %d is none", r.GetStep())
	}
	seen := map[accountingv1.Group]bool{}
	for _, g := range r.GetGroupBy() {
		if columns[g] == "" || seen[g] {
			return nil, invalid("group %d is none, or comes twice", g)
		}
		seen[g] = true
		q.GroupBy = append(q.GroupBy, columns[g])
	}
	rows, err := v.ledger.Query(ctx, q)
	if err != nil {
		return nil, tooMany(err)
	}
	out := &accountingv1.QueryUsageResponse{Rows: make([]*accountingv1.Row, 0, len(rows))}
	for i := range rows {
		out.Rows = append(out.Rows, row(&rows[i]))
	}
	newest, err := v.ledger.Newest(ctx)
	if err != nil {
		return nil, err
	}
	if !newest.IsZero() {
		out.Newest = timestamppb.New(newest)
	}
	if lag, ok := v.lag(ctx); ok {
		out.Lag = proto.Uint64(lag)
	}
	if r.GetWorkers() {
		times, err := v.ledger.Times(ctx, filter.From, filter.To, q.Step, maxRows)
		if err != nil {
			return nil, tooMany(err)
		}
		for i := range times {
			out.Workers = append(out.Workers, workerTime(&times[i]))
		}
	}
	return out, nil
}

// tooMany is what a caller hears of a ledger's error.
func tooMany(err error) error {
	if errors.Is(err, ledger.ErrTooMany) {
		return rpc.Error(connect.CodeResourceExhausted, fmt.Sprintf("the answer has more than %d rows: ask for a shorter time or fewer groups", maxRows), 0)
	}
	return err
}

func workerTime(t *ledger.WorkerTime) *accountingv1.WorkerTime {
	out := &accountingv1.WorkerTime{
		WorkerSet: t.WorkerSet, PriceVersion: t.PriceVersion, Currency: t.Currency, HourlyPrice: t.HourlyPrice,
		UsedSeconds: t.Used.Seconds(), OtherSeconds: t.Other.Seconds(), IdleSeconds: t.Idle.Seconds(),
	}
	if used, other, idle, ok := t.Cost(); ok {
		out.UsedCost, out.OtherCost, out.IdleCost = used.String(), other.String(), idle.String()
	}
	if !t.Start.IsZero() {
		out.Start = timestamppb.New(t.Start)
	}
	return out
}

// lag is how many events are not in the ledger yet; false if nobody can say.
func (v *server) lag(ctx context.Context) (uint64, bool) {
	if v.conn == nil || !v.conn.Connected() {
		return 0, false
	}
	ctx, cancel := context.WithTimeout(ctx, lagTime)
	defer cancel()
	lag, err := v.conn.UsageLag(ctx, consumer(v.ledger.Name()))
	return lag, err == nil
}

func row(r *ledger.Row) *accountingv1.Row {
	s := &accountingv1.Sums{
		Requests: uint64(r.Requests), Failed: uint64(r.Failed), Canceled: uint64(r.Canceled), Refused: uint64(r.Refused),
		Estimated: uint64(r.Estimated), Unmetered: uint64(r.Unmetered), Recovered: uint64(r.Recovered),
		Input: uint64(r.Input), CachedInput: uint64(r.Cached), Output: uint64(r.Output), Reasoning: uint64(r.Reasoning), Currency: r.Currency,
		InputPrice: r.Prices[0], CachedInputPrice: r.Prices[1], OutputPrice: r.Prices[2], HourlyPrice: r.Prices[3],
		GpuSeconds: float64(r.GPU) / 1e6,
	}
	if r.Currency != "" {
		s.Cost, s.InputCost, s.CachedInputCost = r.Cost().String(), r.InputCost.String(), r.CachedCost.String()
		s.OutputCost, s.GpuCost = r.OutputCost.String(), r.GPUCost.String()
	}
	g := r.Groups
	out := &accountingv1.Row{
		Tenant: g["tenant"], Organisation: g["organisation"], CostCenter: g["cost_center"], Model: g["model"], Backend: g["backend"],
		Endpoint: g["endpoint"], PriceVersion: g["price_version"], Sums: s,
	}
	if !r.Start.IsZero() {
		out.Start = timestamppb.New(r.Start)
	}
	return out
}

// ExportUsage implements the AccountingService.
func (v *server) ExportUsage(ctx context.Context, r *accountingv1.ExportUsageRequest, s *connect.ServerStream[accountingv1.ExportUsageResponse]) error {
	filter, err := filterOf(r.GetFilter())
	if err != nil {
		return err
	}
	return v.ledger.Export(ctx, filter, func(page []*usagev1.Usage) error {
		for len(page) > 0 {
			n := min(len(page), exportBatch)
			if err := s.Send(&accountingv1.ExportUsageResponse{Usage: page[:n]}); err != nil {
				return err
			}
			page = page[n:]
		}
		return nil
	})
}

func filterOf(f *accountingv1.Filter) (ledger.Filter, error) {
	out := ledger.Filter{Organisations: tenants(f.GetOrganisations()), Tenants: tenants(f.GetTenants()), Models: f.GetModels()}
	for _, t := range []struct {
		name string
		from *timestamppb.Timestamp
		to   *time.Time
	}{{"from", f.GetFrom(), &out.From}, {"to", f.GetTo(), &out.To}} {
		if t.from == nil {
			continue
		}
		if !t.from.IsValid() || t.from.AsTime().Year() < 1970 {
			return out, invalid("%s is no time", t.name)
		}
		*t.to = t.from.AsTime()
	}
	if !out.From.IsZero() && !out.To.IsZero() && !out.From.Before(out.To) {
		return out, invalid("from is not before to")
	}
	if max(len(out.Tenants), len(out.Organisations), len(out.Models)) > maxValues {
		return out, invalid("a filter has more than %d values", maxValues)
	}
	return out, nil
}

func tenants(list []string) []string {
	out := make([]string, len(list))
	for i, t := range list {
		if t != openTenant {
			out[i] = t
		}
	}
	return out
}

func invalid(format string, args ...any) error {
	return rpc.Error(connect.CodeInvalidArgument, fmt.Sprintf(format, args...), 0)
}

func tempDir() (dir string, remove func(), err error) {
	dir, err = os.MkdirTemp("", "kinference-ledger-")
	if err != nil {
		return "", nil, fmt.Errorf("make folder of ledger: %w", err)
	}
	return dir, func() { _ = os.RemoveAll(dir) }, nil
}
