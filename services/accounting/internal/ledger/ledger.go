// Package ledger keeps usage events and their sums in a SQL database.
//
// The same statements run on SQLite, which is embedded, and on PostgreSQL. An
// event is added in one transaction with the sums of its hour and day, under its
// id: added again, by whatever process, it changes nothing. So the sums are those
// of each event once, in any order of arrival. All of it can be made again from
// the stream. Money is kept as whole units and 10⁻¹² parts, never as a float.
// Methods are safe for concurrent use, by several processes too on PostgreSQL;
// an error of the database leaves the ledger as it was.
package ledger

import (
	"context"
	"crypto/rand"
	"database/sql"
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	_ "github.com/jackc/pgx/v5/stdlib" // driver "pgx"
	_ "modernc.org/sqlite"             // driver "sqlite"
)

// Ledger is an open database.
type Ledger struct {
	db       *sql.DB
	postgres bool
	name     string
}

// schemaVersion is that of schema. A ledger of a later one is not opened, one of
// the first is changed.
const schemaVersion = "2"

const metaTable = `CREATE TABLE IF NOT EXISTS ledger_meta (name TEXT PRIMARY KEY, value TEXT NOT NULL)`

// schema works in both databases. SQLite takes a type for a hint, and makes an
// integer of BIGINT and a blob of bytes.
//
// seq of events grows in the order in which they are committed. usage_gpu is apart
// from the events because it is not on the stream: a ledger that reads that again
// keeps it.
var schema = []string{
	`CREATE TABLE IF NOT EXISTS usage_event (
		id TEXT PRIMARY KEY, ended BIGINT NOT NULL, recovered BIGINT NOT NULL,
		tenant TEXT NOT NULL, organisation TEXT NOT NULL, model TEXT NOT NULL, event BYTEA NOT NULL, seq BIGINT NOT NULL DEFAULT 0)`,
	`CREATE INDEX IF NOT EXISTS usage_event_ended ON usage_event (ended, id)`,
	`CREATE INDEX IF NOT EXISTS usage_event_seq ON usage_event (seq)`,
	sumTable(hours), sumTable(days),
	`CREATE TABLE IF NOT EXISTS usage_gpu (id TEXT PRIMARY KEY, at BIGINT NOT NULL, prefill_us BIGINT NOT NULL, decode_us BIGINT NOT NULL)`,
	`CREATE INDEX IF NOT EXISTS usage_gpu_at ON usage_gpu (at)`,
	`CREATE TABLE IF NOT EXISTS worker_hour (
		start BIGINT NOT NULL, worker_set TEXT NOT NULL, price_version TEXT NOT NULL, currency TEXT NOT NULL, hourly_price TEXT NOT NULL,
		used_us BIGINT NOT NULL, other_us BIGINT NOT NULL, idle_us BIGINT NOT NULL, PRIMARY KEY (start, worker_set, price_version, currency))`,
}

// fromFirst changes a ledger of the first version.
var fromFirst = []string{
	`ALTER TABLE usage_event ADD COLUMN seq BIGINT NOT NULL DEFAULT 0`,
	`ALTER TABLE usage_hour ADD COLUMN gpu_us BIGINT NOT NULL DEFAULT 0`,
	`ALTER TABLE usage_day ADD COLUMN gpu_us BIGINT NOT NULL DEFAULT 0`,
	`ALTER TABLE usage_hour ADD COLUMN hourly_price TEXT NOT NULL DEFAULT ''`,
	`ALTER TABLE usage_day ADD COLUMN hourly_price TEXT NOT NULL DEFAULT ''`,
	`UPDATE ledger_meta SET value = '2' WHERE name = 'schema'`,
}

// table is one of the tables of sums.
type table struct {
	name string
	step time.Duration
}

var (
	hours = table{"usage_hour", time.Hour}
	days  = table{"usage_day", 24 * time.Hour}
)

// keyColumns tell rows of sums apart, besides the time.
var keyColumns = []string{"tenant", "organisation", "cost_center", "model", "backend", "endpoint", "price_version", "currency"}

// priceColumns go with the price version.
var priceColumns = []string{"input_price", "cached_price", "output_price", "hourly_price"}

// countColumns are sums of whole numbers.
var countColumns = []string{"requests", "failed", "canceled", "refused", "estimated", "unmetered", "recovered", "input", "cached", "output", "reasoning", "gpu_us"}

// moneyColumns are sums of money: each has a column of whole units and one of
// 10⁻¹² parts, below one unit.
var moneyColumns = []string{"input_cost", "cached_cost", "output_cost", "gpu_cost"}

