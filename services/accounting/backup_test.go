package accounting_test

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/kinference/kinference/internal/testenv"
	usagev1 "github.com/kinference/kinference/proto/gen/kinference/usage/v1"
	"github.com/kinference/kinference/services/accounting"
	"github.com/kinference/kinference/services/accounting/internal/ledger"
)

// A ledger is copied while events come. What is made of the copy reads the rest of the
// stream, and its sums are those of the ledger that was not lost.
func TestBackupAndRestore(t *testing.T) {
	nats, place := testenv.NATS(t), filepath.Join(t.TempDir(), "ledger.db")
	e := start(t, accounting.Config{NATSURL: nats, Ledger: place})
	publish(t, nats, messages(0, 500)...)
	e.requests(500)
	var coming bytes.Buffer
	done := make(chan struct{})
	go func() { // beside the copy
		defer close(done)
		publish(t, nats, messages(500, 1500)...)
	}()
	backup := func(c accounting.Copies) error {
		s := accounting.Service{Config: accounting.Config{Ledger: place, Copies: c}}
		return s.Run(t.Context())
	}
	if err := backup(accounting.Copies{Backup: "-", Out: &coming}); err != nil {
		t.Fatal(err)
	}
	<-done
	want := e.requests(1500)
	file := filepath.Join(t.TempDir(), "copy.db")
	if err := backup(accounting.Copies{Backup: file}); err != nil {
		t.Fatal(err)
	}
	if err := backup(accounting.Copies{Backup: file}); !errors.Is(err, os.ErrExist) {
		t.Errorf("over a copy that is there: got %v", err)
	}
	if err := backup(accounting.Copies{Restore: file}); !errors.Is(err, os.ErrExist) {
		t.Errorf("over a ledger that is there: got %v", err)
	}
	e.stop()

	for name, c := range map[string]accounting.Copies{"stream": {Restore: "-", In: &coming}, "file": {Restore: file}} {
		t.Run(name, func(t *testing.T) {
			restored := filepath.Join(t.TempDir(), "new", "ledger.db")
			s := accounting.Service{Config: accounting.Config{Ledger: restored, Copies: c}}
			if err := s.Run(t.Context()); err != nil {
				t.Fatal(err)
			}
			e := start(t, accounting.Config{NATSURL: nats, Ledger: restored})
			if got := e.requests(1500); !proto.Equal(got, want) {
				t.Errorf("got %v, want %v", got, want)
			}
			e.stop()
		})
	}
}

// What a killed process leaves beside its ledger is no part of the one that a copy
// becomes: SQLite would write it there.
func TestRestoreBesideLeftovers(t *testing.T) {
	dir := t.TempDir()
	place, file := filepath.Join(dir, "ledger.db"), filepath.Join(dir, "copy.db")
	led, err := ledger.Open(t.Context(), place)
	if err != nil {
		t.Fatal(err)
	}
	defer led.Close() // what is in its journal is not in its file
	run := func(c accounting.Copies) error {
		s := accounting.Service{Config: accounting.Config{Ledger: place, Copies: c}}
		return s.Run(t.Context())
	}
	if err := run(accounting.Copies{Backup: file}); err != nil {
		t.Fatal(err)
	}
	if _, err := led.Add(t.Context(), []*usagev1.Usage{event(1)}); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{place, place + "-wal", place + "-shm"} {
		if err := run(accounting.Copies{Restore: file}); !errors.Is(err, os.ErrExist) || !strings.Contains(err.Error(), path) {
			t.Errorf("beside %s: got %v", path, err)
		}
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
	}
	if err := run(accounting.Copies{Restore: file}); err != nil {
		t.Error(err)
	}
}

func TestCopiesRefuse(t *testing.T) {
	dir := t.TempDir()
	for _, tc := range []struct {
		name   string
		config accounting.Config
		want   string
	}{
		{"both", accounting.Config{Ledger: "x", Copies: accounting.Copies{Backup: "a", Restore: "b"}}, "two things"},
		{"no ledger", accounting.Config{Copies: accounting.Copies{Backup: "a"}}, "need ledger"},
		{"none there", accounting.Config{Ledger: filepath.Join(dir, "none"), Copies: accounting.Copies{Backup: "-", Out: &bytes.Buffer{}}}, "no such file"},
		{"none there, to a file", accounting.Config{Ledger: filepath.Join(dir, "none"), Copies: accounting.Copies{Backup: filepath.Join(dir, "copy")}}, "no such file"},
		{"no copy", accounting.Config{Ledger: filepath.Join(dir, "a"), Copies: accounting.Copies{Restore: "-", In: strings.NewReader(strings.Repeat("x", 5000))}}, "no backup of a ledger"},
		{"PostgreSQL", accounting.Config{Ledger: "postgres://x", Copies: accounting.Copies{Backup: "-"}}, ledger.ErrNotAFile.Error()},
	} {
		s := accounting.Service{Config: tc.config}
		if err := s.Run(t.Context()); err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: got %v, want %q", tc.name, err, tc.want)
		}
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
		t.Errorf("it leaves %v", left)
	}
}
