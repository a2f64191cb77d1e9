package ledger

import (
	"cmp"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math"
	"math/big"
	"slices"
	"strconv"
	"time"

	"google.golang.org/protobuf/proto"

	usagev1 "github.com/kinference/kinference/proto/gen/kinference/usage/v1"
)

// gpu is the time of a worker that a request caused, in µs.
type gpu struct{ prefill, decode int64 }

// fill writes the time and its cost into an event that knows the price.
func (g gpu) fill(u *usagev1.Usage) {
	if g == (gpu{}) {
		return
	}
	u.GpuPrefill, u.GpuDecode = proto.Float64(float64(g.prefill)/1e6), proto.Float64(float64(g.decode)/1e6)
	c := u.GetCost()
	price, ok := ParseMoney(c.GetHourlyPrice())
	if !ok {
		return
	}
	cost := price.hours(g.prefill + g.decode)
	total, _ := ParseMoney(c.GetTotal())
	c.Gpu, c.Total = cost.String(), total.Plus(cost).String()
}

// micros is fill's way back.
func micros(seconds float64) int64 { return int64(math.Round(seconds * 1e6)) }

// hours is m for an hour taken for so many µs, rounded half up. m is not below 0.
func (m Money) hours(us int64) Money {
	const hour = 3_600_000_000
	n := new(big.Int).Mul(big.NewInt(m.Whole), big.NewInt(unit))
	n.Add(n, big.NewInt(m.Pico))
	n.Mul(n, big.NewInt(us))
	n.Add(n, big.NewInt(hour/2))
	n.Quo(n, big.NewInt(hour))
	whole, pico := n.QuoRem(n, big.NewInt(unit), new(big.Int))
	return Money{whole.Int64(), pico.Int64()}
}

// atOnce is how many rows a statement has.
const atOnce = 500

// gpuOf reads the times of events.
func (l *Ledger) gpuOf(ctx context.Context, tx *sql.Tx, events []*usagev1.Usage) (map[string]gpu, error) {
	out := map[string]gpu{}
	for part := range slices.Chunk(events, atOnce) {
		args := make([]any, len(part))
		for i, u := range part {
			args[i] = u.GetId()
		}
		rows, err := tx.QueryContext(ctx, l.sql(`SELECT id, prefill_us, decode_us FROM usage_gpu WHERE id IN (`+repeated("?", len(part))+`)`), args...)
		if err == nil {
			err = readTimes(rows, out)
		}
		if err != nil {
			return nil, err
		}
	}
	return out, nil
}

// readTimes reads rows of an id and its times, and closes them.
func readTimes(rows *sql.Rows, to map[string]gpu) (err error) {
	for rows.Next() {
		var id string
		var g gpu
		if err = rows.Scan(&id, &g.prefill, &g.decode); err != nil {
			break
		}
		to[id] = g
	}
	return errors.Join(err, rows.Err(), rows.Close())
}

// Share is what a request used of a worker in a span of time. ID is its event's.
type Share struct {
	ID              string
	Prefill, Decode time.Duration
}

// WorkerTime is what the time of the workers of a set went to: Used by requests,
// Other busy time, Idle. Without a currency it has no price.
type WorkerTime struct {
	Start                                          time.Time // of the step; zero without one
	WorkerSet, PriceVersion, Currency, HourlyPrice string
	Used, Other, Idle                              time.Duration
}

// Cost is what the three parts cost; false without a price.
func (w *WorkerTime) Cost() (used, other, idle Money, ok bool) {
	price, ok := ParseMoney(w.HourlyPrice)
	return price.hours(w.Used.Microseconds()), price.hours(w.Other.Microseconds()), price.hours(w.Idle.Microseconds()), ok
}

// Spent is a cost that an event has got.
type Spent struct {
	Event *usagev1.Usage
	Cost  float64
}

// Shared reports that other processes may have this ledger too.
func (l *Ledger) Shared() bool { return l.postgres }

// metaDivided is the name of the setting that has the time up to which the time of
// workers is divided, in Unix µs.
const metaDivided = "divided"

// Divided is the time up to which the time of workers is divided. otherwise is where
// a ledger begins of which nothing is.
func (l *Ledger) Divided(ctx context.Context, otherwise time.Time) (time.Time, error) {
	tx, err := l.db.BeginTx(ctx, nil)
	if err != nil {
		return time.Time{}, fmt.Errorf("time divided: %w", err)
	}
	defer func() { _ = tx.Rollback() }() // of a transaction that was committed it does nothing
	text, err := l.meta(ctx, tx, metaDivided, strconv.FormatInt(otherwise.UnixMicro(), 10))
	if err == nil {
		err = tx.Commit()
	}
	us, bad := strconv.ParseInt(text, 10, 64)
	if err = errors.Join(err, bad); err != nil {
		return time.Time{}, fmt.Errorf("time divided: %w", err)
	}
	return time.UnixMicro(us), nil
}

