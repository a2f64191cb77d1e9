package ledger

import (
	"cmp"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"

	usagev1 "github.com/kinference/kinference/proto/gen/kinference/usage/v1"
)

// Filter selects usage; empty fields select everything.
type Filter struct {
	From, To                       time.Time // To is exclusive
	Tenants, Organisations, Models []string
	// UpTo leaves out events that came later than Seq said, in an export; 0: none.
	UpTo int64
}

// Step is the time that a row covers.
type Step int

// The steps.
const (
	Whole Step = iota
	Hour
	Day
	Month
)

// Query asks for sums. GroupBy has names of columns: tenant, organisation,
// cost_center, model, backend, endpoint, price_version.
type Query struct {
	Filter
	Step    Step
	GroupBy []string
	// Most rows; more are ErrTooMany.
	Most int
}

// ErrTooMany says that the answer has too many rows.
var ErrTooMany = errors.New("too many rows")

// Row is a sum.
type Row struct {
	Start  time.Time // zero without a step
	Groups map[string]string
	// Currency of the costs; empty: there were no prices.
	Currency string
	Prices   [4]string // input, cached input, output, hourly; of a row by price version
	Requests, Failed, Canceled, Refused, Estimated, Unmetered, Recovered,
	Input, Cached, Output, Reasoning int64
	GPU                                        int64 // µs of workers
	InputCost, CachedCost, OutputCost, GPUCost Money
}

// Cost is the sum of the costs.
func (r *Row) Cost() Money { return r.InputCost.Plus(r.CachedCost).Plus(r.OutputCost).Plus(r.GPUCost) }

// Query sums up. Rows come by time, then by group.
func (l *Ledger) Query(ctx context.Context, q Query) ([]Row, error) {
	var columns []string
	if q.Step != Whole {
		columns = append(columns, "start")
	}
	for _, g := range q.GroupBy {
		if !slices.Contains(keyColumns, g) {
			return nil, fmt.Errorf("group by %.32q: no such column", g)
		}
		columns = append(columns, g)
	}
	columns = append(columns, "currency")
	fields := slices.Clone(columns)
	priced := slices.Contains(q.GroupBy, "price_version")
	for _, c := range priceColumns {
		if priced {
			fields = append(fields, "MIN("+c+")")
		}
	}
	for _, c := range countColumns {
		fields = append(fields, "CAST(SUM("+c+") AS BIGINT)")
	}
	for _, c := range moneyColumns {
		// In two, as the parts of ten million rows are more than a BIGINT holds.
		fields = append(fields, "CAST(SUM("+c+") AS BIGINT)", "CAST(SUM("+c+"_pico / 1000000) AS BIGINT)", "CAST(SUM("+c+"_pico % 1000000) AS BIGINT)")
	}
	source, args := q.source()
	list := strings.Join(columns, ", ")
	statement := "SELECT " + strings.Join(fields, ", ") + " FROM " + source + " GROUP BY " + list + " ORDER BY " + list
	if q.Most > 0 && q.Step != Month {
		statement += fmt.Sprintf(" LIMIT %d", q.Most+1)
	}
	rows, err := l.db.QueryContext(ctx, l.sql(statement), args...)
	if err != nil {
		return nil, fmt.Errorf("query ledger: %w", err)
	}
	defer rows.Close()
	var out []Row
	for rows.Next() {
		r := Row{Groups: map[string]string{}}
		var start int64
		groups := make([]string, len(q.GroupBy))
		var money [12]int64
		var to []any
		if q.Step != Whole {
			to = append(to, &start)
		}
		for i := range groups {
			to = append(to, &groups[i])
		}
		to = append(to, &r.Currency)
		if priced {
			to = append(to, &r.Prices[0], &r.Prices[1], &r.Prices[2], &r.Prices[3])
		}
		to = append(to, &r.Requests, &r.Failed, &r.Canceled, &r.Refused, &r.Estimated, &r.Unmetered, &r.Recovered, &r.Input, &r.Cached, &r.Output, &r.Reasoning, &r.GPU)
		for i := range money {
			to = append(to, &money[i])
		}
		if err := rows.Scan(to...); err != nil {
			return nil, fmt.Errorf("query ledger: %w", err)
		}
		if q.Step != Whole {
			r.Start = time.Unix(start, 0).UTC()
		}
		for i, g := range q.GroupBy {
			r.Groups[g] = groups[i]
		}
		for i, m := range []*Money{&r.InputCost, &r.CachedCost, &r.OutputCost, &r.GPUCost} {
			whole, micros, rest := money[3*i], money[3*i+1], money[3*i+2]
			*m = Money{whole + micros/1_000_000, micros % 1_000_000 * 1_000_000}.Plus(Money{0, rest})
		}
		out = append(out, r)
	}
	if err := rows.Err(); err != nil {
		return nil, fmt.Errorf("query ledger: %w", err)
	}
	if q.Step == Month {
		out = months(out, q.GroupBy)
	}
	if q.Most > 0 && len(out) > q.Most {
		return nil, ErrTooMany
	}
	return out, nil
}

