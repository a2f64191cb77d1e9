package main

import (
	"context"
	"net/http"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kinference/kinference/internal/daemon"
	"github.com/kinference/kinference/internal/rpc"
	"github.com/kinference/kinference/internal/testenv"
	"github.com/kinference/kinference/internal/tlsfile"
	"github.com/kinference/kinference/proto/gen/kinference/admin/v1/adminv1connect"
)

// An admin API with a certificate of its own authority is asked by who knows that one.
func TestCAFile(t *testing.T) {
	dir, other := filepath.Join(t.TempDir(), "tls"), filepath.Join(t.TempDir(), "other")
	testenv.NewAuthority(t, "kinference").Secret(t, dir)
	testenv.NewAuthority(t, "other").Secret(t, other)
	sh, err := daemon.NewShell(t.Context(), daemon.Settings{TLS: tlsfile.Files{Cert: filepath.Join(dir, "tls.crt"), Key: filepath.Join(dir, "tls.key")}})
	if err != nil {
		t.Fatal(err)
	}
	defer sh.Close()
	ctx, stop := context.WithCancel(sh.Context(context.Background(), "router"))
	l := testenv.Listen(t)
	h := rpc.Mount[adminv1connect.AdminServiceHandler](ctx, adminv1connect.UnimplementedAdminServiceHandler{}, adminv1connect.NewAdminServiceHandler)
	done := make(chan error, 1)
	go func() { done <- rpc.ServeHTTP(ctx, l, &http.Server{Handler: h.Handler, TLSConfig: rpc.TLS(ctx)}) }()
	defer func() {
		stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
	}()
	at := "https://" + l.Addr().String()
	for _, tc := range []struct {
		name, env, want string
		args            []string
	}{
		{name: "its authority", args: []string{"--ca-file", filepath.Join(dir, "ca.crt")}, want: "not implemented"},
		{name: "by the environment", env: filepath.Join(dir, "ca.crt"), want: "not implemented"},
		{name: "another one", args: []string{"--ca-file", filepath.Join(other, "ca.crt")}, want: "certificate"},
		{name: "the system's", want: "certificate"},
		{name: "no file", args: []string{"--ca-file", filepath.Join(dir, "none")}, want: "read authorities"},
		{name: "half a certificate", args: []string{"--cert-file", filepath.Join(dir, "tls.crt")}, want: "go together"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Setenv(envCAFile, tc.env)
			out, err := kinfctlErr(t, append([]string{"status", "--admin", at}, tc.args...)...)
			if err == nil || !strings.Contains(err.Error()+out, tc.want) {
				t.Errorf("got %v, want %q", err, tc.want)
			}
		})
	}
}