// Divide writes down who used the time of workers from one moment to another: the
// shares of requests and the times of the hour that from is in. It does so once,
// whoever calls: false says that somebody else was first, and nothing is changed.
// Of events that are not in the ledger the time is kept for when they come. The
// shares of one call must have different ids.
func (l *Ledger) Divide(ctx context.Context, from, to time.Time, shares []Share, times []WorkerTime) (spent []Spent, done bool, err error) {
	fail := func(err error) error { return fmt.Errorf("divide time: %w", err) }
	tx, err := l.db.BeginTx(ctx, nil)
	if err != nil {
		return nil, false, fail(err)
	}
	defer func() { _ = tx.Rollback() }() // of a transaction that was committed it does nothing
	r, err := tx.ExecContext(ctx, l.sql(`UPDATE ledger_meta SET value = ? WHERE name = '`+metaDivided+`' AND value = ?`),
		strconv.FormatInt(to.UnixMicro(), 10), strconv.FormatInt(from.UnixMicro(), 10))
	if err != nil {
		return nil, false, fail(err)
	}
	if n, err := r.RowsAffected(); err != nil || n == 0 {
		if err != nil {
			return nil, false, fail(err)
		}
		return nil, false, nil
	}
	hourly, daily := map[key]*sums{}, map[key]*sums{}
	for part := range slices.Chunk(shares, atOnce) {
		events, err := l.lock(ctx, tx, part)
		if err != nil {
			return nil, false, fail(err)
		}
		now, err := l.addTime(ctx, tx, to, part)
		if err != nil {
			return nil, false, fail(err)
		}
		for _, s := range part {
			u := events[s.ID]
			if u == nil || u.GetOverload() {
				continue
			}
			after := now[s.ID]
			before := gpu{after.prefill - s.Prefill.Microseconds(), after.decode - s.Decode.Microseconds()}
			c := Spent{Event: u}
			for _, x := range []struct {
				g    gpu
				sign int64
			}{{before, -1}, {after, 1}} {
				v := proto.CloneOf(u)
				x.g.fill(v)
				add(hourly, hours, v, x.sign)
				add(daily, days, v, x.sign)
				cost, _ := strconv.ParseFloat(v.GetCost().GetGpu(), 64) // none is 0
				c.Cost += float64(x.sign) * cost
			}
			spent = append(spent, c)
		}
	}
	for _, t := range []struct {
		table
		changes map[key]*sums
	}{{hours, hourly}, {days, daily}} {
		if err := l.apply(ctx, tx, t.table, t.changes); err != nil {
			return nil, false, fail(err)
		}
	}
	for _, t := range times {
		_, err := tx.ExecContext(ctx, l.sql(`INSERT INTO worker_hour (start, worker_set, price_version, currency, hourly_price, used_us, other_us, idle_us) VALUES (?, ?, ?, ?, ?, ?, ?, ?)
			ON CONFLICT (start, worker_set, price_version, currency) DO UPDATE SET used_us = worker_hour.used_us + excluded.used_us,
			other_us = worker_hour.other_us + excluded.other_us, idle_us = worker_hour.idle_us + excluded.idle_us`),
			from.Truncate(hours.step).Unix(), t.WorkerSet, t.PriceVersion, t.Currency, t.HourlyPrice, t.Used.Microseconds(), t.Other.Microseconds(), t.Idle.Microseconds())
		if err != nil {
			return nil, false, fail(err)
		}
	}
	if err := tx.Commit(); err != nil {
		return nil, false, fail(err)
	}
	return spent, true, nil
}

// lock reads the events of shares, and keeps others from changing them.
func (l *Ledger) lock(ctx context.Context, tx *sql.Tx, shares []Share) (map[string]*usagev1.Usage, error) {
	args := make([]any, len(shares))
	for i, s := range shares {
		args[i] = s.ID
	}
	statement := `SELECT event FROM usage_event WHERE id IN (` + repeated("?", len(shares)) + `) ORDER BY id`
	if l.postgres {
		statement += " FOR UPDATE"
	}
	rows, err := tx.QueryContext(ctx, l.sql(statement), args...)
	if err != nil {
		return nil, err
	}
	out := make(map[string]*usagev1.Usage, len(shares))
	for rows.Next() {
		var raw []byte
		u := new(usagev1.Usage)
		if err = rows.Scan(&raw); err != nil {
			break
		}
		if err = proto.Unmarshal(raw, u); err != nil {
			break
		}
		out[u.GetId()] = u
	}
	return out, errors.Join(err, rows.Err(), rows.Close())
}