// bound is the beginning of the step that a time is in, or the end of it.
func (t table) bound(at time.Time, up bool) int64 {
	n := at.Truncate(t.step)
	if up && n.Before(at) {
		n = n.Add(t.step)
	}
	return n.Unix()
}

// source is what the rows are summed up from. Days are kept for longer than hours: of a
// time that does not begin or end with a day only what is left over is of hours.
func (q *Query) source() (list string, args []any) {
	type part struct {
		table
		Filter
	}
	inner, before, after := q.Filter, q.Filter, q.Filter // the time of whole days, and what is left over
	if !q.From.IsZero() {
		inner.From = time.Unix(days.bound(q.From, true), 0)
	}
	if !q.To.IsZero() {
		inner.To = time.Unix(days.bound(q.To, false), 0)
	}
	before.To, after.From = inner.From, inner.To
	var parts []part
	switch {
	case q.Step == Day || q.Step == Month:
		parts = []part{{days, q.Filter}}
	case q.Step == Hour || !inner.From.IsZero() && !inner.To.IsZero() && !inner.From.Before(inner.To):
		parts = []part{{hours, q.Filter}}
	default:
		parts = []part{{days, inner}}
		if q.From.Before(inner.From) {
			parts = append(parts, part{hours, before})
		}
		if inner.To.Before(q.To) {
			parts = append(parts, part{hours, after})
		}
	}
	var selects []string
	for _, p := range parts {
		where, values := p.where("start", p.bound)
		selects = append(selects, "SELECT "+strings.Join(sumColumns, ", ")+" FROM "+p.name+where)
		args = append(args, values...)
	}
	return "(" + strings.Join(selects, " UNION ALL ") + ") AS sums", args
}

// where is the condition of a filter; the time is in a column as bound says.
func (f *Filter) where(column string, bound func(at time.Time, up bool) int64) (where string, args []any) {
	var parts []string
	if !f.From.IsZero() {
		parts, args = append(parts, column+" >= ?"), append(args, bound(f.From, false))
	}
	if !f.To.IsZero() {
		parts, args = append(parts, column+" < ?"), append(args, bound(f.To, true))
	}
	for _, c := range []struct {
		column string
		values []string
	}{{"tenant", f.Tenants}, {"organisation", f.Organisations}, {"model", f.Models}} {
		if len(c.values) == 0 {
			continue
		}
		parts = append(parts, c.column+" IN ("+repeated("?", len(c.values))+")")
		for _, v := range c.values {
			args = append(args, v)
		}
	}
	if len(parts) == 0 {
		return "", nil
	}
	return " WHERE " + strings.Join(parts, " AND "), args
}

