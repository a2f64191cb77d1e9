package ledger

import (
	"cmp"
	"context"
	"database/sql"
	"fmt"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"

	usagev1 "github.com/kinference/kinference/proto/gen/kinference/usage/v1"
)

// Added tells what became of events.
type Added struct {
	// New ones count now. Known ones did before. Replaced ones took the place of
	// one that was recovered from a spool.
	New, Known, Replaced int
	// Fresh are the events that are new.
	Fresh []*usagev1.Usage
}

// key tells sums apart.
type key struct {
	start  int64 // Unix seconds
	values [8]string
}

func (k key) compare(o key) int {
	if c := cmp.Compare(k.start, o.start); c != 0 {
		return c
	}
	return slices.Compare(k.values[:], o.values[:])
}

// sums are what is added to a row.
type sums struct {
	prices [4]string
	counts [12]int64
	money  [4]Money
}

// Add adds events, all or none.
func (l *Ledger) Add(ctx context.Context, events []*usagev1.Usage) (a Added, err error) {
	tx, err := l.db.BeginTx(ctx, nil)
	if err != nil {
		return Added{}, fmt.Errorf("add to ledger: %w", err)
	}
	defer func() { _ = tx.Rollback() }() // of a transaction that was committed it does nothing
	seq, err := l.reserve(ctx, tx, len(events))
	if err != nil {
		return Added{}, fmt.Errorf("add to ledger: %w", err)
	}
	insert, err := tx.PrepareContext(ctx, l.sql(`INSERT INTO usage_event (id, ended, recovered, tenant, organisation, model, event, seq) VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO NOTHING`))
	if err != nil {
		return Added{}, fmt.Errorf("add to ledger: %w", err)
	}
	defer insert.Close()
	hourly, daily := map[key]*sums{}, map[key]*sums{}
	change := func(u *usagev1.Usage, sign int64) {
		if u.GetOverload() { // it used nothing
			return
		}
		add(hourly, hours, u, sign)
		add(daily, days, u, sign)
	}
	for _, u := range events {
		clean(u)
	}
	// Of a ledger that reads the stream again.
	used, err := l.gpuOf(ctx, tx, events)
	if err != nil {
		return Added{}, fmt.Errorf("add to ledger: %w", err)
	}
	for _, u := range events {
		seq++
		raw, err := proto.Marshal(u)
		if err != nil {
			return Added{}, fmt.Errorf("add to ledger: %w", err)
		}
		r, err := insert.ExecContext(ctx, u.GetId(), u.GetEnded().AsTime().UnixMicro(), bit(u.GetRecovered()), tenant(u), organisation(u), u.GetModel(), raw, seq)
		if err != nil {
			return Added{}, fmt.Errorf("add to ledger: %w", err)
		}
		switch n, err := r.RowsAffected(); {
		case err != nil:
			return Added{}, fmt.Errorf("add to ledger: %w", err)
		case n > 0:
			used[u.GetId()].fill(u)
			change(u, 1)
			a.New++
			a.Fresh = append(a.Fresh, u)
			continue
		case u.GetRecovered():
			a.Known++
			continue
		}
		old, err := l.replace(ctx, tx, u, raw)
		switch {
		case err != nil:
			return Added{}, fmt.Errorf("replace in ledger: %w", err)
		case old == nil:
			a.Known++
		default:
			change(old, -1)
			change(u, 1)
			a.Replaced++
		}
	}
	if err := l.apply(ctx, tx, hours, hourly); err != nil {
		return Added{}, err
	}
	if err := l.apply(ctx, tx, days, daily); err != nil {
		return Added{}, err
	}
	if err := tx.Commit(); err != nil {
		return Added{}, fmt.Errorf("add to ledger: %w", err)
	}
	return a, nil
}