// addTime adds shares to what the requests used before, and returns the sums.
func (l *Ledger) addTime(ctx context.Context, tx *sql.Tx, at time.Time, shares []Share) (map[string]gpu, error) {
	args := make([]any, 0, 4*len(shares))
	for _, s := range shares {
		args = append(args, s.ID, at.UnixMicro(), s.Prefill.Microseconds(), s.Decode.Microseconds())
	}
	rows, err := tx.QueryContext(ctx, l.sql(`INSERT INTO usage_gpu (id, at, prefill_us, decode_us) VALUES `+repeated("(?, ?, ?, ?)", len(shares))+`
		ON CONFLICT (id) DO UPDATE SET at = excluded.at, prefill_us = usage_gpu.prefill_us + excluded.prefill_us, decode_us = usage_gpu.decode_us + excluded.decode_us
		RETURNING id, prefill_us, decode_us`), args...)
	if err != nil {
		return nil, err
	}
	out := make(map[string]gpu, len(shares))
	return out, readTimes(rows, out)
}

// Times sums up the time of workers, by time, then by set. More than most rows are
// ErrTooMany; 0: no bound.
func (l *Ledger) Times(ctx context.Context, from, to time.Time, step Step, most int) ([]WorkerTime, error) {
	t := hours
	if step == Day || step == Month {
		t = days
	}
	f := Filter{From: from, To: to}
	where, args := f.where("start", t.bound)
	rows, err := l.db.QueryContext(ctx, l.sql(`SELECT start, worker_set, price_version, currency, hourly_price, used_us, other_us, idle_us FROM worker_hour`+where+
		` ORDER BY start, worker_set, price_version, currency`), args...)
	if err != nil {
		return nil, fmt.Errorf("query time of workers: %w", err)
	}
	defer rows.Close()
	var out []WorkerTime
	at := map[WorkerTime]int{}
	for rows.Next() {
		var w WorkerTime
		var start, used, other, idle int64
		if err := rows.Scan(&start, &w.WorkerSet, &w.PriceVersion, &w.Currency, &w.HourlyPrice, &used, &other, &idle); err != nil {
			return nil, fmt.Errorf("query time of workers: %w", err)
		}
		w.Start = step.start(time.Unix(start, 0).UTC())
		i, known := at[w]
		if !known {
			if i = len(out); most > 0 && i == most {
				return nil, ErrTooMany
			}
			at[w], out = i, append(out, w)
		}
		o := &out[i]
		o.Used += time.Duration(used) * time.Microsecond
		o.Other += time.Duration(other) * time.Microsecond
		o.Idle += time.Duration(idle) * time.Microsecond
	}
	if err := rows.Err(); err != nil {
		return nil, fmt.Errorf("query time of workers: %w", err)
	}
	slices.SortStableFunc(out, func(a, b WorkerTime) int {
		return cmp.Or(a.Start.Compare(b.Start), cmp.Compare(a.WorkerSet, b.WorkerSet))
	})
	return out, nil
}

// start is the beginning of the step that a time is in; zero without a step.
func (s Step) start(t time.Time) time.Time {
	switch s {
	case Hour:
		return t.Truncate(hours.step)
	case Day:
		return t.Truncate(days.step)
	case Month:
		return time.Date(t.Year(), t.Month(), 1, 0, 0, 0, 0, time.UTC)
	case Whole:
	}
	return time.Time{}
}

// Seq is at least the number of the newest event, and above 0: one that comes later
// has a higher one.
func (l *Ledger) Seq(ctx context.Context) (n int64, err error) {
	if err := l.db.QueryRowContext(ctx, `SELECT CAST(value AS BIGINT) FROM ledger_meta WHERE name = 'seq'`).Scan(&n); err != nil {
		return 0, fmt.Errorf("newest number of ledger: %w", err)
	}
	return n, nil
}

// Follow calls f with the events that came after a number, in the order in which
// they did, and returns the number of the last one that f took.
func (l *Ledger) Follow(ctx context.Context, after int64, f func(*usagev1.Usage)) (int64, error) {
	for {
		rows, err := l.db.QueryContext(ctx, l.sql(fmt.Sprintf(`SELECT seq, event FROM usage_event WHERE seq > ? ORDER BY seq LIMIT %d`, exportPage)), after)
		if err != nil {
			return after, fmt.Errorf("follow ledger: %w", err)
		}
		n := 0
		for rows.Next() {
			var raw []byte
			var seq int64
			u := new(usagev1.Usage)
			if err = rows.Scan(&seq, &raw); err != nil {
				break
			}
			if err = proto.Unmarshal(raw, u); err != nil {
				break
			}
			f(u)
			after = seq
			n++
		}
		if err = errors.Join(err, rows.Err(), rows.Close()); err != nil {
			return after, fmt.Errorf("follow ledger: %w", err)
		}
		if n < exportPage {
			return after, nil
		}
	}
}
