package rpc_test

import (
	"context"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kinference/kinference/internal/daemon"
	"github.com/kinference/kinference/internal/rpc"
	"github.com/kinference/kinference/internal/testenv"
	"github.com/kinference/kinference/internal/tlsfile"
	kvtrackerv1 "github.com/kinference/kinference/proto/gen/kinference/kvtracker/v1"
	"github.com/kinference/kinference/proto/gen/kinference/kvtracker/v1/kvtrackerv1connect"
)

// Services with certificates of one authority call each other; nobody else gets an
// answer, neither in clear text nor without a certificate. People may ask a server
// that is for them.
func TestTLS(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "tls")
	testenv.NewAuthority(t, "kinference").Secret(t, dir)
	other := filepath.Join(t.TempDir(), "other")
	testenv.NewAuthority(t, "other").Secret(t, other)
	files := func(dir string) tlsfile.Files {
		return tlsfile.Files{Cert: filepath.Join(dir, "tls.crt"), Key: filepath.Join(dir, "tls.key"), CA: filepath.Join(dir, "ca.crt")}
	}
	shell := func(s daemon.Settings) context.Context {
		sh, err := daemon.NewShell(t.Context(), s)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(sh.Close)
		ctx, cancel := context.WithCancel(sh.Context(context.Background(), "svc"))
		t.Cleanup(cancel)
		return ctx
	}
	if _, err := daemon.NewShell(t.Context(), daemon.Settings{TLS: tlsfile.Files{CA: files(dir).CA}, TLSCallers: true}); err == nil {
		t.Error("asks callers for what it has not itself")
	}
	ctx := shell(daemon.Settings{TLS: files(dir), TLSCallers: true, DrainTimeout: 5 * time.Second})
	ctx, stop := context.WithCancel(ctx)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	people, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	tr := &tracker{match: func(context.Context) error { return nil }, watch: make(chan struct{})}
	done := make(chan error, 2)
	mounted := rpc.Mount[kvtrackerv1connect.KVTrackerServiceHandler](ctx, tr, kvtrackerv1connect.NewKVTrackerServiceHandler)
	go func() { done <- rpc.Serve(ctx, l, mounted) }()
	go func() {
		done <- rpc.ServeHTTP(ctx, people, &http.Server{Handler: mounted.Handler, TLSConfig: rpc.TLS(ctx)})
	}()
	defer func() {
		stop()
		for range 2 {
			if err := <-done; err != nil {
				t.Error(err)
			}
		}
	}()
	for _, tc := range []struct {
		name, url string
		tls       tlsfile.Files
		want      string
	}{
		{"a service", "https://" + l.Addr().String(), files(dir), ""},
		{"in clear text", "http://" + l.Addr().String(), files(dir), "unavailable"},
		// Why is the server's to know: its alert may come after the connection's end.
		{"without a certificate", "https://" + l.Addr().String(), tlsfile.Files{CA: files(dir).CA}, ":"},
		{"of another authority", "https://" + l.Addr().String(), tlsfile.Files{Cert: files(other).Cert, Key: files(other).Key, CA: files(dir).CA}, ":"},
		{"that believes another one", "https://" + l.Addr().String(), files(other), "unknown authority"},
		{"with the system's authorities", "https://" + l.Addr().String(), tlsfile.Files{}, "certificate"},
		{"a person", "https://" + people.Addr().String(), tlsfile.Files{CA: files(dir).CA}, ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			client := rpc.Client(shell(daemon.Settings{TLS: tc.tls}), tc.url, kvtrackerv1connect.NewKVTrackerServiceClient)
			ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
			defer cancel()
			_, err := client.Match(ctx, &kvtrackerv1.MatchRequest{})
			if (err == nil) != (tc.want == "") || err != nil && !strings.Contains(err.Error(), tc.want) {
				t.Errorf("got %v, want %q", err, tc.want)
			}
		})
	}
}
