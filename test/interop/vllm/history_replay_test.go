package vllm_test

import (
	"bufio"
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/kinference/kinference/cmd/stack"
	"github.com/kinference/kinference/internal/rpc"
	"github.com/kinference/kinference/proto/gen/kinference/kvtracker/v1/kvtrackerv1connect"
	"github.com/kinference/kinference/test/interop/vllm/rig"
)

// TestReplayOfAFullBuffer has a relay that was away come back to an engine whose
// replay buffer is full, with the buffer's default size: more than fits into
// one answer, and more than the engine's socket holds. The publisher is vLLM's.
func TestReplayOfAFullBuffer(t *testing.T) {
	const buffer, blocks = 10_000, 4000
	env := rig.Require(t)
	events, replay := listenPort(t), listenPort(t)
	publish := publisher(t, env, events, replay, buffer, blocks)
	rec := record(t, env, map[string]string{"full": "tcp://127.0.0.1:" + events})
	dir := t.TempDir()
	set := fmt.Sprintf(`apiVersion: kinference.buoyant.io/v1alpha1
kind: InferenceWorkerSet
metadata: { name: qwen, namespace: test }
spec:
  models:
    - name: qwen
  endpoints:
    - { name: full, address: "127.0.0.1:9", kvEvents: "tcp://127.0.0.1:%s", kvReplay: "tcp://127.0.0.1:%s" }
`, events, replay)
	if err := os.WriteFile(filepath.Join(dir, "set.yaml"), []byte(set), 0o644); err != nil {
		t.Fatal(err)
	}
	log := &rig.Log{}
	st, err := stack.Start(t.Context(), stack.Options{ConfigDir: dir, Output: log, DrainTimeout: time.Second})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	t.Cleanup(func() {
		cancel()
		if err := st.Stop(); err != nil {
			t.Error(err)
		}
		if t.Failed() {
			t.Logf("the services wrote:\n%s", log.Tail(8<<10))
		}
	})
	c := &chain{t: t, rec: rec, tracker: rpc.Client(ctx, st.KVTrackerURL(), kvtrackerv1connect.NewKVTrackerServiceClient)}
	e := &rig.Engine{Options: rig.Options{Name: "full", Model: "qwen", BlockSize: 16}}
	done := make(chan struct{})
	go func() {
		defer close(done)
		c.watch(ctx)
	}()
	t.Cleanup(func() {
		cancel()
		<-done
	})
	applied := func(n int) time.Duration {
		t.Helper()
		began := time.Now()
		within(t, "the index has all batches", func() bool {
			s := c.state(e).GetIndex()
			return s.GetLive() && s.GetLastSeq() == int64(n)-1 && rec.batches("full") == n
		})
		return time.Since(began)
	}
	equal := func(first int) {
		t.Helper()
		life, _ := rec.life("full")
		want := life.knowable(first)
		got, err := c.held(e, rec.everything())
		if err != nil {
			t.Fatal(err)
		}
		index, s := contents{hashes: got}, c.state(e).GetIndex()
		if index.without(want) > 0 || want.without(index) > 0 || int(s.GetBlocks()) != want.entries || s.GetComplete() != (first == 0) {
			t.Errorf("from batch %d: %d blocks too many, %d are missing of %d; %v", first, index.without(want), want.without(index), len(want.hashes), s)
		}
	}

	applied(publish(5))
	if err := st.Halt("relay"); err != nil {
		t.Fatal(err)
	}
	n := publish(buffer - 10)
	if err := st.Resume("relay"); err != nil {
		t.Fatal(err)
	}
	t.Logf("%d batches that were missed are in the index %v after the start of the relay", n-5, applied(n).Round(time.Millisecond))
	equal(0)

	// And twice what it holds: the older half is lost.
	if err := st.Halt("relay"); err != nil {
		t.Fatal(err)
	}
	n = publish(2 * buffer)
	if err := st.Resume("relay"); err != nil {
		t.Fatal(err)
	}
	t.Logf("the last %d of %d batches are in the index %v after the start of the relay", buffer, 2*buffer, applied(n).Round(time.Millisecond))
	equal(n - buffer)

	// As fast as it can publish, with the relay there.
	began := time.Now()
	n = publish(buffer)
	t.Logf("%d batches were published in %v and in the index %v later", buffer, time.Since(began).Round(time.Millisecond), applied(n).Round(time.Millisecond))
	equal(n - 2*buffer)
}

// publisher starts testdata/publisher.py. The result has it publish and returns
// how many batches it published in all.
func publisher(t *testing.T, env rig.Env, events, replay string, buffer, blocks int) func(batches int) (all int) {
	t.Helper()
	cmd := exec.Command(filepath.Join(env.Venv, "bin", "python"), "testdata/publisher.py", events, replay, strconv.Itoa(buffer), strconv.Itoa(blocks))
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	var stderr strings.Builder
	cmd.Stderr = &stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		stdin.Close()
		if err := cmd.Wait(); err != nil {
			t.Errorf("publisher: %v %s", err, stderr.String())
		}
	})
	lines := bufio.NewScanner(stdout)
	for lines.Scan() && lines.Text() != "ready" { // what vLLM says while it is loaded
	}
	return func(batches int) int {
		t.Helper()
		fmt.Fprintln(stdin, batches)
		if !lines.Scan() {
			t.Fatal("the publisher ended")
		}
		all, err := strconv.Atoi(lines.Text())
		if err != nil {
			t.Fatal(err)
		}
		return all
	}
}

func listenPort(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	_, port, _ := net.SplitHostPort(l.Addr().String())
	return port
}