// months adds up days. Their order stays.
func months(list []Row, groups []string) []Row {
	at := map[string]int{}
	var out []Row
	for _, r := range list {
		r.Start = Month.start(r.Start)
		name := []string{r.Start.Format(time.DateOnly), r.Currency}
		for _, g := range groups {
			name = append(name, r.Groups[g])
		}
		k := strings.Join(name, "\x00")
		i, known := at[k]
		if !known {
			at[k] = len(out)
			out = append(out, r)
			continue
		}
		o := &out[i]
		for _, c := range [][2]*int64{
			{&o.Requests, &r.Requests}, {&o.Failed, &r.Failed}, {&o.Canceled, &r.Canceled}, {&o.Refused, &r.Refused}, {&o.Estimated, &r.Estimated},
			{&o.Unmetered, &r.Unmetered}, {&o.Recovered, &r.Recovered}, {&o.Input, &r.Input}, {&o.Cached, &r.Cached}, {&o.Output, &r.Output}, {&o.Reasoning, &r.Reasoning}, {&o.GPU, &r.GPU},
		} {
			*c[0] += *c[1]
		}
		o.InputCost, o.CachedCost = o.InputCost.Plus(r.InputCost), o.CachedCost.Plus(r.CachedCost)
		o.OutputCost, o.GPUCost = o.OutputCost.Plus(r.OutputCost), o.GPUCost.Plus(r.GPUCost)
	}
	slices.SortStableFunc(out, func(a, b Row) int { return cmp.Compare(a.Start.Unix(), b.Start.Unix()) })
	return out
}

// Since is when the last n events that ended before a time began to end; zero if there
// are fewer.
func (l *Ledger) Since(ctx context.Context, to time.Time, n int) (time.Time, error) {
	var us int64
	err := l.db.QueryRowContext(ctx, l.sql(`SELECT ended FROM usage_event WHERE ended < ? ORDER BY ended DESC LIMIT 1 OFFSET ?`), to.UnixMicro(), n-1).Scan(&us)
	switch {
	case errors.Is(err, sql.ErrNoRows):
		return time.Time{}, nil
	case err != nil:
		return time.Time{}, fmt.Errorf("look for the last events of ledger: %w", err)
	}
	return time.UnixMicro(us), nil
}

// exportPage is how many events are read at once.
const exportPage = 1000

// Export calls f with pages of events in the order in which they ended, until f
// returns an error. Its slice is its own.
func (l *Ledger) Export(ctx context.Context, filter Filter, f func([]*usagev1.Usage) error) error {
	lastEnded, lastID := int64(-1<<62), ""
	for {
		where, args := filter.where("ended", func(at time.Time, _ bool) int64 { return at.UnixMicro() })
		if where == "" {
			where = " WHERE "
		} else {
			where += " AND "
		}
		if filter.UpTo > 0 {
			where, args = where+"seq <= ? AND ", append(args, filter.UpTo)
		}
		args = append(args, lastEnded, lastID)
		rows, err := l.db.QueryContext(ctx, l.sql(fmt.Sprintf(`SELECT ended, e.id, event, COALESCE(prefill_us, 0), COALESCE(decode_us, 0) FROM usage_event e
			LEFT JOIN usage_gpu g ON g.id = e.id%s(ended, e.id) > (?, ?) ORDER BY ended, e.id LIMIT %d`, where, exportPage)), args...)
		if err != nil {
			return fmt.Errorf("export from ledger: %w", err)
		}
		var page []*usagev1.Usage
		for rows.Next() {
			var raw []byte
			var g gpu
			if err = rows.Scan(&lastEnded, &lastID, &raw, &g.prefill, &g.decode); err != nil {
				break
			}
			u := new(usagev1.Usage)
			if err = proto.Unmarshal(raw, u); err != nil {
				break
			}
			g.fill(u)
			page = append(page, u)
		}
		if err = errors.Join(err, rows.Err(), rows.Close()); err != nil {
			return fmt.Errorf("export from ledger: %w", err)
		}
		if len(page) > 0 {
			if err := f(page); err != nil {
				return err
			}
		}
		if len(page) < exportPage {
			return nil
		}
	}
}