// reserve takes n numbers for events, and returns the last one before them. Whoever
// comes next waits for the end of the transaction, so that numbers become visible in
// their order.
func (l *Ledger) reserve(ctx context.Context, tx *sql.Tx, n int) (int64, error) {
	var last int64
	err := tx.QueryRowContext(ctx, l.sql(`UPDATE ledger_meta SET value = CAST(CAST(value AS BIGINT) + ? AS TEXT) WHERE name = 'seq' RETURNING CAST(value AS BIGINT)`), n).Scan(&last)
	return last - int64(n), err
}

// replace puts an event in the place of one that was recovered, and returns that;
// nil if the one in the ledger is as good.
func (l *Ledger) replace(ctx context.Context, tx *sql.Tx, u *usagev1.Usage, raw []byte) (*usagev1.Usage, error) {
	lock := ""
	if l.postgres {
		lock = " FOR UPDATE"
	}
	var old []byte
	var recovered int64
	if err := tx.QueryRowContext(ctx, l.sql(`SELECT event, recovered FROM usage_event WHERE id = ?`+lock), u.GetId()).Scan(&old, &recovered); err != nil {
		return nil, err
	}
	if recovered == 0 {
		return nil, nil
	}
	before := new(usagev1.Usage)
	if err := proto.Unmarshal(old, before); err != nil {
		return nil, err
	}
	used, err := l.gpuOf(ctx, tx, []*usagev1.Usage{u}) // as it is now that the event is locked
	if err != nil {
		return nil, err
	}
	used[u.GetId()].fill(before)
	used[u.GetId()].fill(u)
	_, err = tx.ExecContext(ctx, l.sql(`UPDATE usage_event SET ended = ?, recovered = 0, tenant = ?, organisation = ?, model = ?, event = ? WHERE id = ?`),
		u.GetEnded().AsTime().UnixMicro(), tenant(u), organisation(u), u.GetModel(), raw, u.GetId())
	return before, err
}

// apply adds sums to a table. All processes go through the rows in one order, so
// that they do not wait for each other in a circle.
func (l *Ledger) apply(ctx context.Context, tx *sql.Tx, t table, changes map[key]*sums) error {
	list := make([]key, 0, len(changes))
	for k := range changes {
		list = append(list, k)
	}
	slices.SortFunc(list, key.compare)
	if len(list) == 0 {
		return nil
	}
	upsert, err := tx.PrepareContext(ctx, l.sql(upsertStatement(t)))
	if err != nil {
		return fmt.Errorf("add to %s: %w", t.name, err)
	}
	defer upsert.Close()
	for _, k := range list {
		s := changes[k]
		args := []any{k.start}
		for _, v := range k.values {
			args = append(args, v)
		}
		for _, v := range s.prices {
			args = append(args, v)
		}
		for _, v := range s.counts {
			args = append(args, v)
		}
		for _, m := range s.money {
			args = append(args, m.Whole, m.Pico)
		}
		if _, err := upsert.ExecContext(ctx, args...); err != nil {
			return fmt.Errorf("add to %s: %w", t.name, err)
		}
	}
	return nil
}

func upsertStatement(t table) string {
	var set []string
	for _, c := range countColumns {
		set = append(set, fmt.Sprintf("%[1]s = %[2]s.%[1]s + excluded.%[1]s", c, t.name))
	}
	for _, c := range moneyColumns {
		set = append(set,
			fmt.Sprintf("%[1]s = %[2]s.%[1]s + excluded.%[1]s + (%[2]s.%[1]s_pico + excluded.%[1]s_pico) / %[3]d", c, t.name, int64(unit)),
			fmt.Sprintf("%[1]s_pico = (%[2]s.%[1]s_pico + excluded.%[1]s_pico) %% %[3]d", c, t.name, int64(unit)))
	}
	return "INSERT INTO " + t.name + " (" + strings.Join(sumColumns, ", ") + ") VALUES (" + repeated("?", len(sumColumns)) + ") ON CONFLICT (start, " + strings.Join(keyColumns, ", ") + ") DO UPDATE SET " + strings.Join(set, ", ")
}