// sumColumns are those of a table of sums.
var sumColumns = func() []string {
	out := slices.Concat([]string{"start"}, keyColumns, priceColumns, countColumns)
	for _, c := range moneyColumns {
		out = append(out, c, c+"_pico")
	}
	return out
}()

func sumTable(t table) string {
	var b strings.Builder
	b.WriteString("CREATE TABLE IF NOT EXISTS " + t.name + " (start BIGINT NOT NULL")
	for _, c := range keyColumns {
		b.WriteString(", " + c + " TEXT NOT NULL")
	}
	for _, c := range priceColumns {
		b.WriteString(", " + c + " TEXT NOT NULL")
	}
	for _, c := range countColumns {
		b.WriteString(", " + c + " BIGINT NOT NULL")
	}
	for _, c := range moneyColumns {
		b.WriteString(", " + c + " BIGINT NOT NULL, " + c + "_pico BIGINT NOT NULL")
	}
	b.WriteString(", PRIMARY KEY (start, " + strings.Join(keyColumns, ", ") + "))")
	return b.String()
}

// Open opens the ledger at a place: a postgres:// URL, or the path of a SQLite
// file, whose folder is made. ctx bounds the call.
func Open(ctx context.Context, place string) (*Ledger, error) {
	l := &Ledger{postgres: isPostgres(place)}
	var err error
	if l.postgres {
		l.db, err = sql.Open("pgx", place)
	} else {
		l.db, err = openFile(place)
	}
	if err == nil {
		err = l.prepare(ctx)
	}
	if err != nil {
		if l.db != nil {
			l.db.Close()
		}
		return nil, fmt.Errorf("open ledger: %w", err)
	}
	return l, nil
}

func isPostgres(place string) bool {
	return strings.HasPrefix(place, "postgres://") || strings.HasPrefix(place, "postgresql://")
}

func openFile(path string) (*sql.DB, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return nil, err
	}
	q := url.Values{"_txlock": {"immediate"}}
	// Events are acknowledged when they are in here, so each commit is synced.
	for _, p := range []string{"busy_timeout(10000)", "journal_mode(WAL)", "synchronous(FULL)", "foreign_keys(1)"} {
		q.Add("_pragma", p)
	}
	return sql.Open("sqlite", (&url.URL{Scheme: "file", Opaque: (&url.URL{Path: path}).EscapedPath(), RawQuery: q.Encode()}).String())
}

// Redact is a place without the password in it.
func Redact(place string) string {
	u, err := url.Parse(place)
	if err != nil || u.User == nil {
		return place
	}
	return u.Redacted()
}

func (l *Ledger) prepare(ctx context.Context) error {
	l.db.SetMaxOpenConns(8)
	l.db.SetMaxIdleConns(8)
	tx, err := l.db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer func() { _ = tx.Rollback() }() // of a transaction that was committed it does nothing
	if l.postgres {                      // processes that start together would trip over each other
		if _, err := tx.ExecContext(ctx, "SELECT pg_advisory_xact_lock(7106)"); err != nil {
			return err
		}
	}
	if _, err := tx.ExecContext(ctx, metaTable); err != nil {
		return err
	}
	var version string
	if err := tx.QueryRowContext(ctx, `SELECT value FROM ledger_meta WHERE name = 'schema'`).Scan(&version); err != nil && !errors.Is(err, sql.ErrNoRows) {
		return err
	}
	var statements []string
	switch version {
	case schemaVersion: // nothing that would wait for those at work
	case "":
		statements = schema
	case "1":
		statements = append(slices.Clone(fromFirst), schema...)
	default:
		return fmt.Errorf("it has the form %.16q, this version knows %s", version, schemaVersion)
	}
	for _, s := range statements {
		if _, err := tx.ExecContext(ctx, s); err != nil {
			return err
		}
	}
	for _, m := range [][2]string{{"schema", schemaVersion}, {"seq", "1"}} {
		if _, err := l.meta(ctx, tx, m[0], m[1]); err != nil {
			return err
		}
	}
	if l.name, err = l.meta(ctx, tx, "store", newName()); err != nil {
		return err
	}
	return tx.Commit()
}

func newName() string { return strings.ToLower(rand.Text()[:12]) }

