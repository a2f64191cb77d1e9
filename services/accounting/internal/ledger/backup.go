package ledger

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
)

// ErrNotAFile is returned for a ledger in PostgreSQL, which has tools of its own.
var ErrNotAFile = errors.New("a ledger in PostgreSQL is backed up and restored by pg_dump and pg_restore")

// Backup writes a copy of the SQLite file at place to w: the ledger as it is at one
// moment, also while another process works with it.
func Backup(ctx context.Context, place string, w io.Writer) (err error) {
	if isPostgres(place) {
		return ErrNotAFile
	}
	if _, err := os.Stat(place); err != nil {
		return fmt.Errorf("back up ledger: %w", err)
	}
	db, err := openFile(place)
	if err != nil {
		return fmt.Errorf("back up ledger: %w", err)
	}
	defer db.Close()
	// Beside the ledger, where there is room for it.
	dir, err := os.MkdirTemp(filepath.Dir(place), "backup-")
	if err != nil {
		return fmt.Errorf("back up ledger: %w", err)
	}
	defer func() { _ = os.RemoveAll(dir) }() // scratch
	path := filepath.Join(dir, "ledger.db")
	if _, err := db.ExecContext(ctx, "VACUUM INTO ?", path); err != nil {
		return fmt.Errorf("back up ledger: %w", err)
	}
	f, err := os.Open(path)
	if err != nil {
		return fmt.Errorf("back up ledger: %w", err)
	}
	defer f.Close()
	if _, err := io.Copy(w, f); err != nil {
		return fmt.Errorf("write backup: %w", err)
	}
	return nil
}

// Restore makes the SQLite file at place of a copy that Backup wrote. There must be
// none yet, nor what a killed process leaves beside one: SQLite would take that for a
// part of the new ledger. The ledger gets a new name, so that the next process reads
// all that the stream still holds: what the copy has is not counted again.
func Restore(ctx context.Context, place string, r io.Reader) (err error) {
	if isPostgres(place) {
		return ErrNotAFile
	}
	for _, path := range []string{place, place + "-wal", place + "-shm", place + "-journal"} {
		if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("restore ledger: %s is there already (%w): move it away first", path, errors.Join(err, os.ErrExist))
		}
	}
	if err := os.MkdirAll(filepath.Dir(place), 0o700); err != nil {
		return fmt.Errorf("restore ledger: %w", err)
	}
	dir, err := os.MkdirTemp(filepath.Dir(place), "restore-")
	if err != nil {
		return fmt.Errorf("restore ledger: %w", err)
	}
	defer func() { _ = os.RemoveAll(dir) }() // scratch
	path := filepath.Join(dir, "ledger.db")
	f, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		return fmt.Errorf("restore ledger: %w", err)
	}
	_, err = io.Copy(f, r)
	if err = errors.Join(err, f.Sync(), f.Close()); err != nil {
		return fmt.Errorf("read backup: %w", err)
	}
	l, err := Open(ctx, path)
	if err != nil {
		return fmt.Errorf("it is no backup of a ledger: %w", err)
	}
	var verdict string
	err = l.db.QueryRowContext(ctx, "PRAGMA integrity_check").Scan(&verdict)
	if err == nil && verdict != "ok" {
		err = fmt.Errorf("the backup is damaged: %.200s", verdict)
	}
	if err == nil {
		_, err = l.db.ExecContext(ctx, "UPDATE ledger_meta SET value = ? WHERE name = 'store'", newName())
	}
	if err == nil { // one file, not one and its journal
		_, err = l.db.ExecContext(ctx, "PRAGMA journal_mode = DELETE")
	}
	if err = errors.Join(err, l.Close()); err != nil {
		return fmt.Errorf("restore ledger: %w", err)
	}
	if err := os.Rename(path, place); err != nil {
		return fmt.Errorf("restore ledger: %w", err)
	}
	return nil
}
