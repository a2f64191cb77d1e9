package tlsfile_test

import (
	"bytes"
	"context"
	"crypto/tls"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/kinference/kinference/internal/testenv"
	"github.com/kinference/kinference/internal/tlsfile"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// lines is a log that may be read while it is written.
type lines struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lines) has(text string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Contains(l.b.String(), text)
}

func mounted(dir string) tlsfile.Files {
	return tlsfile.Files{Cert: filepath.Join(dir, "tls.crt"), Key: filepath.Join(dir, "tls.key"), CA: filepath.Join(dir, "ca.crt")}
}

func open(t *testing.T, f tlsfile.Files, log io.Writer) *tlsfile.Source {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	t.Cleanup(cancel)
	s, err := tlsfile.Open(ctx, f, slog.New(slog.NewTextHandler(log, nil)))
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// shake is a handshake over loopback: what the server's certificate is, or why there
// is none.
func shake(t *testing.T, server, client *tls.Config) (serial int64, err error) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	failed := make(chan error, 1)
	go func() {
		conn, err := l.Accept()
		if err == nil {
			defer conn.Close()
			err = tls.Server(conn, server).Handshake()
		}
		failed <- err
	}()
	conn, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	c := tls.Client(conn, client)
	err = c.Handshake()
	if err == nil {
		serial = c.ConnectionState().PeerCertificates[0].SerialNumber.Int64()
	}
	_ = conn.Close()
	// The server looks at the client's certificate when the client is done.
	if other := <-failed; err == nil {
		err = other
	}
	return serial, err
}

func until(t *testing.T, what string, ok func() bool) {
	t.Helper()
	deadline, tick := time.After(30*time.Second), time.NewTicker(10*time.Millisecond)
	defer tick.Stop()
	for !ok() {
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatalf("not within 30 s: %s", what)
		}
	}
}

// A Secret that is renewed, and one whose authority is another, count without a
// restart; one that is broken does not.
func TestSecretChanges(t *testing.T) {
	dir, first, second := filepath.Join(t.TempDir(), "tls"), testenv.NewAuthority(t, "first"), testenv.NewAuthority(t, "second")
	first.Secret(t, dir)
	log := &lines{}
	s := open(t, mounted(dir), log)
	old := s.Client("localhost")
	serial, err := shake(t, s.Server(true), old)
	if err != nil {
		t.Fatal(err)
	}
	// cert-manager renews.
	first.Secret(t, dir)
	until(t, "the renewed certificate is served", func() bool {
		now, err := shake(t, s.Server(true), s.Client("127.0.0.1"))
		return err == nil && now != serial
	})
	// Another authority: both sides follow, a client of the old one is not let in.
	second.Secret(t, dir)
	until(t, "the other authority is believed", func() bool {
		_, err := shake(t, s.Server(true), s.Client("localhost"))
		_, stale := shake(t, s.Server(true), old)
		return err == nil && stale != nil
	})
	// A broken one.
	if err := os.WriteFile(filepath.Join(dir, "..data", "tls.crt"), []byte("no certificate"), 0o600); err != nil {
		t.Fatal(err)
	}
	// Only a change of the folder itself is noticed at once, as with a Secret.
	if err := os.WriteFile(filepath.Join(dir, "touched"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	until(t, "the log says so", func() bool { return log.has("the last good ones stay") })
	if _, err := shake(t, s.Server(true), s.Client("localhost")); err != nil {
		t.Error("the last good certificate is not in use:", err)
	}
}

func TestWhoIsLetIn(t *testing.T) {
	ours, others := testenv.NewAuthority(t, "ours"), testenv.NewAuthority(t, "others")
	a, b := filepath.Join(t.TempDir(), "a"), filepath.Join(t.TempDir(), "b")
	ours.Secret(t, a, "kinference-router")
	others.Secret(t, b, "kinference-router")
	us, them := open(t, mounted(a), io.Discard), open(t, mounted(b), io.Discard)
	anybody := open(t, tlsfile.Files{CA: filepath.Join(a, "ca.crt")}, io.Discard)
	stranger := them.Client("kinference-router")
	stranger.RootCAs = us.Client("").RootCAs // it believes us, we do not believe it
	for _, tc := range []struct {
		name           string
		server, client *tls.Config
		want           string
	}{
		{"one of ours", us.Server(true), us.Client("kinference-router"), ""},
		{"by address", us.Server(true), us.Client("127.0.0.1"), ""},
		{"another name", us.Server(true), us.Client("kinference-limiter"), "not kinference-limiter"},
		{"another authority's server", them.Server(false), us.Client("kinference-router"), "unknown authority"},
		{"another authority's caller", us.Server(true), stranger, "certificate"},
		{"no certificate", us.Server(true), anybody.Client("kinference-router"), "certificate"},
		{"none asked for", us.Server(false), anybody.Client("kinference-router"), ""},
		{"old TLS", us.Server(false), &tls.Config{RootCAs: us.Client("").RootCAs, ServerName: "localhost", MaxVersion: tls.VersionTLS11}, "version"}, //nolint:gosec // what is to be refused
		{"nothing to serve with", anybody.Server(false), us.Client("kinference-router"), "error"},
	} {
		_, err := shake(t, tc.server, tc.client)
		if (err == nil) != (tc.want == "") || err != nil && !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: got %v, want %q", tc.name, err, tc.want)
		}
	}
}

func TestOpenRefuses(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "tls")
	testenv.NewAuthority(t, "a").Secret(t, dir)
	good, bad := mounted(dir), filepath.Join(dir, "bad")
	if err := os.WriteFile(bad, []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		files tlsfile.Files
		want  string
	}{
		{tlsfile.Files{Cert: good.Cert}, "go together"},
		{tlsfile.Files{Cert: good.Cert, Key: filepath.Join(dir, "none")}, "read key"},
		{tlsfile.Files{Cert: bad, Key: good.Key}, "certificate"},
		{tlsfile.Files{Cert: good.Cert, Key: good.Key, CA: bad}, "no certificate"},
		{tlsfile.Files{CA: filepath.Join(dir, "none")}, "read authorities"},
	} {
		if _, err := tlsfile.Open(t.Context(), tc.files, slog.New(slog.DiscardHandler)); err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%+v: got %v, want %q", tc.files, err, tc.want)
		}
	}
}