// meta returns a setting, and sets it first if there is none.
func (l *Ledger) meta(ctx context.Context, tx *sql.Tx, name, otherwise string) (value string, err error) {
	if _, err := tx.ExecContext(ctx, l.sql(`INSERT INTO ledger_meta (name, value) VALUES (?, ?) ON CONFLICT (name) DO NOTHING`), name, otherwise); err != nil {
		return "", err
	}
	err = tx.QueryRowContext(ctx, l.sql(`SELECT value FROM ledger_meta WHERE name = ?`), name).Scan(&value)
	return value, err
}

// sql is a statement with the placeholders of the database.
func (l *Ledger) sql(s string) string {
	if !l.postgres {
		return s
	}
	var b strings.Builder
	for n := 1; ; n++ {
		before, after, found := strings.Cut(s, "?")
		b.WriteString(before)
		if !found {
			return b.String()
		}
		b.WriteString("$" + strconv.Itoa(n))
		s = after
	}
}

// repeated is a list of n times s.
func repeated(s string, n int) string { return strings.TrimSuffix(strings.Repeat(s+", ", n), ", ") }

// Name names what is in this database: another one, or one that was made again,
// has another name. It names the consumer of the stream, so that a new ledger
// reads all of it.
func (l *Ledger) Name() string { return l.name }

// Close closes the database.
func (l *Ledger) Close() error { return l.db.Close() }

// Forget removes everything since a time, so that it can be read again, and gives
// the ledger a new name. The time must be the beginning of a day (UTC), or zero
// for all.
func (l *Ledger) Forget(ctx context.Context, since time.Time) error {
	if since.IsZero() {
		since = time.Unix(0, 0)
	}
	if !since.Truncate(days.step).Equal(since) {
		return errors.New("forget: not the beginning of a day")
	}
	tx, err := l.db.BeginTx(ctx, nil)
	if err != nil {
		return fmt.Errorf("forget: %w", err)
	}
	defer func() { _ = tx.Rollback() }() // of a transaction that was committed it does nothing
	for _, s := range []struct {
		statement string
		value     int64
	}{
		{`DELETE FROM usage_event WHERE ended >= ?`, since.UnixMicro()},
		{`DELETE FROM usage_hour WHERE start >= ?`, since.Unix()},
		{`DELETE FROM usage_day WHERE start >= ?`, since.Unix()},
	} {
		if _, err := tx.ExecContext(ctx, l.sql(s.statement), s.value); err != nil {
			return fmt.Errorf("forget: %w", err)
		}
	}
	name := newName()
	if _, err := tx.ExecContext(ctx, l.sql(`UPDATE ledger_meta SET value = ? WHERE name = 'store'`), name); err != nil {
		return fmt.Errorf("forget: %w", err)
	}
	if err := tx.Commit(); err != nil {
		return fmt.Errorf("forget: %w", err)
	}
	l.name = name
	return nil
}

// Prune removes events that ended before one time, and the sums of hours before
// another. Sums of days and the time of workers stay.
func (l *Ledger) Prune(ctx context.Context, events, hour time.Time) error {
	for _, s := range []struct {
		statement string
		value     int64
	}{
		{`DELETE FROM usage_event WHERE ended < ?`, events.UnixMicro()},
		{`DELETE FROM usage_gpu WHERE at < ?`, events.UnixMicro()},
		{`DELETE FROM usage_hour WHERE start < ?`, hour.Unix()},
	} {
		if _, err := l.db.ExecContext(ctx, l.sql(s.statement), s.value); err != nil {
			return fmt.Errorf("prune the ledger: %w", err)
		}
	}
	return nil
}

// Size is how many bytes the database has on disk.
func (l *Ledger) Size(ctx context.Context) (n int64, err error) {
	statement := `SELECT page_count * page_size FROM pragma_page_count(), pragma_page_size()`
	if l.postgres {
		statement = `SELECT CAST(SUM(pg_total_relation_size(CAST(name AS regclass))) AS BIGINT) FROM (VALUES ('usage_event'), ('usage_gpu'), ('usage_hour'), ('usage_day'), ('worker_hour')) AS tables (name)`
	}
	if err := l.db.QueryRowContext(ctx, statement).Scan(&n); err != nil {
		return 0, fmt.Errorf("size of ledger: %w", err)
	}
	return n, nil
}

// Temporary reports whether the error of Open may go away by itself: the server
// cannot be reached, or is starting.
func Temporary(err error) bool {
	var pg *pgconn.PgError
	if errors.As(err, &pg) {
		return strings.HasPrefix(pg.Code, "57P") || strings.HasPrefix(pg.Code, "08") || strings.HasPrefix(pg.Code, "53")
	}
	var connect *pgconn.ConnectError
	return errors.As(err, &connect)
}
