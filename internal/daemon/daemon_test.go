package daemon_test

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/kinference/kinference/internal/daemon"
)

// service records what Main gave it.
type service struct {
	url string
	n   int
	run func(context.Context) error
}

func (s *service) Flags(fs *flag.FlagSet) {
	fs.StringVar(&s.url, "nats-url", "default", "URL of NATS")
	fs.IntVar(&s.n, "n", 1, "a number")
}

func (s *service) Run(ctx context.Context) error {
	if s.run == nil {
		return nil
	}
	return s.run(ctx)
}

func TestMainSettings(t *testing.T) {
	for _, tc := range []struct {
		name     string
		args     []string
		env      map[string]string
		wantCode int
		wantURL  string
		wantErr  string
	}{
		{name: "defaults", wantURL: "default"},
		{name: "environment", env: map[string]string{"KINFERENCE_TEST_SVC_NATS_URL": "env"}, wantURL: "env"},
		{name: "flag wins", args: []string{"-nats-url", "flag"}, env: map[string]string{"KINFERENCE_TEST_SVC_NATS_URL": "env"}, wantURL: "flag"},
		{name: "all faults at once", args: []string{"stray"}, env: map[string]string{"KINFERENCE_TEST_SVC_N": "x"}, wantCode: 2, wantErr: "KINFERENCE_TEST_SVC_N"},
		{name: "unknown flag", args: []string{"-nope"}, wantCode: 2, wantErr: "nope"},
		{name: "bad level", args: []string{"-log-level", "loud"}, wantCode: 2, wantErr: "log-level"},
		{name: "bad format", args: []string{"-log-format", "xml"}, wantCode: 1, wantErr: "log-format"},
		{name: "help", args: []string{"-h"}, wantErr: "URL of NATS"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			for k, v := range tc.env {
				t.Setenv(k, v)
			}
			s := &service{}
			var out bytes.Buffer
			code := daemon.Main("test-svc", s, append([]string{"-admin-listen", ""}, tc.args...), &out)
			if code != tc.wantCode {
				t.Errorf("got exit code %d, want %d; output:\n%s", code, tc.wantCode, out.String())
			}
			if tc.wantURL != "" && s.url != tc.wantURL {
				t.Errorf("got url %q, want %q", s.url, tc.wantURL)
			}
			if !strings.Contains(out.String(), tc.wantErr) {
				t.Errorf("output lacks %q:\n%s", tc.wantErr, out.String())
			}
		})
	}
}

func TestMainReportsFailure(t *testing.T) {
	s := &service{run: func(context.Context) error { return errors.New("port taken") }}
	var out bytes.Buffer
	if code := daemon.Main("svc", s, []string{"-admin-listen", ""}, &out); code != 1 {
		t.Errorf("got exit code %d, want 1", code)
	}
	if !strings.Contains(out.String(), "port taken") {
		t.Errorf("log lacks the cause:\n%s", out.String())
	}
}

func get(t *testing.T, h http.Handler, path string) (int, string) {
	t.Helper()
	w := httptest.NewRecorder()
	h.ServeHTTP(w, httptest.NewRequest("GET", path, nil))
	body, err := io.ReadAll(w.Result().Body)
	if err != nil {
		t.Fatal(err)
	}
	return w.Code, string(body)
}

func TestReadinessIsThatOfAllServices(t *testing.T) {
	sh, err := daemon.NewShell(t.Context(), daemon.Settings{})
	if err != nil {
		t.Fatal(err)
	}
	defer sh.Close()
	a, b := sh.Context(t.Context(), "a"), sh.Context(t.Context(), "b")
	daemon.Ready(a, true)
	if code, body := get(t, sh.Admin(), "/readyz"); code != 503 || !strings.Contains(body, "b") || strings.Contains(body, "a,") {
		t.Errorf("one of two ready: got %d %q, want 503 naming b", code, body)
	}
	daemon.Ready(b, true)
	if code, _ := get(t, sh.Admin(), "/readyz"); code != 200 {
		t.Errorf("both ready: got %d, want 200", code)
	}
	daemon.Ready(a, false)
	if code, _ := get(t, sh.Admin(), "/readyz"); code != 503 {
		t.Errorf("one lost: got %d, want 503", code)
	}
	if code, _ := get(t, sh.Admin(), "/livez"); code != 200 {
		t.Errorf("livez: got %d, want 200", code)
	}
	if code, _ := get(t, sh.Admin(), "/debug/pprof/"); code != 404 {
		t.Errorf("pprof without its flag: got %d, want 404", code)
	}
}

func TestMetricsCarryTheInstruments(t *testing.T) {
	sh, err := daemon.NewShell(t.Context(), daemon.Settings{})
	if err != nil {
		t.Fatal(err)
	}
	defer sh.Close()
	c, err := daemon.Meter(sh.Context(t.Context(), "svc")).Int64Counter("kinference.test.count")
	if err != nil {
		t.Fatal(err)
	}
	c.Add(t.Context(), 3)
	if _, body := get(t, sh.Admin(), "/metrics"); !strings.Contains(body, "kinference_test_count_total") {
		t.Errorf("metrics lack the counter:\n%s", body)
	}
}

func TestWithoutShellEverythingIsSilent(t *testing.T) {
	ctx := t.Context()
	daemon.Ready(ctx, true)
	daemon.Logger(ctx).Info("nowhere")
	_, span := daemon.Tracer(ctx).Start(ctx, "nowhere")
	span.End()
	if _, err := daemon.Meter(ctx).Int64Counter("x"); err != nil {
		t.Error(err)
	}
	if got := daemon.DrainTimeout(ctx); got != daemon.DefaultDrainTimeout {
		t.Errorf("got drain timeout %v, want the default", got)
	}
}
