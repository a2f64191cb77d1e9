package kvtracker_test

import (
	"context"
	"flag"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"connectrpc.com/connect"

	"github.com/kinference/kinference/internal/bus"
	"github.com/kinference/kinference/internal/daemon"
	"github.com/kinference/kinference/internal/natsd"
	"github.com/kinference/kinference/internal/rpc"
	"github.com/kinference/kinference/internal/testenv"
	"github.com/kinference/kinference/internal/vllm"
	kvtrackerv1 "github.com/kinference/kinference/proto/gen/kinference/kvtracker/v1"
	"github.com/kinference/kinference/proto/gen/kinference/kvtracker/v1/kvtrackerv1connect"
	"github.com/kinference/kinference/services/kvtracker"
)

func TestConfig(t *testing.T) {
	parse := func(args ...string) (*kvtracker.Service, error) {
		s := new(kvtracker.Service)
		fs := flag.NewFlagSet("kvtracker", flag.ContinueOnError)
		fs.SetOutput(io.Discard)
		s.Flags(fs)
		return s, fs.Parse(args)
	}
	s, err := parse()
	if err != nil || s.Mode != kvtracker.ModeTracker || s.Validate() != nil {
		t.Errorf("defaults: %+v, %v, %v", s.Config, err, s.Validate())
	}
	if s, err = parse("--mode", "relay", "--stream-file", "--stream-max-age", "1h"); err != nil || s.Mode != kvtracker.ModeRelay || !s.StreamFile {
		t.Errorf("flags: %+v, %v", s.Config, err)
	}
	bad := kvtracker.Service{Config: kvtracker.Config{Mode: "both", ScrapeInterval: -1, StreamMaxBytes: -1, StreamReplicas: 9, Shards: -1}}
	err = bad.Run(t.Context())
	for _, fault := range []string{"mode", "scrape-interval", "stream-max-bytes", "stream-replicas", "shards"} {
		if err == nil || !strings.Contains(err.Error(), fault) {
			t.Errorf("error %v does not name %s", err, fault)
		}
	}
}

// TestReadiness starts a tracker before NATS: it is ready, and answers, once it
// has applied all that the stream holds.
func TestReadiness(t *testing.T) {
	o := natsd.Options{Dir: t.TempDir(), Port: testenv.FreePort(t)}
	settings := bus.StreamSettings{File: true}
	server := startNATS(t, o)
	url := server.URL()
	conn, err := bus.Connect(t.Context(), url, t.Name())
	if err != nil {
		t.Fatal(err)
	}
	const messages = 3000
	var prompt []uint32
	for n := range uint64(messages) {
		e := vllm.NewEvent(vllm.BlockStored)
		e.Hashes, e.Tokens, e.BlockSize = []uint64{n + 1}, []uint32{uint32(n)}, 1
		e.Parent, e.HasParent = n, n > 0
		prompt = append(prompt, uint32(n))
		m := bus.KVMessage{Kind: bus.KindBatch, Epoch: "e", First: n, Last: n,
			Payloads: [][]byte{vllm.AppendBatch(nil, &vllm.Batch{Events: []vllm.Event{e}}, vllm.V0_24)}}
		w := bus.Worker{Namespace: "demo", Set: "sim", UID: "a"}
		if n == 0 || n == messages-1 { // makes the stream; waits for all of it
			_, err = conn.PublishKV(t.Context(), settings, w, &m)
		} else {
			_, err = conn.PublishKVAsync(w, &m)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	conn.Close()
	server.Stop()

	l := testenv.Listen(t)
	shell, err := daemon.NewShell(t.Context(), daemon.Settings{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(shell.Close)
	service := &kvtracker.Service{Config: kvtracker.Config{Listener: l, NATSURL: url, StreamFile: true}}
	processIn(t, shell.Context(context.Background(), "kvtracker"), service.Run)
	f := &fleet{t: t, admin: shell.Admin()}
	ctx, cancel := context.WithCancel(context.Background())
	t.Cleanup(cancel)
	f.client = rpc.Client(ctx, "http://"+l.Addr().String(), kvtrackerv1connect.NewKVTrackerServiceClient)

	status := func() int {
		rec := httptest.NewRecorder()
		f.admin.ServeHTTP(rec, httptest.NewRequest(http.MethodGet, "/readyz", nil))
		return rec.Code
	}
	unavailable := func() bool {
		_, err := f.client.Match(t.Context(), &kvtrackerv1.MatchRequest{})
		return connect.CodeOf(err) == connect.CodeUnavailable
	}
	f.until("answers", unavailable)
	if got := status(); got == http.StatusOK {
		t.Error("ready without NATS")
	}
	server = startNATS(t, o)
	t.Cleanup(server.Stop)
	f.until("ready", func() bool { return status() == http.StatusOK })
	if got := f.depth("a/0", 1, prompt); got != messages {
		t.Errorf("ready with %d blocks of %d", got, messages)
	}
}
