package rpc_test

import (
	"bytes"
	"context"
	"errors"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"go.uber.org/goleak"

	"github.com/kinference/kinference/internal/daemon"
	"github.com/kinference/kinference/internal/rpc"
	kvtrackerv1 "github.com/kinference/kinference/proto/gen/kinference/kvtracker/v1"
	"github.com/kinference/kinference/proto/gen/kinference/kvtracker/v1/kvtrackerv1connect"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// tracker answers Match with a function and watches until the caller leaves.
type tracker struct {
	kvtrackerv1connect.UnimplementedKVTrackerServiceHandler
	match func(context.Context) error
	watch chan struct{}
}

func (tr *tracker) Match(ctx context.Context, _ *kvtrackerv1.MatchRequest) (*kvtrackerv1.MatchResponse, error) {
	return &kvtrackerv1.MatchResponse{}, tr.match(ctx)
}

func (tr *tracker) WatchWorkers(ctx context.Context, _ *kvtrackerv1.WatchWorkersRequest, s *connect.ServerStream[kvtrackerv1.WatchWorkersResponse]) error {
	if err := s.Send(&kvtrackerv1.WatchWorkersResponse{Synced: true}); err != nil {
		return err
	}
	close(tr.watch)
	<-ctx.Done()
	return ctx.Err()
}

// serve runs tr until the returned stop is called, which waits for the end.
func serve(t *testing.T, tr *tracker, log *bytes.Buffer) (client kvtrackerv1connect.KVTrackerServiceClient, url string, stop func()) {
	t.Helper()
	sh, err := daemon.NewShell(t.Context(), daemon.Settings{Output: log, DrainTimeout: 5 * time.Second})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(sh.Context(context.Background(), "kvtracker"))
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() {
		done <- rpc.Serve(ctx, l, rpc.Mount[kvtrackerv1connect.KVTrackerServiceHandler](ctx, tr, kvtrackerv1connect.NewKVTrackerServiceHandler))
	}()
	clientCtx, closeClient := context.WithCancel(context.Background())
	url = "http://" + l.Addr().String()
	stop = func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Serve: %v", err)
		}
		closeClient()
		sh.Close()
	}
	return rpc.Client(clientCtx, url, kvtrackerv1connect.NewKVTrackerServiceClient), url, stop
}

func TestErrorsAtTheEdge(t *testing.T) {
	for _, tc := range []struct {
		name      string
		match     func(context.Context) error
		wantCode  connect.Code
		wantMsg   string
		wantRetry time.Duration
		wantLog   string
	}{
		{"meant for the peer", func(context.Context) error {
			return rpc.Error(connect.CodeUnavailable, "no worker is ready", 1500*time.Millisecond)
		}, connect.CodeUnavailable, "no worker is ready", 1500 * time.Millisecond, ""},
		{"cause stays here", func(context.Context) error { return errors.New("dial 10.1.2.3: secret detail") }, connect.CodeInternal, "internal error", 0, "secret detail"},
		{"panic", func(context.Context) error { panic("secret detail") }, connect.CodeInternal, "internal error", 0, "panicked"},
		{"canceled", func(context.Context) error { return context.Canceled }, connect.CodeCanceled, "canceled", 0, ""},
		{"deadline", func(context.Context) error { return context.DeadlineExceeded }, connect.CodeDeadlineExceeded, "deadline exceeded", 0, ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel() // HTTP/2 servers linger one second at the end
			var log bytes.Buffer
			client, _, stop := serve(t, &tracker{match: tc.match}, &log)
			_, err := client.Match(t.Context(), &kvtrackerv1.MatchRequest{})
			stop()
			if got := connect.CodeOf(err); got != tc.wantCode {
				t.Errorf("got code %v, want %v (%v)", got, tc.wantCode, err)
			}
			var ce *connect.Error
			if errors.As(err, &ce) && ce.Message() != tc.wantMsg {
				t.Errorf("got message %q, want %q", ce.Message(), tc.wantMsg)
			}
			if d, _ := rpc.RetryAfter(err); d != tc.wantRetry {
				t.Errorf("got retry after %v, want %v", d, tc.wantRetry)
			}
			if !strings.Contains(log.String(), tc.wantLog) {
				t.Errorf("log lacks %q:\n%s", tc.wantLog, log.String())
			}
		})
	}
}

func TestDrainEndsStreamsAndFinishesCalls(t *testing.T) {
	entered, release := make(chan struct{}), make(chan struct{})
	tr := &tracker{watch: make(chan struct{}), match: func(context.Context) error {
		close(entered)
		<-release
		return nil
	}}
	client, _, stop := serve(t, tr, new(bytes.Buffer))
	stream, err := client.WatchWorkers(t.Context(), &kvtrackerv1.WatchWorkersRequest{})
	if err != nil {
		t.Fatal(err)
	}
	<-tr.watch
	answered := make(chan error, 1)
	go func() {
		_, err := client.Match(context.Background(), &kvtrackerv1.MatchRequest{})
		answered <- err
	}()
	<-entered
	stopped := make(chan struct{})
	go func() { stop(); close(stopped) }()
	for stream.Receive() {
	}
	if got := connect.CodeOf(stream.Err()); got != connect.CodeUnavailable {
		t.Errorf("stream ended with %v, want unavailable", stream.Err())
	}
	stream.Close()
	close(release)
	if err := <-answered; err != nil {
		t.Errorf("call in progress: %v", err)
	}
	<-stopped
}

func TestHealthOverHTTP1(t *testing.T) {
	_, url, stop := serve(t, &tracker{}, new(bytes.Buffer))
	defer stop()
	resp, err := http.Post(url+"/grpc.health.v1.Health/Check", "application/json", strings.NewReader(`{"service":"kinference.kvtracker.v1.KVTrackerService"}`))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	defer http.DefaultClient.CloseIdleConnections()
	if resp.StatusCode != 200 {
		t.Errorf("got %s, want 200", resp.Status)
	}
}
