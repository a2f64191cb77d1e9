package access

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"log/slog"
	"os"
	"regexp"
	"strings"
	"sync/atomic"
	"time"
)

const (
	// reread is how often the file is looked at.
	reread = time.Second
	// maxFile and maxTokens bound the file.
	maxFile   = 1 << 20
	maxTokens = 4096
)

// Tokens is a source of static tokens in a file. Each line has a name, a role (read
// or operate) and the SHA-256 of the token in hexadecimal digits; # begins a
// comment. What cannot be read grants nothing: a wrong line is skipped and logged,
// and without the file nobody is known. Use NewTokens.
type Tokens struct {
	path string
	log  *slog.Logger
	now  atomic.Pointer[map[[sha256.Size]byte]*Caller]
	read []byte // of the file, as last read
}

// NewTokens reads the file; it fails when that cannot be read.
func NewTokens(path string, log *slog.Logger) (*Tokens, error) {
	t := &Tokens{path: path, log: log}
	raw, err := readFile(path)
	if err != nil {
		return nil, fmt.Errorf("read tokens: %w", err)
	}
	t.take(raw)
	return t, nil
}

// Run reads the file again when it changes, until ctx is done.
func (t *Tokens) Run(ctx context.Context) error {
	tick := time.NewTicker(reread)
	defer tick.Stop()
	for lost := false; ; {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		raw, err := readFile(t.path)
		switch {
		case err != nil && !lost:
			t.log.Error("admin tokens cannot be read: nobody is let in by them", "err", err)
			t.take(nil)
		case err == nil && (lost || !bytes.Equal(raw, t.read)):
			t.take(raw)
		}
		lost = err != nil
	}
}

func readFile(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	raw, err := io.ReadAll(io.LimitReader(f, maxFile+1))
	if len(raw) > maxFile {
		return nil, fmt.Errorf("%s is longer than %d bytes", path, maxFile)
	}
	return raw, err
}

func (t *Tokens) take(raw []byte) {
	known := map[[sha256.Size]byte]*Caller{}
	n, more := 0, 0
	for line := range strings.Lines(string(raw)) {
		n++
		hash, c, err := parseToken(line)
		switch {
		case err != nil:
			t.log.Error("a line of the admin tokens is wrong and skipped", "line", n, "err", err)
		case c == nil:
		case len(known) == maxTokens:
			more++
		default:
			known[hash] = c
		}
	}
	if more > 0 {
		t.log.Error("there are too many admin tokens: the last are skipped", "most", maxTokens, "skipped", more)
	}
	t.read = raw
	t.now.Store(&known)
	t.log.Info("admin tokens read", "tokens", len(known))
}

var tokenName = regexp.MustCompile(`^[A-Za-z0-9][-._@A-Za-z0-9]{0,62}$`)

// parseToken reads a line; nil for an empty one. Its errors do not repeat it: it may
// hold a token by mistake.
func parseToken(line string) (hash [sha256.Size]byte, c *Caller, err error) {
	line, _, _ = strings.Cut(line, "#")
	words := strings.Fields(line)
	if len(words) == 0 {
		return hash, nil, nil
	}
	if len(words) != 3 {
		return hash, nil, fmt.Errorf("want NAME ROLE SHA256, got %d words", len(words))
	}
	role := Role(words[1])
	if role != Read && role != Operate {
		return hash, nil, fmt.Errorf("the role is neither %s nor %s", Read, Operate)
	}
	if !tokenName.MatchString(words[0]) {
		return hash, nil, fmt.Errorf("the name is not of letters, digits and -._@, at most 63")
	}
	raw, err := hex.DecodeString(strings.TrimPrefix(words[2], "sha256:"))
	if err != nil || len(raw) != len(hash) {
		return hash, nil, fmt.Errorf("the SHA-256 is not %d hexadecimal digits", 2*len(hash))
	}
	return [sha256.Size]byte(raw), static(words[0], "file", role), nil
}

// Lookup implements Source.
func (t *Tokens) Lookup(_ context.Context, token string) (*Caller, error) {
	return (*t.now.Load())[sha256.Sum256([]byte(token))], nil
}
