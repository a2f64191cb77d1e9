package accounting

import (
	"context"
	"errors"
	"flag"
	"io"
	"os"

	"github.com/kinference/kinference/internal/daemon"
	"github.com/kinference/kinference/services/accounting/internal/ledger"
)

// Copies are for what a process does once, and ends: copy a ledger, or make one of a
// copy.
type Copies struct {
	// Backup and Restore are paths of a copy; "-" is standard output and input.
	Backup, Restore string
	// In and Out stand for those; nil: the process's own.
	In  io.Reader
	Out io.Writer
}

func (c *Copies) flags(fs *flag.FlagSet) {
	fs.StringVar(&c.Backup, "backup", c.Backup, "write a copy of the SQLite ledger to this file (-: standard output), also while another process works with it, and end")
	fs.StringVar(&c.Restore, "restore", c.Restore, "make the SQLite ledger, which must not be there, of a copy in this file (-: standard input), and end")
}

func (c *Copies) asked() bool { return c.Backup != "" || c.Restore != "" }

func (c *Copies) validate(place string) error {
	switch {
	case c.Backup != "" && c.Restore != "":
		return errors.New("backup and restore are two things")
	case c.asked() && place == "":
		return errors.New("backup and restore need ledger")
	}
	return nil
}

// run copies the ledger at place.
func (c *Copies) run(ctx context.Context, place string) error {
	if c.Restore != "" {
		if err := c.restore(ctx, place); err != nil {
			return err
		}
		daemon.Logger(ctx).Info("ledger is restored")
		return nil
	}
	if err := c.backup(ctx, place); err != nil {
		return err
	}
	daemon.Logger(ctx).Info("ledger is backed up")
	return nil
}

func (c *Copies) restore(ctx context.Context, place string) error {
	if c.Restore == "-" {
		in := c.In
		if in == nil {
			in = os.Stdin
		}
		return ledger.Restore(ctx, place, in)
	}
	f, err := os.Open(c.Restore)
	if err != nil {
		return err
	}
	defer f.Close()
	return ledger.Restore(ctx, place, f)
}

func (c *Copies) backup(ctx context.Context, place string) error {
	if c.Backup == "-" {
		out := c.Out
		if out == nil {
			out = os.Stdout
		}
		return ledger.Backup(ctx, place, out)
	}
	f, err := os.OpenFile(c.Backup, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	if err := errors.Join(ledger.Backup(ctx, place, f), f.Sync(), f.Close()); err != nil {
		return errors.Join(err, os.Remove(c.Backup)) // a part is no copy, and would be in the way of the next one
	}
	return nil
}