// add adds an event to the sums of its row, or takes it off.
func add(to map[key]*sums, t table, u *usagev1.Usage, sign int64) {
	backend, endpoint := u.GetWorkerSet(), u.GetWorker()
	if p := u.GetProvider(); p != "" {
		backend, endpoint = p, p
	}
	c := u.GetCost()
	k := key{u.GetEnded().AsTime().Truncate(t.step).Unix(), [8]string{
		tenant(u), organisation(u), u.GetCostCenter(), u.GetModel(), backend, endpoint, c.GetPriceVersion(), c.GetCurrency()}}
	s := to[k]
	if s == nil {
		s = &sums{prices: [4]string{c.GetInputPrice(), c.GetCachedInputPrice(), c.GetOutputPrice(), c.GetHourlyPrice()}}
		to[k] = s
	}
	tokens := u.GetTokens()
	is := func(o usagev1.Outcome) int64 { return bit(u.GetOutcome() == o) }
	estimated := tokens.GetInputEstimated() || tokens.GetCachedInputEstimated() || tokens.GetOutputEstimated() || tokens.GetReasoningEstimated()
	unmetered := u.GetOutcome() == usagev1.Outcome_OUTCOME_OK && (tokens == nil || tokens.Input == nil || tokens.Output == nil)
	for i, n := range [12]int64{
		bit(!u.GetHedge()), is(usagev1.Outcome_OUTCOME_FAILED), bit(u.GetOutcome() == usagev1.Outcome_OUTCOME_CANCELED && !u.GetHedge()), is(usagev1.Outcome_OUTCOME_REFUSED), bit(estimated), bit(unmetered),
		bit(u.GetRecovered()), int64(tokens.GetInput()), int64(tokens.GetCachedInput()), int64(tokens.GetOutput()), int64(tokens.GetReasoning()),
		micros(u.GetGpuPrefill()) + micros(u.GetGpuDecode()),
	} {
		s.counts[i] += sign * n
	}
	for i, text := range [4]string{c.GetInput(), c.GetCachedInput(), c.GetOutput(), c.GetGpu()} {
		m, _ := ParseMoney(text) // what is none counts nothing
		s.money[i] = s.money[i].Plus(m.times(sign))
	}
}

func bit(b bool) int64 {
	if b {
		return 1
	}
	return 0
}

func tenant(u *usagev1.Usage) string {
	if t := u.GetTenants(); len(t) > 0 {
		return t[0]
	}
	return ""
}

func organisation(u *usagev1.Usage) string {
	if t := u.GetTenants(); len(t) > 0 {
		return t[len(t)-1]
	}
	return ""
}

// clean removes what PostgreSQL does not take in text: one such event would
// keep all others out.
func clean(u *usagev1.Usage) {
	for _, s := range []*string{&u.Id, &u.Model, &u.CostCenter, &u.WorkerSet, &u.Worker, &u.Provider} {
		*s = strings.ReplaceAll(*s, "\x00", "")
	}
	for i := range u.Tenants {
		u.Tenants[i] = strings.ReplaceAll(u.Tenants[i], "\x00", "")
	}
	if c := u.Cost; c != nil {
		for _, s := range []*string{&c.Currency, &c.PriceVersion, &c.InputPrice, &c.CachedInputPrice, &c.OutputPrice, &c.HourlyPrice} {
			*s = strings.ReplaceAll(*s, "\x00", "")
		}
	}
}

// Newest is when the newest event ended; zero if there is none.
func (l *Ledger) Newest(ctx context.Context) (time.Time, error) {
	var us sql.NullInt64
	if err := l.db.QueryRowContext(ctx, `SELECT MAX(ended) FROM usage_event`).Scan(&us); err != nil {
		return time.Time{}, fmt.Errorf("newest of ledger: %w", err)
	}
	if !us.Valid {
		return time.Time{}, nil
	}
	return time.UnixMicro(us.Int64), nil
}
